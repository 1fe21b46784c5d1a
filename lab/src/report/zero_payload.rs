//! The chapter of the study `zero-payload`: what is fast because nothing is stored, and what is
//! fast.

use super::Told;
use super::parts::doubts;
use super::parts::measured_on;
use super::parts::subtitle;
use crate::study::zero_payload::{PAPER_64K_READ_IOPS, Payload, SideRecord, TestRecord, ZeroPayloadResult};
use diskwright_outline::{
    Block, Cell, Chapter, Table, Tone,
    plot::{Bar, BarChart, Part},
};
use diskwright_stats::numbers::bytes;
use diskwright_stats::numbers::{duration as time, figure as rate, percent, ratio, short};
use maud::Markup;

impl Told for ZeroPayloadResult {
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
        "The paper’s only figures in its text: {} IOPS on the dynamic disk against {} on the fixed one, 64K random reads; a ratio of {}.",
        rate(dynamic),
        rate(fixed),
        ratio(dynamic / fixed)
    )));
    blocks.push(Block::Heading("What a look at the disks found before anything was measured".into()));
    blocks.push(Block::Table(disks(result)));
    let mut facts = Vec::new();
    facts.push(("Each disk".into(), format!("VHDX of {}", bytes(result.size_bytes))));
    facts.push(("Rounds".into(), format!("{}, cells of {}", result.rounds, time(result.cell_ns as f64))));
    blocks.extend(measured_on(&result.machine, &result.versions, Some(&result.place), facts));
    let mut badges = vec![(Tone::Plain, format!("{} rounds", result.rounds))];
    if result.quick {
        badges.push((Tone::Doubt, "quick".into()));
    }
    Chapter {
        id: id.to_owned(),
        title: "Study of zero payload".into(),
        source: name.to_owned(),
        subtitle: subtitle(&result.started_utc, result.took_ns),
        verdict: result.verdict.clone(),
        badges,
        doubts: doubts(&result.warnings),
        blocks,
    }
}

fn title(payload: Payload) -> &'static str {
    match payload {
        Payload::Zeros => "Zeros, on disks that were written with zeros: what SQLIO measured",
        Payload::Data => "Data that cannot be compressed, on disks full of it: what storage does",
    }
}

fn of(result: &ZeroPayloadResult, payload: Payload) -> impl Iterator<Item = &TestRecord> {
    result.tests.iter().filter(move |test| test.payload == payload)
}

fn bars(result: &ZeroPayloadResult, payload: Payload, id: &str) -> Markup {
    let bars: Vec<Bar> = of(result, payload)
        .map(|test| {
            let never = percent(test.dynamic.never_reached.median);
            Bar {
                name: test.name.clone(),
                parts: vec![Part { value: test.ratio.median(), style: 0 }],
                range: Some((test.ratio.summary.min, test.ratio.summary.max)),
                figure: format!("{} ({never} not stored)", ratio(test.ratio.median())),
                says: format!(
                    "{}: {} IOPS on the dynamic disk, {} on the fixed one; {never} of the dynamic disk’s bytes never reached the store",
                    test.name,
                    rate(test.dynamic.iops.median),
                    rate(test.fixed.iops.median)
                ),
            }
        })
        .collect();
    let (part, what) = match payload {
        Payload::Zeros => ("zeros", "zeros"),
        Payload::Data => ("data", "data"),
    };
    BarChart {
        id: format!("{id}-{part}"),
        title: format!("IOPS of the dynamic disk to the fixed one’s, {what}"),
        description: format!("{} tests; 1 is as fast as the fixed disk.", bars.len()),
        axis: "ratio in the same round: median, lowest to highest",
        write: &short,
        parts: vec![],
        bars,
        reference: Some((1.0, "the fixed disk".into())),
    }
    .render()
}

fn tests(result: &ZeroPayloadResult, payload: Payload) -> Table {
    let mut table = Table::new(
        "Medians of the rounds. Not stored: share of the bytes that the kernel never saw this process move.",
        &["test", "disk", "IOPS", "MB/s", "mean", "p99", "not stored", "ratio", "range"],
    )
    .keys(2);
    for test in of(result, payload) {
        let side = |name: &str, disk: &str, side: &SideRecord| {
            let never = side.never_reached.median;
            vec![
                Cell::text(name),
                Cell::text(disk),
                Cell::figure(side.iops.median, rate),
                Cell::figure(side.mb_per_s.median, rate),
                Cell::figure(side.latency_mean_ns.median, time),
                Cell::figure(side.latency_p99_ns.median, time),
                Cell::figure(never, percent).toned(if never >= 0.01 { Tone::Bad } else { Tone::Good }),
            ]
        };
        let mut row = side(&test.name, "dynamic", &test.dynamic);
        row.push(Cell::figure(test.ratio.median(), ratio));
        let range = format!("{}..{}", ratio(test.ratio.summary.min), ratio(test.ratio.summary.max));
        row.push(Cell::text(range).toned(Tone::Faint));
        table.row(row);
        let mut row = side("", "fixed", &test.fixed);
        row.push(Cell::default());
        table.row(row);
    }
    table
}

fn disks(result: &ZeroPayloadResult) -> Table {
    let mut table = Table::new(
        "What “lab run” would have said first",
        &["disk", "space of its file", "zeros", "with space", "said"],
    );
    for disk in &result.disks {
        let said: Vec<String> = disk.said.iter().map(ToString::to_string).collect();
        let told = if said.is_empty() {
            Cell::text("nothing: it is full of data").toned(Tone::Good)
        } else {
            Cell::text(said.join(" ")).toned(Tone::Bad)
        };
        table.row(vec![
            Cell::text(&disk.name),
            Cell::figure(disk.file_allocated_bytes as f64, |value| bytes(value as u64)),
            Cell::figure(disk.contents.zero, percent),
            Cell::figure(disk.contents.allocated, percent),
            told,
        ]);
    }
    table
}
