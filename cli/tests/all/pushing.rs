//! Disks that are pushed to a bucket, pulled, used as parents, and pruned.

use crate::{
    bucket::{found, free_port, versitygw, wait_for},
    common::{Running, Workshop, flat},
};
use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;

/// A disk of 256 MiB with different bytes at a few places.
fn disk(shop: &Workshop, name: &str) {
    shop.ok(&format!("create {name} --size 256M"));
    shop.ok(&format!("io {name} -c 'write -P 7 1M 20M' -c 'write -P 9 100M 64K' -c 'write -P 3 200M 3M' -c flush"));
}

/// The files of a bucket whose paths have this in them.
fn objects(shop: &Workshop, part: &str) -> Vec<PathBuf> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.path() {
                path if path.is_dir() => walk(&path, found),
                path => found.push(path),
            }
        }
    }
    let mut all = Vec::new();
    walk(&shop.path("buckets"), &mut all);
    all.retain(|path| path.to_string_lossy().contains(part));
    all.sort();
    all
}

#[test]
fn a_disk_is_pushed_pulled_and_pruned() {
    let mut shop = Workshop::new();
    let Some(_server) = versitygw("push and pull", &mut shop, &["backups"]) else { return };
    disk(&shop, "vm.vhdx");
    // As in the README.
    let [first, second, pull, list, prune] =
        crate::readme::OF_PUSHES.map(|command| command.strip_prefix("diskwright ").unwrap());
    let pushed = shop.json(first);
    assert_eq!((pushed["virtual_size"].as_u64(), pushed["chunks"].as_u64()), (Some(256 * MIB), Some(8)));
    assert!(pushed["sent_chunks"].as_u64() < Some(8), "two chunks are full of sevens: {pushed}");
    let point = pushed["point"].as_str().unwrap().to_owned();
    assert_eq!(shop.json("track list vm.vhdx")["points"][0]["name"], point.as_str());
    // What has changed since is read, in whole chunks, and nothing else.
    shop.ok("io vm.vhdx -c 'write -P 5 101M 64K' -c flush");
    let again = shop.json(second);
    assert_eq!((again["read_bytes"].as_u64(), again["sent_chunks"].as_u64()), (Some(4 * MIB), Some(1)));
    assert_eq!((&again["base"], again["warnings"].as_array().map(Vec::len)), (&"monday".into(), Some(0)));
    let points = shop.json("track list vm.vhdx");
    assert_eq!(points["points"].as_array().unwrap().len(), 1, "the older point has ended: {points}");
    assert_eq!(points["points"][0]["name"], again["point"]);
    // A base that is another disk, also pushed with --track: nothing is taken from it unread.
    shop.ok("create other.vhdx --size 256M");
    shop.ok("io other.vhdx -c 'write -P 8 1M 20M' -c flush");
    let other = shop.json("push other.vhdx s3://backups/vms/other --track");
    assert_ne!(other["point"], again["point"]);
    let wrong = shop.json("push other.vhdx s3://backups/vms/wrong --base tuesday --track");
    assert!(wrong["warnings"][0].as_str().unwrap().contains("the whole disk is read"), "{wrong}");
    shop.ok("compare other.vhdx s3://backups/vms/wrong");
    shop.ok("prune s3://backups/vms --remove other --remove wrong");
    let pulled = shop.json(&format!("{pull} --verify"));
    assert_eq!((pulled["virtual_size"].as_u64(), &pulled["verified"]), (Some(256 * MIB), &true.into()));
    assert_eq!(shop.run("compare new.vhdx s3://backups/vms/monday").code, Some(0));
    shop.ok("io new.vhdx -r -c 'read -P 9 100M 64K' -c 'read -P 0 101M 64K' -c 'read -P 3 200M 3M'");
    shop.ok("cache drop --everything");
    let pulled = shop.json("pull s3://backups/vms/tuesday newer.qcow2 --reuse new.vhdx");
    assert_eq!(pulled["reused_bytes"].as_u64(), Some(7 * 4 * MIB), "all chunks but one");
    shop.ok("compare newer.qcow2 vm.vhdx");
    let listed = shop.json(list);
    let names: Vec<&str> =
        listed["disks"].as_array().unwrap().iter().map(|disk| disk["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["monday", "tuesday"]);
    assert_eq!(listed["disks"][1]["contents_id"], again["contents_id"]);
    assert!(flat(&shop.ok(list)).contains("tuesday vm.vhdx"));
    let before = objects(&shop, "/chunks/").len();
    let would = shop.json(&format!("{prune} --dry-run"));
    assert_eq!(objects(&shop, "/chunks/").len(), before);
    let pruned = shop.json(prune);
    assert_eq!((&pruned["deleted"], &pruned["kept"]), (&would["deleted"], &would["kept"]));
    assert_eq!((pruned["deleted"]["chunks"].as_u64(), objects(&shop, "/chunks/").len()), (Some(1), before - 1));
    assert!(objects(&shop, "/vms/pushing/").is_empty() && objects(&shop, "/vms/condemned/").is_empty());
    shop.ok("compare s3://backups/vms/tuesday vm.vhdx");
    let error = flat(&shop.fails(1, "info s3://backups/vms/monday"));
    assert!(error.contains("the server has no such object"), "{error}");
}

#[test]
fn a_pushed_disk_is_a_parent() {
    let mut shop = Workshop::new();
    let Some(_server) = versitygw("a pushed disk as a parent", &mut shop, &["images"]) else { return };
    disk(&shop, "golden.vhdx");
    shop.ok("push golden.vhdx s3://images/sets/golden-12");
    let shown = flat(&shop.ok("info s3://images/sets/golden-12"));
    assert!(shown.contains("256 MiB") && shown.contains("identity for children"), "{shown}");
    let map = shop.json("map s3://images/sets/golden-12");
    let kinds = map["extents"].as_array().unwrap().iter().filter(|extent| extent["data"] == true).count();
    assert_eq!(kinds, 3, "{map}");
    let with = "--allow-parent-dir s3://images";
    for format in ["vhdx", "vhd", "qcow2"] {
        let child = format!("web.{format}");
        shop.ok(&format!("create {child} --parent s3://images/sets/golden-12"));
        let refused = flat(&shop.fails(1, &format!("io {child} -r -c 'read 1M 4K'")));
        assert!(refused.contains("--allow-parent-dir s3://images/sets"), "{refused}");
        shop.ok(&format!("io {child} {with} -c 'read -P 7 1M 20M' -c 'write -P 4 60M 64K' -c flush"));
        shop.ok(&format!("io {child} {with} -r -c 'read -P 4 60M 64K' -c 'read -P 3 200M 3M' -c 'read -P 0 61M 1M'"));
        // Only what the child itself holds is read.
        let pushed = shop.json(&format!("push {child} s3://images/sets/web-{format} {with}"));
        assert_eq!((pushed["read_bytes"].as_u64(), &pushed["base"]), (Some(4 * MIB), &"golden-12".into()), "{pushed}");
        assert_eq!(pushed["sent_chunks"].as_u64(), Some(u64::from(format == "vhdx")), "the others have the same bytes");
        shop.ok(&format!("compare {child} s3://images/sets/web-{format} {with}"));
    }
    for format in ["vmdk", "vdi"] {
        let error = flat(&shop.fails(2, &format!("create web.{format} --parent s3://images/sets/golden-12")));
        assert!(error.contains("the parent has no"), "{error}");
        assert!(!shop.path(&format!("web.{format}")).exists());
    }
    // Another disk under the same name: the child does not take it for its parent.
    shop.ok("prune s3://images/sets --remove golden-12");
    shop.ok("io golden.vhdx -c 'write -P 1 1M 64K' -c flush");
    shop.ok("push golden.vhdx s3://images/sets/golden-12");
    let error = flat(&shop.fails(1, &format!("io web.vhdx {with} -r -c 'read 1M 4K'")));
    assert!(error.contains("the object is another version: it has ETag contents:"), "{error}");
    let error = flat(&shop.fails(1, "reconnect web.vhdx --parent s3://images/sets/golden-12"));
    assert!(error.contains("is not the disk"), "{error}");
}

#[test]
fn what_cannot_be_pushed_or_pulled_is_said() {
    let mut shop = Workshop::new();
    let Some(_server) = versitygw("errors of push", &mut shop, &["backups"]) else { return };
    disk(&shop, "vm.vhdx");
    shop.ok("push vm.vhdx s3://backups/vms/monday");
    let curl = |key: &str| {
        let mut upload = Command::new("curl");
        upload.args(["-sS", "--fail", "--aws-sigv4", "aws:amz:us-east-1:s3", "--user", "AKIATEST:very-secret"]);
        upload.args(["-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD", "-T"]).arg(shop.path("vm.vhdx"));
        assert!(upload.arg(format!("{}/backups/{key}", shop.variables[0].1)).status().unwrap().success());
    };
    curl("vms/vm.vhdx");
    for (code, line, why) in [
        (1, "push vm.vhdx s3://backups/vms/monday", "a disk of this name is there already"),
        (1, "push vm.vhdx s3://backups/vms/vm.vhdx", "a disk of this name is there already"),
        (2, "push vm.vhdx https://example.com/vms/monday", "expected s3://BUCKET/FOLDER"),
        (2, "push vm.vhdx s3://backups", "expected s3://BUCKET/FOLDER/NAME"),
        (2, "push vm.vhdx s3://backups/vms/chunks", "choose another name"),
        (1, "push vm.vhdx s3://nobucket/vms/x", "no such object"),
        (1, "push none.vhdx s3://backups/vms/x", "No such file"),
        (1, "push vm.vhdx s3://backups/vms/x --base sunday", "s3://backups/vms/sunday: the server has no such object"),
        (1, "push vm.vhdx s3://backups/vms/x --base vm.vhdx", "it does not begin as a manifest"),
        (
            2,
            "push vm.vhdx s3://backups/vms/x --base s3://backups/other/monday",
            "must lie in the folder s3://backups/vms/",
        ),
        (2, "push nbd://localhost/x s3://backups/vms/x --track", "cannot track the export"),
        (1, "pull s3://backups/vms/vm.vhdx new.vhdx", "it is not a disk that was pushed"),
        (1, "pull s3://backups/vms/none new.vhdx", "no such object"),
        (1, "pull s3://backups/vms/monday vm.vhdx", "exists"),
        (1, "prune s3://backups/vms --remove sunday", "no such object"),
        (1, "prune s3://backups/vms --remove vm.vhdx", "it does not begin as a manifest"),
        (2, "prune backups", "expected s3://"),
    ] {
        let error = flat(&shop.fails(code, line));
        assert!(error.contains(why), "{line}: {error}");
        assert!(!error.contains("very-secret"), "{error}");
    }
    assert!(!shop.path("new.vhdx").exists() && objects(&shop, "/vms/pushing/").is_empty());
    // Its own base without a point is read whole, and said so.
    let pushed = shop.json("push vm.vhdx s3://backups/vms/tuesday --base monday");
    assert_eq!(pushed["sent_chunks"].as_u64(), Some(0));
    assert!(pushed["warnings"][0].as_str().unwrap().contains("without --track"), "{pushed}");
    assert!(flat(&shop.ok("pushed s3://backups/none")).contains("no disk was pushed there"));
    // A chunk that somebody has changed, and one that is gone.
    let chunks = objects(&shop, "/vms/chunks/");
    let good = fs::read(&chunks[0]).unwrap();
    let mut bad = good.clone();
    *bad.last_mut().unwrap() ^= 1;
    fs::write(&chunks[0], &bad).unwrap();
    shop.ok("cache drop --everything");
    let error = flat(&shop.fails(1, "pull s3://backups/vms/monday new.vhdx"));
    assert!(error.contains("it is damaged"), "{error}");
    fs::remove_file(&chunks[0]).unwrap();
    let error = flat(&shop.fails(1, "pull s3://backups/vms/monday new.vhdx"));
    assert!(error.contains("it is damaged: it is not there"), "{error}");
    assert!(!shop.path("new.vhdx").exists());
    // Another push sends it again, and the older disk stays damaged: it has another object.
    shop.ok("push vm.vhdx s3://backups/vms/wednesday");
    shop.ok("cache drop --everything");
    shop.ok("compare vm.vhdx s3://backups/vms/wednesday");
}

/// Bytes that cannot be compressed.
fn noise(path: &Path, len: usize) {
    let words = (0..len as u64 / 8).map(|at| {
        let mixed = at.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    });
    fs::write(path, words.flat_map(u64::to_le_bytes).collect::<Vec<u8>>()).unwrap();
}

/// A push that is killed leaves nothing that can be mistaken for a disk. The next one goes on.
#[test]
fn a_push_that_was_killed_is_made_again() {
    let mut shop = Workshop::new();
    let Some(_server) = versitygw("a killed push", &mut shop, &["backups"]) else { return };
    noise(&shop.path("vm.raw"), 200 << 20);
    let mut push = shop.command(&["push", "vm.raw", "s3://backups/vms/monday"]);
    let mut running = Running::start(push.stdout(Stdio::null()).stderr(Stdio::null()));
    let begun = Instant::now();
    while objects(&shop, "/chunks/").len() < 5 {
        assert!(begun.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_millis(2));
    }
    running.kill().unwrap();
    running.wait().unwrap();
    assert_eq!(shop.json("pushed s3://backups/vms")["disks"].as_array().unwrap().len(), 0);
    // It counts as under way, so its chunks stay.
    let pruned = shop.json("prune s3://backups/vms");
    assert_eq!((pruned["pushes"].as_u64(), pruned["deleted"]["chunks"].as_u64()), (Some(1), Some(0)));
    let there =
        objects(&shop, "/chunks/").iter().filter(|path| !path.to_string_lossy().contains(".sgwtmp")).count() as u64;
    let pushed = shop.json("push vm.raw s3://backups/vms/monday");
    assert!(pushed["sent_chunks"].as_u64().unwrap() <= 50 - there.min(50) && there >= 5, "{there} there: {pushed}");
    shop.ok("compare vm.raw s3://backups/vms/monday");
}

/// Passes bytes on, and cuts connections: each after so many bytes as `cuts` says, until that is
/// used up.
fn cutting_proxy(to: u16, cuts: Vec<u64>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        let mut cuts = cuts.into_iter();
        for client in listener.incoming().flatten() {
            let server = TcpStream::connect(("127.0.0.1", to)).unwrap();
            let left = Arc::new(AtomicI64::new(cuts.next().map_or(i64::MAX, |cut| cut as i64)));
            for (mut from, mut to) in [
                (client.try_clone().unwrap(), server.try_clone().unwrap()),
                (server.try_clone().unwrap(), client.try_clone().unwrap()),
            ] {
                let left = Arc::clone(&left);
                thread::spawn(move || {
                    let mut buf = [0; 4096];
                    while let Ok(len @ 1..) = from.read(&mut buf) {
                        if left.fetch_sub(len as i64, Ordering::Relaxed) < len as i64
                            || to.write_all(&buf[..len]).is_err()
                        {
                            break;
                        }
                    }
                    let _ = (from.shutdown(std::net::Shutdown::Both), to.shutdown(std::net::Shutdown::Both));
                });
            }
        }
    });
    port
}

