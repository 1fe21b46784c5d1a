//! The result of a comparison.

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
pub const COMPARISON_SCHEMA: &str = "diskwright.lab.compare/3";

/// A comparison: its sides, and how each differs from the first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ComparisonRecord {
    /// When and on which machine it was compared, and the conclusion. [`Side::circumstances`] names
    /// the machines that measured.
    #[serde(flatten)]
    pub head: Head,
    /// The compared sides; the first is the base.
    pub sides: Vec<Side>,
    /// Whether rounds were compared in pairs.
    pub paired: bool,
    /// Changes over all groups together, if there are enough groups; corrected among themselves.
    pub overall: Vec<FigureChange>,
    /// Changes of each group; corrected among themselves.
    pub comparisons: Vec<FigureChange>,
    /// The conditions that are true, each as a sentence.
    pub failed: Vec<String>,
    /// Conditions that could not be judged, or not for every measurement, and why.
    #[serde(default)]
    pub unjudged: Vec<String>,
    /// Whether some condition is undecided, because there are too few rounds or the figure was not
    /// compared. A condition that is judged over all measurements together is decided.
    #[serde(default)]
    pub undecided: bool,
}

/// A side of the comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Side {
    /// Name for reports.
    pub name: String,
    /// Files of the side's results, or the side's target.
    pub sources: Vec<String>,
    /// How it was measured: machine, cache mode and version.
    pub circumstances: Circumstances,
    /// Measured groups of rounds.
    pub groups: Vec<Group>,
}

/// How a side was measured; should be the same for both sides.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Circumstances {
    /// Processors and kernel.
    pub machine: String,
    /// Cache mode, for example "direct" or "cached"; those of all targets if they differ.
    pub cache: String,
    /// Version of the program, and whether it is a debug build.
    pub version: String,
    /// Warnings of its own result.
    pub warnings: Vec<Warning>,
    /// Whether it was stopped before its end.
    pub partial: bool,
}

/// A measurement of a side.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Group {
    /// The cell. It is compared with the other side's cell of the same part. The loads should be
    /// equal. The subject is the side.
    #[serde(flatten)]
    pub cell: Cell,
    /// Stretches of the run, if there is only one round: IOPS, MB/s and latencies, no CPU time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stretches: Vec<Figures>,
}

impl Group {
    /// A group with these rounds. Its side sets the subject.
    pub fn new(name: &str, workload: &str, rounds: Vec<Figures>) -> Self {
        let in_flight = rounds.first().map_or(0, |round| round.queue_depth);
        Self { cell: Cell::new(name, workload, "", in_flight).with_rounds(rounds), stretches: Vec::new() }
    }

    /// The name by which it is paired with the other side's group.
    pub fn name(&self) -> &str {
        &self.cell.part
    }
}

impl Side {
    /// The side with another name.
    pub fn named(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self.groups.iter_mut().for_each(|group| name.clone_into(&mut group.cell.subject));
        self
    }
}

/// The change of one figure of one group of one side, compared to the base.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct FigureChange {
    /// Index of the side, from 1; the base is 0.
    pub side: usize,
    /// Name of the group; empty for all groups together.
    pub group: String,
    /// The compared figure.
    pub metric: Metric,
    /// The base's median.
    pub base: f64,
    /// The side's median.
    pub ours: f64,
    /// The change relative to the base: 0.05 is 5 % more.
    pub change: Shift,
    /// p value of the rank test.
    pub p: f64,
    /// p value, corrected for the number of comparisons.
    pub p_corrected: f64,
    /// The conclusion.
    pub conclusion: Conclusion,
    /// Rounds of the base and of the side.
    pub rounds: (usize, usize),
}

/// The conclusion from one change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Conclusion {
    /// Significantly better than the base.
    Better,
    /// Significantly worse than the base.
    Worse,
    /// No significant difference.
    NoDifference,
    /// The rounds are too few to show any difference.
    TooFewRounds,
}

impl ComparisonRecord {
    /// Whether the rounds are paired.
    pub fn design(&self) -> Design {
        if self.paired { Design::Paired } else { Design::Unpaired }
    }

    /// Rounds of each side that are needed to show a difference; for a change over all groups, the
    /// number of groups.
    pub fn fewest_rounds(&self, comparison: &FigureChange) -> usize {
        let together = comparison.group.is_empty() && !self.overall.is_empty();
        let design = if together { Design::Paired } else { self.design() };
        design.fewest(self.family(comparison))
    }

    /// Number of comparisons that were corrected together with `comparison`.
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
