//! SEEK_DATA and SEEK_HOLE: programs use them to skip holes.

use super::{Session, errno_of};
use crate::walk::Walk;
use rustix::io::Errno;

/// How far a search goes. Beyond this, the answer that is always correct is given.
const SEARCH_BYTES: u64 = 64 << 30;

/// Values of lseek(2).
pub(super) const SEEK_DATA: u32 = 3;
pub(super) const SEEK_HOLE: u32 = 4;

impl Session {
    /// Answers SEEK_DATA and SEEK_HOLE. If nothing is found within [`SEARCH_BYTES`], the answer is
    /// one that is always correct: data begins where the search stopped, or the next hole is at the
    /// end.
    pub(super) fn seek(&self, offset_bytes: u64, whence: u32) -> Result<u64, Errno> {
        if whence != SEEK_DATA && whence != SEEK_HOLE {
            return Err(Errno::INVAL);
        }
        let size_bytes = self.view.size_bytes;
        if offset_bytes >= size_bytes {
            return Err(Errno::NXIO);
        }
        let start_bytes = offset_bytes - offset_bytes % self.sector_bytes;
        let stop_bytes = size_bytes.min(start_bytes.saturating_add(SEARCH_BYTES));
        let mut walk = Walk::over(self.device.as_ref(), start_bytes..stop_bytes);
        while let Some(extents) = walk.next_window().map_err(|error| errno_of(&error))? {
            let found = extents.iter().find(|extent| extent.kind.reads_as_zeros() == (whence == SEEK_HOLE));
            if let Some(extent) = found {
                return Ok(extent.offset_bytes.max(offset_bytes));
            }
        }
        match whence {
            SEEK_HOLE => Ok(size_bytes),
            _ if stop_bytes == size_bytes => Err(Errno::NXIO),
            _ => Ok(stop_bytes),
        }
    }
}
