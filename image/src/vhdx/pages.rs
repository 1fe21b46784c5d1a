//! A cache of the 4 KiB pages of the BAT and of sector bitmap blocks, for a writable image.
//!
//! A page is put here before it is first changed, stays while it is dirty or on its way through the
//! log, and may be dropped when it is clean and the cache is large. So memory follows what is
//! touched, not what a header claims. The cache lives inside the image's state mutex and never
//! touches the file.
//!
//! ```text
//!   missing + drops ─▶ read the file, without the mutex ─▶ drops as before? ─▶ insert what is still absent   (prepare.rs)
//!             drops ─▶ read the file, without the mutex ─▶ drops as before? ─▶ overlay                       (tables.rs)
//! ```
//!
//! Invariant: a page that is not here is in the file as it should be. So bytes that were read
//! without the mutex are old only if their page was changed, written and dropped meanwhile.
//! [`PageCache::drops`] tells: it grows with each drop, and whoever finds that it has moved reads
//! again.

#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken};
use std::collections::{BTreeSet, HashMap};

/// Size of a page in bytes: the sector of the log.
pub(super) const PAGE_BYTES: u64 = 4096;
/// Clean pages are dropped above this number, unless another limit is set: 16 MiB.
const MAX_CLEAN_PAGES: usize = 4 << 10;
/// Dirty pages above which a flush is due though nobody asks for one, unless a lower limit is set:
/// 16 MiB.
const MAX_DIRTY_PAGES: usize = 4 << 10;
/// Pages of each kind that there may be however low the limit: a request needs some of them at the
/// same time.
const MIN_PAGES: usize = 64;

/// A page on its way through the log: file offset and bytes.
pub(super) type Page = (u64, Box<[u8]>);

#[derive(Debug)]
struct Limits {
    clean_pages: usize,
    dirty_pages: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { clean_pages: MAX_CLEAN_PAGES, dirty_pages: MAX_DIRTY_PAGES }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct PageCache {
    limits: Limits,
    /// By file offset, a multiple of 4096.
    pages: HashMap<u64, Box<[u8]>>,
    /// Changed since they were last snapshot.
    dirty: BTreeSet<u64>,
    /// Snapshot, not yet durable.
    in_flight: BTreeSet<u64>,
    /// How often pages were dropped.
    drops: u64,
}

/// The file offsets of the pages that hold a range.
fn pages_of(start_bytes: u64, len_bytes: u64) -> impl Iterator<Item = u64> {
    (start_bytes - start_bytes % PAGE_BYTES..start_bytes + len_bytes).step_by(PAGE_BYTES as usize)
}

impl PageCache {
    /// Whether all pages of a range are here.
    pub(super) fn has(&self, start_bytes: u64, len_bytes: u64) -> bool {
        pages_of(start_bytes, len_bytes).all(|offset_bytes| self.pages.contains_key(&offset_bytes))
    }

    /// The file offsets of the pages of a range that are not here.
    pub(super) fn missing(&self, start_bytes: u64, len_bytes: u64) -> Vec<u64> {
        pages_of(start_bytes, len_bytes).filter(|offset_bytes| !self.pages.contains_key(offset_bytes)).collect()
    }

    /// A number that grows whenever a page is dropped.
    pub(super) fn drops(&self) -> u64 {
        self.drops
    }

    /// Bounds the memory of all pages: three quarters for clean ones, the rest for dirty ones.
    pub(super) fn limit(&mut self, bytes: u64) {
        let pages = usize::try_from(bytes / PAGE_BYTES).unwrap_or(usize::MAX);
        self.limits.clean_pages = (pages / 4 * 3).max(MIN_PAGES);
        self.limits.dirty_pages = (pages / 4).clamp(MIN_PAGES, MAX_DIRTY_PAGES);
        self.drop_clean(0);
    }

    /// Takes in pages as the file has them, those that are still absent. The caller has seen to it
    /// that [`PageCache::drops`] is as it was before they were read.
    pub(super) fn insert(&mut self, pages: Vec<Page>) {
        self.drop_clean(pages.len());
        for (offset_bytes, page) in pages {
            self.pages.entry(offset_bytes).or_insert(page);
        }
    }

    /// Sees to it that the pages of a range are here that the file has as zeros. They are about to
    /// be changed, and nothing is dropped for them.
    pub(super) fn insert_zeros(&mut self, start_bytes: u64, len_bytes: u64) {
        for offset_bytes in pages_of(start_bytes, len_bytes) {
            self.pages.entry(offset_bytes).or_insert_with(|| vec![0; PAGE_BYTES as usize].into_boxed_slice());
        }
    }

    /// Drops the clean pages when there are too many with `more` to come.
    fn drop_clean(&mut self, more: usize) {
        let (dirty, in_flight) = (&self.dirty, &self.in_flight);
        if self.pages.len() + more > self.limits.clean_pages + dirty.len() + in_flight.len() {
            let before = self.pages.len();
            self.pages.retain(|offset, _| dirty.contains(offset) || in_flight.contains(offset));
            self.drops += u64::from(self.pages.len() < before);
        }
    }

