//! Compacts a disk while it is in use: blocks of zeros lose their space, the other blocks move down
//! in the file, and the file is cut.
//!
//! ```text
//!   zeros   a window of blocks is read ─▶ those of zeros are held ─▶ read again ─▶ commit Zero
//!   moves   the highest blocks are held ─▶ reserve_move ─▶ copied ─▶ commit Moved ─▶ released
//!   cut     flush ─▶ grace period ─▶ freed space is free ─▶ cut_free_tail
//! ```
//!
//! The maps of file systems are not read: the mounted file system changes them all the time. Blocks
//! that it discards have no space any more, and the moves fill the gaps that they leave.
//!
//! What must hold:
//! - A block is read for the last time, copied and committed while it is held (`excluded.rs`), so
//!   no write is lost. Reads go on, first at the old place and then at the new one.
//! - The image makes the copy durable before the mapping that leads to it. The old place is handed
//!   out again when the new mapping is durable and all requests that may use it have ended: the
//!   usual way of freed space (`shared.rs`). Only space that is free in this sense is cut off. So
//!   the disk reads right after a power cut at any moment, and what was not finished is free space
//!   for the next run.
//! - Clients take the lowest free space, so the end of the file stays empty while there is other
//!   free space. Each round is over the blocks that were there when it began, and the number of
//!   rounds is bounded. So the operation ends, whatever clients do.
//!
//! The turn to change the chain is taken for each batch, so a snapshot or a growth can come in
//! between. After a snapshot another image is written, and the operation ends with a warning.
//!
//! A batch is as long as its hold takes about [`HOLD_AIM`], as writes to its blocks wait. If other
//! requests are in flight, a pause as long as the hold follows.

mod zeros_in_use;

