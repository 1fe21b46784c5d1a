//! Grace periods: decide when freed space can be reused.
//!
//! A discarded block frees its space, but a request that looked the block up before may still be
//! reading or writing there. So the space is reused only when every request that began before the
//! map changed has ended. Two counters for each queue suffice. A request is counted under the
//! parity of the current epoch. A grace period starts the next epoch and waits, without blocking
//! anyone, until all counters of the old parity are zero. Only one grace period runs at a time;
//! space freed meanwhile waits for the next one.
//!
//! ```text
//!   enter() = parity ─▶ look up map ─▶ request in flight ─▶ leave(parity)
//!   begin_grace(): epoch += 1                 grace_over(): old parity is 0 in all queues
//! ```
//!
//! The counter is incremented, with sequential consistency, before the map is read, and the map
//! changes before the epoch does. So a request that `grace_over` does not see has read the changed
//! map.

#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken};
use diskwright_store::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU64, Ordering},
};
use std::sync::{Arc, Weak};

/// One queue's requests, by parity. The lower 32 bits count those in flight, the upper ones those
/// that have ended. Only the queue's thread changes them.
#[derive(Debug, Default)]
struct Counters([AtomicU64; 2]);

const IN_FLIGHT_MASK: u64 = u32::MAX as u64;
/// Ends a request: one less in flight, one more ended, in one addition.
const ENDED: u64 = IN_FLIGHT_MASK;

impl Counters {
    fn in_flight(&self, parity: usize, order: Ordering) -> u64 {
        self.0[parity].load(order) & IN_FLIGHT_MASK
    }
}

/// How many requests a disk has, in all queues that are open.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Requests {
    pub(crate) in_flight: u64,
    /// Those that have ended, modulo 2^32 for each queue. Falls when a queue is closed.
    pub(crate) ended: u64,
}

/// The epochs of one disk.
#[derive(Debug, Default)]
pub(crate) struct Epochs {
    current: Arc<AtomicU64>,
    /// A queue was dropped whose lost requests stay counted for good.
    is_stuck: Arc<AtomicBool>,
    queues: Mutex<Vec<Weak<Counters>>>,
}

/// A queue's counters of its requests in flight, one for each parity.
#[derive(Debug)]
pub(crate) struct QueueEpoch {
    current: Arc<AtomicU64>,
    is_stuck: Arc<AtomicBool>,
    counters: Arc<Counters>,
}

/// The parity under which a request was counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parity(pub(crate) bool);

/// The result of counting a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EpochTicket {
    pub(crate) parity: Parity,
    /// The epoch of the request. The request sees everything that was published before that epoch
    /// began.
    pub(crate) epoch: u64,
}

/// A grace period: over when all requests that were counted before it have ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GracePeriod {
    /// The epoch that the grace period ended.
    old: u64,
}

impl Epochs {
    pub(crate) fn join(&self) -> QueueEpoch {
        let counters = Arc::new(Counters::default());
        let mut queues = self.queues.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&counters));
        QueueEpoch { current: Arc::clone(&self.current), is_stuck: Arc::clone(&self.is_stuck), counters }
    }

    /// Begins a grace period. The previous one must be over. With two at a time each would wait for
    /// only one parity, and both would miss older requests of the other parity.
    pub(crate) fn begin_grace(&self) -> GracePeriod {
        GracePeriod { old: self.current.fetch_add(1, Ordering::SeqCst) }
    }

    /// Number of requests that are counted now, in all queues.
    pub(crate) fn in_flight(&self) -> u64 {
        self.requests().in_flight
    }

    /// The requests of all queues that are open.
    pub(crate) fn requests(&self) -> Requests {
        let queues = self.queues.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut all = Requests::default();
        for counters in queues.iter().filter_map(Weak::upgrade) {
            for counter in &counters.0 {
                let counted = counter.load(Ordering::Relaxed);
                all.in_flight += counted & IN_FLIGHT_MASK;
                all.ended += counted >> 32;
            }
        }
        all
    }

    /// Whether no grace period can end any more, because a request was lost.
    pub(crate) fn is_stuck(&self) -> bool {
        self.is_stuck.load(Ordering::Acquire)
    }

    /// Whether every request that began before the grace period has ended.
    pub(crate) fn grace_over(&self, grace: GracePeriod) -> bool {
        #[cfg(feature = "shuttle")]
        if is_broken(Rule::GraceIsWaitedFor) {
            return true;
        }
        let parity = (grace.old & 1) as usize;
        let queues = self.queues.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        queues.iter().filter_map(Weak::upgrade).all(|counters| counters.in_flight(parity, Ordering::SeqCst) == 0)
            // A later grace period has begun, so this one was over. Its parity now counts new
            // requests.
            || self.current.load(Ordering::SeqCst) > grace.old + 1
    }
}

