//! Progress of long operations, and how they are stopped.
//!
//! The lab draws nothing itself. It reports to a [`Progress`] between windows. During a long
//! window, the thread that controls the window also calls the [`Watch`] of that progress. The
//! measuring threads never do, so a display does not slow the measurement.

use crate::{LabError, Result};
use diskwright_load::run::{Unwatched, Watch};

/// A progress report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step<'a> {
    /// The part of the run: "prepare", "verify", "measure".
    pub phase: &'a str,
    /// Finished units of the phase.
    pub done: u64,
    /// All units of the phase; 0 if unknown.
    pub total: u64,
    /// The current target or workload.
    pub message: &'a str,
}

/// Receives progress reports, and can stop the operation.
pub trait Progress {
    /// Returns `false` to stop. The operation then cleans up and ends with [`LabError::Stopped`].
    fn step(&mut self, step: Step<'_>) -> bool;

    /// Receives the figures of a window while it is measured, and can end it.
    fn watch(&self) -> &dyn Watch {
        &Unwatched
    }
}

/// Ignores all reports and never stops.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn step(&mut self, _step: Step<'_>) -> bool {
        true
    }
}

impl<F: FnMut(Step<'_>) -> bool> Progress for F {
    fn step(&mut self, step: Step<'_>) -> bool {
        self(step)
    }
}

/// Reports a step. Converts a stop into an error for `?`.
///
/// # Errors
/// [`LabError::Stopped`].
pub fn report(progress: &mut dyn Progress, phase: &str, done: u64, total: u64, message: &str) -> Result<()> {
    if progress.step(Step { phase, done, total, message }) { Ok(()) } else { Err(LabError::Stopped) }
}
