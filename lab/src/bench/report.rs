//! What `bench` prints: one line a row, then the figures of each.

use crate::{
    bench::{Bar, BenchReport, Check, Outcome, RowResult},
    stats::Summary,
    table::{Align, Cell, Table, Tone, bytes, duration, figure, paint},
};
use std::fmt::Write as _;

/// A row with more checks than this shows only those that failed and the closest ones.
const CHECKS_SHOWN: usize = 12;

/// The whole report as text. `colour` only for a terminal.
pub fn render(report: &BenchReport, colour: bool) -> String {
    let count = |outcome| report.rows.iter().filter(|row| row.outcome == outcome).count();
    let mut text = format!(
        "{}{} of {} promises are kept, {} are broken, {} could not be measured in full.\n",
        if report.stopped { "Stopped: this is what was measured until then. " } else { "" },
        count(Outcome::Pass),
        report.rows.len(),
        count(Outcome::Fail),
        count(Outcome::Skipped) + count(Outcome::Unsure)
    );
    let _ = writeln!(
        text,
        "\n  {}; {}; diskwright {}{}{}\n",
        report.machine,
        report.place,
        report.versions.diskwright,
        report.versions.qemu.as_ref().map_or_else(String::new, |version| format!("; {version}")),
        if report.quick { "; quick: a look, not a proof" } else { "" }
    );
    for row in &report.rows {
        let _ = writeln!(text, "{}  {}: {}", word(row.outcome, colour), row.row.name(), row.title);
    }
    for row in &report.rows {
        let _ = write!(text, "\n{} ({})\n\n{}", row.row.name(), duration(row.took_ns as f64), details(row, colour));
    }
    if !report.warnings.is_empty() {
        text.push_str("\nBefore you believe this\n\n");
        for warning in &report.warnings {
            let _ = writeln!(text, "  {} {warning}", paint("!", Tone::Bad, colour));
        }
    }
    text
}

fn word(outcome: Outcome, colour: bool) -> String {
    match outcome {
        Outcome::Pass => paint("PASS", Tone::Good, colour),
        Outcome::Fail => paint("FAIL", Tone::Bad, colour),
        Outcome::Unsure => paint("OPEN", Tone::Bad, colour),
        Outcome::Skipped => paint("SKIP", Tone::Faint, colour),
    }
}

fn details(row: &RowResult, colour: bool) -> String {
    let mut order: Vec<&Check> = row.checks.iter().collect();
    let all = order.len();
    if all > CHECKS_SHOWN {
        order.sort_by(|a, b| a.margin().total_cmp(&b.margin()));
        order.sort_by_key(|check| check.outcome.min(Outcome::Skipped));
        let failed = order.iter().filter(|check| check.outcome < Outcome::Skipped).count();
        order.truncate(failed.max(CHECKS_SHOWN));
    }
    let has_intervals = order.iter().any(|check| check.confidence.is_some());
    let mut columns =
        vec![("", Align::Left), ("what", Align::Left), ("measured", Align::Right), ("rounds", Align::Left)];
    columns.extend(has_intervals.then_some(("interval", Align::Left)));
    columns.extend([("bar", Align::Right), ("ours", Align::Right), ("peer", Align::Right)]);
    let mut table = Table::new(&columns);
    for check in &order {
        let tone = match check.outcome {
            Outcome::Pass => Tone::Good,
            Outcome::Fail => Tone::Bad,
            Outcome::Unsure => Tone::Bad,
            Outcome::Skipped => Tone::Faint,
        };
        let label = word(check.outcome, false) + if check.is_close() && !is_open(check) { "?" } else { "" };
        let say = |value: f64| in_unit(value, &check.unit);
        let range = |low, high| format!("{}..{}", say(low), say(high));
        let rounds = check.figure.map(|figure| range(figure.min, figure.max));
        let interval = check.confidence.map(|interval| range(interval.low, interval.high));
        let side =
            |summary: Option<Summary>| summary.map(|side| in_unit(side.median, &check.sides_unit)).unwrap_or_default();
        let mut cells = vec![
            Cell::toned(label, tone),
            Cell::new(check.name.clone()),
            Cell::new(check.figure.map(|figure| say(figure.median)).unwrap_or_default()),
            Cell::toned(rounds.unwrap_or_default(), Tone::Faint),
        ];
        cells.extend(has_intervals.then(|| Cell::new(interval.unwrap_or_default())));
        cells.extend([
            Cell::new(check.bar.map(|bar| bar_text(bar, &check.unit)).unwrap_or_default()),
            Cell::new(side(check.ours)),
            Cell::new(side(check.peer)),
        ]);
        table.row(cells);
    }
    let mut text = table.render(colour);
    if order.len() < all {
        let passed = row.checks.iter().filter(|check| check.outcome == Outcome::Pass).count();
        let _ = writeln!(
            text,
            "  {passed} of {all} passed; shown are those that did not and the closest ones, all are in the JSON"
        );
    }
    for check in &order {
        if let Some(why) = &check.why {
            let _ = writeln!(text, "  {}: {why}", check.name);
        }
    }
    if order.iter().any(|check| is_open(check)) {
        text.push_str("  OPEN: the bar lies inside the interval; more rounds (--rounds) or longer cells would tell\n");
    }
    if order.iter().any(|check| check.is_close() && !is_open(check)) {
        text.push_str("  ?: the rounds are too scattered to be sure; use more rounds (--rounds) or longer cells\n");
    }
    for note in &row.notes {
        let _ = writeln!(text, "  {note}");
    }
    text
}

fn is_open(check: &Check) -> bool {
    check.outcome == Outcome::Unsure
}

fn in_unit(value: f64, unit: &str) -> String {
    match unit {
        "ns" => duration(value),
        "bytes" => bytes(value as u64),
        "ratio" => format!("{value:.2}"),
        unit => format!("{} {unit}", figure(value)),
    }
}

fn bar_text(bar: Bar, unit: &str) -> String {
    match bar {
        Bar::AtLeast(value) => format!(">= {}", in_unit(value, unit)),
        Bar::AtMost(value) => format!("<= {}", in_unit(value, unit)),
    }
}
