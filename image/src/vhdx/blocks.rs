//! Life cycle of a block: reserve and commit.
//!
//! Both change only memory and never access the file. The table pages in the cache become dirty,
//! and a flush writes them to the file. What is not in memory (a table page, the survey, space that
//! reads as zeros) is noted as a [`Prerequisite`], and the result is `None`: the caller releases
//! its lock, calls `prepare.rs`, and retries. Everything that can fail or be missing is checked
//! before the first page is changed, so a failure leaves the tables as they were.
//!
//! A block without data may have an entry with an offset, such as an unmapped block of a fixed
//! disk. It gets that kept space back, unless another entry refers to it, so a fixed disk does not
//! grow. Otherwise space comes from holes and from the end of the file. The kept space may hold the
//! block's stale data and is zeroed (by `prepare.rs`) before it is handed out. It cannot hold
//! another block's data, and no request to it can be in flight: the entry had no data when the file
//! was opened, and no entry gets an offset without data during a session. Kept space must end
//! within the file as it was surveyed. If the present length were used, an offset beyond the old
//! end would become valid when the file grows, and two blocks would share the space.
//!
//! While an entry of the table is damaged no space is handed out (`survey.rs` says why). Blocks
//! that have space can still be read and overwritten.
//!
//! Space for a block reads as zeros. So a write of some sectors to a block without a parent, or to
//! a block that hides its parent (Zero), completes the whole block. A sector bitmap is needed only
//! where the parent's data is visible.

use super::{
    image::VhdxImage,
    layout::EntryState,
    state::{Prerequisite, State},
};
use crate::{
    Commit, Reservation,
    error::{ImageError, Result},
};
use diskwright_format::vhdx::{BITMAP_BLOCK_BYTES, BatEntry, BitmapState, PayloadState, bat::BAT_ENTRY_BYTES};
use std::io;

/// What failed, in errors.
pub(super) const MAKE_ROOM: &str = "allocate space for a block";

impl VhdxImage {
    pub(super) fn reserve_block(&self, state: &mut State, block: u64) -> Result<Option<Reservation>> {
        self.barrier.check()?;
        let at = |offset_bytes| Some(Reservation { store: 0, offset_bytes, init: None });
        if let Some(&offset_bytes) = state.reserved.get(&block) {
            return Ok(at(offset_bytes));
        }
        Ok(match self.current(state, block)? {
            None => None,
            Some(EntryState::Data { offset_bytes } | EntryState::Partial { offset_bytes }) => at(offset_bytes),
            Some(EntryState::Absent | EntryState::Zero) => match self.place_for(state, block)? {
                Some(offset_bytes) => {
                    state.reserved.insert(block, offset_bytes);
                    at(offset_bytes)
                }
                None => {
                    state.needs.note(block, Prerequisite::Payload);
                    None
                }
            },
        })
    }

    pub(super) fn commit_block(&self, state: &mut State, block: u64, change: Commit) -> Result<Option<EntryState>> {
        self.barrier.check()?;
        let Some(current) = self.current(state, block)? else { return Ok(None) };
        match change {
            Commit::Zero | Commit::Discard | Commit::Absent => self.commit_zero(state, block, current, change),
            Commit::Moved => self.commit_moved(state, block, current),
            Commit::Sectors { first, count } if self.layout.has_parent => {
                let sectors = state.layout.geometry.sectors_per_block();
                if count == 0 || first.checked_add(count).is_none_or(|end| end > sectors) {
                    return Err(self.misuse(format!(
                        "sectors {first} and {count} more of a block of {sectors} cannot be committed"
                    )));
                }
                match current {
                    EntryState::Data { .. } => Ok(Some(current)),
                    EntryState::Zero => self.commit_whole(state, block, current),
                    EntryState::Absent | EntryState::Partial { .. } => {
                        self.commit_sectors(state, block, current, first, count)
                    }
                }
            }
            Commit::Sectors { .. } | Commit::Whole => self.commit_whole(state, block, current),
        }
    }

