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

/// The same for formats with tables of other kinds: an entry of the second block is damaged.
#[test]
fn every_format_with_tables_is_rescued() {
    for extension in ["qcow2", "vdi", "vmdk"] {
        let shop = Workshop::new();
        let (disk, saved) = (format!("disk.{extension}"), format!("saved.{extension}"));
        shop.ok(&format!("create {disk} --size 16M --block-size 1M"));
        shop.ok(&format!("io {disk} -c 'write -P 7 0 1M' -c 'write -P 8 1M 1M' -c 'write -P 9 3M 1M' -c flush"));
        let path = shop.path(&disk);
        let sound = fs::read(&path).unwrap();
        let mut bytes = sound.clone();
        let u32_at = |at: usize| u32::from_le_bytes(sound[at..at + 4].try_into().unwrap()) as usize;
        let u64_at = |at: usize| (u64::from_be_bytes(sound[at..at + 8].try_into().unwrap()) & !(1 << 63)) as usize;
        let entries = match extension {
            "qcow2" => Vec::from_iter(Some(u64_at(u64_at(40)) + 8..u64_at(u64_at(40)) + 16)),
            "vdi" => Vec::from_iter(Some(u32_at(0x154) + 4..u32_at(0x154) + 8)),
            // Both copies of the table.
            _ => [48, 56].map(|at| u32_at(u32_at(at) * 512) * 512).map(|at| at + 4..at + 8).to_vec(),
        };
        for entry in &entries {
            bytes[entry.clone()].fill(0xd7);
        }
        fs::write(&path, &bytes).unwrap();
        let ended = shop.run(&format!("rescue {disk} {saved} --map map.json --leftovers pieces"));
        assert_eq!(ended.code, Some(3), "{ended:#?}");
        let err = flat(&ended.stderr);
        assert!(err.contains("lost: bytes 1048576 to 2097152: "), "{extension}: {err}");
        shop.ok(&format!("io {saved} -c 'read -P 7 0 1M' -c 'read -P 0 1M 2M' -c 'read -P 9 3M 1M'"));
        shop.ok(&format!("check {saved}"));
        let map: serde_json::Value = serde_json::from_str(&fs::read_to_string(shop.path("map.json")).unwrap()).unwrap();
        assert_eq!((&map["data_bytes"], &map["lost_bytes"]), (&(2 << 20).into(), &(1 << 20).into()), "{extension}");
        let at = map["leftovers"][0]["file_offset"].as_u64().unwrap();
        let piece = fs::read(shop.path(&format!("pieces/{at:016x}.bin"))).unwrap();
        assert!(piece.len() == 1 << 20 && piece.iter().all(|byte| *byte == 8), "{extension}");
        // One copy of a table of a VMDK is enough.
        if let [first, _] = &entries[..] {
            let mut bytes = sound.clone();
            bytes[first.clone()].fill(0xd7);
            fs::write(&path, &bytes).unwrap();
            shop.ok(&format!("rescue {disk} whole.raw"));
            shop.ok("io whole.raw -c 'read -P 8 1M 1M'");
        }
        // Without its header, what only the user knows is asked for.
        let mut bytes = sound.clone();
        bytes[..512].fill(0);
        fs::write(&path, &bytes).unwrap();
        let error = shop.fails(1, &format!("rescue {disk} named.raw"));
        assert!(error.contains("--block-size"), "{extension}: {error}");
        shop.run(&format!("rescue {disk} named.raw --block-size 1M --size 16M --no-parent"));
        shop.ok("io named.raw -c 'read -P 7 0 1M' -c 'read -P 8 1M 1M' -c 'read -P 9 3M 1M'");
    }
}
