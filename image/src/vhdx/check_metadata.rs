//! Checks what the metadata of a VHDX say about each other (MS-VHDX 2.6). The values that a reader
//! needs are validated by `open.rs`.
//!
//! A disk that names a parent but is not marked as a child reads zeros instead of its parent's
//! data: the mark was lost. All other findings are notes: readers do not look at these fields, but
//! Windows may refuse the file.

use super::open::{Items, read_metadata_table, read_regions, required_region};
use crate::{
    error::Result,
    findings::{Finding, Findings, Severity},
};
use diskwright_format::vhdx::{
    FileParameters, MetadataEntry,
    metadata::{
        FILE_PARAMETERS, LOGICAL_SECTOR_SIZE, PARENT_LOCATOR, PHYSICAL_SECTOR_SIZE, VIRTUAL_DISK_ID, VIRTUAL_DISK_SIZE,
    },
    region::METADATA_REGION,
};
use diskwright_store::Store;

/// Adds a finding for each contradiction. Returns whether the disk may be a child that is not
/// marked as one. `store` shows the file after the replay of the log.
///
/// # Errors
/// As the open of the file, which has succeeded.
pub(super) fn check_metadata(store: &dyn Store, findings: &mut Findings) -> Result<bool> {
    let regions = read_regions(store, &mut Vec::new())?;
    let region = required_region(store, &regions, METADATA_REGION, "metadata region")?;
    let table = read_metadata_table(store, &region)?;
    let items = Items { store, region, table: &table };
    let parameters = items.parse(FILE_PARAMETERS, "file parameters", FileParameters::parse)?;
    let mut note = |severity, structure: &str, found: &str, expected: &str| {
        findings.add(Finding::new(severity, region.offset_bytes, structure, found, expected));
    };
    let is_stray = !parameters.has_parent && table.find(PARENT_LOCATOR).is_some();
    if is_stray {
        note(
            Severity::Corrupt,
            "file parameters",
            "a disk without parent that has a parent locator: blocks that it does not have read as zeros, not as the parent's",
            "the flag of a differencing disk, or no parent locator",
        );
    }
    if parameters.has_parent && parameters.leave_blocks_allocated {
        note(Severity::Note, "file parameters", "a differencing disk that is also fixed", "one of the two flags");
    }
    if table.find(VIRTUAL_DISK_ID).is_none() {
        note(Severity::Note, "metadata table", "no virtual disk id", "one, which Windows requires");
    }
    let has_flags = |entry: &MetadataEntry| {
        let is_virtual_disk = match entry.id {
            VIRTUAL_DISK_SIZE | VIRTUAL_DISK_ID | LOGICAL_SECTOR_SIZE | PHYSICAL_SECTOR_SIZE => true,
            FILE_PARAMETERS | PARENT_LOCATOR => false,
            _ => return true,
        };
        entry.is_user || (entry.is_virtual_disk == is_virtual_disk && entry.is_required)
    };
    for entry in table.entries.iter().filter(|entry| !has_flags(entry)) {
        let found = format!("the item {} with the flags of another kind of item", entry.id);
        note(Severity::Note, "metadata table", &found, "those of MS-VHDX 2.6.1.2");
    }
    Ok(is_stray)
}
