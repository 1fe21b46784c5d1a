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

/// Writes to a block that is new, by closing the disk, which writes but does not flush. Then the
/// server is killed and started again, and the machine flushes.
const AFTER_A_DEATH: &str = "\
    echo GUEST: WRITTEN; sleep 8\n\
    if dd if=/dev/zero of=/dev/vda bs=4k count=1 conv=fsync,notrunc 2>/dev/null\n\
    then echo GUEST: a flush succeeded; else echo GUEST: a flush failed; fi\n\
    echo GUEST: END; sleep 100\n";

#[test]
fn a_machine_whose_server_was_killed_goes_on_or_is_told() {
    for (conv, outcome) in [("fsync,notrunc", "succeeded"), ("notrunc", "failed")] {
        let Some(mut guest) = Guest::new(&MODULES[..2], &[]) else { return };
        let place = Place::with(&["disk.vhdx"]);
        let line = "disk.vhdx --vhost-user vhost.sock";
        let Some(first) = place.serve(line) else { return };
        guest.give_vhost_user(&place.shop.path("vhost.sock"));
        let mut next = None;
        let is_replaced = || {
            first.stop(Signal::SIGKILL);
            next = place.serve(line);
        };
        let write = format!("dd if=/dev/urandom of=/dev/vda bs=64k seek=100 count=1 conv={conv} 2>/dev/null\n");
        let said = guest.run_and_kill(&(write + AFTER_A_DEATH), "GUEST: WRITTEN", is_replaced, "GUEST: END");
        let Some(said) = said else { return };
        let next = next.expect("it was served before");
        assert!(said.contains(&format!("GUEST: a flush {outcome}")), "{said}\n{}", next.log());
        let told = next.log().contains("every request fails until the machine is reset");
        assert_eq!(told, outcome == "failed", "{}", next.log());
        assert_eq!(next.stop(Signal::SIGTERM), Some(0));
        // Space that a killed server had got ahead of use is a leak until the next block.
        assert!(matches!(place.run("check disk.vhdx").0, Some(0 | 3)));
    }
}

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
