//! The verdict of a comparison.

use super::{ComparisonRecord, Conclusion, FigureChange};
use diskwright_load::figures::Metric;
use diskwright_stats::numbers::figure;
use std::fmt::Write as _;

/// The verdict describes at most this many groups.
const GROUPS_IN_VERDICT: usize = 4;

pub fn verdict(record: &ComparisonRecord) -> String {
    let shown: Vec<&FigureChange> =
        if record.overall.is_empty() { record.comparisons.iter().collect() } else { record.overall.iter().collect() };
    let mut sentences: Vec<String> = record.failed.iter().map(|failed| format!("FAILED: {failed}.")).collect();
    for side in 1..record.sides.len() {
        let mut groups: Vec<&str> = Vec::new();
        for comparison in shown.iter().filter(|comparison| comparison.side == side) {
            if !groups.contains(&comparison.group.as_str()) {
                groups.push(&comparison.group);
            }
        }
        if groups.is_empty() {
            sentences.push(format!(
                "{} and {} have no measurement in common.",
                record.sides[side].name, record.sides[0].name
            ));
        }
        for group in groups.iter().take(GROUPS_IN_VERDICT) {
            let of: Vec<&FigureChange> = shown
                .iter()
                .filter(|comparison| comparison.side == side && comparison.group == *group)
                .copied()
                .collect();
            let lead = if groups.len() > 1 { format!("{group}: ") } else { String::new() };
            sentences.push(format!("{lead}{}", sentence(record, side, &of)));
        }
        if groups.len() > GROUPS_IN_VERDICT {
            sentences.push(format!("{} more groups are in the table.", groups.len() - GROUPS_IN_VERDICT));
        }
    }
    sentences.join(" ")
}

fn sentence(record: &ComparisonRecord, side: usize, of: &[&FigureChange]) -> String {
    let (base, ours) = (&record.sides[0].name, &record.sides[side].name);
    let Some(first) = of.first() else { return String::new() };
    let mut text = match first.conclusion {
        Conclusion::Better | Conclusion::Worse => {
            let word = match (first.metric, first.conclusion) {
                (Metric::CpuPerIo, Conclusion::Better) => "cheaper in CPU time",
                (Metric::CpuPerIo, _) => "more expensive in CPU time",
                (_, Conclusion::Better) => "faster",
                _ => "slower",
            };
            let than = if first.group.is_empty() { " overall" } else { "" };
            format!(
                "{ours} is {word} than {base}{than}: {} {} (p = {})",
                first.metric.title(),
                change(first),
                p(first.p_corrected)
            )
        }
        Conclusion::NoDifference => {
            format!("No significant difference between {ours} and {base}: {} {}", first.metric.title(), change(first))
        }
        Conclusion::TooFewRounds => {
            let (n, m) = first.rounds;
            let family = record.family(first);
            let rounds = match (n, m) {
                (1, 1) => "1 round of each".to_owned(),
                (n, m) if n == m => format!("{n} rounds of each"),
                (n, m) => format!("{n} and {m} rounds"),
            };
            format!(
                "{rounds} cannot show a difference between {ours} and {base} with {family} comparisons; measure at least {} rounds of each",
                record.fewest_rounds(first),
            )
        }
    };
    let also: Vec<String> = of
        .iter()
        .skip(1)
        .filter(|comparison| matches!(comparison.conclusion, Conclusion::Better | Conclusion::Worse))
        .map(|comparison| format!("{} {}", comparison.metric.title(), estimate(comparison)))
        .collect();
    if !also.is_empty() {
        let _ = write!(text, "; {}", also.join(", "));
    }
    text.push('.');
    text
}

/// The change as text: `+5.2 % (95 % interval +4.1 % to +6.3 %)`.
pub fn change(comparison: &FigureChange) -> String {
    let shift = &comparison.change;
    if shift.confidence == 0.0 {
        return format!("{} (one round has no interval)", percent(shift.estimate));
    }
    format!(
        "{} ({:.0} % interval {} to {})",
        percent(shift.estimate),
        shift.confidence * 100.0,
        percent(shift.interval.low),
        percent(shift.interval.high)
    )
}

fn estimate(comparison: &FigureChange) -> String {
    percent(comparison.change.estimate)
}

fn percent(share: f64) -> String {
    let value = share * 100.0;
    let sign = if value >= 0.0 { "+" } else { "-" };
    format!("{sign}{} %", if value.abs() < 9.95 { format!("{:.1}", value.abs()) } else { figure(value.abs()) })
}

fn p(value: f64) -> String {
    if value < 0.0005 { "< 0.001".into() } else { format!("{value:.3}") }
}
