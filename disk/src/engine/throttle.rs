//! Divides the device between clients and work in the background, such as a merge.
//!
//! ```text
//!   new() ─▶ work ─▶ pause() ─▶ work ─▶ pause() ─▶ ...
//!              │        │
//!              └────────┴─▶ Speed of the clients during each
//! ```
//!
//! A pause is as long as clients need to keep [`KEPT`] of the speed that they have in pauses. Speed
//! is the inverse of the latency, which by Little's law is the number of requests in flight divided
//! by the number that end per second. So a client that waits for its answers and one that sends at
//! a fixed rate are judged alike. Both numbers come from the counters of the grace periods
//! (`epoch.rs`), and clients pay nothing for them.
//!
//! Without requests of clients there is no pause. The work always keeps [`SHARE_MIN`] of the time,
//! so it ends.

use super::epoch::{Epochs, Requests};
use std::time::{Duration, Instant};

/// What clients keep of their speed.
const KEPT: f64 = 0.75;
/// The share of the time for the work, while the clients' speed is not known.
const SHARE_FIRST: f64 = 0.2;
/// The least share of the time for the work.
const SHARE_MIN: f64 = 0.125;
/// The largest share of the time for the work while there are clients. Without pauses their speed
/// would be unknown.
const SHARE_MAX: f64 = 0.75;
/// The longest pause. Longer than a step of the work on a slow device, so that clients keep their
/// share there.
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// What an earlier period still counts when the next one is added.
const MEMORY: f64 = 0.875;
/// The speed is known after this many requests.
const REQUESTS_MIN: f64 = 16.0;

/// The speed of clients over recent periods of one kind.
#[derive(Debug, Default)]
struct Speed {
    /// Requests that ended in these periods, older periods with less weight.
    ended: f64,
    /// Seconds multiplied by the number of requests in flight.
    waited_seconds: f64,
}

impl Speed {
    fn add(&mut self, took: Duration, before: Requests, after: Requests) {
        // A queue that was closed has taken its count with it.
        let Some(ended) = after.ended.checked_sub(before.ended) else { return };
        let in_flight = (before.in_flight + after.in_flight) as f64 / 2.0;
        self.ended = self.ended * MEMORY + ended as f64;
        self.waited_seconds = self.waited_seconds * MEMORY + took.as_secs_f64() * in_flight;
    }

    /// Requests per second and request in flight: the inverse of the latency. `None` if it is not
    /// known yet.
    fn per_second(&self) -> Option<f64> {
        (self.ended >= REQUESTS_MIN && self.waited_seconds > 0.0).then(|| self.ended / self.waited_seconds)
    }
}

/// One task in the background.
#[derive(Debug)]
pub(crate) struct Throttle<'a> {
    epochs: &'a Epochs,
    /// When the present work began, and the requests then.
    begun: (Instant, Requests),
    working: Speed,
    pausing: Speed,
}

impl<'a> Throttle<'a> {
    /// The clients are those of the disk with these epochs. Work begins now.
    pub(crate) fn new(epochs: &'a Epochs) -> Self {
        let begun = (Instant::now(), epochs.requests());
        Self { epochs, begun, working: Speed::default(), pausing: Speed::default() }
    }

    /// Time since the work began or went on.
    pub(crate) fn worked(&self) -> Duration {
        self.begun.0.elapsed()
    }

    /// Whether clients had requests in flight then, or have now.
    pub(crate) fn clients_wait(&self) -> bool {
        self.begun.1.in_flight > 0 || self.epochs.in_flight() > 0
    }

    /// Calls `sleep` with the length of the pause, if clients have requests. Work goes on after it.
    pub(crate) fn pause(&mut self, sleep: impl FnOnce(Duration)) {
        let (worked, before, after) = (self.worked(), self.begun.1, self.epochs.requests());
        self.working.add(worked, before, after);
        self.begun = (Instant::now(), after);
        if before.in_flight == 0 && after.in_flight == 0 {
            return;
        }
        sleep(worked.mul_f64(1.0 / self.share() - 1.0).min(PAUSE_MAX));
        let (paused, before, after) = (self.worked(), self.begun.1, self.epochs.requests());
        self.pausing.add(paused, before, after);
        self.begun = (Instant::now(), after);
    }

    /// The share of the time for the work: clients lose that share of what the work takes from
    /// their speed.
    fn share(&self) -> f64 {
        let (Some(working), Some(pausing)) = (self.working.per_second(), self.pausing.per_second()) else {
            return SHARE_FIRST;
        };
        let lost = 1.0 - working / pausing;
        if lost <= 0.0 { SHARE_MAX } else { ((1.0 - KEPT) / lost).clamp(SHARE_MIN, SHARE_MAX) }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    /// Periods in which clients with eight requests in flight have these speeds.
    fn share_of(working: u64, pausing: u64) -> f64 {
        let epochs = Epochs::default();
        let mut throttle = Throttle::new(&epochs);
        let before = Requests { in_flight: 8, ended: 100 };
        let second = Duration::from_secs(1);
        throttle.working.add(second, before, Requests { ended: 100 + working, ..before });
        throttle.pausing.add(second, before, Requests { ended: 100 + pausing, ..before });
        throttle.share()
    }

    #[test]
    fn the_share_follows_from_what_the_work_takes() {
        assert_eq!(share_of(1000, 1000), SHARE_MAX, "nothing is taken");
        assert_eq!(share_of(1200, 1000), SHARE_MAX);
        assert!((share_of(500, 1000) - 0.5).abs() < 1e-9, "half the time at half the speed keeps 0.75");
        assert!((share_of(0, 1000) - SHARE_FIRST).abs() < 1e-9, "too few requests to know");
        assert!((share_of(16, 1_000_000) - 0.25).abs() < 1e-3, "nearly all is taken");
    }

    #[test]
    fn slow_answers_count_also_where_the_rate_is_kept() {
        let epochs = Epochs::default();
        let mut throttle = Throttle::new(&epochs);
        let of = |in_flight, ended| Requests { in_flight, ended };
        let second = Duration::from_secs(1);
        throttle.working.add(second, of(10, 0), of(10, 1000));
        throttle.pausing.add(second, of(5, 1000), of(5, 2000));
        assert!((throttle.share() - 0.5).abs() < 1e-9, "twice the latency is half the speed");
    }

    #[test]
    fn a_closed_queue_gives_no_speed() {
        let mut speed = Speed::default();
        speed.add(Duration::from_secs(1), Requests { in_flight: 8, ended: 500 }, Requests { in_flight: 8, ended: 20 });
        assert_eq!(speed.per_second(), None);
    }

    #[test]
    fn there_is_a_pause_only_for_requests() {
        let epochs = Epochs::default();
        let queue = epochs.join();
        let mut throttle = Throttle::new(&epochs);
        throttle.pause(|_| panic!("nobody is there"));
        let parity = queue.enter().parity;
        let mut slept = None;
        std::thread::sleep(Duration::from_millis(2));
        throttle.pause(|pause| slept = Some(pause));
        assert!(slept.is_some_and(|slept| slept >= Duration::from_millis(8) && slept <= PAUSE_MAX), "{slept:?}");
        queue.leave(parity);
        throttle.pause(|_| ());
        throttle.pause(|_| panic!("the request has ended"));
    }
}
