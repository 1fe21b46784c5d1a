//! The study `containers`: what a virtual disk costs against a raw file.
//!
//! ```text
//!   prepare   create, fill with incompressible data, flush, close        each of the seven containers
//!   verify    open again, read everything back, compare, check extents   all equal, all data, or the study ends
//!   create    creation time of each type at 40 GiB
//!   chain     lengths 1 to 64 as in the paper, on to 1,023
//!   measure   workload x depth: rounds in which every container is measured once, in changing order
//!   conclude  verdict, tables, warnings, JSON
//! ```
//!
//! With `quick` the measuring gets what is left of the time, so it comes last; the run ends within two minutes unless the disk is
//! so slow that preparing alone takes as long. Writes go to the same disks as reads: every byte of them is allocated, and
//! stays so.

use crate::{
    LabError, Result,
    child::{ChildLauncher, cache_word, engine_word},
    generator::{Generator, Until},
    machine::{Machine, OtherLoad, Place, Versions},
    measure::{self, Named, Plan},
    null::NullDevice,
    paper,
    progress::{Progress, report},
    result::{self, CONTAINERS_SCHEMA, ComparedWorkload, ContainersRecord, ContainersResult, PreparedRecord},
    scratch::Scratch,
    study::{
        budget::Budget,
        chains::{ChainExperiment, LENGTHS},
        creation, verdict,
    },
    targets::{self, Container, Preparation, Target},
    warning::Warning,
    workload::{Direction, Pattern, Workload, paper_monolithic},
};
use diskwright_store::{CacheMode, EngineKind};
use std::{
    os::unix::fs::MetadataExt,
    path::PathBuf,
    time::{Duration, Instant},
};

/// When a quick run should be over, counted from its start: two minutes less what a slow machine may need to clean up.
const QUICK_TOTAL: Duration = Duration::from_secs(100);
/// A quick run gives no more than this to filling one disk; else it makes the disks smaller.
const QUICK_FILL: Duration = Duration::from_secs(3);
const QUICK_CELLS: (Duration, Duration) = (Duration::from_millis(30), Duration::from_millis(350));
const QUICK_BYTES: u64 = 512 << 20;
const QUICK_MIN_BYTES: u64 = 64 << 20;
const QUICK_DEPTHS: [u32; 1] = [32];
const FULL_BYTES: u64 = 4 << 30;
const FULL_CELL: Duration = Duration::from_secs(2);
/// As in the paper.
const FULL_DEPTHS: [u32; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];
/// The base of the chain; quick runs use a disk no larger than the other ones.
const CHAIN_BYTES: u64 = 1 << 30;
/// Size classes of disks are whole multiples of this, so that they are a whole number of everybody's blocks.
const SIZE_STEP_BYTES: u64 = 32 << 20;
/// Processors busy with something else above which a warning is given.
const BUSY_CPUS: f64 = 0.25;

/// What to do. [`ContainersOptions::default`] is the full study; `quick` the one of two minutes.
#[derive(Debug, Clone, Default)]
pub struct ContainersOptions {
    /// End within two minutes: smaller disks, short cells, one queue depth.
    pub quick: bool,
    /// Where to make the scratch folder; the current folder unless said.
    pub dir: Option<PathBuf>,
    /// What moves the bytes.
    pub engine: EngineKind,
    /// Page cache or O_DIRECT; O_DIRECT unless said.
    pub cache: Option<CacheMode>,
    /// Rounds: 5 unless said.
    pub rounds: Option<usize>,
    /// Time of one cell, warm-up included; quick runs reckon it from the time that is left.
    pub cell: Option<Duration>,
    /// Size of each disk, rounded up to 32 MiB: 512 MiB quick, 4 GiB full.
    pub size_bytes: Option<u64>,
    /// Queue depths: 32 quick; 1, 2, 4 to 256 full.
    pub queue_depths: Option<Vec<u32>>,
    /// Lengths of the chain-length experiment, ascending: 1, 2, 4 to 64, 256 and 1,023 unless said.
    pub chain_lengths: Option<Vec<u32>>,
    /// Where to save the JSON; `diskwright-containers-<time>.json` in the current folder unless said.
    pub output: Option<PathBuf>,
    /// Leave the scratch folder.
    pub keep: bool,
    /// How to measure opening in a fresh process; without it, it is measured in this one and the memory is that of the whole
    /// program.
    pub launcher: Option<ChildLauncher>,
}

