//! Verified contents: each sector carries its offset and generation, which are checked when it is
//! read.
//!
//! ```text
//!   512 bytes:   magic (seed) | offset on the target | generation | CRC-32C of the sector | noise
//! ```
//!
//! A table has for each unit of the target the generation of the last write that began and of the
//! last one that ended. A unit is the largest piece that no request of the job divides. Without a
//! write in flight, a read must return the last generation. During a write, a read may return the
//! old generation, the new one, or torn sectors. These faults are found:
//!
//! - *misdirected*: a valid sector of another offset;
//! - *stale*: a valid sector of an earlier generation: a write was lost or undone;
//! - *torn*: a unit with sectors of several generations;
//! - *damaged*: a checksum that does not match;
//! - *foreign*: a sector that neither this run nor a fill with its seed has written.
//!
//! With two writes of a unit in flight the last generation would not be known. A write is therefore
//! drawn again while one of its units is being written. Verified runs make the same requests as
//! others in all other respects. Where the run has not written yet, any contents are accepted.
//!
//! After a failed write a unit may have the old contents, the new ones, or sectors of both: its
//! `ended` is [`UNKNOWN`], and reads of it are not checked. The unit stays unknown until a later
//! write of it succeeds, also while that write is in flight ([`UNKNOWN_IN_FLIGHT`]). A write that
//! is taken back before it is sent restores `UNKNOWN`.
//!
//! Invariant: `begun` of a unit is `ended` plus one while a write of it is in flight, and equal to
//! `ended` otherwise. For an unknown unit, `ended` alone says whether a write is in flight. No lock
//! is taken: the words of the table change by compare-and-swap. The table is allocated in pieces,
//! when a unit of a piece is first used.

use crate::job::{Job, Load};
use std::{
    fmt, io,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

/// The unit that has a header.
const SECTOR_BYTES: usize = 512;
const HEADER_BYTES: usize = 24;
const CRC_AT: usize = 20;
/// Units in a piece of the table, which is 512 KiB.
const PIECE_UNITS: u64 = 1 << 16;
/// `ended` of a unit whose last write failed and that has no write in flight: the contents are
/// unknown.
const UNKNOWN: u32 = u32::MAX;
/// `ended` of a unit whose last write failed and whose next write is in flight.
const UNKNOWN_IN_FLIGHT: u32 = u32::MAX - 1;

/// Generations of a unit: of the last write that began, and of the last one that ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct State {
    begun: u32,
    ended: u32,
}

impl State {
    fn of(word: u64) -> Self {
        Self { begun: (word >> 32) as u32, ended: word as u32 }
    }

    fn word(self) -> u64 {
        u64::from(self.begun) << 32 | u64::from(self.ended)
    }

    fn is_quiet(self) -> bool {
        self.begun == self.ended || self.ended == UNKNOWN
    }

    fn is_unknown(self) -> bool {
        matches!(self.ended, UNKNOWN | UNKNOWN_IN_FLIGHT)
    }

    /// The state after a write has begun.
    fn begin(self) -> Self {
        let ended = if self.ended == UNKNOWN { UNKNOWN_IN_FLIGHT } else { self.ended };
        Self { begun: self.begun + 1, ended }
    }

    /// The state before [`Self::begin`].
    fn take_back(self) -> Self {
        let ended = if self.ended == UNKNOWN_IN_FLIGHT { UNKNOWN } else { self.ended };
        Self { begun: self.begun - 1, ended }
    }
}

/// The generation table of a target. All threads of all phases share it.
#[derive(Debug)]
pub(crate) struct Generations {
    magic: u64,
    unit_bytes: u64,
    pieces: Vec<OnceLock<Box<[AtomicU64]>>>,
}

impl Generations {
    /// The table of a target of `size_bytes`, for the loads of `job`.
    pub(crate) fn new(job: &Job, size_bytes: u64) -> Self {
        let unit_bytes =
            job.phases.iter().flat_map(|phase| &phase.loads).flat_map(cuts).fold(0, greatest_common_divisor);
        let unit_bytes = unit_bytes.max(SECTOR_BYTES as u64);
        let pieces = size_bytes.div_ceil(unit_bytes).div_ceil(PIECE_UNITS);
        Self { magic: magic(job.seed), unit_bytes, pieces: (0..pieces).map(|_| OnceLock::new()).collect() }
    }

    fn unit(&self, unit: u64) -> Option<&AtomicU64> {
        let piece = self.pieces.get(usize::try_from(unit / PIECE_UNITS).ok()?)?;
        let piece = piece.get_or_init(|| (0..PIECE_UNITS).map(|_| AtomicU64::new(0)).collect());
        piece.get((unit % PIECE_UNITS) as usize)
    }

