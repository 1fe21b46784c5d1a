//! Where requests of clients become requests of disks, and their ends become replies.
//!
//! ```text
//!   window ─▶ take_requests ─┬─ refused ────────────────────────▶ reply
//!                            ├─ READ, FLUSH, TRIM, ... ─▶ launch ─▶ queue ─▶ landed ─▶ reply ─▶ outbox
//!                            └─ WRITE ─▶ payload, piece by piece ─▶ launch ─┘
//! ```
//!
//! A request of a client is one request of a queue, however long it is: a payload above
//! [`PIECE_BYTES`] is in segments. What of a write has come with its header is written from where
//! it was received, if the queue takes memory at any address and the window is worth it (`window`).
//!
//! The desk has everything that a worker has but its connections, so that it can work on one of
//! those.
//!
//! Everything that a client says is checked here: its range against the disk, its flags against the
//! command, its length against what was agreed on. A request that cannot be is answered with an
//! error; the session ends only where it is not known any more what the next bytes are, or where
//! they are more than anybody may send.

use super::{
    connection::{Connection, Incoming, Input, State, payload_range},
    export::Exports,
    flights::{Asked, Contents, Flight, Group, Landed, Steps, Table},
    handshake::{HandshakeError, Session},
    outbox::Share,
    pool::{HEADER_ROOM_BYTES, PIECE_BYTES, Pool},
    status::{self, StatusRequest},
};
use crate::{contained::contained, metrics::WorkerMetrics};
use diskwright_nbd::wire::{
    Command, CommandFlags, Decoded, ErrorCode, Framing, PAYLOAD_BYTES_DEFAULT, RequestHeader, WireError,
};
use diskwright_store::{BlockQueue, Completion, IoBuf, Operation, Request, Segments};
use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

/// Most requests of one queue in flight. A queue has many clients.
pub(crate) const QUEUE_DEPTH: usize = 8192;

/// Lists of segments that are kept for the next payloads.
const SPARE_LISTS: usize = 256;

/// Bytes that are cleared at once; more are cleared step by step, so that others get their turn.
const STEP_BYTES: u64 = 256 << 20;

/// A write's payload that is longer than it may be is skipped up to this length; what is longer
/// ends the session.
const SKIP_BYTES_MAX: u64 = 2 * PAYLOAD_BYTES_DEFAULT as u64;

/// Block status is found at once, by the worker. Who made it look for longer than this waits for
/// the others before his next request.
const STATUS_TURN: Duration = Duration::from_micros(200);

/// What a client may have in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ShareLimit {
    pub(crate) requests: u32,
    /// Of payload. One request goes whatever its size.
    pub(crate) bytes: usize,
}

/// Why a session ends.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Departure {
    #[error("the client has said goodbye")]
    Goodbye,
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("the disk gives no queue: {0}")]
    Queue(io::Error),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Desk {
    pub(crate) pool: Pool,
    pub(crate) exports: Arc<Exports>,
    pub(crate) queues: Vec<Option<Box<dyn BlockQueue>>>,
    pub(crate) flights: Table<Flight>,
    pub(crate) groups: Table<Group>,
    pub(crate) limit: ShareLimit,
    pub(crate) metrics: Arc<WorkerMetrics>,
    /// The worker's clock at the beginning of the turn.
    pub(crate) now_ns: u64,
    /// Whether a queue was pushed to since it was last reaped.
    pub(crate) pushed: bool,
    /// For answers that are put together before they are sent.
    pub(crate) scratch: Vec<u8>,
    /// Empty lists of segments, boxed as requests have them.
    #[expect(clippy::vec_box, reason = "the boxes are what is spared")]
    spare_lists: Vec<Box<Segments>>,
}

/// A request that cannot be done.
fn refusal(kind: io::ErrorKind, what: &str) -> io::Error {
    io::Error::new(kind, what.to_owned())
}

impl Desk {
    pub(crate) fn new(exports: Arc<Exports>, limit: ShareLimit, metrics: Arc<WorkerMetrics>) -> Self {
        Self {
            pool: Pool::new(),
            queues: exports.iter().map(|_| None).collect(),
            exports,
            flights: Table::default(),
            groups: Table::default(),
            limit,
            metrics,
            now_ns: 0,
            pushed: false,
            scratch: Vec::new(),
            spare_lists: Vec::new(),
        }
    }

