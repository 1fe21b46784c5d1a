//! Runs a phase: starts its threads and runs the conductor until they have ended.
//!
//! ```text
//!   plans ─▶ threads open queues ─▶ all ready, or none starts ─▶ warm-up ─▶ window ─▶ cool-down
//!                                                                  │
//!            record ◀─ conductor (conductor.rs) ◀── cuts ──────────┘
//! ```
//!
//! The conductor runs in the thread of the caller.

use crate::{
    LoadError, OpenTarget, Result,
    job::{Job, Phase},
    run::{
        Buffers, Coordinator, RunOptions,
        buffers::Set,
        conductor::{Conductor, PhaseOutcome, Progress},
        contents::Contents,
        lane::Lane,
        plan::{self, LanePlan, ThreadPlan},
        shared::{NEVER, Shared},
        tally::Tally,
        thread::{Event, Thread},
        ticks::Ticks,
        verify::Generations,
        watch::Watch,
    },
};
use diskwright_store::{BlockQueue, EngineKind, QueueOptions, SharedRing, Slab};
use std::{
    sync::{
        Arc, PoisonError,
        mpsc::{self, Sender},
    },
    thread::{self, Scope},
    time::Instant,
};

/// Runs phase number `progress.index`.
///
/// # Errors
/// A phase that does not fit the targets, and queues that cannot be opened. Later failures are in
/// [`PhaseOutcome::failures`].
pub(crate) fn run(
    job: &Job,
    progress: Progress,
    targets: &[OpenTarget],
    generations: &[Arc<Generations>],
    options: &RunOptions,
    watch: &dyn Watch,
) -> Result<PhaseOutcome> {
    let phase = &job.phases[progress.index];
    let plans = plan::threads_of(job, progress.index, targets, generations)?;
    let ticks = Ticks::new(job.interval.as_nanos());
    let shared = Shared::new(ticks, options.keep_going, options.record_latency);
    plan_window(phase, &shared);
    let contents = Contents::new(job.contents, job.seed);
    let (events, inbox) = mpsc::channel();
    let coordinator = options.coordinator.as_deref();
    let mut conductor = Conductor::new(job, progress, targets, &shared, &plans, inbox, watch, coordinator);
    thread::scope(|scope| {
        let buffers = &options.buffers;
        let engine = job.engine.into();
        let starter = ThreadStarter { scope, shared: &shared, targets, contents: &contents, engine, buffers, events };
        conductor.started(starter.start(plans, phase.count, coordinator)?);
        conductor.conduct();
        Ok::<(), LoadError>(())
    })?;
    Ok(conductor.finish())
}

/// Sets the window and the end of the load where they are known before the start.
fn plan_window(phase: &Phase, shared: &Shared) {
    if phase.count.is_some() {
        return shared.plan(0, NEVER, NEVER);
    }
    if phase.steady_within.is_some() {
        // The conductor sets the window when the steady state is reached.
        return;
    }
    let start_ns = phase.warm_up.as_nanos();
    let end_ns = start_ns.saturating_add(phase.duration.as_nanos());
    shared.plan(start_ns, end_ns, end_ns.saturating_add(phase.cool_down.as_nanos()));
}

/// Starts the threads of a phase.
struct ThreadStarter<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    shared: &'env Shared,
    targets: &'env [OpenTarget],
    contents: &'env Contents,
    engine: EngineKind,
    buffers: &'env Buffers,
    events: Sender<Event>,
}

