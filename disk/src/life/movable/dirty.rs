//! Which parts of a disk were written since they were copied: one bit for each granule.
//!
//! A granule is 4 KiB, or larger on a large disk, so that the bits take at most 8 MiB. Writers set
//! bits and the copy takes them, both without a lock. [`Dirty::take`] clears the bits that it
//! returns; the module `movable` says what the copy must do before it reads those ranges.

use diskwright_store::sync::atomic::{AtomicU64, Ordering};
use std::ops::Range;

/// Most bits of one disk.
const BITS_MAX: u64 = 1 << 26;
/// The smallest granule: the largest sector of a disk.
const GRANULE_BYTES_MIN: u64 = 4096;

/// The parts of a disk that were written.
#[derive(Debug)]
pub(crate) struct Dirty {
    granule_bytes: u64,
    size_bytes: u64,
    words: Box<[AtomicU64]>,
}

impl Dirty {
    /// For a disk of `size_bytes`, of which nothing is marked.
    pub(crate) fn new(size_bytes: u64) -> Self {
        let granule_bytes = size_bytes.div_ceil(BITS_MAX).next_power_of_two().max(GRANULE_BYTES_MIN);
        let words = size_bytes.div_ceil(granule_bytes).div_ceil(64);
        Self { granule_bytes, size_bytes, words: (0..words).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Marks a range. The part beyond the end of the disk is ignored.
    pub(crate) fn mark(&self, offset_bytes: u64, len_bytes: u64) {
        let end_bytes = offset_bytes.saturating_add(len_bytes).min(self.size_bytes);
        if offset_bytes >= end_bytes {
            return;
        }
        let (first, last) = (offset_bytes / self.granule_bytes, (end_bytes - 1) / self.granule_bytes);
        for word in first / 64..=last / 64 {
            let low = if word == first / 64 { first % 64 } else { 0 };
            let high = if word == last / 64 { last % 64 } else { 63 };
            let mask = (u64::MAX << low) & (u64::MAX >> (63 - high));
            self.words[word as usize].fetch_or(mask, Ordering::AcqRel);
        }
    }

    /// Clears marked granules from `*cursor` (a word) on and returns their ranges, in order. Stops
    /// at the end of the disk, or when the ranges have at least `enough_bytes`. `*cursor` is where
    /// the next call continues.
    pub(crate) fn take(&self, cursor: &mut usize, enough_bytes: u64) -> Vec<Range<u64>> {
        let mut found: Vec<Range<u64>> = Vec::new();
        let mut found_bytes = 0;
        while *cursor < self.words.len() && found_bytes < enough_bytes {
            let word = &self.words[*cursor];
            // Most words are 0, and a swap would take the cache line from the writers.
            let mut bits = if word.load(Ordering::Acquire) == 0 { 0 } else { word.swap(0, Ordering::AcqRel) };
            while bits != 0 {
                let low = bits.trailing_zeros();
                let count = (bits >> low).trailing_ones();
                let start = (*cursor as u64 * 64 + u64::from(low)) * self.granule_bytes;
                let end = (start + u64::from(count) * self.granule_bytes).min(self.size_bytes);
                found_bytes += end - start;
                match found.last_mut().filter(|last| last.end == start) {
                    Some(last) => last.end = end,
                    None => found.push(start..end),
                }
                bits &= if low + count == 64 { 0 } else { u64::MAX << (low + count) };
            }
            *cursor += 1;
        }
        found
    }

    /// Marked bytes, at least roughly while others mark.
    pub(crate) fn marked_bytes(&self) -> u64 {
        let granules: u64 = self.words.iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum();
        granules * self.granule_bytes
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_granule_grows_with_the_disk() {
        for (size_bytes, granule_bytes) in
            [(512, 4096), (256 << 30, 4096), ((256 << 30) + 512, 8192), (1 << 40, 16 << 10), (64 << 40, 1 << 20)]
        {
            assert_eq!(Dirty { words: Box::default(), ..Dirty::new(size_bytes) }.granule_bytes, granule_bytes);
        }
    }

    proptest! {
        #[test]
        fn what_was_marked_is_taken_once(
            size in 1u64..2000,
            marks in prop::collection::vec((0u64..2100, 0u64..300), 0..20),
            enough in 1u64..(1 << 20),
        ) {
            let size_bytes = size * 512 * 3;
            let dirty = Dirty::new(size_bytes);
            let mut model = vec![false; size_bytes.div_ceil(4096) as usize];
            for (at, len) in marks {
                let (at, len) = (at * 512 * 3, len * 512);
                dirty.mark(at, len);
                for (granule, marked) in (0u64..).zip(&mut model) {
                    let start = granule * 4096;
                    *marked |= len > 0 && at < (start + 4096).min(size_bytes) && at + len > start;
                }
            }
            prop_assert_eq!(dirty.marked_bytes(), model.iter().filter(|marked| **marked).count() as u64 * 4096);
            let (mut cursor, mut taken) = (0, vec![false; model.len()]);
            while cursor < dirty.words.len() {
                for range in dirty.take(&mut cursor, enough) {
                    prop_assert!(range.start < range.end && range.end <= size_bytes);
                    for granule in range.start / 4096..range.end.div_ceil(4096) {
                        prop_assert!(!std::mem::replace(&mut taken[granule as usize], true));
                    }
                }
            }
            prop_assert_eq!(taken, model);
            prop_assert_eq!(dirty.marked_bytes(), 0);
        }
    }
}
