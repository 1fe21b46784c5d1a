//! A phase on all agents: armed, started at the same time, followed, taken.
//!
//! ```text
//!   arm ─▶ all armed ─▶ start at T, which each agent gets by its own clock
//!                         └─ too late for one? stop all, and try again with more time
//!     a thread for each agent: look ─▶ Gathering       this thread: progress, steady state, loss
//!   all measured ─▶ take the records ─▶ compare clocks again
//! ```
//!
//! A phase that waits for the steady state is judged by the sum of all agents, and its window opens
//! at the same time on all.

use super::{
    gathering::Gathering,
    options::{FleetOptions, OnLoss},
    remote::Remote,
    together::{all_or_failed, each, seeded},
};
use crate::{
    clock,
    error::{FleetError, Result},
    merge::{self, PhaseOfAll},
    message::{Arm, Ask, At, Measured, Stage},
};
use diskwright_load::{
    Job,
    job::Phase,
    record::{End, Head, Loss, RUN_SCHEMA, Run},
    run::{Snapshot, SnapshotRecord, Stage as Part},
    steady::Settling,
};
use std::{
    ops::Range,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

/// Time between two reports of progress.
const LOOK: Duration = Duration::from_millis(250);
/// Shortest time from the order to start to the start.
const LEAD: Duration = Duration::from_millis(200);
/// How much longer it is for each agent: the orders are sent by threads on a few cores.
const LEAD_PER_AGENT: Duration = Duration::from_millis(2);
/// How often a start is tried.
const TRIES: u32 = 4;
/// Time from the decision that the state is steady to the window.
const WINDOW_LEAD_NS: u64 = 3_000_000_000;

/// An agent in a report of progress.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentLook {
    /// Name of the agent in the plan.
    pub name: String,
    /// Figures of the last second; `None` before the first ones came.
    pub snapshot: Option<SnapshotRecord>,
    /// Why the agent is lost; `None` if it is not.
    pub lost: Option<String>,
}

/// Progress of a fleet.
#[derive(Debug)]
pub struct FleetLook<'a> {
    /// The sum.
    pub sum: Snapshot<'a>,
    /// The agents.
    pub agents: &'a [AgentLook],
}

/// Receives the progress of a fleet.
pub trait FleetWatch: Sync {
    /// Receives progress. `false` stops the run, which keeps what was measured.
    fn update(&self, look: &FleetLook<'_>) -> bool;
}

impl<F: Fn(&FleetLook<'_>) -> bool + Sync> FleetWatch for F {
    fn update(&self, look: &FleetLook<'_>) -> bool {
        self(look)
    }
}

/// A cell that is measured.
pub(super) struct Measuring<'a> {
    options: &'a FleetOptions,
    run: &'a str,
    cell: u64,
    jobs: Vec<Job>,
    phases: Vec<PhaseOfAll>,
    lost: Vec<Loss>,
    is_stopped: bool,
    head: Head,
    begun: Instant,
}

