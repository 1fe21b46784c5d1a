//! Runs as CSV: figures by thread and direction, time series, histograms.

use diskwright_load::record::{DirectionRecord, LatencyRecord, PhaseRecord, Run, Total};
use diskwright_outline::Csv;
use std::io;

const FIGURES: [&str; 32] = [
    "result",
    "started_utc",
    "phase",
    "scope",
    "load",
    "thread",
    "target",
    "target_kind",
    "direction",
    "queue_depth",
    "window_s",
    "ios",
    "bytes",
    "errors",
    "overdue",
    "iops",
    "mb_per_s",
    "latency_kind",
    "mean_ns",
    "std_dev_ns",
    "min_ns",
    "p50_ns",
    "p90_ns",
    "p99_ns",
    "p99.9_ns",
    "p99.99_ns",
    "p99.999_ns",
    "p99.9999_ns",
    "p99.99999_ns",
    "p99.999999_ns",
    "max_ns",
    "cpu_ns_per_io",
];

const SERIES: [&str; 13] = [
    "result",
    "phase",
    "start_s",
    "interval_s",
    "part",
    "read_iops",
    "read_mb_per_s",
    "write_iops",
    "write_mb_per_s",
    "mean_ns",
    "p50_ns",
    "p99_ns",
    "max_ns",
];

const LATENCIES: [&str; 7] = ["result", "phase", "direction", "latency_kind", "up_to_ns", "requests", "share_up_to"];

pub(super) fn figures(csv: &mut Csv, name: &str, run: &Run) -> io::Result<()> {
    for phase in &run.phases {
        let lead = |scope: &str| [name, &run.head.started_utc, &phase.name, scope].map(str::to_owned).to_vec();
        for thread in &phase.threads {
            let target = run.targets.get(thread.target as usize);
            let directions = [("read", &thread.reads), ("write", &thread.writes), ("flush", &thread.flushes)];
            for (word, direction) in directions.into_iter().filter(is_written) {
                let mut row = lead("thread");
                row.extend([
                    thread.load.to_string(),
                    thread.thread.to_string(),
                    target.map_or_else(String::new, |target| target.name.clone()),
                    target.map_or_else(String::new, |target| target.kind.clone()),
                    word.to_owned(),
                    thread.queue_depth.to_string(),
                ]);
                let overdue = if word == "flush" { String::new() } else { thread.overdue.to_string() };
                direction_row(&mut row, phase, direction, overdue);
                row.push(String::new());
                put(csv, &FIGURES, row)?;
            }
        }
        let total = phase.total();
        let Total { reads, writes, both, flushes, queue_depth, .. } = &total;
        let directions = [("read", reads), ("write", writes), ("both", both), ("flush", flushes)];
        for (word, direction) in directions.into_iter().filter(is_written) {
            let mut row = lead("phase");
            row.extend(["", "", "", "", word].map(str::to_owned));
            row.push(queue_depth.to_string());
            let overdue = if word == "both" { total.overdue.to_string() } else { String::new() };
            direction_row(&mut row, phase, direction, overdue);
            row.push(if word == "both" { phase.cpu_ns_per_io().to_string() } else { String::new() });
            put(csv, &FIGURES, row)?;
        }
    }
    Ok(())
}

fn put(csv: &mut Csv, heads: &[&'static str], row: Vec<String>) -> io::Result<()> {
    csv.record(&heads.iter().copied().zip(row).collect::<Vec<_>>())
}

/// Whether the row is written: flushes only if there were any.
fn is_written((word, direction): &(&str, &DirectionRecord)) -> bool {
    *word != "flush" || direction.ios + direction.errors > 0
}

fn direction_row(row: &mut Vec<String>, phase: &PhaseRecord, direction: &DirectionRecord, overdue: String) {
    let seconds = phase.window_s().max(1e-9);
    let latency = direction.latency();
    row.extend([
        phase.window_s().to_string(),
        direction.ios.to_string(),
        direction.bytes.to_string(),
        direction.errors.to_string(),
        overdue,
        (direction.ios as f64 / seconds).to_string(),
        (direction.bytes as f64 / 1e6 / seconds).to_string(),
        if direction.response.is_some() { "response".into() } else { "service".into() },
    ]);
    let any = latency.count > 0;
    let when = |known: bool, value: String| if known { value } else { String::new() };
    row.extend([
        when(any, latency.mean_ns().to_string()),
        when(any, latency.std_dev_ns().to_string()),
        when(any, latency.min_ns.to_string()),
    ]);
    row.extend(quantiles(latency));
    row.push(when(any, latency.max_ns.to_string()));
}

/// p50, p90, then one percentile per nine; empty if fewer than ten requests are slower.
fn quantiles(latency: &LatencyRecord) -> impl Iterator<Item = String> {
    let nines = latency.nines();
    let at = move |share: f64, known: bool| {
        latency.quantile_ns(share).filter(|_| known).map_or_else(String::new, |ns| ns.to_string())
    };
    [at(0.5, latency.count >= 20)]
        .into_iter()
        .chain((1..=8).map(move |nine| at(1.0 - 10_f64.powi(-(nine as i32)), nine <= nines)))
}

pub(super) fn series(csv: &mut Csv, name: &str, run: &Run) -> io::Result<()> {
    for phase in &run.phases {
        let end = phase.window_start_ns.saturating_add(phase.window_ns);
        for point in &phase.series {
            let length_ns = if point.len_ns > 0 { point.len_ns } else { phase.interval_ns };
            let interval_s = (length_ns as f64 / 1e9).max(1e-9);
            let part = match point.start_ns {
                start if start < phase.window_start_ns => "warm-up",
                start if start < end => "measured",
                _ => "cool-down",
            };
            let row = vec![
                name.to_owned(),
                phase.name.clone(),
                (point.start_ns as f64 / 1e9).to_string(),
                interval_s.to_string(),
                part.to_owned(),
                (point.read_ios as f64 / interval_s).to_string(),
                (point.read_bytes as f64 / 1e6 / interval_s).to_string(),
                (point.write_ios as f64 / interval_s).to_string(),
                (point.write_bytes as f64 / 1e6 / interval_s).to_string(),
                point.mean_ns.to_string(),
                point.p50_ns.to_string(),
                point.p99_ns.to_string(),
                point.max_ns.to_string(),
            ];
            put(csv, &SERIES, row)?;
        }
    }
    Ok(())
}

pub(super) fn latencies(csv: &mut Csv, name: &str, run: &Run) -> io::Result<()> {
    for phase in &run.phases {
        let total = phase.total();
        for (word, direction) in [("read", &total.reads), ("write", &total.writes), ("flush", &total.flushes)] {
            let kinds = [("service", Some(&direction.service)), ("response", direction.response.as_ref())];
            for (kind, latency) in kinds.into_iter().filter_map(|(kind, latency)| Some((kind, latency?))) {
                let mut seen = 0;
                for (up_to, count) in &latency.buckets {
                    seen += count;
                    let share = seen as f64 / latency.count.max(1) as f64;
                    let row = vec![
                        name.to_owned(),
                        phase.name.clone(),
                        word.to_owned(),
                        kind.to_owned(),
                        up_to.to_string(),
                        count.to_string(),
                        share.to_string(),
                    ];
                    put(csv, &LATENCIES, row)?;
                }
            }
        }
    }
    Ok(())
}
