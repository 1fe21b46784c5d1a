//! The life of a block: reserve and commit.
//!
//! Both change only memory (and the file's length): the table pages in the cache become dirty, and a flush carries them to the
//! file. All that can fail is done before the first page is changed, so a failure leaves the tables as they were.
//!
//! A block without data whose entry still names a place (a fixed disk's block that was unmapped) is put back there, if
//! nothing else names that place: so a fixed disk does not grow. Otherwise space comes from holes and the file's end. The
//! kept place may hold the block's old bytes and is zeroed before it is handed out. No other block's bytes can be there,
//! nor a request on its way: the entry had no data when the file was opened, durably, and gets no place back in a session.
//!
//! While an entry of the table is damaged no space is handed out (`survey.rs` says why). Blocks that have their space are
//! read and overwritten as ever.
//!
//! Space that a block is given reads as zeros. So a write of some sectors to a block without a parent, or to one that
//! hides its parent (Zero), makes the whole block right. Only where a parent shows through is a sector bitmap
//! needed.

use super::{
    image::VhdxImage,
    layout::EntryState,
    lock,
    pages::PageCache,
    survey::{Marks, survey},
};
use crate::{
    error::{ImageError, Result},
    image::{Commit, Reservation},
    space::Space,
};
use diskwright_format::vhdx::{
    BITMAP_BLOCK_BYTES, BatEntry, BitmapState, Invalid, MIB, PayloadState, bat::BAT_ENTRY_BYTES,
};
use diskwright_store::{FileRange, Store, Zeroing};
use std::{collections::HashMap, io};

const READ_BAT: &str = "read the block allocation table";

/// What the image's state mutex guards.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) pages: PageCache,
    /// Made by the first change of a session; stays `None` while an entry is damaged.
    pub(super) space: Option<Space>,
    /// Why no space is handed out: the index of a damaged entry and what is wrong with it, found by the first change.
    damaged: Option<(u64, Invalid)>,
    /// Places that entries without data name, but not they alone.
    contested: Marks,
    /// The file is not cut below this: it was made with room for all its blocks.
    pub(super) keep_end_bytes: u64,
    /// Blocks whose space is taken and not yet committed, with the first byte of it.
    pub(super) reserved: HashMap<u64, u64>,
}

impl State {
    pub(super) fn freed_generation(&self) -> u64 {
        self.space.as_ref().map_or(0, Space::generation)
    }

    pub(super) fn recycle(&mut self, store: &dyn Store, generation: u64) {
        if let Some(space) = &mut self.space {
            space.recycle(generation);
            space.punch_recycled(store);
        }
    }

    fn entry(&self, entry_offset_bytes: u64) -> BatEntry {
        let mut raw = [0; BAT_ENTRY_BYTES as usize];
        self.pages.overlay(&mut raw, entry_offset_bytes);
        BatEntry::from_le_bytes(raw)
    }

    fn set_entry(&mut self, entry_offset_bytes: u64, entry: BatEntry) {
        self.pages
            .change(entry_offset_bytes, BAT_ENTRY_BYTES, &mut |_, piece| piece.copy_from_slice(&entry.to_le_bytes()));
    }
}

impl VhdxImage {
    pub(super) fn reserve_block(&self, state: &mut State, block: u64) -> Result<Reservation> {
        self.barrier.check()?;
        if let Some(&offset_bytes) = state.reserved.get(&block) {
            return Ok(Reservation { store: 0, offset_bytes, init: None });
        }
        let offset_bytes = match self.current(state, block)? {
            EntryState::Data { offset_bytes } | EntryState::Partial { offset_bytes } => offset_bytes,
            EntryState::Absent | EntryState::Zero => {
                let offset_bytes = self.place_for(state, block)?;
                state.reserved.insert(block, offset_bytes);
                offset_bytes
            }
        };
        Ok(Reservation { store: 0, offset_bytes, init: None })
    }

    pub(super) fn commit_block(&self, state: &mut State, block: u64, change: Commit) -> Result<EntryState> {
        self.barrier.check()?;
        let current = self.current(state, block)?;
        match change {
            Commit::Zero | Commit::Discard => self.commit_zero(state, block, current, change == Commit::Discard),
            Commit::Sectors { first, count } if self.layout.has_parent => {
                let sectors = self.layout.geometry.sectors_per_block();
                if count == 0 || first.checked_add(count).is_none_or(|end| end > sectors) {
                    return Err(self.misuse(format!(
                        "sectors {first} and {count} more of a block of {sectors} cannot be committed"
                    )));
                }
                match current {
                    EntryState::Data { .. } => Ok(current),
                    EntryState::Zero => self.commit_whole(state, block, current),
                    EntryState::Absent | EntryState::Partial { .. } => {
                        self.commit_sectors(state, block, current, first, count)
                    }
                }
            }
            Commit::Sectors { .. } | Commit::Whole => self.commit_whole(state, block, current),
        }
    }

