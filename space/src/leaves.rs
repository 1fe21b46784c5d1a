//! An array by the index of a slab, which grows without moving what it has.
//!
//! ```text
//!   index / 1024 + 1 = leaf ─▶ branch = log2(leaf), with 2^branch leaves ─▶ 1024 entries
//! ```
//!
//! A leaf is allocated when one of its entries is first needed, so the array of a large file
//! without contents is small. To look an entry up takes two loads and no lock.

use std::{ops::Range, sync::OnceLock};

/// Number of entries in a leaf.
pub(crate) const LEAF: u64 = 1024;
/// Number of branches.
const BRANCHES: usize = 23;

type Leaf<T> = OnceLock<Box<[T]>>;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Leaves<T> {
    branches: [OnceLock<Box<[Leaf<T>]>>; BRANCHES],
}

impl<T> Default for Leaves<T> {
    fn default() -> Self {
        Self { branches: [const { OnceLock::new() }; BRANCHES] }
    }
}

/// Branch and leaf of an index.
fn place_of(index: u32) -> (usize, usize) {
    let leaf = u64::from(index) / LEAF + 1;
    let branch = leaf.ilog2();
    (branch as usize, (leaf - (1 << branch)) as usize)
}

impl<T: Default> Leaves<T> {
    /// The entry of an index; `None` if none near it was ever needed.
    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        let (branch, leaf) = place_of(index);
        self.branches[branch].get()?[leaf].get()?.get((u64::from(index) % LEAF) as usize)
    }

    /// The entry of an index.
    #[inline]
    pub(crate) fn entry(&self, index: u32) -> &T {
        &self.leaf(index)[(u64::from(index) % LEAF) as usize]
    }

    fn leaf(&self, index: u32) -> &[T] {
        let (branch, leaf) = place_of(index);
        let leaves = self.branches[branch].get_or_init(|| (0..1usize << branch).map(|_| Leaf::new()).collect());
        leaves[leaf].get_or_init(|| (0..LEAF).map(|_| T::default()).collect())
    }

    /// For entries that follow one another.
    pub(crate) fn near(&self, index: u32) -> Near<'_, T> {
        Near { leaves: self, leaf: self.leaf(index), number: u64::from(index) / LEAF }
    }

    /// The entries of a range of indices that were allocated, in order.
    pub(crate) fn existing(&self, range: Range<u64>) -> impl Iterator<Item = (u32, &T)> {
        let mut next = range.start;
        std::iter::from_fn(move || {
            while next < range.end.min(1 << 32) {
                let index = next as u32;
                match self.get(index) {
                    // Nothing in this leaf, and perhaps nothing in its branch.
                    None => {
                        let (branch, _) = place_of(index);
                        let is_empty = self.branches[branch].get().is_none();
                        let next_leaf = if is_empty { (2 << branch) - 1 } else { next / LEAF + 1 };
                        next = next_leaf * LEAF;
                    }
                    Some(entry) => {
                        next += 1;
                        return Some((index, entry));
                    }
                }
            }
            None
        })
    }
}

/// Entries near the last one.
pub(crate) struct Near<'a, T> {
    leaves: &'a Leaves<T>,
    leaf: &'a [T],
    number: u64,
}

impl<'a, T: Default> Near<'a, T> {
    /// The entry of an index.
    #[inline]
    pub(crate) fn entry(&mut self, index: u32) -> &'a T {
        let number = u64::from(index) / LEAF;
        if number != self.number {
            (self.leaf, self.number) = (self.leaves.leaf(index), number);
        }
        &self.leaf[(u64::from(index) % LEAF) as usize]
    }
}
