//! Reports damage in a VHD. Reads only.
//!
//! Checks both footers, the header, the locators, then for every BAT entry that the block lies
//! inside the file and does not overlap the tables or other blocks. Space between the tables, the
//! blocks and the footer is leaked. The bitmaps of dynamic disks should be all ones. XenServer's
//! batmap should agree with them.
//!
//! Memory is bounded by [`order`] and by [`findings`](super::findings).

use super::{
    PAGE_BYTES, bitmap,
    check_batmap::check_batmap,
    findings::{Findings, MAX_FINDINGS},
    footers::Footers,
    layout::{Blocks, Layout, by_trust, read_locator},
    order::{self, WalkItem},
    table,
};
use crate::{CheckReport, ImageError, Result, Severity};
use diskwright_format::vhd::{DiskKind, FEATURE_RESERVED, FOOTER_BYTES};
use diskwright_store::Store;
use std::{collections::HashMap, sync::Arc};

/// Checks the VHD in `store`.
///
/// # Errors
/// `NotAnImage` if there is no footer at all; `Io`. Damage is in the report.
pub fn check(store: Arc<dyn Store>) -> Result<CheckReport> {
    let store = &*store;
    let mut findings = Findings::default();
    let mut report = CheckReport::default();
    let footers = Footers::read(store)?;
    if let Some(layout) = check_structures(store, &footers, &mut findings)? {
        match &layout.blocks {
            None => check_fixed(&layout, &mut findings, &mut report),
            Some(blocks) => {
                check_parent(blocks, &mut findings);
                check_locators(store, &layout, blocks, &mut findings)?;
                check_blocks(store, &layout, blocks, &mut findings, &mut report)?;
            }
        }
    }
    report.findings = findings.finish();
    Ok(report)
}

/// Converts a `Corrupt` error to a finding. Returns other errors.
fn corrupt_as_finding<T>(result: Result<T>, findings: &mut Findings) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(ImageError::Corrupt { structure, offset_bytes, found, expected, .. }) => {
            findings.add(
                Severity::Corrupt,
                offset_bytes,
                format!("The {structure} is damaged: found {found}, expected {expected}."),
            );
            Ok(None)
        }
        Err(other) => Err(other),
    }
}

fn check_structures(store: &dyn Store, footers: &Footers, findings: &mut Findings) -> Result<Option<Layout>> {
    let Some(chosen) = corrupt_as_finding(footers.choose(store), findings)? else { return Ok(None) };
    let is_fixed = chosen.found.footer.kind == DiskKind::Fixed;
    let tail_offset = footers.len_bytes.saturating_sub(FOOTER_BYTES as u64);
    if chosen.tail_offset_bytes.is_none() {
        // A power cut during growth leaves this state, and every reader handles it.
        findings.add(
            Severity::Note,
            tail_offset,
            "The footer at the end is missing or damaged; its copy at offset 0 is valid. The next write repairs it.",
        );
    }
    if !is_fixed {
        match &footers.copy {
            Err(error) => findings.add(
                Severity::Corrupt,
                error.offset_bytes,
                format!(
                    "The copy of the footer at offset 0 is damaged: found {}, expected {}. The next write repairs it.",
                    error.fault,
                    error.fault.expected()
                ),
            ),
            Ok(copy) if let Some(message) = footers.contradiction() => {
                findings.add(Severity::Corrupt, copy.offset_bytes + 48, message);
            }
            Ok(copy) if copy.bytes != chosen.found.bytes => {
                findings.add(
                    Severity::Note,
                    0,
                    "The copy of the footer at offset 0 differs from the footer at the end.",
                );
            }
            Ok(_) => {}
        }
    }
    let found = &chosen.found;
    let at = found.offset_bytes;
    if found.is_old {
        findings.add(Severity::Note, at, "The footer has 511 bytes, as in files by Virtual PC before 2004.");
    }
    if found.footer.features & FEATURE_RESERVED == 0 {
        findings.add(Severity::Note, at + 8, "The feature bit 2 is clear, expected set.");
    }
    if found.footer.saved_state {
        findings.add(
            Severity::Note,
            at + 84,
            "The virtual machine is in saved state; changes of the disk may corrupt its file systems.",
        );
    }
    if is_fixed && found.footer.data_offset != u64::MAX {
        findings.add(Severity::Note, at + 16, "A fixed disk has no header, but its footer has an offset for one.");
    }
    let layout = corrupt_as_finding(Layout::from_footer(store, chosen, footers.len_bytes), findings)?;
    Ok(layout.map(|(layout, _)| layout))
}

