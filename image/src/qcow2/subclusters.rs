//! Blocks of an image with extended L2 entries: subclusters, of which 32 share a cluster.
//!
//! ```text
//!   reserve  the cluster has space?  no: a free one, all zeros ─▶ fresh    (no entry names it yet)
//!                                    yes: the subcluster's part of it, zeroed first (prepare)
//!   commit   the entry names the cluster, and the subcluster's bit says data, zeros or nothing
//!            nothing left in the cluster, and nothing reserved ─▶ the cluster is quarantined
//! ```
//!
//! A subcluster without data may have stale bytes in the cluster: of an earlier session, or of a
//! discard. So its part is zeroed before it is handed out, unless it is known to be zeros
//! (`partial.rs`). That may change bytes which an entry in the file still names, if a discard is
//! not durable yet. A power cut then shows zeros or the new bytes where the guest has discarded the
//! old ones, as it does where a write follows a write. A request that began before the discard may
//! see the same.
//!
//! Entry and bits are 16 bytes of one sector, so they change together.
//!
//! Only clusters that nothing else has are written in place, and a cluster is never copied for the
//! sake of one subcluster: the disk above would not learn where its other subclusters are. So an
//! image with internal snapshots or with compressed clusters is refused before its first write
//! (`write.rs`, [`Writing::refuse_packed`]), and an entry without the COPIED flag where it is met.
//! A cluster that is compacted moves as a whole: the disk holds all its blocks, and looks up all of
//! them again ([`ImageWriter::moves_with`](crate::ImageWriter::moves_with)).

use super::{
    clusters::data_of,
    write::{FreedSpace, Prerequisite, State, Writing},
};
use crate::{BlockState, Commit, ImageError, Reservation, Result};
use diskwright_format::qcow2::{L2Entry, Subclusters};
use diskwright_store::{FileRange, Zeroing};

impl Writing {
    /// Whether blocks are subclusters.
    pub(super) fn has_subclusters(&self) -> bool {
        self.layout.geometry.is_extended
    }

    /// The cluster of a block, and its subcluster in it.
    pub(super) fn split(&self, block: u64) -> (u64, u64) {
        let subclusters = self.layout.geometry.subclusters();
        (block / subclusters, block % subclusters)
    }

    fn place_in(&self, cluster_at: u64, sub: u64) -> u64 {
        cluster_at + sub * self.layout.geometry.unit_bytes()
    }

    /// The offset of the cluster of an entry, if it has one that only this entry has.
    fn own_cluster_of(&self, block: u64, entry: L2Entry) -> Result<Option<u64>> {
        match entry {
            L2Entry::Unallocated | L2Entry::Standard { offset_bytes: None, .. } => Ok(None),
            L2Entry::Standard { offset_bytes, is_copied: true, .. } => Ok(offset_bytes),
            L2Entry::Standard { .. } | L2Entry::Compressed { .. } => {
                let what = format!(
                    "writing to block {block}, whose cluster is shared or compressed, in an image with extended L2 entries"
                );
                Err(self.unsupported(what, "convert it to a new image"))
            }
        }
    }

    pub(super) fn reserve_sub(&self, state: &mut State, block: u64) -> Result<Option<Reservation>> {
        let reservation = |offset_bytes| Some(Reservation { store: 0, offset_bytes, init: None });
        if let Some(&offset_bytes) = state.reserved.get(&block) {
            return Ok(reservation(offset_bytes));
        }
        let (cluster, sub) = self.split(block);
        let Some(entry) = self.entry(state, cluster)? else { return Ok(None) };
        let cluster_at = match self.own_cluster_of(block, entry)? {
            Some(at) if parts_of(entry).allocated >> sub & 1 == 1 => return Ok(reservation(self.place_in(at, sub))),
            Some(at) => Some(at),
            None => state.subs.fresh.get(&cluster).copied(),
        };
        let cluster_at = match cluster_at {
            Some(at) => {
                if !state.subs.take_clean(cluster, 1 << sub) {
                    state.needs.note(block, Prerequisite::Clean);
                    return Ok(None);
                }
                at
            }
            None => {
                if !self.has_own_table(state, cluster) {
                    state.needs.note(block, Prerequisite::Table);
                    return Ok(None);
                }
                let Some(at) = self.take_cluster(state)? else {
                    state.needs.note(block, Prerequisite::Space);
                    return Ok(None);
                };
                state.subs.fresh.insert(cluster, at);
                state.subs.all_clean(cluster);
                state.subs.take_clean(cluster, 1 << sub);
                at
            }
        };
        let at = self.place_in(cluster_at, sub);
        state.reserved.insert(block, at);
        Ok(reservation(at))
    }

