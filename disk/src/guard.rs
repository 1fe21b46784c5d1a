//! A panic in the work of one request ends that request.
//!
//! Whoever runs code that reads tables, plans or commits does so inside [`guarded`]: queues, the three clerks. The panic becomes
//! an error of the request. The disk is poisoned, since its map may be half changed: no flush of it succeeds any more,
//! reads go on. Other disks of the process notice nothing.

use crate::shared::Shared;
use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// Runs what reads tables or changes the map, and poisons the disk when that panics.
///
/// # Errors
/// Those of `run`; `Other` when it panicked.
pub(crate) fn guarded<T>(shared: &Shared, run: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
        shared.poison();
        Err(io::Error::other(
            "internal error: the request was given up; close the disk, run `diskwright check`, and report what stands on standard error",
        ))
    })
}
