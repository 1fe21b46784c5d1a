//! A measuring thread and its loop.
//!
//! ```text
//!   wait ─▶ read the clock ─▶ after the end of a bin: send the tally ─▶ count, make requests ─┐
//!    ▲                                                                                        │
//!    └────────────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! *Wait* submits pushed requests and blocks until a completion: one system call a turn. A thread
//! with several targets or with a pacer has all its queues on one ring. The ring wakes the thread
//! for the first completion, or shortly before the next request is due; the thread spins for the
//! remaining time. Targets that cannot be on one ring (exports, `null:`) are polled without
//! sleeping, because a completion that is seen late would count as a slow one. A warning says that
//! this raises CPU time.
//!
//! **Cuts.** Time is divided into bins: at every tick (a quarter of a second, or less for short
//! intervals), and at the start and the end of the window. A completion counts in the bin of the
//! clock reading that saw it. Requests in flight at the end of the window are not counted, and
//! about as many were in flight at its start, so that neither rate nor latency is biased.
//!
//! **Under a rate** the response times of a window are those of the requests that were due in it,
//! whenever they complete. Otherwise a target that stalls at the end of the window would hide its
//! slowest requests. At the end of the load the thread waits for all requests in flight and records
//! their response times. It reports for each lane the requests of the window that were not made or
//! did not complete (*overdue*). These count with the time that they have waited by then, which is
//! a lower bound. Without them percentiles would be too low.
//!
//! The thread takes no lock, and allocates only the list that it sends at a cut.

use crate::run::{
    affinity,
    lane::{Lane, QueueFailure, Undone},
    shared::{NEVER, Shared},
    tally::Tally,
};
use diskwright_store::{IoBuf, SharedRing};
use std::{
    sync::mpsc::{Receiver, Sender},
    time::{Duration, Instant},
};

/// Time before a due time in which the thread spins, because a sleeping thread may be woken this
/// late.
const SLEEP_SLACK_NS: u64 = 60_000;
/// Longest sleep, so that an early end of the run is seen.
const SLEEP_MAX_NS: u64 = 50_000_000;

/// The counts of a thread in one bin.
#[derive(Debug)]
pub(crate) struct Cut {
    pub(crate) thread: usize,
    /// Start of the bin.
    pub(crate) from_ns: u64,
    /// This thread sends no more counts of bins before this time.
    pub(crate) until_ns: u64,
    /// This thread sends no more response times of requests that were due before this time.
    pub(crate) settled_ns: u64,
    /// One for each lane.
    pub(crate) tallies: Vec<Tally>,
    /// One for each lane in the last cut of a thread; else empty.
    pub(crate) undone: Vec<Undone>,
}

/// A message of a thread to the conductor.
#[derive(Debug)]
pub(crate) enum Event {
    Cut(Cut),
    /// The thread of this number has ended.
    PhaseOutcome(usize),
}

/// A measuring thread.
#[derive(Debug)]
pub(crate) struct Thread<'a> {
    pub(crate) number: usize,
    /// The processor to which the thread binds itself.
    pub(crate) cpu: Option<u32>,
    pub(crate) lanes: Vec<Lane<'a>>,
    /// The ring of all lanes, where there are several or one has a pacer.
    pub(crate) ring: Option<SharedRing>,
    pub(crate) shared: &'a Shared,
    /// Requests that the thread may still make.
    pub(crate) to_make: u64,
    pub(crate) events: Sender<Event>,
    /// Emptied tallies that the conductor returns.
    pub(crate) emptied: Receiver<Vec<Tally>>,
}

/// State of the running loop.
struct Loop<'t, 'a> {
    thread: &'t mut Thread<'a>,
    origin: Instant,
    bin_start_ns: u64,
    next_cut_ns: u64,
}

