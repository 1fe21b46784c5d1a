//! A fault at every single operation. The workload runs once to count its operations, and then once
//! for each operation and each kind of fault.
//!
//! What must hold: the error is reported to the caller (at once, or by the next flush or close).
//! Acknowledged data can be read, and flushed data is durable even if the power fails afterwards.
//! The file is not corrupt. Later operations succeed or return an error with a reason.
//!
//! Some failures need not be reported: punching holes and sharing another file's bytes are advice.
//! If growing a file by a large step fails for lack of space, a small step may succeed. If a file
//! in the same folder cannot be read when a disk is opened, it is not taken for the disk's child.

use crate::{
    cut::{CutMode, Cutter},
    dice::Dice,
    fault::{Fault, FaultKind, OpKind, Persistence},
    mutation::Phase,
    stage::{Case, Depth, Outcome, Stage},
    world::World,
};

/// The faults that are tried at each operation: the kind, and which later operations fail.
pub const FAULTS: [(FaultKind, Persistence); 6] = [
    (FaultKind::Io, Persistence::Once),
    (FaultKind::Io, Persistence::ForEver),
    (FaultKind::Full, Persistence::Once),
    (FaultKind::Full, Persistence::ForEver),
    (FaultKind::Short, Persistence::Once),
    (FaultKind::Slow, Persistence::Once),
];

/// Further faults for a disk of several files: only one of the files fails or is full.
pub const FAULTS_OF_ONE_FILE: [(FaultKind, Persistence); 2] =
    [(FaultKind::Io, Persistence::InThatFile), (FaultKind::Full, Persistence::InThatFile)];

/// The errors of a run.
#[derive(Debug, Clone, Default)]
pub struct Reported {
    /// The errors that were reported to the caller.
    pub errors: Vec<String>,
}

/// A case that continues after failed operations and collects the errors.
pub trait FaultyCase: Case {
    /// As [`Case::run`], but a failed operation does not end the run. `Err` is a broken promise.
    fn run_on(&self, stage: &Stage<Self::Truth>, reported: &mut Reported) -> Outcome;

    /// Whether the case has a fallback for a failed operation, so that the failure need not be
    /// reported.
    fn has_fallback(&self, _moment: OpKind) -> bool {
        false
    }

    /// Whether the disk writes several files, of which one may fail alone.
    fn has_several_files(&self) -> bool {
        false
    }
}

/// What was tested.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Operations of the workload.
    pub operations: u64,
    /// Runs with a fault.
    pub runs: u64,
    /// Runs in which an error was reported.
    pub reported: u64,
}

/// Whether this failure must be reported to the caller.
fn must_be_reported(kind: FaultKind, op_kind: OpKind, phase: Option<Phase>) -> bool {
    match (kind, op_kind) {
        (FaultKind::Slow | FaultKind::Silent, _) | (_, OpKind::Punch | OpKind::Share) => false,
        (FaultKind::Full | FaultKind::Short, OpKind::Length) => false,
        // What an open reads first is in two places. A merge in use opens the parent again.
        (_, OpKind::Read) => !matches!(phase, Some(Phase::Open | Phase::Absorb)),
        _ => true,
    }
}

fn play<C: FaultyCase>(case: &C, fault: Option<Fault>) -> Outcome<(Stage<C::Truth>, Reported, u64)> {
    let world = World::default();
    case.prepare(&world, 1).map_err(|error| format!("preparing: {error}"))?;
    world.settle();
    world.plan(fault);
    let stage = Stage::new(world);
    let mut reported = Reported::default();
    case.run_on(&stage, &mut reported)?;
    stage.world.phase(None);
    let operations = stage.world.operations();
    Ok((stage, reported, operations))
}

fn try_one<C: FaultyCase>(case: &C, fault: Fault, tally: &mut Tally) -> Outcome {
    let (stage, reported, _) = play(case, Some(fault))?;
    let world = &stage.world;
    let (strikes, last) = world.strikes();
    tally.runs += 1;
    tally.reported += u64::from(!reported.errors.is_empty());
    if let Some(error) = reported.errors.first()
        && strikes == 0
    {
        return Err(format!("no operation failed, but an error was reported: {error}"));
    }
    if reported.errors.is_empty()
        && let Some((kind, op_kind, phase)) = last
        && must_be_reported(kind, op_kind, phase)
        && !case.has_fallback(op_kind)
    {
        return Err(format!("the failure was not reported to the caller ({op_kind:?} in {phase:?})"));
    }
    if reported.errors.iter().any(|error| error.trim().is_empty()) {
        return Err("an error without a reason".into());
    }
    world.plan(None);
    // Judge the present state, and the states that a power cut now may leave.
    let (start, history) = world.history();
    let truths = stage.truths();
    let cutter_by = |turn: u64| {
        // Each cutter chooses anew which changes a failed sync loses.
        let mut cutter = Cutter::new(start.clone(), &history, fault.at * 64 + fault.kind as u64 * 8 + turn);
        while cutter.next().is_some() {
            cutter.step();
        }
        cutter
    };
    let Some(truth) = cutter_by(0).truth.and_then(|number| truths.get(number)) else { return Ok(()) };
    let mut dice = Dice::new(fault.at, 0xfa);
    let depth = Depth { resume: true, cut_again: 0 };
    case.judge(&World::of(world.snapshot()), truth, fault.at, depth).map_err(|error| format!("afterwards, {error}"))?;
    for (turn, mode) in (1..).zip([CutMode::Nothing, CutMode::Whole(50), CutMode::Sectors(50)]) {
        let left = cutter_by(turn).state_after_cut(mode, &mut dice);
        let depth = Depth { resume: mode == CutMode::Whole(50), cut_again: 0 };
        case.judge(&World::of(left), truth, fault.at, depth)
            .map_err(|error| format!("after a power cut that followed ({mode:?}), {error}"))?;
    }
    Ok(())
}

/// Makes each operation of a case fail, with each fault.
///
/// # Errors
/// The first broken promise, with the fault that caused it.
pub fn hunt<C: FaultyCase>(case: &C) -> Outcome<Tally> {
    let (_, reported, operations) = play(case, None).map_err(|error| format!("without a fault: {error}"))?;
    if !reported.errors.is_empty() {
        return Err(format!("without a fault: {:?}", reported.errors));
    }
    let mut tally = Tally { operations, ..Tally::default() };
    let of_one_file = if case.has_several_files() { &FAULTS_OF_ONE_FILE[..] } else { &[] };
    for at in 1..=operations {
        for &(kind, persistence) in FAULTS.iter().chain(of_one_file) {
            let fault = Fault { kind, at, persistence };
            try_one(case, fault, &mut tally).map_err(|error| format!("{fault:?} of {operations}: {error}"))?;
        }
    }
    Ok(tally)
}

/// As [`hunt`], but expects no broken promise. Prints what was tested.
///
/// # Panics
/// A promise is broken. The message has the fault.
pub fn at_every_operation<C: FaultyCase>(case: &C) -> Tally {
    let name = case.name();
    let tally = hunt(case).unwrap_or_else(|error| panic!("{name}, {error}"));
    let Tally { operations, runs, reported } = tally;
    println!(
        "faults: {name}: {runs} runs with one of {operations} operations failing, errors reported in {reported} runs"
    );
    tally
}
