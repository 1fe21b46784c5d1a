//! Who owns each unit of the disk, folded over the whole chain.
//!
//! A *unit* is the smallest payload block in the chain. The map holds one word for each unit: which layer has its bytes
//! and where, or that it reads as zeros. A page of (nearly always) 1,024 words is folded the first time that it is touched, by asking
//! the layers from the top down until every unit has an owner; from then on a look-up is one atomic load, however long
//! the chain is. So memory and time follow what is touched, never what the disk's size claims.
//!
//! ```text
//!   offset ─▶ page (folded once) ─▶ word ─┬─ DATA  layer, file offset
//!                                         ├─ ZERO  a layer says zeros
//!                                         ├─ ABSENT nobody knows it: zeros
//!                                         └─ LAZY  from this layer on, sector bitmaps decide ─▶ Vec<Run>, kept in `mixed`
//! ```
//!
//! Locks: words are read without one. They are written, pages are folded and `mixed` is used only under the disk's one
//! mutation lock, which the callers of [`Fold`] hold; so two folds cannot cross, and a fold cannot cross a commit.

use crate::{device::Layer, error::Result};
use diskwright_image::BlockState;
use diskwright_store::sync::atomic::{AtomicU64, Ordering};
use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
};

/// Words in a page are two to this, but for disks of more pages than [`PAGES_MAX_SHIFT`] allows.
const PAGE_SHIFT: u32 = 10;
/// Pages are at most two to this, so that a disk which only claims to be huge costs 24 MiB: their words are more then.
const PAGES_MAX_SHIFT: u32 = 20;
/// Most runs of undecided units that are remembered: 40 MiB.
const MIXED_RUNS_MAX: usize = 1 << 20;
/// Payload offsets are kept in these.
const SECTOR_BYTES: u64 = 512;

const TAG_BITS: u32 = 3;
const LAYER_BITS: u32 = 11;
const TAG_ABSENT: u64 = 1;
const TAG_ZERO: u64 = 2;
const TAG_DATA: u64 = 3;
const TAG_LAZY: u64 = 4;

/// Most layers that a word can name.
pub(crate) const LAYERS_MAX: usize = 1 << LAYER_BITS;

/// Who owns a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// Nobody: it reads as zeros.
    Absent,
    /// A layer says that it reads as zeros.
    Zero { layer: u32 },
    /// The bytes begin here in the layer's store.
    Data { layer: u32, offset_bytes: u64 },
    /// Undecided: the bitmaps from this layer on must be asked.
    Lazy { layer: u32 },
}

impl Owner {
    fn encode(self) -> u64 {
        match self {
            Self::Absent => TAG_ABSENT,
            Self::Zero { layer } => TAG_ZERO | u64::from(layer) << TAG_BITS,
            Self::Lazy { layer } => TAG_LAZY | u64::from(layer) << TAG_BITS,
            Self::Data { layer, offset_bytes } => {
                TAG_DATA | u64::from(layer) << TAG_BITS | (offset_bytes / SECTOR_BYTES) << (TAG_BITS + LAYER_BITS)
            }
        }
    }

    #[inline]
    fn decode(word: u64) -> Self {
        let layer = (word >> TAG_BITS) as u32 & ((1 << LAYER_BITS) - 1);
        match word & ((1 << TAG_BITS) - 1) {
            TAG_ABSENT => Self::Absent,
            TAG_ZERO => Self::Zero { layer },
            TAG_DATA => Self::Data { layer, offset_bytes: (word >> (TAG_BITS + LAYER_BITS)) * SECTOR_BYTES },
            _ => Self::Lazy { layer },
        }
    }

    /// The owner of what follows `by_bytes` after the beginning of this one's range.
    pub(crate) fn advanced(self, by_bytes: u64) -> Self {
        match self {
            Self::Data { layer, offset_bytes } => Self::Data { layer, offset_bytes: offset_bytes + by_bytes },
            other => other,
        }
    }

