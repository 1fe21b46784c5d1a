//! `diskwright serve`: where it listens, what it announces, who comes in, how it ends.

use crate::common::Workshop;
use crate::serving;
use crate::serving::{Serving, page, wait_until};
use diskwright_nbd::{NbdDevice, NbdUri};
use nix::sys::signal::Signal;
use std::{
    fs,
    os::{
        fd::OwnedFd,
        unix::{
            fs::FileTypeExt,
            net::{UnixDatagram, UnixListener, UnixStream},
        },
    },
    process::{Command, Stdio},
};

fn shop_with(names: &[&str]) -> Workshop {
    let shop = Workshop::new();
    for name in names {
        shop.ok(&format!("create {name} --size 64M"));
        shop.ok(&format!("io {name} -c 'write -P 7 3M 1M' -c flush"));
    }
    shop
}

#[test]
fn several_disks_on_a_unix_socket() {
    let shop = shop_with(&["db.vhdx", "log.vhd"]);
    let Some(server) = Serving::start(&shop, "serve data=db.vhdx log.vhd --nbd ./s --description disks") else {
        return;
    };
    assert_eq!(server.said["schema"], "diskwright.serve/1");
    let exports = server.said["exports"].as_array().unwrap();
    assert_eq!(exports.len(), 2);
    assert_eq!((&exports[0]["name"], &exports[0]["virtual_size"]), (&"data".into(), &(64 << 20).into()));
    for name in ["data", "log.vhd"] {
        let uri = server.uri(name);
        assert!(uri.starts_with("nbd+unix:///"), "{uri}");
        shop.ok(&format!("io '{uri}' -c 'read -P 7 3M 1M' -c 'write -P 9 5M 64k' -c flush"));
        let info = shop.json(&format!("info '{uri}'"));
        assert_eq!((&info["export"], &info["read_only"]), (&name.into(), &false.into()), "{info}");
    }
    // Only its owner may come near.
    let socket = fs::metadata(shop.path("s")).unwrap();
    assert!(socket.file_type().is_socket());
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&socket.permissions()) & 0o777, 0o600);
    // Without a name there is no telling which.
    let path = shop.path("s");
    let error = shop.fails(1, &format!("info 'nbd+unix:///?socket={}'", path.display()));
    assert!(error.contains("\"data\"") && error.contains("\"log.vhd\""), "{error}");
    let locked = shop.fails(1, "io db.vhdx -c 'write 0 4k'");
    assert!(locked.contains("in use"), "{locked}");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    assert!(!path.exists(), "the socket stays behind");
    shop.ok("io db.vhdx --read-only -c 'read -P 9 5M 64k'");
}

#[test]
fn what_the_protocol_cannot_carry_is_wrong_usage() {
    let shop = Workshop::new();
    let long = "a".repeat(4097);
    for line in [format!("serve disk.vhdx --description {long}"), format!("serve {long}=disk.vhdx")] {
        let error = shop.fails(2, &line);
        assert!(error.contains("at most 4096 bytes"), "{error}");
    }
}

#[test]
fn it_listens_on_loopback_unless_told_otherwise() {
    let shop = shop_with(&["disk.vhdx"]);
    let Some(server) = Serving::start(&shop, "serve disk.vhdx --read-only --nbd 0") else { return };
    let address = server.said["addresses"][0].as_str().unwrap().to_owned();
    let (host, port) = address.rsplit_once(':').unwrap();
    assert_eq!(host, "127.0.0.1");
    // What the kernel says: state 0A listens, 0100007F is 127.0.0.1.
    let wanted = format!("0100007F:{:04X}", port.parse::<u16>().unwrap());
    let table = fs::read_to_string("/proc/net/tcp").unwrap();
    let line = table.lines().find(|line| line.contains(&wanted) && line.contains(" 0A ")).expect("it listens");
    assert!(line.split_whitespace().nth(1) == Some(wanted.as_str()), "{line}");
    shop.ok(&format!("io '{}' --read-only -c 'read -P 7 3M 1M'", server.uri("disk.vhdx")));
    // A second server finds the port in use.
    let error = shop.fails(1, &format!("serve disk.vhdx --read-only --nbd {address}"));
    assert!(error.contains("in use") && error.contains("another port"), "{error}");
    assert_eq!(server.stop(Signal::SIGINT), Some(0));
    let Some(server) = Serving::start(&shop, "serve disk.vhdx --read-only --nbd 0.0.0.0:0") else { return };
    assert!(server.said["addresses"][0].as_str().unwrap().starts_with("0.0.0.0:"), "{}", server.said);
}

