//! Faults at every single operation: the workload is run once to count its operations, and then
//! once for each of them, and each way in which it can fail.
//!
//! What must hold: the error reaches the caller (at once, or with the next flush or close); what is
//! acknowledged is there and what a flush claimed is durable, also when the power fails afterwards;
//! the file is sound; and later operations work, or say why not.
//!
//! Nobody need be told when giving space back to the file system fails, or sharing another file's
//! bytes: those are advice. When growing a file by a large step fails for want of space, a small
//! one may succeed. A file beside the disk that cannot be read when it is opened is not taken for
//! its child.

use crate::{
    cut::{Cutter, Way},
    dice::Dice,
    fault::{Fault, FaultKind, Lasts, Moment},
    mutation::Phase,
    stage::{Case, Depth, Outcome, Stage},
    world::World,
};

/// All that can go wrong with an operation: how, and what fails after it.
pub const FAULTS: [(FaultKind, Lasts); 6] = [
    (FaultKind::Io, Lasts::Once),
    (FaultKind::Io, Lasts::ForEver),
    (FaultKind::Full, Lasts::Once),
    (FaultKind::Full, Lasts::ForEver),
    (FaultKind::Short, Lasts::Once),
    (FaultKind::Slow, Lasts::Once),
];

/// What can go wrong besides with a disk of several files: one of them fails, or is full, and the
/// others are not.
pub const FAULTS_OF_ONE_FILE: [(FaultKind, Lasts); 2] =
    [(FaultKind::Io, Lasts::InThatFile), (FaultKind::Full, Lasts::InThatFile)];

/// What a faulty run tells.
#[derive(Debug, Clone, Default)]
pub struct Told {
    /// The errors that reached the caller.
    pub errors: Vec<String>,
}

/// A case that goes on when an operation fails, and tells what it was told.
pub trait FaultyCase: Case {
    /// As [`Case::run`], but an error does not end it. `Err` is for promises that were broken.
    fn run_on(&self, stage: &Stage<Self::Truth>, told: &mut Told) -> Outcome;

    /// Whether the case has another way when such an operation fails, so that nobody need be told.
    fn has_another_way(&self, _moment: Moment) -> bool {
        false
    }

    /// Whether the disk has several files that are written, of which one may fail alone.
    fn has_several_files(&self) -> bool {
        false
    }
}

/// What was tried.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Operations of the workload.
    pub operations: u64,
    /// Runs with a fault.
    pub runs: u64,
    /// Runs in which the caller was told.
    pub told: u64,
}

/// Whether somebody must be told of it.
fn must_be_told(kind: FaultKind, moment: Moment, phase: Option<Phase>) -> bool {
    match (kind, moment) {
        (FaultKind::Slow | FaultKind::Silent, _) | (_, Moment::Punch | Moment::Share) => false,
        (FaultKind::Full | FaultKind::Short, Moment::Length) => false,
        (_, Moment::Read) => phase != Some(Phase::Open),
        _ => true,
    }
}

fn play<C: FaultyCase>(case: &C, fault: Option<Fault>) -> Outcome<(Stage<C::Truth>, Told, u64)> {
    let world = World::default();
    case.prepare(&world, 1).map_err(|error| format!("preparing: {error}"))?;
    world.settle();
    world.plan(fault);
    let stage = Stage::new(world);
    let mut told = Told::default();
    case.run_on(&stage, &mut told)?;
    stage.world.phase(None);
    let operations = stage.world.operations();
    Ok((stage, told, operations))
}

fn try_one<C: FaultyCase>(case: &C, fault: Fault, tally: &mut Tally) -> Outcome {
    let (stage, told, _) = play(case, Some(fault))?;
    let world = &stage.world;
    let (strikes, last) = world.strikes();
    tally.runs += 1;
    tally.told += u64::from(!told.errors.is_empty());
    if let Some(error) = told.errors.first()
        && strikes == 0
    {
        return Err(format!("no operation failed, and yet: {error}"));
    }
    if told.errors.is_empty()
        && let Some((kind, moment, phase)) = last
        && must_be_told(kind, moment, phase)
        && !case.has_another_way(moment)
    {
        return Err(format!("the caller was not told ({moment:?} in {phase:?})"));
    }
    if told.errors.iter().any(|error| error.trim().is_empty()) {
        return Err("an error without a reason".into());
    }
    world.plan(None);
    // What is there now, and what would be there had the power failed as well.
    let (start, history) = world.history();
    let truths = stage.truths();
    let cutter_by = |turn: u64| {
        // Which of the changes a failed sync loses is chosen anew.
        let mut cutter = Cutter::new(start.clone(), &history, fault.at * 64 + fault.kind as u64 * 8 + turn);
        while cutter.next().is_some() {
            cutter.step();
        }
        cutter
    };
    let Some(truth) = cutter_by(0).truth.and_then(|number| truths.get(number)) else { return Ok(()) };
    let mut dice = Dice::new(fault.at, 0xfa);
    let depth = Depth { go_on: true, cut_again: 0 };
    case.judge(&World::of(world.snapshot()), truth, fault.at, depth).map_err(|error| format!("afterwards, {error}"))?;
    for (turn, way) in (1..).zip([Way::Nothing, Way::Whole(50), Way::Sectors(50)]) {
        let left = cutter_by(turn).ruin(way, &mut dice);
        let depth = Depth { go_on: way == Way::Whole(50), cut_again: 0 };
        case.judge(&World::of(left), truth, fault.at, depth)
            .map_err(|error| format!("after a power cut that followed ({way:?}), {error}"))?;
    }
    Ok(())
}

/// Lets every operation of a case fail, in every way.
///
/// # Errors
/// The first promise that is broken, with the fault that broke it.
pub fn hunt<C: FaultyCase>(case: &C) -> Outcome<Tally> {
    let (_, told, operations) = play(case, None).map_err(|error| format!("without a fault: {error}"))?;
    if !told.errors.is_empty() {
        return Err(format!("without a fault: {:?}", told.errors));
    }
    let mut tally = Tally { operations, ..Tally::default() };
    let of_one_file = if case.has_several_files() { &FAULTS_OF_ONE_FILE[..] } else { &[] };
    for at in 1..=operations {
        for &(kind, lasts) in FAULTS.iter().chain(of_one_file) {
            let fault = Fault { kind, at, lasts };
            try_one(case, fault, &mut tally).map_err(|error| format!("{fault:?} of {operations}: {error}"))?;
        }
    }
    Ok(tally)
}

/// As [`hunt`], where nothing may be found. Says what was tried.
///
/// # Panics
/// When a promise is broken, with the fault that broke it.
pub fn at_every_operation<C: FaultyCase>(case: &C) -> Tally {
    let name = case.name();
    let tally = hunt(case).unwrap_or_else(|error| panic!("{name}, {error}"));
    let Tally { operations, runs, told } = tally;
    println!("faults: {name}: {runs} runs, each of {operations} operations failing, {told} told the caller");
    tally
}
