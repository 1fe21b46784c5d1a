//! The study `queue-depth`: how many requests in flight a target needs, found by the procedure of
//! the Storage Spaces paper.
//!
//! ```text
//!   make          files of incompressible data: one of the size under test, the smaller ones of
//!                 pre-test 2                                                          (files.rs)
//!   pre-test 1    8 threads x 12, until the steady state is reached; unsteady figures are reported
//!   files         pre-test 2: the same data and the same load on 1, 2 and 4 files
//!   depths        test 1: 1 to 24 outstanding per thread ──▶ knee ──▶ a total queue depth
//!   combinations  test 2: threads x outstanding for that total
//!   reads, writes 512K sequential, one thread
//!   conclude      findings as in the paper's Table 5, figures per device, and the paper's own
//!                                                                      (findings.rs, paper.rs)
//! ```
//!
//! Each stage is a sweep (`sweep/`): its cells are measured in interleaved rounds, and its knee has
//! a 95 % confidence interval. The result is saved after each stage and every few seconds. If the
//! output file is an unfinished study with the same settings, the study resumes.
//!
//! In the full study a cell takes fifteen minutes, as in the paper: a third is warm-up. Here these
//! fifteen minutes are five interleaved rounds of three minutes, because a confidence interval
//! needs several rounds.

mod files;
mod finding;
pub mod findings;
pub(crate) mod method;
pub mod paper;
mod plan;
pub(crate) mod record;
mod settings;
mod stage;
#[cfg(test)]
pub(crate) mod tests;

pub use finding::{Finding, OperatingPoint, Peak, Rule};
pub use findings::BesidePaper;
pub use record::{QueueDepthResult, SCHEMA, StageRecord};
pub use settings::{QueueDepthOptions, Settings};
pub use stage::Stage;

use crate::{
    LabError, Result,
    document::{self, Document},
    progress::Progress,
    scratch::Scratch,
    study::{StartedStudy, StudyReport, budget::Budget},
    sweep::{self, SweepRecord},
};
use diskwright_load::{
    OpenTarget,
    machine::Place,
    record::{End, Head},
    run::{self, RunOptions, Watch},
    warning::Warning,
};
use plan::TestBed;
use std::{
    path::Path,
    time::{Duration, Instant},
};

/// Time budget of a quick study: two minutes less the time for cleaning up.
const QUICK_TOTAL: Duration = Duration::from_secs(108);
const QUICK_CELLS: (Duration, Duration) = (Duration::from_millis(150), Duration::from_millis(1000));
/// Shortest time between two saves while a stage is measured.
const SAVE_EVERY: Duration = Duration::from_secs(5);

/// Runs or resumes the study, and saves its result after each stage. If the result cannot be saved,
/// the study ends and returns what it has measured. A stopped study also keeps what it has
/// measured. The scratch folder is removed in all cases, unless `keep` is set.
///
/// # Errors
/// Bad options; no space; targets that must not be written; a saved study with other settings;
/// [`LabError::Stopped`] if the study was stopped before the first measurement.
pub fn run(options: &QueueDepthOptions, progress: &mut dyn Progress) -> Result<StudyReport<QueueDepthResult>> {
    let settings = Settings::new(options)?;
    let begun = options.study.begin("queue-depth", SCHEMA)?;
    let mut result = match options.study.output.as_deref().filter(|path| path.exists()) {
        Some(path) => resume(path, settings)?,
        None => QueueDepthResult::begin(settings, begun.head.clone()),
    };
    let scratch = Scratch::new(options.study.dir.as_deref(), options.study.keep)?;
    let before_ns = result.head.took_ns;
    let mut study = Study { result: &mut result, begun: &begun, saved: Instant::now(), unsaved: None, before_ns };
    let outcome = study.measure(options, &scratch, progress);
    match outcome {
        // The pre-test is worth keeping.
        Err(LabError::Stopped) if study.result.pre_test.is_some() => study.result.head.end = End::Stopped,
        other => other?,
    }
    study.conclude();
    // A failed save ends the study. It is reported even if a later save would succeed.
    let saved = match study.unsaved.take() {
        Some(error) => Err(error),
        None => study.write().map(|()| begun.output.path().to_owned()),
    };
    let stopped = result.head.end == End::Stopped;
    Ok(StudyReport { result, saved, stopped })
}

