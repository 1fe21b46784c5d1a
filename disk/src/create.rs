//! (being written)
use crate::{ParentPolicy, Result};
use diskwright_image::{DiskType, Format};
use std::path::{Path, PathBuf};

/// What to create. `None` means the usual.
#[derive(Debug, Clone, Default)]
pub struct CreateRequest {
    /// Virtual size; needed unless there is a parent.
    pub size_bytes: Option<u64>,
    /// Format; from the extension unless said.
    pub format: Option<Format>,
    /// Type; dynamic unless said, differencing with a parent. (Raw is fixed.)
    pub disk_type: Option<DiskType>,
    /// Parent of a differencing image.
    pub parent: Option<PathBuf>,
    /// Payload block.
    pub block_bytes: Option<u32>,
    /// Virtual logical sector.
    pub logical_sector_bytes: Option<u32>,
    /// Virtual physical sector.
    pub physical_sector_bytes: Option<u32>,
    /// Reserve all space now.
    pub preallocate: bool,
    /// Where the parent may lie.
    pub parents: ParentPolicy,
}

/// Makes a new image file. Never overwrites; on failure nothing is left behind.
pub fn create(path: impl AsRef<Path>, request: &CreateRequest) -> Result<()> {
    let _ = (path.as_ref(), request);
    Err(crate::DiskError::Stopped)
}
