//! A raw disk in several files, as the user types it.

use crate::common::Workshop;
use crate::serving::Serving;
use nix::sys::signal::Signal;
use std::{fs, process::Command};

const MIB: u64 = 1 << 20;

/// `whole.raw` of 33 MiB with an ext4, and the same in `disk.001` to `disk.007`; whether all tools
/// are here.
fn split_ext4(shop: &Workshop) -> bool {
    shop.ok("create whole.raw --size 33M");
    tool(shop, "mkfs.ext4", &["-q", "-F", "whole.raw"])
        && tool(shop, "split", &["-b", "5M", "-a", "3", "--numeric-suffixes=1", "whole.raw", "disk."])
}

fn tool(shop: &Workshop, program: &str, args: &[&str]) -> bool {
    match Command::new(program).args(args).current_dir(shop.path("")).output() {
        Ok(output) => {
            assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
            true
        }
        Err(error) => {
            println!("skipped: {program}: {error}");
            false
        }
    }
}

fn joined(shop: &Workshop) -> Vec<u8> {
    (1..=7).flat_map(|number| fs::read(shop.path(&format!("disk.00{number}"))).unwrap()).collect()
}

#[test]
fn the_first_file_stands_for_the_disk() {
    let shop = Workshop::new();
    if !split_ext4(&shop) {
        return;
    }
    let info = shop.json("info disk.001");
    assert_eq!((&info["format"], &info["virtual_size"]), (&"raw".into(), &(33 * MIB).into()));
    let files = info["files"].as_array().unwrap();
    assert_eq!((files.len(), &info["file_size"]), (7, &(33 * MIB).into()));
    assert_eq!((&files[0]["file"], &files[6]["file_size"]), (&"disk.001".into(), &(3 * MIB).into()));
    assert!(files[6]["file"].as_str().unwrap().ends_with("/disk.007"), "{info:#}");
    assert!(shop.json("info whole.raw").get("files").is_none(), "one file is no list");
    let told = shop.ok("info disk.001");
    assert!(told.contains("7 files") && told.contains("/disk.007"), "{told}");
    assert!(shop.ok("check disk.001").contains("sound"));
    shop.ok("compare disk.001 whole.raw");
    shop.ok("io disk.001 -c 'write -P 7 9M 2M' -c flush");
    shop.ok("io whole.raw -c 'write -P 7 9M 2M' -c flush");
    assert!(joined(&shop) == fs::read(shop.path("whole.raw")).unwrap());

    let map = shop.json("map disk.001");
    let mut at = 0;
    for extent in map["extents"].as_array().unwrap() {
        assert_eq!(extent["start"], at, "a gap in {map:#}");
        let number = at / (5 * MIB) + 1;
        let name = extent["file"].as_str().unwrap();
        assert!(name.ends_with(&format!("disk.00{number}")), "{extent} is in part {number}");
        if let Some(offset) = extent["offset"].as_u64() {
            assert_eq!(offset, at % (5 * MIB));
        }
        at += extent["length"].as_u64().unwrap();
    }
    assert_eq!(at, 33 * MIB);
    assert!(shop.ok("map disk.001").lines().last().unwrap().ends_with("/disk.007"));
    assert_eq!(shop.json("map disk.001 --draw")["layers"].as_array().unwrap().len(), 1);

    shop.ok("convert disk.001 copy.vhdx --verify");
    shop.ok("compare copy.vhdx whole.raw");
    shop.ok("convert disk.001 copy.raw --verify");
    assert!(fs::read(shop.path("copy.raw")).unwrap() == joined(&shop));
}

#[test]
fn what_a_client_of_a_server_writes_is_in_the_files() {
    let shop = Workshop::new();
    if !split_ext4(&shop) {
        return;
    }
    (1..=7).for_each(|n| {
        fs::write(shop.path(&format!("disk.00{n}")), vec![0x11; if n < 7 { 5 << 20 } else { 3 << 20 }]).unwrap()
    });
    let Some(server) = Serving::start(&shop, "serve d=disk.001 --nbd ./s") else { return };
    let uri = server.uri("d");
    let locked = shop.fails(1, "io disk.003 --format raw -c 'write 0 4k'");
    assert!(locked.contains("in use"), "{locked}");
    shop.ok(&format!("convert whole.raw '{uri}' --verify"));
    shop.ok(&format!("io '{uri}' -c 'write -f 5100k 64k' -c 'write 14M 3M' -c flush"));
    shop.ok("io whole.raw -c 'write -f 5100k 64k' -c 'write 14M 3M' -c flush");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    assert!(joined(&shop) == fs::read(shop.path("whole.raw")).unwrap());
}

#[test]
fn what_is_wrong_with_a_set_is_told() {
    let shop = Workshop::new();
    shop.ok("create whole.raw --size 12M");
    if !tool(&shop, "split", &["-b", "4M", "-a", "3", "--numeric-suffixes=1", "whole.raw", "disk."]) {
        return;
    }
    let second = shop.path("disk.002");
    fs::OpenOptions::new().write(true).open(&second).unwrap().set_len(1000).unwrap();
    let checked = shop.run("check disk.001 --json");
    assert_eq!(checked.code, Some(2), "{checked:#?}");
    let report: serde_json::Value = serde_json::from_str(&checked.stdout).unwrap();
    let finding = &report["files"][0]["findings"][0];
    assert_eq!((&report["verdict"], &finding["offset"]), (&"corrupt".into(), &(4 * MIB).into()), "{report:#}");
    assert!(finding["message"].as_str().unwrap().contains("expected a multiple of the sector"), "{report:#}");
    fs::remove_file(&second).unwrap();
    let checked = shop.run("check disk.001");
    assert!(checked.code == Some(2) && checked.stdout.contains("/disk.002: the file is missing"), "{checked:#?}");
    for line in
        ["info disk.001", "map disk.001", "io disk.001 -c 'read 0 4k'", "convert disk.001 a.raw", "serve disk.001"]
    {
        let error = shop.fails(1, line);
        assert!(error.contains("disk.002") && error.contains("missing"), "{line}: {error}");
    }
    let later = shop.run("info disk.003");
    assert!(later.code == Some(0) && !later.stderr.contains("later part"), "nothing is beside it: {later:#?}");
}

#[test]
fn the_lab_measures_the_whole_set() {
    let shop = Workshop::new();
    shop.ok("create whole.raw --size 12M");
    if !tool(&shop, "split", &["-b", "4M", "-a", "3", "--numeric-suffixes=1", "whole.raw", "disk."]) {
        return;
    }
    let run = shop.json("lab run disk.001 --duration 1s --warm-up 0s");
    let target = &run["targets"][0];
    assert_eq!((&target["kind"], &target["size_bytes"]), (&"raw files".into(), &(12 * MIB).into()), "{run:#}");
}
