//! Turns clients' requests into requests of block queues, and takes their completions.
//!
//! ```text
//!   the protocol ─┬─ read, clear, flush ─▶ launch ─▶ queue ─▶ completed ─▶ the protocol's reply
//!                 └─ payload, piece by piece ─▶ write ─▶ launch ─▶ ...   ─▶ outbox
//! ```
//!
//! A client's request of any length becomes one request of a queue: a payload above
//! [`PIECE_BYTES`] is passed as segments. The part of a write's payload that was received together
//! with its header is written from the receive window, if the queue takes memory at any address and
//! the window is full enough (see `window`).
//!
//! The core owns everything of a worker except the connections, so that it can work on one
//! connection that is borrowed mutably. It trusts the protocol to have checked a request: its range
//! against the disk, its flags against the command, its length against the protocol's limits.

use super::{
    connection::{Connection, Incoming, Input, State, payload_range},
    exports::Exports,
    flights::{ClientRequest, Completed, Contents, Flight, Group, Steps},
    outbox::Share,
    pool::{HEADER_ROOM_BYTES, PIECE_BYTES, Pool},
    protocol::{Protocol, SessionEnd},
};
use crate::{
    metrics::{Counter, WorkerMetrics},
    panic_guard::{PanicGuard, catch_panic},
    reserve::Reserve,
};
use diskwright_store::{
    BlockQueue, Completion, IoBuf, Operation, QueueOptions, Request, Segments, SharedRing, SlotMap,
};
use std::{io, sync::Arc};

/// Maximum number of requests in flight on one queue, for all clients of its export together.
const QUEUE_DEPTH: usize = 8192;

/// Maximum number of empty segment lists that are kept for reuse.
const SPARE_LISTS: usize = 256;

/// Maximum bytes that one request of a queue clears. A longer range is cleared step by step, so
/// that other clients get their turn.
const STEP_BYTES: u64 = 256 << 20;

/// What one client may have in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ShareLimit {
    pub(crate) requests: u32,
    /// Bytes of payload. A single request is allowed whatever its size.
    pub(crate) bytes: usize,
}

#[derive(Debug)]
pub(crate) struct Core<P: Protocol> {
    pub(crate) pool: Pool,
    pub(crate) exports: Arc<Exports>,
    /// What all workers of the server share.
    pub(crate) shared: Arc<P::Shared>,
    pub(crate) queues: Vec<Option<Box<dyn BlockQueue>>>,
    pub(crate) flights: SlotMap<Flight<P::Asked>>,
    groups: SlotMap<Group<P::Asked>>,
    ring: SharedRing,
    limit: ShareLimit,
    pub(crate) metrics: Arc<WorkerMetrics>,
    /// The worker's clock at the beginning of the turn, in nanoseconds.
    pub(crate) now_ns: u64,
    /// Whether a request was pushed to any queue since the queues were last reaped.
    pub(crate) pushed: bool,
    /// For replies that are built before they are put into an outbox.
    pub(crate) scratch: Vec<u8>,
    /// Empty segment lists, boxed because requests take them boxed.
    #[expect(clippy::vec_box, reason = "the boxes are reused")]
    spare_lists: Vec<Box<Segments>>,
}

impl<P: Protocol> Core<P> {
    pub(crate) fn new(
        exports: Arc<Exports>,
        shared: Arc<P::Shared>,
        limit: ShareLimit,
        metrics: Arc<WorkerMetrics>,
        ring_depth: usize,
    ) -> io::Result<Self> {
        let pool = Pool::new();
        let ring = SharedRing::new(ring_depth, Some(pool.slab()))?;
        Ok(Self {
            pool,
            queues: (0..exports.indexes()).map(|_| None).collect(),
            exports,
            shared,
            flights: SlotMap::default(),
            groups: SlotMap::default(),
            ring,
            limit,
            metrics,
            now_ns: 0,
            pushed: false,
            scratch: Vec::new(),
            spare_lists: Vec::new(),
        })
    }

    /// The ring of the worker's sockets and disks.
    pub(crate) fn ring(&self) -> &SharedRing {
        &self.ring
    }

    /// Other exports are served from now on. Those that stay keep their indexes and queues.
    pub(crate) fn set_exports(&mut self, exports: Arc<Exports>) {
        self.queues.resize_with(exports.indexes(), || None);
        self.exports = exports;
    }

