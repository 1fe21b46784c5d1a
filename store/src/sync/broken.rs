//! Rules of what runs without a lock, or shares work between threads, that a test may break on
//! purpose, to see that the scheduler finds it.
//!
//! They stand where the rule is kept, behind the feature `shuttle`; whatever is built without it
//! has nothing of them. Rules that can be broken from outside are broken there
//! (`proving/src/meddler.rs`). All threads of one schedule run on one thread of the machine, so
//! what is broken is known to that one only, and tests do not disturb each other.

use std::cell::Cell;

/// A rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Space that was given up rests until every request that could still reach it has ended
    /// (`disk/src/epoch.rs`).
    GraceIsWaitedFor,
    /// A request looks again at the epoch after it was counted, and is counted anew where that has
    /// moved on (`disk/src/epoch.rs`).
    CountedInTheCurrentEpoch,
    /// Sectors that hide a parent's are mapped when their payload is in place (`disk/src/plan.rs`).
    MappedAfterPayload,
    /// Whoever asks for a flush while one is under way is answered by the next
    /// (`disk/src/flusher.rs`).
    AnsweredByALaterCycle,
    /// What is given up during a flush is not durably removed by it (`disk/src/device.rs`).
    FreedBeforeTheFlush,
    /// A flush of an image that finds a cycle under way is done by one that begins after the call
    /// (`store/src/barrier.rs`).
    WaitsForALaterCycle,
    /// Every request that waits for a block is woken when the block is free (`disk/src/claims.rs`).
    WaitersAreWoken,
    /// A block is filled from below only when no write of the block is on its way
    /// (`disk/src/claims.rs`).
    ExcludedAlone,
    /// A block does not stay excluded for work that another stage of the request asks for again
    /// (`disk/src/queue.rs`).
    ExclusionEnds,
    /// A clerk does every job that has gathered (`disk/src/clerk.rs`).
    EveryJobIsDone,
    /// A queue fetches the chain anew when the epoch has moved on (`disk/src/queue.rs`).
    ChainIsFetchedAnew,
    /// The map may name a file that joined after a queue had fetched its chain
    /// (`disk/src/queue.rs`).
    MapMayBeAhead,
    /// A former top is called durable when no request can write to it any more
    /// (`disk/src/device.rs`).
    FormerTopIsAtRest,
    /// Table pages are dirty until the cycle that carries them has ended
    /// (`image/src/vhdx/pages.rs`).
    DirtyUntilLanded,
}

thread_local! {
    static BROKEN: Cell<Option<Rule>> = const { Cell::new(None) };
    static LOADING: Cell<Option<bool>> = const { Cell::new(None) };
}

/// Has every other queue that is opened from now on hand what must wait to the disk's loader, as a
/// queue on a shared ring does. Under a scheduler there are no rings.
pub fn use_loaders(every_other: bool) {
    LOADING.set(every_other.then_some(false));
}

/// Whether the queue that is being opened uses the loader.
pub fn uses_loader() -> bool {
    let uses = LOADING.get().map(|last| !last);
    LOADING.set(uses);
    uses.unwrap_or(false)
}

/// Breaks a rule, and no other, in what the calling thread schedules from now on.
pub fn break_rule(rule: Option<Rule>) {
    BROKEN.set(rule);
}

/// Whether it is broken.
pub fn is_broken(rule: Rule) -> bool {
    BROKEN.get() == Some(rule)
}
