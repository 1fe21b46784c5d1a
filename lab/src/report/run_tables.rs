//! The tables of a run: by direction, percentile, target and thread; CPU time per request.

use diskwright_load::record::{DirectionRecord, LatencyRecord, PhaseRecord, Run, Total};
use diskwright_outline::{Cell, Table, Tone};
use diskwright_stats::numbers::{duration as time, figure as rate, grouped as count, ratio};

/// Latency cells: mean, optional standard deviation, median, 99th percentile, maximum. The
/// percentile table has more.
fn latency_cells(latency: &LatencyRecord, with_std_dev: bool) -> Vec<Cell> {
    let any = latency.count > 0;
    let quantile = |share: f64, needed: u64| {
        let value = latency.quantile_ns(share).filter(|_| latency.count >= needed);
        Cell::maybe(value.map(|ns| ns as f64), time)
    };
    let mut cells = vec![Cell::maybe(any.then(|| latency.mean_ns()), time)];
    cells.extend(with_std_dev.then(|| Cell::maybe(any.then(|| latency.std_dev_ns()), time)));
    cells.extend([quantile(0.5, 20), quantile(0.99, 1000), Cell::maybe(any.then_some(latency.max_ns as f64), time)]);
    cells
}

const LATENCY_HEADS: [&str; 4] = ["mean", "p50", "p99", "max"];

pub(super) fn direction_table(phase: &PhaseRecord) -> Table {
    let mut heads = vec!["", "IOPS", "MB/s", "requests", "mean", "std dev", "p50", "p99", "max"];
    let total = phase.total();
    let has_errors = total.both.errors + total.flushes.errors > 0;
    if has_errors {
        heads.push("errors");
    }
    let mut table = Table::new("Reads, writes and both; percentiles with at least ten slower requests", &heads);
    let seconds = phase.window_s().max(1e-9);
    let Total { reads, writes, both, flushes, .. } = &total;
    for (name, direction) in [("reads", reads), ("writes", writes), ("both", both), ("flushes", flushes)] {
        let is_made = |direction: &DirectionRecord| direction.ios + direction.errors > 0;
        // "both" is shown if reads and writes were made, or neither.
        let is_shown = if name == "both" { is_made(reads) == is_made(writes) } else { is_made(direction) };
        if !is_shown {
            continue;
        }
        let mut cells = vec![
            Cell::text(name),
            Cell::figure(direction.ios as f64 / seconds, rate),
            Cell::maybe((name != "flushes").then_some(direction.bytes as f64 / 1e6 / seconds), rate),
            Cell::figure(direction.ios as f64, count),
        ];
        cells.extend(latency_cells(direction.latency(), true));
        if has_errors {
            let tone = if direction.errors > 0 { Tone::Bad } else { Tone::Faint };
            cells.push(Cell::figure(direction.errors as f64, count).toned(tone));
        }
        if name == "both" { table.total(cells) } else { table.row(cells) }
    }
    table
}

/// Names and shares of percentiles, up to this number of nines.
fn shares(nines: u32) -> Vec<(String, f64)> {
    let mut shares: Vec<(String, f64)> =
        [25.0, 50.0, 75.0, 90.0, 95.0].map(|p: f64| (format!("p{p}"), p / 100.0)).into();
    shares.extend((2..=nines).map(|nine| {
        let share = 1.0 - 10_f64.powi(-(nine as i32));
        (format!("p{}", diskwright_stats::numbers::percentile(share)), share)
    }));
    shares
}

pub(super) fn percentile_table(phase: &PhaseRecord) -> Table {
    let total = phase.total();
    let scheduled = total.both.response.is_some();
    let columns: Vec<(&str, &LatencyRecord)> = [
        ("reads", total.reads.latency()),
        ("writes", total.writes.latency()),
        ("both", total.both.latency()),
        ("both, service time", &total.both.service),
        ("flushes", &total.flushes.service),
    ]
    .into_iter()
    .filter(|(name, latency)| latency.count > 0 && (scheduled || *name != "both, service time"))
    .collect();
    let heads: Vec<&str> = std::iter::once("percentile").chain(columns.iter().map(|(name, _)| *name)).collect();
    let mut table = Table::new("Latency by percentile, with at least ten slower requests", &heads);
    let nines = columns.iter().map(|(_, latency)| latency.nines()).max().unwrap_or(0);
    let row = |name: &str, value: &dyn Fn(&LatencyRecord) -> Option<f64>| {
        let cells = columns.iter().map(|(_, latency)| Cell::maybe(value(latency), time));
        std::iter::once(Cell::text(name)).chain(cells).collect()
    };
    table.row(row("min", &|latency| Some(latency.min_ns as f64)));
    for (name, share) in shares(nines) {
        table.row(row(&name, &|latency| {
            let beyond = latency.count as f64 * (1.0 - share);
            latency.quantile_ns(share).filter(|_| beyond >= 9.999).map(|ns| ns as f64)
        }));
    }
    table.row(row("max", &|latency| Some(latency.max_ns as f64)));
    table
}

