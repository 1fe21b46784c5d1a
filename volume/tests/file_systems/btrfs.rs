//! btrfs against the free-space tree as btrfs-progs prints it, and btrfs check.

use crate::lab::{MIB, Mounted, Scratch, contents, damage_each_byte, free_of, have, merged, tree};
use diskwright_volume::ReasonKind;
use std::{fs, ops::Range};

const TOOLS: [&str; 2] = ["mkfs.btrfs", "btrfs"];

fn why(scratch: &Scratch) -> Option<ReasonKind> {
    scratch.layout().volumes[0].free_bytes.clone().err().map(|reason| reason.why)
}

/// Numbers in a line, in its order.
fn numbers(line: &str) -> Vec<u64> {
    line.split(|letter: char| !letter.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect()
}

/// The free ranges by btrfs-progs: the free-space tree, moved by the chunk tree, and what lies
/// outside of chunks; but for the first MiB and the superblock's copy at 64 MiB. `None` if the tree
/// has bitmaps, which btrfs-progs does not print.
fn free_by_its_own_tree(scratch: &Scratch) -> Option<Vec<Range<u64>>> {
    let mut chunks: Vec<(Range<u64>, Vec<u64>)> = Vec::new();
    for line in scratch.run("btrfs inspect-internal dump-tree -t chunk IMAGE").lines().map(str::trim) {
        if line.contains("CHUNK_ITEM") && line.starts_with("item") {
            // "item 1 key (FIRST_CHUNK_TREE CHUNK_ITEM 13631488) itemoff 16105 itemsize 80"
            chunks.push((numbers(line)[1]..0, Vec::new()));
        } else if line.starts_with("length ") && line.contains("owner") {
            let chunk = chunks.last_mut().unwrap();
            chunk.0.end = chunk.0.start + numbers(line)[0];
        } else if line.starts_with("stripe ") && line.contains("devid") {
            chunks.last_mut().unwrap().1.push(numbers(line)[2]);
        }
    }
    let mut free = Vec::new();
    for line in scratch.run("btrfs inspect-internal dump-tree -t 10 IMAGE").lines().map(str::trim) {
        if line.contains("FREE_SPACE_BITMAP") {
            return None;
        }
        if line.contains("FREE_SPACE_EXTENT") {
            let (start, len) = (numbers(line)[1], numbers(line)[2]);
            // mkfs.btrfs leaves entries of chunks behind that it has removed.
            let Some((chunk, places)) = chunks.iter().find(|(chunk, _)| chunk.contains(&start)) else { continue };
            free.extend(places.iter().map(|place| place + start - chunk.start..place + start - chunk.start + len));
        }
    }
    let mut places: Vec<_> = chunks
        .iter()
        .flat_map(|(chunk, places)| places.iter().map(|place| *place..place + chunk.end - chunk.start))
        .collect();
    places.sort_by_key(|place| place.start);
    let mut end = MIB;
    for place in places {
        free.push(end..place.start);
        end = place.end;
    }
    free.push(end..600 * MIB);
    let cut = merged(free).into_iter().flat_map(|range| {
        let (copy, after) = (64 * MIB, 64 * MIB + 65_536);
        [range.start..range.end.min(copy), range.start.max(after)..range.end]
    });
    Some(merged(cut.filter(|range| range.start < range.end).collect()))
}

#[test]
fn garbage_in_free_space_of_btrfs_harms_nothing() {
    if !have("garbage_in_free_space_of_btrfs_harms_nothing", &TOOLS) {
        return;
    }
    for options in ["", "-m single", "-M", "-n 4096 -O ^skinny-metadata", "-O ^no-holes,extref -R free-space-tree"] {
        let scratch = Scratch::new(600 * MIB);
        let folder = scratch.files("files", 60);
        scratch.run(&format!("mkfs.btrfs -q -L 'the data' {options} -r {} IMAGE", folder.display()));
        let Some(mounted) = Mounted::new(&scratch, "space_cache=v2") else {
            println!("skipped: garbage_in_free_space_of_btrfs_harms_nothing: this kernel does not mount '{options}'");
            continue;
        };
        for index in 100..200 {
            fs::write(mounted.path(&format!("file{index}")), contents(index)).unwrap();
        }
        scratch.run("sync -f DIR/mount");
        (100..200).filter(|index| index % 3 != 0).for_each(|index| {
            fs::remove_file(mounted.path(&format!("file{index}"))).unwrap();
        });
        let before = tree(&mounted.path(""));
        drop(mounted);
        assert_eq!(scratch.layout().volumes[0].name(), "whole disk: btrfs 'the data'");
        let free = free_of(&scratch.disk(), &scratch.layout().volumes[0])
            .unwrap_or_else(|reason| panic!("{options}: {reason}"));
        match free_by_its_own_tree(&scratch) {
            Some(theirs) => assert_eq!(free, theirs, "{options}"),
            None => assert!(!matches!(options, "" | "-m single"), "{options}: bitmaps"),
        }
        assert!(scratch.spoil() > 300 * MIB, "{options}");
        scratch.run("btrfs check --check-data-csum IMAGE");
        let mounted = Mounted::new(&scratch, "ro").unwrap();
        assert!(tree(&mounted.path("")) == before, "{options}: the files have changed");
    }
}

#[test]
fn btrfs_on_several_devices_or_with_a_log_is_left_alone() {
    if !have("btrfs_on_several_devices_or_with_a_log_is_left_alone", &TOOLS) {
        return;
    }
    let scratch = Scratch::new(300 * MIB);
    fs::File::create(scratch.path("other")).unwrap().set_len(300 * MIB).unwrap();
    scratch.run("mkfs.btrfs -q -d single -m raid1 IMAGE DIR/other");
    assert_eq!(why(&scratch), Some(ReasonKind::Unsupported));
    scratch.run("mkfs.btrfs -q -f --csum xxhash IMAGE");
    assert_eq!(why(&scratch), Some(ReasonKind::Unsupported));
    scratch.run("mkfs.btrfs -q -f IMAGE");
    assert_eq!(why(&scratch), None);
    let mut superblock = scratch.get(65_536, 4096);
    superblock[0x60] = 1;
    let sum = crc32c::crc32c(&superblock[32..]);
    superblock[..4].copy_from_slice(&sum.to_le_bytes());
    scratch.put(65_536, &superblock);
    assert_eq!(why(&scratch), Some(ReasonKind::Dirty));
}

#[test]
fn no_damaged_byte_of_btrfs_frees_a_used_block() {
    if !have("no_damaged_byte_of_btrfs_frees_a_used_block", &TOOLS) {
        return;
    }
    let scratch = Scratch::new(120 * MIB);
    scratch.run("mkfs.btrfs -q -m single -n 4096 IMAGE");
    let free = free_of(&scratch.disk(), &scratch.layout().volumes[0]).unwrap();
    let text = scratch.run("btrfs inspect-internal dump-tree -t extent IMAGE");
    assert!(text.contains("BLOCK_GROUP_ITEM"), "{text}");
    let refused =
        damage_each_byte(scratch.bytes(), &[65_536..65_536 + 0x140, 65_536 + 0x32b..65_536 + 0x38c], &free, true);
    assert!(refused > 1000, "{refused}");
}
