//! Finds overlaps and leaked space of a VHDX, and says how they are repaired.
//!
//! Used space is gathered as one record of eight bytes for each entry with space, and sorted. One
//! pass over the sorted records finds overlaps and unused space.
//!
//! Two blocks with data in one place cost data. An UNMAPPED or UNDEFINED entry may keep the place
//! where its block was, but that place "must contain the contents of the block" (MS-VHDX 2.5.1.1),
//! so no other block may be there: programs put the block there again when it is written, and
//! Microsoft's own code (openvmm) refuses the file. Such an entry reads as zeros here with and
//! without the place. So whichever of the two begins first, the entry without data loses its place,
//! and that costs nothing. The field of a ZERO or NOT_PRESENT entry is reserved: it means nothing.
//!
//! Space beyond 128 TiB, twice the largest disk, is reported: no writer of this program accepts it
//! (`survey.rs`), and the records have no room for it.

use super::{
    give_up::{entry_change, give_up_entry},
    layout::{Layout, MAX_FILE_MIB},
};
use crate::{
    error::Result,
    findings::{Change, Finding, Findings, Severity, is_hole},
};
use diskwright_format::vhdx::{BITMAP_BLOCK_BYTES, BatEntry, MIB, PayloadState, bat::EntryKind};
use diskwright_store::{FileRange, Store};

/// A used part of the file and its BAT entry, in eight bytes: a full disk has tens of millions.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct UsedRange {
    start_mib: u32,
    /// Index of the entry. The two top bits are the [`Claim`]. There are fewer than 2^27 entries.
    marked_index: u32,
}

/// What an entry claims of the space at its offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Claim {
    /// A block with data, or a sector bitmap block.
    Data,
    /// The place that a block in this state, UNMAPPED or UNDEFINED, keeps. No other block may be
    /// there.
    Kept(PayloadState),
    /// The offset of a ZERO or NOT_PRESENT entry, or of a block beyond the end of the disk. It may
    /// overlap another block without harm.
    Nothing,
}

impl UsedRange {
    const INDEX_BITS: u32 = 30;

    fn new(start_mib: u32, index: u32, claim: Claim) -> Self {
        let mark = match claim {
            Claim::Data => 0,
            Claim::Kept(PayloadState::Undefined) => 3,
            Claim::Kept(_) => 1,
            Claim::Nothing => 2,
        };
        Self { start_mib, marked_index: index | mark << Self::INDEX_BITS }
    }

    fn index(self) -> u64 {
        u64::from(self.marked_index & ((1 << Self::INDEX_BITS) - 1))
    }

    fn claim(self) -> Claim {
        match self.marked_index >> Self::INDEX_BITS {
            0 => Claim::Data,
            1 => Claim::Kept(PayloadState::Unmapped),
            3 => Claim::Kept(PayloadState::Undefined),
            _ => Claim::Nothing,
        }
    }
}

/// The used space of a file.
pub(super) struct Space<'a> {
    layout: &'a Layout,
    store: &'a dyn Store,
    used: Vec<UsedRange>,
}

impl<'a> Space<'a> {
    pub(super) fn new(layout: &'a Layout, store: &'a dyn Store) -> Self {
        Self { layout, store, used: Vec::new() }
    }

    /// Adds the space of an entry.
    pub(super) fn uses(&mut self, index: u64, start_bytes: u64, claim: Claim, findings: &mut Findings) {
        let len_bytes = self.entry_len_bytes(index);
        let is_far = start_bytes.saturating_add(len_bytes) > MAX_FILE_MIB * MIB;
        if is_far && claim == Claim::Data {
            let found = format!("a block at {start_bytes}");
            let expected = "a block within the first 128 TiB of the file";
            let message = format!("BAT entry {index}: {found}, expected {expected}; the disk cannot be written");
            let place = self.layout.entry_offset_bytes(index);
            let finding = Finding::new(Severity::Corrupt, place, format!("BAT entry {index}"), found, expected);
            findings.add(finding.says(message));
        } else if let (false, Ok(start_mib), Ok(index)) =
            (is_far, u32::try_from(start_bytes / MIB), u32::try_from(index))
        {
            self.used.push(UsedRange::new(start_mib, index, claim));
        }
    }

    fn entry_len_bytes(&self, index: u64) -> u64 {
        match self.layout.geometry.what_is(index) {
            EntryKind::Payload { .. } => self.layout.geometry.block_bytes(),
            EntryKind::Bitmap { .. } => BITMAP_BLOCK_BYTES,
        }
    }

    fn is_beyond_end(&self, used: UsedRange) -> bool {
        let blocks = self.layout.geometry.payload_blocks();
        matches!(self.layout.geometry.what_is(used.index()), EntryKind::Payload { block } if block >= blocks)
    }

    /// Reports a block with data that lies in another one.
    fn report_overlap(&self, block: UsedRange, start: u64, other: UsedRange, findings: &mut Findings) {
        let index = block.index();
        let message = format!(
            "BAT entry {index}: a block at {start}, inside the block at {} of BAT entry {}",
            u64::from(other.start_mib) * MIB,
            other.index()
        );
        let found = format!("a block at {start}, inside the block of BAT entry {}", other.index());
        let at = self.layout.entry_offset_bytes(index);
        let finding =
            Finding::new(Severity::Corrupt, at, format!("BAT entry {index}"), found, "space of its own").says(message);
        give_up_entry(self.layout, index, finding, findings);
    }

