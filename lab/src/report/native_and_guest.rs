//! The chapter of the study `native-and-guest`.

use super::{
    ToChapter,
    parts::{self, how_measured},
};
use crate::{
    guest::Accelerator,
    paper,
    study::native_and_guest::{
        NativeAndGuestResult,
        record::{NULL, Pair, SERVER_BYTES, SERVER_REQUESTS},
        verdict::disks,
    },
    targets::Container,
};
use diskwright_outline::{
    Block, Cell, Chapter, Table, Tone,
    plot::{Bar, BarChart, Part},
};
use diskwright_stats::{
    numbers::{bytes, duration as time, figure as rate, ratio, short, short_time},
    summary::median,
};
use maud::Markup;

impl ToChapter for NativeAndGuestResult {
    fn chapter(&self, id: &str, name: &str) -> Chapter {
        chapter(self, id, name)
    }
}

fn chapter(result: &NativeAndGuestResult, id: &str, name: &str) -> Chapter {
    let pairs = Pair::all(&result.cells);
    let mut blocks = Vec::new();
    let emulated = result.guest.accelerator == Accelerator::Tcg;
    if !pairs.is_empty() {
        let plots = [server_bars(&pairs, &format!("{id}-server")), iops_bars(&pairs, &format!("{id}-iops"))];
        blocks.push(Block::Heading("The disk on the host and in the guest".into()));
        blocks.push(Block::Plots(if emulated { plots.into() } else { plots.into_iter().rev().collect() }));
        blocks.push(Block::Table(speeds(&pairs)));
        blocks.push(Block::Text(format!(
            "The {NULL} disk completes every request at once and moves no data: what the guest reaches with it is the limit of virtual machine and door. Paper: a Hyper-V guest’s throughput relative to the host’s, the pass-through disk for the raw file, the fixed VHD for itself."
        )));
        if emulated {
            blocks.push(Block::Text(
                "QEMU emulated the guest’s processor. IOPS and latencies of the guest are those of the emulation. The server’s CPU time and the requests that reach it do not depend on the guest’s speed.".into(),
            ));
        }
        blocks.push(Block::Heading("The server’s work".into()));
        blocks.push(Block::Table(work(&pairs)));
    }
    blocks.extend(how_measured(&result.head, facts(result)));
    let rounds = result.cells.iter().map(|cell| cell.rounds.len()).min().unwrap_or(0);
    let mut badges = parts::badges(&result.head, rounds, result.quick);
    if emulated {
        badges.push((Tone::Warning, "emulated guest".into()));
    }
    parts::chapter(&result.head, (id, name), "Study of native and guest", badges, blocks)
}

/// A name that fits beside a bar: the format of the disk, and the load without the paper's depth.
fn label(pair: &Pair<'_>) -> String {
    let disk = pair.native.part.split(' ').next().unwrap_or_default();
    let depth = match pair.native.in_flight {
        depth if depth == u64::from(paper::QUEUE_DEPTH) => String::new(),
        depth => format!(", QD {depth}"),
    };
    format!("{disk}, {}{depth}", pair.native.load)
}

