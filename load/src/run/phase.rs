//! The conductor of a phase: starts its threads, enters what they count, tells those who watch, and
//! ends it all.
//!
//! ```text
//!   plans ─▶ threads open their queues ─▶ all are ready, or none begins ─▶ load ─▶ window ─▶ cool-down ─▶ all have ended ─▶ record
//!                                                                            ▲
//!                       conductor: cuts into the ledger, cores at both ends of the window, a snapshot four times a second
//! ```
//!
//! The conductor runs in the thread that called, sleeps between events, and never touches what a
//! measuring thread uses. Times are those of the monotonic clock, from the beginning of the phase:
//! a wall clock that steps changes nothing.

use crate::{
    LoadError, OpenTarget, Result,
    job::{Job, Phase},
    run::{
        Buffers, RunOptions,
        buffers::Set,
        conductor::{Conductor, Ended, Progress},
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
};

/// Carries out phase number `progress.index`.
///
/// # Errors
/// What does not fit, and queues that cannot be opened. Whatever fails later is in
/// [`Ended::failures`].
pub(crate) fn run(
    job: &Job,
    progress: Progress,
    targets: &[OpenTarget],
    generations: &[Arc<Generations>],
    options: &RunOptions,
    watch: &dyn Watch,
) -> Result<Ended> {
    let phase = &job.phases[progress.index];
    let plans = plan::threads_of(job, progress.index, targets, generations)?;
    let ticks = Ticks::new(job.interval.as_nanos());
    let shared = Shared::new(ticks, options.keep_going, options.record_latency);
    plan_window(phase, &shared);
    let contents = Contents::new(job.contents, job.seed);
    let (events, inbox) = mpsc::channel();
    let mut conductor = Conductor::new(job, progress, &shared, &plans, inbox, watch);
    thread::scope(|scope| {
        let buffers = &options.buffers;
        let crew =
            Crew { scope, shared: &shared, targets, contents: &contents, engine: job.engine.into(), buffers, events };
        conductor.returns = crew.start(plans, phase.count)?;
        conductor.conduct();
        Ok::<(), LoadError>(())
    })?;
    Ok(conductor.finish())
}

/// Sets window and end where they are known beforehand.
fn plan_window(phase: &Phase, shared: &Shared) {
    if phase.count.is_some() {
        return shared.plan(0, NEVER, NEVER);
    }
    if phase.steady_within.is_some() {
        // The conductor sets it when the target has settled.
        return;
    }
    let start_ns = phase.warm_up.as_nanos();
    let end_ns = start_ns.saturating_add(phase.duration.as_nanos());
    shared.plan(start_ns, end_ns, end_ns.saturating_add(phase.cool_down.as_nanos()));
}

/// What it takes to start threads.
struct Crew<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    shared: &'env Shared,
    targets: &'env [OpenTarget],
    contents: &'env Contents,
    engine: EngineKind,
    buffers: &'env Buffers,
    events: Sender<Event>,
}

impl<'scope, 'env: 'scope> Crew<'scope, 'env> {
    /// Starts all threads, or none. Gives the ways by which emptied tallies go back to them.
    fn start(self, plans: Vec<ThreadPlan>, count: Option<u64>) -> Result<Vec<Sender<Vec<Tally>>>> {
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
                // In this thread, to which its rings belong.
                let (answer, ready) = match open_lanes(plan.lanes, targets, contents, engine, buffers) {
                    Ok(ready) => (Ok(()), Some(ready)),
                    Err(error) => (Err(error), None),
                };
                // Who waits for the answer is behind the gate.
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
        if outcome.is_err() {
            shared.abort();
        }
        shared.begin();
        drop(gate);
        outcome.map(|()| returns)
    }
}

/// What a thread measures with.
struct Opened<'a> {
    lanes: Vec<Lane<'a>>,
    /// On which all its queues are, where it must wait for several things at once.
    ring: Option<SharedRing>,
    /// The lanes' buffers, while the lanes have them without these.
    memory: Set,
}

/// Opens a thread's queues, in that thread. With several targets, or with times to keep, they share
/// one ring, so that one call waits for all of them; a thread with one target and nothing to wait
/// for but completions has its queue alone.
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
    // All of them or none: an export cannot be on a ring, and for one that has no use for it
    // (`null:`) a ring would be waited for in vain.
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
