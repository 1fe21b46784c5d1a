//! Errors of the lab, as sentences that say what to do.

use crate::document::ReadError;
use diskwright_disk::DiskError;
use diskwright_fleet::FleetError;
use diskwright_load::{LoadError, error::verb};
use diskwright_store::{OpenError, Operation};
use std::{io, path::PathBuf};

/// Result of an operation of the lab.
pub type Result<T, E = LabError> = std::result::Result<T, E>;

/// Why a measurement failed.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A job cannot be run, or does not fit its targets.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A virtual disk could not be created, opened or closed.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A raw file or device could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// An operation on a file or folder failed.
    #[error("cannot {doing} {}: {source}{}", path.display(), hint_for(source))]
    File {
        /// The failed operation, for example "create the scratch folder".
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Requests failed while they were measured. The figures so far are not returned, because those
    /// of a failing device are meaningless.
    #[error("{first} ({errors} requests failed); the measurement is void: check the device")]
    Void {
        /// The first failure, with target, offset and length.
        first: String,
        /// Number of requests that failed.
        errors: u64,
    },
    /// A request failed while a target was prepared.
    #[error("{target}: the {} of {len_bytes} bytes at offset {offset_bytes} failed after {completed} successful requests: {source}; the run is void", verb(*operation))]
    Request {
        /// The target.
        target: String,
        /// The operation.
        operation: Operation,
        /// Offset of the request.
        offset_bytes: u64,
        /// Length of the request.
        len_bytes: u64,
        /// Requests that had succeeded before.
        completed: u64,
        /// Error of the device.
        source: io::Error,
    },
    /// A target did not return the bytes that were written to it.
    #[error(
        "{target}: the byte at offset {offset_bytes} differs from the one that was written; do not use this disk, and please report this with the output of `diskwright check`"
    )]
    WrongData {
        /// The target.
        target: String,
        /// First byte that differs.
        offset_bytes: u64,
    },
    /// A target is not fully allocated after it was filled.
    #[error(
        "{target}: only {found_bytes} of its {size_bytes} bytes are allocated, although it was filled; reads of the rest would measure metadata, not storage"
    )]
    NotPopulated {
        /// The target.
        target: String,
        /// Bytes that are allocated.
        found_bytes: u64,
        /// Size of the target in bytes.
        size_bytes: u64,
    },
    /// The file system of the scratch folder has too little free space.
    #[error("{}: {what} needs {needed_bytes} bytes, but only {free_bytes} are free; use another folder or smaller disks", dir.display())]
    NoSpace {
        /// The folder.
        dir: PathBuf,
        /// What needs the space.
        what: String,
        /// Bytes that are needed.
        needed_bytes: u64,
        /// Bytes that are free.
        free_bytes: u64,
    },
    /// A target that the job writes is in use: mounted, or used by another device.
    #[error(
        "{target} is in use and must not be written: {users}; end this use first (`PrepareOptions::destroy_data` does not override this)"
    )]
    InUse {
        /// The target.
        target: String,
        /// The users, for example "/dev/vdb1 is mounted at /home".
        users: String,
    },
    /// A target that the job writes holds data.
    #[error(
        "{target} would be overwritten, but holds {what}; use `PrepareOptions::destroy_data` if these data may be lost, or use another target"
    )]
    HoldsData {
        /// The target.
        target: String,
        /// What was found, and where.
        what: String,
    },
    /// There is too little free space to fill a target.
    #[error("{target}: {needed_bytes} bytes are not allocated yet, but {} has only {free_bytes} bytes free; free some space, or use a smaller working set", dir.display())]
    NoSpaceToFill {
        /// The target.
        target: String,
        /// Bytes of it that are not allocated.
        needed_bytes: u64,
        /// The folder of the target.
        dir: PathBuf,
        /// Bytes that are free on the folder's file system.
        free_bytes: u64,
    },
    /// Agents of a fleet cannot measure.
    #[error(transparent)]
    Fleet(FleetError),
    /// A saved result cannot be used.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Invalid options.
    #[error("{what}; {hint}")]
    BadOptions {
        /// What is wrong.
        what: String,
        /// What to do.
        hint: String,
    },
    /// Another program, run as a peer or as a helper, failed.
    #[error("`{command}` failed ({status}): {output}; run it by hand to see more")]
    Program {
        /// The command line.
        command: String,
        /// Its exit status, or why it was ended.
        status: String,
        /// The end of its output.
        output: String,
    },
    /// The program in a guest failed; a sentence of its own.
    #[error("in the guest: {0}")]
    InGuest(String),
    /// The user or a signal stopped the operation.
    #[error("stopped before the end; the scratch files are removed")]
    Stopped,
}

impl From<FleetError> for LabError {
    fn from(error: FleetError) -> Self {
        match error {
            FleetError::Stopped => Self::Stopped,
            error => Self::Fleet(error),
        }
    }
}

impl LabError {
    /// Makes the conversion of an `io::Error` for `map_err`.
    pub fn file(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { doing, path, source }
    }
}

fn hint_for(source: &io::Error) -> &'static str {
    match source.kind() {
        _ if diskwright_store::is_full(source) => "; free some space or use another folder",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => "; use a folder you may write to",
        _ => "",
    }
}
