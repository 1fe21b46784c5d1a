//! Writes that must allocate blocks: in order against qemu-io, and at random against a preallocated
//! raw file.
//!
//! qemu-io is one process that reads its commands from a file. Its time is that of the process less
//! that of a process which only opens and closes the same disk. Ours is the time from the first
//! write to the end of the flush. Both use O_DIRECT, one request at a time.

use crate::turns::in_turns;
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome, SEED},
    measure,
    peer::{self, Cost},
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
use diskwright_stats::numbers::{bytes, duration, grouped};
use diskwright_store::{Blocking, CacheMode};
use std::{fmt::Write as _, path::Path, time::Instant};

const BLOCK_BYTES: u64 = 2 << 20;
const WRITE_BYTES: usize = 4096;

pub(crate) fn blocks(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let (Some(qemu_io), Some(qemu_img)) = (peer::find("qemu-io"), peer::find("qemu-img")) else {
        return Ok(RowOutcome::skipped("writes into unallocated blocks", peer::missing("qemu-io", "qemu-utils")));
    };
    let blocks = context.pick(1024, 16_384);
    let size_bytes = blocks * BLOCK_BYTES;
    context.scratch.need("these blocks", size_bytes + (2 << 30))?;
    let dir = context.scratch.folder("allocate")?;
    let (script, quit) = (dir.join("commands"), dir.join("quit"));
    std::fs::write(&script, commands(blocks)).map_err(LabError::file("write", &script))?;
    std::fs::write(&quit, "quit\n").map_err(LabError::file("write", &quit))?;

    let rounds = context.rounds(3);
    let mut found = RowOutcome::default();
    found.notes.push(format!(
        "{} blocks of 2 MiB, in order, QD 1, O_DIRECT, then one flush; {rounds} rounds in turns",
        grouped(blocks as f64)
    ));
    for (container, format, options, bar) in [
        (Container::VhdxDynamic, "vhdx", "subformat=dynamic,block_size=2097152", 20.0),
        (Container::VhdDynamic, "vpc", "subformat=dynamic,force_size=on", 6.0),
    ] {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        let subjects = ["diskwright", "qemu-io"].map(|tool| format!("{}, {tool}", container.name()));
        in_turns(
            "allocate",
            &[&*subjects[0], &*subjects[1]],
            (rounds, 1),
            progress,
            &mut |Window { cell: who, .. }, _| {
                if who == 0 {
                    ours.push(write_blocks(context, container, &dir, blocks)? as f64);
                } else {
                    let path = dir.join("peer");
                    let made = [
                        &["create", "-q", "-f", format, "-o", options][..],
                        &[&path.to_string_lossy(), &size_bytes.to_string()],
                    ];
                    peer::run(&qemu_img, &made.concat(), None)?;
                    theirs.push(qemu_blocks(&qemu_io, format, &path, &script, &quit)? as f64);
                    std::fs::remove_file(&path).map_err(LabError::file("remove", &path))?;
                }
                scratch::settle(&dir)?;
                Ok(())
            },
        )?;
        // Blocks a second, so that more is better.
        let speed = |times: &[f64]| -> Vec<f64> { times.iter().map(|ns| blocks as f64 * 1e9 / ns.max(1.0)).collect() };
        let name = format!("{}: blocks allocated a second", container.name());
        found.checks.push(Check::ratio(name, "blocks/s", &speed(&ours), &speed(&theirs), Bar::AtLeast(bar)));
    }
    Ok(found)
}

/// The commands for qemu-io.
fn commands(blocks: u64) -> String {
    let mut text = String::new();
    for block in 0..blocks {
        let _ = writeln!(text, "write -q -P {} {} {WRITE_BYTES}", block % 255 + 1, block * BLOCK_BYTES);
    }
    text.push_str("flush\nquit\n");
    text
}

