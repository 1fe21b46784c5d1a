//! Footer, header and locators, validated: the offsets of everything in the file.
//!
//! Every [`Layout`] is valid: the tables lie inside the file and do not overlap, the BAT has an
//! entry for every block of the disk, and no calculation with its numbers can overflow. BAT entries
//! are validated one by one when they are read, by [`Layout::piece`].

use super::{
    PAGE_BYTES,
    batmap::Batmap,
    corrupt, damaged,
    footers::{ChosenFooter, Footers},
    overlaps,
};
use crate::{BlockState, ImageError, LinkageId, ParentLink, Result};
use diskwright_format::vhd::{
    BAT_UNUSED, DiskKind, DynamicHeader, FOOTER_BYTES, Footer, HEADER_BYTES, LocatorData, LocatorEntry, LocatorKind,
    MAX_DYNAMIC_BYTES, SECTOR_BYTES, bitmap_bytes,
};
use diskwright_store::Store;
use std::{io, ops::Range};

/// Offsets and geometry of one image.
#[derive(Debug)]
pub(super) struct Layout {
    pub footer: Footer,
    pub footer_bytes: [u8; FOOTER_BYTES],
    pub tail_offset_bytes: Option<u64>,
    pub copy_is_right: bool,
    /// The file's length at open, in bytes.
    pub len_bytes: u64,
    /// Virtual size in bytes.
    pub size_bytes: u64,
    /// `None` for a fixed disk.
    pub blocks: Option<Blocks>,
    /// What makes the contents doubtful, a sentence each.
    pub doubts: Vec<String>,
}

/// The part of a layout that fixed disks do not have. It never changes: an image that grows gets a
/// new one (`grow.rs`).
#[derive(Debug, Clone)]
pub(super) struct Blocks {
    pub header: DynamicHeader,
    pub header_offset_bytes: u64,
    pub is_differencing: bool,
    /// Every bitmap in the file is known to be full, so none is read: a dynamic disk that only this
    /// program has written. [`Layout`] sets `false`; the code that opens the image decides.
    pub bitmaps_are_full: bool,
    pub block_bytes: u64,
    /// Sectors in a block.
    pub sectors: u32,
    /// Sectors of the last block that lie inside the disk.
    pub last_sectors: u32,
    /// Length of a bitmap in the file.
    pub bitmap_bytes: u64,
    pub table_offset: u64,
    /// Number of blocks of the disk. Only so many entries of the BAT are used.
    pub count: u64,
    /// Ranges that blocks must not overlap: footer copy, header, BAT, batmap.
    pub metadata: Vec<Range<u64>>,
    /// XenServer's batmap; `None` if the file has none.
    pub batmap: Option<Batmap>,
}

/// The space of a block in the file: bitmap, then payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub bitmap_offset: u64,
    pub payload_offset: u64,
    pub end: u64,
}

impl Blocks {
    /// Fails for a block beyond the end of the disk.
    ///
    /// # Errors
    /// `Io` of the kind `InvalidInput`.
    pub fn check_block(&self, store: &dyn Store, block: u64) -> Result<()> {
        if block < self.count {
            return Ok(());
        }
        let beyond =
            io::Error::new(io::ErrorKind::InvalidInput, format!("the disk has {} blocks, none at {block}", self.count));
        Err(ImageError::io("find a block", store, self.table_offset, beyond))
    }

    /// Bytes before a new block's payload: the bitmap, padded so that the payload begins at a
    /// multiple of [`PAGE_BYTES`].
    pub fn bitmap_area_bytes(&self) -> u64 {
        self.bitmap_bytes.next_multiple_of(PAGE_BYTES)
    }

    /// Length of a new block in the file: bitmap area and payload.
    pub fn piece_bytes(&self) -> u64 {
        self.bitmap_area_bytes() + self.block_bytes
    }

