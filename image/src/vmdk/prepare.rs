//! The I/O that `reserve` and `commit` of a VMDK need first, without the state mutex.
//!
//! ```text
//!   prepare:   much is dirty?  flush                           so that memory stays bounded
//!              tables          read; inserted if still absent
//!              a need          under `preparing`, one thread at a time:
//!                survey        the walk over the grains (growth.rs)
//!                table         space for both copies of a new table
//!                space         free pieces zeroed, or the file grown
//! ```
//!
//! A piece that is being zeroed is in no list, and the new end of a file is recorded only after it
//! has grown. So `reserve` never hands out space that is not ready.

use super::{
    layout::Place,
    tables::{Entry, LOST},
    write::{Prerequisite, TableId, Writing},
};
use crate::{
    ImageError, Result,
    needs::{Prerequisites, supply_each},
    space::zero_pieces,
};
use diskwright_format::vmdk::{GRAIN_ABSENT, SECTOR_BYTES};
use std::ops::Range;

/// Maximum number of blocks that one preparation handles.
const MAX_BLOCKS: u64 = 1024;

impl Writing {
    /// Supplies what `reserve` and `commit` of these blocks lacked. Only the first 1024 blocks
    /// count.
    pub(super) fn prepare_blocks(&self, blocks: Range<u64>) -> Result<()> {
        self.check_barriers()?;
        if self.is_flush_due() {
            self.barriers[0].share(|| self.run_flush())?;
        }
        let end = blocks.end.min(self.layout.blocks()).min(blocks.start.saturating_add(MAX_BLOCKS));
        let mut last = None;
        for block in blocks.start..end {
            let Some(Place::Grain { extent, grain, .. }) = self.layout.place(block) else { continue };
            let id = self.table_of(extent, grain);
            if last != Some(id) {
                self.load(id)?;
                last = Some(id);
            }
        }
        let blocks = blocks.start..end.max(blocks.start);
        let needs = |with: &mut dyn FnMut(&mut Prerequisites<Prerequisite>)| with(&mut self.lock().needs);
        supply_each(&blocks, &self.preparing, &needs, &mut |block, need| match self.layout.place(block) {
            Some(Place::Grain { extent, grain, .. }) => self.supply(extent, grain, need),
            _ => Ok(()),
        })
    }

    fn supply(&self, extent: usize, grain: u64, need: Prerequisite) -> Result<()> {
        self.survey(extent)?;
        match need {
            Prerequisite::Survey => Ok(()),
            Prerequisite::Space => self.make_room(extent, self.tables(extent).grain_bytes),
            Prerequisite::Table => self.make_table(self.table_of(extent, grain)),
        }
    }

    /// Reads a table into memory, if it exists. Entries that are invalid are those of the redundant
    /// table, where that has valid ones.
    pub(super) fn load(&self, id: TableId) -> Result<()> {
        let (tables, store) = (self.tables(id.0), &**self.file(id.0));
        loop {
            let (entry, drops) = {
                let state = self.lock();
                if state.tables.contains_key(&id) {
                    return Ok(());
                }
                (self.directory_entry(&state, id), state.drops)
            };
            if entry == GRAIN_ABSENT || entry == LOST {
                return Ok(());
            }
            let first = u64::from(id.1) * tables.table_entries;
            let mut raw = vec![0; tables.table_entries as usize];
            tables.read_raw(store, tables.table_place(entry), first, &mut raw)?;
            let mut entries = vec![Entry::Absent; raw.len()];
            tables.decode_all(store, first, &raw, &mut entries)?;
            let entries = raw.iter().zip(&entries).map(|(&raw, entry)| match entry {
                Entry::At(at) => (at / SECTOR_BYTES) as u32,
                Entry::Absent | Entry::Zero | Entry::Bad(_) => raw as u32,
            });
            let entries: Box<[u32]> = entries.collect();
            let mut state = self.lock();
            if state.drops == drops {
                self.remember(&mut state, id, entries);
                return Ok(());
            }
        }
    }

    /// Makes space for all copies of a table that does not exist yet: zeros, so no grain exists in
    /// it. The caller holds `preparing`.
    fn make_table(&self, id: TableId) -> Result<()> {
        let (extent, table) = id;
        self.load(id)?;
        if self.lock().tables.contains_key(&id) {
            return Ok(());
        }
        let tables = self.tables(extent);
        let (store, bytes) = (&**self.file(extent), tables.table_bytes());
        let mut places: Vec<u32> = Vec::new();
        while places.len() < tables.directories.len() {
            let taken = match &mut self.lock().extent_states[extent].space {
                Some(space) => space.take(bytes).map_err(|error| ImageError::io("grow the file", store, 0, error))?,
                None => return Ok(()),
            };
            match taken {
                Some(at) => places.push(u32::try_from(at / SECTOR_BYTES).map_err(|_| ImageError::Unsupported {
                    path: store.name().to_owned(),
                    what: "a grain table beyond 2 TiB in the file".into(),
                    hint: "convert the disk to VHDX".into(),
                })?),
                None => self.make_room(extent, bytes)?,
            }
        }
        let mut state = self.lock();
        for (directory, place) in state.extent_states[extent].directories.iter_mut().zip(places) {
            if let Some(entry) = directory.get_mut(table as usize) {
                *entry = place;
            }
        }
        state.dirty_directories.insert(id);
        let entries = vec![GRAIN_ABSENT; tables.table_entries as usize].into_boxed_slice();
        self.remember(&mut state, id, entries);
        Ok(())
    }

    /// Makes sure that a piece of this length can be taken. The caller holds `preparing`.
    pub(super) fn make_room(&self, extent: usize, len_bytes: u64) -> Result<()> {
        let store = &**self.file(extent);
        let io_error = |error| ImageError::io("grow the file", store, 0, error);
        let (pieces, extension) = match &mut self.lock().extent_states[extent].space {
            None => return Ok(()),
            Some(space) => {
                let pieces = space.take_to_zero(len_bytes);
                let extension = if pieces.is_empty() { space.growth(len_bytes).map_err(io_error)? } else { None };
                (pieces, extension)
            }
        };
        if !pieces.is_empty() {
            let (zeroed, result) = zero_pieces(store, &pieces, len_bytes);
            if let Some(space) = &mut self.lock().extent_states[extent].space {
                space.zeroed(&pieces, zeroed, len_bytes);
            }
            return result.map_err(io_error);
        }
        if let Some(extension) = extension {
            let end = extension.carry_out(store).map_err(io_error)?;
            self.tables(extent).note_len(end);
            self.count_free(extent, end)?;
            if let Some(space) = &mut self.lock().extent_states[extent].space {
                space.set_file_end(end);
            }
        }
        Ok(())
    }
}
