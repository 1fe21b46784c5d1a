//! A snapshot of a disk that is in use: its clients go on while it is frozen.
//!
//! ```text
//!   writes of clients ─▶ old top .......................................│ new child ........
//!   child, durable │ flush │ link, sync folder │ rename, sync folder │ put_on_top │ settle
//!                    from here the name leads to the child ─────────┘      └─ the moment
//!                                                                             of the snapshot
//! ```
//!
//! 1. The top's identity becomes final for this open (`begin_writing`), so the child records the
//!    one that the top keeps. A VHD's child records no time of its parent yet: the parent is still
//!    written.
//! 2. The child is created under the temporary name, complete and durable, locked and open. Its own
//!    `begin_writing` is done now, so that no client waits for it.
//! 3. A flush, so that little is left to be made durable at the end.
//! 4. The present image gets its second name, and the child is renamed over the disk's name, each
//!    followed by a sync of the folder: the order of `snapshot.rs`.
//! 5. The child goes on top ([`Disk::put_on_top`]). This is the moment of the snapshot. No client
//!    is paused: each request belongs to the time before or after it, by its epoch.
//! 6. When the requests from before have ended, the former top is flushed and closed, and its lock
//!    becomes a shared one. A VHD's child gets the time of its parent.
//!
//! What must hold, whenever the power fails:
//!
//! - Until step 4 is durable the name leads to the old top, which has everything. Afterwards it
//!   leads to the child. Between steps 4 and 5 the child is empty and is never written, so it shows
//!   what the old top has, also what clients write to it then. So both readings of the name are
//!   right, and the order of the rename and of those writes does not matter.
//! - The child is first written after step 5, so after its name is durable.
//! - A client's flush after step 5 makes both images durable, until the former top is at rest.
//! - If step 5 cannot be done, the names are put back. A power cut that undoes only that leaves the
//!   empty child above the old top.
//!
//! A disk with points of change tracking has the identity of the child in their file before step 4,
//! beside that of the old top. A point that starts at the snapshot is published in step 5.
//!
//! Lock: `changing` is held from the beginning to the end, so the disk does not grow in between and
//! the child fits.

use crate::{
    DiskError, Result,
    copying::create,
    engine::track::{
        points::{Point, Starting},
        resume::TrackedPoints,
    },
    engine::{
        chain::Layer,
        device::{Disk, Origin},
    },
    error,
    life::{
        kept_name,
        snapshot::{LockedTop, Snapshot},
    },
    opening::{
        gate,
        image_file::{Access, open_image},
    },
};
use diskwright_image::{ImageInfo, ParentLink, probe, probe::DetectedFormat};
use diskwright_store::Blocking;
use std::path::{Path, PathBuf};

/// Number of steps that [`SnapshotWatch::goes_on`] is told of.
const STEPS: u64 = 4;

/// Who looks on while a disk in use is frozen. All methods have a default that does nothing.
pub trait SnapshotWatch {
    /// `done` of `total` steps are done. Returns `false` to stop, which leaves the disk as it was.
    /// Once the names have changed, the answer is ignored.
    fn goes_on(&mut self, done: u64, total: u64) -> bool {
        let _ = (done, total);
        true
    }

    /// The new child exists, and will have the disk's name. `identity` is that of its file.
    ///
    /// # Errors
    /// Any error stops the snapshot, and the disk is as it was.
    fn child_is_made(&mut self, identity: Option<(u64, u64)>) -> Result<()> {
        let _ = identity;
        Ok(())
    }

    /// The snapshot will be taken when this returns: the place to freeze file systems on the disk.
    fn quiesce(&mut self) {}

    /// The snapshot was taken, or it failed. Called once after each [`SnapshotWatch::quiesce`].
    fn resume(&mut self) {}
}

/// No watcher: nothing is reported, and no file system is frozen.
impl SnapshotWatch for () {}

impl Disk {
    /// Freezes the disk and goes on in a new child, while queues are open and requests in flight.
    /// The disk keeps its name, which leads to the child from now on; the frozen image gets the
    /// name that [`snapshot`](crate::snapshot()) would give it, and a shared lock. Everything that
    /// was acknowledged before is in the frozen image, and durable on return. Waits for requests in
    /// flight, so a thread with requests in flight must not call it.
    ///
    /// # Errors
    /// As [`snapshot`](crate::snapshot()); [`DiskError::Stopped`] if `watch` has stopped it.
    /// Nothing has changed then. [`DiskError::File`] if the frozen image cannot be made durable:
    /// then the disk has its new child, and every later flush of it fails.
    pub fn snapshot(&self, name: &str, dry_run: bool, watch: &mut dyn SnapshotWatch) -> Result<Snapshot> {
        self.snapshot_tracked(name, None, dry_run, watch)
    }

