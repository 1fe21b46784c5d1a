//! Limits ("bars") of figures, and the outcome of a check against a limit.

use crate::measure::Ratio;
use diskwright_stats::{
    inference::paired_shift,
    summary::{Interval, Summary},
};
use serde::{Deserialize, Serialize};

const INTERVAL_CONFIDENCE: f64 = 0.99;

/// The outcome of a check or a row, the worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// The limit was missed, or the measurement failed.
    Fail,
    /// The limit is within the confidence interval; more rounds would decide.
    Unsure,
    /// Not measured, because this machine lacks something that the check needs.
    Skipped,
    /// The limit was kept.
    Pass,
}

/// A limit that a figure must keep.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Bar {
    /// The figure must be at least this.
    AtLeast(f64),
    /// The figure must be at most this.
    AtMost(f64),
}

impl Bar {
    fn reached_by(self, value: f64) -> bool {
        match self {
            Self::AtLeast(bar) => value >= bar,
            Self::AtMost(bar) => value <= bar,
        }
    }

    /// Distance of `value` from the limit as a factor; below 1 the limit is missed. Sorts checks of
    /// different units.
    pub(crate) fn margin(self, value: f64) -> f64 {
        match self {
            Self::AtLeast(bar) => value / bar,
            Self::AtMost(bar) => bar / value.max(f64::MIN_POSITIVE),
        }
    }
}

/// A figure with its limit and outcome.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Check {
    /// The figure's name, for example "VHDX dynamic, 4K random read: IOPS".
    pub name: String,
    /// Unit of `figure` and `bar`: "ratio", "ns", "bytes" or "IOPS".
    pub unit: String,
    /// Unit of `ours` and `peer`.
    pub sides_unit: String,
    /// The judged figure over the rounds. `None` if it was not measured.
    pub figure: Option<Summary>,
    /// Confidence interval: 95 % of the median, or 99 % in a check of [`Check::of_interval`].
    /// `None` with too few rounds.
    pub confidence: Option<Interval>,
    /// Our figure, in a check of a ratio.
    pub ours: Option<Summary>,
    /// The peer's figure, in a check of a ratio.
    pub peer: Option<Summary>,
    /// The limit.
    pub bar: Option<Bar>,
    /// The outcome.
    pub outcome: Outcome,
    /// Why it was skipped or could not be measured.
    pub why: Option<String>,
}

impl Check {
    /// Checks the ratio of our figure to the peer's, round by round.
    pub fn ratio(name: impl Into<String>, sides_unit: &str, ours: &[f64], peer: &[f64], bar: Bar) -> Self {
        let name = name.into();
        let Some(ratio) = Ratio::of(ours, peer) else { return Self::broken(&name, "nothing was measured") };
        Self {
            sides_unit: sides_unit.into(),
            ours: Summary::of(ours),
            peer: Summary::of(peer),
            ..Self::of_ratio(name, &ratio, bar)
        }
    }

    /// Checks a ratio that was computed before.
    pub fn of_ratio(name: impl Into<String>, ratio: &Ratio, bar: Bar) -> Self {
        let confidence = ratio.confidence.filter(|_| ratio.each.len() >= 3);
        Self { confidence, ..Self::judged(name.into(), "ratio", Some(ratio.summary), bar) }
    }

    /// Checks a ratio by its confidence interval. It passes if the whole interval keeps the limit,
    /// fails if none of it does, and is else unsure. The interval is the Hodges-Lehmann interval
    /// over the logarithms of the rounds' ratios. Its level is 99 %: a comparison may be judged up
    /// to five times, with more rounds each time, and is wrong in fewer than 1 of 40 cases.
    pub fn of_interval(name: impl Into<String>, ratio: &Ratio, bar: Bar) -> Self {
        let logarithms: Vec<f64> = ratio.each.iter().map(|ratio| ratio.ln()).collect();
        let Some(shift) = paired_shift(&logarithms, INTERVAL_CONFIDENCE) else {
            return Self::broken(&name.into(), "nothing was measured");
        };
        let interval = Interval { low: shift.interval.low.exp(), high: shift.interval.high.exp() };
        let is_sure = shift.confidence >= INTERVAL_CONFIDENCE;
        let outcome = match (bar.reached_by(interval.low), bar.reached_by(interval.high)) {
            (true, true) if is_sure => Outcome::Pass,
            (false, false) if is_sure => Outcome::Fail,
            _ => Outcome::Unsure,
        };
        Self { confidence: Some(interval), outcome, ..Self::judged(name.into(), "ratio", Some(ratio.summary), bar) }
    }

    /// Checks whether a ratio is 1 within `factor` in both directions (for example 1.05). A ratio
    /// below 1 is inverted. The interval is judged as by [`Self::of_interval`]: noise widens it, so
    /// noise can make the check unsure but never a pass.
    pub(crate) fn alike(name: &str, ratio: &Ratio, factor: f64) -> Self {
        let logarithms: Vec<f64> = ratio.each.iter().map(|ratio| ratio.ln()).collect();
        let Some(shift) = paired_shift(&logarithms, INTERVAL_CONFIDENCE) else {
            return Self::broken(name, "nothing was measured");
        };
        let (low, high) = (shift.interval.low, shift.interval.high);
        // The distance from 1; 0 if 1 is within the interval.
        let nearest = if low <= 0.0 && high >= 0.0 { 0.0 } else { low.abs().min(high.abs()) };
        let interval = Interval { low: nearest.exp(), high: low.abs().max(high.abs()).exp() };
        let bar = Bar::AtMost(factor);
        let is_sure = shift.confidence >= INTERVAL_CONFIDENCE;
        let outcome = match (bar.reached_by(interval.high), bar.reached_by(interval.low)) {
            (true, _) if is_sure => Outcome::Pass,
            (_, false) if is_sure => Outcome::Fail,
            _ => Outcome::Unsure,
        };
        let distances: Vec<f64> = logarithms.iter().map(|logarithm| logarithm.abs().exp()).collect();
        let figure = Summary::of(&distances).map(|each| Summary { median: shift.estimate.abs().exp(), ..each });
        Self { confidence: Some(interval), outcome, ..Self::judged(name.to_owned(), "ratio", figure, bar) }
    }

