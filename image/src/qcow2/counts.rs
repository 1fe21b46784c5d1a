//! The refcounts of a writable image, in memory.
//!
//! ```text
//!   cluster ─▶ entry of the refcount table (in memory) ─▶ page of its refcount block (pages.rs)
//! ```
//!
//! The table is held whole: 8 MiB at most. Blocks are held by the page. What a refcount lacks is
//! returned as a [`CountPrerequisite`], and `prepare` supplies it.
//!
//! Invariant: an entry of the table in memory names a block that is durable in the file, with its
//! own refcount. So a flush may write entries and blocks in any order.

use super::pages::{Pages, Piece, SECTOR_BYTES};
use diskwright_format::qcow2::{Place, RefcountWidth};
use std::collections::BTreeSet;

/// What is needed before a refcount can be read or changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CountPrerequisite {
    /// A longer refcount table.
    Entry,
    /// A refcount block: all refcounts of its range are 0.
    Block,
    /// The page at this offset of the file.
    Page(u64),
}

/// Where the refcount of a cluster is: the byte, and the index in its page.
#[derive(Debug, Clone, Copy)]
struct RefcountPosition {
    offset_bytes: u64,
    index: usize,
}

/// The refcount table, and the blocks of refcounts that are in memory.
#[derive(Debug)]
pub(super) struct Refcounts {
    pub width: RefcountWidth,
    cluster_bytes: u64,
    pub table: Place,
    /// Offsets of the blocks; 0 if there is none.
    blocks: Vec<u64>,
    /// Numbers of the table's changed sectors.
    dirty: BTreeSet<u64>,
    pub pages: Pages,
}

impl Refcounts {
    pub fn new(width: RefcountWidth, cluster_bytes: u64, table: Place, blocks: Vec<u64>) -> Self {
        Self { width, cluster_bytes, table, blocks, dirty: BTreeSet::new(), pages: Pages::new(cluster_bytes) }
    }

    /// Clusters whose refcounts are in one block.
    pub fn per_block(&self) -> u64 {
        self.width.per_block(self.cluster_bytes)
    }

    /// Offsets of the blocks by index of the table.
    pub fn blocks(&self) -> &[u64] {
        &self.blocks
    }

    fn spot(&self, cluster: u64) -> Result<RefcountPosition, CountPrerequisite> {
        let block = usize::try_from(cluster / self.per_block()).unwrap_or(usize::MAX);
        let at = match self.blocks.get(block) {
            None => return Err(CountPrerequisite::Entry),
            Some(0) => return Err(CountPrerequisite::Block),
            Some(&at) => at,
        };
        let index = cluster % self.per_block();
        let offset_bytes = at + index * u64::from(self.width.bits()) / 8;
        Ok(RefcountPosition { offset_bytes, index: (index % self.width.per_block(self.pages.page_bytes())) as usize })
    }

    /// The refcount of a cluster.
    pub fn get(&self, cluster: u64) -> Result<u64, CountPrerequisite> {
        let spot = self.spot(cluster)?;
        let missing = || CountPrerequisite::Page(self.pages.page_of(spot.offset_bytes));
        self.pages.get(spot.offset_bytes).map(|page| self.width.get(page, spot.index)).ok_or_else(missing)
    }

    /// Changes the refcount of a cluster.
    pub fn set(&mut self, cluster: u64, count: u64) -> Result<(), CountPrerequisite> {
        let (spot, width) = (self.spot(cluster)?, self.width);
        let is_there = self.pages.change(spot.offset_bytes, |page| {
            width.set(page, spot.index, count);
        });
        if is_there { Ok(()) } else { Err(CountPrerequisite::Page(self.pages.page_of(spot.offset_bytes))) }
    }

    /// The page of a new block at `block_at` that holds the block's own refcount of 1, and the
    /// page's offset in the file. The block covers its own cluster.
    pub fn first_page(&self, block_at: u64) -> (u64, Box<[u8]>) {
        let index = block_at / self.cluster_bytes % self.per_block();
        let per_page = self.width.per_block(self.pages.page_bytes());
        let mut page = vec![0; self.pages.page_bytes() as usize].into_boxed_slice();
        self.width.set(&mut page, (index % per_page) as usize, 1);
        (block_at + index / per_page * self.pages.page_bytes(), page)
    }

    /// Names the block at `block_at`, which covers the range of `cluster`: it is durable, and so is
    /// its own refcount.
    pub fn name_block(&mut self, cluster: u64, block_at: u64) {
        let index = cluster / self.per_block();
        if let Some(entry) = usize::try_from(index).ok().and_then(|index| self.blocks.get_mut(index)) {
            *entry = block_at;
            self.dirty.insert(index * 8 / SECTOR_BYTES);
        }
    }

    /// Removes the block with this index, which counts nothing but itself.
    pub fn forget_block(&mut self, index: u64) {
        if let Some(entry) = usize::try_from(index).ok().and_then(|index| self.blocks.get_mut(index)) {
            self.pages.forget_pages(std::mem::take(entry), self.cluster_bytes);
            self.dirty.insert(index * 8 / SECTOR_BYTES);
        }
    }

    /// Continues with a table that is durable and that the header names. It has all entries of the
    /// former one.
    pub fn replace_table(&mut self, table: Place, blocks: Vec<u64>) {
        self.table = table;
        self.blocks = blocks;
        self.dirty.clear();
    }

    pub fn is_dirty(&self) -> bool {
        !self.dirty.is_empty() || self.pages.is_dirty()
    }

    /// Takes the changed sectors of the table. They count as clean from here on.
    pub fn take_dirty_table(&mut self) -> Vec<Piece> {
        let sectors = std::mem::take(&mut self.dirty);
        sectors.into_iter().map(|sector| sector_piece(&self.blocks, self.table, sector)).collect()
    }

    /// Makes sectors of the table dirty again that could not be written.
    pub fn restore_dirty_table(&mut self, pieces: &[Piece]) {
        let numbers = pieces.iter().filter_map(|piece| piece.offset_bytes.checked_sub(self.table.offset_bytes));
        let numbers: Vec<u64> = numbers.map(|offset| offset / SECTOR_BYTES).collect();
        self.dirty.extend(numbers);
    }
}

/// Sector `sector` of a table of words, which lies at `place`.
pub(super) fn sector_piece(words: &[u64], place: Place, sector: u64) -> Piece {
    let per_sector = SECTOR_BYTES / 8;
    let start = usize::try_from(sector * per_sector).unwrap_or(usize::MAX).min(words.len());
    let end = (start + per_sector as usize).min(words.len());
    let bytes = words[start..end].iter().flat_map(|word| word.to_be_bytes()).collect();
    Piece { offset_bytes: place.offset_bytes + sector * SECTOR_BYTES, bytes }
}
