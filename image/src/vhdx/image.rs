//! [`VhdxImage`]: an open VHDX, and its reads. `writer.rs` has its writes.
//!
//! Locks, in the order in which they must be taken:
//!
//! ```text
//!   preparing  survey, growth of the file, zeroing of free space; held during I/O (prepare.rs)
//!   log        position of the next log entry; held for a flush, during I/O      (log_writer.rs)
//!   headers    the current header; held during its updates, during I/O            (header.rs)
//!   state      table pages, space, reservations: memory only                      (state.rs)
//!   link       the link to the parent: memory only, never held with another lock (relink.rs)
//!   barrier    which thread flushes, which wait: never held with another lock     (the store's)
//! ```
//!
//! The disk above calls `reserve` and `commit` under its own lock, and they take `state`. So no I/O
//! happens under `state`. Table reads take it only to lay the cached pages over the bytes of the
//! file (`tables.rs`).
//!
//! A read-only image has no locks: its table is read on demand, and the map of the disk above
//! caches the result.

use super::{
    header::Headers,
    layout::{EntryState, Layout},
    lock,
    log_writer::LogWriter,
    open::{Opened, load},
    state::State,
    tables::{READ_BITMAP, Tables},
};
use crate::{
    BlockState, Image, ImageInfo, ImageWriter, LinkageId, ParentLink, SectorBitmap,
    error::{ImageError, Result},
};
use diskwright_format::vhdx::{BatEntry, Invalid, bat::EntryKind};
use diskwright_store::{
    Barrier, Store,
    sync::{Mutex, atomic::AtomicBool},
};
use std::{fmt, io, ops::ControlFlow, sync::Arc};

/// Opens a VHDX.
///
/// On a read-only open a log that is not empty is replayed in memory, and the image's store is an
/// [`OverlayStore`](diskwright_store::OverlayStore). A writable open replays the log on disk.
/// Otherwise nothing is written before the first call of [`ImageWriter`](crate::ImageWriter) that
/// needs it.
///
/// # Errors
/// [`ImageError::NotAnImage`] if the file is not a VHDX; `Corrupt` or `Unsupported` if it cannot be
/// used; `Io`.
pub fn open(store: Arc<dyn Store>, writable: bool) -> Result<VhdxImage> {
    let opened = load(store, writable)?;
    Ok(VhdxImage::new(opened, writable))
}

/// An open VHDX, read-only or writable.
pub struct VhdxImage {
    info: ImageInfo,
    /// The layout at open. A writable image has its current layout in its state.
    pub(super) layout: Arc<Layout>,
    pub(super) barrier: Barrier,
    pub(super) writing: Option<Writing>,
}

/// The parts of a writable image.
pub(super) struct Writing {
    pub(super) preparing: Mutex<()>,
    pub(super) state: Mutex<State>,
    pub(super) log: Mutex<LogWriter>,
    pub(super) headers: Mutex<Headers>,
    /// Whether `begin_writing` has run. Atomic, as every write reads it.
    pub(super) begun: AtomicBool,
    /// The link to the parent, if it was changed since the open.
    pub(super) link: Mutex<Option<ParentLink>>,
}

impl Writing {
    /// Current offsets of the tables and size of the disk.
    pub(super) fn layout(&self) -> Arc<Layout> {
        Arc::clone(&lock(&self.state).layout)
    }
}

impl VhdxImage {
    pub(super) fn new(opened: Opened, writable: bool) -> Self {
        let layout = Arc::new(opened.layout);
        let writing = writable.then(|| Writing {
            preparing: Mutex::new(()),
            state: Mutex::new(State::of_file(Arc::clone(&layout), opened.file_bytes)),
            log: Mutex::new(LogWriter::new(opened.log_place)),
            headers: Mutex::new(opened.headers),
            begun: AtomicBool::new(false),
            link: Mutex::new(None),
        });
        Self { info: opened.info, layout, barrier: opened.barrier, writing }
    }

    /// The parts for writing. The trait returns a writer only if they exist.
    pub(super) fn writing(&self) -> Result<&Writing> {
        self.writing.as_ref().ok_or_else(|| {
            self.io("write to a disk that is open read-only", 0, io::ErrorKind::ReadOnlyFilesystem.into())
        })
    }

