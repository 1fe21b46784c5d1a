//! Turns clients' requests into requests of block queues, and their completions into replies.
//!
//! ```text
//!   window ─▶ take_requests ─┬─ invalid ────────────────────────▶ error reply
//!                            ├─ READ, FLUSH, TRIM, ... ─▶ launch ─▶ queue ─▶ completed ─▶ reply
//!                            └─ WRITE ─▶ payload, piece by piece ─▶ launch ─▶ ...     ─▶ outbox
//! ```
//!
//! A client's request of any length becomes one request of a queue: a payload above
//! [`PIECE_BYTES`] is passed as segments. The part of a write's payload that was received together
//! with its header is written from the receive window, if the queue takes memory at any address and
//! the window is full enough (see `window`).
//!
//! The dispatcher owns everything of a worker except the connections, so that it can work on one
//! connection that is borrowed mutably.
//!
//! Every request is checked here: its range against the disk, its flags against the command, its
//! length against the protocol's limits. An invalid request is answered with an error. The session
//! ends only if the position of the next header is unknown, or if a payload is longer than
//! [`SKIP_BYTES_MAX`].

use super::{
    connection::{Connection, Incoming, Input, State, payload_range},
    export::Exports,
    flights::{ClientRequest, Completed, Contents, Flight, Group, Steps},
    handshake::{HandshakeError, Session},
    outbox::Share,
    pool::{HEADER_ROOM_BYTES, PIECE_BYTES, Pool},
    status::{self, StatusRequest},
};
use crate::{metrics::WorkerMetrics, panic_guard::catch_panic};
use diskwright_nbd::wire::{
    Command, CommandFlags, Decoded, ErrorCode, Framing, PAYLOAD_BYTES_DEFAULT, RequestHeader, WireError,
};
use diskwright_store::{BlockQueue, Completion, IoBuf, Operation, Request, Segments, SlotMap};
use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

/// Maximum number of requests in flight on one queue, for all clients of its export together.
pub(crate) const QUEUE_DEPTH: usize = 8192;

/// Maximum number of empty segment lists that are kept for reuse.
const SPARE_LISTS: usize = 256;

/// Maximum bytes that one request of a queue clears. A longer range is cleared step by step, so
/// that other clients get their turn.
const STEP_BYTES: u64 = 256 << 20;

/// A payload that is longer than the protocol allows is skipped up to this length. A longer one
/// ends the session.
const SKIP_BYTES_MAX: u64 = 2 * PAYLOAD_BYTES_DEFAULT as u64;

/// The worker computes block status itself. A client whose reply took longer than this waits for
/// the other clients before its next request.
const STATUS_TURN: Duration = Duration::from_micros(200);

/// What one client may have in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ShareLimit {
    pub(crate) requests: u32,
    /// Bytes of payload. A single request is allowed whatever its size.
    pub(crate) bytes: usize,
}

/// Why a client's session ends.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionEnd {
    #[error("the client has disconnected")]
    Disconnected,
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("the disk could not open a queue: {0}")]
    Queue(io::Error),
}

#[derive(Debug)]
pub(crate) struct Dispatcher {
    pub(crate) pool: Pool,
    pub(crate) exports: Arc<Exports>,
    pub(crate) queues: Vec<Option<Box<dyn BlockQueue>>>,
    pub(crate) flights: SlotMap<Flight>,
    pub(crate) groups: SlotMap<Group>,
    pub(crate) limit: ShareLimit,
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

fn refusal(kind: io::ErrorKind, what: &str) -> io::Error {
    io::Error::new(kind, what.to_owned())
}

impl Dispatcher {
    pub(crate) fn new(exports: Arc<Exports>, limit: ShareLimit, metrics: Arc<WorkerMetrics>) -> Self {
        Self {
            pool: Pool::new(),
            queues: (0..exports.indexes()).map(|_| None).collect(),
            exports,
            flights: SlotMap::default(),
            groups: SlotMap::default(),
            limit,
            metrics,
            now_ns: 0,
            pushed: false,
            scratch: Vec::new(),
            spare_lists: Vec::new(),
        }
    }

