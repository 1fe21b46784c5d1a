//! The batmap of XenServer (blktap's libvhd): a structure between the BAT and the first block.
//!
//! ```text
//!    BAT, in whole sectors │ header, 512 bytes │ map, in whole sectors
//!                                                one bit a block, most significant first
//!
//!    header: 0 cookie "tdbatmap"   8 offset of the map   16 sectors of the map
//!           20 version            24 checksum of the map
//! ```
//!
//! A set bit means that every sector of the block is in this file, so XenServer does not read the
//! block's bitmap. If the bit is clear, the block's bitmap decides.
//!
//! XenServer writes a batmap in files whose creator is "tap". In a file by another creator, the
//! same bytes could be a sector bitmap whose contents a guest has chosen, so callers check the
//! creator first.

use super::{SECTOR_BYTES, field};

/// The cookie of a batmap header.
const BATMAP_COOKIE: &[u8; 8] = b"tdbatmap";
/// Length of a batmap's header in bytes.
pub const BATMAP_HEADER_BYTES: usize = 512;
/// The newest version that libvhd accepts: major 1, minor 2.
const MAX_BATMAP_VERSION: u32 = 0x0001_0002;
/// The version whose checksum adds the bytes as signed numbers.
const SIGNED_BATMAP_VERSION: u32 = 0x0001_0001;

/// The header of a batmap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatmapHeader {
    /// Offset of the map in the file, in bytes.
    pub map_offset: u64,
    /// Length of the map in sectors of 512 bytes.
    pub map_sectors: u32,
    /// Major version in the upper half, minor in the lower.
    pub version: u32,
    /// Checksum of the map.
    pub checksum: u32,
}

impl BatmapHeader {
    /// Parses a header; `None` if the bytes are no batmap that libvhd would accept.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < BATMAP_HEADER_BYTES || &bytes[..8] != BATMAP_COOKIE {
            return None;
        }
        let u32_at = |at| u32::from_be_bytes(field(bytes, at));
        let version = u32_at(20);
        (version <= MAX_BATMAP_VERSION).then(|| Self {
            map_offset: u64::from_be_bytes(field(bytes, 8)),
            map_sectors: u32_at(16),
            version,
            checksum: u32_at(24),
        })
    }

    /// The header as bytes.
    pub fn to_bytes(&self) -> [u8; BATMAP_HEADER_BYTES] {
        let mut bytes = [0; BATMAP_HEADER_BYTES];
        bytes[..8].copy_from_slice(BATMAP_COOKIE);
        bytes[8..16].copy_from_slice(&self.map_offset.to_be_bytes());
        bytes[16..20].copy_from_slice(&self.map_sectors.to_be_bytes());
        bytes[20..24].copy_from_slice(&self.version.to_be_bytes());
        bytes[24..28].copy_from_slice(&self.checksum.to_be_bytes());
        bytes
    }

    /// Length of the map in bytes.
    pub fn map_bytes(&self) -> u64 {
        u64::from(self.map_sectors) * SECTOR_BYTES
    }

    /// The checksum of a map for this version: the one's complement of the sum of its bytes.
    pub fn checksum_of(&self, map: &[u8]) -> u32 {
        let is_signed = self.version == SIGNED_BATMAP_VERSION;
        let value = |byte: u8| if is_signed { i32::from(byte.cast_signed()).cast_unsigned() } else { u32::from(byte) };
        !map.iter().fold(0u32, |sum, &byte| sum.wrapping_add(value(byte)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn checksums_count_as_libvhd_counts_them() {
        let header = |version| BatmapHeader { map_offset: 0, map_sectors: 1, version, checksum: 0 };
        assert_eq!(header(0x0001_0002).checksum_of(&[0xff, 0x80, 1]), !(0xff + 0x80 + 1));
        assert_eq!(header(0x0001_0001).checksum_of(&[0xff, 0x80, 1]), !(1u32.wrapping_sub(1).wrapping_sub(128)));
    }

    #[test]
    fn invalid_batmap_headers_are_refused() {
        let header = BatmapHeader { map_offset: 4096, map_sectors: 1, version: 0x0001_0002, checksum: 1 };
        let bytes = header.to_bytes();
        assert_eq!(BatmapHeader::parse(&bytes), Some(header.clone()));
        assert_eq!(BatmapHeader::parse(&bytes[..511]), None);
        assert_eq!(BatmapHeader::parse(&[0; 512]), None);
        assert_eq!(BatmapHeader::parse(&BatmapHeader { version: 0x0001_0003, ..header }.to_bytes()), None);
    }

    proptest! {
        #[test]
        fn roundtrip(map_offset: u64, map_sectors: u32, version in 0..=0x0001_0002u32, checksum: u32) {
            let header = BatmapHeader { map_offset, map_sectors, version, checksum };
            prop_assert_eq!(BatmapHeader::parse(&header.to_bytes()), Some(header));
        }
    }
}
