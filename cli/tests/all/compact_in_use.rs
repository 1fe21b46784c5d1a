//! `compact` and `serve-ctl compact` of disks that are served and attached.

use crate::attaching::{Place as Attaching, run_ok};
use crate::control::{Place, numbered_blocks, numbers_in};
use crate::serving::{PATIENCE, program};
use std::{
    fs,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;

fn len(path: impl AsRef<Path>) -> u64 {
    fs::metadata(path).unwrap().len()
}

#[test]
fn a_served_disk_is_compacted_while_a_client_writes() {
    let place = Place::with(&["disk.vhdx", "disk.vhd"]);
    let Some(server) = place.serve("disk.vhdx disk.vhd --nbd ./s") else { return };
    for name in ["disk.vhdx", "disk.vhd"] {
        // The blocks of the client lie behind these in the file.
        place.shop.ok(&format!("io '{}' -c 'write -P 7 36M 28M' -c 'write -P 0 32M 4M' -c flush", server.uri(name)));
    }
    let stop = AtomicBool::new(false);
    let held: Vec<Vec<u64>> = thread::scope(|scope| {
        let clients = ["disk.vhdx", "disk.vhd"].map(|name| {
            let (uri, stop) = (server.uri(name), &stop);
            scope.spawn(move || numbered_blocks(&uri, stop))
        });
        thread::sleep(Duration::from_millis(300));
        for (name, command) in [("disk.vhdx", "compact disk.vhdx"), ("disk.vhd", "serve-ctl disk.vhd compact")] {
            let before = len(place.shop.path(name));
            let dry = place.json(&format!("{command} --dry-run"));
            assert_eq!((&dry["dry_run"], &dry["disks"][0]["in_use"]), (&true.into(), &true.into()), "{dry}");
            assert_eq!(len(place.shop.path(name)), before, "a dry run changes nothing");
            place.shop.ok(&format!("io '{}' -c 'discard 36M 28M' -c flush", server.uri(name)));
            let said = place.json(command);
            let disk = &said["disks"][0];
            assert_eq!((&disk["in_use"], &disk["zero_bytes"]), (&true.into(), &(4 * MIB).into()), "{said}");
            assert!(disk["moved_bytes"].as_u64().unwrap() > 0, "{said}");
            let after = len(place.shop.path(name));
            assert!(before > 60 * MIB && after < 40 * MIB, "{name}: from {before} to {after} bytes");
            assert_eq!(disk["new_file_size"], after);
            let text = place.ok(command);
            assert!(text.starts_with(&format!("{name}: compacted from 3")), "{text}");
            assert!(text.contains("the disk is in use, so file systems' maps were not read"), "{text}");
        }
        assert!(place.ok("compact disk.vhdx --estimate").contains("; nothing was changed"));
        stop.store(true, Ordering::Relaxed);
        clients.map(|client| client.join().unwrap()).into()
    });
    place.ok("serve-ctl disk.vhdx drain");
    assert_eq!(server.wait(), Some(0));
    for (name, held) in ["disk.vhdx", "disk.vhd"].into_iter().zip(&held) {
        let path = place.shop.path(name);
        assert!(numbers_in(&path) == *held, "{name}: all is there");
        place.shop.ok(&format!("check {name}"));
        place.shop.ok(&format!("io {name} -c 'read -P 0 32M 32M'"));
        if let Some(said) = program(&place.shop, "qemu-img", &["compare", name, name]) {
            assert!(said.status.success(), "{said:?}");
        }
        // The compaction of the closed disk gains no more than 3 %.
        let open_bytes = len(&path);
        place.shop.ok(&format!("compact {name}"));
        assert!(open_bytes <= len(&path) * 103 / 100, "{name}: {open_bytes}, and then {}", len(&path));
        assert!(numbers_in(&path) == *held);
    }
}

#[test]
fn a_disk_in_use_that_keeps_its_space_is_refused() {
    let place = Place::with(&["disk.vhdx"]);
    place.shop.ok("create fixed.vhd --size 4M --type fixed");
    let Some(server) = place.serve("fixed.vhd disk.vhdx --nbd ./s") else { return };
    let error = place.fails("compact fixed.vhd");
    assert!(error.contains("it is a fixed disk, which keeps the space of all its blocks"), "{error}");
    drop(server);
}

/// A file system is trimmed and its disk compacted, while it is mounted and written.
#[test]
fn an_attached_disk_is_made_small_while_it_is_mounted() {
    let Some(place) = Attaching::as_root(&["mkfs.ext4", "fsck.ext4", "fstrim", "sha256sum"]) else { return };
    place.ok("create disk.vhdx --size 512M --block-size 1M");
    let device = place.attach("disk.vhdx");
    // Without lazy initialisation the kernel writes nothing by itself.
    run_ok("mkfs.ext4", &["-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", "-J", "size=4", &device]);
    let dir = place.dir("mnt");
    run_ok("mount", &[&device, &dir]);
    let file = |number: u64| Path::new(&dir).join(format!("file{number}"));
    let contents = |number: u64| -> Vec<u8> {
        (0..2 * MIB / 8).flat_map(|word| (word * 0x9e37_79b9 + number + 1).to_le_bytes()).collect()
    };
    for number in 0..100 {
        fs::write(file(number), contents(number)).unwrap();
    }
    run_ok("sync", &["-f", &dir]);
    for number in (0..100).filter(|number| number % 10 > 0) {
        fs::remove_file(file(number)).unwrap();
    }
    run_ok("sync", &["-f", &dir]);
    run_ok("fstrim", &[&dir]);
    let before = len(place.path("disk.vhdx"));
    let stop = AtomicBool::new(false);
    let said = thread::scope(|scope| {
        scope.spawn(|| {
            let mut number = 0u64;
            while !stop.load(Ordering::Relaxed) {
                number += 1;
                let path = Path::new(&dir).join(format!("small{}", number % 20));
                fs::write(path, number.to_le_bytes().repeat(2000)).unwrap();
            }
        });
        let said = place.json("compact disk.vhdx");
        stop.store(true, Ordering::Relaxed);
        said
    });
    let disk = &said["disks"][0];
    assert_eq!(disk["in_use"], true, "{said}");
    let after = len(place.path("disk.vhdx"));
    assert!(before > 200 * MIB && after < 80 * MIB, "from {before} to {after} bytes: {said}");
    // What was written while the blocks were moved lies behind them.
    run_ok("sync", &["-f", &dir]);
    run_ok("fstrim", &[&dir]);
    place.ok("compact disk.vhdx");
    fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
    for number in (0..100).step_by(10) {
        assert!(fs::read(file(number)).unwrap() == contents(number), "file {number}");
    }
    run_ok("umount", &[&dir]);
    run_ok("fsck.ext4", &["-fn", &device]);
    let begun = Instant::now();
    place.ok("detach disk.vhdx");
    assert!(begun.elapsed() < PATIENCE);
    place.ok("check disk.vhdx");
    // The maps of the file system say little more.
    let open_bytes = len(place.path("disk.vhdx"));
    place.ok("compact disk.vhdx");
    let closed_bytes = len(place.path("disk.vhdx"));
    assert!(open_bytes <= closed_bytes + closed_bytes / 4, "{open_bytes}, and then {closed_bytes}");
}
