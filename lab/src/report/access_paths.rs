//! The chapter of the study `access-paths`.

use super::{
    ToChapter,
    parts::{self, how_measured},
};
use crate::{
    cells::{Cell as Measured, Compared},
    guest::{Accelerator, GuestRecord},
    study::access_paths::{
        AccessPath, AccessPathsResult, CLIENTS, PAPER_WITHIN, SERVER_CPU_NS,
        record::{self, CellFigure},
        verdict::relative,
    },
};
use diskwright_load::{figures::Figures, record::End};
use diskwright_outline::{
    Block, Cell, Chapter, Table, Tone,
    plot::{Axis, Bar, BarChart, LineChart, Part, Point, Scale, Series},
};
use diskwright_stats::{
    numbers::{bytes, duration as time, figure as rate, short, short_time},
    summary::median,
};
use maud::Markup;

impl ToChapter for AccessPathsResult {
    fn chapter(&self, id: &str, name: &str) -> Chapter {
        chapter(self, id, name)
    }
}

fn chapter(result: &AccessPathsResult, id: &str, name: &str) -> Chapter {
    let mut blocks = Vec::new();
    let [loads, guest_loads] = record::scales(&result.cells);
    if let Some(heavy) = loads.last() {
        blocks.push(Block::Heading("Relative to the disk in process".into()));
        blocks.extend(scale(&loads, "the disk in process", id));
        blocks.push(Block::Text(format!(
            "The paper compares Fibre Channel (100), iSCSI and SMB 3.0 on one storage system. According to the paper, all are within {:.0} % of one another in throughput and within {:.0} % in latency at every load, and their CPU use is not significantly different; the charts’ figures are not in the text.",
            100.0 * PAPER_WITHIN.0,
            100.0 * PAPER_WITHIN.1
        )));
        blocks.push(Block::Heading("Throughput against response time".into()));
        blocks.push(Block::Plots(vec![curve(&loads, &format!("{id}-curve")), cpu_bars(heavy, &format!("{id}-cpu"))]));
    }
    for load in &loads {
        blocks.push(Block::Table(details(load)));
    }
    if let Some(guest) = result.guest.as_ref().filter(|_| !guest_loads.is_empty()) {
        blocks.push(Block::Heading("In a guest, relative to its vhost-user disk".into()));
        blocks.push(Block::Text(in_guest(guest)));
        blocks.extend(scale(&guest_loads, "the vhost-user disk", &format!("{id}-guest")));
        for load in &guest_loads {
            blocks.push(Block::Table(guest_details(load)));
        }
    }
    blocks.push(Block::Table(ways(result)));
    blocks.extend(how_measured(&result.head, facts(result)));
    let mut badges = parts::badges(&result.head, result.rounds_measured(), result.quick);
    if result.head.end == End::Stopped {
        badges.push((Tone::Bad, format!("stopped, {} rounds were asked for", result.rounds)));
    }
    parts::chapter(&result.head, (id, name), "Study of access paths", badges, blocks)
}