    /// Works off what the connection's window holds, as far as it goes.
    pub(crate) fn take_requests(
        &mut self,
        conn: &mut Connection,
        number: u32,
        session: &Session,
    ) -> Result<(), Departure> {
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
                    self.piece_has_come(conn);
                }
                Input::Header => {
                    if conn.window.bytes().is_empty() {
                        return Ok(());
                    }
                    if !self.has_room_for(conn, session) {
                        conn.stalled = true;
                        return Ok(());
                    }
                    let framing = session.framing;
                    let Decoded::Value(header, used) = RequestHeader::decode(conn.window.bytes(), framing)? else {
                        return Ok(());
                    };
                    conn.window.consume(used);
                    self.take(conn, number, session, &header)?;
                    if conn.gives_way {
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

    /// Takes one request.
    fn take(
        &mut self,
        conn: &mut Connection,
        number: u32,
        session: &Session,
        header: &RequestHeader,
    ) -> Result<(), Departure> {
        let RequestHeader { flags, command, cookie, offset_bytes, len_bytes } = *header;
        if command == Command::DISCONNECT {
            return Err(Departure::Goodbye);
        }
        conn.requests += 1;
        let asked = Asked { command, cookie, offset_bytes, len_bytes, ..Asked::of(session, number, self.now_ns) };
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
        let fua = flags.contains(CommandFlags::FUA);
        match command {
            Command::READ => self.read(conn, &asked),
            Command::WRITE => {
                self.go_on_with_payload(conn, Incoming::new(asked, fua));
            }
            Command::FLUSH => self.launch_single(conn, &asked, Request::flush(0)),
            Command::TRIM => self.clear(conn, &asked, Operation::Discard, fua),
            Command::WRITE_ZEROES if flags.contains(CommandFlags::NO_HOLE) => {
                self.clear(conn, &asked, Operation::WriteZeroes, fua);
            }
            // A discard makes zeros of the range as well, and gives the space back, which without
            // NO_HOLE is liked.
            Command::WRITE_ZEROES => self.clear(conn, &asked, Operation::Discard, fua),
            Command::CACHE if len_bytes > u64::from(PAYLOAD_BYTES_DEFAULT) => {
                // A hint, and more than is worth to be read ahead.
                self.reply(conn, &asked, Ok(()), Contents::default());
            }
            Command::CACHE => self.read(conn, &asked),
            _ => self.tell_status(conn, &asked, session, flags.contains(CommandFlags::REQ_ONE)),
        }
        Ok(())
    }

    /// Whether the request can be.
    fn check(&self, asked: &Asked, flags: CommandFlags) -> io::Result<()> {
        use io::ErrorKind::{InvalidInput, ReadOnlyFilesystem, StorageFull};
        let command = asked.command;
        let chunks = asked.framing != Framing::Simple;
        let mut known = CommandFlags::FUA;
        match command {
            Command::READ if chunks => known |= CommandFlags::DF,
            Command::WRITE if asked.framing == Framing::Extended => {
                known |= CommandFlags::PAYLOAD_LEN;
                if !flags.contains(CommandFlags::PAYLOAD_LEN) {
                    return Err(refusal(InvalidInput, "a write with extended headers needs the flag PAYLOAD_LEN"));
                }
            }
            Command::WRITE_ZEROES => known |= CommandFlags::NO_HOLE | CommandFlags::FAST_ZERO,
            Command::BLOCK_STATUS if chunks => known |= CommandFlags::REQ_ONE,
            Command::BLOCK_STATUS => {
                return Err(refusal(InvalidInput, "block status needs structured replies or extended headers"));
            }
            Command::READ | Command::WRITE | Command::TRIM | Command::CACHE => {}
            Command::FLUSH => {
                return if known.contains(flags) {
                    Ok(())
                } else {
                    Err(refusal(InvalidInput, "the request has a flag that does not belong to it"))
                };
            }
            other => return Err(refusal(InvalidInput, &format!("this server does not know {other}"))),
        }
        if !known.contains(flags) {
            return Err(refusal(InvalidInput, "the request has a flag that does not belong to it"));
        }
        let geometry = self.exports.get(asked.export as usize).device.geometry();
        let writes = matches!(command, Command::WRITE | Command::TRIM | Command::WRITE_ZEROES);
        if writes && geometry.read_only {
            return Err(refusal(ReadOnlyFilesystem, "the export is read-only"));
        }
        if asked.len_bytes == 0 {
            return Err(refusal(InvalidInput, "a request of length 0"));
        }
        let end_bytes = asked.offset_bytes.checked_add(asked.len_bytes);
        if end_bytes.is_none_or(|end_bytes| end_bytes > geometry.size_bytes) {
            let kind = if writes { StorageFull } else { InvalidInput };
            let (offset, len, size) = (asked.offset_bytes, asked.len_bytes, geometry.size_bytes);
            return Err(refusal(kind, &format!("offset {offset} plus length {len} reach beyond the end at {size}")));
        }
        if (asked.offset_bytes | asked.len_bytes) & (u64::from(geometry.logical_sector_bytes) - 1) != 0 {
            let what = format!("offset and length must be multiples of {} bytes", geometry.logical_sector_bytes);
            return Err(refusal(InvalidInput, &what));
        }
        if matches!(command, Command::READ | Command::WRITE) && asked.len_bytes > u64::from(PAYLOAD_BYTES_DEFAULT) {
            let what = format!("{} bytes at once; at most {PAYLOAD_BYTES_DEFAULT} can be moved", asked.len_bytes);
            return Err(refusal(InvalidInput, &what));
        }
        Ok(())
    }

    /// Hands a request to the export's queue. It comes back where that refuses.
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

    /// A request of a client that is one of the queue.
    fn launch_single(&mut self, conn: &mut Connection, asked: &Asked, request: Request) {
        if let Err((Request { buf, segments, .. }, error)) = self.launch(Flight { asked: *asked, group: None }, request)
        {
            let contents = self.contents(buf, segments);
            self.reply(conn, asked, Err(error), contents);
        }
    }

    /// The buffers of a request that has ended. Its list of segments is kept.
    pub(crate) fn contents(&mut self, buf: Option<IoBuf>, segments: Option<Box<Segments>>) -> Contents {
        let Some(mut segments) = segments else { return Contents::of(buf, None) };
        let contents = Contents::of(buf, Some(&mut segments));
        if self.spare_lists.len() < SPARE_LISTS {
            self.spare_lists.push(segments);
        }
        contents
    }

    fn read(&mut self, conn: &mut Connection, asked: &Asked) {
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

    /// The buffer of the payload that is coming in is full.
    fn piece_has_come(&mut self, conn: &mut Connection) {
        let Input::Payload(mut incoming) = std::mem::replace(&mut conn.input, Input::Header) else { return };
        if incoming.segments.is_none()
            && incoming.left_bytes == 0
            && incoming.next.is_none()
            && let Some(buf) = incoming.buf.take()
        {
            // All of it in one buffer.
            let Incoming { asked, fua, piece_bytes, .. } = incoming;
            let write = Request::write(asked.offset_bytes, piece_bytes, buf, 0);
            return self.launch_single(conn, &asked, Request { buf_offset_bytes: HEADER_ROOM_BYTES, fua, ..write });
        }
        if let Some(buf) = incoming.buf.take() {
            let segments = incoming.segments.get_or_insert_with(|| self.spare_lists.pop().unwrap_or_default());
            if let Err(error) = segments.push(buf, payload_range(0, incoming.piece_bytes)) {
                return self.give_up_payload(conn, incoming, error);
            }
        }
        if let Some((buf, filled_bytes, piece_bytes)) = incoming.next.take() {
            (incoming.buf, incoming.filled_bytes, incoming.piece_bytes) = (buf, filled_bytes, piece_bytes);
            conn.input = Input::Payload(incoming);
            return;
        }
        self.go_on_with_payload(conn, incoming);
    }

    /// Takes what there is of a payload where it lies, if that is worth it, and finds memory for
    /// what is to come; or launches the write when there is nothing more to come.
    fn go_on_with_payload(&mut self, conn: &mut Connection, mut incoming: Incoming) {
        let takes_any_address = self.queues[incoming.asked.export as usize]
            .as_ref()
            .is_some_and(|queue| queue.memory_alignment_bytes() == 1);
        if takes_any_address && let Some((window, range)) = conn.window.share(incoming.left_bytes) {
            incoming.left_bytes -= range.len();
            let segments = incoming.segments.get_or_insert_with(|| self.spare_lists.pop().unwrap_or_default());
            if let Err(error) = segments.push(window, range) {
                return self.give_up_payload(conn, incoming, error);
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

    /// A payload whose memory could not be put together.
    fn give_up_payload(&mut self, conn: &mut Connection, incoming: Incoming, error: io::Error) {
        let (next, next_left) = match incoming.next {
            Some((buf, filled_bytes, piece_bytes)) => (buf, piece_bytes - filled_bytes),
            None => (None, 0),
        };
        conn.input = Input::Skip((incoming.left_bytes + next_left) as u64);
        next.into_iter().for_each(|buf| self.pool.give(buf));
        let contents = self.contents(incoming.buf, incoming.segments);
        self.reply(conn, &incoming.asked, Err(error), contents);
    }

    fn clear(&mut self, conn: &mut Connection, asked: &Asked, operation: Operation, fua: bool) {
        if asked.len_bytes <= STEP_BYTES {
            let request = Request::discard(asked.offset_bytes, asked.len_bytes, 0);
            return self.launch_single(conn, asked, Request { operation, fua, ..request });
        }
        let end_bytes = asked.offset_bytes + asked.len_bytes;
        let steps = Steps { operation, next_bytes: asked.offset_bytes, end_bytes, fua };
        let group = self.groups.insert(Group { asked: *asked, pending: 1, error: None, steps });
        self.step(group);
        if let Some(Landed { asked, result, contents }) = self.let_go(group) {
            self.reply(conn, &asked, result, contents);
        }
    }

    /// Begins nothing more for a connection that is closed.
    pub(crate) fn abandon(&mut self, connection: u32) {
        for number in self.groups.numbers().collect::<Vec<_>>() {
            if let Some(of) = self.groups.get(number)
                && of.asked.connection == connection
            {
                of.error.get_or_insert_with(|| io::Error::other("the client has gone"));
            }
        }
    }

    /// Starts the next step of a range that is cleared, if there is one and nothing has failed.
    fn step(&mut self, group: u32) {
        let Some(of) = self.groups.get(group) else { return };
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
            && let Some(of) = self.groups.get(group)
        {
            of.pending -= 1;
            of.error.get_or_insert(error);
        }
    }

    /// One thing fewer that a group waits for. Its end, if that was the last.
    fn let_go(&mut self, group: u32) -> Option<Landed> {
        let of = self.groups.get(group)?;
        of.pending -= 1;
        if of.pending > 0 {
            return None;
        }
        let of = self.groups.remove(group)?;
        Some(Landed { asked: of.asked, result: of.error.map_or(Ok(()), Err), contents: Contents::default() })
    }

    /// A request of a queue has ended. What that means for a client's request, if it has ended with
    /// it.
    pub(crate) fn landed(&mut self, completion: Completion) -> Option<Landed> {
        let Completion { tag, buf, segments, result } = completion;
        let flight = self.flights.remove(tag as u32)?;
        let Some(group) = flight.group else {
            let contents = self.contents(buf, segments);
            return Some(Landed { asked: flight.asked, result, contents });
        };
        let of = self.groups.get(group)?;
        if let Err(error) = result {
            of.error.get_or_insert(error);
        }
        self.step(group);
        self.let_go(group)
    }

    fn tell_status(&mut self, conn: &mut Connection, asked: &Asked, session: &Session, only_one: bool) {
        let Asked { offset_bytes, len_bytes, .. } = *asked;
        let contexts = session.contexts;
        if !contexts.allocation && !contexts.depth {
            let error = refusal(io::ErrorKind::InvalidInput, "no context was agreed on for this export");
            return self.reply(conn, asked, Err(error), Contents::default());
        }
        let request = StatusRequest { answering: asked.answering(), offset_bytes, len_bytes, only_one };
        let mut answer = std::mem::take(&mut self.scratch);
        answer.clear();
        let device = &self.exports.get(session.export).device;
        let began = Instant::now();
        let found = contained(|| status::answer(device.as_ref(), contexts, &request, status::PATIENCE, &mut answer));
        // However it ended: to fail slowly holds up the others no less.
        conn.gives_way |= began.elapsed() > STATUS_TURN;
        match found {
            Ok(()) => {
                conn.outbox.put(&answer, &mut self.pool);
                self.count(conn, asked, None);
            }
            Err(error) => self.reply(conn, asked, Err(error), Contents::default()),
        }
        self.scratch = answer;
    }

    /// Counts a request that was answered.
    pub(crate) fn count(&self, conn: &mut Connection, asked: &Asked, error: Option<ErrorCode>) {
        conn.outbox.count(Share::of(asked.held_bytes()));
        self.metrics.answered(asked.command, asked.len_bytes, self.now_ns.saturating_sub(asked.taken_ns), error);
    }
}