    pub(super) fn io(&self, doing: &'static str, offset_bytes: u64, error: io::Error) -> ImageError {
        ImageError::io(doing, &**self.barrier.store(), offset_bytes, error)
    }

    pub(super) fn file_bytes(&self) -> Result<u64> {
        self.barrier.store().len_bytes().map_err(|error| self.io("get the file's length", 0, error))
    }

    /// The tables with the changes in memory laid over them.
    pub(super) fn tables(&self) -> Tables<'_> {
        Tables::now(&**self.barrier.store(), self.writing.as_ref().map(|writing| &writing.state))
    }

    /// Current offsets of the tables and size of the disk.
    pub(super) fn layout(&self) -> Arc<Layout> {
        self.writing.as_ref().map_or_else(|| Arc::clone(&self.layout), Writing::layout)
    }

    /// Runs `read`, and repeats it if the tables moved meanwhile: it may have read at their old
    /// offset.
    fn retry_if_moved<T>(&self, mut read: impl FnMut(&Layout) -> Result<T>) -> Result<T> {
        let mut layout = self.layout();
        loop {
            let found = read(&layout);
            let now = self.layout();
            if Arc::ptr_eq(&now, &layout) {
                return found;
            }
            layout = now;
        }
    }

    fn states(&self, layout: &Layout, first_block: u64, out: &mut [BlockState]) -> Result<()> {
        out.fill(BlockState::Absent);
        let geometry = &layout.geometry;
        let count = geometry.payload_blocks().saturating_sub(first_block).min(out.len() as u64);
        if count == 0 {
            return Ok(());
        }
        let tables = self.tables();
        let mut file_bytes = tables.file_bytes()?;
        let first = geometry.payload_index(first_block);
        let end = geometry.payload_index(first_block + count - 1) + 1;
        let mut out = out.iter_mut();
        let mut block = first_block;
        layout.read_entries(&tables, first, end - first, &mut |index, entry| {
            if geometry.payload_index(block) == index {
                if let Some(place) = out.next() {
                    let mut state = layout.block_state(block, entry, file_bytes);
                    if state.is_err() {
                        // The file may have grown since its length was read.
                        file_bytes = tables.file_bytes()?;
                        state = layout.block_state(block, entry, file_bytes);
                    }
                    *place = state.map_or(BlockState::Damaged, BlockState::from);
                }
                block += 1;
            }
            Ok(())
        })
    }

    fn bitmap(&self, layout: &Layout, block: u64) -> Result<SectorBitmap> {
        let geometry = &layout.geometry;
        let tables = self.tables();
        let mut bitmap = SectorBitmap::empty(geometry.sectors_per_block(), geometry.logical_sector_bytes());
        if block >= geometry.payload_blocks() || !layout.has_parent {
            return Ok(bitmap);
        }
        let place = || match self.bitmap_block_of(layout, block)? {
            Ok(place) => Ok(place),
            Err((index, invalid)) => Err(layout.corrupt_entry(tables.store(), index, invalid)),
        };
        let (within, len_bytes) = geometry.bitmap_place(block);
        let mut bytes = vec![0; len_bytes as usize];
        let mut at_bytes = place()?;
        loop {
            let read = tables.read(READ_BITMAP, &mut bytes, at_bytes + within);
            // The bitmap block may have moved meanwhile, and the file may have been cut
            // (`compact.rs`).
            let now_bytes = place()?;
            if now_bytes == at_bytes {
                read?;
                break;
            }
            at_bytes = now_bytes;
        }
        for (word, raw) in bitmap.words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*raw);
        }
        Ok(bitmap)
    }

    /// Offset of the bitmap block for a partially present block; or the index of the bitmap entry
    /// and what is wrong with it.
    fn bitmap_block_of(&self, layout: &Layout, block: u64) -> Result<Result<u64, (u64, Invalid)>> {
        let index = layout.geometry.bitmap_index(layout.geometry.chunk_of(block));
        let mut entry = self.entry_at(layout, index)?;
        let place = loop {
            let place = layout.bitmap_place(entry, self.tables().file_bytes()?);
            // The block may have moved, and the file may have been cut, after the entry was read.
            let before =
                if place.is_ok() { entry } else { std::mem::replace(&mut entry, self.entry_at(layout, index)?) };
            if entry == before {
                break place;
            }
        };
        let missing = || {
            let expected = format!("one, as block {block} is partially present");
            Invalid::new("BAT entry", 0, "no sector bitmap block", expected)
        };
        Ok(place.and_then(|place| place.ok_or_else(missing)).map_err(|invalid| (index, invalid)))
    }

    fn entry_at(&self, layout: &Layout, index: u64) -> Result<BatEntry> {
        let mut found = BatEntry::default();
        layout.read_entries(&self.tables(), index, 1, &mut |_, entry| {
            found = entry;
            Ok(())
        })?;
        Ok(found)
    }

    fn damage_of(&self, layout: &Layout, block: u64) -> Result<ImageError> {
        let tables = self.tables();
        let index = layout.geometry.payload_index(block);
        if block < layout.geometry.payload_blocks() {
            let entry = self.entry_at(layout, index)?;
            match layout.block_state(block, entry, tables.file_bytes()?) {
                Err(invalid) => return Ok(layout.corrupt_entry(tables.store(), index, invalid)),
                Ok(EntryState::Partial { .. }) => {
                    if let Err((index, invalid)) = self.bitmap_block_of(layout, block)? {
                        return Ok(layout.corrupt_entry(tables.store(), index, invalid));
                    }
                }
                Ok(_) => {}
            }
        }
        let sound =
            io::Error::other(format!("block {block} was damaged when it was looked up, but its entry is valid now"));
        Err(self.io("explain the damage of a block", layout.entry_offset_bytes(index), sound))
    }

    /// The first of the blocks `first .. end` whose entry is not zero. Holes of a sparse table are
    /// not read.
    fn next_entry(&self, layout: &Layout, first: u64, end: u64) -> Result<Option<u64>> {
        let geometry = &layout.geometry;
        let end = end.min(geometry.payload_blocks());
        if first >= end {
            return Ok(None);
        }
        let mut found = None;
        let indices = geometry.payload_index(first)..geometry.payload_index(end - 1) + 1;
        layout.each_entry(&self.tables(), indices, &mut |index, _| {
            if let EntryKind::Payload { block } = geometry.what_is(index) {
                found = Some(block);
            }
            Ok(if found.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        Ok(found)
    }
}

impl fmt::Debug for VhdxImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VhdxImage({}, {})", self.barrier.store().name().display(), self.info.disk_type)
    }
}

