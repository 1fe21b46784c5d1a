//! The map folded over the chain: who owns what, asked of the layers from the top down until everything has an owner.
//!
//! ```text
//!   page not folded ─▶ block_states() of each layer ─▶ words ─▶ LAZY? ─▶ block_states() and sector_bitmap(), from that layer on
//!                                                                           │
//!                                          one owner: its word says so ◀────┴────▶ several: runs, kept in `Mixed`
//! ```
//!
//! All of it happens under the disk's one mutation lock, which whoever has a [`Fold`] holds; so two folds cannot cross, and a fold cannot
//! cross a commit. A word that is written here is read without a lock (`map.rs`).

use super::{Map, Owner, Page, Run, push_joined};
use crate::{device::Layer, error::Result, holes::next_known};
use diskwright_image::{BlockState, ImageError};
use diskwright_store::sync::atomic::{AtomicU64, Ordering};
use std::{collections::HashMap, sync::Arc};

/// Most runs of undecided units that are remembered: 40 MiB.
const MIXED_RUNS_MAX: usize = 1 << 20;

/// The map with the chain it is folded over, under the mutation lock.
pub(crate) struct Fold<'a> {
    pub(crate) map: &'a Map,
    pub(crate) layers: &'a [Layer],
    pub(crate) mixed: &'a mut Mixed,
}

/// Units that have several owners, with their runs, as far as they are remembered. Guarded by the mutation lock.
#[derive(Debug, Default)]
pub(crate) struct Mixed {
    units: HashMap<u64, Arc<[Run]>>,
    /// Of all units together.
    runs: usize,
}

impl Mixed {
    /// Remembers a unit. A disk of which every other sector is a parent's has more runs than memory should hold: then all is
    /// forgotten, and asked for anew.
    fn insert(&mut self, unit: u64, runs: &Arc<[Run]>) {
        if self.runs + runs.len() > MIXED_RUNS_MAX {
            *self = Self::default();
        }
        self.remove(unit);
        self.runs += runs.len();
        self.units.insert(unit, Arc::clone(runs));
    }

    fn remove(&mut self, unit: u64) {
        self.runs -= self.units.remove(&unit).map_or(0, |runs| runs.len());
    }
}

