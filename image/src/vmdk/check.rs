//! Reports damage in a VMDK, and says how copies of tables become equal.
//!
//! ```text
//!   descriptor ─▶ parts ─▶ each sparse extent: directories ─▶ entries ─▶ overlaps, both copies
//!
//!   table of the second directory only    the first directory gets a copy of it, at the end of the
//!                                         file
//!   table, entry or grain that no copy    given up (`give_up.rs`)
//!   can tell, two grains in one place
//!   space that no entry names             a hole in the file
//! ```
//!
//! The caller reports files that cannot be opened; the check ends there, as the disk cannot be
//! read. Memory: 4 bytes for each grain of a file, bounded by its length.

use super::{
    document::Document,
    give_up::Checked,
    image::scan,
    layout::{FilePart, Layout},
    tables::{Entry, LOST},
    text,
};
use crate::{
    ImageError, Result,
    findings::{Change, CheckOutcome, CheckReport, Finding, Findings, Severity, corruption, is_hole},
};
use diskwright_format::vmdk::{COWD_FREE_AT, GRAIN_ABSENT, GRAIN_ZERO, SECTOR_BYTES};
use diskwright_store::{Barrier, FileRange, Store};
use std::sync::Arc;

/// Unused ranges that one round of a repair gives back.
const HOLES_MAX: usize = 1 << 16;

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
    for index in 0..layout.extents.len() {
        check_extent(&Checked::new(&layout, index), &mut findings, &mut report)?;
    }
    Ok(findings.finish(report))
}

/// Gives the image another CID before a repair that gives up data.
///
/// # Errors
/// `Io`.
pub(crate) fn begin_repair(store: &Arc<dyn Store>, costs_data: bool) -> Result<()> {
    match Layout::read(vec![Arc::clone(store)]) {
        Ok(layout) if costs_data && layout.head.text.is_some() => {
            Document::read(&layout)?.begin(&Barrier::new(Arc::clone(store)))
        }
        Err(error @ ImageError::Io { .. }) => Err(error),
        _ => Ok(()),
    }
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

fn check_extent(checked: &Checked<'_>, findings: &mut Findings, report: &mut CheckReport) -> Result<()> {
    let (tables, store) = (checked.tables, checked.store);
    check_directories(checked, findings)?;
    let name = store.name().display();
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
                checked.give_up_grain(grain, finding.says(message), findings);
            }
            Entry::At(at) => {
                report.allocated_blocks += 1;
                starts.push((at / SECTOR_BYTES) as u32);
                if tables.is_compressed()
                    && let Err(error) = tables.decompress(&**store, grain, at)
                {
                    compressed_errors.push((grain, error));
                }
            }
            Entry::Absent | Entry::Zero => {}
        }
        // More grains than sectors: they overlap, which is found below.
        Ok(starts.len() as u64 <= most && compressed_errors.len() < 1000)
    })?;
    for (grain, error) in compressed_errors {
        checked.give_up_grain(grain, corruption(error)?, findings);
    }
    starts.sort_unstable();
    checked.report_overlaps(&starts, findings)?;
    check_free_sector(checked, &starts, findings);
    let only_second = compare_copies(checked, findings)?;
    // A session that has not closed the file has space that no entry names yet.
    if tables.unclean_at().is_some() && !tables.is_unclean && !tables.is_compressed() {
        report.leaked_bytes += leaked(checked, &starts, only_second == 0, findings)?;
    }
    Ok(())
}

/// Tables that no directory names, or only the second one.
fn check_directories(checked: &Checked<'_>, findings: &mut Findings) -> Result<()> {
    let (tables, store) = (checked.tables, checked.store);
    let name = store.name().display();
    for (table, _) in (0..).zip(&tables.entries[0]).filter(|(_, entry)| **entry == LOST) {
        let message = format!("{name}: grain table {table} lies outside of the file, and no copy of it was found.");
        let at = tables.directories[0];
        let finding = Finding::new(Severity::Corrupt, at, "grain directory", format!("entry {table}"), "a table");
        checked.give_up_table(table, finding.says(message), findings);
    }
    let [directory, _] = tables.directories[..] else { return Ok(()) };
    let len_bytes = text::len_of(&**store)?;
    // A file that grows by more than that has lost its directory rather than entries of it.
    let tables_max = (64 << 20) / tables.table_bytes().max(1);
    let mut end = len_bytes.next_multiple_of(SECTOR_BYTES);
    for (&table, place) in tables.only_second.iter().zip(0..) {
        let message = format!("{name}: only the redundant directory names grain table {table}.");
        let at = tables.directory_entry_offset(directory, table);
        let finding = Finding::new(Severity::Corrupt, at, "grain directory", "no table in the file", "a table");
        let finding = finding.says(message);
        let entry = tables.entries[1].get(table as usize).copied().unwrap_or(LOST);
        let sector = u32::try_from(end / SECTOR_BYTES).ok();
        let has_room = directory != 0 && directory.saturating_add(tables.tables().saturating_mul(4)) <= len_bytes;
        let (Some(sector), true) = (sector, checked.may_repair && has_room && place < tables_max && entry != LOST)
        else {
            findings.add(finding);
            continue;
        };
        let mut changes = Vec::new();
        if findings.for_repair() {
            let from = tables.table_place(entry);
            let mut copy = vec![0; tables.table_bytes() as usize];
            store
                .read_at(&mut copy, from)
                .map_err(|error| ImageError::io("read a grain table", &**store, from, error))?;
            changes = vec![Change::Write(end, copy), Change::Write(at, sector.to_le_bytes().to_vec())];
        }
        end += tables.table_bytes();
        findings.add_repairable(finding, "it gets a copy of the redundant table, at the end of the file", changes);
    }
    Ok(())
}

