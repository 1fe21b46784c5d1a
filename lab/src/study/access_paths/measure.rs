//! Measures the access paths in interleaved rounds.
//!
//! Within a round the access paths of one load are measured one after the other, in an order that
//! changes from round to round. An access path is compared with the base of its own round. The
//! server's CPU time is read before the first and after the last request, because it cannot be read
//! when the window opens and closes. It is divided by all requests in between, warm-up included.
//! Incomplete rounds are left out.

use super::{AccessPath, CLIENTS, LOADS, SERVER_CPU_NS, record, setup::Disks};
use crate::{
    LabError, Result,
    cells::Cell,
    progress::Progress,
    rounds::{self, Done, Rounds, Steps, Window},
};
use diskwright_load::{
    figures::Figures,
    job::{Blocks, Bytes, Job, Load, Span},
    record::{End, Run},
    run::{self, RunOptions, Watch},
    warning::Warning,
};
use diskwright_stats::numbers;
use diskwright_store::EngineKind;
use std::{
    slice,
    time::{Duration, Instant},
};

/// What to do when a server on this host fails.
const HINT: &str =
    "check the storage of the scratch folder, and the server's log, which `StudyOptions::keep` keeps there";

#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub rounds: usize,
    /// Length of a cell, warm-up included.
    pub cell: Duration,
    pub engine: EngineKind,
    pub seed: u64,
    /// No round begins that would end later. The first round always begins.
    pub until: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct Measured {
    /// For each load and access path, the whole rounds.
    pub cells: Vec<Cell>,
    /// The number of whole rounds, at least 1, and whether the user stopped the study.
    pub done: Done,
    /// CPUs that other programs kept busy, averaged over the windows without a server.
    pub others_cpus: f64,
    /// CPUs' worth of time that the hypervisor gave to other guests, averaged over the same
    /// windows.
    pub stolen_cpus: f64,
}

/// Measures every access path at every load in interleaved rounds.
///
/// # Errors
/// Any failure; [`LabError::Stopped`] if the study is stopped before the first whole round.
pub(super) fn measure(
    disks: &Disks,
    ways: &[AccessPath],
    plan: &Plan,
    progress: &mut dyn Progress,
) -> Result<Measured> {
    let all: Vec<(&str, u32, AccessPath)> = LOADS
        .into_iter()
        .flat_map(|(name, outstanding)| ways.iter().map(move |way| (name, outstanding, *way)))
        .collect();
    let mut cells: Vec<Cell> =
        all.iter().map(|(name, outstanding, way)| record::cell(name, (CLIENTS, *outstanding), *way)).collect();
    let (mut alone, mut others_cpus, mut stolen_cpus) = (0_u32, 0.0, 0.0);
    let title = |at: Window| {
        let (load, _, way) = all[at.cell];
        Some(format!("{}, {load} load, round {} of {}", way.name(), at.round + 1, plan.rounds))
    };
    let mut measure = |at: Window, watch: &dyn Watch| {
        let (load, outstanding, way) = all[at.cell];
        let job = rounds::job_of(&job(CLIENTS, outstanding, plan), load, at.round, None);
        let (figures, server_cpu_ns, run) = window(disks, way, &job, watch)?;
        cells[at.cell].rounds.push(figures);
        cells[at.cell].push_more(SERVER_CPU_NS, server_cpu_ns);
        if matches!(way, AccessPath::InProcess | AccessPath::RawFile) {
            alone += 1;
            for warning in &run.head.warnings {
                match warning {
                    Warning::OtherLoad { cpus } => others_cpus += cpus,
                    Warning::StolenTime { cpus } => stolen_cpus += cpus,
                    _ => {}
                }
            }
        }
        Ok(())
    };
    let rounds = Rounds { together: Some(ways.len()), until: plan.until, ..Rounds::new(plan.rounds, plan.seed) };
    let mut steps = Steps::new(progress, "measure", plan.rounds * all.len());
    let done = rounds::interleave(&rounds, all.len(), &mut steps, &title, &mut measure)?;
    if done.whole == 0 {
        return Err(LabError::Stopped);
    }
    cells.iter_mut().for_each(|cell| cell.truncate(done.whole));
    let windows = f64::from(alone.max(1));
    Ok(Measured { cells, done, others_cpus: others_cpus / windows, stolen_cpus: stolen_cpus / windows })
}

/// The load of clients with this many outstanding requests each.
pub(super) fn job(clients: u32, outstanding: u32, plan: &Plan) -> Job {
    let load = Load {
        name: format!("OLTP, {clients} clients x {outstanding}"),
        block: Blocks::One(Bytes(8 << 10)),
        read_percent: 70.0,
        threads: clients,
        queue_depth: outstanding,
        ..Load::default()
    };
    // The ephemeral child is empty at first. A fifth of the cell allocates most of its blocks.
    let warm_up = (plan.cell / 5).min(Duration::from_secs(30));
    let mut job = Job::simple("access paths", load, warm_up.into(), plan.cell.saturating_sub(warm_up).into());
    job.interval = Span::from_millis(250).min(plan.cell.max(Duration::from_millis(10)).into());
    (job.seed, job.engine) = (plan.seed, plan.engine.into());
    job
}

/// Measures one window. Returns its figures, the server's CPU time per request in nanoseconds, and
/// the run.
fn window(disks: &Disks, way: AccessPath, job: &Job, watch: &dyn Watch) -> Result<(Figures, Option<f64>, Run)> {
    let open = disks.open(way)?;
    let cpu_ns = || open.server.as_ref().map(|server| server.cpu_ns()).transpose();
    let before_ns = cpu_ns()?;
    let run = run::run(job, slice::from_ref(&open.target), &RunOptions::default(), watch)?;
    let spent_ns = cpu_ns()?.zip(before_ns).map(|(after_ns, before_ns)| after_ns.saturating_sub(before_ns));
    open.close()?;
    let (figures, made) = figures_of(&run, way, HINT)?;
    Ok((figures, spent_ns.map(|spent_ns| spent_ns as f64 / made as f64), run))
}

/// The figures of a run of one phase, and the number of its requests, warm-up included, at least 1.
/// `hint` is for a run that failed.
///
/// # Errors
/// [`LabError::Stopped`]; the run failed, or completed no request.
pub(super) fn figures_of(run: &Run, way: AccessPath, hint: &str) -> Result<(Figures, u64)> {
    match &run.head.end {
        End::Complete => {}
        End::Stopped => return Err(LabError::Stopped),
        End::Failed { first, .. } => {
            return Err(LabError::BadOptions { what: format!("{}: {first}", way.name()), hint: hint.into() });
        }
    }
    let phase = &run.phases[0];
    if phase.total().both.ios == 0 {
        return Err(LabError::BadOptions {
            what: format!("{}: no request was completed in {}", way.name(), numbers::duration(phase.window_ns as f64)),
            hint: "use longer cells (`StudyOptions::cell`)".into(),
        });
    }
    let made: u64 = phase.series.iter().map(|point| point.read_ios + point.write_ios).sum();
    Ok((Figures::of(phase), made.max(1)))
}
