//! A thread's queue to a disk behind a socket.
//!
//! ```text
//!   push ─▶ slot ─▶ calls, while ids are free ─▶ outbound ─▶ socket
//!   reap ◀─ slot ◀─ calls that have ended ◀─ inbound ◀─ socket
//! ```
//!
//! Nothing is sent before a reap, so one system call sends everything that was pushed. A connection
//! that breaks fails all requests, those in flight and those to come. The exception is one that
//! broke while the queue was idle: a protocol may open a new one. It is not asked to while a write
//! waits for a flush, because a server that has restarted may have lost it.

use super::{
    Broken, Call, Calls, Connection, ConnectionError, Outcome, Protocol,
    inbound::{Fault, Inbound},
    tables::{Memory, Slot},
};
use crate::{BlockQueue, Completion, Geometry, IoBuf, Operation, Outbound, PushError, Request, queue::validate};
use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    time::{Duration, Instant},
};

/// How long the server may send nothing while it owes an answer.
const PATIENCE: Duration = Duration::from_secs(300);

/// After this time without requests, the next one looks whether the connection still stands.
const IDLE: Duration = Duration::from_secs(1);

/// How often a call is sent again when the server asks for it.
const TRIES_MAX: u32 = 30;

/// What a queue may use.
#[derive(Debug, Clone, Copy)]
pub struct QueueLimits {
    /// Requests in flight.
    pub depth: usize,
    /// Commands in flight.
    pub calls: u16,
}

/// A call that is sent again, when.
#[derive(Debug)]
struct Retry {
    at: Instant,
    call: Call,
}

/// A queue of one thread; see the module documentation.
#[derive(Debug)]
pub struct RemoteQueue<P: Protocol> {
    connection: Connection,
    geometry: Geometry,
    depth: usize,
    calls: Calls,
    /// Slots whose calls have not all been started, oldest first.
    waiting: VecDeque<u32>,
    retries: Vec<Retry>,
    outbound: Outbound,
    inbound: Inbound,
    ended: Vec<Completion>,
    /// Why the connection has ended.
    broken: Option<ConnectionError>,
    /// Writes that have ended and were not durable then.
    written: u64,
    /// How many of them a flush has made durable since.
    flushed: u64,
    last_moved: Instant,
    /// Dropped after the connection.
    protocol: P,
}

impl<P: Protocol> RemoteQueue<P> {
    /// A queue on a connection that is ready for commands.
    pub fn new(connection: Connection, protocol: P, geometry: Geometry, limits: QueueLimits) -> Self {
        Self {
            connection,
            geometry,
            depth: limits.depth,
            calls: Calls::new(limits.calls),
            waiting: VecDeque::new(),
            retries: Vec::new(),
            outbound: Outbound::default(),
            inbound: Inbound::new(),
            ended: Vec::new(),
            broken: None,
            written: 0,
            flushed: 0,
            last_moved: Instant::now(),
            protocol,
        }
    }

    /// Starts the calls of waiting slots while ids are free and the server takes commands.
    fn start(&mut self) {
        if !self.retries.is_empty() {
            self.start_again();
        }
        while let Some(&number) = self.waiting.front() {
            if !self.can_begin() {
                return;
            }
            let Some(slot) = self.calls.slots.get_mut(number) else {
                self.waiting.pop_front();
                continue;
            };
            let is_empty = slot.start_bytes == slot.end_bytes && slot.operation != Operation::Flush;
            if slot.error.is_some() || is_empty {
                slot.waits = false;
                self.waiting.pop_front();
                self.end_if_done(number);
                continue;
            }
            let offset_bytes = slot.next_bytes;
            let len_bytes = (slot.end_bytes - offset_bytes).min(self.protocol.call_bytes_max(slot.operation));
            slot.next_bytes += len_bytes;
            slot.pending += 1;
            let call = Call {
                slot: number,
                operation: slot.operation,
                fua: slot.fua,
                offset_bytes,
                len_bytes,
                memory_at: slot.base_bytes + (offset_bytes - slot.start_bytes) as usize,
                moved_bytes: 0,
                tries: 0,
                unsent: 0,
                outcome: None,
            };
            if slot.next_bytes == slot.end_bytes {
                slot.waits = false;
                self.waiting.pop_front();
            }
            self.begin(call);
        }
    }

    fn start_again(&mut self) {
        let now = Instant::now();
        while self.can_begin()
            && let Some(index) = self.retries.iter().position(|retry| retry.at <= now)
        {
            let Retry { call, .. } = self.retries.swap_remove(index);
            let tries = call.tries + 1;
            self.begin(Call { moved_bytes: 0, tries, unsent: 0, outcome: None, ..call });
        }
    }

    fn can_begin(&self) -> bool {
        self.calls.has_free() && self.protocol.may_begin()
    }

    fn begin(&mut self, call: Call) {
        if self.calls.in_flight() == 0 {
            self.last_moved = Instant::now();
        }
        if let Some(id) = self.calls.insert(call) {
            self.protocol.begin(id, &mut self.calls, &mut self.outbound);
        }
    }

    /// Handles the calls that have ended.
    fn settle(&mut self) {
        while let Some(mut call) = self.calls.take_ended() {
            let result = match call.outcome.take() {
                Some(Outcome::Again { after, .. }) if call.tries < TRIES_MAX => {
                    self.retries.push(Retry { at: Instant::now() + after, call });
                    continue;
                }
                Some(Outcome::Again { error, .. }) => Err(error),
                Some(Outcome::Done(result)) => result,
                None => Ok(()),
            };
            let Some(slot) = self.calls.slots.get_mut(call.slot) else { continue };
            slot.pending -= 1;
            if let Err(error) = result {
                slot.error.get_or_insert(error);
            }
            self.end_if_done(call.slot);
        }
    }