    /// All ranges of the file that are not blocks, sorted by start: metadata, the whole BAT
    /// including unused entries, parent locators. Ranges that end beyond `end_bytes` are left out.
    /// Of a locator whose declared space ends there, its data stay, or what of them is in the file.
    pub fn tables(&self, end_bytes: u64) -> Vec<Range<u64>> {
        let header = &self.header;
        let table_end = self.table_offset.saturating_add(u64::from(header.max_table_entries) * 4);
        let locators = header.locators.iter().filter(|entry| entry.is_used()).filter_map(|entry| {
            let data_end = entry.data_offset.saturating_add(u64::from(entry.data_length_bytes));
            let space_end = declared_end(entry);
            let end = if space_end <= end_bytes { space_end } else { data_end.min(end_bytes) };
            (entry.data_offset < end).then_some(entry.data_offset..end)
        });
        let whole_table = std::iter::once(self.table_offset..table_end);
        let all = self.metadata.iter().cloned().chain(whole_table).chain(locators);
        let mut tables: Vec<_> = all.filter(|range| range.end <= end_bytes).collect();
        tables.sort_unstable_by_key(|range| range.start);
        tables
    }

    /// The first byte of the parent locators whose declared space ends beyond `end_bytes`; `None`
    /// if there are none. What follows may belong to such a locator.
    pub fn overlong_locator(&self, end_bytes: u64) -> Option<u64> {
        let used = self.header.locators.iter().filter(|entry| entry.is_used() && entry.data_offset < end_bytes);
        used.filter(|entry| declared_end(entry) > end_bytes).map(|entry| entry.data_offset).min()
    }

    /// First byte after the tables, rounded up to a sector.
    pub fn tables_end_bytes(&self, end_bytes: u64) -> u64 {
        self.tables(end_bytes).iter().map(|range| range.end).max().unwrap_or(0).next_multiple_of(SECTOR_BYTES)
    }

    /// The parent that the header of a dynamic disk names, as text. A dynamic disk must have none.
    /// `None` for a differencing disk, and if the header names no parent.
    pub fn stray_parent(&self) -> Option<String> {
        let header = &self.header;
        if self.is_differencing {
            None
        } else if !header.parent_name.is_empty() {
            Some(format!("the parent \"{}\"", header.parent_name.escape_debug()))
        } else if !header.parent_id.is_nil() {
            Some(format!("a parent with the unique id {}", header.parent_id))
        } else {
            let used = header.locators.iter().filter(|entry| entry.is_used()).count();
            (used > 0).then(|| format!("a parent, by {used} parent locator{}", if used == 1 { "" } else { "s" }))
        }
    }

