//! The map of a rescue: the whole disk as ranges, in order.

/// What became of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RangeKind {
    /// Read and copied.
    Data,
    /// Reads as zeros.
    Zero,
    /// Lost; zeros in the new image.
    Lost,
    /// Its table entry says that it is zeros, but the file has data that no entry names.
    Doubted,
}

/// A range of the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RescuedRange {
    /// First byte, counted from the start of the disk.
    pub offset_bytes: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// What became of it.
    pub kind: RangeKind,
    /// Why it is lost.
    pub reason: Option<String>,
}

/// Most ranges that are listed.
const RANGES_MAX: usize = 65_536;

/// Collects ranges, which arrive in order and without gaps.
#[derive(Debug, Default)]
pub(super) struct RangeList {
    pub(super) ranges: Vec<RescuedRange>,
    pub(super) unlisted_bytes: u64,
    bytes: [u64; 4],
}

impl RangeList {
    pub(super) fn add(
        &mut self,
        offset_bytes: u64,
        len_bytes: u64,
        kind: RangeKind,
        reason: impl FnOnce() -> Option<String>,
    ) {
        self.bytes[kind as usize] += len_bytes;
        // Lost neighbours are one range with the reason of the first.
        if let Some(last) = self.ranges.last_mut()
            && last.kind == kind
            && last.offset_bytes + last.len_bytes == offset_bytes
        {
            last.len_bytes += len_bytes;
        } else if self.ranges.len() < RANGES_MAX {
            self.ranges.push(RescuedRange { offset_bytes, len_bytes, kind, reason: reason() });
        } else {
            self.unlisted_bytes += len_bytes;
        }
    }

    pub(super) fn bytes(&self, kind: RangeKind) -> u64 {
        self.bytes[kind as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_of_a_kind_are_one_range() {
        let mut list = RangeList::default();
        let kinds = [RangeKind::Data, RangeKind::Data, RangeKind::Lost, RangeKind::Lost, RangeKind::Zero];
        for (index, kind) in kinds.into_iter().enumerate() {
            list.add(index as u64 * 8, 8, kind, || (kind == RangeKind::Lost).then(|| format!("at {index}")));
        }
        let found: Vec<_> = list.ranges.iter().map(|range| (range.offset_bytes, range.len_bytes, range.kind)).collect();
        assert_eq!(found, [(0, 16, RangeKind::Data), (16, 16, RangeKind::Lost), (32, 8, RangeKind::Zero)]);
        assert_eq!(list.ranges[1].reason.as_deref(), Some("at 2"));
        assert_eq!(list.bytes(RangeKind::Lost), 16);
    }

    #[test]
    fn a_long_list_is_limited_and_the_rest_counted() {
        let mut list = RangeList::default();
        let count = RANGES_MAX as u64 + 10;
        for index in 0..count {
            let kind = if index % 2 == 0 { RangeKind::Data } else { RangeKind::Lost };
            list.add(index, 1, kind, || None);
        }
        assert_eq!((list.ranges.len(), list.unlisted_bytes), (RANGES_MAX, 10));
        assert_eq!(list.bytes(RangeKind::Data) + list.bytes(RangeKind::Lost), count);
    }
}
