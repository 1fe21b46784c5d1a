//! The paper's patterns of I/O.

use diskwright_load::job::Load;
use serde::{Deserialize, Serialize};

/// One of the paper's five.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Half reads, half writes, anywhere.
    RandomMix,
    /// Reads anywhere.
    RandomRead,
    /// Writes anywhere.
    RandomWrite,
    /// Reads one after the other.
    SequentialRead,
    /// Writes one after the other.
    SequentialWrite,
}

impl Pattern {
    /// In the paper's order.
    pub const ALL: [Self; 5] =
        [Self::RandomMix, Self::RandomRead, Self::RandomWrite, Self::SequentialRead, Self::SequentialWrite];

    /// As shown to people.
    pub fn name(self) -> &'static str {
        match self {
            Self::RandomMix => "random mix",
            Self::RandomRead => "random read",
            Self::RandomWrite => "random write",
            Self::SequentialRead => "sequential read",
            Self::SequentialWrite => "sequential write",
        }
    }

    /// Whether it goes anywhere.
    pub fn is_random(self) -> bool {
        !matches!(self, Self::SequentialRead | Self::SequentialWrite)
    }

    /// The pattern of a load of the profile.
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
