//! What is known of the blocks of an open object, for look-ups without a lock and without I/O.
//!
//! A block is known once its checksums are in memory. It stays known: the checksums of a version
//! never change. Whether the cache still has the bytes shows when they are read and compared.
//!
//! The table has two levels, and the second one is made where a block becomes known. So an object
//! of terabytes costs memory only for what is read of it: 1 KiB for each MiB.

use crate::cache::map::Sums;
use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering},
};

const LEAF: u64 = 1024;

/// What is known of one block.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) sums: Sums,
    /// It was used since this was last asked.
    used: AtomicBool,
    /// It was read ahead, and not used yet.
    is_ahead: AtomicBool,
}

impl Block {
    /// Says that it is used. Returns whether this is the first use of a block that was read ahead.
    #[inline]
    pub(crate) fn use_it(&self) -> bool {
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
        self.is_ahead.load(Ordering::Relaxed) && self.is_ahead.swap(false, Ordering::Relaxed)
    }
}

type Leaf = Box<[OnceLock<Block>]>;

/// The blocks of an object; see the module documentation.
#[derive(Debug)]
pub(crate) struct Blocks {
    leaves: Box<[OnceLock<Leaf>]>,
}

impl Blocks {
    /// A table for so many blocks, of which none is known.
    pub(crate) fn new(count: u64) -> Self {
        Self { leaves: (0..count.div_ceil(LEAF)).map(|_| OnceLock::new()).collect() }
    }

    /// A block, if it is known.
    #[inline]
    pub(crate) fn get(&self, block: u64) -> Option<&Block> {
        self.leaves.get((block / LEAF) as usize)?.get()?.get((block % LEAF) as usize)?.get()
    }

    /// Makes a block known.
    pub(crate) fn set(&self, block: u64, sums: Sums, is_ahead: bool) {
        let Some(leaf) = self.leaves.get((block / LEAF) as usize) else { return };
        let leaf = leaf.get_or_init(|| (0..LEAF).map(|_| OnceLock::new()).collect());
        leaf[(block % LEAF) as usize].get_or_init(|| Block {
            sums,
            used: AtomicBool::new(false),
            is_ahead: AtomicBool::new(is_ahead),
        });
    }

    /// The blocks that were used since this was last called.
    pub(crate) fn take_used(&self) -> Vec<u64> {
        let known = (0..).zip(&self.leaves).filter_map(|(at, leaf)| Some((at * LEAF, leaf.get()?)));
        let blocks =
            known.flat_map(|(first, leaf)| (first..).zip(leaf).filter_map(|(at, block)| Some((at, block.get()?))));
        blocks.filter(|(_, block)| block.used.swap(false, Ordering::Relaxed)).map(|(at, _)| at).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::map::SUMS;

    #[test]
    fn a_block_is_known_once_it_was_set_and_its_use_is_reported_once() {
        let blocks = Blocks::new(3000);
        let sums = |first| {
            let mut sums = Box::new([0; SUMS]);
            sums[0] = first;
            sums
        };
        assert!(blocks.get(2999).is_none() && blocks.get(3000).is_none() && blocks.get(u64::MAX).is_none());
        blocks.set(2999, sums(7), true);
        blocks.set(5, sums(8), false);
        blocks.set(5, sums(9), true);
        assert_eq!((blocks.get(2999).unwrap().sums[0], blocks.get(5).unwrap().sums[0]), (7, 8));
        assert!(blocks.get(6).is_none());
        assert!(blocks.take_used().is_empty());
        assert!(blocks.get(2999).unwrap().use_it() && !blocks.get(2999).unwrap().use_it());
        assert!(!blocks.get(5).unwrap().use_it());
        assert_eq!((blocks.take_used(), blocks.take_used()), (vec![5, 2999], vec![]));
    }
}
