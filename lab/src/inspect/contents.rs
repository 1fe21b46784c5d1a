//! Inspects the contents of a target: how much of the working set is allocated, and how much of a
//! sample is zeros or copies.
//!
//! Reads of unallocated blocks are answered from metadata. A device may answer reads of zeros
//! without touching its media, and a deduplicating layer answers reads of copies from its cache.
//! All three make a disk look faster than it is, by up to a factor of twenty (the paper on SQLIO
//! and dynamic disks). So before a run the extents of the working set are added up, and 256 blocks,
//! drawn with the job's seed, are read.
//!
//! Limits: extents show only the layers that Diskwright knows. A thin volume or an SSD below may
//! have unallocated blocks too; these show only as zeros. A sample of 256 blocks finds a share of 1
//! % with a probability of 92 %.

use crate::{LabError, Result, fill};
use diskwright_load::LoadError;
use diskwright_load::record::ContentsRecord;
use diskwright_store::{BlockDevice, Blocking, EngineKind, ExtentKind};
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use std::{
    collections::{BTreeSet, HashMap},
    ops::Range,
};

/// Blocks in a sample.
pub const SAMPLES: usize = 256;
/// Bytes of each sampled block; more if the sector is larger.
pub const SAMPLE_BYTES: u64 = 4096;

/// Inspects `ranges` of a device.
///
/// # Errors
/// [`LoadError::Queue`] if extents cannot be reported, [`LabError::Request`] if a sampled block
/// cannot be read.
pub fn contents_of(
    name: &str,
    device: &dyn BlockDevice,
    ranges: &[Range<u64>],
    seed: u64,
    engine: EngineKind,
) -> Result<ContentsRecord> {
    let total_bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    let mut data_bytes = 0;
    fill::for_extents(name, device, ranges, &mut |extent| {
        if extent.kind == ExtentKind::Data {
            data_bytes += extent.len_bytes;
        }
    })?;
    let sampled = sample(name, device, ranges, seed, engine)?;
    let share = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
    Ok(ContentsRecord {
        allocated: share(data_bytes, total_bytes),
        zero: share(sampled.zero, sampled.blocks),
        repeated: share(sampled.repeated, sampled.blocks),
        sampled: sampled.blocks,
        filled_bytes: 0,
    })
}

#[derive(Default)]
struct Sampled {
    blocks: u64,
    zero: u64,
    repeated: u64,
}

fn sample(
    name: &str,
    device: &dyn BlockDevice,
    ranges: &[Range<u64>],
    seed: u64,
    engine: EngineKind,
) -> Result<Sampled> {
    let block_bytes = SAMPLE_BYTES.max(u64::from(device.geometry().logical_sector_bytes));
    let offsets = draw(ranges, block_bytes, seed);
    let mut hand = Blocking::open(device, engine).map_err(|source| LoadError::Queue {
        target: name.to_owned(),
        doing: "open a queue".into(),
        source,
    })?;
    let mut sampled = Sampled::default();
    let mut seen: HashMap<Vec<u8>, u64> = HashMap::new();
    for offset_bytes in offsets {
        let mut block = vec![0; block_bytes as usize];
        hand.read(offset_bytes, &mut block).map_err(|source| LabError::Request {
            target: name.to_owned(),
            operation: diskwright_store::Operation::Read,
            offset_bytes,
            len_bytes: block_bytes,
            completed: sampled.blocks,
            source,
        })?;
        sampled.blocks += 1;
        if diskwright_store::all_zero(&block) {
            sampled.zero += 1;
        } else {
            *seen.entry(block).or_insert(0) += 1;
        }
    }
    sampled.repeated = seen.values().filter(|count| **count > 1).sum();
    Ok(sampled)
}

