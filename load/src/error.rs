//! Errors of jobs, profiles and runs.

use crate::job::JobError;
use diskwright_store::Operation;
use std::{error::Error, io, path::PathBuf};

/// Result of an operation of this crate.
pub type Result<T, E = LoadError> = std::result::Result<T, E>;

/// A job that could not be run. Failed requests are not an error of this type: they are recorded in
/// [`Head::end`](crate::record::Head::end).
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A target could not be closed.
    #[error(transparent)]
    Close(Box<dyn Error + Send + Sync>),
    /// The file of a profile cannot be read.
    #[error("cannot read the profile {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// A queue of the target failed.
    #[error("{target}: cannot {doing}: {source}; the run is void")]
    Queue {
        /// Name of the target.
        target: String,
        /// The operation, as in "open a queue of depth 32".
        doing: String,
        /// The error of the queue.
        source: io::Error,
    },
    /// A profile does not exist, or is not a valid job.
    #[error("profile {profile}: {what}")]
    Profile {
        /// The profile as the user wrote it.
        profile: String,
        /// What is wrong and what to do.
        what: String,
    },
    /// The job is not valid.
    #[error("the job cannot be run: {0}")]
    Job(#[from] JobError),
    /// The working set of a load is larger than the target.
    #[error(
        "{target}: the working set of {load} ends at byte {end_bytes}, but the target has only {size_bytes}; use a larger target or a smaller working set"
    )]
    WorkingSet {
        /// Name of the target.
        target: String,
        /// The load, with its phase.
        load: String,
        /// End of the working set.
        end_bytes: u64,
        /// Size of the target.
        size_bytes: u64,
    },
    /// A request of a load is larger than its working set.
    #[error(
        "{target}: the working set of {load} is {set_bytes} bytes, too small for one request of {block_bytes}; use a larger working set or smaller blocks"
    )]
    BlockTooLarge {
        /// The target.
        target: String,
        /// The load, with its phase.
        load: String,
        /// Length of the working set.
        set_bytes: u64,
        /// The largest request.
        block_bytes: u64,
    },
    /// A load would make requests that are not aligned to sectors.
    #[error(
        "{target}: the {field} of {load} is {bytes} bytes, which is not a multiple of the target's sector of {sector_bytes} bytes; use whole sectors"
    )]
    NotSectors {
        /// The target.
        target: String,
        /// The load, with its phase.
        load: String,
        /// The field: `block`, `align`, `stride`, `start`.
        field: &'static str,
        /// Value of the field.
        bytes: u64,
        /// Logical sector size of the target.
        sector_bytes: u32,
    },
    /// A load writes to a read-only target.
    #[error("{target} is read-only, but {load} writes; use a job that only reads, or a writable target")]
    ReadOnlyTarget {
        /// The target.
        target: String,
        /// The load, with its phase.
        load: String,
    },
    /// Options that contradict each other, or do not fit the targets.
    #[error("{what}; {hint}")]
    BadOptions {
        /// What is wrong.
        what: String,
        /// What to do.
        hint: String,
    },
}

/// The name of an operation in a message, as in "the write of 4096 bytes failed".
pub fn verb(operation: Operation) -> &'static str {
    match operation {
        Operation::Read => "read",
        Operation::Write => "write",
        Operation::WriteZeroes => "zeroing",
        Operation::Discard => "discard",
        Operation::Flush => "flush",
    }
}
