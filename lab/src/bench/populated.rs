//! Populated disks against the raw file: the sixteen workloads past the page cache, and 4K random reads out of it.
//!
//! A second raw file, made last, is measured as if it were a disk: its ratio to the first is what place on the disk and chance do by
//! themselves. It decides nothing; it is told beside every check that missed its bar, and over all in the notes, with the number of bars
//! that it would have missed itself: where a raw file misses some, a virtual disk cannot be judged more surely.
//!
//! Pages that lie idle may be taken from the page cache though memory is free (clouds do that, by DAMON), and then a read of it is one of the
//! disk. So each file is read through right before each window on it, and the kernel's account says whether a window was what it should be.

use crate::{
    Result,
    bench::{Bar, Bench, Check, Found, Outcome, peer},
    child::cache_word,
    machine::takes_idle_pages,
    measure::{self, Before, CellResult, Plan, Ratio, Steps, WorkloadResult},
    progress::{Progress, report},
    run::OpenTarget,
    stats::Summary,
    table::{bytes, duration},
    targets::{self, Container, Target},
    traffic::Traffic,
    workload::{Direction, Pattern, Workload, paper_monolithic},
};
use diskwright_store::CacheMode;
use std::time::Duration;

const QUEUE_DEPTH: u32 = 32;
const IOPS_BAR: Bar = Bar::AtLeast(0.95);
const CPU_BAR: Bar = Bar::AtMost(1.10);
/// Name of the control.
const CONTROL: &str = "second raw file";
const CACHED_BAR: Bar = Bar::AtLeast(0.90);

/// The raw file and what is promised about it.
const TARGETS: [Container; 5] = [
    Container::Raw,
    Container::VhdDynamic,
    Container::VhdDifferencing,
    Container::VhdxDynamic,
    Container::VhdxDifferencing,
];

pub(crate) fn workloads(bench: &Bench<'_>, progress: &mut dyn Progress) -> Result<Found> {
    let size_bytes = bench.pick(512 << 20, 2 << 30);
    let mut targets = prepare(bench, size_bytes, CacheMode::Direct, progress)?;
    targets.push(prepare_control(bench, size_bytes, progress)?);
    let mut controls = [Vec::new(), Vec::new()];
    let (mut judged, mut missed) = (0, 0);
    let mut found = Found::default();
    note_conditions(&mut found, bench, &targets, size_bytes, rounds(bench));
    let all = paper_monolithic(QUEUE_DEPTH);
    for (index, workload) in all.iter().enumerate() {
        let result = compare(bench, &targets, workload, (index, all.len()), progress, &mut |_| Ok(()))?;
        let Some((control, cells)) = result.cells[1..].split_last() else { continue };
        for cell in cells {
            for (what, bar, ratio) in FIGURES {
                let (Some(ours), Some(raw)) = (ratio(cell), ratio(control)) else { continue };
                let mut check = Check::of_ratio(format!("{}, {}: {what}", cell.target, workload.name), ours, bar);
                if check.outcome == Outcome::Fail {
                    check.why =
                        Some(format!("a second raw file, made last, measured {:.2} of the first", raw.median()));
                }
                found.checks.push(check);
            }
        }
        for (medians, (what, bar, ratio)) in controls.iter_mut().zip(FIGURES) {
            let Some(raw) = ratio(control) else { continue };
            medians.push(raw.median());
            judged += 1;
            missed += usize::from(Check::of_ratio(what, raw, bar).outcome == Outcome::Fail);
        }
    }
    for ((what, ..), medians) in FIGURES.iter().zip(&controls) {
        if let Some(summary) = Summary::of(medians) {
            found.notes.push(format!(
                "a second raw file, made last, against the first, over the workloads: {what} {:.2} ({:.2}..{:.2})",
                summary.median, summary.min, summary.max
            ));
        }
    }
    found.notes.push(format!("a second raw file, made last, would have missed {missed} of {judged} by the same bars"));
    Ok(found)
}

