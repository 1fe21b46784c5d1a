//! partitions as a user types it, on disks made by mkfs and sfdisk.

use crate::common::Workshop;
use std::{
    io::Write,
    process::{Command, Stdio},
};

/// Runs a tool in the folder of `shop`; `None` if it is not installed.
fn tool(shop: &Workshop, line: &[&str], stdin: &str) -> Option<()> {
    let spawned = Command::new(line[0])
        .args(&line[1..])
        .current_dir(shop.path(""))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let Ok(mut child) = spawned else {
        println!("skipped: partitions: {} is not installed", line[0]);
        return None;
    };
    child.stdin.take().unwrap().write_all(stdin.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success(), "{line:?}");
    Some(())
}

#[test]
fn a_file_system_without_a_table_is_listed() {
    let shop = Workshop::new();
    shop.ok("create disk.raw --size 64M");
    if tool(&shop, &["mkfs.ext4", "-q", "-L", "root", "disk.raw"], "").is_none() {
        return;
    }
    shop.ok("convert disk.raw disk.vhdx");
    let found = shop.json("partitions disk.vhdx");
    assert_eq!((&found["table"], &found["problem"]), (&"none".into(), &serde_json::Value::Null));
    let volume = &found["volumes"][0];
    assert_eq!((&volume["contents"], &volume["label"]), (&"ext4".into(), &"root".into()));
    assert_eq!(
        (&volume["place"], &volume["start"], &volume["length"]),
        (&"disk".into(), &0.into(), &(64 << 20).into())
    );
    assert!(volume["free"].as_u64().unwrap() > 40 << 20, "{volume}");
    assert_eq!(volume["free_unknown_because"], serde_json::Value::Null);
    let said = shop.ok("partitions disk.vhdx");
    assert!(said.starts_with("disk.vhdx: 64 MiB, partition table: none\n\nvolume"), "{said}");
    assert!(said.contains("ext4") && said.contains("root"), "{said}");
}

#[test]
fn partitions_are_listed_with_what_is_known_of_them() {
    let shop = Workshop::new();
    shop.ok("create disk.raw --size 64M");
    let table = "label: gpt\nsize=16M, name=\"boot\"\nsize=32M, type=linux\n";
    if tool(&shop, &["sfdisk", "-q", "disk.raw"], table).is_none() {
        return;
    }
    shop.ok("convert disk.raw disk.vhd");
    let found = shop.json("partitions disk.vhd");
    assert_eq!(found["table"], "GPT");
    let volumes = found["volumes"].as_array().unwrap();
    assert_eq!(volumes.len(), 2);
    assert_eq!((&volumes[0]["partition"], &volumes[0]["partition_name"]), (&1.into(), &"boot".into()));
    assert_eq!((&volumes[1]["start"], &volumes[1]["length"]), (&(17 << 20).into(), &(32 << 20).into()));
    assert_eq!(volumes[1]["contents"], serde_json::Value::Null);
    let said = shop.ok("partitions disk.vhd");
    assert!(said.contains("partition 2  17825792  32 MiB     ?  -"), "{said}");
    assert!(said.contains("partition 1: "), "no reason is given: {said}");
}

#[test]
fn an_empty_disk_has_nothing_known() {
    let shop = Workshop::new();
    shop.ok("create disk.vhdx --size 64M");
    let found = shop.json("partitions disk.vhdx");
    assert_eq!(found["volumes"][0]["contents"], serde_json::Value::Null);
    assert!(shop.fails(1, "partitions none.vhdx").contains("none.vhdx"));
}
