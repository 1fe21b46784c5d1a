//! Devices that change their size while they are open, and those who want to hear of it.
//!
//! ```text
//!   server ─▶ BlockDevice::watch_size(watcher) ─▶ SizeWatchers (weak) ◀─ tell(size) ─ who makes the device larger
//! ```
//!
//! A watcher is called by the thread that changes the size, after the change, in the order of the
//! changes. The device keeps a weak reference: whoever watches keeps the watcher, and drops it in
//! order to hear no more. A watcher may be called once more while it is dropped by another thread.
//! A watcher must not change the size itself.
//!
//! Whoever asks a device for its geometry again, as a server does for each new client, needs no
//! watcher.
//!
//! Lock: one mutex over the list. It is not held while a watcher is called.

use crate::sync::Mutex;
use std::{
    fmt,
    sync::{Arc, PoisonError, Weak},
};

/// Called with the new size of a device, in bytes.
pub type SizeWatcher = dyn Fn(u64) + Send + Sync;

/// See the module.
#[derive(Default)]
pub struct SizeWatchers(Mutex<Vec<Weak<SizeWatcher>>>);

impl SizeWatchers {
    /// Adds a watcher.
    pub fn add(&self, watcher: &Arc<SizeWatcher>) {
        let mut watchers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watchers.retain(|watcher| watcher.strong_count() > 0);
        watchers.push(Arc::downgrade(watcher));
    }

    /// Calls all watchers that are still there. The caller sees to the order of calls.
    pub fn tell(&self, size_bytes: u64) {
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
    fn who_is_gone_is_told_no_more() {
        let watchers = SizeWatchers::default();
        let heard = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let watcher = |index: usize| -> Arc<SizeWatcher> {
            let heard = Arc::clone(&heard);
            Arc::new(move |size_bytes| heard[index].store(size_bytes, Ordering::Relaxed))
        };
        let (first, second) = (watcher(0), watcher(1));
        watchers.add(&first);
        watchers.add(&second);
        watchers.tell(5);
        drop(first);
        watchers.tell(6);
        assert_eq!([0, 1].map(|index| heard[index].load(Ordering::Relaxed)), [5, 6]);
        watchers.add(&second);
        assert_eq!(watchers.0.lock().unwrap().len(), 2, "one that is gone leaves the list");
    }
}
