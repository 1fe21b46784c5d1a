//! The power fails: which states of the files that allows.
//!
//! ```text
//!   durable, and then          write A   length   write B   zero C │ sync ...
//!                                 │        │         │        │
//!   of each:  kept, lost, or kept by some of its 512-byte sectors; a length by itself, apart from the bytes
//! ```
//!
//! A disk and a file system may carry out what was not yet synced in any order and stop anywhere,
//! so any subset of it may be there. (An order of two writes to one sector that is turned round is
//! a subset too: the one in which the later write is lost.) Most random subsets are alike, so there
//! are several [`Way`]s of choosing, each good at another kind of mistake.

use crate::{
    contents::{Change, Part},
    dice::Dice,
    history::{Event, FileId, NameChange, Snapshot},
};
use std::collections::{BTreeMap, BTreeSet};

/// How what survives is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Nothing that was not synced.
    Nothing,
    /// All of it.
    Everything,
    /// Each sector, and each length, with this chance in a hundred.
    Sectors(u8),
    /// Each operation as a whole, with this chance in a hundred.
    Whole(u8),
    /// In order, up to some operation, which is torn.
    Prefix,
    /// Only what came after some operation.
    Suffix,
    /// All but one operation.
    AllButOne,
    /// Only one operation.
    OnlyOne,
    /// Small writes (tables, mostly), and not large ones (payload, mostly).
    Small,
    /// Large writes and not small ones.
    Large,
    /// Bytes, but no change of a length.
    NoLengths,
    /// Lengths, but no bytes.
    OnlyLengths,
    /// All of one file, and nothing of the others. Each operation by itself where one file has
    /// changed.
    OneFile,
    /// Nothing of one file, and all of the others; as before.
    AllButOneFile,
}

/// All ways, those that find most first.
pub const WAYS: [Way; 18] = [
    Way::Nothing,
    Way::Everything,
    Way::Whole(50),
    Way::Sectors(50),
    Way::Prefix,
    Way::Small,
    Way::Suffix,
    Way::AllButOne,
    Way::OneFile,
    Way::Sectors(90),
    Way::OnlyOne,
    Way::Large,
    Way::NoLengths,
    Way::Whole(85),
    Way::Sectors(10),
    Way::OnlyLengths,
    Way::AllButOneFile,
    Way::Whole(15),
];

/// Writes up to this size are small.
const SMALL_BYTES: usize = 4096;

/// Follows a history, and tells at every point of it what is durable and what is not.
#[derive(Debug)]
pub struct Cutter<'a> {
    history: &'a [Event],
    at: usize,
    durable: Snapshot,
    pending: BTreeMap<FileId, Vec<&'a Change>>,
    pending_names: Vec<&'a NameChange>,
    /// The truth that holds here.
    pub truth: Option<usize>,
    dice: Dice,
}

impl<'a> Cutter<'a> {
    /// At the beginning of a history.
    pub fn new(start: Snapshot, history: &'a [Event], seed: u64) -> Self {
        Self {
            history,
            at: 0,
            durable: start,
            pending: BTreeMap::new(),
            pending_names: Vec::new(),
            truth: None,
            dice: Dice::new(seed, 0xc07),
        }
    }

    /// How many events lie behind.
    pub fn at(&self) -> usize {
        self.at
    }

