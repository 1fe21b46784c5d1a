//! The chapter of the study `access-paths`.

use super::{
    ToChapter,
    parts::{self, how_measured},
};
use crate::{
    cells::{Cell as Measured, Compared},
    guest::{Accelerator, GuestRecord},
    study::access_paths::{
        AccessPath, AccessPathsResult, AgentsRecord, ClientsRecord, PAPER_WITHIN, SERVER_CPU_NS, Scale,
        record::{self, CellFigure},
        verdict::relative,
    },
};
use diskwright_load::{figures::Figures, record::End};
use diskwright_outline::{
    Block, Cell, Chapter, Table, Tone,
    plot::{self, Axis, Bar, BarChart, LineChart, Part, Point, Series},
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
    let mut paper = Some(Block::Text(of_paper()));
    for scale in Scale::ALL {
        let loads = scale.loads(&result.cells);
        let Some(heavy) = loads.last() else { continue };
        let id = format!("{id}{}", id_end(scale));
        let base = base_of(scale, &loads);
        blocks.push(Block::Heading(heading(scale, &base)));
        blocks.extend(intro(scale, result).map(Block::Text));
        blocks.extend(on_scale(&loads, &base, &id));
        // The figures of a guest say nothing of the paper's: its processor may be emulated.
        if scale != Scale::Guest {
            blocks.extend(paper.take());
            let whose = if scale == Scale::Agents { " of the agents" } else { "" };
            blocks.push(Block::Heading(format!("Throughput against response time{whose}")));
            let cpu = cpu_bars(scale, heavy, &format!("{id}-cpu"));
            blocks.push(Block::Plots(vec![curve(&loads, &format!("{id}-curve")), cpu]));
        }
        blocks.extend(loads.iter().map(|load| Block::Table(details(scale, load))));
    }
    blocks.push(Block::Table(ways(result)));
    blocks.extend(how_measured(&result.head, facts(result)));
    let mut badges = parts::badges(&result.head, result.rounds_measured(), result.quick);
    if result.head.end == End::Stopped {
        badges.push((Tone::Bad, format!("stopped, {} rounds were asked for", result.rounds)));
    }
    parts::chapter(&result.head, (id, name), "Study of access paths", badges, blocks)
}

/// What the paper has found.
fn of_paper() -> String {
    format!(
        "The paper compares Fibre Channel (100), iSCSI and SMB 3.0 on one storage system. According to the paper, all are within {:.0} % of one another in throughput and within {:.0} % in latency at every load, and their CPU use is not significantly different; the charts’ figures are not in the text.",
        100.0 * PAPER_WITHIN.0,
        100.0 * PAPER_WITHIN.1
    )
}

fn id_end(scale: Scale) -> &'static str {
    match scale {
        Scale::Host => "",
        Scale::Guest => "-guest",
        Scale::Agents => "-agents",
    }
}

