//! The figures of the VHD paper: `papers/vhd-performance-windows-2008r2.txt`, the numbers behind
//! its charts.
//!
//! Only printed figures are here. The paper compares container types without 4K sequential and 32K
//! random workloads, so these have no ratio.

use diskwright_load::workload::{Workload, paper_applications, paper_monolithic};

/// The queue depth of the paper's charts that compare container types.
pub const QUEUE_DEPTH: u32 = 64;

/// A container type in the paper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PaperContainer {
    /// "FixedVHD".
    Fixed,
    /// "DynamicVHD", fully populated, blocks of 2 MiB.
    Dynamic,
    /// "DifferencingVHD", fully populated; its parent is an empty dynamic disk.
    Differencing,
}

/// One workload: bytes per request, percentage of reads, percentage of random requests; then the
/// figures of physical disk, fixed, dynamic and differencing.
type Row = (u32, f64, f64, [f64; 4]);

const SR: (f64, f64) = (100.0, 0.0);
const SW: (f64, f64) = (0.0, 0.0);
const RR: (f64, f64) = (100.0, 100.0);
const RW: (f64, f64) = (0.0, 100.0);

const fn row(shares: (f64, f64), block_kib: u32, values: [f64; 4]) -> Row {
    (block_kib << 10, shares.0, shares.1, values)
}

/// "WS08 R2 Sequential I/Os Throughput (Native Mode)", MB/s, and "WS08 R2 Random I/Os Throughput
/// (Native Mode)", IOPS; queue depth 64; rounded to a millionth.
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

