//! CSV of what is no run: sweeps, studies, comparisons, the bench. Each kind has its own columns; a
//! row is one round of one workload on one thing (or one comparison, or one check), so that whoever
//! reads it can reckon anew.

mod access_paths;
mod containers;

use super::csv::{Rows, put, put_all};
use crate::{
    Result,
    bench::{Bar, BenchReport},
    contest::ContestRecord,
    document::Document,
    figures::Figures,
    stats::Summary,
    study::{
        queue_depth::{QueueDepthResult, Stage},
        raw_and_file::RawAndFileResult,
        zero_payload::{Payload, ZeroPayloadResult},
    },
    sweep::SweepRecord,
};

/// The rows of a result that is no run, with the heads of its columns before the first result.
pub(super) fn figures(rows: &mut Rows, name: &str, document: &Document, head: bool) -> Result<()> {
    match document {
        Document::Containers(result) => containers::rows(rows, name, result, head),
        Document::QueueDepth(result) => queue_depth(rows, name, result, head),
        Document::RawAndFile(result) => raw_and_file(rows, name, result, head),
        Document::ZeroPayload(result) => zero_payload(rows, name, result, head),
        Document::AccessPaths(result) => access_paths::rows(rows, name, result, head),
        Document::Contest(record) => contest(rows, name, record, head),
        Document::Bench(report) => bench(rows, name, report, head),
        Document::Sweep(record) => sweep(rows, name, record, head),
        // It has tables of its own.
        Document::Run(_) => Ok(()),
    }
}

/// Columns that every round has.
const OF_ROUND: [&str; 14] = [
    "round",
    "window_s",
    "reads",
    "writes",
    "errors",
    "iops",
    "mb_per_s",
    "mean_ns",
    "p50_ns",
    "p99_ns",
    "p99.9_ns",
    "max_ns",
    "cpu_ns_per_io",
    "machine_cpu_ns_per_io",
];

fn of_round(round: usize, figures: &Figures) -> [String; 14] {
    [
        (round + 1).to_string(),
        (figures.window_ns as f64 / 1e9).to_string(),
        figures.reads.to_string(),
        figures.writes.to_string(),
        figures.errors.to_string(),
        figures.iops.to_string(),
        figures.mb_per_s.to_string(),
        figures.mean_ns.to_string(),
        figures.p50_ns.to_string(),
        figures.p99_ns.to_string(),
        figures.p999_ns.to_string(),
        figures.max_ns.to_string(),
        figures.cpu_ns_per_io.to_string(),
        figures.machine_cpu_ns_per_io.to_string(),
    ]
}

fn sweep(rows: &mut Rows, name: &str, record: &SweepRecord, head: bool) -> Result<()> {
    if head {
        let heads = ["result", "started_utc", "threads", "queue_depth", "files", "in_flight", "varied"];
        put(rows, heads.into_iter().chain(OF_ROUND).chain(["depth_reached"]))?;
    }
    for cell in &record.cells {
        let varied: Vec<String> =
            cell.point.iter().map(|at| format!("{}={}", at.knob.name(), at.knob.show(at.value))).collect();
        for (round, figures) in cell.rounds.iter().enumerate() {
            let mut row = vec![
                name.to_owned(),
                record.started_utc.clone(),
                cell.threads.to_string(),
                cell.queue_depth.to_string(),
                cell.files.to_string(),
                cell.total_depth.to_string(),
                varied.join(" "),
            ];
            row.extend(of_round(round, figures));
            row.push(figures.depth_reached.to_string());
            put_all(rows, &row)?;
        }
    }
    Ok(())
}

fn stage_word(stage: Stage) -> &'static str {
    match stage {
        Stage::Files => "files",
        Stage::Depths => "depths",
        Stage::Combinations => "combinations",
        Stage::Reads => "reads",
        Stage::Writes => "writes",
    }
}

fn queue_depth(rows: &mut Rows, name: &str, result: &QueueDepthResult, head: bool) -> Result<()> {
    if head {
        let heads = ["result", "started_utc", "stage", "files", "threads", "queue_depth", "in_flight"];
        put(rows, heads.into_iter().chain(OF_ROUND).chain(["depth_reached", "depth_per_device", "iops_per_device"]))?;
    }
    for record in &result.stages {
        for cell in &record.sweep.cells {
            for (round, figures) in cell.rounds.iter().enumerate() {
                let mut row = vec![
                    name.to_owned(),
                    result.started_utc.clone(),
                    stage_word(record.stage).to_owned(),
                    cell.files.to_string(),
                    cell.threads.to_string(),
                    cell.queue_depth.to_string(),
                    cell.total_depth.to_string(),
                ];
                row.extend(of_round(round, figures));
                let array =
                    record.sweep.options.array.map(|array| {
                        array.figures(figures.read_share(), cell.total_depth, figures.iops, figures.mb_per_s)
                    });
                row.push(figures.depth_reached.to_string());
                row.push(array.map_or_else(String::new, |array| array.depth_per_device.to_string()));
                row.push(array.map_or_else(String::new, |array| array.iops_per_device.to_string()));
                put_all(rows, &row)?;
            }
        }
    }
    Ok(())
}

