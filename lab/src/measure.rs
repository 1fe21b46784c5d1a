//! One workload on several targets, round by round, and what the rounds say together.
//!
//! Every round measures every target once, in an order that changes ([`summary::round_order`]); a
//! target is compared with the base *within* each round. So a machine that slows down, a cloud disk
//! that throttles, a neighbour that wakes up hits all alike, and the ratio survives what the
//! absolute figures do not.

use crate::{
    LabError, Result,
    progress::{Progress, report},
};
use diskwright_load::{
    OpenTarget,
    figures::Figures,
    job::{IoEngine, Job},
    record::{End, PhaseRecord},
    run::{self, RunOptions, Watch},
    seeds,
    workload::Workload,
};
use diskwright_stats::summary::{self, Interval, Summary};
use diskwright_store::EngineKind;
use serde::{Deserialize, Serialize};
use std::{slice, time::Duration};

/// How to measure a cell.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// How often each target is measured.
    pub rounds: usize,
    /// Before each window.
    pub warm_up: Duration,
    /// The window.
    pub measured: Duration,
    /// What moves the bytes.
    pub engine: EngineKind,
    /// Of orders and offsets.
    pub seed: u64,
}

impl Plan {
    /// The same plan with cells that last `cell` in all: a sixth, and at most a second, to warm up.
    pub fn with_cell(self, cell: Duration) -> Self {
        let warm_up = (cell / 6).min(Duration::from_secs(1));
        Self { warm_up, measured: cell.saturating_sub(warm_up), ..self }
    }
}

impl Plan {
    /// The job of one round: `workload` is the cell of [`seeds`].
    fn job(&self, workload: &Workload, target: &OpenTarget, round: usize) -> Job {
        let mut job = Job::simple(&workload.name, workload.load(), self.warm_up.into(), self.measured.into());
        let cell = format!("{} at QD {}", workload.name, workload.queue_depth);
        job.seed = seeds::of_window(self.seed, &cell, round);
        (job.cache, job.engine) = (target.cache, IoEngine::from(self.engine));
        seeds::begin_streams(&mut job, target.device.geometry().size_bytes);
        job
    }
}

/// Carries out a job of one phase on one target, and nothing less than all of it.
///
/// # Errors
/// [`LabError::Void`] when a request failed, for an average over a failing target means nothing;
/// [`LabError::Stopped`] when `watch` has ended it; what [`run::run`] says.
pub fn window(job: &Job, target: &OpenTarget, options: &RunOptions, watch: &dyn Watch) -> Result<PhaseRecord> {
    let (phase, end) = run::phase(job, 0, slice::from_ref(target), options, watch)?;
    match end {
        End::Complete => Ok(phase),
        End::Stopped => Err(LabError::Stopped),
        End::Failed { first, errors } => Err(LabError::Void { first, errors }),
    }
}

/// Where a comparison stands in a longer run, for those who watch.
pub struct Steps<'a> {
    /// Who watches.
    pub progress: &'a mut dyn Progress,
    /// The part of the run.
    pub phase: &'a str,
    /// Cells of that part that are done.
    pub done: u64,
    /// Cells that it has in all.
    pub total: u64,
}

/// What has to be done before each window on the target with this number.
pub type Before<'a> = dyn FnMut(usize) -> Result<()> + 'a;

/// Measures `workload` on each of `targets`, interleaved, after `before`. The result has one list
/// for each target, one round after the other.
///
/// # Errors
/// As [`window`].
pub fn interleaved(
    targets: &[OpenTarget],
    workload: &Workload,
    plan: &Plan,
    steps: &mut Steps<'_>,
    before: &mut Before<'_>,
) -> Result<Vec<Vec<Figures>>> {
    let mut all: Vec<Vec<Figures>> = targets.iter().map(|_| Vec::with_capacity(plan.rounds)).collect();
    let options = RunOptions::default();
    for round in 0..plan.rounds {
        for index in summary::round_order(targets.len(), round, plan.seed) {
            let target = &targets[index];
            let message = format!("{} at QD {}, {}", workload.name, workload.queue_depth, target.name);
            report(steps.progress, steps.phase, steps.done, steps.total, &message)?;
            before(index)?;
            let job = plan.job(workload, target, round);
            all[index].push(Figures::of(&window(&job, target, &options, steps.progress.watch())?));
            steps.done += 1;
        }
    }
    Ok(all)
}

