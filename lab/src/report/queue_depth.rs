//! The chapter of the study `queue-depth`: the findings, and each stage beside the paper's figures.

use super::{
    ToChapter, fleet,
    parts::{self, counted, how_measured},
    sweep,
};
use crate::study::queue_depth::{
    Finding, QueueDepthResult, Stage, StageRecord,
    findings::{self, beside, load_name},
    method, paper,
};
use diskwright_load::{figures::Figures, record::Run};
use diskwright_outline::{
    Block, Cell, Chapter, Row, Table, Tile, Tone,
    plot::{Axis, Bar, BarChart, LineChart, Part, Point, Scale, Series},
};
use diskwright_stats::numbers::{bytes, duration as time, figure as rate, grouped as count, list, ratio, short};
use maud::Markup;
use std::fmt::Display;

/// A knee needs this many loads. With fewer agents a table of marked loads would only say so.
const AGENTS_FOR_KNEE: usize = 4;

impl ToChapter for QueueDepthResult {
    fn chapter(&self, id: &str, name: &str) -> Chapter {
        chapter(self, id, name)
    }
}

fn chapter(result: &QueueDepthResult, id: &str, name: &str) -> Chapter {
    let mut blocks = Vec::new();
    if !result.findings.is_empty() {
        blocks.push(Block::Tiles(result.findings.iter().map(tile).collect()));
        blocks.push(Block::Heading("Findings, as in the paper’s Table 5".into()));
        blocks.push(Block::Table(findings_table(result)));
        if result.settings.array.is_none() {
            blocks.push(Block::Text(
                "The array below the target is not known; one device without copies is assumed.".into(),
            ));
        } else if result.settings.is_fleet() {
            blocks.push(Block::Text("The array is below the targets of all agents.".into()));
        }
        blocks.extend(on_agents(result).map(Block::Text));
        blocks.extend(measured_below(result).map(Block::Text));
    }
    for record in &result.stages {
        blocks.push(Block::Heading(heading(record, result)));
        let id = format!("{id}-{}", result.stages.iter().position(|other| other.stage == record.stage).unwrap_or(0));
        blocks.push(Block::Plots(plots(record, &id)));
        if !record.sweep.knees.is_empty() {
            if record.stage != Stage::Agents || record.sweep.cells.len() >= AGENTS_FOR_KNEE {
                blocks.push(Block::Table(sweep::marked_points(&record.sweep)));
            }
            blocks.extend(of_agents(record).map(Block::Text));
        } else if record.sweep.best.is_some() {
            blocks.push(Block::Text(record.sweep.head.verdict.clone()));
        }
        blocks.push(Block::Table(cells(record)));
    }
    if let Some(run) = &result.pre_test {
        let split = format!("{} threads × {}", result.settings.threads, paper::PRE_TEST_DEPTH);
        let split = if result.settings.is_fleet() { format!("{} × {split}", agents(result)) } else { split };
        blocks.push(Block::Heading(format!("Pre-test 1: {split}, in the steady state")));
        blocks.push(Block::Table(pre_test(run, result)));
        let id = format!("{id}-pre-test");
        blocks.extend(run.fleet.iter().flat_map(|of_fleet| fleet::phase_blocks(run, of_fleet, 0, &id)));
    }
    blocks.extend(how_measured(&result.head, facts(result)));
    if let Some(of_fleet) = result.pre_test.as_ref().and_then(|run| run.fleet.as_ref()) {
        blocks.push(Block::Heading("Agents".into()));
        blocks.push(Block::Facts(fleet::facts(of_fleet)));
    }
    parts::chapter(&result.head, (id, name), "Study of queue depth", badges(result), blocks)
}

/// Number of agents: `3 agents`.
fn agents(result: &QueueDepthResult) -> String {
    counted(result.settings.agents.len(), "agent")
}

/// What the figures are sums of; `None` if this machine measured.
fn on_agents(result: &QueueDepthResult) -> Option<String> {
    result.settings.is_fleet().then(|| {
        format!(
            "Measured by {} at the same time. Threads and outstanding requests are those of each agent; requests in \
             flight, IOPS and MB/s are the sums of all agents, and latencies those of all their requests.",
            agents(result)
        )
    })
}

fn heading(record: &StageRecord, result: &QueueDepthResult) -> String {
    let each = match (result.settings.is_fleet(), record.stage) {
        (true, Stage::Reads | Stage::Writes) => " on each agent",
        (true, Stage::Agents) => ", each with the load of pre-test 1",
        _ => "",
    };
    format!("{}{each}", record.stage.title())
}

