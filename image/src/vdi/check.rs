//! Reports damage in a VDI: entries that lead out of the file, blocks that share space, and space
//! that no entry names.
//!
//! A header that counts fewer spaces than blocks have is damage, and repaired: other programs put
//! their next block behind the counted ones.
//!
//! ```text
//!   entry beyond the file     given up: the entry becomes free, in a child zeros
//!   two blocks in one space   the one that comes later on the disk is given up
//!   space that no entry has   a hole in the file; at its end the file is cut
//! ```
//!
//! An entry for a block beyond the end of the disk is cleared, which costs nothing. The block of a
//! child that is given up reads as zeros, so that the parent's older data do not show through.
//!
//! The spaces are counted in windows of a bounded size, one pass over the map for each window that
//! the file's length makes possible.

use super::{
    corrupt,
    head::Head,
    layout::{Layout, stray_parent},
};
use crate::{
    error::Result,
    findings::{Change, CheckOutcome, CheckReport, Finding, Findings, Severity, corruption, is_hole},
};
use diskwright_format::vdi::{VdiEntry, VdiKind};
use diskwright_store::{Barrier, FileRange, Store};
use std::{ops::Range, sync::Arc};

/// Offset of the kind of image in the header.
const KIND_AT: u64 = 0x4c;
/// Offset of the number of spaces in the header.
const COUNT_AT: u64 = 0x184;
/// Spaces that one pass counts: 8 MiB of memory, and 64 TiB of blocks of 1 MiB.
const WINDOW: u64 = 1 << 26;
/// Unused ranges that one round of a repair gives back.
const HOLES_MAX: usize = 1 << 16;

/// Checks an image.
///
/// # Errors
/// `NotAnImage` if the file is not a VDI; `Io`.
pub fn examine(store: Arc<dyn Store>, for_repair: bool) -> Result<CheckOutcome> {
    let store = &*store;
    let mut findings = Findings::new(for_repair);
    let mut report = CheckReport::default();
    let layout = match Layout::read(store) {
        Ok(layout) => layout,
        Err(error) => {
            findings.add(corruption(error)?);
            return Ok(findings.finish(report));
        }
    };
    let header = &layout.header;
    if let Some(doubt) = stray_parent(header) {
        findings.add(Finding::new(Severity::Note, KIND_AT, "header", "a parent", "none").says(doubt));
    }
    report.total_blocks = layout.blocks();
    let mut highest = 0;
    layout.each_entry(store, 0, header.blocks.into(), &mut |block, entry| {
        if let VdiEntry::Space(space) = entry {
            match layout.payload(space) {
                Err(invalid) => {
                    let finding = corruption(corrupt(store, layout.entry_at(block), invalid))?;
                    let message = format!("Block {block}: {}", finding.message);
                    give_up(&layout, block, finding.says(message), &mut findings);
                }
                Ok(_) => {
                    report.allocated_blocks += u64::from(block < layout.blocks());
                    highest = highest.max(u64::from(space) + 1);
                }
            }
        }
        Ok(true)
    })?;
    check_last_space(store, &layout, &mut findings)?;
    let mut unused = Unused { store, layout: &layout, bytes: 0, changes: Vec::new() };
    let mut has_overlaps = false;
    for from in (0..highest).step_by(WINDOW as usize) {
        let until = (from + WINDOW).min(highest);
        let mut seen = vec![0u64; (until - from).div_ceil(64) as usize];
        layout.each_entry(store, 0, header.blocks.into(), &mut |block, entry| {
            let VdiEntry::Space(space) = entry else { return Ok(true) };
            let space = u64::from(space);
            if !(from..until).contains(&space) {
                return Ok(true);
            }
            let (word, bit) = ((space - from) as usize / 64, 1 << ((space - from) % 64));
            if seen[word] & bit == 0 {
                seen[word] |= bit;
            } else {
                has_overlaps = true;
                let message = format!("Block {block} has space {space}, which another block has too.");
                let found = format!("space {space} of another block");
                let at = layout.entry_at(block);
                let finding = Finding::new(Severity::Corrupt, at, "block map entry", found, "space of its own");
                give_up(&layout, block, finding.says(message), &mut findings);
            }
            Ok(true)
        })?;
        let is_used = |space: u64| seen[((space - from) / 64) as usize] >> ((space - from) % 64) & 1 == 1;
        let mut at = from;
        while at < until {
            let end = (at..until).find(|&space| is_used(space)).unwrap_or(until);
            unused.add(at..end)?;
            at = (end..until).find(|&space| !is_used(space)).unwrap_or(until);
        }
    }
    let highest_end = u64::from(header.data_offset_bytes) + highest * header.space_bytes();
    if layout.file_bytes > highest_end {
        unused.bytes += layout.file_bytes - highest_end;
        unused.changes.push(Change::Cut(highest_end));
    }
    if unused.bytes > 0 && !has_overlaps {
        report.leaked_bytes = unused.bytes;
        let message = format!("{} bytes in the file are the space of no block.", unused.bytes);
        let found = format!("{} bytes that no block names", unused.bytes);
        let finding =
            Finding::new(Severity::Leak, header.data_offset_bytes.into(), "file", found, "spaces that blocks name");
        let what = format!("{} bytes become holes of the file, or are cut off at its end", unused.bytes);
        if layout.file_bytes > highest_end && u64::from(header.blocks_allocated) > highest {
            unused.changes.push(count_change(highest));
        }
        findings.add_repairable(finding.says(message), what, unused.changes);
    }
    let counted = u64::from(header.blocks_allocated);
    let found = format!("{counted} blocks with space");
    if counted < highest {
        let finding = Finding::new(Severity::Corrupt, COUNT_AT, "VDI header", found, format!("at least {highest}"));
        let message = format!(
            "The header counts {counted} spaces, but blocks have {highest}: other programs would overwrite them."
        );
        findings.add_repairable(finding.says(message), "the header counts all spaces", vec![count_change(highest)]);
    } else if counted > highest {
        findings.add(Finding::new(Severity::Note, COUNT_AT, "VDI header", found, highest.to_string()));
    }
    Ok(findings.finish(report))
}

