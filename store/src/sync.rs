//! Locks, atomics, channels and threads of what several threads do to one disk, in one place: so that a scheduler of tests, which chooses who goes on at each of them, can take
//! the place of std's. Only what a disk in memory uses goes through here.

pub use std::{
    sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockWriteGuard, atomic, mpsc},
    thread,
};
