//! The study `access-paths`: what it costs to reach a disk from outside.
//!
//! The paper ("Measuring SMB 3.0, iSCSI, and FC Protocols") sets three protocols side by side on
//! one storage system, by an OLTP load of twenty clients, on a scale on which the first is 100.
//! Here the same populated disk is reached in four ways, and a raw file beside it in two:
//!
//! ```text
//!   in process   generator ─▶ engine ─▶ disk                                        = 100
//!   NBD          generator ─▶ client ─▶ unix socket ─▶ `serve` ─▶ engine ─▶ disk
//!   attach       generator ─▶ loop device ─▶ FUSE ─▶ `attach` ─▶ engine ─▶ disk
//!   raw file     generator ─▶ raw file               control: no container
//!   qemu-nbd     generator ─▶ client ─▶ unix socket ─▶ qemu-nbd ─▶ raw file          peer
//! ```
//!
//! Every cell finds the disk as it was filled: what it writes goes to a temporary child that is
//! dropped with its server. (The raw file is overwritten in place; it holds data that cannot be
//! compressed before and after.) Servers are this program's own children, so what they cost is read
//! from their clocks; the kernel's threads behind a loop device are in nobody's account but the
//! machine's.
//!
//! | file | idea |
//! |---|---|
//! | `ways.rs` | each way to the disk: set up anew for a cell, and taken down whatever happens |
//! | `measure.rs` | a cell; rounds in turns |
//! | `verdict.rs` | the conclusion |

#[cfg(test)]
pub(crate) mod example;
mod measure;
pub mod verdict;
mod ways;

use crate::{
    LabError, Result,
    cells::{Cell, Cells},
    measure::Ratio,
    progress::{Progress, report as tell},
    scratch::Scratch,
    study::{StudyOptions, StudyReport},
    targets::{self, Container, Preparation},
};
use diskwright_load::{
    clock,
    figures::Figures,
    machine::{Machine, Place, Versions},
    warning::Warning,
};
use diskwright_stats::summary::Summary;
use diskwright_store::CacheMode;
use measure::Plan;
use serde::{Deserialize, Serialize};
use std::{
    borrow::Cow,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use ways::Disks;

/// Schema of [`AccessPathsResult`].
pub const SCHEMA: &str = "diskwright.study.access-paths/1";

/// The paper has twenty virtual machines.
pub const CLIENTS: u32 = 20;

/// Its three loads: what they are called, and outstanding requests of each client (section 4.6,
/// table 7).
pub const LOADS: [(&str, u32); 3] = [("light", 2), ("medium", 4), ("heavy", 6)];

/// "All protocols perform within 9% of one another" in throughput, and within 10 % in latency
/// (section 5). The charts' own figures are not in its text.
pub const PAPER_WITHIN: (f64, f64) = (0.09, 0.10);

/// More would take longer to give back between cells than to measure: random writes leave a child
/// of many extents.
const QUICK_BYTES: u64 = 256 << 20;
const FULL_BYTES: u64 = 16 << 30;
/// When a quick study begins no more rounds.
const QUICK_TIME: Duration = Duration::from_secs(100);
const SEED: u64 = 0x7061_7468;
/// Processors busy with something else above which a warning is given.
const BUSY_CPUS: f64 = 0.25;
/// Rounds of a ratio that lie further apart than this are told.
const SPREAD_MAX: f64 = 0.10;

/// What to do.
#[derive(Debug, Clone, Default)]
pub struct AccessPathsOptions {
    /// Rounds: 5 unless said, 3 quick. Time of one cell, warm-up included: 30 s unless said, 1 s
    /// quick.
    pub study: StudyOptions,
    /// Size of the disk: 16 GiB, 256 MiB quick.
    pub size_bytes: Option<u64>,
    /// What the disk is; a populated dynamic VHDX unless said. It cannot be a differencing one: the
    /// temporary child is.
    pub disk: Option<Container>,
    /// This program, to be started as a server. Without it, nothing can be measured but what is in
    /// process.
    pub program: Option<PathBuf>,
}

/// A way to a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// The engine in the generator's own process: what the others are measured against.
    InProcess,
    /// NBD over a unix socket, our server and our client.
    Nbd,
    /// A loop device over a FUSE file.
    Attach,
    /// A raw file in process.
    RawFile,
    /// The raw file by `qemu-nbd` and our client.
    QemuNbd,
}

