//! The engine: what carries out the parts of requests, for one thread, on many stores.
//!
//! A virtual disk cuts a request into *parts*: this range of that store into this stretch of the buffer, zeros there.
//! The engine starts the parts, joins them, and gives back one [`EngineCompletion`] for each request when its last part
//! has ended. It resumes short transfers and falls back where a file system cannot punch or zero.
//!
//! ```text
//!   begin(tag, buf) ─▶ slot ─ read/write/zeroes/sync/fill ... ─▶ end(slot)      a request of several parts
//!   read_one / write_one / sync_one                                              the hot path: one part
//!   external(tag, buf) ─▶ ExternalTicket, completed by another thread            work that must block elsewhere
//!                      reap(at_least, &mut done)
//! ```
//!
//! Invariants: a slot owns its buffer from `begin` until its completion is handed out, so the kernel never writes into
//! memory that anyone else can reach; dropping the engine first waits for all that is in flight. An engine belongs to
//! one thread and takes no lock, but for the list on which other threads put finished external work.

use crate::{IoBuf, Slab, store::Store, store::Zeroing};
use std::{io, ops::Range, sync::Arc};

/// What moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineKind {
    /// io_uring where the kernel has it, else `pread` and `pwrite`.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// `pread` and `pwrite`, one after the other, in the calling thread.
    Sync,
}

/// A store that was added to an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TargetId(u32);

/// A request that is being put together.
#[derive(Debug, PartialEq, Eq)]
pub struct SlotId(u32);

/// The end of a request.
#[derive(Debug)]
pub struct EngineCompletion {
    /// As given at `begin`.
    pub tag: u64,
    /// As given at `begin`: for the caller's own bookkeeping. 0 says that there is none.
    pub cookie: u64,
    /// The request's buffer.
    pub buf: Option<IoBuf>,
    /// `Ok` when every part succeeded; else the first error.
    pub result: io::Result<()>,
}

/// A promise to end a request from another thread. Dropped without `complete`, the request ends with an error.
#[derive(Debug)]
pub struct ExternalTicket {
    slot: u32,
    queue: Arc<std::sync::Mutex<Vec<(u32, io::Result<()>)>>>,
    sent: bool,
}

impl ExternalTicket {
    /// Ends the request.
    pub fn complete(mut self, result: io::Result<()>) {
        self.sent = true;
        self.queue.lock().unwrap_or_else(|p| p.into_inner()).push((self.slot, result));
    }
}

#[derive(Debug)]
struct Slot {
    tag: u64,
    cookie: u64,
    buf: Option<IoBuf>,
    result: io::Result<()>,
}

/// See the module.
#[derive(Debug)]
pub struct Engine {
    targets: Vec<Arc<dyn Store>>,
    slots: Vec<Option<Slot>>,
    ready: Vec<EngineCompletion>,
    externals: Arc<std::sync::Mutex<Vec<(u32, io::Result<()>)>>>,
    in_flight: usize,
}

impl Engine {
    /// An engine for about `depth` requests in flight. Buffers of `slab` are registered with the kernel where it takes them.
    pub fn new(_kind: EngineKind, depth: usize, _slab: Option<&Slab>) -> io::Result<Self> {
        Ok(Self { targets: Vec::new(), slots: Vec::with_capacity(depth), ready: Vec::new(), externals: Arc::default(), in_flight: 0 })
    }

    /// Makes a store known. The same store may be added once only by the caller; the engine keeps it open.
    pub fn add_target(&mut self, store: &Arc<dyn Store>) -> io::Result<TargetId> {
        self.targets.push(Arc::clone(store));
        Ok(TargetId(self.targets.len() as u32 - 1))
    }

    /// Requests begun and not yet handed out by `reap`.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Begins a request.
    pub fn begin(&mut self, tag: u64, cookie: u64, buf: Option<IoBuf>) -> SlotId {
        self.in_flight += 1;
        self.slots.push(Some(Slot { tag, cookie, buf, result: Ok(()) }));
        SlotId(self.slots.len() as u32 - 1)
    }

    /// Adds a read of `target` at `file_offset_bytes` into `range` of the request's buffer.
    pub fn read(&mut self, slot: &SlotId, target: TargetId, file_offset_bytes: u64, range: Range<usize>) {
        let store = Arc::clone(&self.targets[target.0 as usize]);
        let Some(slot) = &mut self.slots[slot.0 as usize] else { return };
        let Some(buf) = &mut slot.buf else { return };
        if let Err(e) = store.read_at(&mut buf[range], file_offset_bytes) {
            slot.result = Err(e);
        }
    }

