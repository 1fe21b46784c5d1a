//! snapshot, clone and resize as a user types them.

use crate::common::Workshop;
use std::fs;

#[test]
fn a_disk_is_frozen_listed_and_taken_back() {
    let shop = Workshop::new();
    shop.ok("create vm.vhdx --size 64M");
    shop.ok("io vm.vhdx -c 'write -P 1 0 64K'");
    let said = shop.ok("snapshot vm.vhdx --name monday --dry-run");
    assert_eq!(said, "vm.vhdx would become a new child of vm_monday.avhdx; nothing was changed\n");
    assert_eq!(fs::read_dir(shop.path("")).unwrap().count(), 1);
    assert_eq!(shop.ok("snapshot vm.vhdx --name monday"), "vm.vhdx is now a new child of vm_monday.avhdx\n");
    shop.ok("io vm.vhdx -c 'write -P 2 0 64K'");
    shop.ok("clone vm_monday.avhdx other.vhdx");
    let listed = shop.ok("snapshot list .");
    let names: Vec<&str> = listed.lines().map(|line| line.split("  ").next().unwrap().trim_end()).collect();
    assert_eq!(names, ["image", "vm_monday.avhdx", "├─ other.vhdx", "└─ vm.vhdx"]);
    assert_eq!(
        shop.ok("snapshot revert vm.vhdx --name tuesday"),
        "vm.vhdx is now a new child of vm_monday.avhdx, and what it had is in vm_tuesday.avhdx\n"
    );
    shop.ok("io vm.vhdx -c 'read -P 1 0 64K'");
    shop.ok("io vm_tuesday.avhdx -c 'read -P 2 0 64K' --quiet");
    let refused = shop.fails(1, "snapshot delete vm_monday.avhdx");
    assert!(refused.contains("as its parent"), "{refused}");
    assert_eq!(shop.ok("snapshot delete vm_tuesday.avhdx"), "vm_tuesday.avhdx is removed\n");
    assert_eq!(
        shop.ok("snapshot revert vm.vhdx --discard --to other.vhdx"),
        "vm.vhdx is now a new child of other.vhdx, and what it had is gone\n"
    );
    assert_eq!(shop.json("snapshot list vm.vhdx")["images"].as_array().unwrap().len(), 3);
    shop.ok("check vm.vhdx --chain");
}

#[test]
fn what_cannot_be_done_is_said_and_changes_nothing() {
    let shop = Workshop::new();
    shop.ok("create vm.vhdx --size 64M");
    shop.ok("create disk.raw --size 1M");
    assert!(shop.fails(1, "snapshot disk.raw").contains("convert it to VHDX first"));
    assert!(shop.fails(2, "snapshot vm.vhdx --name a/b").contains("without slashes"));
    assert!(shop.fails(1, "snapshot none.vhdx").contains("none.vhdx"));
    assert!(shop.fails(1, "snapshot revert vm.vhdx").contains("no parent"));
    assert!(shop.fails(1, "snapshot list nowhere").contains("nowhere"));
    shop.fails(2, "snapshot");
    shop.fails(2, "snapshot nbd://localhost/x");
    assert!(shop.fails(1, "clone disk.raw a.vhdx").contains("disk.raw"));
    assert!(shop.fails(2, "clone vm.vhdx a.vhdx a.vhdx").contains("twice"));
    assert!(shop.fails(1, "clone vm.vhdx disk.raw").contains("exists"));
    assert!(shop.fails(1, "resize vm.vhdx 1M").contains("smaller"));
    assert_eq!(shop.ok("snapshot list ."), shop.ok("snapshot list vm.vhdx"));
    assert_eq!(fs::read_dir(shop.path("")).unwrap().count(), 2);
}

#[test]
fn a_disk_is_enlarged() {
    let shop = Workshop::new();
    shop.ok("create vm.vhdx --size 64M");
    assert_eq!(
        shop.ok("resize vm.vhdx +64M --dry-run"),
        "vm.vhdx: would be enlarged from 64 MiB (67108864 bytes) to 128 MiB (134217728 bytes); nothing was changed\n"
    );
    assert!(shop.ok("resize vm.vhdx 128M").starts_with("vm.vhdx: enlarged from 64 MiB"));
    assert_eq!(shop.json("resize vm.vhdx +1G")["new_size"], (1u64 << 30) + (128 << 20));
    assert_eq!(shop.json("info vm.vhdx")["virtual_size"], (1u64 << 30) + (128 << 20));
    shop.ok("check vm.vhdx");
}