impl Way {
    /// All of them, what the others are measured against first.
    pub const ALL: [Self; 5] = [Self::InProcess, Self::Nbd, Self::Attach, Self::RawFile, Self::QemuNbd];

    /// As shown to people.
    pub fn name(self) -> &'static str {
        match self {
            Self::InProcess => "in process",
            Self::Nbd => "NBD",
            Self::Attach => "attach",
            Self::RawFile => "raw file",
            Self::QemuNbd => "qemu-nbd, raw",
        }
    }

    /// Whether it leads to the raw file.
    pub fn is_raw(self) -> bool {
        matches!(self, Self::RawFile | Self::QemuNbd)
    }

    /// What it is, a sentence.
    pub fn description(self) -> &'static str {
        match self {
            Self::InProcess => "The engine in the process of the generator; writes go to a temporary child.",
            Self::Nbd => {
                "`diskwright serve --ephemeral` and the NBD client over a unix socket, a connection for each of the clients."
            }
            Self::Attach => "`diskwright attach --ephemeral`: a loop device with direct I/O over a FUSE file.",
            Self::RawFile => "A raw file in the process of the generator, overwritten in place.",
            Self::QemuNbd => {
                "`qemu-nbd -f raw --cache=none --aio=io_uring` and the NBD client over a unix socket; overwritten in place."
            }
        }
    }
}

/// The study, whole.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AccessPathsResult {
    /// [`SCHEMA`].
    pub schema: String,
    /// The conclusion.
    pub verdict: String,
    /// When it began.
    pub started_utc: String,
    /// How long it took, nanoseconds.
    pub took_ns: u64,
    /// Whether it was stopped before its last round.
    pub stopped: bool,
    /// On what.
    pub machine: Machine,
    /// Where the disks lay.
    pub place: Place,
    /// By which programs.
    pub versions: Versions,
    /// Whether it was the short form.
    pub quick: bool,
    /// What the disk was.
    pub disk: Container,
    /// Its size.
    pub size_bytes: u64,
    /// Length of a cell with its warm-up, nanoseconds.
    pub cell_ns: u64,
    /// Rounds that were measured in full.
    pub rounds: usize,
    /// Rounds that were asked for.
    pub rounds_asked: usize,
    /// The ways, those that could not be measured too.
    pub ways: Vec<WayRecord>,
    /// The loads, from light to heavy.
    pub loads: Vec<LoadRecord>,
    /// Reasons for doubt.
    pub warnings: Vec<Warning>,
}

/// A way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WayRecord {
    /// Which.
    pub way: Way,
    /// Why it was not measured.
    pub skipped: Option<String>,
}

/// All ways at one load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoadRecord {
    /// "light", "medium", "heavy".
    pub name: String,
    /// Threads.
    pub clients: u32,
    /// Requests in flight for each.
    pub outstanding: u32,
    /// One for each way that was measured; the first is the base.
    pub cells: Vec<CellRecord>,
}

/// One way at one load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CellRecord {
    /// Which way.
    pub way: Way,
    /// Requests a second.
    pub iops: Summary,
    /// Millions of bytes a second.
    pub mb_per_s: Summary,
    /// Mean response time, nanoseconds.
    pub mean_ns: Summary,
    /// 99th percentile of the response time, nanoseconds.
    pub p99_ns: Summary,
    /// CPU time of the generator's process for each request, nanoseconds.
    pub client_cpu_ns: Summary,
    /// CPU time of the server's process for each request, nanoseconds; none where there is no
    /// server.
    pub server_cpu_ns: Option<Summary>,
    /// CPU time of the whole machine for each request, the kernel's threads included, nanoseconds.
    pub machine_cpu_ns: Summary,
    /// IOPS as a ratio to the base's in the same round; none for the base. Times 100 it is the
    /// paper's scale.
    pub iops_ratio: Option<Ratio>,
    /// Mean response time, so.
    pub mean_ratio: Option<Ratio>,
    /// CPU time of client and server together, so.
    pub cpu_ratio: Option<Ratio>,
    /// Each round.
    pub rounds: Vec<RoundRecord>,
}

