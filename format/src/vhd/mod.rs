//! VHD: the structures of the Virtual Hard Disk Image Format Specification 1.0. All integers are
//! big-endian.
//!
//! ```text
//!   fixed                     dynamic, differencing
//!   ┌──────────────┐          ┌──────────────┐ 0
//!   │ payload      │          │ footer copy  │ 512 bytes                     footer.rs
//!   │  ...         │          ├──────────────┤ footer.data_offset
//!   ├──────────────┤          │ dynamic      │ 1024 bytes                    header.rs
//!   │ footer       │          │ header       │ with up to 8 parent locators  locator.rs
//!   └──────────────┘          ├──────────────┤ header.table_offset
//!                             │ BAT          │ 4 bytes a block: the *sector of its bitmap*
//!                             ├──────────────┤
//!                             │ (batmap)     │ only in files by XenServer    batmap.rs
//!                             ├──────────────┤
//!                             │ bitmap, data │ one for each allocated block, in any order
//!                             │  ...         │
//!                             ├──────────────┤
//!                             │ footer       │ 512 bytes, 511 in very old files
//!                             └──────────────┘
//! ```
//!
//! A parser takes a slice and its offset in the file. It returns a value, or a [`VhdError`] that
//! names the field, its offset, what was found and what was expected. No parser panics on any
//! input, and no allocation is sized by a length from a file.

mod batmap;
mod error;
mod footer;
mod geometry;
mod header;
mod locator;
mod time;

pub use batmap::{BATMAP_HEADER_BYTES, BatmapHeader};
pub use error::{Fault, VhdError};
pub use footer::{
    CREATOR_APP, CREATOR_OS, CREATOR_VERSION, DiskKind, FEATURE_RESERVED, FOOTER_BYTES, Footer, NO_DATA_OFFSET,
    OLD_FOOTER_BYTES,
};
pub use geometry::Chs;
pub use header::{DynamicHeader, HEADER_BYTES, LOCATOR_COUNT};
pub use locator::{LocatorData, LocatorEntry, LocatorKind, encode_path};
pub use time::{seconds_from_unix, seconds_to_unix};

/// Sector size of the format in bytes, whatever the disk's.
pub const SECTOR_BYTES: u64 = 512;

/// The BAT entry of an unallocated block.
pub const BAT_UNUSED: u32 = 0xffff_ffff;

/// The only version of footer and header: major 1, minor 0.
pub const VERSION: u32 = 0x0001_0000;

/// Maximum size of a dynamic or differencing disk in bytes: 2040 GiB, the range of 32-bit sector
/// numbers minus what Windows reserves for metadata.
pub const MAX_DYNAMIC_BYTES: u64 = 2040 << 30;

/// Maximum length of a locator's data that is read, in bytes: the longest path of Windows in
/// UTF-16, with its terminator.
pub const MAX_LOCATOR_BYTES: u32 = 65536;

/// The usual block size in bytes.
pub const DEFAULT_BLOCK_BYTES: u32 = 2 << 20;

/// Size in bytes of the sector bitmap before each block: one bit for each sector, rounded up to
/// whole sectors.
///
/// For a block smaller than a sector the result is 0.
pub const fn bitmap_bytes(block_bytes: u32) -> u64 {
    (block_bytes as u64 / SECTOR_BYTES).div_ceil(8).next_multiple_of(SECTOR_BYTES)
}

/// The checksum of a structure: the one's complement of the sum of its bytes, with the checksum
/// field counted as zeros.
pub(crate) fn checksum(bytes: &[u8], field: std::ops::Range<usize>) -> u32 {
    let sum = bytes
        .iter()
        .enumerate()
        .filter(|(index, _)| !field.contains(index))
        .fold(0u32, |sum, (_, &byte)| sum.wrapping_add(u32::from(byte)));
    !sum
}

/// The `N` bytes at offset `at`. Bytes beyond the end read as zeros; callers have checked the
/// length.
pub(crate) fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut value = [0; N];
    if let Some(found) = bytes.get(at..at + N) {
        value.copy_from_slice(found);
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bitmaps_are_whole_sectors() {
        assert_eq!(bitmap_bytes(2 << 20), 512);
        assert_eq!(bitmap_bytes(512), 512);
        assert_eq!(bitmap_bytes(4 << 20), 1024);
        assert_eq!(bitmap_bytes(1 << 31), 512 << 10);
    }

    #[test]
    fn the_checksum_field_counts_as_zeros() {
        assert_eq!(checksum(&[1, 2, 3, 4], 1..3), !5);
        assert_eq!(checksum(&[], 0..0), u32::MAX);
    }
}
