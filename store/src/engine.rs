//! The engine: what carries out the parts of requests, for one thread, on many stores.
//!
//! A virtual disk cuts a request into *parts*: this range of that store into this stretch of the
//! buffer, zeros there. The engine starts the parts, joins them, and gives back one
//! [`EngineCompletion`] for each request when its last part has ended. It resumes short transfers
//! and falls back where a file system cannot punch or zero.
//!
//! ```text
//!   begin(tag, buf) ─▶ slot ─ read/write/zeroes/sync/fill ... ─▶ end(slot)      a request of several parts
//!   read_one / write_one / sync_one                                              the hot path: one part
//!   external(tag, buf) ─▶ ExternalTicket, completed by another thread            work that must block elsewhere
//!                      reap(at_least, &mut done)
//! ```
//!
//! With a ring, a part is an entry of its submission queue, and nothing is submitted before `reap`,
//! so a whole batch costs one system call. What the ring cannot do never blocks the engine's
//! thread: a store with a [`Lane`] is lent the memory and completes later, and what is left (the
//! replaced pages of an overlay, a transfer that O_DIRECT would refuse) is carried out by a thread
//! of the pool. Stores that never wait (memory), and everything where there is no ring
//! ([`EngineKind::Sync`]), are driven by blocking calls where the part is started.
//!
//! On a [`SharedRing`] `reap(0)` submits nothing and only looks into the engine's mailbox: the
//! ring's `wait` submits for all.
//!
//! Slots (see `slots`) and parts live in two tables with free lists; the number of a part is in the
//! `user_data` of its entry. Neither starting nor ending a part allocates once the tables have
//! grown to the depth in use. How parts are started, waited for and joined is in `engine/work.rs`.
//!
//! Invariants: a slot owns its buffer from `begin` until its completion is handed out, so the
//! kernel never writes into memory that anyone else can reach; dropping the engine first waits for
//! all that is in flight. An engine belongs to one thread and takes no lock, but for the list on
//! which other threads put finished external work.
//!
//! **Requests that are lost.** Two things can keep a part from ever being answered: the ring itself
//! fails, or a lane does not answer within the [patience](Engine::set_patience) of an engine that
//! is being closed. The engine then ends such requests with an error and
//! [`EngineCompletion::lost`], leaks their memory, gives back fresh buffers, and refuses all
//! further parts; [`Engine::has_failed`] says so. A lost write may still reach the store at any
//! later time, so whoever reuses space by counting requests must stop doing so. A ring that fails
//! is told once, by the error of a `reap`.

#![allow(unsafe_code)]

mod leave;
mod segments;
mod settle;
mod work;

pub use crate::external::ExternalTicket;

use crate::{
    IoBuf, Segments, SharedRing, Slab,
    external::{Ended, Externals},
    lane::Lane,
    link::Link,
    part::{Action, LaneUse, Part, Span, Target, ZEROS_BYTES},
    ring::{LANES_MAX, Ring},
    shared::{Mail, Member},
    slots::Slots,
    store::{FileRange, Store, Zeroing},
};
use rustix::io::Errno;
use std::{io, ops::Range, sync::Arc, time::Duration};

/// How long an engine that is closed waits for lanes, unless said otherwise.
pub const LANE_PATIENCE: Duration = Duration::from_secs(30);

/// What moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineKind {
    /// io_uring where the kernel has it, else `pread` and `pwrite`.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// `pread` and `pwrite`, one after the other, in the calling thread.
    Sync,
}

/// A store that was added to an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TargetId(u32);

/// A request that is being put together.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a request that is not ended is never handed out"]
pub struct SlotId(u32);

/// The end of a request.
#[derive(Debug)]
pub struct EngineCompletion {
    /// As given at `begin`.
    pub tag: u64,
    /// As given at `begin`: for the caller's own bookkeeping. 0 says that there is none.
    pub cookie: u64,
    /// The request's buffer.
    pub buf: Option<IoBuf>,
    /// The request's payload in pieces.
    pub segments: Option<Box<Segments>>,
    /// `Ok` when every part succeeded; else the first error.
    pub result: io::Result<()>,
    /// Part of it was never answered, and may still be carried out later: a write may reach the
    /// store at any time. The buffer is another than that which was given.
    pub lost: bool,
}

