//! ext2, ext3, ext4 against dumpe2fs and e2fsck.

use crate::lab::{MIB, Scratch, damage_each_byte, free_of, have, merged, tree};
use diskwright_volume::{ReasonKind, TableKind};
use std::{fs, ops::Range};

const TOOLS: [&str; 4] = ["mke2fs", "debugfs", "dumpe2fs", "e2fsck"];

/// The free blocks that dumpe2fs lists, in bytes.
fn free_by_dumpe2fs(scratch: &Scratch) -> Vec<Range<u64>> {
    let text = scratch.run("dumpe2fs IMAGE");
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_owned());
    let block_bytes: u64 = field("Block size:").unwrap().parse().unwrap();
    let blocks: u64 = field("Block count:").unwrap().parse().unwrap();
    // Of a range of clusters, dumpe2fs prints the first block of the last one.
    let cluster_bytes = field("Cluster size:").map_or(block_bytes, |value| value.parse().unwrap());
    let mut ranges = Vec::new();
    for line in text.lines().filter_map(|line| line.strip_prefix("  Free blocks: ")) {
        for part in line.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last): (u64, u64) = (first.parse().unwrap(), last.parse().unwrap());
            ranges.push(first * block_bytes..(last * block_bytes + cluster_bytes).min(blocks * block_bytes));
        }
    }
    merged(ranges)
}

/// Makes a file system with these options, with files in it, every third deleted.
fn make(size_bytes: u64, options: &str, count: usize) -> Scratch {
    let scratch = Scratch::new(size_bytes);
    let folder = scratch.files("files", count);
    scratch.run(&format!("mke2fs -q -F -L 'the root' {options} -d {} IMAGE", folder.display()));
    let gone: Vec<_> = tree(&folder).into_keys().filter(|path| path.to_str().unwrap().contains("gone")).collect();
    let commands: String = gone.iter().map(|path| format!("rm {}\n", path.display())).collect();
    fs::write(scratch.path("commands"), commands).unwrap();
    scratch.run("debugfs -w -f DIR/commands IMAGE");
    if options.contains("quota") {
        // debugfs does not keep the quota files up to date.
        scratch.try_run("e2fsck -fy IMAGE");
    }
    gone.iter().for_each(|path| fs::remove_file(folder.join(path)).unwrap());
    scratch
}

/// The decisive test.
fn garbage_in_free_blocks_harms_nothing(size_bytes: u64, options: &str) {
    let scratch = make(size_bytes, options, 40);
    scratch.run("e2fsck -fn IMAGE");
    let layout = scratch.layout();
    let volume = &layout.volumes[0];
    assert_eq!((layout.table, layout.volumes.len()), (TableKind::None, 1));
    assert_eq!(volume.label.as_deref(), Some("the root"));
    let free = free_of(&scratch.disk(), volume).unwrap_or_else(|reason| panic!("{options}: {reason}"));
    assert_eq!(free, free_by_dumpe2fs(&scratch), "{options}");
    let files = |name: &str| {
        fs::create_dir(scratch.path(name)).unwrap();
        scratch.run(&format!("debugfs -R 'rdump / DIR/{name}' IMAGE"));
        let mut files = tree(&scratch.path(name));
        files.retain(|path, _| !path.starts_with("lost+found"));
        files
    };
    let before = files("before");
    assert_eq!(before.len(), tree(&scratch.path("files")).len());
    assert!(scratch.spoil() > size_bytes / 4, "{options}");
    scratch.run("e2fsck -fn IMAGE");
    assert!(before == files("after"), "{options}: the files have changed");
}

#[test]
fn every_feature_of_ext4() {
    if !have("every_feature_of_ext4", &TOOLS) {
        return;
    }
    for (size_mib, options) in [
        (1024, "-t ext4"),
        (1300, "-t ext4 -O ^has_journal"),
        (300, "-t ext4 -b 1024"),
        (300, "-t ext4 -b 2048 -O ^64bit,^flex_bg"),
        (700, "-t ext4 -O ^metadata_csum,uninit_bg"),
        (700, "-t ext4 -O ^metadata_csum,uninit_bg,^64bit"),
        (700, "-t ext4 -O ^metadata_csum,^uninit_bg"),
        (700, "-t ext4 -O ^64bit,metadata_csum"),
        (900, "-t ext4 -b 1024 -O meta_bg,^resize_inode"),
        (900, "-t ext4 -b 1024 -O meta_bg,^resize_inode,^flex_bg,^64bit,^metadata_csum,uninit_bg"),
        (500, "-t ext4 -O sparse_super2"),
        (500, "-t ext4 -b 1024 -O ^sparse_super,^resize_inode"),
        (1024, "-t ext4 -O bigalloc -C 65536"),
        (500, "-t ext4 -b 1024 -O bigalloc -C 16384"),
        (500, "-t ext4 -g 8192"),
        (333, "-t ext4 -b 1024 -g 1024 -G 4"),
        (500, "-t ext4 -E desc_size=128"),
        (500, "-t ext4 -O mmp,encrypt,casefold,verity,ea_inode,large_dir,inline_data,quota,project,metadata_csum_seed"),
        (500, "-t ext4 -E lazy_itable_init=0,packed_meta_blocks=1"),
    ] {
        garbage_in_free_blocks_harms_nothing(size_mib * MIB + 12_288, options);
    }
}

