//! Contents that say where they belong and when they were written, and are checked when they are
//! read.
//!
//! ```text
//!   each 512 bytes:   magic of the run's seed | offset on the target | generation | CRC-32C of all 512 | noise
//! ```
//!
//! A table counts, for each unit of the target, the writes that were begun and the last one that
//! ended. A unit is the largest piece that no request of the job ever cuts. Of a unit with nothing
//! in flight a read must bring back exactly the last generation; of one that was being written
//! while it was read, either one, and sectors that are half the one and half the other. So what is
//! wrong is told apart:
//!
//! - *misdirected*: a sound sector that belongs elsewhere;
//! - *stale*: a sound sector of an earlier generation: a write was lost, or undone;
//! - *torn*: a unit of which some sectors are older than others;
//! - *damaged*: a checksum that does not match; *foreign*: nothing that this run, or a fill with
//!   its seed, has written.
//!
//! Two writes of a unit at the same time would leave nobody knowing which came last, so a write
//! whose units are being written is drawn again; that is the only difference that checking makes to
//! the requests. What was on the target before is accepted, and counted, where the run has not
//! written yet.
//!
//! After a failed write a unit may hold the old contents, the new ones, or sectors of both: its
//! `ended` is [`UNKNOWN`], and reads of it are not checked. The unit stays unknown until a later
//! write of it succeeds. That a later write is in flight changes nothing ([`UNKNOWN_IN_FLIGHT`]),
//! and a write that is taken back before it was sent leaves `UNKNOWN` as it was.
//!
//! Invariant: a unit's `begun` is one more than its `ended` while exactly one write of it is in
//! flight, and equal to it otherwise; of an unknown unit `ended` alone says whether a write is in
//! flight. The words are changed by compare-and-swap; the table grows with what is touched, by
//! pieces.

use crate::job::{Job, Load};
use std::{
    fmt, io,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

/// What has a header of its own.
const SECTOR_BYTES: usize = 512;
const HEADER_BYTES: usize = 24;
const CRC_AT: usize = 20;
/// Units in a piece of the table: 512 KiB.
const PIECE_UNITS: u64 = 1 << 16;
/// An `ended` of a unit whose last write failed, with no write in flight: its contents are unknown.
const UNKNOWN: u32 = u32::MAX;
/// An `ended` of such a unit while the next write of it is in flight.
const UNKNOWN_IN_FLIGHT: u32 = u32::MAX - 1;

/// What was begun and ended on a unit.
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

    /// One more write in flight.
    fn begin(self) -> Self {
        let ended = if self.ended == UNKNOWN { UNKNOWN_IN_FLIGHT } else { self.ended };
        Self { begun: self.begun + 1, ended }
    }

    /// As before [`Self::begin`].
    fn take_back(self) -> Self {
        let ended = if self.ended == UNKNOWN_IN_FLIGHT { UNKNOWN } else { self.ended };
        Self { begun: self.begun - 1, ended }
    }
}

/// The generations of a target's units. Shared by all threads, for all phases.
#[derive(Debug)]
pub(crate) struct Generations {
    magic: u64,
    unit_bytes: u64,
    pieces: Vec<OnceLock<Box<[AtomicU64]>>>,
}

impl Generations {
    /// Of a target of `size_bytes`, for the loads of `job`.
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

    /// Begins a write. `false`: a unit of it is being written, and nothing has begun.
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

    /// Writes the headers of a write that has begun into its noise.
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

    /// Notes what a read that begins now may find at least.
    pub(crate) fn begin_read(&self, offset_bytes: u64, len_bytes: usize, before: &mut Vec<u64>) {
        before.clear();
        before.extend(self.units(offset_bytes, len_bytes).map(|unit| self.state(unit).word()));
    }

    /// Checks what a read has brought.
    ///
    /// # Errors
    /// `InvalidData` with a [`Wrong`] for the first sector that is not as it must be.
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

