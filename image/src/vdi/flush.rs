//! A flush of a writable VDI: ordered passes.
//!
//! ```text
//!   snapshot (state mutex, in memory)   all commits before this instant
//!   pass 1   sync                       payload is durable, and the header that counts its space
//!   pass 2   changed pages of the map; sync     (left out if no page changed)
//! ```
//!
//! Pass 2 needs no order. An entry refers to a block whose payload is durable. A write may be torn
//! at 512 bytes: entries are independent of each other, and no entry lies in two sectors.

use super::write::{PAGE_ENTRIES, State, Writing};
use crate::Result;
use std::{collections::BTreeSet, sync::PoisonError};

/// The changes that one flush writes.
struct Batch {
    dirty: BTreeSet<u64>,
    /// Offset in the file, and bytes.
    writes: Vec<(u64, Vec<u8>)>,
}

impl Writing {
    /// Runs all passes.
    pub(super) fn run_flush(&self) -> Result<()> {
        let _turn = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        let batch = self.take_batch(&mut self.lock());
        let result = self.carry_out(&batch);
        let mut state = self.lock();
        state.pinned = false;
        if result.is_err() {
            state.dirty.extend(batch.dirty);
        }
        result
    }

    fn carry_out(&self, batch: &Batch) -> Result<()> {
        self.barrier.sync("make the written data durable")?;
        if batch.writes.is_empty() {
            return Ok(());
        }
        for (offset_bytes, bytes) in &batch.writes {
            let written = self.barrier.write(bytes, *offset_bytes);
            written.map_err(self.io("write the block map", *offset_bytes))?;
        }
        Ok(self.barrier.sync("make the block map durable")?)
    }

    /// Takes all dirty state, as of this instant.
    fn take_batch(&self, state: &mut State) -> Batch {
        let dirty = std::mem::take(&mut state.dirty);
        let mut writes = Vec::with_capacity(dirty.len());
        for &page in &dirty {
            let Some(words) = state.pages.get(&page) else { continue };
            let bytes = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            writes.push((self.layout.entry_at(page * PAGE_ENTRIES), bytes));
        }
        state.pinned = !writes.is_empty();
        Batch { dirty, writes }
    }
}
