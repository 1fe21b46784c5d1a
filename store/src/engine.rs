//! The I/O engine: carries out the parts of requests for one thread, on many stores.
//!
//! A virtual disk cuts a request into *parts*. A part transfers one range of one store to or from
//! one range of the request's buffer, or zeroes or syncs a store. The engine starts the parts and
//! returns one [`EngineCompletion`] for each request when its last part has ended. It continues
//! short reads and writes, and falls back to writing zeros where a file system cannot punch holes
//! or zero ranges.
//!
//! ```text
//! begin(tag, buf) ─▶ slot ─ read/write/zeroes/sync/fill ... ─▶ end(slot)   several parts
//! read_one / write_one                                                     hot path: one part
//! external(tag, buf) ─▶ ExternalTicket, completed by another thread        blocking work elsewhere
//!                    reap(at_least, &mut done)
//! ```
//!
//! With a ring, a part is one submission queue entry. Nothing is submitted before `reap`, so a
//! whole batch costs one system call. Work that the ring cannot do never blocks the engine's
//! thread: a store with a [`Lane`] borrows the memory and completes later; a thread of the pool
//! carries out the rest (replaced pages of an overlay, transfers that O_DIRECT would refuse).
//! Without a ring ([`EngineKind::Sync`]), and for stores that never wait (memory), parts are
//! blocking calls, made where the part is started.
//!
//! On a [`SharedRing`], `reap(0)` submits nothing and only looks into the engine's mailbox. The
//! ring's `wait` submits for all its users.
//!
//! Slots (see `slots`) and parts live in two tables with free lists. The `user_data` of a
//! submission queue entry holds the index of its part. Once the tables have grown to the depth in
//! use, starting and ending a part allocates nothing. `engine/work.rs` starts parts, waits for them
//! and joins them; `engine/targets.rs` adds and removes stores.
//!
//! Invariants:
//! - A slot owns its buffer from `begin` until its completion is handed out, so the kernel never
//!   writes into memory that other code can reach.
//! - Dropping the engine first waits for everything in flight.
//! - An engine belongs to one thread. It takes one lock only: that of the list on which other
//!   threads put finished external work.
//!
//! **Lost requests.** A part is never answered if the ring itself fails, or if a lane does not
//! answer within the [patience](Engine::set_patience) of an engine that is being closed. The engine
//! then ends the request with an error and [`EngineCompletion::lost`], leaks its memory, returns a
//! fresh buffer, and refuses all further parts; [`Engine::has_failed`] returns true. A lost write
//! may still reach the store at any later time, so code that reuses space once the requests on it
//! have ended must stop doing so. `reap` reports a ring failure once.

#![allow(unsafe_code)]

mod copies;
mod kind;
mod segments;
mod settle;
mod targets;
mod work;

pub use crate::{external::ExternalTicket, slots::EngineCompletion};
pub use kind::EngineKind;

use crate::{
    IoBuf, Segments, SharedRing, Slab,
    buffer::{Span, ZEROS_BYTES},
    external::{Ended, Externals},
    lane::{LANE_PATIENCE, Lane},
    link::Link,
    part::{Action, Part, Target},
    range::{FileRange, Zeroing},
    ring::Ring,
    shared::{Member, RingAnswer},
    slots::Slots,
};
use kind::lacks_ring;
use std::{io, ops::Range, sync::Arc, time::Duration};

impl EngineKind {
    /// The kind that [`Engine::new`] makes of this one on this machine: never [`EngineKind::Auto`].
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn resolved(self) -> io::Result<Self> {
        Ok(match Engine::new(self, 1, None)?.link {
            Link::None => Self::Sync,
            Link::Own(_) | Link::Shared(_) => Self::Uring,
        })
    }
}

/// A store that was added to an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TargetId(u32);

/// A request that is still being given its parts.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a request that is not ended is never handed out"]
pub struct SlotId(u32);

/// Counters, for measuring what a request costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineStats {
    /// Calls of `io_uring_enter`; on a shared ring, those of all its users.
    pub enters: u64,
    /// Parts started, including those counted below.
    pub parts: u64,
    /// Parts carried out by blocking calls of the engine's own thread.
    pub inline_parts: u64,
    /// Parts carried out by blocking calls of another thread.
    pub pool_parts: u64,
    /// Parts carried out by lanes.
    pub lane_parts: u64,
}

/// A lane that this engine uses.
#[derive(Debug)]
struct OpenLane {
    lane: Arc<dyn Lane>,
    /// Loans that the lane holds.
    parts: usize,
    /// The lane was given parts, or its descriptor became readable, since it was last driven.
    is_due: bool,
    /// Whether the ring polls the lane's descriptor.
    polling: bool,
}

