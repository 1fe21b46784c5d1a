//! The writing side of a dynamic or differencing VHD.
//!
//! ```text
//!   reserve ─▶ reserved ─ commit ─▶ BAT entry in memory (dirty) ─ flush ─▶ in the file
//!                                   bits in memory (dirty)
//! ```
//!
//! The bitmap of a new dynamic block is all ones, and the same for every block; whoever is first to write the block writes it
//! along (`Reservation::init`), and a flush writes it where that was not confirmed. The bitmap of a new differencing block is
//! empty, in memory from its reservation on, and only a flush writes it. So it is with bits that a commit sets in a block
//! that has space: the flush first makes the payload durable, then the bitmap.
//!
//! A block whose BAT entry cannot be right is `Damaged`: reads and writes of it fail, and no other block's do. While there is
//! such an entry no block is allocated, since the survey before the first allocation refuses the file: the damaged
//! block's data may lie in space that looks free. Blocks that have their space are overwritten as ever.
//!
//! One mutex guards [`State`]: table pages, bitmaps, reservations, space. I/O on metadata is done under it, but for the
//! writes and syncs of a flush.
//!
//! A flush is two ordered passes:
//!
//! ```text
//!   snapshot (under the image lock)      what was committed before this instant
//!   pass 1   bitmaps of new dynamic blocks   invisible before their BAT entry, so no order is needed
//!            sync                            payload and those bitmaps are durable
//!   pass 2   bitmaps of differencing blocks; BAT entries      each shows only what pass 1 made durable
//!            sync                            (left out when there was nothing to write)
//! ```
//!
//! Within pass 2 there is no order, and none is needed. A bit shows a sector whose payload is durable. An entry shows a block
//! whose bitmap is either written, or still the zeros of its fresh space, which pass 1 made durable and which show the
//! parent, as before the flush. Sectors may be torn apart at 512 bytes: entries and bits are independent of each other.
//!
//! Concurrent flushes share passes, and a failed sync refuses all later ones: see [`Barrier`].

use super::{
    PAGE_BYTES, bitmap,
    growth::{FooterPlace, Growth, entry_of},
    image::{KnownLength, check_block, full_bitmap, read_bitmap},
    layout::{Blocks, Piece},
    table::{Table, TableSector},
};
use crate::{BlockState, Commit, ImageError, ImageWriter, Reservation, Result, SectorBitmap};
use diskwright_format::vhd::{BAT_UNUSED, SECTOR_BYTES};
use diskwright_store::{
    Barrier, IoBuf, Store,
    sync::{Mutex, MutexGuard},
};
use std::{
    collections::{BTreeSet, HashMap},
    io,
    ops::Range,
    sync::{Arc, PoisonError},
};

/// Memory for bitmaps beyond which clean ones are dropped, in bytes of bitmap.
const MAX_CLEAN_BITMAP_BYTES: u64 = 16 << 20;

/// A writable image. See the module.
#[derive(Debug)]
pub(super) struct Writing {
    store: Arc<dyn Store>,
    blocks: Blocks,
    footer: FooterPlace,
    len_bytes: KnownLength,
    state: Mutex<State>,
    barrier: Barrier,
}

#[derive(Debug, Default)]
struct State {
    table: Table,
    /// `None` until the first reservation or discard.
    growth: Option<Growth>,
    reserved: HashMap<u64, Piece>,
    /// Dynamic: blocks whose bitmap is not known to be written.
    uninitialised: BTreeSet<u64>,
    /// Bitmaps that were looked at or changed; not those that are known to be full ([`Blocks::bitmaps_are_full`]).
    bitmaps: HashMap<u64, SectorBitmap>,
    dirty_bitmaps: BTreeSet<u64>,
    /// Dynamic: the area before the payload of a new block, its bitmap at the end.
    init: Option<Arc<IoBuf>>,
}

/// What a flush has taken to write.
struct Batch {
    /// Pass 1: (offset, bytes).
    init: Vec<(u64, Arc<IoBuf>)>,
    init_blocks: Vec<u64>,
    /// Pass 2.
    bitmaps: Vec<BitmapWrite>,
    sectors: Vec<TableSector>,
}

struct BitmapWrite {
    block: u64,
    offset_bytes: u64,
    bytes: Vec<u8>,
}

