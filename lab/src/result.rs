//! Results as they are saved: complete, with everything that made them, under a schema that has a
//! version.

use crate::{
    child::OpenCost,
    measure::{Ratio, WorkloadResult},
    targets::Container,
};
use diskwright_load::{
    machine::{Machine, Place, Versions},
    warning::Warning,
};
use diskwright_stats::summary::Summary;
use serde::{Deserialize, Serialize};

/// Schema of [`ContainersResult`].
pub const CONTAINERS_SCHEMA: &str = "diskwright.study.containers/2";

/// The study `containers`, whole.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ContainersResult {
    /// [`CONTAINERS_SCHEMA`].
    pub schema: String,
    /// The conclusion, in a sentence or two.
    pub verdict: String,
    /// When it began, as in `20261120T221749Z`.
    pub started_utc: String,
    /// How long it took, nanoseconds.
    pub took_ns: u64,
    /// On what.
    pub machine: Machine,
    /// Where the disks lay.
    pub place: Place,
    /// By which programs.
    pub versions: Versions,
    /// How.
    pub options: ContainersRecord,
    /// What the generator itself costs for each request, on `null:` at the first depth,
    /// nanoseconds.
    pub generator_ns_per_io: f64,
    /// How each target was prepared and proved.
    pub preparation: Vec<PreparedRecord>,
    /// Creation times.
    pub creation: Vec<CreationRecord>,
    /// The chain-length experiment.
    pub chain: Option<ChainRecord>,
    /// Each workload at each depth, on every target.
    pub workloads: Vec<ComparedWorkload>,
    /// Writes into empty disks, that must find space first, against writes into full ones.
    #[serde(default)]
    pub expanding: Vec<ExpandingRecord>,
    /// Full disks with blocks of one size against those with blocks of another.
    #[serde(default)]
    pub block_sizes: Vec<BlockSizeRecord>,
    /// What the long form measures and this one did not, a phrase each.
    #[serde(default)]
    pub left_out: Vec<String>,
    /// Reasons for doubt.
    pub warnings: Vec<Warning>,
    /// Whether it was stopped before everything was measured; what was measured is there.
    #[serde(default)]
    pub partial: bool,
}

/// The options in force.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ContainersRecord {
    /// Two minutes at most.
    pub quick: bool,
    /// Size of every disk.
    pub size_bytes: u64,
    /// The size that was asked for, where it was rounded up to that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_bytes: Option<u64>,
    /// Payload block of the dynamic and differencing disks: the formats' default, 2 MiB.
    pub block_bytes: u64,
    /// Rounds.
    pub rounds: usize,
    /// Queue depths.
    pub queue_depths: Vec<u32>,
    /// "direct" or "page".
    pub cache: String,
    /// "auto", "io_uring" or "pread".
    pub engine: String,
    /// Seed of contents, offsets and orders.
    pub seed: u64,
}

/// How one target was prepared.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PreparedRecord {
    /// Which.
    pub container: Container,
    /// Its name.
    pub target: String,
    /// The cache mode in force.
    pub cache: String,
    /// Bytes written to it through the block queue.
    pub filled_bytes: u64,
    /// How long that took, nanoseconds.
    pub fill_ns: u64,
    /// Bytes read back, after closing and opening it again, and found equal to what was written:
    /// all of them, or the study would have ended with an error.
    pub verified_bytes: u64,
    /// How long that took, nanoseconds.
    pub verify_ns: u64,
    /// Whether its extents called every byte data of its own.
    pub populated: bool,
    /// Space that its file takes.
    pub file_allocated_bytes: u64,
}

/// How long it took to create an empty disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CreationRecord {
    /// Which.
    pub container: Container,
    /// Its name.
    pub target: String,
    /// Virtual size.
    pub size_bytes: u64,
    /// Times, nanoseconds.
    pub wall_ns: Summary,
    /// Space that the new file takes.
    pub file_allocated_bytes: u64,
}

/// The chain-length experiment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChainRecord {
    /// Size of each disk, and of the data in the base.
    pub size_bytes: u64,
    /// Bytes of the longest chain that were read back through its top and found right.
    pub verified_bytes: u64,
    /// How long it took to make all its files, nanoseconds.
    pub made_in_ns: u64,
    /// Each length: differencing disks above the base.
    pub lengths: Vec<ChainLength>,
    /// Each workload; its cells are in the order of `lengths`, the first being the base of the
    /// ratios.
    pub reads: Vec<WorkloadResult>,
}

/// One length of chain.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChainLength {
    /// Differencing disks above the base.
    pub children: u32,
    /// What it cost to open it and read one block.
    pub open: OpenCost,
    /// Whether that was in a fresh process; else the memory is that of the whole program.
    pub in_child_process: bool,
}

/// Writes into an empty disk against the same writes into a full one of its kind, in turns.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExpandingRecord {
    /// Which kind.
    pub container: Container,
    /// Its name, with the size of its blocks where that is not the usual one.
    pub target: String,
    /// Size of its blocks.
    pub block_bytes: u64,
    /// Writes in each round.
    pub writes: u64,
    /// The full disk, which is the base of the ratios, and the empty one.
    pub result: WorkloadResult,
    /// The flush after the writes, which makes the new blocks durable: on the full disk,
    /// nanoseconds.
    pub flush_full_ns: Summary,
    /// The same on the empty one.
    pub flush_empty_ns: Summary,
    /// Speed of the empty disk with that flush in it, as a ratio to the full one's.
    pub ratio_with_flush: Ratio,
}

/// Full disks that differ only in the size of their blocks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BlockSizeRecord {
    /// Which kind.
    pub container: Container,
    /// Sizes of blocks, in the order of the cells; the first is the usual one, and the base of the
    /// ratios.
    pub block_bytes: Vec<u64>,
    /// Space that each file takes.
    pub file_allocated_bytes: Vec<u64>,
    /// The workloads.
    pub workloads: Vec<WorkloadResult>,
    /// For each workload, the paper's ratio of its 512 KiB (on Windows Server 2008) to its 2 MiB
    /// (on R2), where it has one.
    pub paper_ratios: Vec<Option<f64>>,
}

/// A workload on all targets, with the paper's figures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ComparedWorkload {
    /// What was measured.
    #[serde(flatten)]
    pub result: WorkloadResult,
    /// For each cell, the paper's ratio to the physical disk (Windows Server 2008 R2, queue depth
    /// 64), where its tables have one.
    pub paper_ratios: Vec<Option<f64>>,
}
