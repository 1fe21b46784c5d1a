//! Merges images of a disk that is in use, while its clients go on: frozen ones here, the one that
//! is written in `absorb.rs`.
//!
//! ```text
//!   top ◀ written by clients        top                          top
//!    └─ child   (frozen)   ─copy─▶   └─ child  (all of it is      └─ parent   (all data)
//!         └─ parent                       └─ parent  below)            └─ ...
//!              └─ ...                          └─ ...
//! ```
//!
//! The steps and their order are those of [`merge`](crate::merge()), so a power cut at any moment
//! leaves what that leaves, and either of the two finishes it. This module adds what an open disk
//! needs:
//!
//! - *Locks.* The disk holds shared locks of its frozen images. Those that take part get exclusive
//!   ones, on the same open files, so that no other program can come in between. They are written
//!   through further open files without locks of their own.
//! - *Tables.* Before the parent is first written, a chain is published in which the image that
//!   will be written is the parent, and all requests of the chain before are waited for. That image
//!   knows its own changes; the former one would read them from the file half-way.
//! - *The link.* The top's link is replaced by the image that clients write.
//! - *The end.* When the child's name is gone, a chain without it is published, and all requests
//!   that may read the child are waited for.
//!
//! Why clients read the same all the time: the parent is written only where the child hides it. A
//! part of a parent's block that the child does not hide keeps its contents in each case:
//!
//! - The block has space: the other sectors are not written. No block of a parent moves.
//! - It gets space, and other sectors read as zeros: fresh space reads as zeros too.
//! - It gets space, and other sectors are an ancestor's: a sector bitmap says so, or the block is
//!   first filled from below.
//! - It loses its space because the child has zeros: only if the child hides all of the block.
//!
//! Space that the merge frees in the parent may be used again at once by another block. No request
//! of a client reaches it, as the child has hidden it since before the disk was opened or frozen.
//!
//! Lock: `changing` is held throughout, so the disk does not grow and gets no snapshot meanwhile.
//! Copying waits for nothing but its own I/O, and pauses for clients (`throttle.rs`).

use crate::{
    AbsorbOptions, DiskError, KeptName, MergeOptions, Merged, OpenOptions, Progress, Result,
    engine::track::resume::TrackedPoints,
    engine::{
        chain::Layer,
        device::{Disk, Origin},
        epoch::Epochs,
    },
    error::{self, file_error},
    life::{
        kept_name,
        merge::{Locked, Merge, MergeUsers},
    },
    opening::{
        gate,
        image_file::{Access, open_image},
        merge_mark,
        referred::open_referred,
    },
};
use diskwright_image::{probe, probe::DetectedFormat};
use diskwright_store::{LockMode, Store};
use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

impl Disk {
    /// Merges the image at `path`, one of this disk's chain, into its parent or into another
    /// ancestor, while queues are open and requests in flight. The same promises as
    /// [`merge`](crate::merge()); clients read the same all the time. Of `options.open` nothing is
    /// used: the images are opened as the disk was. Waits for requests in flight, so a thread with
    /// requests in flight must not call it; other changes of the chain wait until it has ended.
    ///
    /// The image that is written goes last, by [`Disk::absorb`]: the frozen images below it are
    /// merged into the ancestor first. The disk keeps its name then, whatever `options.keep` says.
    ///
    /// # Errors
    /// As [`merge`](crate::merge()) and [`Disk::absorb`]; [`DiskError::BadOptions`] for an image
    /// that is not in the chain, and for a disk that is open read-only.
    pub fn merge(&self, path: impl AsRef<Path>, options: &MergeOptions, progress: &mut Progress<'_>) -> Result<Merged> {
        if !options.dry_run && self.shared.chain().track.is_some() {
            // The image that is written must not get another identity later.
            let path = self.layers()[0].path.clone();
            self.shared.begin_writing().map_err(|source| error::from_io("begin to write to it", &path, source))?;
        }
        let merged = self.merge_images(path.as_ref(), options, progress);
        let _turn = self.shared.begin_change();
        // Also after an error the disk may have another image or other parents.
        let kept = TrackedPoints::of(&self.shared).map_or(Ok(()), |points| points.go_on());
        merged.and_then(|merged| kept.map(|()| merged))
    }

