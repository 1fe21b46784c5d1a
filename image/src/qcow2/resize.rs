//! Another size of a qcow2. A power cut leaves the old size or the new one.
//!
//! ```text
//!   enlarge   what lies beyond the old end is removed ─▶ flush
//!             the L1 table is long enough, or its last cluster has room: zeros ─▶ sync
//!             else a longer one at the end of the file ─▶ refcounts, copy ─▶ sync
//!             ─▶ header: size, length and place of the L1 table (one sector) ─▶ sync
//!   shrink    header: size ─▶ sync ─▶ what lies beyond the new end is removed
//! ```
//!
//! Beyond the end of the disk may lie what an interrupted shrink has left: entries of whole
//! clusters, and the rest of the last cluster. Before the disk grows over it, the entries are
//! removed and the rest is zeroed.
//!
//! `preparing` is held, and `flushing` while the L1 table is replaced.

use super::{
    clusters::data_of,
    counts::CountPrerequisite,
    write::{State, Writing},
};
use crate::{BlockState, Commit, ImageWriter, Result};
use diskwright_format::qcow2::{Header, L1_MAX_BYTES, L2Entry, Place};
use diskwright_store::{FileRange, Zeroing};
use std::sync::PoisonError;

/// Offset of the size in the header.
const SIZE_AT: usize = 24;
const SECTOR_BYTES: u64 = 512;
/// Entries that are removed at a time.
const FORGET_MAX: usize = 4096;

impl Writing {
    pub(super) fn check_size(&self, size_bytes: u64) -> Result<()> {
        let geometry = &self.layout.geometry;
        self.refuse_with_data_file("a new size of", "convert it to a new image")?;
        if size_bytes == 0 || !size_bytes.is_multiple_of(SECTOR_BYTES) {
            let what = format!("a size of {size_bytes} bytes, which is not a multiple of the 512-byte sector above 0,");
            return Err(self.unsupported(what, "round it up"));
        }
        let snapshots = self.layout.snapshots.as_deref().unwrap_or_default();
        // QEMU takes no snapshot of version 2 that has another size than the disk.
        if !snapshots.is_empty() && geometry.version < 3
            || snapshots.iter().any(|snapshot| snapshot.size_bytes.is_none())
        {
            let what = "a new size of an image whose internal snapshots cannot have a size of their own".into();
            return Err(self.unsupported(what, "convert the disk to a new image, or delete the snapshots first"));
        }
        if geometry.l1_entries(size_bytes) > L1_MAX_BYTES / 8 {
            let what = format!("a disk of {size_bytes} bytes in clusters of {}", geometry.cluster_bytes());
            return Err(self.unsupported(what, "convert it to an image with larger clusters, or to VHDX"));
        }
        Ok(())
    }

    pub(super) fn enlarge(&self, size_bytes: u64) -> Result<()> {
        self.check_size(size_bytes)?;
        let old_bytes = self.layout.size_bytes();
        if size_bytes < old_bytes {
            let what = format!("a smaller size of {size_bytes} bytes while the disk is open");
            return Err(self.unsupported(what, "shrink it while no process uses it"));
        }
        if size_bytes == old_bytes {
            return Ok(());
        }
        self.settle_front()?;
        let turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        self.survey()?;
        drop(turn);
        self.clear_beyond(old_bytes, false)?;
        let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        let needed = self.layout.geometry.l1_entries(size_bytes);
        let (old, entries) = {
            let state = self.lock();
            (state.l1_place, state.l1.len() as u64)
        };
        let mut new = old;
        if needed > entries {
            new = self.longer_l1(old, needed)?;
        }
        let flushing = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        // The present entries are in the file, at the place from which they are copied.
        self.flush_alone()?;
        let copy = {
            let state = self.lock();
            let words = state.l1.iter().flat_map(|word| word.to_be_bytes());
            (new.offset_bytes != old.offset_bytes).then(|| words.collect::<Vec<u8>>())
        };
        if let Some(bytes) = copy {
            let written = self.store().write_at(&bytes, new.offset_bytes);
            written.map_err(|error| self.io("write a longer L1 table", new.offset_bytes, error))?;
        }
        self.barrier.sync("make a longer L1 table durable")?;
        let (l1_at, l1_field) = Header::l1_field(new);
        self.change_front(&[(SIZE_AT, &size_bytes.to_be_bytes()), (l1_at, &l1_field)])?;
        {
            let mut state = self.lock();
            let State { l1, l1_place, dirty_l1, .. } = &mut *state;
            l1.resize((new.len_bytes / 8) as usize, 0);
            // Entries that changed since the copy are written by the next flush, to the new place.
            *l1_place = new;
            if new.offset_bytes != old.offset_bytes {
                dirty_l1.extend(0..new.len_bytes.div_ceil(SECTOR_BYTES));
            }
            self.layout.set_size_bytes(size_bytes);
        }
        drop(flushing);
        if new.offset_bytes != old.offset_bytes {
            self.give_up_region(old);
        }
        self.flush()
    }

