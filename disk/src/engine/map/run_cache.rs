//! Units with several owners, and changes made while tables are read.
//!
//! - The runs of units that have several owners, as far as they are cached.
//! - Pages and units whose tables are being read, without a lock. A commit of a block is recorded
//!   here as well, and is applied to the result of the read before it is used.
//!
//! ```text
//!   begin_fold(page) ─▶ fold_page(), no lock ─▶ end_fold: changes applied, then Map::install
//!   begin_decide(unit) ─▶ decide(), no lock  ─▶ end_decide: changes applied, then a word or runs
//!   changed(...): a commit updates words, runs, and all reads in progress
//! ```
//!
//! The words of hidden ranges are `Lazy`, and their runs are cached here even if there is only one.
//! So requests find the owner under the lock only (`excluded.rs`).
//!
//! Everything here is guarded by the disk's mutation lock.

use super::{LayerId, Map, Owner, Run, push_joined};
use crate::engine::chain::{Chain, Member};
use diskwright_image::{BlockState, Commit};
use std::{collections::HashMap, ops::Range, sync::Arc};

/// Cached runs that are allowed whatever the limit: those of 2 MiB in sectors of 512 bytes.
const RUNS_MIN: usize = 1 << 12;

/// Cached runs, and reads of tables in progress.
#[derive(Debug, Default)]
pub(crate) struct RunCache {
    units: HashMap<u64, Arc<[Run]>>,
    /// Number of runs of all units, and its limit.
    runs: usize,
    runs_max: usize,
    folding: HashMap<u64, Reading<(u64, Owner)>>,
    deciding: HashMap<u64, Reading<Run>>,
    hidden: LazyRanges,
}

/// Ranges of the disk whose words stay `Lazy`.
#[derive(Debug, Default)]
struct LazyRanges {
    /// The layer that the words name.
    top: LayerId,
    /// Ranges of the disk, in bytes.
    ranges: Vec<Range<u64>>,
}

impl LazyRanges {
    /// The owner that the unit's word must have meanwhile.
    fn word(&self, map: &Map, unit: u64) -> Option<Owner> {
        let (start, end) = map.unit_range(unit);
        let is_in = |range: &Range<u64>| range.start < end && start < range.end;
        self.ranges.iter().any(is_in).then_some(Owner::Lazy { layer: self.top })
    }
}

/// A page or a unit whose tables are being read, perhaps by several threads.
#[derive(Debug)]
struct Reading<T> {
    readers: u32,
    /// Changes in the order in which they were made, since the last break.
    changes: Vec<T>,
    /// Number of changes that cannot be applied to a result. A thread that began to read before the
    /// last of them must read again. A thread that began later need not: otherwise two threads
    /// reading in turns would never finish.
    breaks: u64,
}

impl<T> Reading<T> {
    fn begin(&mut self) -> ReadToken {
        self.readers += 1;
        ReadToken(self.breaks)
    }

    fn is_good(&self, begun: ReadToken) -> bool {
        self.breaks == begun.0
    }

    /// Records a change that cannot be applied to a result.
    fn break_off(&mut self) {
        self.breaks += 1;
        self.changes.clear();
    }
}

/// Token from [`RunCache::begin_fold`] or [`RunCache::begin_decide`] for the call that ends it.
#[derive(Debug, Clone, Copy)]
#[must_use = "every begin needs an end"]
pub(crate) struct ReadToken(u64);

impl<T> Default for Reading<T> {
    fn default() -> Self {
        Self { readers: 0, changes: Vec::new(), breaks: 0 }
    }
}

impl RunCache {
    /// An empty cache whose runs take at most about `limit_bytes`.
    pub(crate) fn within(limit_bytes: u64) -> Self {
        let affordable = usize::try_from(limit_bytes).unwrap_or(usize::MAX) / size_of::<Run>();
        Self { runs_max: affordable.max(RUNS_MIN), ..Self::default() }
    }

    /// The cached runs of a unit.
    pub(crate) fn get(&self, unit: u64) -> Option<&Arc<[Run]>> {
        self.units.get(&unit)
    }

