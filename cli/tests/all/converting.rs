//! `convert` with another size, a kept identity and for Azure, and `info` against the rules of a
//! place, as a user types them. Other programs read what was made.

use crate::{
    common::{Running, Workshop, flat},
    resize::{KINDS, have, partitioned, tool, verify_ext4, verify_size, verify_table},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use std::{
    fs,
    io::Read,
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;
/// Without sgdisk the tables are looked at by sfdisk and by ourselves.
const TOOLS: [&str; 3] = ["sfdisk", "mke2fs", "e2fsck"];

#[test]
fn convert_resizes_on_the_way() {
    if !have(&TOOLS) {
        return;
    }
    let shop = Workshop::new();
    partitioned(&shop, "gpt");
    // 33 sectors for the second copy.
    let least = 40 * MIB + 33 * 512;
    let said = shop.fails(1, "convert disk.raw small.vhdx --size 40M");
    assert!(said.contains(&format!("partition 2 (ext4) lies there; the smallest size is {least} bytes")), "{said}");
    assert!(!shop.path("small.vhdx").exists() && !shop.path("small.vhdx.partial").exists());
    let sizes =
        [("--to-minimum", least), ("--size 100M", 100 * MIB), ("--size +16M", 80 * MIB), ("--to-minimum", least)];
    for ((extension, how), (size, expected)) in KINDS.into_iter().zip(sizes.into_iter().cycle()) {
        let disk = format!("vm.{extension}");
        let _ = fs::remove_file(shop.path(&disk));
        let done = shop.json(&format!("convert disk.raw {disk} {how} {size} --verify"));
        assert_eq!((&done["virtual_size"], &done["dest_virtual_size"]), (&json!(64 * MIB), &json!(expected)));
        assert_eq!(done["changed_table"], "GPT", "{done}");
        assert!(!done["warnings"].to_string().contains("partition table"), "{done}");
        verify_table(&shop, &disk, true);
        assert_eq!(shop.json(&format!("partitions {disk}"))["problem"], Value::Null);
        verify_ext4(&shop, 9 * MIB, 31 * MIB);
        verify_size(&shop, &disk, expected);
        shop.ok(&format!("check {disk}"));
    }
    let said = shop.ok("convert disk.raw told.vhdx --size 100M");
    let line = "enlarged from 64 MiB (67108864 bytes) to 100 MiB (104857600 bytes); the partition table (GPT) was changed for this size";
    assert!(said.contains(line), "{said}");
    // The source keeps its own.
    assert_eq!(fs::metadata(shop.path("disk.raw")).unwrap().len(), 64 * MIB);
    verify_table(&shop, "disk.raw", true);
}

#[test]
fn an_mbr_and_a_chain_are_resized_on_the_way() {
    if !have(&TOOLS) {
        return;
    }
    let shop = Workshop::new();
    partitioned(&shop, "dos");
    shop.ok("convert disk.raw base.vhdx");
    shop.ok("create child.vhdx --parent base.vhdx");
    shop.ok("io child.vhdx -c 'write -P 7 50M 1M'");
    // What lies behind the last partition is no data.
    let done = shop.json("convert child.vhdx small.vhd --to-minimum --verify");
    assert_eq!((&done["dest_virtual_size"], &done["changed_table"]), (&json!(40 * MIB), &Value::Null));
    verify_table(&shop, "small.vhd", false);
    verify_ext4(&shop, 9 * MIB, 31 * MIB);
    shop.ok("convert child.vhdx large.vhd --size 80M --verify");
    shop.ok("compare child.vhdx large.vhd");
}

#[test]
fn a_table_in_doubt_is_told_and_left() {
    let shop = Workshop::new();
    // A protective MBR without a GPT.
    let mut bytes = vec![0_u8; 8 << 20];
    bytes[450] = 0xee;
    bytes[454] = 1;
    bytes[458..462].fill(0xff);
    bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
    fs::write(shop.path("odd.raw"), bytes).unwrap();
    let done = shop.run("convert odd.raw large.vhdx --size 16M --json");
    assert!(done.code == Some(0) && done.stderr.contains("the partition table was left as it is"), "{done:?}");
    let said = shop.fails(1, "convert odd.raw small.vhdx --size 4M");
    assert!(said.contains("cannot be made smaller"), "{said}");
}

/// The size of the disk, as qemu-img and libvhdi find it, and the length that qemu-img gives the
/// same disk with `force_size`.
fn second_opinions(shop: &Workshop, disk: &str, size: u64) {
    let _ = fs::remove_file(shop.path("flat.raw"));
    shop.ok(&format!("convert {disk} flat.raw"));
    verify_size(shop, disk, size);
    if !have(&["qemu-img"]) {
        return;
    }
    tool(shop, "qemu-img convert -f raw -O vpc -o subformat=fixed,force_size flat.raw theirs.vhd", "").unwrap();
    let len = |name: &str| fs::metadata(shop.path(name)).unwrap().len();
    assert_eq!((len(disk), len("theirs.vhd")), (size + 512, size + 512));
    tool(shop, &format!("qemu-img compare -f vpc -F vpc {disk} theirs.vhd"), "").unwrap();
    // What qemu-img makes that way is for Azure too; without it, the CHS geometry is the size.
    assert_eq!(shop.run("info theirs.vhd --azure").code, Some(0));
    tool(shop, "qemu-img convert -f raw -O vpc -o subformat=fixed flat.raw chs.vhd", "").unwrap();
    let judged = shop.run("info chs.vhd --azure");
    assert!(judged.code == Some(3) && judged.stdout.contains("size-unit"), "{judged:?}");
}

#[test]
fn a_disk_for_azure() {
    let shop = Workshop::new();
    shop.ok("create odd.vhdx --size 44565504");
    shop.ok("io odd.vhdx -c 'write -P 7 1M 1M' -c 'write -P 9 44564992 512'");
    let done = shop.json("convert odd.vhdx machine.vhd --azure --verify");
    assert_eq!((&done["virtual_size"], &done["dest_virtual_size"]), (&json!(44_565_504), &json!(43 * MIB)));
    shop.ok("compare odd.vhdx machine.vhd");
    let info = shop.json("info machine.vhd");
    assert_eq!((&info["format"], &info["type"]), (&json!("vhd"), &json!("fixed")));
    assert_eq!(fs::metadata(shop.path("machine.vhd")).unwrap().len(), 43 * MIB + 512);
    let judged = shop.json("info machine.vhd --azure");
    assert_eq!((&judged["schema"], &judged["holds"]), (&json!("diskwright.info-rules/1"), &json!(true)));
    second_opinions(&shop, "machine.vhd", 43 * MIB);

    for (code, line, word) in [
        (2, "convert odd.vhdx a.vhdx --azure", "Azure accepts only a fixed VHD"),
        (2, "convert odd.vhdx a.vhd --azure --type dynamic", "leave out --type"),
        (2, "convert odd.vhdx a.vhd --azure --sector-size 4096", "leave out --sector-size"),
        (1, "convert odd.vhdx a.vhd --azure --size 33T", "up to 35184372088832 bytes (32 TiB)"),
        (2, "convert odd.vhdx a.vhd --size 50M --to-minimum", "cannot be used with"),
    ] {
        let said = shop.fails(code, line);
        assert!(said.contains(word), "{line}: {said}");
        assert!(!shop.path("a.vhd").exists() && !shop.path("a.vhd.partial").exists(), "{line}");
    }
}

#[test]
fn a_gpt_moves_with_the_end_of_a_disk_for_azure() {
    if !have(&TOOLS) {
        return;
    }
    let shop = Workshop::new();
    partitioned(&shop, "gpt");
    shop.ok("convert disk.raw odd.vhdx --to-minimum");
    let judged = shop.json("convert odd.vhdx machine.vhd --azure --verify");
    assert_eq!((&judged["dest_virtual_size"], &judged["changed_table"]), (&json!(41 * MIB), &json!("GPT")));
    verify_table(&shop, "machine.vhd", true);
    verify_ext4(&shop, 9 * MIB, 31 * MIB);
    assert!(shop.ok("info machine.vhd --azure").contains("gpt-end"));
    second_opinions(&shop, "machine.vhd", 41 * MIB);
}

#[test]
fn an_image_is_checked_against_the_rules_of_a_place() {
    let shop = Workshop::new();
    shop.ok("create base.vhdx --size 8389120");
    shop.ok("create child.vhdx --parent base.vhdx");
    let judged = shop.run("info child.vhdx --azure");
    assert_eq!(judged.code, Some(3), "{judged:?}");
    insta::assert_snapshot!("rules_of_azure", judged.stdout);
    let fine = shop.run("info child.vhdx --windows");
    assert_eq!(fine.code, Some(0), "{fine:?}");
    insta::assert_snapshot!("rules_of_windows", fine.stdout);
    let both = shop.run("info child.vhdx --azure --windows --json");
    let report: Value = serde_json::from_str(&both.stdout).unwrap();
    assert_eq!((both.code, &report["holds"]), (Some(3), &json!(false)));
    let places = report["places"].as_array().unwrap();
    let holds: Vec<_> = places.iter().map(|place| (place["place"].clone(), place["holds"].clone())).collect();
    assert_eq!(holds, [(json!("azure"), json!(false)), (json!("windows"), json!(true))]);
    let first = &places[0]["rules"][0];
    assert_eq!(
        (&first["rule"], &first["verdict"], &first["found"]),
        (&json!("format"), &json!("not ok"), &json!("vhdx"))
    );
    assert_eq!(first["remedy"], "`convert` it with --azure");
    // The remedy works.
    shop.ok("convert child.vhdx machine.vhd --azure");
    shop.ok("info machine.vhd --azure --windows");
    // A chain that is broken is an answer too.
    fs::remove_file(shop.path("base.vhdx")).unwrap();
    let orphan = shop.run("info child.vhdx --windows");
    assert!(orphan.code == Some(3) && orphan.stdout.contains("`reconnect` finds lost parents"), "{orphan:?}");
    shop.fails(2, "info child.vhdx --windows --chain");
    shop.fails(1, "info nothing.vhdx --windows");
}

#[test]
fn an_identity_is_kept_where_it_is_asked_for() {
    let shop = Workshop::new();
    shop.ok("create old.vhdx --size 8M");
    shop.ok("io old.vhdx -c 'write -P 7 1M 1M'");
    let id = |disk: &str| {
        let info = shop.json(&format!("info {disk}"));
        (info["disk_id"].clone(), info["linkage_id"].clone())
    };
    let done = shop.json("convert old.vhdx new.vhdx --identity new --verify");
    assert_eq!((&done["kept_disk_id"], &done["kept_linkage_id"]), (&json!(false), &json!(false)));
    assert!(id("new.vhdx").0 != id("old.vhdx").0);
    let done = shop.json("convert old.vhdx kept.vhdx --identity keep --verify");
    assert_eq!((&done["kept_disk_id"], &done["kept_linkage_id"]), (&json!(true), &json!(true)));
    assert_eq!(id("kept.vhdx"), id("old.vhdx"));
    let done = shop.run("convert old.vhdx kept.vhd --identity keep");
    assert!(done.code == Some(0) && done.stderr.contains("it keeps the disk id, but children"), "{done:?}");
    assert_eq!(id("kept.vhd").0, id("old.vhdx").0);
    let said = shop.fails(2, "convert old.vhdx kept.raw --identity keep");
    assert!(said.contains("a raw file records no identity; leave out --identity"), "{said}");
    if have(&["vhdiinfo"]) {
        let said = tool(&shop, "vhdiinfo kept.vhd", "").unwrap();
        assert!(said.contains(id("old.vhdx").0.as_str().unwrap()), "{said}");
    }
}

/// What the conversion says it has done, of data: copied, and there already.
fn copied(shop: &Workshop, line: &str) -> (u64, u64) {
    let done = shop.json(line);
    (done["copied_bytes"].as_u64().unwrap(), done["held_bytes"].as_u64().unwrap())
}

#[test]
fn an_interrupted_conversion_is_resumed() {
    let shop = Workshop::new();
    shop.ok("create source.vhdx --size 256M");
    shop.ok("io source.vhdx -c 'write -P 7 0 24M' -c 'write -P 9 100M 8M' -c flush");
    shop.ok("convert source.vhdx whole.raw");
    // A third is there, a part of it is wrong, and where the source has zeros something else is.
    let mut left = fs::read(shop.path("whole.raw")).unwrap();
    left[12 << 20..].fill(0);
    left[(5 << 20) + 77] ^= 1;
    left[(50 << 20)..(51 << 20)].fill(3);
    fs::write(shop.path("copy.raw.partial"), &left).unwrap();
    let (written, held) = copied(&shop, "convert source.vhdx copy.raw --resume --verify");
    assert_eq!((written, held), (21 * MIB, 11 * MIB));
    shop.ok("compare copy.raw source.vhdx");
    assert!(!shop.path("copy.raw.partial").exists());
    // A disk of another size, or with another block size, is made anew, and so is what is none.
    for (partial, dest) in [("--size 255M", "a.vhdx"), ("--size 256M --block-size 1M", "b.vhdx"), ("", "c.vhdx")] {
        match partial {
            "" => fs::write(shop.path("c.vhdx.partial"), b"vhdxfile, but nothing else").unwrap(),
            _ => drop(shop.ok(&format!("create {dest}.partial --format vhdx {partial}"))),
        }
        let (written, held) = copied(&shop, &format!("convert source.vhdx {dest} --block-size 2M --resume"));
        assert_eq!((written, held), (32 * MIB, 0), "{dest}");
        shop.ok(&format!("compare {dest} source.vhdx"));
    }
    // Of every format, and an export.
    for extension in ["vhd", "vhdx", "qcow2", "vmdk", "vdi"] {
        shop.ok(&format!("convert source.vhdx first.{extension}"));
        fs::rename(shop.path(&format!("first.{extension}")), shop.path(&format!("again.{extension}.partial"))).unwrap();
        let done = copied(&shop, &format!("convert source.vhdx again.{extension} --resume --verify"));
        assert_eq!(done, (0, 32 * MIB), "{extension}");
    }
    shop.ok("create export.raw --size 256M");
    let mut server = shop.command(&["serve", "export.raw", "--nbd", "./export.sock"]);
    let _server = Running::start(server.stdout(Stdio::null()).stderr(Stdio::null()));
    let begun = Instant::now();
    while !shop.path("export.sock").exists() {
        assert!(begun.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_millis(20));
    }
    let line = "convert source.vhdx 'nbd+unix:///?socket=./export.sock' --resume --verify";
    assert_eq!([copied(&shop, line), copied(&shop, line)], [(32 * MIB, 0), (0, 32 * MIB)]);
    // Without the option nothing is kept, and with it nothing is kept of a copy in one pass.
    fs::write(shop.path("d.raw.partial"), &left).unwrap();
    assert_eq!(copied(&shop, "convert source.vhdx d.raw"), (32 * MIB, 0));
    let error = flat(&shop.fails(2, "convert source.vhdx e.vmdk --subformat streamOptimized --resume"));
    assert!(error.contains("cannot be resumed") && error.contains("--resume"), "{error}");
}

#[test]
fn a_conversion_that_is_killed_goes_on_where_it_was() {
    let shop = Workshop::new();
    shop.ok("create source.vhdx --size 4G");
    shop.ok("io source.vhdx -c 'write -P 7 0 1G' -c flush");
    let line = ["convert", "source.vhdx", "copy.vhdx", "--no-reflink", "--resume"];
    let (mut stopped, mut kept) = (false, 0);
    for signal in [Signal::SIGKILL, Signal::SIGINT] {
        let mut command = shop.command(&line);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let begun = Instant::now();
        let there = || fs::metadata(shop.path("copy.vhdx.partial")).map_or(0, |found| found.len());
        while there() < (kept + 100) << 20 && begun.elapsed() < Duration::from_secs(60) {
            thread::sleep(Duration::from_millis(2));
        }
        kill(Pid::from_raw(child.id() as i32), signal).unwrap();
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        stopped |= !child.wait().unwrap().success();
        kept = there() >> 20;
        assert!(signal == Signal::SIGKILL || kept == 0 || said.contains("the same command goes on"), "{said}");
    }
    if !stopped {
        return println!("skipped: a conversion that is killed: it was faster than the signals");
    }
    let (written, held) = copied(&shop, "convert source.vhdx copy.vhdx --no-reflink --resume --verify");
    assert!(held >= 32 << 20 && written + held == 1 << 30, "{written} {held}");
    shop.ok("compare copy.vhdx source.vhdx");
}
