//! One client: where it is in the protocol, what it has sent and what it has yet to be told. The worker moves it (`worker`, `requests`).
//!
//! ```text
//!   stream ─▶ window ─┬─▶ handshake ─▶ answers ─────────────────────┐
//!     (TLS between)   └─▶ requests ─▶ disk ─▶ replies ─▶ outbox ─▶ stream
//!                           └─ payload of a write ─▶ its own buffer
//! ```
//!
//! The *window* holds bytes that were received and not yet understood. One receive brings as many requests as the client had sent; the
//! payload of a write is copied from the window as far as it is there already, and what is missing is received in place.
//!
//! Bounds: a client's requests in flight, and the bytes of their payloads, count from the moment they are taken until their
//! replies have been sent ([`Connection::share`]); at the limit nothing more is received from it.

use super::{
    flights::Asked,
    handshake::{Handshake, Session},
    outbox::{Outbox, Share},
    pool::{HEADER_ROOM_BYTES, Pool},
    secure::{RAW_BYTES, Secure},
};
use diskwright_store::{IoBuf, Piece, StreamId};
use std::{fmt, io};

/// Bytes of a window: an option of the largest size fits, or thirty writes of 4 KiB.
const WINDOW_BYTES: usize = 128 << 10;

/// Who is at the other end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Peer {
    Tcp(std::net::SocketAddr),
    /// Process and user, where the kernel tells.
    Unix(Option<(i32, u32)>),
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(Some((process, user))) => write!(f, "process {process} of user {user}"),
            Self::Unix(None) => f.write_str("a local process"),
        }
    }
}

/// Where it is in the protocol.
#[derive(Debug)]
pub(crate) enum Phase {
    Handshake(Handshake),
    Transmission(Session),
}

/// The payload of a write, while it comes in.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub(crate) asked: Asked,
    pub(crate) fua: bool,
    /// Where it is put, unless it is on its way to the kernel.
    pub(crate) buf: Option<IoBuf>,
    /// Bytes in the buffer.
    pub(crate) filled_bytes: usize,
    /// Bytes that the buffer will hold.
    pub(crate) piece_bytes: usize,
    /// Bytes of the pieces before this one.
    pub(crate) before_bytes: u64,
    /// For a write in pieces: its group, and the number of this piece.
    pub(crate) group: Option<(u32, u32)>,
}

/// What the next bytes are.
#[derive(Debug)]
pub(crate) enum Input {
    /// A header.
    Header,
    /// The payload of a write.
    Payload(Incoming),
    /// The payload of a write that was refused; so many bytes are left.
    Skip(u64),
}

/// Whether it goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Open,
    /// Nothing more is taken; what was taken is answered.
    Draining,
    /// The stream is being closed.
    Closing,
}

/// Bytes that were received and not yet understood.
#[derive(Debug, Default)]
pub(crate) struct Window {
    buf: Option<IoBuf>,
    start: usize,
    end: usize,
}

impl Window {
    pub(crate) fn new(pool: &mut Pool) -> Self {
        Self { buf: Some(pool.take(WINDOW_BYTES)), start: 0, end: 0 }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.buf.as_ref().map_or(&[], |buf| &buf[self.start..self.end])
    }

