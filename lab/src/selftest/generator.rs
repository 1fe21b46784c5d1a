//! Measures the load generator: IOPS and CPU time compared to fio, the cost of recording latencies,
//! its rate on `null:`, its memory, and whether its figures agree with fio's.
//!
//! Both sides run on the same single CPU (fio inherits our CPU affinity) in interleaved rounds, and
//! ratios are taken within rounds. A third side is a bare ring without any bookkeeping, the lower
//! bound of the cost. IOPS are judged where the CPU is the bottleneck (page cache), CPU time per
//! I/O where the device is.

use crate::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome},
    measure::{self, Ratio},
    open::{self, OpenHow},
    peer,
    progress::{Progress, report},
    rounds::{self, Rounds, Steps, Window},
    selftest::fio::{self, FioFound, FioLoad, Setup},
    targets::{self, Container},
};
use diskwright_load::{
    OpenTarget,
    job::{Blocks, Bytes, Caching, Job, Load, Span},
    record::PhaseRecord,
    run::{Buffers, RunOptions, Watch},
};
use diskwright_stats::{
    numbers::{duration, grouped},
    summary::Summary,
};
use diskwright_store::{BareFound, BareLoad, CacheMode, bare_ring};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::{path::PathBuf, time::Duration};

const QUEUE_DEPTH: u32 = 32;
/// Seed of the order of the windows.
const SEED: u64 = 17;
/// Requests submitted and completed at once, in the setting with batching on both sides.
const BATCH: u32 = 16;
/// Number of requests with which ten latencies are beyond the eighth nine.
const EIGHT_NINES: u64 = 1_000_000_000;
/// The limit is per thread; here the whole process must keep it.
const MEMORY_BYTES: f64 = 64.0 * 1024.0 * 1024.0;
const RANDOM_READ: FioLoad = FioLoad {
    rw: "randread",
    read_percent: 100,
    block_bytes: 4096,
    queue_depth: QUEUE_DEPTH,
    direct: false,
    setup: Setup::Defaults,
};

/// Our figures and fio's must agree within this factor.
const ALIKE: f64 = 1.05;
/// Rounds of the agreement. A 99 % confidence interval needs at least eight.
const AGREEMENT_ROUNDS: usize = 9;
/// Workloads for which both must measure the same.
const AGREEMENT: [FioLoad; 10] = [
    of("randread", 100, 4 << 10, 1),
    of("randread", 100, 4 << 10, 8),
    of("randread", 100, 4 << 10, 32),
    of("randread", 100, 64 << 10, 4),
    of("read", 100, 64 << 10, 4),
    of("read", 100, 1 << 20, 2),
    of("randwrite", 0, 4 << 10, 8),
    of("randwrite", 0, 64 << 10, 4),
    of("write", 0, 256 << 10, 2),
    of("randrw", 70, 8 << 10, 8),
];

const fn of(rw: &'static str, read_percent: u32, block_bytes: u32, queue_depth: u32) -> FioLoad {
    FioLoad { rw, read_percent, block_bytes, queue_depth, direct: true, setup: Setup::Defaults }
}

/// Pins this thread, and the processes that it starts, to one CPU until it is dropped.
struct Pinned(Option<CpuSet>);

impl Pinned {
    /// Pins to the last CPU that the thread may use: interrupts tend to be on the first.
    fn to_one() -> Self {
        let Ok(allowed) = sched_getaffinity(None) else { return Self(None) };
        let last = (0..CpuSet::MAX_CPU).rev().find(|cpu| allowed.is_set(*cpu));
        let mut one = CpuSet::new();
        one.set(last.unwrap_or(0));
        Self(sched_setaffinity(None, &one).is_ok().then_some(allowed))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(allowed) = &self.0 {
            // A failure cannot be handled: the thread stays pinned.
            let _ = sched_setaffinity(None, allowed);
        }
    }
}

struct Ours {
    target: OpenTarget,
    length: Duration,
    buffers: Buffers,
}

