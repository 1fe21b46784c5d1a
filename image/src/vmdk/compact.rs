//! Freed space of a writable VMDK: its reuse, moves of grains to lower places, cuts of the files.
//!
//! ```text
//!   freed ─▶ quarantine ─ recycle ─▶ punched ─▶ free in the extent's file ─▶ new grains, moves
//!   close, cut_free_tail:  free space at the end of a file ─▶ cut off
//! ```
//!
//! One counter of generations serves all extents, so the quarantine is here and not in the
//! [`Space`] of each file. Invariant: space leaves quarantine only after both tables without it are
//! durable and no request can reach it, which the disk above knows ([`ImageWriter::recycle`]). A
//! piece is not handed out before its hole punch has returned. The state mutex guards the lists; no
//! call of a store happens under it.
//!
//! [`ImageWriter::recycle`]: crate::ImageWriter::recycle

use super::{
    layout::Place,
    tables::Entry,
    write::{Prerequisite, State, Writing},
};
use crate::{
    ImageError, MovePlace, MoveTo, Result,
    space::{HolePunches, Space},
};
use diskwright_store::FileRange;
use std::{collections::BTreeMap, sync::PoisonError};

/// Pieces of files, by extent.
type ByExtent = BTreeMap<usize, Vec<FileRange>>;

impl Writing {
    /// Removes from quarantine what was freed at generations up to `generation`.
    fn take_quarantined(&self, generation: u64) -> ByExtent {
        let mut state = self.lock();
        let count = state.quarantined.partition_point(|piece| piece.generation <= generation);
        let mut found = ByExtent::new();
        for piece in state.quarantined.drain(..count) {
            found.entry(piece.extent).or_default().push(piece.range);
        }
        found
    }

    /// Adds free pieces to the space of an extent's file.
    fn add_free(&self, extent: usize, pieces: &[FileRange]) {
        if let Some(space) = &mut self.lock().extent_states[extent].space {
            pieces.iter().for_each(|piece| space.add_free(piece.offset_bytes, piece.len_bytes));
        }
    }

    pub(super) fn recycle_pieces(&self, generation: u64) {
        for (extent, ranges) in self.take_quarantined(generation) {
            let mut punching = HolePunches::of(ranges.into_iter());
            loop {
                let done = punching.punch(&**self.file(extent));
                if done.is_empty() {
                    break;
                }
                self.add_free(extent, &done);
            }
        }
    }

    pub(super) fn recycle_pieces_for_moves(&self, generation: u64) {
        for (extent, ranges) in self.take_quarantined(generation) {
            if let Some(space) = &mut self.lock().extent_states[extent].space {
                ranges.iter().for_each(|range| space.quarantine(range.offset_bytes, range.len_bytes));
                space.recycle_for_moves(space.generation());
            }
        }
    }

    pub(super) fn begin_compacting_files(&self) -> Result<()> {
        if self.layout.is_flat() {
            return Err(self.unsupported("compacting a VMDK of flat extents", "convert it to monolithicSparse"));
        }
        self.check_barriers()?;
        let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        (0..self.layout.extents.len()).try_for_each(|extent| self.survey(extent))
    }

    pub(super) fn reserve_move_of(&self, state: &mut State, block: u64) -> Result<Option<MoveTo>> {
        let Place::Grain { extent, grain, .. } = self.place(block)? else { return Ok(Some(MoveTo::Stay)) };
        let from = match self.entry(state, extent, grain)? {
            None => return Ok(None),
            Some(Entry::At(at)) => at,
            Some(Entry::Absent | Entry::Zero | Entry::Bad(_)) => return Ok(Some(MoveTo::Stay)),
        };
        let grain_bytes = self.tables(extent).grain_bytes;
        let Some(space) = &mut state.extent_states[extent].space else {
            state.needs.note(block, Prerequisite::Survey);
            return Ok(None);
        };
        let mut known = state.moving.remove(&block);
        if let Some(to) = known.take_if(|to| *to >= from) {
            space.add_free(to, grain_bytes);
        }
        let Some(to) = known.or_else(|| space.take_for_move(grain_bytes, from)) else {
            return Ok(Some(MoveTo::Stay));
        };
        state.moving.insert(block, to);
        Ok(Some(MoveTo::Place(MovePlace {
            store: self.layout.extents[extent].store_index,
            from_bytes: from,
            to_bytes: to,
            len_bytes: self.tables(extent).valid_bytes(grain),
        })))
    }

    pub(super) fn give_up_places(&self) {
        let mut state = self.lock();
        let moving = std::mem::take(&mut state.moving);
        for (block, at) in moving {
            let Some(Place::Grain { extent, .. }) = self.layout.place(block) else { continue };
            if let Some(space) = &mut state.extent_states[extent].space {
                space.add_free(at, self.tables(extent).grain_bytes);
            }
        }
    }

    pub(super) fn cut_tails(&self) -> Result<()> {
        self.check_barriers()?;
        let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        for extent in 0..self.layout.extents.len() {
            let Some(tail) = self.lock().extent_states[extent].space.as_mut().and_then(Space::take_tail) else {
                continue;
            };
            let (store, end) = (&**self.file(extent), tail.start_bytes());
            if let Err(error) = store.set_len(end) {
                if let Some(space) = &mut self.lock().extent_states[extent].space {
                    space.put_back(tail);
                }
                return Err(ImageError::io("cut the file after its last grain", store, end, error));
            }
            self.count_free(extent, end)?;
        }
        Ok(())
    }

    /// For close: returns all space that nothing refers to, cuts each surveyed file after its last
    /// grain, and marks the extents as closed. The caller has flushed, and no request follows.
    pub(super) fn trim(&self) -> Result<()> {
        {
            let mut state = self.lock();
            let unused: Vec<(u64, u64)> = std::mem::take(&mut state.reserved).into_iter().collect();
            let moving = std::mem::take(&mut state.moving);
            for (block, at) in unused.into_iter().chain(moving) {
                if let Some(Place::Grain { extent, .. }) = self.layout.place(block) {
                    self.free(&mut state, extent, at);
                }
            }
        }
        let mut freed = self.take_quarantined(u64::MAX);
        for extent in 0..self.layout.extents.len() {
            let freed = freed.remove(&extent).unwrap_or_default();
            let ends = self.lock().extent_states[extent].space.as_mut().map(|space| {
                freed.iter().for_each(|piece| space.quarantine(piece.offset_bytes, piece.len_bytes));
                let (end, freed) = space.free_all();
                (end, freed, space.file_end_bytes())
            });
            let Some((end, freed, file_end)) = ends else { continue };
            let store = &**self.file(extent);
            if end < file_end {
                store.set_len(end).map_err(|error| ImageError::io("cut the file", store, end, error))?;
                self.count_free(extent, end)?;
                if let Some(space) = &mut self.lock().extent_states[extent].space {
                    space.set_file_end(end);
                }
            }
            freed.punch_all(store);
        }
        self.sync_all("make the end of the file durable")?;
        self.mark_closed()
    }
}
