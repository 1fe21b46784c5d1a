//! Opens the disks, serves them to the guest, and measures both sides in interleaved rounds.

use super::record::{self, CONTAINERS, GUEST, NATIVE, NULL, SERVER_BYTES, SERVER_CPU_NS, SERVER_REQUESTS};
use crate::{
    LabError, Result,
    cells::Cell,
    guest::{Guest, GuestChoice, GuestDisk, GuestOptions, GuestRecord, Kernel, QEMU},
    measure, peer,
    progress::{Progress, report},
    rounds::{self, Done, Rounds, Steps, Window},
    scratch::Scratch,
    targets::{self, Preparation, Target, open_target},
};
use diskwright_load::{
    NullDevice, OpenTarget,
    clock::CpuTime,
    figures::Figures,
    job::Job,
    run::{RunOptions, Watch},
    workload::Workload,
};
use diskwright_serve::{
    metrics::Totals,
    net::{Address, Listener},
    vhost_user::{VhostUserOptions, VhostUserServer},
};
use diskwright_store::{CacheMode, EngineKind};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// What is measured, and for how long.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) rounds: usize,
    /// Length of a cell, warm-up included.
    pub(super) cell: Duration,
    /// Size of each disk.
    pub(super) size_bytes: u64,
    pub(super) engine: EngineKind,
    pub(super) seed: u64,
    pub(super) workloads: Vec<Workload>,
    /// No round begins that would end later. The first round always begins.
    pub(super) until: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct Measured {
    pub(super) cells: Vec<Cell>,
    pub(super) done: Done,
    pub(super) guest: GuestRecord,
    /// Disks that are read and written through the page cache against the wish.
    pub(super) cached: Vec<String>,
}

/// # Errors
/// [`LabError::BadOptions`] if QEMU is not installed.
pub(super) fn need_qemu() -> Result<()> {
    peer::find(QEMU).map(drop).ok_or_else(|| LabError::BadOptions {
        what: peer::missing(QEMU, "qemu-system-x86"),
        hint: "install it, or measure on the host alone with another study".into(),
    })
}

/// An open disk, and its server.
struct Subject {
    target: OpenTarget,
    /// `None` for the `null` disk.
    disk: Option<Target>,
    server: VhostUserServer,
    socket: PathBuf,
}

impl Subject {
    fn new(target: OpenTarget, disk: Option<Target>, number: usize, dir: &Path) -> Result<Self> {
        let socket = dir.join(format!("disk-{number}.sock"));
        let failed = |source: &dyn std::fmt::Display| LabError::BadOptions {
            what: format!("{} cannot be served to the guest: {source}", target.name),
            hint: "use another folder (`StudyOptions::dir`)".into(),
        };
        let listener = Listener::bind(&Address::Unix(socket.clone())).map_err(|error| failed(&error))?;
        let options = VhostUserOptions {
            name: serial(&target.name),
            queues: 1,
            is_ephemeral: false,
            reservations: Arc::default(),
        };
        let server =
            VhostUserServer::start(Arc::clone(&target.device), listener, options).map_err(|error| failed(&error))?;
        Ok(Self { target, disk, server, socket })
    }

    fn close(self) -> Result<()> {
        let Self { target, disk, server, .. } = self;
        let stopped = server.stop().map_err(|error| LabError::BadOptions {
            what: error.to_string(),
            hint: "check the storage of the scratch folder".into(),
        });
        drop(target);
        stopped.and(disk.map_or(Ok(()), Target::close))
    }
}

/// The serial number of a disk: at most 20 bytes.
fn serial(name: &str) -> String {
    name.replace(' ', "-")
}

/// Measures every disk under every workload, natively and in the guest.
///
/// # Errors
/// Any failure; [`LabError::Stopped`] if it is stopped before the first whole round.
pub(super) fn measure(
    scratch: &Scratch,
    kernel: &Kernel,
    choice: &GuestChoice,
    plan: &Plan,
    progress: &mut dyn Progress,
) -> Result<Measured> {
    let dir = scratch.folder("guest")?;
    let dir = dir.canonicalize().map_err(LabError::file("find", &dir))?;
    let subjects = open_disks(scratch, &dir, plan, progress)?;
    let cached = subjects.iter().filter_map(|subject| subject.disk.as_ref());
    let cached = cached.filter(|disk| disk.cache == CacheMode::PageCache).map(|disk| disk.name().to_owned()).collect();
    report(progress, "boot", 0, 1, "the guest")?;
    let sockets: Vec<PathBuf> = subjects.iter().map(|subject| subject.socket.clone()).collect();
    let GuestChoice { launcher, accelerator, .. } = choice;
    let (accelerator, disks) = (*accelerator, &*sockets);
    let how = GuestOptions { kernel, launcher, accelerator, disks, link: None, has_dm_cache: false, dir: &dir };
    let mut guest = Guest::start(&how)?;
    let record = guest.record();
    let measured = rounds(&subjects, &mut guest, plan, progress);
    // A guest that was stopped in a window does not answer any more.
    match &measured {
        Ok((_, done)) if !done.stopped => guest.stop()?,
        _ => drop(guest),
    }
    let (cells, done) = measured?;
    for subject in subjects {
        subject.close()?;
    }
    Ok(Measured { cells, done, guest: record, cached })
}

