//! Makes a disk smaller. No other thread uses the image.
//!
//! ```text
//!   1  flush                                          the tables in the file are current
//!   2  sync; ONE log entry with the size ─▶ sync      this entry is the atomic change (grow.rs)
//!      the size in place; sync
//!   3  space of blocks beyond the new end punched; entries beyond the new end zeroed; sync
//!   4  bytes of the last block beyond the new end zeroed
//!   5  the log emptied; the file cut after its last block; a new survey
//! ```
//!
//! Why a power cut does no harm: before step 2 nothing is changed. After it the disk has the new
//! size, and entries beyond the end of the disk are ignored. Step 3 changes only such entries, and
//! writes the others in their sectors as they are. A log entry that is replayed after the cut can
//! bring an ignored entry back. The file is cut when the log is empty, as a replay requires the
//! length that its entries record.
//!
//! The size goes first, because a disk of the old size without its last blocks would have lost
//! data. A call with the present size finishes a shrink that was interrupted: it repeats steps 3 to
//! 5 if entries beyond the end or unused space at the end of the file are found. It punches
//! nothing: the space of an entry that was left behind may belong to another block by now.
//!
//! A fixed disk, and one that was created with room for all its blocks, keeps room for those that
//! have no space.

use super::{
    corrupt,
    grow::Plan,
    header::{sync, write},
    image::{VhdxImage, Writing},
    layout::{EntryState, Layout},
    lock,
    survey::survey,
    tables::READ_BAT,
};
use crate::error::{ImageError, Result};
use diskwright_format::vhdx::{
    BITMAP_BLOCK_BYTES, BatEntry, BatGeometry, Invalid,
    bat::{BAT_ENTRY_BYTES, EntryKind},
};
use diskwright_store::{FileRange, Zeroing};
use std::{ops::Range, sync::Arc};

/// Bytes of a table read or written by one call.
const STEP_BYTES: u64 = 64 << 10;
/// Longest range that is punched by one call.
const PUNCH_BYTES: u64 = 64 << 20;

/// Space to punch. Neighbours are punched together.
#[derive(Debug, Default)]
struct Pending(Range<u64>);

impl Pending {
    fn add(&mut self, image: &VhdxImage, offset_bytes: u64, len_bytes: u64) {
        if offset_bytes != self.0.end || self.0.end - self.0.start >= PUNCH_BYTES {
            self.punch(image);
            self.0 = offset_bytes..offset_bytes;
        }
        self.0.end = offset_bytes + len_bytes;
    }

    /// Where the file system cannot punch holes, the space stays allocated: nothing depends on it.
    fn punch(&mut self, image: &VhdxImage) {
        let range = std::mem::take(&mut self.0);
        if !range.is_empty() {
            let range = FileRange { offset_bytes: range.start, len_bytes: range.end - range.start };
            let _ = image.barrier.store().zero_range(range, Zeroing::Deallocate);
        }
    }
}

impl VhdxImage {
    /// Makes the disk smaller, or finishes that, by the steps of this module.
    pub(super) fn make_smaller(&self, writing: &Writing, size_bytes: u64) -> Result<()> {
        self.barrier.check()?;
        let _turn = lock(&writing.preparing);
        let before = writing.layout();
        let after = self.smaller(&before, size_bytes)?;
        let is_smaller = size_bytes < before.geometry.size_bytes();
        if !is_smaller && !self.has_leftovers(writing, &before)? {
            return Ok(());
        }
        self.begin_change(writing)?;
        {
            let state = lock(&writing.state);
            self.check_undamaged(&state)?;
            if !state.reserved.is_empty() {
                return Err(self.io("make the disk smaller", 0, std::io::Error::other("a request is in flight")));
            }
        }
        self.flush_shared(writing)?;
        if is_smaller {
            let plan = Plan {
                before: Arc::clone(&before),
                after: after.clone(),
                new_region_bytes: None,
                first_block_bytes: None,
            };
            self.commit_size(writing, plan, &mut Vec::new())?;
        }
        lock(&writing.state).pages.drop_all();
        self.drop_entries(&before, &after)?;
        sync(&self.barrier)?;
        self.clear_tail(&after)?;
        self.empty_log_and_cut(writing, &after)
    }

    /// The layout for a smaller disk.
    pub(super) fn smaller(&self, before: &Layout, size_bytes: u64) -> Result<Layout> {
        let old = &before.geometry;
        let refused = |found: String, expected: &str| ImageError::Unsupported {
            path: self.barrier.store().name().to_owned(),
            what: format!("a new size of {found} for this open disk of {} bytes", old.size_bytes()),
            hint: format!("the size must be {expected}"),
        };
        if size_bytes > old.size_bytes() {
            return Err(refused(format!("{size_bytes} bytes"), "at most the present one"));
        }
        let geometry = BatGeometry::new(size_bytes, old.block_bytes() as u32, old.logical_sector_bytes())
            .map_err(|invalid| refused(invalid.found, &invalid.expected))?;
        Ok(Layout { geometry, ..before.clone() })
    }

    /// The entries that have no meaning in `layout`, as file offsets: from the first one beyond the
    /// disk to the end of the region. Bitmap entries of the last chunk are among them.
    fn beyond(&self, layout: &Layout) -> Result<Range<u64>> {
        let geometry = &layout.geometry;
        let first = geometry.payload_index(geometry.payload_blocks()).min(layout.entries());
        let region = layout.metadata.iter().find(|&&(start_bytes, _)| start_bytes == layout.bat_offset_bytes);
        let Some(&(_, end_bytes)) = region else {
            let invalid = Invalid::new("region table", 0, "no region of the block allocation table", "one");
            return Err(corrupt(&**self.barrier.store(), layout.bat_offset_bytes, invalid));
        };
        Ok(layout.entry_offset_bytes(first)..end_bytes)
    }

