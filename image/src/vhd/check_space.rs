//! Finds misplaced blocks, overlaps and leaked space of a VHD with blocks, and says how they are
//! repaired.
//!
//! ```text
//!   block beyond the end of the file      given up: the entry is cleared
//!   block that the end of the file cuts   the footer moves behind it; the missing part is lost
//!   two blocks in one place               the one that is met later is given up
//!   space between blocks                  a hole in the file, if this program has made the file;
//!                                         holes are not leaked
//!   space after the last block            the footer moves down, and the file is cut
//! ```
//!
//! A parent locator may declare more space than the file has. Then the space from the locator on is
//! reported where it is unused, and no repair gives it back: it may be the locator's.
//!
//! A child's block that is given up reads as the parent's data, as a VHD has no mark for zeros
//! without space.

use super::{
    PAGE_BYTES,
    layout::{Blocks, Layout, Piece},
    order::{self, WalkItem},
    overlaps, table,
};
use crate::{
    Result,
    findings::{Change, CheckReport, FINDINGS_MAX, Finding, Findings, Severity, is_hole},
};
use diskwright_format::vhd::{BAT_UNUSED, FOOTER_BYTES, SECTOR_BYTES};
use diskwright_store::{FileRange, Store};
use std::{collections::HashMap, ops::Range};

/// Overlaps that one round of a repair removes.
const PAIRS_MAX: usize = 1 << 16;

/// A power cut during growth leaves a file without a footer at its end, and every reader handles
/// it.
pub(super) fn missing_tail(len_bytes: u64) -> Finding {
    let at = len_bytes.saturating_sub(FOOTER_BYTES as u64);
    Finding::new(Severity::Note, at, "footer at the end", "no valid footer", "the footer")
        .says("The footer at the end is missing or damaged; its copy at offset 0 is valid. The next write repairs it.")
}

/// Two overlapping blocks: the BAT entry of the one that begins first, and of the other.
struct Overlap {
    first: u32,
    second: u32,
    /// Number of the second block, if both have the same entry.
    duplicate: Option<u64>,
}

/// The range of the disk that a block holds.
fn range_of(layout: &Layout, blocks: &Blocks, block: u64) -> Range<u64> {
    let start = block * blocks.block_bytes;
    start..(start + blocks.block_bytes).min(layout.size_bytes)
}

fn give_up_entry(layout: &Layout, blocks: &Blocks, block: u64, finding: Finding, findings: &mut Findings) {
    let what = if blocks.is_differencing {
        format!("block {block} is given up: its entry is cleared, and the parent's data show there")
    } else {
        format!("block {block} is given up: its entry is cleared, and it reads as zeros")
    };
    let change = Change::Write(blocks.entry_offset(block), BAT_UNUSED.to_be_bytes().to_vec());
    findings.give_up(finding, Some(range_of(layout, blocks, block)), what, vec![change]);
}

/// Whether the file ends within the payload of the piece, which is valid otherwise.
fn is_cut(blocks: &Blocks, piece: &Piece, data_end: u64) -> bool {
    (piece.payload_offset..piece.end).contains(&data_end) && blocks.fault_of(piece, u64::MAX).is_none()
}

/// The changes that move the footer from `data_end` to `place` behind it.
fn moved_up(layout: &Layout, data_end: u64, place: u64) -> Vec<Change> {
    let cleared = data_end..place.min(data_end.next_multiple_of(SECTOR_BYTES) + FOOTER_BYTES as u64);
    let cleared = FileRange { offset_bytes: cleared.start, len_bytes: cleared.end - cleared.start };
    vec![Change::Write(place, layout.footer_bytes.to_vec()), Change::Free(cleared)]
}

