//! TLS with certificates on both sides: libnbd's programs with a valid certificate, with one of an
//! unknown authority, and without TLS.

use crate::certificates;
use crate::common::memory;
use diskwright_nbd::tls;
use diskwright_serve::{
    ThreadError, nbd,
    net::{Address, Export, Listener, ServeError, Server, ServerOptions},
};
use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

fn start(dir: &Path) -> Option<(Server, u16)> {
    let export = Export { name: "m".into(), description: String::new(), device: memory(8 << 20, true) };
    let listener = Listener::bind(&Address::Tcp("127.0.0.1".into(), 0)).unwrap();
    let options = ServerOptions { tls: Some(tls::server(dir, true).unwrap()), ..ServerOptions::default() };
    match nbd::start(vec![export], vec![listener], options) {
        Ok(server) => {
            let Address::Tcp(_, port) = server.addresses()[0] else { panic!("not TCP") };
            Some((server, port))
        }
        Err(ServeError::Thread(ThreadError::Ring { source })) => {
            println!("skipped: no io_uring: {source}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Otherwise a writable disk would be served in plain text as if it had TLS.
#[test]
fn a_protocol_without_tls_refuses_to_be_given_certificates() {
    let dir = tempfile::tempdir().unwrap();
    certificates::write(dir.path());
    let listener = Listener::bind(&Address::Tcp("127.0.0.1".into(), 0)).unwrap();
    let export = Export { name: "m".into(), description: String::new(), device: memory(1 << 20, true) };
    let tls = tls::server(dir.path(), true).unwrap();
    let options = ServerOptions { tls: Some(tls), ..ServerOptions::default() };
    let refused = diskwright_serve::nvme::start("nqn.2026-01.org.example:d", vec![export], vec![listener], options);
    assert!(matches!(refused, Err(ServeError::NoTls)));
}

/// Runs a program. Prints that it is skipped and returns `None` if it is not installed.
fn program(name: &str, args: &[&str]) -> Option<Output> {
    match Command::new(name).args(args).output() {
        Ok(output) => Some(output),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("skipped: {name} is not installed");
            None
        }
        Err(error) => panic!("{name}: {error}"),
    }
}

#[test]
fn libnbd_connects_only_with_a_valid_certificate() {
    let (dir, strangers) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    certificates::write(dir.path());
    certificates::write(strangers.path());
    let Some((server, port)) = start(dir.path()) else { return };
    let uri = |scheme: &str, dir: &Path| format!("{scheme}://localhost:{port}/m?tls-certificates={}", dir.display());
    let copy = dir.path().join("copy");
    let Some(copied) = program("nbdcopy", &[&uri("nbds", dir.path()), copy.to_str().unwrap()]) else { return };
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
    let expected: Vec<u8> = (0..8usize << 20).map(|n| (n % 251) as u8 ^ (n >> 12) as u8).collect();
    assert!(fs::read(&copy).unwrap() == expected);
    let zeros = dir.path().join("other");
    fs::write(&zeros, vec![0x5a; 8 << 20]).unwrap();
    let copied = program("nbdcopy", &["--flush", zeros.to_str().unwrap(), &uri("nbds", dir.path())]).unwrap();
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
    // Without TLS, and with a certificate of an unknown authority.
    let plain = program("nbdinfo", &[&uri("nbd", dir.path())]).unwrap();
    assert!(!plain.status.success());
    let mixed = tempfile::tempdir().unwrap();
    for file in ["client-cert.pem", "client-key.pem"] {
        fs::copy(strangers.path().join(file), mixed.path().join(file)).unwrap();
    }
    fs::copy(dir.path().join("ca-cert.pem"), mixed.path().join("ca-cert.pem")).unwrap();
    let stranger = program("nbdinfo", &["--size", &uri("nbds", mixed.path())]).unwrap();
    assert!(!stranger.status.success(), "{}", String::from_utf8_lossy(&stranger.stdout));
    // New certificates apply to connections from now on.
    server.set_tls(tls::server(strangers.path(), true).unwrap());
    let old = program("nbdinfo", &["--size", &uri("nbds", dir.path())]).unwrap();
    assert!(!old.status.success());
    let new = program("nbdinfo", &["--size", &uri("nbds", strangers.path())]).unwrap();
    assert!(new.status.success(), "{}", String::from_utf8_lossy(&new.stderr));
    assert!(server.is_well());
    server.stop().unwrap();
}
