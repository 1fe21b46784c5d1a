//! What words cannot say, and what changes while the tables are read.
//!
//! - Units that have several owners, with their runs, as far as they are remembered.
//! - Pages and units that are being read from the tables right now, without a lock. Whoever changes
//!   a block notes the change here as well, and it is put over the answer before that is used.
//!
//! ```text
//!   begin_fold(page) ─▶ fold_page(), no lock ─▶ end_fold: changes noted meanwhile, then Map::install
//!   begin_decide(unit) ─▶ decide(), no lock  ─▶ end_decide: changes noted meanwhile, then a word or runs
//!   changed(...): a commit changes words, runs, and all reads that are under way
//! ```
//!
//! Everything here is guarded by the disk's mutation lock.

use super::{LayerId, Map, Owner, Run, push_joined};
use crate::chain::{Chain, Member};
use diskwright_image::{BlockState, Commit};
use std::{collections::HashMap, sync::Arc};

/// Most runs of undecided units that are remembered: 24 MiB.
const MIXED_RUNS_MAX: usize = 1 << 20;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Mixed {
    units: HashMap<u64, Arc<[Run]>>,
    /// Of all units together.
    runs: usize,
    folding: HashMap<u64, Reading<(u64, Owner)>>,
    deciding: HashMap<u64, Reading<Run>>,
}

/// A page or a unit that is being read, perhaps by several threads.
#[derive(Debug)]
struct Reading<T> {
    readers: u32,
    /// In the order in which they were made, those after the last break.
    changes: Vec<T>,
    /// Changes so far that cannot be put over an answer. Who began to read before the last of them
    /// must read again, who began later need not: else two who read in turns would find no end.
    breaks: u64,
}

impl<T> Reading<T> {
    fn begin(&mut self) -> Begun {
        self.readers += 1;
        Begun(self.breaks)
    }

    fn is_good(&self, begun: Begun) -> bool {
        self.breaks == begun.0
    }

    /// Something changed that cannot be put over an answer.
    fn break_off(&mut self) {
        self.breaks += 1;
        self.changes.clear();
    }
}

/// What [`Mixed::begin_fold`] and [`Mixed::begin_decide`] give to the call that ends it.
#[derive(Debug, Clone, Copy)]
#[must_use = "what is begun must be ended"]
pub(crate) struct Begun(u64);

impl<T> Default for Reading<T> {
    fn default() -> Self {
        Self { readers: 0, changes: Vec::new(), breaks: 0 }
    }
}

impl Mixed {
    /// The runs of a unit, if they are remembered.
    pub(crate) fn get(&self, unit: u64) -> Option<&Arc<[Run]>> {
        self.units.get(&unit)
    }

