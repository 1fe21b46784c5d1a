//! Pages of L2 tables or of refcount blocks in memory, by their offset in the file.
//!
//! ```text
//!   file ─▶ insert ─▶ page ─ change ─▶ dirty sectors ─ take_dirty ─▶ written by a flush
//! ```
//!
//! What is not in memory is current in the file. A page is dropped only when it is clean and no
//! flush still has changes of it to write. Memory: the page limit of [`Pages::insert`], plus what
//! is dirty.
//!
//! A `Pages` lives inside the image's state mutex and never accesses the store.

use std::collections::{BTreeSet, HashMap};

/// Unit in which changes are written, in bytes. A torn write leaves whole sectors.
pub(super) const SECTOR_BYTES: u64 = 512;
/// Largest page in bytes. Pages of smaller clusters have the length of a cluster.
const PAGE_MAX_BYTES: u64 = 4096;

/// Changed bytes of a table, taken by a flush.
#[derive(Debug)]
pub(super) struct Piece {
    pub offset_bytes: u64,
    pub bytes: Vec<u8>,
}

/// The pages of one kind of table.
#[derive(Debug)]
pub(super) struct Pages {
    page_bytes: u64,
    pages: HashMap<u64, Box<[u8]>>,
    /// Numbers of changed sectors of the file.
    dirty: BTreeSet<u64>,
}

impl Pages {
    pub fn new(cluster_bytes: u64) -> Self {
        Self { page_bytes: cluster_bytes.min(PAGE_MAX_BYTES), pages: HashMap::new(), dirty: BTreeSet::new() }
    }

    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// The offset of the page that holds the byte at `offset_bytes`.
    pub fn page_of(&self, offset_bytes: u64) -> u64 {
        offset_bytes - offset_bytes % self.page_bytes
    }

    /// The page that holds the byte at `offset_bytes`; `None` if it is not in memory.
    pub fn get(&self, offset_bytes: u64) -> Option<&[u8]> {
        self.pages.get(&self.page_of(offset_bytes)).map(|page| &**page)
    }

    /// The big-endian word at `offset_bytes`, a multiple of 8.
    pub fn word(&self, offset_bytes: u64) -> Option<u64> {
        let at = (offset_bytes % self.page_bytes) as usize;
        let word = self.get(offset_bytes)?.get(at..at + 8)?;
        word.try_into().ok().map(u64::from_be_bytes)
    }

    /// Changes the word at `offset_bytes`. Returns false if its page is not in memory.
    pub fn set_word(&mut self, offset_bytes: u64, word: u64) -> bool {
        let at = (offset_bytes % self.page_bytes) as usize;
        self.change(offset_bytes, |page| page[at..at + 8].copy_from_slice(&word.to_be_bytes()))
    }

    /// Changes the page that holds the byte at `offset_bytes`, in the sector of that byte only.
    /// Returns false if the page is not in memory.
    pub fn change(&mut self, offset_bytes: u64, change: impl FnOnce(&mut [u8])) -> bool {
        let page = self.page_of(offset_bytes);
        let Some(page) = self.pages.get_mut(&page) else { return false };
        change(page);
        self.dirty.insert(offset_bytes / SECTOR_BYTES);
        true
    }

    /// Inserts a page that was read from the file, unless it is in memory. With `most_pages` pages
    /// in memory the clean ones are dropped first, unless `is_pinned`. Returns whether any was.
    pub fn insert(&mut self, page: u64, bytes: Box<[u8]>, most_pages: usize, is_pinned: bool) -> bool {
        let before = self.pages.len();
        if before >= most_pages && !is_pinned {
            let (dirty, sectors) = (&self.dirty, self.page_bytes / SECTOR_BYTES);
            let is_dirty = |page: u64| {
                let first = page / SECTOR_BYTES;
                dirty.range(first..first + sectors).next().is_some()
            };
            self.pages.retain(|&page, _| is_dirty(page));
        }
        let has_dropped = self.pages.len() < before;
        self.pages.entry(page).or_insert(bytes);
        has_dropped
    }

