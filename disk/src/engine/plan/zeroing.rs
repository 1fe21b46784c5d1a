//! Plans the zeroing or the discard of a range: as metadata where the format can record zeros, else
//! as zeros in the file.

use super::{
    Draft, Part, Piece, PieceOwner, PlanResult, copy_up_first, draft::push_part, excluded, look_up, owned_runs,
    reserve, taker,
};
use crate::engine::{
    chain::{Chain, Member},
    map::Owner,
    mutation::Mutation,
    work::Work,
};
use diskwright_image::{Commit, DiskType};
use diskwright_store::store::{FileRange, Zeroing};
use std::{io, sync::Arc};

/// Number of blocks planned under one hold of the mutation lock when a large range is zeroed.
#[cfg(not(feature = "shuttle"))]
const BLOCKS_PER_HOLD: u64 = 1024;
/// Small in tests under the `shuttle` scheduler, so that small disks have several stages.
#[cfg(feature = "shuttle")]
const BLOCKS_PER_HOLD: u64 = 2;

/// Plans the zeroing of a range: as metadata, as zeros in the file, or not at all if it reads as
/// zeros already. Starts at `at`, handles at most [`BLOCKS_PER_HOLD`] blocks of one image, and
/// advances `at`.
pub(crate) fn plan_zero(
    mutation: &mut Mutation,
    at: &mut u64,
    end: u64,
    discard: bool,
    draft: &mut Draft,
) -> io::Result<PlanResult> {
    let chain = Arc::clone(&mutation.chain);
    let most = |image: &Member| at.saturating_add(image.block_bytes.saturating_mul(BLOCKS_PER_HOLD)).min(end);
    let (image, stop) = taker(mutation, &chain, *at, most(chain.top()));
    let hold_end = most(image).min(stop);
    let writer = image.writer()?;
    if !image.has_begun_writing() {
        return Ok(PlanResult::Work(Work::Begin { layer: image.id }));
    }
    draft.is_for(mutation, image);
    let info = image.image.info();
    // A discard in a fixed image must keep its space, so it only zeroes. A discard in a raw file
    // deallocates.
    let promises_space = info.disk_type == DiskType::Fixed && info.format.driver().promises_space;
    let how = if discard && !promises_space { Zeroing::Deallocate } else { Zeroing::Keep };
    let whole_commit = if discard { Commit::Discard } else { Commit::Zero };
    let last_block = (hold_end - 1) / image.block_bytes;
    let prepare = |block: u64| Ok(PlanResult::Work(Work::Prepare { layer: image.id, blocks: block..last_block + 1 }));
    let mut runs = Vec::new();
    while *at < hold_end {
        let piece = Piece::first_of(&chain, image, *at, hold_end);
        let key = (image.id, piece.block);
        if let Some(key) = excluded(mutation, &chain, image, &piece) {
            return Ok(PlanResult::Busy(key));
        }
        let shared = mutation.claims.is_shared(key);
        if piece.whole && writer.can_store_zero() {
            if shared {
                return Ok(PlanResult::Busy(key));
            }
            match zero_words(&chain, image, &piece) {
                ZeroState::Missing(work) => return Ok(PlanResult::Work(work)),
                // Records the whole block as ZERO. This also covers blocks whose zeros other
                // programs may read differently, such as UNMAPPED blocks with a file offset. The
                // image ignores the commit if the block is recorded so already.
                ZeroState::Zero { by_image: true } | ZeroState::Other => {
                    if mutation.commit(image, piece.block, whole_commit)?.is_none() {
                        return prepare(piece.block);
                    }
                }
                ZeroState::Zero { by_image: false } => {}
            }
            *at = piece.stop;
            continue;
        }
        match zero_words(&chain, image, &piece) {
            ZeroState::Missing(work) => return Ok(PlanResult::Work(work)),
            ZeroState::Zero { by_image } if !shared => {
                if by_image && writer.can_store_zero() && mutation.commit(image, piece.block, whole_commit)?.is_none() {
                    return prepare(piece.block);
                }
                *at = piece.stop;
                continue;
            }
            _ => {}
        }
        runs.clear();
        if let Some(work) = owned_runs(mutation, piece.start, piece.stop, &mut runs) {
            return Ok(PlanResult::Work(work));
        }
        if !shared && runs.iter().all(|run| run.owner.reads_as_zeros()) {
            *at = piece.stop;
            continue;
        }
        let (source, offset_bytes) = match look_up(&chain, image, &piece) {
            PieceOwner::Missing(work) => return Ok(PlanResult::Work(work)),
            PieceOwner::Own { source, offset_bytes } => (source, offset_bytes),
            PieceOwner::Other(Owner::Damaged { layer }) if layer == image.id => {
                return Ok(PlanResult::Work(Work::ExplainDamage { layer, offset_bytes: piece.start }));
            }
            found => {
                if let PieceOwner::Other(owner) = found
                    && let Some(next) = copy_up_first(mutation, &chain, image, &piece, owner)?
                {
                    return Ok(next);
                }
                let (source, offset_bytes) = match reserve(mutation, image, &piece, last_block, draft)? {
                    Err(next) => return Ok(next),
                    Ok(place) => place,
                };
                draft.pending.commits.push((piece.block, piece.commit(&chain)));
                mutation.claims.share(key);
                (source, offset_bytes + (piece.start - piece.block_start))
            }
        };
        let range = FileRange { offset_bytes, len_bytes: piece.stop - piece.start };
        push_part(&mut draft.parts, Part::Zeroes { source, range, how });
        *at = piece.stop;
    }
    Ok(PlanResult::Ready)
}

/// Whether the words of a piece say zeros.
enum ZeroState {
    /// All units read as zeros. `by_image`: the image says so for at least one of them.
    Zero {
        by_image: bool,
    },
    Other,
    Missing(Work),
}

fn zero_words(chain: &Chain, image: &Member, piece: &Piece) -> ZeroState {
    let map = &*chain.map;
    let mut by_image = false;
    for unit in map.unit_of(piece.start)..=map.unit_of(piece.stop - 1) {
        match map.word(unit) {
            None => return ZeroState::Missing(Work::Fold { page: map.page_of(map.unit_range(unit).0) }),
            Some(Owner::Zero { layer }) => by_image |= layer == image.id,
            Some(Owner::Absent) => {}
            Some(_) => return ZeroState::Other,
        }
    }
    ZeroState::Zero { by_image }
}
