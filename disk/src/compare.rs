//! (being written)
use crate::{Progress, Result};
use diskwright_store::{BlockDevice, EngineKind};

/// What a comparison found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompareOutcome {
    /// The same bytes (a longer disk may end in zeros).
    Same,
    /// Different, first here.
    Different {
        /// First byte that differs.
        offset_bytes: u64,
    },
}

/// Compares two disks.
pub fn compare(a: &dyn BlockDevice, b: &dyn BlockDevice, engine: EngineKind, progress: &mut Progress<'_>) -> Result<CompareOutcome> {
    let _ = (a, b, engine, progress);
    Err(crate::DiskError::Stopped)
}
