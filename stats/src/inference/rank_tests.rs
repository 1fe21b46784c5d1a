//! Rank tests: whether two sets of rounds differ.
//!
//! [`mann_whitney`] takes two independent groups of rounds, such as two saved results.
//! [`wilcoxon_signed_rank`] takes differences within rounds, when two targets were measured in
//! turns. Drift affects both targets of a round alike, so the paired test detects smaller
//! differences.
//!
//! Limits: both tests say whether one side tends to be larger, not by how much. With many rounds a
//! difference too small to matter has a small p-value, so read the p-value beside the shift.
//! Mann-Whitney also rejects when only the spread differs. The signed-rank test assumes differences
//! that are symmetric around their centre. Differences of two targets in the same round nearly are.

use super::ranks::{NullDistribution, RankDifferences, all_differences, pairwise_means};

/// Result of a rank test.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankTest {
    /// U of the first group, or the sum of the positive ranks; a difference of 0 counts one half.
    pub statistic: f64,
    /// Two-sided p-value; conservative where values are equal.
    pub p: f64,
    /// Whether `p` comes from the exact null distribution; else from the normal approximation with
    /// continuity correction.
    pub exact: bool,
}

impl RankTest {
    fn of(differences: &RankDifferences) -> Self {
        Self { statistic: differences.statistic(), p: differences.p(), exact: differences.is_exact() }
    }
}

/// Mann-Whitney U test of two groups. `None` when a group is empty, when a value is NaN, or for
/// more than 4 million pairs.
pub fn mann_whitney(first: &[f64], second: &[f64]) -> Option<RankTest> {
    let null = NullDistribution::mann_whitney(first.len(), second.len());
    Some(RankTest::of(&RankDifferences::new(all_differences(first, second)?, null)?))
}

/// Wilcoxon signed-rank test of the hypothesis that `differences` are centred on 0. Differences of
/// exactly 0 are kept, as in [`super::paired_shift`], because such rounds are evidence for no
/// difference (Pratt 1959). When all are 0, p is 1. `None` when `differences` is empty, contains
/// NaN, or has more than 2,827 values.
pub fn wilcoxon_signed_rank(differences: &[f64]) -> Option<RankTest> {
    let null = NullDistribution::signed_rank(differences.len());
    Some(RankTest::of(&RankDifferences::new(pairwise_means(differences)?, null)?))
}

/// The smallest p-value that a test of `pairs` pairs can give.
pub fn smallest_paired_p(pairs: usize) -> f64 {
    2.0_f64.powi(1 - i32::try_from(pairs).unwrap_or(i32::MAX)).min(1.0)
}

