//! The I/O that `reserve` and `commit` of a qcow2 need first, without the state mutex.
//!
//! ```text
//!   prepare:   much is dirty?  flush                           so that memory stays bounded
//!              entries         their pages are read; inserted if still absent
//!              a need          under `preparing`, one thread at a time:
//!                survey        the check of the file (growth.rs)
//!                table         a cluster of zeros, named by the L1 table; or a copy of the
//!                              table that a snapshot has too (compact.rs)
//!                clean         a subcluster without data zeroed (subclusters.rs)
//!                space         free clusters zeroed, or the file grown; the refcounts of the next
//!                              one read; a refcount block, or a longer refcount table (growth.rs)
//! ```
//!
//! A cluster that is being zeroed is in no list, and the new end of the file is recorded only after
//! it has grown. So `reserve` never hands out space that is not ready.

use super::{
    counts::CountPrerequisite,
    write::{FreedSpace, Prerequisite, State, Writing},
};
use crate::{
    Result,
    needs::{Prerequisites, supply_each},
    space::{Extension, zero_pieces},
};
use diskwright_format::qcow2::L1Entry;
use std::ops::Range;

/// Maximum number of blocks that one preparation handles.
const MAX_BLOCKS: u64 = 1024;

/// Inserts a page that was read into memory; returns whether pages were dropped.
type Insert<'a> = &'a dyn Fn(&mut State, u64, Box<[u8]>) -> bool;

/// What the next free cluster lacks.
enum ClusterPrerequisite {
    Zeroing(Vec<u64>),
    Room(Extension),
    Count(u64, CountPrerequisite),
    Nothing,
}

impl Writing {
    /// Supplies what `reserve` and `commit` of these blocks lacked. Only the first 1024 blocks
    /// count.
    pub(super) fn prepare_blocks(&self, blocks: Range<u64>) -> Result<()> {
        self.barrier.check()?;
        if self.is_flush_due() {
            self.barrier.share(|| self.run_flush())?;
        }
        let end = blocks.end.min(self.layout.blocks()).min(blocks.start.saturating_add(MAX_BLOCKS));
        let subclusters = self.layout.geometry.subclusters();
        let (mut at, end_cluster) = (blocks.start / subclusters, end.div_ceil(subclusters));
        while at < end_cluster {
            self.load_entry(at)?;
            // The next cluster whose entry is in another page.
            let per_page = self.lock().l2.page_bytes() / self.layout.geometry.l2_entry_bytes();
            at = at.saturating_add(per_page - at % per_page);
        }
        let blocks = blocks.start..end.max(blocks.start);
        let needs = |with: &mut dyn FnMut(&mut Prerequisites<Prerequisite>)| with(&mut self.lock().needs);
        supply_each(&blocks, &self.preparing, &needs, &mut |block, need| self.supply(block, need))
    }

    fn supply(&self, block: u64, need: Prerequisite) -> Result<()> {
        self.survey()?;
        match need {
            Prerequisite::Survey => Ok(()),
            Prerequisite::Space if self.data_file.is_some() => self.reserve_in_data_file(block),
            Prerequisite::Space => self.make_space(),
            Prerequisite::Table => self.make_table(self.split(block).0 / self.layout.geometry.l2_entries()),
            Prerequisite::Clean => self.clean_sub(block),
            Prerequisite::Counts(page) => self.load_counts(page),
        }
    }

    /// Reads the page of the entry of a cluster into memory, if the cluster has an L2 table.
    pub(super) fn load_entry(&self, cluster: u64) -> Result<()> {
        // The table may move while its page is read.
        let page = |state: &State| match self.entry_place(state, cluster) {
            Ok(Some(place)) => Ok((state.l2.get(place).is_none()).then(|| state.l2.page_of(place))),
            Ok(None) => Ok(None),
            Err(fault) => Err(fault.into_error(self.store())),
        };
        self.load("read an L2 table", &page, &|state, page, bytes| {
            let (most, is_pinned) = (state.pages_max(), state.pinned);
            state.l2.insert(page, bytes, most, is_pinned)
        })
    }

    /// Reads the page of refcounts at `page` into memory.
    pub(super) fn load_counts(&self, page: u64) -> Result<()> {
        let absent = |state: &State| Ok(state.counts.pages.get(page).is_none().then_some(page));
        self.load("read a refcount block", &absent, &|state, page, bytes| {
            let (most, is_pinned) = (state.pages_max(), state.pinned);
            state.counts.pages.insert(page, bytes, most, is_pinned)
        })
    }

