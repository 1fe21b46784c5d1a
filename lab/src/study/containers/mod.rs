//! The study `containers`: what a virtual disk costs against a raw file.
//!
//! ```text
//!   prepare   create, fill with incompressible data, flush, close        each of the seven containers
//!   verify    open again, read everything back, compare, check extents   all equal, all data, or the study ends
//!   create    creation time of each type at 40 GiB
//!   chain     lengths 1 to 64 as in the paper, on to 1,023
//!   expanding writes into empty disks against writes into full ones
//!   blocks    full disks with blocks of 512 KiB, 1 MiB and 32 MiB against 2 MiB
//!   measure   workload x depth: rounds in which every container is measured once, in changing order
//!   conclude  verdict, tables, warnings, JSON
//! ```
//!
//! With `quick` the measuring gets what is left of the time, so it comes last; the run ends within
//! two minutes unless the disk is so slow that preparing alone takes as long. Writes go to the same
//! disks as reads: every byte of them is allocated, and stays so.

mod block_sizes;
mod chains;
pub(crate) mod creation;
mod expanding;
mod prepare;
mod settings;
mod verdict;

use crate::{
    LabError, Result,
    child::ChildLauncher,
    measure::{self, Steps},
    open::{self, OpenHow},
    paper,
    progress::Progress,
    result::{
        BlockSizeRecord, CONTAINERS_SCHEMA, ChainRecord, ComparedWorkload, ContainersResult, CreationRecord,
        ExpandingRecord,
    },
    scratch::Scratch,
    study::{StudyOptions, StudyReport},
    targets::{Preparation, Target},
};
use block_sizes::OtherBlocks;
use chains::{ChainExperiment, LENGTHS};
use diskwright_image::DiskType;
use diskwright_load::{
    OpenTarget,
    job::{Job, Span},
    machine::{Machine, OtherLoad, Place, Versions},
    run::{RunOptions, Unwatched},
    warning::Warning,
    workload::{Direction, Pattern, Workload},
};
use diskwright_store::CacheMode;
use expanding::{Expanding, Subject};
use settings::Settings;
pub use settings::disk_bytes;
use std::time::{Duration, Instant};

/// The base of the chain; quick runs use a disk no larger than the other ones.
const CHAIN_BYTES: u64 = 1 << 30;
/// Longest cell of the experiments beside the main one, where the whole run must end in time.
const SIDE_CELL: Duration = Duration::from_millis(120);
/// Processors busy with something else above which a warning is given.
const BUSY_CPUS: f64 = 0.25;

/// What to do. [`ContainersOptions::default`] is the full study; `quick` the one of two minutes.
#[derive(Debug, Clone, Default)]
pub struct ContainersOptions {
    /// Rounds: 5 unless said. Time of one cell: 2 s unless said; quick runs reckon it from the time
    /// that is left.
    pub study: StudyOptions,
    /// Page cache or O_DIRECT; O_DIRECT unless said.
    pub cache: Option<CacheMode>,
    /// Size of each disk, rounded up to 32 MiB: 512 MiB quick, 4 GiB full.
    pub size_bytes: Option<u64>,
    /// Size of the disks whose creation is timed: 40 GiB unless said.
    pub creation_bytes: Option<u64>,
    /// Queue depths: 32 quick; 1, 2, 4 to 256 full.
    pub queue_depths: Option<Vec<u32>>,
    /// Lengths of the chain-length experiment, ascending: 1, 2, 4 to 64, 256 and 1,023 unless said.
    pub chain_lengths: Option<Vec<u32>>,
    /// How to measure opening in a fresh process; without it, it is measured in this one and the
    /// memory is that of the whole program.
    pub launcher: Option<ChildLauncher>,
}

