//! `diskwright rescue`: a damaged image, from the command line to the map.

use crate::common::{Workshop, flat, schemas};
use std::fs;

/// A VHDX with data in three blocks of 2 MiB, of which the entry of the second is damaged.
fn damaged() -> Workshop {
    let shop = Workshop::new();
    shop.ok("create disk.vhdx --size 16M");
    shop.ok("io disk.vhdx -c 'write -P 7 0 64K' -c 'write -P 8 2M 64K' -c 'write -P 9 4M 64K' -c flush");
    let path = shop.path("disk.vhdx");
    let mut bytes = fs::read(&path).unwrap();
    bytes[(3 << 20) + 8..(3 << 20) + 16].fill(0xd7);
    fs::write(path, bytes).unwrap();
    shop
}

#[test]
fn what_can_be_read_is_copied_and_the_rest_listed() {
    let shop = damaged();
    let ended = shop.run("rescue disk.vhdx saved.vhd --map map.json --leftovers pieces");
    assert_eq!(ended.code, Some(3), "{ended:#?}");
    assert!(ended.stdout.starts_with("saved.vhd: 16 MiB; "), "{ended:#?}");
    let err = flat(&ended.stderr);
    assert!(err.contains("lost: bytes 2097152 to 4194304: ") && err.contains("could not be placed"), "{err}");
    shop.ok("io saved.vhd -c 'read -P 7 0 64K' -c 'read -P 0 2M 64K' -c 'read -P 9 4M 64K'");
    shop.ok("check saved.vhd");
    let map = fs::read_to_string(shop.path("map.json")).unwrap();
    assert_eq!(schemas::validate(&map), "diskwright.rescue/1");
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    assert_eq!(map["lost_bytes"], 2 << 20);
    let lost = map["ranges"].as_array().unwrap().iter().find(|range| range["kind"] == "lost").unwrap();
    assert_eq!((lost["start"].as_u64(), lost["length"].as_u64()), (Some(2 << 20), Some(2 << 20)));
    let at = map["leftovers"][0]["file_offset"].as_u64().unwrap();
    let piece = fs::read(shop.path(&format!("pieces/{at:016x}.bin"))).unwrap();
    assert!(piece.len() == 64 << 10 && piece.iter().all(|byte| *byte == 8));
}

#[test]
fn a_map_or_a_disk_that_exists_is_not_replaced() {
    let shop = damaged();
    fs::write(shop.path("map.json"), b"mine").unwrap();
    let error = shop.fails(1, "rescue disk.vhdx saved.vhdx --map map.json");
    assert!(error.contains("map.json: cannot create the map"), "{error}");
    assert_eq!(fs::read(shop.path("map.json")).unwrap(), b"mine");
    let error = shop.fails(1, "rescue disk.vhdx disk.vhdx --map other.json");
    assert!(error.contains("file exists") && !shop.path("other.json").exists(), "{error}");
}

#[test]
fn what_the_user_can_name_is_asked_for() {
    let shop = damaged();
    let path = shop.path("disk.vhdx");
    let mut bytes = fs::read(&path).unwrap();
    bytes[2 << 20..3 << 20].fill(0);
    fs::write(path, bytes).unwrap();
    let error = shop.fails(1, "rescue disk.vhdx saved.raw");
    assert!(error.contains("--block-size"), "{error}");
    let error = shop.fails(1, "rescue disk.vhdx saved.raw --block-size 2M");
    assert!(error.contains("--size"), "{error}");
    let ended = shop.run("rescue disk.vhdx saved.raw --block-size 2M --size 16M");
    assert_eq!(ended.code, Some(3), "{ended:#?}");
    // Whether it has a parent is lost with the rest: that is told, and can be named.
    let err = flat(&ended.stderr);
    assert!(err.contains("may be a parent's") && err.contains("--no-parent") && err.contains("--parent"), "{err}");
    let ended = shop.run("rescue disk.vhdx alone.raw --block-size 2M --size 16M --no-parent");
    assert!(ended.code == Some(3) && !flat(&ended.stderr).contains("may be a parent's"), "{ended:#?}");
    shop.ok("io saved.raw -c 'read -P 7 0 64K' -c 'read -P 9 4M 64K'");
}
