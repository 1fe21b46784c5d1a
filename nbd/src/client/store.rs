//! An export as a store: the bytes of an image that lies in the export.
//!
//! ```text
//!   payload    Store::lane ─▶ watch ─▶ lane ─▶ socket      completed later, on the engine's ring
//!   metadata   read_at, write_at, ... ─▶ lane ─▶ socket    blocking, as for every store
//! ```
//!
//! *Length.* Like a block device, an export has a fixed size. A growing image may use the space
//! behind it up to that size. [`Store::set_len`] makes everything behind the new end read as zeros,
//! and remembers the end until the store is closed. When the store is opened again, its length is
//! the export's. Growth beyond the export is `StorageFull`.
//!
//! *Locks.* NBD has none: another client, or the server itself, may write to the export at the same
//! time. The user is warned when a store without locks is opened for writing.
//!
//! *Connections.* There is one, which all queues share. `?reconnect` is refused: a server that
//! comes back may have lost writes that were not flushed, which an image must know.
//!
//! *Blocks.* A transfer that is not aligned to the server's minimum block size is widened; a write
//! then reads the blocks first. `patching` is held meanwhile, so that two such writes do not
//! overwrite each other's change.

use super::{
    ClientError, NbdDevice, Result,
    tables::Memory,
    watch::{Watch, too_small},
};
use crate::uri::NbdUri;
use diskwright_store::{
    BlockDevice, DataFile, ExtentKind, FileRange, IoBuf, Lane, LaneOp, SectorSizes, Store, Zeroing, assert_io_allowed,
};
use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// Maximum length of one blocking transfer.
const PIECE_BYTES: usize = 1 << 20;

/// Length of one block status request.
const STATUS_BYTES: u64 = 16 << 30;

/// An export of an NBD server, as a store.
#[derive(Debug)]
pub struct NbdStore {
    name: PathBuf,
    device: NbdDevice,
    watch: Arc<Watch>,
    size_bytes: u64,
    /// Current length of the image, changed by `set_len`.
    len_bytes: AtomicU64,
    block_bytes: u64,
    patching: Mutex<()>,
}

impl NbdStore {
    /// Connects to the export, for reading only unless `writable`.
    ///
    /// # Errors
    /// As [`NbdDevice::open`]; [`ClientError::Unusable`] for a URI with `?reconnect`.
    pub fn open(uri: &NbdUri, writable: bool) -> Result<Self> {
        let peer = uri.endpoint.to_string();
        if uri.reconnect.is_some_and(|limit| !limit.is_zero()) {
            return Err(ClientError::Unusable {
                peer,
                name: uri.export.clone(),
                what: "?reconnect is not supported for an image inside an export; leave it out of the URI".into(),
            });
        }
        let device = NbdDevice::open(uri, writable)?;
        // The first connection. The open inbox reserves it.
        let (lane, _inbox) = device.take_lane(false)?;
        let export = device.export();
        let (size_bytes, flags, block_bytes) = (export.size_bytes, export.flags, export.block_sizes.minimum);
        let watch = Watch::new(lane, flags, block_bytes, size_bytes)
            .map_err(|source| super::negotiate::lost(&peer, "connecting", source))?;
        Ok(Self {
            name: uri.to_string().into(),
            device,
            watch: Arc::new(watch),
            size_bytes,
            len_bytes: AtomicU64::new(size_bytes),
            block_bytes: u64::from(block_bytes),
            patching: Mutex::default(),
        })
    }

    /// Carries out one operation and waits for it.
    fn call(&self, op: LaneOp, len_bytes: u64, memory: Memory) -> io::Result<Option<IoBuf>> {
        self.watch.check(op, len_bytes)?;
        let lane = self.watch.lane();
        let inbox = lane.open_inbox();
        let mut ended = Vec::new();
        lane.drive(inbox, std::iter::once(self.watch.slot(inbox, op, len_bytes, memory)), 1, &mut ended);
        lane.close_inbox(inbox);
        // This may have left payload of an engine queued.
        self.watch.progress();
        let ended = ended.pop().ok_or_else(|| io::Error::other("the connection completed no request"))?;
        ended.completion.result.map(|()| ended.completion.buf)
    }

    /// Reads `len` bytes, a multiple of the block size.
    fn read_blocks(&self, offset_bytes: u64, len: usize) -> io::Result<IoBuf> {
        let memory = Memory::Buf(IoBuf::new(len));
        let read = self.call(LaneOp::Read { offset_bytes }, len as u64, memory)?;
        read.ok_or_else(|| io::Error::other("the connection lost the buffer"))
    }

    /// The blocks that contain `piece_bytes` bytes at `at_bytes`: their offset and total length.
    fn window(&self, at_bytes: u64, piece_bytes: usize) -> (u64, usize) {
        let start_bytes = at_bytes - at_bytes % self.block_bytes;
        let end_bytes = (at_bytes + piece_bytes as u64).next_multiple_of(self.block_bytes);
        (start_bytes, (end_bytes - start_bytes) as usize)
    }

    fn ends_at(&self, offset_bytes: u64, len_bytes: u64) -> io::Result<u64> {
        offset_bytes
            .checked_add(len_bytes)
            .filter(|&end_bytes| end_bytes <= self.size_bytes)
            .ok_or_else(|| too_small(self.size_bytes, offset_bytes.saturating_add(len_bytes)))
    }

