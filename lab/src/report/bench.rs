//! The chapter of a bench: which promises are kept.

use super::{
    machine,
    outline::{Block, Cell, Chapter, Doubt, Table, Tone},
    plot::{Bar, BarChart, Part},
    write::{ratio, short, subtitle, time},
};
use crate::{
    bench::{self, BenchReport, Check, Outcome, RowResult},
    table::{bytes, figure},
};
use maud::Markup;

/// The chapter. `id` is unique in the report; `name` is that of the file.
pub fn chapter(report: &BenchReport, id: &str, name: &str) -> Chapter {
    let count = |outcome| report.rows.iter().filter(|row| row.outcome == outcome).count();
    let (kept, broken, skipped) =
        (count(Outcome::Pass), count(Outcome::Fail), count(Outcome::Skipped) + count(Outcome::Unsure));
    let mut blocks = vec![Block::Table(overview(report))];
    for (index, row) in report.rows.iter().enumerate() {
        blocks.push(Block::Heading(format!("{}: {}", row.row.name(), row.title)));
        if row.checks.iter().any(|check| margin(check).is_some()) {
            blocks.push(Block::Plots(vec![margins(row, &format!("{id}-row{index}"))]));
        }
        blocks.push(Block::Table(checks(row)));
        blocks.extend(row.notes.iter().map(|note| Block::Text(note.clone())));
    }
    let mut facts = machine::facts(&report.machine, &report.versions);
    facts.push(machine::place(&report.place));
    facts.push(("Engine".into(), report.engine.clone()));
    blocks.push(Block::Heading("Machine and options".into()));
    blocks.push(Block::Facts(facts));
    let mut badges = vec![match broken {
        0 => (Tone::Good, "no promise broken".to_owned()),
        _ => (Tone::Bad, format!("{broken} broken")),
    }];
    if report.quick {
        badges.push((Tone::Doubt, "quick: a look, not a proof".into()));
    }
    Chapter {
        id: id.to_owned(),
        title: name.to_owned(),
        subtitle: subtitle("Bench", &report.started_utc, report.took_ns),
        verdict: format!(
            "{kept} of {} promises are kept, {broken} are broken, {skipped} could not be measured in full.",
            report.rows.len()
        ),
        badges,
        doubts: Doubt::of_all(&report.warnings),
        blocks,
    }
}

fn word(outcome: Outcome) -> Cell {
    match outcome {
        Outcome::Pass => Cell::text("kept").toned(Tone::Good),
        Outcome::Fail => Cell::text("broken").toned(Tone::Bad),
        Outcome::Unsure => Cell::text("open").toned(Tone::Doubt),
        Outcome::Skipped => Cell::text("skipped").toned(Tone::Faint),
    }
}

fn overview(report: &BenchReport) -> Table {
    let mut table = Table::new("The promises", &["promise", "outcome", "checks passed", "of", "took"]);
    for row in &report.rows {
        let passed = row.checks.iter().filter(|check| check.outcome == Outcome::Pass).count();
        table.row(vec![
            Cell::text(row.row.name()),
            word(row.outcome),
            Cell::figure(passed as f64, short),
            Cell::figure(row.checks.len() as f64, short),
            Cell::figure(row.took_ns as f64, time),
        ]);
    }
    table
}

/// How far a figure is on the good side of its bar: 1 is just there, more is better.
fn margin(check: &Check) -> Option<f64> {
    let measured = check.figure?.median;
    Some(check.bar?.margin(measured)).filter(|margin| margin.is_finite())
}

/// The closest checks of a row.
fn margins(row: &RowResult, id: &str) -> Markup {
    const SHOWN: usize = 16;
    let mut all: Vec<(&Check, f64)> = row.checks.iter().filter_map(|check| Some((check, margin(check)?))).collect();
    all.sort_by(|a, b| a.1.total_cmp(&b.1));
    let shown = &all[..all.len().min(SHOWN)];
    let bars: Vec<Bar> = shown
        .iter()
        .map(|(check, margin)| {
            let value = |value: f64| in_unit(value, &check.unit);
            Bar {
                name: check.name.clone(),
                parts: vec![Part { value: *margin, style: 0 }],
                range: None,
                figure: ratio(*margin),
                says: format!(
                    "{}: measured {}, promised {}",
                    check.name,
                    check.figure.map(|figure| value(figure.median)).unwrap_or_default(),
                    check.bar.map(|bar| promised(bar, &check.unit)).unwrap_or_default()
                ),
            }
        })
        .collect();
    BarChart {
        id: id.into(),
        title: format!("How far {} is beyond what is promised", row.row.name()),
        description: format!(
            "{} of {} checks, the closest first; 1 is just what is promised, more is better. The closest is {}.",
            shown.len(),
            all.len(),
            shown.first().map_or_else(String::new, |(check, margin)| format!("{}, {}", check.name, ratio(*margin)))
        ),
        axis: "measured against promised (ratio; more is better)",
        write: &short,
        parts: vec![],
        bars,
        reference: Some((1.0, "promised".into())),
    }
    .render()
}

fn checks(row: &RowResult) -> Table {
    let mut table = Table::new(
        "Every figure that was judged",
        &["check", "outcome", "measured", "rounds", "promised", "ours", "peer"],
    );
    for check in &row.checks {
        let side = |side: Option<crate::stats::Summary>| {
            Cell::maybe(side.map(|side| side.median), |value| in_unit(value, &check.sides_unit))
        };
        let rounds = check
            .figure
            .map(|figure| format!("{} to {}", in_unit(figure.min, &check.unit), in_unit(figure.max, &check.unit)));
        table.row(vec![
            Cell::text(&check.name),
            word(check.outcome),
            Cell::maybe(check.figure.map(|figure| figure.median), |value| in_unit(value, &check.unit)),
            Cell::text(rounds.or_else(|| check.why.clone()).unwrap_or_default()).toned(Tone::Faint),
            Cell::text(check.bar.map(|bar| promised(bar, &check.unit)).unwrap_or_default()),
            side(check.ours),
            side(check.peer),
        ]);
    }
    table
}

fn in_unit(value: f64, unit: &str) -> String {
    match unit {
        "ns" => time(value),
        "bytes" => bytes(value as u64),
        "ratio" => ratio(value),
        unit => format!("{} {unit}", figure(value)),
    }
}

fn promised(bar: bench::Bar, unit: &str) -> String {
    match bar {
        bench::Bar::AtLeast(value) => format!("≥ {}", in_unit(value, unit)),
        bench::Bar::AtMost(value) => format!("≤ {}", in_unit(value, unit)),
    }
}
