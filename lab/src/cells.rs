//! What was measured, in one form for every kind of result: a *cell* is a subject under a load,
//! with the figures of each round.
//!
//! ```text
//!   Run, SweepRecord, studies, ComparisonRecord ──▶ Vec<Cell> ──▶ summary: medians, for `--json`
//!                                                          └─▶ rows: one a round, for CSV
//! ```
//!
//! A script that wants the IOPS of a run reads `summary[0].iops`, whatever was run.

use crate::{
    comparison::ComparisonRecord,
    document::Document,
    measure::WorkloadResult,
    result::ContainersResult,
    study::{
        access_paths::AccessPathsResult,
        queue_depth::QueueDepthResult,
        raw_and_file::RawAndFileResult,
        zero_payload::{Payload, ZeroPayloadResult},
    },
    sweep::{self, SweepRecord},
};
use diskwright_load::{Run, figures::Figures};
use diskwright_stats::summary::median;
use serde::Serialize;
use std::io;

/// A subject under a load.
#[derive(Debug, Clone, PartialEq)]
pub struct Cell {
    /// Which part of the experiment: a phase, a stage, an experiment of a study; empty where there
    /// is only one.
    pub part: String,
    /// The workload, as people name it.
    pub load: String,
    /// What was measured: a target, a container, a way to a disk.
    pub subject: String,
    /// Requests in flight at most, over all threads.
    pub in_flight: u64,
    /// The rounds in their order.
    pub rounds: Vec<Figures>,
    /// Figures that only this experiment has, one for each round.
    pub more: Vec<(&'static str, Vec<Option<f64>>)>,
}

/// A result that consists of cells.
pub trait Cells {
    /// All cells, in the order in which they are told.
    fn cells(&self) -> Vec<Cell>;
}

/// What people read off a screen: the medians of the rounds of a cell.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CellSummary {
    /// See [`Cell::part`]; left out where it is empty.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub part: String,
    /// See [`Cell::load`].
    pub load: String,
    /// See [`Cell::subject`].
    pub subject: String,
    /// Requests in flight at most.
    pub in_flight: u64,
    /// How many rounds the medians are of.
    pub rounds: usize,
    /// Requests a second.
    pub iops: f64,
    /// Millions of bytes (10^6) a second.
    pub mb_per_s: f64,
    /// Mean latency.
    pub mean_ns: f64,
    /// Median latency.
    pub p50_ns: f64,
    /// 99th percentile of the latency.
    pub p99_ns: f64,
    /// 99.9th percentile of the latency.
    pub p999_ns: f64,
    /// The longest latency of all rounds.
    pub max_ns: f64,
    /// CPU time of the generator for each request.
    pub cpu_ns_per_io: f64,
    /// Requests that failed, in all rounds.
    pub errors: u64,
}

impl Cell {
    fn new(part: &str, load: String, subject: &str, rounds: &[Figures]) -> Self {
        let in_flight = rounds.first().map_or(0, |round| round.queue_depth);
        Self { part: part.into(), load, subject: subject.into(), in_flight, rounds: rounds.to_vec(), more: Vec::new() }
    }

    /// The medians; `None` before the first round.
    pub fn summary(&self) -> Option<CellSummary> {
        let of = |figure: fn(&Figures) -> f64| median(&self.rounds.iter().map(figure).collect::<Vec<_>>());
        Some(CellSummary {
            part: self.part.clone(),
            load: self.load.clone(),
            subject: self.subject.clone(),
            in_flight: self.in_flight,
            rounds: self.rounds.len(),
            iops: of(|round| round.iops)?,
            mb_per_s: of(|round| round.mb_per_s)?,
            mean_ns: of(|round| round.mean_ns)?,
            p50_ns: of(|round| round.p50_ns)?,
            p99_ns: of(|round| round.p99_ns)?,
            p999_ns: of(|round| round.p999_ns)?,
            max_ns: self.rounds.iter().map(|round| round.max_ns).fold(0.0, f64::max),
            cpu_ns_per_io: of(|round| round.cpu_ns_per_io)?,
            errors: self.rounds.iter().map(|round| round.errors).sum(),
        })
    }
}

/// A result with its summary, as `--json` prints it.
#[derive(Debug, Serialize)]
pub struct WithSummary<'a, T: Serialize> {
    #[serde(flatten)]
    result: &'a T,
    summary: Vec<CellSummary>,
}