/// Ratios of the guest's IOPS to the host's.
fn iops_bars(pairs: &[Pair<'_>], id: &str) -> Markup {
    let bars: Vec<Bar> = pairs
        .iter()
        .filter_map(|pair| {
            let found = pair.guest.ratio(pair.native, |round| round.iops)?;
            Some(Bar {
                parts: vec![Part { value: found.median(), style: 0 }],
                range: found.range(),
                figure: ratio(found.median()),
                tooltip: format!(
                    "{}, {}: {} IOPS on the host, {} in the guest",
                    pair.native.part,
                    pair.native.title(),
                    rate(pair.native.median(|round| round.iops)?),
                    rate(pair.guest.median(|round| round.iops)?)
                ),
                name: label(pair),
            })
        })
        .collect();
    BarChart {
        id: id.into(),
        title: "IOPS in the guest relative to the host".into(),
        description: bars.iter().map(|bar| bar.tooltip.clone()).collect::<Vec<_>>().join("; "),
        axis: "ratio in the same round (median; line: range)",
        write: &short,
        parts: vec![],
        bars,
        reference: Some((1.0, "the host".into())),
    }
    .render()
}

/// CPU time of the server per request: door and virtual machine's memory (the `null` disk), and the
/// disk's engine.
fn server_bars(pairs: &[Pair<'_>], id: &str) -> Markup {
    let bars: Vec<Bar> = pairs
        .iter()
        .filter_map(|pair| {
            let (server, engine) = (pair.server_cpu_ns()?, pair.guest_cpu_ns()?);
            let door = (server - engine).max(0.0);
            let (disk, title) = (&pair.native.part, pair.native.title());
            let tooltip = format!("{disk}, {title}: door {}, engine {}", time(door), time(engine));
            let parts = [door, engine.max(0.0)].into_iter().enumerate();
            Some(Bar {
                parts: parts.map(|(style, value)| Part { value, style }).collect(),
                range: None,
                figure: short_time(server),
                tooltip,
                name: label(pair),
            })
        })
        .collect();
    BarChart {
        id: id.into(),
        title: "CPU time of the server per request of the guest".into(),
        description: bars.iter().map(|bar| bar.tooltip.clone()).collect::<Vec<_>>().join("; "),
        axis: "CPU time per request (median of the rounds)",
        write: &short_time,
        parts: vec!["door (as with the null disk)".into(), "engine of the disk".into()],
        bars,
        reference: None,
    }
    .render()
}

/// The paper's ratio for a disk under a workload, at the paper's queue depth.
fn in_paper(pair: &Pair<'_>) -> Option<f64> {
    let workload =
        paper::workload(&pair.native.load).filter(|_| pair.native.in_flight == u64::from(paper::QUEUE_DEPTH))?;
    let (pass_through, fixed) = paper::guest_ratios(&workload)?;
    match Container::from_name(&pair.native.part)? {
        Container::Raw => Some(pass_through),
        Container::VhdFixed => Some(fixed),
        _ => None,
    }
}

fn speeds(pairs: &[Pair<'_>]) -> Table {
    let mut table = Table::new(
        "Medians of the rounds; ratios within a round",
        &["workload", "disk", "IOPS, host", "IOPS, guest", "ratio", "range", "paper", "mean, host", "mean, guest"],
    )
    .keys(2);
    let mut last = String::new();
    for (disk, pair) in by_workload(pairs) {
        let title = pair.native.title();
        if title != last {
            let null = Pair { native: pair.null_native, guest: pair.null_guest, ..*pair };
            table.row(speed_row(&title, NULL, &null));
        }
        table.row(speed_row("", disk, pair));
        last = title;
    }
    table
}

/// The pairs, those of one workload one after the other, with the names of their disks.
fn by_workload<'a, 'b>(pairs: &'b [Pair<'a>]) -> Vec<(&'a str, &'b Pair<'a>)> {
    let count = disks(pairs).len().max(1);
    let same = |a: &Pair<'_>, b: &Pair<'_>| a.native.title() == b.native.title();
    let mut sorted: Vec<&Pair<'a>> = Vec::with_capacity(pairs.len());
    for pair in pairs {
        if !sorted.iter().any(|other| same(other, pair)) {
            sorted.extend(pairs.iter().filter(|other| same(other, pair)).take(count));
        }
    }
    sorted.into_iter().map(|pair| (&*pair.native.part, pair)).collect()
}

fn speed_row(workload: &str, disk: &str, pair: &Pair<'_>) -> Vec<Cell> {
    // The load generator alone is no disk to compare a guest with.
    let found = pair.guest.ratio(pair.native, |round| round.iops).filter(|_| disk != NULL);
    let range = found.as_ref().and_then(|found| found.range());
    let range = range.map(|(min, max)| format!("{}..{}", ratio(min), ratio(max)));
    vec![
        Cell::text(workload),
        Cell::text(disk),
        Cell::maybe(pair.native.median(|round| round.iops), rate),
        Cell::maybe(pair.guest.median(|round| round.iops), rate),
        Cell::maybe(found.map(|found| found.median()), ratio),
        Cell::text(range.unwrap_or_default()).toned(Tone::Faint),
        Cell::maybe(in_paper(pair), ratio),
        Cell::maybe(pair.native.median(|round| round.mean_ns), time),
        Cell::maybe(pair.guest.median(|round| round.mean_ns), time),
    ]
}

fn work(pairs: &[Pair<'_>]) -> Table {
    let mut table = Table::new(
        "Per request of the guest: CPU time of the server; of the disk’s engine alone, which is what the server takes beyond the null disk; the same on the host; requests and bytes that reach the server",
        &["workload", "disk", "server", "engine", "on host", "requests", "bytes"],
    )
    .keys(2);
    let mut last = String::new();
    for (disk, pair) in by_workload(pairs) {
        let title = pair.native.title();
        let more = |name: &str| median(&pair.guest.more(name)?);
        table.row(vec![
            Cell::text(if title == last { "" } else { &title }),
            Cell::text(disk),
            Cell::maybe(pair.server_cpu_ns(), time),
            Cell::maybe(pair.guest_cpu_ns(), time),
            Cell::maybe(pair.native_cpu_ns(), time),
            Cell::maybe(more(SERVER_REQUESTS), ratio),
            Cell::maybe(more(SERVER_BYTES), ratio),
        ]);
        last = title;
    }
    table
}

fn facts(result: &NativeAndGuestResult) -> Vec<(String, String)> {
    let guest = &result.guest;
    vec![
        ("Guest".into(), guest.machine.to_string()),
        ("Guest’s processor".into(), guest.accelerator.name().into()),
        ("Each disk".into(), format!("{}, fully allocated, incompressible contents", bytes(result.size_bytes))),
        ("Rounds".into(), format!("{}, cells of {}", result.rounds, time(result.cell_ns as f64))),
    ]
}
