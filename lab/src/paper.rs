//! The VHD paper's own figures, as data: `papers/vhd-performance-windows-2008r2.txt`, the numbers behind its charts.
//!
//! Only what is printed there is here. The chart of container types has no 4K sequential and no 32K random workloads, so for
//! those there is no ratio, and none is made up.

use crate::workload::{Direction, Pattern, Workload};

/// The queue depth of the charts that compare container types.
pub const QUEUE_DEPTH: u32 = 64;

/// A container type of the paper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PaperContainer {
    /// "FixedVHD".
    Fixed,
    /// "DynamicVHD", fully populated, blocks of 2 MiB.
    Dynamic,
    /// "DifferencingVHD", fully populated, its parent an empty dynamic disk.
    Differencing,
}

/// One workload: pattern, direction, block; then physical disk, fixed, dynamic, differencing.
type Row = (Pattern, Direction, u32, [f64; 4]);

const SR: (Pattern, Direction) = (Pattern::Sequential, Direction::Read);
const SW: (Pattern, Direction) = (Pattern::Sequential, Direction::Write);
const RR: (Pattern, Direction) = (Pattern::Random, Direction::Read);
const RW: (Pattern, Direction) = (Pattern::Random, Direction::Write);

const fn row(kind: (Pattern, Direction), block_kib: u32, values: [f64; 4]) -> Row {
    (kind.0, kind.1, block_kib << 10, values)
}

/// "WS08 R2 Sequential I/Os Throughput (Native Mode)", MB/s, and "WS08 R2 Random I/Os Throughput (Native Mode)", IOPS; queue
/// depth 64; rounded to a millionth.
const NATIVE_R2: [Row; 12] = [
    row(SR, 64, [1532.777565, 1534.164226, 1491.673094, 1497.803167]),
    row(SW, 64, [650.709200, 646.738351, 507.077550, 501.924265]),
    row(SR, 256, [1595.960803, 1600.833330, 1570.894743, 1573.397257]),
    row(SW, 256, [586.810040, 594.703784, 566.759198, 566.777664]),
    row(SR, 1024, [1587.249092, 1590.030866, 1559.111457, 1559.998726]),
    row(SW, 1024, [586.928428, 581.304947, 601.084037, 615.780554]),
    row(RR, 4, [3493.650546, 3483.719508, 3486.767801, 3483.580290]),
    row(RW, 4, [3058.205886, 3076.357240, 1877.282712, 1890.520290]),
    row(RR, 8, [3434.420513, 3411.197619, 3421.298115, 3423.175734]),
    row(RW, 8, [3029.970793, 3018.017333, 2175.013144, 2203.187115]),
    row(RR, 64, [2701.227074, 2696.488679, 2694.528512, 2682.860197]),
    row(RW, 64, [2415.432095, 2408.297461, 2142.463685, 2166.091892]),
];

/// The paper's ratio of a container to the physical disk, Windows Server 2008 R2, queue depth 64. `None` where its tables
/// do not have the workload.
pub fn ratio(workload: &Workload, container: PaperContainer) -> Option<f64> {
    let (_, _, _, values) = NATIVE_R2.iter().find(|(pattern, direction, block_bytes, _)| {
        *pattern == workload.pattern && *direction == workload.direction && *block_bytes == workload.block_bytes
    })?;
    let column = match container {
        PaperContainer::Fixed => 1,
        PaperContainer::Dynamic => 2,
        PaperContainer::Differencing => 3,
    };
    Some(values[column] / values[0])
}

/// Reads of the top disk of a chain.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChainPoint {
    /// Differencing disks above the base.
    pub length: u32,
    /// MB/s, Windows Server 2008.
    pub ws2008_mb_per_s: f64,
    /// MB/s, Windows Server 2008 R2.
    pub r2_mb_per_s: f64,
}

const fn chain(length: u32, ws2008_mb_per_s: f64, r2_mb_per_s: f64) -> ChainPoint {
    ChainPoint { length, ws2008_mb_per_s, r2_mb_per_s }
}

/// "Top Level VHD 64KB Sequential Reads Throughput".
pub const CHAIN_64K_SEQUENTIAL_READ: [ChainPoint; 7] = [
    chain(1, 706.358278, 715.230178),
    chain(2, 702.030263, 715.312945),
    chain(4, 688.739128, 715.132165),
    chain(8, 687.228139, 715.328464),
    chain(16, 453.604373, 715.393934),
    chain(32, 280.374933, 715.440139),
    chain(64, 151.966568, 715.304461),
];

/// "Top Level VHD 4KB Random Reads Throughput".
pub const CHAIN_4K_RANDOM_READ: [ChainPoint; 7] = [
    chain(1, 10.394311, 10.455762),
    chain(2, 10.399327, 10.478659),
    chain(4, 6.687068, 10.302475),
    chain(8, 3.780916, 10.300565),
    chain(16, 1.986852, 10.412676),
    chain(32, 1.063601, 10.514088),
    chain(64, 0.521876, 10.486612),
];

/// "Fixed VHD Creation Speed Comparison (VHD Size: 2040GB)", MB/s: Windows Server 2008.
pub const FIXED_CREATION_WS2008_MB_PER_S: f64 = 49.0;
/// The same: Windows Server 2008 R2.
pub const FIXED_CREATION_R2_MB_PER_S: f64 = 419.0;

/// A chain length's throughput against that of length 1: Windows Server 2008, and R2. `None` where the paper has no such length.
pub fn chain_ratios(points: &[ChainPoint], length: u32) -> Option<(f64, f64)> {
    let first = points.first()?;
    let point = points.iter().find(|point| point.length == length)?;
    Some((point.ws2008_mb_per_s / first.ws2008_mb_per_s, point.r2_mb_per_s / first.r2_mb_per_s))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::paper_monolithic;

    #[test]
    fn ratios_are_those_of_the_charts() {
        let at = |pattern, direction, kib: u32, container| {
            ratio(&Workload::new(pattern, direction, kib << 10, 32), container)
        };
        let close = |found: Option<f64>, wanted: f64| {
            assert!((found.unwrap() - wanted).abs() < 5e-4, "{found:?} is not {wanted}")
        };
        // The paper's point: random 4K writes lose four tenths on a dynamic disk, reads lose nothing.
        close(at(Pattern::Random, Direction::Write, 4, PaperContainer::Dynamic), 0.6139);
        close(at(Pattern::Random, Direction::Read, 4, PaperContainer::Dynamic), 0.9980);
        close(at(Pattern::Sequential, Direction::Write, 64, PaperContainer::Differencing), 0.7714);
        close(at(Pattern::Random, Direction::Write, 4, PaperContainer::Fixed), 1.0059);
    }

    #[test]
    fn what_the_paper_does_not_have_is_not_made_up() {
        let without: Vec<String> = paper_monolithic(64)
            .into_iter()
            .filter(|workload| ratio(workload, PaperContainer::Dynamic).is_none())
            .map(|workload| workload.name)
            .collect();
        assert_eq!(without, ["4K sequential read", "4K sequential write", "32K random read", "32K random write"]);
        assert_eq!(chain_ratios(&CHAIN_4K_RANDOM_READ, 1024), None);
    }

    #[test]
    fn chains_of_2008_collapse_and_those_of_r2_do_not() {
        let (old, new) = chain_ratios(&CHAIN_4K_RANDOM_READ, 64).unwrap();
        assert!(old < 0.06 && new > 0.99, "{old} {new}");
        assert_eq!(chain_ratios(&CHAIN_64K_SEQUENTIAL_READ, 1), Some((1.0, 1.0)));
    }
}
