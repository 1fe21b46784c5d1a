//! The chapter of the study `containers`.

mod chain;
mod growth;

use super::Told;
use super::parts::doubts;
use super::parts::measured_on;
use super::parts::subtitle;
use crate::{
    measure::CellResult,
    paper,
    result::{ComparedWorkload, ContainersRecord, ContainersResult, CreationRecord},
};
use diskwright_outline::{
    Block, Cell, Chapter, Table, Tone,
    plot::{Axis, Bar, BarChart, HeatMap, LineChart, Part, Point, Scale, Series},
};
use diskwright_stats::numbers::bytes;
use diskwright_stats::numbers::{duration as time, figure as rate, list, ratio, short, short_time};
use maud::Markup;

/// A ratio of IOPS below this is marked.
const LOW: f64 = 0.95;
/// A ratio of CPU time above this is marked.
const DEAR: f64 = 1.10;

impl Told for ContainersResult {
    fn chapter(&self, id: &str, name: &str) -> Chapter {
        chapter(self, id, name)
    }
}

fn chapter(result: &ContainersResult, id: &str, name: &str) -> Chapter {
    let mut depths: Vec<u32> = result.workloads.iter().map(|compared| compared.result.workload.queue_depth).collect();
    depths.sort_unstable();
    depths.dedup();
    let told = if depths.contains(&32) { 32 } else { depths.first().copied().unwrap_or(0) };
    let at = |depth: u32| -> Vec<&ComparedWorkload> {
        result.workloads.iter().filter(|compared| compared.result.workload.queue_depth == depth).collect()
    };
    let mut blocks = Vec::new();
    if !at(told).is_empty() {
        blocks.push(Block::Heading(format!("Against the raw file, queue depth {told}")));
        blocks.push(Block::Plots(vec![
            iops_map(&at(told), told, &format!("{id}-iops")),
            cpu_bars(&at(told), told, &format!("{id}-cpu")),
        ]));
    }
    for depth in &depths {
        let table = Block::Table(overview(&at(*depth), *depth));
        blocks.push(if *depth == told {
            table
        } else {
            Block::Folded { name: format!("Queue depth {depth}"), blocks: vec![table] }
        });
    }
    if depths.len() > 1 {
        blocks.push(Block::Heading("By queue depth".into()));
        blocks.push(Block::Plots(by_depth(result, id)));
    }
    let each: Vec<Block> = at(told).into_iter().map(|compared| Block::Table(details(compared, told))).collect();
    if !each.is_empty() {
        blocks.push(Block::Folded { name: format!("Each workload at queue depth {told} in full"), blocks: each });
    }
    if !result.creation.is_empty() {
        blocks.push(Block::Heading("Creating an empty disk".into()));
        blocks.push(Block::Plots(vec![creation_bars(&result.creation, &format!("{id}-create"))]));
        blocks.push(Block::Table(creation_table(&result.creation)));
    }
    if let Some(chain) = &result.chain {
        blocks.push(Block::Heading("Chains of differencing disks".into()));
        blocks.push(Block::Plots(chain::plots(chain, id)));
        blocks.push(Block::Table(chain::table(chain)));
    }
    blocks.extend(growth::expanding(&result.expanding, id));
    result.block_sizes.iter().for_each(|record| blocks.extend(growth::block_sizes(record)));
    blocks.push(Block::Folded {
        name: "How each disk was prepared and proved".into(),
        blocks: vec![Block::Table(preparation(result))],
    });
    blocks.extend(measured_on(&result.machine, &result.versions, Some(&result.place), facts(result)));
    Chapter {
        id: id.to_owned(),
        title: "Study of containers".into(),
        source: name.to_owned(),
        subtitle: subtitle(&result.started_utc, result.took_ns),
        verdict: result.verdict.clone(),
        badges: badges(result),
        doubts: doubts(&result.warnings),
        blocks,
    }
}

