//! The result of the study `containers`: how the disks were prepared, and the cells of its four
//! parts.

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

/// The result of the study; a partial result lacks experiments.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ContainersResult {
    /// When, where and by which program it was measured, and the conclusion.
    #[serde(flatten)]
    pub head: Head,
    /// The options in force.
    pub options: ContainersRecord,
    /// Time that the load generator itself takes per request, on `null:` at the first depth,
    /// nanoseconds.
    pub generator_ns_per_io: f64,
    /// How each target was prepared and verified.
    pub preparation: Vec<PreparedRecord>,
    /// Creation times.
    pub creation: Vec<CreationRecord>,
    /// The chains of the chain-length experiment.
    pub chain: Option<ChainRecord>,
    /// Disks that differ only in their block size.
    pub block_sizes: Vec<BlockSizeRecord>,
    /// All measured cells.
    pub cells: Vec<Cell>,
    /// What the full study measures and a quick one does not, a phrase each.
    pub left_out: Vec<String>,
}

impl Cells for ContainersResult {
    fn cells(&self) -> Cow<'_, [Cell]> {
        Cow::from(&self.cells)
    }
}

/// The name of the top of a chain with this many differencing disks.
pub(crate) fn chain_name(children: u32) -> String {
    format!("chain of {children}")
}

/// The name of a target in the expanding experiment; `state` is "full" or "empty".
pub(crate) fn expanding_name(target: &str, state: &str) -> String {
    format!("{target}, {state}")
}

/// The options in force.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ContainersRecord {
    /// Whether this is the quick study of two minutes.
    pub quick: bool,
    /// Size of every disk.
    pub size_bytes: u64,
    /// The size that was asked for, if it was rounded up to `size_bytes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_bytes: Option<u64>,
    /// Block size of the dynamic and differencing disks: the formats' default, 2 MiB.
    pub block_bytes: u64,
    /// Rounds of each cell.
    pub rounds: usize,
    /// Queue depths.
    pub queue_depths: Vec<u32>,
    /// "direct" or "page".
    pub cache: String,
    /// "auto", "io_uring" or "pread".
    pub engine: String,
    /// Seed of contents, offsets and the order of cells.
    pub seed: u64,
}

/// How one target was prepared.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct PreparedRecord {
    /// The container.
    pub container: Container,
    /// The cache mode in force.
    pub cache: String,
    /// Bytes written through the block queue.
    pub filled_bytes: u64,
    /// Time of filling, nanoseconds.
    pub fill_ns: u64,
    /// Bytes that were read back after closing and opening the disk, and were correct. Always the
    /// whole disk: a difference ends the study with an error.
    pub verified_bytes: u64,
    /// Time of verifying, nanoseconds.
    pub verify_ns: u64,
    /// Whether the disk reported every byte as allocated data of its own.
    pub populated: bool,
    /// Space that its file takes, bytes.
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
    /// Space that the new file takes, bytes.
    pub file_allocated_bytes: u64,
}

/// The chain-length experiment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ChainRecord {
    /// Size of each disk, and of the data in the base.
    pub size_bytes: u64,
    /// Bytes of the longest chain that were read back through its top and were correct.
    pub verified_bytes: u64,
    /// Time to make all its files, nanoseconds.
    pub made_in_ns: u64,
    /// Each length, ascending.
    pub lengths: Vec<ChainLength>,
}

/// One chain length.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ChainLength {
    /// Differencing disks above the base.
    pub children: u32,
    /// Cost of opening the chain and reading one block.
    pub open: OpenCost,
    /// Whether it was opened in a fresh process; else the memory figure is that of the whole
    /// program.
    pub in_child_process: bool,
}

/// Full disks that differ only in their block size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct BlockSizeRecord {
    /// Format and type of all of them.
    pub container: Container,
    /// Block sizes. The first is the default, and the base of the ratios.
    pub block_bytes: Vec<u64>,
    /// Space that each file takes, bytes.
    pub file_allocated_bytes: Vec<u64>,
}

impl BlockSizeRecord {
    /// The name of the disk with this block size.
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

/// The name of a disk with its block size.
pub(crate) fn name_of_size(container: Container, block_bytes: u64) -> String {
    format!("{}, {}", container.name(), bytes(block_bytes))
}
