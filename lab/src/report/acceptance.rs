//! The chapter of an acceptance run.

use super::ToChapter;
use super::parts::measured_on;
use super::parts::subtitle;
use super::parts::warnings_of;
use crate::acceptance::{self, AcceptanceRecord, Check, Outcome, RowResult};
use diskwright_outline::{
    Block, Cell, Chapter, Table, Tone,
    plot::{Bar, BarChart, Part},
};
use diskwright_stats::numbers::{bytes, figure};
use diskwright_stats::numbers::{duration as time, ratio, short};
use diskwright_stats::summary::Summary;
use maud::Markup;

/// A row with more checks than this shows only those that failed and those closest to their limits.
const CHECKS_SHOWN: usize = 12;

impl ToChapter for AcceptanceRecord {
    fn chapter(&self, id: &str, name: &str) -> Chapter {
        chapter(self, id, name)
    }
}

fn chapter(record: &AcceptanceRecord, id: &str, name: &str) -> Chapter {
    let count = |outcome| record.rows.iter().filter(|row| row.outcome == outcome).count();
    let (kept, broken, skipped) =
        (count(Outcome::Pass), count(Outcome::Fail), count(Outcome::Skipped) + count(Outcome::Unsure));
    let stopped = if record.stopped { "Partial: stopped after these rows. " } else { "" };
    let mut blocks = vec![Block::Table(overview(record))];
    for (index, row) in record.rows.iter().enumerate() {
        blocks.push(Block::Heading(format!("{}: {}", row.row, row.title)));
        if row.checks.iter().any(|check| margin(check).is_some()) {
            blocks.push(Block::Plots(vec![margins(row, &format!("{id}-row{index}"))]));
        }
        blocks.extend(checks(row));
        blocks.extend(row.notes.iter().map(|note| Block::Text(note.clone())));
    }
    let facts = vec![("Engine".into(), record.engine.clone())];
    blocks.extend(measured_on(&record.machine, &record.versions, Some(&record.place), facts));
    let mut badges = vec![match broken {
        0 => (Tone::Good, "no promise broken".to_owned()),
        _ => (Tone::Bad, format!("{broken} broken")),
    }];
    if record.quick {
        badges.push((Tone::Warning, "quick: fewer rounds, less certain".into()));
    }
    Chapter {
        id: id.to_owned(),
        title: record.title.clone(),
        source: name.to_owned(),
        subtitle: subtitle(&record.started_utc, record.took_ns),
        verdict: format!(
            "{stopped}{kept} of {} promises kept, {broken} broken, {skipped} undecided or skipped.",
            record.rows.len()
        ),
        badges,
        warnings: warnings_of(&record.warnings),
        blocks,
    }
}

fn word(outcome: Outcome) -> Cell {
    match outcome {
        Outcome::Pass => Cell::text("kept").toned(Tone::Good),
        Outcome::Fail => Cell::text("broken").toned(Tone::Bad),
        Outcome::Unsure => Cell::text("undecided").toned(Tone::Warning),
        Outcome::Skipped => Cell::text("skipped").toned(Tone::Faint),
    }
}

fn overview(record: &AcceptanceRecord) -> Table {
    let mut table = Table::new("The promises", &["promise", "outcome", "checks passed", "of", "took"]);
    for row in &record.rows {
        let passed = row.checks.iter().filter(|check| check.outcome == Outcome::Pass).count();
        table.row(vec![
            Cell::text(&row.row),
            word(row.outcome),
            Cell::figure(passed as f64, short),
            Cell::figure(row.checks.len() as f64, short),
            Cell::figure(row.took_ns as f64, time),
        ]);
    }
    table
}

/// The measured figure as a ratio to its limit, inverted for an upper limit: 1 is just at the
/// limit, more is better.
fn margin(check: &Check) -> Option<f64> {
    let measured = check.figure?.median;
    Some(check.bar?.margin(measured)).filter(|margin| margin.is_finite())
}

/// A bar chart of the checks closest to their limits.
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
                tooltip: format!(
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
        title: format!("Figures of {} relative to the promised limits", row.row),
        description: format!(
            "{} of {} checks, the closest to its limit first; 1 is the promised limit, more is better. The closest is {}.",
            shown.len(),
            all.len(),
            shown.first().map_or_else(String::new, |(check, margin)| format!("{}, {}", check.name, ratio(*margin)))
        ),
        axis: "measured relative to promised (more is better)",
        write: &short,
        parts: vec![],
        bars,
        reference: Some((1.0, "promised".into())),
    }
    .render()
}

