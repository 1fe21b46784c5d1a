//! One workload on several targets, round by round, and what the rounds say together.
//!
//! Every round measures every target once, in an order that changes ([`stats::round_order`]); a target is compared with the
//! base *within* each round. So a machine that slows down, a cloud disk that throttles, a neighbour that wakes up hits all alike, and
//! the ratio survives what the absolute figures do not.

use crate::{
    LabError, Result,
    generator::{Generator, Measurement, Until},
    stats::{self, Interval, Summary},
    workload::Workload,
};
use diskwright_store::{BlockDevice, EngineKind};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Resamples of a bootstrap: the ends of a 95 % interval are then known to about half a percent of its ranks.
const RESAMPLES: usize = 2000;

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

/// A target and its name.
pub type Named<'a> = (&'a str, &'a dyn BlockDevice);

/// Measures `workload` on each of `targets`, interleaved. The result has one list for each target, one measurement for each
/// round. `tick` is called before each cell with its number and its target.
///
/// # Errors
/// Whatever a run or `tick` returns.
pub fn interleaved(
    targets: &[Named<'_>],
    workload: &Workload,
    plan: &Plan,
    tick: &mut dyn FnMut(u64, &str) -> Result<()>,
) -> Result<Vec<Vec<Measurement>>> {
    let mut generator = Generator::for_workload(workload, plan.seed)?;
    let mut all: Vec<Vec<Measurement>> = targets.iter().map(|_| Vec::with_capacity(plan.rounds)).collect();
    let until = Until::Elapsed { warm_up: plan.warm_up, measured: plan.measured };
    let mut cell = 0;
    for round in 0..plan.rounds {
        for index in stats::round_order(targets.len(), round, plan.seed) {
            let (name, device) = targets[index];
            tick(cell, name)?;
            let measurement = generator.run(name, device, workload, until, plan.engine, plan.seed ^ round as u64)?;
            all[index].push(measurement);
            cell += 1;
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
    /// 95 % confidence interval of the median, by bootstrap; little more than the extremes when rounds are few.
    pub confidence: Interval,
    /// Each round's ratio.
    pub each: Vec<f64>,
}

impl Ratio {
    /// Of `ours` to `base`, round by round. `None` when no round has both.
    pub fn of(ours: &[f64], base: &[f64]) -> Option<Self> {
        let each = stats::ratios(ours, base);
        let summary = Summary::of(&each)?;
        Some(Self { summary, confidence: stats::bootstrap_median(&each, 0.95, RESAMPLES, 1)?, each })
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
    pub rounds: Vec<Measurement>,
}

impl CellResult {
    /// Sums up the rounds of `target` against those of `base`, if there is one.
    ///
    /// # Errors
    /// [`LabError::BadOptions`] when there was no round.
    pub fn new(target: &str, rounds: Vec<Measurement>, base: Option<&[Measurement]>) -> Result<Self> {
        let of = |figure: &dyn Fn(&Measurement) -> f64| -> Vec<f64> { rounds.iter().map(figure).collect() };
        let summary = |figure: &dyn Fn(&Measurement) -> f64| {
            Summary::of(&of(figure)).ok_or_else(|| LabError::BadOptions {
                what: format!("{target}: it was measured in no round"),
                hint: "use at least one round".into(),
            })
        };
        let ratio = |figure: &dyn Fn(&Measurement) -> f64| {
            let base: Vec<f64> = base?.iter().map(figure).collect();
            Ratio::of(&of(figure), &base)
        };
        Ok(Self {
            target: target.to_owned(),
            iops: summary(&Measurement::iops)?,
            mb_per_s: summary(&Measurement::mb_per_s)?,
            latency_mean_ns: summary(&|round| round.latency.mean_ns)?,
            latency_p50_ns: summary(&|round| round.latency.p50_ns as f64)?,
            latency_p99_ns: summary(&|round| round.latency.p99_ns as f64)?,
            cpu_ns_per_io: summary(&Measurement::cpu_ns_per_io)?,
            iops_ratio: ratio(&Measurement::iops),
            cpu_ratio: ratio(&Measurement::cpu_ns_per_io),
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
    targets: &[Named<'_>],
    workload: &Workload,
    plan: &Plan,
    tick: &mut dyn FnMut(u64, &str) -> Result<()>,
) -> Result<WorkloadResult> {
    let all = interleaved(targets, workload, plan, tick)?;
    let base = all.first().cloned().unwrap_or_default();
    let cells = targets
        .iter()
        .zip(all)
        .enumerate()
        .map(|(index, ((name, _), rounds))| CellResult::new(name, rounds, (index > 0).then_some(&base)))
        .collect::<Result<_>>()?;
    Ok(WorkloadResult { workload: workload.clone(), window_ns: plan.measured.as_nanos() as u64, cells })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        null::NullDevice,
        workload::{Direction, Pattern},
    };

    fn plan(rounds: usize) -> Plan {
        let cell = Duration::from_millis(2);
        Plan { rounds, warm_up: cell, measured: cell, engine: EngineKind::Auto, seed: 1 }
    }

    #[test]
    fn every_target_is_measured_in_every_round_and_orders_change() {
        let device = NullDevice::new(1 << 20);
        let targets: Vec<Named<'_>> = ["a", "b", "c"].map(|name| (name, &device as &dyn BlockDevice)).to_vec();
        let workload = Workload::new(Pattern::Random, Direction::Read, 4096, 4);
        let mut seen: Vec<String> = Vec::new();
        let result = compare(&targets, &workload, &plan(4), &mut |cell, name| {
            assert_eq!(cell as usize, seen.len());
            seen.push(name.to_owned());
            Ok(())
        })
        .unwrap();
        assert_eq!(result.cells.iter().map(|cell| cell.rounds.len()).collect::<Vec<_>>(), [4, 4, 4]);
        let rounds: Vec<&[String]> = seen.chunks(3).collect();
        assert!(rounds.iter().all(|round| ["a", "b", "c"].iter().all(|name| round.iter().any(|seen| seen == name))));
        assert_eq!(rounds[0].iter().rev().collect::<Vec<_>>(), rounds[1].iter().collect::<Vec<_>>());
        assert!(result.cells[0].iops_ratio.is_none());
        assert!(result.cells[1].iops_ratio.as_ref().is_some_and(|ratio| ratio.median() > 0.0 && ratio.each.len() == 4));
    }

    #[test]
    fn a_cell_is_split_into_warm_up_and_window() {
        let plan = plan(1).with_cell(Duration::from_millis(600));
        assert_eq!((plan.warm_up, plan.measured), (Duration::from_millis(100), Duration::from_millis(500)));
        assert_eq!(plan.with_cell(Duration::from_secs(60)).warm_up, Duration::from_secs(1));
    }

    #[test]
    fn ratios_are_taken_within_rounds() {
        let round = |ios, cpu| Measurement { ios, wall_ns: 1_000_000_000, user_cpu_ns: cpu, ..Default::default() };
        let base = [round(100, 1000), round(50, 500)];
        let cell = CellResult::new("x", vec![round(90, 990), round(45, 495)], Some(&base)).unwrap();
        assert!((cell.iops_ratio.unwrap().median() - 0.9).abs() < 1e-12);
        assert!((cell.cpu_ratio.unwrap().median() - 1.1).abs() < 1e-12);
        assert!(CellResult::new("x", Vec::new(), None).is_err());
    }
}
