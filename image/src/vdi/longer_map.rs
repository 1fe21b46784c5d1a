//! A longer block map for a VDI that has no room for it behind the present one.
//!
//! ```text
//!   header │ map │ room │ 0 │ 1 │ 2 │ 3 ...       the longer map needs the room and spaces 0 and 1
//!     1  spaces 0 and 1 are not handed out any more; their blocks move behind them
//!     2  the moves are durable, and no request reaches the old places
//!   header │ map │ longer map │ 2 │ 3 ...
//!     3  the longer map is written, with each number less by 2 ─▶ sync
//!     4  header: size, places of map and data, spaces (one sector) ─▶ sync    the atomic change
//!     5  memory: the numbers in pages of the map
//! ```
//!
//! Steps 1 and 2 are those of the disk above, which holds the blocks that it copies
//! ([`ImageWriter::blocks_in_the_way`]). If the longer map fits before the present one, where an
//! earlier growth has left its map, nothing moves and no number changes.
//!
//! Why a power cut does no harm: until step 4 the header names the present map, which is whole, and
//! no space that it names is overwritten. A growth that is not finished leaves spaces that no entry
//! names.
//!
//! Why writers can continue: no flush writes a page of the map between steps 3 and 5 (`flushing`).
//! Pages that change meanwhile stay dirty in memory, and the next flush writes them to the longer
//! map. Offsets of reservations are those of the file, and become numbers when they are committed.
//!
//! [`ImageWriter::blocks_in_the_way`]: crate::ImageWriter::blocks_in_the_way

use super::{
    grow::STEP_BYTES,
    layout::SECTOR_BYTES,
    map::Entry,
    write::{PAGE_ENTRIES, Prerequisite, State, Writing},
};
use crate::{ImageError, MovePlace, MoveTo, Result, space::Space};
use diskwright_format::vdi::{HEADER_BYTES, VdiEntry};
use std::{collections::BTreeSet, io, sync::PoisonError};

/// Where a longer map goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LongerMap {
    pub map_bytes: u64,
    /// Where the data begin then.
    pub data_bytes: u64,
    /// Spaces at the start of the data that the map takes.
    pub given_up: u64,
}

impl LongerMap {
    /// The word that stands for the same space, if the map leaves it.
    fn word(&self, word: u32) -> Option<u32> {
        match VdiEntry::parse(word) {
            VdiEntry::Space(space) => u64::from(space).checked_sub(self.given_up).map(|number| number as u32),
            VdiEntry::Free | VdiEntry::Zero => Some(word),
        }
    }
}

impl Writing {
    /// The place of a map with so many entries; `None` if the present place has room for it.
    ///
    /// # Errors
    /// `Unsupported` if the header cannot name the place.
    pub(super) fn longer_map(&self, entries: u64) -> Result<Option<LongerMap>> {
        let (map, data) = (self.layout.map_bytes(), self.layout.data_bytes());
        let needed_bytes = entries * 4;
        if map + needed_bytes <= data {
            return Ok(None);
        }
        if HEADER_BYTES as u64 + needed_bytes <= map {
            return Ok(Some(LongerMap { map_bytes: HEADER_BYTES as u64, data_bytes: data, given_up: 0 }));
        }
        let map_bytes = (map + self.lock().entries * 4).next_multiple_of(SECTOR_BYTES);
        let given_up = (map_bytes + needed_bytes).saturating_sub(data).div_ceil(self.space_bytes());
        let data_bytes = data + given_up * self.space_bytes();
        if u32::try_from(data_bytes).is_err() {
            let what = format!("a VDI whose block map of {entries} entries ends beyond 4 GiB");
            return Err(self.unsupported(&what, "convert the disk to an image of the wanted size"));
        }
        Ok(Some(LongerMap { map_bytes, data_bytes, given_up }))
    }

    /// Step 1: no space that the map of a larger disk takes is handed out any more. Returns the
    /// blocks that have such a space, or a reservation there.
    pub(super) fn find_blocks_in_the_way(&self, size_bytes: u64) -> Result<Vec<u64>> {
        let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        let blocks = self.blocks_for(self.size_bytes(), size_bytes)?;
        let Some(plan) = self.longer_map(blocks)?.filter(|plan| plan.given_up > 0) else { return Ok(Vec::new()) };
        self.barrier.check()?;
        self.survey()?;
        let start = plan.data_bytes;
        if self.lock().file_bytes < start {
            self.store.set_len(start).map_err(self.io("lengthen the file to its data", start))?;
        }
        let (entries, mut found) = {
            let mut state = self.lock();
            state.file_bytes = state.file_bytes.max(start);
            if let Some(space) = &mut state.space {
                space.begin_at(start, self.space_bytes());
            }
            let reserved = state.reserved.iter().filter(|(_, at)| **at < start).map(|(&block, _)| block);
            (state.entries, reserved.collect::<BTreeSet<u64>>())
        };
        let mut page = vec![Entry::Absent; PAGE_ENTRIES as usize];
        for first in (0..entries).step_by(PAGE_ENTRIES as usize) {
            let page = &mut page[..(entries - first).min(PAGE_ENTRIES) as usize];
            self.entries(first, page)?;
            let there = (first..).zip(page.iter()).filter(|(_, entry)| matches!(entry, Entry::At(at) if *at < start));
            found.extend(there.map(|(block, _)| block));
        }
        Ok(found.into_iter().collect())
    }

