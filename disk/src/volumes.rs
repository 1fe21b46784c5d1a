//! What lies on a disk: its partitions and file systems, read through the disk's own queue.
//!
//! ```text
//!   diskwright-volume ─▶ Reader: bytes at any offset ─▶ sectors ─▶ queue of the disk or export
//! ```
//!
//! The readers of `diskwright-volume` ask for many small structures. The last piece that was read is
//! kept, so neighbouring structures cost one request.

use diskwright_store::{BlockDevice, Blocking, EngineKind};
use diskwright_volume::{Layout, ReadAt, volumes};
use std::{cell::RefCell, io};

/// Length of the pieces that are read, in bytes: a multiple of every sector size.
const PIECE_BYTES: u64 = 64 << 10;

/// Partition table and volumes of a disk, with what is certainly free in each volume. Reads the
/// free-space map of each file system once. A disk that another program has open for writing may
/// change meanwhile: what is said to be free is then not reliable.
///
/// # Errors
/// The queue cannot be opened. A range that cannot be read only leaves its volume alone.
pub fn layout(device: &dyn BlockDevice, engine: EngineKind) -> io::Result<Layout> {
    Ok(volumes(&Reader::open(device, engine)?))
}

/// Reads a disk through a queue of its own.
pub(crate) struct Reader {
    geometry: diskwright_store::Geometry,
    state: RefCell<(Blocking, Piece)>,
}

/// The bytes that were read last.
struct Piece {
    start_bytes: u64,
    bytes: Vec<u8>,
}

impl Reader {
    /// Opens the queue.
    pub(crate) fn open(device: &dyn BlockDevice, engine: EngineKind) -> io::Result<Self> {
        let queue = Blocking::open(device, engine)?;
        let piece = Piece { start_bytes: u64::MAX, bytes: Vec::new() };
        Ok(Self { geometry: queue.geometry(), state: RefCell::new((queue, piece)) })
    }
}

impl ReadAt for Reader {
    fn size_bytes(&self) -> u64 {
        self.geometry.size_bytes
    }

    fn sector_bytes(&self) -> u32 {
        self.geometry.logical_sector_bytes
    }

    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> io::Result<()> {
        let (queue, piece) = &mut *self.state.borrow_mut();
        let mut done = 0;
        while done < buf.len() {
            let at = offset_bytes + done as u64;
            let start_bytes = at - at % PIECE_BYTES;
            if piece.start_bytes != start_bytes {
                let len_bytes = PIECE_BYTES.min(self.geometry.size_bytes.saturating_sub(start_bytes));
                piece.start_bytes = u64::MAX;
                piece.bytes.resize(len_bytes as usize, 0);
                queue.read(start_bytes, &mut piece.bytes)?;
                piece.start_bytes = start_bytes;
            }
            let within = (at - start_bytes) as usize;
            let len = (buf.len() - done).min(piece.bytes.len().saturating_sub(within));
            if len == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            buf[done..done + len].copy_from_slice(&piece.bytes[within..within + len]);
            done += len;
        }
        Ok(())
    }
}
