//! Runs a job on targets and returns its record.
//!
//! ```text
//!   Job + OpenTargets ─▶ plan: threads, lanes, requests         a job that does not fit fails here
//!     for each phase:   phase: threads open queues, start together
//!                         thread ─ lane ─ queue ─▶ target       the measuring loop
//!                           └─ cuts ─▶ conductor ─▶ aggregator  several times a second
//!     ─▶ Run (record/)
//! ```
//!
//! | file | content |
//! |---|---|
//! | `options.rs` | options of a run that are not part of the job |
//! | `plan.rs` | the threads and their lanes; checks that the job fits the targets |
//! | `requests.rs`, `distribution.rs`, `random.rs` | size, direction and offset of a request |
//! | `pace.rs` | rate, bursts and think time: when the next request may be made |
//! | `contents.rs`, `verify.rs` | payload of writes; checks of reads |
//! | `lane.rs`, `thread.rs`, `buffers.rs` | the measuring loop and its buffers |
//! | `affinity.rs` | binds threads to processors |
//! | `shared.rs`, `ticks.rs` | clock, window, end and first failure of a phase; bins of time |
//! | `histogram.rs`, `tally.rs` | counters of a measuring thread |
//! | `aggregator.rs`, `rate_deviation.rs` | sums over threads: totals, time series, deviation |
//! | `phase.rs`, `conductor.rs`, `watch.rs` | start and end of a phase; progress |
//! | `cpu.rs`, `members.rs`, `run_warnings.rs` | CPU time; members of a space; warnings |
//!
//! A *lane* is one thread on one target. The *window* is the measured time of a phase. A *cut* is
//! what a thread counted in one bin of time.
//!
//! A failed request is counted, and the first one is recorded with target, offset and length. It
//! ends the run, unless [`RunOptions::keep_going`] is set. Such a run ends as [`End::Failed`] and
//! keeps what it measured, as does a run that its watcher stops.

mod affinity;
mod aggregator;
mod buffers;
mod conductor;
mod contents;
mod cpu;
mod distribution;
mod histogram;
mod lane;
mod members;
mod options;
mod pace;
mod phase;
mod plan;
mod random;
mod rate_deviation;
mod requests;
mod run_warnings;
mod shared;
mod tally;
mod thread;
mod ticks;
mod verify;
mod watch;

pub use crate::steady::SteadyProgress;
pub use aggregator::POINTS_MAX;
pub use buffers::Buffers;
pub use options::{Coordinator, RunOptions};
pub use plan::SUBMIT_EVERY;
pub use watch::{Snapshot, SnapshotRecord, Stage, Unwatched, Watch};

use crate::{
    LoadError, Result,
    clock::TimePoint,
    data,
    job::{Contents, IoEngine, Job, Phase},
    machine::OtherLoad,
    record::{End, Head, PhaseRecord, RUN_SCHEMA, Run},
    target::OpenTarget,
};
use conductor::Progress;
use diskwright_store::EngineKind;
use run_warnings::RunWarnings;
use std::sync::Arc;
use verify::Generations;

/// Checks that a job is valid and fits its targets. The caller does so before it fills a target.
///
/// # Errors
/// The first thing that is wrong with the job or does not fit a target.
pub fn check(job: &Job, targets: &[OpenTarget]) -> Result<()> {
    job.validate()?;
    if targets.is_empty() {
        return Err(LoadError::BadOptions { what: "there is no target".into(), hint: "name at least one".into() });
    }
    // All phases, so that an error in the last one is found before the first one runs.
    for phase in 0..job.phases.len() {
        plan::threads_of(job, phase, targets, &[])?;
    }
    Ok(())
}

/// Runs `job` on `targets` and returns the record. `watch` gets snapshots and can stop the run.
///
/// # Errors
/// A job that is not valid or does not fit the targets; queues that cannot be opened. Failed
/// requests are not an error of this function: they are in [`Head::end`].
pub fn run(job: &Job, targets: &[OpenTarget], options: &RunOptions, watch: &dyn Watch) -> Result<Run> {
    let mut runner = Runner::new(job, targets, options)?;
    while runner.phase(watch)? {}
    Ok(runner.finish())
}

/// A run whose phases the caller starts one by one.
#[derive(Debug)]
pub struct Runner<'a> {
    job: &'a Job,
    targets: &'a [OpenTarget],
    options: &'a RunOptions,
    start: TimePoint,
    generations: Vec<Arc<Generations>>,
    head: Head,
    other_load: OtherLoad,
    warnings: RunWarnings,
    phases: Vec<PhaseRecord>,
}

