//! Writes to a qcow2 image.
//!
//! ```text
//!   reserve ─▶ refcount 1 ─ payload ─ commit ─▶ L2 entry in memory (dirty) ─ flush ─▶ in the file
//!   freed   ─▶ entry removed ─ flush ─▶ recycle ─▶ refcount lowered ─▶ free for the next reserve
//! ```
//!
//! A block is a cluster. A new cluster is all zeros when it is handed out, and gets its entry when
//! its payload is written. A cluster has no sector bits, so the disk fills a new cluster of a child
//! from below before it writes a part of it (copy-up). A compressed cluster is decompressed into a
//! new one in the same way.
//!
//! What a snapshot in the file has too, a cluster or an L2 table, is never changed: the disk gets a
//! new cluster or a copy of the table, and the refcount of the old one is lowered by one. So a
//! snapshot keeps its data whatever happens, and no refcount of it is ever raised here.
//!
//! Invariant, in memory and in the file after every power cut: the refcount of a cluster is at
//! least the number of its references. A refcount is raised before anything refers to the cluster,
//! and lowered after the last reference is durably gone and no request can reach the cluster. So a
//! cut leaves leaks at most.
//!
//! One mutex guards [`State`]: tables, refcounts, reservations, space. No I/O happens under it,
//! because the disk above calls `reserve` and `commit` under its own lock. What is not in memory is
//! noted as a [`Prerequisite`], and the result is `None`: the caller releases its lock, calls
//! `prepare.rs`, and retries. Lock order: `preparing`, `flushing`, `front`, then the state mutex.
//! `clusters.rs` changes entries, `growth.rs` surveys the file and makes tables, `flush.rs` makes
//! changes durable, `front.rs` changes the header, `reuse.rs` returns freed clusters, `compact.rs`
//! moves clusters and tables, `resize.rs` changes the size, `data_file.rs` writes clusters in
//! another file, `subclusters.rs` writes blocks that share a cluster.

use super::{
    check_walk::each_word,
    counts::Refcounts,
    layout::Layout,
    pages::{Pages, SECTOR_BYTES},
    partial::Subs,
};
use crate::{
    BlockState, Commit, ImageError, ImageWriter, MoveTo, ParentLink, Reservation, Result, needs::Prerequisites,
    space::Space,
};
use diskwright_format::qcow2::{Place, Snapshot, features};
use diskwright_store::{
    Barrier, Store,
    sync::{Mutex, MutexGuard},
};
use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    io,
    ops::Range,
    sync::{Arc, PoisonError},
};

/// A flush is due above this number of bytes of dirty tables.
const DIRTY_MAX_BYTES: u64 = 64 << 20;
/// Clean tables are dropped above this number of bytes, unless a limit is set.
const TABLES_BYTES: u64 = 32 << 20;
/// The fewest pages of each kind that are kept in memory.
const PAGES_MIN: u64 = 64;

/// What a block lacks, besides the page of its entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prerequisite {
    /// The survey of the file.
    Survey,
    /// That, and an L2 table that no snapshot has.
    Table,
    /// That survey, and a free cluster with its refcount in memory.
    Space,
    /// The page of refcounts at this offset of the file.
    Counts(u64),
    /// That survey, and the part of the cluster of a subcluster zeroed.
    Clean,
}

/// Space that an entry no longer refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FreedSpace {
    /// A cluster at this offset.
    Cluster(u64),
    /// The compressed data of a cluster of the disk.
    Packed { cluster: u64, offset_bytes: u64, len_bytes: u64 },
}

/// Freed space that may still be reached.
#[derive(Debug, Clone, Copy)]
pub(super) struct Quarantined {
    pub generation: u64,
    pub freed: FreedSpace,
}

/// The changing state of an image.
#[derive(Debug)]
pub(super) struct State {
    /// Raw entries of the L1 table.
    pub l1: Vec<u64>,
    pub l1_place: Place,
    /// Numbers of the changed sectors of the L1 table.
    pub dirty_l1: BTreeSet<u64>,
    pub l2: Pages,
    pub counts: Refcounts,
    /// `None` before the survey.
    pub space: Option<Space>,
    /// A flush has taken changes that are not in the file yet: no page may be dropped.
    pub pinned: bool,
    /// Grows when pages of L2 tables are dropped from memory.
    pub drops: u64,
    /// Memory for tables, in bytes.
    pub limit_bytes: u64,
    pub needs: Prerequisites<Prerequisite>,
    /// Block to the offset of its new cluster.
    pub reserved: HashMap<u64, u64>,
    /// Block to the place of its move.
    pub moving: HashMap<u64, u64>,
    pub subs: Subs,
    /// Cluster of the disk of which a part is being zeroed.
    pub cleaning: Option<u64>,
    /// Sorted by generation.
    pub quarantined: VecDeque<Quarantined>,
    pub generation: u64,
    /// Clusters of former tables, free at close.
    pub given_up: Vec<u64>,
}

