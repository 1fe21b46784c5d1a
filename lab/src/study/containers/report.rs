//! What the study prints: the verdict first, one table that fits on a screen, then every workload
//! in full.

use super::growth;
use crate::{
    paper,
    result::{ChainRecord, ComparedWorkload, ContainersRecord, ContainersResult, CreationRecord},
    table::{Align, Cell, Table, Tone, bytes, duration, figure, grouped, paint},
    warning::Warning,
};
use std::fmt::Write as _;

/// A ratio below this is marked.
const LOW: f64 = 0.95;
/// A ratio of CPU time above this is marked.
const DEAR: f64 = 1.10;

/// The whole report as text. `colour` only for a terminal.
pub fn render(result: &ContainersResult, colour: bool) -> String {
    let mut text = format!("{}\n\n{}", result.verdict, conditions(result));
    let mut depths: Vec<u32> = result.workloads.iter().map(|compared| compared.result.workload.queue_depth).collect();
    depths.dedup();
    for depth in &depths {
        let at_depth: Vec<&ComparedWorkload> =
            result.workloads.iter().filter(|compared| compared.result.workload.queue_depth == *depth).collect();
        let _ = write!(text, "\nIOPS as a ratio to the raw file, queue depth {depth} (median of the rounds)\n\n");
        text.push_str(&overview(&at_depth, colour));
    }
    // With many depths every table of every depth would be pages; the JSON has them all.
    let told = if depths.contains(&32) { 32 } else { depths.first().copied().unwrap_or(0) };
    for compared in result.workloads.iter().filter(|compared| compared.result.workload.queue_depth == told) {
        let _ = write!(text, "\n{}, queue depth {told}\n\n", compared.result.workload.name);
        text.push_str(&details(compared, colour));
    }
    text.push_str("\n  ratio: to the raw file in the same round, median, then lowest and highest round. CPU: time of this process per I/O.\n");
    text.push_str(
        "  paper: VHD against the physical disk, Windows Server 2008 R2, queue depth 64; '-' where it has no figure.\n",
    );
    if !result.creation.is_empty() {
        text.push_str(&creation(&result.creation, colour));
    }
    if let Some(chain) = &result.chain {
        text.push_str(&chains(chain, colour));
    }
    text.push_str(&growth::expanding(&result.expanding, colour));
    for record in &result.block_sizes {
        text.push_str(&growth::block_sizes(record, colour));
    }
    text.push_str(&doubts(&result.warnings, colour));
    text
}

fn conditions(result: &ContainersResult) -> String {
    let (place, options) = (&result.place, &result.options);
    let mut text = String::new();
    let cells = result
        .workloads
        .first()
        .map_or_else(String::new, |compared| format!(", cells of {}", duration(compared.result.window_ns as f64)));
    let stopped =
        if result.partial { format!(", stopped after {}", duration(result.took_ns as f64)) } else { String::new() };
    let proved = result.preparation.iter().map(|record| record.verified_bytes).sum();
    let _ = writeln!(
        text,
        "  {}; {place}{}",
        result.machine,
        place.scheduler.as_ref().map_or_else(String::new, |scheduler| format!(" ({scheduler})")),
    );
    let _ = writeln!(
        text,
        "  {} disks of {}{}, {}, engine {}, {} rounds{cells}{stopped}; the generator itself costs {} per I/O",
        result.preparation.len(),
        bytes(options.size_bytes),
        rounded(options),
        if options.cache == "direct" { "O_DIRECT" } else { "page cache" },
        options.engine,
        options.rounds,
        duration(result.generator_ns_per_io),
    );
    let _ = writeln!(
        text,
        "  proved: all {} that were written read back right after reopening, and every byte of every disk is allocated",
        bytes(proved)
    );
    if !result.left_out.is_empty() {
        let _ = writeln!(text, "  left out by --quick: {}", result.left_out.join("; "));
    }
    text
}

/// Behind a size: which one was asked for, where it is another.
pub(crate) fn rounded(options: &ContainersRecord) -> String {
    options.asked_bytes.map_or_else(String::new, |asked| format!(" (rounded up from {})", bytes(asked)))
}

pub(super) fn ratio_cell(ratio: Option<f64>) -> Cell {
    match ratio {
        Some(ratio) if ratio < LOW => Cell::toned(format!("{ratio:.2}"), Tone::Bad),
        Some(ratio) => Cell::toned(format!("{ratio:.2}"), Tone::Good),
        None => Cell::toned("-", Tone::Faint),
    }
}

/// One row for each workload, one column for each container.
fn overview(workloads: &[&ComparedWorkload], colour: bool) -> String {
    let Some(first) = workloads.first() else { return String::new() };
    let targets: Vec<&str> = first.result.cells.iter().skip(1).map(|cell| cell.target.as_str()).collect();
    let heads: Vec<(&str, Align)> = std::iter::once(("workload", Align::Left))
        .chain([("raw file IOPS", Align::Right)])
        .chain(targets.iter().map(|target| (*target, Align::Right)))
        .collect();
    let mut table = Table::new(&heads);
    for compared in workloads {
        let cells = &compared.result.cells;
        let mut row = vec![Cell::new(compared.result.workload.name.clone())];
        row.extend(cells.first().map(|raw| Cell::new(grouped(raw.iops.median))));
        let ratios = cells.iter().skip(1).map(|cell| cell.iops_ratio.as_ref().map(|ratio| ratio.median()));
        row.extend(ratios.map(ratio_cell));
        table.row(row);
    }
    table.render(colour)
}