impl<'a> Runner<'a> {
    /// A run that has measured nothing yet.
    ///
    /// # Errors
    /// As [`check`].
    pub fn new(job: &'a Job, targets: &'a [OpenTarget], options: &'a RunOptions) -> Result<Self> {
        let start = TimePoint::now();
        check(job, targets)?;
        let head = Head { end: End::Complete, ..Head::begin(RUN_SCHEMA) };
        let warnings = RunWarnings::before(&head.machine, targets, job);
        let (generations, other_load) = (generations(job, targets), OtherLoad::watch());
        Ok(Self { job, targets, options, start, generations, head, other_load, warnings, phases: Vec::new() })
    }

    /// Runs the next phase. Returns whether there is another one to run: the run ends early when it
    /// is stopped or when requests fail.
    ///
    /// # Errors
    /// As [`run`].
    ///
    /// # Panics
    /// When no phase is left.
    pub fn phase(&mut self, watch: &dyn Watch) -> Result<bool> {
        let (job, index) = (self.job, self.phases.len());
        let ended = phase::run(job, progress(job, index), self.targets, &self.generations, self.options, watch)?;
        self.warnings.after_phase(&job.phases[index], &ended);
        let stopped = ended.stopped;
        self.head.end = end_with(std::mem::replace(&mut self.head.end, End::Stopped), stopped, ended.failures);
        self.phases.push(ended.record);
        let goes_on = !stopped && (self.head.end == End::Complete || self.options.keep_going);
        Ok(goes_on && self.phases.len() < job.phases.len())
    }

    /// The phases that were run.
    pub fn phases(&self) -> &[PhaseRecord] {
        &self.phases
    }

    /// How it would end now.
    pub fn end(&self) -> &End {
        &self.head.end
    }

    /// The record.
    pub fn finish(self) -> Run {
        let warnings = self.warnings.after_all(&self.other_load, &self.start);
        Run {
            head: Head { took_ns: self.start.elapsed_ns(), warnings, ..self.head },
            job: self.job.clone(),
            engine: engine_of(self.job, self.targets),
            targets: self.targets.iter().map(OpenTarget::record).collect(),
            phases: self.phases,
            labels: self.options.labels.clone(),
            fleet: None,
        }
    }
}

/// The engine that the queues of these targets use; `None` if they use none.
fn engine_of(job: &Job, targets: &[OpenTarget]) -> Option<IoEngine> {
    let uses_one = |target: &OpenTarget| !target.is_export() && target.kind != "null";
    let kind = EngineKind::from(job.engine).resolved().ok().filter(|_| targets.iter().any(uses_one));
    kind.map(IoEngine::from)
}

/// Runs phase number `index` of `job` alone, without machine facts and warnings. Studies and
/// benchmarks do so hundreds of times, in windows of a tenth of a second.
///
/// # Errors
/// As [`run`].
///
/// # Panics
/// When `index` is not the number of a phase.
pub fn phase(
    job: &Job,
    index: usize,
    targets: &[OpenTarget],
    options: &RunOptions,
    watch: &dyn Watch,
) -> Result<(PhaseRecord, End)> {
    job.validate()?;
    let ended = phase::run(job, progress(job, index), targets, &generations(job, targets), options, watch)?;
    Ok((ended.record, end_with(End::Complete, ended.stopped, ended.failures)))
}

/// The generation table of each target, where contents are verified; else empty.
fn generations(job: &Job, targets: &[OpenTarget]) -> Vec<Arc<Generations>> {
    match job.contents {
        Contents::Verified => {
            targets.iter().map(|target| Arc::new(Generations::new(job, target.device.geometry().size_bytes))).collect()
        }
        _ => Vec::new(),
    }
}

fn progress(job: &Job, index: usize) -> Progress {
    Progress { index, before_ns: planned_ns(&job.phases[..index]), behind_ns: planned_ns(&job.phases[index + 1..]) }
}

/// Longest time that these phases last; `None` where a phase ends by a count.
fn planned_ns(phases: &[Phase]) -> Option<u64> {
    phases.iter().try_fold(0_u64, |sum, phase| {
        let parts = [phase.steady_within.unwrap_or(phase.warm_up), phase.duration, phase.cool_down];
        phase.count.is_none().then(|| parts.iter().fold(sum, |sum, part| sum.saturating_add(part.as_nanos())))
    })
}

/// Fills `buf` with verified contents of generation 0, which a run with this seed accepts until its
/// first write there. `offset_bytes` is the offset on the target, a multiple of 4096.
pub fn fill_verified(seed: u64, offset_bytes: u64, buf: &mut [u8]) {
    data::fill(seed, offset_bytes, buf);
    verify::seal_first(seed, offset_bytes, buf);
}

/// The end of a run that was `so_far` before its last phase.
fn end_with(so_far: End, stopped: bool, failures: Option<(String, u64)>) -> End {
    match (so_far, failures) {
        (so_far, Some((first, errors))) => so_far.failing(first, errors),
        (End::Complete, None) if stopped => End::Stopped,
        (so_far, None) => so_far,
    }
}

#[cfg(test)]
mod simulated;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_settled;
#[cfg(test)]
mod tests_time;
