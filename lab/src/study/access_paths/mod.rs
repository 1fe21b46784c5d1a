//! The study `access-paths`: the cost of reaching a disk over NBD, NVMe/TCP or iSCSI, or as an
//! attached device.
//!
//! The paper ("Measuring SMB 3.0, iSCSI, and FC Protocols") compares three protocols on one storage
//! system with an OLTP load of twenty clients. Its scale sets the first protocol to 100. This study
//! reaches the same fully allocated disk by six access paths, and a raw file by two:
//!
//! ```text
//!   in process   generator ─▶ engine ─▶ disk                                        = 100
//!   NBD          generator ─▶ client ─▶ unix socket ─▶ `serve` ─▶ engine ─▶ disk
//!   NBD, TCP     generator ─▶ client ─▶ loopback ─▶ `serve` ─▶ engine ─▶ disk
//!   NVMe/TCP     generator ─▶ host ─▶ loopback ─▶ `serve` ─▶ engine ─▶ disk
//!   iSCSI        generator ─▶ initiator ─▶ loopback ─▶ `serve` ─▶ engine ─▶ disk
//!   attach       generator ─▶ loop device ─▶ FUSE ─▶ `attach` ─▶ engine ─▶ disk
//!   raw file     generator ─▶ raw file               control: no container
//!   qemu-nbd     generator ─▶ client ─▶ unix socket ─▶ qemu-nbd ─▶ raw file          peer
//! ```
//!
//! Each cell begins with the disk as it was filled: writes go to an ephemeral child that is dropped
//! with its server. The raw file is overwritten in place with incompressible data. Servers are
//! child processes of this program, so their CPU time can be read. The CPU time of kernel threads
//! behind a loop device is only in the machine's figure.
//!
//! | file | idea |
//! |---|---|
//! | `options.rs`, `paper.rs` | options of the study; the paper's load and figures |
//! | `record.rs` | the saved result, and figures computed from it |
//! | `setup.rs` | sets up an access path for each cell, and always takes it down |
//! | `measure.rs` | one cell; interleaved rounds |
//! | `verdict.rs` | the verdict |

#[cfg(test)]
pub(crate) mod example;
mod measure;
mod options;
mod paper;
pub mod record;
mod setup;
pub mod verdict;

pub use options::AccessPathsOptions;
pub use paper::{CLIENTS, LOADS, PAPER_WITHIN};
pub use record::{AccessPath, AccessPathRecord, AccessPathsResult, SCHEMA, SERVER_CPU_NS};

use crate::{
    LabError, Result,
    cells::Compared,
    progress::{Progress, report},
    ratio::Ratio,
    scratch::Scratch,
    study::{StudyReport, warnings as shared},
    targets::{self, Container, Preparation},
};
use diskwright_load::{
    machine::{Place, Versions},
    record::Head,
    warning::Warning,
};
use diskwright_store::CacheMode;
use measure::{Measured, Plan};
use setup::Disks;
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

/// Small, because random writes leave a child with many extents. On a larger disk, freeing the
/// child between cells would take longer than measuring.
const QUICK_BYTES: u64 = 256 << 20;
const FULL_BYTES: u64 = 16 << 30;
/// After this time a quick study begins no more rounds.
const QUICK_TIME: Duration = Duration::from_secs(120);
const SEED: u64 = 0x7061_7468;

/// Runs the study and saves its result. Servers, devices and the scratch folder are removed in all
/// cases.
///
/// # Errors
/// No space; a disk or a server that fails; [`LabError::Stopped`] if it is stopped before the first
/// whole round.
pub fn run(options: &AccessPathsOptions, progress: &mut dyn Progress) -> Result<StudyReport<AccessPathsResult>> {
    let study = &options.study;
    let container = options.disk.unwrap_or(Container::VhdxDynamic);
    if container.disk_type() == diskwright_image::DiskType::Differencing {
        return Err(LabError::BadOptions {
            what: format!(
                "{} cannot be the disk of this study: the study creates its own child for writes",
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
    // The disk, the raw file, and a child that may grow as large as the disk.
    scratch.need("the study", 3 * size_bytes + (1 << 30))?;
    let disks = prepare(&scratch, container, size_bytes, options, progress)?;
    scratch.settle()?;
    let ways = disks.probe(progress)?;
    let to_measure: Vec<AccessPath> =
        ways.iter().filter(|record| record.skipped.is_none()).map(|record| record.way).collect();
    let measured = measure::measure(&disks, &to_measure, &plan, progress)?;
    let mut warnings = shared::of_machine(&begun.head.machine);
    warnings.extend(warnings_of(&measured, &ways, disks.cache));
    let (whole, stopped) = (measured.done.whole, measured.done.stopped);
    if whole < plan.rounds && !stopped {
        let what = format!("{} of {} rounds", plan.rounds - whole, plan.rounds);
        let why = "the time budget of two minutes ended; the machine is slow or busy".into();
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

/// Creates the disk and the raw file, fills both with the same data, and verifies both.
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
        let mut tick = |filled| report(progress, "prepare", done + filled, 4 * size_bytes, container.name());
        let path = targets::make_filled(container, dir, &how, &mut tick)?;
        done += size_bytes;
        let mut tick = |read| report(progress, "prepare", done + read, 4 * size_bytes, container.name());
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

/// Warnings about the measured cells.
fn warnings_of(measured: &Measured, ways: &[AccessPathRecord], cache: CacheMode) -> Vec<Warning> {
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
    warnings.extend(shared::spread(&ratios));
    // From cells without a server: the server's CPU time would count as that of other programs.
    warnings.extend(shared::of_others(measured.others_cpus, measured.stolen_cpus));
    warnings
}