/// One row for each container.
fn details(compared: &ComparedWorkload, colour: bool) -> String {
    let mut table = Table::new(&[
        ("target", Align::Left),
        ("IOPS", Align::Right),
        ("MB/s", Align::Right),
        ("mean µs", Align::Right),
        ("p50 µs", Align::Right),
        ("p99 µs", Align::Right),
        ("CPU µs", Align::Right),
        ("ratio", Align::Right),
        ("rounds", Align::Left),
        ("CPU ratio", Align::Right),
        ("paper", Align::Right),
    ]);
    for (cell, paper_ratio) in compared.result.cells.iter().zip(&compared.paper_ratios) {
        let us = |ns: f64| Cell::new(figure(ns / 1e3));
        let rounds =
            cell.iops_ratio.as_ref().map(|ratio| format!("{:.2}..{:.2}", ratio.summary.min, ratio.summary.max));
        let cpu = match cell.cpu_ratio.as_ref().map(|ratio| ratio.median()) {
            Some(ratio) if ratio > DEAR => Cell::toned(format!("{ratio:.2}"), Tone::Bad),
            Some(ratio) => Cell::new(format!("{ratio:.2}")),
            None => Cell::new(""),
        };
        let is_base = cell.iops_ratio.is_none();
        table.row(vec![
            Cell::new(cell.target.clone()),
            Cell::new(grouped(cell.iops.median)),
            Cell::new(figure(cell.mb_per_s.median)),
            us(cell.latency_mean_ns.median),
            us(cell.latency_p50_ns.median),
            us(cell.latency_p99_ns.median),
            us(cell.cpu_ns_per_io.median),
            if is_base { Cell::new("") } else { ratio_cell(cell.iops_ratio.as_ref().map(|ratio| ratio.median())) },
            Cell::toned(rounds.unwrap_or_default(), Tone::Faint),
            cpu,
            if is_base {
                Cell::new("")
            } else {
                Cell::toned(paper_ratio.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}")), Tone::Faint)
            },
        ]);
    }
    table.render(colour)
}

fn creation(records: &[CreationRecord], colour: bool) -> String {
    let size = records.first().map_or(0, |record| record.size_bytes);
    let mut text = format!("\nCreating an empty disk of {}\n\n", bytes(size));
    let mut table = Table::new(&[
        ("target", Align::Left),
        ("time", Align::Right),
        ("rounds", Align::Left),
        ("takes", Align::Right),
        ("as MB/s", Align::Right),
    ]);
    for record in records {
        let rate = (record.file_allocated_bytes >= record.size_bytes)
            .then(|| grouped(record.size_bytes as f64 * 1e3 / record.wall_ns.median.max(1.0)));
        table.row(vec![
            Cell::new(record.target.clone()),
            Cell::new(duration(record.wall_ns.median)),
            Cell::toned(format!("{}..{}", duration(record.wall_ns.min), duration(record.wall_ns.max)), Tone::Faint),
            Cell::new(bytes(record.file_allocated_bytes)),
            Cell::new(rate.unwrap_or_default()),
        ]);
    }
    text.push_str(&table.render(colour));
    let _ = write!(
        text,
        "\n  paper, a fixed VHD of 2,040 GB: {} MB/s on Windows Server 2008, {} MB/s on R2 (both write zeros; here the space is reserved)\n",
        paper::FIXED_CREATION_WS2008_MB_PER_S,
        paper::FIXED_CREATION_R2_MB_PER_S
    );
    text
}

fn chains(chain: &ChainRecord, colour: bool) -> String {
    let mut text = format!(
        "\nChains of differencing VHDX: data in the base ({}), read through the top\n\n",
        bytes(chain.size_bytes)
    );
    let heads = [
        ("children", Align::Right),
        ("4K random MB/s", Align::Right),
        ("ratio", Align::Right),
        ("2008", Align::Right),
        ("R2", Align::Right),
        ("64K sequential MB/s", Align::Right),
        ("ratio", Align::Right),
        ("2008", Align::Right),
        ("R2", Align::Right),
        ("open", Align::Right),
        ("peak memory", Align::Right),
    ];
    let mut table = Table::new(&heads);
    for (index, length) in chain.lengths.iter().enumerate() {
        let mut row = vec![Cell::new(length.children.to_string())];
        for (reads, points) in chain.reads.iter().zip([&paper::CHAIN_4K_RANDOM_READ, &paper::CHAIN_64K_SEQUENTIAL_READ])
        {
            let Some(cell) = reads.cells.get(index) else { continue };
            row.push(Cell::new(figure(cell.mb_per_s.median)));
            row.push(match &cell.iops_ratio {
                Some(ratio) => ratio_cell(Some(ratio.median())),
                None => Cell::new("1.00"),
            });
            let (old, new) = paper::chain_ratios(points, length.children).unzip();
            row.extend([old, new].map(|ratio| {
                Cell::toned(ratio.map_or_else(|| "-".into(), |ratio: f64| format!("{ratio:.2}")), Tone::Faint)
            }));
        }
        row.push(Cell::new(duration(length.open.open_ns as f64)));
        row.push(Cell::new(bytes(length.open.resident_peak_bytes)));
        table.row(row);
    }
    text.push_str(&table.render(colour));
    text.push_str(
        "\n  ratio: to a chain of one in the same round; 2008 and R2: the paper's, to its own chain of one.\n",
    );
    if chain.lengths.iter().any(|length| !length.in_child_process) {
        text.push_str("  peak memory is that of the whole program, not of the open alone.\n");
    }
    text
}

fn doubts(warnings: &[Warning], colour: bool) -> String {
    let mut text = String::new();
    if !warnings.is_empty() {
        text.push_str("\nBefore you believe this\n\n");
    }
    for warning in warnings {
        let _ = writeln!(text, "  {} {warning}", paint("!", Tone::Bad, colour));
    }
    text
}
