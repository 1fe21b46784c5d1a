//! Moves the second copy of a GPT to another end of the disk, and enlarges the last partition.
//!
//! ```text
//!   1  array and header of the second copy, at the new end
//!   2  array of the first copy            only if a partition changes: one sector of it
//!   3  header of the first copy           from now on the table ends at the new end
//!   4  protective MBR: its length
//!   5  zeros over the old second copy, if it is within the new size
//! ```
//!
//! Each step is durable before the next. A disk that grows has its new size before step 1; a disk
//! that shrinks is cut after step 5.
//!
//! Why a power cut does no harm: until step 2 the first copy is whole, and the old second copy too,
//! unless it lies where the new one goes. From step 3 on the first and the new second copy are
//! whole. Between 2 and 3 the checksum of the first copy's array is wrong, and the new second copy
//! is whole: programs use that. Step 5 is optional: no header refers to what it clears.
//!
//! What the next run accepts, so that it can finish:
//! - Both copies are valid and say the same.
//! - The first copy is valid and the second one is not: by the specification (UEFI 2.10, 5.3.2) the
//!   first one counts, and the second is restored from it. If both are valid and differ, nothing is
//!   changed.
//! - Both are valid, and differ only in what this change writes to the second copy first: the state
//!   after step 1, where the new second copy lies in the place of the old one. The end of a
//!   partition may differ only if the same partition is to be enlarged again.
//! - The first header is valid, its array has the wrong checksum, and a second copy at the end of
//!   the disk has exactly this array: the state between steps 2 and 3.

use super::{
    Partition,
    gpt::{self, Header},
    mark_overlaps, mbr,
    steps::{Change, Larger, Step, aligned_end, check_last},
};
use crate::{
    read::Window,
    reason::{LeftAlone, ReasonKind},
};
use std::ops::Range;

/// A GPT that may be changed.
#[derive(Debug)]
pub(super) struct Gpt {
    /// The first header, with the checksum of `array`.
    header: Header,
    array: Vec<u8>,
    partitions: Vec<Partition>,
    /// The second header, if it is valid.
    second: Option<Header>,
    /// Whether the checksum of the array must be put right.
    is_half_written: bool,
    sector_bytes: u64,
}

impl Gpt {
    /// Reads a table. `ends` are other sizes of the disk, in sectors, at whose end a second copy
    /// may be. `enlarge` is the number of the partition that will be enlarged.
    pub(super) fn read(window: &Window<'_>, ends: &[u64], enlarge: Option<u32>) -> Result<Self, LeftAlone> {
        let sector_bytes = u64::from(window.sector_bytes());
        let Some(entries) = mbr::primary_entries(&window.bytes(0, 512)?) else {
            return Err(LeftAlone::new(
                ReasonKind::Ambiguous,
                "a GPT without a protective MBR: repair the table with gdisk",
            ));
        };
        if mbr::is_hybrid(&entries) {
            return Err(LeftAlone::new(
                ReasonKind::Ambiguous,
                "a GPT, and an MBR that has partitions too (hybrid MBR)",
            ));
        }
        let mut header = gpt::header_at(window, 1)?;
        let array = gpt::array_of(window, &header)?;
        let is_half_written = crc32fast::hash(&array) != header.array_crc;
        let second = if is_half_written {
            let all = ends.iter().copied().chain([window.size_bytes() / sector_bytes]);
            let second = all.filter_map(|sectors| sectors.checked_sub(1)).find_map(|lba| {
                gpt::copy(window, lba).ok().filter(|(second, copied)| *copied == array && is_twin(&header, second))
            });
            let Some((second, _)) = second else {
                return Err(LeftAlone::damaged("the checksum of the GPT's entries does not match"));
            };
            // The entries are already those of the second copy.
            header = Header { array_crc: second.array_crc, last_usable_lba: second.last_usable_lba, ..header };
            Some(second)
        } else {
            let second = gpt::copy(window, header.other_lba).ok();
            if let Some(second) = &second
                && let Some(reason) = gpt::disagreement(&(header, array.clone()), second)
                && !is_ahead(&header, &array, second, enlarge)
            {
                return Err(reason);
            }
            second.map(|(second, _)| second)
        };
        let array_sectors = header.array_bytes().div_ceil(sector_bytes);
        let fits = header.array_lba > 1
            && header.array_lba.checked_add(array_sectors).is_some_and(|end| end <= header.first_usable_lba);
        if !fits {
            return Err(LeftAlone::damaged("the GPT's entries do not lie before its partitions"));
        }
        let mut partitions = gpt::partitions(window, &header, &array);
        mark_overlaps(&mut partitions);
        if let Some(reason) = partitions.iter().find_map(|partition| partition.problem.clone()) {
            return Err(reason);
        }
        Ok(Self { header, array, partitions, second, is_half_written, sector_bytes })
    }

