//! The file's end: pieces for new blocks, and the footer that moves with it.
//!
//! ```text
//!   ... last piece │ slack, zeros │ footer │                      before
//!   ... last piece │ new piece    │ slack, zeros ... │ footer │   after growing (published when the footer has moved)
//!
//!   a piece:   [ pad | bitmap ][ payload ]        the brackets begin at multiples of 4096
//! ```
//!
//! Everything waits for the first reservation (or discard, or, where a footer is not right, write):
//! until then a writable image is not touched. Then [`Growth::prepare`] walks over all blocks once,
//! refuses a file whose blocks overlap, puts the copy of the footer right, and makes the slack
//! zero.
//!
//! A [`Growth`] lives inside the image's state mutex and touches the store only in `prepare`,
//! before it is there, and in `trim`, at close. [`Room::make`] does what waits for the disk between
//! two calls: [`Growth::room`] says what, and [`Growth::publish`] takes in what was done.
//!
//! Invariants: between the end of the last piece and the footer all bytes are zero, and nobody else
//! writes there; the footer is at [`Space::file_end_bytes`], so the file is 512 bytes longer than
//! the allocator knows.
//!
//! [`Growth::trim`], at close, puts the footer directly behind the last block, or behind the tables
//! where there is no block. There QEMU puts its next block's bitmap, over the footer. Had the
//! footer another place, it would end up in the payload of that block: QEMU (`block/vpc.c`,
//! `alloc_block`) takes the space without clearing it. Space that was reserved for all blocks keeps
//! its footer: QEMU's blocks take less space than ours, so they do not reach it.
//!
//! Memory: the walk takes what [`super::order`] says, for its time. What stays is bounded by
//! [`MAX_HOLES`] and [`MAX_TIGHT`].

use super::{
    PAGE_BYTES, corrupt,
    layout::{Blocks, Layout, Piece},
    order::{self, Met},
    table,
};
use crate::{
    ImageError, Result,
    space::{Extension, Punching, Space, zero_pieces},
};
use diskwright_format::vhd::{BAT_UNUSED, FOOTER_BYTES, SECTOR_BYTES};
use diskwright_store::{Barrier, FileRange, Store, Zeroing};
use std::{collections::HashSet, io, ops::Range};

/// For errors.
const GROW: &str = "let the file grow";

/// Holes between blocks that are remembered for use, so that a hostile file cannot fill the memory
/// with them.
const MAX_HOLES: usize = 65536;
/// Blocks without a pad that are remembered. In a file with more, all blocks that were there when
/// it was opened count as such.
const MAX_TIGHT: usize = 65536;

