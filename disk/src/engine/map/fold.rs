//! Asks the layers of the chain, from the top down, until every byte of a page or range has an
//! owner.
//!
//! ```text
//!   fold_page    block_states() of each layer ─▶ an owner for each unit; LAZY if bitmaps decide
//!   decide       block_states() and sector_bitmap(), from a layer down ─▶ runs of one unit
//! ```
//!
//! Both read tables, so they may block on I/O, and are called without the mutation lock. Changes
//! made meanwhile are recorded by [`RunCache`](super::RunCache), which applies them to the result.
//!
//! An invalid table entry makes only its own unit [`Owner::Damaged`]. A table that cannot be read
//! is an error of the whole call.

use super::{LayerId, Owner, Run, push_joined};
use crate::{
    engine::chain::{Chain, Member},
    error::Result,
};
use diskwright_image::{BlockState, ImageError, SectorBitmap};

/// The owners of the units of one page.
pub(crate) fn fold_page(chain: &Chain, page: u64) -> Result<Vec<Owner>> {
    let map = &*chain.map;
    let (first_unit, units) = map.units_of_page(page);
    let mut owners: Vec<Option<Owner>> = vec![None; units as usize];
    let mut open = owners.len();
    let mut states = Vec::new();
    for member in chain.members() {
        if open == 0 {
            break;
        }
        let first_block = map.unit_range(first_unit).0 / member.block_bytes;
        let last_block = map.unit_range(first_unit + units - 1).0 / member.block_bytes;
        states.clear();
        states.resize((last_block - first_block + 1) as usize, BlockState::Absent);
        member.image.block_states(first_block, &mut states)?;
        for (index, owner) in owners.iter_mut().enumerate().filter(|(_, owner)| owner.is_none()) {
            let (start, end) = map.unit_range(first_unit + index as u64);
            let state = states[(start / member.block_bytes - first_block) as usize];
            let decided = if start >= member.size_bytes {
                Some(Owner::Absent)
            } else if end > member.size_bytes && state != BlockState::Zero {
                // The layer ends within the unit. The rest reads as zeros.
                Some(Owner::Lazy { layer: member.id })
            } else {
                Chain::owner_by(member, state, start % member.block_bytes)
            };
            if decided.is_some() {
                *owner = decided;
                open -= 1;
            }
        }
    }
    Ok(owners.into_iter().map(|owner| owner.unwrap_or(Owner::Absent)).collect())
}

/// The runs of one unit, by `layer` and the layers below.
pub(crate) fn decide(chain: &Chain, unit: u64, layer: LayerId) -> Result<Vec<Run>> {
    let (start, end) = chain.map.unit_range(unit);
    // A layer that left the chain: start at the top.
    let first = chain.depth_of(layer).unwrap_or(0);
    let mut runs = Vec::new();
    let mut open = vec![(start, end)];
    for member in &chain.members()[first..] {
        if open.is_empty() {
            break;
        }
        open = ask(member, start, open, &mut runs)?;
    }
    runs.extend(open.into_iter().map(|(from, to)| Run {
        start_bytes: from,
        len_bytes: to - from,
        owner: Owner::Absent,
    }));
    runs.sort_by_key(|run| run.start_bytes);
    let mut joined = Vec::new();
    for run in runs {
        push_joined(&mut joined, run);
    }
    Ok(joined)
}

/// Asks one layer about the ranges `open`, which lie in its block at `start`. Returns the ranges
/// for which the layers below must be asked.
fn ask(member: &Member, start: u64, open: Vec<(u64, u64)>, runs: &mut Vec<Run>) -> Result<Vec<(u64, u64)>> {
    let block = start / member.block_bytes;
    let block_start = block * member.block_bytes;
    let mut state = [BlockState::Absent];
    if start < member.size_bytes {
        member.image.block_states(block, &mut state)?;
    }
    let mut bitmap = None;
    if let BlockState::Partial { .. } = state[0] {
        match member.image.sector_bitmap(block) {
            Ok(found) => bitmap = Some(found),
            // Without its bitmap this block is lost, but no other.
            Err(ImageError::Corrupt { .. }) => state[0] = BlockState::Damaged,
            Err(error) => return Err(error.into()),
        }
    }
    let mut left = Vec::new();
    for (from, to) in open {
        let inside = to.min(member.size_bytes.max(from));
        if inside < to {
            runs.push(Run { start_bytes: inside, len_bytes: to - inside, owner: Owner::Absent });
        }
        if from == inside {
            continue;
        }
        let whole = |owner| Run { start_bytes: from, len_bytes: inside - from, owner };
        match (state[0], &bitmap) {
            (BlockState::Partial { store, offset_bytes }, Some(bitmap)) => {
                let place = BlockState::Data { store, offset_bytes };
                by_bitmap(member, place, bitmap, block_start, (from, inside), runs, &mut left);
            }
            (state, _) => match Chain::owner_by(member, state, from - block_start) {
                Some(owner) => runs.push(whole(owner)),
                None => left.push((from, inside)),
            },
        }
    }
    Ok(left)
}

/// Splits a range by a sector bitmap: set sectors are this layer's, at `place`; the others go to
/// `left`.
fn by_bitmap(
    member: &Member,
    place: BlockState,
    bitmap: &SectorBitmap,
    block_start: u64,
    (from, to): (u64, u64),
    runs: &mut Vec<Run>,
    left: &mut Vec<(u64, u64)>,
) {
    let sector_bytes = u64::from(bitmap.sector_bytes);
    let mut at = from;
    while at < to {
        let sector = ((at - block_start) / sector_bytes) as u32;
        let (own, run_end) = bitmap.run_at(sector);
        let stop = (block_start + u64::from(run_end) * sector_bytes).min(to).max(at + 1);
        match Chain::owner_by(member, place, at - block_start).filter(|_| own) {
            Some(owner) => runs.push(Run { start_bytes: at, len_bytes: stop - at, owner }),
            None => left.push((at, stop)),
        }
        at = stop;
    }
}
