//! What has changed in a disk since a point of its change tracking (`track.rs`).
//!
//! ```text
//!   NAME.tracks ─▶ ranges, and the identity of the disk at the point ─▶ Touched ─▶ list, export
//! ```
//!
//! An export applies to a copy of the disk as it was at the point. The copy is recognised if an
//! image had these contents then: the image that a snapshot has frozen, or the disk itself if it
//! was not being written.

use super::{
    change::{Changes, EachChange},
    export::Export,
    state::DiskState,
    touched::Touched,
};
use crate::{Changed, DiskError, Opened, Progress, Result, TrackPoint};
use diskwright_store::{EngineKind, Files};
use std::path::{Path, PathBuf};

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
        let point =
            disk.points()?.into_iter().find(|point| point.name == name).ok_or_else(|| DiskError::BadOptions {
                what: format!("{}: it has no point {name:?}", path.display()),
                hint: "`track list` shows its points".into(),
            })?;
        Ok(Self { opened, path: path.to_owned(), point, changed })
    }

    /// Why everything counts as changed; `None` if the ranges are known.
    pub fn everything(&self) -> Option<&str> {
        self.changed.everything()
    }

    /// The states of the disk now and at the point.
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

impl Changes for SincePoint {
    fn for_each(&mut self, progress: &mut Progress<'_>, each: &mut EachChange<'_>) -> Result<()> {
        Touched::new(&self.opened, &self.path, self.changed.ranges()).for_each(progress, each)
    }
}