impl Image for VhdxImage {
    fn info(&self) -> &ImageInfo {
        &self.info
    }

    fn stores(&self) -> &[Arc<dyn Store>] {
        std::slice::from_ref(self.barrier.store())
    }

    fn size_bytes(&self) -> u64 {
        self.layout().geometry.size_bytes()
    }

    fn linkage_id(&self) -> Option<LinkageId> {
        match &self.writing {
            Some(writing) => Some(LinkageId::from_uuid(lock(&writing.headers).current().data_write_guid)),
            None => self.info.linkage_id,
        }
    }

    fn parent_link(&self) -> Option<ParentLink> {
        let changed = self.writing.as_ref().and_then(|writing| lock(&writing.link).clone());
        changed.or_else(|| self.info.parent.clone())
    }

    fn block_states(&self, first_block: u64, out: &mut [BlockState]) -> Result<()> {
        self.retry_if_moved(|layout| self.states(layout, first_block, out))
    }

    fn damage(&self, block: u64) -> Result<ImageError> {
        self.retry_if_moved(|layout| self.damage_of(layout, block))
    }

    fn next_block(&self, first_block: u64, end_block: u64) -> Result<Option<u64>> {
        self.retry_if_moved(|layout| self.next_entry(layout, first_block, end_block))
    }

    fn packed_len_bytes(&self, blocks: u64) -> Result<Option<u64>> {
        self.packed_bytes(blocks).map(Some)
    }

    fn sector_bitmap(&self, block: u64) -> Result<SectorBitmap> {
        self.retry_if_moved(|layout| self.bitmap(layout, block))
    }

    fn writer(&self) -> Option<&dyn ImageWriter> {
        self.writing.is_some().then_some(self as &dyn ImageWriter)
    }
}
