//! Freed space of a writable VDI: its reuse, moves of blocks to lower places, cuts of the file.
//!
//! ```text
//!   freed ─▶ quarantine ─ recycle ─▶ punched ─▶ free ─▶ new blocks, moves
//!   last close:  flush ─▶ the last blocks move into the gaps
//!   every close: flush ─▶ cut after the last block ─▶ header counts the spaces
//! ```
//!
//! VirtualBox and QEMU put a new block behind the last space that the header counts, a discard of
//! VirtualBox relies on spaces without gaps, and qemu-img reports gaps as damage. So the last close
//! moves the last blocks into the gaps, at most [`MOVED_MAX_BYTES`]. Gaps beyond that, and those of
//! an image that becomes a parent while it is in use, stay; the header counts them as spaces.
//!
//! Invariant: space leaves quarantine only after the map without it is durable and no request can
//! reach it, which the disk above knows ([`ImageWriter::recycle`]). A piece is not handed out
//! before its hole punch has returned. The state mutex guards the lists; no call of the store
//! happens under it.
//!
//! [`ImageWriter::recycle`]: crate::ImageWriter::recycle

use super::{
    map::Entry,
    write::{PAGE_ENTRIES, Prerequisite, State, Writing},
};
use crate::{Commit, MovePlace, MoveTo, Result, space::Space};
use std::sync::PoisonError;

/// Payload that one close moves at most. `compact` fills all gaps.
const MOVED_MAX_BYTES: u64 = 1 << 30;
/// Bytes that are copied at once.
const COPY_BYTES: u64 = 1 << 20;

impl Writing {
    pub(super) fn recycle_pieces(&self, generation: u64) {
        let len_bytes = self.space_bytes();
        let Some(mut punching) = self.lock().space.as_mut().map(|space| space.recycled(generation)) else { return };
        loop {
            let done = punching.punch(&*self.store);
            if done.is_empty() {
                return;
            }
            if let Some(space) = &mut self.lock().space {
                done.iter().for_each(|piece| space.add_free(piece.offset_bytes, len_bytes));
            }
        }
    }

    pub(super) fn begin_compacting_file(&self) -> Result<()> {
        if self.is_fixed() {
            return Err(self.unsupported("compacting a fixed VDI", "convert it to a dynamic disk"));
        }
        self.barrier.check()?;
        let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        self.survey()
    }

    pub(super) fn reserve_move_of(&self, state: &mut State, block: u64) -> Result<Option<MoveTo>> {
        let from = match self.entry(state, block) {
            None if block < state.entries => return Ok(None),
            Some(Entry::At(at)) => at,
            _ => return Ok(Some(MoveTo::Stay)),
        };
        let len_bytes = self.space_bytes();
        let Some(space) = &mut state.space else {
            state.needs.note(block, Prerequisite::Survey);
            return Ok(None);
        };
        let mut known = state.moving.remove(&block);
        if let Some(to) = known.take_if(|to| *to >= from) {
            space.add_free(to, len_bytes);
        }
        let Some(to) = known.or_else(|| space.take_for_move(len_bytes, from)) else {
            return Ok(Some(MoveTo::Stay));
        };
        state.moving.insert(block, to);
        Ok(Some(MoveTo::Place(MovePlace { store: 0, from_bytes: from, to_bytes: to, len_bytes })))
    }

    pub(super) fn give_up_places(&self, state: &mut State) {
        let moving = std::mem::take(&mut state.moving);
        if let Some(space) = &mut state.space {
            moving.values().for_each(|&at| space.add_free(at, self.space_bytes()));
        }
    }

    pub(super) fn cut_tail(&self) -> Result<()> {
        self.barrier.check()?;
        let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(tail) = self.lock().space.as_mut().and_then(Space::take_tail) else { return Ok(()) };
        let end = tail.start_bytes();
        let cut = self.store.set_len(end).map_err(self.io("cut the file after its last block", end));
        let mut state = self.lock();
        if cut.is_err() {
            if let Some(space) = &mut state.space {
                space.put_back(tail);
            }
            return cut;
        }
        state.file_bytes = end;
        // The header may count more: the space is counted again before it is handed out.
        state.announced = state.announced.min(self.number_of(end));
        Ok(())
    }

    /// Frees all space that no entry names. The caller has flushed, and no request follows.
    fn give_up_unused(&self, state: &mut State) {
        self.give_up_places(state);
        let unused: Vec<u64> = std::mem::take(&mut state.reserved).into_values().collect();
        if let Some(space) = &mut state.space {
            unused.iter().for_each(|&at| space.add_free(at, self.space_bytes()));
            space.recycle_for_moves(space.generation());
        }
    }

    /// Moves the last blocks into gaps before them. The caller has flushed, and no request follows.
    pub(super) fn move_into_gaps(&self) -> Result<()> {
        let (entries, dense_end) = {
            let mut state = self.lock();
            self.give_up_unused(&mut state);
            let dense_end = self.layout.data_bytes() + state.mapped * self.space_bytes();
            match &state.space {
                Some(space) if space.used_end_bytes() > dense_end => (state.entries, dense_end),
                _ => return Ok(()),
            }
        };
        let mut left = MOVED_MAX_BYTES / self.space_bytes();
        let mut words = vec![Entry::Absent; PAGE_ENTRIES as usize];
        for first in (0..entries).step_by(PAGE_ENTRIES as usize) {
            let words = &mut words[..(entries - first).min(PAGE_ENTRIES) as usize];
            self.entries(first, words)?;
            for (block, entry) in (first..).zip(words.iter()) {
                let Entry::At(from) = *entry else { continue };
                if from < dense_end || left == 0 {
                    continue;
                }
                left -= 1;
                self.move_down(block, from)?;
            }
        }
        Ok(())
    }

    /// Moves a block to the lowest free place, if there is one before it.
    fn move_down(&self, block: u64, from: u64) -> Result<()> {
        self.load(block / PAGE_ENTRIES)?;
        let moved = self.reserve_move_of(&mut self.lock(), block)?;
        let Some(MoveTo::Place(place)) = moved else { return Ok(()) };
        let mut done = 0;
        while done < place.len_bytes {
            let mut bytes = vec![0; (place.len_bytes - done).min(COPY_BYTES) as usize];
            self.store.read_at(&mut bytes, from + done).map_err(self.io("read a block to move it", from + done))?;
            let to = place.to_bytes + done;
            self.store.write_at(&bytes, to).map_err(self.io("move a block", to))?;
            done += bytes.len() as u64;
        }
        self.commit_block(&mut self.lock(), block, Commit::Moved)?;
        if self.is_flush_due() {
            self.barrier.share(|| self.run_flush())?;
        }
        Ok(())
    }

    /// For close: returns all space that nothing refers to, cuts the file after its last block, and
    /// lets the header count its spaces. The caller has flushed, and no request follows.
    pub(super) fn trim(&self) -> Result<()> {
        let (end, freed, file_end) = {
            let mut state = self.lock();
            self.give_up_unused(&mut state);
            let Some(space) = &mut state.space else { return Ok(()) };
            let (end, freed) = space.free_all();
            (end, freed, space.file_end_bytes())
        };
        if end < file_end {
            self.store.set_len(end).map_err(self.io("cut the file after its last block", end))?;
            let mut state = self.lock();
            state.file_bytes = end;
            if let Some(space) = &mut state.space {
                space.set_file_end(end);
            }
        }
        freed.punch_all(&*self.store);
        let spaces = self.number_of(end);
        self.count_in_header(spaces)?;
        self.lock().announced = spaces;
        Ok(self.barrier.sync("close the image")?)
    }
}