/// Connections that break at all places: requests, answers, heads, bodies.
#[test]
fn a_push_goes_on_when_connections_break() {
    let mut shop = Workshop::new();
    let Some(_server) = versitygw("broken connections", &mut shop, &["backups"]) else { return };
    noise(&shop.path("vm.raw"), 24 << 20);
    let port: u16 = shop.variables[0].1.rsplit(':').next().unwrap().parse().unwrap();
    for (round, step) in [(0_u64, 97_u64), (1, 1009), (2, 100_003), (3, 4_000_037)] {
        let cuts = (0..12).map(|number| 1 + number * step * 7 % (10 * step)).collect();
        shop.variables[0].1 = format!("http://127.0.0.1:{}", cutting_proxy(port, cuts));
        // Now and then the server has done what it was asked, and nobody has heard.
        let name = format!("s3://backups/vms/round-{round}");
        let begun = Instant::now();
        let mut ended = shop.run(&format!("push vm.raw {name}"));
        while ended.code != Some(0) {
            assert!(ended.code == Some(1) && begun.elapsed() < Duration::from_secs(60), "{ended:#?}");
            if ended.stderr.contains("is there already") {
                break;
            }
            ended = shop.run(&format!("push vm.raw {name}"));
        }
        shop.variables[0].1 = format!("http://127.0.0.1:{port}");
        shop.ok(&format!("compare vm.raw {name}"));
        shop.ok("cache drop --everything");
    }
}