use super::{
    RemainingBlocks,
    moves::{Copier, GATHERED_BLOCKS, HighestBlocks, highest_blocks},
    work::{Compacted, refuse_fixed},
};
use crate::{
    DiskError, Progress, Result,
    engine::{chain::Member, device::Disk, shared::Shared},
    error::from_io,
};
use diskwright_image::{BlockState, Commit, Image, ImageInfo, ImageWriter, MoveTo};
use diskwright_store::{BlockDevice, EngineKind, sync::MutexGuard};
use std::{
    io,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

/// Maximum number of passes over the blocks that are moved, for each [`GATHERED_BLOCKS`] of them.
const ROUNDS_MAX: usize = 8;
/// Length of a batch at first, in bytes.
const BATCH_FIRST_BYTES: u64 = 4 << 20;
/// Maximum length of a batch in bytes.
const BATCH_MAX_BYTES: u64 = 64 << 20;
/// Time for which blocks of a batch are held, about.
const HOLD_AIM: Duration = Duration::from_millis(30);
/// Maximum pause after a batch.
const PAUSE_MAX: Duration = Duration::from_millis(100);
/// Time after a hold in which requests that waited for its blocks begin.
const WAKING: Duration = Duration::from_micros(300);
/// Bytes that are moved between two flushes.
const FLUSH_BYTES: u64 = 64 << 20;
/// Flushes in which freed space may become free. Each waits for one grace period, and another one
/// may have been under way.
const FLUSHES_MAX: usize = 64;

impl Disk {
    /// Gives back blocks of zeros and makes the file as small as possible, while queues are open
    /// and requests in flight. The contents do not change. Durable on return. The maps of file
    /// systems are not read, so blocks that they have free are given back only if they were
    /// discarded. `progress` is called as by [`compact`](crate::compact()). With `dry_run` nothing
    /// is changed, and the result is foretold. Waits for requests in flight, so a thread with
    /// requests in flight must not call it.
    ///
    /// # Errors
    /// [`DiskError::BadOptions`] for a fixed or raw disk; [`DiskError::Image`] for an image whose
    /// blocks cannot be moved, and for a damaged table; [`DiskError::File`] if the disk is open
    /// read-only or its file cannot be read or written, also for lack of space;
    /// [`DiskError::Stopped`]. After every error the disk is whole, and what was done so far stays
    /// done.
    pub fn compact(&self, dry_run: bool, progress: &mut Progress<'_>) -> Result<Compacted> {
        let live = Live::new(self)?;
        let mut found = Compacted {
            size_bytes: self.geometry().size_bytes,
            block_bytes: live.info.block_bytes,
            old_file_bytes: live.file_bytes()?,
            ..Compacted::default()
        };
        if dry_run {
            live.foretell(&mut found, progress)?;
            return Ok(found);
        }
        let done = live.begin().and_then(|()| {
            let mut pace = Pace::new(&live);
            live.give_back_zeros(&mut pace, &mut found, progress)?;
            live.move_down(&mut pace, &mut found, progress)
        });
        // Also after a stop and after an error: what was done so far makes the file shorter.
        let cut = match &done {
            Err(End::OtherTop) => Ok(()),
            _ => live.settle_and_cut(),
        };
        match done.and(cut) {
            Ok(()) => {}
            Err(End::OtherTop) => found.warnings.push(format!(
                "{}: another image was put on top of the disk meanwhile, so the file was not made as small as it can be: compact it when it is not in use",
                live.path.display()
            )),
            Err(End::Failed(error)) => return Err(error),
        }
        found.new_file_bytes = live.file_bytes()?;
        progress(found.moved_bytes, found.moved_bytes);
        Ok(found)
    }
}

/// Why the operation ends early.
enum End {
    Failed(DiskError),
    /// The image that is compacted is no longer the top.
    OtherTop,
}

impl<E: Into<DiskError>> From<E> for End {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

type StepResult<T = ()> = std::result::Result<T, End>;

/// The disk and its top image.
struct Live<'a> {
    disk: &'a Disk,
    shared: &'a Arc<Shared>,
    top: Member,
    path: PathBuf,
    info: ImageInfo,
    engine: EngineKind,
}

impl<'a> Live<'a> {
    fn new(disk: &'a Disk) -> Result<Self> {
        let chain = disk.shared.chain();
        let path = chain.layers()[0].path.clone();
        let top = chain.top().clone();
        let info = top.image.info().clone();
        refuse_fixed(&path, &info)?;
        let engine = disk.origin.as_ref().map_or(EngineKind::Auto, |origin| origin.options.engine);
        let live = Self { disk, shared: &disk.shared, top, path, info, engine };
        live.writer()?;
        live.shared.check_poison(&chain).map_err(live.failed("compact it"))?;
        Ok(live)
    }

    fn failed(&self, doing: &'static str) -> impl Fn(io::Error) -> DiskError + use<> {
        let path = self.path.clone();
        move |error| from_io(doing, &path, error)
    }

    fn image(&self) -> &dyn Image {
        &*self.top.image
    }

    fn writer(&self) -> Result<&dyn ImageWriter> {
        self.top.writer().map_err(self.failed("write to it"))
    }

    fn file_bytes(&self) -> Result<u64> {
        self.disk
            .layers()
            .iter()
            .find(|layer| Arc::ptr_eq(&layer.image, &self.top.image))
            .map_or(Ok(0), |layer| layer.files_len_bytes().map_err(self.failed("examine it")))
    }

    /// Waits for the turn to change the chain.
    fn turn(&self) -> StepResult<MutexGuard<'a, ()>> {
        let turn = self.shared.begin_change();
        if self.shared.chain().top().id == self.top.id { Ok(turn) } else { Err(End::OtherTop) }
    }

    /// The state of a block now.
    fn state(&self, block: u64) -> Result<BlockState> {
        let mut state = [BlockState::Absent];
        self.image().block_states(block, &mut state)?;
        Ok(state[0])
    }

    fn commit(&self, block: u64, change: Commit) -> Result<()> {
        self.shared.commit_blocking(&self.top, block, change).map_err(self.failed("compact it"))
    }

    /// Prepares the image. Blocks without data lose the space that they keep.
    fn begin(&self) -> StepResult {
        let turn = self.turn()?;
        let writer = self.writer()?;
        writer.begin_compacting_in_use()?;
        drop(turn);
        let pace = Pace::new(self);
        let mut first_block = 0;
        loop {
            let kept = writer.blocks_with_kept_space(first_block)?;
            let Some(last) = kept.last() else { return Ok(()) };
            first_block = last + 1;
            let mut kept = &kept[..];
            while !kept.is_empty() {
                let turn = self.turn()?;
                let (batch, rest) = kept.split_at(pace.blocks().min(kept.len()));
                kept = rest;
                let held = self.shared.hold(&turn, &self.top, batch.iter().copied());
                let held = held.map_err(self.failed("hold its blocks"))?;
                for &block in batch {
                    if self.state(block)? == BlockState::Zero {
                        self.commit(block, Commit::Zero)?;
                    }
                }
                drop((held, turn));
            }
        }
    }

    /// Moves tables and blocks down, and cuts the file.
    fn move_down(&self, pace: &mut Pace, found: &mut Compacted, progress: &mut Progress<'_>) -> StepResult {
        let blocks = found.size_bytes / found.block_bytes;
        for _ in 0..ROUNDS_MAX + blocks as usize / GATHERED_BLOCKS {
            let turn = self.turn()?;
            self.writer()?.move_tables()?;
            drop(turn);
            self.settle()?;
            let before = found.moved_bytes;
            self.move_once(pace, found, progress)?;
            self.settle_and_cut()?;
            if found.moved_bytes == before {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Moves the blocks that are highest now in each file, until nothing is free below the next.
    fn move_once(&self, pace: &mut Pace, found: &mut Compacted, progress: &mut Progress<'_>) -> StepResult {
        let files = highest_blocks(self.image())?;
        let count = files.iter().map(|file| file.blocks.len()).sum::<usize>();
        let packed_bytes = self.image().packed_len_bytes(count as u64)?.unwrap_or(0);
        let above = files.iter().map(|file| file.above(packed_bytes, found.block_bytes)).sum::<u64>();
        let total_bytes = found.moved_bytes + above * found.block_bytes;
        files.iter().try_for_each(|file| self.move_in_file(file, total_bytes, pace, found, progress))
    }

    fn move_in_file(
        &self,
        file: &HighestBlocks,
        total_bytes: u64,
        pace: &mut Pace,
        found: &mut Compacted,
        progress: &mut Progress<'_>,
    ) -> StepResult {
        let mut copier = self.copier(file.store)?;
        let (mut left, mut unflushed_bytes) = (&file.blocks[..], 0);
        while !left.is_empty() {
            let turn = self.turn()?;
            let (batch, rest) = left.split_at(pace.blocks().min(left.len()));
            left = rest;
            let begun = Instant::now();
            let writer = self.writer()?;
            let together = batch.iter().flat_map(|&(_, block)| writer.moves_with(block));
            let held = self.shared.hold(&turn, &self.top, together);
            let held = held.map_err(self.failed("hold its blocks"))?;
            let before = found.moved_bytes;
            let moved = self.move_batch(file.store, batch, &mut copier, found, &mut |bytes| {
                progress((before + bytes).min(total_bytes), total_bytes)
            });
            // The next batch gets other places.
            drop((held, turn));
            let is_at_end = moved?;
            pace.was_held(begun.elapsed());
            unflushed_bytes += found.moved_bytes - before;
            if unflushed_bytes >= FLUSH_BYTES {
                unflushed_bytes = 0;
                self.shared.flush_blocking().map_err(self.failed("make it durable"))?;
            }
            self.pause_if_busy(begun.elapsed());
            if is_at_end {
                return Ok(());
            }
        }
        Ok(())
    }

    fn copier(&self, store: u16) -> Result<Copier> {
        let file = self.image().stores().get(usize::from(store)).unwrap_or(self.image().store());
        Copier::new(file, self.engine).map_err(self.failed("open a queue on its file"))
    }

    /// Moves held blocks of a file. Returns whether nothing is free below one of them.
    fn move_batch(
        &self,
        store: u16,
        batch: &[(u64, u64)],
        copier: &mut Copier,
        found: &mut Compacted,
        tell: &mut dyn FnMut(u64) -> bool,
    ) -> StepResult<bool> {
        let writer = self.writer()?;
        let (mut places, mut is_at_end) = (Vec::new(), false);
        for &(_, block) in batch {
            let to = loop {
                match writer.reserve_move(block)? {
                    Some(to) => break to,
                    None => writer.prepare(block..block + 1)?,
                }
            };
            match to {
                MoveTo::Place(place) => places.push((block, place)),
                // A block that was discarded meanwhile says nothing about free space.
                MoveTo::Stay => is_at_end |= !matches!(self.state(block)?, BlockState::Absent | BlockState::Zero),
            }
            if is_at_end {
                break;
            }
        }
        if !copier.reaches(&places) {
            // A block got new space meanwhile, beyond the former end of the file.
            *copier = self.copier(store)?;
        }
        let copied = copier.copy(&places, tell).map_err(self.failed("move its blocks"))?;
        for ((block, place), is_done) in places.iter().zip(&copied.is_done) {
            if *is_done {
                self.commit(*block, Commit::Moved)?;
                found.moved_bytes += place.len_bytes.max(found.block_bytes);
            }
        }
        writer.give_up_moves();
        match copied.failure {
            Some(error) => Err(self.failed("move its blocks")(error).into()),
            None if copied.is_stopped => Err(DiskError::Stopped.into()),
            None => Ok(is_at_end),
        }
    }

    /// Waits until all space that was freed so far is free, and its removal durable.
    fn settle(&self) -> StepResult {
        let generation = self.writer()?.freed_generation();
        for _ in 0..FLUSHES_MAX {
            self.shared.flush_blocking().map_err(self.failed("make it durable"))?;
            self.shared.wait_for_grace().map_err(self.failed("wait for its requests"))?;
            let mutation = self.shared.lock();
            if mutation.chain.top().id != self.top.id {
                return Err(End::OtherTop);
            }
            if mutation.recycled.get(&self.top.id).copied().unwrap_or(0) >= generation {
                return Ok(());
            }
        }
        Ok(())
    }

    fn settle_and_cut(&self) -> StepResult {
        self.settle()?;
        let _turn = self.turn()?;
        Ok(self.writer()?.cut_free_tail()?)
    }

    /// Fills in what a compaction would reach now.
    fn foretell(&self, found: &mut Compacted, progress: &mut Progress<'_>) -> Result<()> {
        let (mut next_block, mut done_bytes, total_bytes) = (0, 0, found.old_file_bytes);
        let mut kept = RemainingBlocks::default();
        loop {
            let mut tell = |bytes: u64| progress((done_bytes + bytes).min(total_bytes), total_bytes);
            let examined = self.examine(&mut next_block, &mut tell).and_then(|(zeros, window)| {
                let mut given_back = Vec::new();
                for candidate in zeros {
                    if self.can_give_back(candidate.block)? {
                        given_back.push(candidate.block);
                    }
                }
                Ok((given_back, window))
            });
            let (given_back, window) = match examined {
                Ok(examined) => examined,
                Err(End::Failed(error)) => return Err(error),
                Err(End::OtherTop) => break,
            };
            if window.is_empty() {
                break;
            }
            done_bytes += window.len() as u64 * found.block_bytes;
            found.zero_bytes += given_back.len() as u64 * found.block_bytes;
            window
                .iter()
                .filter(|candidate| given_back.binary_search(&candidate.block).is_err())
                .for_each(|candidate| kept.add(candidate));
        }
        kept.foretell(self.image(), found)
    }

    /// Leaves the device to others for as long as it was used, if other requests are in flight.
    fn pause_if_busy(&self, used: Duration) {
        sleep(WAKING);
        if self.shared.epochs.in_flight() > 0 {
            sleep(used.min(PAUSE_MAX));
        }
    }
}

/// How many bytes are held at once.
struct Pace {
    batch_bytes: u64,
    block_bytes: u64,
}

impl Pace {
    fn new(live: &Live<'_>) -> Self {
        Self { batch_bytes: BATCH_FIRST_BYTES, block_bytes: live.info.block_bytes }
    }

    /// Blocks of the next batch, at least one.
    fn blocks(&self) -> usize {
        (self.batch_bytes / self.block_bytes).max(1) as usize
    }

    /// Adjusts the length of a batch to the time for which the last one was held.
    fn was_held(&mut self, held: Duration) {
        if held > HOLD_AIM {
            self.batch_bytes = (self.batch_bytes / 2).max(self.block_bytes.min(BATCH_FIRST_BYTES));
        } else if held < HOLD_AIM / 3 {
            self.batch_bytes = (self.batch_bytes * 2).min(BATCH_MAX_BYTES);
        }
    }
}

#[cfg(not(feature = "shuttle"))]
fn sleep(time: Duration) {
    std::thread::sleep(time);
}

#[cfg(feature = "shuttle")]
fn sleep(_time: Duration) {
    diskwright_store::sync::thread::yield_now();
}
