//! A run as text for a person: the conclusion first, then the figures, then the reasons for doubt.
//!
//! ```text
//!   NOT STORAGE: ...              only when a warning voids the run: then it is the first line
//!   verdict                       a sentence for each phase
//!   per phase                     throughput and latency by direction, target, thread; percentiles; CPU; steady state
//!   warnings, targets, machine    what it was measured on
//! ```
//!
//! A percentile stands only where at least ten samples lie beyond it; where there are fewer, a dot
//! says so.

mod verdict;

pub use verdict::sentences;

use crate::{
    record::{DirectionRecord, PhaseRecord, Run, TargetRecord},
    table::{Align, Cell, Table, Tone, bytes, duration, figure, grouped, paint},
};
use std::fmt::Write as _;

/// Columns of a terminal beyond which a table had better go down the page.
const WIDE: usize = 100;

/// How to show a run.
#[derive(Debug, Clone, Copy, Default)]
pub struct ScreenOptions {
    /// Whether the terminal has colours.
    pub colour: bool,
    /// A row for each thread.
    pub per_thread: bool,
}

/// The text of a run.
pub fn render(run: &Run, options: &ScreenOptions) -> String {
    let mut text = String::new();
    for warning in run.warnings.iter().filter(|warning| warning.voids()) {
        let line = format!("NOT STORAGE: {warning}");
        let _ = writeln!(text, "{}", paint(&line, Tone::Bad, options.colour));
    }
    for sentence in sentences(run) {
        let _ = writeln!(text, "{sentence}");
    }
    for phase in &run.phases {
        render_phase(&mut text, run, phase, options);
    }
    let doubts: Vec<String> = run.warnings.iter().filter(|warning| !warning.voids()).map(ToString::to_string).collect();
    if !doubts.is_empty() {
        let _ = writeln!(text, "\nWarnings");
        for doubt in doubts {
            let _ = writeln!(text, "  {}", paint(&format!("! {doubt}"), Tone::Bad, options.colour));
        }
    }
    let _ = writeln!(text, "\nMeasured on");
    for target in &run.targets {
        let _ = writeln!(text, "  {}", of_target(target));
    }
    let machine = &run.machine;
    let _ = writeln!(
        text,
        "  {}, {} processors, {} of memory, {}; seed {}",
        machine.cpu_model,
        machine.logical_cpus,
        bytes(machine.memory_bytes),
        machine.kernel,
        run.job.seed
    );
    text
}

fn render_phase(text: &mut String, run: &Run, phase: &PhaseRecord, options: &ScreenOptions) {
    let total = phase.total();
    let threads = phase.threads.len();
    let heading = format!(
        "\n{}: {} measured{}, {threads} thread{}, {} in flight ({:.1} on average)",
        phase.name,
        duration(phase.window_ns as f64),
        match phase.window_start_ns {
            0 => String::new(),
            start_ns => format!(" after {}", duration(start_ns as f64)),
        },
        if threads == 1 { "" } else { "s" },
        total.queue_depth,
        phase.depth_reached()
    );
    let _ = writeln!(text, "{heading}");
    if let Some(steady) = &phase.steady {
        let rule = format!("range {:.0} %, slope {:.0} %", steady.range * 100.0, steady.slope * 100.0);
        let at = |ns: u64| duration(ns as f64);
        let line = match (steady.reached_ns, steady.left_ns) {
            (Some(reached), None) => format!("steady after {} ({rule})", at(reached)),
            (Some(reached), Some(left)) => {
                format!("steady after {} ({rule}), and NOT ANY MORE after {}", at(reached), at(left))
            }
            (None, _) => format!(
                "NOT STEADY ({rule}; SNIA's rule wants 20 % and 10 % over five rounds of {})",
                at(steady.round_ns)
            ),
        };
        let _ = writeln!(text, "  {line}");
    }
    let rows = rows_of(run, phase, options);
    text.push_str(&throughput(phase, &rows).render(options.colour));
    let _ = writeln!(text);
    text.push_str(&percentiles(&rows).render(options.colour));
    let _ = writeln!(text, "  {}", cpu(phase));
}

/// What a row is about.
struct Row {
    name: String,
    sums: DirectionRecord,
}

