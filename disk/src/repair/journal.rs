//! The undo file: what a repair needs to be rolled back, written before the file is changed.
//!
//! ```text
//!   ┌ head, 512 bytes ┬ record ┬ record ┬ ... ┐       all numbers little-endian
//!   head    0 "DWUNDO\0\1"     8 state, 4      12 CRC-32C of the head, this field as zeros, 4
//!          16 inode, 8        24 length of the undo file, 8
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
//!   image unchanged               │ ▲                         │ undo: nobody has written since
//!                                 │ └─────────────────────────┘
//!                                 └──rolled back──▶ the undo file is removed
//! ```
//!
//! A head is one sector, so a power cut leaves the old or the new state. ARMED means that the image
//! may be in any state between before and after. The next `check` with a repair or an undo rolls it
//! back. `undo` of a complete repair arms the file again and rolls back, so it can be interrupted
//! too.
//!
//! What must hold before anything is rolled back:
//!
//! - The head names the inode of the image. The device does not count: its number may change when
//!   the machine restarts. A copy of the image has another inode.
//! - Every checksum of the undo file is right, records are in the order of their offsets and lie
//!   within the image's old length.
//! - ARMED: every changed sector of the image is as before the repair or one of the recorded
//!   versions, and its length lies between the shortest and the longest. A VHDX that was written
//!   since has other headers, and a VHD whose table was changed another table.
//! - COMPLETE: length, time of the last change and all changed ranges are those that the repair
//!   left. The time is set back a little at the end of the repair, so that a write right after it
//!   gives another time. The headers of a VHDX are among the changed ranges, and every program that
//!   writes to it changes them.
//!
//! Memory: one record, at most 1 MiB, and the versions.

use super::draft::{Phase, SECTOR_BYTES};
use diskwright_store::{FileRange, Store, Zeroing};
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    ops::Range,
};

const MAGIC: [u8; 8] = *b"DWUNDO\0\x01";
pub(super) const HEAD_BYTES: usize = 512;
const RECORD_BYTES: u64 = 32;
/// Longest data of a record.
const PIECE_BYTES: u64 = 1 << 20;
/// Most versions that are read back: as many as the largest repair has.
const VERSIONS_BYTES_MAX: u64 = 64 << 20;

const OLD: u32 = 1;
const HOLE: u32 = 2;
const VERSIONS: u32 = 3;
const ZEROS: u32 = 4;

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

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
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

    /// Reads the head of a file; `None` if it is no undo file.
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
    let mut ranges: Vec<Range<u64>> = ranges.into_iter().map(whole).filter(|range| range.start < range.end).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match merged.last_mut().filter(|last| last.end >= range.start) {
            Some(last) => last.end = last.end.max(range.end),
            None => merged.push(range),
        }
    }
    merged
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
    let mut versions: BTreeSet<(u64, u32)> = BTreeSet::new();
    for phase in phases {
        for range in &phase.zeros {
            writer.record(ZEROS, range.clone(), &[])?;
        }
        for (offset_bytes, bytes) in &phase.writes {
            for (sector, bytes) in (offset_bytes / SECTOR_BYTES..).zip(bytes.chunks(SECTOR_BYTES as usize)) {
                versions.insert((sector, sector_crc(bytes)));
            }
            len = len.max(offset_bytes + bytes.len() as u64);
        }
        len = len.max(phase.grow_to_bytes.unwrap_or(0));
        longest = longest.max(len);
        if let Some(cut) = phase.cut_to_bytes {
            // A later phase may extend the file again, with zeros.
            writer.record(ZEROS, cut..len.max(cut), &[])?;
            len = cut;
        }
        shortest = shortest.min(len);
    }
    let versions: Vec<(u64, u32)> = versions.into_iter().collect();
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

/// A record of an undo file that was read back.
enum Record {
    Old(u64, Vec<u8>),
    Hole(Range<u64>),
    Versions(Vec<(u64, u32)>),
    Zeros(Range<u64>),
}