    /// Opens this worker's queue of an export, unless it is open.
    ///
    /// # Errors
    /// [`SessionEnd::Queue`].
    pub(crate) fn open_queue(&mut self, export: usize) -> Result<(), SessionEnd> {
        let queue = &mut self.queues[export];
        if queue.is_none() {
            let options = QueueOptions { depth: QUEUE_DEPTH, ring: Some(&self.ring), ..QueueOptions::default() };
            let device = &self.exports.get(export).device;
            let opened = catch_panic(|| device.open_queue(&options));
            let opened = Box::new(PanicGuard::over(opened.map_err(SessionEnd::Queue)?));
            let held: Arc<Counter> = Arc::clone(&self.metrics.held);
            *queue = Some(Box::new(Reserve::over(opened, &self.ring, held)));
        }
        Ok(())
    }

    /// Whether the client and the export's queue may have one more request in flight.
    pub(crate) fn has_room_for(&self, conn: &Connection<P>, export: usize) -> bool {
        let queue_has_room = self.queues[export].as_ref().is_none_or(|queue| queue.in_flight() < QUEUE_DEPTH);
        let share = conn.share;
        queue_has_room
            && (share.requests == 0 || share.requests < self.limit.requests && share.bytes < self.limit.bytes)
    }

    /// Takes the payload bytes in the window. Returns whether the next bytes are a header.
    pub(crate) fn take_payload(&mut self, conn: &mut Connection<P>) -> bool {
        loop {
            match &mut conn.input {
                Input::Header => return true,
                Input::Skip(left) => {
                    let now = (conn.window.bytes().len() as u64).min(*left);
                    *left -= now;
                    let is_over = *left == 0;
                    conn.window.consume(now as usize);
                    if !is_over {
                        return false;
                    }
                    conn.input = Input::Header;
                }
                Input::Payload(incoming) => {
                    let Some(buf) = &mut incoming.buf else { return false };
                    let there = conn.window.bytes();
                    let room_bytes = incoming.piece_bytes - incoming.filled_bytes;
                    let now = there.len().min(room_bytes).min(incoming.announced_bytes);
                    let range = payload_range(incoming.filled_bytes, incoming.filled_bytes + now);
                    buf[range].copy_from_slice(&there[..now]);
                    if let Some(digest) = &mut incoming.digest {
                        *digest = crc32c::crc32c_append(*digest, &there[..now]);
                    }
                    incoming.filled_bytes += now;
                    incoming.announced_bytes -= now;
                    self.metrics.copied_bytes.add(now as u64);
                    conn.window.consume(now);
                    if incoming.filled_bytes < incoming.piece_bytes && incoming.announced_bytes > 0 {
                        return false;
                    }
                    self.part_ended(conn);
                }
            }
        }
    }

    /// Pushes a request to the export's queue. Gives the request back if the queue refuses it.
    fn launch(&mut self, flight: Flight<P::Asked>, request: Request) -> Result<(), (Request, io::Error)> {
        let Some(queue) = &mut self.queues[flight.asked.export as usize] else {
            return Err((request, io::Error::other("the export has no queue")));
        };
        let tag = self.flights.insert(flight);
        self.pushed = true;
        queue.push(Request { tag: tag.into(), ..request }).map_err(|refused| {
            self.flights.remove(tag);
            (refused.request, refused.reason)
        })
    }

    /// Launches a client's request that is a single request of the queue. Replies with an error if
    /// the queue refuses it.
    pub(crate) fn launch_single(
        &mut self,
        conn: &mut Connection<P>,
        asked: &ClientRequest<P::Asked>,
        request: Request,
    ) {
        if let Err((Request { buf, segments, .. }, error)) = self.launch(Flight { asked: *asked, group: None }, request)
        {
            let contents = self.contents(buf, segments);
            self.answer(conn, asked, Err(error), contents);
        }
    }

    /// Collects the buffers of a request that has ended, and keeps its segment list for reuse.
    pub(crate) fn contents(&mut self, buf: Option<IoBuf>, segments: Option<Box<Segments>>) -> Contents {
        let Some(mut segments) = segments else { return Contents::of(buf, None) };
        let contents = Contents::of(buf, Some(&mut segments));
        if self.spare_lists.len() < SPARE_LISTS {
            self.spare_lists.push(segments);
        }
        contents
    }

