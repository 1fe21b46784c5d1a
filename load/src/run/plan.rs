//! The plan of a phase: its threads and the lanes of each thread. Nothing is opened here.
//!
//! ```text
//!   load x target ─▶ threads, each with one lane           usual: `threads` for each target
//!   load          ─▶ threads, each with a lane per target  `across_targets`: `threads` in all
//! ```
//!
//! The plan fails when the phase does not fit its targets, before a request is made.

use crate::{
    LoadError, OpenTarget, Result,
    job::{Caching, Job, Load},
    run::{
        affinity,
        pace::Pacer,
        requests::{Requests, StreamId, WorkingSet},
        verify::Generations,
    },
};
use std::sync::{Arc, atomic::AtomicU64};

/// Maximum memory for buffers, over all threads, so that a mistyped depth does not exhaust the
/// memory.
const BUFFERS_MAX_BYTES: u64 = 4 << 30;
/// Number of requests that are submitted together with O_DIRECT. With more the device would be idle
/// meanwhile; with fewer there would be more system calls.
pub const SUBMIT_EVERY: u32 = 4;

/// The plan of a thread.
#[derive(Debug)]
pub(crate) struct ThreadPlan {
    pub(crate) load: usize,
    pub(crate) lanes: Vec<LanePlan>,
    /// The processor to which the thread is bound.
    pub(crate) cpu: Option<u32>,
}

/// The plan of a lane.
#[derive(Debug)]
pub(crate) struct LanePlan {
    pub(crate) target: usize,
    pub(crate) rules: LaneRules,
    pub(crate) block_bytes: usize,
    pub(crate) requests: Requests,
    pub(crate) pacer: Option<Pacer>,
    /// The generation table of the target; `None` unless contents are verified.
    pub(crate) generations: Option<Arc<Generations>>,
}

/// Fixed properties of a lane.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LaneRules {
    pub(crate) queue_depth: u32,
    /// Completions that a turn waits for.
    pub(crate) batch: u32,
    /// Number of requests that are submitted together.
    pub(crate) submit_every: u32,
    /// A flush after this many writes; 0: never.
    pub(crate) flush_every: u64,
    /// Writes are durable when they complete.
    pub(crate) durable: bool,
    pub(crate) reads: bool,
    pub(crate) writes: bool,
    /// Share of reads, from 0 to 1.
    pub(crate) read_share: f64,
}

impl LaneRules {
    /// Number of buffers that the lane needs.
    pub(crate) fn buffers(&self) -> usize {
        self.queue_depth as usize * (usize::from(self.reads) + usize::from(self.writes))
    }
}

/// Plans the threads of phase number `phase`. `generations` has one table for each target where
/// contents are verified, and is empty otherwise.
///
/// # Errors
/// The first thing that does not fit a target.
pub(crate) fn threads_of(
    job: &Job,
    phase: usize,
    targets: &[OpenTarget],
    generations: &[Arc<Generations>],
) -> Result<Vec<ThreadPlan>> {
    let mut threads = Vec::new();
    for (number, load) in job.phases[phase].loads.iter().enumerate() {
        let name = format!("phase \"{}\", load {} ({})", job.phases[phase].name, number + 1, load.title());
        let chosen = targets_of(load, &name, targets)?;
        let cpus = affinity::list(load.cpus.as_deref()).map_err(|what| LoadError::BadOptions {
            what: format!("in {name}, {what}"),
            hint: "use only these processors".into(),
        })?;
        let sets: Vec<WorkingSet> =
            chosen.iter().map(|target| working_set(load, &name, &targets[*target])).collect::<Result<_>>()?;
        let streams: Vec<Option<Arc<AtomicU64>>> =
            chosen.iter().map(|_| load.interlocked.then(|| Arc::new(AtomicU64::new(load.stream_start.0)))).collect();
        let paced_threads = u64::from(load.threads) * if load.across_targets { 1 } else { chosen.len() as u64 };
        let lane = |which: usize, thread: u64, paced_thread: u64| -> Result<LanePlan> {
            let target = chosen[which];
            let stream = StreamId { phase: phase as u64, load: number as u64, target: target as u64, thread };
            let requests =
                Requests::new(load, sets[which], job.seed, stream, streams[which].clone()).map_err(|what| {
                    LoadError::BadOptions {
                        what: format!("{}: in {name}, {what}", targets[target].name),
                        hint: "use a larger working set or fewer spots".into(),
                    }
                })?;
            let pacer = Pacer::new(load, paced_thread, paced_threads);
            let block_bytes = load.block.largest_bytes() as usize;
            let generations = generations.get(target).cloned();
            Ok(LanePlan {
                target,
                rules: rules(job, load, &targets[target]),
                block_bytes,
                requests,
                pacer,
                generations,
            })
        };
        if load.across_targets {
            for thread in 0..u64::from(load.threads) {
                let lanes = (0..chosen.len()).map(|which| lane(which, thread, thread)).collect::<Result<_>>()?;
                let cpu = affinity::of_thread(cpus.as_deref(), threads.len());
                threads.push(ThreadPlan { load: number, lanes, cpu });
            }
        } else {
            for which in 0..chosen.len() {
                for thread in 0..u64::from(load.threads) {
                    let paced_thread = which as u64 * u64::from(load.threads) + thread;
                    let cpu = affinity::of_thread(cpus.as_deref(), threads.len());
                    threads.push(ThreadPlan { load: number, lanes: vec![lane(which, thread, paced_thread)?], cpu });
                }
            }
        }
    }
    let buffers = |lane: &LanePlan| lane.rules.buffers() as u64 * (lane.block_bytes as u64).next_multiple_of(4096);
    let needed_bytes: u64 = threads.iter().flat_map(|thread| &thread.lanes).map(buffers).sum();
    if needed_bytes > BUFFERS_MAX_BYTES {
        return Err(LoadError::BadOptions {
            what: format!(
                "phase \"{}\" needs {} of buffers, more than 4 GiB",
                job.phases[phase].name,
                diskwright_stats::numbers::bytes(needed_bytes)
            ),
            hint: "use fewer threads, a smaller depth or smaller blocks".into(),
        });
    }
    Ok(threads)
}

