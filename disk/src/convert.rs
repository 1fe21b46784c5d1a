//! (being written)
use crate::{CreateRequest, OpenOptions, Progress, Result};
use std::path::Path;

/// How to convert.
#[derive(Debug, Clone, Default)]
pub struct ConvertOptions {
    /// How to open the source.
    pub source: OpenOptions,
    /// What to make of it; the size is the source's unless said.
    pub dest: CreateRequest,
    /// Read back and compare.
    pub verify: bool,
    /// Never share extents, always copy.
    pub no_reflink: bool,
}

/// What a conversion did.
#[derive(Debug, Clone, Copy, Default)]
pub struct ConvertOutcome {
    /// Virtual size.
    pub size_bytes: u64,
    /// Bytes read and written.
    pub copied_bytes: u64,
    /// Bytes shared by reflink.
    pub cloned_bytes: u64,
    /// Bytes skipped because they read as zeros.
    pub zero_bytes: u64,
}

/// Copies a disk into a new image.
pub fn convert(source: impl AsRef<Path>, dest: impl AsRef<Path>, options: &ConvertOptions, progress: &mut Progress<'_>) -> Result<ConvertOutcome> {
    let _ = (source.as_ref(), dest.as_ref(), options, progress);
    Err(crate::DiskError::Stopped)
}
