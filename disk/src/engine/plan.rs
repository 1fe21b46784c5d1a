//! Plans a request: decides under the mutation lock, from memory alone, what to do for it. The plan
//! is carried out without the lock.
//!
//! ```text
//!   plan_read, plan_write, plan_zero ─▶ Ready: parts for the engine ─▶ engine ─▶ settle: commits
//!                                    ─▶ Work:  I/O is needed first; then planned again
//!                                    ─▶ Busy:  a block is claimed; planned again when it is free
//! ```
//!
//! A write goes to the top image. While the top's parent absorbs it (`absorb.rs`), a write goes to
//! the parent where the top has no block. A request that touches both is planned in stages, one
//! image each.
//!
//! How writes stay correct:
//! - A block whose other sectors read as zeros is mapped when its space is reserved. Fresh space
//!   reads as zeros too, so no reader sees a difference. The mapping becomes durable only in a
//!   flush, after the payload.
//! - A block whose other sectors read the parent's data is mapped sector by sector, and only when
//!   the payload is in place. Until then, readers see the previous data. Meanwhile the block is
//!   *shared*, and its space is not freed: a discard of the whole block waits.
//! - If the format cannot record which sectors have data, the block is first filled from the layers
//!   below (copy-up), under exclusion.
//! - Bytes that a snapshot in the image's file has too are not overwritten. They have a store id of
//!   their own, so a plan takes them for another layer's data: the block is filled in the same way.
//! - A whole block of zeros becomes metadata. If no layer has data there, nothing is done.
//!
//! Invariant: every block that a plan shares is listed in its [`Pending`], and
//! [`Shared::settle`](crate::engine::shared::Shared::settle) releases it, even if the plan failed
//! half-way or a commit panics. A plan of a write that is not `Ready` shares no block. So a resting
//! request holds no block, and cannot wait for itself or for a request that waits for it. Such a
//! plan has committed nothing except whole blocks of zeros that were requested. Its reservations
//! stay with the image, which returns the same space again.

mod draft;
mod zeroing;

use crate::engine::{
    chain::{Chain, Member},
    claims,
    map::{Owner, Run, SourceId, push_joined},
    mutation::Mutation,
    work::{Decoded, Work},
};
use diskwright_image::Commit;
#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken};
use draft::push_part;
pub(crate) use draft::{Draft, Part, Pending, PlanResult};
use std::{io, ops::Range, sync::Arc};
pub(crate) use zeroing::plan_zero;

/// Appends the runs of `start..end`, in order and without gaps. Returns the work needed if a page
/// or unit is not in memory.
pub(crate) fn owned_runs(mutation: &Mutation, start: u64, end: u64, out: &mut Vec<Run>) -> Option<Work> {
    let map = &*mutation.chain.map;
    let mut at = start;
    while at < end {
        let unit = map.unit_of(at);
        let (unit_start, unit_end) = map.unit_range(unit);
        let stop = unit_end.min(end);
        match map.word(unit) {
            None => return Some(Work::Fold { page: map.page_of(at) }),
            Some(Owner::Lazy { .. }) => match mutation.mixed.get(unit) {
                None => return Some(Work::Decide { unit }),
                Some(runs) => runs.iter().filter_map(|run| clip(run, at, stop)).for_each(|run| push_joined(out, run)),
            },
            Some(owner) => {
                let owner = owner.advanced(at - unit_start);
                push_joined(out, Run { start_bytes: at, len_bytes: stop - at, owner });
            }
        }
        at = stop;
    }
    None
}

/// The part of a run that lies in `start..end`; `None` if there is none.
pub(crate) fn clip(run: &Run, start: u64, end: u64) -> Option<Run> {
    let (from, to) = (run.start_bytes.max(start), run.end_bytes().min(end));
    (from < to).then(|| Run {
        start_bytes: from,
        len_bytes: to - from,
        owner: run.owner.advanced(from - run.start_bytes),
    })
}

