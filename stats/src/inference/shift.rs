//! Hodges-Lehmann estimate of the shift between two sides, with the interval of all shifts that the
//! rank test would not reject.
//!
//! For logarithms, a shift is a ratio. The interval and the uncorrected test always agree: 0 is
//! outside the interval exactly when the test rejects, also with ties and differences of 0, because
//! both are computed from one list ([`RankDifferences`]).
//!
//! Limits: with few rounds no interval has more confidence than the smallest p-value allows (five
//! pairs: 93.75 %). [`Shift`] therefore carries the confidence that was reached. The estimate
//! assumes that the two sides differ by a shift alone; where the spread differs too, the estimate
//! is the centre of the differences.

use super::ranks::{NullDistribution, RankDifferences, all_differences, pairwise_means};
use crate::summary::{Interval, median};
use serde::{Deserialize, Serialize};

/// An estimated shift with its confidence interval, in the unit of the values.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Shift {
    /// Hodges-Lehmann estimate.
    pub estimate: f64,
    /// Confidence interval of the shift, with `confidence`.
    pub interval: Interval,
    /// The confidence that the interval has, from 0 to 1: at least what was asked for, or less
    /// where there are too few values for that.
    pub confidence: f64,
}

/// Hodges-Lehmann estimate of the centre of `values`: the median of their pairwise means. `None`
/// when `values` is empty, contains NaN, or has more than 2,827 values.
pub fn hodges_lehmann(values: &[f64]) -> Option<f64> {
    median(&pairwise_means(values)?)
}

/// Shift between pairs, from the difference of each pair: the median of the pairwise means of
/// `differences`. `None` when `differences` is empty, contains NaN, or has more than 2,827 values.
pub fn paired_shift(differences: &[f64], confidence: f64) -> Option<Shift> {
    let null = NullDistribution::signed_rank(differences.len());
    Some(Shift::of(&RankDifferences::new(pairwise_means(differences)?, null)?, confidence))
}

/// Shift of `ours` against `base`, two independent groups: the median of all differences between a
/// value of `ours` and a value of `base`. `None` when a group is empty, when a value is NaN, or for
/// more than 4 million pairs.
pub fn unpaired_shift(ours: &[f64], base: &[f64], confidence: f64) -> Option<Shift> {
    let null = NullDistribution::mann_whitney(ours.len(), base.len());
    Some(Shift::of(&RankDifferences::new(all_differences(ours, base)?, null)?, confidence))
}

impl Shift {
    fn of(differences: &RankDifferences, confidence: f64) -> Self {
        let (interval, confidence) = differences.interval(confidence);
        Self { estimate: differences.estimate(), interval, confidence }
    }
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
    fn unpaired_shifts_agree_with_r() {
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
    #[allow(clippy::approx_constant, reason = "3.14 is a value of the data")]
    fn paired_shifts_agree_with_r() {
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
    fn few_values_reach_less_confidence_than_asked_for() {
        let shift = paired_shift(&[1.0, 2.0, 3.0, 4.0, 5.0], 0.95).unwrap();
        assert_eq!((shift.interval.low, shift.interval.high, shift.confidence), (1.0, 5.0, 0.9375));
        let alone = paired_shift(&[2.0], 0.95).unwrap();
        assert_eq!((alone.estimate, alone.confidence), (2.0, 0.0));
        let two = unpaired_shift(&[3.0], &[1.0], 0.95).unwrap();
        assert_eq!((two.estimate, two.confidence), (2.0, 0.0));
        assert_eq!((paired_shift(&[], 0.95), unpaired_shift(&[1.0], &[], 0.95)), (None, None));
    }

    #[test]
    fn intervals_of_shifts_have_the_coverage_that_they_claim() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(3);
        // Skewed noise: the square of a uniform number. Both sides have it, and the true shift is
        // 1.
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

    #[test]
    fn one_value_against_fifty_reaches_less_confidence_than_asked_for() {
        let shift = unpaired_shift(&[-1.0], &[0.0; 50], 0.95).unwrap();
        let p = mann_whitney(&[-1.0], &[0.0; 50]).unwrap().p;
        assert!(p > 0.05 && (shift.confidence - (1.0 - p)).abs() < 1e-12, "{shift:?} {p}");
    }

    proptest! {
        /// Interval and test agree, also with ties and differences of 0. `p` is compared with the
        /// confidence that the interval reached.
        #[test]
        fn zero_is_outside_the_interval_exactly_when_the_test_rejects(
            values in prop::collection::vec(prop_oneof![(-6_i32..8).prop_map(f64::from), -6.0_f64..8.0], 1..56), split in 0_usize..56) {
            let agree = |shift: Shift, p: f64| {
                // One value has no interval of any confidence.
                let outside = shift.interval.low > 0.0 || shift.interval.high < 0.0 || shift.confidence == 0.0;
                prop_assert_eq!(outside, p <= 1.0 - shift.confidence + 1e-12, "{:?} {}", shift, p);
                Ok(())
            };
            for confidence in [0.8, 0.95, 0.99] {
                agree(paired_shift(&values, confidence).unwrap(), wilcoxon_signed_rank(&values).unwrap().p)?;
                let (ours, base) = values.split_at(split.min(values.len()));
                let Some(test) = mann_whitney(ours, base) else { continue };
                agree(unpaired_shift(ours, base, confidence).unwrap(), test.p)?;
            }
        }
    }

    /// Eight rounds without a difference and six with one. A test that drops the eight rejects
    /// (p = 0.031), although the interval, which keeps them, starts at 0.
    #[test]
    fn differences_of_zero_count_in_the_test_and_in_the_interval() {
        let values = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let (shift, test) = (paired_shift(&values, 0.95).unwrap(), wilcoxon_signed_rank(&values).unwrap());
        assert_eq!(shift.interval.low, 0.0);
        assert!(test.p > 0.05, "{test:?}");
    }
}
