//! Enlarges an open disk.
//!
//! Dynamic and differencing:
//!
//! ```text
//!   1  bytes of the last block beyond the old end of the disk   zeroed, if the block has space
//!   2  a BAT with entries for the new blocks   extended in place, or copied to the end of the file
//!   3  sync ─▶ header: offset and length of the BAT ─▶ sync
//!   4  footer at the end cleared ─▶ sync ─▶ copy at 0 ─▶ sync    the copy is the atomic change
//!   5  new footer at the end ─▶ sync
//! ```
//!
//! Fixed:
//!
//! ```text
//!   1  the new footer at the new end of the file ─▶ sync         the atomic change
//!   2  the old footer, now inside the disk, is zeroed ─▶ sync
//! ```
//!
//! Why a power cut does no harm: a header with a longer table is valid for the old size too, as
//! entries beyond the end of the disk are ignored. Only the first 512 bytes of the header change,
//! so it cannot be torn. There are never two valid footers with different sizes, as no program
//! could know which one to use. While the footer at the end is cleared, the copy is used, as after
//! an interrupted growth of the file. Both sizes have their tables by then. A fixed disk has only
//! the footer at the end: one write extends the file and puts the footer there. A power cut may
//! keep the new length and lose the footer: then the old one counts, which zeros follow
//! (`left_behind.rs`), and the next write cuts them off. A power cut between the two steps leaves
//! the 512 bytes of the old footer at the start of the new range, where the guest has not written
//! anything yet.
//!
//! Why writers can continue: reservations and commits change entries in memory only. `flushing` is
//! held from before the copy of the table until the new offset is installed, so no entry reaches
//! the file meanwhile. `preparing` is held throughout: no other thread grows the file or moves its
//! footer, and no freed space is handed out, so the block that was seen in step 1 keeps its space.
//!
//! The space of a table that was moved is reused only after the file was opened again.

use super::{
    PAGE_BYTES,
    create::{MAX_FIXED_BYTES, MAX_TABLE_BYTES, fits},
    layout::Blocks,
    overlaps,
    sizes::refused,
    table,
    write::Writing,
};
use crate::{BlockState, ImageError, LinkageId, Result, flat::MoveTrailer};
use diskwright_format::vhd::{
    BAT_UNUSED, DynamicHeader, FOOTER_BYTES, Footer, HEADER_BYTES, MAX_DYNAMIC_BYTES, SECTOR_BYTES,
};
use diskwright_store::{
    Barrier, FileRange, Store, Zeroing,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};
use std::{
    ops::Range,
    sync::{Arc, PoisonError},
};

/// Bytes of a table copied or written by one call.
const STEP_BYTES: u64 = 1 << 20;

/// What failed, in errors.
const WRITE_TABLE: &str = "write the block allocation table";

/// Fails for a size that a disk with at most `max_bytes` cannot grow to.
fn check_size(store: &dyn Store, size_bytes: u64, present_bytes: u64, max_bytes: u64) -> Result<()> {
    let hint = if size_bytes < present_bytes {
        "the size must be at least the present one".into()
    } else if !size_bytes.is_multiple_of(SECTOR_BYTES) {
        format!("the size must be a multiple of {SECTOR_BYTES} bytes")
    } else if size_bytes > max_bytes {
        format!("a VHD of this type has at most {max_bytes} bytes; convert it to VHDX, which goes up to 64 TiB")
    } else {
        return Ok(());
    };
    Err(refused(store, size_bytes, present_bytes, hint))
}

/// The footer of a fixed disk, which moves when the disk grows.
#[derive(Debug)]
pub(super) struct FixedFooter {
    placed: Mutex<Placed>,
    /// Whether the file is longer than to the end of the footer.
    has_surplus: AtomicBool,
}

/// A footer, and its offset in the file.
#[derive(Debug)]
struct Placed {
    bytes: [u8; FOOTER_BYTES],
    offset_bytes: u64,
}

impl FixedFooter {
    pub fn new(bytes: [u8; FOOTER_BYTES], offset_bytes: u64, len_bytes: u64) -> Self {
        let has_surplus = AtomicBool::new(len_bytes > offset_bytes.saturating_add(FOOTER_BYTES as u64));
        Self { placed: Mutex::new(Placed { bytes, offset_bytes }), has_surplus }
    }
}

impl MoveTrailer for FixedFooter {
    /// Cuts off what a growth that was cut short has left behind the footer, durably.
    fn settle(&self, barrier: &Barrier) -> Result<()> {
        if !self.has_surplus.load(Ordering::Acquire) {
            return Ok(());
        }
        let footer = self.placed.lock().unwrap_or_else(PoisonError::into_inner);
        let end = footer.offset_bytes + FOOTER_BYTES as u64;
        let cut = barrier.store().set_len(end);
        cut.map_err(|e| ImageError::io("cut the file behind its footer", &**barrier.store(), end, e))?;
        barrier.sync("make the length of the file durable")?;
        self.has_surplus.store(false, Ordering::Release);
        Ok(())
    }