/// Two pushes of one name at the same time, and a prune beside them.
#[test]
fn one_of_two_pushes_of_a_name_wins() {
    let mut shop = Workshop::new();
    let Some(_server) = versitygw("two pushes of a name", &mut shop, &["backups"]) else { return };
    noise(&shop.path("a.raw"), 40 << 20);
    shop.ok("create b.raw --size 40M");
    shop.ok("io b.raw -c 'write -P 8 0 30M' -c flush");
    let start = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        Running::start(shop.command(&words).stdout(Stdio::null()).stderr(Stdio::piped()))
    };
    let pushes = ["a.raw", "b.raw"].map(|disk| (disk, start(&format!("push {disk} s3://backups/vms/one"))));
    shop.ok("prune s3://backups/vms");
    let ended = pushes.map(|(disk, push)| (disk, push.output().unwrap()));
    let won: Vec<&str> = ended.iter().filter(|(_, output)| output.status.success()).map(|(disk, _)| *disk).collect();
    assert_eq!(won.len(), 1, "{ended:?}");
    let lost = ended.iter().find(|(_, output)| !output.status.success()).unwrap();
    assert!(String::from_utf8_lossy(&lost.1.stderr).contains("is there already"), "{lost:?}");
    shop.ok(&format!("compare {} s3://backups/vms/one", won[0]));
    shop.ok("prune s3://backups/vms");
    shop.ok("cache drop --everything");
    shop.ok(&format!("compare {} s3://backups/vms/one", won[0]));
}

