//! Counters of a server: for the live line of `serve`, and for Prometheus (`--metrics`).
//!
//! Each worker has counters of its own and is their only writer. An increment is one load and one
//! store to a cache line that no other processor writes, without a lock. [`Metrics::totals`] adds
//! the workers up. A request's latency runs from when its header was decoded to when its reply was
//! put into the outbox; it is counted in buckets whose bounds double from 8 us.

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

/// The names of the commands that have counters of their own, in the order of [`Kind`].
pub const COMMANDS: [&str; 8] = ["read", "write", "flush", "trim", "cache", "write_zeroes", "block_status", "compare"];

/// What a request asks for, whatever its protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Flush,
    Trim,
    Cache,
    WriteZeroes,
    BlockStatus,
    Compare,
    /// Not counted.
    Other,
}

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
    pub(crate) fn answered(&self, kind: Kind, bytes: u64, latency_ns: u64, failed: bool) {
        let Some(counted) = self.commands.get(kind as usize) else { return };
        counted.requests.add(1);
        if failed {
            counted.errors.add(1);
        } else {
            counted.bytes.add(bytes);
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

impl Totals {
    /// The sums of both.
    pub fn and(mut self, other: &Self) -> Self {
        for (sum, other) in self.commands.iter_mut().zip(&other.commands) {
            sum.requests += other.requests;
            sum.bytes += other.bytes;
            sum.errors += other.errors;
            sum.latency_ns += other.latency_ns;
            sum.buckets.iter_mut().zip(&other.buckets).for_each(|(sum, other)| *sum += other);
        }
        Self {
            commands: self.commands,
            connections: self.connections + other.connections,
            in_flight: self.in_flight + other.in_flight,
            accepted: self.accepted + other.accepted,
            refused: self.refused + other.refused,
            broken: self.broken + other.broken,
            enters: self.enters + other.enters,
            wakeups: self.wakeups + other.wakeups,
            held: self.held + other.held,
            copied_bytes: self.copied_bytes + other.copied_bytes,
        }
    }
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
    /// The labels of this server among those of its protocol, each with a comma behind it.
    labels: String,
    workers: Vec<Arc<WorkerMetrics>>,
    pub(crate) accepted: Counter,
    pub(crate) refused: Counter,
}

impl Metrics {
    /// `door` is the protocol, as in the names for Prometheus.
    pub(crate) fn new(door: &'static str, workers: usize) -> Self {
        let workers = (0..workers).map(|_| Arc::default()).collect();
        Self { door, labels: String::new(), workers, accepted: Counter::default(), refused: Counter::default() }
    }

    /// The same with a label, for one of several servers of its protocol.
    pub(crate) fn labelled(mut self, key: &str, value: &str) -> Self {
        let _ = write!(self.labels, "{key}=\"{}\",", label(value));
        self
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

    /// The counters of servers in the Prometheus text format 0.0.4. Those of one protocol share
    /// their families.
    pub fn prometheus(all: &[Arc<Self>]) -> String {
        let mut out = String::with_capacity(8 << 10);
        let mut told: Vec<&str> = Vec::new();
        for metrics in all {
            if !told.contains(&metrics.door) {
                told.push(metrics.door);
                let same: Vec<_> = all.iter().filter(|other| other.door == metrics.door).collect();
                let totals: Vec<_> = same.iter().map(|one| (one.labels.as_str(), one.totals())).collect();
                write_door(&mut out, metrics.door, &totals);
            }
        }
        out
    }
}

/// Writes the counters of the servers of one protocol, each with its labels.
fn write_door(out: &mut String, door: &str, servers: &[(&str, Totals)]) {
    let by_command = |out: &mut String, what: &str, help, of: fn(&CommandTotals) -> u64| {
        let name = format!("diskwright_{door}_{what}");
        family(out, &name, "counter", help);
        for (labels, totals) in servers {
            for (command, totals) in COMMANDS.iter().zip(&totals.commands) {
                let _ = writeln!(out, "{name}{{{labels}command=\"{command}\"}} {}", of(totals));
            }
        }
    };
    by_command(out, "requests_total", "Requests answered.", |totals| totals.requests);
    by_command(out, "errors_total", "Requests that failed.", |totals| totals.errors);
    by_command(out, "bytes_total", "Bytes of requests that succeeded.", |totals| totals.bytes);
    let name = format!("diskwright_{door}_request_seconds");
    family(out, &name, "histogram", "Time from when a request was understood to its reply.");
    for (labels, totals) in servers {
        for (command, totals) in COMMANDS.iter().zip(&totals.commands) {
            let labels = format!("{labels}command=\"{command}\"");
            let mut below = 0;
            for (bound_us, count) in BUCKETS_US.iter().zip(&totals.buckets) {
                below += count;
                let bound = *bound_us as f64 / 1e6;
                let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{bound}\"}} {below}");
            }
            let seconds = totals.latency_ns as f64 / 1e9;
            let _ = writeln!(out, "{name}_bucket{{{labels},le=\"+Inf\"}} {}", totals.requests);
            let _ = writeln!(out, "{name}_sum{{{labels}}} {seconds}");
            let _ = writeln!(out, "{name}_count{{{labels}}} {}", totals.requests);
        }
    }
    // NBD's is older than the other servers, so it is not named after it.
    let enters = match door {
        "nbd" => "diskwright_io_uring_enters_total".to_owned(),
        _ => format!("diskwright_{door}_io_uring_enters_total"),
    };
    let own = |what: &str| format!("diskwright_{door}_{what}");
    let mut whole = |name: String, kind, help, of: fn(&Totals) -> u64| {
        family(out, &name, kind, help);
        for (labels, totals) in servers {
            let labels =
                if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.trim_end_matches(',')) };
            let _ = writeln!(out, "{name}{labels} {}", of(totals));
        }
    };
    whole(own("connections"), "gauge", "Connections at this moment.", |totals| totals.connections);
    whole(own("requests_in_flight"), "gauge", "Requests taken and not answered.", |totals| totals.in_flight);
    whole(own("connections_accepted_total"), "counter", "Connections accepted.", |totals| totals.accepted);
    whole(own("connections_refused_total"), "counter", "Connections refused.", |totals| totals.refused);
    let broken = "Connections ended because of what the client did.";
    whole(own("connections_broken_total"), "counter", broken, |totals| totals.broken);
    whole(enters, "counter", "Calls of io_uring_enter.", |totals| totals.enters);
}

