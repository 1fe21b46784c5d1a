//! snapshot, clone and resize as a user types them.

use crate::common::{Workshop, without_free};
use std::fs;

#[test]
fn a_disk_is_frozen_listed_and_taken_back() {
    let shop = Workshop::new();
    shop.ok("create vm.vhdx --size 64M");
    shop.ok("io vm.vhdx -c 'write -P 1 0 64K'");
    let said = shop.ok("snapshot vm.vhdx --name monday --dry-run");
    assert_eq!(
        without_free(&said),
        "vm.vhdx would become a new child of vm_monday.avhdx; it needs up to 4 MiB; [free]; nothing was changed\n"
    );
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
    assert!(refused.contains("as their parent"), "{refused}");
    assert!(shop.fails(1, "snapshot delete vm_tuesday.avhdx").contains("--discard"));
    assert_eq!(shop.ok("snapshot delete vm_tuesday.avhdx --discard"), "vm_tuesday.avhdx is removed\n");
    assert_eq!(
        shop.ok("snapshot revert vm.vhdx --discard --to other.vhdx"),
        "vm.vhdx is now a new child of other.vhdx, and what it had is gone\n"
    );
    assert_eq!(shop.json("snapshot list vm.vhdx")["images"].as_array().unwrap().len(), 3);
    shop.ok("check vm.vhdx --chain");
}

#[test]
fn a_child_is_merged() {
    let shop = Workshop::new();
    shop.ok("create base.vhdx --size 64M");
    shop.ok("io base.vhdx -c 'write -P 1 0 64K'");
    shop.ok("clone base.vhdx low.avhdx");
    shop.ok("io low.avhdx -c 'write -P 2 4M 64K'");
    shop.ok("clone low.avhdx top.vhdx");
    shop.ok("io top.vhdx -c 'write -P 3 0 4K'");
    assert_eq!(
        without_free(&shop.ok("merge low.avhdx --dry-run")),
        "base.vhdx would get 64 KiB of data from low.avhdx\n\
         its file would grow by up to 2 MiB (2097152 bytes): it needs up to 2 MiB; [free]\n\
         to be removed: low.avhdx\nto get a new link to the parent: top.vhdx\nnothing was changed\n"
    );
    assert_eq!(fs::read_dir(shop.path("")).unwrap().count(), 3);
    let refused = shop.fails(1, "merge low.avhdx --into top.vhdx");
    assert!(refused.contains("not among its ancestors"), "{refused}");
    let said = shop.ok("merge low.avhdx");
    assert!(said.starts_with("base.vhdx got 64 KiB of data from low.avhdx, in "), "{said}");
    assert!(said.ends_with("removed: low.avhdx\nnew link to the parent: top.vhdx\n"), "{said}");
    shop.ok("io top.vhdx -c 'read -P 2 4M 64K' --quiet");
    let whole = shop.ok("merge top.vhdx --to whole.vhd --type fixed");
    assert!(whole.starts_with("whole.vhd is a disk of 64 MiB"), "{whole}");
    shop.ok("compare top.vhdx whole.vhd");
    let done = shop.json("merge top.vhdx --keep-name");
    assert_eq!((done["data_bytes"].as_u64(), done["old_size"].as_u64()), (Some(4096), Some(64 << 20)));
    shop.ok("compare top.vhdx whole.vhd");
    assert!(shop.fails(1, "merge top.vhdx").contains("no parent"));
    assert!(shop.fails(2, "merge nbd://host/x").contains("only a disk in a file"));
    assert!(shop.fails(1, "merge top.vhdx --to whole.vhd").contains("exists"));
    shop.fails(2, "merge top.vhdx --to a.vhd --into b.vhd");
    let mut names: Vec<_> = fs::read_dir(shop.path("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["top.vhdx", "whole.vhd"]);
}

#[test]
fn a_snapshot_with_one_child_is_merged_with_it() {
    for extension in ["vhd", "vhdx"] {
        let shop = Workshop::new();
        shop.ok(&format!("create vm.{extension} --size 64M"));
        for (number, name) in ["monday", "tuesday", "wednesday"].into_iter().enumerate() {
            shop.ok(&format!("io vm.{extension} -c 'write -P {} {number}M 64K'", number + 1));
            shop.ok(&format!("snapshot vm.{extension} --name {name}"));
        }
        let tuesday = format!("vm_tuesday.a{extension}");
        let would = shop.ok(&format!("snapshot delete vm_monday.a{extension} --dry-run"));
        assert!(
            would.starts_with(&format!(
                "vm_monday.a{extension} would get 64 KiB of data from {tuesday} and would become {tuesday}"
            )),
            "{would}"
        );
        let said = shop.ok(&format!("snapshot delete vm_monday.a{extension}"));
        assert!(said.contains(&format!(" and is now {tuesday}, in ")), "{said}");
        shop.ok(&format!("io vm.{extension} -c 'read -P 1 0 64K' -c 'read -P 2 1M 64K' -c 'read -P 3 2M 64K' --quiet"));
        let done = shop.json(&format!("snapshot delete vm_wednesday.a{extension}"));
        assert!(done["merged_into"].as_str().unwrap().ends_with(&format!("vm.{extension}")), "{done}");
        shop.ok(&format!("io vm.{extension} -c 'write -P 4 3M 64K' -c 'read -P 3 2M 64K' --quiet"));
        assert_eq!(fs::read_dir(shop.path("")).unwrap().count(), 2);
        shop.ok(&format!("check vm.{extension} --chain"));
    }
}

#[test]
fn what_cannot_be_done_is_said_and_changes_nothing() {
    let shop = Workshop::new();
    shop.ok("create vm.vhdx --size 64M");
    shop.ok("create disk.raw --size 1M");
    assert!(shop.fails(1, "snapshot disk.raw").contains("convert it to VHDX first"));
    assert!(shop.fails(2, "snapshot vm.vhdx --name a/b").contains("without slashes"));
    assert!(shop.fails(1, "snapshot none.vhdx").contains("none.vhdx"));
    assert!(shop.fails(1, "snapshot revert vm.vhdx").contains("not a differencing disk"));
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
        "vm.vhdx: would be enlarged from 64 MiB (67108864 bytes) to 128 MiB (134217728 bytes); it needs no space; \
         nothing was changed\n"
    );
    assert!(shop.ok("resize vm.vhdx 128M").starts_with("vm.vhdx: enlarged from 64 MiB"));
    assert_eq!(shop.json("resize vm.vhdx +1G")["new_size"], (1u64 << 30) + (128 << 20));
    assert_eq!(shop.json("info vm.vhdx")["virtual_size"], (1u64 << 30) + (128 << 20));
    shop.ok("check vm.vhdx");
}

/// There is no snapshot that could be named.
#[test]
fn a_disk_without_a_parent_is_told_that_it_is_not_differencing() {
    let shop = Workshop::new();
    shop.ok("create vm.vhdx --size 8M");
    let told = shop.fails(1, "snapshot revert vm.vhdx --name old");
    assert!(told.contains("vm.vhdx: it is not a differencing disk"), "{told}");
    assert!(!told.contains("name the snapshot") && told.contains("`snapshot` it first"), "{told}");
    assert_eq!(fs::read_dir(shop.path("")).unwrap().count(), 1);
}
