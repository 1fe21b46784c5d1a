//! How a run ended.

use serde::{Deserialize, Serialize};

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum End {
    /// All phases ran to their end.
    Complete,
    /// The user stopped the run; the record has what was measured until then.
    Stopped,
    /// Requests failed, or the measurement could not go on; the record has what was measured until
    /// then.
    Failed {
        /// The first error; of a request with target, offset and length.
        first: String,
        /// Number of failed requests. 0: something else has failed.
        errors: u64,
    },
}

impl End {
    /// Adds `errors` failed requests. `first` is recorded unless an earlier error is.
    #[must_use]
    pub fn failing(self, first: String, errors: u64) -> Self {
        match self {
            Self::Failed { first, errors: before } => Self::Failed { first, errors: before.saturating_add(errors) },
            _ => Self::Failed { first, errors },
        }
    }
}
