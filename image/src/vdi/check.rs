//! Reports damage in a VDI: entries that lead out of the file, blocks that share space, and space
//! that no entry names.
//!
//! A header that counts fewer spaces than blocks have is damage, and repaired: other programs put
//! their next block behind the counted ones.
//!
//! The spaces are counted in windows of a bounded size, one pass over the map for each window that
//! the file's length makes possible.

use super::{
    corrupt,
    layout::{Layout, stray_parent},
};
use crate::{
    error::Result,
    findings::{Change, CheckOutcome, CheckReport, Finding, Findings, Severity, corruption},
};
use diskwright_format::vdi::VdiEntry;
use diskwright_store::Store;
use std::sync::Arc;

/// Offset of the kind of image in the header.
const KIND_AT: u64 = 0x4c;
/// Offset of the number of spaces in the header.
const COUNT_AT: u64 = 0x184;
/// Spaces that one pass counts: 8 MiB of memory, and 64 TiB of blocks of 1 MiB.
const WINDOW: u64 = 1 << 26;

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
    let data_bytes = layout.file_bytes.saturating_sub(header.data_offset_bytes.into());
    let spaces = data_bytes.div_ceil(header.space_bytes());
    let mut highest = 0;
    layout.each_entry(store, 0, header.blocks.into(), &mut |block, entry| {
        if let VdiEntry::Space(space) = entry {
            match layout.payload(space) {
                Err(invalid) => {
                    let finding = corruption(corrupt(store, layout.entry_at(block), invalid))?;
                    let message = format!("Block {block}: {}", finding.message);
                    findings.add(finding.says(message));
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
    let mut used = 0;
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
                used += 1;
            } else {
                let message = format!("Block {block} has space {space}, which another block has too.");
                let found = format!("space {space} of another block");
                let at = layout.entry_at(block);
                let finding = Finding::new(Severity::Corrupt, at, "block map entry", found, "space of its own");
                findings.add(finding.says(message));
            }
            Ok(true)
        })?;
    }
    if spaces > used && used >= report.allocated_blocks {
        let unused = spaces - used;
        report.leaked_bytes = unused * header.space_bytes();
        let message =
            format!("{unused} of {spaces} spaces in the file are named by no block: {} bytes.", report.leaked_bytes);
        let found = format!("{spaces} spaces");
        let finding = Finding::new(
            Severity::Leak,
            header.data_offset_bytes.into(),
            "file",
            found,
            format!("{used}, as blocks name them"),
        );
        findings.add(finding.says(message));
    }
    let counted = u64::from(header.blocks_allocated);
    let found = format!("{counted} blocks with space");
    if counted < highest {
        let finding = Finding::new(Severity::Corrupt, COUNT_AT, "VDI header", found, format!("at least {highest}"));
        let message = format!(
            "The header counts {counted} spaces, but blocks have {highest}: other programs would overwrite them."
        );
        let count = u32::try_from(highest).unwrap_or(u32::MAX).to_le_bytes();
        findings.add_repairable(
            finding.says(message),
            "the header counts all spaces",
            vec![Change::Write(COUNT_AT, count.into())],
        );
    } else if counted > highest {
        findings.add(Finding::new(Severity::Note, COUNT_AT, "VDI header", found, highest.to_string()));
    }
    Ok(findings.finish(report))
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
