//! One bit for each grain of a disk, set and looked at without a lock.
//!
//! All accesses are sequentially consistent: `tracker.rs` says why. On x86 a load costs nothing
//! more by that, and a bit that is set already is not written again.

use diskwright_format::tracks::{GrainRun, bitmap_bytes};
use diskwright_store::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::ops::Range;

/// One bit for each grain.
#[derive(Debug)]
pub(crate) struct Bits {
    words: Box<[AtomicU64]>,
    grains: u64,
}

/// The words of a run with the mask of its bits in each. A part beyond `grains` is left out.
fn masks(run: GrainRun, grains: u64) -> impl Iterator<Item = (usize, u64)> {
    let end = run.first.saturating_add(run.count).min(grains);
    let words = if run.first < end { run.first / 64..(end - 1) / 64 + 1 } else { 0..0 };
    words.map(move |word| {
        let low = run.first.saturating_sub(word * 64).min(63);
        let high = (end - 1 - word * 64).min(63);
        (word as usize, (u64::MAX << low) & (u64::MAX >> (63 - high)))
    })
}

impl Bits {
    /// No bit is set.
    pub(crate) fn new(grains: u64) -> Self {
        Self { words: (0..grains.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(), grains }
    }

    /// The bits in a bitmap of the file.
    pub(crate) fn from_bytes(bytes: &[u8], grains: u64) -> Self {
        let bits = Self::new(grains);
        for (word, bytes) in bits.words.iter().zip(bytes.chunks_exact(8)) {
            let mut eight = [0; 8];
            eight.copy_from_slice(bytes);
            word.store(u64::from_le_bytes(eight), SeqCst);
        }
        bits.cut();
        bits
    }

    /// Clears the bits of the last word that stand for no grain.
    fn cut(&self) {
        if let Some(last) = self.words.last()
            && !self.grains.is_multiple_of(64)
        {
            last.fetch_and(u64::MAX >> (64 - self.grains % 64), SeqCst);
        }
    }

    /// Appends the bitmap as it is in the file.
    pub(crate) fn write_to(&self, out: &mut Vec<u8>) {
        out.reserve(bitmap_bytes(self.grains) as usize);
        self.words.iter().for_each(|word| out.extend(word.load(SeqCst).to_le_bytes()));
    }

    /// The same bits for another number of grains.
    pub(crate) fn resized(&self, grains: u64) -> Self {
        let bits = Self::new(grains);
        bits.add(self);
        bits.cut();
        bits
    }

    pub(crate) fn grains(&self) -> u64 {
        self.grains
    }

    /// Sets the bits of a run.
    #[inline]
    pub(crate) fn set(&self, run: GrainRun) {
        for (word, mask) in masks(run, self.grains) {
            if self.words[word].load(SeqCst) & mask != mask {
                self.words[word].fetch_or(mask, SeqCst);
            }
        }
    }

    /// Whether all bits of a run are set.
    #[inline]
    pub(crate) fn holds(&self, run: GrainRun) -> bool {
        masks(run, self.grains).all(|(word, mask)| self.words[word].load(SeqCst) & mask == mask)
    }

    pub(crate) fn fill(&self) {
        self.set(GrainRun { first: 0, count: self.grains });
    }

    /// Sets the bits that are set in `other`.
    pub(crate) fn add(&self, other: &Self) {
        for (word, added) in self.words.iter().zip(&other.words) {
            match added.load(SeqCst) {
                0 => {}
                added => drop(word.fetch_or(added, SeqCst)),
            }
        }
    }

    /// Clears the bits that are not set in `other`.
    pub(crate) fn keep_only(&self, other: &Self) {
        for (word, other) in self.words.iter().zip(&other.words) {
            if word.load(SeqCst) & !other.load(SeqCst) != 0 {
                word.fetch_and(other.load(SeqCst), SeqCst);
            }
        }
    }

    /// Number of bits of a run that are set neither here nor in `other`.
    pub(crate) fn missing_in_both(&self, other: &Self, run: GrainRun) -> u64 {
        let missing = |(word, mask): (usize, u64)| {
            u64::from((mask & !self.words[word].load(SeqCst) & !other.words[word].load(SeqCst)).count_ones())
        };
        masks(run, self.grains).map(missing).sum()
    }

    /// Number of bits that are set here and not in `other`.
    pub(crate) fn more_than(&self, other: &Self) -> u64 {
        let more =
            |(word, other): (&AtomicU64, &AtomicU64)| u64::from((word.load(SeqCst) & !other.load(SeqCst)).count_ones());
        self.words.iter().zip(&other.words).map(more).sum()
    }

    /// Adds the bits of these words to `out`.
    pub(crate) fn add_to(&self, out: &mut [u64], words: Range<usize>) {
        let end = words.end.min(self.words.len()).min(out.len());
        let range = words.start.min(end)..end;
        out[range.clone()].iter_mut().zip(&self.words[range]).for_each(|(out, word)| *out |= word.load(SeqCst));
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bits_are_those_of_a_plain_list(
            grains in 1u64..300,
            runs in prop::collection::vec((0u64..320, 0u64..140), 0..8),
            asked in (0u64..320, 0u64..140),
            other_grains in 1u64..300,
        ) {
            let run = |(first, count)| GrainRun { first, count };
            let (bits, mut model) = (Bits::new(grains), vec![false; grains as usize]);
            for &(first, count) in &runs {
                bits.set(run((first, count)));
                (first..(first + count).min(grains)).for_each(|grain| model[grain as usize] = true);
            }
            let inside = asked.0..(asked.0 + asked.1).min(grains);
            prop_assert_eq!(bits.holds(run(asked)), inside.clone().all(|grain| model[grain as usize]));
            let missing = inside.filter(|&grain| !model[grain as usize]).count() as u64;
            prop_assert_eq!(bits.missing_in_both(&Bits::new(grains), run(asked)), missing);
            let set = model.iter().filter(|set| **set).count() as u64;
            prop_assert_eq!(bits.more_than(&Bits::new(grains)), set);
            let mut bytes = Vec::new();
            bits.write_to(&mut bytes);
            prop_assert_eq!(bytes.len() as u64, bitmap_bytes(grains));
            let again = Bits::from_bytes(&bytes, grains);
            prop_assert_eq!((again.more_than(&bits), bits.more_than(&again)), (0, 0));
            let other = bits.resized(other_grains);
            for grain in 0..other_grains {
                let expected = model.get(grain as usize).copied().unwrap_or(false);
                prop_assert_eq!(other.holds(run((grain, 1))), expected);
            }
            again.fill();
            prop_assert_eq!(again.more_than(&Bits::new(grains)), grains);
        }
    }
}
