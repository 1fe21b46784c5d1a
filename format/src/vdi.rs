//! VDI, VirtualBox's disk image (version 1.1 of its header). All integers are little-endian.
//!
//! ```text
//!   0x000 text, 64 bytes       0x040 signature 0xbeda107f   0x044 version
//!   0x048 length of header     0x04c type      0x050 flags  0x054 comment, 256 bytes
//!   0x154 block map            0x158 data      0x15c geometry, sector (0x168)
//!   0x170 disk size            0x178 block     0x17c extra  0x180 blocks   0x184 those with space
//!   0x188 id of the image      0x198 id of its contents
//!   0x1a8 id of the parent     0x1b8 id of the parent's contents
//!   0x1c8 geometry of the BIOS, sector (0x1d4); in headers of 400 bytes and more
//!   0x1e0 ours: "dwparnt2"     0x1e8 a second id of the parent's contents that counts
//! ```
//!
//! All of this lies in the first sector of the file, so one write of a sector changes any of it.
//! Programs keep the bytes behind the header as they are, where a merge records the identity that
//! the parent is about to get.
//!
//! The block map has an entry of 32 bits for each block: the number of its space, counted from the
//! start of the data. Each space has `extra` bytes before the block's own.

use crate::invalid::{Invalid, Result};
use uuid::Uuid;

/// The sector with the header.
pub const HEADER_BYTES: usize = 512;
/// Signature at 0x40.
pub const SIGNATURE: u32 = 0xbeda_107f;
/// Smallest block in bytes.
pub const BLOCK_MIN_BYTES: u32 = 4096;
/// Largest block in bytes.
pub const BLOCK_MAX_BYTES: u32 = 256 << 20;

const STRUCTURE: &str = "VDI header";
/// Smallest header length of version 1: to the end of the id of the parent's contents.
const LENGTH_MIN_BYTES: u32 = 0x1c8 - 0x48;
/// Header length of a new image: with the geometry of the BIOS.
const LENGTH_BYTES: u32 = 400;
const VERSION: u32 = 0x0001_0001;
/// The program that makes new images.
const CREATOR: &[u8] = b"<<< Diskwright VDI Disk Image >>>\n";
/// The mark before the second id of the parent's contents, at 0x1e0.
const SECOND_MARK: &[u8; 8] = b"dwparnt2";
const SECOND_AT: usize = 0x1e0;

/// Type of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VdiKind {
    /// A block gets space when it is written.
    Dynamic,
    /// All blocks have space.
    Fixed,
    /// An image of another disk's changes that VirtualBox no longer makes.
    Undo,
    /// Blocks without space are the parent's.
    Differencing,
}

/// An entry of the block map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VdiEntry {
    /// The block has no space: it is the parent's, or zeros.
    Free,
    /// The block reads as zeros.
    Zero,
    /// The block has the space with this number.
    Space(u32),
}

impl VdiEntry {
    /// Parses an entry.
    pub fn parse(word: u32) -> Self {
        match word {
            u32::MAX => Self::Free,
            0xffff_fffe => Self::Zero,
            number => Self::Space(number),
        }
    }

    /// The entry as it is stored.
    pub fn word(self) -> u32 {
        match self {
            Self::Free => u32::MAX,
            Self::Zero => 0xffff_fffe,
            Self::Space(number) => number,
        }
    }
}

/// A header. Whether its places lie in the file was not checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VdiHeader {
    /// The type.
    pub kind: VdiKind,
    /// The comment, without the zeros behind it.
    pub comment: String,
    /// The program that made the image, by its own words in the first 64 bytes.
    pub creator: String,
    /// Offset of the block map in bytes.
    pub map_offset_bytes: u32,
    /// Offset of the first space in bytes.
    pub data_offset_bytes: u32,
    /// Virtual size in bytes.
    pub size_bytes: u64,
    /// Length of a block in bytes: a power of two.
    pub block_bytes: u32,
    /// Bytes before each block.
    pub extra_bytes: u32,
    /// Entries of the block map.
    pub blocks: u32,
    /// Spaces of the file, by its header.
    pub blocks_allocated: u32,
    /// Id of the image.
    pub id: Uuid,
    /// Id of the contents, which changes when the image is written.
    pub modify_id: Uuid,
    /// Id of the parent; nil without a parent.
    pub parent_id: Uuid,
    /// Id of the parent's contents.
    pub parent_modify_id: Uuid,
    /// A second id of the parent's contents that counts.
    pub second_parent_modify_id: Option<Uuid>,
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    if let Some(found) = bytes.get(at..at + N) {
        out.copy_from_slice(found);
    }
    out
}

