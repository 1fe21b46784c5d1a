//! Gives back the space that a disk does not need, and makes its file as small as possible.
//!
//! ```text
//!   blocks with space ─▶ free in their file system, or all zeros?     candidates.rs, zeros.rs
//!        │ yes                                  │ no
//!        ▼                                      ▼
//!   their mapping is removed                    highest blocks ─▶ lowest free places   moves.rs
//!        └─▶ flush ─▶ the space is free ────────────┘                    │ flush
//!                                                                        ▼
//!                                                    close: the file is cut after its last block
//! ```
//!
//! What may be given back:
//! - a block that the file system inside has free, all of it, by its own map (`diskwright-volume`,
//!   which leaves alone whatever is in doubt). Its contents change: it reads as zeros afterwards.
//! - a block that reads as zeros, apart from what is free. Its contents do not change.
//!
//! An image that has children gets only what leaves its contents unchanged: zeros and moves. Its
//! identity does not change then, so its children still fit. (A child of a VHD records when the
//! file of its parent was last changed. So a VHD with children is refused.) In a differencing image
//! a block must not begin to show the parent's data. A VHDX records the block as zeros; a VHD
//! cannot, so there a block is given back only where its parents read as zeros too.
//!
//! Fixed disks and raw disks are refused, as Windows (`Optimize-VHD`) does for fixed disks: whoever
//! makes a fixed disk wants its space to be there. A conversion makes a dynamic disk of it.
//!
//! Why a power cut at any moment leaves the same disk: a mapping is removed or changed like in any
//! session of the image, and becomes durable in a flush, after the payload that it needs. A moved
//! block keeps its old space until the new mapping is durable. Space is reused only after the
//! removal of its mapping is durable. What is not finished is slack in the file: running the
//! operation again gives it back.
//!
//! The disk is locked for writing, so no other process has it open. [`Disk::compact`] does the same
//! to a disk in use, without the maps of file systems (`live.rs`).
//!
//! [`Disk::compact`]: crate::Disk::compact

mod candidates;
mod live;
mod moves;
mod work;
mod zeros;

use crate::{Progress, Result, opening::volumes};
use candidates::{Candidate, Candidates, Free};
use diskwright_image::{Commit, Image};
use diskwright_store::BlockDevice;
use std::path::Path;
pub use work::{CompactOptions, Compacted, VolumeGain};
use work::{CompactRun, Verdict};

/// Number of blocks with space that are judged at once: it bounds the memory.
const WINDOW_BLOCKS: usize = 1 << 18;

/// Compacts the disk at `path`. Durable on return. `progress` counts bytes of blocks that were
/// examined, and begins again at 0 for those that are moved.
///
/// # Errors
/// [`DiskError::InUse`](crate::DiskError::InUse) if another program has it open;
/// [`DiskError::BadOptions`](crate::DiskError::BadOptions) for a fixed disk, for a VHD with
/// children, and if a child cannot be ruled out; [`DiskError::Image`](crate::DiskError::Image) for
/// a damaged table; [`DiskError::File`](crate::DiskError::File) if it cannot be read or written,
/// also for lack of space; [`DiskError::Stopped`](crate::DiskError::Stopped). After every error the
/// disk is whole, and its contents are those that it would have if it had been done.
pub fn compact(path: impl AsRef<Path>, options: &CompactOptions, progress: &mut Progress<'_>) -> Result<Compacted> {
    let work = CompactRun::open(path.as_ref(), options)?;
    let mut found = Compacted {
        size_bytes: work.disk.geometry().size_bytes,
        block_bytes: work.info.block_bytes,
        old_file_bytes: work.file_bytes()?,
        child: work.child.clone(),
        warnings: work.disk.warnings().to_vec(),
        ..Compacted::default()
    };
    if found.child.is_none() {
        let layout = volumes::layout(&*work.disk, options.open.engine).map_err(work.failed("read its partitions"))?;
        found.volumes = layout.volumes.into_iter().map(|volume| VolumeGain { volume, given_back_bytes: 0 }).collect();
    }
    let changes = !options.estimate && !options.dry_run;
    if changes {
        work.writer()?.begin_compacting()?;
    }
    let result = give_back(&work, changes, &mut found, progress).and_then(|kept| match changes {
        true => moves::move_down(&work, &mut found, progress).map(|()| kept),
        false => Ok(kept),
    });
    if !changes {
        result?.foretell(&*work.image, &mut found)?;
        return Ok(found);
    }
    // Also after a stop and after an error: what was done so far makes the file shorter.
    let closed = work.disk.close();
    result?;
    closed?;
    found.new_file_bytes = work.file_bytes()?;
    progress(found.moved_bytes, found.moved_bytes);
    Ok(found)
}

