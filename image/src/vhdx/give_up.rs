//! Changes of single BAT entries that a repair makes.

use super::layout::Layout;
use crate::findings::{Change, Finding, Findings};
use diskwright_format::vhdx::{BatEntry, PayloadState, bat::EntryKind};
use std::ops::Range;

/// The range of the disk that the block of a payload entry holds; `None` for a sector bitmap block.
pub(super) fn range_of(layout: &Layout, index: u64) -> Option<Range<u64>> {
    let EntryKind::Payload { block } = layout.geometry.what_is(index) else { return None };
    let start_bytes = block * layout.geometry.block_bytes();
    Some(start_bytes..start_bytes + layout.geometry.bytes_in_disk(block))
}

/// The change that replaces an entry; `None` unless repairs are collected.
pub(super) fn entry_change(layout: &Layout, index: u64, entry: BatEntry, findings: &Findings) -> Option<Change> {
    let write = || Change::Write(layout.entry_offset_bytes(index), entry.to_le_bytes().to_vec());
    findings.for_repair().then(write)
}

/// Gives up the block of an entry. A block of a child becomes zeros, so that the parent's older
/// data does not show through.
pub(super) fn give_up_entry(layout: &Layout, index: u64, finding: Finding, findings: &mut Findings) {
    let (new, what) = match (layout.geometry.what_is(index), layout.has_parent) {
        (EntryKind::Payload { .. }, true) => (BatEntry::payload(PayloadState::Zero, 0), "its block becomes zeros"),
        (EntryKind::Payload { .. }, false) => (BatEntry::default(), "its block is given up and reads as zeros"),
        (EntryKind::Bitmap { .. }, _) => (BatEntry::default(), "the sector bitmap block is given up"),
    };
    let changes = entry_change(layout, index, new, findings).into_iter().collect();
    findings.give_up(finding, range_of(layout, index), what, changes);
}