/// Carries out requests on stores; see the module documentation.
#[derive(Debug)]
pub struct Engine {
    link: Link,
    /// The upper half of the `user_data` of all entries of this engine.
    user_bits: u64,
    /// Reused buffer for the answers taken from a shared ring's mailbox.
    mail: Vec<RingAnswer>,
    targets: Vec<Target>,
    /// Indices in `targets` that can be reused.
    free_targets: Vec<u32>,
    /// Removed targets whose store is dropped once no part uses it.
    leaving: Vec<u32>,
    slots: Slots,
    parts: Vec<Part>,
    free_parts: Vec<u32>,
    /// Parts that the ring is carrying out.
    in_ring: usize,
    externals: Arc<Externals>,
    /// Tickets and loans that have not been completed.
    tickets: usize,
    /// How many of `tickets` are loans held by lanes.
    lane_parts: usize,
    /// Whether the ring polls the eventfd of `externals`.
    polling: bool,
    lanes: Vec<OpenLane>,
    ended_tickets: Vec<Ended>,
    /// Cancellations of polls that have not been answered.
    cancels: usize,
    /// Parts of copies that failed while other copies of the same range were still being started.
    /// `None` while none are being started.
    to_repeat: Option<Vec<u32>>,
    /// Parts that will never be answered. Their indices are not reused.
    lost_parts: Vec<u32>,
    /// Parts were lost: nothing is started any more.
    failed: bool,
    /// The ring itself failed; it is not entered again.
    ring_failed: bool,
    patience: Duration,
    stats: EngineStats,
}

impl Engine {
    /// An engine for about `depth` requests in flight. Buffers of `slab` are registered with the
    /// kernel where it takes them.
    ///
    /// # Errors
    /// The kernel's error, if it gives no ring, for [`EngineKind::Uring`] only. The other kinds do
    /// without a ring.
    pub fn new(kind: EngineKind, depth: usize, slab: Option<&Slab>) -> io::Result<Self> {
        let link = match kind {
            EngineKind::Sync => Link::None,
            EngineKind::Uring => Link::Own(Ring::new(depth, slab)?),
            EngineKind::Auto => match Ring::new(depth, slab) {
                Ok(ring) => Link::Own(ring),
                Err(error) if lacks_ring(&error) => Link::None,
                Err(error) => return Err(error),
            },
        };
        Ok(Self::with_link(link))
    }

    /// An engine on a ring that other engines and streams use too.
    pub fn on(ring: &SharedRing) -> Self {
        Self::with_link(Link::Shared(Member::join(ring)))
    }

    fn with_link(link: Link) -> Self {
        Self {
            user_bits: link.user_bits(),
            link,
            mail: Vec::new(),
            targets: Vec::new(),
            free_targets: Vec::new(),
            leaving: Vec::new(),
            slots: Slots::default(),
            parts: Vec::new(),
            free_parts: Vec::new(),
            in_ring: 0,
            externals: Arc::default(),
            tickets: 0,
            lane_parts: 0,
            polling: false,
            lanes: Vec::new(),
            ended_tickets: Vec::new(),
            cancels: 0,
            to_repeat: None,
            lost_parts: Vec::new(),
            failed: false,
            ring_failed: false,
            patience: LANE_PATIENCE,
            stats: EngineStats::default(),
        }
    }

    /// The kind in use: [`EngineKind::Uring`] or [`EngineKind::Sync`].
    pub fn kind(&self) -> EngineKind {
        if self.link.is_some() { EngineKind::Uring } else { EngineKind::Sync }
    }

    /// Counters since the engine was opened.
    pub fn stats(&self) -> EngineStats {
        let enters = match &self.link {
            Link::None => 0,
            Link::Own(ring) => ring.enters,
            Link::Shared(member) => member.ring().enters,
        };
        EngineStats { enters, ..self.stats }
    }

    /// Whether the ring failed or a lane was given up. The engine then starts nothing any more.
    pub fn has_failed(&self) -> bool {
        self.failed
    }

    /// Sets how long [`Engine::finish`] and the drop wait for lanes; [`LANE_PATIENCE`] by default.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Requests begun and not yet handed out by `reap`.
    pub fn in_flight(&self) -> usize {
        self.slots.in_flight()
    }

    /// Whether `reap(0)` has work: completed requests to hand out, or lanes that were given parts
    /// since they were last driven. The ring wakes for neither, so the thread must call `reap`
    /// before it sleeps.
    pub fn wants_reap(&self) -> bool {
        self.slots.ended() > 0 || self.lane_parts > 0 && self.lanes.iter().any(|open| open.is_due)
    }

    /// Begins a request. Call [`Engine::end`] when it has all its parts.
    pub fn begin(&mut self, tag: u64, cookie: u64, buf: Option<IoBuf>) -> SlotId {
        SlotId(self.occupy(tag, cookie, buf))
    }

