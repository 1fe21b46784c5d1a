//! The points of a disk: started, stopped, listed, and what has changed since.

use super::{
    bits::Bits,
    changed::{Changed, ChangesQuery, TrackPoint, points_of},
    identity::identity_of,
    resume::{FoundPoints, go_on, look, publish},
    sidecar::path_for,
    tracker::{Inner, PointsFile, Tracker, View},
};
use crate::{
    DiskError, Result,
    engine::{chain::Chain, device::Disk},
    error::{file_error, from_io},
};
use diskwright_format::tracks::{POINTS_MAX, is_name};
use diskwright_image::{Identities, LinkageId};
use diskwright_store::{Files, sync::MutexGuard};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

fn no_point(path: &Path, name: &str) -> DiskError {
    DiskError::BadOptions {
        what: format!("{}: it has no point {name:?}", path.display()),
        hint: "`track list` shows its points".into(),
    }
}

impl Disk {
    /// Starts a point: from now on [`Disk::changed_since`] tells what has changed since. What was
    /// acknowledged before this call does not count; what is written during it does. Durable on
    /// return. Queues may be open and requests in flight; requests wait for some milliseconds. A
    /// thread with requests in flight must not call it.
    ///
    /// # Errors
    /// [`DiskError::BadOptions`] for a disk that is not open for writing, is not a single file, or
    /// has a point of this name or too many points; [`DiskError::Usage`] for a bad name;
    /// [`DiskError::File`] if the file of the points cannot be written.
    pub fn start_tracking(&self, name: &str) -> Result<()> {
        let shared = self.shared();
        let _turn = shared.begin_change();
        let starting = self.begin_point(name)?;
        // Most is durable before requests wait.
        self.make_durable()?;
        let point = starting.begin();
        let view = point.view();
        if let Err(error) = publish(shared, Some(Arc::clone(&view))) {
            // If a request was lost, the new view is in use all the same.
            if shared.chain().track.as_ref().is_none_or(|track| !Arc::ptr_eq(track, &view)) {
                point.undo();
            }
            return Err(error);
        }
        self.finish_point(point)
    }

    /// Checks whether a point can be started. The caller has the turn to change the chain.
    pub(crate) fn begin_point(&self, name: &str) -> Result<Starting> {
        let chain = self.shared().chain();
        let (file, files) = self.trackable(&chain)?;
        if !is_name(name) {
            return Err(DiskError::Usage {
                what: format!("{name:?} is not a name for a point"),
                hint: "use 1 to 64 letters, digits, '.', '-' and '_'".into(),
            });
        }
        // An image that is being written keeps its identity while its contents change.
        // So does a VHD at all times.
        let top = chain.top();
        let is_of_contents =
            top.image.info().format.driver().identities != Identities::File && !top.has_begun_writing();
        let linkage_id = top.image.linkage_id().filter(|_| is_of_contents);
        if let Some(view) = &chain.track {
            if !view.tracker.lock().has_room_for(name) {
                return Err(DiskError::BadOptions {
                    what: format!(
                        "{}: the point {name:?} cannot be started: a point has this name, or there are {POINTS_MAX}",
                        file.display()
                    ),
                    hint: "choose another name, or stop a point that is not needed".into(),
                });
            }
            return Ok(Starting { tracker: Arc::clone(&view.tracker), name: name.into(), linkage_id });
        }
        let path = path_for(&file);
        if files.facts(&path).is_ok() {
            return Err(DiskError::BadOptions {
                what: format!("{}: it exists, and was not in use when the disk was opened", path.display()),
                hint: "it may be damaged: `track list` says so; remove it, and start the point again".into(),
            });
        }
        let identity = identity_of(&files, &file, chain.layers());
        let identity = identity.map_err(|error| file_error("examine it", &file, error))?;
        let place = PointsFile { files, path, image: Arc::clone(&chain.layers()[0].image), identity };
        Ok(Starting { tracker: Tracker::new(place, chain.geometry.size_bytes), name: name.into(), linkage_id })
    }

