//! NTFS against ntfscluster's and ntfsresize's view, and ntfsfix.

use crate::lab::{MIB, Mounted, Scratch, contents, damage_each_byte, free_of, have, tree};
use diskwright_volume::ReasonKind;
use std::fs;

const TOOLS: [&str; 4] = ["mkfs.ntfs", "ntfscp", "ntfsinfo", "ntfsfix"];

fn make(size_bytes: u64, options: &str, count: usize) -> Scratch {
    let scratch = Scratch::new(size_bytes);
    scratch.run(&format!("mkfs.ntfs -F -Q -q -p 0 -H 0 -S 0 -s 512 -L 'the data' {options} IMAGE"));
    for index in 0..count {
        fs::write(scratch.path("file"), contents(index)).unwrap();
        scratch.run(&format!("ntfscp -f IMAGE DIR/file kept{index}"));
    }
    scratch
}

fn why(scratch: &Scratch) -> ReasonKind {
    scratch.layout().volumes[0].free_bytes.clone().unwrap_err().why
}

/// Offset of a record of the MFT whose first run holds it.
fn record(scratch: &Scratch, number: u64) -> u64 {
    let boot = scratch.get(0, 512);
    let cluster_bytes = u64::from(u16::from_le_bytes([boot[11], boot[12]])) * u64::from(boot[13]);
    u64::from_le_bytes(boot[0x30..0x38].try_into().unwrap()) * cluster_bytes + number * 1024
}

/// Offset of the first attribute of this type in a record.
fn attribute(scratch: &Scratch, number: u64, kind: u32) -> u64 {
    let start = record(scratch, number);
    let bytes = scratch.get(start, 1024);
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let mut at = u16::from_le_bytes([bytes[0x14], bytes[0x15]]) as usize;
    while word(at) != kind {
        assert_ne!(word(at), u32::MAX, "record {number} has no attribute {kind:#x}");
        at += word(at + 4) as usize;
    }
    start + at as u64
}

/// First cluster of a stream's first run, in bytes.
fn first_run(scratch: &Scratch, number: u64, cluster_bytes: u64) -> u64 {
    let at = attribute(scratch, number, 0x80);
    let bytes = scratch.get(at, 96);
    let list = &bytes[u16::from_le_bytes([bytes[32], bytes[33]]) as usize..];
    let (counts, places) = (usize::from(list[0] & 15), usize::from(list[0] >> 4));
    let mut whole = [0; 8];
    whole[..places].copy_from_slice(&list[1 + counts..1 + counts + places]);
    u64::from_le_bytes(whole) * cluster_bytes
}

#[test]
fn garbage_in_free_clusters_harms_nothing() {
    if !have("garbage_in_free_clusters_harms_nothing", &TOOLS) {
        return;
    }
    for (size_mib, options) in [(200, ""), (1024, "-c 65536"), (64, "-c 512"), (300, "-c 2048"), (600, "-I -C")] {
        let scratch = make(size_mib * MIB, options, 20);
        let layout = scratch.layout();
        let volume = &layout.volumes[0];
        assert_eq!(volume.name(), "whole disk: NTFS 'the data'");
        assert_eq!(volume.uuid.as_ref().map(String::len), Some(16));
        let free_bytes = volume.free_bytes.clone().unwrap_or_else(|reason| panic!("{options}: {reason}"));
        // The second opinion: ntfsinfo counts the zero bits of $Bitmap.
        let text = scratch.run("ntfsinfo -m IMAGE");
        let number = |key: &str| -> u64 {
            let line =
                text.lines().find(|line| line.trim().starts_with(key)).unwrap_or_else(|| panic!("{key}: {text}"));
            line.split(':').nth(1).unwrap().split_whitespace().next().unwrap().parse().unwrap()
        };
        assert_eq!(free_bytes, number("Free Clusters") * number("Cluster Size"), "{options}: {text}");
        scratch.spoil();
        scratch.run("ntfsfix -n IMAGE");
        scratch.run("ntfsinfo -m IMAGE");
        for index in 0..20 {
            scratch.run(&format!("sh -c 'ntfscat IMAGE kept{index} > DIR/back'"));
            assert!(fs::read(scratch.path("back")).unwrap() == contents(index), "{options}: file {index} has changed");
        }
        if have("a copy of all used clusters of NTFS", &["ntfsclone"]) {
            // ntfsclone compares the bitmap with the runs of all files, and fails where they
            // differ.
            scratch.run("ntfsclone -q -f --metadata -O DIR/none IMAGE");
        }
    }
}

