//! An open VHD: its description, and the states of its blocks.
//!
//! A fixed disk is a flat disk followed by a footer, and shares the code of raw images. For other
//! types a look-up reads one BAT entry. A block is `Partial` unless its bitmap is known to be full.
//! A reader of the block then reads the bitmap once, and the disk above caches the result.
//!
//! In a dynamic disk the sectors whose bits are clear read as zeros. VirtualBox and XenServer read
//! them so, and XenServer does not zero the space of a block. (QEMU returns the bytes at that
//! place.) Windows, QEMU and this program set all bits of a block. The bitmaps are read
//! nevertheless, because the footer names the program that created the file, not those that wrote
//! to it.
//!
//! Bitmaps are not read if they must be full: in a dynamic disk created by this program, all of
//! whose blocks are aligned as this program aligns them. Another program that continues such a file
//! either sets all bits, as Windows does, or begins its first block where the footer was, so that
//! the payload begins one sector after a multiple of 4096. What a disk reads as must not depend on
//! the cache mode, so the alignment of such a disk is found with each; only where the table has
//! more than [`MAX_SCAN_ENTRIES`] entries its bitmaps are read with each.

use super::{
    PAGE_BYTES, bitmap, corrupt,
    grow::FixedFooter,
    growth::FooterPlace,
    layout::{Blocks, Layout, Piece},
    table,
    write::Writing,
};
use crate::{
    BlockState, DiskType, Format, Image, ImageError, ImageInfo, ImageWriter, LinkageId, ParentLink, Result,
    SectorBitmap,
    flat::{self, FLAT_ALIGNMENT_BYTES, FlatWriter, PSEUDO_BLOCK_BYTES, Trailer},
};
use diskwright_format::vhd::{BAT_UNUSED, DiskKind, Footer, SECTOR_BYTES};
use diskwright_store::{
    Store,
    sync::atomic::{AtomicU64, Ordering},
};
use std::sync::Arc;

/// Smallest disk that Windows attaches, in bytes.
const WINDOWS_MIN_BYTES: u64 = 3 << 20;

/// Largest BAT, in entries, that is scanned for the payload's alignment when nothing depends on it:
/// 256 KiB, so that a chain of a thousand images opens at once.
const MAX_OPTIONAL_SCAN_ENTRIES: u64 = 65536;

/// Largest BAT, in entries, that is scanned to spare reading bitmaps: 16 MiB, for 2 TiB in blocks
/// of 512 KiB.
const MAX_SCAN_ENTRIES: u64 = 1 << 22;

/// An open VHD, read-only or writable.
#[derive(Debug)]
pub struct VhdImage {
    info: ImageInfo,
    store: Arc<dyn Store>,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Fixed(Option<FlatWriter>),
    ReadOnly { blocks: Box<Blocks>, len_bytes: KnownLength },
    Writable(Box<Writing>),
}

/// The last known length of the file. It only grows while an image is open.
#[derive(Debug)]
pub(super) struct KnownLength(AtomicU64);

impl KnownLength {
    pub fn new(len_bytes: u64) -> Self {
        Self(AtomicU64::new(len_bytes))
    }

    /// A file length to validate `piece_end`: the known length if that suffices, else the store's.
    pub fn covering(&self, store: &dyn Store, piece_end: u64) -> Result<u64> {
        // Relaxed: the number is only a hint. A stale value costs a system call.
        let known = self.0.load(Ordering::Relaxed);
        if piece_end <= known {
            return Ok(known);
        }
        let found = store.len_bytes().map_err(|e| ImageError::io("get the length of the file", store, 0, e))?;
        self.0.store(found, Ordering::Relaxed);
        Ok(found)
    }
}

/// The parent that the VHD in `store` names, from footer and header. The block allocation table is
/// not read.
///
/// # Errors
/// As [`open`].
pub fn parent_link(store: &dyn Store) -> Result<Option<ParentLink>> {
    let (layout, mut remarks) = Layout::read(store)?;
    layout.parent_link(store, &mut remarks)
}

