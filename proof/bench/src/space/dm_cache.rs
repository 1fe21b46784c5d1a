//! What reaches the slow member, against the kernel's own cache for slow devices, dm-cache with its
//! policy smq.
//!
//! ```text
//!   guest    the generator ─▶ /dev/vda                    /dev/dm-0 (dm-cache, writeback)
//!                                │                          │      │         │
//!   host             the disk of a pool             metadata, fast device, slow device
//!                     fast member, slow member             the same two sizes
//! ```
//!
//! The guest runs both, in turns, with the same requests. What is compared are numbers of requests,
//! because an emulated guest falsifies times: those to the slow member by the counters of the
//! pool, those to the slow device by the counters of its server. All count: of moves, of blocks
//! that are written back, and of those who ask.

use super::tiered::{Tiered, TieredOptions, disk_of};
use crate::{ours, turns::in_turns};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome, SEED},
    guest::{Guest, GuestDisk, GuestOptions, Kernel, QEMU},
    measure, peer,
    progress::Progress,
    rounds::Window,
};
use diskwright_load::{
    job::{Distribution, Job},
    run::{RunOptions, Snapshot, Stage, Unwatched, Watch},
    seeds,
    workload::{Direction, Pattern, Workload},
};
use diskwright_serve::{
    metrics::Metrics,
    net::{Address, Listener},
    vhost_user::{VhostUserOptions, VhostUserServer},
};
use diskwright_space::Tier;
use diskwright_stats::numbers::bytes;
use diskwright_store::{BlockDevice, CacheMode, FileStore, LockMode, MemberTraffic, OpenOptions, RawDevice};
use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

const MIB: u64 = 1 << 20;
const DISK_BYTES: u64 = 512 * MIB;
/// A tenth of the disk, with all that a pool keeps on it.
const FAST_BYTES: u64 = 52 * MIB;
const SLOW_BYTES: u64 = DISK_BYTES + DISK_BYTES / 4;
const METADATA_BYTES: u64 = 8 * MIB;
/// As `space create` chooses.
const WRITE_CACHE_BYTES: u64 = FAST_BYTES / 8;
const SLAB_BYTES: u64 = 256 << 10;
/// The block size that `lvcreate` chooses.
const DM_CACHE_BLOCK_BYTES: u64 = 64 << 10;
const THETA: f64 = 1.2;
const READ_PERCENT: f64 = 70.0;
const QUEUE_DEPTH: u32 = 8;
/// How often the pool moves slabs, as a timer would.
const OPTIMIZE_EVERY: Duration = Duration::from_secs(2);
const SLOW_REQUESTS: Bar = Bar::AtMost(1.0);
const AFTER_POWER_CUT: Bar = Bar::AtLeast(0.97);
/// What is written before anything is counted, in sizes of the fast tier.
const WRITTEN: Bar = Bar::AtLeast(2.0);
const WHAT: &str = "a pool against dm-cache";

fn wrong(error: impl std::error::Error + Send + Sync + 'static) -> LabError {
    LabError::file("serve", Path::new("a disk of the guest"))(io::Error::other(error))
}

/// A disk of the guest.
struct Served {
    server: VhostUserServer,
    socket: PathBuf,
}

fn serve(name: &str, device: Arc<dyn BlockDevice>, dir: &Path) -> Result<Served> {
    let socket = dir.join(format!("{name}.sock"));
    let listener = Listener::bind(&Address::Unix(socket.clone())).map_err(wrong)?;
    let options = VhostUserOptions { name: name.into(), queues: 1, is_ephemeral: false, reservations: Arc::default() };
    let server = VhostUserServer::start(device, listener, options).map_err(wrong)?;
    Ok(Served { server, socket })
}

fn serve_file(name: &str, len_bytes: u64, dir: &Path) -> Result<Served> {
    let path = dir.join(name);
    let made = File::create_new(&path).and_then(|file| file.set_len(len_bytes));
    made.map_err(LabError::file("create", &path))?;
    let options =
        OpenOptions { writable: true, create_new: false, lock: LockMode::Exclusive, cache: CacheMode::Direct };
    let store = FileStore::open(&path, &options).map_err(wrong)?;
    serve(name, Arc::new(RawDevice::new(Arc::new(store), true, 512).map_err(wrong)?), dir)
}

fn requests_of(metrics: &Metrics) -> u64 {
    let [reads, writes, ..] = metrics.totals().commands;
    reads.requests + writes.requests
}

