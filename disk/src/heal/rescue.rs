//! Rescues what can still be read of an image whose tables are damaged into a new image.
//!
//! ```text
//!   source.rs     file ─▶ what its tables still say (diskwright_image::salvage) ─▶ parents
//!   search.rs     blocks that no entry names: where their own contents prove that they belong
//!   gaps.rs       space that no entry names      votes.rs   what is claimed by what it holds
//!   transfer.rs   every readable byte ─▶ DEST.partial ─▶ DEST;   a read error is a lost range
//!   ranges.rs     the map: what was read, what is lost and why    outcome.rs, options.rs
//! ```
//!
//! What must hold: the source is opened read-only. No byte is placed by a guess: a block whose
//! entry is lost gets a place only if checksummed or self-addressed structures in it prove that
//! place and nothing in it contradicts. A block of a child that is lost is *lost*, and never shows
//! its parent's data, which would be stale. So a differencing image with data that no entry names
//! loses all blocks that its table calls absent, unless the user trusts the table
//! ([`RescueOptions::trust_absent`]). The same holds for an image of which nothing says whether it
//! has a parent.
//!
//! Memory is limited by the number of blocks with space. Time is linear in what the file stores:
//! `search.rs` says how often it is read.

mod gaps;
mod options;
mod outcome;
mod ranges;
mod search;
mod source;
mod transfer;
mod votes;

use crate::{
    DiskError, Progress, Result,
    copying::{
        create::{create_as, format_for, is_there},
        partial::PartialFile,
    },
    opening::place::require_file,
};
use diskwright_store::BlockDevice;
pub use options::RescueOptions;
pub use outcome::{Leftover, PlacedBlock, Rescued};
pub use ranges::{RangeKind, RescuedRange};
use std::path::Path;

/// Copies what can still be read of `source` into a new image at `dest`. `progress` counts bytes of
/// the file that are searched, and then bytes of the disk that are copied.
///
/// # Errors
/// If too little is known of the source, with what the user can name; errors of creating and
/// writing `dest`, which is removed then; [`DiskError::Stopped`]. A read error of the source is no
/// error.
pub fn rescue(
    source: impl AsRef<Path>,
    dest: impl AsRef<Path>,
    options: &RescueOptions,
    progress: &mut Progress<'_>,
) -> Result<Rescued> {
    let (source_path, dest_path) = (source.as_ref(), dest.as_ref());
    require_file(source_path, "rescue")?;
    require_file(dest_path, "rescue into")?;
    if options.dest.parent.is_some() {
        return Err(DiskError::Usage {
            what: "a rescue creates a disk without a parent".into(),
            hint: "leave out the parent".into(),
        });
    }
    let format = format_for(dest_path, options.dest.format)?;
    let files = &options.dest.files;
    if files.facts(dest_path).is_ok() {
        return Err(is_there(dest_path));
    }
    let mut damaged = source::open(source_path, options)?;
    let searched = search::search(&mut damaged, options, progress)?;
    let disk = damaged.disk()?;
    let geometry = disk.geometry();
    let sectors = format.driver().logical_sectors_bytes;
    let inherits = sectors.len() > 1 && sectors.contains(&geometry.logical_sector_bytes);
    let mut request = options.dest.clone();
    request.format = Some(format);
    request.size_bytes = Some(geometry.size_bytes);
    if inherits {
        request.logical_sector_bytes.get_or_insert(geometry.logical_sector_bytes);
        request.physical_sector_bytes.get_or_insert(geometry.physical_sector_bytes);
    }
    let partial = PartialFile::new(files, dest_path, "rescue");
    let shown = |error| partial.shown(error);
    if !options.dry_run {
        partial.clear()?;
        create_as(dest_path, partial.path(), &request).map_err(shown)?;
        partial.created();
    }
    let discard = |_: &DiskError| {
        if !options.dry_run {
            partial.discard();
        }
    };
    let made = (!options.dry_run).then(|| partial.path());
    let copied = transfer::Source {
        disk: &disk,
        path: source_path,
        is_doubted: !searched.doubts.is_empty(),
        table: &damaged.salvaged.table,
        end_bytes: damaged.salvaged.table.is_linear().then_some(damaged.salvaged.file_bytes),
    };
    let moved = transfer::copy(&copied, made, (format, options), progress).map_err(shown).inspect_err(discard)?;
    if !options.dry_run {
        partial.give_name().inspect_err(discard)?;
    }
    let mut remarks = disk.layers()[0].image.info().remarks.clone();
    remarks.extend(disk.warnings().iter().cloned());
    remarks.extend(searched.doubts);
    Ok(Rescued {
        size_bytes: geometry.size_bytes,
        placed: searched.placed,
        leftovers: searched.leftovers,
        unlisted_leftover_bytes: searched.unlisted_bytes,
        remarks,
        ..moved
    })
}