impl Fold<'_> {
    /// Folds the units of one page over the chain, without keeping the result.
    fn fold_page(&self, page_index: u64) -> Result<Vec<Owner>> {
        let map = self.map;
        let first_unit = page_index << map.page_shift;
        let units = map.size_bytes.div_ceil(map.unit_bytes()).saturating_sub(first_unit).min(map.units_per_page());
        let mut owners: Vec<Option<Owner>> = vec![None; units as usize];
        let mut open = owners.len();
        let mut states = Vec::new();
        for (layer, image) in self.layers.iter().map(|layer| &layer.image).enumerate() {
            let layer = layer as u32;
            let info = image.info();
            let first_block = (first_unit << map.unit_shift) / info.block_bytes;
            let last_block = ((first_unit + units - 1) << map.unit_shift) / info.block_bytes;
            states.clear();
            states.resize((last_block - first_block + 1) as usize, BlockState::Absent);
            image.block_states(first_block, &mut states)?;
            for (index, owner) in owners.iter_mut().enumerate().filter(|(_, owner)| owner.is_none()) {
                let (start, end) = map.unit_range(first_unit + index as u64);
                let block = start / info.block_bytes;
                let within_bytes = start % info.block_bytes;
                let decided = if start >= info.size_bytes {
                    Some(Owner::Absent)
                } else {
                    match states[(block - first_block) as usize] {
                        BlockState::Absent if end > info.size_bytes => Some(Owner::Lazy { layer }),
                        BlockState::Absent => None,
                        BlockState::Zero => Some(Owner::Zero { layer }),
                        _ if end > info.size_bytes => Some(Owner::Lazy { layer }),
                        BlockState::Data { offset_bytes, .. } => {
                            Some(Owner::Data { layer, offset_bytes: offset_bytes + within_bytes })
                        }
                        BlockState::Partial { .. } => Some(Owner::Lazy { layer }),
                        BlockState::Packed => Some(Owner::Packed { layer }),
                        BlockState::Damaged => Some(Owner::Damaged { layer }),
                    }
                };
                if decided.is_some() {
                    *owner = decided;
                    open -= 1;
                }
            }
            if open == 0 {
                break;
            }
        }
        Ok(owners.into_iter().map(|owner| owner.unwrap_or(Owner::Absent)).collect())
    }

    fn page(&self, page_index: u64) -> Result<&Page> {
        let cell = &self.map.pages[page_index as usize];
        if cell.get().is_none() {
            let owners = self.fold_page(page_index)?;
            let page = owners.into_iter().map(|owner| AtomicU64::new(owner.encode())).collect();
            // Under the mutation lock nobody else can have set it meanwhile.
            let _ = cell.set(page);
        }
        Ok(cell.get().expect("the page was just set"))
    }

    fn set(&self, unit: u64, owner: Owner) -> Result<()> {
        let (page, word) = self.map.place(unit);
        self.page(page)?[word].store(owner.encode(), Ordering::Release);
        Ok(())
    }

    /// Folds the page of this byte of the disk, if it is not folded yet, so that the next look-up finds it.
    pub(crate) fn touch(&self, offset_bytes: u64) -> Result<()> {
        let (page, _) = self.map.place(offset_bytes >> self.map.unit_shift);
        self.page(page).map(drop)
    }

    /// Appends the runs of `start..end`, in order and without gaps, folding what is not folded yet.
    pub(crate) fn runs(&mut self, start: u64, end: u64, out: &mut Vec<Run>) -> Result<()> {
        let mut at = start;
        while at < end {
            let unit = at >> self.map.unit_shift;
            let (unit_start, unit_end) = self.map.unit_range(unit);
            let (page, word) = self.map.place(unit);
            let word = self.page(page)?[word].load(Ordering::Acquire);
            let stop = unit_end.min(end);
            match Owner::decode(word) {
                Owner::Lazy { layer } => {
                    for run in self.decide(unit, layer)?.iter().filter_map(|run| run.clip(at, stop)) {
                        push_joined(out, run);
                    }
                }
                owner => push_joined(
                    out,
                    Run { start_bytes: at, len_bytes: stop - at, owner: owner.advanced(at - unit_start) },
                ),
            }
            at = stop;
        }
        Ok(())
    }

    /// The runs of a unit whose bitmaps must be asked, from `layer` down. A unit that turns out to have one owner gets it in its word.
    fn decide(&mut self, unit: u64, layer: u32) -> Result<Arc<[Run]>> {
        if let Some(runs) = self.mixed.units.get(&unit) {
            return Ok(Arc::clone(runs));
        }
        let (start, end) = self.map.unit_range(unit);
        let runs: Arc<[Run]> = decide_range(self.layers, layer, start, end)?.into();
        match &*runs {
            [only] => self.set(unit, only.owner)?,
            _ => self.mixed.insert(unit, &runs),
        }
        Ok(runs)
    }

    /// The runs of `start..end` for a tool that walks the whole disk: pages that are not folded yet are folded in
    /// passing and not kept, so that walking 64 TB does not leave its map behind.
    pub(crate) fn walk(&mut self, start: u64, end: u64, out: &mut Vec<Run>) -> Result<()> {
        let page_bytes = self.map.units_per_page() << self.map.unit_shift;
        let mut at = start;
        while at < end {
            let page_index = at / page_bytes;
            let stop = (page_index + 1).saturating_mul(page_bytes).min(end);
            let known = if self.map.pages[page_index as usize].get().is_none() {
                // Of a nearly empty disk most pages need not be folded.
                next_known(self.layers, at, end)?
            } else {
                at
            };
            if known > at {
                push_joined(out, Run { start_bytes: at, len_bytes: known - at, owner: Owner::Absent });
                at = known;
                continue;
            }
            if self.map.pages[page_index as usize].get().is_some() {
                self.runs(at, stop, out)?;
            } else {
                for (index, owner) in self.fold_page(page_index)?.into_iter().enumerate() {
                    let (unit_start, unit_end) =
                        self.map.unit_range((page_index << self.map.page_shift) + index as u64);
                    let runs = match owner {
                        Owner::Lazy { layer } if unit_end > at && unit_start < stop => {
                            decide_range(self.layers, layer, unit_start, unit_end)?
                        }
                        owner => vec![Run { start_bytes: unit_start, len_bytes: unit_end - unit_start, owner }],
                    };
                    for run in runs.into_iter().filter_map(|run| run.clip(at, stop)) {
                        push_joined(out, run);
                    }
                }
            }
            at = stop;
        }
        Ok(())
    }

    /// Records that the top layer's block at `block_start` (of `block_bytes`) is in a new state.
    pub(crate) fn block_changed(&mut self, block_start: u64, block_bytes: u64, state: BlockState) -> Result<()> {
        let block_end = block_start.saturating_add(block_bytes).min(self.map.size_bytes);
        let mut at = block_start;
        while at < block_end {
            let unit = at >> self.map.unit_shift;
            self.mixed.remove(unit);
            let owner = match state {
                BlockState::Data { offset_bytes, .. } => {
                    Owner::Data { layer: 0, offset_bytes: offset_bytes + (at - block_start) }
                }
                BlockState::Zero => Owner::Zero { layer: 0 },
                BlockState::Absent if self.layers.len() == 1 => Owner::Absent,
                BlockState::Packed => Owner::Packed { layer: 0 },
                BlockState::Damaged => Owner::Damaged { layer: 0 },
                BlockState::Absent | BlockState::Partial { .. } => Owner::Lazy { layer: 0 },
            };
            self.set(unit, owner)?;
            at += self.map.unit_bytes();
        }
        Ok(())
    }
}

