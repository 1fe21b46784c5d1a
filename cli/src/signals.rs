//! Ctrl-C and SIGTERM.
//!
//! Both signals are blocked in every thread and taken by one thread that waits for them, so no system call is ever
//! interrupted and no handler runs in the middle of anything. While a command has said that it will stop by itself
//! ([`Signals::patient`]), the first signal sets a flag that the command looks at between steps, so that it can take back what it has half
//! made; a second signal, or one when nobody is listening, ends the program at once with 130. Images stand a sudden end at any moment.

use crate::exit;
use nix::sys::signal::{SigSet, Signal};
use std::{
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

#[derive(Debug, Default)]
struct State {
    stop: AtomicBool,
    patient: AtomicUsize,
}

/// Whether the user wants us to stop.
#[derive(Debug, Clone, Default)]
pub struct Signals {
    state: Arc<State>,
}

/// While it lives, a first signal only sets the flag.
#[derive(Debug)]
pub struct Patience {
    state: Arc<State>,
}

impl Signals {
    /// Blocks the signals and starts the thread that waits for them. Call in `main`, before any other thread starts.
    pub fn install() -> Self {
        let signals = Self::default();
        let set = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]);
        if set.thread_block().is_err() {
            return signals;
        }
        let state = Arc::clone(&signals.state);
        // Without the thread the signals would be blocked for good, so they are let through again.
        if thread::Builder::new().name("signals".into()).spawn(move || wait(&set, &state)).is_err() {
            let _ = set.thread_unblock();
        }
        signals
    }

    /// Asks for a flag instead of a sudden end, until the result is dropped.
    pub fn patient(&self) -> Patience {
        self.state.patient.fetch_add(1, Ordering::SeqCst);
        Patience { state: Arc::clone(&self.state) }
    }

    /// Whether a signal came.
    pub fn came(&self) -> bool {
        self.state.stop.load(Ordering::SeqCst)
    }
}

impl Patience {
    /// Whether a signal came.
    pub fn should_stop(&self) -> bool {
        self.state.stop.load(Ordering::SeqCst)
    }
}

impl Drop for Patience {
    fn drop(&mut self) {
        self.state.patient.fetch_sub(1, Ordering::SeqCst);
    }
}

fn wait(set: &SigSet, state: &State) {
    while set.wait().is_ok() {
        if state.patient.load(Ordering::SeqCst) == 0 || state.stop.swap(true, Ordering::SeqCst) {
            process::exit(exit::STOPPED.into());
        }
    }
}
