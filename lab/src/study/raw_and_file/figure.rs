//! The compared figures of the study.

use diskwright_load::figures::Figures;

/// A figure that is compared with the block device's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Figure {
    /// Requests per second. All requests of a workload have one size, so this is also the ratio of
    /// bytes.
    Throughput,
    /// CPU time of the whole machine per request, as in the paper.
    MachineCpu,
    /// CPU time of the load generator's process per request.
    Cpu,
}

impl Figure {
    /// All figures, in the order of reports.
    pub const ALL: [Self; 3] = [Self::Throughput, Self::MachineCpu, Self::Cpu];

    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Throughput => "throughput",
            Self::MachineCpu => "CPU, machine",
            Self::Cpu => "CPU, generator",
        }
    }

    /// The figure's value in a round: IOPS, or nanoseconds per request.
    pub fn of(self, round: &Figures) -> f64 {
        match self {
            Self::Throughput => round.iops,
            Self::MachineCpu => round.machine_cpu_ns_per_io,
            Self::Cpu => round.cpu_ns_per_io,
        }
    }
}