/// Opens the VHD in `store`. Nothing is written before the first reservation.
///
/// A dynamic disk whose header names a parent may be a child whose footers were changed. It is
/// opened for reading, with a remark, so that its data can be saved. It is not opened for writing:
/// a write would turn the parent's data around it into zeros of this disk, which later cannot be
/// told from written zeros.
///
/// # Errors
/// `NotAnImage` without a footer; `Corrupt` if footer and header contradict each other or the file;
/// `Io`.
pub fn open(store: Arc<dyn Store>, writable: bool) -> Result<VhdImage> {
    let (mut layout, told) = Layout::read(&*store)?;
    let mut remarks = [layout.doubts.clone(), told].concat();
    if writable
        && let Some(blocks) = &layout.blocks
        && let Some(parent) = blocks.stray_parent()
    {
        return Err(corrupt(
            &*store,
            "footer",
            60,
            format!("type 3 (dynamic), though the dynamic header at {} names {parent}", blocks.header_offset_bytes),
            "type 4 (differencing), or a header that names no parent (open the disk read-only, or convert it to a new one)",
        ));
    }
    let parent = layout.parent_link(&*store, &mut remarks)?;
    if layout.footer.saved_state {
        remarks.push("The footer says that the virtual machine is in saved state; changes of the disk may corrupt its file systems.".into());
    }
    if layout.size_bytes < WINDOWS_MIN_BYTES {
        remarks.push("The disk is smaller than 3 MiB; Windows does not attach it.".into());
    }
    let footer = &layout.footer;
    let payload_alignment_bytes = match &mut layout.blocks {
        None => FLAT_ALIGNMENT_BYTES,
        Some(blocks) => {
            let may_be_full = footer.is_ours() && !blocks.is_differencing && blocks.count <= MAX_SCAN_ENTRIES;
            let alignment_bytes = payload_alignment(&*store, blocks, may_be_full)?;
            blocks.bitmaps_are_full = may_be_full && u64::from(alignment_bytes) == PAGE_BYTES;
            alignment_bytes
        }
    };
    let block_bytes = layout.blocks.as_ref().map_or(PSEUDO_BLOCK_BYTES, |blocks| blocks.block_bytes);
    let disk_type = match footer.kind {
        DiskKind::Fixed => DiskType::Fixed,
        DiskKind::Dynamic => DiskType::Dynamic,
        DiskKind::Differencing => DiskType::Differencing,
    };
    let info = ImageInfo {
        has_blocks: layout.blocks.is_some(),
        creator: creator_text(footer),
        disk_id: Some(footer.unique_id),
        linkage_id: Some(LinkageId::from_uuid(footer.unique_id)),
        created_seconds: Some(footer.created_seconds),
        parent,
        payload_alignment_bytes,
        remarks,
        doubts: layout.doubts.clone(),
        ..ImageInfo::new(Format::Vhd, disk_type, layout.size_bytes, block_bytes)
    };
    let (len_bytes, footer) = (layout.len_bytes, FooterPlace::of(&layout));
    let kind = match layout.blocks {
        None => Kind::Fixed(writable.then(|| {
            let place = layout.tail_offset_bytes.unwrap_or(layout.size_bytes);
            let footer = FixedFooter::new(layout.footer_bytes, place, layout.len_bytes);
            let trailer = Trailer::Moves(Box::new(footer));
            FlatWriter::new(Arc::clone(&store), layout.size_bytes, None, trailer)
        })),
        Some(blocks) if writable => {
            Kind::Writable(Box::new(Writing::new(Arc::clone(&store), blocks, footer, len_bytes)))
        }
        Some(blocks) => Kind::ReadOnly { blocks: Box::new(blocks), len_bytes: KnownLength::new(len_bytes) },
    };
    Ok(VhdImage { info, store, kind })
}

/// The program and system that created the file, as text.
fn creator_text(footer: &Footer) -> String {
    let text = |bytes: &[u8; 4]| {
        String::from_utf8_lossy(bytes).trim_matches(|c: char| c.is_whitespace() || c.is_control()).to_owned()
    };
    if footer.is_ours() {
        return "Diskwright (compatible with Windows)".into();
    }
    let (major, minor) = (footer.creator_version >> 16, footer.creator_version & 0xffff);
    format!("{} {major}.{minor} ({})", text(&footer.creator_app), text(&footer.creator_os))
}

/// The alignment of all existing and future payload, in bytes.
///
/// Every entry must be read, as another program may have continued a file of this program and
/// placed payload at any offset. That is done if O_DIRECT depends on the alignment, if the bitmaps
/// do (`may_be_full`), and for small tables. Otherwise the result is the minimum, one sector.
fn payload_alignment(store: &dyn Store, blocks: &Blocks, may_be_full: bool) -> Result<u32> {
    let uses_direct = store.data_file().is_some_and(|file| u64::from(file.alignment_bytes) > SECTOR_BYTES);
    let matters = uses_direct || may_be_full;
    if !matters && blocks.count > MAX_OPTIONAL_SCAN_ENTRIES {
        return Ok(SECTOR_BYTES as u32);
    }
    let mut seen = PAGE_BYTES;
    table::scan(store, blocks, blocks.count, |_, entry| {
        seen |= blocks.place(entry).payload_offset;
        // Only the lowest bit of any offset matters, and a sector is the minimum: stop there.
        Ok(seen & SECTOR_BYTES == 0)
    })?;
    Ok((1 << seen.trailing_zeros().min(PAGE_BYTES.trailing_zeros())) as u32)
}

impl VhdImage {
    /// The space of a block of a read-only image.
    fn piece(&self, blocks: &Blocks, len_bytes: &KnownLength, block: u64, entry: u32) -> Result<Option<Piece>> {
        if entry == BAT_UNUSED {
            return Ok(None);
        }
        let len_bytes = len_bytes.covering(&*self.store, blocks.place(entry).end)?;
        blocks.piece(&*self.store, block, entry, len_bytes)
    }
}

impl Image for VhdImage {
    fn info(&self) -> &ImageInfo {
        &self.info
    }

