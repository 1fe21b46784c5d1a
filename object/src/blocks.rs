//! What is known of the blocks of an open object, for look-ups without a lock and without I/O.
//!
//! Bytes are known once their checksums are in memory. They stay known: the checksums of a version
//! never change. Whether the cache still has the bytes shows when they are read and compared.
//!
//! A checksum of 0 means that it is not known. The bytes of which the checksum is 0, one in four
//! billion, are read through the fetcher each time.
//!
//! The table has two levels, and the second one is made where a block becomes known. So an object
//! of terabytes costs memory only for what is read of it: 1 KiB for each MiB.

use crate::{
    BLOCK_BYTES, SUM_BYTES,
    cache::map::{SUMS, Sums},
    units::Units,
};
use std::{
    ops::Range,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering},
    },
};

const LEAF: u64 = 1024;

/// What is known of one block.
#[derive(Debug)]
pub(crate) struct Block {
    sums: Box<[AtomicU32; SUMS]>,
    /// Units that were read since this was last asked.
    used: AtomicU16,
    /// It was read ahead, and not used yet.
    is_ahead: AtomicBool,
}

impl Block {
    fn new() -> Self {
        let sums = Box::new([const { AtomicU32::new(0) }; SUMS]);
        Self { sums, used: AtomicU16::new(0), is_ahead: AtomicBool::new(false) }
    }

    fn sums(&self, range: Range<u64>) -> &[AtomicU32] {
        let (first, end) = (range.start / SUM_BYTES, range.end.div_ceil(SUM_BYTES));
        self.sums.get(first as usize..end as usize).unwrap_or_default()
    }

    /// Whether the checksums of a range of the block are known.
    #[inline]
    pub(crate) fn knows(&self, range: Range<u64>) -> bool {
        let sums = self.sums(range);
        !sums.is_empty() && sums.iter().all(|sum| sum.load(Ordering::Relaxed) != 0)
    }

    /// Whether bytes that begin at `offset_bytes` of the block, a multiple of 4096, have the
    /// checksums that are known. Only whole pieces of 4096 bytes can be compared.
    pub(crate) fn is_intact(&self, offset_bytes: u64, bytes: &[u8]) -> bool {
        let sums = self.sums(offset_bytes..offset_bytes + bytes.len() as u64);
        let pieces = bytes.chunks_exact(SUM_BYTES as usize);
        let is_whole = pieces.remainder().is_empty() && pieces.len() == sums.len();
        is_whole
            && pieces.zip(sums).all(|(piece, sum)| {
                let sum = sum.load(Ordering::Relaxed);
                sum != 0 && crc32c::crc32c(piece) == sum
            })
    }

    /// Says that units of it are used. Returns whether this is the first use of a block that was
    /// read ahead.
    #[inline]
    pub(crate) fn use_units(&self, units: Units) -> bool {
        if !Units::of_bits(self.used.load(Ordering::Relaxed)).has(units) {
            self.used.fetch_or(units.bits(), Ordering::Relaxed);
        }
        self.is_ahead.load(Ordering::Relaxed) && self.is_ahead.swap(false, Ordering::Relaxed)
    }
}

type Leaf = Box<[OnceLock<Block>]>;

/// The blocks of an object; see the module documentation.
#[derive(Debug)]
pub(crate) struct Blocks {
    leaves: Box<[OnceLock<Leaf>]>,
    size_bytes: u64,
}

impl Blocks {
    /// A table for an object of this size, of which nothing is known.
    pub(crate) fn new(size_bytes: u64) -> Self {
        let leaves = size_bytes.div_ceil(BLOCK_BYTES).div_ceil(LEAF);
        Self { leaves: (0..leaves).map(|_| OnceLock::new()).collect(), size_bytes }
    }

    /// A block, if something of it is known.
    #[inline]
    pub(crate) fn get(&self, block: u64) -> Option<&Block> {
        self.leaves.get((block / LEAF) as usize)?.get()?.get((block % LEAF) as usize)?.get()
    }

