//! Limits of the rate at which a device, or a client, is served: requests and bytes per second.
//!
//! ```text
//!   reserve(now, bytes) ─▶ one token of `requests`, `bytes` tokens of `bytes` ─▶ when it may start
//! ```
//!
//! Each of the two is a token bucket that holds a *burst* and is filled at the rate. It is kept as
//! one number, the time at which the bucket will be full again (the generic cell rate algorithm of
//! ATM): a request moves this time on by what it costs. So many queues share a bucket by one
//! compare-and-swap, requests start in the order in which they asked, and no thread fills buckets.
//!
//! A request starts when its token of `requests` is there and the bucket of bytes is not in debt.
//! It takes its bytes from there in any case. So a request that is longer than the burst passes
//! too, and the next ones wait until its bytes are paid. In any span of time at most the rate times
//! the span, one burst and one request are started.
//!
//! Zeroing and discards take a token of `requests` and no bytes, since no payload moves. A flush
//! takes none: it would only delay what was already paid for.

use crate::queue::Operation;
use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};

const SECOND_NS: u64 = 1_000_000_000;

/// The burst that is allowed if none is set: what the rate gives in a tenth of a second, as QEMU
/// allows it.
const BURST_PER_SECOND: u64 = 10;

/// How fast a device or a client may be served. 0 is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// Requests per second.
    pub iops: u64,
    /// Bytes of reads and writes per second.
    pub bytes_per_second: u64,
    /// Requests that may start at once after a pause; 0 for a tenth of a second's.
    pub iops_burst: u64,
    /// Bytes that may start at once after a pause; 0 for a tenth of a second's.
    pub burst_bytes: u64,
}

impl RateLimits {
    /// Whether nothing is limited.
    pub fn is_unlimited(&self) -> bool {
        self.iops == 0 && self.bytes_per_second == 0
    }
}

/// One token bucket.
#[derive(Debug, Default)]
struct Bucket {
    /// Tokens per second; 0 is no limit.
    rate: AtomicU64,
    /// How far the time below may lie ahead when a request starts, in nanoseconds.
    tolerance_ns: AtomicU64,
    /// When the bucket will be full, in nanoseconds since the limiter was made.
    full_at_ns: AtomicU64,
}

/// What `tokens` cost at a rate, in nanoseconds, rounded up.
fn cost_ns(tokens: u64, rate: u64) -> u64 {
    let ns = (u128::from(tokens) * u128::from(SECOND_NS)).div_ceil(u128::from(rate.max(1)));
    u64::try_from(ns).unwrap_or(u64::MAX)
}

impl Bucket {
    /// `needed`: how many tokens must be there before a request starts.
    fn set(&self, rate: u64, burst: u64, needed: u64) {
        let burst = if burst == 0 { (rate / BURST_PER_SECOND).max(1) } else { burst };
        self.tolerance_ns.store(cost_ns(burst.saturating_sub(needed), rate), Ordering::Relaxed);
        self.rate.store(rate, Ordering::Relaxed);
        // What was reserved at the old rate no longer counts.
        self.full_at_ns.store(0, Ordering::Relaxed);
    }

    /// Takes `tokens`, and returns when the request may start.
    fn reserve(&self, now_ns: u64, tokens: u64) -> u64 {
        let rate = self.rate.load(Ordering::Relaxed);
        if rate == 0 || tokens == 0 {
            return now_ns;
        }
        let cost = cost_ns(tokens, rate);
        let next = |full_at_ns: u64| Some(full_at_ns.max(now_ns).saturating_add(cost));
        let before = match self.full_at_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) {
            Ok(before) | Err(before) => before,
        };
        before.saturating_sub(self.tolerance_ns.load(Ordering::Relaxed)).max(now_ns)
    }

    /// When the next request may start.
    fn next_start_ns(&self) -> u64 {
        if self.rate.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        self.full_at_ns.load(Ordering::Relaxed).saturating_sub(self.tolerance_ns.load(Ordering::Relaxed))
    }
}

/// Decides when requests may start. Shared by all queues of a device, or owned by a client.
#[derive(Debug)]
pub struct RateLimiter {
    began: Instant,
    requests: Bucket,
    bytes: Bucket,
    delayed: AtomicU64,
    is_limited: AtomicBool,
    /// As they were set. Requests do not take this lock.
    limits: Mutex<RateLimits>,
}

impl Default for RateLimiter {
    fn default() -> Self {
        Self::new(RateLimits::default())
    }
}

impl RateLimiter {
    /// A limiter with full buckets.
    pub fn new(limits: RateLimits) -> Self {
        let limiter = Self {
            began: Instant::now(),
            requests: Bucket::default(),
            bytes: Bucket::default(),
            delayed: AtomicU64::new(0),
            is_limited: AtomicBool::new(false),
            limits: Mutex::default(),
        };
        limiter.set(limits);
        limiter
    }

    /// Replaces the limits. Requests that already wait keep their time, and the buckets are full.
    pub fn set(&self, limits: RateLimits) {
        self.requests.set(limits.iops, limits.iops_burst, 1);
        self.bytes.set(limits.bytes_per_second, limits.burst_bytes, 0);
        self.is_limited.store(!limits.is_unlimited(), Ordering::Relaxed);
        *self.limits.lock().unwrap_or_else(PoisonError::into_inner) = limits;
    }

    /// The limits that are in force.
    pub fn limits(&self) -> RateLimits {
        *self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is any limit: if not, no request ever waits.
    #[inline]
    pub fn is_limited(&self) -> bool {
        self.is_limited.load(Ordering::Relaxed)
    }

    /// The limiter's clock, in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Takes the tokens of a request, and returns when it may start on the limiter's clock: now, or
    /// later. Never earlier than what was returned before, unless the limits were replaced.
    pub fn reserve(&self, now_ns: u64, operation: Operation, len_bytes: u64) -> u64 {
        let (requests, bytes) = match operation {
            Operation::Read | Operation::Write => (1, len_bytes),
            Operation::WriteZeroes | Operation::Discard => (1, 0),
            Operation::Flush => return now_ns,
        };
        let start_ns = self.requests.reserve(now_ns, requests).max(self.bytes.reserve(now_ns, bytes));
        if start_ns > now_ns {
            self.delayed.fetch_add(1, Ordering::Relaxed);
        }
        start_ns
    }

    /// When the next request may start on the limiter's clock, without taking its tokens.
    pub fn next_start_ns(&self) -> u64 {
        self.requests.next_start_ns().max(self.bytes.next_start_ns())
    }

    /// Requests that had to wait so far.
    pub fn delayed(&self) -> u64 {
        self.delayed.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests;
