//! What can go wrong in the lab, told so that a user can act on it.

use crate::{document::ReadError, job::JobError};
use diskwright_disk::DiskError;
use diskwright_store::{OpenError, Operation};
use std::{io, path::PathBuf};

/// Result of a lab operation.
pub type Result<T, E = LabError> = std::result::Result<T, E>;

/// Why a measurement could not be made.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
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
    /// Requests failed while they were measured. What was measured until then is not reported, for
    /// an average over a failing device means nothing.
    #[error("{first} ({errors} failed in all); the measurement is void: look at the device below")]
    Void {
        /// The first failure, with target, offset and length.
        first: String,
        /// How many.
        errors: u64,
    },
    /// One request failed while a target was prepared.
    #[error("{target}: the {} of {len_bytes} bytes at offset {offset_bytes} failed after {completed} good requests: {source}; the run is void", verb(*operation))]
    Request {
        /// The target.
        target: String,
        /// What was asked of it.
        operation: Operation,
        /// Where.
        offset_bytes: u64,
        /// How much.
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
    #[error("{}: {what} needs {needed_bytes} bytes, but only {free_bytes} are free; use another folder (--dir) or smaller disks (--size)", dir.display())]
    NoSpace {
        /// The folder.
        dir: PathBuf,
        /// For what.
        what: String,
        /// How much.
        needed_bytes: u64,
        /// How much there is.
        free_bytes: u64,
    },
    /// A target that is to be written is used by somebody else.
    #[error(
        "{target} would be written, but it is in use: {users}; end that use first (--destroy-data does not change this)"
    )]
    InUse {
        /// The target.
        target: String,
        /// By whom, as in "/dev/vdb1 is mounted at /home".
        users: String,
    },
    /// A target that is to be written holds data.
    #[error(
        "{target} would be overwritten, but it holds {what}; use --destroy-data if that may be lost, or another target"
    )]
    HoldsData {
        /// The target.
        target: String,
        /// What was found, and where.
        what: String,
    },
    /// There is no room to fill a target.
    #[error("{target}: {needed_bytes} bytes of it have no space yet, but on {} only {free_bytes} are free; make room there, or use less of it (--working-set)", dir.display())]
    NoSpaceToFill {
        /// The target.
        target: String,
        /// How much it lacks.
        needed_bytes: u64,
        /// Where it lies.
        dir: PathBuf,
        /// How much there is.
        free_bytes: u64,
    },
    /// A result that was saved cannot be used.
    #[error(transparent)]
    Read(#[from] ReadError),
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

pub(crate) fn verb(operation: Operation) -> &'static str {
    match operation {
        Operation::Read => "read",
        Operation::Write => "write",
        Operation::WriteZeroes => "zeroing",
        Operation::Discard => "discard",
        Operation::Flush => "flush",
    }
}

fn hint_for(source: &io::Error) -> &'static str {
    match source.kind() {
        _ if diskwright_store::is_full(source) => "; free some space or use another folder",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => "; use a folder you may write to",
        _ => "",
    }
}
