//! Writes to a VMDK.
//!
//! ```text
//!   reserve ─▶ reserved ─ commit ─▶ entry in memory (dirty) ─ flush ─▶ in both tables
//! ```
//!
//! A flat part has its space; only grains are allocated. A new grain is all zeros when it is handed
//! out, and gets its entry when its payload is written. A grain has no sector bits, so the disk
//! fills a new grain of a child from below before it writes a part of it (copy-up).
//!
//! While an extent has an invalid entry no grain is allocated or freed in it: the survey refuses
//! it, because the damaged grain may lie in space that looks free. Grains that have space can be
//! overwritten.
//!
//! One mutex guards [`State`]: directories, tables, reservations, space. No I/O happens under it,
//! because the disk above calls `reserve` and `commit` under its own lock. What is not in memory is
//! noted as a [`Prerequisite`], and the result is `None`: the caller releases its lock, calls
//! `prepare.rs`, and retries. Lock order: `preparing`, `flushing`, then the state mutex.
//! `grains.rs` changes entries, `growth.rs` surveys a file before its first change of an entry,
//! `flush.rs` makes changes durable, `document.rs` changes the CID and the link, `compact.rs` moves
//! grains and cuts files, `grow.rs` enlarges the disk, `shrink.rs` makes it smaller.

use super::{
    document::Document,
    layout::{Content, Layout, Place, SparseExtent},
    new_size,
    tables::Tables,
};
use crate::{
    BlockState, Commit, ImageError, ImageWriter, LinkageId, MoveTo, ParentLink, Reservation, Result,
    needs::Prerequisites, space::Space,
};
use diskwright_format::vmdk::SECTOR_BYTES;
use diskwright_store::{
    Barrier, FileRange, Store,
    sync::{Mutex, MutexGuard},
};
use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    io,
    ops::Range,
    sync::{Arc, PoisonError},
};

/// A flush is due above this number of dirty sectors of tables: 16 MiB.
const MAX_DIRTY_SECTORS: usize = 32 << 10;
/// Clean tables are dropped above this number of bytes, unless a limit is set.
const TABLES_BYTES: u64 = 16 << 20;

/// What a block lacks, besides its grain table in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prerequisite {
    /// The survey of its file.
    Survey,
    /// That survey, and its grain table in the file.
    Table,
    /// That survey, and space that reads as zeros.
    Space,
}

/// A grain table: extent and number.
pub(super) type TableId = (usize, u32);

/// The changing state of an extent.
#[derive(Debug)]
pub(super) struct ExtentState {
    /// Entries of each directory, as [`Tables::entries`].
    pub directories: Vec<Vec<u32>>,
    /// Places of the directories, as [`Tables::directories`].
    pub places: Vec<u64>,
    /// `None` before the survey.
    pub space: Option<Space>,
}

/// Freed space that may still be reached.
#[derive(Debug, Clone, Copy)]
pub(super) struct Quarantined {
    pub generation: u64,
    pub extent: usize,
    pub range: FileRange,
}

/// The changing state of an image.
#[derive(Debug)]
pub(super) struct State {
    pub extent_states: Vec<ExtentState>,
    /// Raw entries of the tables in memory.
    pub tables: HashMap<TableId, Box<[u32]>>,
    /// Changed sectors of tables: table, and sector in it.
    pub dirty: BTreeSet<(usize, u32, u32)>,
    /// Changed entries of directories.
    pub dirty_directories: BTreeSet<TableId>,
    /// A flush has taken changes that are not in the file yet: no table may be dropped.
    pub pinned: bool,
    /// Grows when tables are dropped from memory.
    pub drops: u64,
    /// Memory for tables, in bytes.
    pub limit_bytes: u64,
    pub needs: Prerequisites<Prerequisite>,
    /// Block to the offset of its new grain.
    pub reserved: HashMap<u64, u64>,
    /// Block to the place of its move.
    pub moving: HashMap<u64, u64>,
    /// Sorted by generation.
    pub quarantined: VecDeque<Quarantined>,
    pub generation: u64,
}