    /// As [`Disk::snapshot`], and starts a point of change tracking at the moment of the snapshot:
    /// since it exactly those ranges have changed that differ from the frozen image. Requests whose
    /// ranges are not marked yet wait until the frozen image is durable.
    ///
    /// # Errors
    /// As [`Disk::snapshot`] and [`Disk::start_tracking`].
    pub fn snapshot_tracked(
        &self,
        name: &str,
        track: Option<&str>,
        dry_run: bool,
        watch: &mut dyn SnapshotWatch,
    ) -> Result<Snapshot> {
        let origin = self.origin.as_ref().ok_or_else(|| DiskError::BadOptions {
            what: "a disk without a file of its own cannot be frozen".into(),
            hint: "open the disk by its path".into(),
        })?;
        let turn = self.shared.begin_change();
        let freezing = Freezing::new(self, origin)?;
        let frozen = freezing.place.name_for_frozen(name)?;
        let mut done = Snapshot {
            disk: origin.file.clone(),
            parent: frozen.clone(),
            frozen: Some(frozen.clone()),
            warnings: Vec::new(),
        };
        let link = freezing.link_to(&frozen)?;
        let starting = track.map(|point| self.begin_point(point)).transpose()?;
        if dry_run {
            return Ok(done);
        }
        let (child, link) = freezing.make_child(link)?;
        let starting = starting.map(|starting| starting.with(freezing.info().linkage_id));
        let prepared = freezing
            .prepare(&child, watch)
            .and_then(|()| freezing.name_in_points(&child))
            .and_then(|()| freezing.place.swap(&freezing.temporary, Some(&frozen)));
        if let Err(error) = prepared {
            freezing.undo(&frozen);
            return Err(error);
        }
        child.image.store().was_renamed(&origin.file);
        watch.goes_on(3, STEPS);
        watch.quiesce();
        let mut point = starting.as_ref().map(Starting::begin);
        let view = point.as_ref().map(Point::view);
        let mut pushed = self.put_on_top(&turn, child.clone(), Some(&frozen), view);
        // A file system that is thawed may write, and wait for that write to end.
        let fills_blocks = child.image.writer().is_some_and(|writer| !writer.tracks_sectors());
        if let (Ok(pushed), true) = (&mut pushed, fills_blocks) {
            self.let_copy_up(pushed);
        }
        watch.resume();
        let pushed = pushed.inspect_err(|_| {
            point.take().into_iter().for_each(Point::undo);
            freezing.undo(&frozen);
        })?;
        let former = &freezing.place.layers[0];
        // Extents keep their names.
        former.image.store().was_renamed(&frozen);
        self.settle_former_top(pushed).inspect_err(|_| point.iter_mut().for_each(Point::keep_identity))?;
        match point {
            Some(point) => self.finish_point(point)?,
            None => TrackedPoints::of(&self.shared).map_or(Ok(()), |points| points.go_on())?,
        }
        done.warnings.extend(freezing.record_time(&child, &frozen, link));
        for store in former.image.stores() {
            // If it fails, the frozen image stays locked until the disk is closed.
            let _ = store.share_lock();
        }
        watch.goes_on(STEPS, STEPS);
        Ok(done)
    }
}

/// A disk that is about to be frozen.
struct Freezing<'a> {
    disk: &'a Disk,
    origin: &'a Origin,
    place: LockedTop<'a>,
    temporary: PathBuf,
}

impl<'a> Freezing<'a> {
    /// Checks the disk. Changes nothing.
    fn new(disk: &'a Disk, origin: &'a Origin) -> Result<Self> {
        let layers = disk.layers();
        let info = layers[0].image.info().clone();
        let place =
            LockedTop { shown: &origin.file, real: origin.file.clone(), layers, info, files: &origin.options.files };
        if disk.shared.chain().geometry.read_only {
            return Err(DiskError::BadOptions {
                what: format!("{}: it is open read-only, so it cannot go on in a new child", origin.file.display()),
                hint: "open it for writing".into(),
            });
        }
        place.can_be_frozen()?;
        place.check_identity()?;
        let checked = disk.shared.check_poison(&disk.shared.chain());
        checked.map_err(|source| error::from_io("freeze the disk", &origin.file, source))?;
        let temporary = place.temporary();
        Ok(Self { disk, origin, place, temporary })
    }

    /// The facts of the top as they are now.
    fn info(&self) -> ImageInfo {
        let image = &self.place.layers[0].image;
        ImageInfo { size_bytes: image.size_bytes(), linkage_id: image.linkage_id(), ..self.place.info.clone() }
    }

