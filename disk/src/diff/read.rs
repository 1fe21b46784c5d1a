//! Reads ranges of one or more devices, in order, with several requests in flight.

use crate::{DiskError, Progress, Result, error::from_io};
use diskwright_store::{BlockDevice, BlockQueue, Completion, EngineKind, IoBuf, QueueOptions, Request, Slab};
use std::{collections::VecDeque, io, ops::Range, path::Path};

/// Maximum length of one read.
pub(super) const CHUNK_BYTES: u64 = 1 << 20;
/// Number of chunks in flight.
const CHUNKS: usize = 4;

/// A device, and the path that errors name.
pub(super) type Named<'a> = (&'a dyn BlockDevice, &'a Path);

/// What is called with a chunk: its first byte, and its bytes on each device. Zeros stand for bytes
/// beyond the end of a device.
pub(super) type Read<'a> = dyn FnMut(u64, &[&[u8]], &mut Progress<'_>) -> Result<()> + 'a;

struct Source<'a> {
    path: &'a Path,
    queue: Box<dyn BlockQueue>,
    size_bytes: u64,
}

/// A chunk that is being read.
struct Chunk {
    wanted: Range<u64>,
    /// Where the reads begin: sectors of the devices may be larger than those of the range.
    start_bytes: u64,
    /// What was read, by device; `None` while the read is in flight.
    bufs: Vec<Option<IoBuf>>,
}

/// Reads ranges in order.
pub(super) struct Reader<'a> {
    sources: Vec<Source<'a>>,
    sector_bytes: u64,
    // The memory of the buffers.
    _slab: Slab,
    free: Vec<IoBuf>,
    chunks: VecDeque<Chunk>,
    /// Number of the first of `chunks`.
    first: u64,
    done: Vec<Completion>,
}

fn failed(path: &Path, source: io::Error) -> DiskError {
    from_io("read it", path, source)
}

impl<'a> Reader<'a> {
    pub(super) fn open(devices: &[Named<'a>], engine: EngineKind) -> Result<Self> {
        let mut sources = Vec::new();
        let mut sector_bytes = 512;
        for &(device, path) in devices {
            let options = QueueOptions { depth: CHUNKS, engine, slab: None, ring: None };
            let queue = device.open_queue(&options).map_err(|source| failed(path, source))?;
            let geometry = device.geometry();
            sector_bytes = sector_bytes.max(u64::from(geometry.logical_sector_bytes));
            sources.push(Source { path, queue, size_bytes: geometry.size_bytes });
        }
        let slab = Slab::new(CHUNKS * sources.len(), CHUNK_BYTES as usize);
        let free = slab.take_all();
        let (chunks, done) = (VecDeque::new(), Vec::new());
        Ok(Self { sources, sector_bytes, _slab: slab, free, chunks, first: 0, done })
    }

    /// Reads a range, which begins at or after the end of the last one. Chunks may be handed out
    /// later, but always in order.
    pub(super) fn push(&mut self, range: Range<u64>, progress: &mut Progress<'_>, each: &mut Read<'_>) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let stop = ((at / CHUNK_BYTES + 1) * CHUNK_BYTES).min(range.end);
            if self.chunks.len() == CHUNKS {
                self.finish_first(progress, each)?;
            }
            self.begin(at..stop)?;
            at = stop;
        }
        Ok(())
    }

    /// Hands out all chunks.
    pub(super) fn drain(&mut self, progress: &mut Progress<'_>, each: &mut Read<'_>) -> Result<()> {
        while !self.chunks.is_empty() {
            self.finish_first(progress, each)?;
        }
        Ok(())
    }

    fn begin(&mut self, wanted: Range<u64>) -> Result<()> {
        let start_bytes = wanted.start - wanted.start % self.sector_bytes;
        let end_bytes = wanted.end.next_multiple_of(self.sector_bytes);
        let number = self.first + self.chunks.len() as u64;
        let mut bufs = Vec::with_capacity(self.sources.len());
        for source in &mut self.sources {
            let Some(mut buf) = self.free.pop() else {
                return Err(failed(source.path, io::Error::other("a buffer was lost in an earlier failure")));
            };
            let len = end_bytes.min(source.size_bytes).saturating_sub(start_bytes) as usize;
            buf[len..(end_bytes - start_bytes) as usize].fill(0);
            if len == 0 {
                bufs.push(Some(buf));
                continue;
            }
            let pushed = source.queue.push(Request::read(start_bytes, len, buf, number));
            pushed.map_err(|error| failed(source.path, error.reason))?;
            bufs.push(None);
        }
        self.chunks.push_back(Chunk { wanted, start_bytes, bufs });
        Ok(())
    }

    /// Waits for the first chunk, and hands it out.
    fn finish_first(&mut self, progress: &mut Progress<'_>, each: &mut Read<'_>) -> Result<()> {
        while let Some(unread) = self.chunks.front().and_then(|chunk| chunk.bufs.iter().position(Option::is_none)) {
            let source = &mut self.sources[unread];
            source.queue.reap(1, &mut self.done).map_err(|error| failed(source.path, error))?;
            for completion in self.done.drain(..) {
                completion.result.map_err(|error| failed(source.path, error))?;
                let chunk = completion.tag.checked_sub(self.first).and_then(|at| self.chunks.get_mut(at as usize));
                match (chunk, completion.buf) {
                    (Some(chunk), Some(buf)) => chunk.bufs[unread] = Some(buf),
                    _ => return Err(failed(source.path, io::Error::other("the queue returned no buffer"))),
                }
            }
        }
        let Some(chunk) = self.chunks.pop_front() else { return Ok(()) };
        self.first += 1;
        let within = (chunk.wanted.start - chunk.start_bytes) as usize;
        let len = (chunk.wanted.end - chunk.wanted.start) as usize;
        let bytes: Vec<&[u8]> = chunk.bufs.iter().flatten().map(|buf| &buf[within..within + len]).collect();
        let told = each(chunk.wanted.start, &bytes, progress);
        self.free.extend(chunk.bufs.into_iter().flatten());
        told
    }
}