    /// Virtual size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.count.saturating_sub(1) * self.block_bytes + u64::from(self.last_sectors) * SECTOR_BYTES
    }

    /// Length of the used part of the BAT in bytes.
    pub fn table_bytes(&self) -> u64 {
        self.count * 4
    }

    /// File offset of a block's BAT entry.
    pub fn entry_offset(&self, block: u64) -> u64 {
        self.table_offset + block * 4
    }

    /// Sectors of a block that lie inside the disk: all, except in the last block.
    pub fn sectors_of(&self, block: u64) -> u32 {
        if block + 1 == self.count { self.last_sectors } else { self.sectors }
    }

    /// Whether the slack before a footer is exactly the space of all blocks that have none: then it
    /// was reserved by `preallocate`. Other slack is left over from a session that was not closed.
    pub fn is_reserved(&self, used_end_bytes: u64, footer_offset_bytes: u64, placed: u64) -> bool {
        let slack_bytes = footer_offset_bytes.saturating_sub(used_end_bytes.next_multiple_of(PAGE_BYTES));
        let needed_bytes = self.count.saturating_sub(placed) * self.piece_bytes();
        slack_bytes > 0 && slack_bytes == needed_bytes
    }

    /// The space that a used BAT entry refers to, not validated.
    pub fn place(&self, entry: u32) -> Piece {
        let bitmap_offset = u64::from(entry) * SECTOR_BYTES;
        let payload_offset = bitmap_offset + self.bitmap_bytes;
        Piece { bitmap_offset, payload_offset, end: payload_offset + self.block_bytes }
    }

    /// What is wrong with the offset of a piece: (found, expected). `None` if it is valid.
    pub fn fault_of(&self, piece: &Piece, len_bytes: u64) -> Option<(String, String)> {
        if piece.end > len_bytes {
            return Some((
                format!("a block that ends at offset {}", piece.end),
                format!("one inside the file, which ends at {len_bytes}"),
            ));
        }
        let taken = self.metadata.iter().find(|range| overlaps(range, &(piece.bitmap_offset..piece.end)))?;
        Some((
            format!("a block at offset {} to {}", piece.bitmap_offset, piece.end),
            format!("one that does not overlap the image's tables at {} to {}", taken.start, taken.end),
        ))
    }

    /// The space that a block's BAT entry refers to; `None` for a block without space.
    ///
    /// # Errors
    /// `Corrupt` if the space lies outside the file or overlaps its tables.
    pub fn piece(&self, store: &dyn Store, block: u64, entry: u32, len_bytes: u64) -> Result<Option<Piece>> {
        if entry == BAT_UNUSED {
            return Ok(None);
        }
        let piece = self.place(entry);
        match self.fault_of(&piece, len_bytes) {
            None => Ok(Some(piece)),
            Some(_) => Err(self.misplaced(store, block, &piece, len_bytes)),
        }
    }

    /// The error of a damaged block, for [`Image::damage`](crate::Image::damage).
    ///
    /// # Errors
    /// If the entry is valid.
    pub fn damage_of(&self, store: &dyn Store, block: u64, entry: u32, len_bytes: u64) -> Result<ImageError> {
        match self.piece(store, block, entry, len_bytes) {
            Err(damage) => Ok(damage),
            Ok(_) => {
                let sound = format!("block {block} was damaged when it was looked up, but its entry is valid now");
                let place = self.entry_offset(block);
                Err(ImageError::io("explain the damage of a block", store, place, io::Error::other(sound)))
            }
        }
    }

    /// The error for a block with an invalid offset.
    pub fn misplaced(&self, store: &dyn Store, block: u64, piece: &Piece, len_bytes: u64) -> ImageError {
        let (found, expected) = self.fault_of(piece, len_bytes).unwrap_or_default();
        corrupt(store, "block allocation table", self.entry_offset(block), found, expected)
    }

    /// The state of a block by its BAT entry alone.
    pub fn state_of(&self, piece: Option<Piece>) -> BlockState {
        match piece {
            None => BlockState::Absent,
            Some(Piece { payload_offset: offset_bytes, .. }) if self.bitmaps_are_full => BlockState::data(offset_bytes),
            Some(Piece { payload_offset: offset_bytes, .. }) => BlockState::partial(offset_bytes),
        }
    }
}

impl Layout {
    /// Reads and validates everything but the BAT entries. The remarks are for the user; they come
    /// without the `doubts`.
    ///
    /// # Errors
    /// `NotAnImage`, `Corrupt`, `Io`.
    pub fn read(store: &dyn Store) -> Result<(Self, Vec<String>)> {
        let footers = Footers::read(store)?;
        let chosen = footers.choose(store)?;
        Self::from_footer(store, chosen, footers.len_bytes)
    }

