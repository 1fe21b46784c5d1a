//! Work that other threads and lanes complete for an engine, and how they wake the engine's thread.
//!
//! Two things complete here: the [`ExternalTicket`] of a whole request, and the
//! [`Loan`](crate::Loan) of a part. The holder pushes the result onto a list that both sides share,
//! and wakes the engine by a condition variable (if the engine sleeps on it) and an eventfd (if it
//! sleeps in its ring).
//!
//! One mutex guards the list. It is held only for a push or a swap. No wake-up is sent while the
//! list is *attended* (the engine's own thread is driving a lane and looks at the list next), or if
//! the list was not empty before: then one was already sent. A ticket is answered exactly once, at
//! the latest when it is dropped.

use crate::sync::{Condvar, Mutex, MutexGuard};
use rustix::event::EventfdFlags;
use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::{Arc, OnceLock, PoisonError},
    time::Duration,
};

/// The entry of the engine's tables that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A request's ticket, by the index of its slot.
    Slot(u32),
    /// A part's loan, by the index of the part.
    Part(u32),
}

/// An ended entry and its result.
pub(crate) type Ended = (Origin, io::Result<()>);

#[derive(Debug, Default)]
struct List {
    ended: Vec<Ended>,
    /// The engine's thread will look at the list soon without a wake-up.
    attended: bool,
}

/// Shared by the engine and the holders of its tickets and loans.
#[derive(Debug, Default)]
pub(crate) struct Externals {
    list: Mutex<List>,
    wake: Condvar,
    eventfd: OnceLock<OwnedFd>,
}

impl Externals {
    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The eventfd that becomes readable when something has ended. Created by the first call, which
    /// must come before the engine sleeps in a ring.
    pub(crate) fn eventfd(&self) -> io::Result<RawFd> {
        if let Some(fd) = self.eventfd.get() {
            return Ok(fd.as_raw_fd());
        }
        let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(self.eventfd.get_or_init(|| fd).as_raw_fd())
    }

    /// The eventfd, if it was created.
    pub(crate) fn existing_eventfd(&self) -> Option<BorrowedFd<'_>> {
        self.eventfd.get().map(AsFd::as_fd)
    }

    /// Clears the eventfd. Call before taking the list, so that no later entry is missed.
    pub(crate) fn clear_eventfd(&self) {
        if let Some(fd) = self.eventfd.get() {
            // EAGAIN means that it was clear already.
            let _ = rustix::io::read(fd, &mut [0; 8]);
        }
    }

    /// Makes the eventfd readable, if it was created.
    pub(crate) fn signal_eventfd(&self) {
        if let Some(fd) = self.eventfd.get() {
            // This fails only if the counter is full; the eventfd is readable then.
            let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
        }
    }

    /// Suppresses wake-ups until [`Externals::take`]. For the engine's own thread, which takes the
    /// list soon.
    pub(crate) fn attend(&self) {
        self.lock().attended = true;
    }

    /// Moves all ended entries into `into`, which must be empty.
    pub(crate) fn take(&self, into: &mut Vec<Ended>) {
        let mut list = self.lock();
        list.attended = false;
        std::mem::swap(&mut list.ended, into);
    }

    /// Sleeps until something has ended.
    pub(crate) fn wait(&self) {
        drop(self.wake.wait_while(self.lock(), |list| list.ended.is_empty()).unwrap_or_else(PoisonError::into_inner));
    }

    /// Sleeps until something has ended, at most for `limit`. May return early.
    pub(crate) fn wait_for(&self, limit: Duration) {
        let list = self.lock();
        if list.ended.is_empty() {
            drop(self.wake.wait_timeout(list, limit).unwrap_or_else(PoisonError::into_inner));
        }
    }

    pub(crate) fn put(&self, origin: Origin, result: io::Result<()>) {
        let mut list = self.lock();
        let rings = list.ended.is_empty() && !list.attended;
        list.ended.push((origin, result));
        drop(list);
        if rings {
            self.wake.notify_one();
            self.signal_eventfd();
        }
    }
}

/// Obliges the holder to complete a request from another thread. If a ticket is dropped without
/// [`complete`](Self::complete), the request ends with an error.
///
/// An engine that is dropped waits for its tickets, so the holder must not wait for the engine's
/// thread.
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

    /// Whether the ticket belongs to the engine with this list.
    pub(crate) fn is_of(&self, externals: &Arc<Externals>) -> bool {
        Arc::ptr_eq(&self.externals, externals)
    }

    /// Ends the request.
    pub fn complete(mut self, result: io::Result<()>) {
        self.sent = true;
        self.externals.put(Origin::Slot(self.slot), result);
    }
}

impl Drop for ExternalTicket {
    fn drop(&mut self) {
        if !self.sent {
            self.externals.put(
                Origin::Slot(self.slot),
                Err(io::Error::other("the thread that carried out the request ended without a result")),
            );
        }
    }
}
