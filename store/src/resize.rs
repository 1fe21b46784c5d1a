//! Watching the size of devices that can be resized while they are open.
//!
//! ```text
//!   server ─▶ BlockDevice::watch_size(watcher) ─▶ SizeWatchers (weak) ◀─ notify(size) ─ resize
//! ```
//!
//! The thread that changes the size calls the watchers after the change, in the order of the
//! changes. The device keeps weak references: the owner of a watcher drops it to stop the calls. A
//! watcher may be called once more while another thread drops it. A watcher must not change the
//! size itself.
//!
//! Code that asks for the geometry again anyway, as a server does for each new client, needs no
//! watcher.
//!
//! Lock: one mutex guards the list. It is not held while a watcher is called.

use crate::sync::Mutex;
use std::{
    fmt,
    sync::{Arc, PoisonError, Weak},
};

/// A callback with the new size of a device in bytes.
pub type SizeWatcher = dyn Fn(u64) + Send + Sync;

/// The watchers of one device; see the module documentation.
#[derive(Default)]
pub struct SizeWatchers(Mutex<Vec<Weak<SizeWatcher>>>);

impl SizeWatchers {
    /// Adds a watcher and forgets those that were dropped.
    pub fn add(&self, watcher: &Arc<SizeWatcher>) {
        let mut watchers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watchers.retain(|watcher| watcher.strong_count() > 0);
        watchers.push(Arc::downgrade(watcher));
    }

    /// Calls all watchers that still exist. The caller must call `tell` in the order of the
    /// changes.
    pub fn notify(&self, size_bytes: u64) {
        let watchers = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        watchers.iter().filter_map(Weak::upgrade).for_each(|watcher| watcher(size_bytes));
    }
}

impl fmt::Debug for SizeWatchers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SizeWatchers")
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn dropped_watchers_are_not_called() {
        let watchers = SizeWatchers::default();
        let heard = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let watcher = |index: usize| -> Arc<SizeWatcher> {
            let heard = Arc::clone(&heard);
            Arc::new(move |size_bytes| heard[index].store(size_bytes, Ordering::Relaxed))
        };
        let (first, second) = (watcher(0), watcher(1));
        watchers.add(&first);
        watchers.add(&second);
        watchers.notify(5);
        drop(first);
        watchers.notify(6);
        assert_eq!([0, 1].map(|index| heard[index].load(Ordering::Relaxed)), [5, 6]);
        watchers.add(&second);
        assert_eq!(watchers.0.lock().unwrap().len(), 2, "a dropped watcher is removed");
    }
}
