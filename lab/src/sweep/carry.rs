//! Carrying a sweep out: rounds interleaved over the cells, each measured window kept at once.
//!
//! The rounds are those of [`rounds::interleave`]. After each window the record is handed to
//! `keep`, which saves it; a sweep that begins with such a record goes on where it ended, in the
//! same order.

use super::{
    SWEEP_SCHEMA, SweepCell, SweepOptions, SweepRecord,
    conclude::{conclude, unfinished},
    doubts, plan,
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
    record::{End, Head, LatencyRecord, Run, TargetRecord},
    run::Watch,
    warning::Warning,
};
use std::{path::Path, time::Instant};

/// Measures a job on the first so many targets.
pub type Measure<'a> = dyn FnMut(&Job, usize, &dyn Watch) -> Result<Run> + 'a;
/// Saves the record as it is.
pub type Keep<'a> = dyn FnMut(&SweepRecord) -> Result<()> + 'a;

/// A sweep of which nothing is measured yet.
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

/// Reads a sweep that was saved.
///
/// # Errors
/// [`LabError::Read`] when the file cannot be used; [`LabError::BadOptions`] when it holds another
/// kind of result.
pub fn read(path: &Path) -> Result<SweepRecord> {
    match document::read_one(path)? {
        Document::Sweep(sweep) => Ok(*sweep),
        other => Err(LabError::BadOptions {
            what: format!("{} is {} and no sweep", path.display(), other.kind()),
            hint: "give the file of a sweep, or another file to begin one".into(),
        }),
    }
}

/// Takes `saved` up again for `options`: the same sweep, or the same with more rounds, another
/// limit, another array.
///
/// # Errors
/// [`LabError::BadOptions`] that names what is not the same.
pub fn resume(mut saved: SweepRecord, options: SweepOptions, targets: &[TargetRecord]) -> Result<SweepRecord> {
    let differs = |what: &str, was: String, is: String| {
        Err(LabError::BadOptions {
            what: format!("the saved sweep has {what} {was}, and this one {is}"),
            hint: "use the same options to go on with it, or another file to begin anew".into(),
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
        doubts::of_all(
            &mut saved.head.warnings,
            Warning::NotAlike { what: "machine".into(), first: machine(&saved.head.machine), second: machine(&here) },
        );
    }
    saved.options = options;
    Ok(saved)
}

/// Measures what `record` lacks; `phase` is what is shown meanwhile. Returns when all is measured,
/// when the user has stopped it, and when requests failed; the end in [`SweepRecord::head`] says
/// which. The record can be shown however it ends, with an error too.
///
/// # Errors
/// Whatever `measure` and `keep` return.
pub fn carry_out(
    record: &mut SweepRecord,
    phase: &str,
    measure: &mut Measure<'_>,
    keep: &mut Keep<'_>,
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
    keep: &mut Keep<'_>,
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
            doubts::of_cell(&mut record.head.warnings, name, warning);
        }
        match run.head.end {
            End::Complete => {}
            // Half a window, or one with failures, is no round.
            End::Stopped => return Err(LabError::Stopped),
            End::Failed { first, errors } => {
                record.head.end = End::Failed { first: format!("{name}: {first}"), errors };
                return Err(LabError::Stopped);
            }
        }
        if let Some(phase) = run.phases.first() {
            add_round(&mut record.cells[at.cell], Figures::of(phase), phase.total().both.latency());
        }
        // Concluding takes a moment, and everything that follows from the cells can be had later.
        record.head.verdict = unfinished(record);
        keep(record)
    };
    let done = rounds::interleave(&order, names.len(), &mut steps, &title, &mut window)?;
    if !done.stopped {
        record.head.end = End::Complete;
    }
    Ok(())
}

fn add_round(cell: &mut SweepCell, figures: Figures, latency: &LatencyRecord) {
    cell.measured.rounds.push(figures);
    cell.latency.add(latency);
}