impl Thread<'_> {
    /// Runs until the end of the phase or of its count, and sends the last cut. Returns the buffers
    /// that the queues do not hold.
    pub(crate) fn run(mut self) -> Vec<IoBuf> {
        let origin = self.shared.origin();
        if let Some(cpu) = self.cpu
            && let Err(error) = affinity::bind(cpu)
        {
            let number = self.number;
            self.shared.fail_as(0, || format!("thread {number} cannot be bound to processor {cpu}: {error}"));
        }
        let next_cut_ns = next_boundary_ns(self.shared, 0);
        let mut running = Loop { thread: &mut self, origin, bin_start_ns: 0, next_cut_ns };
        running.run();
        self.lanes.into_iter().flat_map(Lane::into_buffers).collect()
    }
}

impl Loop<'_, '_> {
    fn now_ns(&self) -> u64 {
        self.origin.elapsed().as_nanos() as u64
    }

    fn run(&mut self) {
        let mut now_ns = self.now_ns();
        if self.thread.shared.window_start_ns() == 0 {
            self.thread.shared.cpu_start.take();
        }
        let outcome = loop {
            if now_ns >= self.next_cut_ns.min(self.thread.shared.stop_ns()) && self.cut(now_ns) {
                break Ok(());
            }
            let Thread { lanes, to_make, shared, .. } = &mut *self.thread;
            if let Err(error) = lanes.iter_mut().try_for_each(|lane| lane.settle(now_ns, to_make, shared)) {
                break Err(error);
            }
            if self.thread.to_make == 0 && self.in_flight() == 0 {
                break Ok(());
            }
            if let Err(error) = self.wait(now_ns) {
                break Err(error);
            }
            now_ns = self.now_ns();
        };
        let shared = self.thread.shared;
        let drained = outcome.and_then(|()| {
            let Thread { lanes, to_make, .. } = &mut *self.thread;
            lanes.iter_mut().for_each(|lane| lane.make_due(now_ns, to_make, shared));
            self.drain()
        });
        if let Err((target, error)) = drained {
            shared.fail_as(now_ns, || format!("{target}: its queue failed: {error}"));
            // A failed queue ends the load, also with `keep_going`.
            shared.stop(now_ns);
        }
        if self.thread.to_make == 0 {
            shared.cpu_end.take_again();
        }
        let until_ns = now_ns.min(shared.stop_ns()).max(self.bin_start_ns);
        // A complete count has no overdue requests.
        let window = if self.thread.to_make == 0 { 0..0 } else { shared.window_start_ns()..shared.window_end_ns() };
        let given_up_ns = self.now_ns();
        let undone = self.thread.lanes.iter_mut().map(|lane| lane.give_up(&window, given_up_ns, shared)).collect();
        self.send(until_ns, until_ns, undone);
        let _ = self.thread.events.send(Event::PhaseOutcome(self.thread.number));
    }

    fn in_flight(&self) -> usize {
        self.thread.lanes.iter().map(Lane::in_flight).sum()
    }

    /// Waits for a completion or for the time of the next request.
    #[inline]
    fn wait(&mut self, now_ns: u64) -> Result<(), QueueFailure> {
        if let [lane] = &mut self.thread.lanes[..]
            && lane.wake_ns() == NEVER
        {
            let wait = !lane.has_completions();
            return lane.reap(wait);
        }
        self.wait_for_any(now_ns)
    }

    fn wait_for_any(&mut self, now_ns: u64) -> Result<(), QueueFailure> {
        let wake_ns = self.thread.lanes.iter().map(Lane::wake_ns).min().unwrap_or(NEVER);
        let wake_ns = if self.thread.to_make == 0 { NEVER } else { wake_ns };
        if self.in_flight() == 0 {
            sleep_towards(wake_ns.min(self.next_cut_ns).saturating_sub(now_ns));
            return Ok(());
        }
        self.take_completions()?;
        if self.thread.lanes.iter().any(Lane::has_completions) {
            return Ok(());
        }
        if let Some(ring) = &self.thread.ring {
            let left_ns = wake_ns.saturating_sub(now_ns);
            let waited = match wake_ns {
                NEVER => ring.wait(),
                _ => ring.wait_for(Duration::from_nanos(left_ns.saturating_sub(SLEEP_SLACK_NS).min(SLEEP_MAX_NS))),
            };
            waited.map_err(|error| ("the ring of its thread".to_owned(), error))?;
            return self.take_completions();
        }
        // Yields, because the server of an export may need this processor.
        std::thread::yield_now();
        Ok(())
    }

