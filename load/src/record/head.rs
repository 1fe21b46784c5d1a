//! What every result begins with: which kind it is, when, where and by what it was measured, what
//! casts doubt on it, and how it ended.

use super::End;
use crate::{
    clock,
    machine::{Machine, Place, Versions},
    warning::Warning,
};
use serde::{Deserialize, Serialize};

/// The first fields of every result. In JSON they stand beside the fields of the result, the schema
/// first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Head {
    /// Kind and version of the result, as in `diskwright.lab.sweep/3`.
    pub schema: String,
    /// The conclusion, in a sentence or two. Empty in a run, which states figures only.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub verdict: String,
    /// When the measuring began, as in `20261120T221749Z`.
    pub started_utc: String,
    /// How long it took with everything that it prepared, over all its sittings, nanoseconds.
    pub took_ns: u64,
    /// The machine that measured.
    pub machine: Machine,
    /// The file system with the disks that the measurement made; `None` where it made none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<Place>,
    /// The programs that measured.
    pub versions: Versions,
    /// Reasons for doubt, the gravest first.
    pub warnings: Vec<Warning>,
    /// How the run ended.
    pub end: End,
}

impl Head {
    /// The head of a result that begins now, on this machine. It counts as stopped until its end is
    /// known.
    pub fn begin(schema: &str) -> Self {
        Self {
            schema: schema.to_owned(),
            verdict: String::new(),
            started_utc: clock::compact_utc_now(),
            took_ns: 0,
            machine: Machine::detect(),
            place: None,
            versions: Versions::detect(),
            warnings: Vec::new(),
            end: End::Stopped,
        }
    }
}