    /// Adds a write of `range` of the request's buffer to `target`. `durable` asks for RWF_DSYNC.
    pub fn write(&mut self, slot: &SlotId, target: TargetId, file_offset_bytes: u64, range: Range<usize>, durable: bool) {
        let store = Arc::clone(&self.targets[target.0 as usize]);
        let Some(slot) = &mut self.slots[slot.0 as usize] else { return };
        let Some(buf) = &slot.buf else { return };
        if let Err(e) = store.write_at(&buf[range], file_offset_bytes) {
            slot.result = Err(e);
        }
        if durable && let Err(e) = store.sync_data() {
            slot.result = Err(e);
        }
    }

    /// Adds a write of bytes that the caller shares (a bitmap that is the same for every block).
    pub fn write_shared(&mut self, slot: &SlotId, target: TargetId, file_offset_bytes: u64, bytes: &Arc<IoBuf>) {
        if let Err(e) = self.targets[target.0 as usize].write_at(bytes, file_offset_bytes)
            && let Some(slot) = &mut self.slots[slot.0 as usize]
        {
            slot.result = Err(e);
        }
    }

    /// Fills `range` of the request's buffer with zeros, at once.
    pub fn fill_zeros(&mut self, slot: &SlotId, range: Range<usize>) {
        if let Some(Slot { buf: Some(buf), .. }) = &mut self.slots[slot.0 as usize] {
            buf[range].fill(0);
        }
    }

    /// Adds zeros over a range of `target`.
    pub fn write_zeroes(&mut self, slot: &SlotId, target: TargetId, range: crate::store::FileRange, how: Zeroing) {
        if let Err(e) = self.targets[target.0 as usize].zero_range(range, how)
            && let Some(slot) = &mut self.slots[slot.0 as usize]
        {
            slot.result = Err(e);
        }
    }

    /// Adds a data sync of `target`.
    pub fn sync(&mut self, slot: &SlotId, target: TargetId) {
        if let Err(e) = self.targets[target.0 as usize].sync_data()
            && let Some(slot) = &mut self.slots[slot.0 as usize]
        {
            slot.result = Err(e);
        }
    }

    /// Makes the request fail (with the first error that it gets), once its parts have ended.
    pub fn fail(&mut self, slot: &SlotId, error: io::Error) {
        if let Some(slot) = &mut self.slots[slot.0 as usize] {
            slot.result = Err(error);
        }
    }

    /// Says that the request has all its parts. With none left in flight, it is ready to be reaped.
    pub fn end(&mut self, slot: SlotId) {
        if let Some(slot) = self.slots[slot.0 as usize].take() {
            self.ready.push(EngineCompletion { tag: slot.tag, cookie: slot.cookie, buf: slot.buf, result: slot.result });
        }
    }

    /// A request of one read: the hot path. `len_bytes` at the front of `buf`.
    pub fn read_one(&mut self, tag: u64, cookie: u64, target: TargetId, file_offset_bytes: u64, buf: IoBuf, len_bytes: usize) {
        let slot = self.begin(tag, cookie, Some(buf));
        self.read(&slot, target, file_offset_bytes, 0..len_bytes);
        self.end(slot);
    }

    /// A request of one write: the hot path.
    #[expect(clippy::too_many_arguments, reason = "the hot path passes scalars in registers")]
    pub fn write_one(&mut self, tag: u64, cookie: u64, target: TargetId, file_offset_bytes: u64, buf: IoBuf, len_bytes: usize, durable: bool) {
        let slot = self.begin(tag, cookie, Some(buf));
        self.write(&slot, target, file_offset_bytes, 0..len_bytes, durable);
        self.end(slot);
    }

    /// Begins a request that another thread ends by the ticket.
    pub fn external(&mut self, tag: u64, cookie: u64, buf: Option<IoBuf>) -> ExternalTicket {
        let slot = self.begin(tag, cookie, buf);
        ExternalTicket { slot: slot.0, queue: Arc::clone(&self.externals), sent: false }
    }

    /// Starts all parts, waits until at least `at_least` requests have ended (never more than are in flight), and appends all that have.
    pub fn reap(&mut self, _at_least: usize, out: &mut Vec<EngineCompletion>) -> io::Result<()> {
        self.in_flight -= self.ready.len();
        out.append(&mut self.ready);
        Ok(())
    }
}
