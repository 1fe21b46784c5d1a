//! What is in flight on a connection: slots and calls.
//!
//! A *slot* is a request of a queue, or of an engine that uses the export as a store; it owns the
//! buffer, or the loan of it, until it has ended. A *call* is one message of the protocol that
//! works for a slot. Mostly there is one call to a slot; a range that is longer than the server
//! takes at once is worked off by several, a few at a time, and a write that must be durable is
//! followed by a flush where the server does not know FUA.
//!
//! A call's *cookie* is its place in the table and a generation, so that an answer to a call that
//! has ended, or that never was, is found out.

use super::{ClientError, coverage::Coverage};
use crate::wire::{Command, CommandFlags, Descriptor};
use diskwright_store::{Completion, IoBuf, Loan, Segments};
use std::{io, mem, ops::Range};

/// A table of things with numbers, whose places are used again.
#[derive(Debug)]
pub(super) struct Table<T> {
    places: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { places: Vec::new(), free: Vec::new() }
    }
}

impl<T> Table<T> {
    pub(super) fn insert(&mut self, value: T) -> u32 {
        if let Some(index) = self.free.pop() {
            self.places[index as usize] = Some(value);
            return index;
        }
        self.places.push(Some(value));
        u32::try_from(self.places.len() - 1).expect("more in flight than memory could hold")
    }

    pub(super) fn get(&self, index: u32) -> Option<&T> {
        self.places.get(index as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        self.places.get_mut(index as usize)?.as_mut()
    }

    pub(super) fn remove(&mut self, index: u32) -> Option<T> {
        let value = self.places.get_mut(index as usize)?.take()?;
        self.free.push(index);
        Some(value)
    }

    pub(super) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Numbers of all that are there.
    pub(super) fn indices(&self) -> Vec<u32> {
        (0..).zip(&self.places).filter(|(_, place)| place.is_some()).map(|(index, _)| index).collect()
    }
}

/// What a slot is worked off by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// Calls of this command over the range.
    Calls(Command, CommandFlags),
    /// Writes of zeros over the range, because the server has no better way.
    Zeros(CommandFlags),
    /// Block status of the range, as far as the server tells with one answer.
    Status,
}

/// The inbox of slots that carry a loan: they are ended by giving it back.
pub(super) const NO_INBOX: u32 = u32::MAX;

/// Payload of a slot.
#[derive(Debug)]
pub(super) enum Memory {
    None,
    /// The request's own buffer.
    Buf(IoBuf),
    /// The request's own pieces. A call moves bytes of one of them.
    Segments(Box<Segments>),
    /// A copy of the request's pieces, which cannot be moved as they are, from this byte of them
    /// on.
    Copied {
        buf: IoBuf,
        segments: Box<Segments>,
        start: usize,
    },
    /// A piece of a request of an engine.
    Loan(Loan),
}

impl Memory {
    /// Bytes that one call sends.
    pub(super) fn get(&self, range: Range<usize>) -> Option<&[u8]> {
        match self {
            Self::None => None,
            Self::Buf(buf) | Self::Copied { buf, .. } => buf.get(range),
            Self::Segments(segments) => segments.slice(range),
            Self::Loan(loan) => loan.bytes().get(range),
        }
    }

    /// Where what one call receives is put.
    pub(super) fn get_mut(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        match self {
            Self::None => None,
            Self::Buf(buf) | Self::Copied { buf, .. } => buf.get_mut(range),
            Self::Segments(segments) => segments.slice_mut(range),
            Self::Loan(loan) => loan.bytes_mut().get_mut(range),
        }
    }

    /// Most bytes from `at` on that one call may move.
    pub(super) fn left_in_piece(&self, at: usize) -> u64 {
        match self {
            Self::Segments(segments) => (segments.left_in_segment(at) as u64).max(1),
            _ => u64::MAX,
        }
    }
}

/// A request of a queue or of an engine.
#[derive(Debug)]
pub(super) struct Slot {
    /// Whose it is; [`NO_INBOX`] with a loan.
    pub(super) inbox: u32,
    pub(super) tag: u64,
    pub(super) memory: Memory,
    pub(super) work: Work,
    /// The range on the export.
    pub(super) start_bytes: u64,
    pub(super) end_bytes: u64,
    /// Where in the buffer the range begins.
    pub(super) base_bytes: usize,
    /// What comes before it has been called for.
    pub(super) next_bytes: u64,
    /// Calls that have not ended.
    pub(super) pending: u32,
    /// A flush is to follow, as the server does not know FUA.
    pub(super) then_flush: bool,
    pub(super) error: Option<ClientError>,
    /// What block status told.
    pub(super) status: StatusFound,
}

impl Slot {
    /// Work on `start_bytes..end_bytes` of the export.
    pub(super) fn new(inbox: u32, work: Work, start_bytes: u64, end_bytes: u64, memory: Memory) -> Self {
        Self {
            inbox,
            tag: 0,
            memory,
            work,
            start_bytes,
            end_bytes,
            base_bytes: 0,
            next_bytes: start_bytes,
            pending: 0,
            then_flush: false,
            error: None,
            status: StatusFound::default(),
        }
    }

