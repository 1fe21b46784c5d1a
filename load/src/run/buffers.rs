//! Buffers that are kept from one run to the next.
//!
//! Without them a window of a tenth of a second would start with allocating and clearing tens of
//! megabytes. The kernel also does not always find huge pages, so targets that are compared in
//! turns use the same memory.
//!
//! Even a few buffers are cut from a whole huge page. A disk handles 64 KiB in small pages as
//! sixteen segments, and the latency would depend on the memory.
//!
//! Invariant: a set that is kept is complete (a slab and all its pieces), and no thread uses it. A
//! thread whose queue still holds a buffer does not return its set.

use diskwright_store::{HUGE_PAGE_BYTES, IoBuf, Slab};
use std::sync::{Arc, Mutex, PoisonError};

/// A slab and its pieces.
#[derive(Debug)]
pub(crate) struct Set {
    pub(crate) slab: Slab,
    pub(crate) pieces: Vec<IoBuf>,
    count: usize,
    piece_bytes: usize,
}

/// Sets of buffers that later runs use again. Clones share the sets.
#[derive(Debug, Clone, Default)]
pub struct Buffers {
    kept: Arc<Mutex<Vec<Set>>>,
}

impl Buffers {
    /// Returns a set of `count` pieces of `piece_bytes`: a kept one, or else a new one. Kept sets
    /// of other shapes are then freed.
    pub(crate) fn take(&self, count: usize, piece_bytes: usize) -> Set {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        match kept.iter().position(|set| (set.count, set.piece_bytes) == (count, piece_bytes)) {
            Some(index) => kept.swap_remove(index),
            None => {
                kept.clear();
                let slab = Slab::new(count.max(HUGE_PAGE_BYTES.div_ceil(piece_bytes)), piece_bytes);
                let mut pieces = slab.take_all();
                pieces.truncate(count);
                Set { pieces, slab, count, piece_bytes }
            }
        }
    }

    /// Keeps a set for later runs, if it is complete.
    pub(crate) fn keep(&self, set: Set) {
        if set.pieces.len() == set.count {
            self.kept.lock().unwrap_or_else(PoisonError::into_inner).push(set);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_memory_is_used_again_and_another_shape_replaces_it() {
        let buffers = Buffers::default();
        let first = buffers.take(2, 4096);
        let place = first.pieces[0].as_ptr();
        buffers.keep(first);
        let again = buffers.take(2, 4096);
        assert!(again.pieces.iter().any(|piece| piece.as_ptr() == place));
        assert_eq!(buffers.clone().take(2, 4096).pieces.len(), 2, "the first set is in use, so this is a new one");
        buffers.keep(again);
        assert_eq!(buffers.take(3, 8192).pieces.len(), 3);
        assert!(buffers.kept.lock().unwrap().is_empty(), "a set of another shape is freed");
    }

    #[test]
    fn a_few_buffers_are_cut_from_a_huge_page() {
        let set = Buffers::default().take(4, 64 << 10);
        assert_eq!(set.pieces.len(), 4);
        assert_eq!(set.pieces[0].as_ptr().addr() % HUGE_PAGE_BYTES, 0, "the slab is aligned to a huge page");
        assert!(set.pieces.iter().all(|piece| set.slab.owns(piece)), "all pieces are registered");
    }

    #[test]
    fn an_incomplete_set_is_not_kept() {
        let buffers = Buffers::default();
        let mut set = buffers.take(2, 4096);
        set.pieces.pop();
        buffers.keep(set);
        assert_eq!(buffers.take(2, 4096).pieces.len(), 2);
    }
}