    #[inline]
    fn occupy(&mut self, tag: u64, cookie: u64, buf: Option<IoBuf>) -> u32 {
        let registered = buf.as_ref().is_some_and(|buf| self.link.has_registered(buf));
        self.slots.occupy(tag, cookie, buf, registered)
    }

    /// Gives a request that was begun without a buffer its scatter-gather list, before its first
    /// part. Ranges of "the request's buffer" then count over all segments in order.
    ///
    /// # Panics
    /// If the request already has segments or a part.
    pub fn attach(&mut self, slot: &SlotId, segments: Option<Box<Segments>>) {
        if let Some(segments) = segments {
            self.slots.attach(slot.0, segments);
        }
    }

    /// Adds a read of `target` at `file_offset_bytes` into `range` of the request's buffer.
    pub fn read(&mut self, slot: &SlotId, target: TargetId, file_offset_bytes: u64, range: Range<usize>) {
        self.transfer(slot.0, target, Action::Read, file_offset_bytes, range);
    }

    /// Adds a write of `range` of the request's buffer to `target`. `durable` sets RWF_DSYNC.
    pub fn write(
        &mut self,
        slot: &SlotId,
        target: TargetId,
        file_offset_bytes: u64,
        range: Range<usize>,
        durable: bool,
    ) {
        self.transfer(slot.0, target, Action::Write { durable }, file_offset_bytes, range);
    }

    #[inline]
    fn transfer(&mut self, slot: u32, target: TargetId, action: Action, file_offset_bytes: u64, range: Range<usize>) {
        let holder = self.slots.get(slot);
        let Some(memory) = holder.memory.slice(range.clone()) else {
            return self.transfer_segments(slot, target, action, file_offset_bytes, range);
        };
        if memory.len_bytes > 0 {
            let part = Part::new(slot, target.0, action, file_offset_bytes, memory, holder.registered);
            self.start(part);
        }
    }

    /// Adds a write of bytes that several requests share (a bitmap that is the same for every
    /// block).
    pub fn write_shared(&mut self, slot: &SlotId, target: TargetId, file_offset_bytes: u64, bytes: &Arc<IoBuf>) {
        let memory = Span::of(bytes);
        if memory.len_bytes > 0 {
            self.slots.get(slot.0).keep(bytes);
            self.start(Part::new(slot.0, target.0, Action::Write { durable: false }, file_offset_bytes, memory, false));
        }
    }

    /// Fills `range` of the request's buffer with zeros, immediately. No part of the request may be
    /// reading into that range.
    pub fn fill_zeros(&mut self, slot: &SlotId, range: Range<usize>) {
        let holder = self.slots.get(slot.0);
        match holder.memory.slice(range.clone()) {
            Some(memory) if holder.clashes(memory, true) => holder.fail(overlapping_parts()),
            // SAFETY: the memory is the slot's buffer, to which no reference exists. It is not lent
            // out and the kernel does not use this range. If the caller breaks that promise, both
            // write bytes to which no reference exists.
            Some(memory) => unsafe { memory.fill_zeros() },
            None => self.fill_segments(slot.0, range, None),
        }
    }

    /// Copies `bytes` into the request's buffer at `start`, immediately. No part of the request may
    /// be reading into that range.
    pub fn fill(&mut self, slot: &SlotId, start: usize, bytes: &[u8]) {
        let holder = self.slots.get(slot.0);
        match holder.memory.slice(start..start.saturating_add(bytes.len())) {
            // SAFETY: as in `fill_zeros`.
            Some(memory) => unsafe { memory.copy_from(bytes) },
            None => self.fill_segments(slot.0, start..start.saturating_add(bytes.len()), Some(bytes)),
        }
    }

    /// Adds zeroing of a range of `target`, which must lie within the store's length.
    pub fn write_zeroes(&mut self, slot: &SlotId, target: TargetId, range: FileRange, how: Zeroing) {
        if range.len_bytes == 0 {
            return;
        }
        // A small write is cheaper than a call into the file system's allocator, but O_DIRECT needs
        // it aligned.
        if how == Zeroing::Keep && range.len_bytes <= ZEROS_BYTES as u64 {
            let zeros = Span::zeros(range.len_bytes as usize);
            let part = Part::new(slot.0, target.0, Action::Write { durable: false }, range.offset_bytes, zeros, false);
            if part.fits_ring(&self.targets[target.0 as usize]) {
                return self.start(part);
            }
        }
        let mut part = Part::new(slot.0, target.0, Action::Zero(how), range.offset_bytes, Span::EMPTY, false);
        part.len_bytes = range.len_bytes;
        self.start(part);
    }

