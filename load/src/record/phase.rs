//! The record of one phase: threads, time series, CPU time, members of a space, steady state.

use super::latency::{DirectionRecord, LatencyRecord};
use serde::{Deserialize, Serialize};

/// The record of a phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct PhaseRecord {
    /// Name of the phase in the job.
    pub name: String,
    /// Length of the measured window, nanoseconds.
    pub window_ns: u64,
    /// Start of the window, from the start of the phase, nanoseconds.
    pub window_start_ns: u64,
    /// One record for each thread and each target that it drives.
    pub threads: Vec<ThreadRecord>,
    /// The intervals of the whole phase, warm-up and cool-down included.
    pub series: Vec<SeriesPoint>,
    /// Length of an interval, nanoseconds.
    pub interval_ns: u64,
    /// CPU time in the window.
    pub cpu: CpuRecord,
    /// What the members of the spaces below the targets have done in the window, for all who use
    /// them. Empty without a space.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<MemberRecord>,
    /// Steady state; `None` when the phase did not wait for it.
    pub steady: Option<SteadyRecord>,
}

/// A file or device of a space in the window.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct MemberRecord {
    /// Its path.
    pub name: String,
    /// `ssd` or `hdd`.
    pub class: String,
    /// Reads of it.
    pub reads: u64,
    /// Writes to it.
    pub writes: u64,
    /// Bytes of the reads.
    pub read_bytes: u64,
    /// Bytes of the writes.
    pub written_bytes: u64,
    /// Syncs of it.
    pub syncs: u64,
}

/// One thread on one target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ThreadRecord {
    /// Number of the thread in its phase, from 0.
    pub thread: u32,
    /// Number of the load in its phase.
    pub load: u32,
    /// Number of the target.
    pub target: u32,
    /// Configured queue depth.
    pub queue_depth: u32,
    /// Reads.
    pub reads: DirectionRecord,
    /// Writes.
    pub writes: DirectionRecord,
    /// Flushes. They count neither in the request rate nor in the latency of the workload.
    pub flushes: DirectionRecord,
    /// Requests that were due in the window and were not made, or did not complete, by the end of
    /// the load. In `response` they count with the time that they had waited by then, which is a
    /// lower bound; they are in no other figure. 0 without a rate, and in results of earlier
    /// versions.
    #[serde(default)]
    pub overdue: u64,
    /// Standard deviation of the request rate; `None` where no whole interval is inside the window,
    /// and in results of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops_std_dev: Option<IopsStdDev>,
}

/// Standard deviation of the requests per second over the whole intervals inside the window. The
/// intervals have the length that the job asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct IopsStdDev {
    /// Standard deviation of reads per second.
    pub reads: f64,
    /// Standard deviation of writes per second.
    pub writes: f64,
    /// Standard deviation of reads and writes per second.
    pub both: f64,
}

/// The sum over several threads.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Total {
    /// Reads.
    pub reads: DirectionRecord,
    /// Writes.
    pub writes: DirectionRecord,
    /// Reads and writes together.
    pub both: DirectionRecord,
    /// Flushes, which `both` does not contain.
    pub flushes: DirectionRecord,
    /// Configured queue depth, over all threads.
    pub queue_depth: u64,
    /// Requests that were due and were not made, or did not complete: [`ThreadRecord::overdue`].
    pub overdue: u64,
}

impl Total {
    /// Adds up `threads`.
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
    /// The sum over all threads.
    pub fn total(&self) -> Total {
        self.total_where(|_| true)
    }

    /// The sum over the threads for which `which` is true: those of one target or load.
    pub fn total_where(&self, which: impl Fn(&ThreadRecord) -> bool) -> Total {
        Total::of(self.threads.iter().filter(|thread| which(thread)))
    }

    /// Length of the window in seconds.
    pub fn window_s(&self) -> f64 {
        self.window_ns as f64 / 1e9
    }

    /// Requests per second.
    pub fn iops(&self) -> f64 {
        let ios: u64 = self.threads.iter().map(|thread| thread.reads.ios + thread.writes.ios).sum();
        ios as f64 * 1e9 / self.window_ns.max(1) as f64
    }

    /// Megabytes (10^6 bytes) per second.
    pub fn mb_per_s(&self) -> f64 {
        let bytes: u64 = self.threads.iter().map(|thread| thread.reads.bytes + thread.writes.bytes).sum();
        bytes as f64 * 1e3 / self.window_ns.max(1) as f64
    }

    /// CPU time of the generator per request, nanoseconds.
    pub fn cpu_ns_per_io(&self) -> f64 {
        let ios: u64 = self.threads.iter().map(|thread| thread.reads.ios + thread.writes.ios).sum();
        (self.cpu.process_user_ns + self.cpu.process_system_ns) as f64 / ios.max(1) as f64
    }

