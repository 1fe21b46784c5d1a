//! By how much: Hodges and Lehmann's estimate, and the interval of all shifts that the rank test would not reject.
//!
//! Given logarithms, a shift is a ratio. The interval belongs to the test: it leaves out 0 exactly when the test, uncorrected, finds a difference.
//!
//! Weak for few rounds: no interval can be surer than the smallest p-value allows (five pairs: 93.75 %), so the confidence that was really
//! reached comes with it. And "the shift" takes the two to differ by a shift alone; where one also scatters more, it is the middle of the differences.

use super::ranks::{sums_of_chosen, sums_of_coins};
use crate::stats::{Interval, median};
use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, Normal};

/// Beyond so many values ranks are taken as normal.
const EXACT_UP_TO: usize = 50;
/// Beyond so many differences the estimate would cost more than it is worth; rounds are never so many.
const PAIRS_MAX: usize = 4_000_000;

/// An estimate and its interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Shift {
    /// The estimate.
    pub estimate: f64,
    /// Where it lies, with the confidence below.
    pub interval: Interval,
    /// The confidence that the interval really has: at least what was asked for, or less when so few values can give no more.
    pub confidence: f64,
}

/// Hodges and Lehmann's middle of `values`: the median of their pairwise means. `None` for none, or when one is not a number.
pub fn middle(values: &[f64]) -> Option<f64> {
    median(&pairwise_means(values)?)
}

fn pairwise_means(values: &[f64]) -> Option<Vec<f64>> {
    let n = values.len();
    if n == 0 || n.checked_mul(n + 1)? / 2 > PAIRS_MAX {
        return None;
    }
    let mut means = Vec::with_capacity(n * (n + 1) / 2);
    for (index, a) in values.iter().enumerate() {
        means.extend(values[index..].iter().map(|b| (a + b) / 2.0));
    }
    Some(means)
}

/// The middle of `differences`: the median of their pairwise means. `None` for none, or when one is not a number.
pub fn paired_shift(differences: &[f64], confidence: f64) -> Option<Shift> {
    let means = pairwise_means(differences)?;
    let n = differences.len();
    let tail = (1.0 - confidence) / 2.0;
    let (cut, reached) = if n <= EXACT_UP_TO {
        exact_cut(&sums_of_coins(&(1..=n).collect::<Vec<_>>()), 0, tail)
    } else {
        let n = n as f64;
        normal_cut(n * (n + 1.0) / 4.0, n * (n + 1.0) * (2.0 * n + 1.0) / 24.0, confidence)
    };
    between(means, cut, reached)
}

/// How far `ours` lie above `base`: the median of all differences between the two. `None` when one of them is empty, or something
/// is not a number.
pub fn unpaired_shift(ours: &[f64], base: &[f64], confidence: f64) -> Option<Shift> {
    let (n, m) = (ours.len(), base.len());
    if n == 0 || m == 0 || n.checked_mul(m)? > PAIRS_MAX {
        return None;
    }
    let differences: Vec<f64> = ours.iter().flat_map(|ours| base.iter().map(move |base| ours - base)).collect();
    let tail = (1.0 - confidence) / 2.0;
    let (cut, reached) = if n + m <= EXACT_UP_TO {
        exact_cut(&sums_of_chosen(&(1..=n + m).collect::<Vec<_>>(), n), n * (n + 1) / 2, tail)
    } else {
        let (n, m) = (n as f64, m as f64);
        normal_cut(n * m / 2.0, n * m * (n + m + 1.0) / 12.0, confidence)
    };
    between(differences, cut, reached)
}

/// How many of the sorted differences are cut off at each end, at least 1 being left to cut at: the most for which each tail keeps
/// `tail`; and the confidence that this reaches. `least` is the smallest possible sum.
fn exact_cut(distribution: &[f64], least: usize, tail: f64) -> (usize, f64) {
    let (mut below, mut cut) = (0.0, 0);
    // The end of the interval is the (cut + 1)-th difference; it is passed with the probability of a sum of `cut` or less.
    for share in distribution.iter().skip(least) {
        if below + share > tail {
            break;
        }
        below += share;
        cut += 1;
    }
    if cut == 0 {
        // Not even the extremes are so sure.
        let extreme = distribution.get(least).copied().unwrap_or(1.0);
        return (0, (1.0 - 2.0 * extreme).max(0.0));
    }
    (cut - 1, 1.0 - 2.0 * below)
}

fn normal_cut(mean: f64, variance: f64, confidence: f64) -> (usize, f64) {
    let z = Normal::standard().inverse_cdf(1.0 - (1.0 - confidence) / 2.0);
    ((mean - z * variance.sqrt() - 0.5).floor().max(0.0) as usize, confidence)
}

