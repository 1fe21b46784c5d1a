//! One operation on a stream: its submission queue entry, and the meaning of the kernel's answer.
//!
//! A transfer owns everything that the kernel reads or writes while it is in flight: the buffers,
//! and, in a box that does not move, the list of their addresses, the message header and the
//! timeout. After a short receive or send, [`Transfer::judge`] leaves the rest in the transfer,
//! which is started again.
//!
//! Invariant: from [`Transfer::start`] until its answer was taken, no other code reaches the
//! buffers, because only [`Transfer::take`] returns them. The streams keep the transfer until then,
//! or leak its memory.

#![allow(unsafe_code)]

use crate::{IoBuf, ring::Ring};
use io_uring::{opcode, squeue, types};
use nix::libc;
use rustix::io::Errno;
use std::{
    io, mem,
    ops::Range,
    os::fd::{FromRawFd, OwnedFd, RawFd},
    ptr,
    time::Duration,
};

/// A buffer, and the range of it to transfer.
pub type Piece = (IoBuf, Range<usize>);

/// Maximum number of pieces in one system call (UIO_MAXIOV).
const PIECES_AT_ONCE: usize = 1024;

/// How often an operation that ended with EAGAIN or EINTR is restarted.
const RETRIES_MAX: u8 = 100;

/// The offset that means "the stream's current position".
const NO_OFFSET: u64 = u64::MAX;

/// A descriptor as named in an entry.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) fd: RawFd,
    /// Its index among the ring's registered files.
    pub(crate) file_index: Option<u32>,
    pub(crate) is_socket: bool,
    /// Whether a receive waits until data is available.
    pub(crate) waits: bool,
}

/// The kind of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    Accept,
    Poll,
    /// `whole`: until the pieces are full or the stream ends.
    Receive {
        whole: bool,
    },
    Send,
    Timer,
}

/// What the kernel reads besides the buffers, at a stable address.
#[derive(Debug)]
struct Plan {
    message: libc::msghdr,
    spans: Vec<libc::iovec>,
    time: types::Timespec,
}

/// One operation; see the module documentation. Reused, so that its lists are allocated once.
#[derive(Debug)]
pub(crate) struct Transfer {
    verb: Verb,
    /// The piece of an operation with only one, which needs no list.
    single: Option<Piece>,
    pieces: Vec<Piece>,
    plan: Box<Plan>,
    /// Number of spans that are completely transferred.
    spans_done: usize,
    done_bytes: usize,
    delays: u8,
}

/// What to do after an answer.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// The operation has ended: bytes transferred, or the new descriptor of an accept.
    Ended(io::Result<usize>),
    /// Start the operation again: it now describes the rest.
    Again,
}

impl Transfer {
    pub(crate) fn new() -> Self {
        // SAFETY: a message header consists of numbers and addresses; all zeros are valid and mean
        // "empty".
        let message = unsafe { mem::zeroed() };
        let plan = Box::new(Plan { message, spans: Vec::new(), time: types::Timespec::new() });
        Self { verb: Verb::Accept, single: None, pieces: Vec::new(), plan, spans_done: 0, done_bytes: 0, delays: 0 }
    }

    fn reset(&mut self, verb: Verb) {
        (self.verb, self.spans_done, self.done_bytes, self.delays) = (verb, 0, 0, 0);
        self.plan.spans.clear();
    }

    /// Plans an operation without bytes: an accept, a poll, or a timer of length `after`.
    pub(crate) fn plan_plain(&mut self, verb: Verb, after: Duration) {
        self.reset(verb);
        self.plan.time = after.into();
    }

    /// Plans an operation on one piece.
    ///
    /// # Errors
    /// `InvalidInput` for a range beyond its buffer. The operation must then not be started.
    pub(crate) fn plan_one(&mut self, verb: Verb, buf: IoBuf, range: Range<usize>) -> io::Result<()> {
        self.reset(verb);
        let span = span_of(&buf, &range);
        self.single = Some((buf, range));
        self.plan.spans.push(span?);
        Ok(())
    }

    /// Plans an operation on several pieces, in order.
    ///
    /// # Errors
    /// As [`Transfer::plan_one`], and if there are no pieces.
    pub(crate) fn plan_many(&mut self, verb: Verb, pieces: Vec<Piece>) -> io::Result<()> {
        self.reset(verb);
        self.pieces = pieces;
        for (buf, range) in &self.pieces {
            self.plan.spans.push(span_of(buf, range)?);
        }
        if self.pieces.is_empty() { Err(io::Error::new(io::ErrorKind::InvalidInput, "no pieces")) } else { Ok(()) }
    }

    /// Returns the buffers. Call only if nothing is in flight.
    pub(crate) fn take(&mut self) -> (Option<IoBuf>, Vec<Piece>) {
        (self.single.take().map(|(buf, _)| buf), mem::take(&mut self.pieces))
    }

