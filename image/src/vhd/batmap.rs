//! Finds XenServer's batmap, so that no write overlaps it. The batmap is never written.
//! `check_batmap.rs` validates it.
//!
//! ```text
//!   BAT │ batmap header │ map │ parent locators │ first block ...     layout of blktap's libvhd
//! ```
//!
//! A set bit says that all sectors of a block are in this file; XenServer then does not read the
//! block's bitmap. A clear bit says nothing. So missing bits do no harm, and only two changes could
//! make a bit wrong:
//!
//! - A block loses its space while its bit is set. `vhd-util check` then reports damage, and a
//!   block that gets new space would count as full. Header and map are two sectors with a checksum
//!   between them, so a power cut could tear an update, and XenServer refuses to write to a file
//!   with a torn batmap. For this reason no block of a file with a batmap is freed: zeros are
//!   written instead ([`ImageWriter::can_store_zero`](crate::ImageWriter::can_store_zero) is
//!   false). XenServer does not free blocks either.
//! - A bit of a sector bitmap is cleared. No code does that.
//!
//! Blocks that become full are not added to the batmap: XenServer finds them full in their bitmaps
//! and adds them itself.
//!
//! XenServer decides by the creator ("tap") and its version (above 0.1) whether a file has a
//! batmap, and so does this module. In files of other creators the bytes at that offset may be a
//! sector bitmap, which the guest controls by its writes.

use super::overlaps;
use crate::{ImageError, Result};
use diskwright_format::vhd::{BATMAP_HEADER_BYTES, BatmapHeader, DynamicHeader, Footer, SECTOR_BYTES};
use diskwright_store::Store;
use std::ops::Range;

/// Version of "tap" files that have no batmap yet: 0.1.
const VERSION_WITHOUT: u32 = 1;
/// Shift from the disk's size to the bytes of the map that the checksum covers: 8 blocks of 2 MiB
/// for each byte. libvhd knows no other block size.
const CHECKED_SHIFT: u32 = 21 + 3;

/// A batmap at a valid offset.
#[derive(Debug, Clone)]
pub(super) struct Batmap {
    pub header: BatmapHeader,
    pub header_offset: u64,
    /// Length of the part of the map that the checksum covers.
    pub checked_bytes: u64,
}

impl Batmap {
    /// Looks for the batmap after the BAT. `taken` are the ranges of the file's other tables.
    ///
    /// # Errors
    /// `Io`. An invalid batmap counts as none, as XenServer does not use it either.
    pub fn find(
        store: &dyn Store,
        footer: &Footer,
        header: &DynamicHeader,
        taken: &[Range<u64>],
        len_bytes: u64,
    ) -> Result<Option<Self>> {
        if !footer.creator_app.starts_with(b"tap") || footer.creator_version <= VERSION_WITHOUT {
            return Ok(None);
        }
        let table_bytes = (u64::from(header.max_table_entries) * 4).next_multiple_of(SECTOR_BYTES);
        let Some(header_offset) = header.table_offset.checked_add(table_bytes) else { return Ok(None) };
        let header_end = header_offset.saturating_add(BATMAP_HEADER_BYTES as u64);
        if header_end > len_bytes {
            return Ok(None);
        }
        let mut bytes = [0; BATMAP_HEADER_BYTES];
        store
            .read_at(&mut bytes, header_offset)
            .map_err(|e| ImageError::io("read XenServer's batmap", store, header_offset, e))?;
        let Some(header) = BatmapHeader::parse(&bytes) else { return Ok(None) };
        let checked_bytes = (footer.current_size_bytes >> CHECKED_SHIFT).max(1).next_multiple_of(SECTOR_BYTES);
        let batmap = Self { header_offset, checked_bytes, header };
        let map_offset = batmap.header.map_offset;
        let is_inside = map_offset.checked_add(batmap.header.map_bytes()).is_some_and(|end| end <= len_bytes);
        if !is_inside || !map_offset.is_multiple_of(SECTOR_BYTES) || checked_bytes > batmap.header.map_bytes() {
            return Ok(None);
        }
        let [head, map] = batmap.ranges();
        let is_clear = taken.iter().all(|other| !overlaps(other, &head) && !overlaps(other, &map));
        Ok((is_clear && !overlaps(&head, &map)).then_some(batmap))
    }

    /// The ranges of the batmap in the file: header and map.
    pub fn ranges(&self) -> [Range<u64>; 2] {
        let map = self.header.map_offset..self.header.map_offset + self.header.map_bytes();
        [self.header_offset..self.header_offset + BATMAP_HEADER_BYTES as u64, map]
    }
}
