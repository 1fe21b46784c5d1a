//! The stages of the procedure.

use serde::{Deserialize, Serialize};

/// A stage of the procedure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Pre-test 2: number of files.
    Files,
    /// Number of agents, instead of `Files` if agents measure.
    Agents,
    /// Test 1: outstanding requests per thread.
    Depths,
    /// Test 2: combinations of threads and outstanding requests with one total.
    Combinations,
    /// Sequential reads.
    Reads,
    /// Sequential writes.
    Writes,
}

impl Stage {
    /// The stages on targets of this machine, in the paper's order.
    pub const LOCAL: [Self; 5] = [Self::Files, Self::Depths, Self::Combinations, Self::Reads, Self::Writes];
    /// The stages on agents.
    pub const FLEET: [Self; 5] = [Self::Agents, Self::Depths, Self::Combinations, Self::Reads, Self::Writes];

    /// The stage in one word, for summaries and CSV.
    pub fn name(self) -> &'static str {
        match self {
            Self::Files => "files",
            Self::Agents => "agents",
            Self::Depths => "depths",
            Self::Combinations => "combinations",
            Self::Reads => "reads",
            Self::Writes => "writes",
        }
    }

    /// The heading of the stage.
    pub fn title(self) -> &'static str {
        match self {
            Self::Files => "Pre-test 2: number of files",
            Self::Agents => "Pre-test 2: number of agents",
            Self::Depths => "Random 8K, test 1: outstanding per thread",
            Self::Combinations => "Random 8K, test 2: threads x outstanding for one total",
            Self::Reads => "512K sequential reads, one thread",
            Self::Writes => "512K sequential writes, one thread",
        }
    }
}
