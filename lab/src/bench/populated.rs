//! Populated disks against the raw file: the sixteen workloads past the page cache, and 4K random reads out of it.

use crate::{
    Result,
    bench::{Bar, Bench, Check, Found},
    child::cache_word,
    measure::{self, Named, Plan, WorkloadResult},
    progress::{Progress, report},
    table::{bytes, duration},
    targets::{self, Container, Target},
    workload::{Direction, Pattern, Workload, paper_monolithic},
};
use diskwright_store::CacheMode;
use std::time::Duration;

const QUEUE_DEPTH: u32 = 32;
const IOPS_BAR: Bar = Bar::AtLeast(0.95);
const CPU_BAR: Bar = Bar::AtMost(1.10);
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
    let targets = prepare(bench, size_bytes, CacheMode::Direct, progress)?;
    let mut found = Found::default();
    note_conditions(&mut found, bench, &targets, size_bytes, rounds(bench));
    let all = paper_monolithic(QUEUE_DEPTH);
    for (index, workload) in all.iter().enumerate() {
        let result = compare(bench, &targets, workload, (index, all.len()), progress)?;
        for cell in &result.cells[1..] {
            let iops = cell.iops_ratio.as_ref();
            let cpu = cell.cpu_ratio.as_ref();
            let name = |what: &str| format!("{}, {}: {what}", cell.target, workload.name);
            found.checks.extend(iops.map(|ratio| Check::of_ratio(name("IOPS"), ratio, IOPS_BAR)));
            found.checks.extend(cpu.map(|ratio| Check::of_ratio(name("CPU per I/O"), ratio, CPU_BAR)));
        }
    }
    Ok(found)
}

pub(crate) fn page_cache(bench: &Bench<'_>, progress: &mut dyn Progress) -> Result<Found> {
    let size_bytes = bench.pick(256 << 20, 512 << 20);
    // Verifying reads everything, so from then on all of it is in the page cache.
    let targets = prepare(bench, size_bytes, CacheMode::PageCache, progress)?;
    bench.scratch.settle()?;
    let mut found = Found::default();
    note_conditions(&mut found, bench, &targets, size_bytes, rounds(bench));
    let workload = Workload::new(Pattern::Random, Direction::Read, 4096, QUEUE_DEPTH);
    let result = compare(bench, &targets, &workload, (0, 1), progress)?;
    for cell in &result.cells[1..] {
        let name = format!("{}, {} from the page cache: IOPS", cell.target, workload.name);
        found.checks.extend(cell.iops_ratio.as_ref().map(|ratio| Check::of_ratio(name, ratio, CACHED_BAR)));
    }
    Ok(found)
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
) -> Result<WorkloadResult> {
    let rounds = rounds(bench);
    let named: Vec<Named<'_>> = targets.iter().map(|target| (target.name(), target.device())).collect();
    let plan = Plan {
        rounds,
        warm_up: Duration::ZERO,
        measured: Duration::ZERO,
        engine: bench.options.engine,
        seed: 1 + index as u64,
    }
    .with_cell(bench.cell());
    let cells = (named.len() * rounds) as u64;
    measure::compare(&named, workload, &plan, &mut |cell, name| {
        let message = format!("{}, {name}", workload.name);
        report(progress, "measure", index as u64 * cells + cell, count as u64 * cells, &message)
    })
}