    /// Like [`Layout::read`], with the footers already read.
    pub fn from_footer(store: &dyn Store, chosen: ChosenFooter, len_bytes: u64) -> Result<(Self, Vec<String>)> {
        let ChosenFooter { found, tail_offset_bytes, copy_is_right, contradiction, mut remarks } = chosen;
        let mut doubts: Vec<_> = contradiction.into_iter().collect();
        let footer = found.footer;
        let size_bytes = footer.size_bytes();
        if !footer.current_size_bytes.is_multiple_of(SECTOR_BYTES) {
            remarks.push(format!(
                "The size of {} bytes is not a multiple of the 512-byte sector; only {size_bytes} bytes are accessible.",
                footer.current_size_bytes
            ));
        } else if size_bytes != footer.current_size_bytes {
            remarks.push(format!(
                "The size of {size_bytes} bytes is that of the CHS geometry, which disks by the creator \"{}\" use; the footer also says {}.",
                footer.creator_app.escape_ascii(),
                footer.current_size_bytes
            ));
        }
        let limit_bytes = if footer.kind == DiskKind::Fixed { u64::MAX } else { MAX_DYNAMIC_BYTES };
        if size_bytes == 0 || size_bytes > limit_bytes {
            return Err(corrupt(
                store,
                "footer",
                found.offset_bytes + 48,
                format!("a size of {size_bytes} bytes"),
                if size_bytes == 0 {
                    "at least one sector of 512 bytes".to_owned()
                } else {
                    format!("at most {limit_bytes}, the format's limit for disks with blocks")
                },
            ));
        }
        let blocks = if footer.kind == DiskKind::Fixed {
            if size_bytes > found.offset_bytes {
                return Err(corrupt(
                    store,
                    "footer",
                    found.offset_bytes + 48,
                    format!("a size of {size_bytes} bytes"),
                    format!("at most {}, the bytes before the footer (was the file truncated?)", found.offset_bytes),
                ));
            }
            None
        } else {
            Some(read_blocks(store, &footer, size_bytes, len_bytes)?)
        };
        if let Some(parent) = blocks.as_ref().and_then(Blocks::stray_parent) {
            doubts.push(format!(
                "The footer says that this disk is dynamic, but its header names {parent}. Blocks that this file does not have read as zeros."
            ));
        }
        let footer_bytes = found.bytes;
        let layout =
            Self { footer, footer_bytes, tail_offset_bytes, copy_is_right, len_bytes, size_bytes, blocks, doubts };
        Ok((layout, remarks))
    }

    /// The link to the parent as stored. A locator that cannot be read is left out with a remark,
    /// as the user may name the parent.
    pub fn parent_link(&self, store: &dyn Store, remarks: &mut Vec<String>) -> Result<Option<ParentLink>> {
        let Some(blocks) = self.blocks.as_ref().filter(|blocks| blocks.is_differencing) else { return Ok(None) };
        let header = &blocks.header;
        let mut link = ParentLink {
            name: (!header.parent_name.is_empty()).then(|| header.parent_name.clone()),
            linkage: Some(LinkageId::from_uuid(header.parent_id)),
            modified_seconds: Some(header.parent_modified_seconds),
            modified_offset_bytes: Some(blocks.header_offset_bytes + 56),
            ..Default::default()
        };
        for (index, entry) in by_trust(&header.locators) {
            match read_locator(store, entry, index, blocks.header_offset_bytes, self.len_bytes)? {
                Err(fault) => remarks.push(fault.0),
                Ok(Some(LocatorData::Relative(path))) => {
                    link.relative_path.get_or_insert(path);
                }
                Ok(Some(LocatorData::Absolute(path))) => {
                    link.absolute_path.get_or_insert(path);
                }
                Ok(None) => {}
            }
        }
        Ok(Some(link))
    }
}

/// The end of the space that an entry declares for its locator.
fn declared_end(entry: &LocatorEntry) -> u64 {
    entry.data_offset.saturating_add(entry.space_bytes().max(u64::from(entry.data_length_bytes)))
}

/// The used locators in order of preference: Unicode paths, then paths in a code page, then file
/// URLs.
pub(super) fn by_trust(locators: &[LocatorEntry]) -> Vec<(usize, &LocatorEntry)> {
    let mut used: Vec<_> = locators.iter().enumerate().filter(|(_, entry)| entry.is_used()).collect();
    used.sort_by_key(|(_, entry)| match entry.kind() {
        Some(LocatorKind::WindowsRelative | LocatorKind::WindowsAbsolute) => 0,
        Some(LocatorKind::OldWindowsRelative | LocatorKind::OldWindowsAbsolute) => 1,
        Some(LocatorKind::FileUrl) => 2,
        None => 3,
    });
    used
}

/// Why a locator cannot be read, as a sentence, and the file offset of its entry.
#[derive(Debug)]
pub(super) struct LocatorFault(pub String, pub u64);

