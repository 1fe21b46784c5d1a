//! Fills a target through its block queue, verifies that the same bytes are read back, and searches
//! a target for data.
//!
//! ```text
//!   fill     free buffer ─ contents of the offset ─▶ push write ─▶ reap ─▶ ... ─▶ flush
//!   verify   free buffer ─▶ push read ─▶ reap ─▶ compare with the contents of (seed, offset)
//!   find     free buffer ─▶ push read ─▶ reap ─▶ search for a byte that is not 0
//! ```
//!
//! Each pass keeps sixteen requests of 1 MiB in flight. So verifying also tests the queue: it
//! detects parts of requests that used a wrong buffer or a wrong offset. Ranges are processed in
//! the given order, and no request crosses the end of a range.

use crate::{LabError, Result};
use diskwright_load::LoadError;
use diskwright_load::data;
use diskwright_store::{
    BlockDevice, BlockQueue, Completion, EngineKind, Extent, ExtentKind, IoBuf, Operation, QueueOptions, Request, Slab,
};
use std::{io, ops::Range, slice};

/// Requests in flight.
pub const DEPTH: usize = 16;
/// Bytes per request.
pub const PIECE_BYTES: usize = 1 << 20;
/// Extents are listed in windows of this length. This bounds the memory for a fragmented disk.
const EXTENT_WINDOW_BYTES: u64 = 1 << 30;

/// Called with the number of bytes done so far, whenever requests complete. An error ends the pass.
pub type Tick<'a> = dyn FnMut(u64) -> Result<()> + 'a;

/// Makes the contents for an offset. Offsets are multiples of 4096, if the starts of the ranges
/// are.
pub type MakeContents<'a> = dyn FnMut(u64, &mut [u8]) + 'a;

/// Writes the contents of `seed` to all of `device`, and flushes.
///
/// # Errors
/// [`LoadError::Queue`] and [`LabError::Request`] if the device fails; any error of `tick`.
pub fn fill(name: &str, device: &dyn BlockDevice, seed: u64, engine: EngineKind, tick: &mut Tick<'_>) -> Result<()> {
    fill_front(name, device, u64::MAX, seed, engine, tick)
}

/// Writes the contents of `seed` to the first `len_bytes` of `device`, or to all of a smaller
/// device, and flushes.
///
/// # Errors
/// As [`fill`].
pub fn fill_front(
    name: &str,
    device: &dyn BlockDevice,
    len_bytes: u64,
    seed: u64,
    engine: EngineKind,
    tick: &mut Tick<'_>,
) -> Result<()> {
    let front = 0..device.geometry().size_bytes.min(len_bytes);
    fill_ranges(name, device, slice::from_ref(&front), engine, &mut |offset, buf| data::fill(seed, offset, buf), tick)
}

/// Writes the contents of `make` to `ranges`, and flushes.
///
/// # Errors
/// As [`fill`].
pub fn fill_ranges(
    name: &str,
    device: &dyn BlockDevice,
    ranges: &[Range<u64>],
    engine: EngineKind,
    make: &mut MakeContents<'_>,
    tick: &mut Tick<'_>,
) -> Result<()> {
    let mut pass = Pass::new(name, device, engine)?;
    pass.run(ranges, &mut Action::Write(make), tick)?;
    pass.flush()
}

/// Reads all of `device` and compares it with the contents of `seed`.
///
/// # Errors
/// [`LabError::WrongData`] with the first difference that was found; else as [`fill`].
pub fn verify(name: &str, device: &dyn BlockDevice, seed: u64, engine: EngineKind, tick: &mut Tick<'_>) -> Result<()> {
    let all = 0..device.geometry().size_bytes;
    Pass::new(name, device, engine)?.run(slice::from_ref(&all), &mut Action::Compare(seed), tick)
}

/// Reads `ranges` until a byte that is not 0 is found. Returns the lowest such offset among the
/// requests that were read: the first one, if the ranges are ascending.
///
/// # Errors
/// As [`fill`].
pub fn find_data(
    name: &str,
    device: &dyn BlockDevice,
    ranges: &[Range<u64>],
    engine: EngineKind,
    tick: &mut Tick<'_>,
) -> Result<Option<u64>> {
    let mut found = None;
    Pass::new(name, device, engine)?.run(ranges, &mut Action::FindData(&mut found), tick)?;
    Ok(found)
}

