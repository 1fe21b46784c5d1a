//! Units: the 64 KiB pieces of a block. A block may be in the cache in part, and the cache records
//! which units of it were read.
//!
//! A block of which nothing is there is fetched as a whole, because one GET of 1 MiB costs hardly
//! more than one of 64 KiB. But a boot reads a little of many blocks. If its ranges are known from
//! another machine, only their units are fetched.

use crate::BLOCK_BYTES;
use std::ops::Range;

/// Bytes of a unit.
pub(crate) const UNIT_BYTES: u64 = 64 << 10;
const UNITS: u64 = BLOCK_BYTES / UNIT_BYTES;

/// A set of units of one block.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Units(u16);

impl Units {
    pub(crate) const fn of_bits(bits: u16) -> Self {
        Self(bits)
    }

    pub(crate) const fn bits(self) -> u16 {
        self.0
    }

    /// The units in which a range of the block lies, in bytes. What is behind the block is cut off.
    #[inline]
    pub(crate) fn of(range: Range<u64>) -> Self {
        let below = |unit: u64| (1_u32 << unit.min(UNITS)) - 1;
        let (first, end) = (range.start / UNIT_BYTES, range.end.div_ceil(UNIT_BYTES));
        Self(if first < end { (below(end) & !below(first)) as u16 } else { 0 })
    }

    /// All units of a block of this length.
    pub(crate) fn all_of(len_bytes: usize) -> Self {
        Self::of(0..len_bytes as u64)
    }

    #[inline]
    pub(crate) const fn is_empty(self) -> bool {
        self.0 == 0
    }

    #[inline]
    pub(crate) const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    #[inline]
    pub(crate) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(crate) const fn within(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub(crate) const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Runs of units that follow each other, in bytes of the block.
    pub(crate) fn runs(self) -> impl Iterator<Item = Range<u64>> {
        let mut rest = u32::from(self.0);
        std::iter::from_fn(move || {
            if rest == 0 {
                return None;
            }
            let start = rest.trailing_zeros();
            let len = (rest >> start).trailing_ones();
            rest &= !(((1 << len) - 1) << start);
            Some(u64::from(start) * UNIT_BYTES..u64::from(start + len) * UNIT_BYTES)
        })
    }

    /// What has to be fetched for the first of the wanted runs that is not all there: the bytes
    /// from its first missing unit to its last one.
    pub(crate) fn missing(wanted: Self, there: Self) -> Option<Range<u64>> {
        wanted.runs().find_map(|run| {
            let mut missing = Self::of(run).without(there).runs();
            let first = missing.next()?;
            Some(first.start..missing.last().map_or(first.end, |last| last.end))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const UNIT: u64 = UNIT_BYTES;

    #[test]
    fn ranges_become_units() {
        assert_eq!(Units::of(0..0), Units::default());
        assert_eq!(Units::of(0..1).bits(), 1);
        assert_eq!(Units::of(UNIT - 1..UNIT + 1).bits(), 3);
        assert_eq!(Units::of(0..BLOCK_BYTES).bits(), u16::MAX);
        assert_eq!(Units::of(15 * UNIT..BLOCK_BYTES * 3).bits(), 1 << 15);
        assert_eq!(Units::all_of(70_000).bits(), 3);
    }

    #[test]
    fn what_is_missing_of_the_first_run_is_one_range() {
        let units = Units::of_bits;
        assert_eq!(Units::missing(units(0b0110), units(0)), Some(UNIT..3 * UNIT));
        assert_eq!(Units::missing(units(0b1101), units(0b1)), Some(2 * UNIT..4 * UNIT));
        // What is there in between comes again.
        assert_eq!(Units::missing(units(0b1111), units(0b0101)), Some(UNIT..4 * UNIT));
        assert_eq!(Units::missing(units(0b1111), units(u16::MAX)), None);
        assert_eq!(Units::missing(units(u16::MAX), units(0)), Some(0..BLOCK_BYTES));
    }

    proptest! {
        #[test]
        fn runs_are_the_units(bits: u16) {
            let units = Units::of_bits(bits);
            let again = units.runs().fold(Units::default(), |sum, run| sum.and(Units::of(run)));
            prop_assert_eq!(again, units);
        }

        /// Fetching what is missing, again and again, ends with all that is wanted.
        #[test]
        fn what_is_missing_is_brought_run_by_run(wanted: u16, there: u16) {
            let (wanted, mut there) = (Units::of_bits(wanted), Units::of_bits(there));
            for _ in 0..UNITS {
                let Some(range) = Units::missing(wanted, there) else { break };
                let fetched = Units::of(range);
                prop_assert!(!fetched.without(there).is_empty());
                there = there.and(fetched);
            }
            prop_assert!(there.has(wanted));
        }
    }
}