    pub(crate) fn consume(&mut self, bytes: usize) {
        self.start = (self.start + bytes).min(self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Moves what is left to the front, so that there is room behind it.
    fn compact(&mut self) {
        if self.start > 0
            && let Some(buf) = &mut self.buf
        {
            buf.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
    }

    /// The room behind what is there, to write to. As large as can be.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        self.compact();
        let end = self.end;
        self.buf.as_mut().map_or(&mut [], |buf| &mut buf[end..])
    }

    /// Lends the buffer for a receive into the room.
    pub(crate) fn lend(&mut self) -> Option<(IoBuf, std::ops::Range<usize>)> {
        self.compact();
        self.buf.take().map(|buf| {
            let room = self.end..buf.len();
            (buf, room)
        })
    }

    /// Takes the buffer back.
    pub(crate) fn give(&mut self, buf: IoBuf) {
        self.buf = Some(buf);
    }

    /// So many bytes were put into the room.
    pub(crate) fn fill(&mut self, bytes: usize) {
        self.end += bytes;
    }

    fn release(&mut self, pool: &mut Pool) {
        (self.start, self.end) = (0, 0);
        self.buf.take().into_iter().for_each(|buf| pool.give(buf));
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) stream: StreamId,
    pub(crate) peer: Peer,
    pub(crate) phase: Phase,
    pub(crate) state: State,
    pub(crate) secure: Option<Box<Secure>>,
    pub(crate) window: Window,
    pub(crate) input: Input,
    pub(crate) outbox: Outbox,
    /// A receive is in flight.
    pub(crate) receiving: bool,
    /// Whether it waits for its requests to be answered before more are taken, and is on the worker's list for that.
    pub(crate) stalled: bool,
    /// Whether it has had its turn, and goes on in the next one.
    pub(crate) gives_way: bool,
    /// TLS begins when everything has been sent.
    pub(crate) starts_tls: bool,
    /// Whether it is on the worker's list of those who have something to send.
    pub(crate) to_send: bool,
    /// Requests taken and not answered.
    pub(crate) share: Share,
    /// Since when, by the worker's clock, it is in its phase or draining.
    pub(crate) since_ns: u64,
    /// Requests taken in all, for the log.
    pub(crate) requests: u64,
    /// A list to be used again.
    spare: Vec<Piece>,
}

impl Connection {
    pub(crate) fn new(stream: StreamId, peer: Peer, handshake: Handshake, since_ns: u64, pool: &mut Pool) -> Self {
        Self {
            stream,
            peer,
            phase: Phase::Handshake(handshake),
            state: State::Open,
            secure: None,
            window: Window::new(pool),
            input: Input::Header,
            outbox: Outbox::default(),
            receiving: false,
            stalled: false,
            gives_way: false,
            starts_tls: false,
            to_send: false,
            share: Share::default(),
            since_ns,
            requests: 0,
            spare: Vec::new(),
        }
    }

    /// Whether there is something to be sent.
    pub(crate) fn has_output(&self) -> bool {
        !self.outbox.is_empty() || self.secure.as_ref().is_some_and(|secure| secure.has_output())
    }

    /// Whether nothing of it is in flight any more.
    pub(crate) fn has_ended(&self) -> bool {
        self.state == State::Closing && !self.receiving && !self.outbox.is_sending() && self.share.requests == 0
    }

    /// Gives up everything that is not in flight. The group of a write that was coming in is for the caller to end.
    pub(crate) fn release(&mut self, pool: &mut Pool) -> Option<u32> {
        let dropped = self.outbox.clear(pool);
        self.share.sub(dropped);
        self.window.release(pool);
        if let Some(secure) = &mut self.secure {
            secure.raw.take().into_iter().for_each(|buf| pool.give(buf));
        }
        self.abandon_input(pool)
    }

    /// Takes nothing more. The group of a write that was coming in is for the caller to end.
    pub(crate) fn abandon_input(&mut self, pool: &mut Pool) -> Option<u32> {
        match std::mem::replace(&mut self.input, Input::Skip(u64::MAX)) {
            Input::Payload(incoming) => {
                incoming.buf.into_iter().for_each(|buf| pool.give(buf));
                if incoming.group.is_none() {
                    self.share.sub(Share::of(incoming.asked.held_bytes()));
                }
                incoming.group.map(|(group, _)| group)
            }
            Input::Header | Input::Skip(_) => None,
        }
    }

    /// A receive has ended: takes the buffers back.
    pub(crate) fn take_back(&mut self, buf: Option<IoBuf>, mut pieces: Vec<Piece>, pool: &mut Pool) {
        self.receiving = false;
        // The window was lent last, the payload's buffer, if there was one, before it.
        let window = buf.or_else(|| pieces.pop().map(|(buf, _)| buf));
        match (pieces.pop(), &mut self.input) {
            (Some((buf, _)), Input::Payload(incoming)) => incoming.buf = Some(buf),
            (Some((buf, _)), _) => pool.give(buf),
            (None, _) => {}
        }
        if pieces.capacity() > 0 {
            self.spare = pieces;
        }
        match (window, &mut self.secure) {
            (Some(buf), _) if self.state == State::Closing => pool.give(buf),
            (Some(raw), Some(secure)) => secure.raw = Some(raw),
            (Some(buf), None) => self.window.give(buf),
            (None, _) => {}
        }
    }

    /// Keeps an empty list for later.
    pub(crate) fn keep(&mut self, list: Vec<Piece>) {
        self.spare = list;
    }

    /// What is lent for the next receive: the room of the payload that is coming in, if one is, and the window.
    pub(crate) fn lend(&mut self, pool: &mut Pool) -> Vec<Piece> {
        self.receiving = true;
        let mut pieces = std::mem::take(&mut self.spare);
        if let Some(secure) = &mut self.secure {
            // What is plain is no more than what is raw.
            let room_bytes = self.window.room().len().min(RAW_BYTES);
            let raw = secure.raw.take().unwrap_or_else(|| pool.take(RAW_BYTES));
            pieces.push((raw, HEADER_ROOM_BYTES..HEADER_ROOM_BYTES + room_bytes));
            return pieces;
        }
        if let Input::Payload(incoming) = &mut self.input
            && let Some(buf) = incoming.buf.take()
        {
            pieces.push((buf, payload_range(incoming.filled_bytes, incoming.piece_bytes)));
        }
        pieces.extend(self.window.lend());
        pieces
    }

    /// So many bytes were received into what [`Connection::lend`] gave and [`Connection::take_back`] took.
    ///
    /// # Errors
    /// What is wrong with them in TLS.
    pub(crate) fn received(&mut self, bytes: usize) -> io::Result<()> {
        if let Some(secure) = &mut self.secure {
            let Some(raw) = secure.raw.take() else { return Ok(()) };
            let fed = secure.feed(&raw[HEADER_ROOM_BYTES..HEADER_ROOM_BYTES + bytes], self.window.room());
            secure.raw = Some(raw);
            self.window.fill(fed?);
            return Ok(());
        }
        let mut left_bytes = bytes;
        if let Input::Payload(incoming) = &mut self.input {
            let in_place = left_bytes.min(incoming.piece_bytes - incoming.filled_bytes);
            incoming.filled_bytes += in_place;
            left_bytes -= in_place;
        }
        self.window.fill(left_bytes);
        Ok(())
    }
}

/// Where in its buffer the payload of a write is received.
pub(crate) fn payload_range(from_bytes: usize, to_bytes: usize) -> std::ops::Range<usize> {
    HEADER_ROOM_BYTES + from_bytes..HEADER_ROOM_BYTES + to_bytes
}

/// Why a client is lost whose stream failed, for the log.
pub(crate) fn loss(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
            "the client left before it had taken its last replies".to_owned()
        }
        _ => error.to_string(),
    }
}
