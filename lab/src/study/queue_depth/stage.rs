//! The steps of the procedure.

use serde::{Deserialize, Serialize};

/// A step of the procedure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Pre-test 2: number of files.
    Files,
    /// Test 1: outstanding per thread.
    Depths,
    /// Test 2: threads x outstanding for a total.
    Combinations,
    /// Sequential reads.
    Reads,
    /// Sequential writes.
    Writes,
}

impl Stage {
    /// In the paper's order.
    pub const ALL: [Self; 5] = [Self::Files, Self::Depths, Self::Combinations, Self::Reads, Self::Writes];

    /// One word, for summaries and CSV.
    pub fn name(self) -> &'static str {
        match self {
            Self::Files => "files",
            Self::Depths => "depths",
            Self::Combinations => "combinations",
            Self::Reads => "reads",
            Self::Writes => "writes",
        }
    }

    /// As shown to people.
    pub fn title(self) -> &'static str {
        match self {
            Self::Files => "Pre-test 2: number of files",
            Self::Depths => "Random 8K, test 1: outstanding per thread",
            Self::Combinations => "Random 8K, test 2: threads x outstanding for one total",
            Self::Reads => "512K sequential reads, one thread",
            Self::Writes => "512K sequential writes, one thread",
        }
    }
}
