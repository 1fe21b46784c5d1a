//! The I/O that `reserve` and `commit` of a VHD need first, without the state mutex.
//!
//! ```text
//!   reserve, commit ─▶ None, a Need in State ─▶ caller unlocks ─▶ prepare ─▶ caller retries
//!
//!   prepare:   much is dirty?  flush                              so that memory stays bounded
//!              table pages     read; inserted if still absent     (see reads.rs)
//!              a need          under `preparing`, one thread at a time:
//!                growth        the walk over the blocks; footers repaired
//!                space         free pieces zeroed; or the file grown and its footer moved
//!                bitmap        read; inserted if still absent
//! ```
//!
//! The state mutex is never held during a call of the store. A piece that is being zeroed is in no
//! list, and the new end of the file is recorded only after the footer has moved. So `reserve`
//! never hands out space that is not ready.
//!
//! `preparing` is held during calls of the store. It prevents two threads from growing the file, or
//! moving its footer, at the same time. Lock order: `preparing`, then the state mutex. The walk
//! needs no other lock, since no BAT entry changes before its result is installed.

use super::{
    bitmap,
    growth::Growth,
    space_preparation::SpacePreparation,
    table,
    write::{Prerequisite, Writing},
};
use crate::{
    Result,
    needs::{Prerequisites, supply_each},
};
use std::{
    ops::Range,
    sync::{Arc, PoisonError},
};

/// Maximum number of blocks that one preparation handles.
const MAX_BLOCKS: u64 = 1024;

impl Writing {
    /// Supplies what `reserve` and `commit` of these blocks lacked. Only the first 1024 blocks
    /// count.
    pub(super) fn prepare_blocks(&self, blocks: Range<u64>) -> Result<()> {
        self.barrier.check()?;
        let is_flush_due = {
            let state = self.lock();
            let bitmap_bytes = state.dirty_bitmaps.len() as u64 * self.blocks.bitmap_bytes;
            state.table.dirty_bytes() + bitmap_bytes > state.limits.dirty_bytes
        };
        if is_flush_due {
            self.barrier.share(|| self.run_flush())?;
        }
        let end = blocks.end.min(self.blocks().count).min(blocks.start.saturating_add(MAX_BLOCKS));
        if blocks.start >= end {
            return Ok(());
        }
        // A page has 1024 entries, so the range lies in at most two pages.
        self.load_page(blocks.start)?;
        self.load_page(end - 1)?;
        let blocks = blocks.start..end;
        let needs = |with: &mut dyn FnMut(&mut Prerequisites<Prerequisite>)| with(&mut self.lock().needs);
        supply_each(&blocks, &self.preparing, &needs, &mut |block, need| self.supply(block, need))
    }

    fn supply(&self, block: u64, need: Prerequisite) -> Result<()> {
        match need {
            Prerequisite::Growth => self.begin_growth(),
            Prerequisite::Space => {
                self.begin_growth()?;
                self.make_room()
            }
            Prerequisite::Bitmap => self.load_bitmap(block),
        }
    }

    /// Reads the page of a block's BAT entry into memory.
    fn load_page(&self, block: u64) -> Result<()> {
        loop {
            let (missing, drops, blocks) = {
                let state = self.lock();
                (state.table.missing(block), state.drops, Arc::clone(&state.blocks))
            };
            let Some(first_block) = missing else { return Ok(()) };
            let page = table::read_page(&*self.store, &blocks, first_block)?;
            let mut state = self.lock();
            if state.drops == drops && Arc::ptr_eq(&state.blocks, &blocks) {
                let most_pages = state.limits.table_pages;
                let has_dropped = state.table.insert(first_block, page, most_pages);
                state.drops += u64::from(has_dropped);
                return Ok(());
            }
        }
    }

    /// Reads the bitmap of a block with space into memory.
    fn load_bitmap(&self, block: u64) -> Result<()> {
        loop {
            let (piece, drops) = {
                let state = self.lock();
                if state.bitmaps.contains_key(&block) {
                    return Ok(());
                }
                (self.piece(&state, block)?.flatten(), state.drops)
            };
            let Some(piece) = piece else { return Ok(()) };
            let read = bitmap::read(&*self.store, &self.blocks, &piece);
            let mut state = self.lock();
            if state.drops == drops {
                if !state.bitmaps.contains_key(&block) {
                    self.remember(&mut state, block, read?);
                }
                return Ok(());
            }
        }
    }

    /// Like [`Writing::begin_growth`], for callers that do not hold `preparing`.
    pub(super) fn begin_growth_alone(&self) -> Result<()> {
        let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        self.begin_growth()
    }

    /// Surveys the file and makes it ready to grow, once in a session. The caller holds
    /// `preparing`.
    pub(super) fn begin_growth(&self) -> Result<()> {
        if self.lock().growth.is_some() {
            return Ok(());
        }
        let growth = Growth::prepare(&*self.store, &self.blocks(), &self.footer, &self.barrier)?;
        let mut state = self.lock();
        state.len_bytes = state.len_bytes.max(growth.len_bytes());
        state.growth = Some(growth);
        Ok(())
    }

    /// Makes sure that a piece can be taken. The caller holds `preparing`.
    fn make_room(&self) -> Result<()> {
        let room = match &mut self.lock().growth {
            Some(growth) => growth.room(&*self.store)?,
            None => return Ok(()),
        };
        self.carry_out_room(room)
    }

    /// Does the I/O that is needed before space can be taken, and records the result. The caller
    /// holds `preparing`.
    pub(super) fn carry_out_room(&self, room: SpacePreparation) -> Result<()> {
        let (made, result) = room.make(&*self.store);
        let mut state = self.lock();
        if let Some(growth) = &mut state.growth {
            growth.publish(&made);
            let len_bytes = growth.len_bytes();
            state.len_bytes = state.len_bytes.max(len_bytes);
        }
        result
    }

    /// Punches the freed pieces and makes them available. A piece is not handed out before its hole
    /// punch has returned.
    pub(super) fn recycle_pieces(&self, generation: u64) {
        let punching = self.lock().growth.as_mut().map(|growth| growth.recycled(generation));
        let Some(mut punching) = punching else { return };
        loop {
            let done = punching.punch(&*self.store);
            if done.is_empty() {
                return;
            }
            if let Some(growth) = &mut self.lock().growth {
                growth.add_free(&done);
            }
        }
    }
}