/// What has 100 on a scale.
fn base_of(scale: Scale, loads: &[Compared<'_>]) -> String {
    match scale {
        Scale::Host => "the disk in process".into(),
        Scale::Guest => "the vhost-user disk".into(),
        Scale::Agents => {
            ways_of(loads).first().map_or_else(String::new, |way| format!("{} of the agents", way.name_on_scale()))
        }
    }
}

fn heading(scale: Scale, base: &str) -> String {
    match scale {
        Scale::Host => format!("Relative to {base}"),
        Scale::Guest => "In a guest, relative to its vhost-user disk".into(),
        Scale::Agents => format!("Agents, relative to {base}"),
    }
}

/// What a reader must know of the clients of a scale.
fn intro(scale: Scale, result: &AccessPathsResult) -> Option<String> {
    match scale {
        Scale::Host => None,
        Scale::Guest => result.guest.as_ref().map(in_guest),
        Scale::Agents => result.agents.as_ref().map(by_agents),
    }
}

/// What a reader must know of the agents.
fn by_agents(record: &AgentsRecord) -> String {
    let each = |of: fn(u32, u32) -> u32| record.agents.iter().map(|agent| agent.clients).reduce(of).unwrap_or(0);
    let (least, most) = (each(u32::min), each(u32::max));
    let clients = if least == most { most.to_string() } else { format!("{least} or {most}") };
    format!(
        "{} in {} on {}, {clients} in each; the servers listened at {}. The windows of the agents began within {} of each other, and their clocks are known to within {}. CPU time of clients is that of the agents.",
        parts::counted(record.clients() as usize, "client"),
        parts::counted(record.agents.len(), "agent"),
        parts::counted(record.machines(), "machine"),
        record.server,
        time(record.skew_ns as f64),
        time(record.clock_error_ns as f64)
    )
}

/// Charts and a table on the paper’s scale. `base` is what has 100.
fn on_scale(loads: &[Compared<'_>], base: &str, id: &str) -> [Block; 2] {
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
            let name = format!("{}, {}", load_of(load), way.name_on_scale());
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

/// The word of a load: light, medium, heavy.
fn load_of<'a>(load: &Compared<'a>) -> &'a str {
    Scale::of_part(load.part).1
}

/// CPU time of client and server per request, and on this host that of the rest of the machine.
fn cpu_bars(scale: Scale, load: &Compared<'_>, id: &str) -> Markup {
    // The server may not be on the machine of the agents.
    let has_rest = scale == Scale::Host;
    let bars: Vec<Bar> = scale
        .ways()
        .filter_map(|way| {
            let cell = load.cell(way.name())?;
            let (name, medians) = (way.name_on_scale(), cell.medians()?);
            let client = medians.cpu_ns_per_io;
            let server = server_cpu_ns(cell).unwrap_or(0.0);
            let rest = has_rest.then(|| (medians.machine_cpu_ns_per_io - client - server).max(0.0));
            let values = [client, server].into_iter().chain(rest);
            let of_rest = rest.map_or_else(String::new, |rest| format!(", the rest of the machine {}", time(rest)));
            Some(Bar {
                name: name.to_owned(),
                parts: values.clone().enumerate().map(|(style, value)| Part { value, style }).collect(),
                range: None,
                figure: short_time(values.sum()),
                tooltip: format!("{name}: client {}, server {}{of_rest}", time(client), time(server)),
            })
        })
        .collect();
    BarChart {
        id: id.into(),
        title: format!("CPU time per request, {} load", load_of(load)),
        description: bars.iter().map(|bar| bar.tooltip.clone()).collect::<Vec<_>>().join("; "),
        axis: "CPU time per request (median of the rounds)",
        write: &short_time,
        parts: ["client", "server", "kernel threads and other processes"][..if has_rest { 3 } else { 2 }]
            .iter()
            .map(|part| (*part).to_owned())
            .collect(),
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
                    way.name_on_scale(),
                    load_of(load),
                    rate(medians.iops),
                    time(medians.mean_ns)
                );
                Some(Point { x: medians.iops, y: medians.mean_ns, tooltip })
            });
            Series { name: way.name_on_scale().into(), points: points.collect(), style, line: true, x_error: 0.0 }
        })
        .collect();
    let all = || series.iter().flat_map(|line| &line.points);
    LineChart {
        id: id.into(),
        title: "Throughput against response time".into(),
        description: "Each line is a way to the disk; its points are light, medium and heavy load.".into(),
        x: Axis {
            title: "IOPS",
            scale: plot::Scale::from_zero(all().map(|point| point.x).fold(0.0, f64::max)),
            write: &short,
            at: None,
        },
        y: Axis {
            title: "mean response time",
            scale: plot::Scale::from_zero(all().map(|point| point.y).fold(0.0, f64::max)),
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
        let load = load_of(load);
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

/// A column of CPU time.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cpu {
    Client,
    Server,
    Machine,
    /// Client and server as a ratio to the base.
    Ratio,
}

impl Cpu {
    /// The columns of a scale. The CPU time of an emulated processor says nothing, and the server
    /// is not on each machine of the agents.
    fn of(scale: Scale) -> &'static [Self] {
        match scale {
            Scale::Host => &[Self::Client, Self::Server, Self::Machine, Self::Ratio],
            Scale::Guest => &[Self::Server],
            Scale::Agents => &[Self::Client, Self::Server, Self::Ratio],
        }
    }

    fn head(self) -> &'static str {
        match self {
            Self::Client => "CPU, client",
            Self::Server => "CPU, server",
            Self::Machine => "CPU, machine",
            Self::Ratio => "client + server, ratio",
        }
    }

    fn cell(self, load: &Compared<'_>, cell: &Measured, medians: &Figures) -> Cell {
        match self {
            Self::Client => Cell::figure(medians.cpu_ns_per_io, time),
            Self::Server => Cell::maybe(server_cpu_ns(cell), time),
            Self::Machine => Cell::figure(medians.machine_cpu_ns_per_io, time),
            Self::Ratio => {
                let ratio = load.ratio(&cell.subject, record::cpu_ns).map(|ratio| ratio.median());
                Cell::maybe(ratio, |ratio| format!("{ratio:.2}"))
            }
        }
    }
}

