//! Cutting the power of a case, as often as is asked for.
//!
//! How much, by environment variables (the defaults are those of `./test`):
//!
//! ```text
//!   DISKWRIGHT_PROVE_STATES   states in all, over all cases (at least)             35700
//!   DISKWRIGHT_PROVE_FIRST    the first seed                                       1
//!   DISKWRIGHT_PROVE_SEED     this one seed only: how a failure is seen again
//!   DISKWRIGHT_PROVE_CASE     only cases whose name has this in it
//! ```

use crate::{
    cut::{Cutter, WAYS, points},
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

/// How closely to look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Closeness {
    /// Into how many states each point of a history is cut: the first two [`WAYS`] always, the
    /// others in turn.
    pub ways: usize,
    /// Whether to go on with some of them, and cut again.
    pub go_on: bool,
    /// States that other programs are asked about.
    pub opinions: u64,
}

/// One state in so many is gone on with.
const GO_ON_EVERY: u64 = 3;
/// One state in so many is cut again while it is gone on with.
const CUT_AGAIN_EVERY: u64 = 24;

fn from_environment<T: FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.parse().ok()
}

/// How much to try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Effort {
    /// States for one case, at least: every seed is cut everywhere.
    pub states: u64,
    /// The first seed.
    pub first_seed: u64,
    /// Only that one.
    pub one_seed: bool,
    /// States that other programs are asked about.
    pub opinions: u64,
}

impl Effort {
    /// A case's share of what the environment asks for, `cases` being all there are; `None` when
    /// the case is not wanted.
    pub fn of_environment(case: &str, cases: u64) -> Option<Self> {
        let wanted: Option<String> = from_environment("DISKWRIGHT_PROVE_CASE");
        if wanted.is_some_and(|wanted| !case.contains(&wanted)) {
            return None;
        }
        let states = from_environment("DISKWRIGHT_PROVE_STATES").unwrap_or(35_700_u64).div_ceil(cases);
        let seed = from_environment("DISKWRIGHT_PROVE_SEED");
        let first = from_environment("DISKWRIGHT_PROVE_FIRST").unwrap_or(1);
        let opinions = (states / 100).clamp(3, 40);
        Some(Self { states, first_seed: seed.unwrap_or(first), one_seed: seed.is_some(), opinions })
    }
}

/// What was done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Histories that were made.
    pub seeds: u64,
    /// States that were judged.
    pub states: u64,
    /// Of them, left by a second cut, after the first.
    pub second_cuts: u64,
    /// States that other programs read.
    pub opinions: u64,
    /// A program that is not installed.
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

/// Plays a case with one seed, and cuts it everywhere.
///
/// # Errors
/// What is wrong with a state, and how it came to be.
pub fn cut_one<C: Case>(
    case: &C,
    seed: u64,
    mutation: Option<Mutation>,
    tally: &mut Tally,
    closeness: Closeness,
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
        let ways = if cutter.pending() == 0 { 1 } else { closeness.ways };
        for turn in 0..ways {
            // The first two ways in any case; the others in turn, so that no seed sees but a few of
            // them.
            let way =
                if turn < 2 { WAYS[turn] } else { WAYS[2 + (tally.states as usize * 5 + turn) % (WAYS.len() - 2)] };
            let left = cutter.ruin(way, &mut dice);
            let number = tally.states;
            let depth = Depth {
                go_on: closeness.go_on && number.is_multiple_of(GO_ON_EVERY),
                cut_again: if number.is_multiple_of(CUT_AGAIN_EVERY) { 6 } else { 0 },
            };
            let told = |error: String| {
                format!(
                    "cut at event {point} of {}, {way:?} of {} changes kept: {error}\n  before the cut:{}",
                    history.len(),
                    cutter.pending(),
                    history::tail(&history, point)
                )
            };
            let state_seed = dice.below(u64::MAX);
            let judged =
                catch_unwind(AssertUnwindSafe(|| case.judge(&World::of(left.clone()), truth, state_seed, depth)));
            let again = judged.unwrap_or_else(|panic| Err(format!("panic: {}", words_of(&panic)))).map_err(told)?;
            tally.states += 1 + again;
            tally.second_cuts += again;
            // Spread over the seed.
            if tally.opinions < closeness.opinions && tally.absent.is_none() && number % 29 == 7 {
                match case.ask_others(&left, truth) {
                    Some(Opinion::Agrees) => tally.opinions += 1,
                    Some(Opinion::Disagrees(error)) => return Err(told(error)),
                    Some(Opinion::Absent(who)) => {
                        tally.absent = Some(who);
                        println!("skipped: {who} is not installed; it reads no state that a power cut has left");
                    }
                    None => {}
                }
            }
        }
    }
    Ok(())
}

/// What a panic said.
pub fn words_of(panic: &(dyn std::any::Any + Send)) -> String {
    let words = panic.downcast_ref::<String>().cloned();
    words.or_else(|| panic.downcast_ref::<&str>().map(|&words| words.to_owned())).unwrap_or_default()
}

/// Cuts a case as often as is asked for, and says how often that was.
///
/// # Panics
/// When a state is wrong: with its seed, and how to see it again.
pub fn power_cuts<C: Case>(case: &C, cases: u64) -> Tally {
    let name = case.name();
    let Some(effort) = Effort::of_environment(&name, cases) else { return Tally::default() };
    let mut tally = Tally::default();
    let mut seed = effort.first_seed;
    while tally.states < effort.states {
        let closeness = Closeness { ways: 5, go_on: true, opinions: effort.opinions };
        if let Err(error) = cut_one(case, seed, None, &mut tally, closeness) {
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

/// Looks for a seed that catches a broken rule: the seed, and how it was caught.
pub fn hunt<C: Case>(case: &C, mutation: Option<Mutation>, seeds: u64) -> Option<(u64, String)> {
    (1..=seeds).find_map(|seed| {
        let mut tally = Tally::default();
        let closeness = Closeness { ways: 10, go_on: false, opinions: 0 };
        let caught = catch_unwind(AssertUnwindSafe(|| cut_one(case, seed, mutation, &mut tally, closeness)));
        let error = caught.unwrap_or_else(|panic| Err(format!("panic: {}", words_of(&*panic)))).err()?;
        Some((seed, error))
    })
}
