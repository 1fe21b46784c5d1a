//! Runs a sweep: measures its cells in interleaved rounds and saves the record after each window.
//!
//! The loop is [`rounds::interleave`]. After each window the record is passed to `keep`, which
//! saves it. A sweep that begins with a saved record measures what is missing, in the same order.

use super::{
    AMPLIFICATION, SWEEP_SCHEMA, SweepCell, SweepOptions, SweepRecord,
    conclude::{conclude, unfinished},
    plan, warnings,
};
use crate::{
    LabError, Result,
    document::{self, Document},
    progress::Progress,
    rounds::{self, Rounds, Steps, Window},
};
use diskwright_load::{
    figures::Figures,
    job::Job,
    machine::Machine,
    record::{End, Head, PhaseRecord, Run, TargetRecord},
    run::Watch,
    warning::Warning,
};
use std::{path::Path, time::Instant};

/// Measures a job on the given number of targets, from the first.
pub type Measure<'a> = dyn FnMut(&Job, usize, &dyn Watch) -> Result<Run> + 'a;
/// Saves the record.
pub type SaveRecord<'a> = dyn FnMut(&SweepRecord) -> Result<()> + 'a;

/// A sweep without a measured round.
///
/// # Errors
/// As [`plan::cells`].
pub fn begin(options: SweepOptions, targets: Vec<TargetRecord>, labels: Vec<(String, String)>) -> Result<SweepRecord> {
    let cells = plan::cells(&options)?;
    let mut record =
        SweepRecord { head: Head::begin(SWEEP_SCHEMA), targets, options, cells, knees: Vec::new(), best: None, labels };
    conclude(&mut record);
    Ok(record)
}

/// Reads a saved sweep.
///
/// # Errors
/// [`LabError::Read`] if the file cannot be used; [`LabError::BadOptions`] if it holds another kind
/// of result.
pub fn read(path: &Path) -> Result<SweepRecord> {
    match document::read_one(path)? {
        Document::Sweep(sweep) => Ok(*sweep),
        other => Err(LabError::BadOptions {
            what: format!("{} is {}, not a sweep", path.display(), other.kind()),
            hint: "name the file of a sweep, or another file to begin a new one".into(),
        }),
    }
}

/// Resumes `saved` with `options`: the same options, or with more rounds, another p99 limit or
/// another array.
///
/// # Errors
/// [`LabError::BadOptions`] that names the first difference.
pub fn resume(mut saved: SweepRecord, options: SweepOptions, targets: &[TargetRecord]) -> Result<SweepRecord> {
    let differs = |what: &str, was: String, is: String| {
        Err(LabError::BadOptions {
            what: format!("the saved sweep has {what} {was}, this one has {is}"),
            hint: "give the same options to resume it, or another file to begin a new sweep".into(),
        })
    };
    let axes = |options: &SweepOptions| options.axes.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ");
    let depth = |options: &SweepOptions| options.total_depth.map_or_else(|| "open".into(), |depth| depth.to_string());
    let was = &saved.options;
    if was.targets != options.targets {
        return differs("the targets", was.targets.join(" "), options.targets.join(" "));
    }
    if was.axes != options.axes {
        return differs("the axes", axes(was), axes(&options));
    }
    if was.total_depth != options.total_depth {
        return differs("the total depth", depth(was), depth(&options));
    }
    if was.job != options.job {
        let (was, is) = (was.job.to_toml(), options.job.to_toml());
        let (was, is) = was.lines().zip(is.lines()).find(|(was, is)| was != is).unwrap_or(("one workload", "another"));
        return differs("the workload", format!("with {was}"), format!("with {is}"));
    }
    for (was, is) in saved.targets.iter().zip(targets) {
        if (was.size_bytes, was.cache) != (is.size_bytes, is.cache) {
            let shown = |target: &TargetRecord| format!("of {} bytes, {:?}", target.size_bytes, target.cache);
            return differs(&format!("the target {}", is.name), shown(was), shown(is));
        }
    }
    if saved.cells.iter().any(|cell| cell.measured.rounds.len() > options.rounds as usize) {
        return differs("more rounds", was.rounds.to_string(), options.rounds.to_string());
    }
    let here = Machine::detect();
    if (&saved.head.machine.cpu_model, &saved.head.machine.kernel) != (&here.cpu_model, &here.kernel) {
        let machine = |machine: &Machine| format!("{}, {}", machine.cpu_model, machine.kernel);
        warnings::of_all(
            &mut saved.head.warnings,
            Warning::NotAlike { what: "machine".into(), first: machine(&saved.head.machine), second: machine(&here) },
        );
    }
    warnings::forget_losses(&mut saved.head.warnings);
    saved.options = options;
    Ok(saved)
}