/// A ratio to the base, round by round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// Median, extremes and deviation of the rounds' ratios.
    #[serde(flatten)]
    pub summary: Summary,
    /// 95 % confidence interval of the median ([`summary::median_interval`], over the logarithms);
    /// `None` of a single round, or where a ratio is 0.
    pub confidence: Option<Interval>,
    /// Each round's ratio.
    pub each: Vec<f64>,
}

impl Ratio {
    /// Of `ours` to `base`, round by round. `None` when no round has both.
    pub fn of(ours: &[f64], base: &[f64]) -> Option<Self> {
        let each = summary::ratios(ours, base);
        let summary = Summary::of(&each)?;
        let logarithms: Vec<f64> = each.iter().map(|ratio| ratio.ln()).collect();
        let confidence = summary::median_interval(&logarithms, 0.95)
            .map(|ends| Interval { low: ends.low.exp(), high: ends.high.exp() });
        Some(Self { summary, confidence, each })
    }

    /// The median.
    pub fn median(&self) -> f64 {
        self.summary.median
    }
}

/// What one target did with one workload.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CellResult {
    /// The target.
    pub target: String,
    /// Requests a second.
    pub iops: Summary,
    /// Millions of bytes a second.
    pub mb_per_s: Summary,
    /// Mean latency, nanoseconds.
    pub latency_mean_ns: Summary,
    /// Median latency, nanoseconds.
    pub latency_p50_ns: Summary,
    /// 99th percentile of the latency, nanoseconds.
    pub latency_p99_ns: Summary,
    /// CPU time of this process for each request, nanoseconds.
    pub cpu_ns_per_io: Summary,
    /// IOPS as a ratio to the base's in the same round; none for the base.
    pub iops_ratio: Option<Ratio>,
    /// CPU time for each request as a ratio to the base's in the same round.
    pub cpu_ratio: Option<Ratio>,
    /// Every round as it was measured.
    pub rounds: Vec<Figures>,
}

impl CellResult {
    /// Sums up the rounds of `target` against those of `base`, if there is one.
    ///
    /// # Errors
    /// [`LabError::BadOptions`] when there was no round.
    pub fn new(target: &str, rounds: Vec<Figures>, base: Option<&[Figures]>) -> Result<Self> {
        let of = |figure: &dyn Fn(&Figures) -> f64| -> Vec<f64> { rounds.iter().map(figure).collect() };
        let summary = |figure: &dyn Fn(&Figures) -> f64| {
            Summary::of(&of(figure)).ok_or_else(|| LabError::BadOptions {
                what: format!("{target}: it was measured in no round"),
                hint: "use at least one round".into(),
            })
        };
        let ratio = |figure: &dyn Fn(&Figures) -> f64| {
            let base: Vec<f64> = base?.iter().map(figure).collect();
            Ratio::of(&of(figure), &base)
        };
        Ok(Self {
            target: target.to_owned(),
            iops: summary(&|round| round.iops)?,
            mb_per_s: summary(&|round| round.mb_per_s)?,
            latency_mean_ns: summary(&|round| round.mean_ns)?,
            latency_p50_ns: summary(&|round| round.p50_ns)?,
            latency_p99_ns: summary(&|round| round.p99_ns)?,
            cpu_ns_per_io: summary(&|round| round.cpu_ns_per_io)?,
            iops_ratio: ratio(&|round| round.iops),
            cpu_ratio: ratio(&|round| round.cpu_ns_per_io),
            rounds,
        })
    }
}

/// One workload on all targets.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkloadResult {
    /// The workload.
    pub workload: Workload,
    /// Length of the measured window, nanoseconds.
    pub window_ns: u64,
    /// One for each target; the base is the first.
    pub cells: Vec<CellResult>,
}