impl QueueEpoch {
    /// The current epoch, for a request that is not counted.
    #[inline]
    pub(crate) fn now(&self) -> u64 {
        self.current.load(Ordering::SeqCst)
    }

    /// Counts a request. Must be called before the request reads the map.
    #[inline]
    pub(crate) fn enter(&self) -> EpochTicket {
        loop {
            let epoch = self.current.load(Ordering::SeqCst);
            let counter = &self.counters.0[(epoch & 1) as usize];
            counter.fetch_add(1, Ordering::SeqCst);
            #[cfg(feature = "shuttle")]
            if is_broken(Rule::CountedInTheCurrentEpoch) {
                return EpochTicket { parity: Parity(epoch & 1 == 1), epoch };
            }
            if self.current.load(Ordering::SeqCst) == epoch {
                return EpochTicket { parity: Parity(epoch & 1 == 1), epoch };
            }
            // The epoch changed in between. The request was counted under a parity that may already
            // have been found to be zero.
            counter.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Leaves the queue's requests counted for good, as it is unknown when they end.
    pub(crate) fn abandon(self) {
        self.is_stuck.store(true, Ordering::Release);
        std::mem::forget(self.counters);
    }

    /// Ends a counted request.
    #[inline]
    pub(crate) fn leave(&self, parity: Parity) {
        self.counters.0[usize::from(parity.0)].fetch_add(ENDED, Ordering::Release);
    }
}

#[cfg(all(test, feature = "shuttle"))]
mod schedules;

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn a_grace_period_waits_for_older_requests() {
        let epochs = Epochs::default();
        let queue = epochs.join();
        let before = queue.enter().parity;
        let grace = epochs.begin_grace();
        let after = queue.enter().parity;
        assert!(!epochs.grace_over(grace));
        queue.leave(before);
        assert!(epochs.grace_over(grace));
        assert_ne!(before, after);
        assert_eq!(epochs.requests(), Requests { in_flight: 1, ended: 1 });
        queue.leave(after);
        assert_eq!(epochs.requests(), Requests { in_flight: 0, ended: 2 });
    }

    #[test]
    fn an_old_grace_period_does_not_wait_for_newer_requests() {
        let epochs = Epochs::default();
        let queue = epochs.join();
        let first = epochs.begin_grace();
        let second = epochs.begin_grace();
        let same_parity_as_the_first = queue.enter();
        assert!(epochs.grace_over(first) && epochs.grace_over(second));
        queue.leave(same_parity_as_the_first.parity);
    }

    #[test]
    fn an_abandoned_queue_makes_the_epochs_stuck() {
        let epochs = Epochs::default();
        let queue = epochs.join();
        queue.enter();
        let grace = epochs.begin_grace();
        assert!(!epochs.is_stuck());
        queue.abandon();
        assert!(epochs.is_stuck() && !epochs.grace_over(grace));
    }

    #[test]
    fn a_dropped_queue_delays_no_grace_period() {
        let epochs = Epochs::default();
        let queue = epochs.join();
        queue.enter();
        let grace = epochs.begin_grace();
        drop(queue);
        assert!(epochs.grace_over(grace));
    }
}
