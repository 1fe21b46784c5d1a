//! Random disks: blocks with data, with zeros, in part and not at all, written in any order.

use crate::lab::{MIB, blocks_with_space, compacted, read_all, writable};
use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
use diskwright_image::{DiskType, Format};
use diskwright_store::{Blocking, EngineKind};
use proptest::prelude::*;
use std::path::Path;

const BLOCKS: u64 = 14;

/// What is done to a block.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// Bytes that are not 0, from an eighth of the block on, this many eighths.
    Data(u64, u64),
    /// The same with zeros that are written.
    Zeros(u64, u64),
    Discard,
    /// Later steps use the space that earlier ones have freed.
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<(u64, Step)>> {
    let eighths = || (0u64..8, 1u64..=8).prop_map(|(first, count)| (first, count.min(8 - first)));
    let step = prop_oneof![
        4 => eighths().prop_map(|(first, count)| Step::Data(first, count)),
        2 => Just(Step::Data(0, 8)),
        2 => eighths().prop_map(|(first, count)| Step::Zeros(first, count)),
        3 => Just(Step::Zeros(0, 8)),
        2 => Just(Step::Discard),
        1 => Just(Step::Reopen),
    ];
    prop::collection::vec((0..BLOCKS, step), 0..40)
}

/// Carries the steps out on the disk and on the model. The last block lies half beyond the end.
fn play(path: &Path, block_bytes: u64, model: &mut [u8], steps: &[(u64, Step)]) {
    let open = || Disk::open(path, &writable()).unwrap();
    let mut disk = open();
    let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
    for (number, &(block, step)) in (1u8..).zip(steps) {
        let range = |first: u64, count: u64| {
            let start = block * block_bytes + first * block_bytes / 8;
            let end = (start + count * block_bytes / 8).min(model.len() as u64);
            start.min(end)..end
        };
        let (range, byte) = match step {
            Step::Data(first, count) => (range(first, count), number | 128),
            Step::Zeros(first, count) => (range(first, count), 0),
            Step::Discard => (range(0, 8), 0),
            Step::Reopen => {
                drop(io);
                disk.close().unwrap();
                drop(disk);
                disk = open();
                io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
                continue;
            }
        };
        if range.is_empty() {
            continue;
        }
        let (start, len) = (range.start, range.end - range.start);
        match step {
            Step::Discard => io.discard(start, len).unwrap(),
            _ => io.write(start, &vec![byte; len as usize], false).unwrap(),
        }
        model[range.start as usize..range.end as usize].fill(byte);
    }
    drop(io);
    disk.close().unwrap();
}

fn run(format: Format, block_bytes: u64, parent_steps: Option<&[(u64, Step)]>, steps: &[(u64, Step)]) {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap_or_else(|_| tempfile::tempdir().unwrap());
    let (base, top) = (dir.path().join(format!("base.{format}")), dir.path().join(format!("top.{format}")));
    let size_bytes = BLOCKS * block_bytes - block_bytes / 2;
    let mut model = vec![0; size_bytes as usize];
    let request = CreateRequest {
        size_bytes: Some(size_bytes),
        block_bytes: Some(block_bytes as u32),
        disk_type: Some(DiskType::Dynamic),
        ..CreateRequest::default()
    };
    let mut below = None;
    if let Some(parent_steps) = parent_steps {
        create(&base, &request).unwrap();
        play(&base, block_bytes, &mut model, parent_steps);
        let parent = Some(base.clone());
        let child = CreateRequest { parent, disk_type: None, size_bytes: None, ..request };
        create(&top, &child).unwrap();
        below = Some(model.clone());
    } else {
        create(&top, &request).unwrap();
    }
    play(&top, block_bytes, &mut model, steps);
    let facts = || {
        let disk = Disk::open(&top, &OpenOptions::default()).unwrap();
        (disk.layers()[0].image.info().linkage_id, blocks_with_space(&disk))
    };
    let before = facts();
    assert!(read_all(&top) == model);
    let done = compacted(&top);
    let after = facts();
    assert!(read_all(&top) == model, "the contents have changed");
    assert_eq!(before.0, after.0, "the contents did not change, so the identity must not");
    assert_eq!(done.zero_bytes, (before.1 - after.1) * block_bytes);
    assert_eq!(done.free_bytes, 0);
    // No block that reads as zeros has space, unless it hides its parent's data in a VHD.
    let is_zero = |bytes: &[u8]| bytes.iter().all(|&byte| byte == 0);
    let mut needed = 0;
    for block in 0..BLOCKS as usize {
        let range = block * block_bytes as usize..((block + 1) * block_bytes as usize).min(size_bytes as usize);
        let hides = format == Format::Vhd && below.as_ref().is_some_and(|below| !is_zero(&below[range.clone()]));
        needed += u64::from(!is_zero(&model[range]) || hides);
    }
    assert!(after.1 <= needed, "{} blocks have space, and {needed} need it", after.1);
    // The disk can be used as before.
    play(&top, block_bytes, &mut model, &[(2, Step::Data(1, 3)), (5, Step::Discard), (7, Step::Zeros(0, 8))]);
    assert!(read_all(&top) == model);
    compacted(&top);
    assert!(read_all(&top) == model);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn vhd(steps in steps()) {
        run(Format::Vhd, 64 << 10, None, &steps);
    }

    #[test]
    fn vhdx(steps in steps()) {
        run(Format::Vhdx, MIB, None, &steps);
    }

    #[test]
    fn vhd_with_a_parent(below in steps(), steps in steps()) {
        run(Format::Vhd, 64 << 10, Some(&below), &steps);
    }

    #[test]
    fn vhdx_with_a_parent(below in steps(), steps in steps()) {
        run(Format::Vhdx, MIB, Some(&below), &steps);
    }
}
