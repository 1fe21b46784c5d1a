//! A thread's queue to a namespace: an I/O queue with a connection of its own.
//!
//! ```text
//!   push ─▶ slot ─▶ calls, while ids are free ─▶ outbound ─▶ socket
//!   reap ◀─ slot ◀─ calls that have ended ◀─ inbound ◀─ socket
//! ```
//!
//! Nothing is sent before a reap, so one system call sends everything that was pushed. A connection
//! that breaks fails all requests, those in flight and those to come.

use super::{
    ClientError,
    inbound::{Fault, Inbound},
    limits::{Limits, QueueId},
    session::{Session, put_digest, put_pdu},
    tables::{Call, Memory, Slot, Tables},
};
use crate::wire::{
    Command, DataPdu, PduKind, Sgl,
    command::{DEALLOCATE, FUA},
    nvm,
};
use diskwright_store::{
    BlockQueue, Completion, Geometry, IoBuf, Operation, Outbound, PushError, Request, queue::validate,
};
use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    sync::Arc,
    time::{Duration, Instant},
};

/// How long the target may send nothing while it owes an answer.
const PATIENCE: Duration = Duration::from_secs(300);

/// Blocks that one command can name.
const BLOCKS_MAX: u64 = 65536;

/// A queue of one thread; see the module documentation.
#[derive(Debug)]
pub(super) struct NvmeQueue {
    session: Session,
    geometry: Geometry,
    limits: Limits,
    nsid: u32,
    depth: usize,
    tables: Tables,
    /// Slots whose calls have not all been started, oldest first.
    waiting: VecDeque<u32>,
    outbound: Outbound,
    inbound: Inbound,
    ended: Vec<Completion>,
    /// Why the connection has ended.
    broken: Option<ClientError>,
    last_moved: Instant,
    /// Given back when the queue is dropped, after its connection.
    _id: QueueId,
}

impl NvmeQueue {
    /// A queue on a connection that was made an I/O queue.
    pub(super) fn new(
        session: Session,
        geometry: Geometry,
        limits: Limits,
        nsid: u32,
        depth: usize,
        id: QueueId,
    ) -> Self {
        let inbound = Inbound::new(session.digests);
        Self {
            session,
            geometry,
            limits,
            nsid,
            depth,
            // One entry stays free, so that a full queue is not taken for an empty one.
            tables: Tables::new(limits.entries - 1),
            waiting: VecDeque::new(),
            outbound: Outbound::default(),
            inbound,
            ended: Vec::new(),
            broken: None,
            last_moved: Instant::now(),
            _id: id,
        }
    }

    fn slot(&self, request: Request) -> Result<Slot, Box<PushError>> {
        let (opcode, mut flags) = match request.operation {
            Operation::Read => (nvm::READ, 0),
            Operation::Write => (nvm::WRITE, 0),
            Operation::Flush => (nvm::FLUSH, 0),
            Operation::WriteZeroes => (nvm::WRITE_ZEROES, 0),
            Operation::Discard => (nvm::WRITE_ZEROES, if self.limits.zeroes_deallocate { DEALLOCATE } else { 0 }),
        };
        if opcode == nvm::WRITE_ZEROES && !self.limits.has_write_zeroes {
            let what = "the target does not support write zeroes, so ranges cannot be cleared";
            return Err(Box::new(PushError { request, reason: io::Error::new(io::ErrorKind::Unsupported, what) }));
        }
        if request.fua && !matches!(request.operation, Operation::Read | Operation::Flush) {
            flags |= FUA;
        }
        let Request { offset_bytes, len_bytes, tag, mut buf_offset_bytes, .. } = request;
        let memory = match (request.buf, request.segments) {
            (Some(buf), _) => Memory::Buf(buf),
            (None, Some(segments)) => {
                let start = buf_offset_bytes;
                let mut buf = IoBuf::new(len_bytes as usize);
                if opcode == nvm::WRITE
                    && let Err(reason) = segments.copy_out(start, &mut buf)
                {
                    let request = Request { buf: None, segments: Some(segments), ..request };
                    return Err(Box::new(PushError { request, reason }));
                }
                buf_offset_bytes = 0;
                Memory::Copied { buf, segments, start }
            }
            (None, None) => Memory::None,
        };
        let is_flush = opcode == nvm::FLUSH;
        let (start_bytes, end_bytes) = if is_flush { (0, 0) } else { (offset_bytes, offset_bytes + len_bytes) };
        Ok(Slot {
            tag,
            opcode,
            flags,
            memory,
            base_bytes: buf_offset_bytes,
            start_bytes,
            end_bytes,
            next_bytes: start_bytes,
            pending: 0,
            error: None,
        })
    }

