//! The end of the file: space for new blocks, and the footer that moves with it.
//!
//! ```text
//!   ... last piece │ slack, zeros │ footer │                      before
//!   ... last piece │ new piece    │ slack, zeros ... │ footer │   after the file has grown
//!
//!   a piece:   [ pad | bitmap ][ payload ]        the brackets begin at multiples of 4096
//! ```
//!
//! A writable image does not change the file before the first reservation or discard, or, if a
//! footer is invalid, the first write. Then [`Growth::prepare`] walks over all blocks once, refuses
//! a file whose blocks overlap, repairs the footer copy, and zeroes the slack.
//!
//! A [`Growth`] lives inside the image's state mutex. It accesses the store only in `prepare`,
//! before it is installed, and in `trim`, at close. [`SpacePreparation::make`] does the I/O between
//! two calls: [`Growth::room`] plans it, and [`Growth::publish`] records its result.
//!
//! Invariants: all bytes between the end of the last piece and the footer are zero, and no other
//! code writes there. The footer is at [`Space::file_end_bytes`], so the file is 512 bytes longer
//! than the allocator's end.
//!
//! At close [`Growth::trim`] puts the footer directly after the last block, or after the tables if
//! there is no block. QEMU puts the bitmap of its next block there, over the footer. If the footer
//! were elsewhere, it would end up in the payload of that block, as QEMU (`block/vpc.c`,
//! `alloc_block`) does not zero the space. If space was reserved for all blocks, the footer stays
//! after that space: QEMU's blocks take less space than ours, so they do not reach it.
//!
//! `survey.rs` has the walk, `space_preparation.rs` the I/O.

use super::{
    PAGE_BYTES, corrupt,
    layout::{Blocks, Layout, Piece},
    space_preparation::{GROW, PreparedSpace, SpacePreparation},
    survey::{Survey, Unpadded, survey},
    table,
};
use crate::{
    ImageError, Result,
    space::{Extension, HolePunches, Space, Tail},
};
use diskwright_format::vhd::{BAT_UNUSED, FOOTER_BYTES, SECTOR_BYTES};
use diskwright_store::{Barrier, FileRange, Store, Zeroing};
use std::{io, ops::Range};

/// What growth needs to know about the footer.
#[derive(Debug, Clone)]
pub(super) struct FooterPlace {
    pub bytes: [u8; FOOTER_BYTES],
    pub tail_offset_bytes: Option<u64>,
    pub copy_is_right: bool,
    /// This program created the file, so holes between blocks are free space.
    is_ours: bool,
}

impl FooterPlace {
    pub fn of(layout: &Layout) -> Self {
        Self {
            bytes: layout.footer_bytes,
            tail_offset_bytes: layout.tail_offset_bytes,
            copy_is_right: layout.copy_is_right,
            is_ours: layout.footer.is_ours(),
        }
    }
}

/// The allocator of a file.
#[derive(Debug)]
pub(super) struct Growth {
    space: Space,
    footer: [u8; FOOTER_BYTES],
    piece_bytes: u64,
    bitmap_bytes: u64,
    area_bytes: u64,
    unpadded: Unpadded,
    /// The file is not cut below this offset: space was reserved there for all blocks.
    keep_end_bytes: u64,
    /// No block begins below this offset, and none is ever placed there.
    first_block_bytes: u64,
    /// The file was cut in this session, so the footer may be a little after the last block.
    was_cut: bool,
}

impl Growth {
    /// Surveys the file and makes it ready to grow.
    ///
    /// Space that looks free may be free only in the page cache: a program that was killed during a
    /// flush may have removed a block from the BAT without making that durable. So the file is
    /// synced before its free space is written.
    pub fn prepare(store: &dyn Store, blocks: &Blocks, footer: &FooterPlace, barrier: &Barrier) -> Result<Self> {
        Self::surveyed(store, blocks, footer, barrier, false)
    }

    /// Surveys the file again, after the disk was made smaller. If space was reserved for all
    /// blocks, the space for those that are left stays.
    pub fn surveyed_again(
        &self,
        store: &dyn Store,
        blocks: &Blocks,
        footer: &FooterPlace,
        barrier: &Barrier,
    ) -> Result<Self> {
        let footer = FooterPlace {
            bytes: self.footer,
            tail_offset_bytes: Some(self.space.file_end_bytes()),
            copy_is_right: true,
            is_ours: footer.is_ours,
        };
        Self::surveyed(store, blocks, &footer, barrier, self.keep_end_bytes > 0)
    }