fn requests_to(members: &[MemberTraffic], class: &str) -> u64 {
    members.iter().filter(|one| one.class == class).map(|one| one.traffic.reads + one.traffic.writes).sum()
}

/// The share of the requests to fast members.
fn fast_share(before: &[MemberTraffic], after: &[MemberTraffic]) -> f64 {
    let [fast, slow] = ["ssd", "hdd"].map(|class| requests_to(after, class) - requests_to(before, class));
    fast as f64 / ((fast + slow) as f64).max(1.0)
}

pub(crate) fn against_dm_cache(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    for (program, package) in [(QEMU, "qemu-system-x86"), ("dmsetup", "dmsetup")] {
        if peer::find(program).is_none() {
            return Ok(RowOutcome::skipped(WHAT, peer::missing(program, package)));
        }
    }
    let Ok(kernel) = Kernel::find(None) else {
        return Ok(RowOutcome::skipped(WHAT, "there is no kernel for a guest"));
    };
    let rounds = context.rounds(context.pick(2, 5));
    context.scratch.need("tiered disks", 3 * (SLOW_BYTES + FAST_BYTES))?;
    let mut found = Found { least_written_bytes: u64::MAX, ..Found::default() };
    for round in 0..rounds {
        // Both begin with nothing: what was popular in the round before would be in the way.
        let dir = context.scratch.folder(&format!("round-{round}"))?;
        let dir = dir.canonicalize().map_err(LabError::file("find", &dir))?;
        one_round(&kernel, &dir, round, context, &mut found, progress)?;
        std::fs::remove_dir_all(&dir).map_err(LabError::file("remove", &dir))?;
    }
    let mut checks = vec![
        Check::ratio(
            "requests to the slow member per 1,000 of the load",
            "",
            &found.slow[0],
            &found.slow[1],
            SLOW_REQUESTS,
        ),
        Check::ratio(
            "share of the fast member in the first second after a power cut",
            "",
            &found.after,
            &found.before,
            AFTER_POWER_CUT,
        ),
    ];
    let written = found.least_written_bytes as f64 / FAST_BYTES as f64;

    checks.push(Check::absolute("written before, in sizes of the fast tier", "", &[written], WRITTEN));
    let notes = vec![format!(
        "a disk of {}, fast tier of {}, slabs of {}, blocks of dm-cache of {}; 4K random, {READ_PERCENT} % read, zipf {THETA}, QD {QUEUE_DEPTH}, one guest; {rounds} rounds, each with a new pool, a new cache, and other popular blocks, measured after at least {} were written",
        bytes(DISK_BYTES),
        bytes(FAST_BYTES),
        bytes(SLAB_BYTES),
        bytes(DM_CACHE_BLOCK_BYTES),
        bytes(found.least_written_bytes)
    )];
    Ok(RowOutcome { checks, notes, ..RowOutcome::default() })
}

fn unmeasured() -> LabError {
    wrong(io::Error::other("the window was too short to be counted"))
}

/// The share of the requests that the fast member serves in the first second of a pool that was not
/// closed, with the load of a round.
fn after_power_cut(tiered: &Tiered, dir: &Path, round: usize, context: &Context<'_>) -> Result<f64> {
    let copies = dir.join("after");
    std::fs::create_dir(&copies).map_err(LabError::file("create", &copies))?;
    let mut paths = Vec::new();
    for (number, path) in tiered.paths.iter().enumerate() {
        let copy = copies.join(format!("member{number}"));
        std::fs::copy(path, &copy).map_err(LabError::file("copy", path))?;
        paths.push(copy);
    }
    let pool = Tiered { paths }.open(None)?;
    let target = disk_of(&pool, "after")?;
    let before = pool.traffic();
    let mut job = job(round, (Duration::ZERO, Duration::from_secs(1)));
    job.engine = context.options.engine.into();
    measure::window(&job, &target, &RunOptions::default(), &Unwatched)?;
    Ok(fast_share(&before, &pool.traffic()))
}

/// What was measured, by rounds.
#[derive(Default)]
struct Found {
    /// Requests to the slow member per 1,000, of the pool and of dm-cache.
    slow: [Vec<f64>; 2],
    /// Share of the fast member before and after a power cut.
    before: Vec<f64>,
    after: Vec<f64>,
    /// What was written at least before anything was counted.
    least_written_bytes: u64,
}

