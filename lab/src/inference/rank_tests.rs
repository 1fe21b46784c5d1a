//! Whether two targets differ at all.
//!
//! [`mann_whitney`] takes two groups of rounds that have nothing to do with each other (two saved results); [`wilcoxon_signed_rank`] takes
//! differences within rounds (an A/B of interleaved rounds), where drift has fallen on both alike, and sees smaller differences.
//!
//! Where they are weak. Both ask whether one tends to be larger, not by how much: with many rounds a difference that nobody would feel
//! has a small p-value, so read it beside the shift. Mann-Whitney also answers to a difference in spread alone. The signed rank test
//! takes differences to be symmetric around their middle, which differences of two targets in the same round nearly are.

use super::ranks::{both_tails, ranks, sums_of_chosen, sums_of_coins};
use statrs::distribution::{ContinuousCDF, Normal};

/// Up to so many values both tests count exactly; beyond it the normal approximation is good to three digits.
const EXACT_UP_TO: usize = 50;

/// What a rank test found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankTest {
    /// U of the first group, or the sum of the positive ranks.
    pub statistic: f64,
    /// Probability of a statistic at least as far out if nothing differs; two-sided.
    pub p: f64,
    /// Whether `p` is exact; else it comes from the normal approximation with corrections for ties and continuity.
    pub exact: bool,
}

/// Mann and Whitney's U. `None` when a group is empty or something is not a number.
pub fn mann_whitney(first: &[f64], second: &[f64]) -> Option<RankTest> {
    let all: Vec<f64> = first.iter().chain(second).copied().collect();
    if first.is_empty() || second.is_empty() || all.iter().any(|value| value.is_nan()) {
        return None;
    }
    let (n, m) = (first.len() as f64, second.len() as f64);
    let found = ranks(&all);
    let doubled_sum: usize = found.doubled[..first.len()].iter().sum();
    let statistic = doubled_sum as f64 / 2.0 - n * (n + 1.0) / 2.0;
    if all.len() <= EXACT_UP_TO {
        let p = both_tails(&sums_of_chosen(&found.doubled, first.len()), doubled_sum);
        return Some(RankTest { statistic, p, exact: true });
    }
    let total = n + m;
    let variance = n * m / 12.0 * (total + 1.0 - found.tie_term / (total * (total - 1.0)));
    Some(RankTest { statistic, p: normal_p(statistic - n * m / 2.0, variance), exact: false })
}

/// Wilcoxon's signed rank test of whether `differences` lie around 0. Differences of exactly 0 say nothing and are left out; if all
/// are 0, nothing differs and p is 1. `None` for none, or when one is not a number.
pub fn wilcoxon_signed_rank(differences: &[f64]) -> Option<RankTest> {
    if differences.is_empty() || differences.iter().any(|value| value.is_nan()) {
        return None;
    }
    let told: Vec<f64> = differences.iter().copied().filter(|value| *value != 0.0).collect();
    let found = ranks(&told.iter().map(|value| value.abs()).collect::<Vec<_>>());
    let positive = found.doubled.iter().zip(&told).filter(|(_, value)| **value > 0.0).map(|(rank, _)| rank);
    let doubled_sum: usize = positive.sum();
    let statistic = doubled_sum as f64 / 2.0;
    if told.len() <= EXACT_UP_TO {
        let p = both_tails(&sums_of_coins(&found.doubled), doubled_sum);
        return Some(RankTest { statistic, p, exact: true });
    }
    let n = told.len() as f64;
    let variance = n * (n + 1.0) * (2.0 * n + 1.0) / 24.0 - found.tie_term / 48.0;
    Some(RankTest { statistic, p: normal_p(statistic - n * (n + 1.0) / 4.0, variance), exact: false })
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

fn normal_p(distance: f64, variance: f64) -> f64 {
    if variance <= 0.0 {
        return 1.0;
    }
    let z = (distance.abs() - 0.5).max(0.0) / variance.sqrt();
    (2.0 * Normal::standard().sf(z)).min(1.0)
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

    /// Hollander and Wolfe's permeability of membranes; R's help of `wilcox.test` has W = 35, p = 0.1272 on one side.
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

    #[test]
    fn the_approximation_continues_the_exact_test() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(7);
        // Few distinct values, so that there are many ties.
        let mut draw = |upper: u64, n: usize| -> Vec<f64> { (0..n).map(|_| (rng.next_u64() % upper) as f64).collect() };
        for _ in 0..20 {
            let (first, second) = (draw(9, 25), draw(11, 25));
            let exact = mann_whitney(&first, &second).unwrap();
            assert!(exact.exact);
            let all: Vec<f64> = first.iter().chain(&second).copied().collect();
            let (n, ties) = (25.0, ranks(&all).tie_term);
            let variance = n * n / 12.0 * (51.0 - ties / (50.0 * 49.0));
            assert!((exact.p - normal_p(exact.statistic - n * n / 2.0, variance)).abs() < 0.02, "{exact:?}");
        }
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

        /// The definition itself: over every choice of a group among the pooled values.
        #[test]
        fn the_exact_p_is_the_share_of_all_choices(values in prop::collection::vec(0_i32..6, 2..9), split in 1_usize..8) {
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
