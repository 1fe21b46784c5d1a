//! Cache of the 4 KiB pages of the BAT and of sector bitmap blocks, for a writable image.
//!
//! A page is inserted before it is first changed. The page stays while it is dirty or in flight (on
//! its way through the log). Clean pages are dropped when the cache is too large. So memory depends
//! on the pages in use, not on a header's claim. The cache lives inside the image's state mutex and
//! never accesses the file.
//!
//! ```text
//!   prepare.rs:  missing + drops ─▶ read without the mutex ─▶ drops unchanged? ─▶ insert
//!   tables.rs:             drops ─▶ read without the mutex ─▶ drops unchanged? ─▶ overlay
//! ```
//!
//! Invariant: a page that is not cached is current in the file. So bytes that were read without the
//! mutex are stale only if their page was changed, written and dropped meanwhile.
//! [`PageCache::drops`] grows with each drop; a reader that finds it changed reads again.

#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken};
use std::collections::{BTreeSet, HashMap};

/// Size of a page in bytes: a data sector of the log.
pub(super) const PAGE_BYTES: u64 = 4096;
/// Default limit for clean pages: 16 MiB.
const MAX_CLEAN_PAGES: usize = 4 << 10;
/// Default and highest limit for dirty pages, above which a flush is due: 16 MiB.
const MAX_DIRTY_PAGES: usize = 4 << 10;
/// Minimum of each limit: a request needs several pages at the same time.
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

/// Pages of tables in memory, each clean or dirty.
#[derive(Debug, Default)]
pub(super) struct PageCache {
    limits: Limits,
    /// By file offset, a multiple of 4096.
    pages: HashMap<u64, Box<[u8]>>,
    /// Pages changed since the last snapshot.
    dirty: BTreeSet<u64>,
    /// Pages in the last snapshot, not yet durable.
    in_flight: BTreeSet<u64>,
    /// How many pages were dropped: a read that saw another number is repeated.
    drops: u64,
}

/// File offsets of the pages of a range.
fn pages_of(start_bytes: u64, len_bytes: u64) -> impl Iterator<Item = u64> {
    (start_bytes - start_bytes % PAGE_BYTES..start_bytes + len_bytes).step_by(PAGE_BYTES as usize)
}

impl PageCache {
    /// Whether all pages of a range are cached.
    pub(super) fn has(&self, start_bytes: u64, len_bytes: u64) -> bool {
        pages_of(start_bytes, len_bytes).all(|offset_bytes| self.pages.contains_key(&offset_bytes))
    }

    /// File offsets of the pages of a range that are not cached.
    pub(super) fn missing(&self, start_bytes: u64, len_bytes: u64) -> Vec<u64> {
        pages_of(start_bytes, len_bytes).filter(|offset_bytes| !self.pages.contains_key(offset_bytes)).collect()
    }

    /// A counter that grows whenever pages are dropped.
    pub(super) fn drops(&self) -> u64 {
        self.drops
    }

    /// Limits the memory of all pages: three quarters for clean ones, the rest for dirty ones.
    pub(super) fn limit(&mut self, bytes: u64) {
        let pages = usize::try_from(bytes / PAGE_BYTES).unwrap_or(usize::MAX);
        self.limits.clean_pages = (pages / 4 * 3).max(MIN_PAGES);
        self.limits.dirty_pages = (pages / 4).clamp(MIN_PAGES, MAX_DIRTY_PAGES);
        self.drop_clean(0);
    }

    /// Inserts pages read from the file, unless they are cached already. The caller has checked
    /// that [`PageCache::drops`] did not change during the read.
    pub(super) fn insert(&mut self, pages: Vec<Page>) {
        self.drop_clean(pages.len());
        for (offset_bytes, page) in pages {
            self.pages.entry(offset_bytes).or_insert(page);
        }
    }

    /// Inserts zeroed pages for a range that is a hole in the file, unless they are cached already.
    /// The caller changes them at once, so nothing is dropped to make room.
    pub(super) fn insert_zeros(&mut self, start_bytes: u64, len_bytes: u64) {
        for offset_bytes in pages_of(start_bytes, len_bytes) {
            self.pages.entry(offset_bytes).or_insert_with(|| vec![0; PAGE_BYTES as usize].into_boxed_slice());
        }
    }

