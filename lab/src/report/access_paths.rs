//! The chapter of the study `access-paths`.

use super::Told;
use super::parts::doubts;
use super::parts::measured_on;
use super::parts::subtitle;
use crate::{
    measure::Ratio,
    study::access_paths::{
        AccessPathsResult, CellRecord, LoadRecord, PAPER_WITHIN, Way,
        verdict::{cell_of, relative},
    },
};
use diskwright_outline::{
    Block, Cell, Chapter, Table, Tone,
    plot::{Axis, Bar, BarChart, LineChart, Part, Point, Scale, Series},
};
use diskwright_stats::numbers::bytes;
use diskwright_stats::numbers::{duration as time, figure as rate, short, short_time};
use maud::Markup;

impl Told for AccessPathsResult {
    fn chapter(&self, id: &str, name: &str) -> Chapter {
        chapter(self, id, name)
    }
}

fn chapter(result: &AccessPathsResult, id: &str, name: &str) -> Chapter {
    let mut blocks = Vec::new();
    if let Some(heavy) = result.loads.last() {
        blocks.push(Block::Heading("On the paper’s scale".into()));
        blocks.push(Block::Plots(vec![
            scale_bars(result, &format!("{id}-iops"), &IOPS),
            scale_bars(result, &format!("{id}-latency"), &LATENCY),
        ]));
        blocks.push(Block::Table(scale_table(result)));
        blocks.push(Block::Text(format!(
            "The paper compares Fibre Channel (100), iSCSI and SMB 3.0 on one storage system. In its words all lie within {:.0} % of one another in throughput and within {:.0} % in latency at every load, and their CPU use is not significantly different; the figures of its charts are not in its text.",
            100.0 * PAPER_WITHIN.0,
            100.0 * PAPER_WITHIN.1
        )));
        blocks.push(Block::Heading("Throughput against response time".into()));
        blocks.push(Block::Plots(vec![curve(result, &format!("{id}-curve")), cpu_bars(heavy, &format!("{id}-cpu"))]));
    }
    for load in &result.loads {
        blocks.push(Block::Table(details(load)));
    }
    blocks.push(Block::Table(ways(result)));
    blocks.extend(measured_on(&result.machine, &result.versions, Some(&result.place), facts(result)));
    let mut badges = vec![(Tone::Plain, format!("{} rounds", result.rounds))];
    if result.stopped {
        badges.push((Tone::Bad, format!("stopped, {} rounds were asked for", result.rounds_asked)));
    }
    if result.quick {
        badges.push((Tone::Doubt, "quick".into()));
    }
    Chapter {
        id: id.to_owned(),
        title: "Study of access paths".into(),
        source: name.to_owned(),
        subtitle: subtitle(&result.started_utc, result.took_ns),
        verdict: result.verdict.clone(),
        badges,
        doubts: doubts(&result.warnings),
        blocks,
    }
}

/// A figure that is set on the paper's scale.
struct OnScale {
    title: &'static str,
    axis: &'static str,
    of: fn(&CellRecord) -> Option<&Ratio>,
}

const IOPS: OnScale = OnScale {
    title: "Throughput, the disk in process = 100",
    axis: "IOPS (in process = 100; whiskers: the rounds' range)",
    of: |cell| cell.iops_ratio.as_ref(),
};
const LATENCY: OnScale = OnScale {
    title: "Response time, the disk in process = 100",
    axis: "mean response time (in process = 100; whiskers: the rounds' range)",
    of: |cell| cell.mean_ratio.as_ref(),
};

fn scale_bars(result: &AccessPathsResult, id: &str, figure: &OnScale) -> Markup {
    let mut bars = Vec::new();
    for load in &result.loads {
        for cell in &load.cells {
            let Some(ratio) = (figure.of)(cell) else { continue };
            let name = format!("{}, {}", load.name, cell.way.name());
            bars.push(Bar {
                parts: vec![Part { value: 100.0 * ratio.median(), style: 0 }],
                range: Some((100.0 * ratio.summary.min, 100.0 * ratio.summary.max)),
                figure: relative(ratio.median()),
                says: format!(
                    "{name}: {}, from {} to {}",
                    relative(ratio.median()),
                    relative(ratio.summary.min),
                    relative(ratio.summary.max)
                ),
                name,
            });
        }
    }
    BarChart {
        id: id.into(),
        title: figure.title.into(),
        description: bars.iter().map(|bar| bar.says.clone()).collect::<Vec<_>>().join("; "),
        axis: figure.axis,
        write: &short,
        parts: vec![],
        bars,
        reference: Some((100.0, "in process".into())),
    }
    .render()
}

/// CPU time of client and server for each request, and what the kernel's own threads add.
fn cpu_bars(load: &LoadRecord, id: &str) -> Markup {
    let bars: Vec<Bar> = load
        .cells
        .iter()
        .map(|cell| {
            let (client, server) = (cell.client_cpu_ns.median, cell.server_cpu_ns.map_or(0.0, |server| server.median));
            let rest = (cell.machine_cpu_ns.median - client - server).max(0.0);
            Bar {
                name: cell.way.name().into(),
                parts: [client, server, rest]
                    .into_iter()
                    .enumerate()
                    .map(|(style, value)| Part { value, style })
                    .collect(),
                range: None,
                figure: short_time(client + server + rest),
                says: format!(
                    "{}: client {}, server {}, the rest of the machine {}",
                    cell.way.name(),
                    time(client),
                    time(server),
                    time(rest)
                ),
            }
        })
        .collect();
    BarChart {
        id: id.into(),
        title: format!("CPU time for each request, {} load", load.name),
        description: bars.iter().map(|bar| bar.says.clone()).collect::<Vec<_>>().join("; "),
        axis: "CPU time for each request (median of the rounds)",
        write: &short_time,
        parts: vec!["client".into(), "server".into(), "kernel threads and others".into()],
        reference: None,
        bars,
    }
    .render()
}

