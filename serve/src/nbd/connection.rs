//! The state of one client: its phase of the protocol, the bytes received, the replies to send.
//! The worker drives it (`worker`, `dispatch`).
//!
//! ```text
//!   stream ─▶ window ─┬─▶ handshake ─▶ replies ─────────────────────┐
//!     (TLS between)   └─▶ requests ─▶ disk ─▶ replies ─▶ outbox ─▶ stream
//!                           └─ a write's payload ─▶ from the window, or received into a buffer
//! ```
//!
//! The *window* holds bytes that were received and not yet decoded. One receive brings as many
//! requests as the client has sent. The bytes of a write's payload that are in the window are
//! written from there or copied (see `window`). The rest is received directly into its buffer.
//!
//! Limits: a request and its payload count from when the request is taken until its reply has been
//! sent ([`Connection::share`]). At the limit nothing more is received from the client. A window
//! is *retired* when a receive needs a window while writes of its bytes are in flight. The bytes of
//! a retired window that are not payload count too, until the last of these writes has ended.

use super::{
    flights::{ClientRequest, Contents},
    handshake::{Handshake, Session},
    outbox::{Outbox, Share},
    peer::Peer,
    pool::{HEADER_ROOM_BYTES, PIECE_BYTES, Pool},
    secure::{RAW_BYTES, Secure},
    window::{Retired, Window},
};
use diskwright_store::{IoBuf, Piece, RateLimiter, Segments, StreamId};
use std::{collections::VecDeque, io, sync::Arc};

#[derive(Debug)]
pub(crate) enum Phase {
    Handshake(Handshake),
    Transmission(Session),
}

/// A write whose payload is being received.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub(crate) asked: ClientRequest,
    pub(crate) fua: bool,
    /// Payload already received, unless the whole payload fits one buffer.
    pub(crate) segments: Option<Box<Segments>>,
    /// Payload bytes that have no buffer yet. They come after the segments and the buffers.
    pub(crate) left_bytes: usize,
    /// The buffer for the next payload bytes; `None` while the kernel has it.
    pub(crate) buf: Option<IoBuf>,
    /// Bytes received into the buffer.
    pub(crate) filled_bytes: usize,
    /// Bytes of payload that the buffer is for.
    pub(crate) piece_bytes: usize,
    /// A second buffer, so that a receive need not end where the first is full: the buffer (`None`
    /// while the kernel has it), the bytes received into it, the bytes that it is for.
    pub(crate) next: Option<(Option<IoBuf>, usize, usize)>,
}

impl Incoming {
    pub(crate) fn new(asked: ClientRequest, fua: bool) -> Self {
        let left_bytes = asked.len_bytes as usize;
        Self { asked, fua, segments: None, left_bytes, buf: None, filled_bytes: 0, piece_bytes: 0, next: None }
    }
}

/// What the next bytes from the client are.
#[derive(Debug)]
pub(crate) enum Input {
    /// A header.
    Header,
    /// The payload of a write.
    Payload(Incoming),
    /// The payload of a write that was refused: this many bytes are left.
    Skip(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Open,
    /// No more requests are taken; those in flight are answered.
    Draining,
    /// The stream is being closed.
    Closing,
}

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) stream: StreamId,
    pub(crate) peer: Peer,
    pub(crate) phase: Phase,
    pub(crate) state: State,
    pub(crate) secure: Option<Box<Secure>>,
    pub(crate) window: Window,
    /// Retired windows, oldest first.
    retired: VecDeque<Retired>,
    pub(crate) input: Input,
    pub(crate) outbox: Outbox,
    /// Whether a receive is in flight.
    pub(crate) receiving: bool,
    /// Whether the client is at its limit. It is then on the worker's list `stalled`.
    pub(crate) stalled: bool,
    /// The limits of the client, if it has any.
    pub(crate) limiter: Option<Box<RateLimiter>>,
    /// The client's next request is not taken before, by the worker's clock.
    pub(crate) not_before_ns: u64,
    /// Whether a timer runs until then.
    pub(crate) waits_for_limit: bool,
    /// Whether the client has used up its turn. It goes on in the next turn.
    pub(crate) turn_is_over: bool,
    /// Whether TLS begins once all replies have been sent.
    pub(crate) starts_tls: bool,
    /// Whether the connection is on the worker's list `to_send`.
    pub(crate) to_send: bool,
    /// Requests that are taken and whose replies have not been sent.
    pub(crate) share: Share,
    /// When the phase or the draining began, by the worker's clock.
    pub(crate) since_ns: u64,
    /// Requests taken since the start, for the log.
    pub(crate) requests: u64,
    /// An empty list for reuse.
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
            limiter: None,
            not_before_ns: 0,
            waits_for_limit: false,
            turn_is_over: false,
            starts_tls: false,
            to_send: false,
            share: Share::default(),
            since_ns,
            requests: 0,
            spare: Vec::new(),
        }
    }

    /// Whether the next request must wait for the client's limits. The payload of one that was
    /// taken is still received.
    pub(crate) fn is_over_limit(&self, now_ns: u64) -> bool {
        self.not_before_ns > now_ns && matches!(self.input, Input::Header)
    }

    /// Whether there is something to be sent.
    pub(crate) fn has_output(&self) -> bool {
        !self.outbox.is_empty() || self.secure.as_ref().is_some_and(|secure| secure.has_output())
    }

    /// Whether the connection is closing and has no I/O and no request in flight.
    pub(crate) fn has_ended(&self) -> bool {
        self.state == State::Closing && !self.receiving && !self.outbox.is_sending() && self.share.requests == 0
    }

    /// Gives back all buffers that are not in flight.
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

    /// Ignores all further input.
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

    /// Takes back retired windows whose writes have ended. They are taken back in order, so a
    /// window that is still in use delays those after it.
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

    /// Takes back the buffers of a receive that has ended.
    pub(crate) fn take_back(&mut self, buf: Option<IoBuf>, mut pieces: Vec<Piece>, pool: &mut Pool) {
        self.receiving = false;
        // `lend` appends the window last, after the buffers for the payload.
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

    /// Keeps an empty list for reuse.
    pub(crate) fn keep(&mut self, list: Vec<Piece>) {
        self.spare = list;
    }

    /// Lends buffers for the next receive: the buffers for the payload that is being received, if
    /// any, and the window unless more payload comes after these buffers.
    pub(crate) fn lend(&mut self, pool: &mut Pool) -> Vec<Piece> {
        self.receiving = true;
        let mut pieces = std::mem::take(&mut self.spare);
        if let Some(retired) = self.window.renew(pool) {
            self.retire(retired);
        }
        if let Some(secure) = &mut self.secure {
            // TLS never yields more plain bytes than raw bytes.
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

    /// Records that `bytes` were received into the buffers that [`Connection::lend`] gave. Call it
    /// after [`Connection::take_back`].
    ///
    /// # Errors
    /// The bytes are not valid TLS.
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

/// The range of a payload's buffer for the payload bytes `from_bytes..to_bytes`.
pub(crate) fn payload_range(from_bytes: usize, to_bytes: usize) -> std::ops::Range<usize> {
    HEADER_ROOM_BYTES + from_bytes..HEADER_ROOM_BYTES + to_bytes
}

/// The log's text for a failed stream.
pub(crate) fn loss(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
            "the client disconnected before it had received its last replies".to_owned()
        }
        _ => error.to_string(),
    }
}