/// Charts and a table on the paper’s scale. `base` is what has 100.
fn scale(loads: &[Compared<'_>], base: &str, id: &str) -> [Block; 2] {
    let bars = |figure: &OnScale, end: &str| scale_bars(loads, base, &format!("{id}-{end}"), figure);
    [Block::Plots(vec![bars(&IOPS, "iops"), bars(&LATENCY, "latency")]), Block::Table(scale_table(loads, base))]
}

/// What a reader must know of the figures of a guest.
fn in_guest(guest: &GuestRecord) -> String {
    let emulated = match guest.accelerator {
        Accelerator::Kvm => "",
        Accelerator::Tcg => {
            " Its processor is emulated, so its IOPS and response times are those of the emulation: compare them with one another only. The CPU time of the servers is that of this host."
        }
    };
    format!(
        "The clients are those of the guest’s kernel ({}; {}). The guest reaches this host by a tap device.{emulated}",
        guest.accelerator.name(),
        guest.machine.kernel
    )
}

/// A figure on the paper’s scale, where the base is 100.
struct OnScale {
    what: &'static str,
    of: CellFigure,
}

const IOPS: OnScale = OnScale { what: "Throughput", of: record::iops };
const LATENCY: OnScale = OnScale { what: "Mean response time", of: record::mean_ns };

fn scale_bars(loads: &[Compared<'_>], base: &str, id: &str, figure: &OnScale) -> Markup {
    let mut bars = Vec::new();
    for load in loads {
        for way in AccessPath::ALL {
            let Some(ratio) = load.ratio(way.name(), figure.of) else { continue };
            let name = format!("{}, {}", record::load_of(load.part), way.name_on_scale());
            bars.push(Bar {
                parts: vec![Part { value: 100.0 * ratio.median(), style: 0 }],
                range: ratio.range().map(|(min, max)| (100.0 * min, 100.0 * max)),
                figure: relative(ratio.median()),
                tooltip: format!(
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
        title: format!("{}, {base} = 100", figure.what),
        description: bars.iter().map(|bar| bar.tooltip.clone()).collect::<Vec<_>>().join("; "),
        axis: "whiskers: the rounds' range",
        write: &short,
        parts: vec![],
        bars,
        reference: Some((100.0, base.into())),
    }
    .render()
}

/// CPU time of client, server and the rest of the machine per request.
fn cpu_bars(load: &Compared<'_>, id: &str) -> Markup {
    let bars: Vec<Bar> = load
        .cells
        .iter()
        .filter_map(|cell| {
            let (name, medians) = (&cell.subject, cell.medians()?);
            let client = medians.cpu_ns_per_io;
            let server = server_cpu_ns(cell).unwrap_or(0.0);
            let rest = (medians.machine_cpu_ns_per_io - client - server).max(0.0);
            Some(Bar {
                name: name.clone(),
                parts: [client, server, rest]
                    .into_iter()
                    .enumerate()
                    .map(|(style, value)| Part { value, style })
                    .collect(),
                range: None,
                figure: short_time(client + server + rest),
                tooltip: format!(
                    "{name}: client {}, server {}, the rest of the machine {}",
                    time(client),
                    time(server),
                    time(rest)
                ),
            })
        })
        .collect();
    BarChart {
        id: id.into(),
        title: format!("CPU time per request, {} load", load.part),
        description: bars.iter().map(|bar| bar.tooltip.clone()).collect::<Vec<_>>().join("; "),
        axis: "CPU time per request (median of the rounds)",
        write: &short_time,
        parts: vec!["client".into(), "server".into(), "kernel threads and other processes".into()],
        reference: None,
        bars,
    }
    .render()
}

/// Median of the server's CPU time per request, nanoseconds; `None` for an access path without a
/// server.
fn server_cpu_ns(cell: &Measured) -> Option<f64> {
    median(&cell.more(SERVER_CPU_NS)?)
}

/// The access paths measured at the first load.
fn ways_of(loads: &[Compared<'_>]) -> Vec<AccessPath> {
    AccessPath::ALL
        .into_iter()
        .filter(|way| loads.first().is_some_and(|load| load.cell(way.name()).is_some()))
        .collect()
}

fn curve(loads: &[Compared<'_>], id: &str) -> Markup {
    let series: Vec<Series> = ways_of(loads)
        .iter()
        .enumerate()
        .map(|(style, way)| {
            let points = loads.iter().filter_map(|load| {
                let medians = load.cell(way.name())?.medians()?;
                let tooltip = format!(
                    "{}, {} load: {} IOPS, mean response time {}",
                    way.name(),
                    load.part,
                    rate(medians.iops),
                    time(medians.mean_ns)
                );
                Some(Point { x: medians.iops, y: medians.mean_ns, tooltip })
            });
            Series { name: way.name().into(), points: points.collect(), style, line: true, x_error: 0.0 }
        })
        .collect();
    let all = || series.iter().flat_map(|line| &line.points);
    LineChart {
        id: id.into(),
        title: "Throughput against response time".into(),
        description: "Each line is a way to the disk; its points are light, medium and heavy load.".into(),
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

fn scale_table(loads: &[Compared<'_>], base: &str) -> Table {
    let mut table = Table::new(format!("Relative to {base} in the same round (= 100)"), &["way"]);
    for load in loads {
        let load = record::load_of(load.part);
        table.heads.extend([format!("IOPS, {load}"), format!("response time, {load}")]);
    }
    for way in ways_of(loads) {
        let mut row = vec![Cell::text(way.name_on_scale())];
        for load in loads {
            let of = |figure: &OnScale| {
                // The base is 100.
                let ratio = load
                    .cell(way.name())
                    .map(|_| load.ratio(way.name(), figure.of).map_or(1.0, |ratio| ratio.median()));
                Cell::maybe(ratio.map(|ratio| 100.0 * ratio), |value| format!("{value:.0}"))
            };
            row.extend([of(&IOPS), of(&LATENCY)]);
        }
        table.row(row);
    }
    table
}

/// The columns that both scales have, with the cell and its medians; `None` if it was not measured.
fn figures<'a>(load: &Compared<'a>, way: AccessPath) -> Option<(&'a Measured, Figures, Vec<Cell>)> {
    let cell = load.cell(way.name())?;
    let (medians, iops) = (cell.medians()?, cell.summary_of(|round| round.iops)?);
    let row = vec![
        Cell::text(way.name_on_scale()),
        Cell::figure(iops.median, rate),
        Cell::figure(iops.min, rate),
        Cell::figure(iops.max, rate),
        Cell::figure(medians.mb_per_s, rate),
        Cell::figure(medians.mean_ns, time),
        Cell::figure(medians.p99_ns, time),
    ];
    Some((cell, medians, row))
}

fn details(load: &Compared<'_>) -> Table {
    let mut table = Table::new(
        format!(
            "{} load: {CLIENTS} clients with {} outstanding each; medians of the rounds",
            load.part,
            load.in_flight / u64::from(CLIENTS)
        ),
        &[
            "way",
            "IOPS",
            "min",
            "max",
            "MB/s",
            "mean",
            "p99",
            "CPU, client",
            "CPU, server",
            "CPU, machine",
            "client + server, ratio",
        ],
    );
    for way in AccessPath::ALL {
        let Some((cell, medians, mut row)) = figures(load, way) else { continue };
        row.extend([
            Cell::figure(medians.cpu_ns_per_io, time),
            Cell::maybe(server_cpu_ns(cell), time),
            Cell::figure(medians.machine_cpu_ns_per_io, time),
            Cell::maybe(load.ratio(way.name(), record::cpu_ns).map(|ratio| ratio.median()), |ratio| {
                format!("{ratio:.2}")
            }),
        ]);
        table.row(row);
    }
    table
}

fn guest_details(load: &Compared<'_>) -> Table {
    let mut table = Table::new(
        format!("{}; medians of the rounds", load.load),
        &["way", "IOPS", "min", "max", "MB/s", "mean", "p99", "CPU, server"],
    );
    for way in AccessPath::ALL {
        let Some((cell, _, mut row)) = figures(load, way) else { continue };
        row.push(Cell::maybe(server_cpu_ns(cell), time));
        table.row(row);
    }
    table
}

fn ways(result: &AccessPathsResult) -> Table {
    let mut table = Table::new("The ways to the disk", &["way", "description", "measured"]);
    for record in result.ways.iter().filter(|one| one.skipped.as_deref() != Some(record::NOT_WANTED)) {
        table.row(vec![
            Cell::text(record.way.name()),
            Cell::text(record.way.description()),
            match &record.skipped {
                None => Cell::text("yes"),
                Some(why) => Cell::text(format!("no: {why}")).toned(Tone::Warning),
            },
        ]);
    }
    table
}

fn facts(result: &AccessPathsResult) -> Vec<(String, String)> {
    let mut facts = Vec::new();
    let mut add = |name: &str, value: String| facts.push((name.to_owned(), value));
    add("Disk", format!("{}, {}, fully allocated", result.disk.name(), bytes(result.size_bytes)));
    add("Workload", "8K random, 70 % reads, incompressible contents".into());
    add("Cell", format!("{}, a fifth of it warm-up", time(result.cell_ns as f64)));
    add("Between cells", "the ephemeral child with the writes is dropped".into());
    if let Some(network) = result.network {
        add("Emulated network", network.to_string());
    }
    facts
}
