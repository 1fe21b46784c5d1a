//! What the study found, as it is saved.

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
pub const SCHEMA: &str = "diskwright.study.zero-payload/2";

/// Name of the figure in [`Cell::more`]: share of the bytes asked for that never reached the store,
/// by the kernel's account, from 0 to 1.
pub const NOT_STORED: &str = "not_stored_share";

/// The study, whole or as far as it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ZeroPayloadResult {
    /// When, where and by what it was measured, and the conclusion.
    #[serde(flatten)]
    pub head: Head,
    /// Whether it was the short form.
    pub quick: bool,
    /// Size of each disk.
    pub size_bytes: u64,
    /// Length of a cell, nanoseconds.
    pub cell_ns: u64,
    /// Rounds that were asked for.
    pub rounds: usize,
    /// The disks, as they were found before measuring.
    pub disks: Vec<DiskRecord>,
    /// Each test on each disk: the part is the payload, the subject the type of the disk.
    pub cells: Vec<Cell>,
}

impl Cells for ZeroPayloadResult {
    fn cells(&self) -> Cow<'_, [Cell]> {
        Cow::from(&self.cells)
    }
}

/// Contents of the disks and of what is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Payload {
    /// Zeros, as SQLIO wrote them.
    Zeros,
    /// Data that cannot be compressed.
    Data,
}

impl Payload {
    /// The word for it, and the part of its cells.
    pub fn name(self) -> &'static str {
        match self {
            Self::Zeros => "zeros",
            Self::Data => "data",
        }
    }
}

/// A disk before it is measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct DiskRecord {
    /// "dynamic, zeros".
    pub name: String,
    /// What it was filled with, from end to end.
    pub payload: Payload,
    /// Space that its file takes after that.
    pub file_allocated_bytes: u64,
    /// What a look at it found.
    pub contents: ContentsRecord,
    /// What `lab run` would say of it in its first lines.
    pub said: Vec<Warning>,
}

/// One test with one payload, on both disks.
#[derive(Debug, Clone, Copy)]
pub struct Test<'a> {
    /// "64K random read".
    pub name: &'a str,
    /// On the dynamic disk.
    pub dynamic: &'a Cell,
    /// On the fixed one.
    pub fixed: &'a Cell,
}

impl<'a> Test<'a> {
    /// All tests with this payload that have a round on both disks.
    pub fn all(cells: &'a [Cell], payload: Payload) -> Vec<Self> {
        let of = |load: &Compared<'a>| {
            Some(Self { name: load.load, dynamic: load.cell("dynamic")?, fixed: load.cell("fixed")? })
        };
        Compared::of_part(cells, payload.name()).iter().filter_map(of).collect()
    }

    /// IOPS of the dynamic disk as a ratio to the fixed one's in the same round.
    pub fn ratio(&self) -> Option<Ratio> {
        self.dynamic.ratio(self.fixed, |round| round.iops)
    }
}

/// The median of [`NOT_STORED`].
pub fn not_stored(cell: &Cell) -> Option<f64> {
    median(&cell.more(NOT_STORED)?)
}
