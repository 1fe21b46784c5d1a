//! Latency histograms with three significant digits.
//!
//! A value below 2,048 has a bucket of its own. Above, each power of two is divided into 1,024
//! equal buckets, so a bucket is never wider than a thousandth of its values. A bucket is found by
//! a count of leading zeros, a shift and an addition. The layout is that of HDR histograms.
//!
//! ```text
//!   value   0 .. 2047   2048 .. 4095 by 2   4096 .. 8191 by 4   ...   2^42 .. 2^43 by 2^32
//!   bucket  0 .. 2047   2048 .. 3071        3072 .. 4095              33792 .. 34815
//! ```
//!
//! A measuring thread counts into [`Latencies`] between two cuts (136 KiB), and the conductor adds
//! them up in a [`HistogramSum`] (272 KiB). Minimum, maximum, moments and counts are exact. Values
//! of 2^43 ns (2.4 hours) and more count as the largest value.

use crate::record::LatencyRecord;

/// Values below this have a bucket of their own. It is twice the number of buckets of a power of
/// two.
const EXACT: u64 = 2048;
const EXACT_BITS: u32 = EXACT.ilog2();
/// The largest value that has a bucket.
const LARGEST: u64 = (1 << 43) - 1;
/// Number of buckets.
const BUCKETS: usize = bucket_of(LARGEST) + 1;

/// The bucket of a value, which must not exceed [`LARGEST`].
#[inline]
const fn bucket_of(value: u64) -> usize {
    let shift = (63 - (value | (EXACT - 1)).leading_zeros()) - (EXACT_BITS - 1);
    ((shift as u64) * (EXACT / 2) + (value >> shift)) as usize
}

/// The largest value of a bucket.
const fn highest_of(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    let shift = (bucket / (EXACT / 2)).saturating_sub(1);
    ((bucket - shift * (EXACT / 2) + 1) << shift) - 1
}

/// The histogram of a measuring thread. 32-bit counts are enough: a cut comes every few hundred
/// milliseconds, or, when the target stalls, after few requests.
#[derive(Debug, Clone)]
pub(crate) struct Latencies {
    counts: Box<[u32]>,
    pub(crate) count: u64,
    sum_ns: u64,
    squares: f64,
    min_ns: u64,
    max_ns: u64,
}

impl Default for Latencies {
    fn default() -> Self {
        let counts = vec![0; BUCKETS].into_boxed_slice();
        Self { counts, count: 0, sum_ns: 0, squares: 0.0, min_ns: u64::MAX, max_ns: 0 }
    }
}

impl Latencies {
    /// Counts a latency.
    #[inline]
    pub(crate) fn record(&mut self, latency_ns: u64) {
        let latency_ns = latency_ns.min(LARGEST);
        self.counts[bucket_of(latency_ns)] += 1;
        self.count += 1;
        self.sum_ns += latency_ns;
        self.squares += latency_ns as f64 * latency_ns as f64;
        self.min_ns = self.min_ns.min(latency_ns);
        self.max_ns = self.max_ns.max(latency_ns);
    }

    /// Clears all counts. Only the buckets from the minimum to the maximum are written.
    pub(crate) fn clear(&mut self) {
        if self.count > 0 {
            self.counts[bucket_of(self.min_ns)..=bucket_of(self.max_ns)].fill(0);
        }
        (self.count, self.sum_ns, self.squares, self.min_ns, self.max_ns) = (0, 0, 0.0, u64::MAX, 0);
    }
}

/// The sum of many histograms.
#[derive(Debug, Clone)]
pub(crate) struct HistogramSum {
    counts: Box<[u64]>,
    count: u64,
    sum_ns: u128,
    squares: f64,
    min_ns: u64,
    max_ns: u64,
}

impl Default for HistogramSum {
    fn default() -> Self {
        let counts = vec![0; BUCKETS].into_boxed_slice();
        Self { counts, count: 0, sum_ns: 0, squares: 0.0, min_ns: u64::MAX, max_ns: 0 }
    }
}

impl HistogramSum {
    /// Counts a latency `count` times, above 0.
    pub(crate) fn add_many(&mut self, latency_ns: u64, count: u64) {
        let latency_ns = latency_ns.min(LARGEST);
        self.counts[bucket_of(latency_ns)] += count;
        self.count += count;
        self.sum_ns += u128::from(latency_ns) * u128::from(count);
        self.squares += latency_ns as f64 * latency_ns as f64 * count as f64;
        self.min_ns = self.min_ns.min(latency_ns);
        self.max_ns = self.max_ns.max(latency_ns);
    }

    /// Adds the histogram of a thread.
    pub(crate) fn add(&mut self, latencies: &Latencies) {
        if latencies.count == 0 {
            return;
        }
        let used = bucket_of(latencies.min_ns)..=bucket_of(latencies.max_ns);
        for (sum, count) in self.counts[used.clone()].iter_mut().zip(&latencies.counts[used]) {
            *sum += u64::from(*count);
        }
        self.count += latencies.count;
        self.sum_ns += u128::from(latencies.sum_ns);
        self.squares += latencies.squares;
        self.min_ns = self.min_ns.min(latencies.min_ns);
        self.max_ns = self.max_ns.max(latencies.max_ns);
    }

