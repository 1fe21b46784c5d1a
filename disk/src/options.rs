//! How a disk is opened: what the caller may say.

use diskwright_image::Format;
use diskwright_store::{CacheMode, EngineKind, Files};
use std::path::PathBuf;

/// Which parents may be opened.
#[derive(Debug, Clone, Default)]
pub struct ParentPolicy {
    /// Folders, besides those of the images already opened, beneath which parents may lie.
    pub allowed_dirs: Vec<PathBuf>,
    /// Any place will do.
    pub allow_any: bool,
    /// Windows drives and where they are here: `('C', "/mnt/c")`. Paths on other drives are passed
    /// over.
    pub drives: Vec<(char, PathBuf)>,
    /// A parent may be a block device, and not only a regular file.
    pub allow_devices: bool,
    /// Write to a differencing VHD although its parent file's time stamp is not the one that the
    /// child recorded.
    pub ignore_timestamp: bool,
}

/// How much of a chain is opened. But for the whole, only to be read: what a layer that is missing
/// holds reads as zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reach {
    /// All of it, to the disk that has no parent, or none.
    #[default]
    Whole,
    /// As far as it can be followed. What stopped that is told by
    /// [`Disk::broken_link`](crate::Disk::broken_link).
    Found,
    /// The top image alone.
    Top,
}

/// How to open a disk.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// For writing.
    pub writable: bool,
    /// Page cache or O_DIRECT, for payload.
    pub cache: CacheMode,
    /// What moves the bytes when the disk itself does (queues say their own).
    pub engine: EngineKind,
    /// The top image's format, where the user says it; else name and contents must agree on it (see
    /// [`probe`](diskwright_image::probe)).
    pub format: Option<Format>,
    /// Which parents may be opened.
    pub parents: ParentPolicy,
    /// Write even though another image in the folder names this one as its parent.
    pub allow_parent_write: bool,
    /// Take no lock on a disk that is opened read-only, so that another program may have it open
    /// for writing. What is read may then be of no single moment; a warning says so.
    pub force_share: bool,
    /// How much of the chain must be there.
    pub reach: Reach,
    /// Look at what is written, and make a write of nothing but zeros a change of metadata wherever
    /// that spares space, as Hyper-V's dynamic disks do. It costs a look at every buffer. Fixed
    /// disks, whose space is there, store zeros like anything else.
    pub detect_zeroes: bool,
    /// Most memory that the map of who owns each block may take, in bytes; the tables of images
    /// count too. `None` for [`MAP_MEMORY_BYTES`](crate::MAP_MEMORY_BYTES).
    pub map_memory_bytes: Option<u64>,
    /// Where paths lead.
    pub files: Files,
}
