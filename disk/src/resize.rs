//! Enlarges a disk that nobody has open.
//!
//! The image is enlarged in place by [`Disk::grow`](crate::Disk::grow), which says what a power cut
//! leaves: the old size or the new one. The new range reads as zeros. A disk cannot be made
//! smaller: which part of it is in use is known only by what lies in it.

use crate::{DiskError, OpenOptions, Reach, Result, device::Disk};
use diskwright_image::DiskType;
use std::path::Path;

/// A disk's size before and after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resized {
    /// Virtual size before, in bytes.
    pub old_bytes: u64,
    /// Virtual size after, in bytes.
    pub new_bytes: u64,
    /// Length of its file before.
    pub old_file_bytes: u64,
    /// Length of its file after; `None` if nothing was changed.
    pub new_file_bytes: Option<u64>,
    /// The type of the disk.
    pub disk_type: DiskType,
}

/// Gives the disk at `path` the virtual size `size_bytes`. Durable on return. With `dry_run`,
/// everything is checked and nothing is changed.
///
/// # Errors
/// [`DiskError::InUse`] if another program has it open; [`DiskError::HasChildren`] for a parent;
/// [`DiskError::BadOptions`] for a smaller size; as [`Disk::grow`](crate::Disk::grow).
pub fn resize(path: impl AsRef<Path>, size_bytes: u64, open: &OpenOptions, dry_run: bool) -> Result<Resized> {
    let path = path.as_ref();
    let disk = Disk::open(path, &OpenOptions { writable: true, reach: Reach::Whole, ..open.clone() })?;
    let layers = disk.layers();
    let top = &layers[0];
    let file_bytes = || top.files_len_bytes().map_err(|source| crate::error::file_error("examine it", path, source));
    let (old_bytes, old_file_bytes) = (top.image.size_bytes(), file_bytes()?);
    if size_bytes < old_bytes {
        return Err(DiskError::BadOptions {
            what: format!(
                "{}: its size is {old_bytes} bytes, and making a disk smaller than that ({size_bytes} bytes) is not supported",
                path.display()
            ),
            hint: "create a smaller disk and copy the partitions into it".into(),
        });
    }
    let mut new_file_bytes = None;
    if dry_run {
        disk.check_growth(size_bytes)?;
    } else {
        disk.grow(size_bytes)?;
        disk.close()?;
        new_file_bytes = Some(file_bytes()?);
    }
    let disk_type = top.image.info().disk_type;
    Ok(Resized { old_bytes, new_bytes: size_bytes, old_file_bytes, new_file_bytes, disk_type })
}