    fn merge_images(&self, path: &Path, options: &MergeOptions, progress: &mut Progress<'_>) -> Result<Merged> {
        let origin = self.origin.as_ref().ok_or_else(|| DiskError::BadOptions {
            what: "the images of a disk without a file of its own cannot be merged".into(),
            hint: "open the disk by its path".into(),
        })?;
        let layers = self.layers();
        if is_file(origin, &layers[0], path) {
            return self.merge_written(origin, &layers, options, progress);
        }
        self.merge_frozen(origin, path, options, false, progress)
    }

    /// Merges a frozen image. With `keeps_name` the merge of the image that is written follows.
    fn merge_frozen(
        &self,
        origin: &Origin,
        path: &Path,
        options: &MergeOptions,
        keeps_name: bool,
        progress: &mut Progress<'_>,
    ) -> Result<Merged> {
        let _turn = self.shared.begin_change();
        self.rest_parents()?;
        let open = OpenOptions { writable: false, force_share: false, ..origin.options.clone() };
        let options = MergeOptions { open, ..options.clone() };
        let task = Task::new(self, origin, path, &options)?;
        let mut in_use = InUse { disk: self, frozen_images: Vec::new(), options: &options, keeps_name };
        for layer in task.taking_part() {
            in_use.frozen_images.push(LockedFrozenImage::take(layer, &options.open)?);
        }
        let steps = match &task.leftover {
            Some(leftover) => vec![lock(leftover, &task.layers[task.into], &options.open)?],
            None => task.layers[task.from..task.into].iter().map(|layer| in_use.of(layer)).collect::<Result<_>>()?,
        };
        let target = in_use.of(&task.layers[task.into])?;
        let below = task.layers[task.into + 1..].to_vec();
        Merge::of(steps, target, below, task.child(origin), &options, &in_use)?.run(progress)
    }

    /// Merges the image that is written.
    fn merge_written(
        &self,
        origin: &Origin,
        layers: &[Layer],
        options: &MergeOptions,
        progress: &mut Progress<'_>,
    ) -> Result<Merged> {
        let depth = match &options.into {
            Some(into) => layers.iter().position(|layer| is_file(origin, layer, into)).filter(|depth| *depth > 0),
            None => Some(1),
        };
        let depth = depth.ok_or_else(|| not_below(&origin.file, options.into.as_deref().unwrap_or(&origin.file)))?;
        let target = layers.get(depth).map(|layer| layer.path.clone());
        if let Some(target) = target.filter(|target| depth > 1 && target.parent() != origin.file.parent()) {
            return Err(DiskError::BadOptions {
                what: format!("{} and {} are in different folders", origin.file.display(), target.display()),
                hint: "the disk keeps its name, and an ancestor can get it only within one folder: merge the disk when it is not in use".into(),
            });
        }
        let mut merged = Merged::default();
        if depth > 1 {
            let options = MergeOptions { keep: KeptName::Parents, ..options.clone() };
            merged = self.merge_frozen(origin, &layers[1].path, &options, true, progress)?;
        }
        let absorbing = AbsorbOptions {
            search_dirs: options.search_dirs.clone(),
            no_reflink: options.no_reflink,
            dry_run: options.dry_run,
        };
        let (before, cloned) = (merged.copied_bytes, merged.cloned_bytes);
        let identity = |layer: &Layer| layer.image.store().identity();
        let below = if options.dry_run { 1 } else { depth };
        let parent = layers.get(below).map(identity);
        let is_meant =
            |now: &[Layer]| Arc::ptr_eq(&now[0].image, &layers[0].image) && now.get(1).map(identity) == parent;
        let done = self.absorb_if(&absorbing, &is_meant, progress)?;
        merged.merged.push(done.disk.clone());
        merged.warnings.extend(done.warnings);
        let old_bytes = if depth > 1 { merged.size_bytes.0 } else { done.size_bytes.0 };
        let target = if depth > 1 { merged.target } else { done.parent };
        Ok(Merged {
            disk: done.disk,
            target,
            data_bytes: merged.data_bytes + done.data_bytes,
            copied_bytes: before + done.copied_bytes,
            cloned_bytes: cloned + done.cloned_bytes,
            growth_bytes: merged.growth_bytes + done.growth_bytes,
            size_bytes: (old_bytes, done.size_bytes.1),
            ..merged
        })
    }