    /// Moves the pages of a table of `len_bytes` to its new place. All their sectors count as
    /// changed.
    pub fn move_pages(&mut self, from: u64, to: u64, len_bytes: u64) {
        for offset in (0..len_bytes).step_by(self.page_bytes as usize) {
            let Some(page) = self.pages.remove(&(from + offset)) else { continue };
            for sector in (0..self.page_bytes / SECTOR_BYTES).map(|sector| offset / SECTOR_BYTES + sector) {
                self.dirty.remove(&(from / SECTOR_BYTES + sector));
                self.dirty.insert(to / SECTOR_BYTES + sector);
            }
            self.pages.insert(to + offset, page);
        }
    }

    /// Drops the pages of a table that does not exist any more, with their changes.
    pub fn forget_pages(&mut self, at: u64, len_bytes: u64) {
        for offset in (0..len_bytes).step_by(self.page_bytes as usize) {
            self.pages.remove(&(at + offset));
        }
        self.dirty.retain(|&sector| !(at / SECTOR_BYTES..(at + len_bytes) / SECTOR_BYTES).contains(&sector));
    }

    pub fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Upper bound for the bytes of dirty pages.
    pub fn dirty_bytes(&self) -> u64 {
        self.dirty.len() as u64 * self.page_bytes
    }

    /// Takes all changed sectors with their present bytes, adjacent ones of a page as one piece.
    /// They count as clean from here on: the caller pins the pages until the pieces are written.
    pub fn take_dirty(&mut self) -> Vec<Piece> {
        let mut pieces: Vec<Piece> = Vec::new();
        for sector in std::mem::take(&mut self.dirty) {
            let offset_bytes = sector * SECTOR_BYTES;
            let at = (offset_bytes % self.page_bytes) as usize;
            let Some(page) = self.pages.get(&(offset_bytes - at as u64)) else { continue };
            let bytes = &page[at..at + SECTOR_BYTES as usize];
            match pieces.last_mut() {
                Some(last) if last.offset_bytes + last.bytes.len() as u64 == offset_bytes => {
                    last.bytes.extend_from_slice(bytes);
                }
                _ => pieces.push(Piece { offset_bytes, bytes: bytes.to_vec() }),
            }
        }
        pieces
    }

    /// Makes the sectors of pieces dirty again that could not be written.
    pub fn restore_dirty(&mut self, pieces: &[Piece]) {
        for piece in pieces {
            let first = piece.offset_bytes / SECTOR_BYTES;
            self.dirty.extend(first..first + piece.bytes.len() as u64 / SECTOR_BYTES);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dirty_pages_stay_and_their_sectors_are_taken_once() {
        let mut pages = Pages::new(65536);
        for page in 0..4 {
            assert!(!pages.insert(page * 4096, vec![0; 4096].into(), 4, false));
        }
        assert!(pages.set_word(4096 + 504, 1) && pages.set_word(4096 + 512, 2) && pages.set_word(8192 + 1024, 3));
        assert!(!pages.set_word(1 << 20, 1));
        assert!(!pages.insert(1 << 20, vec![0; 4096].into(), 4, true), "pinned");
        assert!(pages.insert(2 << 20, vec![0; 4096].into(), 4, false));
        assert_eq!((pages.word(0), pages.word(4096 + 504), pages.word(2 << 20)), (None, Some(1), Some(0)));
        let taken = pages.take_dirty();
        let places: Vec<_> = taken.iter().map(|piece| (piece.offset_bytes, piece.bytes.len())).collect();
        assert_eq!(places, [(4096, 1024), (8192 + 1024, 512)]);
        assert_eq!((taken[0].bytes[511], taken[0].bytes[519], pages.is_dirty()), (1, 2, false));
        pages.restore_dirty(&taken);
        assert_eq!(pages.dirty_bytes(), 3 * 4096);
    }
}