    fn surveyed(
        store: &dyn Store,
        blocks: &Blocks,
        footer: &FooterPlace,
        barrier: &Barrier,
        keeps_room: bool,
    ) -> Result<Self> {
        let io_error = |doing, at| move |e| ImageError::io(doing, store, at, e);
        let len_bytes = store.len_bytes().map_err(io_error("get the length of the file", 0))?;
        let Survey { blocks: placed, blocks_end_bytes, used_end_bytes, holes, unpadded, first_block_bytes } =
            survey(store, blocks, footer.is_ours, len_bytes)?;
        let tail = footer.tail_offset_bytes;
        if let Some(tail) = tail.filter(|&tail| blocks_end_bytes > tail) {
            let found = format!("a block that ends at offset {blocks_end_bytes}");
            let expected = format!("one that ends before the footer at {tail}");
            return Err(corrupt(store, "block allocation table", blocks.table_offset, found, expected));
        }
        if !footer.copy_is_right {
            // The footer at the end moves from here on, and a power cut may leave none. So the copy
            // must be valid first.
            store.write_at(&footer.bytes, 0).map_err(io_error("write the copy of the footer", 0))?;
        }
        barrier.sync("make the tables durable as they were found")?;
        let footer_offset = tail.unwrap_or(len_bytes.next_multiple_of(SECTOR_BYTES)).max(used_end_bytes);
        zero_data(store, used_end_bytes..footer_offset.min(len_bytes))
            .map_err(io_error("clear the space after the last block", used_end_bytes))?;
        if tail != Some(footer_offset) {
            store.write_at(&footer.bytes, footer_offset).map_err(io_error("write the footer", footer_offset))?;
        }

        let area_bytes = blocks.bitmap_area_bytes();
        let piece_bytes = blocks.piece_bytes();
        let mut space = Space::new(used_end_bytes, PAGE_BYTES);
        space.set_file_end(footer_offset);
        for &hole in &holes {
            space.add_free(hole, piece_bytes);
        }
        let placed = placed + holes.len() as u64;
        let keep_end_bytes = if blocks.is_reserved(used_end_bytes, footer_offset, placed) {
            footer_offset
        } else if keeps_room && blocks.count > placed {
            let room_bytes = (blocks.count - placed) * piece_bytes;
            (used_end_bytes.next_multiple_of(PAGE_BYTES) + room_bytes).min(footer_offset)
        } else {
            0
        };
        let unpadded = Unpadded::of(unpadded, used_end_bytes);
        Ok(Self {
            space,
            footer: footer.bytes,
            piece_bytes,
            bitmap_bytes: blocks.bitmap_bytes,
            area_bytes,
            unpadded,
            keep_end_bytes,
            first_block_bytes,
            was_cut: false,
        })
    }

    /// Takes space for a block, all zeros; `None` if none is ready ([`Growth::room`]). Does not
    /// access the store, which only names the file in errors.
    ///
    /// # Errors
    /// `Unsupported` if the piece would be beyond the range of a BAT entry.
    pub fn take(&mut self, store: &dyn Store) -> Result<Option<Piece>> {
        self.check_next(store)?;
        let end_bytes = self.space.file_end_bytes();
        let taken = self.space.take(self.piece_bytes).map_err(|e| ImageError::io(GROW, store, end_bytes, e))?;
        Ok(taken.map(|offset_bytes| self.piece_at(offset_bytes)))
    }

    /// Fails if a BAT entry cannot address the next piece. Checked before the piece is taken, as it
    /// would be lost otherwise.
    fn check_next(&self, store: &dyn Store) -> Result<()> {
        let end_bytes = self.space.file_end_bytes();
        let next = self.space.next_offset_bytes(self.piece_bytes);
        let piece = self.piece_at(next.map_err(|e| ImageError::io(GROW, store, end_bytes, e))?);
        if entry_of(&piece).is_some() {
            return Ok(());
        }
        Err(ImageError::Unsupported {
            path: store.name().to_owned(),
            what: "a block beyond 2 TiB in the file, where the 32-bit block allocation table cannot point,".into(),
            hint: "convert the disk to VHDX".into(),
        })
    }

    /// The I/O that [`Growth::take`] needs first.
    ///
    /// # Errors
    /// As [`Growth::take`].
    pub fn room(&mut self, store: &dyn Store) -> Result<SpacePreparation> {
        self.check_next(store)?;
        self.room_for(store, self.piece_bytes)
    }

    /// The I/O that is needed before `piece_bytes` of space can be taken.
    ///
    /// # Errors
    /// `Io` if the file cannot be that long.
    fn room_for(&mut self, store: &dyn Store, piece_bytes: u64) -> Result<SpacePreparation> {
        let pieces = self.space.take_to_zero(piece_bytes);
        if !pieces.is_empty() {
            return Ok(SpacePreparation::Zero { pieces, piece_bytes });
        }
        let end_bytes = self.space.file_end_bytes();
        let extension = self.space.growth(piece_bytes).map_err(|e| ImageError::io(GROW, store, end_bytes, e))?;
        Ok(extension.map_or(SpacePreparation::Enough, |extension| SpacePreparation::Extend {
            extension,
            footer: Box::new(self.footer),
        }))
    }