fn check_fixed(layout: &Layout, findings: &mut Findings, report: &mut CheckReport) {
    let end = layout.tail_offset_bytes.unwrap_or(layout.len_bytes);
    if let Some(surplus @ 1..) = end.checked_sub(layout.size_bytes) {
        report.leaked_bytes = surplus;
        let message = format!("{surplus} bytes between the end of the disk and the footer are unused.");
        findings.add(Severity::Leak, layout.size_bytes, message);
    }
}

/// A dynamic disk whose header names a parent may be a child whose footers were changed.
fn check_parent(blocks: &Blocks, findings: &mut Findings) {
    let Some(parent) = blocks.stray_parent() else { return };
    let message = format!(
        "The footer says that this disk is dynamic, but its header names {parent}. If it is a child, it reads zeros instead of the parent's data. It cannot be opened for writing."
    );
    findings.add(Severity::Corrupt, blocks.header_offset_bytes + 40, message);
}

fn check_locators(store: &dyn Store, layout: &Layout, blocks: &Blocks, findings: &mut Findings) -> Result<()> {
    if !blocks.is_differencing {
        return Ok(());
    }
    let header_offset = blocks.header_offset_bytes;
    let mut readable = 0;
    for (index, entry) in by_trust(&blocks.header.locators) {
        match read_locator(store, entry, index, header_offset, layout.len_bytes)? {
            Err(fault) => findings.add(Severity::Corrupt, fault.1, fault.0),
            Ok(Some(_)) => readable += 1,
            Ok(None) => {
                let code = entry.code.to_be_bytes();
                let message = format!("The parent locator for the platform \"{}\" is ignored.", code.escape_ascii());
                findings.add(Severity::Note, header_offset + 576 + index as u64 * 24, message);
            }
        }
    }
    if readable == 0 {
        let message = "No parent locator can be read: the user must name the parent.";
        findings.add(Severity::Note, header_offset + 576, message);
    }
    if blocks.header.parent_id.is_nil() {
        findings.add(Severity::Note, header_offset + 40, "The parent's unique id is zero: any parent is accepted.");
    }
    Ok(())
}

fn check_blocks(
    store: &dyn Store,
    layout: &Layout,
    blocks: &Blocks,
    findings: &mut Findings,
    report: &mut CheckReport,
) -> Result<()> {
    report.total_blocks = blocks.count;
    let data_end = layout.tail_offset_bytes.unwrap_or(layout.len_bytes);
    let mut unaligned = 0u64;
    let mut holed: (u64, Option<u64>) = (0, None);
    table::scan(store, blocks, blocks.count, |_, entry| {
        report.allocated_blocks += 1;
        let piece = blocks.place(entry);
        if blocks.fault_of(&piece, data_end).is_some() {
            return Ok(true);
        }
        unaligned += u64::from(!piece.payload_offset.is_multiple_of(PAGE_BYTES));
        if !blocks.is_differencing {
            let bits = bitmap::read(store, blocks, &piece)?;
            if !bitmap::is_full_to(&bits, blocks.sectors) {
                holed.0 += 1;
                holed.1.get_or_insert(piece.bitmap_offset);
            }
        }
        Ok(true)
    })?;
    if unaligned > 0 {
        let message = format!(
            "The data of {unaligned} of {} blocks are not at a multiple of 4096: writes to them are slower on most disks.",
            report.allocated_blocks
        );
        findings.add(Severity::Note, blocks.table_offset, message);
    }
    if let (count, Some(first)) = holed {
        let message = format!(
            "{count} blocks of this dynamic disk have a bitmap that is not all ones, the first of them here. Sectors whose bit is clear read as zeros; QEMU returns the bytes stored there."
        );
        findings.add(Severity::Note, first, message);
    }
    if let Some(batmap) = &blocks.batmap {
        check_batmap(batmap, store, blocks, data_end, findings)?;
    }
    check_places(store, blocks, data_end, findings, report)
}