    /// Zeroes the part of a block that has no data, and reserves it. The caller holds `preparing`.
    pub(super) fn clean_sub(&self, block: u64) -> Result<()> {
        let (cluster, sub) = self.split(block);
        let place = |state: &State| -> Result<Option<u64>> {
            let Some(entry) = self.entry(state, cluster)? else { return Ok(None) };
            if state.reserved.contains_key(&block) || parts_of(entry).allocated >> sub & 1 == 1 {
                return Ok(None);
            }
            let own = self.own_cluster_of(block, entry)?;
            Ok(own.or_else(|| state.subs.fresh.get(&cluster).copied()).map(|at| self.place_in(at, sub)))
        };
        let at = {
            let mut state = self.lock();
            let Some(at) = place(&state)? else { return Ok(()) };
            // Until it is zeroed nothing may free the cluster.
            state.cleaning = Some(cluster);
            at
        };
        let range = FileRange { offset_bytes: at, len_bytes: self.layout.geometry.unit_bytes() };
        let zeroed = self.store().zero_range(range, Zeroing::Keep);
        let mut state = self.lock();
        state.cleaning = None;
        zeroed.map_err(|error| self.io("clear a free subcluster", at, error))?;
        if place(&state)? == Some(at) {
            state.reserved.insert(block, at);
        }
        Ok(())
    }

    pub(super) fn commit_sub(&self, state: &mut State, block: u64, change: Commit) -> Result<Option<BlockState>> {
        let (cluster, sub) = self.split(block);
        let Some(entry) = self.entry(state, cluster)? else { return Ok(None) };
        let parts = parts_of(entry);
        let bit = 1_u32 << sub;
        match change {
            Commit::Whole | Commit::Sectors { .. } => {
                let own = self.own_cluster_of(block, entry)?;
                let Some(&at) = state.reserved.get(&block) else {
                    let at = own.filter(|_| parts.allocated & bit != 0);
                    let at = at.ok_or_else(|| self.misuse(block, "has no space: reserve it first"))?;
                    return Ok(Some(BlockState::data(self.place_in(at, sub))));
                };
                if !self.has_own_table(state, cluster) {
                    state.needs.note(block, Prerequisite::Table);
                    return Ok(None);
                }
                state.reserved.remove(&block);
                state.subs.fresh.remove(&cluster);
                let parts = Subclusters { allocated: parts.allocated | bit, zero: parts.zero & !bit };
                let offset_bytes = Some(at - sub * self.layout.geometry.unit_bytes());
                self.set_entry(state, cluster, L2Entry::Standard { offset_bytes, parts, is_copied: true });
                Ok(Some(BlockState::data(at)))
            }
            Commit::Moved => {
                let first = self.blocks_of_cluster_of(block).start;
                let (Some(from), Some(to)) = (self.own_data_of(entry), state.moving.remove(&first)) else {
                    return Err(self.misuse(block, "is committed as moved without a place to move to"));
                };
                // What is known to be zeros in the cluster was copied too.
                self.set_entry(state, cluster, L2Entry::Standard { offset_bytes: Some(to), parts, is_copied: true });
                state.free(FreedSpace::Cluster(from));
                Ok(Some(match (parts.allocated & bit != 0, parts.zero & bit != 0) {
                    (true, _) => BlockState::data(self.place_in(to, sub)),
                    (false, true) => BlockState::Zero,
                    (false, false) => BlockState::Absent,
                }))
            }
            Commit::Zero | Commit::Discard | Commit::Absent => {
                let hides = change != Commit::Absent && self.layout.front.backing_name.is_some();
                let zero = if hides { parts.zero | bit } else { parts.zero & !bit };
                let new = Subclusters { allocated: parts.allocated & !bit, zero };
                if new != parts {
                    self.own_cluster_of(block, entry)?;
                    if state.space.is_none() {
                        state.needs.note(block, Prerequisite::Survey);
                        return Ok(None);
                    }
                    if !self.has_own_table(state, cluster) {
                        state.needs.note(block, Prerequisite::Table);
                        return Ok(None);
                    }
                }
                state.reserved.remove(&block);
                if new != parts {
                    self.set_parts(state, cluster, entry, new);
                }
                self.free_unused(state, cluster);
                Ok(Some(if hides { BlockState::Zero } else { BlockState::Absent }))
            }
        }
    }

