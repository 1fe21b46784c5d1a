//! A flush of a writable VHD: two ordered passes.
//!
//! ```text
//!   snapshot (state mutex, in memory)        all commits before this instant
//!   pass 1   bitmaps of new dynamic blocks   not visible before their BAT entry, so in any order
//!            bitmaps of moved blocks         the same
//!            sync                            payload and those bitmaps are durable
//!   pass 2   bitmaps of differencing blocks; BAT entries: all refer to what pass 1 made durable
//!            sync                            (left out if nothing was written)
//! ```
//!
//! Pass 2 needs no order. A bit refers to a sector whose payload is durable. An entry refers to a
//! block whose bitmap is written, or still has the zeros of its fresh space. Pass 1 made these
//! zeros durable, and with them the block reads the parent's data, as before the flush. A write may
//! be torn at 512 bytes: entries and bits are independent of each other.
//!
//! Concurrent flushes share passes, and after a failed sync every later flush fails: see
//! [`Barrier`](diskwright_store::Barrier).

use super::{
    bitmap,
    layout::Piece,
    table::TableSector,
    write::{State, Writing},
};
use crate::{ImageError, Result};
use diskwright_store::IoBuf;
use std::{
    collections::HashSet,
    sync::{Arc, PoisonError},
};

/// The changes that one flush writes.
#[derive(Default)]
struct Batch {
    /// Pass 1: (offset, bytes).
    init: Vec<(u64, Arc<IoBuf>)>,
    init_blocks: Vec<(u64, Piece)>,
    /// Pass 1: bitmaps of moved blocks, as (offset, bytes).
    moved: Vec<(u64, Vec<u8>)>,
    moved_blocks: Vec<(u64, Piece)>,
    /// Pass 2: bitmaps and BAT sectors.
    bitmaps: Vec<BitmapWrite>,
    sectors: Vec<TableSector>,
}

struct BitmapWrite {
    block: u64,
    piece: Piece,
    bytes: Vec<u8>,
}

impl Writing {
    fn write(&self, bytes: &[u8], offset_bytes: u64, doing: &'static str) -> Result<()> {
        self.store.write_at(bytes, offset_bytes).map_err(|e| ImageError::io(doing, &*self.store, offset_bytes, e))
    }

    fn first_pass(&self, batch: &Batch) -> Result<()> {
        for (offset_bytes, bytes) in &batch.init {
            self.write(bytes, *offset_bytes, "write the bitmap of a new block")?;
        }
        for (offset_bytes, bytes) in &batch.moved {
            self.write(bytes, *offset_bytes, "write the bitmap of a moved block")?;
        }
        Ok(self.barrier.sync("make the written data durable")?)
    }

    fn second_pass(&self, batch: &Batch) -> Result<()> {
        if batch.bitmaps.is_empty() && batch.sectors.is_empty() {
            return Ok(());
        }
        for BitmapWrite { piece, bytes, .. } in &batch.bitmaps {
            self.write(bytes, piece.bitmap_offset, "write a sector bitmap")?;
        }
        for sector in &batch.sectors {
            self.write(&sector.bytes, sector.offset_bytes, "write the block allocation table")?;
        }
        Ok(self.barrier.sync("make the block allocation table durable")?)
    }

    /// Runs both passes.
    pub(super) fn run_flush(&self) -> Result<()> {
        let _turn = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        let batch = self.take_batch(&mut self.lock());
        let first = self.first_pass(&batch);
        let first_failed = first.is_err();
        let result = first.and_then(|()| self.second_pass(&batch));
        let mut state = self.lock();
        state.table.pinned = false;
        let freed = state.freed.take().unwrap_or_default();
        if result.is_err() {
            state.table.restore_dirty(&batch.sectors);
            let bitmaps = batch.bitmaps.iter().map(|write| (write.block, write.piece));
            state.dirty_bitmaps.extend(bitmaps.filter(|(block, _)| !freed.contains(block)));
            if first_failed {
                let init = batch.init_blocks.iter().copied();
                state.uninitialised.extend(init.filter(|(block, _)| !freed.contains(block)));
                let moved = batch.moved_blocks.iter().copied();
                state.moved.extend(moved.filter(|(block, _)| !freed.contains(block)));
            }
        }
        result
    }

    /// Takes all dirty state, as of this instant.
    fn take_batch(&self, state: &mut State) -> Batch {
        let mut batch = Batch::default();
        let committed: Vec<_> = state
            .uninitialised
            .iter()
            .filter(|(block, _)| !state.reserved.contains_key(block))
            .map(|(&block, &piece)| (block, piece))
            .collect();
        for &(block, piece) in &committed {
            batch.init.push((self.area_offset(&piece), self.init_bytes(state)));
            state.uninitialised.remove(&block);
        }
        batch.init_blocks = committed;
        for (block, piece) in std::mem::take(&mut state.moved) {
            batch.moved.push(self.moved_bitmap(state, block, &piece));
            batch.moved_blocks.push((block, piece));
        }
        for (block, piece) in std::mem::take(&mut state.dirty_bitmaps) {
            if let Some(bits) = state.bitmaps.get(&block) {
                let bytes = bitmap::to_file(bits, self.blocks.bitmap_bytes as usize);
                batch.bitmaps.push(BitmapWrite { block, piece, bytes });
            }
        }
        let blocks = Arc::clone(&state.blocks);
        batch.sectors = state.table.take_dirty(&blocks);
        state.table.pinned = !(batch.sectors.is_empty() && batch.bitmaps.is_empty());
        state.freed = Some(HashSet::new());
        batch
    }
}