/// Text up to its first NUL or line break.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0 || byte == b'\n').unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).trim().to_owned()
}

impl VdiHeader {
    /// Whether a file with these first bytes has the signature.
    pub fn has_signature(bytes: &[u8]) -> bool {
        bytes.get(0x40..0x44) == Some(&SIGNATURE.to_le_bytes())
    }

    /// Parses the first [`HEADER_BYTES`] of a file.
    ///
    /// # Errors
    /// For a field that contradicts the format or its limits.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let fail = |at: u64, found: String, expected: &str| Err(Invalid::new(STRUCTURE, at, found, expected));
        if bytes.len() < HEADER_BYTES {
            return Err(Invalid::short(STRUCTURE, bytes.len(), HEADER_BYTES));
        }
        let u32_at = |at| u32::from_le_bytes(array(bytes, at));
        let uuid_at = |at| Uuid::from_bytes_le(array(bytes, at));
        if !Self::has_signature(bytes) {
            return fail(0x40, format!("signature {:#010x}", u32_at(0x40)), "0xbeda107f");
        }
        let version = u32_at(0x44);
        if version >> 16 != 1 {
            return fail(0x44, format!("version {}.{}", version >> 16, version & 0xffff), "version 1");
        }
        if u32_at(0x48) < LENGTH_MIN_BYTES {
            return fail(0x48, format!("a header of {} bytes", u32_at(0x48)), "at least 384 bytes");
        }
        let kind = match u32_at(0x4c) {
            1 => VdiKind::Dynamic,
            2 => VdiKind::Fixed,
            3 => VdiKind::Undo,
            4 => VdiKind::Differencing,
            other => return fail(0x4c, format!("type {other}"), "1 to 4"),
        };
        if u32_at(0x168) != 512 {
            return fail(0x168, format!("sectors of {} bytes", u32_at(0x168)), "512");
        }
        let (map_offset_bytes, data_offset_bytes) = (u32_at(0x154), u32_at(0x158));
        for (at, name, offset) in [(0x154, "block map", map_offset_bytes), (0x158, "data", data_offset_bytes)] {
            if !offset.is_multiple_of(512) || offset < HEADER_BYTES as u32 {
                return fail(at, format!("the {name} at offset {offset}"), "a multiple of 512 behind the header");
            }
        }
        let block_bytes = u32_at(0x178);
        if !block_bytes.is_power_of_two() || !(BLOCK_MIN_BYTES..=BLOCK_MAX_BYTES).contains(&block_bytes) {
            return fail(0x178, format!("blocks of {block_bytes} bytes"), "a power of two from 4 KiB to 256 MiB");
        }
        let extra_bytes = u32_at(0x17c);
        if !extra_bytes.is_multiple_of(512) || extra_bytes > BLOCK_MAX_BYTES {
            return fail(0x17c, format!("{extra_bytes} extra bytes"), "a multiple of 512, at most 256 MiB");
        }
        let size_bytes = u64::from_le_bytes(array(bytes, 0x170));
        let blocks = u32_at(0x180);
        if u64::from(blocks) * u64::from(block_bytes) < size_bytes {
            let found = format!("{blocks} blocks of {block_bytes} bytes");
            return fail(0x180, found, &format!("enough for a disk of {size_bytes} bytes"));
        }
        Ok(Self {
            kind,
            comment: text(&bytes[0x54..0x154]),
            creator: text(&bytes[..0x40]).trim_matches(['<', '>', ' ']).to_owned(),
            map_offset_bytes,
            data_offset_bytes,
            size_bytes,
            block_bytes,
            extra_bytes,
            blocks,
            blocks_allocated: u32_at(0x184),
            id: uuid_at(0x188),
            modify_id: uuid_at(0x198),
            parent_id: uuid_at(0x1a8),
            parent_modify_id: uuid_at(0x1b8),
            second_parent_modify_id: (array(bytes, SECOND_AT) == *SECOND_MARK).then(|| uuid_at(SECOND_AT + 8)),
        })
    }

    /// The sector of a new image with this header. The comment and the creator are not written.
    pub fn to_sector(&self) -> HeaderSector {
        let mut sector = HeaderSector([0; HEADER_BYTES]);
        sector.put(0, CREATOR);
        let kind: u32 = match self.kind {
            VdiKind::Dynamic => 1,
            VdiKind::Fixed => 2,
            VdiKind::Undo => 3,
            VdiKind::Differencing => 4,
        };
        for (at, value) in [
            (0x40, SIGNATURE),
            (0x44, VERSION),
            (0x48, LENGTH_BYTES),
            (0x4c, kind),
            (0x154, self.map_offset_bytes),
            (0x158, self.data_offset_bytes),
            (0x168, 512),
            (0x178, self.block_bytes),
            (0x17c, self.extra_bytes),
            (0x1d4, 512),
        ] {
            sector.put(at, &value.to_le_bytes());
        }
        sector.set_size(self.size_bytes, self.blocks);
        sector.set_allocated(self.blocks_allocated);
        sector.put(0x188, &self.id.to_bytes_le());
        sector.set_modify_id(self.modify_id);
        sector.set_parent(self.parent_id, self.parent_modify_id);
        // Behind the geometry of the BIOS there is always space.
        let _ = sector.set_second_parent(self.second_parent_modify_id);
        sector
    }

    /// Bytes from one space to the next.
    pub fn space_bytes(&self) -> u64 {
        u64::from(self.block_bytes) + u64::from(self.extra_bytes)
    }

    /// Offset of a block's bytes in the file, by the number of its space.
    pub fn payload_offset_bytes(&self, space: u32) -> u64 {
        u64::from(self.data_offset_bytes) + u64::from(space) * self.space_bytes() + u64::from(self.extra_bytes)
    }

    /// Length of the block map in bytes.
    pub fn map_bytes(&self) -> u64 {
        u64::from(self.blocks) * 4
    }
}

