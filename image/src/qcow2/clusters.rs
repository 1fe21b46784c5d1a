//! The clusters of a writable image: their entries, reservations and commits.
//!
//! ```text
//!   read     drops ─▶ file read without the mutex ─▶ mutex: drops unchanged? ─▶ memory wins
//!   reserve  entry in memory ─▶ its cluster, or a free one whose refcount becomes 1
//!   commit   the entry in memory changes; the space it had is quarantined
//! ```
//!
//! What is not in memory is current in the file. So bytes from the file are stale only if a page
//! was changed, written and dropped between the two steps of a read, which changes
//! [`State::drops`]. Then the read is repeated.
//!
//! A cluster or an L2 table whose entry has no COPIED flag belongs to a snapshot too, and never
//! changes. A write takes a new cluster. A change of an entry first needs a table of its own
//! ([`Prerequisite::Table`]). The survey has shown that the flags are right, and no flag is lost
//! during a session.
//!
//! An entry of 0 reads the backing file, or zeros without one. In a child a cluster of zeros needs
//! the zero flag, which only version 3 has. The state mutex guards all of this.

use super::{
    corrupt,
    layout::Mapped,
    tables::{Fault, L2Lookup},
    write::{FreedSpace, Prerequisite, State, Writing},
};
use crate::{BlockState, Commit, Reservation, Result};
use diskwright_format::qcow2::{Invalid, L1Entry, L2Entry};

/// Largest offset that an entry can hold.
const OFFSET_MAX_BYTES: u64 = 1 << 56;

/// The next piece of the tables.
enum Run {
    /// No entry before this cluster.
    Empty(u64),
    /// The L2 table of these clusters cannot be found.
    Fault(std::ops::Range<u64>, Fault),
    /// The entries of these clusters, the first one at this offset of the file. `None`: not in
    /// memory; then as of this count of drops.
    Entries(std::ops::Range<u64>, u64, Option<Vec<u64>>, u64),
}

impl Writing {
    /// The offset of an L2 table; `None` if there is none.
    pub(super) fn table(&self, state: &State, index: u64) -> std::result::Result<Option<u64>, Fault> {
        let word = usize::try_from(index).ok().and_then(|index| state.l1.get(index)).copied().unwrap_or(0);
        self.layout.l2_table(L1Entry(word)).map_err(|invalid| {
            let offset_bytes = state.l1_place.offset_bytes + index * 8;
            Fault { offset_bytes, invalid }
        })
    }

    /// The offset in the file of a cluster's entry; `None` without an L2 table.
    pub(super) fn entry_place(&self, state: &State, cluster: u64) -> std::result::Result<Option<u64>, Fault> {
        let per_table = self.layout.geometry.l2_entries();
        let table = self.table(state, cluster / per_table)?;
        Ok(table.map(|table| table + cluster % per_table * self.layout.geometry.l2_entry_bytes()))
    }

    /// Whether a cluster has an L2 table that only the disk has, so that its entry may change.
    pub(super) fn has_own_table(&self, state: &State, cluster: u64) -> bool {
        let index = cluster / self.layout.geometry.l2_entries();
        let word = usize::try_from(index).ok().and_then(|index| state.l1.get(index)).copied().unwrap_or(0);
        L1Entry(word).is_copied() && matches!(self.table(state, index), Ok(Some(_)))
    }

    /// The offset of a cluster's data, if they are overwritten in place: no snapshot has them too.
    pub(super) fn own_data_of(&self, entry: L2Entry) -> Option<u64> {
        let is_own = self.layout.has_data_file() || matches!(entry, L2Entry::Standard { is_copied: true, .. });
        data_of(entry).filter(|_| is_own)
    }