/// What the stage `Agents` says about the clients; `None` for other stages.
fn of_agents(record: &StageRecord) -> Option<String> {
    if record.stage != Stage::Agents {
        return None;
    }
    let iops = |cell: &crate::sweep::SweepCell| cell.measured.median(|round| round.iops);
    let (one, all) = (record.sweep.cells.first()?, record.sweep.cells.last()?);
    let growth = iops(all)? / iops(one).filter(|iops| *iops > 0.0)?;
    let few = "With four agents or more, the study finds how many are enough.";
    let enough = match findings::enough_agents(&record.sweep) {
        Some(enough) => format!(" {enough}."),
        None if record.sweep.cells.len() < AGENTS_FOR_KNEE => format!(" {few}"),
        None => String::new(),
    };
    Some(format!("{} agents make {} times the IOPS of one.{enough}", all.files, ratio(growth)))
}

/// What was measured on the members of a space; `None` without one.
fn measured_below(result: &QueueDepthResult) -> Option<String> {
    let found = result.findings.iter().filter_map(|finding| {
        let point = finding.found.as_ref()?;
        let measured = ratio(point.measured_amplification?);
        Some(format!(
            "{measured} for {} ({} by the formula)",
            load_name(finding.stage),
            ratio(point.array.amplification)
        ))
    });
    let found: Vec<String> = found.collect();
    (!found.is_empty()).then(|| format!("Transfers per request, counted on the members: {}.", list(&found)))
}

fn badges(result: &QueueDepthResult) -> Vec<(Tone, String)> {
    let settings = &result.settings;
    let mut badges = parts::badges(&result.head, settings.rounds as usize, settings.quick);
    let steady = result.pre_test.as_ref().and_then(|run| run.phases.first()?.steady.clone());
    if let Some(steady) = steady {
        let holds = steady.reached_ns.is_some() && steady.left_ns.is_none();
        badges.push(if holds {
            (Tone::Good, "steady state".into())
        } else {
            (Tone::Warning, "no steady state".into())
        });
    }
    badges
}

fn tile(finding: &Finding) -> Tile {
    let name = load_name(finding.stage).to_owned();
    match &finding.found {
        Some(found) => Tile {
            name: format!(
                "{name}: {} IOPS, {} MB/s at {}",
                rate(found.iops),
                rate(found.mb_per_s),
                time(found.mean_ns)
            ),
            cell: Cell::figure(found.in_flight as f64, count),
            unit: "in flight".into(),
        },
        None => {
            Tile { name: format!("{name}: no queue depth found"), cell: Cell::maybe(None, count), unit: String::new() }
        }
    }
}

const FINDINGS: [&str; 13] = [
    "load",
    "source",
    "rule",
    "in flight",
    "95 % interval",
    "threads × depth",
    "IOPS",
    "MB/s",
    "mean",
    "amplification",
    "devices",
    "MB/s per device",
    "depth per device",
];

fn findings_table(result: &QueueDepthResult) -> Table {
    let mut table = Table::new(
        "The queue depth that each load needs, ours and the paper’s. 95 % interval: of the load that the rule chose. Amplification: transfers per request, which are reads plus writes times copies. Depth per device: in flight × amplification / devices. MB are 10⁶ bytes.",
        &FINDINGS,
    )
    .keys(2);
    let is_fleet = result.settings.is_fleet();
    if is_fleet {
        table.heads[5] = "agents × threads × depth".into();
    }
    let devices = f64::from(result.settings.array.map_or(1, |array| array.devices));
    for finding in &result.findings {
        let mut row = vec![Cell::text(load_name(finding.stage)), Cell::text("ours")];
        match &finding.found {
            Some(found) => row.extend([
                Cell::text(found.rule.name()),
                Cell::figure(found.in_flight as f64, count).toned(Tone::Good),
                Cell::text(
                    found
                        .interval
                        .map_or_else(String::new, |ends| format!("{}..{}", short(ends.low), short(ends.high))),
                ),
                Cell::text(match is_fleet {
                    true => split(Some(found.files), found.threads, found.queue_depth),
                    false => split(None, found.threads * found.files, found.queue_depth),
                }),
                Cell::figure(found.iops, rate),
                Cell::figure(found.mb_per_s, rate),
                Cell::figure(found.mean_ns, time),
                Cell::figure(found.array.amplification, ratio),
                Cell::figure(devices, count),
                Cell::figure(found.array.mb_per_s_per_device, rate),
                Cell::figure(found.array.depth_per_device, rate),
            ]),
            None => {
                row.push(Cell::text("none").toned(Tone::Bad));
                row.extend((0..10).map(|_| Cell::maybe(None, rate)));
            }
        }
        table.row(row);
        let Some(papers) = findings::papers(finding.stage) else { continue };
        let settled = papers.settled;
        table.row(vec![
            Cell::default(),
            Cell::text("paper").toned(Tone::Faint),
            Cell::default(),
            Cell::figure(settled.in_flight as f64, count).toned(Tone::Faint),
            Cell::default(),
            // One virtual machine.
            Cell::text(split(is_fleet.then_some(1), settled.threads, settled.in_flight / settled.threads))
                .toned(Tone::Faint),
            Cell::figure(settled.point.iops, rate).toned(Tone::Faint),
            Cell::figure(papers.mb_per_s, rate).toned(Tone::Faint),
            Cell::figure(settled.point.mean_ms * 1e6, time).toned(Tone::Faint),
            Cell::figure(papers.array.amplification, ratio).toned(Tone::Faint),
            Cell::figure(f64::from(paper::ARRAY.devices), count).toned(Tone::Faint),
            Cell::figure(papers.array.mb_per_s_per_device, rate).toned(Tone::Faint),
            Cell::figure(papers.array.depth_per_device, rate).toned(Tone::Faint),
        ]);
    }
    table
}