/// Reads the saved study in `path` so that it resumes with `settings`.
fn resume(path: &Path, settings: Settings) -> Result<QueueDepthResult> {
    let mut saved = match document::read_one(path)? {
        Document::QueueDepth(saved) => *saved,
        other => {
            return Err(LabError::BadOptions {
                what: format!("{} is {}, not a queue-depth study", path.display(), other.kind()),
                hint: "name another output file (`StudyOptions::output`)".into(),
            });
        }
    };
    let same = Settings { max_p99: settings.max_p99, array: settings.array, ..saved.settings.clone() };
    if same != settings {
        return Err(LabError::BadOptions {
            what: format!("the study saved in {} has other settings", path.display()),
            hint: "give the same options to resume it, or another output file (`StudyOptions::output`) to start a new study"
                .into(),
        });
    }
    saved.settings = settings;
    Ok(saved)
}

impl QueueDepthResult {
    fn begin(settings: Settings, head: Head) -> Self {
        Self { head, settings, targets: Vec::new(), pre_test: None, stages: Vec::new(), findings: Vec::new() }
    }

    /// The record of a stage; `None` before the stage has begun.
    pub fn stage(&self, stage: Stage) -> Option<&StageRecord> {
        self.stages.iter().find(|record| record.stage == stage)
    }

    /// The sweep of a stage; `None` before all its rounds are measured.
    fn complete(&self, stage: Stage) -> Option<&SweepRecord> {
        let all = |sweep: &&SweepRecord| {
            sweep.cells.iter().all(|cell| cell.measured.rounds.len() >= sweep.options.rounds as usize)
        };
        self.stage(stage).map(|record| &record.sweep).filter(all)
    }
}

/// A running study.
struct Study<'a> {
    result: &'a mut QueueDepthResult,
    /// Start and output of this run of the program.
    begun: &'a StartedStudy,
    /// Time of the last save.
    saved: Instant,
    /// The error of a failed save. The study ends then: measuring on would lose the results.
    unsaved: Option<LabError>,
    /// Time that earlier runs of the program took.
    before_ns: u64,
}