    /// Starts the calls of waiting slots while ids are free.
    fn start(&mut self) {
        while let Some(&number) = self.waiting.front() {
            let has_free_call = self.tables.has_free_call();
            let Some(slot) = self.tables.slots.get_mut(number) else {
                self.waiting.pop_front();
                continue;
            };
            let is_done = slot.next_bytes == slot.end_bytes || slot.error.is_some();
            // A flush and a request of no length have one call.
            let needs_one = slot.pending == 0 && slot.start_bytes == slot.end_bytes && slot.opcode == nvm::FLUSH;
            if is_done && !(needs_one && slot.error.is_none()) {
                self.waiting.pop_front();
                self.end_if_done(number);
                continue;
            }
            if !has_free_call {
                return;
            }
            let block_bytes = u64::from(self.geometry.logical_sector_bytes);
            let most_bytes = match slot.opcode {
                nvm::READ | nvm::WRITE => self.limits.transfer_bytes.min(BLOCKS_MAX * block_bytes),
                _ => BLOCKS_MAX * block_bytes,
            };
            let offset_bytes = slot.next_bytes;
            let len_bytes = (slot.end_bytes - offset_bytes).min(most_bytes);
            slot.next_bytes += len_bytes;
            let (opcode, flags) = (slot.opcode, slot.flags);
            let memory_at = slot.base_bytes + (offset_bytes - slot.start_bytes) as usize;
            if needs_one {
                self.waiting.pop_front();
            }
            let call = Call {
                slot: number,
                opcode,
                offset_bytes,
                len_bytes,
                memory_at,
                moved_bytes: 0,
                unsent: 0,
                status: None,
            };
            self.begin(call, flags);
        }
    }

    fn begin(&mut self, call: Call, flags: u32) {
        let Call { opcode, offset_bytes, len_bytes, .. } = call;
        let block_bytes = u64::from(self.geometry.logical_sector_bytes);
        let (block, blocks) = (offset_bytes / block_bytes, len_bytes / block_bytes);
        let in_capsule = opcode == nvm::WRITE && len_bytes <= self.limits.capsule_bytes;
        let mut call = call;
        if in_capsule {
            (call.moved_bytes, call.unsent) = (len_bytes as usize, 1);
        }
        if self.tables.calls_in_flight() == 0 {
            self.last_moved = Instant::now();
        }
        let Some(cid) = self.tables.begin(call) else { return };
        let kind = if in_capsule { Sgl::IN_CAPSULE } else { Sgl::TRANSPORT };
        let moves = matches!(opcode, nvm::READ | nvm::WRITE);
        let sgl = Sgl { address: 0, len_bytes: if moves { len_bytes as u32 } else { 0 }, kind };
        let cdw = match opcode {
            nvm::FLUSH => [0; 6],
            _ => [block as u32, (block >> 32) as u32, blocks.saturating_sub(1) as u32 | flags, 0, 0, 0],
        };
        let command = Command { opcode, flags: Command::SGL_FLAGS, cid, nsid: self.nsid, sgl, cdw };
        let data_bytes = if in_capsule { len_bytes as usize } else { 0 };
        self.put(PduKind::Command, &command.encode(), cid, 0, data_bytes);
    }

    /// Queues a PDU with a part of a call's payload.
    fn put(&mut self, kind: PduKind, rest: &[u8], cid: u16, at: usize, data_bytes: usize) {
        let digests = self.session.digests;
        self.outbound.header(|out| put_pdu(digests, kind, rest, data_bytes, out));
        if data_bytes > 0 {
            self.outbound.payload(cid.into(), at, at + data_bytes);
            if digests.contains(crate::wire::Digests::DATA) {
                let data = self.tables.payload(cid.into(), at..at + data_bytes).unwrap_or_default();
                self.outbound.header(|out| put_digest(digests, data, out));
            }
        }
    }

    /// Sends the data that the controller asks for.
    fn give(&mut self, wanted: DataPdu) {
        let mut at = wanted.offset_bytes as usize;
        let end = at + wanted.len_bytes as usize;
        while at < end {
            let now = (end - at).min(self.session.data_bytes_max);
            if let Some(call) = self.tables.call(wanted.cid) {
                call.unsent += 1;
            }
            let part = DataPdu { offset_bytes: at as u32, len_bytes: now as u32, ..wanted };
            self.put(PduKind::HostData, &part.encode_rest(), wanted.cid, at, now);
            at += now;
        }
    }

