//! A worker's buffers: some sizes, cut from one slab that is registered with the ring, and more
//! from the allocator when those are out. Large ones come from there by the slab as well, for a
//! slab lies in huge pages: a buffer of 256 KiB in small ones would be 64 pieces to a disk, and
//! `nbdcopy` of a disk took 1.6 times as long.
//!
//! Each buffer has [`HEADER_ROOM_BYTES`] before its payload, so that the header of a reply stands
//! directly before the bytes that were read, which themselves are aligned for O_DIRECT. What is
//! kept for the next time is bounded; how much is out at a time is bounded by the connections (see
//! `connection`), and when the last of them has gone, only the first slab is kept.

use diskwright_store::{HUGE_PAGE_BYTES, IoBuf, Slab};

/// Where the payload begins. A whole page, so that it is aligned.
pub(crate) const HEADER_ROOM_BYTES: usize = 4096;

/// The largest payload of one buffer; a longer one is in pieces.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// (payload of a buffer, how many lie in the slab, how many are kept).
const CLASSES: [(usize, usize, usize); 5] =
    [(4 << 10, 256, 1024), (32 << 10, 64, 256), (128 << 10, 64, 128), (256 << 10, 16, 64), (PIECE_BYTES, 0, 16)];

/// Payloads from here on are read and written at the speed of the disk rather than by the request.
const LARGE_BYTES: usize = 128 << 10;

/// See the module.
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

    /// Lets go of everything but the first slab.
    pub(crate) fn trim(&mut self) {
        for free in &mut self.free {
            free.retain(|buf| self.slab.owns(buf));
        }
    }

    /// To register with a ring.
    pub(crate) fn slab(&self) -> &Slab {
        &self.slab
    }

    /// A buffer for `payload_bytes`, at most [`PIECE_BYTES`], behind the header's room.
    pub(crate) fn take(&mut self, payload_bytes: usize) -> IoBuf {
        let class = CLASSES.iter().position(|&(bytes, ..)| payload_bytes <= bytes).unwrap_or(CLASSES.len() - 1);
        // The last that came back is the likeliest to be in the processor's cache.
        if let Some(buf) = self.free[class].pop() {
            return buf;
        }
        let buf_bytes = HEADER_ROOM_BYTES + CLASSES[class].0.max(payload_bytes);
        if CLASSES[class].0 >= LARGE_BYTES {
            // A huge page at once, and what reaches beyond it.
            self.free[class] = Slab::new(HUGE_PAGE_BYTES.div_ceil(buf_bytes), buf_bytes).take_all();
        }
        self.free[class].pop().unwrap_or_else(|| IoBuf::new(buf_bytes))
    }

    /// Takes a buffer back.
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
    fn buffers_fit_and_come_back() {
        let mut pool = Pool::new();
        for bytes in [0, 1, 4096, 4097, 70_000, 200_000, PIECE_BYTES] {
            let buf = pool.take(bytes);
            assert!(buf.len() >= HEADER_ROOM_BYTES + bytes && buf.len() <= HEADER_ROOM_BYTES + (bytes * 8).max(4096));
            let address = buf.as_ptr();
            pool.give(buf);
            assert_eq!(pool.take(bytes).as_ptr(), address, "the last is used first");
        }
    }

    #[test]
    fn more_than_the_slab_holds_are_had_and_not_all_kept() {
        let mut pool = Pool::new();
        let all: Vec<IoBuf> = (0..200).map(|_| pool.take(200_000)).collect();
        assert_eq!(all.iter().filter(|buf| pool.slab().owns(buf)).count(), 16);
        all.into_iter().for_each(|buf| pool.give(buf));
        assert!((64..=80).contains(&pool.free[3].len()), "{}", pool.free[3].len());
        assert_eq!(pool.free[3].iter().filter(|buf| pool.slab.owns(buf)).count(), 16, "of the slab none is lost");
        pool.trim();
        assert_eq!(pool.free.each_ref().map(Vec::len), CLASSES.map(|(_, pieces, _)| pieces), "nobody needs more");
    }
}