    /// The block's state; `None` if the page of its entry is not in the cache.
    pub(super) fn current(&self, state: &State, block: u64) -> Result<Option<EntryState>> {
        if block >= state.layout.geometry.payload_blocks() {
            return Err(self.misuse(format!(
                "block {block} lies beyond the disk's {} blocks",
                state.layout.geometry.payload_blocks()
            )));
        }
        let index = state.layout.geometry.payload_index(block);
        let place = state.layout.entry_offset_bytes(index);
        if !state.pages.has(place, BAT_ENTRY_BYTES) {
            return Ok(None);
        }
        let current = state.layout.block_state(block, state.entry(place), state.file_bytes());
        current.map(Some).map_err(|invalid| state.layout.corrupt_entry(&**self.barrier.store(), index, invalid))
    }

    pub(super) fn payload_entry_bytes(&self, state: &State, block: u64) -> u64 {
        state.layout.entry_offset_bytes(state.layout.geometry.payload_index(block))
    }

    /// Offset of the block's payload, present or reserved.
    fn payload_place(&self, state: &State, block: u64, current: EntryState) -> Result<u64> {
        match current {
            EntryState::Data { offset_bytes } | EntryState::Partial { offset_bytes } => Ok(offset_bytes),
            EntryState::Absent | EntryState::Zero => {
                let reserved = state.reserved.get(&block).copied();
                reserved.ok_or_else(|| self.misuse(format!("block {block} is committed without having been reserved")))
            }
        }
    }

    fn commit_whole(&self, state: &mut State, block: u64, current: EntryState) -> Result<Option<EntryState>> {
        if let EntryState::Data { .. } = current {
            return Ok(Some(current));
        }
        let offset_bytes = self.payload_place(state, block, current)?;
        if !state.is_surveyed() {
            state.needs.note(block, Prerequisite::Survey);
            return Ok(None);
        }
        state.reserved.remove(&block);
        let place = self.payload_entry_bytes(state, block);
        state.set_entry(place, BatEntry::payload(PayloadState::FullyPresent, offset_bytes));
        Ok(Some(EntryState::Data { offset_bytes }))
    }