/// Reads a locator; `Ok(Ok(None))` for a platform that this program does not use.
pub(super) fn read_locator(
    store: &dyn Store,
    entry: &LocatorEntry,
    index: usize,
    header_offset_bytes: u64,
    len_bytes: u64,
) -> Result<Result<Option<LocatorData>, LocatorFault>> {
    let entry_offset_bytes = header_offset_bytes + 576 + index as u64 * 24;
    if entry.kind().is_none() {
        return Ok(Ok(None));
    }
    let length = match entry.checked_length(entry_offset_bytes) {
        Ok(length) => length,
        Err(error) => return Ok(Err(LocatorFault(format!("Ignored: {error}."), entry_offset_bytes))),
    };
    if entry.data_offset.checked_add(length as u64).is_none_or(|end| end > len_bytes) {
        let sentence = format!(
            "Ignored: the parent locator at offset {entry_offset_bytes} refers to {length} bytes at {}, beyond the file's end at {len_bytes}.",
            entry.data_offset
        );
        return Ok(Err(LocatorFault(sentence, entry_offset_bytes)));
    }
    let mut data = vec![0; length];
    store
        .read_at(&mut data, entry.data_offset)
        .map_err(|e| ImageError::io("read a parent locator", store, entry.data_offset, e))?;
    Ok(Ok(entry.decode(&data)))
}

fn read_blocks(store: &dyn Store, footer: &Footer, size_bytes: u64, len_bytes: u64) -> Result<Blocks> {
    let header_offset_bytes = footer.data_offset;
    let header_end = header_offset_bytes.checked_add(HEADER_BYTES as u64).filter(|&end| end <= len_bytes);
    let Some(header_end) = header_end.filter(|_| header_offset_bytes >= FOOTER_BYTES as u64) else {
        return Err(corrupt(
            store,
            "footer",
            16,
            format!("a dynamic header at offset {header_offset_bytes}"),
            format!("one between 512 and the end of the file at {len_bytes}"),
        ));
    };
    let mut bytes = [0; HEADER_BYTES];
    store
        .read_at(&mut bytes, header_offset_bytes)
        .map_err(|e| ImageError::io("read the dynamic disk header", store, header_offset_bytes, e))?;
    let header = DynamicHeader::parse(&bytes, header_offset_bytes).map_err(|error| damaged(store, &error))?;
    let wrong = |at: u64, found: String, expected: String| {
        Err(corrupt(store, "dynamic disk header", header_offset_bytes + at, found, expected))
    };
    let block_bytes = u64::from(header.block_bytes);
    let count = size_bytes.div_ceil(block_bytes);
    if count > u64::from(header.max_table_entries) {
        return wrong(
            28,
            format!("{} entries in the block allocation table", header.max_table_entries),
            format!("at least {count}, as {size_bytes} bytes in blocks of {block_bytes} need"),
        );
    }
    let table_offset = header.table_offset;
    let table = match table_offset.checked_add(count * 4) {
        Some(end) if end <= len_bytes && table_offset.is_multiple_of(SECTOR_BYTES) => table_offset..end,
        _ => {
            return wrong(
                16,
                format!("a block allocation table of {} bytes at offset {table_offset}", count * 4),
                format!("one at a multiple of 512 that ends before the file does, at {len_bytes}"),
            );
        }
    };
    let mut metadata = vec![0..FOOTER_BYTES as u64, header_offset_bytes..header_end, table];
    if metadata[..2].iter().any(|other| overlaps(other, &metadata[2])) {
        return wrong(
            16,
            format!("a block allocation table at offset {table_offset}"),
            format!("one that does not overlap the footer copy and the header, which end at 512 and {header_end}"),
        );
    }
    let batmap = Batmap::find(store, footer, &header, &metadata, len_bytes)?;
    metadata.extend(batmap.iter().flat_map(Batmap::ranges));
    let sectors = (block_bytes / SECTOR_BYTES) as u32;
    let last_bytes = size_bytes - count.saturating_sub(1) * block_bytes;
    Ok(Blocks {
        header_offset_bytes,
        is_differencing: footer.kind == DiskKind::Differencing,
        bitmaps_are_full: false,
        block_bytes,
        sectors,
        last_sectors: (last_bytes / SECTOR_BYTES) as u32,
        bitmap_bytes: bitmap_bytes(header.block_bytes),
        table_offset,
        count,
        metadata,
        batmap,
        header,
    })
}
