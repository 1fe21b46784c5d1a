//! The blocks of an image that have space, and which of them can be given back.
//!
//! ```text
//!   table of the image ─▶ window of blocks with space
//!   maps of the file systems ─▶ 64 slices of each block: free, or not
//!        all slices free ─▶ free           some ─▶ the others are read: zeros? (zeros.rs)
//! ```
//!
//! A slice is free only if all of it is. Memory is bounded by the length of a window. A disk with
//! more blocks than a window has is judged in several windows, and the maps are read for each.

use super::{
    work::{CompactRun, Verdict, VolumeGain},
    zeros::{self, ZeroQuery},
};
use crate::{DiskError, Result, engine::device::Disk, opening::volumes::examine};
use diskwright_image::{BlockState, Image};
use diskwright_store::BlockDevice;
use diskwright_volume::{ReadAt, free_ranges};
use std::{
    ops::{ControlFlow, Range},
    sync::Arc,
};

/// Number of blocks whose states are read by one call.
const STATES: u64 = 1024;
/// Number of slices of a block, at most.
const SLICES: u64 = 64;
/// Shortest slice in bytes: a sector.
const SLICE_MIN_BYTES: u64 = 512;

/// A block that has space.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    pub(super) block: u64,
    /// The file of the image in which its payload lies, and the offset there.
    pub(super) store: u16,
    pub(super) offset_bytes: u64,
    /// Whether all its sectors are in this image.
    pub(super) is_whole: bool,
}

/// The next blocks with space, in the order of the disk, at most `most` and some more; empty at the
/// end. `next_block` is the block at which to begin, and afterwards the one at which to go on.
pub(super) fn blocks_with_space(image: &dyn Image, next_block: &mut u64, most: usize) -> Result<Vec<Candidate>> {
    let mut found = Vec::new();
    let blocks = image.size_bytes().div_ceil(image.info().block_bytes);
    while found.len() < most {
        let Some(first) = image.next_block(*next_block, blocks)? else {
            *next_block = blocks;
            break;
        };
        let mut states = vec![BlockState::Absent; STATES.min(blocks - first) as usize];
        image.block_states(first, &mut states)?;
        for (block, state) in (first..).zip(&states) {
            if let BlockState::Data { store, offset_bytes } | BlockState::Partial { store, offset_bytes } = *state
                && !image.keeps_space(store)
            {
                let is_whole = matches!(state, BlockState::Data { .. });
                found.push(Candidate { block, store, offset_bytes, is_whole });
            }
        }
        *next_block = first + states.len() as u64;
    }
    Ok(found)
}

/// The free slices of each candidate of a window, a bit for each; empty if nothing is free.
#[derive(Debug, Default)]
pub(super) struct Free(Vec<u64>);

impl Free {
    fn of(&self, index: usize) -> u64 {
        self.0.get(index).copied().unwrap_or(0)
    }
}

/// The blocks with space, in the order of the disk, a window at a time.
pub(super) struct Candidates<'a> {
    work: &'a CompactRun<'a>,
    block_bytes: u64,
    size_bytes: u64,
    next_block: u64,
    window: Vec<Candidate>,
}

impl<'a> Candidates<'a> {
    pub(super) fn new(work: &'a CompactRun<'a>) -> Self {
        let (block_bytes, size_bytes) = (work.info.block_bytes, work.image.size_bytes());
        Self { work, block_bytes, size_bytes, next_block: 0, window: Vec::new() }
    }

    /// Goes on to the next blocks with space, at most `most` and some more. `false` at the end.
    pub(super) fn next_window(&mut self, most: usize) -> Result<bool> {
        self.window = blocks_with_space(&*self.work.image, &mut self.next_block, most)?;
        Ok(!self.window.is_empty())
    }

    /// Start and end of a block on the disk.
    fn range(&self, block: u64) -> Range<u64> {
        let start = block * self.block_bytes;
        start..start.saturating_add(self.block_bytes).min(self.size_bytes)
    }

    fn slice_bytes(&self) -> u64 {
        (self.block_bytes / SLICES).max(SLICE_MIN_BYTES)
    }

    /// The mask of a block that is free from its start to its end.
    fn all_slices(&self) -> u64 {
        u64::MAX >> (SLICES - (self.block_bytes / self.slice_bytes()).clamp(1, SLICES))
    }

    /// Reads what is free in the volumes. A volume whose map fails is left alone from now on, and
    /// nothing that its map has said counts.
    pub(super) fn mark_free(&self, volumes: &mut [VolumeGain]) -> Result<Free> {
        let engine = self.work.options.open.engine;
        let mut free = None;
        examine(&*self.work.disk, engine, &mut |_, _| true, &mut |reader| free = Some(self.free_in(reader, volumes)))
            .map_err(self.work.failed("read it"))?;
        Ok(free.unwrap_or_else(|| Free(vec![0; self.window.len()])))
    }

