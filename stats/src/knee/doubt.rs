//! Why a point cannot be told, each with what would help.

use crate::numbers::{duration, figure};
use serde::{Deserialize, Serialize};
use std::fmt;

/// See the module. Loads are requests in flight.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "reason")]
pub enum Doubt {
    /// Too few loads to have a shape.
    FewLoads {
        /// How many there are.
        loads: usize,
        /// How many there must be.
        fewest: usize,
    },
    /// A load has no round, or one in which nothing completed.
    NothingDone {
        /// Which.
        load: f64,
    },
    /// Nothing rises.
    Flat,
    /// Chance could have put the point almost anywhere.
    Noise {
        /// The least load that it could be.
        low: f64,
        /// The most.
        high: f64,
        /// How far one round scatters, as a share of its IOPS.
        scatter: f64,
    },
    /// Two places are as good, with a worse one between them.
    TwoPeaks {
        /// The one.
        first: f64,
        /// The valley.
        between: f64,
        /// The other.
        second: f64,
    },
    /// The best is the last that was measured.
    Beyond {
        /// That load.
        last: f64,
    },
    /// The best is the first that was measured.
    Before {
        /// That load.
        first: f64,
    },
    /// There is no peak yet.
    StillRising {
        /// Growth of IOPS over the last third of the load, as a share.
        gain: f64,
        /// The last load.
        last: f64,
    },
    /// The 99th percentile is over the limit everywhere.
    NothingUnder {
        /// The limit.
        limit_ns: f64,
        /// The lowest 99th percentile.
        least_p99_ns: f64,
        /// Where that is.
        load: f64,
    },
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FewLoads { loads, fewest } => {
                write!(f, "{loads} loads have no shape; vary the load over at least {fewest} values")
            }
            Self::NothingDone { load } => {
                write!(
                    f,
                    "a round with {load} in flight completed nothing or was not measured; let the sweep finish, with longer cells"
                )
            }
            Self::Flat => {
                f.write_str("throughput or latency does not change with the load; look for another bottleneck")
            }
            Self::Noise { low, high, scatter } => write!(
                f,
                "rounds scatter by {} %, so that it could be anywhere from {low} to {high} in flight; use more rounds or longer cells",
                figure(scatter * 100.0)
            ),
            Self::TwoPeaks { first, between, second } => write!(
                f,
                "{first} and {second} in flight are equally good, and {between} between them is worse; look what changes there, or measure again"
            ),
            Self::Beyond { last } => write!(f, "it still gets better at the last load; sweep beyond {last} in flight"),
            Self::Before { first } => {
                write!(f, "it only gets worse from the first load on; sweep below {first} in flight")
            }
            Self::StillRising { gain, last } => write!(
                f,
                "IOPS still grew by {} % over the last third of the load; sweep beyond {last} in flight",
                figure(gain * 100.0)
            ),
            Self::NothingUnder { limit_ns, least_p99_ns, load } => write!(
                f,
                "p99 is over {} everywhere; its lowest is {}, at {load} in flight",
                duration(*limit_ns),
                duration(*least_p99_ns)
            ),
        }
    }
}
