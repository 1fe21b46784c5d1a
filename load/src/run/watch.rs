//! What a run tells while it is under way, and how it is told to stop.
//!
//! Snapshots come from the conductor, which measures nothing, at most four times a second; whoever
//! draws them can take its time without disturbing a latency.

/// What a phase is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Not measured yet.
    WarmUp,
    /// Not measured yet: the steady state is waited for.
    Settling,
    /// What counts.
    Measuring,
    /// Not measured any more.
    CoolDown,
}

/// How near the steady state is; both must come below their bars.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Nearness {
    /// Rounds there are, of those that the rule wants.
    pub rounds: usize,
    /// Range of the last rounds as a share of their mean.
    pub range: f64,
    /// Slope over the last rounds as a share of their mean.
    pub slope: f64,
}

/// A look at a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Snapshot<'a> {
    /// Name of the phase.
    pub phase: &'a str,
    /// Its number, from 0.
    pub phase_index: usize,
    /// How many there are.
    pub phases: usize,
    /// What it is doing.
    pub stage: Stage,
    /// Time since the phase began, nanoseconds.
    pub elapsed_ns: u64,
    /// Time to the end of the run, nanoseconds; none where a count decides.
    pub remaining_ns: Option<u64>,
    /// Share of the whole run that is done, from 0 to 1; none where that is not known.
    pub done: Option<f64>,
    /// Requests a second, over about the last second.
    pub iops: f64,
    /// Millions of bytes (10^6) a second, over the same.
    pub mb_per_s: f64,
    /// Median latency over the same, nanoseconds; 0 of no requests.
    pub p50_ns: u64,
    /// 99th percentile.
    pub p99_ns: u64,
    /// Processors that the generator kept busy since the snapshot before.
    pub cpus: f64,
    /// Requests that failed so far.
    pub errors: u64,
    /// How near the steady state is, where it is waited for.
    pub steady: Option<Nearness>,
}

/// Told how a run goes.
pub trait Watch: Sync {
    /// Returns `false` to end the run: what was measured is kept, and the run says that it was
    /// stopped.
    fn look(&self, snapshot: &Snapshot<'_>) -> bool;
}

/// Looks away, and never stops.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unwatched;

impl Watch for Unwatched {
    fn look(&self, _snapshot: &Snapshot<'_>) -> bool {
        true
    }
}

impl<F: Fn(&Snapshot<'_>) -> bool + Sync> Watch for F {
    fn look(&self, snapshot: &Snapshot<'_>) -> bool {
        self(snapshot)
    }
}
