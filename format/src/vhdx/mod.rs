//! VHDX, as in MS-VHDX ("Virtual Hard Disk v2 (VHDX) File Format"). Little-endian throughout.
//!
//! ```text
//!   0        64K       128K      192K      256K          1 MiB ...                (everything at multiples of 1 MiB)
//!   file_id  header 1  header 2  region 1  region 2  │ log │ metadata region │ BAT region │ payload and bitmap blocks
//!                │ log place, log GUID  │ where                │                  │
//!                ▼                      ▼                      ▼                  ▼
//!              log.rs                region.rs             metadata.rs         bat.rs
//! ```
//!
//! Each module holds one structure: a Rust value, `parse` from bytes, and bytes from the value. A
//! parser takes a slice and trusts nothing in it: it checks signature and checksum, then ranges,
//! and answers with an [`Invalid`] that says where in the structure, what was found and what was
//! expected. What one structure cannot know (does the offset lie inside the file?) is left to the
//! image crate.

pub mod bat;
mod bytes;
pub mod file_id;
pub mod header;
pub mod log;
pub mod metadata;
pub mod parent_locator;
pub mod region;

pub use bat::{BatEntry, BatGeometry, BitmapState, PayloadState};
pub use file_id::FileIdentifier;
pub use header::{Header, Slot};
pub use log::{Descriptor, LogEntryHeader};
pub use metadata::{FileParameters, MetadataEntry, MetadataTable};
pub use parent_locator::ParentLocator;
pub use region::{Region, RegionTable};

/// One mebibyte: the alignment of regions and blocks.
pub const MIB: u64 = 1 << 20;
/// Size of a virtual disk at most: 64 TiB (MS-VHDX 2.6.2.2).
pub const MAX_SIZE_BYTES: u64 = 64 << 40;
/// Smallest payload block in bytes.
pub const MIN_BLOCK_BYTES: u32 = 1 << 20;
/// Largest payload block in bytes.
pub const MAX_BLOCK_BYTES: u32 = 256 << 20;
/// Size of a sector bitmap block in bytes.
pub const BITMAP_BLOCK_BYTES: u64 = MIB;

/// Result of parsing.
pub type Result<T, E = Invalid> = std::result::Result<T, E>;

/// What is wrong with a structure.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{structure}, byte {offset_bytes}: found {found}, expected {expected}")]
pub struct Invalid {
    /// The structure, in the words of MS-VHDX.
    pub structure: &'static str,
    /// Where in the structure, in bytes from its beginning.
    pub offset_bytes: u64,
    /// What is there.
    pub found: String,
    /// What should be.
    pub expected: String,
}

impl Invalid {
    /// An error at `offset_bytes` of `structure`.
    pub fn new(structure: &'static str, offset_bytes: u64, found: impl ToString, expected: impl ToString) -> Self {
        Self { structure, offset_bytes, found: found.to_string(), expected: expected.to_string() }
    }

    pub(crate) fn short(structure: &'static str, found_bytes: usize, expected_bytes: usize) -> Self {
        Self::new(structure, 0, format!("{found_bytes} bytes"), format!("at least {expected_bytes}"))
    }
}