    /// The block's state, with the page of its entry loaded.
    fn current(&self, state: &mut State, block: u64) -> Result<EntryState> {
        if block >= self.layout.geometry.payload_blocks() {
            return Err(self.misuse(format!(
                "block {block} lies beyond the disk's {} blocks",
                self.layout.geometry.payload_blocks()
            )));
        }
        let index = self.layout.geometry.payload_index(block);
        let place = self.layout.entry_offset_bytes(index);
        state.pages.load(&**self.barrier.store(), READ_BAT, place, BAT_ENTRY_BYTES)?;
        self.layout
            .block_state(block, state.entry(place), self.file_bytes()?)
            .map_err(|invalid| self.layout.corrupt_entry(&**self.barrier.store(), index, invalid))
    }

    fn payload_entry_bytes(&self, block: u64) -> u64 {
        self.layout.entry_offset_bytes(self.layout.geometry.payload_index(block))
    }

    /// Where the block's payload is or was reserved.
    fn payload_place(&self, state: &State, block: u64, current: EntryState) -> Result<u64> {
        match current {
            EntryState::Data { offset_bytes } | EntryState::Partial { offset_bytes } => Ok(offset_bytes),
            EntryState::Absent | EntryState::Zero => {
                let reserved = state.reserved.get(&block).copied();
                reserved.ok_or_else(|| self.misuse(format!("block {block} is committed without having been reserved")))
            }
        }
    }

    fn commit_whole(&self, state: &mut State, block: u64, current: EntryState) -> Result<EntryState> {
        if let EntryState::Data { .. } = current {
            return Ok(current);
        }
        let offset_bytes = self.payload_place(state, block, current)?;
        self.begin_change(state)?;
        state.reserved.remove(&block);
        state.set_entry(self.payload_entry_bytes(block), BatEntry::payload(PayloadState::FullyPresent, offset_bytes));
        Ok(EntryState::Data { offset_bytes })
    }

    fn commit_sectors(
        &self,
        state: &mut State,
        block: u64,
        current: EntryState,
        first: u32,
        count: u32,
    ) -> Result<EntryState> {
        let geometry = &self.layout.geometry;
        let in_disk = (geometry.bytes_in_disk(block) / u64::from(geometry.logical_sector_bytes())) as u32;
        if first == 0 && count >= in_disk {
            return self.commit_whole(state, block, current);
        }
        let offset_bytes = self.payload_place(state, block, current)?;
        self.begin_change(state)?;
        let bitmap_bytes = self.bitmap_block(state, block)?;
        let (within, len_bytes) = geometry.bitmap_place(block);
        let place = bitmap_bytes + within;
        state.pages.load(&**self.barrier.store(), "read a sector bitmap", place, len_bytes)?;
        if current == EntryState::Absent {
            // Bits of a block that is not present have no meaning, and some writers leave them set.
            let mut stale = false;
            state.pages.each_piece(place, len_bytes, &mut |_, piece| stale |= piece.iter().any(|&byte| byte != 0));
            if stale {
                state.pages.change(place, len_bytes, &mut |_, piece| piece.fill(0));
            }
        }
        let (first_byte, last_byte) = (first / 8, (first + count - 1) / 8);
        state.pages.change(place + u64::from(first_byte), u64::from(last_byte - first_byte) + 1, &mut |at, piece| {
            for (byte, bits) in (first_byte as usize + at..).zip(piece) {
                let base = byte as u32 * 8;
                let from = first.max(base) - base;
                let to = (first + count).min(base + 8) - base;
                *bits |= (((1u16 << to) - 1) & !((1u16 << from) - 1)) as u8;
            }
        });
        let mut missing = 0;
        state.pages.each_piece(place, u64::from(in_disk.div_ceil(8)), &mut |at, piece| {
            for (byte, bits) in (at..).zip(piece) {
                let valid = (in_disk - byte as u32 * 8).min(8);
                missing += valid - (bits & (u16::MAX >> (16 - valid)) as u8).count_ones();
            }
        });
        if missing == 0 {
            return self.commit_whole(state, block, current);
        }
        if current == EntryState::Absent {
            state.reserved.remove(&block);
            state.set_entry(
                self.payload_entry_bytes(block),
                BatEntry::payload(PayloadState::PartiallyPresent, offset_bytes),
            );
        }
        Ok(EntryState::Partial { offset_bytes })
    }

