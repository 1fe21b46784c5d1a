//! The study `queue-depth`: how many requests in flight a target needs, found by the procedure of
//! the Storage Spaces paper. It measures on this machine, or on several agents at the same time.
//!
//! ```text
//!   make          files of incompressible data: one of the size under test, the smaller ones of
//!                 pre-test 2                                                          (files.rs)
//!   or connect    to agents, which prepare one target each                           (agents.rs)
//!   pre-test 1    8 threads x 12, until the steady state is reached; unsteady figures are reported
//!   files         pre-test 2: the same data and the same load on 1, 2 and 4 files
//!   or agents     1, 2, 3, 4, 6 ... and all agents, each with 8 threads x 12
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
//!
//! **Agents.** The paper has one virtual machine. Agents are several of them on the same storage.
//! Threads and outstanding requests are those of each agent, so the requests in flight are agents x
//! threads x outstanding. A depth per device is that of an array below all agents. The stage
//! `files` is left out, because an agent has one target. The stage `agents` replaces it: it gives
//! each agent the same load, and finds from which number on one more agent adds nothing. One total
//! that the agents share was rejected: few totals can be divided by any number of agents, and the
//! share of each would shrink below the load that shows the limit of one client. The number that is
//! found changes nothing in later stages, which use all agents: fewer agents have other targets and
//! less data, so they are another test bed than the one that was named.
//!
//! A lost agent ends the study. What was measured is saved, and the same command resumes it.

mod agents;
mod bed;
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
pub use settings::{QueueDepthOptions, Settings, StudiedAgent};
pub use stage::Stage;

use crate::{
    LabError, Result,
    document::{self, Document},
    progress::Progress,
    study::{StartedStudy, StudyReport, budget::Budget},
    sweep::{self, SweepRecord},
};
use bed::Bed;
use diskwright_load::{
    Job,
    record::{End, Head, TargetRecord},
    run::Watch,
    warning::Warning,
};
use diskwright_stats::numbers::list;
use plan::StageInput;
use std::{
    path::Path,
    time::{Duration, Instant},
};

/// Time budget of a quick study: two minutes less the time for cleaning up.
const QUICK_TOTAL: Duration = Duration::from_secs(108);
const QUICK_CELLS: (Duration, Duration) = (Duration::from_millis(150), Duration::from_millis(1000));
/// Time that a window of a fleet needs besides its length: orders, the common start, records.
const FLEET_OVERHEAD: Duration = Duration::from_millis(400);
/// Shortest time between two saves while a stage is measured.
const SAVE_EVERY: Duration = Duration::from_secs(5);

/// Runs or resumes the study, and saves its result after each stage. If the result cannot be saved,
/// the study ends and returns what it has measured. A stopped study also keeps what it has
/// measured, and so does a study that has lost an agent. The scratch folder is removed in all
/// cases, unless `keep` is set.
///
/// # Errors
/// Bad options; no space; targets that must not be written; a saved study with other settings;
/// agents that cannot be reached or refuse; [`LabError::Stopped`] if the study was stopped before
/// the first measurement.
pub fn run(options: &QueueDepthOptions, progress: &mut dyn Progress) -> Result<StudyReport<QueueDepthResult>> {
    let settings = Settings::new(options)?;
    let begun = options.study.begin("queue-depth", SCHEMA)?;
    let result = match options.study.output.as_deref().filter(|path| path.exists()) {
        Some(path) => resume(path, settings)?,
        None => QueueDepthResult::begin(settings, begun.head.clone()),
    };
    let mut bed = open_bed(&result, options, progress)?;
    let report = run_on(bed.as_mut(), result, &begun, progress);
    bed.finish();
    report
}

/// Makes the files, or prepares the targets that were named, on this machine or on agents.
fn open_bed(
    result: &QueueDepthResult,
    options: &QueueDepthOptions,
    progress: &mut dyn Progress,
) -> Result<Box<dyn Bed>> {
    if let Some(of_fleet) = &options.agents {
        let before = result.pre_test.as_ref().and_then(|run| run.fleet.as_ref());
        return Ok(Box::new(agents::prepare(&result.settings, of_fleet, before, progress)?));
    }
    let files_known = result.complete(Stage::Files).map(findings::files);
    Ok(Box::new(files::make(&result.settings, options, files_known, progress)?))
}

