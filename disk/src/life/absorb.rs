//! Merges the top image of a disk that is in use into its parent, while queues read and write. The
//! disk keeps its name, which leads to the parent's file afterwards.
//!
//! ```text
//!   link marked, parent begins ─▶ absorbing: a write goes to the top where the top has the block,
//!                                 else to the parent
//!     batch: hold ─▶ copy into the parent ─▶ flush the parent ─▶ commit Absent, flush the top
//!      ▲                                                                        │
//!      └────────── pause while clients are active ◀──── release ◀───────────────┘
//!   the top has no block ─▶ parent renamed over the top ─▶ chain without the top
//! ```
//!
//! Once the parent takes writes, the top gets no further block. Each block is moved once, so the
//! merge ends, also while clients rewrite everything all the time. There is no second copy of the
//! data: the top's space is given back while it goes on.
//!
//! What must always hold:
//! - The link of the top names the present and the coming identity of the parent, durably, before
//!   the parent changes (`merge_mark.rs`).
//! - A block leaves the top only when the parent has it durably.
//! - A client's write goes to the parent only where the top has no block on its file either: a
//!   held block is released when its removal is durable.
//! - A flush makes the parent durable before the top.
//!
//! A top that cannot record which sectors have data (VMDK) fills a block before a part of it is
//! written. A fill that began before the parent takes writes has its block excluded: writes to the
//! parent there wait for it, and then go to the top.
//!
//! So after a power cut at any moment the top over the parent reads right, and [`merge`] of both
//! finishes what was begun: a mark says that the disk's name is kept (`kept_name.rs`). When the
//! program is killed, what clients wrote to the parent may be in the page cache only: the next
//! writable open of the disk syncs the parent (`open.rs`). Nothing
//! marks a top without blocks as merged: it shows its parent, so it can be opened and written like
//! any other.
//!
//! Locks: the turn to change the chain is held from beginning to end. A set (`block_set.rs`), read
//! and changed under the mutation lock, says which blocks the top has. While a batch is held, reads
//! go on, and writes to its blocks wait (`excluded.rs`). The size of a batch is adapted so that
//! they wait for about [`HOLD_TARGET`].
//!
//! Rejected: a mirror, or a second child for new writes. Both copy what clients write a second
//! time, and need not end.
//!
//! [`merge`]: crate::merge()

mod batch;
mod ending;
mod parent;

use crate::{
    DiskError, Progress, Result,
    engine::{
        chain::{Chain, Layer, Member},
        device::{Disk, Origin},
        excluded::ExcludedBlocks,
        mutation::Mutation,
        shared::Shared,
        throttle::Throttle,
    },
    error::{self, file_error},
    life::{kept_name, merge::survey::missing_bytes, snapshot::LockedTop},
    opening::{merge_mark as mark, relink},
};
use batch::Copier;
use diskwright_image::{BlockState, Commit, Image, LinkageId};
use diskwright_store::sync::MutexGuard;
use parent::Parent;
use std::{
    io,
    ops::Range,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

/// How long blocks are held at most, where the device allows it.
const HOLD_TARGET: Duration = Duration::from_millis(40);
/// A batch at first, in bytes of the disk.
const FIRST_BATCH_BYTES: u64 = 4 << 20;
/// The largest batch.
const LARGEST_BATCH_BYTES: u64 = 64 << 20;
/// Most blocks of a batch.
const BATCH_BLOCKS: usize = 4096;
/// Most separate ranges of a batch: a look-up of a page compares each of its units with all.
const BATCH_RANGES: usize = 64;
/// Bytes of the top that are moved before its space is given back to the file system. Punching a
/// hole keeps all I/O to the file waiting, for about as long whatever its length.
const RECYCLED_BYTES: u64 = 256 << 20;
/// Number of states that are read at once.
const STATES: u64 = 4096;

/// How a disk in use is merged into its parent.
#[derive(Debug, Clone, Default)]
pub struct AbsorbOptions {
    /// More folders in which other children of the parent are searched.
    pub search_dirs: Vec<PathBuf>,
    /// Always copy, never share by reflink.
    pub no_reflink: bool,
    /// Checks everything and changes nothing.
    pub dry_run: bool,
}

/// The result of [`Disk::absorb`], or with [`AbsorbOptions::dry_run`] what it would be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Absorbed {
    /// The disk. Its name leads to the file of the former parent now.
    pub disk: PathBuf,
    /// The former name of the parent.
    pub parent: PathBuf,
    /// Bytes of the disk in blocks that the top had at the beginning.
    pub data_bytes: u64,
    /// Bytes copied; 0 with `dry_run`.
    pub copied_bytes: u64,
    /// Bytes shared by reflink; 0 with `dry_run`.
    pub cloned_bytes: u64,
    /// By how much the parent's file may grow, in bytes, unless data is shared.
    pub growth_bytes: u64,
    /// Virtual size of the parent before and after, in bytes.
    pub size_bytes: (u64, u64),
    /// Warnings for the user, one sentence each.
    pub warnings: Vec<String>,
}