    fn stores(&self) -> &[Arc<dyn Store>] {
        std::slice::from_ref(&self.store)
    }

    fn size_bytes(&self) -> u64 {
        match &self.kind {
            Kind::Fixed(Some(writer)) => writer.size_bytes(),
            Kind::Writable(writing) => writing.blocks().size_bytes(),
            Kind::Fixed(None) | Kind::ReadOnly { .. } => self.info.size_bytes,
        }
    }

    fn linkage_id(&self) -> Option<LinkageId> {
        let changed = match &self.kind {
            Kind::Writable(writing) => writing.lock().unique_id.map(LinkageId::from_uuid),
            Kind::Fixed(Some(writer)) => writer.linkage_id(),
            Kind::Fixed(None) | Kind::ReadOnly { .. } => None,
        };
        changed.or(self.info.linkage_id)
    }

    fn parent_link(&self) -> Option<ParentLink> {
        let changed = match &self.kind {
            Kind::Writable(writing) => writing.lock().link.clone(),
            Kind::Fixed(_) | Kind::ReadOnly { .. } => None,
        };
        changed.or_else(|| self.info.parent.clone())
    }

    fn block_states(&self, first_block: u64, out: &mut [BlockState]) -> Result<()> {
        match &self.kind {
            Kind::Fixed(_) => flat::flat_states(self.size_bytes(), first_block, out),
            Kind::Writable(writing) => writing.block_states(first_block, out)?,
            Kind::ReadOnly { blocks, len_bytes } => {
                out.fill(BlockState::Absent);
                let inside = blocks.count.saturating_sub(first_block).min(out.len() as u64) as usize;
                let mut entries = [0; 256];
                for (first, states) in (first_block..).step_by(256).zip(out[..inside].chunks_mut(256)) {
                    let entries = &mut entries[..states.len()];
                    table::read_entries(&*self.store, blocks, first, entries)?;
                    for ((block, &entry), state) in (first..).zip(&*entries).zip(states) {
                        *state = match self.piece(blocks, len_bytes, block, entry) {
                            Ok(piece) => blocks.state_of(piece),
                            Err(ImageError::Corrupt { .. }) => BlockState::Damaged,
                            Err(error) => return Err(error),
                        };
                    }
                }
            }
        }
        Ok(())
    }

    fn packed_len_bytes(&self, blocks: u64) -> Result<Option<u64>> {
        let current = match &self.kind {
            Kind::Fixed(_) => return Ok(None),
            Kind::Writable(writing) => writing.blocks(),
            Kind::ReadOnly { blocks, .. } => Arc::new((**blocks).clone()),
        };
        let tables_bytes = current.tables_end_bytes(u64::MAX);
        // A block begins at a page, the footer at a sector.
        let tables_bytes = if blocks > 0 { tables_bytes.next_multiple_of(PAGE_BYTES) } else { tables_bytes };
        Ok(Some(tables_bytes.saturating_add(blocks.saturating_mul(current.piece_bytes())).saturating_add(SECTOR_BYTES)))
    }

    fn damage(&self, block: u64) -> Result<ImageError> {
        match &self.kind {
            Kind::Fixed(_) => Err(ImageError::Unsupported {
                path: self.store.name().to_owned(),
                what: format!("damage at block {block} of a fixed VHD, which has no table,"),
                hint: "run `diskwright check` on the file".into(),
            }),
            Kind::Writable(writing) => writing.damage(block),
            Kind::ReadOnly { blocks, len_bytes } => {
                blocks.check_block(&*self.store, block)?;
                let mut entry = [BAT_UNUSED];
                table::read_entries(&*self.store, blocks, block, &mut entry)?;
                let len_bytes = len_bytes.covering(&*self.store, blocks.place(entry[0]).end)?;
                blocks.damage_of(&*self.store, block, entry[0], len_bytes)
            }
        }
    }

    fn sector_bitmap(&self, block: u64) -> Result<SectorBitmap> {
        match &self.kind {
            Kind::Fixed(_) => Ok(flat::flat_bitmap(SECTOR_BYTES as u32)),
            Kind::Writable(writing) => writing.sector_bitmap(block),
            Kind::ReadOnly { blocks, len_bytes } => {
                blocks.check_block(&*self.store, block)?;
                let mut entry = [BAT_UNUSED];
                table::read_entries(&*self.store, blocks, block, &mut entry)?;
                match self.piece(blocks, len_bytes, block, entry[0])? {
                    None => Ok(SectorBitmap::empty(blocks.sectors, SECTOR_BYTES as u32)),
                    Some(_) if blocks.bitmaps_are_full => Ok(bitmap::full(blocks)),
                    Some(piece) => bitmap::read(&*self.store, blocks, &piece),
                }
            }
        }
    }

    fn writer(&self) -> Option<&dyn ImageWriter> {
        match &self.kind {
            Kind::Fixed(writer) => writer.as_ref().map(|writer| writer as &dyn ImageWriter),
            Kind::ReadOnly { .. } => None,
            Kind::Writable(writing) => Some(&**writing),
        }
    }
}
