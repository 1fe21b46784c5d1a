//! What a comparison prints: the verdict, a table, reasons for doubt.

use super::{Comparison, ContestRecord, Said};
use crate::{
    figures::Metric,
    table::{Align, Cell, Table, Tone, figure, paint},
};
use std::fmt::Write as _;

/// More groups than this are told by their extremes.
const TOLD_IN_VERDICT: usize = 4;

/// The conclusion, in sentences.
pub fn verdict(record: &ContestRecord) -> String {
    let told: Vec<&Comparison> =
        if record.overall.is_empty() { record.comparisons.iter().collect() } else { record.overall.iter().collect() };
    let mut sentences: Vec<String> = record.failed.iter().map(|failed| format!("FAILED: {failed}.")).collect();
    for side in 1..record.sides.len() {
        let mut groups: Vec<&str> = Vec::new();
        for comparison in told.iter().filter(|comparison| comparison.side == side) {
            if !groups.contains(&comparison.group.as_str()) {
                groups.push(&comparison.group);
            }
        }
        if groups.is_empty() {
            sentences.push(format!(
                "{} and {} have nothing in common to compare.",
                record.sides[side].name, record.sides[0].name
            ));
        }
        for group in groups.iter().take(TOLD_IN_VERDICT) {
            let of: Vec<&Comparison> = told
                .iter()
                .filter(|comparison| comparison.side == side && comparison.group == *group)
                .copied()
                .collect();
            let lead = if groups.len() > 1 { format!("{group}: ") } else { String::new() };
            sentences.push(format!("{lead}{}", sentence(record, side, &of)));
        }
        if groups.len() > TOLD_IN_VERDICT {
            sentences.push(format!("{} more below.", groups.len() - TOLD_IN_VERDICT));
        }
    }
    sentences.join(" ")
}

fn sentence(record: &ContestRecord, side: usize, of: &[&Comparison]) -> String {
    let (base, ours) = (&record.sides[0].name, &record.sides[side].name);
    let Some(first) = of.first() else { return String::new() };
    let mut text = match first.said {
        Said::Better | Said::Worse => {
            let word = match (first.metric, first.said) {
                (Metric::CpuPerIo, Said::Better) => "cheaper",
                (Metric::CpuPerIo, _) => "dearer",
                (_, Said::Better) => "faster",
                _ => "slower",
            };
            let than = if first.group.is_empty() { " over all" } else { "" };
            format!(
                "{ours} is {word} than {base}{than}: {} {} (p = {})",
                first.metric.title(),
                change(first),
                p(first.p_corrected)
            )
        }
        Said::NoDifference => {
            format!("No difference seen between {ours} and {base}: {} {}", first.metric.title(), change(first))
        }
        Said::TooFewRounds => {
            let (n, m) = first.rounds;
            let family = record.family(first);
            format!(
                "{n} and {m} rounds cannot show a difference between {ours} and {base} with {family} comparisons, whatever they are; measure at least {} rounds of each (not shown: {} {})",
                record.fewest_rounds(first),
                first.metric.title(),
                change(first),
            )
        }
    };
    let also: Vec<String> = of
        .iter()
        .skip(1)
        .filter(|comparison| matches!(comparison.said, Said::Better | Said::Worse))
        .map(|comparison| format!("{} {}", comparison.metric.title(), estimate(comparison)))
        .collect();
    if !also.is_empty() {
        let _ = write!(text, "; {}", also.join(", "));
    }
    text.push('.');
    text
}

