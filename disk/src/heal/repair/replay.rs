//! Reads an undo file back: judges whether the image is as a repair has left it, and rolls back.
//!
//! ```text
//!   ARMED     check_versions ─▶ roll_back ─▶ the image as before the repair
//!   COMPLETE  changed_crc is that of the head ─▶ ARMED ─▶ roll_back
//! ```
//!
//! What must hold before anything is rolled back:
//!
//! - The head names the inode of the image. The device does not count: its number may change when
//!   the machine restarts. A copy of the image has another inode. On file systems that make inode
//!   numbers up (`Store::keeps_inode`) the head has 0, and only the contents are compared.
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
//! Time is proportional to the undo file and to the data of the image in the changed ranges. Holes
//! are never read and never written: a range may be a terabyte of nothing. Memory: one piece of
//! 1 MiB, 16 bytes for each version (at most [`VERSIONS_MAX`]) and for each range of zeros.

use super::{
    draft::SECTOR_BYTES,
    journal::{
        HEAD_BYTES, HOLE, Head, OLD, PIECE_BYTES, RECORD_BYTES, VERSIONS, ZEROS, ZEROS_MAX, merged, sector_crc, u32_at,
        u64_at,
    },
};
use diskwright_store::{FileRange, Store, Zeroing};
use std::{io, ops::Range};

/// Most versions that are read back: more than a draft has sectors.
const VERSIONS_MAX: usize = 1 << 21;

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
    let read = |bytes: &mut [u8], record: u64, at: u64| {
        journal.read_at(bytes, at).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => wrong(record, "is cut off"),
            _ => error,
        })
    };
    if journal.len_bytes()? != head.journal_bytes {
        let what = format!("it has {} bytes, expected {}", journal.len_bytes()?, head.journal_bytes);
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    let (mut at, mut reached, mut versions, mut zeros) = (HEAD_BYTES as u64, 0, 0, 0);
    while at < head.journal_bytes {
        let mut record = [0; RECORD_BYTES as usize];
        read(&mut record, at, at)?;
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
        read(&mut data, at, at + RECORD_BYTES)?;
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
            ZEROS => {
                zeros += 1;
                if zeros > ZEROS_MAX {
                    return Err(wrong(at, "is one of too many ranges of zeros"));
                }
                Record::Zeros(range)
            }
            VERSIONS => {
                versions += data.len() / 12;
                if versions > VERSIONS_MAX {
                    return Err(wrong(at, "is one of too many versions"));
                }
                Record::Versions(data.chunks_exact(12).map(|pair| (u64_at(pair, 0), u32_at(pair, 8))).collect())
            }
            _ => return Err(wrong(at, "has an unknown kind")),
        })?;
        at += RECORD_BYTES + data_bytes;
    }
    Ok(())
}

/// Calls `visit` with the parts of `range` that may hold data, whole sectors unless the range ends
/// within one. What follows the end of the image is left out.
fn each_data(
    image: &dyn Store,
    range: Range<u64>,
    visit: &mut dyn FnMut(Range<u64>) -> io::Result<()>,
) -> io::Result<()> {
    let end = range.end.min(image.len_bytes()?);
    let mut at = range.start;
    while at < end {
        let Some(data) = image.next_data(at)?.filter(|data| data.offset_bytes < end) else { break };
        let start = (data.offset_bytes / SECTOR_BYTES * SECTOR_BYTES).max(at);
        let stop = data.offset_bytes.saturating_add(data.len_bytes).div_ceil(SECTOR_BYTES).saturating_mul(SECTOR_BYTES);
        let stop = stop.clamp(start + 1, end.max(start + 1));
        visit(start..stop)?;
        at = stop;
    }
    Ok(())
}

