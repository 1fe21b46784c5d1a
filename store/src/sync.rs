//! Locks, atomics, channels and threads for code that several threads run on one disk: those of
//! std.
//!
//! The feature `shuttle`, which only tests enable, replaces them by those of a scheduler. It runs
//! one thread at a time, chooses at each of these operations which thread continues, and can repeat
//! its choices from a seed. So it finds interleavings that are very rare on a real machine
//! (`proof/proving/tests/interleavings.rs`). Only the code for a disk in memory uses this module. A
//! scheduled thread must not wait for another by any other means, so none of these operations may
//! be called within the initialisation of a `OnceLock`.

#[cfg(feature = "shuttle")]
pub mod broken;

#[cfg(feature = "shuttle")]
pub use shuttle::{
    sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockWriteGuard, atomic, mpsc},
    thread,
};
#[cfg(not(feature = "shuttle"))]
pub use std::{
    sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockWriteGuard, atomic, mpsc},
    thread,
};
