//! Ctrl-C, SIGTERM and SIGHUP; and SIGXFSZ, which must not end the program.
//!
//! The signals are blocked in every thread and taken by one thread that waits for them, so no
//! system call is ever interrupted and no handler runs in the middle of anything. While a command
//! has said that it will stop by itself ([`Signals::patient`]), the first signal sets a flag that
//! the command looks at between steps, so that it can take back what it has half made; a later
//! signal, or one when nobody is listening, ends the program at once with 130. Images stand a
//! sudden end at any moment.
//!
//! *Later* means by a second: `timeout` sends its signal twice, to the program and to the group
//! that the program is in, and a terminal that is closed sends a hang-up to whoever it likes. A
//! hang-up is a signal like the others, unless a command asked to be told of it
//! ([`Patience::listen_for_hangups`]).

use crate::exit;
use nix::sys::signal::{SigSet, Signal};
use std::{
    process,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Lets a write beyond `ulimit -f` fail with EFBIG, where the kernel would else end the whole
/// program by SIGXFSZ, a server with all its clients included. The signal is blocked, which has the
/// effect of ignoring it; std unblocks all signals in the programs that it starts, so those have it
/// as usual. Call in `main`, before any other thread starts.
pub fn let_full_files_fail() {
    // Where that fails the program still works, but ends at that limit.
    let _ = SigSet::from(Signal::SIGXFSZ).thread_block();
}

/// What the shell calls the end by a hang-up: 128 and the signal's number.
const HUNG_UP: i32 = 129;
/// Signals that come within this time of the first are the same wish.
const SAME_WISH: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct State {
    stop: AtomicBool,
    patient: AtomicUsize,
    wants_hangups: AtomicBool,
    /// Hang-ups that nobody has taken yet.
    hangups: AtomicUsize,
    /// Rung, under the lock, when a signal has come.
    bell: Condvar,
    lock: Mutex<()>,
}

impl State {
    fn ring(&self) {
        let _locked = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.bell.notify_all();
    }
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
    /// Blocks the signals and starts the thread that waits for them. Call in `main`, before any
    /// other thread starts.
    pub fn install() -> Self {
        let signals = Self::default();
        let mut set = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]);
        if !hangups_are_ignored() {
            set.add(Signal::SIGHUP);
        }
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

    /// From now on a hang-up is told by [`Patience::was_hung_up`] and does not end the program.
    pub fn listen_for_hangups(&self) {
        self.state.wants_hangups.store(true, Ordering::SeqCst);
    }

    /// Whether a hang-up came since this was last asked.
    pub fn was_hung_up(&self) -> bool {
        self.state.hangups.swap(0, Ordering::SeqCst) > 0
    }

    /// Sleeps until a signal comes, for `time` at most.
    pub fn sleep(&self, time: Duration) {
        let quiet = |(): &mut ()| !self.should_stop() && self.state.hangups.load(Ordering::SeqCst) == 0;
        let locked = self.state.lock.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.state.bell.wait_timeout_while(locked, time, quiet));
    }
}

impl Drop for Patience {
    fn drop(&mut self) {
        self.state.patient.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Whether the program was started under `nohup`. A blocked signal would be seen although it is
/// ignored.
fn hangups_are_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 != 0)
}

fn wait(set: &SigSet, state: &State) {
    let mut first: Option<Instant> = None;
    while let Ok(signal) = set.wait() {
        if signal == Signal::SIGHUP && state.wants_hangups.load(Ordering::SeqCst) {
            state.hangups.fetch_add(1, Ordering::SeqCst);
            state.ring();
            continue;
        }
        let is_later = first.is_some_and(|first| first.elapsed() > SAME_WISH);
        if state.patient.load(Ordering::SeqCst) == 0 && first.is_none() || is_later {
            process::exit(if signal == Signal::SIGHUP { HUNG_UP } else { exit::STOPPED.into() });
        }
        first.get_or_insert_with(Instant::now);
        state.stop.store(true, Ordering::SeqCst);
        state.ring();
    }
}
