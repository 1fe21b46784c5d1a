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

use diskwright_store::{ErrorCode, RateLimits};
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

/// Limits of the rate at which a disk is served; 0 is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Limits {
    /// Requests per second.
    pub iops: u64,
    /// Bytes of reads and writes per second.
    pub bytes_per_second: u64,
    /// Requests that may start at once after a pause; 0 for a tenth of a second's.
    pub iops_burst: u64,
    /// Bytes that may start at once after a pause; 0 for a tenth of a second's.
    pub burst_bytes: u64,
}

impl From<RateLimits> for Limits {
    fn from(limits: RateLimits) -> Self {
        let RateLimits { iops, bytes_per_second, iops_burst, burst_bytes } = limits;
        Self { iops, bytes_per_second, iops_burst, burst_bytes }
    }
}

impl From<Limits> for RateLimits {
    fn from(limits: Limits) -> Self {
        let Limits { iops, bytes_per_second, iops_burst, burst_bytes } = limits;
        Self { iops, bytes_per_second, iops_burst, burst_bytes }
    }
}

/// A point of change tracking.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct TrackedPoint {
    /// Name of the point.
    pub name: String,
    /// When it was started, in seconds since 1970.
    pub started: u64,
    /// Bytes that have changed since, in whole grains.
    pub changed: u64,
    /// Why everything counts as changed; `null` if the ranges are known.
    pub everything_because: Option<String>,
    /// The identity of an image that had the contents of the disk then; `null` if no image had.
    #[serde(default)]
    pub linkage_id: Option<String>,
    /// Size of the disk then, in bytes.
    #[serde(default)]
    pub virtual_size: u64,
}

impl From<diskwright_disk::TrackPoint> for TrackedPoint {
    fn from(point: diskwright_disk::TrackPoint) -> Self {
        let since = point.started.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Self {
            name: point.name,
            started: since.as_secs(),
            changed: point.changed_bytes,
            everything_because: point.everything,
            linkage_id: point.linkage_id.map(|id| id.to_string()),
            virtual_size: point.size_bytes,
        }
    }
}

/// A range of a disk in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct TrackedRange {
    /// First byte of the range on the disk.
    pub start: u64,
    /// Length of the range in bytes.
    pub length: u64,
}

/// Ranges that have changed since a point.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedRanges {
    /// Size of the disk in bytes.
    pub virtual_size: u64,
    /// Granularity of the tracking in bytes.
    pub grain_size: u64,
    /// Why everything counts as changed; `None` if the ranges are known.
    pub everything_because: Option<String>,
    /// In ascending order.
    pub ranges: Vec<TrackedRange>,
    /// The offset from which on to ask for more; `None` if these were all.
    pub next: Option<u64>,
}

/// A process with a control channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct ProcessReport {
    /// Number of the process.
    pub pid: u32,
    /// The command that it runs: `serve` or `attach`.
    pub command: String,
    /// The version of the program.
    pub version: String,
    /// The disks that it has open for writing.
    pub disks: Vec<DiskReport>,
}

/// A disk that a process has open for writing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct DiskReport {
    /// The export name; of an attached disk, the name of its file.
    pub name: String,
    /// The image, an absolute path without symbolic links.
    pub file: PathBuf,
    /// Virtual size in bytes.
    pub virtual_size: u64,
    /// The operation that is changing the disk now.
    pub busy_with: Option<String>,
}

/// The statistics of a disk, and of the process that has it open.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Statistics {
    /// The process.
    pub process: ProcessReport,
    /// The disk that was asked for.
    pub disk: DiskReport,
    /// The images of its chain, the top first.
    pub chain: Vec<PathBuf>,
    /// Space that the top image takes on its file system, in bytes; `null` if the file system does
    /// not report it.
    pub size_on_disk: Option<u64>,
    /// Seconds since the process has opened its disks.
    pub open_seconds: u64,
    /// The limits of the disk; `null` if it has none.
    #[serde(default)]
    pub limits: Option<Limits>,
    /// Requests that had to wait for the limits of the disk so far.
    #[serde(default)]
    pub delayed_requests: u64,
    /// What clients have asked for, all disks of the process together; `null` for an attached disk,
    /// which the kernel counts (`/sys/block/DEVICE/stat`).
    pub traffic: Option<Traffic>,
}

/// Counters of a server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Traffic {
    /// Open connections.
    pub connections: u64,
    /// Requests taken and not answered.
    pub in_flight: u64,
    /// Connections accepted so far.
    pub accepted: u64,
    /// Connections refused so far.
    pub refused: u64,
    /// Counters of each command.
    pub commands: Vec<CommandCount>,
}