#[test]
fn ntfs_that_is_not_at_rest_is_left_alone() {
    if !have("ntfs_that_is_not_at_rest_is_left_alone", &TOOLS) {
        return;
    }
    let scratch = make(60 * MIB, "", 3);
    assert!(scratch.layout().volumes[0].free_bytes.is_ok());
    let flags = attribute(&scratch, 3, 0x70) + 24 + 10;
    for flag in [0x0001_u16, 0x0002, 0x4000] {
        scratch.put(flags, &flag.to_le_bytes());
        assert_eq!(why(&scratch), ReasonKind::Dirty, "{flag:#x}");
    }
    scratch.put(flags, &0x8000_u16.to_le_bytes());
    assert!(scratch.layout().volumes[0].free_bytes.is_ok(), "chkdsk was here once");

    // $LogFile as Windows writes it: restart pages with a client, clean or not.
    let log = first_run(&scratch, 2, 4096);
    for (client, clean, version, expected) in [
        (0xffff_u16, 0_u16, 1_u16, None),
        (0, 2, 1, None),
        (0, 0, 1, Some(ReasonKind::Dirty)),
        (0xffff, 0, 2, Some(ReasonKind::Dirty)),
    ] {
        for page in [0_u64, 4096] {
            scratch.put(log + page, &restart_page(client, clean, version, page + 1));
        }
        assert_eq!(scratch.layout().volumes[0].free_bytes.clone().err().map(|reason| reason.why), expected);
    }
    // The newer page decides.
    scratch.put(log, &restart_page(0, 0, 1, 9));
    scratch.put(log + 4096, &restart_page(0xffff, 0, 1, 8));
    assert_eq!(why(&scratch), ReasonKind::Dirty);
    scratch.put(log, &restart_page(0xffff, 0, 1, 7));
    assert!(scratch.layout().volumes[0].free_bytes.is_ok());
    scratch.put(log + 510, b"XX");
    assert_eq!(why(&scratch), ReasonKind::Dirty, "a torn restart page");
    scratch.put(log, &vec![0xff; 8192]);

    // Shadow copies.
    let mut header = vec![0; 128];
    header[..16].copy_from_slice(b"\x6b\x87\x08\x38\x76\xc1\x48\x4e\xb7\xae\x04\x04\x6e\x6c\xc7\x52");
    scratch.put(0x1e00, &header);
    assert!(scratch.layout().volumes[0].free_bytes.is_ok(), "a header without a catalogue");
    scratch.put(0x1e00 + 48, &0x4000_u64.to_le_bytes());
    assert_eq!(why(&scratch), ReasonKind::Unsupported);
}

fn restart_page(client: u16, flags: u16, version: u16, number: u64) -> Vec<u8> {
    let mut page = vec![0; 4096];
    page[..4].copy_from_slice(b"RSTR");
    page[4..6].copy_from_slice(&0x1e_u16.to_le_bytes());
    page[6..8].copy_from_slice(&9_u16.to_le_bytes());
    page[0x10..0x14].copy_from_slice(&4096_u32.to_le_bytes());
    page[0x14..0x18].copy_from_slice(&4096_u32.to_le_bytes());
    page[0x18..0x1a].copy_from_slice(&0x30_u16.to_le_bytes());
    page[0x1c..0x1e].copy_from_slice(&version.to_le_bytes());
    page[0x30..0x38].copy_from_slice(&number.to_le_bytes());
    page[0x30 + 12..0x30 + 14].copy_from_slice(&client.to_le_bytes());
    page[0x30 + 14..0x30 + 16].copy_from_slice(&flags.to_le_bytes());
    for sector in 0..8 {
        page[512 * sector + 510..512 * sector + 512].copy_from_slice(b"\x07\x00");
    }
    page[0x1e..0x20].copy_from_slice(b"\x07\x00");
    page
}

