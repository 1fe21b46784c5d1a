//! The paper's I/O patterns.

use diskwright_load::job::Load;
use serde::{Deserialize, Serialize};

/// One of the paper's five I/O patterns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Random, half reads and half writes.
    RandomMix,
    /// Random reads.
    RandomRead,
    /// Random writes.
    RandomWrite,
    /// Sequential reads.
    SequentialRead,
    /// Sequential writes.
    SequentialWrite,
}

impl Pattern {
    /// All patterns in the paper's order.
    pub const ALL: [Self; 5] =
        [Self::RandomMix, Self::RandomRead, Self::RandomWrite, Self::SequentialRead, Self::SequentialWrite];

    /// Name in reports and in names of workloads.
    pub fn name(self) -> &'static str {
        match self {
            Self::RandomMix => "random mix",
            Self::RandomRead => "random read",
            Self::RandomWrite => "random write",
            Self::SequentialRead => "sequential read",
            Self::SequentialWrite => "sequential write",
        }
    }

    /// Whether offsets are random; false for sequential patterns.
    pub fn is_random(self) -> bool {
        !matches!(self, Self::SequentialRead | Self::SequentialWrite)
    }

    /// The pattern of a load of the profile `vmfs-and-rdm`.
    pub(super) fn of(load: &Load) -> Self {
        match (load.random_percent > 0.0, load.read_percent) {
            (true, 100.0) => Self::RandomRead,
            (true, 0.0) => Self::RandomWrite,
            (true, _) => Self::RandomMix,
            (false, 100.0) => Self::SequentialRead,
            (false, _) => Self::SequentialWrite,
        }
    }
}
