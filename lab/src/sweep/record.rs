//! What a sweep found, and what it was asked: the one form that is saved, continued, shown and
//! plotted.
//!
//! The file is written whole after each measured window. A sweep that was broken off is a record in
//! which some cells have fewer rounds than [`SweepOptions::rounds`]; going on means measuring
//! those. Everything under `knees` is computed from the cells, and computed again when the sweep
//! goes on.

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

/// Schema of [`SweepRecord`]. A reader rejects a later number.
pub const SWEEP_SCHEMA: &str = "diskwright.lab.sweep/2";

/// A sweep, whole or as far as it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct SweepRecord {
    /// When and by what it was measured, and the conclusion. The verdict of an unfinished sweep
    /// says how far it is; the time is that of the measured windows.
    #[serde(flatten)]
    pub head: Head,
    /// The targets.
    pub targets: Vec<TargetRecord>,
    /// What was asked. A sweep goes on only with the same.
    pub options: SweepOptions,
    /// Every combination of the axes, the last axis running fastest.
    pub cells: Vec<SweepCell>,
    /// The marked points: one row for each value of the axis that is not a load; none where no axis
    /// is one.
    pub knees: Vec<KneeRow>,
    /// The best combination, where no axis is a load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<BestCells>,
    /// Free labels.
    #[serde(default)]
    pub labels: Vec<(String, String)>,
}

/// What a sweep is to do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct SweepOptions {
    /// The workload from which every cell departs.
    pub job: Job,
    /// The targets, as given by the user.
    pub targets: Vec<String>,
    /// What varies: one or two.
    pub axes: Vec<Axis>,
    /// How often each cell is measured.
    pub rounds: u32,
    /// Requests in flight over all threads and targets that every cell must have; combinations that
    /// cannot are left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_depth: Option<u32>,
    /// The limit for the 99th percentile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_p99: Option<Span>,
    /// What lies below a mirrored space.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub array: Option<ArrayOptions>,
}

/// One combination.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct SweepCell {
    /// Its place, a value for each axis, in the order of the axes.
    pub point: Vec<Coordinate>,
    /// Threads for each target.
    pub threads: u32,
    /// Requests in flight for each thread on its target.
    pub queue_depth: u32,
    /// Targets that take part.
    pub files: u32,
    /// What was measured. The load is the point in words, the subject the targets that take part.
    #[serde(flatten)]
    pub measured: Cell,
    /// Latencies of all rounds together, reads and writes.
    pub latency: LatencyRecord,
}

impl Cells for SweepRecord {
    fn cells(&self) -> Cow<'_, [Cell]> {
        self.cells.iter().map(|cell| cell.measured.clone()).collect()
    }
}

impl SweepCell {
    /// The rounds as the search for a knee takes them.
    pub fn samples(&self) -> Vec<Sample> {
        let sample = |round: &Figures| Sample { iops: round.iops, mean_ns: round.mean_ns, p99_ns: round.p99_ns };
        self.measured.rounds.iter().map(sample).collect()
    }

    /// The Storage Spaces paper's figures for the array that [`SweepOptions::array`] describes;
    /// `None` without one, and before the first round.
    pub fn array(&self, options: &SweepOptions) -> Option<ArrayFigures> {
        let (array, medians) = (options.array?, self.measured.medians()?);
        let read_share = self.measured.median(Figures::read_share)?;
        Some(array.figures(read_share, self.measured.in_flight, medians.iops, medians.mb_per_s))
    }
}

/// The marked points of one line through the sweep.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct KneeRow {
    /// What is the same along the line; empty in a sweep over one axis.
    pub fixed: Vec<Coordinate>,
    /// Its cells, by their number in [`SweepRecord::cells`], in ascending load. [`Knee`]'s indices
    /// count along this list.
    pub cells: Vec<usize>,
    /// The points.
    pub knee: Knee,
}

/// The best of combinations that are no line of loads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct BestCells {
    /// The figure by which the cells were compared.
    pub metric: Metric,
    /// The one with the highest median.
    pub cell: usize,
    /// Those that chance cannot tell from it; none when everything was measured only once.
    pub rivals: Option<Vec<usize>>,
}
