//! What a movable disk shares with its queues: the current disk, the phase of a move, the grace
//! periods, and the wakers that wake sleeping queues.

use super::dirty::Dirty;
use crate::engine::{
    device::Disk,
    epoch::{Epochs, QueueEpoch},
};
use diskwright_store::{
    BlockDevice, ExternalTicket,
    resize::{SizeWatcher, SizeWatchers},
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
        thread,
    },
};
use std::{
    fmt, io,
    sync::{Arc, PoisonError, Weak},
};

/// How far a move is, for the requests that change the disk.
#[derive(Debug, Clone)]
pub(crate) enum Phase {
    /// No move, or one that has not begun: requests are forwarded.
    Open,
    /// The disk is being copied: a request marks its range, and is forwarded.
    Tracked(Arc<Dirty>),
    /// The copy is being completed: requests that change data wait.
    Closed,
    /// The new disk is in use, and the old one still has its name: what promises durability waits.
    Settling,
}

/// The disk that requests use now, and the phase of a move.
#[derive(Debug, Clone)]
pub(crate) struct Inside {
    pub(crate) disk: Arc<Disk>,
    /// How often the disk was exchanged.
    pub(crate) number: u64,
    pub(crate) phase: Phase,
}

/// What a movable disk shares with its queues.
pub(crate) struct State {
    inside: Mutex<Inside>,
    epochs: Epochs,
    /// Held during a grace period, because there is one at a time.
    changing: Mutex<()>,
    /// Requests that were completed, a counter for each queue.
    ended: Mutex<Vec<Weak<AtomicU64>>>,
    wakers: Mutex<Vec<ExternalTicket>>,
    /// How often the wakers have run.
    rings: AtomicU64,
    pub(crate) watchers: Arc<SizeWatchers>,
    /// Passes new sizes of the current disk on to `watchers`.
    follows: Arc<SizeWatcher>,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State").field("inside", &self.inside).finish_non_exhaustive()
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    pub(crate) fn new(disk: Arc<Disk>) -> Self {
        let watchers = Arc::new(SizeWatchers::default());
        let told = Arc::clone(&watchers);
        let follows: Arc<SizeWatcher> = Arc::new(move |size_bytes| told.notify(size_bytes));
        disk.watch_size(&follows);
        Self {
            inside: Mutex::new(Inside { disk, number: 0, phase: Phase::Open }),
            epochs: Epochs::default(),
            changing: Mutex::new(()),
            ended: Mutex::default(),
            wakers: Mutex::default(),
            rings: AtomicU64::new(0),
            watchers,
            follows,
        }
    }

    pub(crate) fn inside(&self) -> Inside {
        lock(&self.inside).clone()
    }

    pub(crate) fn disk(&self) -> Arc<Disk> {
        Arc::clone(&lock(&self.inside).disk)
    }

    /// Counts a queue in: the epochs of its requests, and the counter of those that have ended.
    pub(crate) fn join(&self) -> (QueueEpoch, Arc<AtomicU64>) {
        let counter = Arc::new(AtomicU64::new(0));
        let mut ended = lock(&self.ended);
        ended.retain(|counter| counter.strong_count() > 0);
        ended.push(Arc::downgrade(&counter));
        (self.epochs.join(), counter)
    }

    /// Requests of the open queues that have ended.
    pub(crate) fn ended(&self) -> u64 {
        let ended = lock(&self.ended);
        ended.iter().filter_map(Weak::upgrade).map(|counter| counter.load(Ordering::Relaxed)).sum()
    }

    /// Changes the phase, and waits until no request is in flight that was counted before the
    /// change. Must not be called by a thread that has a queue with requests in flight.
    ///
    /// # Errors
    /// If a request was lost, as it is unknown when it ends. The phase has changed all the same.
    pub(crate) fn enter(&self, phase: Phase) -> io::Result<()> {
        self.change(|inside| inside.phase = phase)
    }

    /// Puts another disk in the place of the current one. To be called in [`Phase::Closed`], in
    /// which no request changes the old disk.
    ///
    /// # Errors
    /// As [`State::enter`].
    pub(crate) fn exchange(&self, disk: &Arc<Disk>, phase: Phase) -> io::Result<()> {
        disk.watch_size(&self.follows);
        self.change(|inside| *inside = Inside { disk: Arc::clone(disk), number: inside.number + 1, phase })
    }

    /// Waits until every request that was counted before this call has ended.
    ///
    /// # Errors
    /// As [`State::enter`].
    pub(crate) fn wait_for_grace(&self) -> io::Result<()> {
        self.change(|_| {})
    }

    /// The change is published before the epoch changes. So a request that is counted later sees
    /// it, and the grace period waits for all that may not. Both happen while `inside` is locked: a
    /// queue that fetches the change would otherwise use the new disk, and another one the old disk
    /// for a request that begins after the first one's write has ended.
    fn change(&self, change: impl FnOnce(&mut Inside)) -> io::Result<()> {
        let _turn = lock(&self.changing);
        let mut inside = lock(&self.inside);
        change(&mut inside);
        let grace = self.epochs.begin_grace();
        drop(inside);
        self.wake_queues();
        while !self.epochs.grace_over(grace) {
            if self.epochs.is_stuck() || lock(&self.inside).disk.is_stuck() {
                return Err(io::Error::other(
                    "an earlier request of this disk was never answered, and may still be under way: close the disk, check it, open it again",
                ));
            }
            pause();
        }
        Ok(())
    }

    /// Wakes the queues that sleep in a ring.
    pub(crate) fn wake_queues(&self) {
        // Before the wakers, so that a queue that is woken takes note of them.
        self.rings.fetch_add(1, Ordering::SeqCst);
        let wakers = std::mem::take(&mut *lock(&self.wakers));
        wakers.into_iter().for_each(|waker| waker.complete(Ok(())));
    }

    /// How often the wakers have run.
    pub(crate) fn rings(&self) -> u64 {
        self.rings.load(Ordering::SeqCst)
    }

    /// Adds the waker of a queue that may sleep. It wakes the queue at the next change.
    pub(crate) fn add_waker(&self, waker: ExternalTicket) {
        lock(&self.wakers).push(waker);
    }

    /// Takes the waker for which `is_it` holds.
    pub(crate) fn take_waker(&self, is_it: impl Fn(&ExternalTicket) -> bool) -> Option<ExternalTicket> {
        let mut wakers = lock(&self.wakers);
        let at = wakers.iter().position(is_it)?;
        Some(wakers.swap_remove(at))
    }
}

/// Waits a moment for other threads.
pub(crate) fn pause() {
    #[cfg(not(feature = "shuttle"))]
    thread::sleep(std::time::Duration::from_micros(100));
    #[cfg(feature = "shuttle")]
    thread::yield_now();
}
