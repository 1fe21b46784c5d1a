//! FAT and exFAT against fsck.fat, dump.exfat and fsck.exfat; swap areas.

use crate::lab::{MIB, Scratch, contents, damage_each_byte, free_of, have};
use diskwright_volume::ReasonKind;
use std::fs;

fn why(scratch: &Scratch) -> Option<ReasonKind> {
    scratch.layout().volumes[0].free_bytes.clone().err().map(|reason| reason.why)
}

#[test]
fn garbage_in_free_clusters_of_fat_harms_nothing() {
    if !have("garbage_in_free_clusters_of_fat_harms_nothing", &["mkfs.fat", "fsck.fat", "mcopy", "mdel"]) {
        return;
    }
    for (size_mib, options, name) in [
        (4, "-F 12", "FAT12"),
        (30, "-F 12 -s 16", "FAT12"),
        (60, "-F 16", "FAT16"),
        (300, "-F 32", "FAT32"),
        (40, "-F 32 -s 1", "FAT32"),
        (200, "-F 16 -f 1", "FAT16"),
        (100, "-F 32 -S 4096 -s 1", "FAT32"),
    ] {
        let scratch = Scratch::new(size_mib * MIB);
        scratch.run(&format!("mkfs.fat {options} -n DATA -i 1234abcd IMAGE"));
        // mtools does not write to sectors of 4096 bytes.
        let count = if options.contains("4096") { 0 } else { 12 };
        for index in 0..count {
            fs::write(scratch.path("file"), contents(index)).unwrap();
            scratch.run(&format!("mcopy -i IMAGE DIR/file ::f{index}"));
        }
        (0..count).filter(|index| index % 3 == 1).for_each(|index| {
            scratch.run(&format!("mdel -i IMAGE ::f{index}"));
        });
        let volume = &scratch.layout().volumes[0];
        assert_eq!((volume.contents, volume.label.as_deref()), (Some(name), Some("DATA")), "{options}");
        assert_eq!(volume.uuid.as_deref(), Some("1234-ABCD"));
        let free_bytes = volume.free_bytes.clone().unwrap_or_else(|reason| panic!("{options}: {reason}"));
        // The last line of fsck.fat: "IMAGE: 9 files, 1234/5678 clusters".
        let text = scratch.run("fsck.fat -n -v IMAGE");
        let line = text.lines().find(|line| line.ends_with("clusters") && line.contains('/')).unwrap();
        let (used, total) = line.split_whitespace().rev().nth(1).unwrap().split_once('/').unwrap();
        let cluster_bytes: u64 = text
            .lines()
            .find_map(|line| line.trim().strip_suffix("bytes per cluster"))
            .map(|value| value.trim().parse().unwrap())
            .unwrap();
        let (used, total): (u64, u64) = (used.parse().unwrap(), total.parse().unwrap());
        assert_eq!(free_bytes, (total - used) * cluster_bytes, "{options}: {text}");
        scratch.spoil();
        scratch.run("fsck.fat -n IMAGE");
        for index in (0..count).filter(|index| index % 3 != 1) {
            scratch.run(&format!("mcopy -n -o -i IMAGE ::f{index} DIR/back"));
            assert!(fs::read(scratch.path("back")).unwrap() == contents(index), "{options}: file {index}");
        }
    }
}