    /// Puts the operation, or the rest of it, into the submission queue.
    ///
    /// # Safety
    /// The transfer was planned without an error and is not in flight. Until its answer has been
    /// taken, it stays alive (it may be moved), is not planned again, its buffers are not taken,
    /// and the descriptor stays open.
    pub(crate) unsafe fn start(&mut self, ring: &mut Ring, place: Place, user_data: u64) -> io::Result<()> {
        let (file, flags) = match place.file_index {
            Some(index) => (types::Fd(index as i32), squeue::Flags::FIXED_FILE),
            None => (types::Fd(place.fd), squeue::Flags::empty()),
        };
        let spans = &self.plan.spans[self.spans_done..];
        let count = spans.len().min(PIECES_AT_ONCE);
        let entry = match (self.verb, spans) {
            (Verb::Timer, _) => opcode::Timeout::new(&raw const self.plan.time).build(),
            (Verb::Accept, _) => {
                opcode::Accept::new(file, ptr::null_mut(), ptr::null_mut()).flags(libc::SOCK_CLOEXEC).build()
            }
            (Verb::Poll, _) => opcode::PollAdd::new(file, libc::POLLIN as u32).build(),
            (Verb::Receive { whole }, &[span]) => {
                let (address, len_bytes) = (span.iov_base.cast(), one_len_bytes(span));
                if place.is_socket {
                    opcode::Recv::new(file, address, len_bytes).flags(receive_flags(whole)).build()
                } else {
                    opcode::Read::new(file, address, len_bytes).offset(NO_OFFSET).build()
                }
            }
            (Verb::Send, &[span]) => {
                let (address, len_bytes) = (span.iov_base.cast_const().cast(), one_len_bytes(span));
                if place.is_socket {
                    opcode::Send::new(file, address, len_bytes).flags(SEND_FLAGS).build()
                } else {
                    opcode::Write::new(file, address, len_bytes).offset(NO_OFFSET).build()
                }
            }
            (Verb::Receive { .. } | Verb::Send, _) if !place.is_socket => {
                let (list, count) = (spans.as_ptr(), count as u32);
                if self.verb == Verb::Send {
                    opcode::Writev::new(file, list, count).offset(NO_OFFSET).build()
                } else {
                    opcode::Readv::new(file, list, count).offset(NO_OFFSET).build()
                }
            }
            (verb, spans) => {
                self.plan.message.msg_iov = spans.as_ptr().cast_mut();
                self.plan.message.msg_iovlen = count as _;
                let message = &raw mut self.plan.message;
                match verb {
                    Verb::Receive { whole } => {
                        opcode::RecvMsg::new(file, message).flags(receive_flags(whole) as u32).build()
                    }
                    _ => opcode::SendMsg::new(file, message).flags(SEND_FLAGS as u32).build(),
                }
            }
        };
        // SAFETY: the entry names the spans' memory, which belongs to the buffers that this
        // transfer owns, and the plan, which is in a box. Both stay unchanged until the answer has
        // been taken, as the caller promises.
        unsafe { ring.push(&entry.flags(flags).user_data(user_data)) }
    }

    /// Interprets the kernel's answer: bytes transferred, a descriptor, or a negative error number.
    /// `waits`: see [`Place`].
    pub(crate) fn judge(&mut self, answer: i32, waits: bool) -> Outcome {
        if answer < 0 {
            return match (Errno::from_raw_os_error(answer.saturating_neg()), self.verb) {
                (Errno::TIME, Verb::Timer) => Outcome::Ended(Ok(0)),
                (Errno::INTR | Errno::AGAIN, _) if waits && self.delays < RETRIES_MAX => {
                    self.delays += 1;
                    Outcome::Again
                }
                (errno, _) => Outcome::Ended(Err(errno.into())),
            };
        }
        let moved_bytes = answer as usize;
        let goes_on = match self.verb {
            Verb::Accept | Verb::Poll | Verb::Timer => return Outcome::Ended(Ok(moved_bytes)),
            Verb::Receive { whole } => whole && moved_bytes > 0,
            Verb::Send => true,
        };
        self.advance(moved_bytes);
        if !goes_on || self.spans_done == self.plan.spans.len() {
            return Outcome::Ended(Ok(self.done_bytes));
        }
        if moved_bytes == 0 { Outcome::Ended(Err(io::ErrorKind::WriteZero.into())) } else { Outcome::Again }
    }

    fn advance(&mut self, moved_bytes: usize) {
        self.done_bytes += moved_bytes;
        let mut left_bytes = moved_bytes;
        while let Some(span) = self.plan.spans.get_mut(self.spans_done) {
            if left_bytes < span.iov_len {
                span.iov_base = span.iov_base.wrapping_byte_add(left_bytes);
                span.iov_len -= left_bytes;
                return;
            }
            left_bytes -= span.iov_len;
            self.spans_done += 1;
        }
    }

    /// The new connection of an accept that succeeded.
    pub(crate) fn accepted(&self, result: &io::Result<usize>) -> Option<OwnedFd> {
        match (self.verb, result) {
            // SAFETY: the kernel created this descriptor for our accept, and no other code knows
            // it. `judge` returns each answer once.
            (Verb::Accept, Ok(fd)) => Some(unsafe { OwnedFd::from_raw_fd(*fd as RawFd) }),
            _ => None,
        }
    }
}

/// Length of one transfer. The kernel transfers less than 2 GiB at once; the rest is submitted
/// again.
fn one_len_bytes(span: libc::iovec) -> u32 {
    span.iov_len.min(1 << 30) as u32
}

const SEND_FLAGS: i32 = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;

fn receive_flags(whole: bool) -> i32 {
    if whole { libc::MSG_WAITALL } else { 0 }
}

fn span_of(buf: &IoBuf, range: &Range<usize>) -> io::Result<libc::iovec> {
    if range.start > range.end || range.end > buf.len() {
        let what = format!("bytes {range:?} of a buffer that holds {}", buf.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    Ok(libc::iovec { iov_base: buf.address().wrapping_add(range.start).cast(), iov_len: range.len() })
}