    fn make_durable(&self) -> Result<()> {
        let flushed = self.shared().flush_blocking();
        flushed.map_err(|error| from_io("flush it", &self.shared().chain().layers()[0].path, error))
    }

    /// Makes a point durable that is in the current view, when no request uses the former one.
    ///
    /// What was written before the point is made durable first: a power cut that took some of it
    /// back would change the disk, and the point would not say so.
    pub(crate) fn finish_point(&self, mut point: Point<'_>) -> Result<()> {
        let durable = self.make_durable();
        if durable.is_err() {
            point.inner.distrust("the point could not be started: what was written before it is not durable");
        }
        let has_begun = self.shared().chain().top().has_begun_writing();
        if has_begun {
            point.inner.was_begun();
        }
        go_on(self.shared(), &mut point.inner)?;
        if has_begun {
            let renewed = point.inner.renew_identity();
            renewed.map_err(|error| from_io("write its points", point.inner.path(), error))?;
            go_on(self.shared(), &mut point.inner)?;
        }
        durable?;
        match point.inner.failed() {
            None => Ok(()),
            Some(why) => Err(DiskError::BadOptions {
                what: why.to_owned(),
                hint: "free space on its file system, or make its folder writable, and start the point again".into(),
            }),
        }
    }

    /// Ends a point. Its changes still count for the older points. Durable on return; otherwise as
    /// [`Disk::start_tracking`].
    ///
    /// # Errors
    /// [`DiskError::BadOptions`] if there is no such point; as [`Disk::start_tracking`].
    pub fn stop_tracking(&self, name: &str) -> Result<()> {
        let shared = self.shared();
        let _turn = shared.begin_change();
        let chain = shared.chain();
        let (file, _) = self.trackable(&chain)?;
        let view = chain.track.as_ref().ok_or_else(|| no_point(&file, name))?;
        let tracker = Arc::clone(&view.tracker);
        let mut inner = tracker.lock();
        // The last one: the file goes first. While it is there, every write is marked in it.
        if inner.is_only(name) {
            inner.remove().map_err(|error| from_io("remove its points", inner.path(), error))?;
            return publish(shared, None);
        }
        let taken = inner.take_point(name).ok_or_else(|| no_point(&file, name))?;
        let published = publish(shared, Some(tracker.view(&inner)));
        inner.merge(taken);
        if published.is_err() {
            inner.distrust("a request was lost while a point was stopped");
        }
        let written = inner.checkpoint();
        published?;
        written.map_err(|error| from_io("write its points", inner.path(), error))
    }

    /// The points of the disk, the oldest first.
    ///
    /// # Errors
    /// [`DiskError::BadOptions`] if their file is damaged; [`DiskError::File`] if it cannot be
    /// read.
    pub fn points(&self) -> Result<Vec<TrackPoint>> {
        let chain = self.shared().chain();
        let size_bytes = chain.geometry.size_bytes;
        if let Some(view) = &chain.track {
            return Ok(view.tracker.points(size_bytes));
        }
        Ok(self.read_points(&chain)?.map_or_else(Vec::new, |found| {
            points_of(
                &found.contents.segments,
                found.contents.header.grain_bytes,
                size_bytes,
                found.distrust.as_deref(),
            )
        }))
    }

    /// The ranges that have changed since a point. Includes what was acknowledged before this call.
    ///
    /// # Errors
    /// [`DiskError::BadOptions`] if there is no such point; as [`Disk::points`].
    pub fn changed_since(&self, name: &str) -> Result<Changed> {
        self.changed(&ChangesQuery { name, id: None, to: None, window: 0..u64::MAX })
    }

    /// The ranges that have changed from a point to a later one. The result has the size that the
    /// disk had at the later one.
    ///
    /// # Errors
    /// [`DiskError::BadOptions`] if one of them is not there, or they are in another order; as
    /// [`Disk::points`].
    pub fn changed_between(&self, from: &str, to: &str) -> Result<Changed> {
        self.changed(&ChangesQuery { name: from, id: None, to: Some(to), window: 0..u64::MAX })
    }

