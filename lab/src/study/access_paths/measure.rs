//! A cell, and the rounds in which the ways take turns.
//!
//! Within a round every load finds every way once, in an order that changes; a way is compared with
//! the base of its own round. The server's CPU time is read before the first and after the last
//! request, and divided by all requests between, those of the warm-up among them: the two readings
//! cannot be put where the window opens and closes. What is not a whole round is left out.

use super::{CLIENTS, CellRecord, LOADS, LoadRecord, RoundRecord, Way, ways::Disks};
use crate::{
    LabError, Result,
    measure::Ratio,
    progress::{Progress, report as tell},
};
use diskwright_load::{
    figures::Figures,
    job::{Blocks, Bytes, Job, Load, Span},
    record::{End, Run},
    run::{self, RunOptions, Watch},
    seeds,
    warning::Warning,
};
use diskwright_stats::{
    numbers,
    summary::{self, Summary},
};
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
#[derive(Debug, Default)]
pub(super) struct Cells {
    /// For each load, for each way, each round.
    pub rounds: Vec<Vec<Vec<RoundRecord>>>,
    /// Rounds that are whole.
    pub whole: usize,
    /// Somebody wanted it to end.
    pub stopped: bool,
    /// Processors kept busy by other programs, on average over the cells that have no server.
    pub others_cpus: f64,
    /// Processors' worth given to other guests, so.
    pub stolen_cpus: f64,
}

/// Measures every way at every load, round by round.
///
/// # Errors
/// Whatever fails; [`LabError::Stopped`] when it is stopped before a round is whole.
pub(super) fn measure(disks: &Disks, ways: &[Way], plan: &Plan, progress: &mut dyn Progress) -> Result<Cells> {
    let total = (plan.rounds * LOADS.len() * ways.len()) as u64;
    let mut cells = Cells { rounds: vec![vec![Vec::new(); ways.len()]; LOADS.len()], ..Cells::default() };
    let (mut done, mut alone) = (0, 0_u32);
    for round in 0..plan.rounds {
        let begun = Instant::now();
        for (number, (name, outstanding)) in LOADS.into_iter().enumerate() {
            for index in summary::round_order(ways.len(), round, plan.seed ^ ((number as u64) << 32)) {
                let way = ways[index];
                let message = format!("{}, {name} load, round {} of {}", way.name(), round + 1, plan.rounds);
                let mut job = job(outstanding, plan);
                job.seed = seeds::of_window(plan.seed, name, round);
                let outcome = tell(progress, "measure", done, total, &message)
                    .and_then(|()| cell(disks, way, &job, progress.watch()));
                let (record, run) = match outcome {
                    Err(LabError::Stopped) if round > 0 => {
                        cells.stopped = true;
                        return Ok(cells.cut(round, alone));
                    }
                    outcome => outcome?,
                };
                cells.rounds[number][index].push(record);
                if matches!(way, Way::InProcess | Way::RawFile) {
                    alone += 1;
                    cells.note(&run.warnings);
                }
                done += 1;
            }
        }
        if plan.until.is_some_and(|until| Instant::now() + begun.elapsed() > until) {
            return Ok(cells.cut(round + 1, alone));
        }
    }
    Ok(cells.cut(plan.rounds, alone))
}

impl Cells {
    fn note(&mut self, warnings: &[Warning]) {
        for warning in warnings {
            match warning {
                Warning::OtherLoad { cpus } => self.others_cpus += cpus,
                Warning::StolenTime { cpus } => self.stolen_cpus += cpus,
                _ => {}
            }
        }
    }

    /// Leaves the first `whole` rounds, and turns the sums over `alone` cells into means.
    fn cut(mut self, whole: usize, alone: u32) -> Self {
        self.rounds.iter_mut().flatten().for_each(|rounds| rounds.truncate(whole));
        self.whole = whole;
        self.others_cpus /= f64::from(alone.max(1));
        self.stolen_cpus /= f64::from(alone.max(1));
        self
    }
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
    job.engine = plan.engine.into();
    job
}