    /// Adds another sum.
    pub(crate) fn merge(&mut self, other: &Self) {
        if other.count == 0 {
            return;
        }
        let used = bucket_of(other.min_ns)..=bucket_of(other.max_ns);
        for (sum, count) in self.counts[used.clone()].iter_mut().zip(&other.counts[used]) {
            *sum += count;
        }
        self.count += other.count;
        self.sum_ns += other.sum_ns;
        self.squares += other.squares;
        self.min_ns = self.min_ns.min(other.min_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// Arithmetic mean; 0 without latencies.
    pub(crate) fn mean_ns(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum_ns as f64 / self.count as f64 }
    }

    /// Longest latency; 0 without latencies.
    pub(crate) fn max_ns(&self) -> u64 {
        self.max_ns
    }

    /// The latency that a share of `share` (0 to 1) of the requests do not exceed; 0 without
    /// latencies.
    pub(crate) fn quantile_ns(&self, share: f64) -> u64 {
        if self.count == 0 {
            return 0;
        }
        let rank = ((self.count as f64 * share.clamp(0.0, 1.0)).ceil() as u64).max(1);
        let mut seen = 0;
        for bucket in bucket_of(self.min_ns)..=bucket_of(self.max_ns) {
            seen += self.counts[bucket];
            if seen >= rank {
                return highest_of(bucket).min(self.max_ns);
            }
        }
        self.max_ns
    }

    /// The sparse histogram for a record.
    pub(crate) fn record(&self) -> LatencyRecord {
        if self.count == 0 {
            return LatencyRecord::default();
        }
        let used = bucket_of(self.min_ns)..=bucket_of(self.max_ns);
        let filled = used.filter(|bucket| self.counts[*bucket] > 0);
        LatencyRecord {
            count: self.count,
            sum_ns: self.sum_ns as f64,
            sum_of_squares: self.squares,
            min_ns: self.min_ns,
            max_ns: self.max_ns,
            buckets: filled.map(|bucket| (highest_of(bucket), self.counts[bucket])).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sum_of(values: &[u64]) -> HistogramSum {
        let (mut latencies, mut sum) = (Latencies::default(), HistogramSum::default());
        for value in values {
            latencies.record(*value);
        }
        sum.add(&latencies);
        sum
    }

    #[test]
    fn buckets_have_no_gaps() {
        let mut next = 0;
        for bucket in 0..BUCKETS {
            assert_eq!(bucket_of(next), bucket, "the first value of bucket {bucket} is {next}");
            assert_eq!(bucket_of(highest_of(bucket)), bucket);
            next = highest_of(bucket) + 1;
        }
        assert_eq!(next, LARGEST + 1);
    }

    #[test]
    fn histograms_of_a_thread_are_small() {
        // Two directions, service and response, one in use and one in the channel: less than a
        // fortieth of 64 MiB per thread.
        assert!(BUCKETS * size_of::<u32>() * 2 * 2 * 2 < (64 << 20) / 40);
    }

    #[test]
    fn zero_and_very_long_latencies_are_counted() {
        assert_eq!(HistogramSum::default().record(), LatencyRecord::default());
        assert_eq!(HistogramSum::default().quantile_ns(0.5), 0);
        let record = sum_of(&[u64::MAX, 0]).record();
        assert_eq!((record.min_ns, record.max_ns, record.buckets.len()), (0, LARGEST, 2));
    }

    #[test]
    fn a_cleared_histogram_is_empty() {
        let mut latencies = Latencies::default();
        latencies.record(5);
        latencies.record(1 << 30);
        latencies.clear();
        assert!(latencies.counts.iter().all(|count| *count == 0));
        latencies.record(7);
        let mut sum = HistogramSum::default();
        sum.add(&latencies);
        assert_eq!(sum.record().buckets, [(7, 1)]);
    }

    proptest! {
        #[test]
        fn a_bucket_is_at_most_a_thousandth_wide(value in 0..=LARGEST) {
            let highest = highest_of(bucket_of(value));
            prop_assert!(value <= highest && (highest - value) as f64 <= value as f64 / 1000.0);
        }

        #[test]
        fn moments_are_exact_and_quantiles_within_a_thousandth(mut values in prop::collection::vec(0_u64..1 << 40, 1..200), share in 0.0_f64..=1.0) {
            let sum = sum_of(&values);
            values.sort_unstable();
            let rank = ((values.len() as f64 * share).ceil() as usize).max(1);
            let exact = values[rank - 1];
            let found = sum.quantile_ns(share);
            prop_assert!(found >= exact && (found - exact) as f64 <= exact as f64 / 1000.0);
            let record = sum.record();
            prop_assert_eq!(record.quantile_ns(share), Some(found));
            prop_assert_eq!(record.sum_ns, values.iter().sum::<u64>() as f64);
            prop_assert_eq!((record.count, record.min_ns, record.max_ns), (values.len() as u64, values[0], values[values.len() - 1]));
        }
    }
}
