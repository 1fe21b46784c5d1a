//! What goes into the knee search, and what comes out: rounds of loads, and points of a line.

use super::Reason;
use serde::{Deserialize, Serialize};

/// Share of the peak IOPS at which a load counts as saturated.
pub(super) const SATURATION: f64 = 0.95;

/// The points of one line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Knee {
    /// The load with the largest power (IOPS divided by mean latency).
    pub efficient: Mark,
    /// The first load that reaches 95 % of the peak IOPS.
    pub saturation: Mark,
    /// The load with the most IOPS whose 99th percentile is within the user's limit; `None` without
    /// a limit.
    pub limit: Option<Mark>,
    /// The point by the rule of the Storage Spaces paper.
    pub paper: Mark,
    /// How far IOPS fall from the peak to the last load, as a share of the peak; `None` where the
    /// fall is not significant.
    pub falls: Option<f64>,
}

impl Knee {
    pub(super) fn undetermined(why: Reason, limited: bool) -> Self {
        let mark = || Mark::Undetermined { why: why.clone() };
        Self { efficient: mark(), saturation: mark(), limit: limited.then(mark), paper: mark(), falls: None }
    }
}

/// A point, or the reason why it is undetermined.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Mark {
    /// The point was found.
    Found(MarkedPoint),
    /// The point cannot be determined.
    Undetermined {
        /// The reason, with what to do.
        why: Reason,
    },
}

impl Mark {
    /// The point; `None` when it is undetermined.
    pub fn found(&self) -> Option<&MarkedPoint> {
        match self {
            Self::Found(point) => Some(point),
            Self::Undetermined { .. } => None,
        }
    }
}

/// A load of the sweep, with the medians of its rounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct MarkedPoint {
    /// Index of the load in the line.
    pub cell: usize,
    /// Requests in flight.
    pub load: f64,
    /// Requests per second.
    pub iops: f64,
    /// Mean latency, nanoseconds.
    pub mean_ns: f64,
    /// 99th percentile of the latency, nanoseconds.
    pub p99_ns: f64,
    /// 95 % bootstrap interval of the point; `None` when every load was measured only once.
    pub interval: Option<LoadInterval>,
    /// Whether the interval ends at the last load, so that the point may be above it.
    pub open_above: bool,
}

/// Confidence interval of a point. Both ends are loads of the sweep.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct LoadInterval {
    /// Lower end, requests in flight.
    pub low: f64,
    /// Upper end, requests in flight.
    pub high: f64,
}

/// Figures of one round of one load.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Sample {
    /// Requests per second.
    pub iops: f64,
    /// Mean latency, nanoseconds.
    pub mean_ns: f64,
    /// 99th percentile of the latency, nanoseconds.
    pub p99_ns: f64,
}

/// One load and its rounds.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadRounds {
    /// Requests in flight.
    pub load: f64,
    /// One sample for each round. Round n of all loads was measured in turns.
    pub rounds: Vec<Sample>,
}