    fn check_unit(&self, offset_bytes: u64, unit: &[u8], before: State, after: State) -> Result<(), Wrong> {
        let undisturbed = before.is_quiet() && before == after;
        // Of the first sector; without a write in flight, all must be of the same generation.
        let mut first = None;
        for (index, sector) in unit.chunks_exact(SECTOR_BYTES).enumerate() {
            let at_bytes = offset_bytes + (index * SECTOR_BYTES) as u64;
            let wrong = |how| Err(Wrong { at_bytes, how });
            let found = match open_sector(self.magic, sector) {
                Found::Sound { offset_bytes, generation } if offset_bytes == at_bytes => generation,
                Found::Sound { offset_bytes, generation } => {
                    return wrong(How::Misdirected { belongs_bytes: offset_bytes, generation });
                }
                // It was being written just then, and sectors need not be written whole.
                _ if !undisturbed => continue,
                // Before the first write there may be anything.
                Found::Foreign if before.begun == 0 => continue,
                Found::Foreign => return wrong(How::Foreign),
                Found::Damaged => return wrong(How::Damaged),
            };
            let newest = if undisturbed { before.ended } else { after.begun };
            if found > newest {
                return wrong(How::FromTheFuture { found, newest });
            }
            match first {
                _ if !undisturbed && found < before.ended => {
                    return wrong(How::Stale { found, expected: before.ended });
                }
                Some(other) if undisturbed && other != found => return wrong(How::Torn { found, other }),
                _ => first = Some(found),
            }
        }
        match first {
            Some(found) if found < before.ended => {
                Err(Wrong { at_bytes: offset_bytes, how: How::Stale { found, expected: before.ended } })
            }
            _ => Ok(()),
        }
    }
}

/// Fills `buf`, which holds noise, as a fill before the run must: generation 0.
pub(crate) fn seal_first(seed: u64, offset_bytes: u64, buf: &mut [u8]) {
    for (index, sector) in buf.chunks_exact_mut(SECTOR_BYTES).enumerate() {
        seal_sector(magic(seed), offset_bytes + (index * SECTOR_BYTES) as u64, 0, sector);
    }
}

fn magic(seed: u64) -> u64 {
    // "diskwrgt", and the seed, by an odd multiplier so that seeds differ in all bytes.
    0x6469_736b_7772_6774 ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Everything at which a load may cut its target.
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

enum Found {
    Sound { offset_bytes: u64, generation: u32 },
    Damaged,
    Foreign,
}

fn open_sector(magic: u64, sector: &[u8]) -> Found {
    let word = |at: usize| sector[at..at + 8].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    if word(0) != magic {
        return Found::Foreign;
    }
    let (last, stored) = (word(16) as u32, (word(16) >> 32) as u32);
    let checksum = crc32c::crc32c_append(crc32c::crc32c(&sector[..CRC_AT]), &[0; HEADER_BYTES - CRC_AT]);
    let checksum = crc32c::crc32c_append(checksum, &sector[HEADER_BYTES..]);
    if checksum == stored { Found::Sound { offset_bytes: word(8), generation: last } } else { Found::Damaged }
}

/// A sector that is not as it must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wrong {
    pub(crate) at_bytes: u64,
    pub(crate) how: How,
}

/// In which way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    Misdirected { belongs_bytes: u64, generation: u32 },
    Stale { found: u32, expected: u32 },
    Torn { found: u32, other: u32 },
    FromTheFuture { found: u32, newest: u32 },
    Damaged,
    Foreign,
}

impl std::error::Error for Wrong {}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "wrong data at offset {}: ", self.at_bytes)?;
        match self.how {
            How::Misdirected { belongs_bytes, generation } => write!(
                f,
                "misdirected: what is there was written to offset {belongs_bytes} (write number {generation} of that place)"
            ),
            How::Stale { found, expected } => write!(
                f,
                "stale: it is write number {found} of this place, where number {expected} had been completed: a write was lost"
            ),
            How::Torn { found, other } => write!(
                f,
                "torn: part of it is write number {found} of this place, part is number {other}, and none was in flight"
            ),
            How::FromTheFuture { found, newest } => write!(
                f,
                "it is write number {found} of this place, but this run has made only {newest}: is it being written by somebody else?"
            ),
            How::Damaged => f.write_str("damaged: its checksum does not match"),
            How::Foreign => f.write_str("foreign: this run has written there, but not what is there now"),
        }
    }
}

#[cfg(test)]
#[path = "verify_tests.rs"]
mod tests;
