//! The BAT, read by the entry or cached by the page. Never whole: a header may claim two gigabytes of it.
//!
//! A read-only image reads just the entries that it is asked for. A writable one keeps the pages that it has touched as they are to be;
//! a page is written by the 512-byte sectors that changed. Pages that are clean may be dropped to bound the memory,
//! but not while a flush has taken changes that are not in the file yet ([`Table::pinned`]).

use super::layout::Blocks;
use crate::{ImageError, Result};
use diskwright_format::vhd::BAT_UNUSED;
use diskwright_store::Store;
use std::collections::{BTreeSet, HashMap};

const PAGE_BYTES: u64 = 4096;
const ENTRIES_PER_PAGE: u64 = PAGE_BYTES / 4;
const SECTOR_BYTES: u64 = 512;
/// Pages beyond which clean ones are dropped: 4 MiB, which is the whole table of nearly every disk.
const MAX_CLEAN_PAGES: usize = 1024;
/// Entries that are read at a time by a scan.
const SCAN_ENTRIES: u64 = 16384;

/// The entries of the blocks `first ..`, as many as `out` has. The range is within the table.
pub(super) fn read_entries(store: &dyn Store, blocks: &Blocks, first: u64, out: &mut [u32]) -> Result<()> {
    let mut bytes = vec![0; out.len().min(SCAN_ENTRIES as usize) * 4];
    let mut at = first;
    for chunk in out.chunks_mut(SCAN_ENTRIES as usize) {
        let offset = blocks.entry_offset(at);
        let bytes = &mut bytes[..chunk.len() * 4];
        store
            .read_at(bytes, offset)
            .map_err(|e| ImageError::io("read the block allocation table", store, offset, e))?;
        for (entry, bytes) in chunk.iter_mut().zip(bytes.chunks_exact(4)) {
            *entry = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        at += chunk.len() as u64;
    }
    Ok(())
}

/// Calls `visit(block, entry)` for every entry in use of the first `count`, until it says `false`.
pub(super) fn scan(
    store: &dyn Store,
    blocks: &Blocks,
    count: u64,
    mut visit: impl FnMut(u64, u32) -> Result<bool>,
) -> Result<()> {
    let mut entries = vec![0; count.min(SCAN_ENTRIES) as usize];
    let mut first = 0;
    while first < count {
        let entries = &mut entries[..(count - first).min(SCAN_ENTRIES) as usize];
        read_entries(store, blocks, first, entries)?;
        for (block, &entry) in (first..).zip(&*entries) {
            if entry != BAT_UNUSED && !visit(block, entry)? {
                return Ok(());
            }
        }
        first += entries.len() as u64;
    }
    Ok(())
}

/// The touched pages of a writable image.
#[derive(Debug, Default)]
pub(super) struct Table {
    pages: HashMap<u64, Box<[u8]>>,
    /// Changed sectors, counted from the table's beginning.
    dirty: BTreeSet<u64>,
    /// A flush has taken changes that are not in the file yet: no page may be dropped.
    pub pinned: bool,
}

impl Table {
    /// The entry of `block`, which is below `blocks.count`.
    pub fn entry(&mut self, store: &dyn Store, blocks: &Blocks, block: u64) -> Result<u32> {
        let page = self.page(store, blocks, block / ENTRIES_PER_PAGE)?;
        let at = (block % ENTRIES_PER_PAGE) as usize * 4;
        Ok(u32::from_be_bytes([page[at], page[at + 1], page[at + 2], page[at + 3]]))
    }

    /// Changes the entry of `block`.
    pub fn set(&mut self, store: &dyn Store, blocks: &Blocks, block: u64, entry: u32) -> Result<()> {
        let page = self.page(store, blocks, block / ENTRIES_PER_PAGE)?;
        let at = (block % ENTRIES_PER_PAGE) as usize * 4;
        page[at..at + 4].copy_from_slice(&entry.to_be_bytes());
        self.dirty.insert(block * 4 / SECTOR_BYTES);
        Ok(())
    }

    fn page(&mut self, store: &dyn Store, blocks: &Blocks, index: u64) -> Result<&mut [u8]> {
        if !self.pages.contains_key(&index) {
            if self.pages.len() >= MAX_CLEAN_PAGES && !self.pinned {
                let dirty = &self.dirty;
                let sectors_per_page = PAGE_BYTES / SECTOR_BYTES;
                self.pages.retain(|page, _| {
                    dirty.range(page * sectors_per_page..(page + 1) * sectors_per_page).next().is_some()
                });
            }
            let start = index * PAGE_BYTES;
            let mut page = vec![0; (blocks.table_bytes() - start).min(PAGE_BYTES) as usize].into_boxed_slice();
            let offset = blocks.table_offset + start;
            store
                .read_at(&mut page, offset)
                .map_err(|e| ImageError::io("read the block allocation table", store, offset, e))?;
            self.pages.insert(index, page);
        }
        Ok(self.pages.entry(index).or_default())
    }

    pub fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Takes the changed sectors, as they are now, with their place in the file. They count as clean from here on.
    pub fn take_dirty(&mut self, blocks: &Blocks) -> Vec<TableSector> {
        let taken = std::mem::take(&mut self.dirty);
        taken
            .into_iter()
            .filter_map(|sector| {
                let start = sector * SECTOR_BYTES;
                let page = self.pages.get(&(start / PAGE_BYTES))?;
                let at = (start % PAGE_BYTES) as usize;
                let bytes = page[at..page.len().min(at + SECTOR_BYTES as usize)].into();
                Some(TableSector { sector, offset_bytes: blocks.table_offset + start, bytes })
            })
            .collect()
    }

    /// Takes back what could not be written.
    pub fn restore_dirty(&mut self, sectors: &[TableSector]) {
        self.dirty.extend(sectors.iter().map(|sector| sector.sector));
    }
}

/// A changed sector of the BAT, on its way to the file.
#[derive(Debug)]
pub(super) struct TableSector {
    sector: u64,
    pub offset_bytes: u64,
    pub bytes: Box<[u8]>,
}
