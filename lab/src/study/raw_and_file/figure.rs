//! The figures in which everything is compared with the device.

use diskwright_load::figures::Figures;

/// A figure that is compared with the device's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Figure {
    /// Requests (and bytes) a second.
    Throughput,
    /// CPU time of the whole machine for each request: the paper's.
    MachineCpu,
    /// CPU time of the generator for each request.
    Cpu,
}

impl Figure {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Throughput, Self::MachineCpu, Self::Cpu];

    /// As shown to people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Throughput => "throughput",
            Self::MachineCpu => "CPU, machine",
            Self::Cpu => "CPU, generator",
        }
    }

    /// Its value in a round.
    pub fn of(self, round: &Figures) -> f64 {
        match self {
            Self::Throughput => round.iops,
            Self::MachineCpu => round.machine_cpu_ns_per_io,
            Self::Cpu => round.cpu_ns_per_io,
        }
    }
}