    /// Reads the range of a request into buffers of the pool.
    pub(crate) fn read(&mut self, conn: &mut Connection<P>, asked: &ClientRequest<P::Asked>) {
        if asked.len_bytes <= PIECE_BYTES as u64 {
            let buf = self.pool.take(asked.len_bytes as usize);
            let read = Request::read(asked.offset_bytes, asked.len_bytes as usize, buf, 0);
            return self.launch_single(conn, asked, Request { buf_offset_bytes: HEADER_ROOM_BYTES, ..read });
        }
        let mut segments = self.spare_lists.pop().unwrap_or_default();
        let mut left_bytes = asked.len_bytes as usize;
        while left_bytes > 0 {
            let piece_bytes = left_bytes.min(PIECE_BYTES);
            left_bytes -= piece_bytes;
            if let Err(error) = segments.push(self.pool.take(piece_bytes), payload_range(0, piece_bytes)) {
                let contents = self.contents(None, Some(segments));
                return self.answer(conn, asked, Err(error), contents);
            }
        }
        self.launch_single(conn, asked, Request::read_segments(asked.offset_bytes, segments, 0));
    }

    /// The buffer for the payload is full, or all announced bytes were received.
    fn part_ended(&mut self, conn: &mut Connection<P>) {
        let Input::Payload(mut incoming) = std::mem::replace(&mut conn.input, Input::Header) else { return };
        // One receive may have filled both buffers.
        while incoming.filled_bytes == incoming.piece_bytes
            && !incoming.is_single()
            && let Some(buf) = incoming.buf.take()
        {
            let range = payload_range(0, incoming.piece_bytes);
            if let Err(error) = self.segments_of(&mut incoming).push(buf, range) {
                return self.fail_payload(conn, incoming, error);
            }
            (incoming.buf, incoming.filled_bytes, incoming.piece_bytes) = incoming.next.take().unwrap_or_default();
        }
        self.continue_payload(conn, incoming);
    }

