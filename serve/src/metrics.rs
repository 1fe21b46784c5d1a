//! Counters of a server: for the live line of `serve`, and for Prometheus (`--metrics`).
//!
//! Each worker has counters of its own and is their only writer. An increment is one load and one
//! store to a cache line that no other processor writes, without a lock. [`Metrics::totals`] adds
//! the workers up. A request's latency runs from when its header was decoded to when its reply was
//! put into the outbox; it is counted in buckets whose bounds double from 8 us.

use diskwright_nbd::wire::{Command, ErrorCode};
use std::{
    fmt::Write,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering::Relaxed},
    },
};

/// Upper bounds of the latency buckets, in microseconds; one more bucket is for everything above.
pub const BUCKETS_US: [u64; 18] =
    [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576];

/// Commands that have counters of their own.
pub const COMMANDS: [(&str, Command); 7] = [
    ("read", Command::READ),
    ("write", Command::WRITE),
    ("flush", Command::FLUSH),
    ("trim", Command::TRIM),
    ("cache", Command::CACHE),
    ("write_zeroes", Command::WRITE_ZEROES),
    ("block_status", Command::BLOCK_STATUS),
];

/// A number that one thread writes and any thread reads.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    #[inline]
    pub(crate) fn add(&self, count: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(count), Relaxed);
    }

    #[inline]
    pub(crate) fn set(&self, count: u64) {
        self.0.store(count, Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Counters of one command.
#[derive(Debug, Default)]
struct CommandMetrics {
    requests: Counter,
    bytes: Counter,
    errors: Counter,
    latency_ns: Counter,
    buckets: [Counter; BUCKETS_US.len() + 1],
}

/// Counters of one worker. Aligned so that two workers never share a cache line.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct WorkerMetrics {
    commands: [CommandMetrics; COMMANDS.len()],
    /// Open connections of this worker. The front thread increments, the worker decrements.
    pub(crate) connections: AtomicI64,
    /// Requests taken from clients and not yet completed by the disks.
    pub(crate) in_flight: AtomicI64,
    /// Connections that the server closed because of a protocol error or a time-out.
    pub(crate) broken: Counter,
    /// Calls of io_uring_enter.
    pub(crate) enters: Counter,
    /// Wake-ups by messages of other threads.
    pub(crate) wakeups: Counter,
    /// Reads that were held back (see `reserve`).
    pub(crate) held: Arc<Counter>,
    /// Bytes of write payload that were copied out of receive windows.
    pub(crate) copied_bytes: Counter,
}

impl WorkerMetrics {
    /// Counts a request that was answered. `bytes` count only if it succeeded.
    #[inline]
    pub(crate) fn answered(&self, command: Command, bytes: u64, latency_ns: u64, error: Option<ErrorCode>) {
        let index = match command {
            Command::READ => 0,
            Command::WRITE => 1,
            Command::FLUSH => 2,
            Command::TRIM => 3,
            Command::CACHE => 4,
            Command::WRITE_ZEROES => 5,
            Command::BLOCK_STATUS => 6,
            _ => return,
        };
        let counted = &self.commands[index];
        counted.requests.add(1);
        match error {
            None => counted.bytes.add(bytes),
            Some(_) => counted.errors.add(1),
        }
        counted.latency_ns.add(latency_ns);
        counted.buckets[bucket_of(latency_ns)].add(1);
    }
}

/// The bucket of a latency: the first whose bound is at least the latency.
fn bucket_of(latency_ns: u64) -> usize {
    let eights = latency_ns.div_ceil(1000).div_ceil(BUCKETS_US[0]).max(1);
    (eights.next_power_of_two().trailing_zeros() as usize).min(BUCKETS_US.len())
}

/// Counters summed over all workers, at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Totals {
    /// In the order of [`COMMANDS`].
    pub commands: [CommandTotals; COMMANDS.len()],
    /// Open connections.
    pub connections: u64,
    /// Requests in flight.
    pub in_flight: u64,
    /// Connections accepted so far.
    pub accepted: u64,
    /// Connections refused: over the limit, or from an address that is not allowed.
    pub refused: u64,
    /// Connections that the server closed because of a protocol error or a time-out.
    pub broken: u64,
    /// Calls of io_uring_enter.
    pub enters: u64,
    /// How often another thread woke a worker: for a new client, and for the end of the server.
    pub wakeups: u64,
    /// Reads that were held back until the disk had completed a batch.
    pub held: u64,
    /// Bytes of write payload that were copied because they could not be written from the receive
    /// window.
    pub copied_bytes: u64,
}

