//! `serve --nvme`: what it announces, what it refuses, and a host that is not one. What hosts do
//! with the disks is in `guest.rs` and in the tests of `serve/`.

use crate::common::Workshop;
use crate::serving::{Serving, page};
use nix::sys::signal::Signal;
use std::{
    io::{Read, Write},
    net::TcpStream,
};

const SUBSYSTEM: &str = "nqn.2026-01.org.example:disks";

fn shop_with(names: &[&str]) -> Workshop {
    let shop = Workshop::new();
    for name in names {
        shop.ok(&format!("create {name} --size 64M"));
    }
    shop
}

#[test]
fn disks_are_namespaces_of_one_subsystem() {
    let shop = shop_with(&["a.vhdx", "b.vhd"]);
    let line =
        format!("serve a.vhdx log=b.vhd --nvme 0 --nvme-subsystem {SUBSYSTEM} --read-only --metrics 0 --nbd ./s");
    let Some(server) = Serving::start(&shop, &line) else { return };
    let exports = server.said["exports"].as_array().unwrap();
    let places: Vec<&str> = exports.iter().map(|export| export["nvme"][0].as_str().unwrap()).collect();
    let address = places[0].trim_start_matches("nvme://").split('/').next().unwrap().to_owned();
    assert!(address.starts_with("127.0.0.1:") && !address.ends_with(":0"), "{address}");
    assert_eq!(places[0], format!("nvme://{address}/{SUBSYSTEM}?nsid=1"));
    assert_eq!(places[1], format!("nvme://{address}/{SUBSYSTEM}?nsid=2"));
    assert!(exports[0]["uris"][0].as_str().unwrap().starts_with("nbd+unix:"), "NBD is served too");
    // Something else that connects is told so (a TermReq, type 3), and the server goes on.
    let mut stream = TcpStream::connect(&address).unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: disks\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert_eq!(answer.first(), Some(&3));
    server.wait_for_log("a PDU of type 0x47 is not expected here");
    let metrics = page(&format!("http://{}/metrics", server.said["metrics"].as_str().unwrap()));
    for line in ["diskwright_nvme_connections_broken_total 1", "diskwright_nbd_connections 0"] {
        assert!(metrics.contains(line), "no {line:?} in {metrics}");
    }
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
}

#[test]
fn the_default_name_of_the_subsystem_stays() {
    let shop = shop_with(&["a.vhdx"]);
    let name = || {
        let server = Serving::start(&shop, "serve a.vhdx --nvme localhost:0 --read-only")?;
        assert_eq!(server.said["exports"][0]["uris"], serde_json::json!([]), "NBD is served only if it is asked for");
        let place = server.said["exports"][0]["nvme"][0].as_str().unwrap().to_owned();
        assert_eq!(server.stop(Signal::SIGTERM), Some(0));
        place.split('/').nth(3).map(str::to_owned)
    };
    let (Some(first), Some(second)) = (name(), name()) else { return };
    assert!(first.starts_with("nqn.2014-08.org.nvmexpress:uuid:"), "{first}");
    assert_eq!(first, second);
}

#[test]
fn what_is_refused() {
    let shop = shop_with(&["a.vhdx"]);
    for (code, line, words) in [
        (1, "serve a.vhdx --nvme 0", "ask for authentication (--secrets), or allow it with --insecure-writes"),
        (2, "serve a.vhdx --nvme ./socket", "its clients do not use unix sockets"),
        (2, "serve a.vhdx --nvme 0 --nvme-subsystem disks", "does not begin with nqn.YYYY-MM."),
        (2, "serve a.vhdx --nvme-subsystem nqn.2026-01.org.example:disks", "--nvme"),
        (2, "serve a.vhdx --nvme 0 --tls-certificates .", "about NBD, which is not served"),
    ] {
        let error = shop.fails(code, line);
        assert!(error.contains(words), "{line}: {error}");
    }
    shop.ok("check a.vhdx");
}

#[test]
fn a_namespace_is_a_disk_wherever_a_file_is_taken() {
    let shop = shop_with(&["a.vhdx", "b.vhdx"]);
    shop.ok("io a.vhdx -c 'write -P 7 3M 1M' -c flush");
    let line = format!("serve a.vhdx b.vhdx --nvme 0 --nvme-subsystem {SUBSYSTEM} --insecure-writes");
    let Some(server) = Serving::start(&shop, &line) else { return };
    let uri = |index: usize| server.said["exports"][index]["nvme"][0].as_str().unwrap().to_owned();
    let (a, b) = (uri(0), uri(1));
    let info = shop.json(&format!("info '{a}'"));
    assert_eq!((&info["schema"], &info["nsid"]), (&"diskwright.info-namespace/1".into(), &1.into()));
    assert_eq!((&info["virtual_size"], &info["read_only"]), (&(64 << 20).into(), &false.into()));
    let text = shop.ok(&format!("info '{b}'"));
    assert!(text.contains("namespace          2\n") && text.contains(SUBSYSTEM), "{text}");
    shop.ok(&format!("io '{a}' -c 'read -P 7 3M 1M' -c 'write -P 9 5M 64k' -c 'discard 3M 4k' -c flush"));
    shop.ok(&format!("convert '{a}' copy.vhdx --verify"));
    shop.ok("io copy.vhdx -c 'read -P 9 5M 64k' -c 'read -P 0 3M 4k'");
    shop.ok(&format!("convert copy.vhdx '{b}' --verify"));
    assert!(shop.ok(&format!("compare '{a}' '{b}'")).contains("identical"));
    let map = shop.json(&format!("map '{a}'"));
    assert_eq!(map["extents"][0]["file"], a.as_str());
    // Two targets of one thread.
    let run = format!(
        "lab run '{a}' '{b}' --across-targets --random-percent 100 --count 2000 --read-percent 50 --destroy-data"
    );
    let said = shop.ok(&run);
    assert!(said.contains("nvme namespace"), "{said}");
    let whole = a.replace("?nsid=1", "");
    let error = shop.fails(1, &format!("info '{whole}'"));
    assert!(error.contains("has the namespaces [1, 2]; choose one with ?nsid=N"), "{error}");
    let error = shop.fails(1, &format!("check '{a}'"));
    assert!(error.contains("only a disk in a file"), "{error}");
    let error = shop.fails(1, "info 'nvme://127.0.0.1/disks'");
    assert!(error.contains("is not an NQN"), "{error}");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    shop.ok("check a.vhdx b.vhdx");
    let error = shop.fails(1, &format!("info '{a}'"));
    assert!(error.contains("cannot connect") && error.contains("check that the target is running"), "{error}");
}