    fn next_run(&self, first: u64, end: u64) -> Run {
        let state = self.lock();
        let per_table = self.layout.geometry.l2_entries();
        let tail = state.l1.get((first / per_table) as usize..).unwrap_or(&[]);
        let Some(skipped) = tail.iter().position(|&word| word != 0) else { return Run::Empty(end) };
        let index = first / per_table + skipped as u64;
        let start = first.max(index * per_table);
        if start >= end {
            return Run::Empty(end);
        }
        let table_end = end.min((index + 1) * per_table);
        match self.table(&state, index) {
            Err(fault) => Run::Fault(start..table_end, fault),
            Ok(None) => Run::Empty(table_end),
            Ok(Some(table)) => {
                let entry_bytes = self.layout.geometry.l2_entry_bytes();
                let place = table + start % per_table * entry_bytes;
                let page_end = state.l2.page_of(place) + state.l2.page_bytes();
                let clusters = start..table_end.min(start + (page_end - place) / entry_bytes);
                let words = state.l2.get(place).map(|page| {
                    let at = (place % state.l2.page_bytes()) as usize;
                    words_of(&page[at..at + ((clusters.end - start) * entry_bytes) as usize])
                });
                Run::Entries(clusters, place, words, state.drops)
            }
        }
    }

    /// Calls `each` for the clusters `first .. end` (within the disk) whose entry is not 0, with
    /// the cluster and its entry. Stops when `each` returns false.
    ///
    /// # Errors
    /// `Io`; errors of `each`.
    pub fn each_entry(&self, first: u64, end: u64, each: &mut dyn FnMut(u64, L2Lookup) -> Result<bool>) -> Result<()> {
        self.each_entry_up_to(first, end.min(self.layout.clusters()), each)
    }

