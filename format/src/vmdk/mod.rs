//! VMDK: the structures of VMware's "Virtual Disk Format 5.0" (2011). Integers are little-endian,
//! and counted in sectors of 512 bytes unless said.
//!
//! ```text
//!   descriptor (text)               descriptor.rs      sparse extent                  sparse.rs
//!   ┌────────────────────────┐                         ┌──────────────────────┐ 0
//!   │ CID, parentCID, type   │                         │ header, 512 bytes    │
//!   │ RW 4192256 SPARSE "a"──┼──▶ extent files ──────▶ │ (descriptor)         │
//!   │ RW 4192256 FLAT "b" 0  │    in the same folder   │ redundant directory  │ rgd_offset
//!   │ ddb.adapterType = ...  │                         │ and its grain tables │
//!   └────────────────────────┘                         │ grain directory      │ gd_offset
//!   may lie within the first sparse extent             │ and its grain tables │
//!                                                      │ grains, in any order │
//!                                                      └──────────────────────┘
//!   streamOptimized: header, descriptor, then markers with compressed grains, tables and the
//!   directory; a footer at the end says where the directory is            marker.rs
//! ```
//!
//! ESX has extents of its own for redo logs: COWD (cowd.rs) and SESPARSE (sesparse.rs).
//!
//! A grain directory has an entry for each grain table; a grain table has an entry for each grain,
//! the sector of the grain in the extent's file. A parser takes a slice and its offset in the file
//! and returns a value or a [`VmdkError`]. No parser panics on any input, and no allocation is
//! sized by a number from a file.

mod cowd;
mod descriptor;
pub mod edit;
mod error;
mod mapping;
mod marker;
pub mod one_sector;
mod sesparse;
mod sparse;
mod stream;

pub use cowd::{COWD_FREE_AT, COWD_HEADER_BYTES, COWD_TABLE_ENTRIES, COWD_UNCLEAN_AT, CowdHeader};
pub use descriptor::{
    Access, DESCRIPTOR_MAX_BYTES, Descriptor, EXTENTS_MAX, Extent, ExtentKind, Fragments, NO_PARENT, is_descriptor,
};
pub use error::VmdkError;
pub use mapping::{MAPPING_MAX_BYTES, MappedDevice, Mapping};
pub use marker::{GRAIN_MARKER_BYTES, GrainMarker, Marker, MarkerKind};
pub use sesparse::{
    SESPARSE_GRAIN_SECTORS, SESPARSE_HEADER_BYTES, SESPARSE_TABLE_ENTRIES, SeSparseGrain, SeSparseHeader,
    sesparse_directory_entry, sesparse_replays_journal, sesparse_table_of, sesparse_volatile_header,
};
pub use sparse::{
    GRAIN_ABSENT, GRAIN_ZERO, GTES_PER_TABLE, Placing, SPARSE_HEADER_BYTES, SPARSE_UNCLEAN_AT, SparseFlags,
    SparseHeader, TEXT_CHECK,
};
pub use stream::{STREAM_GRAIN_BYTES, STREAM_SIZE_MAX_BYTES, StreamError, StreamWriter};

/// Sector in bytes: the unit of most numbers, whatever the disk's sector.
pub const SECTOR_BYTES: u64 = 512;

/// The `N` bytes at offset `at`. Bytes beyond the end read as zeros; callers have checked the
/// length.
pub(crate) fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut value = [0; N];
    if let Some(found) = bytes.get(at..at + N) {
        value.copy_from_slice(found);
    }
    value
}
