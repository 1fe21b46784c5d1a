//! The study `raw-and-file`: the cost of a file system against the block device, and against the
//! mappings of a device that VMware has.
//!
//! The paper ("Performance Characterization of VMFS and RDM") gave a virtual machine the same LUN
//! as a raw device mapping, physical and virtual, and as a file on VMFS. This study measures the
//! paper's whole matrix on one device, and the bare device beside: five sizes, five patterns, 64
//! outstanding requests.
//!
//! ```text
//!   halve     one block device: one half bare, a file system on the other half     (test_bed.rs)
//!   prepare   mappings of the bare half; flat files, thick eager, thick lazy, thin   (storage.rs)
//!   first     counted writes into new files, with the flush                     (first_writes.rs)
//!   later     each workload in rounds, on disks that are full of data: every subject once in each
//!             round, in changing order
//!   conclude  throughput and CPU cost as ratios to the device in the same round, and the paper's
//!                                                                   (conclude.rs, paper.rs)
//! ```
//!
//! The device and its mappings are the same bytes, so a subject is opened for its window only. Flat
//! files differ by their space alone, and only until it was written: that is what the first writes
//! are for.
//!
//! The CPU cost is that of the whole machine, as in the paper. With a loop device, or any driver
//! that completes requests in kernel threads, much of the work is not in the load generator's
//! process. Other programs count too, so the idle machine is observed shortly before and after
//! measuring.

pub mod conclude;
mod figure;
mod file_system;
mod first_writes;
mod jobs;
pub(crate) mod labels;
pub mod paper;
mod pattern;
mod record;
mod settings;
mod storage;
mod subject;
mod test_bed;
#[cfg(test)]
pub(crate) mod tests;

pub use conclude::{Overall, Part};
pub use figure::Figure;
pub use file_system::FileSystem;
pub use pattern::Pattern;
pub use record::{FIRST, Measured, RawAndFileResult, SCHEMA, Workload};
pub use storage::Storage;
pub use test_bed::{Halves, TestBedRecord};

use crate::{
    LabError, Result,
    cells::{self, Cell},
    fill, inspect,
    progress::{Progress, report},
    ratio::Ratio,
    rounds::{self, Rounds, Steps, Window},
    scratch::Scratch,
    study::{StudyOptions, StudyReport, warnings as shared},
    sweep,
};
use diskwright_load::{
    figures::Figures,
    job::{Job, Load},
    machine::{OtherLoad, Place},
    record::{End, Head, Run},
    run::{self, RunOptions, Watch},
    warning::Warning,
};
use jobs::{jobs, with_cell, write_jobs};
use settings::{SEED, Settings};
use std::{
    path::{Path, PathBuf},
    slice, thread,
    time::{Duration, Instant},
};
use subject::Subject;
use test_bed::{TestBed, TestBedPlan};

/// How long the idle machine is observed.
const IDLE_LOOK: Duration = Duration::from_millis(400);

/// Options of the study. The default is the full study on loop devices over a file.
#[derive(Debug, Clone, Default)]
pub struct RawAndFileOptions {
    /// Options of every study.
    pub study: StudyOptions,
    /// Size of each disk, rounded up to a multiple of 16 MiB. Default: 20 GiB as in the paper, 1
    /// GiB if quick.
    pub size_bytes: Option<u64>,
    /// File system on the second half.
    pub file_system: FileSystem,
    /// A block device to use instead of a file in the scratch folder. It is overwritten from end to
    /// end.
    pub device: Option<PathBuf>,
    /// Whether data on the device may be destroyed.
    pub destroy_data: bool,
}

