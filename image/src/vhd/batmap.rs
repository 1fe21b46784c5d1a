//! XenServer's batmap: found, kept clear of and checked. It is never written.
//!
//! ```text
//!   BAT │ batmap header │ map │ parent locators │ first block ...        as blktap's libvhd lays a file out
//! ```
//!
//! A set bit says that all sectors of a block are in this file; XenServer then does not read the block's bitmap. A clear bit
//! says nothing. So bits that are missing do no harm, and only two changes could make a bit wrong:
//!
//! - A block loses its space while its bit is set. `vhd-util check` then calls the file damaged, and a block that gets its
//!   space anew would count as full. Header and map are two sectors with a checksum between them, so a power cut could tear
//!   an update apart, and XenServer refuses to write to a file whose batmap is torn. For this reason no block of a file with
//!   a batmap is given up: zeros are written instead ([`ImageWriter::can_store_zero`](crate::ImageWriter::can_store_zero) is
//!   false). XenServer does not give blocks up either.
//! - A bit of a sector bitmap is cleared. Nothing does that.
//!
//! Blocks that become full are not entered: XenServer finds them full in their bitmaps, and enters them itself.
//!
//! XenServer decides by the creator ("tap") and its version (above 0.1) whether there is a batmap, and so does this module. In
//! files by others the cookie may be a sector bitmap, which a guest shapes by what it writes.

use super::{
    check::Findings,
    image::read_bitmap,
    layout::{Blocks, overlaps},
    table,
};
use crate::{ImageError, Result, Severity};
use diskwright_format::vhd::{BATMAP_HEADER_BYTES, BatmapHeader, DynamicHeader, Footer, SECTOR_BYTES};
use diskwright_store::Store;
use std::ops::Range;

/// The version of "tap" files that have no batmap yet: 0.1.
const VERSION_WITHOUT: u32 = 1;
/// Blocks of 2 MiB for each byte of the map that the checksum covers, as a shift: libvhd knows no other block size.
const CHECKED_SHIFT: u32 = 21 + 3;

/// A batmap that lies where it may. See the module.
#[derive(Debug, Clone)]
pub(super) struct Batmap {
    header: BatmapHeader,
    header_offset: u64,
    /// Bytes of the map that the checksum covers.
    checked_bytes: u64,
}

impl Batmap {
    /// Looks for the batmap behind the BAT. `taken` are the ranges of the file's other tables.
    ///
    /// # Errors
    /// `Io`. A batmap that cannot be is none: XenServer would not take it either.
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

    /// What it takes in the file: its header, and its map.
    pub fn ranges(&self) -> [Range<u64>; 2] {
        let map = self.header.map_offset..self.header.map_offset + self.header.map_bytes();
        [self.header_offset..self.header_offset + BATMAP_HEADER_BYTES as u64, map]
    }

    /// Compares the map with its checksum, the BAT and the sector bitmaps.
    ///
    /// # Errors
    /// `Io`.
    pub fn check(&self, store: &dyn Store, blocks: &Blocks, data_end: u64, findings: &mut Findings) -> Result<()> {
        // At most 128 KiB: the size of the disk is checked, and the map lies in the file.
        let mut map = vec![0; self.checked_bytes as usize];
        let at = self.header.map_offset;
        store.read_at(&mut map, at).map_err(|e| ImageError::io("read XenServer's batmap", store, at, e))?;
        let checksum = self.header.checksum_of(&map);
        if checksum != self.header.checksum {
            let message = format!(
                "The checksum of XenServer's batmap is {:#010x}, its map gives {checksum:#010x}: XenServer will not write to this disk.",
                self.header.checksum
            );
            findings.add(Severity::Corrupt, self.header_offset + 24, message);
            return Ok(());
        }
        let mut left = map.clone();
        table::scan(store, blocks, blocks.count, |block, entry| {
            let (index, bit) = ((block / 8) as usize, 0x80u8 >> (block % 8));
            let piece = blocks.place(entry);
            if map.get(index).is_none_or(|byte| byte & bit == 0) || blocks.fault_of(&piece, data_end).is_some() {
                return Ok(true);
            }
            left[index] &= !bit;
            let bits = read_bitmap(store, blocks, &piece)?;
            if !bits.is_full() {
                let message = format!(
                    "XenServer's batmap calls block {block} full, but its bitmap lacks {} of {} sectors: XenServer shows other bytes there.",
                    bits.sectors - bits.count(),
                    bits.sectors
                );
                findings.add(Severity::Corrupt, piece.bitmap_offset, message);
            }
            Ok(true)
        })?;
        let without_space = (0..blocks.count.min(left.len() as u64 * 8))
            .filter(|block| left[(block / 8) as usize] & 0x80 >> (block % 8) != 0);
        for block in without_space {
            let message = format!("XenServer's batmap calls block {block} full, but the block has no space.");
            findings.add(Severity::Corrupt, at + block / 8, message);
        }
        Ok(())
    }
}
