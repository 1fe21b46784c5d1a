//! [`VdiImage`]: an open VDI, and the states of its blocks.

use super::{
    corrupt,
    layout::{Layout, SECTOR_BYTES, link_of, stray_parent},
    map::Entry,
    write::{PAGE_ENTRIES, Writing},
};
use crate::{
    BlockState, DiskType, Format, Image, ImageInfo, ImageWriter, ParentLink, SectorBitmap,
    error::{ImageError, Result},
    identity::LinkageId,
    padded::padded,
};
use diskwright_format::vdi::{VdiEntry, VdiKind};
use diskwright_store::Store;
use std::{io, sync::Arc};

/// Opens the VDI in `store`.
///
/// # Errors
/// `NotAnImage` without the signature; `Unsupported` for an undo image, and for a writable open of
/// an image with extra bytes before its blocks; `Corrupt`; `Io`.
pub fn open(store: Arc<dyn Store>, writable: bool) -> Result<VdiImage> {
    let layout = Layout::read(&*store)?;
    if let Some(refusal) = layout.refusal(&*store).filter(|_| writable) {
        return Err(refusal);
    }
    let header = &layout.header;
    let mut remarks = Vec::new();
    if !header.comment.is_empty() {
        remarks.push(format!("Comment: {}", header.comment.escape_debug()));
    }
    let doubts: Vec<_> = stray_parent(header).into_iter().collect();
    remarks.extend(doubts.iter().cloned());
    let places = u64::from(header.data_offset_bytes) + u64::from(header.extra_bytes);
    let alignment = 1 << (places | header.space_bytes() | 1 << 20).trailing_zeros();
    let disk_type = match header.kind {
        VdiKind::Fixed => DiskType::Fixed,
        VdiKind::Differencing => DiskType::Differencing,
        VdiKind::Dynamic | VdiKind::Undo => DiskType::Dynamic,
    };
    let info = ImageInfo {
        creator: header.creator.clone(),
        disk_id: Some(header.id),
        linkage_id: Some(LinkageId::Guid(header.modify_id)),
        parent: link_of(header),
        payload_alignment_bytes: alignment,
        remarks,
        doubts,
        ..ImageInfo::new(Format::Vdi, disk_type, layout.size_bytes, header.block_bytes.into())
    };
    if writable {
        let writing = Box::new(Writing::new(layout.clone(), Arc::clone(&store))?);
        return Ok(VdiImage { info, layout, store, writing: Some(writing) });
    }
    // The last space of the file may be cut.
    let padded_bytes = layout.file_bytes.saturating_add(layout.missing_bytes());
    let store = padded(store, layout.file_bytes, padded_bytes);
    Ok(VdiImage { info, layout, store, writing: None })
}

/// An open VDI, read-only or writable.
#[derive(Debug)]
pub struct VdiImage {
    info: ImageInfo,
    layout: Layout,
    store: Arc<dyn Store>,
    writing: Option<Box<Writing>>,
}

impl VdiImage {
    /// The number of pages of the map in memory.
    #[cfg(test)]
    pub(super) fn pages_in_memory(&self) -> usize {
        self.writing.as_ref().map_or(0, |writing| writing.lock().pages.len())
    }

    /// The places now.
    fn layout(&self) -> &Layout {
        self.writing.as_ref().map_or(&self.layout, |writing| &writing.layout)
    }

    /// The number of blocks now.
    fn blocks(&self) -> u64 {
        self.size_bytes().div_ceil(self.info.block_bytes)
    }

    /// Calls `each` for the entries `first .. end` that are not free, until it returns `false`.
    fn each_entry(&self, first: u64, end: u64, each: &mut dyn FnMut(u64, Entry) -> bool) -> Result<()> {
        let Some(writing) = &self.writing else {
            return self.layout.each_entry(&*self.store, first, end, &mut |block, entry| {
                let entry = match entry {
                    VdiEntry::Free => Entry::Absent,
                    VdiEntry::Zero => Entry::Zero,
                    VdiEntry::Space(space) => self.layout.payload(space).map_or(Entry::Bad(space), Entry::At),
                };
                Ok(each(block, entry))
            });
        };
        let mut at = first;
        let mut entries = [Entry::Absent; PAGE_ENTRIES as usize];
        while at < end {
            let page_end = (at / PAGE_ENTRIES + 1) * PAGE_ENTRIES;
            let entries = &mut entries[..(end.min(page_end) - at) as usize];
            writing.entries(at, entries)?;
            for (block, &entry) in (at..).zip(entries.iter()) {
                if entry != Entry::Absent && !each(block, entry) {
                    return Ok(());
                }
            }
            at += entries.len() as u64;
        }
        Ok(())
    }
}

impl Image for VdiImage {
    fn info(&self) -> &ImageInfo {
        &self.info
    }

    fn stores(&self) -> &[Arc<dyn Store>] {
        std::slice::from_ref(&self.store)
    }

    fn size_bytes(&self) -> u64 {
        self.writing.as_ref().map_or(self.info.size_bytes, |writing| writing.size_bytes())
    }

    fn linkage_id(&self) -> Option<LinkageId> {
        self.writing.as_ref().map_or(self.info.linkage_id, |writing| writing.head.linkage_id())
    }

    fn parent_link(&self) -> Option<ParentLink> {
        self.writing.as_ref().map_or_else(|| self.info.parent.clone(), |writing| writing.head.parent_link())
    }

    fn block_states(&self, first_block: u64, out: &mut [BlockState]) -> Result<()> {
        out.fill(BlockState::Absent);
        let end = first_block.saturating_add(out.len() as u64).min(self.blocks());
        self.each_entry(first_block, end, &mut |block, entry| {
            out[(block - first_block) as usize] = entry.state();
            true
        })
    }

    fn next_block(&self, first_block: u64, end_block: u64) -> Result<Option<u64>> {
        let mut next = None;
        let end = end_block.min(self.blocks());
        self.each_entry(first_block, end, &mut |block, _| {
            next = Some(block);
            false
        })?;
        Ok(next)
    }

    fn damage(&self, block: u64) -> Result<ImageError> {
        let mut found = None;
        let end = block.saturating_add(1).min(self.blocks());
        self.each_entry(block, end, &mut |_, entry| {
            found = Some(entry);
            false
        })?;
        let entry_at = self.layout().entry_at(block);
        if let Some(Entry::Bad(space)) = found {
            let file_bytes = self.store.len_bytes().unwrap_or(self.layout.file_bytes);
            return Ok(corrupt(&*self.store, entry_at, self.layout().outside(space, file_bytes)));
        }
        let sound = format!("block {block} was damaged when it was looked up, but its entry is valid now");
        Ok(ImageError::io("explain the damage of a block", &*self.store, entry_at, io::Error::other(sound)))
    }

    fn packed_len_bytes(&self, blocks: u64) -> Result<Option<u64>> {
        let data = self.layout().data_bytes();
        Ok(Some(data.saturating_add(blocks.saturating_mul(self.layout.header.space_bytes()))))
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
        self.writing.as_deref().map(|writing| writing as &dyn ImageWriter)
    }
}