    /// Whether a range of `next`, following `len_bytes` of this one, continues it.
    fn continues(self, len_bytes: u64, next: Self) -> bool {
        self.advanced(len_bytes) == next
    }
}

/// A stretch of the disk with one owner (never `Lazy`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// First byte on the disk.
    pub(crate) start_bytes: u64,
    /// Length.
    pub(crate) len_bytes: u64,
    /// Owner.
    pub(crate) owner: Owner,
}

impl Run {
    /// The part of this run that lies in `start..end`, if any.
    fn clip(self, start: u64, end: u64) -> Option<Self> {
        let from = self.start_bytes.max(start);
        let to = (self.start_bytes + self.len_bytes).min(end);
        (from < to).then(|| Self {
            start_bytes: from,
            len_bytes: to - from,
            owner: self.owner.advanced(from - self.start_bytes),
        })
    }
}

/// Appends a run, joining it to the last one where they are one stretch.
pub(crate) fn push_joined(runs: &mut Vec<Run>, run: Run) {
    if let Some(last) = runs.last_mut()
        && last.start_bytes + last.len_bytes == run.start_bytes
        && last.owner.continues(last.len_bytes, run.owner)
    {
        last.len_bytes += run.len_bytes;
        return;
    }
    runs.push(run);
}

type Page = Box<[AtomicU64]>;

/// The words. See the module.
#[derive(Debug)]
pub(crate) struct Map {
    size_bytes: u64,
    unit_shift: u32,
    page_shift: u32,
    pages: Box<[OnceLock<Page>]>,
}

impl Map {
    /// A map of nothing folded yet, for a disk of `size_bytes` whose smallest block is `unit_bytes` (a power of two).
    pub(crate) fn new(size_bytes: u64, unit_bytes: u64) -> Self {
        let unit_shift = unit_bytes.trailing_zeros();
        let units = size_bytes.div_ceil(unit_bytes);
        let page_shift = (u64::BITS - units.leading_zeros()).saturating_sub(PAGES_MAX_SHIFT).max(PAGE_SHIFT);
        let pages = (0..units.div_ceil(1 << page_shift)).map(|_| OnceLock::new()).collect();
        Self { size_bytes, unit_shift, page_shift, pages }
    }

    /// The page of a unit, and its word in it.
    #[inline]
    fn place(&self, unit: u64) -> (u64, usize) {
        (unit >> self.page_shift, (unit & (self.units_per_page() - 1)) as usize)
    }

    #[inline]
    fn units_per_page(&self) -> u64 {
        1 << self.page_shift
    }

    /// Bytes in a unit.
    pub(crate) fn unit_bytes(&self) -> u64 {
        1 << self.unit_shift
    }

    /// The owner of `len_bytes` (above 0) at `offset_bytes`, if that is one unit which has been folded and decided. No lock.
    #[inline]
    pub(crate) fn lookup(&self, offset_bytes: u64, len_bytes: u64) -> Option<Owner> {
        let unit = offset_bytes >> self.unit_shift;
        if (offset_bytes + len_bytes - 1) >> self.unit_shift != unit {
            return None;
        }
        let (page, word) = self.place(unit);
        match Owner::decode(self.pages.get(page as usize)?.get()?[word].load(Ordering::Acquire)) {
            Owner::Lazy { .. } => None,
            owner => Some(owner.advanced(offset_bytes & (self.unit_bytes() - 1))),
        }
    }

    fn unit_range(&self, unit: u64) -> (u64, u64) {
        let start = unit << self.unit_shift;
        (start, (start + self.unit_bytes()).min(self.size_bytes))
    }

