//! A fault at every single operation. The workload runs once to record its operations, and then
//! once for each operation and each kind of fault that can strike there. All runs begin with the
//! same files. `./test` takes a sample of these runs ([`sample`](crate::sample)): each kind of
//! fault at each kind of operation in each phase, and spread over the operations. `./test --long`
//! takes all.
//!
//! ```text
//!   DISKWRIGHT_PROVE_FAULTS   runs of each workload with a fault (about), or `all`   120
//!   DISKWRIGHT_PROVE_FIRST    the seed of the sample                                 1
//! ```
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
    fault::{Fault, FaultKind, Met, OpKind, Persistence},
    history::{Event, Snapshot},
    mutation::Phase,
    sample::Sample,
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
    /// Faults that can strike, each at its operation.
    pub possible: u64,
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

fn prepared<C: FaultyCase>(case: &C) -> Outcome<Snapshot> {
    let world = World::default();
    case.prepare(&world, 1).map_err(|error| format!("preparing: {error}"))?;
    Ok(world.snapshot())
}

fn play<C: FaultyCase>(
    case: &C,
    files: &Snapshot,
    fault: Option<Fault>,
) -> Outcome<(Stage<C::Truth>, Reported, Vec<Met>)> {
    let world = World::of(files.clone());
    world.plan(fault);
    let stage = Stage::new(world);
    let mut reported = Reported::default();
    case.run_on(&stage, &mut reported)?;
    stage.world.phase(None);
    let operations = stage.world.operations();
    Ok((stage, reported, operations))
}

fn try_one<C: FaultyCase>(case: &C, files: &Snapshot, fault: Fault, tally: &mut Tally) -> Outcome {
    let (stage, reported, _) = play(case, files, Some(fault))?;
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
    // The cutters differ from the first failed sync on: each chooses anew what such a sync loses.
    let mut common = Cutter::new(start, &history, 0);
    while common.next().is_some_and(|event| !matches!(event, Event::SyncFailed(_))) {
        common.step();
    }
    let cutter_by = |turn: u64| {
        let mut cutter = common.with_seed(fault.at * 64 + fault.kind as u64 * 8 + turn);
        while cutter.next().is_some() {
            cutter.step();
        }
        cutter
    };
    let last =
        history.iter().rev().find_map(|event| if let Event::Truth(number) = event { Some(*number) } else { None });
    let Some(truth) = last.and_then(|number| truths.get(number)) else { return Ok(()) };
    let mut dice = Dice::new(fault.at, 0xfa);
    let now = (world.snapshot(), true, "afterwards".to_owned());
    let left = (1..).zip([CutMode::Nothing, CutMode::Whole(50), CutMode::Sectors(50)]).map(|(turn, mode)| {
        let left = cutter_by(turn).state_after_cut(mode, &mut dice);
        (left, mode == CutMode::Whole(50), format!("after a power cut that followed ({mode:?})"))
    });
    // If everything is durable, a cut changes nothing, and the same state is not judged again.
    let mut judged: Vec<(Snapshot, bool)> = Vec::new();
    for (state, resume, when) in std::iter::once(now).chain(left) {
        if judged.iter().any(|(other, as_far)| *as_far == resume && *other == state) {
            continue;
        }
        let depth = Depth { resume, cut_again: 0 };
        case.judge(&World::of(state.clone()), truth, fault.at, depth).map_err(|error| format!("{when}, {error}"))?;
        judged.push((state, resume));
    }
    Ok(())
}

/// The faults of a workload with these operations that can strike. If a permanent fault cannot
/// strike at an operation, it is the same as the fault at the next operation.
fn possible(operations: &[Met], has_several_files: bool) -> Vec<Fault> {
    let of_one_file = if has_several_files { &FAULTS_OF_ONE_FILE[..] } else { &[] };
    let at_each = (1..).zip(operations).flat_map(|(at, &(op_kind, _))| {
        let faults = FAULTS.iter().chain(of_one_file).filter(move |(kind, _)| kind.can_strike(op_kind));
        faults.map(move |&(kind, persistence)| Fault { kind, at, persistence })
    });
    at_each.collect()
}

/// Makes operations of a case fail, with each fault: those of the sample.
///
/// # Errors
/// The first broken promise, with the fault that caused it.
pub fn hunt<C: FaultyCase>(case: &C, sample: Sample) -> Outcome<Tally> {
    let files = prepared(case)?;
    let (_, reported, operations) = play(case, &files, None).map_err(|error| format!("without a fault: {error}"))?;
    if !reported.errors.is_empty() {
        return Err(format!("without a fault: {:?}", reported.errors));
    }
    let possible = possible(&operations, case.has_several_files());
    let mut tally = Tally { operations: operations.len() as u64, possible: possible.len() as u64, ..Tally::default() };
    let group = |fault: &Fault| (fault.kind, fault.persistence, operations.get(fault.at as usize - 1).copied());
    for fault in sample.of(&possible, group) {
        try_one(case, &files, fault, &mut tally)
            .map_err(|error| format!("{fault:?} of {}: {error}", operations.len()))?;
    }
    Ok(tally)
}

/// As [`hunt`] with the sample that the environment asks for, but expects no broken promise. Prints
/// what was tested.
///
/// # Panics
/// A promise is broken. The message has the fault.
pub fn at_every_operation<C: FaultyCase>(case: &C) -> Tally {
    let name = case.name();
    let sample = Sample::of_environment();
    let tally = hunt(case, sample).unwrap_or_else(|error| panic!("{name}, {error} ({sample})"));
    let Tally { operations, possible, runs, reported } = tally;
    println!(
        "faults: {name}: {runs} runs with one of {operations} operations failing, of {possible} that are possible ({sample}); in {reported} of them errors were reported"
    );
    tally
}