/// A web server is enough to read from.
#[test]
fn a_pushed_disk_is_pulled_from_a_web_server() {
    let mut shop = Workshop::new();
    let Some(_server) = versitygw("a pushed disk on a web server", &mut shop, &["backups"]) else { return };
    let Some(nginx) = found("a pushed disk on a web server", "nginx") else { return };
    disk(&shop, "vm.vhdx");
    shop.ok("push vm.vhdx s3://backups/vms/monday");
    let port = free_port();
    let folder = shop.path("web");
    fs::create_dir_all(&folder).unwrap();
    let (here, root) = (folder.display(), shop.path("buckets/backups"));
    let settings = format!(
        "daemon off; master_process off; pid {here}/pid; error_log {here}/error.log; events {{}}\n\
         http {{ access_log off; client_body_temp_path {here}; proxy_temp_path {here}; fastcgi_temp_path {here};\n\
         uwsgi_temp_path {here}; scgi_temp_path {here};\n\
         server {{ listen 127.0.0.1:{port}; root {}; }} }}",
        root.display()
    );
    fs::write(folder.join("conf"), settings).unwrap();
    let mut command = Command::new(nginx);
    command.arg("-c").arg(folder.join("conf")).args(["-e", "stderr"]);
    let _nginx = Running::start(command.stdout(Stdio::null()).stderr(Stdio::null()));
    wait_for(port);
    let url = format!("http://127.0.0.1:{port}/vms/monday");
    shop.ok(&format!("pull {url} new.vhdx --verify"));
    shop.ok("compare new.vhdx vm.vhdx");
}
