//! The chapter of the study `containers`.

mod chain;
mod growth;
mod marked;

use super::{
    ToChapter,
    parts::{self, how_measured},
};
use crate::{
    cells::{Cell as Measured, Compared},
    paper,
    ratio::Ratio,
    study::containers::{ContainersRecord, ContainersResult, CreationRecord, record::CONTAINERS, verdict},
    targets::Container,
};
use diskwright_load::figures::Figures;
use diskwright_outline::{
    Block, Cell, Chapter, Table, Tone,
    plot::{Axis, Bar, BarChart, HeatMap, LineChart, Part, Point, Scale, Series},
};
use diskwright_stats::{
    numbers::{bytes, duration as time, figure as rate, list, ratio, short, short_time},
    summary::Summary,
};
use marked::{LOW, marked};
use maud::Markup;

/// Ratios of CPU time above this are marked.
const HIGH_CPU: f64 = 1.10;

impl ToChapter for ContainersResult {
    fn chapter(&self, id: &str, name: &str) -> Chapter {
        chapter(self, id, name)
    }
}

fn chapter(result: &ContainersResult, id: &str, name: &str) -> Chapter {
    let workloads = Compared::of_part(&result.cells, CONTAINERS);
    let mut depths: Vec<u64> = workloads.iter().map(|compared| compared.in_flight).collect();
    depths.sort_unstable();
    depths.dedup();
    let shown = if depths.contains(&32) { 32 } else { depths.first().copied().unwrap_or(0) };
    let at = |depth: u64| -> Vec<&Compared<'_>> {
        workloads.iter().filter(|compared| compared.in_flight == depth).collect()
    };
    let mut blocks: Vec<Block> = verdict::further(&result.cells).into_iter().map(Block::Text).collect();
    if !at(shown).is_empty() {
        blocks.push(Block::Heading(format!("Relative to the raw file, queue depth {shown}")));
        blocks.push(Block::Plots(vec![
            iops_map(&at(shown), shown, &format!("{id}-iops")),
            cpu_bars(&at(shown), shown, &format!("{id}-cpu")),
        ]));
    }
    for depth in &depths {
        let table = Block::Table(overview(&at(*depth), *depth));
        blocks.push(if *depth == shown {
            table
        } else {
            Block::Folded { name: format!("Queue depth {depth}"), blocks: vec![table] }
        });
    }
    if depths.len() > 1 {
        blocks.push(Block::Heading("By queue depth".into()));
        blocks.push(Block::Plots(by_depth(&workloads, id)));
    }
    let each: Vec<Block> = at(shown).into_iter().map(|compared| Block::Table(details(compared, shown))).collect();
    if !each.is_empty() {
        blocks.push(Block::Folded { name: format!("Details of each workload at queue depth {shown}"), blocks: each });
    }
    if !result.creation.is_empty() {
        blocks.push(Block::Heading("Creating an empty disk".into()));
        blocks.push(Block::Plots(vec![creation_bars(&result.creation, &format!("{id}-create"))]));
        blocks.push(Block::Table(creation_table(&result.creation)));
    }
    if let Some(chain) = &result.chain {
        blocks.push(Block::Heading("Chains of differencing disks".into()));
        let reads = chain::Reads::of(chain, &result.cells);
        blocks.push(Block::Plots(chain::plots(chain, &reads, id)));
        blocks.push(Block::Table(chain::table(chain, &reads)));
    }
    blocks.extend(growth::expanding(&result.cells, id));
    result.block_sizes.iter().for_each(|record| blocks.extend(growth::block_sizes(record, &result.cells)));
    blocks.push(Block::Folded {
        name: "How each disk was prepared and verified".into(),
        blocks: vec![Block::Table(preparation(result))],
    });
    blocks.extend(how_measured(&result.head, facts(result)));
    parts::chapter(&result.head, (id, name), "Study of containers", badges(result), blocks)
}

fn badges(result: &ContainersResult) -> Vec<(Tone, String)> {
    let mut badges = parts::badges(&result.head, result.options.rounds, result.options.quick);
    if !result.preparation.is_empty() && result.preparation.iter().all(|record| record.populated) {
        badges.push((Tone::Good, "every byte allocated and verified".into()));
    }
    badges
}

fn iops_ratios(compared: &Compared<'_>) -> Vec<Option<f64>> {
    compared.median_ratios(|round| round.iops)
}

