//! A chain of 1,024 disks: reading through it, and opening it. A chain of 100: what changed in it.

use crate::turns::in_turns;
use diskwright_disk::{Changes, Difference};
use diskwright_lab::{
    Result,
    acceptance::{Bar, Check, Context, RowOutcome},
    chain::{CHILDREN_MAX, Chain, ChainPlan},
    fill,
    measure::{self, Plan, Ratio, Steps},
    progress::{Progress, report},
    targets::open_target,
};
use diskwright_load::workload::{Direction, Pattern, Workload};
use diskwright_stats::numbers::{bytes, duration};
use diskwright_store::{CacheMode, Files};
use std::time::{Duration, Instant};

const READ_BAR: Bar = Bar::AtLeast(0.95);
const OPEN_NS: f64 = 1e9;
const DIFF_NS: f64 = 1e9;
/// Disks in the chain of `diff`, with the base.
const DIFF_DISKS: u32 = 100;
const OPEN_BYTES: f64 = 256.0 * 1024.0 * 1024.0;

pub(crate) fn reads(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let size_bytes = context.pick(512 << 20, 2 << 30);
    context.scratch.need("the chain", size_bytes + (3 << 30))?;
    let how = context.preparation(size_bytes, CacheMode::Direct);
    let chain = make(
        context,
        &ChainPlan { how, filled_bytes: size_bytes, children: CHILDREN_MAX, with_own_data: 0 },
        progress,
    )?;
    let one = chain.open(0, how.cache, how.engine)?;
    let all = chain.open(CHILDREN_MAX, how.cache, how.engine)?;
    fill::verify("the chain of 1,024", &*all, how.seed, how.engine, &mut |done| {
        report(progress, "verify", done, size_bytes, "chain of 1,024")
    })?;
    let targets = [("chain of 1", one), ("chain of 1,024", all)]
        .map(|(name, disk)| open_target(name, "vhdx chain", disk, how.cache));
    let rounds = context.rounds(context.pick(7, 15));
    let mut found = RowOutcome::default();
    found.notes.push(format!(
        "VHDX, {} of data in the base, read and compared through the top; {rounds} rounds, cells of {}, O_DIRECT, QD 32",
        bytes(size_bytes),
        duration(context.cell().as_nanos() as f64)
    ));
    for (pattern, block_bytes) in [(Pattern::Random, 4 << 10), (Pattern::Sequential, 64 << 10)] {
        let workload = Workload::new(pattern, Direction::Read, block_bytes, 32);
        let plan = Plan { rounds, warm_up: Duration::ZERO, measured: Duration::ZERO, engine: how.engine, seed: 7 }
            .with_cell(context.cell());
        let mut steps = Steps { progress, phase: "measure", done: 0, total: 2 * rounds as u64 };
        let all = measure::interleaved(&targets, &workload, &plan, &mut steps, &mut |_| Ok(()))?;
        let [one, many] = [0, 1].map(|index| all[index].iter().map(|round| round.iops).collect::<Vec<f64>>());
        let name = format!("{}: IOPS", workload.name);
        found.checks.push(match Ratio::of(&many, &one) {
            Some(ratio) => Check::of_ratio(name, &ratio, READ_BAR),
            None => Check::broken(&name, "nothing was measured"),
        });
    }
    Ok(found)
}

pub(crate) fn open(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let Some(launcher) = &context.options.launcher else {
        return Ok(RowOutcome::skipped(
            "opening a chain",
            "the caller gave no way to start a fresh process to measure in",
        ));
    };
    context.scratch.need("the chain", 3 << 30)?;
    let how = context.preparation(40 << 30, CacheMode::Direct);
    let plan = ChainPlan { how, filled_bytes: 256 << 20, children: CHILDREN_MAX, with_own_data: 64 };
    let chain = make(context, &plan, progress)?;
    let rounds = context.rounds(5);
    let (mut times, mut peaks) = (Vec::new(), Vec::new());
    in_turns("open", &["chain of 1,024"], (rounds, 0), progress, &mut |_, _| {
        let cost = launcher.open(chain.top(CHILDREN_MAX), 0, 4096, CacheMode::Direct)?;
        times.push((cost.open_ns + cost.read_ns) as f64);
        peaks.push(cost.resident_peak_bytes as f64);
        Ok(())
    })?;
    Ok(RowOutcome {
        checks: vec![
            Check::absolute("open and read 4 KiB", "ns", &times, Bar::AtMost(OPEN_NS)),
            Check::absolute("peak resident memory of the process", "bytes", &peaks, Bar::AtMost(OPEN_BYTES)),
        ],
        notes: vec![format!(
            "VHDX of 40 GiB each, 256 MiB in the base, data of their own in the lowest 64 children; {rounds} fresh processes, files in the page cache"
        )],
        ..RowOutcome::default()
    })
}

/// Opening a chain and finding what changed above its base, as `diskwright diff --since` does.
pub(crate) fn diff(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    context.scratch.need("the chain", 3 << 30)?;
    let how = context.preparation(40 << 30, CacheMode::PageCache);
    let children = DIFF_DISKS - 1;
    let plan = ChainPlan { how, filled_bytes: 256 << 20, children, with_own_data: children };
    let chain = make(context, &plan, progress)?;
    let rounds = context.rounds(5);
    let (mut times, mut ranges, mut data_bytes) = (Vec::new(), 0, 0);
    for round in 0..rounds {
        report(progress, "diff", round as u64, rounds as u64, "chain of 100")?;
        let began = Instant::now();
        let disk = chain.open(children, how.cache, how.engine)?;
        let (top, base) = (chain.top(children), chain.top(0));
        let mut difference = Difference::since((&disk, top), Some(base), &Files::default(), how.engine)?;
        (ranges, data_bytes) = (0_u64, 0);
        difference.for_each(&mut |_, _| true, &mut |change, _| {
            ranges += 1;
            data_bytes += change.len_bytes;
            Ok(())
        })?;
        times.push(began.elapsed().as_nanos() as f64);
        if difference.reads_contents() || ranges == 0 {
            let why = "the contents of the disks were read, or nothing was found";
            return Ok(RowOutcome { checks: vec![Check::broken("diff", why)], ..RowOutcome::default() });
        }
    }
    Ok(RowOutcome {
        checks: vec![Check::absolute("open and diff against the base", "ns", &times, Bar::AtMost(DIFF_NS))],
        notes: vec![format!(
            "VHDX of 40 GiB each, every child with data of its own: {ranges} ranges, {} in all, by tables and sector bitmaps alone; files in the page cache, {rounds} rounds",
            bytes(data_bytes)
        )],
        ..RowOutcome::default()
    })
}

fn make(context: &Context<'_>, plan: &ChainPlan, progress: &mut dyn Progress) -> Result<Chain> {
    let dir = context.scratch.folder("chain")?;
    Chain::make(&dir, plan, &mut |done| report(progress, "make a chain", done, u64::from(plan.children), "children"))
}
