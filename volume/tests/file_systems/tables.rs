//! Partition tables made by sfdisk, with file systems in them.

use crate::lab::{Bytes, MIB, Scratch, damage_each_byte, free_of, have, merged};
use diskwright_volume::{Place, ReasonKind, TableKind};
use std::fs;

fn partitioned(size_bytes: u64, script: &str) -> Scratch {
    let scratch = Scratch::new(size_bytes);
    fs::write(scratch.path("script"), script).unwrap();
    scratch.run("sh -c 'sfdisk -q IMAGE < DIR/script'");
    scratch
}

/// Makes an ext4 in this range.
fn ext4(scratch: &Scratch, start_bytes: u64, size_bytes: u64) {
    scratch.run(&format!("mke2fs -q -F -t ext4 -E offset={start_bytes} IMAGE {}k", size_bytes >> 10));
}

#[test]
fn mbr_with_logical_partitions() {
    if !have("mbr_with_logical_partitions", &["sfdisk", "mke2fs"]) {
        return;
    }
    let script = "label: dos\nstart=2048, size=40960, type=83\nstart=43008, size=40960, type=7\n\
                  start=83968, size=200000, type=f\nstart=86016, size=40960, type=83\nstart=131072, size=61440, type=83\n";
    let scratch = partitioned(200 * MIB, script);
    ext4(&scratch, MIB, 20 * MIB);
    ext4(&scratch, 86016 * 512, 20 * MIB);
    let layout = scratch.layout();
    assert_eq!((layout.table, layout.problem), (TableKind::Mbr, None));
    let places: Vec<_> = layout.volumes.iter().map(|volume| volume.place.clone()).collect();
    assert_eq!(places, [1, 2, 5, 6].map(Place::Partition));
    let free = |index: usize| free_of(&scratch.disk(), &layout.volumes[index]);
    for index in [0, 2] {
        let start = layout.volumes[index].extents[0].disk_offset_bytes;
        let ranges = free(index).unwrap();
        assert!(ranges[0].start > start && ranges.last().unwrap().end <= start + 20 * MIB);
    }
    assert_eq!(free(1).unwrap_err().why, ReasonKind::Unknown);
    assert_eq!(layout.volumes[3].extents[0].disk_offset_bytes, 131072 * 512);
    assert_eq!(layout.volumes[3].size_bytes(), 61440 * 512);
    assert_eq!(layout.volumes[2].partition_type.as_deref(), Some("83"));
}

#[test]
fn gpt_needs_both_copies() {
    if !have("gpt_needs_both_copies", &["sfdisk", "mke2fs"]) {
        return;
    }
    let scratch = partitioned(100 * MIB, "label: gpt\nstart=2048, size=40960, name=\"the first\"\nsize=81920\n");
    ext4(&scratch, MIB, 20 * MIB);
    ext4(&scratch, 43008 * 512, 40 * MIB);
    let layout = scratch.layout();
    assert_eq!((layout.table, layout.problem), (TableKind::Gpt, None));
    assert_eq!(layout.volumes[0].partition_name.as_deref(), Some("the first"));
    assert!(layout.volumes.iter().all(|volume| volume.free_bytes.is_ok()));
    let good = scratch.bytes();
    let end = 100 * MIB;
    for (at, byte, expected) in [
        (512, b'X', ReasonKind::Damaged),            // the first header's signature
        (512 + 80, 99, ReasonKind::Damaged),         // and its checksum
        (1024 + 40, 77, ReasonKind::Damaged),        // the first array
        (end - 512 + 20, 1, ReasonKind::Damaged),    // the second header
        (446 + 16 + 4, 0x83, ReasonKind::Ambiguous), // a hybrid MBR: a second entry of type 83
    ] {
        let before = scratch.get(at, 1);
        scratch.put(at, &[byte]);
        if at == 446 + 20 {
            scratch.put(446 + 16 + 8, &[0, 8, 0, 0, 0, 8, 0, 0]);
        }
        let layout = scratch.layout();
        assert_eq!(layout.problem.map(|problem| problem.why), Some(expected), "byte {at}");
        assert_eq!(layout.volumes.len(), 2, "byte {at}: the partitions are shown");
        assert!(layout.volumes.iter().all(|volume| volume.free_bytes.is_err()), "byte {at}");
        scratch.put(at, &before);
        scratch.put(446 + 16 + 8, &[0; 8]);
    }
    assert!(good == scratch.bytes());
    // Both copies are valid, and do not say the same: the first partition ends elsewhere.
    scratch.put(1024 + 40, &(43_006_u64).to_le_bytes());
    let array = crc32fast::hash(&scratch.get(1024, 128 * 128));
    scratch.put(512 + 88, &array.to_le_bytes());
    scratch.put(512 + 16, &[0; 4]);
    let header = crc32fast::hash(&scratch.get(512, 92));
    scratch.put(512 + 16, &header.to_le_bytes());
    let layout = scratch.layout();
    assert_eq!(layout.problem.map(|problem| problem.why), Some(ReasonKind::Ambiguous));
    assert!(layout.volumes.len() == 2 && layout.volumes.iter().all(|volume| volume.free_bytes.is_err()));
    scratch.put(512, &good[512..2048]);
    assert!(scratch.layout().problem.is_none());
    // Without the protective MBR the header is in doubt.
    scratch.put(510, &[0, 0]);
    assert_eq!(scratch.layout().problem.map(|problem| problem.why), Some(ReasonKind::Ambiguous));
}

