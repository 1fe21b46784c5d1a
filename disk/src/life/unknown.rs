//! Files that are opened as raw disks although nothing says that they are disks.
//!
//! A file whose name says nothing and that has no signature is a raw disk, because many images of
//! clouds and of dd are such files. So `resize notes.txt +1M` would enlarge any file, and `move`
//! would replace it by an image of it. Operations that change or remove the file itself, and not
//! only bytes that a client writes, ask here first; so does `track start`, whose file of points
//! would lie beside it.

use crate::{
    DiskError, OpenOptions, Result,
    engine::{device::Disk, holes::next_stored},
    error::from_io,
    opening::volumes::layout,
};
use diskwright_image::probe;
use diskwright_volume::TableKind;
use std::path::Path;

/// Refuses a file of which neither the name nor the contents say that it is a disk, and that the
/// user has not called a raw disk. `disk` was opened from `path` with `open`; `done` is what it
/// would be: "resized".
///
/// # Errors
/// [`DiskError::BadOptions`] for such a file; errors of reading it.
pub fn refuse_unknown(disk: &Disk, path: &Path, open: &OpenOptions, done: &str) -> Result<()> {
    let layers = disk.layers();
    let image = &layers[0].image;
    let is_file = image.stores().len() == 1 && !image.store().is_block_device();
    let is_certain = open.format.is_some() || probe::format_of_extension(path).is_some();
    if is_certain || !is_file || image.info().format.driver().has_blocks {
        return Ok(());
    }
    let found = layout(disk, open.engine).map_err(|error| from_io("examine it", path, error))?;
    let is_known = found.table != TableKind::None || found.volumes.iter().any(|volume| volume.contents.is_some());
    let size_bytes = image.size_bytes();
    // An empty file of `truncate` loses nothing.
    if is_known || next_stored(&layers, 0, size_bytes)? == size_bytes {
        return Ok(());
    }
    Err(DiskError::BadOptions {
        what: format!(
            "{}: nothing says that it is a disk, so it is not {done}: its name does not say it, and it has no partition table and no file system that is known",
            path.display()
        ),
        hint: "if it is a raw disk, name the format (`OpenOptions::format` = raw)".into(),
    })
}
