//! One client: where it is in the protocol, what it has sent and what it has yet to be told. The
//! worker moves it (`worker`, `requests`).
//!
//! ```text
//!   stream ─▶ window ─┬─▶ handshake ─▶ answers ─────────────────────┐
//!     (TLS between)   └─▶ requests ─▶ disk ─▶ replies ─▶ outbox ─▶ stream
//!                           └─ payload of a write ─▶ written from the window, or received into its own buffer
//! ```
//!
//! The *window* holds bytes that were received and not yet understood. One receive brings as many
//! requests as the client had sent. What of a write's payload is there already is written from the
//! window, or copied (`window` says when), and what is missing is received in place.
//!
//! Bounds: a client's requests in flight, and the bytes of their payloads, count from the moment
//! they are taken until their replies have been sent ([`Connection::share`]); at the limit nothing
//! more is received from it. A window that is *retired*, because writes of its bytes are in flight
//! when the next receive needs one, counts with its other bytes until the last of these writes has
//! ended.

use super::{
    flights::{Asked, Contents},
    handshake::{Handshake, Session},
    outbox::{Outbox, Share},
    pool::{HEADER_ROOM_BYTES, PIECE_BYTES, Pool},
    secure::{RAW_BYTES, Secure},
    window::{Retired, Window},
};
use diskwright_store::{IoBuf, Piece, Segments, StreamId};
use std::{collections::VecDeque, fmt, io, sync::Arc};

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
    /// What is there, of a payload that is not in one buffer.
    pub(crate) segments: Option<Box<Segments>>,
    /// Bytes for which there is no memory yet: behind the segments and the buffers.
    pub(crate) left_bytes: usize,
    /// Where the next bytes are put, unless it is on its way to the kernel.
    pub(crate) buf: Option<IoBuf>,
    /// Bytes in the buffer.
    pub(crate) filled_bytes: usize,
    /// Bytes that the buffer will hold.
    pub(crate) piece_bytes: usize,
    /// A buffer for what follows, so that a receive is not cut where the first is full: its bytes
    /// that were filled, and those that it will hold.
    pub(crate) next: Option<(Option<IoBuf>, usize, usize)>,
}

impl Incoming {
    pub(crate) fn new(asked: Asked, fua: bool) -> Self {
        let left_bytes = asked.len_bytes as usize;
        Self { asked, fua, segments: None, left_bytes, buf: None, filled_bytes: 0, piece_bytes: 0, next: None }
    }
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

/// See the module.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) stream: StreamId,
    pub(crate) peer: Peer,
    pub(crate) phase: Phase,
    pub(crate) state: State,
    pub(crate) secure: Option<Box<Secure>>,
    pub(crate) window: Window,
    /// Windows of which bytes are being written, oldest first.
    retired: VecDeque<Retired>,
    pub(crate) input: Input,
    pub(crate) outbox: Outbox,
    /// A receive is in flight.
    pub(crate) receiving: bool,
    /// Whether it waits for its requests to be answered before more are taken, and is on the
    /// worker's list for that.
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
            retired: VecDeque::new(),
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

    /// Gives up everything that is not in flight.
    pub(crate) fn release(&mut self, pool: &mut Pool) {
        let dropped = self.outbox.clear(pool);
        self.share.sub(dropped);
        self.abandon_input(pool);
        if let Some(retired) = self.window.release(pool) {
            self.retire(retired);
        }
        if let Some(secure) = &mut self.secure {
            secure.raw.take().into_iter().for_each(|buf| pool.give(buf));
        }
    }

    /// Takes nothing more.
    pub(crate) fn abandon_input(&mut self, pool: &mut Pool) {
        if let Input::Payload(mut incoming) = std::mem::replace(&mut self.input, Input::Skip(u64::MAX)) {
            let next = incoming.next.and_then(|(buf, ..)| buf);
            let contents = Contents::of(incoming.buf, incoming.segments.as_deref_mut());
            contents.into_bufs().chain(next).for_each(|buf| pool.give(buf));
            self.share.sub(Share::of(incoming.asked.held_bytes()));
        }
    }

    fn retire(&mut self, retired: Retired) {
        self.share.bytes += retired.other_bytes;
        self.retired.push_back(retired);
    }

    /// Writes have ended: takes back the windows of which no byte is being written any more. One
    /// that is still in use keeps those behind it.
    pub(crate) fn reclaim(&mut self, pool: &mut Pool) {
        while let Some(Retired { window, other_bytes }) = self.retired.pop_front() {
            match Arc::try_unwrap(window) {
                Ok(buf) => {
                    pool.give(buf);
                    self.share.bytes -= other_bytes;
                }
                Err(window) => return self.retired.push_front(Retired { window, other_bytes }),
            }
        }
    }

    /// A receive has ended: takes the buffers back.
    pub(crate) fn take_back(&mut self, buf: Option<IoBuf>, mut pieces: Vec<Piece>, pool: &mut Pool) {
        self.receiving = false;
        // The window was lent last, the payload's buffers, if there were any, before it.
        let has_window = self.secure.is_some() || self.window.is_lent();
        let window = if has_window { buf.or_else(|| pieces.pop().map(|(buf, _)| buf)) } else { None };
        let next = if pieces.len() > 1 { pieces.pop().map(|(buf, _)| buf) } else { None };
        let buf = pieces.pop().map(|(buf, _)| buf);
        if let Input::Payload(incoming) = &mut self.input {
            incoming.buf = buf.or(incoming.buf.take());
            if let (Some(of), Some(buf)) = (&mut incoming.next, next) {
                of.0 = Some(buf);
            }
        } else {
            buf.into_iter().chain(next).for_each(|buf| pool.give(buf));
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

    /// What is lent for the next receive: the rooms for the payload that is coming in, if one is,
    /// and, unless more of it will follow, the window.
    pub(crate) fn lend(&mut self, pool: &mut Pool) -> Vec<Piece> {
        self.receiving = true;
        let mut pieces = std::mem::take(&mut self.spare);
        if let Some(retired) = self.window.renew(pool) {
            self.retire(retired);
        }
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
            if incoming.next.is_none() && incoming.left_bytes > 0 {
                let next_bytes = incoming.left_bytes.min(PIECE_BYTES);
                incoming.left_bytes -= next_bytes;
                incoming.next = Some((Some(pool.take(next_bytes)), 0, next_bytes));
            }
            if let Some((next, filled_bytes, next_bytes)) = &mut incoming.next {
                pieces.extend(next.take().map(|buf| (buf, payload_range(*filled_bytes, *next_bytes))));
            }
        }
        if !matches!(&self.input, Input::Payload(incoming) if incoming.left_bytes > 0) {
            pieces.extend(self.window.lend());
        }
        pieces
    }

    /// So many bytes were received into what [`Connection::lend`] gave and
    /// [`Connection::take_back`] took.
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
            if let Some((_, filled_bytes, next_bytes)) = &mut incoming.next {
                let in_place = left_bytes.min(*next_bytes - *filled_bytes);
                *filled_bytes += in_place;
                left_bytes -= in_place;
            }
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
