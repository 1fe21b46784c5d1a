//! `check --repair` and `check --undo` on the command line.

use crate::common::{Workshop, schemas};
use serde_json::Value;
use std::{fs, path::Path};

const MIB: usize = 1 << 20;

/// A disk with blocks of 2 MiB and data in its first two.
fn made(shop: &Workshop) {
    shop.ok("create disk.vhd --size 16M");
    shop.ok("io disk.vhd -c 'write -P 7 0 1M' -c 'write -P 8 2M 1M'");
}

fn table(bytes: &[u8]) -> usize {
    let field = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    field(field(16) + 16)
}

fn change(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

/// The document of a command with any exit code, after its schema was checked.
fn document(shop: &Workshop, line: &str) -> (Option<i32>, Value) {
    let ended = shop.run(&format!("{line} --json"));
    schemas::validate(&ended.stdout);
    (ended.code, serde_json::from_str(&ended.stdout).unwrap())
}

#[test]
fn a_footer_is_mended_and_the_repair_undone() {
    let shop = Workshop::new();
    made(&shop);
    change(&shop.path("disk.vhd"), |bytes| bytes[30..60].fill(0xaa));
    let damaged = fs::read(shop.path("disk.vhd")).unwrap();
    let ended = shop.run("check disk.vhd");
    assert_eq!(ended.code, Some(2));
    assert!(ended.stdout.contains("--repair fixes it without loss"), "{}", ended.stdout);
    let planned = shop.run("check disk.vhd --repair --dry-run");
    assert_eq!(planned.code, Some(2), "a dry run ends with the code of the file as it is");
    assert!(planned.stdout.contains("would write 512 bytes at offset 0"), "{}", planned.stdout);
    assert!(planned.stdout.contains("nothing was changed"), "{}", planned.stdout);
    assert!(fs::read(shop.path("disk.vhd")).unwrap() == damaged && !shop.path("disk.vhd.undo").exists());
    let said = shop.ok("check disk.vhd --repair");
    assert!(said.contains("disk.vhd: repaired    offset") || said.contains("disk.vhd: repaired  offset"), "{said}");
    assert!(said.contains("disk.vhd.undo has what --undo needs") && said.contains("disk.vhd: sound"), "{said}");
    shop.ok("io disk.vhd -c 'read -P 7 0 1M' -c 'read -P 8 2M 1M'");
    let said = shop.ok("check disk.vhd --undo");
    assert!(said.contains("the repair is undone"), "{said}");
    assert!(fs::read(shop.path("disk.vhd")).unwrap() == damaged && !shop.path("disk.vhd.undo").exists());
    let refused = shop.fails(1, "check disk.vhd --undo");
    assert!(refused.contains("it has no undo file"), "{refused}");
    // The same with documents, and an undo file elsewhere.
    let (code, told) = document(&shop, "check disk.vhd --repair --undo-file other.undo");
    assert_eq!((code, &told["verdict"], &told["repair"]["verdict_after"]), (Some(0), &"sound".into(), &"sound".into()));
    assert!(told["repair"]["undo_file"].as_str().unwrap().ends_with("other.undo"), "{told}");
    assert_eq!(told["repair"]["writes"][0]["kind"], "write");
    let (code, told) = document(&shop, "check disk.vhd --undo --undo-file other.undo");
    assert_eq!((code, &told["was_interrupted"]), (Some(0), &false.into()));
    assert!(fs::read(shop.path("disk.vhd")).unwrap() == damaged);
}

#[test]
fn what_costs_data_needs_consent() {
    let shop = Workshop::new();
    made(&shop);
    change(&shop.path("disk.vhd"), |bytes| {
        let at = table(bytes) + 4;
        bytes[at..at + 4].copy_from_slice(&0x0fff_0000_u32.to_be_bytes());
    });
    let damaged = fs::read(shop.path("disk.vhd")).unwrap();
    let (code, told) = document(&shop, "check disk.vhd");
    let finding = &told["files"][0]["findings"][0];
    assert_eq!((code, &finding["repair"]), (Some(2), &"costs data".into()));
    assert_eq!((&finding["costs"]["start"], &finding["costs"]["length"]), (&(2 * MIB).into(), &(2 * MIB).into()));
    assert!(finding["found"].as_str().unwrap().starts_with("a block that ends at offset"), "{finding}");
    let ended = shop.run("check disk.vhd --repair");
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stdout.contains("a repair gives up bytes 2097152 to 4194304 of the disk"), "{}", ended.stdout);
    assert!(fs::read(shop.path("disk.vhd")).unwrap() == damaged);
    let said = shop.ok("check disk.vhd --repair --accept-loss");
    assert!(said.contains("bytes 2097152 to 4194304 of the disk are given up"), "{said}");
    shop.ok("io disk.vhd -c 'read -P 7 0 1M' -c 'read -P 0 2M 1M'");
    shop.ok("io disk.vhd -c 'write -P 9 2M 512'");
    let refused = shop.fails(1, "check disk.vhd --undo");
    assert!(refused.contains("written to since"), "{refused}");
    shop.ok("io disk.vhd -c 'read -P 9 2M 512'");
}

#[test]
fn wrong_usage_and_bad_places_change_nothing() {
    let shop = Workshop::new();
    made(&shop);
    change(&shop.path("disk.vhd"), |bytes| bytes[30..60].fill(0xaa));
    let damaged = fs::read(shop.path("disk.vhd")).unwrap();
    for line in [
        "check disk.vhd --accept-loss",
        "check disk.vhd --dry-run",
        "check disk.vhd --undo-file x.undo",
        "check disk.vhd --repair --undo",
        "check disk.vhd --repair --chain",
        "check disk.vhd --repair --force-share",
        "check disk.vhd --undo --undo-file nowhere.undo",
        "check disk.vhd --undo --undo-file disk.vhd",
        "check disk.vhd --repair --undo-file nowhere/x.undo",
        "check disk.vhd --repair --undo-file disk.vhd",
        "check nowhere.vhd --repair",
        "check nowhere.vhd --undo",
    ] {
        shop.fails(1, line);
        assert!(fs::read(shop.path("disk.vhd")).unwrap() == damaged, "{line}");
    }
    shop.ok("create raw.raw --size 1M");
    assert!(shop.ok("check raw.raw --repair").contains("nothing to repair"));
}

#[test]
fn a_blank_undo_file_is_replaced_with_a_warning() {
    let shop = Workshop::new();
    made(&shop);
    change(&shop.path("disk.vhd"), |bytes| bytes[30..60].fill(0xaa));
    let damaged = fs::read(shop.path("disk.vhd")).unwrap();
    fs::write(shop.path("disk.vhd.undo"), "").unwrap();
    let refused = shop.fails(1, "check disk.vhd --undo");
    assert!(refused.contains("it has no undo file"), "{refused}");
    let (code, told) = document(&shop, "check disk.vhd --repair");
    assert_eq!((code, told["repair"]["undo_file"].as_str().unwrap().ends_with("disk.vhd.undo")), (Some(0), true));
    assert!(told["warnings"][0].as_str().unwrap().contains("it was blank"), "{told}");
    let (code, told) = document(&shop, "check disk.vhd --undo");
    assert_eq!((code, &told["warnings"]), (Some(0), &Value::Array(Vec::new())));
    assert!(fs::read(shop.path("disk.vhd")).unwrap() == damaged);
}
