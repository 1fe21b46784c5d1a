//! Reports damage in a VMDK. Reads only.
//!
//! ```text
//!   descriptor ─▶ parts ─▶ each sparse extent: directories ─▶ entries ─▶ overlaps, both copies
//! ```
//!
//! The caller reports files that cannot be opened; the check ends there, as the disk cannot be
//! read. Memory: 4 bytes for each grain of a file, bounded by its length.

use super::{
    image::scan,
    layout::{FilePart, Layout},
    tables::{Entry, LOST, Tables},
};
use crate::{
    ImageError, Result,
    findings::{CheckReport, Examined, Finding, Findings, Severity, corruption},
};
use diskwright_format::vmdk::SECTOR_BYTES;
use diskwright_store::Store;
use std::sync::Arc;

/// Checks the VMDK with these files; `None` for one that could not be opened.
///
/// # Errors
/// `NotAnImage`; `Io`. Damage is in the report.
pub(crate) fn examine(stores: &[Option<Arc<dyn Store>>], for_repair: bool) -> Result<Examined> {
    let mut findings = Findings::new(for_repair);
    let mut report = CheckReport::default();
    let Some(stores) = stores.iter().cloned().collect::<Option<Vec<_>>>() else {
        return Ok(findings.finish(report));
    };
    let layout = match Layout::read(stores) {
        Ok(layout) => layout,
        Err(error @ (ImageError::Corrupt { .. } | ImageError::Unsupported { .. })) => {
            findings.add(corruption(error)?);
            return Ok(findings.finish(report));
        }
        Err(error) => return Err(error),
    };
    for remark in &layout.remarks {
        findings.add(Finding::new(Severity::Note, 0, "descriptor", remark.clone(), "").says(remark.clone()));
    }
    let files = layout.files();
    for (index, (one, range)) in files.iter().enumerate() {
        let is_same =
            |(other, of): &FilePart| one.is_some() && one == other && range.start < of.end && of.start < range.end;
        if files[..index].iter().any(is_same) {
            let message = format!(
                "Extent {index} lies on an earlier extent in the same file: a write to the one changes the other."
            );
            let finding =
                Finding::new(Severity::Corrupt, 0, "descriptor", "two extents in one place", "space of its own");
            findings.add(finding.says(message));
        }
    }
    report.total_blocks = layout.extents.iter().map(|extent| extent.tables.grains()).sum();
    for extent in &layout.extents {
        check_extent(&extent.tables, &extent.store, &mut findings, &mut report)?;
    }
    Ok(findings.finish(report))
}

fn check_extent(
    tables: &Tables,
    store: &Arc<dyn Store>,
    findings: &mut Findings,
    report: &mut CheckReport,
) -> Result<()> {
    let name = store.name().display();
    let lost = tables.entries[0].iter().filter(|&&entry| entry == LOST).count();
    if lost > 0 {
        let message = format!("{name}: {lost} grain tables lie outside of the file, and no copy of them was found.");
        let at = tables.directories[0];
        let finding =
            Finding::new(Severity::Corrupt, at, "grain directory", format!("{lost} invalid entries"), "tables");
        findings.add(finding.says(message));
    }
    let mut starts: Vec<u32> = Vec::new();
    let most = store.len_bytes().map_err(|error| ImageError::io("get the length of the file", &**store, 0, error))?
        / SECTOR_BYTES;
    let mut compressed_errors = Vec::new();
    scan(tables, &**store, |grain, entry| {
        match entry {
            // A lost table is reported once.
            Entry::Bad(raw) if raw == u64::from(LOST) => {}
            Entry::Bad(raw) => {
                let message = format!("{name}: grain {grain} has the invalid entry {raw:#x}.");
                let at = tables.entry_offset(grain);
                let finding =
                    Finding::new(Severity::Corrupt, at, "grain table", format!("{raw:#x}"), "a grain in the file");
                findings.add(finding.says(message));
            }
            Entry::At(at) => {
                report.allocated_blocks += 1;
                starts.push((at / SECTOR_BYTES) as u32);
                if tables.is_compressed()
                    && let Err(error) = tables.decompress(&**store, grain, at)
                {
                    compressed_errors.push(error);
                }
            }
            Entry::Absent | Entry::Zero => {}
        }
        // More grains than sectors: they overlap, which is found below.
        Ok(starts.len() as u64 <= most && compressed_errors.len() < 1000)
    })?;
    for error in compressed_errors {
        findings.add(corruption(error)?);
    }
    starts.sort_unstable();
    let grain_sectors = if tables.is_compressed() { 1 } else { tables.grain_bytes / SECTOR_BYTES };
    for pair in starts.windows(2) {
        if u64::from(pair[0]) + grain_sectors > u64::from(pair[1]) {
            let at = u64::from(pair[1]) * SECTOR_BYTES;
            let message = format!("{name}: two grains overlap at offset {at}.");
            let finding =
                Finding::new(Severity::Corrupt, at, "grain table", "two grains in one place", "space of its own");
            findings.add(finding.says(message));
        }
    }
    compare_copies(tables, store, findings)
}

/// Compares both copies of the grain tables. Readers use the first; the second is for repairs.
fn compare_copies(tables: &Tables, store: &Arc<dyn Store>, findings: &mut Findings) -> Result<()> {
    let [first, second] = &tables.entries[..] else { return Ok(()) };
    let mut differing = 0_u64;
    for (table, (&one, &other)) in (0_u64..).zip(first.iter().zip(second)) {
        let is_lost = |entry| entry == 0 || entry == LOST;
        if is_lost(one) || is_lost(other) {
            differing += u64::from(one != other);
            continue;
        }
        let grain = table * tables.table_entries;
        let count = tables.table_entries.min(tables.grains() - grain) as usize;
        let mut raw = [vec![0; count], vec![0; count]];
        for (raw, entry) in raw.iter_mut().zip([one, other]) {
            tables.read_raw(&**store, tables.table_place(entry), grain, raw)?;
        }
        differing += u64::from(raw[0] != raw[1]);
    }
    if differing > 0 {
        let message = format!(
            "{}: {differing} grain tables differ from their redundant copies; the first copies count.",
            store.name().display()
        );
        let at = tables.directories[1];
        let found = format!("{differing} tables that differ");
        findings.add(Finding::new(Severity::Note, at, "redundant grain tables", found, "equal copies").says(message));
    }
    Ok(())
}
