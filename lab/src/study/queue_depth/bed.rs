//! Where the study measures: on targets of this machine, or on the agents of a fleet.
//!
//! ```text
//!   files.rs   files or targets of this machine ─┐
//!   agents.rs  a fleet, one target on each agent ─┴─▶ Bed ─▶ the stages
//! ```
//!
//! The members of a bed are its files, its targets or its agents. A stage measures on the first of
//! them, and does not know which kind they are.

use crate::Result;
use diskwright_load::{Job, Run, machine::Place, record::TargetRecord, run::Watch, warning::Warning};

/// Prepared targets that measure jobs.
pub(super) trait Bed {
    /// A record for each member.
    fn records(&self) -> Vec<TargetRecord>;

    /// Bytes under test: in all files together, or on each agent.
    fn volume_bytes(&self) -> u64;

    /// Warnings of the preparation.
    fn warnings(&self) -> Vec<Warning>;

    /// The file system of files that the study made.
    fn place(&self) -> Option<Place> {
        None
    }

    /// Measures a job on the first `members` members at the same time.
    ///
    /// # Errors
    /// The job cannot be run. A run whose requests failed is not an error.
    fn measure(&self, job: &Job, members: usize, watch: &dyn Watch) -> Result<Run>;

    /// Closes all but the first `members` members: later stages do not need them.
    fn narrow(&mut self, _members: usize) {}

    /// The result is on the disk.
    fn kept(&self) {}

    /// The study is over.
    fn finish(&self) {}
}
