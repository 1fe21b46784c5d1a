//! compact as a user types it.

use crate::common::Workshop;
use std::fs;

/// Makes a disk of 32 MiB with 4 MiB of data at its end and 8 MiB of zeros that are written.
fn disk(shop: &Workshop, name: &str) {
    shop.ok(&format!("create {name} --size 32M"));
    shop.ok(&format!("io {name} -c 'write -P 0 0 8M' -c 'write -P 7 24M 4M' -c flush"));
}

#[test]
fn space_is_estimated_and_given_back() {
    let shop = Workshop::new();
    disk(&shop, "vm.vhdx");
    let before = fs::read(shop.path("vm.vhdx")).unwrap();
    for option in ["--estimate", "--dry-run"] {
        let said = shop.ok(&format!("compact vm.vhdx {option}"));
        assert!(said.starts_with("vm.vhdx: would be compacted from 16 MiB to 8 MiB: "), "{said}");
        assert!(
            said.contains(
                "0 bytes free in file systems, 8 MiB zeros, 4 MiB moved; it needs no space; nothing was changed"
            ),
            "{said}"
        );
        // No file system is known there, and that is said.
        assert!(said.contains("disk: left alone: "), "{said}");
        assert!(fs::read(shop.path("vm.vhdx")).unwrap() == before);
    }
    let said = shop.ok("compact vm.vhdx");
    assert!(said.starts_with("vm.vhdx: compacted from 16 MiB to 8 MiB in "), "{said}");
    assert_eq!(fs::metadata(shop.path("vm.vhdx")).unwrap().len(), 8 << 20);
    shop.ok("io vm.vhdx -c 'read -P 0 0 24M' -c 'read -P 7 24M 4M' -c 'read -P 0 28M 4M'");
    shop.ok("check vm.vhdx");
    assert_eq!(shop.ok("compact vm.vhdx --quiet"), "");
}

#[test]
fn several_disks_are_compacted_and_a_failure_is_told() {
    let shop = Workshop::new();
    disk(&shop, "one.vhdx");
    disk(&shop, "two.vhd");
    shop.ok("create fixed.vhd --size 4M --type fixed");
    let ended = shop.run("compact one.vhdx fixed.vhd two.vhd --json");
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("fixed.vhd: it is a fixed disk"), "{}", ended.stderr);
    let told: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    let disks = told["disks"].as_array().unwrap();
    assert_eq!((disks[0]["file"].as_str(), disks[1]["file"].as_str()), (Some("one.vhdx"), Some("two.vhd")));
    assert_eq!((&disks[0]["zero_bytes"], &disks[0]["new_file_size"]), (&(8 << 20).into(), &(8 << 20).into()));
    assert_eq!(disks[1]["zero_bytes"], 8 << 20);
    assert_eq!(told["failed"][0]["file"], "fixed.vhd");
    assert!(shop.fails(1, "compact fixed.vhd").contains("convert it to a dynamic disk"));
    assert!(shop.fails(1, "compact missing.vhdx").contains("missing.vhdx"));
    assert_eq!(shop.run("compact").code, Some(2));
    assert_eq!(shop.run("compact one.vhdx --estimate --dry-run").code, Some(2));
}

#[test]
fn a_child_is_named() {
    let shop = Workshop::new();
    disk(&shop, "base.vhdx");
    shop.ok("create child.vhdx --parent base.vhdx");
    let said = shop.ok("compact base.vhdx");
    assert!(said.contains("child.vhdx is a child of this disk, so only blocks of zeros are given back"), "{said}");
    shop.ok("io child.vhdx -c 'read -P 7 24M 4M'");
    shop.ok("create base.vhd --size 4M");
    shop.ok("create child.vhd --parent base.vhd");
    assert!(shop.fails(1, "compact base.vhd").contains("child.vhd is its child"));
}