    /// Other exports are served from now on. Those that stay keep their indexes and queues.
    pub(crate) fn set_exports(&mut self, exports: Arc<Exports>) {
        self.queues.resize_with(exports.indexes(), || None);
        self.exports = exports;
    }

    /// Handles the requests in the connection's window, until the bytes, the client's share or its
    /// turn are used up.
    pub(crate) fn take_requests(
        &mut self,
        conn: &mut Connection,
        number: u32,
        session: &Session,
    ) -> Result<(), SessionEnd> {
        while conn.state == State::Open {
            match &mut conn.input {
                Input::Skip(left) => {
                    let now = (conn.window.bytes().len() as u64).min(*left);
                    *left -= now;
                    if *left > 0 {
                        conn.window.consume(now as usize);
                        return Ok(());
                    }
                    conn.input = Input::Header;
                    conn.window.consume(now as usize);
                }
                Input::Payload(incoming) => {
                    let Some(buf) = &mut incoming.buf else { return Ok(()) };
                    let there = conn.window.bytes();
                    let now = there.len().min(incoming.piece_bytes - incoming.filled_bytes);
                    buf[payload_range(incoming.filled_bytes, incoming.filled_bytes + now)]
                        .copy_from_slice(&there[..now]);
                    incoming.filled_bytes += now;
                    self.metrics.copied_bytes.add(now as u64);
                    conn.window.consume(now);
                    if incoming.filled_bytes < incoming.piece_bytes {
                        return Ok(());
                    }
                    self.buffer_is_full(conn);
                }
                Input::Header => {
                    if conn.window.bytes().is_empty() {
                        return Ok(());
                    }
                    if !self.has_room_for(conn, session) {
                        conn.stalled = true;
                        return Ok(());
                    }
                    if conn.is_over_limit(self.now_ns) {
                        return Ok(());
                    }
                    let framing = session.framing;
                    let Decoded::Value(header, used) = RequestHeader::decode(conn.window.bytes(), framing)? else {
                        return Ok(());
                    };
                    conn.window.consume(used);
                    self.take(conn, number, session, &header)?;
                    if conn.turn_is_over {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    fn has_room_for(&self, conn: &Connection, session: &Session) -> bool {
        let queue_has_room = self.queues[session.export].as_ref().is_none_or(|queue| queue.in_flight() < QUEUE_DEPTH);
        let share = conn.share;
        queue_has_room
            && (share.requests == 0 || share.requests < self.limit.requests && share.bytes < self.limit.bytes)
    }

    /// Handles one request whose header was decoded.
    fn take(
        &mut self,
        conn: &mut Connection,
        number: u32,
        session: &Session,
        header: &RequestHeader,
    ) -> Result<(), SessionEnd> {
        let RequestHeader { flags, command, cookie, offset_bytes, len_bytes } = *header;
        if command == Command::DISCONNECT {
            return Err(SessionEnd::Disconnected);
        }
        conn.requests += 1;
        let asked = ClientRequest {
            command,
            cookie,
            offset_bytes,
            len_bytes,
            ..ClientRequest::of(session, number, self.now_ns)
        };
        let payload_bytes = header.payload_bytes(session.framing);
        if payload_bytes > SKIP_BYTES_MAX {
            let what = "the payload of a request";
            return Err(WireError::TooLong { what, found: payload_bytes, limit: PAYLOAD_BYTES_DEFAULT.into() }.into());
        }
        conn.share.add(Share::of(asked.held_bytes()));
        if let Err(error) = self.check(&asked, flags) {
            if payload_bytes > 0 {
                conn.input = Input::Skip(payload_bytes);
            }
            self.reply(conn, &asked, Err(error), Contents::default());
            return Ok(());
        }
        if let Some(limiter) = &conn.limiter {
            let counted = match command {
                Command::READ | Command::CACHE => Operation::Read,
                Command::WRITE => Operation::Write,
                Command::FLUSH => Operation::Flush,
                _ => Operation::Discard,
            };
            limiter.reserve(self.now_ns, counted, len_bytes);
            conn.not_before_ns = limiter.next_start_ns();
        }
        let fua = flags.contains(CommandFlags::FUA);
        match command {
            Command::READ => self.read(conn, &asked),
            Command::WRITE => {
                self.continue_payload(conn, Incoming::new(asked, fua));
            }
            Command::FLUSH => self.launch_single(conn, &asked, Request::flush(0)),
            Command::TRIM => self.clear(conn, &asked, Operation::Discard, fua),
            Command::WRITE_ZEROES if flags.contains(CommandFlags::NO_HOLE) => {
                self.clear(conn, &asked, Operation::WriteZeroes, fua);
            }
            // A discard also makes the range read as zeros, and it frees the space. Without NO_HOLE
            // the client allows that.
            Command::WRITE_ZEROES => self.clear(conn, &asked, Operation::Discard, fua),
            Command::CACHE if len_bytes > u64::from(PAYLOAD_BYTES_DEFAULT) => {
                // Only a hint, and too long to be worth reading ahead.
                self.reply(conn, &asked, Ok(()), Contents::default());
            }
            Command::CACHE => self.read(conn, &asked),
            _ => self.reply_status(conn, &asked, session, flags.contains(CommandFlags::REQ_ONE)),
        }
        Ok(())
    }

    /// Checks a request against the command, the negotiated framing and the disk.
    fn check(&self, asked: &ClientRequest, flags: CommandFlags) -> io::Result<()> {
        use io::ErrorKind::{InvalidInput, ReadOnlyFilesystem, StorageFull};
        let command = asked.command;
        let chunks = asked.framing != Framing::Simple;
        let mut known = CommandFlags::FUA;
        match command {
            Command::READ if chunks => known |= CommandFlags::DF,
            Command::WRITE if asked.framing == Framing::Extended => {
                known |= CommandFlags::PAYLOAD_LEN;
                if !flags.contains(CommandFlags::PAYLOAD_LEN) {
                    return Err(refusal(InvalidInput, "a write with extended headers must have the flag PAYLOAD_LEN"));
                }
            }
            Command::WRITE_ZEROES => known |= CommandFlags::NO_HOLE | CommandFlags::FAST_ZERO,
            Command::BLOCK_STATUS if chunks => known |= CommandFlags::REQ_ONE,
            Command::BLOCK_STATUS => {
                return Err(refusal(
                    InvalidInput,
                    "block status needs structured replies or extended headers, and neither was negotiated",
                ));
            }
            Command::READ | Command::WRITE | Command::TRIM | Command::CACHE => {}
            Command::FLUSH => {
                return if known.contains(flags) {
                    Ok(())
                } else {
                    Err(refusal(InvalidInput, "the request has a flag that its command does not allow"))
                };
            }
            other => return Err(refusal(InvalidInput, &format!("this server does not support the command {other}"))),
        }
        if !known.contains(flags) {
            return Err(refusal(InvalidInput, "the request has a flag that its command does not allow"));
        }
        let geometry = self.exports.get(asked.export as usize).device.geometry();
        let writes = matches!(command, Command::WRITE | Command::TRIM | Command::WRITE_ZEROES);
        if writes && geometry.read_only {
            return Err(refusal(ReadOnlyFilesystem, "the export is read-only"));
        }
        if asked.len_bytes == 0 {
            return Err(refusal(InvalidInput, "the length is 0; it must be at least one sector"));
        }
        let end_bytes = asked.offset_bytes.checked_add(asked.len_bytes);
        if end_bytes.is_none_or(|end_bytes| end_bytes > geometry.size_bytes) {
            let kind = if writes { StorageFull } else { InvalidInput };
            let (offset, len, size) = (asked.offset_bytes, asked.len_bytes, geometry.size_bytes);
            return Err(refusal(
                kind,
                &format!("the range at offset {offset} of {len} bytes ends beyond the export's {size} bytes"),
            ));
        }
        if (asked.offset_bytes | asked.len_bytes) & (u64::from(geometry.logical_sector_bytes) - 1) != 0 {
            let what = format!("offset and length must be multiples of {} bytes", geometry.logical_sector_bytes);
            return Err(refusal(InvalidInput, &what));
        }
        if matches!(command, Command::READ | Command::WRITE) && asked.len_bytes > u64::from(PAYLOAD_BYTES_DEFAULT) {
            let what = format!("the length is {} bytes; the maximum is {PAYLOAD_BYTES_DEFAULT}", asked.len_bytes);
            return Err(refusal(InvalidInput, &what));
        }
        Ok(())
    }

    /// Pushes a request to the export's queue. Gives the request back if the queue refuses it.
    fn launch(&mut self, flight: Flight, request: Request) -> Result<(), (Request, io::Error)> {
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
    fn launch_single(&mut self, conn: &mut Connection, asked: &ClientRequest, request: Request) {
        if let Err((Request { buf, segments, .. }, error)) = self.launch(Flight { asked: *asked, group: None }, request)
        {
            let contents = self.contents(buf, segments);
            self.reply(conn, asked, Err(error), contents);
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

    fn read(&mut self, conn: &mut Connection, asked: &ClientRequest) {
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
                return self.reply(conn, asked, Err(error), contents);
            }
        }
        self.launch_single(conn, asked, Request::read_segments(asked.offset_bytes, segments, 0));
    }

    /// Called when the buffer for the incoming payload is full.
    fn buffer_is_full(&mut self, conn: &mut Connection) {
        let Input::Payload(mut incoming) = std::mem::replace(&mut conn.input, Input::Header) else { return };
        if incoming.segments.is_none()
            && incoming.left_bytes == 0
            && incoming.next.is_none()
            && let Some(buf) = incoming.buf.take()
        {
            // The whole payload is in one buffer.
            let Incoming { asked, fua, piece_bytes, .. } = incoming;
            let write = Request::write(asked.offset_bytes, piece_bytes, buf, 0);
            return self.launch_single(conn, &asked, Request { buf_offset_bytes: HEADER_ROOM_BYTES, fua, ..write });
        }
        if let Some(buf) = incoming.buf.take() {
            let segments = incoming.segments.get_or_insert_with(|| self.spare_lists.pop().unwrap_or_default());
            if let Err(error) = segments.push(buf, payload_range(0, incoming.piece_bytes)) {
                return self.fail_payload(conn, incoming, error);
            }
        }
        if let Some((buf, filled_bytes, piece_bytes)) = incoming.next.take() {
            (incoming.buf, incoming.filled_bytes, incoming.piece_bytes) = (buf, filled_bytes, piece_bytes);
            conn.input = Input::Payload(incoming);
            return;
        }
        self.continue_payload(conn, incoming);
    }

    /// Takes the payload bytes in the window without a copy if `Window::share` allows it, and takes
    /// a buffer for the bytes to come. Launches the write if no more bytes are to come.
    fn continue_payload(&mut self, conn: &mut Connection, mut incoming: Incoming) {
        let takes_any_address = self.queues[incoming.asked.export as usize]
            .as_ref()
            .is_some_and(|queue| queue.memory_alignment_bytes() == 1);
        if takes_any_address && let Some((window, range)) = conn.window.share(incoming.left_bytes) {
            incoming.left_bytes -= range.len();
            let segments = incoming.segments.get_or_insert_with(|| self.spare_lists.pop().unwrap_or_default());
            if let Err(error) = segments.push(window, range) {
                return self.fail_payload(conn, incoming, error);
            }
        }
        if incoming.left_bytes > 0 {
            incoming.piece_bytes = incoming.left_bytes.min(PIECE_BYTES);
            incoming.left_bytes -= incoming.piece_bytes;
            (incoming.buf, incoming.filled_bytes) = (Some(self.pool.take(incoming.piece_bytes)), 0);
            conn.input = Input::Payload(incoming);
        } else if let Some(segments) = incoming.segments {
            let write = Request::write_segments(incoming.asked.offset_bytes, segments, 0);
            self.launch_single(conn, &incoming.asked, Request { fua: incoming.fua, ..write });
        }
    }

    /// Replies with an error to a write whose segments could not be put together, and skips the
    /// rest of its payload.
    fn fail_payload(&mut self, conn: &mut Connection, incoming: Incoming, error: io::Error) {
        let (next, next_left) = match incoming.next {
            Some((buf, filled_bytes, piece_bytes)) => (buf, piece_bytes - filled_bytes),
            None => (None, 0),
        };
        conn.input = Input::Skip((incoming.left_bytes + next_left) as u64);
        next.into_iter().for_each(|buf| self.pool.give(buf));
        let contents = self.contents(incoming.buf, incoming.segments);
        self.reply(conn, &incoming.asked, Err(error), contents);
    }

    fn clear(&mut self, conn: &mut Connection, asked: &ClientRequest, operation: Operation, fua: bool) {
        if asked.len_bytes <= STEP_BYTES {
            let request = Request::discard(asked.offset_bytes, asked.len_bytes, 0);
            return self.launch_single(conn, asked, Request { operation, fua, ..request });
        }
        let end_bytes = asked.offset_bytes + asked.len_bytes;
        let steps = Steps { operation, next_bytes: asked.offset_bytes, end_bytes, fua };
        let group = self.groups.insert(Group { asked: *asked, pending: 1, error: None, steps });
        self.step(group);
        if let Some(Completed { asked, result, contents }) = self.step_ended(group) {
            self.reply(conn, &asked, result, contents);
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

    /// Starts the next step of a range that is cleared, unless the range is done or a step has
    /// failed.
    fn step(&mut self, group: u32) {
        let Some(of) = self.groups.get_mut(group) else { return };
        let Steps { operation, next_bytes, end_bytes, fua } = of.steps;
        if of.error.is_some() || next_bytes == end_bytes {
            return;
        }
        let len_bytes = STEP_BYTES.min(end_bytes - next_bytes);
        of.steps.next_bytes += len_bytes;
        of.pending += 1;
        let request = Request { operation, fua, ..Request::discard(next_bytes, len_bytes, 0) };
        let flight = Flight { asked: of.asked, group: Some(group) };
        if let Err((_, error)) = self.launch(flight, request)
            && let Some(of) = self.groups.get_mut(group)
        {
            of.pending -= 1;
            of.error.get_or_insert(error);
        }
    }

    /// One step of a group has ended. Returns the group's result if that was the last.
    fn step_ended(&mut self, group: u32) -> Option<Completed> {
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
    pub(crate) fn completed(&mut self, completion: Completion) -> Option<Completed> {
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

    fn reply_status(&mut self, conn: &mut Connection, asked: &ClientRequest, session: &Session, only_one: bool) {
        let ClientRequest { offset_bytes, len_bytes, .. } = *asked;
        let contexts = &session.contexts;
        if contexts.is_empty() {
            let error = refusal(io::ErrorKind::InvalidInput, "no metadata context was negotiated for this export");
            return self.reply(conn, asked, Err(error), Contents::default());
        }
        let request = StatusRequest { answering: asked.answering(), offset_bytes, len_bytes, only_one };
        let mut answer = std::mem::take(&mut self.scratch);
        answer.clear();
        let device = &self.exports.get(session.export).device;
        let began = Instant::now();
        let found = catch_panic(|| status::answer(device.as_ref(), contexts, &request, status::PATIENCE, &mut answer));
        // Errors count too: a slow failure delays the other clients just as much.
        conn.turn_is_over |= began.elapsed() > STATUS_TURN;
        match found {
            Ok(()) => {
                conn.outbox.put(&answer, &mut self.pool);
                self.count(conn, asked, None);
            }
            Err(error) => self.reply(conn, asked, Err(error), Contents::default()),
        }
        self.scratch = answer;
    }

    /// Counts a request that was answered, in the client's share and in the metrics.
    pub(crate) fn count(&self, conn: &mut Connection, asked: &ClientRequest, error: Option<ErrorCode>) {
        conn.outbox.count(Share::of(asked.held_bytes()));
        self.metrics.answered(asked.command, asked.len_bytes, self.now_ns.saturating_sub(asked.taken_ns), error);
    }
}