impl Ours {
    fn run(&self, load: &FioLoad, record_latency: bool, round: usize, watch: &dyn Watch) -> Result<PhaseRecord> {
        let of_ours = Load {
            block: Blocks::One(Bytes(u64::from(load.block_bytes))),
            read_percent: f64::from(load.read_percent),
            random_percent: if load.rw.starts_with("rand") { 100.0 } else { 0.0 },
            queue_depth: load.queue_depth,
            batch: load.setup.batch(),
            ..Load::default()
        };
        let mut job = Job::simple("selftest", of_ours, Span::default(), Span::from(self.length));
        (job.cache, job.seed) = (self.target.cache, load.seed(round));
        let options = RunOptions { record_latency, buffers: self.buffers.clone(), ..RunOptions::default() };
        measure::window(&job, &self.target, &options, watch)
    }
}

/// A filled raw file, with the time and number of its measurements.
struct Prepared {
    path: PathBuf,
    cell: Duration,
    rounds: usize,
}

impl Prepared {
    fn new(context: &Context<'_>, size_bytes: u64, cache: CacheMode, progress: &mut dyn Progress) -> Result<Self> {
        context.scratch.need("a raw file", size_bytes)?;
        let how = context.preparation(size_bytes, cache);
        let mut tick = |done| report(progress, "prepare", done, 2 * size_bytes, "raw file");
        let path = targets::make_filled(Container::Raw, context.scratch.path(), &how, &mut tick)?;
        // This also reads the file into the page cache, for the rows that measure the page cache.
        let mut tick = |done| report(progress, "prepare", size_bytes + done, 2 * size_bytes, "raw file");
        targets::open_verified(Container::Raw, path.clone(), &how, &mut tick)?;
        context.scratch.settle()?;
        let cell = context.options.cell.unwrap_or_else(|| Duration::from_millis(context.pick(300, 1000)));
        Ok(Self { path, cell, rounds: context.rounds(context.pick(5, 9)) })
    }

    fn ours(&self, cache: Caching, writable: bool) -> Result<Ours> {
        let how = OpenHow { writable, cache, ..OpenHow::default() };
        let name = self.path.to_str().ok_or_else(|| LabError::BadOptions {
            what: format!("the name {} is not UTF-8", self.path.display()),
            hint: "use another scratch folder".into(),
        })?;
        Ok(Ours { target: open::open(name, &how)?, length: self.cell, buffers: Buffers::default() })
    }

    fn bare(&self, load: &FioLoad, cache: CacheMode) -> BareLoad {
        BareLoad {
            cache,
            block_bytes: load.block_bytes as usize,
            depth: load.queue_depth as usize,
            batch: load.setup.batch() as usize,
            time: self.cell,
        }
    }

    fn note(&self, found: &mut RowOutcome) {
        found.notes.push(format!(
            "both on the same CPU, {} interleaved rounds, cells of {}",
            self.rounds,
            duration(self.cell.as_nanos() as f64)
        ));
    }
}

/// IOPS from the page cache, compared to fio.
pub(super) fn page_cache(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let bars = [("fio's defaults", Bar::AtLeast(1.6)), ("registered and batched in both", Bar::AtLeast(1.3))];
    let measure = Measure {
        what: "IOPS",
        unit: "IOPS",
        ours: PhaseRecord::iops,
        fio: |found| found.iops,
        bare: |found| found.reads as f64 / found.elapsed.as_secs_f64(),
    };
    against_fio(context, progress, false, bars, &measure)
}

/// CPU time with direct I/O, compared to fio.
pub(super) fn direct(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let bars = [("fio's defaults", Bar::AtMost(0.8)), ("registered and batched in both", Bar::AtMost(0.9))];
    let measure = Measure {
        what: "CPU time per I/O",
        unit: "ns",
        ours: PhaseRecord::cpu_ns_per_io,
        fio: |found| found.cpu_ns_per_io,
        bare: |found| found.cpu.as_nanos() as f64 / found.reads as f64,
    };
    against_fio(context, progress, true, bars, &measure)
}

