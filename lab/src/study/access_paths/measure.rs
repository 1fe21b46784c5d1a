//! A window, and the rounds in which the ways take turns.
//!
//! Within a round the ways of one load are measured one after the other, in an order that changes;
//! a way is compared with the base of its own round. The server's CPU time is read before the first
//! and after the last request, and divided by all requests between, those of the warm-up among
//! them: the two readings cannot be put where the window opens and closes. What is not a whole
//! round is left out.

use super::{CLIENTS, LOADS, SERVER_CPU_NS, Way, record, ways::Disks};
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

/// How to measure.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub rounds: usize,
    /// With its warm-up.
    pub cell: Duration,
    pub engine: EngineKind,
    pub seed: u64,
    /// No round is begun that would not end before; the first always is.
    pub until: Option<Instant>,
}

/// What was measured.
#[derive(Debug)]
pub(super) struct Measured {
    /// For each load, for each way, the whole rounds.
    pub cells: Vec<Cell>,
    /// How far the rounds have come; one is whole at least.
    pub done: Done,
    /// Processors kept busy by other programs, on average over the windows that have no server.
    pub others_cpus: f64,
    /// Processors' worth of time given to other guests, on the same average.
    pub stolen_cpus: f64,
}

/// Measures every way at every load, round by round.
///
/// # Errors
/// Whatever fails; [`LabError::Stopped`] when it is stopped before a round is whole.
pub(super) fn measure(disks: &Disks, ways: &[Way], plan: &Plan, progress: &mut dyn Progress) -> Result<Measured> {
    let all: Vec<(&str, u32, Way)> = LOADS
        .into_iter()
        .flat_map(|(name, outstanding)| ways.iter().map(move |way| (name, outstanding, *way)))
        .collect();
    let mut cells: Vec<Cell> =
        all.iter().map(|(name, outstanding, way)| record::cell(name, *outstanding, *way)).collect();
    let (mut alone, mut others_cpus, mut stolen_cpus) = (0_u32, 0.0, 0.0);
    let title = |at: Window| {
        let (load, _, way) = all[at.cell];
        Some(format!("{}, {load} load, round {} of {}", way.name(), at.round + 1, plan.rounds))
    };
    let mut measure = |at: Window, watch: &dyn Watch| {
        let (load, outstanding, way) = all[at.cell];
        let job = rounds::job_of(&job(outstanding, plan), load, at.round, None);
        let (figures, server_cpu_ns, run) = window(disks, way, &job, watch)?;
        cells[at.cell].rounds.push(figures);
        cells[at.cell].push_more(SERVER_CPU_NS, server_cpu_ns);
        if matches!(way, Way::InProcess | Way::RawFile) {
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

fn job(outstanding: u32, plan: &Plan) -> Job {
    let load = Load {
        name: format!("OLTP, {CLIENTS} clients x {outstanding}"),
        block: Blocks::One(Bytes(8 << 10)),
        read_percent: 70.0,
        threads: CLIENTS,
        queue_depth: outstanding,
        ..Load::default()
    };
    // The child of a fresh way has nothing yet; a fifth of the cell is enough for most of its
    // blocks to come into being.
    let warm_up = (plan.cell / 5).min(Duration::from_secs(30));
    let mut job = Job::simple("access paths", load, warm_up.into(), plan.cell.saturating_sub(warm_up).into());
    job.interval = Span::from_millis(250).min(plan.cell.max(Duration::from_millis(10)).into());
    (job.seed, job.engine) = (plan.seed, plan.engine.into());
    job
}

/// The figures, CPU time of the server for each request in nanoseconds, and the run.
fn window(disks: &Disks, way: Way, job: &Job, watch: &dyn Watch) -> Result<(Figures, Option<f64>, Run)> {
    let open = disks.open(way)?;
    let cpu_ns = || open.server.as_ref().map(|server| server.cpu_ns()).transpose();
    let before_ns = cpu_ns()?;
    let run = run::run(job, slice::from_ref(&open.target), &RunOptions::default(), watch)?;
    let spent_ns = cpu_ns()?.zip(before_ns).map(|(after_ns, before_ns)| after_ns.saturating_sub(before_ns));
    open.close()?;
    match run.head.end {
        End::Complete => {}
        End::Stopped => return Err(LabError::Stopped),
        End::Failed { first, .. } => {
            return Err(LabError::BadOptions {
                what: format!("{}: {first}", way.name()),
                hint:
                    "check the disk below the scratch folder, and the log of the server, which `StudyOptions::keep` leaves there"
                        .into(),
            });
        }
    }
    let phase = &run.phases[0];
    let both = phase.total().both;
    if both.ios == 0 {
        return Err(LabError::BadOptions {
            what: format!("{}: no request was completed in {}", way.name(), numbers::duration(phase.window_ns as f64)),
            hint: "use longer cells (`StudyOptions::cell`)".into(),
        });
    }
    let made: u64 = phase.series.iter().map(|point| point.read_ios + point.write_ios).sum();
    let server_cpu_ns = spent_ns.map(|spent_ns| spent_ns as f64 / made.max(1) as f64);
    Ok((Figures::of(phase), server_cpu_ns, run))
}