fn rows_of(run: &Run, phase: &PhaseRecord, options: &ScreenOptions) -> Vec<Row> {
    let total = phase.total();
    let mut rows = vec![Row { name: "total".into(), sums: total.both }];
    if total.reads.ios + total.reads.errors > 0 && total.writes.ios + total.writes.errors > 0 {
        rows.push(Row { name: "reads".into(), sums: total.reads });
        rows.push(Row { name: "writes".into(), sums: total.writes });
    }
    if run.targets.len() > 1 {
        for (number, target) in run.targets.iter().enumerate() {
            let sums = phase.total_where(|thread| thread.target as usize == number).both;
            rows.push(Row { name: target.name.clone(), sums });
        }
    }
    let loads = run.job.phases.iter().find(|one| one.name == phase.name).map_or(&[][..], |phase| &phase.loads);
    if loads.len() > 1 {
        for (number, load) in loads.iter().enumerate() {
            let sums = phase.total_where(|thread| thread.load as usize == number).both;
            rows.push(Row { name: load.title(), sums });
        }
    }
    if options.per_thread {
        for thread in &phase.threads {
            let mut sums = thread.reads.clone();
            sums.add(&thread.writes);
            let target = run.targets.get(thread.target as usize).map_or("", |target| target.name.as_str());
            let name = if run.targets.len() > 1 {
                format!("thread {} on {target}", thread.thread)
            } else {
                format!("thread {}", thread.thread)
            };
            rows.push(Row { name, sums });
        }
    }
    if total.flushes.ios + total.flushes.errors > 0 {
        rows.push(Row { name: "flushes".into(), sums: total.flushes });
    }
    rows
}

fn throughput(phase: &PhaseRecord, rows: &[Row]) -> Table {
    let errors = rows.iter().any(|row| row.sums.errors > 0);
    let mut heads = vec![
        ("", Align::Left),
        ("requests", Align::Right),
        ("IOPS", Align::Right),
        ("MB/s", Align::Right),
        ("mean", Align::Right),
        ("deviation", Align::Right),
    ];
    if errors {
        heads.push(("failed", Align::Right));
    }
    let mut table = Table::new(&heads);
    let per_second = |count: u64| count as f64 * 1e9 / phase.window_ns.max(1) as f64;
    for row in rows {
        let latency = row.sums.latency();
        let mut cells = vec![
            Cell::new(&row.name),
            Cell::new(grouped(row.sums.ios as f64)),
            Cell::new(figure(per_second(row.sums.ios))),
            if row.sums.bytes == 0 && row.sums.ios > 0 {
                Cell::toned("·", Tone::Faint)
            } else {
                Cell::new(figure(per_second(row.sums.bytes) / 1e6))
            },
            Cell::new(duration(latency.mean_ns())),
            Cell::new(duration(latency.deviation_ns())),
        ];
        if errors {
            cells.push(Cell::toned(grouped(row.sums.errors as f64), Tone::Bad));
        }
        table.row(cells);
    }
    table
}

/// Percentiles down to the nines that the largest sample supports. Where there is a schedule both
/// kinds of latency are shown. Many nines go down the page, for they would not find room beside
/// each other.
fn percentiles(rows: &[Row]) -> Table {
    let most = rows.iter().map(|row| row.sums.latency().nines()).max().unwrap_or(0);
    // Each with how many nines it has: a sample of too few leaves it empty.
    let mut shares: Vec<(String, f64, u32)> =
        vec![("50 %".into(), 0.5, 0), ("90 %".into(), 0.9, 1), ("99 %".into(), 0.99, 2)];
    for nines in 3..=most.max(2) {
        shares.push((format!("99.{} %", "9".repeat(nines as usize - 2)), 1.0 - 10_f64.powi(-(nines as i32)), nines));
    }
    let heads = || ["least"].into_iter().chain(shares.iter().map(|(head, _, _)| head.as_str())).chain(["most"]);
    let mut lines: Vec<(String, Vec<Cell>)> = Vec::new();
    for row in rows {
        let kinds = match &row.sums.response {
            Some(response) => vec![
                (format!("{}, from the intended start", row.name), response),
                (format!("{}, service", row.name), &row.sums.service),
            ],
            None => vec![(row.name.clone(), &row.sums.service)],
        };
        for (name, latency) in kinds.into_iter().filter(|(_, latency)| latency.count > 0) {
            let mut cells = vec![Cell::new(duration(latency.min_ns as f64))];
            cells.extend(shares.iter().map(|(_, share, nines)| match latency.quantile_ns(*share) {
                Some(value) if *nines == 0 || latency.nines() >= *nines => Cell::new(duration(value as f64)),
                _ => Cell::toned("·", Tone::Faint),
            }));
            cells.push(Cell::new(duration(latency.max_ns as f64)));
            lines.push((name, cells));
        }
    }
    let across = Table::of(
        [("latency", Align::Left)].into_iter().chain(heads().map(|head| (head, Align::Right))),
        lines.iter().map(|(name, cells)| [Cell::new(name)].into_iter().chain(cells.iter().cloned()).collect()),
    );
    let down = Table::of(
        [("latency", Align::Left)].into_iter().chain(lines.iter().map(|(name, _)| (name.as_str(), Align::Right))),
        heads().enumerate().map(|(number, head)| {
            [Cell::new(head)].into_iter().chain(lines.iter().map(|(_, cells)| cells[number].clone())).collect()
        }),
    );
    if across.width() > WIDE && down.width() < across.width() { down } else { across }
}

