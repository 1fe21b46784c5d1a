//! Moves a disk that no process has open: `live_move.rs` moves one in use.
//!
//! ```text
//!   same format and type, no parent, same file system ─▶ rename, durable
//!   else ─▶ copy under the temporary name ─▶ compared, durable ─▶ old marked ─▶ new name, durable
//!        ─▶ old removed
//! ```
//!
//! The disk is locked for writing from the beginning to the end, so no other program has it open. A
//! power cut at any moment leaves the disk under its old name, under its new one, or the same
//! contents under both: then the old file was about to be removed, and the same move does that.

use crate::{
    CompareOutcome, DiskError, OpenOptions, Progress, Result,
    copying::compare::compare,
    engine::device::Disk,
    error::file_error,
    life::{
        move_copy::{Control, Copier, data_bytes},
        move_plan::{MoveOptions, MoveWatch, Moved, Plan},
        unknown::refuse_unknown,
    },
};
use diskwright_image::DiskType;
use diskwright_store::BlockDevice;
use std::{path::Path, sync::Arc, time::Instant};

/// Moves the disk at `path` to the file `to`, or into the folder `to`. Durable on return.
/// `progress` counts bytes of the disk that hold data, and begins again at 0 when the copy is
/// compared.
///
/// # Errors
/// [`DiskError::InUse`] if another program has it open; [`DiskError::HasChildren`];
/// [`DiskError::Exists`]; [`DiskError::BadOptions`] for a size that the new format cannot have;
/// [`DiskError::File`] and [`DiskError::Image`] if the old disk cannot be read or the new one not
/// be written; [`DiskError::VerifyFailed`]; [`DiskError::Stopped`]. The disk is where it was, and
/// the new file is removed.
pub fn move_disk(
    path: impl AsRef<Path>,
    to: impl AsRef<Path>,
    options: &MoveOptions,
    open: &OpenOptions,
    progress: &mut Progress<'_>,
) -> Result<Moved> {
    let (path, to) = (path.as_ref(), to.as_ref());
    let files = &open.files;
    let real = files.canonical(path).map_err(|source| file_error("find it", path, source))?;
    let disk = Disk::open(&real, &OpenOptions { writable: true, ..open.clone() })?;
    if !options.keep_old {
        refuse_unknown(&disk, path, open, "moved")?;
    }
    let plan = Plan::new(&disk, &real, files, to, options)?;
    let mut moved = plan.outcome(&disk, 0);
    moved.warnings = disk.warnings().to_vec();
    if plan.is_copied {
        plan.refuse_to_lose_snapshots(&disk)?;
        return finish(&disk, &plan, moved, (options, open), progress);
    }
    if keeps_image(&disk, &plan, options) && plan.is_on_same_file_system() {
        if options.dry_run {
            return Ok(moved);
        }
        if plan.rename_old()? {
            disk.close()?;
            return Ok(moved);
        }
    }
    plan.refuse_to_lose_snapshots(&disk)?;
    moved.data_bytes = data_bytes(&disk)?;
    plan.check_room(&moved)?;
    if options.dry_run {
        return Ok(moved);
    }
    let new = plan.make(&disk, open)?;
    let copied = copy_all(&disk, &new, &plan, &mut moved, open, progress);
    let marked = copied.and_then(|()| plan.mark_copied(&new));
    marked.and_then(|()| plan.give_name(&new)).inspect_err(|_| {
        plan.discard();
        plan.unmark();
    })?;
    // Its locks are held until it is dropped.
    disk.close()?;
    if !options.keep_old {
        plan.remove_old()?;
    }
    Ok(moved)
}

/// Finishes a move that was cut off when the new file had its name. One of the files may have been
/// written since, also by clients of a disk that moved while it was in use, so they are compared.
fn finish(
    disk: &Arc<Disk>,
    plan: &Plan<'_>,
    moved: Moved,
    (options, open): (&MoveOptions, &OpenOptions),
    progress: &mut Progress<'_>,
) -> Result<Moved> {
    let new = Disk::open(&plan.to, &OpenOptions { format: plan.request.format, writable: false, ..open.clone() })?;
    let sides: [(&dyn BlockDevice, &Path); 2] = [(&**disk, &plan.from), (&*new, &plan.to)];
    if new.geometry().size_bytes != disk.geometry().size_bytes
        || !matches!(compare(sides, open.engine, progress)?, CompareOutcome::Same)
    {
        return Err(plan.both_are_there());
    }
    if !options.dry_run {
        plan.remove_old()?;
    }
    Ok(moved)
}

/// Whether the new image would be the old one.
fn keeps_image(disk: &Disk, plan: &Plan<'_>, options: &MoveOptions) -> bool {
    let layers = disk.layers();
    let info = layers[0].image.info();
    let asked = &options.dest;
    let keeps_type =
        info.disk_type != DiskType::Differencing && asked.disk_type.is_none_or(|kind| kind == info.disk_type);
    let keeps_rest = asked.block_bytes.is_none()
        && asked.logical_sector_bytes.is_none()
        && asked.physical_sector_bytes.is_none()
        && !asked.preallocate;
    let keeps_format = plan.request.format == Some(info.format);
    keeps_format
        && layers.len() == 1
        && layers[0].image.stores().len() == 1
        && keeps_type
        && keeps_rest
        && !options.keep_old
}

/// Copies, compares and closes.
fn copy_all(
    disk: &Arc<Disk>,
    new: &Arc<Disk>,
    plan: &Plan<'_>,
    moved: &mut Moved,
    open: &OpenOptions,
    progress: &mut Progress<'_>,
) -> Result<()> {
    let mut watch = CopyProgress(progress);
    let mut control =
        Control { watch: &mut watch, ended: &|| 0, total_bytes: moved.data_bytes, pace: None, told_at: Instant::now() };
    let mut copier = Copier::open(disk, new, plan.to.clone(), open.engine)?;
    control.tell(&copier)?;
    copier.copy_all(&mut control)?;
    copier.flush()?;
    moved.copied_bytes = copier.copied_bytes;
    drop(copier);
    let sides: [(&dyn BlockDevice, &Path); 2] = [(&**disk, &plan.from), (&**new, &plan.to)];
    match compare(sides, open.engine, watch.0)? {
        CompareOutcome::Same => new.close(),
        CompareOutcome::Different { offset_bytes } => {
            Err(DiskError::VerifyFailed { dest: plan.to.clone(), source_path: plan.from.clone(), offset_bytes })
        }
    }
}

/// Tells the progress of the copy.
struct CopyProgress<'a, 'b>(&'a mut Progress<'b>);

impl MoveWatch for CopyProgress<'_, '_> {
    fn goes_on(&mut self, done: u64, total: u64) -> bool {
        (self.0)(done, total)
    }
}
