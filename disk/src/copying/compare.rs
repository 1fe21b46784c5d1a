//! Compares the contents of two disks.
//!
//! Both are walked in windows. A range that reads as zeros on both by their maps is not read.
//! Everything else is read from both with several requests in flight, and compared when a pair is
//! complete. The result is the *first* difference, so after a difference was found only earlier
//! reads are awaited.
//!
//! A longer disk is equal if its additional range reads as zeros.
//!
//! A range that cannot be read ends the comparison, unless there is a difference before it, which
//! is then the result. A copy made without damaged ranges is compared without them
//! ([`Damage::SkippedInFirst`]).

use crate::{
    Progress, Result,
    error::{DiskError, from_io},
};
use diskwright_store::{BlockDevice, BlockQueue, EngineKind, Extent, ExtentKind, IoBuf, QueueOptions, Request, Slab};
use std::{io, path::Path};

/// Bytes of one comparison.
const CHUNK_BYTES: u64 = 1 << 20;
/// Number of pairs of reads in flight.
const PAIRS: usize = 8;
/// Length for which extents are read at once. Doubles up to the maximum while only zeros are found.
const WINDOW_BYTES: u64 = 1 << 30;
const WINDOW_MAX_BYTES: u64 = 16 << 30;

/// The result of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompareOutcome {
    /// The contents are equal (a longer disk may end in zeros).
    Same,
    /// The first difference.
    Different {
        /// Offset of the first different byte.
        offset_bytes: u64,
    },
}

/// How damaged ranges are handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Damage {
    /// Damaged ranges are read like others, which fails.
    Fails,
    /// Damaged ranges of the first disk are skipped.
    SkippedInFirst,
}

/// One disk of the comparison. `data` has the extents of the present window that do not read as
/// zeros.
struct Side<'a> {
    name: &'a Path,
    device: &'a dyn BlockDevice,
    queue: Box<dyn BlockQueue>,
    size_bytes: u64,
    data: Vec<Extent>,
}

impl<'a> Side<'a> {
    fn open((device, name): (&'a dyn BlockDevice, &'a Path), engine: EngineKind) -> Result<Self> {
        let options = QueueOptions { depth: PAIRS, engine, slab: None, ring: None };
        let queue = device.open_queue(&options).map_err(|source| failed(name, source))?;
        Ok(Self { name, device, queue, size_bytes: device.geometry().size_bytes, data: Vec::new() })
    }

    fn load(&mut self, start: u64, end: u64) -> Result<()> {
        self.data.clear();
        let end = end.min(self.size_bytes);
        if start < end {
            self.device.extents(start, end - start, &mut self.data).map_err(|source| failed(self.name, source))?;
            self.data.retain(|extent| !extent.kind.reads_as_zeros());
        }
        Ok(())
    }

    /// The extents of the window that end after `start`.
    fn data_from(&self, start: u64) -> &[Extent] {
        let first = self.data.partition_point(|extent| extent.offset_bytes + extent.len_bytes <= start);
        &self.data[first..]
    }

    /// The first offset from `start` on whose byte may not be zero.
    fn next_data(&self, start: u64) -> Option<u64> {
        self.data_from(start).first().map(|extent| extent.offset_bytes.max(start))
    }

    /// The first damaged range that ends after `start`, among those that begin before `end`.
    fn next_damage(&self, start: u64, end: u64) -> Option<(u64, u64)> {
        let near = self.data_from(start).iter().take_while(|extent| extent.offset_bytes < end);
        let mut damaged = near.filter(|extent| extent.kind == ExtentKind::Damaged);
        damaged.next().map(|extent| (extent.offset_bytes, extent.offset_bytes + extent.len_bytes))
    }
}

/// A chunk that is being read from both disks.
#[derive(Default)]
struct Pair {
    start: u64,
    len: usize,
    halves: [Option<IoBuf>; 2],
    /// Number of reads in flight.
    reading: usize,
    failed: bool,
}

fn failed(name: &Path, source: io::Error) -> DiskError {
    from_io("read it for the comparison", name, source)
}

/// Compares two disks. The paths are used in errors.
///
/// # Errors
/// [`DiskError::File`], or the damage, if a disk cannot be read; [`DiskError::Stopped`] if
/// `progress` stops it.
pub fn compare(
    sides: [(&dyn BlockDevice, &Path); 2],
    engine: EngineKind,
    progress: &mut Progress<'_>,
) -> Result<CompareOutcome> {
    compare_with(sides, u64::MAX, engine, progress, Damage::Fails)
}

