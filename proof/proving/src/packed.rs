//! An image format made up for tests, with features that no real format here has yet: blocks in a
//! second file, packed blocks, and no sector bitmaps.
//!
//! ```text
//!   table file    8 bytes a block: absent (the parent shows), packed, zeros, or an offset in the
//!                 block file
//!   block file    blocks, one after the other; space is not reused while the image is open
//! ```
//!
//! A write of part of a block that is packed, or absent over a parent, must wait until the block is
//! filled from below. A packed block decodes to the contents that other kinds of disks have in
//! their parent ([`packed_version`]).
//!
//! What must hold for power cuts: a flush copies the table, syncs the blocks, writes the table and
//! syncs it. (An entry never crosses a sector.) Before the first write of a session the table is
//! synced, and slack after the last block is cut off and that is synced, because the slack may hold
//! another block's stale data. One mutex guards table and space. No I/O is done under it.

use crate::{
    contents::SECTOR_BYTES,
    ledger::{PARENT, Version, stamp},
};
use diskwright_image::{
    BlockState, Commit, DiskType, Format, Image, ImageError, ImageInfo, ImageWriter, LogState, Reservation, Result,
    SectorBitmap,
};
use diskwright_store::{
    Barrier, FileRange, Store,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};
use std::{
    collections::{BTreeSet, HashMap, HashSet},
    io,
    ops::Range,
    sync::{Arc, PoisonError},
};

const ENTRY_BYTES: u64 = 8;
const ABSENT: u64 = 0;
const PACKED: u64 = 1;
const ZERO: u64 = 2;
/// Low bits of an entry whose other bits are an offset, a multiple of the block size.
const DATA: u64 = 3;

/// The version that a packed block decodes to, by sector.
pub fn packed_version(sector: u64) -> Version {
    if (sector / 8).is_multiple_of(2) { PARENT } else { 0 }
}

#[derive(Debug, Default)]
struct Space {
    table: Vec<u64>,
    /// Sectors of the table that are not durable.
    dirty: BTreeSet<u64>,
    /// Whether a flush in progress has taken dirty sectors.
    is_flushing: bool,
    reserved: HashMap<u64, u64>,
    /// Blocks for which the file has room.
    ready: HashSet<u64>,
    /// End of the last block that is used or reserved.
    end_bytes: u64,
    /// End of the room in the file, including that for the blocks in `ready`.
    held_bytes: u64,
}

/// An open image.
#[derive(Debug)]
pub struct PackedImage {
    info: ImageInfo,
    stores: Vec<Arc<dyn Store>>,
    /// Barriers of the table and of the blocks.
    barriers: [Barrier; 2],
    space: Mutex<Space>,
    has_begun: AtomicBool,
    preparing: Mutex<()>,
    writable: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Creates a table in which every second block is packed and the others are absent.
///
/// # Errors
/// The error of the store.
pub fn create(table: &dyn Store, blocks: u64) -> io::Result<()> {
    let entries = (0..blocks).flat_map(|block| if block % 2 == 1 { PACKED } else { ABSENT }.to_le_bytes());
    table.write_at(&entries.collect::<Vec<u8>>(), 0)?;
    table.sync_data()
}

impl PackedImage {
    /// Opens an image that [`create`] has made, with `size_bytes` in blocks of `block_bytes`.
    ///
    /// # Errors
    /// The errors of the stores; `Corrupt` for an invalid entry.
    pub fn open(stores: [Arc<dyn Store>; 2], size_bytes: u64, block_bytes: u64, writable: bool) -> Result<Self> {
        let [table, blocks] = &stores;
        let io = |error| ImageError::io("read the table", &**table, 0, error);
        let mut bytes = vec![0; (size_bytes.div_ceil(block_bytes) * ENTRY_BYTES) as usize];
        table.read_at(&mut bytes, 0).map_err(io)?;
        let entries: Vec<u64> =
            bytes.chunks(8).map(|entry| u64::from_le_bytes(entry.try_into().unwrap_or_default())).collect();
        let held_bytes = blocks.len_bytes().map_err(io)?;
        let mut used = HashSet::new();
        for (block, entry) in entries.iter().copied().enumerate() {
            let fits = (entry & !3).is_multiple_of(block_bytes) && (entry & !3) + block_bytes <= held_bytes;
            if entry > DATA && (entry & 3 != DATA || !fits) || entry >= DATA && !used.insert(entry) {
                return Err(ImageError::Corrupt {
                    path: table.name().to_owned(),
                    structure: "the table of blocks",
                    offset_bytes: block as u64 * ENTRY_BYTES,
                    found: format!("{entry:#x}"),
                    expected: format!("a block of its own within {held_bytes} bytes"),
                });
            }
        }
        let end_bytes = used.iter().map(|entry| (entry & !3) + block_bytes).max().unwrap_or(0);
        let info = ImageInfo {
            format: Format::Raw,
            disk_type: DiskType::Dynamic,
            size_bytes,
            block_bytes,
            has_blocks: true,
            logical_sector_bytes: SECTOR_BYTES as u32,
            physical_sector_bytes: SECTOR_BYTES as u32,
            creator: "proving".into(),
            subformat: None,
            disk_id: None,
            linkage_id: None,
            file_write_id: None,
            created_seconds: None,
            parent: None,
            log: LogState::None,
            payload_alignment_bytes: 4096,
            remarks: Vec::new(),
            doubts: Vec::new(),
            snapshot: None,
        };
        let barriers = [Barrier::new(Arc::clone(table)), Barrier::new(Arc::clone(blocks))];
        let space = Space { table: entries, end_bytes, held_bytes: end_bytes, ..Space::default() };
        Ok(Self {
            info,
            stores: stores.into(),
            barriers,
            space: Mutex::new(space),
            has_begun: AtomicBool::new(false),
            preparing: Mutex::default(),
            writable,
        })
    }

