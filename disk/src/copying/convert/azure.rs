//! A copy for Azure: a fixed VHD of whole MiB. What Azure refuses is refused before the copy.

use crate::{
    ChainFacts, CreateRequest, Destination, DiskError, Layer, Opened, Result, TableFacts, Verdict,
    copying::{create::format_for, new_size::SizePlan},
    opening::volumes::examine,
    rules::{AZURE_MAX_BYTES, AZURE_MIN_BYTES, AZURE_UNIT_BYTES},
};
use diskwright_image::{DiskType, Format};
use diskwright_store::EngineKind;
use diskwright_volume::{Boot, TableKind, boot};
use std::path::Path;

/// Turns the request into one for Azure.
///
/// # Errors
/// If something else was asked for.
pub(super) fn adapt(dest: &Path, request: &mut CreateRequest) -> Result<()> {
    let refuse = |what: &str, hint: &str| {
        let what = format!("{}: Azure accepts only a fixed VHD with sectors of 512 bytes, and {what}", dest.display());
        Err(DiskError::Usage { what, hint: hint.into() })
    };
    if format_for(dest, request.format)? != Format::Vhd {
        return refuse("this would be none", "name the copy .vhd, and leave out `CreateRequest::format`");
    }
    if request.disk_type.is_some_and(|disk_type| disk_type != DiskType::Fixed) {
        return refuse("another type was asked for", "leave out `CreateRequest::disk_type`");
    }
    if request.logical_sector_bytes.is_some_and(|bytes| bytes != 512) {
        return refuse("other sectors were asked for", "leave out `CreateRequest::logical_sector_bytes`");
    }
    (request.format, request.disk_type) = (Some(Format::Vhd), Some(DiskType::Fixed));
    Ok(())
}

/// The size of the copy where `bytes` are wanted: rounded up.
pub(super) fn fit(dest: &Path, bytes: u64) -> Result<u64> {
    let rounded = bytes.checked_next_multiple_of(AZURE_UNIT_BYTES).map(|bytes| bytes.max(AZURE_MIN_BYTES));
    rounded.filter(|rounded| *rounded <= AZURE_MAX_BYTES).ok_or_else(|| DiskError::BadOptions {
        what: format!(
            "{}: Azure accepts disks up to {AZURE_MAX_BYTES} bytes (32 TiB), and this one has {bytes}",
            dest.display()
        ),
        hint: "divide what is on it among several disks".into(),
    })
}

/// The refusal of a disk with a partition table that counts in other sectors.
pub(super) fn large_sectors(source: &Path, sector_bytes: u32) -> DiskError {
    DiskError::BadOptions {
        what: format!(
            "{}: its partition table counts in sectors of {sector_bytes} bytes, and Azure's VHD has sectors of 512, where the partitions would not be found",
            source.display()
        ),
        hint: "copy the partitions onto a disk with sectors of 512 bytes, and convert that".into(),
    }
}

/// How a machine starts from the source.
pub(super) fn start_of(source: &Opened, engine: EngineKind) -> std::io::Result<(TableKind, Option<Boot>)> {
    let mut found = (TableKind::None, None);
    examine(source.device(), engine, &mut |_, _| true, &mut |reader| found = boot(reader))?;
    Ok(found)
}

/// Asks Azure's rules about a copy that is still empty.
///
/// # Errors
/// The first rule that does not hold.
pub(super) fn check(
    layer: &Layer,
    dest: &Path,
    (kind, boot): (TableKind, Option<Boot>),
    size: &SizePlan,
) -> Result<()> {
    let fits = size.table_left.as_ref().map_or(Ok(true), |reason| Err(reason.to_string()));
    let facts = ChainFacts::of_copy(layer, dest, TableFacts { kind, boot, fits });
    for judgement in Destination::Azure.judge(&facts) {
        if let Verdict::Broken { found, remedy } = judgement.verdict {
            return Err(DiskError::BadOptions {
                what: format!(
                    "{}: Azure would refuse it, by the rule {}: found {found}, expected {}",
                    dest.display(),
                    judgement.rule.name,
                    judgement.rule.expected
                ),
                hint: remedy,
            });
        }
    }
    Ok(())
}
