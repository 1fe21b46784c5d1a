//! placeholder: helper writes
use crate::lock::LockMode;
/// Page cache or O_DIRECT.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheMode {
    /// Through the page cache.
    #[default]
    PageCache,
    /// O_DIRECT.
    Direct,
}
/// How to open.
#[derive(Debug, Clone, Copy)]
pub struct OpenOptions {
    /// For writing.
    pub writable: bool,
    /// Create a new file (fails when it exists).
    pub create_new: bool,
    /// Cache mode.
    pub cache: CacheMode,
    /// Lock to take.
    pub lock: LockMode,
}
/// A file.
#[derive(Debug)]
pub struct FileStore;