    fn segments_of<'i>(&mut self, incoming: &'i mut Incoming<P::Asked>) -> &'i mut Segments {
        incoming.segments.get_or_insert_with(|| self.spare_lists.pop().unwrap_or_default())
    }

    /// Goes on with a payload of which bytes were announced. Takes those in the window without a
    /// copy if `Window::share` allows it, and takes a buffer for the bytes to come.
    pub(crate) fn continue_payload(&mut self, conn: &mut Connection<P>, mut incoming: Incoming<P::Asked>) {
        if incoming.buf.is_none() && incoming.announced_bytes > 0 {
            let takes_any_address = self.queues[incoming.asked.export as usize]
                .as_ref()
                .is_some_and(|queue| queue.memory_alignment_bytes() == 1);
            let wanted_bytes = incoming.left_bytes.min(incoming.announced_bytes);
            if takes_any_address
                && incoming.may_share
                && let Some((window, range)) = conn.window.share(wanted_bytes)
            {
                incoming.left_bytes -= range.len();
                incoming.announced_bytes -= range.len();
                if let Some(digest) = &mut incoming.digest {
                    *digest = crc32c::crc32c_append(*digest, &window[range.clone()]);
                }
                if let Err(error) = self.segments_of(&mut incoming).push(window, range) {
                    return self.fail_payload(conn, incoming, error);
                }
            }
            if incoming.announced_bytes > 0 {
                incoming.piece_bytes = incoming.left_bytes.min(PIECE_BYTES);
                incoming.left_bytes -= incoming.piece_bytes;
                (incoming.buf, incoming.filled_bytes) = (Some(self.pool.take(incoming.piece_bytes)), 0);
            }
        }
        if incoming.announced_bytes > 0 {
            conn.input = Input::Payload(incoming);
        } else {
            P::payload_ended(self, conn, incoming);
        }
    }

    /// Writes a payload that is complete.
    pub(crate) fn write(&mut self, conn: &mut Connection<P>, incoming: Incoming<P::Asked>) {
        let Incoming { asked, fua, buf, piece_bytes, segments, .. } = incoming;
        let request = match (buf, segments) {
            (_, Some(segments)) => Request::write_segments(asked.offset_bytes, segments, 0),
            (Some(buf), None) => {
                let write = Request::write(asked.offset_bytes, piece_bytes, buf, 0);
                Request { buf_offset_bytes: HEADER_ROOM_BYTES, ..write }
            }
            (None, None) => {
                let error = io::Error::new(io::ErrorKind::InvalidInput, "the write has no payload");
                return self.answer(conn, &asked, Err(error), Contents::default());
            }
        };
        self.launch_single(conn, &asked, Request { fua, ..request });
    }

    /// Answers a write whose segments could not be put together with an error, and skips the rest
    /// of its announced payload.
    fn fail_payload(&mut self, conn: &mut Connection<P>, mut incoming: Incoming<P::Asked>, error: io::Error) {
        if incoming.announced_bytes > 0 {
            conn.input = Input::Skip(incoming.announced_bytes as u64);
        }
        incoming.next.take().and_then(|(buf, ..)| buf).into_iter().for_each(|buf| self.pool.give(buf));
        let contents = self.contents(incoming.buf, incoming.segments);
        self.answer(conn, &incoming.asked, Err(error), contents);
    }

    /// Clears the range of a request: `operation` is a discard or the writing of zeros.
    pub(crate) fn clear(
        &mut self,
        conn: &mut Connection<P>,
        asked: &ClientRequest<P::Asked>,
        operation: Operation,
        fua: bool,
    ) {
        if asked.len_bytes <= STEP_BYTES {
            let request = Request::discard(asked.offset_bytes, asked.len_bytes, 0);
            return self.launch_single(conn, asked, Request { operation, fua, ..request });
        }
        let range = asked.offset_bytes..asked.offset_bytes + asked.len_bytes;
        self.clear_ranges(conn, asked, Steps { operation, ranges: vec![range], fua });
    }

    /// Clears ranges, one after the other.
    pub(crate) fn clear_ranges(&mut self, conn: &mut Connection<P>, asked: &ClientRequest<P::Asked>, steps: Steps) {
        let group = self.groups.insert(Group { asked: *asked, pending: 1, error: None, steps });
        self.step(group);
        if let Some(Completed { asked, result, contents }) = self.step_ended(group) {
            self.answer(conn, &asked, result, contents);
        }
    }

    /// Starts no further steps for a connection that is closed.
    pub(crate) fn abandon(&mut self, connection: u32) {
        for number in self.groups.indices().collect::<Vec<_>>() {
            if let Some(of) = self.groups.get_mut(number)
                && of.asked.connection == connection
            {
                of.error.get_or_insert_with(|| io::Error::other("the client has gone"));
            }
        }
    }

    /// Starts the next step of the ranges that are cleared, unless nothing is left or a step has
    /// failed.
    fn step(&mut self, group: u32) {
        let Some(of) = self.groups.get_mut(group) else { return };
        let Some(range) = of.steps.ranges.last_mut().filter(|_| of.error.is_none()) else { return };
        let step = range.start..range.end.min(range.start.saturating_add(STEP_BYTES));
        range.start = step.end;
        if range.is_empty() {
            of.steps.ranges.pop();
        }
        of.pending += 1;
        let Steps { operation, fua, .. } = of.steps;
        let request = Request { operation, fua, ..Request::discard(step.start, step.end - step.start, 0) };
        let flight = Flight { asked: of.asked, group: Some(group) };
        if let Err((_, error)) = self.launch(flight, request)
            && let Some(of) = self.groups.get_mut(group)
        {
            of.pending -= 1;
            of.error.get_or_insert(error);
        }
    }

    /// One step of a group has ended. Returns the group's result if that was the last.
    fn step_ended(&mut self, group: u32) -> Option<Completed<P::Asked>> {
        let of = self.groups.get_mut(group)?;
        of.pending -= 1;
        if of.pending > 0 {
            return None;
        }
        let of = self.groups.remove(group)?;
        Some(Completed { asked: of.asked, result: of.error.map_or(Ok(()), Err), contents: Contents::default() })
    }

    /// Handles a completion of a queue. Returns the result for the client if its request has ended
    /// with it.
    pub(crate) fn completed(&mut self, completion: Completion) -> Option<Completed<P::Asked>> {
        let Completion { tag, buf, segments, result } = completion;
        let flight = self.flights.remove(tag as u32)?;
        let Some(group) = flight.group else {
            let contents = self.contents(buf, segments);
            return Some(Completed { asked: flight.asked, result, contents });
        };
        let of = self.groups.get_mut(group)?;
        if let Err(error) = result {
            of.error.get_or_insert(error);
        }
        self.step(group);
        self.step_ended(group)
    }

    /// Passes the result of a request to the protocol, unless the connection is being closed.
    pub(crate) fn answer(
        &mut self,
        conn: &mut Connection<P>,
        asked: &ClientRequest<P::Asked>,
        result: io::Result<()>,
        contents: Contents,
    ) {
        if conn.state == State::Closing {
            conn.share.sub(Share::of(asked.held_bytes));
            return contents.into_bufs().for_each(|buf| self.pool.give(buf));
        }
        P::reply(self, conn, asked, result, contents);
    }

    /// Counts a request that was answered, in the client's share and in the metrics.
    pub(crate) fn count(&self, conn: &mut Connection<P>, asked: &ClientRequest<P::Asked>, failed: bool) {
        conn.outbox.count(Share::of(asked.held_bytes));
        self.metrics.answered(asked.kind, asked.len_bytes, self.now_ns.saturating_sub(asked.taken_ns), failed);
    }
}