#[test]
fn no_disk_is_writable_over_tcp_without_tls() {
    let shop = shop_with(&["disk.vhdx"]);
    let error = shop.fails(1, "serve disk.vhdx --nbd 0");
    for words in ["TCP without TLS", "read-only", "--tls-certificates", "--insecure-writes"] {
        assert!(error.contains(words), "{error}");
    }
    let Some(server) = Serving::start(&shop, "serve disk.vhdx --nbd 0 --insecure-writes") else { return };
    shop.ok(&format!("io '{}' -c 'write -P 5 0 64k'", server.uri("disk.vhdx")));
    // Nobody has flushed: the end does.
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    shop.ok("io disk.vhdx --read-only -c 'read -P 5 0 64k' -c 'read -P 7 3M 1M'");
    shop.ok("check disk.vhdx");
}

#[test]
fn read_only_and_ephemeral_leave_every_byte_as_it_was() {
    let shop = shop_with(&["disk.vhdx"]);
    let before = fs::read(shop.path("disk.vhdx")).unwrap();
    let Some(server) = Serving::start(&shop, "serve disk.vhdx --read-only --nbd ./s") else { return };
    let uri = server.uri("disk.vhdx");
    let error = shop.fails(1, &format!("io '{uri}' -c 'write 0 4k'"));
    assert!(error.contains("read-only"), "{error}");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    // Writes of one client are there for the next, and gone with the server.
    let Some(server) = Serving::start(&shop, "serve disk.vhdx --ephemeral --nbd ./s --ephemeral-dir .") else { return };
    shop.ok(&format!("io '{uri}' -c 'write -P 1 0 8M' -c flush"));
    shop.ok(&format!("io '{uri}' -c 'read -P 1 0 8M'"));
    let two_see_it = Serving::start(&shop, "serve disk.vhdx --ephemeral --nbd ./t").unwrap();
    shop.ok(&format!("io '{}' -c 'read -P 7 3M 1M'", two_see_it.uri("disk.vhdx")));
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    assert_eq!(two_see_it.stop(Signal::SIGTERM), Some(0));
    assert!(fs::read(shop.path("disk.vhdx")).unwrap() == before, "the disk was changed");
}

#[test]
fn a_place_that_is_taken() {
    let shop = shop_with(&["disk.vhdx"]);
    fs::write(shop.path("precious"), "bytes").unwrap();
    let error = shop.fails(1, "serve disk.vhdx --nbd ./precious");
    assert!(error.contains("precious") && error.contains("not a socket"), "{error}");
    assert_eq!(fs::read(shop.path("precious")).unwrap(), b"bytes");
    let Some(server) = Serving::start(&shop, "serve disk.vhdx --read-only --nbd ./s") else { return };
    let error = shop.fails(1, "serve disk.vhdx --read-only --nbd ./s");
    assert!(error.contains("another server listens"), "{error}");
    // One that was killed leaves its socket, and the next takes its place.
    server.stop(Signal::SIGKILL);
    // The kernel takes the ring, and the listener with it, apart some time after its process has
    // gone.
    wait_until("nobody listens any more", || UnixStream::connect(shop.path("s")).is_err());
    assert!(shop.path("s").exists());
    let server = Serving::start(&shop, "serve disk.vhdx --read-only --nbd ./s").unwrap();
    shop.ok(&format!("io '{}' --read-only -c 'read -P 7 3M 1M'", server.uri("disk.vhdx")));
    let error = shop.fails(1, "serve missing.vhdx --nbd ./t");
    assert!(error.contains("missing.vhdx") && error.contains("No such file"), "{error}");
    let error = shop.fails(1, "serve x=disk.vhdx x=disk.vhdx --read-only --nbd ./t");
    assert!(error.contains("\"x\""), "{error}");
}

#[test]
fn only_who_is_allowed_comes_in() {
    let shop = shop_with(&["disk.vhdx"]);
    let line = "serve disk.vhdx --read-only --nbd 0 --allow 10.0.0.0/8 --allow 192.168.7.1";
    let Some(server) = Serving::start(&shop, line) else { return };
    shop.fails(1, &format!("info '{}'", server.uri("disk.vhdx")));
    server.wait_for_log("not on the allow-list");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    let server = Serving::start(&shop, "serve disk.vhdx --read-only --nbd 0 --allow 127.0.0.0/8").unwrap();
    shop.ok(&format!("info '{}'", server.uri("disk.vhdx")));
}

#[test]
fn more_clients_than_may_be_are_refused() {
    let shop = shop_with(&["disk.vhdx"]);
    let Some(server) = Serving::start(&shop, "serve disk.vhdx --nbd ./s --connections 1 --progress") else { return };
    let first = UnixStream::connect(shop.path("s")).unwrap();
    let uri = server.uri("disk.vhdx");
    wait_until("the second is refused", || shop.run(&format!("info '{uri}'")).code == Some(1));
    server.wait_for_log("the maximum number of connections is reached");
    drop(first);
    wait_until("there is room again", || shop.run(&format!("info '{uri}'")).code == Some(0));
    // The live line, which comes every five seconds where there is no terminal.
    server.wait_for_log("connections, ");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
}

