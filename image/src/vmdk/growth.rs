//! The survey of an extent's file before the first entry changes: what is used, and what is free.
//!
//! ```text
//!   header, descriptor, directories, tables ─┐
//!   entries of all tables ───────────────────┴─▶ sorted ─▶ overlap: refused; gap: free
//!   both copies of a table differ ─▶ the first one is copied to the second
//!   header: "not closed" (COWD: next free sector) ─▶ sync ─▶ the file is cut after the last
//!   structure
//! ```
//!
//! An invalid entry is refused too: its grain may lie in space that looks free. Space behind the
//! last structure was made by a session that was not closed, and is cut off, so that a longer file
//! reads as zeros there. What looks free may be free only in the page cache, as a program may have
//! been killed during a flush. So the file is synced before its free space is used. A power cut may
//! have left an entry in one copy of a table only, whose grain looks free: so the copies become
//! equal first.
//!
//! The header's byte "unclean shutdown" is set from the survey on, and cleared by a close. VMware
//! compares the copies of the tables when it finds it set.
//!
//! ESX puts its next grain of a COWD extent at the sector that the header calls free. So that
//! number is the end of the file, from the survey on: a file that has grown is counted before its
//! new space is handed out, and the sync before the tables are written makes that durable. (QEMU
//! does not write it.)
//!
//! The caller holds `preparing`. No entry changes before the survey has ended, so the tables in the
//! file are read without the state mutex. Memory: 4 bytes for each grain of the file, or with small
//! grains a bit for each sector (`starts.rs`). More entries than grains fit into the file overlap,
//! and end the survey.

use super::{
    corrupt,
    starts::Starts,
    tables::{Entry, EntryCoding, Tables},
    write::Writing,
};
use crate::{ImageError, Result, space::Space};
use diskwright_format::vmdk::{COWD_FREE_AT, GRAIN_ABSENT, SECTOR_BYTES};
use diskwright_store::Store;
use std::ops::Range;

/// The most free pieces between grains that are recorded.
const MAX_HOLES: usize = 65_536;
/// The alignment of new grains, unless grains are smaller.
const HOLE_ALIGNMENT_BYTES: u64 = 4096;

/// For each table whose copies differ, the place of the second copy and the bytes of the first.
type Differing = Vec<(u64, Vec<u8>)>;

/// What a survey found.
#[derive(Debug, PartialEq, Eq)]
struct Survey {
    used_end_bytes: u64,
    /// Free pieces of a grain.
    holes: Vec<u64>,
    /// Tables whose copies differ.
    differing: Differing,
}

fn overlap(store: &dyn Store, one: u64, other: u64) -> ImageError {
    let found = format!("a structure at offset {one} on another that ends at {other}");
    corrupt(store, "grain table", one, found, "grains and tables with space of their own (run `diskwright check`)")
}

/// The starts of all grains, and the tables whose copies differ.
fn read_tables(tables: &Tables, store: &dyn Store, len_bytes: u64) -> Result<(Starts, Differing)> {
    let most = len_bytes / tables.grain_bytes + 2;
    let (mut starts, mut differing) = (Starts::of(tables.grain_bytes, len_bytes), Vec::new());
    for (table, &entry) in (0_u64..).zip(&tables.entries[0]) {
        if entry == GRAIN_ABSENT {
            continue;
        }
        let first = table * tables.table_entries;
        let mut raw = vec![0; tables.table_entries as usize];
        tables.read_raw(store, tables.table_place(entry), first, &mut raw)?;
        for (grain, &raw) in (first..tables.grains()).zip(&raw) {
            match tables.decode(store, grain, raw)? {
                Entry::At(at) if starts.add((at / SECTOR_BYTES) as u32) => {}
                Entry::At(at) => return Err(overlap(store, at, at + tables.grain_bytes)),
                Entry::Bad(raw) => {
                    let found = format!("entry {raw:#x} of grain {grain}");
                    let expected = "a grain inside the file (run `diskwright check`)";
                    return Err(corrupt(store, "grain table", tables.entry_offset(grain), found, expected));
                }
                Entry::Absent | Entry::Zero => {}
            }
        }
        if starts.len() > most {
            return Err(overlap(store, starts.first() * SECTOR_BYTES, len_bytes));
        }
        let second = tables.entries.get(1).and_then(|entries| entries.get(table as usize)).copied();
        let Some(second) = second.filter(|&second| second != entry) else { continue };
        let mut other = vec![0; raw.len()];
        tables.read_raw(store, tables.table_place(second), first, &mut other)?;
        if other != raw {
            let bytes = raw.iter().flat_map(|&raw| (raw as u32).to_le_bytes()).collect();
            differing.push((tables.table_place(second), bytes));
        }
    }
    starts.sort();
    Ok((starts, differing))
}