/// Plans a read: finds its runs. All compressed blocks among them must be decompressed first.
pub(crate) fn plan_read(mutation: &Mutation, start: u64, end: u64, draft: &mut Draft) -> PlanResult {
    draft.runs.clear();
    if let Some(work) = owned_runs(mutation, start, end, &mut draft.runs) {
        return PlanResult::Work(work);
    }
    for run in &draft.runs {
        let Owner::Compressed { layer } = run.owner else { continue };
        let Some(member) = mutation.chain.member(layer) else { continue };
        let block = run.start_bytes / member.block_bytes;
        let known =
            draft.decoded.iter().any(|(of, number, cell)| (*of, *number) == (layer, block) && cell.get().is_some());
        if !known {
            let into = Decoded::default();
            draft.decoded.push((layer, block, Arc::clone(&into)));
            return PlanResult::Work(Work::Decompress { layer, block, into });
        }
    }
    PlanResult::Ready
}

/// The image that a write of `start..end` goes to, and the end of the range for which that holds.
/// That is the end of a block of the top, if another image takes what follows.
fn taker<'a>(mutation: &Mutation, chain: &'a Chain, start: u64, end: u64) -> (&'a Member, u64) {
    let (top, parent) = match chain.written() {
        [top, parent] => (top, parent),
        _ => return (chain.top(), end),
    };
    let Some((_, left)) = &mutation.left else { return (top, end) };
    let is_in_top = |at: u64| left.contains(at / top.block_bytes);
    let block_end = |at: u64| top.block_range(at / top.block_bytes, chain.geometry.size_bytes).1;
    let (in_top, mut stop) = (is_in_top(start), block_end(start));
    while stop < end && is_in_top(stop) == in_top {
        stop = block_end(stop);
    }
    (if in_top { top } else { parent }, stop.min(end))
}

/// A block that is excluded from changes, and that a piece in `image` would change. That may be a
/// block of the top that has nothing: it is held while the parent's data around it is completed.
fn excluded(mutation: &Mutation, chain: &Chain, image: &Member, piece: &Piece) -> Option<claims::Key> {
    let key = (image.id, piece.block);
    let top = chain.top();
    let above =
        if image.id == top.id { 0..0 } else { piece.start / top.block_bytes..piece.stop.div_ceil(top.block_bytes) };
    let keys = std::iter::once(key).chain(above.map(|block| (top.id, block)));
    keys.into_iter().find(|&key| mutation.claims.is_excluded(key))
}

/// The first unit of a piece whose owner must be read from the tables. Commits of an image below
/// the top leave such units.
fn undecided(mutation: &Mutation, chain: &Chain, image: &Member, piece: &Piece) -> Option<Work> {
    if image.id == chain.top().id {
        return None;
    }
    let map = &*chain.map;
    (map.unit_of(piece.start)..=map.unit_of(piece.stop - 1)).find_map(|unit| match map.word(unit) {
        Some(Owner::Lazy { .. }) if mutation.mixed.get(unit).is_none() => Some(Work::Decide { unit }),
        _ => None,
    })
}

/// The part of a range that lies in its first block of an image.
#[derive(Debug, Clone, Copy)]
struct Piece {
    block: u64,
    block_start: u64,
    start: u64,
    stop: u64,
    /// Whether the piece is the whole block, up to the end of the disk.
    whole: bool,
}

impl Piece {
    fn first_of(chain: &Chain, image: &Member, start: u64, end: u64) -> Self {
        let block = start / image.block_bytes;
        let (block_start, block_end) = image.block_range(block, chain.geometry.size_bytes);
        let stop = end.min(block_end);
        Self { block, block_start, start, stop, whole: start == block_start && stop == block_end }
    }

    /// The commit for the piece, when its data is in place.
    fn commit(&self, chain: &Chain) -> Commit {
        if self.whole {
            return Commit::Whole;
        }
        let sector_bytes = u64::from(chain.geometry.logical_sector_bytes);
        let first = ((self.start - self.block_start) / sector_bytes) as u32;
        let count = ((self.stop - self.start) / sector_bytes) as u32;
        Commit::Sectors { first, count }
    }
}