/// Asks the layers from `first_layer` down, bitmaps included, about `start..end`, which lies in one block of each.
fn decide_range(layers: &[Layer], first_layer: u32, start: u64, end: u64) -> Result<Vec<Run>> {
    let mut runs = Vec::new();
    let mut open = vec![(start, end)];
    for (layer, image) in layers.iter().map(|layer| &layer.image).enumerate().skip(first_layer as usize) {
        if open.is_empty() {
            break;
        }
        let layer = layer as u32;
        let info = image.info();
        let block = start / info.block_bytes;
        let block_start = block * info.block_bytes;
        let mut state = [BlockState::Absent];
        if start < info.size_bytes {
            image.block_states(block, &mut state)?;
        }
        let bitmap = match state[0] {
            BlockState::Partial { .. } => match image.sector_bitmap(block) {
                // The bitmap of this block is lost, and with it the block; its neighbours are not.
                Err(ImageError::Corrupt { .. }) => {
                    state[0] = BlockState::Damaged;
                    None
                }
                found => Some(found?),
            },
            _ => None,
        };
        let mut still_open = Vec::new();
        for (from, to) in open {
            let inside = to.min(info.size_bytes.max(from));
            if inside < to {
                runs.push(Run { start_bytes: inside, len_bytes: to - inside, owner: Owner::Absent });
            }
            if from == inside {
                continue;
            }
            let whole = |owner| Run { start_bytes: from, len_bytes: inside - from, owner };
            match (state[0], &bitmap) {
                (BlockState::Absent, _) => still_open.push((from, inside)),
                (BlockState::Zero, _) => runs.push(whole(Owner::Zero { layer })),
                (BlockState::Packed, _) => runs.push(whole(Owner::Packed { layer })),
                (BlockState::Damaged, _) => runs.push(whole(Owner::Damaged { layer })),
                (BlockState::Data { offset_bytes, .. }, _) | (BlockState::Partial { offset_bytes, .. }, None) => {
                    runs.push(whole(Owner::Data { layer, offset_bytes: offset_bytes + (from - block_start) }));
                }
                (BlockState::Partial { offset_bytes, .. }, Some(bitmap)) => {
                    let sector_bytes = u64::from(bitmap.sector_bytes);
                    let mut at = from;
                    while at < inside {
                        let sector = ((at - block_start) / sector_bytes) as u32;
                        let (own, run_end) = bitmap.run_at(sector);
                        let stop = (block_start + u64::from(run_end) * sector_bytes).min(inside).max(at + 1);
                        if own {
                            let owner = Owner::Data { layer, offset_bytes: offset_bytes + (at - block_start) };
                            runs.push(Run { start_bytes: at, len_bytes: stop - at, owner });
                        } else {
                            still_open.push((at, stop));
                        }
                        at = stop;
                    }
                }
            }
        }
        open = still_open;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_remembered_within_bounds() {
        let run = Run { start_bytes: 0, len_bytes: 512, owner: Owner::Absent };
        let mut mixed = Mixed::default();
        for unit in 0..3 * (MIXED_RUNS_MAX as u64 / 4096) {
            mixed.insert(unit, &vec![run; 4096].into());
            assert!(mixed.runs <= MIXED_RUNS_MAX && mixed.units.contains_key(&unit));
        }
        mixed.remove(0);
        let units: Vec<u64> = mixed.units.keys().copied().collect();
        units.into_iter().for_each(|unit| mixed.remove(unit));
        assert_eq!(mixed.runs, 0);
    }
}
