//! Workloads of one thread: block size, pattern, direction and queue depth, with the workloads of
//! the VHD paper.

use crate::{
    job::{Blocks, Bytes, Load},
    profiles::Profile,
};
use diskwright_stats::numbers::short_size;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Sequential or random access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Each request follows the one before. At the end of the working set the stream restarts at
    /// its beginning.
    Sequential,
    /// Offsets are uniform over the working set and aligned to the block.
    Random,
}

/// Read or write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// Reads only.
    Read,
    /// Writes only.
    Write,
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sequential => "sequential",
            Self::Random => "random",
        })
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

/// A named workload of one thread, as papers and studies use them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Workload {
    /// Name in reports: "4K random read", "OLTP database".
    pub name: String,
    /// Bytes of one request.
    pub block_bytes: u32,
    /// Share of reads, 0 to 100.
    pub read_percent: f64,
    /// Share of random requests, 0 to 100; the others are sequential.
    pub random_percent: f64,
    /// Requests kept in flight.
    pub queue_depth: u32,
}

impl Workload {
    /// A workload of one pattern and direction, named after them.
    pub fn new(pattern: Pattern, direction: Direction, block_bytes: u32, queue_depth: u32) -> Self {
        Self {
            name: format!("{} {pattern} {direction}", short_size(u64::from(block_bytes))),
            block_bytes,
            read_percent: if direction == Direction::Read { 100.0 } else { 0.0 },
            random_percent: if pattern == Pattern::Random { 100.0 } else { 0.0 },
            queue_depth,
        }
    }

    /// The workload as a load of a job.
    pub fn load(&self) -> Load {
        Load {
            name: self.name.clone(),
            block: Blocks::One(Bytes(u64::from(self.block_bytes))),
            read_percent: self.read_percent,
            random_percent: self.random_percent,
            queue_depth: self.queue_depth,
            ..Load::default()
        }
    }

    /// Whether any request is a write.
    pub fn writes(&self) -> bool {
        self.read_percent < 100.0
    }

    /// "read", "write", or "70 % read".
    pub fn direction(&self) -> String {
        share(self.read_percent, "read", "write")
    }

    /// "random", "sequential", or "75 % random".
    pub fn pattern(&self) -> String {
        share(self.random_percent, "random", "sequential")
    }
}

fn share(percent: f64, whole: &str, none: &str) -> String {
    match percent {
        100.0 => whole.to_owned(),
        0.0 => none.to_owned(),
        some => format!("{some} % {whole}"),
    }
}

/// Block sizes of the VHD paper's sequential workloads.
const SEQUENTIAL_BYTES: [u32; 4] = [4 << 10, 64 << 10, 256 << 10, 1 << 20];
/// Block sizes of the VHD paper's random workloads.
const RANDOM_BYTES: [u32; 4] = [4 << 10, 8 << 10, 32 << 10, 64 << 10];

/// The sixteen monolithic workloads of the VHD paper ("Choice of Workloads"), in its order.
pub fn paper_monolithic(queue_depth: u32) -> Vec<Workload> {
    let mut all = Vec::with_capacity(16);
    for (pattern, sizes) in [(Pattern::Sequential, SEQUENTIAL_BYTES), (Pattern::Random, RANDOM_BYTES)] {
        for block_bytes in sizes {
            for direction in [Direction::Read, Direction::Write] {
                all.push(Workload::new(pattern, direction, block_bytes, queue_depth));
            }
        }
    }
    all
}

/// The twelve application workloads of the VHD paper ("Application-Based Workloads"), in its order,
/// from the profile `vhd-applications`.
pub fn paper_applications(queue_depth: u32) -> Vec<Workload> {
    let loads = Profile::find("vhd-applications")
        .into_iter()
        .flat_map(|profile| profile.job().phases)
        .flat_map(|phase| phase.loads);
    loads
        .map(|load| Workload {
            block_bytes: u32::try_from(load.block.largest_bytes()).unwrap_or(u32::MAX),
            name: load.name,
            read_percent: load.read_percent,
            random_percent: load.random_percent,
            queue_depth,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_paper_has_sixteen_distinct_workloads() {
        let all = paper_monolithic(32);
        let names: std::collections::BTreeSet<_> = all.iter().map(|workload| workload.name.as_str()).collect();
        assert_eq!((all.len(), names.len()), (16, 16));
        assert!(names.contains("4K sequential write") && names.contains("32K random read"));
        assert!(!names.contains("8K sequential read") && !names.contains("1M random read"));
    }

    #[test]
    fn the_twelve_application_workloads_keep_their_shares() {
        let all = paper_applications(32);
        assert_eq!(all.len(), 12);
        let oltp = all.iter().find(|workload| workload.name == "OLTP database").unwrap();
        assert_eq!((oltp.block_bytes, oltp.queue_depth), (8192, 32));
        assert_eq!((oltp.direction().as_str(), oltp.pattern().as_str()), ("70 % read", "random"));
        assert!(oltp.writes());
    }

    #[test]
    fn a_workload_is_read_back_from_its_json() {
        let workload = Workload { read_percent: 95.0, ..Workload::new(Pattern::Random, Direction::Read, 8192, 4) };
        let json = serde_json::to_string(&workload).unwrap();
        assert_eq!(serde_json::from_str::<Workload>(&json).unwrap(), workload);
    }

    #[test]
    fn sizes_have_a_unit_where_they_are_whole_multiples() {
        assert_eq!([4096, 1 << 20, 40 << 30, 3 << 9, 1500].map(short_size), ["4K", "1M", "40G", "1536", "1500"]);
    }
}
