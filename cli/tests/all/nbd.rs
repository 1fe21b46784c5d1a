//! NBD URIs where a FILE can stand: `info`, `map`, `io`, `compare`, `convert`, against servers that
//! others wrote.

use crate::common::Workshop;
use std::{
    fs,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// A server, listening on `NAME.sock` in the workshop.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a server in the workshop, or skips by name.
fn serve(shop: &Workshop, name: &str, program: &str, args: &str) -> Option<Server> {
    let socket = shop.path(&format!("{name}.sock"));
    let line = args.replace("SOCKET", &socket.to_string_lossy());
    let started = Command::new(program)
        .args(line.split_whitespace())
        .current_dir(shop.path(""))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut child = match started {
        Ok(child) => Server(child),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("skipped: {program} is not installed");
            return None;
        }
        Err(error) => panic!("{program}: {error}"),
    };
    let start = Instant::now();
    // Not by connecting: qemu-nbd takes one client.
    let listens = || {
        let table = fs::read_to_string("/proc/net/unix").unwrap();
        let path = socket.to_string_lossy();
        table.lines().any(|line| line.ends_with(&*path) && line.split_whitespace().nth(3) == Some("00010000"))
    };
    while !listens() {
        assert!(child.0.try_wait().unwrap().is_none(), "{program} {line} ended");
        assert!(start.elapsed() < Duration::from_secs(60), "{program} {line} does not listen");
        thread::sleep(Duration::from_millis(10));
    }
    Some(child)
}

fn qemu_nbd(shop: &Workshop, name: &str, file: &str) -> Option<Server> {
    serve(shop, name, "qemu-nbd", &format!("--persistent -k SOCKET -f raw {file}"))
}

/// The URI of a server's default export.
fn uri(name: &str) -> String {
    format!("'nbd+unix:///?socket={name}.sock'")
}

const FILL: &str = "-c 'write -P 1 0 3M' -c 'write -P 2 17M 64k' -c 'write -P 3 40M 5M' -c 'write -P 4 65532k 4k'";

#[test]
fn there_and_back_through_a_server() {
    let shop = Workshop::new();
    shop.ok("create start.vhdx --size 64M");
    shop.ok(&format!("io start.vhdx {FILL}"));
    // What is there already must not show through: neither where the source is zero, nor behind its
    // end.
    shop.ok("create there.raw --size 80M");
    shop.ok("io there.raw -c 'write -P 0xee 2M 30M' -c 'write -P 0xee 60M 20M'");
    let Some(_server) = qemu_nbd(&shop, "s", "there.raw") else { return };
    let uri = uri("s");
    let said = shop.ok(&format!("convert start.vhdx {uri} --verify"));
    assert!(said.contains("verified") && said.contains("64 MiB"), "{said}");
    let ended = shop.run(&format!("compare start.vhdx {uri}"));
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), "Images are identical.\n"), "{ended:?}");
    let json = shop.json(&format!("convert {uri} back.vhdx --verify"));
    assert_eq!(json["virtual_size"], 80 << 20);
    // What the server calls zero was not read.
    assert!(json["copied_bytes"].as_u64().unwrap() < 12 << 20, "{json}");
    shop.ok(&format!("compare back.vhdx {uri}"));
    shop.ok("io back.vhdx -c 'read -P 0 3M 14M' -c 'read -P 0 64M 16M' -c 'read -P 3 40M 5M'");
    shop.ok(&format!("io {uri} -c 'write -P 9 1M 512'"));
    let ended = shop.run(&format!("compare back.vhdx {uri} --json"));
    assert_eq!(ended.code, Some(1));
    assert!(ended.stdout.contains("\"first_difference\": 1048576"), "{ended:?}");
}

#[test]
fn io_on_an_export() {
    let shop = Workshop::new();
    shop.ok("create disk.raw --size 16M");
    let Some(_server) = qemu_nbd(&shop, "s", "disk.raw") else { return };
    let uri = uri("s");
    shop.ok(&format!("io {uri} -c 'write -P 0xaa 0 2M' -c 'write -z -f 512 1M' -c 'discard 15M 1M' -c flush"));
    shop.ok(&format!(
        "io {uri} --read-only -c 'read -P 0xaa 0 512' -c 'read -P 0 512 1M' -c 'read -P 0xaa 1049088 512'"
    ));
    // The server has the file locked, so not by a command of ours.
    let there = fs::read(shop.path("disk.raw")).unwrap();
    assert!(there[..512] == [0xaa; 512] && there[512..(1 << 20) + 512].iter().all(|&byte| byte == 0));
    let error = shop.fails(1, &format!("io {uri} -c 'read 16M 512'"));
    assert!(error.contains("beyond the disk's end"), "{error}");
}

