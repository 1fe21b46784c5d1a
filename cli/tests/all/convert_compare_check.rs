//! `convert`, `compare` and `check`, as the user types them.

use crate::common::{Workshop, steady};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{process::Stdio, thread, time::Duration};

const FILL: &str = "-c 'write -P 1 0 3M' -c 'write -P 2 17M 64k' -c 'write -P 3 40M 5M' -c 'write -P 4 65532k 4k'";

#[test]
fn a_level_of_compression_without_compression_is_wrong_usage() {
    let shop = Workshop::new();
    shop.ok("create disk.raw --size 1M");
    for line in ["copy.vhdx", "copy.qcow2", "copy.vmdk --subformat monolithicSparse", "copy.ova --format vmdk"] {
        let ended = shop.run(&format!("convert disk.raw {line} --compress-level 3"));
        assert_eq!(ended.code, Some(2), "{line}: {}", ended.stderr);
        assert!(ended.stderr.contains("--compress-level needs a compressed destination"), "{}", ended.stderr);
        assert!(!shop.path(line.split(' ').next().unwrap()).exists(), "{line}");
    }
    shop.ok("convert disk.raw copy.qcow2 --subformat compressed --compress-level 9");
    shop.ok("convert disk.raw copy.ova --compress-level 12");
}

#[test]
fn there_and_back_through_every_kind() {
    let shop = Workshop::new();
    shop.ok("create start.raw --size 64M");
    shop.ok(&format!("io start.raw {FILL}"));
    let mut last = "start.raw".to_owned();
    for (step, kind) in [
        ".vhdx",
        ".vhd --block-size 512k",
        ".vhd --type fixed",
        ".vhdx --type fixed",
        ".vhdx --block-size 1M --no-reflink",
        ".raw",
    ]
    .iter()
    .enumerate()
    {
        let (extension, options) = kind.split_once(' ').unwrap_or((kind, ""));
        let next = format!("step{step}{extension}");
        shop.ok(&format!("convert {last} {next} {options} --verify"));
        assert_eq!(shop.ok(&format!("compare start.raw {next}")), "Images are identical.\n");
        shop.ok(&format!("check {next}"));
        last = next;
    }
    assert_eq!(std::fs::read(shop.path("start.raw")).unwrap(), std::fs::read(shop.path(&last)).unwrap());
}

#[test]
fn a_chain_becomes_one_disk() {
    let shop = Workshop::new();
    shop.ok("create base.vhdx --size 64M");
    shop.ok(&format!("io base.vhdx {FILL}"));
    shop.ok("create top.vhdx --parent base.vhdx");
    shop.ok("io top.vhdx -c 'write -P 9 1M 4k' -c 'write -z 40M 4M'");
    let said = shop.ok("convert top.vhdx flat.raw --no-reflink --verify");
    insta::assert_snapshot!("convert", steady(&said));
    shop.ok("compare top.vhdx flat.raw");
    shop.ok("io flat.raw -c 'read -P 1 0 1M' -c 'read -P 9 1M 4k' -c 'read -P 0 40M 4M' -c 'read -P 3 44M 1M' -c 'read -P 4 65532k 4k'");
    let json = shop.json("convert top.vhdx again.vhd --no-reflink");
    assert_eq!(json["schema"], "diskwright.convert/1");
    assert_eq!(json["virtual_size"], 64 << 20);
    assert_eq!(json["copied_bytes"].as_u64().unwrap() + json["zero_bytes"].as_u64().unwrap(), 64 << 20);
}

#[test]
fn convert_does_not_overwrite() {
    let shop = Workshop::new();
    shop.ok("create a.vhdx --size 64M");
    shop.ok("create b.vhdx --size 64M");
    let before = std::fs::read(shop.path("b.vhdx")).unwrap();
    shop.fails(1, "convert a.vhdx b.vhdx");
    assert_eq!(std::fs::read(shop.path("b.vhdx")).unwrap(), before);
    shop.fails(1, "convert nowhere.vhdx c.raw");
    shop.fails(2, "convert a.vhdx c.xyz");
    shop.fails(2, "convert a.vhdx c.vhdx --type differencing");
    assert!(!shop.path("c.raw").exists() && !shop.path("c.xyz").exists());
}

