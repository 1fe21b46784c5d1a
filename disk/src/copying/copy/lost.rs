//! The ranges that a conversion could not copy because their table entries are damaged. Adjacent
//! ranges are merged.
//!
//! A hostile table can have tens of millions of such ranges. The list is limited, and further
//! ranges are only counted.

use super::failure::Failure;
use crate::{Disk, DiskError, Opened, error::to_io};
use diskwright_image::ImageError;
use diskwright_store::Extent;
use std::collections::BTreeMap;

/// Maximum number of listed ranges.
const RANGES_MAX: usize = 4096;

/// A range of the disk that could not be copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostRange {
    /// Start on the disk.
    pub offset_bytes: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// The error of the range's first block: file, structure, what was found and what was expected.
    pub reason: String,
}

/// All ranges that could not be copied.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LostRanges {
    /// Sorted by offset; at most about 4,096.
    pub ranges: Vec<LostRange>,
    /// Total length of all ranges.
    pub bytes: u64,
    /// Total length of the ranges that are not listed.
    pub unlisted_bytes: u64,
}

/// Collects lost ranges. They arrive in any order and never overlap.
#[derive(Debug, Default)]
pub(crate) struct LostRangeCollector {
    /// Start to length and reason.
    ranges: BTreeMap<u64, (u64, String)>,
    bytes: u64,
    unlisted_bytes: u64,
}

impl LostRangeCollector {
    pub(crate) fn add(&mut self, offset_bytes: u64, len_bytes: u64, reason: impl FnOnce() -> String) {
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

    pub(crate) fn finish(self) -> LostRanges {
        let range = |(offset_bytes, (len_bytes, reason))| LostRange { offset_bytes, len_bytes, reason };
        LostRanges {
            ranges: self.ranges.into_iter().map(range).collect(),
            bytes: self.bytes,
            unlisted_bytes: self.unlisted_bytes,
        }
    }
}

/// The error of a damaged extent of a disk.
pub(crate) fn damage_of(disk: &Disk, extent: &Extent) -> DiskError {
    let image = &disk.layers()[extent.depth as usize].image;
    match image.damage(extent.offset_bytes / image.info().block_bytes) {
        Ok(error) | Err(error) => DiskError::Image(error),
    }
}

/// The error of a damaged extent of a disk or an export.
pub(crate) fn damage_in(source: &Opened, extent: &Extent) -> DiskError {
    match source.disk() {
        Some(disk) => damage_of(disk, extent),
        None => DiskError::BadOptions {
            what: "a range of the export is damaged".into(),
            hint: "check the disk on its server".into(),
        },
    }
}

/// The failure of a copy that does not skip this damaged extent.
pub(crate) fn damaged_source(source: &Opened, extent: &Extent) -> Failure {
    let end_bytes = extent.offset_bytes + extent.len_bytes;
    let error = match damage_in(source, extent) {
        DiskError::Image(error @ ImageError::Corrupt { .. }) => {
            DiskError::DamagedSource { error, offset_bytes: extent.offset_bytes, end_bytes }
        }
        other => other,
    };
    Failure::Source(extent.offset_bytes..end_bytes, to_io(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_ranges_are_merged_in_any_order() {
        let mut tally = LostRangeCollector::default();
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
    fn a_long_list_is_limited_and_the_rest_counted() {
        let mut tally = LostRangeCollector::default();
        let count = RANGES_MAX as u64 + 10;
        (0..count).for_each(|index| tally.add(index * 4, 1, String::new));
        tally.add(1, 1, String::new);
        let lost = tally.finish();
        assert_eq!((lost.ranges.len(), lost.bytes, lost.unlisted_bytes), (RANGES_MAX, count + 1, 10));
        assert_eq!(lost.ranges[0].len_bytes, 2, "a listed range can still grow");
    }
}
