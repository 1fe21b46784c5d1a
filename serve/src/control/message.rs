//! Requests and events of the control channel, as JSON. A request is one line; the answer is any
//! number of `progress` events and then one `result` or `error`.
//!
//! ```text
//!   > {"version":1,"disk":{"device":65025,"inode":71},"operation":"resize","size":85899345920}
//!   < {"event":"progress","done":1,"total":4}
//!   < {"event":"result","kind":"resized","old_size":...}
//!   < {"event":"error","code":"locked","message":"..."}
//! ```
//!
//! A process refuses a request of another version, and an operation that it does not know, with a
//! sentence that names both sides. New fields may join an event without a new version.

use super::answer::{
    ChangedRanges, CompactedInUse, DiskChange, Door, Frozen, Limits, Merged, Moved, ProcessReport, Resized, Statistics,
    TrackedPoint,
};
use diskwright_store::ErrorCode;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The version of the messages.
pub const VERSION: u32 = 1;

/// The longest line that either side reads.
pub const LINE_BYTES_MAX: usize = 64 << 10;

/// A file by device and inode number; a block device by its number and 0. The same as
/// [`Store::identity`](diskwright_store::Store::identity).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileId {
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

impl From<(u64, u64)> for FileId {
    fn from((device, inode): (u64, u64)) -> Self {
        Self { device, inode }
    }
}

/// What a process is asked to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "operation", rename_all = "kebab-case")]
pub enum Operation {
    /// List the disks that the process has open for writing.
    List,
    /// Report the counters of the process, and the space that the disk takes.
    Statistics,
    /// Finish the requests in flight, refuse new clients, close all disks, and end.
    Drain,
    /// Enlarge the disk.
    Resize {
        /// The new virtual size in bytes.
        size: u64,
        /// Check whether it can be done, and change nothing.
        dry_run: bool,
    },
    /// Replace the limits of the rate at which the disk is served.
    Limit(Limits),
    /// Make the disk that of a virtual machine, by vhost-user.
    OpenDoor {
        /// The socket, an absolute path.
        socket: PathBuf,
        /// Number of virtqueues.
        queues: u16,
    },
    /// End that.
    CloseDoor {
        /// The socket, an absolute path.
        socket: PathBuf,
    },
    /// Open another disk in the process of this one, and serve it.
    AddDisk(NewDisk),
    /// Disconnect the clients of the disk, and close it. The process goes on with its other disks.
    RemoveDisk,
    /// Freeze the disk, and go on in a new child that has its name.
    Snapshot {
        /// What is appended to the disk's name to name the frozen image.
        name: String,
        /// Start a point of change tracking of this name at the same moment.
        #[serde(default)]
        track: Option<String>,
        /// Check whether it can be done, and change nothing.
        dry_run: bool,
    },
    /// Start a point of change tracking.
    TrackStart {
        /// Name of the point.
        name: String,
    },
    /// End a point of change tracking.
    TrackStop {
        /// Name of the point.
        name: String,
    },
    /// List the points of change tracking.
    TrackList,
    /// List the ranges that have changed since a point, as many as fit in an answer.
    TrackShow {
        /// The name of the point.
        name: String,
        /// Ranges before this offset are left out, bytes.
        from: u64,
        /// The later point up to which changes count; `None` for now.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        to: Option<String>,
    },
    /// Merge an image of the disk's chain into one of its ancestors. All paths are absolute.
    Merge {
        /// The image.
        child: PathBuf,
        /// The ancestor; `None` for the parent.
        into: Option<PathBuf>,
        /// The merged image gets the name of the child.
        keep_name: bool,
        /// More folders in which children of the images are searched.
        search: Vec<PathBuf>,
        /// Always copy, never share by reflink.
        no_reflink: bool,
        /// Check whether it can be done, and change nothing.
        dry_run: bool,
    },
    /// Give back blocks of zeros, and make the file as small as possible.
    Compact {
        /// Find out what would be gained, and change nothing.
        dry_run: bool,
    },
    /// Move the disk to another file while its clients go on.
    Move {
        /// The new file or its folder, an absolute path.
        to: PathBuf,
        /// Properties of the new image.
        #[serde(flatten)]
        new: NewImage,
        /// Keep the old file.
        keep_old: bool,
        /// Check whether it can be done, and change nothing.
        dry_run: bool,
    },
}

/// Properties of the image into which a disk moves. `None` is the default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewImage {
    /// `raw`, `vhd` or `vhdx`.
    pub format: Option<String>,
    /// `fixed` or `dynamic`.
    pub disk_type: Option<String>,
    /// Size of a payload block in bytes.
    pub block_size: Option<u32>,
    /// Reserve all space now.
    pub preallocate: bool,
}

/// A disk that is to be served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewDisk {
    /// The image, an absolute path.
    pub file: PathBuf,
    /// The export name; `None` for that of the file.
    pub name: Option<String>,
    /// The format; `None` to find it out.
    pub format: Option<String>,
    /// Whether writes are refused.
    pub read_only: bool,
}

/// One request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Request {
    pub(crate) version: u32,
    /// The disk; `None` for an operation on the whole process.
    #[serde(default)]
    pub(crate) disk: Option<FileId>,
    #[serde(flatten)]
    pub(crate) operation: Operation,
}

/// Only the version of a request, which decides how the rest is read.
#[derive(Debug, Deserialize)]
pub(crate) struct Versioned {
    pub(crate) version: u32,
}

/// A line of an answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub(crate) enum Event {
    /// The operation goes on: `done` of `total`, in bytes or steps.
    Progress { done: u64, total: u64 },
    /// The operation is done.
    Result(Box<Done>),
    /// The operation was refused or failed.
    Error { code: String, message: String },
}

impl Event {
    pub(crate) fn error(code: ErrorCode, message: impl Into<String>) -> Self {
        Self::Error { code: code.as_str().into(), message: message.into() }
    }
}

/// The code with this name; [`ErrorCode::Io`] for a name that this program does not know.
pub(crate) fn code_named(name: &str) -> ErrorCode {
    ErrorCode::ALL.iter().copied().find(|code| code.as_str() == name).unwrap_or(ErrorCode::Io)
}

/// What an operation has done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Done {
    /// The answer to [`Operation::List`].
    Listed(ProcessReport),
    /// The answer to [`Operation::Statistics`].
    Counted(Statistics),
    /// The process has closed its disks and ends now.
    Drained {
        /// The files of all disks that it had open for writing.
        files: Vec<PathBuf>,
    },
    /// The disk has its new size.
    Resized(Resized),
    /// The disk is served within these limits from now on.
    Limited(Limits),
    /// The disk has a door more, or one less.
    Door(Door),
    /// The disk is served, or no longer.
    Disk(DiskChange),
    /// The disk goes on in a new child.
    Frozen(Frozen),
    /// An image of the disk was merged.
    Merged(Merged),
    /// The file of the disk is smaller.
    Compacted(CompactedInUse),
    /// The disk is in another file.
    Moved(Moved),
    /// The points of change tracking that the disk has now.
    Points {
        /// The oldest first.
        points: Vec<TrackedPoint>,
    },
    /// Ranges that have changed.
    Changed(ChangedRanges),
}
