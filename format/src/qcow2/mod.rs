//! qcow2, as in QEMU's `docs/interop/qcow2.rst`. All integers are big-endian.
//!
//! ```text
//!   0                                     anywhere, at multiples of the cluster size
//!   ┌────────────┬────────────┬────────┐  ┌──────────┐   ┌──────────┐   ┌───────────────┐
//!   │ header     │ extensions │ backing│  │ L1 table │──▶│ L2 table │──▶│ data cluster  │
//!   │ header.rs  │ extensions │ name   │  └──────────┘   │ table.rs │   │ or compressed │
//!   │ features.rs│ .rs        │        │  ┌──────────┐   └──────────┘   └───────────────┘
//!   └────────────┴────────────┴────────┘  │ refcount │   ┌─────────────────┐
//!                                         │ table    │──▶│ refcount blocks │ refcount.rs
//!                                         └──────────┘   └─────────────────┘
//!                                         ┌──────────┐   each with an L1 table of its own
//!                                         │ snapshots│   snapshot.rs
//!                                         └──────────┘
//!                                         ┌──────────┐
//!                                         │ bitmaps  │   bitmap.rs
//!                                         └──────────┘
//! ```
//!
//! Each module holds one structure: a Rust value and `parse` from bytes. Header and table entries
//! also become bytes again. new_image.rs has the metadata of a new image. A parser trusts nothing
//! in its slice and returns an [`Invalid`] for what contradicts the specification; no allocation is
//! larger than the slice. Checks that need more than one structure (is the offset within the file?)
//! are made by the image crate.

pub mod bitmap;
mod bytes;
mod compressed_writer;
pub mod extensions;
pub mod features;
pub mod header;
mod new_image;
pub mod refcount;
pub mod snapshot;
pub mod table;

pub use crate::invalid::{Invalid, Result};
pub use bitmap::{BitmapEntry, BitmapHead};
pub use compressed_writer::{COMPRESSED_CLUSTER_BYTES, CompressedWriter};
pub use extensions::{BitmapsExtension, Extensions};
pub use features::{FeatureKind, FeatureName, Features};
pub use header::{Compression, Header, Place};
pub use new_image::{Backing, NewImage, NewMetadata};
pub use refcount::RefcountWidth;
pub use snapshot::{Snapshot, SnapshotHead};
pub use table::{Geometry, L1Entry, L2Entry, Subclusters};

/// Magic number at the start of the file.
pub const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Smallest cluster, as a power of two.
pub const CLUSTER_BITS_MIN: u32 = 9;
/// Largest cluster that programs accept, as a power of two: 2 MiB.
pub const CLUSTER_BITS_MAX: u32 = 21;
/// Smallest cluster of an image with extended L2 entries, as a power of two.
pub const EXTENDED_CLUSTER_BITS_MIN: u32 = 14;
/// Subclusters of a cluster in an image with extended L2 entries.
pub const SUBCLUSTERS: u32 = 32;
/// Longest L1 table that programs accept, in bytes.
pub const L1_MAX_BYTES: u64 = 32 << 20;
/// Longest refcount table that programs accept, in bytes.
pub const REFCOUNT_TABLE_MAX_BYTES: u64 = 8 << 20;
/// Most internal snapshots that programs accept.
pub const SNAPSHOTS_MAX: u32 = 65_536;
/// Longest snapshot table that programs accept, in bytes.
pub const SNAPSHOT_TABLE_MAX_BYTES: u64 = 64 << 20;
/// Most bitmaps that programs accept.
pub const BITMAPS_MAX: u32 = 65_535;
/// Longest bitmap directory that programs accept, in bytes.
pub const BITMAP_DIRECTORY_MAX_BYTES: u64 = 64 << 20;
/// Unit in which the length of compressed data is counted, in bytes.
pub const SECTOR_BYTES: u64 = 512;
