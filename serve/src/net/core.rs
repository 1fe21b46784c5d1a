//! The core of a worker: turns what a protocol decodes into requests of block queues, and passes
//! their completions back to it.
//!
//! ```text
//!   window ─▶ Protocol::take_input ─┬─ answered at once ─▶ Core::count, outbox
//!                                   ├─ read, clear, flush ─▶ launch ─▶ queue ─▶ completed
//!                                   └─ payload (payload.rs) ─▶ write ─▶ launch ─▶ ...
//!   completed ─▶ answer ─▶ Protocol::reply ─▶ outbox
//! ```
//!
//! The loop (`worker` and this) has the sockets, the buffers, the queues, the shares and the turns.
//! A [`Protocol`] has the bytes: it decodes requests from a connection's window, and encodes
//! replies into its outbox. What one client's session needs is in its `Session`, which only the
//! client's worker uses. What the clients of several workers share is in its `Shared`, which has
//! locks of its own. A function of a protocol never waits: what was received is in the window, and
//! bytes that are not complete stay there until more have come.
//!
//! A client's request of any length becomes one request of a queue: a payload above
//! [`PIECE_BYTES`] is passed as segments.
//!
//! The core owns everything of a worker except the connections, so that it can work on one
//! connection that is borrowed mutably. It trusts the protocol to have checked a request: its range
//! against the disk, its flags against the command, its length against the protocol's limits.

