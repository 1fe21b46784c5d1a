//! The study `zero-payload`: writes of zeros against writes of data.
//!
//! The paper ("Dynamic versus fixed") ran SQLIO inside a guest on a dynamic and on a fixed VHDX,
//! and the dynamic one was twenty times as fast. SQLIO's file contained zeros, which a dynamic disk
//! need not store. This study runs both disks with zeros and with real data:
//!
//! ```text
//!   prepare   dynamic and fixed VHDX, written from end to end: two with zeros, two with
//!             incompressible data (the dynamic disk detects zeros, as Hyper-V's does)
//!   inspect   the warnings that `lab run` would print for each of them
//!   measure   8K and 64K random reads and writes; in each round every disk is measured once, in
//!             changing order; for each cell, the bytes that this process read and wrote
//!   conclude  dynamic against fixed, with zeros and with data; the share of bytes that never
//!             reached storage
//! ```
//!
//! The last figure does not come from our engine: it is the kernel's account of the process
//! (`/proc/self/io`).

mod record;
pub mod verdict;

pub use record::{DiskRecord, NOT_STORED, Payload, SCHEMA, Test, ZeroPayloadResult, not_stored};

use crate::{
    LabError, Result,
    cells::Cell,
    fill::{self, Tick},
    inspect, measure,
    progress::{Progress, report},
    rounds::{self, Rounds, Steps, Window},
    scratch::Scratch,
    study::{StudyOptions, StudyReport, warnings as shared},
    targets::open_target,
    traffic::Traffic,
};
use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
use diskwright_image::{DiskType, Format};
use diskwright_load::{
    OpenTarget,
    figures::Figures,
    job::{Blocks, Bytes, Caching, Contents, Job, Load, Span},
    machine::{OtherLoad, Place},
    record::Head,
    run::{RunOptions, Watch},
    warning::Warning,
};
use diskwright_store::{CacheMode, EngineKind};
use std::{path::PathBuf, slice, sync::Arc, time::Duration};

/// The paper's only figures in its text: 64K random reads per second, dynamic and fixed ("almost
/// 37,000" and 1,865).
pub const PAPER_64K_READ_IOPS: (f64, f64) = (37_000.0, 1_865.0);

/// SQLIO's usual eight outstanding requests; the paper does not give its number.
const QUEUE_DEPTH: u32 = 8;
const QUICK_BYTES: u64 = 1 << 30;
/// Size of the paper's file.
const FULL_BYTES: u64 = 20 << 30;
const SEED: u64 = 0x7a65_726f;

/// Options of the study. The default is the full study; `quick` takes less than two minutes.
#[derive(Debug, Clone, Default)]
pub struct ZeroPayloadOptions {
    /// Default: 5 rounds, 3 if quick; cells of 10 s, 0.7 s if quick.
    pub study: StudyOptions,
    /// Size of each disk, rounded up to a multiple of 32 MiB. Default: 20 GiB as in the paper, 1
    /// GiB if quick.
    pub size_bytes: Option<u64>,
}

/// One of the four disks.
struct Subject {
    payload: Payload,
    disk_type: DiskType,
    disk: Arc<Disk>,
    target: OpenTarget,
    path: PathBuf,
}

