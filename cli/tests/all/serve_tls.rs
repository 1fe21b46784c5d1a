//! `diskwright serve` with certificates of both sides: who may come in, who may not, and what
//! SIGHUP changes.

use crate::certificates;
use crate::common::{Workshop, hears_hangups};
use crate::serving::{Serving, program, text, wait_until};
use nix::sys::signal::Signal;
use std::fs;

fn folder(shop: &Workshop, name: &str) -> String {
    let dir = shop.path(name);
    fs::create_dir_all(&dir).unwrap();
    certificates::write(&dir);
    dir.to_str().unwrap().to_owned()
}

fn shop() -> Workshop {
    let shop = Workshop::new();
    shop.ok("create disk.vhdx --size 64M");
    shop
}

#[test]
fn who_shows_the_right_certificate_comes_in() {
    let shop = shop();
    let (pki, strangers) = (folder(&shop, "pki"), folder(&shop, "strangers"));
    // With TLS a disk may be written over TCP.
    let Some(mut server) = Serving::start(&shop, &format!("serve disk.vhdx --nbd 0 --tls-certificates {pki}")) else {
        return;
    };
    let uri = server.uri("disk.vhdx");
    assert!(uri.starts_with("nbds://127.0.0.1:"), "{uri}");
    shop.ok(&format!("io '{uri}?tls-certificates={pki}' -c 'write -P 3 1M 1M' -c 'read -P 3 1M 1M' -c flush"));
    if let Some(output) = program(&shop, "nbdinfo", &["--size", &format!("{uri}?tls-certificates={pki}")]) {
        assert_eq!(text(&output), "67108864\n");
    }
    // In the clear.
    let plain = uri.replace("nbds:", "nbd:");
    let error = shop.fails(1, &format!("info '{plain}'"));
    assert!(error.contains("TLS"), "{error}");
    // One whose CA is another; one that trusts the server all the same, but is not trusted; one
    // without a certificate.
    shop.fails(1, &format!("info '{uri}?tls-certificates={strangers}'"));
    shop.fails(1, &format!("info '{uri}?tls-certificates={strangers}&tls-verify-peer=0'"));
    let nameless = shop.path("nameless");
    fs::create_dir(&nameless).unwrap();
    fs::copy(shop.path("pki/ca-cert.pem"), nameless.join("ca-cert.pem")).unwrap();
    let nameless = format!("{uri}?tls-certificates={}", nameless.display());
    shop.fails(1, &format!("info '{nameless}'"));
    assert!(server.is_running());
    shop.ok(&format!("io '{uri}?tls-certificates={pki}' -c 'read -P 3 1M 1M'"));
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    // Where clients need none, the one without may come.
    let line = format!("serve disk.vhdx --nbd 0 --tls-certificates {pki} --tls-any-client");
    let server = Serving::start(&shop, &line).unwrap();
    let nameless = nameless.replace(&uri, &server.uri("disk.vhdx"));
    shop.ok(&format!("io '{nameless}' -c 'read -P 3 1M 1M'"));
}

#[test]
fn unix_sockets_ask_for_tls_only_if_told_to() {
    let shop = shop();
    let pki = folder(&shop, "pki");
    let Some(server) = Serving::start(&shop, &format!("serve disk.vhdx --nbd ./s --tls-certificates {pki}")) else {
        return;
    };
    let uri = server.uri("disk.vhdx");
    shop.ok(&format!("info '{uri}'"));
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    let server =
        Serving::start(&shop, &format!("serve disk.vhdx --nbd ./s --tls-certificates {pki} --tls-on-unix")).unwrap();
    shop.fails(1, &format!("info '{uri}'"));
    let secure = server.uri("disk.vhdx");
    assert!(secure.starts_with("nbds+unix:///"), "{secure}");
    shop.ok(&format!("io '{secure}&tls-certificates={pki}&tls-hostname=localhost' -c 'write -P 1 0 1M'"));
}

#[test]
fn sighup_reads_the_certificates_anew() {
    if !hears_hangups() {
        return;
    }
    let shop = shop();
    let (pki, old) = (folder(&shop, "pki"), shop.path("old"));
    fs::create_dir(&old).unwrap();
    for entry in fs::read_dir(&pki).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), old.join(entry.file_name())).unwrap();
    }
    let old = old.to_str().unwrap();
    let Some(server) = Serving::start(&shop, &format!("serve disk.vhdx --nbd 0 --tls-certificates {pki}")) else {
        return;
    };
    let uri = server.uri("disk.vhdx");
    // Nonsense is refused, and what was there stays in use.
    let key = fs::read(shop.path("pki/server-key.pem")).unwrap();
    fs::write(shop.path("pki/server-key.pem"), "nonsense").unwrap();
    server.signal(Signal::SIGHUP);
    server.wait_for_log("certificates not reloaded");
    fs::write(shop.path("pki/server-key.pem"), key).unwrap();
    shop.ok(&format!("info '{uri}?tls-certificates={old}'"));
    folder(&shop, "pki");
    server.signal(Signal::SIGHUP);
    server.wait_for_log("certificates reloaded");
    wait_until("the old ones are good for nothing", || {
        shop.run(&format!("info '{uri}?tls-certificates={old}'")).code == Some(1)
    });
    shop.ok(&format!("info '{uri}?tls-certificates={pki}'"));
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    let error = shop.fails(1, "serve disk.vhdx --nbd 0 --tls-certificates nowhere");
    assert!(error.contains("nowhere"), "{error}");
}
