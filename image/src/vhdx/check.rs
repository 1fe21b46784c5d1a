//! Reports all damage in a VHDX.
//!
//! Reads only, and continues where `open` would stop. First both headers and both region tables are
//! checked, then the file is opened as a reader would (the log is replayed in memory), and every
//! BAT entry is validated on its own. Used space is gathered as one record of eight bytes for each
//! entry with space, and sorted. One pass over the sorted records finds overlaps and unused space.
//!
//! Entries that the specification forbids but every reader understands (`layout.rs`) are notes, one
//! for each kind, with the first such entry. Space of blocks beyond the end of the disk is a leak.

use super::{
    layout::{EntryState, Layout},
    open::{check_log_place, load, read_if_there, read_slots},
    survey::beyond_end,
    tables::Tables,
};
use crate::{
    error::{ImageError, Result},
    image::{CheckReport, Finding, LogState, Severity},
};
use diskwright_format::vhdx::{
    BITMAP_BLOCK_BYTES, BatEntry, Header, Invalid, MIB, PayloadState, RegionTable, Slot,
    bat::EntryKind,
    region::{REGION_TABLE_BYTES, REGION_TABLE_OFFSETS},
};
use diskwright_store::Store;
use std::{io, ops::ControlFlow, sync::Arc};

/// Further findings are only counted.
const MAX_FINDINGS: usize = 1000;

/// Checks a VHDX without writing.
///
/// # Errors
/// If the file is not a VHDX or cannot be read. Damage is a finding, not an error.
pub fn check(store: Arc<dyn Store>) -> Result<CheckReport> {
    let mut findings = Findings::default();
    let opened = match load(Arc::clone(&store), false) {
        Ok(opened) => Some(opened),
        Err(error @ (ImageError::Corrupt { .. } | ImageError::Unsupported { .. })) => {
            let offset_bytes = if let ImageError::Corrupt { offset_bytes, .. } = &error { *offset_bytes } else { 0 };
            findings.add(Severity::Corrupt, offset_bytes, describe(&error));
            None
        }
        Err(ImageError::Io { doing, offset_bytes, source, .. }) if source.kind() == io::ErrorKind::UnexpectedEof => {
            findings.add(
                Severity::Corrupt,
                offset_bytes,
                format!("cannot {doing}: the file ends before that offset; it was truncated, or not copied completely"),
            );
            None
        }
        Err(error) => return Err(error),
    };
    check_headers(&*store, &mut findings)?;
    // After the replay, as the log may change the region tables.
    let replayed = opened.as_ref().map_or(&store, |opened| opened.barrier.store());
    check_region_tables(&**replayed, &mut findings)?;
    let mut report = CheckReport::default();
    if let Some(opened) = opened {
        // The log is empty, so the disk can be read. But no change can be logged.
        if let Err(invalid) = check_log_place(&*store, opened.headers.current()) {
            findings.invalid(Severity::Corrupt, opened.headers.slot().offset_bytes(), &invalid);
        }
        if let LogState::Replayed { entries } = opened.info.log {
            let message = format!(
                "the log holds {entries} entries that must be replayed: the disk was not closed; the next open for writing replays them"
            );
            findings.add(Severity::Note, opened.log_place.offset_bytes, message);
        }
        let store = &**opened.barrier.store();
        report.total_blocks = opened.layout.geometry.payload_blocks();
        let mut blocks = Blocks {
            layout: &opened.layout,
            store,
            findings: &mut findings,
            used: Vec::new(),
            allocated: 0,
            peculiar: Peculiar::default(),
        };
        blocks.check(&mut report)?;
    }
    report.findings = findings.finish();
    Ok(report)
}

/// The message without the path and without the hint to run a check.
fn describe(error: &ImageError) -> String {
    match error {
        ImageError::Corrupt { structure, found, expected, .. } => {
            format!("{structure}: found {found}, expected {expected}")
        }
        other => other.to_string(),
    }
}

#[derive(Default)]
struct Findings {
    list: Vec<Finding>,
    left_out: u64,
    worst_left_out: Option<Severity>,
}

impl Findings {
    fn add(&mut self, severity: Severity, offset_bytes: u64, message: String) {
        if self.list.len() < MAX_FINDINGS {
            self.list.push(Finding { severity, offset_bytes, message });
        } else {
            self.left_out += 1;
            self.worst_left_out = self.worst_left_out.max(Some(severity));
        }
    }

