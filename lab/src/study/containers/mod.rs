//! The study `containers`: the cost of a virtual disk compared to a raw file.
//!
//! ```text
//!   prepare   create, fill with incompressible data, flush, close: each of the seven containers
//!   verify    open, read everything back, compare, check extents; a difference ends the study
//!   create    creation time of each type at 40 GiB
//!   chain     lengths 1 to 64 as in the paper, then up to 1,023
//!   expanding writes into empty disks against writes into full ones
//!   blocks    full disks with blocks of 512 KiB, 1 MiB and 32 MiB against 2 MiB
//!   measure   workload x depth: in each round every container is measured once, in changing order
//!   conclude  verdict, tables, warnings, JSON
//! ```
//!
//! With `quick` the main measurement comes last and gets the time that is left, so that the study
//! ends within two minutes. It takes longer only if the storage is so slow that preparing takes two
//! minutes. Reads and writes use the same disks: all their blocks are allocated before and after.

mod block_sizes;
mod chains;
pub(crate) mod creation;
pub(crate) mod expanding;
mod prepare;
pub(crate) mod record;
mod settings;
pub(crate) mod verdict;

pub use record::{
    BlockSizeRecord, ChainLength, ChainRecord, ContainersRecord, ContainersResult, CreationRecord, PreparedRecord,
    SCHEMA,
};
pub use settings::{ContainersOptions, disk_bytes};

use crate::{
    LabError, Result,
    cells::Cell,
    measure,
    open::{self, OpenHow},
    progress::Progress,
    rounds::Steps,
    scratch::Scratch,
    study::{StudyReport, warnings},
    targets::{Preparation, Target},
};
use block_sizes::OtherBlocks;
use chains::{ChainExperiment, LENGTHS};
use diskwright_image::DiskType;
use diskwright_load::{
    OpenTarget,
    job::{Job, Span},
    machine::{OtherLoad, Place},
    record::Head,
    run::{RunOptions, Unwatched},
    warning::Warning,
    workload::{Direction, Pattern, Workload},
};
use expanding::{Expanding, Subject};
use settings::{CHAIN_BYTES, Settings};
use std::time::{Duration, Instant};

/// Longest cell of the block-size experiment if the study has a time budget.
const SIDE_CELL: Duration = Duration::from_millis(120);

/// Runs the study and saves its result. The scratch folder is removed in all cases, unless `keep`
/// is set.
///
/// # Errors
/// A target that fails, reads back wrong bytes or is not fully allocated; no space;
/// [`LabError::Stopped`].
pub fn run(options: &ContainersOptions, progress: &mut dyn Progress) -> Result<StudyReport<ContainersResult>> {
    let begun = options.study.begin("containers", SCHEMA)?;
    let mut settings = Settings::new(options, begun.start)?;
    let scratch = Scratch::new(options.study.dir.as_deref(), options.study.keep)?;
    let place = Place::detect(scratch.path());
    let mut warnings = warnings::of_machine(&begun.head.machine);

    let (targets, preparation) = prepare::prepare(&mut settings, &scratch, &mut warnings, progress)?;
    let watch = OtherLoad::watch();
    let mut found = Measured::default();
    let outcome = measure_all(&settings, options, &scratch, &targets, &mut found, &mut warnings, progress);
    let stopped = match outcome {
        Ok(()) => false,
        // Without a cell there is no result: creation times alone are not saved.
        Err(LabError::Stopped) if !found.cells.is_empty() => true,
        Err(error) => return Err(error),
    };
    warnings.extend(warnings::since(&watch));
    for target in targets {
        target.close()?;
    }
    let Measured { creation, chain, block_sizes, cells } = found;
    warnings.extend(verdict::warnings(&cells));
    let generator_ns_per_io = ceiling(settings.depths[0])?;
    let head = begun.end(verdict::verdict(stopped, &cells), stopped);
    let result = ContainersResult {
        head: Head { place: Some(place), warnings, ..head },
        options: settings.record(),
        generator_ns_per_io,
        preparation,
        creation,
        chain,
        block_sizes,
        cells,
        left_out: settings.left_out(),
    };
    Ok(StudyReport::save(result, &begun.output, stopped))
}

/// What the experiments have measured so far.
#[derive(Debug, Default)]
struct Measured {
    creation: Vec<CreationRecord>,
    chain: Option<ChainRecord>,
    block_sizes: Vec<BlockSizeRecord>,
    cells: Vec<Cell>,
}

