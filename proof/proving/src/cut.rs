//! The states that a power cut may leave.
//!
//! ```text
//!   durable, then          write A   length   write B   zero C │ sync ...
//!                             │        │         │        │
//!   each of these is kept, lost, or kept in some of its 512-byte sectors;
//!   a length is kept or lost independently of the bytes
//! ```
//!
//! A disk and a file system may reorder everything that is not synced and stop anywhere. So any
//! subset of the changes may survive. (If two writes of one sector are reordered, the result is a
//! subset too: the one without the later write.) Most random subsets are similar, so there are
//! several [`CutMode`]s; each finds another kind of defect.

use crate::{
    contents::{Change, Part},
    dice::Dice,
    history::{CLOCK_STEP_SECONDS, Event, FileId, NameChange, Snapshot},
};
use std::collections::{BTreeMap, BTreeSet};

/// How the changes that survive a power cut are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CutMode {
    /// Nothing that was not synced survives.
    Nothing,
    /// Everything survives.
    Everything,
    /// Each sector and each length survives with this probability in percent.
    Sectors(u8),
    /// Each operation survives as a whole, with this probability in percent.
    Whole(u8),
    /// The first operations survive; the next one is torn.
    Prefix,
    /// Each file loses power at a moment of its own: of each the first operations survive, and the
    /// next one is torn.
    OwnMoments,
    /// Only the last operations survive.
    Suffix,
    /// All operations survive but one.
    AllButOne,
    /// Only one operation survives.
    OnlyOne,
    /// Small writes (mostly tables) survive, large ones (mostly payload) do not.
    Small,
    /// Large writes survive, small ones do not.
    Large,
    /// Bytes survive, changes of lengths do not.
    NoLengths,
    /// Changes of lengths survive, bytes do not.
    OnlyLengths,
    /// All changes of one file survive, and none of other files. If only one file has changed, each
    /// operation is chosen at random.
    OneFile,
    /// All changes of all files but one survive; otherwise as `OneFile`.
    AllButOneFile,
}

/// All modes but [`CutMode::OwnMoments`], which is for cases with several members; the most
/// effective first.
pub const CUT_MODES: [CutMode; 18] = [
    CutMode::Nothing,
    CutMode::Everything,
    CutMode::Whole(50),
    CutMode::Sectors(50),
    CutMode::Prefix,
    CutMode::Small,
    CutMode::Suffix,
    CutMode::AllButOne,
    CutMode::OneFile,
    CutMode::Sectors(90),
    CutMode::OnlyOne,
    CutMode::Large,
    CutMode::NoLengths,
    CutMode::Whole(85),
    CutMode::Sectors(10),
    CutMode::OnlyLengths,
    CutMode::AllButOneFile,
    CutMode::Whole(15),
];

/// Writes up to this size are small.
const SMALL_BYTES: usize = 4096;

/// Steps through a history and knows what is durable at each point.
#[derive(Debug, Clone)]
pub struct Cutter<'a> {
    history: &'a [Event],
    at: usize,
    durable: Snapshot,
    pending: BTreeMap<FileId, Vec<&'a Change>>,
    pending_names: Vec<&'a NameChange>,
    pending_times: BTreeMap<FileId, Vec<u64>>,
    /// Index of the truth that holds here.
    pub truth: Option<usize>,
    dice: Dice,
}

impl<'a> Cutter<'a> {
    /// Begins at the start of a history.
    pub fn new(start: Snapshot, history: &'a [Event], seed: u64) -> Self {
        Self {
            history,
            at: 0,
            durable: start,
            pending: BTreeMap::new(),
            pending_names: Vec::new(),
            pending_times: BTreeMap::new(),
            truth: None,
            dice: Dice::new(seed, 0xc07),
        }
    }

    /// This cutter with another seed, which chooses what later failed syncs lose.
    pub fn with_seed(&self, seed: u64) -> Self {
        Self { dice: Dice::new(seed, 0xc07), ..self.clone() }
    }

    /// Number of events that were passed.
    pub fn at(&self) -> usize {
        self.at
    }

