//! The fewest values with which a test corrected by Holm can reject.
//!
//! A rank test of `n` values has a smallest p-value: that of values without overlap. Holm
//! multiplies the smallest p-value of a family of tests by the number of tests. Where the product
//! is not below [`SIGNIFICANT`], no measurement can show a difference. The caller then makes no
//! test, or reports "too few rounds", never "no difference".

use super::{smallest_paired_p, smallest_unpaired_p};

/// Significance level: a corrected p-value below it means that the two sides differ.
pub const SIGNIFICANT: f64 = 0.05;

/// Whether the values of two sides are pairs or independent groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Design {
    /// Value n of one side was measured in the same round as value n of the other: signed-rank
    /// test.
    Paired,
    /// Two independent groups: Mann-Whitney test.
    Unpaired,
}

impl Design {
    /// The smallest p-value that a test of `base` and `ours` values can give. Paired, the number of
    /// pairs is the smaller of the two.
    pub fn smallest_p(self, base: usize, ours: usize) -> f64 {
        match self {
            Self::Paired => smallest_paired_p(base.min(ours)),
            Self::Unpaired => smallest_unpaired_p(base, ours),
        }
    }

    /// Whether a test of `base` and `ours` values can show a difference when `family` tests are
    /// corrected together by Holm.
    pub fn can_show(self, base: usize, ours: usize, family: usize) -> bool {
        self.smallest_p(base, ours) * (family as f64) < SIGNIFICANT
    }

    /// The fewest values of each side with which one of `family` tests can show a difference: 6
    /// pairs for one test, 8 for five.
    pub fn fewest(self, family: usize) -> usize {
        (2..).find(|values| self.can_show(*values, *values, family)).unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inference::{holm, mann_whitney, wilcoxon_signed_rank};

    /// With the fewest values, the corrected test of values without overlap rejects; with one value
    /// less it does not.
    #[test]
    fn the_corrected_test_rejects_with_the_fewest_values_and_not_with_one_less() {
        let far = |values: usize| (0..values).map(|value| 100.0 + value as f64).collect::<Vec<_>>();
        let near = |values: usize| (0..values).map(|value| value as f64).collect::<Vec<_>>();
        for family in 1..40 {
            let rejects = |p: f64| holm(&vec![p; family])[0] < SIGNIFICANT;
            let paired = |values: usize| rejects(wilcoxon_signed_rank(&far(values)).unwrap().p);
            let unpaired = |values: usize| rejects(mann_whitney(&far(values), &near(values)).unwrap().p);
            let (pairs, groups) = (Design::Paired.fewest(family), Design::Unpaired.fewest(family));
            assert!(paired(pairs) && !paired(pairs - 1), "{family} tests of {pairs} pairs");
            assert!(unpaired(groups) && !unpaired(groups - 1), "{family} tests of two groups of {groups}");
        }
        assert_eq!([1, 3, 5, 9].map(|family| Design::Paired.fewest(family)), [6, 7, 8, 9]);
        assert_eq!([1, 5].map(|family| Design::Unpaired.fewest(family)), [4, 5]);
    }
}
