//! Blocks of a disk in use that read as zeros: found without a hold, read again under one, and
//! given back.

use super::{Live, Pace, StepResult};
use crate::{
    DiskError, Progress,
    engine::{
        chain::Chain,
        map::{Owner, Run, fold},
    },
    life::compact::{
        candidates::{Candidate, blocks_with_space},
        work::{Compacted, records_zeros},
        zeros::{self, ZeroQuery},
    },
};
use diskwright_image::{BlockState, Commit};
use diskwright_store::{BlockDevice, all_zero};
use std::{io, time::Instant};

/// Blocks that are examined for zeros at once.
const WINDOW_BLOCKS: usize = 256;
/// Maximum number of bytes that are read at once.
const READ_BYTES: u64 = 256 << 10;

impl Live<'_> {
    /// Blocks with space from `next_block` on that read as zeros at this moment, and all blocks
    /// with space. Empty at the end of the disk.
    pub(super) fn examine(
        &self,
        next_block: &mut u64,
        tell: &mut dyn FnMut(u64) -> bool,
    ) -> StepResult<(Vec<Candidate>, Vec<Candidate>)> {
        let window = blocks_with_space(self.image(), next_block, WINDOW_BLOCKS)?;
        let size_bytes = self.disk.geometry().size_bytes;
        let slice_bytes = (self.info.block_bytes / 64).max(512);
        let questions: Vec<ZeroQuery> = window
            .iter()
            .map(|candidate| {
                let (start, end) = self.top.block_range(candidate.block, size_bytes);
                let hole_at = candidate.is_whole.then_some((candidate.store, candidate.offset_bytes));
                ZeroQuery { range: start..end, skip: 0, slice_bytes, hole_at }
            })
            .collect();
        let questions: Vec<&ZeroQuery> = questions.iter().collect();
        let answers = zeros::answer(self.disk, self.engine, self.top.image.stores(), &questions, tell);
        let is_zero = answers.map_err(self.failed("read it"))?.ok_or(DiskError::Stopped)?;
        let zeros = window.iter().zip(is_zero).filter(|(_, is_zero)| *is_zero).map(|(candidate, _)| *candidate);
        Ok((zeros.collect(), window))
    }

    /// Removes the mappings of blocks that read as zeros.
    pub(super) fn give_back_zeros(
        &self,
        pace: &mut Pace,
        found: &mut Compacted,
        progress: &mut Progress<'_>,
    ) -> StepResult {
        let (mut next_block, mut done_bytes, total_bytes) = (0, 0, found.old_file_bytes);
        loop {
            let begun = Instant::now();
            let mut tell = |bytes: u64| progress((done_bytes + bytes).min(total_bytes), total_bytes);
            let (zeros, window) = self.examine(&mut next_block, &mut tell)?;
            if window.is_empty() {
                return Ok(());
            }
            done_bytes += window.len() as u64 * found.block_bytes;
            self.pause_if_busy(begun.elapsed());
            let mut zeros = &zeros[..];
            while !zeros.is_empty() {
                let turn = self.turn()?;
                let (batch, rest) = zeros.split_at(pace.blocks().min(zeros.len()));
                zeros = rest;
                let begun = Instant::now();
                let held = self.shared.hold(&turn, &self.top, batch.iter().map(|candidate| candidate.block));
                let held = held.map_err(self.failed("hold its blocks"))?;
                for candidate in batch {
                    let block = candidate.block;
                    if self.can_give_back(block)? {
                        let change = if records_zeros(&self.info) { Commit::Zero } else { Commit::Absent };
                        self.commit(block, change)?;
                        found.zero_bytes += found.block_bytes;
                    }
                }
                drop((held, turn));
                pace.was_held(begun.elapsed());
                self.pause_if_busy(begun.elapsed());
                if !progress(done_bytes.min(total_bytes), total_bytes) {
                    return Err(DiskError::Stopped.into());
                }
            }
        }
    }

    /// Whether a block has space, reads as zeros, and would read as zeros without its space too.
    /// The block is held, or the answer holds only for this moment.
    pub(super) fn can_give_back(&self, block: u64) -> StepResult<bool> {
        if !matches!(self.state(block)?, BlockState::Data { .. } | BlockState::Partial { .. }) {
            return Ok(false);
        }
        let io_error = self.failed("read it");
        let (start, end) = self.top.block_range(block, self.disk.geometry().size_bytes);
        let mut runs = Vec::new();
        let chain = self.shared.runs_blocking(start, end, &mut runs).map_err(&io_error)?;
        if !are_zeros(&chain, &runs).map_err(&io_error)? {
            return Ok(false);
        }
        let Some(parent) = chain.members().get(1).filter(|_| !records_zeros(&self.info)) else { return Ok(true) };
        // Without its space the block reads its parent's data.
        for unit in chain.map.unit_of(start)..=chain.map.unit_of(end - 1) {
            let runs = fold::decide(&chain, unit, parent.id)?;
            if !are_zeros(&chain, &runs).map_err(&io_error)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Whether all bytes of the runs are zero. Damaged blocks count as data.
fn are_zeros(chain: &Chain, runs: &[Run]) -> io::Result<bool> {
    let mut buf = Vec::new();
    for run in runs {
        let (source, offset_bytes) = match run.owner {
            Owner::Absent | Owner::Zero { .. } => continue,
            Owner::Data { source, offset_bytes } => (source, offset_bytes),
            Owner::Lazy { .. } | Owner::Compressed { .. } | Owner::Damaged { .. } => return Ok(false),
        };
        let Some(store) = chain.source(source) else { return Ok(false) };
        for within in (0..run.len_bytes).step_by(READ_BYTES as usize) {
            buf.resize((run.len_bytes - within).min(READ_BYTES) as usize, 0);
            store.read_at(&mut buf, offset_bytes + within)?;
            if !all_zero(&buf) {
                return Ok(false);
            }
        }
    }
    Ok(true)
}