/// Checks that every byte of `device` is allocated in its top layer, or in any layer with
/// `any_layer`.
///
/// # Errors
/// [`LabError::NotPopulated`]; [`LoadError::Queue`] if extents cannot be reported.
pub fn check_populated(name: &str, device: &dyn BlockDevice, any_layer: bool) -> Result<()> {
    let all = 0..device.geometry().size_bytes;
    check_populated_ranges(name, device, slice::from_ref(&all), any_layer)
}

/// Like [`check_populated`], for `ranges`.
///
/// # Errors
/// As [`check_populated`].
pub fn check_populated_ranges(
    name: &str,
    device: &dyn BlockDevice,
    ranges: &[Range<u64>],
    any_layer: bool,
) -> Result<()> {
    let is_data = |extent: &Extent| extent.kind == ExtentKind::Data && (any_layer || extent.depth == 0);
    let mut found_bytes = 0;
    for_extents(name, device, ranges, &mut |extent| {
        if is_data(extent) {
            found_bytes += extent.len_bytes;
        }
    })?;
    let size_bytes = ranges.iter().map(|range| range.end - range.start).sum();
    if found_bytes == size_bytes {
        return Ok(());
    }
    Err(LabError::NotPopulated { target: name.to_owned(), found_bytes, size_bytes })
}

/// Calls `each` for the extents of `ranges`, in order.
///
/// # Errors
/// [`LoadError::Queue`] if extents cannot be reported.
pub fn for_extents(
    name: &str,
    device: &dyn BlockDevice,
    ranges: &[Range<u64>],
    each: &mut dyn FnMut(&Extent),
) -> Result<()> {
    let mut extents: Vec<Extent> = Vec::new();
    for range in ranges {
        let mut at_bytes = range.start;
        while at_bytes < range.end {
            let len_bytes = (range.end - at_bytes).min(EXTENT_WINDOW_BYTES);
            extents.clear();
            device.extents(at_bytes, len_bytes, &mut extents).map_err(|source| LoadError::Queue {
                target: name.to_owned(),
                doing: "list its extents".into(),
                source,
            })?;
            extents.iter().for_each(&mut *each);
            at_bytes += len_bytes;
        }
    }
    Ok(())
}

/// What a pass does with each piece.
enum Action<'a, 'b> {
    Write(&'a mut MakeContents<'b>),
    Compare(u64),
    FindData(&'a mut Option<u64>),
}

/// One pass over a device.
struct Pass<'a> {
    name: &'a str,
    queue: Box<dyn BlockQueue>,
    free: Vec<(usize, IoBuf)>,
    /// Offset and length of each slot's piece. A slot's number is the tag of its request.
    pieces: [(u64, usize); DEPTH],
    done: Vec<Completion>,
    completed: u64,
}

impl<'a> Pass<'a> {
    fn new(name: &'a str, device: &dyn BlockDevice, engine: EngineKind) -> Result<Self> {
        let slab = Slab::new(DEPTH, PIECE_BYTES);
        let queue = device
            .open_queue(&QueueOptions { depth: DEPTH, engine, slab: Some(&slab), ring: None })
            .map_err(|source| LoadError::Queue { target: name.to_owned(), doing: "open a queue".into(), source })?;
        let free = slab.take_all().into_iter().enumerate().collect();
        Ok(Self { name, queue, free, pieces: [(0, 0); DEPTH], done: Vec::with_capacity(DEPTH), completed: 0 })
    }

