//! The walk over the blocks of a VHD before the first change: where they end, which space between
//! them is free, and that no two overlap.
//!
//! Memory: the walk uses what [`super::order`] says. The result is bounded by [`MAX_HOLES`] and
//! [`MAX_UNPADDED`].

use super::{
    PAGE_BYTES, corrupt,
    layout::Blocks,
    order::{self, WalkItem},
};
use crate::Result;
use diskwright_format::vhd::SECTOR_BYTES;
use diskwright_store::Store;
use std::collections::HashSet;

/// Maximum number of recorded holes between blocks, so that a hostile file cannot exhaust memory.
const MAX_HOLES: usize = 65536;
/// Maximum number of recorded blocks without a pad. In a file with more, all blocks that existed at
/// open count as such.
const MAX_UNPADDED: usize = 65536;

/// Payload offsets of blocks without a pad of ours before the bitmap: other programs placed them.
/// Their space is a little too short for a new piece.
#[derive(Debug)]
pub(super) enum Unpadded {
    Few(HashSet<u64>),
    /// All payload below this offset.
    Below(u64),
}

impl Unpadded {
    /// The set of `found`, in which [`survey`] lists no more than it may.
    pub fn of(found: HashSet<u64>, used_end_bytes: u64) -> Self {
        if found.len() > MAX_UNPADDED { Self::Below(used_end_bytes) } else { Self::Few(found) }
    }

    pub fn has(&self, payload_offset: u64) -> bool {
        match self {
            Self::Few(offsets) => offsets.contains(&payload_offset),
            Self::Below(end) => payload_offset < *end,
        }
    }

    /// Adds a block that was moved to the place of one of them.
    pub fn add(&mut self, payload_offset: u64) {
        match self {
            Self::Few(offsets) => drop(offsets.insert(payload_offset)),
            Self::Below(end) => *end = (*end).max(payload_offset + 1),
        }
    }
}

/// Result of the walk over the blocks.
pub(super) struct Survey {
    pub blocks: u64,
    pub blocks_end_bytes: u64,
    /// First byte after all used space, rounded up to a sector.
    pub used_end_bytes: u64,
    /// Free pieces between blocks. Empty for files of other programs, which may use that space.
    pub holes: Vec<u64>,
    pub unpadded: HashSet<u64>,
    /// Where the first block or hole begins; without either, `used_end_bytes`.
    pub first_block_bytes: u64,
}

pub(super) fn survey(store: &dyn Store, blocks: &Blocks, is_ours: bool, len_bytes: u64) -> Result<Survey> {
    let (area_bytes, piece_bytes) = (blocks.bitmap_area_bytes(), blocks.piece_bytes());
    let used_end_bytes = blocks.tables_end_bytes(len_bytes);
    let mut survey = Survey {
        blocks: 0,
        blocks_end_bytes: 0,
        used_end_bytes,
        holes: Vec::new(),
        unpadded: HashSet::new(),
        first_block_bytes: u64::MAX,
    };
    let overlap = |one: u64, other: u64| {
        let found = format!("two blocks at offset {one} and {other}");
        corrupt(store, "block allocation table", blocks.table_offset, found, "blocks that do not overlap")
    };
    order::walk(store, blocks, len_bytes, &mut |item| {
        let (piece, before, free_from) = match item {
            WalkItem::Misplaced { block, piece } => return Err(blocks.misplaced(store, block, &piece, len_bytes)),
            WalkItem::Duplicate { entry, .. } => {
                let offset = blocks.place(entry).bitmap_offset;
                return Err(overlap(offset, offset));
            }
            WalkItem::Block { piece, before, free_from, .. } => (piece, before, free_from),
        };
        if let Some((entry, end)) = before
            && end > piece.bitmap_offset
        {
            return Err(overlap(blocks.place(entry).bitmap_offset, piece.bitmap_offset));
        }
        survey.blocks += 1;
        survey.blocks_end_bytes = survey.blocks_end_bytes.max(piece.end);
        let pad_start = piece.payload_offset.saturating_sub(area_bytes);
        let is_unpadded = !piece.payload_offset.is_multiple_of(PAGE_BYTES) || pad_start < free_from;
        let start = if is_unpadded { piece.bitmap_offset } else { pad_start };
        survey.first_block_bytes = survey.first_block_bytes.min(start);
        if is_unpadded && survey.unpadded.len() <= MAX_UNPADDED {
            survey.unpadded.insert(piece.payload_offset);
        }
        // A hole that is large enough for a block was freed in an earlier session.
        let mut hole = free_from.next_multiple_of(PAGE_BYTES);
        while is_ours && survey.holes.len() < MAX_HOLES && hole + piece_bytes <= pad_start {
            survey.first_block_bytes = survey.first_block_bytes.min(hole);
            survey.holes.push(hole);
            hole += piece_bytes;
        }
        Ok(())
    })?;
    survey.used_end_bytes = used_end_bytes.max(survey.blocks_end_bytes.next_multiple_of(SECTOR_BYTES));
    survey.first_block_bytes = survey.first_block_bytes.min(survey.used_end_bytes);
    Ok(survey)
}