    fn array_sectors(&self) -> u64 {
        self.header.array_bytes().div_ceil(self.sector_bytes)
    }

    /// Number of sectors of the smallest disk that has room for the partitions and both copies.
    pub(super) fn min_sectors(&self) -> u64 {
        let last = self.partitions.iter().map(|partition| partition.range_bytes.end.div_ceil(self.sector_bytes)).max();
        last.unwrap_or(0).max(self.header.first_usable_lba + 1) + self.array_sectors() + 1
    }

    /// The steps for a disk of `sectors`.
    pub(super) fn change(
        mut self,
        window: &Window<'_>,
        sectors: u64,
        enlarge: Option<u32>,
    ) -> Result<Change, LeftAlone> {
        if sectors < self.min_sectors() {
            let min_bytes = self.min_sectors() * self.sector_bytes;
            return Err(LeftAlone::new(
                ReasonKind::Unknown,
                format!("the partitions and the GPT need {min_bytes} bytes"),
            ));
        }
        let last_lba = sectors - 1;
        let array_lba = last_lba - self.array_sectors();
        let last_usable_lba = array_lba - 1;
        let larger = enlarge.map(|number| self.enlarge(number, last_usable_lba)).transpose()?;
        let array_crc = crc32fast::hash(&self.array);
        let first = Header { other_lba: last_lba, last_usable_lba, array_crc, ..self.header };
        let second = Header { my_lba: last_lba, other_lba: self.header.my_lba, array_lba, ..first };
        let mut steps = Vec::new();
        let is_same_array = array_crc == self.header.array_crc;
        if self.second != Some(second) || !is_same_array {
            let mut bytes = self.padded_array();
            bytes.extend(self.header_sector(window, &second)?);
            steps.push(Step { offset_bytes: array_lba * self.sector_bytes, bytes });
        }
        if !is_same_array {
            steps.extend(self.changed_sectors(window)?);
        }
        if first != self.header || self.is_half_written {
            let bytes = self.header_sector(window, &first)?;
            steps.push(Step { offset_bytes: self.header.my_lba * self.sector_bytes, bytes });
        }
        steps.extend(protective(window, self.sector_bytes, sectors)?);
        let new = array_lba..sectors;
        if let Some(old) = self.second.filter(|old| *old != second) {
            let ranges = [old.array_lba..old.array_lba + self.array_sectors(), old.my_lba..old.my_lba + 1];
            // Behind all partitions, as they were.
            let behind = ranges.into_iter().filter(|range| range.start > self.header.last_usable_lba);
            steps.extend(behind.filter_map(|range| self.cleared(range, &new)));
        }
        Ok(Change { steps, larger })
    }

    /// Lets a partition end at `last_usable_lba`, or a little before.
    fn enlarge(&mut self, number: u32, last_usable_lba: u64) -> Result<Larger, LeftAlone> {
        let wanted = check_last(&self.partitions, number)?;
        let (start_bytes, end_bytes) = (wanted.range_bytes.start, wanted.range_bytes.end);
        let limit_bytes = (last_usable_lba + 1) * self.sector_bytes;
        if end_bytes > limit_bytes {
            return Err(LeftAlone::new(
                ReasonKind::Unknown,
                format!("partition {number} ends beyond the new end of the disk"),
            ));
        }
        let new_end_bytes = aligned_end(end_bytes, limit_bytes);
        let last_lba = new_end_bytes / self.sector_bytes - 1;
        let at = (number as usize - 1) * self.header.entry_bytes as usize + 40;
        self.array[at..at + 8].copy_from_slice(&last_lba.to_le_bytes());
        Ok(Larger { start_bytes, old_bytes: end_bytes - start_bytes, new_bytes: new_end_bytes - start_bytes })
    }

