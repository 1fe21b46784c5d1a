//! The offset between two monotonic clocks, by the exchange of time stamps.
//!
//! ```text
//!   controller  sent ──────────┐            ┌────────▶ back
//!   agent                      ▼            │
//!                          received ──▶ answered
//! ```
//!
//! The agent read its clock after the controller sent and before the answer was back. So the offset
//! lies between `answered - back` and `received - sent`. Their mean is the estimate, and half their
//! distance, half the round trip, bounds its error, however unlike the two ways are. Of several
//! exchanges the one with the least round trip is kept. Offsets before and after a measurement give
//! the drift.
//!
//! The times are nanoseconds of CLOCK_MONOTONIC, which nobody sets. It has its own zero on each
//! machine.

use diskwright_load::record::ClockRecord;
use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// Exchanges of which the best one is kept.
pub const EXCHANGES: usize = 16;

/// Nanoseconds of the monotonic clock.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    (now.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec as u64)
}

/// The [`Instant`] at a time of the monotonic clock. A time before the start of the clock or too
/// far away is now.
pub fn instant_at(at_ns: u64) -> Instant {
    let (now, now_at_ns) = (Instant::now(), now_ns());
    let at = match at_ns.checked_sub(now_at_ns) {
        Some(later_ns) => now.checked_add(Duration::from_nanos(later_ns)),
        None => now.checked_sub(Duration::from_nanos(now_at_ns - at_ns)),
    };
    at.unwrap_or(now)
}

/// The four times of an exchange, nanoseconds: two of each clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamps {
    /// Controller: before the request was sent.
    pub sent_ns: u64,
    /// Agent: when it had the request.
    pub received_ns: u64,
    /// Agent: before it sent the answer.
    pub answered_ns: u64,
    /// Controller: when it had the answer.
    pub back_ns: u64,
}

/// An offset: the agent's clock minus the controller's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offset {
    /// The estimate, nanoseconds.
    pub offset_ns: i64,
    /// Bound of its error, nanoseconds.
    pub error_ns: u64,
    /// When it was measured, by the controller's clock.
    pub at_ns: u64,
}

impl Stamps {
    /// The offset; `None` if the times contradict each other.
    pub fn offset(&self) -> Option<Offset> {
        let [sent, received, answered, back] =
            [self.sent_ns, self.received_ns, self.answered_ns, self.back_ns].map(i128::from);
        let (highest, lowest) = (received - sent, answered - back);
        if back < sent || answered < received || highest < lowest {
            return None;
        }
        Some(Offset {
            offset_ns: i64::try_from((highest + lowest).div_euclid(2)).ok()?,
            // One more, because clocks are read in whole nanoseconds.
            error_ns: u64::try_from((highest - lowest) / 2 + 1).ok()?,
            at_ns: u64::try_from((sent + back) / 2).ok()?,
        })
    }
}

/// The offset with the least error.
pub fn best(offsets: impl IntoIterator<Item = Offset>) -> Option<Offset> {
    offsets.into_iter().min_by_key(|offset| offset.error_ns)
}

/// An agent's clock, as the controller knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AgentClock {
    first: Offset,
    last: Offset,
}

impl AgentClock {
    /// A clock that was compared once.
    pub fn new(first: Offset) -> Self {
        Self { first, last: first }
    }

    /// Adds a later comparison.
    pub fn compared(&mut self, offset: Offset) {
        self.last = offset;
    }

    /// The drift as a share: how much faster the agent's clock runs.
    fn drift(&self) -> f64 {
        let passed_ns = self.last.at_ns.saturating_sub(self.first.at_ns);
        let moved_ns = i128::from(self.last.offset_ns) - i128::from(self.first.offset_ns);
        if passed_ns == 0 { 0.0 } else { moved_ns as f64 / passed_ns as f64 }
    }

    /// Bound of the error of the drift; `None` if the clock was compared once.
    fn drift_error(&self) -> Option<f64> {
        let passed_ns = self.last.at_ns.saturating_sub(self.first.at_ns);
        let error_ns = self.first.error_ns as f64 + self.last.error_ns as f64;
        (passed_ns > 0).then(|| error_ns / passed_ns as f64)
    }

    /// The offset at a time of the controller's clock.
    fn offset_ns(&self, at_ns: u64) -> i128 {
        let since_ns = i128::from(at_ns) - i128::from(self.first.at_ns);
        i128::from(self.first.offset_ns) + (since_ns as f64 * self.drift()).round() as i128
    }

