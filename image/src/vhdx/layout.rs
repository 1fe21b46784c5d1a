//! Where a VHDX has its tables, and what a BAT entry means.
//!
//! A [`Layout`] never changes. An image that grows gets a new one (`grow.rs`), and threads that
//! read tables by the old layout read again. A layout converts entries into block states. An entry
//! is valid only if its block lies inside the file and does not overlap metadata.
//!
//! Some entries that the specification forbids have only one possible meaning. They are read as
//! Microsoft's own code (openvmm, vm/devices/storage/vhdx) reads them, and `check` reports them as
//! notes:
//!
//! - PARTIALLY_PRESENT in a disk without a parent means FULLY_PRESENT. The sector bitmap says which
//!   sectors are the parent's (MS-VHDX 2.5.1.1). Without a parent there are none, and bitmap
//!   entries are reserved, so no program maintains such a bitmap.
//! - In a disk without a parent the entry of a bitmap block is ignored.
//! - State 7 of a bitmap block means 6, present.
//!
//! An entry without data may have an offset: space that the block had and keeps
//! ([`Layout::kept_place`]). A differencing disk that was shrunk has entries for blocks beyond its
//! end. They are ignored, but their space stays reserved.

use super::corrupt;
use crate::{BlockState, error::ImageError};
use diskwright_format::vhdx::{
    BITMAP_BLOCK_BYTES, BatEntry, BatGeometry, BitmapState, Invalid, MIB, PayloadState, bat::BAT_ENTRY_BYTES,
};
use diskwright_store::Store;

/// Limit for offsets in the file, in MiB: twice the largest disk.
pub(super) const MAX_FILE_MIB: u64 = (128 << 40) / MIB;

/// The meaning of a payload entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EntryState {
    /// NOT_PRESENT: reads the parent's data.
    Absent,
    /// UNDEFINED, ZERO or UNMAPPED: reads as zeros.
    Zero,
    /// FULLY_PRESENT, at this offset of the file.
    Data { offset_bytes: u64 },
    /// PARTIALLY_PRESENT: the sectors that are set in the bitmap are at this offset of the file.
    Partial { offset_bytes: u64 },
}

impl From<EntryState> for BlockState {
    fn from(state: EntryState) -> Self {
        match state {
            EntryState::Absent => Self::Absent,
            EntryState::Zero => Self::Zero,
            EntryState::Data { offset_bytes } => Self::data(offset_bytes),
            EntryState::Partial { offset_bytes } => Self::partial(offset_bytes),
        }
    }
}

/// Offsets and geometry of one image.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    pub(super) geometry: BatGeometry,
    pub(super) has_parent: bool,
    /// LeaveBlocksAllocated, and no parent.
    pub(super) fixed: bool,
    pub(super) bat_offset_bytes: u64,
    /// Start and end of the header section, the log, and all regions. Sorted, without overlaps.
    pub(super) metadata: Vec<(u64, u64)>,
}

impl Layout {
    /// Number of BAT entries.
    pub(super) fn entries(&self) -> u64 {
        self.geometry.entries(self.has_parent)
    }

    /// File offset of an entry.
    pub(super) fn entry_offset_bytes(&self, index: u64) -> u64 {
        self.bat_offset_bytes + index * BAT_ENTRY_BYTES
    }

    /// First byte after the BAT's entries.
    pub(super) fn bat_end_bytes(&self) -> u64 {
        self.entry_offset_bytes(self.entries())
    }

    /// Whether a range overlaps the header section, the log or a region.
    pub(super) fn overlaps_metadata(&self, start_bytes: u64, end_bytes: u64) -> bool {
        let after = self.metadata.partition_point(|&(_, end)| end <= start_bytes);
        self.metadata.get(after).is_some_and(|&(start, _)| start < end_bytes)
    }

