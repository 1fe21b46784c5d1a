//! Rules of concurrent code that a test breaks on purpose, to check that the scheduler notices.
//!
//! Each rule is checked at the place that keeps it, behind the feature `shuttle`; other builds
//! contain no trace of it. Rules that can be broken from outside are broken in
//! `proof/proving/src/rule_breaker.rs`. All threads of a schedule run on one OS thread and the
//! broken rule is thread-local, so tests do not disturb each other.

use std::cell::Cell;

/// A rule of the concurrent code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Freed space is not reused until every request that could still reach it has ended
    /// (`disk/src/engine/epoch.rs`).
    GraceIsWaitedFor,
    /// A request reads the epoch again after it was counted, and is counted again if the epoch has
    /// changed (`disk/src/engine/epoch.rs`).
    CountedInTheCurrentEpoch,
    /// Sectors that hide a parent's sectors are mapped only when their payload is in place
    /// (`disk/src/engine/plan.rs`).
    MappedAfterPayload,
    /// A flush that is requested while another is in progress is answered by the next cycle
    /// (`disk/src/flusher.rs`).
    AnsweredByALaterCycle,
    /// Space that is freed during a flush is not durably removed by that flush
    /// (`disk/src/engine/device.rs`).
    FreedBeforeTheFlush,
    /// An image's flush that finds a cycle in progress is served by one that begins after the call
    /// (`store/src/barrier.rs`).
    WaitsForALaterCycle,
    /// When a block becomes free, every request that waits for it is woken
    /// (`disk/src/engine/claims.rs`).
    WaitersAreWoken,
    /// A block is copied up only while no write of the block is in flight
    /// (`disk/src/engine/claims.rs`).
    ExcludedAlone,
    /// A block is not kept excluded for work that another stage of the request repeats
    /// (`disk/src/engine/queue.rs`).
    ExclusionEnds,
    /// A worker does every job in its queue (`disk/src/engine/background.rs`).
    EveryJobIsDone,
    /// A queue fetches the chain again when the epoch has changed (`disk/src/engine/queue.rs`).
    ChainIsFetchedAnew,
    /// Tables are read with the chain that is current when changes are recorded from
    /// (`disk/src/engine/carry_out.rs`).
    TablesOfTheCurrentChain,
    /// The map may name a file that joined after a queue fetched its chain
    /// (`disk/src/engine/queue.rs`).
    MapMayBeAhead,
    /// A former top is called durable only when no request can write to it any more
    /// (`disk/src/engine/device.rs`).
    FormerTopIsAtRest,
    /// Table pages stay dirty until the cycle that writes them has ended
    /// (`image/src/vhdx/pages.rs`).
    DirtyUntilLanded,
}

thread_local! {
    static BROKEN: Cell<Option<Rule>> = const { Cell::new(None) };
    static LOADING: Cell<Option<bool>> = const { Cell::new(None) };
}

/// Makes every other queue that is opened from now on hand its waiting work to the disk's loader,
/// as a queue on a shared ring does. Under the scheduler there are no rings.
pub fn use_loaders(every_other: bool) {
    LOADING.set(every_other.then_some(false));
}

/// Whether the queue that is being opened uses the loader.
pub fn uses_loader() -> bool {
    let uses = LOADING.get().map(|last| !last);
    LOADING.set(uses);
    uses.unwrap_or(false)
}

/// Breaks this rule, and no other, in the schedules of the calling thread from now on.
pub fn break_rule(rule: Option<Rule>) {
    BROKEN.set(rule);
}

/// Whether this rule is broken.
pub fn is_broken(rule: Rule) -> bool {
    BROKEN.get() == Some(rule)
}
