//! Null distributions of rank sums, and the sorted differences from which rank tests and their
//! intervals are computed.
//!
//! The null distributions assume that all values differ. Equal values do not get midranks:
//! [`RankDifferences`] says how they count.

use crate::summary::Interval;
use statrs::distribution::{ContinuousCDF, Normal};

/// Up to this many values the null distribution is exact. Beyond it the normal approximation has
/// three correct digits.
const EXACT_UP_TO: usize = 50;
/// Maximum number of differences that a test computes, as a bound on its memory and time.
const DIFFERENCES_MAX: usize = 4_000_000;

/// The differences of a rank test, sorted: all pairwise means (signed rank), or all values of one
/// group minus all values of the other (Mann-Whitney).
///
/// The sum of the positive ranks is the number of pairwise means above 0, and U is the number of
/// differences above 0. The test and its interval are computed from one list, so that they cannot
/// contradict each other: the end of the interval is the difference at which the test starts to
/// reject. A difference of exactly 0 counts against a rejection on both sides. That is
/// conservative: if an infinitely small noise broke the ties, the exact test of the noisy values
/// would have a p-value no larger than this one.
pub struct RankDifferences {
    differences: Vec<f64>,
    null: NullDistribution,
}

/// The distribution of the number of differences below 0 when the two sides do not differ.
pub enum NullDistribution {
    /// Probability of each number, from 0.
    Exact(Vec<f64>),
    /// Mean and variance of the normal approximation.
    Normal { mean: f64, variance: f64 },
}

impl NullDistribution {
    /// For the pairwise means of `n` values.
    pub fn signed_rank(n: usize) -> Self {
        if n <= EXACT_UP_TO {
            return Self::Exact(subset_sums(&(1..=n).collect::<Vec<_>>()));
        }
        let n = n as f64;
        Self::Normal { mean: n * (n + 1.0) / 4.0, variance: n * (n + 1.0) * (2.0 * n + 1.0) / 24.0 }
    }

    /// For the differences between `n` values and `m` values.
    pub fn mann_whitney(n: usize, m: usize) -> Self {
        if n + m <= EXACT_UP_TO {
            let mut sums = sums_of_n(&(1..=n + m).collect::<Vec<_>>(), n);
            // U is the rank sum minus its smallest value.
            sums.drain(..n * (n + 1) / 2);
            return Self::Exact(sums);
        }
        let (n, m) = (n as f64, m as f64);
        Self::Normal { mean: n * m / 2.0, variance: n * m * (n + m + 1.0) / 12.0 }
    }

    /// Probability of at most `count` differences below 0.
    fn up_to(&self, count: usize) -> f64 {
        match self {
            Self::Exact(shares) => shares.iter().take(count.saturating_add(1)).sum(),
            Self::Normal { mean, variance } => {
                Normal::standard().cdf((count as f64 - mean + 0.5).min(0.0) / variance.sqrt())
            }
        }
    }
}

impl RankDifferences {
    /// `None` when `differences` is empty or contains NaN.
    pub fn new(mut differences: Vec<f64>, null: NullDistribution) -> Option<Self> {
        if differences.is_empty() || differences.iter().any(|difference| difference.is_nan()) {
            return None;
        }
        differences.sort_by(f64::total_cmp);
        Some(Self { differences, null })
    }

    /// Whether p-values are exact.
    pub fn is_exact(&self) -> bool {
        matches!(self.null, NullDistribution::Exact(_))
    }

    /// The number of differences above 0; a difference of exactly 0 counts one half.
    pub fn statistic(&self) -> f64 {
        let (below, up_to) = self.around_zero();
        let all = self.differences.len();
        (all - up_to) as f64 + (up_to - below) as f64 / 2.0
    }

    /// Two-sided p-value of the hypothesis that the shift is 0.
    pub fn p(&self) -> f64 {
        let (below, up_to) = self.around_zero();
        // The number of differences on the rarer side, if every 0 lies there.
        let count = up_to.min(self.differences.len() - below);
        (2.0 * self.null.up_to(count)).min(1.0)
    }