    /// Reports an UNMAPPED or UNDEFINED entry whose kept place is that of another block.
    fn report_kept(&self, kept: UsedRange, state: PayloadState, other: UsedRange, findings: &mut Findings) {
        let index = kept.index();
        let start = u64::from(kept.start_mib) * MIB;
        let found =
            format!("a block without data that keeps its place at {start}, which BAT entry {} has", other.index());
        let message = format!("BAT entry {index}: {found}; it reads as zeros, but other programs refuse the file");
        let at = self.layout.entry_offset_bytes(index);
        let finding = Finding::new(Severity::Corrupt, at, format!("BAT entry {index}"), found, "space of its own");
        let changes = entry_change(self.layout, index, BatEntry::payload(state, 0), findings).into_iter().collect();
        findings.add_repairable(finding.says(message), "the file offset is cleared; the block has no data", changes);
    }

    /// Finds overlaps and leaked space by one pass over blocks and metadata, sorted by offset.
    /// Returns the number of leaked bytes.
    /// `allocated`: number of blocks with data.
    pub(super) fn check(&mut self, file_bytes: u64, allocated: u64, findings: &mut Findings) -> Result<u64> {
        let mut used = std::mem::take(&mut self.used);
        // Of entries with one offset, those with data come first.
        used.sort_unstable();
        let layout = self.layout;
        let mut metadata = layout.metadata.iter().copied().peekable();
        let mut used = used.into_iter().peekable();
        let (mut leaked_bytes, mut end_bytes) = (0, 0);
        // The block with data that ends last so far, of those that stay.
        let mut data: Option<(u64, UsedRange)> = None;
        // The same of kept places. Those that stay do not overlap, so only the last may reach on.
        let mut kept: Option<(u64, UsedRange, PayloadState)> = None;
        loop {
            let next_start = used.peek().map(|used| u64::from(used.start_mib) * MIB);
            let (start, end) = match (metadata.peek().copied(), next_start) {
                (Some((start, end)), next) if next.is_none_or(|next| start <= next) => {
                    metadata.next();
                    (start, end)
                }
                (_, Some(start)) => {
                    let Some(block) = used.next() else { break };
                    let end = start.saturating_add(self.entry_len_bytes(block.index()));
                    let last_data = data.filter(|(end, _)| *end > start).map(|(_, last)| last);
                    let last_kept = kept.filter(|(end, ..)| *end > start);
                    match block.claim() {
                        Claim::Data => {
                            if let Some((_, last, state)) = last_kept {
                                self.report_kept(last, state, block, findings);
                                kept = None;
                            }
                            match last_data {
                                Some(other) => self.report_overlap(block, start, other, findings),
                                None => data = Some((end, block)),
                            }
                        }
                        Claim::Kept(state) => match last_data.or(last_kept.map(|(_, last, _)| last)) {
                            Some(other) => self.report_kept(block, state, other, findings),
                            None => kept = Some((end, block, state)),
                        },
                        Claim::Nothing => {}
                    }
                    if self.is_beyond_end(block) {
                        leaked_bytes += end.min(file_bytes).saturating_sub(start.max(end_bytes));
                    }
                    (start, end)
                }
                (Some(_), None) | (None, None) => break,
            };
            if start > end_bytes && end_bytes < file_bytes {
                let hole_bytes = start.min(file_bytes) - end_bytes;
                leaked_bytes += self.unused(FileRange { offset_bytes: end_bytes, len_bytes: hole_bytes }, findings)?;
            }
            end_bytes = end_bytes.max(end);
        }
        Ok(leaked_bytes + self.slack(end_bytes, file_bytes, allocated, findings))
    }

    /// Reports space between blocks that nothing refers to. Space that was given back to the file
    /// system is only noted. Returns the number of bytes.
    fn unused(&self, range: FileRange, findings: &mut Findings) -> Result<u64> {
        let message = format!("{} MiB that nothing refers to", range.len_bytes / MIB);
        let finding = |severity| {
            let found = format!("{} bytes that nothing refers to", range.len_bytes);
            Finding::new(severity, range.offset_bytes, "space in the file", found, "space of a block or a table")
        };
        if is_hole(self.store, range)? {
            let message = format!("{message}; they are a hole, which takes no room on the disk");
            findings.add(finding(Severity::Note).says(message));
            return Ok(range.len_bytes);
        }
        findings.add_repairable(
            finding(Severity::Leak).says(message),
            "the space is given back as a hole in the file",
            vec![Change::Free(range)],
        );
        Ok(range.len_bytes)
    }

    /// Checks the slack after the last block. Returns the number of leaked bytes.
    fn slack(&self, end_bytes: u64, file_bytes: u64, allocated: u64, findings: &mut Findings) -> u64 {
        let slack_bytes = file_bytes.saturating_sub(end_bytes);
        let room_bytes =
            self.layout.geometry.payload_blocks().saturating_sub(allocated) * self.layout.geometry.block_bytes();
        if slack_bytes == 0 {
            0
        } else if self.layout.fixed || (room_bytes > 0 && slack_bytes >= room_bytes) {
            let message = format!("{} MiB at the file's end are reserved for future blocks", slack_bytes / MIB);
            let found = format!("{slack_bytes} bytes without data");
            findings.add(Finding::new(Severity::Note, end_bytes, "end of the file", found, "").says(message));
            0
        } else {
            let message = format!(
                "{slack_bytes} bytes at the file's end that nothing refers to; the next session that changes the disk frees them"
            );
            let found = format!("{slack_bytes} bytes that nothing refers to");
            let expected = format!("a file that ends at {end_bytes}");
            let finding = Finding::new(Severity::Leak, end_bytes, "end of the file", found, expected).says(message);
            findings.add_repairable(finding, "the file is cut after its last block", vec![Change::Cut(end_bytes)]);
            slack_bytes
        }
    }
}