    /// Drops the clean pages if they would exceed the limit with `more` new pages.
    fn drop_clean(&mut self, more: usize) {
        let (dirty, in_flight) = (&self.dirty, &self.in_flight);
        if self.pages.len() + more > self.limits.clean_pages + dirty.len() + in_flight.len() {
            let before = self.pages.len();
            self.pages.retain(|offset, _| dirty.contains(offset) || in_flight.contains(offset));
            self.drops += u64::from(self.pages.len() < before);
        }
    }

    /// Calls `visit(offset in range, bytes)` for each cached piece of a range, page by page.
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

    /// The first byte of `start_bytes .. end_bytes` in a dirty or in-flight page, where the file
    /// may have a hole. All other pages are current in the file.
    pub(super) fn first_in(&self, start_bytes: u64, end_bytes: u64) -> Option<u64> {
        let first = start_bytes - start_bytes % PAGE_BYTES;
        if first >= end_bytes {
            return None;
        }
        let next = |pages: &BTreeSet<u64>| pages.range(first..end_bytes).next().copied();
        let page = next(&self.dirty).into_iter().chain(next(&self.in_flight)).min()?;
        Some(page.max(start_bytes)).filter(|&at| at < end_bytes)
    }

    /// Lays the cached pages over `buf`, which was read from file offset `start_bytes`.
    pub(super) fn overlay(&self, buf: &mut [u8], start_bytes: u64) {
        if !self.pages.is_empty() {
            let len_bytes = buf.len() as u64;
            self.each_piece(start_bytes, len_bytes, &mut |at, piece| buf[at..at + piece.len()].copy_from_slice(piece));
        }
    }

    /// Changes a range whose pages are cached: calls `change(offset in range, bytes)` for each
    /// piece. All its pages become dirty.
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

    /// Whether any change is not yet durable.
    pub(super) fn is_dirty(&self) -> bool {
        #[cfg(feature = "shuttle")]
        if is_broken(Rule::DirtyUntilLanded) {
            return !self.dirty.is_empty();
        }
        !self.dirty.is_empty() || !self.in_flight.is_empty()
    }

    /// Whether the dirty pages exceed the limit.
    pub(super) fn is_flush_due(&self) -> bool {
        self.dirty.len() > self.limits.dirty_pages
    }

    /// Moves the pages of `len_bytes` at file offset `from_bytes` to `to_bytes`. All are multiples
    /// of 4096. None of the pages may be in flight.
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

    /// Drops all pages. None may be dirty or in flight.
    pub(super) fn drop_all(&mut self) {
        debug_assert!(!self.is_dirty(), "a change would be lost");
        self.pages.clear();
        self.drops += 1;
    }

    /// Copies of all dirty pages, by ascending offset. The pages are in flight from now on.
    pub(super) fn snapshot(&mut self) -> Vec<Page> {
        self.in_flight = std::mem::take(&mut self.dirty);
        self.in_flight.iter().filter_map(|offset| self.pages.get(offset).map(|page| (*offset, page.clone()))).collect()
    }

    /// Records that the pages in flight are written in place and protected by the log.
    pub(super) fn landed(&mut self) {
        self.in_flight.clear();
        self.drop_clean(0);
    }

    /// Makes the pages in flight dirty again.
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
    fn clean_pages_stay_below_the_limit_and_dirty_pages_are_kept() {
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
        assert!((0..10).all(|number| bytes[at(number) as usize] == 7), "dirty or in flight");
        pages.landed();
        assert_eq!(pages.snapshot().len(), 5);
    }

    #[test]
    fn a_lower_limit_applies_at_once_but_keeps_a_minimum() {
        let mut pages = PageCache::default();
        pages.insert((0..1000).map(|number| page(number * PAGE_BYTES)).collect());
        pages.change(0, 200 * PAGE_BYTES, &mut |_, piece| piece[0] = 7);
        assert!(!pages.is_flush_due());
        pages.limit(0);
        assert_eq!(pages.pages.len(), 200, "dirty pages are kept");
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