/// The same, read in pieces of at most 1 MiB: their offsets and bytes.
fn each_piece(
    image: &dyn Store,
    range: Range<u64>,
    visit: &mut dyn FnMut(u64, &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut bytes = Vec::new();
    each_data(image, range, &mut |data| {
        let mut at = data.start;
        while at < data.end {
            bytes.resize((data.end - at).min(PIECE_BYTES) as usize, 0);
            image.read_at(&mut bytes, at)?;
            visit(at, &bytes)?;
            at += bytes.len() as u64;
        }
        Ok(())
    })
}

/// The parts of `bytes` at `start` that lie in one sector each, with their offsets.
fn by_sector(start: u64, bytes: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    let first = (SECTOR_BYTES - start % SECTOR_BYTES).min(bytes.len() as u64) as usize;
    let (head, rest) = bytes.split_at(first);
    let rest = (start + first as u64..).step_by(SECTOR_BYTES as usize).zip(rest.chunks(SECTOR_BYTES as usize));
    std::iter::once((start, head)).filter(|(_, head)| !head.is_empty()).chain(rest)
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
}

/// The checksum of the changed ranges as they are now: of all sectors in them that are not zero,
/// with their offsets. So a hole and zeros count the same: a file system may turn one into the
/// other at any time.
///
/// # Errors
/// As [`each_record`].
pub(super) fn changed_crc(journal: &dyn Store, head: &Head, image: &dyn Store) -> io::Result<u32> {
    let mut crc = 0;
    let mut add = |range: Range<u64>| {
        each_piece(image, range, &mut |start, bytes| {
            for (at, part) in by_sector(start, bytes).filter(|(_, part)| !is_zero(part)) {
                crc = crc32c::crc32c_append(crc32c::crc32c_append(crc, &at.to_le_bytes()), part);
            }
            Ok(())
        })
    };
    each_record(journal, head, &mut |record| match record {
        Record::Old(at, data) => add(at..at + data.len() as u64),
        Record::Hole(range) => add(range),
        Record::Versions(_) | Record::Zeros(_) => Ok(()),
    })?;
    // What lies beyond the old end was added by the repair.
    add(head.old_bytes..head.new_bytes)?;
    Ok(crc)
}

/// What a sector may hold besides its old bytes.
#[derive(Default)]
struct AllowedContents {
    /// Sector numbers and checksums, sorted.
    versions: Vec<(u64, u32)>,
    /// Ranges that may be zero, sorted, without overlaps.
    zeros: Vec<Range<u64>>,
}

impl AllowedContents {
    fn read(journal: &dyn Store, head: &Head) -> io::Result<Self> {
        let mut allowed = Self::default();
        each_record(journal, head, &mut |record| {
            match record {
                Record::Versions(pairs) => allowed.versions.extend(pairs),
                Record::Zeros(range) => allowed.zeros.push(range),
                Record::Old(..) | Record::Hole(_) => {}
            }
            Ok(())
        })?;
        allowed.versions.sort_unstable();
        allowed.zeros = merged(allowed.zeros);
        Ok(allowed)
    }

    /// Whether the sector at `at` may hold these bytes.
    fn has(&self, at: u64, bytes: &[u8]) -> bool {
        let version = (at / SECTOR_BYTES, sector_crc(bytes));
        let is_zeroed = || {
            let after = self.zeros.partition_point(|range| range.end <= at);
            self.zeros.get(after).is_some_and(|range| range.start <= at)
        };
        self.versions.binary_search(&version).is_ok() || is_zero(bytes) && is_zeroed()
    }
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
    let allowed = AllowedContents::read(journal, head)?;
    let foreign =
        |at: u64| changed(format!("the sector at offset {at} is neither as before the repair nor as after it"));
    // A part of a sector that is not as before: the whole sector counts.
    let judge = |at: u64| {
        let sector = at / SECTOR_BYTES * SECTOR_BYTES;
        let mut bytes = vec![0; (len_bytes - sector).min(SECTOR_BYTES) as usize];
        image.read_at(&mut bytes, sector)?;
        if allowed.has(sector, &bytes) { Ok(()) } else { foreign(sector) }
    };
    let mut found = Vec::new();
    each_record(journal, head, &mut |record| match record {
        Record::Old(start, old) => {
            // What lies beyond the end of the image is right.
            found.resize(len_bytes.saturating_sub(start).min(old.len() as u64) as usize, 0);
            if !found.is_empty() {
                image.read_at(&mut found, start)?;
            }
            let mut pairs = by_sector(start, &found).zip(by_sector(start, &old[..found.len()]));
            pairs.try_for_each(|((at, now), (_, old))| if now == old { Ok(()) } else { judge(at) })
        }
        // Holes that are left are as before.
        Record::Hole(range) => each_piece(image, range, &mut |start, bytes| {
            by_sector(start, bytes).try_for_each(|(at, now)| if is_zero(now) { Ok(()) } else { judge(at) })
        }),
        Record::Versions(_) | Record::Zeros(_) => Ok(()),
    })
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
        Record::Hole(range) => each_data(image, range, &mut |data| {
            let range = FileRange { offset_bytes: data.start, len_bytes: data.end - data.start };
            image.zero_range(range, Zeroing::Deallocate)
        }),
        Record::Versions(_) | Record::Zeros(_) => Ok(()),
    })?;
    image.sync_data()
}

#[cfg(test)]
mod tests {
    use super::{super::draft::Phase, super::journal, super::journal::JournalState, *};
    use diskwright_store::{MemoryStore, testing::ForwardingStore};
    use std::{
        sync::atomic::{AtomicU64, Ordering},
        time::{Duration, Instant},
    };

    fn head(image: &dyn Store) -> Head {
        let len_bytes = image.len_bytes().unwrap();
        Head {
            state: JournalState::Writing,
            inode: 0,
            journal_bytes: 0,
            old_bytes: len_bytes,
            shortest_bytes: len_bytes,
            longest_bytes: len_bytes,
            old_time_ns: 0,
            new_bytes: len_bytes,
            new_time_ns: 0,
            changed_crc: 0,
        }
    }

    /// A file of 8 TiB with data in its first MiB and in one sector of its middle.
    #[derive(Debug)]
    struct Sparse {
        data: MemoryStore,
        touched_bytes: AtomicU64,
        middle: u64,
    }

