//! One mount: messages of the kernel become requests of the disk's queue, their completions become replies.
//!
//! ```text
//!   take(message) ─┬─ about names and attributes ─▶ view ───────────────────────────▶ reply
//!                  ├─ READ ──▶ sectors ─▶ queue ─▶ reap ─▶ header before the bytes ──▶ reply
//!                  ├─ WRITE, FALLOCATE ─▶ whole sectors ─▶ queue ─▶ reap ────────────▶ reply
//!                  │        └ parts of sectors ─▶ waiting ─▶ patching ─▶ queue ...
//!                  └─ FSYNC ─▶ queue (flush) ─▶ reap ────────────────────────────────▶ reply
//! ```
//!
//! It does no I/O with the kernel: a loop around it (`pump`) receives messages into buffers that it asks for here, and sends the replies
//! that it finds here. So one thread owns it all, and there is no lock.
//!
//! Invariants:
//! - Every message that wants an answer gets exactly one.
//! - A buffer is at one place: free, at the kernel, in the queue, or in a reply.
//! - A change is answered when it is visible; it is durable after an FSYNC that is answered, as with any disk.

use crate::fuse::{
    buffers::{Buffers, LEAD_BYTES, MESSAGE_START, SMALL_BYTES},
    changes::{self, Change, Piece},
    error::FuseError,
    negotiate::{MAX_TRANSFER_BYTES, Negotiated, negotiate},
    view::View,
    wire::{self, Answer, Attributes, Header, Message, OUT_HEADER_BYTES, opened},
};
use diskwright_store::{BlockDevice, BlockQueue, Completion, ExtentKind, IoBuf, Request};
use rustix::io::Errno;
use std::{collections::VecDeque, io, ops::Range, sync::Arc};

/// Most requests in flight: one for each buffer, and the patch.
pub(crate) const DEPTH: usize = Buffers::count() + 1;

/// The tag of the patching change. Slots have smaller numbers.
const PATCH: u64 = u64::MAX;

/// How much of the disk is searched for data or a hole before the answer is the one that is always right.
const SEEK_WINDOW_BYTES: u64 = 1 << 30;
const SEEK_WINDOWS: u32 = 64;

/// Modes of fallocate(2).
mod mode {
    pub const KEEP_SIZE: u32 = 0x01;
    pub const PUNCH_HOLE: u32 = 0x02;
    pub const ZERO_RANGE: u32 = 0x10;
}

/// Of lseek(2).
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

/// Of open(2).
const ACCESS_MODE: u32 = 3;

/// A finished message for the kernel.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) buf: IoBuf,
    /// Which of its bytes.
    pub(crate) range: Range<usize>,
}

/// What the queue is doing for a message.
#[derive(Debug)]
enum Doing {
    /// Its bytes begin at `start` of the buffer.
    Read { start: usize, len: usize },
    /// The buffer is the queue's.
    Write { bytes: Range<u64> },
    /// Zeroes or a discard. The buffer waits for the reply.
    Zero { bytes: Range<u64>, buf: IoBuf },
    /// The buffer waits for the reply.
    Flush { buf: IoBuf },
}

#[derive(Debug)]
struct Slot {
    unique: u64,
    doing: Doing,
}

/// A change that waits, or is patching.
#[derive(Debug)]
struct Waiting {
    unique: u64,
    change: Change,
    bytes: Range<u64>,
    /// Holds the payload at [`LEAD_BYTES`].
    buf: IoBuf,
}

#[derive(Debug)]
struct Patching {
    of: Waiting,
    sectors: Range<u64>,
    pieces: VecDeque<Piece>,
    /// The patch whose sectors are being read.
    reading: Option<Piece>,
}

/// See the module.
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
    /// The sectors that are being patched pass through it; with the queue while a patch is in flight.
    scratch: Option<IoBuf>,
    replies: VecDeque<Reply>,
    completions: Vec<Completion>,
}

impl Session {
    /// A session on a queue of `device` with at least [`DEPTH`]; `buffers` may be registered with its ring.
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

    /// The free buffers: where messages are received, and where the buffers of sent replies go.
    pub(crate) fn buffers(&mut self) -> &mut Buffers {
        &mut self.buffers
    }

    /// The next reply to send.
    pub(crate) fn next_reply(&mut self) -> Option<Reply> {
        self.replies.pop_front()
    }

    /// Messages that wait for the disk.
    pub(crate) fn in_flight(&self) -> usize {
        self.busy_slots + self.waiting.len() + usize::from(self.patching.is_some())
    }

