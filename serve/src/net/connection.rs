//! The state of one client: its session, the bytes received, the replies to send. The worker drives
//! it (`worker`, `core`).
//!
//! ```text
//!   stream ─▶ window ─▶ the protocol ─▶ requests ─▶ disk ─▶ replies ─▶ outbox ─▶ stream
//!     (TLS between)       └─ a write's payload ─▶ from the window, or received into a buffer
//! ```
//!
//! The *window* holds bytes that were received and not yet decoded. One receive brings as many
//! requests as the client has sent. The bytes of a write's payload that are in the window are
//! written from there or copied (see `window`). The rest is received directly into its buffer.
//!
//! A protocol announces a payload whole (NBD) or part by part (H2CData of NVMe/TCP, Data-Out of
//! iSCSI). Between two parts there may be other requests, so no more than what was announced is
//! received into the buffers. A part may have a CRC32C behind it. It is computed over the bytes
//! where they lie, as they come.
//!
//! Limits: a request and its payload count from when the request is taken until its reply has been
//! sent ([`Connection::share`]). At the limit nothing more is received from the client. A window
//! is *retired* when a receive needs a window while writes of its bytes are in flight. The bytes of
//! a retired window that are not payload count too, until the last of these writes has ended.

use super::{
    flights::{ClientRequest, Contents},
    outbox::{Outbox, Share},
    peer::Peer,
    pool::{HEADER_ROOM_BYTES, PIECE_BYTES, Pool},
    protocol::ProtocolTypes,
    secure::{RAW_BYTES, Secure},
    window::{Retired, Window},
};
use diskwright_store::{IoBuf, Piece, RateLimiter, Segments, StreamId};
use std::{collections::VecDeque, io, sync::Arc};

/// A payload that is being received.
#[derive(Debug)]
pub(crate) struct Incoming<A> {
    pub(crate) asked: ClientRequest<A>,
    pub(crate) fua: bool,
    /// Length of the whole payload.
    pub(crate) payload_bytes: usize,
    /// Bytes that the client has announced and that have not been received yet.
    pub(crate) announced_bytes: usize,
    /// The CRC32C of the part that is being received, if the client sends one behind it.
    pub(crate) digest: Option<u32>,
    /// Whether bytes may be taken from the window without a copy.
    pub(crate) may_share: bool,
    /// The disk has left. The payload is still received, and then dropped.
    pub(crate) is_refused: bool,
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

impl<A> Incoming<A> {
    /// A payload of `payload_bytes`, of which nothing was announced.
    pub(crate) fn new(asked: ClientRequest<A>, payload_bytes: usize, fua: bool) -> Self {
        Self {
            asked,
            fua,
            payload_bytes,
            announced_bytes: 0,
            digest: None,
            may_share: true,
            is_refused: false,
            segments: None,
            left_bytes: payload_bytes,
            buf: None,
            filled_bytes: 0,
            piece_bytes: 0,
            next: None,
        }
    }

    /// Bytes that have not been received, announced or not.
    pub(crate) fn missing_bytes(&self) -> usize {
        let next_bytes = self.next.as_ref().map_or(0, |(_, filled_bytes, bytes)| bytes - filled_bytes);
        self.left_bytes + self.piece_bytes - self.filled_bytes + next_bytes
    }

    /// Whether the one buffer is for the whole payload.
    pub(crate) fn is_single(&self) -> bool {
        self.segments.is_none() && self.left_bytes == 0 && self.next.is_none()
    }

    /// Records that `bytes` were received into the buffers. Returns how many of them are payload.
    fn received(&mut self, bytes: usize) -> usize {
        let mut left_bytes = bytes.min(self.announced_bytes);
        let first = Some((self.buf.as_ref(), &mut self.filled_bytes, self.piece_bytes));
        let next =
            self.next.as_mut().map(|(buf, filled_bytes, piece_bytes)| (buf.as_ref(), filled_bytes, *piece_bytes));
        let mut payload_bytes = 0;
        for (buf, filled_bytes, piece_bytes) in first.into_iter().chain(next) {
            let now = left_bytes.min(piece_bytes - *filled_bytes);
            if let (Some(digest), Some(buf)) = (&mut self.digest, buf) {
                *digest = crc32c::crc32c_append(*digest, &buf[payload_range(*filled_bytes, *filled_bytes + now)]);
            }
            *filled_bytes += now;
            left_bytes -= now;
            payload_bytes += now;
        }
        self.announced_bytes -= payload_bytes;
        payload_bytes
    }