/// Runs the study and saves its result. The scratch folder is removed whatever happens, unless it
/// is to be kept.
///
/// # Errors
/// Anything that would make the result untrue: a target that fails, reads back wrong bytes or is
/// not populated; no space; [`LabError::Stopped`].
pub fn run(options: &ContainersOptions, progress: &mut dyn Progress) -> Result<StudyReport<ContainersResult>> {
    let start = Instant::now();
    let started_utc = diskwright_load::clock::compact_utc_now();
    let mut settings = Settings::new(options, start)?;
    let output = options.study.place("containers", &started_utc)?;
    let machine = Machine::detect();
    let scratch = Scratch::new(options.study.dir.as_deref(), options.study.keep)?;
    let place = Place::detect(scratch.path());
    let mut warnings = warnings_before(&machine);

    let (targets, preparation) = prepare::prepare(&mut settings, &scratch, &mut warnings, progress)?;
    let watch = OtherLoad::watch();
    let mut found = Found::default();
    let outcome = measure_all(&settings, options, &scratch, &targets, &mut found, &mut warnings, progress);
    let stopped = match outcome {
        Ok(()) => false,
        Err(LabError::Stopped) if found.is_worth_telling() => true,
        Err(error) => return Err(error),
    };
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
    let Found { creation, chain, expanding, block_sizes, workloads } = found;
    warnings.extend(verdict::warnings(&workloads));
    let result = ContainersResult {
        schema: CONTAINERS_SCHEMA.into(),
        verdict: verdict::whole(stopped, &workloads, &expanding),
        started_utc,
        took_ns: start.elapsed().as_nanos() as u64,
        machine,
        place,
        versions: Versions::detect(),
        options: settings.record(),
        generator_ns_per_io: ceiling(settings.depths[0])?,
        preparation,
        creation,
        chain,
        workloads,
        expanding,
        block_sizes,
        left_out: settings.left_out(),
        warnings,
        partial: stopped,
    };
    Ok(StudyReport::save(result, &output, stopped))
}

/// What has been measured so far.
#[derive(Debug, Default)]
struct Found {
    creation: Vec<CreationRecord>,
    chain: Option<ChainRecord>,
    expanding: Vec<ExpandingRecord>,
    block_sizes: Vec<BlockSizeRecord>,
    workloads: Vec<ComparedWorkload>,
}

impl Found {
    /// Creation times alone are nothing that anybody waited for.
    fn is_worth_telling(&self) -> bool {
        self.chain.is_some() || !self.expanding.is_empty() || !self.workloads.is_empty()
    }
}

/// One experiment after the other; what is finished is in `found`, however this ends.
fn measure_all(
    settings: &Settings,
    options: &ContainersOptions,
    scratch: &Scratch,
    targets: &[Target],
    found: &mut Found,
    warnings: &mut Vec<Warning>,
    progress: &mut dyn Progress,
) -> Result<()> {
    found.creation =
        creation::measure(scratch, options.creation_bytes.unwrap_or(creation::SIZE_BYTES), warnings, progress)?;
    scratch.settle()?;
    let chain = ChainExperiment {
        scratch,
        how: Preparation { size_bytes: settings.how.size_bytes.min(CHAIN_BYTES), ..settings.how },
        queue_depth: settings.depth_of_side_experiments(),
        plan: settings.plan(),
        budget: settings.budget,
        launcher: options.launcher.as_ref(),
        lengths: options.chain_lengths.as_deref().unwrap_or(&LENGTHS),
    };
    found.chain = Some(chain.run(warnings, progress)?);
    scratch.settle()?;
    measure_expanding(settings, scratch, targets, &mut found.expanding, progress)?;
    for target in targets {
        let sizes = block_sizes::sizes_of(target.container, settings.quick);
        if !sizes.is_empty() {
            let others = OtherBlocks::prepare(scratch, target.container, sizes, &settings.how, progress)?;
            scratch.settle()?;
            let workloads = block_sizes::workloads(settings.depth_of_side_experiments(), settings.quick);
            let time = (settings.plan(), settings.budget.at_most(SIDE_CELL));
            block_sizes::measure(target, &others, &workloads, time, &mut found.block_sizes, progress)?;
            others.remove()?;
            scratch.settle()?;
        }
    }
    measure_workloads(settings, targets, &mut found.workloads, progress)
}

