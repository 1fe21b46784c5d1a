//! Ctrl-C, SIGTERM and SIGHUP; and SIGXFSZ, which must not end the program.
//!
//! The signals are blocked in every thread, and one thread waits for them. So no system call is
//! interrupted, and no handler runs. While a command holds a [`Patience`], the first signal sets a
//! flag that the command looks at between steps, so that it can remove what it has begun. A later
//! signal, or a first one without a `Patience`, ends the program at once with 130. Images survive
//! a sudden end at any moment.
//!
//! *Later* means more than a second later: `timeout` sends its signal twice, to the program and to
//! its process group, and closing a terminal can send several SIGHUP. SIGHUP is handled like the
//! others unless a command listens for it ([`Patience::listen_for_hangups`]).

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

/// Makes a write beyond `ulimit -f` fail with EFBIG. By default the kernel ends the program by
/// SIGXFSZ, a server with all its clients too. The signal is blocked, which has the effect of
/// ignoring it. Child processes have it as usual, because std unblocks all signals in them. Call in
/// `main`, before any other thread starts.
pub fn let_full_files_fail() {
    // If this fails, the program works, but ends at the limit.
    let _ = SigSet::from(Signal::SIGXFSZ).thread_block();
}

/// Exit code of an end by SIGHUP, as in the shell: 128 and the signal's number.
const HUNG_UP: i32 = 129;
/// Signals within this time of the first count as the same one.
const SAME_REQUEST: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct State {
    stop: AtomicBool,
    patient: AtomicUsize,
    wants_hangups: AtomicBool,
    /// SIGHUPs that were not taken yet.
    hangups: AtomicUsize,
    /// Notified under `lock` when a signal has come.
    bell: Condvar,
    lock: Mutex<()>,
}

impl State {
    fn ring(&self) {
        let _locked = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.bell.notify_all();
    }
}

/// The signals of this process.
#[derive(Debug, Clone, Default)]
pub struct Signals {
    state: Arc<State>,
}

/// While it exists, a first signal only sets the flag.
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
        // Without the thread the signals would stay blocked.
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

    /// Sets the flag as a first signal does. A later signal then still counts as the first one.
    pub fn stop(&self) {
        self.state.stop.store(true, Ordering::SeqCst);
        self.state.ring();
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

    /// From now on SIGHUP does not end the program; [`Patience::was_hung_up`] reports it.
    pub fn listen_for_hangups(&self) {
        self.state.wants_hangups.store(true, Ordering::SeqCst);
    }

    /// Whether SIGHUP came since the last call.
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

/// Whether SIGHUP is ignored, as under `nohup`. It must not be blocked then: a blocked signal is
/// taken although it is ignored.
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
        let is_later = first.is_some_and(|first| first.elapsed() > SAME_REQUEST);
        if state.patient.load(Ordering::SeqCst) == 0 && first.is_none() || is_later {
            process::exit(if signal == Signal::SIGHUP { HUNG_UP } else { exit::STOPPED.into() });
        }
        first.get_or_insert_with(Instant::now);
        state.stop.store(true, Ordering::SeqCst);
        state.ring();
    }
}