#[test]
fn a_signal_leaves_no_half_copy() {
    let shop = Workshop::new();
    shop.ok("create source.raw --size 256M");
    shop.ok("io source.raw -c 'write 0 256M'");
    let mut child = shop
        .command(&["convert", "source.raw", "dest.vhdx", "--no-reflink"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    while !shop.path("dest.vhdx.partial").exists() && child.try_wait().unwrap().is_none() {
        thread::sleep(Duration::from_millis(1));
    }
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    match child.wait().unwrap().code() {
        Some(130) => {
            for name in ["dest.vhdx", "dest.vhdx.partial"] {
                assert!(!shop.path(name).exists(), "a half-made copy was left behind as {name}");
            }
        }
        // On a very fast machine the copy was whole before the signal came.
        Some(0) => assert!(shop.run("compare source.raw dest.vhdx").code == Some(0)),
        other => panic!("ended with {other:?}"),
    }
}

#[test]
fn compare_ends_with_qemu_imgs_codes() {
    let shop = Workshop::new();
    shop.ok("create a.raw --size 64M");
    shop.ok("io a.raw -c 'write -P 5 10M 1M'");
    shop.ok("convert a.raw b.vhdx");
    shop.ok("io b.vhdx -c 'write -P 6 10752k 512' -c 'write -P 6 30M 512'");
    let ended = shop.run("compare a.raw b.vhdx");
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), "Content mismatch at offset 11010048!\n"));
    let ended = shop.run("compare a.raw b.vhdx --json");
    let json: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((ended.code, &json["first_difference"], &json["same"]), (Some(1), &11010048.into(), &false.into()));
    let ended = shop.run("compare a.raw nowhere.raw --json");
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(2), ""));
    shop.fails(2, "compare a.raw");
    shop.ok("create longer.raw --size 65M");
    shop.ok("io longer.raw -c 'write -P 5 10M 1M'");
    let ended = shop.run("compare a.raw longer.raw");
    assert_eq!(ended.code, Some(0));
    assert!(ended.stderr.contains("differ in size"), "{}", ended.stderr);
}

#[test]
fn check_ends_with_qemu_imgs_codes() {
    let shop = Workshop::new();
    for extension in ["vhd", "vhdx"] {
        let file = format!("disk.{extension}");
        shop.ok(&format!("create {file} --size 64M"));
        shop.ok(&format!("io {file} -c 'write 0 1M' -c 'write 20M 1M'"));
        let sound = shop.ok(&format!("check {file}"));
        assert!(sound.starts_with(&format!("{file}: sound")) && sound.contains("2 of 32 blocks"), "{sound}");
        let json = shop.json(&format!("check {file}"));
        assert_eq!((&json["schema"], &json["verdict"]), (&"diskwright.check/1".into(), &"sound".into()));
    }
    shop.fails(1, "check nowhere.vhdx");
    shop.fails(1, "check");
    shop.fails(1, "check disk.vhdx --no-such-option");
    let nothing = shop.ok("check disk.vhdx --repair");
    assert!(nothing.contains("nothing to repair; nothing was changed") && nothing.contains("sound"), "{nothing}");
}

#[test]
fn damage_is_found_located_and_left_alone() {
    let shop = Workshop::new();
    shop.ok("create disk.vhd --size 64M");
    shop.ok("io disk.vhd -c 'write 0 1M' -c 'write 20M 1M'");
    let mut bytes = std::fs::read(shop.path("disk.vhd")).unwrap();
    // The dynamic header names the table; its first entry is made to point far beyond the file.
    let header = u64::from_be_bytes(bytes[16..24].try_into().unwrap()) as usize;
    let table = u64::from_be_bytes(bytes[header + 16..header + 24].try_into().unwrap()) as usize;
    bytes[table..table + 4].copy_from_slice(&0x7000_0000u32.to_be_bytes());
    std::fs::write(shop.path("disk.vhd"), &bytes).unwrap();
    let ended = shop.run("check disk.vhd");
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    assert!(ended.stdout.contains("corrupt  offset") && ended.stdout.contains("error"), "{ended:#?}");
    let ended = shop.run("check disk.vhd --json");
    let json: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((ended.code, &json["verdict"]), (Some(2), &"corrupt".into()));
    assert_eq!(json["files"][0]["findings"][0]["severity"], "corrupt");
    assert_eq!(std::fs::read(shop.path("disk.vhd")).unwrap(), bytes, "check has written");
}

