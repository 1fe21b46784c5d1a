//! The result of a sweep with its options, as it is saved, resumed and reported.
//!
//! The whole file is written after each window. In an unfinished sweep some cells have fewer rounds
//! than [`SweepOptions::rounds`]; resuming measures those. Knees and the best combination are
//! computed from the cells, and again when the sweep is resumed.

use super::{
    array::{ArrayFigures, ArrayOptions},
    axis::{Axis, Coordinate},
};
use crate::cells::{Cell, Cells};
use diskwright_load::{
    figures::{Figures, Metric},
    job::{Job, Span},
    record::{Head, LatencyRecord, TargetRecord},
};
use diskwright_stats::knee::{Knee, Sample};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Schema of [`SweepRecord`]. A reader rejects higher versions.
pub const SWEEP_SCHEMA: &str = "diskwright.lab.sweep/3";

/// The result of a sweep; in a partial result cells lack rounds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct SweepRecord {
    /// When and by which program it was measured, and the conclusion. The verdict of an unfinished
    /// sweep gives its progress. The time is the sum of the measured windows.
    #[serde(flatten)]
    pub head: Head,
    /// The targets, as they were when the sweep began.
    pub targets: Vec<TargetRecord>,
    /// The options. A sweep resumes only with the same options, but for rounds, limit and array.
    pub options: SweepOptions,
    /// Every combination of the axes. The last axis varies fastest.
    pub cells: Vec<SweepCell>,
    /// The knees: one row for each value of the axis that is not a load. Empty if no axis is a
    /// load.
    pub knees: Vec<KneeRow>,
    /// The best combination, if no axis is a load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<BestCells>,
    /// Labels that the user gave.
    #[serde(default)]
    pub labels: Vec<(String, String)>,
}

/// Options of a sweep.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct SweepOptions {
    /// The workload that the cells vary.
    pub job: Job,
    /// The targets' names, as given.
    pub targets: Vec<String>,
    /// The one or two axes.
    pub axes: Vec<Axis>,
    /// Rounds of each cell.
    pub rounds: u32,
    /// Requests in flight, over all threads and targets, that every cell must have. Combinations
    /// that cannot have it are left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_depth: Option<u32>,
    /// The largest acceptable 99th percentile latency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_p99: Option<Span>,
    /// Copies and devices below a mirrored space, for figures per device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub array: Option<ArrayOptions>,
}

/// One combination of the axes' values.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct SweepCell {
    /// Its coordinates in the order of the axes.
    pub point: Vec<Coordinate>,
    /// Threads per target.
    pub threads: u32,
    /// Requests in flight per thread.
    pub queue_depth: u32,
    /// Targets used.
    pub files: u32,
    /// The measured cell. Its load is the coordinates as text, its subject the names of the
    /// targets.
    #[serde(flatten)]
    pub measured: Cell,
    /// Latencies of all rounds, reads and writes together.
    pub latency: LatencyRecord,
}

/// Name of the figure in [`Cell::more`]: requests to the members of a space per request of the
/// load.
pub const AMPLIFICATION: &str = "amplification";

impl Cells for SweepRecord {
    fn cells(&self) -> Cow<'_, [Cell]> {
        self.cells.iter().map(|cell| cell.measured.clone()).collect()
    }
}

impl SweepCell {
    /// The rounds as samples for the knee.
    pub fn samples(&self) -> Vec<Sample> {
        let sample = |round: &Figures| Sample { iops: round.iops, mean_ns: round.mean_ns, p99_ns: round.p99_ns };
        self.measured.rounds.iter().map(sample).collect()
    }

    /// Figures per device for [`SweepOptions::array`]; `None` without an array or a round.
    pub fn array(&self, options: &SweepOptions) -> Option<ArrayFigures> {
        let (array, medians) = (options.array?, self.measured.medians()?);
        let read_share = self.measured.median(Figures::read_share)?;
        Some(array.figures(read_share, self.measured.in_flight, medians.iops, medians.mb_per_s))
    }
}

/// The knee along the load axis, with the other axis fixed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct KneeRow {
    /// Coordinates of the other axis; empty in a sweep over one axis.
    pub fixed: Vec<Coordinate>,
    /// Indices into [`SweepRecord::cells`], in ascending load. Indices in [`Knee`] refer to this
    /// list.
    pub cells: Vec<usize>,
    /// The marked loads.
    pub knee: Knee,
}

/// The best of combinations that have no load axis.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct BestCells {
    /// The figure that is compared.
    pub metric: Metric,
    /// Index of the cell with the highest median.
    pub cell: usize,
    /// Indices of cells that are not significantly different from it. `None` with one round.
    pub rivals: Option<Vec<usize>>,
}
