//! Standard deviation of the request rate of one thread on one target, over the intervals that are
//! wholly inside the window.
//!
//! ```text
//!   bin ─▶ counts of its interval ── interval has ended, inside the window ──▶ mean and squares
//!                                                                              (Welford)
//! ```
//!
//! The intervals have the length that the job asks for, also when those of the series have become
//! longer. Memory does not grow with the length of the run.

use crate::record::IopsStdDev;
use std::{collections::BTreeMap, ops::Range};

/// The standard deviation of a rate, updated with each bin.
#[derive(Debug, Clone, Default)]
pub(crate) struct RateDeviation {
    /// Reads and writes of the intervals that the thread has not passed, by number; usually one.
    open: BTreeMap<u64, [u64; 2]>,
    /// Intervals before this number are counted.
    next: u64,
    entered: u64,
    /// Mean of the counts and sum of the squared distances from it, of reads, writes and both.
    mean: [f64; 3],
    squares: [f64; 3],
}

impl RateDeviation {
    /// Adds the reads and writes of a bin. No bin before the end of `bin_ns` follows.
    pub(crate) fn add(&mut self, bin_ns: Range<u64>, counts: [u64; 2], interval_ns: u64, window_ns: &Range<u64>) {
        let sums = self.open.entry(bin_ns.start / interval_ns).or_default();
        for (sum, count) in sums.iter_mut().zip(counts) {
            *sum += count;
        }
        while let Some(end_ns) = (self.next + 1).checked_mul(interval_ns)
            && end_ns <= bin_ns.end
        {
            let [reads, writes] = self.open.remove(&self.next).unwrap_or_default();
            if window_ns.start <= end_ns - interval_ns && end_ns <= window_ns.end {
                self.enter([reads, writes, reads + writes]);
            }
            self.next += 1;
        }
    }

    fn enter(&mut self, counts: [u64; 3]) {
        self.entered += 1;
        for (column, count) in counts.into_iter().enumerate() {
            let distance = count as f64 - self.mean[column];
            self.mean[column] += distance / self.entered as f64;
            self.squares[column] += distance * (count as f64 - self.mean[column]);
        }
    }

    /// Standard deviation in requests per second; `None` without a whole interval in the window.
    pub(crate) fn std_dev(&self, interval_ns: u64) -> Option<IopsStdDev> {
        let seconds = interval_ns as f64 / 1e9;
        let of = |column: usize| (self.squares[column] / self.entered as f64).sqrt() / seconds;
        (self.entered > 0).then(|| IopsStdDev { reads: of(0), writes: of(1), both: of(2) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn only_whole_intervals_of_the_window_count_and_a_stall_counts_as_zero() {
        let mut deviation = RateDeviation::default();
        let window = S / 2..6 * S + S / 2;
        let half = S / 2;
        assert_eq!(deviation.std_dev(half), None);
        // Requests of each second: 100 (half outside), 10, 30 in two bins, 0, 0, 20, 500 (half
        // outside).
        for (bin, counts) in [
            (0..S, [100, 0]),
            (S..2 * S, [10, 0]),
            (2 * S..2 * S + half, [10, 5]),
            (2 * S + half..3 * S, [10, 5]),
            (3 * S..5 * S, [0, 0]),
            (5 * S..6 * S, [20, 0]),
            (6 * S..7 * S, [0, 500]),
        ] {
            deviation.add(bin, counts, S, &window);
        }
        let std_dev = deviation.std_dev(S).unwrap();
        let of = |counts: [f64; 5]| {
            let mean = counts.iter().sum::<f64>() / 5.0;
            (counts.iter().map(|count| (count - mean).powi(2)).sum::<f64>() / 5.0).sqrt()
        };
        assert!((std_dev.reads - of([10.0, 20.0, 0.0, 0.0, 20.0])).abs() < 1e-9, "{std_dev:?}");
        assert!((std_dev.writes - of([0.0, 10.0, 0.0, 0.0, 0.0])).abs() < 1e-9, "{std_dev:?}");
        assert!((std_dev.both - of([10.0, 30.0, 0.0, 0.0, 20.0])).abs() < 1e-9, "{std_dev:?}");
        // With intervals of half a second the same counts are twice the rate.
        assert!((deviation.std_dev(half).unwrap().both - 2.0 * std_dev.both).abs() < 1e-9);
        assert!(deviation.open.is_empty());
    }
}
