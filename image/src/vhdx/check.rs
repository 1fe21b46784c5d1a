//! Reports all damage in a VHDX.
//!
//! Reads only, and continues where `open` would stop. First both headers and both region tables are
//! checked, then the file is opened as a reader would (the log is replayed in memory), and every
//! BAT entry is validated on its own.
//!
//! Entries that the specification forbids but every reader understands (`layout.rs`) are notes, one
//! for each kind, with the first such entry. Space of blocks beyond the end of the disk is a leak.
//! `check_space.rs` finds overlaps and leaked space.

use super::{
    check_metadata::check_metadata,
    check_space::{Claim, Space},
    give_up::{entry_change, give_up_entry, range_of},
    layout::{EntryState, Layout},
    open::{check_log_place, load, read_if_there, read_slots},
    repair::{other_region_table_opens, size_without_log},
    survey::beyond_end,
    tables::Tables,
};
use crate::{
    LogState,
    error::{ImageError, Result},
    findings::{Change, CheckOutcome, CheckReport, Finding, Findings, Severity, corruption},
};
use diskwright_format::vhdx::{
    BatEntry, BitmapState, Header, Invalid, MIB, PayloadState, RegionTable, Slot,
    bat::EntryKind,
    region::{REGION_TABLE_BYTES, REGION_TABLE_OFFSETS},
};
use diskwright_store::Store;
use std::{io, ops::ControlFlow, sync::Arc};

/// Checks a VHDX without writing; with `for_repair` also says how it is repaired.
///
/// # Errors
/// If the file is not a VHDX or cannot be read. Damage is a finding, not an error.
pub(crate) fn examine(store: Arc<dyn Store>, for_repair: bool) -> Result<CheckOutcome> {
    let mut findings = Findings::new(for_repair);
    let opened = match load(Arc::clone(&store), false) {
        Ok(opened) => Some(opened),
        Err(ImageError::Io { doing, offset_bytes, source, .. }) if source.kind() == io::ErrorKind::UnexpectedEof => {
            let message =
                format!("cannot {doing}: the file ends before that offset; it was truncated, or not copied completely");
            let expected = "a complete file";
            findings.add(
                Finding::new(Severity::Corrupt, offset_bytes, "file", "an end before this offset", expected)
                    .says(message),
            );
            None
        }
        Err(error) => {
            let finding = corruption(error)?;
            match size_without_log(&store, &finding)? {
                // The tables are those before the last flush, which may have changed any of them.
                Some(size_bytes) => findings.give_up(
                    finding,
                    Some(0..size_bytes),
                    "the log is emptied; the tables stay as they were before the last flush, so any part of the disk may be old",
                    vec![Change::DropLog],
                ),
                None => findings.add(finding),
            }
            None
        }
    };
    check_headers(&*store, &mut findings)?;
    // After the replay, as the log may change the region tables.
    let replayed = opened.as_ref().map_or(&store, |opened| opened.barrier.store());
    check_region_tables(replayed, opened.is_some(), &mut findings)?;
    let mut report = CheckReport::default();
    if let Some(opened) = opened {
        // The log is empty, so the disk can be read. But no change can be logged.
        if let Err(invalid) = check_log_place(&*store, opened.headers.current()) {
            findings.add(of(Severity::Corrupt, opened.headers.slot().offset_bytes(), &invalid));
        }
        if let LogState::Replayed { entries } = opened.info.log {
            let message = format!(
                "the log holds {entries} entries that must be replayed: the disk was not closed; the next open for writing replays them"
            );
            let offset_bytes = opened.log_place.offset_bytes;
            let finding =
                Finding::new(Severity::Note, offset_bytes, "log", format!("{entries} entries"), "an empty log");
            findings.add_repairable(finding.says(message), "the log is replayed and emptied", vec![Change::ReplayLog]);
        }
        let store = &**opened.barrier.store();
        let may_be_child = check_metadata(store, &mut findings)?;
        report.total_blocks = opened.layout.geometry.payload_blocks();
        let mut blocks = Blocks {
            layout: &opened.layout,
            store,
            findings: &mut findings,
            may_be_child,
            space: Space::new(&opened.layout, store),
            allocated: 0,
            peculiar: PeculiarEntries::default(),
        };
        blocks.check(&mut report)?;
    }
    Ok(findings.finish(report))
}

