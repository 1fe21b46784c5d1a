//! Enlarges an open disk: its last extent becomes longer.
//!
//! ```text
//!   flat     1  file ─▶ new length ─▶ sync
//!            2  descriptor: the extent's length ─▶ sync                       the atomic change
//!
//!   sparse   1  bytes of the last grain beyond the old end ─▶ zeroed
//!            2  new grain tables; new directories, if there is no room behind the old ones ─▶ sync
//!            3  redundant directory ─▶ sync ─▶ directory ─▶ sync
//!            4  header: capacity, places of the directories ─▶ sync           the atomic change
//!            5  descriptor: the extent's length ─▶ sync
//! ```
//!
//! Why a power cut does no harm: the header and the line of the extent each lie in one sector, so
//! neither is torn. Directory entries beyond the capacity mean nothing to any program. A directory
//! that moves has all old entries at its new place before the header leads there. A cut between
//! steps 4 and 5 leaves a header whose capacity is larger than the line says: of a disk in one file
//! the header counts, of a disk in several the line does. The same call then writes the line.
//!
//! All new tables get their space at once, as those of a new file do: QEMU does not add any.
//!
//! Why writers can continue: `preparing` is held throughout, so no other thread makes tables or
//! takes space for a file. `flushing` is held while directories are written and installed. Sizes
//! are raised last, when everything behind the old end can be found.
//!
//! The space of directories that were moved stays unused, and `compact` leaves new tables where
//! they are, behind the grains of that time. The geometry that the disk database
//! records follows the size where the text has room for it: no program depends on it.

use super::{
    corrupt,
    layout::{Content, Part},
    new_size,
    tables::{Entry, EntryCoding, LOST},
    write::Writing,
};
use crate::{ImageError, Result};
use diskwright_format::vmdk::{CowdHeader, SECTOR_BYTES, SparseHeader};
use std::sync::PoisonError;

/// Entries of a directory in a sector.
const PER_SECTOR: usize = (SECTOR_BYTES / 4) as usize;

impl Writing {
    pub(super) fn grow_to(&self, size_bytes: u64) -> Result<()> {
        self.check_barriers()?;
        let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        let part = new_size::check(&self.layout, &self.document, size_bytes)?;
        let len_bytes = size_bytes - part.start_bytes;
        match part.content {
            Content::Zero => {}
            Content::Flat { store, first_bytes } => {
                self.extend_file(part, usize::from(store), first_bytes, len_bytes)?;
            }
            Content::Sparse(extent) => self.extend_tables(part, extent, len_bytes)?,
        }
        self.document.set_length(&self.barriers[0], len_bytes / SECTOR_BYTES, size_bytes / SECTOR_BYTES)?;
        part.end_bytes.raise(size_bytes);
        self.layout.size_bytes.raise(size_bytes);
        Ok(())
    }

    /// Step 1 for a flat extent.
    fn extend_file(&self, part: &Part, index: usize, first_bytes: u64, len_bytes: u64) -> Result<()> {
        let store = &*self.layout.stores[index];
        let old_end = first_bytes + (part.end_bytes.get() - part.start_bytes);
        let new_end = first_bytes.saturating_add(len_bytes);
        if new_end == old_end {
            return Ok(());
        }
        let io = |error| ImageError::io("make the extent longer", store, old_end, error);
        // What lies behind the extent was never on the disk.
        if store.len_bytes().map_err(io)? > old_end {
            store.set_len(old_end).map_err(io)?;
        }
        store.set_len(new_end).map_err(io)?;
        Ok(self.barriers[index].sync("make the extent's new length durable")?)
    }

