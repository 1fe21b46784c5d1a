//! What a run found, whole: the one form that the screen, DiskSpd's report, comparisons, sweeps,
//! plots and exports read.
//!
//! ```text
//!   Run ──┬─ head: machine, versions, warnings, how it ended
//!         ├─ job; targets (what they are, how they were found)
//!         └─ phases ──┬─ threads: for each thread and target, reads, writes and flushes, each with its latencies
//!                     ├─ series: each interval, over all threads
//!                     └─ cpu: the generator's and the machine's
//! ```
//!
//! Totals are not stored twice: [`PhaseRecord::total`] and its kin add threads up, histograms
//! included, so a total can never contradict its parts. Latencies are kept as sparse histograms of
//! three significant digits, from which any percentile can be had later.
//!
//! Two latencies are told apart. *Service time* runs from the moment a request was made. *Response
//! time* runs from the moment it should have been made; they differ only where a rate gives
//! requests a schedule, and then the response time is what a user of the device feels. Requests,
//! bytes and service times are of what *ended* in the window. Response times are of all that was
//! *due* in it: what was in flight when the load ended was waited for, and a request that was never
//! made counts with the time that it had waited by then ([`ThreadRecord::overdue`]). So there may
//! be more or fewer response times than requests.

mod head;
mod latency;

pub use head::Head;
pub use latency::{DirectionRecord, LatencyRecord};

use crate::{
    behind::Behind,
    job::{Caching, Job},
    machine::Place,
};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Schema of [`Run`]. A reader refuses another number, and says so.
pub const RUN_SCHEMA: &str = "diskwright.lab.run/2";

/// A run, whole or as far as it came.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// When and by what it was measured, and how it ended. A run has no verdict, and each target
    /// has a place of its own.
    #[serde(flatten)]
    pub head: Head,
    /// What was run, with everything that was left open filled in.
    pub job: Job,
    /// The targets, in the order that loads number them.
    pub targets: Vec<TargetRecord>,
    /// The phases that were measured, in order.
    pub phases: Vec<PhaseRecord>,
    /// Free labels, as given by the user (`--label key=value`).
    #[serde(default)]
    pub labels: Vec<(String, String)>,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum End {
    /// As planned.
    Complete,
    /// By the user; what was measured until then is there.
    Stopped,
    /// Requests failed. What was measured is there, and is not to be averaged away.
    Failed {
        /// The first error, with target, offset and length.
        first: String,
        /// How many requests failed.
        errors: u64,
    },
}

impl End {
    /// The same with failures, of which `first` tells the first.
    #[must_use]
    pub fn failing(self, first: String, errors: u64) -> Self {
        match self {
            Self::Failed { first, errors: before } => Self::Failed { first, errors: before.saturating_add(errors) },
            _ => Self::Failed { first, errors },
        }
    }
}

/// A target as it was found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TargetRecord {
    /// As given by the user.
    pub name: String,
    /// "vhdx dynamic", "raw file", "raw files", "block device", "nbd export", "null".
    pub kind: String,
    /// Capacity.
    pub size_bytes: u64,
    /// Unit of addressing.
    pub logical_sector_bytes: u32,
    /// Cache mode in force on this side. Behind an export its server caches as it likes.
    pub cache: Caching,
    /// Its file, where it has one.
    pub path: Option<PathBuf>,
    /// What it shows, where it is no file of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub behind: Option<Behind>,
    /// Where that lies.
    pub place: Option<Place>,
    /// What was seen of its contents before the run; none where nobody looked (`null:`).
    pub contents: Option<ContentsRecord>,
}

impl TargetRecord {
    /// Whether it is reached through a server, which caches as it likes.
    pub fn is_export(&self) -> bool {
        self.behind.as_ref().is_some_and(|behind| behind.export().is_some())
    }
}

/// What a look at a target's contents found. Shares are of the working set, from 0 to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct ContentsRecord {
    /// Share that has space of its own (not sparse, not trimmed, not unallocated).
    pub allocated: f64,
    /// Share of the sampled blocks that are zeros.
    pub zero: f64,
    /// Share of the sampled blocks that are like another sampled one, and no zeros.
    pub repeated: f64,
    /// Blocks sampled.
    pub sampled: u64,
    /// Bytes that were written to fill it before the run.
    pub filled_bytes: u64,
}