/// Runs the study and saves its result. If it is stopped while it measures, the whole rounds are
/// kept. In all cases the file system is unmounted, loop devices and partitions are removed, and
/// the scratch folder is removed unless `keep` is set.
///
/// # Errors
/// Not root; no space; a device that is in use or holds data; a disk that fails;
/// [`LabError::Stopped`] if it is stopped before the first whole round.
pub fn run(options: &RawAndFileOptions, progress: &mut dyn Progress) -> Result<StudyReport<RawAndFileResult>> {
    let begun = options.study.begin("raw-and-file", SCHEMA)?;
    let settings = Settings::new(&options.study, options.size_bytes, begun.start)?;
    let scratch = Scratch::new(options.study.dir.as_deref(), options.study.keep)?;
    let place = Place::detect(scratch.path());
    let wanted = TestBedPlan {
        bare_bytes: settings.size_bytes,
        file_system_bytes: options
            .file_system
            .bytes_for(3 * settings.size_bytes + first_writes::file_bytes(settings.first_bytes)),
        file_system: options.file_system,
        device: options.device.as_deref(),
        destroy_data: options.destroy_data,
        engine: settings.engine,
    };
    if options.device.is_none() {
        scratch.need("the study", wanted.bare_bytes + wanted.file_system_bytes + (64 << 20))?;
    }
    let test_bed = TestBed::make(&scratch, &wanted, progress)?;
    let (subjects, mut warnings) = prepare(&test_bed, &settings, progress)?;
    crate::scratch::settle(&test_bed.folder)?;
    scratch.settle()?;
    let idle_before = idle_cpus();
    let measured = measure(&subjects, (&test_bed.folder, &scratch), &settings, progress)?;
    let idle_cpus = idle_before.max(idle_cpus());
    // The windows' own warnings of other load are dropped: they include kernel threads that work
    // for the study.
    warnings.extend(measured.warnings.into_iter().filter(|warning| !matches!(warning, Warning::OtherLoad { .. })));
    warnings.extend(shared::of_others(idle_cpus, 0.0));
    if test_bed.record.loop_direct == Some(false) {
        warnings.push(Warning::DirectNotHonoured { targets: vec!["the loop devices".into()] });
    }
    warnings.extend(spread(&measured.cells));
    Warning::sort(&mut warnings);
    let mut result = RawAndFileResult {
        head: Head { place: Some(place), warnings, ..begun.end(String::new(), measured.stopped) },
        quick: settings.quick,
        size_bytes: settings.size_bytes,
        first_bytes: settings.first_bytes,
        rounds: settings.rounds,
        test_bed: test_bed.record.clone(),
        subjects: subjects.iter().map(Subject::record).collect::<Result<_>>()?,
        tsc_hz: measured.tsc_hz,
        idle_cpus,
        cells: measured.cells,
    };
    result.head.verdict = conclude::verdict(&result);
    drop(subjects);
    test_bed.end()?;
    result.head.took_ns = begun.took_ns();
    Ok(StudyReport::save(result, &begun.output, measured.stopped))
}

/// A warning if the rounds of some throughput ratio scatter.
fn spread(cells: &[Cell]) -> Option<Warning> {
    let mut ratios: Vec<(String, Ratio)> = Vec::new();
    for workload in Measured::all(cells) {
        let named = workload.loads.ratios(|round| round.iops);
        ratios.extend(named.filter_map(|(cell, ratio)| Some((format!("{}, {}", cell.subject, cell.load), ratio?))));
    }
    shared::spread(&ratios)
}

/// Maps the device, creates the files, fills all, checks that all is allocated, and inspects them.
fn prepare(
    test_bed: &TestBed,
    settings: &Settings,
    progress: &mut dyn Progress,
) -> Result<(Vec<Subject>, Vec<Warning>)> {
    let filled = Storage::ALL.into_iter().filter(|storage| storage.is_file()).count() as u64 + 1;
    let (total_bytes, mut before_bytes) = (filled * settings.size_bytes, 0);
    let (mut subjects, mut warnings): (Vec<Subject>, Vec<Warning>) = (Vec::new(), Vec::new());
    for storage in Storage::ALL {
        report(progress, "prepare", before_bytes, total_bytes, storage.name())?;
        let mut subject = match storage {
            Storage::Device => {
                Subject { storage, path: test_bed.bare.clone(), engine: settings.engine, contents: None }
            }
            _ if storage.is_file() => Subject::create(storage, &test_bed.folder, settings.size_bytes, settings.engine)?,
            _ => Subject::map(storage, &test_bed.folder, &test_bed.bare, settings.engine)?,
        };
        if storage == Storage::Device || storage.is_file() {
            let mut tick = |done| report(progress, "prepare", before_bytes + done, total_bytes, storage.name());
            warnings.extend(fill(&mut subject, settings, &mut tick)?);
            before_bytes += settings.size_bytes;
        } else {
            // The same bytes.
            subject.contents = subjects.first().and_then(|device: &Subject| device.contents);
        }
        subjects.push(subject);
    }
    Ok((subjects, warnings))
}

