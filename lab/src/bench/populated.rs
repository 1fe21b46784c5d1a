//! Populated disks against the raw file: the sixteen workloads past the page cache, and 4K random
//! reads out of it.
//!
//! Each comparison is judged by the interval of its rounds, not by their median. What an interval
//! leaves open is measured again, in further rounds beside the raw file, up to four times the usual
//! number; so clear comparisons take little time, and close ones as many rounds as they need.
//!
//! All files are filled side by side, for their place on the disk alone can make a tenth: a raw
//! file made last had 0.87 of the first one's large writes. A second raw file is measured as if it
//! were a disk: its ratio to the first is what place and chance do by themselves. It decides
//! nothing; it is told beside every check that did not pass, and over all in the notes, with the
//! number of bars that it would have missed itself: where a raw file misses some, a virtual disk
//! cannot be judged more surely.
//!
//! The page cache is filled by reading, as after a start of the machine. When a disk of small
//! blocks is written through it, its blocks lie at odd multiples of 4 KiB, the kernel caches them
//! in smaller pieces, and later reads are slower; docs/measurements.md has the figures. Pages that
//! lie idle may be taken from the page cache though memory is free (clouds do that, by DAMON), and
//! then a read of it is one of the disk. So each file is read through right before each window on
//! it, and the kernel's account says whether a window was what it should be.

use super::SEED;
use crate::{
    LabError, Result,
    bench::{Bar, Bench, Check, Found, Outcome, peer},
    child::cache_word,
    measure::{self, Plan, Ratio, Steps},
    progress::{Progress, report},
    targets::{self, Container, Target},
    traffic::Traffic,
};
use diskwright_load::{
    OpenTarget,
    figures::Figures,
    machine::takes_idle_pages,
    seeds,
    workload::{Direction, Pattern, Workload, paper_monolithic},
};
use diskwright_stats::{
    numbers::{bytes, duration},
    summary::Summary,
};
use diskwright_store::CacheMode;
use std::{fs::File, iter, time::Duration};

const QUEUE_DEPTH: u32 = 32;
const IOPS_BAR: Bar = Bar::AtLeast(0.95);
const CPU_BAR: Bar = Bar::AtMost(1.10);
/// Name of the control.
const CONTROL: &str = "second raw file";
const CACHED_BAR: Bar = Bar::AtLeast(0.95);
/// One of so many comparisons may be missed.
const ONE_MAY_BE_MISSED_OF: usize = 64;

/// The raw file and what is promised about it.
const TARGETS: [Container; 5] = [
    Container::Raw,
    Container::VhdDynamic,
    Container::VhdDifferencing,
    Container::VhdxDynamic,
    Container::VhdxDifferencing,
];

