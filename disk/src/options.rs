//! Options for opening a disk.

use diskwright_image::Format;
use diskwright_store::{CacheMode, EngineKind, Files};
use std::path::PathBuf;

/// Which parents may be opened.
#[derive(Debug, Clone, Default)]
pub struct ParentPolicy {
    /// Folders beneath which parents may lie, besides the folders of the images already opened.
    pub allowed_dirs: Vec<PathBuf>,
    /// Parents may lie anywhere.
    pub allow_any: bool,
    /// Windows drives and their mount points: `('C', "/mnt/c")`. Paths on other drives are skipped.
    pub drives: Vec<(char, PathBuf)>,
    /// A parent may be a block device. If false, it must be a regular file.
    pub allow_devices: bool,
    /// Open a differencing VHD for writing even if the time stamp of its parent file differs from
    /// the one that the child recorded.
    pub ignore_timestamp: bool,
}

/// How much of a chain is opened. Anything but the whole chain can only be read, and data of layers
/// that were not opened reads as zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ChainScope {
    /// The whole chain down to the base. If a parent cannot be opened, the open fails.
    #[default]
    Whole,
    /// All layers down to the first parent that cannot be opened.
    /// [`Disk::broken_link`](crate::Disk::broken_link) has that parent's error.
    Available,
    /// Only the top image.
    Top,
}

/// Options for [`Disk::open`](crate::Disk::open).
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// Open the top image for writing, under an exclusive lock.
    pub writable: bool,
    /// How payload is read and written: through the page cache or with O_DIRECT.
    pub cache: CacheMode,
    /// How the disk itself submits I/O. Queues have their own option.
    pub engine: EngineKind,
    /// Format of the top image. If `None`, file name and contents must agree on a format (see
    /// [`probe`](diskwright_image::probe)).
    pub format: Option<Format>,
    /// Which parents may be opened.
    pub parents: ParentPolicy,
    /// Open for writing even if another image in the folder names this one as its parent.
    pub allow_parent_write: bool,
    /// Take no lock on a disk opened read-only, so that another program may have it open for
    /// writing. Reads may then be inconsistent; a warning says so.
    pub force_share: bool,
    /// How much of the chain is opened.
    pub scope: ChainScope,
    /// Check every write for zeros, and turn a write of nothing but zeros into a change of metadata
    /// where that saves space, as Hyper-V's dynamic disks do. Reads every buffer once. Fixed disks
    /// have their space allocated and store zeros like other data.
    pub detect_zeroes: bool,
    /// Upper limit in bytes for the memory of the map (the owner of each block) and of the images'
    /// tables. `None` for [`MAP_MEMORY_BYTES`](crate::MAP_MEMORY_BYTES).
    pub map_memory_bytes: Option<u64>,
    /// Which disk of an OVA: its number, from 1, its file or its id. `None` for the only one.
    pub ova_disk: Option<String>,
    /// Id or name of an internal snapshot of the top image (qcow2), which is opened in place of the
    /// present disk, read-only. An id has precedence.
    pub snapshot: Option<String>,
    /// The file system that resolves paths.
    pub files: Files,
}
