//! Makes a disk smaller. No other thread uses the image.
//!
//! Dynamic and differencing:
//!
//! ```text
//!   1  flush                                          the table in the file is current
//!   2  footer at the end cleared ─▶ sync ─▶ copy at 0 ─▶ sync ─▶ footer at the end ─▶ sync
//!                                                     the copy is the atomic change (grow.rs)
//!   3  space of blocks beyond the new end punched; their entries set to unused; sync
//!   4  header: number of entries ─▶ sync
//!   5  bytes of the last block beyond the new end zeroed
//!   6  a new walk over the blocks; close cuts the file after the last one (growth.rs)
//! ```
//!
//! Why a power cut does no harm: after step 2 the disk has the new size. A table that is longer
//! than needed is valid, and entries beyond the end of the disk are ignored. The size goes first,
//! because a disk of the old size without its last blocks would have lost data.
//!
//! A call with the present size finishes a shrink that was interrupted: it repeats steps 3 to 6 if
//! the table has entries beyond the end that are in use. It punches nothing: the space of an entry
//! that was left behind may belong to another block by now.
//!
//! Fixed (`grow.rs`, [`super::grow::FixedFooter`]): the new footer is written at the new end,
//! inside the part that goes; sync; the file is cut after it, which is the atomic change; sync.

use super::{
    layout::{Blocks, Piece},
    sizes::check_smaller,
    table,
    write::Writing,
};
use crate::{ImageError, Result};
use diskwright_format::vhd::{BAT_UNUSED, DynamicHeader, Footer, HEADER_BYTES, SECTOR_BYTES};
use diskwright_store::{FileRange, Zeroing};
use std::{
    io,
    ops::Range,
    sync::{Arc, PoisonError},
};

/// Entries read or written by one call.
const STEP_ENTRIES: u64 = 16384;

impl Writing {
    /// Makes the disk smaller, or finishes that, by the steps of this module.
    pub(super) fn make_smaller(&self, size_bytes: u64) -> Result<()> {
        self.barrier.check()?;
        let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.blocks();
        let count = check_smaller(&*self.store, &before, size_bytes)?;
        let is_smaller = size_bytes < before.size_bytes();
        self.begin_growth()?;
        if !self.lock().reserved.is_empty() {
            let busy = io::Error::other("a request is in flight");
            return Err(ImageError::io("make the disk smaller", &*self.store, 0, busy));
        }
        self.barrier.share(|| self.run_flush())?;
        let old_count = if is_smaller { before.count } else { self.claimed_entries(&before)? };
        if !is_smaller && !self.has_used_entry(&before, count..old_count)? {
            return Ok(());
        }
        let mut after = smaller(&before, size_bytes, count);
        if is_smaller {
            self.switch_footer(|old| Footer::resized(old, size_bytes))?;
            self.restore_tail()?;
        }
        self.replace_blocks(after.clone());
        self.drop_entries(&before, count..old_count, is_smaller)?;
        self.shorten_table(&mut after)?;
        self.replace_blocks(after.clone());
        self.clear_tail(&after)?;
        self.barrier.sync("make the smaller disk durable")?;
        self.survey_again()
    }

    /// How many entries the table has by its header, if there is nothing else in its place;
    /// otherwise the number of blocks of the disk.
    fn claimed_entries(&self, blocks: &Blocks) -> Result<u64> {
        let claimed = u64::from(blocks.header.max_table_entries);
        let footer_offset = self.lock().growth.as_ref().map_or(0, |growth| growth.footer().1);
        let is_within = blocks.table_offset + claimed * 4 <= footer_offset;
        Ok(if is_within && self.fits_in_place(blocks, claimed)? { claimed } else { blocks.count })
    }

    fn has_used_entry(&self, blocks: &Blocks, entries: Range<u64>) -> Result<bool> {
        let mut found = false;
        self.each_step(blocks, entries, &mut |_, step| {
            found |= step.iter().any(|&entry| entry != BAT_UNUSED);
            Ok(())
        })?;
        Ok(found)
    }

