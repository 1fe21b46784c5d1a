//! A virtual machine whose disk is a chain of ours by vhost-user: it makes a file system, writes
//! and trims, while the disk is frozen and enlarged; it is killed, and starts again.

use crate::control::Place;
use crate::guest_machine::{Guest, find};
use nix::sys::signal::Signal;
use std::process::Command;

/// A virtio disk, ext4.
const MODULES: [&str; 5] = ["virtio_pci", "virtio_blk", "crc32c_generic", "crc32c_intel", "ext4"];

/// Writes files that are durable, says so, and goes on until it is killed.
const FIRST: &str = "\
    echo GUEST: disk $(cat /sys/block/vda/size) $(cat /sys/block/vda/queue/discard_max_bytes) \
      $(cat /sys/block/vda/queue/write_cache) $(ls /sys/block/vda/mq | wc -l)\n\
    /programs/mke2fs -q -t ext4 -b 4096 /dev/vda 96M\n\
    mount -t ext4 /dev/vda /mnt\n\
    for i in 1 2 3 4 5 6; do dd if=/dev/urandom of=/mnt/f$i bs=4097 count=$((i*100)) 2>/dev/null; done\n\
    rm /mnt/f2; sync; fstrim /mnt\n\
    cd /mnt; sha256sum f* | sed 's/^/GUEST: sum /'; cd /\n\
    echo GUEST: WRITTEN\n\
    i=0; until [ $(cat /sys/block/vda/size) -gt 262144 ] || [ $i -gt 200 ]; do sleep 0.1; i=$((i+1)); done\n\
    echo GUEST: grown to $(cat /sys/block/vda/size)\n\
    sync; echo GUEST: KILL\n\
    while true; do dd if=/dev/urandom of=/mnt/late bs=64k count=64 2>/dev/null; sync; done\n";

/// The journal is replayed, and everything is there.
const SECOND: &str = "\
    mount -t ext4 /dev/vda /mnt\n\
    cd /mnt; sha256sum f* | sed 's/^/GUEST: sum /'; cd /\n\
    echo more > /mnt/more; umount /mnt\n";

#[test]
fn a_machine_on_a_chain_is_killed_and_finds_everything_again() {
    let Some(mut guest) = Guest::new(&MODULES, &["mke2fs"]) else { return };
    if find("e2fsck").is_none() {
        println!("skipped: a guest: e2fsck is not installed");
        return;
    }
    let place = Place::with(&[]);
    place.ok("create disk.vhdx --size 128M");
    place.ok("snapshot disk.vhdx --name base");
    let Some(server) = place.serve("disk.vhdx --vhost-user vhost.sock") else { return };
    guest.give_vhost_user(&place.shop.path("vhost.sock"));
    let change = || {
        place.ok("snapshot disk.vhdx --name live");
        place.ok("serve-ctl disk.vhdx resize 160M");
    };
    let Some(first) = guest.run_and_kill(FIRST, "GUEST: WRITTEN", change, "GUEST: KILL") else { return };
    let sums = |console: &str| -> Vec<String> {
        console.lines().filter_map(|line| line.split_once("GUEST: sum ")).map(|(_, sum)| sum.to_owned()).collect()
    };
    println!("{first}");
    assert!(first.contains(&format!("GUEST: disk {} ", (128 << 20) / 512)), "{first}");
    assert!(first.contains(&format!("GUEST: grown to {}", (160u64 << 20) / 512)), "the guest was told of the new size");
    assert!(first.contains("write back"), "the cache is announced");
    assert_eq!(sums(&first).len(), 5);
    let Some(second) = guest.run(SECOND) else { return };
    assert_eq!(sums(&second), sums(&first), "{second}");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    place.ok("check disk.vhdx");
    place.ok("convert disk.vhdx out.raw");
    let checked = Command::new(find("e2fsck").unwrap()).args(["-fn"]).arg(place.shop.path("out.raw")).output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
}
