//! Writes to a VDI.
//!
//! ```text
//!   reserve ─▶ reserved ─ commit ─▶ entry in memory (dirty) ─ flush ─▶ in the block map
//! ```
//!
//! A new space is all zeros when it is handed out, and gets its entry when its payload is written.
//! A block has no sector bits, so the disk fills a new block of a child from below before it writes
//! a part of it (copy-up).
//!
//! While the map has an invalid entry no space is handed out or freed: the survey refuses it,
//! because the damaged block may lie in space that looks free. Blocks that have space can be
//! overwritten.
//!
//! One mutex guards [`State`]: pages of the map, reservations, space. No I/O happens under it,
//! because the disk above calls `reserve` and `commit` under its own lock. What is not in memory is
//! noted as a [`Prerequisite`], and the result is `None`: the caller releases its lock, calls
//! `prepare.rs`, and retries. Lock order: `preparing`, the header's mutex (`head.rs`), the state
//! mutex. `map.rs` changes entries, `survey.rs` surveys the file before the first change of an
//! entry, `flush.rs` makes changes durable, `compact.rs` moves blocks and cuts the file, `grow.rs`
//! and `longer_map.rs` enlarge the disk, `shrink.rs` makes it smaller.

use super::{head::Head, layout::Layout};
use crate::{
    BlockState, Commit, ImageError, ImageWriter, LinkageId, MoveTo, ParentLink, Reservation, Result,
    needs::Prerequisites, space::Space,
};
use diskwright_format::vdi::VdiKind;
use diskwright_store::{
    Barrier, Store,
    sync::{Mutex, MutexGuard},
};
use std::{
    collections::{BTreeSet, HashMap},
    io,
    ops::Range,
    sync::{Arc, PoisonError},
};

/// Entries of a page of the map: 4 KiB.
pub(super) const PAGE_ENTRIES: u64 = 1024;
/// Clean pages are dropped above this number of bytes, unless a limit is set.
const PAGES_BYTES: u64 = 16 << 20;

/// What a block lacks, besides its page of the map in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prerequisite {
    /// The survey of the file.
    Survey,
    /// That survey, and space that reads as zeros.
    Space,
}

/// The changing state of an image.
#[derive(Debug)]
pub(super) struct State {
    /// Entries of the map.
    pub entries: u64,
    pub size_bytes: u64,
    /// Length of the file.
    pub file_bytes: u64,
    /// Pages of the map in memory, as words.
    pub pages: HashMap<u64, Box<[u32]>>,
    /// Changed pages.
    pub dirty: BTreeSet<u64>,
    /// A flush has taken changes that are not in the file yet: no page may be dropped.
    pub pinned: bool,
    /// Grows when pages are dropped from memory.
    pub drops: u64,
    /// Memory for pages, in bytes.
    pub limit_bytes: u64,
    pub needs: Prerequisites<Prerequisite>,
    /// `None` before the survey.
    pub space: Option<Space>,
    /// Number of entries that have space, from the survey on.
    pub mapped: u64,
    /// Spaces by the header, which counts them before one of them is handed out.
    pub announced: u64,
    /// Block to the offset of its new space.
    pub reserved: HashMap<u64, u64>,
    /// Block to the place of its move.
    pub moving: HashMap<u64, u64>,
}

/// A VDI that is open for writing.
#[derive(Debug)]
pub(super) struct Writing {
    /// As of the open. The size and the length of the map may have grown since.
    pub layout: Layout,
    pub store: Arc<dyn Store>,
    pub barrier: Barrier,
    pub head: Head,
    /// Held while the file is surveyed, grows or is cut.
    pub preparing: Mutex<()>,
    /// Held by a flush from the moment in which it takes the dirty state.
    pub flushing: Mutex<()>,
    state: Mutex<State>,
}

