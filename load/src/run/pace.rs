//! Pacing: the time at which the next request may be made.
//!
//! Three options delay a request. Times are from the start of the phase.
//!
//! - **rate**: the *intended start* of each request is fixed before the run. After a stall of the
//!   target the requests that were due are made late, and their response times include the delay. A
//!   generator that waits for its target and then continues would omit the requests that the stall
//!   delayed; that error is called coordinated omission.
//! - **burst**: after a number of requests the thread pauses.
//! - **think time**: a slot rests between a completion and its next request.
//!
//! A thread without any of these options has no pacer.

use crate::job::{Burst, Load, Rate};
use std::{collections::VecDeque, ops::Range};

/// Pacing of one thread on one target.
#[derive(Debug, Clone)]
pub(crate) struct Pacer {
    schedule: Option<Schedule>,
    mean_request_bytes: f64,
    burst: Option<Burst>,
    left_in_burst: u32,
    /// No request is made before this time.
    pause_until_ns: u64,
    think_ns: u64,
    /// Resting slots with the end of their rest, in ascending order: all rest equally long.
    resting: VecDeque<(u64, u32)>,
}

/// Intended starts at a rate.
#[derive(Debug, Clone, Copy)]
struct Schedule {
    rate: Rate,
    /// Intended start of the first request.
    start_ns: f64,
    /// Requests, or bytes, that have been made.
    units: f64,
    ns_per_unit: f64,
}

impl Schedule {
    /// Intended start of the next request, computed from the first one, so that rounding errors do
    /// not add up.
    fn next_ns(&self) -> u64 {
        (self.start_ns + self.units * self.ns_per_unit) as u64
    }
}

/// Requests that were due and were not made, at equal distances in time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Overdue {
    pub(crate) count: u64,
    /// Intended start of the first request.
    first_ns: f64,
    step_ns: f64,
}

impl Overdue {
    /// Intended start of request number `number`, from 0.
    pub(crate) fn intended_ns(&self, number: u64) -> u64 {
        (self.first_ns + number as f64 * self.step_ns) as u64
    }
}

impl Pacer {
    /// The pacer of thread number `thread` of `threads` of a load; `None` when the load has no
    /// rate, bursts or think time. The starts of the threads are spread over one period of the
    /// rate.
    pub(crate) fn new(load: &Load, thread: u64, threads: u64) -> Option<Self> {
        if !load.is_paced() {
            return None;
        }
        let schedule = load.rate.map(|rate| {
            let (ns_per_unit, units) = match rate {
                Rate::Iops { per_thread } => (1e9 / per_thread, 1.0),
                Rate::Throughput { per_thread } => (1e9 / per_thread.0 as f64, load.block.largest_bytes() as f64),
            };
            let start_ns = ns_per_unit * units * thread as f64 / threads.max(1) as f64;
            Schedule { rate, start_ns, units: 0.0, ns_per_unit }
        });
        let shares = load.block.shares();
        let weight: f64 = shares.iter().map(|share| share.weight).sum();
        let weighted_bytes: f64 = shares.iter().map(|share| share.weight * share.size.0 as f64).sum();
        Some(Self {
            schedule,
            mean_request_bytes: weighted_bytes / weight,
            burst: load.burst,
            left_in_burst: load.burst.map_or(0, |burst| burst.requests),
            pause_until_ns: 0,
            think_ns: load.think_time.as_nanos(),
            resting: VecDeque::new(),
        })
    }

    /// Whether requests have intended starts.
    pub(crate) fn has_schedule(&self) -> bool {
        self.schedule.is_some()
    }

    /// The intended start of the next request; `None` when it may not be made yet.
    pub(crate) fn intended_ns(&self, now_ns: u64) -> Option<u64> {
        let due_ns = self.due_ns();
        (due_ns <= now_ns).then(|| self.schedule.map_or(now_ns, |schedule| schedule.next_ns()))
    }

    /// Time at which the next request may be made, if a slot is free.
    fn due_ns(&self) -> u64 {
        self.schedule.map_or(0, |schedule| schedule.next_ns()).max(self.pause_until_ns)
    }

    /// Records that a request of `len_bytes` was made.
    pub(crate) fn made(&mut self, len_bytes: u32, now_ns: u64) {
        if let Some(schedule) = &mut self.schedule {
            schedule.units += match schedule.rate {
                Rate::Iops { .. } => 1.0,
                Rate::Throughput { .. } => f64::from(len_bytes),
            };
        }
        if let Some(burst) = self.burst {
            self.left_in_burst -= 1;
            if self.left_in_burst == 0 {
                self.left_in_burst = burst.requests;
                self.pause_until_ns = now_ns.saturating_add(burst.pause.as_nanos());
            }
        }
    }

    /// Records the completion of a slot's request. Returns whether the slot rests; else it is free
    /// at once.
    pub(crate) fn rests(&mut self, slot: u32, now_ns: u64) -> bool {
        if self.think_ns == 0 {
            return false;
        }
        self.resting.push_back((now_ns.saturating_add(self.think_ns), slot));
        true
    }

    /// Takes a slot whose rest has ended.
    pub(crate) fn rested(&mut self, now_ns: u64) -> Option<u32> {
        let (until_ns, slot) = *self.resting.front()?;
        if until_ns > now_ns {
            return None;
        }
        self.resting.pop_front();
        Some(slot)
    }

