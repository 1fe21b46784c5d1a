//! A sample of many runs, for a test that must end soon. Every group of runs (kind of fault, kind
//! of operation, phase) is in it, and each group is sampled evenly from its first run to its last.
//!
//! ```text
//!   runs, sorted by group:   A A A A A A A A A B B B C C C C C C C C C C D
//!   one in four:             ·   ^       ^       ^       ^       ^
//!   a group without a run:                                             + D
//! ```

use crate::{campaign::from_environment, dice::Dice};
use std::{collections::BTreeMap, fmt};

/// Runs of each workload, unless the environment asks for another number.
const RUNS: usize = 120;

/// How many runs are taken, and with which seed they are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// About how many; `None` for all.
    runs: Option<usize>,
    seed: u64,
}

impl Sample {
    /// All runs.
    pub const ALL: Self = Self { runs: None, seed: 0 };

    /// What `DISKWRIGHT_PROVE_FAULTS` and `DISKWRIGHT_PROVE_FIRST` ask for.
    pub fn of_environment() -> Self {
        let seed = from_environment("DISKWRIGHT_PROVE_FIRST").unwrap_or(1);
        let runs = match std::env::var("DISKWRIGHT_PROVE_FAULTS") {
            Ok(word) if word == "all" => None,
            Ok(word) => Some(word.parse().unwrap_or(RUNS)),
            Err(_) => Some(RUNS),
        };
        Self { runs, seed }
    }

    /// The sample, in the order of `all`. It has about as many runs as asked for, and at least one
    /// of each group.
    pub fn of<T: Clone, G: Ord>(self, all: &[T], group: impl Fn(&T) -> G) -> Vec<T> {
        let Some(runs) = self.runs.filter(|&runs| runs < all.len()) else { return all.to_vec() };
        let mut dice = Dice::new(self.seed, 0x5a3e);
        let mut groups: BTreeMap<G, Vec<usize>> = BTreeMap::new();
        for (index, one) in all.iter().enumerate() {
            groups.entry(group(one)).or_default().push(index);
        }
        // Runs are passed group by group; one is taken whenever this share of them has passed.
        let mut due = dice.below(all.len() as u64) as usize;
        let mut taken = Vec::new();
        for members in groups.values() {
            let before = taken.len();
            for &member in members {
                due += runs;
                if due >= all.len() {
                    due -= all.len();
                    taken.push(member);
                }
            }
            if taken.len() == before {
                taken.push(*dice.pick(members));
            }
        }
        taken.sort_unstable();
        taken.into_iter().map(|index| all[index].clone()).collect()
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.runs {
            None => write!(f, "all of them"),
            Some(runs) => write!(f, "DISKWRIGHT_PROVE_FAULTS={runs}, DISKWRIGHT_PROVE_FIRST={}", self.seed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(runs: usize, seed: u64) -> Sample {
        Sample { runs: Some(runs), seed }
    }

    #[test]
    fn every_group_is_in_a_sample_and_it_is_spread_evenly() {
        let all: Vec<usize> = (0..1000).collect();
        // The last group has one member.
        let group = |number: &usize| if *number == 999 { 9 } else { number % 3 };
        for seed in 1..50 {
            let taken = sample(100, seed).of(&all, group);
            assert!((100..=101).contains(&taken.len()), "{}", taken.len());
            assert!(taken.contains(&999) && taken.is_sorted());
            for number in 0..3 {
                let members: Vec<usize> = taken.iter().copied().filter(|one| group(one) == number).collect();
                assert!((32..=35).contains(&members.len()), "{members:?}");
                assert!(members.windows(2).all(|pair| pair[1] - pair[0] <= 33), "{members:?}");
            }
        }
        assert_ne!(sample(100, 1).of(&all, group), sample(100, 2).of(&all, group));
    }

    #[test]
    fn a_small_number_is_taken_whole() {
        let all = [3, 1, 2];
        assert_eq!(sample(3, 1).of(&all, |_| 0), all);
        assert_eq!(Sample::ALL.of(&all, |_| 0), all);
        assert_eq!(sample(0, 1).of(&all, |number| *number).len(), 3);
    }
}
