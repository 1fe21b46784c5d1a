//! The pages of the map in memory, up to a limit.
//!
//! ```text
//!   entries: one for each page of the disk   frames: memory, allocated on first use, never freed
//!     0              not in memory
//!     stamp | frame  ───────────────────────▶  [ word, word, ... ]
//! ```
//!
//! A reader takes no lock. It loads the entry, the word in the frame, and the entry again. The
//! second load detects a frame that was given to another page meanwhile: the entry is cleared
//! before the frame's words are overwritten, and a reader that sees a new word also sees the
//! cleared entry (release and acquire). The stamp grows with each use of a frame, so an entry that
//! gets the same frame again differs from the old one.
//!
//! When all frames are in use, the one that was filled longest ago is reused. LRU was rejected:
//! each look-up would need a store, and only disks whose map exceeds the limit (16 TiB in blocks of
//! 2 MiB with 64 MiB of map) ever drop a page.
//!
//! All changes happen under the disk's mutation lock. The mutex here only proves that to the
//! compiler, and is never contended.

use diskwright_store::sync::{
    Mutex,
    atomic::{AtomicU64, Ordering},
};
use std::sync::{OnceLock, PoisonError};

/// Minimum number of frames, whatever the limit.
const FRAMES_MIN: usize = 4;

/// The pages in memory.
#[derive(Debug)]
pub(super) struct Pages {
    entries: Box<[AtomicU64]>,
    frames: Box<[OnceLock<Box<[AtomicU64]>>]>,
    words_per_page: usize,
    usage: Mutex<Usage>,
}

/// Which page each frame holds.
#[derive(Debug, Default)]
struct Usage {
    /// Page number by frame. Shorter than the frames until all are in use.
    pages: Vec<usize>,
    /// The frame to reuse next when all are in use.
    oldest: usize,
    stamp: u32,
}

impl Pages {
    /// An empty set for `pages` pages of `words_per_page` words, in at most about `limit_bytes`.
    pub(super) fn new(pages: usize, words_per_page: usize, limit_bytes: u64) -> Self {
        let affordable = usize::try_from(limit_bytes).unwrap_or(usize::MAX) / (words_per_page * size_of::<u64>());
        let frames = affordable.max(FRAMES_MIN).min(pages);
        Self {
            entries: (0..pages).map(|_| AtomicU64::new(0)).collect(),
            frames: (0..frames).map(|_| OnceLock::new()).collect(),
            words_per_page,
            usage: Mutex::default(),
        }
    }

    #[inline]
    fn frame_of(&self, entry: u64) -> Option<&[AtomicU64]> {
        self.frames.get((entry as u32).checked_sub(1)? as usize)?.get().map(|frame| &**frame)
    }

    /// The word of a page; `None` if the page is not in memory.
    #[inline]
    pub(super) fn load(&self, page: usize, word: usize) -> Option<u64> {
        let entry = self.entries.get(page)?;
        let found = entry.load(Ordering::Acquire);
        let value = self.frame_of(found)?.get(word)?.load(Ordering::Acquire);
        // Relaxed suffices: a word of another page was loaded with acquire, which makes the change
        // of the entry visible.
        (entry.load(Ordering::Relaxed) == found).then_some(value)
    }

    /// Whether a page is in memory.
    pub(super) fn is_resident(&self, page: usize) -> bool {
        self.entries.get(page).is_some_and(|entry| entry.load(Ordering::Acquire) != 0)
    }

    /// Changes a word of a page, if the page is in memory.
    pub(super) fn store(&self, page: usize, word: usize, value: u64) {
        let Some(entry) = self.entries.get(page) else { return };
        if let Some(place) = self.frame_of(entry.load(Ordering::Acquire)).and_then(|frame| frame.get(word)) {
            place.store(value, Ordering::Release);
        }
    }

    pub(super) fn clear(&self) {
        let mut usage = self.usage.lock().unwrap_or_else(PoisonError::into_inner);
        self.entries.iter().for_each(|entry| entry.store(0, Ordering::Release));
        usage.pages.clear();
        usage.oldest = 0;
    }