    fn invalid(&mut self, severity: Severity, base_bytes: u64, invalid: &Invalid) {
        let message = format!("{}: found {}, expected {}", invalid.structure, invalid.found, invalid.expected);
        self.add(severity, base_bytes.saturating_add(invalid.offset_bytes), message);
    }

    fn finish(mut self) -> Vec<Finding> {
        self.list.sort_by_key(|finding| finding.offset_bytes);
        if let Some(severity) = self.worst_left_out {
            let message = format!("{} more findings are not listed", self.left_out);
            let offset_bytes = self.list.last().map_or(0, |finding| finding.offset_bytes);
            self.list.push(Finding { severity, offset_bytes, message });
        }
        self.list
    }
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
            findings.invalid(Severity::Note, slot.offset_bytes(), &invalid);
        }
    }
    Ok(())
}

fn check_region_tables(store: &dyn Store, findings: &mut Findings) -> Result<()> {
    let mut tables = Vec::new();
    for offset_bytes in REGION_TABLE_OFFSETS {
        let mut bytes = vec![0; REGION_TABLE_BYTES];
        read_if_there(store, "read a region table", &mut bytes, offset_bytes)?;
        tables.push((offset_bytes, RegionTable::parse(&bytes)));
    }
    match &tables[..] {
        [(_, Ok(first)), (offset_bytes, Ok(second))] if first != second => {
            findings.add(Severity::Corrupt, *offset_bytes, "the two region tables differ; the first is used".into());
        }
        [(_, Ok(_)), (offset_bytes, Err(invalid))] | [(offset_bytes, Err(invalid)), (_, Ok(_))] => {
            let mut invalid = invalid.clone();
            invalid.expected.push_str("; the other copy is good");
            findings.invalid(Severity::Note, *offset_bytes, &invalid);
        }
        _ => {}
    }
    Ok(())
}

/// A used part of the file and its BAT entry, in eight bytes: a full disk has tens of millions.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Used {
    start_mib: u32,
    /// Index of the entry. The top bit marks space that holds no data. There are fewer than 2^27
    /// entries.
    marked_index: u32,
}

impl Used {
    const NO_DATA: u32 = 1 << 31;

    fn index(self) -> u64 {
        u64::from(self.marked_index & !Self::NO_DATA)
    }

    /// Whether the space belongs to a ZERO or NOT_PRESENT entry, or to a block beyond the end of
    /// the disk. Such space may overlap another block without harm.
    fn has_no_data(self) -> bool {
        self.marked_index & Self::NO_DATA != 0
    }
}

/// Entries with one peculiarity: how many, and the index of the first.
#[derive(Default)]
struct Kind {
    count: u64,
    first_index: u64,
}

impl Kind {
    fn add(&mut self, index: u64) {
        if self.count == 0 {
            self.first_index = index;
        }
        self.count += 1;
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
struct Peculiar {
    partial_without_parent: Kind,
    bitmap_without_parent: Kind,
    bitmap_in_state_7: Kind,
    zero_with_place: Kind,
    beyond_end: Kind,
}

struct Blocks<'a> {
    layout: &'a Layout,
    store: &'a dyn Store,
    findings: &'a mut Findings,
    /// All used space, including the kept space of unmapped blocks.
    used: Vec<Used>,
    /// Number of payload blocks with data.
    allocated: u64,
    peculiar: Peculiar,
}

impl Blocks<'_> {
    fn check(&mut self, report: &mut CheckReport) -> Result<()> {
        let file_bytes =
            self.store.len_bytes().map_err(|error| ImageError::io("get the file's length", self.store, 0, error))?;
        // The chunk and the first index of partially present blocks. The chunk's bitmap entry
        // follows its payload entries, so these blocks wait for it.
        let mut partial: Option<(u64, u64)> = None;
        let layout = self.layout;
        layout.each_entry(&Tables::of_file(self.store), 0..layout.entries(), &mut |index, entry| {
            match layout.geometry.what_is(index) {
                EntryKind::Payload { block } if block >= layout.geometry.payload_blocks() => {
                    self.beyond_end(index, block, entry, file_bytes);
                }
                EntryKind::Payload { block } => {
                    let chunk = layout.geometry.chunk_of(block);
                    if partial.is_some_and(|(waiting, _)| waiting != chunk) {
                        self.missing_bitmap(&mut partial);
                    }
                    if self.payload(index, block, entry, file_bytes) && partial.is_none() {
                        partial = Some((chunk, index));
                    }
                }
                EntryKind::Bitmap { chunk } => {
                    let present = self.bitmap(index, entry, file_bytes);
                    if partial.is_some_and(|(waiting, _)| waiting != chunk || !present) {
                        self.missing_bitmap(&mut partial);
                    }
                    partial = None;
                }
            }
            Ok(ControlFlow::Continue(()))
        })?;
        self.missing_bitmap(&mut partial);
        self.report_peculiar();
        report.allocated_blocks = self.allocated;
        report.leaked_bytes = self.space(file_bytes);
        Ok(())
    }