    const LEN_BYTES: u64 = 8 << 40;
    const START_BYTES: u64 = 1 << 20;

    impl Sparse {
        fn new(middle: u64) -> Self {
            let mut bytes = vec![7; START_BYTES as usize];
            bytes.extend([9; 512]);
            Self { data: MemoryStore::with_bytes("sparse", bytes), touched_bytes: AtomicU64::new(0), middle }
        }
    }

    impl ForwardingStore for Sparse {
        fn inner(&self) -> &dyn Store {
            &self.data
        }
        fn len_bytes(&self) -> io::Result<u64> {
            Ok(LEN_BYTES)
        }
        fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
            self.touched_bytes.fetch_add(buf.len() as u64, Ordering::Relaxed);
            if offset_bytes + buf.len() as u64 <= START_BYTES {
                return self.data.read_at(buf, offset_bytes);
            }
            assert_eq!((offset_bytes, buf.len()), (self.middle, 512), "a hole is read");
            self.data.read_at(buf, START_BYTES)
        }
        fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()> {
            self.touched_bytes.fetch_add(range.len_bytes, Ordering::Relaxed);
            assert_eq!((range.offset_bytes, range.len_bytes), (self.middle, 512), "a hole is zeroed");
            self.data.zero_range(FileRange { offset_bytes: START_BYTES, len_bytes: 512 }, how)
        }
        fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
            let data = [0..START_BYTES, self.middle..self.middle + 512];
            let next = data.into_iter().find(|data| data.end > offset_bytes);
            Ok(next.map(|data| {
                let start = data.start.max(offset_bytes);
                FileRange { offset_bytes: start, len_bytes: data.end - start }
            }))
        }
    }

    #[test]
    fn holes_are_neither_read_nor_written() {
        let image = Sparse::new(4 << 40);
        let journal = MemoryStore::new("undo");
        // The phase gives back everything behind the first MiB, and the sector is written since.
        let none = Sparse::new(LEN_BYTES);
        let phase = Phase { zeros: std::iter::once(START_BYTES..LEN_BYTES).collect(), ..Phase::default() };
        let head = journal::write(&journal, &none, &[phase], head(&none), &mut |_| Ok(())).unwrap();
        let without = changed_crc(&journal, &head, &none).unwrap();
        assert_ne!(changed_crc(&journal, &head, &image).unwrap(), without);
        let refused = check_versions(&journal, &head, &image).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput, "{refused}");
        roll_back(&journal, &head, &image).unwrap();
        assert!(image.data.to_vec()[START_BYTES as usize..].iter().all(|&byte| byte == 0));
        assert!(image.touched_bytes.load(Ordering::Relaxed) < 1 << 20);
    }

    /// With a look through all ranges for each sector this takes minutes.
    #[test]
    fn many_ranges_of_zeros_are_judged_quickly() {
        const RANGES: u64 = 60_000;
        let image = MemoryStore::with_bytes("image", vec![7; (RANGES * 1024) as usize]);
        let zeros: Vec<Range<u64>> = (0..RANGES).map(|at| at * 1024..at * 1024 + 512).collect();
        let journal = MemoryStore::new("undo");
        let phase = Phase { zeros: zeros.clone(), ..Phase::default() };
        let head = journal::write(&journal, &image, &[phase], head(&image), &mut |_| Ok(())).unwrap();
        for range in zeros {
            image.write_at(&[0; 512], range.start).unwrap();
        }
        let start = Instant::now();
        check_versions(&journal, &head, &image).unwrap();
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        image.write_at(&[0; 512], 512).unwrap();
        check_versions(&journal, &head, &image).unwrap();
        image.write_at(&[8; 512], 1024).unwrap();
        assert!(check_versions(&journal, &head, &image).is_err());
        roll_back(&journal, &head, &image).unwrap();
        assert!(image.to_vec().chunks(1024).skip(1).all(|pair| pair == [7; 1024]));
    }

    #[test]
    fn a_hole_and_zeros_have_the_same_checksum() {
        let mut bytes = vec![0; 64 << 10];
        bytes[5000] = 1;
        let image = MemoryStore::with_bytes("image", bytes);
        let journal = MemoryStore::new("undo");
        let phase = Phase { writes: vec![(0, vec![3; 32 << 10])], ..Phase::default() };
        let head = journal::write(&journal, &image, &[phase], head(&image), &mut |_| Ok(())).unwrap();
        let dense = changed_crc(&journal, &head, &image).unwrap();
        let sparse = changed_crc(&journal, &head, &Holed(image)).unwrap();
        assert_eq!(dense, sparse);
    }

    /// Knows that only the second page has data.
    #[derive(Debug)]
    struct Holed(MemoryStore);

    impl ForwardingStore for Holed {
        fn inner(&self) -> &dyn Store {
            &self.0
        }
        fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
            let start = offset_bytes.max(4096);
            Ok((start < 8192).then(|| FileRange { offset_bytes: start, len_bytes: 8192 - start }))
        }
    }
}
