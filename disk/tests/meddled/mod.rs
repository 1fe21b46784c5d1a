//! Images and stores that panic, or block a call, where a test says so.

#![allow(dead_code, reason = "each test file uses a part of it")]

use crate::images::{new_image, new_layer};
use diskwright_disk::Layer;
use diskwright_image::{
    BlockState, Commit, DiskType, Format, Image, ImageError, ImageInfo, ImageWriter, LinkageId, ParentLink,
    Reservation, Result, SectorBitmap,
};
use diskwright_store::{MemoryStore, Store, testing::ForwardingStore};
use std::{
    io,
    ops::Range,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

pub const MIB: u64 = 1 << 20;

/// Fails a test that hangs.
pub fn within_seconds<T: Send + 'static>(seconds: u64, what: &str, test: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    let runs = thread::spawn(move || {
        let _ = sender.send(test());
    });
    match receiver.recv_timeout(Duration::from_secs(seconds)) {
        Ok(value) => value,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{what}: still waiting after {seconds} seconds"),
        Err(mpsc::RecvTimeoutError::Disconnected) => match runs.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => unreachable!("the test sent its value"),
        },
    }
}

/// Blocks one call: the next one after the gate was closed, until it is opened.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum GateState {
    #[default]
    Open,
    Closed,
    /// A call is blocked.
    Holds,
}

impl Gate {
    pub fn close(&self) {
        *self.state.lock().unwrap() = GateState::Closed;
    }

    pub fn open(&self) {
        *self.state.lock().unwrap() = GateState::Open;
        self.changed.notify_all();
    }

    /// Waits until a call is blocked.
    pub fn wait_for_caller(&self) {
        let state = self.state.lock().unwrap();
        drop(self.changed.wait_while(state, |state| *state != GateState::Holds).unwrap());
    }

    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        if *state == GateState::Closed {
            *state = GateState::Holds;
            self.changed.notify_all();
            drop(self.changed.wait_while(state, |state| *state == GateState::Holds).unwrap());
        }
    }
}

/// A store in memory without a descriptor, so that a ring passes its parts to the pool.
#[derive(Debug)]
pub struct Gated {
    inner: MemoryStore,
    pub reads: Gate,
    pub writes: Gate,
}

impl Gated {
    pub fn new(name: &str) -> Arc<Self> {
        Arc::new(Self { inner: MemoryStore::new(name), reads: Gate::default(), writes: Gate::default() })
    }
}

impl ForwardingStore for Gated {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }
    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        self.reads.pass();
        self.inner.read_at(buf, offset_bytes)
    }

    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.writes.pass();
        self.inner.write_at(buf, offset_bytes)
    }
}

/// A new image in `store`, in blocks of 1 MiB.
pub fn image(store: Arc<dyn Store>, format: Format, disk_type: DiskType, size_bytes: u64) -> Arc<dyn Image> {
    new_image(store, format, disk_type, size_bytes, MIB as u32)
}

/// A new VHDX in its own store, in blocks of 1 MiB.
pub fn layer(name: &str, disk_type: DiskType, size_bytes: u64) -> Layer {
    new_layer(name, Format::Vhdx, disk_type, size_bytes, MIB as u32)
}

/// An image whose calls a test can block or make panic.
#[derive(Debug)]
pub struct Meddled {
    inner: Arc<dyn Image>,
    /// The method whose next call panics.
    pub panics: Mutex<Option<&'static str>>,
    /// Blocks reads of tables.
    pub tables: Gate,
    pub recycled: AtomicU64,
    /// The last limit given by `limit_tables`.
    pub tables_bytes: AtomicU64,
    /// Whether the image reports that it cannot record single sectors.
    pub fills_blocks: bool,
}

impl Meddled {
    pub fn new(inner: Arc<dyn Image>, fills_blocks: bool) -> Arc<Self> {
        Arc::new(Self {
            inner,
            panics: Mutex::default(),
            tables: Gate::default(),
            recycled: AtomicU64::new(0),
            tables_bytes: AtomicU64::new(u64::MAX),
            fills_blocks,
        })
    }

