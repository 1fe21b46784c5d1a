//! What a conversion into a file is going to make. Everything that the options and the source alone
//! refuse is refused here, before a file is created.

use super::{
    azure,
    identity::{CopiedIdentity, Identity},
    options::ConvertOptions,
};
use crate::{
    CreateRequest, DiskError, NewSize, Opened, Progress, Result,
    copying::{create::format_for, new_size::SizePlan, new_size::SizeRequest},
};
use diskwright_image::Format;
use diskwright_volume::{LeftAlone, TableKind};
use std::path::Path;

pub(super) struct Plan {
    /// The image to create, with a format, sizes and sectors.
    pub(super) request: CreateRequest,
    pub(super) format: Format,
    /// The size of the copy, and what its partition table becomes.
    pub(super) size: SizePlan,
    pub(super) kept: CopiedIdentity,
    /// Warnings, a sentence each.
    pub(super) notes: Vec<String>,
}

impl Plan {
    pub(super) fn new(
        (source, source_path): (&Opened, &Path),
        dest: &Path,
        options: &ConvertOptions,
        progress: &mut Progress<'_>,
    ) -> Result<Self> {
        let mut request = options.dest.clone();
        if options.azure {
            azure::adapt(dest, &mut request)?;
        }
        let geometry = source.device().geometry();
        let format = format_for(dest, request.format)?;
        // A server may have a sector size that the image's format cannot record.
        let sectors = format.driver().logical_sectors_bytes;
        let inherited = (sectors.len() > 1 && sectors.contains(&geometry.logical_sector_bytes)).then_some(geometry);
        request.format = Some(format);
        request.logical_sector_bytes = request.logical_sector_bytes.or(inherited.map(|from| from.logical_sector_bytes));
        request.physical_sector_bytes =
            request.physical_sector_bytes.or(inherited.map(|from| from.physical_sector_bytes));
        let mut size = plan_size((source, source_path), dest, options, progress)?;
        let mut notes = Vec::new();
        let same_sectors = request.logical_sector_bytes.unwrap_or(512) == geometry.logical_sector_bytes;
        if !same_sectors {
            leave_table(dest, geometry.size_bytes, &mut size)?;
            let has_table = size.change.as_ref().is_none_or(|change| change.table != TableKind::None);
            if options.azure && has_table {
                return Err(azure::large_sectors(source_path, geometry.logical_sector_bytes));
            }
        }
        if let Some(reason) = &size.table_left {
            notes.push(format!("{}: the partition table was left as it is: {reason}", dest.display()));
        }
        request.size_bytes = Some(size.new_bytes);
        let kept = match options.identity {
            Identity::New => CopiedIdentity::default(),
            Identity::Keep => {
                let differs = if size.new_bytes != geometry.size_bytes {
                    Some("its size differs")
                } else if !size.steps().is_empty() {
                    Some("its partition table differs")
                } else {
                    (!same_sectors).then_some("its sectors have another size")
                };
                CopiedIdentity::of(&options.dest.files, (source, source_path), (dest, format), differs)?
            }
        };
        request.disk_id = kept.disk_id.or(request.disk_id);
        Ok(Self { request, format, size, kept, notes })
    }
}

/// The size of the copy. A copy of the same size that goes nowhere special keeps its partition
/// table as it is.
fn plan_size(
    source: (&Opened, &Path),
    dest: &Path,
    options: &ConvertOptions,
    progress: &mut Progress<'_>,
) -> Result<SizePlan> {
    let size_bytes = source.0.device().geometry().size_bytes;
    if options.size == NewSize::Present && !options.azure {
        return Ok(SizePlan { new_bytes: size_bytes, ..SizePlan::default() });
    }
    let fit = |bytes| if options.azure { azure::fit(dest, bytes) } else { Ok(bytes) };
    let wanted = SizeRequest { size: options.size, grow_partition: None, fit: &fit };
    // Only asks whether to stop: no byte is copied yet.
    let mut step = |_, _| progress(0, size_bytes);
    SizePlan::new((source.0.device(), source.1), options.source.engine, &wanted, &mut step)
}

/// A table is counted in sectors, so it cannot be changed for a copy with others.
fn leave_table(dest: &Path, old_bytes: u64, size: &mut SizePlan) -> Result<()> {
    if size.steps().is_empty() {
        return Ok(());
    }
    let reason = LeftAlone {
        why: diskwright_volume::ReasonKind::Unsupported,
        sentence: "it counts in the sectors of the source, and the copy has others".into(),
    };
    if size.new_bytes < old_bytes {
        return Err(DiskError::BadOptions {
            what: format!("{}: cannot be smaller: the partition table would have to change: {reason}", dest.display()),
            hint: "keep the sector size, or resize the source first".into(),
        });
    }
    if let Some(change) = &mut size.change {
        change.steps.clear();
    }
    size.table_left = Some(reason);
    Ok(())
}
