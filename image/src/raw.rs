//! A raw file or device as an image: each byte of the disk is at the same offset of the store.
//!
//! There is nothing to map. The disk above counts in blocks, so the disk is cut into pseudo-blocks
//! of [`PSEUDO_BLOCK_BYTES`]. Each is always [`BlockState::Data`] at its own offset, so
//! reservations and commits do nothing. A fixed VHD is the same with a footer at the end, and
//! shares [`FlatWriter`].
//!
//! If the length of a raw file is not a multiple of the sector, the disk's last sector is padded
//! with zeros: [`PaddedStore`] returns zeros beyond the end of the file. The file itself is
//! extended only before the first write.
//!
//! Invariant: after a failed sync no later flush succeeds ([`Barrier`]). While the image is open
//! only its size and the length of a padded file change.

use crate::{
    BlockState, Commit, DiskType, Format, Image, ImageError, ImageInfo, ImageWriter, LinkageId, LogState, Reservation,
    Result, SectorBitmap,
    salvage::{Bitmaps, BlockTable, ParentRecord, SalvageHints, Salvaged},
};
use diskwright_store::{
    Access, Barrier, DataFile, FileRange, Front, Lane, Store, Zeroing,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};
use std::{
    fmt, io,
    ops::Range,
    path::Path,
    sync::{Arc, PoisonError},
};

/// Size of a pseudo-block in bytes.
pub const PSEUDO_BLOCK_BYTES: u64 = 64 << 20;

/// Upper limit of [`ImageInfo::payload_alignment_bytes`]: payload at offset 0 has any alignment.
pub(crate) const FLAT_ALIGNMENT_BYTES: u32 = 1 << 20;

/// A raw file has no tables that can be damaged: its blocks follow each other.
pub(crate) fn salvage(store: Arc<dyn Store>, _hints: &SalvageHints) -> Result<Salvaged> {
    let image = RawImage::new(store, false, 512)?;
    let RawImage { info, store, .. } = image;
    let count = info.size_bytes.div_ceil(PSEUDO_BLOCK_BYTES);
    Ok(Salvaged {
        file_bytes: info.size_bytes,
        parent_record: ParentRecord::Alone,
        table: BlockTable::linear(count, PSEUDO_BLOCK_BYTES, info.size_bytes),
        info,
        store,
        bitmaps: Bitmaps::None,
        unpack: None,
        tables: Vec::new(),
        payload_alignment_bytes: 512,
        doubts: Vec::new(),
        doubts_bitmaps: false,
    })
}

/// A raw file or device.
#[derive(Debug)]
pub struct RawImage {
    info: ImageInfo,
    store: Arc<dyn Store>,
    writer: Option<FlatWriter>,
}

impl RawImage {
    /// Opens `store`. The disk's size is the store's length, rounded up to a sector of
    /// `logical_sector_bytes`.
    ///
    /// # Errors
    /// `Io` if the length cannot be determined; `Unsupported` for a sector size other than a power
    /// of two from 512 to 4096.
    pub fn new(store: Arc<dyn Store>, writable: bool, logical_sector_bytes: u32) -> Result<Self> {
        check_sector_bytes(&*store, logical_sector_bytes)?;
        let Measured { store, size_bytes, padding_end_bytes, remark } = measure(store, logical_sector_bytes)?;
        let info = ImageInfo {
            format: Format::Raw,
            disk_type: DiskType::Fixed,
            size_bytes,
            block_bytes: PSEUDO_BLOCK_BYTES,
            has_blocks: false,
            logical_sector_bytes,
            physical_sector_bytes: logical_sector_bytes,
            creator: String::new(),
            subformat: None,
            disk_id: None,
            linkage_id: None,
            file_write_id: None,
            created_seconds: None,
            parent: None,
            log: LogState::None,
            payload_alignment_bytes: FLAT_ALIGNMENT_BYTES,
            remarks: remark.into_iter().collect(),
            doubts: Vec::new(),
        };
        let writer =
            writable.then(|| FlatWriter::new(Arc::clone(&store), size_bytes, padding_end_bytes, Trailer::None));
        Ok(Self { info, store, writer })
    }
}