/// Offsets of the sampled blocks, ascending: all blocks if they are few, else [`SAMPLES`] drawn
/// with `seed`.
fn draw(ranges: &[Range<u64>], block_bytes: u64, seed: u64) -> BTreeSet<u64> {
    let whole: Vec<Range<u64>> = ranges
        .iter()
        .map(|range| range.start.div_ceil(block_bytes)..range.end / block_bytes)
        .filter(|blocks| !blocks.is_empty())
        .collect();
    let total: u64 = whole.iter().map(|blocks| blocks.end - blocks.start).sum();
    let offset_of = |mut number: u64| {
        for blocks in &whole {
            let len = blocks.end - blocks.start;
            if number < len {
                return (blocks.start + number) * block_bytes;
            }
            number -= len;
        }
        0
    };
    if total <= SAMPLES as u64 {
        return (0..total).map(offset_of).collect();
    }
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut offsets = BTreeSet::new();
    while offsets.len() < SAMPLES {
        offsets.insert(offset_of(rng.next_u64() % total));
    }
    offsets
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_load::data;
    use diskwright_store::{CacheMode, RawDevice};
    use proptest::prelude::*;
    use std::{fs::File, slice};

    fn raw(len_bytes: u64) -> (tempfile::TempDir, RawDevice) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.raw");
        File::create(&path).unwrap().set_len(len_bytes).unwrap();
        let device = RawDevice::open(&path, true, CacheMode::PageCache).unwrap();
        (dir, device)
    }

    fn fill(device: &RawDevice, range: Range<u64>, make: &mut fill::MakeContents<'_>) {
        fill::fill_ranges("disk", device, slice::from_ref(&range), EngineKind::Auto, make, &mut |_| Ok(())).unwrap();
    }

    fn look_at(device: &RawDevice, range: Range<u64>) -> ContentsRecord {
        contents_of("disk", device, slice::from_ref(&range), 1, EngineKind::Auto).unwrap()
    }

    #[test]
    fn a_sparse_file_a_filled_one_and_a_half_filled_one_are_reported_apart() {
        let (_dir, device) = raw(16 << 20);
        let sparse = look_at(&device, 0..16 << 20);
        assert_eq!((sparse.allocated, sparse.zero, sparse.sampled), (0.0, 1.0, SAMPLES as u64));
        fill(&device, 0..8 << 20, &mut |offset, buf| data::fill(1, offset, buf));
        let half = look_at(&device, 0..16 << 20);
        assert_eq!(half.allocated, 0.5);
        assert!((0.4..0.6).contains(&half.zero) && half.repeated == 0.0, "{half:?}");
        let filled = look_at(&device, 0..8 << 20);
        assert_eq!((filled.allocated, filled.zero, filled.repeated), (1.0, 0.0, 0.0));
    }

    #[test]
    fn written_zeros_and_copies_are_seen_though_they_are_allocated() {
        let (_dir, device) = raw(8 << 20);
        fill(&device, 0..4 << 20, &mut |_, buf| buf.fill(0));
        let zeros = look_at(&device, 0..4 << 20);
        assert_eq!((zeros.allocated, zeros.zero, zeros.repeated), (1.0, 1.0, 0.0));
        fill(&device, 4 << 20..8 << 20, &mut |_, buf| buf.fill(7));
        let copies = look_at(&device, 4 << 20..8 << 20);
        assert_eq!((copies.allocated, copies.zero, copies.repeated), (1.0, 0.0, 1.0));
    }

    #[test]
    fn the_same_seed_draws_the_same_blocks() {
        let ranges = [0..1 << 30, 5 << 30..6 << 30];
        assert_eq!(draw(&ranges, 4096, 3), draw(&ranges, 4096, 3));
        assert_ne!(draw(&ranges, 4096, 3), draw(&ranges, 4096, 4));
    }

    proptest! {
        #[test]
        fn samples_lie_within_the_ranges(start in 0_u64..1 << 20, len in 0_u64..1 << 24, gap in 0_u64..1 << 20, seed: u64) {
            let ranges = [start..start + len, start + len + gap..start + 2 * len + gap];
            let drawn = draw(&ranges, 4096, seed);
            prop_assert!(drawn.len() <= SAMPLES);
            for offset in drawn {
                prop_assert!(offset % 4096 == 0);
                prop_assert!(ranges.iter().any(|range| range.start <= offset && offset + 4096 <= range.end));
            }
        }
    }
}