#[test]
fn a_fat_in_doubt_is_left_alone() {
    if !have("a_fat_in_doubt_is_left_alone", &["mkfs.fat"]) {
        return;
    }
    for (options, size_mib, entry, flags) in [("-F 16", 60, 2, 0x25), ("-F 32", 300, 4, 0x41)] {
        let scratch = Scratch::new(size_mib * MIB);
        scratch.run(&format!("mkfs.fat {options} IMAGE"));
        let boot = scratch.get(0, 512);
        let table = u64::from(u16::from_le_bytes([boot[14], boot[15]])) * 512;
        assert_eq!(why(&scratch), None);
        for (at, byte, expected) in [
            (table + 2 * entry - 1, if entry == 2 { 0x7f } else { 0x07 }, ReasonKind::Dirty),
            (table + 2 * entry - 1, if entry == 2 { 0xbf } else { 0x0b }, ReasonKind::Dirty),
            (flags, 1, ReasonKind::Dirty),
            (table + 100 * entry, 1, ReasonKind::Damaged),
        ] {
            let before = scratch.get(at, 1);
            scratch.put(at, &[byte]);
            assert_eq!(why(&scratch), Some(expected), "{options}: byte {at}");
            scratch.put(at, &before);
        }
        assert_eq!(why(&scratch), None);
    }
}

#[test]
fn garbage_in_free_clusters_of_exfat_harms_nothing() {
    if !have("garbage_in_free_clusters_of_exfat_harms_nothing", &["mkfs.exfat", "dump.exfat", "fsck.exfat"]) {
        return;
    }
    for (size_mib, options) in [(64, ""), (700, "-c 4096"), (16, "-c 512"), (2000, "-c 32768")] {
        let scratch = Scratch::new(size_mib * MIB);
        scratch.run(&format!("mkfs.exfat -L data {options} IMAGE"));
        let volume = &scratch.layout().volumes[0];
        assert_eq!(volume.name(), "whole disk: exFAT 'data'");
        let free_bytes = volume.free_bytes.clone().unwrap_or_else(|reason| panic!("{options}: {reason}"));
        let text = scratch.run("dump.exfat IMAGE");
        let number = |key: &str| -> u64 {
            let line =
                text.lines().find(|line| line.trim().starts_with(key)).unwrap_or_else(|| panic!("{key}: {text}"));
            line.split(':').nth(1).unwrap().trim().parse().unwrap()
        };
        assert_eq!(free_bytes, number("Free Clusters") * number("Cluster size"), "{options}: {text}");
        scratch.spoil();
        scratch.run("fsck.exfat -n IMAGE");
        // VolumeDirty, which the checksum of the boot region leaves out.
        scratch.put(0x6a, &[2]);
        assert_eq!(why(&scratch), Some(ReasonKind::Dirty));
        scratch.put(0x6a, &[0]);
        scratch.put(0x64, &[0xee]);
        assert_eq!(why(&scratch), Some(ReasonKind::Damaged), "the checksum of the boot region");
    }
}

