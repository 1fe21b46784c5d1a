//! The conductor of a phase: collects the counts of the threads, reads the CPU times of the cores
//! at both ends of the window, sends snapshots to the watcher, and makes the record.
//!
//! It sleeps between events and shares no counters with a measuring thread. Times are those of the
//! monotonic clock, from the start of the phase, so a step of the wall clock has no effect.

use crate::{
    clock::CpuTime,
    job::{Job, Phase},
    record::{PhaseRecord, ThreadRecord},
    run::{
        Coordinator,
        aggregator::Aggregator,
        cpu::{self, Cores, CounterRate},
        members::Members,
        plan::ThreadPlan,
        shared::{NEVER, Shared},
        tally::Tally,
        thread::Event,
        watch::{Snapshot, Stage, Watch},
    },
    steady::Settling,
    target::OpenTarget,
};
use std::{
    sync::mpsc::{Receiver, RecvTimeoutError, Sender},
    time::Duration,
};

/// Shortest time between two snapshots.
const LOOK_NS: u64 = 250_000_000;
/// Time from the end of a tick to a snapshot. A thread that sleeps until its next request sends the
/// counts of the tick up to this much later.
const LOOK_AFTER_TICK_NS: u64 = 50_000_000;

/// A phase that has ended.
#[derive(Debug)]
pub(crate) struct PhaseOutcome {
    pub(crate) record: PhaseRecord,
    /// The watcher stopped the phase.
    pub(crate) stopped: bool,
    /// The first failure, and the number of failures.
    pub(crate) failures: Option<(String, u64)>,
}

/// Position of a phase in its run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Progress {
    pub(crate) index: usize,
    /// Planned time of the phases before and after this one; `None` where a phase ends by a count.
    pub(crate) before_ns: Option<u64>,
    pub(crate) behind_ns: Option<u64>,
}

/// The facts about a lane that its record needs.
#[derive(Debug, Clone, Copy)]
struct LaneInfo {
    load: u32,
    target: u32,
    queue_depth: u32,
}

/// The conductor of a phase.
pub(crate) struct Conductor<'a> {
    phase: &'a Phase,
    progress: Progress,
    phases: usize,
    targets: &'a [OpenTarget],
    shared: &'a Shared,
    lane_infos: Vec<Vec<LaneInfo>>,
    aggregator: Aggregator,
    inbox: Receiver<Event>,
    /// One channel for each thread, by which emptied tallies are returned.
    returns: Vec<Sender<Vec<Tally>>>,
    watch: &'a dyn Watch,
    coordinator: Option<&'a dyn Coordinator>,
    counter: CounterRate,
    cores_start: Option<Cores>,
    cores_end: Option<Cores>,
    members_start: Option<Members>,
    members_end: Option<Members>,
    /// Time of the last snapshot, and the CPU time at that moment.
    last_look: (u64, CpuTime),
    next_look_ns: u64,
    stopped: bool,
    /// End of the latest bin of all threads.
    last_ns: u64,
    settling: Option<Settling>,
}

impl<'a> Conductor<'a> {
    #[expect(clippy::too_many_arguments, reason = "the parts of a phase, each used once")]
    pub(crate) fn new(
        job: &'a Job,
        progress: Progress,
        targets: &'a [OpenTarget],
        shared: &'a Shared,
        plans: &[ThreadPlan],
        inbox: Receiver<Event>,
        watch: &'a dyn Watch,
        coordinator: Option<&'a dyn Coordinator>,
    ) -> Self {
        let lane_info = |plan: &ThreadPlan| -> Vec<LaneInfo> {
            let load = plan.load as u32;
            let lanes = plan.lanes.iter();
            lanes
                .map(|lane| LaneInfo { load, target: lane.target as u32, queue_depth: lane.rules.queue_depth })
                .collect()
        };
        let lane_infos: Vec<Vec<LaneInfo>> = plans.iter().map(lane_info).collect();
        let targets_of_threads: Vec<usize> = lane_infos.iter().map(Vec::len).collect();
        let interval_ns = job.interval.as_nanos();
        let mut aggregator = Aggregator::new(&targets_of_threads, interval_ns, shared.ticks);
        if watch.wants_intervals() {
            aggregator.keep_intervals();
        }
        Self {
            phase: &job.phases[progress.index],
            progress,
            phases: job.phases.len(),
            targets,
            shared,
            aggregator,
            lane_infos,
            inbox,
            returns: Vec::new(),
            watch,
            coordinator,
            counter: CounterRate::begin(),
            cores_start: None,
            cores_end: None,
            members_start: None,
            members_end: None,
            last_look: (0, CpuTime::default()),
            next_look_ns: LOOK_NS + LOOK_AFTER_TICK_NS,
            stopped: false,
            last_ns: 0,
            settling: job.phases[progress.index]
                .steady_within
                .map(|within| Settling::new(within.as_nanos(), interval_ns)),
        }
    }

