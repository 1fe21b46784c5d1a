//! The reasons why the knee search returns no point, each with what to do.

use crate::numbers::{duration, figure};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Why a point is undetermined. Loads are requests in flight; displayed as a sentence with what to
/// do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case", tag = "reason")]
pub enum Reason {
    /// The sweep has too few loads.
    FewLoads {
        /// Number of loads that were measured.
        loads: usize,
        /// Fewest loads that the search needs.
        fewest: usize,
    },
    /// A load has no round, or a round in which no request completed.
    NothingDone {
        /// The load.
        load: f64,
    },
    /// IOPS or latency do not change with the load.
    Flat,
    /// The confidence interval covers most of the loads.
    Noise {
        /// Lower end of the interval.
        low: f64,
        /// Upper end of the interval.
        high: f64,
        /// Standard deviation of one round, as a share of its IOPS.
        scatter: f64,
    },
    /// Two loads are equally good, and a load between them is worse.
    TwoPeaks {
        /// The lower of the two loads.
        first: f64,
        /// The worse load between them.
        between: f64,
        /// The higher of the two loads.
        second: f64,
    },
    /// The best load is the last one of the sweep.
    Beyond {
        /// The last load.
        last: f64,
    },
    /// The best load is the first one of the sweep.
    Before {
        /// The first load.
        first: f64,
    },
    /// IOPS still grow at the end of the sweep.
    StillRising {
        /// Growth of IOPS over the last third of the load, as a share.
        gain: f64,
        /// The last load.
        last: f64,
    },
    /// The 99th percentile is above the limit at every load.
    NothingUnder {
        /// The limit, nanoseconds.
        limit_ns: f64,
        /// The lowest 99th percentile, nanoseconds.
        min_p99_ns: f64,
        /// The load with the lowest 99th percentile.
        load: f64,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FewLoads { loads, fewest } => {
                write!(f, "the sweep has only {loads} loads; vary the load over at least {fewest} values")
            }
            Self::NothingDone { load } => {
                write!(
                    f,
                    "a round with {load} in flight completed no request or was not measured; let the sweep finish, with longer cells"
                )
            }
            Self::Flat => {
                f.write_str("throughput or latency does not change with the load; look for another bottleneck")
            }
            Self::Noise { low, high, scatter } => write!(
                f,
                "rounds scatter by {} %, and the interval is {low} to {high} in flight; use more rounds or longer cells",
                figure(scatter * 100.0)
            ),
            Self::TwoPeaks { first, between, second } => write!(
                f,
                "{first} and {second} in flight are equally good, and {between} between them is worse; find out what changes there, or measure again"
            ),
            Self::Beyond { last } => write!(f, "the best load is the last one; sweep beyond {last} in flight"),
            Self::Before { first } => write!(f, "the best load is the first one; sweep below {first} in flight"),
            Self::StillRising { gain, last } => write!(
                f,
                "IOPS still grew by {} % over the last third of the load; sweep beyond {last} in flight",
                figure(gain * 100.0)
            ),
            Self::NothingUnder { limit_ns, min_p99_ns, load } => write!(
                f,
                "p99 is above {} at every load; the lowest is {}, at {load} in flight",
                duration(*limit_ns),
                duration(*min_p99_ns)
            ),
        }
    }
}