fn badges(result: &ContainersResult) -> Vec<(Tone, String)> {
    let mut badges = vec![(Tone::Plain, format!("{} rounds", result.options.rounds))];
    if result.options.quick {
        badges.push((Tone::Doubt, "quick".into()));
    }
    if result.partial {
        badges.push((Tone::Bad, "partial: it was stopped".into()));
    }
    if !result.preparation.is_empty() && result.preparation.iter().all(|record| record.populated) {
        badges.push((Tone::Good, "every byte allocated and verified".into()));
    }
    badges
}

fn iops_ratio(cell: &CellResult) -> Option<f64> {
    cell.iops_ratio.as_ref().map(|ratio| ratio.median())
}

fn cpu_ratio(cell: &CellResult) -> Option<f64> {
    cell.cpu_ratio.as_ref().map(|ratio| ratio.median())
}

/// Workloads by containers; the raw file, which is what the others are compared with, is left out.
fn iops_map(workloads: &[&ComparedWorkload], depth: u32, id: &str) -> Markup {
    let columns: Vec<String> = workloads.first().map_or(vec![], |first| targets(first).skip(1).collect());
    // The first workload on top.
    let rows: Vec<&&ComparedWorkload> = workloads.iter().rev().collect();
    let cells: Vec<Vec<Option<f64>>> =
        rows.iter().map(|compared| compared.result.cells.iter().skip(1).map(iops_ratio).collect()).collect();
    let lowest = cells.iter().flatten().flatten().copied().fold(f64::INFINITY, f64::min);
    let below = cells.iter().flatten().flatten().filter(|ratio| **ratio < LOW).count();
    HeatMap {
        id: id.into(),
        title: format!("IOPS as a ratio to the raw file, queue depth {depth}"),
        description: format!(
            "{} workloads on {}; the lowest ratio is {}, {below} are below {LOW}.",
            rows.len(),
            list(&columns),
            if lowest.is_finite() { ratio(lowest) } else { "unknown".into() }
        ),
        x_title: "container",
        y_title: "workload",
        z_title: "IOPS, ratio to the raw file",
        columns,
        rows: rows.iter().map(|compared| compared.result.workload.name.clone()).collect(),
        cells,
        write: &ratio,
        log: false,
        marks: vec![],
    }
    .render()
}

fn targets(compared: &ComparedWorkload) -> impl Iterator<Item = String> {
    compared.result.cells.iter().map(|cell| cell.target.clone())
}

/// CPU time for each request of every container, the median over the workloads, with the range over
/// them.
fn cpu_bars(workloads: &[&ComparedWorkload], depth: u32, id: &str) -> Markup {
    let names: Vec<String> = workloads.first().map_or(vec![], |first| targets(first).collect());
    let bars: Vec<Bar> = names
        .iter()
        .enumerate()
        .filter_map(|(index, name)| {
            let each = workloads.iter().filter_map(|compared| compared.result.cells.get(index));
            let times: Vec<f64> = each.map(|cell| cell.cpu_ns_per_io.median).collect();
            let summary = diskwright_stats::summary::Summary::of(&times)?;
            Some(Bar {
                name: name.clone(),
                parts: vec![Part { value: summary.median, style: 0 }],
                range: Some((summary.min, summary.max)),
                figure: time(summary.median),
                says: format!(
                    "{name}: {} of CPU for each request, from {} to {}",
                    time(summary.median),
                    time(summary.min),
                    time(summary.max)
                ),
            })
        })
        .collect();
    BarChart {
        id: id.into(),
        title: format!("CPU time for each request, queue depth {depth}"),
        description: bars.iter().map(|bar| bar.says.clone()).collect::<Vec<_>>().join("; "),
        axis: "CPU time of this process for each request (median of the workloads; whiskers: their range)",
        write: &short_time,
        parts: vec![],
        reference: bars.first().map(|bar| (bar.parts[0].value, bar.name.clone())),
        bars,
    }
    .render()
}

