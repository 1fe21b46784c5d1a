//! The I/O that `reserve` and `commit` need first, without the state mutex.
//!
//! ```text
//!   reserve, commit ─▶ None, a Need in State ─▶ caller unlocks ─▶ prepare ─▶ caller retries
//!
//!   prepare:   many dirty pages?  flush                            so that memory stays bounded
//!              table pages        read; inserted if still absent (see pages.rs)
//!              a need             under `preparing`, one thread at a time:
//!                survey           new FileWriteGuid, durable; BAT read; slack cut or zeroed
//!                payload          kept space or free pieces zeroed, or the file grown
//!                bitmap           pages of the block's bits read; or space for a bitmap block
//! ```
//!
//! The state mutex is never held during a call of the store. A piece that is being zeroed is in no
//! list, and the new end of the file is recorded only after the file has grown. So `reserve` never
//! hands out space that is not ready.
//!
//! `preparing` is held during calls of the store. It prevents two threads from surveying, growing,
//! or zeroing the same space: the second zeroing could destroy payload. Lock order: `preparing`,
//! then `headers` or `state`. The survey needs no other lock, since no table changes before its
//! result is installed.
//!
//! Another thread may take the supplied space first. The caller then gets `None` again and retries.
//! Space is supplied only for a reservation or commit that lacked it. Rejected: to supply space for
//! every block of the range. A discard on a full file system would then fail, though it needs no
//! space.

use super::{
    blocks::MAKE_ROOM,
    image::{VhdxImage, Writing},
    lock,
    pages::PAGE_BYTES,
    state::Prerequisite,
    survey::survey,
    tables::{READ_BAT, READ_BITMAP},
};
use crate::{
    error::{ImageError, Result},
    needs::{Prerequisites, supply_each},
    space::{Space, zero_pieces},
};
use diskwright_format::vhdx::{BITMAP_BLOCK_BYTES, MIB, bat::BAT_ENTRY_BYTES};
use diskwright_store::{FileRange, Store, Zeroing};
use std::{io, ops::Range};

/// Maximum number of blocks whose entries one preparation reads.
const MAX_BLOCKS: u64 = 1024;

impl VhdxImage {
    /// Supplies what `reserve` and `commit` of these blocks lacked. Only the first 1024 blocks
    /// count.
    pub(super) fn prepare_blocks(&self, writing: &Writing, blocks: Range<u64>) -> Result<()> {
        self.barrier.check()?;
        if lock(&writing.state).pages.is_flush_due() {
            self.flush_shared(writing)?;
        }
        let layout = writing.layout();
        let end = blocks.end.min(layout.geometry.payload_blocks()).min(blocks.start.saturating_add(MAX_BLOCKS));
        if blocks.start >= end {
            return Ok(());
        }
        let blocks = blocks.start..end;
        let entry_bytes = |block| layout.entry_offset_bytes(layout.geometry.payload_index(block));
        let first_bytes = entry_bytes(blocks.start);
        let end_bytes = entry_bytes(blocks.end - 1) + BAT_ENTRY_BYTES;
        self.load(writing, READ_BAT, first_bytes, end_bytes - first_bytes)?;
        let needs = |with: &mut dyn FnMut(&mut Prerequisites<Prerequisite>)| with(&mut lock(&writing.state).needs);
        supply_each(&blocks, &writing.preparing, &needs, &mut |block, need| self.supply(writing, block, need))
    }

    fn supply(&self, writing: &Writing, block: u64, need: Prerequisite) -> Result<()> {
        self.begin_change(writing)?;
        match need {
            Prerequisite::Survey => Ok(()),
            Prerequisite::Payload => self.supply_payload(writing, block),
            Prerequisite::Bitmap => self.supply_bitmap(writing, block),
        }
    }

    /// Reads the pages of a range into the cache.
    pub(super) fn load(&self, writing: &Writing, doing: &'static str, start_bytes: u64, len_bytes: u64) -> Result<()> {
        let store = &**self.barrier.store();
        loop {
            let (missing, drops) = {
                let pages = &lock(&writing.state).pages;
                (pages.missing(start_bytes, len_bytes), pages.drops())
            };
            if missing.is_empty() {
                return Ok(());
            }
            let mut read = Vec::with_capacity(missing.len());
            for offset_bytes in missing {
                let mut page = vec![0; PAGE_BYTES as usize].into_boxed_slice();
                store
                    .read_at(&mut page, offset_bytes)
                    .map_err(|error| ImageError::io(doing, store, offset_bytes, error))?;
                read.push((offset_bytes, page));
            }
            let pages = &mut lock(&writing.state).pages;
            if pages.drops() == drops {
                pages.insert(read);
                return Ok(());
            }
        }
    }

    /// Reads the table pages of all reserved blocks. Ignores read errors.
    pub(super) fn load_reserved(&self, writing: &Writing) {
        let blocks: Vec<u64> = lock(&writing.state).reserved.keys().copied().collect();
        for block in blocks {
            let entry_bytes = self.payload_entry_bytes(&lock(&writing.state), block);
            let _ = self.load(writing, READ_BAT, entry_bytes, BAT_ENTRY_BYTES);
        }
    }

    fn supply_payload(&self, writing: &Writing, block: u64) -> Result<()> {
        let to_clear = self.place_to_clear(&lock(&writing.state), block);
        let Some(offset_bytes) = to_clear else {
            let is_needed = {
                let state = lock(&writing.state);
                self.kept_place(&state, block).is_none() && !state.reserved.contains_key(&block)
            };
            return if is_needed { self.make_room(writing, self.layout.geometry.block_bytes()) } else { Ok(()) };
        };
        self.barrier
            .store()
            .zero_range(FileRange { offset_bytes, len_bytes: self.layout.geometry.block_bytes() }, Zeroing::Keep)
            .map_err(|error| self.io("zero the kept space of a block", offset_bytes, error))?;
        let mut state = lock(&writing.state);
        // A commit of zeros may have freed the space meanwhile.
        if self.place_to_clear(&state, block) == Some(offset_bytes) {
            state.set_cleared(block);
        }
        Ok(())
    }