/// `+5.2 % (95 % interval +4.1 % to +6.3 %)`.
pub fn change(comparison: &Comparison) -> String {
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

fn estimate(comparison: &Comparison) -> String {
    percent(comparison.change.estimate)
}

/// `+4.1 % to +6.3 %`, with its confidence where that is below the 95 % of the others.
fn interval(comparison: &Comparison) -> String {
    let shift = &comparison.change;
    let ends = format!("{} to {}", percent(shift.interval.low), percent(shift.interval.high));
    match shift.confidence {
        0.0 => "none".into(),
        less if less < 0.95 => format!("{ends} ({:.0} %)", less * 100.0),
        _ => ends,
    }
}

fn percent(share: f64) -> String {
    let value = share * 100.0;
    let sign = if value >= 0.0 { "+" } else { "-" };
    format!("{sign}{} %", if value.abs() < 9.95 { format!("{:.1}", value.abs()) } else { figure(value.abs()) })
}

fn p(value: f64) -> String {
    if value < 0.0005 { "< 0.001".into() } else { format!("{value:.3}") }
}

/// The whole report. `colour` only for a terminal.
pub fn render(record: &ContestRecord, colour: bool) -> String {
    let mut text = format!("{}\n", record.verdict);
    for (index, side) in record.sides.iter().enumerate() {
        let rounds: Vec<usize> = side.groups.iter().map(|group| group.rounds.len()).collect();
        let least = rounds.iter().min().copied().unwrap_or(0);
        let _ = write!(
            text,
            "\n  {} {}: {} {}, {} rounds each; {}; {}",
            if index == 0 { "base" } else { "side" },
            side.name,
            side.groups.len(),
            if side.groups.len() == 1 { "measurement" } else { "measurements" },
            least,
            side.circumstances.cache,
            side.sources.join(", "),
        );
    }
    text.push('\n');
    for (title, comparisons) in [("over all measurements", &record.overall), ("", &record.comparisons)] {
        if comparisons.is_empty() {
            continue;
        }
        text.push('\n');
        if !title.is_empty() {
            let _ = writeln!(text, "{title}\n");
        }
        text.push_str(&table(record, comparisons, colour));
    }
    let _ = write!(
        text,
        "\n  change: median ratio to the base ({}); p: {} test, corrected by Holm for {} comparisons\n",
        if record.paired { "Hodges-Lehmann over rounds in pairs" } else { "Hodges-Lehmann over all pairs of rounds" },
        if record.paired { "Wilcoxon's signed rank" } else { "Mann-Whitney" },
        record.comparisons.len()
    );
    if !record.warnings.is_empty() {
        text.push_str("\nBefore you believe this\n\n");
        for warning in &record.warnings {
            let _ = writeln!(text, "  {} {warning}", paint("!", Tone::Bad, colour));
        }
    }
    text
}

fn table(record: &ContestRecord, comparisons: &[Comparison], colour: bool) -> String {
    let many_groups = comparisons.iter().any(|comparison| comparison.group != comparisons[0].group);
    let many_sides = record.sides.len() > 2;
    let mut heads = Vec::new();
    if many_sides {
        heads.push(("side", Align::Left));
    }
    if many_groups {
        heads.push(("measurement", Align::Left));
    }
    heads.extend([
        ("figure", Align::Left),
        ("base", Align::Right),
        ("side", Align::Right),
        ("change", Align::Right),
        ("interval", Align::Left),
        ("p", Align::Right),
        ("", Align::Left),
    ]);
    let mut table = Table::new(&heads);
    for comparison in comparisons {
        let mut row = Vec::new();
        if many_sides {
            row.push(Cell::new(record.sides[comparison.side].name.clone()));
        }
        if many_groups {
            row.push(Cell::new(comparison.group.clone()));
        }
        let show = |value: f64| {
            if comparison.group.is_empty() { String::new() } else { comparison.metric.show(value) }
        };
        let (tone, word) = match comparison.said {
            Said::Better => (Tone::Good, "better"),
            Said::Worse => (Tone::Bad, "worse"),
            Said::NoDifference => (Tone::Faint, "no difference seen"),
            Said::TooFewRounds => (Tone::Faint, "too few rounds to tell"),
        };
        // A change that so few rounds cannot show is no finding: only its interval is, with the
        // confidence that it has.
        let blind = comparison.said == Said::TooFewRounds;
        let change = if blind { "not shown".into() } else { estimate(comparison) };
        row.extend([
            Cell::new(comparison.metric.title()),
            Cell::new(show(comparison.base)),
            Cell::new(show(comparison.ours)),
            Cell::toned(change, tone),
            Cell::toned(interval(comparison), Tone::Faint),
            Cell::new(p(comparison.p_corrected)),
            Cell::toned(word, tone),
        ]);
        table.row(row);
    }
    table.render(colour)
}