/// What the threads of the agents and the one that leads them share during a phase.
struct Following<'a> {
    at: &'a At,
    phase: &'a Phase,
    gathering: Mutex<Gathering>,
    looks: Mutex<Vec<AgentLook>>,
    lost: Mutex<Vec<Loss>>,
    /// Start of the window of a phase that waits for the steady state.
    window_start_ns: Mutex<Option<u64>>,
    stop: AtomicBool,
    on_loss: OnLoss,
    active: AtomicUsize,
    /// Woken by the last agent that is done: a sweep has hundreds of short phases.
    leader: Thread,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Following<'_> {
    /// An agent is lost, or has ended before its time.
    fn lose(&self, agent: usize, why: String) {
        let since_ns = lock(&self.gathering).lose(agent);
        lock(&self.looks)[agent].lost = Some(why.clone());
        lock(&self.lost).push(Loss { agent: agent as u32, phase: self.phase.name.clone(), since_ns, why });
        if self.on_loss == OnLoss::Stop {
            self.stop.store(true, Ordering::Relaxed);
        }
    }

    /// Follows an agent to the end of the phase, and takes its record.
    fn follow(&self, number: usize, remote: &mut Remote) -> Option<Measured> {
        let found = self.to_its_end(number, remote);
        if let Err(error) = &found {
            let why = error.to_string();
            // The name is told with the loss.
            let why = why.strip_prefix(&format!("{}: ", remote.name())).unwrap_or(&why).to_owned();
            remote.lost = Some(why.clone());
            self.lose(number, why);
        }
        if self.active.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.leader.unpark();
        }
        found.ok()
    }

    fn to_its_end(&self, number: usize, remote: &mut Remote) -> Result<Measured> {
        let (mut seen, mut is_stopped, mut has_window) = (0, false, self.phase.steady_within.is_none());
        loop {
            if !is_stopped && self.stop.load(Ordering::Relaxed) {
                remote.order(&Ask::Stop { run: self.at.run.clone() })?;
                is_stopped = true;
            }
            let window_start_ns = *lock(&self.window_start_ns);
            if let Some(start_ns) = window_start_ns.filter(|_| !has_window) {
                remote.order(&Ask::Window { at: self.at.clone(), start_ns })?;
                has_window = true;
            }
            let state = remote.look(seen)?;
            seen = state.first_interval.saturating_add(state.intervals.len() as u64);
            let wrong = |what| FleetError::Protocol { name: remote.name().to_owned(), what };
            let mut gathering = lock(&self.gathering);
            state.intervals.into_iter().try_for_each(|interval| gathering.push(number, interval)).map_err(wrong)?;
            drop(gathering);
            lock(&self.looks)[number].snapshot = state.snapshot;
            match state.stage {
                Stage::Armed(at) | Stage::Running(at) if at == *self.at => {}
                Stage::Measured(at) if at == *self.at => break,
                Stage::Failed { why } => return Err(FleetError::Refused { name: remote.name().to_owned(), why }),
                _ => {
                    let why = "it has left the run: the program was started again, or gave the run up".into();
                    return Err(FleetError::Refused { name: remote.name().to_owned(), why });
                }
            }
        }
        let missing = "it does not have the record of the phase";
        let measured = remote
            .take(self.at)?
            .ok_or_else(|| FleetError::Protocol { name: remote.name().to_owned(), what: missing.into() })?;
        if measured.phase.window_ns < self.phase.duration.as_nanos() && !is_stopped {
            let why = match &measured.end {
                End::Failed { first, .. } => format!("its requests failed: {first}"),
                _ => "its phase ended before its time".into(),
            };
            // Its job has ended, so it cannot take part in later phases.
            remote.lost = Some(why.clone());
            self.lose(number, why);
        } else {
            lock(&self.gathering).done(number);
        }
        // Without it the drift is not known, which is no reason to lose the record.
        let _ = remote.compare_clocks();
        Ok(measured)
    }
}

impl<'a> Measuring<'a> {
    pub(super) fn begin(options: &'a FleetOptions, run: &'a str, cell: u64, jobs: Vec<Job>) -> Self {
        Self {
            options,
            run,
            cell,
            jobs,
            phases: Vec::new(),
            lost: Vec::new(),
            is_stopped: false,
            head: Head::begin(RUN_SCHEMA),
            begun: Instant::now(),
        }
    }

    fn at(&self, phase: usize) -> At {
        At { run: self.run.to_owned(), cell: self.cell, phase: phase as u32 }
    }

    /// Measures all phases. Those of which the agents have the records were measured before the
    /// controller was started again, and are not measured twice.
    pub(super) fn all_phases(&mut self, remotes: &mut [Remote], watch: &dyn FleetWatch) -> Result<()> {
        if self.recover(remotes)? {
            return Ok(());
        }
        for index in 0..self.jobs[0].phases.len() {
            if self.is_stopped || remotes.iter().all(|remote| remote.lost.is_some()) {
                break;
            }
            self.one_phase(remotes, index, watch)?;
        }
        Ok(())
    }

    /// Takes the records of all phases from the agents, if all of them have all.
    fn recover(&mut self, remotes: &mut [Remote]) -> Result<bool> {
        let phases = self.jobs[0].phases.clone();
        let ats: Vec<At> = (0..phases.len()).map(|index| self.at(index)).collect();
        let found = all_or_failed(each(remotes, |_, remote| {
            let mut found = Vec::new();
            for (at, phase) in ats.iter().zip(&phases) {
                match remote.take(at)? {
                    Some(measured) if measured.phase.window_ns >= phase.duration.as_nanos() => found.push(measured),
                    _ => return Ok(None),
                }
            }
            Ok(Some(found))
        }))?;
        let Some(found) = found.into_iter().collect::<Option<Vec<_>>>() else { return Ok(false) };
        for index in 0..phases.len() {
            let parts: Vec<Option<Measured>> = found.iter().map(|agent| agent.get(index).cloned()).collect();
            let first = parts.iter().flatten().zip(remotes.iter()).filter_map(|(part, remote)| {
                let start_ns = remote.clock()?.to_controller_ns(part.start_ns);
                u64::try_from(start_ns.max(0)).ok()
            });
            self.phases.push(PhaseOfAll {
                start_ns: first.min().unwrap_or(0),
                // Percentiles of an interval need the histograms, which nobody has any more.
                series: merge::rates(parts.iter().flatten().map(|part| part.phase.series.as_slice())),
                sent: vec![Vec::new(); parts.len()],
                common_ns: 0..0,
                sums: vec![Default::default(); parts.len()],
                steady: parts.iter().flatten().find_map(|part| part.phase.steady.clone()),
                parts,
            });
        }
        Ok(true)
    }

