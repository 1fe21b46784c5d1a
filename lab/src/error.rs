//! What can go wrong in the lab, told so that a user can act on it.

use crate::document::ReadError;
use diskwright_disk::DiskError;
use diskwright_load::{LoadError, error::verb};
use diskwright_store::{OpenError, Operation};
use std::{io, path::PathBuf};

/// Result of a lab operation.
pub type Result<T, E = LabError> = std::result::Result<T, E>;

/// Why a measurement could not be made.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A job cannot be run, or its targets do not suit it.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A virtual disk could not be created, opened or closed.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A raw file or device could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A file or folder.
    #[error("cannot {doing} {}: {source}{}", path.display(), hint_for(source))]
    File {
        /// As in "create the scratch folder".
        doing: &'static str,
        /// Which one.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Requests failed while they were measured. What was measured until then is not reported, for
    /// an average over a failing device means nothing.
    #[error("{first} ({errors} failed in all); the measurement is void: look at the device below")]
    Void {
        /// The first failure, with target, offset and length.
        first: String,
        /// Number of requests that failed.
        errors: u64,
    },
    /// One request failed while a target was prepared.
    #[error("{target}: the {} of {len_bytes} bytes at offset {offset_bytes} failed after {completed} good requests: {source}; the run is void", verb(*operation))]
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
        /// What the device said.
        source: io::Error,
    },
    /// A target returned other bytes than were written to it.
    #[error(
        "{target}: the byte at offset {offset_bytes} is not the one that was written there; do not trust this disk, and please report this with the output of `diskwright check`"
    )]
    WrongData {
        /// The target.
        target: String,
        /// First byte that differs.
        offset_bytes: u64,
    },
    /// A target is not allocated as its preparation should have left it.
    #[error(
        "{target}: {found_bytes} of its {size_bytes} bytes are data, but it was filled completely; a measurement would tell of metadata, not of storage"
    )]
    NotPopulated {
        /// The target.
        target: String,
        /// Bytes that its extents call data.
        found_bytes: u64,
        /// Its size.
        size_bytes: u64,
    },
    /// The scratch folder's file system is too small.
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
    /// A target that is to be written is in use: mounted, or open in another program.
    #[error(
        "{target} would be written, but it is in use: {users}; end that use first (`PrepareOptions::destroy_data` does not change this)"
    )]
    InUse {
        /// The target.
        target: String,
        /// The users, as in "/dev/vdb1 is mounted at /home".
        users: String,
    },
    /// A target that is to be written holds data.
    #[error(
        "{target} would be overwritten, but it holds {what}; use `PrepareOptions::destroy_data` if that may be lost, or another target"
    )]
    HoldsData {
        /// The target.
        target: String,
        /// What was found, and where.
        what: String,
    },
    /// There is no room to fill a target.
    #[error("{target}: {needed_bytes} bytes of it have no space yet, but on {} only {free_bytes} are free; make room there, or use a smaller working set", dir.display())]
    NoSpaceToFill {
        /// The target.
        target: String,
        /// Bytes of it that have no space yet.
        needed_bytes: u64,
        /// The folder in which it lies.
        dir: PathBuf,
        /// Bytes that are free there.
        free_bytes: u64,
    },
    /// A result that was saved cannot be used.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Options that cannot be.
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
        /// How it ended.
        status: String,
        /// The last of what it said.
        output: String,
    },
    /// The user, or a signal, stopped it.
    #[error("stopped before it was done; the scratch files are removed")]
    Stopped,
}

impl LabError {
    /// For `map_err` around a file operation.
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
