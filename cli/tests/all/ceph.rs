//! Images of a Ceph cluster: raw disks, images inside them, snapshots, locks, lost daemons.
//!
//! The cluster is of this test (`diskwright_rbd::testing`).

use crate::common::{Running, Workshop, flat};
use diskwright_rbd::testing::Cluster;
use std::{
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
    locks(&shop, &cluster);
    wrong_names(&shop);
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
    let map = shop.json("map rbd://rbd/raw");
    let data: u64 = map["extents"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|extent| extent["data"] == true)
        .map(|extent| extent["length"].as_u64().unwrap())
        .sum();
    assert!((8 << 20..=64 << 20).contains(&data), "holes are known: {map}");
    // A copy into the cluster keeps holes; a copy from it is the same.
    shop.ok("convert raw.img rbd://rbd/copy --format raw --verify");
    shop.ok("convert rbd://rbd/copy copy.vhdx --verify");
    shop.ok("compare copy.vhdx raw.img");
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