    /// Takes zeroed space for a table of `len_bytes`, a multiple of the page; or returns the I/O
    /// needed first.
    ///
    /// # Errors
    /// `Io` if the file cannot be that long.
    pub fn take_table(&mut self, store: &dyn Store, len_bytes: u64) -> Result<Result<u64, SpacePreparation>> {
        let end_bytes = self.space.file_end_bytes();
        match self.space.take(len_bytes).map_err(|e| ImageError::io(GROW, store, end_bytes, e))? {
            Some(offset_bytes) => Ok(Ok(offset_bytes)),
            None => self.room_for(store, len_bytes).map(Err),
        }
    }

    /// Returns space of [`Growth::take_table`] to which nothing refers.
    pub fn give_back_table(&mut self, offset_bytes: u64, len_bytes: u64) {
        self.space.add_free(offset_bytes, len_bytes);
    }

    /// How the file must grow to reserve space for `blocks` more blocks and `other_bytes`; `None`
    /// unless space was reserved for all blocks.
    ///
    /// # Errors
    /// `Io` if the file cannot be that long.
    pub fn reserved_room(&self, store: &dyn Store, blocks: u64, other_bytes: u64) -> Result<Option<SpacePreparation>> {
        let len_bytes = blocks.saturating_mul(self.piece_bytes).saturating_add(other_bytes);
        if self.keep_end_bytes == 0 || len_bytes == 0 {
            return Ok(None);
        }
        let end_bytes = self.space.file_end_bytes();
        let extension = Extension::by(&self.space, len_bytes).map_err(|e| ImageError::io(GROW, store, end_bytes, e))?;
        Ok(Some(SpacePreparation::Extend { extension, footer: Box::new(self.footer) }))
    }

    /// From now on the file is not cut below its present end.
    pub fn keep_end(&mut self) {
        self.keep_end_bytes = self.space.file_end_bytes();
    }

    /// An offset below which there are only tables and locators, in this session.
    pub fn first_block_bytes(&self) -> u64 {
        self.first_block_bytes
    }

    /// The footer and its offset at the end of the file.
    pub fn footer(&self) -> ([u8; FOOTER_BYTES], u64) {
        (self.footer, self.space.file_end_bytes())
    }

    /// Replaces the footer in memory; the next move of the footer writes it.
    pub fn set_footer(&mut self, footer: [u8; FOOTER_BYTES]) {
        self.footer = footer;
    }

    /// Records the result of [`SpacePreparation::make`].
    pub fn publish(&mut self, made: &PreparedSpace) {
        match made {
            PreparedSpace::Nothing => {}
            PreparedSpace::Zeroed { pieces, zeroed, piece_bytes } => {
                self.space.zeroed(pieces, *zeroed, *piece_bytes);
            }
            PreparedSpace::Extended { end_bytes } => self.space.set_file_end(*end_bytes),
        }
    }

