//! Copies into an existing export, in place.

use super::{
    identity::{Identity, cannot_keep},
    options::{ConvertOptions, ConvertOutcome},
    transfer::{copy, verify_failed},
};
use crate::{
    CompareOutcome, DiskError, NewSize, OpenOptions, Opened, Progress, Result, copying::compare::compare_with,
};
use diskwright_image::Format;
use std::path::Path;

/// Opens the export, and refuses what cannot be copied into one.
pub(super) fn open(source: &Opened, dest_path: &Path, options: &ConvertOptions) -> Result<Opened> {
    let asked = &options.dest;
    if asked.format.is_some_and(|format| format != Format::Raw)
        || asked.disk_type.is_some()
        || asked.block_bytes.or(asked.logical_sector_bytes).or(asked.physical_sector_bytes).is_some()
        || asked.preallocate
    {
        return Err(DiskError::Usage {
            what: format!("{}: an export keeps its format, type and sizes", dest_path.display()),
            hint: "leave out the format, the type, block and sector sizes and `CreateRequest::preallocate`".into(),
        });
    }
    if options.size != NewSize::Present || options.azure {
        return Err(DiskError::Usage {
            what: format!("{}: an export keeps its size and its format", dest_path.display()),
            hint: "leave out `ConvertOptions::size` and `ConvertOptions::azure`, or convert into a file".into(),
        });
    }
    if options.identity == Identity::Keep {
        return Err(cannot_keep(dest_path, "an export records none"));
    }
    let dest = Opened::open(dest_path, &OpenOptions { writable: true, ..options.open_dest() })?;
    let (needed, there) = (source.device().geometry().size_bytes, dest.device().geometry().size_bytes);
    if there < needed {
        return Err(DiskError::BadOptions {
            what: format!("{}: the export has {there} bytes, the source needs {needed}", dest_path.display()),
            hint: "make the export larger".into(),
        });
    }
    Ok(dest)
}

/// Copies into an existing export. Zeros of the source are written unless the export reports them
/// as zeros, and a range beyond the source's end is zeroed.
pub(super) fn convert(
    (source, source_path): (&Opened, &Path),
    dest_path: &Path,
    options: &ConvertOptions,
    progress: &mut Progress<'_>,
) -> Result<ConvertOutcome> {
    let dest = open(source, dest_path, options)?;
    let mut outcome = copy((source, source_path), (&dest, dest_path), u64::MAX, options, options.resume, progress)?;
    if options.verify {
        let sides = [(source.device(), source_path), (dest.device(), dest_path)];
        match compare_with(sides, u64::MAX, options.source.engine, progress, options.damage())? {
            CompareOutcome::Same => outcome.verified_bytes = outcome.size_bytes - outcome.lost.bytes,
            CompareOutcome::Different { offset_bytes } => {
                return Err(verify_failed(dest_path, source_path, offset_bytes));
            }
        }
    }
    Ok(outcome)
}