    /// The next event.
    pub fn next(&self) -> Option<&'a Event> {
        self.history.get(self.at)
    }

    /// Number of changes that are not durable.
    pub fn pending(&self) -> usize {
        self.pending.values().map(Vec::len).sum::<usize>() + self.pending_names.len()
    }

    /// Passes the next event.
    pub fn step(&mut self) {
        let Some(event) = self.history.get(self.at) else { return };
        self.at += 1;
        match event {
            Event::Changed(file, change) => self.pending.entry(*file).or_default().push(change),
            Event::Synced(file) => {
                let contents = self.durable.files.entry(*file).or_default();
                self.pending.remove(file).unwrap_or_default().into_iter().for_each(|change| contents.apply(change));
            }
            Event::SyncFailed(file) => {
                let contents = self.durable.files.entry(*file).or_default();
                let dice = &mut self.dice;
                for change in self.pending.remove(file).unwrap_or_default() {
                    contents.apply_some(change, &mut |_| dice.percent(50));
                }
            }
            Event::Named(change) => {
                if let NameChange::Make(_, file) = change {
                    self.durable.files.entry(*file).or_default();
                }
                self.pending_names.push(change);
            }
            Event::DirectorySynced(directory) => {
                let names = &mut self.durable.names;
                self.pending_names.retain(|change| {
                    let done = change.is_in(directory);
                    if done {
                        change.apply(names);
                    }
                    !done
                });
            }
            Event::Timed(file, seconds) => {
                self.pending_times.entry(*file).or_default().push(*seconds);
                // The clock goes on whatever a cut loses.
                self.durable.times.get_or_insert_default().clock_seconds += CLOCK_STEP_SECONDS;
            }
            Event::TimeSynced(file) => {
                let last = self.pending_times.remove(file).and_then(|times| times.last().copied());
                let times = self.durable.times.get_or_insert_default();
                times.modified_seconds.extend(last.map(|seconds| (*file, seconds)));
            }
            Event::Truth(number) => self.truth = Some(*number),
        }
    }

    /// A state that a power cut at this point may leave.
    pub fn state_after_cut(&self, mode: CutMode, dice: &mut Dice) -> Snapshot {
        let mut left = self.durable.clone();
        let total = self.pending() as u64;
        let chosen = if total > 0 { dice.below(total) } else { 0 };
        let mut number = 0;
        let several = self.pending.len() > 1;
        let one_file =
            if several { self.pending.keys().nth(dice.below(self.pending.len() as u64) as usize) } else { None };
        for (file, changes) in &self.pending {
            let Some(contents) = left.files.get_mut(file) else { continue };
            let own = if mode == CutMode::OwnMoments { dice.below(changes.len().max(1) as u64) } else { 0 };
            for (of_file, change) in (0..).zip(changes) {
                let is_small = matches!(change, Change::Write(_, bytes) if bytes.len() <= SMALL_BYTES);
                let whole = match mode {
                    CutMode::Nothing => Some(false),
                    CutMode::Everything => Some(true),
                    CutMode::Whole(chance) => Some(dice.percent(chance.into())),
                    CutMode::OneFile if several => Some(one_file == Some(file)),
                    CutMode::AllButOneFile if several => Some(one_file != Some(file)),
                    CutMode::OneFile | CutMode::AllButOneFile => Some(dice.percent(50)),
                    CutMode::Prefix if number == chosen => None,
                    CutMode::Prefix => Some(number < chosen),
                    CutMode::OwnMoments if of_file == own => None,
                    CutMode::OwnMoments => Some(of_file < own),
                    CutMode::Suffix => Some(number > chosen),
                    CutMode::AllButOne => Some(number != chosen),
                    CutMode::OnlyOne => Some(number == chosen),
                    CutMode::Small if is_small => Some(true),
                    CutMode::Large => Some(!is_small),
                    CutMode::Small | CutMode::Sectors(_) | CutMode::NoLengths | CutMode::OnlyLengths => None,
                };
                contents.apply_some(change, &mut |part| match (mode, whole) {
                    (_, Some(kept)) => kept,
                    (CutMode::Sectors(chance), _) => dice.percent(chance.into()),
                    (CutMode::NoLengths, _) => part == Part::Bytes,
                    (CutMode::OnlyLengths | CutMode::Small, _) => part == Part::Length,
                    _ => dice.percent(50),
                });
                number += 1;
            }
        }
        for change in &self.pending_names {
            let kept = match mode {
                CutMode::Nothing | CutMode::NoLengths => false,
                CutMode::Everything | CutMode::OnlyLengths => true,
                CutMode::Prefix => number < chosen,
                CutMode::Suffix => number > chosen,
                CutMode::AllButOne => number != chosen,
                CutMode::OnlyOne => number == chosen,
                _ => dice.percent(50),
            };
            if kept {
                change.apply(&mut left.names);
            }
            number += 1;
        }
        if let Some(times) = &mut left.times {
            for (file, pending) in &self.pending_times {
                let former = times.modified_seconds.get(file).into_iter();
                let possible: Vec<u64> = former.chain(pending).copied().collect();
                let chosen = match mode {
                    CutMode::Nothing => 0,
                    CutMode::Everything => possible.len() - 1,
                    _ => dice.below(possible.len() as u64) as usize,
                };
                times.modified_seconds.insert(*file, possible[chosen]);
            }
        }
        left.files.values_mut().for_each(crate::contents::Contents::settle);
        left
    }
}

