//! Median, spread and confidence interval of the rounds of a benchmark; ratios of two targets.
//!
//! A measurement on a shared machine has few rounds, drift, and a skewed distribution: other load
//! slows a round down, and nothing speeds one up. The centre is therefore the median, and the
//! spread is given by min, max and median absolute deviation. Two targets are compared by the ratio
//! *within* each round, because drift affects both targets of a round alike. The median of these
//! ratios is the result.

use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use serde::{Deserialize, Serialize};
use statrs::distribution::{Binomial, ContinuousCDF, DiscreteCDF, StudentsT};

/// Summary of several rounds of one figure, in the unit of that figure.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Summary {
    /// Number of rounds.
    pub rounds: usize,
    /// Median of the rounds.
    pub median: f64,
    /// Smallest round.
    pub min: f64,
    /// Largest round.
    pub max: f64,
    /// Median absolute deviation from the median; not scaled to a normal distribution's deviation.
    pub mad: f64,
}

impl Summary {
    /// Summarises `values`. `None` when `values` is empty or contains NaN.
    pub fn of(values: &[f64]) -> Option<Self> {
        let median = median(values)?;
        let deviations: Vec<f64> = values.iter().map(|value| (value - median).abs()).collect();
        Some(Self {
            rounds: values.len(),
            median,
            min: values.iter().copied().fold(f64::INFINITY, f64::min),
            max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            mad: self::median(&deviations)?,
        })
    }

    /// Max minus min, as a share of the median; 0 when the median is 0.
    pub fn spread(&self) -> f64 {
        if self.median == 0.0 { 0.0 } else { (self.max - self.min) / self.median.abs() }
    }
}

/// A confidence interval. The function that returns it says which confidence it has.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// The median; of an even number of values, the mean of the two in the middle. `None` when `values`
/// is empty or contains NaN.
pub fn median(values: &[f64]) -> Option<f64> {
    if values.is_empty() || values.iter().any(|value| value.is_nan()) {
        return None;
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    Some(if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 })
}

/// `ours[i] / base[i]` for each round. Rounds that one side lacks, or in which `base` is 0, are
/// left out.
pub fn ratios(ours: &[f64], base: &[f64]) -> Vec<f64> {
    ours.iter().zip(base).filter(|(_, base)| **base > 0.0).map(|(ours, base)| ours / base).collect()
}

