//! Makes a file smaller: blocks and sector bitmap blocks move to lower places.
//!
//! ```text
//!   begin_compacting   survey; space that entries without data keep is freed      writes
//!   reserve_move       lowest free piece of a block's length ─▶ State::moving     memory only
//!   (the disk copies the payload)
//!   commit Moved       entry ─▶ the new place; old space quarantined              memory only
//!   move_tables        copy of a bitmap block; its entry; cached pages move along
//!   flush              payload and copies durable, then the entries through the log (`flush.rs`)
//!   close              the file is cut after its last block
//!   cut_free_tail      the same while the disk is in use: the log is emptied first
//! ```
//!
//! Why a power cut does no harm: a moved block is a new mapping like any other, so `flush.rs` makes
//! its payload durable before its entry. Until the entry is durable, the old place is untouched,
//! because its space is quarantined.
//!
//! A bitmap block is copied while the log lock is held, so none of its pages is on its way through
//! the log. The copy lacks only dirty pages. These move with the block in the cache, and the next
//! flush writes them to the new place. Older log entries name the old place. They are never
//! replayed once that space is reused, because a flush with the new entry came in between.

use super::{
    header::{sync, write},
    image::{VhdxImage, Writing},
    layout::EntryState,
    lock,
    state::{Prerequisite, State},
    tables::{READ_BAT, READ_BITMAP, Tables},
};
use crate::{
    Commit, ImageWriter, MovePlace, MoveTo,
    error::{ImageError, Result},
    space::Space,
};
use diskwright_format::vhdx::{
    BITMAP_BLOCK_BYTES, BatEntry, BitmapState, MIB, PayloadState,
    bat::{BAT_ENTRY_BYTES, EntryKind},
};
use std::ops::ControlFlow;

/// Blocks with kept space that are gathered at once.
const BATCH_BLOCKS: usize = 4096;

impl VhdxImage {
    /// Surveys the file, and frees what only blocks without data keep.
    pub(super) fn begin_compacting_file(&self, writing: &Writing) -> Result<()> {
        self.survey_for_compacting(writing)?;
        let mut first_block = 0;
        loop {
            let blocks = self.kept_blocks(writing, first_block)?;
            let Some(last) = blocks.last() else { return Ok(()) };
            first_block = last + 1;
            for block in blocks {
                self.commit_waiting(block, Commit::Zero)?;
            }
        }
    }

    /// Surveys the file. From now on it may be cut after its last block.
    pub(super) fn survey_for_compacting(&self, writing: &Writing) -> Result<()> {
        self.barrier.check()?;
        if self.layout.fixed {
            return Err(ImageError::Unsupported {
                path: self.barrier.store().name().to_owned(),
                what: "compacting a fixed disk, which keeps the space of all its blocks,".into(),
                hint: "convert it to a dynamic disk".into(),
            });
        }
        let _turn = lock(&writing.preparing);
        self.begin_change(writing)?;
        let mut state = lock(&writing.state);
        self.check_undamaged(&state)?;
        state.keep_end_bytes = 0;
        Ok(())
    }

