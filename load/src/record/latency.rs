//! Latencies of a record: exact moments, and a sparse histogram from which any percentile can be
//! computed.
//!
//! Histograms are added bucket by bucket, so a percentile of a sum is as precise as those of its
//! parts.

use serde::{Deserialize, Serialize};

/// Reads, writes or flushes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct DirectionRecord {
    /// Requests completed in the window.
    pub ios: u64,
    /// Bytes read or written.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Service time: from the making of a request to its completion.
    pub service: LatencyRecord,
    /// Response time: from the intended start of a request to its completion, of the requests that
    /// were due in the window; `None` without a schedule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response: Option<LatencyRecord>,
}

/// Latencies, nanoseconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct LatencyRecord {
    /// Number of latencies.
    pub count: u64,
    /// Exact sum.
    pub sum_ns: f64,
    /// Exact sum of squares, for the standard deviation.
    pub sum_of_squares: f64,
    /// Shortest latency.
    pub min_ns: u64,
    /// Longest latency.
    pub max_ns: u64,
    /// Sparse histogram, ascending: (highest latency of the bucket, count).
    pub buckets: Vec<(u64, u64)>,
}

impl LatencyRecord {
    /// Arithmetic mean, nanoseconds; 0 without latencies.
    pub fn mean_ns(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum_ns / self.count as f64 }
    }

    /// Standard deviation, nanoseconds; 0 without latencies.
    pub fn std_dev_ns(&self) -> f64 {
        if self.count == 0 {
            return 0.0;
        }
        let mean = self.mean_ns();
        (self.sum_of_squares / self.count as f64 - mean * mean).max(0.0).sqrt()
    }

    /// The latency that a share of `share` (0 to 1) of the requests do not exceed, nanoseconds;
    /// `None` without latencies.
    pub fn quantile_ns(&self, share: f64) -> Option<u64> {
        let total: u64 = self.buckets.iter().map(|(_, count)| count).sum();
        if total == 0 {
            return None;
        }
        let rank = ((total as f64 * share.clamp(0.0, 1.0)).ceil() as u64).max(1);
        let mut seen = 0;
        for (value, count) in &self.buckets {
            seen += count;
            if seen >= rank {
                return Some((*value).min(self.max_ns));
            }
        }
        Some(self.max_ns)
    }

    /// Number of nines of the highest percentile with at least ten samples above it: 2 for the 99th
    /// percentile. Higher percentiles are not reliable.
    pub fn nines(&self) -> u32 {
        let mut nines = 0;
        while nines < 9 && self.count as f64 * 10_f64.powi(-(nines as i32 + 1)) >= 10.0 {
            nines += 1;
        }
        nines
    }

    /// Adds the latencies of `other`.
    pub fn add(&mut self, other: &Self) {
        if other.count == 0 {
            return;
        }
        self.min_ns = if self.count == 0 { other.min_ns } else { self.min_ns.min(other.min_ns) };
        self.max_ns = self.max_ns.max(other.max_ns);
        self.count += other.count;
        self.sum_ns += other.sum_ns;
        self.sum_of_squares += other.sum_of_squares;
        let mut merged = Vec::with_capacity(self.buckets.len().max(other.buckets.len()));
        let (mut ours, mut theirs) = (self.buckets.iter().peekable(), other.buckets.iter().peekable());
        loop {
            let next = match (ours.peek(), theirs.peek()) {
                (Some(a), Some(b)) if a.0 == b.0 => {
                    let sum = (a.0, a.1 + b.1);
                    ours.next();
                    theirs.next();
                    sum
                }
                (Some(a), Some(b)) if a.0 < b.0 => *ours.next().unwrap_or(b),
                (Some(_), None) => match ours.next() {
                    Some(bucket) => *bucket,
                    None => break,
                },
                (_, Some(_)) => match theirs.next() {
                    Some(bucket) => *bucket,
                    None => break,
                },
                (None, None) => break,
            };
            merged.push(next);
        }
        self.buckets = merged;
    }
}

impl DirectionRecord {
    /// Adds the requests of `other`.
    pub fn add(&mut self, other: &Self) {
        // Without a schedule the response time equals the service time.
        if other.response.is_some() || self.response.is_some() {
            let mut mine = self.response.take().unwrap_or_else(|| self.service.clone());
            mine.add(other.response.as_ref().unwrap_or(&other.service));
            self.response = Some(mine);
        }
        self.ios += other.ios;
        self.bytes += other.bytes;
        self.errors += other.errors;
        self.service.add(&other.service);
    }

    /// The response time where there is a schedule, else the service time.
    pub fn latency(&self) -> &LatencyRecord {
        self.response.as_ref().unwrap_or(&self.service)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn latencies(values: &[u64]) -> LatencyRecord {
        let mut record = LatencyRecord::default();
        for value in values {
            record.add(&LatencyRecord {
                count: 1,
                sum_ns: *value as f64,
                sum_of_squares: (*value as f64).powi(2),
                min_ns: *value,
                max_ns: *value,
                buckets: vec![(*value, 1)],
            });
        }
        record
    }

    #[test]
    fn a_percentile_is_reliable_with_ten_samples_above_it() {
        let nines = |count| LatencyRecord { count, ..LatencyRecord::default() }.nines();
        assert_eq!([99, 100, 999, 1_000, 10_000, 1_000_000_000].map(nines), [0, 1, 1, 2, 3, 8]);
    }

    #[test]
    fn directions_with_and_without_a_schedule_add_up() {
        let plain = DirectionRecord { ios: 1, service: latencies(&[10]), ..DirectionRecord::default() };
        let late =
            DirectionRecord { ios: 1, service: latencies(&[10]), response: Some(latencies(&[90])), ..plain.clone() };
        let mut sum = plain.clone();
        sum.add(&late);
        assert_eq!((sum.service.max_ns, sum.latency().max_ns, sum.latency().min_ns, sum.ios), (10, 90, 10, 2));
    }

    proptest! {
        #[test]
        fn quantiles_and_moments_equal_those_of_the_values(mut values in prop::collection::vec(1_u64..1_000_000, 1..200), share in 0.0_f64..1.0) {
            let record = latencies(&values);
            values.sort_unstable();
            let rank = ((values.len() as f64 * share).ceil() as usize).max(1);
            prop_assert_eq!(record.quantile_ns(share), Some(values[rank - 1]));
            let mean = values.iter().sum::<u64>() as f64 / values.len() as f64;
            prop_assert!((record.mean_ns() - mean).abs() < 1e-6 * mean);
            prop_assert_eq!((record.min_ns, record.max_ns, record.count), (values[0], values[values.len() - 1], values.len() as u64));
        }
    }
}