    /// Remembers a unit. A disk of which every other sector is a parent's has more runs than memory
    /// should hold: then all is forgotten, and asked for anew.
    fn insert(&mut self, unit: u64, runs: Arc<[Run]>) {
        if self.runs + runs.len() > MIXED_RUNS_MAX {
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

    /// A page is going to be folded. Each call needs one [`Mixed::end_fold`].
    pub(crate) fn begin_fold(&mut self, page: u64) -> Begun {
        self.folding.entry(page).or_default().begin()
    }

    /// A page has been folded: `owners`, or `None` where that failed. Puts what changed meanwhile
    /// over it. `false` says that the page must be folded again.
    pub(crate) fn end_fold(&mut self, map: &Map, page: u64, begun: Begun, owners: Option<&mut Vec<Owner>>) -> bool {
        let Some(reading) = self.folding.get_mut(&page) else { return true };
        let good = reading.is_good(begun);
        if let Some(owners) = owners.filter(|_| good) {
            let (first_unit, _) = map.units_of_page(page);
            for &(unit, owner) in &reading.changes {
                if let Some(place) = unit.checked_sub(first_unit).and_then(|at| owners.get_mut(at as usize)) {
                    *place = owner;
                }
            }
        }
        reading.readers -= 1;
        if reading.readers == 0 {
            self.folding.remove(&page);
        }
        good
    }

    /// A unit's bitmaps are going to be read. Each call needs one [`Mixed::end_decide`].
    pub(crate) fn begin_decide(&mut self, unit: u64) -> Begun {
        self.deciding.entry(unit).or_default().begin()
    }

    /// A unit has been decided: its `runs`, or `None` where that failed. Puts what changed
    /// meanwhile over them and remembers the outcome. `false` says that the unit must be decided
    /// again.
    pub(crate) fn end_decide(&mut self, map: &Map, unit: u64, begun: Begun, runs: Option<Vec<Run>>) -> bool {
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

    /// A unit has been decided by a caller that does not need the outcome to be remembered. `false`
    /// says that something changed meanwhile.
    pub(crate) fn end_decide_in_passing(&mut self, unit: u64, begun: Begun) -> bool {
        let Some(reading) = self.deciding.get_mut(&unit) else { return true };
        let good = reading.is_good(begun) && reading.changes.is_empty();
        reading.readers -= 1;
        if reading.readers == 0 {
            self.deciding.remove(&unit);
        }
        good
    }

    /// A unit's runs are these: one becomes the unit's word, several are remembered.
    fn set_runs(&mut self, map: &Map, unit: u64, runs: Vec<Run>) {
        match &*runs {
            [only] => {
                self.remove(unit);
                map.set(unit, only.owner);
            }
            _ => self.insert(unit, runs.into()),
        }
    }

    /// `change` was committed to `block` of `member`, which is in `state` now.
    pub(crate) fn changed(&mut self, chain: &Chain, member: &Member, block: u64, change: Commit, state: BlockState) {
        let map = &*chain.map;
        let (block_start, block_end) = member.block_range(block, chain.geometry.size_bytes);
        if block_start >= block_end {
            return;
        }
        let is_top = chain.top().id == member.id;
        let units = map.unit_of(block_start)..=map.unit_of(block_end - 1);
        for unit in units {
            if !is_top {
                // A layer above may own some of it: only the tables know.
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
                        self.part_changed(map, unit, member.id, run);
                    }
                }
                _ => {
                    let owner = match Chain::owner_by(member, state, start - block_start) {
                        Some(owner) => owner,
                        None if chain.members().len() == 1 => Owner::Absent,
                        None => Owner::Lazy { layer: member.id },
                    };
                    self.whole_changed(map, unit, owner);
                }
            }
        }
    }

    /// All of a unit has another owner.
    fn whole_changed(&mut self, map: &Map, unit: u64, owner: Owner) {
        self.remove(unit);
        map.set(unit, owner);
        if let Some(reading) = self.folding.get_mut(&map.page_of(map.unit_range(unit).0)) {
            reading.changes.push((unit, owner));
        }
        if let Some(reading) = self.deciding.get_mut(&unit) {
            let (start_bytes, end) = map.unit_range(unit);
            match owner {
                Owner::Lazy { .. } => reading.break_off(),
                owner => reading.changes.push(Run { start_bytes, len_bytes: end - start_bytes, owner }),
            }
        }
    }

    /// Some of a unit has another owner: a range in a block of `layer`.
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

    /// Nothing is known of a unit any more.
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

    /// The chain is another one: what was remembered names the map before, and what is being read
    /// must be read again.
    pub(crate) fn start_over(&mut self) {
        self.units.clear();
        self.runs = 0;
        self.folding.values_mut().for_each(Reading::break_off);
        self.deciding.values_mut().for_each(Reading::break_off);
    }
}

/// Puts `over` over the runs, which cover it without gaps.
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
    fn runs_are_remembered_within_bounds() {
        let run = Run { start_bytes: 0, len_bytes: 512, owner: Owner::Absent };
        let mut mixed = Mixed::default();
        for unit in 0..3 * (MIXED_RUNS_MAX as u64 / 4096) {
            mixed.insert(unit, vec![run; 4096].into());
            assert!(mixed.runs <= MIXED_RUNS_MAX && mixed.units.contains_key(&unit));
        }
        let units: Vec<u64> = mixed.units.keys().copied().collect();
        units.into_iter().for_each(|unit| mixed.remove(unit));
        assert_eq!(mixed.runs, 0);
    }

    #[test]
    fn what_changes_while_a_page_is_folded_is_put_over_it() {
        let map = Map::new(10 * UNIT * 512, UNIT * 512, 1 << 20);
        let mut mixed = Mixed::default();
        let begun = mixed.begin_fold(0);
        mixed.whole_changed(&map, 3, Owner::Zero { layer: 0 });
        let mut owners = vec![Owner::Absent; 10];
        assert!(mixed.end_fold(&map, 0, begun, Some(&mut owners)));
        assert_eq!(owners[3], Owner::Zero { layer: 0 });
        assert!(mixed.folding.is_empty());
    }

    #[test]
    fn a_range_that_is_written_while_its_unit_is_decided_is_put_over_the_answer() {
        let map = Map::new(4 * UNIT * 512, UNIT * 512, 1 << 20);
        map.install(0, &[Owner::Lazy { layer: 0 }; 4]);
        let mut mixed = Mixed::default();
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

    /// Two who read one unit, the next always begun before the last has ended.
    #[test]
    fn who_begins_to_read_after_a_break_need_not_read_again() {
        let map = Map::new(4 * UNIT * 512, UNIT * 512, 1 << 20);
        map.install(0, &[Owner::Absent; 4]);
        let (start, end) = map.unit_range(1);
        let all = |owner| Run { start_bytes: start, len_bytes: end - start, owner };
        let mut mixed = Mixed::default();
        let (fold, decide) = (mixed.begin_fold(0), mixed.begin_decide(1));
        // A change that a later break makes untrue.
        mixed.whole_changed(&map, 1, Owner::Zero { layer: 0 });
        mixed.forget(&map, 1, 0);
        mixed.start_over();
        let (fold_again, decide_again) = (mixed.begin_fold(0), mixed.begin_decide(1));
        let mut owners = vec![Owner::Absent; 4];
        assert!(!mixed.end_fold(&map, 0, fold, Some(&mut owners)));
        assert!(!mixed.end_decide(&map, 1, decide, Some(vec![all(Owner::Absent)])));
        assert!(mixed.end_fold(&map, 0, fold_again, Some(&mut owners)) && owners == [Owner::Absent; 4]);
        assert!(mixed.end_decide(&map, 1, decide_again, Some(vec![all(Owner::Packed { layer: 0 })])));
        assert_eq!(map.word(1), Some(Owner::Packed { layer: 0 }));
        assert!(mixed.folding.is_empty() && mixed.deciding.is_empty());
    }

    proptest! {
        #[test]
        fn an_overlay_changes_its_own_range_and_nothing_else(
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
