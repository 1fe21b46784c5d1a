//! `diff`: lists, exports and applications, as a user types them.

use crate::common::Workshop;
use std::{
    fs::{self, File},
    process::Stdio,
};

/// A base, a copy of it in another folder, and a child with changes.
fn shop() -> Workshop {
    let shop = Workshop::new();
    shop.ok("create base.vhdx --size 16M --block-size 1M");
    shop.ok("io base.vhdx -c 'write -P 7 1M 3M' -c flush");
    fs::create_dir(shop.path("backup")).unwrap();
    fs::copy(shop.path("base.vhdx"), shop.path("backup/vm.vhdx")).unwrap();
    shop.ok("create monday.vhdx --parent base.vhdx");
    shop.ok("io monday.vhdx -c 'write -P 8 2M 64K' -c 'write -z 3M 1M' -c flush");
    shop.ok("create tuesday.vhdx --parent monday.vhdx");
    shop.ok("io tuesday.vhdx -c 'write -P 9 8M 4K' -c flush");
    shop
}

#[test]
fn changes_are_listed() {
    let shop = shop();
    let ended = shop.run("diff monday.vhdx");
    assert_eq!(
        (ended.code, ended.stdout.as_str()),
        (
            Some(1),
            "   start    length  kind\n 2097152     65536  data\n 3145728   1048576  zeros\n2 ranges: 64 KiB of data, 1 MiB of zeros\n"
        )
    );
    let ended = shop.run("diff tuesday.vhdx --since base.vhdx --json");
    assert_eq!(ended.code, Some(1));
    let found: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(found["ranges"][2], serde_json::json!({ "start": 8 << 20, "length": 4096, "kind": "data" }));
    assert_eq!((&found["data_bytes"], &found["zero_bytes"]), (&69632.into(), &1_048_576.into()));
    assert_eq!(found["contents_read"], false);
    // Unrelated disks are read.
    shop.ok("convert tuesday.vhdx flat.raw");
    assert_eq!(shop.ok("diff tuesday.vhdx flat.raw"), "no differences\n");
    let ended = shop.run("diff base.vhdx flat.raw --quiet");
    assert_eq!((ended.code, ended.stdout.as_str(), ended.stderr.as_str()), (Some(1), "", ""));
    let ended = shop.run("diff flat.raw base.vhdx --json");
    assert_eq!((ended.code, ended.stdout.contains("\"contents_read\": true")), (Some(1), true));
    // Rewritten with the same bytes.
    shop.ok("io tuesday.vhdx -c 'write -P 8 2M 4K' -c flush");
    assert_eq!(shop.run("diff tuesday.vhdx").stdout.lines().count(), 4);
    assert_eq!(shop.run("diff tuesday.vhdx --exact").stdout.lines().count(), 3);
    // Could not compare.
    assert!(shop.fails(2, "diff base.vhdx").contains("no parent"));
    assert!(shop.fails(2, "diff monday.vhdx --since tuesday.vhdx").contains("not among its ancestors"));
    assert!(shop.fails(2, "diff").contains("FILE"));
    assert!(shop.fails(2, "diff monday.vhdx --dry-run").contains("--export or --apply"));
}

#[test]
fn increments_go_to_a_backup() {
    let shop = shop();
    let held = fs::read(shop.path("backup/vm.vhdx")).unwrap();
    let planned = shop.ok("diff monday.vhdx --export monday.dwdiff --dry-run");
    assert!(planned.ends_with("nothing was changed\n") && !shop.path("monday.dwdiff").exists(), "{planned}");
    let told = shop.ok("diff monday.vhdx --export monday.dwdiff");
    assert!(told.starts_with("monday.dwdiff: 64 KiB of data and 1 MiB of zeros, in "), "{told}");
    assert!(shop.fails(1, "diff monday.vhdx --export monday.dwdiff").contains("file exists"));
    let made = shop.json("diff tuesday.vhdx --export tuesday.avhdx");
    assert_eq!(made["data_bytes"], 4096);
    // Out of order.
    let error = shop.fails(1, "diff --apply tuesday.avhdx --onto backup/vm.vhdx");
    assert!(error.contains("is not the disk to which") && error.contains("--ignore-id-mismatch"), "{error}");
    assert!(fs::read(shop.path("backup/vm.vhdx")).unwrap() == held);
    let told = shop.ok("diff --apply monday.dwdiff --onto backup/vm.vhdx --dry-run");
    assert!(told.ends_with("nothing was changed\n") && fs::read(shop.path("backup/vm.vhdx")).unwrap() == held);
    let told = shop.ok("diff --apply monday.dwdiff --onto backup/vm.vhdx");
    assert!(told.starts_with("backup/vm.vhdx got 64 KiB of data and 1 MiB of zeros, in "), "{told}");
    shop.ok("compare monday.vhdx backup/vm.vhdx");
    let again = shop.ok("diff --apply monday.dwdiff --onto backup/vm.vhdx");
    assert_eq!(again, "backup/vm.vhdx has these changes already; nothing was changed\n");
    let done = shop.json("diff --apply tuesday.avhdx --onto backup/vm.vhdx");
    assert_eq!(done["result_id"], made["result_id"]);
    shop.ok("compare tuesday.vhdx backup/vm.vhdx");
    assert!(shop.ok("diff tuesday.vhdx backup/vm.vhdx").contains("no differences"));
}

