//! Blocks that are being changed, and requests that wait for them.
//!
//! ```text
//!   share    a write whose mapping is committed later; many at once; its space is not freed
//!   exclude  copy-up of a block; one holder; new writes of the block wait
//!   close    the same, while changes in flight still end (`excluded.rs`)
//!   wait     the ticket of a request that found it claimed; completed when the block is free
//! ```
//!
//! Requests that use only the map are not counted here: epochs count them (`epoch.rs`). So before a
//! block is excluded its words must not lead to its bytes, or the holder waits for a grace period
//! first.
//!
//! Why no two requests wait for each other: a waiting request holds no block, and a thread that
//! works on an excluded block waits for no other block. The disk's mutation lock guards everything
//! here.
//!
//! A queue releases the blocks of its requests when it processes their completions. So while one of
//! its requests rests, a queue must not sleep until *all* its requests have ended (`queue.rs`).

use crate::engine::map::LayerId;
use diskwright_store::ExternalTicket;
#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken};
use std::collections::HashMap;

/// A block of a layer.
pub(crate) type Key = (LayerId, u64);

/// A pseudo-block that stands for a copy-up of any block of a layer. It is excluded while a layer
/// is new on top: older requests may still write to the layer below, and a copy-up must not miss
/// their data.
pub(crate) const COPY_UP: u64 = u64::MAX;

/// Blocks that are shared by writes or excluded for one change, and the requests that wait for
/// them.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    blocks: HashMap<Key, Claim>,
}

#[derive(Debug, Default)]
struct Claim {
    shared: u32,
    excluded: bool,
    waiting: Vec<ExternalTicket>,
}

impl Claims {
    /// Counts a change in flight for a block. The block must not be excluded.
    pub(crate) fn share(&mut self, key: Key) {
        self.blocks.entry(key).or_default().shared += 1;
    }

    /// Ends a change counted by [`Claims::share`].
    pub(crate) fn release(&mut self, key: Key) {
        if let Some(claim) = self.blocks.get_mut(&key) {
            claim.shared = claim.shared.saturating_sub(1);
            self.wake_if_free(key);
        }
    }

    /// Whether a change is in flight for a block.
    pub(crate) fn is_shared(&self, key: Key) -> bool {
        self.blocks.get(&key).is_some_and(|claim| claim.shared > 0)
    }

    /// Whether a block is excluded.
    pub(crate) fn is_excluded(&self, key: Key) -> bool {
        self.blocks.get(&key).is_some_and(|claim| claim.excluded)
    }

    /// Excludes a block, if it is free. Returns whether it was.
    pub(crate) fn exclude(&mut self, key: Key) -> bool {
        let claim = self.blocks.entry(key).or_default();
        let free = claim.shared == 0 && !claim.excluded;
        #[cfg(feature = "shuttle")]
        let free = free || is_broken(Rule::ExcludedAlone) && !claim.excluded;
        claim.excluded |= free;
        free
    }

    /// Excludes a block from new changes, unless it is excluded already. Changes in flight go on:
    /// the block is free when it is no longer shared. Returns whether the caller has it now.
    pub(crate) fn close(&mut self, key: Key) -> bool {
        let claim = self.blocks.entry(key).or_default();
        !std::mem::replace(&mut claim.excluded, true)
    }

    /// Ends an exclusion, and wakes the requests that wait for the block.
    pub(crate) fn end_exclusion(&mut self, key: Key) {
        if let Some(claim) = self.blocks.get_mut(&key) {
            claim.excluded = false;
            self.wake_if_free(key);
        }
    }

    /// Completes the ticket when a claimed block is free.
    pub(crate) fn wait(&mut self, key: Key, ticket: ExternalTicket) {
        self.blocks.entry(key).or_default().waiting.push(ticket);
        // A block cannot become free between the check and this call, as both happen under one hold
        // of the lock. This covers a block that was never claimed.
        self.wake_if_free(key);
    }

    /// Fails the waiting tickets for which `of` is true: those of a queue that is being dropped.
    pub(crate) fn fail_waiting(&mut self, of: impl Fn(&ExternalTicket) -> bool) {
        for claim in self.blocks.values_mut() {
            for ticket in claim.waiting.extract_if(.., |ticket| of(ticket)) {
                ticket.complete(Err(std::io::Error::other("the queue was closed before the block was free")));
            }
        }
    }

    fn wake_if_free(&mut self, key: Key) {
        if self.blocks.get(&key).is_some_and(|claim| claim.shared == 0 && !claim.excluded)
            && let Some(claim) = self.blocks.remove(&key)
        {
            #[cfg(feature = "shuttle")]
            let claim = forgetful(claim);
            claim.waiting.into_iter().for_each(|ticket| ticket.complete(Ok(())));
        }
    }
}

/// Drops the last waiting ticket if that rule is broken.
#[cfg(feature = "shuttle")]
fn forgetful(mut claim: Claim) -> Claim {
    if is_broken(Rule::WaitersAreWoken) {
        std::mem::forget(claim.waiting.pop());
    }
    claim
}

#[cfg(all(test, feature = "shuttle"))]
mod schedules;

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use diskwright_store::{Engine, EngineKind};

    #[test]
    fn a_waiting_ticket_is_completed_when_its_block_is_free() {
        let mut engine = Engine::new(EngineKind::Sync, 4, None).unwrap();
        let mut claims = Claims::default();
        let key = (0, 7);
        claims.share(key);
        claims.share(key);
        assert!(claims.is_shared(key) && !claims.exclude(key) && !claims.is_excluded(key));
        claims.wait(key, engine.external(1, 0, None));
        claims.release(key);
        let mut ended = Vec::new();
        engine.reap(0, &mut ended).unwrap();
        assert!(ended.is_empty(), "one change is still in flight");
        claims.release(key);
        engine.reap(1, &mut ended).unwrap();
        assert_eq!(ended.len(), 1);
        assert!(claims.exclude(key) && !claims.exclude(key) && claims.is_excluded(key));
        claims.wait(key, engine.external(2, 0, None));
        claims.end_exclusion(key);
        engine.reap(1, &mut ended).unwrap();
        assert!(ended.len() == 2 && claims.blocks.is_empty());
    }

    #[test]
    fn the_tickets_of_a_dropped_queue_are_failed() {
        let engine = || Engine::new(EngineKind::Sync, 4, None).unwrap();
        let (mut closed, mut other) = (engine(), engine());
        let mut claims = Claims::default();
        assert!(claims.exclude((0, 7)));
        claims.wait((0, 7), closed.external(1, 0, None));
        claims.wait((0, 7), other.external(2, 0, None));
        claims.fail_waiting(|ticket| closed.owns(ticket));
        let mut ended = Vec::new();
        closed.reap(1, &mut ended).unwrap();
        assert!(ended.pop().unwrap().result.is_err());
        other.reap(0, &mut ended).unwrap();
        assert!(ended.is_empty());
        claims.end_exclusion((0, 7));
        other.reap(1, &mut ended).unwrap();
        ended.pop().unwrap().result.unwrap();
    }
}
