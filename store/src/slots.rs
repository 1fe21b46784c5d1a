//! The requests of an engine: a table of slots with a free list, and the completed requests that
//! wait to be handed out.
//!
//! A slot owns its request's buffer and counts what it waits for: its parts and its ticket. When
//! the request has all its parts and the last of them has ended, the slot becomes a completion and
//! is freed. Invariant: until then the slot keeps the buffer, and the memory that it shares with
//! the caller, so the kernel always has valid memory to write to.

use crate::{IoBuf, Segments, buffer::Span};
use std::{io, mem, sync::Arc};

/// A completed request.
#[derive(Debug)]
pub struct EngineCompletion {
    /// The tag given at `begin`.
    pub tag: u64,
    /// The number given at `begin` for the caller's bookkeeping; 0 if unused.
    pub cookie: u64,
    /// The request's buffer.
    pub buf: Option<IoBuf>,
    /// The request's scatter-gather list, if it has one instead of a buffer.
    pub segments: Option<Box<Segments>>,
    /// `Ok` if every part succeeded; else the first error.
    pub result: io::Result<()>,
    /// Part of the request was never answered and may still be carried out: a write may reach the
    /// store at any later time. `buf` and `segments` are fresh memory; the originals were leaked.
    pub lost: bool,
}

/// A request that has not ended.
#[derive(Debug)]
pub(crate) struct Slot {
    tag: u64,
    cookie: u64,
    buf: Option<IoBuf>,
    /// The scatter-gather list of a request that has no buffer.
    segments: Option<Box<Segments>>,
    /// The whole buffer. Empty for segments, so that only the requests that have segments look at
    /// them.
    pub(crate) memory: Span,
    /// Whether the buffer belongs to the slab that is registered with the ring.
    pub(crate) registered: bool,
    /// Whether the request has all its parts.
    sealed: bool,
    /// Number of parts and tickets that have not ended.
    pending: u32,
    result: io::Result<()>,
    /// A part of the request was lost; see [`EngineCompletion::lost`].
    lost: bool,
    /// State that few requests need.
    rare: Option<Box<RareState>>,
}

/// State that the hot path does not use.
#[derive(Debug, Default)]
struct RareState {
    /// Memory of its parts outside its buffer.
    shared: Vec<Arc<IoBuf>>,
    /// Memory that is lent to threads and lanes.
    lent: Vec<LentMemory>,
    /// Bounce buffers of reads into memory of another process.
    bounces: Vec<Bounce>,
}

/// A buffer that is read into, and the memory of another process to which the data is then copied.
#[derive(Debug)]
pub(crate) struct Bounce {
    pub(crate) buf: IoBuf,
    pub(crate) into: Span,
}

/// The address range of memory lent to a thread or a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LentMemory {
    start: usize,
    end: usize,
    /// Whether the borrower writes into it.
    fills: bool,
}

impl LentMemory {
    fn new(memory: Span, fills: bool) -> Self {
        let start = memory.address as usize;
        Self { start, end: start + memory.len_bytes, fills }
    }
}

impl Slot {
    /// Sets the result to `error`, unless an earlier error is set.
    pub(crate) fn fail(&mut self, error: io::Error) {
        if self.result.is_ok() {
            self.result = Err(error);
        }
    }

    /// Keeps `bytes` alive until the request has ended.
    pub(crate) fn keep(&mut self, bytes: &Arc<IoBuf>) {
        self.rare.get_or_insert_default().shared.push(Arc::clone(bytes));
    }

    /// The scatter-gather list, if the request has one.
    pub(crate) fn segments(&self) -> Option<&Segments> {
        self.segments.as_deref()
    }

    /// Keeps a bounce buffer until [`Slot::take_bounce`], or until the request has ended.
    pub(crate) fn keep_bounce(&mut self, bounce: Bounce) {
        self.rare.get_or_insert_default().bounces.push(bounce);
    }

    /// Removes and returns the bounce buffer at the address of `memory`, if there is one.
    pub(crate) fn take_bounce(&mut self, memory: Span) -> Option<Bounce> {
        let bounces = &mut self.rare.as_mut()?.bounces;
        let place = bounces.iter().position(|bounce| Span::of(&bounce.buf).address == memory.address)?;
        Some(bounces.swap_remove(place))
    }

    /// Whether `memory` overlaps memory that is lent out, and the borrower or the caller (`fills`)
    /// writes to it.
    pub(crate) fn clashes(&self, memory: Span, fills: bool) -> bool {
        let new = LentMemory::new(memory, fills);
        self.rare.as_ref().is_some_and(|rare| {
            rare.lent.iter().any(|lent| lent.start < new.end && new.start < lent.end && (lent.fills || fills))
        })
    }

    /// Records that `memory` is lent out.
    pub(crate) fn lend(&mut self, memory: Span, fills: bool) {
        self.rare.get_or_insert_default().lent.push(LentMemory::new(memory, fills));
    }

    /// Removes the record that [`Slot::lend`] made.
    pub(crate) fn end_loan(&mut self, memory: Span, fills: bool) {
        let back = LentMemory::new(memory, fills);
        if let Some(rare) = &mut self.rare
            && let Some(place) = rare.lent.iter().position(|&lent| lent == back)
        {
            rare.lent.swap_remove(place);
        }
    }
}

