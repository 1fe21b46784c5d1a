//! Statistics between rounds. Pure functions: numbers in, numbers out.
//!
//! A measurement on a shared machine has few rounds, a skewed distribution (something may slow a round down, nothing speeds
//! one up) and drift. So the centre is the median, the spread is told as it was seen, and two targets are compared by the
//! ratio *within* each round, where drift has hit both alike; the median of those ratios is the answer.

use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use serde::{Deserialize, Serialize};

/// Several rounds of one figure.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// How many.
    pub rounds: usize,
    /// Middle one.
    pub median: f64,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
    /// Median absolute deviation from the median; not scaled to a normal distribution's deviation.
    pub mad: f64,
}

impl Summary {
    /// Summarises `values`; `None` for none, or when one of them is not a number.
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

    /// Distance between the extremes as a share of the median; 0 for a median of 0.
    pub fn spread(&self) -> f64 {
        if self.median == 0.0 { 0.0 } else { (self.max - self.min) / self.median.abs() }
    }
}

/// A range in which a figure lies with some confidence.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// The middle value; of an even number, the mean of the two in the middle. `None` for none, or when one is not a number.
pub fn median(values: &[f64]) -> Option<f64> {
    if values.is_empty() || values.iter().any(|value| value.is_nan()) {
        return None;
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    Some(if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 })
}

/// `ours[i] / base[i]` for each round. Rounds that one of them lacks, or in which the base is 0, are left out.
pub fn ratios(ours: &[f64], base: &[f64]) -> Vec<f64> {
    ours.iter().zip(base).filter(|(_, base)| **base > 0.0).map(|(ours, base)| ours / base).collect()
}

/// The median of the ratios within rounds.
pub fn median_ratio(ours: &[f64], base: &[f64]) -> Option<f64> {
    median(&ratios(ours, base))
}

/// Confidence interval of a median by the percentile bootstrap: the median of as many values drawn with replacement,
/// `resamples` times, and of those medians the middle `confidence` (0.95). The same `seed` gives the same interval.
///
/// Weak for few rounds: it cannot leave the range of what was seen, so with three to five rounds it is little more than that range
/// and covers less than it claims. It is still the honest thing to show, for it assumes no distribution.
pub fn bootstrap_median(values: &[f64], confidence: f64, resamples: usize, seed: u64) -> Option<Interval> {
    median(values)?;
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut draw = vec![0.0; values.len()];
    let mut medians = Vec::with_capacity(resamples);
    for _ in 0..resamples {
        for value in &mut draw {
            *value = values[(rng.next_u64() % values.len() as u64) as usize];
        }
        medians.push(median(&draw)?);
    }
    medians.sort_by(f64::total_cmp);
    let tail = (1.0 - confidence.clamp(0.0, 1.0)) / 2.0;
    let at = |quantile: f64| medians.get(((resamples.saturating_sub(1)) as f64 * quantile).round() as usize).copied();
    Some(Interval { low: at(tail)?, high: at(1.0 - tail)? })
}

/// The order in which `targets` are measured in `round`: shuffled, and every odd round is the one before it backwards.
///
/// Backwards, because then a drift that is steady over the two rounds falls on every target alike (the ABBA design); shuffled,
/// because then no target always follows the same other one and inherits what that one left in the device's cache.
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
    fn the_median_is_the_middle_and_does_not_feel_one_outlier() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        // One round in which another guest took the disk: the mean would be 27.
        assert_eq!(median(&[10.0, 11.0, 9.0, 95.0, 10.0]), Some(10.0));
        assert_eq!((median(&[]), median(&[1.0, f64::NAN])), (None, None));
    }

    #[test]
    fn a_summary_tells_the_extremes() {
        let summary = Summary::of(&[90.0, 100.0, 130.0]).unwrap();
        assert_eq!((summary.median, summary.min, summary.max, summary.mad), (100.0, 90.0, 130.0, 10.0));
        assert!((summary.spread() - 0.4).abs() < 1e-12);
        assert_eq!(Summary::of(&[0.0, 0.0]).unwrap().spread(), 0.0);
    }

    #[test]
    fn ratios_within_rounds_cancel_drift() {
        // The machine halves its speed after the second round. Ours is always 5 % slower. Medians of the absolute figures
        // would compare 95 with 75 here; the ratios within rounds all say 0.95.
        let base = [100.0, 100.0, 50.0, 50.0];
        let ours: Vec<f64> = base.iter().map(|value| value * 0.95).collect();
        assert!((median_ratio(&ours, &base).unwrap() - 0.95).abs() < 1e-12);
        // A round in which the base did nothing says nothing.
        assert_eq!(ratios(&[1.0, 2.0], &[0.0, 4.0]), [0.5]);
        assert_eq!(median_ratio(&[1.0], &[0.0]), None);
    }

    #[test]
    fn the_bootstrap_is_narrow_for_equal_rounds_and_wide_for_scattered_ones() {
        let same = bootstrap_median(&[0.97; 9], 0.95, 500, 1).unwrap();
        assert_eq!((same.low, same.high), (0.97, 0.97));
        let values = [0.80, 0.85, 0.90, 0.95, 1.0, 1.05, 1.10, 1.15, 1.20];
        let wide = bootstrap_median(&values, 0.95, 2000, 1).unwrap();
        assert!(wide.low < 1.0 && wide.high > 1.0 && wide.low >= 0.80 && wide.high <= 1.20);
        let narrower = bootstrap_median(&values, 0.50, 2000, 1).unwrap();
        assert!(narrower.low >= wide.low && narrower.high <= wide.high);
        assert_eq!(bootstrap_median(&values, 0.95, 2000, 1), Some(wide));
        assert_eq!(bootstrap_median(&[], 0.95, 10, 1), None);
    }

    #[test]
    fn the_bootstrap_covers_about_as_often_as_it_says() {
        // Uniform numbers on [0, 1): the true median is 0.5. With 21 rounds the percentile bootstrap covers a little less
        // than its 95 %; far less would mean a wrong formula, always would mean an interval that says nothing.
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(42);
        let mut covered = 0;
        for trial in 0..200 {
            let values: Vec<f64> = (0..21).map(|_| (rng.next_u64() >> 11) as f64 / (1_u64 << 53) as f64).collect();
            let interval = bootstrap_median(&values, 0.95, 300, trial).unwrap();
            covered += u32::from(interval.low <= 0.5 && 0.5 <= interval.high);
        }
        assert!((175..200).contains(&covered), "covered {covered} of 200");
    }

    proptest! {
        #[test]
        fn orders_are_permutations_and_pairs_mirror(targets in 1_usize..12, pair in 0_usize..20, seed: u64) {
            let there = round_order(targets, pair * 2, seed);
            let mut back = round_order(targets, pair * 2 + 1, seed);
            back.reverse();
            prop_assert_eq!(&there, &back);
            let mut sorted = there;
            sorted.sort_unstable();
            prop_assert_eq!(sorted, (0..targets).collect::<Vec<_>>());
        }

        #[test]
        fn the_median_lies_between_the_extremes(values in prop::collection::vec(-1e9_f64..1e9, 1..30)) {
            let summary = Summary::of(&values).unwrap();
            prop_assert!(summary.min <= summary.median && summary.median <= summary.max && summary.mad >= 0.0);
        }
    }
}