    /// Caches the runs of a unit. At the limit the whole cache is cleared: a disk in which every
    /// other sector is the parent's has too many runs for memory.
    fn insert(&mut self, unit: u64, runs: Arc<[Run]>) {
        if self.runs + runs.len() > self.runs_max {
            self.units.clear();
            self.runs = 0;
        }
        self.remove(unit);
        self.runs += runs.len();
        self.units.insert(unit, runs);
    }

    fn remove(&mut self, unit: u64) {
        self.runs -= self.units.remove(&unit).map_or(0, |runs| runs.len());
    }

    /// Begins to fold a page. Each call needs one [`RunCache::end_fold`].
    pub(crate) fn begin_fold(&mut self, page: u64) -> ReadToken {
        self.folding.entry(page).or_default().begin()
    }

    /// Ends the folding of a page. `owners` is the result, or `None` after an error. Applies the
    /// changes made meanwhile. `false`: the page must be folded again.
    pub(crate) fn end_fold(&mut self, map: &Map, page: u64, begun: ReadToken, owners: Option<&mut Vec<Owner>>) -> bool {
        let Some(reading) = self.folding.get_mut(&page) else { return true };
        let good = reading.is_good(begun);
        if let Some(owners) = owners.filter(|_| good) {
            let (first_unit, _) = map.units_of_page(page);
            for &(unit, owner) in &reading.changes {
                if let Some(place) = unit.checked_sub(first_unit).and_then(|at| owners.get_mut(at as usize)) {
                    *place = owner;
                }
            }
            for (unit, owner) in (first_unit..).zip(owners) {
                *owner = self.hidden.word(map, unit).unwrap_or(*owner);
            }
        }
        reading.readers -= 1;
        if reading.readers == 0 {
            self.folding.remove(&page);
        }
        good
    }

    /// Begins to read a unit's bitmaps. Each call needs one [`RunCache::end_decide`].
    pub(crate) fn begin_decide(&mut self, unit: u64) -> ReadToken {
        self.deciding.entry(unit).or_default().begin()
    }

    /// Ends the decision of a unit. `runs` is the result, or `None` after an error. Applies the
    /// changes made meanwhile and caches the result. `false`: the unit must be decided again.
    pub(crate) fn end_decide(&mut self, map: &Map, unit: u64, begun: ReadToken, runs: Option<Vec<Run>>) -> bool {
        let Some(reading) = self.deciding.get_mut(&unit) else { return true };
        let good = reading.is_good(begun);
        let decided = runs.filter(|_| good).map(|mut runs| {
            for &change in &reading.changes {
                overlay(&mut runs, change);
            }
            runs
        });
        reading.readers -= 1;
        if reading.readers == 0 {
            self.deciding.remove(&unit);
        }
        if let Some(runs) = decided
            && matches!(map.word(unit), None | Some(Owner::Lazy { .. }))
        {
            self.set_runs(map, unit, runs);
        }
        good
    }

    /// Ends the decision of a unit without caching the result. `false`: something changed
    /// meanwhile, and the unit must be decided again.
    pub(crate) fn end_decide_in_passing(&mut self, unit: u64, begun: ReadToken) -> bool {
        let Some(reading) = self.deciding.get_mut(&unit) else { return true };
        let good = reading.is_good(begun) && reading.changes.is_empty();
        reading.readers -= 1;
        if reading.readers == 0 {
            self.deciding.remove(&unit);
        }
        good
    }

    /// Sets a unit's runs. A single run becomes the unit's word, several are cached.
    fn set_runs(&mut self, map: &Map, unit: u64, runs: Vec<Run>) {
        match &*runs {
            [only] if self.hidden.word(map, unit).is_none() => {
                self.remove(unit);
                map.set(unit, only.owner);
            }
            _ => self.insert(unit, runs.into()),
        }
    }