    /// The sector bitmap block of a block's chunk, made if there is none yet.
    fn bitmap_block(&self, state: &mut State, block: u64) -> Result<u64> {
        let index = self.layout.geometry.bitmap_index(self.layout.geometry.chunk_of(block));
        let place = self.layout.entry_offset_bytes(index);
        state.pages.load(&**self.barrier.store(), READ_BAT, place, BAT_ENTRY_BYTES)?;
        let found = self.layout.bitmap_place(state.entry(place), self.file_bytes()?);
        if let Some(offset_bytes) =
            found.map_err(|invalid| self.layout.corrupt_entry(&**self.barrier.store(), index, invalid))?
        {
            return Ok(offset_bytes);
        }
        let offset_bytes = self.take(state, BITMAP_BLOCK_BYTES)?;
        state.set_entry(place, BatEntry::bitmap(BitmapState::Present, offset_bytes));
        Ok(offset_bytes)
    }

    fn commit_zero(&self, state: &mut State, block: u64, current: EntryState, discard: bool) -> Result<EntryState> {
        if self.layout.fixed {
            return Err(ImageError::Unsupported {
                path: self.barrier.store().name().to_owned(),
                what: "giving up the space of a fixed disk's block".into(),
                hint: "write zeros instead".into(),
            });
        }
        let place = self.payload_entry_bytes(block);
        let found = state.entry(place).payload_state();
        let nothing_to_do = match current {
            // Without a parent, a block that is not present reads as zeros by every implementation.
            EntryState::Absent => !self.layout.has_parent,
            EntryState::Zero => (discard && !self.layout.has_parent) || found == Ok(PayloadState::Zero),
            EntryState::Data { .. } | EntryState::Partial { .. } => false,
        };
        if nothing_to_do && !state.reserved.contains_key(&block) {
            return Ok(current);
        }
        self.begin_change(state)?;
        let block_bytes = self.layout.geometry.block_bytes();
        let kept = self.kept_place(state, block);
        let had = match current {
            EntryState::Data { offset_bytes } | EntryState::Partial { offset_bytes } => Some(offset_bytes),
            EntryState::Absent | EntryState::Zero => state.reserved.remove(&block),
        };
        // Where the entry stays as it is, the place that it keeps stays the block's own.
        let given_up = [had.filter(|_| had != kept), kept.filter(|_| !nothing_to_do)];
        if let Some(space) = &mut state.space {
            given_up.into_iter().flatten().for_each(|offset_bytes| space.quarantine(offset_bytes, block_bytes));
        }
        if nothing_to_do {
            return Ok(current);
        }
        // What was there before may be read from an unmapped block (2.5.1.1). Without an offset that is nothing; but of a child's it is its parent's.
        let next = if discard && !self.layout.has_parent { PayloadState::Unmapped } else { PayloadState::Zero };
        state.set_entry(place, BatEntry::payload(next, 0));
        Ok(EntryState::Zero)
    }

    /// Space for a block that has none. It reads as zeros.
    fn place_for(&self, state: &mut State, block: u64) -> Result<u64> {
        self.begin_change(state)?;
        let block_bytes = self.layout.geometry.block_bytes();
        let Some(offset_bytes) = self.kept_place(state, block) else { return self.take(state, block_bytes) };
        self.barrier
            .store()
            .zero_range(FileRange { offset_bytes, len_bytes: block_bytes }, Zeroing::Keep)
            .map_err(|error| self.io("clear the space that a block has kept", offset_bytes, error))?;
        Ok(offset_bytes)
    }

    /// The place that the block's entry keeps though it has no data, if nothing else names it. `None` before the survey.
    fn kept_place(&self, state: &State, block: u64) -> Option<u64> {
        let file_bytes = state.space.as_ref()?.file_end_bytes();
        let offset_bytes = self.layout.kept_place(state.entry(self.payload_entry_bytes(block)), file_bytes)?;
        let end_bytes = offset_bytes + self.layout.geometry.block_bytes();
        (!state.contested.touch(offset_bytes, end_bytes)).then_some(offset_bytes)
    }

