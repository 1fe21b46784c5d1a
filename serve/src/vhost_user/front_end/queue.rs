//! A virtqueue of the test front-end as a block queue.
//!
//! A request has a slot with memory of its own. Its payload is copied between the request's buffer
//! and that memory, as a guest's kernel does for a process without O_DIRECT. FUA does not exist in
//! virtio-blk: such a write is followed by a flush, as a guest's kernel does it.

use super::{
    super::vring::RingFeatures,
    layout::{Layout, RANGE_AT, RawRing, STATUS_AT, TABLE_AT},
    options::FrontOptions,
};
use diskwright_store::{
    BlockQueue, Completion, Geometry, MappedMemory, Operation, PushError, Request, queue::validate,
};
use std::{
    io,
    os::fd::AsRawFd,
    sync::{
        Arc,
        atomic::{Ordering, fence},
    },
};
use virtio_bindings::virtio_blk as blk;
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::EventFd,
};

/// Nothing takes a server longer, so a test ends.
const PATIENCE_MS: i32 = 60_000;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Sentinel for the status byte that no device writes.
const NO_STATUS: u8 = 0xee;

/// See the module documentation.
#[derive(Debug)]
pub struct FrontQueue {
    memory: Arc<MappedMemory>,
    layout: Layout,
    index: usize,
    options: FrontOptions,
    features: RingFeatures,
    ring: RawRing,
    kick: EventFd,
    call: EventFd,
    /// Tells when `call` was written.
    called: Epoll,
    geometry: Geometry,
    next_available: u16,
    /// Up to where the server was told.
    told: u16,
    next_used: u16,
    free: Vec<u16>,
    flying: Vec<Option<Request>>,
    in_flight: usize,
    ended: Vec<Completion>,
}

impl FrontQueue {
    pub(super) fn new(
        memory: Arc<MappedMemory>,
        layout: Layout,
        index: usize,
        options: FrontOptions,
        features: RingFeatures,
        (kick, call): (EventFd, EventFd),
        geometry: Geometry,
    ) -> io::Result<Self> {
        let ring = layout.ring(index);
        let next_used = memory.load_u16(ring.used + 2)?;
        let next_available = memory.load_u16(ring.available + 2)?;
        let depth = options.depth;
        let called = Epoll::new()?;
        called.ctl(ControlOperation::Add, call.as_raw_fd(), EpollEvent::new(EventSet::IN, 0))?;
        Ok(Self {
            memory,
            layout,
            index,
            options,
            features,
            ring,
            kick,
            call,
            called,
            geometry,
            next_available,
            told: next_available,
            next_used,
            free: (0..depth as u16).rev().collect(),
            flying: (0..depth).map(|_| None).collect(),
            in_flight: 0,
            ended: Vec::new(),
        })
    }

    /// The descriptors at which the requests in flight begin, in the order in which they were
    /// pushed.
    pub fn heads_in_flight(&self) -> Vec<u16> {
        let entries = (0..self.in_flight as u16).rev().map(|back| self.next_available.wrapping_sub(back + 1));
        let size = self.layout.ring_size();
        let entry = |index: u16| self.ring.available + 4 + 2 * usize::from(index & (size - 1));
        entries.filter_map(|index| self.memory.load_u16(entry(index)).ok()).collect()
    }

