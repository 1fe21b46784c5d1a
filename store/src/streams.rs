//! Streams on a shared ring: sockets, listeners, pipes, device files such as `/dev/fuse`, and
//! timers.
//!
//! ```text
//!   add(fd) ─▶ StreamId ─ accept / receive / send / send_all ─┐
//!                                        timer ───────────────┼─▶ SharedRing::wait
//!                                                             │        └─▶ reap ─▶ StreamEnd
//!   close(stream): cancels what is in flight ─────────────────┘
//! ```
//!
//! Every operation ends exactly once with its tag and returns its buffers, also if it could not be
//! started, if its stream was closed, or if it was cancelled. A stream's descriptor is closed when
//! [`Streams::close`] was called and the last of its operations has ended.
//!
//! Operations on one stream are not ordered. A caller that needs an order keeps at most one send
//! and one receive in flight. There is no fallback without io_uring.
//!
//! Invariant: an operation in flight owns its buffers (see `transfer`). Dropping the streams waits
//! for everything in flight.

#![allow(unsafe_code)]

use crate::{
    IoBuf, SharedRing,
    shared::{Member, RingAnswer},
    transfer::{Outcome, Piece, Place, Transfer, Verb},
};
use io_uring::opcode;
use rustix::{fs::OFlags, io::Errno};
use std::{
    io, mem,
    ops::Range,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    time::Duration,
};

/// Identifies a stream. Once the stream is closed, the id is invalid, even if its table entry is
/// reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamId {
    index: u32,
    generation: u32,
}

/// A completed operation.
#[derive(Debug)]
pub struct StreamEnd {
    /// The tag given when the operation began.
    pub tag: u64,
    /// Bytes transferred. A receive of 0 bytes has reached the end of the stream. `ECANCELED` means
    /// that the stream was closed.
    pub result: io::Result<usize>,
    /// The buffer of an operation on a single buffer.
    pub buf: Option<IoBuf>,
    /// The pieces of an operation on several. The vector can be reused.
    pub pieces: Vec<Piece>,
    /// The new connection, for an accept.
    pub accepted: Option<OwnedFd>,
}

#[derive(Debug)]
struct Stream {
    fd: OwnedFd,
    place: Place,
    /// Operations in flight.
    operations: u32,
    closing: bool,
}

#[derive(Debug, Default)]
struct StreamEntry {
    generation: u32,
    stream: Option<Stream>,
}

#[derive(Debug)]
struct Operation {
    tag: u64,
    /// Index of the stream; `None` for a timer.
    stream: Option<u32>,
    transfer: Transfer,
    in_flight: bool,
}

/// `user_data` of entries that cancel others. Only the drop waits for their answers.
const CANCEL: u32 = u32::MAX;

/// The place of a timer, which has no descriptor.
const NO_PLACE: Place = Place { fd: -1, file_index: None, is_socket: false, waits: true };

/// The streams of one thread; see the module documentation.
#[derive(Debug)]
pub struct Streams {
    member: Member,
    entries: Vec<StreamEntry>,
    free_entries: Vec<u32>,
    operations: Vec<Operation>,
    free_operations: Vec<u32>,
    in_ring: usize,
    cancels: usize,
    mail: Vec<RingAnswer>,
    ended: Vec<StreamEnd>,
}

impl Streams {
    /// Without streams at first, on `ring`.
    pub fn new(ring: &SharedRing) -> Self {
        Self {
            member: Member::join(ring),
            entries: Vec::new(),
            free_entries: Vec::new(),
            operations: Vec::new(),
            free_operations: Vec::new(),
            in_ring: 0,
            cancels: 0,
            mail: Vec::new(),
            ended: Vec::new(),
        }
    }