/// Counters of one command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct CommandCount {
    /// `read`, `write`, `flush`, `trim`, `cache`, `write_zeroes` or `block_status`.
    pub command: String,
    /// Requests answered.
    pub requests: u64,
    /// Bytes of those that succeeded.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Mean time to answer, in nanoseconds; `null` without a request.
    pub mean_latency_ns: Option<u64>,
}

/// A disk's size before and after.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resized {
    /// Virtual size before, in bytes.
    pub old_size: u64,
    /// Virtual size after, in bytes.
    pub new_size: u64,
    /// Length of its file before, in bytes.
    pub old_file_size: u64,
    /// Length of its file after; `None` if nothing was changed.
    pub new_file_size: Option<u64>,
}

/// A merge of a disk in use, as [`diskwright_disk::Merged`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Merged {
    /// The image that has all data afterwards, by its name then.
    pub disk: PathBuf,
    /// Path of the target before the merge.
    pub target: PathBuf,
    /// The images whose data went into it, the nearest first.
    pub merged: Vec<PathBuf>,
    /// Images whose parent is `disk` now.
    pub relinked: Vec<PathBuf>,
    /// What earlier merges had left, and is removed.
    pub leftovers: Vec<PathBuf>,
    /// Bytes of data that had to go into `disk`.
    pub data_bytes: u64,
    /// Bytes read and written.
    pub copied_bytes: u64,
    /// Bytes shared by reflink.
    pub cloned_bytes: u64,
    /// By how much the file of `disk` may grow, in bytes.
    pub growth_bytes: u64,
    /// Virtual size of `disk` before, in bytes.
    pub old_size: u64,
    /// Virtual size of `disk` after, in bytes.
    pub new_size: u64,
    /// Sentences for the user.
    pub warnings: Vec<String>,
}

impl From<diskwright_disk::Merged> for Merged {
    fn from(merged: diskwright_disk::Merged) -> Self {
        Self {
            disk: merged.disk,
            target: merged.target,
            merged: merged.merged,
            relinked: merged.relinked,
            leftovers: merged.leftovers,
            data_bytes: merged.data_bytes,
            copied_bytes: merged.copied_bytes,
            cloned_bytes: merged.cloned_bytes,
            growth_bytes: merged.growth_bytes,
            old_size: merged.size_bytes.0,
            new_size: merged.size_bytes.1,
            warnings: merged.warnings,
        }
    }
}

impl From<Merged> for diskwright_disk::Merged {
    fn from(merged: Merged) -> Self {
        Self {
            disk: merged.disk,
            target: merged.target,
            merged: merged.merged,
            relinked: merged.relinked,
            leftovers: merged.leftovers,
            data_bytes: merged.data_bytes,
            copied_bytes: merged.copied_bytes,
            cloned_bytes: merged.cloned_bytes,
            growth_bytes: merged.growth_bytes,
            size_bytes: (merged.old_size, merged.new_size),
            warnings: merged.warnings,
        }
    }
}

/// A snapshot of a disk in use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frozen {
    /// The file that is the disk: the new child.
    pub disk: PathBuf,
    /// The frozen image, which is the child's parent.
    pub frozen: PathBuf,
    /// Mount points of the file systems that were frozen for the moment of the snapshot.
    pub file_systems: Vec<PathBuf>,
    /// Sentences for the user.
    pub warnings: Vec<String>,
}

/// A disk that was compacted in use, or would be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompactedInUse {
    /// Virtual size in bytes.
    pub virtual_size: u64,
    /// Length of a block in bytes.
    pub block_size: u64,
    /// Length of its file before, in bytes.
    pub old_file_size: u64,
    /// Length of its file after, in bytes; predicted for a dry run.
    pub new_file_size: u64,
    /// Bytes of the blocks of zeros that were given back.
    pub zero_bytes: u64,
    /// Bytes of the blocks that were moved.
    pub moved_bytes: u64,
    /// Sentences for the user.
    pub warnings: Vec<String>,
}

/// A disk in use that has moved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// The file that was the disk.
    pub from: PathBuf,
    /// The file that is the disk.
    pub to: PathBuf,
    /// Format of the new image.
    pub format: String,
    /// Virtual size in bytes.
    pub virtual_size: u64,
    /// Bytes of the disk that hold data.
    pub data_bytes: u64,
    /// Bytes that were copied, some several times because clients wrote meanwhile.
    pub copied_bytes: u64,
    /// Bytes free on the file system of the new file before the move; `None` if unknown.
    pub free_bytes: Option<u64>,
    /// The longest time for which writes of clients were held back, in nanoseconds.
    pub pause_ns: u64,
    /// Sentences for the user.
    pub warnings: Vec<String>,
}