/// Refuses a sector size other than a power of two from 512 to 4096.
///
/// # Errors
/// `Unsupported`.
pub(crate) fn check_sector_bytes(store: &dyn Store, logical_sector_bytes: u32) -> Result<()> {
    if logical_sector_bytes.is_power_of_two() && (512..=4096).contains(&logical_sector_bytes) {
        return Ok(());
    }
    Err(ImageError::Unsupported {
        path: store.name().to_owned(),
        what: format!("a raw disk with sectors of {logical_sector_bytes} bytes"),
        hint: "use 512 or 4096".into(),
    })
}

/// A raw file whose length was rounded up to whole sectors.
pub(crate) struct Measured {
    /// The file, padded with zeros to the end of its last sector.
    pub(crate) store: Arc<dyn Store>,
    /// Length with the padding, in bytes.
    pub(crate) size_bytes: u64,
    /// Length in bytes to which the file must be extended before the first write; `None` if not
    /// needed.
    pub(crate) padding_end_bytes: Option<u64>,
    /// A sentence for the user about the padding.
    pub(crate) remark: Option<String>,
}

/// Rounds the length of a raw file up to a sector.
///
/// # Errors
/// `Io` if the length cannot be determined.
pub(crate) fn measure(store: Arc<dyn Store>, logical_sector_bytes: u32) -> Result<Measured> {
    let len_bytes = store.len_bytes().map_err(|e| ImageError::io("get the length of the file", &*store, 0, e))?;
    let size_bytes = len_bytes.checked_next_multiple_of(u64::from(logical_sector_bytes)).unwrap_or(len_bytes);
    if size_bytes == len_bytes {
        return Ok(Measured { store, size_bytes, padding_end_bytes: None, remark: None });
    }
    let remark = format!(
        "The file's length of {len_bytes} bytes is not a multiple of the {logical_sector_bytes}-byte sector; the disk ends in {} bytes of zeros that the file does not have.",
        size_bytes - len_bytes
    );
    let store = padded(store, len_bytes, size_bytes);
    Ok(Measured { store, size_bytes, padding_end_bytes: Some(size_bytes), remark: Some(remark) })
}

/// `store`, whose length is `len_bytes`, as a store that reads as zeros from there to
/// `padded_bytes`.
pub(crate) fn padded(store: Arc<dyn Store>, len_bytes: u64, padded_bytes: u64) -> Arc<dyn Store> {
    if padded_bytes <= len_bytes {
        return store;
    }
    Arc::new(PaddedStore {
        inner: store,
        padded_len_bytes: AtomicU64::new(padded_bytes),
        held_bytes: AtomicU64::new(len_bytes),
    })
}

/// Extends a padded file to `end_bytes`, durably.
///
/// # Errors
/// `Io`; `Poisoned`.
pub(crate) fn extend_to_sector(barrier: &Barrier, end_bytes: u64) -> Result<()> {
    let store = &**barrier.store();
    store
        .allocate(FileRange { offset_bytes: end_bytes - 512, len_bytes: 512 })
        .map_err(|e| ImageError::io("extend the file to a whole sector", store, end_bytes, e))?;
    // If a power cut lost the new length but kept a write to the last sector, that sector would be
    // torn.
    Ok(barrier.sync("make the file's new length durable")?)
}

impl Image for RawImage {
    fn info(&self) -> &ImageInfo {
        &self.info
    }

    fn stores(&self) -> &[Arc<dyn Store>] {
        std::slice::from_ref(&self.store)
    }

    fn block_states(&self, first_block: u64, out: &mut [BlockState]) -> Result<()> {
        flat_states(self.size_bytes(), first_block, out);
        Ok(())
    }

    fn size_bytes(&self) -> u64 {
        self.writer.as_ref().map_or(self.info.size_bytes, FlatWriter::size_bytes)
    }

    fn sector_bitmap(&self, _block: u64) -> Result<SectorBitmap> {
        Ok(flat_bitmap(self.info.logical_sector_bytes))
    }

    fn writer(&self) -> Option<&dyn ImageWriter> {
        self.writer.as_ref().map(|writer| writer as &dyn ImageWriter)
    }
}

/// States of the pseudo-blocks of a disk of `size_bytes` at offset 0 of its store.
pub(crate) fn flat_states(size_bytes: u64, first_block: u64, out: &mut [BlockState]) {
    let mut offset = first_block.checked_mul(PSEUDO_BLOCK_BYTES);
    for state in out {
        *state = match offset {
            Some(offset_bytes) if offset_bytes < size_bytes => BlockState::data(offset_bytes),
            _ => BlockState::Absent,
        };
        offset = offset.and_then(|bytes| bytes.checked_add(PSEUDO_BLOCK_BYTES));
    }
}

