//! A flush of a writable qcow2: two ordered passes.
//!
//! ```text
//!   snapshot (state mutex, in memory)   all commits before this instant
//!   pass 1   refcounts, raised and lowered; entries of the refcount table
//!            sync                       payload and refcounts are durable; new tables are zeros
//!   pass 2   L2 tables, L1 table
//!            sync                       (left out if nothing was written)
//! ```
//!
//! Neither pass needs an order within. A refcount that is raised in pass 1 belongs to a cluster
//! that pass 2 refers to, or to nothing. One that is lowered belongs to a cluster whose last
//! reference an earlier flush has removed. An entry of the refcount table names a block that is
//! durable with its own refcount. An entry of the L1 table names a cluster of zeros, or one whose
//! entries lead to durable payload. A write may be torn at 512 bytes: entries are independent.
//!
//! An external data file is synced before the sync of pass 1, so its payload too is durable before
//! the tables that name it.
//!
//! So a flush of new clusters has two syncs of the file, and one of overwritten clusters has one.

use super::{
    counts::sector_piece,
    pages::{Piece, SECTOR_BYTES},
    write::{State, Writing},
};
use crate::Result;
use std::sync::PoisonError;

/// The changes that one flush writes.
#[derive(Default)]
struct Batch {
    counts: Vec<Piece>,
    count_table: Vec<Piece>,
    l2: Vec<Piece>,
    l1: Vec<Piece>,
}

impl Batch {
    /// Takes all dirty state, as of this instant.
    fn take(state: &mut State) -> Self {
        let sectors = std::mem::take(&mut state.dirty_l1);
        let batch = Self {
            counts: state.counts.pages.take_dirty(),
            count_table: state.counts.take_dirty_table(),
            l2: state.l2.take_dirty(),
            l1: sectors.into_iter().map(|sector| sector_piece(&state.l1, state.l1_place, sector)).collect(),
        };
        state.pinned = !(batch.counts.is_empty() && batch.l2.is_empty());
        batch
    }

    fn restore(&self, state: &mut State) {
        state.counts.pages.restore_dirty(&self.counts);
        state.counts.restore_dirty_table(&self.count_table);
        state.l2.restore_dirty(&self.l2);
        let start = state.l1_place.offset_bytes;
        let offsets = self.l1.iter().filter_map(|piece| piece.offset_bytes.checked_sub(start));
        state.dirty_l1.extend(offsets.map(|offset| offset / SECTOR_BYTES));
    }
}

impl Writing {
    /// Runs both passes.
    pub(super) fn run_flush(&self) -> Result<()> {
        let _turn = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        self.flush_alone()
    }

    /// The same for a caller that holds `flushing`.
    pub(super) fn flush_alone(&self) -> Result<()> {
        let batch = Batch::take(&mut self.lock());
        let result = self.carry_out(&batch);
        let mut state = self.lock();
        state.pinned = false;
        if result.is_err() {
            batch.restore(&mut state);
        }
        result
    }

    fn carry_out(&self, batch: &Batch) -> Result<()> {
        self.write_pieces("write the refcounts", &batch.counts)?;
        self.write_pieces("write the refcount table", &batch.count_table)?;
        self.sync_data_file()?;
        self.barrier.sync("make the written data durable")?;
        if batch.l2.is_empty() && batch.l1.is_empty() {
            return Ok(());
        }
        self.write_pieces("write the L2 tables", &batch.l2)?;
        self.write_pieces("write the L1 table", &batch.l1)?;
        Ok(self.barrier.sync("make the tables durable")?)
    }

    pub(super) fn write_pieces(&self, doing: &'static str, pieces: &[Piece]) -> Result<()> {
        for Piece { offset_bytes, bytes } in pieces {
            let written = self.store().write_at(bytes, *offset_bytes);
            written.map_err(|error| self.io(doing, *offset_bytes, error))?;
        }
        Ok(())
    }
}
