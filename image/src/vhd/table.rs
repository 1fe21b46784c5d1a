//! The BAT, read by the entry or cached by the page. Never read whole: a header may claim two
//! gigabytes.
//!
//! A read-only image reads only the requested entries. A writable image keeps the pages whose
//! entries it changes, and writes the 512-byte sectors that changed. Clean pages may be dropped to
//! bound the memory, but not while a flush has taken changes that are not in the file yet
//! ([`Table::pinned`]). A [`Table`] never accesses the file.
//!
//! Invariant: a page that is not cached is current in the file. A thread that reads the file
//! without the state mutex compares the image's drop counter before and after, and reads again if
//! it changed (`prepare.rs`).

use super::layout::Blocks;
use crate::{ImageError, Result};
use diskwright_format::vhd::BAT_UNUSED;
use diskwright_store::Store;
use std::collections::{BTreeSet, HashMap};

const PAGE_BYTES: u64 = 4096;
const ENTRIES_PER_PAGE: u64 = PAGE_BYTES / 4;
const SECTOR_BYTES: u64 = 512;
/// Entries read by one call of a scan.
const SCAN_ENTRIES: u64 = 16384;

/// Reads the entries of the blocks from `first` into `out`. The range must lie within the table.
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

/// Reads the page whose first entry is that of `first_block`.
pub(super) fn read_page(store: &dyn Store, blocks: &Blocks, first_block: u64) -> Result<Box<[u8]>> {
    let start = first_block * 4;
    let mut page = vec![0; (blocks.table_bytes() - start).min(PAGE_BYTES) as usize].into_boxed_slice();
    let offset = blocks.table_offset + start;
    store
        .read_at(&mut page, offset)
        .map_err(|e| ImageError::io("read the block allocation table", store, offset, e))?;
    Ok(page)
}

/// Calls `visit(block, entry)` for every used entry of the first `count`, until it returns `false`.
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

/// The cached pages of a writable image's BAT.
#[derive(Debug, Default)]
pub(super) struct Table {
    pages: HashMap<u64, Box<[u8]>>,
    /// Indices of changed 512-byte sectors of the table.
    dirty: BTreeSet<u64>,
    /// A flush has taken changes that are not in the file yet: no page may be dropped.
    pub pinned: bool,
}

impl Table {
    /// The entry of `block`; `None` if its page is not cached.
    pub fn entry(&self, block: u64) -> Option<u32> {
        let page = self.pages.get(&(block / ENTRIES_PER_PAGE))?;
        let at = (block % ENTRIES_PER_PAGE) as usize * 4;
        Some(u32::from_be_bytes([page[at], page[at + 1], page[at + 2], page[at + 3]]))
    }

    /// Changes the entry of `block`. Its page must be cached.
    pub fn set(&mut self, block: u64, entry: u32) {
        if let Some(page) = self.pages.get_mut(&(block / ENTRIES_PER_PAGE)) {
            let at = (block % ENTRIES_PER_PAGE) as usize * 4;
            page[at..at + 4].copy_from_slice(&entry.to_be_bytes());
            self.dirty.insert(block * 4 / SECTOR_BYTES);
        }
    }

    /// If the page of `block` is not cached: the first block of that page.
    pub fn missing(&self, block: u64) -> Option<u64> {
        let index = block / ENTRIES_PER_PAGE;
        (!self.pages.contains_key(&index)).then_some(index * ENTRIES_PER_PAGE)
    }

    /// Inserts a page read from the file, unless it is cached already. From `most_pages` on all
    /// clean pages are dropped first. Returns whether any page was dropped.
    pub fn insert(&mut self, first_block: u64, page: Box<[u8]>, most_pages: usize) -> bool {
        let before = self.pages.len();
        if before >= most_pages && !self.pinned {
            let dirty = &self.dirty;
            let sectors_per_page = PAGE_BYTES / SECTOR_BYTES;
            self.pages
                .retain(|page, _| dirty.range(page * sectors_per_page..(page + 1) * sectors_per_page).next().is_some());
        }
        let has_dropped = self.pages.len() < before;
        self.pages.entry(first_block / ENTRIES_PER_PAGE).or_insert(page);
        has_dropped
    }

    /// Extends the table from `old_bytes` to `new_bytes`. The new entries are unused.
    pub fn lengthen(&mut self, old_bytes: u64, new_bytes: u64) {
        let last = old_bytes.saturating_sub(1) / PAGE_BYTES;
        if let Some(page) = self.pages.get_mut(&last) {
            let mut longer = std::mem::take(page).into_vec();
            let len = (new_bytes - last * PAGE_BYTES).min(PAGE_BYTES) as usize;
            longer.resize(len.max(longer.len()), BAT_UNUSED.to_be_bytes()[0]);
            *page = longer.into_boxed_slice();
        }
    }

    /// Upper bound for the bytes of dirty pages.
    pub fn dirty_bytes(&self) -> u64 {
        self.dirty.len() as u64 * PAGE_BYTES
    }

    pub fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Takes the changed sectors with their current bytes and file offsets. They count as clean
    /// from here on.
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

    /// Makes sectors dirty again that could not be written.
    pub fn restore_dirty(&mut self, sectors: &[TableSector]) {
        self.dirty.extend(sectors.iter().map(|sector| sector.sector));
    }
}

/// A changed sector of the BAT, taken by a flush.
#[derive(Debug)]
pub(super) struct TableSector {
    sector: u64,
    pub offset_bytes: u64,
    pub bytes: Box<[u8]>,
}