impl<'scope, 'env: 'scope> ThreadStarter<'scope, 'env> {
    /// Starts all threads, or none. Returns the channels by which emptied tallies are returned to
    /// them; `None` if the coordinator does not start the phase.
    fn start(
        self,
        plans: Vec<ThreadPlan>,
        count: Option<u64>,
        coordinator: Option<&dyn Coordinator>,
    ) -> Result<Option<Vec<Sender<Vec<Tally>>>>> {
        let Self { scope, shared, targets, contents, engine, buffers, events } = self;
        let gate = shared.gate.write().unwrap_or_else(PoisonError::into_inner);
        let (opened, answers) = mpsc::channel();
        let mut returns = Vec::with_capacity(plans.len());
        let mut outcome = Ok(());
        for (number, plan) in plans.into_iter().enumerate() {
            let (back, emptied) = mpsc::channel();
            let (opened, events) = (opened.clone(), events.clone());
            let cpu = plan.cpu;
            let work = move || {
                // Queues are opened in this thread, because a ring belongs to its thread.
                let (answer, ready) = match open_lanes(plan.lanes, targets, contents, engine, buffers) {
                    Ok(ready) => (Ok(()), Some(ready)),
                    Err(error) => (Err(error), None),
                };
                // The receiver waits for the answers of all threads before it opens the gate.
                let _ = opened.send(answer);
                drop(opened);
                drop(shared.gate.read());
                if let (Some(Opened { lanes, ring, mut memory }), false) = (ready, shared.is_aborted()) {
                    let to_make = count.unwrap_or(NEVER);
                    memory.pieces = Thread { number, cpu, lanes, ring, shared, to_make, events, emptied }.run();
                    buffers.keep(memory);
                }
            };
            if let Err(source) = thread::Builder::new().name(format!("load-{number}")).spawn_scoped(scope, work) {
                outcome = Err(LoadError::Queue {
                    target: "the generator".into(),
                    doing: format!("start measuring thread {}", number + 1),
                    source,
                });
                break;
            }
            returns.push(back);
        }
        drop(opened);
        let outcome = answers.into_iter().fold(outcome, Result::and);
        let start = match (&outcome, coordinator) {
            (Err(_), _) => None,
            (Ok(()), Some(coordinator)) => coordinator.start(),
            (Ok(()), None) => Some(Instant::now()),
        };
        match start {
            Some(at) => shared.begin(at),
            None => shared.abort(),
        }
        drop(gate);
        outcome.map(|()| start.map(|_| returns))
    }
}

/// The lanes of a thread, with open queues.
struct Opened<'a> {
    lanes: Vec<Lane<'a>>,
    /// The ring of all queues, where the thread waits for several of them or for a time.
    ring: Option<SharedRing>,
    /// The slab of the buffers. The lanes have its pieces.
    memory: Set,
}

/// Opens the queues of a thread, in that thread. With several targets or a pacer they share one
/// ring, so that one system call waits for all of them. A thread with one target and no pacer uses
/// its queue without a shared ring.
fn open_lanes<'a>(
    plans: Vec<LanePlan>,
    targets: &'a [OpenTarget],
    contents: &Contents,
    engine: EngineKind,
    buffers: &Buffers,
) -> Result<Opened<'a>> {
    let shares_ring = engine != EngineKind::Sync && (plans.len() > 1 || plans.iter().any(|plan| plan.pacer.is_some()));
    let buffers_of = |plan: &LanePlan| plan.rules.buffers();
    let block_bytes = plans.iter().map(|plan| plan.block_bytes).max().unwrap_or(1);
    let depth: usize = plans.iter().map(|plan| plan.rules.queue_depth as usize).sum();
    let mut memory = buffers.take(plans.iter().map(buffers_of).sum::<usize>().max(1), block_bytes);
    let slab = memory.slab.clone();
    let open = |ring: Option<&SharedRing>| -> Result<Vec<Box<dyn BlockQueue>>> {
        plans.iter().map(|plan| open_queue(plan, &targets[plan.target], engine, &slab, ring)).collect()
    };
    // Either all queues are on the ring or none is. An export cannot be on a ring, and the ring
    // would never wake the thread for a queue that does not use it (`null:`).
    let shares_ring = shares_ring && plans.iter().all(|plan| !targets[plan.target].is_export());
    let mut ring = if shares_ring { SharedRing::new(depth, Some(&slab)).ok() } else { None };
    let mut queues = open(ring.as_ref())?;
    if ring.as_ref().is_some_and(|ring| ring.users() < queues.len()) {
        drop(queues);
        ring = None;
        queues = open(None)?;
    }
    let mut pieces = std::mem::take(&mut memory.pieces);
    let lanes = plans.into_iter().zip(queues).map(|(plan, queue)| {
        let own = pieces.split_off(pieces.len() - buffers_of(&plan));
        Lane::new(&targets[plan.target].name, queue, own, plan, contents.clone())
    });
    Ok(Opened { lanes: lanes.collect(), ring, memory })
}

fn open_queue(
    plan: &LanePlan,
    target: &OpenTarget,
    engine: EngineKind,
    slab: &Slab,
    ring: Option<&SharedRing>,
) -> Result<Box<dyn BlockQueue>> {
    let depth = plan.rules.queue_depth as usize;
    let options = QueueOptions { depth, engine, slab: Some(slab), ring };
    target.device.open_queue(&options).map_err(|source| LoadError::Queue {
        target: target.name.clone(),
        doing: format!("open a queue of depth {depth}"),
        source,
    })
}
