//! A larger size for a VDI that is open for writing.
//!
//! ```text
//!   survey ─▶ entries of the new blocks written behind the map; end of the last block zeroed
//!          ─▶ sync ─▶ header: size, length of the map, spaces (one sector) ─▶ sync ─▶ memory
//! ```
//!
//! The map grows in place where it has room: before the first block a new image has room for the
//! map of a larger disk. Without that room it is written anew (`longer_map.rs`). A dynamic disk
//! gets free entries, a fixed one gets space for all new blocks.
//!
//! Until the header counts, no program looks at the new entries. The caller of the public function
//! holds no lock; `preparing` and `flushing` are held until memory agrees with the header, so that
//! no flush writes a page of the map meanwhile.

use super::{
    map::Entry,
    write::{PAGE_ENTRIES, State, Writing},
};
use crate::{ImageError, Result, vdi::layout::SECTOR_BYTES};
use diskwright_format::vdi::VdiEntry;
use diskwright_store::{FileRange, Zeroing};
use std::sync::PoisonError;

/// Bytes of the map that one call writes.
pub(super) const STEP_BYTES: usize = 1 << 20;

impl Writing {
    /// Enlarges the disk.
    ///
    /// # Errors
    /// As [`crate::ImageWriter::resize`].
    pub(super) fn grow(&self, size_bytes: u64) -> Result<()> {
        let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        let (old_bytes, entries) = {
            let state = self.lock();
            (state.size_bytes, state.entries)
        };
        if size_bytes == old_bytes {
            return Ok(());
        }
        let blocks = self.blocks_for(old_bytes, size_bytes)?;
        self.barrier.check()?;
        self.survey()?;
        let longer = self.longer_map(blocks)?;
        longer.as_ref().map_or(Ok(()), |plan| self.check_way(plan))?;
        let _flushing = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        let first = old_bytes.div_ceil(self.layout.header.block_bytes.into());
        self.require_free(first, entries)?;
        let mut words = if self.is_fixed() {
            self.take_spaces(blocks - first)?
        } else {
            vec![VdiEntry::Free.word(); (blocks.max(entries) - first) as usize]
        };
        let written = match &longer {
            None => self.write_larger(first, &words, old_bytes, size_bytes),
            Some(plan) => self.write_longer_map(plan, (first, &words), (old_bytes, size_bytes)),
        };
        let mut state = self.lock();
        if let Err(error) = written {
            self.give_back(&mut state, &words);
            return Err(error);
        }
        if let Some(plan) = &longer {
            self.adopt_longer_map(&mut state, plan, &mut words);
        }
        self.adopt(&mut state, first, &words, size_bytes);
        Ok(())
    }

    /// Number of blocks of a disk of the new size.
    pub(super) fn blocks_for(&self, old_bytes: u64, size_bytes: u64) -> Result<u64> {
        let refused = |what: String| {
            Err(ImageError::Unsupported {
                path: self.store.name().to_owned(),
                what,
                hint: "convert the disk to an image of the wanted size".into(),
            })
        };
        if size_bytes < old_bytes || !size_bytes.is_multiple_of(SECTOR_BYTES) {
            return refused(format!("a new size of {size_bytes} bytes for a VDI of {old_bytes}"));
        }
        let blocks = size_bytes.div_ceil(self.layout.header.block_bytes.into());
        if blocks > u64::from(u32::MAX) {
            return refused(format!("{blocks} blocks in a VDI, which counts them in 32 bits"));
        }
        self.longer_map(blocks)?;
        Ok(blocks)
    }

    /// Refuses entries behind the end of the disk that have a meaning.
    fn require_free(&self, first: u64, entries: u64) -> Result<()> {
        let mut found = None;
        self.layout.each_entry(&*self.store, first, entries, &mut |block, entry| {
            found = Some((block, entry));
            Ok(false)
        })?;
        match found {
            None => Ok(()),
            Some((block, entry)) => Err(ImageError::Unsupported {
                path: self.store.name().to_owned(),
                what: format!("a larger size for a VDI with an entry behind its end (block {block}: {entry:?})"),
                hint: "convert the disk to an image of the wanted size".into(),
            }),
        }
    }

