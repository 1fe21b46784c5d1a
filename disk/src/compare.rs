//! Whether two disks hold the same bytes.
//!
//! Both are walked in windows; where both read as zeros by the word of their maps nothing is read. Everything else is read from
//! both with several requests in flight, and compared as the pairs come in. The answer is the *first* difference,
//! so after one was found only what lies before it is awaited.
//!
//! A disk that is longer than the other is the same if what it has more reads as zeros.

use crate::{
    Progress, Result,
    error::{DiskError, from_io},
};
use diskwright_store::{BlockDevice, BlockQueue, EngineKind, Extent, ExtentKind, IoBuf, QueueOptions, Request, Slab};
use std::{io, path::Path};

/// Bytes compared at a time.
const CHUNK_BYTES: u64 = 1 << 20;
/// Pairs in flight.
const PAIRS: usize = 8;
/// Bytes whose extents are asked for at a time.
const WINDOW_BYTES: u64 = 1 << 30;

/// What a comparison found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompareOutcome {
    /// The same bytes (a longer disk may end in zeros).
    Same,
    /// Different, first here.
    Different {
        /// First byte that differs.
        offset_bytes: u64,
    },
}

/// One side of the comparison: its name, a queue, and which ranges of the present window hold data.
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
            self.data.retain(|extent| extent.kind == ExtentKind::Data);
        }
        Ok(())
    }

    /// Whether anything in `start..end` may be other than zero.
    fn has_data(&self, start: u64, end: u64) -> bool {
        let first = self.data.partition_point(|extent| extent.offset_bytes + extent.len_bytes <= start);
        self.data.get(first).is_some_and(|extent| extent.offset_bytes < end)
    }
}

/// A chunk whose two halves are being read.
#[derive(Default)]
struct Pair {
    start: u64,
    len: usize,
    halves: [Option<IoBuf>; 2],
}

fn failed(name: &Path, source: io::Error) -> DiskError {
    from_io("read it for the comparison", name, source)
}

/// Compares two disks, each with the name by which its errors are told.
///
/// # Errors
/// [`DiskError::File`] when one cannot be read, [`DiskError::Stopped`] when `progress` says so.
pub fn compare(
    [a, b]: [(&dyn BlockDevice, &Path); 2],
    engine: EngineKind,
    progress: &mut Progress<'_>,
) -> Result<CompareOutcome> {
    let mut sides = [Side::open(a, engine)?, Side::open(b, engine)?];
    let end = sides[0].size_bytes.max(sides[1].size_bytes);
    let slab = Slab::new(PAIRS * 2, CHUNK_BYTES as usize);
    let mut free = slab.take_all();
    let mut pairs: Vec<Pair> = (0..PAIRS).map(|_| Pair::default()).collect();
    let mut idle: Vec<usize> = (0..PAIRS).collect();
    let mut different: Option<u64> = None;
    let (mut at, mut window_end) = (0, 0);
    let mut done = Vec::new();
    loop {
        while different.is_none() && at < end && !idle.is_empty() {
            if at >= window_end {
                window_end = (at + WINDOW_BYTES).min(end);
                for side in &mut sides {
                    side.load(at, window_end)?;
                }
                if !progress(at, end) {
                    return Err(DiskError::Stopped);
                }
            }
            let start = at;
            at = (start + CHUNK_BYTES).min(window_end);
            if sides.iter().all(|side| !side.has_data(start, at)) {
                continue;
            }
            let Some(index) = idle.pop() else { break };
            pairs[index] = Pair { start, len: (at - start) as usize, halves: [None, None] };
            for (which, side) in sides.iter_mut().enumerate() {
                let Some(mut buf) = free.pop() else { continue };
                let len = at.min(side.size_bytes).saturating_sub(start) as usize;
                buf[len..].fill(0);
                if len == 0 {
                    // Beyond this disk's end there is nothing to read.
                    pairs[index].halves[which] = Some(buf);
                    continue;
                }
                let tag = (index * 2 + which) as u64;
                let pushed = side.queue.push(Request::read(start, len, buf, tag));
                pushed.map_err(|error| failed(side.name, error.reason))?;
            }
        }
        if idle.len() == PAIRS {
            break;
        }
        let unfinished = sides[0].queue.in_flight() == 0;
        let waited = &mut sides[usize::from(unfinished)];
        waited.queue.reap(1, &mut done).map_err(|source| failed(waited.name, source))?;
        for completion in done.drain(..) {
            completion.result.map_err(|source| failed(waited.name, source))?;
            let (index, which) = (completion.tag as usize / 2, completion.tag as usize % 2);
            let pair = &mut pairs[index];
            pair.halves[which] = completion.buf;
            if let [Some(left), Some(right)] = &pair.halves {
                if let Some(first) = first_difference(&left[..pair.len], &right[..pair.len]) {
                    let offset_bytes = pair.start + first as u64;
                    different = Some(different.map_or(offset_bytes, |known| known.min(offset_bytes)));
                }
                free.extend(pair.halves.iter_mut().filter_map(Option::take));
                idle.push(index);
            }
        }
        if !progress(at, end) {
            return Err(DiskError::Stopped);
        }
    }
    Ok(different.map_or(CompareOutcome::Same, |offset_bytes| CompareOutcome::Different { offset_bytes }))
}

fn first_difference(left: &[u8], right: &[u8]) -> Option<usize> {
    // Comparing slices at once is a memcmp; the place is looked for only when there is one.
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
