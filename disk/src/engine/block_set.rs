//! Which blocks a top image has while its parent absorbs it: one bit for each.
//!
//! Pages of bits exist only where a block is left, so the memory depends on the blocks that the
//! image has, not on the disk's size. The disk's mutation lock guards them.

use std::collections::BTreeMap;

/// Bits of a page.
const PAGE_BITS: u64 = 4096;

/// A set of blocks.
#[derive(Debug, Default)]
pub(crate) struct BlockSet {
    pages: BTreeMap<u64, Page>,
    count: u64,
}

#[derive(Debug)]
struct Page {
    words: Box<[u64; (PAGE_BITS / 64) as usize]>,
    count: u64,
}

fn place(block: u64) -> (u64, usize, u64) {
    (block / PAGE_BITS, (block % PAGE_BITS / 64) as usize, 1 << (block % 64))
}

impl BlockSet {
    /// Adds or removes a block.
    pub(crate) fn set(&mut self, block: u64, is_left: bool) {
        if self.contains(block) == is_left {
            return;
        }
        let (number, word, bit) = place(block);
        let page = self.pages.entry(number).or_insert_with(|| Page { words: Box::new([0; 64]), count: 0 });
        page.words[word] ^= bit;
        if is_left {
            (page.count, self.count) = (page.count + 1, self.count + 1);
        } else {
            (page.count, self.count) = (page.count - 1, self.count - 1);
            if page.count == 0 {
                self.pages.remove(&number);
            }
        }
    }

    /// Whether a block is in the set.
    pub(crate) fn contains(&self, block: u64) -> bool {
        let (number, word, bit) = place(block);
        self.pages.get(&number).is_some_and(|page| page.words[word] & bit != 0)
    }

    /// The first block of the set that is not below `block`.
    pub(crate) fn next(&self, block: u64) -> Option<u64> {
        self.pages.range(place(block).0..).find_map(|(number, page)| {
            let first = number * PAGE_BITS;
            (block.max(first)..first + PAGE_BITS).find(|&block| {
                let (_, word, bit) = place(block);
                page.words[word] & bit != 0
            })
        })
    }

    /// Number of blocks in the set.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn it_is_a_set(steps in prop::collection::vec((0u64..3 * PAGE_BITS, any::<bool>()), 1..200)) {
            let (mut left, mut model) = (BlockSet::default(), BTreeSet::new());
            for (block, is_left) in steps {
                left.set(block, is_left);
                if is_left { model.insert(block); } else { model.remove(&block); }
                prop_assert_eq!(left.count(), model.len() as u64);
                prop_assert_eq!(left.contains(block), is_left);
                for from in [0, block, block + 1, PAGE_BITS] {
                    prop_assert_eq!(left.next(from), model.range(from..).next().copied());
                }
            }
            prop_assert!(left.pages.values().all(|page| page.count > 0));
        }
    }
}
