//! Requests and commands in flight on a queue.
//!
//! A *slot* is a request of the block queue. It owns the buffer until it has ended. A *call* is one
//! command on behalf of a slot; its id is its index. Most slots need one call. A range longer than
//! the server's limit is carried out by several, as many as there are free ids. A call has ended
//! when it has an outcome and all of its payload that was queued has been sent.

use crate::{Completion, IoBuf, Operation, Segments, SlotMap};
use std::{fmt, io, ops::Range, time::Duration};

/// Minimum length of a read whose data are received directly into its buffer.
const LARGE_BYTES: u64 = 32 << 10;

/// The payload memory of a slot.
#[derive(Debug)]
pub(super) enum Memory {
    None,
    /// The request's own buffer.
    Buf(IoBuf),
    /// A copy of the request's segments from payload offset `start` on.
    Copied {
        buf: IoBuf,
        segments: Box<Segments>,
        start: usize,
    },
}

impl Memory {
    fn get(&self, range: Range<usize>) -> Option<&[u8]> {
        match self {
            Self::None => None,
            Self::Buf(buf) | Self::Copied { buf, .. } => buf.get(range),
        }
    }

    fn get_mut(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        match self {
            Self::None => None,
            Self::Buf(buf) | Self::Copied { buf, .. } => buf.get_mut(range),
        }
    }
}

/// A request of the block queue.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) tag: u64,
    pub(super) operation: Operation,
    pub(super) fua: bool,
    pub(super) memory: Memory,
    /// Offset of the range's first byte in the memory.
    pub(super) base_bytes: usize,
    pub(super) start_bytes: u64,
    pub(super) end_bytes: u64,
    /// Calls were started up to this offset.
    pub(super) next_bytes: u64,
    /// Whether calls are still to be started.
    pub(super) waits: bool,
    /// Calls that have not ended.
    pub(super) pending: u32,
    /// Of a flush: writes that had ended when it was pushed.
    pub(super) covers: u64,
    pub(super) error: Option<io::Error>,
}

impl Slot {
    /// Ends the slot.
    pub(super) fn ended(self) -> Completion {
        let result = self.error.map_or(Ok(()), Err);
        let (buf, segments, result) = match self.memory {
            Memory::None => (None, None, result),
            Memory::Buf(buf) => (Some(buf), None, result),
            Memory::Copied { buf, mut segments, start } => {
                let reads = self.operation == Operation::Read;
                let result = if reads { result.and_then(|()| segments.copy_in(start, &buf)) } else { result };
                (None, Some(segments), result)
            }
        };
        Completion { tag: self.tag, buf, segments, result }
    }
}

/// How a call ended.
#[derive(Debug)]
pub enum Outcome {
    /// With success or with an error.
    Done(io::Result<()>),
    /// The server asks to send it again.
    Again {
        /// How long to wait before.
        after: Duration,
        /// The error if it has been sent too often.
        error: io::Error,
    },
}

/// A command in flight.
#[derive(Debug)]
pub struct Call {
    pub(super) slot: u32,
    /// What it does.
    pub operation: Operation,
    /// Whether its data are durable when it ends.
    pub fua: bool,
    /// Where its range begins, in bytes.
    pub offset_bytes: u64,
    /// Length of its range in bytes.
    pub len_bytes: u64,
    /// Where its data lie in the slot's memory.
    pub(super) memory_at: usize,
    /// Of a read: bytes received. Of a write: bytes that were sent or queued.
    pub moved_bytes: usize,
    /// How often it was sent before.
    pub tries: u32,
    /// Parts of its payload that were queued and not sent.
    pub(super) unsent: u32,
    pub(super) outcome: Option<Outcome>,
}

impl Call {
    /// Whether the server has not answered yet.
    pub fn is_open(&self) -> bool {
        self.outcome.is_none()
    }

    /// Bytes of payload that are transferred.
    pub fn payload_bytes(&self) -> u64 {
        if matches!(self.operation, Operation::Read | Operation::Write) { self.len_bytes } else { 0 }
    }

