//! A chain of 1,024 disks: reading through it, and opening it.

use crate::{
    Result,
    bench::{Bar, Bench, Check, Found},
    chain::{CHILDREN_MAX, Chain, ChainPlan},
    fill,
    measure::{self, Plan, Ratio, Steps},
    progress::{Progress, report},
    targets::open_target,
};
use diskwright_load::workload::{Direction, Pattern, Workload};
use diskwright_stats::numbers::{bytes, duration};
use diskwright_store::CacheMode;
use std::time::Duration;

const READ_BAR: Bar = Bar::AtLeast(0.95);
const OPEN_NS: f64 = 1e9;
const OPEN_BYTES: f64 = 256.0 * 1024.0 * 1024.0;

pub(crate) fn reads(bench: &Bench<'_>, progress: &mut dyn Progress) -> Result<Found> {
    let size_bytes = bench.pick(512 << 20, 2 << 30);
    bench.scratch.need("the chain", size_bytes + (3 << 30))?;
    let how = bench.preparation(size_bytes, CacheMode::Direct);
    let chain =
        make(bench, &ChainPlan { how, filled_bytes: size_bytes, children: CHILDREN_MAX, with_own_data: 0 }, progress)?;
    let one = chain.open(0, how.cache, how.engine)?;
    let all = chain.open(CHILDREN_MAX, how.cache, how.engine)?;
    fill::verify("the chain of 1,024", &*all, how.seed, how.engine, &mut |done| {
        report(progress, "verify", done, size_bytes, "chain of 1,024")
    })?;
    let targets = [("chain of 1", one), ("chain of 1,024", all)]
        .map(|(name, disk)| open_target(name, "vhdx chain", disk, how.cache));
    let rounds = bench.rounds(bench.pick(7, 15));
    let mut found = Found::default();
    found.notes.push(format!(
        "VHDX, {} of data in the base, read and compared through the top; {rounds} rounds, cells of {}, O_DIRECT, QD 32",
        bytes(size_bytes),
        duration(bench.cell().as_nanos() as f64)
    ));
    for (pattern, block_bytes) in [(Pattern::Random, 4 << 10), (Pattern::Sequential, 64 << 10)] {
        let workload = Workload::new(pattern, Direction::Read, block_bytes, 32);
        let plan = Plan { rounds, warm_up: Duration::ZERO, measured: Duration::ZERO, engine: how.engine, seed: 7 }
            .with_cell(bench.cell());
        let mut steps = Steps { progress, phase: "measure", done: 0, total: 2 * rounds as u64 };
        let measured = measure::interleaved(&targets, &workload, &plan, &mut steps, &mut |_| Ok(()))?;
        let iops = |index: usize| measured[index].iter().map(|round| round.iops).collect::<Vec<f64>>();
        let ratio = Ratio::of(&iops(1), &iops(0));
        found.checks.extend(ratio.map(|ratio| Check::of_ratio(format!("{}: IOPS", workload.name), &ratio, READ_BAR)));
    }
    Ok(found)
}

pub(crate) fn open(bench: &Bench<'_>, progress: &mut dyn Progress) -> Result<Found> {
    let Some(launcher) = &bench.options.launcher else {
        return Ok(Found::skipped("opening a chain", "the caller gave no way to start a fresh process to measure in"));
    };
    bench.scratch.need("the chain", 3 << 30)?;
    let how = bench.preparation(40 << 30, CacheMode::Direct);
    let plan = ChainPlan { how, filled_bytes: 256 << 20, children: CHILDREN_MAX, with_own_data: 64 };
    let chain = make(bench, &plan, progress)?;
    let rounds = bench.rounds(5);
    let (mut times, mut peaks) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        report(progress, "open", round as u64, rounds as u64, "chain of 1,024")?;
        let cost = launcher.open(chain.top(CHILDREN_MAX), 0, 4096, CacheMode::Direct)?;
        times.push((cost.open_ns + cost.read_ns) as f64);
        peaks.push(cost.resident_peak_bytes as f64);
    }
    Ok(Found {
        checks: vec![
            Check::absolute("open and read 4 KiB", "ns", &times, Bar::AtMost(OPEN_NS)),
            Check::absolute("peak resident memory of the process", "bytes", &peaks, Bar::AtMost(OPEN_BYTES)),
        ],
        notes: vec![format!(
            "VHDX of 40 GiB each, 256 MiB in the base, data of their own in the lowest 64 children; {rounds} fresh processes, files in the page cache"
        )],
        ..Found::default()
    })
}

fn make(bench: &Bench<'_>, plan: &ChainPlan, progress: &mut dyn Progress) -> Result<Chain> {
    let dir = bench.scratch.folder("chain")?;
    Chain::make(&dir, plan, &mut |done| report(progress, "make a chain", done, u64::from(plan.children), "children"))
}
