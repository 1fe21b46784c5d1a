//! Locks, atomics, channels and threads of what several threads do to one disk, in one place:
//! std's.
//!
//! With the feature `shuttle`, which no program has, they are those of a scheduler that runs one
//! thread at a time, chooses at each of these operations who goes on, and repeats by a seed what it
//! chose: so orders are tried that a machine comes upon once a year
//! (`proving/tests/interleavings.rs`). Only what a disk in memory uses goes through here. A
//! scheduled thread must not wait for another by any other means, so nothing of this is called
//! within the initialisation of a `OnceLock`.

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
