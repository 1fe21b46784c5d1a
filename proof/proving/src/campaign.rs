//! Power cuts of a case, as many as asked for.
//!
//! Environment variables (the defaults are those of `./test`):
//!
//! ```text
//!   DISKWRIGHT_PROVE_STATES   states of all cases together (at least)        12000
//!   DISKWRIGHT_PROVE_FIRST    the first seed                                 1
//!   DISKWRIGHT_PROVE_SEED     only this seed, to reproduce a failure
//!   DISKWRIGHT_PROVE_CASE     only cases whose name contains this text
//! ```

use crate::{
    cut::{CUT_MODES, CutMode, Cutter, points},
    dice::Dice,
    history,
    mutation::Mutation,
    opinion::Opinion,
    stage::{Case, Depth, Outcome, Stage},
    world::World,
};
use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    str::FromStr,
};

/// How thoroughly a history is tested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thoroughness {
    /// States for each point of the history: the first two of [`CUT_MODES`] always, the others in
    /// turn.
    pub modes: usize,
    /// Whether some of the states are used for another session, which is cut again.
    pub resume: bool,
    /// Number of states that other programs read.
    pub opinions: u64,
}

/// One state in this many is used for another session.
const RESUME_EVERY: u64 = 3;
/// One state in this many gets further power cuts during that session.
const CUT_AGAIN_EVERY: u64 = 24;

pub(crate) fn from_environment<T: FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.parse().ok()
}

/// How much to test for one case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Effort {
    /// Minimum number of states. All points of each seed's history are cut.
    pub states: u64,
    /// The first seed.
    pub first_seed: u64,
    /// Whether only that seed is run.
    pub one_seed: bool,
    /// Number of states that other programs read.
    pub opinions: u64,
}

impl Effort {
    /// The share of one of `cases` cases, from the environment variables. `None` if
    /// `DISKWRIGHT_PROVE_CASE` excludes the case.
    pub fn of_environment(case: &str, cases: u64) -> Option<Self> {
        let wanted: Option<String> = from_environment("DISKWRIGHT_PROVE_CASE");
        if wanted.is_some_and(|wanted| !case.contains(&wanted)) {
            return None;
        }
        let states = from_environment("DISKWRIGHT_PROVE_STATES").unwrap_or(12_000_u64).div_ceil(cases);
        let seed = from_environment("DISKWRIGHT_PROVE_SEED");
        let first = from_environment("DISKWRIGHT_PROVE_FIRST").unwrap_or(1);
        let opinions = (states / 100).clamp(3, 40);
        Some(Self { states, first_seed: seed.unwrap_or(first), one_seed: seed.is_some(), opinions })
    }
}

/// What was tested.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Histories, one for each seed.
    pub seeds: u64,
    /// States that were judged.
    pub states: u64,
    /// States that a second power cut has left.
    pub second_cuts: u64,
    /// States that other programs read.
    pub opinions: u64,
    /// A program that would read the states and is not installed.
    pub absent: Option<&'static str>,
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seeds, states, second_cuts, opinions, .. } = self;
        write!(
            f,
            "{states} states from {seeds} seeds, {second_cuts} of them cut twice, {opinions} read by other programs"
        )
    }
}

