//! An open VHD: what it is, and where its blocks are.
//!
//! A fixed disk is a flat one with a footer behind it, and shares the code of raw images. For the
//! others a look-up is one BAT entry. A block is `Partial`, unless its bitmap is known to be full;
//! who reads the block then asks for the bitmap, once, and the disk above remembers a block that
//! turns out whole.
//!
//! In a dynamic disk the sectors whose bits are clear read as zeros. VirtualBox and XenServer read
//! them so, and XenServer does not clear the space of a block. (QEMU shows the bytes that lie
//! there.) Windows, QEMU and this program set all bits of a block; the bitmaps are read
//! nevertheless, for the footer names who made a file, not who filled it.
//!
//! Bitmaps are not read at all where they must be full: in a dynamic disk by this program all of
//! whose blocks lie as this program places them. Another program that goes on with such a file sets
//! all bits, as Windows does, or begins its first block where the footer was, which puts the
//! payload one sector behind a multiple of 4096.

use super::{
    PAGE_BYTES, bitmap, corrupt,
    grow::FixedFooter,
    growth::FooterPlace,
    layout::{Blocks, Layout, Piece},
    table,
    write::Writing,
};
use crate::{
    BlockState, DiskType, Format, Image, ImageError, ImageInfo, ImageWriter, LogState, ParentLink, Result,
    SectorBitmap,
    raw::{self, Behind, FLAT_ALIGNMENT_BYTES, FlatWriter, PSEUDO_BLOCK_BYTES},
};
use diskwright_format::vhd::{BAT_UNUSED, DiskKind, Footer, SECTOR_BYTES};
use diskwright_store::{
    Store,
    sync::atomic::{AtomicU64, Ordering},
};
use std::sync::Arc;

/// Windows attaches nothing smaller, in bytes.
const WINDOWS_MIN_BYTES: u64 = 3 << 20;

/// BAT entries up to which the alignment of the payload is looked up where it is only a matter of
/// interest: 256 KiB, so that a chain of a thousand images opens at once.
const CURIOSITY_ENTRIES: u64 = 65536;

/// A VHD file.
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

/// The length of the file as last seen. It only grows while an image is open.
#[derive(Debug)]
pub(super) struct KnownLength(AtomicU64);

impl KnownLength {
    pub fn new(len_bytes: u64) -> Self {
        Self(AtomicU64::new(len_bytes))
    }

    /// A length to check `piece_end` against: what is known when that is enough, else what the
    /// store says.
    pub fn covering(&self, store: &dyn Store, piece_end: u64) -> Result<u64> {
        // Relaxed: the number is only a hint; a stale one costs a system call.
        let known = self.0.load(Ordering::Relaxed);
        if piece_end <= known {
            return Ok(known);
        }
        let found = store.len_bytes().map_err(|e| ImageError::io("learn the length of the file", store, 0, e))?;
        self.0.store(found, Ordering::Relaxed);
        Ok(found)
    }
}

/// The parent that the VHD in `store` names, by footer and header alone: the block allocation table
/// is not read.
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
/// opened for reading, with a remark, so that what it holds can be saved. It is not opened for
/// writing: a write would turn whatever the parent holds around it into zeros of the disk's own,
/// and later nobody could tell those from data.
///
/// # Errors
/// `NotAnImage` without a footer; `Corrupt` when footer and header contradict themselves or the
/// file; `Io`.
pub fn open(store: Arc<dyn Store>, writable: bool) -> Result<VhdImage> {
    let (mut layout, mut remarks) = Layout::read(&*store)?;
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
        remarks.push("The footer says that the virtual machine is in saved state; it will not notice changes.".into());
    }
    if layout.size_bytes < WINDOWS_MIN_BYTES {
        remarks.push("The disk is smaller than 3 MiB; Windows does not attach it.".into());
    }
    let footer = &layout.footer;
    let payload_alignment_bytes = match &mut layout.blocks {
        None => FLAT_ALIGNMENT_BYTES,
        Some(blocks) => {
            let alignment_bytes = payload_alignment(&*store, blocks)?;
            let is_all_ours = footer.is_ours() && u64::from(alignment_bytes) == PAGE_BYTES;
            blocks.bitmaps_are_full = is_all_ours && !blocks.is_differencing;
            alignment_bytes
        }
    };
    let info = ImageInfo {
        format: Format::Vhd,
        disk_type: match footer.kind {
            DiskKind::Fixed => DiskType::Fixed,
            DiskKind::Dynamic => DiskType::Dynamic,
            DiskKind::Differencing => DiskType::Differencing,
        },
        size_bytes: layout.size_bytes,
        block_bytes: layout.blocks.as_ref().map_or(PSEUDO_BLOCK_BYTES, |blocks| blocks.block_bytes),
        has_blocks: layout.blocks.is_some(),
        logical_sector_bytes: SECTOR_BYTES as u32,
        physical_sector_bytes: SECTOR_BYTES as u32,
        creator: creator_text(footer),
        disk_id: Some(footer.unique_id),
        linkage_id: Some(footer.unique_id),
        file_write_id: None,
        created_seconds: Some(footer.created_seconds),
        parent,
        log: LogState::None,
        payload_alignment_bytes,
        remarks,
    };
    let (len_bytes, footer) = (layout.len_bytes, FooterPlace::of(&layout));
    let kind = match layout.blocks {
        None => Kind::Fixed(writable.then(|| {
            let behind = Behind::Moves(Box::new(FixedFooter::new(layout.footer_bytes)));
            FlatWriter::new(Arc::clone(&store), layout.size_bytes, None, behind)
        })),
        Some(blocks) if writable => {
            Kind::Writable(Box::new(Writing::new(Arc::clone(&store), blocks, footer, len_bytes)))
        }
        Some(blocks) => Kind::ReadOnly { blocks: Box::new(blocks), len_bytes: KnownLength::new(len_bytes) },
    };
    Ok(VhdImage { info, store, kind })
}

/// The creator in words.
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

/// What divides the offsets of all payload that there is or will be.
///
/// Every entry must be looked at to know: files that we made may have been continued by others, who
/// place payload as they like. That is done when payload is moved past the page cache, where it
/// decides whether that works, and for tables that cost nothing to read. Otherwise the answer is
/// the least that it can be.
fn payload_alignment(store: &dyn Store, blocks: &Blocks) -> Result<u32> {
    let matters = store.data_file().is_some_and(|file| u64::from(file.alignment_bytes) > SECTOR_BYTES);
    if !matters && blocks.count > CURIOSITY_ENTRIES {
        return Ok(SECTOR_BYTES as u32);
    }
    let mut seen = PAGE_BYTES;
    table::scan(store, blocks, blocks.count, |_, entry| {
        seen |= blocks.place(entry).payload_offset;
        // All that is left to learn is how low the lowest bit is, and it cannot be lower than a
        // sector.
        Ok(seen & SECTOR_BYTES == 0)
    })?;
    Ok((1 << seen.trailing_zeros().min(PAGE_BYTES.trailing_zeros())) as u32)
}

impl VhdImage {
    /// The piece of a block of a read-only image.
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

    fn block_states(&self, first_block: u64, out: &mut [BlockState]) -> Result<()> {
        match &self.kind {
            Kind::Fixed(_) => raw::flat_states(self.size_bytes(), first_block, out),
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
            Kind::Fixed(_) => Ok(raw::flat_bitmap(SECTOR_BYTES as u32)),
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
