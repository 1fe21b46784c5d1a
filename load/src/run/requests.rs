//! Size, direction and offset of the next request.
//!
//! ```text
//!   size by weight ─▶ read or write by share ─┬─ random by share: offset by distribution.rs
//!                                             └─ else sequential: after the request before
//!                                                (interlocked: after that of any thread)
//! ```
//!
//! A sequential stream starts at `stream_start` plus the thread's multiple of `thread_start`. It
//! advances by the stride, or by the length of the request, and restarts at the beginning of the
//! working set when the next request does not fit. After a random request the stream continues
//! behind that request. With `parallel` every slot of the thread has a stream of its own, all with
//! the same start.
//!
//! Invariant: every request is inside the working set. The offset of a random request is a multiple
//! of `align`, counted from the start of the working set.

use crate::{
    job::Load,
    run::{
        distribution::{Grid, OffsetDistribution},
        random::{Probability, Random, random_for},
    },
};
use rand_xoshiro::rand_core::Rng;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// A read or write of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IoRequest {
    /// Offset on the target.
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u32,
    pub(crate) is_read: bool,
}

/// The range of a target that a load uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WorkingSet {
    pub(crate) start_bytes: u64,
    pub(crate) len_bytes: u64,
}

/// One size of requests.
#[derive(Debug, Clone)]
struct Size {
    len_bytes: u32,
    read: Probability,
    random: Probability,
    step_bytes: u64,
    offsets: OffsetDistribution,
}

/// The sequence of requests of one thread on one target.
#[derive(Debug, Clone)]
pub(crate) struct Requests {
    set: WorkingSet,
    sizes: Vec<Size>,
    /// Cumulative distribution of `sizes`, scaled to 2^64: a draw takes the first size whose entry
    /// is at least the draw.
    up_to: Vec<u64>,
    stride_bytes: Option<u64>,
    /// Next offset of the stream, from the start of the working set.
    next_bytes: u64,
    /// Next offset of each slot's stream, with `parallel`; else empty.
    of_slots: Vec<u64>,
    /// Next offset of the stream that all threads of a target share.
    interlocked: Option<Arc<AtomicU64>>,
    rng: Random,
}

/// Identifies the requests of one thread on one target.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StreamId {
    pub(crate) phase: u64,
    pub(crate) load: u64,
    pub(crate) target: u64,
    /// Number of the thread among those of this load on this target.
    pub(crate) thread: u64,
}

impl Requests {
    /// The requests of one thread of `load` on one target.
    ///
    /// # Errors
    /// A sentence, when a spot with requests has no position.
    pub(crate) fn new(
        load: &Load,
        set: WorkingSet,
        seed: u64,
        stream: StreamId,
        interlocked: Option<Arc<AtomicU64>>,
    ) -> Result<Self, String> {
        let shares = load.block.shares();
        let whole: f64 = shares.iter().map(|share| share.weight).sum();
        let (mut sizes, mut up_to, mut sum) = (Vec::new(), Vec::new(), 0.0);
        // Popular positions are the same for all threads of a load on a target.
        let permutation_seed = random_for(seed, &[stream.phase, stream.load, stream.target]).next_u64();
        for share in &shares {
            let step_bytes = load.align.map_or(share.size.0, |align| align.0);
            let grid = Grid { set_bytes: set.len_bytes, step_bytes, len_bytes: share.size.0 };
            sum += share.weight / whole;
            up_to.push((sum * 2_f64.powi(64)) as u64);
            sizes.push(Size {
                len_bytes: u32::try_from(share.size.0).unwrap_or(u32::MAX),
                read: Probability::percent(share.read_percent.unwrap_or(load.read_percent)),
                random: Probability::percent(share.random_percent.unwrap_or(load.random_percent)),
                step_bytes,
                offsets: OffsetDistribution::new(&load.distribution, grid, permutation_seed)?,
            });
        }
        let start_bytes = load.thread_start.0.saturating_mul(stream.thread).saturating_add(load.stream_start.0);
        let next_bytes = if set.len_bytes == 0 { 0 } else { start_bytes % set.len_bytes };
        Ok(Self {
            set,
            sizes,
            up_to,
            stride_bytes: load.stride.map(|stride| stride.0),
            next_bytes,
            of_slots: vec![next_bytes; if load.parallel { load.queue_depth as usize } else { 0 }],
            interlocked,
            rng: random_for(seed, &[stream.phase, stream.load, stream.target, stream.thread]),
        })
    }

    /// The next request for a slot, of the slot's own stream where slots have one.
    #[inline]
    pub(crate) fn draw_for(&mut self, slot: u32) -> IoRequest {
        let Some(own_bytes) = self.of_slots.get(slot as usize) else { return self.draw() };
        self.next_bytes = *own_bytes;
        let io_request = self.draw();
        self.of_slots[slot as usize] = self.next_bytes;
        io_request
    }

    /// The next request.
    #[inline]
    pub(crate) fn draw(&mut self) -> IoRequest {
        let size = match &self.sizes[..] {
            [only] => only,
            sizes => {
                let chosen = self.rng.next_u64();
                let number = self.up_to.iter().position(|up_to| chosen <= *up_to).unwrap_or(sizes.len() - 1);
                &sizes[number]
            }
        };
        let len_bytes = u64::from(size.len_bytes);
        let is_read = size.read.draw(&mut self.rng);
        let advance_bytes = self.stride_bytes.unwrap_or(len_bytes);
        let at_bytes = if size.random.draw(&mut self.rng) {
            size.offsets.draw(&mut self.rng) * size.step_bytes
        } else {
            // One atomic update takes the offset and sets the next one, so that no other thread
            // gets the same.
            let fits =
                |at_bytes: u64| if at_bytes.saturating_add(len_bytes) > self.set.len_bytes { 0 } else { at_bytes };
            match &self.interlocked {
                None => fits(self.next_bytes),
                Some(shared) => {
                    let taken = shared.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next_bytes| {
                        Some(fits(next_bytes).saturating_add(advance_bytes))
                    });
                    fits(taken.unwrap_or_default())
                }
            }
        };
        self.next_bytes = at_bytes.saturating_add(advance_bytes);
        IoRequest { offset_bytes: self.set.start_bytes + at_bytes, len_bytes: size.len_bytes, is_read }
    }

    /// The generator, for the payload of the request.
    #[inline]
    pub(crate) fn rng(&mut self) -> &mut Random {
        &mut self.rng
    }
}

#[cfg(test)]
#[path = "requests_tests.rs"]
mod tests;
