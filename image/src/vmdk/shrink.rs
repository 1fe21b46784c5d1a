//! A smaller size for a VMDK: its last extent becomes shorter. No other thread uses the image.
//!
//! ```text
//!   1  flush, survey                                  the tables in the file are current and sound
//!   2  a disk in one file: header: capacity ─▶ sync                    the atomic change there
//!      descriptor: the extent's length ─▶ sync                         the atomic change of others
//!   3  sparse  entries behind the new end removed ─▶ flush ─▶ their grains punched
//!              tables that the lower capacity does not name punched
//!      flat    the file is cut
//! ```
//!
//! Why a power cut does no harm: the size goes first, because a disk of the old size without its
//! last blocks would have lost data. What is left behind the new end means nothing to any program,
//! and the same call again removes it. A growth refuses a disk that still has grains there.
//!
//! The header of an extent in a file of its own keeps its capacity and its tables: the line of the
//! descriptor counts. A disk that would end before its last extent is refused, as that extent would
//! be a file without a line.

use super::{
    layout::{Content, Part},
    tables::{Entry, LOST},
    write::Writing,
};
use crate::{ImageError, Result, space::HolePunches};
use diskwright_format::vmdk::{GRAIN_ABSENT, SECTOR_BYTES, SparseHeader};
use diskwright_store::FileRange;
use std::{ops::Range, sync::PoisonError};

impl Writing {
    /// Whether the disk can have this size, which is at most the present one. Returns its last
    /// part.
    pub(super) fn check_smaller(&self, size_bytes: u64) -> Result<&Part> {
        let present_bytes = self.layout.size_bytes.get();
        let refused = |hint: &str| {
            Err(self.unsupported(&format!("a new size of {size_bytes} bytes for this VMDK of {present_bytes}"), hint))
        };
        if size_bytes == 0 || size_bytes > present_bytes || !size_bytes.is_multiple_of(SECTOR_BYTES) {
            return refused("name a multiple of 512 bytes above 0, at most the present size");
        }
        let Some(part) = self.layout.parts.last() else { return refused("convert the disk to a new one") };
        if size_bytes <= part.start_bytes {
            return refused("the disk would end before its last extent: convert it to a new one of that size");
        }
        if !self.document.has_room_for_length((size_bytes - part.start_bytes) / SECTOR_BYTES) {
            return refused("the descriptor has no room for the extent's new length: convert the disk to a new one");
        }
        if let (Content::Flat { store: index, .. }, true) = (part.content, size_bytes < present_bytes) {
            let store = &self.layout.stores[usize::from(index)];
            if store.is_block_device() {
                return refused("its last extent is a device, which cannot become shorter: convert the disk");
            }
            let own = store.identity();
            let in_file = self.layout.files().into_iter().filter(|(file, _)| own.is_some() && *file == own).count();
            if in_file > 1 || index == 0 {
                return refused("the file of its last extent holds more than this extent: convert the disk");
            }
        }
        Ok(part)
    }

    /// Makes the disk smaller, by the steps of this module. With the present size it finishes a
    /// growth or a shrink that was cut short.
    pub(super) fn make_smaller(&self, size_bytes: u64) -> Result<()> {
        let part = self.check_smaller(size_bytes)?;
        self.check_barriers()?;
        let len_bytes = size_bytes - part.start_bytes;
        let is_smaller = size_bytes < self.layout.size_bytes.get();
        if !is_smaller {
            self.grow_to(size_bytes)?;
        }
        self.barriers[0].share(|| self.run_flush())?;
        let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut old_tables = 0;
        if let Content::Sparse(extent) = part.content {
            self.survey(extent)?;
            old_tables = self.tables(extent).tables();
            if is_smaller && self.is_whole_disk(extent) {
                self.lower_capacity(extent, len_bytes)?;
            }
        }
        self.document.set_length(&self.barriers[0], len_bytes / SECTOR_BYTES, size_bytes / SECTOR_BYTES)?;
        part.end_bytes.lower(size_bytes);
        self.layout.size_bytes.lower(size_bytes);
        match part.content {
            Content::Zero => Ok(()),
            Content::Flat { store, first_bytes } => self.cut_file(usize::from(store), first_bytes + len_bytes),
            Content::Sparse(extent) => self.forget_behind(extent, len_bytes, old_tables),
        }
    }

