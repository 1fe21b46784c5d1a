//! Reports damage in a VHD, and how it is repaired. Reads only.
//!
//! ```text
//!   footers (footers.rs) ─▶ header ─▶ locators ─▶ bitmaps, batmap ─▶ places of all blocks
//!        │ damaged: from the copy, or rebuilt (rebuild.rs)             (check_space.rs)
//! ```
//!
//! Checks both footers, the header, the locators, then for every BAT entry that the block lies
//! inside the file and does not overlap the tables or other blocks. The bitmaps of dynamic disks
//! should be all ones. XenServer's batmap should agree with them. The bitmaps of a child may be
//! any, but they are read too: a block whose bitmap cannot be read cannot be read either. That is
//! one system call for each block, as the bitmaps lie between the blocks; of more than
//! [`BITMAPS_MAX`] blocks the rest is noted as not looked at.
//!
//! A footer is repaired from the one that readers use. If the file cannot be opened with that one
//! but with the other, the other is the right one.
//!
//! Memory is bounded by [`order`](super::order) and by [`Findings`].

use super::{
    PAGE_BYTES, bitmap,
    check_batmap::check_batmap,
    check_space::{check_places, missing_tail},
    footers::{ChosenFooter, Footers},
    layout::{Blocks, Layout, by_trust, read_locator},
    overlaps,
    rebuild::{rebuilt_fixed_footer, rebuilt_header},
    table,
};
use crate::{
    Result,
    findings::{Change, CheckOutcome, CheckReport, Finding, Findings, Severity, corruption},
};
use diskwright_format::vhd::{BAT_UNUSED, DiskKind, FEATURE_RESERVED, FOOTER_BYTES};
use diskwright_store::Store;
use std::sync::Arc;

/// Most bitmaps that a check reads: those of 2 TiB in blocks of 512 KiB.
const BITMAPS_MAX: u64 = 1 << 22;

/// Checks the VHD in `store`; with `for_repair` also says how it is repaired.
///
/// # Errors
/// `NotAnImage` if there is no footer at all; `Io`. Damage is in the report.
pub(crate) fn examine(store: Arc<dyn Store>, for_repair: bool) -> Result<CheckOutcome> {
    let store = &*store;
    let mut findings = Findings::new(for_repair);
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
    Ok(findings.finish(report))
}

fn note(offset_bytes: u64, structure: &str, found: &str, expected: &str, message: impl Into<String>) -> Finding {
    Finding::new(Severity::Note, offset_bytes, structure, found, expected).says(message)
}

/// The finding for a corrupt structure, in the words of this check.
fn damage(error: crate::ImageError) -> Result<Finding> {
    let finding = match error {
        corrupt @ crate::ImageError::Corrupt { .. } => corruption(corrupt)?,
        other => return Err(other),
    };
    let message =
        format!("The {} is damaged: found {}, expected {}.", finding.structure, finding.found, finding.expected);
    Ok(finding.says(message))
}

fn check_structures(store: &dyn Store, footers: &Footers, findings: &mut Findings) -> Result<Option<Layout>> {
    let chosen = match footers.choose(store) {
        Ok(chosen) => chosen,
        Err(error) => {
            let finding = damage(error)?;
            match rebuilt_fixed_footer(store, footers)? {
                Some((offset_bytes, bytes)) => findings.add_repairable(
                    finding,
                    "the footer is rebuilt: a fixed disk that fills the file up to its footer, whose identity cannot be verified",
                    vec![Change::Write(offset_bytes, bytes.to_vec())],
                ),
                None => findings.add(finding),
            }
            return Ok(None);
        }
    };
    let layout = Layout::from_footer(store, chosen.clone(), footers.len_bytes).map(|(layout, _)| layout);
    // No repair is built on a footer with which the file cannot be opened.
    let is_usable = layout.is_ok();
    check_footers(footers, &chosen, is_usable, findings);
    match layout {
        Ok(layout) => Ok(Some(layout)),
        Err(error) => {
            let finding = damage(error)?;
            if let Some(change) = other_footer(store, footers, &chosen)? {
                findings.add_repairable(
                    finding,
                    "the footer is written from its other copy, with which the disk opens",
                    vec![change],
                );
            } else if let Some((offset_bytes, bytes)) = rebuilt_header(store, &chosen, footers.len_bytes)? {
                let what = "the header is rebuilt; it is the only one that fits the footer, the file and the checksum";
                findings.add_repairable(finding, what, vec![Change::Write(offset_bytes, bytes.to_vec())]);
            } else {
                findings.add(finding);
            }
            Ok(None)
        }
    }
}

