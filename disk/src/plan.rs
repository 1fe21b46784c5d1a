//! What a write, a zeroing or a discard means for the top image: decided under the mutation lock, carried out by the queue without it.
//!
//! ```text
//!   plan_write, plan_zero ─▶ parts (what is to be stored, and where) ─▶ the engine stores them ─▶ settle: commit what they made true
//! ```
//!
//! What makes writes right:
//! - A block whose other sectors read as zeros is mapped when its space is reserved: fresh space reads as zeros too, so
//!   nobody can tell. The mapping becomes durable only in a flush, after the payload.
//! - A block whose other sectors are a parent's is mapped sector by sector, and only when the payload is in place; until
//!   then, readers see what was there before. Such a block is *busy* meanwhile, and its space is not given up.
//! - A whole block of zeros becomes metadata, or, where it reads as zeros already through the whole chain, nothing.
//!
//! Invariant: whatever a plan holds busy is named in its [`Pending`], and [`settle`] lets go of it, also when the plan broke off half-way.

use crate::{
    device::{Mutation, Shared},
    error::{self, DiskError},
    map::Owner,
};
use diskwright_image::{BlockState, Commit, DiskType, Format, ImageError, ImageWriter};
#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken};
use diskwright_store::{
    IoBuf,
    store::{FileRange, Zeroing},
};
use std::{io, sync::Arc};

/// Blocks whose states are decided under one hold of the mutation lock when a large range is zeroed.
const BLOCKS_PER_HOLD: u64 = 1024;

/// What must happen when a request's payload is in place.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    pub(crate) commits: Vec<(u64, Commit)>,
    pub(crate) initialised: Vec<u64>,
    pub(crate) flush_after: bool,
    pub(crate) is_sync: bool,
    /// It promises that something is durable, and no flush follows that would see to it.
    pub(crate) is_durable: bool,
}

/// A part of a write that waits for the lock to be released.
pub(crate) enum Part {
    Payload { file_offset_bytes: u64, start: usize, len: usize },
    Shared { file_offset_bytes: u64, bytes: Arc<IoBuf> },
    Zeroes { range: FileRange, how: Zeroing },
}

/// Applies what a finished payload made true, or takes back that it was on its way.
pub(crate) fn settle(shared: &Shared, pending: &Pending, result: io::Result<()>) -> io::Result<()> {
    let mut mutation = shared.lock();
    let mut outcome = result;
    for &(block, change) in &pending.commits {
        if outcome.is_ok() {
            outcome = commit(shared, &mut mutation, block, change);
        }
        mutation.release(block);
    }
    for &block in &pending.initialised {
        if outcome.is_ok()
            && let Ok(writer) = shared.writer()
        {
            writer.initialised(block);
        }
        mutation.release(block);
    }
    outcome
}

fn commit(shared: &Shared, mutation: &mut Mutation, block: u64, change: Commit) -> io::Result<()> {
    let state = shared.writer()?.commit(block, change)?;
    let block_bytes = shared.top().info().block_bytes;
    shared.fold(mutation).block_changed(block * block_bytes, block_bytes, state).map_err(error::to_io)
}

fn state_of(shared: &Shared, block: u64) -> io::Result<BlockState> {
    let mut state = [BlockState::Absent];
    shared.top().block_states(block, &mut state)?;
    Ok(state[0])
}

/// The stretch of `start..end` that lies in its first block: (block, block's first byte, end of the stretch, whether it is the whole block).
fn piece_of(shared: &Shared, start: u64, end: u64) -> (u64, u64, u64, bool) {
    let block_bytes = shared.top().info().block_bytes;
    let block = start / block_bytes;
    let block_start = block * block_bytes;
    let block_end = block_start.saturating_add(block_bytes).min(shared.geometry.size_bytes);
    let stop = end.min(block_end);
    (block, block_start, stop, start == block_start && stop == block_end)
}

/// The commit that says that `start..stop` of a block is right.
fn commit_for(shared: &Shared, block_start: u64, start: u64, stop: u64, whole: bool) -> Commit {
    if whole {
        return Commit::Whole;
    }
    let sector_bytes = u64::from(shared.geometry.logical_sector_bytes);
    let first = ((start - block_start) / sector_bytes) as u32;
    let count = ((stop - start) / sector_bytes) as u32;
    Commit::Sectors { first, count }
}

/// Reserves space for a block, and has its initial bitmap written with the payload where the format wants one.
fn reserve(
    writer: &dyn ImageWriter,
    block: u64,
    mutation: &mut Mutation,
    parts: &mut Vec<Part>,
    pending: &mut Pending,
) -> io::Result<u64> {
    let reservation = writer.reserve(block)?;
    if let Some((file_offset_bytes, bytes)) = reservation.init {
        parts.push(Part::Shared { file_offset_bytes, bytes });
        pending.initialised.push(block);
        mutation.hold(block);
    }
    Ok(reservation.offset_bytes)
}