/// Measures what `result` does not have yet.
fn run_on(
    bed: &mut dyn Bed,
    mut result: QueueDepthResult,
    begun: &StartedStudy,
    progress: &mut dyn Progress,
) -> Result<StudyReport<QueueDepthResult>> {
    let before_ns = result.head.took_ns;
    let mut study = Study { result: &mut result, begun, saved: Instant::now(), unsaved: None, before_ns };
    let outcome = study.measure(bed, progress);
    match outcome {
        // The pre-test is worth keeping.
        Err(LabError::Stopped) if study.result.pre_test.is_some() => study.result.head.end = End::Stopped,
        // An agent was lost between two windows.
        Err(error @ LabError::Fleet(_)) if study.result.pre_test.is_some() => {
            study.result.head.end = End::Failed { first: error.to_string(), errors: 1 };
        }
        other => other?,
    }
    study.conclude();
    // A failed save ends the study. It is reported even if a later save would succeed.
    let saved = match study.unsaved.take() {
        Some(error) => Err(error),
        None => study.write(bed).map(|()| begun.output.path().to_owned()),
    };
    let stopped = result.head.end == End::Stopped;
    Ok(StudyReport { result, saved, stopped, failed: None })
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
    if saved.settings.agents != settings.agents {
        return Err(LabError::BadOptions {
            what: format!(
                "the study saved in {} was measured by {}, and this one would be by {}",
                path.display(),
                measured_by(&saved.settings.agents),
                measured_by(&settings.agents)
            ),
            hint: "name the same agents to resume it, or another output file (`StudyOptions::output`)".into(),
        });
    }
    let same = Settings { max_p99: settings.max_p99, array: settings.array, ..saved.settings.clone() };
    if same != settings {
        return Err(LabError::BadOptions {
            what: format!("the study saved in {} has other settings", path.display()),
            hint: "give the same options to resume it, or another output file (`StudyOptions::output`) to start a new study"
                .into(),
        });
    }
    saved.settings = settings;
    // One that failed is measured again.
    saved.pre_test = saved.pre_test.filter(|run| run.head.end == End::Complete);
    Ok(saved)
}