fn raw_and_file(rows: &mut Rows, name: &str, result: &RawAndFileResult, head: bool) -> Result<()> {
    if head {
        let heads = ["result", "started_utc", "workload", "block_bytes", "queue_depth", "on"];
        put(rows, heads.into_iter().chain(OF_ROUND))?;
    }
    for workload in &result.workloads {
        for (side, subject) in workload.sides.iter().zip(&result.subjects) {
            for (round, figures) in side.rounds.iter().enumerate() {
                let mut row = vec![
                    name.to_owned(),
                    result.started_utc.clone(),
                    workload.name(),
                    workload.block_bytes.to_string(),
                    workload.queue_depth.to_string(),
                    subject.name.clone(),
                ];
                row.extend(of_round(round, figures));
                put_all(rows, &row)?;
            }
        }
    }
    Ok(())
}

fn zero_payload(rows: &mut Rows, name: &str, result: &ZeroPayloadResult, head: bool) -> Result<()> {
    if head {
        let heads = [
            "result",
            "started_utc",
            "test",
            "payload",
            "disk",
            "rounds",
            "iops_median",
            "iops_min",
            "iops_max",
            "mb_per_s_median",
            "mean_ns_median",
            "p99_ns_median",
            "never_reached_median",
        ];
        put(rows, heads)?;
    }
    for test in &result.tests {
        for (disk, side) in [("dynamic", &test.dynamic), ("fixed", &test.fixed)] {
            let Summary { rounds, median, min, max, .. } = side.iops;
            let row = [
                name.to_owned(),
                result.started_utc.clone(),
                test.name.clone(),
                if test.payload == Payload::Zeros { "zeros".into() } else { "data".into() },
                disk.to_owned(),
                rounds.to_string(),
                median.to_string(),
                min.to_string(),
                max.to_string(),
                side.mb_per_s.median.to_string(),
                side.latency_mean_ns.median.to_string(),
                side.latency_p99_ns.median.to_string(),
                side.never_reached.median.to_string(),
            ];
            put_all(rows, &row)?;
        }
    }
    Ok(())
}

fn contest(rows: &mut Rows, name: &str, record: &ContestRecord, head: bool) -> Result<()> {
    if head {
        let heads = [
            "result",
            "scope",
            "base",
            "side",
            "measurement",
            "figure",
            "base_median",
            "side_median",
            "change",
            "change_low",
            "change_high",
            "confidence",
            "p",
            "p_corrected",
            "said",
            "base_rounds",
            "side_rounds",
        ];
        put(rows, heads)?;
    }
    let side_name = |index: usize| record.sides.get(index).map_or_else(String::new, |side| side.name.clone());
    for (scope, comparisons) in [("overall", &record.overall), ("measurement", &record.comparisons)] {
        for comparison in comparisons {
            let change = &comparison.change;
            // There are no IOPS of all measurements together.
            let known = |value: f64| if scope == "overall" { String::new() } else { value.to_string() };
            let row = [
                name.to_owned(),
                scope.to_owned(),
                side_name(0),
                side_name(comparison.side),
                comparison.group.clone(),
                comparison.metric.name().to_owned(),
                known(comparison.base),
                known(comparison.ours),
                change.estimate.to_string(),
                change.interval.low.to_string(),
                change.interval.high.to_string(),
                change.confidence.to_string(),
                comparison.p.to_string(),
                comparison.p_corrected.to_string(),
                format!("{:?}", comparison.said),
                comparison.rounds.0.to_string(),
                comparison.rounds.1.to_string(),
            ];
            put_all(rows, &row)?;
        }
    }
    Ok(())
}

fn bench(rows: &mut Rows, name: &str, report: &BenchReport, head: bool) -> Result<()> {
    if head {
        let heads = [
            "result",
            "started_utc",
            "promise",
            "check",
            "outcome",
            "unit",
            "rounds",
            "median",
            "min",
            "max",
            "at_least",
            "at_most",
            "sides_unit",
            "ours_median",
            "peer_median",
            "why",
        ];
        put(rows, heads)?;
    }
    for row in &report.rows {
        for check in &row.checks {
            let figure = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
            let (at_least, at_most) = match check.bar {
                Some(Bar::AtLeast(value)) => (Some(value), None),
                Some(Bar::AtMost(value)) => (None, Some(value)),
                None => (None, None),
            };
            let record = [
                name.to_owned(),
                report.started_utc.clone(),
                row.row.name().to_owned(),
                check.name.clone(),
                format!("{:?}", check.outcome).to_lowercase(),
                check.unit.clone(),
                check.figure.map_or_else(String::new, |figure| figure.rounds.to_string()),
                figure(check.figure.map(|figure| figure.median)),
                figure(check.figure.map(|figure| figure.min)),
                figure(check.figure.map(|figure| figure.max)),
                figure(at_least),
                figure(at_most),
                check.sides_unit.clone(),
                figure(check.ours.map(|side| side.median)),
                figure(check.peer.map(|side| side.median)),
                check.why.clone().unwrap_or_default(),
            ];
            put_all(rows, &record)?;
        }
    }
    Ok(())
}