    pub(crate) fn changed(&self, wanted: &ChangesQuery<'_>) -> Result<Changed> {
        let chain = self.shared().chain();
        let size_bytes = chain.geometry.size_bytes;
        let path = self.file().unwrap_or(&chain.layers()[0].path);
        let changed = match &chain.track {
            Some(view) => view.tracker.changed(wanted, size_bytes),
            None => self.read_points(&chain)?.and_then(|FoundPoints { contents, distrust, .. }| {
                wanted.changed(&contents.segments, contents.header.grain_bytes, size_bytes, distrust.as_deref())
            }),
        };
        changed.ok_or_else(|| match wanted.to {
            None => no_point(path, wanted.name),
            Some(to) => DiskError::BadOptions {
                what: format!("{}: it has no point {:?} with a later point {to:?}", path.display(), wanted.name),
                hint: "`track list` shows its points, the oldest first".into(),
            },
        })
    }

    /// The points of a disk that is open read-only. (One that is open for writing has its tracker,
    /// or no points that can be used.)
    fn read_points(&self, chain: &Chain) -> Result<Option<FoundPoints>> {
        let Some(origin) = &self.origin else { return Ok(None) };
        let mut warnings = Vec::new();
        match (look(&origin.options.files, &origin.file, chain.layers(), &mut warnings), warnings.pop()) {
            (None, Some(what)) => Err(DiskError::BadOptions {
                what,
                hint: "backups that read only changed ranges must not go on from these points".into(),
            }),
            (found, _) => Ok(found),
        }
    }

    /// The name and the file system of a disk that can have points.
    fn trackable(&self, chain: &Chain) -> Result<(PathBuf, Files)> {
        let shown = chain.layers()[0].path.display().to_string();
        let refused =
            |what: &str, hint: &str| Err(DiskError::BadOptions { what: format!("{shown}: {what}"), hint: hint.into() });
        let image = &chain.layers()[0].image;
        if chain.geometry.read_only {
            return refused("it is open read-only, so its points cannot change", "open it for writing");
        }
        let is_file =
            image.stores().len() == 1 && image.store().identity().is_some() && !image.store().is_block_device();
        match &self.origin {
            Some(origin) if is_file => Ok((origin.file.clone(), origin.options.files.clone())),
            _ => refused("only a disk in one file of its own can have points", "convert it to such a disk"),
        }
    }
}

/// A point that can be started.
pub(crate) struct Starting {
    tracker: Arc<Tracker>,
    name: String,
    /// The identity of an image that has the contents of the disk.
    linkage_id: Option<LinkageId>,
}

/// A point that starts. Requests that find their range unmarked wait until it is dropped.
pub(crate) struct Point<'a> {
    inner: MutexGuard<'a, Inner>,
    view: Arc<View>,
    former: Arc<Bits>,
}

impl Starting {
    /// The point begins when the image with this identity is frozen, which then does not change.
    pub(crate) fn with(self, linkage_id: Option<LinkageId>) -> Self {
        Self { linkage_id, ..self }
    }

    /// The caller has the turn to change the chain since [`Disk::begin_point`].
    pub(crate) fn begin(&self) -> Point<'_> {
        let mut inner = self.tracker.lock();
        let former = inner.add_point(&self.name, self.linkage_id);
        let view = self.tracker.view(&inner);
        Point { inner, view, former }
    }
}

impl Point<'_> {
    /// The view to be published.
    pub(crate) fn view(&self) -> Arc<View> {
        Arc::clone(&self.view)
    }

    /// The former top could not be closed, so the image below may still be the one that is written:
    /// it keeps its identity.
    pub(crate) fn keep_identity(&mut self) {
        self.inner.was_begun();
    }

    /// The view was not published.
    pub(crate) fn undo(mut self) {
        self.inner.remove_last(self.former);
    }
}
