//! The undo file: what a repair needs to be rolled back, written before the file is changed.
//!
//! ```text
//!   ┌ head, 512 bytes ┬ record ┬ record ┬ ... ┐       all numbers little-endian
//!   head    0 "DWUNDO\0\1"     8 state, 4      12 CRC-32C of the head, this field as zeros, 4
//!          16 inode, 8; 0 where inode numbers change with each mount (FAT)
//!                             24 length of the undo file, 8
//!          32 length of the image before the repair, 8
//!          40 shortest and 48 longest length that the image has during the repair, 8 each
//!          56 time of the last change before the repair, nanoseconds since 1970, 8; 0: unknown
//!          64 length after, 8        72 time after, 8       80 CRC-32C of the changed ranges, 4
//!   record  0 kind, 4          4 CRC-32C of its data, 4
//!           8 offset, 8       16 length, 8     24 CRC-32C of bytes 0 to 24, 4    28 zero, 4
//!   kinds   1 OLD      `length` bytes of data: those at `offset` of the image before the repair
//!           2 HOLE     no data: `length` bytes at `offset` were a hole
//!           3 VERSIONS `length` bytes of data: pairs of sector number (8) and CRC-32C (4) of that
//!                      sector as it is at some moment of the repair
//!           4 ZEROS    no data: the sectors of this range may be zero during the repair
//! ```
//!
//! States:
//!
//! ```text
//!   WRITING ──records durable──▶ ARMED ──repair durable──▶ COMPLETE
//!   image unchanged               │ ▲                         │ undo: no write followed
//!                                 │ └─────────────────────────┘
//!                                 └──rolled back──▶ the undo file is removed
//! ```
//!
//! A head is one sector, so a power cut leaves the old or the new state. ARMED means that the image
//! may be in any state between before and after. The next `check` with a repair or an undo rolls it
//! back. `undo` of a complete repair arms the file again and rolls back, so it can be interrupted
//! too.
//!
//! The first sector becomes durable together with the records, before the image changes. So a file
//! of zeros, or an empty one, is what a power cut has left of an undo file that was never armed.
//!
//! `replay.rs` reads the records back, and says what must hold before they are used.
//!
//! Memory: one record, at most 1 MiB; 16 bytes for each version of a sector, of which a draft has
//! at most a million (`draft.rs`); 16 bytes for each range of zeros, at most [`ZEROS_MAX`].

use super::draft::{Phase, SECTOR_BYTES};
use diskwright_store::Store;
use std::{io, ops::Range};

const MAGIC: [u8; 8] = *b"DWUNDO\0\x01";
pub(super) const HEAD_BYTES: usize = 512;
pub(super) const RECORD_BYTES: u64 = 32;
/// Longest data of a record.
pub(super) const PIECE_BYTES: u64 = 1 << 20;
/// Most ranges of zeros, separate from each other, of one repair.
pub(super) const ZEROS_MAX: usize = 1 << 22;

pub(super) const OLD: u32 = 1;
pub(super) const HOLE: u32 = 2;
pub(super) const VERSIONS: u32 = 3;
pub(super) const ZEROS: u32 = 4;

/// What the state of an undo file says about its image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum JournalState {
    /// The undo file is not complete; the image was not changed.
    Writing,
    /// The image is being changed or rolled back.
    Armed,
    /// The repair is complete.
    Complete,
}

/// The first sector of an undo file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) state: JournalState,
    pub(super) inode: u64,
    pub(super) journal_bytes: u64,
    pub(super) old_bytes: u64,
    pub(super) shortest_bytes: u64,
    pub(super) longest_bytes: u64,
    pub(super) old_time_ns: i64,
    pub(super) new_bytes: u64,
    pub(super) new_time_ns: i64,
    pub(super) changed_crc: u32,
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default())
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap_or_default())
}