#[test]
fn a_hibernated_windows_is_left_alone() {
    if !have("a_hibernated_windows_is_left_alone", &TOOLS) {
        return;
    }
    for crowd in [0, 60] {
        // With a crowd the root folder's index does not fit into its record.
        let scratch = make(80 * MIB, "", 1);
        fs::write(scratch.path("small"), b"x").unwrap();
        for index in 0..crowd {
            scratch.run(&format!("ntfscp -f IMAGE DIR/small 'a file with a long name to fill the index {index}'"));
        }
        for (head, expected) in [
            (b"\0\0\0\0".as_slice(), None),
            (b"hibr", Some(ReasonKind::Hibernated)),
            (b"HIBR", Some(ReasonKind::Hibernated)),
            (b"wake", None),
            (b"RSTR", Some(ReasonKind::Hibernated)),
        ] {
            let mut file = vec![0; 100_000];
            file[..4].copy_from_slice(head);
            fs::write(scratch.path("hiber"), file).unwrap();
            scratch.run("ntfscp -f IMAGE DIR/hiber HiberFil.sys");
            let free = scratch.layout().volumes[0].free_bytes.clone();
            assert_eq!(free.err().map(|reason| reason.why), expected, "{head:?} beside {crowd} files");
        }
    }
}

#[test]
fn a_fragmented_mft_is_followed_through_its_attribute_list() {
    let tools = ["ntfs-3g", "umount", "mkfs.ntfs", "ntfsfix", "ntfsinfo"];
    if !have("a_fragmented_mft_is_followed_through_its_attribute_list", &tools) {
        return;
    }
    let scratch = make(12 * MIB, "-c 512", 0);
    let Some(mounted) = Mounted::by(&scratch, "ntfs-3g IMAGE DIR/mount") else {
        return println!("skipped: a_fragmented_mft_is_followed_through_its_attribute_list: FUSE cannot mount");
    };
    // Files of two clusters until the volume is full, then every second one gives up its clusters:
    // the MFT has to grow by pieces of two clusters, whose runs do not fit into one record.
    let path = |index: usize| mounted.path(&format!("file{index}"));
    let filled = (0..8000).find(|index| fs::write(path(*index), [*index as u8; 1024]).is_err());
    let filled = filled.expect("the volume is full") - 1;
    (0..filled).step_by(2).for_each(|index| fs::write(path(index), b"").unwrap());
    (8000..9200).find(|index| fs::write(path(*index), b"x").is_err());
    let before = tree(&mounted.path(""));
    drop(mounted);
    // Record 0 has an attribute list.
    attribute(&scratch, 0, 0x20);
    let layout = scratch.layout();
    layout.volumes[0].free_bytes.clone().unwrap();
    scratch.spoil();
    scratch.run("ntfsfix -n IMAGE");
    let mounted = Mounted::by(&scratch, "ntfs-3g -o ro IMAGE DIR/mount").unwrap();
    assert!(before == tree(&mounted.path("")), "the files have changed");
}

#[test]
fn no_damaged_byte_of_ntfs_panics() {
    if !have("no_damaged_byte_of_ntfs_panics", &TOOLS) {
        return;
    }
    let scratch = make(4 * MIB, "-c 512", 2);
    let free = free_of(&scratch.disk(), &scratch.layout().volumes[0]).unwrap();
    let record = |number| record(&scratch, number) as usize;
    let head = |number| record(number)..record(number) + 450;
    damage_each_byte(scratch.bytes(), &[0..0x60, head(0), head(3), head(5), head(6)], &free, false);
}