    /// Calls `visit(first index, entries)` for entries as they are in the file.
    fn each_step(
        &self,
        blocks: &Blocks,
        entries: Range<u64>,
        visit: &mut dyn FnMut(u64, &[u32]) -> Result<()>,
    ) -> Result<()> {
        let mut step = vec![0; STEP_ENTRIES as usize];
        for first in entries.clone().step_by(STEP_ENTRIES as usize) {
            let step = &mut step[..(entries.end - first).min(STEP_ENTRIES) as usize];
            table::read_entries(&*self.store, blocks, first, step)?;
            visit(first, step)?;
        }
        Ok(())
    }

    /// From now on the disk has the size of `blocks`. What is in memory of its tables is read again
    /// when it is needed.
    fn replace_blocks(&self, blocks: Blocks) {
        let mut state = self.lock();
        state.table = table::Table::default();
        state.bitmaps.clear();
        state.uninitialised.clear();
        state.drops += 1;
        state.blocks = Arc::new(blocks);
    }

    /// Step 3. The walk of this session has shown that no blocks of `before` share space.
    fn drop_entries(&self, before: &Blocks, entries: Range<u64>, punches: bool) -> Result<()> {
        let footer_offset = self.lock().growth.as_ref().map_or(0, |growth| growth.footer().1);
        let unused = vec![BAT_UNUSED.to_be_bytes()[0]; STEP_ENTRIES as usize * 4];
        self.each_step(before, entries, &mut |first, step| {
            for &entry in step.iter().filter(|&&entry| entry != BAT_UNUSED && punches) {
                let piece = before.place(entry);
                if before.fault_of(&piece, footer_offset).is_none() {
                    self.punch(&piece);
                }
            }
            if step.iter().any(|&entry| entry != BAT_UNUSED) {
                let bytes = &unused[..step.len() * 4];
                self.put("clear entries of the block allocation table", bytes, before.entry_offset(first))?;
            }
            Ok(())
        })?;
        Ok(self.barrier.sync("clear entries of the block allocation table durably")?)
    }

    /// Gives back the space of a block, with its pad: a page that is left in part counts as leaked.
    /// Where the file system cannot punch holes, the space stays allocated: nothing depends on it.
    fn punch(&self, piece: &Piece) {
        let extent = self.lock().growth.as_ref().map(|growth| growth.extent_of(piece));
        let Some((offset_bytes, len_bytes)) = extent else { return };
        let _ = self.store.zero_range(FileRange { offset_bytes, len_bytes }, Zeroing::Deallocate);
    }

    /// Step 4: the header gets the new number of entries.
    fn shorten_table(&self, after: &mut Blocks) -> Result<()> {
        let count = after.count as u32;
        if after.header.max_table_entries == count {
            return Ok(());
        }
        let at = after.header_offset_bytes;
        let mut bytes = [0; HEADER_BYTES];
        let read = self.store.read_at(&mut bytes, at);
        read.map_err(|e| ImageError::io("read the dynamic disk header", &*self.store, at, e))?;
        let new = DynamicHeader::with_table(&bytes, after.table_offset, count);
        self.put("write the dynamic disk header", &new[..SECTOR_BYTES as usize], at)?;
        self.barrier.sync("make the dynamic disk header durable")?;
        after.header.max_table_entries = count;
        Ok(())
    }

    /// Step 6: the file is surveyed again.
    fn survey_again(&self) -> Result<()> {
        let Some(old) = self.lock().growth.take() else { return Ok(()) };
        let growth = old.surveyed_again(&*self.store, &self.blocks(), &self.footer, &self.barrier)?;
        self.lock().growth = Some(growth);
        Ok(())
    }
}

fn smaller(before: &Blocks, size_bytes: u64, count: u64) -> Blocks {
    let last_bytes = size_bytes - (count - 1) * before.block_bytes;
    let mut after = Blocks { count, last_sectors: (last_bytes / SECTOR_BYTES) as u32, ..before.clone() };
    for range in after.metadata.iter_mut().filter(|range| range.start == before.table_offset) {
        range.end = range.start + count * 4;
    }
    after
}
