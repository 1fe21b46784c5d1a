//! Turns a panic in the work of a request into an error of that request.
//!
//! All code that reads tables, plans or commits runs inside [`guarded`], in queues and in the three
//! workers. A panic becomes an error of the request and poisons the disk, as its map may be half
//! changed: every later flush of the disk fails, reads still work. Other disks of the process are
//! not affected.

use diskwright_store::sync::atomic::{AtomicBool, Ordering};
use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// Set for good after a failed sync, after a panic, and if the kernel may still write to a lost
/// request's range: nothing of the disk can be called durable any more.
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

/// Runs code that reads tables or changes the map, and poisons the disk if it panics.
///
/// # Errors
/// Errors of `run`; `Other` after a panic.
pub(crate) fn guarded<T>(poison: &Poison, run: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
        poison.set();
        Err(io::Error::other(
            "internal error: the request was aborted; close the disk, run `diskwright check`, and report the panic message on standard error",
        ))
    })
}
