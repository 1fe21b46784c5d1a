//! Blocks that are being changed, and requests that wait for them.
//!
//! ```text
//!   share    a write whose mapping follows when its payload is in place: many at once; the block's space is not given up
//!   exclude  a block that is filled from below, or moved: alone; new writes of the block wait
//!   wait     a ticket of a request that found the block taken: completed when the block is free, and planned anew
//! ```
//!
//! Requests that reach their bytes by the map alone are not counted here: epochs count those
//! (`epoch.rs`). So a block's words must not lead to its bytes while it is excluded, or the holder
//! waits for a grace period first.
//!
//! A request that waits holds no block, and an excluded block is worked on by a thread that waits
//! for no other block. So no two requests wait for each other. Everything here is guarded by the
//! disk's mutation lock.
//!
//! What a queue's own requests hold is released when the queue hands their parts' ends on. So a
//! queue does not sleep until *all* its requests have ended while one of them rests (`queue.rs`).

use crate::map::LayerId;
use diskwright_store::ExternalTicket;
#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken};
use std::collections::HashMap;

/// A block of a layer.
pub(crate) type Key = (LayerId, u64);

/// The block that stands for the filling of any block of a layer. It is excluded while a layer is
/// new on top: requests that began before may still write to the layer below, and what they write
/// must not be missed by a copy of it.
pub(crate) const FILLING: u64 = u64::MAX;

/// See the module.
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
    /// One more change is in flight for a block, which is not excluded.
    pub(crate) fn share(&mut self, key: Key) {
        self.blocks.entry(key).or_default().shared += 1;
    }

    /// One change fewer.
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

    /// Whether one holder has the block alone.
    pub(crate) fn is_excluded(&self, key: Key) -> bool {
        self.blocks.get(&key).is_some_and(|claim| claim.excluded)
    }

    /// Takes a block alone, if nobody has it.
    pub(crate) fn exclude(&mut self, key: Key) -> bool {
        let claim = self.blocks.entry(key).or_default();
        let free = claim.shared == 0 && !claim.excluded;
        #[cfg(feature = "shuttle")]
        let free = free || is_broken(Rule::ExcludedAlone) && !claim.excluded;
        claim.excluded |= free;
        free
    }

    /// Ends what [`Claims::exclude`] began.
    pub(crate) fn end_exclusion(&mut self, key: Key) {
        if let Some(claim) = self.blocks.get_mut(&key) {
            claim.excluded = false;
            self.wake_if_free(key);
        }
    }

    /// Has a ticket completed when a block that is taken now is free.
    pub(crate) fn wait(&mut self, key: Key, ticket: ExternalTicket) {
        self.blocks.entry(key).or_default().waiting.push(ticket);
        // Freed between looking and waiting cannot be: both happen under one hold of the lock. This
        // is for a block that was never taken.
        self.wake_if_free(key);
    }

    /// Fails the tickets for which `of` holds: those of a queue that is closed, which would wait
    /// for them.
    pub(crate) fn give_up(&mut self, of: impl Fn(&ExternalTicket) -> bool) {
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

/// Loses the last of those that wait, when that rule is broken.
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
    fn a_block_is_shared_or_excluded_and_who_waits_is_woken_when_it_is_free() {
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
    fn a_queue_that_is_closed_waits_for_no_block() {
        let engine = || Engine::new(EngineKind::Sync, 4, None).unwrap();
        let (mut closed, mut other) = (engine(), engine());
        let mut claims = Claims::default();
        assert!(claims.exclude((0, 7)));
        claims.wait((0, 7), closed.external(1, 0, None));
        claims.wait((0, 7), other.external(2, 0, None));
        claims.give_up(|ticket| closed.owns(ticket));
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