impl State {
    /// The most pages of each kind in memory.
    pub fn pages_max(&self) -> usize {
        usize::try_from((self.limit_bytes / 2 / self.l2.page_bytes()).max(PAGES_MIN)).unwrap_or(usize::MAX)
    }

    /// Quarantines space that an entry no longer refers to.
    pub fn free(&mut self, freed: FreedSpace) {
        self.generation += 1;
        self.quarantined.push_back(Quarantined { generation: self.generation, freed });
    }
}

/// What the header says now.
#[derive(Debug, Default)]
pub(super) struct FrontState {
    /// The bits that this program does not keep are clear, durably.
    pub is_settled: bool,
    /// The link to the backing file, after a change.
    pub parent: Option<ParentLink>,
}

/// A qcow2 that is open for writing.
#[derive(Debug)]
pub(super) struct Writing {
    pub layout: Arc<Layout>,
    pub barrier: Barrier,
    /// The file in which the clusters lie, if it is another one.
    pub data_file: Option<Barrier>,
    /// Held while the file grows and is surveyed.
    pub preparing: Mutex<()>,
    /// Held by a flush from the moment in which it takes the dirty state.
    pub flushing: Mutex<()>,
    /// Held while the header changes.
    pub front: Mutex<FrontState>,
    state: Mutex<State>,
}

/// Why an image cannot be written: what, and a hint.
pub(super) fn refusal(layout: &Layout, is_snapshot: bool) -> Option<(String, &'static str)> {
    let header = &layout.front.header;
    let has = |bit| header.features.has(bit);
    let convert = "open it read-only, or convert it to a new image";
    if is_snapshot {
        return Some(("writing to an internal snapshot".into(), "open the disk itself"));
    }
    if has(features::CORRUPT) || has(features::DIRTY) {
        let what = if has(features::CORRUPT) { "corrupt" } else { "not closed" };
        return Some((
            format!("writing to a qcow2 image that is marked {what}"),
            "repair it first: `diskwright check` says what is damaged",
        ));
    }
    let overlaps = |one: &Place, other: &Place| {
        one.offset_bytes < other.offset_bytes + other.len_bytes && other.offset_bytes < one.offset_bytes + one.len_bytes
    };
    let lies = |snapshot: &Snapshot| {
        snapshot.l1.offset_bytes.checked_add(snapshot.l1.len_bytes).is_none() || overlaps(&snapshot.l1, &header.l1)
    };
    if layout.snapshots.as_ref().map_or(header.snapshots > 0, |known| known.iter().any(lies)) {
        let what =
            "writing to a qcow2 image whose snapshot table is damaged, or a snapshot has the disk's own L1 table";
        return Some((what.into(), convert));
    }
    if layout.has_data_file() && header.snapshots > 0 {
        let what = "writing to a qcow2 image with an external data file and internal snapshots";
        return Some((what.into(), convert));
    }
    if has(features::EXTENDED_L2) && (header.snapshots > 0 || layout.has_data_file()) {
        let other = if header.snapshots > 0 { "internal snapshots" } else { "an external data file" };
        let what = format!("writing to a qcow2 image with extended L2 entries (subclusters) and {other}");
        return Some((what, convert));
    }
    None
}