fn plots(record: &StageRecord, id: &str) -> Vec<Markup> {
    if record.sweep.knees.is_empty() {
        return vec![bars(record, id)];
    }
    let mut plots = vec![sweep::throughput(&[(String::new(), &record.sweep)], &format!("{id}-tl"))];
    plots.extend(grown(record, &format!("{id}-grown")));
    plots.extend(sweep::against_load(&record.sweep, id));
    plots
}

/// A bar chart of combinations, which have no load axis.
fn bars(record: &StageRecord, id: &str) -> Markup {
    let best = record.sweep.best.as_ref();
    let bars: Vec<Bar> = record
        .sweep
        .cells
        .iter()
        .enumerate()
        .filter_map(|(index, cell)| {
            let iops = cell.measured.median(|round| round.iops)?;
            let mean_ns = cell.measured.median(|round| round.mean_ns)?;
            let all = || cell.measured.rounds.iter().map(|round| round.iops);
            let word = if best.is_some_and(|best| best.cell == index) { " (best)" } else { "" };
            let split = format!("{} × {}", cell.threads, cell.queue_depth);
            let files = if cell.files == 1 { "1 file".to_owned() } else { format!("{} files", cell.files) };
            let name = if record.stage == Stage::Files { format!("{files}, {split}") } else { split };
            Some(Bar {
                tooltip: format!("{name}: {} IOPS at {}", rate(iops), time(mean_ns)),
                name: format!("{name}{word}"),
                parts: vec![Part { value: iops, style: 0 }],
                range: (cell.measured.rounds.len() > 1)
                    .then(|| (all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max))),
                figure: rate(iops),
            })
        })
        .collect();
    BarChart {
        id: format!("{id}-bars"),
        title: if record.stage == Stage::Files { "IOPS by files" } else { "IOPS by threads × outstanding" }.into(),
        description: format!("{} combinations; {}", bars.len(), record.sweep.head.verdict),
        axis: "IOPS, median of the rounds (line: range)",
        write: &short,
        parts: vec![],
        bars,
        reference: None,
    }
    .render()
}

/// A plot of the growth of throughput with the load, ours and the paper's.
fn grown(record: &StageRecord, id: &str) -> Option<Markup> {
    let pairs = beside(record);
    let points = |pick: fn(&findings::BesidePaper) -> Option<f64>, whose: &str| -> Vec<Point> {
        let cells = record.sweep.cells.iter().zip(&pairs);
        cells
            .filter_map(|(cell, pair)| {
                let (x, y) = (cell.measured.in_flight as f64, pick(pair.as_ref()?)?);
                Some(Point {
                    x,
                    y,
                    tooltip: format!("{} in flight: {whose}, factor {}", cell.measured.in_flight, ratio(y)),
                })
            })
            .collect()
    };
    let (ours, papers) = (points(|pair| Some(pair.ours), "ours"), points(|pair| pair.papers, "paper"));
    if papers.len() < 2 {
        return None;
    }
    let highest = ours.iter().chain(&papers).map(|point| point.y).fold(0.0, f64::max);
    let most = ours.iter().map(|point| point.x).fold(0.0, f64::max);
    let series = vec![
        Series { name: "ours".into(), points: ours, style: 0, line: true, x_error: 0.0 },
        Series { name: "paper".into(), points: papers, style: 1, line: true, x_error: 0.0 },
    ];
    Some(
        LineChart {
            id: id.into(),
            title: "Growth of IOPS, ours and the paper’s".into(),
            description: "IOPS relative to the first load that both have, against requests in flight.".into(),
            x: Axis { title: "in flight", scale: Scale::from_zero(most), write: &short, at: None },
            y: Axis { title: "relative to the first", scale: Scale::from_zero(highest), write: &short, at: None },
            series,
            bands: vec![],
            marks: vec![],
            rules: vec![],
        }
        .render(),
    )
}