/// The owner of a piece.
enum PieceOwner {
    /// The piece is in the image, at this offset, and is overwritten in place.
    Own { source: SourceId, offset_bytes: u64 },
    /// The whole block reads as zeros: the image says so, or no layer has it.
    Zero,
    /// Any other case, with the first owner.
    Other(Owner),
    /// A page is not in memory.
    Missing(Work),
}

/// Looks a piece up in the map, where no layer above `image` has any of it.
fn look_up(chain: &Chain, image: &Member, piece: &Piece) -> PieceOwner {
    let map = &*chain.map;
    let mut first = None;
    let (from, to) = (map.unit_of(piece.start), map.unit_of(piece.stop - 1));
    for unit in from..=to {
        let Some(word) = map.word(unit) else {
            return PieceOwner::Missing(Work::Fold { page: map.page_of(map.unit_range(unit).0) });
        };
        let owner = word.advanced(piece.start.saturating_sub(map.unit_range(unit).0));
        match (owner, first) {
            (Owner::Data { source, .. }, None) if image.overwrites(source) => first = Some(owner),
            // All units of a block in the image are contiguous in the file.
            (Owner::Data { source, offset_bytes }, Some(Owner::Data { offset_bytes: first_offset, .. }))
                if image.overwrites(source)
                    && offset_bytes == first_offset + (map.unit_range(unit).0.max(piece.start) - piece.start) => {}
            (Owner::Zero { layer }, None) if layer == image.id => return PieceOwner::Zero,
            (Owner::Absent, None) if chain.is_lowest(image.id) => return PieceOwner::Zero,
            (other, _) => return PieceOwner::Other(other),
        }
    }
    match first {
        Some(Owner::Data { source, offset_bytes }) => PieceOwner::Own { source, offset_bytes },
        other => PieceOwner::Other(other.unwrap_or(Owner::Absent)),
    }
}

/// The step that must precede the write of a piece if its block needs a copy-up; `None` if it needs
/// none.
fn copy_up_first(
    mutation: &mut Mutation,
    chain: &Chain,
    image: &Member,
    piece: &Piece,
    owner: Owner,
) -> io::Result<Option<PlanResult>> {
    let is_compressed = matches!(owner, Owner::Compressed { layer } if layer == image.id);
    if piece.whole || !is_compressed && image.writer()?.tracks_sectors() {
        return Ok(None);
    }
    if let Owner::Lazy { .. } = owner {
        let unit = chain.map.unit_of(piece.start);
        // The bitmap may turn out to be full. Then the word changes, and no copy-up is needed.
        if mutation.mixed.get(unit).is_none() {
            return Ok(Some(PlanResult::Work(Work::Decide { unit })));
        }
    }
    let copy_up = (image.id, claims::COPY_UP);
    if mutation.claims.is_excluded(copy_up) {
        return Ok(Some(PlanResult::Busy(copy_up)));
    }
    let key = (image.id, piece.block);
    Ok(Some(if mutation.claims.exclude(key) {
        PlanResult::Work(Work::CopyUp { layer: image.id, block: piece.block })
    } else {
        PlanResult::Busy(key)
    }))
}

/// Reserves space for a piece. The inner `Err` is the step that must come first.
fn reserve(
    mutation: &mut Mutation,
    image: &Member,
    piece: &Piece,
    last_block: u64,
    draft: &mut Draft,
) -> io::Result<Result<(SourceId, u64), PlanResult>> {
    let Some(reservation) = image.writer()?.reserve(piece.block)? else {
        return Ok(Err(PlanResult::Work(Work::Prepare { layer: image.id, blocks: piece.block..last_block + 1 })));
    };
    let source = image.source(reservation.store);
    if let Some((file_offset_bytes, bytes)) = reservation.init {
        draft.parts.push(Part::Shared { source, file_offset_bytes, bytes });
        draft.pending.initialised.push(piece.block);
        mutation.claims.share((image.id, piece.block));
    }
    Ok(Ok((source, reservation.offset_bytes)))
}

