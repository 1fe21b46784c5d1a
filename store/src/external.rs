//! Requests that another thread ends, and how it wakes the engine's thread.
//!
//! The engine hands out an [`ExternalTicket`]; whoever holds it puts the result on a list that both share, and rings a bell:
//! a condition variable, for an engine that sleeps on it, and an eventfd, for one that sleeps in its ring. One mutex guards
//! the list; it is held for a push or a swap only. A ticket is answered exactly once, at the latest when it is dropped.

use crate::sync::{Condvar, Mutex};
use rustix::event::EventfdFlags;
use std::{
    io,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    sync::{Arc, OnceLock, PoisonError},
};

/// A slot of the engine, and how its request ended.
pub(crate) type Ended = (u32, io::Result<()>);

/// What the engine and the holders of its tickets share.
#[derive(Debug, Default)]
pub(crate) struct Externals {
    ended: Mutex<Vec<Ended>>,
    bell: Condvar,
    eventfd: OnceLock<OwnedFd>,
}

impl Externals {
    /// The eventfd that becomes readable when something has ended. To be asked for before the first ticket is given out.
    pub(crate) fn eventfd(&self) -> io::Result<RawFd> {
        if let Some(fd) = self.eventfd.get() {
            return Ok(fd.as_raw_fd());
        }
        let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(self.eventfd.get_or_init(|| fd).as_raw_fd())
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

    /// Moves what has ended into `into`, which is empty.
    pub(crate) fn take(&self, into: &mut Vec<Ended>) {
        std::mem::swap(&mut *self.ended.lock().unwrap_or_else(PoisonError::into_inner), into);
    }

    /// Sleeps until something has ended.
    pub(crate) fn wait(&self) {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.bell.wait_while(ended, |ended| ended.is_empty()).unwrap_or_else(PoisonError::into_inner));
    }

    fn put(&self, slot: u32, result: io::Result<()>) {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).push((slot, result));
        self.bell.notify_one();
        self.ring_the_bell();
    }
}

/// A promise to end a request from another thread. Dropped without `complete`, the request ends with an error.
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

    /// Ends the request.
    pub fn complete(mut self, result: io::Result<()>) {
        self.sent = true;
        self.externals.put(self.slot, result);
    }
}

impl Drop for ExternalTicket {
    fn drop(&mut self) {
        if !self.sent {
            self.externals.put(
                self.slot,
                Err(io::Error::other("the thread that was to carry out the request gave it up without a result")),
            );
        }
    }
}
