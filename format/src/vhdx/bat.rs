//! The block allocation table (BAT): an array of 64-bit entries, and the arithmetic that locates a
//! block's entry (MS-VHDX 2.5).
//!
//! The entries of each *chunk* of payload blocks are followed by the entry of the chunk's sector
//! bitmap block, in every type of disk:
//!
//! ```text
//!   P0 P1 ... P(ratio-1) B0 | P(ratio) ... P(2*ratio-1) B1 | ...
//!   ratio = 2^23 * logical sector size / block size
//! ```

use super::{BITMAP_BLOCK_BYTES, Invalid, MAX_BLOCK_BYTES, MAX_SIZE_BYTES, MIB, MIN_BLOCK_BYTES, Result};

/// Size of an entry in bytes.
pub const BAT_ENTRY_BYTES: u64 = 8;
const OFFSET_SHIFT: u32 = 20;
const STATE_MASK: u64 = 7;
const STRUCTURE: &str = "BAT entry";

/// The state of a payload block (MS-VHDX 2.5.1.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum PayloadState {
    /// Never written: shows the parent's data, or zeros without a parent.
    NotPresent = 0,
    /// Undefined contents; hides the parent's data.
    Undefined = 1,
    /// Reads as zeros; hides the parent's data.
    Zero = 2,
    /// Discarded; hides the parent's data.
    Unmapped = 3,
    /// The whole block is in the file.
    FullyPresent = 6,
    /// The sectors set in the sector bitmap are in the file; the others show the parent's data.
    PartiallyPresent = 7,
}

/// The state of a sector bitmap block (MS-VHDX 2.5.1.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum BitmapState {
    /// Not allocated.
    NotPresent = 0,
    /// In the file.
    Present = 6,
}

/// A BAT entry: the state in bits 0 to 2, the offset in MiB in bits 20 to 63; bits 3 to 19
/// reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BatEntry(pub u64);

impl BatEntry {
    /// The entry of a payload block. `offset_bytes` must be a multiple of 1 MiB; lower bits are
    /// dropped.
    pub fn payload(state: PayloadState, offset_bytes: u64) -> Self {
        Self(offset_bytes & !(MIB - 1) | state as u64)
    }

    /// The entry of a sector bitmap block; `offset_bytes` as for [`BatEntry::payload`].
    pub fn bitmap(state: BitmapState, offset_bytes: u64) -> Self {
        Self(offset_bytes & !(MIB - 1) | state as u64)
    }

    /// The entry stored in the file as these bytes.
    pub fn from_le_bytes(bytes: [u8; 8]) -> Self {
        Self(u64::from_le_bytes(bytes))
    }

    /// The bytes to store in the file.
    pub fn to_le_bytes(self) -> [u8; 8] {
        self.0.to_le_bytes()
    }

    /// Offset of the block in the file in bytes: a multiple of 1 MiB.
    pub fn offset_bytes(self) -> u64 {
        self.0 >> OFFSET_SHIFT << OFFSET_SHIFT
    }

    /// Bits 3 to 19, which must be 0.
    pub fn reserved_bits(self) -> u64 {
        self.0 & (MIB - 1) & !STATE_MASK
    }

    /// The state of a payload block.
    ///
    /// # Errors
    /// For the reserved states 4 and 5.
    pub fn payload_state(self) -> Result<PayloadState> {
        match self.0 & STATE_MASK {
            0 => Ok(PayloadState::NotPresent),
            1 => Ok(PayloadState::Undefined),
            2 => Ok(PayloadState::Zero),
            3 => Ok(PayloadState::Unmapped),
            6 => Ok(PayloadState::FullyPresent),
            7 => Ok(PayloadState::PartiallyPresent),
            other => Err(Invalid::new(STRUCTURE, 0, format!("payload block state {other}"), "0, 1, 2, 3, 6 or 7")),
        }
    }

    /// The state of a sector bitmap block. State 7 is not defined for bitmap blocks (MS-VHDX
    /// 2.5.1.2), but Microsoft's own code reads it as present.
    ///
    /// # Errors
    /// For all states but 0, 6 and 7.
    pub fn bitmap_state(self) -> Result<BitmapState> {
        match self.0 & STATE_MASK {
            0 => Ok(BitmapState::NotPresent),
            6 | 7 => Ok(BitmapState::Present),
            other => Err(Invalid::new(STRUCTURE, 0, format!("sector bitmap block state {other}"), "0 or 6")),
        }
    }
}

