//! The durability barrier: how an image writes metadata and makes it durable, and how concurrent
//! flushes share one pass.
//!
//! ```text
//! write ─▶ store                        bytes in place, not durable
//! sync  ─▶ store.sync_data              if it fails: poisoned for good
//! share(pass) ─┬─ no flush in progress: run the pass
//!              └─ another flush runs: wait; a pass that begins after this call serves all
//! ```
//!
//! Poisoning. It is unknown what a failed sync lost: the kernel reports a failed write-back once,
//! drops the pages, and the next sync succeeds. So the barrier keeps the first failure and from
//! then on refuses everything that must be durable, giving that reason. A sync that began before
//! another one failed is refused too when it returns, since it may have missed what the other lost.
//! An error of a plain write poisons nothing.
//!
//! Sharing. A flush is served by any pass that *began* after the call; an earlier pass may have
//! taken its snapshot before the caller's writes. One caller runs the pass. Callers that come
//! meanwhile wait, and one of them runs the next pass for all. A pass that fails serves no one:
//! each waiting caller tries again itself.
//!
//! One mutex guards both. It is never held while the store is called or a pass runs.

#[cfg(feature = "shuttle")]
use crate::sync::broken::{Rule, is_broken};
use crate::{
    store::Store,
    sync::{Condvar, Mutex, MutexGuard},
};
use std::{
    io,
    path::PathBuf,
    sync::{Arc, PoisonError},
};

/// Why data cannot be made durable.
#[derive(Debug, thiserror::Error)]
pub enum BarrierError {
    /// This sync failed.
    #[error("{}: cannot {doing}: {source}", path.display())]
    Sync {
        /// The purpose, as in "make the footer durable".
        doing: &'static str,
        /// Name of the store.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// An earlier sync failed.
    #[error("{}: an earlier sync failed ({reason}), so no later write can be made durable; close the disk, check the device below it, open the disk again", path.display())]
    Poisoned {
        /// Name of the store.
        path: PathBuf,
        /// The first failure.
        reason: String,
    },
}

#[derive(Debug, Default)]
struct State {
    /// The first failure of a sync.
    failure: Option<String>,
    /// Whether a pass is running.
    running: bool,
    /// Number of the last pass that began.
    begun: u64,
    /// Number of the last pass that succeeded.
    succeeded: u64,
}

/// The barrier of one open store; see the module documentation.
#[derive(Debug)]
pub struct Barrier {
    store: Arc<dyn Store>,
    state: Mutex<State>,
    pass_ended: Condvar,
}

/// Ends the pass, also if it panics.
struct PassGuard<'a> {
    barrier: &'a Barrier,
    number: u64,
    succeeded: bool,
}

impl Drop for PassGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.barrier.lock();
        state.running = false;
        if self.succeeded {
            state.succeeded = self.number;
        }
        drop(state);
        self.barrier.pass_ended.notify_all();
    }
}

