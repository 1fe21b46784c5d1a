//! Workloads as data: what is asked of a target, not how it is carried out.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Where the next request goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Behind the one before, and from the beginning again at the end of the working set.
    Sequential,
    /// Anywhere in the working set, uniformly, aligned to the block.
    Random,
}

/// Which way the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// From the target.
    Read,
    /// To the target.
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

/// One kind of I/O.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workload {
    /// As shown to people: "4K random read".
    pub name: String,
    /// Where the requests go.
    pub pattern: Pattern,
    /// Reads or writes.
    pub direction: Direction,
    /// Bytes of one request.
    pub block_bytes: u32,
    /// Requests kept in flight.
    pub queue_depth: u32,
    /// The part of the target that is used, from its beginning, in bytes; what is over a multiple of the block is left
    /// alone. 0 means the whole target.
    pub working_set_bytes: u64,
}

impl Workload {
    /// A workload on the whole target, named after what it is.
    pub fn new(pattern: Pattern, direction: Direction, block_bytes: u32, queue_depth: u32) -> Self {
        let name = format!("{} {pattern} {direction}", short_size(u64::from(block_bytes)));
        Self { name, pattern, direction, block_bytes, queue_depth, working_set_bytes: 0 }
    }

    /// How many blocks the working set has on a target of `size_bytes`.
    pub fn blocks_on(&self, size_bytes: u64) -> u64 {
        let used_bytes = if self.working_set_bytes == 0 { size_bytes } else { self.working_set_bytes.min(size_bytes) };
        used_bytes / u64::from(self.block_bytes.max(1))
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

/// A size in the words of the trade: 4K, 1M, 40G; bytes where it is no whole number of those.
pub fn short_size(bytes: u64) -> String {
    for (shift, unit) in [(40, 'T'), (30, 'G'), (20, 'M'), (10, 'K')] {
        if bytes >> shift > 0 && bytes & ((1 << shift) - 1) == 0 {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
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
    fn the_working_set_is_cut_to_the_target_and_to_whole_blocks() {
        let mut workload = Workload::new(Pattern::Random, Direction::Read, 65536, 1);
        assert_eq!(workload.blocks_on(65536 * 3 + 100), 3);
        workload.working_set_bytes = 65536 * 2 + 1;
        assert_eq!(workload.blocks_on(65536 * 3), 2);
        assert_eq!(workload.blocks_on(65536), 1);
        assert_eq!(workload.blocks_on(4096), 0);
    }

    #[test]
    fn sizes_are_short_where_they_can_be() {
        assert_eq!([4096, 1 << 20, 40 << 30, 3 << 9, 1500].map(short_size), ["4K", "1M", "40G", "1536", "1500"]);
    }
}
