//! What the program that starts an agent provides: targets, and the decision what may be done to
//! them.

use crate::{
    error::Result,
    message::{Allowed, Task},
};
use diskwright_load::{Job, OpenTarget, warning::Warning};

/// Targets that are ready to be measured.
#[derive(Debug, Default)]
pub struct Prepared {
    /// The open targets, in the order of the task.
    pub targets: Vec<OpenTarget>,
    /// Reasons to doubt the figures of these targets.
    pub warnings: Vec<Warning>,
}

/// Receives what a preparation does (what, units done, all units), and says whether it goes on.
pub type Preparing<'a> = dyn FnMut(&str, u64, u64) -> bool + 'a;

/// Opens targets, and decides what may be done to them. The only place where it is decided.
pub trait Keeper: Send {
    /// The targets that a controller may choose.
    fn allowed(&self) -> Vec<Allowed>;

    /// Opens, checks and fills targets for a task.
    ///
    /// # Errors
    /// A sentence for the controller.
    fn prepare(&mut self, task: &Task, progress: &mut Preparing<'_>) -> Result<Prepared, String>;

    /// Whether a job may run on the targets that are prepared: it may write nothing that the task
    /// did not write.
    ///
    /// # Errors
    /// A sentence for the controller.
    fn allows(&self, job: &Job) -> Result<(), String>;

    /// Flushes and closes the targets.
    ///
    /// # Errors
    /// A sentence for the controller.
    fn close(&mut self, targets: Vec<OpenTarget>) -> Result<(), String>;
}
