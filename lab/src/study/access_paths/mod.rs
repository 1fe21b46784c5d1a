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
//! from their clocks; the CPU time of the kernel's threads behind a loop device is in the machine's
//! figure only.
//!
//! | file | idea |
//! |---|---|
//! | `options.rs`, `paper.rs` | options of the study; the paper's load and figures |
//! | `record.rs` | what is saved, and what follows from it |
//! | `ways.rs` | each way to the disk: set up for each cell, torn down in any case |
//! | `measure.rs` | a cell; rounds in turns |
//! | `verdict.rs` | the conclusion |

#[cfg(test)]
pub(crate) mod example;
mod measure;
mod options;
mod paper;
pub mod record;
pub mod verdict;
mod ways;

pub use options::AccessPathsOptions;
pub use paper::{CLIENTS, LOADS, PAPER_WITHIN};
pub use record::{AccessPathsResult, SCHEMA, SERVER_CPU_NS, Way, WayRecord};

use crate::{
    LabError, Result,
    cells::Compared,
    progress::{Progress, report as tell},
    ratio::Ratio,
    scratch::Scratch,
    study::{StudyReport, doubts},
    targets::{self, Container, Preparation},
};
use diskwright_load::{
    machine::{Place, Versions},
    record::Head,
    warning::Warning,
};
use diskwright_store::CacheMode;
use measure::{Measured, Plan};
use std::{
    path::{Path, PathBuf},
    time::Duration,
};
use ways::Disks;

/// More would take longer to give back between cells than to measure: random writes leave a child
/// of many extents.
const QUICK_BYTES: u64 = 256 << 20;
const FULL_BYTES: u64 = 16 << 30;
/// When a quick study begins no more rounds.
const QUICK_TIME: Duration = Duration::from_secs(100);
const SEED: u64 = 0x7061_7468;

/// Runs the study and saves its result. Servers, devices and the scratch folder are gone when it
/// returns, however it ends.
///
/// # Errors
/// No space; a disk or a server that fails; [`LabError::Stopped`] when it was stopped before a
/// round was whole.
pub fn run(options: &AccessPathsOptions, progress: &mut dyn Progress) -> Result<StudyReport<AccessPathsResult>> {
    let study = &options.study;
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
    let begun = study.begin("access-paths", SCHEMA)?;
    let plan = Plan {
        rounds: study.rounds_or(study.pick(3, 5))?,
        cell: study.cell.unwrap_or(Duration::from_secs(study.pick(1, 30))),
        engine: study.engine,
        seed: SEED,
        until: (study.quick && study.rounds.is_none()).then(|| begun.start + QUICK_TIME),
    };
    let scratch = Scratch::new(study.dir.as_deref(), study.keep)?;
    let place = Place::detect(scratch.path());
    // The disk, the raw file, and a child that may become as large.
    scratch.need("the study", 3 * size_bytes + (1 << 30))?;
    let disks = prepare(&scratch, container, size_bytes, options, progress)?;
    scratch.settle()?;
    let ways = disks.probe(progress)?;
    let to_measure: Vec<Way> = ways.iter().filter(|record| record.skipped.is_none()).map(|record| record.way).collect();
    let measured = measure::measure(&disks, &to_measure, &plan, progress)?;
    let mut warnings = doubts::of_machine(&begun.head.machine);
    warnings.extend(doubts_of(&measured, &ways, disks.cache));
    let (whole, stopped) = (measured.done.whole, measured.done.stopped);
    if whole < plan.rounds && !stopped {
        let what = format!("{} of {} rounds", plan.rounds - whole, plan.rounds);
        let why = "a quick study has to end within two minutes, and this machine is slow or busy".into();
        warnings.push(Warning::LeftOut { what, why });
    }
    let verdict = verdict::verdict(&measured.cells, &ways, stopped.then_some((whole, plan.rounds)));
    let head = begun.end(verdict, stopped);
    let versions = Versions { qemu: crate::peer::qemu_version(), ..head.versions.clone() };
    let result = AccessPathsResult {
        head: Head { place: Some(place), versions, warnings, ..head },
        quick: study.quick,
        disk: container,
        size_bytes,
        cell_ns: plan.cell.as_nanos() as u64,
        rounds: plan.rounds,
        ways,
        cells: measured.cells,
    };
    Ok(StudyReport::save(result, &begun.output, stopped))
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

/// Doubts about what was measured.
fn doubts_of(measured: &Measured, ways: &[WayRecord], cache: CacheMode) -> Vec<Warning> {
    let mut warnings = Vec::new();
    if cache == CacheMode::PageCache {
        warnings.push(Warning::DirectNotHonoured { targets: vec!["the disk".into(), "the raw file".into()] });
    }
    for record in ways {
        if let Some(why) = &record.skipped {
            warnings.push(Warning::LeftOut { what: record.way.name().into(), why: why.clone() });
        }
    }
    let loads = Compared::all(&measured.cells);
    let ratios: Vec<(String, Ratio)> = loads
        .iter()
        .flat_map(|load| load.ratios(|round| round.iops))
        .filter_map(|(cell, ratio)| Some((format!("{}, {} load", cell.subject, cell.part), ratio?)))
        .collect();
    warnings.extend(doubts::spread(&ratios));
    // Of the cells that have no server, whose work would count as that of others.
    warnings.extend(doubts::of_others(measured.others_cpus, measured.stolen_cpus));
    warnings
}
