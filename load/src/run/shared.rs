//! State that the threads of a phase and its conductor share: the clock, the window, the end of the
//! load, and the first failure.
//!
//! Measuring threads read it with relaxed loads from a cache line that seldom changes. The mutex
//! `first` guards the first failure, and is locked only after a failure.

use crate::run::{cpu::Reading, ticks::Ticks};
use diskwright_store::Operation;
use std::{
    io,
    sync::{
        Mutex, OnceLock, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};

/// A time that is not known yet, or that is never reached.
pub(crate) const NEVER: u64 = u64::MAX;

/// Shared state of a phase.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Locked for writing until all threads are ready. Each thread waits for it as a reader.
    pub(crate) gate: RwLock<()>,
    origin: OnceLock<Instant>,
    /// Start and end of the window and end of the load, from the start of the phase.
    window_start_ns: AtomicU64,
    window_end_ns: AtomicU64,
    stop_ns: AtomicU64,
    /// The boundaries of bins.
    pub(crate) ticks: Ticks,
    pub(crate) cpu_start: Reading,
    pub(crate) cpu_end: Reading,
    pub(crate) keep_going: bool,
    pub(crate) record_latency: bool,
    /// A thread could not open its queues, so none starts.
    aborted: AtomicBool,
    errors: AtomicU64,
    first: Mutex<Option<String>>,
}

/// A request that failed.
#[derive(Debug)]
pub(crate) struct Failure<'a> {
    pub(crate) target: &'a str,
    pub(crate) operation: Operation,
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u64,
    pub(crate) why: &'a io::Error,
}

impl Shared {
    pub(crate) fn new(ticks: Ticks, keep_going: bool, record_latency: bool) -> Self {
        Self {
            gate: RwLock::new(()),
            origin: OnceLock::new(),
            window_start_ns: AtomicU64::new(NEVER),
            window_end_ns: AtomicU64::new(NEVER),
            stop_ns: AtomicU64::new(NEVER),
            ticks,
            cpu_start: Reading::default(),
            cpu_end: Reading::default(),
            keep_going,
            record_latency,
            aborted: AtomicBool::new(false),
            errors: AtomicU64::new(0),
            first: Mutex::new(None),
        }
    }

    /// Starts the clock of the phase. `at` is its start.
    pub(crate) fn begin(&self, at: Instant) {
        self.origin.get_or_init(|| at);
    }

    /// Start of the phase. Starts the clock if it has not started.
    pub(crate) fn origin(&self) -> Instant {
        *self.origin.get_or_init(Instant::now)
    }

    /// Sets the window and the end of the load. An earlier end of the load is kept.
    pub(crate) fn plan(&self, window_start_ns: u64, window_end_ns: u64, stop_ns: u64) {
        self.window_start_ns.store(window_start_ns, Ordering::Relaxed);
        self.window_end_ns.store(window_end_ns, Ordering::Relaxed);
        self.stop_ns.fetch_min(stop_ns, Ordering::Relaxed);
    }

    /// Ends the load at `now_ns`, unless its end is earlier.
    pub(crate) fn stop(&self, now_ns: u64) {
        self.stop_ns.fetch_min(now_ns, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn stop_ns(&self) -> u64 {
        self.stop_ns.load(Ordering::Relaxed)
    }

    pub(crate) fn window_start_ns(&self) -> u64 {
        self.window_start_ns.load(Ordering::Relaxed)
    }

    /// End of the window: as planned, or the end of the load if that is earlier.
    pub(crate) fn window_end_ns(&self) -> u64 {
        self.window_end_ns.load(Ordering::Relaxed).min(self.stop_ns())
    }

    pub(crate) fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// Counts a failed request, and ends the load unless `keep_going` is set.
    #[cold]
    pub(crate) fn fail(&self, failure: &Failure<'_>, now_ns: u64) {
        let Failure { target, operation, offset_bytes, len_bytes, why } = failure;
        let verb = crate::error::verb(*operation);
        self.fail_as(now_ns, || match operation {
            Operation::Flush => format!("{target}: the {verb} failed: {why}"),
            _ => format!("{target}: the {verb} of {len_bytes} bytes at offset {offset_bytes} failed: {why}"),
        });
    }

    /// Counts a failure of any kind, described by a sentence.
    #[cold]
    pub(crate) fn fail_as(&self, now_ns: u64, what: impl FnOnce() -> String) {
        self.errors.fetch_add(1, Ordering::Relaxed);
        self.first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(what);
        if !self.keep_going {
            self.stop(now_ns);
        }
    }

    /// The first failure and the number of failures.
    pub(crate) fn failures(&self) -> Option<(String, u64)> {
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        Some((first, self.errors.load(Ordering::Relaxed)))
    }

    pub(crate) fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }
}