    /// Takes a message of `len_bytes`, which lies at [`MESSAGE_START`] of `buf`.
    pub(crate) fn take(&mut self, buf: IoBuf, len_bytes: usize) -> Result<(), FuseError> {
        let (Header { unique, node, .. }, message) = wire::parse(&buf[MESSAGE_START..][..len_bytes])?;
        let on_disk = self.view.is_disk(node);
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
            // After a farewell comes ENODEV.
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

    /// Starts what was pushed, and turns what has ended into replies; waits for `at_least` of them.
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

    /// The tag of a new slot.
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

    /// Gives a request to the queue; one that it refuses ends at once.
    fn push(&mut self, request: Request) {
        if let Err(refused) = self.queue.push(request) {
            let Request { tag, buf, .. } = refused.request;
            self.ended(Completion { tag, buf, result: Err(refused.reason) });
        }
    }

    fn read(&mut self, buf: IoBuf, unique: u64, offset_bytes: u64, size_bytes: u32) {
        if size_bytes > MAX_TRANSFER_BYTES {
            return self.refuse(buf, unique, Errno::INVAL);
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
        let tag = self.occupy(Slot { unique, doing: Doing::Read { start, len: len as usize } });
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

    /// The part of a change that lies on the disk, or `None` when nothing does and something should.
    fn clip(&self, offset_bytes: u64, len_bytes: u64) -> Option<Range<u64>> {
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
            // To reserve space is nothing that a disk knows.
            _ => return self.refuse(buf, unique, Errno::OPNOTSUPP),
        };
        let beyond = offset_bytes.saturating_add(len_bytes) > self.view.size_bytes;
        if beyond && mode & mode::KEEP_SIZE == 0 {
            return self.refuse(buf, unique, Errno::NOSPC);
        }
        match self.clip(offset_bytes, len_bytes) {
            Some(bytes) => self.change(Waiting { unique, change, bytes, buf }),
            None => self.answer(buf, unique, Ok(()), |_, ()| {}),
        }
    }

    fn flush(&mut self, buf: IoBuf, unique: u64) {
        // Nothing of this session is durable that waits, and nothing that waits was answered, so no flush needs to wait for it.
        let buf = self.smaller(buf);
        let tag = self.occupy(Slot { unique, doing: Doing::Flush { buf } });
        self.push(Request::flush(tag));
    }

    /// A small buffer in place of a message's own, where one is free: large ones are for receiving.
    fn smaller(&mut self, buf: IoBuf) -> IoBuf {
        match self.buffers.small(0) {
            Some(small) => {
                self.buffers.give_back(buf);
                small
            }
            None => buf,
        }
    }

    fn change(&mut self, wanted: Waiting) {
        if self.view.read_only {
            return self.refuse(wanted.buf, wanted.unique, Errno::ROFS);
        }
        if wanted.bytes.is_empty() {
            return self.changed(wanted, Ok(()));
        }
        let whole = (wanted.bytes.start | wanted.bytes.end).is_multiple_of(self.sector_bytes);
        if whole && self.waiting.is_empty() && self.patching.is_none() {
            return self.start(wanted);
        }
        self.waiting.push_back(wanted);
        self.start_waiting();
    }

    /// Starts a change of whole sectors.
    fn start(&mut self, wanted: Waiting) {
        let Waiting { unique, change, bytes, buf } = wanted;
        let (start, len) = (bytes.start, bytes.end - bytes.start);
        match change {
            Change::Payload => {
                let tag = self.occupy(Slot { unique, doing: Doing::Write { bytes } });
                let request = Request::write(start, len as usize, buf, tag);
                self.push(Request { buf_offset_bytes: LEAD_BYTES, ..request });
            }
            Change::Zeroes | Change::Discard => {
                let buf = self.smaller(buf);
                let tag = self.occupy(Slot { unique, doing: Doing::Zero { bytes, buf } });
                self.push(zeroing(change, &(start..start + len), tag));
            }
        }
    }

    /// Starts of those that wait, from the front, all that nothing stands in the way of.
    fn start_waiting(&mut self) {
        while let Some(next) = self.waiting.front() {
            let sectors = changes::sectors_of(&next.bytes, self.sector_bytes);
            let whole = sectors == next.bytes;
            let may_start = match &self.patching {
                Some(patching) => whole && !changes::overlap(&patching.sectors, &sectors),
                None => whole || !self.meets_a_change(&sectors),
            };
            if !may_start {
                return;
            }
            let Some(next) = self.waiting.pop_front() else { return };
            if whole {
                self.start(next);
            } else {
                let pieces = changes::pieces(next.change, &next.bytes, self.sector_bytes);
                self.patching = Some(Patching { of: next, sectors, pieces, reading: None });
                self.patch_on(Ok(()));
            }
        }
    }

    fn meets_a_change(&self, sectors: &Range<u64>) -> bool {
        self.slots.iter().flatten().any(|slot| match &slot.doing {
            Doing::Write { bytes } | Doing::Zero { bytes, .. } => changes::overlap(bytes, sectors),
            Doing::Read { .. } | Doing::Flush { .. } => false,
        })
    }

    /// Goes on with the patching change after a step of it has ended with `result`; the scratch buffer is here.
    fn patch_on(&mut self, result: io::Result<()>) {
        let Some(mut patching) = self.patching.take() else { return };
        let finished = result.is_err() || (patching.reading.is_none() && patching.pieces.is_empty());
        let scratch = if finished { None } else { self.scratch.take() };
        let Some(mut scratch) = scratch else {
            self.changed(patching.of, result);
            return self.start_waiting();
        };
        let request = if let Some(Piece::Patch { sectors, bytes }) = patching.reading.take() {
            let len = (bytes.end - bytes.start) as usize;
            let place = &mut scratch[LEAD_BYTES + (bytes.start - sectors.start) as usize..][..len];
            match patching.of.change {
                Change::Payload => {
                    let from = (bytes.start - patching.of.bytes.start) as usize;
                    place.copy_from_slice(&patching.of.buf[LEAD_BYTES + from..][..len]);
                }
                Change::Zeroes | Change::Discard => place.fill(0),
            }
            Request::write(sectors.start, (sectors.end - sectors.start) as usize, scratch, PATCH)
        } else {
            match patching.pieces.pop_front() {
                Some(Piece::Whole { sectors }) => {
                    self.scratch = Some(scratch);
                    zeroing(patching.of.change, &sectors, PATCH)
                }
                Some(Piece::Patch { sectors, bytes }) => {
                    let len = (sectors.end - sectors.start) as usize;
                    let request = Request::read(sectors.start, len, scratch, PATCH);
                    patching.reading = Some(Piece::Patch { sectors, bytes });
                    request
                }
                None => unreachable!("with nothing left it was finished"),
            }
        };
        self.patching = Some(patching);
        self.push(Request { buf_offset_bytes: LEAD_BYTES, ..request });
    }

    /// Answers a change.
    fn changed(&mut self, change: Waiting, result: io::Result<()>) {
        let len = (change.bytes.end - change.bytes.start) as u32;
        let is_write = change.change == Change::Payload;
        self.answer(change.buf, change.unique, result.map_err(|error| errno_of(&error)), |answer, ()| {
            if is_write {
                answer.write_out(len);
            }
        });
    }

    fn ended(&mut self, completion: Completion) {
        let Completion { tag, buf, result } = completion;
        if tag == PATCH {
            if buf.is_some() {
                self.scratch = buf;
            }
            return self.patch_on(result);
        }
        let Some(Slot { unique, doing }) = self.vacate(tag) else { return };
        match (doing, buf) {
            (Doing::Read { start, len }, Some(mut buf)) => match result {
                Ok(()) => {
                    let header = start - OUT_HEADER_BYTES;
                    wire::put_header(&mut buf[header..], len, Ok(()), unique);
                    self.replies.push_back(Reply { buf, range: header..start + len });
                }
                Err(error) => self.refuse(buf, unique, errno_of(&error)),
            },
            (Doing::Write { bytes }, Some(buf)) => {
                self.changed(Waiting { unique, change: Change::Payload, bytes, buf }, result);
            }
            (Doing::Zero { bytes, buf }, _) => {
                self.changed(Waiting { unique, change: Change::Zeroes, bytes, buf }, result);
            }
            (Doing::Flush { buf }, _) => {
                self.answer(buf, unique, result.map_err(|error| errno_of(&error)), |_, ()| {});
            }
            (Doing::Read { .. } | Doing::Write { .. }, None) => {
                unreachable!("the queue gives the buffer of every request back")
            }
        }
        if !self.waiting.is_empty() {
            self.start_waiting();
        }
    }

    /// SEEK_DATA and SEEK_HOLE. A search that takes too long ends with what is always right: data is here, the hole is at the end.
    fn seek(&self, offset_bytes: u64, whence: u32) -> Result<u64, Errno> {
        if whence != SEEK_DATA && whence != SEEK_HOLE {
            return Err(Errno::INVAL);
        }
        let size_bytes = self.view.size_bytes;
        if offset_bytes >= size_bytes {
            return Err(Errno::NXIO);
        }
        let mut extents = Vec::new();
        let mut at_bytes = offset_bytes;
        for _ in 0..SEEK_WINDOWS {
            if at_bytes >= size_bytes {
                break;
            }
            let start_bytes = at_bytes - at_bytes % self.sector_bytes;
            let len_bytes = SEEK_WINDOW_BYTES.min(size_bytes - start_bytes);
            extents.clear();
            self.device.extents(start_bytes, len_bytes, &mut extents).map_err(|error| errno_of(&error))?;
            let found = extents.iter().find(|extent| (extent.kind == ExtentKind::Data) == (whence == SEEK_DATA));
            if let Some(extent) = found {
                return Ok(extent.offset_bytes.max(offset_bytes));
            }
            at_bytes = start_bytes + len_bytes;
        }
        match whence {
            SEEK_HOLE => Ok(size_bytes),
            _ if at_bytes >= size_bytes => Err(Errno::NXIO),
            _ => Ok(at_bytes),
        }
    }
}

fn zeroing(change: Change, bytes: &Range<u64>, tag: u64) -> Request {
    let len_bytes = bytes.end - bytes.start;
    match change {
        Change::Discard => Request::discard(bytes.start, len_bytes, tag),
        Change::Payload | Change::Zeroes => Request::write_zeroes(bytes.start, len_bytes, tag),
    }
}

/// The number by which the kernel tells a program what was wrong.
fn errno_of(error: &io::Error) -> Errno {
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
