//! Keys of items, and roots of trees.

use crate::bytes::{get, le64};

/// Length of a key on the disk.
pub(super) const KEY_BYTES: usize = 17;

/// A key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) object: u64,
    pub(super) kind: u8,
    pub(super) offset: u64,
}

impl Key {
    pub(super) fn parse(bytes: &[u8]) -> Self {
        Self { object: le64(bytes, 0), kind: get::<1>(bytes, 8)[0], offset: le64(bytes, 9) }
    }
}

/// The root of a tree.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tree {
    /// Number of the tree, which its blocks carry.
    pub(super) owner: u64,
    /// Logical address of the root.
    pub(super) block: u64,
    pub(super) level: u8,
    pub(super) generation: u64,
}