    /// The state of a block by its entry. `file_bytes` is the file's length.
    ///
    /// # Errors
    /// For an undefined state, and for an offset beyond the end of the file or in metadata.
    pub(super) fn block_state(&self, block: u64, entry: BatEntry, file_bytes: u64) -> Result<EntryState, Invalid> {
        let offset_bytes = entry.offset_bytes();
        match entry.payload_state()? {
            PayloadState::NotPresent => Ok(EntryState::Absent),
            PayloadState::Undefined | PayloadState::Zero | PayloadState::Unmapped => Ok(EntryState::Zero),
            PayloadState::FullyPresent => {
                self.check_place(
                    offset_bytes,
                    self.geometry.bytes_in_disk(block),
                    self.geometry.block_bytes(),
                    file_bytes,
                )?;
                Ok(EntryState::Data { offset_bytes })
            }
            PayloadState::PartiallyPresent => {
                self.check_place(
                    offset_bytes,
                    self.geometry.bytes_in_disk(block),
                    self.geometry.block_bytes(),
                    file_bytes,
                )?;
                Ok(if self.has_parent {
                    EntryState::Partial { offset_bytes }
                } else {
                    EntryState::Data { offset_bytes }
                })
            }
        }
    }

    /// The space that an entry without data keeps for its block; `None` unless the whole block lies
    /// inside the file and does not overlap metadata. UNDEFINED and UNMAPPED blocks may keep space
    /// in every disk (MS-VHDX 2.5.1.1). ZERO must not have an offset; if it has one, the space
    /// counts as kept, so that no other block gets it. NOT_PRESENT keeps space only in a fixed
    /// disk, as LeaveBlocksAllocated says that blocks keep their space.
    pub(super) fn kept_place(&self, entry: BatEntry, file_bytes: u64) -> Option<u64> {
        let keeps = match entry.payload_state() {
            Ok(PayloadState::Undefined | PayloadState::Zero | PayloadState::Unmapped) => true,
            Ok(PayloadState::NotPresent) => self.fixed,
            _ => false,
        };
        let block_bytes = self.geometry.block_bytes();
        // The survey does not mark what lies further on, so two blocks could get one place.
        let max_bytes = (MAX_FILE_MIB * MIB).saturating_sub(block_bytes);
        let offset_bytes =
            Some(entry.offset_bytes()).filter(|&at_bytes| keeps && at_bytes != 0 && at_bytes <= max_bytes)?;
        self.check_place(offset_bytes, block_bytes, block_bytes, file_bytes).ok().map(|()| offset_bytes)
    }

    /// Offset of a chunk's sector bitmap block; `None` if it has none.
    ///
    /// # Errors
    /// As [`Layout::block_state`].
    pub(super) fn bitmap_place(&self, entry: BatEntry, file_bytes: u64) -> Result<Option<u64>, Invalid> {
        if !self.has_parent {
            return Ok(None);
        }
        match entry.bitmap_state()? {
            BitmapState::NotPresent => Ok(None),
            BitmapState::Present => {
                let offset_bytes = entry.offset_bytes();
                self.check_place(offset_bytes, BITMAP_BLOCK_BYTES, BITMAP_BLOCK_BYTES, file_bytes)?;
                Ok(Some(offset_bytes))
            }
        }
    }

    /// Checks that `needed_bytes` lie inside the file and that `block_bytes` do not overlap
    /// metadata. Some writers cut the last block of the file at the end of the disk.
    fn check_place(
        &self,
        offset_bytes: u64,
        needed_bytes: u64,
        block_bytes: u64,
        file_bytes: u64,
    ) -> Result<(), Invalid> {
        let end_bytes = offset_bytes.checked_add(block_bytes);
        if offset_bytes.checked_add(needed_bytes).is_none_or(|end| end > file_bytes) || end_bytes.is_none() {
            let expected =
                format!("a block that ends within the file's {file_bytes} bytes; was the file copied completely?");
            return Err(Invalid::new("BAT entry", 0, format!("a block at {offset_bytes}"), expected));
        }
        if offset_bytes < MIB || self.overlaps_metadata(offset_bytes, end_bytes.unwrap_or(u64::MAX)) {
            return Err(Invalid::new(
                "BAT entry",
                0,
                format!("a block at {offset_bytes}"),
                "a block that does not overlap the file's metadata",
            ));
        }
        Ok(())
    }

    /// Adds the file offset of the entry to `invalid`.
    pub(super) fn corrupt_entry(&self, store: &dyn Store, index: u64, invalid: Invalid) -> ImageError {
        corrupt(store, self.entry_offset_bytes(index), invalid)
    }
}