use super::{
    connection::{Connection, Incoming, State, payload_range},
    exports::{Export, Exports},
    flights::{ClientRequest, Completed, Contents, Flight, Group, Steps},
    outbox::Share,
    pool::{HEADER_ROOM_BYTES, PIECE_BYTES, Pool},
    protocol::{ProtocolTypes, SessionEnd, Stage},
    settings::{ShareLimit, TlsNeed},
};
use crate::{
    metrics::{Counter, WorkerMetrics},
    panic_guard::{PanicGuard, catch_panic},
    reservations::{Claim, ClaimedQueue, Claims, ReservationTable, Seat},
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

/// What a protocol adds to the loop.
pub(crate) trait Protocol: ProtocolTypes {
    /// The name in metrics and in the names of threads.
    const NAME: &'static str;
    /// Requests that are answered in a normal turn (see `turn`).
    const ANSWERS: usize;
    /// Whether clients prove who they are, if the server has secrets.
    const AUTHENTICATES: bool;
    /// Whether its clients take part in reservations.
    const RESERVES: bool;
    /// How the caller allows writable exports on TCP, as the end of a sentence.
    const HOW_TO_ALLOW_WRITES: &'static str;

    /// The session of a new client.
    fn session(core: &Core<Self>, tls: TlsNeed) -> Self::Session;

    /// Puts what the server sends first into the outbox.
    fn greet(core: &mut Core<Self>, conn: &mut Connection<Self>);

    /// How far the session is.
    fn stage(session: &Self::Session) -> Stage;

    /// Whether the session can send requests to the export and to no other. It then ends with the
    /// export.
    fn is_of_export(session: &Self::Session, export: usize) -> bool;

    /// Handles the bytes in the connection's window, until they, the client's share or its turn are
    /// used up. `number` is the connection's.
    ///
    /// # Errors
    /// The session ends.
    fn take_input(core: &mut Core<Self>, conn: &mut Connection<Self>, number: u32) -> Result<(), SessionEnd>;

    /// All announced bytes of a payload were received. Writes it if it is complete
    /// ([`Core::write`]), and keeps it if more is missing or its digest must be checked.
    fn payload_ended(core: &mut Core<Self>, conn: &mut Connection<Self>, incoming: Incoming<Self::Asked>);

    /// Puts the reply to a request into the outbox, and counts it ([`Core::count`]). The contents
    /// are those of a successful read; otherwise they go back to the pool.
    fn reply(
        core: &mut Core<Self>,
        conn: &mut Connection<Self>,
        asked: &ClientRequest<Self::Asked>,
        result: io::Result<()>,
        contents: Contents,
    );

    /// Other exports are served from now on. They are in `core` already.
    fn exports_changed(core: &mut Core<Self>, conn: &mut Connection<Self>);

    /// Whether [`Protocol::tick`] is to be called.
    fn ticks(session: &Self::Session) -> bool;

    /// Called twice a second while [`Protocol::ticks`].
    ///
    /// # Errors
    /// The session ends.
    fn tick(core: &mut Core<Self>, conn: &mut Connection<Self>) -> Result<(), SessionEnd>;

    /// No more input is taken from the client. Gives up what waits for it.
    fn abandon(core: &mut Core<Self>, conn: &mut Connection<Self>);

    /// The connection is being closed. Called after [`Protocol::abandon`].
    fn closed(core: &mut Core<Self>, conn: &mut Connection<Self>);
}

#[derive(Debug)]
pub(crate) struct Core<P: ProtocolTypes> {
    pub(crate) pool: Pool,
    pub(crate) exports: Arc<Exports>,
    /// What all workers of the server share.
    pub(crate) shared: Arc<P::Shared>,
    pub(crate) queues: Vec<Option<ClaimedQueue>>,
    /// By the index of the export.
    outsiders: Vec<Option<Seat>>,
    pub(crate) reservations: Arc<ReservationTable>,
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
    pub(super) spare_lists: Vec<Box<Segments>>,
}

/// What clients that take no part in reservations may do with each export.
fn outsiders_of(exports: &Exports, table: &ReservationTable) -> Vec<Option<Seat>> {
    let of = |index| exports.here(index).map(|export| Seat::of_outsider(table.of(&export.name)));
    (0..exports.indexes()).map(of).collect()
}

impl<P: Protocol> Core<P> {
    pub(crate) fn new(
        exports: Arc<Exports>,
        shared: Arc<P::Shared>,
        limit: ShareLimit,
        metrics: Arc<WorkerMetrics>,
        ring_depth: usize,
        reservations: Arc<ReservationTable>,
    ) -> io::Result<Self> {
        let pool = Pool::new();
        let ring = SharedRing::new(ring_depth, Some(pool.slab()))?;
        Ok(Self {
            pool,
            queues: (0..exports.indexes()).map(|_| None).collect(),
            outsiders: outsiders_of(&exports, &reservations),
            reservations,
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
        self.outsiders = outsiders_of(&exports, &self.reservations);
        self.exports = exports;
    }

    /// Whether reservations let a client that takes no part in them read or write the export.
    pub(crate) fn may(&mut self, export: usize, writes: bool) -> bool {
        self.outsiders.get_mut(export).and_then(Option::as_mut).is_none_or(|outsider| outsider.may(writes))
    }

    /// Opens this worker's queue of an export, unless it is open.
    ///
    /// # Errors
    /// [`SessionEnd::Queue`].
    pub(crate) fn open_queue(&mut self, export: usize) -> Result<(), SessionEnd> {
        let queue = &mut self.queues[export];
        if queue.is_none() {
            let options = QueueOptions { depth: QUEUE_DEPTH, ring: Some(&self.ring), ..QueueOptions::default() };
            let Export { name, device, .. } = self.exports.get(export);
            let opened = catch_panic(|| device.open_queue(&options));
            let opened = Box::new(PanicGuard::over(opened.map_err(SessionEnd::Queue)?));
            let held: Arc<Counter> = Arc::clone(&self.metrics.held);
            let opened = Box::new(Reserve::over(opened, &self.ring, held));
            let claims = Arc::clone(self.reservations.of(name).claims());
            *queue = Some(ClaimedQueue::over(opened, claims, Some(&self.ring), !P::RESERVES));
        }
        Ok(())
    }

    /// Whether the client and the export's queue may have one more request in flight.
    pub(crate) fn has_room_for(&self, conn: &Connection<P>, export: usize) -> bool {
        let queue_has_room = self.queues[export].as_ref().is_none_or(|queue| queue.in_flight() < QUEUE_DEPTH);
        queue_has_room && self.has_share_for(conn)
    }

    /// Whether the client may have one more request in flight.
    pub(crate) fn has_share_for(&self, conn: &Connection<P>) -> bool {
        let share = conn.share;
        share.requests == 0 || share.requests < self.limit.requests && share.bytes < self.limit.bytes
    }

    /// The claimed bytes of the export's disk.
    pub(crate) fn claims(&self, export: usize) -> Option<Arc<Claims>> {
        let export = self.exports.here(export)?;
        Some(Arc::clone(self.reservations.of(&export.name).claims()))
    }

    /// Pushes a request to the export's queue. Gives the request back if the queue refuses it.
    fn launch(
        &mut self,
        flight: Flight<P::Asked>,
        request: Request,
        claim: Option<Arc<Claim>>,
    ) -> Result<(), (Request, io::Error)> {
        let Some(queue) = &mut self.queues[flight.asked.export as usize] else {
            return Err((request, io::Error::other("the export has no queue")));
        };
        let tag = self.flights.insert(flight);
        self.pushed = true;
        let request = Request { tag: tag.into(), ..request };
        let pushed = match claim {
            Some(claim) => queue.push_claimed(request, claim),
            None => queue.push(request),
        };
        pushed.map_err(|refused| {
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
        self.launch_claimed(conn, asked, request, None);
    }

    /// The same for a write of bytes that the client's request has claimed.
    pub(crate) fn launch_claimed(
        &mut self,
        conn: &mut Connection<P>,
        asked: &ClientRequest<P::Asked>,
        request: Request,
        claim: Option<Arc<Claim>>,
    ) {
        let flight = Flight { asked: *asked, group: None };
        if let Err((Request { buf, segments, .. }, error)) = self.launch(flight, request, claim) {
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
        self.read_in_pieces(conn, asked, PIECE_BYTES);
    }

    /// The same, with at most `piece_bytes` in a buffer.
    pub(crate) fn read_in_pieces(
        &mut self,
        conn: &mut Connection<P>,
        asked: &ClientRequest<P::Asked>,
        piece_bytes: usize,
    ) {
        let most_bytes = piece_bytes.min(PIECE_BYTES);
        if asked.len_bytes <= most_bytes as u64 {
            let buf = self.pool.take(asked.len_bytes as usize);
            let read = Request::read(asked.offset_bytes, asked.len_bytes as usize, buf, 0);
            return self.launch_single(conn, asked, Request { buf_offset_bytes: HEADER_ROOM_BYTES, ..read });
        }
        let mut segments = self.spare_lists.pop().unwrap_or_default();
        let mut left_bytes = asked.len_bytes as usize;
        while left_bytes > 0 {
            let piece_bytes = left_bytes.min(most_bytes);
            left_bytes -= piece_bytes;
            if let Err(error) = segments.push(self.pool.take(piece_bytes), payload_range(0, piece_bytes)) {
                let contents = self.contents(None, Some(segments));
                return self.answer(conn, asked, Err(error), contents);
            }
        }
        self.launch_single(conn, asked, Request::read_segments(asked.offset_bytes, segments, 0));
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
        if let Err((_, error)) = self.launch(flight, request, None)
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