    fn end_if_done(&mut self, number: u32) {
        let is_done = self.calls.slots.get(number).is_some_and(|slot| slot.pending == 0 && !slot.waits);
        if is_done && let Some(slot) = self.calls.slots.remove(number) {
            match slot.operation {
                Operation::Read => {}
                Operation::Flush if slot.error.is_none() => self.flushed = self.flushed.max(slot.covers),
                Operation::Flush => {}
                _ => self.written += u64::from(!slot.fua),
            }
            self.ended.push(slot.ended());
        }
    }

    /// Sends and receives what can be without waiting.
    fn exchange(&mut self) -> Result<(), ConnectionError> {
        loop {
            self.start();
            let Self { connection, protocol, calls, outbound, inbound, .. } = self;
            let mut socket = &connection.socket;
            let sent = outbound.send(|slices| socket.write_vectored(slices), |call, range| calls.memory(call, range));
            let mut moved = sent.map_err(|source| connection.lost("sending", source))?;
            for id in outbound.sent.drain(..) {
                calls.sent(id as u16);
            }
            let received = inbound.receive(|slices| socket.read_vectored(slices), protocol, calls, outbound);
            let received = received.map_err(|fault| match fault {
                Fault::Io(source) => connection.lost("receiving", source),
                Fault::Broken(Broken::Violation(what)) => connection.violation(what),
                Fault::Broken(Broken::Ended(what)) => {
                    connection.lost("receiving", io::Error::new(io::ErrorKind::ConnectionAborted, what))
                }
            });
            // Answers that arrived before a fault are valid.
            self.settle();
            moved |= received?;
            if moved {
                self.last_moved = Instant::now();
            }
            let can_start = !self.waiting.is_empty() && self.can_begin();
            if !can_start && (self.outbound.is_empty() || !moved) {
                return Ok(());
            }
        }
    }

    /// Fails all requests.
    fn fail(&mut self, error: &ConnectionError) {
        self.waiting.clear();
        self.retries.clear();
        self.outbound.clear();
        for number in self.calls.slots.indices().collect::<Vec<_>>() {
            if let Some(mut slot) = self.calls.slots.remove(number) {
                slot.error.get_or_insert_with(|| io::Error::new(error.kind(), error.clone()));
                self.ended.push(slot.ended());
            }
        }
        self.calls.clear();
    }

    /// Looks whether the connection of an idle queue still stands, and opens a new one if not.
    fn revive(&mut self) {
        let Err(error) = self.exchange() else { return };
        let is_safe = self.written == self.flushed;
        match is_safe.then(|| self.protocol.reopen()).flatten().unwrap_or(Err(error)) {
            Ok(connection) => {
                self.connection = connection;
                self.outbound.clear();
                self.inbound.clear();
                self.calls.clear();
            }
            Err(error) => self.broken = Some(error),
        }
    }

    /// Waits for the socket, or until a call is to be sent again.
    fn wait(&self) -> Result<(), ConnectionError> {
        let patience = PATIENCE.saturating_sub(self.last_moved.elapsed());
        let now = Instant::now();
        let again = self.retries.iter().map(|retry| retry.at.saturating_duration_since(now)).min();
        let limit = again.map_or(patience, |again| again.min(patience));
        match self.connection.socket.wait(None, !self.outbound.is_empty(), Some(limit)) {
            Ok(false) if limit == patience => {
                let peer = self.connection.peer.to_string();
                Err(ConnectionError::Stalled { peer, seconds: PATIENCE.as_secs() })
            }
            Ok(_) => Ok(()),
            Err(source) => Err(self.connection.lost("waiting for the target", source)),
        }
    }
}

/// The slot of a request.
fn slot_of(request: Request) -> Result<Slot, Box<PushError>> {
    let Request { operation, offset_bytes, len_bytes, tag, fua, mut buf_offset_bytes, .. } = request;
    let memory = match (request.buf, request.segments) {
        (Some(buf), _) => Memory::Buf(buf),
        (None, Some(segments)) => {
            let start = buf_offset_bytes;
            let mut buf = IoBuf::new(len_bytes as usize);
            if operation == Operation::Write
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
    let is_flush = operation == Operation::Flush;
    let (start_bytes, end_bytes) = if is_flush { (0, 0) } else { (offset_bytes, offset_bytes + len_bytes) };
    Ok(Slot {
        tag,
        operation,
        fua: fua && !matches!(operation, Operation::Read | Operation::Flush),
        memory,
        base_bytes: buf_offset_bytes,
        start_bytes,
        end_bytes,
        next_bytes: start_bytes,
        waits: true,
        pending: 0,
        covers: 0,
        error: None,
    })
}

impl<P: Protocol> BlockQueue for RemoteQueue<P> {
    fn depth(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.calls.slots.len() + self.ended.len()
    }

    fn memory_alignment_bytes(&self) -> usize {
        1
    }

    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        if self.in_flight() >= self.depth {
            return Err(Box::new(PushError { request, reason: io::ErrorKind::WouldBlock.into() }));
        }
        if let Err(reason) = validate(&request, &self.geometry).and_then(|()| self.protocol.check(request.operation)) {
            return Err(Box::new(PushError { request, reason }));
        }
        let slot = Slot { covers: self.written, ..slot_of(request)? };
        if self.in_flight() == 0 {
            if self.broken.is_none() && self.last_moved.elapsed() > IDLE {
                self.revive();
            }
            self.last_moved = Instant::now();
        }
        let number = self.calls.slots.insert(slot);
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
            if let Err(error) = self.wait() {
                self.broken = Some(error);
            }
        }
    }
}