impl Writing {
    /// The caller has checked [`refusal`].
    pub fn new(layout: Arc<Layout>, stores: &[Arc<dyn Store>]) -> Result<Self> {
        let store = Arc::clone(&stores[0]);
        let header = &layout.front.header;
        let cluster_bytes = layout.geometry.cluster_bytes();
        let words = |doing, place: Place| -> Result<Vec<u64>> {
            let mut words = vec![0; (place.len_bytes / 8) as usize];
            each_word(&*store, doing, place, layout.front.file_bytes, &mut |index, word| {
                if let Some(entry) = words.get_mut(index as usize) {
                    *entry = word;
                }
                Ok(())
            })?;
            Ok(words)
        };
        // Bits 0 to 8 of an entry are reserved. The survey refuses an image in which one is set.
        let blocks = words("read the refcount table", header.refcount_table)?;
        let state = State {
            l1: words("read the L1 table", header.l1)?,
            l1_place: header.l1,
            dirty_l1: BTreeSet::new(),
            l2: Pages::new(cluster_bytes),
            counts: Refcounts::new(header.refcount_width, cluster_bytes, header.refcount_table, blocks),
            space: None,
            pinned: false,
            drops: 0,
            limit_bytes: TABLES_BYTES,
            needs: Prerequisites::default(),
            reserved: HashMap::new(),
            moving: HashMap::new(),
            subs: Subs::default(),
            cleaning: None,
            quarantined: VecDeque::new(),
            generation: 0,
            given_up: Vec::new(),
        };
        Ok(Self {
            barrier: Barrier::new(store),
            data_file: stores.get(1).map(|data| Barrier::new(Arc::clone(data))),
            layout,
            preparing: Mutex::new(()),
            flushing: Mutex::new(()),
            front: Mutex::default(),
            state: Mutex::new(state),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn store(&self) -> &dyn Store {
        &**self.barrier.store()
    }

    pub(super) fn cluster_bytes(&self) -> u64 {
        self.layout.geometry.cluster_bytes()
    }

    pub(super) fn io(&self, doing: &'static str, offset_bytes: u64, error: io::Error) -> ImageError {
        ImageError::io(doing, self.store(), offset_bytes, error)
    }

    pub(super) fn misuse(&self, block: u64, what: &str) -> ImageError {
        let error = io::Error::new(io::ErrorKind::InvalidInput, format!("block {block} {what}"));
        self.io("change a block", 0, error)
    }

    pub(super) fn unsupported(&self, what: String, hint: &str) -> ImageError {
        ImageError::Unsupported { path: self.store().name().to_owned(), what, hint: hint.into() }
    }

    /// Whether so much is dirty that a flush is due.
    pub(super) fn is_flush_due(&self) -> bool {
        let state = self.lock();
        let limit_bytes = (state.limit_bytes / 2).clamp(64 * SECTOR_BYTES, DIRTY_MAX_BYTES);
        state.l2.dirty_bytes() + state.counts.pages.dirty_bytes() > limit_bytes
    }

    fn is_child(&self) -> bool {
        self.layout.front.backing_name.is_some()
    }
}

impl ImageWriter for Writing {
    fn begin_writing(&self) -> Result<()> {
        self.settle_front()?;
        self.settle_data_file()?;
        if self.layout.front.header.snapshots > 0 || self.has_subclusters() {
            // The flags say what may be overwritten: they are checked before the first write. So is
            // whether an image with subclusters has what cannot be written.
            let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
            self.survey()?;
        }
        Ok(())
    }

    fn set_parent_link(&self, link: &ParentLink) -> Result<()> {
        self.name_backing_file(link)
    }

    fn prepare(&self, blocks: Range<u64>) -> Result<()> {
        self.prepare_blocks(blocks)
    }

    fn reserve(&self, block: u64) -> Result<Option<Reservation>> {
        self.reserve_cluster(&mut self.lock(), block)
    }

    fn initialised(&self, _block: u64) {}

    fn commit(&self, block: u64, change: Commit) -> Result<Option<BlockState>> {
        self.commit_cluster(&mut self.lock(), block, change)
    }

    fn can_forget_blocks(&self) -> bool {
        !self.layout.has_data_file()
    }

    fn tracks_sectors(&self) -> bool {
        false
    }

    fn can_store_zero(&self) -> bool {
        // Version 2 has no zero flag. A data file has its zeros itself.
        !self.layout.has_data_file() && (self.layout.geometry.version >= 3 || !self.is_child())
    }

    fn resize(&self, size_bytes: u64) -> Result<()> {
        self.enlarge(size_bytes)
    }

    fn check_growth(&self, size_bytes: u64) -> Result<()> {
        self.check_size(size_bytes)
    }

    fn check_shrink(&self, size_bytes: u64) -> Result<()> {
        self.check_smaller(size_bytes)
    }

    fn shrink(&self, size_bytes: u64) -> Result<()> {
        self.make_smaller(size_bytes)
    }

    fn limit_tables(&self, bytes: u64) {
        // Excess pages are dropped when the next one is inserted.
        self.lock().limit_bytes = bytes;
    }

    fn is_dirty(&self) -> bool {
        let state = self.lock();
        state.pinned || !state.dirty_l1.is_empty() || state.l2.is_dirty() || state.counts.is_dirty()
    }

    fn check_syncs(&self) -> Result<()> {
        self.data_file.as_ref().map_or(Ok(()), Barrier::check)?;
        Ok(self.barrier.check()?)
    }

    fn flush(&self) -> Result<()> {
        self.barrier.share(|| self.run_flush())
    }

    fn freed_generation(&self) -> u64 {
        self.lock().generation
    }

    fn recycle(&self, generation: u64) {
        self.recycle_clusters(generation, true);
    }

    fn begin_compacting(&self) -> Result<()> {
        self.barrier.check()?;
        self.refuse_with_data_file("compacting", "its holes give the space back already")?;
        let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        self.survey()
    }

    fn reserve_move(&self, block: u64) -> Result<Option<MoveTo>> {
        self.reserve_move_of(&mut self.lock(), block)
    }

    fn moves_with(&self, block: u64) -> Range<u64> {
        self.blocks_of_cluster_of(block)
    }

    fn move_tables(&self) -> Result<()> {
        self.move_l2_tables()
    }

    fn recycle_for_moves(&self, generation: u64) {
        self.recycle_clusters(generation, false);
    }

    fn give_up_moves(&self) {
        let mut state = self.lock();
        for at in std::mem::take(&mut state.moving).into_values() {
            state.free(FreedSpace::Cluster(at));
        }
    }

    fn cut_free_tail(&self) -> Result<()> {
        self.cut_tail()
    }

    fn close(&self) -> Result<()> {
        self.flush()?;
        self.trim()
    }
}
