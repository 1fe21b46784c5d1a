//! A finding: the queue depth that one kind of load needs.

use super::Stage;
use crate::sweep::ArrayFigures;
use diskwright_stats::knee::{LoadInterval, Reason};
use serde::{Deserialize, Serialize};

/// The rule by which a load was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// The load with the largest power, which is throughput divided by latency.
    Efficient,
    /// The smallest load that reaches 95 % of the largest throughput.
    Saturation,
    /// The paper's rule: the load from which latency grows faster than throughput.
    Paper,
}

impl Rule {
    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Efficient => "efficient",
            Self::Saturation => "saturation",
            Self::Paper => "the paper's rule",
        }
    }
}

/// The queue depth that one kind of load needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Finding {
    /// The kind of load: depths (small random I/O), reads, or writes.
    pub stage: Stage,
    /// The operating point; `None` if no rule gives one.
    pub found: Option<OperatingPoint>,
    /// Why no rule gives one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<Reason>,
}

/// A load that is enough. Figures are medians over the rounds of one cell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct OperatingPoint {
    /// The rule by which the load was chosen.
    pub rule: Rule,
    /// The load that the rule chose, in requests in flight.
    pub chosen: f64,
    /// 95 % confidence interval of the chosen load, by bootstrap.
    pub interval: Option<LoadInterval>,
    /// Requests in flight of the reported cell. For random I/O this is a total near the chosen load
    /// that can be split over threads.
    pub in_flight: u64,
    /// Files of the reported cell, or agents.
    pub files: u32,
    /// Threads for each file, or on each agent.
    pub threads: u32,
    /// Requests in flight for each thread.
    pub queue_depth: u32,
    /// How many other combinations of threads and depth are not significantly different. `None`
    /// without combinations, or with one round.
    pub as_good: Option<usize>,
    /// Requests per second.
    pub iops: f64,
    /// Throughput in MB/s (10^6 bytes).
    pub mb_per_s: f64,
    /// Mean latency, nanoseconds.
    pub mean_ns: f64,
    /// 99th percentile of the latency, nanoseconds.
    pub p99_ns: f64,
    /// CPU time of the load generator per request, nanoseconds.
    pub cpu_ns_per_io: f64,
    /// Range of the throughput over the rounds of the cell, as a share of the median.
    #[serde(default)]
    pub scatter: f64,
    /// The load of this stage with the largest throughput, if that is more than 5 % above the
    /// throughput here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak: Option<Peak>,
    /// The load on each device below. Without a known array: one device without copies.
    pub array: ArrayFigures,
    /// Transfers to the members of a space per request, as measured; `None` without a space.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_amplification: Option<f64>,
}

/// The load of a stage with the largest throughput.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Peak {
    /// Requests in flight.
    pub in_flight: u64,
    /// Throughput in MB/s (10^6 bytes), median over the rounds.
    pub mb_per_s: f64,
}
