//! Moves blocks to lower places, so that the file can be cut.
//!
//! ```text
//!   reserve_move   lowest free piece ─▶ State::moving; the block's bitmap is in memory
//!   (the disk copies the payload)
//!   commit Moved   BAT entry ─▶ the new piece; bitmap ─▶ State::moved; old piece quarantined
//!   flush          pass 1: bitmaps of moved blocks, sync      payload and bitmap are durable
//!                  pass 2: BAT                                the block is at its new place
//! ```
//!
//! The bitmap lies before the payload and moves with it. Pass 1 writes it, because a BAT entry must
//! not become durable before the bitmap to which it leads. The bits come from memory: a bit that
//! was committed and not yet flushed is written too, and its payload was copied, or written to the
//! new place, before the flush began.
//!
//! Blocks of other programs may have no pad before their bitmap. Such a piece is a little shorter
//! than ours. It is reused for a move as it is: the moved block has no pad there either.

use super::{
    bitmap,
    growth::{Growth, entry_of},
    layout::Piece,
    write::{Prerequisite, State, Writing},
};
use crate::{ImageError, MovePlace, MoveTo, Result};
use diskwright_format::vhd::FOOTER_BYTES;
use std::sync::PoisonError;

impl Writing {
    /// Surveys the file, and gives up space that was reserved for blocks without data.
    pub(super) fn begin_compacting_file(&self) -> Result<()> {
        self.barrier.check()?;
        if self.blocks.batmap.is_some() {
            return Err(ImageError::Unsupported {
                path: self.store.name().to_owned(),
                what: "compacting a VHD with XenServer's batmap, which may say that a block is full,".into(),
                hint: "convert it to a new disk".into(),
            });
        }
        self.begin_growth_alone()?;
        if let Some(growth) = &mut self.lock().growth {
            growth.give_up_room();
        }
        Ok(())
    }

    /// Cuts free space off the end of the file, while the disk is in use. The footer is durable at
    /// its new place before the file is cut: what a cut without it left there could be data of the
    /// guest that looks like a footer.
    pub(super) fn cut_tail(&self) -> Result<()> {
        self.barrier.check()?;
        let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((tail, footer)) = self.lock().growth.as_mut().and_then(Growth::take_tail) else { return Ok(()) };
        let end_bytes = tail.start_bytes();
        let io_error = |error| ImageError::io("cut the file after its last block", &*self.store, end_bytes, error);
        let cut = self
            .store
            .write_at(&footer, end_bytes)
            .map_err(io_error)
            .and_then(|()| Ok(self.barrier.sync("make the footer durable before the file is cut")?))
            .and_then(|()| self.store.set_len(end_bytes + FOOTER_BYTES as u64).map_err(io_error));
        if cut.is_err()
            && let Some(growth) = &mut self.lock().growth
        {
            growth.put_back(tail);
        }
        cut
    }

    pub(super) fn reserve_move_of(&self, state: &mut State, block: u64) -> Result<Option<MoveTo>> {
        state.blocks.check_block(&*self.store, block)?;
        let Some(placed) = self.piece(state, block)? else { return Ok(None) };
        let Some(piece) = placed else { return Ok(Some(MoveTo::Stay)) };
        let Some(growth) = &mut state.growth else {
            state.needs.note(block, Prerequisite::Growth);
            return Ok(None);
        };
        let has_bits = self.blocks.bitmaps_are_full
            || state.uninitialised.contains_key(&block)
            || state.bitmaps.contains_key(&block);
        if !has_bits {
            state.needs.note(block, Prerequisite::Bitmap);
            return Ok(None);
        }
        let mut reserved = state.moving.remove(&block);
        if let Some(to) = reserved.take_if(|to| to.payload_offset >= piece.payload_offset) {
            // The block got new space since, further down.
            growth.give_back(&to);
        }
        let Some(to) = reserved.or_else(|| growth.take_for_move(&piece)) else { return Ok(Some(MoveTo::Stay)) };
        state.moving.insert(block, to);
        Ok(Some(MoveTo::Place(MovePlace {
            store: 0,
            from_bytes: piece.payload_offset,
            to_bytes: to.payload_offset,
            len_bytes: self.blocks.block_bytes,
        })))
    }

    /// Maps a block to the place of its move. `None` if something is not in memory.
    pub(super) fn commit_moved(&self, state: &mut State, block: u64) -> Result<Option<()>> {
        let Some(placed) = self.piece(state, block)? else { return Ok(None) };
        let (Some(from), Some(to)) = (placed, state.moving.get(&block).copied()) else {
            return Err(self.misuse(block, "is committed as moved without a place to move to"));
        };
        let is_full = self.blocks.bitmaps_are_full || state.uninitialised.contains_key(&block);
        if !is_full && !state.bitmaps.contains_key(&block) {
            state.needs.note(block, Prerequisite::Bitmap);
            return Ok(None);
        }
        let entry = entry_of(&to).ok_or_else(|| self.misuse(block, "was moved beyond 2 TiB"))?;
        state.moving.remove(&block);
        state.table.set(block, entry);
        if let Some(growth) = &mut state.growth {
            growth.free(&from);
        }
        state.uninitialised.remove(&block);
        state.moved.insert(block, to);
        if is_full && !self.blocks.bitmaps_are_full && !state.bitmaps.contains_key(&block) {
            self.remember(state, block, bitmap::full(&self.blocks));
        }
        if !self.blocks.bitmaps_are_full {
            // Dirty bitmaps stay in memory. So the flush finds the bits.
            state.dirty_bitmaps.insert(block, to);
        }
        // A flush that has failed must not make the bitmap dirty at the old place.
        if let Some(freed) = &mut state.freed {
            freed.insert(block);
        }
        Ok(Some(()))
    }

    /// The bytes to write for the bitmap of a moved block, and their offset. Where the block has a
    /// pad, the pad is written too, so that the write is aligned.
    pub(super) fn moved_bitmap(&self, state: &State, block: u64, piece: &Piece) -> (u64, Vec<u8>) {
        let bits = match state.bitmaps.get(&block) {
            Some(bits) => bitmap::to_file(bits, self.blocks.bitmap_bytes as usize),
            None => bitmap::to_file(&bitmap::full(&self.blocks), self.blocks.bitmap_bytes as usize),
        };
        if state.growth.as_ref().is_none_or(|growth| growth.is_unpadded(piece)) {
            return (piece.bitmap_offset, bits);
        }
        let mut bytes = vec![0; self.blocks.bitmap_area_bytes() as usize - bits.len()];
        bytes.extend_from_slice(&bits);
        (self.area_offset(piece), bytes)
    }
}