#[test]
fn two_signatures_in_one_place_are_left_alone() {
    if !have("two_signatures_in_one_place_are_left_alone", &["sfdisk", "mke2fs"]) {
        return;
    }
    let scratch = Scratch::new(40 * MIB);
    ext4(&scratch, 0, 40 * MIB);
    assert!(scratch.layout().volumes[0].free_bytes.is_ok());
    for (at, bytes) in [(0, b"LUKS\xba\xbe".as_slice()), (3, b"-FVE-FS-"), (40 * MIB - 8192, b"\xfc\x4e\x2b\xa9")] {
        let before = scratch.get(at, bytes.len());
        scratch.put(at, bytes);
        let volume = &scratch.layout().volumes[0];
        assert_eq!(volume.free_bytes.clone().unwrap_err().why, ReasonKind::Ambiguous);
        assert_eq!(volume.contents, None);
        scratch.put(at, &before);
    }
    // A table in the first sector of a partition.
    let scratch = partitioned(40 * MIB, "label: dos\nstart=2048, size=40960\n");
    ext4(&scratch, MIB, 20 * MIB);
    assert!(scratch.layout().volumes[0].free_bytes.is_ok());
    scratch.put(MIB, &scratch.get(0, 512));
    assert_eq!(scratch.layout().volumes[0].free_bytes.clone().unwrap_err().why, ReasonKind::Ambiguous);
    let scratch = Scratch::new(40 * MIB);
    ext4(&scratch, 0, 40 * MIB);
    // A table over a bare file system: either may be the stale one.
    fs::write(scratch.path("script"), "label: dos\nstart=2048, size=40960, type=83\n").unwrap();
    scratch.run("sh -c 'sfdisk -q --wipe never IMAGE < DIR/script'");
    let layout = scratch.layout();
    assert_eq!(layout.problem.map(|problem| problem.why), Some(ReasonKind::Ambiguous));
    assert!(layout.volumes.iter().all(|volume| volume.free_bytes.is_err()));
}

#[test]
fn what_is_known_by_name_only_is_left_alone_by_name() {
    let disk = |at: usize, bytes: &[u8]| {
        let mut disk = vec![0; 4 << 20];
        disk[at..at + bytes.len()].copy_from_slice(bytes);
        Bytes(disk)
    };
    for (at, bytes, name, why) in [
        (0, b"LUKS\xba\xbe\0\x02".as_slice(), "LUKS", ReasonKind::Encrypted),
        (3, b"-FVE-FS-", "BitLocker", ReasonKind::Encrypted),
        (3, b"ReFS\0\0\0\0", "ReFS", ReasonKind::Unsupported),
        (4096, b"\xfc\x4e\x2b\xa9", "Linux RAID member", ReasonKind::Unsupported),
        ((4 << 20) - 65_536, b"\xfc\x4e\x2b\xa9", "Linux RAID member", ReasonKind::Unsupported),
        ((4 << 20) - 8192, b"\xfc\x4e\x2b\xa9", "Linux RAID member", ReasonKind::Unsupported),
        (0x2_0000, b"\x0c\xb1\xba\0\0\0\0\0", "ZFS member", ReasonKind::Unsupported),
        (0x400, b"\x10\x20\xf5\xf2", "F2FS", ReasonKind::Unsupported),
    ] {
        let layout = diskwright_volume::volumes(&disk(at, bytes));
        let volume = &layout.volumes[0];
        assert_eq!(volume.contents, Some(name));
        let reason = volume.free_bytes.clone().unwrap_err();
        assert!(reason.why == why && reason.to_string().starts_with(name), "{reason}");
    }
    let layout = diskwright_volume::volumes(&Bytes(vec![0; 4 << 20]));
    assert_eq!(layout.volumes[0].free_bytes.clone().unwrap_err().why, ReasonKind::Unknown);
    for len in [0, 1, 511, 512, 1024, 4095] {
        assert!(diskwright_volume::volumes(&Bytes(vec![0x55; len])).volumes.iter().all(|one| one.free_bytes.is_err()));
    }
}