/// The bitmap of a pseudo-block: all bits are set, as a raw disk has no parent.
pub(crate) fn flat_bitmap(sector_bytes: u32) -> SectorBitmap {
    let sectors = (PSEUDO_BLOCK_BYTES / u64::from(sector_bytes)) as u32;
    let mut bitmap = SectorBitmap::empty(sectors, sector_bytes);
    bitmap.words.fill(u64::MAX);
    bitmap
}

/// The interface for writes to a disk that is one contiguous range of its store.
#[derive(Debug)]
pub(crate) struct FlatWriter {
    store: Arc<dyn Store>,
    size_bytes: AtomicU64,
    /// Length in bytes to which the store must be extended before the first write; 0 if not needed.
    padding_end_bytes: AtomicU64,
    trailer: Trailer,
    /// Held while the size or the identity changes.
    growing: Mutex<()>,
    /// The identity, if it was changed since the open.
    linkage_id: Mutex<Option<LinkageId>>,
    barrier: Barrier,
}

/// What follows the disk in its store.
#[derive(Debug)]
pub(crate) enum Trailer {
    /// The store ends with the disk.
    None,
    /// Data that must move when the size changes, as a VHD footer.
    Moves(Box<dyn MoveTrailer>),
}

/// Moves the data that follows a disk.
pub(crate) trait MoveTrailer: Send + Sync + fmt::Debug {
    /// Changes the disk's size from `from_bytes` to `to_bytes`, durably. A new range reads as
    /// zeros.
    ///
    /// # Errors
    /// On an error the disk keeps its old size, unless only the last sync failed.
    fn move_trailer(&self, barrier: &Barrier, from_bytes: u64, to_bytes: u64) -> Result<()>;

    /// Whether the disk may grow to this size, and how long the file would be.
    ///
    /// # Errors
    /// `Unsupported` if not.
    fn check_growth(&self, store: &dyn Store, from_bytes: u64, to_bytes: u64) -> Result<u64>;

    /// Records another identity, durably.
    ///
    /// # Errors
    /// `Io`, after which the old identity or the new one is recorded.
    fn set_linkage_id(&self, barrier: &Barrier, linkage_id: LinkageId) -> Result<()>;
}

impl FlatWriter {
    pub(crate) fn new(
        store: Arc<dyn Store>,
        size_bytes: u64,
        padding_end_bytes: Option<u64>,
        trailer: Trailer,
    ) -> Self {
        let (barrier, size_bytes) = (Barrier::new(Arc::clone(&store)), AtomicU64::new(size_bytes));
        let padding_end_bytes = AtomicU64::new(padding_end_bytes.unwrap_or(0));
        let (growing, linkage_id) = (Mutex::default(), Mutex::default());
        Self { barrier, store, size_bytes, padding_end_bytes, trailer, growing, linkage_id }
    }

    /// The identity, if it was changed since the open.
    pub(crate) fn linkage_id(&self) -> Option<LinkageId> {
        *self.linkage_id.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    fn place(&self, block: u64) -> Result<u64> {
        let size_bytes = self.size_bytes();
        block.checked_mul(PSEUDO_BLOCK_BYTES).filter(|&offset_bytes| offset_bytes < size_bytes).ok_or_else(|| {
            let beyond = io::Error::new(io::ErrorKind::InvalidInput, format!("the disk ends before block {block}"));
            ImageError::io("find a block", &*self.store, size_bytes, beyond)
        })
    }
}

impl ImageWriter for FlatWriter {
    fn begin_writing(&self) -> Result<()> {
        match self.padding_end_bytes.load(Ordering::Acquire) {
            0 => Ok(()),
            end_bytes => extend_to_sector(&self.barrier, end_bytes),
        }
    }

    fn set_linkage_id(&self, linkage_id: LinkageId) -> Result<()> {
        let _turn = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let Trailer::Moves(trailer) = &self.trailer else {
            return Err(ImageError::Unsupported {
                path: self.store.name().to_owned(),
                what: "an identity in a raw disk".into(),
                hint: "convert the disk to VHDX, VHD, VMDK or VDI".into(),
            });
        };
        trailer.set_linkage_id(&self.barrier, linkage_id)?;
        *self.linkage_id.lock().unwrap_or_else(PoisonError::into_inner) = Some(linkage_id);
        Ok(())
    }

