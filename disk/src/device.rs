//! The disk: a chain of images as one block device.
//!
//! ```text
//!   Disk ──▶ Shared ──┬─ layers   the images, top first; only the top is written
//!                     ├─ map      who owns each unit (lock-free look-ups)
//!                     ├─ mutation one mutex: folding, allocation, commits, bitmaps
//!                     ├─ epochs   when freed space can be used again
//!                     └─ flusher  one thread, for flushes that have metadata to write
//! ```
//!
//! Queues hold `Shared`; the disk is closed when the last queue and the `Disk` are gone, or earlier by [`Disk::close`].
//! Lock order: mutation, then whatever an image locks inside. The flusher never holds the mutation lock while it flushes.

use crate::{
    DiskError, OpenOptions, Result,
    epoch::{Epochs, Grace},
    error,
    flusher::Flusher,
    map::{Fold, Map, Mixed, Owner, Run, push_joined},
    open,
    queue::DiskQueue,
};
use diskwright_image::{BlockState, Commit, DiskType, Image, ImageWriter};
#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken};
use diskwright_store::{
    BlockDevice, BlockQueue, Extent, ExtentKind, Geometry, QueueOptions, Store,
    store::FileRange,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};
use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// One image of a chain.
#[derive(Debug, Clone)]
pub struct Layer {
    /// Its path.
    pub path: PathBuf,
    /// The image.
    pub image: Arc<dyn Image>,
}

/// What the mutation lock guards.
#[derive(Debug, Default)]
pub(crate) struct Mutation {
    /// Units with several owners.
    pub(crate) mixed: Mixed,
    /// Blocks of the top image with commits or initial bitmaps still in flight: their space must not be given up.
    pub(crate) busy: HashMap<u64, u32>,
    /// The grace period under way, and what may be recycled after it.
    grace: Option<(Grace, u64)>,
    recycled_generation: u64,
}

impl Mutation {
    /// One more commit is in flight for `block`.
    pub(crate) fn hold(&mut self, block: u64) {
        *self.busy.entry(block).or_insert(0) += 1;
    }

    /// One fewer.
    pub(crate) fn release(&mut self, block: u64) {
        if let Some(count) = self.busy.get_mut(&block) {
            *count -= 1;
            if *count == 0 {
                self.busy.remove(&block);
            }
        }
    }
}

/// What the disk and its queues share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) layers: Vec<Layer>,
    pub(crate) map: Map,
    pub(crate) geometry: Geometry,
    pub(crate) epochs: Epochs,
    pub(crate) flusher: Flusher,
    /// [`OpenOptions::detect_zeroes`], on a disk that grows.
    pub(crate) detect_zeroes: bool,
    mutation: Mutex<Mutation>,
    /// Whether the image has been told that guest-visible writes begin.
    began_writing: AtomicBool,
    /// Set for good when the top's sync failed: nothing can be called durable any more.
    poisoned: AtomicBool,
    /// Held while it is closed and while a queue is opened, so that the one does not miss the other.
    closed: Mutex<bool>,
    warnings: Vec<String>,
    /// Why the chain ends before its base.
    broken: Option<DiskError>,
}

impl Shared {
    /// Takes the mutation lock. A panic elsewhere leaves the maps as they were, each change being whole, so poisoning is passed over.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Mutation> {
        self.mutation.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The map over the chain, for a holder of the lock.
    pub(crate) fn fold<'a>(&'a self, mutation: &'a mut Mutation) -> Fold<'a> {
        Fold { map: &self.map, layers: &self.layers, mixed: &mut mutation.mixed }
    }

    /// The image that is written.
    pub(crate) fn top(&self) -> &Arc<dyn Image> {
        &self.layers[0].image
    }