    pub fn layer(self: &Arc<Self>, name: &str) -> Layer {
        Layer { path: name.into(), image: Arc::clone(self) as Arc<dyn Image> }
    }

    /// Makes the next call of this method panic.
    pub fn break_at(&self, method: &'static str) {
        *self.panics.lock().unwrap_or_else(PoisonError::into_inner) = Some(method);
    }

    fn called(&self, method: &'static str) {
        let mut panics = self.panics.lock().unwrap_or_else(PoisonError::into_inner);
        if *panics == Some(method) {
            *panics = None;
            drop(panics);
            panic!("the test makes {method} panic");
        }
    }

    fn inner_writer(&self) -> &dyn ImageWriter {
        self.inner.writer().unwrap()
    }
}

impl Image for Meddled {
    fn info(&self) -> &ImageInfo {
        self.inner.info()
    }
    fn shares_blocks(&self) -> bool {
        self.inner.shares_blocks()
    }

    fn stores(&self) -> &[Arc<dyn Store>] {
        self.inner.stores()
    }
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }
    fn block_states(&self, first_block: u64, out: &mut [BlockState]) -> Result<()> {
        self.called("block_states");
        self.tables.pass();
        self.inner.block_states(first_block, out)
    }
    fn linkage_id(&self) -> Option<LinkageId> {
        self.inner.linkage_id()
    }
    fn parent_link(&self) -> Option<ParentLink> {
        self.inner.parent_link()
    }
    fn damage(&self, block: u64) -> Result<ImageError> {
        self.inner.damage(block)
    }
    fn sector_bitmap(&self, block: u64) -> Result<SectorBitmap> {
        self.called("sector_bitmap");
        self.inner.sector_bitmap(block)
    }
    fn writer(&self) -> Option<&dyn ImageWriter> {
        Some(self)
    }
}

impl ImageWriter for Meddled {
    fn begin_writing(&self) -> Result<()> {
        self.called("begin_writing");
        self.inner_writer().begin_writing()
    }
    fn begin_writing_as(&self, linkage_id: LinkageId) -> Result<()> {
        self.called("begin_writing");
        self.inner_writer().begin_writing_as(linkage_id)
    }
    fn set_parent_link(&self, link: &ParentLink) -> Result<()> {
        self.inner_writer().set_parent_link(link)
    }
    fn prepare(&self, blocks: Range<u64>) -> Result<()> {
        self.called("prepare");
        self.inner_writer().prepare(blocks)
    }
    fn reserve(&self, block: u64) -> Result<Option<Reservation>> {
        self.called("reserve");
        self.inner_writer().reserve(block)
    }
    fn initialised(&self, block: u64) {
        self.inner_writer().initialised(block);
    }
    fn commit(&self, block: u64, change: Commit) -> Result<Option<BlockState>> {
        self.called("commit");
        self.inner_writer().commit(block, change)
    }
    fn tracks_sectors(&self) -> bool {
        !self.fills_blocks && self.inner_writer().tracks_sectors()
    }
    /// Succeeds without a change.
    fn resize(&self, _size_bytes: u64) -> Result<()> {
        Ok(())
    }
    fn can_store_zero(&self) -> bool {
        self.inner_writer().can_store_zero()
    }
    fn limit_tables(&self, bytes: u64) {
        self.inner_writer().limit_tables(bytes);
        self.tables_bytes.store(bytes, Ordering::SeqCst);
    }
    fn is_dirty(&self) -> bool {
        self.inner_writer().is_dirty()
    }
    fn check_syncs(&self) -> Result<()> {
        self.inner_writer().check_syncs()
    }
    fn flush(&self) -> Result<()> {
        self.called("flush");
        self.inner_writer().flush()
    }
    fn freed_generation(&self) -> u64 {
        self.inner_writer().freed_generation()
    }
    fn recycle(&self, generation: u64) {
        self.called("recycle");
        self.inner_writer().recycle(generation);
        self.recycled.fetch_add(1, Ordering::SeqCst);
    }
    fn fill_gaps(&self) -> Result<()> {
        self.inner_writer().fill_gaps()
    }
    fn close(&self) -> Result<()> {
        self.inner_writer().close()
    }
}