    fn commit_sectors(
        &self,
        state: &mut State,
        block: u64,
        current: EntryState,
        first: u32,
        count: u32,
    ) -> Result<Option<EntryState>> {
        let geometry = state.layout.geometry;
        let in_disk = (geometry.bytes_in_disk(block) / u64::from(geometry.logical_sector_bytes())) as u32;
        if first == 0 && count >= in_disk {
            return self.commit_whole(state, block, current);
        }
        let offset_bytes = self.payload_place(state, block, current)?;
        let Some(place) = self.bits_place(state, block)? else {
            state.needs.note(block, Prerequisite::Bitmap);
            return Ok(None);
        };
        let (_, len_bytes) = geometry.bitmap_place(block);
        if current == EntryState::Absent {
            // Bits of a block that is not present have no meaning. Some writers leave them set.
            let mut stale = false;
            state.pages.each_piece(place, len_bytes, &mut |_, piece| stale |= piece.iter().any(|&byte| byte != 0));
            if stale {
                state.pages.change(place, len_bytes, &mut |_, piece| piece.fill(0));
            }
        }
        let (first_byte, last_byte) = (first / 8, (first + count - 1) / 8);
        let (bits_place, bits_len) = (place + u64::from(first_byte), u64::from(last_byte - first_byte) + 1);
        // The bits of a bitmap byte that lie in the range.
        let covered = |byte: usize| {
            let base = byte as u32 * 8;
            let (from, to) = (first.max(base) - base, (first + count).min(base + 8) - base);
            (((1u16 << to) - 1) & !((1u16 << from) - 1)) as u8
        };
        let mut are_set = true;
        state.pages.each_piece(bits_place, bits_len, &mut |at, piece| {
            are_set &= (first_byte as usize + at..).zip(piece).all(|(byte, bits)| !bits & covered(byte) == 0);
        });
        // A page becomes dirty only if a bit changes. A write to sectors that are set already adds
        // nothing to the next flush.
        if !are_set {
            state.pages.change(bits_place, bits_len, &mut |at, piece| {
                (first_byte as usize + at..).zip(piece).for_each(|(byte, bits)| *bits |= covered(byte));
            });
        }
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
            let place = self.payload_entry_bytes(state, block);
            state.set_entry(place, BatEntry::payload(PayloadState::PartiallyPresent, offset_bytes));
        }
        Ok(Some(EntryState::Partial { offset_bytes }))
    }

    /// Offset of the bitmap block of a block's chunk. `None` if the page of its entry is not in the
    /// cache; `Some(Err(offset of the entry))` if the chunk has no bitmap block.
    pub(super) fn bitmap_block(&self, state: &State, block: u64) -> Result<Option<Result<u64, u64>>> {
        let index = state.layout.geometry.bitmap_index(state.layout.geometry.chunk_of(block));
        let place = state.layout.entry_offset_bytes(index);
        if !state.pages.has(place, BAT_ENTRY_BYTES) {
            return Ok(None);
        }
        let found = state.layout.bitmap_place(state.entry(place), state.file_bytes());
        let found = found.map_err(|invalid| state.layout.corrupt_entry(&**self.barrier.store(), index, invalid))?;
        Ok(Some(found.ok_or(place)))
    }

    /// Offset of a block's bits, all of them in the cache. Allocates the bitmap block if there is
    /// none. `None` if pages or space are missing.
    fn bits_place(&self, state: &mut State, block: u64) -> Result<Option<u64>> {
        let (within, len_bytes) = state.layout.geometry.bitmap_place(block);
        if !state.is_surveyed() {
            return Ok(None);
        }
        let entry_place = match self.bitmap_block(state, block)? {
            None => return Ok(None),
            Some(Ok(offset_bytes)) => {
                let place = offset_bytes + within;
                return Ok(state.pages.has(place, len_bytes).then_some(place));
            }
            Some(Err(entry_place)) => entry_place,
        };
        let Some(offset_bytes) = self.take(state, BITMAP_BLOCK_BYTES)? else { return Ok(None) };
        state.set_entry(entry_place, BatEntry::bitmap(BitmapState::Present, offset_bytes));
        state.pages.insert_zeros(offset_bytes + within, len_bytes);
        Ok(Some(offset_bytes + within))
    }

    fn commit_zero(
        &self,
        state: &mut State,
        block: u64,
        current: EntryState,
        change: Commit,
    ) -> Result<Option<EntryState>> {
        if self.layout.fixed {
            return Err(ImageError::Unsupported {
                path: self.barrier.store().name().to_owned(),
                what: "giving up the space of a fixed disk's block".into(),
                hint: "write zeros instead".into(),
            });
        }
        let place = self.payload_entry_bytes(state, block);
        let found = state.entry(place).payload_state();
        let (discard, absent) = (change == Commit::Discard, change == Commit::Absent);
        let nothing_to_do = match current {
            // Every implementation reads an absent block as zeros if there is no parent.
            EntryState::Absent => absent || !self.layout.has_parent,
            EntryState::Zero => !absent && ((discard && !self.layout.has_parent) || found == Ok(PayloadState::Zero)),
            EntryState::Data { .. } | EntryState::Partial { .. } => false,
        };
        if nothing_to_do && !state.reserved.contains_key(&block) {
            return Ok(Some(current));
        }
        if !state.is_surveyed() {
            state.needs.note(block, Prerequisite::Survey);
            return Ok(None);
        }
        let block_bytes = state.layout.geometry.block_bytes();
        let kept = self.kept_place(state, block);
        let had = match current {
            EntryState::Data { offset_bytes } | EntryState::Partial { offset_bytes } => Some(offset_bytes),
            EntryState::Absent | EntryState::Zero => state.reserved.remove(&block),
        };
        // If the entry does not change, the block keeps its kept space.
        let freed = [had.filter(|_| had != kept), kept.filter(|_| !nothing_to_do)];
        if let Some(space) = &mut state.space {
            freed.into_iter().flatten().for_each(|offset_bytes| space.quarantine(offset_bytes, block_bytes));
        }
        if nothing_to_do {
            return Ok(Some(current));
        }
        // A read of an UNMAPPED block may return the block's previous data (MS-VHDX 2.5.1.1).
        // Without a file offset that is zeros. In a child it may be the parent's data, so a discard
        // in a child is recorded as ZERO.
        let (next, is_now) = match change {
            Commit::Absent => (PayloadState::NotPresent, EntryState::Absent),
            Commit::Discard if !self.layout.has_parent => (PayloadState::Unmapped, EntryState::Zero),
            _ => (PayloadState::Zero, EntryState::Zero),
        };
        state.set_entry(place, BatEntry::payload(next, 0));
        state.cleared.remove(&block);
        Ok(Some(is_now))
    }

    /// Takes space for a block without space. The space reads as zeros. `None` if none is ready.
    fn place_for(&self, state: &mut State, block: u64) -> Result<Option<u64>> {
        if !state.is_surveyed() {
            return Ok(None);
        }
        match self.kept_place(state, block) {
            Some(offset_bytes) => Ok(state.cleared.remove(&block).then_some(offset_bytes)),
            None => self.take(state, state.layout.geometry.block_bytes()),
        }
    }

    /// The kept space that must be zeroed before the block can use it; `None` if the block keeps
    /// none, or is reserved, or its kept space was zeroed ([`State::set_cleared`]).
    pub(super) fn place_to_clear(&self, state: &State, block: u64) -> Option<u64> {
        let is_known = state.reserved.contains_key(&block) || state.cleared.contains(&block);
        self.kept_place(state, block).filter(|_| !is_known)
    }

    /// The space that an entry without data keeps, unless another entry refers to it. `None` before
    /// the survey.
    pub(super) fn kept_place(&self, state: &State, block: u64) -> Option<u64> {
        state.space.as_ref()?;
        // Validated by the length at the survey. Space beyond that is now slack, or another
        // block's.
        let entry = state.entry(self.payload_entry_bytes(state, block));
        let offset_bytes = state.layout.kept_place(entry, state.surveyed_bytes)?;
        let end_bytes = offset_bytes + state.layout.geometry.block_bytes();
        (!state.contested.any_marked(offset_bytes, end_bytes)).then_some(offset_bytes)
    }

    /// Frees space that was reserved and never committed. Called at close, after
    /// [`VhdxImage::load_reserved`].
    pub(super) fn release_reserved(&self, state: &mut State) {
        for (block, offset_bytes) in std::mem::take(&mut state.reserved) {
            let place = self.payload_entry_bytes(state, block);
            // Without the entry it is unknown whether it keeps the space, so the space is not
            // freed.
            if state.pages.has(place, BAT_ENTRY_BYTES)
                && self.kept_place(state, block) != Some(offset_bytes)
                && let Some(space) = &mut state.space
            {
                space.add_free(offset_bytes, state.layout.geometry.block_bytes());
            }
        }
    }

    /// Takes space that reads as zeros. `None` if none is ready, or before the survey.
    pub(super) fn take(&self, state: &mut State, len_bytes: u64) -> Result<Option<u64>> {
        self.check_undamaged(state)?;
        let Some(space) = &mut state.space else { return Ok(None) };
        let at_bytes = space.used_end_bytes();
        space.take(len_bytes).map_err(|error| self.io(MAKE_ROOM, at_bytes, error))
    }

    /// Fails if an entry is damaged, as no space may be allocated then.
    pub(super) fn check_undamaged(&self, state: &State) -> Result<()> {
        let Some((index, invalid)) = &state.damaged else { return Ok(()) };
        let mut invalid = invalid.clone();
        invalid.expected.push_str(
            "; while an entry is damaged no new block is allocated, for its data may lie in space that looks free",
        );
        Err(state.layout.corrupt_entry(&**self.barrier.store(), *index, invalid))
    }

    pub(super) fn misuse(&self, what: String) -> ImageError {
        self.io(
            "change the mapping of a block",
            self.layout.bat_offset_bytes,
            io::Error::new(io::ErrorKind::InvalidInput, what),
        )
    }
}
