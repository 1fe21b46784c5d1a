//! The images of a merge, and who uses them meanwhile.
//!
//! An image of a merge is locked for writing, and is opened again for each step, on the same files.
//! The one exception is the image that a disk in use writes (`live_merge.rs`): it is open, and
//! stays so. [`MergeUsers`] is how that disk takes part in the steps.

use crate::{
    DiskError, Result,
    engine::{chain::Layer, epoch::Epochs},
    error::file_error,
    life::removal,
    opening::relink,
};
use diskwright_image::{Identities, Image, ImageInfo, LinkageId, ParentLink, probe, probe::DetectedFormat};
use diskwright_store::{Files, Store};
use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Where the bytes of a locked image are.
#[derive(Debug)]
enum LockedStorage {
    /// In these files, open for writing.
    Files(Vec<Arc<dyn Store>>),
    /// A disk in use writes this image.
    Written(Arc<dyn Image>),
}

/// An image that is locked for a merge.
#[derive(Debug)]
pub(crate) struct Locked {
    pub(crate) path: PathBuf,
    held: LockedStorage,
    /// As of the lock.
    pub(crate) info: ImageInfo,
}

impl Locked {
    /// The image `layer`, whose locked files are `stores`.
    pub(crate) fn new(layer: &Layer, stores: Vec<Arc<dyn Store>>) -> Self {
        Self { path: layer.path.clone(), info: layer.image.info().clone(), held: LockedStorage::Files(stores) }
    }

    /// The image that a disk in use writes.
    pub(crate) fn written(layer: Layer) -> Self {
        let image = layer.image;
        let info = ImageInfo {
            parent: image.parent_link(),
            linkage_id: image.linkage_id(),
            size_bytes: image.size_bytes(),
            ..image.info().clone()
        };
        Self { path: layer.path, info, held: LockedStorage::Written(image) }
    }

    /// Opens the image on its locked files.
    pub(crate) fn image(&self, writable: bool) -> Result<Arc<dyn Image>> {
        match &self.held {
            LockedStorage::Files(stores) => {
                let verdict = DetectedFormat::certain(self.info.format);
                Ok(probe::open_parts(stores.clone(), verdict, writable, self.info.logical_sector_bytes)?)
            }
            LockedStorage::Written(image) => Ok(Arc::clone(image)),
        }
    }

    pub(crate) fn layer(&self, writable: bool) -> Result<Layer> {
        Ok(Layer { path: self.path.clone(), image: self.image(writable)? })
    }

    /// The present identity; `None` for a format without any.
    pub(crate) fn identity(&self) -> Result<Option<LinkageId>> {
        let image = self.image(false)?;
        match image.linkage_id() {
            None if image.info().format.driver().identities != Identities::None => {
                Err(DiskError::BadChain { path: self.path.clone(), what: "it has no identity".into() })
            }
            identity => Ok(identity),
        }
    }

    /// Makes the file durable as it is, with the time of its last change: a program that was killed
    /// may have left a new identity in the page cache only, which no link may name before.
    pub(crate) fn sync(&self) -> Result<()> {
        let synced = match &self.held {
            LockedStorage::Files(stores) => stores.iter().try_for_each(|store| store.sync_all()),
            LockedStorage::Written(image) => image.stores().iter().try_for_each(|store| store.sync_all()),
        };
        synced.map_err(|source| file_error("make it durable", &self.path, source))
    }

    /// Whether `path` is another name of the file.
    pub(crate) fn is_file_at(&self, files: &Files, path: &Path) -> bool {
        let own = match &self.held {
            LockedStorage::Files(stores) => stores.first().and_then(|store| store.identity()),
            LockedStorage::Written(image) => image.store().identity(),
        };
        own.is_some() && files.facts(path).ok().map(|facts| facts.identity) == own
    }

    /// Changes the link to the parent, durably. The time of the file's last change stays, unless a
    /// disk in use writes the image.
    pub(crate) fn relink(&self, files: &Files, change: impl FnOnce(ParentLink) -> ParentLink) -> Result<()> {
        let image = self.image(true)?;
        let Some(writer) = image.writer() else { return Ok(()) };
        let replace = || writer.set_parent_link(&change(image.parent_link().unwrap_or_default()));
        match &self.held {
            LockedStorage::Files(stores) => relink::keeping_time(files, (&self.path, &*stores[0]), || {
                replace()?;
                Ok(writer.close()?)
            }),
            LockedStorage::Written(_) => Ok(replace()?),
        }
    }

    /// The further files that are removed with the image.
    pub(crate) fn extents(&self) -> Result<Vec<PathBuf>> {
        match &self.held {
            LockedStorage::Files(stores) => removal::extents_of(&self.info, stores, &self.path),
            LockedStorage::Written(image) => removal::extents_of_layer(&**image, &self.path),
        }
    }

    /// Tells the files that their name is `path` now.
    pub(crate) fn was_renamed(&mut self, path: &Path) {
        // Extents keep their names.
        if let LockedStorage::Files(stores) = &self.held
            && let Some(first) = stores.first()
        {
            first.was_renamed(path);
        }
        self.path = path.to_owned();
    }
}

/// A disk that is in use while its images are merged. By default there is none.
pub(crate) trait MergeUsers: fmt::Debug {
    /// The image at `path` if it is the disk's, which has locked it already. `None` for any other.
    ///
    /// # Errors
    /// If the image cannot be opened once more.
    fn held(&self, _path: &Path) -> Result<Option<Locked>> {
        Ok(None)
    }

    /// The first change of a file is about to be made.
    ///
    /// # Errors
    /// Those of the file system. Nothing has changed then.
    fn begin(&self) -> Result<()> {
        Ok(())
    }

    /// `target` will be written. From now on the disk must read it through this image, which knows
    /// its own tables.
    ///
    /// # Errors
    /// If requests of the disk do not end. The target has not changed then.
    fn before_writing(&self, _target: &Layer) -> Result<()> {
        Ok(())
    }

    /// `target` has all data of `child`, which is no longer in the chain on disk. The disk leaves
    /// the child out from now on. When this returns, no request uses the child.
    ///
    /// # Errors
    /// If requests of the disk do not end.
    fn leave_out(&self, _child: &Locked, _target: &Layer) -> Result<()> {
        Ok(())
    }

    /// The requests of the disk; `None` without a disk.
    fn clients(&self) -> Option<&Epochs> {
        None
    }
}

/// Nobody has the images open.
impl MergeUsers for () {}