/// The sector with the header, of which single fields are changed. Other bytes keep their values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderSector(pub [u8; HEADER_BYTES]);

impl HeaderSector {
    fn put(&mut self, at: usize, value: &[u8]) {
        self.0[at..at + value.len()].copy_from_slice(value);
    }

    /// The number of spaces, after which other programs put the next block.
    pub fn set_allocated(&mut self, spaces: u32) {
        self.put(0x184, &spaces.to_le_bytes());
    }

    /// The size of the disk, and the entries of its block map.
    pub fn set_size(&mut self, size_bytes: u64, blocks: u32) {
        self.put(0x170, &size_bytes.to_le_bytes());
        self.put(0x180, &blocks.to_le_bytes());
    }

    /// The offsets of the block map and of the data.
    pub fn set_places(&mut self, map_offset_bytes: u32, data_offset_bytes: u32) {
        self.put(0x154, &map_offset_bytes.to_le_bytes());
        self.put(0x158, &data_offset_bytes.to_le_bytes());
    }

    /// The id of the contents.
    pub fn set_modify_id(&mut self, id: Uuid) {
        self.put(0x198, &id.to_bytes_le());
    }

    /// The ids of the parent and of its contents.
    pub fn set_parent(&mut self, id: Uuid, modify_id: Uuid) {
        self.put(0x1a8, &id.to_bytes_le());
        self.put(0x1b8, &modify_id.to_bytes_le());
    }

