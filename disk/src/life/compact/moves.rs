//! Moves the highest blocks of a file to its lowest free places, many at once.
//!
//! ```text
//!   blocks, highest first ─▶ reserve_move ─▶ batch of places ─▶ copied by a queue on the file
//!                                                                 │ all in place
//!        next batch ◀── flush: payload, then mappings ◀── commit Moved, for each copied block
//! ```
//!
//! An image may lie in several files: a block moves down in its own one.
//!
//! Invariant: a block is committed only when its copy is complete, and the image makes the copy
//! durable before the mapping. A batch that is stopped commits the blocks that were copied.
//!
//! A copy is shared by reflink where the file system can.

use super::work::{CompactRun, Compacted};
use crate::{DiskError, Progress, Result};
use diskwright_image::{BlockState, Commit, Image, MovePlace, MoveTo};
use diskwright_store::{
    BlockDevice, BlockQueue, Completion, EngineKind, FileRange, IoBuf, QueueOptions, RawDevice, Request, Slab, Store,
};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    io,
    sync::Arc,
};

/// Number of blocks that are gathered at once; then they are gathered again.
pub(super) const GATHERED_BLOCKS: usize = 1 << 20;
/// Number of states that are read by one call.
const STATES: u64 = 1024;
/// Bytes that are moved between two flushes.
const BATCH_BYTES: u64 = 1 << 30;
/// Length of one read or write.
const CHUNK_BYTES: u64 = 1 << 20;
/// Number of chunks in flight.
const DEPTH: usize = 16;
/// Sector of the file.
const SECTOR_BYTES: u32 = 512;

/// Moves tables and blocks down, as far as there is free space below them.
pub(super) fn move_down(work: &CompactRun<'_>, found: &mut Compacted, progress: &mut Progress<'_>) -> Result<()> {
    let writer = work.writer()?;
    writer.move_tables()?;
    let generation = writer.freed_generation();
    writer.flush()?;
    writer.recycle_for_moves(generation);
    loop {
        let files = highest_blocks(&*work.image)?;
        let count = files.iter().map(|file| file.blocks.len()).sum::<usize>();
        let packed_bytes = work.image.packed_len_bytes(count as u64)?.unwrap_or(0);
        let above = files.iter().map(|file| file.above(packed_bytes, found.block_bytes)).sum::<u64>();
        let total_bytes = found.moved_bytes + above * found.block_bytes;
        let mut has_moved = false;
        for file in files {
            has_moved |= move_in_file(work, file, total_bytes, found, progress)?;
        }
        // The old places lie above all blocks now, and are cut off at close.
        if count < GATHERED_BLOCKS || !has_moved {
            return Ok(());
        }
    }
}

/// Moves blocks of one file down. Returns whether one was moved.
fn move_in_file(
    work: &CompactRun<'_>,
    file: HighestBlocks,
    total_bytes: u64,
    found: &mut Compacted,
    progress: &mut Progress<'_>,
) -> Result<bool> {
    let store = work.image.stores().get(usize::from(file.store)).unwrap_or(work.image.store());
    let mut copier = Copier::new(store, work.options.open.engine).map_err(work.failed("open a queue on its file"))?;
    let mut blocks = file.blocks.into_iter().map(|(_, block)| block);
    let mut has_moved = false;
    loop {
        let batch = reserve_batch(work, &mut blocks, found.block_bytes)?;
        if batch.is_empty() {
            return Ok(has_moved);
        }
        has_moved = true;
        let before = found.moved_bytes;
        let mut tell = |bytes: u64| progress((before + bytes).min(total_bytes), total_bytes);
        let copied = copier.copy(&batch, &mut tell).map_err(work.failed("move its blocks"))?;
        copied.failure.map_or(Ok(()), Err).map_err(work.failed("move its blocks"))?;
        let shared = work.disk.shared();
        let chain = shared.chain();
        for (block, place) in batch.iter().zip(&copied.is_done).filter(|(_, is_done)| **is_done).map(|(one, _)| one) {
            let committed = shared.commit_blocking(chain.top(), *block, Commit::Moved);
            committed.map_err(work.failed("move its blocks"))?;
            found.moved_bytes += place.len_bytes.max(found.block_bytes);
        }
        work.writer()?.flush()?;
        if copied.is_stopped {
            return Err(DiskError::Stopped);
        }
    }
}

