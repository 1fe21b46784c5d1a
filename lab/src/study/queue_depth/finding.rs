//! A finding as it is saved: how much load is enough for one kind of load.

use super::Stage;
use crate::sweep::ArrayFigures;
use diskwright_stats::knee::{LoadInterval, Reason};
use serde::{Deserialize, Serialize};

/// By what a point was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Largest power.
    Efficient,
    /// First at 95 % of the peak.
    Saturation,
    /// The paper's: where latency begins to outpace throughput.
    Paper,
}

impl Rule {
    /// As shown to people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Efficient => "efficient",
            Self::Saturation => "saturation",
            Self::Paper => "the paper's rule",
        }
    }
}

/// How much load is enough for one kind of load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Finding {
    /// Depths (for small random I/O), reads, or writes.
    pub stage: Stage,
    /// The answer; none where no rule gives one.
    pub found: Option<Found>,
    /// Why there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<Reason>,
}

/// A load that is enough. Figures are medians over the rounds of the cell that stands for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Found {
    /// By what the load was chosen.
    pub rule: Rule,
    /// The load that the rule chose, requests in flight.
    pub chosen: f64,
    /// Where it lies, by bootstrap.
    pub interval: Option<LoadInterval>,
    /// Requests in flight of the cell below: the chosen load, or for random I/O a total near it
    /// that threads can share.
    pub in_flight: u64,
    /// Files of that cell.
    pub files: u32,
    /// Threads for each file.
    pub threads: u32,
    /// Requests in flight for each thread.
    pub queue_depth: u32,
    /// Other combinations that chance cannot tell from it; none where there is nothing to choose
    /// from, or only one round.
    pub as_good: Option<usize>,
    /// Requests a second.
    pub iops: f64,
    /// Millions of bytes a second.
    pub mb_per_s: f64,
    /// Mean latency.
    pub mean_ns: f64,
    /// 99th percentile.
    pub p99_ns: f64,
    /// CPU time of the generator for each request.
    pub cpu_ns_per_io: f64,
    /// How far the rounds of that cell lie apart, as a share of their median throughput.
    #[serde(default)]
    pub scatter: f64,
    /// The load of this stage with the most throughput, where that is above the throughput here by
    /// more than 5 %.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak: Option<Peak>,
    /// What it asks of each device below; of one device without copies where nothing is known of
    /// them.
    pub array: ArrayFigures,
}

/// See [`Found::peak`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Peak {
    /// Requests in flight.
    pub in_flight: u64,
    /// Millions of bytes a second, median over the rounds.
    pub mb_per_s: f64,
}
