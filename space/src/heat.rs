//! Heat: how often each slab of a file is used, so that the pool can put what is used often on its
//! fast members.
//!
//! ```text
//!   request ─▶ sequential? not counted ─▶ one of SAMPLE is counted ─▶ the slab's counter
//!   once an hour: every counter loses a thirty-second, so a day halves it
//! ```
//!
//! A counter is a number of requests, so the share of the requests that some slabs get can be
//! computed from it, and be compared with what was measured. Requests are counted, not seconds in
//! which a slab was used: under load, cold slabs are used in each second too.
//!
//! A request that begins where another one has just ended is sequential. A stream runs as fast on
//! slow members, and would push aside what is used at random. Where the last request near a slab
//! has ended is kept by slab, so that several streams are told apart.

use crate::leaves::Leaves;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// One of this many requests is counted.
pub(crate) const SAMPLE: u32 = 8;

/// Streams that are told apart; a slab has the place of its index modulo this.
const STREAMS: usize = 64;

/// On its own cache line: threads that use different slabs do not share it.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Stream {
    /// Where the last request has ended.
    end_bytes: AtomicU64,
    /// Requests that were not sequential.
    requests: AtomicU32,
    /// Whether the last request was sequential.
    is_sequential: AtomicBool,
}

/// What was noted about a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Noted {
    pub(crate) is_sequential: bool,
    /// Whether it was counted.
    pub(crate) is_counted: bool,
}

/// The heat of a file's slabs.
#[derive(Debug)]
pub(crate) struct Heat {
    counters: Leaves<AtomicU32>,
    streams: Box<[Stream; STREAMS]>,
}

impl Default for Heat {
    fn default() -> Self {
        Self { counters: Leaves::default(), streams: Box::new([const { Stream::new() }; STREAMS]) }
    }
}

impl Stream {
    const fn new() -> Self {
        Self { end_bytes: AtomicU64::new(u64::MAX), requests: AtomicU32::new(0), is_sequential: AtomicBool::new(false) }
    }
}

impl Heat {
    /// Notes a request to slab `index` of the file.
    #[inline]
    pub(crate) fn note(&self, index: u32, offset_bytes: u64, len_bytes: u64) -> Noted {
        let place = index as usize % STREAMS;
        let stream = &self.streams[place];
        let last_bytes = stream.end_bytes.load(Ordering::Relaxed);
        stream.end_bytes.store(offset_bytes.wrapping_add(len_bytes), Ordering::Relaxed);
        let is_sequential = last_bytes == offset_bytes || self.comes_from_before(place, offset_bytes);
        // Most requests find it as it is. Reading it first keeps the cache line shared.
        if stream.is_sequential.load(Ordering::Relaxed) != is_sequential {
            stream.is_sequential.store(is_sequential, Ordering::Relaxed);
        }
        if is_sequential {
            return Noted { is_sequential: true, is_counted: false };
        }
        // Two threads may count the same number; the heat is an estimate.
        let request = stream.requests.load(Ordering::Relaxed).wrapping_add(1);
        stream.requests.store(request, Ordering::Relaxed);
        let is_counted = request.is_multiple_of(SAMPLE);
        if is_counted {
            self.add(index, 1);
        }
        Noted { is_sequential: false, is_counted }
    }

    /// Whether the last request near the slab, which ended at `end_bytes`, was sequential.
    pub(crate) fn was_sequential(&self, index: u32, end_bytes: u64) -> bool {
        let stream = &self.streams[index as usize % STREAMS];
        stream.end_bytes.load(Ordering::Relaxed) == end_bytes && stream.is_sequential.load(Ordering::Relaxed)
    }

    /// Whether the stream of the slab before has come to its end.
    #[inline]
    fn comes_from_before(&self, place: usize, offset_bytes: u64) -> bool {
        self.streams[(place + STREAMS - 1) % STREAMS].end_bytes.load(Ordering::Relaxed) == offset_bytes
    }

    /// The heat of a slab: requests that were counted, aged.
    pub(crate) fn of(&self, index: u32) -> u32 {
        self.counters.get(index).map_or(0, |counter| counter.load(Ordering::Relaxed))
    }

    /// Adds to the heat of a slab.
    pub(crate) fn add(&self, index: u32, counted: u32) {
        let counter = self.counters.entry(index);
        let heat = counter.load(Ordering::Relaxed).saturating_add(counted);
        counter.store(heat, Ordering::Relaxed);
    }

    /// Makes all counters an hour older.
    pub(crate) fn age(&self) {
        for (_, counter) in self.counters.existing(0..1 << 32) {
            let heat = counter.load(Ordering::Relaxed);
            if heat > 0 {
                // Rounded up, so that everything is cold some day.
                counter.store(heat - heat.div_ceil(32), Ordering::Relaxed);
            }
        }
    }

    /// The slabs that have any heat.
    pub(crate) fn warm(&self) -> impl Iterator<Item = (u32, u32)> {
        let heat = |(index, counter): (u32, &AtomicU32)| (index, counter.load(Ordering::Relaxed));
        self.counters.existing(0..1 << 32).map(heat).filter(|(_, heat)| *heat > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_requests_are_counted_and_streams_are_not() {
        let heat = Heat::default();
        let mib = 1 << 20;
        for round in 0..1000_u64 {
            heat.note(7, 7 * mib + round * 37 % 200 * 4096, 4096);
        }
        assert!((110..=125).contains(&heat.of(7)), "{}", heat.of(7));
        // Two streams through many slabs, in turn.
        for step in 0..16 * 300_u64 {
            for base in [1000, 5008] {
                let at = base * mib + step * (mib / 16);
                heat.note((at / mib) as u32, at, mib / 16);
            }
        }
        let counted: u32 = heat.warm().filter(|(index, _)| *index != 7).map(|(_, heat)| heat).sum();
        assert!(counted <= 1, "{counted}");
    }

    #[test]
    fn a_day_halves_the_heat() {
        let heat = Heat::default();
        heat.add(1, 100_000);
        heat.add(2, 3);
        (0..22).for_each(|_| heat.age());
        assert!((45_000..55_000).contains(&heat.of(1)), "{}", heat.of(1));
        assert_eq!((heat.of(2), heat.warm().count()), (0, 1));
    }
}
