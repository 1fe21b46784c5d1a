//! [`VhdxImage`]: an open VHDX.
//!
//! Locks, in the order in which they may be taken together:
//!
//! ```text
//!   state     table pages, space, reservations: reserve, commit, the snapshot of a flush   (blocks.rs)
//!   log       where the next log entry goes: one flush cycle at a time                     (log_writer.rs)
//!   headers   the current header: its updates                                              (header.rs)
//!   barrier   who flushes, who waits: never held while anything else is done               (the store's)
//! ```
//!
//! A read-only image has none of them: its table is read as it is asked for, and the map of the disk above remembers.

use super::{
    blocks::State,
    header::Headers,
    layout::{EntryState, Layout},
    lock,
    log_writer::LogWriter,
    open::Opened,
    pages::PageCache,
};
use crate::{
    error::{ImageError, Result},
    image::{BlockState, Commit, Image, ImageInfo, ImageWriter, Reservation, SectorBitmap},
};
use diskwright_format::vhdx::{BatEntry, Invalid, bat::EntryKind};
use diskwright_store::{
    Barrier, Store,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};
use std::{
    fmt, io,
    ops::{ControlFlow, Range},
    sync::Arc,
};

/// A VHDX, open. See [`open`](super::open).
pub struct VhdxImage {
    info: ImageInfo,
    pub(super) layout: Layout,
    pub(super) barrier: Barrier,
    pub(super) writing: Option<Writing>,
}

/// What only a writable image has.
pub(super) struct Writing {
    pub(super) state: Mutex<State>,
    pub(super) log: Mutex<LogWriter>,
    pub(super) headers: Mutex<Headers>,
    /// `begin_writing` is done: asked on every write, so without a lock.
    begun: AtomicBool,
}

impl VhdxImage {
    pub(super) fn new(opened: Opened, writable: bool) -> Self {
        let writing = writable.then(|| Writing {
            state: Mutex::new(State::default()),
            log: Mutex::new(LogWriter::new(opened.log_place)),
            headers: Mutex::new(opened.headers),
            begun: AtomicBool::new(false),
        });
        Self { info: opened.info, layout: opened.layout, barrier: opened.barrier, writing }
    }

    /// The writing side. The trait hands it out only when it is there.
    pub(super) fn writing(&self) -> Result<&Writing> {
        self.writing.as_ref().ok_or_else(|| {
            self.io("write to a disk that is open read-only", 0, io::ErrorKind::ReadOnlyFilesystem.into())
        })
    }

    pub(super) fn io(&self, doing: &'static str, offset_bytes: u64, error: io::Error) -> ImageError {
        ImageError::io(doing, &**self.barrier.store(), offset_bytes, error)
    }

    pub(super) fn file_bytes(&self) -> Result<u64> {
        self.barrier.store().len_bytes().map_err(|error| self.io("learn the file's length", 0, error))
    }

    fn states(&self, cache: Option<&PageCache>, first_block: u64, out: &mut [BlockState]) -> Result<()> {
        out.fill(BlockState::Absent);
        let geometry = &self.layout.geometry;
        let count = geometry.payload_blocks().saturating_sub(first_block).min(out.len() as u64);
        if count == 0 {
            return Ok(());
        }
        let file_bytes = self.file_bytes()?;
        let first = geometry.payload_index(first_block);
        let end = geometry.payload_index(first_block + count - 1) + 1;
        let mut out = out.iter_mut();
        let mut block = first_block;
        self.layout.read_entries(&**self.barrier.store(), cache, first, end - first, &mut |index, entry| {
            if geometry.payload_index(block) == index {
                if let Some(place) = out.next() {
                    let state = self.layout.block_state(block, entry, file_bytes);
                    *place = state.map_or(BlockState::Damaged, BlockState::from);
                }
                block += 1;
            }
            Ok(())
        })
    }

    fn bitmap(&self, cache: Option<&PageCache>, block: u64) -> Result<SectorBitmap> {
        let geometry = &self.layout.geometry;
        let store = &**self.barrier.store();
        let mut bitmap = SectorBitmap::empty(geometry.sectors_per_block(), geometry.logical_sector_bytes());
        if block >= geometry.payload_blocks() || !self.layout.has_parent {
            return Ok(bitmap);
        }
        let place = match self.bitmap_block_of(cache, block)? {
            Ok(place) => place,
            Err((index, invalid)) => return Err(self.layout.corrupt_entry(store, index, invalid)),
        };
        let (within, len_bytes) = geometry.bitmap_place(block);
        let mut bytes = vec![0; len_bytes as usize];
        store
            .read_at(&mut bytes, place + within)
            .map_err(|error| self.io("read a sector bitmap", place + within, error))?;
        if let Some(cache) = cache {
            cache.overlay(&mut bytes, place + within);
        }
        for (word, raw) in bitmap.words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*raw);
        }
        Ok(bitmap)
    }
}

