//! What a comparison found.

use crate::cells::{Cell, Cells};
use diskwright_load::{
    figures::{Figures, Metric},
    record::Head,
    warning::Warning,
};
use diskwright_stats::inference::{Design, Shift};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Schema of [`ComparisonRecord`].
pub const COMPARISON_SCHEMA: &str = "diskwright.lab.compare/2";

/// A comparison: what was compared, and by how much each side differs from the first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ComparisonRecord {
    /// When and on which machine it was compared, and the conclusion. The machines that measured
    /// are in [`Side::circumstances`].
    #[serde(flatten)]
    pub head: Head,
    /// What was compared; the first is the base.
    pub sides: Vec<Side>,
    /// Whether round for round was compared.
    pub paired: bool,
    /// Over all groups together, where there are enough of them; corrected among themselves.
    pub overall: Vec<FigureChange>,
    /// Group by group; corrected among themselves.
    pub comparisons: Vec<FigureChange>,
    /// Conditions that hold, in words.
    pub failed: Vec<String>,
    /// Conditions that could not be judged, or not of everything, and why.
    #[serde(default)]
    pub unjudged: Vec<String>,
    /// Whether a condition is neither met nor ruled out, because there are too few rounds or the
    /// figure was not compared. Of a condition that was judged over all measurements together this
    /// is false.
    #[serde(default)]
    pub undecided: bool,
}

/// One of those that are compared.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Side {
    /// As shown to people.
    pub name: String,
    /// The files, or the target.
    pub sources: Vec<String>,
    /// Machine, cache mode and version with which it was measured.
    pub circumstances: Circumstances,
    /// What was measured.
    pub groups: Vec<Group>,
}

/// What two sides should have alike.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Circumstances {
    /// Processors, memory, kernel.
    pub machine: String,
    /// "direct", "cached"; of several targets, all of them.
    pub cache: String,
    /// The program's version, and whether it was optimised.
    pub version: String,
    /// Reasons for doubt that its own result has.
    pub warnings: Vec<Warning>,
    /// Whether it was broken off.
    pub partial: bool,
}

/// The rounds of one cell of a side.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Group {
    /// The cell. It is matched with the cell of the other side that has the same part; the load
    /// should be alike, and the subject is the side.
    #[serde(flatten)]
    pub cell: Cell,
    /// Stretches of a single run, where there is only one round: IOPS, MB/s and latencies, no CPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stretches: Vec<Figures>,
}

impl Group {
    /// A group with this name and these rounds of a workload. Its side gives it the subject.
    pub fn new(name: &str, workload: &str, rounds: Vec<Figures>) -> Self {
        let in_flight = rounds.first().map_or(0, |round| round.queue_depth);
        Self { cell: Cell::new(name, workload, "", in_flight).with_rounds(rounds), stretches: Vec::new() }
    }

    /// By what it is matched with the other side's.
    pub fn name(&self) -> &str {
        &self.cell.part
    }
}

impl Side {
    /// The same side under this name.
    pub fn named(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self.groups.iter_mut().for_each(|group| name.clone_into(&mut group.cell.subject));
        self
    }
}

/// One figure of one group of one side, against the base.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct FigureChange {
    /// Number of the side, from 1: 0 is the base.
    pub side: usize,
    /// Name of the group; empty for all together.
    pub group: String,
    /// The figure.
    pub metric: Metric,
    /// The base's median.
    pub base: f64,
    /// The side's median.
    pub ours: f64,
    /// By how much the side lies above the base, as a share: 0.05 is 5 % more.
    pub change: Shift,
    /// p-value of the rank test.
    pub p: f64,
    /// The p-value, corrected for the number of comparisons.
    pub p_corrected: f64,
    /// What may be concluded.
    pub said: Said,
    /// Rounds of the base and of the side, or pairs.
    pub rounds: (usize, usize),
}

/// What a comparison says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Said {
    /// Better than the base.
    Better,
    /// Worse than the base.
    Worse,
    /// No difference seen.
    NoDifference,
    /// So few rounds could not show any difference.
    TooFewRounds,
}

impl ComparisonRecord {
    /// How the rounds of two sides belong together.
    pub fn design(&self) -> Design {
        if self.paired { Design::Paired } else { Design::Unpaired }
    }

    /// Rounds of each side (groups, of all together) with which a comparison like this one can show
    /// a difference.
    pub fn fewest_rounds(&self, comparison: &FigureChange) -> usize {
        let together = comparison.group.is_empty() && !self.overall.is_empty();
        let design = if together { Design::Paired } else { self.design() };
        design.fewest(self.family(comparison))
    }

    /// Number of comparisons for which `comparison` was corrected.
    pub fn family(&self, comparison: &FigureChange) -> usize {
        if comparison.group.is_empty() && !self.overall.is_empty() {
            self.overall.len()
        } else {
            self.comparisons.len()
        }
    }
}

impl Cells for ComparisonRecord {
    fn cells(&self) -> Cow<'_, [Cell]> {
        self.sides.iter().flat_map(|side| &side.groups).map(|group| group.cell.clone()).collect()
    }
}