    fn padded_array(&self) -> Vec<u8> {
        let mut bytes = self.array.clone();
        bytes.resize((self.array_sectors() * self.sector_bytes) as usize, 0);
        bytes
    }

    /// The sectors of the first array that differ from those on the disk, a step each.
    fn changed_sectors(&self, window: &Window<'_>) -> Result<Vec<Step>, LeftAlone> {
        let start_bytes = self.header.array_lba * self.sector_bytes;
        let mut steps = Vec::new();
        for (index, new) in self.array.chunks(self.sector_bytes as usize).enumerate() {
            let offset_bytes = start_bytes + index as u64 * self.sector_bytes;
            let mut bytes = window.bytes(offset_bytes, self.sector_bytes as usize)?;
            if bytes[..new.len()] != *new {
                bytes[..new.len()].copy_from_slice(new);
                steps.push(Step { offset_bytes, bytes });
            }
        }
        Ok(steps)
    }

    /// A sector with a header: that of the first copy, with other fields and checksum.
    fn header_sector(&self, window: &Window<'_>, header: &Header) -> Result<Vec<u8>, LeftAlone> {
        let mut sector = window.bytes(self.header.my_lba * self.sector_bytes, self.sector_bytes as usize)?;
        let header_bytes = u32::from_le_bytes([sector[12], sector[13], sector[14], sector[15]]) as usize;
        for (at, value) in
            [(24, header.my_lba), (32, header.other_lba), (48, header.last_usable_lba), (72, header.array_lba)]
        {
            sector[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        sector[88..92].copy_from_slice(&header.array_crc.to_le_bytes());
        sector[16..20].fill(0);
        // `gpt::header_at` has found 92 to 512 bytes.
        let crc = crc32fast::hash(&sector[..header_bytes.clamp(92, 512)]);
        sector[16..20].copy_from_slice(&crc.to_le_bytes());
        Ok(sector)
    }

    /// Zeros for what lies in `range` and not in `new`, both in sectors. Nothing that lies beyond.
    fn cleared(&self, range: Range<u64>, new: &Range<u64>) -> Option<Step> {
        let end = range.end.min(new.start);
        (range.start < end).then(|| Step {
            offset_bytes: range.start * self.sector_bytes,
            bytes: vec![0; ((end - range.start) * self.sector_bytes) as usize],
        })
    }
}

/// Whether a second header belongs to the first, apart from what a change of the size changes.
fn is_twin(first: &Header, second: &Header) -> bool {
    let mirrored = Header {
        my_lba: first.my_lba,
        other_lba: first.other_lba,
        array_lba: first.array_lba,
        last_usable_lba: first.last_usable_lba,
        array_crc: first.array_crc,
        ..*second
    };
    mirrored == *first && second.other_lba == first.my_lba
}

/// Whether the second copy differs from the first only by a change that was not finished: the last
/// usable sector, and the end of the partition `enlarge`.
fn is_ahead(first: &Header, array: &[u8], second: &(Header, Vec<u8>), enlarge: Option<u32>) -> bool {
    let (header, other) = second;
    let end_at = enlarge.map(|number| (number as usize).wrapping_sub(1).saturating_mul(first.entry_bytes as usize));
    let mut expected = array.to_vec();
    if let Some(start) = end_at.and_then(|at| at.checked_add(40))
        && let (Some(end), Some(new)) = (expected.get_mut(start..start + 8), other.get(start..start + 8))
    {
        end.copy_from_slice(new);
    }
    header.my_lba == first.other_lba && is_twin(first, header) && expected == *other
}

/// The protective MBR, where it must cover another number of sectors. One that covers the largest
/// number, as some programs write, is right for each size.
fn protective(window: &Window<'_>, sector_bytes: u64, sectors: u64) -> Result<Option<Step>, LeftAlone> {
    let mut sector = window.bytes(0, sector_bytes as usize)?;
    let covered = u32::try_from(sectors - 1).unwrap_or(u32::MAX).to_le_bytes();
    let Some(at) = [446, 462, 478, 494].into_iter().find(|at| sector[at + 4] == 0xee) else { return Ok(None) };
    let found = &sector[at + 12..at + 16];
    if found == covered || found == u32::MAX.to_le_bytes() {
        return Ok(None);
    }
    sector[at + 12..at + 16].copy_from_slice(&covered);
    Ok(Some(Step { offset_bytes: 0, bytes: sector }))
}
