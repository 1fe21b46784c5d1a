//! Random writes to a disk whose changes are tracked, against the same disk without a point.
//!
//! The point is started right before the window, so the window has all requests that wait for their
//! range to be marked. Each round has new disks, in turns.

use crate::turns::in_turns;
use diskwright_disk::{Disk, OpenOptions};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome, SEED},
    measure,
    progress::Progress,
    rounds::Window,
    scratch,
    targets::{Container, Target, create_empty},
};
use diskwright_load::{
    job::{Job, Span},
    run::RunOptions,
    seeds,
    workload::{Direction, Pattern, Workload},
};
use diskwright_stats::numbers::{bytes, grouped};
use diskwright_store::CacheMode;
use std::io;

const CONTAINER: Container = Container::VhdxFixed;

pub(crate) fn random_writes(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let size_bytes: u64 = context.pick(2 << 30, 4 << 30);
    let count = context.pick(60_000, 400_000);
    context.scratch.need("these disks", size_bytes + (2 << 30))?;
    let workload = Workload::new(Pattern::Random, Direction::Write, 4096, 32);
    let rounds = context.rounds(5);
    let mut rates = [Vec::new(), Vec::new()];
    in_turns(
        "tracking",
        &["tracked", "not tracked"],
        (rounds, 2),
        progress,
        &mut |Window { cell: who, round }, watch| {
            let is_tracked = who == 0;
            let dir = context.scratch.folder("tracking")?;
            let path = create_empty(CONTAINER, &dir, size_bytes)?;
            if is_tracked {
                let started = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() })
                    .and_then(|disk| disk.start_tracking("bench").and_then(|()| disk.close()));
                started.map_err(|error| LabError::file("track", &path)(io::Error::other(error)))?;
            }
            context.scratch.settle()?;
            let target = Target::open(CONTAINER, path.clone(), CacheMode::Direct, context.options.engine)?;
            let mut job = Job::simple(&workload.name, workload.load(), Span::default(), Span::from_secs(1));
            (job.phases[0].count, job.engine) = (Some(count), context.options.engine.into());
            job.seed = seeds::of_window(SEED, &workload.name, round);
            let phase = measure::window(&job, &target.to_measure(), &RunOptions::default(), watch)?;
            rates[who].push(phase.iops());
            target.close()?;
            scratch::simplify_before_removal(&path);
            std::fs::remove_dir_all(&dir).map_err(LabError::file("remove", &dir))?;
            context.scratch.settle()?;
            Ok(())
        },
    )?;
    let name = "VHDX fixed, tracked against not tracked, 4K random write: IOPS";
    Ok(RowOutcome {
        checks: vec![Check::ratio(name, "IOPS", &rates[0], &rates[1], Bar::AtLeast(0.97))],
        notes: vec![format!(
            "new disks of {} each round, {} writes, QD 32, O_DIRECT, from the first write after the point; {rounds} rounds in turns",
            bytes(size_bytes),
            grouped(count as f64)
        )],
        ..RowOutcome::default()
    })
}
