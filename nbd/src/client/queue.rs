//! A thread's queue to an export: converts requests of the block queue to slots of a lane.

use super::{
    lane::Lane,
    tables::{EndedSlot, Memory, Slot, SlotWork},
};
use crate::wire::{Command, CommandFlags, TransmissionFlags};
use diskwright_store::{
    BlockQueue, Completion, Geometry, IoBuf, Operation, PushError, Request, Segments, queue::validate,
};
use std::{io, sync::Arc};

/// A queue of one thread; see the module documentation.
#[derive(Debug)]
pub(super) struct NbdQueue {
    lane: Arc<Lane>,
    inbox: u32,
    geometry: Geometry,
    /// End of the export; the geometry may be rounded up.
    export_bytes: u64,
    flags: TransmissionFlags,
    depth: usize,
    in_flight: usize,
    /// Slots that were pushed and not yet given to the lane.
    pushed: Vec<Slot>,
    ended: Vec<EndedSlot>,
}

impl NbdQueue {
    /// A queue on a lane where it has an inbox.
    pub(super) fn new(
        lane: Arc<Lane>,
        inbox: u32,
        geometry: Geometry,
        export_bytes: u64,
        flags: TransmissionFlags,
        depth: usize,
    ) -> Self {
        let (pushed, ended) = (Vec::with_capacity(depth), Vec::with_capacity(depth));
        Self { lane, inbox, geometry, export_bytes, flags, depth, in_flight: 0, pushed, ended }
    }

    /// Converts a request to the commands of the protocol.
    fn slot(&self, mut request: Request) -> Result<Slot, Box<PushError>> {
        let pieces = request.segments.take().map(|segments| (segments, request.buf_offset_bytes));
        if let Some((segments, start)) = &pieces
            && let Err(reason) = self.copy_pieces(&mut request, segments, *start)
        {
            request.segments = pieces.map(|(segments, _)| segments);
            return Err(Box::new(PushError { request, reason }));
        }
        let can = |flag| self.flags.contains(flag);
        let (start_bytes, end_bytes) = match request.operation {
            Operation::Flush => (0, 0),
            _ => (request.offset_bytes, (request.offset_bytes + request.len_bytes).min(self.export_bytes)),
        };
        let inside = (end_bytes.max(start_bytes) - start_bytes) as usize;
        let durable = request.fua && request.operation != Operation::Read;
        let fua = if durable && can(TransmissionFlags::SEND_FUA) { CommandFlags::FUA } else { CommandFlags::empty() };
        // A server without FUA and flush has no volatile cache.
        let flushes = durable && fua.is_empty() || request.operation == Operation::Flush;
        let work = match request.operation {
            Operation::Read => {
                if let Some(beyond) = beyond(&mut request, inside) {
                    beyond.fill(0);
                }
                SlotWork::Calls(Command::READ, CommandFlags::empty())
            }
            Operation::Write => {
                if beyond(&mut request, inside).is_some_and(|beyond| beyond.iter().any(|&byte| byte != 0)) {
                    let what = format!(
                        "the export ends at byte {}, within its last sector; only zeros can be written beyond its end",
                        self.export_bytes
                    );
                    let reason = io::Error::new(io::ErrorKind::InvalidInput, what);
                    if let Some((segments, start)) = pieces {
                        (request.buf, request.buf_offset_bytes, request.segments) = (None, start, Some(segments));
                    }
                    return Err(Box::new(PushError { request, reason }));
                }
                SlotWork::Calls(Command::WRITE, fua)
            }
            Operation::WriteZeroes if can(TransmissionFlags::SEND_WRITE_ZEROES) => {
                SlotWork::Calls(Command::WRITE_ZEROES, fua | CommandFlags::NO_HOLE)
            }
            // Not TRIM, after which reads may return anything: a discarded range must read as
            // zeros.
            Operation::Discard if can(TransmissionFlags::SEND_WRITE_ZEROES) => {
                SlotWork::Calls(Command::WRITE_ZEROES, fua)
            }
            Operation::WriteZeroes | Operation::Discard => SlotWork::Zeros(fua),
            Operation::Flush => SlotWork::Calls(Command::FLUSH, CommandFlags::empty()),
        };
        let memory = match (request.buf, pieces) {
            (Some(buf), Some((segments, start))) => Memory::Copied { buf, segments, start },
            (Some(buf), None) => Memory::Buf(buf),
            (None, Some((segments, _))) => Memory::Segments(segments),
            (None, None) => Memory::None,
        };
        let mut slot = Slot::new(self.inbox, work, start_bytes, end_bytes.max(start_bytes), memory);
        (slot.tag, slot.base_bytes) = (request.tag, request.buf_offset_bytes);
        slot.then_flush = flushes && can(TransmissionFlags::SEND_FLUSH);
        Ok(slot)
    }
}

impl NbdQueue {
    /// Gives a request whose segments cannot be transferred one by one a buffer with a copy of
    /// them.
    fn copy_pieces(&self, request: &mut Request, segments: &Segments, start: usize) -> io::Result<()> {
        let unit_bytes = self.geometry.logical_sector_bytes as usize;
        let ends_inside = request.offset_bytes.saturating_add(request.len_bytes) <= self.export_bytes;
        let moves = matches!(request.operation, Operation::Read | Operation::Write) && request.len_bytes > 0;
        if !moves || ends_inside && segments.can_be_sliced(start, unit_bytes) {
            return Ok(());
        }
        let mut buf = IoBuf::new(request.len_bytes as usize);
        if request.operation == Operation::Write {
            segments.copy_out(start, &mut buf)?;
        }
        (request.buf, request.buf_offset_bytes) = (Some(buf), 0);
        Ok(())
    }
}

/// The part of the buffer that lies beyond the export's end.
fn beyond(request: &mut Request, inside: usize) -> Option<&mut [u8]> {
    let payload = request.buf_range();
    let beyond = request.buf.as_mut()?.get_mut(payload)?.get_mut(inside..)?;
    (!beyond.is_empty()).then_some(beyond)
}

impl BlockQueue for NbdQueue {
    fn depth(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn memory_alignment_bytes(&self) -> usize {
        1
    }

    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        if self.in_flight >= self.depth {
            return Err(Box::new(PushError { request, reason: io::ErrorKind::WouldBlock.into() }));
        }
        if let Err(reason) = validate(&request, &self.geometry) {
            return Err(Box::new(PushError { request, reason }));
        }
        let slot = self.slot(request)?;
        self.pushed.push(slot);
        self.in_flight += 1;
        Ok(())
    }

    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        self.lane.drive(self.inbox, self.pushed.drain(..), at_least.min(self.in_flight), &mut self.ended);
        self.in_flight -= self.ended.len();
        out.extend(self.ended.drain(..).map(|ended| ended.completion));
        Ok(())
    }
}

impl Drop for NbdQueue {
    fn drop(&mut self) {
        self.lane.close_inbox(self.inbox);
    }
}