/// Reads the records one by one.
///
/// # Errors
/// `InvalidData`, with what is wrong, for an undo file that is damaged; errors of the store and of
/// `visit`.
fn each_record(journal: &dyn Store, head: &Head, visit: &mut dyn FnMut(Record) -> io::Result<()>) -> io::Result<()> {
    let wrong = |at: u64, what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("the record at {at} {what}"));
    if journal.len_bytes()? != head.journal_bytes {
        let what = format!("it has {} bytes, expected {}", journal.len_bytes()?, head.journal_bytes);
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    let (mut at, mut reached, mut versions_bytes) = (HEAD_BYTES as u64, 0, 0);
    while at < head.journal_bytes {
        let mut record = [0; RECORD_BYTES as usize];
        journal.read_at(&mut record, at).map_err(|_| wrong(at, "is cut off"))?;
        if crc32c::crc32c(&record[..24]) != u32_at(&record, 24) {
            return Err(wrong(at, "has another checksum"));
        }
        let (kind, start, len) = (u32_at(&record, 0), u64_at(&record, 8), u64_at(&record, 16));
        let range = start..start.checked_add(len).ok_or_else(|| wrong(at, "has a range beyond 2^64"))?;
        let data_bytes = if matches!(kind, OLD | VERSIONS) { len } else { 0 };
        if data_bytes > PIECE_BYTES {
            return Err(wrong(at, "is longer than 1 MiB"));
        }
        let mut data = vec![0; data_bytes as usize];
        journal.read_at(&mut data, at + RECORD_BYTES).map_err(|_| wrong(at, "is cut off"))?;
        if crc32c::crc32c(&data) != u32_at(&record, 4) {
            return Err(wrong(at, "has data with another checksum"));
        }
        if matches!(kind, OLD | HOLE) {
            if range.start < reached || range.end > head.old_bytes {
                return Err(wrong(at, "does not follow the one before it, or lies beyond the end of the image"));
            }
            reached = range.end;
        }
        visit(match kind {
            OLD => Record::Old(start, data),
            HOLE => Record::Hole(range),
            ZEROS => Record::Zeros(range),
            VERSIONS => {
                versions_bytes += len;
                if versions_bytes > VERSIONS_BYTES_MAX {
                    return Err(wrong(at, "is one of more than 64 MiB of versions"));
                }
                Record::Versions(data.chunks_exact(12).map(|pair| (u64_at(pair, 0), u32_at(pair, 8))).collect())
            }
            _ => return Err(wrong(at, "has an unknown kind")),
        })?;
        at += RECORD_BYTES + data_bytes;
    }
    Ok(())
}

/// The checksum of the changed ranges as they are now; `None` if the image is too short for one.
///
/// # Errors
/// As [`each_record`].
pub(super) fn changed_crc(journal: &dyn Store, head: &Head, image: &dyn Store) -> io::Result<u32> {
    let mut crc = 0;
    let len_bytes = image.len_bytes()?;
    let mut add = |range: Range<u64>| {
        let mut at = range.start;
        while at < range.end.min(len_bytes) {
            let mut bytes = vec![0; (range.end.min(len_bytes) - at).min(PIECE_BYTES) as usize];
            image.read_at(&mut bytes, at)?;
            crc = crc32c::crc32c_append(crc, &bytes);
            at += bytes.len() as u64;
        }
        Ok(())
    };
    each_record(journal, head, &mut |record| match record {
        Record::Old(at, data) => add(at..at + data.len() as u64),
        // What is still a hole is not read: it may be long.
        Record::Hole(range) => match image.next_data(range.start)? {
            Some(data) if data.offset_bytes < range.end => add(data.offset_bytes.max(range.start)..range.end),
            _ => Ok(()),
        },
        Record::Versions(_) | Record::Zeros(_) => Ok(()),
    })?;
    // What lies beyond the old end was added by the repair.
    add(head.old_bytes..head.new_bytes)?;
    Ok(crc)
}

