//! What is wrong with a VHD. Reads only.
//!
//! Both footers, the header, the locators, then every BAT entry: does the block lie inside the file, clear of the tables
//! and of the other blocks? What lies between the blocks is leaked. The bitmaps of dynamic disks, which nobody needs but some read,
//! should be all ones.
//!
//! Memory is bounded by the blocks that fit into the file, and by [`MAX_FINDINGS`] for each severity; what is beyond
//! is counted and summed up in one sentence.

use super::{
    PAGE_BYTES, bitmap,
    footers::Footers,
    image::read_bitmap,
    layout::{Blocks, Layout, by_trust, read_locator},
    table,
};
use crate::{CheckReport, Finding, ImageError, Result, Severity};
use diskwright_format::vhd::{DiskKind, FEATURE_RESERVED, FOOTER_BYTES};
use diskwright_store::Store;
use std::sync::Arc;

/// Findings that are told one by one, of each severity.
const MAX_FINDINGS: usize = 1000;

#[derive(Default)]
struct Findings {
    list: Vec<Finding>,
    /// By severity: told, and left out.
    counts: [(usize, u64); 3],
}

impl Findings {
    fn add(&mut self, severity: Severity, offset_bytes: u64, message: impl Into<String>) {
        let (told, left_out) = &mut self.counts[severity as usize];
        if *told < MAX_FINDINGS {
            *told += 1;
            self.list.push(Finding { severity, offset_bytes, message: message.into() });
        } else {
            *left_out += 1;
        }
    }

    fn finish(mut self) -> Vec<Finding> {
        self.list.sort_by_key(|finding| finding.offset_bytes);
        let severities = [Severity::Note, Severity::Leak, Severity::Corrupt];
        for (severity, (_, left_out)) in severities.into_iter().zip(self.counts) {
            if left_out > 0 {
                let offset_bytes = self.list.last().map_or(0, |finding| finding.offset_bytes);
                let message = format!("{left_out} more findings of this kind were left out.");
                self.list.push(Finding { severity, offset_bytes, message });
            }
        }
        self.list
    }
}

/// Checks the VHD in `store`.
///
/// # Errors
/// `NotAnImage` when there is no footer at all; `Io`. What is wrong with the image is in the report.
pub fn check(store: Arc<dyn Store>) -> Result<CheckReport> {
    let store = &*store;
    let mut findings = Findings::default();
    let mut report = CheckReport::default();
    let footers = Footers::read(store)?;
    if let Some(layout) = check_structures(store, &footers, &mut findings)? {
        match &layout.blocks {
            None => check_fixed(&layout, &mut findings, &mut report),
            Some(blocks) => {
                check_locators(store, &layout, blocks, &mut findings)?;
                check_blocks(store, &layout, blocks, &mut findings, &mut report)?;
            }
        }
    }
    report.findings = findings.finish();
    Ok(report)
}

/// A `Corrupt` error becomes a finding; others are the caller's.
fn told<T>(result: Result<T>, findings: &mut Findings) -> Result<Option<T>> {
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
    let Some(chosen) = told(footers.choose(store), findings)? else { return Ok(None) };
    let is_fixed = chosen.found.footer.kind == DiskKind::Fixed;
    let tail_offset = footers.len_bytes.saturating_sub(FOOTER_BYTES as u64);
    if chosen.tail_offset_bytes.is_none() {
        // A power cut while the file grew leaves this, and every reader copes.
        findings.add(
            Severity::Note,
            tail_offset,
            "The footer at the end is missing or damaged; its copy at offset 0 is sound. The next write puts it right.",
        );
    }
    if !is_fixed {
        match &footers.copy {
            Err(error) => findings.add(
                Severity::Corrupt,
                error.offset_bytes,
                format!("The copy of the footer at offset 0 is damaged: found {}, expected {}. The next write puts it right.", error.fault, error.fault.expected()),
            ),
            Ok(copy) if copy.bytes != chosen.found.bytes => {
                findings.add(Severity::Note, 0, "The copy of the footer at offset 0 differs from the footer at the end.");
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
        findings.add(Severity::Note, at + 8, "The feature bit 2, which is always set, is not.");
    }
    if found.footer.saved_state {
        findings.add(Severity::Note, at + 84, "The virtual machine is in saved state; it will not notice changes.");
    }
    if is_fixed && found.footer.data_offset != u64::MAX {
        findings.add(Severity::Note, at + 16, "A fixed disk has no header, but its footer names a place for one.");
    }
    let layout = told(Layout::from_footer(store, chosen, footers.len_bytes), findings)?;
    Ok(layout.map(|(layout, _)| layout))
}

fn check_fixed(layout: &Layout, findings: &mut Findings, report: &mut CheckReport) {
    let end = layout.tail_offset_bytes.unwrap_or(layout.len_bytes);
    if let Some(surplus @ 1..) = end.checked_sub(layout.size_bytes) {
        report.leaked_bytes = surplus;
        let message = format!("{surplus} bytes between the end of the disk and the footer belong to nothing.");
        findings.add(Severity::Leak, layout.size_bytes, message);
    }
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
                let message =
                    format!("The parent locator for the platform \"{}\" says nothing here.", code.escape_ascii());
                findings.add(Severity::Note, header_offset + 576 + index as u64 * 24, message);
            }
        }
    }
    if readable == 0 {
        let message = "No parent locator can be read: the parent must be named by hand.";
        findings.add(Severity::Note, header_offset + 576, message);
    }
    if blocks.header.parent_id.is_nil() {
        findings.add(Severity::Note, header_offset + 40, "The parent's unique id is zero: any parent would be taken.");
    }
    Ok(())
}