/// The smallest p-value that two groups of these sizes can give.
pub fn smallest_unpaired_p(first: usize, second: usize) -> f64 {
    let (few, all) = (first.min(second), first + second);
    // 2 / (all over few)
    let choices = (0..few).fold(1.0, |product, index| product * (all - index) as f64 / (index + 1) as f64);
    (2.0 / choices).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand_xoshiro::{
        Xoshiro256PlusPlus,
        rand_core::{Rng, SeedableRng},
    };

    fn close(ours: f64, theirs: f64) {
        assert!((ours - theirs).abs() < 5e-5 * theirs.abs().max(1e-3), "{ours} instead of {theirs}");
    }

    /// Hollander and Wolfe's permeability data; R's help of `wilcox.test` has W = 35, p = 0.1272,
    /// one-sided.
    #[test]
    fn mann_whitney_agrees_with_r() {
        let term = [0.80, 0.83, 1.89, 1.04, 1.45, 1.38, 1.91, 1.64, 0.73, 1.46];
        let early = [1.15, 0.88, 0.90, 0.74, 1.21];
        let test = mann_whitney(&term, &early).unwrap();
        assert_eq!((test.statistic, test.exact), (35.0, true));
        close(test.p, 2.0 * 0.127_206_127);
    }

    /// Hollander and Wolfe's depression data; R: V = 40, p = 0.03906.
    #[test]
    #[allow(clippy::approx_constant, reason = "3.14 is a value of the data")]
    fn signed_rank_agrees_with_r() {
        let before = [1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30];
        let after = [0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29];
        let differences: Vec<f64> = before.iter().zip(after).map(|(before, after)| before - after).collect();
        let test = wilcoxon_signed_rank(&differences).unwrap();
        assert_eq!((test.statistic, test.exact), (40.0, true));
        close(test.p, 0.039_062_5);
    }

    #[test]
    fn equal_values_have_a_p_of_one_and_empty_input_has_none() {
        assert_eq!(wilcoxon_signed_rank(&[0.0; 8]).unwrap().p, 1.0);
        assert_eq!(mann_whitney(&[5.0; 8], &[5.0; 8]).unwrap().p, 1.0);
        assert_eq!(mann_whitney(&[5.0; 80], &[5.0; 80]).unwrap().p, 1.0);
        assert_eq!((wilcoxon_signed_rank(&[]), mann_whitney(&[1.0], &[])), (None, None));
        assert_eq!(wilcoxon_signed_rank(&[f64::NAN]), None);
    }

    #[test]
    fn the_smallest_p_value_is_that_of_values_without_overlap() {
        assert_eq!(wilcoxon_signed_rank(&[1.0, 2.0, 3.0, 4.0, 5.0]).unwrap().p, smallest_paired_p(5));
        assert_eq!([1, 5, 6].map(smallest_paired_p), [1.0, 0.0625, 0.03125]);
        assert_eq!(mann_whitney(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0]).unwrap().p, 0.1);
        close(smallest_unpaired_p(3, 3), 0.1);
        close(smallest_unpaired_p(1, 1), 1.0);
    }

    /// 50 values are tested exactly, and 51 by the normal approximation. The two p-values must be
    /// close.
    #[test]
    fn the_normal_approximation_agrees_with_the_exact_test() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(7);
        let mut draw = |n: usize| -> Vec<f64> { (0..n).map(|_| (rng.next_u64() >> 11) as f64).collect() };
        for _ in 0..20 {
            let (first, mut second) = (draw(25), draw(25));
            let exact = mann_whitney(&first, &second).unwrap();
            second.push(crate::summary::median(&first).unwrap());
            let normal = mann_whitney(&first, &second).unwrap();
            assert!(exact.exact && !normal.exact);
            assert!((exact.p - normal.p).abs() < 0.02, "{exact:?} {normal:?}");
        }
    }

    /// Both sides have one distribution with many ties. The tests must not reject more often than
    /// their level.
    #[test]
    fn the_tests_keep_their_level_with_many_ties() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(11);
        let mut draw = |n: usize| -> Vec<f64> { (0..n).map(|_| (rng.next_u64() % 3) as f64 - 1.0).collect() };
        let (mut paired, mut unpaired, trials) = (0, 0, 2000);
        for _ in 0..trials {
            paired += u32::from(wilcoxon_signed_rank(&draw(12)).unwrap().p < 0.05);
            unpaired += u32::from(mann_whitney(&draw(9), &draw(9)).unwrap().p < 0.05);
        }
        // 5 % of the trials are 100; the bound is five standard deviations above.
        assert!(paired <= 150 && unpaired <= 150, "paired {paired}, unpaired {unpaired} of {trials}");
        // Ten rounds without a difference and two with one: no significant difference.
        let mostly_zero = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0, 4.0];
        assert_eq!(wilcoxon_signed_rank(&mostly_zero).unwrap().p, 1.0);
    }

    proptest! {
        #[test]
        fn swapping_the_sides_does_not_change_p(
            first in prop::collection::vec(-50_i32..50, 1..12), second in prop::collection::vec(-50_i32..50, 1..12)) {
            let real = |values: &[i32]| values.iter().map(|value| f64::from(*value)).collect::<Vec<_>>();
            let (first, second) = (real(&first), real(&second));
            let (there, back) = (mann_whitney(&first, &second).unwrap(), mann_whitney(&second, &first).unwrap());
            prop_assert!((there.p - back.p).abs() < 1e-9);
            prop_assert_eq!(there.statistic + back.statistic, (first.len() * second.len()) as f64);
            let mirrored: Vec<f64> = first.iter().map(|value| -value).collect();
            let (there, back) = (wilcoxon_signed_rank(&first).unwrap(), wilcoxon_signed_rank(&mirrored).unwrap());
            prop_assert!((there.p - back.p).abs() < 1e-9);
        }

        /// The definition of p, by counting all choices of a group among pooled values that differ.
        #[test]
        fn the_exact_p_is_the_share_of_choices_at_least_as_extreme(values in prop::collection::hash_set(0_i32..60, 2..9), split in 1_usize..8) {
            let values: Vec<f64> = values.into_iter().map(f64::from).collect();
            let split = split.min(values.len() - 1);
            let test = mann_whitney(&values[..split], &values[split..]).unwrap();
            let u = |mask: u32| {
                let side = |inside: bool| values.iter().enumerate().filter(move |(i, _)| (mask >> i & 1 == 1) == inside);
                side(true).flat_map(|(_, a)| side(false).map(move |(_, b)| f64::from(u8::from(a > b)) + 0.5 * f64::from(u8::from(a == b)))).sum::<f64>()
            };
            let all: Vec<f64> = (0..1_u32 << values.len()).filter(|mask| mask.count_ones() as usize == split).map(u).collect();
            let below = all.iter().filter(|other| **other <= test.statistic).count() as f64 / all.len() as f64;
            let above = all.iter().filter(|other| **other >= test.statistic).count() as f64 / all.len() as f64;
            prop_assert!((test.p - (2.0 * below.min(above)).min(1.0)).abs() < 1e-9, "{:?}", test);
        }
    }
}