impl<'a, T: Serialize + Cells> WithSummary<'a, T> {
    /// Beside a result that is printed.
    pub fn of(result: &'a T) -> Self {
        Self { result, summary: result.cells().iter().filter_map(Cell::summary).collect() }
    }
}

/// One CSV record for each round of each cell, behind the result's name and time.
pub(crate) fn rows(csv: &mut diskwright_outline::Csv, name: &str, started_utc: &str, cells: &[Cell]) -> io::Result<()> {
    for cell in cells {
        for (number, round) in cell.rounds.iter().enumerate() {
            let text = |value: f64| value.to_string();
            let mut record = vec![
                ("result", name.to_owned()),
                ("started_utc", started_utc.to_owned()),
                ("part", cell.part.clone()),
                ("load", cell.load.clone()),
                ("subject", cell.subject.clone()),
                ("in_flight", cell.in_flight.to_string()),
                ("round", (number + 1).to_string()),
                ("window_s", text(round.window_ns as f64 / 1e9)),
                ("reads", round.reads.to_string()),
                ("writes", round.writes.to_string()),
                ("errors", round.errors.to_string()),
                ("iops", text(round.iops)),
                ("mb_per_s", text(round.mb_per_s)),
                ("mean_ns", text(round.mean_ns)),
                ("p50_ns", text(round.p50_ns)),
                ("p99_ns", text(round.p99_ns)),
                ("p99.9_ns", text(round.p999_ns)),
                ("max_ns", text(round.max_ns)),
                ("cpu_ns_per_io", text(round.cpu_ns_per_io)),
                ("machine_cpu_ns_per_io", text(round.machine_cpu_ns_per_io)),
                ("depth_reached", text(round.depth_reached)),
            ];
            record.extend(
                cell.more.iter().map(|(head, values)| {
                    (*head, values.get(number).copied().flatten().map_or_else(String::new, text))
                }),
            );
            csv.record(&record)?;
        }
    }
    Ok(())
}

impl Cells for Run {
    fn cells(&self) -> Vec<Cell> {
        let targets: Vec<&str> = self.targets.iter().map(|target| target.name.as_str()).collect();
        let subject = targets.join(", ");
        let of = |phase: &diskwright_load::record::PhaseRecord| {
            let planned = self.job.phases.iter().find(|planned| planned.name == phase.name);
            let loads: Vec<String> =
                planned.iter().flat_map(|planned| &planned.loads).map(|load| load.title()).collect();
            let load = if loads.is_empty() { self.job.name.clone() } else { loads.join(" beside ") };
            Cell::new(&phase.name, load, &subject, &[Figures::of(phase)])
        };
        self.phases.iter().map(of).collect()
    }
}

impl Cells for SweepRecord {
    fn cells(&self) -> Vec<Cell> {
        of_sweep("", self)
    }
}

fn of_sweep(part: &str, record: &SweepRecord) -> Vec<Cell> {
    let targets: Vec<&str> = record.targets.iter().map(|target| target.name.as_str()).collect();
    let of = |cell: &sweep::SweepCell| Cell {
        in_flight: cell.total_depth,
        ..Cell::new(part, sweep::title(&cell.point), &targets.join(", "), &cell.rounds)
    };
    record.cells.iter().map(of).collect()
}

fn of_workload<'a>(part: &'a str, result: &'a WorkloadResult) -> impl Iterator<Item = Cell> + 'a {
    let workload = &result.workload;
    result.cells.iter().map(move |cell| Cell {
        in_flight: u64::from(workload.queue_depth),
        ..Cell::new(part, format!("{} at QD {}", workload.name, workload.queue_depth), &cell.target, &cell.rounds)
    })
}

impl Cells for ContainersResult {
    fn cells(&self) -> Vec<Cell> {
        let main = self.workloads.iter().flat_map(|compared| of_workload("containers", &compared.result));
        let chain = self.chain.iter().flat_map(|chain| &chain.reads).flat_map(|result| of_workload("chain", result));
        let expanding = self.expanding.iter().flat_map(|record| of_workload("expanding", &record.result));
        let sizes = self.block_sizes.iter().flat_map(|record| &record.workloads);
        main.chain(chain).chain(expanding).chain(sizes.flat_map(|result| of_workload("block size", result))).collect()
    }
}

impl Cells for QueueDepthResult {
    fn cells(&self) -> Vec<Cell> {
        let pre_test = self.pre_test.iter().flat_map(Run::cells).map(|cell| Cell { part: "pre-test".into(), ..cell });
        let stages = self.stages.iter().flat_map(|record| of_sweep(record.stage.name(), &record.sweep));
        pre_test.chain(stages).collect()
    }
}