/// The table of requests; see the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    free: Vec<u32>,
    ended: Vec<EngineCompletion>,
    in_flight: usize,
    unsealed: usize,
}

impl Slots {
    /// Requests that have not been handed out.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Requests in flight that will end without further calls of the caller.
    pub(crate) fn sealed(&self) -> usize {
        self.in_flight - self.unsealed
    }

    /// Requests that have ended and wait to be handed out.
    pub(crate) fn ended(&self) -> usize {
        self.ended.len()
    }

    /// Adds a request. It cannot end before it is sealed.
    #[inline]
    pub(crate) fn occupy(&mut self, tag: u64, cookie: u64, buf: Option<IoBuf>, registered: bool) -> u32 {
        self.in_flight += 1;
        self.unsealed += 1;
        let memory = buf.as_ref().map_or(Span::EMPTY, Span::of);
        let slot = Slot {
            tag,
            cookie,
            buf,
            segments: None,
            memory,
            registered,
            sealed: false,
            pending: 0,
            result: Ok(()),
            lost: false,
            rare: None,
        };
        match self.free.pop() {
            Some(index) => {
                self.slots[index as usize] = slot;
                index
            }
            None => {
                self.slots.push(slot);
                u32::try_from(self.slots.len() - 1).expect("more requests in flight than memory could hold")
            }
        }
    }

    /// Gives a request its scatter-gather list.
    ///
    /// # Panics
    /// If the request has segments or parts: the kernel may be using its memory.
    pub(crate) fn attach(&mut self, slot: u32, segments: Box<Segments>) {
        let holder = self.get(slot);
        let is_new = !holder.sealed && holder.pending == 0 && holder.segments.is_none();
        assert!(is_new, "segments were given to a request that has parts or segments");
        holder.segments = Some(segments);
    }

    #[inline]
    pub(crate) fn get(&mut self, slot: u32) -> &mut Slot {
        &mut self.slots[slot as usize]
    }

    /// Counts one more part or ticket that the request waits for.
    ///
    /// # Panics
    /// If the request is sealed. Only a [`SlotId`](crate::SlotId) of another engine can cause this;
    /// its part could name memory that was freed.
    #[inline]
    pub(crate) fn hold(&mut self, slot: u32) {
        let holder = self.get(slot);
        assert!(!holder.sealed, "a part was added to a request that has all its parts");
        holder.pending += 1;
    }

    /// Counts one part or ticket as ended.
    #[inline]
    pub(crate) fn let_go(&mut self, slot: u32, result: io::Result<()>) {
        let holder = self.get(slot);
        if let Err(error) = result {
            holder.fail(error);
        }
        holder.pending -= 1;
        if holder.pending == 0 && holder.sealed {
            self.vacate(slot);
        }
    }

    /// Marks the request as having all its parts.
    ///
    /// # Panics
    /// If the request is sealed already; see [`Slots::hold`].
    #[inline]
    pub(crate) fn seal(&mut self, slot: u32) {
        let holder = self.get(slot);
        assert!(!holder.sealed, "a request was ended twice");
        holder.sealed = true;
        let ended = holder.pending == 0;
        self.unsealed -= 1;
        if ended {
            self.vacate(slot);
        }
    }

    #[inline]
    fn vacate(&mut self, slot: u32) {
        let holder = self.get(slot);
        if holder.rare.is_some() {
            holder.rare = None;
        }
        holder.memory = Span::EMPTY;
        let result = mem::replace(&mut holder.result, Ok(()));
        let (tag, cookie, lost) = (holder.tag, holder.cookie, holder.lost);
        let (buf, segments) = (holder.buf.take(), holder.segments.take());
        let ended = EngineCompletion { tag, cookie, buf, segments, result, lost };
        self.ended.push(ended);
        self.free.push(slot);
    }

    /// Appends all completions to `out`.
    pub(crate) fn hand_out(&mut self, out: &mut Vec<EngineCompletion>) {
        self.in_flight -= self.ended.len();
        if out.is_empty() {
            mem::swap(out, &mut self.ended);
        } else {
            out.append(&mut self.ended);
        }
    }

    /// Counts one part as ended that will never be answered. Leaks the request's memory, since the
    /// kernel or a lane may still use it.
    pub(crate) fn lose(&mut self, slot: u32, error: io::Error) {
        let holder = self.get(slot);
        if !holder.lost {
            holder.lost = true;
            let fresh = holder.buf.as_ref().map(|buf| IoBuf::new(buf.len().max(1)));
            mem::forget(mem::replace(&mut holder.buf, fresh));
            let fresh = holder.segments.as_ref().map(|segments| Box::new(segments.replacement()));
            mem::forget(mem::replace(&mut holder.segments, fresh));
            mem::forget(holder.rare.take());
            holder.registered = false;
            holder.memory = holder.buf.as_ref().map_or(Span::EMPTY, Span::of);
        }
        self.let_go(slot, Err(error));
    }
}