fn of(severity: Severity, base_bytes: u64, invalid: &Invalid) -> Finding {
    let offset_bytes = base_bytes.saturating_add(invalid.offset_bytes);
    Finding::new(severity, offset_bytes, invalid.structure, invalid.found.clone(), invalid.expected.clone())
}

fn check_headers(store: &dyn Store, findings: &mut Findings) -> Result<()> {
    let slots = read_slots(store)?;
    let parsed = [Header::parse(&slots[0]), Header::parse(&slots[1])];
    if parsed.iter().all(|header| header.is_err()) {
        return Ok(()); // reported by `load`
    }
    for (slot, header) in [Slot::First, Slot::Second].into_iter().zip(&parsed) {
        if let Err(invalid) = header {
            let mut invalid = invalid.clone();
            invalid.expected.push_str("; the other header is valid, and the next change of the disk rewrites this one");
            // A new FileWriteGuid, with which every repair begins, is written to both headers.
            findings.add_repairable(
                of(Severity::Note, slot.offset_bytes(), &invalid),
                "both headers are written",
                Vec::new(),
            );
        }
    }
    Ok(())
}

/// `opened`: whether the file can be opened with the table that readers use.
fn check_region_tables(store: &Arc<dyn Store>, opened: bool, findings: &mut Findings) -> Result<()> {
    let mut tables = Vec::new();
    for offset_bytes in REGION_TABLE_OFFSETS {
        let mut bytes = vec![0; REGION_TABLE_BYTES];
        read_if_there(&**store, "read a region table", &mut bytes, offset_bytes)?;
        let parsed = RegionTable::parse(&bytes);
        tables.push((offset_bytes, parsed, bytes));
    }
    let copied = "the region table is written from its other copy";
    match &tables[..] {
        [(first_at, Ok(first), first_bytes), (second_at, Ok(second), second_bytes)] if first != second => {
            let message = "the two region tables differ; the first is used";
            let finding =
                Finding::new(Severity::Corrupt, *second_at, "region table", "two different tables", "two equal ones")
                    .says(message);
            if opened {
                findings.add_repairable(finding, copied, vec![Change::Write(*second_at, first_bytes.clone())]);
            } else if other_region_table_opens(store, second_bytes)? {
                // Only with the second table does the file hold a disk.
                findings.add_repairable(finding, copied, vec![Change::Write(*first_at, second_bytes.clone())]);
            } else {
                findings.add(finding);
            }
        }
        [(_, Ok(_), good), (offset_bytes, Err(invalid), _)] | [(offset_bytes, Err(invalid), _), (_, Ok(_), good)] => {
            let mut invalid = invalid.clone();
            invalid.expected.push_str("; the other copy is good");
            let change = Change::Write(*offset_bytes, good.clone());
            findings.add_repairable(of(Severity::Note, *offset_bytes, &invalid), copied, vec![change]);
        }
        _ => {}
    }
    Ok(())
}

/// Maximum number of entries of one kind that a round of a repair removes.
const KIND_CHANGES_MAX: usize = 1 << 20;

/// Entries with one peculiarity: how many, and the index of the first.
#[derive(Default)]
struct Kind {
    count: u64,
    first_index: u64,
    /// The changes that repair them; of no more than one round.
    changes: Vec<Change>,
}

impl Kind {
    /// `change`: what repairs the entry, collected for a repair only.
    fn add(&mut self, index: u64, change: Option<Change>) {
        if self.count == 0 {
            self.first_index = index;
        }
        self.count += 1;
        self.changes.extend(change.filter(|_| self.changes.len() < KIND_CHANGES_MAX));
    }