    /// Whether a range of the object, in bytes, is known.
    pub(crate) fn know(&self, range: Range<u64>) -> bool {
        (range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES)).all(|block| {
            let at_bytes = block * BLOCK_BYTES;
            let within = range.start.max(at_bytes) - at_bytes..range.end.min(at_bytes + BLOCK_BYTES) - at_bytes;
            self.get(block).is_some_and(|known| known.knows(within))
        })
    }

    /// Whether all of a block is known.
    pub(crate) fn know_all_of(&self, block: u64) -> bool {
        let start = block * BLOCK_BYTES;
        self.know(start..(start + BLOCK_BYTES).min(self.size_bytes))
    }

    /// Makes the checksums of a block known that are not 0.
    pub(crate) fn set(&self, block: u64, sums: &Sums, is_ahead: bool) {
        let Some(leaf) = self.leaves.get((block / LEAF) as usize) else { return };
        let leaf = leaf.get_or_init(|| (0..LEAF).map(|_| OnceLock::new()).collect());
        let known = leaf[(block % LEAF) as usize].get_or_init(Block::new);
        for (known, sum) in known.sums.iter().zip(sums.iter()).filter(|(_, sum)| **sum != 0) {
            known.store(*sum, Ordering::Relaxed);
        }
        if is_ahead {
            known.is_ahead.store(true, Ordering::Relaxed);
        }
    }

    /// The blocks of which units were used since this was last called.
    pub(crate) fn take_used(&self) -> Vec<(u64, Units)> {
        let known = (0..).zip(&self.leaves).filter_map(|(at, leaf)| Some((at * LEAF, leaf.get()?)));
        let blocks =
            known.flat_map(|(first, leaf)| (first..).zip(leaf).filter_map(|(at, block)| Some((at, block.get()?))));
        let used = blocks.filter(|(_, block)| block.used.load(Ordering::Relaxed) != 0);
        used.map(|(at, block)| (at, Units::of_bits(block.used.swap(0, Ordering::Relaxed)))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::map::sums_of;

    fn sums(first: u32) -> Sums {
        let mut sums = Box::new([0; SUMS]);
        sums[0] = first;
        sums
    }

    #[test]
    fn what_was_set_is_known_and_its_use_is_reported_once() {
        let blocks = Blocks::new(3000 * BLOCK_BYTES);
        assert!(blocks.get(2999).is_none() && blocks.get(3000).is_none() && blocks.get(u64::MAX).is_none());
        blocks.set(2999, &sums(7), true);
        blocks.set(5, &sums(8), false);
        assert!(blocks.know(5 * BLOCK_BYTES..5 * BLOCK_BYTES + 4096));
        assert!(!blocks.know(5 * BLOCK_BYTES..5 * BLOCK_BYTES + 4097) && !blocks.know_all_of(5));
        assert!(blocks.get(6).is_none() && !blocks.know(6 * BLOCK_BYTES - 1..6 * BLOCK_BYTES + 1));
        assert!(blocks.take_used().is_empty());
        let (one, two) = (Units::of(0..1), Units::of(70_000..70_001));
        assert!(blocks.get(2999).unwrap().use_units(one) && !blocks.get(2999).unwrap().use_units(two));
        assert!(!blocks.get(5).unwrap().use_units(two));
        assert_eq!((blocks.take_used(), blocks.take_used()), (vec![(5, two), (2999, one.and(two))], vec![]));
    }

    #[test]
    fn parts_that_come_later_are_added() {
        let blocks = Blocks::new(BLOCK_BYTES + 5000);
        let bytes: Vec<u8> = (0..12_288_u32).map(|at| (at % 251) as u8).collect();
        let (mut first, mut rest) = (sums_of(0, &bytes), sums_of(0, &bytes));
        first[1..].fill(0);
        rest[0] = 0;
        blocks.set(0, &first, false);
        let known = blocks.get(0).unwrap();
        assert!(known.is_intact(0, &bytes[..4096]) && !known.is_intact(0, &bytes) && !known.knows(0..4097));
        assert!(!known.is_intact(4096, &[0; 4096]), "a hole is no proof");
        blocks.set(0, &rest, false);
        assert!(known.is_intact(0, &bytes) && known.is_intact(4096, &bytes[4096..]) && known.knows(0..12_288));
        assert!(!known.is_intact(0, &bytes[..100]) && !known.is_intact(BLOCK_BYTES, &bytes));
        blocks.set(1, &sums_of(0, &bytes[..5000]), false);
        assert!(blocks.know_all_of(1) && !blocks.know_all_of(0));
    }
}