/// A phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PhaseRecord {
    /// Its name in the job.
    pub name: String,
    /// Length of the measured window, nanoseconds.
    pub window_ns: u64,
    /// When the window began, from the beginning of the phase, nanoseconds.
    pub window_start_ns: u64,
    /// Each thread on each of its targets.
    pub threads: Vec<ThreadRecord>,
    /// Each interval of the whole phase, warm-up and cool-down included.
    pub series: Vec<SeriesPoint>,
    /// Length of an interval, nanoseconds.
    pub interval_ns: u64,
    /// CPU in the window.
    pub cpu: CpuRecord,
    /// Whether and when the steady state was reached; none where nobody asked.
    pub steady: Option<SteadyRecord>,
}

/// One thread on one target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ThreadRecord {
    /// Number of the thread in its phase, from 0.
    pub thread: u32,
    /// Number of the load in its phase.
    pub load: u32,
    /// Number of the target.
    pub target: u32,
    /// In flight at most.
    pub queue_depth: u32,
    /// Reads.
    pub reads: DirectionRecord,
    /// Writes.
    pub writes: DirectionRecord,
    /// Flushes, which are no requests of the workload: they stand in neither its rate nor its
    /// latency.
    pub flushes: DirectionRecord,
    /// Requests that were due in the window and were not made, or did not end, by the end of the
    /// load. In `response` they count with the time that they had waited by then, which is a lower
    /// bound; they are in no other figure. 0 without a rate, and in results of earlier versions.
    #[serde(default)]
    pub overdue: u64,
    /// How its rate scattered; none where no whole interval lies in the window, and in results of
    /// earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops_std_dev: Option<IopsStdDev>,
}

/// Standard deviation of the requests a second over the whole intervals inside the window, as the
/// job asks for intervals.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct IopsStdDev {
    /// Of reads.
    pub reads: f64,
    /// Of writes.
    pub writes: f64,
    /// Of both together.
    pub both: f64,
}

/// Reads and writes together.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Total {
    /// Reads.
    pub reads: DirectionRecord,
    /// Writes.
    pub writes: DirectionRecord,
    /// Both.
    pub both: DirectionRecord,
    /// Flushes, which are in none of the others.
    pub flushes: DirectionRecord,
    /// In flight at most, over all threads.
    pub queue_depth: u64,
    /// Requests that were due and not made, or did not end; see [`ThreadRecord::overdue`].
    pub overdue: u64,
}

impl Total {
    /// These threads added up.
    pub fn of<'a>(threads: impl IntoIterator<Item = &'a ThreadRecord>) -> Self {
        let mut total = Self::default();
        for thread in threads {
            total.reads.add(&thread.reads);
            total.writes.add(&thread.writes);
            total.flushes.add(&thread.flushes);
            total.queue_depth += u64::from(thread.queue_depth);
            total.overdue = total.overdue.saturating_add(thread.overdue);
        }
        total.both = total.reads.clone();
        total.both.add(&total.writes);
        total
    }
}

impl PhaseRecord {
    /// Everything.
    pub fn total(&self) -> Total {
        self.total_where(|_| true)
    }

    /// The threads for which `which` holds: one thread, one target, one load.
    pub fn total_where(&self, which: impl Fn(&ThreadRecord) -> bool) -> Total {
        Total::of(self.threads.iter().filter(|thread| which(thread)))
    }

    /// Length of the window in seconds.
    pub fn window_s(&self) -> f64 {
        self.window_ns as f64 / 1e9
    }

    /// Requests a second.
    pub fn iops(&self) -> f64 {
        let ios: u64 = self.threads.iter().map(|thread| thread.reads.ios + thread.writes.ios).sum();
        ios as f64 * 1e9 / self.window_ns.max(1) as f64
    }

