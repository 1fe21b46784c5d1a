//! What other threads and lanes end for an engine, and how they wake the engine's thread.
//!
//! Two things come back here: the [`ExternalTicket`] of a whole request, and the
//! [`Loan`](crate::Loan) of a part. Whoever holds one puts the result on a list that both sides
//! share, and rings a bell: a condition variable, for an engine that sleeps on it, and an eventfd,
//! for one that sleeps in its ring.
//!
//! One mutex guards the list; it is held for a push or a swap only. The bell is silent while the
//! list is *attended* (the engine's own thread drives a lane and looks at the list next), and when
//! the list was not empty before: the bell has been rung for that entry already. A ticket is
//! answered exactly once, at the latest when it is dropped.

use crate::sync::{Condvar, Mutex, MutexGuard};
use rustix::event::EventfdFlags;
use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::{Arc, OnceLock, PoisonError},
    time::Duration,
};

/// Which entry of the engine's tables has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Whose {
    /// The ticket of a request, by its slot.
    Slot(u32),
    /// The loan of a part.
    Part(u32),
}

/// What has ended, and how.
pub(crate) type Ended = (Whose, io::Result<()>);

#[derive(Debug, Default)]
struct List {
    ended: Vec<Ended>,
    /// The engine's thread looks at the list soon, without being told.
    attended: bool,
}

/// What the engine and the holders of its tickets and loans share.
#[derive(Debug, Default)]
pub(crate) struct Externals {
    list: Mutex<List>,
    bell: Condvar,
    eventfd: OnceLock<OwnedFd>,
}

impl Externals {
    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The eventfd that becomes readable when something has ended. To be asked for before the
    /// engine sleeps in a ring.
    pub(crate) fn eventfd(&self) -> io::Result<RawFd> {
        if let Some(fd) = self.eventfd.get() {
            return Ok(fd.as_raw_fd());
        }
        let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(self.eventfd.get_or_init(|| fd).as_raw_fd())
    }

    /// The eventfd, where there is one.
    pub(crate) fn bell_fd(&self) -> Option<BorrowedFd<'_>> {
        self.eventfd.get().map(AsFd::as_fd)
    }

    /// Silences the eventfd. Before the list is taken, so that nothing that follows goes unheard.
    pub(crate) fn silence(&self) {
        if let Some(fd) = self.eventfd.get() {
            // EAGAIN says that it was silent.
            let _ = rustix::io::read(fd, &mut [0; 8]);
        }
    }

    /// Makes the eventfd readable, where there is one.
    pub(crate) fn ring_the_bell(&self) {
        if let Some(fd) = self.eventfd.get() {
            // It fails only when the counter is full, and then it is ringing already.
            let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
        }
    }

    /// Keeps the bell silent until [`Externals::take`]: the caller is the engine's thread, and
    /// takes the list soon.
    pub(crate) fn attend(&self) {
        self.lock().attended = true;
    }

    /// Moves what has ended into `into`, which is empty.
    pub(crate) fn take(&self, into: &mut Vec<Ended>) {
        let mut list = self.lock();
        list.attended = false;
        std::mem::swap(&mut list.ended, into);
    }

    /// Sleeps until something has ended.
    pub(crate) fn wait(&self) {
        drop(self.bell.wait_while(self.lock(), |list| list.ended.is_empty()).unwrap_or_else(PoisonError::into_inner));
    }

    /// Sleeps until something has ended, but no longer than `limit`. It may return early.
    pub(crate) fn wait_for(&self, limit: Duration) {
        let list = self.lock();
        if list.ended.is_empty() {
            drop(self.bell.wait_timeout(list, limit).unwrap_or_else(PoisonError::into_inner));
        }
    }

    pub(crate) fn put(&self, whose: Whose, result: io::Result<()>) {
        let mut list = self.lock();
        let rings = list.ended.is_empty() && !list.attended;
        list.ended.push((whose, result));
        drop(list);
        if rings {
            self.bell.notify_one();
            self.ring_the_bell();
        }
    }
}

/// A promise to end a request from another thread. Dropped without `complete`, the request ends
/// with an error.
///
/// An engine that is dropped waits for its tickets, so a ticket must not wait for that same thread.
#[derive(Debug)]
pub struct ExternalTicket {
    slot: u32,
    externals: Arc<Externals>,
    sent: bool,
}

impl ExternalTicket {
    pub(crate) fn new(slot: u32, externals: &Arc<Externals>) -> Self {
        Self { slot, externals: Arc::clone(externals), sent: false }
    }

    /// Whether it is answered to the holder of this list.
    pub(crate) fn is_of(&self, externals: &Arc<Externals>) -> bool {
        Arc::ptr_eq(&self.externals, externals)
    }

    /// Ends the request.
    pub fn complete(mut self, result: io::Result<()>) {
        self.sent = true;
        self.externals.put(Whose::Slot(self.slot), result);
    }
}

impl Drop for ExternalTicket {
    fn drop(&mut self) {
        if !self.sent {
            self.externals.put(
                Whose::Slot(self.slot),
                Err(io::Error::other("the thread that was to carry out the request gave it up without a result")),
            );
        }
    }
}
