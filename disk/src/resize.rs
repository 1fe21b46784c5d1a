//! Gives a disk that nobody has open another size.
//!
//! ```text
//!   larger    Disk::grow ─▶ partition table: second copy of a GPT at the new end,
//!                           the last partition enlarged
//!   smaller   where do the contents end? ─▶ partition table, at the new end ─▶ Disk::shrink
//! ```
//!
//! What must hold: nothing but unpartitioned space is lost (`diskwright-volume` decides where the
//! contents end, and when in doubt the disk keeps its size). Everything that can be refused is
//! refused before the first change.
//!
//! Each write to the partition table is durable before the next one, and all are before a smaller
//! disk is cut. A power cut leaves the old size or the new one, with at least one whole copy of the
//! table. The same call again finishes what is left: the table, or unused space in the file.

use crate::{
    DiskError, OpenOptions, Progress, Reach, Result,
    device::Disk,
    error::{file_error, from_io},
    volumes::examine,
};
use diskwright_image::DiskType;
use diskwright_store::{BlockDevice, Blocking};
use diskwright_volume::{Ends, Enlarged, LeftAlone, Step, TableChange, TableKind, ends, table_change};
use std::path::Path;

/// A new size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NewSize {
    /// The present one. Only the partition table changes.
    #[default]
    Present,
    /// So many bytes.
    Bytes(u64),
    /// So many bytes more.
    More(u64),
    /// The smallest size without loss.
    Least,
}

/// What [`resize()`] does.
#[derive(Debug, Clone, Default)]
pub struct ResizeOptions {
    /// The new size.
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
    pub enlarged: Option<Enlarged>,
}

/// What is going to be done.
struct Plan {
    new_bytes: u64,
    change: Option<TableChange>,
    table_left: Option<LeftAlone>,
}

/// Changes the size of the disk at `path`. Durable on return. `progress` is told how far the disk
/// was examined, in bytes of its size, and stops that by `false`; changes are not stopped.
///
/// # Errors
/// [`DiskError::InUse`] if another program has it open; [`DiskError::HasChildren`] for a parent;
/// [`DiskError::BadOptions`] if the size or the partition is refused: then nothing was changed;
/// [`DiskError::Stopped`]; as [`Disk::grow`](crate::Disk::grow). After other errors repeat the
/// call.
pub fn resize(path: impl AsRef<Path>, options: &ResizeOptions, progress: &mut Progress<'_>) -> Result<Resized> {
    let path = path.as_ref();
    let open = OpenOptions { writable: true, reach: Reach::Whole, ..options.open.clone() };
    let disk = Disk::open(path, &open)?;
    let layers = disk.layers();
    let top = &layers[0];
    let file_bytes = || top.files_len_bytes().map_err(|source| file_error("examine it", path, source));
    let (old_bytes, old_file_bytes) = (top.image.size_bytes(), file_bytes()?);
    let plan = plan(&disk, path, old_bytes, options, progress)?;
    let mut new_file_bytes = None;
    if !options.dry_run {
        if plan.new_bytes > old_bytes {
            disk.grow(plan.new_bytes)?;
        }
        let steps = plan.change.as_ref().map_or(&[][..], |change| &change.steps);
        write_table(&disk, path, &open, steps)?;
        if plan.new_bytes <= old_bytes {
            disk.shrink(plan.new_bytes)?;
        }
        disk.close()?;
        new_file_bytes = Some(file_bytes()?);
    }
    let change = plan.change.as_ref();
    let enlarged = change.and_then(|change| change.enlarged);
    Ok(Resized {
        old_bytes,
        new_bytes: plan.new_bytes,
        old_file_bytes,
        new_file_bytes,
        disk_type: top.image.info().disk_type,
        table: change.filter(|change| !change.steps.is_empty()).map(|change| change.table),
        table_left: plan.table_left,
        enlarged: enlarged.filter(|partition| partition.new_bytes > partition.old_bytes),
    })
}

/// Decides what is done, and refuses what cannot be.
fn plan(
    disk: &Disk,
    path: &Path,
    old_bytes: u64,
    options: &ResizeOptions,
    progress: &mut Progress<'_>,
) -> Result<Plan> {
    let engine = options.open.engine;
    let mut of_disk = |what: &mut dyn FnMut(&dyn diskwright_volume::ReadAt)| {
        examine(disk, engine, progress, what).map_err(|error| from_io("read its partition table", path, error))
    };
    let mut found: Option<Ends> = None;
    let new_bytes = match options.size {
        NewSize::Present => old_bytes,
        NewSize::Bytes(bytes) => bytes,
        NewSize::More(bytes) => old_bytes.saturating_add(bytes),
        NewSize::Least => {
            of_disk(&mut |reader| found = Some(ends(reader)))?;
            match found.as_ref().map(|found| &found.least_bytes) {
                Some(Ok(least_bytes)) => *least_bytes,
                Some(Err(reason)) => return Err(refused(path, "cannot be made smaller", reason)),
                None => return Err(DiskError::Stopped),
            }
        }
    };
    if new_bytes < old_bytes {
        disk.check_shrink(new_bytes)?;
        if found.is_none() {
            of_disk(&mut |reader| found = Some(ends(reader)))?;
        }
        let reason = found.as_ref().and_then(|found| found.refusal(new_bytes));
        if let Some(reason) = reason {
            return Err(refused(path, &format!("cannot be made smaller, to {new_bytes} bytes"), &reason));
        }
    } else if new_bytes > old_bytes {
        disk.check_growth(new_bytes)?;
    }
    let mut change = None;
    of_disk(&mut |reader| change = Some(table_change(reader, new_bytes, options.grow_partition)))?;
    match (change.transpose(), options.grow_partition) {
        (Ok(change), _) => Ok(Plan { new_bytes, change, table_left: None }),
        (Err(reason), Some(number)) => Err(refused(path, &format!("partition {number} cannot be enlarged"), &reason)),
        (Err(reason), None) if new_bytes < old_bytes => Err(refused(path, "cannot be made smaller", &reason)),
        (Err(reason), None) => Ok(Plan { new_bytes, change: None, table_left: Some(reason) }),
    }
}

fn refused(path: &Path, what: &str, reason: &LeftAlone) -> DiskError {
    DiskError::BadOptions {
        what: format!("{}: {what}: {reason}", path.display()),
        hint: "nothing was changed; `partitions` shows what lies on the disk".into(),
    }
}

/// Carries out the steps, each durable before the next.
fn write_table(disk: &Disk, path: &Path, open: &OpenOptions, steps: &[Step]) -> Result<()> {
    if steps.is_empty() {
        return Ok(());
    }
    let write = || {
        let mut queue = Blocking::open(disk as &dyn BlockDevice, open.engine)?;
        for step in steps {
            queue.write(step.offset_bytes, &step.bytes, false)?;
            queue.flush()?;
        }
        Ok(())
    };
    write().map_err(|error| from_io("write its partition table", path, error))
}