    /// Millions of bytes (10^6) a second.
    pub fn mb_per_s(&self) -> f64 {
        let bytes: u64 = self.threads.iter().map(|thread| thread.reads.bytes + thread.writes.bytes).sum();
        bytes as f64 * 1e3 / self.window_ns.max(1) as f64
    }

    /// CPU time of the generator for each request, nanoseconds.
    pub fn cpu_ns_per_io(&self) -> f64 {
        let ios: u64 = self.threads.iter().map(|thread| thread.reads.ios + thread.writes.ios).sum();
        (self.cpu.process_user_ns + self.cpu.process_system_ns) as f64 / ios.max(1) as f64
    }

    /// CPU time of the whole machine for each request, nanoseconds.
    pub fn machine_cpu_ns_per_io(&self) -> f64 {
        let ios: u64 = self.threads.iter().map(|thread| thread.reads.ios + thread.writes.ios).sum();
        let busy: u64 = self.cpu.cores.iter().map(|core| core.user_ns + core.system_ns + core.irq_ns).sum();
        busy as f64 / ios.max(1) as f64
    }

    /// MHz per IOPS as the VMFS paper has it: of the whole machine, CPU time times the rate of the
    /// time-stamp counter. Cycles a second for each request a second are cycles for each request,
    /// in millions. `None` where the counter or the machine's CPU time is not known.
    pub fn machine_mhz_per_iops(&self) -> Option<f64> {
        let is_known = self.cpu.tsc_hz > 0.0 && !self.cpu.cores.is_empty();
        is_known.then(|| self.machine_cpu_ns_per_io() / 1e9 * self.cpu.tsc_hz / 1e6)
    }

    /// Requests in flight on average, by Little's law: rate times mean service time.
    pub fn depth_reached(&self) -> f64 {
        let sum_ns: f64 =
            self.threads.iter().map(|thread| thread.reads.service.sum_ns + thread.writes.service.sum_ns).sum();
        sum_ns / self.window_ns.max(1) as f64
    }
}

/// One interval of the time series, over all threads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct SeriesPoint {
    /// When it began, from the beginning of the phase, nanoseconds.
    pub start_ns: u64,
    /// Its length, nanoseconds: the interval, but for a last one that was cut short.
    #[serde(default)]
    pub len_ns: u64,
    /// Reads completed.
    pub read_ios: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes completed.
    pub write_ios: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Mean latency of both, nanoseconds.
    pub mean_ns: f64,
    /// Median.
    pub p50_ns: u64,
    /// 99th percentile.
    pub p99_ns: u64,
    /// Longest.
    pub max_ns: u64,
}

/// CPU in a window.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CpuRecord {
    /// Of the generator's process, user mode.
    pub process_user_ns: u64,
    /// Of the generator's process, kernel.
    pub process_system_ns: u64,
    /// Each core of the machine.
    pub cores: Vec<CoreRecord>,
    /// Cycles of the time-stamp counter in a second; 0 where there is none. CPU time times this is
    /// "TSC-equivalent cycles".
    pub tsc_hz: f64,
    /// Cycles by the hardware's counters, over the process, where they exist.
    pub hardware_cycles: Option<u64>,
}

/// One core.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct CoreRecord {
    /// User mode, nice included.
    pub user_ns: u64,
    /// Kernel.
    pub system_ns: u64,
    /// Interrupts, hard and soft.
    pub irq_ns: u64,
    /// Waiting for I/O with nothing else to do.
    pub iowait_ns: u64,
    /// Doing nothing.
    pub idle_ns: u64,
    /// Given to other guests.
    pub stolen_ns: u64,
}

/// Steady state by the rule of the SNIA test specification: five rounds, their range within 20 % of
/// their mean, the slope of their line of least squares, over the window, within 10 %.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SteadyRecord {
    /// When it was reached, from the beginning of the phase, nanoseconds; none: it was not.
    pub reached_ns: Option<u64>,
    /// When it was left again during the window, nanoseconds.
    pub left_ns: Option<u64>,
    /// Length of a round, nanoseconds.
    pub round_ns: u64,
    /// Range of the deciding rounds as a share of their mean.
    pub range: f64,
    /// Slope over the deciding rounds as a share of their mean.
    pub slope: f64,
}
