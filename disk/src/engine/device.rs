//! The disk: a chain of images as one block device.
//!
//! ```text
//!   Disk ──▶ Shared (shared.rs) ──▶ Chain (chain.rs): the images, the map over them, the geometry
//!     └─ open_queue ──▶ DiskQueue (queue.rs)
//! ```
//!
//! Queues hold `Shared`. The disk is closed when the `Disk` and its last queue were dropped, or
//! earlier by [`Disk::close`].

use crate::{
    DiskError, OpenOptions, Result,
    engine::track::{changed::ChangesQuery, resume::TrackedPoints, tracker::View},
    engine::{
        chain::{Chain, Layer},
        claims::{COPY_UP, Key},
        epoch::GracePeriod,
        guard::guarded,
        map::{Owner, Run},
        queue::DiskQueue,
        shared::Shared,
    },
    error,
};
use diskwright_image::{DiskType, ImageWriter};
#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken};
use diskwright_store::{
    AtRisk, BlockDevice, BlockQueue, Extent, ExtentKind, Geometry, MemberTraffic, QueueOptions, TrackedPoint,
    resize::SizeWatcher, sync::MutexGuard,
};
use std::{
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Default memory limit for the map and the images' tables, in bytes.
pub const MAP_MEMORY_BYTES: u64 = 64 << 20;

/// An open virtual disk.
#[derive(Debug)]
pub struct Disk {
    pub(crate) shared: Arc<Shared>,
    /// Where and how the disk was opened; `None` for a disk of images that were open before.
    pub(crate) origin: Option<Origin>,
}

/// Where and how a disk was opened.
#[derive(Debug)]
pub(crate) struct Origin {
    /// The path of the disk, absolute and without symbolic links. The disk keeps this name when it
    /// gets a snapshot.
    pub(crate) file: PathBuf,
    pub(crate) options: OpenOptions,
}

/// An image was put on top, and requests may still write to the former top.
pub(crate) struct PendingPush {
    before: Arc<Chain>,
    copy_up: Key,
    grace: GracePeriod,
    /// Whether the requests have ended, after [`Disk::let_copy_up`].
    at_rest: Option<io::Result<()>>,
    /// The path of the former top.
    path: PathBuf,
}

impl Disk {
    /// Whether a request was lost, so that it is unknown when the requests of the disk end.
    pub(crate) fn is_stuck(&self) -> bool {
        self.shared.epochs.is_stuck()
    }

    /// A disk of images that are already open, the top first, with [`MAP_MEMORY_BYTES`]. For tests,
    /// and for images that are not in files.
    ///
    /// # Errors
    /// [`DiskError::BadOptions`] for no images; [`DiskError::BadChain`] for more than 1,024.
    pub fn from_layers(layers: Vec<Layer>, warnings: Vec<String>) -> Result<Self> {
        let shared = Shared::new(Chain::new(layers, MAP_MEMORY_BYTES)?, warnings);
        Ok(Self { shared: Arc::new(shared), origin: None })
    }

    /// The file of the disk, an absolute path without symbolic links; `None` if the disk was made
    /// of images that were open before.
    pub fn file(&self) -> Option<&Path> {
        self.origin.as_ref().map(|origin| origin.file.as_path())
    }

    /// The state that the disk shares with its queues.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The current layers, the top first.
    pub fn layers(&self) -> Arc<[Layer]> {
        Arc::clone(self.shared.chain().layers())
    }

    /// The error of the first parent that could not be opened with
    /// [`ChainScope::Available`](crate::ChainScope::Available); `None` if the chain is whole.
    pub fn broken_link(&self) -> Option<&DiskError> {
        self.shared.broken.as_ref()
    }

    /// Warnings for the user about how the disk was opened, one sentence each.
    pub fn warnings(&self) -> &[String] {
        &self.shared.warnings
    }

    /// Makes everything durable and closes the images cleanly. Dropping the disk does the same but
    /// cannot report errors.
    ///
    /// # Errors
    /// If a queue is still open, or the image cannot be written.
    pub fn close(&self) -> Result<()> {
        self.shared.close(true)
    }

    /// Puts an image on top of the chain. Queues may be open and requests in flight. From now on
    /// the new image is written, and the former top becomes its parent. All requests that ended
    /// before one moment of the call have written to the former top; all that begin after that
    /// moment write to the new one. When this returns, the former top's file is no longer written:
    /// its data is durable, and it was closed cleanly. The file stays open for reading. Waits for
    /// requests in flight, so a thread with requests in flight must not call it.
    ///
    /// # Errors
    /// [`DiskError::BadOptions`] for an image that is not writable, not differencing, or differs
    /// from the disk in size or sector; [`DiskError::File`] if a request of the disk was lost
    /// earlier: nothing has changed then. [`DiskError::File`] if the flush of the former top fails:
    /// the image is on top then, and every later flush of the disk fails.
    pub fn push_layer(&self, top: Layer) -> Result<()> {
        let turn = self.shared.begin_change();
        self.check_top(&top)?;
        let pushed = self.put_on_top(&turn, top, None, None)?;
        self.settle_former_top(pushed)
    }

    /// Whether the image can be put on top.
    pub(crate) fn check_top(&self, top: &Layer) -> Result<()> {
        let chain = self.shared.chain();
        let (was, info) = (chain.geometry, top.image.info());
        let fits = top.image.writer().is_some()
            && info.disk_type == DiskType::Differencing
            && top.image.size_bytes() == was.size_bytes
            && info.logical_sector_bytes == was.logical_sector_bytes;
        if !fits || was.read_only {
            return Err(DiskError::BadOptions {
                what: format!("{}: cannot go on top of a disk that is open", top.path.display()),
                hint: format!(
                    "the disk must be open for writing, and the new image a writable differencing one of {} bytes with sectors of {} bytes",
                    was.size_bytes, was.logical_sector_bytes
                ),
            });
        }
        // Ids may be used up, and the chain too long.
        chain.with_top(top.clone(), None).map(drop)
    }

    /// Puts an image on top that [`Disk::check_top`] has allowed in this turn. After an error
    /// nothing has changed. Waits for a grace period of others, but for no request of its own
    /// period: those are waited for by [`Disk::settle_former_top`], which must follow. With `track`
    /// changes are marked there from the same moment on.
    pub(crate) fn put_on_top(
        &self,
        _turn: &MutexGuard<'_, ()>,
        top: Layer,
        former_path: Option<&Path>,
        track: Option<Arc<View>>,
    ) -> Result<PendingPush> {
        let shared = &self.shared;
        let path = former_path.map_or_else(|| shared.chain().layers()[0].path.clone(), Path::to_owned);
        let mut put = None;
        // One moment for all queues: a chain that counts before the period begins would let one
        // queue write to the new top, and another one, whose request begins after that write has
        // ended, to the former top. The frozen image would then have the later write alone.
        let begun = shared.begin_grace(|mutation| {
            let before = Arc::clone(&mutation.chain);
            let joined = before.with_top(top, former_path).and_then(|chain| match track {
                Some(track) => chain.with_track(Some(track)),
                None => Ok(chain),
            });
            put = Some(joined.map(|chain| {
                let copy_up = (chain.top().id, COPY_UP);
                mutation.claims.exclude(copy_up);
                shared.publish(mutation, chain);
                (before, copy_up)
            }));
        });
        let grace = begun.map_err(|error| error::from_io("put an image on top of it", &path, error))?;
        match put {
            Some(Ok((before, copy_up))) => Ok(PendingPush { before, copy_up, grace, at_rest: None, path }),
            Some(Err(error)) => Err(error),
            None => Err(error::from_io("put an image on top of it", &path, io::ErrorKind::Other.into())),
        }
    }

    /// Waits for the requests that may write to the former top. From then on blocks of the new top
    /// can be filled from it.
    pub(crate) fn let_copy_up(&self, pushed: &mut PendingPush) {
        if pushed.at_rest.is_some() {
            return;
        }
        let shared = &self.shared;
        #[cfg(feature = "shuttle")]
        let at_rest = if is_broken(Rule::FormerTopIsAtRest) { Ok(()) } else { shared.wait_for(pushed.grace) };
        #[cfg(not(feature = "shuttle"))]
        let at_rest = shared.wait_for(pushed.grace);
        shared.lock().claims.end_exclusion(pushed.copy_up);
        pushed.at_rest = Some(at_rest);
    }

    /// Waits for the requests that may write to the former top, and makes it durable.
    pub(crate) fn settle_former_top(&self, mut pushed: PendingPush) -> Result<()> {
        let shared = &self.shared;
        self.let_copy_up(&mut pushed);
        let PendingPush { before, at_rest, path, .. } = pushed;
        let at_rest = at_rest.unwrap_or(Ok(()));
        let former = before.top();
        let closed = at_rest.and_then(|()| shared.check_poison(&before)).and_then(|()| Ok(former.writer()?.close()?));
        if let Err(source) = closed {
            shared.poison.set();
            return Err(DiskError::File { doing: "make the former top durable", path, source });
        }
        // Flushes skip the former top from now on.
        let mut mutation = shared.lock();
        let chain = mutation.chain.with_at_rest(former.id)?;
        shared.publish(&mut mutation, chain);
        Ok(())
    }

    /// Enlarges the virtual disk. Queues may be open and requests in flight. The new range reads as
    /// zeros. Durable on return; after a power cut during the call the disk has its old size or the
    /// new one. Queues see the new size from their next request on, and size watchers are notified.
    /// Waits for requests in flight, so a thread with requests in flight must not call it.
    ///
    /// # Errors
    /// [`DiskError::BadOptions`] for a smaller size, for a size that is not a multiple of the
    /// sector, or for a parent that is larger than the disk; [`DiskError::Image`] if the image
    /// cannot have that size; [`DiskError::File`] if it cannot be written.
    pub fn grow(&self, size_bytes: u64) -> Result<()> {
        let shared = &self.shared;
        let turn = shared.begin_change();
        let present_bytes = self.check_growth(size_bytes)?;
        let chain = shared.chain();
        let path = &chain.layers()[0].path;
        let image_error = |error: io::Error| error::from_io("make it larger", path, error);
        shared.begin_writing().map_err(image_error)?;
        if let Some(points) = TrackedPoints::of(shared) {
            points.resize(size_bytes)?;
        }
        self.make_way(&turn, size_bytes).map_err(image_error)?;
        let writer = chain.top().writer().map_err(image_error)?;
        writer.resize(size_bytes).map_err(|error| DiskError::from(error).at(path))?;
        let mut mutation = shared.lock();
        let grown = mutation.chain.measured_anew()?;
        shared.publish(&mut mutation, grown);
        drop(mutation);
        shared.wait_for_grace().map_err(image_error)?;
        if size_bytes > present_bytes {
            shared.watchers.notify(size_bytes);
        }
        Ok(())
    }

    /// Whether [`Disk::grow`] may give the disk this size, as far as its chain and its image decide
    /// before anything is changed. Returns the present size in bytes.
    ///
    /// # Errors
    /// As [`Disk::grow`].
    pub fn check_growth(&self, size_bytes: u64) -> Result<u64> {
        let chain = self.shared.chain();
        let path = &chain.layers()[0].path;
        let present_bytes = chain.geometry.size_bytes;
        let refused = |hint| {
            let what = format!(
                "{}: cannot change the size of {present_bytes} bytes to {size_bytes} bytes while the disk is open",
                path.display()
            );
            Err(DiskError::BadOptions { what, hint })
        };
        let sector_bytes = u64::from(chain.geometry.logical_sector_bytes);
        if size_bytes < present_bytes || !size_bytes.is_multiple_of(sector_bytes) {
            return refused(format!("name a larger size, a multiple of the sector of {sector_bytes} bytes"));
        }
        // The parent's data beyond the disk's end was never on this disk, but would become visible.
        if let Some(parent) = chain.members().get(1).filter(|parent| parent.size_bytes > present_bytes) {
            let parent_path = chain.layers()[1].path.display();
            return refused(format!(
                "its parent {parent_path} has {} bytes, and its data beyond the end of this disk would become visible: convert this disk to a new one of the wanted size",
                parent.size_bytes
            ));
        }
        if size_bytes > present_bytes
            && let Ok(writer) = chain.top().writer()
        {
            writer.check_growth(size_bytes).map_err(|error| DiskError::from(error).at(path))?;
        }
        Ok(present_bytes)
    }

    /// Whether the top image can have a smaller size of `size_bytes`. What lies on the disk is not
    /// considered.
    pub(crate) fn check_shrink(&self, size_bytes: u64) -> Result<()> {
        let chain = self.shared.chain();
        let path = &chain.layers()[0].path;
        let writer = chain.top().writer().map_err(|error| error::from_io("make it smaller", path, error))?;
        let sector_bytes = u64::from(chain.geometry.logical_sector_bytes);
        if !size_bytes.is_multiple_of(sector_bytes) {
            return Err(DiskError::BadOptions {
                what: format!("{}: cannot have a size of {size_bytes} bytes", path.display()),
                hint: format!("name a multiple of the sector of {sector_bytes} bytes"),
            });
        }
        writer.check_shrink(size_bytes).map_err(|error| DiskError::from(error).at(path))
    }

    /// Makes the disk smaller: what lies beyond the new end is lost. No queue may be open. Durable
    /// on return; after a power cut during the call the disk has its old size or the new one. With
    /// the present size, gives back what an interrupted call has left unused in the file.
    pub(crate) fn shrink(&self, size_bytes: u64) -> Result<()> {
        let shared = &self.shared;
        let _turn = shared.begin_change();
        let chain = shared.chain();
        let path = &chain.layers()[0].path;
        let io_error = |error: io::Error| error::from_io("make it smaller", path, error);
        if shared.has_queues() {
            return Err(DiskError::BadOptions {
                what: format!("{}: the disk cannot be made smaller while queues are open", path.display()),
                hint: "drop the queues first".into(),
            });
        }
        shared.flush_blocking().map_err(io_error)?;
        shared.wait_for_grace().map_err(io_error)?;
        if size_bytes < chain.geometry.size_bytes {
            shared.begin_writing().map_err(io_error)?;
        }
        let writer = chain.top().writer().map_err(io_error)?;
        writer.shrink(size_bytes).map_err(|error| DiskError::from(error).at(path))?;
        let mut mutation = shared.lock();
        let smaller = mutation.chain.measured_anew()?;
        shared.publish(&mut mutation, smaller);
        drop(mutation);
        TrackedPoints::of(shared).map_or(Ok(()), |points| points.resize(size_bytes))
    }

    /// Appends the extents of a run. Holes of fixed images become extents of zeros.
    fn extents_of(chain: &Chain, run: Run, out: &mut Vec<Extent>) -> io::Result<()> {
        let depth_of = |layer| chain.depth_of(layer).unwrap_or(0) as u32;
        let extent = |kind, depth, offset_bytes, len_bytes| Extent {
            offset_bytes,
            len_bytes,
            kind,
            depth,
            file: 0,
            file_offset_bytes: None,
        };
        let (source, offset_bytes) = match run.owner {
            Owner::Data { source, offset_bytes } => (source, offset_bytes),
            Owner::Zero { layer } => {
                out.push(extent(ExtentKind::Zero, depth_of(layer), run.start_bytes, run.len_bytes));
                return Ok(());
            }
            Owner::Damaged { layer } => {
                out.push(extent(ExtentKind::Damaged, depth_of(layer), run.start_bytes, run.len_bytes));
                return Ok(());
            }
            Owner::Compressed { layer } => {
                out.push(extent(ExtentKind::Data, depth_of(layer), run.start_bytes, run.len_bytes));
                return Ok(());
            }
            Owner::Absent | Owner::Lazy { .. } => {
                let bottom = chain.members().len() as u32 - 1;
                out.push(extent(ExtentKind::Unallocated, bottom, run.start_bytes, run.len_bytes));
                return Ok(());
            }
        };
        let (Some(member), Some(store)) = (chain.member_of_source(source), chain.source(source)) else { return Ok(()) };
        let depth = depth_of(member.id);
        let extent = |kind, offset_bytes, len_bytes, file_offset_bytes| Extent {
            file: member.store_index(source),
            file_offset_bytes,
            ..extent(kind, depth, offset_bytes, len_bytes)
        };
        if member.image.info().disk_type != DiskType::Fixed {
            out.push(extent(ExtentKind::Data, run.start_bytes, run.len_bytes, Some(offset_bytes)));
            return Ok(());
        }
        let end_bytes = offset_bytes + run.len_bytes;
        // Holes can begin and end within a sector. A sector with any data is data.
        let sector_bytes = u64::from(chain.geometry.logical_sector_bytes);
        let sector_start = |file_bytes: u64| file_bytes - (file_bytes - offset_bytes) % sector_bytes;
        let to_disk = |file_bytes: u64| run.start_bytes + (file_bytes - offset_bytes);
        let mut at = offset_bytes;
        while at < end_bytes {
            let (from, to) = match store.next_data(at)? {
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
                out.push(extent(ExtentKind::Zero, to_disk(at), from - at, None));
            }
            if from < to {
                out.push(extent(ExtentKind::Data, to_disk(from), to - from, Some(from)));
            }
            at = to.max(at + 1).max(from);
        }
        Ok(())
    }
}

impl Drop for Disk {
    /// A worker holds the disk, and with it the locks of its files, for a moment after its last
    /// job. Waits for that, so that the files can be opened again at once.
    fn drop(&mut self) {
        self.shared.settle_workers();
    }
}

impl BlockDevice for Disk {
    fn geometry(&self) -> Geometry {
        self.shared.chain().geometry
    }

    fn watch_size(&self, watcher: &Arc<SizeWatcher>) {
        self.shared.watchers.add(watcher);
    }

    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        self.shared.queue_opens()?;
        Ok(Box::new(DiskQueue::open(Arc::clone(&self.shared), options)?))
    }

    fn extents(&self, offset_bytes: u64, len_bytes: u64, out: &mut Vec<Extent>) -> io::Result<()> {
        let chain = self.shared.chain();
        let end_bytes = offset_bytes.saturating_add(len_bytes).min(chain.geometry.size_bytes);
        guarded(&self.shared.poison, || {
            let mut runs = Vec::new();
            let chain = self.shared.walk(chain, offset_bytes, end_bytes, &mut runs)?;
            runs.into_iter().try_for_each(|run| Self::extents_of(&chain, run, out))
        })
    }

    fn at_risk(&self) -> AtRisk {
        let chain = self.shared.chain();
        if chain.geometry.read_only {
            return AtRisk::Never;
        }
        let stores = chain.top().image.stores().iter();
        let below = stores.map(|store| store.at_risk()).max().unwrap_or(AtRisk::Never);
        if !chain.top().image.info().has_blocks {
            return below;
        }
        let mut written = chain.members().iter().filter(|member| !member.is_at_rest);
        let is_dirty = written.any(|member| member.image.writer().is_some_and(ImageWriter::is_dirty));
        below.max(if is_dirty { AtRisk::Now } else { AtRisk::NotNow })
    }

    fn member_traffic(&self) -> Vec<MemberTraffic> {
        let chain = self.shared.chain();
        let mut found: Vec<MemberTraffic> = Vec::new();
        for store in chain.members().iter().flat_map(|member| member.image.stores()) {
            MemberTraffic::merge(&mut found, store.member_traffic());
        }
        found
    }

    fn tracked_points(&self) -> Vec<TrackedPoint> {
        let track = self.shared.chain().track.clone();
        let names = match track {
            Some(view) => view.tracker.names(),
            None => self
                .points()
                .map_or_else(|_| Vec::new(), |points| points.into_iter().map(|point| (point.name, point.id)).collect()),
        };
        names.into_iter().map(|(name, id)| TrackedPoint { name, id }).collect()
    }

    fn changed_since(
        &self,
        point: &TrackedPoint,
        range: Range<u64>,
        enough: usize,
        out: &mut Vec<Range<u64>>,
    ) -> io::Result<()> {
        let wanted = ChangesQuery { name: &point.name, id: Some(point.id), to: None, window: range.clone() };
        let changed = self.changed(&wanted).map_err(error::to_io)?;
        let parts = changed.ranges_from(range.start).take_while(|part| part.start < range.end).take(enough);
        out.extend(parts.map(|part| part.start..part.end.min(range.end)));
        Ok(())
    }
}
