//! What of a file is in use: asked once in a session, before the first change.
//!
//! The BAT is read from beginning to end (holes of a sparse one are skipped), and every MiB that something refers to is
//! marked in a bitmap, which for 64 TiB takes 8 MiB. The survey finds the end of what is in use, the holes before it, which
//! can be used again, and blocks that share space: to write into such a file would spread the damage, so it is refused.

use super::layout::{EntryState, Layout};
use crate::error::Result;
use diskwright_format::vhdx::{BITMAP_BLOCK_BYTES, Invalid, MIB, bat::EntryKind};
use diskwright_store::Store;

/// Nothing may lie beyond this: the largest disk, twice.
const MAX_FILE_MIB: u64 = (128 << 40) / MIB;
/// Most pieces of free space that are remembered.
const MAX_FREE_PIECES: usize = 64 << 10;

/// See the module.
#[derive(Debug)]
pub(super) struct Survey {
    /// First byte after everything in use, a multiple of 1 MiB.
    pub(super) end_bytes: u64,
    /// Payload blocks that have no space.
    pub(super) unallocated_blocks: u64,
    /// Offset and length of free pieces before `end_bytes`: of a payload block's length, and with a parent of 1 MiB.
    pub(super) free: Vec<(u64, u64)>,
}

/// One bit for each MiB.
#[derive(Default)]
struct Marks(Vec<u64>);

impl Marks {
    fn get(&self, mib: u64) -> bool {
        self.0.get((mib / 64) as usize).is_some_and(|word| word >> (mib % 64) & 1 == 1)
    }

    /// Marks a range of bytes; says whether any of it was marked. The caller has checked the end against `MAX_FILE_MIB`.
    fn mark(&mut self, start_bytes: u64, end_bytes: u64) -> bool {
        let mut taken = false;
        let end_mib = end_bytes.div_ceil(MIB);
        let words = end_mib.div_ceil(64) as usize;
        if self.0.len() < words {
            self.0.resize(words, 0);
        }
        for mib in start_bytes / MIB..end_mib {
            let word = &mut self.0[(mib / 64) as usize];
            taken |= *word >> (mib % 64) & 1 == 1;
            *word |= 1 << (mib % 64);
        }
        taken
    }

    fn end_mib(&self) -> u64 {
        let last = self.0.iter().rposition(|&word| word != 0);
        last.map_or(0, |index| 64 * index as u64 + 64 - u64::from(self.0[index].leading_zeros()))
    }
}

/// Surveys a file whose log is empty.
///
/// # Errors
/// `Corrupt` for an entry that cannot be, and for blocks that share space.
pub(super) fn survey(layout: &Layout, store: &dyn Store, file_bytes: u64) -> Result<Survey> {
    let mut marks = Marks::default();
    let too_far = |end_bytes: u64| {
        Invalid::new(
            "BAT entry",
            0,
            format!("something that ends at {end_bytes}"),
            "everything within the first 128 TiB of the file",
        )
    };
    for &(start_bytes, end_bytes) in &layout.metadata {
        if end_bytes > MAX_FILE_MIB * MIB {
            return Err(layout.corrupt_entry(store, 0, too_far(end_bytes)));
        }
        marks.mark(start_bytes, end_bytes);
    }
    let mut allocated_blocks = 0;
    layout.each_entry(store, &mut |index, entry| {
        let place = match layout.geometry.what_is(index) {
            EntryKind::Bitmap { .. } => layout
                .bitmap_place(entry, file_bytes)
                .map(|place| place.map(|offset_bytes| (offset_bytes, BITMAP_BLOCK_BYTES, true))),
            EntryKind::Payload { block } => layout.block_state(block, entry, file_bytes).map(|state| match state {
                EntryState::Data { offset_bytes } | EntryState::Partial { offset_bytes } => {
                    allocated_blocks += 1;
                    Some((offset_bytes, layout.geometry.block_bytes(), true))
                }
                // An unmapped block may keep its space; another writer would use it again.
                EntryState::Zero if entry.offset_bytes() != 0 => {
                    Some((entry.offset_bytes(), layout.geometry.block_bytes(), false))
                }
                EntryState::Zero | EntryState::Absent => None,
            }),
        };
        let place = place.map_err(|invalid| layout.corrupt_entry(store, index, invalid))?;
        let Some((offset_bytes, len_bytes, must_own)) = place else { return Ok(()) };
        let end_bytes = offset_bytes.saturating_add(len_bytes);
        if end_bytes > MAX_FILE_MIB * MIB || (!must_own && end_bytes > file_bytes) {
            return if must_own { Err(layout.corrupt_entry(store, index, too_far(end_bytes))) } else { Ok(()) };
        }
        if marks.mark(offset_bytes, end_bytes) && must_own {
            let invalid =
                Invalid::new("BAT entry", 0, format!("a block at {offset_bytes}"), "space that no other block has");
            return Err(layout.corrupt_entry(store, index, invalid));
        }
        Ok(())
    })?;
    let end_mib = marks.end_mib();
    Ok(Survey {
        end_bytes: end_mib * MIB,
        unallocated_blocks: layout.geometry.payload_blocks().saturating_sub(allocated_blocks),
        free: free_pieces(layout, &marks, end_mib),
    })
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