    /// Adds a data sync of `target`.
    pub fn sync(&mut self, slot: &SlotId, target: TargetId) {
        self.start(Part::new(slot.0, target.0, Action::Sync, 0, Span::EMPTY, false));
    }

    /// Makes the request end with `error`, unless it already has an error, once its parts have
    /// ended.
    pub fn fail(&mut self, slot: &SlotId, error: io::Error) {
        self.slots.get(slot.0).fail(error);
    }

    /// Marks the request as having all its parts. It completes when the last of them has ended.
    pub fn end(&mut self, slot: SlotId) {
        self.slots.seal(slot.0);
    }

    /// Submits a request of one read into `range` of `buf`: the hot path.
    #[inline]
    pub fn read_one(
        &mut self,
        tag: u64,
        cookie: u64,
        target: TargetId,
        file_offset_bytes: u64,
        buf: IoBuf,
        range: Range<usize>,
    ) {
        self.one(tag, cookie, target, Action::Read, file_offset_bytes, buf, range);
    }

    /// Submits a request of one write of `range` of `buf`: the hot path.
    #[inline]
    #[expect(clippy::too_many_arguments, reason = "the hot path passes scalars in registers")]
    pub fn write_one(
        &mut self,
        tag: u64,
        cookie: u64,
        target: TargetId,
        file_offset_bytes: u64,
        buf: IoBuf,
        range: Range<usize>,
        durable: bool,
    ) {
        self.one(tag, cookie, target, Action::Write { durable }, file_offset_bytes, buf, range);
    }

    #[inline]
    #[expect(clippy::too_many_arguments, reason = "the hot path passes scalars in registers")]
    fn one(
        &mut self,
        tag: u64,
        cookie: u64,
        target: TargetId,
        action: Action,
        file_offset_bytes: u64,
        buf: IoBuf,
        range: Range<usize>,
    ) {
        let slot = self.occupy(tag, cookie, Some(buf));
        self.transfer(slot, target, action, file_offset_bytes, range);
        self.slots.seal(slot);
    }

    /// Begins a request that another thread completes through the ticket.
    pub fn external(&mut self, tag: u64, cookie: u64, buf: Option<IoBuf>) -> ExternalTicket {
        self.external_with(tag, cookie, buf, None)
    }

    /// As [`Engine::external`], for a request whose payload may be a scatter-gather list.
    pub fn external_with(
        &mut self,
        tag: u64,
        cookie: u64,
        buf: Option<IoBuf>,
        segments: Option<Box<Segments>>,
    ) -> ExternalTicket {
        let slot = self.occupy(tag, cookie, buf);
        self.attach(&SlotId(slot), segments);
        self.slots.hold(slot);
        self.slots.seal(slot);
        self.tickets += 1;
        if matches!(self.link, Link::Shared(_)) {
            // Poll now, not at the next reap: another user of the ring may be the next to sleep on
            // it. If polling fails, the next reap tries again and returns the error.
            let _ = self.listen();
        }
        ExternalTicket::new(slot, &self.externals)
    }

    /// Whether `ticket` was issued by this engine.
    pub fn owns(&self, ticket: &ExternalTicket) -> bool {
        ticket.is_of(&self.externals)
    }

    /// Waits until every request has ended and appends all completions. It waits for lanes no
    /// longer than the [patience](Engine::set_patience), whereas [`Engine::reap`] waits for a lane
    /// without limit. Requests that were begun but not [ended](Engine::end) stay. Call it when
    /// closing.
    ///
    /// # Errors
    /// The ring itself failed. All requests have ended and are appended nevertheless.
    pub fn finish(&mut self, out: &mut Vec<EngineCompletion>) -> io::Result<()> {
        let result = self.settle();
        self.slots.hand_out(out);
        result
    }

    /// Submits all parts (on a shared ring only if it has to wait), waits until at least `at_least`
    /// requests have ended (at most as many as are in flight), and appends all that have ended.
    ///
    /// # Errors
    /// The ring itself failed; this is reported once. All requests that depended on the ring are
    /// appended as [lost](EngineCompletion::lost). Tickets and loans that other threads hold still
    /// complete in later reaps.
    pub fn reap(&mut self, at_least: usize, out: &mut Vec<EngineCompletion>) -> io::Result<()> {
        let result = self.work_until(at_least.min(self.slots.sealed()));
        self.slots.hand_out(out);
        if !self.leaving.is_empty() {
            self.drop_unused_targets();
        }
        result
    }
}

/// The error of two parts that use the same bytes of the buffer when one of them writes to it.
fn overlapping_parts() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "two parts of one request use the same bytes of its buffer")
}

#[cfg(test)]
mod copies_tests;
#[cfg(test)]
mod lane_tests;
#[cfg(all(test, not(miri)))]
mod segment_tests;
#[cfg(test)]
mod tests;