/// Measures each of `names` once in each round, `together` neighbours one after the other, because
/// they are compared with each other.
fn in_turns(
    names: &[&str],
    together: usize,
    count: usize,
    progress: &mut dyn Progress,
    measure: &mut dyn FnMut(Window, &dyn Watch) -> Result<()>,
) -> Result<()> {
    let order = Rounds { together: Some(together), ..Rounds::new(count, SEED) };
    let mut steps = Steps::new(progress, "measure", names.len() * count);
    let title = |at: Window| names.get(at.cell).map(|name| (*name).to_owned());
    rounds::interleave(&order, names.len(), &mut steps, &title, measure)?.or_stopped()
}

/// Ours, fio, and a bare ring.
const SIDES: usize = 3;

/// A figure of each side, for each round, in one setting.
#[derive(Default)]
struct Sides {
    ours: Vec<f64>,
    fio: Vec<f64>,
    /// A bare ring, the lower bound of the cost.
    bare: Vec<f64>,
}

impl Sides {
    /// A note with our figure and fio's as ratios to the bare ring.
    fn note(&self, name: &str) -> Option<String> {
        let of_bare = |side: &[f64]| Some(Ratio::of(side, &self.bare)?.median());
        Some(format!(
            "{name}: relative to a bare ring without clock and bookkeeping, ours is {:.2} and fio {:.2}",
            of_bare(&self.ours)?,
            of_bare(&self.fio)?
        ))
    }
}

/// The compared figure, and how it is read from each side.
struct Measure {
    what: &'static str,
    unit: &'static str,
    ours: fn(&PhaseRecord) -> f64,
    fio: fn(&FioFound) -> f64,
    bare: fn(&BareFound) -> f64,
}

fn against_fio(
    context: &Context<'_>,
    progress: &mut dyn Progress,
    direct: bool,
    bars: [(&str, Bar); 2],
    measure: &Measure,
) -> Result<RowOutcome> {
    let Some(program) = fio::find() else { return Ok(RowOutcome::skipped("fio", peer::missing("fio", "fio"))) };
    let (mode, caching) =
        if direct { (CacheMode::Direct, Caching::Direct) } else { (CacheMode::PageCache, Caching::Cached) };
    let prepared = Prepared::new(context, context.pick(256 << 20, 512 << 20), mode, progress)?;
    let ours = prepared.ours(caching, false)?;
    let _pinned = Pinned::to_one();
    let mut settings = [Sides::default(), Sides::default()];
    let mut no_floor = None;
    let mut measure_side = |at: Window, watch: &dyn Watch| {
        let sides = &mut settings[at.cell / SIDES];
        let setup = [Setup::Defaults, Setup::Batched(BATCH)][at.cell / SIDES];
        let load = FioLoad { direct, setup, ..RANDOM_READ };
        match at.cell % SIDES {
            0 => sides.ours.push((measure.ours)(&ours.run(&load, true, at.round, watch)?)),
            1 => sides.fio.push((measure.fio)(&fio::run(&program, &prepared.path, &load, prepared.cell)?)),
            _ => match bare_ring(&prepared.path, &prepared.bare(&load, mode)) {
                Ok(found) => sides.bare.push((measure.bare)(&found)),
                Err(refused) => no_floor = Some(format!("the bare ring could not be measured: {refused}")),
            },
        }
        Ok(())
    };
    let names: Vec<&str> = bars.iter().flat_map(|(name, _)| [*name; SIDES]).collect();
    in_turns(&names, SIDES, prepared.rounds, progress, &mut measure_side)?;
    let mut found = RowOutcome::default();
    for ((name, bar), sides) in bars.into_iter().zip(&settings) {
        let title = format!("4K random read, QD 32, {name}: {}", measure.what);
        found.checks.push(Check::ratio(title, measure.unit, &sides.ours, &sides.fio, bar));
        found.notes.extend(sides.note(name));
    }
    found.notes.extend(no_floor);
    prepared.note(&mut found);
    Ok(found)
}