    /// The interval of all shifts that the test would not reject, and the confidence that the
    /// interval reaches. That is less than `confidence` where there are too few values for it.
    pub fn interval(&self, confidence: f64) -> (Interval, f64) {
        let tail = (1.0 - confidence) / 2.0;
        let (cut, reached) = match &self.null {
            NullDistribution::Exact(_) => {
                let cuts = (0..self.differences.len()).take_while(|count| self.null.up_to(*count) <= tail).count();
                let cut = cuts.saturating_sub(1);
                (cut, (1.0 - 2.0 * self.null.up_to(cut)).max(0.0))
            }
            NullDistribution::Normal { mean, variance } => {
                let z = Normal::standard().inverse_cdf(1.0 - tail);
                let cut = (mean - z * variance.sqrt() - 0.5).floor().max(0.0) as usize;
                // One value against fifty: not even the whole range reaches the confidence.
                (cut, confidence.min(1.0 - 2.0 * self.null.up_to(cut)).max(0.0))
            }
        };
        let last = self.differences.len() - 1;
        let cut = cut.min(last / 2);
        (Interval { low: self.differences[cut], high: self.differences[last - cut] }, reached)
    }

    /// The median of the differences.
    pub fn estimate(&self) -> f64 {
        let last = self.differences.len() - 1;
        (self.differences[last / 2] + self.differences[last - last / 2]) / 2.0
    }

    /// The number of differences below 0, and the number at or below 0.
    fn around_zero(&self) -> (usize, usize) {
        let below = self.differences.partition_point(|difference| *difference < 0.0);
        (below, self.differences.partition_point(|difference| *difference <= 0.0))
    }
}

/// All pairwise means, each value with itself included. `None` when `values` is empty or would give
/// more than [`DIFFERENCES_MAX`] means.
pub fn pairwise_means(values: &[f64]) -> Option<Vec<f64>> {
    let n = values.len();
    if n == 0 || n.checked_mul(n + 1)? / 2 > DIFFERENCES_MAX {
        return None;
    }
    let mut means = Vec::with_capacity(n * (n + 1) / 2);
    for (index, a) in values.iter().enumerate() {
        means.extend(values[index..].iter().map(|b| (a + b) / 2.0));
    }
    Some(means)
}

/// Each value of `ours` minus each value of `base`. `None` when one of them is empty, or for more
/// than [`DIFFERENCES_MAX`] differences.
pub fn all_differences(ours: &[f64], base: &[f64]) -> Option<Vec<f64>> {
    let all = ours.len().checked_mul(base.len()).filter(|all| (1..=DIFFERENCES_MAX).contains(all))?;
    let mut differences = Vec::with_capacity(all);
    for ours in ours {
        differences.extend(base.iter().map(|base| ours - base));
    }
    Some(differences)
}

/// Distribution of the sum of `chosen` items when every choice of that many items is equally
/// likely: element `s` is the probability of the sum `s`.
fn sums_of_n(items: &[usize], chosen: usize) -> Vec<f64> {
    let most: usize = items.iter().sum();
    // ways[c][s]: the number of choices of c items with the sum s. It is a float, so that it cannot
    // overflow.
    let mut ways = vec![vec![0.0; most + 1]; chosen + 1];
    ways[0][0] = 1.0;
    for (taken, item) in items.iter().enumerate() {
        for count in (1..=chosen.min(taken + 1)).rev() {
            let (fewer, more) = ways.split_at_mut(count);
            for sum in *item..=most {
                more[0][sum] += fewer[count - 1][sum - item];
            }
        }
    }
    let mut sums = ways.swap_remove(chosen);
    let all: f64 = sums.iter().sum();
    sums.iter_mut().for_each(|ways| *ways /= all);
    sums
}

/// Distribution of the sum of a random subset, in which each item is with probability 1/2.
fn subset_sums(items: &[usize]) -> Vec<f64> {
    let most: usize = items.iter().sum();
    let mut shares = vec![0.0; most + 1];
    shares[0] = 1.0;
    for item in items {
        for sum in (0..=most).rev() {
            let taken = if sum >= *item { shares[sum - item] } else { 0.0 };
            shares[sum] = (shares[sum] + taken) / 2.0;
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_null_distributions_equal_those_counted_by_hand() {
        // Two of {1, 2, 3}: sums 3, 4, 5, each once.
        let third = 1.0 / 3.0;
        assert_eq!(sums_of_n(&[1, 2, 3], 2), [0.0, 0.0, 0.0, third, third, third, 0.0]);
        // Subsets of {1, 2}: sums 0, 1, 2, 3.
        assert_eq!(subset_sums(&[1, 2]), [0.25; 4]);
    }
}