/// Fills a subject and inspects it.
fn fill(subject: &mut Subject, settings: &Settings, tick: &mut fill::Tick<'_>) -> Result<Vec<Warning>> {
    let target = subject.open()?;
    fill::fill(&target.name, &*target.device, SEED, settings.engine, tick)?;
    fill::check_populated(&target.name, &*target.device, false)?;
    let all = 0..target.device.geometry().size_bytes;
    let mut contents =
        inspect::contents_of(&target.name, &*target.device, slice::from_ref(&all), SEED, settings.engine)?;
    contents.filled_bytes = all.end;
    subject.contents = Some(contents);
    let reads = Job::simple(
        "inspect",
        Load::default(),
        diskwright_load::job::Span::default(),
        diskwright_load::job::Span::from_secs(1),
    );
    let warnings = inspect::warnings::of_target(&reads, 0, &target.name, &contents);
    target.close()?;
    Ok(warnings)
}

/// The measured cells of all workloads.
struct AllCells {
    cells: Vec<Cell>,
    warnings: Vec<Warning>,
    tsc_hz: f64,
    stopped: bool,
}

/// Measures the first writes, and then every workload on every subject, in interleaved rounds.
///
/// # Errors
/// [`LabError::Stopped`] if it is stopped before the first whole round.
fn measure(
    subjects: &[Subject],
    places: (&Path, &Scratch),
    settings: &Settings,
    progress: &mut dyn Progress,
) -> Result<AllCells> {
    let (writes, jobs) = (write_jobs(settings.quick, settings.engine)?, jobs(settings.quick, settings.engine)?);
    let mut found = AllCells { cells: Vec::new(), warnings: Vec::new(), tsc_hz: 0.0, stopped: false };
    let all = (writes.len() + jobs.len()) * subjects.len();
    let mut steps = Steps::new(progress, "measure", all * settings.rounds);
    let first = first_writes::measure((&writes, subjects), places, settings, &mut steps, &mut found.cells)?;
    if first.stopped {
        found.stopped = true;
        return if found.cells.is_empty() { Err(LabError::Stopped) } else { Ok(found) };
    }
    for job in jobs {
        let left = (steps.total - steps.done) as usize;
        let job = with_cell(job, settings.budget.cell(Instant::now(), left), settings.size_bytes);
        let load = &job.phases[0].loads[0];
        let name = Workload::of(load).name();
        let depth = u64::from(load.queue_depth);
        let of = |subject: &Subject| Cell::new("", &name, subject.storage.name(), depth);
        let mut cells: Vec<Cell> = subjects.iter().map(of).collect();
        let title = |at: Window| Some(format!("{name}, {}", subjects[at.cell].storage.name()));
        let mut measure = |at: Window, watch: &dyn Watch| {
            let subject = &subjects[at.cell];
            let job = rounds::job_of(&job, &cells::title(&name, depth), at.round, Some(settings.size_bytes));
            let run = window(&job, subject, watch)?;
            let of_cell = format!("{name}, {}", subject.storage.name());
            for warning in run.head.warnings {
                sweep::add_warning_of_cell(&mut found.warnings, &of_cell, warning);
            }
            found.tsc_hz = run.phases[0].cpu.tsc_hz;
            cells[at.cell].rounds.push(Figures::of(&run.phases[0]));
            Ok(())
        };
        let rounds = Rounds::new(settings.rounds, SEED);
        let done = rounds::interleave(&rounds, subjects.len(), &mut steps, &title, &mut measure)?;
        cells.iter_mut().for_each(|cell| cell.truncate(done.whole));
        if done.whole > 0 {
            found.cells.extend(cells);
        }
        found.stopped = done.stopped;
        if found.stopped {
            break;
        }
    }
    sweep::settle_warnings(&mut found.warnings, all);
    if found.cells.is_empty() { Err(LabError::Stopped) } else { Ok(found) }
}

/// Opens a subject and measures one window.
///
/// # Errors
/// [`LabError::BadOptions`] if a request failed, [`LabError::Stopped`] if it was stopped.
fn window(job: &Job, subject: &Subject, watch: &dyn Watch) -> Result<Run> {
    let target = subject.open()?;
    let run = run::run(job, slice::from_ref(&target), &RunOptions::default(), watch)?;
    target.close()?;
    match run.head.end {
        End::Complete => Ok(run),
        End::Stopped => Err(LabError::Stopped),
        End::Failed { first, .. } => Err(LabError::BadOptions {
            what: format!("{}: {first}", target.name),
            hint: "check the storage below it".into(),
        }),
    }
}

/// CPUs that other programs keep busy while this study does nothing.
fn idle_cpus() -> f64 {
    let watch = OtherLoad::watch();
    thread::sleep(IDLE_LOOK);
    watch.since().0
}