/// Writes into empty disks against writes into these.
fn measure_expanding(
    settings: &Settings,
    scratch: &Scratch,
    targets: &[Target],
    results: &mut Vec<ExpandingRecord>,
    progress: &mut dyn Progress,
) -> Result<()> {
    let grows = |target: &&Target| match target.container.disk_type() {
        DiskType::Fixed => false,
        DiskType::Dynamic => true,
        DiskType::Differencing => !settings.quick,
    };
    let subjects: Vec<Subject<'_>> =
        targets.iter().filter(grows).map(|full| Subject { full, block_bytes: block_sizes::USUAL_BYTES }).collect();
    let experiment = Expanding {
        scratch,
        how: settings.how,
        rounds: settings.expanding_rounds(),
        queue_depth: settings.depth_of_side_experiments(),
        streamed_bytes: settings.streamed_bytes(),
    };
    let total = experiment.cells(subjects.len());
    let mut steps = Steps { progress, phase: "expanding", done: 0, total };
    subjects.iter().try_for_each(|subject| experiment.measure(subject, results, &mut steps))
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

/// Every workload at every depth on all targets.
fn measure_workloads(
    settings: &Settings,
    targets: &[Target],
    results: &mut Vec<ComparedWorkload>,
    progress: &mut dyn Progress,
) -> Result<()> {
    let open: Vec<OpenTarget> = targets.iter().map(Target::to_measure).collect();
    let workloads = settings.workloads();
    let per_workload = open.len() * settings.rounds;
    let total = workloads.len() * per_workload;
    for (index, workload) in workloads.iter().enumerate() {
        let before = index * per_workload;
        let plan = settings.plan().with_cell(settings.budget.cell(Instant::now(), total - before));
        let mut steps = Steps { progress: &mut *progress, phase: "measure", done: before as u64, total: total as u64 };
        let result = measure::compare(&open, workload, &plan, &mut steps)?;
        let paper_ratios = targets
            .iter()
            .map(|target| target.container.in_paper().and_then(|container| paper::ratio(workload, container)))
            .collect();
        results.push(ComparedWorkload { result, paper_ratios });
    }
    Ok(())
}

/// What the generator costs for each request: its own time on a device that does nothing.
fn ceiling(queue_depth: u32) -> Result<f64> {
    let workload = Workload::new(Pattern::Random, Direction::Read, 4096, queue_depth);
    let job = Job::simple("ceiling", workload.load(), Span::from_millis(10), Span::from_millis(40));
    let target = open::open("null:", &OpenHow::default())?;
    Ok(1e9 / measure::window(&job, &target, &RunOptions::default(), &Unwatched)?.iops().max(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Step;

    fn small(dir: &std::path::Path) -> ContainersOptions {
        ContainersOptions {
            study: StudyOptions {
                quick: true,
                dir: Some(dir.to_owned()),
                rounds: Some(1),
                cell: Some(Duration::from_millis(1)),
                output: Some(dir.join("result.json")),
                ..StudyOptions::default()
            },
            cache: Some(CacheMode::PageCache),
            size_bytes: Some(1),
            // Tests run side by side, where there may be no room for several of the usual size.
            creation_bytes: Some(1 << 30),
            queue_depths: Some(vec![2]),
            chain_lengths: Some(vec![1, 3]),
            launcher: None,
        }
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
        assert_eq!(result.workloads.len(), 16 + 3);
        assert_eq!((result.expanding.len(), result.block_sizes.len()), (4, 1));
        assert_eq!(result.block_sizes[0].block_bytes, [2 << 20, 512 << 10]);
        assert!(
            result.block_sizes[0].workloads.len() == 4
                && result.block_sizes[0].paper_ratios.iter().all(Option::is_some)
        );
        assert!(result.left_out.iter().any(|what| what.contains("queue depths")), "{:?}", result.left_out);
        assert!(result.workloads.iter().all(|workload| workload.result.cells.len() == 7));
        assert!(result.preparation.iter().all(|record| record.verified_bytes == 32 << 20 && record.populated));
        assert!(result.verdict.starts_with("Populated"), "{}", result.verdict);
        let saved: ContainersResult =
            serde_json::from_slice(&std::fs::read(report.saved.as_ref().unwrap()).unwrap()).unwrap();
        assert_eq!((saved.schema.as_str(), saved.workloads.len()), (CONTAINERS_SCHEMA, 19));
        assert_eq!(result.options.asked_bytes, Some(1), "rounded up, and the result says so");
        assert_eq!(phases.first().map(String::as_str), Some("prepare"));
        assert_eq!(phases.last().map(String::as_str), Some("measure"));
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 1, "only the result is left");
    }

    #[test]
    fn a_study_that_is_stopped_while_it_measures_keeps_what_it_has() {
        let home = tempfile::tempdir().unwrap();
        let report = run(&small(home.path()), &mut |step: Step<'_>| step.phase != "measure" || step.done < 15).unwrap();
        assert!(report.stopped && report.result.partial);
        assert_eq!(report.result.workloads.len(), 2, "the third was not finished");
        assert!(report.result.chain.is_some());
        // Before the first workload was finished there is no length of its cells to tell.
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
