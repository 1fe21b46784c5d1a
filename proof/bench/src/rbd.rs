//! Images of a Ceph cluster, beside fio's own rbd engine, and served beside qemu-nbd.
//!
//! The cluster is on this machine: one OSD in memory, without librbd's cache, so each request
//! reaches the OSD. The OSD takes most of the processors' time, on both sides of a comparison.
//!
//! Both programs of the first row are child processes which make as many requests; their CPU time
//! is that of the whole process, with librbd's threads.

use crate::{
    fio::{FioUntil, NbdLoad, find_with_nbd, run_nbd},
    ours,
    populated::{FIGURES, Subject, compare},
    turns::in_turns,
};
use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome, SEED},
    peer,
    progress::Progress,
    selftest::fio,
    server::Server,
    targets::open_target,
};
use diskwright_load::{
    clock::CpuTime,
    data,
    workload::{Direction, Pattern, Workload},
};
use diskwright_rbd::{RbdFiles, testing::Cluster};
use diskwright_stats::numbers::bytes;
use diskwright_store::{BlockDevice, Blocking, CacheMode, EngineKind};
use std::{
    io,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};

const MIB: u64 = 1 << 20;
const QUEUE_DEPTH: u32 = 32;
/// Without it writes would end in the memory of the client.
const SETTINGS: &str = "rbd_cache = false";

fn start(context: &Context<'_>) -> Result<std::result::Result<Cluster, String>> {
    RbdFiles::install();
    Ok(Cluster::start(&context.scratch.folder("ceph")?, SETTINGS))
}

fn name(cluster: &Cluster, image: &str) -> PathBuf {
    format!("rbd://rbd/{image}?conf={}", cluster.conf().display()).into()
}

/// A raw image with data everywhere.
fn filled(cluster: &Cluster, image: &str, size_bytes: u64) -> Result<()> {
    let path = name(cluster, image);
    if !cluster.rbd(&["create", image, "--size", &format!("{}M", size_bytes / MIB)]) {
        return Err(LabError::file("create", &path)(io::Error::other("rbd create has failed")));
    }
    let disk = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() })?;
    fill(&*disk, size_bytes).map_err(LabError::file("write", &path))?;
    Ok(disk.close()?)
}

fn fill(device: &dyn BlockDevice, size_bytes: u64) -> io::Result<()> {
    let mut queue = Blocking::open(device, EngineKind::Auto)?;
    let mut buf = vec![0; MIB as usize];
    for at in (0..size_bytes).step_by(MIB as usize) {
        data::fill(SEED, at, &mut buf);
        queue.write(at, &buf, false)?;
    }
    queue.flush()
}

/// What one program has reached.
#[derive(Debug, Clone, Copy)]
struct Reached {
    iops: f64,
    cpu_ns_per_io: f64,
}

/// Runs a program, and divides its CPU time by its requests.
fn measured(count: u64, run: impl FnOnce() -> Result<f64>) -> Result<Reached> {
    let before = CpuTime::of_children();
    let iops = run()?;
    let cpu = (CpuTime::of_children() - before).total_ns();
    Ok(Reached { iops, cpu_ns_per_io: cpu as f64 / count as f64 })
}

fn by_fio(program: &Path, cluster: &Cluster, rw: &str, count: u64, round: usize) -> Result<f64> {
    let mut command = Command::new(program);
    command.args(["--name=diskwright", "--ioengine=rbd", "--clientname=admin", "--pool=rbd", "--rbdname=raw"]);
    command.args(["--output-format=json", "--bs=4096", "--norandommap=1", &format!("--rw={rw}")]);
    command.args([format!("--iodepth={QUEUE_DEPTH}"), format!("--number_ios={count}"), format!("--randseed={round}")]);
    command.env("CEPH_CONF", cluster.conf()).current_dir(cluster.conf().parent().unwrap_or(Path::new(".")));
    fio::finish(command).map(|found| found.iops)
}