/// Reserves places for the next blocks. Ends at the first block below which nothing is free.
fn reserve_batch(
    work: &CompactRun<'_>,
    blocks: &mut dyn Iterator<Item = u64>,
    block_bytes: u64,
) -> Result<Vec<(u64, MovePlace)>> {
    let writer = work.writer()?;
    let mut batch = Vec::new();
    while (batch.len() as u64) < (BATCH_BYTES / block_bytes).max(1)
        && let Some(block) = blocks.next()
    {
        let to = loop {
            match writer.reserve_move(block)? {
                Some(to) => break to,
                None => writer.prepare(block..block + 1)?,
            }
        };
        match to {
            MoveTo::Place(place) => batch.push((block, place)),
            MoveTo::Stay => break,
        }
    }
    Ok(batch)
}

/// Blocks that lie high in a file of the image.
pub(super) struct HighestBlocks {
    pub(super) store: u16,
    /// Offsets and numbers, the highest first.
    pub(super) blocks: Vec<(u64, u64)>,
}

impl HighestBlocks {
    /// Number of blocks that end behind a length of the file.
    pub(super) fn above(&self, len_bytes: u64, block_bytes: u64) -> u64 {
        self.blocks.iter().filter(|(offset_bytes, _)| offset_bytes + block_bytes > len_bytes).count() as u64
    }
}

/// The blocks that lie highest in their files, by file; at most [`GATHERED_BLOCKS`] in all. Of
/// blocks that move together only the first one.
pub(super) fn highest_blocks(image: &dyn Image) -> Result<Vec<HighestBlocks>> {
    let blocks = image.size_bytes().div_ceil(image.info().block_bytes);
    let mut highest = BinaryHeap::new();
    let (mut at, mut last_group) = (0, None);
    let group_of = |block| image.writer().map_or(block, |writer| writer.moves_with(block).start);
    while let Some(first) = image.next_block(at, blocks)? {
        let mut states = vec![BlockState::Absent; STATES.min(blocks - first) as usize];
        image.block_states(first, &mut states)?;
        at = first + states.len() as u64;
        for (block, state) in (first..).zip(states) {
            if let BlockState::Data { store, offset_bytes } | BlockState::Partial { store, offset_bytes } = state
                && !image.keeps_space(store)
                && last_group.replace(group_of(block)) != Some(group_of(block))
            {
                highest.push(Reverse((offset_bytes, block, store)));
                if highest.len() > GATHERED_BLOCKS {
                    highest.pop();
                }
            }
        }
    }
    let mut files: BTreeMap<u16, Vec<(u64, u64)>> = BTreeMap::new();
    for Reverse((offset_bytes, block, store)) in highest.into_sorted_vec() {
        files.entry(store).or_default().push((offset_bytes, block));
    }
    Ok(files.into_iter().map(|(store, blocks)| HighestBlocks { store, blocks }).collect())
}

/// What became of a batch. Nothing is in flight any more.
pub(super) struct Copied {
    /// For each block, whether its whole payload is at the new place.
    pub(super) is_done: Vec<bool>,
    pub(super) is_stopped: bool,
    /// The first error. Blocks that were begun later are not done.
    pub(super) failure: Option<io::Error>,
}

/// A chunk that is read or written.
#[derive(Debug, Clone, Copy, Default)]
struct Chunk {
    /// Index of its block in the batch.
    index: usize,
    within_bytes: u64,
    len_bytes: u64,
    is_write: bool,
}

/// A queue on the image's file.
pub(super) struct Copier {
    file: Arc<dyn Store>,
    queue: Box<dyn BlockQueue>,
    free: Vec<IoBuf>,
    can_share: bool,
    /// Length of the file when the queue was opened: the queue reaches no further.
    file_bytes: u64,
}

impl Copier {
    pub(super) fn new(file: &Arc<dyn Store>, engine: EngineKind) -> io::Result<Self> {
        let slab = Slab::new(DEPTH, CHUNK_BYTES as usize);
        let device = RawDevice::new(Arc::clone(file), true, SECTOR_BYTES)?;
        let queue = device.open_queue(&QueueOptions { depth: DEPTH, engine, slab: Some(&slab), ring: None })?;
        let file_bytes = device.geometry().size_bytes;
        Ok(Self { file: Arc::clone(file), queue, free: slab.take_all(), can_share: true, file_bytes })
    }