    /// The length of the file in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.space.file_end_bytes() + FOOTER_BYTES as u64
    }

    /// The piece whose space begins at `offset_bytes`.
    fn piece_at(&self, offset_bytes: u64) -> Piece {
        let payload_offset = offset_bytes.saturating_add(self.area_bytes);
        Piece {
            bitmap_offset: payload_offset - self.bitmap_bytes,
            payload_offset,
            end: payload_offset.saturating_add(self.piece_bytes - self.area_bytes),
        }
    }

    /// The lowest free place for a block that is at `piece` now: `None` if there is none below it.
    /// The place may hold stale data.
    pub fn take_for_move(&mut self, piece: &Piece) -> Option<Piece> {
        let limit_bytes = piece.bitmap_offset;
        if let Some(offset_bytes) = self.space.take_for_move(self.piece_bytes, limit_bytes) {
            return Some(self.piece_at(offset_bytes));
        }
        let unpadded_bytes = self.unpadded_bytes();
        if unpadded_bytes == self.piece_bytes {
            return None;
        }
        let offset_bytes = self.space.take_for_move(unpadded_bytes, limit_bytes)?;
        let payload_offset = offset_bytes + self.bitmap_bytes;
        self.unpadded.add(payload_offset);
        Some(Piece { bitmap_offset: offset_bytes, payload_offset, end: offset_bytes + unpadded_bytes })
    }

    /// Length of a block without a pad: bitmap and payload.
    fn unpadded_bytes(&self) -> u64 {
        self.piece_bytes - self.area_bytes + self.bitmap_bytes
    }

    /// Whether a block has no pad before its bitmap.
    pub fn is_unpadded(&self, piece: &Piece) -> bool {
        self.unpadded.has(piece.payload_offset)
    }

    /// From now on the file is cut after its last block, also if space was reserved for all blocks.
    pub fn give_up_room(&mut self) {
        self.keep_end_bytes = 0;
    }

    /// Takes the unused end of the file out of the allocator, with the footer to write at its
    /// start: see [`Space::take_tail`]. `None` too while room for all blocks is kept.
    pub fn take_tail(&mut self) -> Option<(Tail, [u8; FOOTER_BYTES])> {
        if self.keep_end_bytes > 0 {
            return None;
        }
        let tail = self.space.take_tail()?;
        self.was_cut = true;
        Some((tail, self.footer))
    }

    /// See [`Space::put_back`].
    pub fn put_back(&mut self, tail: Tail) {
        self.space.put_back(tail);
    }

    /// See [`Space::recycle_for_moves`].
    pub fn recycle_for_moves(&mut self, generation: u64) {
        self.space.recycle_for_moves(generation);
    }

    /// Frees the space of a block. It is not reused before [`Growth::recycled`].
    pub fn free(&mut self, piece: &Piece) {
        let (offset_bytes, len_bytes) = self.extent_of(piece);
        self.space.quarantine(offset_bytes, len_bytes);
    }

    /// Returns a place of [`Growth::take_for_move`] to which nothing refers.
    pub fn give_back(&mut self, piece: &Piece) {
        let (offset_bytes, len_bytes) = self.extent_of(piece);
        self.space.add_free(offset_bytes, len_bytes);
    }

    /// Offset and length of the space of a block. Without a pad it is shorter than a piece: then it
    /// is not reused for a new piece, only for a block that is moved, or cut off at the end of the
    /// file.
    pub fn extent_of(&self, piece: &Piece) -> (u64, u64) {
        if self.is_unpadded(piece) {
            (piece.bitmap_offset, self.unpadded_bytes())
        } else {
            (piece.payload_offset - self.area_bytes, self.piece_bytes)
        }
    }

    /// See [`Space::generation`].
    pub fn generation(&self) -> u64 {
        self.space.generation()
    }

    /// See [`Space::recycled`].
    pub fn recycled(&mut self, generation: u64) -> HolePunches {
        self.space.recycled(generation)
    }

    /// Makes punched pieces available.
    pub fn add_free(&mut self, pieces: &[FileRange]) {
        pieces.iter().for_each(|piece| self.space.add_free(piece.offset_bytes, piece.len_bytes));
    }

    /// Cuts the file after the last block and puts the footer there. The caller guarantees that the
    /// removal of all freed blocks is durable and that the BAT in the file is current.
    ///
    /// # Errors
    /// `Io`.
    pub fn trim(&mut self, store: &dyn Store, blocks: &Blocks) -> Result<()> {
        let old_end = self.space.file_end_bytes();
        let used_end = self.space.used_end_bytes();
        let (mut new_end, freed) = self.space.free_all();
        if new_end < used_end || self.was_cut {
            // The released space began at a page. The block or table before it may end earlier.
            new_end = blocks.tables_end_bytes(old_end);
            table::scan(store, blocks, blocks.count, |_, entry| {
                new_end = new_end.max(blocks.place(entry).end);
                Ok(true)
            })?;
        }
        let kept_end = new_end.max(self.keep_end_bytes);
        let io_error = |e| ImageError::io("cut the file after its last block", store, new_end, e);
        // Reserved space stays, and other programs use it as it is. So it must not hold stale data
        // of freed blocks.
        zero_data(store, new_end..kept_end.min(used_end)).map_err(io_error)?;
        let new_end = kept_end;
        if new_end < old_end {
            store.write_at(&self.footer, new_end).map_err(io_error)?;
            store.set_len(new_end + FOOTER_BYTES as u64).map_err(io_error)?;
            self.space.set_file_end(new_end);
        }
        freed.punch_all(store);
        Ok(())
    }
}

/// The BAT entry for a piece; `None` if its offset exceeds the range of an entry.
pub(super) fn entry_of(piece: &Piece) -> Option<u32> {
    u32::try_from(piece.bitmap_offset / SECTOR_BYTES).ok().filter(|&entry| entry != BAT_UNUSED)
}

/// Zeroes a range and keeps its space allocated. Holes are skipped, as slack may be huge and empty.
fn zero_data(store: &dyn Store, range: Range<u64>) -> io::Result<()> {
    let mut at = range.start;
    while at < range.end {
        let Some(data) = store.next_data(at)?.filter(|data| data.offset_bytes < range.end) else { return Ok(()) };
        let start = data.offset_bytes.max(at);
        let end = data.offset_bytes.saturating_add(data.len_bytes).min(range.end);
        if end <= start {
            return Ok(());
        }
        store.zero_range(FileRange { offset_bytes: start, len_bytes: end - start }, Zeroing::Keep)?;
        at = end;
    }
    Ok(())
}