fn by_ours(cluster: &Cluster, rw: &str, count: u64) -> Result<f64> {
    let reads = if rw == "randread" { "100" } else { "0" };
    let mut command = ours::command()?;
    command.args([
        "lab",
        "run",
        "rbd://rbd/raw",
        "--format",
        "raw",
        "--json",
        "--no-save",
        "--destroy-data",
        "-b",
        "4K",
    ]);
    command.args(["--read-percent", reads, "--queue-depth", &QUEUE_DEPTH.to_string(), "--count", &count.to_string()]);
    command.env("CEPH_CONF", cluster.conf());
    peer::answer(&mut command, |output| {
        let found: serde_json::Value = serde_json::from_str(output).map_err(|error| error.to_string())?;
        found["summary"][0]["iops"].as_f64().ok_or_else(|| "its summary has no figure".to_owned())
    })
}

/// A raw disk, 4 KiB at random, beside fio's rbd engine.
pub(crate) fn raw(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let what = "4 KiB at random from a raw image";
    let Some(fio) = fio::find() else { return Ok(RowOutcome::skipped(what, peer::missing("fio", "fio"))) };
    if peer::run(&fio, &["--enghelp=rbd"], None).is_err() {
        return Ok(RowOutcome::skipped(what, "this fio has no rbd engine"));
    }
    let cluster = match start(context)? {
        Ok(cluster) => cluster,
        Err(why) => return Ok(RowOutcome::skipped(what, why)),
    };
    let size_bytes = context.pick(512, 2048) * MIB;
    filled(&cluster, "raw", size_bytes)?;
    let (rounds, count) = (context.rounds(context.pick(2, 15)), context.pick(20_000, 60_000));
    let mut found = RowOutcome::default();
    for rw in ["randread", "randwrite"] {
        let mut sides: [Vec<Reached>; 2] = Default::default();
        in_turns(rw, &["diskwright", "fio"], (rounds, SEED), progress, &mut |window, _| {
            let reached = match window.cell {
                0 => measured(count, || by_ours(&cluster, rw, count)),
                _ => measured(count, || by_fio(&fio, &cluster, rw, count, window.round)),
            };
            sides[window.cell].push(reached?);
            Ok(())
        })?;
        let of = |side: usize, figure: fn(&Reached) -> f64| -> Vec<f64> { sides[side].iter().map(figure).collect() };
        let iops = |reached: &Reached| reached.iops;
        let cpu = |reached: &Reached| reached.cpu_ns_per_io / 1e3;
        found.checks.push(Check::ratio(format!("{rw}: IOPS"), "IOPS", &of(0, iops), &of(1, iops), Bar::AtLeast(0.95)));
        found.checks.push(Check::ratio(format!("{rw}: CPU per I/O"), "us", &of(0, cpu), &of(1, cpu), Bar::AtMost(1.0)));
    }
    found.notes.push(format!(
        "an image of {}, filled; QD {QUEUE_DEPTH}; {count} requests a window, each in a new process; one OSD in memory on this machine, without librbd's cache",
        bytes(size_bytes)
    ));
    Ok(found)
}

