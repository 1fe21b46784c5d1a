//! One mount: messages of the kernel become requests of the disk's queue, and their completions
//! become replies.
//!
//! ```text
//!   take(message) ─┬─ names and attributes ─▶ view ────────────────────────────────▶ reply
//!                  ├─ READ ──▶ sectors ─▶ queue ─▶ reap ─▶ header before the data ──▶ reply
//!                  ├─ WRITE, FALLOCATE ─▶ whole sectors ─▶ queue ─▶ reap ───────────▶ reply
//!                  │        └ parts of sectors ─▶ waiting ─▶ patching ─▶ queue ...
//!                  └─ FSYNC ─▶ queue (flush) ─▶ reap ───────────────────────────────▶ reply
//! ```
//!
//! `patching` carries out changes, `seek` finds holes.
//!
//! The session does no I/O with the kernel: the loop around it (`pump`) receives messages into
//! buffers of the session and sends the session's replies. One thread owns the session, so it has
//! no lock.
//!
//! Invariants:
//! - Every message that expects a reply gets exactly one.
//! - A buffer is in one place: free, at the kernel, in the queue, or in a reply.
//! - A change is visible when it is answered. It is durable once a later FSYNC was answered,
//!   as with any disk.

mod patching;
mod seek;

use crate::fuse::{
    buffers::{Buffers, LEAD_BYTES, MESSAGE_START, SMALL_BYTES},
    changes::{self, Change, Piece},
    error::FuseError,
    negotiate::{MAX_TRANSFER_BYTES, Negotiated, negotiate},
    view::View,
    wire::{self, Answer, Attributes, Header, Message, OUT_HEADER_BYTES, opened},
};
use diskwright_store::{BlockDevice, BlockQueue, Completion, IoBuf, Request};
use rustix::io::Errno;
use std::{collections::VecDeque, io, ops::Range, sync::Arc};

/// Maximum number of requests in flight: one for each buffer, and one patch.
pub(crate) const DEPTH: usize = Buffers::count() + 1;

/// Tag of the step of a patching change. The tags of slots are smaller.
const PATCH: u64 = u64::MAX;

/// Modes of fallocate(2).
mod mode {
    pub const KEEP_SIZE: u32 = 0x01;
    pub const PUNCH_HOLE: u32 = 0x02;
    pub const ZERO_RANGE: u32 = 0x10;
}

/// Bits of the access mode in the flags of open(2).
const ACCESS_MODE: u32 = 3;

/// A reply that is ready to be sent.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) buf: IoBuf,
    /// The part of the buffer to send.
    pub(crate) range: Range<usize>,
}

/// What the queue does for a message.
#[derive(Debug)]
enum QueueOperation {
    /// A read. Its data begin at `start` of the buffer.
    Read { start: usize, len: usize },
    /// A write. The queue has the buffer.
    Write { bytes: Range<u64> },
    /// Zeroes or a discard. The buffer is kept for the reply.
    Zero { bytes: Range<u64>, buf: IoBuf },
    /// A flush. The buffer is kept for the reply.
    Flush { buf: IoBuf },
}

#[derive(Debug)]
struct Slot {
    unique: u64,
    doing: QueueOperation,
}

/// A change that waits or is being patched.
#[derive(Debug)]
struct Waiting {
    unique: u64,
    change: Change,
    bytes: Range<u64>,
    /// Holds the payload, from [`LEAD_BYTES`] on.
    buf: IoBuf,
}

#[derive(Debug)]
struct Patching {
    of: Waiting,
    sectors: Range<u64>,
    pieces: VecDeque<Piece>,
    /// The patch whose sectors are being read at the moment.
    reading: Option<Piece>,
}

#[derive(Debug)]
pub(crate) struct Session {
    view: View,
    device: Arc<dyn BlockDevice>,
    queue: Box<dyn BlockQueue>,
    sector_bytes: u64,
    buffers: Buffers,
    slots: Vec<Option<Slot>>,
    free_slots: Vec<u32>,
    busy_slots: usize,
    waiting: VecDeque<Waiting>,
    patching: Option<Patching>,
    /// Buffer for the sectors that are being patched. `None` while the queue has it.
    scratch: Option<IoBuf>,
    replies: VecDeque<Reply>,
    completions: Vec<Completion>,
}

