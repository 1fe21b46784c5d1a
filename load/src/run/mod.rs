//! A run: carries out a job on targets, and says what was found.
//!
//! ```text
//!   Job + OpenTargets ─▶ plan: threads, lanes, requests        everything that does not fit is found here
//!     for each phase:    phase: threads open queues, begin together
//!                          thread ─ lane ─ queue ─▶ target     the measuring loop
//!                             └─ cuts ─▶ conductor ─▶ ledger   several times a second, by channel
//!     ─▶ Run (record.rs)
//! ```
//!
//! | file | idea |
//! |---|---|
//! | `plan.rs` | which threads there are; whether the job fits the targets |
//! | `requests.rs`, `distribution.rs`, `random.rs` | which request comes next |
//! | `pace.rs` | when it may be made |
//! | `contents.rs`, `verify.rs` | what it writes; checking what it reads |
//! | `lane.rs`, `thread.rs`, `buffers.rs` | the loop, and its memory |
//! | `affinity.rs` | which processor a thread runs on |
//! | `shared.rs`, `ticks.rs` | clock, window, end, first failure; where time is cut |
//! | `histogram.rs`, `tally.rs`, `ledger.rs`, `scatter.rs` | counting, and adding up elsewhere |
//! | `phase.rs`, `conductor.rs`, `watch.rs`, `cpu.rs`, `doubts.rs` | beginning and ending, telling, processors, reasons for doubt |
//!
//! A request that fails is counted, told once with its target, offset and length, and ends the run
//! soon, unless it is to go on. Such a run has ended as [`End::Failed`], and keeps what it
//! measured. A run that its watcher ends keeps it too.

mod affinity;
mod buffers;
mod conductor;
mod contents;
mod cpu;
mod distribution;
mod doubts;
mod histogram;
mod lane;
mod ledger;
mod pace;
mod phase;
mod plan;
mod random;
mod requests;
mod scatter;
mod shared;
mod tally;
mod thread;
mod ticks;
mod verify;
mod watch;

pub use buffers::Buffers;
pub use ledger::POINTS_MAX;
pub use plan::SUBMIT_EVERY;
pub use watch::{Nearness, Snapshot, Stage, Unwatched, Watch};

use crate::{
    LoadError, Result,
    clock::Moment,
    data,
    job::{Contents, Job, Phase},
    machine::OtherLoad,
    record::{End, Head, PhaseRecord, RUN_SCHEMA, Run},
    target::OpenTarget,
};
use conductor::Progress;
use std::sync::Arc;
use verify::Generations;

/// How to run, apart from what.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// Go on when requests fail. The run has failed all the same.
    pub keep_going: bool,
    /// Take latencies. Without them a run shows what that costs, and nothing else.
    pub record_latency: bool,
    /// Free labels for the record.
    pub labels: Vec<(String, String)>,
    /// Buffers of earlier runs to use again, for those who run often.
    pub buffers: Buffers,
}

impl Default for RunOptions {
    fn default() -> Self {
        Self { keep_going: false, record_latency: true, labels: Vec::new(), buffers: Buffers::default() }
    }
}

/// Finds what is wrong with a job, or between it and its targets, before anything runs or is
/// filled.
///
/// # Errors
/// The first such thing.
pub fn check(job: &Job, targets: &[OpenTarget]) -> Result<()> {
    job.validate()?;
    if targets.is_empty() {
        return Err(LoadError::BadOptions { what: "there is no target".into(), hint: "name at least one".into() });
    }
    // All of them, so that nothing is said only when the first phases have taken their time.
    for phase in 0..job.phases.len() {
        plan::threads_of(job, phase, targets, &[])?;
    }
    Ok(())
}

/// Carries out `job` on `targets`, telling `watch` how it goes.
///
/// # Errors
/// What is wrong with the job, or between it and the targets; queues that cannot be opened.
/// Requests that fail are no error of this function: they are in [`Run::end`].
pub fn run(job: &Job, targets: &[OpenTarget], options: &RunOptions, watch: &dyn Watch) -> Result<Run> {
    let start = Moment::now();
    check(job, targets)?;
    let generations = generations(job, targets);
    let head = Head::begin(RUN_SCHEMA);
    let other_load = OtherLoad::watch();
    let mut phases = Vec::new();
    let mut doubts = doubts::Doubts::before(&head.machine, targets, job);
    let mut end = End::Complete;
    for index in 0..job.phases.len() {
        let ended = phase::run(job, progress(job, index), targets, &generations, options, watch)?;
        doubts.after_phase(&job.phases[index], &ended);
        let stopped = ended.stopped;
        end = end_with(end, stopped, ended.failures);
        phases.push(ended.record);
        if stopped || end != End::Complete && !options.keep_going {
            break;
        }
    }
    Ok(Run {
        head: Head { took_ns: start.elapsed_ns(), warnings: doubts.after_all(&other_load, &start), end, ..head },
        job: job.clone(),
        targets: targets.iter().map(OpenTarget::record).collect(),
        phases,
        labels: options.labels.clone(),
    })
}

/// Carries out phase number `index` of `job` alone, without looking at the machine: what studies
/// and benchmarks do hundreds of times, in windows of a tenth of a second.
///
/// # Errors
/// As [`run`].
///
/// # Panics
/// When there is no such phase.
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

/// What the targets hold, where contents are verified.
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

/// How long these phases are to last, at most; none where a count decides.
fn planned_ns(phases: &[Phase]) -> Option<u64> {
    phases.iter().try_fold(0_u64, |sum, phase| {
        let parts = [phase.steady_within.unwrap_or(phase.warm_up), phase.duration, phase.cool_down];
        phase.count.is_none().then(|| parts.iter().fold(sum, |sum, part| sum.saturating_add(part.as_nanos())))
    })
}

/// Fills `buf` with what a run with verified contents and this seed knows for its own: as if
/// written once, before the run. `offset_bytes` is where on the target it goes, a multiple of 4096.
pub fn fill_verified(seed: u64, offset_bytes: u64, buf: &mut [u8]) {
    data::fill(seed, offset_bytes, buf);
    verify::seal_first(seed, offset_bytes, buf);
}

/// How a run ends that has come to `so_far`, with one phase more.
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
