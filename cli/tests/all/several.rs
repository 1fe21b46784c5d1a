//! Several files given to one command, as a user types them.

use crate::common::{Ended, Workshop};
use serde_json::Value;
use std::fs;

fn shop() -> Workshop {
    let shop = Workshop::new();
    shop.ok("create one.vhdx --size 16M");
    shop.ok("create two.vhd --size 4M");
    fs::write(shop.path("text.vhdx"), "no image").unwrap();
    shop
}

fn document(ended: &Ended) -> Value {
    let document: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(document["schema"], "diskwright.several/1");
    document
}

#[test]
fn a_failure_of_one_file_does_not_stop_the_others() {
    let shop = shop();
    let ended = shop.run("info one.vhdx missing.vhdx two.vhd");
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("missing.vhdx") && ended.stderr.lines().count() == 1, "{ended:?}");
    let alone = [shop.ok("info one.vhdx"), shop.ok("info two.vhd")];
    assert!(ended.stdout.starts_with(&alone[0]) && ended.stdout.ends_with(&alone[1]), "{ended:?}");
    let chains = shop.ok("info one.vhdx two.vhd --chain");
    assert!(chains.starts_with("one.vhdx:\na disk without parents\n"), "{chains}");
    assert!(chains.contains("\n\ntwo.vhd:\na disk without parents\n"), "{chains}");
    let parts = shop.ok("partitions one.vhdx two.vhd");
    assert!(parts.starts_with("one.vhdx: 16 MiB, ") && parts.contains("\n\ntwo.vhd: 4 MiB, "), "{parts}");
}

#[test]
fn json_of_several_files_is_one_document_and_of_a_single_one_its_own() {
    let shop = shop();
    let ended = shop.run("info one.vhdx text.vhdx two.vhd --json");
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let files = document(&ended)["files"].clone();
    let alone: Value = shop.json("info one.vhdx");
    assert_eq!((&files[0]["file"], &files[0]["exit_code"]), (&"one.vhdx".into(), &0.into()));
    assert_eq!((&files[0]["result"], &files[0]["error"]), (&alone, &Value::Null));
    assert_eq!((&files[1]["exit_code"], &files[1]["result"]), (&1.into(), &Value::Null));
    assert!(files[1]["error"].as_str().unwrap().contains("text.vhdx"), "{files}");
    assert_eq!(files[2]["result"]["file"], "two.vhd");
    assert_eq!(alone["schema"], "diskwright.info/1");
}

/// `check` ends with 2 for damage, which is worse than a file that could not be checked.
#[test]
fn the_exit_code_is_the_worst_of_all_files() {
    let shop = shop();
    assert_eq!(shop.run("check one.vhdx two.vhd").code, Some(0));
    assert_eq!(shop.run("check missing.vhdx two.vhd").code, Some(1));
    // The first entry of the BAT leads beyond the end of the file.
    let mut bytes = fs::read(shop.path("two.vhd")).unwrap();
    let table = u64::from_be_bytes(bytes[528..536].try_into().unwrap()) as usize;
    bytes[table..table + 4].copy_from_slice(&0x00ff_ffff_u32.to_be_bytes());
    fs::write(shop.path("two.vhd"), bytes).unwrap();
    let ended = shop.run("check two.vhd missing.vhdx one.vhdx --json");
    assert_eq!(ended.code, Some(2), "{ended:?}");
    let files = document(&ended)["files"].clone();
    assert_eq!(files[0]["result"]["verdict"], "corrupt", "{files}");
    assert_eq!([&files[0]["exit_code"], &files[1]["exit_code"], &files[2]["exit_code"]], [2, 1, 0]);
}

#[test]
fn what_belongs_to_one_file_is_refused_before_anything_is_done() {
    let shop = shop();
    // Wrong usage of `check` is 1: its 2 is damage.
    let refused = shop.fails(1, "check one.vhdx two.vhd --repair --undo-file x.undo");
    assert!(refused.contains("--undo-file is for one file, and 2 are named"), "{refused}");
    for line in ["info", "check", "partitions", "snapshot", "snapshot delete", "reconnect --search .", "detach"] {
        let code = if line == "check" { 1 } else { 2 };
        assert_eq!(shop.run(line).code, Some(code), "{line}");
    }
}

#[test]
fn several_disks_are_frozen_under_one_name_and_thawed() {
    let shop = shop();
    let said = shop.run("snapshot one.vhdx missing.vhdx two.vhd --name monday");
    assert_eq!(said.code, Some(1), "{said:?}");
    assert_eq!(
        said.stdout,
        "one.vhdx is now a new child of one_monday.avhdx\ntwo.vhd is now a new child of two_monday.avhd\n"
    );
    // Without a name, all get the same time.
    let taken: Value = shop.json("snapshot one.vhdx two.vhd");
    let frozen = |at: usize| {
        let name = taken["files"][at]["result"]["frozen"].as_str().unwrap();
        name.rsplit_once('_').unwrap().1.split_once('.').unwrap().0.to_owned()
    };
    assert_eq!(frozen(0), frozen(1));
    let removed = shop.json("snapshot delete one_monday.avhdx two_monday.avhd");
    assert!(removed["files"][1]["result"]["merged_into"].as_str().unwrap().contains("two_"), "{removed}");
    shop.ok("check one.vhdx two.vhd");
}

#[test]
fn children_of_a_parent_that_moved_are_reconnected_together() {
    let shop = shop();
    shop.ok("clone one.vhdx a.vhdx b.vhdx");
    fs::create_dir(shop.path("new")).unwrap();
    fs::rename(shop.path("one.vhdx"), shop.path("new/one.vhdx")).unwrap();
    let said = shop.ok("reconnect a.vhdx b.vhdx --parent new/one.vhdx");
    assert!(said.contains("a.vhdx is connected to ") && said.contains("b.vhdx is connected to "), "{said}");
    shop.ok("check a.vhdx b.vhdx");
}
