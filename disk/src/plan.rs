//! What a request means for the chain: decided under the mutation lock, from memory alone, and
//! carried out without it.
//!
//! ```text
//!   plan_read, plan_write, plan_zero ─▶ Ready: parts (what is to be moved, and where) ─▶ the engine ─▶ settle: commits
//!                                    ─▶ Work:  something must be read or prepared first; then the plan is made again
//!                                    ─▶ Busy:  a block is taken; the plan is made again when it is free
//! ```
//!
//! What makes writes right:
//! - A block whose other sectors read as zeros is mapped when its space is reserved: fresh space
//!   reads as zeros too, so nobody can tell. The mapping becomes durable only in a flush, after the
//!   payload.
//! - A block whose other sectors are a parent's is mapped sector by sector, and only when the
//!   payload is in place; until then, readers see what was there before. Such a block is *shared*
//!   meanwhile, and its space is not given up: a discard of the whole block waits.
//! - Where the format cannot say which sectors are its own, the block is filled from below first
//!   (copy-up), alone.
//! - A whole block of zeros becomes metadata, or, where it reads as zeros already through the whole
//!   chain, nothing.
//!
//! Invariant: whatever a plan shares is named in its [`Pending`], and
//! [`Shared::settle`](crate::shared::Shared::settle) lets go of it, also when the plan failed
//! half-way, and when a commit panics. A plan of a write that is not `Ready` shares nothing: a
//! request that rests holds no block, so it can wait neither for itself nor for one that waits for
//! it. It has committed nothing but whole blocks of zeros that were asked for, and its reservations
//! stay with the image, which gives the same place again.

use crate::{
    chain::{Chain, Member},
    claims,
    map::{LayerId, Owner, Run, SourceId, push_joined},
    mutation::Mutation,
    work::{Decoded, Work},
};
use diskwright_image::{Commit, DiskType};
#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken};
use diskwright_store::{
    IoBuf,
    store::{FileRange, Zeroing},
};
use std::{io, sync::Arc};

/// Blocks whose states are decided under one hold of the mutation lock when a large range is
/// zeroed.
#[cfg(not(feature = "shuttle"))]
const BLOCKS_PER_HOLD: u64 = 1024;
/// So few under a scheduler of tests that small disks have stages.
#[cfg(feature = "shuttle")]
const BLOCKS_PER_HOLD: u64 = 2;

/// What follows.
#[derive(Debug)]
pub(crate) enum Next {
    /// The parts can be carried out.
    Ready,
    /// This must be done first.
    Work(Work),
    /// This block must be free first.
    Busy(claims::Key),
}

/// What must happen when a request's payload is in place.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    /// The image that the commits are for.
    pub(crate) member: Option<Member>,
    pub(crate) commits: Vec<(u64, Commit)>,
    pub(crate) initialised: Vec<u64>,
    pub(crate) flush_after: bool,
    pub(crate) is_sync: bool,
    /// It promises that something is durable, and no flush follows that would see to it.
    pub(crate) is_durable: bool,
}

/// A part of a write that waits for the lock to be released.
#[derive(Debug)]
pub(crate) enum Part {
    Payload { source: SourceId, file_offset_bytes: u64, start: usize, len: usize },
    Shared { source: SourceId, file_offset_bytes: u64, bytes: Arc<IoBuf> },
    Zeroes { source: SourceId, range: FileRange, how: Zeroing },
}

/// Appends a part, or makes the last part longer where the two are one stretch of one file: small
/// blocks that lie one behind the other are written at once.
fn push_part(parts: &mut Vec<Part>, part: Part) {
    match (parts.last_mut(), &part) {
        (
            Some(Part::Payload { source, file_offset_bytes, start, len }),
            Part::Payload { source: next, file_offset_bytes: next_offset, start: next_start, len: more },
        ) if source == next && *file_offset_bytes + *len as u64 == *next_offset && *start + *len == *next_start => {
            *len += more;
        }
        (Some(Part::Zeroes { source, range, how }), Part::Zeroes { source: next, range: more, how: next_how })
            if source == next && how == next_how && range.offset_bytes + range.len_bytes == more.offset_bytes =>
        {
            range.len_bytes += more.len_bytes;
        }
        _ => parts.push(part),
    }
}

