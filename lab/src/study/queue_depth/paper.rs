//! The Storage Spaces paper's own figures: `papers/storage-spaces-synthetic-workloads.txt`.
//!
//! Only printed figures are here: the paper's graphs from 13 to 24 outstanding per thread have no
//! numbers. The paper's array has eight SSDs and two copies, behind a virtual machine and SMB. So
//! the shape of a curve can be compared with ours, but not its height.

use super::Stage;
use crate::sweep::ArrayOptions;

/// The paper's array: a two-way mirror on eight SSDs.
pub const ARRAY: ArrayOptions = ArrayOptions { copies: 2, devices: 8 };
/// Threads on the paper's file in the pre-tests and in test 1.
pub const THREADS: u32 = 8;
/// Outstanding requests of each thread in the paper's pre-tests.
pub const PRE_TEST_DEPTH: u32 = 12;

/// A row of a table of the paper.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// Outstanding requests per thread, or threads, as the table counts.
    pub at: u64,
    /// Requests per second.
    pub iops: f64,
    /// Mean latency, milliseconds.
    pub mean_ms: f64,
}

const fn point(at: u64, iops: f64, mean_ms: f64) -> Point {
    Point { at, iops, mean_ms }
}

/// Pre-test 1, `-t8 -o12`: the total in the paper's sample output.
pub const PRE_TEST: Point = point(12, 58_071.31, 1.652);
/// 99th percentile of pre-test 1, milliseconds.
pub const PRE_TEST_P99_MS: f64 = 10.183;

/// Random small I/O test 1, eight threads, by outstanding per thread.
const DEPTHS: [Point; 12] = [
    point(1, 14_411.29, 0.553),
    point(2, 24_383.58, 0.655),
    point(3, 30_649.46, 0.782),
    point(4, 33_871.47, 0.943),
    point(5, 35_914.00, 1.112),
    point(6, 39_095.32, 1.226),
    point(7, 42_291.43, 1.323),
    point(8, 45_465.08, 1.406),
    point(9, 48_306.02, 1.489),
    point(10, 50_851.79, 1.572),
    point(11, 53_141.62, 1.655),
    point(12, 55_232.28, 1.737),
];

/// Table 4: random small I/O test 2, by threads; 120 outstanding in total.
const COMBINATIONS: [Point; 12] = [
    point(1, 57_499.10, 2.086),
    point(2, 62_619.14, 1.915),
    point(3, 57_425.16, 2.088),
    point(4, 56_856.40, 2.109),
    point(5, 56_824.50, 2.110),
    point(6, 56_443.44, 2.125),
    point(8, 56_361.09, 2.128),
    point(10, 56_655.43, 2.116),
    point(12, 56_377.46, 2.127),
    point(15, 56_506.57, 2.122),
    point(20, 56_724.16, 2.114),
    point(24, 55_949.57, 2.143),
];

/// Sequential 512K reads, one thread, by outstanding.
const READS: [Point; 29] = [
    point(8, 1658.15, 4.824),
    point(9, 1774.83, 5.070),
    point(10, 1889.27, 5.292),
    point(11, 1928.44, 5.703),
    point(12, 2113.98, 5.676),
    point(13, 2106.08, 6.172),
    point(14, 2229.25, 6.279),
    point(15, 2320.65, 6.463),
    point(16, 2306.24, 6.937),
    point(17, 2434.39, 6.982),
    point(18, 2497.41, 7.207),
    point(19, 2474.89, 7.676),
    point(20, 2582.99, 7.742),
    point(21, 2628.46, 7.989),
    point(22, 2610.55, 8.426),
    point(23, 2683.13, 8.571),
    point(24, 2752.21, 8.719),
    point(25, 2724.59, 9.175),
    point(26, 2736.20, 9.501),
    point(27, 2829.51, 9.541),
    point(28, 2824.93, 9.911),
    point(29, 2795.85, 10.372),
    point(30, 2854.24, 10.510),
    point(31, 2899.93, 10.689),
    point(32, 2881.30, 11.105),
    point(33, 2674.00, 12.340),
    point(34, 2764.18, 12.299),
    point(35, 2833.87, 12.350),
    point(36, 2830.87, 12.716),
];