/// Served by NBD, beside qemu-nbd.
pub(crate) fn served(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let what = "a raw image, served by NBD";
    let fio = match find_with_nbd() {
        Ok(fio) => fio,
        Err(why) => return Ok(RowOutcome::skipped(what, why)),
    };
    let Some(qemu_nbd) = peer::find("qemu-nbd") else {
        return Ok(RowOutcome::skipped(what, peer::missing("qemu-nbd", "qemu-utils")));
    };
    let cluster = match start(context)? {
        Ok(cluster) => cluster,
        Err(why) => return Ok(RowOutcome::skipped(what, why)),
    };
    let (size_bytes, folder) = (context.pick(512, 2048) * MIB, context.scratch.folder("sockets")?);
    let sockets = ["ours.sock", "theirs.sock"].map(|socket| folder.join(socket));
    ["ours", "theirs"].into_iter().try_for_each(|image| filled(&cluster, image, size_bytes))?;
    let mut command = ours::command()?;
    command.arg("serve").arg(name(&cluster, "ours")).args(["--format", "raw", "--nbd"]).arg(&sockets[0]);
    let _ours = Server::listening(command, &sockets[0], "diskwright")?;
    let mut command = Command::new(qemu_nbd);
    command.args(["--persistent", "--cache=none", "-f", "raw", "-k"]).arg(&sockets[1]);
    command.arg(format!("rbd:rbd/theirs:conf={}", cluster.conf().display()));
    let _theirs = match Server::listening(command, &sockets[1], "qemu-nbd") {
        Ok(server) => server,
        Err(error) => return Ok(RowOutcome::skipped(what, format!("qemu-nbd has no rbd (qemu-block-extra): {error}"))),
    };
    let (rounds, count) = (context.rounds(context.pick(2, 15)), context.pick(20_000, 60_000));
    let mut found = RowOutcome::default();
    for rw in ["randread", "randwrite"] {
        let load = NbdLoad { rw, connections: 1, queue_depth: QUEUE_DEPTH, until: FioUntil::Count(count) };
        let mut sides: [Vec<f64>; 2] = Default::default();
        in_turns(rw, &["diskwright", "qemu-nbd"], (rounds, SEED), progress, &mut |window, _| {
            let uri = format!("nbd+unix:///?socket={}", sockets[window.cell].display());
            sides[window.cell].push(run_nbd(&fio, &uri, &load, load.seed(window.round), &folder)?.iops);
            Ok(())
        })?;
        let name = format!("{rw}, served by NBD: IOPS");
        found.checks.push(Check::ratio(name, "IOPS", &sides[0], &sides[1], Bar::AtLeast(1.2)));
    }
    found.notes.push(format!(
        "images of {}, filled; fio's nbd engine at QD {QUEUE_DEPTH} over a unix socket",
        bytes(size_bytes)
    ));
    Ok(found)
}

/// A VHDX inside an image, beside a raw image.
pub(crate) fn vhdx(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let cluster = match start(context)? {
        Ok(cluster) => cluster,
        Err(why) => return Ok(RowOutcome::skipped("a VHDX inside an image", why)),
    };
    let size_bytes = context.pick(512, 1024) * MIB;
    filled(&cluster, "raw", size_bytes)?;
    let path: PathBuf = format!("rbd://rbd/disk.vhdx?conf={}", cluster.conf().display()).into();
    let request = CreateRequest {
        size_bytes: Some(size_bytes),
        format: Some(diskwright_image::Format::Vhdx),
        ..CreateRequest::default()
    };
    create(&path, &request)?;
    let open = |path: &Path| Disk::open(path, &OpenOptions { writable: true, ..OpenOptions::default() });
    let (inside, raw): (Arc<Disk>, Arc<Disk>) = (open(&path)?, open(&name(&cluster, "raw"))?);
    fill(&*inside, size_bytes).map_err(LabError::file("write", &path))?;
    let subjects = [
        Subject::of(open_target("raw image", "raw", Arc::clone(&raw) as Arc<dyn BlockDevice>, CacheMode::Direct)),
        Subject::of(open_target("VHDX", "VHDX", Arc::clone(&inside) as Arc<dyn BlockDevice>, CacheMode::Direct)),
    ];
    let mut found = RowOutcome::default();
    let directions = [Direction::Read, Direction::Write];
    for (number, direction) in directions.into_iter().enumerate() {
        let workload = Workload::new(Pattern::Random, direction, 4096, QUEUE_DEPTH);
        let place = (number, directions.len());
        for disk in compare(context, &subjects, &workload, &FIGURES[..1], place, progress, &mut |_| Ok(()))? {
            found.checks.push(disk.check(&workload.name, FIGURES[0]));
        }
    }
    drop(subjects);
    inside.close()?;
    raw.close()?;
    found.notes.push(format!(
        "disks of {}, filled; one OSD in memory on this machine, without librbd's cache",
        bytes(size_bytes)
    ));
    Ok(found)
}