    /// Adds a descriptor, and registers it with the ring if there is room. A device or a pipe is
    /// made non-blocking, so that the kernel polls it instead of blocking a worker thread. A socket
    /// is made blocking, which is equivalent on a ring.
    ///
    /// A character device such as `/dev/fuse` is not waited for: a ring can only poll it and then
    /// read, and if another thread reads first, ours would block in the kernel together with
    /// everything else on the ring. A receive on such a device therefore ends with `WouldBlock` if
    /// nothing is available, and [`Streams::poll`] tells when to try again.
    ///
    /// # Errors
    /// The descriptor cannot be examined or its flags cannot be set.
    pub fn add(&mut self, fd: OwnedFd) -> io::Result<StreamId> {
        let mode = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode);
        let is_socket = mode == rustix::fs::FileType::Socket;
        let waits = mode != rustix::fs::FileType::CharacterDevice;
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        let wanted = if is_socket { flags - OFlags::NONBLOCK } else { flags | OFlags::NONBLOCK };
        if wanted != flags {
            rustix::fs::fcntl_setfl(&fd, wanted)?;
        }
        let file_index = self.member.ring().register_file(fd.as_raw_fd());
        let place = Place { fd: fd.as_raw_fd(), file_index, is_socket, waits };
        let index = match self.free_entries.pop() {
            Some(index) => index,
            None => {
                self.entries.push(StreamEntry::default());
                u32::try_from(self.entries.len() - 1).expect("more streams than memory could hold")
            }
        };
        let entry = &mut self.entries[index as usize];
        entry.stream = Some(Stream { fd, place, operations: 0, closing: false });
        Ok(StreamId { index, generation: entry.generation })
    }

    /// The descriptor of a stream that is not closed, for socket options and credentials.
    pub fn fd(&self, stream: StreamId) -> Option<BorrowedFd<'_>> {
        let entry = self.entries.get(stream.index as usize)?;
        let open = entry.stream.as_ref().filter(|open| entry.generation == stream.generation && !open.closing)?;
        Some(open.fd.as_fd())
    }

    /// Accepts one connection.
    pub fn accept(&mut self, stream: StreamId, tag: u64) {
        self.begin(Some(stream), tag, |transfer| {
            transfer.plan_plain(Verb::Accept, Duration::ZERO);
            Ok(())
        });
    }

    /// Ends when the stream has something to receive, or has ended. The result is the event mask of
    /// poll(2), which distinguishes an error from available data.
    pub fn poll(&mut self, stream: StreamId, tag: u64) {
        self.begin(Some(stream), tag, |transfer| {
            transfer.plan_plain(Verb::Poll, Duration::ZERO);
            Ok(())
        });
    }

    /// Receives into `range` of `buf`: the bytes available, at least one; or, if `whole`, until the
    /// range is full or the stream ends.
    pub fn receive(&mut self, stream: StreamId, buf: IoBuf, range: Range<usize>, whole: bool, tag: u64) {
        self.begin(Some(stream), tag, |transfer| transfer.plan_one(Verb::Receive { whole }, buf, range));
    }

    /// Receives into several pieces, one after the other, by one system call: the bytes available,
    /// at least one.
    pub fn receive_into(&mut self, stream: StreamId, pieces: Vec<Piece>, tag: u64) {
        self.begin(Some(stream), tag, |transfer| transfer.plan_many(Verb::Receive { whole: false }, pieces));
    }

    /// Sends all of `range`. On a device such as `/dev/fuse` this is one write.
    pub fn send(&mut self, stream: StreamId, buf: IoBuf, range: Range<usize>, tag: u64) {
        self.begin(Some(stream), tag, |transfer| transfer.plan_one(Verb::Send, buf, range));
    }

    /// Sends all pieces in order; with one system call if there are at most 1,024 and the stream
    /// accepts them at once.
    pub fn send_all(&mut self, stream: StreamId, pieces: Vec<Piece>, tag: u64) {
        self.begin(Some(stream), tag, |transfer| transfer.plan_many(Verb::Send, pieces));
    }

    /// Ends after the time `after`.
    pub fn timer(&mut self, after: Duration, tag: u64) {
        self.begin(None, tag, |transfer| {
            transfer.plan_plain(Verb::Timer, after);
            Ok(())
        });
    }

    /// Starts an operation, or ends it immediately with the reason why it cannot be started.
    fn begin(&mut self, stream: Option<StreamId>, tag: u64, plan: impl FnOnce(&mut Transfer) -> io::Result<()>) {
        let index = match self.free_operations.pop() {
            Some(index) => index,
            None => {
                let operation = Operation { tag, stream: None, transfer: Transfer::new(), in_flight: false };
                self.operations.push(operation);
                u32::try_from(self.operations.len() - 1).expect("more operations than memory could hold")
            }
        };
        let operation = &mut self.operations[index as usize];
        (operation.tag, operation.stream) = (tag, None);
        let mut planned = plan(&mut operation.transfer);
        if let Some(id) = stream {
            match self.open_stream(id) {
                Some(open) => {
                    open.operations += 1;
                    self.operations[index as usize].stream = Some(id.index);
                }
                None => planned = planned.and(Err(Errno::CANCELED.into())),
            }
        }
        match planned {
            Ok(()) => self.start(index),
            Err(error) => self.end(index, Err(error)),
        }
    }

    fn open_stream(&mut self, id: StreamId) -> Option<&mut Stream> {
        let entry = self.entries.get_mut(id.index as usize)?;
        entry.stream.as_mut().filter(|open| entry.generation == id.generation && !open.closing)
    }

    fn stream_of(&mut self, operation: u32) -> Option<&mut Stream> {
        let index = self.operations[operation as usize].stream?;
        self.entries[index as usize].stream.as_mut()
    }

    fn start(&mut self, index: u32) {
        let place = self.stream_of(index).map_or(NO_PLACE, |stream| stream.place);
        let user_data = self.member.user_bits() | u64::from(index);
        let operation = &mut self.operations[index as usize];
        // SAFETY: the transfer is planned and not in flight. It stays in the table, where it is not
        // planned again and its buffers are not taken before `answered`. If no answer ever comes,
        // `drop` leaks the table. The stream keeps its descriptor until it has no operations.
        match unsafe { operation.transfer.start(&mut self.member.ring(), place, user_data) } {
            Ok(()) => {
                operation.in_flight = true;
                self.in_ring += 1;
            }
            Err(error) => self.end(index, Err(error)),
        }
    }

    /// Closes a stream. Operations in flight are cancelled and end with `ECANCELED`.
    pub fn close(&mut self, stream: StreamId) {
        let Some(open) = self.open_stream(stream) else { return };
        open.closing = true;
        if open.operations == 0 {
            return self.let_go(stream.index);
        }
        for index in 0..self.operations.len() {
            let operation = &self.operations[index];
            if operation.in_flight && operation.stream == Some(stream.index) {
                self.cancel(index as u32);
            }
        }
    }

    fn cancel(&mut self, index: u32) {
        let bits = self.member.user_bits();
        let entry = opcode::AsyncCancel::new(bits | u64::from(index)).build().user_data(bits | u64::from(CANCEL));
        // SAFETY: the entry names no memory. If it is not accepted, the operation ends without it.
        if unsafe { self.member.ring().push(&entry) }.is_ok() {
            self.cancels += 1;
        }
    }

    /// Closes the descriptor of a stream without operations.
    fn let_go(&mut self, index: u32) {
        let entry = &mut self.entries[index as usize];
        if let Some(stream) = entry.stream.take() {
            if let Some(file_index) = stream.place.file_index {
                self.member.ring().unregister_file(file_index);
            }
            entry.generation = entry.generation.wrapping_add(1);
            self.free_entries.push(index);
        }
    }

    /// Appends the operations that have ended. Does not wait; [`SharedRing::wait`] does.
    pub fn reap(&mut self, out: &mut Vec<StreamEnd>) {
        self.take_mail();
        out.append(&mut self.ended);
    }

    fn take_mail(&mut self) {
        let mut mail = mem::take(&mut self.mail);
        self.member.take(&mut mail);
        for &(number, answer) in &mail {
            if number == CANCEL {
                self.cancels -= 1;
            } else {
                self.answered(number, answer);
            }
        }
        mail.clear();
        self.mail = mail;
    }

    fn answered(&mut self, index: u32, answer: i32) {
        self.in_ring -= 1;
        let (closing, waits) =
            self.stream_of(index).map_or((false, true), |stream| (stream.closing, stream.place.waits));
        let operation = &mut self.operations[index as usize];
        operation.in_flight = false;
        match operation.transfer.judge(answer, waits) {
            Outcome::Ended(result) => self.end(index, result),
            Outcome::Again if closing => self.end(index, Err(Errno::CANCELED.into())),
            Outcome::Again => self.start(index),
        }
    }

    fn end(&mut self, index: u32, result: io::Result<usize>) {
        let operation = &mut self.operations[index as usize];
        let accepted = operation.transfer.accepted(&result);
        let (buf, pieces) = operation.transfer.take();
        self.ended.push(StreamEnd { tag: operation.tag, result, buf, pieces, accepted });
        let stream = operation.stream.take();
        self.free_operations.push(index);
        if let Some(index) = stream
            && let Some(stream) = &mut self.entries[index as usize].stream
        {
            stream.operations -= 1;
            if stream.closing && stream.operations == 0 {
                self.let_go(index);
            }
        }
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        for index in 0..self.operations.len() {
            if self.operations[index].in_flight {
                self.cancel(index as u32);
            }
        }
        for entry in &mut self.entries {
            if let Some(stream) = &mut entry.stream {
                stream.closing = true;
            }
        }
        let mut failed = false;
        while (self.in_ring > 0 || self.cancels > 0) && !failed {
            failed = self.member.wait().is_err();
            self.take_mail();
        }
        if failed {
            // The kernel may still use the buffers, and nothing tells when it stops: they are
            // leaked.
            mem::forget(mem::take(&mut self.operations));
            self.member.abandon();
        }
        for index in 0..self.entries.len() {
            self.let_go(index as u32);
        }
    }
}

#[cfg(test)]
mod tests;
