//! The budget for reading the structures of a disk's file systems.
//!
//! A superblock can claim tables of any length, and an image can hold many superblocks. So reads
//! are counted for all file systems together, and so is what is remembered of them.
//!
//! A caller reads whole pieces of [`PIECE_BYTES`] and keeps the last one (`volumes.rs` of the
//! `disk` crate). A read in the same piece as the one before is therefore free.

use crate::read::ReadAt;
use std::{cell::Cell, io, ops::Range};

/// Length of the pieces by which reads are counted, in bytes.
const PIECE_BYTES: u64 = 64 << 10;
/// Maximum number of things that are remembered of all file systems together.
const REMEMBERED_MAX: usize = 2 << 20;

/// A disk of which only so many bytes may be read.
pub(crate) struct Metered<'a> {
    disk: &'a dyn ReadAt,
    left_bytes: Cell<u64>,
    remembered: Cell<usize>,
    /// The last piece that was read.
    piece: Cell<Option<u64>>,
}

impl<'a> Metered<'a> {
    pub(crate) fn new(disk: &'a dyn ReadAt, budget_bytes: u64) -> Self {
        Self { disk, left_bytes: Cell::new(budget_bytes), remembered: Cell::new(0), piece: Cell::new(None) }
    }

    /// Whether nothing more may be read.
    pub(crate) fn is_spent(&self) -> bool {
        self.left_bytes.get() == 0
    }

    /// Whether one more thing may be remembered. Counts it.
    pub(crate) fn may_remember(&self) -> bool {
        let count = self.remembered.get();
        self.remembered.set((count + 1).min(REMEMBERED_MAX));
        count < REMEMBERED_MAX
    }

    /// Pieces that a read needs besides the last one.
    fn pieces(&self, range: &Range<u64>) -> u64 {
        let (first, last) = (range.start / PIECE_BYTES, range.end.saturating_sub(1) / PIECE_BYTES);
        let known = self.piece.replace(Some(last)) == Some(first);
        (last.saturating_sub(first) + 1).saturating_sub(u64::from(known))
    }
}

impl ReadAt for Metered<'_> {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }

    fn sector_bytes(&self) -> u32 {
        self.disk.sector_bytes()
    }

    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> io::Result<()> {
        let range = offset_bytes..offset_bytes.saturating_add(buf.len() as u64);
        let cost_bytes = self.pieces(&range) * PIECE_BYTES;
        match self.left_bytes.get().checked_sub(cost_bytes) {
            Some(left_bytes) => self.left_bytes.set(left_bytes),
            None => {
                self.left_bytes.set(0);
                return Err(io::Error::other("the budget for learning the file systems is spent"));
            }
        }
        self.disk.read_at(offset_bytes, buf)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk of zeros that counts the bytes that are read.
    struct Zeros(Cell<u64>);

    impl ReadAt for Zeros {
        fn size_bytes(&self) -> u64 {
            1 << 40
        }

        fn read_at(&self, _: u64, buf: &mut [u8]) -> io::Result<()> {
            buf.fill(0);
            self.0.set(self.0.get() + buf.len() as u64);
            Ok(())
        }
    }

    #[test]
    fn pieces_count_once_and_nothing_is_read_beyond_the_budget() {
        let zeros = Zeros(Cell::new(0));
        let metered = Metered::new(&zeros, 4 * PIECE_BYTES);
        for at in 0..16 {
            metered.read_at(at * 4096, &mut [0; 4096]).unwrap();
        }
        metered.read_at(PIECE_BYTES - 100, &mut [0; 200]).unwrap();
        metered.read_at(9 * PIECE_BYTES, &mut [0; 512]).unwrap();
        metered.read_at(3 * PIECE_BYTES, &mut [0; 512]).unwrap();
        assert!(metered.is_spent());
        assert!(metered.read_at(5 * PIECE_BYTES, &mut [0; 512]).is_err());
        assert_eq!(zeros.0.get(), 16 * 4096 + 200 + 1024);
    }
}