impl Writing {
    pub fn new(store: Arc<dyn Store>, blocks: Blocks, footer: FooterPlace, len_bytes: u64) -> Self {
        Self {
            barrier: Barrier::new(Arc::clone(&store)),
            store,
            blocks,
            footer,
            len_bytes: KnownLength::new(len_bytes),
            state: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn misuse(&self, block: u64, what: &str) -> ImageError {
        let error = io::Error::new(io::ErrorKind::InvalidInput, format!("block {block} {what}"));
        ImageError::io("change a block", &*self.store, self.blocks.entry_offset(block), error)
    }

    pub fn block_states(&self, first_block: u64, out: &mut [BlockState]) -> Result<()> {
        out.fill(BlockState::Absent);
        let inside = self.blocks.count.saturating_sub(first_block).min(out.len() as u64) as usize;
        let mut state = self.lock();
        for (block, out) in (first_block..).zip(&mut out[..inside]) {
            *out = match self.state_of(&mut state, block) {
                Err(ImageError::Corrupt { .. }) => BlockState::Damaged,
                found => found?,
            };
        }
        Ok(())
    }

    pub fn damage(&self, block: u64) -> Result<ImageError> {
        check_block(&*self.store, &self.blocks, block)?;
        let entry = self.lock().table.entry(&*self.store, &self.blocks, block)?;
        let len_bytes = self.len_bytes.covering(&*self.store, self.blocks.place(entry).end)?;
        self.blocks.damage_of(&*self.store, block, entry, len_bytes)
    }

    pub fn sector_bitmap(&self, block: u64) -> Result<SectorBitmap> {
        check_block(&*self.store, &self.blocks, block)?;
        let mut state = self.lock();
        match self.piece(&mut state, block)? {
            None => Ok(SectorBitmap::empty(self.blocks.sectors, SECTOR_BYTES as u32)),
            Some(_) if self.blocks.bitmaps_are_full => Ok(full_bitmap(&self.blocks)),
            Some(piece) => self.bitmap(&mut state, block, &piece).cloned(),
        }
    }

    fn piece(&self, state: &mut State, block: u64) -> Result<Option<Piece>> {
        let entry = state.table.entry(&*self.store, &self.blocks, block)?;
        if entry == BAT_UNUSED {
            return Ok(None);
        }
        let len_bytes = self.len_bytes.covering(&*self.store, self.blocks.place(entry).end)?;
        self.blocks.piece(&*self.store, block, entry, len_bytes)
    }

    fn state_of(&self, state: &mut State, block: u64) -> Result<BlockState> {
        let piece = self.piece(state, block)?;
        Ok(match piece {
            Some(Piece { payload_offset, .. }) if self.is_known_full(state, block) => BlockState::data(payload_offset),
            piece => self.blocks.state_of(piece),
        })
    }

    fn is_known_full(&self, state: &State, block: u64) -> bool {
        self.blocks.bitmaps_are_full
            || state.uninitialised.contains(&block)
            || state.bitmaps.get(&block).is_some_and(|bits| bitmap::is_full_to(bits, self.blocks.sectors_of(block)))
    }

    /// The bitmap of a block that has space, from memory or from the file.
    fn bitmap<'a>(&self, state: &'a mut State, block: u64, piece: &Piece) -> Result<&'a mut SectorBitmap> {
        if !state.bitmaps.contains_key(&block) {
            let is_new = state.uninitialised.contains(&block);
            let bits = if is_new { full_bitmap(&self.blocks) } else { read_bitmap(&*self.store, &self.blocks, piece)? };
            self.remember(state, block, bits);
        }
        Ok(state.bitmaps.entry(block).or_insert_with(|| SectorBitmap::empty(self.blocks.sectors, SECTOR_BYTES as u32)))
    }

    /// Keeps a bitmap in memory; drops clean ones when there are too many.
    fn remember(&self, state: &mut State, block: u64, bits: SectorBitmap) {
        let most = (MAX_CLEAN_BITMAP_BYTES / self.blocks.bitmap_bytes).max(16) as usize;
        if state.bitmaps.len() >= most && !state.table.pinned {
            let dirty = &state.dirty_bitmaps;
            state.bitmaps.retain(|block, _| dirty.contains(block));
        }
        state.bitmaps.insert(block, bits);
    }