    fn prepare(&self, _blocks: Range<u64>) -> Result<()> {
        Ok(())
    }

    fn reserve(&self, block: u64) -> Result<Option<Reservation>> {
        Ok(Some(Reservation { store: 0, offset_bytes: self.place(block)?, init: None }))
    }

    fn initialised(&self, _block: u64) {}

    fn tracks_sectors(&self) -> bool {
        false
    }

    fn resize(&self, size_bytes: u64) -> Result<()> {
        let _turn = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        // After a growth whose sync failed the file may already be long enough, but not durably.
        self.barrier.check()?;
        let present = self.size_bytes();
        if size_bytes < present {
            return Err(ImageError::Unsupported {
                path: self.store.name().to_owned(),
                what: format!("a new size of {size_bytes} bytes for this open disk of {present} bytes"),
                hint: "the size must be at least the present one".into(),
            });
        }
        if let Trailer::Moves(trailer) = &self.trailer {
            if size_bytes > present {
                trailer.move_trailer(&self.barrier, present, size_bytes)?;
            }
            self.size_bytes.store(size_bytes, Ordering::Release);
            return Ok(());
        }
        let io = |doing| move |error| ImageError::io(doing, &*self.store, present, error);
        if self.store.len_bytes().map_err(io("get the length of the file"))? < size_bytes {
            self.store.set_len(size_bytes).map_err(io("make the disk larger"))?;
            self.barrier.sync("make the file's new length durable")?;
        }
        self.size_bytes.store(size_bytes, Ordering::Release);
        Ok(())
    }

    fn check_growth(&self, size_bytes: u64) -> Result<()> {
        let (store, present) = (&*self.store, self.size_bytes());
        let len_bytes = match &self.trailer {
            Trailer::Moves(trailer) => trailer.check_growth(store, present, size_bytes)?,
            Trailer::None => size_bytes,
        };
        store.check_len(len_bytes).map_err(|error| ImageError::io("make the disk larger", store, present, error))
    }

    fn check_shrink(&self, size_bytes: u64) -> Result<()> {
        let present = self.size_bytes();
        let hint = if size_bytes > present || size_bytes == 0 || !size_bytes.is_multiple_of(512) {
            "the size must be a multiple of 512 above 0, and at most the present one"
        } else if size_bytes < present && self.store.is_block_device() {
            "a block device cannot be cut; copy the disk into an image"
        } else {
            return Ok(());
        };
        Err(ImageError::Unsupported {
            path: self.store.name().to_owned(),
            what: format!("a new size of {size_bytes} bytes for this open disk of {present} bytes"),
            hint: hint.into(),
        })
    }

    fn shrink(&self, size_bytes: u64) -> Result<()> {
        let _turn = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        self.barrier.check()?;
        self.check_shrink(size_bytes)?;
        let present = self.size_bytes();
        if size_bytes == present {
            return Ok(());
        }
        if let Trailer::Moves(trailer) = &self.trailer {
            trailer.move_trailer(&self.barrier, present, size_bytes)?;
        } else {
            let cut = self.store.set_len(size_bytes);
            cut.map_err(|error| ImageError::io("cut the file at the disk's new end", &*self.store, size_bytes, error))?;
            // The padding of the last sector is gone.
            self.padding_end_bytes.store(0, Ordering::Release);
            self.barrier.sync("make the file's new length durable")?;
        }
        self.size_bytes.store(size_bytes, Ordering::Release);
        Ok(())
    }

    fn commit(&self, block: u64, change: Commit) -> Result<Option<BlockState>> {
        match change {
            Commit::Whole | Commit::Sectors { .. } => Ok(Some(BlockState::data(self.place(block)?))),
            Commit::Zero | Commit::Discard | Commit::Absent | Commit::Moved => Err(ImageError::Unsupported {
                path: self.store.name().to_owned(),
                what: "a block without payload in a disk that has no block table".into(),
                hint: "write zeros over the range instead".into(),
            }),
        }
    }

    fn can_store_zero(&self) -> bool {
        false
    }

    fn is_dirty(&self) -> bool {
        false
    }

