//! A worker's buffers, in a few sizes.
//!
//! The first buffers of each size are cut from one slab that is registered with the ring. When they
//! are used up, more are allocated. Large ones come from further slabs, because a slab lies in huge
//! pages: a buffer of 256 KiB in small pages is up to 64 segments for the disk, and `nbdcopy` then
//! took 1.6 times as long.
//!
//! Each buffer has [`HEADER_ROOM_BYTES`] before its payload. A reply's header is written directly
//! before the data, and the data is aligned for O_DIRECT. The number of free buffers that are kept
//! is limited here; the number in use is limited by the connections (see `connection`). When the
//! last connection is gone, only the first slab is kept.

use diskwright_store::{HUGE_PAGE_BYTES, IoBuf, Slab};

/// Offset of the payload in a buffer. A whole page, so that the payload is aligned.
pub(crate) const HEADER_ROOM_BYTES: usize = 4096;

/// The largest payload of one buffer. A longer payload is split.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// (payload bytes of a buffer, buffers in the slab, free buffers kept).
const CLASSES: [(usize, usize, usize); 5] =
    [(4 << 10, 256, 1024), (32 << 10, 64, 256), (128 << 10, 64, 128), (256 << 10, 16, 64), (PIECE_BYTES, 0, 16)];

/// From this payload size on, buffers are allocated in slabs.
const LARGE_BYTES: usize = 128 << 10;

#[derive(Debug)]
pub(crate) struct Pool {
    slab: Slab,
    free: [Vec<IoBuf>; CLASSES.len()],
}

impl Pool {
    pub(crate) fn new() -> Self {
        let in_slab: Vec<(usize, usize)> = CLASSES
            .iter()
            .filter(|&&(_, pieces, _)| pieces > 0)
            .map(|&(payload_bytes, pieces, _)| (pieces, HEADER_ROOM_BYTES + payload_bytes))
            .collect();
        let slab = Slab::of_classes(&in_slab);
        let mut free = CLASSES.map(|_| Vec::new());
        for buf in slab.take_all() {
            if let Some(class) = class_of(&buf) {
                free[class].push(buf);
            }
        }
        Self { slab, free }
    }

    /// Frees everything but the first slab.
    pub(crate) fn trim(&mut self) {
        for free in &mut self.free {
            free.retain(|buf| self.slab.owns(buf));
        }
    }

    /// The slab, to be registered with a ring.
    pub(crate) fn slab(&self) -> &Slab {
        &self.slab
    }

    /// A buffer for up to [`PIECE_BYTES`] of payload, after the room for the header.
    pub(crate) fn take(&mut self, payload_bytes: usize) -> IoBuf {
        let class = CLASSES.iter().position(|&(bytes, ..)| payload_bytes <= bytes).unwrap_or(CLASSES.len() - 1);
        // The buffer that came back last is the most likely to be in the processor's cache.
        if let Some(buf) = self.free[class].pop() {
            return buf;
        }
        let buf_bytes = HEADER_ROOM_BYTES + CLASSES[class].0.max(payload_bytes);
        if CLASSES[class].0 >= LARGE_BYTES {
            // Allocates a whole huge page, or more for a larger buffer.
            self.free[class] = Slab::new(HUGE_PAGE_BYTES.div_ceil(buf_bytes), buf_bytes).take_all();
        }
        self.free[class].pop().unwrap_or_else(|| IoBuf::new(buf_bytes))
    }

    pub(crate) fn give(&mut self, buf: IoBuf) {
        if let Some(class) = class_of(&buf)
            && (self.free[class].len() < CLASSES[class].2 || self.slab.owns(&buf))
        {
            self.free[class].push(buf);
        }
    }
}

fn class_of(buf: &IoBuf) -> Option<usize> {
    CLASSES.iter().position(|&(payload_bytes, ..)| buf.len() == HEADER_ROOM_BYTES + payload_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_fit_and_are_reused() {
        let mut pool = Pool::new();
        for bytes in [0, 1, 4096, 4097, 70_000, 200_000, PIECE_BYTES] {
            let buf = pool.take(bytes);
            assert!(buf.len() >= HEADER_ROOM_BYTES + bytes && buf.len() <= HEADER_ROOM_BYTES + (bytes * 8).max(4096));
            let address = buf.as_ptr();
            pool.give(buf);
            assert_eq!(pool.take(bytes).as_ptr(), address, "the last one returned is used first");
        }
    }

    #[test]
    fn buffers_beyond_the_slab_are_allocated_and_not_all_kept() {
        let mut pool = Pool::new();
        let all: Vec<IoBuf> = (0..200).map(|_| pool.take(200_000)).collect();
        assert_eq!(all.iter().filter(|buf| pool.slab().owns(buf)).count(), 16);
        all.into_iter().for_each(|buf| pool.give(buf));
        assert!((64..=80).contains(&pool.free[3].len()), "{}", pool.free[3].len());
        assert_eq!(pool.free[3].iter().filter(|buf| pool.slab.owns(buf)).count(), 16, "no buffer of the slab is lost");
        pool.trim();
        assert_eq!(pool.free.each_ref().map(Vec::len), CLASSES.map(|(_, pieces, _)| pieces), "only the slab is kept");
    }
}