/// The cells of a stage beside the paper's.
fn cells(record: &StageRecord) -> Table {
    let mut table = sweep::cells(&record.sweep);
    let pairs = beside(record);
    if pairs.iter().flatten().all(|pair| pair.papers.is_none()) {
        return table;
    }
    table.caption = "Medians of the rounds. Growth: IOPS relative to the first load that both have.".into();
    table.heads.extend(["growth", "paper’s growth", "ratio to paper"].map(str::to_owned));
    for (Row { cells, .. }, pair) in table.rows.iter_mut().zip(&pairs) {
        cells.extend([
            Cell::maybe(pair.map(|pair| pair.ours), ratio),
            Cell::maybe(pair.and_then(|pair| pair.papers), ratio).toned(Tone::Faint),
            Cell::maybe(pair.and_then(|pair| pair.ratio), ratio).toned(Tone::Faint),
        ]);
    }
    table
}

/// `8 × 12`, or with agents `3 × 8 × 12`.
fn split(agents: Option<u32>, threads: impl Display, depth: impl Display) -> String {
    let agents = agents.map_or_else(String::new, |agents| format!("{agents} × "));
    format!("{agents}{threads} × {depth}")
}

fn pre_test(run: &Run, result: &QueueDepthResult) -> Table {
    let clients = result.settings.is_fleet().then(|| result.settings.clients());
    let mut table = Table::new(
        "Random 8K, 70 % read; measured once, from the steady state, or from the end of the time to reach it",
        &[
            "source",
            if clients.is_some() { "agents × threads × depth" } else { "threads × depth" },
            "IOPS",
            "MB/s",
            "mean",
            "p99",
            "mean in flight",
        ],
    );
    if let Some((phase, load)) = run.phases.first().zip(run.job.phases.first().and_then(|phase| phase.loads.first())) {
        let figures = Figures::of(phase);
        table.row(vec![
            Cell::text("ours"),
            Cell::text(split(clients, load.threads, load.queue_depth)),
            Cell::figure(figures.iops, rate),
            Cell::figure(figures.mb_per_s, rate),
            Cell::figure(figures.mean_ns, time),
            Cell::figure(figures.p99_ns, time),
            Cell::figure(figures.depth_reached, rate),
        ]);
    }
    let papers = paper::PRE_TEST;
    table.row(vec![
        Cell::text("paper"),
        Cell::text(split(clients.map(|_| 1), paper::THREADS, paper::PRE_TEST_DEPTH)).toned(Tone::Faint),
        Cell::figure(papers.iops, rate).toned(Tone::Faint),
        Cell::figure(papers.iops * 8192.0 / 1e6, rate).toned(Tone::Faint),
        Cell::figure(papers.mean_ms * 1e6, time).toned(Tone::Faint),
        Cell::figure(paper::PRE_TEST_P99_MS * 1e6, time).toned(Tone::Faint),
        Cell::maybe(None, rate),
    ]);
    table
}

fn facts(result: &QueueDepthResult) -> Vec<(String, String)> {
    let mut facts = Vec::new();
    let targets: Vec<String> = result
        .targets
        .iter()
        .map(|target| format!("{} ({}, {})", target.name, target.kind, bytes(target.size_bytes)))
        .collect();
    facts.push(("Targets".into(), list(&targets)));
    facts.push(("Method".into(), method::line(result)));
    facts.extend(
        result
            .settings
            .array
            .map(|array| ("Array".into(), format!("{} copies on {} devices", array.copies, array.devices))),
    );
    facts.extend(result.settings.max_p99.map(|limit| ("Limit for the 99th percentile".into(), limit.to_string())));
    facts
}

#[cfg(test)]
mod tests {
    use crate::{
        report::{self, TextOptions, example},
        study::queue_depth::tests::result_of_agents,
    };

    #[test]
    fn figures_of_agents_say_what_is_of_each_and_what_is_of_all() {
        let mut result = result_of_agents();
        result.pre_test.as_mut().unwrap().fleet = example::fleet().fleet;
        let text = report::text(&result, &TextOptions { width: 250, ..TextOptions::default() });
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for part in [
            "Measured by 4 agents at the same time.",
            "are the sums of all agents",
            "The array is below the targets of all agents.",
            "number of agents, each with the load of pre-test 1",
            "4 agents make 2.52 times the IOPS of one. 3 of 4 agents are most efficient, with 8 x 12 on each.",
            "sequential reads, one thread on each agent",
            "8 threads on each agent",
            "agents × threads × depth",
            "Each agent",
        ] {
            assert!(words.contains(part), "{part}: {text}");
        }
    }
}