    fn move_trailer(&self, barrier: &Barrier, from_bytes: u64, to_bytes: u64) -> Result<()> {
        let store = &**barrier.store();
        self.settle(barrier)?;
        if to_bytes < from_bytes {
            return self.move_back(barrier, to_bytes);
        }
        check_size(store, to_bytes, from_bytes, MAX_FIXED_BYTES)?;
        barrier.check()?;
        let mut footer = self.placed.lock().unwrap_or_else(PoisonError::into_inner);
        let new = Footer::resized(&footer.bytes, to_bytes);
        if let Err(error) = barrier.write(&new, to_bytes) {
            // A file system may have extended the file before it failed.
            let _ = store.set_len(from_bytes + FOOTER_BYTES as u64);
            return Err(ImageError::io("write the footer at the file's new end", store, to_bytes, error));
        }
        barrier.sync("make the disk's new size durable")?;
        *footer = Placed { bytes: new, offset_bytes: to_bytes };
        barrier
            .write(&[0; FOOTER_BYTES], from_bytes)
            .map_err(|e| ImageError::io("clear the old footer", store, from_bytes, e))?;
        Ok(barrier.sync("clear the old footer durably")?)
    }

    fn check_growth(&self, store: &dyn Store, from_bytes: u64, to_bytes: u64) -> Result<u64> {
        check_size(store, to_bytes, from_bytes, MAX_FIXED_BYTES)?;
        Ok(to_bytes.saturating_add(FOOTER_BYTES as u64))
    }

    /// The footer is one sector, so it is never torn.
    fn set_linkage_id(&self, barrier: &Barrier, linkage_id: LinkageId) -> Result<()> {
        barrier.check()?;
        let mut footer = self.placed.lock().unwrap_or_else(PoisonError::into_inner);
        let (new, at) = (Footer::with_unique_id(&footer.bytes, linkage_id.to_uuid()), footer.offset_bytes);
        let written = barrier.write(&new, at);
        written.map_err(|e| ImageError::io("write the footer", &**barrier.store(), at, e))?;
        footer.bytes = new;
        Ok(barrier.sync("make the footer durable")?)
    }
}

impl FixedFooter {
    /// Makes the disk smaller (`shrink.rs`).
    fn move_back(&self, barrier: &Barrier, to_bytes: u64) -> Result<()> {
        let store = &**barrier.store();
        barrier.check()?;
        let mut footer = self.placed.lock().unwrap_or_else(PoisonError::into_inner);
        let new = Footer::resized(&footer.bytes, to_bytes);
        let io = |doing| move |error| ImageError::io(doing, store, to_bytes, error);
        barrier.write(&new, to_bytes).map_err(io("write the footer at the disk's new end"))?;
        barrier.sync("make the footer at the disk's new end durable")?;
        store.set_len(to_bytes + FOOTER_BYTES as u64).map_err(io("cut the file after its footer"))?;
        *footer = Placed { bytes: new, offset_bytes: to_bytes };
        Ok(barrier.sync("make the disk's new size durable")?)
    }
}

impl Writing {
    /// Enlarges the disk to `size_bytes`, by the steps of this module.
    pub(super) fn grow(&self, size_bytes: u64) -> Result<()> {
        self.barrier.check()?;
        let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.blocks();
        if size_bytes == before.size_bytes() {
            return Ok(());
        }
        let count = self.check_new_size(&before, size_bytes)?;
        self.begin_growth()?;
        self.clear_tail(&before)?;
        let last_bytes = size_bytes - (count - 1) * before.block_bytes;
        let last_sectors = (last_bytes / SECTOR_BYTES) as u32;
        let mut after = Blocks { count, last_sectors, ..Blocks::clone(&before) };
        let moved = if self.fits_in_place(&before, count)? { None } else { Some(self.take_table(table_space(count))?) };
        if let Some(offset_bytes) = moved {
            after.table_offset = offset_bytes;
        }
        after.header.table_offset = after.table_offset;
        after.header.max_table_entries = after.header.max_table_entries.max(count as u32);
        for range in after.metadata.iter_mut().filter(|range| range.start == before.table_offset) {
            *range = after.table_offset..after.table_offset + count * 4;
        }
        let mut header_may_refer_to_it = false;
        let result = self
            .keep_room(count - before.count, moved.map_or(0, |_| table_space(count)))
            .and_then(|()| self.commit_table(&before, &after, &mut header_may_refer_to_it));
        if let (Err(_), Some(offset_bytes), false, Some(growth)) =
            (&result, moved, header_may_refer_to_it, &mut self.lock().growth)
        {
            growth.give_back_table(offset_bytes, table_space(count));
        }
        result?;
        self.commit_size(size_bytes, after)
    }

