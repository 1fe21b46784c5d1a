//! A figure as a ratio to the base in the same round.

use diskwright_stats::summary::{self, Interval, Summary};
use serde::{Deserialize, Serialize};

/// A ratio to the base, round by round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Ratio {
    /// Median, min, max and standard deviation of the rounds' ratios.
    #[serde(flatten)]
    pub summary: Summary,
    /// 95 % confidence interval of the median ([`summary::median_interval`] over the logarithms).
    /// `None` with one round, or if a ratio is 0.
    pub confidence: Option<Interval>,
    /// The ratio of each round.
    pub each: Vec<f64>,
}

impl Ratio {
    /// The ratio of `ours` to `base`, round by round. `None` if no round has both.
    pub fn of(ours: &[f64], base: &[f64]) -> Option<Self> {
        let each = summary::ratios(ours, base);
        let summary = Summary::of(&each)?;
        let logarithms: Vec<f64> = each.iter().map(|ratio| ratio.ln()).collect();
        let confidence = summary::median_interval(&logarithms, 0.95)
            .map(|ends| Interval { low: ends.low.exp(), high: ends.high.exp() });
        Some(Self { summary, confidence, each })
    }

    /// Min and max of the rounds' ratios. `None` with one round, whose scatter is unknown.
    pub fn range(&self) -> Option<(f64, f64)> {
        (self.each.len() > 1).then_some((self.summary.min, self.summary.max))
    }

    /// The median of the rounds' ratios.
    pub fn median(&self) -> f64 {
        self.summary.median
    }
}
