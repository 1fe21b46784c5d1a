//! State of a writable image, guarded by one mutex: table pages, space, reservations. Memory only.

use super::{layout::Layout, marks::Marks, pages::PageCache};
use crate::{needs::Prerequisites, space::Space};
use diskwright_format::vhdx::{BatEntry, Invalid, bat::BAT_ENTRY_BYTES};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

/// What a block's reservation or commit lacked, besides the page of its BAT entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prerequisite {
    /// The survey of the file (`survey.rs`).
    Survey,
    /// The survey, and space for the payload that reads as zeros.
    Payload,
    /// The survey, and the block's bits: in the cache, or space for a bitmap block.
    Bitmap,
}

#[derive(Debug)]
pub(super) struct State {
    /// Current offsets of the tables and size of the disk.
    pub(super) layout: Arc<Layout>,
    pub(super) pages: PageCache,
    /// The file's length at open or at the survey, in bytes. Later growth is recorded in `space`.
    pub(super) surveyed_bytes: u64,
    /// Created by the first change of a session; stays `None` while an entry is damaged.
    pub(super) space: Option<Space>,
    /// Why no space is allocated: index of a damaged entry and what is wrong with it. Found by the
    /// first change of a session.
    pub(super) damaged: Option<(u64, Invalid)>,
    /// Kept space that another entry refers to as well.
    pub(super) contested: Marks,
    /// The file is not cut below this offset: it was created with room for all its blocks.
    pub(super) keep_end_bytes: u64,
    /// Reserved blocks that are not yet committed, with the offset of their space.
    pub(super) reserved: HashMap<u64, u64>,
    /// Blocks whose kept space was zeroed and not handed out since.
    pub(super) cleared: HashSet<u64>,
    /// Blocks that are being moved, with the offset of their new space.
    pub(super) moving: HashMap<u64, u64>,
    pub(super) needs: Prerequisites<Prerequisite>,
}

impl State {
    pub(super) fn of_file(layout: Arc<Layout>, file_bytes: u64) -> Self {
        Self {
            layout,
            pages: PageCache::default(),
            surveyed_bytes: file_bytes,
            space: None,
            damaged: None,
            contested: Marks::default(),
            keep_end_bytes: 0,
            reserved: HashMap::new(),
            cleared: HashSet::new(),
            moving: HashMap::new(),
            needs: Prerequisites::default(),
        }
    }

    /// The file's length in bytes, to validate the offsets in entries.
    pub(super) fn file_bytes(&self) -> u64 {
        self.space.as_ref().map_or(self.surveyed_bytes, Space::file_end_bytes)
    }

    pub(super) fn freed_generation(&self) -> u64 {
        self.space.as_ref().map_or(0, Space::generation)
    }

    /// Whether the survey has run, so that tables may be changed.
    pub(super) fn is_surveyed(&self) -> bool {
        self.space.is_some() || self.damaged.is_some()
    }

    /// Records the result of a survey of a file of `file_bytes`. `space` has the free pieces.
    pub(super) fn install(&mut self, file_bytes: u64, space: Space, contested: Marks, keep_end_bytes: u64) {
        self.surveyed_bytes = file_bytes;
        self.contested = contested;
        self.keep_end_bytes = keep_end_bytes;
        self.space = Some(space);
    }

    /// Records that a survey of a file of `file_bytes` found a damaged entry: no space is
    /// allocated.
    pub(super) fn install_damaged(&mut self, file_bytes: u64, damaged: (u64, Invalid)) {
        self.surveyed_bytes = file_bytes;
        self.damaged = Some(damaged);
    }

    /// Forgets what the survey has found. The next change surveys the file again.
    pub(super) fn forget_survey(&mut self) {
        (self.space, self.damaged, self.keep_end_bytes) = (None, None, 0);
        self.contested = Marks::default();
        self.cleared.clear();
    }

    /// Records that the kept space of a block reads as zeros.
    pub(super) fn set_cleared(&mut self, block: u64) {
        self.cleared.insert(block);
    }

    pub(super) fn entry(&self, entry_offset_bytes: u64) -> BatEntry {
        let mut raw = [0; BAT_ENTRY_BYTES as usize];
        self.pages.overlay(&mut raw, entry_offset_bytes);
        BatEntry::from_le_bytes(raw)
    }

    pub(super) fn set_entry(&mut self, entry_offset_bytes: u64, entry: BatEntry) {
        self.pages
            .change(entry_offset_bytes, BAT_ENTRY_BYTES, &mut |_, piece| piece.copy_from_slice(&entry.to_le_bytes()));
    }
}