    fn missing_bitmap(&mut self, partial: &mut Option<(u64, u64)>) {
        if let Some((chunk, index)) = partial.take() {
            let message =
                format!("BAT entry {index}: a partially present block, but chunk {chunk} has no sector bitmap block");
            self.findings.add(Severity::Corrupt, self.layout.entry_offset_bytes(index), message);
        }
    }

    fn reserved_bits(&mut self, index: u64, entry: BatEntry) {
        if entry.reserved_bits() != 0 {
            let message = format!("BAT entry {index}: reserved bits {:#x}, expected none", entry.reserved_bits());
            self.findings.add(Severity::Corrupt, self.layout.entry_offset_bytes(index), message);
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
                self.findings.invalid(Severity::Corrupt, place, &invalid);
                false
            }
            Ok(EntryState::Zero | EntryState::Absent) => {
                let state = entry.payload_state();
                if start_bytes != 0 && state == Ok(PayloadState::Zero) {
                    self.peculiar.zero_with_place.add(index);
                }
                if let Some(kept_bytes) = self.layout.kept_place(entry, file_bytes) {
                    let has_no_data = matches!(state, Ok(PayloadState::Zero | PayloadState::NotPresent));
                    self.uses(index, kept_bytes, has_no_data);
                }
                false
            }
            Ok(state) => {
                if !self.layout.has_parent && entry.payload_state() == Ok(PayloadState::PartiallyPresent) {
                    self.peculiar.partial_without_parent.add(index);
                }
                self.allocated += 1;
                self.uses(index, start_bytes, false);
                matches!(state, EntryState::Partial { .. })
            }
        }
    }

    /// Checks an entry of a block beyond the end of the disk. Only its space matters.
    fn beyond_end(&mut self, index: u64, block: u64, entry: BatEntry, file_bytes: u64) {
        if let Some(start_bytes) = beyond_end(self.layout, block, entry, file_bytes) {
            self.peculiar.beyond_end.add(index);
            self.uses(index, start_bytes, true);
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
            ),
            (
                peculiar.bitmap_without_parent,
                Severity::Note,
                "a sector bitmap block in a disk without parent; it is ignored, as by Windows".into(),
            ),
            (
                peculiar.bitmap_in_state_7,
                Severity::Note,
                "a sector bitmap block in state 7, expected 6; it is read as present, as Windows reads it".into(),
            ),
            (
                peculiar.zero_with_place,
                Severity::Note,
                "a zero block with a file offset, expected 0; Hyper-V refuses such a disk".into(),
            ),
            (
                peculiar.beyond_end,
                Severity::Leak,
                format!(
                    "space for a block beyond the disk's end; the disk has {blocks} blocks, and had more when the space was allocated"
                ),
            ),
        ];
        for (kind, severity, what) in reports.into_iter().filter(|(kind, ..)| kind.count > 0) {
            let place = self.layout.entry_offset_bytes(kind.first_index);
            self.findings.add(severity, place, format!("{}: {what}", kind.entries()));
        }
    }

    /// Checks the entry of a sector bitmap block. Returns whether it is present and valid.
    fn bitmap(&mut self, index: u64, entry: BatEntry, file_bytes: u64) -> bool {
        if !self.layout.has_parent {
            self.peculiar.bitmap_without_parent.add(index);
            return false;
        }
        self.reserved_bits(index, entry);
        match self.layout.bitmap_place(entry, file_bytes) {
            Ok(None) => false,
            Ok(Some(start_bytes)) => {
                if entry.payload_state() == Ok(PayloadState::PartiallyPresent) {
                    self.peculiar.bitmap_in_state_7.add(index);
                }
                self.uses(index, start_bytes, false);
                true
            }
            Err(mut invalid) => {
                invalid.structure = "BAT entry of a sector bitmap block";
                self.findings.invalid(Severity::Corrupt, self.layout.entry_offset_bytes(index), &invalid);
                false
            }
        }
    }

    fn uses(&mut self, index: u64, start_bytes: u64, has_no_data: bool) {
        if let (Ok(start_mib), Ok(index)) = (u32::try_from(start_bytes / MIB), u32::try_from(index)) {
            let mark = if has_no_data { Used::NO_DATA } else { 0 };
            self.used.push(Used { start_mib, marked_index: index | mark });
        }
    }

    fn len_bytes(&self, used: Used) -> u64 {
        match self.layout.geometry.what_is(used.index()) {
            EntryKind::Payload { .. } => self.layout.geometry.block_bytes(),
            EntryKind::Bitmap { .. } => BITMAP_BLOCK_BYTES,
        }
    }

    fn is_beyond_end(&self, used: Used) -> bool {
        let blocks = self.layout.geometry.payload_blocks();
        matches!(self.layout.geometry.what_is(used.index()), EntryKind::Payload { block } if block >= blocks)
    }

    /// Finds overlaps and leaked space by one pass over blocks and metadata, sorted by offset.
    /// Returns the number of leaked bytes.
    fn space(&mut self, file_bytes: u64) -> u64 {
        let mut used = std::mem::take(&mut self.used);
        used.sort_unstable();
        let layout = self.layout;
        let mut metadata = layout.metadata.iter().copied().peekable();
        let mut used = used.into_iter().peekable();
        let (mut leaked_bytes, mut end_bytes) = (0, 0);
        // The block that ends last so far.
        let mut furthest: Option<(u64, Used)> = None;
        loop {
            let next_start = used.peek().map(|used| u64::from(used.start_mib) * MIB);
            let (start, end) = match (metadata.peek().copied(), next_start) {
                (Some((start, end)), next) if next.is_none_or(|next| start <= next) => {
                    metadata.next();
                    (start, end)
                }
                (_, Some(start)) => {
                    let Some(block) = used.next() else { break };
                    let end = start.saturating_add(self.len_bytes(block));
                    if let Some((_, other)) = furthest.filter(|(furthest, _)| *furthest > start && !block.has_no_data())
                    {
                        let message = format!(
                            "BAT entry {}: a block at {start}, inside the block at {} of BAT entry {}",
                            block.index(),
                            u64::from(other.start_mib) * MIB,
                            other.index()
                        );
                        self.findings.add(Severity::Corrupt, layout.entry_offset_bytes(block.index()), message);
                    }
                    if self.is_beyond_end(block) {
                        leaked_bytes += end.min(file_bytes).saturating_sub(start.max(end_bytes));
                    }
                    if !block.has_no_data() && furthest.is_none_or(|(furthest, _)| furthest < end) {
                        furthest = Some((end, block));
                    }
                    (start, end)
                }
                (Some(_), None) | (None, None) => break,
            };
            if start > end_bytes && end_bytes < file_bytes {
                let hole_bytes = start.min(file_bytes) - end_bytes;
                leaked_bytes += hole_bytes;
                self.findings.add(
                    Severity::Leak,
                    end_bytes,
                    format!("{} MiB that nothing refers to", hole_bytes / MIB),
                );
            }
            end_bytes = end_bytes.max(end);
        }
        leaked_bytes + self.slack(end_bytes, file_bytes)
    }

    /// Checks the slack after the last block. Returns the number of leaked bytes.
    fn slack(&mut self, end_bytes: u64, file_bytes: u64) -> u64 {
        let slack_bytes = file_bytes.saturating_sub(end_bytes);
        let room_bytes =
            self.layout.geometry.payload_blocks().saturating_sub(self.allocated) * self.layout.geometry.block_bytes();
        if slack_bytes == 0 {
            0
        } else if self.layout.fixed || (room_bytes > 0 && slack_bytes >= room_bytes) {
            self.findings.add(
                Severity::Note,
                end_bytes,
                format!("{} MiB at the file's end are reserved for future blocks", slack_bytes / MIB),
            );
            0
        } else {
            let message = format!(
                "{slack_bytes} bytes at the file's end that nothing refers to; the next session that changes the disk frees them"
            );
            self.findings.add(Severity::Leak, end_bytes, message);
            slack_bytes
        }
    }
}
