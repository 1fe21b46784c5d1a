//! The saved result of the study.

use super::{Figure, Pattern, TestBedRecord};
use crate::{
    cells::{Cell, Cells, Compared},
    ratio::Ratio,
    study::flushed::rates_with_flush,
};
use diskwright_load::{
    job::{Bytes, Load},
    record::{Head, TargetRecord},
};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// The part of the cells ([`Cell::part`]) of first writes: counted writes into new files, and the
/// same on the device.
pub const FIRST: &str = "first writes";
/// Schema of [`RawAndFileResult`].
pub const SCHEMA: &str = "diskwright.study.raw-and-file/3";

/// The result of the study; a partial result has fewer cells.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct RawAndFileResult {
    /// When, where and by which program it was measured, and the conclusion.
    #[serde(flatten)]
    pub head: Head,
    /// Whether this is the quick study.
    pub quick: bool,
    /// Size of each disk, bytes.
    pub size_bytes: u64,
    /// What each of the first writes' windows wrote, bytes.
    pub first_bytes: u64,
    /// Requested rounds.
    pub rounds: usize,
    /// The block device and its two halves.
    pub test_bed: TestBedRecord,
    /// The compared targets, as inspected before measuring; the block device is the first.
    pub subjects: Vec<TargetRecord>,
    /// Frequency of the time-stamp counter, to show CPU time in MHz; 0 if the machine has none.
    pub tsc_hz: f64,
    /// CPUs that other programs kept busy while the study measured nothing.
    pub idle_cpus: f64,
    /// Each workload on each subject, in the order of the subjects; before them, in the part
    /// [`FIRST`], the first writes.
    pub cells: Vec<Cell>,
}

impl Cells for RawAndFileResult {
    fn cells(&self) -> Cow<'_, [Cell]> {
        Cow::from(&self.cells)
    }
}

/// A workload of the paper: a pattern with a request size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// Direction and order of the requests.
    pub pattern: Pattern,
    /// Bytes per request.
    pub block_bytes: u64,
}

impl Workload {
    pub(super) fn of(load: &Load) -> Self {
        Self { pattern: Pattern::of(load), block_bytes: load.block.largest_bytes() }
    }

    /// The name, for example "4K random read".
    pub fn name(&self) -> String {
        format!("{} {}", Bytes(self.block_bytes), self.pattern.name())
    }

    /// Parses [`Workload::name`]; `None` for other text.
    pub fn from_name(name: &str) -> Option<Self> {
        let (size, pattern) = name.split_once(' ')?;
        let pattern = Pattern::ALL.into_iter().find(|known| known.name() == pattern)?;
        Some(Self { pattern, block_bytes: size.parse::<Bytes>().ok()?.0 })
    }
}

/// The cells of a workload on all subjects.
#[derive(Debug, Clone)]
pub struct Measured<'a> {
    /// Pattern and request size.
    pub workload: Workload,
    /// Its cells in the order of the subjects.
    pub loads: Compared<'a>,
}

impl<'a> Measured<'a> {
    /// All measured workloads on disks that are full of data.
    pub fn all(cells: &'a [Cell]) -> Vec<Self> {
        Self::of_part(cells, "")
    }

    /// The first writes.
    pub fn first(cells: &'a [Cell]) -> Vec<Self> {
        Self::of_part(cells, FIRST)
    }

    fn of_part(cells: &'a [Cell], part: &str) -> Vec<Self> {
        let loads = Compared::of_part(cells, part).into_iter();
        loads.filter_map(|loads| Some(Self { workload: Workload::from_name(loads.load)?, loads })).collect()
    }

    /// A figure of a subject as a ratio to the block device's; `None` for the device itself.
    pub fn ratio(&self, subject: usize, figure: Figure) -> Option<Ratio> {
        let (base, cell) = (self.loads.cells.first()?, self.loads.cells.get(subject)?);
        if subject == 0 { None } else { cell.ratio(base, |round| figure.of(round)) }
    }

    /// Throughput of first writes as a ratio to the device's; the time includes the flush. `None`
    /// for the device itself.
    pub fn first_ratio(&self, subject: usize) -> Option<Ratio> {
        let (base, cell) = (self.loads.cells.first()?, self.loads.cells.get(subject)?);
        if subject == 0 {
            return None;
        }
        Ratio::of(&rates_with_flush(cell)?, &rates_with_flush(base)?)
    }
}
