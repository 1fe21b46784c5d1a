//! Requests in flight on a connection: slots and calls.
//!
//! A *slot* is a request of a queue, or of an engine that uses the export as a store. It owns the
//! buffer, or the loan of it, until it has ended. A *call* is one message of the protocol on behalf
//! of a slot. Most slots need one call. A range longer than the server's limit is split into
//! several calls, a few in flight at a time. If the server does not support FUA, a durable write is
//! followed by a flush.
//!
//! A call's *cookie* is its index in the table and a generation, which detects an answer to a call
//! that has ended or never existed.

use super::{ClientError, coverage::Coverage};
use crate::wire::{Command, CommandFlags, Descriptor};
use diskwright_store::{Completion, IoBuf, Loan, Segments, SlotMap};
use std::{io, mem, ops::Range};

/// The commands that carry out a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SlotWork {
    /// Calls of this command over the range.
    Calls(Command, CommandFlags),
    /// Writes of zeros over the range, if the server does not support WRITE_ZEROES.
    Zeros(CommandFlags),
    /// One block status request for the range. The server may report less.
    Status,
}

/// The inbox of slots with a loan, which end by completing it.
pub(super) const NO_INBOX: u32 = u32::MAX;

/// The payload memory of a slot.
#[derive(Debug)]
pub(super) enum Memory {
    None,
    /// The request's own buffer.
    Buf(IoBuf),
    /// The request's scatter-gather list. A call transfers bytes of one segment.
    Segments(Box<Segments>),
    /// A copy of the request's segments from payload offset `start` on, because they cannot be
    /// transferred directly.
    Copied {
        buf: IoBuf,
        segments: Box<Segments>,
        start: usize,
    },
    /// Memory lent by an engine.
    Loan(Loan),
}

impl Memory {
    /// The bytes that one call sends.
    pub(super) fn get(&self, range: Range<usize>) -> Option<&[u8]> {
        match self {
            Self::None => None,
            Self::Buf(buf) | Self::Copied { buf, .. } => buf.get(range),
            Self::Segments(segments) => segments.slice(range),
            Self::Loan(loan) => loan.bytes().get(range),
        }
    }

    /// The memory that one call fills.
    pub(super) fn get_mut(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        match self {
            Self::None => None,
            Self::Buf(buf) | Self::Copied { buf, .. } => buf.get_mut(range),
            Self::Segments(segments) => segments.slice_mut(range),
            Self::Loan(loan) => loan.bytes_mut().get_mut(range),
        }
    }

    /// Maximum number of bytes from `at` on that one call may transfer.
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
    /// The inbox of its queue; [`NO_INBOX`] with a loan.
    pub(super) inbox: u32,
    pub(super) tag: u64,
    pub(super) memory: Memory,
    pub(super) work: SlotWork,
    /// The range on the export.
    pub(super) start_bytes: u64,
    pub(super) end_bytes: u64,
    /// Offset of the range's first byte in the buffer.
    pub(super) base_bytes: usize,
    /// Calls were started up to this offset.
    pub(super) next_bytes: u64,
    /// Number of calls that have not ended.
    pub(super) pending: u32,
    /// Whether a flush must follow, because the server does not support FUA.
    pub(super) then_flush: bool,
    pub(super) error: Option<ClientError>,
    /// The block status received.
    pub(super) status: StatusFound,
}

impl Slot {
    /// A slot for `start_bytes..end_bytes` of the export.
    pub(super) fn new(inbox: u32, work: SlotWork, start_bytes: u64, end_bytes: u64, memory: Memory) -> Self {
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

    /// Position in the buffer of the byte at `offset_bytes` of the export.
    pub(super) fn place(&self, offset_bytes: u64) -> usize {
        self.base_bytes + (offset_bytes - self.start_bytes) as usize
    }

    pub(super) fn fail(&mut self, error: ClientError) {
        self.error.get_or_insert(error);
    }
}

/// Block status of a range, in each context.
#[derive(Debug, Clone, Default)]
pub(super) struct StatusFound {
    pub(super) allocation: Vec<Descriptor>,
    pub(super) depth: Vec<Descriptor>,
}

/// A message that was not answered completely.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) generation: u32,
    pub(super) slot: u32,
    pub(super) command: Command,
    pub(super) flags: CommandFlags,
    pub(super) offset_bytes: u64,
    pub(super) len_bytes: u64,
    /// The received ranges of a read.
    pub(super) coverage: Coverage,
    /// Whether some of its payload, which lies in the slot's buffer, was not sent. The slot cannot
    /// end before.
    pub(super) unsent: bool,
    /// The answered changes that a flush covers.
    pub(super) covers: u64,
    pub(super) error: Option<ClientError>,
}

/// The calls and slots of a connection.
#[derive(Debug, Default)]
pub(super) struct Tables {
    pub(super) slots: SlotMap<Slot>,
    pub(super) calls: SlotMap<Call>,
    generation: u32,
    /// Number of large reads in flight, whose data should be received without a copy.
    pub(super) large_reads: usize,
}

/// Minimum length of a read whose data is received directly into its buffer.
const LARGE_BYTES: u64 = 32 << 10;

impl Tables {
    /// Adds a call and returns its cookie.
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
        let (unsent, covers, error) = (false, 0, None);
        let call = Call { generation, slot, command, flags, offset_bytes, len_bytes, coverage, unsent, covers, error };
        let index = self.calls.insert(call);
        if let Some(slot) = self.slots.get_mut(slot) {
            slot.pending += 1;
        }
        cookie(generation, index)
    }

    /// A new generation; never 0, which marks a call that was answered.
    fn next_generation(&mut self) -> u32 {
        self.generation = self.generation.checked_add(1).unwrap_or(1);
        self.generation
    }

    /// The call with this cookie, if it is in flight.
    pub(super) fn find(&self, cookie: u64) -> Option<u32> {
        let index = cookie as u32;
        let generation = (cookie >> 32) as u32;
        self.calls.get(index).filter(|call| call.generation == generation && generation != 0).map(|_| index)
    }

    /// Removes a call that has ended. Returns its slot.
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

    /// Gives a call a new generation for sending it again, and returns its cookie. Answers to the
    /// old message are no longer accepted.
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
pub(super) struct EndedSlot {
    pub(super) completion: Completion,
    pub(super) status: StatusFound,
}

impl Slot {
    /// Ends the slot: completes its loan, or returns the completion for its inbox.
    pub(super) fn ended(mut self) -> Option<EndedSlot> {
        let result = match self.error.take() {
            None => Ok(()),
            Some(error) => Err(io::Error::from(error)),
        };
        let is_read = matches!(self.work, SlotWork::Calls(Command::READ, _));
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
        Some(EndedSlot { completion, status: mem::take(&mut self.status) })
    }
}

/// Completions for one queue.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) ended: Vec<EndedSlot>,
    /// Slots of this queue that were not handed out.
    pub(super) in_flight: usize,
}
