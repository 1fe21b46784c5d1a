//! The chapter of the study `tiers`.

use super::{
    ToChapter,
    parts::{self, how_measured},
};
use crate::{
    cells::Cell as Measured,
    study::tiers::{AFTER, BEFORE, FAST_SHARE, OptimizationRecord, TierRecord, TiersResult},
};
use diskwright_outline::{
    Block, Cell, Chapter, Table, Tile, Tone,
    plot::{Bar, BarChart, Part},
};
use diskwright_stats::{
    numbers::{bytes, duration as time, figure as rate, grouped as count, percent, ratio, short},
    summary::median,
};
use maud::Markup;

impl ToChapter for TiersResult {
    fn chapter(&self, id: &str, name: &str) -> Chapter {
        chapter(self, id, name)
    }
}

fn chapter(result: &TiersResult, id: &str, name: &str) -> Chapter {
    let mut blocks = vec![Block::Tiles(tiles(result))];
    blocks.push(Block::Plots(vec![iops(result, id), curve(result, id)]));
    blocks.push(Block::Heading("Before and after the optimisation".into()));
    blocks.push(Block::Table(cells(result)));
    blocks.push(Block::Heading("The report of the tiers, as in the paper".into()));
    blocks.push(Block::Table(needed(result)));
    blocks.push(Block::Heading("Each optimisation".into()));
    blocks.push(Block::Table(optimizations(result)));
    let facts = vec![
        (
            "Disk".into(),
            format!("{} of incompressible data, copies of each slab: {}", bytes(result.size_bytes), result.copies),
        ),
        ("Fast members".into(), members(&result.fast, result.copies)),
        ("Slow members".into(), members(&result.slow, result.copies)),
        ("Load".into(), format!("zipf {}; other popular blocks in each round", result.theta)),
        ("Rounds".into(), format!("{}, cells of {}", result.rounds, time(result.cell_ns as f64))),
    ];
    blocks.extend(how_measured(&result.head, facts));
    let badges = parts::badges(&result.head, result.rounds, result.quick);
    parts::chapter(&result.head, (id, name), "Study of tiers", badges, blocks)
}

fn members(tier: &TierRecord, copies: u8) -> String {
    let speed = match (tier.iops, tier.latency_ns) {
        (None, 0) => "at their own speed".into(),
        (Some(iops), ns) => format!("each limited to {} IOPS and {}", count(iops as f64), time(ns as f64)),
        (None, ns) => format!("each request takes {} more", time(ns as f64)),
    };
    let dir = tier.dir.as_ref().map_or_else(String::new, |dir| format!(", in {dir}"));
    format!("{copies}, {speed}{dir}")
}

fn tiles(result: &TiersResult) -> Vec<Tile> {
    let gain =
        result.cell(AFTER).zip(result.cell(BEFORE)).and_then(|(after, before)| after.ratio(before, |round| round.iops));
    let share = |name: &str, figure: fn(&OptimizationRecord) -> f64| Tile {
        name: name.into(),
        cell: Cell::maybe(result.median_of(figure), percent),
        unit: String::new(),
    };
    vec![
        share("Served by fast members", |round| round.measured),
        share("Predicted", |round| round.predicted),
        share("Best placement", |round| round.best),
        Tile {
            name: "IOPS after, relative to before".into(),
            cell: Cell::maybe(gain.map(|gain| gain.median()), ratio),
            unit: String::new(),
        },
    ]
}

fn iops(result: &TiersResult, id: &str) -> Markup {
    let bar = |subject: &str| {
        let cell = result.cell(subject)?;
        let value = cell.median(|round| round.iops)?;
        let summary = cell.summary_of(|round| round.iops)?;
        Some(Bar {
            name: subject.to_owned(),
            parts: vec![Part { value, style: 0 }],
            range: (cell.rounds.len() > 1).then_some((summary.min, summary.max)),
            figure: rate(value),
            tooltip: format!("{subject} the optimisation: {} IOPS", rate(value)),
        })
    };
    BarChart {
        id: format!("{id}-iops"),
        title: "IOPS before and after the optimisation".into(),
        description: "Two bars; more is better.".into(),
        axis: "requests per second (median; line: range)",
        write: &short,
        parts: vec![],
        bars: [BEFORE, AFTER].into_iter().filter_map(bar).collect(),
        reference: None,
    }
    .render()
}

