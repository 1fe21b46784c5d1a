//! The grains of a writable VMDK: their entries, reservations and commits.
//!
//! ```text
//!   read     drops ─▶ file read without the mutex ─▶ mutex: drops unchanged? ─▶ memory wins
//!   reserve  entry in memory ─▶ its space, or space of a new grain
//!   commit   the entry in memory changes; the space it had is quarantined
//! ```
//!
//! What is not in memory is current in the file. So bytes from the file are stale only if a table
//! was changed, written and dropped between the two steps of a read, which changes
//! [`State::drops`]. Then the read is repeated.
//!
//! An entry of 0 reads the parent's data, or zeros without a parent. In a child a block of zeros
//! needs the entry 1, which only extents with that flag have. The state mutex guards all of this.

use super::{
    tables::{Entry, Tables},
    write::{Prerequisite, Quarantined, State, TableId, Writing},
};
use crate::{BlockState, Commit, ImageError, Reservation, Result};
use diskwright_format::vmdk::{GRAIN_ABSENT, GRAIN_ZERO, SECTOR_BYTES};
use diskwright_store::FileRange;

/// The fewest tables that are kept in memory.
const TABLES_MIN: u64 = 64;

/// Copies raw entries from the table in memory; false if it is not there.
fn copy_raw(state: &State, tables: &Tables, id: TableId, first: u64, out: &mut [u64]) -> bool {
    let Some(entries) = state.tables.get(&id) else { return false };
    let start = (first % tables.table_entries) as usize;
    for (out, &raw) in out.iter_mut().zip(&entries[start..]) {
        *out = raw.into();
    }
    true
}

impl Writing {
    /// The table of a grain.
    pub(super) fn table_of(&self, extent: usize, grain: u64) -> TableId {
        (extent, (grain / self.tables(extent).table_entries) as u32)
    }

    /// The entries of grains that lie in one table: from memory, else from the file.
    pub fn entries(&self, extent: usize, first: u64, out: &mut [Entry]) -> Result<()> {
        let (tables, store) = (self.tables(extent), &**self.file(extent));
        let id = self.table_of(extent, first);
        let mut raw = vec![0; out.len()];
        loop {
            let (drops, entry) = {
                let state = self.lock();
                if copy_raw(&state, tables, id, first, &mut raw) {
                    drop(state);
                    return tables.decode_all(store, first, &raw, out);
                }
                (state.drops, self.directory_entry(&state, id))
            };
            if entry == GRAIN_ABSENT {
                out.fill(Entry::Absent);
                return Ok(());
            }
            tables.read_raw(store, tables.table_place(entry), first, &mut raw)?;
            let state = self.lock();
            if state.drops != drops {
                continue;
            }
            copy_raw(&state, tables, id, first, &mut raw);
            drop(state);
            return tables.decode_all(store, first, &raw, out);
        }
    }

    /// The entry of a table in the first directory.
    pub(super) fn directory_entry(&self, state: &State, (extent, table): TableId) -> u32 {
        state.extent_states[extent].directories[0].get(table as usize).copied().unwrap_or(GRAIN_ABSENT)
    }

    /// The entry of a grain, without its reservation. `None`: its table is not in memory.
    pub(super) fn entry(&self, state: &State, extent: usize, grain: u64) -> Result<Option<Entry>> {
        let tables = self.tables(extent);
        let id = self.table_of(extent, grain);
        match state.tables.get(&id) {
            Some(raw) => {
                let raw = raw[(grain % tables.table_entries) as usize];
                tables.decode(&**self.file(extent), grain, raw.into()).map(Some)
            }
            None if self.directory_entry(state, id) == GRAIN_ABSENT => Ok(Some(Entry::Absent)),
            None => Ok(None),
        }
    }

    /// Changes the entry of a grain, whose table is in memory.
    pub(super) fn set(&self, state: &mut State, extent: usize, grain: u64, raw: u32) {
        let tables = self.tables(extent);
        let (id, index) = (self.table_of(extent, grain), (grain % tables.table_entries) as usize);
        if let Some(entries) = state.tables.get_mut(&id) {
            entries[index] = raw;
            state.dirty.insert((id.0, id.1, (index as u64 * tables.entry_bytes() / SECTOR_BYTES) as u32));
        }
    }

    /// Quarantines the space of a grain.
    pub(super) fn free(&self, state: &mut State, extent: usize, offset_bytes: u64) {
        state.generation += 1;
        let range = FileRange { offset_bytes, len_bytes: self.tables(extent).grain_bytes };
        state.quarantined.push_back(Quarantined { generation: state.generation, extent, range });
    }

    /// Keeps a table in memory. Drops the clean ones if there are too many.
    pub(super) fn remember(&self, state: &mut State, id: TableId, entries: Box<[u32]>) {
        let most = (state.limit_bytes / 2 / self.tables(id.0).table_bytes()).max(TABLES_MIN);
        if state.tables.len() as u64 >= most && !state.pinned {
            let (dirty, new) = (&state.dirty, &state.dirty_directories);
            let before = state.tables.len();
            state.tables.retain(|&(extent, table), _| {
                new.contains(&(extent, table))
                    || dirty.range((extent, table, 0)..=(extent, table, u32::MAX)).next().is_some()
            });
            state.drops += u64::from(state.tables.len() < before);
        }
        state.tables.entry(id).or_insert(entries);
    }