impl Head {
    fn to_bytes(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        let state: u32 = match self.state {
            JournalState::Writing => 1,
            JournalState::Armed => 2,
            JournalState::Complete => 3,
        };
        put(0, &MAGIC);
        put(8, &state.to_le_bytes());
        let numbers = [
            self.inode,
            self.journal_bytes,
            self.old_bytes,
            self.shortest_bytes,
            self.longest_bytes,
            self.old_time_ns as u64,
            self.new_bytes,
            self.new_time_ns as u64,
        ];
        for (index, number) in numbers.into_iter().enumerate() {
            put(16 + 8 * index, &number.to_le_bytes());
        }
        put(80, &self.changed_crc.to_le_bytes());
        let crc = crc32c::crc32c(&bytes);
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Parses the first sector of a file; `None` if it is not that of an undo file.
    ///
    /// # Errors
    /// What is wrong with an undo file.
    pub(super) fn parse(bytes: &[u8; HEAD_BYTES]) -> Result<Option<Self>, String> {
        if bytes[..8] != MAGIC {
            return Ok(None);
        }
        let mut unsealed = *bytes;
        unsealed[12..16].fill(0);
        if crc32c::crc32c(&unsealed) != u32_at(bytes, 12) {
            return Err("its first sector has another checksum".into());
        }
        let state = match u32_at(bytes, 8) {
            1 => JournalState::Writing,
            2 => JournalState::Armed,
            3 => JournalState::Complete,
            other => return Err(format!("it has the state {other}, expected 1, 2 or 3")),
        };
        let number = |index: usize| u64_at(bytes, 16 + 8 * index);
        Ok(Some(Self {
            state,
            inode: number(0),
            journal_bytes: number(1),
            old_bytes: number(2),
            shortest_bytes: number(3),
            longest_bytes: number(4),
            old_time_ns: number(5) as i64,
            new_bytes: number(6),
            new_time_ns: number(7) as i64,
            changed_crc: u32_at(bytes, 80),
        }))
    }

    /// Writes the head, durably.
    pub(super) fn write(&self, journal: &dyn Store) -> io::Result<()> {
        journal.write_at(&self.to_bytes(), 0)?;
        journal.sync_data()
    }

    /// Reads the head of a file; `None` if it is not an undo file.
    pub(super) fn read(journal: &dyn Store) -> io::Result<Result<Option<Self>, String>> {
        let mut bytes = [0; HEAD_BYTES];
        match journal.read_at(&mut bytes, 0) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(Ok(None)),
            Err(error) => Err(error),
            Ok(()) => Ok(Self::parse(&bytes)),
        }
    }
}

/// The parts of an image of `old_bytes` that the phases change, whole sectors, sorted.
pub(super) fn changed_ranges(phases: &[Phase], old_bytes: u64) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for phase in phases {
        ranges.extend(phase.zeros.iter().cloned());
        ranges.extend(phase.writes.iter().map(|(at, bytes)| *at..*at + bytes.len() as u64));
        ranges.extend(phase.cut_to_bytes.map(|cut| cut..old_bytes.max(cut)));
    }
    let whole = |range: Range<u64>| {
        let start = range.start / SECTOR_BYTES * SECTOR_BYTES;
        start..range.end.next_multiple_of(SECTOR_BYTES).min(old_bytes)
    };
    merged(ranges.into_iter().map(whole).collect())
}

/// The same ranges, sorted and without overlaps. Ranges that touch become one.
pub(super) fn merged(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, last| {
        let touches = next.start <= last.end;
        if touches {
            last.end = last.end.max(next.end);
        }
        touches
    });
    ranges.retain(|range| range.start < range.end);
    ranges
}

/// Appends records to an undo file.
struct Writer<'a> {
    journal: &'a dyn Store,
    at: u64,
}