    /// Records that `change` was committed to `block` of `member`. The block's new state is
    /// `state`.
    pub(crate) fn changed(&mut self, chain: &Chain, member: &Member, block: u64, change: Commit, state: BlockState) {
        let map = &*chain.map;
        let (block_start, block_end) = member.block_range(block, chain.geometry.size_bytes);
        if block_start >= block_end {
            return;
        }
        let is_top = chain.top().id == member.id;
        let units = map.unit_of(block_start)..=map.unit_of(block_end - 1);
        for unit in units {
            if !is_top && self.may_be_above(chain, member, unit) {
                // The tables must be read.
                self.forget(map, unit, chain.top().id);
                continue;
            }
            let (start, end) = map.unit_range(unit);
            let sectors = match (state, change) {
                (BlockState::Partial { store, offset_bytes }, Commit::Sectors { first, count }) => {
                    let sector_bytes = u64::from(member.image.info().logical_sector_bytes);
                    let from = (block_start + u64::from(first) * sector_bytes).max(start);
                    let to = (block_start + u64::from(first.saturating_add(count)) * sector_bytes).min(end);
                    let data = BlockState::Data { store, offset_bytes };
                    Some((from, to, Chain::owner_by(member, data, from.saturating_sub(block_start))))
                }
                _ => None,
            };
            match sectors {
                Some((from, to, Some(owner))) => {
                    if from < to {
                        let run = Run { start_bytes: from, len_bytes: to - from, owner };
                        self.part_changed(map, unit, chain.top().id, run);
                    }
                }
                _ => {
                    let owner = match Chain::owner_by(member, state, start - block_start) {
                        None if chain.members().len() == 1 => Owner::Absent,
                        // An image below the top commits: the top may get a part of the unit later.
                        None | Some(Owner::Lazy { .. }) => Owner::Lazy { layer: chain.top().id },
                        Some(owner) => owner,
                    };
                    self.whole_changed(map, unit, owner);
                }
            }
        }
    }

    /// Records that a block of `member` has got another place together with the one that was
    /// committed: the tables must be read again.
    pub(crate) fn moved_along(&mut self, chain: &Chain, member: &Member, block: u64) {
        let map = &*chain.map;
        let (start, end) = member.block_range(block, chain.geometry.size_bytes);
        if start < end {
            (map.unit_of(start)..=map.unit_of(end - 1)).for_each(|unit| self.forget(map, unit, chain.top().id));
        }
    }

    /// Whether a layer above `member` may own a part of the unit.
    fn may_be_above(&self, chain: &Chain, member: &Member, unit: u64) -> bool {
        let depth = chain.depth_of(member.id).unwrap_or(0);
        let is_above = |owner: Owner| match owner {
            Owner::Absent => false,
            Owner::Data { source, .. } => chain.members()[..depth].iter().any(|above| above.has_source(source)),
            Owner::Zero { layer } | Owner::Compressed { layer } | Owner::Damaged { layer } => {
                chain.depth_of(layer).is_none_or(|of_owner| of_owner < depth)
            }
            Owner::Lazy { .. } => true,
        };
        match (chain.map.word(unit), self.units.get(&unit)) {
            (None, _) | (Some(Owner::Lazy { .. }), None) => true,
            (Some(Owner::Lazy { .. }), Some(runs)) => runs.iter().any(|run| is_above(run.owner)),
            (Some(owner), _) => is_above(owner),
        }
    }

    /// Records that a whole unit has another owner.
    fn whole_changed(&mut self, map: &Map, unit: u64, owner: Owner) {
        let (start_bytes, end) = map.unit_range(unit);
        let run = Run { start_bytes, len_bytes: end - start_bytes, owner };
        let is_lazy = matches!(owner, Owner::Lazy { .. });
        let word = self.hidden.word(map, unit);
        self.remove(unit);
        if word.is_some() && !is_lazy {
            self.insert(unit, [run].into());
        }
        let word = word.unwrap_or(owner);
        map.set(unit, word);
        if let Some(reading) = self.folding.get_mut(&map.page_of(start_bytes)) {
            reading.changes.push((unit, word));
        }
        if let Some(reading) = self.deciding.get_mut(&unit) {
            if is_lazy {
                reading.break_off();
            } else {
                reading.changes.push(run);
            }
        }
    }

    /// Makes the words of these ranges `Lazy` until [`RunCache::show`].
    pub(crate) fn hide(&mut self, chain: &Chain, ranges: &[Range<u64>]) {
        self.hidden = LazyRanges { top: chain.top().id, ranges: ranges.to_vec() };
        for unit in units_of(&chain.map, ranges) {
            // A unit with several owners is `Lazy` already, and its runs are cached.
            match chain.map.word(unit) {
                None | Some(Owner::Lazy { .. }) => {}
                Some(owner) => self.whole_changed(&chain.map, unit, owner),
            }
        }
    }