    /// A place for a block that lies in the way, which the caller holds.
    pub(super) fn reserve_away_of(&self, state: &mut State, block: u64) -> Result<Option<MoveTo>> {
        let start = state.space.as_ref().map_or(0, Space::start_bytes);
        // A reservation whose request has failed. A later request gets another place.
        if state.reserved.get(&block).is_some_and(|&at| at < start) {
            state.reserved.remove(&block);
        }
        let from = match self.entry(state, block) {
            None if block < state.entries => return Ok(None),
            Some(Entry::At(at)) if at < start => at,
            _ => return Ok(Some(MoveTo::Stay)),
        };
        let to = match state.moving.get(&block) {
            Some(&to) if to >= start => to,
            _ => match self.take_space(state, block)? {
                Some(to) => to,
                None => {
                    state.needs.note(block, Prerequisite::Space);
                    return Ok(None);
                }
            },
        };
        state.moving.insert(block, to);
        let place = MovePlace { store: 0, from_bytes: from, to_bytes: to, len_bytes: self.space_bytes() };
        Ok(Some(MoveTo::Place(place)))
    }

    /// Whether nothing lies where a longer map goes. The caller holds `preparing`.
    pub(super) fn check_way(&self, plan: &LongerMap) -> Result<()> {
        let state = self.lock();
        let start = state.space.as_ref().map_or(0, Space::start_bytes);
        let is_reserved = state.reserved.values().chain(state.moving.values()).any(|&at| at < plan.data_bytes);
        if plan.given_up == 0 || start >= plan.data_bytes && !is_reserved {
            return Ok(());
        }
        Err(self.in_the_way(0))
    }

    fn in_the_way(&self, block: u64) -> ImageError {
        let error = io::Error::other(format!("block {block} lies where the longer block map goes"));
        ImageError::io("make the block map longer", &*self.store, 0, error)
    }

    /// Steps 3 and 4. `words` are those of the new blocks, which begin at block `first`; their
    /// numbers are those before the change.
    pub(super) fn write_longer_map(
        &self,
        plan: &LongerMap,
        (first, words): (u64, &[u32]),
        (old_bytes, size_bytes): (u64, u64),
    ) -> Result<()> {
        let mut block = 0;
        while block < first {
            let count = (first - block).min((STEP_BYTES / 4) as u64);
            let old = self.layout.read_words(&*self.store, block, count as usize)?;
            self.write_words(plan, block, &old)?;
            block += count;
        }
        for (step, words) in (0..).zip(words.chunks(STEP_BYTES / 4)) {
            self.write_words(plan, first + step * (STEP_BYTES / 4) as u64, words)?;
        }
        self.zero_end(old_bytes)?;
        self.barrier.sync("make the longer block map durable")?;
        let counted = self.counted_spaces();
        self.head.change(&*self.store, |sector| {
            let entries = u32::try_from(first + words.len() as u64).unwrap_or(u32::MAX);
            sector.set_size(size_bytes, entries);
            // `longer_map` has checked that they are not larger.
            sector.set_places(plan.map_bytes as u32, plan.data_bytes as u32);
            sector.set_allocated(u32::try_from(counted.saturating_sub(plan.given_up)).unwrap_or(u32::MAX));
            Ok(())
        })?;
        Ok(self.barrier.sync("make the new size durable")?)
    }

    fn write_words(&self, plan: &LongerMap, first: u64, words: &[u32]) -> Result<()> {
        let mut bytes = Vec::with_capacity(words.len() * 4);
        for (block, &word) in (first..).zip(words) {
            bytes.extend(plan.word(word).ok_or_else(|| self.in_the_way(block))?.to_le_bytes());
        }
        let at = plan.map_bytes + first * 4;
        self.barrier.write(&bytes, at).map_err(self.io("write the longer block map", at))
    }

    /// The spaces that the header counts after a growth.
    fn counted_spaces(&self) -> u64 {
        let state = self.lock();
        let used = state.space.as_ref().map_or(0, |space| self.number_of(space.used_end_bytes()));
        if self.is_fixed() { used } else { state.announced }
    }

    /// Step 5. The map in memory then has the new numbers.
    pub(super) fn adopt_longer_map(&self, state: &mut State, plan: &LongerMap, words: &mut [u32]) {
        self.layout.move_to(plan.map_bytes, plan.data_bytes);
        let pages = state.pages.values_mut().flat_map(|page| page.iter_mut());
        for word in pages.chain(words) {
            // No entry is left in the way.
            *word = plan.word(*word).unwrap_or(VdiEntry::Free.word());
        }
        state.announced = state.announced.saturating_sub(plan.given_up);
    }
}
