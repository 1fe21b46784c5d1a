//! The partial file of an interrupted conversion: whether another one can go on with it.
//!
//! It must be an image as this conversion would create it. What it holds does not matter: all of it
//! is compared with the source.

use super::{options::ConvertOptions, plan::Plan};
use crate::{Disk, DiskError, OpenOptions, Result, copying::partial::PartialFile};
use std::path::Path;

/// Refuses to go on with a file that is written in one pass.
pub(super) fn refuse_stream(dest: &Path, options: &ConvertOptions) -> Result<()> {
    if !options.resume {
        return Ok(());
    }
    Err(DiskError::Usage {
        what: format!("{}: a compressed file is written in one pass, so it cannot be resumed", dest.display()),
        hint: "leave out `ConvertOptions::resume`, or make a disk that is not compressed".into(),
    })
}

/// Whether there is a partial file that this conversion would create in the same way.
///
/// # Errors
/// If another conversion has it open.
pub(super) fn fits(partial: &PartialFile<'_>, plan: &Plan, options: &ConvertOptions) -> Result<bool> {
    if partial.facts().is_err() {
        return Ok(false);
    }
    // Opened for writing, as a running conversion has it: this fails if one runs.
    let open = OpenOptions { writable: true, format: Some(plan.format), ..options.open_dest() };
    let disk = match Disk::open(partial.path(), &open) {
        Ok(disk) => disk,
        Err(DiskError::InUse { holder, .. }) => return Err(partial.in_use(&holder)),
        // Not an image yet, or of another format: it is made anew.
        Err(_) => return Ok(false),
    };
    let layers = disk.layers();
    let (info, asked) = (layers[0].image.info(), &plan.request);
    let is_or_any = |asked: Option<u32>, found: u64| asked.is_none_or(|asked| u64::from(asked) == found);
    let fits = layers.len() == 1
        && info.size_bytes == plan.size.new_bytes
        && asked.disk_type.is_none_or(|asked| asked == info.disk_type)
        && (!info.has_blocks || is_or_any(asked.block_bytes, info.block_bytes))
        && is_or_any(asked.logical_sector_bytes, info.logical_sector_bytes.into())
        && is_or_any(asked.physical_sector_bytes, info.physical_sector_bytes.into())
        && (asked.disk_id.is_none() || asked.disk_id == info.disk_id)
        && asked
            .subformat
            .as_ref()
            .is_none_or(|asked| info.subformat.as_ref().is_some_and(|found| found.eq_ignore_ascii_case(asked)));
    disk.close()?;
    Ok(fits)
}