    /// A time of the controller as a time of the agent.
    pub fn to_agent_ns(&self, at_ns: u64) -> u64 {
        let there = i128::from(at_ns) + self.offset_ns(at_ns);
        u64::try_from(there.max(0)).unwrap_or(u64::MAX)
    }

    /// A time of the agent as a time of the controller, which may be before its zero.
    pub fn to_controller_ns(&self, agent_ns: u64) -> i128 {
        let roughly = i128::from(agent_ns) - i128::from(self.first.offset_ns);
        i128::from(agent_ns) - self.offset_ns(u64::try_from(roughly.max(0)).unwrap_or(u64::MAX))
    }

    /// Bound of the error of a converted time.
    pub fn error_ns(&self) -> u64 {
        self.first.error_ns.max(self.last.error_ns)
    }

    /// For the record.
    pub fn record(&self) -> ClockRecord {
        ClockRecord {
            offset_ns: self.first.offset_ns,
            error_ns: self.error_ns(),
            drift_ppm: self.drift() * 1e6,
            drift_error_ppm: self.drift_error().map(|error| error * 1e6),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_truth_is_within_the_error_however_unlike_the_ways_are(
            offset_ns in -1_000_000_000_000_i64..1_000_000_000_000,
            sent_ns in 2_000_000_000_000_u64..3_000_000_000_000,
            there_ns in 0_u64..50_000_000, worked_ns in 0_u64..1_000_000, back_ns in 0_u64..50_000_000,
        ) {
            let received_ns = (sent_ns + there_ns).checked_add_signed(offset_ns).unwrap();
            let stamps = Stamps {
                sent_ns,
                received_ns,
                answered_ns: received_ns + worked_ns,
                back_ns: sent_ns + there_ns + worked_ns + back_ns,
            };
            let found = stamps.offset().unwrap();
            prop_assert!(found.offset_ns.abs_diff(offset_ns) <= found.error_ns);
            prop_assert!(found.error_ns <= (there_ns + back_ns) / 2 + 1);
        }

        #[test]
        fn any_times_have_an_offset_or_none(sent_ns: u64, received_ns: u64, answered_ns: u64, back_ns: u64) {
            if let Some(offset) = (Stamps { sent_ns, received_ns, answered_ns, back_ns }).offset() {
                let clock = AgentClock::new(offset);
                clock.to_agent_ns(u64::MAX);
                clock.to_controller_ns(u64::MAX);
            }
        }

        #[test]
        fn times_are_converted_there_and_back(
            first in -1_000_000_000_i64..1_000_000_000, moved in -1_000_000_i64..1_000_000, at_ns in 5_000_000_000_u64..900_000_000_000,
        ) {
            let mut clock = AgentClock::new(Offset { offset_ns: first, error_ns: 1000, at_ns: 4_000_000_000 });
            clock.compared(Offset { offset_ns: first + moved, error_ns: 3000, at_ns: 600_000_000_000 });
            let again = clock.to_controller_ns(clock.to_agent_ns(at_ns));
            prop_assert!((again - i128::from(at_ns)).abs() <= 10_000, "{again}");
            prop_assert_eq!(clock.error_ns(), 3000);
        }
    }

    #[test]
    fn drift_is_found_and_the_best_exchange_is_kept() {
        let at = |offset_ns, error_ns, at_ns| Offset { offset_ns, error_ns, at_ns };
        assert_eq!(best([at(1, 900, 0), at(2, 100, 0), at(3, 500, 0)]), Some(at(2, 100, 0)));
        let mut clock = AgentClock::new(at(0, 10, 0));
        assert_eq!((clock.record().drift_ppm, clock.record().drift_error_ppm), (0.0, None));
        clock.compared(at(50_000, 30, 1_000_000_000));
        assert!((clock.record().drift_ppm - 50.0).abs() < 1e-9);
        assert!((clock.record().drift_error_ppm.unwrap() - 0.04).abs() < 1e-9);
        assert_eq!(clock.to_agent_ns(2_000_000_000), 2_000_100_000);
    }

    #[test]
    fn an_instant_is_found_by_its_time() {
        let soon = instant_at(now_ns() + 50_000_000);
        let left = soon.saturating_duration_since(Instant::now());
        assert!(left > Duration::from_millis(30) && left <= Duration::from_millis(50), "{left:?}");
        assert!(instant_at(0) <= Instant::now());
        instant_at(u64::MAX);
    }
}