    /// The place of an L1 table of `needed` entries: zeros beyond the present ones, and all its
    /// clusters have refcounts that the next flush makes durable.
    fn longer_l1(&self, old: Place, needed: u64) -> Result<Place> {
        let cluster_bytes = self.cluster_bytes();
        let room = old.len_bytes.next_multiple_of(cluster_bytes);
        if needed * 8 <= room {
            let rest = vec![0; (room - old.len_bytes) as usize];
            let at = old.offset_bytes + old.len_bytes;
            self.store().write_at(&rest, at).map_err(|error| self.io("clear the end of the L1 table", at, error))?;
            return Ok(Place { len_bytes: needed * 8, ..old });
        }
        let clusters = (needed * 8).div_ceil(cluster_bytes);
        Ok(Place { offset_bytes: self.take_counted_region(clusters)?, len_bytes: needed * 8 })
    }

    /// Takes adjacent clusters at the end of the file, each with refcount 1 in memory.
    fn take_counted_region(&self, clusters: u64) -> Result<u64> {
        let cluster_bytes = self.cluster_bytes();
        loop {
            let (first, lacking) = {
                let state = self.lock();
                let Some(space) = &state.space else { return Err(self.misuse(0, "is resized before the survey")) };
                let first = space.used_end_bytes() / cluster_bytes;
                let lacking = (first..first + clusters).find_map(|cluster| match state.counts.get(cluster) {
                    Err(missing @ (CountPrerequisite::Block | CountPrerequisite::Entry)) => Some((cluster, missing)),
                    Ok(_) | Err(CountPrerequisite::Page(_)) => None,
                });
                (first, lacking)
            };
            match lacking {
                None => {
                    let Some(at) = self.take_region(first * cluster_bytes, clusters * cluster_bytes)? else { continue };
                    for cluster in first..first + clusters {
                        if self.change_count(cluster, |_| 1).is_none() {
                            return Err(self.misuse(cluster, "of the file has no refcount"));
                        }
                    }
                    return Ok(at);
                }
                Some((cluster, CountPrerequisite::Entry)) => {
                    self.skip_to(first, cluster)?;
                    self.lengthen_table(cluster * cluster_bytes)?;
                }
                Some((cluster, _)) => self.make_count_block_elsewhere(cluster)?,
            }
        }
    }

    /// Makes the clusters `first .. end` at the end of the file free.
    fn skip_to(&self, first: u64, end: u64) -> Result<()> {
        let cluster_bytes = self.cluster_bytes();
        if first < end && self.take_region(first * cluster_bytes, (end - first) * cluster_bytes)?.is_some() {
            let pieces = (first..end)
                .map(|cluster| FileRange { offset_bytes: cluster * cluster_bytes, len_bytes: cluster_bytes });
            self.add_free(&pieces.collect::<Vec<_>>());
        }
        Ok(())
    }

    /// Removes all entries from `end_bytes` of the disk on, and zeroes the rest of the cluster in
    /// which that lies. Durable on return. `is_alone`: no request is in flight, so the last cluster
    /// may get another place.
    fn clear_beyond(&self, end_bytes: u64, is_alone: bool) -> Result<()> {
        let cluster_bytes = self.cluster_bytes();
        let within = end_bytes % cluster_bytes;
        if within > 0 {
            let cluster = end_bytes / cluster_bytes;
            self.refuse_packed_end(end_bytes)?;
            let entry = self.entry_of(cluster)?.0.map_err(|fault| fault.into_error(self.store()))?;
            if let (Some(at), None) = (data_of(entry), self.own_data_of(entry)) {
                self.clear_rest_of_shared(cluster, at, within, is_alone)?;
            } else if let Some(at) = self.own_data_of(entry) {
                let rest = FileRange { offset_bytes: at + within, len_bytes: cluster_bytes - within };
                let zeroed = self.store().zero_range(rest, Zeroing::Keep);
                zeroed.map_err(|error| self.io("clear the end of the last cluster", at, error))?;
            }
            if self.has_subclusters() {
                self.forget_subs(cluster, within)?;
            }
        }
        let first = end_bytes.div_ceil(cluster_bytes);
        let all = self.lock().l1.len() as u64 * self.layout.geometry.l2_entries();
        loop {
            let mut beyond = Vec::new();
            self.each_entry_up_to(first, all, &mut |cluster, _| {
                beyond.push(cluster);
                Ok(beyond.len() < FORGET_MAX)
            })?;
            if beyond.is_empty() {
                return self.flush();
            }
            beyond.into_iter().try_for_each(|cluster| self.forget(cluster))?;
        }
    }