    fn free_in(&self, reader: &dyn ReadAt, volumes: &mut [VolumeGain]) -> Free {
        loop {
            let mut free = vec![0; self.window.len()];
            let mut failed = false;
            for gain in volumes.iter_mut().filter(|gain| gain.volume.free_bytes.is_ok()) {
                let found = free_ranges(reader, &gain.volume, &mut |range| {
                    self.mark(&range, &mut free);
                    ControlFlow::Continue(())
                });
                if let Err(reason) = found {
                    gain.volume.free_bytes = Err(reason);
                    failed = true;
                    break;
                }
            }
            if !failed {
                return Free(free);
            }
        }
    }

    fn mark(&self, range: &Range<u64>, free: &mut [u64]) {
        let first = self.window.partition_point(|candidate| self.range(candidate.block).end <= range.start);
        for (candidate, free) in self.window[first..].iter().zip(&mut free[first..]) {
            let block = self.range(candidate.block);
            if block.start >= range.end {
                return;
            }
            let from = range.start.max(block.start) - block.start;
            // What lies beyond the end of the disk is free too.
            let to = if range.end >= block.end { self.block_bytes } else { range.end - block.start };
            let slices = self.slice_bytes();
            let (first, end) = (from.div_ceil(slices), (to / slices).min(SLICES));
            if first < end {
                *free |= (u64::MAX >> (SLICES - (end - first))) << first;
            }
        }
    }

    /// Judges the blocks of the window. `tell` gets the bytes of the blocks that were examined; if
    /// it returns `false`, the judgement is stopped.
    pub(super) fn judge(&self, free: &Free, tell: &mut dyn FnMut(u64) -> bool) -> Result<Vec<(Candidate, Verdict)>> {
        let mut judged: Vec<(Candidate, Verdict)> = Vec::with_capacity(self.window.len());
        let mut questions = Vec::new();
        for (index, candidate) in self.window.iter().enumerate() {
            let is_free = free.of(index) & self.all_slices() == self.all_slices();
            if !is_free {
                let hole_at = candidate.is_whole.then_some((candidate.store, candidate.offset_bytes));
                questions.push((index, self.question(candidate, free.of(index), hole_at)));
            }
            judged.push((*candidate, if is_free { Verdict::Free } else { Verdict::Keep }));
        }
        let is_zero = self.ask(&self.work.disk, &questions, tell)?;
        for ((index, _), is_zero) in questions.iter().zip(is_zero) {
            if is_zero {
                judged[*index].1 = Verdict::Zero;
            }
        }
        if !self.work.records_zeros() {
            self.keep_what_shows_the_parent(&mut judged, tell)?;
        }
        Ok(judged)
    }

    fn question(&self, candidate: &Candidate, skip: u64, hole_at: Option<(u16, u64)>) -> ZeroQuery {
        let slice_bytes = self.slice_bytes();
        ZeroQuery { range: self.range(candidate.block), skip, slice_bytes, hole_at }
    }

    fn ask(
        &self,
        disk: &Disk,
        questions: &[(usize, ZeroQuery)],
        tell: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Vec<bool>> {
        let questions: Vec<&ZeroQuery> = questions.iter().map(|(_, question)| question).collect();
        let engine = self.work.options.open.engine;
        let answers = zeros::answer(disk, engine, self.work.image.stores(), &questions, tell);
        answers.map_err(self.work.failed("read it"))?.ok_or(DiskError::Stopped)
    }

    /// A block that has no space would read its parent's data: it stays unless those are zeros.
    fn keep_what_shows_the_parent(
        &self,
        judged: &mut [(Candidate, Verdict)],
        tell: &mut dyn FnMut(u64) -> bool,
    ) -> Result<()> {
        let layers = self.work.disk.layers();
        let below = Arc::new(Disk::from_layers(layers[1..].to_vec(), Vec::new())?);
        let below_bytes = below.geometry().size_bytes;
        let mut questions = Vec::new();
        for (index, (candidate, verdict)) in judged.iter().enumerate() {
            let mut question = self.question(candidate, 0, None);
            question.range.end = question.range.end.min(below_bytes);
            if *verdict != Verdict::Keep && !question.range.is_empty() {
                questions.push((index, question));
            }
        }
        let is_zero = self.ask(&below, &questions, tell)?;
        for ((index, _), _) in questions.iter().zip(is_zero).filter(|(_, is_zero)| !is_zero) {
            judged[*index].1 = Verdict::Keep;
        }
        Ok(())
    }
}
