//! What is wrong with a job, or between a job and its targets.

use crate::job::JobError;
use diskwright_store::Operation;
use std::{error::Error, io, path::PathBuf};

/// Result of a load operation.
pub type Result<T, E = LoadError> = std::result::Result<T, E>;

/// Why a job could not be run. Requests that fail are no such error: they are in
/// [`Run::end`](crate::Run::end).
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A target could not be closed.
    #[error(transparent)]
    Close(Box<dyn Error + Send + Sync>),
    /// A profile cannot be read.
    #[error("cannot read the profile {}: {source}", path.display())]
    File {
        /// Which one.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The target's queue itself failed.
    #[error("{target}: cannot {doing}: {source}; the run is void")]
    Queue {
        /// The target.
        target: String,
        /// As in "open a queue of depth 32".
        doing: String,
        /// What the queue said.
        source: io::Error,
    },
    /// A profile that is not there, or is none.
    #[error("profile {profile}: {what}")]
    Profile {
        /// As the user wrote it.
        profile: String,
        /// What is wrong, and what would be right.
        what: String,
    },
    /// A job that cannot be run anywhere.
    #[error("the job cannot be run: {0}")]
    Job(#[from] JobError),
    /// The working set of a load is larger than the target.
    #[error(
        "{target}: the working set of {load} ends at byte {end_bytes}, but the target has only {size_bytes}; use a larger target or a smaller working set"
    )]
    WorkingSet {
        /// The target.
        target: String,
        /// The load, with its phase.
        load: String,
        /// Where the working set would end.
        end_bytes: u64,
        /// Size of the target.
        size_bytes: u64,
    },
    /// A request of a load does not fit into its working set.
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
    /// A load would make requests between sectors.
    #[error(
        "{target}: the {field} of {load} is {bytes} bytes, no multiple of the target's sector of {sector_bytes}; use whole sectors"
    )]
    NotSectors {
        /// The target.
        target: String,
        /// The load, with its phase.
        load: String,
        /// Block, align, stride, start.
        field: &'static str,
        /// Its value.
        bytes: u64,
        /// The target's logical sector.
        sector_bytes: u32,
    },
    /// A load writes, and the target cannot be written.
    #[error(
        "{target}: it is open for reading only, but {load} writes to it; use a job that only reads, or a target that can be written"
    )]
    ReadOnlyTarget {
        /// The target.
        target: String,
        /// The load, with its phase.
        load: String,
    },
    /// Options that cannot be.
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
