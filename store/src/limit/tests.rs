use super::*;
use proptest::prelude::*;

fn starts(limits: RateLimits, count: u64, len_bytes: u64) -> Vec<u64> {
    let limiter = RateLimiter::new(limits);
    (0..count).map(|_| limiter.reserve(0, Operation::Read, len_bytes)).collect()
}

#[test]
fn a_burst_starts_at_once_and_then_the_rate_holds() {
    let limits = RateLimits { iops: 1000, iops_burst: 3, ..RateLimits::default() };
    assert_eq!(starts(limits, 6, 4096), [0, 0, 0, 1_000_000, 2_000_000, 3_000_000]);
    let limiter = RateLimiter::new(limits);
    for expected in [0, 0, 0, 1_000_000] {
        assert_eq!(limiter.next_start_ns(), expected);
        assert_eq!(limiter.reserve(0, Operation::Read, 512), expected);
    }
    let limits = RateLimits { iops: 100, ..RateLimits::default() };
    assert_eq!(starts(limits, 12, 4096)[9..], [0, 10_000_000, 20_000_000], "a burst of a tenth of a second");
}

#[test]
fn a_request_longer_than_the_burst_starts_and_the_next_one_pays() {
    let limits = RateLimits { bytes_per_second: 1_000_000, burst_bytes: 1000, ..RateLimits::default() };
    assert_eq!(starts(limits, 3, 1_000_000), [0, 999_000_000, 1_999_000_000]);
}

#[test]
fn the_slower_of_both_limits_decides() {
    let limits = RateLimits { iops: 1000, bytes_per_second: 4_096_000, iops_burst: 1, burst_bytes: 1 };
    let limiter = RateLimiter::new(limits);
    assert_eq!(limiter.reserve(0, Operation::Write, 40960), 0);
    assert_eq!(limiter.reserve(0, Operation::Discard, 1 << 40), 1_000_000, "a discard moves no bytes");
    assert_eq!(limiter.reserve(0, Operation::Flush, 0), 0, "a flush is never delayed");
    let start = limiter.reserve(0, Operation::Read, 4096);
    assert!((9_999_000..=10_000_000).contains(&start), "{start}");
    assert_eq!(limiter.delayed(), 2);
}

#[test]
fn limits_are_replaced_and_removed() {
    let limiter = RateLimiter::new(RateLimits { iops: 1, iops_burst: 1, ..RateLimits::default() });
    assert_eq!(limiter.reserve(0, Operation::Read, 512), 0);
    assert_eq!(limiter.reserve(0, Operation::Read, 512), SECOND_NS);
    limiter.set(RateLimits { iops: 10, iops_burst: 1, ..RateLimits::default() });
    assert_eq!(limiter.reserve(5, Operation::Read, 512), 5);
    limiter.set(RateLimits::default());
    assert!((0..1000).all(|_| limiter.reserve(7, Operation::Write, 1 << 30) == 7));
}

#[test]
fn extreme_values_do_not_overflow() {
    let most = RateLimits { iops: u64::MAX, bytes_per_second: 1, iops_burst: u64::MAX, burst_bytes: u64::MAX };
    let limiter = RateLimiter::new(most);
    for _ in 0..3 {
        limiter.reserve(u64::MAX, Operation::Write, u64::MAX);
    }
}

proptest! {
    /// No window of requests has more than the rate times its span, a burst and one request.
    #[test]
    fn no_span_of_time_has_more_than_the_rate_and_a_burst(
        iops in 1u64..100_000, burst in 1u64..50, rate in 1u64..1 << 32, burst_bytes in 1u64..1 << 24,
        requests in proptest::collection::vec((0u64..20_000_000, 1u64..1 << 20), 2..60),
    ) {
        let limits = RateLimits { iops, iops_burst: burst, bytes_per_second: rate, burst_bytes };
        let limiter = RateLimiter::new(limits);
        let (mut now, mut last) = (0, 0);
        let mut started = Vec::new();
        for (pause, len) in requests {
            now += pause;
            let start = limiter.reserve(now, Operation::Write, len);
            prop_assert!(start >= now && start >= last, "requests start in order");
            last = start;
            started.push((start, len));
        }
        for first in 0..started.len() {
            for end in first + 1..=started.len() {
                let inside = &started[first..end];
                let span_ns = u128::from(inside[inside.len() - 1].0 - inside[0].0);
                let most = span_ns * u128::from(iops) / u128::from(SECOND_NS) + u128::from(burst) + 1;
                prop_assert!(inside.len() as u128 <= most, "{} requests in {span_ns} ns", inside.len());
                let bytes: u128 = inside[..inside.len() - 1].iter().map(|&(_, len)| u128::from(len)).sum();
                let most = span_ns * u128::from(rate) / u128::from(SECOND_NS) + u128::from(burst_bytes) + (1 << 20);
                prop_assert!(bytes <= most, "{bytes} bytes in {span_ns} ns");
            }
        }
    }
}