/// What is judged of a cell, its bar, and where it is.
type Figure = (&'static str, Bar, fn(&CellResult) -> Option<&Ratio>);
const FIGURES: [Figure; 2] =
    [("IOPS", IOPS_BAR, |cell| cell.iops_ratio.as_ref()), ("CPU per I/O", CPU_BAR, |cell| cell.cpu_ratio.as_ref())];

pub(crate) fn page_cache(bench: &Bench<'_>, progress: &mut dyn Progress) -> Result<Found> {
    let size_bytes = bench.pick(256 << 20, 512 << 20);
    // Verifying reads everything, so from then on all of it is in the page cache.
    let targets = prepare(bench, size_bytes, CacheMode::PageCache, progress)?;
    bench.scratch.settle()?;
    let mut found = Found::default();
    note_conditions(&mut found, bench, &targets, size_bytes, rounds(bench));
    let workload = Workload::new(Pattern::Random, Direction::Read, 4096, QUEUE_DEPTH);
    let mut from_disk = FromDisk::default();
    let mut warm = |index: usize| {
        from_disk.window_ended()?;
        peer::warm(&targets[index].path)?;
        from_disk.window_begins()
    };
    let result = compare(bench, &targets, &workload, (0, 1), progress, &mut warm)?;
    from_disk.window_ended()?;
    found.notes.extend(from_disk.note(&result));
    for cell in &result.cells[1..] {
        let name = format!("{}, {} from the page cache: IOPS", cell.target, workload.name);
        found.checks.extend(cell.iops_ratio.as_ref().map(|ratio| Check::of_ratio(name, ratio, CACHED_BAR)));
    }
    Ok(found)
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
    fn note(&self, result: &WorkloadResult) -> Option<String> {
        let block_bytes = u64::from(result.workload.block_bytes);
        let all: u64 = result.cells.iter().flat_map(|cell| &cell.rounds).map(|round| round.reads * block_bytes).sum();
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

fn prepare(bench: &Bench<'_>, size_bytes: u64, cache: CacheMode, progress: &mut dyn Progress) -> Result<Vec<Target>> {
    let how = bench.preparation(size_bytes, cache);
    let total = 2 * TARGETS.len() as u64 * size_bytes;
    bench.scratch.need("these disks", TARGETS.len() as u64 * size_bytes + (1 << 30))?;
    let dir = bench.scratch.folder("disks")?;
    let mut targets = Vec::new();
    for (index, container) in TARGETS.into_iter().enumerate() {
        let before = 2 * index as u64 * size_bytes;
        let mut tick = |done| report(progress, "prepare", before + done, total, container.name());
        let path = targets::make_filled(container, &dir, &how, &mut tick)?;
        let mut tick = |done| report(progress, "prepare", before + size_bytes + done, total, container.name());
        targets.push(targets::open_verified(container, path, &how, &mut tick)?);
    }
    Ok(targets)
}

/// The raw file once more, in a folder of its own.
fn prepare_control(bench: &Bench<'_>, size_bytes: u64, progress: &mut dyn Progress) -> Result<Target> {
    bench.scratch.need("a second raw file", size_bytes)?;
    let how = bench.preparation(size_bytes, CacheMode::Direct);
    let dir = bench.scratch.folder("control")?;
    let mut tick = |done| report(progress, "prepare", done, 2 * size_bytes, CONTROL);
    let path = targets::make_filled(Container::Raw, &dir, &how, &mut tick)?;
    let mut tick = |done| report(progress, "prepare", size_bytes + done, 2 * size_bytes, CONTROL);
    Ok(targets::open_verified(Container::Raw, path, &how, &mut tick)?.named(CONTROL))
}

/// Many and short, for what disturbs a round seldom disturbs all.
fn rounds(bench: &Bench<'_>) -> usize {
    bench.rounds(bench.pick(7, 15))
}

fn note_conditions(found: &mut Found, bench: &Bench<'_>, targets: &[Target], size_bytes: u64, rounds: usize) {
    found.notes.push(format!(
        "disks of {}, filled, read back and compared; {rounds} rounds, cells of {}",
        bytes(size_bytes),
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

fn compare(
    bench: &Bench<'_>,
    targets: &[Target],
    workload: &Workload,
    (index, count): (usize, usize),
    progress: &mut dyn Progress,
    before: &mut Before<'_>,
) -> Result<WorkloadResult> {
    let rounds = rounds(bench);
    let targets: Vec<OpenTarget> = targets.iter().map(Target::to_measure).collect();
    let plan = Plan {
        rounds,
        warm_up: Duration::ZERO,
        measured: Duration::ZERO,
        engine: bench.options.engine,
        seed: 1 + index as u64,
    }
    .with_cell(bench.cell());
    let cells = (targets.len() * rounds) as u64;
    let mut steps = Steps { progress, phase: "measure", done: index as u64 * cells, total: count as u64 * cells };
    measure::compare_after(&targets, workload, &plan, &mut steps, before)
}
