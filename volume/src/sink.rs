//! Where the readers send free ranges: checks their order, merges neighbours, and refuses to call a
//! file system's own structures free.

use crate::reason::{LeftAlone, Stop};
use std::ops::{ControlFlow, Range};

/// Receives free ranges in bytes of the volume, in ascending order.
pub(crate) struct Sink<'a> {
    give: &'a mut dyn FnMut(Range<u64>) -> ControlFlow<()>,
    size_bytes: u64,
    /// The last range, which the next one may extend.
    pending: Range<u64>,
    /// Ranges that must be in use; sorted when the first free range arrives.
    reserved: Vec<Range<u64>>,
    sorted: bool,
    total_bytes: u64,
}

impl<'a> Sink<'a> {
    /// A sink for a volume of `size_bytes`.
    pub(crate) fn new(size_bytes: u64, give: &'a mut dyn FnMut(Range<u64>) -> ControlFlow<()>) -> Self {
        Self { give, size_bytes, pending: 0..0, reserved: Vec::new(), sorted: true, total_bytes: 0 }
    }

    /// A range that holds structures of the file system: a map that calls it free is damaged.
    pub(crate) fn reserve(&mut self, range: Range<u64>) {
        if !range.is_empty() {
            self.reserved.push(range);
            self.sorted = false;
        }
    }

    /// Takes a free range.
    pub(crate) fn free(&mut self, range: Range<u64>) -> Result<(), Stop> {
        if range.is_empty() {
            return Ok(());
        }
        if range.start < self.pending.end || range.end > self.size_bytes {
            let (start, end) = (range.start, range.end);
            return Err(LeftAlone::damaged(format!(
                "the free bytes {start} to {end} overlap others or end beyond the volume"
            ))
            .into());
        }
        if !self.sorted {
            self.reserved.sort_by_key(|range| range.start);
            // Ends ascend too once ranges that lie in one another are merged.
            self.reserved.dedup_by(|next, kept| {
                let merge = next.start <= kept.end;
                if merge {
                    kept.end = kept.end.max(next.end);
                }
                merge
            });
            self.sorted = true;
        }
        let next = self.reserved.partition_point(|reserved| reserved.end <= range.start);
        if let Some(reserved) = self.reserved.get(next).filter(|reserved| reserved.start < range.end) {
            return Err(LeftAlone::damaged(format!(
                "its map calls bytes {} to {} free, which hold its own structures",
                reserved.start, reserved.end
            ))
            .into());
        }
        self.total_bytes += range.end - range.start;
        if range.start == self.pending.end {
            self.pending.end = range.end;
            return Ok(());
        }
        self.send()?;
        self.pending = range;
        Ok(())
    }

    /// Sends the last range. Returns the sum of all in bytes.
    pub(crate) fn finish(mut self) -> Result<u64, Stop> {
        self.send()?;
        Ok(self.total_bytes)
    }

    fn send(&mut self) -> Result<(), Stop> {
        if self.pending.is_empty() {
            return Ok(());
        }
        match (self.give)(self.pending.clone()) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Stop::Cancelled),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_merged_and_disorder_is_refused() {
        let mut seen = Vec::new();
        let mut give = |range| {
            seen.push(range);
            ControlFlow::Continue(())
        };
        let mut sink = Sink::new(100, &mut give);
        sink.free(0..4).unwrap();
        sink.free(4..6).unwrap();
        sink.free(10..12).unwrap();
        assert!(sink.free(11..13).is_err());
        assert!(sink.free(90..101).is_err());
        assert_eq!(sink.finish().unwrap(), 8);
        assert_eq!(seen, [0..6, 10..12]);
    }

    #[test]
    fn reserved_ranges_are_never_free() {
        let mut give = |_| ControlFlow::Continue(());
        let mut sink = Sink::new(100, &mut give);
        sink.reserve(50..60);
        sink.reserve(20..30);
        sink.reserve(22..24);
        sink.free(0..20).unwrap();
        assert!(sink.free(29..31).is_err());
        sink.free(30..50).unwrap();
        assert!(sink.free(50..51).is_err());
        sink.free(60..100).unwrap();
    }
}
