//! What the study found, as it is saved: how the disks were prepared, and the cells of four parts.

use crate::{
    cells::{Cell, Cells, Compared},
    child::OpenCost,
    targets::Container,
};
use diskwright_load::record::Head;
use diskwright_stats::numbers::bytes;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Schema of [`ContainersResult`].
pub const SCHEMA: &str = "diskwright.study.containers/3";

/// Part of the cells: every container under every workload. The first is the raw file.
pub const CONTAINERS: &str = "containers";
/// Part of the cells: reads of the top of chains, in the order of [`ChainRecord::lengths`].
pub const CHAIN: &str = "chain";
/// Part of the cells: the same writes into a full disk and into an empty one, in pairs.
pub const EXPANDING: &str = "expanding";
/// Part of the cells: disks with blocks of several sizes, in the order of
/// [`BlockSizeRecord::block_bytes`].
pub const BLOCK_SIZE: &str = "block size";
/// Name of the figure in [`Cell::more`]: the flush after the writes, which makes new blocks
/// durable, nanoseconds.
pub const FLUSH_NS: &str = "flush_ns";

/// The study, whole or as far as it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ContainersResult {
    /// When, where and by what it was measured, and the conclusion.
    #[serde(flatten)]
    pub head: Head,
    /// The options in force.
    pub options: ContainersRecord,
    /// Time of the generator itself for each request, on `null:` at the first depth, nanoseconds.
    pub generator_ns_per_io: f64,
    /// How each target was prepared and proved.
    pub preparation: Vec<PreparedRecord>,
    /// Creation times.
    pub creation: Vec<CreationRecord>,
    /// The chains of the chain-length experiment.
    pub chain: Option<ChainRecord>,
    /// The disks that differ only in the size of their blocks.
    pub block_sizes: Vec<BlockSizeRecord>,
    /// Everything that was measured.
    pub cells: Vec<Cell>,
    /// What the long form measures and this one did not, a phrase each.
    pub left_out: Vec<String>,
}

impl Cells for ContainersResult {
    fn cells(&self) -> Cow<'_, [Cell]> {
        Cow::from(&self.cells)
    }
}

/// The name of the top of a chain of so many differencing disks.
pub(crate) fn chain_name(children: u32) -> String {
    format!("chain of {children}")
}

/// The name of the target with the full disk of the expanding experiment, or with the empty one.
pub(crate) fn expanding_name(target: &str, state: &str) -> String {
    format!("{target}, {state}")
}

/// The options in force.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct PreparedRecord {
    /// The container.
    pub container: Container,
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct CreationRecord {
    /// The container.
    pub container: Container,
    /// Virtual size.
    pub size_bytes: u64,
    /// Time of each creation, nanoseconds.
    pub wall_ns: Vec<f64>,
    /// Space that the new file takes.
    pub file_allocated_bytes: u64,
}

/// The chain-length experiment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ChainRecord {
    /// Size of each disk, and of the data in the base.
    pub size_bytes: u64,
    /// Bytes of the longest chain that were read back through its top and found right.
    pub verified_bytes: u64,
    /// How long it took to make all its files, nanoseconds.
    pub made_in_ns: u64,
    /// Each length, ascending.
    pub lengths: Vec<ChainLength>,
}

/// One length of chain.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ChainLength {
    /// Differencing disks above the base.
    pub children: u32,
    /// What it cost to open it and read one block.
    pub open: OpenCost,
    /// Whether that was in a fresh process; else the memory is that of the whole program.
    pub in_child_process: bool,
}

/// Full disks that differ only in the size of their blocks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct BlockSizeRecord {
    /// Format and type of all of them.
    pub container: Container,
    /// Sizes of blocks; the first is the usual one, and the base of the ratios.
    pub block_bytes: Vec<u64>,
    /// Space that each file takes.
    pub file_allocated_bytes: Vec<u64>,
}

impl BlockSizeRecord {
    /// The name of the disk with blocks of this size.
    pub fn name(&self, block_bytes: u64) -> String {
        name_of_size(self.container, block_bytes)
    }

    /// The cells of these disks: one row for each workload.
    pub fn compared<'a>(&self, cells: &'a [Cell]) -> Vec<Compared<'a>> {
        let names: Vec<String> = self.block_bytes.iter().map(|size| self.name(*size)).collect();
        let mut loads = Compared::of_part(cells, BLOCK_SIZE);
        loads.iter_mut().for_each(|load| load.cells.retain(|cell| names.contains(&cell.subject)));
        loads.retain(|load| !load.cells.is_empty());
        loads
    }
}

/// The name of a disk by the size of its blocks.
pub(crate) fn name_of_size(container: Container, block_bytes: u64) -> String {
    format!("{}, {}", container.name(), bytes(block_bytes))
}