    /// Zeroes those parts of a range within the export that may hold data.
    fn clear(&self, mut at_bytes: u64, end_bytes: u64) -> io::Result<()> {
        while at_bytes < end_bytes
            && let Some(data) = self.next_data_of_export(at_bytes)?
        {
            let start_bytes = data.offset_bytes.max(at_bytes);
            let stop_bytes = (data.offset_bytes + data.len_bytes).min(end_bytes);
            if start_bytes < stop_bytes {
                let range = FileRange { offset_bytes: start_bytes, len_bytes: stop_bytes - start_bytes };
                self.zero_range(range, Zeroing::Deallocate)?;
            }
            at_bytes = stop_bytes.max(start_bytes);
            if start_bytes >= end_bytes {
                break;
            }
        }
        Ok(())
    }

    fn next_data_of_export(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        let mut at_bytes = offset_bytes - offset_bytes % u64::from(self.device.geometry().logical_sector_bytes);
        let mut extents = Vec::new();
        while at_bytes < self.size_bytes {
            extents.clear();
            let len_bytes = STATUS_BYTES.min(self.size_bytes - at_bytes);
            self.device.extents(at_bytes, len_bytes, &mut extents)?;
            let is_data = |kind| !matches!(kind, ExtentKind::Zero | ExtentKind::Unallocated);
            let found = extents.iter().find(|extent| {
                is_data(extent.kind) && (extent.offset_bytes + extent.len_bytes).min(self.size_bytes) > offset_bytes
            });
            if let Some(extent) = found {
                let start_bytes = extent.offset_bytes.max(offset_bytes);
                let end_bytes = (extent.offset_bytes + extent.len_bytes).min(self.size_bytes);
                return Ok(Some(FileRange { offset_bytes: start_bytes, len_bytes: end_bytes - start_bytes }));
            }
            at_bytes += len_bytes;
        }
        Ok(None)
    }
}

impl Store for NbdStore {
    fn name(&self) -> &Path {
        &self.name
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.len_bytes.load(Ordering::Acquire))
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        assert_io_allowed();
        self.watch.check(LaneOp::Read { offset_bytes }, buf.len() as u64)?;
        let mut at_bytes = offset_bytes;
        for piece in buf.chunks_mut(PIECE_BYTES) {
            let (start_bytes, window) = self.window(at_bytes, piece.len());
            let blocks = self.read_blocks(start_bytes, window)?;
            let skip = (at_bytes - start_bytes) as usize;
            piece.copy_from_slice(&blocks[skip..skip + piece.len()]);
            at_bytes += piece.len() as u64;
        }
        Ok(())
    }

    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        assert_io_allowed();
        let end_bytes = self.ends_at(offset_bytes, buf.len() as u64)?;
        let mut at_bytes = offset_bytes;
        for piece in buf.chunks(PIECE_BYTES) {
            let (start_bytes, window) = self.window(at_bytes, piece.len());
            let patches = window > piece.len();
            let _patching = patches.then(|| self.patching.lock().unwrap_or_else(PoisonError::into_inner));
            let mut blocks = if patches { self.read_blocks(start_bytes, window)? } else { IoBuf::new(window) };
            let skip = (at_bytes - start_bytes) as usize;
            blocks[skip..skip + piece.len()].copy_from_slice(piece);
            let op = LaneOp::Write { offset_bytes: start_bytes, durable: false };
            self.call(op, window as u64, Memory::Buf(blocks))?;
            at_bytes += piece.len() as u64;
        }
        self.len_bytes.fetch_max(end_bytes, Ordering::AcqRel);
        Ok(())
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.ends_at(len_bytes, 0)?;
        let held_bytes = self.len_bytes()?;
        if len_bytes < held_bytes {
            self.clear(len_bytes, held_bytes)?;
        }
        self.len_bytes.store(len_bytes, Ordering::Release);
        Ok(())
    }

    fn allocate(&self, range: FileRange) -> io::Result<()> {
        let end_bytes = self.ends_at(range.offset_bytes, range.len_bytes)?;
        self.len_bytes.fetch_max(end_bytes, Ordering::AcqRel);
        Ok(())
    }

    fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()> {
        assert_io_allowed();
        let FileRange { offset_bytes, len_bytes } = range;
        let end_bytes = self.ends_at(offset_bytes, len_bytes)?;
        let first_block = offset_bytes.next_multiple_of(self.block_bytes);
        let last_block = end_bytes - end_bytes % self.block_bytes;
        if first_block > last_block {
            return self.write_at(&vec![0; len_bytes as usize], offset_bytes);
        }
        self.write_at(&vec![0; (first_block - offset_bytes) as usize], offset_bytes)?;
        if first_block < last_block {
            let op = LaneOp::Zero { offset_bytes: first_block, len_bytes: last_block - first_block, how };
            self.call(op, 0, Memory::None)?;
        }
        self.write_at(&vec![0; (end_bytes - last_block) as usize], last_block)
    }

    fn sync_data(&self) -> io::Result<()> {
        assert_io_allowed();
        self.call(LaneOp::Sync, 0, Memory::None).map(|_| ())
    }

    fn data_file(&self) -> Option<DataFile<'_>> {
        None
    }

    fn lane(&self) -> Option<Arc<dyn Lane>> {
        Some(Arc::clone(&self.watch) as Arc<dyn Lane>)
    }

    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        let len_bytes = self.len_bytes()?;
        let found = self.next_data_of_export(offset_bytes)?.filter(|data| data.offset_bytes < len_bytes);
        Ok(found.map(|data| FileRange { len_bytes: data.len_bytes.min(len_bytes - data.offset_bytes), ..data }))
    }

    fn sector_bytes(&self) -> SectorSizes {
        let geometry = self.device.geometry();
        SectorSizes { logical_bytes: geometry.logical_sector_bytes, physical_bytes: geometry.physical_sector_bytes }
    }

    fn is_block_device(&self) -> bool {
        true
    }

    fn is_locked(&self) -> bool {
        false
    }
}