/// What the study found, and where it is saved.
#[derive(Debug, Clone)]
pub struct ContainersReport {
    /// The result.
    pub result: ContainersResult,
    /// Its file.
    pub saved_to: PathBuf,
}

/// The options with everything filled in.
#[derive(Debug, Clone)]
struct Settings {
    quick: bool,
    how: Preparation,
    size_given: bool,
    rounds: usize,
    depths: Vec<u32>,
    budget: Budget,
}

impl Settings {
    fn new(options: &ContainersOptions, start: Instant) -> Result<Self> {
        let bad = |what: &str, hint: &str| Err(LabError::BadOptions { what: what.into(), hint: hint.into() });
        let quick = options.quick;
        let rounds = options.rounds.unwrap_or(5);
        if rounds == 0 {
            return bad("0 rounds measure nothing", "use at least 1, better 3");
        }
        let depths =
            options.queue_depths.clone().unwrap_or(if quick { QUICK_DEPTHS.into() } else { FULL_DEPTHS.into() });
        if depths.is_empty() || depths.contains(&0) {
            return bad("a queue depth of 0 measures nothing", "use depths of at least 1");
        }
        let wanted_bytes = options.size_bytes.unwrap_or(if quick { QUICK_BYTES } else { FULL_BYTES });
        let Some(size_bytes) = wanted_bytes.max(1).checked_next_multiple_of(SIZE_STEP_BYTES) else {
            return bad("that size is beyond what any disk can have", "use a smaller --size");
        };
        let how = Preparation {
            size_bytes,
            seed: 0x6469_736b_7772_6967,
            cache: options.cache.unwrap_or(CacheMode::Direct),
            engine: options.engine,
        };
        let budget = match options.cell {
            Some(cell) => Budget::fixed(cell),
            None if quick => Budget::until(start, QUICK_TOTAL, QUICK_CELLS.0, QUICK_CELLS.1),
            None => Budget::fixed(FULL_CELL),
        };
        Ok(Self { quick, how, size_given: options.size_bytes.is_some(), rounds, depths, budget })
    }

    fn plan(&self) -> Plan {
        Plan {
            rounds: self.rounds,
            warm_up: Duration::ZERO,
            measured: Duration::ZERO,
            engine: self.how.engine,
            seed: self.how.seed,
        }
    }

    fn record(&self) -> ContainersRecord {
        ContainersRecord {
            quick: self.quick,
            size_bytes: self.how.size_bytes,
            block_bytes: 2 << 20,
            rounds: self.rounds,
            queue_depths: self.depths.clone(),
            cache: cache_word(self.how.cache).into(),
            engine: engine_word(self.how.engine).into(),
            seed: self.how.seed,
        }
    }
}

/// Runs the study and saves its result. The scratch folder is removed whatever happens, unless it is to be kept.
///
/// # Errors
/// Anything that would make the result untrue: a target that fails, reads back wrong bytes or is not populated; no space;
/// [`LabError::Stopped`].
pub fn run(options: &ContainersOptions, progress: &mut dyn Progress) -> Result<ContainersReport> {
    let start = Instant::now();
    let started_utc = crate::clock::compact_utc_now();
    let saved_to =
        options.output.clone().unwrap_or_else(|| PathBuf::from(format!("diskwright-containers-{started_utc}.json")));
    let mut settings = Settings::new(options, start)?;
    let machine = Machine::detect();
    let scratch = Scratch::new(options.dir.as_deref(), options.keep)?;
    let place = Place::detect(scratch.path());
    let mut warnings = warnings_before(&machine);

    let (targets, preparation) = prepare(&mut settings, &scratch, &mut warnings, progress)?;
    let creation = creation::measure(&scratch, creation::SIZE_BYTES, &mut warnings, progress)?;
    scratch.settle()?;
    let chain = ChainExperiment {
        scratch: &scratch,
        how: Preparation { size_bytes: settings.how.size_bytes.min(CHAIN_BYTES), ..settings.how },
        queue_depth: settings.depths[0].max(32),
        plan: settings.plan(),
        budget: settings.budget,
        launcher: options.launcher.as_ref(),
        lengths: options.chain_lengths.as_deref().unwrap_or(&LENGTHS),
    }
    .run(&mut warnings, progress)?;
    scratch.settle()?;
    let watch = OtherLoad::watch();
    let workloads = measure_all(&settings, &targets, progress)?;
    let (busy, stolen) = watch.since();
    for target in targets {
        target.close()?;
    }

    if busy > BUSY_CPUS {
        warnings.push(Warning::OtherLoad { cpus: busy });
    }
    if stolen > BUSY_CPUS / 5.0 {
        warnings.push(Warning::StolenTime { cpus: stolen });
    }
    warnings.extend(verdict::warnings(&workloads));
    let result = ContainersResult {
        schema: CONTAINERS_SCHEMA.into(),
        verdict: verdict::sentence(&workloads),
        started_utc,
        took_ns: start.elapsed().as_nanos() as u64,
        machine,
        place,
        versions: Versions::detect(),
        options: settings.record(),
        generator_ns_per_io: ceiling(settings.depths[0])?,
        preparation,
        creation,
        chain: Some(chain),
        workloads,
        warnings,
    };
    result::save(&saved_to, &result)?;
    Ok(ContainersReport { result, saved_to })
}

