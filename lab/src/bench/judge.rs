//! Bars, and what a measured figure says against one.

use crate::{
    measure::Ratio,
    stats::{Interval, Summary},
};
use serde::{Deserialize, Serialize};

/// How something ended, the worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// The bar was missed, or the measurement could not be carried out.
    Fail,
    /// Not measured, for want of something.
    Skipped,
    /// The bar was reached.
    Pass,
}

/// What a figure must reach.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bar {
    /// This or more.
    AtLeast(f64),
    /// This or less.
    AtMost(f64),
}

impl Bar {
    fn reached_by(self, value: f64) -> bool {
        match self {
            Self::AtLeast(bar) => value >= bar,
            Self::AtMost(bar) => value <= bar,
        }
    }

    /// How far a value is from the bar, as a factor; below 1 is missed. Sorts checks of different units.
    pub(crate) fn margin(self, value: f64) -> f64 {
        match self {
            Self::AtLeast(bar) => value / bar,
            Self::AtMost(bar) => bar / value.max(f64::MIN_POSITIVE),
        }
    }
}

/// One figure and its bar.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// What was measured: "VHDX dynamic, 4K random read: IOPS".
    pub name: String,
    /// Of the figure that is judged: "ratio", "ns" or "bytes".
    pub unit: String,
    /// Of `ours` and `peer`.
    pub sides_unit: String,
    /// The figure that is judged, over the rounds.
    pub figure: Option<Summary>,
    /// 95 % confidence interval of its median, where there are rounds enough to speak of one.
    pub confidence: Option<Interval>,
    /// Ours, of which a ratio was made.
    pub ours: Option<Summary>,
    /// The peer's.
    pub peer: Option<Summary>,
    /// What it must reach.
    pub bar: Option<Bar>,
    /// How it ended.
    pub outcome: Outcome,
    /// Why it was skipped or could not be measured.
    pub why: Option<String>,
}

impl Check {
    /// A ratio of ours to the peer's, round by round.
    pub(crate) fn ratio(name: impl Into<String>, sides_unit: &str, ours: &[f64], peer: &[f64], bar: Bar) -> Self {
        let name = name.into();
        let Some(ratio) = Ratio::of(ours, peer) else { return Self::broken(&name, "nothing was measured") };
        Self {
            sides_unit: sides_unit.into(),
            ours: Summary::of(ours),
            peer: Summary::of(peer),
            ..Self::of_ratio(name, &ratio, bar)
        }
    }

    /// A ratio that was made already.
    pub(crate) fn of_ratio(name: impl Into<String>, ratio: &Ratio, bar: Bar) -> Self {
        let confidence = (ratio.each.len() >= 3).then_some(ratio.confidence);
        Self { confidence, ..Self::judged(name.into(), "ratio", Some(ratio.summary), bar) }
    }

    /// A figure by itself, round by round, in `unit`.
    pub(crate) fn absolute(name: impl Into<String>, unit: &str, values: &[f64], bar: Bar) -> Self {
        Self::judged(name.into(), unit, Summary::of(values), bar)
    }

    fn judged(name: String, unit: &str, figure: Option<Summary>, bar: Bar) -> Self {
        let Some(summary) = figure else { return Self::broken(&name, "nothing was measured") };
        let outcome = if bar.reached_by(summary.median) { Outcome::Pass } else { Outcome::Fail };
        Self {
            name,
            unit: unit.into(),
            sides_unit: String::new(),
            figure,
            confidence: None,
            ours: None,
            peer: None,
            bar: Some(bar),
            outcome,
            why: None,
        }
    }

    /// Not measured, for want of something.
    pub(crate) fn skipped(name: &str, why: impl Into<String>) -> Self {
        Self::without_figure(name, Outcome::Skipped, why.into())
    }

    /// The measurement could not be carried out.
    pub(crate) fn broken(name: &str, why: impl Into<String>) -> Self {
        Self::without_figure(name, Outcome::Fail, why.into())
    }

    fn without_figure(name: &str, outcome: Outcome, why: String) -> Self {
        Self {
            name: name.to_owned(),
            unit: String::new(),
            sides_unit: String::new(),
            figure: None,
            confidence: None,
            ours: None,
            peer: None,
            bar: None,
            outcome,
            why: Some(why),
        }
    }

    /// Whether the rounds are too scattered to be sure of the outcome: the bar lies inside the confidence interval.
    pub fn is_close(&self) -> bool {
        let Some((Bar::AtLeast(bar) | Bar::AtMost(bar), confidence)) = self.bar.zip(self.confidence) else {
            return false;
        };
        confidence.low < bar && bar < confidence.high
    }

    /// How far from the bar; what has no figure is worst.
    pub(crate) fn margin(&self) -> f64 {
        self.bar.zip(self.figure).map_or(0.0, |(bar, figure)| bar.margin(figure.median))
    }
}

/// The worst of several; a row with nothing in it was skipped.
pub(crate) fn worst(checks: &[Check]) -> Outcome {
    checks.iter().map(|check| check.outcome).min().unwrap_or(Outcome::Skipped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_judged_and_the_bar_itself_passes() {
        let check = |ours: &[f64], bar| Check::ratio("x", "IOPS", ours, &[1.0, 1.0, 1.0], bar).outcome;
        assert_eq!(check(&[0.95, 0.95, 0.2], Bar::AtLeast(0.95)), Outcome::Pass);
        assert_eq!(check(&[0.94, 0.94, 2.0], Bar::AtLeast(0.95)), Outcome::Fail);
        assert_eq!(check(&[1.1, 1.1, 9.0], Bar::AtMost(1.1)), Outcome::Pass);
        assert_eq!(check(&[1.2, 1.2, 0.1], Bar::AtMost(1.1)), Outcome::Fail);
        assert_eq!(Check::ratio("x", "IOPS", &[], &[], Bar::AtLeast(1.0)).outcome, Outcome::Fail);
        assert_eq!(Check::absolute("x", "ns", &[5.0], Bar::AtMost(4.0)).outcome, Outcome::Fail);
    }

    #[test]
    fn a_bar_inside_the_interval_is_close() {
        let ones = [1.0; 7];
        let scattered = Check::ratio("x", "IOPS", &[0.8, 0.9, 0.94, 0.96, 0.97, 1.0, 1.1], &ones, Bar::AtLeast(0.95));
        assert!(scattered.is_close());
        let clear = Check::ratio("x", "IOPS", &[0.99, 0.99, 1.0, 1.0, 1.0, 1.01, 1.01], &ones, Bar::AtLeast(0.95));
        assert!(!clear.is_close());
    }

    #[test]
    fn one_failure_fails_a_row_and_one_skip_keeps_it_from_passing() {
        let (pass, fail) = (
            Check::absolute("a", "ns", &[1.0], Bar::AtMost(2.0)),
            Check::absolute("b", "ns", &[3.0], Bar::AtMost(2.0)),
        );
        let skip = Check::skipped("c", "no peer");
        assert_eq!(worst(std::slice::from_ref(&pass)), Outcome::Pass);
        assert_eq!(worst(&[pass.clone(), skip.clone()]), Outcome::Skipped);
        assert_eq!(worst(&[pass, skip, fail]), Outcome::Fail);
        assert_eq!(worst(&[]), Outcome::Skipped);
    }
}
