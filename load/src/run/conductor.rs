//! The conductor of a phase: enters what the threads counted, reads the cores' times at both ends
//! of the window, tells those who watch, and writes the record.
//!
//! It sleeps between events, and never touches what a measuring thread uses. Times are those of the
//! monotonic clock, from the beginning of the phase: a wall clock that steps changes nothing.

use crate::{
    clock::CpuTime,
    job::{Job, Phase},
    record::{PhaseRecord, SeriesPoint, ThreadRecord},
    run::{
        cpu::{self, Cores, CounterRate},
        ledger::Ledger,
        plan::ThreadPlan,
        shared::{NEVER, Shared},
        tally::Tally,
        thread::Event,
        watch::{Nearness, Snapshot, Stage, Watch},
    },
    steady::{self, Rounds, Tracker},
};
use std::{
    sync::mpsc::{Receiver, RecvTimeoutError, Sender},
    time::Duration,
};

/// Snapshots come at least this far apart.
const LOOK_NS: u64 = 250_000_000;
/// How long after the end of a tick a snapshot is taken: a thread that sleeps between due times
/// counts the tick this much later.
const LOOK_AFTER_TICK_NS: u64 = 50_000_000;

/// A phase that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) record: PhaseRecord,
    /// The watcher wanted it to end.
    pub(crate) stopped: bool,
    /// The first failure, and how many.
    pub(crate) failures: Option<(String, u64)>,
}

/// Where a phase stands in its run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Progress {
    pub(crate) index: usize,
    /// Time planned for the phases before it, and for those behind it; none where a count decides.
    pub(crate) before_ns: Option<u64>,
    pub(crate) behind_ns: Option<u64>,
}

/// The wait for the steady state, and the watch over it during the window.
#[derive(Debug)]
struct Settling {
    tracker: Tracker,
    within_ns: u64,
    round_ns: u64,
    rounds: Rounds,
}

impl Settling {
    fn new(within_ns: u64, interval_ns: u64) -> Self {
        let round_ns = steady::round_for(within_ns, interval_ns);
        Self { tracker: Tracker::new(), within_ns, round_ns, rounds: Rounds::new(round_ns) }
    }

    /// Shows the tracker the rounds that are complete.
    fn follow(&mut self, series: &[SeriesPoint]) {
        for figure in self.rounds.follow(series) {
            self.tracker.push(figure);
        }
    }

    fn nearness(&self) -> Nearness {
        let window = self.tracker.window();
        Nearness {
            rounds: self.rounds.complete() as usize,
            range: window.map_or(0.0, |window| window.range),
            slope: window.map_or(0.0, |window| window.slope),
        }
    }
}

/// One thread on one target, as it will stand in the record.
#[derive(Debug, Clone, Copy)]
struct Outline {
    load: u32,
    target: u32,
    queue_depth: u32,
}

/// See the module.
pub(crate) struct Conductor<'a> {
    phase: &'a Phase,
    progress: Progress,
    phases: usize,
    shared: &'a Shared,
    outlines: Vec<Vec<Outline>>,
    ledger: Ledger,
    inbox: Receiver<Event>,
    /// The ways back to the threads.
    pub(crate) returns: Vec<Sender<Vec<Tally>>>,
    watch: &'a dyn Watch,
    counter: CounterRate,
    cores_start: Option<Cores>,
    cores_end: Option<Cores>,
    /// When there was a snapshot last, and the CPU time then.
    last_look: (u64, CpuTime),
    next_look_ns: u64,
    stopped: bool,
    /// When the last thread had its last completion.
    last_ns: u64,
    settling: Option<Settling>,
}

impl<'a> Conductor<'a> {
    pub(crate) fn new(
        job: &'a Job,
        progress: Progress,
        shared: &'a Shared,
        plans: &[ThreadPlan],
        inbox: Receiver<Event>,
        watch: &'a dyn Watch,
    ) -> Self {
        let outline = |plan: &ThreadPlan| -> Vec<Outline> {
            let load = plan.load as u32;
            let lanes = plan.lanes.iter();
            lanes
                .map(|lane| Outline { load, target: lane.target as u32, queue_depth: lane.rules.queue_depth })
                .collect()
        };
        let outlines: Vec<Vec<Outline>> = plans.iter().map(outline).collect();
        let targets_of_threads: Vec<usize> = outlines.iter().map(Vec::len).collect();
        let interval_ns = job.interval.as_nanos();
        Self {
            phase: &job.phases[progress.index],
            progress,
            phases: job.phases.len(),
            shared,
            ledger: Ledger::new(&targets_of_threads, interval_ns, shared.ticks),
            outlines,
            inbox,
            returns: Vec::new(),
            watch,
            counter: CounterRate::begin(),
            cores_start: None,
            cores_end: None,
            last_look: (0, CpuTime::default()),
            next_look_ns: LOOK_NS + LOOK_AFTER_TICK_NS,
            stopped: false,
            last_ns: 0,
            settling: job.phases[progress.index]
                .steady_within
                .map(|within| Settling::new(within.as_nanos(), interval_ns)),
        }
    }