/// CPU time per I/O with all latencies recorded, compared to recording none.
pub(super) fn recording(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let prepared = Prepared::new(context, context.pick(256 << 20, 512 << 20), CacheMode::PageCache, progress)?;
    let ours = prepared.ours(Caching::Cached, false)?;
    let _pinned = Pinned::to_one();
    let (mut with, mut without) = (Vec::new(), Vec::new());
    let mut measure = |at: Window, watch: &dyn Watch| {
        let records = at.cell == 0;
        let phase = ours.run(&RANDOM_READ, records, at.round, watch)?;
        if records { &mut with } else { &mut without }.push(phase.cpu_ns_per_io());
        Ok(())
    };
    in_turns(&["with latencies", "without latencies"], 2, prepared.rounds, progress, &mut measure)?;
    let mut found = RowOutcome::default();
    found.checks.push(Check::ratio(
        "CPU time per I/O, all latencies recorded relative to none; 4K random read from the page cache",
        "ns",
        &with,
        &without,
        Bar::AtMost(1.05),
    ));
    prepared.note(&mut found);
    Ok(found)
}

/// IOPS on `null:`.
pub(super) fn null(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let length = context.options.cell.unwrap_or_else(|| Duration::from_millis(context.pick(200, 1000)));
    let ours = Ours { target: open::open("null:", &OpenHow::default())?, length, buffers: Buffers::default() };
    let _pinned = Pinned::to_one();
    let mut iops = Vec::new();
    let mut measure = |at: Window, watch: &dyn Watch| {
        iops.push(ours.run(&RANDOM_READ, true, at.round, watch)?.iops());
        Ok(())
    };
    in_turns(&["null:"], 1, context.rounds(5), progress, &mut measure)?;
    let name = "null:, 4K random read, QD 32, all latencies taken: IOPS on one core";
    Ok(RowOutcome { checks: vec![Check::absolute(name, "IOPS", &iops, Bar::AtLeast(10e6))], ..RowOutcome::default() })
}

/// Memory of a run with 10^9 latencies. It needs a fresh process, because the peak memory of a
/// process never falls.
pub(super) fn memory(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let Some(launcher) = &context.options.launcher else {
        return Ok(RowOutcome::skipped("a fresh process", "the caller set no launcher to start a fresh process"));
    };
    let requests = context.pick(20_000_000, EIGHT_NINES);
    report(progress, "measure", 0, 1, &format!("{} requests of null:", grouped(requests as f64)))?;
    let cost = launcher.long_run(requests)?;
    let name = format!("one thread, {} latencies, all nines they support: peak memory", grouped(requests as f64));
    let check = match (cost.requests, cost.nines) {
        (taken, _) if taken != requests => Check::broken(&name, format!("only {taken} were recorded")),
        (EIGHT_NINES.., nines) if nines < 8 => Check::broken(&name, format!("only {nines} nines were reported")),
        _ => Check::absolute(name, "bytes", &[cost.resident_peak_bytes as f64], Bar::AtMost(MEMORY_BYTES)),
    };
    let notes = vec![format!(
        "{} nines in {}; with a time series of {} points, the largest number",
        cost.nines,
        duration(cost.took_ns as f64),
        grouped(cost.points as f64)
    )];
    Ok(RowOutcome { checks: vec![check], notes, ..RowOutcome::default() })
}

