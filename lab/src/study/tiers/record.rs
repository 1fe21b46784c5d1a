//! The saved result of the study.

use crate::cells::{Cell, Cells};
use diskwright_load::record::Head;
use diskwright_stats::summary::median;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Schema of [`TiersResult`].
pub const SCHEMA: &str = "diskwright.study.tiers/1";

/// Subject of the cells before the optimisation.
pub const BEFORE: &str = "before";
/// Subject of the cells after it.
pub const AFTER: &str = "after";
/// Name of the figure in [`Cell::more`]: share of the requests that fast members served, 0 to 1.
pub const FAST_SHARE: &str = "fast_share";

/// The result of the study; a partial result has fewer rounds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct TiersResult {
    /// When, where and by which program it was measured, and the conclusion.
    #[serde(flatten)]
    pub head: Head,
    /// Whether this is the quick study.
    pub quick: bool,
    /// Size of the disk, bytes.
    pub size_bytes: u64,
    /// What the fast members can hold of it, bytes.
    pub fast_bytes: u64,
    /// Copies of each slab, and members of each tier.
    pub copies: u8,
    /// Exponent of the zipf distribution.
    pub theta: f64,
    /// Length of a cell, nanoseconds.
    pub cell_ns: u64,
    /// Requested rounds.
    pub rounds: usize,
    /// The fast members.
    pub fast: TierRecord,
    /// The slow members.
    pub slow: TierRecord,
    /// Two cells: before and after the optimisation.
    pub cells: Vec<Cell>,
    /// The optimisation of each round.
    pub optimizations: Vec<OptimizationRecord>,
}

impl Cells for TiersResult {
    fn cells(&self) -> Cow<'_, [Cell]> {
        Cow::from(&self.cells)
    }
}

impl TiersResult {
    /// The cell of a subject.
    pub fn cell(&self, subject: &str) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.subject == subject)
    }

    /// The median of a figure of the optimisations; `None` without one.
    pub fn median_of(&self, figure: impl Fn(&OptimizationRecord) -> f64) -> Option<f64> {
        median(&self.optimizations.iter().map(figure).collect::<Vec<_>>())
    }
}

/// The members of a tier.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct TierRecord {
    /// Most requests per second of each member; `None` for its own speed.
    pub iops: Option<u64>,
    /// What a request of a member takes longer than by itself, nanoseconds.
    pub latency_ns: u64,
    /// Folder of the members, if the user has named one.
    pub dir: Option<String>,
}

/// An optimisation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct OptimizationRecord {
    /// Time that it took, nanoseconds.
    pub took_ns: u64,
    /// Bytes of slabs that moved to the fast members, counted once.
    pub to_fast_bytes: u64,
    /// Bytes of slabs that moved to the slow members.
    pub to_slow_bytes: u64,
    /// Share of the requests that the fast members would serve, by what was counted before it.
    pub predicted: f64,
    /// Share that they served after it.
    pub measured: f64,
    /// Share that the best placement would have served, by what was counted after it.
    pub best: f64,
    /// Bytes of the slabs that get nine of ten requests.
    pub working_set_bytes: u64,
    /// What fast members must hold to serve a share of the requests: share, bytes of copies.
    pub needed: Vec<(f64, u64)>,
    /// What fast members of other sizes would serve: bytes of copies, share.
    pub curve: Vec<(u64, f64)>,
}