/// Makes, fills and verifies the disks, and serves each on a socket.
fn open_disks(scratch: &Scratch, dir: &Path, plan: &Plan, progress: &mut dyn Progress) -> Result<Vec<Subject>> {
    let null = NullDevice::new(plan.size_bytes);
    let null = open_target(NULL, "null", Arc::new(null), CacheMode::Direct);
    let mut subjects = vec![Subject::new(null, None, 0, dir)?];
    let how =
        Preparation { size_bytes: plan.size_bytes, seed: plan.seed, cache: CacheMode::Direct, engine: plan.engine };
    let total = 2 * plan.size_bytes * CONTAINERS.len() as u64;
    for (container, number) in CONTAINERS.into_iter().zip(1..) {
        let folder = scratch.folder(&format!("disk-{number}"))?;
        let before = 2 * plan.size_bytes * (number as u64 - 1);
        let mut tick = |done| report(progress, "prepare", before + done, total, container.name());
        let path = targets::make_filled(container, &folder, &how, &mut tick)?;
        let before = before + plan.size_bytes;
        let mut tick = |done| report(progress, "prepare", before + done, total, container.name());
        let disk = targets::open_verified(container, path, &how, &mut tick)?;
        subjects.push(Subject::new(disk.to_measure(), Some(disk), number, dir)?);
    }
    scratch.settle()?;
    Ok(subjects)
}

/// Figures of a window, and those that only a guest has: [`SERVER_CPU_NS`], [`SERVER_REQUESTS`],
/// [`SERVER_BYTES`].
type WindowFigures = (Figures, [Option<f64>; 3]);

fn rounds(
    subjects: &[Subject],
    guest: &mut Guest,
    plan: &Plan,
    progress: &mut dyn Progress,
) -> Result<(Vec<Cell>, Done)> {
    let mut all: Vec<(&Workload, &Subject, &str)> = Vec::new();
    for workload in &plan.workloads {
        for subject in subjects {
            all.extend([NATIVE, GUEST].map(|side| (workload, subject, side)));
        }
    }
    let mut cells: Vec<Cell> =
        all.iter().map(|(workload, subject, side)| record::cell(&subject.target.name, workload, side)).collect();
    let timing = measure::Plan {
        rounds: plan.rounds,
        warm_up: Duration::ZERO,
        measured: Duration::ZERO,
        engine: plan.engine,
        seed: plan.seed,
    }
    .with_cell(plan.cell);
    let title = |at: Window| {
        let (workload, subject, side) = all[at.cell];
        Some(format!("{}, {}, {side}", workload.name, subject.target.name))
    };
    let mut measure = |at: Window, watch: &dyn Watch| {
        let (workload, subject, side) = all[at.cell];
        let job = timing.job(workload, &subject.target, at.round);
        let (figures, more) = match side {
            NATIVE => native(subject, &job, watch)?,
            _ => in_guest(subject, guest, &job, watch)?,
        };
        cells[at.cell].rounds.push(figures);
        for (name, value) in [SERVER_CPU_NS, SERVER_REQUESTS, SERVER_BYTES].into_iter().zip(more) {
            cells[at.cell].push_more(name, value);
        }
        Ok(())
    };
    let together = 2 * subjects.len();
    let how = Rounds { together: Some(together), until: plan.until, ..Rounds::new(plan.rounds, plan.seed) };
    let mut steps = Steps::new(progress, "measure", plan.rounds * all.len());
    let done = rounds::interleave(&how, all.len(), &mut steps, &title, &mut measure)?;
    if done.whole == 0 {
        return Err(LabError::Stopped);
    }
    cells.iter_mut().for_each(|cell| cell.truncate(done.whole));
    Ok((cells, done))
}

fn native(subject: &Subject, job: &Job, watch: &dyn Watch) -> Result<WindowFigures> {
    let phase = measure::window(job, &subject.target, &RunOptions::default(), watch)?;
    Ok((Figures::of(&phase), [None; 3]))
}

fn in_guest(subject: &Subject, guest: &mut Guest, job: &Job, watch: &dyn Watch) -> Result<WindowFigures> {
    let (served, cpu) = (counted(subject), CpuTime::of_process());
    let ran = guest.run(&GuestDisk::Serial(serial(&subject.target.name)), job, watch)?;
    let cpu_ns = (CpuTime::of_process() - cpu).total_ns();
    let (requests, bytes) = counted(subject);
    let per = |value: u64, of: u64| Some(value as f64 / of.max(1) as f64);
    let more = [per(cpu_ns, ran.requests), per(requests - served.0, ran.requests), per(bytes - served.1, ran.bytes)];
    Ok((ran.figures, more))
}

/// Reads and writes that the server of a disk has answered, and their bytes.
fn counted(subject: &Subject) -> (u64, u64) {
    let Totals { commands: [reads, writes, ..], .. } = subject.server.metrics().totals();
    (reads.requests + writes.requests, reads.bytes + writes.bytes)
}
