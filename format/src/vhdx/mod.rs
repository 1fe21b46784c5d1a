//! VHDX, as in MS-VHDX ("Virtual Hard Disk v2 (VHDX) File Format"). All integers are little-endian.
//!
//! ```text
//! 0        64K       128K      192K      256K          1 MiB ...     all at multiples of 1 MiB
//! file_id  header 1  header 2  region 1  region 2  │ log │ metadata │ BAT │ payload, bitmap blocks
//!              │ log place, log GUID  │ places of            │          │
//!              ▼                      ▼                      ▼          ▼
//!            log.rs                region.rs          metadata.rs   bat.rs
//! ```
//!
//! Each module holds one structure: a Rust value, `parse` from bytes, and conversion to bytes. A
//! parser trusts nothing in its slice: it checks signature and checksum, then ranges, and returns
//! an [`Invalid`] with the offset in the structure, what was found and what was expected. Checks
//! that need more than one structure (is the offset within the file?) are made by the image crate.

pub mod bat;
mod bytes;
pub mod file_id;
pub mod header;
pub mod log;
pub mod metadata;
pub mod parent_locator;
pub mod region;

pub use crate::invalid::{Invalid, Result};
pub use bat::{BatEntry, BatGeometry, BitmapState, PayloadState};
pub use file_id::FileIdentifier;
pub use header::{Header, Slot};
pub use log::{Descriptor, LogEntryHeader};
pub use metadata::{FileParameters, MetadataEntry, MetadataTable};
pub use parent_locator::ParentLocator;
pub use region::{Region, RegionTable};

/// One mebibyte: the alignment of regions and blocks.
pub const MIB: u64 = 1 << 20;
/// Maximum size of a virtual disk: 64 TiB (MS-VHDX 2.6.2.2).
pub const MAX_SIZE_BYTES: u64 = 64 << 40;
/// Minimum size of a payload block in bytes.
pub const MIN_BLOCK_BYTES: u32 = 1 << 20;
/// Maximum size of a payload block in bytes.
pub const MAX_BLOCK_BYTES: u32 = 256 << 20;
/// Size of a sector bitmap block in bytes.
pub const BITMAP_BLOCK_BYTES: u64 = MIB;