/// Decides, block by block, where a write goes and what follows when it is there.
pub(crate) fn plan_write(
    shared: &Shared,
    offset_bytes: u64,
    len_bytes: u64,
    parts: &mut Vec<Part>,
    pending: &mut Pending,
) -> io::Result<()> {
    let mut mutation = shared.lock();
    shared.begin_writing(&mut mutation)?;
    shared.try_recycle(&mut mutation);
    let writer = shared.writer()?;
    let end = offset_bytes + len_bytes;
    let mut at = offset_bytes;
    while at < end {
        let (block, block_start, stop, whole) = piece_of(shared, at, end);
        let state = state_of(shared, block)?;
        let reads_as_zeros = state == BlockState::Zero || state == BlockState::Absent && shared.layers.len() == 1;
        let place = match state {
            BlockState::Data { offset_bytes, .. } => {
                // The next write here finds it without the lock, also on a disk that is never read. Damage elsewhere in the page is no
                // concern of this write: then the page is not folded, and the write goes on being planned. What cannot be read is told.
                if let Err(unread @ DiskError::Image(ImageError::Io { .. })) = shared.fold(&mut mutation).touch(at) {
                    return Err(error::to_io(unread));
                }
                offset_bytes
            }
            BlockState::Damaged => return Err(error::damage(&**shared.top(), at)),
            BlockState::Packed => {
                let what = "a write to a compressed block";
                return Err(io::Error::new(io::ErrorKind::Unsupported, what));
            }
            BlockState::Zero | BlockState::Absent | BlockState::Partial { .. } => {
                let place = reserve(writer, block, &mut mutation, parts, pending)?;
                if reads_as_zeros {
                    commit(shared, &mut mutation, block, Commit::Whole)?;
                } else {
                    let change = commit_for(shared, block_start, at, stop, whole);
                    #[cfg(feature = "shuttle")]
                    if is_broken(Rule::MappedAfterPayload) {
                        commit(shared, &mut mutation, block, change)?;
                    }
                    pending.commits.push((block, change));
                    mutation.hold(block);
                }
                place
            }
        };
        parts.push(Part::Payload {
            file_offset_bytes: place + (at - block_start),
            start: (at - offset_bytes) as usize,
            len: (stop - at) as usize,
        });
        at = stop;
    }
    Ok(())
}

/// Decides how a range becomes zero: as metadata, as zeros in the file, or not at all because it is zero already.
pub(crate) fn plan_zero(
    shared: &Shared,
    offset_bytes: u64,
    len_bytes: u64,
    discard: bool,
    parts: &mut Vec<Part>,
    pending: &mut Pending,
) -> io::Result<()> {
    let info = shared.top().info();
    // A fixed image promises its space, so a discard in it only zeroes; a raw file promises nothing.
    let promises_space = info.disk_type == DiskType::Fixed && info.format != Format::Raw;
    let how = if discard && !promises_space { Zeroing::Deallocate } else { Zeroing::Keep };
    let whole_commit = if discard { Commit::Discard } else { Commit::Zero };
    let end = offset_bytes + len_bytes;
    let hold_bytes = info.block_bytes.saturating_mul(BLOCKS_PER_HOLD);
    let mut at = offset_bytes;
    let mut runs = Vec::new();
    while at < end {
        let mut mutation = shared.lock();
        shared.begin_writing(&mut mutation)?;
        let hold_end = at.saturating_add(hold_bytes).min(end);
        runs.clear();
        shared.fold(&mut mutation).walk(at, hold_end, &mut runs).map_err(error::to_io)?;
        let mut data = runs.iter().filter(|run| matches!(run.owner, Owner::Data { .. })).peekable();
        while at < hold_end {
            let (block, block_start, stop, whole) = piece_of(shared, at, hold_end);
            let start = std::mem::replace(&mut at, stop);
            let busy = mutation.busy.contains_key(&block);
            while data.next_if(|run| run.start_bytes + run.len_bytes <= start).is_some() {}
            let reads_as_zeros = data.peek().is_none_or(|run| run.start_bytes >= stop);
            let writer = shared.writer()?;
            if !busy && reads_as_zeros {
                // Zeros that others may show otherwise (a block that was unmapped with its contents) become zeros by the image's word, all of the
                // block: nothing else is in it. What is so already is left alone by the image.
                if writer.can_store_zero() && state_of(shared, block)? == BlockState::Zero {
                    commit(shared, &mut mutation, block, whole_commit)?;
                }
                continue;
            }
            if whole && !busy && writer.can_store_zero() {
                commit(shared, &mut mutation, block, whole_commit)?;
                continue;
            }
            let place = match state_of(shared, block)? {
                BlockState::Data { offset_bytes, .. } => offset_bytes,
                BlockState::Damaged => return Err(error::damage(&**shared.top(), start)),
                BlockState::Packed => {
                    let what = "zeros over part of a compressed block";
                    return Err(io::Error::new(io::ErrorKind::Unsupported, what));
                }
                BlockState::Absent | BlockState::Zero | BlockState::Partial { .. } => {
                    let place = reserve(writer, block, &mut mutation, parts, pending)?;
                    pending.commits.push((block, commit_for(shared, block_start, start, stop, whole)));
                    mutation.hold(block);
                    place
                }
            };
            let range = FileRange { offset_bytes: place + (start - block_start), len_bytes: stop - start };
            parts.push(Part::Zeroes { range, how });
        }
    }
    Ok(())
}