    /// Reads the page that `missing` names, until it names none.
    fn load(
        &self,
        doing: &'static str,
        missing: &dyn Fn(&State) -> Result<Option<u64>>,
        insert: Insert<'_>,
    ) -> Result<()> {
        loop {
            let (drops, len, page) = {
                let state = self.lock();
                let Some(page) = missing(&state)? else { return Ok(()) };
                (state.drops, state.l2.page_bytes(), page)
            };
            let mut bytes = vec![0; len as usize].into_boxed_slice();
            self.store().read_at(&mut bytes, page).map_err(|error| self.io(doing, page, error))?;
            let mut state = self.lock();
            if state.drops == drops {
                let has_dropped = insert(&mut state, page, bytes);
                state.drops += u64::from(has_dropped);
                return Ok(());
            }
        }
    }

    /// Makes an L2 table that does not exist yet: zeros, so no cluster is mapped in it. If a
    /// snapshot has the table too, the disk gets a copy. The caller holds `preparing`.
    pub(super) fn make_table(&self, index: u64) -> Result<()> {
        let Some(word) = self.lock().l1.get(index as usize).copied().map(L1Entry) else { return Ok(()) };
        // An entry may have flags and still name no table.
        if word.is_copied() && word.l2_offset(&self.layout.geometry) != Ok(None) {
            return Ok(());
        }
        let shared = self.table(&self.lock(), index).map_err(|fault| fault.into_error(self.store()))?;
        let at = self.take_cluster_waiting()?;
        if let Some(shared) = shared {
            return self.copy_table(index, shared, at).inspect_err(|_| self.lock().free(FreedSpace::Cluster(at)));
        }
        let mut state = self.lock();
        if let Some(entry) = state.l1.get_mut(index as usize) {
            *entry = L1Entry::copied(at).0;
            state.dirty_l1.insert(index * 8 / super::pages::SECTOR_BYTES);
        }
        Ok(())
    }

    /// Takes a zeroed cluster with refcount 1. The caller holds `preparing`.
    pub(super) fn take_cluster_waiting(&self) -> Result<u64> {
        loop {
            if let Some(at) = self.take_cluster(&mut self.lock())? {
                return Ok(at);
            }
            self.make_space()?;
        }
    }

    fn lacks(&self) -> Result<ClusterPrerequisite> {
        let cluster_bytes = self.cluster_bytes();
        let mut state = self.lock();
        let Some(space) = &mut state.space else { return Ok(ClusterPrerequisite::Nothing) };
        let pieces = space.take_to_zero(cluster_bytes);
        if !pieces.is_empty() {
            return Ok(ClusterPrerequisite::Zeroing(pieces));
        }
        let io_error = |error| self.io("grow the file", 0, error);
        if let Some(extension) = space.growth(cluster_bytes).map_err(io_error)? {
            return Ok(ClusterPrerequisite::Room(extension));
        }
        let next = space.next_offset_bytes(cluster_bytes).map_err(io_error)?;
        self.check_offset(next)?;
        Ok(match state.counts.get(next / cluster_bytes) {
            Ok(_) => ClusterPrerequisite::Nothing,
            Err(missing) => ClusterPrerequisite::Count(next, missing),
        })
    }

    /// Makes sure that a cluster can be taken. The caller holds `preparing`.
    fn make_space(&self) -> Result<()> {
        loop {
            match self.lacks()? {
                ClusterPrerequisite::Nothing => return Ok(()),
                ClusterPrerequisite::Zeroing(pieces) => self.zero(&pieces)?,
                ClusterPrerequisite::Room(extension) => self.extend(&extension)?,
                ClusterPrerequisite::Count(_, CountPrerequisite::Page(page)) => self.load_counts(page)?,
                ClusterPrerequisite::Count(next, CountPrerequisite::Block) => self.make_count_block(next)?,
                ClusterPrerequisite::Count(next, CountPrerequisite::Entry) => self.lengthen_table(next)?,
            }
        }
    }

    fn zero(&self, pieces: &[u64]) -> Result<()> {
        let cluster_bytes = self.cluster_bytes();
        let (zeroed, result) = zero_pieces(self.store(), pieces, cluster_bytes);
        if let Some(space) = &mut self.lock().space {
            space.zeroed(pieces, zeroed, cluster_bytes);
        }
        result.map_err(|error| self.io("clear a free cluster", pieces.first().copied().unwrap_or(0), error))
    }

    pub(super) fn extend(&self, extension: &Extension) -> Result<()> {
        let grown = extension.carry_out(self.store());
        let end = grown.map_err(|error| self.io("grow the file", extension.from_bytes, error))?;
        self.layout.note_len(end);
        if let Some(space) = &mut self.lock().space {
            space.set_file_end(end);
        }
        Ok(())
    }
}