/// What has been planned of a request so far.
#[derive(Debug, Default)]
pub(crate) struct Draft {
    pub(crate) parts: Vec<Part>,
    pub(crate) pending: Pending,
    /// Of a read: who owns what.
    pub(crate) runs: Vec<Run>,
    /// Of a read: packed blocks, decoded or to be.
    pub(crate) decoded: Vec<(LayerId, u64, Decoded)>,
}

impl Draft {
    /// Prepares for a plan whose commits are for `top`. What was reserved in another image, which
    /// was the top when the request was planned before, is left to that image.
    fn is_for(&mut self, mutation: &mut Mutation, top: &Member) {
        if self.pending.member.as_ref().is_some_and(|member| member.id == top.id) {
            return;
        }
        self.start_over(mutation);
        self.pending.member = Some(top.clone());
    }

    /// Forgets the plan, and lets go of all blocks.
    fn start_over(&mut self, mutation: &mut Mutation) {
        self.parts.clear();
        let Pending { member: Some(member), commits, initialised, .. } = &mut self.pending else { return };
        for block in commits.drain(..).map(|(block, _)| block).chain(initialised.drain(..)) {
            mutation.claims.release((member.id, block));
        }
    }
}

/// Appends the runs of `start..end`, in order and without gaps. Returns what is missing, if
/// anything is.
pub(crate) fn owned_runs(mutation: &Mutation, start: u64, end: u64, out: &mut Vec<Run>) -> Option<Work> {
    let map = &*mutation.chain.map;
    let mut at = start;
    while at < end {
        let unit = map.unit_of(at);
        let (unit_start, unit_end) = map.unit_range(unit);
        let stop = unit_end.min(end);
        match map.word(unit) {
            None => return Some(Work::Fold { page: map.page_of(at) }),
            Some(Owner::Lazy { layer }) => match mutation.mixed.get(unit) {
                None => return Some(Work::Decide { unit, layer }),
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

/// The part of a run that lies in `start..end`, if any.
pub(crate) fn clip(run: &Run, start: u64, end: u64) -> Option<Run> {
    let (from, to) = (run.start_bytes.max(start), run.end_bytes().min(end));
    (from < to).then(|| Run {
        start_bytes: from,
        len_bytes: to - from,
        owner: run.owner.advanced(from - run.start_bytes),
    })
}

/// Finds the runs that a read is made of, with all packed blocks among them decoded.
pub(crate) fn plan_read(mutation: &Mutation, start: u64, end: u64, draft: &mut Draft) -> Next {
    draft.runs.clear();
    if let Some(work) = owned_runs(mutation, start, end, &mut draft.runs) {
        return Next::Work(work);
    }
    for run in &draft.runs {
        let Owner::Packed { layer } = run.owner else { continue };
        let Some(member) = mutation.chain.member(layer) else { continue };
        let block = run.start_bytes / member.block_bytes;
        let known =
            draft.decoded.iter().any(|(of, number, cell)| (*of, *number) == (layer, block) && cell.get().is_some());
        if !known {
            let into = Decoded::default();
            draft.decoded.push((layer, block, Arc::clone(&into)));
            return Next::Work(Work::Unpack { layer, block, into });
        }
    }
    Next::Ready
}

/// The stretch of a range that lies in its first block of the top image.
#[derive(Debug, Clone, Copy)]
struct Piece {
    block: u64,
    block_start: u64,
    start: u64,
    stop: u64,
    /// Whether it is all of the block that the disk has.
    whole: bool,
}

impl Piece {
    fn first_of(chain: &Chain, start: u64, end: u64) -> Self {
        let block = start / chain.top().block_bytes;
        let (block_start, block_end) = chain.top().block_range(block, chain.geometry.size_bytes);
        let stop = end.min(block_end);
        Self { block, block_start, start, stop, whole: start == block_start && stop == block_end }
    }

    /// The commit that says that the stretch is right.
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

/// What the map says of a stretch of one block.
enum Found {
    /// The bytes are in the top image, from here on.
    Own { source: SourceId, offset_bytes: u64 },
    /// The stretch and the rest of its block read as zeros by the top's word, or because no layer
    /// knows them.
    Zero,
    /// Anything else: the first owner.
    Other(Owner),
    /// A page is missing.
    Missing(Work),
}

fn look(chain: &Chain, piece: &Piece) -> Found {
    let map = &*chain.map;
    let top = chain.top();
    let mut first = None;
    let (from, to) = (map.unit_of(piece.start), map.unit_of(piece.stop - 1));
    for unit in from..=to {
        let Some(word) = map.word(unit) else {
            return Found::Missing(Work::Fold { page: map.page_of(map.unit_range(unit).0) });
        };
        let owner = word.advanced(piece.start.saturating_sub(map.unit_range(unit).0));
        match (owner, first) {
            (Owner::Data { source, .. }, None) if top.has_source(source) => first = Some(owner),
            // The units of a block that is all the top's follow each other in the file.
            (Owner::Data { source, offset_bytes }, Some(Owner::Data { offset_bytes: first_offset, .. }))
                if top.has_source(source)
                    && offset_bytes == first_offset + (map.unit_range(unit).0.max(piece.start) - piece.start) => {}
            (Owner::Zero { layer }, None) if layer == top.id => return Found::Zero,
            (Owner::Absent, None) if chain.members().len() == 1 => return Found::Zero,
            (other, _) => return Found::Other(other),
        }
    }
    match first {
        Some(Owner::Data { source, offset_bytes }) => Found::Own { source, offset_bytes },
        other => Found::Other(other.unwrap_or(Owner::Absent)),
    }
}

/// Whether the rest of a block must be the top's before a stretch of it can be written, and what
/// that takes. `None` says that it need not.
fn fill_first(mutation: &mut Mutation, chain: &Chain, piece: &Piece, owner: Owner) -> io::Result<Option<Next>> {
    let top = chain.top();
    let packed = matches!(owner, Owner::Packed { layer } if layer == top.id);
    if piece.whole || !packed && top.writer()?.tracks_sectors() {
        return Ok(None);
    }
    if let Owner::Lazy { layer } = owner {
        let unit = chain.map.unit_of(piece.start);
        // The bitmap may turn out to be full: then the word says so, and nothing is to be filled.
        if mutation.mixed.get(unit).is_none() {
            return Ok(Some(Next::Work(Work::Decide { unit, layer })));
        }
    }
    let filling = (top.id, claims::FILLING);
    if mutation.claims.is_excluded(filling) {
        return Ok(Some(Next::Busy(filling)));
    }
    let key = (top.id, piece.block);
    Ok(Some(if mutation.claims.exclude(key) {
        Next::Work(Work::CopyUp { block: piece.block })
    } else {
        Next::Busy(key)
    }))
}

/// Reserves space for a stretch of a block. `Err(Next)` in `Ok` says what must come first.
fn reserve(
    mutation: &mut Mutation,
    top: &Member,
    piece: &Piece,
    last_block: u64,
    draft: &mut Draft,
) -> io::Result<Result<(SourceId, u64), Next>> {
    let Some(reservation) = top.writer()?.reserve(piece.block)? else {
        return Ok(Err(Next::Work(Work::Prepare { blocks: piece.block..last_block + 1 })));
    };
    let source = top.source(reservation.store);
    if let Some((file_offset_bytes, bytes)) = reservation.init {
        draft.parts.push(Part::Shared { source, file_offset_bytes, bytes });
        draft.pending.initialised.push(piece.block);
        mutation.claims.share((top.id, piece.block));
    }
    Ok(Ok((source, reservation.offset_bytes)))
}

/// Decides, block by block, where a write goes and what follows when it is there.
pub(crate) fn plan_write(mutation: &mut Mutation, start: u64, end: u64, draft: &mut Draft) -> io::Result<Next> {
    let next = plan_blocks(mutation, start, end, draft)?;
    if !matches!(next, Next::Ready) {
        draft.start_over(mutation);
    }
    Ok(next)
}

fn plan_blocks(mutation: &mut Mutation, start: u64, end: u64, draft: &mut Draft) -> io::Result<Next> {
    let chain = Arc::clone(&mutation.chain);
    let top = chain.top();
    top.writer()?;
    if !top.has_begun_writing() {
        return Ok(Next::Work(Work::Begin));
    }
    draft.is_for(mutation, top);
    let last_block = (end - 1) / top.block_bytes;
    // First everything that may be missing; nothing is committed before all is there.
    let mut places = Vec::new();
    let mut at = start;
    while at < end {
        let piece = Piece::first_of(&chain, at, end);
        at = piece.stop;
        let key = (top.id, piece.block);
        if mutation.claims.is_excluded(key) {
            return Ok(Next::Busy(key));
        }
        let found = look(&chain, &piece);
        let reserved = match &found {
            Found::Missing(_) => None,
            Found::Own { source, offset_bytes } => Some((*source, *offset_bytes)),
            Found::Other(Owner::Damaged { layer }) if *layer == top.id => return Err(chain.damage(*layer, piece.start)),
            Found::Other(owner) => match fill_first(mutation, &chain, &piece, *owner)? {
                Some(next) => return Ok(next),
                None => None,
            },
            Found::Zero => None,
        };
        let place = match (found, reserved) {
            (Found::Missing(work), _) => return Ok(Next::Work(work)),
            (_, Some(place)) => (place, None),
            (found, None) => match reserve(mutation, top, &piece, last_block, draft)? {
                Err(next) => return Ok(next),
                Ok((source, offset_bytes)) => {
                    let at_once = matches!(found, Found::Zero);
                    ((source, offset_bytes + (piece.start - piece.block_start)), Some(at_once))
                }
            },
        };
        places.push((piece, place));
    }
    for (piece, ((source, file_offset_bytes), mapping)) in places {
        let change = piece.commit(&chain);
        match mapping {
            None => {}
            Some(true) if mutation.commit(top, piece.block, Commit::Whole)?.is_some() => {}
            Some(true) => return Ok(Next::Work(Work::Prepare { blocks: piece.block..last_block + 1 })),
            Some(false) => {
                #[cfg(feature = "shuttle")]
                if is_broken(Rule::MappedAfterPayload) {
                    mutation.commit(top, piece.block, change)?;
                }
                draft.pending.commits.push((piece.block, change));
                mutation.claims.share((top.id, piece.block));
            }
        }
        let (start, len) = ((piece.start - start) as usize, (piece.stop - piece.start) as usize);
        push_part(&mut draft.parts, Part::Payload { source, file_offset_bytes, start, len });
    }
    Ok(Next::Ready)
}

/// Decides how a range becomes zero: as metadata, as zeros in the file, or not at all because it is
/// zero already. Goes on from `at`, for as many blocks as one hold of the lock should see, and
/// moves `at` behind them.
pub(crate) fn plan_zero(
    mutation: &mut Mutation,
    at: &mut u64,
    end: u64,
    discard: bool,
    draft: &mut Draft,
) -> io::Result<Next> {
    let chain = Arc::clone(&mutation.chain);
    let top = chain.top();
    let writer = top.writer()?;
    if !top.has_begun_writing() {
        return Ok(Next::Work(Work::Begin));
    }
    draft.is_for(mutation, top);
    let info = top.image.info();
    // A fixed image promises its space, so a discard in it only zeroes; a raw file promises
    // nothing.
    let promises_space = info.disk_type == DiskType::Fixed && info.format.driver().promises_space;
    let how = if discard && !promises_space { Zeroing::Deallocate } else { Zeroing::Keep };
    let whole_commit = if discard { Commit::Discard } else { Commit::Zero };
    let hold_end = at.saturating_add(top.block_bytes.saturating_mul(BLOCKS_PER_HOLD)).min(end);
    let last_block = (hold_end - 1) / top.block_bytes;
    let prepare = |block: u64| Ok(Next::Work(Work::Prepare { blocks: block..last_block + 1 }));
    let mut runs = Vec::new();
    while *at < hold_end {
        let piece = Piece::first_of(&chain, *at, hold_end);
        let key = (top.id, piece.block);
        if mutation.claims.is_excluded(key) {
            return Ok(Next::Busy(key));
        }
        let shared = mutation.claims.is_shared(key);
        if piece.whole && writer.can_store_zero() {
            if shared {
                return Ok(Next::Busy(key));
            }
            match zero_words(&chain, &piece) {
                Words::Missing(work) => return Ok(Next::Work(work)),
                // Zeros that others may show otherwise (a block that was unmapped with its
                // contents) become zeros by the image's word. What is so already is left alone by
                // the image.
                Words::Zero { by_top: true } | Words::Other => {
                    if mutation.commit(top, piece.block, whole_commit)?.is_none() {
                        return prepare(piece.block);
                    }
                }
                Words::Zero { by_top: false } => {}
            }
            *at = piece.stop;
            continue;
        }
        match zero_words(&chain, &piece) {
            Words::Missing(work) => return Ok(Next::Work(work)),
            Words::Zero { by_top } if !shared => {
                if by_top && writer.can_store_zero() && mutation.commit(top, piece.block, whole_commit)?.is_none() {
                    return prepare(piece.block);
                }
                *at = piece.stop;
                continue;
            }
            _ => {}
        }
        runs.clear();
        if let Some(work) = owned_runs(mutation, piece.start, piece.stop, &mut runs) {
            return Ok(Next::Work(work));
        }
        if !shared && runs.iter().all(|run| run.owner.reads_as_zeros()) {
            *at = piece.stop;
            continue;
        }
        let (source, offset_bytes) = match look(&chain, &piece) {
            Found::Missing(work) => return Ok(Next::Work(work)),
            Found::Own { source, offset_bytes } => (source, offset_bytes),
            Found::Other(Owner::Damaged { layer }) if layer == top.id => return Err(chain.damage(layer, piece.start)),
            found => {
                if let Found::Other(owner) = found
                    && let Some(next) = fill_first(mutation, &chain, &piece, owner)?
                {
                    return Ok(next);
                }
                let (source, offset_bytes) = match reserve(mutation, top, &piece, last_block, draft)? {
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
    Ok(Next::Ready)
}

/// What the words of a stretch say of zeros.
enum Words {
    /// All of it reads as zeros; perhaps because the top says so.
    Zero {
        by_top: bool,
    },
    Other,
    Missing(Work),
}

fn zero_words(chain: &Chain, piece: &Piece) -> Words {
    let map = &*chain.map;
    let mut by_top = false;
    for unit in map.unit_of(piece.start)..=map.unit_of(piece.stop - 1) {
        match map.word(unit) {
            None => return Words::Missing(Work::Fold { page: map.page_of(map.unit_range(unit).0) }),
            Some(Owner::Zero { layer }) => by_top |= layer == chain.top().id,
            Some(Owner::Absent) => {}
            Some(_) => return Words::Other,
        }
    }
    Words::Zero { by_top }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests;
