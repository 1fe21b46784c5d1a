//! Progress of a run, and a way to stop it.
//!
//! The conductor sends at most four snapshots per second. It runs in a thread that measures
//! nothing, so a watcher may take its time without an effect on latencies.

use crate::{record::IntervalRecord, steady::SteadyProgress};
use serde::{Deserialize, Serialize};

/// The part of a phase that is running.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Warm-up; not measured.
    WarmUp,
    /// Waiting for the steady state; not measured.
    Settling,
    /// The measured window.
    Measuring,
    /// Cool-down; not measured.
    CoolDown,
}

/// Progress of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Snapshot<'a> {
    /// Name of the phase.
    pub phase: &'a str,
    /// Number of the phase, from 0.
    pub phase_index: usize,
    /// Number of phases of the job.
    pub phases: usize,
    /// The part of the phase that is running.
    pub stage: Stage,
    /// Time since the start of the phase, nanoseconds.
    pub elapsed_ns: u64,
    /// Time to the end of the run, nanoseconds; `None` where a phase ends by a count.
    pub remaining_ns: Option<u64>,
    /// Share of the run that is done, from 0 to 1; `None` where it is not known.
    pub done: Option<f64>,
    /// Requests per second, over about the last second.
    pub iops: f64,
    /// Megabytes (10^6 bytes) per second, over about the last second.
    pub mb_per_s: f64,
    /// Median latency over about the last second, nanoseconds; 0 without requests.
    pub p50_ns: u64,
    /// 99th percentile of the latency over about the last second, nanoseconds.
    pub p99_ns: u64,
    /// Mean number of processors that the generator used since the last snapshot.
    pub cpus: f64,
    /// Number of requests that have failed.
    pub errors: u64,
    /// Progress towards the steady state; `None` when the phase does not wait for it.
    pub steady: Option<SteadyProgress>,
}

/// A [`Snapshot`] for another process: without the name of its phase.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRecord {
    stage: Stage,
    phase_index: usize,
    phases: usize,
    elapsed_ns: u64,
    remaining_ns: Option<u64>,
    done: Option<f64>,
    iops: f64,
    mb_per_s: f64,
    p50_ns: u64,
    p99_ns: u64,
    cpus: f64,
    errors: u64,
    steady: Option<SteadyProgress>,
}

impl SnapshotRecord {
    /// The record of a snapshot.
    pub fn of(snapshot: &Snapshot<'_>) -> Self {
        Self {
            stage: snapshot.stage,
            phase_index: snapshot.phase_index,
            phases: snapshot.phases,
            elapsed_ns: snapshot.elapsed_ns,
            remaining_ns: snapshot.remaining_ns,
            done: snapshot.done,
            iops: snapshot.iops,
            mb_per_s: snapshot.mb_per_s,
            p50_ns: snapshot.p50_ns,
            p99_ns: snapshot.p99_ns,
            cpus: snapshot.cpus,
            errors: snapshot.errors,
            steady: snapshot.steady,
        }
    }

    /// The snapshot, of a phase with this name.
    pub fn as_snapshot<'a>(&self, phase: &'a str) -> Snapshot<'a> {
        Snapshot {
            phase,
            phase_index: self.phase_index,
            phases: self.phases,
            stage: self.stage,
            elapsed_ns: self.elapsed_ns,
            remaining_ns: self.remaining_ns,
            done: self.done,
            iops: self.iops,
            mb_per_s: self.mb_per_s,
            p50_ns: self.p50_ns,
            p99_ns: self.p99_ns,
            cpus: self.cpus,
            errors: self.errors,
            steady: self.steady,
        }
    }
}

/// Receives the progress of a run.
pub trait Watch: Sync {
    /// Receives a snapshot. Returning `false` stops the run, which ends as
    /// [`End::Stopped`](crate::record::End::Stopped) and keeps what was measured.
    fn update(&self, snapshot: &Snapshot<'_>) -> bool;

    /// Receives an interval of the series with its latencies when all threads have passed it. Only
    /// if [`Watch::wants_intervals`].
    fn interval(&self, _interval: IntervalRecord) {}

    /// Whether [`Watch::interval`] is called.
    fn wants_intervals(&self) -> bool {
        false
    }
}

/// A watcher that ignores all snapshots.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unwatched;

impl Watch for Unwatched {
    fn update(&self, _snapshot: &Snapshot<'_>) -> bool {
        true
    }
}

impl<F: Fn(&Snapshot<'_>) -> bool + Sync> Watch for F {
    fn update(&self, snapshot: &Snapshot<'_>) -> bool {
        self(snapshot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_the_same_in_another_process() {
        let snapshot = Snapshot {
            phase: "main",
            phase_index: 1,
            phases: 3,
            stage: Stage::Settling,
            elapsed_ns: 1,
            remaining_ns: Some(2),
            done: Some(0.5),
            iops: 3.0,
            mb_per_s: 4.0,
            p50_ns: 5,
            p99_ns: 6,
            cpus: 0.75,
            errors: 7,
            steady: Some(SteadyProgress { rounds: 8, range: 0.125, slope: -0.25 }),
        };
        let line = serde_json::to_string(&SnapshotRecord::of(&snapshot)).unwrap();
        assert_eq!(serde_json::from_str::<SnapshotRecord>(&line).unwrap().as_snapshot("main"), snapshot);
    }
}
