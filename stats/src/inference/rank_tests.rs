//! Whether two targets differ at all.
//!
//! [`mann_whitney`] takes two groups of rounds that have nothing to do with each other (two saved
//! results); [`wilcoxon_signed_rank`] takes differences within rounds (an A/B of interleaved
//! rounds), where drift has fallen on both alike, and sees smaller differences.
//!
//! Where they are weak. Both ask whether one tends to be larger, not by how much: with many rounds
//! a difference that nobody would feel has a small p-value, so read it beside the shift.
//! Mann-Whitney also answers to a difference in spread alone. The signed rank test takes
//! differences to be symmetric around their middle, which differences of two targets in the same
//! round nearly are.

use super::ranks::{Counted, Null, all_differences, pairwise_means};

/// What a rank test found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankTest {
    /// U of the first group, or the sum of the positive ranks; equal values share a rank, a
    /// difference of 0 counts half.
    pub statistic: f64,
    /// Probability of a statistic at least as far out if nothing differs; two-sided; conservative
    /// where values are equal.
    pub p: f64,
    /// Whether `p` is exact but for equal values; else it comes from the normal approximation,
    /// corrected for continuity.
    pub exact: bool,
}

impl RankTest {
    fn of(counted: &Counted) -> Self {
        Self { statistic: counted.statistic(), p: counted.p(), exact: counted.is_exact() }
    }
}

/// Mann and Whitney's U. `None` when a group is empty, something is not a number, or there are more
/// than 4 million pairs.
pub fn mann_whitney(first: &[f64], second: &[f64]) -> Option<RankTest> {
    let null = Null::mann_whitney(first.len(), second.len());
    Some(RankTest::of(&Counted::new(all_differences(first, second)?, null)?))
}

/// Wilcoxon's signed rank test of whether `differences` lie around 0. Differences of exactly 0 are
/// kept, as in [`super::paired_shift`]: rounds in which nothing differs speak for no difference
/// (Pratt 1959). If all are 0, p is 1. `None` for none, when one is not a number, or for more than
/// 2,827.
pub fn wilcoxon_signed_rank(differences: &[f64]) -> Option<RankTest> {
    let null = Null::signed_rank(differences.len());
    Some(RankTest::of(&Counted::new(pairwise_means(differences)?, null)?))
}

/// The smallest p-value that so many pairs can give.
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

    /// Hollander and Wolfe's permeability of membranes; R's help of `wilcox.test` has W = 35, p =
    /// 0.1272 on one side.
    #[test]
    fn mann_whitney_as_in_hollander_and_wolfe() {
        let term = [0.80, 0.83, 1.89, 1.04, 1.45, 1.38, 1.91, 1.64, 0.73, 1.46];
        let early = [1.15, 0.88, 0.90, 0.74, 1.21];
        let test = mann_whitney(&term, &early).unwrap();
        assert_eq!((test.statistic, test.exact), (35.0, true));
        close(test.p, 2.0 * 0.127_206_127);
    }

    /// Hollander and Wolfe's depression scale; R: V = 40, p = 0.03906.
    #[test]
    #[allow(clippy::approx_constant, reason = "3.14 is what was measured")]
    fn signed_rank_as_in_hollander_and_wolfe() {
        let before = [1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30];
        let after = [0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29];
        let differences: Vec<f64> = before.iter().zip(after).map(|(before, after)| before - after).collect();
        let test = wilcoxon_signed_rank(&differences).unwrap();
        assert_eq!((test.statistic, test.exact), (40.0, true));
        close(test.p, 0.039_062_5);
    }

    #[test]
    fn nothing_that_differs_has_a_p_of_one() {
        assert_eq!(wilcoxon_signed_rank(&[0.0; 8]).unwrap().p, 1.0);
        assert_eq!(mann_whitney(&[5.0; 8], &[5.0; 8]).unwrap().p, 1.0);
        assert_eq!(mann_whitney(&[5.0; 80], &[5.0; 80]).unwrap().p, 1.0);
        assert_eq!((wilcoxon_signed_rank(&[]), mann_whitney(&[1.0], &[])), (None, None));
        assert_eq!(wilcoxon_signed_rank(&[f64::NAN]), None);
    }

    #[test]
    fn few_rounds_cannot_show_anything() {
        assert_eq!(wilcoxon_signed_rank(&[1.0, 2.0, 3.0, 4.0, 5.0]).unwrap().p, smallest_paired_p(5));
        assert_eq!([1, 5, 6].map(smallest_paired_p), [1.0, 0.0625, 0.03125]);
        assert_eq!(mann_whitney(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0]).unwrap().p, 0.1);
        close(smallest_unpaired_p(3, 3), 0.1);
        close(smallest_unpaired_p(1, 1), 1.0);
    }

    /// One value more makes 51 and the normal approximation; the p-values of neighbours lie close
    /// together.
    #[test]
    fn the_approximation_continues_the_exact_test() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(7);
        let mut draw = |n: usize| -> Vec<f64> { (0..n).map(|_| (rng.next_u64() >> 11) as f64).collect() };
        for _ in 0..20 {
            let (first, mut second) = (draw(25), draw(25));
            let exact = mann_whitney(&first, &second).unwrap();
            let middle = crate::summary::median(&first).unwrap();
            second.push(middle);
            let normal = mann_whitney(&first, &second).unwrap();
            assert!(exact.exact && !normal.exact);
            assert!((exact.p - normal.p).abs() < 0.02, "{exact:?} {normal:?}");
        }
    }

    /// Nothing differs, and values are equal more often than not: the test must not reject more
    /// often than it says.
    #[test]
    fn equal_values_make_no_difference() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(11);
        let mut draw = |n: usize| -> Vec<f64> { (0..n).map(|_| (rng.next_u64() % 3) as f64 - 1.0).collect() };
        let (mut paired, mut unpaired, trials) = (0, 0, 2000);
        for _ in 0..trials {
            paired += u32::from(wilcoxon_signed_rank(&draw(12)).unwrap().p < 0.05);
            unpaired += u32::from(mann_whitney(&draw(9), &draw(9)).unwrap().p < 0.05);
        }
        // 5 % are 100; five standard deviations above that.
        assert!(paired <= 150 && unpaired <= 150, "paired {paired}, unpaired {unpaired} of {trials}");
        // Ten rounds without any difference and two with one show nothing.
        let mostly_zero = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0, 4.0];
        assert_eq!(wilcoxon_signed_rank(&mostly_zero).unwrap().p, 1.0);
    }

    proptest! {
        #[test]
        fn both_tests_do_not_care_which_side_is_first(
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

        /// The definition itself: over every choice of a group among the pooled values, which are
        /// all different.
        #[test]
        fn the_exact_p_is_the_share_of_all_choices(values in prop::collection::hash_set(0_i32..60, 2..9), split in 1_usize..8) {
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