/// Runs the study and saves its result. The scratch folder is removed in all cases, unless `keep`
/// is set.
///
/// # Errors
/// No space; a disk that fails; [`LabError::Stopped`].
pub fn run(options: &ZeroPayloadOptions, progress: &mut dyn Progress) -> Result<StudyReport<ZeroPayloadResult>> {
    let study = &options.study;
    let begun = study.begin("zero-payload", SCHEMA)?;
    let wanted_bytes = options.size_bytes.unwrap_or(study.pick(QUICK_BYTES, FULL_BYTES));
    let size_bytes = wanted_bytes.max(1).next_multiple_of(32 << 20);
    let rounds = study.rounds_or(study.pick(3, 5))?;
    let cell = study.cell.unwrap_or(Duration::from_millis(study.pick(700, 10_000)));
    let scratch = Scratch::new(study.dir.as_deref(), study.keep)?;
    let place = Place::detect(scratch.path());
    // Three full disks, and one that stays empty.
    scratch.need("the study", 3 * size_bytes + (1 << 30))?;
    let subjects = prepare(&scratch, size_bytes, study.engine, progress)?;
    scratch.settle()?;
    let mut disks = Vec::new();
    for subject in &subjects {
        disks.push(inspect_disk(subject, study.engine)?);
    }
    let watch = OtherLoad::watch();
    let mut cells = Vec::new();
    let stopped = match measure_all(&subjects, rounds, cell, study.engine, &mut cells, progress) {
        Ok(()) => false,
        Err(LabError::Stopped) if !cells.is_empty() => true,
        Err(error) => return Err(error),
    };
    let mut warnings = shared::of_machine(&begun.head.machine);
    warnings.extend(cached(&subjects));
    warnings.extend(shared::since(&watch));
    for Subject { disk, target, .. } in subjects {
        drop(target);
        disk.close()?;
    }
    let head = begun.end(verdict::verdict(&cells, stopped), stopped);
    let result = ZeroPayloadResult {
        head: Head { place: Some(place), warnings, ..head },
        quick: study.quick,
        size_bytes,
        cell_ns: cell.as_nanos() as u64,
        rounds,
        disks,
        cells,
    };
    Ok(StudyReport::save(result, &begun.output, stopped))
}

fn name_of(payload: Payload, disk_type: DiskType) -> String {
    format!("{disk_type}, {}", payload.name())
}

/// Creates the four disks and writes each from end to end.
fn prepare(
    scratch: &Scratch,
    size_bytes: u64,
    engine: EngineKind,
    progress: &mut dyn Progress,
) -> Result<Vec<Subject>> {
    let kinds = [
        (Payload::Zeros, DiskType::Dynamic),
        (Payload::Zeros, DiskType::Fixed),
        (Payload::Data, DiskType::Dynamic),
        (Payload::Data, DiskType::Fixed),
    ];
    let dir = scratch.folder("disks")?;
    let mut subjects = Vec::new();
    for (index, (payload, disk_type)) in kinds.into_iter().enumerate() {
        let name = name_of(payload, disk_type);
        let path = dir.join(format!("{}.vhdx", name.replace(", ", "-")));
        let request = CreateRequest {
            format: Some(Format::Vhdx),
            disk_type: Some(disk_type),
            size_bytes: Some(size_bytes),
            preallocate: disk_type == DiskType::Fixed,
            ..CreateRequest::default()
        };
        create(&path, &request)?;
        let open = OpenOptions {
            writable: true,
            cache: CacheMode::Direct,
            engine,
            detect_zeroes: true,
            ..OpenOptions::default()
        };
        let disk = Disk::open(&path, &open)?;
        let all = 0..size_bytes;
        let total = size_bytes * kinds.len() as u64;
        let mut tick = |done| report(progress, "prepare", index as u64 * size_bytes + done, total, &name);
        let tick: &mut Tick<'_> = &mut tick;
        match payload {
            Payload::Zeros => {
                fill::fill_ranges(&name, &*disk, slice::from_ref(&all), engine, &mut |_, buf| buf.fill(0), tick)?;
            }
            Payload::Data => fill::fill(&name, &*disk, SEED, engine, tick)?,
        }
        let cache = crate::open::top_cache_mode(&disk);
        let kind = format!("vhdx {disk_type}");
        let target = OpenTarget { path: Some(path.clone()), ..open_target(&name, &kind, disk.clone(), cache) };
        subjects.push(Subject { payload, disk_type, disk, target, path });
    }
    Ok(subjects)
}

/// Inspects a disk like `lab run` does before it measures.
fn inspect_disk(subject: &Subject, engine: EngineKind) -> Result<DiskRecord> {
    use std::os::unix::fs::MetadataExt;
    let target = &subject.target;
    let size_bytes = target.device.geometry().size_bytes;
    let all = 0..size_bytes;
    let contents = inspect::contents_of(&target.name, &*target.device, slice::from_ref(&all), SEED, engine)?;
    let metadata = std::fs::metadata(&subject.path).map_err(LabError::file("examine", &subject.path))?;
    let read = job(&tests()[1], subject.payload, Duration::from_secs(1), engine);
    Ok(DiskRecord {
        name: target.name.clone(),
        payload: subject.payload,
        file_allocated_bytes: metadata.blocks() * 512,
        warnings: inspect::warnings::of_target(&read, 0, &target.name, &contents),
        contents,
    })
}

