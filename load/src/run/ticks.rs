//! Divides time into bins: at the ends of the intervals of the time series, and at equal ticks
//! within an interval.
//!
//! ```text
//!   interval of 700 ms   |-------- 0 --------|-------- 1 --------|
//!   ticks, at most 250 ms |  233  |  466  |  700  |  933  | ...
//! ```
//!
//! A tick is computed from the start of its interval, so rounding errors do not add up and every
//! interval starts exactly at a tick. What must hold: ticks do not overlap, leave no gap, and each
//! is inside one interval. A bin is a tick or a part of one.

/// Longest tick, nanoseconds.
const TICK_MAX_NS: u64 = 250_000_000;

/// The ticks of a time series.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticks {
    interval_ns: u64,
    /// Number of ticks in an interval.
    count: u64,
}

impl Ticks {
    /// Ticks of a time series with this interval, in nanoseconds; 0 counts as 1.
    pub(crate) fn new(interval_ns: u64) -> Self {
        let interval_ns = interval_ns.max(1);
        Self { interval_ns, count: interval_ns.div_ceil(TICK_MAX_NS) }
    }

    /// Length of the longest tick, nanoseconds.
    pub(crate) fn longest_ns(self) -> u64 {
        self.interval_ns.div_ceil(self.count)
    }

    /// Start of the tick that contains `at_ns`.
    pub(crate) fn start_of(self, at_ns: u64) -> u64 {
        self.boundary_ns(at_ns, self.number_of(at_ns))
    }

    /// End of the tick that contains `at_ns`, which is the start of the next one. `u64::MAX` beyond
    /// the clock's range.
    pub(crate) fn end_of(self, at_ns: u64) -> u64 {
        self.boundary_ns(at_ns, self.number_of(at_ns) + 1)
    }

    /// Number of the tick that contains `at_ns`, within its interval.
    fn number_of(self, at_ns: u64) -> u64 {
        let into_ns = at_ns % self.interval_ns;
        let about = (u128::from(into_ns) * u128::from(self.count) / u128::from(self.interval_ns)) as u64;
        // Boundaries are rounded down, so the division may return the tick before the one of
        // `at_ns`.
        if self.into_ns(about + 1) <= into_ns { about + 1 } else { about }
    }

    /// Start of tick `number` of an interval, from the start of the interval.
    fn into_ns(self, number: u64) -> u64 {
        (u128::from(self.interval_ns) * u128::from(number) / u128::from(self.count)) as u64
    }

    /// Start of tick `number` of the interval that contains `at_ns`.
    fn boundary_ns(self, at_ns: u64, number: u64) -> u64 {
        (at_ns - at_ns % self.interval_ns).saturating_add(self.into_ns(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn an_interval_that_no_tick_divides_starts_at_a_tick() {
        let ticks = Ticks::new(700 * MS);
        let mut boundaries = vec![0];
        while boundaries.len() < 7 {
            boundaries.push(ticks.end_of(boundaries[boundaries.len() - 1]));
        }
        assert_eq!(boundaries[3], 700 * MS);
        assert_eq!(boundaries[6], 1400 * MS);
        assert_eq!((boundaries[1], boundaries[2]), (233_333_333, 466_666_666));
    }

    #[test]
    fn the_largest_interval_does_not_overflow() {
        let ticks = Ticks::new(u64::MAX);
        assert!(ticks.start_of(u64::MAX - 1) < ticks.end_of(u64::MAX - 1));
        assert!(ticks.longest_ns() <= TICK_MAX_NS);
    }

    proptest! {
        #[test]
        fn ticks_leave_no_gap_and_cross_no_interval(
            interval_ns in prop_oneof![10 * MS..2_000 * MS, 2_000 * MS..600_000 * MS],
            at_ns in 0..10_000_000 * MS,
        ) {
            let ticks = Ticks::new(interval_ns);
            let (start_ns, end_ns) = (ticks.start_of(at_ns), ticks.end_of(at_ns));
            prop_assert!(start_ns <= at_ns && at_ns < end_ns);
            prop_assert!(end_ns - start_ns <= ticks.longest_ns() && ticks.longest_ns() <= TICK_MAX_NS);
            prop_assert_eq!(start_ns / interval_ns, (end_ns - 1) / interval_ns);
            prop_assert_eq!(ticks.start_of(end_ns), end_ns);
            prop_assert_eq!(ticks.start_of(end_ns - 1), start_ns);
        }
    }
}