    fn supply_bitmap(&self, writing: &Writing, block: u64) -> Result<()> {
        let layout = writing.layout();
        let geometry = &layout.geometry;
        let entry_bytes = layout.entry_offset_bytes(geometry.bitmap_index(geometry.chunk_of(block)));
        self.load(writing, READ_BAT, entry_bytes, BAT_ENTRY_BYTES)?;
        let found = self.bitmap_block(&lock(&writing.state), block)?;
        match found {
            None => Ok(()),
            Some(Ok(offset_bytes)) => {
                let (within, len_bytes) = geometry.bitmap_place(block);
                self.load(writing, READ_BITMAP, offset_bytes + within, len_bytes)
            }
            Some(Err(_)) => self.make_room(writing, BITMAP_BLOCK_BYTES),
        }
    }

    /// Makes sure that a piece of `len_bytes` can be taken: zeroes free pieces, or grows the file.
    /// The caller holds `preparing`.
    pub(super) fn make_room(&self, writing: &Writing, len_bytes: u64) -> Result<()> {
        let store = &**self.barrier.store();
        let (to_zero, growth, at_bytes) = {
            let mut state = lock(&writing.state);
            // An entry is damaged: the reservation returns the error.
            let Some(space) = &mut state.space else { return Ok(()) };
            let at_bytes = space.used_end_bytes();
            (space.take_to_zero(len_bytes), space.growth(len_bytes), at_bytes)
        };
        let io = |error| self.io(MAKE_ROOM, at_bytes, error);
        if to_zero.is_empty() {
            let Some(growth) = growth.map_err(io)? else { return Ok(()) };
            let end_bytes = growth.carry_out(store).map_err(io)?;
            if let Some(space) = &mut lock(&writing.state).space {
                space.set_file_end(end_bytes);
            }
            return Ok(());
        }
        let (zeroed, result) = zero_pieces(store, &to_zero, len_bytes);
        if let Some(space) = &mut lock(&writing.state).space {
            space.zeroed(&to_zero, zeroed, len_bytes);
        }
        result.map_err(io)
    }

    /// Punches the freed pieces and makes them available. A piece is not handed out before its hole
    /// punch has returned.
    pub(super) fn recycle_pieces(&self, writing: &Writing, generation: u64) {
        let punching = lock(&writing.state).space.as_mut().map(|space| space.recycled(generation));
        let Some(mut punching) = punching else { return };
        loop {
            let done = punching.punch(&**self.barrier.store());
            if done.is_empty() {
                return;
            }
            if let Some(space) = &mut lock(&writing.state).space {
                done.iter().for_each(|piece| space.add_free(piece.offset_bytes, piece.len_bytes));
            }
        }
    }

    /// Runs before the first change of a session: writes a new FileWriteGuid, durably, then surveys
    /// the file. The survey makes new space read as zeros. It also settles the file's length, which
    /// must not shrink once log entries record it. If an entry is damaged, the length stays as it
    /// is. The caller holds `preparing`.
    pub(super) fn begin_change(&self, writing: &Writing) -> Result<()> {
        if lock(&writing.state).is_surveyed() {
            return Ok(());
        }
        lock(&writing.headers).begin_file_write(&self.barrier)?;
        let store = &**self.barrier.store();
        let file_bytes = self.file_bytes()?;
        let found = survey(&writing.layout(), store, file_bytes)?;
        if let Some(damaged) = found.damaged {
            lock(&writing.state).install_damaged(file_bytes, damaged);
            return Ok(());
        }
        let (mut space, keep_end_bytes) =
            self.settle_slack(store, found.end_bytes, file_bytes, found.unallocated_blocks)?;
        found.free.iter().for_each(|&(offset_bytes, len_bytes)| space.add_free(offset_bytes, len_bytes));
        lock(&writing.state).install(file_bytes, space, found.contested, keep_end_bytes);
        Ok(())
    }

    /// Makes the space beyond the last block read as zeros. The file is cut there; or the space is
    /// zeroed, if the file was created with room for all its blocks.
    fn settle_slack(
        &self,
        store: &dyn Store,
        end_bytes: u64,
        file_bytes: u64,
        unallocated_blocks: u64,
    ) -> Result<(Space, u64)> {
        let io = |error: io::Error| self.io("cut or zero the file after its last block", end_bytes, error);
        let mut space = Space::new(end_bytes, MIB);
        let slack_bytes = file_bytes.saturating_sub(end_bytes);
        let room_bytes = unallocated_blocks * self.layout.geometry.block_bytes();
        let keep = slack_bytes > 0 && (self.layout.fixed || (room_bytes > 0 && slack_bytes >= room_bytes));
        if !keep {
            if file_bytes != end_bytes {
                store.set_len(end_bytes).map_err(io)?;
            }
            return Ok((space, 0));
        }
        let used = store.next_data(end_bytes).map_err(io)?.is_some_and(|range| range.offset_bytes < file_bytes);
        if used {
            store
                .zero_range(FileRange { offset_bytes: end_bytes, len_bytes: slack_bytes }, Zeroing::Keep)
                .map_err(io)?;
        }
        let kept_bytes = file_bytes.next_multiple_of(MIB);
        if kept_bytes != file_bytes {
            store.set_len(kept_bytes).map_err(io)?;
        }
        space.set_file_end(kept_bytes);
        Ok((space, kept_bytes))
    }
}
