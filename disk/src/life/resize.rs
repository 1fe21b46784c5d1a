//! Gives a disk that no process has open another size.
//!
//! ```text
//!   larger    Disk::grow ─▶ partition table: second copy of a GPT at the new end,
//!                           the last partition enlarged
//!   smaller   where do the contents end? ─▶ partition table, at the new end ─▶ Disk::shrink
//! ```
//!
//! What must hold: nothing but unpartitioned space is lost. `new_size.rs` plans, and refuses what
//! cannot be, before the first change.
//!
//! Each write to the partition table is durable before the next one, and all are before a smaller
//! disk is cut. A power cut leaves the old size or the new one, with at least one whole copy of the
//! table. The same call again finishes what is left: the table, or unused space in the file.

use crate::{
    ChainScope, NewSize, OpenOptions, Progress, Result,
    copying::new_size::{SizePlan, SizeRequest, write_table},
    engine::device::Disk,
    error::file_error,
    life::unknown::refuse_unknown,
};
use diskwright_image::DiskType;
use diskwright_store::BlockDevice;
use diskwright_volume::{EnlargedPartition, LeftAlone, TableKind};
use std::path::Path;

/// Options for [`resize()`].
#[derive(Debug, Clone, Default)]
pub struct ResizeOptions {
    /// The new virtual size.
    pub size: NewSize,
    /// The number of the last partition, which is to reach the new end of the disk. The file system
    /// inside keeps its size.
    pub grow_partition: Option<u32>,
    /// How the disk is opened.
    pub open: OpenOptions,
    /// Check everything, and change nothing.
    pub dry_run: bool,
}

/// What has happened to a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
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
    /// Kind of the partition table that was changed; `None` if none was.
    pub table: Option<TableKind>,
    /// Why the partition table of a disk that grows was left as it is.
    pub table_left: Option<LeftAlone>,
    /// The partition that was enlarged.
    pub enlarged: Option<EnlargedPartition>,
}

/// Changes the size of the disk at `path`. Durable on return. `progress` is told how far the disk
/// was examined, in bytes of its size, and stops that by `false`; changes are not stopped.
///
/// # Errors
/// [`InUse`](crate::DiskError::InUse) if another program has it open;
/// [`HasChildren`](crate::DiskError::HasChildren) for a parent;
/// [`BadOptions`](crate::DiskError::BadOptions) if the size or the partition is refused: then
/// nothing was changed; [`Stopped`](crate::DiskError::Stopped); as
/// [`Disk::grow`](crate::Disk::grow). After other errors repeat the call.
pub fn resize(path: impl AsRef<Path>, options: &ResizeOptions, progress: &mut Progress<'_>) -> Result<Resized> {
    let path = path.as_ref();
    let open = OpenOptions { writable: true, scope: ChainScope::Whole, ..options.open.clone() };
    let disk = Disk::open(path, &open)?;
    refuse_unknown(&disk, path, &options.open, "resized")?;
    let layers = disk.layers();
    let top = &layers[0];
    let file_bytes = || top.files_len_bytes().map_err(|source| file_error("examine it", path, source));
    let (old_bytes, old_file_bytes) = (top.image.size_bytes(), file_bytes()?);
    let fit = |bytes| {
        if bytes < old_bytes {
            disk.check_shrink(bytes)?;
        } else if bytes > old_bytes {
            disk.check_growth(bytes)?;
        }
        Ok(bytes)
    };
    let wanted = SizeRequest { size: options.size, grow_partition: options.grow_partition, fit: &fit };
    let engine = options.open.engine;
    let plan = SizePlan::new((&*disk as &dyn BlockDevice, path), engine, &wanted, progress)?;
    let mut new_file_bytes = None;
    if !options.dry_run {
        if plan.new_bytes > old_bytes {
            disk.grow(plan.new_bytes)?;
        }
        write_table(&*disk, path, engine, plan.steps())?;
        if plan.new_bytes <= old_bytes {
            disk.shrink(plan.new_bytes)?;
        }
        disk.close()?;
        new_file_bytes = Some(file_bytes()?);
    }
    let table = plan.changed_table();
    let enlarged = plan.change.and_then(|change| change.enlarged);
    Ok(Resized {
        old_bytes,
        new_bytes: plan.new_bytes,
        old_file_bytes,
        new_file_bytes,
        disk_type: top.image.info().disk_type,
        table,
        table_left: plan.table_left,
        enlarged: enlarged.filter(|partition| partition.new_bytes > partition.old_bytes),
    })
}