    /// Whether all places lie within the file as it was when the queue was opened.
    pub(super) fn reaches(&self, batch: &[(u64, MovePlace)]) -> bool {
        batch.iter().all(|(_, place)| place.from_bytes.max(place.to_bytes) + place.len_bytes <= self.file_bytes)
    }

    /// Shares the payload of a block by reflink.
    fn share(&mut self, place: &MovePlace) -> bool {
        let range = FileRange { offset_bytes: place.from_bytes, len_bytes: place.len_bytes };
        self.can_share = self.can_share && self.file.clone_range(&*self.file, range, place.to_bytes).is_ok();
        self.can_share
    }

    /// Copies the payload of the blocks of a batch. `tell` gets the bytes that were copied; if it
    /// returns `false`, no further block is begun.
    ///
    /// # Errors
    /// If the queue fails. Then it is unknown what is in flight.
    pub(super) fn copy(&mut self, batch: &[(u64, MovePlace)], tell: &mut dyn FnMut(u64) -> bool) -> io::Result<Copied> {
        let mut left_bytes: Vec<u64> = batch.iter().map(|(_, place)| place.len_bytes).collect();
        let mut is_begun = vec![false; batch.len()];
        let mut chunks = vec![Chunk::default(); DEPTH];
        let mut idle: Vec<usize> = (0..DEPTH).collect();
        let (mut next, mut copied_bytes, mut is_stopped) = (Chunk::default(), 0, false);
        let mut failure = None;
        let mut done: Vec<Completion> = Vec::new();
        loop {
            while failure.is_none() && next.index < batch.len() && !idle.is_empty() {
                if is_stopped && next.within_bytes == 0 {
                    break;
                }
                let place = &batch[next.index].1;
                is_begun[next.index] = true;
                if next.within_bytes == 0 && self.share(place) {
                    left_bytes[next.index] = 0;
                    copied_bytes += place.len_bytes;
                    next.index += 1;
                    is_stopped |= !tell(copied_bytes);
                    continue;
                }
                let Some(slot) = idle.pop() else { break };
                next.len_bytes = CHUNK_BYTES.min(place.len_bytes - next.within_bytes);
                chunks[slot] = next;
                if let Err(error) = self.start(slot, &next, place, None) {
                    idle.push(slot);
                    failure = Some(error);
                    break;
                }
                next.within_bytes += next.len_bytes;
                if next.within_bytes == place.len_bytes {
                    next = Chunk { index: next.index + 1, ..Chunk::default() };
                }
            }
            if idle.len() == DEPTH {
                let is_done = left_bytes.iter().zip(is_begun).map(|(&left, is_begun)| is_begun && left == 0).collect();
                return Ok(Copied { is_done, is_stopped, failure });
            }
            self.queue.reap(1, &mut done)?;
            for completion in done.drain(..) {
                let slot = completion.tag as usize;
                let chunk = chunks[slot];
                let result = match (completion.result, completion.buf) {
                    (Ok(()), Some(buf)) if !chunk.is_write => {
                        chunks[slot].is_write = true;
                        match self.start(slot, &chunks[slot], &batch[chunk.index].1, Some(buf)) {
                            Ok(()) => continue,
                            Err(error) => Err(error),
                        }
                    }
                    (Ok(()), buf) => {
                        self.free.extend(buf);
                        left_bytes[chunk.index] -= chunk.len_bytes;
                        copied_bytes += chunk.len_bytes;
                        Ok(())
                    }
                    (Err(error), buf) => {
                        self.free.extend(buf);
                        Err(error)
                    }
                };
                idle.push(slot);
                failure = failure.or(result.err());
            }
            is_stopped |= !tell(copied_bytes);
        }
    }

    /// Starts to read a chunk, or to write it, if `buf` has its bytes.
    fn start(&mut self, slot: usize, chunk: &Chunk, place: &MovePlace, buf: Option<IoBuf>) -> io::Result<()> {
        let (tag, len) = (slot as u64, chunk.len_bytes as usize);
        let request = match buf {
            Some(buf) => Request::write(place.to_bytes + chunk.within_bytes, len, buf, tag),
            None => {
                let buf = self.free.pop().ok_or_else(|| io::Error::other("no buffer is left"))?;
                Request::read(place.from_bytes + chunk.within_bytes, len, buf, tag)
            }
        };
        self.queue.push(request).map_err(|error| error.reason)
    }
}