    /// Number of blocks of a disk of `size_bytes`. Fails if the disk cannot have that size.
    pub(super) fn check_new_size(&self, before: &Blocks, size_bytes: u64) -> Result<u64> {
        let (store, present_bytes) = (&*self.store, before.size_bytes());
        check_size(store, size_bytes, present_bytes, MAX_DYNAMIC_BYTES)?;
        let count = size_bytes.div_ceil(before.block_bytes);
        let hint = if before.batmap.is_some() {
            "XenServer's batmap follows its block allocation table, which can therefore not grow; convert it to a new disk of that size"
        } else if count * 4 > MAX_TABLE_BYTES || !fits(size_bytes, before.header.block_bytes) {
            "its blocks are too small for that; convert it to a disk with larger blocks, or to VHDX"
        } else if !before.header_offset_bytes.is_multiple_of(SECTOR_BYTES) {
            "its header does not lie at a multiple of 512; convert it to a new disk of that size"
        } else {
            return Ok(count);
        };
        Err(refused(store, size_bytes, present_bytes, hint.into()))
    }

    /// Zeroes the last block's bytes beyond the end of the disk. A program that shrank the disk may
    /// have left stale data there.
    pub(super) fn clear_tail(&self, blocks: &Blocks) -> Result<()> {
        let within_bytes = u64::from(blocks.last_sectors) * SECTOR_BYTES;
        let mut state = [BlockState::Absent];
        if within_bytes < blocks.block_bytes {
            self.block_states(blocks.count - 1, &mut state)?;
        }
        if let [BlockState::Data { offset_bytes, .. } | BlockState::Partial { offset_bytes, .. }] = state {
            let offset_bytes = offset_bytes + within_bytes;
            let range = FileRange { offset_bytes, len_bytes: blocks.block_bytes - within_bytes };
            self.store.zero_range(range, Zeroing::Keep).map_err(|e| {
                ImageError::io("clear the last block beyond the disk's end", &*self.store, offset_bytes, e)
            })?;
        }
        Ok(())
    }

    /// Whether the table can have `count` entries at its present offset: within its sectors, and
    /// without overlapping a block.
    pub(super) fn fits_in_place(&self, blocks: &Blocks, count: u64) -> Result<bool> {
        let claimed_bytes = (u64::from(blocks.header.max_table_entries) * 4).next_multiple_of(SECTOR_BYTES);
        let range = blocks.table_offset + blocks.table_bytes()..blocks.table_offset + count * 4;
        if count * 4 > claimed_bytes {
            return Ok(false);
        }
        let claimed = blocks.table_offset..blocks.table_offset + u64::from(blocks.header.max_table_entries) * 4;
        let others = blocks.tables(u64::MAX).into_iter().filter(|table| *table != claimed);
        if others.into_iter().any(|table| overlaps(&table, &range)) {
            return Ok(false);
        }
        let mut is_clear = true;
        table::scan(&*self.store, blocks, blocks.count, |_, entry| {
            let piece = blocks.place(entry);
            is_clear = !overlaps(&(piece.bitmap_offset..piece.end), &range);
            Ok(is_clear)
        })?;
        Ok(is_clear)
    }

    /// Takes zeroed space of `len_bytes`, a multiple of the page. The caller holds `preparing`.
    pub(super) fn take_table(&self, len_bytes: u64) -> Result<u64> {
        loop {
            let room = match &mut self.lock().growth {
                Some(growth) => match growth.take_table(&*self.store, len_bytes)? {
                    Ok(offset_bytes) => return Ok(offset_bytes),
                    Err(room) => room,
                },
                None => return Err(self.no_growth()),
            };
            self.carry_out_room(room)?;
        }
    }

    /// If space was reserved for all blocks, reserves it for the new ones too.
    pub(super) fn keep_room(&self, blocks: u64, other_bytes: u64) -> Result<()> {
        let room = match &self.lock().growth {
            Some(growth) => growth.reserved_room(&*self.store, blocks, other_bytes)?,
            None => None,
        };
        let Some(room) = room else { return Ok(()) };
        self.carry_out_room(room)?;
        if let Some(growth) = &mut self.lock().growth {
            growth.keep_end();
        }
        Ok(())
    }

    fn no_growth(&self) -> ImageError {
        let closed = std::io::Error::other("the disk is being closed");
        ImageError::io("make the disk larger", &*self.store, 0, closed)
    }

