//! The state of one block, and how it changes: where its bytes are, which of its sectors have data,
//! space that is reserved for it, and the changes of its mapping.
//!
//! `image.rs` has the life cycle that these values describe.

use diskwright_store::IoBuf;
use std::sync::Arc;

/// Where the bytes of a block are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockState {
    /// This layer has no data: the block reads the parent's data, or zeros without a parent.
    Absent,
    /// The block reads as zeros and hides the parent's data (ZERO, UNMAPPED, UNDEFINED).
    Zero,
    /// All bytes of the block are at this offset of a store.
    Data {
        /// Index into `Image::stores`.
        store: u16,
        /// Offset of the block's first byte.
        offset_bytes: u64,
    },
    /// Some sectors are at this offset, the others read the parent's data; `Image::sector_bitmap`
    /// says which. The bitmap of a `Partial` block may turn out to be full or empty.
    Partial {
        /// Index into `Image::stores`.
        store: u16,
        /// Offset of the block's first byte.
        offset_bytes: u64,
    },
    /// As [`BlockState::Data`], but a snapshot in the file has the same bytes, so they are not
    /// overwritten: a write to the block allocates new space and stores the whole block there. Only
    /// of images that are open for writing, and only where `Image::shares_blocks` says so.
    Shared {
        /// Index into `Image::stores`.
        store: u16,
        /// Offset of the block's first byte.
        offset_bytes: u64,
    },
    /// All bytes are in the file, compressed: `Image::read_compressed` decompresses them. A write
    /// to the block allocates new space and stores the whole block there.
    Compressed,
    /// The block's table entry is invalid, so the block's data cannot be found. `Image::damage`
    /// says why. Every read of the block fails with that error. Other blocks are not affected.
    Damaged,
}

impl BlockState {
    /// [`BlockState::Data`] at `offset_bytes` of the image's first store.
    pub fn data(offset_bytes: u64) -> Self {
        Self::Data { store: 0, offset_bytes }
    }

    /// [`BlockState::Partial`] at `offset_bytes` of the image's first store.
    pub fn partial(offset_bytes: u64) -> Self {
        Self::Partial { store: 0, offset_bytes }
    }
}

/// Which logical sectors of a block have data in this layer. Sector i is bit i % 64 of word i / 64,
/// counted from the least significant bit, whatever the bit order in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SectorBitmap {
    /// The bits, 64 in each word.
    pub words: Vec<u64>,
    /// Number of valid bits.
    pub sectors: u32,
    /// Logical sector size in bytes: the bytes that one bit stands for.
    pub sector_bytes: u32,
}

impl SectorBitmap {
    /// A bitmap in which no sector has data.
    pub fn empty(sectors: u32, sector_bytes: u32) -> Self {
        Self { words: vec![0; sectors.div_ceil(64) as usize], sectors, sector_bytes }
    }

    /// Whether the bit of `sector` is set. False for sectors beyond the end.
    pub fn get(&self, sector: u32) -> bool {
        sector < self.sectors && self.words.get(sector as usize / 64).is_some_and(|word| word >> (sector % 64) & 1 == 1)
    }

    /// Sets `count` bits from `first`; those beyond the end are ignored.
    pub fn set(&mut self, first: u32, count: u32) {
        for sector in first..first.saturating_add(count).min(self.sectors) {
            self.words[sector as usize / 64] |= 1 << (sector % 64);
        }
    }

    /// Number of set bits.
    pub fn count(&self) -> u32 {
        (0..self.sectors)
            .step_by(64)
            .zip(&self.words)
            .map(|(first, word)| {
                let valid = (self.sectors - first).min(64);
                (word & (u64::MAX >> (64 - valid))).count_ones()
            })
            .sum()
    }

    /// Whether every bit is set.
    pub fn is_full(&self) -> bool {
        self.count() == self.sectors
    }

    /// Whether no bit is set.
    pub fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// The run of equal bits that begins at `sector`: its value, and the first sector after the
    /// run.
    pub fn run_at(&self, sector: u32) -> (bool, u32) {
        let value = self.get(sector);
        let mut end = sector + 1;
        while end < self.sectors && self.get(end) == value {
            end += 1;
        }
        (value, end.min(self.sectors))
    }
}

/// Space reserved for a block.
#[derive(Debug, Clone)]
pub struct Reservation {
    /// Index into `Image::stores`.
    pub store: u16,
    /// Offset of the block's payload. The whole range exists in the store. The range reads as zeros
    /// unless the block was `Partial` or `Data` before.
    pub offset_bytes: u64,
    /// Bytes to write at an offset of the same store together with the first payload (VHD: the
    /// block's sector bitmap). Only the first reservation of a block returns them. When they are
    /// written, the disk calls `ImageWriter::initialised`.
    pub init: Option<(u64, Arc<IoBuf>)>,
}

/// A change of a block's mapping. Committed when the payload is in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Commit {
    /// The whole block has its data (written, or zero because the space was fresh).
    Whole,
    /// These sectors have their data now. The other sectors keep their state.
    Sectors {
        /// First logical sector, counted from the start of the block.
        first: u32,
        /// Number of logical sectors.
        count: u32,
    },
    /// The block reads as zeros. Its space is freed.
    Zero,
    /// The block was discarded. Its space is freed, and here too the block reads as zeros.
    Discard,
    /// The block has no data in this layer any more: it reads the parent's data, or zeros if there
    /// is no parent. Its space is freed.
    Absent,
    /// The block's payload was copied to the place of `ImageWriter::reserve_move`. The block
    /// keeps its state and its sectors. Its former space is freed.
    Moved,
}

/// A lower place in the file for a block that has space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MovePlace {
    /// Index into `Image::stores`.
    pub store: u16,
    /// Present offset of the block's payload.
    pub from_bytes: u64,
    /// Offset to which the payload is copied. The range may hold stale data.
    pub to_bytes: u64,
    /// Length of the payload: the block's length, or less for the last block of some files.
    pub len_bytes: u64,
}

/// Where a block can be moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoveTo {
    /// No free space lies below the block, or the block has no space.
    Stay,
    /// This place is reserved for the block.
    Place(MovePlace),
}
