//! What lies on a disk: its partitions and file systems, read through the disk's own queue.
//!
//! ```text
//!   diskwright-volume ─▶ Reader: bytes at any offset ─▶ sectors ─▶ queue of the disk or export
//! ```
//!
//! The readers of `diskwright-volume` ask for many small structures. The last piece that was read
//! is kept, so neighbouring structures cost one request.

use crate::{DiskError, Progress};
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
    let mut found = None;
    examine(device, engine, &mut |_, _| true, &mut |reader| found = Some(volumes(reader)))?;
    found.ok_or_else(|| io::Error::other(DiskError::Stopped))
}

/// Passes a reader of the whole device to `what`. `progress` is told the offset of each piece that
/// is read, and the size of the device.
///
/// # Errors
/// The queue cannot be opened. [`DiskError::Stopped`] if `progress` has returned `false`: what was
/// found is not reliable then.
pub(crate) fn examine(
    device: &dyn BlockDevice,
    engine: EngineKind,
    progress: &mut Progress<'_>,
    what: &mut dyn FnMut(&dyn ReadAt),
) -> io::Result<()> {
    let queue = Blocking::open(device, engine)?;
    let piece = Piece { start_bytes: u64::MAX, bytes: Vec::new() };
    let watch = RefCell::new(Watch { progress, is_stopped: false });
    let reader = Reader { geometry: queue.geometry(), state: RefCell::new((queue, piece)), watch };
    what(&reader);
    if reader.watch.into_inner().is_stopped { Err(io::Error::other(DiskError::Stopped)) } else { Ok(()) }
}

struct Reader<'a, 'p> {
    geometry: diskwright_store::Geometry,
    state: RefCell<(Blocking, Piece)>,
    watch: RefCell<Watch<'a, 'p>>,
}

/// Who is told of each piece.
struct Watch<'a, 'p> {
    progress: &'a mut Progress<'p>,
    is_stopped: bool,
}

/// The bytes that were read last.
struct Piece {
    start_bytes: u64,
    bytes: Vec<u8>,
}

impl ReadAt for Reader<'_, '_> {
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
                let watch = &mut *self.watch.borrow_mut();
                watch.is_stopped |= !(watch.progress)(start_bytes, self.geometry.size_bytes);
                if watch.is_stopped {
                    return Err(io::Error::other(DiskError::Stopped));
                }
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