/// Plans a write, block by block: where the payload goes and what is committed afterwards. Plans
/// the part from `at` that goes to one image, and advances `at`. The payload begins with that of
/// `start`.
pub(crate) fn plan_write(
    mutation: &mut Mutation,
    start: u64,
    at: &mut u64,
    end: u64,
    draft: &mut Draft,
) -> io::Result<PlanResult> {
    let chain = Arc::clone(&mutation.chain);
    let (image, stop) = taker(mutation, &chain, *at, end);
    let next = plan_blocks(mutation, &chain, image, start, *at..stop, draft)?;
    if matches!(next, PlanResult::Ready) {
        *at = stop;
    } else {
        draft.start_over(mutation);
    }
    Ok(next)
}

fn plan_blocks(
    mutation: &mut Mutation,
    chain: &Chain,
    image: &Member,
    start: u64,
    range: Range<u64>,
    draft: &mut Draft,
) -> io::Result<PlanResult> {
    image.writer()?;
    if !image.has_begun_writing() {
        return Ok(PlanResult::Work(Work::Begin { layer: image.id }));
    }
    draft.is_for(mutation, image);
    let Range { start: mut at, end } = range;
    let last_block = (end - 1) / image.block_bytes;
    // First check all blocks for missing state. Nothing is committed before everything is in
    // memory.
    let mut places = Vec::new();
    while at < end {
        let piece = Piece::first_of(chain, image, at, end);
        at = piece.stop;
        if let Some(key) = excluded(mutation, chain, image, &piece) {
            return Ok(PlanResult::Busy(key));
        }
        if let Some(work) = undecided(mutation, chain, image, &piece) {
            return Ok(PlanResult::Work(work));
        }
        let found = look_up(chain, image, &piece);
        let reserved = match &found {
            PieceOwner::Missing(_) => None,
            PieceOwner::Own { source, offset_bytes } => Some((*source, *offset_bytes)),
            PieceOwner::Other(Owner::Damaged { layer }) if *layer == image.id => {
                return Ok(PlanResult::Work(Work::ExplainDamage { layer: *layer, offset_bytes: piece.start }));
            }
            PieceOwner::Other(owner) => match copy_up_first(mutation, chain, image, &piece, *owner)? {
                Some(next) => return Ok(next),
                None => None,
            },
            PieceOwner::Zero => None,
        };
        let place = match (found, reserved) {
            (PieceOwner::Missing(work), _) => return Ok(PlanResult::Work(work)),
            (_, Some(place)) => (place, None),
            (found, None) => match reserve(mutation, image, &piece, last_block, draft)? {
                Err(next) => return Ok(next),
                Ok((source, offset_bytes)) => {
                    let at_once = matches!(found, PieceOwner::Zero);
                    ((source, offset_bytes + (piece.start - piece.block_start)), Some(at_once))
                }
            },
        };
        places.push((piece, place));
    }
    for (piece, ((source, file_offset_bytes), mapping)) in places {
        let change = piece.commit(chain);
        match mapping {
            None => {}
            Some(true) if mutation.commit(image, piece.block, Commit::Whole)?.is_some() => {}
            Some(true) => {
                return Ok(PlanResult::Work(Work::Prepare { layer: image.id, blocks: piece.block..last_block + 1 }));
            }
            Some(false) => {
                #[cfg(feature = "shuttle")]
                if is_broken(Rule::MappedAfterPayload) {
                    mutation.commit(image, piece.block, change)?;
                }
                draft.pending.commits.push((piece.block, change));
                mutation.claims.share((image.id, piece.block));
            }
        }
        let (start, len) = ((piece.start - start) as usize, (piece.stop - piece.start) as usize);
        push_part(&mut draft.parts, Part::Payload { source, file_offset_bytes, start, len });
    }
    Ok(PlanResult::Ready)
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests;
