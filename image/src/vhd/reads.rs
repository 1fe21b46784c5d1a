//! Block states and bitmaps of a writable VHD: the file's tables with the state in memory laid over
//! them.
//!
//! ```text
//!   drops ─▶ read without the mutex ─▶ state mutex: drops unchanged? ─▶ state in memory wins
//! ```
//!
//! The state mutex is never held during a call of the store. What is not in memory is current in
//! the file. So bytes from the file are stale only if an entry or bitmap was changed, written and
//! dropped between the two steps, which changes [`State::drops`], or if the table was moved
//! (`grow.rs`). Then the read is repeated.

use super::{
    bitmap,
    layout::Piece,
    table,
    write::{State, Writing},
};
use crate::{BlockState, ImageError, Result, SectorBitmap};
use diskwright_format::vhd::SECTOR_BYTES;
use std::sync::Arc;

/// Entries read by one call.
const READ_ENTRIES: usize = 1024;

impl Writing {
    pub fn block_states(&self, first_block: u64, out: &mut [BlockState]) -> Result<()> {
        out.fill(BlockState::Absent);
        let inside = self.blocks().count.saturating_sub(first_block).min(out.len() as u64) as usize;
        for (first, out) in (first_block..).step_by(READ_ENTRIES).zip(out[..inside].chunks_mut(READ_ENTRIES)) {
            self.with_entries(first, out.len(), &mut |state, entries| {
                for ((block, &entry), out) in (first..).zip(entries).zip(&mut *out) {
                    *out = match self.piece_of(state, block, entry) {
                        Ok(piece) => self.state_of_piece(state, block, piece),
                        Err(ImageError::Corrupt { .. }) => BlockState::Damaged,
                        Err(error) => return Err(error),
                    };
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Calls `visit` with the state and the current entries from `first`.
    fn with_entries(
        &self,
        first: u64,
        count: usize,
        visit: &mut dyn FnMut(&State, &[u32]) -> Result<()>,
    ) -> Result<()> {
        let mut entries = vec![0; count];
        loop {
            let (drops, blocks) = {
                let state = self.lock();
                (state.drops, Arc::clone(&state.blocks))
            };
            table::read_entries(&*self.store, &blocks, first, &mut entries)?;
            let state = self.lock();
            if state.drops != drops || !Arc::ptr_eq(&state.blocks, &blocks) {
                continue;
            }
            for (block, entry) in (first..).zip(&mut entries) {
                *entry = state.table.entry(block).unwrap_or(*entry);
            }
            return visit(&state, &entries);
        }
    }

    pub fn damage(&self, block: u64) -> Result<ImageError> {
        self.blocks().check_block(&*self.store, block)?;
        let (mut entry, mut len_bytes) = (0, 0);
        self.with_entries(block, 1, &mut |state, entries| {
            (entry, len_bytes) = (entries[0], state.len_bytes);
            Ok(())
        })?;
        self.blocks().damage_of(&*self.store, block, entry, len_bytes)
    }

    pub fn sector_bitmap(&self, block: u64) -> Result<SectorBitmap> {
        self.blocks().check_block(&*self.store, block)?;
        loop {
            let (mut known, mut drops): (Result<SectorBitmap, Piece>, u64) =
                (Ok(SectorBitmap::empty(self.blocks.sectors, SECTOR_BYTES as u32)), 0);
            self.with_entries(block, 1, &mut |state, entries| {
                drops = state.drops;
                if let Some(piece) = self.piece_of(state, block, entries[0])? {
                    known = self.bits_in_memory(state, block).ok_or(piece);
                }
                Ok(())
            })?;
            let piece = match known {
                Ok(bits) => return Ok(bits),
                Err(piece) => piece,
            };
            let read = bitmap::read(&*self.store, &self.blocks, &piece);
            let mut state = self.lock();
            if state.drops != drops {
                continue;
            }
            return Ok(match self.bits_in_memory(&state, block) {
                // Also if the block has moved and the file was cut before the read.
                Some(newer) => newer,
                None => {
                    let bits = read?;
                    self.remember(&mut state, block, bits.clone());
                    bits
                }
            });
        }
    }

    /// The bitmap of a block with space; `None` if the file must be read.
    fn bits_in_memory(&self, state: &State, block: u64) -> Option<SectorBitmap> {
        if self.blocks.bitmaps_are_full || state.uninitialised.contains_key(&block) {
            return Some(state.bitmaps.get(&block).cloned().unwrap_or_else(|| bitmap::full(&self.blocks)));
        }
        state.bitmaps.get(&block).cloned()
    }

    /// The space that an entry refers to.
    pub(super) fn piece_of(&self, state: &State, block: u64, entry: u32) -> Result<Option<Piece>> {
        state.blocks.piece(&*self.store, block, entry, state.len_bytes)
    }

    pub(super) fn state_of_piece(&self, state: &State, block: u64, piece: Option<Piece>) -> BlockState {
        match piece {
            Some(Piece { payload_offset, .. }) if self.is_known_full(state, block) => BlockState::data(payload_offset),
            piece => self.blocks.state_of(piece),
        }
    }

    fn is_known_full(&self, state: &State, block: u64) -> bool {
        self.blocks.bitmaps_are_full
            || state.uninitialised.contains_key(&block)
            || state.bitmaps.get(&block).is_some_and(|bits| bitmap::is_full_to(bits, state.blocks.sectors_of(block)))
    }
}
