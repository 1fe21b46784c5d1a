//! The file's end: pieces for new blocks, and the footer that moves with it.
//!
//! ```text
//!   ... last piece │ slack, zeros │ footer │                      before
//!   ... last piece │ new piece    │ slack, zeros ... │ footer │   after growing
//!
//!   a piece:   [ pad | bitmap ][ payload ]        the brackets begin at multiples of 4096
//! ```
//!
//! Everything waits for the first reservation (or discard, or, where a footer is not right, write): until then a writable image is not touched. Then [`Growth::prepare`]
//! reads the whole BAT once, refuses a file whose blocks overlap, puts the copy of the footer right, and makes the slack zero.
//!
//! Invariants: between the end of the last piece and the footer all bytes are zero, and nobody else writes there; the
//! footer is at [`Space::file_end_bytes`], so the file is 512 bytes longer than the allocator knows.

use super::{
    PAGE_BYTES, corrupt,
    layout::{Blocks, Layout, Piece},
    table,
};
use crate::{ImageError, Result, space::Space};
use diskwright_format::vhd::{BAT_UNUSED, CREATOR_APP, CREATOR_VERSION, FOOTER_BYTES, SECTOR_BYTES};
use diskwright_store::{Barrier, FileRange, Store, Zeroing};
use std::{collections::HashSet, io, ops::Range};

/// Holes between blocks that are remembered for use, so that a hostile file cannot fill the memory with them.
const MAX_HOLES: usize = 65536;

/// What growing needs to know of the footer.
#[derive(Debug, Clone)]
pub(super) struct FooterPlace {
    pub bytes: [u8; FOOTER_BYTES],
    pub tail_offset_bytes: Option<u64>,
    pub copy_is_right: bool,
}

impl FooterPlace {
    pub fn of(layout: &Layout) -> Self {
        Self {
            bytes: layout.footer_bytes,
            tail_offset_bytes: layout.tail_offset_bytes,
            copy_is_right: layout.copy_is_right,
        }
    }

