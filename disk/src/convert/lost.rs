//! What a conversion could not copy: ranges of the disk whose table is damaged, joined where they
//! touch.
//!
//! A hostile table can have tens of millions of such ranges. So many are listed that a user can
//! work with, and what goes beyond is counted.

use crate::{Disk, DiskError};
use diskwright_store::Extent;
use std::collections::BTreeMap;

/// Most ranges that are listed.
const RANGES_MAX: usize = 4096;

/// A range of the disk that was lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostRange {
    /// First byte of the disk.
    pub offset_bytes: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// What is wrong with the first block of it: file, structure, what was found and what was
    /// expected.
    pub reason: String,
}

/// All that was lost.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lost {
    /// In order of offset, the first 4,096 or so of them.
    pub ranges: Vec<LostRange>,
    /// Bytes of all ranges together.
    pub bytes: u64,
    /// Bytes of the ranges that are not listed.
    pub unlisted_bytes: u64,
}

/// The list in the making. Ranges come in any order and never overlap.
#[derive(Debug, Default)]
pub(super) struct Tally {
    /// By first byte: length and reason.
    ranges: BTreeMap<u64, (u64, String)>,
    bytes: u64,
    unlisted_bytes: u64,
}

impl Tally {
    /// Adds a range.
    pub(super) fn add(&mut self, offset_bytes: u64, len_bytes: u64, reason: impl FnOnce() -> String) {
        self.bytes += len_bytes;
        let end_bytes = offset_bytes + len_bytes;
        let before = self.ranges.range(..offset_bytes).next_back();
        let before = before.filter(|(start, (len, _))| *start + len == offset_bytes).map(|(&start, _)| start);
        if before.is_none() && !self.ranges.contains_key(&end_bytes) && self.ranges.len() >= RANGES_MAX {
            self.unlisted_bytes += len_bytes;
            return;
        }
        let behind_bytes = self.ranges.remove(&end_bytes).map_or(0, |(len, _)| len);
        let all_bytes = len_bytes + behind_bytes;
        match before.and_then(|start| self.ranges.get_mut(&start)) {
            Some((len, _)) => *len += all_bytes,
            None => drop(self.ranges.insert(offset_bytes, (all_bytes, reason()))),
        }
    }

    /// The list.
    pub(super) fn finish(self) -> Lost {
        let range = |(offset_bytes, (len_bytes, reason))| LostRange { offset_bytes, len_bytes, reason };
        Lost {
            ranges: self.ranges.into_iter().map(range).collect(),
            bytes: self.bytes,
            unlisted_bytes: self.unlisted_bytes,
        }
    }
}

/// Why a damaged extent of a disk cannot be read.
pub(super) fn damage_of(disk: &Disk, extent: &Extent) -> DiskError {
    let image = &disk.layers()[extent.depth as usize].image;
    match image.damage(extent.offset_bytes / image.info().block_bytes) {
        Ok(error) | Err(error) => DiskError::Image(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_range_in_whatever_order_they_come() {
        let mut tally = Tally::default();
        for (offset_bytes, len_bytes) in [(20, 10), (0, 10), (50, 5), (10, 10), (30, 1)] {
            tally.add(offset_bytes, len_bytes, || format!("at {offset_bytes}"));
        }
        let lost = tally.finish();
        let range =
            |offset_bytes, len_bytes, reason: &str| LostRange { offset_bytes, len_bytes, reason: reason.into() };
        assert_eq!(lost.ranges, [range(0, 31, "at 0"), range(50, 5, "at 50")]);
        assert_eq!((lost.bytes, lost.unlisted_bytes), (36, 0));
    }

    #[test]
    fn a_long_list_is_cut_and_the_rest_counted() {
        let mut tally = Tally::default();
        let count = RANGES_MAX as u64 + 10;
        (0..count).for_each(|index| tally.add(index * 4, 1, String::new));
        tally.add(1, 1, String::new);
        let lost = tally.finish();
        assert_eq!((lost.ranges.len(), lost.bytes, lost.unlisted_bytes), (RANGES_MAX, count + 1, 10));
        assert_eq!(lost.ranges[0].len_bytes, 2, "a listed range grows all the same");
    }
}
