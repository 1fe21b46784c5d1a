//! Carrying a sweep out: rounds interleaved over the cells, each measured window kept at once.
//!
//! In every round each cell is measured once, in an order that changes ([`summary::round_order`]),
//! so that a drift of the machine falls on all loads alike. After each window the record is handed
//! to `keep`, which saves it; whoever begins with such a record goes on where it ended, in the same
//! order.

use super::{
    SWEEP_SCHEMA, SweepCell, SweepOptions, SweepRecord,
    conclude::{conclude, unfinished},
    doubts, plan,
};
use crate::{
    LabError, Result,
    document::{self, Document},
    progress::{Progress, report},
};
use diskwright_load::{
    clock,
    figures::Figures,
    job::Job,
    machine::{Machine, Versions},
    record::{End, Run, TargetRecord},
    seeds,
    warning::Warning,
};
use diskwright_stats::summary;
use std::{path::Path, time::Instant};

/// Measures a job on the first so many targets.
pub type Measure<'a> = dyn FnMut(&Job, usize) -> Result<Run> + 'a;
/// Saves the record as it is.
pub type Keep<'a> = dyn FnMut(&SweepRecord) -> Result<()> + 'a;

/// A sweep of which nothing is measured yet.
///
/// # Errors
/// As [`plan::cells`].
pub fn begin(options: SweepOptions, targets: Vec<TargetRecord>, labels: Vec<(String, String)>) -> Result<SweepRecord> {
    let cells = plan::cells(&options)?;
    let mut record = SweepRecord {
        schema: SWEEP_SCHEMA.into(),
        verdict: String::new(),
        started_utc: clock::compact_utc_now(),
        took_ns: 0,
        machine: Machine::detect(),
        versions: Versions::detect(),
        targets,
        options,
        cells,
        knees: Vec::new(),
        best: None,
        warnings: Vec::new(),
        end: End::Stopped,
        labels,
    };
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
            hint: "use the same options to go on with it, or another file (--output) to begin anew".into(),
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
    if saved.cells.iter().any(|cell| cell.rounds.len() > options.rounds as usize) {
        return differs("more rounds", was.rounds.to_string(), options.rounds.to_string());
    }
    let here = Machine::detect();
    if (&saved.machine.cpu_model, &saved.machine.kernel) != (&here.cpu_model, &here.kernel) {
        let machine = |machine: &Machine| format!("{}, {}", machine.cpu_model, machine.kernel);
        doubts::of_all(
            &mut saved.warnings,
            Warning::NotAlike { what: "machine".into(), first: machine(&saved.machine), second: machine(&here) },
        );
    }
    saved.options = options;
    Ok(saved)
}

/// Measures what `record` lacks. Returns when all is measured, when a run was stopped, and when
/// requests failed; [`SweepRecord::end`] says which. The record can be shown however it ends, with
/// an error too.
///
/// # Errors
/// Whatever `measure` and `keep` return.
pub fn carry_out(
    record: &mut SweepRecord,
    measure: &mut Measure<'_>,
    keep: &mut Keep<'_>,
    progress: &mut dyn Progress,
) -> Result<()> {
    let measured = measure_all(record, measure, keep, progress);
    conclude(record);
    measured?;
    keep(record)
}

fn measure_all(
    record: &mut SweepRecord,
    measure: &mut Measure<'_>,
    keep: &mut Keep<'_>,
    progress: &mut dyn Progress,
) -> Result<()> {
    let rounds = record.options.rounds as usize;
    let all = (record.cells.len() * rounds) as u64;
    record.end = End::Stopped;
    for round in 0..rounds {
        for index in summary::round_order(record.cells.len(), round, record.options.job.seed) {
            if record.cells[index].rounds.len() > round {
                continue;
            }
            let mut job = plan::job(&record.options, &record.cells[index], round);
            let sizes = record.targets.iter().map(|target| target.size_bytes);
            seeds::begin_streams(&mut job, sizes.min().unwrap_or(0));
            let done: usize = record.cells.iter().map(|cell| cell.rounds.len()).sum();
            let message = format!("round {} of {rounds}, {}", round + 1, plan::title(&record.cells[index].point));
            match report(progress, "sweep", done as u64, all, &message) {
                Err(LabError::Stopped) => return Ok(()),
                other => other?,
            }
            let began = Instant::now();
            let run = measure(&job, record.cells[index].files as usize)?;
            record.took_ns = record.took_ns.saturating_add(began.elapsed().as_nanos() as u64);
            let cell = plan::title(&record.cells[index].point);
            for warning in run.warnings {
                doubts::of_cell(&mut record.warnings, &cell, warning);
            }
            match run.end {
                End::Complete => {}
                // Half a window, or one with failures, is no round.
                End::Stopped => return Ok(()),
                End::Failed { first, errors } => {
                    let first = format!("{}: {first}", plan::title(&record.cells[index].point));
                    record.end = End::Failed { first, errors };
                    return Ok(());
                }
            }
            let Some(phase) = run.phases.first() else { continue };
            add_round(&mut record.cells[index], Figures::of(phase), phase.total().both.latency());
            // Concluding takes a moment, and everything that follows from the cells can be had
            // later.
            record.verdict = unfinished(record);
            keep(record)?;
        }
    }
    record.end = End::Complete;
    Ok(())
}

fn add_round(cell: &mut SweepCell, figures: Figures, latency: &diskwright_load::record::LatencyRecord) {
    cell.rounds.push(figures);
    cell.latency.add(latency);
}