/// Two overlapping blocks: the BAT entry of the one that begins first, and of the other.
struct Overlap {
    first: u32,
    second: u32,
    /// Number of the second block, if both have the same entry.
    duplicate: Option<u64>,
}

/// Finds misplaced blocks, overlaps, and leaked space between blocks and tables.
fn check_places(
    store: &dyn Store,
    blocks: &Blocks,
    data_end: u64,
    findings: &mut Findings,
    report: &mut CheckReport,
) -> Result<()> {
    // A block may be preceded by padding to a page, and by the unused part of its bitmap area.
    let padding = 2 * PAGE_BYTES;
    let tables_end = blocks.tables_end_bytes(data_end);
    let mut used_end = tables_end;
    let (mut placed, mut holes, mut overlaps_left_out) = (0, 0, 0u64);
    let mut overlaps = Vec::new();
    let mut overlap = |first, second, duplicate| {
        if overlaps.len() < MAX_FINDINGS {
            overlaps.push(Overlap { first, second, duplicate });
        } else {
            overlaps_left_out += 1;
        }
    };
    order::walk(store, blocks, data_end, &mut |item| {
        let (entry, piece, before, free_from) = match item {
            WalkItem::Misplaced { block, piece } => {
                let (found, expected) = blocks.fault_of(&piece, data_end).unwrap_or_default();
                let message = format!("Block {block} is misplaced: found {found}, expected {expected}.");
                findings.add(Severity::Corrupt, blocks.entry_offset(block), message);
                return Ok(());
            }
            WalkItem::Duplicate { block, entry } => {
                overlap(entry, entry, Some(block));
                return Ok(());
            }
            WalkItem::Block { entry, piece, before, free_from } => (entry, piece, before, free_from),
        };
        placed += 1;
        used_end = used_end.max(piece.end);
        match before {
            Some((other, end)) if end > piece.bitmap_offset => overlap(other, entry, None),
            _ if piece.bitmap_offset >= free_from.saturating_add(padding) => {
                let gap = piece.bitmap_offset - free_from;
                report.leaked_bytes += gap;
                holes += gap / blocks.piece_bytes();
                let place = if before.is_some() { "between two blocks" } else { "before the first block" };
                findings.add(Severity::Leak, free_from, format!("{gap} bytes {place} are unused."));
            }
            _ => {}
        }
        Ok(())
    })?;
    report_overlaps(store, blocks, &overlaps, findings)?;
    for _ in 0..overlaps_left_out {
        findings.add(Severity::Corrupt, blocks.table_offset, "Two blocks overlap.");
    }
    let slack = data_end.saturating_sub(used_end);
    if blocks.is_reserved(used_end, data_end, placed + holes) {
        let message = format!("{slack} bytes are reserved for blocks that have no data yet.");
        findings.add(Severity::Note, used_end, message);
    } else if slack >= padding {
        report.leaked_bytes += slack;
        let message =
            format!("{slack} bytes between the last block and the footer are unused; was the disk not closed?");
        findings.add(Severity::Leak, used_end, message);
    }
    Ok(())
}

/// Reports overlaps with the numbers of the blocks, which one more scan of the table finds.
fn report_overlaps(store: &dyn Store, blocks: &Blocks, overlaps: &[Overlap], findings: &mut Findings) -> Result<()> {
    if overlaps.is_empty() {
        return Ok(());
    }
    let mut names: HashMap<u32, Option<u64>> =
        overlaps.iter().flat_map(|overlap| [(overlap.first, None), (overlap.second, None)]).collect();
    table::scan(store, blocks, blocks.count, |block, entry| {
        if let Some(name) = names.get_mut(&entry) {
            name.get_or_insert(block);
        }
        Ok(true)
    })?;
    let name = |entry| names.get(&entry).copied().flatten().unwrap_or_default();
    for &Overlap { first, second, duplicate } in overlaps {
        let (one, other) = (name(first), duplicate.unwrap_or_else(|| name(second)));
        let message = format!(
            "Blocks {one} and {other} overlap: one ends at {}, the other begins at {}.",
            blocks.place(first).end,
            blocks.place(second).bitmap_offset
        );
        findings.add(Severity::Corrupt, blocks.entry_offset(other), message);
    }
    Ok(())
}