/// The name of an application workload in the profile; then the figures of physical disk, fixed,
/// dynamic and differencing.
type NamedRow = (&'static str, [f64; 4]);

/// "WS08 R2 Real Apps Workload Throughput (Native Mode)", IOPS; queue depth 64; rounded to a
/// millionth. "SQL Server Log" is the same load as a 64K sequential write, but has its own figures.
const APPLICATIONS_R2: [NamedRow; 12] = [
    ("Web file server 4K", [3700.743228, 3725.768419, 3573.336901, 3559.130357]),
    ("Web file server 8K", [3619.563463, 3628.384313, 3478.234491, 3475.591361]),
    ("Web file server 64K", [2788.150728, 2786.663317, 2701.930818, 2701.354491]),
    ("Decision support database", [544.987698, 544.300118, 549.031697, 547.763105]),
    ("Media streaming", [10726.828549, 10719.461255, 8096.616119, 8135.492267]),
    ("SQL Server log", [10439.117195, 10410.110436, 9345.075810, 9381.819563]),
    ("OS paging", [5903.783173, 5929.962816, 3193.659925, 3291.199398]),
    ("Web server log", [16845.833089, 16491.709501, 15089.006834, 15094.057577]),
    ("OLTP database", [3249.093849, 3199.442537, 2721.681793, 2726.115281]),
    ("Exchange server", [3316.545311, 3294.805133, 2804.802280, 2797.137932]),
    ("Workstation", [3355.041779, 3345.760955, 3071.907564, 3054.528859]),
    ("Video on demand", [1030.502531, 1039.766639, 937.595707, 938.214248]),
];

/// The paper's ratio of a container to the physical disk (Windows Server 2008 R2, queue depth 64).
/// `None` if its tables do not have the workload.
pub fn ratio(workload: &Workload, container: PaperContainer) -> Option<f64> {
    let is_it = |(block_bytes, read, random, _): &&Row| {
        *block_bytes == workload.block_bytes && *read == workload.read_percent && *random == workload.random_percent
    };
    let application = APPLICATIONS_R2.iter().find(|(name, _)| *name == workload.name).map(|(_, values)| values);
    let values = match application {
        Some(values) => values,
        None => NATIVE_R2.iter().find(is_it).map(|(_, _, _, values)| values)?,
    };
    let column = match container {
        PaperContainer::Fixed => 1,
        PaperContainer::Dynamic => 2,
        PaperContainer::Differencing => 3,
    };
    Some(values[column] / values[0])
}

/// One workload: bytes per request, percentage of reads, percentage of random requests; then the
/// figures of the pass-through disk and of the fixed VHD in a virtual machine.
type InGuestRow = (u32, f64, f64, [f64; 2]);

const fn in_guest(shares: (f64, f64), block_kib: u32, values: [f64; 2]) -> InGuestRow {
    (block_kib << 10, shares.0, shares.1, values)
}

/// "WS08 R2 Sequential I/Os Throughput (Native vs. Virtual Machine)", MB/s, and "WS08 R2 Random
/// I/Os Throughput (Native vs. Virtual Machine)", IOPS; queue depth 64; rounded to a millionth. The
/// native figures are those of [`NATIVE_R2`].
const IN_GUEST_R2: [InGuestRow; 12] = [
    in_guest(SR, 64, [1518.409949, 1500.243262]),
    in_guest(SW, 64, [639.938619, 642.627957]),
    in_guest(SR, 256, [1605.669001, 1606.630831]),
    in_guest(SW, 256, [575.909005, 588.018417]),
    in_guest(SR, 1024, [1600.324675, 1596.930313]),
    in_guest(SW, 1024, [569.463374, 580.165753]),
    in_guest(RR, 4, [3475.533269, 3491.746879]),
    in_guest(RW, 4, [3092.645850, 3063.018959]),
    in_guest(RR, 8, [3411.238137, 3404.459546]),
    in_guest(RW, 8, [3047.978567, 3011.015115]),
    in_guest(RR, 64, [2683.016076, 2687.993132]),
    in_guest(RW, 64, [2414.056132, 2406.173921]),
];

/// The paper's ratios of a virtual machine to native: the pass-through disk to the physical disk,
/// and the fixed VHD to itself. `None` for a workload that the paper does not have.
pub fn guest_ratios(workload: &Workload) -> Option<(f64, f64)> {
    let is_it = |row: &(u32, f64, f64)| *row == (workload.block_bytes, workload.read_percent, workload.random_percent);
    let (.., native) = NATIVE_R2.iter().find(|(bytes, read, random, _)| is_it(&(*bytes, *read, *random)))?;
    let (.., guest) = IN_GUEST_R2.iter().find(|(bytes, read, random, _)| is_it(&(*bytes, *read, *random)))?;
    Some((guest[0] / native[0], guest[1] / native[1]))
}

/// The paper's workload with this name, at [`QUEUE_DEPTH`].
pub fn workload(name: &str) -> Option<Workload> {
    let mut all = paper_monolithic(QUEUE_DEPTH).into_iter().chain(paper_applications(QUEUE_DEPTH));
    all.find(|workload| workload.name == name)
}

/// "Peak IOPS ... for a fully populated 2040GB dynamically expanding VHD": percentages of reads and
/// of random requests, KiB; then Windows Server 2008 with blocks of 512 KiB, and R2 with blocks of
/// 2 MiB.
type PeakRow = ((f64, f64), u32, f64, f64);

const DYNAMIC_PEAKS: [PeakRow; 16] = [
    (SR, 4, 52_070.0, 92_067.0),
    (SW, 4, 7_528.0, 43_892.0),
    (SR, 64, 24_599.0, 24_631.0),
    (SW, 64, 1_083.0, 10_302.0),
    (SR, 256, 6_262.0, 6_288.0),
    (SW, 256, 371.0, 2_500.0),
    (SR, 1024, 1_565.0, 1_563.0),
    (SW, 1024, 85.0, 616.0),
    (RR, 4, 1_667.0, 5_165.0),
    (RW, 4, 157.0, 2_611.0),
    (RR, 8, 1_734.0, 5_064.0),
    (RW, 8, 155.0, 3_117.0),
    (RR, 32, 1_642.0, 4_405.0),
    (RW, 32, 146.0, 3_079.0),
    (RR, 64, 1_506.0, 3_761.0),
    (RW, 64, 137.0, 2_888.0),
];

/// The paper's peak IOPS of a full dynamic VHD with blocks of 512 KiB on Windows Server 2008, as a
/// ratio to one with 2 MiB on R2. Block size and software differ together: the paper never changes
/// only one of them. `None` for a workload that the paper does not have.
pub fn block_size_ratio(workload: &Workload) -> Option<f64> {
    let (.., old, new) = DYNAMIC_PEAKS.iter().find(|((read, random), kib, ..)| {
        *kib << 10 == workload.block_bytes && *read == workload.read_percent && *random == workload.random_percent
    })?;
    Some(old / new)
}

/// Throughput of reads from the top disk of a chain.
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
/// "Fixed VHD Creation Speed Comparison (VHD Size: 2040GB)", MB/s: Windows Server 2008 R2.
pub const FIXED_CREATION_R2_MB_PER_S: f64 = 419.0;

/// Throughput of a chain length relative to length 1: Windows Server 2008, and R2. `None` if the
/// paper does not have the length.
pub fn chain_ratios(points: &[ChainPoint], length: u32) -> Option<(f64, f64)> {
    let first = points.first()?;
    let point = points.iter().find(|point| point.length == length)?;
    Some((point.ws2008_mb_per_s / first.ws2008_mb_per_s, point.r2_mb_per_s / first.r2_mb_per_s))
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_load::workload::{Direction, Pattern};

    #[test]
    fn ratios_are_those_of_the_charts() {
        let at = |pattern, direction, kib: u32, container| {
            ratio(&Workload::new(pattern, direction, kib << 10, 32), container)
        };
        let close = |found: Option<f64>, wanted: f64| {
            assert!((found.unwrap() - wanted).abs() < 5e-4, "{found:?} is not {wanted}")
        };
        // The paper's result: random 4K writes on a dynamic disk lose 40 %, reads lose nothing.
        close(at(Pattern::Random, Direction::Write, 4, PaperContainer::Dynamic), 0.6139);
        close(at(Pattern::Random, Direction::Read, 4, PaperContainer::Dynamic), 0.9980);
        close(at(Pattern::Sequential, Direction::Write, 64, PaperContainer::Differencing), 0.7714);
        close(at(Pattern::Random, Direction::Write, 4, PaperContainer::Fixed), 1.0059);
    }

    #[test]
    fn small_blocks_of_2008_lose_most_with_random_writes() {
        let all = paper_monolithic(64);
        let ratios: Vec<f64> = all.iter().map(|workload| block_size_ratio(workload).unwrap()).collect();
        assert!(ratios.iter().all(|ratio| (0.04..1.01).contains(ratio)), "{ratios:?}");
        let of = |name: &str| ratios[all.iter().position(|workload| workload.name == name).unwrap()];
        assert!((of("4K random write") - 0.0601).abs() < 5e-4 && (of("64K random write") - 0.0474).abs() < 5e-4);
        assert_eq!(block_size_ratio(&paper_applications(64)[0]), None);
    }

    #[test]
    fn every_application_has_its_figure() {
        let ratios: Vec<f64> = paper_applications(64)
            .iter()
            .map(|workload| ratio(workload, PaperContainer::Dynamic).unwrap_or_else(|| panic!("{}", workload.name)))
            .collect();
        // OS paging loses most, random reads of 1M nothing.
        let lowest = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        assert_eq!((ratios.len(), ratios[6]), (12, lowest));
        assert!((lowest - 0.5409).abs() < 5e-4 && ratios[3] > 1.0, "{ratios:?}");
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
