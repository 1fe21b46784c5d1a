//! The chapter of the study `zero-payload`.

use super::{
    ToChapter,
    parts::{self, how_measured},
};
use crate::{
    cells::Cell as Measured,
    study::zero_payload::{PAPER_64K_READ_IOPS, Payload, Test, ZeroPayloadResult, not_stored},
};
use diskwright_load::figures::Figures;
use diskwright_outline::{
    Block, Cell, Chapter, Table, Tone,
    plot::{Bar, BarChart, Part},
};
use diskwright_stats::numbers::{bytes, duration as time, figure as rate, percent, ratio, short};
use maud::Markup;

impl ToChapter for ZeroPayloadResult {
    fn chapter(&self, id: &str, name: &str) -> Chapter {
        chapter(self, id, name)
    }
}

fn chapter(result: &ZeroPayloadResult, id: &str, name: &str) -> Chapter {
    let mut blocks = vec![Block::Plots(vec![bars(result, Payload::Zeros, id), bars(result, Payload::Data, id)])];
    for payload in [Payload::Zeros, Payload::Data] {
        blocks.push(Block::Heading(title(payload).into()));
        blocks.push(Block::Table(tests(result, payload)));
    }
    let (dynamic, fixed) = PAPER_64K_READ_IOPS;
    blocks.push(Block::Text(format!(
        "The paper’s only figures in its text: 64K random reads, {} IOPS on the dynamic disk and {} on the fixed disk, a ratio of {}.",
        rate(dynamic),
        rate(fixed),
        ratio(dynamic / fixed)
    )));
    blocks.push(Block::Heading("Inspection of the disks before measuring".into()));
    blocks.push(Block::Table(disks(result)));
    let mut facts = Vec::new();
    facts.push(("Each disk".into(), format!("VHDX of {}", bytes(result.size_bytes))));
    facts.push(("Rounds".into(), format!("{}, cells of {}", result.rounds, time(result.cell_ns as f64))));
    blocks.extend(how_measured(&result.head, facts));
    let badges = parts::badges(&result.head, result.rounds, result.quick);
    parts::chapter(&result.head, (id, name), "Study of zero payload", badges, blocks)
}

fn title(payload: Payload) -> &'static str {
    match payload {
        Payload::Zeros => "Zeros, on disks filled with zeros, as SQLIO measured",
        Payload::Data => "Incompressible data, on disks filled with it",
    }
}

fn bars(result: &ZeroPayloadResult, payload: Payload, id: &str) -> Markup {
    let bars: Vec<Bar> = Test::all(&result.cells, payload)
        .iter()
        .filter_map(|test| {
            let never = percent(not_stored(test.dynamic)?);
            let found = test.ratio()?;
            Some(Bar {
                name: test.name.to_owned(),
                parts: vec![Part { value: found.median(), style: 0 }],
                range: found.range(),
                figure: format!("{} ({never} not stored)", ratio(found.median())),
                tooltip: format!(
                    "{}: {} IOPS on the dynamic disk, {} on the fixed disk; {never} of the dynamic disk’s bytes never reached storage",
                    test.name,
                    rate(test.dynamic.median(|round| round.iops)?),
                    rate(test.fixed.median(|round| round.iops)?)
                ),
            })
        })
        .collect();
    let what = payload.name();
    BarChart {
        id: format!("{id}-{what}"),
        title: format!("IOPS of the dynamic disk relative to the fixed disk, {what}"),
        description: format!("{} tests; 1 is as fast as the fixed disk.", bars.len()),
        axis: "ratio in the same round (median; line: range)",
        write: &short,
        parts: vec![],
        bars,
        reference: Some((1.0, "the fixed disk".into())),
    }
    .render()
}

fn tests(result: &ZeroPayloadResult, payload: Payload) -> Table {
    let mut table = Table::new(
        "Medians of the rounds. Not stored: share of the bytes that this process did not read or write, by the kernel’s account.",
        &["test", "disk", "IOPS", "MB/s", "mean", "p99", "not stored", "ratio", "range"],
    )
    .keys(2);
    for test in Test::all(&result.cells, payload) {
        let side = |name: &str, cell: &Measured| {
            let never = not_stored(cell).unwrap_or_default();
            let of = |figure: fn(&Figures) -> f64| cell.median(figure);
            vec![
                Cell::text(name),
                Cell::text(&cell.subject),
                Cell::maybe(of(|round| round.iops), rate),
                Cell::maybe(of(|round| round.mb_per_s), rate),
                Cell::maybe(of(|round| round.mean_ns), time),
                Cell::maybe(of(|round| round.p99_ns), time),
                Cell::figure(never, percent).toned(if never >= 0.01 { Tone::Bad } else { Tone::Good }),
            ]
        };
        let mut row = side(test.name, test.dynamic);
        let found = test.ratio();
        let range =
            found.as_ref().and_then(|found| found.range()).map(|(min, max)| format!("{}..{}", ratio(min), ratio(max)));
        row.push(Cell::maybe(found.map(|found| found.median()), ratio));
        row.push(Cell::text(range.unwrap_or_default()).toned(Tone::Faint));
        table.row(row);
        let mut row = side("", test.fixed);
        row.push(Cell::default());
        table.row(row);
    }
    table
}

fn disks(result: &ZeroPayloadResult) -> Table {
    let mut table =
        Table::new("Warnings of “lab run” for these disks", &["disk", "file takes", "zeros", "allocated", "warnings"]);
    for disk in &result.disks {
        let warnings: Vec<String> = disk.warnings.iter().map(ToString::to_string).collect();
        let text = if warnings.is_empty() {
            Cell::text("none: it is full of data").toned(Tone::Good)
        } else {
            Cell::text(warnings.join(" ")).toned(Tone::Bad)
        };
        table.row(vec![
            Cell::text(&disk.name),
            Cell::figure(disk.file_allocated_bytes as f64, |value| bytes(value as u64)),
            Cell::figure(disk.contents.zero, percent),
            Cell::figure(disk.contents.allocated, percent),
            text,
        ]);
    }
    table
}