    /// Ends [`RunCache::hide`]. Words of units whose single owner is known lead to it again.
    pub(crate) fn show(&mut self, chain: &Chain) {
        let LazyRanges { ranges, .. } = std::mem::take(&mut self.hidden);
        for unit in units_of(&chain.map, &ranges) {
            if let Some([only]) = self.units.get(&unit).map(|runs| &**runs) {
                let owner = only.owner;
                self.whole_changed(&chain.map, unit, owner);
            }
        }
    }

    /// Records that a part of a unit, in a block of `layer`, has another owner.
    fn part_changed(&mut self, map: &Map, unit: u64, layer: LayerId, run: Run) {
        let (start, end) = map.unit_range(unit);
        if (run.start_bytes, run.end_bytes()) == (start, end) {
            return self.whole_changed(map, unit, run.owner);
        }
        let lazy = Owner::Lazy { layer };
        let known = match map.word(unit) {
            Some(Owner::Lazy { .. }) | None => self.units.get(&unit).map(|runs| runs.to_vec()),
            Some(owner) => Some(vec![Run { start_bytes: start, len_bytes: end - start, owner }]),
        };
        map.set(unit, lazy);
        if let Some(mut runs) = known {
            overlay(&mut runs, run);
            self.set_runs(map, unit, runs);
        }
        if let Some(reading) = self.folding.get_mut(&map.page_of(start)) {
            reading.changes.push((unit, lazy));
        }
        if let Some(reading) = self.deciding.get_mut(&unit) {
            reading.changes.push(run);
        }
    }

    /// Forgets the owner of a unit, so that the tables are read again.
    fn forget(&mut self, map: &Map, unit: u64, top: LayerId) {
        self.remove(unit);
        map.set(unit, Owner::Lazy { layer: top });
        if let Some(reading) = self.folding.get_mut(&map.page_of(map.unit_range(unit).0)) {
            reading.changes.push((unit, Owner::Lazy { layer: top }));
        }
        if let Some(reading) = self.deciding.get_mut(&unit) {
            reading.break_off();
        }
    }

    /// Clears the cache after a change of the chain, because it belongs to the old map. Reads in
    /// progress must be repeated.
    pub(crate) fn start_over(&mut self) {
        self.units.clear();
        self.runs = 0;
        self.folding.values_mut().for_each(Reading::break_off);
        self.deciding.values_mut().for_each(Reading::break_off);
    }
}

/// The units of these ranges of the disk.
fn units_of<'a>(map: &'a Map, ranges: &'a [Range<u64>]) -> impl Iterator<Item = u64> + use<'a> {
    ranges
        .iter()
        .filter(|range| !range.is_empty())
        .flat_map(|range| map.unit_of(range.start)..=map.unit_of(range.end - 1))
}