/// Measures `workload` and sums up, the first target being the base.
///
/// # Errors
/// As [`interleaved`].
pub fn compare(
    targets: &[OpenTarget],
    workload: &Workload,
    plan: &Plan,
    steps: &mut Steps<'_>,
) -> Result<WorkloadResult> {
    compare_after(targets, workload, plan, steps, &mut |_| Ok(()))
}

/// As [`compare`], with something to be done before each window.
///
/// # Errors
/// As [`interleaved`], and what `before` says.
pub fn compare_after(
    targets: &[OpenTarget],
    workload: &Workload,
    plan: &Plan,
    steps: &mut Steps<'_>,
    before: &mut Before<'_>,
) -> Result<WorkloadResult> {
    let all = interleaved(targets, workload, plan, steps, before)?;
    let base = all.first().cloned().unwrap_or_default();
    let cells = targets
        .iter()
        .zip(all)
        .enumerate()
        .map(|(index, (target, rounds))| CellResult::new(&target.name, rounds, (index > 0).then_some(&base)))
        .collect::<Result<_>>()?;
    Ok(WorkloadResult { workload: workload.clone(), window_ns: plan.measured.as_nanos() as u64, cells })
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
        // Long enough that a busy machine lets each of them do something.
        let plan = Plan { measured: Duration::from_millis(100), ..plan(4) };
        let result = compare(&targets, &random_read(), &plan, &mut steps).unwrap();
        assert_eq!(result.cells.iter().map(|cell| cell.rounds.len()).collect::<Vec<_>>(), [4, 4, 4]);
        let rounds: Vec<&[String]> = seen.chunks(3).collect();
        assert!(rounds.iter().all(|round| ["a", "b", "c"].iter().all(|name| round.iter().any(|seen| seen == name))));
        assert_eq!(rounds[0].iter().rev().collect::<Vec<_>>(), rounds[1].iter().collect::<Vec<_>>());
        assert!(result.cells[0].iops_ratio.is_none());
        assert!(result.cells[1].iops_ratio.as_ref().is_some_and(|ratio| ratio.median() > 0.0 && ratio.each.len() == 4));
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
        let stopped = compare(&[null("a")], &random_read(), &plan(1), &mut steps);
        assert!(matches!(stopped, Err(LabError::Stopped)));
        let long = Plan { measured: Duration::from_secs(3600), ..plan(1) }.job(&random_read(), &null("a"), 0);
        let stopped = window(&long, &null("a"), &RunOptions::default(), &|_: &Snapshot<'_>| false);
        assert!(matches!(stopped, Err(LabError::Stopped)));
    }

    #[test]
    fn a_failing_target_voids_the_comparison() {
        let tiny = open_target("tiny", "null", Arc::new(NullDevice::new(512)), CacheMode::Direct);
        let mut steps = Steps { progress: &mut Silent, phase: "measure", done: 0, total: 1 };
        let error = compare(&[tiny], &random_read(), &plan(1), &mut steps).unwrap_err();
        assert!(matches!(error, LabError::Load(LoadError::BlockTooLarge { .. })), "{error}");
    }

    #[test]
    fn a_cell_is_split_into_warm_up_and_window() {
        let plan = plan(1).with_cell(Duration::from_millis(600));
        assert_eq!((plan.warm_up, plan.measured), (Duration::from_millis(100), Duration::from_millis(500)));
        assert_eq!(plan.with_cell(Duration::from_secs(60)).warm_up, Duration::from_secs(1));
    }

    #[test]
    fn ratios_are_taken_within_rounds() {
        let round = |iops, cpu_ns_per_io| Figures { iops, cpu_ns_per_io, ..Figures::default() };
        let base = [round(100.0, 10.0), round(50.0, 10.0)];
        let cell = CellResult::new("x", vec![round(90.0, 11.0), round(45.0, 11.0)], Some(&base)).unwrap();
        assert!((cell.iops_ratio.unwrap().median() - 0.9).abs() < 1e-12);
        assert!((cell.cpu_ratio.unwrap().median() - 1.1).abs() < 1e-12);
        assert!(CellResult::new("x", Vec::new(), None).is_err());
    }
}
