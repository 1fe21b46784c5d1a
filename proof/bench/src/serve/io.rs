//! fio's nbd engine over a unix socket: 4 KiB at random.
//!
//! Before anything is measured, fio writes through our server, reads back and compares.
//!
//! Reads with O_DIRECT are also made of the raw file itself, in the same rounds. They decide
//! nothing: they are told beside a check that fails.

use super::{BARE_LOAD, Exported, Served, ServerProgram, serve, tell_ceiling};
use crate::{
    fio::{self, FioUntil, NbdLoad},
    turns::in_turns,
};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome},
    peer,
    progress::{Progress, report},
    rounds::Window,
    scratch,
    server::cost_of,
    targets::{self, Container, create_empty},
};
use diskwright_stats::{
    numbers::{bytes, duration, figure, grouped},
    summary::Summary,
};
use diskwright_store::CacheMode;
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

const QUEUE_DEPTH: u32 = 32;
const CONNECTIONS: u32 = 4;
/// Bytes that fio writes and compares.
const PROVED_BYTES: u64 = 128 << 20;

/// The figures of one server, round by round.
#[derive(Debug, Default)]
struct Side {
    iops: Vec<f64>,
    cpu_ns: Vec<f64>,
}

impl Side {
    fn note(&self, name: &str) -> String {
        let median = |values: &[f64]| Summary::of(values).map_or(0.0, |summary| summary.median);
        format!("{name}: {} IOPS, {} of CPU a request", figure(median(&self.iops)), duration(median(&self.cpu_ns)))
    }
}

/// Servers that take turns, each with its disk.
struct Comparison<'a> {
    context: &'a Context<'a>,
    fio: PathBuf,
    dir: PathBuf,
    rounds: usize,
    cell: Duration,
}

/// Prepares a comparison of the servers `who`; the inner error says which program is missing.
fn comparison<'a>(
    context: &'a Context<'a>,
    who: &[ServerProgram],
) -> Result<std::result::Result<Comparison<'a>, String>> {
    let found = fio::find_with_nbd().and_then(|fio| {
        who.iter().try_for_each(|who| who.command().map(|_| ()))?;
        Ok(fio)
    });
    let fio = match found {
        Ok(fio) => fio,
        Err(missing) => return Ok(Err(missing)),
    };
    let dir = context.scratch.folder("served")?;
    let dir = dir.canonicalize().map_err(LabError::file("find", &dir))?;
    let cell = context.options.cell.unwrap_or_else(|| Duration::from_millis(context.pick(1000, 3000)));
    Ok(Ok(Comparison { context, fio, dir, rounds: context.rounds(context.pick(3, 7)), cell }))
}

impl Comparison<'_> {
    /// Makes a filled disk, and reads it back.
    fn filled(
        &self,
        container: Container,
        size_bytes: u64,
        cache: CacheMode,
        progress: &mut dyn Progress,
    ) -> Result<PathBuf> {
        let how = self.context.preparation(size_bytes, cache);
        let mut tick = |done| report(progress, "prepare", done, 2 * size_bytes, container.name());
        let path = targets::make_filled(container, &self.dir, &how, &mut tick)?;
        let mut tick = |done| report(progress, "prepare", size_bytes + done, 2 * size_bytes, container.name());
        targets::open_verified(container, path.clone(), &how, &mut tick)?.close()?;
        Ok(path)
    }

    fn prove(&self, ours: &Served, progress: &mut dyn Progress) -> Result<()> {
        report(progress, "verify", 0, 1, "what fio writes is read back")?;
        fio::verify_nbd(&self.fio, &ours.uri, PROVED_BYTES, QUEUE_DEPTH, &self.dir)
    }

    fn load(&self, rw: &'static str, connections: u32) -> NbdLoad {
        NbdLoad { rw, connections, queue_depth: QUEUE_DEPTH, until: FioUntil::Elapsed(self.cell) }
    }

    /// Measures one cell.
    fn measure(&self, served: &Served, load: &NbdLoad, round: usize, side: &mut Side) -> Result<()> {
        let run = || fio::run_nbd(&self.fio, &served.uri, load, load.seed(round), &self.dir);
        let (found, cpu_ns) = cost_of(&served.server, run)?;
        side.iops.push(found.iops);
        side.cpu_ns.push(cpu_ns as f64 / found.requests.max(1.0));
        Ok(())
    }

    /// Measures all rounds of a load on servers that are up, and then, if there is one, on a file
    /// itself.
    fn compare(
        &self,
        served: &[(ServerProgram, Served)],
        bare: Option<&Path>,
        load: &NbdLoad,
        progress: &mut dyn Progress,
    ) -> Result<Vec<Side>> {
        let count = served.len() + usize::from(bare.is_some());
        let mut sides: Vec<Side> = (0..count).map(|_| Side::default()).collect();
        let names = served.iter().map(|(who, _)| who.name()).chain(bare.map(|_| "the file itself"));
        let subjects: Vec<String> = names.map(|name| format!("{}, {name}", load.rw)).collect();
        let subjects: Vec<&str> = subjects.iter().map(|subject| &**subject).collect();
        in_turns("measure", &subjects, (self.rounds, 5), progress, &mut |Window { cell: index, round }, _| {
            match (served.get(index), bare) {
                (Some((_, server)), _) => self.measure(server, load, round, &mut sides[index])?,
                (None, Some(file)) => sides[index].iops.push(fio::run(&self.fio, file, &BARE_LOAD, self.cell)?.iops),
                (None, None) => {}
            }
            Ok(())
        })?;
        Ok(sides)
    }

    fn note_conditions(&self, found: &mut RowOutcome, what: &str) {
        found.notes.insert(
            0,
            format!(
                "{what}; fio's nbd engine over a unix socket; {} rounds in turns, cells of {}",
                self.rounds,
                duration(self.cell.as_nanos() as f64)
            ),
        );
    }
}