/// Makes a pool and the devices of dm-cache, starts a guest, and measures both.
fn one_round(
    kernel: &Kernel,
    dir: &Path,
    round: usize,
    context: &Context<'_>,
    found: &mut Found,
    progress: &mut dyn Progress,
) -> Result<()> {
    let options = TieredOptions {
        members_bytes: [FAST_BYTES, SLOW_BYTES],
        slab_bytes: SLAB_BYTES,
        disk_bytes: DISK_BYTES,
        tier: Tier::Any,
        write_cache_bytes: Some(WRITE_CACHE_BYTES),
    };
    let tiered = Tiered::make(dir, &options)?;
    let pool = tiered.open(None)?;
    pool.start_own_work();
    let disk = disk_of(&pool, "ours")?;
    let ours_served = serve("ours", Arc::clone(&disk.device), dir)?;
    let theirs = [
        serve_file("metadata", METADATA_BYTES, dir)?,
        serve_file("fast", FAST_BYTES, dir)?,
        serve_file("slow", DISK_BYTES, dir)?,
    ];
    let slow = Arc::clone(theirs[2].server.metrics());
    let sockets: Vec<PathBuf> = [&ours_served].into_iter().chain(&theirs).map(|one| one.socket.clone()).collect();
    let launcher = ours::launcher()?;
    let (disks, has_dm_cache) = (&*sockets, true);
    let mut guest = Guest::start(&GuestOptions {
        kernel,
        launcher: &launcher,
        accelerator: None,
        disks,
        link: None,
        has_dm_cache,
        dir,
    })?;
    let named = |name: &str| name.to_owned();
    let (metadata, fast, slow_name) = (named("metadata"), named("fast"), named("slow"));
    let cached = GuestDisk::Cached { metadata, fast, slow: slow_name, block_bytes: DM_CACHE_BLOCK_BYTES };
    let disks = [GuestDisk::Serial("ours".into()), cached];
    let counts: [&(dyn Fn() -> u64 + Sync); 2] = [&|| requests_to(&pool.traffic(), "hdd"), &|| requests_of(&slow)];
    let spans = (Duration::from_secs(context.pick(30, 60)), Duration::from_secs(context.pick(10, 30)));
    let mut measure = |Window { cell: who, .. }: Window, watch: &dyn Watch| {
        let begun = OnceLock::new();
        let watch = |snapshot: &Snapshot<'_>| {
            if snapshot.stage == Stage::Measuring {
                begun.get_or_init(|| (counts[who](), pool.traffic(), snapshot.elapsed_ns));
            }
            watch.update(snapshot)
        };
        let ran = guest.run(&disks[who], &job(round, spans), &watch)?;
        let (before, traffic, at_ns) = begun.into_inner().ok_or_else(unmeasured)?;
        let counted = (counts[who]() - before) as f64;
        if who == 0 {
            found.before.push(fast_share(&traffic, &pool.traffic()));
        }
        // The count begins a moment after the window.
        let left_ns = (spans.0 + spans.1).as_nanos() as f64 - at_ns as f64;
        let window = ran.figures.reads + ran.figures.writes;
        let asked = window as f64 * left_ns / spans.1.as_nanos() as f64;
        found.slow[who].push(counted * 1000.0 / asked.max(1.0));
        let written = (ran.requests - window) as f64 * 4096.0 * (1.0 - READ_PERCENT / 100.0);
        found.least_written_bytes = found.least_written_bytes.min(written as u64);
        Ok(())
    };
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                thread::sleep(OPTIMIZE_EVERY);
                // Without a slab to move, or when it is told to stop, there is nothing to say.
                let _ = pool.optimize(false, &mut |_| !is_done.load(Ordering::Relaxed));
            }
        });
        let measured = in_turns("zipf", &["pool", "dm-cache"], (1, round as u64), progress, &mut measure);
        is_done.store(true, Ordering::Relaxed);
        measured
    })?;
    guest.stop()?;
    // What is in the files now is what a power cut leaves: nothing was closed.
    found.after.push(after_power_cut(&tiered, dir, round, context)?);
    drop(disk);
    for served in [ours_served].into_iter().chain(theirs) {
        served.server.stop().map_err(wrong)?;
    }
    Ok(())
}

fn job(round: usize, (warm_up, measured): (Duration, Duration)) -> Job {
    let workload = Workload::new(Pattern::Random, Direction::Read, 4096, QUEUE_DEPTH);
    let mut load = workload.load();
    load.read_percent = READ_PERCENT;
    load.distribution = Distribution::Zipf { theta: THETA };
    let mut job = Job::simple("zipf", load, warm_up.into(), measured.into());
    job.seed = seeds::of_window(SEED, "dm-cache", round);
    job
}