    fn run(&mut self, ranges: &[Range<u64>], action: &mut Action<'_, '_>, tick: &mut Tick<'_>) -> Result<()> {
        let mut left = ranges.iter().cloned();
        let mut range = 0..0;
        let mut done_bytes = 0;
        loop {
            while let Some((slot, mut buf)) = self.free.pop() {
                while range.is_empty() {
                    let Some(next) = left.next() else { break };
                    range = next;
                }
                if range.is_empty() {
                    self.free.push((slot, buf));
                    break;
                }
                let offset_bytes = range.start;
                let len = (range.end - offset_bytes).min(PIECE_BYTES as u64) as usize;
                range.start += len as u64;
                self.pieces[slot] = (offset_bytes, len);
                let request = match action {
                    Action::Write(make) => {
                        make(offset_bytes, &mut buf[..len]);
                        Request::write(offset_bytes, len, buf, slot as u64)
                    }
                    Action::Compare(_) | Action::FindData(_) => Request::read(offset_bytes, len, buf, slot as u64),
                };
                let operation = request.operation;
                self.queue.push(request).map_err(|error| self.request_error(operation, slot, error.reason))?;
            }
            if self.queue.in_flight() == 0 {
                return Ok(());
            }
            let mut done = std::mem::take(&mut self.done);
            self.queue.reap(1, &mut done).map_err(|source| self.queue_error("reap completions", source))?;
            for completion in done.drain(..) {
                done_bytes += self.finish(completion, action)?;
            }
            self.done = done;
            if matches!(action, Action::FindData(Some(_))) {
                // Pieces in flight may be before the found byte. No further pieces are requested.
                left = [].iter().cloned();
                range = 0..0;
            }
            tick(done_bytes)?;
        }
    }

    /// Handles a completed piece. Returns its length.
    fn finish(&mut self, completion: Completion, action: &mut Action<'_, '_>) -> Result<u64> {
        let slot = completion.tag as usize;
        let (offset_bytes, len) = self.pieces[slot];
        let operation = if matches!(action, Action::Write(_)) { Operation::Write } else { Operation::Read };
        completion.result.map_err(|source| self.request_error(operation, slot, source))?;
        let Some(buf) = completion.buf else {
            return Err(self.queue_error("get a buffer back", io::Error::other("a completion came without its buffer")));
        };
        match action {
            Action::Write(_) => {}
            Action::Compare(seed) => {
                if let Some(at) = data::first_difference(*seed, offset_bytes, &buf[..len]) {
                    let offset_bytes = offset_bytes + at as u64;
                    return Err(LabError::WrongData { target: self.name.to_owned(), offset_bytes });
                }
            }
            Action::FindData(found) => {
                if let Some(at) = first_byte(&buf[..len]) {
                    let at_bytes = offset_bytes + at as u64;
                    **found = Some(found.map_or(at_bytes, |other| other.min(at_bytes)));
                }
            }
        }
        self.completed += 1;
        self.free.push((slot, buf));
        Ok(len as u64)
    }

    fn flush(&mut self) -> Result<()> {
        self.queue.push(Request::flush(0)).map_err(|error| self.queue_error("flush", error.reason))?;
        let mut done = Vec::new();
        self.queue.reap(1, &mut done).map_err(|source| self.queue_error("flush", source))?;
        done.into_iter()
            .try_for_each(|completion| completion.result.map_err(|source| self.queue_error("flush", source)))
    }

    fn request_error(&self, operation: Operation, slot: usize, source: io::Error) -> LabError {
        let (offset_bytes, len) = self.pieces[slot];
        LabError::Request {
            target: self.name.to_owned(),
            operation,
            offset_bytes,
            len_bytes: len as u64,
            completed: self.completed,
            source,
        }
    }

    fn queue_error(&self, doing: &str, source: io::Error) -> LabError {
        LoadError::Queue { target: self.name.to_owned(), doing: doing.into(), source }.into()
    }
}

