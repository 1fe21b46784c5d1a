//! What the study found, as it is saved.

use super::{Figure, Pattern, TestBedRecord};
use crate::{
    cells::{Cell, Cells, Compared},
    ratio::Ratio,
};
use diskwright_load::{
    job::{Bytes, Load},
    record::{Head, TargetRecord},
};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Schema of [`RawAndFileResult`].
pub const SCHEMA: &str = "diskwright.study.raw-and-file/2";

/// The study, whole or as far as it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct RawAndFileResult {
    /// When, where and by what it was measured, and the conclusion.
    #[serde(flatten)]
    pub head: Head,
    /// Whether it was the short form.
    pub quick: bool,
    /// Size of each disk.
    pub size_bytes: u64,
    /// Rounds that were asked for.
    pub rounds: usize,
    /// The device and its halves.
    pub test_bed: TestBedRecord,
    /// What was compared, as it was found before measuring; the device is the first.
    pub subjects: Vec<TargetRecord>,
    /// Cycles of the time-stamp counter in a second, by which CPU time becomes MHz; 0 where there
    /// is none.
    pub tsc_hz: f64,
    /// Processors kept busy while the study did nothing.
    pub idle_cpus: f64,
    /// Each workload on each subject, in the order of the subjects.
    pub cells: Vec<Cell>,
}

impl Cells for RawAndFileResult {
    fn cells(&self) -> Cow<'_, [Cell]> {
        Cow::from(&self.cells)
    }
}

/// A workload of the paper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// Where requests go.
    pub pattern: Pattern,
    /// Bytes of a request.
    pub block_bytes: u64,
}

impl Workload {
    /// Of a load of the profile.
    pub(super) fn of(load: &Load) -> Self {
        Self { pattern: Pattern::of(load), block_bytes: load.block.largest_bytes() }
    }

    /// "4K random read".
    pub fn name(&self) -> String {
        format!("{} {}", Bytes(self.block_bytes), self.pattern.name())
    }

    /// The workload with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        let (size, pattern) = name.split_once(' ')?;
        let pattern = Pattern::ALL.into_iter().find(|known| known.name() == pattern)?;
        Some(Self { pattern, block_bytes: size.parse::<Bytes>().ok()?.0 })
    }
}

/// A workload on all subjects.
#[derive(Debug, Clone)]
pub struct Measured<'a> {
    /// The workload.
    pub workload: Workload,
    /// Its cells in the order of the subjects.
    pub loads: Compared<'a>,
}

impl<'a> Measured<'a> {
    /// All workloads that were measured.
    pub fn all(cells: &'a [Cell]) -> Vec<Self> {
        let loads = Compared::of_part(cells, "").into_iter();
        loads.filter_map(|loads| Some(Self { workload: Workload::from_name(loads.load)?, loads })).collect()
    }

    /// A figure of a subject as a ratio to the device's; `None` for the device.
    pub fn ratio(&self, subject: usize, figure: Figure) -> Option<Ratio> {
        let (base, cell) = (self.loads.cells.first()?, self.loads.cells.get(subject)?);
        if subject == 0 { None } else { cell.ratio(base, |round| figure.of(round)) }
    }
}