impl Writing {
    /// The caller has checked that the image can be written ([`Layout::refusal`]).
    ///
    /// # Errors
    /// `Io`.
    pub fn new(mut layout: Layout, store: Arc<dyn Store>) -> Result<Self> {
        let head = Head::read(&*store)?;
        layout.fill_last_space(&*store)?;
        let state = State {
            entries: layout.header.blocks.into(),
            size_bytes: layout.size_bytes,
            file_bytes: layout.file_bytes,
            pages: HashMap::new(),
            dirty: BTreeSet::new(),
            pinned: false,
            drops: 0,
            limit_bytes: PAGES_BYTES,
            needs: Prerequisites::default(),
            space: None,
            mapped: 0,
            announced: 0,
            reserved: HashMap::new(),
            moving: HashMap::new(),
        };
        Ok(Self {
            layout,
            barrier: Barrier::new(Arc::clone(&store)),
            store,
            head,
            preparing: Mutex::new(()),
            flushing: Mutex::new(()),
            state: Mutex::new(state),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn space_bytes(&self) -> u64 {
        self.layout.header.space_bytes()
    }

    /// Whether all blocks keep their space.
    pub(super) fn is_fixed(&self) -> bool {
        self.layout.header.kind == VdiKind::Fixed
    }

    pub(super) fn unsupported(&self, what: &str, hint: &str) -> ImageError {
        ImageError::Unsupported { path: self.store.name().to_owned(), what: what.into(), hint: hint.into() }
    }

    pub(super) fn misuse(&self, block: u64, what: &str) -> ImageError {
        let error = io::Error::new(io::ErrorKind::InvalidInput, format!("block {block} {what}"));
        ImageError::io("change a block", &*self.store, 0, error)
    }

    pub(super) fn io(&self, doing: &'static str, offset_bytes: u64) -> impl Fn(io::Error) -> ImageError {
        move |error| ImageError::io(doing, &*self.store, offset_bytes, error)
    }

    /// Whether so much is dirty that a flush is due.
    pub(super) fn is_flush_due(&self) -> bool {
        let state = self.lock();
        state.dirty.len() as u64 * PAGE_ENTRIES * 4 > (state.limit_bytes / 2).max(64 << 10)
    }

    /// The current virtual size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.lock().size_bytes
    }
}

impl ImageWriter for Writing {
    /// Writes a new id of the contents, durably: a child of the former contents no longer accepts
    /// this image.
    fn begin_writing(&self) -> Result<()> {
        self.head.begin(&self.barrier)
    }

    fn begin_writing_as(&self, linkage_id: LinkageId) -> Result<()> {
        self.head.set_linkage(&self.barrier, linkage_id)
    }

    fn set_linkage_id(&self, linkage_id: LinkageId) -> Result<()> {
        self.head.set_linkage(&self.barrier, linkage_id)
    }

    fn set_parent_link(&self, link: &ParentLink) -> Result<()> {
        self.head.set_parent(&self.barrier, link)
    }

    fn prepare(&self, blocks: Range<u64>) -> Result<()> {
        self.prepare_blocks(blocks)
    }

    fn reserve(&self, block: u64) -> Result<Option<Reservation>> {
        self.reserve_block(&mut self.lock(), block)
    }

    fn initialised(&self, _block: u64) {}

    fn commit(&self, block: u64, change: Commit) -> Result<Option<BlockState>> {
        self.commit_block(&mut self.lock(), block, change)
    }

    fn tracks_sectors(&self) -> bool {
        false
    }

    fn can_forget_blocks(&self) -> bool {
        !self.is_fixed()
    }

    fn can_store_zero(&self) -> bool {
        !self.is_fixed()
    }

    fn resize(&self, size_bytes: u64) -> Result<()> {
        self.grow(size_bytes)
    }

    fn check_growth(&self, size_bytes: u64) -> Result<()> {
        let present_bytes = self.size_bytes();
        self.blocks_for(present_bytes, size_bytes).map(drop)
    }

    fn blocks_in_the_way(&self, size_bytes: u64) -> Result<Vec<u64>> {
        self.find_blocks_in_the_way(size_bytes)
    }

    fn reserve_away(&self, block: u64) -> Result<Option<MoveTo>> {
        self.reserve_away_of(&mut self.lock(), block)
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
        state.pinned || !state.dirty.is_empty()
    }

    fn check_syncs(&self) -> Result<()> {
        Ok(self.barrier.check()?)
    }

    fn flush(&self) -> Result<()> {
        self.barrier.share(|| self.run_flush())
    }

    fn freed_generation(&self) -> u64 {
        self.lock().space.as_ref().map_or(0, Space::generation)
    }

    fn recycle(&self, generation: u64) {
        self.recycle_pieces(generation);
    }

    fn begin_compacting(&self) -> Result<()> {
        self.begin_compacting_file()
    }

    fn reserve_move(&self, block: u64) -> Result<Option<MoveTo>> {
        self.reserve_move_of(&mut self.lock(), block)
    }

    fn recycle_for_moves(&self, generation: u64) {
        if let Some(space) = &mut self.lock().space {
            space.recycle_for_moves(generation);
        }
    }

    fn give_up_moves(&self) {
        self.give_up_places(&mut self.lock());
    }

    fn cut_free_tail(&self) -> Result<()> {
        self.cut_tail()
    }

    fn fill_gaps(&self) -> Result<()> {
        self.flush()?;
        self.move_into_gaps()
    }

    fn close(&self) -> Result<()> {
        self.flush()?;
        self.trim()
    }
}