#[test]
fn swap_is_free_only_beside_a_file_system_that_was_unmounted() {
    if !have("swap_is_free_only_beside_a_file_system_that_was_unmounted", &["mkswap", "mke2fs", "sfdisk", "debugfs"]) {
        return;
    }
    let scratch = Scratch::new(60 * MIB);
    scratch.run("mkswap -q -L pages IMAGE");
    assert_eq!(scratch.layout().volumes[0].name(), "whole disk: swap 'pages'");
    assert_eq!(why(&scratch), Some(ReasonKind::Hibernated), "nothing shows that the system was shut down");

    let scratch = Scratch::new(60 * MIB);
    fs::write(scratch.path("script"), "label: dos\nstart=2048, size=40960\nstart=43008, size=40960, type=82\n")
        .unwrap();
    scratch.run("sh -c 'sfdisk -q IMAGE < DIR/script'");
    scratch.run("mke2fs -q -F -t ext4 -E offset=1048576 IMAGE 20m");
    let area = Scratch::new(20 * MIB);
    area.run("mkswap -q IMAGE");
    scratch.put(43008 * 512, &area.get(0, 8192));
    let layout = scratch.layout();
    let free = free_of(&scratch.disk(), &layout.volumes[1]).unwrap();
    assert_eq!(free, vec![43008 * 512 + 4096..43008 * 512 + 20 * MIB]);
    // A suspended system, and one that was not shut down.
    scratch.put(43008 * 512 + 4086, b"S1SUSPEND\0");
    let layout = scratch.layout();
    assert_eq!(layout.volumes[1].free_bytes.clone().unwrap_err().why, ReasonKind::Hibernated);
    assert_eq!(
        layout.volumes[0].free_bytes.clone().unwrap_err().why,
        ReasonKind::Hibernated,
        "the ext4 may be mounted"
    );
    scratch.put(43008 * 512 + 4086, b"SWAPSPACE2");
    assert!(scratch.layout().volumes[1].free_bytes.is_ok());
    fs::write(scratch.path("commands"), "feature needs_recovery\n").unwrap();
    scratch.run(&format!("debugfs -w -f DIR/commands '{}?offset=1048576'", scratch.image().display()));
    let layout = scratch.layout();
    assert_eq!(layout.volumes[0].free_bytes.clone().unwrap_err().why, ReasonKind::Dirty);
    assert_eq!(layout.volumes[1].free_bytes.clone().unwrap_err().why, ReasonKind::Hibernated);
    // The FAT that firmware starts from is not mounted most of the time, and proves nothing.
    if have("a swap area beside a FAT", &["mkfs.fat"]) {
        let other = Scratch::new(20 * MIB);
        other.run("mkfs.fat IMAGE");
        scratch.put(MIB, &other.bytes());
        let layout = scratch.layout();
        assert!(layout.volumes[0].free_bytes.is_ok() && layout.volumes[0].name().contains("FAT"));
        assert_eq!(layout.volumes[1].free_bytes.clone().unwrap_err().why, ReasonKind::Hibernated);
    }
    // A btrfs has no mark of its own either.
    if have("a btrfs beside a file system that is in use", &["mkfs.btrfs"]) {
        let scratch = Scratch::new(160 * MIB);
        let script = "label: dos\nstart=2048, size=40960\nstart=43008, size=262144\n";
        fs::write(scratch.path("script"), script).unwrap();
        scratch.run("sh -c 'sfdisk -q IMAGE < DIR/script'");
        scratch.run("mke2fs -q -F -t ext4 -E offset=1048576 IMAGE 20m");
        let other = Scratch::new(128 * MIB);
        other.run("mkfs.btrfs -q IMAGE");
        scratch.put(43008 * 512, &other.bytes());
        assert!(scratch.layout().volumes[1].free_bytes.is_ok());
        fs::write(scratch.path("commands"), "feature needs_recovery\n").unwrap();
        scratch.run(&format!("debugfs -w -f DIR/commands '{}?offset=1048576'", scratch.image().display()));
        assert_eq!(scratch.layout().volumes[1].free_bytes.clone().unwrap_err().why, ReasonKind::Hibernated);
    }
}

#[test]
fn no_damaged_byte_of_fat_or_exfat_panics() {
    if have("no_damaged_byte_of_fat_or_exfat_panics", &["mkfs.fat"]) {
        for options in ["-F 12", "-F 16 -s 1", "-F 32 -s 1"] {
            let scratch = Scratch::new(3 * MIB);
            scratch.run(&format!("mkfs.fat {options} IMAGE"));
            let free = free_of(&scratch.disk(), &scratch.layout().volumes[0]).unwrap_or_default();
            damage_each_byte(scratch.bytes(), &[0..96, 500..560, 32 * 512..32 * 512 + 16], &free, false);
        }
    }
    if have("no_damaged_byte_of_fat_or_exfat_panics", &["mkfs.exfat"]) {
        let scratch = Scratch::new(4 * MIB);
        scratch.run("mkfs.exfat -c 512 IMAGE");
        let free = free_of(&scratch.disk(), &scratch.layout().volumes[0]).unwrap();
        let boot = scratch.get(0, 512);
        let word = |at: usize| u32::from_le_bytes(boot[at..at + 4].try_into().unwrap()) as usize;
        let (fat, root) = (word(0x50) * 512, word(0x58) * 512 + (word(0x60) - 2) * 512);
        damage_each_byte(scratch.bytes(), &[0..128, fat..fat + 64, root..root + 128], &free, false);
    }
}
