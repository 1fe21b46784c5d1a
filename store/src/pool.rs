//! A thread pool for parts that need blocking calls.
//!
//! ```text
//!   Engine ── run(job) ──▶ queue ──▶ a thread ──▶ Loan::complete ──▶ wakes the engine
//! ```
//!
//! An engine on a ring never blocks its own thread, because a server's worker has many clients on
//! one ring and all of them would wait. Parts that neither ring nor lane can carry out come here:
//! replaced pages of an overlay, padding beyond a file's end, unaligned O_DIRECT transfers, and
//! zeroing where the file system has no call for it.
//!
//! Each process has one pool. A thread is started when work arrives and none is idle, up to
//! [`THREADS_MAX`]. It ends after [`IDLE_LIMIT`] without work. If all threads are stuck in calls
//! that do not return (a dead network file system), further work waits behind them; it would
//! otherwise have hung in the caller's own thread. If no thread can be started and none runs, the
//! caller does the work itself.
//!
//! One mutex guards the queue and the counts. No job runs under it. The schedulers of tests
//! (`sync`) never get here, because they have no rings.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

/// Maximum number of threads.
const THREADS_MAX: usize = 16;

/// How long a thread waits for more work before it ends.
const IDLE_LIMIT: Duration = Duration::from_secs(5);

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

static STATE: Mutex<State> = Mutex::new(State { jobs: VecDeque::new(), threads: 0, idle: 0 });
static WORK: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Queues `job` for a thread of the pool.
pub(crate) fn run(job: Job) {
    let mut state = lock();
    state.jobs.push_back(job);
    if state.idle >= state.jobs.len() {
        WORK.notify_one();
        return;
    }
    if state.threads == THREADS_MAX {
        return;
    }
    state.threads += 1;
    if thread::Builder::new().name("store-pool".into()).spawn(work).is_ok() {
        return;
    }
    state.threads -= 1;
    // If there are other threads, they will take the job.
    let own = if state.threads == 0 { state.jobs.pop_back() } else { None };
    drop(state);
    if let Some(job) = own {
        job();
    }
}

/// Uncounts a thread, also if it panics.
struct Counted;

impl Drop for Counted {
    fn drop(&mut self) {
        lock().threads -= 1;
    }
}

fn work() {
    let counted = Counted;
    let mut state = lock();
    loop {
        if let Some(job) = state.jobs.pop_front() {
            drop(state);
            job();
            state = lock();
            continue;
        }
        state.idle += 1;
        let (woken, waited) = WORK.wait_timeout(state, IDLE_LIMIT).unwrap_or_else(PoisonError::into_inner);
        state = woken;
        state.idle -= 1;
        if waited.timed_out() && state.jobs.is_empty() {
            // Decremented before the lock is released, so that no job is left to a thread that is
            // about to end.
            state.threads -= 1;
            std::mem::forget(counted);
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Barrier, mpsc::channel};

    #[test]
    fn jobs_run_concurrently_in_other_threads() {
        let (sender, receiver) = channel();
        // Each job waits for the other: one thread for both would hang.
        let both = Arc::new(Barrier::new(2));
        for _ in 0..2 {
            let (sender, both) = (sender.clone(), Arc::clone(&both));
            run(Box::new(move || {
                both.wait();
                let _ = sender.send(thread::current().id());
            }));
        }
        let ids = [receiver.recv().unwrap(), receiver.recv().unwrap()];
        assert!(ids[0] != ids[1] && !ids.contains(&thread::current().id()));
    }

    #[test]
    fn more_jobs_than_threads_all_run_despite_a_panic() {
        let (sender, receiver) = channel();
        run(Box::new(|| std::panic::resume_unwind(Box::new("a job that panics"))));
        for number in 0..10 * THREADS_MAX {
            let sender = sender.clone();
            run(Box::new(move || sender.send(number).unwrap()));
        }
        let mut came: Vec<usize> = (0..10 * THREADS_MAX).map(|_| receiver.recv().unwrap()).collect();
        came.sort_unstable();
        assert!(came.into_iter().eq(0..10 * THREADS_MAX));
    }
}