/// A VMDK that is open for writing.
#[derive(Debug)]
pub(super) struct Writing {
    pub layout: Arc<Layout>,
    pub document: Document,
    /// One barrier for each of [`Layout::stores`].
    pub barriers: Vec<Barrier>,
    /// Held while files grow and are surveyed.
    pub preparing: Mutex<()>,
    /// Held by a flush from the moment in which it takes the dirty state.
    pub flushing: Mutex<()>,
    state: Mutex<State>,
}

impl Writing {
    /// The caller has checked that the image can be written ([`Layout::refusal`]).
    pub fn new(layout: Arc<Layout>) -> Result<Self> {
        let extent_states = layout.extents.iter();
        let extent_states = extent_states.map(|SparseExtent { tables, .. }| ExtentState {
            directories: tables.entries.clone(),
            places: tables.directories.clone(),
            space: None,
        });
        let extent_states = extent_states.collect();
        let state = State {
            extent_states,
            tables: HashMap::new(),
            dirty: BTreeSet::new(),
            dirty_directories: BTreeSet::new(),
            pinned: false,
            drops: 0,
            limit_bytes: TABLES_BYTES,
            needs: Prerequisites::default(),
            reserved: HashMap::new(),
            moving: HashMap::new(),
            quarantined: VecDeque::new(),
            generation: 0,
        };
        Ok(Self {
            document: Document::read(&layout)?,
            barriers: layout.stores.iter().map(|store| Barrier::new(Arc::clone(store))).collect(),
            layout,
            preparing: Mutex::new(()),
            flushing: Mutex::new(()),
            state: Mutex::new(state),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn tables(&self, extent: usize) -> &Tables {
        &self.layout.extents[extent].tables
    }

    pub(super) fn file(&self, extent: usize) -> &Arc<dyn Store> {
        &self.layout.extents[extent].store
    }

    pub(super) fn check_barriers(&self) -> Result<()> {
        Ok(self.barriers.iter().try_for_each(Barrier::check)?)
    }

    /// Syncs the files of these extents. A sync that failed in one file counts for all.
    pub(super) fn sync_extents(&self, extents: &BTreeSet<usize>, doing: &'static str) -> Result<()> {
        self.check_barriers()?;
        for &extent in extents {
            self.barriers[usize::from(self.layout.extents[extent].store_index)].sync(doing)?;
        }
        self.check_barriers()
    }

    /// The same for all files.
    pub(super) fn sync_all(&self, doing: &'static str) -> Result<()> {
        self.check_barriers()?;
        self.barriers.iter().try_for_each(|barrier| barrier.sync(doing))?;
        self.check_barriers()
    }

    pub(super) fn misuse(&self, block: u64, what: &str) -> ImageError {
        let error = io::Error::new(io::ErrorKind::InvalidInput, format!("block {block} {what}"));
        ImageError::io("change a block", &*self.layout.stores[0], 0, error)
    }

    pub(super) fn place(&self, block: u64) -> Result<Place> {
        self.layout.place(block).ok_or_else(|| self.misuse(block, "lies beyond the end of the disk"))
    }

    pub(super) fn unsupported(&self, what: &str, hint: &str) -> ImageError {
        ImageError::Unsupported { path: self.layout.stores[0].name().to_owned(), what: what.into(), hint: hint.into() }
    }

    pub(super) fn without_payload(&self) -> ImageError {
        self.unsupported("a block without payload in this kind of VMDK", "write zeros over the range instead")
    }

    /// Whether so much is dirty that a flush is due.
    pub(super) fn is_flush_due(&self) -> bool {
        let state = self.lock();
        let limit_bytes = (state.limit_bytes / 2).clamp(64 << 10, MAX_DIRTY_SECTORS as u64 * SECTOR_BYTES);
        state.dirty.len() as u64 * SECTOR_BYTES > limit_bytes
    }

    fn is_all_sparse(&self) -> bool {
        self.layout.parts.iter().all(|part| matches!(part.content, Content::Sparse(_)))
    }
}

impl ImageWriter for Writing {
    /// Writes a new CID, durably: a child of the former contents no longer accepts this image.
    fn begin_writing(&self) -> Result<()> {
        self.document.begin(&self.barriers[0])
    }

    fn begin_writing_as(&self, linkage_id: LinkageId) -> Result<()> {
        self.document.set(&self.barriers[0], linkage_id)
    }

    fn set_linkage_id(&self, linkage_id: LinkageId) -> Result<()> {
        self.document.set(&self.barriers[0], linkage_id)
    }

    fn set_parent_link(&self, link: &ParentLink) -> Result<()> {
        self.document.relink(&self.barriers[0], link)
    }

    fn prepare(&self, blocks: Range<u64>) -> Result<()> {
        self.prepare_blocks(blocks)
    }

    fn reserve(&self, block: u64) -> Result<Option<Reservation>> {
        match self.place(block)? {
            Place::Zero => Err(self.unsupported(
                "a write to a part of the disk for which the descriptor names no file",
                "such a part only reads as zeros: write elsewhere, or convert the disk to a new one",
            )),
            Place::Flat { store, offset_bytes } => Ok(Some(Reservation { store, offset_bytes, init: None })),
            Place::Grain { extent, grain, .. } => self.reserve_grain(&mut self.lock(), block, extent, grain),
        }
    }

    fn initialised(&self, _block: u64) {}

    fn commit(&self, block: u64, change: Commit) -> Result<Option<BlockState>> {
        match (self.place(block)?, change) {
            (Place::Grain { extent, grain, .. }, change) => {
                self.commit_grain(&mut self.lock(), (block, extent, grain), change)
            }
            (Place::Flat { store, offset_bytes }, Commit::Whole | Commit::Sectors { .. }) => {
                Ok(Some(BlockState::Data { store, offset_bytes }))
            }
            _ => Err(self.without_payload()),
        }
    }

    fn tracks_sectors(&self) -> bool {
        false
    }

    fn can_forget_blocks(&self) -> bool {
        self.is_all_sparse()
    }

    fn can_store_zero(&self) -> bool {
        self.is_all_sparse()
            && (!self.layout.is_child() || self.layout.extents.iter().all(|extent| extent.tables.has_zeros()))
    }

    fn resize(&self, size_bytes: u64) -> Result<()> {
        self.grow_to(size_bytes)
    }

    fn check_growth(&self, size_bytes: u64) -> Result<()> {
        new_size::check(&self.layout, &self.document, size_bytes).map(drop)
    }

    fn check_shrink(&self, size_bytes: u64) -> Result<()> {
        self.check_smaller(size_bytes).map(drop)
    }

    fn shrink(&self, size_bytes: u64) -> Result<()> {
        self.make_smaller(size_bytes)
    }

    fn limit_tables(&self, bytes: u64) {
        // Excess tables are dropped when the next one is inserted.
        self.lock().limit_bytes = bytes;
    }

    fn is_dirty(&self) -> bool {
        let state = self.lock();
        state.pinned || !state.dirty.is_empty() || !state.dirty_directories.is_empty()
    }

    fn check_syncs(&self) -> Result<()> {
        self.check_barriers()
    }

    fn flush(&self) -> Result<()> {
        self.barriers[0].share(|| self.run_flush())?;
        // The sync of one file may have failed elsewhere after this flush had passed it.
        self.check_barriers()
    }

    fn freed_generation(&self) -> u64 {
        self.lock().generation
    }

    fn recycle(&self, generation: u64) {
        self.recycle_pieces(generation);
    }

    fn begin_compacting(&self) -> Result<()> {
        self.begin_compacting_files()
    }

    fn reserve_move(&self, block: u64) -> Result<Option<MoveTo>> {
        self.reserve_move_of(&mut self.lock(), block)
    }

    fn recycle_for_moves(&self, generation: u64) {
        self.recycle_pieces_for_moves(generation);
    }

    fn give_up_moves(&self) {
        self.give_up_places();
    }

    fn cut_free_tail(&self) -> Result<()> {
        self.cut_tails()
    }

    fn close(&self) -> Result<()> {
        self.flush()?;
        self.trim()
    }
}
