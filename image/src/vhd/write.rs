//! Writes to a dynamic or differencing VHD.
//!
//! ```text
//!   reserve ─▶ reserved ─ commit ─▶ BAT entry in memory (dirty) ─ flush ─▶ in the file
//!                                   bits in memory (dirty)
//! ```
//!
//! The bitmap of a new dynamic block is all ones, and the same for every block. The first write of
//! the block writes it along with the payload (`Reservation::init`). A flush writes it if that
//! write was not confirmed. The bitmap of a new differencing block is empty at first. It exists in
//! memory from the reservation on, and only a flush writes it. The same holds for bits that a
//! commit sets in a block that has space: the flush first makes the payload durable, then the
//! bitmap.
//!
//! A block with an invalid BAT entry is `Damaged`: its reads and writes fail, and no other block is
//! affected. While there is such an entry no block is allocated: the survey before the first
//! allocation refuses the file, because the damaged block's data may lie in space that looks free.
//! Blocks that have space can still be overwritten.
//!
//! One mutex guards [`State`]: table pages, bitmaps, reservations, space. No I/O happens under it,
//! because the disk above calls `reserve` and `commit` under its own lock. What is not in memory is
//! noted as a [`Prerequisite`], and the result is `None`: the caller releases its lock, calls
//! `prepare.rs`, and retries. Everything that can fail or be missing is checked before anything is
//! changed. The mutex `preparing` is held while the file grows. Lock order: `preparing`, then the
//! state mutex. `reads.rs` reads the tables, `flush.rs` makes them durable.

use super::{
    PAGE_BYTES, bitmap,
    growth::{FooterPlace, Growth, entry_of},
    layout::{Blocks, Piece},
    sizes,
    table::Table,
};
use crate::{
    BlockState, Commit, ImageError, ImageWriter, LinkageId, MoveTo, ParentLink, Reservation, Result, SectorBitmap,
    needs::Prerequisites,
};
use diskwright_format::vhd::{BAT_UNUSED, SECTOR_BYTES};
use diskwright_store::{
    Barrier, IoBuf, Store,
    sync::{Mutex, MutexGuard},
};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    io,
    ops::Range,
    sync::{Arc, PoisonError},
};
use uuid::Uuid;

/// Limits for the memory of tables.
#[derive(Debug)]
pub(super) struct Limits {
    /// Clean pages of the BAT are dropped above this number.
    pub table_pages: usize,
    /// Clean bitmaps are dropped above this number of bytes.
    bitmap_bytes: u64,
    /// A flush is due above this number of dirty bytes.
    pub dirty_bytes: u64,
}

impl Default for Limits {
    /// 4 MiB of the BAT, which covers nearly every disk; 16 MiB with the bitmaps.
    fn default() -> Self {
        Self { table_pages: 1024, bitmap_bytes: 12 << 20, dirty_bytes: MAX_DIRTY_BYTES }
    }
}

impl Limits {
    /// A quarter for the BAT, a quarter for dirty state, the rest for bitmaps. Each at least as
    /// much as one request needs.
    fn of(bytes: u64) -> Self {
        Self {
            table_pages: usize::try_from(bytes / 4 / PAGE_BYTES).unwrap_or(usize::MAX).max(16),
            bitmap_bytes: bytes / 2,
            dirty_bytes: (bytes / 4).clamp(64 << 10, MAX_DIRTY_BYTES),
        }
    }
}

const MAX_DIRTY_BYTES: u64 = 16 << 20;

/// The state of a writable image, with its locks.
#[derive(Debug)]
pub(super) struct Writing {
    pub(super) store: Arc<dyn Store>,
    /// The geometry at open. The state has the current one, which may differ in size, header and
    /// offset of the table.
    pub(super) blocks: Arc<Blocks>,
    pub(super) footer: FooterPlace,
    pub(super) preparing: Mutex<()>,
    /// Held by a flush from the moment in which it takes the dirty state, and while the table is
    /// moved.
    pub(super) flushing: Mutex<()>,
    state: Mutex<State>,
    pub(super) barrier: Barrier,
}