impl Disk {
    /// Merges the top image into its parent, while queues are open and requests in flight. The disk
    /// keeps its name: at the end the parent's file is renamed over the top. Both must be in one
    /// folder. `progress` counts bytes of the blocks that the top had. Blocks on I/O and on
    /// requests in flight, so a thread with requests in flight must not call it. Images cannot be
    /// put on top meanwhile, and the disk cannot grow: those calls wait until this one returns.
    ///
    /// # Errors
    /// [`DiskError::BadOptions`] for a disk that is read-only, has no parent, or whose parent is
    /// larger, lies in another folder or has other children; [`DiskError::InUse`] if another
    /// program, or another disk of this one, has the parent open. Nothing has changed then.
    /// [`DiskError::Stopped`], and errors of reading and writing, leave the top over its parent:
    /// the disk goes on, and this call, or [`merge`](crate::merge()) when it is closed, finishes
    /// the merge. An error that names the durability of the new name leaves a merged disk.
    pub fn absorb(&self, options: &AbsorbOptions, progress: &mut Progress<'_>) -> Result<Absorbed> {
        self.absorb_if(options, &|_| true, progress)
    }

    /// As [`Disk::absorb`], if the chain is the one that the caller means when no other change of
    /// it is under way.
    pub(crate) fn absorb_if(
        &self,
        options: &AbsorbOptions,
        is_meant: &dyn Fn(&[Layer]) -> bool,
        progress: &mut Progress<'_>,
    ) -> Result<Absorbed> {
        let origin = self.origin.as_ref().ok_or_else(|| DiskError::BadOptions {
            what: "a disk without a file of its own cannot be merged while it is in use".into(),
            hint: "open the disk by its path".into(),
        })?;
        let shared = &self.shared;
        let failed = |source| error::from_io("merge it", &origin.file, source);
        // The disk cannot be closed meanwhile.
        let _open = CountedOpen::new(shared).map_err(failed)?;
        let turn = shared.begin_change();
        shared.check_poison(&shared.chain()).map_err(failed)?;
        if !is_meant(shared.chain().layers()) {
            return Err(DiskError::BadOptions {
                what: format!("{}: its chain was changed meanwhile", origin.file.display()),
                hint: "look at it, and try again".into(),
            });
        }
        relink::require(
            &origin.file,
            shared.chain().top().image.info().format,
            "an in-place merge of",
            relink::COPY_THE_CHAIN,
        )?;
        let parent = Parent::open(&shared.chain(), origin, &options.search_dirs)?;
        let mut absorbing = Absorbing { shared, turn, origin, options, done: Absorbed::default() };
        absorbing.done.disk.clone_from(&origin.file);
        absorbing.done.parent.clone_from(&parent.layer().path);
        absorbing.done.size_bytes = (parent.layer().image.size_bytes(), shared.chain().geometry.size_bytes);
        absorbing.check_space(&*parent.layer().image)?;
        if options.dry_run {
            return Ok(absorbing.done);
        }
        absorbing.remove_leftovers()?;
        absorbing.mark_name()?;
        parent.join(shared).map_err(failed)?;
        let moved = absorbing.begin().and_then(|()| absorbing.move_blocks(progress)).and_then(|()| absorbing.rename());
        let removal = match moved {
            Ok(removal) => removal,
            Err(error) => {
                absorbing.end()?;
                return Err(error);
            }
        };
        absorbing.pivot(removal)?;
        absorbing.done.warnings.extend(kept_name::unmark_or_warn(&origin.options.files, &origin.file));
        Ok(absorbing.done)
    }
}