fn details(scale: Scale, load: &Compared<'_>) -> Table {
    let mut table = Table::new(
        format!("{} each; medians of the rounds", load.load),
        &["way", "IOPS", "min", "max", "MB/s", "mean", "p99"],
    );
    table.heads.extend(Cpu::of(scale).iter().map(|column| column.head().to_owned()));
    for way in scale.ways() {
        let Some(cell) = load.cell(way.name()) else { continue };
        let (Some(medians), Some(iops)) = (cell.medians(), cell.summary_of(|round| round.iops)) else { continue };
        let mut row = vec![
            Cell::text(way.name_on_scale()),
            Cell::figure(iops.median, rate),
            Cell::figure(iops.min, rate),
            Cell::figure(iops.max, rate),
            Cell::figure(medians.mb_per_s, rate),
            Cell::figure(medians.mean_ns, time),
            Cell::figure(medians.p99_ns, time),
        ];
        row.extend(Cpu::of(scale).iter().map(|column| column.cell(load, cell, &medians)));
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

/// The agents of each machine, with their clients: `db1, db2 (14 clients): 4 x ...`.
fn machines(record: &AgentsRecord) -> Vec<String> {
    let mut machines: Vec<Vec<&ClientsRecord>> = Vec::new();
    for agent in &record.agents {
        match machines.iter_mut().find(|machine| machine[0].boot_id == agent.boot_id) {
            Some(machine) => machine.push(agent),
            None => machines.push(vec![agent]),
        }
    }
    let of_machine = |agents: &Vec<&ClientsRecord>| {
        let names: Vec<&str> = agents.iter().map(|agent| agent.name.as_str()).collect();
        let clients = agents.iter().map(|agent| agent.clients as usize).sum();
        format!("{} ({}): {}", names.join(", "), parts::counted(clients, "client"), agents[0].machine)
    };
    machines.iter().map(of_machine).collect()
}

fn facts(result: &AccessPathsResult) -> Vec<(String, String)> {
    let mut facts = Vec::new();
    let mut add = |name: &str, value: String| facts.push((name.to_owned(), value));
    add("Disk", format!("{}, {}, fully allocated", result.disk.name(), bytes(result.size_bytes)));
    add("Workload", "8K random, 70 % reads, incompressible contents".into());
    add("Cell", format!("{}, a fifth of it warm-up", time(result.cell_ns as f64)));
    add("Between cells", "the ephemeral child with the writes is dropped".into());
    if let Some(agents) = &result.agents {
        add("Agents", machines(agents).join("; "));
    }
    if let Some(network) = result.network {
        add("Emulated network", network.to_string());
    }
    facts
}