/// A COWD extent whose header calls a sector free that has data: ESX would put its next grain
/// there. `starts` are the places of the grains in sectors, sorted.
fn check_free_sector(checked: &Checked<'_>, starts: &[u32], findings: &mut Findings) {
    let tables = checked.tables;
    let Some(free) = tables.free_sector else { return };
    let grains_end = starts.last().map_or(0, |&start| u64::from(start) * SECTOR_BYTES + tables.grain_bytes);
    let used = grains_end.max(tables.taken_end_bytes()).div_ceil(SECTOR_BYTES);
    if u64::from(free) >= used {
        return;
    }
    let message = format!(
        "{}: the header calls sector {free} the next free one, but sectors up to {used} are in use: ESX would overwrite them. The next write by this program counts them.",
        checked.store.name().display()
    );
    let finding = Finding::new(
        Severity::Corrupt,
        COWD_FREE_AT,
        "COWD header",
        format!("sector {free}"),
        format!("sector {used}"),
    );
    match u32::try_from(used) {
        Ok(used) if checked.may_repair => {
            let changes = vec![Change::Write(COWD_FREE_AT, used.to_le_bytes().to_vec())];
            findings.add_repairable(finding.says(message), "the header counts all sectors in use", changes);
        }
        _ => findings.add(finding.says(message)),
    }
}

/// Space of a grain between structures that no entry names. Holes of the file are not leaked.
/// Returns its bytes. `starts` are the places of the grains in sectors, sorted. `may_free`: no data
/// can lie there that only a redundant table names.
fn leaked(checked: &Checked<'_>, starts: &[u32], may_free: bool, findings: &mut Findings) -> Result<u64> {
    let (tables, store) = (checked.tables, checked.store);
    let len_bytes =
        store.len_bytes().map_err(|error| ImageError::io("get the length of the file", &**store, 0, error))?;
    let structures = tables.structures();
    let mut structures = structures.iter().cloned().peekable();
    let mut grains = starts.iter().map(|&start| u64::from(start) * SECTOR_BYTES).peekable();
    let overhead = tables.header.as_ref().map_or(0, |header| header.overhead_sectors.saturating_mul(SECTOR_BYTES));
    let (mut end, mut first, mut leaked_bytes) = (overhead.min(len_bytes), None, 0);
    let mut changes = Vec::new();
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
            if changes.len() < HOLES_MAX {
                changes.push(Change::Free(gap));
            }
        }
        let Some(range) = next else { break };
        end = end.max(range.end);
    }
    if let Some(at) = first {
        let name = store.name().display();
        let message = format!("{name}: {leaked_bytes} bytes, from offset {at} on, are named by no entry.");
        let found = format!("{leaked_bytes} bytes");
        let finding = Finding::new(Severity::Leak, at, "file", found, "none that no entry names").says(message);
        if may_free && checked.may_repair {
            findings.add_repairable(finding, format!("{leaked_bytes} bytes become holes of the file"), changes);
        } else {
            findings.add(finding);
        }
    }
    Ok(leaked_bytes)
}

/// Compares both copies of the grain tables. Readers use the first, and the second where the first
/// cannot be right.
///
/// A grain that only the second copy names was freed or written before a cut, or its first entry
/// was wiped: nothing tells these apart, so no repair decides it. Other entries become equal, which
/// changes nothing that is read.
/// Such a grain can only be given up. Returns the number of these grains.
fn compare_copies(checked: &Checked<'_>, findings: &mut Findings) -> Result<u64> {
    let (tables, store) = (checked.tables, checked.store);
    let [first, second] = &tables.entries[..] else { return Ok(0) };
    let name = store.name().display();
    let (mut differing, mut only_second, mut mended_first) = (0_u64, 0_u64, 0_u64);
    let (mut of_first, mut of_second, mut without) = (Vec::new(), Vec::new(), Vec::new());
    let is_lost = |entry| entry == GRAIN_ABSENT || entry == LOST;
    for (table, (&one, &other)) in (0_u64..).zip(first.iter().zip(second)) {
        let grain = table * tables.table_entries;
        let count = tables.table_entries.min(tables.grains() - grain) as usize;
        if is_lost(one) || is_lost(other) {
            differing += u64::from(one != other);
            if one == GRAIN_ABSENT && other != LOST && other != one {
                let mut raw = vec![0; count];
                tables.read_raw(&**store, tables.table_place(other), grain, &mut raw)?;
                let named = raw.iter().filter(|&&raw| raw > u64::from(GRAIN_ZERO)).count() as u64;
                only_second += named;
                if named > 0 {
                    without.push(Change::Write(tables.table_place(other), vec![0; count * 4]));
                }
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
        let before = only_second;
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
        if only_second > before {
            without.push(Change::Write(tables.table_place(other), bytes(&raw)));
        }
        if had != raw {
            of_first.push(Change::Write(tables.table_place(one), bytes(&raw)));
        }
        if had_redundant != redundant {
            of_second.push(Change::Write(tables.table_place(other), bytes(&redundant)));
        }
    }
    let is_hosted = tables.header.is_some() && checked.may_repair;
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
        let finding = Finding::new(Severity::Leak, place(1), "redundant grain tables", found, "equal copies");
        let finding = finding.says(message);
        if is_hosted {
            let what = "the redundant tables get the entries of the first ones: what only they name is given up";
            findings.give_up(finding, None, what, without);
        } else {
            findings.add(finding);
        }
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
    Ok(only_second)
}
