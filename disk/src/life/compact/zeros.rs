//! Which ranges of a disk read as zeros: many at once, and no further than to the first other byte.
//!
//! ```text
//!   question ─▶ first 64 KiB ─┬─ a byte that is not 0 ─▶ no
//!                             └─ zeros ─┬─ the file has a hole there ─▶ yes
//!                                       └─ next MiB, and so on to the end ─▶ yes
//! ```
//!
//! Most blocks with data are decided by their first request.

use diskwright_store::{
    BlockDevice, BlockQueue, Completion, EngineKind, IoBuf, QueueOptions, Request, Slab, Store, all_zero,
};
use std::{io, ops::Range, sync::Arc};

/// Number of ranges that are read at the same time.
const DEPTH: usize = 16;
/// Length of the first read of a range.
const PROBE_BYTES: u64 = 64 << 10;
/// Maximum length of a read.
const CHUNK_BYTES: u64 = 1 << 20;

/// A range of which it is asked whether it reads as zeros.
#[derive(Debug, Clone)]
pub(super) struct ZeroQuery {
    /// Bytes of the disk, less than 64 slices.
    pub(super) range: Range<u64>,
    /// Slices that do not matter, a bit for each from the start of the range.
    pub(super) skip: u64,
    /// Length of a slice, a multiple of the sector.
    pub(super) slice_bytes: u64,
    /// The file in which the whole range lies, and the offset there; `None` if it lies in several
    /// places.
    pub(super) hole_at: Option<(u16, u64)>,
}

impl ZeroQuery {
    /// The next bytes to read from `at` on; empty at the end.
    fn next(&self, at: u64) -> Range<u64> {
        let slice = |at: u64| (at - self.range.start) / self.slice_bytes;
        let is_skipped = |at: u64| self.skip >> slice(at).min(63) & 1 == 1;
        let slice_end = |at: u64| self.range.start + (slice(at) + 1) * self.slice_bytes;
        let mut start = at;
        while start < self.range.end && is_skipped(start) {
            start = slice_end(start);
        }
        let longest = if at == self.range.start { PROBE_BYTES } else { CHUNK_BYTES };
        let mut end = start;
        while end < self.range.end && end - start < longest && !is_skipped(end) {
            end = slice_end(end);
        }
        start.min(self.range.end)..end.min(start.saturating_add(longest)).min(self.range.end)
    }
}

/// Answers the questions. `tell` gets the bytes of the ranges that are decided; `None` if it stops
/// the work by returning `false`.
///
/// # Errors
/// The error of the first read that failed.
pub(super) fn answer(
    device: &dyn BlockDevice,
    engine: EngineKind,
    files: &[Arc<dyn Store>],
    questions: &[&ZeroQuery],
    tell: &mut dyn FnMut(u64) -> bool,
) -> io::Result<Option<Vec<bool>>> {
    let mut is_zero = vec![false; questions.len()];
    if questions.is_empty() {
        return Ok(Some(is_zero));
    }
    let slab = Slab::new(DEPTH, CHUNK_BYTES as usize);
    let queue = device.open_queue(&QueueOptions { depth: DEPTH, engine, slab: Some(&slab), ring: None })?;
    let mut reader = Reader { queue, free: slab.take_all(), places: vec![0..0; questions.len().min(DEPTH)] };
    let mut slots: Vec<Option<usize>> = vec![None; reader.places.len()];
    let (mut next, mut decided_bytes) = (0, 0);
    let mut done: Vec<Completion> = Vec::new();
    loop {
        for (slot, answering) in slots.iter_mut().enumerate() {
            // A question without anything to read is decided at once.
            while answering.is_none() && next < questions.len() {
                let question = questions[next];
                if reader.ask(slot, question.next(question.range.start))? {
                    *answering = Some(next);
                } else {
                    is_zero[next] = true;
                }
                next += 1;
            }
        }
        if slots.iter().all(Option::is_none) {
            return Ok(Some(is_zero));
        }
        reader.queue.reap(1, &mut done)?;
        for completion in done.drain(..) {
            let slot = completion.tag as usize;
            let buf = completion.buf.ok_or_else(|| io::Error::other("the queue lost a buffer"))?;
            let Some(number) = slots[slot].take() else { continue };
            completion.result?;
            let (question, read) = (questions[number], reader.places[slot].clone());
            let still_zero = all_zero(&buf[..(read.end - read.start) as usize]);
            reader.free.push(buf);
            let rest = question.next(read.end);
            if still_zero && !rest.is_empty() && !is_hole(files, question) {
                reader.ask(slot, rest)?;
                slots[slot] = Some(number);
            } else {
                is_zero[number] = still_zero;
                decided_bytes += question.range.end - question.range.start;
            }
        }
        if !tell(decided_bytes) {
            return Ok(None);
        }
    }
}

/// Whether the file has no data for the range.
fn is_hole(files: &[Arc<dyn Store>], question: &ZeroQuery) -> bool {
    let Some((store, offset_bytes)) = question.hole_at else { return false };
    let Some(file) = files.get(usize::from(store)) else { return false };
    let end_bytes = offset_bytes + (question.range.end - question.range.start);
    // If the file cannot say, the range is read.
    file.next_data(offset_bytes).is_ok_and(|data| data.is_none_or(|data| data.offset_bytes >= end_bytes))
}

/// A queue with its buffers.
struct Reader {
    queue: Box<dyn BlockQueue>,
    free: Vec<IoBuf>,
    /// What each slot reads.
    places: Vec<Range<u64>>,
}

impl Reader {
    /// Starts a read. `false` for an empty range.
    fn ask(&mut self, slot: usize, range: Range<u64>) -> io::Result<bool> {
        if range.is_empty() {
            return Ok(false);
        }
        let buf = self.free.pop().ok_or_else(|| io::Error::other("no buffer is left"))?;
        let request = Request::read(range.start, (range.end - range.start) as usize, buf, slot as u64);
        self.places[slot] = range;
        self.queue.push(request).map_err(|error| error.reason)?;
        Ok(true)
    }
}
