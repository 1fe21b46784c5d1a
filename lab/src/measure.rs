//! Measures one workload on several targets in interleaved rounds.
//!
//! ```text
//!   workload, plan ──▶ job of a round (rounds.rs: seed) ──▶ window on a target
//!                                                               └─▶ figures of the round ──▶ Cell
//! ```
//!
//! A target is compared with the base *within* each round. A slower CPU, a throttled cloud disk or
//! the load of other programs affects all targets of a round alike, so it changes the figures but
//! not the ratio.

pub use crate::{ratio::Ratio, rounds::Steps};

use crate::{
    LabError, Result,
    cells::{self, Cell},
    rounds::{self, Done, Rounds, Window},
};
use diskwright_load::{
    OpenTarget,
    figures::Figures,
    job::{IoEngine, Job},
    record::{End, PhaseRecord},
    run::{self, RunOptions, Watch},
    workload::Workload,
};
use diskwright_store::EngineKind;
use std::{slice, time::Duration};

/// Rounds, times and seed to measure the cells of a workload.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Rounds of each target.
    pub rounds: usize,
    /// Length of the warm-up before each window.
    pub warm_up: Duration,
    /// Length of the measured window.
    pub measured: Duration,
    /// How I/O is submitted.
    pub engine: EngineKind,
    /// Seed of the order of cells and of offsets.
    pub seed: u64,
}

impl Plan {
    /// The plan with cells of this length. A sixth of a cell is warm-up, at most a second.
    pub fn with_cell(self, cell: Duration) -> Self {
        let warm_up = (cell / 6).min(Duration::from_secs(1));
        Self { warm_up, measured: cell.saturating_sub(warm_up), ..self }
    }
}

impl Plan {
    /// The job of one round.
    pub(crate) fn job(&self, workload: &Workload, target: &OpenTarget, round: usize) -> Job {
        let mut job = Job::simple(&workload.name, workload.load(), self.warm_up.into(), self.measured.into());
        (job.seed, job.cache, job.engine) = (self.seed, target.cache, IoEngine::from(self.engine));
        let cell = cells::title(&workload.name, workload.queue_depth.into());
        rounds::job_of(&job, &cell, round, Some(target.device.geometry().size_bytes))
    }
}

/// Measures a job of one phase on one target, to its end.
///
/// # Errors
/// [`LabError::Void`] if a request failed, because the figures of a failing target are meaningless;
/// [`LabError::Stopped`] if `watch` ended it; errors of [`run::run`].
pub fn window(job: &Job, target: &OpenTarget, options: &RunOptions, watch: &dyn Watch) -> Result<PhaseRecord> {
    let (phase, end) = run::phase(job, 0, slice::from_ref(target), options, watch)?;
    match end {
        End::Complete => Ok(phase),
        End::Stopped => Err(LabError::Stopped),
        End::Failed { first, errors } => Err(LabError::Void { first, errors }),
    }
}

/// Called before each window with the index of the target.
pub type BeforeWindow<'a> = dyn FnMut(usize) -> Result<()> + 'a;

/// Measures `workload` on each of `targets` in interleaved rounds, and calls `before` before each
/// window. Returns the rounds of each target.
///
/// # Errors
/// As [`window`]; [`LabError::Stopped`] if not all rounds were measured.
pub fn interleaved(
    targets: &[OpenTarget],
    workload: &Workload,
    plan: &Plan,
    steps: &mut Steps<'_>,
    before: &mut BeforeWindow<'_>,
) -> Result<Vec<Vec<Figures>>> {
    let (all, done) = whole_rounds(targets, workload, plan, steps, before)?;
    done.or_stopped().map(|()| all)
}

/// Measures until the end or a stop. Returns the whole rounds of each target.
fn whole_rounds(
    targets: &[OpenTarget],
    workload: &Workload,
    plan: &Plan,
    steps: &mut Steps<'_>,
    before: &mut BeforeWindow<'_>,
) -> Result<(Vec<Vec<Figures>>, Done)> {
    let mut all: Vec<Vec<Figures>> = targets.iter().map(|_| Vec::with_capacity(plan.rounds)).collect();
    let options = RunOptions::default();
    let title = |at: Window| {
        let cell = cells::title(&workload.name, workload.queue_depth.into());
        Some(format!("{cell}, {}", targets[at.cell].name))
    };
    let mut measure = |at: Window, watch: &dyn Watch| {
        before(at.cell)?;
        let target = &targets[at.cell];
        let job = plan.job(workload, target, at.round);
        all[at.cell].push(Figures::of(&window(&job, target, &options, watch)?));
        Ok(())
    };
    let rounds = Rounds::new(plan.rounds, plan.seed);
    let done = rounds::interleave(&rounds, targets.len(), steps, &title, &mut measure)?;
    all.iter_mut().for_each(|rounds| rounds.truncate(done.whole));
    Ok((all, done))
}