    fn growth<'a>(&self, state: &'a mut State) -> Result<&'a mut Growth> {
        match &mut state.growth {
            Some(growth) => Ok(growth),
            empty => Ok(empty.insert(Growth::prepare(&*self.store, &self.blocks, &self.footer, &self.barrier)?)),
        }
    }

    /// The area before a new dynamic block's payload: zeros, then the bitmap, which is all ones.
    fn init_bytes(&self, state: &mut State) -> Arc<IoBuf> {
        let init = state.init.get_or_insert_with(|| {
            let area_bytes = self.blocks.bitmap_area_bytes() as usize;
            let mut buf = IoBuf::new(area_bytes);
            buf[area_bytes - self.blocks.bitmap_bytes as usize..].fill(0xff);
            Arc::new(buf)
        });
        Arc::clone(init)
    }

    /// Where the area of a new block begins.
    fn area_offset(&self, piece: &Piece) -> u64 {
        piece.payload_offset - self.blocks.bitmap_area_bytes()
    }

    /// Gives a reserved block its BAT entry. Returns whether it was reserved.
    fn place(&self, state: &mut State, block: u64) -> Result<bool> {
        let Some(piece) = state.reserved.get(&block).copied() else { return Ok(false) };
        let entry = entry_of(&piece).ok_or_else(|| self.misuse(block, "was reserved beyond 2 TiB"))?;
        state.table.set(&*self.store, &self.blocks, block, entry)?;
        state.reserved.remove(&block);
        Ok(true)
    }

    fn commit_payload(&self, state: &mut State, block: u64, first: u32, count: u32) -> Result<()> {
        let was_reserved = self.place(state, block)?;
        let Some(piece) = self.piece(state, block)? else {
            return Err(self.misuse(block, "has no space: reserve it first"));
        };
        if self.blocks.bitmaps_are_full {
            return Ok(());
        }
        if was_reserved && !self.blocks.is_differencing {
            self.remember(state, block, full_bitmap(&self.blocks));
            return Ok(());
        }
        let valid = self.blocks.sectors_of(block);
        let all = self.blocks.sectors;
        let bits = self.bitmap(state, block, &piece)?;
        let mut changed = bitmap::set(bits, first, count);
        if bitmap::is_full_to(bits, valid) {
            // The sectors of the last block that the disk does not have must not keep it from being full.
            changed |= bitmap::set(bits, valid, all - valid);
        }
        if changed || was_reserved {
            state.dirty_bitmaps.insert(block);
        }
        Ok(())
    }

    fn commit_nothing(&self, state: &mut State, block: u64) -> Result<()> {
        if self.blocks.is_differencing {
            return Err(ImageError::Unsupported {
                path: self.store.name().to_owned(),
                what: "a block of zeros without space in a differencing VHD (the parent would show through)".into(),
                hint: "write zeros over the range instead".into(),
            });
        }
        if self.blocks.batmap.is_some() {
            return Err(ImageError::Unsupported {
                path: self.store.name().to_owned(),
                what: "giving up the space of a block in a VHD with XenServer's batmap (which calls the block full)"
                    .into(),
                hint: "write zeros over the range instead".into(),
            });
        }
        state.bitmaps.remove(&block);
        state.dirty_bitmaps.remove(&block);
        if let Some(piece) = state.reserved.remove(&block) {
            state.uninitialised.remove(&block);
            self.growth(state)?.give_up(&piece);
        }
        if let Some(piece) = self.piece(state, block)? {
            self.growth(state)?;
            state.table.set(&*self.store, &self.blocks, block, BAT_UNUSED)?;
            state.uninitialised.remove(&block);
            self.growth(state)?.give_up(&piece);
        }
        Ok(())
    }

    /// Takes everything that is dirty, as it is at this instant.
    fn take_batch(&self, state: &mut State) -> Result<Batch> {
        let mut batch = Batch { init: Vec::new(), init_blocks: Vec::new(), bitmaps: Vec::new(), sectors: Vec::new() };
        let uninitialised: Vec<_> =
            state.uninitialised.iter().copied().filter(|block| !state.reserved.contains_key(block)).collect();
        for block in uninitialised {
            if let Some(piece) = self.piece(state, block)? {
                batch.init.push((self.area_offset(&piece), self.init_bytes(state)));
                batch.init_blocks.push(block);
            }
        }
        let dirty: Vec<_> = state.dirty_bitmaps.iter().copied().collect();
        for block in dirty {
            let Some(piece) = self.piece(state, block)? else { continue };
            let bits = self.bitmap(state, block, &piece)?;
            let bytes = bitmap::to_file(bits, self.blocks.bitmap_bytes as usize);
            batch.bitmaps.push(BitmapWrite { block, offset_bytes: piece.bitmap_offset, bytes });
        }
        // Nothing fails from here on.
        state.dirty_bitmaps.clear();
        for block in &batch.init_blocks {
            state.uninitialised.remove(block);
        }
        batch.sectors = state.table.take_dirty(&self.blocks);
        state.table.pinned = !(batch.sectors.is_empty() && batch.bitmaps.is_empty());
        Ok(batch)
    }

    fn write(&self, bytes: &[u8], offset_bytes: u64, doing: &'static str) -> Result<()> {
        self.store.write_at(bytes, offset_bytes).map_err(|e| ImageError::io(doing, &*self.store, offset_bytes, e))
    }

    fn first_pass(&self, batch: &Batch) -> Result<()> {
        for (offset_bytes, bytes) in &batch.init {
            self.write(bytes, *offset_bytes, "write the bitmap of a new block")?;
        }
        Ok(self.barrier.sync("make the written data durable")?)
    }

    fn second_pass(&self, batch: &Batch) -> Result<()> {
        if batch.bitmaps.is_empty() && batch.sectors.is_empty() {
            return Ok(());
        }
        for BitmapWrite { offset_bytes, bytes, .. } in &batch.bitmaps {
            self.write(bytes, *offset_bytes, "write a sector bitmap")?;
        }
        for sector in &batch.sectors {
            self.write(&sector.bytes, sector.offset_bytes, "write the block allocation table")?;
        }
        Ok(self.barrier.sync("make the block allocation table durable")?)
    }

    fn run_flush(&self) -> Result<()> {
        let batch = self.take_batch(&mut self.lock())?;
        let first = self.first_pass(&batch);
        let first_failed = first.is_err();
        let result = first.and_then(|()| self.second_pass(&batch));
        let mut state = self.lock();
        state.table.pinned = false;
        if result.is_err() {
            state.table.restore_dirty(&batch.sectors);
            state.dirty_bitmaps.extend(batch.bitmaps.iter().map(|write| write.block));
            if first_failed {
                state.uninitialised.extend(&batch.init_blocks);
            }
        }
        result
    }
}

