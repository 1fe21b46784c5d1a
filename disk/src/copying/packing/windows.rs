//! The walk over the source: which chunks may hold data.
//!
//! Extents are asked for by the window of 64 MiB, and a range in which no layer of the chain has a
//! block is skipped at once, so the time of a walk depends on what is allocated. Damaged extents
//! end the walk, or are listed and left out.

use super::chunk::{CHUNK_BYTES, Chunk};
use crate::{
    LostRanges, Opened,
    copying::copy::{Failure, LostRangeCollector, damage_in, damaged_source},
    engine::holes::next_stored,
    error::to_io,
};
use diskwright_store::{Extent, ExtentKind};
use std::{collections::VecDeque, ops::Range};

/// Length of a window: a multiple of the chunk.
const WINDOW_BYTES: u64 = 64 << 20;

pub(super) struct Windows<'a> {
    source: &'a Opened,
    size_bytes: u64,
    skip_damaged: bool,
    /// Chunks of the present window.
    chunks: VecDeque<Chunk>,
    /// Where the next window begins.
    next_bytes: u64,
    /// Number of the next chunk.
    number: u64,
    /// Bytes in chunks without data, which no worker gets.
    pub(super) zero_bytes: u64,
    lost: LostRangeCollector,
}

impl<'a> Windows<'a> {
    pub(super) fn new(source: &'a Opened, size_bytes: u64, skip_damaged: bool) -> Self {
        Self {
            source,
            size_bytes,
            skip_damaged,
            chunks: VecDeque::new(),
            next_bytes: 0,
            number: 0,
            zero_bytes: 0,
            lost: LostRangeCollector::default(),
        }
    }

    /// The next chunk that may hold data.
    pub(super) fn next(&mut self) -> Result<Option<Chunk>, Failure> {
        while self.chunks.is_empty() && self.next_bytes < self.size_bytes {
            self.next_window()?;
        }
        let chunk = self.chunks.pop_front();
        Ok(chunk.map(|chunk| {
            self.number += 1;
            Chunk { number: self.number - 1, ..chunk }
        }))
    }

    /// The lost ranges, once.
    pub(super) fn lost(&mut self) -> LostRanges {
        std::mem::take(&mut self.lost).finish()
    }

    fn next_window(&mut self) -> Result<(), Failure> {
        let (start, size_bytes) = (self.next_bytes, self.size_bytes);
        let known = match self.source.disk() {
            Some(disk) => next_stored(&disk.layers(), start, size_bytes)
                .map_err(|error| Failure::Source(start..size_bytes, to_io(error)))?,
            None => start,
        };
        // The last chunk before the end may be cut.
        let window = known - known % CHUNK_BYTES;
        self.zero_bytes += if known >= size_bytes { size_bytes - start } else { window - start };
        if known >= size_bytes {
            self.next_bytes = size_bytes;
            return Ok(());
        }
        let end = (window + WINDOW_BYTES).min(size_bytes);
        self.next_bytes = end;
        let mut extents = Vec::new();
        let found = self.source.device().extents(window, end - window, &mut extents);
        found.map_err(|error| Failure::Source(window..end, error))?;
        let (mut data, mut is_whole) = (Vec::new(), true);
        for extent in &extents {
            match extent.kind {
                ExtentKind::Data => data.push(extent.offset_bytes..extent.offset_bytes + extent.len_bytes),
                ExtentKind::Damaged => {
                    self.lose(extent)?;
                    is_whole = false;
                }
                ExtentKind::Zero | ExtentKind::Unallocated => {}
            }
        }
        let (mut at, mut first) = (window, 0);
        while at < end {
            let stop = (at + CHUNK_BYTES).min(end);
            let mut within: Vec<Range<u64>> = Vec::new();
            while let Some(range) = data.get(first).filter(|range| range.start < stop) {
                let (from, to) = (range.start.max(at), range.end.min(stop));
                match within.last_mut() {
                    Some(last) if last.end == from => last.end = to,
                    _ => within.push(from..to),
                }
                if range.end > stop {
                    break;
                }
                first += 1;
            }
            if within.is_empty() {
                self.zero_bytes += stop - at;
            } else {
                self.chunks.push_back(Chunk { number: 0, offset_bytes: at, data: within, is_whole });
            }
            at = stop;
        }
        Ok(())
    }

    /// Lists a damaged extent, or returns the error that ends the walk.
    fn lose(&mut self, extent: &Extent) -> Result<(), Failure> {
        if !self.skip_damaged {
            return Err(damaged_source(self.source, extent));
        }
        let reason = || damage_in(self.source, extent).to_string();
        self.lost.add(extent.offset_bytes, extent.len_bytes, reason);
        Ok(())
    }
}