/// What a request cost: in time and cycles of the time-stamp counter of the generator, and in the
/// whole machine's time and MHz per IOPS.
fn cpu(phase: &PhaseRecord) -> String {
    let ios: u64 = phase.threads.iter().map(|thread| thread.reads.ios + thread.writes.ios).sum();
    if ios == 0 {
        return "CPU: no request to reckon it for".into();
    }
    let each = |ns: u64| duration(ns as f64 / ios as f64);
    let own_ns = phase.cpu_ns_per_io();
    let mut text = format!(
        "CPU for each request: {} ({} user, {} kernel)",
        duration(own_ns),
        each(phase.cpu.process_user_ns),
        each(phase.cpu.process_system_ns)
    );
    if phase.cpu.tsc_hz > 0.0 {
        let _ = write!(text, " = {} TSC cycles", grouped(own_ns * phase.cpu.tsc_hz / 1e9));
    }
    if let Some(cycles) = phase.cpu.hardware_cycles {
        let _ = write!(text, " = {} cycles by the hardware's counter", grouped(cycles as f64 / ios as f64));
    }
    if !phase.cpu.cores.is_empty() {
        let _ = write!(text, "; the whole machine: {}", duration(phase.machine_cpu_ns_per_io()));
    }
    if let Some(mhz) = phase.machine_mhz_per_iops() {
        let _ = write!(text, " = {mhz:.4} MHz per IOPS of the whole machine");
    }
    text
}

fn of_target(target: &TargetRecord) -> String {
    use crate::job::Caching;
    let mut parts = vec![target.kind.clone(), bytes(target.size_bytes)];
    parts.extend(target.behind.as_ref().map(ToString::to_string));
    let cache = match target.cache {
        Caching::Cached | Caching::Direct if target.is_export() => "cached as its server likes",
        _ if target.is_export() => "cached as its server likes, writes durable",
        Caching::Cached => "through the page cache",
        Caching::Direct => "past the page cache (O_DIRECT)",
        Caching::WriteThrough => "through the page cache, writes durable",
        Caching::DirectWriteThrough => "past the page cache (O_DIRECT), writes durable",
    };
    if target.kind != "null" {
        parts.push(cache.into());
    }
    if let Some(place) = &target.place {
        let scheduler = place.scheduler.as_ref().map_or_else(String::new, |name| format!(", scheduler {name}"));
        let free = if place.free_bytes == 0 { String::new() } else { format!(", {} free", bytes(place.free_bytes)) };
        parts.push(format!("{} on {}{scheduler}{free}", place.file_system, place.device));
    }
    if let Some(contents) = &target.contents {
        let share = |share: f64| format!("{:.0} %", share * 100.0);
        parts.push(format!(
            "{} has space, of {} samples {} zeros and {} copies",
            share(contents.allocated),
            contents.sampled,
            share(contents.zero),
            share(contents.repeated)
        ));
        if contents.filled_bytes > 0 {
            parts.push(format!("filled with {} beforehand", bytes(contents.filled_bytes)));
        }
    }
    format!("{}: {}", target.name, parts.join(", "))
}

#[cfg(test)]
mod tests;
