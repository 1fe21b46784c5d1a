//! A shorter file: clusters and L2 tables move to lower places, refcount blocks that count nothing
//! are given up, free space at the end is cut off.
//!
//! ```text
//!   reserve_move      a free cluster below ─▶ refcount 1 ─ payload copied ─ commit Moved
//!   move_tables       a free cluster below ─▶ refcount 1 ─▶ table copied ─▶ L1 entry in memory
//!   close             refcount blocks at the end of the file that count only themselves
//! ```
//!
//! A cluster with subclusters moves as a whole, with the blocks that share it: the disk above holds
//! all of them.
//!
//! A table is copied while no flush runs (`flushing`): then a page that changes stays in memory.
//! Such pages move along and are written to the new place by the next flush. Its first pass makes
//! the copy and its refcount durable, its second one names it. The old place is quarantined like
//! any freed cluster. The L1 table and the refcount table move to adjacent free clusters below, and
//! one write of the header names the new place (`main_tables.rs`). Refcount blocks in use stay
//! where they are, and so does everything that a snapshot has.
//!
//! A table that a snapshot has too is copied before the disk's entries change (prepare.rs). Such a
//! table has no changes in memory, so it is copied also during a flush.

use super::{
    check_walk::each_word,
    counts::CountPrerequisite,
    layout::Layout,
    write::{FreedSpace, Prerequisite, State, Writing},
};
use crate::{MovePlace, MoveTo, Result, space::Space};
use diskwright_format::qcow2::{L1Entry, Place};
use diskwright_store::Store;
use std::{cmp::Reverse, ops::Range, sync::PoisonError};

/// The length of a file with so many mapped clusters and L2 tables, without gaps: with the header,
/// the other tables where they are, and the refcounts of all that.
fn packed_len(layout: &Layout, [l1, counts]: [Place; 2], l2_tables: u64, mapped: u64) -> u64 {
    let cluster_bytes = layout.geometry.cluster_bytes();
    let clusters = |place: Place| place.len_bytes.div_ceil(cluster_bytes);
    let end = |place: Place| place.offset_bytes.saturating_add(place.len_bytes).div_ceil(cluster_bytes);
    let others = 1 + clusters(l1) + clusters(counts) + l2_tables;
    let used = others.saturating_add(mapped);
    let per_block = layout.front.header.refcount_width.per_block(cluster_bytes);
    let mut count_blocks = 1;
    while used.saturating_add(count_blocks).div_ceil(per_block) > count_blocks {
        count_blocks = used.saturating_add(count_blocks).div_ceil(per_block);
    }
    used.saturating_add(count_blocks).max(end(l1)).max(end(counts)).saturating_mul(cluster_bytes)
}

/// [`Image::packed_len_bytes`](crate::Image::packed_len_bytes) of an image that is only read.
///
/// # Errors
/// `Io`.
pub(super) fn packed_len_read_only(store: &dyn Store, layout: &Layout, clusters: u64) -> Result<u64> {
    let mut l2_tables = 0;
    each_word(store, "read the L1 table", layout.l1, layout.front.file_bytes, &mut |_, _| {
        l2_tables += 1;
        Ok(())
    })?;
    Ok(packed_len(layout, [layout.l1, layout.front.header.refcount_table], l2_tables, clusters))
}

impl Writing {
    /// [`Image::packed_len_bytes`](crate::Image::packed_len_bytes).
    pub(super) fn packed_len_bytes(&self, clusters: u64) -> u64 {
        let state = self.lock();
        let l2_tables = state.l1.iter().filter(|&&word| word != 0).count() as u64;
        packed_len(&self.layout, [state.l1_place, state.counts.table], l2_tables, clusters)
    }

    /// The blocks of the cluster of a block.
    pub(super) fn blocks_of_cluster_of(&self, block: u64) -> Range<u64> {
        let subclusters = self.layout.geometry.subclusters();
        let first = block / subclusters * subclusters;
        first..(first + subclusters).min(self.layout.blocks())
    }

    pub(super) fn reserve_move_of(&self, state: &mut State, block: u64) -> Result<Option<MoveTo>> {
        let cluster_bytes = self.cluster_bytes();
        let (cluster, _) = self.split(block);
        let Some(entry) = self.entry(state, cluster)? else { return Ok(None) };
        let Some(from) = self.own_data_of(entry).filter(|_| self.data_file.is_none()) else {
            return Ok(Some(MoveTo::Stay));
        };
        let blocks = self.blocks_of_cluster_of(block);
        // A part of the cluster that is reserved or being zeroed has no copy.
        let is_changing = self.has_subclusters()
            && (state.cleaning == Some(cluster) || blocks.clone().any(|block| state.reserved.contains_key(&block)));
        if is_changing {
            return Ok(Some(MoveTo::Stay));
        }
        let needing = block;
        let block = blocks.start;
        let place =
            |to_bytes| MoveTo::Place(MovePlace { store: 0, from_bytes: from, to_bytes, len_bytes: cluster_bytes });
        if let Some(&to) = state.moving.get(&block) {
            if to < from {
                return Ok(Some(place(to)));
            }
            state.moving.remove(&block);
            state.free(FreedSpace::Cluster(to));
        }
        let Some(space) = &mut state.space else {
            state.needs.note(needing, Prerequisite::Survey);
            return Ok(None);
        };
        let Some(to) = space.take_for_move(cluster_bytes, from) else { return Ok(Some(MoveTo::Stay)) };
        match state.counts.set(to / cluster_bytes, 1) {
            Ok(()) => {
                state.moving.insert(block, to);
                Ok(Some(place(to)))
            }
            Err(missing) => {
                space.add_free(to, cluster_bytes);
                // A free cluster whose range has no refcount block stays free.
                let CountPrerequisite::Page(page) = missing else { return Ok(Some(MoveTo::Stay)) };
                state.needs.note(needing, Prerequisite::Counts(page));
                Ok(None)
            }
        }
    }

