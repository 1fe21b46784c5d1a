//! The share of the requests that the fast members serve: as predicted when what is used often had
//! moved there, as measured afterwards, and as the best placement would have.

use super::{failed, files};
use crate::turns::in_turns;
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome, SEED},
    measure,
    progress::Progress,
    rounds::Window,
    targets::open_target,
};
use diskwright_load::{
    OpenTarget,
    job::{Distribution, Job, Span},
    run::RunOptions,
    seeds,
    workload::{Direction, Pattern, Workload},
};
use diskwright_space::{Class, NewFile, NewMember, Pool, PoolCreateOptions, PoolOptions, Tier};
use diskwright_stats::numbers::bytes;
use diskwright_store::{BlockDevice, CacheMode, FileRange, LockMode, RawDevice, Store};
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
    let paths = files(&context.scratch.folder("tiers")?, &[FAST_BYTES, DISK_BYTES + DISK_BYTES / 8])?;
    let members: Vec<NewMember> = paths
        .iter()
        .zip([Class::Ssd, Class::Hdd])
        .map(|(path, class)| NewMember { path: path.clone(), class })
        .collect();
    let options = PoolCreateOptions { copies: Some(1), ..PoolCreateOptions::default() };
    Pool::create("bench", &members, &options).map_err(failed)?;
    let open = || {
        let options = PoolOptions { writable: true, cache: CacheMode::Direct, ..PoolOptions::default() };
        Pool::open(&paths, &options).map(Arc::new).map_err(failed)
    };
    let wrong = || LabError::file("use", Path::new("space://bench/disk"));
    let disk = |pool: &Arc<Pool>| {
        pool.open_file("disk", true, LockMode::Exclusive).map_err(|error| wrong()(io::Error::other(error)))
    };
    let pool = open()?;
    pool.create_file("disk", NewFile { len_bytes: DISK_BYTES, copies: 1, tier: Tier::Slow }).map_err(failed)?;
    disk(&pool)?.allocate(FileRange { offset_bytes: 0, len_bytes: DISK_BYTES }).map_err(wrong())?;
    pool.pin_file("disk", Tier::Any).map_err(failed)?;
    drop(pool);
    let workload = Workload::new(Pattern::Random, Direction::Read, 4096, QUEUE_DEPTH);
    let rounds = context.rounds(context.pick(3, 9));
    let (learned, measured) = (Duration::from_secs(context.pick(2, 6)), Duration::from_secs(context.pick(6, 18)));
    let (mut differences, mut shares, mut notes) = (Vec::new(), Vec::new(), Vec::new());
    in_turns(&workload.name, &["tiers"], (rounds, SEED), progress, &mut |Window { round, .. }, watch| {
        let job = |pool: &Arc<Pool>, span: Duration| -> Result<()> {
            let device: Arc<dyn BlockDevice> = Arc::new(RawDevice::new(disk(pool)?, true, 512).map_err(wrong())?);
            let target: OpenTarget = open_target("tiers", "tiers", device, CacheMode::Direct);
            let mut load = workload.load();
            load.distribution = Distribution::Zipf { theta: THETA };
            let mut job = Job::simple(&workload.name, load, Span::default(), span.into());
            job.engine = context.options.engine.into();
            // Other blocks are popular in each round, and the same in both windows of a round.
            job.seed = seeds::of_window(SEED, &workload.name, round);
            measure::window(&job, &target, &RunOptions::default(), watch).map(|_| ())
        };
        let pool = open()?;
        job(&pool, learned)?;
        let predicted = pool.optimize(false, &mut |_| true).map_err(failed)?.share_after.ok_or_else(unknown)?;
        // Opened again, it counts from the beginning.
        drop(pool);
        let pool = open()?;
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