    /// Waits for all requests in flight at the end of the load.
    fn drain(&mut self) -> Result<(), QueueFailure> {
        loop {
            let (now_ns, shared) = (self.now_ns(), self.thread.shared);
            self.thread.lanes.iter_mut().for_each(|lane| lane.settle_last(now_ns, shared));
            if self.in_flight() == 0 {
                return Ok(());
            }
            if let [lane] = &mut self.thread.lanes[..] {
                lane.reap_last(true)?;
                continue;
            }
            // With several targets, any completion must be seen at once.
            self.thread.lanes.iter_mut().try_for_each(|lane| lane.reap_last(false))?;
            if self.thread.lanes.iter().any(Lane::has_completions) {
                continue;
            }
            match &self.thread.ring {
                Some(ring) => ring.wait().map_err(|error| ("the ring of its thread".to_owned(), error))?,
                None => std::thread::yield_now(),
            }
        }
    }

    /// Takes completions without waiting.
    fn take_completions(&mut self) -> Result<(), QueueFailure> {
        self.thread.lanes.iter_mut().try_for_each(|lane| lane.reap(false))
    }

    /// Sends the tallies of a bin that has ended. Returns whether the phase has ended.
    #[cold]
    fn cut(&mut self, now_ns: u64) -> bool {
        let shared = self.thread.shared;
        let (opens_ns, closes_ns) = (shared.window_start_ns(), shared.window_end_ns());
        if now_ns >= opens_ns {
            shared.cpu_start.take();
        }
        if now_ns >= closes_ns {
            shared.cpu_end.take();
        }
        if now_ns >= shared.stop_ns() {
            return true;
        }
        let last_tick_ns = shared.ticks.start_of(now_ns);
        let passed = |boundary_ns: u64| if boundary_ns <= now_ns { boundary_ns } else { 0 };
        let from_ns = last_tick_ns.max(passed(opens_ns)).max(passed(closes_ns));
        if from_ns > self.bin_start_ns {
            let settled_ns = self.thread.lanes.iter().map(Lane::settled_ns).fold(from_ns, u64::min);
            self.send(from_ns, settled_ns, Vec::new());
            self.bin_start_ns = from_ns;
        }
        self.next_cut_ns = next_boundary_ns(shared, now_ns);
        false
    }

    /// Sends the bin that ends at `until_ns`.
    fn send(&mut self, until_ns: u64, settled_ns: u64, undone: Vec<Undone>) {
        let lanes = &mut self.thread.lanes;
        let empty = self.thread.emptied.try_recv().unwrap_or_else(|_| lanes.iter().map(Lane::empty_tally).collect());
        let tallies = lanes.iter_mut().zip(empty).map(|(lane, empty)| lane.exchange(empty, until_ns)).collect();
        let cut = Cut { thread: self.thread.number, from_ns: self.bin_start_ns, until_ns, settled_ns, tallies, undone };
        // Sending cannot fail: the conductor outlives its threads.
        let _ = self.thread.events.send(Event::Cut(cut));
    }
}

/// End of the bin that contains `now_ns`.
fn next_boundary_ns(shared: &Shared, now_ns: u64) -> u64 {
    let next_tick_ns = shared.ticks.end_of(now_ns);
    [shared.window_start_ns(), shared.window_end_ns()]
        .into_iter()
        .filter(|boundary_ns| *boundary_ns > now_ns)
        .fold(next_tick_ns, u64::min)
}

fn sleep_towards(ns: u64) {
    if ns > SLEEP_SLACK_NS {
        std::thread::sleep(Duration::from_nanos((ns - SLEEP_SLACK_NS).min(SLEEP_MAX_NS)));
    } else {
        std::hint::spin_loop();
    }
}
