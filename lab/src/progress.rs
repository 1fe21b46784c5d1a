//! How a long run reports its progress, and how it is stopped.
//!
//! The lab draws nothing. It reports to a [`Progress`] between windows. A window that lasts long
//! enough is shown to the [`Watch`] of that progress, by the thread that conducts the window and
//! never by one that measures, so the display does not slow a measurement down.

use crate::{LabError, Result};
use diskwright_load::run::{Unwatched, Watch};

/// How far a run has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step<'a> {
    /// The part of the run: "prepare", "verify", "measure".
    pub phase: &'a str,
    /// Units of the phase done.
    pub done: u64,
    /// Units in all; 0 where that is not known.
    pub total: u64,
    /// What is going on now: a target, a workload.
    pub message: &'a str,
}

/// Is told how far a run has come, and may stop it.
pub trait Progress {
    /// Returns `false` to stop the run; it then cleans up and ends with [`LabError::Stopped`].
    fn step(&mut self, step: Step<'_>) -> bool;

    /// Who looks at the cells while they are measured, and may end one.
    fn watch(&self) -> &dyn Watch {
        &Unwatched
    }
}

/// Says nothing and never stops.
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

/// Reports a step, and turns a refusal into an error for `?`.
///
/// # Errors
/// [`LabError::Stopped`].
pub fn report(progress: &mut dyn Progress, phase: &str, done: u64, total: u64, message: &str) -> Result<()> {
    if progress.step(Step { phase, done, total, message }) { Ok(()) } else { Err(LabError::Stopped) }
}