    fn state(entry: u64) -> BlockState {
        match entry {
            ABSENT => BlockState::Absent,
            PACKED => BlockState::Compressed,
            ZERO => BlockState::Zero,
            data => BlockState::Data { store: 1, offset_bytes: data & !3 },
        }
    }

    fn io(&self, doing: &'static str, error: io::Error) -> ImageError {
        ImageError::io(doing, &*self.stores[0], 0, error)
    }

    /// One flush, see the module.
    fn pass(&self) -> Result<()> {
        self.check_syncs()?;
        let sectors: Vec<(u64, Vec<u8>)> = {
            let mut space = lock(&self.space);
            let space = &mut *space;
            space.is_flushing = true;
            let entries = (SECTOR_BYTES / ENTRY_BYTES) as usize;
            let bytes = |sector: &u64| {
                let from = *sector as usize * entries;
                let entries = &space.table[from..(from + entries).min(space.table.len())];
                (*sector, entries.iter().flat_map(|entry| entry.to_le_bytes()).collect())
            };
            std::mem::take(&mut space.dirty).iter().map(bytes).collect()
        };
        let flushed = self.carry(&sectors);
        let mut space = lock(&self.space);
        space.is_flushing = false;
        if flushed.is_err() {
            space.dirty.extend(sectors.iter().map(|(sector, _)| *sector));
        }
        flushed
    }

    fn carry(&self, sectors: &[(u64, Vec<u8>)]) -> Result<()> {
        self.barriers[1].sync("make the blocks durable")?;
        for (sector, bytes) in sectors {
            let written = self.barriers[0].write(bytes, sector * SECTOR_BYTES);
            written.map_err(|error| self.io("write the table", error))?;
        }
        Ok(self.barriers[0].sync("make the table durable")?)
    }
}

impl Image for PackedImage {
    fn info(&self) -> &ImageInfo {
        &self.info
    }

    fn stores(&self) -> &[Arc<dyn Store>] {
        &self.stores
    }

    fn block_states(&self, first_block: u64, out: &mut [BlockState]) -> Result<()> {
        let space = lock(&self.space);
        for (block, out) in (first_block..).zip(out) {
            *out = Self::state(space.table.get(block as usize).copied().unwrap_or(ABSENT));
        }
        Ok(())
    }

    fn read_compressed(&self, block: u64, within_bytes: u64, out: &mut [u8]) -> Result<()> {
        let first = (block * self.info.block_bytes + within_bytes) / SECTOR_BYTES;
        for (sector, bytes) in (first..).zip(out.chunks_mut(SECTOR_BYTES as usize)) {
            stamp(bytes, sector, packed_version(sector));
        }
        Ok(())
    }