    /// Gives back what was reserved and never committed. Called when the image is closed.
    pub(super) fn release_reserved(&self, state: &mut State) {
        for (block, offset_bytes) in std::mem::take(&mut state.reserved) {
            let place = self.payload_entry_bytes(block);
            // Without the entry it cannot be told whether it keeps the place; then the space is left alone.
            let known = state.pages.load(&**self.barrier.store(), READ_BAT, place, BAT_ENTRY_BYTES).is_ok();
            if known
                && self.kept_place(state, block) != Some(offset_bytes)
                && let Some(space) = &mut state.space
            {
                space.add_free(offset_bytes, self.layout.geometry.block_bytes());
            }
        }
    }

    fn take(&self, state: &mut State, len_bytes: u64) -> Result<u64> {
        self.begin_change(state)?;
        if let Some((index, invalid)) = &state.damaged {
            let mut invalid = invalid.clone();
            invalid.expected.push_str(
                "; while an entry is damaged no new block is allocated, for its data may lie in space that looks free",
            );
            return Err(self.layout.corrupt_entry(&**self.barrier.store(), *index, invalid));
        }
        let Some(space) = &mut state.space else {
            return Err(self.misuse("space is taken before it was surveyed".into()));
        };
        let at_bytes = space.used_end_bytes();
        let taken = space
            .take(&**self.barrier.store(), len_bytes)
            .map_err(|error| self.io("make room for a block", at_bytes, error))?;
        Ok(taken.offset_bytes)
    }

    /// Before the first change of a session: a new FileWriteGuid, durable; then what is in use, so that new space reads as
    /// zeros and the file's length no longer shrinks while log entries promise it. Where an entry is damaged the length stays
    /// as it is.
    fn begin_change(&self, state: &mut State) -> Result<()> {
        if state.space.is_some() || state.damaged.is_some() {
            return Ok(());
        }
        lock(&self.writing()?.headers).begin_file_write(&self.barrier)?;
        let store = &**self.barrier.store();
        let file_bytes = self.file_bytes()?;
        let found = survey(&self.layout, store, file_bytes)?;
        state.damaged = found.damaged;
        if state.damaged.is_some() {
            return Ok(());
        }
        state.contested = found.contested;
        let (space, keep_end_bytes) =
            self.settle_slack(store, found.end_bytes, file_bytes, found.unallocated_blocks)?;
        let space = state.space.insert(space);
        for (offset_bytes, len_bytes) in found.free {
            space.add_free(offset_bytes, len_bytes);
        }
        state.keep_end_bytes = keep_end_bytes;
        Ok(())
    }

    /// Makes what lies beyond the last block read as zeros: cut off, or zeroed where the file was made with room for all
    /// its blocks.
    fn settle_slack(
        &self,
        store: &dyn Store,
        end_bytes: u64,
        file_bytes: u64,
        unallocated_blocks: u64,
    ) -> Result<(Space, u64)> {
        let io = |error: io::Error| self.io("cut or zero the file behind its last block", end_bytes, error);
        let mut space = Space::new(end_bytes, MIB);
        let slack_bytes = file_bytes.saturating_sub(end_bytes);
        let room_bytes = unallocated_blocks * self.layout.geometry.block_bytes();
        let keep = slack_bytes > 0 && (self.layout.fixed || (room_bytes > 0 && slack_bytes >= room_bytes));
        if !keep {
            if file_bytes != end_bytes {
                store.set_len(end_bytes).map_err(io)?;
            }
            return Ok((space, 0));
        }
        let used = store.next_data(end_bytes).map_err(io)?.is_some_and(|range| range.offset_bytes < file_bytes);
        if used {
            store
                .zero_range(FileRange { offset_bytes: end_bytes, len_bytes: slack_bytes }, Zeroing::Keep)
                .map_err(io)?;
        }
        let kept_bytes = file_bytes.next_multiple_of(MIB);
        if kept_bytes != file_bytes {
            store.set_len(kept_bytes).map_err(io)?;
        }
        space.set_file_end(kept_bytes);
        Ok((space, kept_bytes))
    }

    fn misuse(&self, what: String) -> ImageError {
        self.io(
            "change the mapping of a block",
            self.layout.bat_offset_bytes,
            io::Error::new(io::ErrorKind::InvalidInput, what),
        )
    }
}
