//! Where two states of one raw disk differ, as their storage has recorded it: a snapshot of an RBD
//! image and a later state of that image.
//!
//! The storage knows what was written or discarded since the older one, whatever was written. So
//! the ranges are those that may differ. Both directions of a difference have the same ranges; the
//! newer of the two states is asked.

use crate::{Layer, Opened, Result, error::file_error};
use diskwright_image::Format;
use diskwright_store::{FileRange, Store};
use std::{ops::Range, sync::Arc};

/// The storage of both states; see the module documentation.
#[derive(Debug)]
pub(super) struct Records {
    newer: Arc<dyn Store>,
    older: Arc<dyn Store>,
}

impl Records {
    /// The records for two disks; `None` if there are none.
    ///
    /// # Errors
    /// [`DiskError::File`](crate::DiskError::File) if the storage cannot be asked.
    pub(super) fn of(first: &Opened, second: &Opened) -> Result<Option<Self>> {
        let (Some(first), Some(second)) = (raw_store(first), raw_store(second)) else { return Ok(None) };
        for (newer, older) in [(&first, &second), (&second, &first)] {
            let records = Self { newer: Arc::clone(newer), older: Arc::clone(older) };
            if records.ask(&(0..0))?.is_some() {
                return Ok(Some(records));
            }
        }
        Ok(None)
    }

    fn ask(&self, range: &Range<u64>) -> Result<Option<Vec<FileRange>>> {
        let range = FileRange { offset_bytes: range.start, len_bytes: range.end - range.start };
        let asked = self.newer.changed_since(&*self.older, range);
        asked.map_err(|source| file_error("ask for its changes", self.newer.name(), source))
    }

    /// The parts of a range that may differ: ascending, and not touching.
    ///
    /// # Errors
    /// [`DiskError::File`](crate::DiskError::File) if the storage cannot be asked.
    pub(super) fn changed(&self, range: &Range<u64>) -> Result<Vec<Range<u64>>> {
        let Some(found) = self.ask(range)? else {
            // A snapshot that was removed meanwhile: everything may differ.
            return Ok(std::iter::once(range.clone()).collect());
        };
        Ok(found.iter().map(|found| found.offset_bytes..found.offset_bytes + found.len_bytes).collect())
    }
}

/// The store of a disk that is one raw image, byte by byte.
fn raw_store(opened: &Opened) -> Option<Arc<dyn Store>> {
    let layers = opened.disk()?.layers();
    let [Layer { image, .. }] = &*layers else { return None };
    let store = image.store();
    // A raw disk in several files has more bytes than the first one.
    let is_whole = store.len_bytes().is_ok_and(|len_bytes| len_bytes == image.size_bytes());
    (image.info().format == Format::Raw && is_whole).then(|| Arc::clone(store))
}

/// The parts of `range` that lie in `ranges`, which are ascending.
pub(super) fn within(ranges: &[Range<u64>], range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
    let first = ranges.partition_point(|found| found.end <= range.start);
    let cut = move |found: &Range<u64>| found.start.max(range.start)..found.end.min(range.end);
    ranges[first..].iter().map(cut).take_while(|found| !found.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_cut_to_a_range() {
        let ranges = [0..4, 8..12, 20..30];
        let cut = |range| within(&ranges, range).collect::<Vec<_>>();
        assert_eq!(cut(0..100), ranges);
        assert_eq!(cut(2..9), [2..4, 8..9]);
        assert_eq!(cut(4..8), []);
        assert_eq!((cut(25..26).len(), cut(25..26)[0].clone()), (1, 25..26));
        assert_eq!(cut(30..40), []);
    }
}