#[test]
fn a_chain_is_checked_to_its_end() {
    let shop = Workshop::new();
    shop.ok("create base.vhdx --size 64M");
    shop.ok("create top.vhdx --parent base.vhdx");
    let said = shop.ok("check top.vhdx --chain");
    assert!(said.contains("top.vhdx: sound") && said.contains("base.vhdx: sound"), "{said}");
    std::fs::remove_file(shop.path("base.vhdx")).unwrap();
    // The file itself is sound, and yet every read of the disk is refused: that is no success, with
    // --chain or without.
    for line in ["check top.vhdx", "check top.vhdx --chain"] {
        let ended = shop.run(line);
        assert_eq!(ended.code, Some(1), "{line}");
        assert!(ended.stdout.contains("top.vhdx: sound"), "{ended:#?}");
        assert!(ended.stdout.contains("the chain could not be followed, so the disk cannot be read"), "{ended:#?}");
        assert!(ended.stdout.contains("base.vhdx"), "{ended:#?}");
    }
    let json: serde_json::Value = serde_json::from_str(&shop.run("check top.vhdx --json").stdout).unwrap();
    assert_eq!(json["verdict"], "not checked");
    assert!(json["chain_error"].as_str().unwrap().contains("was not found"), "{json}");
    // So it is with a parent that was replaced by another disk.
    shop.ok("create base.vhdx --size 64M");
    let ended = shop.run("check top.vhdx");
    assert!(ended.code == Some(1) && ended.stdout.contains("not the disk it was made from"), "{ended:#?}");
}

#[test]
fn a_vhd_parent_that_was_changed_later_is_noted() {
    let shop = Workshop::new();
    shop.ok("create base.vhd --size 16M");
    shop.ok("create middle.vhd --parent base.vhd");
    shop.ok("create top.vhd --parent middle.vhd");
    let quiet = shop.ok("check top.vhd --chain");
    assert!(!quiet.contains("time stamp"), "{quiet}");
    let later = std::time::SystemTime::now() + Duration::from_secs(3600);
    std::fs::File::open(shop.path("base.vhd")).unwrap().set_modified(later).unwrap();
    let said = shop.ok("check top.vhd --chain");
    assert!(said.contains("middle.vhd: note     offset 568: The parent's time stamp: the parent"), "{said}");
    assert!(said.contains("middle.vhd: sound, 1 note"), "{said}");
    let found = shop.json("check top.vhd --chain");
    let notes: Vec<usize> =
        found["files"].as_array().unwrap().iter().map(|file| file["findings"].as_array().unwrap().len()).collect();
    assert_eq!((&found["verdict"], notes), (&"sound".into(), vec![0, 1, 0]));
    assert_eq!(found["files"][1]["findings"][0]["severity"], "note");
    let said = shop.ok("check middle.vhd");
    assert!(said.contains("middle.vhd: sound, 1 note") && !said.contains("base.vhd: "), "{said}");
    // Who knows that it was only copied is not told again; and without --chain a file's own link is
    // all that is judged.
    for line in ["check top.vhd --chain --ignore-parent-timestamp", "check top.vhd"] {
        let said = shop.ok(line);
        assert!(!said.contains("time stamp"), "{line}: {said}");
    }
}

#[test]
fn nothing_is_no_sound_disk() {
    let shop = Workshop::new();
    std::fs::write(shop.path("empty.img"), "").unwrap();
    let error = shop.fails(1, "check empty.img");
    assert!(error.contains("0 bytes"), "{error}");
}

#[test]
fn a_pipe_is_no_disk_and_what_is_there_stays() {
    let shop = Workshop::new();
    shop.ok("create disk.vhdx --size 8M");
    for line in ["convert disk.vhdx -", "convert - copy.vhdx"] {
        let error = shop.fails(2, line);
        assert!(error.contains("./-"), "{error}");
    }
    shop.ok("create other.vhdx --size 8M");
    for line in ["create other.vhdx --size 8M", "convert disk.vhdx other.vhdx"] {
        let error = shop.fails(1, line);
        assert!(error.contains("file exists") && error.contains("nothing was changed"), "{line}: {error}");
    }
}

/// A VHDX in blocks of 1 MiB with 12 MiB of data, whose blocks 5, 6 and 9 the table has lost.
fn with_lost_blocks() -> Workshop {
    let shop = Workshop::new();
    shop.ok("create disk.vhdx --size 64M --block-size 1M");
    shop.ok("io disk.vhdx -c 'write -P 7 0 12M'");
    let mut bytes = std::fs::read(shop.path("disk.vhdx")).unwrap();
    for block in [5, 6, 9] {
        let entry = (3 << 20) + block * 8;
        bytes[entry..entry + 8].copy_from_slice(&(1u64 << 40 | 6).to_le_bytes());
    }
    std::fs::write(shop.path("disk.vhdx"), &bytes).unwrap();
    shop
}

