//! A panic in the work of one request ends that request.
//!
//! Whoever runs code that reads tables, plans or commits does so inside [`guarded`]: queues, the
//! three clerks. The panic becomes an error of the request. The disk is poisoned, since its map may
//! be half changed: no flush of it succeeds any more, reads go on. Other disks of the process
//! notice nothing.

use diskwright_store::sync::atomic::{AtomicBool, Ordering};
use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// Set for good when a sync failed, when code of the disk panicked, or when it is unknown what the
/// kernel still writes: nothing of the disk can be called durable any more.
#[derive(Debug)]
pub(crate) struct Poison(AtomicBool);

impl Default for Poison {
    fn default() -> Self {
        Self(AtomicBool::new(false))
    }
}

impl Poison {
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Runs what reads tables or changes the map, and poisons the disk when that panics.
///
/// # Errors
/// Those of `run`; `Other` when it panicked.
pub(crate) fn guarded<T>(poison: &Poison, run: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
        poison.set();
        Err(io::Error::other(
            "internal error: the request was given up; close the disk, run `diskwright check`, and report what stands on standard error",
        ))
    })
}
