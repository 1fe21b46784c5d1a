//! (being written)
use diskwright_image::Format;
use diskwright_store::{CacheMode, EngineKind};
use std::path::PathBuf;

/// Which parents may be opened.
#[derive(Debug, Clone, Default)]
pub struct ParentPolicy {
    /// Folders, besides the child's own, beneath which parents may lie.
    pub allowed_dirs: Vec<PathBuf>,
    /// Any place will do.
    pub allow_any: bool,
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
    /// The format, where probing is not wanted: a raw disk whose guest wrote a VHD footer must not become one.
    pub format: Option<Format>,
    /// Which parents may be opened.
    pub parents: ParentPolicy,
    /// Write even though another image in the folder names this one as its parent.
    pub allow_parent_write: bool,
    /// Open the top image alone, without its parent (for `info` on an orphan; reads of the parent's blocks fail).
    pub without_parents: bool,
}