/// [`compare`] of the first disk's first `first_bytes` with the second one, with an option for
/// damaged ranges.
pub(crate) fn compare_with(
    [a, b]: [(&dyn BlockDevice, &Path); 2],
    first_bytes: u64,
    engine: EngineKind,
    progress: &mut Progress<'_>,
    damage: Damage,
) -> Result<CompareOutcome> {
    let mut sides = [Side::open(a, engine)?, Side::open(b, engine)?];
    sides[0].size_bytes = sides[0].size_bytes.min(first_bytes);
    let end = sides[0].size_bytes.max(sides[1].size_bytes);
    let slab = Slab::new(PAIRS * 2, CHUNK_BYTES as usize);
    let mut free = slab.take_all();
    let mut pairs: Vec<Pair> = (0..PAIRS).map(|_| Pair::default()).collect();
    let mut idle: Vec<usize> = (0..PAIRS).collect();
    let mut different: Option<u64> = None;
    let mut unread: Option<(u64, DiskError)> = None;
    let (mut at, mut window_end, mut window_bytes) = (0, 0, WINDOW_BYTES);
    let mut done = Vec::new();
    loop {
        while different.is_none() && unread.is_none() && at < end && !idle.is_empty() {
            if at >= window_end {
                window_end = (at + window_bytes).min(end);
                for side in &mut sides {
                    side.load(at, window_end)?;
                }
                let all_zero = sides.iter().all(|side| side.data.is_empty());
                window_bytes = if all_zero { (window_bytes * 2).min(WINDOW_MAX_BYTES) } else { WINDOW_BYTES };
                if !progress(at, end) {
                    return Err(DiskError::Stopped);
                }
            }
            // Chunks begin at multiples of their length, not at extents: the two disks may have
            // different sectors.
            let next = sides.iter().filter_map(|side| side.next_data(at)).min().unwrap_or(window_end);
            let start = at.max(next - next % CHUNK_BYTES);
            at = (start - start % CHUNK_BYTES + CHUNK_BYTES).min(window_end);
            if next >= at {
                continue;
            }
            if damage == Damage::SkippedInFirst
                && let Some((from, to)) = sides[0].next_damage(start, at)
            {
                if from <= start {
                    at = to;
                    continue;
                }
                at = from;
            }
            let Some(index) = idle.pop() else { break };
            pairs[index] = Pair { start, len: (at - start) as usize, ..Pair::default() };
            for (which, side) in sides.iter_mut().enumerate() {
                let Some(mut buf) = free.pop() else { continue };
                let len = at.min(side.size_bytes).saturating_sub(start) as usize;
                buf[len..].fill(0);
                if len == 0 {
                    // The chunk lies beyond the end of this disk.
                    pairs[index].halves[which] = Some(buf);
                    continue;
                }
                let tag = (index * 2 + which) as u64;
                let pushed = side.queue.push(Request::read(start, len, buf, tag));
                pushed.map_err(|error| failed(side.name, error.reason))?;
                pairs[index].reading += 1;
            }
        }
        if idle.len() == PAIRS {
            break;
        }
        let unfinished = sides[0].queue.in_flight() == 0;
        let waited = &mut sides[usize::from(unfinished)];
        waited.queue.reap(1, &mut done).map_err(|source| failed(waited.name, source))?;
        for completion in done.drain(..) {
            let (index, which) = (completion.tag as usize / 2, completion.tag as usize % 2);
            let pair = &mut pairs[index];
            pair.halves[which] = completion.buf;
            pair.reading -= 1;
            if let Err(source) = completion.result {
                pair.failed = true;
                if unread.as_ref().is_none_or(|(start, _)| pair.start < *start) {
                    unread = Some((pair.start, failed(waited.name, source)));
                }
            }
            if pair.reading > 0 {
                continue;
            }
            if let [Some(left), Some(right)] = &pair.halves
                && !pair.failed
                && let Some(first) = first_difference(&left[..pair.len], &right[..pair.len])
            {
                let offset_bytes = pair.start + first as u64;
                different = Some(different.map_or(offset_bytes, |known| known.min(offset_bytes)));
            }
            free.extend(pair.halves.iter_mut().filter_map(Option::take));
            idle.push(index);
        }
        if !progress(at, end) {
            return Err(DiskError::Stopped);
        }
    }
    match (different, unread) {
        (Some(offset_bytes), Some((unread_bytes, _))) if offset_bytes < unread_bytes => {
            Ok(CompareOutcome::Different { offset_bytes })
        }
        (_, Some((_, error))) => Err(error),
        (Some(offset_bytes), None) => Ok(CompareOutcome::Different { offset_bytes }),
        (None, None) => Ok(CompareOutcome::Same),
    }
}

fn first_difference(left: &[u8], right: &[u8]) -> Option<usize> {
    // The comparison of slices is a fast memcmp. The position is searched only if they differ.
    if left == right {
        return None;
    }
    left.iter().zip(right).position(|(a, b)| a != b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_found() {
        assert_eq!(first_difference(b"abcd", b"abcd"), None);
        assert_eq!(first_difference(b"abcd", b"abxx"), Some(2));
    }
}