/// The points at which a history is cut: before each sync, where most is not durable; after each
/// truth, where a promise was just made; at the end; and at one random point between two syncs.
pub fn points(history: &[Event], dice: &mut Dice) -> BTreeSet<usize> {
    let mut points = BTreeSet::from([history.len()]);
    let mut last = 0;
    for (at, event) in history.iter().enumerate() {
        match event {
            Event::Synced(_) | Event::SyncFailed(_) | Event::DirectorySynced(_) => {
                points.insert(at);
                if at > last + 1 {
                    points.insert(last + dice.below((at - last) as u64) as usize);
                }
                last = at;
            }
            Event::Truth(_) => drop(points.insert(at + 1)),
            Event::Changed(..) | Event::Named(_) | Event::Timed(..) | Event::TimeSynced(_) => {}
        }
    }
    points
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{contents::Contents, history::Times};
    use std::path::{Path, PathBuf};

    fn write(file: FileId, at: u64, byte: u8) -> Event {
        Event::Changed(file, Change::Write(at, vec![byte; 512].into()))
    }

    fn sector(contents: &Contents, number: u64) -> u8 {
        let mut byte = [0];
        contents.read(&mut byte, number * 512);
        byte[0]
    }

    fn start() -> Snapshot {
        let mut contents = Contents::default();
        contents.apply(&Change::Length(4096));
        Snapshot { names: [(PathBuf::from("/f"), 0)].into(), files: [(0, contents)].into(), times: None }
    }

    #[test]
    fn each_file_may_lose_power_at_its_own_moment() {
        let mut start = start();
        start.files.insert(1, start.files[&0].clone());
        let history: Vec<Event> = (0..6).flat_map(|at| [write(0, at * 512, 1), write(1, at * 512, 1)]).collect();
        let mut cutter = Cutter::new(start, &history, 1);
        while cutter.next().is_some() {
            cutter.step();
        }
        let mut dice = Dice::new(1, 1);
        let mut apart = BTreeSet::new();
        for _ in 0..200 {
            let left = cutter.state_after_cut(CutMode::OwnMoments, &mut dice);
            let kept = [0, 1].map(|file| (0..6).filter(|&at| sector(&left.files[&file], at) == 1).count());
            for (file, kept) in kept.iter().enumerate() {
                assert!((0..*kept as u64).all(|at| sector(&left.files[&file], at) == 1), "the first ones survive");
            }
            apart.insert(kept[0].abs_diff(kept[1]));
        }
        assert!(apart.len() > 4, "{apart:?}");
    }

    #[test]
    fn synced_writes_survive_and_all_subsets_of_the_rest_occur() {
        let history = [write(0, 0, 1), Event::Synced(0), write(0, 512, 2), write(0, 1024, 3)];
        let mut cutter = Cutter::new(start(), &history, 1);
        while cutter.next().is_some() {
            cutter.step();
        }
        let mut seen = BTreeSet::new();
        let mut dice = Dice::new(1, 1);
        for round in 0..200 {
            let left = cutter.state_after_cut(CUT_MODES[round % CUT_MODES.len()], &mut dice);
            let contents = left.file(Path::new("/f")).unwrap();
            assert_eq!(sector(contents, 0), 1, "the sector was synced");
            seen.insert((sector(contents, 1), sector(contents, 2)));
        }
        assert_eq!(seen, BTreeSet::from([(0, 0), (2, 0), (0, 3), (2, 3)]));
    }

    #[test]
    fn names_and_contents_are_lost_independently() {
        let new = PathBuf::from("/new");
        let history = [Event::Named(NameChange::Make(new.clone(), 1)), write(1, 0, 9)];
        let mut cutter = Cutter::new(start(), &history, 1);
        cutter.step();
        cutter.step();
        let mut seen = BTreeSet::new();
        let mut dice = Dice::new(2, 1);
        for round in 0..100 {
            let left = cutter.state_after_cut(CUT_MODES[round % CUT_MODES.len()], &mut dice);
            seen.insert(left.file(&new).map(Contents::len_bytes));
        }
        assert_eq!(seen, BTreeSet::from([None, Some(0), Some(512)]));
    }

    /// fdatasync does not write the time, and a cut leaves any of those that the file has had.
    #[test]
    fn a_time_is_durable_only_after_its_own_sync() {
        let timed = |seconds| Event::Timed(0, seconds);
        let seen = |history: &[Event]| {
            let mut cutter = Cutter::new(Snapshot { times: Some(Times::default()), ..start() }, history, 1);
            while cutter.next().is_some() {
                cutter.step();
            }
            let mut dice = Dice::new(3, 1);
            let left = (0..100).map(|round| cutter.state_after_cut(CUT_MODES[round % CUT_MODES.len()], &mut dice));
            left.map(|left| left.times.unwrap().modified_seconds[&0]).collect::<BTreeSet<_>>()
        };
        let all = [timed(3), Event::TimeSynced(0), write(0, 0, 1), timed(6), Event::Synced(0), timed(9)];
        assert_eq!(seen(&all), BTreeSet::from([3, 6, 9]));
        let last = [timed(3), timed(6), Event::Synced(0), Event::TimeSynced(0)];
        assert_eq!(seen(&last), BTreeSet::from([6]));
    }

    #[test]
    fn a_failed_sync_loses_writes_permanently() {
        let history = [write(0, 0, 1), write(0, 512, 1), Event::SyncFailed(0), Event::Synced(0)];
        let mut lost = 0;
        for seed in 0..20 {
            let mut cutter = Cutter::new(start(), &history, seed);
            while cutter.next().is_some() {
                cutter.step();
            }
            let left = cutter.state_after_cut(CutMode::Everything, &mut Dice::new(seed, 2));
            lost += usize::from(sector(left.file(Path::new("/f")).unwrap(), 0) == 0);
        }
        assert!((1..20).contains(&lost));
    }
}