/// A cell in one round.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RoundRecord {
    /// The window. Its CPU time is that of the generator's process, with the NBD client in it.
    #[serde(flatten)]
    pub figures: Figures,
    /// CPU time of the server's process for each request, nanoseconds; none where there is no
    /// server.
    pub server_cpu_ns: Option<f64>,
}

impl Cells for AccessPathsResult {
    fn cells(&self) -> Cow<'_, [Cell]> {
        let of = |load: &LoadRecord| -> Vec<Cell> {
            let title = format!("{} load, {} clients with {} outstanding", load.name, load.clients, load.outstanding);
            let of_way = |record: &CellRecord| {
                let rounds: Vec<Figures> = record.rounds.iter().map(|round| round.figures).collect();
                let depth = rounds.first().map_or(0, |round| round.queue_depth);
                let mut cell = Cell::new("", &title, record.way.name(), depth).with_rounds(rounds);
                record.rounds.iter().for_each(|round| cell.push_more("server_cpu_ns_per_io", round.server_cpu_ns));
                cell
            };
            load.cells.iter().map(of_way).collect()
        };
        self.loads.iter().flat_map(of).collect()
    }
}

/// Runs the study and saves its result. Servers, devices and the scratch folder are gone when it
/// returns, however it ends.
///
/// # Errors
/// No space; a disk or a server that fails; [`LabError::Stopped`] when it was stopped before a
/// round was whole.
pub fn run(options: &AccessPathsOptions, progress: &mut dyn Progress) -> Result<StudyReport<AccessPathsResult>> {
    let study = &options.study;
    let start = Instant::now();
    let started_utc = clock::compact_utc_now();
    let container = options.disk.unwrap_or(Container::VhdxDynamic);
    if container.disk_type() == diskwright_image::DiskType::Differencing {
        return Err(LabError::BadOptions {
            what: format!(
                "{} cannot be the disk of this study: what is written goes to a child of its own",
                container.name()
            ),
            hint: "use a fixed or a dynamic disk, or raw".into(),
        });
    }
    let wanted_bytes = options.size_bytes.unwrap_or(study.pick(QUICK_BYTES, FULL_BYTES));
    let size_bytes = wanted_bytes.max(1).next_multiple_of(32 << 20);
    let plan = Plan {
        rounds: study.rounds_or(study.pick(3, 5))?,
        cell: study.cell.unwrap_or(Duration::from_secs(study.pick(1, 30))),
        engine: study.engine,
        seed: SEED,
        until: (study.quick && study.rounds.is_none()).then(|| start + QUICK_TIME),
    };
    let output = study.place("access-paths", &started_utc)?;
    let machine = Machine::detect();
    let scratch = Scratch::new(study.dir.as_deref(), study.keep)?;
    let place = Place::detect(scratch.path());
    // The disk, the raw file, and a child that may become as large.
    scratch.need("the study", 3 * size_bytes + (1 << 30))?;
    let disks = prepare(&scratch, container, size_bytes, options, progress)?;
    scratch.settle()?;
    let ways = disks.probe(progress)?;
    let measured: Vec<Way> = ways.iter().filter(|record| record.skipped.is_none()).map(|record| record.way).collect();
    let cells = measure::measure(&disks, &measured, &plan, progress)?;
    let loads = measure::loads(&measured, &cells)?;
    let mut warnings = doubts(&cells, &loads, &ways, disks.cache);
    if cells.whole < plan.rounds && !cells.stopped {
        let what = format!("{} of {} rounds", plan.rounds - cells.whole, plan.rounds);
        let why = "a quick study has to end within two minutes, and this machine is slow or busy".into();
        warnings.push(Warning::LeftOut { what, why });
    }
    let stopped = cells.stopped;
    let result = AccessPathsResult {
        schema: SCHEMA.into(),
        verdict: verdict::verdict(&loads, &ways, stopped.then_some((cells.whole, plan.rounds))),
        took_ns: start.elapsed().as_nanos() as u64,
        stopped,
        machine,
        place,
        versions: Versions { qemu: crate::bench::peer::qemu_version(), ..Versions::detect() },
        quick: study.quick,
        disk: container,
        size_bytes,
        cell_ns: plan.cell.as_nanos() as u64,
        rounds: cells.whole,
        rounds_asked: plan.rounds,
        ways,
        loads,
        warnings,
        started_utc,
    };
    Ok(StudyReport::save(result, &output, stopped))
}