/// Counters of one command.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CommandTotals {
    /// Requests answered.
    pub requests: u64,
    /// Bytes of the requests that succeeded.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Sum of the latencies of all requests, in nanoseconds.
    pub latency_ns: u64,
    /// Requests in each bucket of [`BUCKETS_US`], not cumulative. The last bucket has no bound.
    pub buckets: [u64; BUCKETS_US.len() + 1],
}

/// The counters of a server, shared by its workers, its front thread and the readers.
#[derive(Debug)]
pub struct Metrics {
    /// The protocol, as in the names for Prometheus.
    door: &'static str,
    workers: Vec<Arc<WorkerMetrics>>,
    pub(crate) accepted: Counter,
    pub(crate) refused: Counter,
}

impl Metrics {
    /// `door` is the protocol, as in the names for Prometheus.
    pub(crate) fn new(door: &'static str, workers: usize) -> Self {
        let workers = (0..workers).map(|_| Arc::default()).collect();
        Self { door, workers, accepted: Counter::default(), refused: Counter::default() }
    }

    pub(crate) fn worker(&self, index: usize) -> &Arc<WorkerMetrics> {
        &self.workers[index]
    }

    /// Sums the counters of all workers.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals { accepted: self.accepted.get(), refused: self.refused.get(), ..Totals::default() };
        let (mut connections, mut in_flight) = (0, 0);
        for worker in &self.workers {
            connections += worker.connections.load(Relaxed);
            in_flight += worker.in_flight.load(Relaxed);
            totals.broken += worker.broken.get();
            totals.enters += worker.enters.get();
            totals.wakeups += worker.wakeups.get();
            totals.held += worker.held.get();
            totals.copied_bytes += worker.copied_bytes.get();
            for (sum, of) in totals.commands.iter_mut().zip(&worker.commands) {
                sum.requests += of.requests.get();
                sum.bytes += of.bytes.get();
                sum.errors += of.errors.get();
                sum.latency_ns += of.latency_ns.get();
                sum.buckets.iter_mut().zip(&of.buckets).for_each(|(sum, of)| *sum += of.get());
            }
        }
        totals.connections = connections.max(0) as u64;
        totals.in_flight = in_flight.max(0) as u64;
        totals
    }

    /// The counters in the Prometheus text format 0.0.4.
    pub fn prometheus(&self) -> String {
        let totals = self.totals();
        let mut out = String::with_capacity(8 << 10);
        let door = self.door;
        let by_command = |out: &mut String, what: &str, help, of: fn(&CommandTotals) -> u64| {
            let name = format!("diskwright_{door}_{what}");
            family(out, &name, "counter", help);
            for ((command, _), totals) in COMMANDS.iter().zip(&totals.commands) {
                let _ = writeln!(out, "{name}{{command=\"{command}\"}} {}", of(totals));
            }
        };
        by_command(&mut out, "requests_total", "Requests answered.", |totals| totals.requests);
        by_command(&mut out, "errors_total", "Requests that failed.", |totals| totals.errors);
        by_command(&mut out, "bytes_total", "Bytes of requests that succeeded.", |totals| totals.bytes);
        let name = format!("diskwright_{door}_request_seconds");
        family(&mut out, &name, "histogram", "Time from when a request was understood to its reply.");
        for ((command, _), totals) in COMMANDS.iter().zip(&totals.commands) {
            let mut below = 0;
            for (bound_us, count) in BUCKETS_US.iter().zip(&totals.buckets) {
                below += count;
                let bound = *bound_us as f64 / 1e6;
                let _ = writeln!(out, "{name}_bucket{{command=\"{command}\",le=\"{bound}\"}} {below}");
            }
            let seconds = totals.latency_ns as f64 / 1e9;
            let _ = writeln!(out, "{name}_bucket{{command=\"{command}\",le=\"+Inf\"}} {}", totals.requests);
            let _ = writeln!(out, "{name}_sum{{command=\"{command}\"}} {seconds}");
            let _ = writeln!(out, "{name}_count{{command=\"{command}\"}} {}", totals.requests);
        }
        // NBD's is older than the other servers, so it is not named after it.
        let enters = match door {
            "nbd" => "diskwright_io_uring_enters_total".to_owned(),
            _ => format!("diskwright_{door}_io_uring_enters_total"),
        };
        for (name, kind, help, value) in [
            (format!("diskwright_{door}_connections"), "gauge", "Connections at this moment.", totals.connections),
            (
                format!("diskwright_{door}_requests_in_flight"),
                "gauge",
                "Requests taken and not answered.",
                totals.in_flight,
            ),
            (
                format!("diskwright_{door}_connections_accepted_total"),
                "counter",
                "Connections accepted.",
                totals.accepted,
            ),
            (format!("diskwright_{door}_connections_refused_total"), "counter", "Connections refused.", totals.refused),
            (
                format!("diskwright_{door}_connections_broken_total"),
                "counter",
                "Connections ended because of what the client did.",
                totals.broken,
            ),
            (enters, "counter", "Calls of io_uring_enter.", totals.enters),
        ] {
            family(&mut out, &name, kind, help);
            let _ = writeln!(out, "{name} {value}");
        }
        out
    }
}