    /// Moves L2 tables to lower places, the highest first.
    pub(super) fn move_l2_tables(&self) -> Result<()> {
        self.barrier.check()?;
        let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        self.survey()?;
        self.move_main_tables()?;
        let mut tables: Vec<(Reverse<u64>, u64)> = {
            let state = self.lock();
            let offsets = (0..).zip(&state.l1).filter_map(|(index, &word)| {
                let entry = Some(L1Entry(word)).filter(|entry| entry.is_copied())?;
                let offset_bytes = self.layout.l2_table(entry).ok().flatten()?;
                Some((Reverse(offset_bytes), index))
            });
            offsets.collect()
        };
        tables.sort_unstable();
        for (Reverse(from), index) in tables {
            let Some(to) = self.take_lower(from)? else { return Ok(()) };
            if let Err(error) = self.move_table(index, from, to) {
                self.lock().free(FreedSpace::Cluster(to));
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes the lowest free cluster, if it lies below `limit_bytes`, and makes its refcount 1. The
    /// cluster may hold stale data. The caller holds `preparing`.
    fn take_lower(&self, limit_bytes: u64) -> Result<Option<u64>> {
        let cluster_bytes = self.cluster_bytes();
        loop {
            let page = {
                let mut state = self.lock();
                let State { space: Some(space), counts, .. } = &mut *state else { return Ok(None) };
                let Some(to) = space.take_for_move(cluster_bytes, limit_bytes) else { return Ok(None) };
                match counts.set(to / cluster_bytes, 1) {
                    Ok(()) => return Ok(Some(to)),
                    Err(missing) => {
                        space.add_free(to, cluster_bytes);
                        let CountPrerequisite::Page(page) = missing else { return Ok(None) };
                        page
                    }
                }
            };
            self.load_counts(page)?;
        }
    }

    /// Moves the L2 table of an L1 entry.
    fn move_table(&self, index: u64, from: u64, to: u64) -> Result<()> {
        let _turn = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        self.copy_table(index, from, to)
    }

    /// Gives an L1 entry a copy of its L2 table, of which no flush has changes to write: no flush
    /// runs, or the table is a snapshot's too and so has none. The old place loses a reference.
    pub(super) fn copy_table(&self, index: u64, from: u64, to: u64) -> Result<()> {
        let mut bytes = vec![0; self.cluster_bytes() as usize];
        self.store().read_at(&mut bytes, from).map_err(|error| self.io("read an L2 table", from, error))?;
        self.store().write_at(&bytes, to).map_err(|error| self.io("move an L2 table", to, error))?;
        let mut state = self.lock();
        let Some(entry) = state.l1.get_mut(index as usize) else { return Ok(()) };
        *entry = L1Entry::copied(to).0;
        state.dirty_l1.insert(index * 8 / super::pages::SECTOR_BYTES);
        state.l2.move_pages(from, to, self.cluster_bytes());
        // Whoever has read the old place reads again.
        state.drops += 1;
        state.free(FreedSpace::Cluster(from));
        Ok(())
    }

    /// For close: gives up refcount blocks at the end of the file that count only themselves.
    /// Their clusters are quarantined. The next flush makes their removal durable.
    pub(super) fn drop_empty_count_blocks(&self) -> Result<()> {
        let cluster_bytes = self.cluster_bytes();
        loop {
            let (index, at, per_block) = {
                let state = self.lock();
                let Some(index) = state.counts.blocks().iter().rposition(|&at| at != 0) else { return Ok(()) };
                (index as u64, state.counts.blocks()[index], state.counts.per_block())
            };
            let first = index * per_block;
            let own = at / cluster_bytes;
            if index == 0 || !(first..first + per_block).contains(&own) || self.lock().space.is_none() {
                return Ok(());
            }
            let is_empty = {
                let mut is_empty = true;
                let mut cluster = first;
                while is_empty && cluster < first + per_block {
                    let counted = self.lock().counts.get(cluster);
                    match counted {
                        Ok(0) => cluster += 1,
                        Ok(_) if cluster == own => cluster += 1,
                        Ok(_) => is_empty = false,
                        Err(CountPrerequisite::Page(page)) => self.load_counts(page)?,
                        Err(CountPrerequisite::Block | CountPrerequisite::Entry) => return Ok(()),
                    }
                }
                is_empty
            };
            if !is_empty {
                return Ok(());
            }
            self.lock().counts.forget_block(index);
            if let Some(space) = &mut self.lock().space {
                space.quarantine(at, cluster_bytes);
            }
        }
    }

    pub(super) fn cut_tail(&self) -> Result<()> {
        self.barrier.check()?;
        let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(tail) = self.lock().space.as_mut().and_then(Space::take_tail) else { return Ok(()) };
        let end = tail.start_bytes();
        if let Err(error) = self.store().set_len(end) {
            if let Some(space) = &mut self.lock().space {
                space.put_back(tail);
            }
            return Err(self.io("cut the file after its last cluster", end, error));
        }
        Ok(())
    }
}