fn between(mut differences: Vec<f64>, cut: usize, confidence: f64) -> Option<Shift> {
    let estimate = median(&differences)?;
    differences.sort_by(f64::total_cmp);
    let cut = cut.min((differences.len() - 1) / 2);
    let interval = Interval { low: differences[cut], high: differences[differences.len() - 1 - cut] };
    Some(Shift { estimate, interval, confidence })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inference::{mann_whitney, wilcoxon_signed_rank};
    use proptest::prelude::*;
    use rand_xoshiro::{
        Xoshiro256PlusPlus,
        rand_core::{Rng, SeedableRng},
    };

    fn close(ours: f64, theirs: f64) {
        assert!((ours - theirs).abs() < 1e-9, "{ours} instead of {theirs}");
    }

    /// R: `wilcox.test(x, y, conf.int = TRUE)` on Hollander and Wolfe's permeability data.
    #[test]
    fn two_groups_as_in_hollander_and_wolfe() {
        let term = [0.80, 0.83, 1.89, 1.04, 1.45, 1.38, 1.91, 1.64, 0.73, 1.46];
        let early = [1.15, 0.88, 0.90, 0.74, 1.21];
        let shift = unpaired_shift(&term, &early, 0.95).unwrap();
        close(shift.estimate, 0.305);
        close(shift.interval.low, -0.15);
        close(shift.interval.high, 0.76);
        assert!((0.95..0.97).contains(&shift.confidence), "{shift:?}");
    }

    /// R: `wilcox.test(x, y, paired = TRUE, conf.int = TRUE)` on the depression data.
    #[test]
    #[allow(clippy::approx_constant, reason = "3.14 is what was measured")]
    fn pairs_as_in_hollander_and_wolfe() {
        let before = [1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30];
        let after = [0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29];
        let differences: Vec<f64> = before.iter().zip(after).map(|(before, after)| before - after).collect();
        let shift = paired_shift(&differences, 0.95).unwrap();
        close(shift.estimate, 0.46);
        close(shift.interval.low, 0.01);
        close(shift.interval.high, 0.786);
        close(shift.confidence, 1.0 - 2.0 * 10.0 / 512.0);
    }

    #[test]
    fn few_values_say_how_sure_they_are() {
        let shift = paired_shift(&[1.0, 2.0, 3.0, 4.0, 5.0], 0.95).unwrap();
        assert_eq!((shift.interval.low, shift.interval.high, shift.confidence), (1.0, 5.0, 0.9375));
        let alone = paired_shift(&[2.0], 0.95).unwrap();
        assert_eq!((alone.estimate, alone.confidence), (2.0, 0.0));
        let two = unpaired_shift(&[3.0], &[1.0], 0.95).unwrap();
        assert_eq!((two.estimate, two.confidence), (2.0, 0.0));
        assert_eq!((paired_shift(&[], 0.95), unpaired_shift(&[1.0], &[], 0.95)), (None, None));
    }

    #[test]
    fn intervals_cover_the_true_shift_as_often_as_they_say() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(3);
        // Skewed noise: the square of a uniform number. Both sides have it, and the true shift is 1.
        let mut noise = || ((rng.next_u64() >> 11) as f64 / (1_u64 << 53) as f64).powi(2);
        let (mut paired, mut unpaired, trials) = (0, 0, 1000);
        for _ in 0..trials {
            let base: Vec<f64> = (0..10).map(|_| noise()).collect();
            let ours: Vec<f64> = (0..10).map(|_| 1.0 + noise()).collect();
            let differences: Vec<f64> = ours.iter().zip(&base).map(|(ours, base)| ours - base).collect();
            let inside = |shift: Shift| u32::from(shift.interval.low <= 1.0 && 1.0 <= shift.interval.high);
            paired += inside(paired_shift(&differences, 0.95).unwrap());
            unpaired += inside(unpaired_shift(&ours, &base, 0.95).unwrap());
        }
        // Five standard deviations around 95 %.
        for covered in [paired, unpaired] {
            assert!((915..=985).contains(&covered), "paired {paired}, unpaired {unpaired} of {trials}");
        }
    }

    proptest! {
        /// The interval and the test are one thing said twice.
        #[test]
        fn zero_is_outside_exactly_when_the_test_rejects(values in prop::collection::vec(-30.0_f64..40.0, 6..20)) {
            // Values without ties, which exact intervals assume.
            let distinct = |values: &[f64]| values.iter().map(|v| v.abs().to_bits()).collect::<std::collections::HashSet<_>>().len() == values.len();
            prop_assume!(distinct(&values) && !values.contains(&0.0));
            let shift = paired_shift(&values, 0.95).unwrap();
            let outside = shift.interval.low > 0.0 || shift.interval.high < 0.0;
            prop_assert_eq!(outside, wilcoxon_signed_rank(&values).unwrap().p <= 0.05);
            let (ours, base) = values.split_at(values.len() / 2);
            let shift = unpaired_shift(ours, base, 0.95).unwrap();
            if shift.confidence >= 0.95 {
                let outside = shift.interval.low > 0.0 || shift.interval.high < 0.0;
                prop_assert_eq!(outside, mann_whitney(ours, base).unwrap().p <= 0.05);
            }
        }
    }
}