/// Standard output of one command into standard input of the other, and a stream that was cut.
#[test]
fn a_stream_goes_through_a_pipe() {
    let shop = shop();
    let stream = shop.path("stream");
    let export = ["diff", "monday.vhdx", "--export", "-"];
    let made = shop.command(&export).stdout(File::create(&stream).unwrap()).status().unwrap();
    assert!(made.success());
    let apply = |bytes: &[u8]| {
        fs::write(&stream, bytes).unwrap();
        let line = ["diff", "--apply", "-", "--onto", "backup/vm.vhdx"];
        let mut command = shop.command(&line);
        let output = command.stdin(File::open(&stream).unwrap()).stdout(Stdio::piped()).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let whole = fs::read(&stream).unwrap();
    let (code, error) = apply(&whole[..whole.len() - 40]);
    assert!(code == Some(1) && error.contains("without its end mark"), "{error}");
    assert!(error.contains("the same command with the whole export finishes it"), "{error}");
    assert_eq!(apply(&whole), (Some(0), String::new()));
    shop.ok("compare monday.vhdx backup/vm.vhdx");
    // A raw copy has no identity.
    shop.ok("convert base.vhdx copy.raw");
    fs::write(shop.path("monday.dwdiff"), &whole).unwrap();
    let error = shop.fails(1, "diff --apply monday.dwdiff --onto copy.raw");
    assert!(error.contains("it is a raw disk and has no identity"), "{error}");
    shop.ok("diff --apply monday.dwdiff --onto copy.raw --ignore-id-mismatch");
    shop.ok("compare monday.vhdx copy.raw");
    let error = shop.fails(2, "diff monday.vhdx --export - --json");
    assert!(error.contains("standard output is the export"), "{error}");
}

#[test]
fn tracked_changes_are_listed_and_exported() {
    let shop = shop();
    let refused = shop.fails(2, "diff base.vhdx --track none");
    assert!(refused.contains("no point \"none\""), "{refused}");
    shop.ok("track start backup/vm.vhdx full");
    fs::copy(shop.path("backup/vm.vhdx"), shop.path("copy.vhdx")).unwrap();
    shop.ok("io backup/vm.vhdx -c 'write -P 9 8M 4K' -c 'discard 1M 1M' -c flush");
    let ended = shop.run("diff backup/vm.vhdx --track full");
    assert_eq!(
        (ended.code, ended.stdout.as_str()),
        (
            Some(1),
            "   start    length  kind\n 1048576   1048576  zeros\n 8388608     65536  data\n2 ranges: 64 KiB of data, 1 MiB of zeros\n"
        )
    );
    assert!(shop.fails(1, "diff backup/vm.vhdx --track full --export x.avhdx").contains("name a stream"));
    shop.ok("diff backup/vm.vhdx --track full --export full.dwdiff");
    // The copy is the disk as it was when the point began, so it is recognised.
    shop.ok("diff --apply full.dwdiff --onto copy.vhdx");
    shop.ok("compare backup/vm.vhdx copy.vhdx");
    // Another disk is not.
    shop.fails(1, "diff --apply full.dwdiff --onto monday.vhdx");
    // The next point begins while the disk is at rest, so the copy is the disk at that point.
    shop.ok("track start backup/vm.vhdx two");
    shop.ok("io backup/vm.vhdx -c 'write -P 5 3M 4K' -c flush");
    shop.ok("diff backup/vm.vhdx --track two --export two.dwdiff");
    // A copy with points of its own is refused.
    shop.ok("track start copy.vhdx own");
    assert!(shop.fails(1, "diff --apply two.dwdiff --onto copy.vhdx").contains("track stop"));
    shop.ok("track stop copy.vhdx own");
    shop.ok("diff --apply two.dwdiff --onto copy.vhdx");
    shop.ok("compare backup/vm.vhdx copy.vhdx");
}