/// Replaces the range of `over` in the runs, which cover that range without gaps.
fn overlay(runs: &mut Vec<Run>, over: Run) {
    let mut result = Vec::with_capacity(runs.len() + 2);
    let mut placed = false;
    for run in runs.drain(..) {
        if let Some(before) = run.clip(0, over.start_bytes) {
            push_joined(&mut result, before);
        }
        if !placed && run.end_bytes() > over.start_bytes {
            push_joined(&mut result, over);
            placed = true;
        }
        if let Some(after) = run.clip(over.end_bytes(), u64::MAX) {
            push_joined(&mut result, after);
        }
    }
    *runs = result;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const UNIT: u64 = 64;

    fn data(start_bytes: u64, len_bytes: u64, source: u16) -> Run {
        Run { start_bytes, len_bytes, owner: Owner::Data { source, offset_bytes: start_bytes * 512 } }
    }

    #[test]
    fn the_cache_of_runs_is_bounded() {
        let run = Run { start_bytes: 0, len_bytes: 512, owner: Owner::Absent };
        const MAX: usize = 1 << 16;
        let mut mixed = RunCache::within((MAX * size_of::<Run>()) as u64);
        for unit in 0..3 * (MAX as u64 / 4096) {
            mixed.insert(unit, vec![run; 4096].into());
            assert!(mixed.runs <= MAX && mixed.units.contains_key(&unit));
        }
        let units: Vec<u64> = mixed.units.keys().copied().collect();
        units.into_iter().for_each(|unit| mixed.remove(unit));
        assert_eq!(mixed.runs, 0);
    }

    #[test]
    fn a_change_during_a_fold_is_applied_to_the_page() {
        let map = Map::new(10 * UNIT * 512, UNIT * 512, 1 << 20);
        let mut mixed = RunCache::within(1 << 20);
        let begun = mixed.begin_fold(0);
        mixed.whole_changed(&map, 3, Owner::Zero { layer: 0 });
        let mut owners = vec![Owner::Absent; 10];
        assert!(mixed.end_fold(&map, 0, begun, Some(&mut owners)));
        assert_eq!(owners[3], Owner::Zero { layer: 0 });
        assert!(mixed.folding.is_empty());
    }

    #[test]
    fn a_write_during_a_decision_is_applied_to_the_runs() {
        let map = Map::new(4 * UNIT * 512, UNIT * 512, 1 << 20);
        map.install(0, &[Owner::Lazy { layer: 0 }; 4]);
        let mut mixed = RunCache::within(1 << 20);
        let begun = mixed.begin_decide(1);
        let (start, end) = map.unit_range(1);
        let written =
            Run { start_bytes: start + 512, len_bytes: 512, owner: Owner::Data { source: 0, offset_bytes: 1 << 20 } };
        mixed.part_changed(&map, 1, 0, written);
        let before = Run { start_bytes: start, len_bytes: end - start, owner: Owner::Absent };
        assert!(mixed.end_decide(&map, 1, begun, Some(vec![before])));
        assert_eq!(mixed.get(1).unwrap().len(), 3);
        assert_eq!(mixed.get(1).unwrap()[1], written);
        mixed.whole_changed(&map, 1, Owner::Zero { layer: 0 });
        assert!(mixed.get(1).is_none() && map.word(1) == Some(Owner::Zero { layer: 0 }));
    }

    /// Two threads read one unit in turns: each begins before the other has ended.
    #[test]
    fn a_read_that_began_after_a_break_need_not_be_repeated() {
        let map = Map::new(4 * UNIT * 512, UNIT * 512, 1 << 20);
        map.install(0, &[Owner::Absent; 4]);
        let (start, end) = map.unit_range(1);
        let all = |owner| Run { start_bytes: start, len_bytes: end - start, owner };
        let mut mixed = RunCache::within(1 << 20);
        let (fold, decide) = (mixed.begin_fold(0), mixed.begin_decide(1));
        // A change that a later break invalidates.
        mixed.whole_changed(&map, 1, Owner::Zero { layer: 0 });
        mixed.forget(&map, 1, 0);
        mixed.start_over();
        let (fold_again, decide_again) = (mixed.begin_fold(0), mixed.begin_decide(1));
        let mut owners = vec![Owner::Absent; 4];
        assert!(!mixed.end_fold(&map, 0, fold, Some(&mut owners)));
        assert!(!mixed.end_decide(&map, 1, decide, Some(vec![all(Owner::Absent)])));
        assert!(mixed.end_fold(&map, 0, fold_again, Some(&mut owners)) && owners == [Owner::Absent; 4]);
        assert!(mixed.end_decide(&map, 1, decide_again, Some(vec![all(Owner::Compressed { layer: 0 })])));
        assert_eq!(map.word(1), Some(Owner::Compressed { layer: 0 }));
        assert!(mixed.folding.is_empty() && mixed.deciding.is_empty());
    }

    proptest! {
        #[test]
        fn an_overlay_changes_only_its_own_range(
            steps in prop::collection::vec((0u64..UNIT, 1u64..UNIT, 0u16..4), 1..20)
        ) {
            let mut runs = vec![data(0, UNIT, 9)];
            let mut model: Vec<u16> = vec![9; UNIT as usize];
            for (start, len, source) in steps {
                let len = len.min(UNIT - start);
                overlay(&mut runs, data(start, len, source));
                model[start as usize..(start + len) as usize].fill(source);
                let mut at = 0;
                for run in &runs {
                    prop_assert_eq!(run.start_bytes, at);
                    for byte in run.start_bytes..run.end_bytes() {
                        let Owner::Data { source, .. } = run.owner else { panic!() };
                        prop_assert_eq!(source, model[byte as usize]);
                    }
                    at = run.end_bytes();
                }
                prop_assert_eq!(at, UNIT);
            }
        }
    }
}
