//! The points of a disk that is opened, or gets another size or another image; and what lies beside
//! an image.
//!
//! A change of the view (a new point, another size) holds the lock of the tracker from before the
//! view is published until its checkpoint is durable. Requests that find their range unmarked wait
//! that long, for some milliseconds; the others go on.

use super::{
    identity::{distrust, identity_of},
    sidecar::{Contents, ReadError, path_for, read},
    tracker::{Inner, PointsFile, Tracker, View},
};
use crate::{
    DiskError, Result,
    engine::{chain::Layer, shared::Shared},
    error::from_io,
};
use diskwright_format::tracks::Identity;
use diskwright_store::Files;
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// What lies beside an image that is about to be opened for writing.
#[derive(Debug)]
pub(crate) struct FoundPoints {
    path: PathBuf,
    pub(super) contents: Contents,
    identity: Identity,
    /// Why everything counts as changed.
    pub(super) distrust: Option<String>,
}

/// Looks for the points of the disk at `real`, a path without symbolic links, before it is written.
/// A file of points that cannot be used becomes one of `warnings`: the disk is then opened without.
pub(crate) fn look(files: &Files, real: &Path, layers: &[Layer], warnings: &mut Vec<String>) -> Option<FoundPoints> {
    let path = path_for(real);
    let looked = match files.facts(&path) {
        // Beside a disk with the longest possible name there can be no file of points.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidFilename) => return None,
        Err(error) => Err(error.into()),
        Ok(_) => read(files, &path),
    };
    let found = looked.and_then(|contents| Ok((identity_of(files, real, layers)?, contents)));
    match found {
        Ok((identity, contents)) => {
            let top = &layers[0].image;
            let distrust = distrust(&contents.header, &identity, top.info().format, top.size_bytes());
            Some(FoundPoints { path, contents, identity, distrust })
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

impl FoundPoints {
    /// The view of a disk whose image `layers[0]` is open for writing now.
    pub(crate) fn into_view(self, files: &Files, layers: &[Layer]) -> io::Result<Arc<View>> {
        let image = Arc::clone(&layers[0].image);
        let size_bytes = image.size_bytes();
        let place = PointsFile { files: files.clone(), path: self.path, image, identity: self.identity };
        let tracker = Tracker::with(place, self.contents, self.distrust, size_bytes)?;
        let view = tracker.view(&tracker.lock());
        Ok(view)
    }
}

/// Publishes a view, and waits until no request uses the former one.
pub(super) fn publish(shared: &Arc<Shared>, view: Option<Arc<View>>) -> Result<()> {
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
pub(crate) struct TrackedPoints<'a> {
    shared: &'a Arc<Shared>,
    tracker: Arc<Tracker>,
}

impl<'a> TrackedPoints<'a> {
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
        let published = publish(self.shared, Some(self.tracker.view(&inner)));
        inner.add_former(&former, old_bytes.min(size_bytes)..size_bytes);
        if published.is_err() {
            inner.distrust("a request was lost while the disk got another size");
        }
        let written = inner.checkpoint();
        published?;
        written.map_err(|error| from_io("write its points", inner.path(), error))
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

#[cfg(test)]
mod tests {
    use crate::{CreateRequest, Disk, OpenOptions, copying::create::create};

    #[test]
    fn a_disk_with_the_longest_possible_name_has_no_points_and_no_warning() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(format!("{}.vhdx", "a".repeat(250)));
        create(&path, &CreateRequest { size_bytes: Some(1 << 20), ..CreateRequest::default() }).unwrap();
        let disk = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
        assert_eq!(disk.warnings(), [""; 0]);
        disk.close().unwrap();
    }
}