impl Session {
    /// `queue` must be a queue of `device` with a depth of at least [`DEPTH`]. `buffers` may be
    /// registered with its ring.
    pub(crate) fn new(view: View, device: Arc<dyn BlockDevice>, queue: Box<dyn BlockQueue>, buffers: Buffers) -> Self {
        let sector_bytes = u64::from(device.geometry().logical_sector_bytes);
        Self {
            view,
            device,
            queue,
            sector_bytes,
            buffers,
            slots: Vec::new(),
            free_slots: Vec::new(),
            busy_slots: 0,
            waiting: VecDeque::new(),
            patching: None,
            scratch: Some(IoBuf::new(LEAD_BYTES + MAX_TRANSFER_BYTES as usize + 2 * 4096)),
            replies: VecDeque::new(),
            completions: Vec::new(),
        }
    }

    /// The free buffers: messages are received into them, and buffers of sent replies go back to
    /// them.
    pub(crate) fn buffers(&mut self) -> &mut Buffers {
        &mut self.buffers
    }

    /// The oldest reply to send.
    pub(crate) fn next_reply(&mut self) -> Option<Reply> {
        self.replies.pop_front()
    }

    pub(crate) fn has_reply(&self) -> bool {
        !self.replies.is_empty()
    }

    /// Messages that wait for the disk.
    pub(crate) fn in_flight(&self) -> usize {
        self.busy_slots + self.waiting.len() + usize::from(self.patching.is_some())
    }

    /// Reads the disk's size from the device. Called for messages that report the size and for
    /// requests beyond the known end, and not for every read and write.
    fn learn_size(&mut self) {
        self.view.size_bytes = self.device.geometry().size_bytes;
    }

    /// Handles a message of `len_bytes`, which is at [`MESSAGE_START`] of `buf`.
    pub(crate) fn take(&mut self, buf: IoBuf, len_bytes: usize) -> Result<(), FuseError> {
        let (Header { unique, node, .. }, message) = wire::parse(&buf[MESSAGE_START..][..len_bytes])?;
        let on_disk = self.view.is_disk(node);
        if let Message::Lookup { .. }
        | Message::GetAttr
        | Message::SetAttr { .. }
        | Message::StatFs
        | Message::Lseek { .. } = message
        {
            self.learn_size();
        }
        match message {
            Message::Read { .. } | Message::Write { .. } | Message::Fallocate { .. } | Message::Lseek { .. }
                if !on_disk =>
            {
                self.refuse(buf, unique, Errno::ISDIR);
            }
            Message::Read { offset_bytes, size_bytes } => self.read(buf, unique, offset_bytes, size_bytes),
            Message::Write { offset_bytes, size_bytes } => self.write(buf, unique, offset_bytes, size_bytes),
            Message::Fallocate { offset_bytes, len_bytes, mode } => {
                self.fallocate(buf, unique, offset_bytes, len_bytes, mode);
            }
            Message::Fsync => self.flush(buf, unique),
            Message::Lseek { offset_bytes, whence } => {
                let found = self.seek(offset_bytes, whence);
                self.answer(buf, unique, found, |answer, offset_bytes| answer.lseek_out(offset_bytes));
            }
            Message::Lookup { name } => {
                let found = self.view.lookup(node, name);
                self.answer(buf, unique, found, |answer, of: Attributes| answer.entry_out(&of));
            }
            Message::GetAttr => {
                let found = self.view.attributes(node);
                self.answer(buf, unique, found, |answer, of| answer.attr_out(&of));
            }
            Message::SetAttr { valid, size_bytes } => {
                let found = self.view.set_attributes(node, valid, size_bytes);
                self.answer(buf, unique, found, |answer, of| answer.attr_out(&of));
            }
            Message::Open { flags } => {
                let refused = self.view.read_only && flags & ACCESS_MODE != 0;
                let result = if refused { Err(Errno::ROFS) } else { Ok(()) };
                let how = opened::DIRECT_IO | opened::PARALLEL_DIRECT_WRITES;
                self.answer(buf, unique, result, |answer, ()| answer.open_out(how));
            }
            Message::ReadDir { cookie, size_bytes } => {
                let view = self.view;
                let mut buf = buf;
                let mut answer = Answer::new(&mut buf);
                match view.list(node, cookie, size_bytes, &mut answer) {
                    Ok(()) => {
                        let len = answer.end(unique);
                        self.replies.push_back(Reply { buf, range: 0..len });
                    }
                    Err(errno) => self.refuse(buf, unique, errno),
                }
            }
            Message::StatFs => {
                let View { size_bytes, unit_bytes, .. } = self.view;
                self.answer(buf, unique, Ok(()), |answer, ()| answer.statfs_out(size_bytes, unit_bytes));
            }
            // After DESTROY the next receive fails with ENODEV.
            Message::Release | Message::Destroy => self.answer(buf, unique, Ok(()), |_, ()| {}),
            Message::Forget | Message::Interrupt => self.buffers.give_back(buf),
            Message::Init { major, minor, max_readahead_bytes, flags } => {
                match negotiate(major, minor, max_readahead_bytes, flags) {
                    Negotiated::Accept(accepted) => {
                        self.answer(buf, unique, Ok(()), |answer, ()| answer.init_out(&accepted));
                    }
                    Negotiated::Retry => {
                        let ours = wire::Accepted {
                            minor: wire::MINOR,
                            max_readahead_bytes: 0,
                            flags: 0,
                            max_background: 0,
                            congestion_threshold: 0,
                            max_write_bytes: 0,
                            max_pages: 0,
                        };
                        self.answer(buf, unique, Ok(()), |answer, ()| answer.init_out(&ours));
                    }
                    Negotiated::TooOld => return Err(FuseError::TooOld { major, minor }),
                }
            }
            Message::Other => self.refuse(buf, unique, Errno::NOSYS),
        }
        Ok(())
    }