    /// The child's link. It names no time: clients still write to the parent, and a time that is
    /// wrong after a power cut would keep the disk from being opened for writing.
    fn link_to(&self, frozen: &Path) -> Result<ParentLink> {
        {
            let info = self.info();
            create::link_to((self.place.files, frozen), &info, None, (&self.origin.file, info.format), self.place.dir())
        }
    }

    /// Makes the child and opens it. Leaves nothing behind if that fails.
    fn make_child(&self, planned: ParentLink) -> Result<(Layer, ParentLink)> {
        let begun = self.disk.shared.begin_writing();
        begun.map_err(|source| error::from_io("begin to write to it", &self.origin.file, source))?;
        self.place.remove_leftovers()?;
        kept_name::unmark(self.place.files, &self.place.real)?;
        let info = self.info();
        // The identity may have changed just now.
        let link = ParentLink { linkage: info.linkage_id.or(planned.linkage), ..planned };
        create::create_child(self.place.files, &self.origin.file, &self.temporary, &info, link.clone())?;
        let opened = self.open_child(&info);
        if opened.is_err() {
            // The first error is returned. The file is ours, and its name is temporary.
            let _ = self.place.files.remove(&self.temporary);
        }
        opened.map(|child| (child, link))
    }

    fn open_child(&self, info: &ImageInfo) -> Result<Layer> {
        let access =
            Access { format: Some(info.format), writable: true, cache: self.origin.options.cache, ..Access::default() };
        // The warnings are those of the disk's own file, which lies in the same folder.
        let (_, stores) = open_image(self.place.files, &self.temporary, &access, &mut Vec::new())?;
        let format = DetectedFormat::certain(info.format);
        let image = probe::open_parts(stores, format, true, info.logical_sector_bytes)?;
        if let Some(writer) = image.writer() {
            writer.begin_writing()?;
        }
        let child = Layer { path: self.origin.file.clone(), image };
        self.disk.check_top(&child)?;
        Ok(child)
    }

    /// From now on the name may lead to the child.
    fn name_in_points(&self, child: &Layer) -> Result<()> {
        let Some(points) = TrackedPoints::of(&self.disk.shared) else { return Ok(()) };
        let layers: Vec<Layer> = std::iter::once(child.clone()).chain(self.place.layers.iter().cloned()).collect();
        points.name_coming(&self.temporary, &layers)
    }

    /// Steps 2 and 3, as far as others take part in them.
    fn prepare(&self, child: &Layer, watch: &mut dyn SnapshotWatch) -> Result<()> {
        let goes_on = |watch: &mut dyn SnapshotWatch, done| {
            if watch.goes_on(done, STEPS) { Ok(()) } else { Err(DiskError::Stopped) }
        };
        goes_on(watch, 1)?;
        let flushed = Blocking::open(self.disk, self.origin.options.engine).and_then(|mut queue| queue.flush());
        flushed.map_err(|source| error::from_io("flush it", &self.origin.file, source))?;
        goes_on(watch, 2)?;
        watch.child_is_made(child.image.store().identity())
    }

    /// Puts the names back as they were, as far as they have changed. Errors are ignored: the child
    /// is empty, so also its name leads to the disk's contents.
    fn undo(&self, frozen: &Path) {
        let files = self.place.files;
        if self.place.check_identity().is_ok() {
            // The name leads to the old top. A link that was made is removed.
            let own = self.place.layers[0].image.store().identity();
            if files.facts(frozen).is_ok_and(|facts| Some(facts.identity) == own) {
                let _ = files.remove(frozen);
            }
            self.place.withdraw(&self.temporary, Some(frozen));
        } else {
            let _ = files.rename(frozen, &self.place.real, true);
        }
        let _ = files.sync_directory_of(&self.place.real);
    }

    /// A VHD records when its parent was last changed, which is certain now. Without a time the
    /// child accepts every one, so a failure costs only that check: a sentence says so.
    fn record_time(&self, child: &Layer, frozen: &Path, link: ParentLink) -> Option<String> {
        let (Some(writer), true) = (child.image.writer(), self.place.info.format.driver().child_records_time) else {
            return None;
        };
        let time = gate::time_to_record(self.place.files, frozen, &**self.place.layers[0].image.store());
        let recorded =
            time.and_then(|modified_seconds| Ok(writer.set_parent_link(&ParentLink { modified_seconds, ..link })?));
        let error = recorded.err()?;
        Some(format!("the child could not record when its parent was last changed, so it accepts any time: {error}"))
    }
}