/// Keeps the disk from being closed, as an open queue does.
struct CountedOpen<'a>(&'a Shared);

impl<'a> CountedOpen<'a> {
    fn new(shared: &'a Shared) -> io::Result<Self> {
        shared.queue_opens()?;
        Ok(Self(shared))
    }
}

impl Drop for CountedOpen<'_> {
    fn drop(&mut self) {
        self.0.queue_closed();
    }
}

/// A merge that has begun: the parent is open for writing.
struct Absorbing<'a> {
    shared: &'a Arc<Shared>,
    turn: MutexGuard<'a, ()>,
    origin: &'a Origin,
    options: &'a AbsorbOptions,
    done: Absorbed,
}

impl<'a> Absorbing<'a> {
    fn failed(&self, source: io::Error) -> DiskError {
        error::from_io("merge it into its parent", &self.origin.file, source)
    }

    /// Removes what a snapshot has left that was cut off: a second name of the top would be left
    /// without a parent.
    fn remove_leftovers(&self) -> Result<()> {
        let layers = self.shared.chain().layers().clone();
        let (shown, files) = (&*self.origin.file, &self.origin.options.files);
        let info = layers[0].image.info().clone();
        LockedTop { shown, real: shown.to_owned(), layers, info, files }.remove_leftovers()
    }

    /// Whoever finishes this merge later keeps the disk's name, too.
    fn mark_name(&self) -> Result<()> {
        let identity = self.shared.chain().top().image.store().identity();
        identity.map_or(Ok(()), |identity| kept_name::mark(&self.origin.options.files, &self.origin.file, identity))
    }

    /// Finds what the top has, and whether the parent's file system has space for it.
    fn check_space(&mut self, parent: &dyn Image) -> Result<()> {
        let block_bytes = self.shared.chain().top().block_bytes;
        let mut ranges: Vec<Range<u64>> = Vec::new();
        self.done.data_bytes = self.find_blocks(&mut |block| {
            let (start, end) = (block * block_bytes, (block + 1) * block_bytes);
            match ranges.last_mut().filter(|last| last.end == start) {
                Some(last) => last.end = end,
                None => ranges.push(start..end),
            }
        })?;
        refuse_damaged(parent)?;
        self.done.growth_bytes = missing_bytes(parent, ranges)?;
        let (path, needed_bytes) = (&self.done.parent, self.done.growth_bytes);
        let may_share = !self.options.no_reflink && diskwright_store::may_reflink(path);
        match diskwright_store::free_bytes(path) {
            Some(free_bytes) if free_bytes < needed_bytes && !may_share => {
                Err(file_error("merge into it", path, diskwright_store::shortage(path, needed_bytes, free_bytes)))
            }
            _ => Ok(()),
        }
    }

    /// Calls `found` for each block that the top has. Returns the bytes of the disk in them.
    fn find_blocks(&self, found: &mut dyn FnMut(u64)) -> Result<u64> {
        let chain = self.shared.chain();
        let top = chain.top();
        let blocks = top.size_bytes.div_ceil(top.block_bytes);
        let (mut at, mut bytes) = (0, 0);
        while let Some(first) = top.image.next_block(at, blocks)? {
            let mut states = vec![BlockState::Absent; STATES.min(blocks - first) as usize];
            top.image.block_states(first, &mut states)?;
            at = first + states.len() as u64;
            for (block, state) in (first..).zip(states).filter(|(_, state)| *state != BlockState::Absent) {
                if state == BlockState::Damaged {
                    return Err(top.image.damage(block)?.into());
                }
                let (start, end) = top.block_range(block, top.size_bytes);
                bytes += end - start;
                found(block);
            }
        }
        Ok(bytes)
    }

