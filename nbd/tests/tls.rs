//! TLS with certificates of client and server, against nbdkit and qemu-nbd.

mod certificates;
mod common;

use common::{Server, nbdkit_in, start_in};
use diskwright_nbd::{ClientError, NbdDevice, NbdUri, uri::TlsParameters};
use diskwright_store::{Blocking, EngineKind};
use std::{fs, path::Path};
use tempfile::TempDir;

fn uri(server: &Server, dir: &Path) -> NbdUri {
    let tls = TlsParameters { certificates: Some(dir.to_owned()), ..TlsParameters::default() };
    NbdUri { tls: Some(tls), ..server.uri() }
}

fn exercise(uri: &NbdUri) {
    let device = NbdDevice::open(uri, true).unwrap();
    assert!(device.export().tls.as_deref().is_some_and(|tls| tls.starts_with("TLS 1.")), "{:?}", device.export().tls);
    let mut queue = Blocking::open(&device, EngineKind::Auto).unwrap();
    let data: Vec<u8> = (0..5 << 20).map(|at: u32| (at % 251) as u8).collect();
    queue.write(512, &data, true).unwrap();
    queue.write_zeroes(512, 4096).unwrap();
    let mut found = vec![0; data.len()];
    queue.read(512, &mut found).unwrap();
    assert!(found[..4096].iter().all(|&byte| byte == 0) && found[4096..] == data[4096..]);
}

#[test]
fn nbdkit_over_tls() {
    let dir = TempDir::new().unwrap();
    certificates::write(dir.path());
    let strangers = TempDir::new().unwrap();
    certificates::write(strangers.path());
    let args = ["--tls=require", "--tls-certificates=DIR", "--tls-verify-peer", "memory", "16M"];
    let Some(server) = nbdkit_in(dir, &args) else { return };
    let dir = server.dir.path();
    exercise(&uri(&server, dir));
    // An unencrypted connection to a server that requires TLS.
    let error = NbdDevice::open(&server.uri(), true).unwrap_err();
    assert!(matches!(error, ClientError::TlsMismatch { .. }), "{error}");
    // A different CA: the client does not trust the server.
    let error = NbdDevice::open(&uri(&server, strangers.path()), true).unwrap_err();
    assert!(matches!(error, ClientError::Tls { .. }), "{error}");
    // A wrong host name.
    let mut other = uri(&server, dir);
    other.tls.as_mut().unwrap().hostname = Some("elsewhere.example".into());
    let error = NbdDevice::open(&other, true).unwrap_err();
    assert!(matches!(error, ClientError::Tls { .. }), "{error}");
    // The client accepts any server, but the server does not trust the client.
    let mut other = uri(&server, strangers.path());
    other.tls.as_mut().unwrap().trust_anyone = true;
    assert!(NbdDevice::open(&other, true).is_err());
    // A folder without certificates.
    let empty = TempDir::new().unwrap();
    let error = NbdDevice::open(&uri(&server, empty.path()), true).unwrap_err();
    assert!(error.to_string().contains("ca-cert.pem"), "{error}");
    fs::write(empty.path().join("ca-cert.pem"), "nonsense").unwrap();
    let error = NbdDevice::open(&uri(&server, empty.path()), true).unwrap_err();
    assert!(error.to_string().contains("contains no certificate"), "{error}");
}

#[test]
fn qemu_nbd_over_tls() {
    let dir = TempDir::new().unwrap();
    certificates::write(dir.path());
    fs::File::create(dir.path().join("disk.raw")).unwrap().set_len(16 << 20).unwrap();
    let args = [
        "--persistent",
        "-k",
        "SOCKET",
        "--object",
        "tls-creds-x509,id=tls0,endpoint=server,dir=DIR,verify-peer=on",
        "--tls-creds",
        "tls0",
        "-f",
        "raw",
        "DIR/disk.raw",
    ];
    let Some(server) = start_in(dir, "qemu-nbd", &args) else { return };
    exercise(&uri(&server, server.dir.path()));
}

#[test]
fn a_servers_configuration() {
    let dir = TempDir::new().unwrap();
    certificates::write(dir.path());
    for verify_clients in [false, true] {
        diskwright_nbd::tls::server(dir.path(), verify_clients).unwrap();
    }
    fs::remove_file(dir.path().join("server-key.pem")).unwrap();
    let error = diskwright_nbd::tls::server(dir.path(), false).unwrap_err();
    assert!(error.to_string().contains("server-key.pem"), "{error}");
}
