//! XFS against xfs_db's list of free extents, and xfs_repair.

use crate::lab::{MIB, Mounted, Scratch, contents, damage_each_byte, free_of, have, tree};
use diskwright_volume::ReasonKind;
use std::fs;

const TOOLS: [&str; 3] = ["mkfs.xfs", "xfs_db", "xfs_repair"];

fn field(scratch: &Scratch, commands: &str, name: &str) -> u64 {
    let text = scratch.run(&format!("xfs_db -r -c '{commands}' -c 'print {name}' IMAGE"));
    text.rsplit('=').next().unwrap().trim().parse().unwrap_or_else(|_| panic!("{text}"))
}

/// Compares with xfs_db: it lists the same ranges, and those of the AGFL, which we call used.
fn is_what_xfs_db_lists(scratch: &Scratch) {
    let free = free_of(&scratch.disk(), &scratch.layout().volumes[0]).unwrap();
    let (block, group) = (field(scratch, "sb 0", "blocksize"), field(scratch, "sb 0", "agblocks"));
    let mut ours = free.clone();
    let mut reserved = 0;
    for line in scratch.run("xfs_db -r -c 'freesp -d' IMAGE").lines().skip(1) {
        let numbers: Vec<u64> = line.split_whitespace().map_while(|word| word.parse().ok()).collect();
        let [number, first, len] = numbers[..] else { break };
        let start = (number * group + first) * block;
        match ours.iter().position(|range| *range == (start..start + len * block)) {
            Some(index) => drop(ours.remove(index)),
            None => {
                assert_eq!(len, 1, "{line}");
                reserved += 1;
            }
        }
    }
    assert!(ours.is_empty(), "xfs_db does not list {ours:?}");
    let groups = field(scratch, "sb 0", "agcount");
    let lists: u64 = (0..groups).map(|group| field(scratch, &format!("agf {group}"), "flcount")).sum();
    assert_eq!(reserved, lists);
}

#[test]
fn garbage_in_free_blocks_harms_nothing() {
    if !have("xfs::garbage_in_free_blocks_harms_nothing", &TOOLS) {
        return;
    }
    for options in [
        "",
        "-m crc=0",
        "-b size=1024",
        "-s size=4096 -m rmapbt=1,reflink=1",
        "-d agcount=5",
        "-m finobt=0,inobtcount=0 -l version=2,su=32k",
    ] {
        let scratch = Scratch::new(400 * MIB);
        scratch.run(&format!("mkfs.xfs -q -f -L 'the data' {options} IMAGE"));
        is_what_xfs_db_lists(&scratch);
        let Some(mounted) = Mounted::new(&scratch, "nouuid") else {
            println!("skipped: xfs::garbage_in_free_blocks_harms_nothing: this kernel does not mount '{options}'");
            assert!(scratch.spoil() > 200 * MIB);
            scratch.run("xfs_repair -n IMAGE");
            continue;
        };
        for index in 0..250 {
            fs::write(mounted.path(&format!("file{index}")), contents(index)).unwrap();
        }
        (0..250).filter(|index| index % 3 == 2).for_each(|index| {
            fs::remove_file(mounted.path(&format!("file{index}"))).unwrap();
        });
        let before = tree(&mounted.path(""));
        // A copy of a mounted file system has a log to replay.
        scratch.run("sync -f DIR/mount");
        assert_eq!(scratch.layout().volumes[0].free_bytes.clone().unwrap_err().why, ReasonKind::Dirty, "{options}");
        drop(mounted);
        assert_eq!(scratch.layout().volumes[0].name(), "whole disk: XFS 'the data'");
        is_what_xfs_db_lists(&scratch);
        assert!(scratch.spoil() > 200 * MIB);
        scratch.run("xfs_repair -n IMAGE");
        let mounted = Mounted::new(&scratch, "nouuid,ro,norecovery").unwrap();
        assert!(tree(&mounted.path("")) == before, "{options}: the files have changed");
    }
}