/// Checks that the image is in a state that the repair or an interrupted undo has left.
///
/// # Errors
/// `InvalidInput`, with what is wrong, if another program has written to the image; as
/// [`each_record`].
pub(super) fn check_versions(journal: &dyn Store, head: &Head, image: &dyn Store) -> io::Result<()> {
    let changed = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    let len_bytes = image.len_bytes()?;
    if !(head.shortest_bytes..=head.longest_bytes).contains(&len_bytes) {
        return changed(format!(
            "it has {len_bytes} bytes, expected {} to {}",
            head.shortest_bytes, head.longest_bytes
        ));
    }
    let mut versions: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    let mut zeros: Vec<Range<u64>> = Vec::new();
    each_record(journal, head, &mut |record| {
        match record {
            Record::Versions(pairs) => {
                pairs.into_iter().for_each(|(sector, crc)| versions.entry(sector).or_default().push(crc))
            }
            Record::Zeros(range) => zeros.push(range),
            Record::Old(..) | Record::Hole(_) => {}
        }
        Ok(())
    })?;
    zeros.sort_unstable_by_key(|range| range.start);
    let is_version = |at: u64, bytes: &[u8]| {
        versions.get(&(at / SECTOR_BYTES)).is_some_and(|crcs| crcs.contains(&sector_crc(bytes)))
            || bytes.iter().all(|&byte| byte == 0) && zeros.iter().any(|range| range.start <= at && at < range.end)
    };
    each_record(journal, head, &mut |record| {
        let judge = |start: u64, old: &[u8]| match first_foreign(image, len_bytes, start, old, &is_version)? {
            None => Ok(()),
            Some(at) => changed(format!("the sector at offset {at} is neither as before the repair nor as after it")),
        };
        match record {
            Record::Old(start, old) => judge(start, &old),
            Record::Hole(range) => {
                let mut at = range.start;
                while at < range.end {
                    // Holes that are left are as before.
                    let Some(data) = image.next_data(at)?.filter(|data| data.offset_bytes < range.end) else { break };
                    let start = data.offset_bytes.max(at);
                    let stop = data.offset_bytes.saturating_add(data.len_bytes).min(range.end);
                    let stop = stop.clamp(start + 1, start + PIECE_BYTES);
                    judge(start, &vec![0; (stop - start) as usize])?;
                    at = stop;
                }
                Ok(())
            }
            Record::Versions(_) | Record::Zeros(_) => Ok(()),
        }
    })
}

/// The checksum of a sector. A sector that the end of the file cuts counts as filled with zeros.
fn sector_crc(bytes: &[u8]) -> u32 {
    let crc = crc32c::crc32c(bytes);
    crc32c::crc32c_append(crc, &vec![0; (SECTOR_BYTES as usize).saturating_sub(bytes.len())])
}

/// The first sector of a piece that is neither `old` nor, by `is_version`, a version of the repair.
/// What lies beyond the end of the image is right.
fn first_foreign(
    image: &dyn Store,
    len_bytes: u64,
    start: u64,
    old: &[u8],
    is_version: &dyn Fn(u64, &[u8]) -> bool,
) -> io::Result<Option<u64>> {
    let held = len_bytes.saturating_sub(start).min(old.len() as u64);
    let mut found = vec![0; held as usize];
    image.read_at(&mut found, start)?;
    let mut at = start;
    while at < start + held {
        // A piece may begin within a sector, where a hole ends.
        let sector = at / SECTOR_BYTES * SECTOR_BYTES;
        let stop = (sector + SECTOR_BYTES).min(start + held);
        let part = (at - start) as usize..(stop - start) as usize;
        if found[part.clone()] != old[part] {
            let mut bytes = vec![0; (len_bytes - sector).min(SECTOR_BYTES) as usize];
            image.read_at(&mut bytes, sector)?;
            if !is_version(sector, &bytes) {
                return Ok(Some(sector));
            }
        }
        at = stop;
    }
    Ok(None)
}

/// Gives the image the bytes and the length that it had, durably. The head must be ARMED.
///
/// # Errors
/// As [`each_record`]; errors of the image. The same call finishes what was begun.
pub(super) fn roll_back(journal: &dyn Store, head: &Head, image: &dyn Store) -> io::Result<()> {
    if image.len_bytes()? != head.old_bytes {
        image.set_len(head.old_bytes)?;
    }
    each_record(journal, head, &mut |record| match record {
        Record::Old(at, data) => image.write_at(&data, at),
        Record::Hole(range) => {
            let range = FileRange { offset_bytes: range.start, len_bytes: range.end - range.start };
            image.zero_range(range, Zeroing::Deallocate)
        }
        Record::Versions(_) | Record::Zeros(_) => Ok(()),
    })?;
    image.sync_data()
}