/// Doubts that can be had before anything is measured.
fn warnings_before(machine: &Machine) -> Vec<Warning> {
    let mut warnings = Vec::new();
    if cfg!(debug_assertions) {
        warnings.push(Warning::DebugBuild);
    }
    if matches!(machine.clock_source.as_str(), "hpet" | "acpi_pm" | "jiffies") {
        warnings.push(Warning::SlowClock { source: machine.clock_source.clone() });
    }
    warnings
}

/// Makes, fills, and proves every target. A quick run on a slow disk makes smaller ones.
fn prepare(
    settings: &mut Settings,
    scratch: &Scratch,
    warnings: &mut Vec<Warning>,
    progress: &mut dyn Progress,
) -> Result<(Vec<Target>, Vec<PreparedRecord>)> {
    let count = Container::ALL.len() as u64;
    let mut dir = scratch.folder("disks")?;
    let mut made: Vec<(Container, PathBuf, u64)> = Vec::new();
    let usual_bytes = settings.how.size_bytes;
    let mut next = 0;
    while next < Container::ALL.len() {
        let (container, size_bytes) = (Container::ALL[next], settings.how.size_bytes);
        // The disks, the base of the chain, and room for metadata and for the chain's many small files.
        scratch.need("the study", (count - next as u64) * size_bytes + size_bytes.min(CHAIN_BYTES) + (4 << 30))?;
        let total = count * size_bytes;
        let before = next as u64 * size_bytes;
        let start = Instant::now();
        let path = targets::make_filled(container, &dir, &settings.how, &mut |done| {
            report(progress, "prepare", before + done, total, container.name())
        })?;
        let took = start.elapsed();
        if next == 0 && settings.quick && !settings.size_given && took > QUICK_FILL && size_bytes > QUICK_MIN_BYTES {
            let share = QUICK_FILL.as_secs_f64() / took.as_secs_f64();
            let fitting = (size_bytes as f64 * share) as u64 / SIZE_STEP_BYTES * SIZE_STEP_BYTES;
            settings.how.size_bytes = fitting.max(QUICK_MIN_BYTES);
            warnings.push(Warning::SmallerDisks { size_bytes: settings.how.size_bytes, usual_bytes });
            std::fs::remove_dir_all(&dir).map_err(LabError::file("remove", &dir))?;
            dir = scratch.folder("smaller-disks")?;
            continue;
        }
        made.push((container, path, took.as_nanos() as u64));
        next += 1;
    }
    let (mut targets, mut records) = (Vec::new(), Vec::new());
    let size_bytes = settings.how.size_bytes;
    for (index, (container, path, fill_ns)) in made.into_iter().enumerate() {
        let before = index as u64 * size_bytes;
        let start = Instant::now();
        let target = targets::open_verified(container, path, &settings.how, &mut |done| {
            report(progress, "verify", before + done, count * size_bytes, container.name())
        })?;
        let metadata = std::fs::metadata(&target.path).map_err(LabError::file("examine", &target.path))?;
        records.push(PreparedRecord {
            container,
            target: container.name().into(),
            cache: cache_word(target.cache).into(),
            filled_bytes: size_bytes,
            fill_ns,
            verified_bytes: size_bytes,
            verify_ns: start.elapsed().as_nanos() as u64,
            populated: true,
            file_allocated_bytes: metadata.blocks() * 512,
        });
        targets.push(target);
    }
    let cached: Vec<String> =
        targets.iter().filter(|target| target.cache != settings.how.cache).map(|target| target.name().into()).collect();
    if !cached.is_empty() {
        warnings.push(Warning::DirectNotHonoured { targets: cached });
    }
    Ok((targets, records))
}