/// What is judged of a comparison, its bar, and where it is.
type Figure = (&'static str, Bar, fn(&Figures) -> f64);
const FIGURES: [Figure; 2] =
    [("IOPS", IOPS_BAR, |round| round.iops), ("CPU per I/O", CPU_BAR, |round| round.cpu_ns_per_io)];
const CACHED: [Figure; 1] = [("IOPS", CACHED_BAR, |round| round.iops)];

/// A disk and the raw file, round by round.
#[derive(Debug, Default)]
struct Pair {
    name: String,
    ours: Vec<Figures>,
    base: Vec<Figures>,
}

impl Pair {
    fn ratio(&self, figure: fn(&Figures) -> f64) -> Option<Ratio> {
        let of = |rounds: &[Figures]| -> Vec<f64> { rounds.iter().map(figure).collect() };
        Ratio::of(&of(&self.ours), &of(&self.base))
    }

    fn check(&self, what: &str, (figure_name, bar, figure): Figure) -> Check {
        let name = format!("{}, {what}: {figure_name}", self.name);
        match self.ratio(figure) {
            Some(ratio) => Check::of_interval(name, &ratio, bar),
            None => Check::broken(&name, "nothing was measured"),
        }
    }

    fn is_open(&self, figures: &[Figure]) -> bool {
        figures.iter().any(|figure| self.check("", *figure).outcome == Outcome::Unsure)
    }
}

pub(crate) fn workloads(bench: &Bench<'_>, progress: &mut dyn Progress) -> Result<Found> {
    let size_bytes = bench.pick(512 << 20, 2 << 30);
    let targets = prepare(bench, size_bytes, CacheMode::Direct, true, progress)?;
    let mut controls = [Vec::new(), Vec::new()];
    let (mut judged, mut missed, mut rounds_most) = (0, 0, 0);
    let mut found = Found::default();
    note_conditions(&mut found, bench, &targets, size_bytes);
    let all = paper_monolithic(QUEUE_DEPTH);
    for (index, workload) in all.iter().enumerate() {
        let pairs = compare(bench, &targets, workload, &FIGURES, (index, all.len()), progress, &mut |_| Ok(()))?;
        let Some((control, pairs)) = pairs.split_last() else { continue };
        for pair in pairs {
            rounds_most = rounds_most.max(pair.ours.len());
            for figure in FIGURES {
                let (mut check, raw) = (pair.check(&workload.name, figure), control.ratio(figure.2));
                if let Some(raw) = raw.filter(|_| check.outcome != Outcome::Pass) {
                    let said = format!("a second raw file measured {:.2} of the first", raw.median());
                    check.why.get_or_insert(said);
                }
                found.checks.push(check);
            }
        }
        for (medians, figure) in controls.iter_mut().zip(FIGURES) {
            medians.extend(control.ratio(figure.2).map(|ratio| ratio.median()));
            judged += 1;
            missed += usize::from(control.check("", figure).outcome != Outcome::Pass);
        }
    }
    found.may_miss = found.checks.len() / ONE_MAY_BE_MISSED_OF;
    for ((what, ..), medians) in FIGURES.iter().zip(&controls) {
        if let Some(summary) = Summary::of(medians) {
            found.notes.push(format!(
                "a second raw file against the first, over the workloads: {what} {:.2} ({:.2}..{:.2})",
                summary.median, summary.min, summary.max
            ));
        }
    }
    found.notes.push(format!("the closest had {rounds_most} rounds"));
    found.notes.push(format!("a second raw file would have missed or left open {missed} of {judged} by the same bars"));
    Ok(found)
}

pub(crate) fn page_cache(bench: &Bench<'_>, progress: &mut dyn Progress) -> Result<Found> {
    let size_bytes = bench.pick(256 << 20, 512 << 20);
    let targets = prepare(bench, size_bytes, CacheMode::PageCache, false, progress)?;
    bench.scratch.settle()?;
    for target in &targets {
        forget(target)?;
    }
    let mut found = Found::default();
    note_conditions(&mut found, bench, &targets, size_bytes);
    let workload = Workload::new(Pattern::Random, Direction::Read, 4096, QUEUE_DEPTH);
    let mut from_disk = FromDisk::default();
    let mut warm = |index: usize| {
        from_disk.window_ended()?;
        peer::warm(&targets[index].path)?;
        from_disk.window_begins()
    };
    let pairs = compare(bench, &targets, &workload, &CACHED, (0, 1), progress, &mut warm)?;
    from_disk.window_ended()?;
    found.notes.extend(from_disk.note(&workload, &pairs));
    let what = format!("{} from the page cache", workload.name);
    found.checks.extend(pairs.iter().map(|pair| pair.check(&what, CACHED[0])));
    Ok(found)
}

/// Takes a target's file out of the page cache, where writing it has left it.
fn forget(target: &Target) -> Result<()> {
    let file = File::open(&target.path).map_err(LabError::file("open", &target.path))?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)
        .map_err(|errno| LabError::file("take out of the page cache", &target.path)(errno.into()))
}

/// What windows that should have read memory only have read from the disk.
#[derive(Default)]
struct FromDisk {
    begun: Option<Traffic>,
    read_bytes: u64,
}

impl FromDisk {
    fn window_begins(&mut self) -> Result<()> {
        self.begun = Some(Traffic::of_process()?);
        Ok(())
    }

    fn window_ended(&mut self) -> Result<()> {
        if let Some(begun) = self.begun.take() {
            self.read_bytes += (Traffic::of_process()? - begun).read_bytes;
        }
        Ok(())
    }

    /// What to say of it, if it was more than a hundredth of what was read.
    fn note(&self, workload: &Workload, pairs: &[Pair]) -> Option<String> {
        let block_bytes = u64::from(workload.block_bytes);
        let all: u64 = pairs.iter().flat_map(|pair| &pair.ours).map(|round| round.reads * block_bytes).sum();
        let why = if takes_idle_pages() { ": this machine takes idle pages out of it (DAMON)" } else { "" };
        (self.read_bytes > all / 100).then(|| {
            format!(
                "{} of {} were not in the page cache but came from the disk{why}",
                bytes(self.read_bytes),
                bytes(all)
            )
        })
    }
}

