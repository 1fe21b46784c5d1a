//! An image of an imaginary format with all features that the engine must support: blocks in two
//! files, packed (compressed) blocks, damaged blocks, and a writer that always needs a preparation
//! first.

use diskwright_image::{
    BlockState, Commit, DiskType, Format, Image, ImageError, ImageInfo, ImageWriter, Reservation, Result, SectorBitmap,
};
use diskwright_store::{MemoryStore, Store};
use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

pub const BLOCK: u64 = 64 << 10;

/// The contents of a packed block.
pub fn packed_byte(block: u64, within_bytes: u64) -> u8 {
    (block as u8).wrapping_mul(31) ^ (within_bytes / 512) as u8 | 1
}

#[derive(Debug)]
pub struct Patchwork {
    info: ImageInfo,
    stores: Vec<Arc<dyn Store>>,
    inner: Mutex<Inner>,
    has_begun: AtomicBool,
    pub unpacked: AtomicU64,
    pub prepared: AtomicU64,
    /// Each call needs its own preparation.
    pub is_forgetful: bool,
}

#[derive(Debug)]
struct Inner {
    states: Vec<BlockState>,
    reserved: HashMap<u64, u64>,
    ready: HashSet<u64>,
    end_bytes: u64,
    dirty: bool,
}

impl Patchwork {
    /// An image of `states`. `Data` blocks lie at their offsets in two stores filled with 0xd0 and
    /// 0xd1.
    pub fn new(states: Vec<BlockState>, is_forgetful: bool) -> Self {
        let size_bytes = states.len() as u64 * BLOCK;
        let store = |name: &str, byte| -> Arc<dyn Store> {
            Arc::new(MemoryStore::with_bytes(name, vec![byte; size_bytes as usize]))
        };
        let stores = vec![store("one", 0xd0), store("two", 0xd1)];
        // `reserve` must not access the store, so the space of new blocks is there already.
        stores[1].set_len(4 * size_bytes).unwrap();
        Self {
            info: ImageInfo {
                creator: "patchwork".into(),
                payload_alignment_bytes: 4096,
                ..ImageInfo::new(Format::Raw, DiskType::Dynamic, size_bytes, BLOCK)
            },
            stores,
            inner: Mutex::new(Inner {
                states,
                reserved: HashMap::new(),
                ready: HashSet::new(),
                end_bytes: size_bytes,
                dirty: false,
            }),
            has_begun: AtomicBool::new(false),
            unpacked: AtomicU64::new(0),
            prepared: AtomicU64::new(0),
            is_forgetful,
        }
    }

    fn is_ready(&self, inner: &mut Inner, block: u64) -> bool {
        assert!(self.has_begun.load(Ordering::SeqCst), "begin_writing was not called");
        if self.is_forgetful { inner.ready.remove(&block) } else { inner.ready.contains(&block) }
    }
}

impl Image for Patchwork {
    fn info(&self) -> &ImageInfo {
        &self.info
    }

    fn stores(&self) -> &[Arc<dyn Store>] {
        &self.stores
    }

    fn block_states(&self, first_block: u64, out: &mut [BlockState]) -> Result<()> {
        let inner = self.inner.lock().unwrap();
        for (block, out) in (first_block..).zip(out) {
            *out = inner.states.get(block as usize).copied().unwrap_or(BlockState::Absent);
        }
        Ok(())
    }

    fn damage(&self, block: u64) -> Result<ImageError> {
        Ok(ImageError::Corrupt {
            path: "one".into(),
            structure: "patch",
            offset_bytes: block,
            found: format!("patch {block}"),
            expected: "another".into(),
        })
    }

    fn read_compressed(&self, block: u64, within_bytes: u64, out: &mut [u8]) -> Result<()> {
        self.unpacked.fetch_add(1, Ordering::Relaxed);
        for (at, byte) in (within_bytes..).zip(out) {
            *byte = packed_byte(block, at);
        }
        Ok(())
    }

    fn sector_bitmap(&self, _block: u64) -> Result<SectorBitmap> {
        unreachable!("no block is partial")
    }

    fn writer(&self) -> Option<&dyn ImageWriter> {
        Some(self)
    }
}

impl ImageWriter for Patchwork {
    fn begin_writing(&self) -> Result<()> {
        self.has_begun.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn prepare(&self, blocks: Range<u64>) -> Result<()> {
        self.prepared.fetch_add(1, Ordering::Relaxed);
        self.inner.lock().unwrap().ready.extend(blocks);
        Ok(())
    }

    fn reserve(&self, block: u64) -> Result<Option<Reservation>> {
        let mut inner = self.inner.lock().unwrap();
        if let Some(&offset_bytes) = inner.reserved.get(&block) {
            return Ok(Some(Reservation { store: 1, offset_bytes, init: None }));
        }
        if !self.is_ready(&mut inner, block) {
            return Ok(None);
        }
        let offset_bytes = inner.end_bytes;
        inner.end_bytes += BLOCK;
        inner.reserved.insert(block, offset_bytes);
        Ok(Some(Reservation { store: 1, offset_bytes, init: None }))
    }

    fn initialised(&self, _block: u64) {}

    fn commit(&self, block: u64, change: Commit) -> Result<Option<BlockState>> {
        let mut inner = self.inner.lock().unwrap();
        if !self.is_ready(&mut inner, block) {
            return Ok(None);
        }
        let state = match change {
            Commit::Zero | Commit::Discard => BlockState::Zero,
            Commit::Whole => match inner.reserved.remove(&block) {
                Some(offset_bytes) => BlockState::Data { store: 1, offset_bytes },
                None => inner.states[block as usize],
            },
            Commit::Absent | Commit::Moved => panic!("no block is moved"),
            Commit::Sectors { .. } => panic!("this image does not track sectors"),
        };
        inner.states[block as usize] = state;
        inner.dirty = true;
        Ok(Some(state))
    }

    fn tracks_sectors(&self) -> bool {
        false
    }

    fn can_store_zero(&self) -> bool {
        true
    }

    fn is_dirty(&self) -> bool {
        self.inner.lock().unwrap().dirty
    }

    fn check_syncs(&self) -> Result<()> {
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        self.inner.lock().unwrap().dirty = false;
        Ok(())
    }

    fn freed_generation(&self) -> u64 {
        0
    }

    fn recycle(&self, _generation: u64) {}

    fn close(&self) -> Result<()> {
        self.flush()
    }
}
