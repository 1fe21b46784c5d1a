//! The thread that prepares targets and measures.
//!
//! ```text
//!   task ─▶ Keeper::prepare ─▶ for each cell: Runner, phase by phase ─▶ Keeper::close
//! ```
//!
//! The targets stay open between the cells of a run. Whatever goes wrong, they are closed, and the
//! next task is waited for.

use super::{
    desk::{Desk, Next},
    event::{Event, Events},
    keeper::Keeper,
};
use crate::message::{Arm, At, Measured, Stage, Task};
use diskwright_load::{
    OpenTarget,
    record::{End, Run},
    run::{Buffers, RunOptions, Runner},
};
use std::{
    panic::{self, AssertUnwindSafe},
    sync::Arc,
};

/// Carries out tasks until the agent ends.
pub(super) fn work(desk: &Arc<Desk>, mut keeper: Box<dyn Keeper>, events: &Events) {
    while let Some(task) = desk.next_task() {
        // A failed assertion ends the run, not the agent.
        let done = panic::catch_unwind(AssertUnwindSafe(|| carry_out(desk, &mut *keeper, &task)));
        let done = done.unwrap_or_else(|_| Err("the agent has a bug; see its messages".into()));
        events(Event::Ended(done.as_ref().err().cloned()));
        desk.closed(done.err());
    }
}

/// Prepares the targets of a task, measures what is told, and closes them.
fn carry_out(desk: &Arc<Desk>, keeper: &mut dyn Keeper, task: &Task) -> Result<(), String> {
    let prepared = keeper.prepare(task, &mut |doing, done, total| desk.preparing(doing, done, total))?;
    let targets = prepared.targets;
    let records = targets.iter().map(OpenTarget::record).collect();
    desk.enter(Stage::Prepared { targets: records, warnings: prepared.warnings });
    let measured = measure(desk, keeper, &targets);
    desk.enter(Stage::Closing);
    let closed = keeper.close(targets);
    measured.and(closed)
}

/// Measures cell after cell, until the run is finished or given up.
fn measure(desk: &Arc<Desk>, keeper: &dyn Keeper, targets: &[OpenTarget]) -> Result<(), String> {
    let buffers = Buffers::default();
    let mut next = desk.next();
    while let Next::Arm(arm) = next {
        next = cell(desk, keeper, targets, &buffers, *arm)?;
    }
    Ok(())
}

/// Measures the phases of a cell. Returns what is to be done next.
fn cell(
    desk: &Arc<Desk>,
    keeper: &dyn Keeper,
    targets: &[OpenTarget],
    buffers: &Buffers,
    arm: Arm,
) -> Result<Next, String> {
    let Arm { at, job, keep_going } = arm;
    if at.phase > 0 {
        return Err("the phase does not follow one that was measured".into());
    }
    keeper.allows(&job)?;
    let options = RunOptions {
        keep_going,
        buffers: buffers.clone(),
        coordinator: Some(Arc::clone(desk) as _),
        ..RunOptions::default()
    };
    let mut runner = Runner::new(&job, targets, &options).map_err(|error| error.to_string())?;
    let mut phase = 0;
    loop {
        let goes_on = runner.phase(&**desk).map_err(|error| error.to_string())?;
        let at = At { phase, ..at.clone() };
        let Some(record) = runner.phases().last().cloned() else { return Err("no phase was run".into()) };
        let end = runner.end().clone();
        let measured = |end: End, run: Option<Box<Run>>| Measured { phase: record, start_ns: 0, end, run };
        if !goes_on {
            let run = Run { phases: Vec::new(), ..runner.finish() };
            desk.measured(at, measured(end, Some(Box::new(run))));
            return Ok(desk.next());
        }
        desk.measured(at.clone(), measured(end, None));
        match desk.next() {
            Next::Arm(next) if (next.at.cell, next.at.phase) == (at.cell, phase + 1) => phase += 1,
            // The controller begins another cell, or the same one again.
            next => return Ok(next),
        }
    }
}