/// The blocks that stay.
#[derive(Default)]
struct RemainingBlocks {
    blocks: u64,
    /// Offsets of their payload, of the first [`WINDOW_BLOCKS`].
    offsets_bytes: Vec<u64>,
}

impl RemainingBlocks {
    fn add(&mut self, candidate: &Candidate) {
        self.blocks += 1;
        if self.offsets_bytes.len() < WINDOW_BLOCKS {
            self.offsets_bytes.push(candidate.offset_bytes);
        }
    }

    /// Fills in what a compaction will reach.
    fn foretell(&self, image: &dyn Image, found: &mut Compacted) -> Result<()> {
        let packed_bytes = image.packed_len_bytes(self.blocks)?;
        found.new_file_bytes = packed_bytes.unwrap_or(found.old_file_bytes).min(found.old_file_bytes);
        let is_above = |offset_bytes: &&u64| **offset_bytes + found.block_bytes > found.new_file_bytes;
        found.moved_bytes = self.offsets_bytes.iter().filter(is_above).count() as u64 * found.block_bytes;
        Ok(())
    }
}

/// Gives back what is free or zero, if `changes`; counts it in any case. Returns what stays.
fn give_back(
    work: &CompactRun<'_>,
    changes: bool,
    found: &mut Compacted,
    progress: &mut Progress<'_>,
) -> Result<RemainingBlocks> {
    let mut kept = RemainingBlocks::default();
    let mut candidates = Candidates::new(work);
    let (mut done_bytes, total_bytes) = (0, found.old_file_bytes);
    while candidates.next_window(WINDOW_BLOCKS)? {
        let free = match work.child {
            None => candidates.mark_free(&mut found.volumes)?,
            Some(_) => Free::default(),
        };
        let judged =
            candidates.judge(&free, &mut |bytes| progress((done_bytes + bytes).min(total_bytes), total_bytes))?;
        done_bytes += judged.len() as u64 * found.block_bytes;
        if changes {
            commit(work, &judged)?;
        }
        for (candidate, verdict) in &judged {
            match verdict {
                Verdict::Keep => {
                    kept.add(candidate);
                    continue;
                }
                Verdict::Free => found.free_bytes += found.block_bytes,
                Verdict::Zero => found.zero_bytes += found.block_bytes,
            }
            if let Some(gain) = volume_at(&mut found.volumes, candidate.block * found.block_bytes) {
                gain.given_back_bytes += found.block_bytes;
            }
        }
    }
    Ok(kept)
}

/// Removes the mappings of blocks that are given back, durably. Their space is free afterwards.
fn commit(work: &CompactRun<'_>, judged: &[(Candidate, Verdict)]) -> Result<()> {
    let failed = work.failed("give back space");
    let shared = work.disk.shared();
    let chain = shared.chain();
    let top = chain.top();
    if judged.iter().any(|(_, verdict)| *verdict == Verdict::Free) {
        // The contents change, and children that were not found must not be used any more.
        shared.begin_writing().map_err(&failed)?;
        for (candidate, _) in judged.iter().filter(|(_, verdict)| *verdict == Verdict::Free) {
            let (start, end) = top.block_range(candidate.block, top.size_bytes);
            shared.mark_changed(start, end - start).map_err(&failed)?;
        }
    }
    let writer = work.writer()?;
    for (candidate, verdict) in judged {
        let change = match verdict {
            Verdict::Keep => continue,
            _ if !work.records_zeros() => Commit::Absent,
            Verdict::Free => Commit::Discard,
            Verdict::Zero => Commit::Zero,
        };
        shared.commit_blocking(top, candidate.block, change).map_err(&failed)?;
    }
    let generation = writer.freed_generation();
    writer.flush()?;
    writer.recycle_for_moves(generation);
    Ok(())
}

/// The volume in which a byte of the disk lies. Logical volumes come before the physical volume
/// that holds them.
fn volume_at(volumes: &mut [VolumeGain], at_bytes: u64) -> Option<&mut VolumeGain> {
    volumes.iter_mut().rev().find(|gain| {
        let mut extents = gain.volume.extents.iter();
        extents.any(|extent| {
            at_bytes.checked_sub(extent.disk_offset_bytes).is_some_and(|within| within < extent.len_bytes)
        })
    })
}
