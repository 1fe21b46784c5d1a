//! What has changed in a disk since a point of its change tracking (`track.rs`), or from one point
//! to a later one.
//!
//! ```text
//!   NAME.tracks ─▶ ranges, and the disk's identity at the point ─▶ NamedRanges ─▶ list, export
//!                   now: the disk;   up to a later point: the image that was frozen then ─┘
//! ```
//!
//! A snapshot that starts a point freezes an image with the contents of that moment. It does not
//! change, so what has changed up to this point is read from it while the disk is in use.
//!
//! An export applies to a copy of the disk as it was at the point. The copy is recognised if an
//! image had these contents then: the image that a snapshot has frozen, or the disk itself if it
//! was not being written.

use super::{
    change::{Changes, EachChange},
    export::Export,
    named_ranges::NamedRanges,
    state::DiskState,
};
use crate::{Changed, Disk, DiskError, Opened, Progress, Result, TrackPoint};
use diskwright_image::Image;
use diskwright_store::{EngineKind, Files};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// A disk and one of its points.
#[derive(Debug)]
pub struct SincePoint {
    opened: Opened,
    path: PathBuf,
    point: TrackPoint,
    changed: Changed,
}

impl SincePoint {
    /// The changes of the disk at `path` since its point `name`. The disk must not change as long
    /// as they are used: open it read-only.
    ///
    /// # Errors
    /// [`DiskError::BadOptions`] for an export of a server, and if there is no such point; as
    /// [`Disk::points`](crate::Disk::points).
    pub fn new(opened: Opened, path: &Path, name: &str) -> Result<Self> {
        let Opened::Disk(disk) = &opened else {
            return Err(DiskError::BadOptions {
                what: format!("{}: the points of an export are not known by its URI", path.display()),
                hint: format!("name its file, or read the metadata context qemu:dirty-bitmap:{name}"),
            });
        };
        let changed = disk.changed_since(name)?;
        let point = disk.points()?.into_iter().find(|point| point.name == name).ok_or_else(|| no_point(path, name))?;
        Ok(Self { opened, path: path.to_owned(), point, changed })
    }

    /// The changes of the disk at `path` from its point `from` to its point `to`, at which a
    /// snapshot was made. What the disk had then is read from the frozen image.
    ///
    /// # Errors
    /// As [`SincePoint::new`]; [`DiskError::BadOptions`] if `to` is not later than `from`, or no
    /// image of the disk has the contents of that moment.
    pub fn between(opened: &Opened, path: &Path, from: &str, to: &str) -> Result<Self> {
        let Opened::Disk(disk) = opened else {
            return Err(DiskError::BadOptions {
                what: format!("{}: the points of an export are not known by its URI", path.display()),
                hint: "name its file".into(),
            });
        };
        let changed = disk.changed_between(from, to)?;
        let mut points = disk.points()?;
        let mut take = |name: &str| {
            let position = points.iter().position(|point| point.name == name);
            position.map(|position| points.swap_remove(position)).ok_or_else(|| no_point(path, name))
        };
        let (point, end) = (take(from)?, take(to)?);
        let layers = disk.layers();
        let is_it = |image: &dyn Image| end.linkage_id.is_some() && image.linkage_id() == end.linkage_id;
        let depth = layers.iter().position(|layer| is_it(&*layer.image));
        let depth = depth.ok_or_else(|| not_frozen(path, to))?;
        let frozen = Disk::from_layers(layers[depth..].to_vec(), Vec::new())?;
        Self::of_frozen((Arc::new(frozen), layers[depth].path.clone()), path, point, (&end, changed))
    }

    /// The changes of the disk at `path` up to the point `end`, whose contents the disk `frozen`
    /// has: what another process that has the disk open has reported. `point` is the one from
    /// which on they count.
    ///
    /// # Errors
    /// [`DiskError::BadOptions`] if `frozen` has not the identity that the disk had at `end`.
    pub fn of_frozen(
        (frozen, frozen_path): (Arc<Disk>, PathBuf),
        path: &Path,
        point: TrackPoint,
        (end, changed): (&TrackPoint, Changed),
    ) -> Result<Self> {
        let top = &frozen.layers()[0].image;
        if end.linkage_id.is_none() || top.linkage_id() != end.linkage_id || top.size_bytes() != end.size_bytes {
            return Err(not_frozen(path, &end.name));
        }
        Ok(Self { opened: Opened::Disk(frozen), path: frozen_path, point, changed })
    }

    /// Why everything counts as changed; `None` if the ranges are known.
    pub fn everything(&self) -> Option<&str> {
        self.changed.everything()
    }

    /// The states of the disk now, or at the later point, and at the point.
    pub fn states(&self) -> [DiskState; 2] {
        let now = DiskState::of(&self.opened);
        [now, DiskState { linkage_id: self.point.linkage_id, size_bytes: self.point.size_bytes, ..now }]
    }

    /// An export of the changes, as a stream: there is no file that could be the parent of an
    /// image.
    pub fn export(&mut self, engine: EngineKind, files: &Files) -> Export<'_> {
        let (disk, path) = (self.opened.clone(), self.path.clone());
        let [result, base] = self.states();
        Export { disk, path, changes: self, base, result, base_layers: Vec::new(), engine, files: files.clone() }
    }
}

fn no_point(path: &Path, name: &str) -> DiskError {
    DiskError::BadOptions {
        what: format!("{}: it has no point {name:?}", path.display()),
        hint: "`track list` shows its points".into(),
    }
}

fn not_frozen(path: &Path, name: &str) -> DiskError {
    DiskError::BadOptions {
        what: format!("{}: no image of it has the contents that it had at the point {name:?}", path.display()),
        hint: "start the point together with a snapshot, and keep the frozen image until the changes are exported"
            .into(),
    }
}

impl Changes for SincePoint {
    fn for_each(&mut self, progress: &mut Progress<'_>, each: &mut EachChange<'_>) -> Result<()> {
        NamedRanges::new(&self.opened, &self.path, self.changed.ranges()).for_each(progress, each)
    }
}