    /// Visits the loaded pieces of a range, page by page, for reading. Pieces that are not loaded
    /// are left out.
    pub(super) fn each_piece(&self, start_bytes: u64, len_bytes: u64, visit: &mut dyn FnMut(usize, &[u8])) {
        let end_bytes = start_bytes + len_bytes;
        for offset_bytes in pages_of(start_bytes, len_bytes) {
            if let Some(page) = self.pages.get(&offset_bytes) {
                let (from, to) = (offset_bytes.max(start_bytes), (offset_bytes + PAGE_BYTES).min(end_bytes));
                visit(
                    (from - start_bytes) as usize,
                    &page[(from - offset_bytes) as usize..(to - offset_bytes) as usize],
                );
            }
        }
    }

    /// The first byte of `start_bytes .. end_bytes` that lies in a dirty page, or in one on its
    /// way: what the file has there may be a hole. All other pages are in the file as they should
    /// be.
    pub(super) fn first_in(&self, start_bytes: u64, end_bytes: u64) -> Option<u64> {
        let first = start_bytes - start_bytes % PAGE_BYTES;
        if first >= end_bytes {
            return None;
        }
        let next = |pages: &BTreeSet<u64>| pages.range(first..end_bytes).next().copied();
        let page = next(&self.dirty).into_iter().chain(next(&self.in_flight)).min()?;
        Some(page.max(start_bytes)).filter(|&at| at < end_bytes)
    }

    /// Replaces what the cache has of a range in `buf`, which was read from the file at
    /// `start_bytes`.
    pub(super) fn overlay(&self, buf: &mut [u8], start_bytes: u64) {
        if !self.pages.is_empty() {
            let len_bytes = buf.len() as u64;
            self.each_piece(start_bytes, len_bytes, &mut |at, piece| buf[at..at + piece.len()].copy_from_slice(piece));
        }
    }

    /// Changes a range whose pages are loaded: `change` gets each piece and its place in the range.
    /// All of them become dirty.
    pub(super) fn change(&mut self, start_bytes: u64, len_bytes: u64, change: &mut dyn FnMut(usize, &mut [u8])) {
        let end_bytes = start_bytes + len_bytes;
        for offset_bytes in pages_of(start_bytes, len_bytes) {
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

    /// Whether so many pages are dirty that a flush is due.
    pub(super) fn is_flush_due(&self) -> bool {
        self.dirty.len() > self.limits.dirty_pages
    }

    /// The file's `len_bytes` at `from_bytes` are at `to_bytes` from now on; all multiples of 4096.
    /// No page of them is in flight.
    pub(super) fn move_range(&mut self, from_bytes: u64, len_bytes: u64, to_bytes: u64) {
        for offset_bytes in pages_of(from_bytes, len_bytes) {
            let moved_bytes = offset_bytes - from_bytes + to_bytes;
            if let Some(page) = self.pages.remove(&offset_bytes) {
                self.pages.insert(moved_bytes, page);
            }
            if self.dirty.remove(&offset_bytes) {
                self.dirty.insert(moved_bytes);
            }
        }
        self.drops += 1;
    }

    /// Copies of all dirty pages, which are in flight from now on, by rising offset.
    pub(super) fn snapshot(&mut self) -> Vec<Page> {
        self.in_flight = std::mem::take(&mut self.dirty);
        self.in_flight.iter().filter_map(|offset| self.pages.get(offset).map(|page| (*offset, page.clone()))).collect()
    }

    /// What was in flight is durable and in its place.
    pub(super) fn landed(&mut self) {
        self.in_flight.clear();
        self.drop_clean(0);
    }

    /// What was in flight is dirty again.
    pub(super) fn failed(&mut self) {
        self.dirty.append(&mut self.in_flight);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(offset_bytes: u64) -> Page {
        (offset_bytes, vec![0; PAGE_BYTES as usize].into_boxed_slice())
    }

    #[test]
    fn clean_pages_are_bounded_while_they_are_loaded_and_dirty_ones_stay() {
        let mut pages = PageCache::default();
        let at = |number: usize| number as u64 * PAGE_BYTES;
        for number in 0..3 * MAX_CLEAN_PAGES {
            pages.insert(vec![page(at(number))]);
            assert!(pages.has(at(number), PAGE_BYTES));
            if number < 10 {
                pages.change(at(number), 1, &mut |_, piece| piece[0] = 7);
            }
            if number == 4 {
                assert_eq!(pages.snapshot().len(), 5);
            }
            assert!(pages.pages.len() <= MAX_CLEAN_PAGES + 10, "{} pages", pages.pages.len());
        }
        assert!(pages.drops() > 0);
        let mut bytes = vec![0; at(10) as usize];
        pages.overlay(&mut bytes, 0);
        assert!((0..10).all(|number| bytes[at(number) as usize] == 7), "dirty, or on its way through the log");
        pages.landed();
        assert_eq!(pages.snapshot().len(), 5);
    }

    #[test]
    fn a_lower_limit_holds_at_once_and_leaves_what_a_request_needs() {
        let mut pages = PageCache::default();
        pages.insert((0..1000).map(|number| page(number * PAGE_BYTES)).collect());
        pages.change(0, 200 * PAGE_BYTES, &mut |_, piece| piece[0] = 7);
        assert!(!pages.is_flush_due());
        pages.limit(0);
        assert_eq!(pages.pages.len(), 200, "the dirty ones stay");
        assert!(pages.is_flush_due() && pages.drops() > 0);
        pages.snapshot();
        pages.landed();
        assert!(pages.pages.len() <= MIN_PAGES);
        for number in 0..1000 {
            pages.insert(vec![page(number * PAGE_BYTES)]);
            assert!(pages.pages.len() <= MIN_PAGES && pages.has(number * PAGE_BYTES, 1));
        }
    }
}