    /// All buffers that are not with the kernel.
    pub(crate) fn into_bufs(mut self) -> impl Iterator<Item = IoBuf> {
        let next = self.next.and_then(|(buf, ..)| buf);
        Contents::of(self.buf, self.segments.as_deref_mut()).into_bufs().chain(next)
    }
}

/// What the next bytes from the client are.
#[derive(Debug)]
pub(crate) enum Input<A> {
    /// A header.
    Header,
    /// A payload.
    Payload(Incoming<A>),
    /// A payload that was refused: this many bytes are left.
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
pub(crate) struct Connection<P: ProtocolTypes> {
    pub(crate) stream: StreamId,
    pub(crate) peer: Peer,
    pub(crate) session: P::Session,
    pub(crate) state: State,
    pub(crate) secure: Option<Box<Secure>>,
    pub(crate) window: Window,
    /// Retired windows, oldest first.
    retired: VecDeque<Retired>,
    pub(crate) input: Input<P::Asked>,
    pub(crate) outbox: Outbox,
    /// Whether a receive is in flight.
    pub(crate) receiving: bool,
    /// Whether the client is at its limit. It is then on the worker's list `stalled`, and nothing
    /// is received from it.
    pub(crate) stalled: bool,
    /// Whether requests that were taken wait for room. The client is then on the same list, and is
    /// still received from: the protocol bounds how many wait.
    pub(crate) retries: bool,
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
    /// When the handshake or the draining began, by the worker's clock.
    pub(crate) since_ns: u64,
    /// Requests taken since the start, for the log.
    pub(crate) requests: u64,
    /// An empty list for reuse.
    spare: Vec<Piece>,
}

impl<P: ProtocolTypes> Connection<P> {
    pub(crate) fn new(stream: StreamId, peer: Peer, session: P::Session, since_ns: u64, pool: &mut Pool) -> Self {
        Self {
            stream,
            peer,
            session,
            state: State::Open,
            secure: None,
            window: Window::new(pool),
            retired: VecDeque::new(),
            input: Input::Header,
            outbox: Outbox::default(),
            receiving: false,
            stalled: false,
            retries: false,
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
        if let Input::Payload(incoming) = std::mem::replace(&mut self.input, Input::Skip(u64::MAX)) {
            self.forget(incoming, pool);
        }
    }

    /// Gives back the buffers of a payload that will not be completed, and its share.
    pub(crate) fn forget(&mut self, incoming: Incoming<P::Asked>, pool: &mut Pool) {
        self.share.sub(Share::of(incoming.asked.held_bytes));
        incoming.into_bufs().for_each(|buf| pool.give(buf));
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
        let mut announced_bytes = 0;
        if let Input::Payload(incoming) = &mut self.input
            && let Some(buf) = incoming.buf.take()
        {
            announced_bytes = incoming.announced_bytes;
            pieces.push((buf, part_of(&mut announced_bytes, incoming.filled_bytes, incoming.piece_bytes)));
            if announced_bytes > 0 && incoming.next.is_none() && incoming.left_bytes > 0 {
                let next_bytes = incoming.left_bytes.min(PIECE_BYTES);
                incoming.left_bytes -= next_bytes;
                incoming.next = Some((Some(pool.take(next_bytes)), 0, next_bytes));
            }
            if announced_bytes > 0
                && let Some((next, filled_bytes, next_bytes)) = &mut incoming.next
            {
                let range = part_of(&mut announced_bytes, *filled_bytes, *next_bytes);
                pieces.extend(next.take().map(|buf| (buf, range)));
            }
        }
        if announced_bytes == 0 {
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
        let payload_bytes = match &mut self.input {
            Input::Payload(incoming) => incoming.received(bytes),
            Input::Header | Input::Skip(_) => 0,
        };
        self.window.fill(bytes - payload_bytes);
        Ok(())
    }
}

/// The range of a buffer into which announced bytes are received. They are taken from
/// `announced_bytes`.
fn part_of(announced_bytes: &mut usize, filled_bytes: usize, piece_bytes: usize) -> std::ops::Range<usize> {
    let now = (*announced_bytes).min(piece_bytes - filled_bytes);
    *announced_bytes -= now;
    payload_range(filled_bytes, filled_bytes + now)
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
