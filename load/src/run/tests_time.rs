//! Tests of the intervals of the time series, and of requests that are overdue at the end of a
//! window.

use super::{simulated::Simulated, tests::*, *};
use crate::{
    NullDevice,
    job::{Load, Rate, Span},
    warning::Warning,
};
use std::time::Duration;

/// Requests per millisecond of each interval.
fn rates(run: &Run) -> Vec<f64> {
    run.phases[0].series.iter().map(|point| point.read_ios as f64 * 1e6 / point.len_ns as f64).collect()
}

#[test]
fn every_interval_has_its_own_requests_and_its_true_length() {
    // Ticks are at most 250 ms. An interval of 520 ms has three ticks, which are not a whole number
    // of nanoseconds.
    let load = Load { queue_depth: 4, rate: Some(Rate::Iops { per_thread: 1000.0 }), ..Load::default() };
    let mut job = timed(load, 0, 1300);
    job.interval = Span::from_millis(520);
    let found = go(&job, &[target("x", Simulated::new(SIZE))]);
    let series = &found.phases[0].series;
    let lengths: Vec<u64> = series.iter().map(|point| point.len_ns / 1_000_000).collect();
    assert_eq!(lengths, [520, 520, 260]);
    assert_eq!(series.iter().map(|point| point.start_ns / 1_000_000).collect::<Vec<_>>(), [0, 520, 1040]);
    // If bins crossed the ends of intervals, the first interval would have one tick too many (1.33
    // requests per millisecond) and the last one too few.
    assert!(rates(&found).iter().all(|rate| (0.75..1.25).contains(rate)), "{:?}", rates(&found));
}

/// A load of `per_second` requests per second and thread, of which at most `queue_depth` are in
/// flight.
fn at_rate(per_second: f64, queue_depth: u32) -> Load {
    Load { queue_depth, rate: Some(Rate::Iops { per_thread: per_second }), ..Load::default() }
}

fn longer_than(latency: &crate::record::LatencyRecord, ns: u64) -> u64 {
    latency.buckets.iter().filter(|(highest, _)| *highest > ns).map(|(_, count)| count).sum()
}

#[test]
fn a_stall_at_the_end_of_the_window_is_in_the_latencies_and_gives_a_warning() {
    // 200 requests are due in two seconds. The one due 30 ms before the end takes 300 ms, and there
    // is no slot for the last two.
    let device = Simulated { slow: Some((197, Duration::from_millis(300))), ..Simulated::new(SIZE) };
    let found = go(&timed(at_rate(100.0, 1), 0, 2000), &[target("x", device.clone())]);
    let phase = &found.phases[0];
    let total = phase.total();
    let response = total.reads.response.as_ref().unwrap();
    assert_eq!((phase.window_ns, total.reads.ios, device.noted().len()), (2_000_000_000, 197, 198));
    assert!(response.max_ns >= 300_000_000, "the slow request is waited for: {}", response.max_ns);
    assert!(total.reads.service.max_ns < 300_000_000, "the slow request did not complete in the window");
    assert_eq!((response.count, total.overdue), (200, 2), "every request that was due has a response time");
    // The two that were not made had waited from 1.98 and 1.99 s to the end of the stall.
    assert_eq!(longer_than(response, 250_000_000), 3);
    // 98.5 % of the rate is above the limit of that warning, but overdue requests also give one.
    let said = found.head.warnings.iter().find(|warning| matches!(warning, Warning::RateNotKept { overdue: 2, .. }));
    assert!(said.is_some(), "{:?}", found.head.warnings);
    let told = said.unwrap().to_string();
    assert!(told.contains("2 requests due in the measured time were not made or not finished"), "{told}");
    let json = serde_json::to_value(&found).unwrap();
    assert_eq!(json["phases"][0]["threads"][0]["overdue"], 2);
    assert_eq!(serde_json::from_value::<Run>(json).unwrap(), found);
}

