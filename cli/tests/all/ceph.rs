//! Images of a Ceph cluster: raw disks, images inside them, snapshots, locks, lost daemons.
//!
//! The cluster is of this test (`diskwright_rbd::testing`).

use crate::common::{Running, Workshop, flat};
use diskwright_rbd::{RbdFiles, testing::Cluster};
use diskwright_store::FileSystem;
use std::{
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

const PATIENCE: Duration = Duration::from_secs(120);

/// A cluster, which the commands of the workshop use from now on.
fn cluster(shop: &mut Workshop) -> Option<Cluster> {
    match Cluster::start(&shop.path("ceph"), "") {
        Ok(cluster) => {
            shop.variables = vec![("CEPH_CONF", cluster.conf().display().to_string())];
            Some(cluster)
        }
        Err(why) => {
            println!("skipped: images of a Ceph cluster: {why}");
            None
        }
    }
}

#[test]
fn images_of_a_cluster() {
    let mut shop = Workshop::new();
    let Some(mut cluster) = cluster(&mut shop) else { return };
    raw_disks(&shop, &cluster);
    images_inside(&shop, &cluster);
    snapshots(&shop, &cluster);
    standard_error_stays_blocking(&shop);
    locks(&shop, &cluster);
    wrong_names(&shop);
    a_bucket(&mut shop, &mut cluster);
    a_lost_daemon(&shop, &mut cluster);
}

/// Ceph's own tool reads what we have written, and the other way round.
fn raw_disks(shop: &Workshop, cluster: &Cluster) {
    assert!(cluster.rbd(&["create", "raw", "--size", "256M"]));
    shop.ok("io rbd://rbd/raw -c 'write -P 7 1M 8M' -c 'write -P 9 100M 4K' -c 'write -z 2M 64K' -c flush");
    shop.ok(
        "io rbd://rbd/raw -r -c 'read -P 7 1M 1M' -c 'read -P 0 2M 64K' -c 'read -P 9 100M 4K' -c 'read -P 0 101M 8M'",
    );
    assert!(cluster.rbd(&["export", "rbd/raw", shop.path("raw.img").to_str().unwrap()]));
    shop.ok("compare raw.img rbd://rbd/raw");
    let data = shop.data_bytes("rbd://rbd/raw");
    assert!((8 << 20..=64 << 20).contains(&data), "holes are known: {data}");
    // A copy into the cluster keeps holes; a copy from it is the same.
    shop.ok("convert raw.img rbd://rbd/copy --format raw --verify");
    shop.ok("convert rbd://rbd/copy copy.vhdx --verify");
    shop.ok("compare copy.vhdx raw.img");
    // An interrupted copy goes on.
    assert!(cluster.rbd(&["cp", "rbd/copy", "rbd/again.partial"]));
    shop.ok("io rbd://rbd/again.partial --format raw -c 'write -P 1 3M 64K' -c 'write -P 1 60M 64K' -c flush");
    let done = shop.json("convert raw.img rbd://rbd/again --format raw --resume --verify");
    let (held, copied) = (done["held_bytes"].as_u64().unwrap(), done["copied_bytes"].as_u64().unwrap());
    assert!(held >= 4 << 20 && (64 << 10..=2 << 20).contains(&copied), "{done}");
    let used = cluster.says(&["du", "rbd/copy", "--format", "json"]);
    assert!(used.contains("\"used_size\":"), "{used}");
    let shown = flat(&shop.ok("info rbd://rbd/raw"));
    assert!(shown.contains("raw") && shown.contains("256 MiB"), "{shown}");
}

/// A VHDX with its tables and its log in an image, which grows with it.
fn images_inside(shop: &Workshop, cluster: &Cluster) {
    shop.ok("create rbd://rbd/disk.vhdx --size 1G");
    shop.ok("io rbd://rbd/disk.vhdx -c 'write -P 5 0 20M' -c 'write -P 6 900M 64K' -c flush");
    shop.ok("io rbd://rbd/disk.vhdx -r -c 'read -P 5 0 20M' -c 'read -P 6 900M 64K' -c 'read -P 0 21M 8M'");
    shop.ok("check rbd://rbd/disk.vhdx");
    shop.ok("convert rbd://rbd/disk.vhdx flat.raw --verify");
    // A child beside it, in the same pool.
    shop.ok("create rbd://rbd/child.vhdx --parent rbd://rbd/disk.vhdx");
    shop.ok("io rbd://rbd/child.vhdx -c 'write -P 8 1M 64K' -c 'read -P 5 2M 1M' -c flush");
    let shown = flat(&shop.ok("info rbd://rbd/child.vhdx --chain"));
    assert!(shown.contains("a chain of 2 disks"), "{shown}");
    for format in ["vhdx", "vhd", "qcow2", "vmdk", "vdi"] {
        let (disk, child) = (format!("rbd://rbd/golden.{format}"), format!("rbd://rbd/clone.{format}"));
        shop.ok(&format!("create {disk} --size 64M"));
        shop.ok(&format!("io {disk} -c 'write -P 5 1M 4M' -c flush"));
        shop.ok(&format!("clone {disk} {child}"));
        shop.ok(&format!("io {child} -c 'write -P 6 1M 4K' -c flush"));
        shop.ok(&format!("io {child} -r -c 'read -P 6 1M 4K' -c 'read -P 5 2M 1M' -c 'read -P 0 8M 1M'"));
        let error = flat(&shop.fails(1, &format!("io {disk} -c 'write 0 4K'")));
        assert!(error.contains("child"), "its child would read other data: {error}");
        shop.ok(&format!("merge {child}"));
        shop.ok(&format!("io {disk} -r -c 'read -P 6 1M 4K' -c 'read -P 5 2M 1M'"));
        let error = flat(&shop.fails(1, &format!("snapshot {disk} --name one")));
        assert!(error.contains("no hard links"), "{error}");
    }
    // A namespace, and the settings of the name instead of the environment's.
    assert!(cluster.rbd(&["namespace", "create", "rbd/tenant"]));
    let name = format!("'rbd://rbd/tenant/disk?conf={}&id=admin'", cluster.conf().display());
    shop.ok(&format!("create {name} --format raw --size 16M"));
    shop.ok(&format!("io {name} -c 'write -P 2 0 64K' -c 'read -P 2 0 64K' -c flush"));
    let other = name.replace("disk?", "copy.vhdx?");
    shop.ok(&format!("convert {name} {other} --verify"));
    shop.ok(&format!("io {other} -c 'read -P 2 0 64K' -c 'write -P 3 0 64K' -c flush"));
    assert_eq!(cluster.says(&["ls", "rbd/tenant"]).trim(), "copy.vhdx\ndisk");
    let listed = cluster.says(&["ls", "rbd"]);
    assert!(listed.contains("child.vhdx") && listed.contains("disk.vhdx"), "{listed}");
}

fn snapshots(shop: &Workshop, cluster: &Cluster) {
    assert!(cluster.rbd(&["snap", "create", "rbd/raw@monday"]));
    shop.ok("io rbd://rbd/raw -c 'write -P 1 1M 64K' -c flush");
    shop.ok("io rbd://rbd/raw@monday -r -c 'read -P 7 1M 64K'");
    shop.ok("io rbd://rbd/raw -r -c 'read -P 1 1M 64K'");
    let error = flat(&shop.fails(1, "io rbd://rbd/raw@monday -c 'write 0 4K'"));
    assert!(error.contains("a snapshot never changes"), "{error}");
    shop.ok("convert rbd://rbd/raw@monday monday.qcow2 --verify");
    shop.ok("compare monday.qcow2 raw.img");
    let shown = flat(&shop.ok("info rbd://rbd/raw"));
    assert!(shown.contains("1 storage snapshot") && shown.contains("@monday 256 MiB"), "{shown}");
    // The cluster's own records: what was written or discarded since, and nothing is read. At 9M
    // there was nothing to discard.
    shop.ok("io rbd://rbd/raw -c 'discard 8M 4M' -c 'write -P 4 100M 4K' -c flush");
    assert!(cluster.rbd(&["snap", "create", "rbd/raw@tuesday"]));
    shop.ok("io rbd://rbd/raw -c 'write -P 9 200M 4K' -c flush");
    let ranges = |line: &str| {
        let found: serde_json::Value = serde_json::from_str(&shop.run(&format!("{line} --json")).stdout).unwrap();
        let range = |range: &serde_json::Value| (range["start"].as_u64().unwrap(), range["length"].as_u64().unwrap());
        found["ranges"].as_array().unwrap().iter().map(range).collect::<Vec<_>>()
    };
    const MIB: u64 = 1 << 20;
    let (all, first) = ([(MIB, 64 << 10), (8 * MIB, MIB), (100 * MIB, 4096), (200 * MIB, 4096)], 3);
    assert_eq!(ranges("diff rbd://rbd/raw rbd://rbd/raw@monday"), all);
    assert_eq!(ranges("diff rbd://rbd/raw@tuesday rbd://rbd/raw@monday"), all[..first]);
    assert_eq!(ranges("diff rbd://rbd/raw@monday rbd://rbd/raw@tuesday"), all[..first]);
    // An image that was shortened since.
    assert!(cluster.rbd(&["create", "short", "--size", "64M"]));
    shop.ok("io rbd://rbd/short -c 'write -P 4 60M 64K' -c flush");
    assert!(cluster.rbd(&["snap", "create", "rbd/short@long"]));
    assert!(cluster.rbd(&["resize", "rbd/short", "--size", "32M", "--allow-shrink"]));
    // Behind the end the object that holds data counts.
    for line in ["diff rbd://rbd/short rbd://rbd/short@long", "diff rbd://rbd/short@long rbd://rbd/short"] {
        assert_eq!(ranges(line), [(60 * MIB, 4 * MIB)], "{line}");
    }
    let name = format!("rbd://rbd/raw?conf={}", cluster.conf().display());
    // The id of the cluster may come after its connection, and each open here makes a new one.
    let identity = || RbdFiles.facts(Path::new(&name)).unwrap().identity;
    let first = identity();
    assert!((0..50).all(|_| identity() == first), "the identity of an image changes");
}

/// Ceph's library makes a pipe at standard error non-blocking. It is given back as it was.
fn standard_error_stays_blocking(shop: &Workshop) {
    let mut shell = shop.command(&[]);
    let program = shell.get_program().to_owned();
    let variables: Vec<_> = shell.get_envs().map(|(name, value)| (name.to_owned(), value.map(Into::into))).collect();
    shell = Command::new("sh");
    for (name, value) in variables {
        let value: Option<std::ffi::OsString> = value;
        value.map(|value| shell.env(name, value));
    }
    shell.args(["-c", "\"$0\" info rbd://rbd/raw > info.txt; grep flags: /proc/$$/fdinfo/2"]).arg(program);
    let ended = shell.current_dir(shop.path("")).stderr(Stdio::piped()).output().unwrap();
    let said = String::from_utf8(ended.stdout).unwrap();
    let flags = u32::from_str_radix(said.trim_start_matches("flags:").trim(), 8).unwrap();
    assert_eq!(flags & 0o4000, 0, "standard error is non-blocking: {said}");
    assert!(std::fs::read_to_string(shop.path("info.txt")).unwrap().contains("256 MiB"));
}

/// The exclusive lock: two writers, a reader beside a writer, and a lock that is taken away.
fn locks(shop: &Workshop, cluster: &Cluster) {
    let socket = "./lock.sock";
    let mut server = shop.command(&["serve", "rbd://rbd/raw", "--nbd", socket]);
    let mut server = Running::start(server.stdout(Stdio::null()).stderr(Stdio::null()));
    let begun = Instant::now();
    while !shop.path("lock.sock").exists() {
        assert!(begun.elapsed() < PATIENCE);
        thread::sleep(Duration::from_millis(20));
    }
    let uri = "nbd+unix:///?socket=./lock.sock";
    shop.ok(&format!("io '{uri}' -c 'write -P 3 0 64K' -c flush"));
    let error = flat(&shop.fails(1, "io rbd://rbd/raw -c 'write 0 4K'"));
    assert!(error.contains("in use") && error.contains("another client"), "{error}");
    shop.ok("io rbd://rbd/raw -r -c 'read -P 3 0 64K'");
    // Taken away, as an administrator does it: the next write is an error, and so is all that
    // follows.
    let listed = cluster.says(&["lock", "ls", "rbd/raw", "--format", "json"]);
    let locks: serde_json::Value = serde_json::from_str(&listed).unwrap();
    let (id, locker) = (locks[0]["id"].as_str().unwrap(), locks[0]["locker"].as_str().unwrap());
    assert!(cluster.rbd(&["lock", "rm", "rbd/raw", id, locker]), "{listed}");
    let begun = Instant::now();
    let ended = shop.run(&format!("io '{uri}' -c 'write -P 4 0 64K' -c flush"));
    assert!(ended.code == Some(1) && begun.elapsed() < Duration::from_secs(20), "{ended:#?}");
    let _ = server.kill();
    let _ = server.wait();
    shop.ok("io rbd://rbd/raw -c 'read -P 3 0 64K' -c 'write -P 4 0 4K' -c flush");
}

fn wrong_names(shop: &Workshop) {
    for (code, line, why) in [
        (1, "info rbd://rbd/none", "there is no such image or snapshot"),
        (1, "info rbd://rbd/raw@none", "there is no such image or snapshot"),
        (1, "info rbd://nopool/raw", "there is no such pool"),
        (1, "info rbd://rbd", "expected rbd://POOL/IMAGE"),
        (1, "info 'rbd://rbd/raw?key=x'", "the settings behind ? are id, conf and timeout"),
        (1, "info 'rbd://rbd/raw?conf=/none'", "cannot read the configuration"),
        (1, "create rbd://rbd/disk.vhdx --size 1G", "exists"),
    ] {
        let error = flat(&shop.fails(code, line));
        assert!(error.contains(why), "{line}: {error}");
    }
}

/// Ceph's own S3 server: a disk is pushed, pulled, and pruned.
fn a_bucket(shop: &mut Workshop, cluster: &mut Cluster) {
    let endpoint = match cluster.start_gateway("AKIATEST", "very-secret") {
        Ok(endpoint) => endpoint,
        Err(why) => return println!("skipped: push to Ceph's S3 server: {why}"),
    };
    shop.variables.extend([
        ("AWS_ENDPOINT_URL", endpoint.clone()),
        ("AWS_ACCESS_KEY_ID", "AKIATEST".into()),
        ("AWS_SECRET_ACCESS_KEY", "very-secret".into()),
        ("AWS_REGION", "us-east-1".into()),
    ]);
    let mut bucket = Command::new("curl");
    bucket.args(["-sS", "--fail", "--aws-sigv4", "aws:amz:us-east-1:s3", "--user", "AKIATEST:very-secret"]);
    bucket.args(["-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD", "-X", "PUT"]).arg(format!("{endpoint}/backups"));
    assert!(bucket.stdout(Stdio::null()).status().unwrap().success());
    shop.ok("push copy.vhdx s3://backups/vms/monday --track");
    let error = flat(&shop.fails(1, "push copy.vhdx s3://backups/vms/monday"));
    assert!(error.contains("is there already"), "{error}");
    shop.ok("io copy.vhdx -c 'write -P 4 8M 64K' -c flush");
    let pushed = shop.json("push copy.vhdx s3://backups/vms/tuesday --base monday");
    assert_eq!((pushed["read_bytes"].as_u64(), pushed["sent_chunks"].as_u64()), (Some(4 << 20), Some(1)), "{pushed}");
    shop.ok("prune s3://backups/vms --remove monday");
    shop.ok("pull s3://backups/vms/tuesday pulled.qcow2 --verify");
    shop.ok("compare pulled.qcow2 copy.vhdx");
}

/// An OSD that is stopped under load: requests wait, and go on when it is back. One that stays away
/// is an error after the timeout, never zeros.
fn a_lost_daemon(shop: &Workshop, cluster: &mut Cluster) {
    let osd = cluster.osd().to_string();
    let signal = |name: &str| assert!(Command::new("kill").args([name, &osd]).status().unwrap().success());
    shop.ok("io rbd://rbd/raw -c 'write -P 6 8M 4M' -c flush");
    signal("-STOP");
    let mut reader = shop.command(&["io", "rbd://rbd/raw", "-r", "-c", "read -P 6 8M 4M"]);
    let reader = Running::start(reader.stdout(Stdio::piped()).stderr(Stdio::piped()));
    thread::sleep(Duration::from_secs(3));
    signal("-CONT");
    let ended = reader.output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    cluster.kill_osd();
    let begun = Instant::now();
    let error = flat(&shop.fails(1, "io 'rbd://rbd/raw?timeout=5' -r -c 'read 8M 4M'"));
    assert!(begun.elapsed() < Duration::from_secs(40), "{error}");
}