    /// Where the byte at `offset_bytes` of the export lies in the buffer.
    pub(super) fn place(&self, offset_bytes: u64) -> usize {
        self.base_bytes + (offset_bytes - self.start_bytes) as usize
    }

    pub(super) fn fail(&mut self, error: ClientError) {
        self.error.get_or_insert(error);
    }
}

/// Status of a range, in the contexts that there are.
#[derive(Debug, Clone, Default)]
pub(super) struct StatusFound {
    pub(super) allocation: Vec<Descriptor>,
    pub(super) depth: Vec<Descriptor>,
}

/// A message that has not been answered to the end.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) generation: u32,
    pub(super) slot: u32,
    pub(super) command: Command,
    pub(super) flags: CommandFlags,
    pub(super) offset_bytes: u64,
    pub(super) len_bytes: u64,
    /// What of a read has come.
    pub(super) coverage: Coverage,
    /// Its payload, which lies in the slot's buffer, has not been sent to the end; the slot cannot
    /// end before.
    pub(super) unsent: bool,
    pub(super) error: Option<ClientError>,
}

/// Calls and slots.
#[derive(Debug, Default)]
pub(super) struct Tables {
    pub(super) slots: Table<Slot>,
    pub(super) calls: Table<Call>,
    generation: u32,
    /// Reads whose answers are worth being received without a copy.
    pub(super) large_reads: usize,
}

/// Reads from this length on are received straight into their buffer.
const LARGE_BYTES: u64 = 32 << 10;

impl Tables {
    /// A new call; gives its cookie.
    pub(super) fn begin(
        &mut self,
        slot: u32,
        command: Command,
        flags: CommandFlags,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> u64 {
        let generation = self.next_generation();
        let coverage = Coverage::default();
        self.large_reads += usize::from(is_large(command, len_bytes));
        let call =
            Call { generation, slot, command, flags, offset_bytes, len_bytes, coverage, unsent: false, error: None };
        let index = self.calls.insert(call);
        if let Some(slot) = self.slots.get_mut(slot) {
            slot.pending += 1;
        }
        cookie(generation, index)
    }

    /// Never 0, which is the generation of a call that has been answered.
    fn next_generation(&mut self) -> u32 {
        self.generation = self.generation.checked_add(1).unwrap_or(1);
        self.generation
    }

    /// The call that a reply answers.
    pub(super) fn find(&self, cookie: u64) -> Option<u32> {
        let index = cookie as u32;
        let generation = (cookie >> 32) as u32;
        self.calls.get(index).filter(|call| call.generation == generation && generation != 0).map(|_| index)
    }

    /// A call has ended. Gives its slot.
    pub(super) fn end(&mut self, index: u32) -> Option<u32> {
        let call = self.calls.remove(index)?;
        self.large_reads -= usize::from(is_large(call.command, call.len_bytes));
        let slot = self.slots.get_mut(call.slot)?;
        slot.pending -= 1;
        if let Some(error) = call.error {
            slot.fail(error);
        }
        Some(call.slot)
    }

    /// The cookie of a call, which is made again under a new generation: what was sent of it before
    /// counts no more.
    pub(super) fn renew(&mut self, index: u32) -> Option<u64> {
        let generation = self.next_generation();
        let call = self.calls.get_mut(index)?;
        call.generation = generation;
        call.coverage = Coverage::default();
        call.error = None;
        Some(cookie(call.generation, index))
    }
}

fn is_large(command: Command, len_bytes: u64) -> bool {
    command == Command::READ && len_bytes >= LARGE_BYTES
}

fn cookie(generation: u32, index: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(index)
}

/// A slot that has ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) completion: Completion,
    pub(super) status: StatusFound,
}

impl Slot {
    /// The end of it: a loan goes back at once, anything else is for the inbox.
    pub(super) fn ended(mut self) -> Option<Ended> {
        let result = match self.error.take() {
            None => Ok(()),
            Some(error) => Err(io::Error::from(error)),
        };
        let is_read = matches!(self.work, Work::Calls(Command::READ, _));
        let (buf, segments, result) = match self.memory {
            Memory::Loan(loan) => {
                loan.complete(result);
                return None;
            }
            Memory::Buf(buf) => (Some(buf), None, result),
            Memory::Segments(segments) => (None, Some(segments), result),
            Memory::Copied { buf, mut segments, start } => {
                let result = if is_read { result.and_then(|()| segments.copy_in(start, &buf)) } else { result };
                (None, Some(segments), result)
            }
            Memory::None => (None, None, result),
        };
        let completion = Completion { tag: self.tag, buf, segments, result };
        Some(Ended { completion, status: mem::take(&mut self.status) })
    }
}

/// What has ended for one queue.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) ended: Vec<Ended>,
    /// Slots of this queue that have not been handed out.
    pub(super) in_flight: usize,
}
