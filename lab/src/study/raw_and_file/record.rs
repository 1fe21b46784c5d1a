//! What the study found: the form that is saved, printed and drawn.

use super::{Overall, Pattern, TestBedRecord};
use crate::{
    cells::{Cell, Cells},
    measure::Ratio,
};
use diskwright_load::{
    figures::Figures,
    job::Bytes,
    machine::{Machine, Place, Versions},
    record::{End, TargetRecord},
    warning::Warning,
};
use diskwright_stats::summary::Summary;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// The study, whole or as far as it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RawAndFileResult {
    /// [`SCHEMA`](super::SCHEMA).
    pub schema: String,
    /// The conclusion.
    pub verdict: String,
    /// When it began.
    pub started_utc: String,
    /// How long it took, nanoseconds.
    pub took_ns: u64,
    /// On what.
    pub machine: Machine,
    /// Where the scratch folder lay.
    pub place: Place,
    /// By which programs.
    pub versions: Versions,
    /// Whether it was the short form.
    pub quick: bool,
    /// Size of each disk.
    pub size_bytes: u64,
    /// Rounds.
    pub rounds: usize,
    /// The device and its halves.
    pub test_bed: TestBedRecord,
    /// What was compared, as it was found before measuring; the device is the first.
    pub subjects: Vec<TargetRecord>,
    /// Cycles of the time-stamp counter in a second, by which CPU time becomes MHz; 0 where there
    /// is none.
    pub tsc_hz: f64,
    /// Processors kept busy while the study did nothing.
    pub idle_cpus: f64,
    /// The workloads that were measured.
    pub workloads: Vec<WorkloadRecord>,
    /// All workloads together, against the device.
    pub overall: Vec<Overall>,
    /// Reasons for doubt.
    pub warnings: Vec<Warning>,
    /// How it ended.
    pub end: End,
}

/// One workload on everything.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkloadRecord {
    /// Where requests go.
    pub pattern: Pattern,
    /// Bytes of a request.
    pub block_bytes: u64,
    /// Requests in flight.
    pub queue_depth: u32,
    /// Length of the measured window, nanoseconds.
    pub window_ns: u64,
    /// In the order of the subjects.
    pub sides: Vec<SideRecord>,
}

impl WorkloadRecord {
    /// "4K random read".
    pub fn name(&self) -> String {
        format!("{} {}", Bytes(self.block_bytes), self.pattern.name())
    }
}

/// One workload on one thing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SideRecord {
    /// Requests a second.
    pub iops: Summary,
    /// Millions of bytes a second.
    pub mb_per_s: Summary,
    /// Mean latency, nanoseconds.
    pub latency_mean_ns: Summary,
    /// 99th percentile, nanoseconds.
    pub latency_p99_ns: Summary,
    /// CPU time of the generator for each request, nanoseconds.
    pub cpu_ns_per_io: Summary,
    /// CPU time of the whole machine for each request, nanoseconds.
    pub machine_cpu_ns_per_io: Summary,
    /// Throughput as a ratio to the device's in the same round; none for the device.
    pub throughput_ratio: Option<Ratio>,
    /// CPU time of the generator for each request, the same.
    pub cpu_ratio: Option<Ratio>,
    /// CPU time of the whole machine for each request, the same.
    pub machine_cpu_ratio: Option<Ratio>,
    /// Every round as it was measured.
    pub rounds: Vec<Figures>,
}

/// Sums up the rounds, the first being the base.
pub(crate) fn sides(rounds: Vec<Vec<Figures>>) -> Vec<SideRecord> {
    let base = rounds.first().cloned().unwrap_or_default();
    let side = |(index, rounds): (usize, Vec<Figures>)| {
        let of = |figure: fn(&Figures) -> f64| rounds.iter().map(figure).collect::<Vec<_>>();
        let summary = |figure: fn(&Figures) -> f64| Summary::of(&of(figure)).unwrap_or_default();
        let ratio = |figure: fn(&Figures) -> f64| {
            let base: Vec<f64> = base.iter().map(figure).collect();
            (index > 0).then(|| Ratio::of(&of(figure), &base)).flatten()
        };
        SideRecord {
            iops: summary(|round| round.iops),
            mb_per_s: summary(|round| round.mb_per_s),
            latency_mean_ns: summary(|round| round.mean_ns),
            latency_p99_ns: summary(|round| round.p99_ns),
            cpu_ns_per_io: summary(|round| round.cpu_ns_per_io),
            machine_cpu_ns_per_io: summary(|round| round.machine_cpu_ns_per_io),
            throughput_ratio: ratio(|round| round.iops),
            cpu_ratio: ratio(|round| round.cpu_ns_per_io),
            machine_cpu_ratio: ratio(|round| round.machine_cpu_ns_per_io),
            rounds,
        }
    };
    rounds.into_iter().enumerate().map(side).collect()
}

impl Cells for RawAndFileResult {
    fn cells(&self) -> Cow<'_, [Cell]> {
        let of = |workload: &WorkloadRecord| -> Vec<Cell> {
            let sides = workload.sides.iter().zip(&self.subjects);
            let cell = |(side, subject): (&SideRecord, &TargetRecord)| {
                Cell::new("", &workload.name(), &subject.name, workload.queue_depth.into())
                    .with_rounds(side.rounds.clone())
            };
            sides.map(cell).collect()
        };
        self.workloads.iter().flat_map(of).collect()
    }
}