#[test]
fn ext2_and_ext3() {
    if !have("ext2_and_ext3", &TOOLS) {
        return;
    }
    for options in [
        "-t ext2",
        "-t ext3",
        "-t ext2 -b 1024",
        "-t ext2 -b 4096 -O ^sparse_super,^resize_inode",
        "-t ext2 -r 0 -b 2048",
    ] {
        garbage_in_free_blocks_harms_nothing(200 * MIB, options);
    }
    assert!(make(40 * MIB, "-t ext2", 3).layout().volumes[0].name().starts_with("whole disk: ext2 'the root'"));
    assert_eq!(make(40 * MIB, "-t ext3", 3).layout().volumes[0].contents, Some("ext3"));
}

#[test]
fn what_is_not_clean_is_left_alone() {
    if !have("what_is_not_clean_is_left_alone", &TOOLS) {
        return;
    }
    let why = |scratch: &Scratch| scratch.layout().volumes[0].free_bytes.clone().unwrap_err().why;
    for (options, commands, expected) in [
        ("-t ext4", "feature needs_recovery", ReasonKind::Dirty),
        ("-t ext2", "ssv state 0", ReasonKind::Dirty),
        ("-t ext4", "ssv state 3", ReasonKind::Dirty),
        ("-t ext4", "ssv error_count 4", ReasonKind::Dirty),
        ("-t ext4 -O fast_commit", "ssv wtime now", ReasonKind::Unsupported),
        ("-t ext4", "ssv journal_dev 0x803", ReasonKind::Unsupported),
        ("-t ext4", "ssv feature_incompat 0x1002c2", ReasonKind::Unsupported),
        ("-t ext4", "ssv feature_ro_compat 0x80046b", ReasonKind::Unsupported),
        ("-t ext4", "set_bg 0 free_blocks_count 77", ReasonKind::Damaged),
        ("-t ext4 -O ^metadata_csum,uninit_bg", "set_bg 0 free_blocks_count 77", ReasonKind::Damaged),
        ("-t ext4 -O ^metadata_csum,^uninit_bg", "set_bg 0 free_blocks_count 77", ReasonKind::Damaged),
    ] {
        let scratch = make(100 * MIB, options, 6);
        assert!(scratch.layout().volumes[0].free_bytes.is_ok() || options.contains("fast_commit"), "{options}");
        fs::write(scratch.path("commands"), format!("{commands}\n")).unwrap();
        scratch.run("debugfs -w -f DIR/commands IMAGE");
        assert_eq!(why(&scratch), expected, "{options}: {commands}");
    }
    let scratch = Scratch::new(40 * MIB);
    scratch.run("mke2fs -q -F -O journal_dev IMAGE");
    assert_eq!(why(&scratch), ReasonKind::Unsupported);
}

#[test]
fn metadata_inside_an_uninitialised_group_is_in_use() {
    if !have("metadata_inside_an_uninitialised_group_is_in_use", &TOOLS) {
        return;
    }
    // Without flex_bg each group holds its own bitmaps and table, in groups without a bitmap too.
    let scratch = make(900 * MIB, "-t ext4 -O ^flex_bg,^has_journal", 3);
    let text = scratch.run("dumpe2fs IMAGE");
    assert!(text.contains("BLOCK_UNINIT"), "{text}");
    assert_eq!(free_of(&scratch.disk(), &scratch.layout().volumes[0]).unwrap(), free_by_dumpe2fs(&scratch));
}

#[test]
fn no_damaged_byte_frees_a_used_block() {
    if !have("no_damaged_byte_frees_a_used_block", &TOOLS) {
        return;
    }
    for (options, strict) in [
        ("-t ext4 -b 1024 -O ^has_journal,metadata_csum -N 16", true),
        ("-t ext4 -b 1024 -O ^has_journal,metadata_csum,^flex_bg,^64bit -N 16 -g 1024", true),
        ("-t ext4 -b 1024 -O ^has_journal,^metadata_csum,uninit_bg -N 16", false),
        ("-t ext2 -b 1024 -N 16", false),
    ] {
        let scratch = Scratch::new(2 * MIB);
        scratch.run(&format!("mke2fs -q -F {options} IMAGE"));
        let free = free_of(&scratch.disk(), &scratch.layout().volumes[0]).unwrap();
        let text = scratch.run("dumpe2fs IMAGE");
        let bitmap = text.lines().find_map(|line| line.strip_prefix("  Block bitmap at ")).unwrap();
        let bitmap: usize = bitmap.split_whitespace().next().unwrap().parse().unwrap();
        let places = [1024..2048, 2048..2048 + 256, bitmap * 1024..(bitmap + 1) * 1024];
        let refused = damage_each_byte(scratch.bytes(), &places, &free, strict);
        assert!(refused > 500, "{options}: {refused}");
    }
}
