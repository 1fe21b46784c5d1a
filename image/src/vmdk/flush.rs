//! A flush of a writable VMDK: ordered passes.
//!
//! ```text
//!   snapshot (state mutex, in memory)   all commits before this instant
//!   pass 1   sync                       payload is durable; new tables are durable zeros
//!   pass 2   sectors of tables, in both copies; sectors of the redundant directory
//!            sync                       (left out if nothing was written)
//!   pass 3   sectors of the directory; sync        (only for new tables)
//! ```
//!
//! Pass 2 needs no order. An entry of a table refers to a grain whose payload is durable. A write
//! may be torn at 512 bytes: entries are independent of each other. Pass 3 follows the redundant
//! directory, because QEMU writes to the redundant table of each table that it finds, and to the
//! header if the redundant directory has an entry of 0.
//!
//! Both copies are durable when a flush ends, and freed space is reused only after that
//! ([`ImageWriter::recycle`](crate::ImageWriter::recycle)). So an entry of either copy never leads
//! to a grain that another one uses.

use super::{
    tables::LOST,
    write::{State, TableId, Writing},
};
use crate::{ImageError, Result};
use diskwright_format::vmdk::{GRAIN_ABSENT, SECTOR_BYTES};
use std::{collections::BTreeSet, sync::PoisonError};

/// Entries of 4 bytes in a sector.
const PER_SECTOR: usize = (SECTOR_BYTES / 4) as usize;

/// A write to an extent's file.
struct SectorWrite {
    extent: usize,
    offset_bytes: u64,
    bytes: Vec<u8>,
}

/// The changes that one flush writes.
#[derive(Default)]
struct Batch {
    sectors: BTreeSet<(usize, u32, u32)>,
    directories: BTreeSet<TableId>,
    /// Pass 2: tables, redundant directories.
    tables: Vec<SectorWrite>,
    /// Pass 3: directories.
    first: Vec<SectorWrite>,
}

/// The bytes of sector `sector` of a table or directory.
fn sector_bytes(entries: &[u32], sector: usize) -> Vec<u8> {
    let start = (sector * PER_SECTOR).min(entries.len());
    let end = (start + PER_SECTOR).min(entries.len());
    let mut bytes: Vec<u8> = entries[start..end].iter().flat_map(|entry| entry.to_le_bytes()).collect();
    bytes.resize(SECTOR_BYTES as usize, 0);
    bytes
}

impl Writing {
    /// Runs all passes.
    pub(super) fn run_flush(&self) -> Result<()> {
        let _turn = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        let batch = self.take_batch(&mut self.lock());
        let result = self.carry_out(&batch);
        let mut state = self.lock();
        state.pinned = false;
        if result.is_err() {
            state.dirty.extend(batch.sectors);
            state.dirty_directories.extend(batch.directories);
        }
        result
    }

    fn carry_out(&self, batch: &Batch) -> Result<()> {
        self.sync_all("make the written data durable")?;
        self.write_durably(&batch.tables)?;
        self.write_durably(&batch.first)
    }

    fn write_durably(&self, writes: &[SectorWrite]) -> Result<()> {
        if writes.is_empty() {
            return Ok(());
        }
        for SectorWrite { extent, offset_bytes, bytes } in writes {
            let store = &**self.file(*extent);
            let written = store.write_at(bytes, *offset_bytes);
            written.map_err(|error| ImageError::io("write the grain tables", store, *offset_bytes, error))?;
        }
        let extents = writes.iter().map(|write| write.extent).collect();
        self.sync_extents(&extents, "make the grain tables durable")
    }

    /// Takes all dirty state, as of this instant.
    fn take_batch(&self, state: &mut State) -> Batch {
        let sectors = std::mem::take(&mut state.dirty);
        let directories = std::mem::take(&mut state.dirty_directories);
        let (mut tables, mut first) = (Vec::new(), Vec::new());
        for &(extent, table, sector) in &sectors {
            let Some(entries) = state.tables.get(&(extent, table)) else { continue };
            let bytes = sector_bytes(entries, sector as usize);
            for place in self.places(state, (extent, table)) {
                let offset_bytes = place + u64::from(sector) * SECTOR_BYTES;
                tables.push(SectorWrite { extent, offset_bytes, bytes: bytes.clone() });
            }
        }
        let changed: BTreeSet<_> =
            directories.iter().map(|&(extent, table)| (extent, table as usize / PER_SECTOR)).collect();
        for (extent, sector) in changed {
            let extent_state = &state.extent_states[extent];
            for (index, (entries, at)) in extent_state.directories.iter().zip(&extent_state.places).enumerate() {
                let offset_bytes = at + sector as u64 * SECTOR_BYTES;
                let write = SectorWrite { extent, offset_bytes, bytes: sector_bytes(entries, sector) };
                if index == 0 { first.push(write) } else { tables.push(write) }
            }
        }
        state.pinned = !(tables.is_empty() && first.is_empty());
        Batch { sectors, directories, tables, first }
    }

    /// The offsets of all copies of a table.
    fn places(&self, state: &State, (extent, table): TableId) -> Vec<u64> {
        let tables = self.tables(extent);
        let entries =
            state.extent_states[extent].directories.iter().filter_map(|directory| directory.get(table as usize));
        let entries = entries.filter(|&&entry| entry != LOST && entry != GRAIN_ABSENT);
        let mut places: Vec<u64> = entries.map(|&entry| tables.table_place(entry)).collect();
        places.dedup();
        places
    }
}