    /// Makes a request available. The server sees it at the next reap.
    fn launch(&mut self, slot: u16, request: &Request) -> io::Result<()> {
        let (page, payload) = {
            let slot = usize::from(slot);
            (self.layout.slot(self.index, slot), self.layout.payload(self.index, slot))
        };
        let len = request.len_bytes as usize;
        let mut header = [0; 16];
        let kind = match request.operation {
            Operation::Read => blk::VIRTIO_BLK_T_IN,
            Operation::Write => blk::VIRTIO_BLK_T_OUT,
            Operation::Flush => blk::VIRTIO_BLK_T_FLUSH,
            Operation::Discard => blk::VIRTIO_BLK_T_DISCARD,
            Operation::WriteZeroes => blk::VIRTIO_BLK_T_WRITE_ZEROES,
        };
        header[..4].copy_from_slice(&kind.to_le_bytes());
        let sector = (request.offset_bytes / 512).to_le_bytes();
        if matches!(request.operation, Operation::Read | Operation::Write) {
            header[8..].copy_from_slice(&sector);
        }
        self.memory.copy_in(page, &header)?;
        self.memory.copy_in(page + STATUS_AT, &[NO_STATUS])?;
        let data = match request.operation {
            Operation::Read => Some((payload, len, WRITE)),
            Operation::Write => {
                match (&request.buf, &request.segments) {
                    _ if self.options.leaves_payload => {}
                    (Some(buf), _) => self.memory.copy_in(payload, &buf[request.buf_range()])?,
                    (None, Some(segments)) => {
                        let mut bytes = vec![0; len];
                        segments.copy_out(request.buf_offset_bytes, &mut bytes)?;
                        self.memory.copy_in(payload, &bytes)?;
                    }
                    (None, None) => {}
                }
                Some((payload, len, 0))
            }
            Operation::Discard | Operation::WriteZeroes => {
                let mut range = [0; 16];
                range[..8].copy_from_slice(&sector);
                range[8..12].copy_from_slice(&((request.len_bytes / 512) as u32).to_le_bytes());
                self.memory.copy_in(page + RANGE_AT, &range)?;
                Some((page + RANGE_AT, 16, 0))
            }
            Operation::Flush => None,
        };
        let pieces = [Some((page, 16, 0)), data.filter(|&(_, len, _)| len > 0), Some((page + STATUS_AT, 1, WRITE))];
        let head = 3 * slot;
        let (table, first) = if self.options.indirect { (page + TABLE_AT, 0) } else { (self.ring.descriptors, head) };
        let count = pieces.iter().flatten().count() as u16;
        for (number, (at, len, flags)) in (0..).zip(pieces.into_iter().flatten()) {
            let index = first + number;
            let flags = flags | if number + 1 < count { NEXT } else { 0 };
            self.describe(table + 16 * usize::from(index), at, len as u32, flags, index + 1)?;
        }
        if self.options.indirect {
            let at = self.ring.descriptors + 16 * usize::from(head);
            self.describe(at, table, 16 * u32::from(count), INDIRECT, 0)?;
        }
        let entry = usize::from(self.next_available & (self.layout.ring_size() - 1));
        self.memory.store_u16(self.ring.available + 4 + 2 * entry, head)?;
        self.next_available = self.next_available.wrapping_add(1);
        Ok(())
    }

    fn describe(&self, place: usize, at: usize, len: u32, flags: u16, next: u16) -> io::Result<()> {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.layout.address(at).to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.memory.copy_in(place, &bytes)
    }

    /// Shows the server what was made available, and kicks it if it wants that.
    fn tell(&mut self) -> io::Result<()> {
        if self.told == self.next_available {
            return Ok(());
        }
        self.memory.store_u16(self.ring.available + 2, self.next_available)?;
        fence(Ordering::SeqCst);
        let (old, new) = (std::mem::replace(&mut self.told, self.next_available), self.next_available);
        let size = usize::from(self.layout.ring_size());
        let wanted = if self.features.event_index {
            let event = self.memory.load_u16(self.ring.used + 4 + 8 * size)?;
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            self.memory.load_u16(self.ring.used)? & 1 == 0
        };
        if wanted { self.kick.write(1) } else { Ok(()) }
    }

    /// Takes the used entries that are there.
    fn take_used(&mut self) -> io::Result<()> {
        let index = self.memory.load_u16(self.ring.used + 2)?;
        let size = self.layout.ring_size();
        while self.next_used != index {
            let at = self.ring.used + 4 + 8 * usize::from(self.next_used & (size - 1));
            let mut entry = [0; 8];
            self.memory.copy_out(at, &mut entry)?;
            self.next_used = self.next_used.wrapping_add(1);
            let [h0, h1, h2, h3, w0, w1, w2, w3] = entry;
            let (head, written) = (u32::from_le_bytes([h0, h1, h2, h3]), u32::from_le_bytes([w0, w1, w2, w3]));
            self.complete(head, written)?;
        }
        Ok(())
    }

