//! A case: something that is tested with power cuts, faults and broken rules; and the stage on
//! which it runs.
//!
//! A new format, server or command is tested by implementing [`Case`].
//!
//! ```text
//!   prepare ─▶ (all durable) ─▶ run, which records what the user may rely on, step by step
//!     ─▶ a history that contains these truths ─▶ cut, many times
//!     ─▶ judge(the state left, the truth that held at the cut)
//! ```

use crate::{history::Snapshot, mutation::Mutation, opinion::Opinion, world::World};
use diskwright_store::sync::Mutex;
use std::sync::PoisonError;

/// `Err` is a message that says what is wrong.
pub type Outcome<T = ()> = Result<T, String>;

/// Where a case runs: a world, and the truths that were recorded.
#[derive(Debug)]
pub struct Stage<T> {
    /// The files.
    pub world: World,
    truths: Mutex<Vec<T>>,
}

impl<T: Clone> Stage<T> {
    /// A stage without truths.
    pub fn new(world: World) -> Self {
        Self { world, truths: Mutex::default() }
    }

    /// Records what the user may rely on from now on.
    pub fn record(&self, truth: T) {
        let mut truths = self.truths.lock().unwrap_or_else(PoisonError::into_inner);
        truths.push(truth);
        self.world.record_truth(truths.len() - 1);
    }

    /// All recorded truths, by index.
    pub fn truths(&self) -> Vec<T> {
        self.truths.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// How thoroughly to judge a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Depth {
    /// Whether to use the disk for another session.
    pub resume: bool,
    /// Number of power cuts during that session.
    pub cut_again: u64,
}

/// Something that is tested.
pub trait Case: Sync {
    /// What the user may rely on at one moment.
    type Truth: Clone + Send;

    /// Name for messages and for `DISKWRIGHT_PROVE_CASE`.
    fn name(&self) -> String;

    /// Makes the files that exist before the run. They become durable.
    ///
    /// # Errors
    /// What went wrong, as a message. The other methods do the same.
    fn prepare(&self, world: &World, seed: u64) -> Outcome;

    /// Runs the case and records each truth. The first truth is recorded before anything is done.
    fn run(&self, stage: &Stage<Self::Truth>, seed: u64) -> Outcome;

    /// Judges the state that a cut has left, and runs another session on it if `depth` asks for
    /// one. Returns the number of further states that it judged.
    fn judge(&self, world: &World, truth: &Self::Truth, seed: u64, depth: Depth) -> Outcome<u64>;

    /// Asks other programs; `None` if no program can read this case.
    fn ask_others(&self, _left: &Snapshot, _truth: &Self::Truth) -> Option<Opinion> {
        None
    }

    /// Whether its files lie on devices that may lose power one after the other.
    fn loses_power_apart(&self) -> bool {
        false
    }

    /// Whether a mutation of the files can make a difference for this case.
    fn is_touched_by(&self, _mutation: Mutation) -> bool {
        true
    }
}