/// What fast members of other sizes would serve, by the last round.
fn curve(result: &TiersResult, id: &str) -> Markup {
    let points = result.optimizations.last().map_or(&[][..], |last| &last.curve);
    let bar = |&(fast_bytes, share): &(u64, f64)| {
        let size = bytes(fast_bytes / u64::from(result.copies.max(1)));
        Bar {
            tooltip: format!("fast members that hold {size} would serve {}", percent(share)),
            name: size,
            parts: vec![Part { value: share, style: 0 }],
            range: None,
            figure: percent(share),
        }
    };
    BarChart {
        id: format!("{id}-curve"),
        title: "What fast members of other sizes would serve".into(),
        description: format!("{} sizes; the share of the requests that they would serve.", points.len()),
        axis: "share of the requests",
        write: &percent,
        parts: vec![],
        bars: points.iter().map(bar).collect(),
        reference: result.optimizations.last().map(|last| (last.measured, "measured".into())),
    }
    .render()
}

fn cells(result: &TiersResult) -> Table {
    let mut table = Table::new(
        "Medians of the rounds. On fast members: share of all requests to members, those of the copies included.",
        &["load", "optimisation", "IOPS", "MB/s", "mean", "p99", "on fast members"],
    )
    .keys(2);
    for cell in &result.cells {
        let of = |figure: fn(&diskwright_load::figures::Figures) -> f64| cell.median(figure);
        table.row(vec![
            Cell::text(&cell.load),
            Cell::text(&cell.subject),
            Cell::maybe(of(|round| round.iops), rate),
            Cell::maybe(of(|round| round.mb_per_s), rate),
            Cell::maybe(of(|round| round.mean_ns), time),
            Cell::maybe(of(|round| round.p99_ns), time),
            Cell::maybe(fast_share(cell), percent),
        ]);
    }
    table
}

fn fast_share(cell: &Measured) -> Option<f64> {
    median(&cell.more(FAST_SHARE)?)
}

fn needed(result: &TiersResult) -> Table {
    let mut table = Table::new(
        "What the fast members must hold of the disk to serve a share of the requests, by the last round. *: they can hold it.",
        &["requests served", "must hold", "of the disk"],
    );
    for (share, fast_bytes) in result.optimizations.last().map_or(&[][..], |last| &last.needed) {
        let each = fast_bytes / u64::from(result.copies.max(1));
        let fits = each <= result.fast_bytes;
        let size = if fits { format!("{} *", bytes(each)) } else { bytes(each) };
        let tone = if fits { Tone::Good } else { Tone::Plain };
        table.row(vec![
            Cell::text(percent(*share)),
            Cell::text(size).toned(tone),
            Cell::figure(each as f64 / result.size_bytes.max(1) as f64, percent),
        ]);
    }
    table
}

fn optimizations(result: &TiersResult) -> Table {
    let mut table = Table::new(
        "Predicted: share of the requests that the fast members would serve, by what was counted before. Best: of the best placement, by what was counted until the end. Working set: slabs that get nine of ten requests.",
        &["round", "took", "to fast members", "to slow members", "predicted", "measured", "best", "working set"],
    );
    for (round, one) in (1..).zip(&result.optimizations) {
        table.row(vec![
            Cell::text(round.to_string()),
            Cell::figure(one.took_ns as f64, time),
            Cell::text(bytes(one.to_fast_bytes)),
            Cell::text(bytes(one.to_slow_bytes)),
            Cell::figure(one.predicted, percent),
            Cell::figure(one.measured, percent),
            Cell::figure(one.best, percent),
            Cell::text(bytes(one.working_set_bytes)),
        ]);
    }
    table
}
