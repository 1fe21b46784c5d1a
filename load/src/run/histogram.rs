//! Latency histograms with three significant digits.
//!
//! A value below 2,048 has a bucket of its own. Above, each power of two is divided into 1,024
//! equal buckets, so a bucket is never wider than a thousandth of its values. A bucket is found by
//! a count of leading zeros, a shift and an addition. The layout is that of HDR histograms.
//!
//! ```text
//!   value   0 .. 2047   2048 .. 4095 by 2   4096 .. 8191 by 4   ...   2^63 .. 2^64 by 2^53
//!   bucket  0 .. 2047   2048 .. 3071        3072 .. 4095              55296 .. 56319
//! ```
//!
//! Every value of 64 bits has a bucket, so no latency is cut off and none falls out of the
//! percentiles. A measuring thread counts into [`Latencies`] between two cuts (220 KiB), and the
//! conductor adds them up in a [`HistogramSum`] (440 KiB). Only the buckets between the minimum and
//! the maximum are touched. Minimum, maximum, moments and counts are exact.

use crate::record::LatencyRecord;

/// Values below this have a bucket of their own. It is twice the number of buckets of a power of
/// two.
const EXACT: u64 = 2048;
const EXACT_BITS: u32 = EXACT.ilog2();
/// Number of buckets.
const BUCKETS: usize = bucket_of(u64::MAX) + 1;

/// The bucket of a value.
#[inline]
const fn bucket_of(value: u64) -> usize {
    let shift = (63 - (value | (EXACT - 1)).leading_zeros()) - (EXACT_BITS - 1);
    ((shift as u64) * (EXACT / 2) + (value >> shift)) as usize
}

/// The largest value of a bucket.
const fn highest_of(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    let shift = (bucket / (EXACT / 2)).saturating_sub(1);
    ((bucket - shift * (EXACT / 2)) << shift) | ((1 << shift) - 1)
}

/// The histogram of a measuring thread. 32-bit counts are enough: a cut comes every few hundred
/// milliseconds, or, when the target stalls, after few requests.
#[derive(Debug, Clone)]
pub(crate) struct Latencies {
    counts: Box<[u32]>,
    pub(crate) count: u64,
    sum_ns: u128,
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
        self.counts[bucket_of(latency_ns)] += 1;
        self.count += 1;
        self.sum_ns += u128::from(latency_ns);
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
        self.sum_ns += latencies.sum_ns;
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
        let mut next = Some(0);
        for bucket in 0..BUCKETS {
            let first = next.unwrap();
            assert_eq!(bucket_of(first), bucket, "the first value of bucket {bucket} is {first}");
            assert_eq!(bucket_of(highest_of(bucket)), bucket);
            next = highest_of(bucket).checked_add(1);
        }
        assert_eq!(next, None, "the last bucket ends with u64");
    }

    #[test]
    fn histograms_of_a_thread_are_small() {
        // Two directions, service and response, one in use and one in the channel: less than
        // 2 MiB per thread.
        assert!(BUCKETS * size_of::<u32>() * 2 * 2 * 2 < 2 << 20);
    }

    #[test]
    fn zero_and_very_long_latencies_are_counted() {
        assert_eq!(HistogramSum::default().record(), LatencyRecord::default());
        assert_eq!(HistogramSum::default().quantile_ns(0.5), 0);
        let record = sum_of(&[u64::MAX, 0]).record();
        assert_eq!((record.min_ns, record.max_ns, record.buckets.len()), (0, u64::MAX, 2));
        assert_eq!((record.quantile_ns(0.5), record.quantile_ns(1.0)), (Some(0), Some(u64::MAX)));
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
        fn a_bucket_is_at_most_a_thousandth_wide(value: u64) {
            let highest = highest_of(bucket_of(value));
            prop_assert!(value <= highest && (highest - value) as f64 <= value as f64 / 1000.0);
        }

        #[test]
        fn parts_that_are_merged_have_the_bins_of_one_recording(parts in prop::collection::vec(prop::collection::vec(any::<u64>(), 0..50), 1..9)) {
            let mut merged = LatencyRecord::default();
            for part in &parts {
                merged.add(&sum_of(part).record());
            }
            let pooled = sum_of(&parts.concat()).record();
            prop_assert_eq!(&merged.buckets, &pooled.buckets);
            prop_assert_eq!((merged.count, merged.min_ns, merged.max_ns), (pooled.count, pooled.min_ns, pooled.max_ns));
            for share in [0.0, 0.5, 0.9, 0.99, 0.999, 1.0] {
                prop_assert_eq!(merged.quantile_ns(share), pooled.quantile_ns(share));
            }
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
