//! Finds which parts of a file are in use: once in a session, before the first change.
//!
//! The BAT is read from start to end (holes of a sparse BAT are skipped), and every MiB that an
//! entry refers to is marked (`marks.rs`). The survey finds the end of the used space, and the
//! holes before it that can be reused.
//!
//! ```text
//!   owned   metadata, blocks with data, bitmap blocks      two owners of one MiB: the survey fails
//!   kept    offsets of entries without data, and of blocks beyond the disk's end
//! ```
//!
//! If two blocks with data share space, a write would spread the damage, so every change of a table
//! is refused. A kept offset that another entry refers to as well is *contested*: the space is left
//! alone, and its block gets new space.
//!
//! An invalid entry is recorded ([`Survey::damaged`]). Its block's data may lie in any space that
//! looks free, or beyond the end of the file, where a growing file would put another block's data.
//! So in such a file no space is allocated and the length stays as it is. Changes that need no
//! space are still possible: bits of existing bitmap blocks, and blocks that become whole or zero.

use super::{
    layout::{EntryState, Layout, MAX_FILE_MIB},
    marks::Marks,
    tables::Tables,
};
use crate::error::Result;
use diskwright_format::vhdx::{BITMAP_BLOCK_BYTES, BatEntry, Invalid, MIB, bat::EntryKind};
use diskwright_store::Store;
use std::ops::ControlFlow;

/// Maximum number of recorded pieces of free space.
const MAX_FREE_PIECES: usize = 64 << 10;

/// Result of a survey.
#[derive(Debug)]
pub(super) struct Survey {
    /// First byte after all used space, a multiple of 1 MiB.
    pub(super) end_bytes: u64,
    /// Number of payload blocks without data.
    pub(super) unallocated_blocks: u64,
    /// Offset and length of free pieces before `end_bytes`. A piece has the length of a payload
    /// block; with a parent also 1 MiB.
    pub(super) free: Vec<(u64, u64)>,
    /// Kept space that another entry refers to as well.
    pub(super) contested: Marks,
    /// Index of the first invalid entry, and what is wrong with it.
    pub(super) damaged: Option<(u64, Invalid)>,
}

/// Surveys a file. Its log must be empty and its tables unchanged in this session.
///
/// # Errors
/// `Io`; `Corrupt` for blocks with data that share space.
pub(super) fn survey(layout: &Layout, store: &dyn Store, file_bytes: u64) -> Result<Survey> {
    let mut marks = Marks::default();
    let too_far = |end_bytes: u64| {
        Invalid::new(
            "BAT entry",
            0,
            format!("a range that ends at {end_bytes}"),
            "ranges within the first 128 TiB of the file",
        )
    };
    for &(start_bytes, end_bytes) in &layout.metadata {
        if end_bytes > MAX_FILE_MIB * MIB {
            return Err(layout.corrupt_entry(store, 0, too_far(end_bytes)));
        }
        marks.mark(start_bytes, end_bytes);
    }
    let mut found = SurveyMarks { kept: Marks::default(), contested: Marks::default(), owned: marks };
    let (mut allocated_blocks, mut damaged) = (0, None);
    layout.each_entry(&Tables::of_file(store), 0..layout.entries(), &mut |index, entry| {
        let owned = match layout.geometry.what_is(index) {
            EntryKind::Payload { block } if block >= layout.geometry.payload_blocks() => {
                found.keep(beyond_end(layout, block, entry, file_bytes), layout.geometry.block_bytes());
                return Ok(ControlFlow::Continue(()));
            }
            EntryKind::Bitmap { .. } => {
                layout.bitmap_place(entry, file_bytes).map(|place| place.map(|at| (at, BITMAP_BLOCK_BYTES)))
            }
            EntryKind::Payload { block } => layout.block_state(block, entry, file_bytes).map(|state| match state {
                EntryState::Data { offset_bytes } | EntryState::Partial { offset_bytes } => {
                    allocated_blocks += 1;
                    Some((offset_bytes, layout.geometry.block_bytes()))
                }
                EntryState::Zero | EntryState::Absent => {
                    found.keep(layout.kept_place(entry, file_bytes), layout.geometry.block_bytes());
                    None
                }
            }),
        };
        let (offset_bytes, len_bytes) = match owned {
            Ok(Some(place)) => place,
            Ok(None) => return Ok(ControlFlow::Continue(())),
            Err(invalid) => {
                damaged.get_or_insert((index, invalid));
                return Ok(ControlFlow::Continue(()));
            }
        };
        let end_bytes = offset_bytes.saturating_add(len_bytes);
        if end_bytes > MAX_FILE_MIB * MIB {
            return Err(layout.corrupt_entry(store, index, too_far(end_bytes)));
        }
        if found.owned.mark(offset_bytes, end_bytes) {
            let invalid =
                Invalid::new("BAT entry", 0, format!("a block at {offset_bytes}"), "space that no other block has");
            return Err(layout.corrupt_entry(store, index, invalid));
        }
        Ok(ControlFlow::Continue(()))
    })?;
    let SurveyMarks { owned, kept, mut contested } = found;
    let mut both = owned.clone();
    both.merge(&kept, |owned, kept| owned & kept);
    contested.merge(&both, |contested, both| contested | both);
    if contested.end_mib() == 0 {
        contested = Marks::default();
    }
    let mut marks = owned;
    marks.merge(&kept, |owned, kept| owned | kept);
    let end_mib = marks.end_mib();
    Ok(Survey {
        end_bytes: end_mib * MIB,
        unallocated_blocks: layout.geometry.payload_blocks().saturating_sub(allocated_blocks),
        free: free_pieces(layout, &marks, end_mib),
        contested,
        damaged,
    })
}

/// The marks during a survey.
struct SurveyMarks {
    owned: Marks,
    kept: Marks,
    contested: Marks,
}

impl SurveyMarks {
    fn keep(&mut self, place: Option<u64>, len_bytes: u64) {
        let Some(offset_bytes) = place else { return };
        let end_bytes = offset_bytes.saturating_add(len_bytes);
        if end_bytes <= MAX_FILE_MIB * MIB && self.kept.mark(offset_bytes, end_bytes) {
            self.contested.mark(offset_bytes, end_bytes);
        }
    }
}

/// The space of a block beyond the disk's end; `None` if its entry has no valid offset.
pub(super) fn beyond_end(layout: &Layout, block: u64, entry: BatEntry, file_bytes: u64) -> Option<u64> {
    match layout.block_state(block, entry, file_bytes) {
        Ok(EntryState::Data { offset_bytes } | EntryState::Partial { offset_bytes }) => {
            Some(offset_bytes).filter(|at| at + layout.geometry.block_bytes() <= file_bytes)
        }
        _ => layout.kept_place(entry, file_bytes),
    }
}

fn free_pieces(layout: &Layout, marks: &Marks, end_mib: u64) -> Vec<(u64, u64)> {
    let block_mib = layout.geometry.block_bytes() / MIB;
    let mut free = Vec::new();
    let mut mib = 0;
    while mib < end_mib && free.len() < MAX_FREE_PIECES {
        let run = (mib..end_mib.min(mib + block_mib)).take_while(|&at| !marks.get(at)).count() as u64;
        if run == block_mib {
            free.push((mib * MIB, block_mib * MIB));
        } else if layout.has_parent {
            free.extend((mib..mib + run).map(|at| (at * MIB, BITMAP_BLOCK_BYTES)));
        }
        mib += run.max(1);
    }
    free
}
