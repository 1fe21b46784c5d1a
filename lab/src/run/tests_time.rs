//! Tests of when things are counted: the intervals of the time series, and what a schedule leaves undone at the end of a window.

use super::{simulated::Simulated, tests::*, *};
use crate::job::{Load, Rate, Span};

/// Requests for each millisecond of each interval.
fn rates(run: &Run) -> Vec<f64> {
    run.phases[0].series.iter().map(|point| point.read_ios as f64 * 1e6 / point.len_ns as f64).collect()
}

#[test]
fn every_interval_has_its_own_requests_and_its_true_length() {
    // Ticks are at most 250 ms, so an interval of 520 ms has three, which do not divide it in whole nanoseconds.
    let load = Load { queue_depth: 4, rate: Some(Rate::Iops { per_thread: 1000.0 }), ..Load::default() };
    let mut job = timed(load, 0, 1300);
    job.interval = Span::from_millis(520);
    let found = go(&job, &[target("x", Simulated::new(SIZE))]);
    let series = &found.phases[0].series;
    let lengths: Vec<u64> = series.iter().map(|point| point.len_ns / 1_000_000).collect();
    assert_eq!(lengths, [520, 520, 260]);
    assert_eq!(series.iter().map(|point| point.start_ns / 1_000_000).collect::<Vec<_>>(), [0, 520, 1040]);
    // Before, bins crossed the ends of intervals: the first had a tick too much (1.33 for each millisecond), the last one too few.
    assert!(rates(&found).iter().all(|rate| (0.75..1.25).contains(rate)), "{:?}", rates(&found));
}
