//! The distribution of rank sums when nothing differs, and what both rank tests and their intervals
//! are counted from.
//!
//! Rank sums are those of values that are all different. Equal values do not get shared ranks: see
//! [`Counted`].

use crate::summary::Interval;
use statrs::distribution::{ContinuousCDF, Normal};

/// Up to so many values both tests count exactly; beyond it the normal approximation is good to
/// three digits.
const EXACT_UP_TO: usize = 50;
/// More differences would cost more than they are worth; rounds are never so many.
pub const DIFFERENCES_MAX: usize = 4_000_000;

/// The differences of a rank test, sorted: all pairwise means (signed rank), or all of one group
/// minus all of the other (U).
///
/// The sum of the positive ranks is the number of means above 0, and U is the number of differences
/// above 0. So the test and its interval are counted from one list, and cannot contradict each
/// other: the end of the interval is the difference at which the test begins to reject. A
/// difference of exactly 0 counts against a rejection on both sides. That is conservative:
/// whichever way an infinitely small noise broke the tie, the test of the noisy values, which is
/// exact, would have a p-value no larger than ours.
pub struct Counted {
    differences: Vec<f64>,
    null: Null,
}

/// How the number of differences below 0 is distributed when nothing differs.
pub enum Null {
    /// Probability of each number, from 0.
    Exact(Vec<f64>),
    /// Its mean and variance.
    Normal { mean: f64, variance: f64 },
}

impl Null {
    /// Of the pairwise means of `n` values.
    pub fn signed_rank(n: usize) -> Self {
        if n <= EXACT_UP_TO {
            return Self::Exact(sums_of_coins(&(1..=n).collect::<Vec<_>>()));
        }
        let n = n as f64;
        Self::Normal { mean: n * (n + 1.0) / 4.0, variance: n * (n + 1.0) * (2.0 * n + 1.0) / 24.0 }
    }

    /// Of the differences between `n` values and `m` values.
    pub fn mann_whitney(n: usize, m: usize) -> Self {
        if n + m <= EXACT_UP_TO {
            let mut sums = sums_of_chosen(&(1..=n + m).collect::<Vec<_>>(), n);
            // From rank sums to U.
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

impl Counted {
    /// `None` for no differences, or when one is not a number.
    pub fn new(mut differences: Vec<f64>, null: Null) -> Option<Self> {
        if differences.is_empty() || differences.iter().any(|difference| difference.is_nan()) {
            return None;
        }
        differences.sort_by(f64::total_cmp);
        Some(Self { differences, null })
    }

    /// Whether p-values are exact.
    pub fn is_exact(&self) -> bool {
        matches!(self.null, Null::Exact(_))
    }

    /// The number of differences above 0, those of exactly 0 counted half.
    pub fn statistic(&self) -> f64 {
        let (below, up_to) = self.around_zero();
        let all = self.differences.len();
        (all - up_to) as f64 + (up_to - below) as f64 / 2.0
    }

    /// Two-sided p-value of a shift of 0.
    pub fn p(&self) -> f64 {
        let (below, up_to) = self.around_zero();
        // At most this many lie on the rarer side, if every 0 lies there.
        let count = up_to.min(self.differences.len() - below);
        (2.0 * self.null.up_to(count)).min(1.0)
    }

    /// All shifts that the test would not reject, and the confidence that they really have: less
    /// than asked for where so few values can give no more.
    pub fn interval(&self, confidence: f64) -> (Interval, f64) {
        let tail = (1.0 - confidence) / 2.0;
        let (cut, reached) = match &self.null {
            Null::Exact(_) => {
                let cuts = (0..self.differences.len()).take_while(|count| self.null.up_to(*count) <= tail).count();
                let cut = cuts.saturating_sub(1);
                (cut, (1.0 - 2.0 * self.null.up_to(cut)).max(0.0))
            }
            Null::Normal { mean, variance } => {
                let z = Normal::standard().inverse_cdf(1.0 - tail);
                ((mean - z * variance.sqrt() - 0.5).floor().max(0.0) as usize, confidence)
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

    /// How many differences lie below 0, and how many at or below it.
    fn around_zero(&self) -> (usize, usize) {
        let below = self.differences.partition_point(|difference| *difference < 0.0);
        (below, self.differences.partition_point(|difference| *difference <= 0.0))
    }
}

/// All pairwise means, each value with itself included; `None` for no values or too many.
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

/// All of `ours` minus all of `base`; `None` when one of them is empty, or for too many.
pub fn all_differences(ours: &[f64], base: &[f64]) -> Option<Vec<f64>> {
    let all = ours.len().checked_mul(base.len()).filter(|all| (1..=DIFFERENCES_MAX).contains(all))?;
    let mut differences = Vec::with_capacity(all);
    for ours in ours {
        differences.extend(base.iter().map(|base| ours - base));
    }
    Some(differences)
}

/// How the sum of the ranks of `chosen` of the items is distributed when every choice is equally
/// likely: element `s` is the probability of the sum `s`.
fn sums_of_chosen(items: &[usize], chosen: usize) -> Vec<f64> {
    let most: usize = items.iter().sum();
    // ways[c][s]: choices of c items with the sum s, as shares, so that no count overflows.
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

/// How the sum is distributed when each item is taken or left with the throw of a coin.
fn sums_of_coins(items: &[usize]) -> Vec<f64> {
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
    fn small_distributions_are_those_counted_by_hand() {
        // Two of {1, 2, 3}: sums 3, 4, 5, each once.
        let third = 1.0 / 3.0;
        assert_eq!(sums_of_chosen(&[1, 2, 3], 2), [0.0, 0.0, 0.0, third, third, third, 0.0]);
        // Coins over {1, 2}: 0, 1, 2, 3.
        assert_eq!(sums_of_coins(&[1, 2]), [0.25; 4]);
    }
}