/// Writes the `# HELP` and `# TYPE` lines of a metric.
pub(crate) fn family(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_latency_is_in_the_first_bucket_that_holds_it() {
        for latency_ns in [0, 1, 7_999, 8_000, 8_001, 16_000, 16_001, 1_000_000, 1_048_576_000, 1_048_576_001, u64::MAX]
        {
            let bucket = bucket_of(latency_ns);
            let latency_us = latency_ns.div_ceil(1000);
            if let Some(&bound) = BUCKETS_US.get(bucket) {
                assert!(latency_us <= bound, "{latency_ns} in bucket {bucket}");
            }
            assert!(bucket == 0 || latency_us > BUCKETS_US[bucket - 1], "{latency_ns} in bucket {bucket}");
        }
    }

    #[test]
    fn workers_are_added_up() {
        let metrics = Metrics::new("nbd", 2);
        metrics.worker(0).answered(Command::READ, 4096, 10_000, None);
        metrics.worker(1).answered(Command::READ, 4096, 10_000, None);
        metrics.worker(1).answered(Command::WRITE, 512, 2_000_000_000, Some(ErrorCode::ENOSPC));
        metrics.worker(0).answered(Command(77), 0, 0, Some(ErrorCode::EINVAL));
        metrics.worker(0).connections.store(3, Relaxed);
        let totals = metrics.totals();
        assert_eq!((totals.commands[0].requests, totals.commands[0].bytes, totals.connections), (2, 8192, 3));
        assert_eq!((totals.commands[1].errors, totals.commands[1].bytes), (1, 0));
        let text = metrics.prometheus();
        for line in [
            "diskwright_nbd_requests_total{command=\"read\"} 2",
            "diskwright_nbd_errors_total{command=\"write\"} 1",
            "diskwright_nbd_request_seconds_bucket{command=\"read\",le=\"0.000008\"} 0",
            "diskwright_nbd_request_seconds_bucket{command=\"read\",le=\"0.000016\"} 2",
            "diskwright_nbd_request_seconds_bucket{command=\"write\",le=\"1.048576\"} 0",
            "diskwright_nbd_request_seconds_bucket{command=\"write\",le=\"+Inf\"} 1",
            "diskwright_nbd_request_seconds_sum{command=\"read\"} 0.00002",
            "# TYPE diskwright_nbd_request_seconds histogram",
            "diskwright_nbd_connections 3",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