impl Study<'_> {
    fn measure(&mut self, options: &QueueDepthOptions, scratch: &Scratch, progress: &mut dyn Progress) -> Result<()> {
        let settings = self.result.settings.clone();
        let files_known = self.result.complete(Stage::Files).map(findings::files);
        let mut made = files::make(&settings, options, files_known, scratch, progress)?;
        self.result.head.place = settings.targets.is_empty().then(|| Place::detect(scratch.path()));
        self.result.targets = made.targets.iter().map(OpenTarget::record).collect();
        self.result.head.warnings = made.warnings.clone();
        scratch.settle()?;
        if self.result.pre_test.is_none() && !self.pre_test(&settings, &made, progress)? {
            return Ok(());
        }
        let budget = budget(&settings, self.begun.start);
        let mut test_bed = TestBed {
            files: u32::try_from(made.targets.len()).unwrap_or(u32::MAX),
            volume_bytes: made.volume_bytes,
            depth: settings.target_depth.unwrap_or(0),
        };
        for stage in Stage::ALL {
            if stage == Stage::Files && test_bed.files == 1 {
                continue;
            }
            let cell = budget.cell(Instant::now(), windows_left(&settings, stage));
            if !self.sweep(stage, &settings, test_bed, cell, &made.targets, progress)? {
                return Ok(());
            }
            let record = self.result.complete(stage);
            match (stage, record) {
                (Stage::Files, Some(sweep)) => {
                    test_bed.files = findings::files(sweep);
                    made.keep(test_bed.files as usize);
                }
                (Stage::Depths, Some(sweep)) if settings.target_depth.is_none() => {
                    test_bed.depth = findings::target_depth(sweep, settings.threads);
                }
                _ => {}
            }
        }
        self.result.head.end = End::Complete;
        Ok(())
    }

    /// Measures pre-test 1. Returns whether the study continues.
    fn pre_test(
        &mut self,
        settings: &Settings,
        made: &files::PreparedTargets,
        progress: &mut dyn Progress,
    ) -> Result<bool> {
        let job = plan::pre_test(settings, made.volume_bytes)?;
        crate::progress::report(progress, "pre-test", 0, 1, "8 threads x 12, until the steady state")?;
        let ended = run::run(&job, &made.targets[..1], &RunOptions::default(), progress.watch())?;
        match &ended.head.end {
            End::Complete => {}
            End::Stopped => return Err(LabError::Stopped),
            End::Failed { .. } => self.result.head.end = ended.head.end.clone(),
        }
        let goes_on = ended.head.end == End::Complete;
        self.result.pre_test = Some(ended);
        // If the study ends here, `run` saves it.
        if goes_on {
            self.save()?;
        }
        Ok(goes_on)
    }

    /// Measures the missing cells of a stage. Returns whether the study continues.
    fn sweep(
        &mut self,
        stage: Stage,
        settings: &Settings,
        test_bed: TestBed,
        cell: Duration,
        targets: &[OpenTarget],
        progress: &mut dyn Progress,
    ) -> Result<bool> {
        let names: Vec<String> = targets.iter().map(|target| target.name.clone()).collect();
        let records = |count: usize| targets.iter().take(count).map(OpenTarget::record).collect::<Vec<_>>();
        let mut record = match self.result.stage(stage) {
            Some(StageRecord { sweep: saved, .. }) => {
                // A resumed sweep keeps its saved options. Only the p99 limit and the array may
                // change: they are used after measuring.
                let mut options = saved.options.clone();
                (options.max_p99, options.array) = (settings.max_p99, settings.array);
                let records = records(options.targets.len());
                sweep::resume(saved.clone(), options, &records)?
            }
            None => {
                let options = plan::sweep(stage, settings, test_bed, cell, &names)?;
                let records = records(options.targets.len());
                let record = sweep::begin(options, records, Vec::new())?;
                self.result.stages.push(StageRecord { stage, sweep: record.clone() });
                record
            }
        };
        let mut measure = |job: &_, files: usize, watch: &dyn Watch| {
            Ok(run::run(job, &targets[..files], &RunOptions::default(), watch)?)
        };
        let mut keep = |now: &SweepRecord| {
            if let Some(record) = self.result.stages.iter_mut().find(|record| record.stage == stage) {
                record.sweep = now.clone();
            }
            if self.saved.elapsed() >= SAVE_EVERY { self.save() } else { Ok(()) }
        };
        sweep::run(&mut record, stage.name(), &mut measure, &mut keep, progress)?;
        match &record.head.end {
            End::Complete => {}
            End::Stopped => return Err(LabError::Stopped),
            End::Failed { .. } => self.result.head.end = record.head.end.clone(),
        }
        let goes_on = record.head.end == End::Complete;
        if goes_on {
            self.save()?;
        }
        Ok(goes_on)
    }

    /// Computes findings, warnings and verdict from the stages.
    fn conclude(&mut self) {
        let result = &mut *self.result;
        result.findings = findings::findings(&result.stages, result.settings.array);
        let of_runs = result.pre_test.iter().flat_map(|run| &run.head.warnings);
        let of_stage = |record: &StageRecord| {
            let named = |warning: &Warning| warning.clone().in_cells_of(record.stage.name());
            record.sweep.head.warnings.iter().map(named).collect::<Vec<_>>()
        };
        let found: Vec<Warning> = of_runs.cloned().chain(result.stages.iter().flat_map(of_stage)).collect();
        // Warnings of cells are computed again from the stages.
        let warnings = &mut result.head.warnings;
        warnings.retain(|warning| !matches!(warning, Warning::InCells { .. }));
        for warning in found {
            if !warnings.iter().any(|known| is_same(known, &warning)) {
                warnings.push(warning);
            }
        }
        Warning::sort(warnings);
        result.head.verdict = findings::verdict(result);
    }

    /// Saves the result. A failed save ends the study.
    fn save(&mut self) -> Result<()> {
        self.write().map_err(|error| {
            self.unsaved = Some(error);
            LabError::Stopped
        })
    }

    fn write(&mut self) -> Result<()> {
        self.result.head.took_ns = self.before_ns.saturating_add(self.begun.took_ns());
        if self.result.head.verdict.is_empty() {
            self.result.head.verdict = findings::verdict(self.result);
        }
        self.begun.output.save(&*self.result)?;
        self.saved = Instant::now();
        Ok(())
    }
}

/// Whether two warnings repeat each other. A warning about the machine is kept once for all stages.
/// A warning about one load (`DepthNotReached`) is kept for each load.
fn is_same(a: &Warning, b: &Warning) -> bool {
    use Warning::{DepthNotReached, InCells, LeftOut};
    let by_kind = |warning: &Warning| !matches!(warning, DepthNotReached { .. } | LeftOut { .. } | InCells { .. });
    a == b || by_kind(a) && std::mem::discriminant(a) == std::mem::discriminant(b)
}

fn budget(settings: &Settings, start: Instant) -> Budget {
    match settings.cell {
        Some(cell) => Budget::fixed(cell.into()),
        None => Budget::until(start, QUICK_TOTAL, QUICK_CELLS.0, QUICK_CELLS.1),
    }
}

/// Windows from `stage` to the end. Counts all combinations: which of them divide the total depth
/// is known only after test 1.
fn windows_left(settings: &Settings, stage: Stage) -> usize {
    let stages = Stage::ALL.into_iter().skip_while(|other| *other != stage);
    let cells: usize = stages.map(|stage| plan::values(stage, settings.quick).len()).sum();
    cells * settings.rounds as usize
}