    /// Takes the channels of the threads; `None` if the phase does not start.
    pub(crate) fn started(&mut self, returns: Option<Vec<Sender<Vec<Tally>>>>) {
        self.stopped = returns.is_none();
        self.returns = returns.unwrap_or_default();
    }

    fn now_ns(&self) -> u64 {
        self.shared.origin().elapsed().as_nanos() as u64
    }

    /// Handles events until all threads have ended.
    pub(crate) fn conduct(&mut self) {
        self.last_look = (self.now_ns(), CpuTime::of_process());
        let mut running = self.returns.len();
        while running > 0 {
            let now_ns = self.now_ns();
            self.keep_time(now_ns);
            let sleep = Duration::from_nanos(self.next_ns(now_ns).saturating_sub(now_ns));
            match self.inbox.recv_timeout(sleep) {
                Ok(Event::Cut(mut cut)) => {
                    let window = self.shared.window_start_ns()..self.shared.window_end_ns();
                    self.aggregator.enter(&cut, &window);
                    self.last_ns = self.last_ns.max(cut.until_ns);
                    self.hand_over();
                    self.settle();
                    cut.tallies.iter_mut().for_each(Tally::clear);
                    // Sending fails for a thread that has ended and needs no tallies.
                    let _ = self.returns[cut.thread].send(cut.tallies);
                }
                Ok(Event::PhaseOutcome(thread)) => {
                    running -= 1;
                    self.aggregator.ended(thread);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let now_ns = self.now_ns();
        self.keep_time(now_ns);
        self.hand_over();
    }

    /// Gives closed intervals to the watcher.
    fn hand_over(&mut self) {
        for interval in self.aggregator.take_closed() {
            self.watch.interval(interval);
        }
    }

    /// Opens the window of a phase that waits for the steady state, when it is reached or the time
    /// for it is over.
    fn settle(&mut self) {
        let Some(settling) = &mut self.settling else { return };
        settling.follow(self.aggregator.series());
        let now_ns = self.shared.origin().elapsed().as_nanos() as u64;
        if self.shared.window_start_ns() != NEVER {
            return;
        }
        // The tick after the next, which no thread has started.
        let ticks = self.shared.ticks;
        let earliest_ns = ticks.end_of(ticks.end_of(now_ns));
        let is_over = settling.is_over(now_ns);
        let start_ns = match self.coordinator {
            Some(coordinator) => coordinator.window_start_ns().map(|start_ns| start_ns.max(earliest_ns)),
            None => (is_over && now_ns >= self.phase.warm_up.as_nanos()).then_some(earliest_ns),
        };
        if let Some(start_ns) = start_ns {
            let end_ns = start_ns.saturating_add(self.phase.duration.as_nanos());
            self.shared.plan(start_ns, end_ns, end_ns.saturating_add(self.phase.cool_down.as_nanos()));
        }
    }

    /// Time of the next snapshot or boundary of the window.
    fn next_ns(&self, now_ns: u64) -> u64 {
        [self.shared.window_start_ns(), self.shared.window_end_ns()]
            .into_iter()
            .filter(|boundary_ns| *boundary_ns > now_ns)
            .fold(self.next_look_ns, u64::min)
    }

    /// Reads the CPU times of the cores and takes a snapshot, when they are due.
    fn keep_time(&mut self, now_ns: u64) {
        if now_ns >= self.shared.window_start_ns() && self.cores_start.is_none() {
            self.cores_start = Some(Cores::now());
            self.members_start = Some(Members::now(self.targets));
            self.shared.cpu_start.take();
        }
        if now_ns >= self.shared.window_end_ns() && self.cores_end.is_none() {
            self.cores_end = Some(Cores::now());
            self.members_end = Some(Members::now(self.targets));
            self.shared.cpu_end.take();
        }
        if now_ns >= self.next_look_ns && now_ns < self.shared.stop_ns() {
            self.next_look_ns = now_ns + LOOK_NS;
            let cpu = CpuTime::of_process();
            let spent_ns = (cpu - self.last_look.1).total_ns() as f64;
            let cpus = spent_ns / (now_ns - self.last_look.0) as f64;
            self.last_look = (now_ns, cpu);
            if !self.watch.update(&self.snapshot(now_ns, cpus)) {
                self.stopped = true;
                self.shared.stop(self.now_ns());
            }
        }
    }

    fn snapshot(&self, now_ns: u64, cpus: f64) -> Snapshot<'a> {
        let recent = self.aggregator.recent(now_ns);
        let stage = if now_ns < self.shared.window_start_ns() {
            if self.settling.is_some() && now_ns >= self.phase.warm_up.as_nanos() {
                Stage::Settling
            } else {
                Stage::WarmUp
            }
        } else if now_ns < self.shared.window_end_ns() {
            Stage::Measuring
        } else {
            Stage::CoolDown
        };
        let latest_ns = self.settling.as_ref().map_or(NEVER, |settling| {
            let parts = [self.phase.duration, self.phase.cool_down];
            parts.iter().fold(settling.within_ns(), |sum, part| sum.saturating_add(part.as_nanos()))
        });
        let stop_ns = Some(self.shared.stop_ns().min(latest_ns)).filter(|stop_ns| *stop_ns != NEVER);
        let remaining_ns =
            stop_ns.zip(self.progress.behind_ns).map(|(stop_ns, behind_ns)| stop_ns.saturating_sub(now_ns) + behind_ns);
        let done = self.progress.before_ns.zip(remaining_ns).map(|(before_ns, remaining_ns)| {
            let past_ns = before_ns + now_ns;
            past_ns as f64 / (past_ns + remaining_ns).max(1) as f64
        });
        Snapshot {
            phase: &self.phase.name,
            phase_index: self.progress.index,
            phases: self.phases,
            stage,
            elapsed_ns: now_ns,
            remaining_ns,
            done,
            iops: recent.iops,
            mb_per_s: recent.mb_per_s,
            p50_ns: recent.p50_ns,
            p99_ns: recent.p99_ns,
            cpus,
            errors: self.shared.errors(),
            steady: self.settling.as_ref().map(Settling::nearness),
        }
    }

    /// Makes the record after all threads have ended.
    pub(crate) fn finish(self) -> PhaseOutcome {
        let window_start_ns = self.shared.window_start_ns().min(self.last_ns);
        let window_end_ns = self.shared.window_end_ns().min(self.last_ns).max(window_start_ns);
        let cores = match (self.cores_start, self.cores_end) {
            (Some(start), end) => end.unwrap_or_else(Cores::now).since(&start),
            (None, _) => Vec::new(),
        };
        let members = self.members_start.map_or_else(Vec::new, |start| {
            self.members_end.unwrap_or_else(|| Members::now(self.targets)).since(&start)
        });
        let cpu = cpu::record(&self.shared.cpu_start, &self.shared.cpu_end, cores, self.counter.hz());
        let interval_ns = self.aggregator.interval_ns();
        let std_devs = self.aggregator.iops_std_devs();
        let (totals, series, closed) = self.aggregator.finish(self.last_ns);
        closed.into_iter().for_each(|interval| self.watch.interval(interval));
        let mut threads = Vec::new();
        for (number, ((lane_infos, totals), std_devs)) in self.lane_infos.iter().zip(totals).zip(std_devs).enumerate() {
            for ((lane_info, totals), iops_std_dev) in lane_infos.iter().zip(totals).zip(std_devs) {
                let (reads, writes, flushes) = totals.record();
                threads.push(ThreadRecord {
                    thread: number as u32,
                    load: lane_info.load,
                    target: lane_info.target,
                    queue_depth: lane_info.queue_depth,
                    reads,
                    writes,
                    flushes,
                    overdue: totals.overdue,
                    iops_std_dev,
                });
            }
        }
        PhaseOutcome {
            record: PhaseRecord {
                name: self.phase.name.clone(),
                window_ns: window_end_ns - window_start_ns,
                window_start_ns,
                threads,
                series,
                interval_ns,
                cpu,
                members,
                steady: self.settling.map(|settling| settling.record()),
            },
            stopped: self.stopped,
            failures: self.shared.failures(),
        }
    }
}