    fn units(&self, offset_bytes: u64, len_bytes: usize) -> std::ops::Range<u64> {
        offset_bytes / self.unit_bytes..(offset_bytes + len_bytes as u64).div_ceil(self.unit_bytes)
    }

    /// Begins a write. Returns `false`, and begins nothing, when a unit of it is being written.
    pub(crate) fn begin_write(&self, offset_bytes: u64, len_bytes: usize) -> bool {
        let units = self.units(offset_bytes, len_bytes);
        for unit in units.clone() {
            let begun = self.unit(unit).is_some_and(|word| {
                let begin = |word| {
                    let state = State::of(word);
                    state.is_quiet().then(|| state.begin().word())
                };
                word.fetch_update(Ordering::AcqRel, Ordering::Acquire, begin).is_ok()
            });
            if !begun {
                for taken in units.start..unit {
                    self.change(taken, State::take_back);
                }
                return false;
            }
        }
        true
    }

    /// Writes the sector headers into the payload of a write that has begun.
    pub(crate) fn seal(&self, offset_bytes: u64, buf: &mut [u8]) {
        for (index, sector) in buf.chunks_exact_mut(SECTOR_BYTES).enumerate() {
            let at_bytes = offset_bytes + (index * SECTOR_BYTES) as u64;
            let generation = self.state(at_bytes / self.unit_bytes).begun;
            seal_sector(self.magic, at_bytes, generation, sector);
        }
    }

    /// Ends a write.
    pub(crate) fn end_write(&self, offset_bytes: u64, len_bytes: usize, succeeded: bool) {
        for unit in self.units(offset_bytes, len_bytes) {
            self.change(unit, |state| State { ended: if succeeded { state.begun } else { UNKNOWN }, ..state });
        }
    }

    fn change(&self, unit: u64, change: impl Fn(State) -> State) {
        if let Some(word) = self.unit(unit) {
            let _ = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| Some(change(State::of(word)).word()));
        }
    }

    fn state(&self, unit: u64) -> State {
        State::of(self.unit(unit).map_or(0, |word| word.load(Ordering::Acquire)))
    }

    /// Stores the states of the units of a read that begins now in `before`.
    pub(crate) fn begin_read(&self, offset_bytes: u64, len_bytes: usize, before: &mut Vec<u64>) {
        before.clear();
        before.extend(self.units(offset_bytes, len_bytes).map(|unit| self.state(unit).word()));
    }

    /// Checks the data of a read. `before` has the states from [`Self::begin_read`].
    ///
    /// # Errors
    /// `InvalidData` with a [`Fault`] for the first wrong sector.
    pub(crate) fn check(&self, offset_bytes: u64, buf: &[u8], before: &[u64]) -> io::Result<()> {
        let first_unit = offset_bytes / self.unit_bytes;
        for (unit, before) in (first_unit..).zip(before) {
            let (before, after) = (State::of(*before), self.state(unit));
            if after.is_unknown() || before.is_unknown() {
                continue;
            }
            let from_bytes = (unit * self.unit_bytes).max(offset_bytes);
            let to_bytes = ((unit + 1) * self.unit_bytes).min(offset_bytes + buf.len() as u64);
            let piece = &buf[(from_bytes - offset_bytes) as usize..(to_bytes - offset_bytes) as usize];
            self.check_unit(from_bytes, piece, before, after)
                .map_err(|wrong| io::Error::new(io::ErrorKind::InvalidData, wrong))?;
        }
        Ok(())
    }

    fn check_unit(&self, offset_bytes: u64, unit: &[u8], before: State, after: State) -> Result<(), Fault> {
        let undisturbed = before.is_quiet() && before == after;
        // Generation of the first sector. Without a write in flight, all sectors must have it.
        let mut first = None;
        for (index, sector) in unit.chunks_exact(SECTOR_BYTES).enumerate() {
            let at_bytes = offset_bytes + (index * SECTOR_BYTES) as u64;
            let wrong = |kind| Err(Fault { at_bytes, kind });
            let found = match open_sector(self.magic, sector) {
                BlockVerdict::Sound { offset_bytes, generation } if offset_bytes == at_bytes => generation,
                BlockVerdict::Sound { offset_bytes, generation } => {
                    return wrong(FaultKind::Misdirected { belongs_bytes: offset_bytes, generation });
                }
                // The sector was being written, and may be torn.
                _ if !undisturbed => continue,
                // Before the first write any contents are accepted.
                BlockVerdict::Foreign if before.begun == 0 => continue,
                BlockVerdict::Foreign => return wrong(FaultKind::Foreign),
                BlockVerdict::Damaged => return wrong(FaultKind::Damaged),
            };
            let newest = if undisturbed { before.ended } else { after.begun };
            if found > newest {
                return wrong(FaultKind::FromTheFuture { found, newest });
            }
            match first {
                _ if !undisturbed && found < before.ended => {
                    return wrong(FaultKind::Stale { found, expected: before.ended });
                }
                Some(other) if undisturbed && other != found => return wrong(FaultKind::Torn { found, other }),
                _ => first = Some(found),
            }
        }
        match first {
            Some(found) if found < before.ended => {
                Err(Fault { at_bytes: offset_bytes, kind: FaultKind::Stale { found, expected: before.ended } })
            }
            _ => Ok(()),
        }
    }
}