/// Makes the disk and the raw file, fills both with the same data, reads them back.
fn prepare(
    scratch: &Scratch,
    container: Container,
    size_bytes: u64,
    options: &AccessPathsOptions,
    progress: &mut dyn Progress,
) -> Result<Disks> {
    let engine = options.study.engine;
    let dir = scratch.folder("disks")?;
    let dir = dir.canonicalize().map_err(LabError::file("find", &dir))?;
    let how = Preparation { size_bytes, seed: SEED, cache: CacheMode::Direct, engine };
    let mut done = 0;
    let mut make = |container: Container, dir: &Path| -> Result<(PathBuf, CacheMode)> {
        let mut tick = |filled| tell(progress, "prepare", done + filled, 4 * size_bytes, container.name());
        let path = targets::make_filled(container, dir, &how, &mut tick)?;
        done += size_bytes;
        let mut tick = |read| tell(progress, "prepare", done + read, 4 * size_bytes, container.name());
        let target = targets::open_verified(container, path.clone(), &how, &mut tick)?;
        done += size_bytes;
        let cache = target.cache;
        target.close()?;
        Ok((path, cache))
    };
    let (disk, cache) = make(container, &dir)?;
    let raw_dir = dir.join("raw");
    std::fs::create_dir(&raw_dir).map_err(LabError::file("create", &raw_dir))?;
    let (raw, _) = make(Container::Raw, &raw_dir)?;
    Ok(Disks { container, disk, raw, dir, cache, engine, program: options.program.clone() })
}

fn doubts(cells: &measure::Cells, loads: &[LoadRecord], ways: &[WayRecord], cache: CacheMode) -> Vec<Warning> {
    let mut warnings = Vec::new();
    if cfg!(debug_assertions) {
        warnings.push(Warning::DebugBuild);
    }
    if cache == CacheMode::PageCache {
        warnings.push(Warning::DirectNotHonoured { targets: vec!["the disk".into(), "the raw file".into()] });
    }
    for record in ways {
        if let Some(why) = &record.skipped {
            warnings.push(Warning::LeftOut { what: record.way.name().into(), why: why.clone() });
        }
    }
    warnings.extend(spread(loads));
    // Of the cells that have no server, whose work would count as that of others.
    if cells.others_cpus > BUSY_CPUS {
        warnings.push(Warning::OtherLoad { cpus: cells.others_cpus });
    }
    if cells.stolen_cpus > BUSY_CPUS / 5.0 {
        warnings.push(Warning::StolenTime { cpus: cells.stolen_cpus });
    }
    warnings
}

/// Whether the rounds of some ratios lie far apart.
fn spread(loads: &[LoadRecord]) -> Option<Warning> {
    let mut all: Vec<(f64, String)> = Vec::new();
    for load in loads {
        for cell in &load.cells {
            if let Some(ratio) = &cell.iops_ratio {
                all.push((ratio.summary.spread(), format!("{}, {} load", cell.way.name(), load.name)));
            }
        }
    }
    let wide = all.iter().filter(|(spread, _)| *spread > SPREAD_MAX).count();
    let (worst_spread, worst) = all.iter().max_by(|a, b| a.0.total_cmp(&b.0))?.clone();
    (wide > 0).then_some(Warning::Spread { cells: wide, of: all.len(), threshold: SPREAD_MAX, worst, worst_spread })
}