    /// Closes a parent that could not be closed when a merge into it failed: its tables may be in
    /// memory only, and its file is opened again for a merge.
    fn rest_parents(&self) -> Result<()> {
        let shared = &self.shared;
        let chain = shared.chain();
        for (member, layer) in chain.members().iter().zip(chain.layers().iter()).skip(1) {
            if member.is_at_rest {
                continue;
            }
            let closed = member.writer().and_then(|writer| Ok(writer.close()?));
            closed.map_err(|source| error::from_io("make it durable", &layer.path, source))?;
            let mut mutation = shared.lock();
            let at_rest = mutation.chain.with_at_rest(member.id)?;
            shared.publish(&mut mutation, at_rest);
        }
        Ok(())
    }
}

/// Whether the path leads to the file of this image.
fn is_file(origin: &Origin, layer: &Layer, path: &Path) -> bool {
    let found = origin.options.files.facts(path).ok().map(|facts| facts.identity);
    found.is_some() && found == layer.image.store().identity()
}

/// Which images of the chain take part.
struct Task {
    layers: Arc<[Layer]>,
    /// Depth of the image that is merged. That of the target if the image has left the chain.
    from: usize,
    /// Depth of the image that takes the data.
    into: usize,
    /// An image that an earlier merge has left: all of its data is in the target, and only its name
    /// is still to be removed.
    leftover: Option<PathBuf>,
}

impl Task {
    fn new(disk: &Disk, origin: &Origin, shown: &Path, options: &MergeOptions) -> Result<Self> {
        let (layers, files) = (disk.layers(), &options.open.files);
        let chain = disk.shared.chain();
        if chain.geometry.read_only {
            return Err(DiskError::BadOptions {
                what: format!("{}: it is open read-only, so its images cannot be merged", origin.file.display()),
                hint: "open it for writing, or close it and merge then".into(),
            });
        }
        let checked = disk.shared.check_poison(&chain);
        checked.map_err(|source| error::from_io("merge its images", &origin.file, source))?;
        let find = |path: &Path| -> Result<Option<usize>> {
            let facts = files.facts(path).map_err(|source| file_error("find it", path, source))?;
            Ok(layers.iter().position(|layer| layer.image.store().identity() == Some(facts.identity)))
        };
        let into = options.into.as_deref().map(|into| find(into)?.ok_or_else(|| not_below(shown, into))).transpose()?;
        let Some(from) = find(shown)? else {
            let (leftover, into) = leftover(shown, &layers, into, origin, &options.open)?;
            return Ok(Self { layers, from: into, into, leftover: Some(leftover) });
        };
        let into = into.unwrap_or(from + 1);
        if into <= from {
            return Err(not_below(shown, &layers[into].path));
        }
        if into >= layers.len() {
            return Err(DiskError::BadOptions {
                what: format!("{}: it has no parent into which it could be merged", shown.display()),
                hint: "only differencing disks have one".into(),
            });
        }
        Ok(Self { layers, from, into, leftover: None })
    }

    /// The frozen images that are written: those that are merged, the target, and the child, whose
    /// link changes; of a format that records times of change, all above it, too.
    fn taking_part(&self) -> impl Iterator<Item = &Layer> {
        let has_times = self.layers[self.into].image.info().format.driver().child_records_time;
        let first = if has_times { 1 } else { self.from.saturating_sub(1).max(1) };
        self.layers[first..=self.into].iter()
    }

    /// The image of the chain that has the merged one as its parent.
    fn child(&self, origin: &Origin) -> Option<PathBuf> {
        match (&self.leftover, self.from) {
            (Some(_), _) | (_, 0) => None,
            (None, 1) => Some(origin.file.clone()),
            (None, from) => Some(self.layers[from - 1].path.clone()),
        }
    }
}

