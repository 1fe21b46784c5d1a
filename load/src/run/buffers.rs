//! Buffers that are kept from one run to the next.
//!
//! A window of a tenth of a second should not begin with tens of megabytes that are asked for,
//! cleared and given back; and whether the kernel finds huge pages for them differs from time to
//! time, so targets that are compared in turns get the same memory.
//!
//! Even few buffers are cut from a whole huge page: a disk takes 64 KiB in small pages as sixteen
//! pieces, and the latency would be that of the memory they lie in.
//!
//! Invariant: what is kept is whole, a slab and all of its pieces, and nobody's: a thread whose
//! queue has kept a buffer gives nothing back.

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

/// See the module. Clones share what is kept.
#[derive(Debug, Clone, Default)]
pub struct Buffers {
    kept: Arc<Mutex<Vec<Set>>>,
}

impl Buffers {
    /// `count` pieces of `piece_bytes`: some that were kept, or new ones, and then what was kept is
    /// of another run and goes.
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

    /// Keeps a set, if it is whole.
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
        assert_eq!(buffers.clone().take(2, 4096).pieces.len(), 2, "it is in use, so this is another");
        buffers.keep(again);
        assert_eq!(buffers.take(3, 8192).pieces.len(), 3);
        assert!(buffers.kept.lock().unwrap().is_empty(), "what has another shape is not kept for ever");
    }

    #[test]
    fn few_buffers_lie_in_a_huge_page_too() {
        let set = Buffers::default().take(4, 64 << 10);
        assert_eq!(set.pieces.len(), 4);
        assert_eq!(set.pieces[0].as_ptr().addr() % HUGE_PAGE_BYTES, 0, "only slabs of huge pages begin with one");
        assert!(set.pieces.iter().all(|piece| set.slab.owns(piece)), "all of them are registered");
    }

    #[test]
    fn what_is_not_whole_is_not_kept() {
        let buffers = Buffers::default();
        let mut set = buffers.take(2, 4096);
        set.pieces.pop();
        buffers.keep(set);
        assert_eq!(buffers.take(2, 4096).pieces.len(), 2);
    }
}
