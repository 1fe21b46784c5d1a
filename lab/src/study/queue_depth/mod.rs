//! The study `queue-depth`: how much load is enough, by the whole procedure of the Storage Spaces
//! paper.
//!
//! ```text
//!   make          files of incompressible data: one of the size under test, the smaller ones of
//!                 pre-test 2                                                          (files.rs)
//!   pre-test 1    8 threads x 12, until the steady state is reached; unsteady figures are reported
//!   files         pre-test 2: the same data and the same load on 1, 2 and 4 files
//!   depths        test 1: 1 to 24 outstanding per thread ──▶ knee ──▶ a total depth
//!   combinations  test 2: threads x outstanding for that total
//!   reads, writes 512K sequential, one thread
//!   conclude      findings as in the paper's Table 5, figures per device, and the paper's
//!                                                                      (findings.rs, paper.rs)
//! ```
//!
//! Each stage is a sweep (`sweep/`), so its rounds take turns, its knee has an interval, and a
//! study that was broken off goes on where it ended when the same command is given the file that it
//! saved. A cell of the full form lasts as long as one of the paper's in all, five minutes of
//! warm-up and ten of measuring, but in five rounds that take turns: only so can chance be told
//! from truth.

mod files;
mod finding;
pub mod findings;
pub mod paper;
mod plan;
pub(crate) mod record;
mod settings;
mod stage;
#[cfg(test)]
pub(crate) mod tests;
pub(crate) mod told;

pub use finding::{Finding, Found, Peak, Rule};
pub use findings::Beside;
pub use record::{QueueDepthResult, SCHEMA, StageRecord};
pub use settings::{QueueDepthOptions, Settings};
pub use stage::Stage;

use crate::{
    LabError, Result,
    document::{self, Document},
    progress::Progress,
    scratch::Scratch,
    study::{Begun, StudyReport, budget::Budget},
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

/// When a quick study should be over: two minutes less what cleaning up may need.
const QUICK_TOTAL: Duration = Duration::from_secs(108);
const QUICK_CELLS: (Duration, Duration) = (Duration::from_millis(150), Duration::from_millis(1000));
/// The result is saved after a window, but not more often than this.
const SAVE_EVERY: Duration = Duration::from_secs(5);

/// Runs the study, or goes on with it, and saves its result after each stage. A stop keeps what was
/// measured, and so does a result that cannot be saved, which ends the study. The scratch folder is
/// removed in any case, unless `keep` is set.
///
/// # Errors
/// Options that cannot be; no space; targets that may not be written; a saved study that was asked
/// something else; [`LabError::Stopped`] when it was stopped before anything was measured.
pub fn run(options: &QueueDepthOptions, progress: &mut dyn Progress) -> Result<StudyReport<QueueDepthResult>> {
    let settings = Settings::new(options)?;
    let begun = options.study.begin("queue-depth", SCHEMA)?;
    let mut result = match options.study.output.as_deref().filter(|path| path.exists()) {
        Some(path) => go_on(path, settings)?,
        None => QueueDepthResult::begin(settings, begun.head.clone()),
    };
    let scratch = Scratch::new(options.study.dir.as_deref(), options.study.keep)?;
    let before_ns = result.head.took_ns;
    let mut study = Study { result: &mut result, begun: &begun, saved: Instant::now(), unsaved: None, before_ns };
    let outcome = study.carry_out(options, &scratch, progress);
    match outcome {
        // Something is there to keep.
        Err(LabError::Stopped) if study.result.pre_test.is_some() => study.result.head.end = End::Stopped,
        other => other?,
    }
    study.conclude();
    // A failure to save ends the study, and is reported even if there is space again.
    let saved = match study.unsaved.take() {
        Some(error) => Err(error),
        None => study.write().map(|()| begun.output.path().to_owned()),
    };
    let stopped = result.head.end == End::Stopped;
    Ok(StudyReport { result, saved, stopped })
}

/// Reads a study that was saved, to go on with it.
fn go_on(path: &Path, settings: Settings) -> Result<QueueDepthResult> {
    let mut saved = match document::read_one(path)? {
        Document::QueueDepth(saved) => *saved,
        other => {
            return Err(LabError::BadOptions {
                what: format!("{} is {} and no study of queue depth", path.display(), other.kind()),
                hint: "give another file (`StudyOptions::output`)".into(),
            });
        }
    };
    let same = Settings { max_p99: settings.max_p99, array: settings.array, ..saved.settings.clone() };
    if same != settings {
        return Err(LabError::BadOptions {
            what: format!("the study in {} was asked something else", path.display()),
            hint: "use the same options to go on with it, or another file (`StudyOptions::output`) to begin anew"
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

    /// The record of a stage, once it has begun.
    pub fn stage(&self, stage: Stage) -> Option<&StageRecord> {
        self.stages.iter().find(|record| record.stage == stage)
    }

    /// The sweep of a stage that has been measured to its end.
    fn complete(&self, stage: Stage) -> Option<&SweepRecord> {
        let all = |sweep: &&SweepRecord| {
            sweep.cells.iter().all(|cell| cell.measured.rounds.len() >= sweep.options.rounds as usize)
        };
        self.stage(stage).map(|record| &record.sweep).filter(all)
    }
}

/// A study under way.
struct Study<'a> {
    result: &'a mut QueueDepthResult,
    /// Of this sitting.
    begun: &'a Begun,
    /// When it was saved last.
    saved: Instant,
    /// Why it could not be saved. It ends then, for what cannot be kept need not be measured.
    unsaved: Option<LabError>,
    /// Time of earlier sittings.
    before_ns: u64,
}

impl Study<'_> {
    fn carry_out(&mut self, options: &QueueDepthOptions, scratch: &Scratch, progress: &mut dyn Progress) -> Result<()> {
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

    /// Whether the study goes on.
    fn pre_test(&mut self, settings: &Settings, made: &files::Made, progress: &mut dyn Progress) -> Result<bool> {
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
        // What ends here is saved at the end.
        if goes_on {
            self.save()?;
        }
        Ok(goes_on)
    }

    /// Measures what a stage lacks. Whether the study goes on.
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
                // What was begun goes on as it was begun; only the limit and the array, which
                // are used after measuring, may change.
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
        sweep::carry_out(&mut record, stage.name(), &mut measure, &mut keep, progress)?;
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

    /// Computes everything that follows from the stages.
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

    /// Keeps what there is, or ends the study.
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

/// Whether two warnings are the same. A warning about the machine is kept once for all stages; of
/// depths that were not reached, each load has its own.
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

/// Windows from `stage` to the end. Of the combinations, those that divide the total are not known
/// beforehand: all are counted.
fn windows_left(settings: &Settings, stage: Stage) -> usize {
    let stages = Stage::ALL.into_iter().skip_while(|other| *other != stage);
    let cells: usize = stages.map(|stage| plan::values(stage, settings.quick).len()).sum();
    cells * settings.rounds as usize
}