/// Index of the first byte that is not 0. Compares 64 bytes at a time, because most searched bytes
/// are zeros.
fn first_byte(buf: &[u8]) -> Option<usize> {
    let (words, _) = buf.as_chunks::<64>();
    let start = words.iter().position(|word| *word != [0; 64]).map_or(words.len() * 64, |index| index * 64);
    buf[start..].iter().position(|byte| *byte != 0).map(|at| start + at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_store::{Blocking, CacheMode, RawDevice};
    use std::fs::File;

    fn raw(len_bytes: u64) -> (tempfile::TempDir, RawDevice) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.raw");
        File::create(&path).unwrap().set_len(len_bytes).unwrap();
        let device = RawDevice::open(&path, true, CacheMode::PageCache).unwrap();
        (dir, device)
    }

    #[test]
    fn what_was_filled_verifies_and_one_wrong_byte_is_found() {
        // Not a whole number of pieces, so the last piece is short.
        let (_dir, device) = raw(5 * PIECE_BYTES as u64 + 12_288);
        let mut reported = Vec::new();
        fill("disk", &device, 3, EngineKind::Auto, &mut |done| {
            reported.push(done);
            Ok(())
        })
        .unwrap();
        assert_eq!(reported.last(), Some(&device.geometry().size_bytes));
        verify("disk", &device, 3, EngineKind::Auto, &mut |_| Ok(())).unwrap();
        check_populated("disk", &device, false).unwrap();

        let error = verify("disk", &device, 4, EngineKind::Auto, &mut |_| Ok(())).unwrap_err();
        assert!(matches!(error, LabError::WrongData { .. }), "{error}");

        let mut hand = Blocking::open(&device, EngineKind::Auto).unwrap();
        let at = 3 * PIECE_BYTES as u64 + 4096;
        let mut sector = vec![0; 512];
        hand.read(at, &mut sector).unwrap();
        sector[17] ^= 0x80;
        hand.write(at, &sector, false).unwrap();
        let error = verify("disk", &device, 3, EngineKind::Auto, &mut |_| Ok(())).unwrap_err();
        assert!(matches!(error, LabError::WrongData { offset_bytes, .. } if offset_bytes == at + 17), "{error}");
    }

    #[test]
    fn a_sparse_disk_is_not_taken_for_a_full_one() {
        let (_dir, device) = raw(4 << 20);
        let error = check_populated("sparse", &device, false).unwrap_err();
        assert!(matches!(error, LabError::NotPopulated { found_bytes: 0, .. }), "{error}");
    }

    #[test]
    fn only_the_ranges_are_filled_and_found() {
        let (_dir, device) = raw(8 << 20);
        let ranges = [(1 << 20)..(1 << 20) + 4096, (4 << 20)..(6 << 20)];
        let mut asked = 0;
        fill_ranges(
            "disk",
            &device,
            &ranges,
            EngineKind::Auto,
            &mut |offset, buf| {
                asked += buf.len();
                data::fill(9, offset, buf);
            },
            &mut |_| Ok(()),
        )
        .unwrap();
        assert_eq!(asked, (2 << 20) + 4096);
        check_populated_ranges("disk", &device, &ranges, false).unwrap();
        let error = check_populated("disk", &device, false).unwrap_err();
        assert!(matches!(error, LabError::NotPopulated { found_bytes, .. } if found_bytes == asked as u64), "{error}");
        let find =
            |ranges: &[Range<u64>]| find_data("disk", &device, ranges, EngineKind::Auto, &mut |_| Ok(())).unwrap();
        // One of the first bytes is not 0, whatever the contents are.
        let (all, end) = (0..8 << 20, 6 << 20..8 << 20);
        assert!(
            find(slice::from_ref(&all)).is_some_and(|at| at.abs_diff(1 << 20) < 8),
            "the lowest of all pieces counts"
        );
        assert_eq!(find(&[0..1 << 20, 2 << 20..4 << 20, 6 << 20..8 << 20]), None);
        assert_eq!(find(&[]), None);
        let mut hand = Blocking::open(&device, EngineKind::Auto).unwrap();
        let mut sector = vec![0; 512];
        sector[511] = 1;
        hand.write((8 << 20) - 512, &sector, false).unwrap();
        assert_eq!(find(slice::from_ref(&end)), Some((8 << 20) - 1), "the very last byte");
    }

    #[test]
    fn the_first_byte_is_found_wherever_it_is() {
        for len in [0, 1, 63, 64, 65, 200] {
            let mut buf = vec![0; len];
            assert_eq!(first_byte(&buf), None);
            for at in (0..len).rev() {
                buf[at] = 7;
                assert_eq!(first_byte(&buf), Some(at));
            }
        }
    }

    #[test]
    fn a_tick_can_stop_the_work() {
        let (_dir, device) = raw(64 << 20);
        let outcome = fill("disk", &device, 3, EngineKind::Auto, &mut |_| Err(LabError::Stopped));
        assert!(matches!(outcome, Err(LabError::Stopped)));
    }
}
