//! What the last reservation or commit of a block had to wait for, so that a preparation supplies
//! that and no more.
//!
//! Lives inside an image's state mutex. Bounded: with too many blocks all are forgotten, and a
//! block that is asked for again is noted again.

use std::{collections::BTreeMap, ops::Range};

/// Most blocks that are remembered.
const MAX_BLOCKS: usize = 4096;

/// Blocks, and what each lacks.
#[derive(Debug)]
pub(crate) struct Lacks<L>(BTreeMap<u64, L>);

impl<L> Default for Lacks<L> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<L: Copy> Lacks<L> {
    /// Notes what a block lacks.
    pub(crate) fn note(&mut self, block: u64, lack: L) {
        if self.0.len() >= MAX_BLOCKS {
            self.0.clear();
        }
        self.0.insert(block, lack);
    }

    /// What these blocks lack.
    pub(crate) fn of(&self, blocks: Range<u64>) -> Vec<(u64, L)> {
        self.0.range(blocks).map(|(&block, &lack)| (block, lack)).collect()
    }

    /// A block was supplied, or that failed.
    pub(crate) fn supplied(&mut self, block: u64) {
        self.0.remove(&block);
    }
}