/// What an engine has done so far, for those who ask what a request costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineStats {
    /// Calls of `io_uring_enter`, on a shared ring those of all its users.
    pub enters: u64,
    /// Parts started, the next included.
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
    /// Parts that it has.
    parts: usize,
    /// It was given parts, or its descriptor was readable, since it was last driven.
    is_due: bool,
    /// Whether the ring polls its descriptor.
    polling: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Engine {
    link: Link,
    /// Stands in the upper half of the `user_data` of all entries.
    user_bits: u64,
    /// Answers from a shared ring, while they are worked off.
    mail: Vec<Mail>,
    targets: Vec<Target>,
    /// Places of stores that have left.
    free_targets: Vec<u32>,
    /// Stores that leave when no part uses them any more.
    leaving: Vec<u32>,
    slots: Slots,
    parts: Vec<Part>,
    free_parts: Vec<u32>,
    /// Parts in the ring.
    in_ring: usize,
    externals: Arc<Externals>,
    /// Tickets and loans that have not come back.
    tickets: usize,
    /// Of these, loans that lanes have.
    lane_parts: usize,
    /// Whether the ring polls the eventfd of the externals.
    polling: bool,
    lanes: Vec<OpenLane>,
    ended_tickets: Vec<Ended>,
    /// Polls that are being taken back.
    cancels: usize,
    /// Parts that will never be heard of again. Their places are not used again.
    lost_parts: Vec<u32>,
    /// Nothing is started any more: parts were lost.
    failed: bool,
    /// They were lost by the ring, which is not looked at again.
    ring_failed: bool,
    patience: Duration,
    stats: EngineStats,
}

impl Engine {
    /// An engine for about `depth` requests in flight. Buffers of `slab` are registered with the
    /// kernel where it takes them.
    ///
    /// # Errors
    /// With [`EngineKind::Uring`], what the kernel says when it gives no ring. The other kinds do
    /// not fail for that.
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