/// What growing needs to know of the footer.
#[derive(Debug, Clone)]
pub(super) struct FooterPlace {
    pub bytes: [u8; FOOTER_BYTES],
    pub tail_offset_bytes: Option<u64>,
    pub copy_is_right: bool,
    /// The file is by this program, so that everything in it is known, holes included.
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

/// The allocator of a file, ready for use.
#[derive(Debug)]
pub(super) struct Growth {
    space: Space,
    footer: [u8; FOOTER_BYTES],
    piece_bytes: u64,
    bitmap_bytes: u64,
    area_bytes: u64,
    tight: Tight,
    /// The file is not cut below this: space was reserved there for all blocks.
    keep_end_bytes: u64,
}

/// Payload of blocks before which there is no pad of our own: they were placed by others. Their
/// space is a little short for a new piece.
#[derive(Debug)]
enum Tight {
    Few(HashSet<u64>),
    /// All payload below this offset.
    Below(u64),
}

impl Tight {
    fn has(&self, payload_offset: u64) -> bool {
        match self {
            Self::Few(offsets) => offsets.contains(&payload_offset),
            Self::Below(end) => payload_offset < *end,
        }
    }
}

/// What a walk over the blocks has found.
struct Survey {
    blocks: u64,
    blocks_end_bytes: u64,
    /// First byte after everything in use, in whole sectors.
    used_end_bytes: u64,
    /// Pieces of space between blocks; in files by others none, for it may be theirs.
    holes: Vec<u64>,
    tight: HashSet<u64>,
}

fn survey(store: &dyn Store, blocks: &Blocks, is_ours: bool, len_bytes: u64) -> Result<Survey> {
    let (area_bytes, piece_bytes) = (blocks.bitmap_area_bytes(), blocks.piece_bytes());
    let used_end_bytes = blocks.tables_end_bytes(len_bytes);
    let mut survey =
        Survey { blocks: 0, blocks_end_bytes: 0, used_end_bytes, holes: Vec::new(), tight: HashSet::new() };
    let overlap = |one: u64, other: u64| {
        let found = format!("two blocks at offset {one} and {other}");
        corrupt(store, "block allocation table", blocks.table_offset, found, "blocks that do not overlap")
    };
    order::walk(store, blocks, len_bytes, &mut |met| {
        let (piece, before, free_from) = match met {
            Met::Misplaced { block, piece } => return Err(blocks.misplaced(store, block, &piece, len_bytes)),
            Met::Twin { entry, .. } => {
                let offset = blocks.place(entry).bitmap_offset;
                return Err(overlap(offset, offset));
            }
            Met::Block { piece, before, free_from, .. } => (piece, before, free_from),
        };
        if let Some((entry, end)) = before
            && end > piece.bitmap_offset
        {
            return Err(overlap(blocks.place(entry).bitmap_offset, piece.bitmap_offset));
        }
        survey.blocks += 1;
        survey.blocks_end_bytes = survey.blocks_end_bytes.max(piece.end);
        let pad_start = piece.payload_offset.saturating_sub(area_bytes);
        let is_tight = !piece.payload_offset.is_multiple_of(PAGE_BYTES) || pad_start < free_from;
        if is_tight && survey.tight.len() <= MAX_TIGHT {
            survey.tight.insert(piece.payload_offset);
        }
        // Space that is large enough for a block was given up in an earlier session.
        let mut hole = free_from.next_multiple_of(PAGE_BYTES);
        while is_ours && survey.holes.len() < MAX_HOLES && hole + piece_bytes <= pad_start {
            survey.holes.push(hole);
            hole += piece_bytes;
        }
        Ok(())
    })?;
    survey.used_end_bytes = used_end_bytes.max(survey.blocks_end_bytes.next_multiple_of(SECTOR_BYTES));
    Ok(survey)
}

impl Growth {
    /// Surveys the file and makes it ready to grow.
    ///
    /// What looks free may be so only in the page cache: a program that was killed in a flush can
    /// have removed a block from the BAT without making that durable. So the file is synced before
    /// its free space is touched.
    pub fn prepare(store: &dyn Store, blocks: &Blocks, footer: &FooterPlace, barrier: &Barrier) -> Result<Self> {
        let io_error = |doing, at| move |e| ImageError::io(doing, store, at, e);
        let len_bytes = store.len_bytes().map_err(io_error("learn the length of the file", 0))?;
        let Survey { blocks: placed, blocks_end_bytes, used_end_bytes, holes, tight } =
            survey(store, blocks, footer.is_ours, len_bytes)?;
        let tail = footer.tail_offset_bytes;
        if let Some(tail) = tail.filter(|&tail| blocks_end_bytes > tail) {
            let found = format!("a block that ends at offset {blocks_end_bytes}");
            let expected = format!("one that ends before the footer at {tail}");
            return Err(corrupt(store, "block allocation table", blocks.table_offset, found, expected));
        }
        if !footer.copy_is_right {
            // From here on the tail moves, and a cut may find none: the copy must stand first.
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
        let is_reserved = blocks.is_reserved(used_end_bytes, footer_offset, placed + holes.len() as u64);
        let tight = if tight.len() > MAX_TIGHT { Tight::Below(used_end_bytes) } else { Tight::Few(tight) };
        Ok(Self {
            space,
            footer: footer.bytes,
            piece_bytes,
            bitmap_bytes: blocks.bitmap_bytes,
            area_bytes,
            tight,
            keep_end_bytes: if is_reserved { footer_offset } else { 0 },
        })
    }

    /// Space for a block, all zeros; `None` where there is none yet ([`Growth::room`]). Does not
    /// touch the store, which is for errors.
    ///
    /// # Errors
    /// `Unsupported` when the piece would be where a BAT entry cannot point.
    pub fn take(&mut self, store: &dyn Store) -> Result<Option<Piece>> {
        self.check_next(store)?;
        let end_bytes = self.space.file_end_bytes();
        let taken = self.space.take(self.piece_bytes).map_err(|e| ImageError::io(GROW, store, end_bytes, e))?;
        Ok(taken.map(|offset_bytes| self.piece_at(offset_bytes)))
    }

    /// Refuses the next piece where no BAT entry could name it. Asked before anything is taken: the
    /// piece would be lost.
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

    /// What [`Growth::take`] waits for.
    ///
    /// # Errors
    /// As [`Growth::take`].
    pub fn room(&mut self, store: &dyn Store) -> Result<Room> {
        self.check_next(store)?;
        self.room_for(store, self.piece_bytes)
    }

    /// What taking `piece_bytes` of space waits for.
    ///
    /// # Errors
    /// `Io` when the file cannot be that long.
    fn room_for(&mut self, store: &dyn Store, piece_bytes: u64) -> Result<Room> {
        let pieces = self.space.take_to_zero(piece_bytes);
        if !pieces.is_empty() {
            return Ok(Room::Zero { pieces, piece_bytes });
        }
        let end_bytes = self.space.file_end_bytes();
        let extension = self.space.growth(piece_bytes).map_err(|e| ImageError::io(GROW, store, end_bytes, e))?;
        Ok(extension.map_or(Room::Enough, |extension| Room::Extend { extension, footer: Box::new(self.footer) }))
    }

    /// Space for a table of `len_bytes`, whole pages, all zeros; or what that waits for.
    ///
    /// # Errors
    /// `Io` when the file cannot be that long.
    pub fn take_table(&mut self, store: &dyn Store, len_bytes: u64) -> Result<Result<u64, Room>> {
        let end_bytes = self.space.file_end_bytes();
        match self.space.take(len_bytes).map_err(|e| ImageError::io(GROW, store, end_bytes, e))? {
            Some(offset_bytes) => Ok(Ok(offset_bytes)),
            None => self.room_for(store, len_bytes).map(Err),
        }
    }

    /// Gives back what [`Growth::take_table`] gave and nothing names.
    pub fn give_back_table(&mut self, offset_bytes: u64, len_bytes: u64) {
        self.space.add_free(offset_bytes, len_bytes);
    }

    /// How the file must grow before it has room for so many more blocks and bytes; `None` where no
    /// space was reserved.
    ///
    /// # Errors
    /// `Io` when the file cannot be that long.
    pub fn reserved_room(&self, store: &dyn Store, blocks: u64, other_bytes: u64) -> Result<Option<Room>> {
        let len_bytes = blocks.saturating_mul(self.piece_bytes).saturating_add(other_bytes);
        if self.keep_end_bytes == 0 || len_bytes == 0 {
            return Ok(None);
        }
        let end_bytes = self.space.file_end_bytes();
        let extension = Extension::by(&self.space, len_bytes).map_err(|e| ImageError::io(GROW, store, end_bytes, e))?;
        Ok(Some(Room::Extend { extension, footer: Box::new(self.footer) }))
    }

    /// The file is not cut below its present end.
    pub fn keep_end(&mut self) {
        self.keep_end_bytes = self.space.file_end_bytes();
    }

    /// The footer, and where it lies at the file's end.
    pub fn footer(&self) -> ([u8; FOOTER_BYTES], u64) {
        (self.footer, self.space.file_end_bytes())
    }

    /// The file has another footer from now on.
    pub fn set_footer(&mut self, footer: [u8; FOOTER_BYTES]) {
        self.footer = footer;
    }

    /// Takes in what [`Room::make`] gave.
    pub fn publish(&mut self, made: &Made) {
        match made {
            Made::Nothing => {}
            Made::Zeroed { ready, still, piece_bytes } => {
                ready.iter().for_each(|&offset_bytes| self.space.add_ready(offset_bytes, *piece_bytes));
                still.iter().for_each(|&offset_bytes| self.space.add_free(offset_bytes, *piece_bytes));
            }
            Made::Extended { end_bytes } => self.space.set_file_end(*end_bytes),
        }
    }

    /// The length of the file.
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

    /// Gives up the space of a block. It is not used again before [`Growth::recycled`].
    pub fn give_up(&mut self, piece: &Piece) {
        if self.tight.has(piece.payload_offset) {
            // Whole pages, which are fewer than a piece has: this space is not used for a new
            // piece, only cut off at the end.
            let start = piece.bitmap_offset.next_multiple_of(PAGE_BYTES);
            self.space.quarantine(start, piece.end.saturating_sub(start));
        } else {
            self.space.quarantine(piece.payload_offset - self.area_bytes, self.piece_bytes);
        }
    }

    /// See [`Space::generation`].
    pub fn generation(&self) -> u64 {
        self.space.generation()
    }

    /// See [`Space::recycled`].
    pub fn recycled(&mut self, generation: u64) -> Punching {
        self.space.recycled(generation)
    }

    /// Pieces that were punched can be used again.
    pub fn add_free(&mut self, pieces: &[FileRange]) {
        pieces.iter().for_each(|piece| self.space.add_free(piece.offset_bytes, piece.len_bytes));
    }

    /// Cuts the file after the last block and ends it with the footer. Everything that was given up
    /// is durably gone, and the BAT in the file is as it is to be.
    ///
    /// # Errors
    /// `Io`.
    pub fn trim(&mut self, store: &dyn Store, blocks: &Blocks) -> Result<()> {
        let mut given_up = self.space.free_all();
        let old_end = self.space.file_end_bytes();
        let used_end = self.space.used_end_bytes();
        let mut new_end = self.space.release_tail();
        given_up.retain(|piece| piece.offset_bytes < self.space.used_end_bytes());
        if new_end < used_end {
            // What was released began at a page; the block before it, or the table, may have ended
            // earlier.
            new_end = blocks.tables_end_bytes(old_end);
            table::scan(store, blocks, blocks.count, |_, entry| {
                new_end = new_end.max(blocks.place(entry).end);
                Ok(true)
            })?;
        }
        let kept_end = new_end.max(self.keep_end_bytes);
        let io_error = |e| ImageError::io("cut the file after its last block", store, new_end, e);
        // Reserved space stays, and other programs use it as it is: it must not hold what blocks
        // held that were given up.
        zero_data(store, new_end..kept_end.min(used_end)).map_err(io_error)?;
        let new_end = kept_end;
        if new_end < old_end {
            store.write_at(&self.footer, new_end).map_err(io_error)?;
            store.set_len(new_end + FOOTER_BYTES as u64).map_err(io_error)?;
            self.space.set_file_end(new_end);
        }
        Punching::of(given_up.into_iter()).punch_all(store);
        Ok(())
    }
}

/// What must be done to the file before a piece can be taken.
#[derive(Debug)]
pub(super) enum Room {
    /// Nothing.
    Enough,
    /// Free pieces are to be zeroed.
    Zero { pieces: Vec<u64>, piece_bytes: u64 },
    /// The file is to grow, and the footer to move.
    Extend { extension: Extension, footer: Box<[u8; FOOTER_BYTES]> },
}

/// What was done to the file.
#[derive(Debug)]
pub(super) enum Made {
    Nothing,
    Zeroed { ready: Vec<u64>, still: Vec<u64>, piece_bytes: u64 },
    Extended { end_bytes: u64 },
}

impl Room {
    /// Does it. Waits for the disk; the caller sees to it that nobody else does the same. What was
    /// done is to be published though there is an error.
    pub fn make(self, store: &dyn Store) -> (Made, Result<()>) {
        match self {
            Self::Enough => (Made::Nothing, Ok(())),
            Self::Zero { mut pieces, piece_bytes } => {
                let (zeroed, result) = zero_pieces(store, &pieces, piece_bytes);
                let at = pieces.get(zeroed).copied().unwrap_or(0);
                let still = pieces.split_off(zeroed);
                (
                    Made::Zeroed { ready: pieces, still, piece_bytes },
                    result.map_err(|e| ImageError::io(GROW, store, at, e)),
                )
            }
            Self::Extend { extension, footer } => match extend(store, &extension, &footer) {
                Ok(end_bytes) => (Made::Extended { end_bytes }, Ok(())),
                Err(error) => {
                    restore_footer(store, &footer, extension.from_bytes);
                    (Made::Nothing, Err(error))
                }
            },
        }
    }
}

fn extend(store: &dyn Store, extension: &Extension, footer: &[u8; FOOTER_BYTES]) -> Result<u64> {
    let old_end = extension.from_bytes;
    let new_end = extension.carry_out(store).map_err(|e| ImageError::io(GROW, store, old_end, e))?;
    move_footer(store, footer, old_end, new_end)
        .map_err(|e| ImageError::io("move the footer to the file's new end", store, new_end, e))?;
    Ok(new_end)
}

fn move_footer(store: &dyn Store, footer: &[u8; FOOTER_BYTES], old_end: u64, new_end: u64) -> io::Result<()> {
    store.write_at(footer, new_end)?;
    // What the old footer covered becomes slack, and slack is zero.
    let covered_bytes = (new_end - old_end).min(FOOTER_BYTES as u64) as usize;
    store.write_at(&[0; FOOTER_BYTES][..covered_bytes], old_end)
}

/// After a failed growth the file may have been cut where the footer was. Best effort: the copy at
/// 0 is right.
fn restore_footer(store: &dyn Store, footer: &[u8; FOOTER_BYTES], at: u64) {
    let end = at + FOOTER_BYTES as u64;
    if store.write_at(footer, at).is_ok() && store.len_bytes().is_ok_and(|len_bytes| len_bytes > end) {
        let _ = store.set_len(end);
    }
}

/// The BAT entry for a piece; `None` when it is beyond what an entry can express.
pub(super) fn entry_of(piece: &Piece) -> Option<u32> {
    u32::try_from(piece.bitmap_offset / SECTOR_BYTES).ok().filter(|&entry| entry != BAT_UNUSED)
}

/// Makes a range zero, keeping what space it has. Holes, which read as zeros, are passed over:
/// slack may be huge and empty.
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