/// The block arithmetic of one disk. For every value of this type, no result overflows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatGeometry {
    size_bytes: u64,
    block_bytes: u32,
    logical_sector_bytes: u32,
}

impl BatGeometry {
    /// The geometry of a disk of `size_bytes` (a multiple of the sector size, up to 64 TiB), with
    /// blocks of `block_bytes` (a power of two from 1 to 256 MiB) and logical sectors of 512 or
    /// 4096 bytes.
    ///
    /// # Errors
    /// For all other values. The offset in the error has no meaning.
    pub fn new(size_bytes: u64, block_bytes: u32, logical_sector_bytes: u32) -> Result<Self> {
        if logical_sector_bytes != 512 && logical_sector_bytes != 4096 {
            return Err(Invalid::new("logical sector size", 0, logical_sector_bytes, "512 or 4096 bytes"));
        }
        if !block_bytes.is_power_of_two() || !(MIN_BLOCK_BYTES..=MAX_BLOCK_BYTES).contains(&block_bytes) {
            return Err(Invalid::new(
                "file parameters",
                0,
                format!("a block size of {block_bytes} bytes"),
                "a power of two from 1 MiB to 256 MiB",
            ));
        }
        if size_bytes == 0 || size_bytes > MAX_SIZE_BYTES || !size_bytes.is_multiple_of(u64::from(logical_sector_bytes))
        {
            let expected = format!("a multiple of {logical_sector_bytes} bytes, above 0 and up to 64 TiB");
            return Err(Invalid::new("virtual disk size", 0, format!("{size_bytes} bytes"), expected));
        }
        Ok(Self { size_bytes, block_bytes, logical_sector_bytes })
    }

    /// Virtual size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Size of a payload block in bytes.
    pub fn block_bytes(&self) -> u64 {
        u64::from(self.block_bytes)
    }

    /// Size of a logical sector in bytes.
    pub fn logical_sector_bytes(&self) -> u32 {
        self.logical_sector_bytes
    }

    /// Number of logical sectors in a block.
    pub fn sectors_per_block(&self) -> u32 {
        self.block_bytes / self.logical_sector_bytes
    }

    /// Number of payload blocks in a chunk.
    fn chunk_ratio(&self) -> u64 {
        (u64::from(self.logical_sector_bytes) << 23) / self.block_bytes()
    }

    /// Number of payload blocks in the disk.
    pub fn payload_blocks(&self) -> u64 {
        self.size_bytes.div_ceil(self.block_bytes())
    }

    /// Number of chunks in the disk, which is also that of sector bitmap blocks.
    pub fn chunks(&self) -> u64 {
        self.payload_blocks().div_ceil(self.chunk_ratio())
    }

    /// The chunk that contains a block.
    pub fn chunk_of(&self, block: u64) -> u64 {
        block / self.chunk_ratio()
    }

    /// Index of the BAT entry of a payload block.
    pub fn payload_index(&self, block: u64) -> u64 {
        block + block / self.chunk_ratio()
    }

    /// Index of the BAT entry of a chunk's sector bitmap block.
    pub fn bitmap_index(&self, chunk: u64) -> u64 {
        chunk * (self.chunk_ratio() + 1) + self.chunk_ratio()
    }

    /// The block to which the BAT entry at `index` belongs.
    pub fn what_is(&self, index: u64) -> EntryKind {
        let (chunk, within) = (index / (self.chunk_ratio() + 1), index % (self.chunk_ratio() + 1));
        if within == self.chunk_ratio() {
            EntryKind::Bitmap { chunk }
        } else {
            EntryKind::Payload { block: chunk * self.chunk_ratio() + within }
        }
    }

    /// Number of entries in the table: up to the last payload block or, with a parent, up to the
    /// last chunk's bitmap.
    pub fn entries(&self, has_parent: bool) -> u64 {
        if has_parent {
            self.chunks() * (self.chunk_ratio() + 1)
        } else {
            let blocks = self.payload_blocks();
            blocks + (blocks - 1) / self.chunk_ratio()
        }
    }

    /// Number of bytes of a block within the disk: less than a block only for the last one, 0
    /// beyond.
    pub fn bytes_in_disk(&self, block: u64) -> u64 {
        self.size_bytes.saturating_sub(block.saturating_mul(self.block_bytes())).min(self.block_bytes())
    }