    /// The error of a server's answer.
    pub fn refused(&self, peer: &str, kind: io::ErrorKind, answer: impl fmt::Display) -> io::Error {
        let what = match self.operation {
            Operation::Read => "a read",
            Operation::Write => "a write",
            Operation::Flush => "a flush",
            Operation::WriteZeroes => "write zeroes",
            Operation::Discard => "a discard",
        };
        let Self { offset_bytes, len_bytes, .. } = self;
        let text = format!("{peer}: the target answered {what} of {len_bytes} bytes at {offset_bytes} with: {answer}");
        io::Error::new(kind, text)
    }

    fn is_large_read(&self) -> bool {
        self.operation == Operation::Read && self.len_bytes >= LARGE_BYTES
    }
}

/// The slots and calls of a queue.
#[derive(Debug)]
pub struct Calls {
    pub(super) slots: SlotMap<Slot>,
    calls: Vec<Option<Call>>,
    free: Vec<u16>,
    /// Calls that have ended.
    ended: Vec<u16>,
    /// Large reads in flight, whose data should be received without a copy.
    pub(super) large_reads: usize,
}

impl Calls {
    /// Tables for at most so many calls.
    pub(super) fn new(most: u16) -> Self {
        Self {
            slots: SlotMap::default(),
            calls: (0..most).map(|_| None).collect(),
            free: (0..most).rev().collect(),
            ended: Vec::new(),
            large_reads: 0,
        }
    }

    pub(super) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.calls.len() - self.free.len()
    }

    /// Adds a call. Returns its id; `None` if all are in use.
    pub(super) fn insert(&mut self, call: Call) -> Option<u16> {
        let id = self.free.pop()?;
        self.large_reads += usize::from(call.is_large_read());
        self.calls[usize::from(id)] = Some(call);
        Some(id)
    }

    /// A call in flight.
    pub fn get(&mut self, id: u16) -> Option<&mut Call> {
        self.calls.get_mut(usize::from(id))?.as_mut()
    }

    /// The memory for data of a call, counted from its start.
    pub fn memory_mut(&mut self, id: u16, range: Range<usize>) -> Option<&mut [u8]> {
        let call = self.calls.get(usize::from(id))?.as_ref()?;
        let (slot, at) = (call.slot, call.memory_at);
        self.slots.get_mut(slot)?.memory.get_mut(at + range.start..at + range.end)
    }

    /// The same, to be sent.
    pub fn memory(&self, id: u32, range: Range<usize>) -> Option<&[u8]> {
        let call = self.calls.get(id as usize)?.as_ref()?;
        let at = call.memory_at;
        self.slots.get(call.slot)?.memory.get(at + range.start..at + range.end)
    }

    /// Counts a part of a call's payload that was queued in the
    /// [`Outbound`](crate::Outbound).
    pub fn queued(&mut self, id: u16) {
        if let Some(call) = self.get(id) {
            call.unsent += 1;
        }
    }

    /// A part of a call's payload was sent.
    pub(super) fn sent(&mut self, id: u16) {
        if let Some(call) = self.get(id) {
            call.unsent -= 1;
            if call.unsent == 0 && call.outcome.is_some() {
                self.ended.push(id);
            }
        }
    }

    /// The server has answered a call.
    pub fn answer(&mut self, id: u16, outcome: Outcome) {
        if let Some(call) = self.get(id) {
            call.outcome = Some(outcome);
            if call.unsent == 0 {
                self.ended.push(id);
            }
        }
    }

    /// Takes a call that has ended.
    pub(super) fn take_ended(&mut self) -> Option<Call> {
        let id = self.ended.pop()?;
        let call = self.calls.get_mut(usize::from(id))?.take()?;
        self.free.push(id);
        self.large_reads -= usize::from(call.is_large_read());
        Some(call)
    }

    /// Forgets all calls.
    pub(super) fn clear(&mut self) {
        *self = Self { slots: std::mem::take(&mut self.slots), ..Self::new(self.calls.len() as u16) };
    }
}