    /// Whether an extent is the file of the descriptor, whose header counts.
    fn is_whole_disk(&self, extent: usize) -> bool {
        self.layout.head.extents().len() == 1 && self.layout.extents[extent].store_index == 0
    }

    /// Step 2 for a disk in one file.
    fn lower_capacity(&self, extent: usize, len_bytes: u64) -> Result<()> {
        let places: Vec<u64> =
            self.lock().extent_states[extent].places.iter().map(|place| place / SECTOR_BYTES).collect();
        self.change_header(extent, 0, |sector| SparseHeader::enlarge(sector, len_bytes / SECTOR_BYTES, &places))?;
        self.sync_extents(&[extent].into(), "make the extent's new capacity durable")?;
        self.tables(extent).capacity_bytes.lower(len_bytes);
        Ok(())
    }

    /// Step 3 for a flat extent.
    fn cut_file(&self, index: usize, end_bytes: u64) -> Result<()> {
        let store = &*self.layout.stores[index];
        store.set_len(end_bytes).map_err(|error| ImageError::io("make the extent shorter", store, end_bytes, error))?;
        Ok(self.barriers[index].sync("make the extent's new length durable")?)
    }

    /// Step 3 for a sparse extent. `old_tables`: how many it had.
    fn forget_behind(&self, extent: usize, len_bytes: u64, old_tables: u64) -> Result<()> {
        let tables = self.tables(extent);
        let (entries, kept_tables) = (tables.table_entries, tables.tables());
        let first = len_bytes.div_ceil(tables.grain_bytes);
        for table in first / entries..old_tables {
            self.forget_grains(extent, first.max(table * entries)..(table + 1) * entries, table < kept_tables)?;
            if self.is_flush_due() {
                self.run_flush()?;
            }
        }
        self.run_flush()?;
        // Nobody else uses the disk.
        self.recycle_pieces(u64::MAX);
        if kept_tables < old_tables {
            self.drop_tables(extent, kept_tables as usize);
        }
        if let Some(space) = &mut self.lock().extent_states[extent].space {
            // What an interrupted call has left is free by the survey, but no hole of the file.
            space.punch_free_at_close();
        }
        self.sync_extents(&[extent].into(), "make the shorter extent durable")
    }

    /// Frees grains of one table. `is_kept`: its entries are removed.
    fn forget_grains(&self, extent: usize, grains: Range<u64>, is_kept: bool) -> Result<()> {
        let mut found = vec![Entry::Absent; (grains.end - grains.start) as usize];
        self.entries(extent, grains.start, &mut found)?;
        if found.iter().all(|&entry| entry == Entry::Absent) {
            return Ok(());
        }
        if is_kept {
            self.load(self.table_of(extent, grains.start))?;
        }
        let mut state = self.lock();
        for (grain, entry) in grains.zip(found) {
            if entry == Entry::Absent {
                continue;
            }
            if is_kept {
                self.set(&mut state, extent, grain, GRAIN_ABSENT);
            }
            if let Entry::At(at) = entry {
                self.free(&mut state, extent, at);
            }
        }
        Ok(())
    }

    /// Gives back the space of tables that the header no longer names.
    fn drop_tables(&self, extent: usize, kept: usize) {
        let tables = self.tables(extent);
        let mut dropped = Vec::new();
        {
            let mut state = self.lock();
            for directory in &mut state.extent_states[extent].directories {
                dropped.extend(directory.split_off(kept.min(directory.len())));
            }
            state.tables.retain(|&(of, table), _| of != extent || (table as usize) < kept);
            state.dirty.retain(|&(of, table, _)| of != extent || (table as usize) < kept);
            state.dirty_directories.retain(|&(of, table)| of != extent || (table as usize) < kept);
            state.drops += 1;
        }
        dropped.retain(|&entry| entry != GRAIN_ABSENT && entry != LOST);
        dropped.sort_unstable();
        dropped.dedup();
        let ranges = dropped
            .into_iter()
            .map(|entry| FileRange { offset_bytes: tables.table_place(entry), len_bytes: tables.table_bytes() });
        HolePunches::of(ranges).punch_all(&**self.file(extent));
    }
}
