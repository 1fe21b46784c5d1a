//! Options of a rescue.

use crate::{CreateRequest, OpenOptions};
use std::path::PathBuf;

/// Options for [`rescue`](crate::rescue()).
#[derive(Debug, Clone, Default)]
pub struct RescueOptions {
    /// How to open the source and its parents.
    pub source: OpenOptions,
    /// Properties of the new image. Its size is that of the source.
    pub dest: CreateRequest,
    /// Virtual size of the source in bytes, if its own record is lost.
    pub size_bytes: Option<u64>,
    /// Block size of the source in bytes, if its own record is lost.
    pub block_bytes: Option<u32>,
    /// The parent of the source, if its own record of the parent is lost or names another place.
    pub parent: Option<PathBuf>,
    /// The source has no parent: for a source that has lost its own record of that.
    pub no_parent: bool,
    /// Believe table entries that say that a block has no data, although the file has data that no
    /// entry names. Such data is then not placed where an entry says "no data".
    pub trust_absent: bool,
    /// Folder for the data that could not be placed: one file for each piece, named by its offset.
    pub leftovers: Option<PathBuf>,
    /// Reads everything, and makes no file.
    pub dry_run: bool,
}