    fn sector_bitmap(&self, block: u64) -> Result<SectorBitmap> {
        Err(self.io("find the bitmap of a block", io::Error::other(format!("block {block} has none"))))
    }

    fn writer(&self) -> Option<&dyn ImageWriter> {
        self.writable.then_some(self as &dyn ImageWriter)
    }
}

impl ImageWriter for PackedImage {
    fn begin_writing(&self) -> Result<()> {
        let _turn = lock(&self.preparing);
        if self.has_begun.load(Ordering::SeqCst) {
            return Ok(());
        }
        let end_bytes = lock(&self.space).end_bytes;
        self.barriers[0].sync("make the table durable")?;
        let held_bytes = self.stores[1].len_bytes().map_err(|error| self.io("learn the length of the file", error))?;
        if held_bytes > end_bytes {
            self.stores[1].set_len(end_bytes).map_err(|error| self.io("cut the slack off", error))?;
        }
        self.barriers[1].sync("make the blocks durable")?;
        self.has_begun.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn prepare(&self, blocks: Range<u64>) -> Result<()> {
        let _turn = lock(&self.preparing);
        loop {
            let (held_bytes, wanted_bytes) = {
                let mut space = lock(&self.space);
                let more = blocks.clone().filter(|block| !space.ready.contains(block)).count();
                let wanted_bytes = space.end_bytes + (space.ready.len() + more) as u64 * self.info.block_bytes;
                if wanted_bytes <= space.held_bytes {
                    space.ready.extend(blocks);
                    return Ok(());
                }
                (space.held_bytes, wanted_bytes)
            };
            let range = FileRange { offset_bytes: held_bytes, len_bytes: wanted_bytes - held_bytes };
            self.stores[1].allocate(range).map_err(|error| self.io("make room for blocks", error))?;
            lock(&self.space).held_bytes = wanted_bytes;
        }
    }

    fn reserve(&self, block: u64) -> Result<Option<Reservation>> {
        let mut space = lock(&self.space);
        if let Some(&offset_bytes) = space.reserved.get(&block) {
            return Ok(Some(Reservation { store: 1, offset_bytes, init: None }));
        }
        if !space.ready.remove(&block) {
            return Ok(None);
        }
        let offset_bytes = space.end_bytes;
        space.end_bytes += self.info.block_bytes;
        space.reserved.insert(block, offset_bytes);
        Ok(Some(Reservation { store: 1, offset_bytes, init: None }))
    }

    fn initialised(&self, _block: u64) {}

    fn commit(&self, block: u64, change: Commit) -> Result<Option<BlockState>> {
        let mut space = lock(&self.space);
        let entry = match change {
            Commit::Zero | Commit::Discard => {
                // A failed write may have left bytes there.
                space.reserved.remove(&block);
                ZERO
            }
            Commit::Absent | Commit::Moved => {
                return Err(self.io("move or remove a block", io::ErrorKind::Unsupported.into()));
            }
            // There are no sector bitmaps: the caller has filled the rest of the block.
            Commit::Whole | Commit::Sectors { .. } => match space.reserved.remove(&block) {
                Some(offset_bytes) => offset_bytes | DATA,
                None => space.table[block as usize],
            },
        };
        space.table[block as usize] = entry;
        space.dirty.insert(block * ENTRY_BYTES / SECTOR_BYTES);
        Ok(Some(Self::state(entry)))
    }

    fn tracks_sectors(&self) -> bool {
        false
    }

    fn can_store_zero(&self) -> bool {
        true
    }

    fn is_dirty(&self) -> bool {
        let space = lock(&self.space);
        space.is_flushing || !space.dirty.is_empty()
    }

    fn check_syncs(&self) -> Result<()> {
        Ok(self.barriers.iter().try_for_each(Barrier::check)?)
    }

    fn flush(&self) -> Result<()> {
        self.barriers[0].share(|| self.pass())?;
        self.check_syncs()
    }

    fn freed_generation(&self) -> u64 {
        0
    }

    fn recycle(&self, _generation: u64) {}

    fn close(&self) -> Result<()> {
        self.flush()
    }
}