/// Finds misplaced blocks, overlaps, and leaked space between blocks and tables.
pub(super) fn check_places(
    store: &dyn Store,
    layout: &Layout,
    blocks: &Blocks,
    data_end: u64,
    findings: &mut Findings,
    report: &mut CheckReport,
) -> Result<()> {
    // A block may be preceded by padding to a page, and by the unused part of its bitmap area.
    let padding = 2 * PAGE_BYTES;
    let tables_end = blocks.tables_end_bytes(data_end);
    let claimed_from = blocks.overlong_locator(data_end).unwrap_or(u64::MAX);
    let locators = locators(blocks);
    let mut used_end = tables_end;
    let (mut placed, mut holes, mut misplaced, mut overlaps_left_out) = (0, 0, 0u64, 0u64);
    let mut pairs = Vec::new();
    let pairs_max = if findings.for_repair() { PAIRS_MAX } else { FINDINGS_MAX };
    let mut overlap = |first, second, duplicate| {
        if pairs.len() < pairs_max {
            pairs.push(Overlap { first, second, duplicate });
        } else {
            overlaps_left_out += 1;
        }
    };
    // Where the footer is moved: behind the last block that the end of the file cuts.
    let mut cut_end = 0;
    table::scan(store, blocks, blocks.count, |_, entry| {
        let piece = blocks.place(entry);
        if is_cut(blocks, &piece, data_end) {
            cut_end = cut_end.max(piece.end.next_multiple_of(SECTOR_BYTES));
        }
        Ok(true)
    })?;
    order::walk(store, blocks, data_end, &mut |item| {
        let (entry, piece, before, free_from) = match item {
            WalkItem::Misplaced { block, piece } => {
                misplaced += 1;
                let (found, expected) = blocks.fault_of(&piece, data_end).unwrap_or_default();
                let message = format!("Block {block} is misplaced: found {found}, expected {expected}.");
                let structure = format!("BAT entry of block {block}");
                let finding = Finding::new(Severity::Corrupt, blocks.entry_offset(block), structure, found, expected);
                let finding = finding.says(message);
                if is_cut(blocks, &piece, data_end) {
                    let whole = range_of(layout, blocks, block);
                    let costs = (whole.start + (data_end - piece.payload_offset)).min(whole.end)..whole.end;
                    let what = format!(
                        "the footer moves behind the last block, to offset {cut_end}, and the part of block {block} that is missing reads as zeros"
                    );
                    findings.give_up(finding, Some(costs), what, moved_up(layout, data_end, cut_end));
                } else {
                    give_up_entry(layout, blocks, block, finding, findings);
                }
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
        if let Some(range) = locators.iter().find(|range| overlaps(range, &(piece.bitmap_offset..piece.end))) {
            let message = format!(
                "A block at offset {} to {} lies on the parent locator at {} to {}: writes to the one change the other. A new link to the parent gets another place.",
                piece.bitmap_offset, piece.end, range.start, range.end
            );
            let found = format!("a block at {}, which overlaps it", piece.bitmap_offset);
            let finding = Finding::new(Severity::Corrupt, range.start, "parent locator", found, "space of its own");
            findings.add(finding.says(message));
        }
        match before {
            Some((other, end)) if end > piece.bitmap_offset => overlap(other, entry, None),
            _ if piece.bitmap_offset >= free_from.saturating_add(padding) => {
                let gap = piece.bitmap_offset - free_from;
                holes += gap / blocks.piece_bytes();
                let place = if before.is_some() { "between two blocks" } else { "before the first block" };
                let range = FileRange { offset_bytes: free_from, len_bytes: gap };
                let may_be_freed = layout.footer.is_ours() && piece.bitmap_offset <= claimed_from;
                report.leaked_bytes += unused(store, range, place, may_be_freed, findings)?;
            }
            _ => {}
        }
        Ok(())
    })?;
    report_overlaps(store, layout, blocks, &pairs, findings)?;
    for _ in 0..overlaps_left_out {
        let finding = Finding::new(
            Severity::Corrupt,
            blocks.table_offset,
            "block allocation table",
            "two blocks that overlap",
            "blocks that do not overlap",
        );
        findings.give_up(finding.says("Two blocks overlap."), None, "a later round gives one of them up", Vec::new());
    }
    let slack = data_end.saturating_sub(used_end);
    if layout.tail_offset_bytes.is_none() {
        // Behind the last block if nothing else is there. If more is there, it may belong to a
        // block.
        let footer_bytes = FOOTER_BYTES as u64;
        let is_in_place = misplaced == 0 && slack <= footer_bytes + padding && claimed_from == u64::MAX;
        let place = (if is_in_place { used_end } else { data_end }).next_multiple_of(SECTOR_BYTES);
        let changes = vec![Change::Write(place, layout.footer_bytes.to_vec()), Change::Cut(place + footer_bytes)];
        let what = format!("the footer at the end is written from its copy, at offset {place}");
        findings.add_repairable(missing_tail(layout.len_bytes), what, changes);
    }
    if blocks.is_reserved(used_end, data_end, placed + holes) {
        let message = format!("{slack} bytes are reserved for blocks that have no data yet.");
        let found = format!("{slack} bytes without data");
        findings.add(Finding::new(Severity::Note, used_end, "end of the file", found, "").says(message));
    } else if slack >= padding {
        report.leaked_bytes += slack;
        let message =
            format!("{slack} bytes between the last block and the footer are unused; was the disk not closed?");
        let place = used_end.next_multiple_of(SECTOR_BYTES);
        let found = format!("{slack} unused bytes");
        let finding = Finding::new(Severity::Leak, used_end, "end of the file", found, "the footer").says(message);
        let changes =
            vec![Change::Write(place, layout.footer_bytes.to_vec()), Change::Cut(place + FOOTER_BYTES as u64)];
        if claimed_from == u64::MAX {
            findings.add_repairable(
                finding,
                "the footer moves behind the last block, and the file is cut there",
                changes,
            );
        } else {
            findings.add(finding);
        }
    }
    Ok(())
}

/// Reports space that nothing refers to. Space that was given back to the file system is only
/// noted. Returns the number of bytes.
fn unused(
    store: &dyn Store,
    range: FileRange,
    place: &str,
    may_be_freed: bool,
    findings: &mut Findings,
) -> Result<u64> {
    let gap = range.len_bytes;
    let finding = |severity, message: String| {
        let found = format!("{gap} unused bytes {place}");
        Finding::new(severity, range.offset_bytes, "space in the file", found, "a block or a table").says(message)
    };
    if is_hole(store, range)? {
        let message = format!("{gap} bytes {place} are unused; they are a hole, which takes no room on the disk.");
        findings.add(finding(Severity::Note, message));
        return Ok(gap);
    }
    let finding = finding(Severity::Leak, format!("{gap} bytes {place} are unused."));
    if may_be_freed {
        findings.add_repairable(finding, "the space is given back as a hole in the file", vec![Change::Free(range)]);
    } else {
        // The program that made the file may have something there, or a parent locator.
        findings.add(finding);
    }
    Ok(gap)
}

/// The parent locators of a differencing disk.
fn locators(blocks: &Blocks) -> Vec<Range<u64>> {
    let used = blocks.header.locators.iter().filter(|entry| blocks.is_differencing && entry.kind().is_some());
    used.map(|entry| entry.data_offset..entry.data_offset.saturating_add(u64::from(entry.data_length_bytes))).collect()
}

/// Reports overlaps with the numbers of the blocks, which one more scan of the table finds.
fn report_overlaps(
    store: &dyn Store,
    layout: &Layout,
    blocks: &Blocks,
    overlaps: &[Overlap],
    findings: &mut Findings,
) -> Result<()> {
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
        let (end, start) = (blocks.place(first).end, blocks.place(second).bitmap_offset);
        let message = format!("Blocks {one} and {other} overlap: one ends at {end}, the other begins at {start}.");
        let found = format!("a block at offset {start}, where block {one} ends at {end}");
        let structure = format!("BAT entry of block {other}");
        let finding = Finding::new(Severity::Corrupt, blocks.entry_offset(other), structure, found, "space of its own");
        give_up_entry(layout, blocks, other, finding.says(message), findings);
    }
    Ok(())
}