/// Writes and flushes with our engine, then opens the disk again and compares what it holds.
/// Returns the time of the writes and the flush, nanoseconds.
fn write_blocks(context: &Context<'_>, container: Container, dir: &Path, blocks: u64) -> Result<u64> {
    let home = dir.join("ours");
    std::fs::create_dir(&home).map_err(LabError::file("create", &home))?;
    let path = create_empty(container, &home, blocks * BLOCK_BYTES)?;
    let engine = context.options.engine;
    let target = Target::open(container, path.clone(), CacheMode::Direct, engine)?;
    let mut sector = [0; WRITE_BYTES];
    let failed = |doing| LabError::file(doing, &path);
    let took_ns = {
        let mut device = Blocking::open(target.device(), engine).map_err(failed("open"))?;
        let start = Instant::now();
        for block in 0..blocks {
            sector.fill((block % 255 + 1) as u8);
            device.write(block * BLOCK_BYTES, &sector, false).map_err(failed("write to"))?;
        }
        device.flush().map_err(failed("flush"))?;
        start.elapsed().as_nanos() as u64
    };
    target.close()?;
    let target = Target::open_with(container, path.clone(), CacheMode::Direct, engine, false)?;
    {
        let mut device = Blocking::open(target.device(), engine).map_err(failed("open"))?;
        for block in 0..blocks {
            device.read(block * BLOCK_BYTES, &mut sector).map_err(failed("read"))?;
            if let Some(at) = sector.iter().position(|byte| *byte != (block % 255 + 1) as u8) {
                let offset_bytes = block * BLOCK_BYTES + at as u64;
                return Err(LabError::WrongData { target: target.name().into(), offset_bytes });
            }
        }
    }
    target.close()?;
    std::fs::remove_dir_all(&home).map_err(LabError::file("remove", &home))?;
    Ok(took_ns)
}

/// Time of the writes and the flush in qemu-io, nanoseconds.
fn qemu_blocks(qemu_io: &Path, format: &str, path: &Path, script: &Path, quit: &Path) -> Result<u64> {
    let args = ["-n", "-f", format, &path.to_string_lossy()];
    let start_ns = (0..3).map(|_| peer::run(qemu_io, &args, Some(quit))).collect::<Result<Vec<Cost>>>()?;
    let start_ns = start_ns.iter().map(|cost| cost.wall_ns).min().unwrap_or(0);
    Ok(peer::run(qemu_io, &args, Some(script))?.wall_ns.saturating_sub(start_ns))
}

/// Into an empty dynamic VHDX.
pub(crate) fn random_writes(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    random_writes_into(Container::VhdxDynamic, context, progress)
}

/// Into an empty qcow2.
pub(crate) fn random_writes_qcow2(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    random_writes_into(Container::Qcow2, context, progress)
}

fn random_writes_into(empty: Container, context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let size_bytes: u64 = context.pick(2 << 30, 16 << 30);
    let count = context.pick(60_000, 400_000);
    context.scratch.need("these disks", size_bytes + (2 << 30))?;
    let workload = Workload::new(Pattern::Random, Direction::Write, 4096, 32);
    let rounds = context.rounds(5);
    let pair = [empty, Container::Raw];
    let (mut rates, mut flushes) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    let subjects = pair.map(Container::name);
    in_turns("random writes", &subjects, (rounds, 2), progress, &mut |Window { cell: who, round }, watch| {
        let dir = context.scratch.folder("fresh")?;
        let path = create_empty(pair[who], &dir, size_bytes)?;
        context.scratch.settle()?;
        let target = Target::open(pair[who], path.clone(), CacheMode::Direct, context.options.engine)?;
        let mut job = Job::simple(&workload.name, workload.load(), Span::default(), Span::from_secs(1));
        (job.phases[0].count, job.engine) = (Some(count), context.options.engine.into());
        job.seed = seeds::of_window(SEED, &workload.name, round);
        let phase = measure::window(&job, &target.to_measure(), &RunOptions::default(), watch)?;
        rates[who].push(phase.iops());
        let start = Instant::now();
        Blocking::open(target.device(), context.options.engine)
            .and_then(|mut device| device.flush())
            .map_err(LabError::file("flush", &path))?;
        flushes[who].push(start.elapsed().as_nanos() as f64);
        target.close()?;
        scratch::simplify_before_removal(&path);
        std::fs::remove_dir_all(&dir).map_err(LabError::file("remove", &dir))?;
        context.scratch.settle()?;
        Ok(())
    })?;
    let name = format!("empty {} against preallocated raw file, 4K random write: IOPS", empty.name());
    let flush = |who: usize| duration(diskwright_stats::summary::median(&flushes[who]).unwrap_or(0.0));
    Ok(RowOutcome {
        checks: vec![Check::ratio(name, "IOPS", &rates[0], &rates[1], Bar::AtLeast(0.90))],
        notes: vec![format!(
            "new disks of {} each round, {} writes, QD 32, O_DIRECT; {rounds} rounds in turns; the flush after them took {} ({}) and {} (raw)",
            bytes(size_bytes),
            grouped(count as f64),
            flush(0),
            empty.name(),
            flush(1)
        )],
        ..RowOutcome::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_io_is_told_the_same_writes_as_we_make() {
        let text = commands(256);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 258);
        assert_eq!((lines[0], lines[255]), ("write -q -P 1 0 4096", "write -q -P 1 534773760 4096"));
        assert_eq!(&lines[256..], ["flush", "quit"]);
    }
}