    /// Checks an absolute figure in `unit`, round by round.
    pub fn absolute(name: impl Into<String>, unit: &str, values: &[f64], bar: Bar) -> Self {
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

    /// A check that was not measured, because this machine lacks something that it needs.
    pub fn skipped(name: &str, why: impl Into<String>) -> Self {
        Self::without_figure(name, Outcome::Skipped, why.into())
    }

    /// A check whose measurement failed.
    pub fn broken(name: &str, why: impl Into<String>) -> Self {
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

    /// Whether the rounds scatter too much for a certain outcome: the limit is within the
    /// confidence interval.
    pub fn is_close(&self) -> bool {
        if self.outcome == Outcome::Unsure {
            return true;
        }
        let Some((Bar::AtLeast(bar) | Bar::AtMost(bar), confidence)) = self.bar.zip(self.confidence) else {
            return false;
        };
        confidence.low < bar && bar < confidence.high
    }

    /// [`Bar::margin`] of the median; 0 (the worst) without a figure.
    pub(crate) fn margin(&self) -> f64 {
        self.bar.zip(self.figure).map_or(0.0, |(bar, figure)| bar.margin(figure.median))
    }
}

/// The worst outcome, ignoring up to `may_miss` failed or unsure checks, the worst of them. A row
/// without checks is skipped.
pub(super) fn worst(checks: &[Check], may_miss: usize) -> Outcome {
    let mut outcomes: Vec<Outcome> = checks.iter().map(|check| check.outcome).collect();
    outcomes.sort_unstable();
    let missed = outcomes.iter().filter(|outcome| **outcome < Outcome::Skipped).count();
    outcomes.get(may_miss.min(missed)).or(outcomes.last()).copied().unwrap_or(Outcome::Skipped)
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
    fn an_interval_decides_or_leaves_it_open() {
        let judged = |each: &[f64], bar| {
            let ratio = Ratio::of(each, &vec![1.0; each.len()]).unwrap();
            Check::of_interval("x", &ratio, bar).outcome
        };
        let near = |middle: f64, rounds: usize| -> Vec<f64> {
            (0..rounds).map(|round| middle * (0.98 + 0.04 * round as f64 / (rounds - 1) as f64)).collect()
        };
        assert_eq!(judged(&near(1.0, 15), Bar::AtLeast(0.95)), Outcome::Pass);
        assert_eq!(judged(&near(0.9, 15), Bar::AtLeast(0.95)), Outcome::Fail);
        assert_eq!(judged(&near(0.95, 15), Bar::AtLeast(0.95)), Outcome::Unsure);
        assert_eq!(judged(&near(1.0, 15), Bar::AtMost(1.1)), Outcome::Pass);
        assert_eq!(judged(&near(1.2, 15), Bar::AtMost(1.1)), Outcome::Fail);
        assert_eq!(judged(&near(1.0, 5), Bar::AtLeast(0.95)), Outcome::Unsure, "five rounds are never so sure");
        // The median ignores one bad round in four; a mean would not.
        let mut disturbed = near(1.0, 24);
        disturbed.iter_mut().step_by(4).for_each(|ratio| *ratio *= 0.5);
        assert_ne!(judged(&disturbed, Bar::AtLeast(0.95)), Outcome::Fail);
    }

    #[test]
    fn a_row_may_miss_as_many_as_it_says() {
        let check = |value| Check::absolute("a", "ns", &[value], Bar::AtMost(2.0));
        let (pass, fail) = (check(1.0), check(3.0));
        let unsure = Check { outcome: Outcome::Unsure, ..pass.clone() };
        let checks = [pass.clone(), fail.clone(), pass, unsure.clone()];
        assert_eq!(worst(&checks, 0), Outcome::Fail);
        assert_eq!(worst(&checks, 1), Outcome::Unsure);
        assert_eq!(worst(&checks, 2), Outcome::Pass);
        assert_eq!(worst(&[fail], 2), Outcome::Fail, "not all of them");
        assert_eq!(worst(&[Check::skipped("c", "no peer"), unsure], 1), Outcome::Skipped);
    }

    #[test]
    fn one_failure_fails_a_row_and_one_skip_keeps_it_from_passing() {
        let (pass, fail) = (
            Check::absolute("a", "ns", &[1.0], Bar::AtMost(2.0)),
            Check::absolute("b", "ns", &[3.0], Bar::AtMost(2.0)),
        );
        let skip = Check::skipped("c", "no peer");
        assert_eq!(worst(std::slice::from_ref(&pass), 0), Outcome::Pass);
        assert_eq!(worst(&[pass.clone(), skip.clone()], 0), Outcome::Skipped);
        assert_eq!(worst(&[pass, skip, fail], 0), Outcome::Fail);
        assert_eq!(worst(&[], 0), Outcome::Skipped);
    }
}