fn not_below(shown: &Path, into: &Path) -> DiskError {
    DiskError::BadOptions {
        what: format!("{}: {} is not among its ancestors", shown.display(), into.display()),
        hint: "name an image of its chain below it".into(),
    }
}

/// An image that is not in the chain. It may be what an earlier merge into one of the chain has
/// left. Returns its path without symbolic links, and the depth of the image with its data.
fn leftover(
    shown: &Path,
    layers: &[Layer],
    into: Option<usize>,
    origin: &Origin,
    open: &OpenOptions,
) -> Result<(PathBuf, usize)> {
    let stranger = || DiskError::BadOptions {
        what: format!("{}: it is not in the chain of {}, which is in use", shown.display(), origin.file.display()),
        hint: "name a frozen image of that disk (`snapshot list` draws them)".into(),
    };
    let real = open.files.canonical(shown).map_err(|source| file_error("find it", shown, source))?;
    let access = Access { format: None, force_share: true, ..Access::of_top(open) };
    let (image, _) = open_image(&open.files, &real, &access, &mut Vec::new())?;
    let info = image.info();
    let link = info.parent.as_ref().filter(|link| merge_mark::is_merged(info, link)).ok_or_else(stranger)?;
    let named = gate::named_paths(&real, link, &open.parents.drives);
    let named: Vec<PathBuf> = named.iter().filter_map(|path| open.files.canonical(path).ok()).collect();
    let is_parent = |layer: &Layer| {
        layer.image.info().format == info.format
            && layer.image.linkage_id() == link.linkage
            && link.file_id.map_or_else(|| named.contains(&layer.path), |id| layer.image.info().disk_id == Some(id))
    };
    let at = layers.iter().position(is_parent).filter(|&at| at > 0 && into.is_none_or(|into| into == at));
    Ok((real, at.ok_or_else(stranger)?))
}

/// Locks an image that the disk does not have open.
fn lock(path: &Path, parent: &Layer, open: &OpenOptions) -> Result<Locked> {
    let format = Some(parent.image.info().format);
    let access = Access { format, writable: true, ..Access::of_top(open) };
    let (image, stores) = open_image(&open.files, path, &access, &mut Vec::new())?;
    Ok(Locked::new(&Layer { path: path.to_owned(), image }, stores))
}

/// A frozen image of the disk that is locked for the merge.
struct LockedFrozenImage {
    path: PathBuf,
    /// The disk's files, which hold the locks.
    held: Vec<Arc<dyn Store>>,
    /// The same files, open for writing without locks.
    written: Vec<Arc<dyn Store>>,
}

impl LockedFrozenImage {
    fn take(layer: &Layer, open: &OpenOptions) -> Result<Self> {
        let path = layer.path.clone();
        let held = layer.image.stores().to_vec();
        // If one of them fails, the image stays locked until the disk is closed.
        let share = || held.iter().for_each(|store| drop(store.share_lock()));
        held.iter().try_for_each(|store| store.relock(LockMode::Exclusive)).inspect_err(|_| share())?;
        let options = diskwright_store::OpenOptions {
            writable: true,
            create_new: false,
            cache: open.cache,
            lock: LockMode::None,
        };
        let written = open_written(layer, open, &options).inspect_err(|_| share())?;
        if held.iter().map(|store| store.identity()).ne(written.iter().map(|store| store.identity())) {
            share();
            return Err(DiskError::BadOptions {
                what: format!("{}: it was replaced by another file since the disk was opened", path.display()),
                hint: "put the disk's image back in its place".into(),
            });
        }
        Ok(Self { path, held, written })
    }
}

/// The files of an image, open for writing.
fn open_written(
    layer: &Layer,
    open: &OpenOptions,
    options: &diskwright_store::OpenOptions,
) -> Result<Vec<Arc<dyn Store>>> {
    let first = open.files.open_canonical(&layer.path, open.parents.allow_devices, options)?;
    let format = DetectedFormat::certain(layer.image.info().format);
    let references = probe::references(&*first, format)?;
    let further = open_referred(&open.files, (&layer.path, &*first), &references, &open.parents, options)?;
    Ok([first].into_iter().chain(further).collect())
}

