//! Ranges in which a disk differs from its base, and how they are joined.

use crate::{Progress, Result};
use std::ops::Range;

/// What the disk has in a range in which it differs from its base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeKind {
    /// The disk holds data.
    Data,
    /// The disk reads as zeros, and the base may hold data.
    Zeros,
    /// The disk ends before this range, and the base may hold data.
    Beyond,
}

/// A range in which a disk differs from its base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// First byte of the range.
    pub offset_bytes: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// What the disk has there.
    pub kind: ChangeKind,
}

impl Change {
    /// First byte after the range.
    pub fn end_bytes(&self) -> u64 {
        self.offset_bytes + self.len_bytes
    }
}

/// The ranges in which a disk differs from its base: from tables, a comparison, a
/// record of writes. Every byte outside of them is the same in both. Bytes inside may be the same
/// too.
pub trait Changes {
    /// Calls `each` with every range, in ascending order, without overlaps. `progress` counts bytes
    /// of the disk. `each` gets it too, for work that takes long.
    ///
    /// # Errors
    /// If the ranges cannot be found; [`DiskError::Stopped`](crate::DiskError::Stopped) if
    /// `progress` stops it; the first error of `each`.
    fn for_each(&mut self, progress: &mut Progress<'_>, each: &mut EachChange<'_>) -> Result<()>;
}

/// What [`Changes::for_each`] calls with each range.
pub type EachChange<'a> = dyn FnMut(Change, &mut Progress<'_>) -> Result<()> + 'a;

/// Joins neighbours of one kind, and rounds ranges out to whole units. The last range is held until
/// it is certain that no neighbour follows.
#[derive(Debug)]
pub(super) struct RangeJoiner {
    unit_bytes: u64,
    held: Option<Change>,
}

impl RangeJoiner {
    pub(super) fn new(unit_bytes: u64) -> Self {
        Self { unit_bytes, held: None }
    }

    /// Adds a range that begins at or after the end of the last one, and ends at or before
    /// `limit_bytes`. Where two kinds share a unit, the unit is data.
    pub(super) fn add(
        &mut self,
        (range, kind): (Range<u64>, ChangeKind),
        limit_bytes: u64,
        progress: &mut Progress<'_>,
        each: &mut EachChange<'_>,
    ) -> Result<()> {
        let mut start = range.start - range.start % self.unit_bytes;
        let end = range.end.next_multiple_of(self.unit_bytes).min(limit_bytes);
        if let Some(held) = &mut self.held {
            let held_end = held.end_bytes();
            if held.kind == kind && start <= held_end {
                held.len_bytes = end.max(held_end) - held.offset_bytes;
                return Ok(());
            }
            if start < held_end {
                match kind {
                    ChangeKind::Data => held.len_bytes = start - held.offset_bytes,
                    ChangeKind::Zeros | ChangeKind::Beyond => start = held_end,
                }
            }
            if held.len_bytes > 0 {
                each(*held, progress)?;
            }
            self.held = None;
        }
        if start < end {
            self.held = Some(Change { offset_bytes: start, len_bytes: end - start, kind });
        }
        Ok(())
    }

    /// Hands out the last range.
    pub(super) fn finish(&mut self, progress: &mut Progress<'_>, each: &mut EachChange<'_>) -> Result<()> {
        self.held.take().map_or(Ok(()), |held| each(held, progress))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ChangeKind::{Beyond, Data, Zeros};

    fn joined(unit_bytes: u64, limit_bytes: u64, added: &[(Range<u64>, ChangeKind)]) -> Vec<(u64, u64, ChangeKind)> {
        let (mut joiner, mut found) = (RangeJoiner::new(unit_bytes), Vec::new());
        let mut each = |change: Change, _: &mut Progress<'_>| {
            found.push((change.offset_bytes, change.end_bytes(), change.kind));
            Ok(())
        };
        for (range, kind) in added {
            joiner.add((range.clone(), *kind), limit_bytes, &mut |_, _| true, &mut each).unwrap();
        }
        joiner.finish(&mut |_, _| true, &mut each).unwrap();
        found
    }

    #[test]
    fn neighbours_of_one_kind_are_one_range() {
        let added = [(0..512, Data), (512..1024, Data), (1024..2048, Zeros), (4096..4608, Zeros), (4608..5120, Beyond)];
        let expected = [(0, 1024, Data), (1024, 2048, Zeros), (4096, 4608, Zeros), (4608, 5120, Beyond)];
        assert_eq!(joined(512, 8192, &added), expected);
    }

    #[test]
    fn a_unit_of_two_kinds_is_data() {
        assert_eq!(joined(4096, 65536, &[(512..1024, Zeros), (1024..1536, Data)]), [(0, 4096, Data)]);
        assert_eq!(joined(4096, 65536, &[(512..1024, Data), (1024..1536, Zeros)]), [(0, 4096, Data)]);
        let added = [(0..4608, Zeros), (4608..5120, Data), (5632..9216, Zeros)];
        assert_eq!(joined(4096, 9216, &added), [(0, 4096, Zeros), (4096, 8192, Data), (8192, 9216, Zeros)]);
    }
}