#[test]
fn overlapping_and_outlying_partitions_are_left_alone() {
    if !have("overlapping_and_outlying_partitions_are_left_alone", &["sfdisk", "mke2fs"]) {
        return;
    }
    let script = "label: dos\nstart=2048, size=40960, type=83\nstart=43008, size=40960, type=83\n";
    let scratch = partitioned(60 * MIB, script);
    ext4(&scratch, MIB, 20 * MIB);
    ext4(&scratch, 43008 * 512, 20 * MIB);
    let free =
        |scratch: &Scratch| scratch.layout().volumes.iter().map(|one| one.free_bytes.is_ok()).collect::<Vec<_>>();
    assert_eq!(free(&scratch), [true, true]);
    scratch.put(446 + 12, &40_961_u32.to_le_bytes());
    assert_eq!(free(&scratch), [false, false], "the first ends in the second");
    scratch.put(446 + 12, &40_960_u32.to_le_bytes());
    scratch.put(446 + 16 + 12, &400_000_u32.to_le_bytes());
    assert_eq!(free(&scratch), [true, false], "the second ends beyond the disk");
    // An extended partition whose chain leads back to itself.
    scratch.put(446 + 16 + 4, &[5]);
    scratch.put(446 + 16 + 12, &40_960_u32.to_le_bytes());
    let mut table = vec![0; 512];
    table[446 + 16 + 4] = 5;
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    scratch.put(43008 * 512, &table);
    assert_eq!(scratch.layout().problem.map(|problem| problem.why), Some(ReasonKind::Damaged));
}

#[test]
fn sectors_of_4096_bytes() {
    if !have("sectors_of_4096_bytes", &["mke2fs"]) {
        return;
    }
    let scratch = Scratch::new(60 * MIB);
    ext4(&scratch, MIB, 20 * MIB);
    let mut sector = vec![0; 512];
    sector[446 + 4] = 0x83;
    sector[446 + 8..446 + 16].copy_from_slice(&[0, 1, 0, 0, 0, 20, 0, 0]);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    scratch.put(0, &sector);
    let layout = diskwright_volume::volumes(&scratch.disk_with_sectors(4096));
    assert_eq!(layout.volumes[0].extents[0].disk_offset_bytes, MIB);
    let free = free_of(&scratch.disk_with_sectors(4096), &layout.volumes[0]).unwrap();
    assert_eq!(free, merged(free.clone()));
    assert!(scratch.layout().volumes.iter().all(|volume| volume.free_bytes.is_err()), "512 bytes is wrong here");
}

#[test]
fn no_damaged_byte_of_a_table_panics() {
    if !have("no_damaged_byte_of_a_table_panics", &["sfdisk", "mke2fs"]) {
        return;
    }
    for label in ["dos", "gpt"] {
        let scratch = partitioned(8 * MIB, &format!("label: {label}\nstart=2048, size=4096\nstart=6144, size=4096\n"));
        scratch.run("mke2fs -q -F -t ext4 -b 1024 -O ^has_journal -N 16 -E offset=1048576 IMAGE 2048k");
        let free = free_of(&scratch.disk(), &scratch.layout().volumes[0]).unwrap();
        let places = [440..512, 512..512 + 96, 1024..1024 + 256, 8 * (1 << 20) - 512..8 * (1 << 20) - 416];
        let places = if label == "dos" { &places[..1] } else { &places };
        damage_each_byte(scratch.bytes(), places, &free, true);
    }
}