    /// An engine on a ring that others use too.
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
            lost_parts: Vec::new(),
            failed: false,
            ring_failed: false,
            patience: LANE_PATIENCE,
            stats: EngineStats::default(),
        }
    }

    /// What is in force: [`EngineKind::Uring`] or [`EngineKind::Sync`].
    pub fn kind(&self) -> EngineKind {
        if self.link.is_some() { EngineKind::Uring } else { EngineKind::Sync }
    }

    /// What it has done so far.
    pub fn stats(&self) -> EngineStats {
        let enters = match &self.link {
            Link::None => 0,
            Link::Own(ring) => ring.enters,
            Link::Shared(member) => member.ring().enters,
        };
        EngineStats { enters, ..self.stats }
    }

    /// Makes a store known. The same store may be added once only by the caller; the engine keeps
    /// it open until it is [given up](Engine::remove_target).
    pub fn add_target(&mut self, store: &Arc<dyn Store>) -> io::Result<TargetId> {
        self.add(store, false)
    }

    /// As [`Engine::add_target`], but reads that go beyond the end of the store give zeros there:
    /// for raw files whose length is no whole number of sectors.
    pub fn add_target_padded(&mut self, store: &Arc<dyn Store>) -> io::Result<TargetId> {
        self.add(store, true)
    }

    fn add(&mut self, store: &Arc<dyn Store>, padded: bool) -> io::Result<TargetId> {
        let index =
            u32::try_from(self.targets.len()).map_err(|_| io::Error::other("an engine holds at most 2^32 stores"))?;
        let mut target = Target::new(store, padded);
        target.is_plain_file &= !self.failed;
        if let Some(fd) = target.fd {
            target.file_index = self.link.with(|ring| ring.register_file(fd)).flatten();
        } else if let Some(lane) = store.lane().filter(|_| self.link.is_some()) {
            target.lane = Some(self.use_lane(lane, store.len_bytes()?)?);
        }
        if let Some(index) = self.free_targets.pop() {
            self.targets[index as usize] = target;
            return Ok(TargetId(index));
        }
        self.targets.push(target);
        Ok(TargetId(index))
    }

    /// The number of a lane, which several stores may share.
    fn use_lane(&mut self, lane: Arc<dyn Lane>, end_bytes: u64) -> io::Result<LaneUse> {
        let alignment_mask = u64::from(lane.alignment_bytes().max(1)) - 1;
        let place = self.lanes.iter().position(|open| Arc::ptr_eq(&open.lane, &lane)).unwrap_or(self.lanes.len());
        let number = u32::try_from(place)
            .ok()
            .filter(|&number| number < LANES_MAX)
            .ok_or_else(|| io::Error::other("an engine holds at most 65536 lanes"))?;
        if place == self.lanes.len() {
            self.lanes.push(OpenLane { lane, parts: 0, is_due: false, polling: false });
        }
        Ok(LaneUse { number, alignment_mask, end_bytes })
    }

    /// Whether its ring has failed, or a lane was given up: nothing is started any more.
    pub fn has_failed(&self) -> bool {
        self.failed
    }

    /// How long [`Engine::finish`], and the drop, wait for lanes: [`LANE_PATIENCE`] unless said.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Requests begun and not yet handed out by `reap`.
    pub fn in_flight(&self) -> usize {
        self.slots.in_flight()
    }

    /// Whether a reap that does not wait has something to do: requests that have ended, or lanes
    /// that were given parts since they were last driven. Nothing on the ring tells of either, so
    /// the thread must not sleep before.
    pub fn wants_reap(&self) -> bool {
        self.slots.ended() > 0 || self.lane_parts > 0 && self.lanes.iter().any(|open| open.is_due)
    }

    /// Begins a request.
    pub fn begin(&mut self, tag: u64, cookie: u64, buf: Option<IoBuf>) -> SlotId {
        SlotId(self.occupy(tag, cookie, buf))
    }

    #[inline]
    fn occupy(&mut self, tag: u64, cookie: u64, buf: Option<IoBuf>) -> u32 {
        let registered = buf.as_ref().is_some_and(|buf| self.link.has_registered(buf));
        self.slots.occupy(tag, cookie, buf, registered)
    }

    /// Gives a request that was begun without a buffer its payload in pieces, if it has one. What
    /// is said of the buffer elsewhere is meant of the pieces then, one behind the other. Before
    /// its first part.
    ///
    /// # Panics
    /// When the request has segments or a part.
    pub fn attach(&mut self, slot: &SlotId, segments: Option<Box<Segments>>) {
        if let Some(segments) = segments {
            self.slots.attach(slot.0, segments);
        }
    }

    /// Adds a read of `target` at `file_offset_bytes` into `range` of the request's buffer.
    pub fn read(&mut self, slot: &SlotId, target: TargetId, file_offset_bytes: u64, range: Range<usize>) {
        self.transfer(slot.0, target, Action::Read, file_offset_bytes, range);
    }

    /// Adds a write of `range` of the request's buffer to `target`. `durable` asks for RWF_DSYNC.
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

    /// Adds a write of bytes that the caller shares (a bitmap that is the same for every block).
    pub fn write_shared(&mut self, slot: &SlotId, target: TargetId, file_offset_bytes: u64, bytes: &Arc<IoBuf>) {
        let memory = Span::of(bytes);
        if memory.len_bytes > 0 {
            self.slots.get(slot.0).keep(bytes);
            self.start(Part::new(slot.0, target.0, Action::Write { durable: false }, file_offset_bytes, memory, false));
        }
    }

    /// Fills `range` of the request's buffer with zeros, at once. No part of the request may be
    /// reading into that range.
    pub fn fill_zeros(&mut self, slot: &SlotId, range: Range<usize>) {
        let holder = self.slots.get(slot.0);
        match holder.memory.slice(range.clone()) {
            Some(memory) if holder.clashes(memory, true) => holder.fail(overlapping_parts()),
            // SAFETY: the memory is the slot's buffer, which nobody else reaches; it is not lent,
            // and the kernel is not using this range of it, or, if the caller breaks its promise,
            // both write bytes that nobody has a reference to.
            Some(memory) => unsafe { memory.fill_zeros() },
            None => self.fill_segments(slot.0, range, None),
        }
    }

    /// Puts `bytes` into the request's buffer at `start`, at once. No part of the request may be
    /// reading into that range.
    pub fn fill(&mut self, slot: &SlotId, start: usize, bytes: &[u8]) {
        let holder = self.slots.get(slot.0);
        match holder.memory.slice(start..start.saturating_add(bytes.len())) {
            // SAFETY: as in `fill_zeros`.
            Some(memory) => unsafe { memory.copy_from(bytes) },
            None => self.fill_segments(slot.0, start..start.saturating_add(bytes.len()), Some(bytes)),
        }
    }

    /// Adds zeros over a range of `target`, which must lie within its length.
    pub fn write_zeroes(&mut self, slot: &SlotId, target: TargetId, range: FileRange, how: Zeroing) {
        if range.len_bytes == 0 {
            return;
        }
        // A small write is cheaper than a call into the file system's allocator, and for O_DIRECT
        // needs to be aligned.
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

    /// Makes the request fail (with the first error that it gets), once its parts have ended.
    pub fn fail(&mut self, slot: &SlotId, error: io::Error) {
        self.slots.get(slot.0).fail(error);
    }

    /// Says that the request has all its parts. With none left in flight, it is ready to be reaped.
    pub fn end(&mut self, slot: SlotId) {
        self.slots.seal(slot.0);
    }

    /// A request of one read: the hot path. It goes into `range` of `buf`.
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

    /// A request of one write: the hot path. It comes from `range` of `buf`.
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

    /// A request of one data sync.
    pub fn sync_one(&mut self, tag: u64, cookie: u64, target: TargetId) {
        let slot = self.begin(tag, cookie, None);
        self.sync(&slot, target);
        self.end(slot);
    }

    /// Begins a request that another thread ends by the ticket.
    pub fn external(&mut self, tag: u64, cookie: u64, buf: Option<IoBuf>) -> ExternalTicket {
        self.external_with(tag, cookie, buf, None)
    }

    /// As [`Engine::external`], for a request whose payload may be in pieces.
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
            // Now, and not when this is next reaped: whoever shares the ring may be the next to
            // sleep on it. Should it fail, the next reap tries again and tells.
            let _ = self.listen();
        }
        ExternalTicket::new(slot, &self.externals)
    }

    /// Whether a ticket is for a request of this engine.
    pub fn owns(&self, ticket: &ExternalTicket) -> bool {
        ticket.is_of(&self.externals)
    }

    /// Waits until everything has ended, for lanes no longer than the
    /// [patience](Engine::set_patience), and appends all that has. Requests that were begun and not
    /// [ended](Engine::end) stay. For whoever closes: [`Engine::reap`] waits for a lane without a
    /// limit.
    ///
    /// # Errors
    /// The ring itself has failed. All requests have ended, and are appended, all the same.
    pub fn finish(&mut self, out: &mut Vec<EngineCompletion>) -> io::Result<()> {
        let result = self.settle();
        self.slots.hand_out(out);
        result
    }

    /// Starts all parts (on a shared ring: when it has to wait), waits until at least `at_least`
    /// requests have ended (never more than are in flight), and appends all that have.
    ///
    /// # Errors
    /// The ring itself has failed, which is told once. All requests that depended on the ring are
    /// appended as [lost](EngineCompletion::lost); tickets and loans that other threads hold still
    /// come by later reaps.
    pub fn reap(&mut self, at_least: usize, out: &mut Vec<EngineCompletion>) -> io::Result<()> {
        let result = self.work_until(at_least.min(self.slots.sealed()));
        self.slots.hand_out(out);
        if !self.leaving.is_empty() {
            self.let_leave();
        }
        result
    }
}

/// Two parts of a request use the same bytes of its buffer, and one of them writes into it.
fn overlapping_parts() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "two parts of one request use the same bytes of its buffer")
}

/// Whether the system gives no ring at all: switched off (by sysctl, seccomp or a container),
/// unknown or too old, or more than may be locked in memory.
fn lacks_ring(error: &io::Error) -> bool {
    let refusals = [Errno::NOSYS, Errno::PERM, Errno::ACCESS, Errno::NOMEM, Errno::INVAL, Errno::OPNOTSUPP];
    error.kind() == io::ErrorKind::Unsupported
        || Errno::from_io_error(error).is_some_and(|errno| refusals.contains(&errno))
}

#[cfg(test)]
mod lane_tests;
#[cfg(all(test, not(miri)))]
mod segment_tests;
#[cfg(test)]
mod tests;