    /// Submits the requests pushed, and turns completions into replies. Waits for `at_least` of
    /// them.
    pub(crate) fn reap(&mut self, at_least: usize) -> Result<(), FuseError> {
        let mut completions = std::mem::take(&mut self.completions);
        let reaped = self.queue.reap(at_least, &mut completions);
        for completion in completions.drain(..) {
            self.ended(completion);
        }
        self.completions = completions;
        reaped.map_err(FuseError::Queue)
    }

    fn answer<T>(
        &mut self,
        mut buf: IoBuf,
        unique: u64,
        result: Result<T, Errno>,
        put: impl FnOnce(&mut Answer<'_>, T),
    ) {
        match result {
            Ok(value) => {
                let mut answer = Answer::new(&mut buf);
                put(&mut answer, value);
                let len = answer.end(unique);
                self.replies.push_back(Reply { buf, range: 0..len });
            }
            Err(errno) => self.refuse(buf, unique, errno),
        }
    }

    fn refuse(&mut self, mut buf: IoBuf, unique: u64, errno: Errno) {
        wire::put_header(&mut buf, 0, Err(errno), unique);
        self.replies.push_back(Reply { buf, range: 0..OUT_HEADER_BYTES });
    }

    /// Stores the state of a request. Returns its tag.
    fn occupy(&mut self, slot: Slot) -> u64 {
        self.busy_slots += 1;
        match self.free_slots.pop() {
            Some(index) => {
                self.slots[index as usize] = Some(slot);
                u64::from(index)
            }
            None => {
                self.slots.push(Some(slot));
                self.slots.len() as u64 - 1
            }
        }
    }

    fn vacate(&mut self, tag: u64) -> Option<Slot> {
        let slot = self.slots.get_mut(tag as usize)?.take()?;
        self.free_slots.push(tag as u32);
        self.busy_slots -= 1;
        Some(slot)
    }

    /// Pushes a request to the queue. A request that the queue refuses is completed with the error.
    fn push(&mut self, request: Request) {
        if let Err(refused) = self.queue.push(request) {
            let Request { tag, buf, .. } = refused.request;
            self.ended(Completion { tag, buf, segments: None, result: Err(refused.reason) });
        }
    }

    fn read(&mut self, buf: IoBuf, unique: u64, offset_bytes: u64, size_bytes: u32) {
        if size_bytes > MAX_TRANSFER_BYTES {
            return self.refuse(buf, unique, Errno::INVAL);
        }
        if offset_bytes.saturating_add(size_bytes.into()) > self.view.size_bytes {
            self.learn_size();
        }
        let left_bytes = self.view.size_bytes.saturating_sub(offset_bytes);
        let len = u64::from(size_bytes).min(left_bytes);
        if len == 0 {
            return self.answer(buf, unique, Ok(()), |_, ()| {});
        }
        let sectors = changes::sectors_of(&(offset_bytes..offset_bytes + len), self.sector_bytes);
        let sectors_len = (sectors.end - sectors.start) as usize;
        let buf = match self.buffers.small(sectors_len) {
            Some(small) => {
                self.buffers.give_back(buf);
                small
            }
            None => buf,
        };
        let start = LEAD_BYTES + (offset_bytes - sectors.start) as usize;
        let tag = self.occupy(Slot { unique, doing: QueueOperation::Read { start, len: len as usize } });
        let request = Request::read(sectors.start, sectors_len, buf, tag);
        self.push(Request { buf_offset_bytes: LEAD_BYTES, ..request });
    }

    fn write(&mut self, mut buf: IoBuf, unique: u64, offset_bytes: u64, size_bytes: u32) {
        let Some(bytes) = self.clip(offset_bytes, size_bytes.into()) else {
            return self.refuse(buf, unique, Errno::NOSPC);
        };
        let len = (bytes.end - bytes.start) as usize;
        if len <= SMALL_BYTES
            && let Some(mut small) = self.buffers.small(len)
        {
            small[LEAD_BYTES..][..len].copy_from_slice(&buf[LEAD_BYTES..][..len]);
            self.buffers.give_back(std::mem::replace(&mut buf, small));
        }
        self.change(Waiting { unique, change: Change::Payload, bytes, buf });
    }

    /// Cuts a range off at the end of the disk. `None` if the whole range lies beyond the end. An
    /// empty range stays empty.
    fn clip(&mut self, offset_bytes: u64, len_bytes: u64) -> Option<Range<u64>> {
        if offset_bytes.saturating_add(len_bytes) > self.view.size_bytes {
            self.learn_size();
        }
        let end_bytes = offset_bytes.saturating_add(len_bytes).min(self.view.size_bytes);
        if len_bytes == 0 {
            return Some(0..0);
        }
        (offset_bytes < end_bytes).then_some(offset_bytes..end_bytes)
    }

    fn fallocate(&mut self, buf: IoBuf, unique: u64, offset_bytes: u64, len_bytes: u64, mode: u32) {
        let change = match mode & !mode::KEEP_SIZE {
            mode::PUNCH_HOLE => Change::Discard,
            mode::ZERO_RANGE => Change::Zeroes,
            // Reserving space is not supported.
            _ => return self.refuse(buf, unique, Errno::OPNOTSUPP),
        };
        let clipped = self.clip(offset_bytes, len_bytes);
        let beyond = offset_bytes.saturating_add(len_bytes) > self.view.size_bytes;
        if beyond && mode & mode::KEEP_SIZE == 0 {
            return self.refuse(buf, unique, Errno::NOSPC);
        }
        match clipped {
            Some(bytes) => self.change(Waiting { unique, change, bytes, buf }),
            None => self.answer(buf, unique, Ok(()), |_, ()| {}),
        }
    }

    fn flush(&mut self, buf: IoBuf, unique: u64) {
        // Changes that wait have not been answered, so the flush need not include them.
        let buf = self.smaller(buf);
        let tag = self.occupy(Slot { unique, doing: QueueOperation::Flush { buf } });
        self.push(Request::flush(tag));
    }

    /// Exchanges a large buffer for a small one if one is free, because only large buffers can
    /// receive messages.
    fn smaller(&mut self, buf: IoBuf) -> IoBuf {
        match self.buffers.small(0) {
            Some(small) => {
                self.buffers.give_back(buf);
                small
            }
            None => buf,
        }
    }

    fn ended(&mut self, completion: Completion) {
        let Completion { tag, buf, result, .. } = completion;
        if tag == PATCH {
            if buf.is_some() {
                self.scratch = buf;
            }
            return self.patch_on(result);
        }
        let Some(Slot { unique, doing }) = self.vacate(tag) else { return };
        match (doing, buf) {
            (QueueOperation::Read { start, len }, Some(mut buf)) => match result {
                Ok(()) => {
                    let header = start - OUT_HEADER_BYTES;
                    wire::put_header(&mut buf[header..], len, Ok(()), unique);
                    self.replies.push_back(Reply { buf, range: header..start + len });
                }
                Err(error) => self.refuse(buf, unique, errno_of(&error)),
            },
            (QueueOperation::Write { bytes }, Some(buf)) => {
                self.changed(Waiting { unique, change: Change::Payload, bytes, buf }, result);
            }
            (QueueOperation::Zero { bytes, buf }, _) => {
                self.changed(Waiting { unique, change: Change::Zeroes, bytes, buf }, result);
            }
            (QueueOperation::Flush { buf }, _) => {
                self.answer(buf, unique, result.map_err(|error| errno_of(&error)), |_, ()| {});
            }
            (QueueOperation::Read { .. } | QueueOperation::Write { .. }, None) => {
                unreachable!("the queue returns the buffer of every request")
            }
        }
        if !self.waiting.is_empty() {
            self.start_waiting();
        }
    }
}

/// The errno for a failed request.
pub(crate) fn errno_of(error: &io::Error) -> Errno {
    if let Some(errno) = Errno::from_io_error(error) {
        return errno;
    }
    match error.kind() {
        io::ErrorKind::StorageFull => Errno::NOSPC,
        io::ErrorKind::QuotaExceeded => Errno::DQUOT,
        io::ErrorKind::ReadOnlyFilesystem => Errno::ROFS,
        io::ErrorKind::InvalidInput => Errno::INVAL,
        _ => Errno::IO,
    }
}

#[cfg(test)]
mod tests;