    fn complete(&mut self, head: u32, written: u32) -> io::Result<()> {
        let slot = (head / 3) as usize;
        let flying = self.flying.get_mut(slot).and_then(Option::take).filter(|_| head.is_multiple_of(3));
        let mut request = flying.ok_or_else(|| io::Error::other(format!("used entry {head} was not in flight")))?;
        let mut status = [0];
        self.memory.copy_out(self.layout.slot(self.index, slot) + STATUS_AT, &mut status)?;
        let result = match status[0] {
            0 => Ok(()),
            1 => Err(io::Error::other("the device says I/O error")),
            2 => Err(io::ErrorKind::Unsupported.into()),
            other => Err(io::Error::other(format!("the device says {other}"))),
        };
        let is_read = request.operation == Operation::Read;
        let wanted = if is_read && result.is_ok() { request.len_bytes as u32 + 1 } else { 1 };
        if written != wanted {
            return Err(io::Error::other(format!("the used entry says {written} bytes, not {wanted}")));
        }
        if is_read && result.is_ok() && !self.options.leaves_payload {
            let payload = self.layout.payload(self.index, slot);
            let range = request.buf_range();
            match (&mut request.buf, &mut request.segments) {
                (Some(buf), _) => self.memory.copy_out(payload, &mut buf[range])?,
                (None, Some(segments)) => {
                    let mut bytes = vec![0; range.len()];
                    self.memory.copy_out(payload, &mut bytes)?;
                    segments.copy_in(range.start, &bytes)?;
                }
                (None, None) => {}
            }
        }
        if request.fua && result.is_ok() && request.operation != Operation::Flush && self.flushes() {
            // The write counts when the flush behind it has ended.
            self.launch(slot as u16, &Request::flush(request.tag))?;
            self.flying[slot] = Some(Request { operation: Operation::Flush, ..request });
            return Ok(());
        }
        self.free.push(slot as u16);
        self.in_flight -= 1;
        self.ended.push(Completion { tag: request.tag, buf: request.buf, segments: request.segments, result });
        Ok(())
    }

    fn flushes(&self) -> bool {
        !self.options.without_flush
    }

    /// Sleeps until the server signals, unless there is a used entry already.
    fn sleep(&mut self) -> io::Result<()> {
        let size = usize::from(self.layout.ring_size());
        self.memory.store_u16(self.ring.available + 4 + 2 * size, self.next_used)?;
        fence(Ordering::SeqCst);
        if self.memory.load_u16(self.ring.used + 2)? != self.next_used {
            return Ok(());
        }
        let mut events = [EpollEvent::default()];
        match self.called.wait(PATIENCE_MS, &mut events) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::TimedOut, "the server has not answered for a minute")),
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
            _ => {}
        }
        // EAGAIN: interrupted before the signal.
        let _ = self.call.read();
        Ok(())
    }
}

impl BlockQueue for FrontQueue {
    fn depth(&self) -> usize {
        self.options.depth
    }

    fn in_flight(&self) -> usize {
        self.in_flight + self.ended.len()
    }

    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        let refused = |request, reason| Err(Box::new(PushError { request, reason }));
        let is_transfer = matches!(request.operation, Operation::Read | Operation::Write);
        if let Err(reason) = validate(&request, &self.geometry) {
            return refused(request, reason);
        }
        if is_transfer && request.len_bytes > self.layout.payload_bytes() as u64 {
            let what = format!("the front-end has {} bytes for a payload", self.layout.payload_bytes());
            return refused(request, io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let Some(slot) = self.free.pop() else { return refused(request, io::ErrorKind::WouldBlock.into()) };
        if let Err(reason) = self.launch(slot, &request) {
            self.free.push(slot);
            return refused(request, reason);
        }
        self.flying[usize::from(slot)] = Some(request);
        self.in_flight += 1;
        Ok(())
    }

    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        let at_least = at_least.min(self.in_flight());
        loop {
            self.tell()?;
            self.take_used()?;
            // A flush behind a write may have been launched.
            self.tell()?;
            if self.ended.len() >= at_least {
                out.append(&mut self.ended);
                return Ok(());
            }
            self.sleep()?;
        }
    }
}
