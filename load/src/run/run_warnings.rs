//! Warnings that a run finds in its job, its targets and its results.

use crate::{
    OpenTarget,
    clock::{self, TimePoint},
    job::{Caching, Job, Load, Phase, Rate},
    machine::{Machine, OtherLoad},
    record::{PhaseRecord, ThreadRecord},
    run::conductor::PhaseOutcome,
    warning::Warning,
};

/// A load below this share of its queue depth gets a warning.
const DEPTH_SHARE: f64 = 0.9;
/// A load below this share of its rate gets a warning.
const RATE_SHARE: f64 = 0.98;
/// Processors busy with other load above which there is a warning.
const OTHERS_BUSY: f64 = 0.25;
/// Stolen processors above which there is a warning.
const STOLEN: f64 = 0.05;

/// The warnings of a run.
#[derive(Debug, Default)]
pub(crate) struct RunWarnings(Vec<Warning>);

impl RunWarnings {
    /// Finds the warnings that do not depend on results.
    pub(crate) fn before(machine: &Machine, targets: &[OpenTarget], job: &Job) -> Self {
        let mut warnings = Vec::new();
        if cfg!(debug_assertions) {
            warnings.push(Warning::DebugBuild);
        }
        let asked_direct = matches!(job.cache, Caching::Direct | Caching::DirectWriteThrough);
        let is_cached = |target: &&OpenTarget| matches!(target.cache, Caching::Cached | Caching::WriteThrough);
        let names = |which: &dyn Fn(&&OpenTarget) -> bool| -> Vec<String> {
            targets.iter().filter(which).map(|target| target.name.clone()).collect()
        };
        let cached = names(&|target| is_cached(target) && !target.is_export());
        if asked_direct && !cached.is_empty() {
            warnings.push(Warning::DirectNotHonoured { targets: cached });
        }
        let exports = names(&|target| target.is_export());
        if asked_direct && !exports.is_empty() {
            warnings.push(Warning::CacheOfServer { targets: exports });
        }
        let is_export = |number: &usize| targets.get(*number).is_some_and(OpenTarget::is_export);
        let loads = job.phases.iter().flat_map(|phase| phase.loads.iter().map(move |load| (phase, load)));
        for (phase, load) in loads {
            let chosen: Vec<usize> =
                if load.targets.is_empty() { (0..targets.len()).collect() } else { load.targets.clone() };
            let waits_for_several = load.across_targets && chosen.len() > 1 || load.is_paced();
            if waits_for_several && chosen.iter().any(is_export) {
                warnings.push(Warning::Polls { load: format!("phase \"{}\", {}", phase.name, load.title()) });
            }
        }
        if !machine.clock_source.is_empty() && !clock::is_fast(&machine.clock_source) {
            warnings.push(Warning::SlowClock { source: machine.clock_source.clone() });
        }
        Self(warnings)
    }

    /// Adds the warnings of a phase that has ended.
    pub(crate) fn after_phase(&mut self, phase: &Phase, ended: &PhaseOutcome) {
        if ended.record.window_ns == 0 {
            return;
        }
        if let Some(steady) = &ended.record.steady
            && (steady.reached_ns.is_none() || steady.left_ns.is_some())
        {
            self.0.push(Warning::NotSteady {
                phase: phase.name.clone(),
                was_reached: steady.reached_ns.is_some(),
                range: steady.range,
                slope: steady.slope,
            });
        }
        for (number, load) in phase.loads.iter().enumerate() {
            let name = || format!("phase \"{}\", {}", phase.name, load.title());
            let of_load = |thread: &&ThreadRecord| thread.load as usize == number;
            let threads: Vec<&ThreadRecord> = ended.record.threads.iter().filter(of_load).collect();
            if let Some(rate) = load.rate {
                let share = rate_share(rate, &threads, &ended.record);
                let overdue = threads.iter().map(|thread| thread.overdue).sum();
                if (share < RATE_SHARE || overdue > 0) && phase.count.is_none() {
                    self.0.push(Warning::RateNotKept { load: name(), share, overdue });
                }
            } else if fills_its_depth(load) && phase.count.is_none() {
                let asked: f64 = threads.iter().map(|thread| f64::from(thread.queue_depth)).sum();
                let in_flight_ns: f64 =
                    threads.iter().map(|thread| thread.reads.service.sum_ns + thread.writes.service.sum_ns).sum();
                let reached = in_flight_ns / ended.record.window_ns as f64;
                let measured =
                    threads.iter().any(|thread| thread.reads.service.count + thread.writes.service.count > 0);
                if measured && reached < DEPTH_SHARE * asked {
                    self.0.push(Warning::DepthNotReached { load: name(), reached, asked });
                }
            }
        }
    }

    /// Adds the warnings about the machine during the run, and returns all warnings.
    pub(crate) fn after_all(mut self, other_load: &OtherLoad, began: &TimePoint) -> Vec<Warning> {
        if let Some(by_s) = began.stepped_s() {
            self.0.push(Warning::ClockStepped { by_s });
        }
        let (busy, stolen) = other_load.since();
        if busy > OTHERS_BUSY {
            self.0.push(Warning::OtherLoad { cpus: busy });
        }
        if stolen > STOLEN {
            self.0.push(Warning::StolenTime { cpus: stolen });
        }
        self.0
    }
}

/// Whether a load should always have its whole queue depth in flight.
fn fills_its_depth(load: &Load) -> bool {
    load.burst.is_none() && load.think_time.is_zero() && load.flush_every == 0
}

fn rate_share(rate: Rate, threads: &[&ThreadRecord], record: &PhaseRecord) -> f64 {
    let of_both = |figure: &dyn Fn(&crate::record::DirectionRecord) -> u64| -> f64 {
        threads.iter().map(|thread| (figure(&thread.reads) + figure(&thread.writes)) as f64).sum()
    };
    let (reached, asked_each) = match rate {
        Rate::Iops { per_thread } => (of_both(&|direction| direction.ios), per_thread),
        Rate::Throughput { per_thread } => (of_both(&|direction| direction.bytes), per_thread.0 as f64),
    };
    reached / record.window_s() / (asked_each * threads.len() as f64)
}