    /// Whether the file is by this program, so that everything in it is known, holes included.
    fn is_ours(&self) -> bool {
        self.bytes[28..32] == CREATOR_APP && self.bytes[32..36] == CREATOR_VERSION.to_be_bytes()
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
    /// Payload of blocks before which there is no pad of our own: they were placed by others. Their space is a little
    /// short for a new piece.
    tight: HashSet<u64>,
    /// The file is not cut below this: space was reserved there for all blocks.
    keep_end_bytes: u64,
}

/// The blocks of a file, sorted by place.
struct Survey {
    pieces: Vec<Piece>,
    used_end_bytes: u64,
}

fn survey(store: &dyn Store, blocks: &Blocks, len_bytes: u64) -> Result<Survey> {
    let most = len_bytes / (blocks.bitmap_bytes + blocks.block_bytes);
    let mut pieces = Vec::new();
    table::scan(store, blocks, blocks.count, |block, entry| {
        if pieces.len() as u64 >= most {
            let found = format!("more than {most} blocks with space");
            let expected = format!("no more than fit into a file of {len_bytes} bytes");
            return Err(corrupt(store, "block allocation table", blocks.entry_offset(block), found, expected));
        }
        pieces.extend(blocks.piece(store, block, entry, len_bytes)?);
        Ok(true)
    })?;
    pieces.sort_unstable_by_key(|piece| piece.bitmap_offset);
    for pair in pieces.windows(2) {
        if pair[0].end > pair[1].bitmap_offset {
            let found = format!("two blocks at offset {} and {}", pair[0].bitmap_offset, pair[1].bitmap_offset);
            let expected = "blocks that do not overlap";
            return Err(corrupt(store, "block allocation table", blocks.table_offset, found, expected));
        }
    }
    // Tables beyond the entries that count, and parent locators, are in use too.
    let header = &blocks.header;
    let whole_table = blocks.table_offset.saturating_add(u64::from(header.max_table_entries) * 4);
    let locators = header
        .locators
        .iter()
        .filter(|entry| entry.is_used())
        .map(|entry| entry.data_offset.saturating_add(entry.space_bytes().max(u64::from(entry.data_length_bytes))));
    let used_end_bytes = blocks
        .metadata
        .iter()
        .map(|range| range.end)
        .chain(pieces.last().map(|piece| piece.end))
        .chain(locators.chain([whole_table]).filter(|&end| end <= len_bytes))
        .max()
        .unwrap_or(0)
        .next_multiple_of(SECTOR_BYTES);
    Ok(Survey { pieces, used_end_bytes })
}

impl Growth {
    /// Surveys the file and makes it ready to grow.
    ///
    /// What looks free may be so only in the page cache: a program that was killed in a flush can have removed a block from
    /// the BAT without making that durable. So the file is synced before its free space is touched.
    pub fn prepare(store: &dyn Store, blocks: &Blocks, footer: &FooterPlace, barrier: &Barrier) -> Result<Self> {
        let io_error = |doing, at| move |e| ImageError::io(doing, store, at, e);
        let len_bytes = store.len_bytes().map_err(io_error("learn the length of the file", 0))?;
        let Survey { pieces, used_end_bytes } = survey(store, blocks, len_bytes)?;
        let tail = footer.tail_offset_bytes;
        let overlapped = pieces.last().zip(tail).filter(|(last, tail)| last.end > *tail);
        if let Some((last, tail)) = overlapped {
            let found = format!("a block at offset {} to {}", last.bitmap_offset, last.end);
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
        let mut tight = HashSet::new();
        let mut holes = 0;
        let mut previous_end = blocks.metadata.iter().map(|range| range.end).max().unwrap_or(0);
        for (index, piece) in pieces.iter().enumerate() {
            let pad_start = piece.payload_offset.saturating_sub(area_bytes);
            if !piece.payload_offset.is_multiple_of(PAGE_BYTES) || pad_start < previous_end {
                tight.insert(piece.payload_offset);
            }
            // Space between two blocks that is large enough for one was given up in an earlier session. In files by others
            // it may be theirs (XenServer keeps a map of its own there).
            let mut hole = previous_end.next_multiple_of(PAGE_BYTES);
            while index > 0 && footer.is_ours() && holes < MAX_HOLES && hole + piece_bytes <= pad_start {
                space.add_free(hole, piece_bytes);
                holes += 1;
                hole += piece_bytes;
            }
            previous_end = piece.end;
        }
        let is_reserved = blocks.is_reserved(used_end_bytes, footer_offset, (pieces.len() + holes) as u64);
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

    /// Space for a block, all zeros; moves the footer when the file has to grow.
    ///
    /// # Errors
    /// `Io` when it cannot grow; `Unsupported` when the piece would be where a BAT entry cannot point.
    pub fn take(&mut self, store: &dyn Store) -> Result<Piece> {
        let old_end = self.space.file_end_bytes();
        let taken = self.space.take(store, self.piece_bytes).map_err(|e| {
            self.restore_footer(store, old_end);
            ImageError::io("let the file grow", store, old_end, e)
        })?;
        if let Some(new_end) = taken.grew_to_bytes {
            self.move_footer(store, old_end, new_end).map_err(|e| {
                self.restore_footer(store, old_end);
                self.space.set_file_end(old_end);
                ImageError::io("move the footer to the file's new end", store, new_end, e)
            })?;
        }
        let payload_offset = taken.offset_bytes.saturating_add(self.area_bytes);
        let piece = Piece {
            bitmap_offset: payload_offset - self.bitmap_bytes,
            payload_offset,
            end: payload_offset.saturating_add(self.piece_bytes - self.area_bytes),
        };
        if entry_of(&piece).is_none() {
            return Err(ImageError::Unsupported {
                path: store.name().to_owned(),
                what: "a block beyond 2 TiB in the file, where the 32-bit block allocation table cannot point,".into(),
                hint: "convert the disk to VHDX".into(),
            });
        }
        Ok(piece)
    }

    fn move_footer(&self, store: &dyn Store, old_end: u64, new_end: u64) -> io::Result<()> {
        store.write_at(&self.footer, new_end)?;
        // What the old footer covered becomes slack, and slack is zero.
        let covered_bytes = (new_end - old_end).min(FOOTER_BYTES as u64) as usize;
        store.write_at(&[0; FOOTER_BYTES][..covered_bytes], old_end)
    }

    /// After a failed growth the file may have been cut where the footer was. Best effort: the copy at 0 is right.
    fn restore_footer(&self, store: &dyn Store, at: u64) {
        let end = at + FOOTER_BYTES as u64;
        if store.write_at(&self.footer, at).is_ok() && store.len_bytes().is_ok_and(|len_bytes| len_bytes > end) {
            let _ = store.set_len(end);
        }
    }

    /// Gives up the space of a block. It is not used again before [`Growth::recycle`].
    pub fn give_up(&mut self, piece: &Piece) {
        if self.tight.remove(&piece.payload_offset) {
            self.space.quarantine(piece.bitmap_offset, piece.end - piece.bitmap_offset);
        } else {
            self.space.quarantine(piece.payload_offset - self.area_bytes, self.piece_bytes);
        }
    }

    /// See [`Space::generation`].
    pub fn generation(&self) -> u64 {
        self.space.generation()
    }

    /// See [`Space::recycle`].
    pub fn recycle(&mut self, store: &dyn Store, generation: u64) {
        self.space.recycle(generation);
        self.space.punch_recycled(store);
    }

    /// Cuts the file after the last piece and ends it with the footer. Everything that was given up is durably gone.
    pub fn trim(&mut self, store: &dyn Store) -> io::Result<()> {
        self.space.recycle(self.space.generation());
        let old_end = self.space.file_end_bytes();
        let new_end = self.space.release_tail().max(self.keep_end_bytes);
        if new_end < old_end {
            store.write_at(&self.footer, new_end)?;
            store.set_len(new_end + FOOTER_BYTES as u64)?;
            self.space.set_file_end(new_end);
        }
        self.space.punch_recycled(store);
        Ok(())
    }
}

/// The BAT entry for a piece; `None` when it is beyond what an entry can express.
pub(super) fn entry_of(piece: &Piece) -> Option<u32> {
    u32::try_from(piece.bitmap_offset / SECTOR_BYTES).ok().filter(|&entry| entry != BAT_UNUSED)
}

/// Makes a range zero, keeping what space it has. Holes, which read as zeros, are passed over: slack may be huge and empty.
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
