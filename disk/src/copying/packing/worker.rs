//! A worker: reads chunks by a queue of its own and compresses their blocks.
//!
//! A chunk is read by one request from the first of its data to the last. The zeros between are
//! read with them, which costs less than more requests. A chunk with a damaged range between is
//! read by the range. The next chunks are in flight while one is compressed.

use super::{
    chunk::{CHUNK_BYTES, Chunk, Packer, Ready},
    shared::Shared,
};
use crate::copying::copy::Failure;
use diskwright_store::{BlockQueue, Completion, IoBuf, QueueOptions, Request, Slab, all_zero};
use std::{collections::VecDeque, ops::Range, sync::mpsc};

/// Chunks of a worker that are read or compressed at one time.
const BUFFERS: usize = 3;

/// Takes chunks until there are none.
pub(super) fn work(shared: &Shared<'_>, ready: &mpsc::Sender<Ready>) -> Result<(), Failure> {
    let slab = Slab::new(BUFFERS, CHUNK_BYTES as usize);
    let options = QueueOptions { depth: BUFFERS, engine: shared.packing.engine, slab: Some(&slab), ring: None };
    let queue = shared.packing.source.device().open_queue(&options).map_err(|error| Failure::Source(0..0, error))?;
    let mut reader = Reader { queue, free: slab.take_all(), reading: VecDeque::new(), done: Vec::new() };
    let mut packer = (shared.packing.packer)().map_err(Failure::Dest)?;
    loop {
        while !reader.free.is_empty() {
            // Chunks in flight are handed on first, so that no worker waits for them.
            let Some(chunk) = shared.next(reader.reading.is_empty())? else { break };
            reader.start(chunk)?;
        }
        let Some((chunk, mut buf)) = reader.take(shared)? else { return Ok(()) };
        let packed = pack(shared, &chunk, &mut buf, &mut *packer)?;
        reader.free.push(buf);
        // The thread of the sink has ended only if the work was stopped.
        if ready.send(packed).is_err() {
            return Ok(());
        }
    }
}

/// Compresses the blocks of a chunk whose data is in `buf`.
fn pack(shared: &Shared<'_>, chunk: &Chunk, buf: &mut IoBuf, packer: &mut dyn Packer) -> Result<Ready, Failure> {
    let block_bytes = shared.packing.block_bytes;
    let disk_bytes = (shared.size_bytes - chunk.offset_bytes).min(CHUNK_BYTES);
    let first = chunk.offset_bytes / block_bytes as u64;
    let mut ready = Ready { number: chunk.number, blocks: Vec::new(), bytes: Vec::new(), disk_bytes, zero_bytes: 0 };
    for (number, block) in (first..).zip(buf[..(disk_bytes as usize).next_multiple_of(block_bytes)].chunks(block_bytes))
    {
        if all_zero(block) {
            let end_bytes = ((number + 1) * block_bytes as u64).min(shared.size_bytes);
            ready.zero_bytes += end_bytes - number * block_bytes as u64;
            continue;
        }
        let start = ready.bytes.len();
        packer.pack(block, &mut ready.bytes).map_err(Failure::Dest)?;
        ready.blocks.push((number, start..ready.bytes.len()));
    }
    Ok(ready)
}

/// A chunk that is being read.
struct Reading {
    chunk: Chunk,
    /// The first byte that the request reads, within the chunk.
    within: usize,
    len: usize,
    /// `None` while the request is in flight.
    buf: Option<IoBuf>,
}

struct Reader {
    queue: Box<dyn BlockQueue>,
    free: Vec<IoBuf>,
    reading: VecDeque<Reading>,
    done: Vec<Completion>,
}

impl Reader {
    /// Begins to read a chunk.
    fn start(&mut self, chunk: Chunk) -> Result<(), Failure> {
        let (Some(first), Some(last)) = (chunk.data.first(), chunk.data.last()) else { return Ok(()) };
        let Some(buf) = self.free.pop() else { return Ok(()) };
        // The hull of several ranges is read at once, unless damage lies between.
        let range = if chunk.is_whole { first.start..last.end } else { first.clone() };
        let (within, len) = ((range.start - chunk.offset_bytes) as usize, (range.end - range.start) as usize);
        let request = Request { buf_offset_bytes: within, ..Request::read(range.start, len, buf, chunk.number) };
        self.queue.push(request).map_err(|error| Failure::Source(range, error.reason))?;
        self.reading.push_back(Reading { chunk, within, len, buf: None });
        Ok(())
    }

    /// The first chunk that is being read, and its bytes; `None` if there is none.
    fn take(&mut self, shared: &Shared<'_>) -> Result<Option<(Chunk, IoBuf)>, Failure> {
        while self.reading.front().is_some_and(|reading| reading.buf.is_none()) {
            self.reap()?;
        }
        let Some(Reading { chunk, within, len, buf: Some(mut buf) }) = self.reading.pop_front() else {
            return Ok(None);
        };
        if shared.is_stopped() {
            self.reading.clear();
            return Ok(None);
        }
        buf[..within].fill(0);
        buf[within + len..].fill(0);
        if !chunk.is_whole {
            for range in &chunk.data[1..] {
                buf = self.read_beside(&chunk, range, buf)?;
            }
        }
        Ok(Some((chunk, buf)))
    }

    /// Reads one more range of a chunk, and waits for it.
    fn read_beside(&mut self, chunk: &Chunk, range: &Range<u64>, buf: IoBuf) -> Result<IoBuf, Failure> {
        let (within, len) = ((range.start - chunk.offset_bytes) as usize, (range.end - range.start) as usize);
        let request = Request { buf_offset_bytes: within, ..Request::read(range.start, len, buf, u64::MAX) };
        self.queue.push(request).map_err(|error| Failure::Source(range.clone(), error.reason))?;
        loop {
            if let Some(buf) = self.reap()? {
                return Ok(buf);
            }
        }
    }

    /// Waits for a completion at least. Returns the buffer of [`Reader::read_beside`].
    fn reap(&mut self) -> Result<Option<IoBuf>, Failure> {
        self.queue.reap(1, &mut self.done).map_err(|error| Failure::Source(0..0, error))?;
        let mut beside = None;
        for completion in self.done.drain(..) {
            let reading = self.reading.iter_mut().find(|reading| reading.chunk.number == completion.tag);
            let range = reading.as_ref().map_or(0..0, |reading| {
                let start = reading.chunk.offset_bytes + reading.within as u64;
                start..start + reading.len as u64
            });
            completion.result.map_err(|error| Failure::Source(range, error))?;
            match reading {
                Some(reading) => reading.buf = completion.buf,
                None => beside = completion.buf,
            }
        }
        Ok(beside)
    }
}