fn stop(served: Vec<(ServerProgram, Served)>) -> Result<()> {
    served.into_iter().try_for_each(|(_, served)| served.server.stop())
}

fn words(rw: &str) -> &'static str {
    if rw == "randread" { "4K random read" } else { "4K random write" }
}

/// A populated dynamic VHDX against qemu-nbd on a raw file, both with O_DIRECT.
pub(crate) fn populated(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let bars = [("randread", 1.3, Some(0.6)), ("randwrite", 1.3, Some(0.6))];
    against_qemu(context, progress, (Container::VhdxDynamic, Container::Raw), &bars)
}

/// Two clients of a server with two workers against one client of a server with one, on the same
/// populated disk.
pub(crate) fn two_clients(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let comparison = match comparison(context, &[ServerProgram::Ours])? {
        Ok(comparison) => comparison,
        Err(missing) => return Ok(RowOutcome::skipped("two clients", missing)),
    };
    let size_bytes = context.pick(512 << 20, 2 << 30);
    context.scratch.need("this disk", size_bytes + (1 << 30))?;
    let path = comparison.filled(Container::VhdxDynamic, size_bytes, CacheMode::Direct, progress)?;
    context.scratch.settle()?;
    let mut sides = [Side::default(), Side::default()];
    let subjects = ["one client, one worker", "two clients, two workers"];
    in_turns("measure", &subjects, (comparison.rounds, 5), progress, &mut |Window { cell: who, round }, _| {
        let count = who as u32 + 1;
        let exported = Exported::of(Container::VhdxDynamic, &path, CacheMode::Direct);
        let exported = Exported { clients: count, threads: Some(count), writable: false, ..exported };
        // A server for each round: two of them on one disk would share its speed.
        let served = serve(ServerProgram::Ours, &exported, &comparison.dir)?;
        comparison.measure(&served, &comparison.load("randread", count), round, &mut sides[who])?;
        served.server.stop()
    })?;
    let [one, two] = &sides;
    let name =
        format!("VHDX dynamic served, 4K random read QD {QUEUE_DEPTH}, two clients and workers against one: IOPS");
    let mut found = RowOutcome {
        checks: vec![Check::ratio(name, "IOPS", &two.iops, &one.iops, Bar::AtLeast(1.8))],
        notes: vec![one.note(subjects[0]), two.note(subjects[1])],
        ..RowOutcome::default()
    };
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    comparison.note_conditions(
        &mut found,
        &format!("a disk of {}; {processors} processors for servers and clients", bytes(size_bytes)),
    );
    Ok(found)
}

/// Writes to a populated dynamic VHD against qemu-nbd on another one.
pub(crate) fn vhd(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    against_qemu(context, progress, (Container::VhdDynamic, Container::VhdDynamic), &[("randwrite", 8.0, None)])
}