    fn end_if_done(&mut self, number: u32) {
        let is_done = self
            .tables
            .slots
            .get(number)
            .is_some_and(|slot| slot.pending == 0 && (slot.error.is_some() || slot.next_bytes == slot.end_bytes));
        if is_done && let Some(slot) = self.tables.slots.remove(number) {
            self.ended.push(slot.ended());
        }
    }

    /// Sends and receives what can be without waiting.
    fn exchange(&mut self) -> Result<(), ClientError> {
        loop {
            self.start();
            let Self { session, tables, outbound, inbound, .. } = self;
            let mut socket = &session.socket;
            let lost = |doing, source| {
                let (peer, source) = (session.peer.to_string(), Arc::new(source));
                ClientError::Lost { peer, doing, source }
            };
            let sent = outbound.send(|slices| socket.write_vectored(slices), |call, range| tables.payload(call, range));
            let mut moved = sent.map_err(|source| lost("sending", source))?;
            for cid in outbound.sent.drain(..) {
                if let Some(call) = tables.call(cid as u16) {
                    call.unsent -= 1;
                    if call.status.is_some() {
                        inbound.ended.push(cid as u16);
                    }
                }
            }
            let received = inbound.receive(|slices| socket.read_vectored(slices), tables);
            let received = received.map_err(|fault| match fault {
                Fault::Io(source) => lost("receiving", source),
                Fault::Wire(source) => ClientError::Wire { peer: session.peer.to_string(), doing: "receiving", source },
                Fault::Protocol(what) => ClientError::Protocol { peer: session.peer.to_string(), what },
            });
            // Answers that arrived before a fault are valid.
            let peer = Arc::clone(&self.session.peer);
            while let Some(cid) = self.inbound.ended.pop() {
                if let Some(number) = self.tables.end(cid, &peer)
                    && !self.waiting.contains(&number)
                {
                    self.end_if_done(number);
                }
            }
            moved |= received?;
            for wanted in std::mem::take(&mut self.inbound.asked) {
                self.give(wanted);
            }
            if moved {
                self.last_moved = Instant::now();
            }
            let can_start = !self.waiting.is_empty() && self.tables.has_free_call();
            if !can_start && (self.outbound.is_empty() || !moved) {
                return Ok(());
            }
        }
    }

    /// Fails all requests.
    fn fail(&mut self, error: &ClientError) {
        self.waiting.clear();
        self.outbound.clear();
        for number in self.tables.slots.indices().collect::<Vec<_>>() {
            if let Some(mut slot) = self.tables.slots.remove(number) {
                slot.error.get_or_insert_with(|| error.clone().into());
                self.ended.push(slot.ended());
            }
        }
    }
}

impl BlockQueue for NvmeQueue {
    fn depth(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.tables.slots.len() + self.ended.len()
    }

    fn memory_alignment_bytes(&self) -> usize {
        1
    }

    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        if self.in_flight() >= self.depth {
            return Err(Box::new(PushError { request, reason: io::ErrorKind::WouldBlock.into() }));
        }
        if let Err(reason) = validate(&request, &self.geometry) {
            return Err(Box::new(PushError { request, reason }));
        }
        let slot = self.slot(request)?;
        let number = self.tables.slots.insert(slot);
        self.waiting.push_back(number);
        Ok(())
    }

    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        let wanted = at_least.min(self.in_flight());
        loop {
            let outcome = match &self.broken {
                Some(error) => Err(error.clone()),
                None => self.exchange(),
            };
            if let Err(error) = outcome {
                self.fail(&error);
                self.broken.get_or_insert(error);
            }
            if self.ended.len() >= wanted {
                out.append(&mut self.ended);
                return Ok(());
            }
            let limit = PATIENCE.saturating_sub(self.last_moved.elapsed());
            let waited = self.session.socket.wait(None, !self.outbound.is_empty(), Some(limit));
            let peer = || self.session.peer.to_string();
            match waited {
                Ok(true) => {}
                Ok(false) => self.broken = Some(ClientError::Stalled { peer: peer(), seconds: PATIENCE.as_secs() }),
                Err(source) => {
                    let (doing, source) = ("waiting for the target", Arc::new(source));
                    self.broken = Some(ClientError::Lost { peer: peer(), doing, source });
                }
            }
        }
    }
}