#[test]
fn a_damaged_disk_is_shown_checked_and_saved() {
    let shop = with_lost_blocks();
    let map = shop.ok("map disk.vhdx");
    let kinds: Vec<&str> = map.lines().skip(1).filter_map(|line| line.split_whitespace().nth(3)).collect();
    assert_eq!(kinds.iter().filter(|&&kind| kind == "damaged").count(), 2, "{map}");
    assert_eq!(kinds.last(), Some(&"unallocated"), "the list goes to the end: {map}");
    let json = shop.json("map disk.vhdx");
    let damaged: Vec<_> = json["extents"].as_array().unwrap().iter().filter(|at| at["damaged"] == true).collect();
    assert_eq!((damaged.len(), &damaged[0]["start"], &damaged[0]["length"]), (2, &5242880.into(), &2097152.into()));
    assert_eq!((&damaged[0]["zero"], &damaged[0]["data"]), (&false.into(), &true.into()));
    assert_eq!(json["error"], serde_json::Value::Null);
    assert_eq!(shop.json("map disk.vhdx --draw")["damaged_bytes"], 3 << 20);
    let drawn = shop.ok("map disk.vhdx --draw");
    assert!(drawn.contains("damaged (see `check`)"), "{drawn}");

    let ended = shop.run("check disk.vhdx");
    assert_eq!(ended.code, Some(2));
    assert!(ended.stdout.contains("corrupt, 3 errors found"), "{ended:#?}");

    shop.ok("io disk.vhdx -c 'read -P 7 0 5M' -c 'read -P 7 7M 2M' -c 'read -P 7 10M 2M'");
    shop.fails(1, "io disk.vhdx -c 'read 5M 4k'");
    let told = shop.fails(2, "compare disk.vhdx disk.vhdx");
    assert!(told.contains("BAT entry at offset 3145768 is damaged"), "{told}");

    let told = shop.fails(1, "convert disk.vhdx saved.vhdx");
    assert!(told.contains("bytes 5242880 to 7340032") && told.contains("--skip-damaged"), "{told}");
    assert!(!shop.path("saved.vhdx").exists());
    let ended = shop.run("convert disk.vhdx saved.vhdx --skip-damaged --verify");
    assert_eq!(ended.code, Some(3), "{ended:#?}");
    assert!(ended.stdout.contains("3 MiB lost, verified"), "{ended:#?}");
    assert!(ended.stderr.contains("lost: bytes 5242880 to 7340032: ") && ended.stderr.contains("disk.vhdx: BAT entry"));
    assert!(ended.stderr.contains("lost: bytes 9437184 to 10485760: "), "{ended:#?}");
    assert!(
        ended.stderr.contains("disk.vhdx: 3 MiB (3145728 bytes) are damaged; they are zeros in the copy"),
        "{ended:#?}"
    );
    shop.ok("check saved.vhdx");
    shop.ok("io saved.vhdx -c 'read -P 7 0 5M' -c 'read -P 0 5M 2M' -c 'read -P 7 7M 2M' -c 'read -P 0 9M 1M' -c 'read -P 7 10M 2M'");

    let ended = shop.run("convert disk.vhdx again.raw --skip-damaged --json");
    let json: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((ended.code, &json["lost_bytes"], &json["lost_unlisted_bytes"]), (Some(3), &3145728.into(), &0.into()));
    let lost = json["lost"].as_array().unwrap();
    assert_eq!((lost.len(), &lost[1]["start"], &lost[1]["length"]), (2, &9437184.into(), &1048576.into()));
    assert!(lost[0]["reason"].as_str().unwrap().contains("found a block at 1099511627776"), "{json:#}");
}

#[test]
fn nothing_is_lost_of_a_sound_disk() {
    let shop = Workshop::new();
    shop.ok("create disk.vhdx --size 64M");
    shop.ok("io disk.vhdx -c 'write -P 7 0 1M'");
    let json = shop.json("convert disk.vhdx copy.vhdx --skip-damaged");
    assert_eq!((&json["lost_bytes"], &json["lost"]), (&0.into(), &serde_json::json!([])));
}