fn curve(result: &AccessPathsResult, id: &str) -> Markup {
    let ways: Vec<Way> = result.loads.first().into_iter().flat_map(|load| &load.cells).map(|cell| cell.way).collect();
    let series: Vec<Series> = ways
        .iter()
        .enumerate()
        .map(|(style, way)| {
            let points = result.loads.iter().filter_map(|load| {
                let cell = cell_of(load, *way)?;
                let says = format!(
                    "{}, {} load: {} IOPS, mean response time {}",
                    way.name(),
                    load.name,
                    rate(cell.iops.median),
                    time(cell.mean_ns.median)
                );
                Some(Point { x: cell.iops.median, y: cell.mean_ns.median, says })
            });
            Series { name: way.name().into(), points: points.collect(), style, line: true }
        })
        .collect();
    let all = || series.iter().flat_map(|line| &line.points);
    LineChart {
        id: id.into(),
        title: "Throughput against response time".into(),
        description: "A line is a way to the disk, its points are light, medium and heavy load.".into(),
        x: Axis {
            title: "IOPS",
            scale: Scale::from_zero(all().map(|point| point.x).fold(0.0, f64::max)),
            write: &short,
            at: None,
        },
        y: Axis {
            title: "mean response time",
            scale: Scale::from_zero(all().map(|point| point.y).fold(0.0, f64::max)),
            write: &short_time,
            at: None,
        },
        series,
        bands: vec![],
        marks: vec![],
        rules: vec![],
    }
    .render()
}

fn scale_table(result: &AccessPathsResult) -> Table {
    let mut table = Table::new("As a ratio to the disk in process in the same round, times 100", &["way"]);
    for load in &result.loads {
        table.heads.extend([format!("IOPS, {}", load.name), format!("response time, {}", load.name)]);
    }
    for way in result.loads.first().into_iter().flat_map(|load| &load.cells).map(|cell| cell.way) {
        let mut row = vec![Cell::text(way.name())];
        for load in &result.loads {
            let of = |figure: &OnScale| {
                let ratio = cell_of(load, way).map(|cell| (figure.of)(cell).map_or(1.0, Ratio::median));
                Cell::maybe(ratio.map(|ratio| 100.0 * ratio), |value| format!("{value:.0}"))
            };
            row.extend([of(&IOPS), of(&LATENCY)]);
        }
        table.row(row);
    }
    table
}

fn details(load: &LoadRecord) -> Table {
    let mut table = Table::new(
        format!(
            "{} load: {} clients with {} outstanding each; medians of the rounds",
            load.name, load.clients, load.outstanding
        ),
        &[
            "way",
            "IOPS",
            "lowest",
            "highest",
            "MB/s",
            "mean",
            "p99",
            "CPU, client",
            "CPU, server",
            "CPU, machine",
            "client and server, ratio",
        ],
    );
    for cell in &load.cells {
        table.row(vec![
            Cell::text(cell.way.name()),
            Cell::figure(cell.iops.median, rate),
            Cell::figure(cell.iops.min, rate),
            Cell::figure(cell.iops.max, rate),
            Cell::figure(cell.mb_per_s.median, rate),
            Cell::figure(cell.mean_ns.median, time),
            Cell::figure(cell.p99_ns.median, time),
            Cell::figure(cell.client_cpu_ns.median, time),
            Cell::maybe(cell.server_cpu_ns.map(|server| server.median), time),
            Cell::figure(cell.machine_cpu_ns.median, time),
            Cell::maybe(cell.cpu_ratio.as_ref().map(Ratio::median), |ratio| format!("{ratio:.2}")),
        ]);
    }
    table
}

fn ways(result: &AccessPathsResult) -> Table {
    let mut table = Table::new("The ways to the disk", &["way", "what it is", "measured"]);
    for record in &result.ways {
        table.row(vec![
            Cell::text(record.way.name()),
            Cell::text(record.way.description()),
            match &record.skipped {
                None => Cell::text("yes"),
                Some(why) => Cell::text(format!("no: {why}")).toned(Tone::Doubt),
            },
        ]);
    }
    table
}

fn facts(result: &AccessPathsResult) -> Vec<(String, String)> {
    let mut facts = Vec::new();
    let mut add = |name: &str, value: String| facts.push((name.to_owned(), value));
    add("Disk", format!("{}, {}, populated", result.disk.name(), bytes(result.size_bytes)));
    add("Workload", "8K random, 70 % reads, contents that cannot be compressed".into());
    add("Cell", format!("{}, a fifth of it to warm up", time(result.cell_ns as f64)));
    add("Between cells", "the disk is as it was filled: writes went to a child that is dropped".into());
    facts
}