fn by_depth(result: &ContainersResult, id: &str) -> Vec<Markup> {
    let mut names: Vec<&str> = Vec::new();
    for compared in &result.workloads {
        let name = compared.result.workload.name.as_str();
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let plot = |(number, name): (usize, &&str)| {
        let mut series: Vec<Series> = Vec::new();
        for compared in result.workloads.iter().filter(|compared| compared.result.workload.name == **name) {
            let depth = compared.result.workload.queue_depth;
            for cell in &compared.result.cells {
                let says = format!(
                    "{}, queue depth {depth}: {} IOPS, mean latency {}",
                    cell.target,
                    rate(cell.iops.median),
                    time(cell.latency_mean_ns.median)
                );
                let point = Point { x: cell.iops.median, y: cell.latency_mean_ns.median, says };
                match series.iter_mut().find(|line| line.name == cell.target) {
                    Some(line) => line.points.push(point),
                    None => series.push(Series {
                        name: cell.target.clone(),
                        points: vec![point],
                        style: series.len(),
                        line: true,
                    }),
                }
            }
        }
        let all = || series.iter().flat_map(|line| &line.points);
        LineChart {
            id: format!("{id}-depth{number}"),
            title: format!("{name}: throughput against latency"),
            description: "Each point is a queue depth; a line is a container.".into(),
            x: Axis {
                title: "IOPS",
                scale: Scale::from_zero(all().map(|point| point.x).fold(0.0, f64::max)),
                write: &short,
                at: None,
            },
            y: Axis {
                title: "mean latency (log scale)",
                scale: Scale::log_around(all().map(|point| point.y)),
                write: &short_time,
                at: None,
            },
            series,
            bands: vec![],
            marks: vec![],
            rules: vec![],
        }
        .render()
    };
    names.iter().enumerate().map(plot).collect()
}

fn marked(value: Option<f64>) -> Cell {
    let tone = value.map_or(Tone::Faint, |ratio| if ratio < LOW { Tone::Bad } else { Tone::Plain });
    Cell::maybe(value, ratio).toned(tone)
}

fn overview(workloads: &[&ComparedWorkload], depth: u32) -> Table {
    let mut table = Table::new(
        format!(
            "IOPS at queue depth {depth}: of the raw file, and the others as a ratio to it (median of the ratios within rounds)"
        ),
        &["workload", "raw file IOPS"],
    );
    // As short as a table of seven columns on a terminal needs.
    let short = |name: String| name.replace("differencing", "diff.");
    table.heads.extend(workloads.first().into_iter().flat_map(|first| targets(first).skip(1)).map(short));
    for compared in workloads {
        let cells = &compared.result.cells;
        let mut row = vec![Cell::text(&compared.result.workload.name)];
        row.extend(cells.first().map(|raw| Cell::figure(raw.iops.median, rate)));
        row.extend(cells.iter().skip(1).map(|cell| marked(iops_ratio(cell))));
        table.row(row);
    }
    table
}

fn details(compared: &ComparedWorkload, depth: u32) -> Table {
    let mut table = Table::new(
        format!("{}, queue depth {depth}", compared.result.workload.name),
        &["target", "IOPS", "MB/s", "mean", "p50", "p99", "CPU", "IOPS ratio", "rounds", "CPU ratio", "paper’s ratio"],
    );
    for (cell, paper) in compared.result.cells.iter().zip(&compared.paper_ratios) {
        let rounds =
            cell.iops_ratio.as_ref().map(|ratio| format!("{:.2}..{:.2}", ratio.summary.min, ratio.summary.max));
        let dear = cpu_ratio(cell).is_some_and(|ratio| ratio > DEAR);
        table.row(vec![
            Cell::text(&cell.target),
            Cell::figure(cell.iops.median, rate),
            Cell::figure(cell.mb_per_s.median, rate),
            Cell::figure(cell.latency_mean_ns.median, time),
            Cell::figure(cell.latency_p50_ns.median, time),
            Cell::figure(cell.latency_p99_ns.median, time),
            Cell::figure(cell.cpu_ns_per_io.median, time),
            marked(iops_ratio(cell)),
            Cell::text(rounds.unwrap_or_default()).toned(Tone::Faint),
            Cell::maybe(cpu_ratio(cell), ratio).toned(if dear { Tone::Bad } else { Tone::Plain }),
            Cell::maybe(*paper, ratio).toned(Tone::Faint),
        ]);
    }
    table
}

fn creation_bars(records: &[CreationRecord], id: &str) -> Markup {
    let bars: Vec<Bar> = records
        .iter()
        .map(|record| Bar {
            name: record.target.clone(),
            parts: vec![Part { value: record.wall_ns.median, style: 0 }],
            range: Some((record.wall_ns.min, record.wall_ns.max)),
            figure: time(record.wall_ns.median),
            says: format!(
                "{}: {}, from {} to {}",
                record.target,
                time(record.wall_ns.median),
                time(record.wall_ns.min),
                time(record.wall_ns.max)
            ),
        })
        .collect();
    BarChart {
        id: id.into(),
        title: format!(
            "Time to create an empty disk of {}",
            bytes(records.first().map_or(0, |record| record.size_bytes))
        ),
        description: bars.iter().map(|bar| bar.says.clone()).collect::<Vec<_>>().join("; "),
        axis: "time (median of the rounds; whiskers: their range)",
        write: &short_time,
        parts: vec![],
        bars,
        reference: None,
    }
    .render()
}

fn creation_table(records: &[CreationRecord]) -> Table {
    let caption = format!(
        "Creating an empty disk. The paper's fixed VHD of 2,040 GB: {} MB/s on Windows Server 2008, {} MB/s on R2; both write zeros, here the space is reserved.",
        paper::FIXED_CREATION_WS2008_MB_PER_S,
        paper::FIXED_CREATION_R2_MB_PER_S
    );
    let mut table = Table::new(caption, &["target", "size", "time", "shortest", "longest", "takes"]);
    for record in records {
        let size = |value: u64| Cell::figure(value as f64, |value| bytes(value as u64));
        table.row(vec![
            Cell::text(&record.target),
            size(record.size_bytes),
            Cell::figure(record.wall_ns.median, time),
            Cell::figure(record.wall_ns.min, time),
            Cell::figure(record.wall_ns.max, time),
            size(record.file_allocated_bytes),
        ]);
    }
    table
}

fn preparation(result: &ContainersResult) -> Table {
    let heads = ["target", "cache", "written", "in", "read back and right", "in", "every byte allocated", "file takes"];
    let mut table = Table::new("How each disk was prepared and proved", &heads);
    for record in &result.preparation {
        let size = |value: u64| Cell::figure(value as f64, |value| bytes(value as u64));
        table.row(vec![
            Cell::text(&record.target),
            Cell::text(&record.cache),
            size(record.filled_bytes),
            Cell::figure(record.fill_ns as f64, time),
            size(record.verified_bytes),
            Cell::figure(record.verify_ns as f64, time),
            if record.populated { Cell::text("yes") } else { Cell::text("no").toned(Tone::Bad) },
            size(record.file_allocated_bytes),
        ]);
    }
    table
}

fn facts(result: &ContainersResult) -> Vec<(String, String)> {
    let options = &result.options;
    let mut facts = Vec::new();
    let mut add = |name: &str, value: String| facts.push((name.to_owned(), value));
    let (size, block) = (bytes(options.size_bytes), bytes(options.block_bytes));
    add("Disks", format!("{size} each{}, blocks of {block}", rounded(options)));
    add("Queue depths", list(&options.queue_depths.iter().map(u32::to_string).collect::<Vec<_>>()));
    add("Cache", if options.cache == "direct" { "O_DIRECT".into() } else { "page cache".into() });
    add("Engine", options.engine.clone());
    add("The generator itself", format!("{} for each request, on `null:`", time(result.generator_ns_per_io)));
    add("Seed", options.seed.to_string());
    if !result.left_out.is_empty() {
        add("Left out by --quick", result.left_out.join("; "));
    }
    facts
}

/// Behind a size: which one was asked for, where it is another.
fn rounded(options: &ContainersRecord) -> String {
    options.asked_bytes.map_or_else(String::new, |asked| format!(" (rounded up from {})", bytes(asked)))
}