/// Measures `workload` on each of `targets` in interleaved rounds, and adds a cell of `part` per
/// target to `found`. If the user stops it, the cells have the whole rounds.
///
/// # Errors
/// As [`window`]; [`LabError::Stopped`] if not all rounds were measured.
pub fn compare(
    part: &str,
    targets: &[OpenTarget],
    workload: &Workload,
    plan: &Plan,
    steps: &mut Steps<'_>,
    found: &mut Vec<Cell>,
) -> Result<()> {
    let (all, done) = whole_rounds(targets, workload, plan, steps, &mut |_| Ok(()))?;
    if done.whole > 0 {
        found.extend(targets.iter().zip(all).map(|(target, rounds)| {
            Cell::new(part, &workload.name, &target.name, workload.queue_depth.into()).with_rounds(rounds)
        }));
    }
    done.or_stopped()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        progress::{Silent, Step},
        targets::open_target,
    };
    use diskwright_load::{
        LoadError,
        null::NullDevice,
        run::Snapshot,
        workload::{Direction, Pattern},
    };
    use diskwright_store::CacheMode;
    use std::sync::Arc;

    fn plan(rounds: usize) -> Plan {
        let cell = Duration::from_millis(2);
        Plan { rounds, warm_up: cell, measured: cell, engine: EngineKind::Auto, seed: 1 }
    }

    fn null(name: &str) -> OpenTarget {
        open_target(name, "null", Arc::new(NullDevice::new(1 << 20)), CacheMode::Direct)
    }

    fn random_read() -> Workload {
        Workload::new(Pattern::Random, Direction::Read, 4096, 4)
    }

    #[test]
    fn every_target_is_measured_in_every_round_and_orders_change() {
        let targets = ["a", "b", "c"].map(null);
        let mut seen: Vec<String> = Vec::new();
        let mut progress = |step: Step<'_>| {
            assert_eq!((step.done as usize, step.total, step.phase), (5 + seen.len(), 17, "measure"));
            seen.push(step.message.rsplit(' ').next().unwrap().to_owned());
            true
        };
        let mut steps = Steps { progress: &mut progress, phase: "measure", done: 5, total: 17 };
        // Long enough that each completes requests on a busy machine.
        let plan = Plan { measured: Duration::from_millis(100), ..plan(4) };
        let mut cells = Vec::new();
        compare("main", &targets, &random_read(), &plan, &mut steps, &mut cells).unwrap();
        assert_eq!(cells.iter().map(|cell| cell.rounds.len()).collect::<Vec<_>>(), [4, 4, 4]);
        let rounds: Vec<&[String]> = seen.chunks(3).collect();
        assert!(rounds.iter().all(|round| ["a", "b", "c"].iter().all(|name| round.iter().any(|seen| seen == name))));
        assert_eq!(rounds[0].iter().rev().collect::<Vec<_>>(), rounds[1].iter().collect::<Vec<_>>());
        let ratio = cells[1].ratio(&cells[0], |round| round.iops).unwrap();
        assert!(ratio.median() > 0.0 && ratio.each.len() == 4);
        assert_eq!((cells[2].subject.as_str(), cells[2].in_flight), ("c", 4));
    }

    #[test]
    fn a_round_is_the_same_on_every_target_and_another_the_next_time() {
        let workload = Workload::new(Pattern::Sequential, Direction::Write, 4096, 4);
        let job = |round| plan(1).job(&workload, &null("a"), round);
        assert_eq!(job(3), job(3));
        assert_ne!(job(3).phases[0].loads[0].stream_start, job(4).phases[0].loads[0].stream_start);
        assert_ne!(job(3).seed, job(4).seed);
        assert!(job(4).phases[0].loads[0].stream_start.0 < 1 << 20);
        let deeper = Workload { queue_depth: 8, ..workload.clone() };
        assert_ne!(plan(1).job(&deeper, &null("a"), 3).seed, job(3).seed, "a deeper queue asks for other blocks");
        assert_eq!(plan(1).job(&workload, &null("b"), 3), job(3), "targets are alike");
    }

    #[test]
    fn a_comparison_is_stopped_between_cells_and_within_one() {
        let mut never = |_: Step<'_>| false;
        let mut steps = Steps { progress: &mut never, phase: "measure", done: 0, total: 1 };
        let mut cells = Vec::new();
        let stopped = compare("main", &[null("a")], &random_read(), &plan(1), &mut steps, &mut cells);
        assert!(matches!(stopped, Err(LabError::Stopped)) && cells.is_empty());
        // Stopped in the third round: two are whole.
        let mut patience = |step: Step<'_>| step.done < 5;
        let mut steps = Steps { progress: &mut patience, phase: "measure", done: 0, total: 8 };
        let stopped = compare("main", &["a", "b"].map(null), &random_read(), &plan(4), &mut steps, &mut cells);
        assert!(matches!(stopped, Err(LabError::Stopped)));
        assert_eq!(cells.iter().map(|cell| cell.rounds.len()).collect::<Vec<_>>(), [2, 2]);
        let long = Plan { measured: Duration::from_secs(3600), ..plan(1) }.job(&random_read(), &null("a"), 0);
        let stopped = window(&long, &null("a"), &RunOptions::default(), &|_: &Snapshot<'_>| false);
        assert!(matches!(stopped, Err(LabError::Stopped)));
    }

    #[test]
    fn a_failing_target_voids_the_comparison() {
        let tiny = open_target("tiny", "null", Arc::new(NullDevice::new(512)), CacheMode::Direct);
        let mut steps = Steps { progress: &mut Silent, phase: "measure", done: 0, total: 1 };
        let error = compare("main", &[tiny], &random_read(), &plan(1), &mut steps, &mut Vec::new()).unwrap_err();
        assert!(matches!(error, LabError::Load(LoadError::BlockTooLarge { .. })), "{error}");
    }

    #[test]
    fn a_cell_is_split_into_warm_up_and_window() {
        let plan = plan(1).with_cell(Duration::from_millis(600));
        assert_eq!((plan.warm_up, plan.measured), (Duration::from_millis(100), Duration::from_millis(500)));
        assert_eq!(plan.with_cell(Duration::from_secs(60)).warm_up, Duration::from_secs(1));
    }
}
