//! Moves the L1 table and the refcount table to lower places in the file, for `compact`: a growth
//! may have put them at its end.
//!
//! ```text
//!   adjacent free clusters below ─▶ refcounts 1 ─▶ flush ─▶ copy of the table ─▶ sync
//!   ─▶ header: the new place (one sector) ─▶ sync ─▶ refcounts of the old place lowered
//! ```
//!
//! Until the header counts, the table at its old place is whole. Entries that change meanwhile stay
//! dirty in memory, and the next flush writes them to the new place. The caller holds `preparing`,
//! so no table is made meanwhile; `flushing` is held while the place changes.

use super::{
    counts::CountPrerequisite,
    write::{State, Writing},
};
use crate::Result;
use diskwright_format::qcow2::{Header, Place};
use std::sync::PoisonError;

/// Free clusters that are looked at for adjacent ones.
const LOOKED_AT_MAX: usize = 1 << 20;
const SECTOR_BYTES: u64 = super::pages::SECTOR_BYTES;

impl Writing {
    pub(super) fn move_main_tables(&self) -> Result<()> {
        let (l1, counts) = {
            let state = self.lock();
            (state.l1_place, state.counts.table)
        };
        if let Some(to) = self.take_adjacent(l1)? {
            self.move_l1(l1, Place { offset_bytes: to, ..l1 })?;
        }
        match self.take_adjacent(counts)? {
            Some(to) => self.move_count_table(counts, Place { offset_bytes: to, ..counts }),
            None => Ok(()),
        }
    }

    /// Takes as many adjacent free clusters below a table as it has, with refcount 1 in memory.
    /// They may hold stale data.
    fn take_adjacent(&self, table: Place) -> Result<Option<u64>> {
        let cluster_bytes = self.cluster_bytes();
        let needed = table.len_bytes.div_ceil(cluster_bytes);
        let first = {
            let mut state = self.lock();
            let Some(space) = &mut state.space else { return Ok(None) };
            let mut seen: Vec<u64> = Vec::new();
            let mut run = 0;
            while run < needed && seen.len() < LOOKED_AT_MAX {
                let Some(at) = space.take_for_move(cluster_bytes, table.offset_bytes) else { break };
                run = if seen.last().is_some_and(|last| last + cluster_bytes == at) { run + 1 } else { 1 };
                seen.push(at);
            }
            let has_run = run == needed && needed > 0;
            let kept = if has_run { seen.split_off(seen.len() - needed as usize) } else { Vec::new() };
            seen.iter().for_each(|&at| space.add_free(at, cluster_bytes));
            // All of them must lie below.
            let Some(&first) = kept.first() else { return Ok(None) };
            if first + needed * cluster_bytes > table.offset_bytes {
                kept.iter().for_each(|&at| space.add_free(at, cluster_bytes));
                return Ok(None);
            }
            first
        };
        let clusters = first / cluster_bytes..first / cluster_bytes + needed;
        for cluster in clusters.clone() {
            loop {
                let set = self.lock().counts.set(cluster, 1);
                match set {
                    Ok(()) => break,
                    Err(CountPrerequisite::Page(page)) => self.load_counts(page)?,
                    // A free cluster whose range has no refcount block stays free.
                    Err(CountPrerequisite::Block | CountPrerequisite::Entry) => {
                        self.put_back(clusters.clone());
                        return Ok(None);
                    }
                }
            }
        }
        Ok(Some(first))
    }

    /// Makes clusters free again that no table names.
    fn put_back(&self, clusters: std::ops::Range<u64>) {
        for cluster in clusters {
            self.change_count(cluster, |_| 0);
            if let Some(space) = &mut self.lock().space {
                space.add_free(cluster * self.cluster_bytes(), self.cluster_bytes());
            }
        }
    }

    /// Writes the words of a table to a new place, and zeros to the end of its last cluster.
    fn write_table(&self, doing: &'static str, to: Place, words: &[u64]) -> Result<()> {
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        bytes.resize(bytes.len().next_multiple_of(self.cluster_bytes() as usize), 0);
        let written = self.store().write_at(&bytes, to.offset_bytes);
        written.map_err(|error| self.io(doing, to.offset_bytes, error))
    }

    fn move_l1(&self, old: Place, new: Place) -> Result<()> {
        {
            let _turn = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
            // The refcounts of the new place are durable before the header names it.
            self.flush_alone()?;
            let words = self.lock().l1.clone();
            self.write_table("move the L1 table", new, &words)?;
            self.barrier.sync("make the moved L1 table durable")?;
            let (at, field) = Header::l1_field(new);
            self.change_front(&[(at, &field)])?;
            let mut state = self.lock();
            let State { l1_place, dirty_l1, .. } = &mut *state;
            *l1_place = new;
            // Entries that changed since the copy are written by the next flush.
            dirty_l1.extend(0..new.len_bytes.div_ceil(SECTOR_BYTES));
        }
        self.give_up_region(old);
        Ok(())
    }

    fn move_count_table(&self, old: Place, new: Place) -> Result<()> {
        {
            let _turn = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
            self.flush_alone()?;
            // Each entry in memory names a block that is durable.
            let blocks = self.lock().counts.blocks().to_vec();
            self.write_table("move the refcount table", new, &blocks)?;
            self.barrier.sync("make the moved refcount table durable")?;
            let (at, field) = self.layout.front.header.refcount_table_field(new);
            self.change_front(&[(at, &field)])?;
            self.lock().counts.replace_table(new, blocks);
        }
        self.give_up_region(old);
        Ok(())
    }
}