/// Runs a case with one seed, cuts its history at all points, and judges the states.
///
/// # Errors
/// What is wrong with a state, and how the state came about.
pub fn cut_one<C: Case>(
    case: &C,
    seed: u64,
    mutation: Option<Mutation>,
    tally: &mut Tally,
    thoroughness: Thoroughness,
) -> Outcome {
    let world = World::default();
    case.prepare(&world, seed).map_err(|error| format!("preparing: {error}"))?;
    world.settle();
    world.mutate(mutation);
    let stage = Stage::new(world);
    case.run(&stage, seed).map_err(|error| format!("while it ran: {error}"))?;
    stage.world.phase(None);
    tally.seeds += 1;
    let (start, history) = stage.world.history();
    let truths = stage.truths();
    let mut dice = Dice::new(seed, 0xd1ce);
    let mut cutter = Cutter::new(start, &history, seed);
    for point in points(&history, &mut dice) {
        while cutter.at() < point {
            cutter.step();
        }
        let Some(truth) = cutter.truth.and_then(|number| truths.get(number)) else { continue };
        let modes = if cutter.pending() == 0 { 1 } else { thoroughness.modes };
        let apart = usize::from(case.loses_power_apart() && cutter.pending() > 0);
        for turn in 0..modes + apart {
            // The first two modes always, the others in turn, so that each seed uses some of them.
            let mode = if turn == modes {
                CutMode::OwnMoments
            } else if turn < 2 {
                CUT_MODES[turn]
            } else {
                CUT_MODES[2 + (tally.states as usize * 5 + turn) % (CUT_MODES.len() - 2)]
            };
            let left = cutter.state_after_cut(mode, &mut dice);
            let number = tally.states;
            let depth = Depth {
                resume: thoroughness.resume && number.is_multiple_of(RESUME_EVERY),
                cut_again: if number.is_multiple_of(CUT_AGAIN_EVERY) { 6 } else { 0 },
            };
            let describe = |error: String| {
                format!(
                    "cut at event {point} of {}, {mode:?} of {} changes kept: {error}\n  before the cut:{}",
                    history.len(),
                    cutter.pending(),
                    history::tail(&history, point)
                )
            };
            let state_seed = dice.below(u64::MAX);
            let judged =
                catch_unwind(AssertUnwindSafe(|| case.judge(&World::of(left.clone()), truth, state_seed, depth)));
            let again =
                judged.unwrap_or_else(|panic| Err(format!("panic: {}", panic_message(&panic)))).map_err(describe)?;
            tally.states += 1 + again;
            tally.second_cuts += again;
            // Spread over the states of the seed.
            if tally.opinions < thoroughness.opinions && tally.absent.is_none() && number % 29 == 7 {
                match case.ask_others(&left, truth) {
                    Some(Opinion::Agrees) => tally.opinions += 1,
                    Some(Opinion::Disagrees(error)) => return Err(describe(error)),
                    Some(Opinion::Absent(who)) => {
                        tally.absent = Some(who);
                        println!(
                            "skipped: {who} is not installed; it does not read the states that power cuts have left"
                        );
                    }
                    None => {}
                }
            }
        }
    }
    Ok(())
}

/// The message of a panic.
pub fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let words = panic.downcast_ref::<String>().cloned();
    words.or_else(|| panic.downcast_ref::<&str>().map(|&words| words.to_owned())).unwrap_or_default()
}

/// Tests a case as much as the environment asks for.
///
/// # Panics
/// A state is wrong. The message has the seed and a command that reproduces it.
pub fn power_cuts<C: Case>(case: &C, cases: u64) -> Tally {
    let name = case.name();
    let Some(effort) = Effort::of_environment(&name, cases) else { return Tally::default() };
    let mut tally = Tally::default();
    let mut seed = effort.first_seed;
    while tally.states < effort.states {
        let thoroughness = Thoroughness { modes: 5, resume: true, opinions: effort.opinions };
        if let Err(error) = cut_one(case, seed, None, &mut tally, thoroughness) {
            panic!(
                "{name}, seed {seed}: {error}\n  again: DISKWRIGHT_PROVE_SEED={seed} DISKWRIGHT_PROVE_CASE='{name}' cargo test -p diskwright-proving --test power_cuts"
            );
        }
        if effort.one_seed {
            break;
        }
        seed += 1;
    }
    println!("power cuts: {name}: {tally} (seeds {} to {})", effort.first_seed, seed.max(effort.first_seed + 1) - 1);
    tally
}

/// Looks for a seed that catches a broken rule. Returns the seed and the failure.
pub fn hunt<C: Case>(case: &C, mutation: Option<Mutation>, seeds: u64) -> Option<(u64, String)> {
    (1..=seeds).find_map(|seed| {
        let mut tally = Tally::default();
        let thoroughness = Thoroughness { modes: 10, resume: false, opinions: 0 };
        let caught = catch_unwind(AssertUnwindSafe(|| cut_one(case, seed, mutation, &mut tally, thoroughness)));
        let error = caught.unwrap_or_else(|panic| Err(format!("panic: {}", panic_message(&*panic)))).err()?;
        Some((seed, error))
    })
}
