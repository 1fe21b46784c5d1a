//! [`VdiImage`]: an open VDI, and the states of its blocks.

use super::{
    corrupt,
    layout::{Layout, SECTOR_BYTES, link_of},
};
use crate::{
    error::{ImageError, Result},
    identity::LinkageId,
    image::{BlockState, DiskType, Format, Image, ImageInfo, ImageWriter, LogState, SectorBitmap},
    raw::padded,
};
use diskwright_format::vdi::{VdiEntry, VdiKind};
use diskwright_store::Store;
use std::{io, sync::Arc};

/// Opens the VDI in `store`.
///
/// # Errors
/// `NotAnImage` without the signature; `Unsupported` for a writable open and for an undo image;
/// `Corrupt`; `Io`.
pub fn open(store: Arc<dyn Store>, writable: bool) -> Result<VdiImage> {
    let layout = Layout::read(&*store)?;
    if writable {
        return Err(ImageError::Unsupported {
            path: store.name().to_owned(),
            what: "writing to a VDI image".into(),
            hint: "open it read-only, or convert it to VHDX, VHD or raw".into(),
        });
    }
    let header = &layout.header;
    let mut remarks = Vec::new();
    if !header.comment.is_empty() {
        remarks.push(format!("Comment: {}", header.comment.escape_debug()));
    }
    let places = u64::from(header.data_offset_bytes) + u64::from(header.extra_bytes);
    let alignment = 1 << (places | header.space_bytes() | 1 << 20).trailing_zeros();
    let info = ImageInfo {
        format: Format::Vdi,
        subformat: None,
        disk_type: match header.kind {
            VdiKind::Fixed => DiskType::Fixed,
            VdiKind::Differencing => DiskType::Differencing,
            VdiKind::Dynamic | VdiKind::Undo => DiskType::Dynamic,
        },
        size_bytes: layout.size_bytes,
        block_bytes: header.block_bytes.into(),
        has_blocks: true,
        logical_sector_bytes: SECTOR_BYTES as u32,
        physical_sector_bytes: SECTOR_BYTES as u32,
        creator: header.creator.clone(),
        disk_id: Some(header.id),
        linkage_id: Some(LinkageId::Guid(header.id)),
        file_write_id: None,
        created_seconds: None,
        parent: link_of(header),
        log: LogState::None,
        payload_alignment_bytes: alignment,
        remarks,
    };
    // The last space of the file may be cut.
    let padded_bytes = layout.file_bytes.saturating_add(header.space_bytes());
    let store = padded(store, layout.file_bytes, padded_bytes);
    Ok(VdiImage { info, layout, store })
}

/// An open VDI.
#[derive(Debug)]
pub struct VdiImage {
    info: ImageInfo,
    layout: Layout,
    store: Arc<dyn Store>,
}

impl Image for VdiImage {
    fn info(&self) -> &ImageInfo {
        &self.info
    }

    fn stores(&self) -> &[Arc<dyn Store>] {
        std::slice::from_ref(&self.store)
    }

    fn block_states(&self, first_block: u64, out: &mut [BlockState]) -> Result<()> {
        out.fill(BlockState::Absent);
        let end = first_block.saturating_add(out.len() as u64).min(self.layout.blocks());
        self.layout.each_entry(&*self.store, first_block, end, &mut |block, entry| {
            out[(block - first_block) as usize] = match entry {
                VdiEntry::Free => BlockState::Absent,
                VdiEntry::Zero => BlockState::Zero,
                VdiEntry::Space(space) => self.layout.payload(space).map_or(BlockState::Damaged, BlockState::data),
            };
            Ok(true)
        })
    }

    fn next_block(&self, first_block: u64, end_block: u64) -> Result<Option<u64>> {
        let mut next = None;
        let end = end_block.min(self.layout.blocks());
        self.layout.each_entry(&*self.store, first_block, end, &mut |block, _| {
            next = Some(block);
            Ok(false)
        })?;
        Ok(next)
    }

    fn damage(&self, block: u64) -> Result<ImageError> {
        let mut found = None;
        let end = (block + 1).min(self.layout.blocks());
        self.layout.each_entry(&*self.store, block, end, &mut |_, entry| {
            if let VdiEntry::Space(space) = entry {
                found = self.layout.payload(space).err();
            }
            Ok(false)
        })?;
        let entry_at = self.layout.entry_at(block);
        Ok(match found {
            Some(invalid) => corrupt(&*self.store, entry_at, invalid),
            None => {
                let sound = format!("block {block} was damaged when it was looked up, but its entry is valid now");
                ImageError::io("explain the damage of a block", &*self.store, entry_at, io::Error::other(sound))
            }
        })
    }

    fn sector_bitmap(&self, block: u64) -> Result<SectorBitmap> {
        let mut state = [BlockState::Absent];
        self.block_states(block, &mut state)?;
        let sectors = (self.info.block_bytes / SECTOR_BYTES) as u32;
        let mut bitmap = SectorBitmap::empty(sectors, SECTOR_BYTES as u32);
        if !matches!(state[0], BlockState::Absent) {
            bitmap.words.fill(u64::MAX);
        }
        Ok(bitmap)
    }

    fn writer(&self) -> Option<&dyn ImageWriter> {
        None
    }
}