#[test]
fn metrics_tell_what_was_done() {
    let shop = shop_with(&["disk.vhdx"]);
    let Some(server) = Serving::start(&shop, "serve disk.vhdx --nbd ./s --metrics 0") else { return };
    let uri = server.uri("disk.vhdx");
    shop.ok(&format!("io '{uri}' -c 'write -P 1 0 1M' -c 'read 0 1M' -c 'read 3M 4k' -c flush"));
    let url = format!("http://{}/metrics", server.said["metrics"].as_str().unwrap());
    let page = page(&url);
    let value = |name: &str| -> f64 {
        let line = page.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}\n{page}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert_eq!(value("diskwright_export_size_bytes{export=\"disk.vhdx\"}"), f64::from(64 << 20));
    assert!(value("diskwright_export_allocated_bytes{export=\"disk.vhdx\"}") > 0.0);
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        assert!(line.rsplit_once(' ').is_some_and(|(_, value)| value.parse::<f64>().is_ok()), "{line}");
    }
    let names: Vec<&str> = page.lines().filter(|line| line.starts_with("# TYPE")).collect();
    insta::assert_snapshot!("metric_names", names.join("\n"));
}

#[test]
fn a_service_manager_hands_the_socket_over_and_is_told() {
    let shop = shop_with(&["disk.vhdx"]);
    let socket = shop.path("activated");
    let listener = OwnedFd::from(UnixListener::bind(&socket).unwrap());
    let told = UnixDatagram::bind(shop.path("notify")).unwrap();
    told.set_read_timeout(Some(serving::PATIENCE)).unwrap();
    // The socket is descriptor 3, and the number of the process that it is meant for is that of the
    // shell.
    let script = "exec 3<&0 </dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec \"$0\" serve disk.vhdx \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_diskwright")]).current_dir(shop.path(""));
    command.stdin(Stdio::from(listener)).env("NOTIFY_SOCKET", shop.path("notify"));
    let Some(server) = Serving::started(&shop, command) else { return };
    let hear = || {
        let mut message = [0; 256];
        let len = told.recv(&mut message).expect("news");
        String::from_utf8_lossy(&message[..len]).into_owned()
    };
    assert!(hear().contains("READY=1"));
    assert_eq!(server.said["addresses"][0], socket.to_str().unwrap());
    shop.ok(&format!("io '{}' -c 'read -P 7 3M 1M'", server.uri("disk.vhdx")));
    server.signal(Signal::SIGTERM);
    assert!(hear().contains("STOPPING=1"));
    assert_eq!(server.wait(), Some(0));
    // Who made it removes it.
    assert!(socket.exists());
}

#[test]
fn one_that_was_killed_can_be_started_again_at_once() {
    let shop = shop_with(&["disk.vhdx", "other.vhdx"]);
    let mut line = "serve disk.vhdx --nbd ./s --nbd 127.0.0.1:0 --insecure-writes".to_owned();
    for _ in 0..5 {
        let Some(server) = Serving::start(&shop, &line) else { return };
        // Clients that stay, so that receives on their sockets are under way in its ring, as the
        // accepts are.
        let uri = NbdUri::unix(shop.path("s"), "disk.vhdx");
        let clients = [0; 4].map(|_| NbdDevice::open(&uri, true).unwrap());
        let port = server.said["addresses"][1].as_str().unwrap();
        line = format!("serve disk.vhdx --nbd ./s --nbd {port} --insecure-writes");
        assert_eq!(server.stop(Signal::SIGKILL), None);
        drop(clients);
    }
    let server = Serving::start(&shop, &line).unwrap();
    // One that lives is in the way all the same.
    let taken = shop.fails(1, "serve other.vhdx --nbd ./s");
    assert!(taken.contains("another server listens"), "{taken}");
    let locked = shop.fails(1, "io disk.vhdx -c 'write 0 4k'");
    assert!(locked.contains("in use by diskwright"), "{locked}");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
}

#[test]
fn the_log_can_be_read_by_programs() {
    let shop = shop_with(&["disk.vhdx"]);
    let Some(server) = Serving::start(&shop, "serve disk.vhdx --nbd ./s --log-format json") else { return };
    shop.ok(&format!("info '{}'", server.uri("disk.vhdx")));
    server.wait_for_log("\"closed\"");
    for line in server.log().lines() {
        let event: serde_json::Value = serde_json::from_str(line).expect("one document a line");
        assert!(event["level"].is_string() && event["timestamp"].is_string(), "{event}");
    }
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    let quiet = Serving::start(&shop, "serve disk.vhdx --nbd ./t --quiet").unwrap();
    shop.ok(&format!("info '{}'", quiet.uri("disk.vhdx")));
    assert_eq!(quiet.log(), "");
}