    fn now_ns(&self) -> u64 {
        self.shared.origin().elapsed().as_nanos() as u64
    }

    /// Works until all threads have ended.
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
                    self.ledger.enter(&cut, &window);
                    self.last_ns = self.last_ns.max(cut.until_ns);
                    self.settle();
                    cut.tallies.iter_mut().for_each(Tally::clear);
                    // A thread that has ended needs no more.
                    let _ = self.returns[cut.thread].send(cut.tallies);
                }
                Ok(Event::Ended(thread)) => {
                    running -= 1;
                    self.ledger.ended(thread);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let now_ns = self.now_ns();
        self.keep_time(now_ns);
    }

    /// Opens the window where the steady state is waited for, when it has come, or the time for it
    /// is over.
    fn settle(&mut self) {
        let Some(settling) = &mut self.settling else { return };
        settling.follow(self.ledger.series());
        let now_ns = self.shared.origin().elapsed().as_nanos() as u64;
        let is_over = settling.tracker.reached().is_some() || now_ns >= settling.within_ns;
        if self.shared.window_start_ns() == NEVER && is_over && now_ns >= self.phase.warm_up.as_nanos() {
            // A tick that no thread has begun: the one after the next.
            let ticks = self.shared.ticks;
            let start_ns = ticks.end_of(ticks.end_of(now_ns));
            let end_ns = start_ns.saturating_add(self.phase.duration.as_nanos());
            self.shared.plan(start_ns, end_ns, end_ns.saturating_add(self.phase.cool_down.as_nanos()));
        }
    }

    /// When there is something to do next.
    fn next_ns(&self, now_ns: u64) -> u64 {
        [self.shared.window_start_ns(), self.shared.window_end_ns()]
            .into_iter()
            .filter(|boundary_ns| *boundary_ns > now_ns)
            .fold(self.next_look_ns, u64::min)
    }

    /// Does what is due: the cores' times, a snapshot.
    fn keep_time(&mut self, now_ns: u64) {
        if now_ns >= self.shared.window_start_ns() && self.cores_start.is_none() {
            self.cores_start = Some(Cores::now());
            self.shared.cpu_start.take();
        }
        if now_ns >= self.shared.window_end_ns() && self.cores_end.is_none() {
            self.cores_end = Some(Cores::now());
            self.shared.cpu_end.take();
        }
        if now_ns >= self.next_look_ns && now_ns < self.shared.stop_ns() {
            self.next_look_ns = now_ns + LOOK_NS;
            let cpu = CpuTime::of_process();
            let spent_ns = (cpu - self.last_look.1).total_ns() as f64;
            let cpus = spent_ns / (now_ns - self.last_look.0) as f64;
            self.last_look = (now_ns, cpu);
            if !self.watch.look(&self.snapshot(now_ns, cpus)) {
                self.stopped = true;
                self.shared.stop(self.now_ns());
            }
        }
    }

    fn snapshot(&self, now_ns: u64, cpus: f64) -> Snapshot<'a> {
        let lately = self.ledger.lately(now_ns);
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
            parts.iter().fold(settling.within_ns, |sum, part| sum.saturating_add(part.as_nanos()))
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
            iops: lately.iops,
            mb_per_s: lately.mb_per_s,
            p50_ns: lately.p50_ns,
            p99_ns: lately.p99_ns,
            cpus,
            errors: self.shared.errors(),
            steady: self.settling.as_ref().map(Settling::nearness),
        }
    }

    /// The record, when all threads have ended.
    pub(crate) fn finish(self) -> Ended {
        let window_start_ns = self.shared.window_start_ns().min(self.last_ns);
        let window_end_ns = self.shared.window_end_ns().min(self.last_ns).max(window_start_ns);
        let cores = match (self.cores_start, self.cores_end) {
            (Some(start), end) => end.unwrap_or_else(Cores::now).since(&start),
            (None, _) => Vec::new(),
        };
        let cpu = cpu::record(&self.shared.cpu_start, &self.shared.cpu_end, cores, self.counter.hz());
        let interval_ns = self.ledger.interval_ns();
        let std_devs = self.ledger.iops_std_devs();
        let (totals, series) = self.ledger.finish(self.last_ns);
        let mut threads = Vec::new();
        for (number, ((outlines, totals), std_devs)) in self.outlines.iter().zip(totals).zip(std_devs).enumerate() {
            for ((outline, totals), iops_std_dev) in outlines.iter().zip(totals).zip(std_devs) {
                let (reads, writes, flushes) = totals.record();
                threads.push(ThreadRecord {
                    thread: number as u32,
                    load: outline.load,
                    target: outline.target,
                    queue_depth: outline.queue_depth,
                    reads,
                    writes,
                    flushes,
                    overdue: totals.overdue,
                    iops_std_dev,
                });
            }
        }
        Ended {
            record: PhaseRecord {
                name: self.phase.name.clone(),
                window_ns: window_end_ns - window_start_ns,
                window_start_ns,
                threads,
                series,
                interval_ns,
                cpu,
                steady: self.settling.map(|settling| settling.tracker.record(settling.round_ns)),
            },
            stopped: self.stopped,
            failures: self.shared.failures(),
        }
    }
}