    /// Publishes another chain, at the moment at which a grace period begins, and waits for it.
    fn change(&self, change: impl FnOnce(&mut Mutation) -> Result<Chain>) -> Result<()> {
        let mut changed = Ok(());
        let grace = self.shared.begin_grace(|mutation| match change(mutation) {
            Ok(chain) => self.shared.publish(mutation, chain),
            Err(error) => changed = Err(error),
        });
        let grace = grace.map_err(|error| self.failed(error))?;
        changed?;
        self.shared.wait_for(grace).map_err(|error| self.failed(error))
    }

    /// Marks the link, begins to write to the parent, and lets it take writes.
    fn begin(&mut self) -> Result<()> {
        let chain = self.shared.chain();
        let [top, parent, ..] = chain.members() else { return Err(self.failed(io::ErrorKind::NotFound.into())) };
        self.shared.begin_writing().map_err(|error| self.failed(error))?;
        // A program that was killed may have left a new identity in the page cache only.
        let synced = parent.image.stores().iter().try_for_each(|store| store.sync_data());
        synced.map_err(|source| file_error("make it durable", &self.done.parent, source))?;
        let present = parent.image.linkage_id();
        let coming = present.map(LinkageId::fresh);
        let link = top.image.parent_link().unwrap_or_default();
        top.writer().map_err(|error| self.failed(error))?.set_parent_link(&mark::copying(link, present, coming))?;
        let writer = parent.writer().map_err(|error| self.failed(error))?;
        coming.map_or_else(|| writer.begin_writing(), |coming| writer.begin_writing_as(coming))?;
        parent.begin_writing().map_err(|error| self.failed(error))?;
        if parent.image.size_bytes() < top.image.size_bytes() {
            writer.resize(top.image.size_bytes())?;
        }
        // From now on commits of the top are recorded, so no block is missed that gets its data
        // while the tables are read.
        if !chain.absorbs {
            self.shared.lock().left = Some((top.id, Default::default()));
        }
        let mut found = Vec::new();
        self.done.data_bytes = self.find_blocks(&mut |block| {
            found.push(block);
            if found.len() == STATES as usize {
                self.record(&mut found);
            }
        })?;
        self.record(&mut found);
        self.change(|mutation| mutation.chain.with_absorbing(true))
    }

    fn record(&self, found: &mut Vec<u64>) {
        if let Some((_, left)) = &mut self.shared.lock().left {
            found.drain(..).for_each(|block| left.set(block, true));
        }
    }

    /// Moves all blocks of the top into the parent.
    fn move_blocks(&mut self, progress: &mut Progress<'_>) -> Result<()> {
        let chain = self.shared.chain();
        let [top, parent] = chain.written() else { return Err(self.failed(io::ErrorKind::NotFound.into())) };
        let group_blocks = (top.block_bytes.max(parent.block_bytes) / top.block_bytes).max(1);
        let mut copier = Copier::new(self.shared, top, parent, !self.options.no_reflink);
        let (mut batch_bytes, mut next, mut total_bytes) = (FIRST_BATCH_BYTES, 0, self.done.data_bytes);
        let mut unrecycled_bytes = 0;
        let mut throttle = Throttle::new(&self.shared.epochs);
        loop {
            let left_blocks = self.shared.lock().left.as_ref().map_or(0, |(_, left)| left.count());
            let left_bytes = left_blocks.saturating_mul(top.block_bytes);
            total_bytes = total_bytes.max(left_bytes);
            if !progress(total_bytes - left_bytes, total_bytes) {
                return Err(DiskError::Stopped);
            }
            if left_blocks == 0 {
                return Ok(());
            }
            let blocks = self.choose(top, group_blocks, &mut next, batch_bytes);
            if blocks.is_empty() {
                next = 0;
                continue;
            }
            let began = Instant::now();
            let moved = self.move_batch(&mut copier, &blocks);
            (self.done.copied_bytes, self.done.cloned_bytes) = (copier.copied_bytes, copier.cloned_bytes);
            let freed = moved.map_err(|error| self.failed(error))?;
            unrecycled_bytes += blocks.len() as u64 * top.block_bytes;
            if unrecycled_bytes >= RECYCLED_BYTES {
                unrecycled_bytes = 0;
                self.shared.recycle_after_grace(freed);
            }
            batch_bytes = adapted(batch_bytes, began.elapsed());
            throttle.pause(sleep);
        }
    }

