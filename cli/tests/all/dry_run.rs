//! `--dry-run` of every command that writes: says what it would do, what space that needs and how
//! much is free, and changes nothing.

use crate::common::Workshop;
use crate::small_fs::Small;
use std::{collections::BTreeMap, fs, time::SystemTime};

/// The names in the folder with length and time of their files.
fn state(shop: &Workshop) -> BTreeMap<String, (u64, SystemTime)> {
    let entries = fs::read_dir(shop.path("")).unwrap().map(Result::unwrap);
    entries
        .map(|entry| {
            let facts = entry.metadata().unwrap();
            (entry.file_name().into_string().unwrap(), (facts.len(), facts.modified().unwrap()))
        })
        .collect()
}

#[test]
fn a_dry_run_says_what_is_needed_and_what_is_free() {
    let shop = Workshop::new();
    shop.ok("create base.vhdx --size 64M");
    shop.ok("io base.vhdx -c 'write -P 1 0 4M'");
    shop.ok("create child.vhdx --parent base.vhdx");
    shop.ok("io child.vhdx -c 'write -P 2 8M 4M'");
    shop.ok("create fixed.vhd --size 4M --type fixed");
    shop.ok("create dynamic.vhd --size 64M");
    shop.ok("io dynamic.vhd -c 'write -P 3 0 3M'");
    shop.ok("create apart.vhdx --size 64M");
    let before = state(&shop);
    // What is needed at least and at most, in MiB.
    let lines = [
        ("merge child.vhdx", 4, 8),
        ("merge child.vhdx --to new.vhd", 8, 9),
        ("move apart.vhdx new.vhd", 0, 1),
        ("move dynamic.vhd new.vhdx", 3, 4),
        ("compact dynamic.vhd", 0, 0),
        ("resize fixed.vhd +16M", 16, 16),
        ("resize dynamic.vhd 128G", 0, 1),
        ("snapshot child.vhdx --name x", 3, 5),
        ("snapshot revert child.vhdx --discard", 3, 5),
        ("clone base.vhdx a.vhdx b.vhdx c.vhdx", 9, 15),
        ("check dynamic.vhd --repair", 0, 1),
        ("rescue dynamic.vhd new.vhdx", 3, 4),
        ("convert child.vhdx new.vhd", 8, 9),
        ("convert child.vhdx new.vhdx --preallocate", 64, 70),
        ("convert child.vhdx new.vmdk --subformat streamOptimized", 8, 9),
    ];
    for (line, least, most) in lines {
        let told = shop.json(&format!("{line} --dry-run"));
        let space = match &told {
            told if line.starts_with("compact") => &told["disks"][0]["space"],
            told if line.starts_with("check") => &told["repair"]["space"],
            told => &told["space"],
        };
        let needed = space["needed_bytes"].as_u64().unwrap_or_else(|| panic!("{line}: {told}"));
        assert!((least << 20..=most << 20).contains(&needed), "{line}: {space}");
        assert!(space["free_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{line}: {space}");
        let text = shop.ok(&format!("{line} --dry-run"));
        let has_need = text.contains("needs up to ") && text.contains(" are free on ");
        assert!(has_need || text.contains("needs no space"), "{line}: {text}");
        assert!(text.contains("nothing was "), "{line}: {text}");
        assert_eq!(state(&shop), before, "{line}");
    }
}

#[test]
fn a_new_link_needs_a_little_space() {
    let shop = Workshop::new();
    shop.ok("create base.vhdx --size 64M");
    shop.ok("create child.vhdx --parent base.vhdx");
    fs::create_dir(shop.path("new")).unwrap();
    fs::rename(shop.path("base.vhdx"), shop.path("new/base.vhdx")).unwrap();
    let text = shop.ok("reconnect child.vhdx --search . --dry-run");
    assert!(text.contains("it needs up to 1 MiB; ") && text.ends_with("; nothing was changed\n"), "{text}");
    assert_eq!(shop.json("reconnect child.vhdx --search . --dry-run")["space"]["needed_bytes"], 1 << 20);
}

/// The figures of the dry run are those of the real thing.
#[test]
fn a_clone_takes_what_the_dry_run_says() {
    let shop = Workshop::new();
    for (base, clone) in [("base.vhdx", "a.vhdx"), ("base.vhd", "a.vhd"), ("base.qcow2", "a.qcow2")] {
        shop.ok(&format!("create {base} --size 10G"));
        let told = shop.json(&format!("clone {base} {clone} --dry-run"));
        let needed = told["space"]["needed_bytes"].as_u64().unwrap();
        shop.ok(&format!("clone {base} {clone}"));
        let made = fs::metadata(shop.path(clone)).unwrap().len();
        assert!(made.abs_diff(needed) <= 1 << 20, "{clone}: {made} bytes, and {needed} were told");
    }
}

#[test]
fn too_little_space_is_said_before_and_after() {
    let small = match Small::new("ext4", 24 << 20) {
        Ok(small) => small,
        Err(missing) => return println!("skipped: {missing}"),
    };
    let shop = Workshop::new();
    shop.ok("create source.vhdx --size 64M");
    shop.ok("io source.vhdx -c 'write -P 1 0 40M'");
    let dest = small.mount.join("copy.vhdx");
    let told = shop.ok(&format!("convert source.vhdx {} --dry-run", dest.display()));
    assert!(told.contains("it needs up to 4") && told.contains("; only ") && told.contains(" are free on "), "{told}");
    let failed = shop.fails(1, &format!("convert source.vhdx {}", dest.display()));
    assert!(failed.contains("needs about 40 MiB, ") && failed.contains(" are free on "), "{failed}");
    let failed = shop.fails(1, &format!("move source.vhdx {}", small.mount.display()));
    assert!(failed.contains("needs about 40 MiB, ") && failed.contains(" are free on "), "{failed}");
    let [base, child, filler] = ["base.vhdx", "child.vhdx", "filler"].map(|name| small.mount.join(name));
    let [base, child] = [base, child].map(|path| path.display().to_string());
    shop.ok(&format!("create {base} --size 64M"));
    shop.ok(&format!("create {child} --parent {base}"));
    shop.ok(&format!("io {child} -c 'write -P 1 0 8M' -c flush"));
    fs::write(filler, vec![1; 4 << 20]).unwrap();
    for dry_run in ["--dry-run", ""] {
        let failed = shop.fails(1, &format!("merge {child} --no-reflink {dry_run}"));
        assert!(failed.contains("needs about 8 MiB, ") && failed.contains(" are free on "), "{failed}");
    }
}
