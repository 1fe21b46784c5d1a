//! A slab that one thread has for itself: for first writes, zeroing, resyncs and moves.
//!
//! Transfers that hold the slab are waited for, and there are no new ones until the claim is
//! dropped. Who claims several slabs and waits takes them in the order of their indices.

use crate::{pool::Pool, slab_table::Entry};

/// A slab that this thread has for itself.
pub(crate) struct Busy<'a> {
    pool: &'a Pool,
    pub(crate) entry: &'a Entry,
}

impl<'a> Busy<'a> {
    /// Waits until nobody uses the slab.
    pub(crate) fn wait(pool: &'a Pool, entry: &'a Entry) -> Self {
        while !entry.set_busy() {
            pool.wait_not_busy();
        }
        let busy = Self { pool, entry };
        while entry.load().is_held() {
            pool.wait_not_busy();
        }
        busy
    }

    /// The slab, if nobody uses it now.
    pub(crate) fn try_now(pool: &'a Pool, entry: &'a Entry) -> Option<Self> {
        if !entry.set_busy() {
            return None;
        }
        let busy = Self { pool, entry };
        (!entry.load().is_held()).then_some(busy)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.entry.clear_busy();
        self.pool.wake_not_busy();
    }
}