#[test]
fn requests_due_in_the_window_that_complete_in_the_cool_down_count_in_the_window() {
    // A request per 5 ms. The fiftieth takes a second, so the requests due after it are made in the
    // cool-down. The times are long, so that a busy machine delays no request out of the window.
    let device = Simulated { slow: Some((50, Duration::from_secs(1))), ..Simulated::new(SIZE) };
    let mut job = timed(at_rate(200.0, 1), 0, 500);
    job.phases[0].cool_down = Span::from_millis(2000);
    let found = go(&job, &[target("x", device)]);
    let phase = &found.phases[0];
    let total = phase.total();
    let response = total.reads.response.as_ref().unwrap();
    assert_eq!((response.count, total.overdue, total.reads.ios), (100, 0, 50));
    assert_eq!(total.reads.service.count, 50, "service times are those of completions in the window");
    // The last request was due 500 ms before the end of the stall.
    assert_eq!(longer_than(response, 500_000_000), 50);
    // An interval of the stall has no completions, and the latencies of the requests due in it.
    let second_half = phase.series.iter().filter(|point| (250_000_000..500_000_000).contains(&point.start_ns));
    let stalled: Vec<_> = second_half.filter(|point| point.read_ios == 0 && point.p50_ns > 0).collect();
    assert!(stalled.len() >= 2, "{:?}", phase.series);
    for point in stalled {
        assert!(point.p50_ns > 500_000_000 && point.mean_ns > 5e8, "{point:?}");
    }
}

#[test]
fn a_target_that_keeps_the_rate_has_no_overdue_requests() {
    for across_targets in [false, true] {
        // Deep enough for a generator that is blocked for a tenth of a second.
        let load = Load { threads: 2, across_targets, ..at_rate(2000.0, 256) };
        let targets = [target("x", NullDevice::new(SIZE)), target("y", Simulated::new(SIZE))];
        let found = go(&timed(load, 30, 100), &targets);
        for thread in &found.phases[0].threads {
            let response = thread.reads.response.as_ref().unwrap();
            assert_eq!((response.count, thread.overdue), (200, 0), "{across_targets}");
        }
        assert!(
            !found.head.warnings.iter().any(|warning| matches!(warning, Warning::RateNotKept { overdue: 1.., .. }))
        );
    }
}

#[test]
fn the_requests_that_an_overloaded_target_does_not_complete_are_overdue() {
    // The target completes 500 of 5,000 requests per second. After a warm-up, many requests are
    // already late at the start of the window.
    for warm_up_ms in [0, 200] {
        let device = Simulated { service: Duration::from_millis(2), ..Simulated::new(SIZE) };
        let found =
            go(&timed(Load { read_percent: 25.0, ..at_rate(5000.0, 1) }, warm_up_ms, 200), &[target("x", device)]);
        let (phase, total) = (&found.phases[0], found.phases[0].total());
        assert!((250.0..=500.0).contains(&phase.iops()), "{}", phase.iops());
        let response = total.both.response.as_ref().unwrap();
        let reads = total.reads.response.as_ref().unwrap().count;
        assert!((200..=300).contains(&reads), "a quarter of what was not made would have been reads: {reads}");
        assert_eq!(response.count, 1000, "all requests that were due have a response time");
        assert!((890..=1000).contains(&total.overdue), "{}", total.overdue);
        // Half of the requests had waited for more than about half of the window.
        assert!(response.quantile_ns(0.5).unwrap() >= 80_000_000, "{:?}", response.quantile_ns(0.5));
    }
}

#[test]
fn requests_that_a_failed_queue_does_not_complete_are_overdue() {
    // Four requests of a second each are in flight when the queue fails.
    let device = Simulated { service: Duration::from_secs(1), servers: 4, breaks: Some(3), ..Simulated::new(SIZE) };
    let found = go(&timed(at_rate(1000.0, 4), 0, 60_000), &[target("x", device)]);
    assert!(matches!(found.head.end, End::Failed { .. }));
    let total = found.phases[0].total();
    assert!(total.overdue >= 4, "{}", total.overdue);
    assert_eq!((total.reads.ios, total.reads.response.as_ref().unwrap().count), (0, total.overdue));
}