    /// The next event, if there is one.
    pub fn next(&self) -> Option<&'a Event> {
        self.history.get(self.at)
    }

    /// How many changes are not durable.
    pub fn pending(&self) -> usize {
        self.pending.values().map(Vec::len).sum::<usize>() + self.pending_names.len()
    }

    /// Goes past the next event.
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
            Event::Truth(number) => self.truth = Some(*number),
        }
    }

    /// What is left if the power fails here.
    pub fn ruin(&self, way: Way, dice: &mut Dice) -> Snapshot {
        let mut left = self.durable.clone();
        let total = self.pending() as u64;
        let chosen = if total > 0 { dice.below(total) } else { 0 };
        let mut number = 0;
        let several = self.pending.len() > 1;
        let one_file =
            if several { self.pending.keys().nth(dice.below(self.pending.len() as u64) as usize) } else { None };
        for (file, changes) in &self.pending {
            let Some(contents) = left.files.get_mut(file) else { continue };
            for change in changes {
                let is_small = matches!(change, Change::Write(_, bytes) if bytes.len() <= SMALL_BYTES);
                let whole = match way {
                    Way::Nothing => Some(false),
                    Way::Everything => Some(true),
                    Way::Whole(chance) => Some(dice.percent(chance.into())),
                    Way::OneFile if several => Some(one_file == Some(file)),
                    Way::AllButOneFile if several => Some(one_file != Some(file)),
                    Way::OneFile | Way::AllButOneFile => Some(dice.percent(50)),
                    Way::Prefix if number == chosen => None,
                    Way::Prefix => Some(number < chosen),
                    Way::Suffix => Some(number > chosen),
                    Way::AllButOne => Some(number != chosen),
                    Way::OnlyOne => Some(number == chosen),
                    Way::Small if is_small => Some(true),
                    Way::Large => Some(!is_small),
                    Way::Small | Way::Sectors(_) | Way::NoLengths | Way::OnlyLengths => None,
                };
                contents.apply_some(change, &mut |part| match (way, whole) {
                    (_, Some(kept)) => kept,
                    (Way::Sectors(chance), _) => dice.percent(chance.into()),
                    (Way::NoLengths, _) => part == Part::Bytes,
                    (Way::OnlyLengths | Way::Small, _) => part == Part::Length,
                    _ => dice.percent(50),
                });
                number += 1;
            }
        }
        for change in &self.pending_names {
            let kept = match way {
                Way::Nothing | Way::NoLengths => false,
                Way::Everything | Way::OnlyLengths => true,
                Way::Prefix => number < chosen,
                Way::Suffix => number > chosen,
                Way::AllButOne => number != chosen,
                Way::OnlyOne => number == chosen,
                _ => dice.percent(50),
            };
            if kept {
                change.apply(&mut left.names);
            }
            number += 1;
        }
        left.files.values_mut().for_each(crate::contents::Contents::settle);
        left
    }
}

/// The points at which a history is cut: before each sync, where most is at stake; at each truth,
/// where a promise has just been made; at the end; and one more in each stretch between.
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
            Event::Changed(..) | Event::Named(_) => {}
        }
    }
    points
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contents::Contents;
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
        Snapshot { names: [(PathBuf::from("/f"), 0)].into(), files: [(0, contents)].into() }
    }

    #[test]
    fn what_was_synced_stays_and_every_subset_of_the_rest_can_be() {
        let history = [write(0, 0, 1), Event::Synced(0), write(0, 512, 2), write(0, 1024, 3)];
        let mut cutter = Cutter::new(start(), &history, 1);
        while cutter.next().is_some() {
            cutter.step();
        }
        let mut seen = BTreeSet::new();
        let mut dice = Dice::new(1, 1);
        for round in 0..200 {
            let left = cutter.ruin(WAYS[round % WAYS.len()], &mut dice);
            let contents = left.file(Path::new("/f")).unwrap();
            assert_eq!(sector(contents, 0), 1, "it was synced");
            seen.insert((sector(contents, 1), sector(contents, 2)));
        }
        assert_eq!(seen, BTreeSet::from([(0, 0), (2, 0), (0, 3), (2, 3)]));
    }

    #[test]
    fn names_and_contents_are_lost_apart() {
        let new = PathBuf::from("/new");
        let history = [Event::Named(NameChange::Make(new.clone(), 1)), write(1, 0, 9)];
        let mut cutter = Cutter::new(start(), &history, 1);
        cutter.step();
        cutter.step();
        let mut seen = BTreeSet::new();
        let mut dice = Dice::new(2, 1);
        for round in 0..100 {
            let left = cutter.ruin(WAYS[round % WAYS.len()], &mut dice);
            seen.insert(left.file(&new).map(Contents::len_bytes));
        }
        assert_eq!(seen, BTreeSet::from([None, Some(0), Some(512)]));
    }

    #[test]
    fn a_failed_sync_loses_for_good() {
        let history = [write(0, 0, 1), write(0, 512, 1), Event::SyncFailed(0), Event::Synced(0)];
        let mut lost = 0;
        for seed in 0..20 {
            let mut cutter = Cutter::new(start(), &history, seed);
            while cutter.next().is_some() {
                cutter.step();
            }
            let left = cutter.ruin(Way::Everything, &mut Dice::new(seed, 2));
            lost += usize::from(sector(left.file(Path::new("/f")).unwrap(), 0) == 0);
        }
        assert!((1..20).contains(&lost));
    }
}