    /// Installs a page. Words beyond `words` have unspecified contents and must not be read.
    pub(super) fn install(&self, page: usize, words: impl Iterator<Item = u64>) {
        let mut usage = self.usage.lock().unwrap_or_else(PoisonError::into_inner);
        if page >= self.entries.len() || self.is_resident(page) {
            return;
        }
        let frame = if usage.pages.len() < self.frames.len() {
            usage.pages.push(page);
            usage.pages.len() - 1
        } else {
            let frame = usage.oldest;
            usage.oldest = (frame + 1) % self.frames.len();
            let given_up = std::mem::replace(&mut usage.pages[frame], page);
            self.entries[given_up].store(0, Ordering::Release);
            frame
        };
        if self.frames[frame].get().is_none() {
            // Under the usage lock no other thread can have set it meanwhile.
            let _ = self.frames[frame].set((0..self.words_per_page).map(|_| AtomicU64::new(0)).collect());
        }
        if let Some(memory) = self.frames[frame].get() {
            for (place, value) in memory.iter().zip(words) {
                place.store(value, Ordering::Release);
            }
        }
        usage.stamp = usage.stamp.wrapping_add(1);
        self.entries[page].store(u64::from(usage.stamp) << 32 | (frame as u64 + 1), Ordering::Release);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn pages_above_the_limit_are_dropped_oldest_first() {
        let pages = Pages::new(100, 8, 5 * 64);
        for page in 0..7 {
            pages.install(page, (0..8).map(|word| (page * 10 + word) as u64));
        }
        let here: Vec<usize> = (0..100).filter(|&page| pages.is_resident(page)).collect();
        assert_eq!(here, [2, 3, 4, 5, 6]);
        assert_eq!((pages.load(2, 3), pages.load(6, 7), pages.load(0, 0)), (Some(23), Some(67), None));
        pages.store(0, 0, 9);
        pages.store(6, 7, 9);
        assert_eq!((pages.load(0, 0), pages.load(6, 7)), (None, Some(9)));
        assert_eq!(pages.frames.iter().filter(|frame| frame.get().is_some()).count(), 5);
    }

    #[test]
    fn a_page_in_memory_is_not_installed_again() {
        let pages = Pages::new(10, 2, 0);
        pages.install(1, [5, 6].into_iter());
        pages.store(1, 0, 7);
        pages.install(1, [5, 6].into_iter());
        assert_eq!(pages.load(1, 0), Some(7));
        pages.install(10, [1].into_iter());
        assert_eq!(pages.load(10, 0), None);
    }

    #[test]
    fn cleared_pages_can_be_installed_again() {
        let pages = Pages::new(10, 2, 0);
        (0..6).for_each(|page| pages.install(page, [page as u64; 2].into_iter()));
        pages.clear();
        assert!((0..10).all(|page| !pages.is_resident(page)));
        (0..6).for_each(|page| pages.install(page, [page as u64; 2].into_iter()));
        assert_eq!((0..10).filter(|&page| pages.is_resident(page)).collect::<Vec<_>>(), [2, 3, 4, 5]);
        assert_eq!(pages.load(5, 1), Some(5));
    }

    #[test]
    fn a_reader_never_sees_another_pages_word() {
        let pages = Pages::new(64, 4, 0);
        let rounds = 20_000;
        thread::scope(|scope| {
            for seed in 0..2usize {
                let pages = &pages;
                scope.spawn(move || {
                    let mut found = 0;
                    for round in 0..rounds {
                        let page = (round * 7 + seed) % 64;
                        if let Some(value) = pages.load(page, round % 4) {
                            assert_eq!(value, (page * 4 + round % 4) as u64);
                            found += 1;
                        }
                    }
                    found
                });
            }
            for round in 0..rounds {
                let page = round % 64;
                pages.install(page, (0..4).map(|word| (page * 4 + word) as u64));
            }
        });
    }
}
