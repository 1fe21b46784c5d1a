//! The points of a disk: started, stopped, listed, and kept when the disk changes.
//!
//! A change of the view (a new point, another size) holds the lock of the tracker from before the
//! view is published until its checkpoint is durable. Requests that find their range unmarked wait
//! that long, for some milliseconds; the others go on.

use super::{
    bits::Bits,
    changed::{Changed, TrackPoint},
    identity::{distrust, identity_of},
    sidecar::{Contents, ReadError, path_for, read},
    tracker::{Inner, Place, Tracker, View, changed_since, points_of},
};
use crate::{
    DiskError, Result,
    chain::{Chain, Layer},
    device::Disk,
    error::{file_error, from_io},
    shared::Shared,
};
use diskwright_format::tracks::{Identity, POINTS_MAX, is_name};
use diskwright_store::{Files, sync::MutexGuard};
use std::{
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

/// What lies beside an image that is about to be opened for writing.
#[derive(Debug)]
pub(crate) struct Found {
    path: PathBuf,
    contents: Contents,
    identity: Identity,
    distrust: Option<String>,
}

/// Looks for the points of the disk at `real`, a path without symbolic links, before it is written.
/// A file of points that cannot be used is told in `warnings`: the disk is then opened without.
pub(crate) fn look(files: &Files, real: &Path, layers: &[Layer], warnings: &mut Vec<String>) -> Option<Found> {
    let path = path_for(real);
    let looked = match files.facts(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => Err(error.into()),
        Ok(_) => read(files, &path),
    };
    let found = looked.and_then(|contents| Ok((identity_of(files, real, layers)?, contents)));
    match found {
        Ok((identity, contents)) => {
            let top = &layers[0].image;
            let distrust = distrust(&contents.header, &identity, top.info().format, top.size_bytes());
            Some(Found { path, contents, identity, distrust })
        }
        Err(error) => {
            warnings.push(unusable(&path, &error).to_string());
            None
        }
    }
}

/// Whether the disk at `real`, a path without symbolic links, has points.
pub(crate) fn are_beside(files: &Files, real: &Path) -> bool {
    files.facts(&path_for(real)).is_ok()
}

fn unusable(path: &Path, error: &ReadError) -> DiskError {
    DiskError::BadOptions {
        what: format!("{}: the points of its disk cannot be used: {error}", path.display()),
        hint: "everything may have changed since: remove this file, start new points, and make a full backup".into(),
    }
}

impl Found {
    /// The view of a disk whose image `layers[0]` is open for writing now.
    pub(crate) fn into_view(self, files: &Files, layers: &[Layer]) -> io::Result<Arc<View>> {
        let image = Arc::clone(&layers[0].image);
        let size_bytes = image.size_bytes();
        let place = Place { files: files.clone(), path: self.path, image, identity: self.identity };
        let tracker = Tracker::with(place, self.contents, self.distrust, size_bytes)?;
        let view = tracker.view(&tracker.lock());
        Ok(view)
    }
}

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
    /// [`DiskError::BadOptions`] for a disk that is not open for writing, is no single file, or has
    /// a point of this name or too many points; [`DiskError::Usage`] for a bad name;
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
            return Ok(Starting { tracker: Arc::clone(&view.tracker), name: name.into() });
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
        let place = Place { files, path, image: Arc::clone(&chain.layers()[0].image), identity };
        Ok(Starting { tracker: Tracker::new(place, chain.geometry.size_bytes), name: name.into() })
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
        self.make_durable()?;
        if self.shared().chain().top().has_begun_writing() {
            point.inner.was_begun();
        }
        go_on(self.shared(), &mut point.inner)
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
        let taken = inner.take_point(name).ok_or_else(|| no_point(&file, name))?;
        let is_last = inner.is_empty();
        let published = publish(shared, (!is_last).then(|| tracker.view(&inner)));
        inner.merge(taken);
        published?;
        let written = if is_last { inner.remove() } else { inner.checkpoint() };
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
        self.changed_within(name, 0..u64::MAX)
    }

    /// As [`Disk::changed_since`], but knows only the ranges within `window`, a range in bytes.
    pub(crate) fn changed_within(&self, name: &str, window: Range<u64>) -> Result<Changed> {
        let chain = self.shared().chain();
        let size_bytes = chain.geometry.size_bytes;
        let path = self.file().unwrap_or(&chain.layers()[0].path);
        if let Some(view) = &chain.track {
            return view.tracker.changed_since(name, size_bytes, window).ok_or_else(|| no_point(path, name));
        }
        let found = self.read_points(&chain)?;
        let changed = found.and_then(|Found { contents, distrust, .. }| {
            let position = contents.segments.iter().position(|segment| segment.name == name)?;
            let (segments, grain_bytes) = (&contents.segments, contents.header.grain_bytes);
            changed_since(segments, position, grain_bytes, size_bytes, distrust.as_deref(), window)
        });
        changed.ok_or_else(|| no_point(path, name))
    }

    /// The points of a disk that is open read-only. (One that is open for writing has its tracker,
    /// or no points that can be used.)
    fn read_points(&self, chain: &Chain) -> Result<Option<Found>> {
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
}

