//! Requests and commands in flight on a queue.
//!
//! A *slot* is a request of the block queue. It owns the buffer until it has ended. A *call* is one
//! command on behalf of a slot; its id is its index. Most slots need one call. A range longer than
//! the target's limit is carried out by several, as many as there are free ids.

use super::session::refused;
use crate::wire::{Status, nvm};
use diskwright_store::{Completion, IoBuf, Segments, SlotMap};
use std::{io, ops::Range};

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
    pub(super) fn get(&self, range: Range<usize>) -> Option<&[u8]> {
        match self {
            Self::None => None,
            Self::Buf(buf) | Self::Copied { buf, .. } => buf.get(range),
        }
    }

    pub(super) fn get_mut(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
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
    pub(super) opcode: u8,
    /// Bits of dword 12 besides the number of blocks.
    pub(super) flags: u32,
    pub(super) memory: Memory,
    /// Offset of the range's first byte in the memory.
    pub(super) base_bytes: usize,
    pub(super) start_bytes: u64,
    pub(super) end_bytes: u64,
    /// Calls were started up to this offset.
    pub(super) next_bytes: u64,
    /// Calls that have not ended.
    pub(super) pending: u32,
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
                let reads = self.opcode == nvm::READ;
                let result = if reads { result.and_then(|()| segments.copy_in(start, &buf)) } else { result };
                (None, Some(segments), result)
            }
        };
        Completion { tag: self.tag, buf, segments, result }
    }
}

/// A command in flight.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) slot: u32,
    pub(super) opcode: u8,
    pub(super) offset_bytes: u64,
    pub(super) len_bytes: u64,
    /// Where its data lie in the slot's memory.
    pub(super) memory_at: usize,
    /// Of a read: bytes received. Of a write: bytes that were asked for.
    pub(super) moved_bytes: usize,
    /// Parts of its payload that were queued and not sent.
    pub(super) unsent: u32,
    /// How it ended. The call ends when its payload was sent, too.
    pub(super) status: Option<Status>,
}

/// The slots and calls of a queue.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) slots: SlotMap<Slot>,
    calls: Vec<Option<Call>>,
    free: Vec<u16>,
    /// Large reads in flight, whose data should be received without a copy.
    pub(super) large_reads: usize,
}

/// Minimum length of a read whose data are received directly into its buffer.
const LARGE_BYTES: u64 = 32 << 10;

impl Tables {
    pub(super) fn new(entries: u16) -> Self {
        Self {
            slots: SlotMap::default(),
            calls: (0..entries).map(|_| None).collect(),
            free: (0..entries).rev().collect(),
            large_reads: 0,
        }
    }

    pub(super) fn has_free_call(&self) -> bool {
        !self.free.is_empty()
    }

    pub(super) fn calls_in_flight(&self) -> usize {
        self.calls.len() - self.free.len()
    }

    /// Adds a call. Returns its id; `None` if all are in use.
    pub(super) fn begin(&mut self, call: Call) -> Option<u16> {
        let cid = self.free.pop()?;
        self.large_reads += usize::from(is_large(&call));
        if let Some(slot) = self.slots.get_mut(call.slot) {
            slot.pending += 1;
        }
        self.calls[usize::from(cid)] = Some(call);
        Some(cid)
    }

    pub(super) fn call(&mut self, cid: u16) -> Option<&mut Call> {
        self.calls.get_mut(usize::from(cid))?.as_mut()
    }

    /// The memory for data of a call, counted from its start.
    pub(super) fn place(&mut self, cid: u16, range: Range<usize>) -> Option<&mut [u8]> {
        let call = self.calls.get(usize::from(cid))?.as_ref()?;
        let (slot, at) = (call.slot, call.memory_at);
        self.slots.get_mut(slot)?.memory.get_mut(at + range.start..at + range.end)
    }

    /// The same, to be sent.
    pub(super) fn payload(&self, cid: u32, range: Range<usize>) -> Option<&[u8]> {
        let call = self.calls.get(cid as usize)?.as_ref()?;
        let at = call.memory_at;
        self.slots.get(call.slot)?.memory.get(at + range.start..at + range.end)
    }

    /// Ends a call whose completion has come and whose payload was sent. Returns its slot.
    pub(super) fn end(&mut self, cid: u16, peer: &str) -> Option<u32> {
        let entry = self.calls.get_mut(usize::from(cid))?;
        let call = entry.take_if(|call| call.unsent == 0 && call.status.is_some())?;
        self.free.push(cid);
        self.large_reads -= usize::from(is_large(&call));
        let slot = self.slots.get_mut(call.slot)?;
        slot.pending -= 1;
        if let Some(status) = call.status.filter(|status| !status.is_success()) {
            let error = refused(peer, name_of(call.opcode), call.offset_bytes, call.len_bytes, status);
            slot.error.get_or_insert(error);
        }
        Some(call.slot)
    }
}

fn is_large(call: &Call) -> bool {
    call.opcode == nvm::READ && call.len_bytes >= LARGE_BYTES
}

fn name_of(opcode: u8) -> &'static str {
    match opcode {
        nvm::READ => "a read",
        nvm::WRITE => "a write",
        nvm::FLUSH => "a flush",
        _ => "write zeroes",
    }
}