    fn check_syncs(&self) -> Result<()> {
        Ok(self.barrier.check()?)
    }

    fn flush(&self) -> Result<()> {
        self.barrier.share(|| Ok(self.barrier.sync("make the written data durable")?))
    }

    fn freed_generation(&self) -> u64 {
        0
    }

    fn recycle(&self, _generation: u64) {}

    fn close(&self) -> Result<()> {
        self.flush()
    }
}

/// A store that reads as zeros from the end of its file to the end of the last sector. Ranges
/// within the file go straight to the file. Writes never reach the padding, as the file is extended
/// before the first write.
#[derive(Debug)]
struct PaddedStore {
    inner: Arc<dyn Store>,
    padded_len_bytes: AtomicU64,
    /// Length of the file when last measured, in bytes.
    held_bytes: AtomicU64,
}

impl PaddedStore {
    fn measure(&self) -> io::Result<()> {
        self.held_bytes.store(self.inner.len_bytes()?, Ordering::Release);
        Ok(())
    }
}

impl Store for PaddedStore {
    fn name(&self) -> &Path {
        self.inner.name()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.inner.len_bytes()?.max(self.padded_len_bytes.load(Ordering::Acquire)))
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        let held_end = self.inner.len_bytes()?;
        let end = offset_bytes.checked_add(buf.len() as u64).ok_or(io::ErrorKind::InvalidInput)?;
        if end <= held_end {
            return self.inner.read_at(buf, offset_bytes);
        }
        if end > self.padded_len_bytes.load(Ordering::Acquire) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let held_bytes = held_end.saturating_sub(offset_bytes) as usize;
        let (held, padding) = buf.split_at_mut(held_bytes);
        padding.fill(0);
        if held.is_empty() { Ok(()) } else { self.inner.read_at(held, offset_bytes) }
    }

    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.inner.write_at(buf, offset_bytes)
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.inner.set_len(len_bytes)?;
        // A whole file has no padding any more.
        self.padded_len_bytes.store(len_bytes, Ordering::Release);
        self.measure()
    }

    fn allocate(&self, range: FileRange) -> io::Result<()> {
        self.inner.allocate(range)?;
        self.measure()
    }

    fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()> {
        self.inner.zero_range(range, how)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.inner.sync_data()
    }

    fn settle_sync(&self, result: io::Result<()>) -> io::Result<()> {
        self.inner.settle_sync(result)
    }

    fn data_file(&self) -> Option<DataFile<'_>> {
        self.inner.data_file()
    }

    fn lane(&self) -> Option<Arc<dyn Lane>> {
        self.inner.lane()
    }

    fn is_plain(&self) -> bool {
        false
    }

    fn front(&self, range: FileRange, access: Access) -> Front {
        let held_bytes = self.held_bytes.load(Ordering::Acquire);
        let FileRange { offset_bytes, len_bytes } = range;
        if offset_bytes >= held_bytes {
            return Front { is_direct: false, len_bytes };
        }
        self.inner.front(FileRange { offset_bytes, len_bytes: len_bytes.min(held_bytes - offset_bytes) }, access)
    }

    fn never_blocks(&self) -> bool {
        self.inner.never_blocks()
    }

    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        self.inner.next_data(offset_bytes)
    }

    fn identity(&self) -> Option<(u64, u64)> {
        self.inner.identity()
    }

    fn allocated_bytes(&self) -> io::Result<u64> {
        self.inner.allocated_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_store::{Engine, EngineKind, FileStore, IoBuf, MemoryStore, OpenOptions};

    fn image(len: usize, writable: bool) -> (Arc<MemoryStore>, RawImage) {
        let store = Arc::new(MemoryStore::with_bytes("disk.raw", vec![7; len]));
        let image = RawImage::new(store.clone(), writable, 512).unwrap();
        (store, image)
    }

    #[test]
    fn blocks_lie_at_their_own_offsets_and_end_with_the_disk() {
        let mut states = [BlockState::Zero; 3];
        flat_states(PSEUDO_BLOCK_BYTES + 512, 0, &mut states);
        assert_eq!(states, [BlockState::data(0), BlockState::data(PSEUDO_BLOCK_BYTES), BlockState::Absent]);
        flat_states(u64::MAX, u64::MAX, &mut states);
        assert_eq!(states, [BlockState::Absent; 3]);
        assert!(flat_bitmap(512).is_full());
    }

    #[test]
    fn a_partial_last_sector_is_padded_with_zeros_and_extended_before_the_first_write() {
        let (store, image) = image(1000, true);
        assert_eq!(image.info().size_bytes, 1024);
        let mut sector = [1; 512];
        image.store().read_at(&mut sector, 512).unwrap();
        assert!(sector[..488].iter().all(|&b| b == 7) && sector[488..].iter().all(|&b| b == 0));
        assert_eq!(image.store().read_at(&mut sector, 1024).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(store.to_vec().len(), 1000, "opening changes nothing");
        image.writer().unwrap().begin_writing().unwrap();
        assert_eq!(store.to_vec().len(), 1024);
        image.store().read_at(&mut sector, 512).unwrap();
        assert!(sector[488..].iter().all(|&b| b == 0));
    }

    /// Only a range beyond the end of the file takes a detour. All else goes straight to the file,
    /// and so does everything once the file was extended.
    #[test]
    fn a_padded_file_is_driven_by_the_ring() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![7; 5000]).unwrap();
        let options = OpenOptions { writable: true, ..OpenOptions::default() };
        let store = Arc::new(FileStore::open(file.path(), &options).unwrap());
        let image = RawImage::new(store, true, 512).unwrap();
        let Ok(mut engine) = Engine::new(EngineKind::Uring, 4, None) else { return };
        let target = engine.add_target(image.store()).unwrap();
        let mut read = |offset_bytes: u64, len: usize| {
            let before = engine.stats();
            engine.read_one(0, 0, target, offset_bytes, IoBuf::new(len), 0..len);
            let mut done = Vec::new();
            engine.reap(1, &mut done).unwrap();
            let ended = done.remove(0);
            ended.result.unwrap();
            let (buf, after) = (ended.buf.unwrap(), engine.stats());
            assert_eq!(after.inline_parts, 0, "no part blocks this thread");
            (buf, after.parts - before.parts, after.pool_parts - before.pool_parts)
        };
        let (buf, parts, detours) = read(0, 4608);
        assert!(buf[..] == [7; 4608] && (parts, detours) == (1, 0));
        let (buf, parts, detours) = read(4096, 1024);
        assert!(buf[..904] == [7; 904] && buf[904..] == [0; 120] && (parts, detours) == (2, 1));
        image.writer().unwrap().begin_writing().unwrap();
        let (buf, parts, detours) = read(4096, 1024);
        assert!(buf[..904] == [7; 904] && buf[904..] == [0; 120] && (parts, detours) == (1, 0));
    }

    #[test]
    fn only_valid_sector_sizes_are_accepted() {
        for bad in [0, 256, 1000, 8192] {
            let store = Arc::new(MemoryStore::new("disk.raw"));
            assert!(matches!(RawImage::new(store, false, bad), Err(ImageError::Unsupported { .. })));
        }
    }

    #[test]
    fn zero_commits_are_refused_and_whole_commits_succeed() {
        let (_, image) = image(4096, true);
        let writer = image.writer().unwrap();
        assert!(!writer.can_store_zero());
        assert!(writer.commit(0, Commit::Zero).is_err());
        assert_eq!(writer.commit_waiting(0, Commit::Whole).unwrap(), BlockState::data(0));
        assert_eq!(writer.reserve_waiting(1).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        writer.close().unwrap();
    }

    #[test]
    fn a_growth_whose_sync_failed_cannot_be_retried() {
        let (store, image) = image(512, true);
        let writer = image.writer().unwrap();
        store.fail_syncs(true);
        writer.resize(4096).unwrap_err();
        store.fail_syncs(false);
        assert_eq!(store.to_vec().len(), 4096, "the file has the new length, but perhaps not durably");
        assert!(matches!(writer.resize(4096), Err(ImageError::Poisoned { .. })));
        assert_eq!(image.size_bytes(), 512);
    }

    #[test]
    fn after_a_failed_sync_every_flush_fails() {
        let (store, image) = image(512, true);
        let writer = image.writer().unwrap();
        store.fail_syncs(true);
        assert!(matches!(writer.flush(), Err(ImageError::Io { .. })));
        store.fail_syncs(false);
        assert!(matches!(writer.flush(), Err(ImageError::Poisoned { .. })));
        assert!(matches!(writer.close(), Err(ImageError::Poisoned { .. })));
    }
}