fn targets_of(load: &Load, name: &str, targets: &[OpenTarget]) -> Result<Vec<usize>> {
    if load.targets.is_empty() {
        return Ok((0..targets.len()).collect());
    }
    match load.targets.iter().find(|target| **target >= targets.len()) {
        Some(missing) => Err(LoadError::BadOptions {
            what: format!(
                "{name} names target {missing}, but there are only {} targets (counted from 0)",
                targets.len()
            ),
            hint: "name more targets, or change the job's `targets`".into(),
        }),
        None => Ok(load.targets.clone()),
    }
}

fn rules(job: &Job, load: &Load, target: &OpenTarget) -> LaneRules {
    let is_device = target.kind != "null" && !target.is_export();
    let is_direct = matches!(target.cache, Caching::Direct | Caching::DirectWriteThrough);
    LaneRules {
        queue_depth: load.queue_depth,
        batch: load.batch,
        submit_every: if load.batch == 1 && is_device && is_direct { SUBMIT_EVERY } else { u32::MAX },
        flush_every: load.flush_every,
        durable: matches!(job.cache, Caching::WriteThrough | Caching::DirectWriteThrough),
        reads: load.reads(),
        read_share: load.mean_read_percent() / 100.0,
        writes: load.writes(),
    }
}

/// The working set of a load on a target.
///
/// # Errors
/// The first property of the load that does not fit the target.
fn working_set(load: &Load, name: &str, target: &OpenTarget) -> Result<WorkingSet> {
    let geometry = target.device.geometry();
    let (load_name, target_name) = (|| name.to_owned(), || target.name.clone());
    let sector_bytes = geometry.logical_sector_bytes;
    let blocks = load.block.shares().into_iter().map(|share| ("block", share.size.0));
    let others = [("align", load.align), ("stride", load.stride), ("start", Some(load.start))];
    let others = others
        .into_iter()
        .chain([("thread start", Some(load.thread_start)), ("stream start", Some(load.stream_start))]);
    for (field, bytes) in blocks.chain(others.filter_map(|(field, bytes)| Some((field, bytes?.0)))) {
        if bytes % u64::from(sector_bytes) != 0 {
            return Err(LoadError::NotSectors { target: target_name(), load: load_name(), field, bytes, sector_bytes });
        }
    }
    if geometry.read_only && load.writes() {
        return Err(LoadError::ReadOnlyTarget { target: target_name(), load: load_name() });
    }
    let len_bytes = match load.working_set.0 {
        0 => geometry.size_bytes.saturating_sub(load.start.0),
        len_bytes => len_bytes,
    };
    let end_bytes = load.start.0.saturating_add(len_bytes);
    if end_bytes > geometry.size_bytes {
        let size_bytes = geometry.size_bytes;
        return Err(LoadError::WorkingSet { target: target_name(), load: load_name(), end_bytes, size_bytes });
    }
    let block_bytes = load.block.largest_bytes();
    if block_bytes > len_bytes {
        return Err(LoadError::BlockTooLarge {
            target: target_name(),
            load: load_name(),
            set_bytes: len_bytes,
            block_bytes,
        });
    }
    Ok(WorkingSet { start_bytes: load.start.0, len_bytes })
}
