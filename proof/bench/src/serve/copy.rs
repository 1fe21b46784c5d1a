//! nbdcopy from a server to `null:`: the speed of reading a whole disk, against qemu-nbd, and
//! against reading the disk in this process.
//!
//! In this process the disk is read through the block queue with O_DIRECT, by requests like
//! nbdcopy's. It is also carried through unix sockets by nothing but reads and writes (`carrier`).
//! That decides nothing: it is told beside a check that fails, and bounds what a server can reach.

use super::{Exported, Served, ServerProgram, carrier, serve};
use crate::turns::in_turns;
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, Outcome, RowOutcome, SEED},
    measure::{self, Ratio},
    peer,
    progress::{Progress, report},
    rounds::Window,
    targets::{self, Container, Target},
};
use diskwright_load::{
    job::{Job, Span},
    run::{RunOptions, Watch},
    seeds,
    workload::{Direction, Pattern, Workload},
};
use diskwright_stats::{numbers::bytes, summary::Summary};
use diskwright_store::CacheMode;

/// nbdcopy's request size and requests in flight.
const REQUEST_BYTES: u32 = 256 << 10;
const QUEUE_DEPTH: u32 = 64;
const DISK_BAR: Bar = Bar::AtLeast(0.95);
const PEER_BAR: Bar = Bar::AtLeast(1.2);
const MESSAGES: [&str; 4] =
    ["diskwright to nbdcopy", "qemu-nbd to nbdcopy", "the disk itself", "the disk through sockets, by nothing else"];

pub(crate) fn nbdcopy(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let missing = ServerProgram::QemuNbd.command().err();
    let nbdcopy = match (peer::find("nbdcopy"), missing) {
        (Some(nbdcopy), None) => nbdcopy,
        (None, _) => return Ok(RowOutcome::skipped("nbdcopy", peer::missing("nbdcopy", "libnbd-bin"))),
        (_, Some(missing)) => return Ok(RowOutcome::skipped("nbdcopy", missing)),
    };
    let size_bytes: u64 = context.pick(1 << 30, 4 << 30);
    context.scratch.need("a disk", size_bytes + (1 << 30))?;
    let dir = context.scratch.folder("served")?;
    let container = Container::VhdxDynamic;
    let how = context.preparation(size_bytes, CacheMode::Direct);
    let mut tick = |done| report(progress, "prepare", done, 2 * size_bytes, container.name());
    let path = targets::make_filled(container, &dir, &how, &mut tick)?;
    let mut tick = |done| report(progress, "prepare", size_bytes + done, 2 * size_bytes, container.name());
    targets::open_verified(container, path.clone(), &how, &mut tick)?.close()?;
    context.scratch.settle()?;

    let exported = Exported { writable: false, clients: 16, ..Exported::of(container, &path, CacheMode::Direct) };
    let ours = serve(ServerProgram::Ours, &exported, &dir)?;
    let theirs = serve(ServerProgram::QemuNbd, &exported, &dir)?;
    let disk = Target::open_with(container, path.clone(), CacheMode::Direct, context.options.engine, false)?;
    let workload = Workload::new(Pattern::Sequential, Direction::Read, REQUEST_BYTES, QUEUE_DEPTH);
    let rounds = context.rounds(context.pick(3, 5));
    // In MB/s.
    let mut speeds = [const { Vec::new() }; 4];
    let read_disk = |round: usize, watch: &dyn Watch| {
        let mut job = Job::simple(&workload.name, workload.load(), Span::default(), Span::from_secs(1));
        job.phases[0].count = Some(size_bytes / u64::from(REQUEST_BYTES));
        job.seed = seeds::of_window(SEED, &workload.name, round);
        job.engine = context.options.engine.into();
        Ok::<_, LabError>(measure::window(&job, &disk.to_measure(), &RunOptions::default(), watch)?.mb_per_s())
    };
    in_turns("copy", &MESSAGES, (rounds, 4), progress, &mut |Window { cell: who, round }, watch| {
        let copy = |served: &Served| {
            let cost = peer::run(&nbdcopy, &[&*served.uri, "null:"], None)?;
            Ok::<_, LabError>(size_bytes as f64 * 1e3 / (cost.wall_ns as f64).max(1.0))
        };
        speeds[who].push(match who {
            0 => copy(&ours)?,
            1 => copy(&theirs)?,
            2 => read_disk(round, watch)?,
            _ => carrier::carry(&path, size_bytes, REQUEST_BYTES as usize)
                .map_err(LabError::file("bring out through sockets", &path))?,
        });
        Ok(())
    })?;
    ours.server.stop()?;
    theirs.server.stop()?;
    disk.close()?;
    std::fs::remove_file(&path).map_err(LabError::file("remove", &path))?;
    let [ours, theirs, disk, carried] = &speeds;
    let mut against_disk =
        Check::ratio("the same against the disk read in process: speed", "MB/s", ours, disk, DISK_BAR);
    if let Some(left) = Ratio::of(carried, disk).filter(|_| against_disk.outcome == Outcome::Fail) {
        let Summary { median, min, max, .. } = left.summary;
        against_disk.why = Some(format!(
            "brought out through unix sockets by nothing but reads and writes it gave {median:.2} ({min:.2}..{max:.2})"
        ));
    }
    Ok(RowOutcome {
        checks: vec![
            Check::ratio("nbdcopy of a VHDX to null:, against qemu-nbd: speed", "MB/s", ours, theirs, PEER_BAR),
            against_disk,
        ],
        notes: vec![format!(
            "a dynamic VHDX of {}, filled; qemu-nbd serves the same file with -f vhdx --cache=none --aio=io_uring; the disk itself with requests of {} at depth {QUEUE_DEPTH}; {rounds} rounds in turns",
            bytes(size_bytes),
            bytes(u64::from(REQUEST_BYTES))
        )],
        ..RowOutcome::default()
    })
}