/// The change by which the header counts this number of spaces.
fn count_change(spaces: u64) -> Change {
    Change::Write(COUNT_AT, u32::try_from(spaces).unwrap_or(u32::MAX).to_le_bytes().into())
}

/// Gives the contents another id before a repair that gives up data.
///
/// # Errors
/// `Io`.
pub fn begin_repair(store: &Arc<dyn Store>, costs_data: bool) -> Result<()> {
    if !costs_data {
        return Ok(());
    }
    Head::read(&**store)?.begin(&Barrier::new(Arc::clone(store)))
}

/// Gives up the block of an entry.
fn give_up(layout: &Layout, block: u64, finding: Finding, findings: &mut Findings) {
    let (entry, reads_as) = match layout.header.kind {
        VdiKind::Differencing => (VdiEntry::Zero, "its entry says that it is zeros"),
        VdiKind::Dynamic | VdiKind::Fixed | VdiKind::Undo => (VdiEntry::Free, "its entry is cleared"),
    };
    let change = |entry: VdiEntry| vec![Change::Write(layout.entry_at(block), entry.word().to_le_bytes().to_vec())];
    let block_bytes = u64::from(layout.header.block_bytes);
    let start = block * block_bytes;
    if start >= layout.size_bytes {
        let what = format!("the entry of block {block}, beyond the end of the disk, is cleared");
        findings.add_repairable(finding, what, change(VdiEntry::Free));
        return;
    }
    let costs = start..(start + block_bytes).min(layout.size_bytes);
    findings.give_up(
        finding,
        Some(costs),
        format!("block {block} is given up: {reads_as}, and it reads as zeros"),
        change(entry),
    );
}

/// Spaces that no block has.
struct Unused<'a> {
    store: &'a dyn Store,
    layout: &'a Layout,
    bytes: u64,
    changes: Vec<Change>,
}

impl Unused<'_> {
    /// Adds spaces, unless the file has a hole there.
    fn add(&mut self, spaces: Range<u64>) -> Result<()> {
        let header = &self.layout.header;
        let range = FileRange {
            offset_bytes: u64::from(header.data_offset_bytes) + spaces.start * header.space_bytes(),
            len_bytes: (spaces.end - spaces.start) * header.space_bytes(),
        };
        if range.len_bytes > 0 && !is_hole(self.store, range)? {
            self.bytes += range.len_bytes;
            if self.changes.len() < HOLES_MAX {
                self.changes.push(Change::Free(range));
            }
        }
        Ok(())
    }
}

/// A file that ends within the space of a block. Readers take zeros for what is missing.
fn check_last_space(store: &dyn Store, layout: &Layout, findings: &mut Findings) -> Result<()> {
    if layout.missing_bytes() == 0 {
        return Ok(());
    }
    let end = layout.file_bytes + layout.missing_bytes();
    let mut cut = None;
    layout.each_entry(store, 0, layout.blocks(), &mut |block, entry| {
        if let VdiEntry::Space(space) = entry {
            let block_bytes = u64::from(layout.header.block_bytes);
            let on_disk = (layout.size_bytes - block * block_bytes).min(block_bytes);
            if layout.payload(space).is_ok_and(|at| at + on_disk > layout.file_bytes) {
                cut = Some(block);
            }
        }
        Ok(cut.is_none())
    })?;
    if let Some(block) = cut {
        let message = format!(
            "Block {block} is cut by the end of the file, and reads as zeros from there: was the file copied completely?"
        );
        let found = format!("a file of {} bytes", layout.file_bytes);
        let finding = Finding::new(Severity::Corrupt, layout.file_bytes, "block", found, format!("at least {end}"));
        findings.add_repairable(
            finding.says(message),
            "the file gets zeros up to the end of the block",
            vec![Change::Extend(end)],
        );
    }
    Ok(())
}
