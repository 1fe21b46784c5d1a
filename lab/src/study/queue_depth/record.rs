//! The result of the study `queue-depth`, as it is saved, resumed and reported.

use super::{Finding, Settings, Stage};
use crate::{
    cells::{Cell, Cells},
    sweep::SweepRecord,
};
use diskwright_load::record::{Head, Run, TargetRecord};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Schema of [`QueueDepthResult`].
pub const SCHEMA: &str = "diskwright.study.queue-depth/3";

/// A stage of the procedure with its sweep.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct StageRecord {
    /// Stage of the procedure.
    pub stage: Stage,
    /// The sweep with all its cells.
    pub sweep: SweepRecord,
}

/// The result of the study; a partial result has fewer stages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct QueueDepthResult {
    /// When, where and by which program it was measured, and the conclusion. It has no place if the
    /// targets were given.
    #[serde(flatten)]
    pub head: Head,
    /// The options in force.
    pub settings: Settings,
    /// The targets, as they were when the measurement began.
    pub targets: Vec<TargetRecord>,
    /// Pre-test 1.
    pub pre_test: Option<Run>,
    /// The stages that have begun, in order.
    pub stages: Vec<StageRecord>,
    /// The queue depth that each kind of load needs, computed from the stages.
    pub findings: Vec<Finding>,
}

impl Cells for QueueDepthResult {
    fn cells(&self) -> Cow<'_, [Cell]> {
        let runs = self.pre_test.iter().flat_map(|run| run.cells().into_owned());
        let pre_test = runs.map(|cell| Cell { part: "pre-test".into(), ..cell });
        let stages = self.stages.iter().flat_map(|record| {
            let cells = record.sweep.cells().into_owned().into_iter();
            cells.map(|cell| Cell { part: record.stage.name().into(), ..cell })
        });
        pre_test.chain(stages).collect()
    }
}