/// A point that starts. Requests that find their range unmarked wait until it is dropped.
pub(crate) struct Point<'a> {
    inner: MutexGuard<'a, Inner>,
    view: Arc<View>,
    former: Arc<Bits>,
}

impl Starting {
    /// The caller has the turn to change the chain since [`Disk::begin_point`].
    pub(crate) fn begin(&self) -> Point<'_> {
        let mut inner = self.tracker.lock();
        let former = inner.add_point(&self.name);
        let view = self.tracker.view(&inner);
        Point { inner, view, former }
    }
}

impl Point<'_> {
    /// The view to be published.
    pub(crate) fn view(&self) -> Arc<View> {
        Arc::clone(&self.view)
    }

    /// The view was not published.
    pub(crate) fn undo(mut self) {
        self.inner.remove_last(self.former);
    }
}

/// Publishes a view, and waits until no request uses the former one.
fn publish(shared: &Arc<Shared>, view: Option<Arc<View>>) -> Result<()> {
    let path = shared.chain().layers()[0].path.clone();
    let failed = |error| from_io("track its changes", &path, error);
    let mut changed = Ok(());
    let grace = shared.begin_grace(|mutation| match mutation.chain.with_track(view) {
        Ok(chain) => shared.publish(mutation, chain),
        Err(error) => changed = Err(error),
    });
    let grace = grace.map_err(failed)?;
    changed?;
    shared.wait_for(grace).map_err(failed)
}

/// The points of a disk that gets another size or another image. Nothing happens for a disk without
/// points.
pub(crate) struct Kept<'a> {
    shared: &'a Arc<Shared>,
    tracker: Arc<Tracker>,
}

impl<'a> Kept<'a> {
    /// `None` for a disk without points. The caller has the turn to change the chain.
    pub(crate) fn of(shared: &'a Arc<Shared>) -> Option<Self> {
        let tracker = Arc::clone(&shared.chain().track.as_ref()?.tracker);
        Some(Self { shared, tracker })
    }

    /// Prepares the points for another size, before the image grows or after it has shrunk.
    pub(crate) fn resize(&self, size_bytes: u64) -> Result<()> {
        let old_bytes = self.shared.chain().geometry.size_bytes;
        let mut inner = self.tracker.lock();
        let former = inner.last_bits();
        inner.set_size(size_bytes);
        publish(self.shared, Some(self.tracker.view(&inner)))?;
        inner.add_former(&former, old_bytes.min(size_bytes)..size_bytes);
        inner.checkpoint().map_err(|error| from_io("write its points", inner.path(), error))
    }

    /// Names an image, the top of `layers` and at `path`, which will have the disk's contents and
    /// its name.
    pub(crate) fn name_coming(&self, path: &Path, layers: &[Layer]) -> Result<()> {
        let mut inner = self.tracker.lock();
        let coming = identity_of(inner.files(), path, layers);
        coming
            .and_then(|coming| inner.name_coming(coming))
            .map_err(|error| from_io("write its points", inner.path(), error))
    }

    /// The image that is on top now is the disk.
    pub(crate) fn go_on(&self) -> Result<()> {
        go_on(self.shared, &mut self.tracker.lock())
    }
}

/// The image that is on top now is the disk, whose points are in `inner`.
pub(crate) fn go_on(shared: &Shared, inner: &mut Inner) -> Result<()> {
    let chain = shared.chain();
    let top = &chain.layers()[0];
    let identity = identity_of(inner.files(), &top.path, chain.layers());
    identity
        .and_then(|identity| inner.go_on_with(Arc::clone(&top.image), identity))
        .map_err(|error| from_io("write its points", inner.path(), error))
}

/// Refuses to move a disk that has points: they would stay behind.
pub(crate) fn refuse_if_tracked(files: &Files, file: &Path) -> Result<()> {
    if !are_beside(files, file) {
        return Ok(());
    }
    let path = path_for(file);
    Err(DiskError::BadOptions {
        what: format!("{}: the disk has points of change tracking, which cannot move with it", file.display()),
        hint: format!("stop them first (`track stop`), or remove {}", path.display()),
    })
}