/// Whether the load generator and fio measure the same.
pub(super) fn agreement(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let Some(program) = fio::find() else { return Ok(RowOutcome::skipped("fio", peer::missing("fio", "fio"))) };
    let mut prepared = Prepared::new(context, context.pick(256 << 20, 1 << 30), CacheMode::Direct, progress)?;
    prepared.rounds = context.rounds(AGREEMENT_ROUNDS);
    let ours = prepared.ours(Caching::Direct, true)?;
    let names: Vec<String> = AGREEMENT.iter().map(name_of).collect();
    // IOPS and mean latency of ours and of fio's, for each workload.
    let mut measured: [[Vec<(f64, f64)>; 2]; AGREEMENT.len()] = Default::default();
    let mut measure = |at: Window, watch: &dyn Watch| {
        let (load, [our_side, their_side]) = (&AGREEMENT[at.cell / 2], &mut measured[at.cell / 2]);
        if at.cell.is_multiple_of(2) {
            let phase = ours.run(load, true, at.round, watch)?;
            our_side.push((phase.iops(), phase.total().both.service.mean_ns()));
        } else {
            let load = FioLoad { setup: Setup::AsOurs { seed: load.seed(at.round) }, ..*load };
            let theirs = fio::run(&program, &prepared.path, &load, prepared.cell)?;
            their_side.push((theirs.iops, theirs.mean_ns));
        }
        Ok(())
    };
    let titles: Vec<&str> = names.iter().flat_map(|name| [&name[..]; 2]).collect();
    in_turns(&titles, 2, prepared.rounds, progress, &mut measure)?;
    let mut found = RowOutcome::default();
    for (name, [our_side, their_side]) in names.iter().zip(&measured) {
        let figures = |side: &[(f64, f64)], which: fn(&(f64, f64)) -> f64| side.iter().map(which).collect::<Vec<f64>>();
        for (what, which) in [("IOPS", (|pair| pair.0) as fn(&(f64, f64)) -> f64), ("mean latency", |pair| pair.1)] {
            let name = format!("{name}: {what}");
            found.checks.push(agrees(&name, &figures(our_side, which), &figures(their_side, which)));
        }
    }
    prepared.note(&mut found);
    found.notes.push(
        "both look the same to the device: registered buffers in huge pages, other offsets in each round, equal numbers of requests submitted together".into(),
    );
    found.notes.push(
        "the figure is the ratio of ours to fio's within rounds, inverted if below 1; its 99 % interval is judged, which noise of fio widens".into(),
    );
    Ok(found)
}

/// `8K randrw 70 % read, QD 8`.
fn name_of(load: &FioLoad) -> String {
    let block = diskwright_stats::numbers::short_size(u64::from(load.block_bytes));
    let reads = if load.rw == "randrw" { format!(" {} % read", load.read_percent) } else { String::new() };
    format!("{block} {}{reads}, QD {}", load.rw, load.queue_depth)
}

/// Checks whether our figure is fio's within [`ALIKE`] in both directions.
fn agrees(name: &str, ours: &[f64], theirs: &[f64]) -> Check {
    let Some(ratio) = Ratio::of(ours, theirs) else { return Check::broken(name, "nothing was measured") };
    Check { ours: Summary::of(ours), peer: Summary::of(theirs), ..Check::alike(name, &ratio, ALIKE) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acceptance::Outcome;

    #[test]
    fn a_noisy_fio_leaves_the_agreement_open_and_never_makes_it_pass() {
        // Each round of fio is off by up to `noise`, ours are exact.
        let outcome = |ours: f64, noise: f64, rounds: usize| {
            let off = |round: usize| 1.0 + noise * (2.0 * round as f64 / (rounds - 1) as f64 - 1.0);
            let theirs: Vec<f64> = (0..rounds).map(|round| 1000.0 * off(round)).collect();
            agrees("x", &vec![1000.0 * ours; rounds], &theirs).outcome
        };
        assert_eq!(outcome(1.0, 0.01, 9), Outcome::Pass);
        assert_eq!(outcome(0.98, 0.01, 9), Outcome::Pass);
        // Too slow and too fast both disagree.
        assert_eq!([0.8, 1.3].map(|ours| outcome(ours, 0.01, 9)), [Outcome::Fail; 2]);
        // Judged by fio's scatter, these would pass.
        assert_eq!(outcome(0.9, 0.3, 9), Outcome::Unsure);
        assert_eq!(outcome(1.0, 0.3, 9), Outcome::Unsure);
        assert_ne!(outcome(0.5, 0.6, 9), Outcome::Pass);
        // With enough rounds a noisy fio gives a result too.
        assert_eq!(outcome(1.0, 0.1, 60), Outcome::Pass);
        // Five rounds are too few for a 99 % confidence interval.
        assert_eq!(outcome(1.0, 0.0, 5), Outcome::Unsure);
        assert_eq!(agrees("x", &[], &[100.0]).outcome, Outcome::Fail);
    }
}