    /// The same, also for entries beyond the end of the disk.
    ///
    /// # Errors
    /// As [`Writing::each_entry`].
    pub(super) fn each_entry_up_to(
        &self,
        first: u64,
        end: u64,
        each: &mut dyn FnMut(u64, L2Lookup) -> Result<bool>,
    ) -> Result<()> {
        let entry_bytes = self.layout.geometry.l2_entry_bytes() as usize;
        let mut at = first;
        while at < end {
            match self.next_run(at, end) {
                Run::Empty(next) => at = next,
                Run::Fault(clusters, fault) => {
                    at = clusters.end;
                    for cluster in clusters {
                        if !each(cluster, Err(fault.clone()))? {
                            return Ok(());
                        }
                    }
                }
                Run::Entries(clusters, place, words, drops) => {
                    let words = match words {
                        Some(words) => words,
                        None => {
                            let mut bytes = vec![0; (clusters.end - clusters.start) as usize * entry_bytes];
                            let read = self.store().read_at(&mut bytes, place);
                            read.map_err(|error| self.io("read an L2 table", place, error))?;
                            let state = self.lock();
                            if state.drops != drops || state.l2.get(place).is_some() {
                                at = clusters.start;
                                continue;
                            }
                            words_of(&bytes)
                        }
                    };
                    at = clusters.end;
                    let entries = clusters.zip(words.chunks_exact(entry_bytes / 8));
                    for ((cluster, entry), entry_at) in entries.zip((place..).step_by(entry_bytes)) {
                        let (word, parts) = (entry[0], entry.get(1).copied().unwrap_or(0));
                        let parsed = L2Entry::parse(word, parts, &self.layout.geometry);
                        let found = parsed.map_err(|invalid| Fault { offset_bytes: entry_at, invalid });
                        if (word, parts) != (0, 0) && !each(cluster, found)? {
                            return Ok(());
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// The entry of one cluster, and its offset in the file (0 without an L2 table).
    ///
    /// # Errors
    /// `Io`.
    pub fn entry_of(&self, cluster: u64) -> Result<(L2Lookup, u64)> {
        let place = self.entry_place(&self.lock(), cluster);
        let mut found = Ok(L2Entry::Unallocated);
        self.each_entry(cluster, cluster + 1, &mut |_, entry| {
            found = entry;
            Ok(false)
        })?;
        Ok((found, place.ok().flatten().unwrap_or(0)))
    }

    /// The compressed data that a cluster had before this session replaced them. A request that
    /// began before may still read them.
    pub fn former_packed(&self, cluster: u64) -> Option<(u64, u64)> {
        self.lock().quarantined.iter().rev().find_map(|one| match one.freed {
            FreedSpace::Packed { cluster: of, offset_bytes, len_bytes } if of == cluster => {
                Some((offset_bytes, len_bytes))
            }
            _ => None,
        })
    }

    /// The entry of a cluster, without its reservation. `None`: its page is not in memory.
    pub(super) fn entry(&self, state: &State, cluster: u64) -> Result<Option<L2Entry>> {
        if cluster >= self.layout.clusters() {
            return Err(self.misuse(cluster, "lies beyond the end of the disk"));
        }
        let place = self.entry_place(state, cluster).map_err(|fault| fault.into_error(self.store()))?;
        let Some(place) = place else { return Ok(Some(L2Entry::Unallocated)) };
        let Some((word, parts)) = self.words_at(state, place) else { return Ok(None) };
        let damaged = |invalid: Invalid| corrupt(self.store(), place, invalid);
        let entry = L2Entry::parse(word, parts, &self.layout.geometry).map_err(damaged)?;
        let with_data = match entry {
            L2Entry::Standard { parts, .. } if self.has_subclusters() => parts.allocated.trailing_zeros().min(31),
            _ => 0,
        };
        self.layout.place(cluster, with_data.into(), entry).map_err(damaged)?;
        Ok(Some(entry))
    }

    /// The words of an entry: the second one is 0 unless entries are extended. `None`: their page
    /// is not in memory. Entries lie in one page.
    pub(super) fn words_at(&self, state: &State, place: u64) -> Option<(u64, u64)> {
        let parts = if self.has_subclusters() { state.l2.word(place + 8)? } else { 0 };
        Some((state.l2.word(place)?, parts))
    }

    /// Changes the entry of a cluster, whose page is in memory.
    pub(super) fn set_entry(&self, state: &mut State, cluster: u64, entry: L2Entry) {
        if let Ok(Some(place)) = self.entry_place(state, cluster) {
            let (word, parts) = entry.to_words(&self.layout.geometry);
            state.l2.set_word(place, word);
            if self.has_subclusters() {
                state.l2.set_word(place + 8, parts);
            }
        }
    }

    pub(super) fn reserve_cluster(&self, state: &mut State, block: u64) -> Result<Option<Reservation>> {
        if self.has_subclusters() {
            return self.reserve_sub(state, block);
        }
        let store = u16::from(self.layout.has_data_file());
        let reservation = |offset_bytes| Some(Reservation { store, offset_bytes, init: None });
        if let Some(&offset_bytes) = state.reserved.get(&block) {
            return Ok(reservation(offset_bytes));
        }
        let Some(entry) = self.entry(state, block)? else { return Ok(None) };
        if let Some(offset_bytes) = self.own_data_of(entry) {
            return Ok(reservation(offset_bytes));
        }
        if !self.has_own_table(state, block) {
            state.needs.note(block, Prerequisite::Table);
            return Ok(None);
        }
        let taken = if self.data_file.is_some() { None } else { self.take_cluster(state)? };
        let Some(offset_bytes) = taken else {
            state.needs.note(block, Prerequisite::Space);
            return Ok(None);
        };
        state.reserved.insert(block, offset_bytes);
        Ok(reservation(offset_bytes))
    }

    /// Takes a zeroed cluster and makes its refcount 1; `None` if none is ready.
    pub(super) fn take_cluster(&self, state: &mut State) -> Result<Option<u64>> {
        let cluster_bytes = self.cluster_bytes();
        let Some(space) = &mut state.space else { return Ok(None) };
        let next = space.next_offset_bytes(cluster_bytes).map_err(|error| self.io("grow the file", 0, error))?;
        self.check_offset(next)?;
        let cluster = next / cluster_bytes;
        if state.counts.get(cluster).is_err() {
            return Ok(None);
        }
        let taken = space.take(cluster_bytes).map_err(|error| self.io("grow the file", next, error))?;
        if let Some(at) = taken {
            // Its page is in memory.
            let _ = state.counts.set(at / cluster_bytes, 1);
        }
        Ok(taken)
    }

    /// Fails if an entry cannot hold this offset.
    pub(super) fn check_offset(&self, offset_bytes: u64) -> Result<()> {
        if offset_bytes < OFFSET_MAX_BYTES {
            return Ok(());
        }
        Err(self.unsupported("a cluster beyond 64 PiB in the file".into(), "convert the disk to VHDX"))
    }

    pub(super) fn commit_cluster(&self, state: &mut State, block: u64, change: Commit) -> Result<Option<BlockState>> {
        if self.has_subclusters() {
            return self.commit_sub(state, block, change);
        }
        let Some(entry) = self.entry(state, block)? else { return Ok(None) };
        let store = u16::from(self.layout.has_data_file());
        let data = |offset_bytes| BlockState::Data { store, offset_bytes };
        match change {
            Commit::Whole | Commit::Sectors { .. } => {
                let Some(&at) = state.reserved.get(&block) else {
                    let at =
                        self.own_data_of(entry).ok_or_else(|| self.misuse(block, "has no space: reserve it first"))?;
                    return Ok(Some(data(at)));
                };
                if !self.has_own_table(state, block) {
                    state.needs.note(block, Prerequisite::Table);
                    return Ok(None);
                }
                state.reserved.remove(&block);
                self.set_entry(state, block, L2Entry::data(at));
                self.free_of(state, block, entry);
                Ok(Some(data(at)))
            }
            Commit::Moved => {
                let (Some(from), Some(to)) = (self.own_data_of(entry), state.moving.remove(&block)) else {
                    return Err(self.misuse(block, "is committed as moved without a place to move to"));
                };
                self.set_entry(state, block, L2Entry::data(to));
                state.free(FreedSpace::Cluster(from));
                Ok(Some(BlockState::data(to)))
            }
            Commit::Zero | Commit::Discard | Commit::Absent => {
                self.commit_nothing(state, block, entry, change != Commit::Absent)
            }
        }
    }

    /// Removes the data of a cluster. `is_zero`: the block then reads as zeros, also in a child.
    fn commit_nothing(
        &self,
        state: &mut State,
        block: u64,
        entry: L2Entry,
        is_zero: bool,
    ) -> Result<Option<BlockState>> {
        self.refuse_with_data_file("a block without data in", "write zeros over the range instead")?;
        let hides = is_zero && self.layout.front.backing_name.is_some();
        if hides && self.layout.geometry.version < 3 {
            let what = "a block of zeros without space in a qcow2 image of version 2".into();
            return Err(self.unsupported(what, "write zeros over the range instead"));
        }
        let becomes = if hides { L2Entry::zeros() } else { L2Entry::Unallocated };
        if entry != becomes {
            if state.space.is_none() {
                state.needs.note(block, Prerequisite::Survey);
                return Ok(None);
            }
            if !self.has_own_table(state, block) {
                state.needs.note(block, Prerequisite::Table);
                return Ok(None);
            }
            self.set_entry(state, block, becomes);
            self.free_of(state, block, entry);
        }
        if let Some(at) = state.reserved.remove(&block) {
            state.free(FreedSpace::Cluster(at));
        }
        Ok(Some(if hides { BlockState::Zero } else { BlockState::Absent }))
    }

    /// Quarantines what an entry referred to.
    pub(super) fn free_of(&self, state: &mut State, cluster: u64, entry: L2Entry) {
        match entry {
            L2Entry::Standard { .. } if self.layout.has_data_file() => {}
            L2Entry::Standard { offset_bytes: Some(at), .. } => state.free(FreedSpace::Cluster(at)),
            L2Entry::Compressed { .. } => {
                if let Ok(Mapped::Compressed { offset_bytes, len_bytes }) = self.layout.place(cluster, 0, entry) {
                    state.free(FreedSpace::Packed { cluster, offset_bytes, len_bytes });
                }
            }
            L2Entry::Standard { offset_bytes: None, .. } | L2Entry::Unallocated => {}
        }
    }
}

/// The offset of a cluster's data, if it has any that are not compressed.
pub(super) fn data_of(entry: L2Entry) -> Option<u64> {
    match entry {
        L2Entry::Standard { offset_bytes, parts, .. } => offset_bytes.filter(|_| parts.allocated != 0),
        L2Entry::Compressed { .. } | L2Entry::Unallocated => None,
    }
}

fn words_of(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks().0.iter().map(|word| u64::from_be_bytes(*word)).collect()
}
