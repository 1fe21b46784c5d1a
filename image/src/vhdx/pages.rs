//! A cache of the 4 KiB pages of the BAT and of sector bitmap blocks, for a writable image.
//!
//! A page is loaded when it is first changed (or its bits are asked for), stays while it is dirty or on its way through the
//! log, and may be dropped when clean and the cache is large. So memory follows what is touched, not what a header claims.
//! Lives inside the image's state mutex.
//!
//! Invariant: a page that is not here is in the file as it should be.

use crate::error::{ImageError, Result};
use diskwright_store::Store;
#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken};
use std::collections::{BTreeSet, HashMap, hash_map::Entry};

/// Size of a page in bytes: the sector of the log.
pub(super) const PAGE_BYTES: u64 = 4096;
/// Clean pages are dropped above this number: 64 MiB.
const MAX_CLEAN_PAGES: usize = 16 << 10;

/// A page on its way through the log: file offset and bytes.
pub(super) type Page = (u64, Box<[u8]>);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct PageCache {
    /// By file offset, a multiple of 4096.
    pages: HashMap<u64, Box<[u8]>>,
    /// Changed since they were last snapshot.
    dirty: BTreeSet<u64>,
    /// Snapshot, not yet durable.
    in_flight: BTreeSet<u64>,
}

impl PageCache {
    /// Sees to it that the pages of a range are here.
    pub(super) fn load(
        &mut self,
        store: &dyn Store,
        doing: &'static str,
        start_bytes: u64,
        len_bytes: u64,
    ) -> Result<()> {
        let first = start_bytes - start_bytes % PAGE_BYTES;
        for offset_bytes in (first..start_bytes + len_bytes).step_by(PAGE_BYTES as usize) {
            if let Entry::Vacant(place) = self.pages.entry(offset_bytes) {
                let mut page = vec![0; PAGE_BYTES as usize].into_boxed_slice();
                store
                    .read_at(&mut page, offset_bytes)
                    .map_err(|error| ImageError::io(doing, store, offset_bytes, error))?;
                place.insert(page);
            }
        }
        Ok(())
    }

    /// Visits the loaded pieces of a range, page by page, for reading. Pieces that are not loaded are left out.
    pub(super) fn each_piece(&self, start_bytes: u64, len_bytes: u64, visit: &mut dyn FnMut(usize, &[u8])) {
        let end_bytes = start_bytes + len_bytes;
        let first = start_bytes - start_bytes % PAGE_BYTES;
        for offset_bytes in (first..end_bytes).step_by(PAGE_BYTES as usize) {
            if let Some(page) = self.pages.get(&offset_bytes) {
                let (from, to) = (offset_bytes.max(start_bytes), (offset_bytes + PAGE_BYTES).min(end_bytes));
                visit(
                    (from - start_bytes) as usize,
                    &page[(from - offset_bytes) as usize..(to - offset_bytes) as usize],
                );
            }
        }
    }

    /// The first byte of `start_bytes .. end_bytes` that lies in a dirty page, or in one on its way: what the file has there
    /// may be a hole. All other pages are in the file as they should be.
    pub(super) fn first_in(&self, start_bytes: u64, end_bytes: u64) -> Option<u64> {
        let first = start_bytes - start_bytes % PAGE_BYTES;
        if first >= end_bytes {
            return None;
        }
        let next = |pages: &BTreeSet<u64>| pages.range(first..end_bytes).next().copied();
        let page = next(&self.dirty).into_iter().chain(next(&self.in_flight)).min()?;
        Some(page.max(start_bytes)).filter(|&at| at < end_bytes)
    }

    /// Replaces what the cache has of a range in `buf`, which was read from the file at `start_bytes`.
    pub(super) fn overlay(&self, buf: &mut [u8], start_bytes: u64) {
        if !self.pages.is_empty() {
            let len_bytes = buf.len() as u64;
            self.each_piece(start_bytes, len_bytes, &mut |at, piece| buf[at..at + piece.len()].copy_from_slice(piece));
        }
    }

    /// Changes a range whose pages are loaded: `change` gets each piece and its place in the range. All of them become
    /// dirty.
    pub(super) fn change(&mut self, start_bytes: u64, len_bytes: u64, change: &mut dyn FnMut(usize, &mut [u8])) {
        let end_bytes = start_bytes + len_bytes;
        let first = start_bytes - start_bytes % PAGE_BYTES;
        for offset_bytes in (first..end_bytes).step_by(PAGE_BYTES as usize) {
            if let Some(page) = self.pages.get_mut(&offset_bytes) {
                let (from, to) = (offset_bytes.max(start_bytes), (offset_bytes + PAGE_BYTES).min(end_bytes));
                change(
                    (from - start_bytes) as usize,
                    &mut page[(from - offset_bytes) as usize..(to - offset_bytes) as usize],
                );
                self.dirty.insert(offset_bytes);
            }
        }
    }

    /// Whether anything is not yet durable.
    pub(super) fn is_dirty(&self) -> bool {
        #[cfg(feature = "shuttle")]
        if is_broken(Rule::DirtyUntilLanded) {
            return !self.dirty.is_empty();
        }
        !self.dirty.is_empty() || !self.in_flight.is_empty()
    }

    /// Copies of all dirty pages, which are in flight from now on, by rising offset.
    pub(super) fn snapshot(&mut self) -> Vec<Page> {
        self.in_flight = std::mem::take(&mut self.dirty);
        self.in_flight.iter().filter_map(|offset| self.pages.get(offset).map(|page| (*offset, page.clone()))).collect()
    }

    /// What was in flight is durable and in its place.
    pub(super) fn landed(&mut self) {
        self.in_flight.clear();
        if self.pages.len() > MAX_CLEAN_PAGES {
            let dirty = &self.dirty;
            self.pages.retain(|offset, _| dirty.contains(offset));
        }
    }

    /// What was in flight is dirty again.
    pub(super) fn failed(&mut self) {
        self.dirty.append(&mut self.in_flight);
    }
}