impl Cells for RawAndFileResult {
    fn cells(&self) -> Vec<Cell> {
        let of = |workload: &crate::study::raw_and_file::WorkloadRecord| -> Vec<Cell> {
            let sides = workload.sides.iter().zip(&self.subjects);
            let load = format!("{} at QD {}", workload.name(), workload.queue_depth);
            sides.map(|(side, subject)| Cell::new("", load.clone(), &subject.name, &side.rounds)).collect()
        };
        self.workloads.iter().flat_map(of).collect()
    }
}

impl Cells for ZeroPayloadResult {
    fn cells(&self) -> Vec<Cell> {
        let of = |test: &crate::study::zero_payload::TestRecord| {
            let part = if test.payload == Payload::Zeros { "zeros" } else { "data" };
            [("dynamic", &test.dynamic), ("fixed", &test.fixed)].map(|(subject, side)| Cell {
                more: vec![("not_stored_share", side.not_stored_each.iter().copied().map(Some).collect())],
                ..Cell::new(part, test.name.clone(), subject, &side.rounds)
            })
        };
        self.tests.iter().flat_map(of).collect()
    }
}

impl Cells for AccessPathsResult {
    fn cells(&self) -> Vec<Cell> {
        let of = |load: &crate::study::access_paths::LoadRecord| -> Vec<Cell> {
            let title = format!("{} load, {} clients with {} outstanding", load.name, load.clients, load.outstanding);
            let of_way = |cell: &crate::study::access_paths::CellRecord| {
                let rounds: Vec<Figures> = cell.rounds.iter().map(|round| round.figures).collect();
                Cell {
                    more: vec![("server_cpu_ns_per_io", cell.rounds.iter().map(|round| round.server_cpu_ns).collect())],
                    ..Cell::new("", title.clone(), cell.way.name(), &rounds)
                }
            };
            load.cells.iter().map(of_way).collect()
        };
        self.loads.iter().flat_map(of).collect()
    }
}

impl Cells for ComparisonRecord {
    fn cells(&self) -> Vec<Cell> {
        let of = |side: &crate::comparison::Side| -> Vec<Cell> {
            side.groups
                .iter()
                .map(|group| Cell::new(&group.name, group.workload.clone(), &side.name, &group.rounds))
                .collect()
        };
        self.sides.iter().flat_map(of).collect()
    }
}

impl Cells for Document {
    fn cells(&self) -> Vec<Cell> {
        match self {
            Self::Run(run) => run.cells(),
            Self::Sweep(record) => record.cells(),
            Self::Containers(result) => result.cells(),
            Self::QueueDepth(result) => result.cells(),
            Self::RawAndFile(result) => result.cells(),
            Self::ZeroPayload(result) => result.cells(),
            Self::Comparison(record) => record.cells(),
            Self::AccessPaths(result) => result.cells(),
            // Its checks are figures of many units, not cells.
            Self::Acceptance(_) => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::example;

    #[test]
    fn every_kind_of_result_has_cells_with_rounds() {
        for (name, document) in example::all() {
            let cells = document.cells();
            assert_eq!(cells.is_empty(), matches!(document, Document::Acceptance(_)), "{name}");
            for cell in cells.iter().filter(|cell| !cell.rounds.is_empty()) {
                let summary = cell.summary().unwrap();
                assert!(summary.iops > 0.0 && !cell.subject.is_empty() && !cell.load.is_empty(), "{name}: {cell:?}");
                assert!(cell.more.iter().all(|(_, values)| values.len() == cell.rounds.len()), "{name}: {cell:?}");
            }
        }
    }

    #[test]
    fn the_summary_of_a_run_has_what_the_screen_shows() {
        let run = example::run();
        let json = serde_json::to_value(WithSummary::of(&run)).unwrap();
        assert_eq!(json["schema"], run.schema);
        let summary = json["summary"].as_array().unwrap();
        assert_eq!(summary.len(), run.phases.len());
        assert_eq!(summary[0]["part"], run.phases[0].name);
        assert_eq!(summary[0]["iops"].as_f64().unwrap(), run.phases[0].iops());
        let back: Run = serde_json::from_value(json).unwrap();
        assert_eq!(back, run, "the summary is ignored by who reads the result");
    }
}
