//! What the state mutex of a writable image guards: table pages, space, reservations. Memory only.

use super::{layout::Layout, marks::Marks, pages::PageCache};
use crate::{lacks::Lacks, space::Space};
use diskwright_format::vhdx::{BatEntry, Invalid, bat::BAT_ENTRY_BYTES};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

/// What a block's reservation or commit had to wait for, beside the page of its table entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lack {
    /// The survey.
    Survey,
    /// The survey, and space for the payload that reads as zeros.
    Payload,
    /// The survey, and the bits of the block: in the cache, or space for a bitmap block.
    Bitmap,
}

/// What the image's state mutex guards.
#[derive(Debug)]
pub(super) struct State {
    /// Where the tables are and how large the disk is, as of now.
    pub(super) layout: Arc<Layout>,
    pub(super) pages: PageCache,
    /// The file's length when it was opened, or surveyed. Later `space` knows how it has grown.
    pub(super) surveyed_bytes: u64,
    /// Made by the first change of a session; stays `None` while an entry is damaged.
    pub(super) space: Option<Space>,
    /// Why no space is handed out: the index of a damaged entry and what is wrong with it, found by
    /// the first change.
    pub(super) damaged: Option<(u64, Invalid)>,
    /// Places that entries without data name, but not they alone.
    pub(super) contested: Marks,
    /// The file is not cut below this: it was made with room for all its blocks.
    pub(super) keep_end_bytes: u64,
    /// Blocks whose space is taken and not yet committed, with the first byte of it.
    pub(super) reserved: HashMap<u64, u64>,
    /// Blocks whose kept place reads as zeros and was not handed out since.
    pub(super) cleared: HashSet<u64>,
    pub(super) lacks: Lacks<Lack>,
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
            lacks: Lacks::default(),
        }
    }

    /// The file's length as far as tables and space may count on it.
    pub(super) fn file_bytes(&self) -> u64 {
        self.space.as_ref().map_or(self.surveyed_bytes, Space::file_end_bytes)
    }

    pub(super) fn freed_generation(&self) -> u64 {
        self.space.as_ref().map_or(0, Space::generation)
    }

    /// Whether the survey was made, so that tables may be changed.
    pub(super) fn is_surveyed(&self) -> bool {
        self.space.is_some() || self.damaged.is_some()
    }

    /// The survey of a file of `file_bytes` found `space`, with its free pieces, and contested
    /// places.
    pub(super) fn install(&mut self, file_bytes: u64, space: Space, contested: Marks, keep_end_bytes: u64) {
        self.surveyed_bytes = file_bytes;
        self.contested = contested;
        self.keep_end_bytes = keep_end_bytes;
        self.space = Some(space);
    }

    /// The survey of a file of `file_bytes` found an entry that cannot be right: no space is handed
    /// out.
    pub(super) fn install_damaged(&mut self, file_bytes: u64, damaged: (u64, Invalid)) {
        self.surveyed_bytes = file_bytes;
        self.damaged = Some(damaged);
    }

    /// The kept place of a block reads as zeros from now on.
    pub(super) fn is_cleared(&mut self, block: u64) {
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