fn total_cells(total: &Total, seconds: f64) -> Vec<Cell> {
    let seconds = seconds.max(1e-9);
    let mut cells = vec![
        Cell::figure(total.queue_depth as f64, count),
        Cell::figure(total.reads.ios as f64 / seconds, rate),
        Cell::figure(total.writes.ios as f64 / seconds, rate),
        Cell::figure(total.both.ios as f64 / seconds, rate),
        Cell::figure(total.both.bytes as f64 / 1e6 / seconds, rate),
    ];
    cells.extend(latency_cells(total.both.latency(), false));
    cells
}

const TOTAL_HEADS: [&str; 5] = ["depth", "read IOPS", "write IOPS", "IOPS", "MB/s"];

pub(super) fn by_target(run: &Run, phase: &PhaseRecord) -> Table {
    let heads: Vec<&str> = ["target"].into_iter().chain(TOTAL_HEADS).chain(LATENCY_HEADS).collect();
    let mut table = Table::new("Each target", &heads);
    for (index, target) in run.targets.iter().enumerate() {
        let total = phase.total_where(|thread| thread.target as usize == index);
        if total.queue_depth > 0 {
            let cells = std::iter::once(Cell::text(&target.name)).chain(total_cells(&total, phase.window_s()));
            table.row(cells.collect());
        }
    }
    table
}

pub(super) fn thread_table(run: &Run, phase: &PhaseRecord) -> Table {
    let heads: Vec<&str> = ["thread", "target"].into_iter().chain(TOTAL_HEADS).chain(LATENCY_HEADS).collect();
    let mut table = Table::new("Each thread on each of its targets", &heads);
    for thread in &phase.threads {
        let total = Total::of([thread]);
        let target = run.targets.get(thread.target as usize).map_or("", |target| &target.name);
        let cells = [Cell::text(thread.thread.to_string()), Cell::text(target)];
        table.row(cells.into_iter().chain(total_cells(&total, phase.window_s())).collect());
    }
    let mut cells = vec![Cell::text("all"), Cell::text("")];
    cells.extend(total_cells(&phase.total(), phase.window_s()));
    table.total(cells);
    table
}

/// What the members of a space have done.
pub(super) fn member_table(phase: &PhaseRecord) -> Table {
    let title = phase.amplification().map_or_else(String::new, |amplification| {
        format!("The members of the space: {} requests to them per request of the load", ratio(amplification))
    });
    let heads = ["member", "class", "reads/s", "writes/s", "MB/s read", "MB/s written", "syncs/s"];
    let mut table = Table::new(title, &heads);
    let per_s = |count: u64| Cell::figure(count as f64 / phase.window_s().max(1e-9), rate);
    let mb_per_s = |bytes: u64| Cell::figure(bytes as f64 / 1e6 / phase.window_s().max(1e-9), rate);
    for member in &phase.members {
        table.row(vec![
            Cell::text(&member.name),
            Cell::text(&member.class),
            per_s(member.reads),
            per_s(member.writes),
            mb_per_s(member.read_bytes),
            mb_per_s(member.written_bytes),
            per_s(member.syncs),
        ]);
    }
    table
}

pub(super) fn cpu_table(run: &Run) -> Table {
    let mut table = Table::new(
        "CPU time per request. Generator: this process. Cycles: its CPU time times the frequency of the time-stamp counter. MHz per IOPS: CPU time of the whole machine per request, times that frequency, as in the VMFS paper",
        &["phase", "generator", "user", "system", "whole machine", "generator’s cycles", "machine’s MHz per IOPS"],
    );
    for phase in &run.phases {
        let ios = phase.total().both.ios.max(1) as f64;
        let per_io = |ns: u64| Cell::figure(ns as f64 / ios, time);
        let hz = phase.cpu.tsc_hz;
        let known = hz > 0.0;
        let cycles = phase.cpu_ns_per_io() * hz / 1e9;
        let machine = (!phase.cpu.cores.is_empty()).then(|| phase.machine_cpu_ns_per_io());
        table.row(vec![
            Cell::text(&phase.name),
            Cell::figure(phase.cpu_ns_per_io(), time),
            per_io(phase.cpu.process_user_ns),
            per_io(phase.cpu.process_system_ns),
            Cell::maybe(machine, time),
            Cell::maybe(known.then_some(cycles), count),
            Cell::maybe(phase.machine_mhz_per_iops(), |mhz| format!("{mhz:.4}")),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::example;
    use diskwright_load::record::CoreRecord;

    /// The machine uses ten times the generator's CPU time. Page and terminal must both show the
    /// machine's.
    #[test]
    fn mhz_per_iops_is_the_machines_in_the_page_and_on_a_terminal() {
        let mut run = example::run();
        run.phases.truncate(1);
        let phase = &mut run.phases[0];
        let ios = phase.total().both.ios;
        (phase.cpu.process_user_ns, phase.cpu.process_system_ns) = (1000 * ios, 0);
        phase.cpu.cores = vec![CoreRecord { user_ns: 10_000 * ios, ..CoreRecord::default() }];
        phase.cpu.tsc_hz = 2e9;
        let table = cpu_table(&run);
        assert_eq!(table.rows[0].cells[6].text, "0.0200");
        let options = diskwright_outline::TextOptions { width: 120, ..diskwright_outline::TextOptions::default() };
        let shown = super::super::text(&run, &options);
        assert!(shown.contains("10.0 µs") && shown.contains("0.0200"), "{shown}");
        run.phases[0].cpu.cores.clear();
        assert_eq!(cpu_table(&run).rows[0].cells[6].value, None);
    }
}
