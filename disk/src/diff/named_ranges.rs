//! Ranges of a disk that the caller names: those that were written since some moment.

use super::change::{ChangeKind, Changes, EachChange, RangeJoiner};
use crate::{DiskError, Opened, Progress, Result, copying::copy::damage_of, error::from_io};
use diskwright_store::{Extent, ExtentKind};
use std::{ops::Range, path::Path};

/// Length of the pieces in which extents are read, so that the list stays small.
const PIECE_BYTES: u64 = 64 << 20;

/// The changes of a disk whose ranges are known, but not what the disk has there: its tables say
/// that. Ranges beyond the end of the disk are left out.
#[derive(Debug)]
pub struct NamedRanges<'a, I> {
    disk: &'a Opened,
    path: &'a Path,
    ranges: I,
}

impl<'a, I: Iterator<Item = Range<u64>>> NamedRanges<'a, I> {
    /// The changes of `disk` in `ranges`, which ascend and do not overlap. Errors name `path`.
    pub fn new(disk: &'a Opened, path: &'a Path, ranges: I) -> Self {
        Self { disk, path, ranges }
    }

    fn damage(&self, extent: &Extent) -> DiskError {
        match self.disk.disk() {
            Some(disk) => damage_of(disk, extent),
            None => DiskError::BadChain { path: self.path.to_owned(), what: "a range of the export is damaged".into() },
        }
    }
}

impl<I: Iterator<Item = Range<u64>>> Changes for NamedRanges<'_, I> {
    fn for_each(&mut self, progress: &mut Progress<'_>, each: &mut EachChange<'_>) -> Result<()> {
        let device = self.disk.device();
        let geometry = device.geometry();
        let size_bytes = geometry.size_bytes;
        let mut joiner = RangeJoiner::new(u64::from(geometry.logical_sector_bytes));
        let mut extents = Vec::new();
        while let Some(range) = self.ranges.next() {
            let sector_bytes = u64::from(geometry.logical_sector_bytes);
            let mut at = range.start - range.start % sector_bytes;
            let end = range.end.min(size_bytes);
            while at < end {
                if !progress(at, size_bytes) {
                    return Err(DiskError::Stopped);
                }
                let stop = (at.saturating_add(PIECE_BYTES)).min(end);
                extents.clear();
                let found = device.extents(at, stop - at, &mut extents);
                found.map_err(|error| from_io("read its tables", self.path, error))?;
                for extent in &extents {
                    let kind = match extent.kind {
                        ExtentKind::Data => ChangeKind::Data,
                        ExtentKind::Zero | ExtentKind::Unallocated => ChangeKind::Zeros,
                        ExtentKind::Damaged => return Err(self.damage(extent)),
                    };
                    let range = extent.offset_bytes..extent.offset_bytes + extent.len_bytes;
                    joiner.add((range, kind), size_bytes, progress, each)?;
                }
                at = stop;
            }
        }
        joiner.finish(progress, each)
    }
}
