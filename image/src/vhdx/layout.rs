//! Where a VHDX keeps its tables, and what a BAT entry means in this file.
//!
//! A [`Layout`] never changes. An image that grows gets another one (`grow.rs`), and whoever read
//! tables by the old one reads again. A layout turns entries into block states. An entry is
//! believed only when the block it names lies inside the file and clear of all metadata.
//!
//! Entries that the specification forbids, but that have only one meaning, are read as Microsoft's
//! own code (openvmm, vm/devices/storage/vhdx) reads them, and `check` notes them:
//!
//! - PARTIALLY_PRESENT in a disk without a parent is FULLY_PRESENT. The sector bitmap tells which
//!   sectors are the parent's (MS-VHDX 2.5.1.1). Without a parent no sector is, and the entries of
//!   bitmap blocks are reserved there, so no program keeps a bitmap that could be asked.
//! - In a disk without a parent the entry of a bitmap block is ignored, whatever it says.
//! - State 7 of a bitmap block is 6, present.
//!
//! An entry without data may name a place: the space that the block had and keeps
//! ([`Layout::kept_place`]). A differencing disk that was made smaller has entries for blocks
//! beyond its end; they mean nothing, but their space stays reserved.

use super::corrupt;
use crate::{error::ImageError, image::BlockState};
use diskwright_format::vhdx::{
    BITMAP_BLOCK_BYTES, BatEntry, BatGeometry, BitmapState, Invalid, MIB, PayloadState, bat::BAT_ENTRY_BYTES,
};
use diskwright_store::Store;

/// What a payload entry says of its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EntryState {
    /// NOT_PRESENT: ask the parent.
    Absent,
    /// UNDEFINED, ZERO or UNMAPPED: reads as zeros.
    Zero,
    /// FULLY_PRESENT, at this offset of the file.
    Data { offset_bytes: u64 },
    /// PARTIALLY_PRESENT: the sectors that the bitmap names are at this offset of the file.
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

/// See the module.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    pub(super) geometry: BatGeometry,
    pub(super) has_parent: bool,
    /// LeaveBlocksAllocated, and no parent.
    pub(super) fixed: bool,
    pub(super) bat_offset_bytes: u64,
    /// First byte and end of the header section, the log, and all regions; sorted, apart from each
    /// other.
    pub(super) metadata: Vec<(u64, u64)>,
}

impl Layout {
    /// Entries of the BAT.
    pub(super) fn entries(&self) -> u64 {
        self.geometry.entries(self.has_parent)
    }

    /// Where an entry is in the file.
    pub(super) fn entry_offset_bytes(&self, index: u64) -> u64 {
        self.bat_offset_bytes + index * BAT_ENTRY_BYTES
    }

    /// First byte after the BAT's entries.
    pub(super) fn bat_end_bytes(&self) -> u64 {
        self.entry_offset_bytes(self.entries())
    }

    /// Whether a range touches the header section, the log or a region.
    pub(super) fn touches_metadata(&self, start_bytes: u64, end_bytes: u64) -> bool {
        let after = self.metadata.partition_point(|&(_, end)| end <= start_bytes);
        self.metadata.get(after).is_some_and(|&(start, _)| start < end_bytes)
    }

    /// What a payload entry says of its block. `file_bytes` is the file's length.
    ///
    /// # Errors
    /// A state that is not defined; a place beyond the file's end or in metadata.
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

    /// The space that an entry without data keeps for its block, if that is sound: whole blocks
    /// inside the file, clear of metadata. UNDEFINED and UNMAPPED blocks may keep it in every disk
    /// (MS-VHDX 2.5.1.1). ZERO must not name a place; where it does, the place is taken to be kept,
    /// so that no other block gets it. NOT_PRESENT keeps it in a fixed disk only, for there
    /// LeaveBlocksAllocated promises that a block's space stays its own.
    pub(super) fn kept_place(&self, entry: BatEntry, file_bytes: u64) -> Option<u64> {
        let keeps = match entry.payload_state() {
            Ok(PayloadState::Undefined | PayloadState::Zero | PayloadState::Unmapped) => true,
            Ok(PayloadState::NotPresent) => self.fixed,
            _ => false,
        };
        let block_bytes = self.geometry.block_bytes();
        let offset_bytes = Some(entry.offset_bytes()).filter(|&offset_bytes| keeps && offset_bytes != 0)?;
        self.check_place(offset_bytes, block_bytes, block_bytes, file_bytes).ok().map(|()| offset_bytes)
    }

    /// Where a chunk's sector bitmap block is, if it has one.
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

    /// Some writers cut the last block of the file at the disk's end: `needed_bytes` must be there,
    /// `block_bytes` clear.
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
        if offset_bytes < MIB || self.touches_metadata(offset_bytes, end_bytes.unwrap_or(u64::MAX)) {
            return Err(Invalid::new(
                "BAT entry",
                0,
                format!("a block at {offset_bytes}"),
                "a block clear of the file's metadata",
            ));
        }
        Ok(())
    }

    /// Puts the place of an entry to what is wrong with it.
    pub(super) fn corrupt_entry(&self, store: &dyn Store, index: u64, invalid: Invalid) -> ImageError {
        corrupt(store, self.entry_offset_bytes(index), invalid)
    }
}