impl LockedFrozenImage {
    /// The image becomes a frozen one again, if it is still in the chain. The disk reads it through
    /// one of the two files, which keeps a shared lock. The other one may stay open for as long as
    /// a queue is idle, and must not keep the next merge away.
    fn let_go(&self, layers: &[Layer]) {
        self.held.iter().for_each(|held| drop(held.share_lock()));
        let [first, ..] = &self.held[..] else { return };
        if layers.iter().any(|layer| Arc::ptr_eq(layer.image.store(), first)) {
            return;
        }
        let is_there = layers.iter().any(|layer| layer.image.store().identity() == first.identity());
        for (held, written) in self.held.iter().zip(&self.written) {
            // If the second lock cannot be taken, the first one must stay.
            if !is_there || written.relock(LockMode::Shared).is_ok() {
                let _ = held.relock(LockMode::None);
            } else {
                std::mem::forget(Arc::clone(held));
            }
        }
    }
}

/// The disk in use, as the steps of a merge see it.
struct InUse<'a> {
    disk: &'a Disk,
    frozen_images: Vec<LockedFrozenImage>,
    options: &'a MergeOptions,
    /// Whether the image that is written goes last.
    keeps_name: bool,
}

impl fmt::Debug for InUse<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InUse({:?})", self.disk.file())
    }
}

impl InUse<'_> {
    /// A frozen image of the disk that takes part.
    fn of(&self, layer: &Layer) -> Result<Locked> {
        let held = self.held(&layer.path)?;
        held.ok_or_else(|| not_below(&layer.path, &layer.path))
    }

    /// Publishes a chain with `parent` in the place of `count` layers, of which the first is the
    /// image with this identity. Does nothing if the chain does not have it.
    fn replace(&self, first: Option<(u64, u64)>, count: usize, parent: &Layer) -> Result<()> {
        let shared = &self.disk.shared;
        let is_first = |layer: &Layer| layer.image.store().identity() == first;
        let Some(depth) = shared.chain().layers().iter().position(is_first) else { return Ok(()) };
        let mut mutation = shared.lock();
        let chain = mutation.chain.with_parent(depth, count, parent.clone())?;
        shared.publish(&mut mutation, chain);
        drop(mutation);
        let waited = shared.wait_for_grace();
        waited.map_err(|source| error::from_io("change its chain", &parent.path, source))
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        let layers = self.disk.layers();
        self.frozen_images.iter().for_each(|grip| grip.let_go(&layers));
    }
}

impl MergeUsers for InUse<'_> {
    fn held(&self, path: &Path) -> Result<Option<Locked>> {
        let files = &self.options.open.files;
        let identity = files.facts(path).ok().map(|facts| facts.identity);
        let layers = self.disk.layers();
        if layers[0].image.store().identity() == identity {
            let written = Layer { path: path.to_owned(), image: Arc::clone(&layers[0].image) };
            return Ok(Some(Locked::written(written)));
        }
        let Some(grip) = self.frozen_images.iter().find(|grip| grip.held[0].identity() == identity) else {
            return Ok(None);
        };
        let format = DetectedFormat::certain(layers[0].image.info().format);
        let stores = grip.written.clone();
        let image = probe::open_parts(stores.clone(), format, false, layers[0].image.info().logical_sector_bytes)?;
        Ok(Some(Locked::new(&Layer { path: grip.path.clone(), image }, stores)))
    }

    fn begin(&self) -> Result<()> {
        let Some(origin) = self.disk.origin.as_ref().filter(|_| self.keeps_name) else { return Ok(()) };
        let identity = self.disk.layers()[0].image.store().identity();
        identity.map_or(Ok(()), |identity| kept_name::mark(&self.options.open.files, &origin.file, identity))
    }

    fn before_writing(&self, target: &Layer) -> Result<()> {
        self.replace(target.image.store().identity(), 1, target)
    }

    fn leave_out(&self, child: &Locked, target: &Layer) -> Result<()> {
        self.replace(child.image(false)?.store().identity(), 2, target)
    }

    fn clients(&self) -> Option<&Epochs> {
        Some(&self.disk.shared.epochs)
    }
}
