//! What the answers of a control channel carry: reports of disks and processes, and results of
//! operations.
//!
//! New fields may join a struct without a new version of the messages.

use diskwright_store::RateLimits;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A way into a disk that was opened or closed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Door {
    /// Name of the disk's export.
    pub name: String,
    /// The socket.
    pub socket: PathBuf,
    /// Number of virtqueues.
    pub queues: u16,
    /// Whether a machine can connect now.
    pub is_open: bool,
}

/// A disk that was added to a process or removed from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskChange {
    /// The export name.
    pub name: String,
    /// The image.
    pub file: PathBuf,
    /// Whether it is served now.
    pub is_served: bool,
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
