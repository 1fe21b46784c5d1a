//! How large and how long: the options of the study with defaults filled in.

use super::file_system::SIZE_STEP_BYTES;
use crate::{
    LabError, Result,
    study::{StudyOptions, budget::Budget},
};
use diskwright_store::EngineKind;
use std::time::{Duration, Instant};

/// Size of the paper's disk.
const FULL_BYTES: u64 = 20 << 30;
const QUICK_BYTES: u64 = 1 << 30;
/// Five rounds of 72 s take as long as the paper's minute of ramp-up and five minutes of measuring.
const FULL_CELL: Duration = Duration::from_secs(72);
const FULL_ROUNDS: usize = 5;
const QUICK_ROUNDS: usize = 3;
/// Time budget of a quick study: two minutes less the time for unmounting and removing files.
const QUICK_TOTAL: Duration = Duration::from_secs(104);
const QUICK_CELLS: (Duration, Duration) = (Duration::from_millis(150), Duration::from_millis(900));
/// Seed of contents, requests and the order of cells.
pub(super) const SEED: u64 = 0x766d_6673;
/// What is written to each new file, in bytes.
const FULL_FIRST_BYTES: u64 = 1 << 30;
const QUICK_FIRST_BYTES: u64 = 16 << 20;

/// The options with defaults filled in.
pub(super) struct Settings {
    pub quick: bool,
    pub size_bytes: u64,
    /// What is written to each new file, in bytes.
    pub first_bytes: u64,
    pub rounds: usize,
    pub budget: Budget,
    pub engine: EngineKind,
}

impl Settings {
    pub fn new(study: &StudyOptions, size_bytes: Option<u64>, start: Instant) -> Result<Self> {
        let rounds = study.rounds_or(if study.quick { QUICK_ROUNDS } else { FULL_ROUNDS })?;
        let size_bytes = size_bytes.unwrap_or(if study.quick { QUICK_BYTES } else { FULL_BYTES });
        let budget = match study.cell {
            Some(cell) if cell.is_zero() => {
                return Err(LabError::BadOptions {
                    what: "a cell of 0 s measures nothing".into(),
                    hint: "use at least a few milliseconds (`StudyOptions::cell`)".into(),
                });
            }
            Some(cell) => Budget::fixed(cell),
            None if study.quick => Budget::until(start, QUICK_TOTAL, QUICK_CELLS.0, QUICK_CELLS.1),
            None => Budget::fixed(FULL_CELL),
        };
        let size_bytes = size_bytes.max(1).next_multiple_of(SIZE_STEP_BYTES);
        let first_bytes = if study.quick { QUICK_FIRST_BYTES } else { FULL_FIRST_BYTES };
        let first_bytes = first_bytes.min(size_bytes / 4);
        Ok(Self { quick: study.quick, size_bytes, first_bytes, rounds, budget, engine: study.engine })
    }
}