/// Name, bytes per request, percentage of reads.
type TestLoad = (&'static str, u64, f64);

/// Four of SQLIO's eight tests; the paper counts each test once for each of two disks.
fn tests() -> [TestLoad; 4] {
    [
        ("8K random write", 8 << 10, 0.0),
        ("8K random read", 8 << 10, 100.0),
        ("64K random write", 64 << 10, 0.0),
        ("64K random read", 64 << 10, 100.0),
    ]
}

fn job((name, block_bytes, read_percent): &TestLoad, payload: Payload, cell: Duration, engine: EngineKind) -> Job {
    let load = Load {
        block: Blocks::One(Bytes(*block_bytes)),
        read_percent: *read_percent,
        queue_depth: QUEUE_DEPTH,
        ..Load::default()
    };
    // No warm-up: the kernel's account covers the whole cell, so the requests must too.
    let mut job = Job::simple(name, load, Span::default(), cell.into());
    job.contents = if payload == Payload::Zeros { Contents::Zero } else { Contents::Incompressible };
    (job.seed, job.engine) = (SEED, engine.into());
    job
}

/// Measures each test on each disk, and adds the cells to `cells`.
fn measure_all(
    subjects: &[Subject],
    rounds: usize,
    cell: Duration,
    engine: EngineKind,
    cells: &mut Vec<Cell>,
    progress: &mut dyn Progress,
) -> Result<()> {
    let mut steps = Steps::new(progress, "measure", tests().len() * rounds * subjects.len());
    for test in tests() {
        let of = |subject: &Subject| {
            Cell::new(subject.payload.name(), test.0, &subject.disk_type.to_string(), QUEUE_DEPTH.into())
        };
        let mut found: Vec<Cell> = subjects.iter().map(of).collect();
        let title = |at: Window| Some(format!("{}, {}", test.0, subjects[at.cell].target.name));
        let mut measure = |at: Window, watch: &dyn Watch| {
            let subject = &subjects[at.cell];
            let job = job(&test, subject.payload, cell, engine);
            let job = rounds::job_of(&job, test.0, at.round, None);
            let (figures, not_stored) = measure_cell(&job, subject, watch)?;
            found[at.cell].rounds.push(figures);
            found[at.cell].push_more(NOT_STORED, Some(not_stored));
            Ok(())
        };
        let done = rounds::interleave(&Rounds::new(rounds, SEED), subjects.len(), &mut steps, &title, &mut measure)?;
        found.iter_mut().for_each(|cell| cell.truncate(done.whole));
        if done.whole > 0 {
            cells.extend(found);
        }
        done.or_stopped()?;
    }
    Ok(())
}

/// Measures one window. Returns its figures and the share of its bytes that never reached storage.
fn measure_cell(job: &Job, subject: &Subject, watch: &dyn Watch) -> Result<(Figures, f64)> {
    let before = Traffic::of_process()?;
    let phase = measure::window(job, &subject.target, &RunOptions::default(), watch)?;
    let traffic = Traffic::of_process()? - before;
    let moved_bytes = if job.writes() { traffic.written_bytes } else { traffic.read_bytes };
    // The account includes requests in flight at the end, the record does not: the share may be
    // slightly below 0.
    let asked_bytes = phase.total().both.bytes.max(1);
    Ok((Figures::of(&phase), (1.0 - moved_bytes as f64 / asked_bytes as f64).clamp(0.0, 1.0)))
}

/// A warning if a disk uses the page cache although direct I/O was requested.
fn cached(subjects: &[Subject]) -> Option<Warning> {
    let cached = subjects.iter().filter(|subject| subject.target.cache != Caching::Direct);
    let targets: Vec<String> = cached.map(|subject| subject.target.name.clone()).collect();
    (!targets.is_empty()).then_some(Warning::DirectNotHonoured { targets })
}