/// Ratios of workloads by containers, without the raw file, which is their base.
fn iops_map(workloads: &[&Compared<'_>], depth: u64, id: &str) -> Markup {
    let columns: Vec<String> = workloads.first().map_or(vec![], |first| targets(first).skip(1).collect());
    // The first workload on top.
    let rows: Vec<&&Compared<'_>> = workloads.iter().rev().collect();
    let cells: Vec<Vec<Option<f64>>> =
        rows.iter().map(|compared| iops_ratios(compared).into_iter().skip(1).collect()).collect();
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
        rows: rows.iter().map(|compared| compared.load.to_owned()).collect(),
        cells,
        write: &ratio,
        log: false,
        marks: vec![],
    }
    .render()
}

fn targets(compared: &Compared<'_>) -> impl Iterator<Item = String> {
    compared.cells.iter().map(|cell| cell.subject.clone())
}

/// CPU time per request of every container: median and range over the workloads.
fn cpu_bars(workloads: &[&Compared<'_>], depth: u64, id: &str) -> Markup {
    let names: Vec<String> = workloads.first().map_or(vec![], |first| targets(first).collect());
    let bars: Vec<Bar> = names
        .iter()
        .enumerate()
        .filter_map(|(index, name)| {
            let each = workloads.iter().filter_map(|compared| compared.cells.get(index));
            let times: Vec<f64> = each.filter_map(|cell| cell.median(|round| round.cpu_ns_per_io)).collect();
            let summary = Summary::of(&times)?;
            Some(Bar {
                name: name.clone(),
                parts: vec![Part { value: summary.median, style: 0 }],
                range: Some((summary.min, summary.max)),
                figure: time(summary.median),
                tooltip: format!(
                    "{name}: {} of CPU per request, from {} to {}",
                    time(summary.median),
                    time(summary.min),
                    time(summary.max)
                ),
            })
        })
        .collect();
    BarChart {
        id: id.into(),
        title: format!("CPU time per request, queue depth {depth}"),
        description: bars.iter().map(|bar| bar.tooltip.clone()).collect::<Vec<_>>().join("; "),
        axis: "CPU time of this process per request (median of the workloads; whiskers: their range)",
        write: &short_time,
        parts: vec![],
        reference: bars.first().map(|bar| (bar.parts[0].value, bar.name.clone())),
        bars,
    }
    .render()
}

fn by_depth(workloads: &[Compared<'_>], id: &str) -> Vec<Markup> {
    let mut names: Vec<&str> = Vec::new();
    for compared in workloads {
        if !names.contains(&compared.load) {
            names.push(compared.load);
        }
    }
    let plot = |(number, name): (usize, &&str)| {
        let mut series: Vec<Series> = Vec::new();
        for compared in workloads.iter().filter(|compared| compared.load == *name) {
            for cell in &compared.cells {
                let Some(Figures { iops, mean_ns, .. }) = cell.medians() else { continue };
                let (target, depth) = (&cell.subject, compared.in_flight);
                let tooltip =
                    format!("{target}, queue depth {depth}: {} IOPS, mean latency {}", rate(iops), time(mean_ns));
                let point = Point { x: iops, y: mean_ns, tooltip };
                match series.iter_mut().find(|line| line.name == *target) {
                    Some(line) => line.points.push(point),
                    None => series.push(Series {
                        name: target.clone(),
                        points: vec![point],
                        style: series.len(),
                        line: true,
                        x_error: 0.0,
                    }),
                }
            }
        }
        let all = || series.iter().flat_map(|line| &line.points);
        LineChart {
            id: format!("{id}-depth{number}"),
            title: format!("{name}: throughput against latency"),
            description: "Each line is a container; its points are queue depths.".into(),
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

fn overview(workloads: &[&Compared<'_>], depth: u64) -> Table {
    let mut table = Table::new(
        format!(
            "IOPS of the raw file at queue depth {depth}, and of the others as a ratio to it (median of the ratios within rounds; ±: largest distance of a round's ratio from the median in this row)"
        ),
        &["workload", "raw file IOPS"],
    );
    // Shortened, so that the table fits a terminal of 80 columns.
    let short = |name: String| name.replace("differencing", "diff.");
    table.heads.extend(workloads.first().into_iter().flat_map(|first| targets(first).skip(1)).map(short));
    table.heads.push("±".into());
    for compared in workloads {
        let mut row = vec![Cell::text(compared.load)];
        row.extend(compared.cells.first().map(|raw| Cell::maybe(raw.median(|round| round.iops), rate)));
        row.extend(iops_ratios(compared).into_iter().skip(1).map(marked));
        row.push(Cell::maybe(distance(compared), ratio).toned(Tone::Faint));
        table.row(row);
    }
    table
}

/// The largest distance of a round's IOPS ratio from the median of its target. `None` with one
/// round, whose scatter is unknown.
fn distance(compared: &Compared<'_>) -> Option<f64> {
    let ratios = compared.ratios(|round| round.iops).filter_map(|(_, ratio)| ratio);
    let distances = ratios.filter_map(|ratio| {
        let (min, max) = ratio.range()?;
        Some((max - ratio.median()).max(ratio.median() - min))
    });
    distances.reduce(f64::max)
}

/// The paper's ratio of this container to the physical disk (Windows Server 2008 R2, queue depth
/// 64), if its tables have one.
fn papers_ratio(cell: &Measured) -> Option<f64> {
    paper::ratio(&paper::workload(&cell.load)?, Container::from_name(&cell.subject)?.in_paper()?)
}

fn details(compared: &Compared<'_>, depth: u64) -> Table {
    let mut table = Table::new(
        format!("{}, queue depth {depth}", compared.load),
        &["target", "IOPS", "MB/s", "mean", "p50", "p99", "CPU", "IOPS ratio", "rounds", "CPU ratio", "paper’s ratio"],
    );
    let Some(base) = compared.cells.first() else { return table };
    for (index, cell) in compared.cells.iter().enumerate() {
        let Some(medians) = cell.medians() else { continue };
        let iops = cell.ratio(base, |round| round.iops).filter(|_| index > 0);
        let cpu = cell.ratio(base, |round| round.cpu_ns_per_io).filter(|_| index > 0).map(|ratio| ratio.median());
        let rounds = iops.as_ref().and_then(Ratio::range).map(|(min, max)| format!("{min:.2}..{max:.2}"));
        let is_high = cpu.is_some_and(|ratio| ratio > HIGH_CPU);
        table.row(vec![
            Cell::text(&cell.subject),
            Cell::figure(medians.iops, rate),
            Cell::figure(medians.mb_per_s, rate),
            Cell::figure(medians.mean_ns, time),
            Cell::figure(medians.p50_ns, time),
            Cell::figure(medians.p99_ns, time),
            Cell::figure(medians.cpu_ns_per_io, time),
            marked(iops.map(|ratio| ratio.median())),
            Cell::text(rounds.unwrap_or_default()).toned(Tone::Faint),
            Cell::maybe(cpu, ratio).toned(if is_high { Tone::Bad } else { Tone::Plain }),
            Cell::maybe(papers_ratio(cell), ratio).toned(Tone::Faint),
        ]);
    }
    table
}

fn creation_bars(records: &[CreationRecord], id: &str) -> Markup {
    let bars: Vec<Bar> = records
        .iter()
        .filter_map(|record| {
            let (name, times) = (record.container.name(), Summary::of(&record.wall_ns)?);
            Some(Bar {
                name: name.into(),
                parts: vec![Part { value: times.median, style: 0 }],
                range: (record.wall_ns.len() > 1).then_some((times.min, times.max)),
                figure: time(times.median),
                tooltip: format!("{name}: {}, from {} to {}", time(times.median), time(times.min), time(times.max)),
            })
        })
        .collect();
    BarChart {
        id: id.into(),
        title: format!(
            "Time to create an empty disk of {}",
            bytes(records.first().map_or(0, |record| record.size_bytes))
        ),
        description: bars.iter().map(|bar| bar.tooltip.clone()).collect::<Vec<_>>().join("; "),
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
    let mut table = Table::new(caption, &["target", "size", "time", "min", "max", "file takes"]);
    for record in records {
        let size = |value: u64| Cell::figure(value as f64, |value| bytes(value as u64));
        let Some(times) = Summary::of(&record.wall_ns) else { continue };
        table.row(vec![
            Cell::text(record.container.name()),
            size(record.size_bytes),
            Cell::figure(times.median, time),
            Cell::figure(times.min, time),
            Cell::figure(times.max, time),
            size(record.file_allocated_bytes),
        ]);
    }
    table
}

fn preparation(result: &ContainersResult) -> Table {
    let heads = ["target", "cache", "written", "time", "verified", "time", "fully allocated", "file takes"];
    let mut table = Table::new("How each disk was prepared and verified", &heads);
    for record in &result.preparation {
        let size = |value: u64| Cell::figure(value as f64, |value| bytes(value as u64));
        table.row(vec![
            Cell::text(record.container.name()),
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
    add("Load generator alone", format!("{} per request, on `null:`", time(result.generator_ns_per_io)));
    add("Seed", options.seed.to_string());
    if !result.left_out.is_empty() {
        add("Not measured in the quick study", result.left_out.join("; "));
    }
    facts
}

/// The requested size in brackets, if the size was rounded up.
fn rounded(options: &ContainersRecord) -> String {
    options.asked_bytes.map_or_else(String::new, |asked| format!(" (rounded up from {})", bytes(asked)))
}