    /// Takes space for the new blocks of a fixed disk. The header does not count it yet.
    fn take_spaces(&self, count: u64) -> Result<Vec<u32>> {
        let mut words = Vec::new();
        while (words.len() as u64) < count {
            let taken = match &mut self.lock().space {
                Some(space) => space.take(self.space_bytes()).map_err(self.io("grow the file", 0)),
                None => Ok(None),
            };
            let more = match taken {
                Ok(Some(at)) => self.word_of(words.len() as u64, at).map(|word| words.push(word)),
                Ok(None) => self.make_piece(),
                Err(error) => Err(error),
            };
            if let Err(error) = more {
                self.give_back(&mut self.lock(), &words);
                return Err(error);
            }
        }
        Ok(words)
    }

    /// Frees the spaces of these entries, which no map in the file names.
    fn give_back(&self, state: &mut State, words: &[u32]) {
        for &word in words {
            if let VdiEntry::Space(space) = VdiEntry::parse(word) {
                self.free(state, self.layout.payload_bytes(space));
            }
        }
    }

    fn write_larger(&self, first: u64, words: &[u32], old_bytes: u64, size_bytes: u64) -> Result<()> {
        for (step, words) in (0..).zip(words.chunks(STEP_BYTES / 4)) {
            let at = self.layout.entry_at(first) + step * STEP_BYTES as u64;
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            self.barrier.write(&bytes, at).map_err(self.io("write the block map", at))?;
        }
        self.zero_end(old_bytes)?;
        self.barrier.sync("make the longer block map durable")?;
        let spaces = self.lock().space.as_ref().map_or(0, |space| self.number_of(space.used_end_bytes()));
        self.head.change(&*self.store, |sector| {
            sector.set_size(size_bytes, u32::try_from(first + words.len() as u64).unwrap_or(u32::MAX));
            if self.is_fixed() {
                sector.set_allocated(u32::try_from(spaces).unwrap_or(u32::MAX));
            }
            Ok(())
        })?;
        Ok(self.barrier.sync("make the new size durable")?)
    }

    /// Zeroes the bytes of the last block that lie behind the end of the disk: another program may
    /// have left data there.
    pub(super) fn zero_end(&self, old_bytes: u64) -> Result<()> {
        let block_bytes = u64::from(self.layout.header.block_bytes);
        let (block, within) = (old_bytes / block_bytes, old_bytes % block_bytes);
        if within == 0 {
            return Ok(());
        }
        self.load(block / PAGE_ENTRIES)?;
        let places = {
            let state = self.lock();
            let at = if let Some(Entry::At(at)) = self.entry(&state, block) { Some(at) } else { None };
            at.into_iter().chain(state.moving.get(&block).copied()).collect::<Vec<_>>()
        };
        for at in places {
            let range = FileRange { offset_bytes: at + within, len_bytes: block_bytes - within };
            let zeroed = self.store.zero_range(range, Zeroing::Keep);
            zeroed.map_err(self.io("zero the end of the last block", range.offset_bytes))?;
        }
        Ok(())
    }

    /// Takes the new entries over into memory.
    fn adopt(&self, state: &mut State, first: u64, words: &[u32], size_bytes: u64) {
        let old_entries = state.entries;
        state.entries = first + words.len() as u64;
        state.size_bytes = size_bytes;
        let (page, within) = (first / PAGE_ENTRIES, (first % PAGE_ENTRIES) as usize);
        if let Some(held) = state.pages.get_mut(&page) {
            let more = words.iter().copied().take(PAGE_ENTRIES as usize - within);
            *held = held.iter().copied().take(within).chain(more).collect();
        }
        // Pages behind it had entries behind the end of the disk, which never change.
        (page + 1..=old_entries / PAGE_ENTRIES).for_each(|page| drop(state.pages.remove(&page)));
        state.drops += 1;
        if self.is_fixed() {
            state.mapped += words.len() as u64;
            if let Some(space) = &state.space {
                state.announced = state.announced.max(self.number_of(space.used_end_bytes()));
            }
        }
    }
}