/// The agents with the beginnings of their fingerprints.
fn measured_by(agents: &[StudiedAgent]) -> String {
    let named = |agent: &StudiedAgent| {
        let digits: String = agent.fingerprint.iter().flat_map(|digits| digits.chars().take(16)).collect();
        if digits.is_empty() { agent.name.clone() } else { format!("{} ({digits}...)", agent.name) }
    };
    match agents {
        [] => "this machine".into(),
        agents => list(&agents.iter().map(named).collect::<Vec<_>>()),
    }
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
    fn measure(&mut self, bed: &mut dyn Bed, progress: &mut dyn Progress) -> Result<()> {
        let settings = self.result.settings.clone();
        self.result.head.place = bed.place();
        self.result.targets = bed.records();
        self.result.head.warnings = bed.warnings();
        if self.result.pre_test.is_none() && !self.pre_test(&settings, bed, progress)? {
            return Ok(());
        }
        let budget = budget(&settings, self.begun.start);
        let mut input = StageInput {
            members: u32::try_from(bed.records().len()).unwrap_or(u32::MAX),
            volume_bytes: bed.volume_bytes(),
            depth: settings.target_depth.unwrap_or(0),
        };
        for stage in settings.stages() {
            if matches!(stage, Stage::Files | Stage::Agents) && input.members == 1 {
                continue;
            }
            let cell = budget.cell(Instant::now(), windows_left(&settings, stage));
            if !self.sweep(stage, &settings, input, cell, bed, progress)? {
                return Ok(());
            }
            let record = self.result.complete(stage);
            match (stage, record) {
                (Stage::Files, Some(sweep)) => {
                    input.members = findings::files(sweep);
                    bed.narrow(input.members as usize);
                }
                (Stage::Depths, Some(sweep)) if settings.target_depth.is_none() => {
                    input.depth = findings::target_depth(sweep, &settings);
                }
                _ => {}
            }
        }
        self.result.head.end = End::Complete;
        Ok(())
    }

    /// Measures pre-test 1 on one file or on all agents. Returns whether the study continues.
    fn pre_test(&mut self, settings: &Settings, bed: &dyn Bed, progress: &mut dyn Progress) -> Result<bool> {
        let job = plan::pre_test(settings, bed.volume_bytes())?;
        let message = format!("{} threads x {}, until the steady state", settings.threads, paper::PRE_TEST_DEPTH);
        crate::progress::report(progress, "pre-test", 0, 1, &message)?;
        let ended = bed.measure(&job, settings.clients() as usize, progress.watch())?;
        match &ended.head.end {
            End::Complete => {}
            End::Stopped => return Err(LabError::Stopped),
            End::Failed { .. } => self.result.head.end = ended.head.end.clone(),
        }
        let goes_on = ended.head.end == End::Complete;
        self.result.pre_test = Some(ended);
        // If the study ends here, `run` saves it.
        if goes_on {
            self.save(bed)?;
        }
        Ok(goes_on)
    }

    /// Measures the missing cells of a stage. Returns whether the study continues.
    fn sweep(
        &mut self,
        stage: Stage,
        settings: &Settings,
        input: StageInput,
        cell: Duration,
        bed: &dyn Bed,
        progress: &mut dyn Progress,
    ) -> Result<bool> {
        let all = bed.records();
        let records = |count: usize| all.iter().take(count).cloned().collect::<Vec<TargetRecord>>();
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
                let names: Vec<String> = all.iter().map(|target| target.name.clone()).collect();
                let options = plan::sweep(stage, settings, input, cell, &names)?;
                let records = records(options.targets.len());
                let record = sweep::begin(options, records, Vec::new())?;
                self.result.stages.push(StageRecord { stage, sweep: record.clone() });
                record
            }
        };
        let mut measure = |job: &Job, members: usize, watch: &dyn Watch| bed.measure(job, members, watch);
        let mut keep = |now: &SweepRecord| {
            if let Some(record) = self.result.stages.iter_mut().find(|record| record.stage == stage) {
                record.sweep = now.clone();
            }
            if self.saved.elapsed() >= SAVE_EVERY { self.save(bed) } else { Ok(()) }
        };
        sweep::run(&mut record, stage.name(), &mut measure, &mut keep, progress)?;
        match &record.head.end {
            End::Complete => {}
            End::Stopped => return Err(LabError::Stopped),
            End::Failed { .. } => self.result.head.end = record.head.end.clone(),
        }
        let goes_on = record.head.end == End::Complete;
        if goes_on {
            self.save(bed)?;
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
    fn save(&mut self, bed: &dyn Bed) -> Result<()> {
        self.write(bed).map_err(|error| {
            self.unsaved = Some(error);
            LabError::Stopped
        })
    }

    fn write(&mut self, bed: &dyn Bed) -> Result<()> {
        self.result.head.took_ns = self.before_ns.saturating_add(self.begun.took_ns());
        if self.result.head.verdict.is_empty() {
            self.result.head.verdict = findings::verdict(self.result);
        }
        self.begun.output.save(&*self.result)?;
        bed.kept();
        self.saved = Instant::now();
        Ok(())
    }
}

/// Whether two warnings repeat each other. A warning about the machine is kept once for all stages.
/// A warning about one load (`DepthNotReached`) is kept for each load, and a warning about an agent
/// for each agent.
fn is_same(a: &Warning, b: &Warning) -> bool {
    use Warning::{AgentLost, DepthNotReached, InCells, LeftOut, OfAgents, Straggler};
    if let (OfAgents { agents, warning }, OfAgents { agents: others, warning: other }) = (a, b) {
        return agents == others && is_same(warning, other);
    }
    let by_kind = |warning: &Warning| {
        !matches!(
            warning,
            DepthNotReached { .. }
                | LeftOut { .. }
                | InCells { .. }
                | OfAgents { .. }
                | Straggler { .. }
                | AgentLost { .. }
        )
    };
    a == b || by_kind(a) && std::mem::discriminant(a) == std::mem::discriminant(b)
}

fn budget(settings: &Settings, start: Instant) -> Budget {
    match settings.cell {
        Some(cell) => Budget::fixed(cell.into()),
        None => {
            let budget = Budget::until(start, QUICK_TOTAL, QUICK_CELLS.0, QUICK_CELLS.1);
            if settings.is_fleet() { budget.with_overhead(FLEET_OVERHEAD) } else { budget }
        }
    }
}

/// Windows from `stage` to the end. Counts all combinations: which of them divide the total depth
/// is known only after test 1.
fn windows_left(settings: &Settings, stage: Stage) -> usize {
    let stages = settings.stages().into_iter().skip_while(|other| *other != stage);
    let cells: usize = stages.map(|stage| plan::values(stage, settings).len()).sum();
    cells * settings.rounds as usize
}
