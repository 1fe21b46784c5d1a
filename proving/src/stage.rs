//! A case: something that is put through power cuts, faults and broken rules; and the stage on
//! which it plays.
//!
//! A new format, server or command joins by implementing [`Case`]; the machinery is the same for
//! all.
//!
//! ```text
//!   prepare ─▶ (all durable) ─▶ run, telling at each step what the user may count on ─▶ history with truths in it
//!                                                                                        │ cut, many times
//!   judge(what is left, the truth that held there) ◀──────────────────────────────────────┘
//! ```

use crate::{history::Snapshot, mutation::Mutation, opinion::Opinion, world::World};
use diskwright_store::sync::Mutex;
use std::sync::PoisonError;

/// `Err` says what is wrong.
pub type Outcome<T = ()> = Result<T, String>;

/// Where a case plays: a world, and the truths that were told.
#[derive(Debug)]
pub struct Stage<T> {
    /// The files.
    pub world: World,
    truths: Mutex<Vec<T>>,
}

impl<T: Clone> Stage<T> {
    /// On a world.
    pub fn new(world: World) -> Self {
        Self { world, truths: Mutex::default() }
    }

    /// From here on this is what the user may count on.
    pub fn tell(&self, truth: T) {
        let mut truths = self.truths.lock().unwrap_or_else(PoisonError::into_inner);
        truths.push(truth);
        self.world.note(truths.len() - 1);
    }

    /// Everything that was told, by number.
    pub fn truths(&self) -> Vec<T> {
        self.truths.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// How closely to look at what a cut has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Depth {
    /// Whether to go on working with it.
    pub go_on: bool,
    /// Into how many states to cut that work again.
    pub cut_again: u64,
}

/// See the module.
pub trait Case: Sync {
    /// What the user may count on.
    type Truth: Clone + Send;

    /// Its name, for messages and to choose it by.
    fn name(&self) -> String;

    /// Makes what is there before; it becomes durable.
    ///
    /// # Errors
    /// What went wrong; so for all of these.
    fn prepare(&self, world: &World, seed: u64) -> Outcome;

    /// Plays, telling the truth at every step; the first before anything is done.
    fn run(&self, stage: &Stage<Self::Truth>, seed: u64) -> Outcome;

    /// Judges what a cut has left, and goes on working with it where that is asked for. Returns how
    /// many more states it judged.
    fn judge(&self, world: &World, truth: &Self::Truth, seed: u64, depth: Depth) -> Outcome<u64>;

    /// Asks programs that others wrote; `None` where none can tell.
    fn ask_others(&self, _left: &Snapshot, _truth: &Self::Truth) -> Option<Opinion> {
        None
    }

    /// Whether a mutation of the world can make a difference here.
    fn is_touched_by(&self, _mutation: Mutation) -> bool {
        true
    }
}