    /// Steps 2 and 3. Afterwards the table has its new offset; the size is the old one.
    fn commit_table(&self, before: &Blocks, after: &Blocks, header_may_refer_to_it: &mut bool) -> Result<()> {
        let _turn = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        let old_end = before.table_bytes();
        if after.table_offset != before.table_offset {
            self.copy_table(before.table_offset..before.table_offset + old_end, after.table_offset)?;
        }
        let unused_end = if after.table_offset == before.table_offset {
            after.table_bytes()
        } else {
            after.table_bytes().next_multiple_of(SECTOR_BYTES)
        };
        let unused = vec![BAT_UNUSED.to_be_bytes()[0]; STEP_BYTES.min(unused_end - old_end) as usize];
        for at in (old_end..unused_end).step_by(STEP_BYTES as usize) {
            let piece = &unused[..STEP_BYTES.min(unused_end - at) as usize];
            self.put(WRITE_TABLE, piece, after.table_offset + at)?;
        }
        self.barrier.sync("make the longer block allocation table durable")?;
        if after.header != before.header {
            let at = before.header_offset_bytes;
            let mut bytes = [0; HEADER_BYTES];
            let read = self.store.read_at(&mut bytes, at);
            read.map_err(|e| ImageError::io("read the dynamic disk header", &*self.store, at, e))?;
            let new = DynamicHeader::with_table(&bytes, after.table_offset, after.header.max_table_entries);
            *header_may_refer_to_it = true;
            let written = self.barrier.write(&new[..SECTOR_BYTES as usize], at);
            if written.is_err() {
                // It is unknown which table the header refers to now, so neither may be written.
                self.barrier.settle("write the dynamic disk header", written)?;
            }
            self.barrier.sync("make the dynamic disk header durable")?;
        }
        let mut state = self.lock();
        let same_size = Blocks { count: before.count, last_sectors: before.last_sectors, ..after.clone() };
        state.blocks = Arc::new(same_size);
        Ok(())
    }

    fn copy_table(&self, from: Range<u64>, to_bytes: u64) -> Result<()> {
        let mut buf = vec![0; STEP_BYTES.min(from.end - from.start) as usize];
        for at in from.clone().step_by(STEP_BYTES as usize) {
            let piece = &mut buf[..STEP_BYTES.min(from.end - at) as usize];
            let read = self.store.read_at(piece, at);
            read.map_err(|e| ImageError::io("read the block allocation table", &*self.store, at, e))?;
            self.put(WRITE_TABLE, piece, at - from.start + to_bytes)?;
        }
        Ok(())
    }

    /// Steps 4 and 5.
    fn commit_size(&self, size_bytes: u64, after: Blocks) -> Result<()> {
        self.switch_footer(|old| Footer::resized(old, size_bytes))?;
        self.restore_tail()?;
        let mut state = self.lock();
        let old_bytes = state.blocks.table_bytes();
        state.table.lengthen(old_bytes, after.table_bytes());
        state.blocks = Arc::new(after);
        Ok(())
    }

    /// Step 4: replaces the footer durably. Afterwards only the copy at offset 0 is valid. The
    /// caller holds `preparing`.
    pub(super) fn switch_footer(&self, change: impl FnOnce(&[u8; FOOTER_BYTES]) -> [u8; FOOTER_BYTES]) -> Result<()> {
        let (old, tail_offset) = self.lock().growth.as_ref().ok_or_else(|| self.no_growth())?.footer();
        let footer = change(&old);
        let cleared = self.put("clear the footer", &[0; FOOTER_BYTES], tail_offset);
        let replaced = cleared
            .and_then(|()| Ok(self.barrier.sync("clear the footer durably")?))
            .and_then(|()| self.put("write the copy of the footer", &footer, 0));
        if let Err(error) = replaced {
            // The copy has the old contents. If the footer at the end stays cleared, the next open
            // for writing restores it from the copy.
            let _ = self.put("restore the footer", &old, tail_offset);
            return Err(error);
        }
        self.barrier.sync("make the new footer durable")?;
        if let Some(growth) = &mut self.lock().growth {
            growth.set_footer(footer);
        }
        Ok(())
    }

    /// Step 5: writes the new footer at the end of the file, durably.
    pub(super) fn restore_tail(&self) -> Result<()> {
        let (footer, tail_offset) = self.lock().growth.as_ref().ok_or_else(|| self.no_growth())?.footer();
        self.put("write the footer", &footer, tail_offset)?;
        Ok(self.barrier.sync("make the footer durable")?)
    }

    pub(super) fn put(&self, doing: &'static str, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        self.barrier.write(bytes, offset_bytes).map_err(|e| ImageError::io(doing, &*self.store, offset_bytes, e))
    }
}

/// Space of a table of `count` entries in bytes: whole pages.
fn table_space(count: u64) -> u64 {
    (count * 4).next_multiple_of(PAGE_BYTES)
}
