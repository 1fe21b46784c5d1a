//! Reports damage in a VMDK, and says how copies of tables become equal.
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
    findings::{Change, CheckOutcome, CheckReport, Finding, Findings, Severity, corruption, is_hole},
};
use diskwright_format::vmdk::{GRAIN_ABSENT, GRAIN_ZERO, SECTOR_BYTES};
use diskwright_store::{FileRange, Store};
use std::sync::Arc;

/// Checks the VMDK with these files; `None` for one that could not be opened.
///
/// # Errors
/// `NotAnImage`; `Io`. Damage is in the report.
pub(crate) fn examine(stores: &[Option<Arc<dyn Store>>], for_repair: bool) -> Result<CheckOutcome> {
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
    check_descriptor(&layout, &mut findings);
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

/// What a descriptor that can be read has lost: half of the link to a parent, or of its own place.
fn check_descriptor(layout: &Layout, findings: &mut Findings) {
    if let Some(text) = &layout.head.text
        && text.parent_hint().is_some()
        && text.get("parentCID").is_none()
    {
        let finding =
            Finding::new(Severity::Corrupt, 0, "descriptor", "parentFileNameHint without parentCID", "both or none");
        findings.add(
            finding.says("The descriptor names the file of a parent, but not its CID, so the parent is not read."),
        );
    }
    for header in layout.extents.iter().filter_map(|extent| extent.tables.header.as_ref()) {
        if (header.descriptor_sector == 0) != (header.descriptor_sectors == 0) {
            let found =
                format!("{} sectors of a descriptor at sector {}", header.descriptor_sectors, header.descriptor_sector);
            let finding = Finding::new(Severity::Corrupt, 28, "sparse extent header", found, "both 0 or none");
            findings.add(finding.says("The header names half of the place of a descriptor, which is not read."));
        }
    }
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
            Entry::Bad(_) if tables.entries[0].get((grain / tables.table_entries) as usize) == Some(&LOST) => {}
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
    // A session that has not closed the file has space that no entry names yet.
    if tables.header.as_ref().is_some_and(|header| !header.is_unclean) && !tables.is_compressed() {
        report.leaked_bytes += leaked(tables, store, &starts, findings)?;
    }
    compare_copies(tables, store, findings)
}

/// Space of a grain between structures that no entry names. Holes of the file are not leaked.
/// Returns its bytes. `starts` are the places of the grains in sectors, sorted.
fn leaked(tables: &Tables, store: &Arc<dyn Store>, starts: &[u32], findings: &mut Findings) -> Result<u64> {
    let len_bytes =
        store.len_bytes().map_err(|error| ImageError::io("get the length of the file", &**store, 0, error))?;
    let structures = tables.structures();
    let mut structures = structures.iter().cloned().peekable();
    let mut grains = starts.iter().map(|&start| u64::from(start) * SECTOR_BYTES).peekable();
    let overhead = tables.header.as_ref().map_or(0, |header| header.overhead_sectors.saturating_mul(SECTOR_BYTES));
    let (mut end, mut first, mut leaked_bytes) = (overhead.min(len_bytes), None, 0);
    loop {
        let next = match (grains.peek(), structures.peek()) {
            (Some(&grain), Some(other)) if grain < other.start => grains.next().map(|at| at..at + tables.grain_bytes),
            (_, Some(_)) => structures.next(),
            (Some(_), None) => grains.next().map(|at| at..at + tables.grain_bytes),
            (None, None) => None,
        };
        let until = next.as_ref().map_or(len_bytes, |range| range.start);
        let gap = FileRange { offset_bytes: end, len_bytes: until.saturating_sub(end) };
        if gap.len_bytes >= tables.grain_bytes && !is_hole(&**store, gap)? {
            leaked_bytes += gap.len_bytes;
            first.get_or_insert(end);
        }
        let Some(range) = next else { break };
        end = end.max(range.end);
    }
    if let Some(at) = first {
        let name = store.name().display();
        let message = format!("{name}: {leaked_bytes} bytes, from offset {at} on, are named by no entry.");
        let found = format!("{leaked_bytes} bytes");
        findings.add(Finding::new(Severity::Leak, at, "file", found, "none that no entry names").says(message));
    }
    Ok(leaked_bytes)
}

/// Compares both copies of the grain tables. Readers use the first, and the second where the first
/// cannot be right.
///
/// A grain that only the second copy names was freed or written before a cut, or its first entry
/// was wiped: nothing tells these apart, so no repair decides it. Other entries become equal, which
/// changes nothing that is read.
fn compare_copies(tables: &Tables, store: &Arc<dyn Store>, findings: &mut Findings) -> Result<()> {
    let [first, second] = &tables.entries[..] else { return Ok(()) };
    let name = store.name().display();
    let (mut differing, mut only_second, mut mended_first) = (0_u64, 0_u64, 0_u64);
    let (mut of_first, mut of_second) = (Vec::new(), Vec::new());
    let is_lost = |entry| entry == GRAIN_ABSENT || entry == LOST;
    for (table, (&one, &other)) in (0_u64..).zip(first.iter().zip(second)) {
        let grain = table * tables.table_entries;
        let count = tables.table_entries.min(tables.grains() - grain) as usize;
        if is_lost(one) || is_lost(other) {
            differing += u64::from(one != other);
            if one == GRAIN_ABSENT && other != LOST && other != one {
                let mut raw = vec![0; count];
                tables.read_raw(&**store, tables.table_place(other), grain, &mut raw)?;
                only_second += raw.iter().filter(|&&raw| raw > u64::from(GRAIN_ZERO)).count() as u64;
            }
            continue;
        }
        if one == other {
            continue;
        }
        let mut raw = [vec![0; count], vec![0; count]];
        for (raw, entry) in raw.iter_mut().zip([one, other]) {
            tables.read_raw(&**store, tables.table_place(entry), grain, raw)?;
        }
        let [mut raw, mut redundant] = raw;
        if raw == redundant {
            continue;
        }
        differing += 1;
        let (had, had_redundant) = (raw.clone(), redundant.clone());
        for (grain, (raw, redundant)) in (grain..).zip(raw.iter_mut().zip(&mut redundant)) {
            let entries = (tables.decode(&**store, grain, *raw)?, tables.decode(&**store, grain, *redundant)?);
            match entries {
                _ if raw == redundant => {}
                (Entry::Absent, Entry::At(_)) => only_second += 1,
                (Entry::Bad(_), Entry::At(_)) => *raw = *redundant,
                (Entry::Bad(_), _) => {}
                _ => *redundant = *raw,
            }
        }
        let bytes = |raw: &[u64]| raw.iter().flat_map(|&raw| (raw as u32).to_le_bytes()).collect::<Vec<u8>>();
        mended_first += had.iter().zip(&raw).filter(|(had, now)| had != now).count() as u64;
        if had != raw {
            of_first.push(Change::Write(tables.table_place(one), bytes(&raw)));
        }
        if had_redundant != redundant {
            of_second.push(Change::Write(tables.table_place(other), bytes(&redundant)));
        }
    }
    let is_hosted = tables.header.is_some();
    let place = |index: usize| tables.directories.get(index).copied().unwrap_or(0);
    if mended_first > 0 && is_hosted {
        let message = format!(
            "{name}: {mended_first} entries of grain tables are invalid; the redundant tables have valid ones."
        );
        let found = format!("{mended_first} invalid entries");
        let finding = Finding::new(Severity::Corrupt, place(0), "grain tables", found, "grains in the file");
        findings.add_repairable(finding.says(message), "the entries get the values of the redundant tables", of_first);
    }
    if only_second > 0 {
        let message = format!(
            "{name}: {only_second} grains are named only by the redundant tables: a write was cut short, or the first tables are damaged. `rescue` reads them."
        );
        let found = format!("{only_second} grains without an entry in the first tables");
        findings
            .add(Finding::new(Severity::Leak, place(1), "redundant grain tables", found, "equal copies").says(message));
    }
    if differing > 0 {
        let message =
            format!("{name}: {differing} grain tables differ from their redundant copies; the first copies count.");
        let found = format!("{differing} tables that differ");
        let finding =
            Finding::new(Severity::Note, place(1), "redundant grain tables", found, "equal copies").says(message);
        if of_second.is_empty() || !is_hosted {
            findings.add(finding);
        } else {
            findings.add_repairable(finding, "the redundant tables get the entries of the first ones", of_second);
        }
    }
    Ok(())
}