/// Escaped as the value of a label.
pub fn label(name: &str) -> String {
    name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
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
        metrics.worker(0).answered(Kind::Read, 4096, 10_000, false);
        metrics.worker(1).answered(Kind::Read, 4096, 10_000, false);
        metrics.worker(1).answered(Kind::Write, 512, 2_000_000_000, true);
        metrics.worker(0).answered(Kind::Other, 0, 0, true);
        metrics.worker(0).connections.store(3, Relaxed);
        let totals = metrics.totals();
        assert_eq!((totals.commands[0].requests, totals.commands[0].bytes, totals.connections), (2, 8192, 3));
        assert_eq!((totals.commands[1].errors, totals.commands[1].bytes), (1, 0));
        let text = Metrics::prometheus(&[Arc::new(metrics)]);
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

    #[test]
    fn servers_of_one_protocol_share_their_families() {
        let machine = |disk: &str, reads| {
            let metrics = Metrics::new("vhost_user", 1).labelled("disk", disk).labelled("socket", "/s");
            (0..reads).for_each(|_| metrics.worker(0).answered(Kind::Read, 512, 1000, false));
            Arc::new(metrics)
        };
        let all = [Arc::new(Metrics::new("nbd", 1)), machine("a", 1), machine("b\"", 2)];
        let text = Metrics::prometheus(&all);
        let count = |words: &str| text.lines().filter(|line| line.contains(words)).count();
        assert_eq!(count("# TYPE diskwright_vhost_user_requests_total counter"), 1);
        assert_eq!(count("# TYPE diskwright_nbd_requests_total counter"), 1);
        for line in [
            "diskwright_vhost_user_requests_total{disk=\"a\",socket=\"/s\",command=\"read\"} 1",
            "diskwright_vhost_user_requests_total{disk=\"b\\\"\",socket=\"/s\",command=\"read\"} 2",
            "diskwright_vhost_user_connections{disk=\"a\",socket=\"/s\"} 0",
            "diskwright_nbd_connections 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        let sum = all.iter().fold(Totals::default(), |sum, one| sum.and(&one.totals()));
        assert_eq!((sum.commands[0].requests, sum.commands[0].bytes), (3, 3 * 512));
    }
}
