//! A smaller size for a VDI. No other thread uses the image.
//!
//! ```text
//!   1  flush, survey                                  the map in the file is current and sound
//!   2  header: size, length of the map (one sector) ─▶ sync            the atomic change
//!   3  bytes of the last block beyond the new end zeroed; spaces of the other blocks punched
//!   4  a new survey: these spaces are free, the file is cut after its last block, the header
//!      counts its spaces
//! ```
//!
//! Why a power cut does no harm: entries behind the length of the map mean nothing to any program,
//! so their spaces are leaked from step 2 on, and every session surveys the file before it changes
//! an entry. The size goes first, because a disk of the old size without its last blocks would have
//! lost data. The close moves the last blocks into the gaps, as after any other session.
//!
//! A growth writes the entries of its new blocks again, and zeroes the end of the last block, so
//! what a cut has left of steps 3 and 4 never becomes visible.

use super::{layout::SECTOR_BYTES, write::Writing};
use crate::{ImageError, Result, space::HolePunches};
use diskwright_format::vdi::VdiEntry;
use diskwright_store::FileRange;
use std::{io, sync::PoisonError};

impl Writing {
    pub(super) fn check_smaller(&self, size_bytes: u64) -> Result<()> {
        let old_bytes = self.size_bytes();
        let hint = if size_bytes > old_bytes {
            "the size must be at most the present one"
        } else if size_bytes == 0 || !size_bytes.is_multiple_of(SECTOR_BYTES) {
            "the size must be a multiple of 512 bytes above 0"
        } else {
            return Ok(());
        };
        Err(self.unsupported(&format!("a new size of {size_bytes} bytes for a VDI of {old_bytes}"), hint))
    }

    /// Makes the disk smaller, by the steps of this module.
    pub(super) fn make_smaller(&self, size_bytes: u64) -> Result<()> {
        self.check_smaller(size_bytes)?;
        self.barrier.check()?;
        let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        if size_bytes == self.size_bytes() {
            return Ok(());
        }
        if !self.lock().reserved.is_empty() {
            let busy = io::Error::other("a request is in flight");
            return Err(ImageError::io("make the disk smaller", &*self.store, 0, busy));
        }
        self.barrier.share(|| self.run_flush())?;
        self.survey()?;
        let blocks = size_bytes.div_ceil(self.layout.header.block_bytes.into());
        let dropped = self.spaces_from(blocks)?;
        self.head.change(&*self.store, |sector| {
            sector.set_size(size_bytes, u32::try_from(blocks).unwrap_or(u32::MAX));
            Ok(())
        })?;
        self.barrier.sync("make the smaller size durable")?;
        {
            let mut state = self.lock();
            state.size_bytes = size_bytes;
            state.entries = blocks;
            // What is in memory of the map is read again when it is needed.
            state.pages.clear();
            state.dirty.clear();
            state.moving.clear();
            state.drops += 1;
            state.space = None;
        }
        self.zero_end(size_bytes)?;
        HolePunches::of(dropped.into_iter()).punch_all(&*self.store);
        self.survey()?;
        Ok(self.barrier.sync("make the smaller disk durable")?)
    }

    /// The spaces of the blocks from `first` on. The survey has shown that no other block has them.
    fn spaces_from(&self, first: u64) -> Result<Vec<FileRange>> {
        let header = &self.layout.header;
        let entries = self.lock().entries;
        let mut spaces = Vec::new();
        self.layout.each_entry(&*self.store, first, entries, &mut |_, entry| {
            if let VdiEntry::Space(space) = entry {
                let offset_bytes = self.layout.payload_bytes(space) - u64::from(header.extra_bytes);
                spaces.push(FileRange { offset_bytes, len_bytes: header.space_bytes() });
            }
            Ok(true)
        })?;
        Ok(spaces)
    }
}