    /// The blocks of the next batch: groups of blocks that cover whole blocks of both images, in
    /// which the top has any.
    fn choose(&self, top: &Member, group_blocks: u64, next: &mut u64, batch_bytes: u64) -> Vec<u64> {
        let mutation = self.shared.lock();
        let Some((_, left)) = &mutation.left else { return Vec::new() };
        let disk_blocks = top.size_bytes.div_ceil(top.block_bytes);
        let (mut blocks, mut bytes, mut ranges) = (Vec::new(), 0, 0);
        while (blocks.is_empty() || bytes < batch_bytes && blocks.len() < BATCH_BLOCKS)
            && let Some(block) = left.next(*next)
        {
            let group = block - block % group_blocks;
            if blocks.last().is_none_or(|last| last + 1 != group) {
                ranges += 1;
                if ranges > BATCH_RANGES {
                    break;
                }
            }
            let end = (group + group_blocks).min(disk_blocks);
            bytes += (group..end).filter(|&block| left.contains(block)).count() as u64 * top.block_bytes;
            blocks.extend(group..end);
            *next = end;
        }
        blocks
    }

    /// Moves what the top has of these blocks. Returns up to where both images have freed space
    /// durably.
    fn move_batch(&self, copier: &mut Copier<'_>, blocks: &[u64]) -> io::Result<Vec<(Member, u64)>> {
        let (shared, top, parent) = (self.shared, copier.top, copier.parent);
        // What clients have written since the last flush does not count while blocks are held.
        shared.flush_member(parent)?;
        shared.flush_member(top)?;
        let held: ExcludedBlocks<'_> = shared.hold(&self.turn, top, blocks.iter().copied())?;
        let here: Vec<u64> = {
            let mutation = shared.lock();
            let is_left = |block: &u64| mutation.left.as_ref().is_some_and(|(_, left)| left.contains(*block));
            blocks.iter().copied().filter(is_left).collect()
        };
        here.iter().try_for_each(|&block| copier.copy(block))?;
        let of_parent = shared.flush_member(parent)?;
        let gone = here.iter().try_for_each(|&block| shared.commit_blocking(top, block, Commit::Absent));
        // If this fails, some blocks are gone in memory only. What clients write to the parent
        // there must not count as durable: on its file the top still has them.
        let of_top = shared.flush_member(top).inspect_err(|_| shared.poison.set())?;
        drop(held);
        gone?;
        Ok(vec![(top.clone(), of_top), (parent.clone(), of_parent)])
    }
}

/// Refuses a parent with a damaged block: once it takes writes, clients would get the errors.
fn refuse_damaged(image: &dyn Image) -> Result<()> {
    let blocks = image.size_bytes().div_ceil(image.info().block_bytes.max(1));
    let mut at = 0;
    while let Some(first) = image.next_block(at, blocks)? {
        let mut states = vec![BlockState::Absent; STATES.min(blocks - first) as usize];
        image.block_states(first, &mut states)?;
        at = first + states.len() as u64;
        if let Some(place) = states.iter().position(|state| *state == BlockState::Damaged) {
            return Err(image.damage(first + place as u64)?.into());
        }
    }
    Ok(())
}

/// The size of the next batch after one that took this long.
fn adapted(batch_bytes: u64, took: Duration) -> u64 {
    #[cfg(feature = "shuttle")]
    let took = if took.is_zero() { took } else { HOLD_TARGET };
    if took > HOLD_TARGET {
        (batch_bytes / 2).max(1)
    } else if took < HOLD_TARGET / 3 {
        (batch_bytes * 2).min(LARGEST_BATCH_BYTES)
    } else {
        batch_bytes
    }
}

#[cfg(not(feature = "shuttle"))]
fn sleep(pause: Duration) {
    diskwright_store::sync::thread::sleep(pause);
}

#[cfg(feature = "shuttle")]
fn sleep(_pause: Duration) {
    diskwright_store::sync::thread::yield_now();
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests;