    /// A second id of the parent's contents that counts. `false`: the header is so long that there
    /// is no space for it.
    #[must_use]
    pub fn set_second_parent(&mut self, id: Option<Uuid>) -> bool {
        let length = u64::from(u32::from_le_bytes(array(&self.0, 0x48)));
        if 0x48 + length > SECOND_AT as u64 {
            return id.is_none();
        }
        match id {
            Some(id) => {
                self.put(SECOND_AT, SECOND_MARK);
                self.put(SECOND_AT + 8, &id.to_bytes_le());
            }
            None if array(&self.0, SECOND_AT) == *SECOND_MARK => self.put(SECOND_AT, &[0; 24]),
            None => {}
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> Vec<u8> {
        let mut bytes = vec![0; 512];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, b"<<< Oracle VM VirtualBox Disk Image >>>\n");
        put(0x40, &SIGNATURE.to_le_bytes());
        for (at, value) in [
            (0x44, 0x0001_0001u32),
            (0x48, 400),
            (0x4c, 4),
            (0x154, 512),
            (0x158, 1 << 20),
            (0x168, 512),
            (0x178, 1 << 20),
            (0x17c, 512),
            (0x180, 10),
            (0x184, 3),
        ] {
            put(at, &value.to_le_bytes());
        }
        put(0x170, &(10u64 << 20).to_le_bytes());
        put(0x188, &[7; 16]);
        put(0x1a8, &[8; 16]);
        put(0x54, b"made by hand");
        bytes
    }

    #[test]
    fn a_header_is_read() {
        let header = VdiHeader::parse(&sample()).unwrap();
        assert_eq!((header.kind, header.size_bytes, header.blocks), (VdiKind::Differencing, 10 << 20, 10));
        assert_eq!(
            (header.creator.as_str(), header.comment.as_str()),
            ("Oracle VM VirtualBox Disk Image", "made by hand")
        );
        assert_eq!((header.id, header.parent_id), (Uuid::from_bytes([7; 16]), Uuid::from_bytes([8; 16])));
        assert_eq!(header.payload_offset_bytes(2), (1 << 20) + 2 * ((1 << 20) + 512) + 512);
        assert_eq!(VdiEntry::parse(u32::MAX), VdiEntry::Free);
        assert_eq!((VdiEntry::parse(u32::MAX - 1), VdiEntry::parse(5)), (VdiEntry::Zero, VdiEntry::Space(5)));
    }

    #[test]
    fn every_bad_field_is_told_by_its_offset() {
        for (at, value) in [
            (0x40, 0u32),
            (0x44, 0x0000_0002),
            (0x48, 100),
            (0x4c, 0),
            (0x4c, 5),
            (0x154, 100),
            (0x158, 0),
            (0x168, 4096),
            (0x178, 0),
            (0x178, 3 << 20),
            (0x17c, 1),
            (0x180, 9),
        ] {
            let mut bytes = sample();
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
            assert_eq!(VdiHeader::parse(&bytes).unwrap_err().offset_bytes, at as u64, "{at:#x}");
        }
        assert!(VdiHeader::parse(&sample()[..HEADER_BYTES - 1]).is_err());
    }

    #[test]
    fn a_header_that_is_written_reads_the_same() {
        let mut header = VdiHeader::parse(&sample()).unwrap();
        header.second_parent_modify_id = Some(Uuid::from_u128(9));
        (header.modify_id, header.parent_modify_id) = (Uuid::from_u128(4), Uuid::from_u128(5));
        let mut sector = header.to_sector();
        let found = VdiHeader::parse(&sector.0).unwrap();
        assert_eq!(found.creator, "Diskwright VDI Disk Image");
        let expected = VdiHeader { comment: String::new(), creator: found.creator.clone(), ..header };
        assert_eq!(found, expected);
        assert!(sector.set_second_parent(None));
        assert_eq!(VdiHeader::parse(&sector.0).unwrap().second_parent_modify_id, None);
        sector.0[0x48..0x4c].copy_from_slice(&440u32.to_le_bytes());
        assert!(!sector.set_second_parent(Some(Uuid::nil())) && sector.set_second_parent(None));
        for entry in [VdiEntry::Free, VdiEntry::Zero, VdiEntry::Space(7)] {
            assert_eq!(VdiEntry::parse(entry.word()), entry);
        }
    }

    proptest! {
        #[test]
        fn no_bytes_cause_a_panic(at in 0x44usize..0x1c0, value: u64) {
            let mut bytes = sample();
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            if let Ok(header) = VdiHeader::parse(&bytes) {
                let _ = header.payload_offset_bytes(u32::MAX);
            }
        }
    }
}