/// A populated qcow2 against qemu-nbd on another one, both with O_DIRECT.
pub(crate) fn qcow2(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let bars = [("randread", 1.3, None), ("randwrite", 2.0, None)];
    against_qemu(context, progress, (Container::Qcow2, Container::Qcow2), &bars)
}

fn against_qemu(
    context: &Context<'_>,
    progress: &mut dyn Progress,
    (ours, theirs): (Container, Container),
    bars: &[(&'static str, f64, Option<f64>)],
) -> Result<RowOutcome> {
    let comparison = match comparison(context, &[ServerProgram::Ours, ServerProgram::QemuNbd])? {
        Ok(comparison) => comparison,
        Err(missing) => return Ok(RowOutcome::skipped("serving", missing)),
    };
    let size_bytes = context.pick(512 << 20, 2 << 30);
    context.scratch.need("these disks", 2 * size_bytes + (1 << 30))?;
    let (mut served, mut files) = (Vec::new(), Vec::new());
    for (who, container) in [(ServerProgram::Ours, ours), (ServerProgram::QemuNbd, theirs)] {
        let path = comparison.filled(container, size_bytes, CacheMode::Direct, progress)?;
        let own = comparison.dir.join(format!("{}-{}", who.name(), container.file_name()));
        std::fs::rename(&path, &own).map_err(LabError::file("rename", &path))?;
        let exported = Exported::of(container, &own, CacheMode::Direct);
        served.push((who, serve(who, &exported, &comparison.dir)?));
        files.push(own);
    }
    comparison.prove(&served[0].1, progress)?;
    context.scratch.settle()?;
    let mut found = RowOutcome::default();
    for &(rw, iops_bar, cpu_bar) in bars {
        let bare = (rw == BARE_LOAD.rw && theirs == Container::Raw).then(|| files[1].as_path());
        let sides = comparison.compare(&served, bare, &comparison.load(rw, 1), progress)?;
        let name = format!("{} served, {} QD {QUEUE_DEPTH}", ours.name(), words(rw));
        let [ours, theirs, bare @ ..] = &sides[..] else { continue };
        let mut check = Check::ratio(format!("{name}: IOPS"), "IOPS", &ours.iops, &theirs.iops, Bar::AtLeast(iops_bar));
        if let [bare] = bare {
            tell_ceiling(&mut check, &bare.iops, &theirs.iops);
        }
        found.checks.push(check);
        if let Some(bar) = cpu_bar {
            let name = format!("{name}: server's CPU per I/O");
            found.checks.push(Check::ratio(name, "ns", &ours.cpu_ns, &theirs.cpu_ns, Bar::AtMost(bar)));
        }
    }
    stop(served)?;
    comparison.note_conditions(
        &mut found,
        &format!(
            "disks of {}, filled, read back and compared; qemu-nbd serves a {} with --cache=none --aio=io_uring",
            bytes(size_bytes),
            theirs.name()
        ),
    );
    Ok(found)
}

/// New disks each round: an empty dynamic VHDX against an empty qcow2.
pub(crate) fn empty(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let comparison = match comparison(context, &[ServerProgram::Ours, ServerProgram::QemuNbd])? {
        Ok(comparison) => comparison,
        Err(missing) => return Ok(RowOutcome::skipped("serving an empty disk", missing)),
    };
    let Some(qemu_img) = peer::find("qemu-img") else {
        return Ok(RowOutcome::skipped("serving an empty disk", peer::missing("qemu-img", "qemu-utils")));
    };
    let size_bytes: u64 = context.pick(2 << 30, 16 << 30);
    let count = context.pick(20_000, 100_000);
    context.scratch.need("these disks", size_bytes + (2 << 30))?;
    let load = NbdLoad { until: FioUntil::Count(count), ..comparison.load("randwrite", 1) };
    let mut sides = [Side::default(), Side::default()];
    in_turns(
        "measure",
        &["empty, diskwright", "empty, qemu-nbd"],
        (comparison.rounds, 6),
        progress,
        &mut |Window { cell: index, round }, _| {
            let who = [ServerProgram::Ours, ServerProgram::QemuNbd][index];
            let dir = context.scratch.folder("fresh")?;
            let path = match who {
                ServerProgram::Ours => create_empty(Container::VhdxDynamic, &dir, size_bytes)?,
                _ => empty_qcow2(&qemu_img, &dir, size_bytes)?,
            };
            context.scratch.settle()?;
            let format = if who == ServerProgram::Ours { "vhdx" } else { "qcow2" };
            let exported = Exported { format, ..Exported::of(Container::VhdxDynamic, &path, CacheMode::Direct) };
            let served = serve(who, &exported, &dir)?;
            comparison.measure(&served, &load, round, &mut sides[index])?;
            served.server.stop()?;
            scratch::simplify_before_removal(&path);
            std::fs::remove_dir_all(&dir).map_err(LabError::file("remove", &dir))?;
            context.scratch.settle()?;
            Ok(())
        },
    )?;
    let [ours, theirs] = &sides;
    let name = format!("empty VHDX dynamic served against an empty qcow2, 4K random write QD {QUEUE_DEPTH}: IOPS");
    Ok(RowOutcome {
        checks: vec![Check::ratio(name, "IOPS", &ours.iops, &theirs.iops, Bar::AtLeast(1.5))],
        notes: vec![
            format!(
                "new disks of {} each round, {} writes, fio's nbd engine; {} rounds in turns",
                bytes(size_bytes),
                grouped(count as f64),
                comparison.rounds
            ),
            ours.note("diskwright"),
            theirs.note("qemu-nbd"),
        ],
        ..RowOutcome::default()
    })
}

fn empty_qcow2(qemu_img: &Path, dir: &Path, size_bytes: u64) -> Result<PathBuf> {
    let path = dir.join("empty.qcow2");
    peer::run(qemu_img, &["create", "-q", "-f", "qcow2", &path.to_string_lossy(), &size_bytes.to_string()], None)?;
    Ok(path)
}

/// Reads from the page cache over four connections, against nbdkit and qemu-nbd.
pub(crate) fn page_cache(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let comparison = match comparison(context, &[ServerProgram::Ours])? {
        Ok(comparison) => comparison,
        Err(missing) => return Ok(RowOutcome::skipped("serving from the page cache", missing)),
    };
    let mut found = RowOutcome::default();
    let mut peers = Vec::new();
    for who in [ServerProgram::Nbdkit, ServerProgram::QemuNbd] {
        match who.command() {
            Ok(_) => peers.push(who),
            Err(missing) => found.checks.push(Check::skipped(who.name(), missing)),
        }
    }
    if peers.is_empty() {
        return Ok(found);
    }
    let size_bytes = context.pick(256 << 20, 512 << 20);
    context.scratch.need("these disks", 2 * size_bytes + (1 << 30))?;
    // Reading them back puts both into the page cache.
    let vhdx = comparison.filled(Container::VhdxDynamic, size_bytes, CacheMode::PageCache, progress)?;
    let raw = comparison.filled(Container::Raw, size_bytes, CacheMode::PageCache, progress)?;
    context.scratch.settle()?;
    let mut served = Vec::new();
    for who in [ServerProgram::Ours].into_iter().chain(peers) {
        let (container, path) =
            if who == ServerProgram::Ours { (Container::VhdxDynamic, &vhdx) } else { (Container::Raw, &raw) };
        // Two servers read one raw file.
        let exported =
            Exported { clients: CONNECTIONS, writable: false, ..Exported::of(container, path, CacheMode::PageCache) };
        served.push((who, serve(who, &exported, &comparison.dir)?));
    }
    let sides = comparison.compare(&served, None, &comparison.load("randread", CONNECTIONS), progress)?;
    let better: Vec<f64> = (0..comparison.rounds)
        .map(|round| sides[1..].iter().map(|side| side.iops[round]).fold(0.0, f64::max))
        .collect();
    let name = format!(
        "VHDX dynamic served from the page cache, 4K random read, {CONNECTIONS} connections of QD {QUEUE_DEPTH}, against the better peer: IOPS"
    );
    found.checks.push(Check::ratio(name, "IOPS", &sides[0].iops, &better, Bar::AtLeast(1.2)));
    found.notes.extend(served.iter().zip(&sides).map(|((who, _), side)| side.note(who.name())));
    stop(served)?;
    comparison.note_conditions(
        &mut found,
        &format!("disks of {}, read once; nbdkit's file plugin and qemu-nbd serve a raw file", bytes(size_bytes)),
    );
    Ok(found)
}
