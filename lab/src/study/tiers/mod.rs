//! The study `tiers`: a load that uses some data often, on a pool of fast and slow members, before
//! and after an optimisation.
//!
//! ```text
//!   prepare    a pool of fast and slow members, as many of each as there are copies; a disk,
//!              filled, on the slow ones                                                (pool.rs)
//!   before     the zipf load; the pool counts how often each slab is used
//!   optimize   what is used often moves to the fast members; the pool predicts their share
//!   after      the same load; their share is measured
//!   conclude   IOPS and latency before and after, predicted and measured share, and the paper's
//!              report: how large the fast members must be to serve which share     (verdict.rs)
//! ```
//!
//! The steps follow the Storage Spaces paper: a nightly optimisation, and its report, from which
//! one chooses the size of the fast tier. Each round has a pool of its own and other popular
//! blocks, so rounds are independent. Within a round "before" comes first, because it is what the
//! optimisation learns from; a drift of the machine's speed is not shared by both. So both cells of
//! a round have members with the same limits, which keep the machine's own speed out of the
//! figures, unless the user names folders on devices of different speed.
//!
//! The pool has no write-back cache here: small writes to slow slabs would go to the fast members
//! before and after.

mod options;
mod pool;
mod record;
pub(crate) mod verdict;

pub use options::{TierOptions, TiersOptions};
pub use record::{AFTER, BEFORE, FAST_SHARE, OptimizationRecord, SCHEMA, TierRecord, TiersResult};

use crate::{
    LabError, Result,
    cells::Cell,
    measure,
    progress::{Progress, report},
    scratch::Scratch,
    study::{StudyReport, warnings as shared},
};
use diskwright_load::{
    figures::Figures,
    machine::{OtherLoad, Place},
    record::{Head, MemberRecord},
    run::RunOptions,
};
use diskwright_space::Pool;
use options::Plan;
use pool::{Members, disk_of, needed_bytes, wrong};
use std::{sync::Arc, time::Instant};

/// Runs the study and saves its result. The scratch folder and the members are removed in all
/// cases, unless `keep` is set.
///
/// # Errors
/// Bad options; no space; a pool that fails; [`LabError::Stopped`] before the first whole round.
pub fn run(options: &TiersOptions, progress: &mut dyn Progress) -> Result<StudyReport<TiersResult>> {
    let study = &options.study;
    let plan = Plan::new(options)?;
    let begun = study.begin("tiers", SCHEMA)?;
    let scratch = Scratch::new(study.dir.as_deref(), study.keep)?;
    if options.fast.dir.is_none() && options.slow.dir.is_none() {
        scratch.need("the study", needed_bytes(&plan))?;
    }
    let mut result = TiersResult {
        head: begun.end(String::new(), false),
        quick: study.quick,
        size_bytes: plan.size_bytes,
        fast_bytes: plan.fast_bytes,
        copies: plan.copies,
        theta: options.theta,
        cell_ns: plan.cell.as_nanos() as u64,
        rounds: plan.rounds,
        fast: options.fast.record(plan.fast),
        slow: options.slow.record(plan.slow),
        cells: [BEFORE, AFTER].map(|subject| plan.cell_of(subject)).into(),
        optimizations: Vec::new(),
    };
    let place = Place::detect(scratch.path());
    let watch = OtherLoad::watch();
    let mut stopped = false;
    for round in 0..plan.rounds {
        match one_round(&plan, options, &scratch, round, &mut result, progress) {
            Ok(()) => {}
            Err(LabError::Stopped) if round > 0 => {
                stopped = true;
                result.cells.iter_mut().for_each(|cell| cell.truncate(round));
                break;
            }
            Err(error) => return Err(error),
        }
    }
    let mut warnings = shared::of_machine(&begun.head.machine);
    warnings.extend(shared::since(&watch));
    let head = begun.end(verdict::verdict(&result, stopped), stopped);
    result.head = Head { place: Some(place), warnings, ..head };
    Ok(StudyReport::save(result, &begun.output, stopped))
}

fn one_round(
    plan: &Plan,
    options: &TiersOptions,
    scratch: &Scratch,
    round: usize,
    result: &mut TiersResult,
    progress: &mut dyn Progress,
) -> Result<()> {
    let total = 3 * plan.rounds as u64;
    let say = |progress: &mut dyn Progress, step: u64, what: &str| {
        report(progress, "measure", 3 * round as u64 + step, total, what)
    };
    let members = Members::make(plan, options, scratch.path(), round, progress)?;
    scratch.settle()?;
    let pool = members.open()?;
    say(progress, 0, "before the optimisation")?;
    measure_into(&mut result.cells[0], plan, round, &pool, progress)?;
    say(progress, 1, "the optimisation")?;
    let begun = Instant::now();
    let mut goes_on = true;
    let optimized = pool.optimize(false, &mut |_| {
        goes_on = goes_on && report(progress, "measure", 3 * round as u64 + 1, total, "the optimisation").is_ok();
        goes_on
    });
    let done = match optimized {
        Err(_) if !goes_on => return Err(LabError::Stopped),
        done => done.map_err(wrong)?,
    };
    let took_ns = begun.elapsed().as_nanos() as u64;
    // Opened again, it counts from the beginning.
    pool.close().map_err(wrong)?;
    drop(pool);
    let pool = members.open()?;
    say(progress, 2, "after the optimisation")?;
    measure_into(&mut result.cells[1], plan, round, &pool, progress)?;
    let found = pool.tier_report().map_err(wrong)?;
    result.fast_bytes = found.fast_bytes / u64::from(plan.copies);
    let unknown = || wrong("no request was counted: use longer cells (`StudyOptions::cell`)");
    result.optimizations.push(OptimizationRecord {
        took_ns,
        to_fast_bytes: done.up_bytes,
        to_slow_bytes: done.down_bytes,
        predicted: done.share_after.ok_or_else(unknown)?,
        measured: found.measured.ok_or_else(unknown)?,
        best: found.share_after.ok_or_else(unknown)?,
        working_set_bytes: found.working_set_bytes,
        needed: found.needed,
        curve: found.curve,
    });
    pool.close().map_err(wrong)
}

/// Measures the load once, and adds it to a cell.
fn measure_into(
    cell: &mut Cell,
    plan: &Plan,
    round: usize,
    pool: &Arc<Pool>,
    progress: &mut dyn Progress,
) -> Result<()> {
    let target = disk_of(pool)?;
    let phase = measure::window(&plan.job(round), &target, &RunOptions::default(), progress.watch())?;
    let requests = |member: &MemberRecord| (member.reads + member.writes) as f64;
    let all: f64 = phase.members.iter().map(requests).sum();
    let fast: f64 = phase.members.iter().filter(|member| member.class == "ssd").map(requests).sum();
    cell.rounds.push(Figures::of(&phase));
    cell.push_more(FAST_SHARE, (all > 0.0).then(|| fast / all));
    Ok(())
}
