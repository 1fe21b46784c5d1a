//! Zeroing ranges of a file: by the file system where it can, else by writing.

use super::FileStore;
use crate::{
    direct::cannot,
    range::{FileRange, Zeroing},
    store::Store,
};
use rustix::{fs::FallocateFlags, io::retry_on_intr};
use std::io;

/// Size of a write of zeros, where the file system cannot zero a range.
const ZERO_PIECE_BYTES: usize = 1 << 20;

/// Zeroing in this unit bypasses the page cache. File systems zero the rest of a block through the
/// cache.
pub(crate) const ZEROING_UNIT_BYTES: u64 = 4096;

impl FileStore {
    /// Zeroes a range that lies within the file.
    pub(super) fn zero(&self, range: FileRange, how: Zeroing) -> io::Result<()> {
        if range.len_bytes == 0 {
            return Ok(());
        }
        if self.direct_metadata().is_none() && !self.is_block_device {
            return match self.zero_by_file_system(range, how) {
                Err(errno) if cannot(errno) => self.write_zeros(range),
                result => Ok(result?),
            };
        }
        // The file system zeroes whole units; the edges are written, bypassing the page cache and
        // aligned for a block device.
        let end_bytes = range.offset_bytes + range.len_bytes;
        let first_unit = range.offset_bytes.checked_next_multiple_of(ZEROING_UNIT_BYTES).unwrap_or(u64::MAX);
        let last_unit = end_bytes - end_bytes % ZEROING_UNIT_BYTES;
        if first_unit >= last_unit {
            return self.write_zeros(range);
        }
        self.write_zeros(FileRange { len_bytes: first_unit - range.offset_bytes, ..range })?;
        let whole = FileRange { offset_bytes: first_unit, len_bytes: last_unit - first_unit };
        match self.zero_by_file_system(whole, how) {
            Err(errno) if cannot(errno) => self.write_zeros(whole)?,
            result => result?,
        }
        self.write_zeros(FileRange { offset_bytes: last_unit, len_bytes: end_bytes - last_unit })
    }

    /// Zeroes a range by the calls of the file system, preferred ones first.
    fn zero_by_file_system(&self, range: FileRange, how: Zeroing) -> rustix::io::Result<()> {
        let fallocate = |flags| {
            retry_on_intr(|| {
                rustix::fs::fallocate(
                    &self.meta,
                    flags | FallocateFlags::KEEP_SIZE,
                    range.offset_bytes,
                    range.len_bytes,
                )
            })
        };
        match how {
            Zeroing::Keep => fallocate(FallocateFlags::ZERO_RANGE).or_else(|errno| {
                if !cannot(errno) || self.is_block_device {
                    return Err(errno);
                }
                // tmpfs needs two steps.
                fallocate(FallocateFlags::PUNCH_HOLE)?;
                fallocate(FallocateFlags::empty())
            }),
            Zeroing::Deallocate => fallocate(FallocateFlags::PUNCH_HOLE)
                .or_else(|errno| if cannot(errno) { fallocate(FallocateFlags::ZERO_RANGE) } else { Err(errno) }),
        }
    }

    fn write_zeros(&self, range: FileRange) -> io::Result<()> {
        let zeros = crate::IoBuf::new(ZERO_PIECE_BYTES.min(range.len_bytes as usize).max(1));
        let end_bytes = range.offset_bytes + range.len_bytes;
        let mut at_bytes = range.offset_bytes;
        while at_bytes < end_bytes {
            let piece_bytes = (end_bytes - at_bytes).min(zeros.len() as u64);
            self.write_at(&zeros[..piece_bytes as usize], at_bytes)?;
            at_bytes += piece_bytes;
        }
        Ok(())
    }
}
