//! Removes an image: its file, and then the extents that only it uses. An image with internal
//! snapshots is not removed by an operation that keeps only its disk.
//!
//! The file that names the extents goes first. A power cut in between leaves extents that nothing
//! names, and never an image without its extents.

use crate::{DiskError, Result, error::file_error};
use diskwright_image::{Image, ImageInfo, probe, probe::DetectedFormat};
use diskwright_store::{Files, Store};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Fails for an image with internal snapshots, which would go with it.
pub(crate) fn refuse_to_lose_snapshots(image: &dyn Image, path: &Path) -> Result<()> {
    match image.snapshots() {
        [] => Ok(()),
        [first, ..] => Err(DiskError::BadOptions {
            what: format!("{}: its internal snapshots would be lost, such as {:?}", path.display(), first.name),
            hint: "copy what you need of them into new disks, and delete them with `qemu-img snapshot -d`".into(),
        }),
    }
}

/// The extents of an image that is open: the files that it writes, in its own folder. The locks of
/// the image keep other images from using them.
pub(crate) fn extents_of(info: &ImageInfo, stores: &[Arc<dyn Store>], path: &Path) -> Vec<PathBuf> {
    let [first, further @ ..] = stores else { return Vec::new() };
    if further.is_empty() {
        return Vec::new();
    }
    let references = probe::references(&**first, DetectedFormat::certain(info.format)).unwrap_or_default();
    let own = references.iter().zip(further).filter(|(reference, store)| {
        reference.is_written && !reference.name.contains(['/', '\\']) && !store.is_block_device()
    });
    own.map(|(reference, _)| path.with_file_name(&reference.name)).collect()
}

/// The same for an image of a chain.
pub(crate) fn extents_of_layer(image: &dyn Image, path: &Path) -> Vec<PathBuf> {
    extents_of(image.info(), image.stores(), path)
}

/// Removes the image at `path` and then its extents, durably.
pub(crate) fn remove(files: &Files, path: &Path, extents: &[PathBuf]) -> Result<()> {
    files.remove(path).map_err(|source| file_error("remove", path, source))?;
    files.sync_directory_of(path).map_err(|source| file_error("make its removal durable", path, source))?;
    remove_extents(files, extents)
}

/// Removes the extents of an image whose file is gone.
pub(crate) fn remove_extents(files: &Files, extents: &[PathBuf]) -> Result<()> {
    for extent in extents {
        match files.remove(extent) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            removed => removed.map_err(|source| remain(extent, source))?,
        }
    }
    Ok(())
}

fn remain(extent: &Path, source: io::Error) -> DiskError {
    file_error("remove the extent of an image that is gone", extent, source)
}