    /// Whether the entry at `index` belongs to a chunk of the disk.
    fn is_kept(layout: &Layout, index: u64) -> bool {
        layout.has_parent
            && index < layout.entries()
            && matches!(layout.geometry.what_is(index), EntryKind::Bitmap { .. })
    }

    /// Calls `visit(file offset, bytes)` for pieces of the entries beyond the end of the disk.
    /// Holes are skipped.
    fn each_piece_beyond(&self, layout: &Layout, visit: &mut dyn FnMut(u64, &mut [u8]) -> Result<bool>) -> Result<()> {
        let store = &**self.barrier.store();
        let Range { start: mut at, end } = self.beyond(layout)?;
        let mut buf = vec![0; STEP_BYTES as usize];
        while at < end {
            let data = store.next_data(at).map_err(|error| self.io(READ_BAT, at, error))?;
            let Some(data) = data.filter(|data| data.offset_bytes < end) else { return Ok(()) };
            at = at.max(data.offset_bytes - data.offset_bytes % BAT_ENTRY_BYTES);
            let piece = &mut buf[..(end - at).min(STEP_BYTES) as usize];
            store.read_at(piece, at).map_err(|error| self.io(READ_BAT, at, error))?;
            if !visit(at, piece)? {
                return Ok(());
            }
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// Whether an interrupted shrink has left something: entries beyond the end of the disk, or
    /// unused space at the end of the file.
    fn has_leftovers(&self, writing: &Writing, layout: &Layout) -> Result<bool> {
        if lock(&writing.state).is_surveyed() {
            return Ok(false);
        }
        let mut found = false;
        self.each_piece_beyond(layout, &mut |at, piece| {
            for (index, raw) in (self.index_at(layout, at)..).zip(piece.as_chunks::<8>().0) {
                found |= *raw != [0; 8] && !Self::is_kept(layout, index);
            }
            Ok(!found)
        })?;
        let file_bytes = self.file_bytes()?;
        let survey = survey(layout, &**self.barrier.store(), file_bytes)?;
        let slack_bytes = file_bytes.saturating_sub(survey.end_bytes);
        let room_bytes = survey.unallocated_blocks * layout.geometry.block_bytes();
        let is_room = slack_bytes == room_bytes || layout.fixed && slack_bytes < room_bytes;
        Ok(survey.damaged.is_none() && (found || slack_bytes > 0 && !is_room))
    }

    fn index_at(&self, layout: &Layout, offset_bytes: u64) -> u64 {
        (offset_bytes - layout.bat_offset_bytes) / BAT_ENTRY_BYTES
    }

    /// Step 3. The survey of this session has shown that no blocks of `before` share space.
    fn drop_entries(&self, before: &Layout, after: &Layout) -> Result<()> {
        let file_bytes = self.file_bytes()?;
        let mut pending = Pending::default();
        let result = self.each_piece_beyond(after, &mut |at, piece| {
            let mut is_changed = false;
            for (index, raw) in (self.index_at(after, at)..).zip(piece.as_chunks_mut::<8>().0) {
                if *raw == [0; 8] || Self::is_kept(after, index) {
                    continue;
                }
                let entry = BatEntry::from_le_bytes(*raw);
                if let Some((offset_bytes, len_bytes)) = space_of(before, index, entry, file_bytes) {
                    pending.add(self, offset_bytes, len_bytes);
                }
                *raw = [0; 8];
                is_changed = true;
            }
            if is_changed {
                write(&self.barrier, "clear entries of the block allocation table", piece, at)?;
            }
            Ok(true)
        });
        pending.punch(self);
        result
    }

    /// Step 5: the log is emptied, the file cut and surveyed again.
    fn empty_log_and_cut(&self, writing: &Writing, after: &Layout) -> Result<()> {
        sync(&self.barrier)?;
        lock(&writing.log).clear(&self.barrier, &writing.headers)?;
        let keeps_room = {
            let mut state = lock(&writing.state);
            let keeps_room = state.keep_end_bytes > 0;
            state.forget_survey();
            keeps_room
        };
        let store = &**self.barrier.store();
        let file_bytes = self.file_bytes()?;
        let found = survey(after, store, file_bytes)?;
        let room_bytes = if keeps_room { found.unallocated_blocks * after.geometry.block_bytes() } else { 0 };
        let end_bytes = found.end_bytes.saturating_add(room_bytes);
        if found.damaged.is_none() && end_bytes < file_bytes {
            store.set_len(end_bytes).map_err(|error| self.io("cut the file after its last block", end_bytes, error))?;
        }
        self.begin_change(writing)?;
        sync(&self.barrier)
    }
}

/// The space of a block of `layout` with data, or of a bitmap block: offset and length.
fn space_of(layout: &Layout, index: u64, entry: BatEntry, file_bytes: u64) -> Option<(u64, u64)> {
    if index >= layout.entries() {
        return None;
    }
    match layout.geometry.what_is(index) {
        EntryKind::Bitmap { .. } => {
            let place = layout.bitmap_place(entry, file_bytes).ok()??;
            Some((place, BITMAP_BLOCK_BYTES))
        }
        EntryKind::Payload { block } if block < layout.geometry.payload_blocks() => {
            match layout.block_state(block, entry, file_bytes).ok()? {
                EntryState::Data { offset_bytes } | EntryState::Partial { offset_bytes } => {
                    let len_bytes = layout.geometry.block_bytes().min(file_bytes.saturating_sub(offset_bytes));
                    Some((offset_bytes, len_bytes))
                }
                EntryState::Absent | EntryState::Zero => None,
            }
        }
        EntryKind::Payload { .. } => None,
    }
}