fn survey(tables: &Tables, store: &dyn Store, len_bytes: u64) -> Result<Survey> {
    let (starts, differing) = read_tables(tables, store, len_bytes)?;
    let mut structures = tables.structures();
    structures.dedup();
    let grains = starts.iter().map(|start| start * SECTOR_BYTES);
    let mut grains = grains.map(|start| start..start + tables.grain_bytes).peekable();
    let mut others = structures.into_iter().peekable();
    // By the header, what lies before the first grain is not used for grains.
    let overhead = tables.header.as_ref().map_or(0, |header| header.overhead_sectors.saturating_mul(SECTOR_BYTES));
    let floor = if overhead <= len_bytes { overhead } else { 0 };
    let mut found = Survey { used_end_bytes: 0, holes: Vec::new(), differing };
    loop {
        let is_grain = match (grains.peek(), others.peek()) {
            (None, None) => break,
            (Some(grain), Some(other)) => grain.start < other.start,
            (grain, _) => grain.is_some(),
        };
        let next: Option<Range<u64>> = if is_grain { grains.next() } else { others.next() };
        let Some(range) = next else { break };
        if range.start < found.used_end_bytes {
            return Err(overlap(store, range.start, found.used_end_bytes));
        }
        let alignment = tables.grain_bytes.min(HOLE_ALIGNMENT_BYTES);
        let mut hole = found.used_end_bytes.max(floor).next_multiple_of(alignment);
        while found.holes.len() < MAX_HOLES && hole + tables.grain_bytes <= range.start {
            found.holes.push(hole);
            hole += tables.grain_bytes;
        }
        found.used_end_bytes = range.end;
    }
    found.used_end_bytes = found.used_end_bytes.max(floor);
    Ok(found)
}

impl Writing {
    /// Surveys the file of an extent, once in a session. The caller holds `preparing`.
    pub(super) fn survey(&self, extent: usize) -> Result<()> {
        if self.lock().extent_states[extent].space.is_some() {
            return Ok(());
        }
        let (tables, store) = (self.tables(extent), &**self.file(extent));
        let len_bytes = super::text::len_of(store)?;
        let found = survey(tables, store, len_bytes)?;
        for (at, bytes) in &found.differing {
            let written = store.write_at(bytes, *at);
            written.map_err(|error| ImageError::io("write a redundant grain table", store, *at, error))?;
        }
        let end = found.used_end_bytes;
        self.mark(extent, true)?;
        self.count_free(extent, end)?;
        self.sync_extents(&[extent].into(), "make the tables durable as they were found")?;
        if end != len_bytes {
            store
                .set_len(end)
                .map_err(|error| ImageError::io("cut the file after its last grain", store, end, error))?;
        }
        let mut space = Space::new(end, tables.grain_bytes);
        found.holes.iter().for_each(|&hole| space.add_free(hole, tables.grain_bytes));
        self.lock().extent_states[extent].space = Some(space);
        Ok(())
    }

    /// Writes the header's byte "unclean shutdown".
    fn mark(&self, extent: usize, is_unclean: bool) -> Result<()> {
        let Some(at) = self.tables(extent).unclean_at() else { return Ok(()) };
        self.change_header(extent, at / SECTOR_BYTES, |sector| {
            sector[(at % SECTOR_BYTES) as usize] = u8::from(is_unclean);
        })
    }

    /// Lets the header of a COWD extent call this end of its file the next free sector. Not
    /// durable.
    pub(super) fn count_free(&self, extent: usize, end_bytes: u64) -> Result<()> {
        if self.tables(extent).coding != EntryCoding::Cowd {
            return Ok(());
        }
        // No grain ends behind the last number.
        let free = u32::try_from(end_bytes.div_ceil(SECTOR_BYTES)).unwrap_or(u32::MAX);
        self.change_header(extent, 0, |sector| {
            let at = COWD_FREE_AT as usize;
            sector[at..at + 4].copy_from_slice(&free.to_le_bytes());
        })
    }

    /// Changes a sector of an extent's header by one write, if it changes.
    pub(super) fn change_header(
        &self,
        extent: usize,
        number: u64,
        change: impl FnOnce(&mut [u8; SECTOR_BYTES as usize]),
    ) -> Result<()> {
        let (store, at) = (&**self.file(extent), number * SECTOR_BYTES);
        let mut sector = [0; SECTOR_BYTES as usize];
        let io_error = |doing| move |error| ImageError::io(doing, store, at, error);
        store.read_at(&mut sector, at).map_err(io_error("read the header of the extent"))?;
        let old = sector;
        change(&mut sector);
        if sector == old {
            return Ok(());
        }
        store.write_at(&sector, at).map_err(io_error("write the header of the extent"))
    }

    /// Clears the byte "unclean shutdown" of the extents that were surveyed, durably. Both copies
    /// of their tables are durable.
    pub(super) fn mark_closed(&self) -> Result<()> {
        let state = self.lock();
        let surveyed: Vec<usize> =
            (0..state.extent_states.len()).filter(|&extent| state.extent_states[extent].space.is_some()).collect();
        drop(state);
        surveyed.iter().try_for_each(|&extent| self.mark(extent, false))?;
        if surveyed.is_empty() {
            Ok(())
        } else {
            self.sync_extents(&surveyed.into_iter().collect(), "close the extents")
        }
    }
}