    /// Folds the units of one page over the chain, without keeping the result.
    fn fold_page(&self, layers: &[Layer], page_index: u64) -> Result<Vec<Owner>> {
        let first_unit = page_index << self.page_shift;
        let units = self.size_bytes.div_ceil(self.unit_bytes()).saturating_sub(first_unit).min(self.units_per_page());
        let mut owners: Vec<Option<Owner>> = vec![None; units as usize];
        let mut open = owners.len();
        let mut states = Vec::new();
        for (layer, image) in layers.iter().map(|layer| &layer.image).enumerate() {
            let layer = layer as u32;
            let info = image.info();
            let first_block = (first_unit << self.unit_shift) / info.block_bytes;
            let last_block = ((first_unit + units - 1) << self.unit_shift) / info.block_bytes;
            states.clear();
            states.resize((last_block - first_block + 1) as usize, BlockState::Absent);
            image.block_states(first_block, &mut states)?;
            for (index, owner) in owners.iter_mut().enumerate().filter(|(_, owner)| owner.is_none()) {
                let (start, end) = self.unit_range(first_unit + index as u64);
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
                        BlockState::Data { offset_bytes } => {
                            Some(Owner::Data { layer, offset_bytes: offset_bytes + within_bytes })
                        }
                        BlockState::Partial { .. } => Some(Owner::Lazy { layer }),
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
}

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
    fn page(&self, page_index: u64) -> Result<&Page> {
        let cell = &self.map.pages[page_index as usize];
        if cell.get().is_none() {
            let owners = self.map.fold_page(self.layers, page_index)?;
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
            if self.map.pages[page_index as usize].get().is_some() {
                self.runs(at, stop, out)?;
            } else {
                for (index, owner) in self.map.fold_page(self.layers, page_index)?.into_iter().enumerate() {
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
                BlockState::Data { offset_bytes } => {
                    Owner::Data { layer: 0, offset_bytes: offset_bytes + (at - block_start) }
                }
                BlockState::Zero => Owner::Zero { layer: 0 },
                BlockState::Absent if self.layers.len() == 1 => Owner::Absent,
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
            BlockState::Partial { .. } => Some(image.sector_bitmap(block)?),
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
                (BlockState::Data { offset_bytes }, _) | (BlockState::Partial { offset_bytes }, None) => {
                    runs.push(whole(Owner::Data { layer, offset_bytes: offset_bytes + (from - block_start) }));
                }
                (BlockState::Partial { offset_bytes }, Some(bitmap)) => {
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
    fn words_keep_what_they_are_given() {
        for owner in [
            Owner::Absent,
            Owner::Zero { layer: 1023 },
            Owner::Lazy { layer: 7 },
            Owner::Data { layer: 2047, offset_bytes: ((1 << 50) - 1) * SECTOR_BYTES },
            Owner::Data { layer: 0, offset_bytes: 512 },
        ] {
            assert_eq!(Owner::decode(owner.encode()), owner);
        }
    }

    #[test]
    fn runs_join_only_where_the_file_goes_on() {
        let data = |start_bytes, offset_bytes| Run {
            start_bytes,
            len_bytes: 4096,
            owner: Owner::Data { layer: 0, offset_bytes },
        };
        let mut runs = Vec::new();
        push_joined(&mut runs, data(0, 8192));
        push_joined(&mut runs, data(4096, 12288));
        push_joined(&mut runs, data(8192, 65536));
        assert_eq!(runs.len(), 2);
        assert_eq!(runs[0].len_bytes, 8192);
    }

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

    #[test]
    fn what_is_only_claimed_costs_little() {
        for (size_bytes, unit_bytes) in
            [(1 << 63, 64 << 20), (2040 << 30, 512), (64 << 40, 1 << 20), (u64::MAX, 1 << 20)]
        {
            let map = Map::new(size_bytes, unit_bytes);
            assert!(map.pages.len() <= 1 << PAGES_MAX_SHIFT, "{size_bytes}");
            let (page, word) = map.place((size_bytes - 1) / unit_bytes);
            assert!(page as usize == map.pages.len() - 1 && (word as u64) < map.units_per_page());
        }
        assert_eq!(Map::new(2 << 40, 2 << 20).page_shift, PAGE_SHIFT);
    }

    #[test]
    fn nothing_is_found_before_it_is_folded() {
        let map = Map::new(10 << 20, 1 << 20);
        assert_eq!(map.lookup(0, 512), None);
        assert_eq!(map.lookup(1 << 19, 1 << 20), None);
    }
}
