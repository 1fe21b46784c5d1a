//! Freed clusters of a writable qcow2: their refcounts and their reuse, and the end of the file at
//! close.
//!
//! ```text
//!   freed ─▶ quarantine ─ recycle ─▶ refcount lowered ─ 0? ─▶ punched ─▶ free: new clusters, moves
//!   close:  refcounts of unused clusters ─▶ flush ─▶ free space at the end ─▶ cut off
//! ```
//!
//! Each reference that is gone lowers the refcount by one. A cluster is free when no other is left:
//! of compressed data beside it, or of a snapshot.
//!
//! Invariant: space leaves quarantine only after its entry is durably gone and no request can reach
//! it, which the disk above knows ([`ImageWriter::recycle`]). A piece is not handed out before its
//! hole punch has returned. The state mutex guards the lists; no call of a store happens under it.
//!
//! [`ImageWriter::recycle`]: crate::ImageWriter::recycle

use super::{
    counts::CountPrerequisite,
    write::{FreedSpace, Writing},
};
use crate::{Result, space::HolePunches};
use diskwright_store::FileRange;

impl Writing {
    /// Removes from quarantine what was freed at generations up to `generation`.
    fn take_quarantined(&self, generation: u64) -> Vec<FreedSpace> {
        let mut state = self.lock();
        let count = state.quarantined.partition_point(|one| one.generation <= generation);
        state.quarantined.drain(..count).map(|one| one.freed).collect()
    }

    /// Changes a refcount. Returns the new one; `None` if it cannot be read: then it stays, and the
    /// cluster may be leaked. Blocks on I/O.
    pub(super) fn change_count(&self, cluster: u64, change: impl Fn(u64) -> u64) -> Option<u64> {
        loop {
            let missing = {
                let mut state = self.lock();
                match state.counts.get(cluster) {
                    Ok(count) => {
                        let count = change(count);
                        return state.counts.set(cluster, count).is_ok().then_some(count);
                    }
                    Err(missing) => missing,
                }
            };
            match missing {
                CountPrerequisite::Page(page) => self.load_counts(page).ok()?,
                // Without a block all refcounts of its range are 0.
                CountPrerequisite::Block if change(0) == 0 => return Some(0),
                CountPrerequisite::Block | CountPrerequisite::Entry => return None,
            }
        }
    }

    /// Lowers the refcounts of freed space. Returns the clusters that are free now.
    fn lower(&self, freed: &[FreedSpace]) -> Vec<FileRange> {
        let cluster_bytes = self.cluster_bytes();
        let mut free = Vec::new();
        for &one in freed {
            let clusters = match one {
                FreedSpace::Cluster(at) => at / cluster_bytes..at / cluster_bytes + 1,
                FreedSpace::Packed { offset_bytes, len_bytes, .. } => {
                    let end = offset_bytes.saturating_add(len_bytes.max(1));
                    offset_bytes / cluster_bytes..end.div_ceil(cluster_bytes)
                }
            };
            for cluster in clusters {
                if self.change_count(cluster, |count| count.saturating_sub(1)) == Some(0) {
                    free.push(FileRange { offset_bytes: cluster * cluster_bytes, len_bytes: cluster_bytes });
                }
            }
        }
        free
    }

    pub(super) fn add_free(&self, pieces: &[FileRange]) {
        if let Some(space) = &mut self.lock().space {
            pieces.iter().for_each(|piece| space.add_free(piece.offset_bytes, piece.len_bytes));
        }
    }

    /// `punches`: the clusters become holes of the file. If not, clusters will be moved into them.
    pub(super) fn recycle_clusters(&self, generation: u64, punches: bool) {
        let free = self.lower(&self.take_quarantined(generation));
        if punches {
            let mut punching = HolePunches::of(free.into_iter());
            loop {
                let done = punching.punch(self.store());
                if done.is_empty() {
                    return;
                }
                self.add_free(&done);
            }
        }
        if let Some(space) = &mut self.lock().space {
            free.iter().for_each(|piece| space.quarantine(piece.offset_bytes, piece.len_bytes));
            space.recycle_for_moves(space.generation());
        }
    }

    /// For close: returns all space that nothing refers to, and cuts the file after its last
    /// cluster. The caller has flushed, and no request follows.
    pub(super) fn trim(&self) -> Result<()> {
        {
            let mut state = self.lock();
            let reserved = std::mem::take(&mut state.reserved).into_values();
            let moving = std::mem::take(&mut state.moving).into_values();
            // Reservations in a data file have no refcount. Those of subclusters lie in clusters.
            let has_own = self.data_file.is_none() && !self.has_subclusters();
            let fresh = std::mem::take(&mut state.subs.fresh).into_values();
            let unused: Vec<u64> = reserved.filter(|_| has_own).chain(fresh).collect();
            unused.into_iter().chain(moving).for_each(|at| state.free(FreedSpace::Cluster(at)));
        }
        let freed = self.lower(&self.take_quarantined(u64::MAX));
        let cluster_bytes = self.cluster_bytes();
        let given_up = std::mem::take(&mut self.lock().given_up);
        if let Some(space) = &mut self.lock().space {
            freed.iter().for_each(|piece| space.quarantine(piece.offset_bytes, piece.len_bytes));
            given_up.iter().for_each(|cluster| space.quarantine(cluster * cluster_bytes, cluster_bytes));
        }
        self.drop_empty_count_blocks()?;
        // The refcounts of what is cut off or punched are durable before.
        self.run_flush()?;
        let ends = self.lock().space.as_mut().map(|space| {
            let (end, freed) = space.free_all();
            (end, freed, space.file_end_bytes())
        });
        let Some((end, freed, file_end)) = ends else { return Ok(()) };
        if end < file_end {
            let cut = self.store().set_len(end);
            cut.map_err(|error| self.io("cut the file after its last cluster", end, error))?;
            if let Some(space) = &mut self.lock().space {
                space.set_file_end(end);
            }
        }
        freed.punch_all(self.store());
        Ok(self.barrier.sync("make the end of the file durable")?)
    }
}
