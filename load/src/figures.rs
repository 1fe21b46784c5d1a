//! The figures of a measured window, and the metrics by which windows are compared.
//!
//! Sweeps, knees and comparisons use a set of [`Figures`] for each measured window (a *round*).
//! They are computed from a [`PhaseRecord`], and are small enough to be stored for hundreds of
//! windows.

use crate::record::PhaseRecord;
use diskwright_stats::summary::median;
use serde::{Deserialize, Serialize};

/// One measured window, summed over its threads and targets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Figures {
    /// Length of the window, nanoseconds.
    pub window_ns: u64,
    /// Reads completed.
    pub reads: u64,
    /// Writes completed.
    pub writes: u64,
    /// Requests that failed.
    #[serde(default)]
    pub errors: u64,
    /// Requests per second.
    pub iops: f64,
    /// Megabytes (10^6 bytes) per second.
    pub mb_per_s: f64,
    /// Mean latency, nanoseconds: response time where requests had a schedule, else service time.
    pub mean_ns: f64,
    /// Median latency, nanoseconds.
    pub p50_ns: f64,
    /// 99th percentile of the latency, nanoseconds.
    pub p99_ns: f64,
    /// 99.9th percentile of the latency, nanoseconds.
    pub p999_ns: f64,
    /// Longest latency, nanoseconds.
    pub max_ns: f64,
    /// CPU time of the generator per request, nanoseconds.
    pub cpu_ns_per_io: f64,
    /// CPU time of the whole machine per request, nanoseconds.
    pub machine_cpu_ns_per_io: f64,
    /// Configured queue depth, summed over all threads and targets.
    pub queue_depth: u64,
    /// Mean number of requests in flight, by Little's law.
    pub depth_reached: f64,
}

impl Figures {
    /// The figures of one phase.
    pub fn of(phase: &PhaseRecord) -> Self {
        let total = phase.total();
        let latency = total.both.latency();
        let quantile = |share: f64| latency.quantile_ns(share).unwrap_or(0) as f64;
        Self {
            window_ns: phase.window_ns,
            reads: total.reads.ios,
            writes: total.writes.ios,
            errors: total.both.errors,
            iops: phase.iops(),
            mb_per_s: phase.mb_per_s(),
            mean_ns: latency.mean_ns(),
            p50_ns: quantile(0.5),
            p99_ns: quantile(0.99),
            p999_ns: quantile(0.999),
            max_ns: latency.max_ns as f64,
            cpu_ns_per_io: phase.cpu_ns_per_io(),
            machine_cpu_ns_per_io: phase.machine_cpu_ns_per_io(),
            queue_depth: total.queue_depth,
            depth_reached: phase.depth_reached(),
        }
    }

    /// The medians of several windows of one cell; `None` of no window. Counts of requests and of
    /// errors are sums, and the longest latency is that of all windows.
    pub fn medians(rounds: &[Self]) -> Option<Self> {
        let first = rounds.first()?;
        let of = |figure: fn(&Self) -> f64| median(&rounds.iter().map(figure).collect::<Vec<_>>());
        let sum = |count: fn(&Self) -> u64| rounds.iter().map(count).fold(0, u64::saturating_add);
        Some(Self {
            window_ns: of(|round| round.window_ns as f64)? as u64,
            reads: sum(|round| round.reads),
            writes: sum(|round| round.writes),
            errors: sum(|round| round.errors),
            iops: of(|round| round.iops)?,
            mb_per_s: of(|round| round.mb_per_s)?,
            mean_ns: of(|round| round.mean_ns)?,
            p50_ns: of(|round| round.p50_ns)?,
            p99_ns: of(|round| round.p99_ns)?,
            p999_ns: of(|round| round.p999_ns)?,
            max_ns: rounds.iter().map(|round| round.max_ns).fold(0.0, f64::max),
            cpu_ns_per_io: of(|round| round.cpu_ns_per_io)?,
            machine_cpu_ns_per_io: of(|round| round.machine_cpu_ns_per_io)?,
            queue_depth: first.queue_depth,
            depth_reached: of(|round| round.depth_reached)?,
        })
    }

    /// Requests completed.
    pub fn ios(&self) -> u64 {
        self.reads.saturating_add(self.writes)
    }

    /// Share of reads, from 0 to 1; 1 when no request completed.
    pub fn read_share(&self) -> f64 {
        if self.ios() == 0 { 1.0 } else { self.reads as f64 / self.ios() as f64 }
    }
}