/// Measures the missing windows of `record`; progress shows them as `phase`. Returns when all are
/// measured, when the user stops it, or when requests fail: [`Head::end`] says which. Conclusions
/// are computed in all cases, also before an error is returned.
///
/// # Errors
/// Any error of `measure` and `keep`.
pub fn run(
    record: &mut SweepRecord,
    phase: &str,
    measure: &mut Measure<'_>,
    keep: &mut SaveRecord<'_>,
    progress: &mut dyn Progress,
) -> Result<()> {
    let measured = measure_all(record, phase, measure, keep, progress);
    conclude(record);
    measured?;
    keep(record)
}

fn measure_all(
    record: &mut SweepRecord,
    phase: &str,
    measure: &mut Measure<'_>,
    keep: &mut SaveRecord<'_>,
    progress: &mut dyn Progress,
) -> Result<()> {
    let rounds = record.options.rounds as usize;
    let names: Vec<String> = record.cells.iter().map(|cell| cell.measured.load.clone()).collect();
    let had: Vec<usize> = record.cells.iter().map(|cell| cell.measured.rounds.len()).collect();
    let smallest_bytes = record.targets.iter().map(|target| target.size_bytes).min().unwrap_or(0);
    record.head.end = End::Stopped;
    let title = |at: Window| {
        let is_new = had[at.cell] <= at.round;
        is_new.then(|| format!("round {} of {rounds}, {}", at.round + 1, names[at.cell]))
    };
    let order = Rounds::new(rounds, record.options.job.seed);
    let done = had.iter().sum::<usize>() as u64;
    let mut steps = Steps { done, ..Steps::new(progress, phase, names.len() * rounds) };
    let mut window = |at: Window, watch: &dyn Watch| {
        let (cell, name) = (&record.cells[at.cell], &names[at.cell]);
        let job = rounds::job_of(&plan::job(&record.options, cell), name, at.round, Some(smallest_bytes));
        let began = Instant::now();
        let run = measure(&job, cell.files as usize, watch)?;
        record.head.took_ns = record.head.took_ns.saturating_add(began.elapsed().as_nanos() as u64);
        for warning in run.head.warnings {
            warnings::of_cell(&mut record.head.warnings, name, warning);
        }
        match run.head.end {
            End::Complete => {}
            // An interrupted window, or one with failed requests, is not counted as a round.
            End::Stopped => return Err(LabError::Stopped),
            End::Failed { first, errors } => {
                record.head.end = End::Failed { first: format!("{name}: {first}"), errors };
                return Err(LabError::Stopped);
            }
        }
        if let Some(phase) = run.phases.first() {
            add_round(&mut record.cells[at.cell], phase);
        }
        // The rest of the conclusions takes longer to compute, and can be computed later from the
        // cells.
        record.head.verdict = unfinished(record);
        keep(record)
    };
    let done = rounds::interleave(&order, names.len(), &mut steps, &title, &mut window)?;
    if !done.stopped {
        record.head.end = End::Complete;
    }
    Ok(())
}

fn add_round(cell: &mut SweepCell, phase: &PhaseRecord) {
    cell.measured.rounds.push(Figures::of(phase));
    if let Some(amplification) = phase.amplification() {
        cell.measured.push_more(AMPLIFICATION, Some(amplification));
    }
    cell.latency.add(phase.total().both.latency());
}