    pub(super) fn reserve_grain(
        &self,
        state: &mut State,
        block: u64,
        extent: usize,
        grain: u64,
    ) -> Result<Option<Reservation>> {
        let store = self.layout.extents[extent].store_index;
        let reservation = |offset_bytes| Some(Reservation { store, offset_bytes, init: None });
        if let Some(&offset_bytes) = state.reserved.get(&block) {
            return Ok(reservation(offset_bytes));
        }
        match self.entry(state, extent, grain)? {
            None => return Ok(None),
            Some(Entry::At(offset_bytes)) => return Ok(reservation(offset_bytes)),
            Some(Entry::Bad(raw)) => return Err(self.tables(extent).damage(self.file(extent), grain, raw)),
            Some(Entry::Absent | Entry::Zero) => {}
        }
        if !state.tables.contains_key(&self.table_of(extent, grain)) {
            state.needs.note(block, Prerequisite::Table);
            return Ok(None);
        }
        let Some(offset_bytes) = self.take_grain(state, extent)? else {
            state.needs.note(block, Prerequisite::Space);
            return Ok(None);
        };
        state.reserved.insert(block, offset_bytes);
        Ok(reservation(offset_bytes))
    }

    /// Takes zeroed space for a grain; `None` if none is ready.
    fn take_grain(&self, state: &mut State, extent: usize) -> Result<Option<u64>> {
        let (file, grain_bytes) = (&**self.file(extent), self.tables(extent).grain_bytes);
        let Some(space) = &mut state.extent_states[extent].space else { return Ok(None) };
        let io_error = |at| move |error| ImageError::io("grow the file", file, at, error);
        let next = space.next_offset_bytes(grain_bytes).map_err(io_error(0))?;
        // Checked before the space is taken, as it would be lost otherwise.
        if next.checked_add(grain_bytes).is_none_or(|end| u32::try_from(end / SECTOR_BYTES).is_err()) {
            return Err(ImageError::Unsupported {
                path: file.name().to_owned(),
                what: "a grain beyond 2 TiB in the file, where a grain table cannot point,".into(),
                hint: "convert the disk to VHDX, or to a VMDK in extents of 2 GB".into(),
            });
        }
        space.take(grain_bytes).map_err(io_error(next))
    }

    /// The entry for a grain at this offset.
    fn raw_of(&self, block: u64, offset_bytes: u64) -> Result<u32> {
        u32::try_from(offset_bytes / SECTOR_BYTES).map_err(|_| self.misuse(block, "lies beyond 2 TiB in its file"))
    }

    pub(super) fn commit_grain(
        &self,
        state: &mut State,
        (block, extent, grain): (u64, usize, u64),
        change: Commit,
    ) -> Result<Option<BlockState>> {
        let Some(entry) = self.entry(state, extent, grain)? else { return Ok(None) };
        let old = match entry {
            Entry::At(at) => Some(at),
            Entry::Absent | Entry::Zero | Entry::Bad(_) => None,
        };
        let data = |offset_bytes| BlockState::Data { store: self.layout.extents[extent].store_index, offset_bytes };
        match change {
            Commit::Whole | Commit::Sectors { .. } => {
                let Some(&at) = state.reserved.get(&block) else {
                    let at = old.ok_or_else(|| self.misuse(block, "has no space: reserve it first"))?;
                    return Ok(Some(data(at)));
                };
                if !state.tables.contains_key(&self.table_of(extent, grain)) {
                    return Ok(None);
                }
                let raw = self.raw_of(block, at)?;
                state.reserved.remove(&block);
                self.set(state, extent, grain, raw);
                Ok(Some(data(at)))
            }
            Commit::Moved => {
                let (Some(from), Some(&to)) = (old, state.moving.get(&block)) else {
                    return Err(self.misuse(block, "is committed as moved without a place to move to"));
                };
                let raw = self.raw_of(block, to)?;
                state.moving.remove(&block);
                self.set(state, extent, grain, raw);
                self.free(state, extent, from);
                Ok(Some(data(to)))
            }
            Commit::Zero | Commit::Discard | Commit::Absent => {
                self.commit_nothing(state, (block, extent, grain), entry, change != Commit::Absent)
            }
        }
    }

    /// Removes the data of a grain. `is_zero`: the block then reads as zeros, also in a child.
    fn commit_nothing(
        &self,
        state: &mut State,
        (block, extent, grain): (u64, usize, u64),
        entry: Entry,
        is_zero: bool,
    ) -> Result<Option<BlockState>> {
        let hides = is_zero && self.layout.is_child();
        if hides && !self.tables(extent).has_zeros() {
            return Err(self.without_payload());
        }
        let (raw, becomes) = if hides { (GRAIN_ZERO, Entry::Zero) } else { (GRAIN_ABSENT, Entry::Absent) };
        if entry != becomes {
            if state.extent_states[extent].space.is_none() {
                state.needs.note(block, Prerequisite::Survey);
                return Ok(None);
            }
            if !state.tables.contains_key(&self.table_of(extent, grain)) {
                state.needs.note(block, Prerequisite::Table);
                return Ok(None);
            }
            self.set(state, extent, grain, raw);
            if let Entry::At(at) = entry {
                self.free(state, extent, at);
            }
        }
        if let Some(at) = state.reserved.remove(&block) {
            self.free(state, extent, at);
        }
        Ok(Some(if hides { BlockState::Zero } else { BlockState::Absent }))
    }
}