/// Confidence interval of the median of the distribution that `values` were drawn from, with the
/// confidence `confidence` (0.95).
///
/// - With 6 values or more (for 0.95) the ends are order statistics: the median lies below the k-th
///   smallest of n values with the probability of fewer than k heads in n coin tosses. The interval
///   has at least the confidence that was asked for, for every distribution.
/// - With 2 to 5 values even min and max have less confidence (3 values: 75 %). The interval is
///   then Student's t interval around the mean, widened to min and max. It has the confidence that
///   was asked for where the values are normal, 2 to 3 percentage points less where they are
///   uniform or skewed, and never less than min and max have.
/// - `None` for fewer than 2 values, and when one is not finite.
///
/// A percentile bootstrap was rejected: it cannot exceed the range of the values, and of three
/// values it covered 75 %.
pub fn median_interval(values: &[f64], confidence: f64) -> Option<Interval> {
    if values.len() < 2 || values.iter().any(|value| !value.is_finite()) {
        return None;
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (n, last, tail) = (sorted.len(), sorted.len() - 1, (1.0 - confidence) / 2.0);
    let coins = Binomial::new(0.5, n as u64).ok()?;
    // The number of values that are left out at each end.
    let left_out = (0..n as u64 / 2).take_while(|heads| coins.cdf(*heads) <= tail).count();
    if left_out > 0 {
        return Some(Interval { low: sorted[left_out - 1], high: sorted[n - left_out] });
    }
    let mean = sorted.iter().sum::<f64>() / n as f64;
    let variance = sorted.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / last as f64;
    let reach = StudentsT::new(0.0, 1.0, last as f64).ok()?.inverse_cdf(1.0 - tail) * (variance / n as f64).sqrt();
    Some(Interval { low: (mean - reach).min(sorted[0]), high: (mean + reach).max(sorted[last]) })
}

/// The order in which `targets` are measured in `round`. Even rounds are shuffled by `seed`; an odd
/// round is the round before in reverse order.
///
/// The reverse order makes a drift that is linear over the two rounds affect every target alike
/// (the ABBA design). The shuffle keeps a target from always following the same other target, whose
/// data would then be in the device's cache.
pub fn round_order(targets: usize, round: usize, seed: u64) -> Vec<usize> {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed ^ (round / 2) as u64);
    let mut order: Vec<usize> = (0..targets).collect();
    for left in (1..targets).rev() {
        order.swap(left, (rng.next_u64() % (left as u64 + 1)) as usize);
    }
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn one_outlier_does_not_move_the_median() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        // One round in which another guest took the disk: the mean would be 27.
        assert_eq!(median(&[10.0, 11.0, 9.0, 95.0, 10.0]), Some(10.0));
        assert_eq!((median(&[]), median(&[1.0, f64::NAN])), (None, None));
    }

    #[test]
    fn a_summary_has_median_min_max_and_mad() {
        let summary = Summary::of(&[90.0, 100.0, 130.0]).unwrap();
        assert_eq!((summary.median, summary.min, summary.max, summary.mad), (100.0, 90.0, 130.0, 10.0));
        assert!((summary.spread() - 0.4).abs() < 1e-12);
        assert_eq!(Summary::of(&[0.0, 0.0]).unwrap().spread(), 0.0);
    }

    #[test]
    fn ratios_within_rounds_cancel_drift() {
        // The machine halves its speed after the second round. `ours` is always 5 % slower than
        // `base`, so that the ratio within each round is 0.95.
        let base = [100.0, 100.0, 50.0, 50.0];
        let ours: Vec<f64> = base.iter().map(|value| value * 0.95).collect();
        assert!((median(&ratios(&ours, &base)).unwrap() - 0.95).abs() < 1e-12);
        // A round in which the base is 0 has no ratio.
        assert_eq!(ratios(&[1.0, 2.0], &[0.0, 4.0]), [0.5]);
        assert!(ratios(&[1.0], &[0.0]).is_empty());
    }

    #[test]
    fn intervals_use_order_statistics_from_six_values_on_and_students_t_below() {
        let ends = |values: &[f64], confidence| median_interval(values, confidence).map(|ends| (ends.low, ends.high));
        assert_eq!(ends(&[0.97; 9], 0.95), Some((0.97, 0.97)));
        // Six values: the median is outside with 2 / 2^6. Nine: the second value of each end, with
        // 2 * (1 + 9) / 2^9.
        assert_eq!(ends(&[6.0, 1.0, 2.0, 4.0, 3.0, 5.0], 0.95), Some((1.0, 6.0)));
        assert_eq!(ends(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0], 0.95), Some((2.0, 8.0)));
        // R: t.test(c(1, 2, 3)) has -0.484138 to 4.484138.
        let (low, high) = ends(&[1.0, 2.0, 3.0], 0.95).unwrap();
        assert!((low + 0.484_138).abs() < 1e-6 && (high - 4.484_138).abs() < 1e-6, "{low} {high}");
        // One outlier: Student's t alone would end below it for 80 %.
        assert_eq!(ends(&[1.0, 1.0, 1.0, 9.0], 0.80).unwrap().1, 9.0);
        assert_eq!((ends(&[1.0], 0.95), ends(&[], 0.95), ends(&[1.0, f64::NAN], 0.95)), (None, None, None));
    }

    /// Simulates how often the interval covers the true median, 0, for 2 to 20 values of a normal,
    /// a uniform and an exponential distribution.
    #[test]
    fn intervals_of_few_values_have_the_coverage_that_they_claim() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(42);
        let mut uniform = || ((rng.next_u64() >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
        let trials = 2000;
        for n in [2, 3, 4, 5, 6, 9, 20] {
            for shape in ["normal", "uniform", "exponential"] {
                let mut draw = || match shape {
                    "normal" => (0..12).map(|_| uniform()).sum::<f64>() - 6.0,
                    "uniform" => uniform() - 0.5,
                    _ => -uniform().ln() - std::f64::consts::LN_2,
                };
                let covered = (0..trials).filter(|_| {
                    let values: Vec<f64> = (0..n).map(|_| draw()).collect();
                    let ends = median_interval(&values, 0.95).unwrap();
                    ends.low <= 0.0 && 0.0 <= ends.high
                });
                let covered = covered.count();
                // Three standard deviations below 95 %. Student's t is exact for normal values and
                // covers a few percentage points less on others.
                let least = if shape != "normal" && n < 6 { 0.915 } else { 0.935 };
                assert!(covered as f64 >= least * f64::from(trials), "{n} {shape} values: {covered} of {trials}");
            }
        }
    }

    proptest! {
        #[test]
        fn orders_are_permutations_and_odd_rounds_reverse_the_round_before(targets in 1_usize..12, pair in 0_usize..20, seed: u64) {
            let there = round_order(targets, pair * 2, seed);
            let mut back = round_order(targets, pair * 2 + 1, seed);
            back.reverse();
            prop_assert_eq!(&there, &back);
            let mut sorted = there;
            sorted.sort_unstable();
            prop_assert_eq!(sorted, (0..targets).collect::<Vec<_>>());
        }

        #[test]
        fn the_median_lies_between_min_and_max(values in prop::collection::vec(-1e9_f64..1e9, 1..30)) {
            let summary = Summary::of(&values).unwrap();
            prop_assert!(summary.min <= summary.median && summary.median <= summary.max && summary.mad >= 0.0);
        }
    }
}
