//! The two ordered passes that make a VHD durable, and the gate by which concurrent flushes share them.
//!
//! ```text
//!   snapshot (under the image lock)      what was committed before this instant
//!   pass 1   bitmaps of new dynamic blocks   invisible before their BAT entry, so no order is needed
//!            sync                            payload and those bitmaps are durable
//!   pass 2   bitmaps of differencing blocks; BAT entries      each shows only what pass 1 made durable
//!            sync                            (left out when there was nothing to write)
//! ```
//!
//! Within pass 2 there is no order, and none is needed. A bit shows a sector whose payload is durable. An entry shows a block
//! whose bitmap is either written, or still the zeros of its fresh space, which pass 1 made durable and which show the
//! parent, as before the flush. Sectors may be torn apart at 512 bytes: entries and bits are independent of each other.
//!
//! [`FlushGate`]: a flush is done by any pass that *began* after the call. One caller runs; those that come meanwhile wait for the
//! next pass, which one of them runs for all. After a failed sync nothing can be known to be durable, so the gate stays
//! shut for ever.

use crate::{ImageError, Result};
#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken};
use diskwright_store::{
    Store,
    sync::{Condvar, Mutex, MutexGuard},
};
use std::sync::PoisonError;

#[derive(Debug, Default)]
struct Gate {
    running: bool,
    /// Number of the last pass that began.
    begun: u64,
    /// Number of the last pass that succeeded.
    done: u64,
    /// Why a sync failed, once it has.
    failure: Option<String>,
}

impl Gate {
    fn check(&self, store: &dyn Store) -> Result<()> {
        match &self.failure {
            Some(reason) => Err(ImageError::Poisoned { path: store.name().to_owned(), reason: reason.clone() }),
            None => Ok(()),
        }
    }
}

/// Lets concurrent flushes share passes. See the module.
#[derive(Debug, Default)]
pub(super) struct FlushGate {
    gate: Mutex<Gate>,
    changed: Condvar,
}

/// Clears `running` even when a pass panics, so that others do not wait for ever.
struct Running<'a>(&'a FlushGate);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.lock().running = false;
        self.0.changed.notify_all();
    }
}

impl FlushGate {
    fn lock(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns when a pass that began after this call has succeeded; runs `pass` for that if nobody else does.
    ///
    /// # Errors
    /// What `pass` gave, to the caller that ran it (others try for themselves); `Poisoned` once a sync has failed.
    pub fn flush(&self, store: &dyn Store, pass: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut gate = self.lock();
        let wanted = gate.begun + 1;
        #[cfg(feature = "shuttle")]
        let wanted = wanted - u64::from(gate.running && is_broken(Rule::WaitsForALaterCycle));
        loop {
            gate.check(store)?;
            if gate.done >= wanted {
                return Ok(());
            }
            if !gate.running {
                break;
            }
            gate = self.changed.wait(gate).unwrap_or_else(PoisonError::into_inner);
        }
        gate.running = true;
        gate.begun += 1;
        let number = gate.begun;
        drop(gate);
        let running = Running(self);
        let result = pass();
        if result.is_ok() {
            self.lock().done = number;
        }
        drop(running);
        result
    }

    /// Refuses when a sync has failed before.
    ///
    /// # Errors
    /// [`ImageError::Poisoned`].
    pub fn check(&self, store: &dyn Store) -> Result<()> {
        self.lock().check(store)
    }

    /// Syncs the store; a failure shuts the gate.
    pub fn sync(&self, store: &dyn Store, doing: &'static str) -> Result<()> {
        store.sync_data().map_err(|e| {
            self.lock().failure.get_or_insert_with(|| e.to_string());
            ImageError::io(doing, store, 0, e)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_store::MemoryStore;
    use std::sync::{
        Arc, Barrier,
        atomic::{AtomicU32, Ordering},
    };

    #[test]
    fn a_pass_serves_all_who_came_before_it_began() {
        let gate = Arc::new(FlushGate::default());
        let store = Arc::new(MemoryStore::new("x"));
        let passes = Arc::new(AtomicU32::new(0));
        let inside = Arc::new(Barrier::new(2));
        let first = {
            let (gate, store, passes, inside) = (gate.clone(), store.clone(), passes.clone(), inside.clone());
            std::thread::spawn(move || {
                gate.flush(&*store, || {
                    inside.wait();
                    inside.wait();
                    passes.fetch_add(1, Ordering::SeqCst);
                    Ok(())
                })
                .unwrap();
            })
        };
        inside.wait();
        // The first pass has begun: whoever comes now must not be served by it.
        let late: Vec<_> = (0..4)
            .map(|_| {
                let (gate, store, passes) = (gate.clone(), store.clone(), passes.clone());
                std::thread::spawn(move || {
                    gate.flush(&*store, || {
                        passes.fetch_add(1, Ordering::SeqCst);
                        Ok(())
                    })
                    .unwrap();
                    assert!(passes.load(Ordering::SeqCst) >= 2);
                })
            })
            .collect();
        inside.wait();
        first.join().unwrap();
        late.into_iter().for_each(|thread| thread.join().unwrap());
        assert!((2..=5).contains(&passes.load(Ordering::SeqCst)));
    }

    #[test]
    fn a_failed_pass_serves_nobody() {
        let gate = FlushGate::default();
        let store = MemoryStore::new("x");
        let full = || ImageError::io("write", &store, 0, std::io::ErrorKind::StorageFull.into());
        assert!(gate.flush(&store, || Err(full())).is_err());
        let mut ran = false;
        gate.flush(&store, || {
            ran = true;
            Ok(())
        })
        .unwrap();
        assert!(ran);
    }
}