impl Barrier {
    /// A barrier over `store`. Create only one for each open store: two would not know of each
    /// other's failures.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self { store, state: Mutex::default(), pass_ended: Condvar::default() }
    }

    /// The store to which the barrier writes.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_state(&self, state: &State) -> Result<(), BarrierError> {
        match &state.failure {
            None => Ok(()),
            Some(reason) => Err(BarrierError::Poisoned { path: self.store.name().to_owned(), reason: reason.clone() }),
        }
    }

    /// Fails if a sync has failed before.
    ///
    /// # Errors
    /// [`BarrierError::Poisoned`].
    pub fn check(&self) -> Result<(), BarrierError> {
        self.check_state(&self.lock())
    }

    /// Writes all of `bytes`. They are durable after a later [`Barrier::sync`].
    ///
    /// # Errors
    /// The store's errors. They do not poison the barrier.
    pub fn write(&self, bytes: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.store.write_at(bytes, offset_bytes)
    }

    /// Makes everything durable that was written before the call. `doing` is the purpose named in
    /// an error, as in "make the footer durable".
    ///
    /// # Errors
    /// [`BarrierError`], and from then on always.
    pub fn sync(&self, doing: &'static str) -> Result<(), BarrierError> {
        self.check()?;
        let synced = self.store.sync_data();
        self.settle(doing, synced)
    }

    /// Records the result of a sync of the store that was made elsewhere (by an engine's ring), and
    /// returns the result that counts.
    ///
    /// # Errors
    /// [`BarrierError`], and from then on always.
    pub fn settle(&self, doing: &'static str, synced: io::Result<()>) -> Result<(), BarrierError> {
        let mut state = self.lock();
        match synced {
            Ok(()) => self.check_state(&state),
            Err(source) => {
                state.failure.get_or_insert_with(|| source.to_string());
                Err(BarrierError::Sync { doing, path: self.store.name().to_owned(), source })
            }
        }
    }

    /// Returns when a pass that began after this call has succeeded. Runs `pass` itself if no other
    /// caller does.
    ///
    /// # Errors
    /// The error of `pass`, to the caller that ran it (the others try again themselves);
    /// [`BarrierError::Poisoned`] if a sync has failed.
    pub fn share<E: From<BarrierError>>(&self, pass: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let mut state = self.lock();
        let wanted = state.begun + 1;
        #[cfg(feature = "shuttle")]
        let wanted = wanted - u64::from(state.running && is_broken(Rule::WaitsForALaterCycle));
        loop {
            self.check_state(&state)?;
            if state.succeeded >= wanted {
                return Ok(());
            }
            if !state.running {
                break;
            }
            state = self.pass_ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.running = true;
        state.begun += 1;
        let mut turn = PassGuard { barrier: self, number: state.begun, succeeded: false };
        drop(state);
        pass()?;
        turn.succeeded = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;
    use std::{
        sync::atomic::{AtomicU32, Ordering},
        thread,
    };

    #[derive(Debug, PartialEq, Eq)]
    enum Failed {
        Barrier,
        Pass,
    }

    impl From<BarrierError> for Failed {
        fn from(_: BarrierError) -> Self {
            Self::Barrier
        }
    }

    fn barrier() -> (Arc<MemoryStore>, Arc<Barrier>) {
        let store = Arc::new(MemoryStore::new("x"));
        (Arc::clone(&store), Arc::new(Barrier::new(store)))
    }

    #[test]
    fn a_pass_serves_all_who_came_before_it_began() {
        let (_, gate) = barrier();
        let passes = Arc::new(AtomicU32::new(0));
        let inside = Arc::new(std::sync::Barrier::new(2));
        let first = {
            let (gate, passes, inside) = (gate.clone(), passes.clone(), inside.clone());
            thread::spawn(move || {
                let pass = || -> Result<(), BarrierError> {
                    inside.wait();
                    inside.wait();
                    passes.fetch_add(1, Ordering::SeqCst);
                    Ok(())
                };
                gate.share(pass).unwrap();
            })
        };
        inside.wait();
        // The first pass has begun, so it must not serve callers that come now.
        let late: Vec<_> = (0..4)
            .map(|_| {
                let (gate, passes) = (gate.clone(), passes.clone());
                thread::spawn(move || {
                    let pass = || -> Result<(), BarrierError> {
                        passes.fetch_add(1, Ordering::SeqCst);
                        Ok(())
                    };
                    gate.share(pass).unwrap();
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
    fn a_failed_pass_serves_no_one_and_poisons_nothing() {
        let (_, gate) = barrier();
        assert_eq!(gate.share(|| Err(Failed::Pass)), Err(Failed::Pass));
        let mut ran = false;
        let pass = || -> Result<(), Failed> {
            ran = true;
            Ok(())
        };
        gate.share(pass).unwrap();
        assert!(ran);
        let panics = Arc::clone(&gate);
        let pass = || -> Result<(), Failed> { panic!("a pass that panics") };
        assert!(thread::spawn(move || panics.share(pass)).join().is_err());
        gate.share(|| -> Result<(), Failed> { Ok(()) }).unwrap();
    }

    #[test]
    fn after_a_failed_sync_nothing_is_durable() {
        let (store, barrier) = barrier();
        barrier.write(&[1; 8], 0).unwrap();
        store.limit(8);
        assert!(barrier.write(&[1; 8], 8).is_err());
        barrier.sync("test").unwrap();
        store.fail_syncs(true);
        assert!(matches!(barrier.sync("test"), Err(BarrierError::Sync { doing: "test", .. })));
        store.fail_syncs(false);
        assert!(matches!(barrier.sync("test"), Err(BarrierError::Poisoned { .. })));
        assert!(matches!(barrier.check(), Err(BarrierError::Poisoned { .. })));
        assert!(matches!(barrier.share(|| -> Result<(), BarrierError> { Ok(()) }), Err(BarrierError::Poisoned { .. })));
        assert_eq!(store.to_vec()[..8], [1; 8]);
    }

    /// A sync that began before another one failed must fail too: it may have missed what the other
    /// lost.
    #[test]
    fn a_sync_in_progress_fails_if_another_one_failed() {
        let (_, barrier) = barrier();
        let elsewhere = barrier.settle("test", Err(io::ErrorKind::StorageFull.into()));
        assert!(matches!(elsewhere, Err(BarrierError::Sync { .. })));
        assert!(
            matches!(barrier.settle("test", Ok(())), Err(BarrierError::Poisoned { reason, .. }) if !reason.is_empty())
        );
    }
}