/// Sequential 512K writes, one thread, by outstanding.
const WRITES: [Point; 29] = [
    point(4, 585.67, 6.829),
    point(5, 599.26, 8.342),
    point(6, 617.39, 9.717),
    point(7, 628.42, 11.138),
    point(8, 637.70, 12.544),
    point(9, 643.75, 13.979),
    point(10, 669.53, 14.935),
    point(11, 687.87, 15.990),
    point(12, 698.11, 17.189),
    point(13, 699.35, 18.587),
    point(14, 716.98, 19.525),
    point(15, 724.66, 20.698),
    point(16, 729.19, 21.941),
    point(17, 732.30, 23.214),
    point(18, 730.66, 24.635),
    point(19, 743.80, 25.543),
    point(20, 745.01, 26.843),
    point(21, 747.48, 28.092),
    point(22, 752.75, 29.224),
    point(23, 741.97, 31.002),
    point(24, 753.35, 31.856),
    point(25, 745.58, 33.528),
    point(26, 756.51, 34.367),
    point(27, 756.88, 35.673),
    point(28, 761.66, 36.760),
    point(29, 757.79, 38.268),
    point(30, 753.34, 39.822),
    point(31, 752.15, 41.214),
    point(32, 764.18, 41.874),
];

/// The paper's table for a stage; empty if the paper prints no figures.
pub fn table(stage: Stage) -> &'static [Point] {
    match stage {
        Stage::Files | Stage::Agents => &[],
        Stage::Depths => &DEPTHS,
        Stage::Combinations => &COMBINATIONS,
        Stage::Reads => &READS,
        Stage::Writes => &WRITES,
    }
}

/// The row of a stage's table at this value of its axis.
pub fn at(stage: Stage, place: u64) -> Option<Point> {
    table(stage).iter().find(|point| point.at == place).copied()
}

/// The depth that the paper found for a kind of load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PaperPoint {
    /// Requests in flight on the space.
    pub in_flight: u64,
    /// Threads.
    pub threads: u64,
    /// The table's row with this depth.
    pub point: Point,
}

/// The paper's findings: 2 x 60 for random I/O (text and Table 4), 31 reads and 15 writes for
/// sequential I/O (Table 5, which says "30" for reads but has the figures of 31).
pub fn settled(stage: Stage) -> Option<PaperPoint> {
    let (in_flight, threads, place) = match stage {
        Stage::Files | Stage::Agents => return None,
        Stage::Depths | Stage::Combinations => (120, 2, (Stage::Combinations, 2)),
        Stage::Reads => (31, 1, (Stage::Reads, 31)),
        Stage::Writes => (15, 1, (Stage::Writes, 15)),
    };
    Some(PaperPoint { in_flight, threads, point: at(place.0, place.1)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_keep_littles_law() {
        // Little's law: IOPS x latency is the number of outstanding requests. This finds typing
        // errors in the tables.
        let asked = |stage: Stage, at: u64| match stage {
            Stage::Depths => at * 8,
            Stage::Combinations => 120,
            _ => at,
        };
        let stages = [Stage::Depths, Stage::Combinations, Stage::Reads, Stage::Writes];
        for (stage, point) in stages.into_iter().flat_map(|stage| table(stage).iter().map(move |point| (stage, point)))
        {
            let reached = point.iops * point.mean_ms / 1e3;
            let asked = asked(stage, point.at) as f64;
            assert!((reached / asked - 1.0).abs() < 0.01, "{stage:?} {point:?}: {reached} of {asked}");
        }
        assert!((PRE_TEST.iops * PRE_TEST.mean_ms / 1e3 / 96.0 - 1.0).abs() < 0.01);
    }

    /// Table 5, with its own calculations.
    #[test]
    fn the_papers_depths_give_its_table_5() {
        let row = |stage, read_share| {
            let settled = settled(stage).unwrap();
            // The paper's MB are 2^20 bytes.
            let mb = settled.point.iops * 512.0 / 1024.0;
            ARRAY.figures(read_share, settled.in_flight, settled.point.iops, mb)
        };
        let (reads, writes) = (row(Stage::Reads, 1.0), row(Stage::Writes, 0.0));
        let close = |ours: f64, papers: f64| assert!((ours - papers).abs() < 5e-3, "{ours} instead of {papers}");
        close(reads.mb_per_s_per_device, 181.245);
        close(reads.depth_per_device, 3.875);
        close(writes.mb_per_s_per_device, 90.583);
        close(writes.depth_per_device, 3.75);
        assert_eq!(settled(Stage::Combinations).map(|settled| settled.point.iops), Some(62_619.14));
        assert_eq!(settled(Stage::Files), None);
    }
}
