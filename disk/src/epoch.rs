//! When freed space can be used again.
//!
//! A block that is discarded gives its space up, but a request that looked the block up a moment
//! before may still be reading or writing there. So space is used again only when every request
//! that began before the map changed has ended. Two counters for each queue are enough: a request
//! counts itself in under the parity of the current epoch; a grace period moves to the next epoch
//! and waits, without blocking anyone, until all counters of the old parity are zero. One grace
//! period runs at a time; what is freed meanwhile waits for the next.
//!
//! ```text
//!   enter() = parity ─▶ look up map ─▶ request in flight ─▶ leave(parity)
//!   begin_grace(): epoch += 1                 grace_over(): all queues have 0 in the old parity
//! ```
//!
//! The counter goes up, in sequentially consistent order, before the map is read, and the map
//! changes before the epoch moves on: so a request that is not seen by `grace_over` is one that
//! sees the changed map.

#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken};
use diskwright_store::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU64, Ordering},
};
use std::sync::{Arc, Weak};

/// Requests in flight of one queue, by parity. Only the queue's own thread changes them.
#[derive(Debug, Default)]
struct Counters([AtomicU64; 2]);

/// The epochs of one disk.
#[derive(Debug, Default)]
pub(crate) struct Epochs {
    current: Arc<AtomicU64>,
    /// A queue is gone whose requests stay counted for good.
    is_stuck: Arc<AtomicBool>,
    queues: Mutex<Vec<Weak<Counters>>>,
}

/// One queue's part in it.
#[derive(Debug)]
pub(crate) struct QueueEpoch {
    current: Arc<AtomicU64>,
    is_stuck: Arc<AtomicBool>,
    counters: Arc<Counters>,
}

/// The parity under which a request was counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parity(pub(crate) bool);

/// A request that was counted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entered {
    pub(crate) parity: Parity,
    /// The epoch: whatever was published before it began is seen by the request.
    pub(crate) epoch: u64,
}

/// A grace period under way.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grace {
    /// The epoch that it ended.
    old: u64,
}

impl Epochs {
    /// A queue joins.
    pub(crate) fn join(&self) -> QueueEpoch {
        let counters = Arc::new(Counters::default());
        let mut queues = self.queues.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&counters));
        QueueEpoch { current: Arc::clone(&self.current), is_stuck: Arc::clone(&self.is_stuck), counters }
    }

    /// Begins a grace period. The one before must be over: with two under way, each would wait for
    /// one parity only, and requests of the other parity that are older than both would be missed.
    pub(crate) fn begin_grace(&self) -> Grace {
        Grace { old: self.current.fetch_add(1, Ordering::SeqCst) }
    }

    /// Whether no grace period can end any more, because requests were lost.
    pub(crate) fn is_stuck(&self) -> bool {
        self.is_stuck.load(Ordering::Acquire)
    }

    /// Whether every request that began before the grace period has ended.
    pub(crate) fn grace_over(&self, grace: Grace) -> bool {
        #[cfg(feature = "shuttle")]
        if is_broken(Rule::GraceIsWaitedFor) {
            return true;
        }
        let parity = (grace.old & 1) as usize;
        let queues = self.queues.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        queues.iter().filter_map(Weak::upgrade).all(|counters| counters.0[parity].load(Ordering::SeqCst) == 0)
            // A later grace period has begun, so this one was over; its parity counts new requests
            // now.
            || self.current.load(Ordering::SeqCst) > grace.old + 1
    }
}

impl QueueEpoch {
    /// Counts a request in, before it looks at the map.
    #[inline]
    pub(crate) fn enter(&self) -> Entered {
        loop {
            let epoch = self.current.load(Ordering::SeqCst);
            let counter = &self.counters.0[(epoch & 1) as usize];
            counter.fetch_add(1, Ordering::SeqCst);
            #[cfg(feature = "shuttle")]
            if is_broken(Rule::CountedInTheCurrentEpoch) {
                return Entered { parity: Parity(epoch & 1 == 1), epoch };
            }
            if self.current.load(Ordering::SeqCst) == epoch {
                return Entered { parity: Parity(epoch & 1 == 1), epoch };
            }
            // The epoch moved between the two: counted under a parity that may already have been
            // found empty.
            counter.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Leaves the queue's requests counted for good: it is unknown when they end.
    pub(crate) fn abandon(self) {
        self.is_stuck.store(true, Ordering::Release);
        std::mem::forget(self.counters);
    }

    /// Counts a request out.
    #[inline]
    pub(crate) fn leave(&self, parity: Parity) {
        self.counters.0[usize::from(parity.0)].fetch_sub(1, Ordering::Release);
    }
}

#[cfg(all(test, feature = "shuttle"))]
mod schedules;

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn a_grace_period_waits_for_what_began_before_it() {
        let epochs = Epochs::default();
        let queue = epochs.join();
        let before = queue.enter().parity;
        let grace = epochs.begin_grace();
        let after = queue.enter().parity;
        assert!(!epochs.grace_over(grace));
        queue.leave(before);
        assert!(epochs.grace_over(grace));
        assert_ne!(before, after);
        queue.leave(after);
    }

    #[test]
    fn who_asks_late_is_not_held_up_by_requests_of_a_later_epoch() {
        let epochs = Epochs::default();
        let queue = epochs.join();
        let first = epochs.begin_grace();
        let second = epochs.begin_grace();
        let same_parity_as_the_first = queue.enter();
        assert!(epochs.grace_over(first) && epochs.grace_over(second));
        queue.leave(same_parity_as_the_first.parity);
    }

    #[test]
    fn an_abandoned_queue_is_told_of() {
        let epochs = Epochs::default();
        let queue = epochs.join();
        queue.enter();
        let grace = epochs.begin_grace();
        assert!(!epochs.is_stuck());
        queue.abandon();
        assert!(epochs.is_stuck() && !epochs.grace_over(grace));
    }

    #[test]
    fn a_queue_that_is_gone_holds_nothing_up() {
        let epochs = Epochs::default();
        let queue = epochs.join();
        queue.enter();
        let grace = epochs.begin_grace();
        drop(queue);
        assert!(epochs.grace_over(grace));
    }
}