    /// Its writing side.
    pub(crate) fn writer(&self) -> io::Result<&dyn ImageWriter> {
        self.top()
            .writer()
            .ok_or_else(|| io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "the disk is open read-only"))
    }

    /// Tells the image, once, that guest-visible writes begin. The caller holds the lock.
    pub(crate) fn begin_writing(&self, _mutation: &mut Mutation) -> io::Result<()> {
        if !self.has_begun_writing() {
            self.writer()?.begin_writing()?;
            self.began_writing.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Whether the image knows that guest-visible writes have begun.
    #[inline]
    pub(crate) fn has_begun_writing(&self) -> bool {
        self.began_writing.load(Ordering::Acquire)
    }

    /// Nothing can be called durable from now on.
    pub(crate) fn poison(&self) {
        self.poisoned.store(true, Ordering::Release);
    }

    /// Fails once a sync has failed, of the disk's or of its image's.
    pub(crate) fn check_poison(&self) -> io::Result<()> {
        if self.poisoned.load(Ordering::Acquire) {
            return Err(io::Error::other(
                "an earlier flush of this disk failed, so nothing can be called durable any more: close it, check it, open it again",
            ));
        }
        // An image also syncs while it makes room for a block.
        if let Some(writer) = self.top().writer() {
            writer.check_syncs()?;
        }
        Ok(())
    }

    /// Makes payload and metadata durable, blocking. Called by the flusher, and when closing.
    pub(crate) fn flush_blocking(&self) -> io::Result<()> {
        self.check_poison()?;
        let writer = self.writer()?;
        let generation = writer.freed_generation();
        if let Err(error) = writer.flush().map_err(io::Error::from) {
            // A table that found no space is still in memory, and goes out with the next flush. (Where it was a sync that found none,
            // the image refuses by itself from now on.)
            if !diskwright_store::is_full(&error) {
                self.poison();
            }
            return Err(error);
        }
        #[cfg(feature = "shuttle")]
        let generation = if is_broken(Rule::FreedBeforeTheFlush) { writer.freed_generation() } else { generation };
        let mut mutation = self.lock();
        self.try_recycle(&mut mutation);
        if mutation.grace.is_none() && generation > mutation.recycled_generation {
            mutation.grace = Some((self.epochs.begin_grace(), generation));
            self.try_recycle(&mut mutation);
        }
        Ok(())
    }

    /// Gives space back to the image if its grace period is over.
    pub(crate) fn try_recycle(&self, mutation: &mut Mutation) {
        if let Some((grace, generation)) = mutation.grace
            && self.epochs.grace_over(grace)
            && let Ok(writer) = self.writer()
        {
            writer.recycle(generation);
            mutation.recycled_generation = generation;
            mutation.grace = None;
        }
    }

    fn closed(&self) -> MutexGuard<'_, bool> {
        self.closed.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// A close that failed, perhaps for want of space, can be tried again.
    fn close(&self, closed: &mut bool) -> Result<()> {
        if *closed {
            return Ok(());
        }
        if let Some(writer) = self.top().writer() {
            self.check_poison().map_err(|source| DiskError::File {
                doing: "close the disk cleanly",
                path: self.layers[0].path.clone(),
                source,
            })?;
            writer.close()?;
        }
        *closed = true;
        Ok(())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Nobody is left to be told of a failure; whoever must know calls `Disk::close`.
        let _ = self.close(&mut self.closed());
    }
}

/// A virtual disk, open.
#[derive(Debug)]
pub struct Disk {
    shared: Arc<Shared>,
}

impl Disk {
    /// Opens the disk whose top image is `path`, with all its parents.
    ///
    /// # Errors
    /// Whatever is wrong with an image, its parents or their linkage; [`DiskError::InUse`] when another process has it.
    pub fn open(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Arc<Self>> {
        let chain = open::open_chain(path.as_ref(), options)?;
        let mut disk = Self::from_layers(chain.layers, chain.warnings)?;
        if let Some(shared) = Arc::get_mut(&mut disk.shared) {
            let grows = shared.layers[0].image.info().disk_type != DiskType::Fixed;
            shared.detect_zeroes = options.detect_zeroes && grows;
            shared.broken = chain.broken;
        }
        Ok(Arc::new(disk))
    }

    /// A disk of images that are open already, the top first (for tests, and for images that are in no file).
    ///
    /// # Errors
    /// [`DiskError::BadChain`] for no images, or more than a chain may have.
    pub fn from_layers(layers: Vec<Layer>, warnings: Vec<String>) -> Result<Self> {
        let Some(top) = layers.first() else {
            return Err(DiskError::BadOptions {
                what: "a disk needs at least one image".into(),
                hint: "name the image to open".into(),
            });
        };
        if layers.len() > open::CHAIN_MAX {
            return Err(open::too_long(&top.path));
        }
        let info = top.image.info();
        let geometry = Geometry {
            size_bytes: info.size_bytes,
            logical_sector_bytes: info.logical_sector_bytes,
            physical_sector_bytes: info.physical_sector_bytes,
            read_only: top.image.writer().is_none(),
        };
        let unit_bytes = layers.iter().map(|layer| layer.image.info().block_bytes).min().unwrap_or(info.block_bytes);
        let map = Map::new(geometry.size_bytes, unit_bytes);
        let shared = Shared {
            layers,
            map,
            geometry,
            epochs: Epochs::default(),
            flusher: Flusher::default(),
            detect_zeroes: false,
            mutation: Mutex::default(),
            began_writing: AtomicBool::new(false),
            poisoned: AtomicBool::new(false),
            closed: Mutex::new(false),
            warnings,
            broken: None,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The chain: the top first.
    pub fn layers(&self) -> &[Layer] {
        &self.shared.layers
    }

    /// Why the chain ends before its base, where it was opened with [`Reach::Found`](crate::Reach::Found).
    pub fn broken_link(&self) -> Option<&DiskError> {
        self.shared.broken.as_ref()
    }

    /// What the user should know about how the disk was opened, a sentence each.
    pub fn warnings(&self) -> &[String] {
        &self.shared.warnings
    }

    /// Makes everything durable and closes cleanly. Dropping the disk does the same but cannot report failure.
    ///
    /// # Errors
    /// When a queue is still open, or the image cannot be written.
    pub fn close(&self) -> Result<()> {
        let mut closed = self.shared.closed();
        if Arc::strong_count(&self.shared) > 1 {
            return Err(DiskError::BadOptions {
                what: format!(
                    "{}: the disk cannot be closed while queues are open",
                    self.shared.layers[0].path.display()
                ),
                hint: "drop the queues first".into(),
            });
        }
        self.shared.close(&mut closed)
    }

    /// Shares `len_bytes` at `file_offset_bytes` of `source` into this disk at `offset_bytes` by reflink: the whole blocks among them
    /// (any sectors, where this image has no blocks). Returns the range of the disk that is shared now; it is empty
    /// where no whole block lies in it. Only for a disk that nobody else is writing to.
    ///
    /// # Errors
    /// `Unsupported` and the like where the file systems cannot share; nothing of the range may be
    /// relied on then but what is written to it afterwards.
    pub fn clone_from(
        &self,
        source: &dyn Store,
        file_offset_bytes: u64,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> io::Result<(u64, u64)> {
        let shared = &self.shared;
        let info = shared.top().info();
        let writer = shared.writer()?;
        let end = offset_bytes + len_bytes;
        let (from, to) = if info.has_blocks {
            let from = offset_bytes.next_multiple_of(info.block_bytes);
            let to = if end == info.size_bytes { end } else { end - end % info.block_bytes };
            (from, to.max(from))
        } else {
            (offset_bytes, end)
        };
        let mut mutation = shared.lock();
        shared.begin_writing(&mut mutation)?;
        let mut places: Vec<Run> = Vec::new();
        let mut blocks = Vec::new();
        let mut at = from;
        while at < to {
            let block = at / info.block_bytes;
            let within_bytes = at % info.block_bytes;
            let stop = ((block + 1) * info.block_bytes).min(to);
            let mut state = [BlockState::Absent];
            shared.top().block_states(block, &mut state)?;
            let place = match state[0] {
                BlockState::Data { offset_bytes, .. } => offset_bytes,
                _ => {
                    let reservation = writer.reserve(block)?;
                    if let Some((init_offset_bytes, bytes)) = reservation.init {
                        shared.top().store().write_at(&bytes, init_offset_bytes)?;
                        writer.initialised(block);
                    }
                    blocks.push(block);
                    reservation.offset_bytes
                }
            };
            let owner = Owner::Data { layer: 0, offset_bytes: place + within_bytes };
            push_joined(&mut places, Run { start_bytes: at, len_bytes: stop - at, owner });
            at = stop;
        }
        let cloned = places.into_iter().try_for_each(|run| {
            let Owner::Data { offset_bytes: place, .. } = run.owner else { return Ok(()) };
            let range = FileRange {
                offset_bytes: file_offset_bytes + (run.start_bytes - offset_bytes),
                len_bytes: run.len_bytes,
            };
            shared.top().store().clone_range(source, range, place)
        });
        // Also where sharing failed: the blocks have their space, which reads as zeros, and must not be lost.
        for block in blocks {
            let state = writer.commit(block, Commit::Whole)?;
            shared
                .fold(&mut mutation)
                .block_changed(block * info.block_bytes, info.block_bytes, state)
                .map_err(error::to_io)?;
        }
        cloned.map(|()| (from, to))
    }

    /// The runs of a range as extents, holes of fixed images told apart.
    fn extents_of(&self, run: Run, out: &mut Vec<Extent>) -> io::Result<()> {
        let extent = |kind, depth, offset_bytes, len_bytes, file_offset_bytes| Extent {
            offset_bytes,
            len_bytes,
            kind,
            depth,
            file_offset_bytes,
        };
        let (layer, offset_bytes) = match run.owner {
            Owner::Data { layer, offset_bytes } => (layer, offset_bytes),
            Owner::Zero { layer } => {
                out.push(extent(ExtentKind::Zero, layer, run.start_bytes, run.len_bytes, None));
                return Ok(());
            }
            Owner::Damaged { layer } => {
                out.push(extent(ExtentKind::Damaged, layer, run.start_bytes, run.len_bytes, None));
                return Ok(());
            }
            Owner::Packed { layer } => {
                out.push(extent(ExtentKind::Data, layer, run.start_bytes, run.len_bytes, None));
                return Ok(());
            }
            Owner::Absent | Owner::Lazy { .. } => {
                let bottom = self.shared.layers.len() as u32 - 1;
                out.push(extent(ExtentKind::Unallocated, bottom, run.start_bytes, run.len_bytes, None));
                return Ok(());
            }
        };
        let image = &self.shared.layers[layer as usize].image;
        if image.info().disk_type != DiskType::Fixed {
            out.push(extent(ExtentKind::Data, layer, run.start_bytes, run.len_bytes, Some(offset_bytes)));
            return Ok(());
        }
        let end_bytes = offset_bytes + run.len_bytes;
        // Holes begin and end where the file system likes, a raw file where its last byte is: what shares a sector with data is data.
        let sector_bytes = u64::from(self.shared.geometry.logical_sector_bytes);
        let sector_start = |file_bytes: u64| file_bytes - (file_bytes - offset_bytes) % sector_bytes;
        let to_disk = |file_bytes: u64| run.start_bytes + (file_bytes - offset_bytes);
        let mut at = offset_bytes;
        while at < end_bytes {
            let (from, to) = match image.store().next_data(at)? {
                Some(data) if data.offset_bytes < end_bytes => {
                    let start_bytes = data.offset_bytes.max(at);
                    let last_byte =
                        data.offset_bytes.saturating_add(data.len_bytes).min(end_bytes).max(start_bytes + 1) - 1;
                    (sector_start(start_bytes), (sector_start(last_byte) + sector_bytes).min(end_bytes))
                }
                Some(_) => (end_bytes, end_bytes),
                None => (end_bytes, end_bytes),
            };
            if at < from {
                out.push(extent(ExtentKind::Zero, layer, to_disk(at), from - at, None));
            }
            if from < to {
                out.push(extent(ExtentKind::Data, layer, to_disk(from), to - from, Some(from)));
            }
            at = to.max(at + 1).max(from);
        }
        Ok(())
    }
}

impl BlockDevice for Disk {
    fn geometry(&self) -> Geometry {
        self.shared.geometry
    }

    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        let closed = self.shared.closed();
        if *closed {
            return Err(io::Error::other("the disk was closed; open it again"));
        }
        Ok(Box::new(DiskQueue::open(Arc::clone(&self.shared), options)?))
    }

    fn extents(&self, offset_bytes: u64, len_bytes: u64, out: &mut Vec<Extent>) -> io::Result<()> {
        let end_bytes = offset_bytes.saturating_add(len_bytes).min(self.shared.geometry.size_bytes);
        let mut walked = Vec::new();
        {
            let mut mutation = self.shared.lock();
            self.shared.fold(&mut mutation).walk(offset_bytes, end_bytes, &mut walked).map_err(error::to_io)?;
        }
        let mut runs = Vec::new();
        for run in walked {
            push_joined(&mut runs, run);
        }
        for run in runs {
            self.extents_of(run, out)?;
        }
        Ok(())
    }
}