/// The raw file, the disks, and with `control` another raw file at the end: all filled side by
/// side.
fn prepare(
    bench: &Bench<'_>,
    size_bytes: u64,
    cache: CacheMode,
    control: bool,
    progress: &mut dyn Progress,
) -> Result<Vec<Target>> {
    let how = bench.preparation(size_bytes, cache);
    let (dir, control_dir) = (bench.scratch.folder("disks")?, bench.scratch.folder("control")?);
    let disks = TARGETS.iter().map(|&container| (container, &*dir));
    let wanted: Vec<_> = disks.chain(control.then_some((Container::Raw, &*control_dir))).collect();
    let all_bytes = wanted.len() as u64 * size_bytes;
    bench.scratch.need("these disks", all_bytes + (1 << 30))?;
    let mut tick = |done| report(progress, "prepare", done, 2 * all_bytes, "filling");
    let filled = targets::make_filled_side_by_side(&wanted, &how, &mut tick)?;
    let mut targets = Vec::new();
    for (index, ((container, _), filled)) in wanted.iter().zip(filled).enumerate() {
        let before = all_bytes + index as u64 * size_bytes;
        let mut tick = |done| report(progress, "prepare", before + done, 2 * all_bytes, container.name());
        let target = targets::open_verified(*container, filled.path, &how, &mut tick)?;
        targets.push(if index < TARGETS.len() { target } else { target.named(CONTROL) });
    }
    Ok(targets)
}

/// Many and short, for what disturbs a round seldom disturbs all.
fn rounds(bench: &Bench<'_>) -> usize {
    bench.rounds(bench.pick(7, 15))
}

/// And so many in all, for comparisons that stay open.
fn rounds_max(bench: &Bench<'_>) -> usize {
    rounds(bench) * bench.pick(2, 4)
}

fn note_conditions(found: &mut Found, bench: &Bench<'_>, targets: &[Target], size_bytes: u64) {
    found.notes.push(format!(
        "disks of {}, filled, read back and compared; {} rounds, up to {} while a comparison is open, cells of {}",
        bytes(size_bytes),
        rounds(bench),
        rounds_max(bench),
        duration(bench.cell().as_nanos() as f64)
    ));
    for target in targets {
        let wanted = targets.first().map_or(target.cache, |first| first.cache);
        if target.cache != wanted {
            found.notes.push(format!(
                "{} is in cache mode {}, the raw file in {}: not like with like",
                target.name(),
                cache_word(target.cache),
                cache_word(wanted)
            ));
        }
    }
}

/// Measures the targets in turns, the first being the base, until no comparison is open or the
/// rounds are used up. `before` is told the number of the target.
fn compare(
    bench: &Bench<'_>,
    targets: &[Target],
    workload: &Workload,
    figures: &[Figure],
    (index, count): (usize, usize),
    progress: &mut dyn Progress,
    before: &mut dyn FnMut(usize) -> Result<()>,
) -> Result<Vec<Pair>> {
    let (usual, most) = (rounds(bench), rounds_max(bench));
    let mut pairs: Vec<Pair> =
        targets[1..].iter().map(|target| Pair { name: target.name().to_owned(), ..Pair::default() }).collect();
    let mut open: Vec<usize> = (1..targets.len()).collect();
    let cells = (targets.len() * most) as u64;
    let mut done = index as u64 * cells;
    let mut batch = 0;
    while !open.is_empty() && batch * usual < most {
        let chosen: Vec<usize> = iter::once(0).chain(open.iter().copied()).collect();
        let to_measure: Vec<OpenTarget> = chosen.iter().map(|&number| targets[number].to_measure()).collect();
        let plan = Plan {
            rounds: usual,
            warm_up: Duration::ZERO,
            measured: Duration::ZERO,
            engine: bench.options.engine,
            seed: seeds::of_window(SEED, "batch", batch),
        }
        .with_cell(bench.cell());
        let mut steps = Steps { progress, phase: "measure", done, total: count as u64 * cells };
        let mut all =
            measure::interleaved(&to_measure, workload, &plan, &mut steps, &mut |place| before(chosen[place]))?
                .into_iter();
        done = steps.done;
        let base = all.next().unwrap_or_default();
        for (&number, ours) in open.iter().zip(all) {
            let pair = &mut pairs[number - 1];
            pair.ours.extend(ours);
            pair.base.extend(base.iter().cloned());
        }
        open.retain(|&number| pairs[number - 1].is_open(figures));
        batch += 1;
    }
    Ok(pairs)
}