impl VhdxImage {
    /// Where the bitmap block of a partially present block is; or the index of its entry, and what is wrong with that.
    fn bitmap_block_of(&self, cache: Option<&PageCache>, block: u64) -> Result<Result<u64, (u64, Invalid)>> {
        let index = self.layout.geometry.bitmap_index(self.layout.geometry.chunk_of(block));
        let entry = self.entry_at(cache, index)?;
        let place = self.layout.bitmap_place(entry, self.file_bytes()?);
        let missing = || {
            let expected = format!("one, as block {block} is partially present");
            Invalid::new("BAT entry", 0, "no sector bitmap block", expected)
        };
        Ok(place.and_then(|place| place.ok_or_else(missing)).map_err(|invalid| (index, invalid)))
    }

    fn entry_at(&self, cache: Option<&PageCache>, index: u64) -> Result<BatEntry> {
        let mut found = BatEntry::default();
        self.layout.read_entries(&**self.barrier.store(), cache, index, 1, &mut |_, entry| {
            found = entry;
            Ok(())
        })?;
        Ok(found)
    }

    fn damage_of(&self, cache: Option<&PageCache>, block: u64) -> Result<ImageError> {
        let store = &**self.barrier.store();
        let index = self.layout.geometry.payload_index(block);
        if block < self.layout.geometry.payload_blocks() {
            let entry = self.entry_at(cache, index)?;
            match self.layout.block_state(block, entry, self.file_bytes()?) {
                Err(invalid) => return Ok(self.layout.corrupt_entry(store, index, invalid)),
                Ok(EntryState::Partial { .. }) => {
                    if let Err((index, invalid)) = self.bitmap_block_of(cache, block)? {
                        return Ok(self.layout.corrupt_entry(store, index, invalid));
                    }
                }
                Ok(_) => {}
            }
        }
        let sound = io::Error::other(format!("block {block} was damaged when it was looked up, and is not any more"));
        Err(self.io("explain the damage of a block", self.layout.entry_offset_bytes(index), sound))
    }

    /// The first of the blocks `first .. end` whose entry is not zero. Holes of a sparse table are not read.
    fn next_entry(&self, cache: Option<&PageCache>, first: u64, end: u64) -> Result<Option<u64>> {
        let geometry = &self.layout.geometry;
        let end = end.min(geometry.payload_blocks());
        if first >= end {
            return Ok(None);
        }
        let mut found = None;
        let indices = geometry.payload_index(first)..geometry.payload_index(end - 1) + 1;
        self.layout.each_entry(&**self.barrier.store(), cache, indices, &mut |index, _| {
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

    fn block_states(&self, first_block: u64, out: &mut [BlockState]) -> Result<()> {
        match &self.writing {
            None => self.states(None, first_block, out),
            Some(writing) => self.states(Some(&lock(&writing.state).pages), first_block, out),
        }
    }

    fn damage(&self, block: u64) -> Result<ImageError> {
        match &self.writing {
            None => self.damage_of(None, block),
            Some(writing) => self.damage_of(Some(&lock(&writing.state).pages), block),
        }
    }

    fn next_block(&self, first_block: u64, end_block: u64) -> Result<Option<u64>> {
        match &self.writing {
            None => self.next_entry(None, first_block, end_block),
            Some(writing) => self.next_entry(Some(&lock(&writing.state).pages), first_block, end_block),
        }
    }

    fn sector_bitmap(&self, block: u64) -> Result<SectorBitmap> {
        match &self.writing {
            None => self.bitmap(None, block),
            Some(writing) => self.bitmap(Some(&lock(&writing.state).pages), block),
        }
    }

    fn writer(&self) -> Option<&dyn ImageWriter> {
        self.writing.is_some().then_some(self as &dyn ImageWriter)
    }
}

impl ImageWriter for VhdxImage {
    fn begin_writing(&self) -> Result<()> {
        self.barrier.check()?;
        let writing = self.writing()?;
        if !writing.begun.load(Ordering::Acquire) {
            lock(&writing.headers).begin_data_write(&self.barrier)?;
            writing.begun.store(true, Ordering::Release);
        }
        Ok(())
    }

    fn prepare(&self, _blocks: Range<u64>) -> Result<()> {
        Ok(())
    }

    fn reserve(&self, block: u64) -> Result<Option<Reservation>> {
        let writing = self.writing()?;
        self.reserve_block(&mut lock(&writing.state), block).map(Some)
    }

    fn initialised(&self, _block: u64) {}

    fn tracks_sectors(&self) -> bool {
        self.layout.has_parent
    }

    fn commit(&self, block: u64, change: Commit) -> Result<Option<BlockState>> {
        let writing = self.writing()?;
        self.commit_block(&mut lock(&writing.state), block, change).map(|state| Some(state.into()))
    }

    fn can_store_zero(&self) -> bool {
        !self.layout.fixed
    }

    fn is_dirty(&self) -> bool {
        self.writing.as_ref().is_some_and(|writing| lock(&writing.state).pages.is_dirty())
    }

    fn check_syncs(&self) -> Result<()> {
        Ok(self.barrier.check()?)
    }

    fn flush(&self) -> Result<()> {
        self.flush_shared(self.writing()?)
    }

    fn freed_generation(&self) -> u64 {
        self.writing.as_ref().map_or(0, |writing| lock(&writing.state).freed_generation())
    }

    fn recycle(&self, generation: u64) {
        if let Some(writing) = &self.writing {
            lock(&writing.state).recycle(self.store().as_ref(), generation);
        }
    }

    fn close(&self) -> Result<()> {
        self.close_file(self.writing()?)
    }
}
