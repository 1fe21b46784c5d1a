//! The blocks of a file, sorted by offset, in bounded memory.
//!
//! ```text
//!   BAT, by block ─▶ one bit for each sector in which a block begins ─▶ blocks, by offset
//!                    (a window of the file)
//! ```
//!
//! A table may have 2^32 entries in any order, so the entries are not gathered and sorted. Instead,
//! the sectors in which blocks begin are marked in a bitmap of at most [`MAX_WINDOW_BYTES`], which
//! covers 128 GiB of the file. The table is read once for each such window. Entries have 32 bits,
//! so blocks begin within 2 TiB, and the table is read at most 16 times.

use super::{
    layout::{Blocks, Piece},
    table,
};
use crate::Result;
use diskwright_format::vhd::SECTOR_BYTES;
use diskwright_store::Store;

/// Maximum length of the bitmap of a window, in bytes.
const MAX_WINDOW_BYTES: u64 = 32 << 20;

/// An item that a walk over the blocks visits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WalkItem {
    /// A block outside the file or overlapping its tables. All of these are visited first, in the
    /// order of the table.
    Misplaced { block: u64, piece: Piece },
    /// A block that begins in the same sector as another. Visited before the window in which it
    /// lies.
    Duplicate { block: u64, entry: u32 },
    /// A valid block. Visited by ascending offset.
    Block {
        entry: u32,
        piece: Piece,
        /// Entry and end of the earlier block that ends last.
        before: Option<(u32, u64)>,
        /// Where the last earlier block or table ends.
        free_from: u64,
    },
}

/// Length of the bitmap for a file of `end_bytes`.
fn window_bytes(end_bytes: u64) -> u64 {
    (end_bytes.div_ceil(SECTOR_BYTES).min(1 << 32).div_ceil(64) * 8).min(MAX_WINDOW_BYTES)
}

/// Visits all blocks of a file whose first `end_bytes` may hold blocks.
///
/// # Errors
/// `Io`, and errors of `visit`, which end the walk.
pub(super) fn walk(
    store: &dyn Store,
    blocks: &Blocks,
    end_bytes: u64,
    visit: &mut dyn FnMut(WalkItem) -> Result<()>,
) -> Result<()> {
    let mut marks = vec![0u64; (window_bytes(end_bytes) / 8) as usize];
    let window_sectors = marks.len() as u64 * 64;
    let mut tables = blocks.tables(end_bytes).into_iter().peekable();
    let mut before = None;
    let mut free_from = 0;
    let mut first = 0;
    loop {
        table::scan(store, blocks, blocks.count, |block, entry| {
            let piece = blocks.place(entry);
            if blocks.fault_of(&piece, end_bytes).is_some() {
                if first == 0 {
                    visit(WalkItem::Misplaced { block, piece })?;
                }
                return Ok(true);
            }
            let Some(at) = u64::from(entry).checked_sub(first).filter(|&at| at < window_sectors) else {
                return Ok(true);
            };
            let (word, bit) = (&mut marks[(at / 64) as usize], 1 << (at % 64));
            if *word & bit != 0 {
                visit(WalkItem::Duplicate { block, entry })?;
            }
            *word |= bit;
            Ok(true)
        })?;
        for (index, word) in marks.iter_mut().enumerate() {
            let mut word = std::mem::take(word);
            while word != 0 {
                let entry = (first + index as u64 * 64 + u64::from(word.trailing_zeros())) as u32;
                word &= word - 1;
                let piece = blocks.place(entry);
                while let Some(table) = tables.next_if(|table| table.start < piece.bitmap_offset) {
                    free_from = free_from.max(table.end);
                }
                visit(WalkItem::Block { entry, piece, before, free_from })?;
                free_from = free_from.max(piece.end);
                if before.is_none_or(|(_, end)| piece.end > end) {
                    before = Some((entry, piece.end));
                }
            }
        }
        first += window_sectors;
        if window_sectors == 0 || first >= end_bytes.div_ceil(SECTOR_BYTES).min(1 << 32) {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded_by_one_window() {
        for end_bytes in [0, 1, 512, 128 << 30, (128 << 30) + 1, 2040 << 30, 1 << 62, u64::MAX] {
            assert!(window_bytes(end_bytes) <= 32 << 20, "{end_bytes}");
            assert!(window_bytes(end_bytes) * 8 * SECTOR_BYTES >= end_bytes.min(128 << 30), "{end_bytes}");
        }
    }
}