/// What a block's reservation or commit lacked, besides the page of its BAT entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prerequisite {
    /// The walk over the blocks, which precedes every change of a BAT entry.
    Growth,
    /// That walk, and space that reads as zeros.
    Space,
    /// The block's sector bitmap, which is not in memory.
    Bitmap,
}

#[derive(Debug)]
pub(super) struct State {
    /// Current offsets and size of the disk.
    pub(super) blocks: Arc<Blocks>,
    /// The link to the parent, if it was changed since the open.
    pub(super) link: Option<ParentLink>,
    /// The unique id, if it was changed since the open.
    pub(super) unique_id: Option<Uuid>,
    pub(super) table: Table,
    pub(super) limits: Limits,
    /// `None` until the first reservation or discard.
    pub(super) growth: Option<Growth>,
    /// The file's length in bytes, to validate BAT entries.
    pub(super) len_bytes: u64,
    pub(super) reserved: HashMap<u64, Piece>,
    /// Dynamic: blocks whose bitmap may not be written yet.
    pub(super) uninitialised: BTreeMap<u64, Piece>,
    /// Blocks that are being moved, with their new space.
    pub(super) moving: HashMap<u64, Piece>,
    /// Blocks that were moved since the last flush: their bitmaps must be durable before the BAT.
    pub(super) moved: BTreeMap<u64, Piece>,
    /// Bitmaps that were read or changed. None if all are known to be full
    /// ([`Blocks::bitmaps_are_full`]).
    pub(super) bitmaps: HashMap<u64, SectorBitmap>,
    pub(super) dirty_bitmaps: BTreeMap<u64, Piece>,
    /// During a flush: blocks that were freed since it took the dirty state. If the flush fails, it
    /// must not make their bitmaps dirty again.
    pub(super) freed: Option<HashSet<u64>>,
    /// Drop counter: grows when table pages or bitmaps are dropped from memory.
    pub(super) drops: u64,
    pub(super) needs: Prerequisites<Prerequisite>,
    /// Dynamic: the area before the payload of every new block, with its bitmap at the end.
    init: Option<Arc<IoBuf>>,
}