    /// CPU time of the whole machine per request, nanoseconds.
    pub fn machine_cpu_ns_per_io(&self) -> f64 {
        let ios: u64 = self.threads.iter().map(|thread| thread.reads.ios + thread.writes.ios).sum();
        self.cpu.busy_ns() as f64 / ios.max(1) as f64
    }

    /// Requests to members of a space per request of the load; `None` without a space. What a space
    /// does by itself counts too: its journal, moves, checksums.
    pub fn amplification(&self) -> Option<f64> {
        let ios: u64 = self.threads.iter().map(|thread| thread.reads.ios + thread.writes.ios).sum();
        let below: u64 = self.members.iter().map(|member| member.reads + member.writes).sum();
        (!self.members.is_empty() && ios > 0).then(|| below as f64 / ios as f64)
    }

    /// MHz per IOPS as in the VMFS paper: CPU time of the whole machine times the frequency of the
    /// time-stamp counter, which is millions of cycles per request. `None` where the counter or the
    /// CPU time of the machine is not known.
    pub fn machine_mhz_per_iops(&self) -> Option<f64> {
        let is_known = self.cpu.tsc_hz > 0.0 && !self.cpu.cores.is_empty();
        is_known.then(|| self.machine_cpu_ns_per_io() / 1e9 * self.cpu.tsc_hz / 1e6)
    }

    /// Mean number of requests in flight, by Little's law: rate times mean service time.
    pub fn depth_reached(&self) -> f64 {
        let sum_ns: f64 =
            self.threads.iter().map(|thread| thread.reads.service.sum_ns + thread.writes.service.sum_ns).sum();
        sum_ns / self.window_ns.max(1) as f64
    }
}

/// One interval of the time series, over all threads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct SeriesPoint {
    /// Start of the interval, from the start of the phase, nanoseconds.
    pub start_ns: u64,
    /// Length, nanoseconds. The last interval may be shorter than the others.
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
    /// Mean latency of reads and writes, nanoseconds.
    pub mean_ns: f64,
    /// Median latency, nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile of the latency, nanoseconds.
    pub p99_ns: u64,
    /// Longest latency, nanoseconds.
    pub max_ns: u64,
}

/// One interval with its latencies, which a run hands to its watcher as soon as it is complete. A
/// record has [`SeriesPoint`]s instead, which are small.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IntervalRecord {
    /// Start, from the start of the phase, nanoseconds.
    pub start_ns: u64,
    /// Length, nanoseconds.
    pub len_ns: u64,
    /// Reads.
    pub reads: SideRecord,
    /// Writes.
    pub writes: SideRecord,
}

/// Reads or writes of an interval.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SideRecord {
    /// Requests completed.
    pub ios: u64,
    /// Bytes read or written.
    pub bytes: u64,
    /// Response times where there is a schedule, else service times.
    pub latency: LatencyRecord,
}

/// CPU time in a window.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct CpuRecord {
    /// CPU time of the generator's process in user mode, nanoseconds.
    pub process_user_ns: u64,
    /// CPU time of the generator's process in the kernel, nanoseconds.
    pub process_system_ns: u64,
    /// Each core of the machine.
    pub cores: Vec<CoreRecord>,
    /// Frequency of the time-stamp counter, hertz; 0 where there is none. CPU time times this is
    /// "TSC-equivalent cycles".
    pub tsc_hz: f64,
    /// Always `None`: hardware cycle counters are not read.
    pub hardware_cycles: Option<u64>,
}

impl CpuRecord {
    /// Time in which the cores of the machine worked, nanoseconds, for this program or another one.
    pub fn busy_ns(&self) -> u64 {
        let times = self.cores.iter().flat_map(|core| [core.user_ns, core.system_ns, core.irq_ns]);
        times.fold(0, u64::saturating_add)
    }
}

/// CPU time of one core in a window, nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct CoreRecord {
    /// User mode, nice included.
    pub user_ns: u64,
    /// Kernel.
    pub system_ns: u64,
    /// Interrupts, hard and soft.
    pub irq_ns: u64,
    /// Idle while I/O is outstanding.
    pub iowait_ns: u64,
    /// Idle.
    pub idle_ns: u64,
    /// Given to other guests by the hypervisor.
    pub stolen_ns: u64,
}

/// Steady state by the rule of the SNIA test specification ([`crate::steady`]).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct SteadyRecord {
    /// Time at which the steady state was reached, from the start of the phase, nanoseconds;
    /// `None`: not reached.
    pub reached_ns: Option<u64>,
    /// Time at which the steady state was left again, nanoseconds; `None`: not left.
    pub left_ns: Option<u64>,
    /// Length of a round, nanoseconds.
    pub round_ns: u64,
    /// Range of the five rounds that reached the steady state, or of the last five, as a share of
    /// their mean.
    pub range: f64,
    /// Slope over the same rounds, as a share of their mean.
    pub slope: f64,
}