    /// "BAT entry 5" or "BAT entry 5 and 3 more".
    fn entries(&self) -> String {
        match self.count {
            1 => format!("BAT entry {}", self.first_index),
            more => format!("BAT entry {} and {} more", self.first_index, more - 1),
        }
    }
}

/// Entries that are peculiar but readable.
#[derive(Default)]
struct PeculiarEntries {
    partial_without_parent: Kind,
    bitmap_without_parent: Kind,
    bitmap_in_state_7: Kind,
    zero_with_place: Kind,
    misplaced_without_data: Kind,
    beyond_end: Kind,
}

/// The partially present blocks of a chunk, which need its sector bitmap block.
#[derive(Default)]
struct Waiting {
    chunk: u64,
    first_index: u64,
    count: u64,
    /// For a repair: the indices of all their entries.
    indices: Vec<u64>,
}

impl Waiting {
    fn add(&mut self, index: u64, for_repair: bool) {
        if self.count == 0 {
            self.first_index = index;
        }
        self.count += 1;
        self.indices.extend(for_repair.then_some(index));
    }
}

struct Blocks<'a> {
    layout: &'a Layout,
    store: &'a dyn Store,
    findings: &'a mut Findings,
    /// The disk names a parent but is not marked as a child. Its sector bitmaps are left alone.
    may_be_child: bool,
    space: Space<'a>,
    /// Number of payload blocks with data.
    allocated: u64,
    peculiar: PeculiarEntries,
}