    /// Steps 1 to 4 for a sparse extent.
    fn extend_tables(&self, part: &Part, extent: usize, len_bytes: u64) -> Result<()> {
        let tables = self.tables(extent);
        let present_bytes = tables.capacity_bytes.get();
        let part_bytes = part.end_bytes.get() - part.start_bytes;
        if len_bytes == part_bytes {
            return Ok(());
        }
        self.survey(extent)?;
        self.refuse_grains_behind(extent, part_bytes)?;
        self.zero_end_of_last_grain(extent, part_bytes)?;
        if len_bytes <= present_bytes {
            return self.sync_extents(&[extent].into(), "make the cleared end of a grain durable");
        }
        let grains = len_bytes.div_ceil(tables.grain_bytes);
        let count = grains.div_ceil(tables.table_entries);
        let old_count = tables.tables();
        let new_tables = self.take_tables(extent, count - old_count)?;
        let _no_flush = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut directories, mut places) = {
            let extent_state = &self.lock().extent_states[extent];
            (extent_state.directories.clone(), extent_state.places.clone())
        };
        let sectors = |count: u64| (count as usize).div_ceil(PER_SECTOR);
        let must_move = sectors(count) > sectors(old_count);
        for (directory, new) in directories.iter_mut().zip(&new_tables) {
            directory.extend(new);
        }
        if must_move {
            for place in &mut places {
                *place = self.take_space(extent, sectors(count) as u64 * SECTOR_BYTES)?;
            }
        }
        let extents = [extent].into();
        self.sync_extents(&extents, "make the new grain tables durable")?;
        let from = if must_move { 0 } else { old_count as usize / PER_SECTOR };
        let store = &**self.file(extent);
        for (directory, place) in directories.iter().zip(&places).rev() {
            let mut bytes: Vec<u8> =
                directory[from * PER_SECTOR..].iter().flat_map(|entry| entry.to_le_bytes()).collect();
            bytes.resize(bytes.len().next_multiple_of(SECTOR_BYTES as usize), 0);
            let at = place + from as u64 * SECTOR_BYTES;
            store.write_at(&bytes, at).map_err(|error| ImageError::io("write a grain directory", store, at, error))?;
            self.sync_extents(&extents, "make the grain directory durable")?;
        }
        self.switch_header(extent, len_bytes, &places, count)?;
        self.sync_extents(&extents, "make the extent's new capacity durable")?;
        let mut state = self.lock();
        let extent_state = &mut state.extent_states[extent];
        (extent_state.directories, extent_state.places) = (directories, places);
        drop(state);
        tables.capacity_bytes.raise(len_bytes);
        Ok(())
    }

    /// Grains behind the disk's end would become visible, and the survey has not counted their
    /// space. The survey has made both copies of the tables equal.
    fn refuse_grains_behind(&self, extent: usize, part_bytes: u64) -> Result<()> {
        let tables = self.tables(extent);
        let first = part_bytes.div_ceil(tables.grain_bytes);
        let mut grain = first;
        while grain < tables.tables() * tables.table_entries {
            let end = (grain / tables.table_entries + 1) * tables.table_entries;
            let mut entries = vec![Entry::Absent; (end - grain) as usize];
            self.entries(extent, grain, &mut entries)?;
            if entries.iter().any(|&entry| entry != Entry::Absent) {
                let what = "a larger size for a VMDK whose last extent has data behind the disk's end";
                return Err(self.unsupported(what, "convert the disk to a new one"));
            }
            grain = end;
        }
        Ok(())
    }

    /// Step 1: what a longer last grain shows. Its bytes behind the disk's end are not always
    /// zeros: the disk may have been larger. The survey has made the file as long as its grains.
    fn zero_end_of_last_grain(&self, extent: usize, part_bytes: u64) -> Result<()> {
        let grain_bytes = self.tables(extent).grain_bytes;
        let valid_bytes = part_bytes % grain_bytes;
        if valid_bytes == 0 {
            return Ok(());
        }
        let mut entry = [Entry::Absent];
        self.entries(extent, part_bytes / grain_bytes, &mut entry)?;
        let Entry::At(at) = entry[0] else { return Ok(()) };
        let (store, from) = (&**self.file(extent), at + valid_bytes);
        let zeros = vec![0; (grain_bytes - valid_bytes) as usize];
        store.write_at(&zeros, from).map_err(|error| ImageError::io("clear the end of a grain", store, from, error))
    }

    /// Space for `count` new tables of each directory, which reads as zeros. Returns their entries.
    fn take_tables(&self, extent: usize, count: u64) -> Result<Vec<Vec<u32>>> {
        let tables = self.tables(extent);
        let (copies, table_sectors) = (tables.directories.len(), tables.table_bytes() / SECTOR_BYTES);
        let mut all = Vec::with_capacity(copies);
        for _ in 0..copies {
            let first = if count == 0 { 0 } else { self.take_space(extent, count * tables.table_bytes())? };
            let first = first / SECTOR_BYTES;
            all.push((0..count).map(|table| (first + table * table_sectors) as u32).collect());
        }
        Ok(all)
    }

    /// Takes space that reads as zeros, at most 2 TiB into the file. The caller holds `preparing`.
    fn take_space(&self, extent: usize, len_bytes: u64) -> Result<u64> {
        let store = &**self.file(extent);
        let io = |error| ImageError::io("grow the file", store, 0, error);
        loop {
            let taken = match &mut self.lock().extent_states[extent].space {
                Some(space) => space.take(len_bytes).map_err(io)?,
                None => return Err(corrupt(store, "grain table", 0, "no survey of the file", "a survey")),
            };
            match taken {
                Some(at) if (at + len_bytes) / SECTOR_BYTES < u64::from(LOST) => return Ok(at),
                Some(_) => {
                    return Err(self.unsupported("a grain table beyond 2 TiB in the file", "convert the disk to VHDX"));
                }
                None => self.make_room(extent, len_bytes)?,
            }
        }
    }

    /// Step 4. All other bytes stay as they are.
    fn switch_header(&self, extent: usize, len_bytes: u64, places: &[u64], count: u64) -> Result<()> {
        let sectors: Vec<u64> = places.iter().map(|place| place / SECTOR_BYTES).collect();
        self.change_header(extent, 0, |sector| match self.tables(extent).coding {
            EntryCoding::Cowd => {
                // `new_size.rs` has checked that the numbers are not larger.
                let number = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
                let directory = sectors.first().copied().unwrap_or(0);
                CowdHeader::enlarge(sector, number(len_bytes / SECTOR_BYTES), number(directory), number(count));
            }
            _ => SparseHeader::enlarge(sector, len_bytes / SECTOR_BYTES, &sectors),
        })
    }
}
