//! Conditions under which a comparison ends with exit code 1, and their command-line syntax:
//! `slower-than 5%`, `p99 worse-than 10%`.
//!
//! The user chooses how certain a loss must be ([`Certainty`]). A condition that fails on a
//! *possible* loss rejects good changes when rounds are few. A condition that needs a significant
//! loss lets small losses pass; this is the default. Too few rounds can never show a significant
//! loss. Then the condition is undecided ([`FailIf::unjudged`]), and the exit code is not that of
//! success.

use super::{ComparisonRecord, Conclusion, FigureChange};
use diskwright_load::figures::Metric;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// A condition: a figure is worse than the base by more than a given share.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct FailIf {
    /// The figure; IOPS if the user named none.
    pub metric: Metric,
    /// The share by which it must be worse: 0.05 is 5 %.
    pub worse_by: f64,
    /// How certain the loss must be.
    pub certainty: Certainty,
}

/// How certain a loss must be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Certainty {
    /// The whole confidence interval is worse than the limit, and the corrected test is
    /// significant.
    #[default]
    Shown,
    /// The estimate is worse than the limit.
    Estimate,
    /// Some of the confidence interval is worse than the limit.
    Possible,
}

impl FromStr for FailIf {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let usage = || {
            format!(
                "\"{text}\" is not a condition; write for example 'slower-than 5%', or 'p99 worse-than 10%' with one of {}",
                Metric::ALL.map(Metric::name).join(", ")
            )
        };
        let words: Vec<&str> = text.split_whitespace().collect();
        let (metric, verb, share) = match words[..] {
            [verb, share] => (Metric::Iops, verb, share),
            [metric, verb, share] => (Metric::from_name(metric).ok_or_else(usage)?, verb, share),
            _ => return Err(usage()),
        };
        let percent: f64 = share.strip_suffix('%').unwrap_or(share).trim().parse().map_err(|_| usage())?;
        if !["slower-than", "worse-than"].contains(&verb) || !(0.0..=10_000.0).contains(&percent) {
            return Err(usage());
        }
        // A figure of which more is better can fall by less than 100 %.
        if metric.more_is_better() && percent >= 100.0 {
            return Err(format!("\"{text}\" can never be true: the {} cannot fall by 100 %", metric.title()));
        }
        Ok(Self { metric, worse_by: percent / 100.0, certainty: Certainty::default() })
    }
}

/// A condition that could not be judged, or not for every measurement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnjudgedCondition {
    /// The reason, with what to do.
    pub why: String,
    /// Whether the condition remains undecided, because no other result decides it.
    pub undecided: bool,
}

/// The condition in its syntax: `p99 worse-than 10%`.
impl fmt::Display for FailIf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = (self.worse_by * 1e6).round() / 1e4;
        write!(f, "{} worse-than {percent}%", self.metric.name())
    }
}

impl FailIf {
    /// Why the condition could not be judged for every measurement; `None` if it could.
    pub fn unjudged(&self, record: &ComparisonRecord) -> Option<UnjudgedCondition> {
        let of_metric = |comparison: &&FigureChange| comparison.metric == self.metric;
        let blind = |comparison: &&FigureChange| comparison.conclusion == Conclusion::TooFewRounds;
        let each: Vec<&FigureChange> = record.comparisons.iter().filter(of_metric).collect();
        if each.is_empty() {
            let why = format!(
                "the condition '{self}' could not be judged: the {} was not compared, because a side does not have it, or `JudgeOptions::metrics` leaves it out",
                self.metric.title()
            );
            return Some(UnjudgedCondition { why, undecided: true });
        }
        // Estimates and intervals exist for any number of rounds; only the test needs more.
        let first = each.iter().copied().find(blind).filter(|_| self.certainty == Certainty::Shown)?;
        let (seen, all) = (each.iter().copied().filter(|one| !blind(one)).count(), each.len());
        let together = record.overall.iter().filter(of_metric).any(|one| !blind(&one));
        let judged = if together {
            "could be judged only over all measurements together".to_owned()
        } else if seen > 0 {
            format!("could be judged only for {seen} of {all} measurements")
        } else {
            "could not be judged".to_owned()
        };
        let ((base, ours), family) = (first.rounds, record.family(first));
        let why = format!(
            "the condition '{self}' {judged}: {base} and {ours} rounds cannot show a difference with {family} comparisons; measure at least {} rounds of each, compare fewer figures, or accept less certainty with `FailIf::certainty` = estimate or possible",
            record.fewest_rounds(first)
        );
        Some(UnjudgedCondition { why, undecided: !together })
    }

    /// The measurements in which the condition is true; one sentence for each side and group.
    pub fn holding(&self, record: &ComparisonRecord) -> Vec<String> {
        let all = record.overall.iter().chain(&record.comparisons);
        all.filter(|comparison| comparison.metric == self.metric && self.holds(comparison))
            .map(|comparison| {
                let side = record.sides.get(comparison.side).map_or("", |side| side.name.as_str());
                let of = if comparison.group.is_empty() { "overall".to_owned() } else { comparison.group.clone() };
                format!(
                    "{side}, {of}: {} is worse than the condition allows ({} of at most {:.1} %)",
                    self.metric.title(),
                    super::verdict::change(comparison),
                    self.worse_by * 100.0
                )
            })
            .collect()
    }

    fn holds(&self, comparison: &FigureChange) -> bool {
        // How much worse each end of the interval is.
        let change = &comparison.change;
        let worse = |share: f64| if self.metric.more_is_better() { -share } else { share };
        let (one, other) = (worse(change.interval.low), worse(change.interval.high));
        let (min, max) = (one.min(other), one.max(other));
        match self.certainty {
            Certainty::Shown => comparison.conclusion == Conclusion::Worse && min > self.worse_by,
            Certainty::Estimate => worse(change.estimate) > self.worse_by,
            Certainty::Possible => max > self.worse_by,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_read_and_nonsense_is_not() {
        let read = |text: &str| text.parse::<FailIf>();
        let slower = read("slower-than 5%").unwrap();
        assert_eq!((slower.metric, slower.worse_by, slower.certainty), (Metric::Iops, 0.05, Certainty::Shown));
        let tail = read("p99 worse-than 12.5").unwrap();
        assert_eq!((tail.metric, tail.worse_by), (Metric::P99, 0.125));
        for text in [
            "",
            "slower-than",
            "5%",
            "p98 worse-than 5%",
            "slower 5%",
            "slower-than -5%",
            "slower-than x%",
            "slower-than nan%",
        ] {
            assert!(read(text).is_err(), "{text}");
        }
        assert!(read("iops worse-than 100%").unwrap_err().contains("can never be true"));
        assert!(read("p99 worse-than 100%").is_ok());
        assert_eq!(read("slower-than 7%").unwrap().to_string(), "iops worse-than 7%");
        assert_eq!(tail.to_string(), "p99 worse-than 12.5%");
    }
}