impl Blocks<'_> {
    fn check(&mut self, report: &mut CheckReport) -> Result<()> {
        let file_bytes =
            self.store.len_bytes().map_err(|error| ImageError::io("get the file's length", self.store, 0, error))?;
        // The chunk and the indices of partially present blocks. The chunk's bitmap entry follows
        // its payload entries, so these blocks wait for it.
        let mut partial = Waiting::default();
        let layout = self.layout;
        layout.each_entry(&Tables::of_file(self.store), 0..layout.entries(), &mut |index, entry| {
            match layout.geometry.what_is(index) {
                EntryKind::Payload { block } if block >= layout.geometry.payload_blocks() => {
                    self.beyond_end(index, block, entry, file_bytes);
                }
                EntryKind::Payload { block } => {
                    let chunk = layout.geometry.chunk_of(block);
                    if partial.chunk != chunk {
                        self.missing_bitmap(&mut partial);
                    }
                    if self.payload(index, block, entry, file_bytes) {
                        partial.chunk = chunk;
                        partial.add(index, self.findings.for_repair());
                    }
                }
                EntryKind::Bitmap { chunk } => {
                    let is_needed = partial.chunk == chunk && partial.count > 0;
                    let present = self.bitmap(index, entry, file_bytes, is_needed);
                    if partial.chunk != chunk || !present {
                        self.missing_bitmap(&mut partial);
                    }
                    partial = Waiting::default();
                }
            }
            Ok(ControlFlow::Continue(()))
        })?;
        self.missing_bitmap(&mut partial);
        self.report_peculiar();
        report.allocated_blocks = self.allocated;
        report.leaked_bytes = self.space.check(file_bytes, self.allocated, self.findings)?;
        Ok(())
    }

    fn missing_bitmap(&mut self, partial: &mut Waiting) {
        let Waiting { chunk, first_index, count, indices } = std::mem::take(partial);
        if count == 0 {
            return;
        }
        let missing = |index| {
            let found = format!("a partially present block, but chunk {chunk} has no sector bitmap block");
            let message = format!("BAT entry {index}: {found}");
            let at = self.layout.entry_offset_bytes(index);
            Finding::new(Severity::Corrupt, at, format!("BAT entry {index}"), found, "a sector bitmap block")
                .says(message)
        };
        if indices.is_empty() {
            let finding = missing(first_index);
            let costs = range_of(self.layout, first_index);
            self.findings.give_up(finding, costs, String::new(), Vec::new());
        }
        // Which sectors of these blocks are the parent's is not known any more.
        for index in indices {
            let finding = missing(index);
            give_up_entry(self.layout, index, finding, self.findings);
        }
    }

    fn change(&self, index: u64, entry: BatEntry) -> Option<Change> {
        entry_change(self.layout, index, entry, self.findings)
    }

    fn reserved_bits(&mut self, index: u64, entry: BatEntry) {
        let bits = entry.reserved_bits();
        if bits != 0 {
            let message = format!("BAT entry {index}: reserved bits {bits:#x}, expected none");
            let place = self.layout.entry_offset_bytes(index);
            let found = format!("reserved bits {bits:#x}");
            let finding =
                Finding::new(Severity::Corrupt, place, format!("BAT entry {index}"), found, "none").says(message);
            let changes = self.change(index, BatEntry(entry.0 & !bits)).into_iter().collect();
            self.findings.add_repairable(finding, "the reserved bits are cleared", changes);
        }
    }

    /// Checks a payload entry. Returns whether its block needs a sector bitmap.
    fn payload(&mut self, index: u64, block: u64, entry: BatEntry, file_bytes: u64) -> bool {
        self.reserved_bits(index, entry);
        let place = self.layout.entry_offset_bytes(index);
        let start_bytes = entry.offset_bytes();
        match self.layout.block_state(block, entry, file_bytes) {
            Err(mut invalid) => {
                invalid.structure = "BAT entry of a payload block";
                let finding = of(Severity::Corrupt, place, &invalid);
                self.damaged(index, block, entry, file_bytes, finding);
                false
            }
            Ok(EntryState::Zero | EntryState::Absent) => {
                let state = entry.payload_state();
                let without_place = BatEntry(entry.0 & 7);
                if start_bytes != 0 && state == Ok(PayloadState::Zero) {
                    let change = self.change(index, without_place);
                    self.peculiar.zero_with_place.add(index, change);
                }
                if let Some(kept_bytes) = self.layout.kept_place(entry, file_bytes) {
                    let claim = match state {
                        Ok(state @ (PayloadState::Undefined | PayloadState::Unmapped)) => Claim::Kept(state),
                        _ => Claim::Nothing,
                    };
                    self.space.uses(index, kept_bytes, claim, self.findings);
                } else if start_bytes != 0 && matches!(state, Ok(PayloadState::Undefined | PayloadState::Unmapped)) {
                    let change = self.change(index, without_place);
                    self.peculiar.misplaced_without_data.add(index, change);
                }
                false
            }
            Ok(state) => {
                if !self.layout.has_parent && entry.payload_state() == Ok(PayloadState::PartiallyPresent) {
                    let change = self.change(index, BatEntry::payload(PayloadState::FullyPresent, start_bytes));
                    self.peculiar.partial_without_parent.add(index, change);
                }
                self.allocated += 1;
                self.space.uses(index, start_bytes, Claim::Data, self.findings);
                matches!(state, EntryState::Partial { .. })
            }
        }
    }

    /// Reports an invalid payload entry. Where the file ends within the block, only the part that
    /// is missing is given up.
    fn damaged(&mut self, index: u64, block: u64, entry: BatEntry, file_bytes: u64, finding: Finding) {
        let start_bytes = entry.offset_bytes();
        let end_bytes = start_bytes.saturating_add(self.layout.geometry.block_bytes());
        let has_state =
            matches!(entry.payload_state(), Ok(PayloadState::FullyPresent | PayloadState::PartiallyPresent));
        let is_cut = has_state
            && (MIB..file_bytes).contains(&start_bytes)
            && end_bytes > file_bytes
            && !self.layout.overlaps_metadata(start_bytes, end_bytes);
        if !is_cut {
            return give_up_entry(self.layout, index, finding, self.findings);
        }
        let costs = range_of(self.layout, index).map(|range| range.start + (file_bytes - start_bytes)..range.end);
        let what = format!(
            "the file is extended to {end_bytes} bytes, and the part of block {block} that is missing reads as zeros"
        );
        self.findings.give_up(finding, costs, what, vec![Change::Extend(end_bytes)]);
    }

    /// Checks an entry of a block beyond the end of the disk. Only its space matters.
    fn beyond_end(&mut self, index: u64, block: u64, entry: BatEntry, file_bytes: u64) {
        if let Some(start_bytes) = beyond_end(self.layout, block, entry, file_bytes) {
            let change = self.change(index, BatEntry::default());
            self.peculiar.beyond_end.add(index, change);
            self.space.uses(index, start_bytes, Claim::Nothing, self.findings);
        }
    }

    fn report_peculiar(&mut self) {
        let peculiar = std::mem::take(&mut self.peculiar);
        let blocks = self.layout.geometry.payload_blocks();
        let reports = [
            (
                peculiar.partial_without_parent,
                Severity::Note,
                "a partially present block in a disk without parent; it is read as fully present, as Windows reads it"
                    .to_owned(),
                "their state becomes fully present",
            ),
            (
                peculiar.bitmap_without_parent,
                Severity::Note,
                "a sector bitmap block in a disk without parent; it is ignored, as by Windows".into(),
                "the entries are cleared",
            ),
            (
                peculiar.bitmap_in_state_7,
                Severity::Note,
                "a sector bitmap block in state 7, expected 6; it is read as present, as Windows reads it".into(),
                "their state becomes 6",
            ),
            (
                peculiar.zero_with_place,
                Severity::Note,
                "a zero block with a file offset, expected 0; Hyper-V refuses such a disk".into(),
                "the file offsets are cleared",
            ),
            (
                peculiar.misplaced_without_data,
                Severity::Note,
                "a block without data with a file offset beyond the file or in its metadata, expected 0".into(),
                "the file offsets are cleared",
            ),
            (
                peculiar.beyond_end,
                Severity::Leak,
                format!(
                    "space for a block beyond the disk's end; the disk has {blocks} blocks, and had more when the space was allocated"
                ),
                "the entries are cleared",
            ),
        ];
        for (kind, severity, what, mended) in reports.into_iter().filter(|(kind, ..)| kind.count > 0) {
            let place = self.layout.entry_offset_bytes(kind.first_index);
            let message = format!("{}: {what}", kind.entries());
            let finding = Finding::new(severity, place, kind.entries(), what, "").says(message);
            if self.may_be_child {
                self.findings.add(finding);
            } else {
                self.findings.add_repairable(finding, mended, kind.changes);
            }
        }
    }

    /// Checks the entry of a sector bitmap block, which partially present blocks of its chunk may
    /// need. Returns whether it is present and valid.
    fn bitmap(&mut self, index: u64, entry: BatEntry, file_bytes: u64, is_needed: bool) -> bool {
        if !self.layout.has_parent {
            let change = self.change(index, BatEntry::default());
            self.peculiar.bitmap_without_parent.add(index, change);
            return false;
        }
        self.reserved_bits(index, entry);
        match self.layout.bitmap_place(entry, file_bytes) {
            Ok(None) => false,
            Ok(Some(start_bytes)) => {
                if entry.payload_state() == Ok(PayloadState::PartiallyPresent) {
                    let change = self.change(index, BatEntry::bitmap(BitmapState::Present, start_bytes));
                    self.peculiar.bitmap_in_state_7.add(index, change);
                }
                self.space.uses(index, start_bytes, Claim::Data, self.findings);
                true
            }
            Err(mut invalid) => {
                invalid.structure = "BAT entry of a sector bitmap block";
                let finding = of(Severity::Corrupt, self.layout.entry_offset_bytes(index), &invalid);
                if is_needed {
                    give_up_entry(self.layout, index, finding, self.findings);
                } else {
                    let changes = self.change(index, BatEntry::default()).into_iter().collect();
                    self.findings.add_repairable(
                        finding,
                        "the entry is cleared; no block of its chunk needs it",
                        changes,
                    );
                }
                false
            }
        }
    }
}