    /// Changes which subclusters have data or are zeros.
    fn set_parts(&self, state: &mut State, cluster: u64, entry: L2Entry, parts: Subclusters) {
        let offset_bytes = match entry {
            L2Entry::Standard { offset_bytes, .. } => offset_bytes,
            L2Entry::Unallocated | L2Entry::Compressed { .. } => None,
        };
        let is_copied = offset_bytes.is_some();
        let is_nothing = offset_bytes.is_none() && parts == Subclusters::default();
        let new = if is_nothing { L2Entry::Unallocated } else { L2Entry::Standard { offset_bytes, parts, is_copied } };
        self.set_entry(state, cluster, new);
    }

    /// Frees the cluster of an entry of which no subcluster has data or is reserved.
    fn free_unused(&self, state: &mut State, cluster: u64) {
        let first = cluster * self.layout.geometry.subclusters();
        let blocks = first..first + self.layout.geometry.subclusters();
        if state.cleaning == Some(cluster) || blocks.into_iter().any(|block| state.reserved.contains_key(&block)) {
            return;
        }
        let Ok(Some(entry)) = self.entry(state, cluster) else { return };
        if data_of(entry).is_some() {
            return;
        }
        if let Some(at) = state.subs.forget(cluster) {
            state.free(FreedSpace::Cluster(at));
        }
        if let L2Entry::Standard { offset_bytes: Some(at), parts, is_copied: true } = entry
            && self.has_own_table(state, cluster)
        {
            let nothing = L2Entry::Standard { offset_bytes: None, parts, is_copied: false };
            self.set_entry(state, cluster, if parts.zero == 0 { L2Entry::Unallocated } else { nothing });
            state.free(FreedSpace::Cluster(at));
        }
    }

    /// Removes what lies behind `within_bytes` of a cluster: subclusters that lie there wholly.
    /// Their bytes are zeros already.
    pub(super) fn forget_subs(&self, cluster: u64, within_bytes: u64) -> Result<()> {
        loop {
            {
                let mut state = self.lock();
                let Some(entry) = self.entry(&state, cluster)? else {
                    drop(state);
                    self.load_entry(cluster)?;
                    continue;
                };
                let kept = within_bytes.div_ceil(self.layout.geometry.unit_bytes()).min(32);
                let mask = if kept == 32 { u32::MAX } else { (1 << kept) - 1 };
                let parts = parts_of(entry);
                let new = Subclusters { allocated: parts.allocated & mask, zero: parts.zero & mask };
                if new != parts && self.has_own_table(&state, cluster) {
                    self.set_parts(&mut state, cluster, entry, new);
                    self.free_unused(&mut state, cluster);
                }
                return Ok(());
            }
        }
    }

    /// Fails for an image with compressed clusters, before its first write.
    pub(super) fn refuse_packed(&self, has_packed: bool) -> Result<()> {
        if !self.has_subclusters() || !has_packed {
            return Ok(());
        }
        Err(ImageError::Unsupported {
            path: self.store().name().to_owned(),
            what: "writing to a qcow2 image with extended L2 entries (subclusters) and compressed clusters".into(),
            hint: "open it read-only, or convert it to a new image".into(),
        })
    }
}

fn parts_of(entry: L2Entry) -> Subclusters {
    match entry {
        L2Entry::Standard { parts, .. } => parts,
        L2Entry::Compressed { .. } | L2Entry::Unallocated => Subclusters::default(),
    }
}