/// The checks that failed, and those closest to their limits. If there are more, all follow in a
/// folded block.
fn checks(row: &RowResult) -> Vec<Block> {
    let mut order: Vec<&Check> = row.checks.iter().collect();
    let all = order.len();
    if all <= CHECKS_SHOWN {
        return vec![Block::Table(check_table("", &order))];
    }
    order.sort_by(|a, b| a.margin().total_cmp(&b.margin()));
    order.sort_by_key(|check| check.outcome.min(Outcome::Skipped));
    let not_kept = order.iter().filter(|check| check.outcome < Outcome::Skipped).count();
    let shown = &order[..not_kept.max(CHECKS_SHOWN).min(all)];
    let kept = row.checks.iter().filter(|check| check.outcome == Outcome::Pass).count();
    let caption = format!("{kept} of {all} checks passed. Shown: those that failed, and those closest to their limits");
    let every: Vec<&Check> = row.checks.iter().collect();
    vec![
        Block::Table(check_table(&caption, shown)),
        Block::Folded { name: "All checks".into(), blocks: vec![Block::Table(check_table("", &every))] },
    ]
}

fn check_table(caption: &str, checks: &[&Check]) -> Table {
    let has = |of: fn(&Check) -> bool| checks.iter().any(|check| of(check));
    let has_intervals = has(|check| check.confidence.is_some());
    let has_sides = has(|check| check.ours.is_some() || check.peer.is_some());
    let has_remarks = has(|check| remark(check).is_some());
    let mut table = Table::new(caption, &["outcome", "check", "measured", "rounds"]).keys(2);
    let optional = [(has_intervals, "interval"), (true, "promised"), (has_sides, "ours"), (has_sides, "peer")];
    table.heads.extend(optional.iter().filter(|(shown, _)| *shown).map(|(_, head)| (*head).to_owned()));
    table.heads.extend(has_remarks.then(|| "remark".to_owned()));
    for check in checks {
        let side = |side: Option<Summary>| {
            Cell::maybe(side.map(|side| side.median), |value| in_unit(value, &check.sides_unit))
        };
        let range = |low, high| {
            Cell::text(format!("{}..{}", in_unit(low, &check.unit), in_unit(high, &check.unit))).toned(Tone::Faint)
        };
        let mut row = vec![
            word(check.outcome),
            Cell::text(&check.name),
            Cell::maybe(check.figure.map(|figure| figure.median), |value| in_unit(value, &check.unit)),
            check.figure.map_or_else(Cell::default, |figure| range(figure.min, figure.max)),
        ];
        if has_intervals {
            row.push(check.confidence.map_or_else(Cell::default, |ends| range(ends.low, ends.high)));
        }
        row.push(Cell::text(check.bar.map(|bar| promised(bar, &check.unit)).unwrap_or_default()));
        if has_sides {
            row.extend([side(check.ours), side(check.peer)]);
        }
        if has_remarks {
            row.push(Cell::text(remark(check).unwrap_or_default()));
        }
        table.row(row);
    }
    table
}

/// An explanation of an outcome that the figures alone do not give.
fn remark(check: &Check) -> Option<String> {
    let open = match check.outcome {
        Outcome::Unsure => Some("the limit is within the confidence interval; use more rounds or longer cells"),
        _ if check.is_close() => Some("the rounds scatter too much for a certain result"),
        _ => None,
    };
    match (&check.why, open) {
        (Some(why), Some(open)) => Some(format!("{open}; {why}")),
        (Some(why), None) => Some(why.clone()),
        (None, open) => open.map(str::to_owned),
    }
}

fn in_unit(value: f64, unit: &str) -> String {
    match unit {
        "ns" => time(value),
        "bytes" => bytes(value as u64),
        "ratio" => ratio(value),
        unit => format!("{} {unit}", figure(value)),
    }
}

fn promised(bar: acceptance::Bar, unit: &str) -> String {
    match bar {
        acceptance::Bar::AtLeast(value) => format!("≥ {}", in_unit(value, unit)),
        acceptance::Bar::AtMost(value) => format!("≤ {}", in_unit(value, unit)),
    }
}