/// Every workload at every depth on all targets.
fn measure_all(settings: &Settings, targets: &[Target], progress: &mut dyn Progress) -> Result<Vec<ComparedWorkload>> {
    let named: Vec<Named<'_>> = targets.iter().map(|target| (target.name(), target.device())).collect();
    let workloads: Vec<Workload> = settings.depths.iter().flat_map(|depth| paper_monolithic(*depth)).collect();
    let per_workload = named.len() * settings.rounds;
    let total = workloads.len() * per_workload;
    let mut results = Vec::with_capacity(workloads.len());
    for (index, workload) in workloads.iter().enumerate() {
        let before = index * per_workload;
        let plan = settings.plan().with_cell(settings.budget.cell(Instant::now(), total - before));
        let result = measure::compare(&named, workload, &plan, &mut |cell, name| {
            let message = format!("{} at QD {}, {name}", workload.name, workload.queue_depth);
            report(progress, "measure", before as u64 + cell, total as u64, &message)
        })?;
        let paper_ratios = targets
            .iter()
            .map(|target| target.container.in_paper().and_then(|container| paper::ratio(workload, container)))
            .collect();
        results.push(ComparedWorkload { result, paper_ratios });
    }
    Ok(results)
}

/// What the generator costs for each request: its own time on a device that does nothing.
fn ceiling(queue_depth: u32) -> Result<f64> {
    let workload = Workload::new(Pattern::Random, Direction::Read, 4096, queue_depth);
    let until = Until::Elapsed { warm_up: Duration::from_millis(10), measured: Duration::from_millis(40) };
    let mut generator = Generator::for_workload(&workload, 0)?;
    let measured = generator.run("null:", &NullDevice::new(1 << 40), &workload, until, EngineKind::Auto, 0)?;
    Ok(1e9 / measured.iops().max(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Step;

    fn small(dir: &std::path::Path) -> ContainersOptions {
        ContainersOptions {
            quick: true,
            dir: Some(dir.to_owned()),
            cache: Some(CacheMode::PageCache),
            rounds: Some(1),
            cell: Some(Duration::from_millis(1)),
            size_bytes: Some(1),
            queue_depths: Some(vec![2]),
            chain_lengths: Some(vec![1, 3]),
            output: Some(dir.join("result.json")),
            ..ContainersOptions::default()
        }
    }

    #[test]
    fn options_that_measure_nothing_are_refused() {
        let bad = |change: fn(&mut ContainersOptions)| {
            let mut options = ContainersOptions::default();
            change(&mut options);
            assert!(matches!(Settings::new(&options, Instant::now()), Err(LabError::BadOptions { .. })));
        };
        bad(|options| options.rounds = Some(0));
        bad(|options| options.queue_depths = Some(vec![]));
        bad(|options| options.queue_depths = Some(vec![1, 0]));
        bad(|options| options.size_bytes = Some(u64::MAX));
    }

    #[test]
    fn a_small_study_runs_from_preparation_to_report() {
        let home = tempfile::tempdir().unwrap();
        let mut phases: Vec<String> = Vec::new();
        let mut watch = |step: Step<'_>| {
            if phases.last().is_none_or(|last| last != step.phase) {
                phases.push(step.phase.to_owned());
            }
            true
        };
        let report = run(&small(home.path()), &mut watch).unwrap();
        let result = &report.result;
        assert_eq!(result.workloads.len(), 16);
        assert!(result.workloads.iter().all(|workload| workload.result.cells.len() == 7));
        assert!(result.preparation.iter().all(|record| record.verified_bytes == 32 << 20 && record.populated));
        assert!(result.verdict.starts_with("Populated"), "{}", result.verdict);
        let saved: ContainersResult = serde_json::from_slice(&std::fs::read(&report.saved_to).unwrap()).unwrap();
        assert_eq!((saved.schema.as_str(), saved.workloads.len()), (CONTAINERS_SCHEMA, 16));
        let text = crate::study::render(result, false);
        assert!(text.starts_with(&result.verdict[..9]) && text.contains("4K random write"), "{text}");
        assert_eq!(phases.first().map(String::as_str), Some("prepare"));
        assert_eq!(phases.last().map(String::as_str), Some("measure"));
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 1, "only the result is left");
    }

    #[test]
    fn a_stopped_study_leaves_nothing() {
        let home = tempfile::tempdir().unwrap();
        let outcome = run(&small(home.path()), &mut |step: Step<'_>| step.phase != "verify");
        assert!(matches!(outcome, Err(LabError::Stopped)));
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    }
}
