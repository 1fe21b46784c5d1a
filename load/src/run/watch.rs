//! Progress of a run, and a way to stop it.
//!
//! The conductor sends at most four snapshots per second. It runs in a thread that measures
//! nothing, so a watcher may take its time without an effect on latencies.

/// The part of a phase that is running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

/// Progress towards the steady state ([`crate::steady`]).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SteadyProgress {
    /// Number of complete rounds.
    pub rounds: usize,
    /// Range of the last five rounds as a share of their mean; must reach
    /// [`RANGE_MAX`](crate::steady::RANGE_MAX) or less.
    pub range: f64,
    /// Slope over the last five rounds as a share of their mean; its absolute value must reach
    /// [`SLOPE_MAX`](crate::steady::SLOPE_MAX) or less.
    pub slope: f64,
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

/// Receives the progress of a run.
pub trait Watch: Sync {
    /// Receives a snapshot. Returning `false` stops the run, which ends as
    /// [`End::Stopped`](crate::record::End::Stopped) and keeps what was measured.
    fn update(&self, snapshot: &Snapshot<'_>) -> bool;
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
