//! The share of the requests that the fast members serve: as predicted when what is used often had
//! moved there, as measured afterwards, and as the best placement would have.

use super::{
    failed,
    tiered::{Tiered, TieredOptions, disk_of},
};
use crate::turns::in_turns;
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome, SEED},
    measure,
    progress::Progress,
    rounds::Window,
};
use diskwright_load::{
    job::{Distribution, Job, Span},
    run::RunOptions,
    seeds,
    workload::{Direction, Pattern, Workload},
};
use diskwright_space::{Pool, SLAB_BYTES_DEFAULT, Tier};
use diskwright_stats::numbers::bytes;
use std::{io, path::Path, sync::Arc, time::Duration};

const MIB: u64 = 1 << 20;
const DISK_BYTES: u64 = 2048 * MIB;
/// The fast member: a tenth of the disk, a tenth of itself as a reserve, and the journal.
const FAST_BYTES: u64 = DISK_BYTES / 9 + 24 * MIB;
const THETA: f64 = 1.2;
const QUEUE_DEPTH: u32 = 32;
const DIFFERENCE: Bar = Bar::AtMost(0.03);
const BEST: Bar = Bar::AtLeast(0.97);

fn unknown() -> LabError {
    LabError::file("measure", Path::new("space://bench/disk"))(io::Error::other("no request was counted"))
}

pub(crate) fn predicted_share(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    context.scratch.need("a pool of two members", 2 * DISK_BYTES)?;
    let options = TieredOptions {
        members_bytes: [FAST_BYTES, DISK_BYTES + DISK_BYTES / 8],
        slab_bytes: SLAB_BYTES_DEFAULT,
        disk_bytes: DISK_BYTES,
        tier: Tier::Any,
        write_cache_bytes: None,
    };
    let tiered = Tiered::make(&context.scratch.folder("tiers")?, &options)?;
    let workload = Workload::new(Pattern::Random, Direction::Read, 4096, QUEUE_DEPTH);
    let rounds = context.rounds(context.pick(3, 9));
    let (learned, measured) = (Duration::from_secs(context.pick(2, 6)), Duration::from_secs(context.pick(6, 18)));
    let (mut differences, mut shares, mut notes) = (Vec::new(), Vec::new(), Vec::new());
    in_turns(&workload.name, &["tiers"], (rounds, SEED), progress, &mut |Window { round, .. }, watch| {
        let job = |pool: &Arc<Pool>, span: Duration| -> Result<()> {
            let target = disk_of(pool, "tiers")?;
            let mut load = workload.load();
            load.distribution = Distribution::Zipf { theta: THETA };
            let mut job = Job::simple(&workload.name, load, Span::default(), span.into());
            job.engine = context.options.engine.into();
            // Other blocks are popular in each round, and the same in both windows of a round.
            job.seed = seeds::of_window(SEED, &workload.name, round);
            measure::window(&job, &target, &RunOptions::default(), watch).map(|_| ())
        };
        let pool = tiered.open(None)?;
        job(&pool, learned)?;
        let predicted = pool.optimize(false, &mut |_| true).map_err(failed)?.share_after.ok_or_else(unknown)?;
        // Opened again, it counts from the beginning.
        drop(pool);
        let pool = tiered.open(None)?;
        job(&pool, measured)?;
        let report = pool.tier_report().map_err(failed)?;
        let found = report.measured.ok_or_else(unknown)?;
        let (share, best) = (report.share.ok_or_else(unknown)?, report.share_after.ok_or_else(unknown)?);
        differences.push((found - predicted).abs());
        shares.push(share / best);
        notes.push(format!("{:.3} predicted, {found:.3} measured, {best:.3} at best", predicted));
        Ok(())
    })?;
    let checks = vec![
        Check::absolute("predicted share less the measured one", "", &differences, DIFFERENCE),
        Check::absolute("measured share of the best placement's", "", &shares, BEST),
    ];
    notes.insert(
        0,
        format!(
            "a disk of {}, a tenth of it on the fast member; 4K random read, zipf {THETA}, QD {QUEUE_DEPTH}; {rounds} rounds: {} s, optimised, {} s, of which the first {} s are the same requests",
            bytes(DISK_BYTES),
            learned.as_secs(),
            measured.as_secs(),
            learned.as_secs()
        ),
    );
    Ok(RowOutcome { checks, notes, ..RowOutcome::default() })
}