    fn one_phase(&mut self, remotes: &mut [Remote], index: usize, watch: &dyn FleetWatch) -> Result<()> {
        let at = self.at(index);
        let start_ns = self.start(remotes, &at)?;
        let phase = self.jobs[0].phases[index].clone();
        let mut gathering = Gathering::new(remotes.len(), window_of(&phase));
        for (number, _) in remotes.iter().enumerate().filter(|(_, remote)| remote.lost.is_some()) {
            gathering.leave_out(number);
        }
        let looks = remotes.iter().map(|remote| AgentLook {
            name: remote.name().to_owned(),
            snapshot: None,
            lost: remote.lost.clone(),
        });
        let following = Following {
            at: &at,
            phase: &phase,
            gathering: Mutex::new(gathering),
            looks: Mutex::new(looks.collect()),
            lost: Mutex::new(Vec::new()),
            window_start_ns: Mutex::new(None),
            stop: AtomicBool::new(false),
            on_loss: self.options.on_loss,
            active: AtomicUsize::new(remotes.iter().filter(|remote| remote.lost.is_none()).count()),
            leader: thread::current(),
        };
        let mut settling =
            phase.steady_within.map(|within| Settling::new(within.as_nanos(), self.jobs[0].interval.as_nanos()));
        let (parts, is_stopped) = thread::scope(|scope| {
            let following = &following;
            let parts = scope.spawn(move || {
                each(remotes, |number, remote| match remote.lost {
                    None => following.follow(number, remote),
                    Some(_) => None,
                })
            });
            let is_stopped = self.lead(following, index, start_ns, settling.as_mut(), watch);
            (parts.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), is_stopped)
        });
        self.is_stopped |= is_stopped || following.stop.load(Ordering::Relaxed);
        self.lost.extend(following.lost.into_inner().unwrap_or_else(PoisonError::into_inner));
        let gathering = following.gathering.into_inner().unwrap_or_else(PoisonError::into_inner);
        let (common_ns, sums) = gathering.common();
        self.phases.push(PhaseOfAll {
            start_ns,
            parts,
            series: gathering.series().to_vec(),
            sent: gathering.sent(),
            common_ns,
            sums,
            steady: settling.map(|settling| settling.record()),
        });
        Ok(())
    }

    /// Arms the phase on all agents and starts it. Returns the start by the controller's clock.
    fn start(&self, remotes: &mut [Remote], at: &At) -> Result<u64> {
        let mut lead = LEAD + LEAD_PER_AGENT * remotes.len() as u32;
        for _ in 0..TRIES {
            let armed = each(remotes, |number, remote| match remote.lost {
                Some(_) => Ok(()),
                None => remote.arm(Arm {
                    at: at.clone(),
                    job: seeded(self.jobs[number].clone(), number),
                    keep_going: self.options.keep_going,
                }),
            });
            all_or_failed(armed)?;
            let start_ns = clock::now_ns() + lead.as_nanos() as u64;
            let started = each(remotes, |_, remote| match remote.lost {
                Some(_) => Ok(true),
                None => remote.start(at, start_ns),
            });
            if all_or_failed(started)?.iter().all(|started| *started) {
                return Ok(start_ns);
            }
            // One was told too late, and the others start alone: nothing of this counts.
            all_or_failed(each(remotes, |_, remote| match remote.lost {
                Some(_) => Ok(()),
                None => remote.disarm(self.run),
            }))?;
            if at.phase > 0 {
                break;
            }
            lead *= 4;
        }
        Err(FleetError::Plan {
            what: "the agents could not be started at the same time: orders took too long to reach them".into(),
            hint: "use a faster network, or fewer agents on one machine".into(),
        })
    }

    /// Reports progress, and decides when the window of a phase opens that waits for the steady
    /// state. Returns whether the user stopped it.
    fn lead(
        &self,
        following: &Following<'_>,
        index: usize,
        start_ns: u64,
        mut settling: Option<&mut Settling>,
        watch: &dyn FleetWatch,
    ) -> bool {
        let mut is_stopped = false;
        while following.active.load(Ordering::Relaxed) > 0 {
            let looked = Instant::now();
            while following.active.load(Ordering::Relaxed) > 0 {
                match LOOK.checked_sub(looked.elapsed()) {
                    Some(left) if !left.is_zero() => thread::park_timeout(left),
                    _ => break,
                }
            }
            let elapsed_ns = clock::now_ns().saturating_sub(start_ns);
            if let Some(settling) = settling.as_deref_mut() {
                let mut gathering = lock(&following.gathering);
                settling.follow(gathering.series());
                let is_warm = elapsed_ns >= following.phase.warm_up.as_nanos();
                let mut window = lock(&following.window_start_ns);
                if window.is_none() && is_warm && settling.is_over(elapsed_ns) {
                    let interval_ns = self.jobs[0].interval.as_nanos().max(1);
                    let start_ns = (elapsed_ns + WINDOW_LEAD_NS).next_multiple_of(interval_ns);
                    *window = Some(start_ns);
                    gathering.set_window(start_ns..start_ns.saturating_add(following.phase.duration.as_nanos()));
                }
            }
            let looks = lock(&following.looks).clone();
            let sum = self.sum(following, index, elapsed_ns, &looks, settling.as_deref());
            if !is_stopped && !watch.update(&FleetLook { sum, agents: &looks }) {
                is_stopped = true;
                following.stop.store(true, Ordering::Relaxed);
            }
        }
        is_stopped
    }

    /// The sum of the agents' figures. Percentiles are those of the last interval that all have
    /// sent.
    fn sum<'b>(
        &'b self,
        following: &Following<'b>,
        index: usize,
        elapsed_ns: u64,
        looks: &[AgentLook],
        settling: Option<&Settling>,
    ) -> Snapshot<'b> {
        let snapshots: Vec<Snapshot<'_>> = looks
            .iter()
            .filter(|look| look.lost.is_none())
            .filter_map(|look| Some(look.snapshot?.as_snapshot(&following.phase.name)))
            .collect();
        // The sum of nothing is -0 by `sum`, and would be shown so.
        let sum_of = |figure: fn(&Snapshot<'_>) -> f64| snapshots.iter().map(figure).fold(0.0, |sum, more| sum + more);
        let last = lock(&following.gathering).series().last().copied().unwrap_or_default();
        let before = &self.jobs[0].phases[..index];
        let planned = |phases: &[Phase]| -> u64 {
            phases
                .iter()
                .map(|phase| (phase.warm_up.as_nanos() + phase.duration.as_nanos()) + phase.cool_down.as_nanos())
                .sum()
        };
        let remaining_ns = snapshots.iter().filter_map(|snapshot| snapshot.remaining_ns).max();
        let past_ns = planned(before) + elapsed_ns;
        Snapshot {
            phase: &following.phase.name,
            phase_index: index,
            phases: self.jobs[0].phases.len(),
            stage: snapshots.first().map_or(Part::WarmUp, |snapshot| snapshot.stage),
            elapsed_ns,
            remaining_ns,
            done: remaining_ns.map(|left_ns| past_ns as f64 / (past_ns + left_ns).max(1) as f64),
            iops: sum_of(|snapshot| snapshot.iops),
            mb_per_s: sum_of(|snapshot| snapshot.mb_per_s),
            p50_ns: last.p50_ns,
            p99_ns: last.p99_ns,
            cpus: sum_of(|snapshot| snapshot.cpus),
            errors: snapshots.iter().map(|snapshot| snapshot.errors).fold(0, u64::saturating_add),
            steady: settling.map(Settling::nearness),
        }
    }

    /// The record of all agents as one.
    pub(super) fn merged(self, remotes: &[Remote]) -> Run {
        let Self { options, run, jobs, phases, lost, is_stopped, mut head, begun, .. } = self;
        head.took_ns = begun.elapsed().as_nanos() as u64;
        let agents = remotes.iter().map(Remote::facts).collect();
        merge::merged(merge::Parts { run, agents, jobs, phases, lost, is_stopped, head, labels: &options.labels })
    }
}

/// The window of a phase that is known before its start.
fn window_of(phase: &Phase) -> Option<Range<u64>> {
    let start_ns = phase.warm_up.as_nanos();
    phase.steady_within.is_none().then(|| start_ns..start_ns.saturating_add(phase.duration.as_nanos()))
}
