//! The saved result of the study.

use crate::{
    cells::{Cell, Cells, Compared},
    ratio::Ratio,
};
use diskwright_load::{
    record::{ContentsRecord, Head},
    warning::Warning,
};
use diskwright_stats::summary::median;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Schema of [`ZeroPayloadResult`].
pub const SCHEMA: &str = "diskwright.study.zero-payload/3";

/// Name of the figure in [`Cell::more`]: share of the requested bytes that never reached storage by
/// the kernel's account, from 0 to 1.
pub const NOT_STORED: &str = "not_stored_share";

/// The result of the study; a partial result has fewer cells.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ZeroPayloadResult {
    /// When, where and by which program it was measured, and the conclusion.
    #[serde(flatten)]
    pub head: Head,
    /// Whether this is the quick study.
    pub quick: bool,
    /// Size of each disk, bytes.
    pub size_bytes: u64,
    /// Length of a cell, nanoseconds.
    pub cell_ns: u64,
    /// Requested rounds.
    pub rounds: usize,
    /// The disks, as inspected before measuring.
    pub disks: Vec<DiskRecord>,
    /// Each test on each disk: the part is the payload, the subject is the type of the disk.
    pub cells: Vec<Cell>,
}

impl Cells for ZeroPayloadResult {
    fn cells(&self) -> Cow<'_, [Cell]> {
        Cow::from(&self.cells)
    }
}

/// Contents of the disks and of the writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Payload {
    /// Zeros, which SQLIO writes.
    Zeros,
    /// Incompressible data.
    Data,
}

impl Payload {
    /// The payload in one word; also the part of its cells.
    pub fn name(self) -> &'static str {
        match self {
            Self::Zeros => "zeros",
            Self::Data => "data",
        }
    }
}

/// A disk as inspected before measuring.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct DiskRecord {
    /// Name of the disk, for example "dynamic, zeros".
    pub name: String,
    /// Contents that were written from end to end.
    pub payload: Payload,
    /// Space that its file takes after writing, bytes.
    pub file_allocated_bytes: u64,
    /// Result of the inspection.
    pub contents: ContentsRecord,
    /// Warnings that `lab run` would print for it.
    pub warnings: Vec<Warning>,
}

/// One test with one payload, on the dynamic and the fixed disk.
#[derive(Debug, Clone, Copy)]
pub struct Test<'a> {
    /// Name of the test, for example "64K random read".
    pub name: &'a str,
    /// The test's cell on the dynamic disk.
    pub dynamic: &'a Cell,
    /// The test's cell on the fixed disk.
    pub fixed: &'a Cell,
}

impl<'a> Test<'a> {
    /// All tests with this payload that were measured on both disks.
    pub fn all(cells: &'a [Cell], payload: Payload) -> Vec<Self> {
        let of = |load: &Compared<'a>| {
            Some(Self { name: load.load, dynamic: load.cell("dynamic")?, fixed: load.cell("fixed")? })
        };
        Compared::of_part(cells, payload.name()).iter().filter_map(of).collect()
    }

    /// IOPS of the dynamic disk as a ratio to the fixed disk in the same round.
    pub fn ratio(&self) -> Option<Ratio> {
        self.dynamic.ratio(self.fixed, |round| round.iops)
    }
}

/// Median of [`NOT_STORED`] over the rounds; `None` without a round.
pub fn not_stored(cell: &Cell) -> Option<f64> {
    median(&cell.more(NOT_STORED)?)
}