#[test]
fn map_and_info_tell_what_the_server_tells() {
    let shop = Workshop::new();
    shop.ok("create disk.raw --size 16M");
    shop.ok("io disk.raw -c 'write -P 1 1M 1M'");
    let args = "--persistent -k SOCKET -f raw -x disk -D hello -r disk.raw";
    let Some(_server) = serve(&shop, "s", "qemu-nbd", args) else { return };
    let uri = "'nbd+unix:///disk?socket=s.sock'";
    let map = shop.json(&format!("map {uri}"));
    let extents: Vec<_> = map["extents"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| (e["start"].as_u64().unwrap(), e["data"].as_bool().unwrap()))
        .collect();
    assert_eq!(extents, [(0, false), (1 << 20, true), (2 << 20, false)]);
    let list = shop.ok(&format!("map {uri}"));
    assert!(list.lines().nth(2).unwrap().ends_with("nbd+unix:///disk?socket=s.sock"), "{list}");
    assert!(shop.ok(&format!("map {uri} --draw")).contains("16 MiB"));
    insta::assert_snapshot!("info_export", shop.ok(&format!("info {uri}")));
    let json = shop.json(&format!("info {uri}"));
    assert_eq!(json["schema"], "diskwright.info-export/1");
    assert_eq!(
        (&json["export"], &json["read_only"], &json["tells_zeros"]),
        (&"disk".into(), &true.into(), &true.into())
    );
}

#[test]
fn what_is_wrong_is_one_sentence() {
    let shop = Workshop::new();
    shop.ok("create disk.vhdx --size 32M");
    for (code, line, word) in [
        (1, "info nbd+unix:///x", "add ?socket=PATH"),
        (1, "info 'nbd+unix:///?socket=nowhere.sock'", "check that the server is running"),
        (1, "info 'nbd://127.0.0.1:1/?timeout=5'", "check that the server is running"),
        (1, "info 'nbd://localhost?sockt=x'", "parameter sockt"),
        (1, "convert disk.vhdx 'nbd+unix:///?socket=nowhere.sock'", "cannot connect"),
        (2, "convert disk.vhdx 'nbd+unix:///?socket=nowhere.sock' --type fixed", "leave out the format"),
        (1, "check nbd://localhost/x", "cannot check the export of a server"),
        (2, "create nbd://localhost/x --size 1M", "cannot create the export"),
        (2, "serve nbd://localhost/x --nbd ./t", "cannot serve the export"),
        (2, "attach nbd://localhost/x", "cannot attach the export"),
        (1, "map --format vhdx 'nbd+unix:///?socket=nowhere.sock'", "check that the server is running"),
    ] {
        let error = shop.fails(code, line);
        assert!(error.contains(word) && error.lines().count() == 1, "{line}: {error}");
    }
    let error = shop.fails(2, "compare disk.vhdx nbd+unix:///x");
    assert!(error.contains("socket=PATH"), "{error}");
    shop.ok("create small.raw --size 1M");
    let args = "-f -U SOCKET --readonly --filter=error memory 32M error-pread=EIO error-pread-rate=100%";
    let Some(_server) = serve(&shop, "bad", "nbdkit", args) else { return };
    let Some(_other) = qemu_nbd(&shop, "small", "small.raw") else { return };
    let bad = uri("bad");
    let error = shop.fails(1, &format!("convert disk.vhdx {}", uri("small")));
    assert!(error.contains("has 1048576 bytes, the source needs 33554432"), "{error}");
    let error = shop.fails(1, &format!("convert disk.vhdx {bad}"));
    assert!(error.contains("read-only"), "{error}");
    let error = shop.fails(1, &format!("io {bad} --read-only -c 'read 0 4k'"));
    assert!(error.contains("READ of 4096 bytes at 0") && error.contains("EIO"), "{error}");
    let error = shop.fails(1, "info 'nbd+unix:///other?socket=small.sock'");
    assert!(error.contains("the server has no export \"other\"; it has: \"\""), "{error}");
}

#[test]
fn a_failed_conversion_from_an_export_leaves_nothing() {
    let shop = Workshop::new();
    let args = "-f -U SOCKET --filter=noextents --filter=error memory 32M error-pread=EIO error-pread-rate=100%";
    let Some(_server) = serve(&shop, "s", "nbdkit", args) else { return };
    let error = shop.fails(1, &format!("convert {} copy.vhdx", uri("s")));
    assert!(error.contains("READ of") && error.contains("EIO"), "{error}");
    let left: Vec<_> = fs::read_dir(shop.path("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().contains("copy")), "{left:?}");
}