/// The change that makes readers use the other footer, if the file can be opened with it.
fn other_footer(store: &dyn Store, footers: &Footers, chosen: &ChosenFooter) -> Result<Option<Change>> {
    let (Ok(tail), Ok(copy)) = (&footers.tail, &footers.copy) else { return Ok(None) };
    if chosen.found.footer.kind == DiskKind::Fixed || copy.footer.kind == DiskKind::Fixed {
        return Ok(None);
    }
    // What looks like another disk's footer may be the guest's data.
    if tail.footer.unique_id != copy.footer.unique_id {
        return Ok(None);
    }
    let is_tail = chosen.found.offset_bytes == tail.offset_bytes;
    let (other, tail_offset_bytes) = if is_tail { (copy, None) } else { (tail, Some(tail.offset_bytes)) };
    let as_chosen = ChosenFooter {
        found: other.clone(),
        tail_offset_bytes,
        copy_is_right: false,
        contradiction: None,
        remarks: Vec::new(),
    };
    match Layout::from_footer(store, as_chosen, footers.len_bytes) {
        Ok(_) => Ok(Some(Change::Write(chosen.found.offset_bytes, other.bytes.to_vec()))),
        Err(crate::ImageError::Corrupt { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

fn check_footers(footers: &Footers, chosen: &ChosenFooter, is_usable: bool, findings: &mut Findings) {
    let is_fixed = chosen.found.footer.kind == DiskKind::Fixed;
    // With a file that can be opened `check_space.rs` reports it, and knows where the footer
    // belongs.
    if chosen.tail_offset_bytes.is_none() && !is_usable {
        findings.add(missing_tail(footers.len_bytes));
    }
    let mut add = |finding: Finding, what: &str, change: Change| {
        if is_usable { findings.add_repairable(finding, what, vec![change]) } else { findings.add(finding) }
    };
    if !is_fixed {
        let from_tail = "the copy of the footer at offset 0 is written from the footer at the end";
        let copy_of_used = Change::Write(0, chosen.found.bytes.to_vec());
        match &footers.copy {
            Err(error) => {
                let (found, expected) = (error.fault.to_string(), error.fault.expected().to_string());
                let message = format!(
                    "The copy of the footer at offset 0 is damaged: found {found}, expected {expected}. The next write repairs it."
                );
                let structure = "copy of the footer";
                let finding = Finding::new(Severity::Corrupt, error.offset_bytes, structure, found, expected);
                add(finding.says(message), from_tail, copy_of_used);
            }
            Ok(copy) if let Some(message) = footers.contradiction() => {
                let finding = Finding::new(
                    Severity::Corrupt,
                    copy.offset_bytes + 48,
                    "copy of the footer",
                    "another size or type than in the footer at the end",
                    "equal footers",
                );
                if chosen.found.offset_bytes == copy.offset_bytes {
                    // The footer at the end counts as missing, and is written for that reason.
                    add(finding.says(message), "the footer at the end is written from its copy", copy_of_used);
                } else {
                    add(finding.says(message), from_tail, copy_of_used);
                }
            }
            Ok(copy) if copy.bytes != chosen.found.bytes => {
                let message = "The copy of the footer at offset 0 differs from the footer at the end.";
                let finding = note(0, "copy of the footer", "another footer than at the end", "equal footers", message);
                add(finding, from_tail, copy_of_used);
            }
            Ok(_) => {}
        }
    }
    let found = &chosen.found;
    let at = found.offset_bytes;
    if found.is_old {
        let message = "The footer has 511 bytes, as in files by Virtual PC before 2004.";
        findings.add(note(at, "footer", "511 bytes", "512 bytes", message));
    }
    if found.footer.features & FEATURE_RESERVED == 0 {
        findings.add(note(at + 8, "footer", "feature bit 2 clear", "set", "The feature bit 2 is clear, expected set."));
    }
    if found.footer.saved_state {
        let message = "The virtual machine is in saved state; changes of the disk may corrupt its file systems.";
        findings.add(note(at + 84, "footer", "the mark of a saved state", "", message));
    }
    if is_fixed && found.footer.data_offset != u64::MAX {
        let message = "A fixed disk has no header, but its footer has an offset for one.";
        findings.add(note(at + 16, "footer", "an offset of a header", "no header in a fixed disk", message));
    }
}

fn check_fixed(layout: &Layout, findings: &mut Findings, report: &mut CheckReport) {
    let end = layout.tail_offset_bytes.unwrap_or(layout.len_bytes);
    let footer_end = end.saturating_add(FOOTER_BYTES as u64);
    if layout.len_bytes > footer_end {
        let behind = layout.len_bytes - footer_end;
        report.leaked_bytes = behind;
        let message = format!(
            "{behind} bytes of zeros follow the footer: a growth of the disk was cut short. Other programs do not find the footer."
        );
        let found = format!("{behind} bytes behind it");
        let finding = Finding::new(Severity::Leak, end, "footer", found, "the end of the file").says(message);
        findings.add_repairable(finding, "the file is cut behind its footer", vec![Change::Cut(footer_end)]);
        return;
    }
    if let Some(surplus @ 1..) = end.checked_sub(layout.size_bytes) {
        report.leaked_bytes = surplus;
        let message = format!("{surplus} bytes between the end of the disk and the footer are unused.");
        let found = format!("{surplus} unused bytes");
        let place = layout.size_bytes;
        let finding = Finding::new(Severity::Leak, place, "end of the disk", found, "the footer").says(message);
        // With some creators the geometry is the size, and other readers take the larger one.
        let is_free = layout.footer.current_size_bytes == place;
        if is_free && surplus >= FOOTER_BYTES as u64 {
            let changes =
                vec![Change::Write(place, layout.footer_bytes.to_vec()), Change::Cut(place + FOOTER_BYTES as u64)];
            findings.add_repairable(
                finding,
                "the footer moves to the end of the disk, and the file is cut there",
                changes,
            );
        } else {
            findings.add(finding);
        }
    }
}

/// A dynamic disk whose header names a parent may be a child whose footers were changed.
fn check_parent(blocks: &Blocks, findings: &mut Findings) {
    let Some(parent) = blocks.stray_parent() else { return };
    let message = format!(
        "The footer says that this disk is dynamic, but its header names {parent}. If it is a child, it reads zeros instead of the parent's data. It cannot be opened for writing."
    );
    let at = blocks.header_offset_bytes + 40;
    let expected = "no parent in a dynamic disk";
    findings.add(Finding::new(Severity::Corrupt, at, "dynamic disk header", parent, expected).says(message));
}

fn check_locators(store: &dyn Store, layout: &Layout, blocks: &Blocks, findings: &mut Findings) -> Result<()> {
    if !blocks.is_differencing {
        return Ok(());
    }
    let header_offset = blocks.header_offset_bytes;
    let mut readable = 0;
    for (index, entry) in by_trust(&blocks.header.locators) {
        let range = entry.data_offset..entry.data_offset.saturating_add(u64::from(entry.data_length_bytes));
        let place = header_offset + 576 + index as u64 * 24;
        match read_locator(store, entry, index, header_offset, layout.len_bytes)? {
            Err(fault) => {
                let finding = Finding::new(
                    Severity::Corrupt,
                    fault.1,
                    "parent locator",
                    "a locator that cannot be read",
                    "a path",
                );
                findings.add(finding.says(fault.0));
            }
            Ok(Some(_)) if let Some(table) = blocks.metadata.iter().find(|table| overlaps(table, &range)) => {
                let found = format!("a locator at offset {} to {}", range.start, range.end);
                let expected =
                    format!("one that does not overlap the image's tables at {} to {}", table.start, table.end);
                let message = format!("The parent locator is misplaced: found {found}, expected {expected}.");
                findings.add(Finding::new(Severity::Corrupt, place, "parent locator", found, expected).says(message));
            }
            Ok(Some(_)) => {
                readable += 1;
                let space_end = entry.data_offset.saturating_add(entry.space_bytes());
                if space_end > layout.len_bytes {
                    let found = format!("space up to {space_end}");
                    let expected = format!("space in the file, which ends at {}", layout.len_bytes);
                    let message = format!(
                        "The parent locator at offset {} can be read, but declares more space than there is: {found}, expected {expected}. What follows it is not given back.",
                        range.start
                    );
                    findings.add(note(place + 4, "parent locator", &found, &expected, message));
                }
            }
            Ok(None) => {
                let code = entry.code.to_be_bytes().escape_ascii().to_string();
                let message = format!("The parent locator for the platform \"{code}\" is ignored.");
                findings.add(note(place, "parent locator", &code, "a platform that is known", message));
            }
        }
    }
    if readable == 0 {
        let message = "No parent locator can be read: the user must name the parent.";
        findings.add(note(header_offset + 576, "parent locators", "none that can be read", "a path", message));
    }
    if blocks.header.parent_id.is_nil() {
        let message = "The parent's unique id is zero: any parent is accepted.";
        findings.add(note(header_offset + 40, "dynamic disk header", "no unique id of the parent", "an id", message));
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
    let (mut bitmaps, mut bitmaps_left_out) = (0, 0u64);
    let mut bits = vec![0; blocks.bitmap_bytes as usize];
    table::scan(store, blocks, blocks.count, |_, entry| {
        report.allocated_blocks += 1;
        let piece = blocks.place(entry);
        if blocks.fault_of(&piece, data_end).is_some() {
            return Ok(true);
        }
        unaligned += u64::from(!piece.payload_offset.is_multiple_of(PAGE_BYTES));
        if bitmaps == BITMAPS_MAX {
            bitmaps_left_out += 1;
            return Ok(true);
        }
        bitmaps += 1;
        bitmap::read_bytes(store, &piece, &mut bits)?;
        if !blocks.is_differencing && !bitmap::is_full_in_file(&bits, blocks.sectors) {
            holed.0 += 1;
            holed.1.get_or_insert(piece.bitmap_offset);
        }
        Ok(true)
    })?;
    if bitmaps_left_out > 0 {
        let message =
            format!("The sector bitmaps of {bitmaps_left_out} blocks were not read: there are too many blocks.");
        let found = format!("{bitmaps_left_out} bitmaps that were not read");
        findings.add(note(blocks.table_offset, "sector bitmap", &found, "", message));
    }
    if unaligned > 0 {
        let message = format!(
            "The data of {unaligned} of {} blocks are not at a multiple of 4096: writes to them are slower on most disks.",
            report.allocated_blocks
        );
        findings.add(note(
            blocks.table_offset,
            "block allocation table",
            "unaligned blocks",
            "aligned blocks",
            message,
        ));
    }
    if let (count, Some(first)) = holed {
        let message = format!(
            "{count} blocks of this dynamic disk have a bitmap that is not all ones, the first of them here. Sectors whose bit is clear read as zeros in VirtualBox and XenServer, and here unless this program made the file and all its blocks; QEMU returns the bytes stored there."
        );
        findings.add(note(first, "sector bitmap", "clear bits", "all ones in a dynamic disk", message));
    }
    check_surplus_entries(store, layout, blocks, findings)?;
    if let Some(batmap) = &blocks.batmap {
        check_batmap(batmap, store, blocks, data_end, findings)?;
    }
    check_places(store, layout, blocks, data_end, findings, report)
}

/// Entries for blocks beyond the end of the disk, in a table with more entries than the disk has
/// blocks. Their space is free for us, but other programs may count these blocks as allocated.
fn check_surplus_entries(store: &dyn Store, layout: &Layout, blocks: &Blocks, findings: &mut Findings) -> Result<()> {
    let all = u64::from(blocks.header.max_table_entries);
    let table_end = blocks.table_offset.saturating_add(all * 4).min(layout.len_bytes);
    // A table that runs into other structures has no surplus entries that could be told from these.
    let surplus = blocks.table_offset + blocks.table_bytes()..table_end;
    let others = || blocks.tables(layout.len_bytes).into_iter().filter(|table| table.start != blocks.table_offset);
    if surplus.start >= surplus.end || others().any(|table| overlaps(&table, &surplus)) {
        return Ok(());
    }
    let (mut count, mut first, mut changes) = (0u64, 0, Vec::new());
    let mut at = blocks.count;
    let end = blocks.count + (surplus.end - surplus.start) / 4;
    let mut entries = vec![0; 16384];
    while at < end {
        let entries = &mut entries[..(end - at).min(16384) as usize];
        table::read_entries(store, blocks, at, entries)?;
        for (block, &entry) in (at..).zip(&*entries) {
            let piece = blocks.place(entry);
            if entry == BAT_UNUSED || entry == 0 || blocks.fault_of(&piece, layout.len_bytes).is_some() {
                continue;
            }
            if count == 0 {
                first = block;
            }
            count += 1;
            if findings.for_repair() && changes.len() < 1 << 20 {
                changes.push(Change::Write(blocks.entry_offset(block), BAT_UNUSED.to_be_bytes().to_vec()));
            }
        }
        at += entries.len() as u64;
    }
    // A program that ignores these entries may have placed a block on them.
    let mut is_payload = false;
    table::scan(store, blocks, if count > 0 { blocks.count } else { 0 }, |_, entry| {
        let piece = blocks.place(entry);
        is_payload |= overlaps(&(piece.bitmap_offset..piece.end), &surplus);
        Ok(!is_payload)
    })?;
    if count > 0 && !is_payload {
        let message = format!(
            "{count} entries of the block allocation table, the first for block {first}, have space beyond the end of the disk, which has {} blocks.",
            blocks.count
        );
        let found = format!("{count} entries for blocks beyond the end of the disk");
        let finding = Finding::new(
            Severity::Leak,
            blocks.entry_offset(first),
            "block allocation table",
            found,
            format!("none from block {} on", blocks.count),
        );
        findings.add_repairable(finding.says(message), "the entries are cleared", changes);
    }
    Ok(())
}