fn cell(disks: &Disks, way: Way, job: &Job, watch: &dyn Watch) -> Result<(RoundRecord, Run)> {
    let open = disks.open(way)?;
    let cpu_ns = || open.server.as_ref().map(|server| server.cpu_ns()).transpose();
    let before_ns = cpu_ns()?;
    let run = run::run(job, slice::from_ref(&open.target), &RunOptions::default(), watch)?;
    let spent_ns = cpu_ns()?.zip(before_ns).map(|(after_ns, before_ns)| after_ns.saturating_sub(before_ns));
    open.close()?;
    match run.end {
        End::Complete => {}
        End::Stopped => return Err(LabError::Stopped),
        End::Failed { first, .. } => {
            return Err(LabError::BadOptions {
                what: format!("{}: {first}", way.name()),
                hint:
                    "check the disk beneath the scratch folder, and what the server said (--keep leaves its log there)"
                        .into(),
            });
        }
    }
    let phase = &run.phases[0];
    let both = phase.total().both;
    if both.ios == 0 {
        return Err(LabError::BadOptions {
            what: format!("{}: no request was completed in {}", way.name(), numbers::duration(phase.window_ns as f64)),
            hint: "use longer cells (--cell)".into(),
        });
    }
    let made: u64 = phase.series.iter().map(|point| point.read_ios + point.write_ios).sum();
    let record = RoundRecord {
        figures: Figures::of(phase),
        server_cpu_ns: spent_ns.map(|spent_ns| spent_ns as f64 / made.max(1) as f64),
    };
    Ok((record, run))
}

/// Sums the rounds up.
///
/// # Errors
/// [`LabError::BadOptions`] when nothing was measured.
pub(super) fn loads(ways: &[Way], cells: &Cells) -> Result<Vec<LoadRecord>> {
    let mut loads = Vec::new();
    for ((name, outstanding), rounds) in LOADS.into_iter().zip(&cells.rounds) {
        let base = rounds.first().map_or(&[][..], Vec::as_slice);
        let cells: Option<Vec<CellRecord>> = ways
            .iter()
            .zip(rounds)
            .enumerate()
            .map(|(index, (way, rounds))| sum_up(*way, rounds, (index > 0).then_some(base)))
            .collect();
        let cells = cells.ok_or_else(|| LabError::BadOptions {
            what: format!("no request was completed at {name} load"),
            hint: "use longer cells (--cell)".into(),
        })?;
        loads.push(LoadRecord { name: name.into(), clients: CLIENTS, outstanding, cells });
    }
    Ok(loads)
}

/// `None` where there is no round.
pub(super) fn sum_up(way: Way, rounds: &[RoundRecord], base: Option<&[RoundRecord]>) -> Option<CellRecord> {
    let each = |rounds: &[RoundRecord], figure: &dyn Fn(&RoundRecord) -> f64| -> Vec<f64> {
        rounds.iter().map(figure).collect()
    };
    let of = |figure: &dyn Fn(&RoundRecord) -> f64| Summary::of(&each(rounds, figure));
    let ratio = |figure: &dyn Fn(&RoundRecord) -> f64| {
        base.and_then(|base| Ratio::of(&each(rounds, figure), &each(base, figure)))
    };
    let cpu_ns = |round: &RoundRecord| round.figures.cpu_ns_per_io + round.server_cpu_ns.unwrap_or(0.0);
    let server: Option<Vec<f64>> = rounds.iter().map(|round| round.server_cpu_ns).collect();
    Some(CellRecord {
        way,
        iops: of(&|round| round.figures.iops)?,
        mb_per_s: of(&|round| round.figures.mb_per_s)?,
        mean_ns: of(&|round| round.figures.mean_ns)?,
        p99_ns: of(&|round| round.figures.p99_ns)?,
        client_cpu_ns: of(&|round| round.figures.cpu_ns_per_io)?,
        server_cpu_ns: server.and_then(|server| Summary::of(&server)),
        machine_cpu_ns: of(&|round| round.figures.machine_cpu_ns_per_io)?,
        iops_ratio: ratio(&|round| round.figures.iops),
        mean_ratio: ratio(&|round| round.figures.mean_ns),
        cpu_ratio: ratio(&cpu_ns),
        rounds: rounds.to_vec(),
    })
}
