//! A burst of small writes to a slow tier with a write-back cache, against the fast member alone;
//! and what a full cache costs, against the slow member alone. All members are limited, so that the
//! disk below them is not.

use super::tiered::{Tiered, TieredOptions, disk_of};
use crate::turns::in_turns;
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome, SEED},
    measure,
    progress::Progress,
    rounds::Window,
};
use diskwright_load::{
    OpenTarget,
    figures::Figures,
    job::{Job, Span},
    run::RunOptions,
    seeds,
    workload::{Direction, Pattern, Workload},
};
use diskwright_space::{SLAB_BYTES_DEFAULT, Tier};
use diskwright_store::StoreLimit;
use std::{path::Path, time::Duration};

const MIB: u64 = 1 << 20;
const QUEUE_DEPTH: u32 = 32;
const FAST: StoreLimit = StoreLimit { iops: 8_000, latency: Duration::from_micros(100) };
const SLOW: StoreLimit = StoreLimit { iops: 150, latency: Duration::from_millis(6) };
/// Length of the disks.
const DISK_BYTES: u64 = 1024 * MIB;
/// What a burst writes, and the cache, which has room for it.
const BURST_BYTES: u64 = 512 * MIB;
const CACHE_BYTES: u64 = 640 * MIB;
/// A cache that is soon full.
const SMALL_CACHE_BYTES: u64 = 16 * MIB;
/// How long a full cache is written before and while it is measured.
const FILL: Duration = Duration::from_secs(10);
const FULL: Duration = Duration::from_secs(30);

const BURST: Bar = Bar::AtLeast(0.8);
const LATENCY: Bar = Bar::AtMost(2.0);

/// The disk at the speed of the limits, with an empty cache.
fn limited(pool: &Tiered, name: &str) -> Result<OpenTarget> {
    let wrong = || LabError::file("empty the cache of", Path::new("space://bench/disk"));
    let unlimited = pool.open(None)?;
    while unlimited.destage(u64::MAX).map_err(wrong())? {}
    drop(unlimited);
    let pool = pool.open(Some([FAST, SLOW]))?;
    pool.start_own_work();
    disk_of(&pool, name)
}

pub(crate) fn burst(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    context.scratch.need("four pools", 4 * DISK_BYTES + 2 * CACHE_BYTES)?;
    let make = |name: &str, tier, write_cache_bytes| {
        let options = TieredOptions {
            members_bytes: [2 * DISK_BYTES; 2],
            slab_bytes: SLAB_BYTES_DEFAULT,
            disk_bytes: DISK_BYTES,
            tier,
            write_cache_bytes,
        };
        Tiered::make(&context.scratch.folder(name)?, &options)
    };
    let pools = [
        make("fast", Tier::Fast, None)?,
        make("cached", Tier::Slow, Some(CACHE_BYTES))?,
        make("slow", Tier::Slow, None)?,
        make("full", Tier::Slow, Some(SMALL_CACHE_BYTES))?,
    ];
    let names = ["fast member", "cache", "slow member", "full cache"];
    let rounds = context.rounds(context.pick(1, 5));
    let workload = Workload::new(Pattern::Random, Direction::Write, 4096, QUEUE_DEPTH);
    // At the rate that must be reached a burst has this length.
    let burst_s = BURST_BYTES as f64 / 4096.0 / (0.8 * FAST.iops as f64);
    let spans = |who: usize| match who {
        0 | 1 => (Duration::ZERO, Duration::from_secs_f64(burst_s * context.pick(0.25, 1.0))),
        _ => (FILL, FULL.mul_f64(context.pick(0.5, 1.0))),
    };
    let mut found: [Vec<Figures>; 4] = Default::default();
    in_turns(&workload.name, &names, (rounds, SEED), progress, &mut |Window { cell: who, round }, watch| {
        let target = limited(&pools[who], names[who])?;
        let (warm_up, measured) = spans(who);
        let mut job = Job::simple(
            &workload.name,
            workload.load(),
            if warm_up.is_zero() { Span::default() } else { warm_up.into() },
            measured.into(),
        );
        job.engine = context.options.engine.into();
        job.seed = seeds::of_window(SEED, &workload.name, round);
        found[who].push(Figures::of(&measure::window(&job, &target, &RunOptions::default(), watch)?));
        Ok(())
    })?;
    let of = |who: usize, figure: fn(&Figures) -> f64| found[who].iter().map(figure).collect::<Vec<f64>>();
    let iops = |figures: &Figures| figures.iops;
    let p99 = |figures: &Figures| figures.p99_ns;
    let checks = vec![
        Check::ratio("a burst into the cache: IOPS", "IOPS", &of(1, iops), &of(0, iops), BURST),
        Check::ratio("a full cache: 99th percentile of the latency", "ns", &of(3, p99), &of(2, p99), LATENCY),
    ];
    let rate = |who: usize| of(who, iops).iter().map(|iops| format!("{iops:.0}")).collect::<Vec<_>>().join(", ");
    let notes = vec![
        format!(
            "4K random write, QD {QUEUE_DEPTH}, O_DIRECT, one copy; members limited to {} IOPS and {:?}, and {} IOPS and {:?}; {rounds} rounds in turns",
            FAST.iops, FAST.latency, SLOW.iops, SLOW.latency
        ),
        format!("a full cache takes {} IOPS, the slow member alone {}", rate(3), rate(2)),
    ];
    Ok(RowOutcome { checks, notes, ..RowOutcome::default() })
}