    /// Offset of a block's bits in its chunk's bitmap block, and their length, both in bytes. Both
    /// are multiples of 8.
    pub fn bitmap_place(&self, block: u64) -> (u64, u64) {
        let len_bytes = u64::from(self.sectors_per_block()) / 8;
        let offset_bytes = block % self.chunk_ratio() * len_bytes;
        debug_assert!(offset_bytes + len_bytes <= BITMAP_BLOCK_BYTES);
        (offset_bytes, len_bytes)
    }
}

/// The block to which a BAT entry belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// A payload block.
    Payload {
        /// The block number.
        block: u64,
    },
    /// The sector bitmap of a chunk.
    Bitmap {
        /// The chunk number.
        chunk: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    prop_compose! {
        fn geometries()(sector in prop::sample::select(vec![512u32, 4096]), shift in 20u32..=28, sectors in 1u64..(1 << 34)) -> BatGeometry {
            BatGeometry::new((sectors * u64::from(sector)).min(MAX_SIZE_BYTES), 1 << shift, sector).unwrap()
        }
    }

    #[test]
    fn the_examples_of_the_specification() {
        // MS-VHDX 2.3: block size 2 MiB and 512-byte sectors give a chunk ratio of 2048.
        let geometry = BatGeometry::new(10 << 40, 2 << 20, 512).unwrap();
        assert_eq!(geometry.chunk_ratio(), 2048);
        assert_eq!(
            (geometry.payload_index(2047), geometry.bitmap_index(0), geometry.payload_index(2048)),
            (2047, 2048, 2049)
        );
        let small = BatGeometry::new(1 << 30, 2 << 20, 512).unwrap();
        assert_eq!((small.entries(false), small.entries(true)), (512, 2049));
    }

    #[test]
    fn invalid_geometries_are_refused() {
        assert!(BatGeometry::new(0, 1 << 20, 512).is_err());
        assert!(BatGeometry::new(100, 1 << 20, 512).is_err());
        assert!(BatGeometry::new(512, 1 << 20, 4096).is_err());
        assert!(BatGeometry::new(MAX_SIZE_BYTES + 512, 1 << 20, 512).is_err());
        assert!(BatGeometry::new(512, 3 << 20, 512).is_err());
        assert!(BatGeometry::new(512, 1 << 19, 512).is_err());
        assert!(BatGeometry::new(512, 1 << 29, 512).is_err());
        assert!(BatGeometry::new(512, 1 << 20, 1024).is_err());
    }

    #[test]
    fn a_bitmap_block_is_present_in_states_6_and_7() {
        let states: Vec<_> = (0..8).map(|state| BatEntry(state).bitmap_state().ok()).collect();
        let present = Some(BitmapState::Present);
        assert_eq!(states, [Some(BitmapState::NotPresent), None, None, None, None, None, present, present]);
    }

    proptest! {
        #[test]
        fn indices_are_one_to_one(geometry in geometries(), pick: u64) {
            let block = pick % geometry.payload_blocks();
            let index = geometry.payload_index(block);
            prop_assert_eq!(geometry.what_is(index), EntryKind::Payload { block });
            prop_assert!(index < geometry.entries(false));
            let chunk = geometry.chunk_of(block);
            prop_assert_eq!(geometry.what_is(geometry.bitmap_index(chunk)), EntryKind::Bitmap { chunk });
            prop_assert!(geometry.bitmap_index(chunk) < geometry.entries(true));
            prop_assert_eq!(geometry.payload_index(geometry.payload_blocks() - 1) + 1, geometry.entries(false));
            let (offset_bytes, len_bytes) = geometry.bitmap_place(block);
            prop_assert!(offset_bytes + len_bytes <= BITMAP_BLOCK_BYTES && len_bytes % 8 == 0);
        }

        #[test]
        fn entries_roundtrip(mib in 0u64..(1 << 44), raw: u64) {
            for state in [PayloadState::NotPresent, PayloadState::Undefined, PayloadState::Zero, PayloadState::Unmapped, PayloadState::FullyPresent, PayloadState::PartiallyPresent] {
                let entry = BatEntry::from_le_bytes(BatEntry::payload(state, mib << 20).to_le_bytes());
                prop_assert_eq!((entry.payload_state(), entry.offset_bytes(), entry.reserved_bits()), (Ok(state), mib << 20, 0));
            }
            let entry = BatEntry(raw);
            let _ = (entry.payload_state(), entry.bitmap_state());
            prop_assert_eq!(entry.offset_bytes() | entry.reserved_bits() | raw & 7, raw);
        }
    }
}