impl ImageWriter for Writing {
    /// VHD has no identity that changes with its contents. But a footer that a power cut has left missing is put right, even
    /// when no block is allocated, for there are programs that look at one place only.
    fn begin_writing(&self) -> Result<()> {
        if self.footer.tail_offset_bytes.is_none() || !self.footer.copy_is_right {
            self.growth(&mut self.lock())?;
        }
        Ok(())
    }

    fn prepare(&self, _blocks: Range<u64>) -> Result<()> {
        Ok(())
    }

    fn reserve(&self, block: u64) -> Result<Option<Reservation>> {
        check_block(&*self.store, &self.blocks, block)?;
        let mut state = self.lock();
        let state = &mut *state;
        let existing = match state.reserved.get(&block) {
            Some(piece) => Some(*piece),
            None => self.piece(state, block)?,
        };
        if let Some(piece) = existing {
            return Ok(Some(Reservation { store: 0, offset_bytes: piece.payload_offset, init: None }));
        }
        let piece = self.growth(state)?.take(&*self.store)?;
        state.reserved.insert(block, piece);
        let mut init = None;
        if self.blocks.is_differencing {
            state.bitmaps.insert(block, SectorBitmap::empty(self.blocks.sectors, SECTOR_BYTES as u32));
        } else {
            state.uninitialised.insert(block);
            init = Some((self.area_offset(&piece), self.init_bytes(state)));
        }
        debug_assert_eq!(piece.payload_offset % PAGE_BYTES, 0);
        Ok(Some(Reservation { store: 0, offset_bytes: piece.payload_offset, init }))
    }

    fn initialised(&self, block: u64) {
        self.lock().uninitialised.remove(&block);
    }

    fn tracks_sectors(&self) -> bool {
        self.blocks.is_differencing
    }

    fn commit(&self, block: u64, change: Commit) -> Result<Option<BlockState>> {
        check_block(&*self.store, &self.blocks, block)?;
        let mut state = self.lock();
        match change {
            Commit::Whole => self.commit_payload(&mut state, block, 0, self.blocks.sectors)?,
            Commit::Sectors { first, count } => self.commit_payload(&mut state, block, first, count)?,
            Commit::Zero | Commit::Discard => self.commit_nothing(&mut state, block)?,
        }
        self.state_of(&mut state, block).map(Some)
    }

    fn can_store_zero(&self) -> bool {
        !self.blocks.is_differencing && self.blocks.batmap.is_none()
    }

    fn is_dirty(&self) -> bool {
        let state = self.lock();
        state.table.pinned || state.table.is_dirty() || !state.dirty_bitmaps.is_empty()
    }

    fn check_syncs(&self) -> Result<()> {
        Ok(self.barrier.check()?)
    }

    fn flush(&self) -> Result<()> {
        self.barrier.share(|| self.run_flush())
    }

    fn freed_generation(&self) -> u64 {
        self.lock().growth.as_ref().map_or(0, Growth::generation)
    }

    fn recycle(&self, generation: u64) {
        if let Some(growth) = &mut self.lock().growth {
            growth.recycle(&*self.store, generation);
        }
    }

    fn close(&self) -> Result<()> {
        self.flush()?;
        let mut state = self.lock();
        let state = &mut *state;
        let Some(growth) = &mut state.growth else { return Ok(()) };
        for (_, piece) in state.reserved.drain() {
            growth.give_up(&piece);
        }
        growth.trim(&*self.store, &self.blocks)?;
        Ok(self.barrier.sync("make the footer durable")?)
    }
}