    /// The first blocks from `first_block` on that have no data and keep their space.
    pub(super) fn kept_blocks(&self, writing: &Writing, first_block: u64) -> Result<Vec<u64>> {
        let layout = writing.layout();
        let geometry = &layout.geometry;
        let mut found = Vec::new();
        if first_block >= geometry.payload_blocks() {
            return Ok(found);
        }
        let tables = Tables::now(&**self.barrier.store(), Some(&writing.state));
        let file_bytes = tables.file_bytes()?;
        layout.each_entry(&tables, geometry.payload_index(first_block)..layout.entries(), &mut |index, entry| {
            if let EntryKind::Payload { block } = geometry.what_is(index)
                && block < geometry.payload_blocks()
                && layout.kept_place(entry, file_bytes).is_some()
            {
                found.push(block);
            }
            Ok(if found.len() == BATCH_BLOCKS { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        Ok(found)
    }

    /// Cuts free space off the end of the file, while the disk is in use.
    ///
    /// Log entries record the length of the file, and their replay requires it. So the log is
    /// emptied first, after the pages of the last flush are durable in place, and no flush begins
    /// before the cut. Reservations that need a longer file wait for `preparing`.
    pub(super) fn cut_tail(&self, writing: &Writing) -> Result<()> {
        self.barrier.check()?;
        let _turn = lock(&writing.preparing);
        let mut log = lock(&writing.log);
        let tail = {
            let mut state = lock(&writing.state);
            let may_cut = state.keep_end_bytes == 0;
            state.space.as_mut().filter(|_| may_cut).and_then(Space::take_tail)
        };
        let Some(tail) = tail else { return Ok(()) };
        let end_bytes = tail.start_bytes();
        let cut = sync(&self.barrier).and_then(|()| log.clear(&self.barrier, &writing.headers)).and_then(|()| {
            let cut = self.barrier.store().set_len(end_bytes);
            cut.map_err(|error| self.io("cut the file after its last block", end_bytes, error))
        });
        if cut.is_err()
            && let Some(space) = &mut lock(&writing.state).space
        {
            space.put_back(tail);
        }
        cut
    }

    pub(super) fn reserve_move_of(&self, state: &mut State, block: u64) -> Result<Option<MoveTo>> {
        self.barrier.check()?;
        let Some(current) = self.current(state, block)? else { return Ok(None) };
        let (EntryState::Data { offset_bytes: from_bytes } | EntryState::Partial { offset_bytes: from_bytes }) =
            current
        else {
            return Ok(Some(MoveTo::Stay));
        };
        if !state.is_surveyed() {
            state.needs.note(block, Prerequisite::Survey);
            return Ok(None);
        }
        self.check_undamaged(state)?;
        let block_bytes = state.layout.geometry.block_bytes();
        let Some(space) = &mut state.space else { return Ok(Some(MoveTo::Stay)) };
        let mut reserved = state.moving.remove(&block);
        if let Some(to_bytes) = reserved.take_if(|to_bytes| *to_bytes >= from_bytes) {
            // The block got new space since, further down.
            space.add_free(to_bytes, block_bytes);
        }
        let Some(to_bytes) = reserved.or_else(|| space.take_for_move(block_bytes, from_bytes)) else {
            return Ok(Some(MoveTo::Stay));
        };
        state.moving.insert(block, to_bytes);
        // Some writers cut the last block of the file at the end of the disk.
        let len_bytes = block_bytes.min(state.file_bytes().saturating_sub(from_bytes));
        Ok(Some(MoveTo::Place(MovePlace { store: 0, from_bytes, to_bytes, len_bytes })))
    }

    pub(super) fn commit_moved(
        &self,
        state: &mut State,
        block: u64,
        current: EntryState,
    ) -> Result<Option<EntryState>> {
        let Some(&to_bytes) = state.moving.get(&block) else {
            return Err(self.misuse(format!("block {block} is committed as moved without a place to move to")));
        };
        let (from_bytes, payload_state, next) = match current {
            EntryState::Data { offset_bytes } => {
                (offset_bytes, PayloadState::FullyPresent, EntryState::Data { offset_bytes: to_bytes })
            }
            EntryState::Partial { offset_bytes } => {
                (offset_bytes, PayloadState::PartiallyPresent, EntryState::Partial { offset_bytes: to_bytes })
            }
            EntryState::Absent | EntryState::Zero => {
                return Err(self.misuse(format!("block {block} has no data and is committed as moved")));
            }
        };
        state.moving.remove(&block);
        let place = self.payload_entry_bytes(state, block);
        state.set_entry(place, BatEntry::payload(payload_state, to_bytes));
        let block_bytes = state.layout.geometry.block_bytes();
        if let Some(space) = &mut state.space {
            space.quarantine(from_bytes, block_bytes);
        }
        Ok(Some(next))
    }

    /// Frees places that were reserved for a move and never committed.
    pub(super) fn release_moving(&self, state: &mut State) {
        let block_bytes = state.layout.geometry.block_bytes();
        for (_, to_bytes) in std::mem::take(&mut state.moving) {
            if let Some(space) = &mut state.space {
                space.add_free(to_bytes, block_bytes);
            }
        }
    }

    /// Moves the sector bitmap blocks down, the highest first.
    pub(super) fn move_bitmap_blocks(&self, writing: &Writing) -> Result<()> {
        self.barrier.check()?;
        if !self.layout.has_parent {
            return Ok(());
        }
        let mut places = self.bitmap_blocks(writing)?;
        places.sort_unstable_by_key(|&(offset_bytes, _)| std::cmp::Reverse(offset_bytes));
        let _turn = lock(&writing.preparing);
        for (from_bytes, index) in places {
            let taken = {
                let mut state = lock(&writing.state);
                self.check_undamaged(&state)?;
                state.space.as_mut().and_then(|space| space.cut_for_move(BITMAP_BLOCK_BYTES, from_bytes))
            };
            let Some(to_bytes) = taken else { return Ok(()) };
            let moved = self.move_bitmap_block(writing, index, from_bytes, to_bytes);
            if moved.is_err()
                && let Some(space) = &mut lock(&writing.state).space
            {
                space.add_free(to_bytes, BITMAP_BLOCK_BYTES);
            }
            moved?;
        }
        Ok(())
    }

    /// Offset and index of the entry of each sector bitmap block: at most one for each 2^23 sectors
    /// of the disk.
    fn bitmap_blocks(&self, writing: &Writing) -> Result<Vec<(u64, u64)>> {
        let layout = writing.layout();
        let tables = Tables::now(&**self.barrier.store(), Some(&writing.state));
        let file_bytes = tables.file_bytes()?;
        let mut places = Vec::new();
        layout.each_entry(&tables, 0..layout.entries(), &mut |index, entry| {
            if let EntryKind::Bitmap { .. } = layout.geometry.what_is(index)
                && let Ok(Some(offset_bytes)) = layout.bitmap_place(entry, file_bytes)
            {
                places.push((offset_bytes, index));
            }
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(places)
    }

    /// The caller holds `preparing`, so no other thread moves bitmap blocks or makes new ones.
    fn move_bitmap_block(&self, writing: &Writing, index: u64, from_bytes: u64, to_bytes: u64) -> Result<()> {
        let _log = lock(&writing.log);
        let mut bytes = vec![0; BITMAP_BLOCK_BYTES as usize];
        let store = self.barrier.store();
        store.read_at(&mut bytes, from_bytes).map_err(|error| self.io(READ_BITMAP, from_bytes, error))?;
        write(&self.barrier, "copy a sector bitmap block", &bytes, to_bytes)?;
        loop {
            let layout = writing.layout();
            let place = layout.entry_offset_bytes(index);
            self.load(writing, READ_BAT, place, BAT_ENTRY_BYTES)?;
            let mut state = lock(&writing.state);
            if !state.pages.has(place, BAT_ENTRY_BYTES) {
                continue;
            }
            state.set_entry(place, BatEntry::bitmap(BitmapState::Present, to_bytes));
            state.pages.move_range(from_bytes, BITMAP_BLOCK_BYTES, to_bytes);
            if let Some(space) = &mut state.space {
                space.quarantine(from_bytes, BITMAP_BLOCK_BYTES);
            }
            return Ok(());
        }
    }

    /// Length of the file if `blocks` blocks have space and there are no gaps.
    pub(super) fn packed_bytes(&self, blocks: u64) -> Result<u64> {
        let layout = self.layout();
        let tables = self.tables();
        let file_bytes = tables.file_bytes()?;
        let mut bitmaps = 0;
        if layout.has_parent {
            layout.each_entry(&tables, 0..layout.entries(), &mut |index, entry| {
                let is_bitmap = matches!(layout.geometry.what_is(index), EntryKind::Bitmap { .. });
                bitmaps += u64::from(is_bitmap && matches!(layout.bitmap_place(entry, file_bytes), Ok(Some(_))));
                Ok(ControlFlow::Continue(()))
            })?;
        }
        let tables_bytes = layout.metadata.iter().map(|(start, end)| end - start).sum::<u64>().next_multiple_of(MIB);
        let last_table_end = layout.metadata.last().map_or(0, |&(_, end)| end).next_multiple_of(MIB);
        let blocks_bytes = blocks.saturating_mul(layout.geometry.block_bytes()) + bitmaps * BITMAP_BLOCK_BYTES;
        Ok(tables_bytes.saturating_add(blocks_bytes).max(last_table_end))
    }
}