/// A figure by which windows are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Requests per second.
    Iops,
    /// Megabytes per second.
    MbPerS,
    /// Mean latency.
    Mean,
    /// Median latency.
    P50,
    /// 99th percentile of the latency.
    P99,
    /// CPU time of the generator per request.
    CpuPerIo,
}

impl Metric {
    /// All metrics, in the order of reports.
    pub const ALL: [Self; 6] = [Self::Iops, Self::MbPerS, Self::Mean, Self::P50, Self::P99, Self::CpuPerIo];

    /// The value of the metric in `figures`; latencies and CPU time in nanoseconds.
    pub fn of(self, figures: &Figures) -> f64 {
        match self {
            Self::Iops => figures.iops,
            Self::MbPerS => figures.mb_per_s,
            Self::Mean => figures.mean_ns,
            Self::P50 => figures.p50_ns,
            Self::P99 => figures.p99_ns,
            Self::CpuPerIo => figures.cpu_ns_per_io,
        }
    }

    /// Whether a higher value is better.
    pub fn more_is_better(self) -> bool {
        matches!(self, Self::Iops | Self::MbPerS)
    }

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Iops => "iops",
            Self::MbPerS => "mb",
            Self::Mean => "mean",
            Self::P50 => "p50",
            Self::P99 => "p99",
            Self::CpuPerIo => "cpu",
        }
    }

    /// Name in reports.
    pub fn title(self) -> &'static str {
        match self {
            Self::Iops => "IOPS",
            Self::MbPerS => "MB/s",
            Self::Mean => "mean latency",
            Self::P50 => "p50 latency",
            Self::P99 => "p99 latency",
            Self::CpuPerIo => "CPU per I/O",
        }
    }

    /// Formats a value of the metric; times with their unit.
    pub fn show(self, value: f64) -> String {
        match self {
            Self::Iops | Self::MbPerS => diskwright_stats::numbers::figure(value),
            _ => diskwright_stats::numbers::duration(value),
        }
    }

    /// The metric with this name on the command line.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|metric| metric.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{CpuRecord, DirectionRecord, LatencyRecord, ThreadRecord};

    #[test]
    fn a_window_is_summed_over_threads_and_directions() {
        let direction = |ios: u64, ns: u64| DirectionRecord {
            ios,
            bytes: ios * 4096,
            errors: 0,
            service: LatencyRecord {
                count: ios,
                sum_ns: (ios * ns) as f64,
                sum_of_squares: (ios * ns * ns) as f64,
                min_ns: ns,
                max_ns: ns,
                buckets: vec![(ns, ios)],
            },
            response: None,
        };
        let thread = |thread| ThreadRecord {
            thread,
            load: 0,
            target: 0,
            queue_depth: 4,
            reads: direction(700, 1_000_000),
            writes: direction(300, 3_000_000),
            flushes: DirectionRecord::default(),
            overdue: 0,
            iops_std_dev: None,
        };
        let phase = PhaseRecord {
            name: "main".into(),
            window_ns: 500_000_000,
            window_start_ns: 0,
            threads: vec![thread(0), thread(1)],
            series: Vec::new(),
            interval_ns: 1_000_000_000,
            cpu: CpuRecord { process_user_ns: 1_000_000, process_system_ns: 3_000_000, ..CpuRecord::default() },
            members: Vec::new(),
            steady: None,
        };
        let figures = Figures::of(&phase);
        assert_eq!((figures.iops, figures.mean_ns, figures.p50_ns), (4000.0, 1.6e6, 1e6));
        assert_eq!((figures.p99_ns, figures.queue_depth, figures.cpu_ns_per_io), (3e6, 8, 2000.0));
        assert!((figures.read_share() - 0.7).abs() < 1e-12 && (figures.depth_reached - 6.4).abs() < 1e-9);
    }

    #[test]
    fn medians_are_of_rates_and_sums_are_of_counts() {
        let round =
            |iops: f64, max_ns: f64| Figures { reads: iops as u64, iops, max_ns, errors: 1, ..Figures::default() };
        let found = Figures::medians(&[round(90.0, 5.0), round(10.0, 9.0), round(100.0, 7.0)]).unwrap();
        assert_eq!((found.iops, found.reads, found.errors, found.max_ns), (90.0, 200, 3, 9.0));
        assert_eq!(Figures::medians(&[]), None);
    }

    #[test]
    fn metrics_have_distinct_names_and_a_direction() {
        for metric in Metric::ALL {
            assert_eq!(Metric::from_name(metric.name()), Some(metric));
        }
        assert_eq!(Metric::ALL.map(Metric::more_is_better), [true, true, false, false, false, false]);
    }
}