#[test]
fn a_log_that_went_round_is_clean_after_each_unmount() {
    if !have("a_log_that_went_round_is_clean_after_each_unmount", &TOOLS) {
        return;
    }
    let scratch = Scratch::new(64 * MIB);
    scratch.run("mkfs.xfs -q -f --unsupported -l size=6m IMAGE");
    let blocks = field(&scratch, "sb 0", "logblocks");
    let start = field(&scratch, "sb 0", "logstart");
    let mut cycles = Vec::new();
    for round in 0..8 {
        let Some(mounted) = Mounted::new(&scratch, "nouuid") else {
            return println!(
                "skipped: a_log_that_went_round_is_clean_after_each_unmount: this kernel does not mount XFS"
            );
        };
        for index in 0..1500 + 97 * round {
            let path = mounted.path(&format!("a file with a long name that fills the log {index}"));
            fs::write(&path, b"x").unwrap();
            if index % 100 != 0 {
                fs::remove_file(path).unwrap();
            }
            if index % 2 == 0 {
                fs::File::open(mounted.path("")).unwrap().sync_all().unwrap();
            }
        }
        drop(mounted);
        is_what_xfs_db_lists(&scratch);
        let group_log = field(&scratch, "sb 0", "agblklog");
        let group_blocks = field(&scratch, "sb 0", "agblocks");
        let place = ((start >> group_log) * group_blocks + (start & ((1 << group_log) - 1))) * 4096;
        let log = scratch.get(place, blocks as usize * 4096);
        // The second word of a record's header, the first of any other block.
        let word = |at: usize| u32::from_be_bytes(log[at..at + 4].try_into().unwrap());
        cycles.push(if word(0) == 0xfeed_babe { word(4) } else { word(0) });
    }
    println!("cycles of the log: {cycles:?}");
    assert!(cycles.last() > cycles.first(), "the log has gone round: {cycles:?}");
}

#[test]
fn what_xfs_cannot_answer_for_is_left_alone() {
    if !have("what_xfs_cannot_answer_for_is_left_alone", &TOOLS) {
        return;
    }
    let scratch = Scratch::new(400 * MIB);
    scratch.run("mkfs.xfs -q -f IMAGE");
    let good = |scratch: &Scratch| scratch.layout().volumes[0].free_bytes.clone().map_err(|reason| reason.why);
    assert!(good(&scratch).is_ok());
    scratch.run("xfs_db -x -c 'sb 0' -c 'write -d features_incompat 0x1b' IMAGE");
    assert_eq!(good(&scratch), Err(ReasonKind::Dirty), "needs repair");
    scratch.run("xfs_db -x -c 'sb 0' -c 'write -d features_incompat 0x10b' IMAGE");
    assert_eq!(good(&scratch), Err(ReasonKind::Unsupported));
    scratch.run("mkfs.xfs -q -f IMAGE");
    scratch.run("xfs_db -x -c 'agf 1' -c 'write -d freeblks 7' IMAGE");
    assert_eq!(good(&scratch), Err(ReasonKind::Damaged));
    scratch.run("mkfs.xfs -q -f IMAGE");
    scratch.run("xfs_db -x -c 'sb 0' -c 'write -d rblocks 7' IMAGE");
    assert_eq!(good(&scratch), Err(ReasonKind::Unsupported));
    let log = scratch.path("log");
    fs::File::create(&log).unwrap().set_len(128 * MIB).unwrap();
    scratch.run("mkfs.xfs -q -f -l logdev=DIR/log,size=64m IMAGE");
    assert_eq!(good(&scratch), Err(ReasonKind::Unsupported));
}

#[test]
fn no_damaged_byte_of_xfs_frees_a_used_block() {
    if !have("no_damaged_byte_of_xfs_frees_a_used_block", &TOOLS) {
        return;
    }
    let scratch = Scratch::new(17 * MIB);
    let (status, text) = scratch.try_run("mkfs.xfs -q -f --unsupported -d agcount=1 -l size=6m IMAGE");
    if status != Some(0) {
        return println!("skipped: no_damaged_byte_of_xfs_frees_a_used_block: {text}");
    }
    let free = free_of(&scratch.disk(), &scratch.layout().volumes[0]).unwrap();
    let root = field(&scratch, "agf 0", "bnoroot") as usize * 4096;
    // One sector at a time is enough of the superblock and the AGF: the rest of them is zeros.
    let places = [0..256, 512..512 + 224, root..root + 72];
    let refused = damage_each_byte(scratch.bytes(), &places, &free, true);
    assert!(refused > 1500, "{refused}");
}