/// Writes sector headers of generation 0 into `buf`, which holds noise.
pub(crate) fn seal_first(seed: u64, offset_bytes: u64, buf: &mut [u8]) {
    for (index, sector) in buf.chunks_exact_mut(SECTOR_BYTES).enumerate() {
        seal_sector(magic(seed), offset_bytes + (index * SECTOR_BYTES) as u64, 0, sector);
    }
}

fn magic(seed: u64) -> u64 {
    // "diskwrgt" and the seed times an odd number, so that consecutive seeds differ in all bytes.
    0x6469_736b_7772_6774 ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The sizes and offsets at which requests of a load start or end.
fn cuts(load: &Load) -> Vec<u64> {
    let sizes = load.block.shares().into_iter().map(|share| share.size.0);
    let others = [load.align, load.stride, Some(load.start), Some(load.thread_start)];
    sizes.chain(others.into_iter().flatten().map(|bytes| bytes.0)).collect()
}

fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

fn seal_sector(magic: u64, at_bytes: u64, generation: u32, sector: &mut [u8]) {
    sector[0..8].copy_from_slice(&magic.to_le_bytes());
    sector[8..16].copy_from_slice(&at_bytes.to_le_bytes());
    sector[16..CRC_AT].copy_from_slice(&generation.to_le_bytes());
    sector[CRC_AT..HEADER_BYTES].fill(0);
    let checksum = crc32c::crc32c(sector);
    sector[CRC_AT..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
}

enum BlockVerdict {
    Sound { offset_bytes: u64, generation: u32 },
    Damaged,
    Foreign,
}

fn open_sector(magic: u64, sector: &[u8]) -> BlockVerdict {
    let word = |at: usize| sector[at..at + 8].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    if word(0) != magic {
        return BlockVerdict::Foreign;
    }
    let (last, stored) = (word(16) as u32, (word(16) >> 32) as u32);
    let checksum = crc32c::crc32c_append(crc32c::crc32c(&sector[..CRC_AT]), &[0; HEADER_BYTES - CRC_AT]);
    let checksum = crc32c::crc32c_append(checksum, &sector[HEADER_BYTES..]);
    if checksum == stored {
        BlockVerdict::Sound { offset_bytes: word(8), generation: last }
    } else {
        BlockVerdict::Damaged
    }
}

/// A sector with wrong data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) at_bytes: u64,
    pub(crate) kind: FaultKind,
}

/// Kind of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FaultKind {
    Misdirected { belongs_bytes: u64, generation: u32 },
    Stale { found: u32, expected: u32 },
    Torn { found: u32, other: u32 },
    FromTheFuture { found: u32, newest: u32 },
    Damaged,
    Foreign,
}

impl std::error::Error for Fault {}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "wrong data at offset {}: ", self.at_bytes)?;
        match self.kind {
            FaultKind::Misdirected { belongs_bytes, generation } => write!(
                f,
                "misdirected: the sector was written to offset {belongs_bytes} (write number {generation} there)"
            ),
            FaultKind::Stale { found, expected } => write!(
                f,
                "stale: the sector is of write number {found} to this offset, but number {expected} had completed, so a write was lost"
            ),
            FaultKind::Torn { found, other } => write!(
                f,
                "torn: part of the block is of write number {found}, part is of number {other}, and no write was in flight"
            ),
            FaultKind::FromTheFuture { found, newest } => write!(
                f,
                "the sector is of write number {found}, but this run has made only {newest} writes to this offset; check that no other run writes to the target"
            ),
            FaultKind::Damaged => f.write_str("damaged: the checksum of the sector does not match"),
            FaultKind::Foreign => {
                f.write_str("foreign: the sector was not written by this run, which has written to this offset")
            }
        }
    }
}

#[cfg(test)]
#[path = "verify_tests.rs"]
mod tests;
