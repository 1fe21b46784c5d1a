//! Which request comes next: how large, which way, where.
//!
//! ```text
//!   size, drawn by weight ─▶ read or write, by share ─┬─ random, by share ─▶ a position by the law        (distribution.rs)
//!                                                     └─ else behind the request before, or, interlocked, behind that of any thread
//! ```
//!
//! A sequential stream begins at its own start, behind it by its thread's, goes on by the stride
//! (or by the length of what was asked), and from the beginning of the working set again when what
//! would come next does not fit. After a random request it goes on behind that one. With `parallel`
//! every slot of the thread has such a stream of its own, and all of them begin at the same place.
//!
//! Invariant: every request lies within the working set, and begins at a multiple of what the load
//! asks for; both are counted from the working set's start.

use crate::{
    job::Load,
    run::{
        distribution::{Grid, OffsetDistribution},
        random::{Chance, Random, random_for},
    },
};
use rand_xoshiro::rand_core::Rng;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// What is asked of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IoRequest {
    /// From the beginning of the target.
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u32,
    pub(crate) is_read: bool,
}

/// The part of a target that is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WorkingSet {
    pub(crate) start_bytes: u64,
    pub(crate) len_bytes: u64,
}

/// One size of requests.
#[derive(Debug, Clone)]
struct Size {
    len_bytes: u32,
    read: Chance,
    random: Chance,
    step_bytes: u64,
    law: OffsetDistribution,
}

/// See the module.
#[derive(Debug, Clone)]
pub(crate) struct Requests {
    set: WorkingSet,
    sizes: Vec<Size>,
    /// Draws up to this (of 2^64) take the size of this number or one before.
    up_to: Vec<u64>,
    stride_bytes: Option<u64>,
    /// Where the stream goes on, from the start of the working set.
    next_bytes: u64,
    /// The same for each slot, where every request in flight has its own stream; else empty.
    of_slots: Vec<u64>,
    /// The same, for all threads of a target.
    interlocked: Option<Arc<AtomicU64>>,
    rng: Random,
}

/// Which of a load's many streams of requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) phase: u64,
    pub(crate) load: u64,
    pub(crate) target: u64,
    /// Among the threads of this load on this target.
    pub(crate) thread: u64,
}

impl Requests {
    /// The requests of one thread of `load` on one target.
    ///
    /// # Errors
    /// A sentence, when a spot holds no position.
    pub(crate) fn new(
        load: &Load,
        set: WorkingSet,
        seed: u64,
        place: Place,
        interlocked: Option<Arc<AtomicU64>>,
    ) -> Result<Self, String> {
        let shares = load.block.shares();
        let whole: f64 = shares.iter().map(|share| share.weight).sum();
        let (mut sizes, mut up_to, mut sum) = (Vec::new(), Vec::new(), 0.0);
        // Popular places are the same for all threads of a load on a target.
        let scatter_seed = random_for(seed, &[place.phase, place.load, place.target]).next_u64();
        for share in &shares {
            let step_bytes = load.align.map_or(share.size.0, |align| align.0);
            let grid = Grid { set_bytes: set.len_bytes, step_bytes, len_bytes: share.size.0 };
            sum += share.weight / whole;
            up_to.push((sum * 2_f64.powi(64)) as u64);
            sizes.push(Size {
                len_bytes: u32::try_from(share.size.0).unwrap_or(u32::MAX),
                read: Chance::percent(share.read_percent.unwrap_or(load.read_percent)),
                random: Chance::percent(share.random_percent.unwrap_or(load.random_percent)),
                step_bytes,
                law: OffsetDistribution::new(&load.distribution, grid, scatter_seed)?,
            });
        }
        let start_bytes = load.thread_start.0.saturating_mul(place.thread).saturating_add(load.stream_start.0);
        let next_bytes = if set.len_bytes == 0 { 0 } else { start_bytes % set.len_bytes };
        Ok(Self {
            set,
            sizes,
            up_to,
            stride_bytes: load.stride.map(|stride| stride.0),
            next_bytes,
            of_slots: vec![next_bytes; if load.parallel { load.queue_depth as usize } else { 0 }],
            interlocked,
            rng: random_for(seed, &[place.phase, place.load, place.target, place.thread]),
        })
    }

    /// The next one for a slot: of the slot's own stream, where slots have one.
    #[inline]
    pub(crate) fn draw_for(&mut self, slot: u32) -> IoRequest {
        let Some(own_bytes) = self.of_slots.get(slot as usize) else { return self.draw() };
        self.next_bytes = *own_bytes;
        let ask = self.draw();
        self.of_slots[slot as usize] = self.next_bytes;
        ask
    }

    /// The next one.
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
            size.law.draw(&mut self.rng) * size.step_bytes
        } else {
            // The place is taken and the next one set in one step, or another thread would get the
            // same.
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

    /// Chance for whoever fills what is asked for.
    #[inline]
    pub(crate) fn rng(&mut self) -> &mut Random {
        &mut self.rng
    }
}

#[cfg(test)]
#[path = "requests_tests.rs"]
mod tests;
