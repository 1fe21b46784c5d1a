//! Writes the pieces of an export into a disk.

use super::payload::{Piece, Pieces};
use crate::{DiskError, Progress, Result, error::from_io};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use std::path::Path;

/// Maximum length of one request for zeros, which a format may have to write.
const ZEROS_BYTES: u64 = 64 << 20;

/// Bytes that were written.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Written {
    pub(super) data_bytes: u64,
    pub(super) zero_bytes: u64,
}

impl Written {
    pub(super) fn count(&mut self, piece: &Piece<'_>) {
        match piece {
            Piece::Data { bytes, .. } => self.data_bytes += bytes.len() as u64,
            Piece::Zeros { len_bytes, .. } => self.zero_bytes += len_bytes,
        }
    }
}

/// Writes all pieces into `disk` and flushes it. Errors name `path`.
pub(super) fn write_into(
    disk: &dyn BlockDevice,
    path: &Path,
    engine: EngineKind,
    pieces: &mut dyn Pieces,
    progress: &mut Progress<'_>,
) -> Result<Written> {
    let failed = |error| from_io("write the changes into it", path, error);
    let mut io = Blocking::open(disk, engine).map_err(failed)?;
    let end_bytes = disk.geometry().size_bytes;
    let mut written = Written::default();
    pieces.for_each(progress, &mut |piece, progress| {
        written.count(&piece);
        match piece {
            Piece::Data { offset_bytes, bytes } => io.write(offset_bytes, bytes, false).map_err(failed),
            Piece::Zeros { offset_bytes, len_bytes } => {
                let mut at = offset_bytes;
                while at < offset_bytes + len_bytes {
                    let stop = ((at / ZEROS_BYTES + 1) * ZEROS_BYTES).min(offset_bytes + len_bytes);
                    io.write_zeroes(at, stop - at).map_err(failed)?;
                    at = stop;
                    if !progress(at, end_bytes) {
                        return Err(DiskError::Stopped);
                    }
                }
                Ok(())
            }
        }
    })?;
    io.flush().map_err(failed)?;
    Ok(written)
}
