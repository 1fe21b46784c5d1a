//! A check that a thread does no blocking I/O while it holds a lock that others wait for.
//!
//! ```text
//!   lock guard holds a NoIo ──▶ count of this thread + 1
//!   FileStore, MemoryStore, ... ──▶ assert_allowed(): panics if the count is not 0
//! ```
//!
//! In builds with debug assertions a violation panics, so every test that runs the code checks it.
//! In other builds [`NoIo`] has no size and nothing is counted. Nor with the feature `shuttle`,
//! whose scheduled threads share one thread of the system.
//!
//! Invariant: the count of a thread is the number of its live [`NoIo`]s, which cannot be sent to
//! another thread.

use std::marker::PhantomData;

#[cfg(all(debug_assertions, not(feature = "shuttle")))]
thread_local! {
    static FORBIDDEN: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// While this value lives, blocking calls to stores are forbidden on this thread.
#[derive(Debug)]
pub struct NoIo {
    /// Not `Send`: the count is the thread's.
    thread: PhantomData<*const ()>,
}

impl NoIo {
    /// Forbids blocking calls to stores on this thread, until the value is dropped.
    pub fn begin() -> Self {
        #[cfg(all(debug_assertions, not(feature = "shuttle")))]
        FORBIDDEN.with(|count| count.set(count.get() + 1));
        Self { thread: PhantomData }
    }
}

#[cfg(all(debug_assertions, not(feature = "shuttle")))]
impl Drop for NoIo {
    fn drop(&mut self) {
        FORBIDDEN.with(|count| count.set(count.get() - 1));
    }
}

/// Called by stores at the beginning of every method that can wait for a device.
///
/// # Panics
/// With debug assertions, if this thread holds a [`NoIo`].
#[inline]
#[track_caller]
pub fn assert_io_allowed() {
    #[cfg(all(debug_assertions, not(feature = "shuttle")))]
    FORBIDDEN.with(|count| {
        assert!(count.get() == 0, "blocking I/O while this thread holds a lock under which no I/O may happen")
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(not(feature = "shuttle"))]
    fn io_is_forbidden_until_the_last_guard_is_dropped() {
        let outer = NoIo::begin();
        let inner = NoIo::begin();
        drop(inner);
        assert!(std::panic::catch_unwind(assert_io_allowed).is_err());
        std::thread::spawn(assert_io_allowed).join().expect("other threads are not concerned");
        drop(outer);
        assert_io_allowed();
    }
}