/// Runs the experiments in turn. On an error `found` keeps the finished ones.
fn measure_all(
    settings: &Settings,
    options: &ContainersOptions,
    scratch: &Scratch,
    targets: &[Target],
    found: &mut Measured,
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
    chain.run((&mut found.chain, &mut found.cells), warnings, progress)?;
    scratch.settle()?;
    measure_expanding(settings, scratch, targets, &mut found.cells, progress)?;
    for target in targets {
        let sizes = block_sizes::sizes_of(target.container, settings.quick);
        if !sizes.is_empty() {
            let others = OtherBlocks::prepare(scratch, target.container, sizes, &settings.how, progress)?;
            scratch.settle()?;
            let workloads = block_sizes::workloads(settings.depth_of_side_experiments(), settings.quick);
            let time = (settings.plan(), settings.budget.at_most(SIDE_CELL));
            let places = (&mut found.block_sizes, &mut found.cells);
            block_sizes::measure(target, &others, &workloads, time, places, progress)?;
            others.remove()?;
            scratch.settle()?;
        }
    }
    measure_workloads(settings, targets, &mut found.cells, progress)
}

/// Runs the experiment `expanding` on the disks that grow.
fn measure_expanding(
    settings: &Settings,
    scratch: &Scratch,
    targets: &[Target],
    cells: &mut Vec<Cell>,
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
    subjects.iter().try_for_each(|subject| experiment.measure(subject, cells, &mut steps))
}

fn measure_workloads(
    settings: &Settings,
    targets: &[Target],
    cells: &mut Vec<Cell>,
    progress: &mut dyn Progress,
) -> Result<()> {
    let open: Vec<OpenTarget> = targets.iter().map(Target::to_measure).collect();
    let workloads = settings.workloads();
    let mut steps = Steps::new(progress, "measure", workloads.len() * open.len() * settings.rounds);
    for workload in &workloads {
        let left = (steps.total - steps.done) as usize;
        let plan = settings.plan().with_cell(settings.budget.cell(Instant::now(), left));
        measure::compare(record::CONTAINERS, &open, workload, &plan, &mut steps, cells)?;
    }
    Ok(())
}

/// Time that the load generator itself takes per request, measured on `null:`, nanoseconds.
fn ceiling(queue_depth: u32) -> Result<f64> {
    let workload = Workload::new(Pattern::Random, Direction::Read, 4096, queue_depth);
    let job = Job::simple("ceiling", workload.load(), Span::from_millis(10), Span::from_millis(40));
    let target = open::open("null:", &OpenHow::default())?;
    Ok(1e9 / measure::window(&job, &target, &RunOptions::default(), &Unwatched)?.iops().max(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cells::Compared, progress::Step, study::StudyOptions};
    use diskwright_load::record::End;
    use diskwright_store::CacheMode;

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
        let workloads = Compared::of_part(&result.cells, record::CONTAINERS);
        assert_eq!(workloads.len(), 16 + 3);
        assert!(workloads.iter().all(|workload| workload.cells.len() == 7));
        assert_eq!((expanding::Pair::all(&result.cells).len(), result.block_sizes.len()), (4, 1));
        assert_eq!(result.block_sizes[0].block_bytes, [2 << 20, 512 << 10]);
        assert_eq!(result.block_sizes[0].compared(&result.cells).len(), 4);
        assert!(result.left_out.iter().any(|what| what.contains("queue depths")), "{:?}", result.left_out);
        assert!(result.preparation.iter().all(|record| record.verified_bytes == 32 << 20 && record.populated));
        assert!(result.head.verdict.starts_with("Populated"), "{}", result.head.verdict);
        let saved: ContainersResult =
            serde_json::from_slice(&std::fs::read(report.saved.as_ref().unwrap()).unwrap()).unwrap();
        assert_eq!((saved.head.schema.as_str(), saved.cells.len()), (SCHEMA, result.cells.len()));
        assert_eq!(result.options.asked_bytes, Some(1), "rounded up, and the result says so");
        assert_eq!(phases.first().map(String::as_str), Some("prepare"));
        assert_eq!(phases.last().map(String::as_str), Some("measure"));
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 1, "only the result is left");
    }

    #[test]
    fn a_study_that_is_stopped_while_it_measures_keeps_what_it_has() {
        let home = tempfile::tempdir().unwrap();
        let report = run(&small(home.path()), &mut |step: Step<'_>| step.phase != "measure" || step.done < 15).unwrap();
        assert!(report.stopped && report.result.head.end == End::Stopped);
        let workloads = Compared::of_part(&report.result.cells, record::CONTAINERS);
        assert_eq!(workloads.len(), 2, "the third has no whole round");
        assert!(report.result.chain.is_some());
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