    /// Makes the last cluster end in zeros from `within_bytes` on. A snapshot has its data at `at`
    /// too, so these stay as they are.
    fn clear_rest_of_shared(&self, cluster: u64, at: u64, within_bytes: u64, is_alone: bool) -> Result<()> {
        let mut bytes = vec![0; self.cluster_bytes() as usize];
        self.store().read_at(&mut bytes, at).map_err(|error| self.io("read the last cluster", at, error))?;
        let (kept, rest) = bytes.split_at(within_bytes as usize);
        if rest.iter().all(|&byte| byte == 0) {
            return Ok(());
        }
        if !is_alone {
            let what = "a larger size of a disk whose last cluster an internal snapshot has too, with data behind the end of the disk,".into();
            return Err(self.unsupported(what, "write to the last sector of the disk first"));
        }
        let new = self.reserve_waiting(cluster)?.offset_bytes;
        self.store().write_at(kept, new).map_err(|error| self.io("copy the last cluster", new, error))?;
        self.commit_waiting(cluster, Commit::Whole).map(|_| ())
    }

    pub(super) fn check_smaller(&self, size_bytes: u64) -> Result<()> {
        self.check_size(size_bytes)?;
        let old_bytes = self.layout.size_bytes();
        if size_bytes > old_bytes {
            return Err(self.unsupported(format!("a larger size of {size_bytes} bytes here"), "enlarge the disk"));
        }
        self.refuse_packed_end(size_bytes)
    }

    /// Fails if a disk of this size would end within a compressed cluster.
    fn refuse_packed_end(&self, size_bytes: u64) -> Result<()> {
        let cluster_bytes = self.cluster_bytes();
        if !size_bytes.is_multiple_of(cluster_bytes)
            && matches!(self.entry_of(size_bytes / cluster_bytes)?.0, Ok(L2Entry::Compressed { .. }))
        {
            let what = "a new size of a disk whose last cluster is compressed".into();
            return Err(self.unsupported(what, "convert it to an image without compression"));
        }
        Ok(())
    }

    pub(super) fn make_smaller(&self, size_bytes: u64) -> Result<()> {
        self.check_smaller(size_bytes)?;
        self.settle_front()?;
        {
            let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
            self.survey()?;
        }
        if size_bytes < self.layout.size_bytes() {
            self.change_front(&[(SIZE_AT, &size_bytes.to_be_bytes())])?;
            self.layout.set_size_bytes(size_bytes);
        }
        self.clear_beyond(size_bytes, true)?;
        // Nobody else uses the disk.
        self.recycle_clusters(u64::MAX, true);
        self.flush()
    }

    /// Removes the entry of a cluster beyond the end of the disk.
    fn forget(&self, cluster: u64) -> Result<()> {
        loop {
            {
                let mut state = self.lock();
                let place = self.entry_place(&state, cluster).map_err(|fault| fault.into_error(self.store()))?;
                let Some(place) = place else { return Ok(()) };
                if !self.has_own_table(&state, cluster) {
                    drop(state);
                    let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
                    self.make_table(cluster / self.layout.geometry.l2_entries())?;
                    continue;
                }
                if let Some((word, parts)) = self.words_at(&state, place) {
                    // The survey has refused invalid entries.
                    if let Ok(entry) = L2Entry::parse(word, parts, &self.layout.geometry) {
                        self.free_of(&mut state, cluster, entry);
                    }
                    self.set_entry(&mut state, cluster, L2Entry::Unallocated);
                    return Ok(());
                }
            }
            self.load_entry(cluster)?;
        }
    }

    /// Maps all blocks of a new image, so that later writes need no space.
    pub(super) fn allocate_all(&self) -> Result<()> {
        for block in 0..self.layout.blocks() {
            self.reserve_waiting(block)?;
            let state = self.commit_waiting(block, Commit::Whole)?;
            debug_assert!(matches!(state, BlockState::Data { .. }));
        }
        Ok(())
    }
}