/// A block with space, small, for there may be many.
struct Placed {
    entry: u32,
    block: u32,
}

fn check_blocks(
    store: &dyn Store,
    layout: &Layout,
    blocks: &Blocks,
    findings: &mut Findings,
    report: &mut CheckReport,
) -> Result<()> {
    report.total_blocks = blocks.count;
    let len_bytes = layout.len_bytes;
    let data_end = layout.tail_offset_bytes.unwrap_or(len_bytes);
    let most = len_bytes / (blocks.bitmap_bytes + blocks.block_bytes);
    let mut placed = Vec::new();
    let mut unaligned = 0u64;
    let mut holed: (u64, Option<u64>) = (0, None);
    table::scan(store, blocks, blocks.count, |block, entry| {
        report.allocated_blocks += 1;
        let piece = blocks.place(entry);
        if let Some((found, expected)) = blocks.fault_of(&piece, data_end) {
            let message = format!("Block {block} is misplaced: found {found}, expected {expected}.");
            findings.add(Severity::Corrupt, blocks.entry_offset(block), message);
            return Ok(true);
        }
        unaligned += u64::from(!piece.payload_offset.is_multiple_of(PAGE_BYTES));
        if placed.len() as u64 >= most {
            let message = format!(
                "The block allocation table names more blocks than the {most} that fit into the file; they overlap."
            );
            findings.add(Severity::Corrupt, blocks.entry_offset(block), message);
            return Ok(false);
        }
        placed.push(Placed { entry, block: block as u32 });
        if !blocks.tracks_sectors {
            let bits = read_bitmap(store, blocks, &piece)?;
            if !bitmap::is_full_to(&bits, blocks.sectors_of(block)) {
                holed.0 += 1;
                holed.1.get_or_insert(piece.bitmap_offset);
            }
        }
        Ok(true)
    })?;
    if unaligned > 0 {
        let message = format!(
            "The data of {unaligned} of {} blocks are not at a multiple of 4096: they are slower to write on most disks.",
            placed.len()
        );
        findings.add(Severity::Note, blocks.table_offset, message);
    }
    if let (count, Some(first)) = holed {
        let message = format!(
            "{count} blocks of this dynamic disk have a bitmap that is not all ones, the first here. All their sectors are shown, as most programs do."
        );
        findings.add(Severity::Note, first, message);
    }
    placed.sort_unstable_by_key(|piece| piece.entry);
    check_gaps(blocks, &placed, data_end, findings, report);
    Ok(())
}

/// Overlaps, and what lies between the blocks.
fn check_gaps(blocks: &Blocks, placed: &[Placed], data_end: u64, findings: &mut Findings, report: &mut CheckReport) {
    // Before a block there may be padding to a page, and the part of its area that the bitmap does not fill.
    let padding = 2 * PAGE_BYTES;
    let mut reached: Option<(u64, u32)> = None;
    let mut holes = 0;
    for &Placed { entry, block } in placed {
        let piece = blocks.place(entry);
        if let Some((end, other)) = reached {
            if end > piece.bitmap_offset {
                let message = format!(
                    "Blocks {other} and {block} overlap: one ends at {end}, the other begins at {}.",
                    piece.bitmap_offset
                );
                findings.add(Severity::Corrupt, blocks.entry_offset(u64::from(block)), message);
            } else if piece.bitmap_offset - end >= padding {
                let gap = piece.bitmap_offset - end;
                report.leaked_bytes += gap;
                holes += gap / blocks.piece_bytes();
                findings.add(Severity::Leak, end, format!("{gap} bytes between two blocks belong to nothing."));
            }
        }
        if reached.is_none_or(|(end, _)| piece.end > end) {
            reached = Some((piece.end, block));
        }
    }
    let metadata_end = blocks.metadata.iter().map(|range| range.end).max().unwrap_or(0);
    let used_end = reached.map_or(metadata_end, |(end, _)| end.max(metadata_end));
    let slack = data_end.saturating_sub(used_end);
    if blocks.is_reserved(used_end, data_end, placed.len() as u64 + holes) {
        let message = format!("{slack} bytes are reserved for blocks that have no data yet.");
        findings.add(Severity::Note, used_end, message);
    } else if slack >= padding {
        report.leaked_bytes += slack;
        let message =
            format!("{slack} bytes between the last block and the footer belong to nothing; was the disk not closed?");
        findings.add(Severity::Leak, used_end, message);
    }
}