impl Writer<'_> {
    fn record(&mut self, kind: u32, range: Range<u64>, data: &[u8]) -> io::Result<()> {
        let mut bytes = vec![0; RECORD_BYTES as usize + data.len()];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &kind.to_le_bytes());
        put(4, &crc32c::crc32c(data).to_le_bytes());
        put(8, &range.start.to_le_bytes());
        put(16, &(range.end - range.start).to_le_bytes());
        put(RECORD_BYTES as usize, data);
        let crc = crc32c::crc32c(&bytes[..24]);
        bytes[24..28].copy_from_slice(&crc.to_le_bytes());
        self.journal.write_at(&bytes, self.at)?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// The old bytes of a range. Holes take no room.
    fn old(
        &mut self,
        image: &dyn Store,
        range: Range<u64>,
        done: &mut dyn FnMut(u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut at = range.start;
        while at < range.end {
            let data = image.next_data(at)?;
            let start = data.as_ref().map_or(range.end, |data| data.offset_bytes.clamp(at, range.end));
            if at < start {
                self.record(HOLE, at..start, &[])?;
                done(start - at)?;
                at = start;
                continue;
            }
            let stop = data.map_or(range.end, |data| data.offset_bytes.saturating_add(data.len_bytes)).min(range.end);
            let stop = stop.clamp(at + 1, at + PIECE_BYTES);
            let mut bytes = vec![0; (stop - at) as usize];
            image.read_at(&mut bytes, at)?;
            self.record(OLD, at..stop, &bytes)?;
            done(stop - at)?;
            at = stop;
        }
        Ok(())
    }
}

/// Writes the undo file for these phases, durably, in the state ARMED. `head` has the inode and the
/// time. Calls `done` with the bytes of each piece; its error ends the work.
///
/// # Errors
/// Those of the two stores. The image is unchanged.
pub(super) fn write(
    journal: &dyn Store,
    image: &dyn Store,
    phases: &[Phase],
    mut head: Head,
    done: &mut dyn FnMut(u64) -> io::Result<()>,
) -> io::Result<Head> {
    head.state = JournalState::Writing;
    journal.write_at(&head.to_bytes(), 0)?;
    let mut writer = Writer { journal, at: HEAD_BYTES as u64 };
    for range in changed_ranges(phases, head.old_bytes) {
        writer.old(image, range, done)?;
    }
    let (mut shortest, mut longest, mut len) = (head.old_bytes, head.old_bytes, head.old_bytes);
    let mut versions: Vec<(u64, u32)> = Vec::new();
    let mut zeros: Vec<Range<u64>> = Vec::new();
    for phase in phases {
        zeros.extend(phase.zeros.iter().cloned());
        for (offset_bytes, bytes) in &phase.writes {
            for (sector, bytes) in (offset_bytes / SECTOR_BYTES..).zip(bytes.chunks(SECTOR_BYTES as usize)) {
                versions.push((sector, sector_crc(bytes)));
            }
            len = len.max(offset_bytes + bytes.len() as u64);
        }
        len = len.max(phase.grow_to_bytes.unwrap_or(0));
        longest = longest.max(len);
        if let Some(cut) = phase.cut_to_bytes {
            // A later phase may extend the file again, with zeros.
            zeros.push(cut..len.max(cut));
            len = cut;
        }
        shortest = shortest.min(len);
    }
    let zeros = merged(zeros);
    if zeros.len() > ZEROS_MAX {
        let what = format!("the repair would give back {} ranges, more than {ZEROS_MAX}", zeros.len());
        return Err(io::Error::new(io::ErrorKind::OutOfMemory, what));
    }
    for range in zeros {
        writer.record(ZEROS, range, &[])?;
    }
    versions.sort_unstable();
    versions.dedup();
    for piece in versions.chunks(PIECE_BYTES as usize / 12) {
        let pairs = piece.iter().flat_map(|(sector, crc)| {
            let mut pair = [0; 12];
            pair[..8].copy_from_slice(&sector.to_le_bytes());
            pair[8..].copy_from_slice(&crc.to_le_bytes());
            pair
        });
        let data: Vec<u8> = pairs.collect();
        writer.record(VERSIONS, 0..data.len() as u64, &data)?;
    }
    (head.journal_bytes, head.shortest_bytes, head.longest_bytes) = (writer.at, shortest, longest);
    journal.sync_data()?;
    head.state = JournalState::Armed;
    head.write(journal)?;
    Ok(head)
}

/// The checksum of a sector. A sector that the end of the file cuts counts as filled with zeros.
pub(super) fn sector_crc(bytes: &[u8]) -> u32 {
    const ZERO_SECTOR: [u8; SECTOR_BYTES as usize] = [0; SECTOR_BYTES as usize];
    let crc = crc32c::crc32c(bytes);
    crc32c::crc32c_append(crc, &ZERO_SECTOR[bytes.len().min(ZERO_SECTOR.len())..])
}