impl Writing {
    pub fn new(store: Arc<dyn Store>, blocks: Blocks, footer: FooterPlace, len_bytes: u64) -> Self {
        let blocks = Arc::new(blocks);
        let state = State {
            blocks: Arc::clone(&blocks),
            link: None,
            unique_id: None,
            table: Table::default(),
            limits: Limits::default(),
            growth: None,
            len_bytes,
            reserved: HashMap::new(),
            uninitialised: BTreeMap::new(),
            moving: HashMap::new(),
            moved: BTreeMap::new(),
            bitmaps: HashMap::new(),
            dirty_bitmaps: BTreeMap::new(),
            freed: None,
            drops: 0,
            needs: Prerequisites::default(),
            init: None,
        };
        Self {
            barrier: Barrier::new(Arc::clone(&store)),
            store,
            blocks,
            footer,
            preparing: Mutex::new(()),
            flushing: Mutex::new(()),
            state: Mutex::new(state),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Current offsets and size of the disk.
    pub(super) fn blocks(&self) -> Arc<Blocks> {
        Arc::clone(&self.lock().blocks)
    }

    pub(super) fn misuse(&self, block: u64, what: &str) -> ImageError {
        let error = io::Error::new(io::ErrorKind::InvalidInput, format!("block {block} {what}"));
        ImageError::io("change a block", &*self.store, self.blocks.entry_offset(block), error)
    }

    /// The space of a block. The outer `None`: the page of its entry is not in memory.
    pub(super) fn piece(&self, state: &State, block: u64) -> Result<Option<Option<Piece>>> {
        state.table.entry(block).map(|entry| self.piece_of(state, block, entry)).transpose()
    }

    fn state_of(&self, state: &State, block: u64) -> Result<Option<BlockState>> {
        Ok(self.piece(state, block)?.map(|piece| self.state_of_piece(state, block, piece)))
    }

    /// Keeps a bitmap in memory. Drops the clean ones if there are too many.
    pub(super) fn remember(&self, state: &mut State, block: u64, bits: SectorBitmap) {
        let most = usize::try_from(state.limits.bitmap_bytes / self.blocks.bitmap_bytes).unwrap_or(usize::MAX).max(16);
        if state.bitmaps.len() >= most + state.dirty_bitmaps.len() && !state.table.pinned {
            let dirty = &state.dirty_bitmaps;
            state.bitmaps.retain(|block, _| dirty.contains_key(block));
            state.drops += 1;
        }
        state.bitmaps.insert(block, bits);
    }

    /// The area before the payload of a new dynamic block: zeros, then the bitmap, which is all
    /// ones.
    pub(super) fn init_bytes(&self, state: &mut State) -> Arc<IoBuf> {
        let init = state.init.get_or_insert_with(|| {
            let area_bytes = self.blocks.bitmap_area_bytes() as usize;
            let mut buf = IoBuf::new(area_bytes);
            buf[area_bytes - self.blocks.bitmap_bytes as usize..].fill(0xff);
            Arc::new(buf)
        });
        Arc::clone(init)
    }

    /// Offset of the area of a new block.
    pub(super) fn area_offset(&self, piece: &Piece) -> u64 {
        piece.payload_offset - self.blocks.bitmap_area_bytes()
    }

    /// Commits sectors with data. `None` if something is not in memory.
    fn commit_payload(&self, state: &mut State, block: u64, first: u32, count: u32) -> Result<Option<()>> {
        let Some(placed) = self.piece(state, block)? else { return Ok(None) };
        let reserved = state.reserved.get(&block).copied();
        let Some(piece) = reserved.or(placed) else {
            return Err(self.misuse(block, "has no space: reserve it first"));
        };
        let is_new = reserved.is_some();
        let needs_bits = !self.blocks.bitmaps_are_full && (!is_new || self.blocks.is_differencing);
        if needs_bits && !state.bitmaps.contains_key(&block) {
            let bits = if state.uninitialised.contains_key(&block) {
                bitmap::full(&self.blocks)
            } else if is_new {
                SectorBitmap::empty(self.blocks.sectors, SECTOR_BYTES as u32)
            } else {
                state.needs.note(block, Prerequisite::Bitmap);
                return Ok(None);
            };
            self.remember(state, block, bits);
        }
        if is_new {
            let entry = entry_of(&piece).ok_or_else(|| self.misuse(block, "was reserved beyond 2 TiB"))?;
            state.table.set(block, entry);
            state.reserved.remove(&block);
        }
        if self.blocks.bitmaps_are_full {
            return Ok(Some(()));
        }
        if !needs_bits {
            self.remember(state, block, bitmap::full(&self.blocks));
            return Ok(Some(()));
        }
        let valid = state.blocks.sectors_of(block);
        let all = self.blocks.sectors;
        let Some(bits) = state.bitmaps.get_mut(&block) else { return Ok(None) };
        let mut changed = bitmap::set(bits, first, count);
        if bitmap::is_full_to(bits, valid) {
            // The sectors of the last block beyond the end of the disk must not prevent a full
            // bitmap.
            changed |= bitmap::set(bits, valid, all - valid);
        }
        if changed || is_new {
            state.dirty_bitmaps.insert(block, piece);
        }
        Ok(Some(()))
    }

    /// Removes a block's mapping. `None` if something is not in memory.
    fn commit_nothing(&self, state: &mut State, block: u64, change: Commit) -> Result<Option<()>> {
        if self.blocks.is_differencing && change != Commit::Absent {
            return Err(ImageError::Unsupported {
                path: self.store.name().to_owned(),
                what: "a block of zeros without space in a differencing VHD (its sectors would read the parent's data)"
                    .into(),
                hint: "write zeros over the range instead".into(),
            });
        }
        if self.blocks.batmap.is_some() {
            return Err(ImageError::Unsupported {
                path: self.store.name().to_owned(),
                what: "freeing the space of a block in a VHD with XenServer's batmap (which may say that the block is full)"
                    .into(),
                hint: "write zeros over the range instead".into(),
            });
        }
        let Some(placed) = self.piece(state, block)? else { return Ok(None) };
        let had = [state.reserved.get(&block).copied(), placed];
        if had == [None, None] {
            return Ok(Some(()));
        }
        let Some(growth) = &mut state.growth else {
            state.needs.note(block, Prerequisite::Growth);
            return Ok(None);
        };
        had.iter().flatten().for_each(|piece| growth.free(piece));
        if placed.is_some() {
            state.table.set(block, BAT_UNUSED);
        }
        state.reserved.remove(&block);
        state.uninitialised.remove(&block);
        state.moved.remove(&block);
        state.dirty_bitmaps.remove(&block);
        if let Some(freed) = &mut state.freed {
            freed.insert(block);
        }
        if state.bitmaps.remove(&block).is_some() {
            state.drops += 1;
        }
        Ok(Some(()))
    }
}

impl ImageWriter for Writing {
    /// Repairs a footer that is missing after a power cut, even if no block will be allocated: some
    /// programs read only one of the two. VHD has no identity that changes with its contents.
    fn begin_writing(&self) -> Result<()> {
        if self.footer.tail_offset_bytes.is_none() || !self.footer.copy_is_right {
            self.begin_growth_alone()?;
        }
        Ok(())
    }

    fn set_linkage_id(&self, linkage_id: LinkageId) -> Result<()> {
        self.replace_unique_id(linkage_id.to_uuid())
    }

    fn set_parent_link(&self, link: &ParentLink) -> Result<()> {
        self.replace_link(link)
    }

    fn prepare(&self, blocks: Range<u64>) -> Result<()> {
        self.prepare_blocks(blocks)
    }

    fn reserve(&self, block: u64) -> Result<Option<Reservation>> {
        let mut state = self.lock();
        let state = &mut *state;
        state.blocks.check_block(&*self.store, block)?;
        let Some(placed) = self.piece(state, block)? else { return Ok(None) };
        if let Some(piece) = state.reserved.get(&block).copied().or(placed) {
            return Ok(Some(Reservation { store: 0, offset_bytes: piece.payload_offset, init: None }));
        }
        let taken = match &mut state.growth {
            Some(growth) => growth.take(&*self.store)?,
            None => None,
        };
        let Some(piece) = taken else {
            state.needs.note(block, Prerequisite::Space);
            return Ok(None);
        };
        state.reserved.insert(block, piece);
        let mut init = None;
        if self.blocks.is_differencing {
            state.bitmaps.insert(block, SectorBitmap::empty(self.blocks.sectors, SECTOR_BYTES as u32));
        } else {
            state.uninitialised.insert(block, piece);
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

    fn can_forget_blocks(&self) -> bool {
        self.blocks.batmap.is_none()
    }

    fn commit(&self, block: u64, change: Commit) -> Result<Option<BlockState>> {
        let mut state = self.lock();
        state.blocks.check_block(&*self.store, block)?;
        let done = match change {
            Commit::Whole => self.commit_payload(&mut state, block, 0, self.blocks.sectors)?,
            Commit::Sectors { first, count } => self.commit_payload(&mut state, block, first, count)?,
            Commit::Zero | Commit::Discard | Commit::Absent => self.commit_nothing(&mut state, block, change)?,
            Commit::Moved => self.commit_moved(&mut state, block)?,
        };
        if done.is_some() { self.state_of(&state, block) } else { Ok(None) }
    }

    fn resize(&self, size_bytes: u64) -> Result<()> {
        self.grow(size_bytes)
    }

    fn check_growth(&self, size_bytes: u64) -> Result<()> {
        self.check_new_size(&self.blocks(), size_bytes).map(drop)
    }

    fn check_shrink(&self, size_bytes: u64) -> Result<()> {
        sizes::check_smaller(&*self.store, &self.blocks(), size_bytes).map(drop)
    }

    fn shrink(&self, size_bytes: u64) -> Result<()> {
        self.make_smaller(size_bytes)
    }

    fn can_store_zero(&self) -> bool {
        !self.blocks.is_differencing && self.blocks.batmap.is_none()
    }

    fn limit_tables(&self, bytes: u64) {
        // Excess pages and bitmaps are dropped when the next one is inserted.
        self.lock().limits = Limits::of(bytes);
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
        self.recycle_pieces(generation);
    }

    fn begin_compacting(&self) -> Result<()> {
        self.begin_compacting_file()
    }

    fn reserve_move(&self, block: u64) -> Result<Option<MoveTo>> {
        self.reserve_move_of(&mut self.lock(), block)
    }

    fn recycle_for_moves(&self, generation: u64) {
        if let Some(growth) = &mut self.lock().growth {
            growth.recycle_for_moves(generation);
        }
    }

    fn give_up_moves(&self) {
        let mut state = self.lock();
        let moving = std::mem::take(&mut state.moving);
        if let Some(growth) = &mut state.growth {
            moving.values().for_each(|piece| growth.give_back(piece));
        }
    }

    fn cut_free_tail(&self) -> Result<()> {
        self.cut_tail()
    }

    fn close(&self) -> Result<()> {
        self.flush()?;
        let (growth, reserved, moving) = {
            let mut state = self.lock();
            (state.growth.take(), std::mem::take(&mut state.reserved), std::mem::take(&mut state.moving))
        };
        let Some(mut growth) = growth else { return Ok(()) };
        reserved.values().chain(moving.values()).for_each(|piece| growth.free(piece));
        let trimmed = growth.trim(&*self.store, &self.blocks());
        self.lock().growth = Some(growth);
        trimmed?;
        Ok(self.barrier.sync("make the footer durable")?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CreateOptions, DiskType};
    use diskwright_store::MemoryStore;

    /// Each block of 2 MiB has a bitmap of 512 bytes.
    #[test]
    fn tables_and_bitmaps_stay_within_the_limit() {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new("child"));
        let parent = Some(ParentLink { relative_path: Some(r".\base.vhd".into()), ..ParentLink::default() });
        let options = CreateOptions {
            disk_type: DiskType::Differencing,
            size_bytes: 1 << 40,
            block_bytes: Some(2 << 20),
            logical_sector_bytes: 512,
            physical_sector_bytes: 512,
            parent,
            preallocate: false,
            disk_id: None,
            own: Default::default(),
        };
        super::super::create(Arc::clone(&store), &options).unwrap();
        let (layout, _) = super::super::layout::Layout::read(&*store).unwrap();
        let footer = FooterPlace::of(&layout);
        let writing = Writing::new(store, layout.blocks.unwrap(), footer, layout.len_bytes);
        writing.limit_tables(0);
        let held = |writing: &Writing| writing.lock().bitmaps.len();
        for block in 0..40 {
            let bits = SectorBitmap::empty(writing.blocks.sectors, SECTOR_BYTES as u32);
            writing.remember(&mut writing.lock(), block, bits);
            assert!(held(&writing) <= 16, "{} bitmaps", held(&writing));
        }
        // Pages of 1024 entries each.
        for page in 0..200 {
            let block = page * 1024;
            writing.prepare(block..block + 1).unwrap();
            assert!(writing.lock().table.missing(block).is_none());
        }
        let present = (0..200).filter(|page| writing.lock().table.missing(page * 1024).is_none()).count();
        assert!(present <= 16, "{present} pages");
    }
}