    /// Time at which the next request may be made without a further completion; `u64::MAX`: never.
    pub(crate) fn wake_ns(&self, has_free_slot: bool) -> u64 {
        let free_ns = if has_free_slot { 0 } else { self.resting.front().map_or(u64::MAX, |(until_ns, _)| *until_ns) };
        free_ns.max(self.due_ns())
    }

    /// The requests whose intended start is in `window` and that were not made. Under a throughput
    /// their sizes are not known, and the mean size is assumed.
    pub(crate) fn overdue(&self, window: &Range<u64>) -> Overdue {
        let Some(schedule) = self.schedule.filter(|_| !window.is_empty()) else { return Overdue::default() };
        let due = |before_ns: u64| ((before_ns as f64 - schedule.start_ns) / schedule.ns_per_unit).max(0.0);
        let (start, end) = (due(window.start), due(window.end));
        let (first, count, units_each) = match schedule.rate {
            Rate::Iops { .. } => {
                let first = start.ceil().max(schedule.units);
                (first, end.ceil() - first, 1.0)
            }
            Rate::Throughput { .. } => {
                let first = start.max(schedule.units);
                (first, ((end - first) / self.mean_request_bytes).ceil(), self.mean_request_bytes)
            }
        };
        Overdue {
            count: count.max(0.0) as u64,
            first_ns: schedule.start_ns + first * schedule.ns_per_unit,
            step_ns: units_each * schedule.ns_per_unit,
        }
    }

    /// Intended start of the next request; `u64::MAX` without a schedule.
    pub(crate) fn next_intended_ns(&self) -> u64 {
        self.schedule.map_or(u64::MAX, |schedule| schedule.next_ns())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{Bytes, Span};

    fn rate(per_thread: f64) -> Load {
        Load { rate: Some(Rate::Iops { per_thread }), ..Load::default() }
    }

    #[test]
    fn a_load_without_rate_bursts_and_think_time_has_no_pacer() {
        assert!(Pacer::new(&Load::default(), 0, 1).is_none());
    }

    #[test]
    fn intended_starts_do_not_depend_on_when_requests_were_made() {
        let mut pacer = Pacer::new(&rate(1000.0), 0, 1).unwrap();
        let mut intended = Vec::new();
        // The thread is blocked until 3.5 ms.
        for now_ns in [0, 3_500_000] {
            while let Some(start_ns) = pacer.intended_ns(now_ns) {
                intended.push(start_ns);
                pacer.made(4096, now_ns);
            }
        }
        assert_eq!(intended, [0, 1_000_000, 2_000_000, 3_000_000]);
        assert_eq!(pacer.wake_ns(true), 4_000_000);
        // Due at 4, 5 and 6 ms.
        let overdue = pacer.overdue(&(0..6_500_000));
        assert_eq!((overdue.count, overdue.intended_ns(0), overdue.intended_ns(2)), (3, 4_000_000, 6_000_000));
        assert_eq!(pacer.overdue(&(0..6_000_000)).count, 2, "a window does not contain its end");
        let overdue = pacer.overdue(&(5_000_000..7_000_000));
        assert_eq!(
            (overdue.count, overdue.intended_ns(0)),
            (2, 5_000_000),
            "requests due before the window do not count"
        );
        assert_eq!(pacer.overdue(&(5_000_001..7_000_000)).count, 1);
        assert_eq!([0..3_000_000, 0..0].map(|window| pacer.overdue(&window).count), [0, 0]);
    }

    #[test]
    fn rounding_errors_of_a_schedule_do_not_add_up() {
        let mut pacer = Pacer::new(&rate(3.0), 0, 1).unwrap();
        for _ in 0..1_000_000 {
            pacer.made(4096, 0);
        }
        assert_eq!(pacer.wake_ns(true), 333_333_333_333_333);
    }

    #[test]
    fn threads_are_spread_over_one_period() {
        let starts: Vec<u64> =
            (0..4).map(|thread| Pacer::new(&rate(1000.0), thread, 4).unwrap().wake_ns(true)).collect();
        assert_eq!(starts, [0, 250_000, 500_000, 750_000]);
    }

    #[test]
    fn a_throughput_counts_bytes() {
        let load = Load { rate: Some(Rate::Throughput { per_thread: Bytes(4_096_000) }), ..Load::default() };
        let mut pacer = Pacer::new(&load, 0, 1).unwrap();
        pacer.made(4096, 0);
        pacer.made(8192, 0);
        assert_eq!(pacer.wake_ns(true), 3_000_000);
        // 12 KiB and one byte at 4,096,000 bytes per second: four requests of 4 KiB.
        assert_eq!(pacer.overdue(&(0..6_000_001)).count, 4);
    }

    #[test]
    fn bursts_pause_and_slots_rest() {
        let burst = Some(Burst { requests: 2, pause: Span::from_millis(5) });
        let load = Load { burst, think_time: Span::from_millis(1), ..Load::default() };
        let mut pacer = Pacer::new(&load, 0, 1).unwrap();
        assert_eq!(pacer.intended_ns(10), Some(10));
        pacer.made(4096, 10);
        assert_eq!(pacer.intended_ns(20), Some(20));
        pacer.made(4096, 20);
        assert_eq!(pacer.intended_ns(30), None);
        assert_eq!(pacer.intended_ns(5_000_020), Some(5_000_020));
        assert!(!pacer.has_schedule());

        assert!(pacer.rests(7, 100));
        assert_eq!(pacer.rested(1_000_099), None);
        assert_eq!(pacer.wake_ns(false), 5_000_020);
        assert_eq!(pacer.rested(1_000_100), Some(7));
        assert_eq!(pacer.wake_ns(false), u64::MAX);
    }
}
