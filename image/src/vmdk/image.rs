//! An open VMDK: its description, and the states of its blocks.
//!
//! Grain tables are read when states are asked for. A read-only image keeps none of them, only the
//! directories; an image that is open for writing lays its state in memory over them (`grains.rs`).
//! What cannot be written is refused by name when the image is opened ([`Layout::refusal`]).

use super::{
    document::Document,
    layout::{Content, Layout, Part, Place},
    new_size,
    tables::{Entry, Tables},
    text::{Head, link_of},
    write::Writing,
};
use crate::{
    BlockState, DiskType, Format, Image, ImageError, ImageInfo, ImageWriter, LinkageId, ParentLink, Reference, Result,
    SectorBitmap, devices::PHYSICAL_MAPPING, flat,
};
use diskwright_format::vmdk::SECTOR_BYTES;
use diskwright_store::Store;
use std::{ops::Range, sync::Arc};
use uuid::Uuid;

/// The most grains whose places are read for the payload's alignment when nothing depends on it.
const MAX_OPTIONAL_SCAN: u64 = 65_536;
/// The largest alignment that is reported, in bytes.
const ALIGNMENT_MAX_BYTES: u64 = 4096;
/// Entries that are read at once.
const ENTRIES: usize = 512;

/// An open VMDK, with all its extents.
#[derive(Debug)]
pub struct VmdkImage {
    info: ImageInfo,
    layout: Arc<Layout>,
    writing: Option<Box<Writing>>,
}

/// The further files that the image in `store` names.
///
/// # Errors
/// As [`open`].
pub fn references(store: &dyn Store) -> Result<Vec<Reference>> {
    Ok(Head::read(store)?.references().map(|(_, reference)| reference).collect())
}

/// Whether the file has a descriptor: then it is an image, and not only an extent of one.
pub fn has_descriptor(store: &dyn Store) -> bool {
    Head::read(store).is_ok_and(|head| head.text.is_some())
}

/// The parent that the image in `store` names.
///
/// # Errors
/// As [`open`].
pub fn parent_link(store: &dyn Store) -> Result<Option<ParentLink>> {
    Ok(Head::read(store)?.parent_link())
}

/// Opens the VMDK with these files: the first one, and those of [`references`].
///
/// # Errors
/// `NotAnImage`; `Corrupt` for structures that contradict the specification or the files;
/// `Unsupported`, also for a kind that is only read and a writable open; `Io`.
pub fn open(stores: Vec<Arc<dyn Store>>, writable: bool) -> Result<VmdkImage> {
    let layout = Arc::new(Layout::read(stores)?);
    if let Some(refusal) = layout.refusal().filter(|_| writable) {
        return Err(refusal);
    }
    let descriptor = layout.head.text.as_ref();
    let mut remarks = layout.remarks.clone();
    if let Some(path) = descriptor.and_then(|descriptor| descriptor.get("changeTrackPath")) {
        remarks.push(format!(
            "VMware tracks the changes of this disk in {path:?}; the first write drops that record, as it would no longer be true."
        ));
    }
    if descriptor.is_some_and(|descriptor| descriptor.create_type.eq_ignore_ascii_case(PHYSICAL_MAPPING)) {
        remarks.push(
            "A device in physical compatibility: requests go to it as they are, and the disk takes no snapshots; SCSI pass-through (other commands than reads and writes) does not exist here.".into(),
        );
    }
    if layout.extents.iter().any(|extent| extent.tables.is_unclean) {
        remarks.push("The last program that wrote to the disk did not close it.".into());
    }
    let link = descriptor.and_then(link_of);
    let disk_type = match (&link, layout.is_flat()) {
        (Some(_), _) => DiskType::Differencing,
        (None, true) => DiskType::Fixed,
        (None, false) => DiskType::Dynamic,
    };
    let info = ImageInfo {
        has_blocks: !layout.is_flat(),
        subformat: descriptor.map(|descriptor| descriptor.create_type.clone()),
        disk_id: descriptor.and_then(|descriptor| disk_id_of(descriptor.get("ddb.uuid")?)),
        linkage_id: descriptor.map(|descriptor| LinkageId::Cid(descriptor.cid)),
        parent: link,
        payload_alignment_bytes: alignment(&layout)?,
        remarks,
        doubts: layout.doubts.clone(),
        ..ImageInfo::new(Format::Vmdk, disk_type, layout.size_bytes.get(), layout.block_bytes)
    };
    let writing = if writable { Some(Box::new(Writing::new(Arc::clone(&layout))?)) } else { None };
    Ok(VmdkImage { info, layout, writing })
}

/// The 16 bytes of `60 00 C2 9b ... - ...`.
fn disk_id_of(text: &str) -> Option<Uuid> {
    let digits: String = text.chars().filter(|c| !matches!(c, ' ' | '-')).collect();
    Uuid::try_parse(&digits).ok()
}

/// The alignment of all existing and future payload, in bytes. Every entry must be read, as any
/// program may have placed grains anywhere; that is done where O_DIRECT depends on it, and for
/// small extents.
fn alignment(layout: &Layout) -> Result<u32> {
    let mut seen = ALIGNMENT_MAX_BYTES;
    for part in &layout.parts {
        match part.content {
            Content::Zero => {}
            Content::Flat { first_bytes, .. } => seen |= first_bytes | layout.block_bytes,
            Content::Sparse(extent) => {
                let extent = &layout.extents[extent];
                seen |= extent.tables.grain_bytes.min(layout.block_bytes);
                if extent.tables.is_compressed() {
                    continue;
                }
                let matters =
                    extent.store.data_file().is_some_and(|file| u64::from(file.alignment_bytes) > SECTOR_BYTES);
                if !matters && extent.tables.grains() > MAX_OPTIONAL_SCAN {
                    seen |= SECTOR_BYTES;
                    continue;
                }
                scan(&extent.tables, &*extent.store, |_, entry| {
                    if let Entry::At(at) = entry {
                        seen |= at;
                    }
                    Ok(seen & SECTOR_BYTES == 0)
                })?;
            }
        }
    }
    Ok((1 << seen.trailing_zeros().min(ALIGNMENT_MAX_BYTES.trailing_zeros())) as u32)
}

/// Calls `visit(grain, entry)` for every grain of an extent that is not absent, until it returns
/// `false`.
pub(super) fn scan(
    tables: &Tables,
    store: &dyn Store,
    mut visit: impl FnMut(u64, Entry) -> Result<bool>,
) -> Result<()> {
    let mut grain = 0;
    let mut entries = [Entry::Absent; ENTRIES];
    while grain < tables.grains() {
        let table_end = (grain / tables.table_entries + 1) * tables.table_entries;
        if tables.entries[0].get((grain / tables.table_entries) as usize) == Some(&0) {
            grain = table_end;
            continue;
        }
        let count = (table_end.min(tables.grains()) - grain).min(ENTRIES as u64) as usize;
        tables.read_entries(store, grain, &mut entries[..count])?;
        for (grain, &entry) in (grain..).zip(&entries[..count]) {
            if entry != Entry::Absent && !visit(grain, entry)? {
                return Ok(());
            }
        }
        grain += count as u64;
    }
    Ok(())
}

impl VmdkImage {
    /// The number of grain tables in memory.
    #[cfg(test)]
    pub(super) fn tables_in_memory(&self) -> usize {
        self.writing.as_ref().map_or(0, |writing| writing.lock().tables.len())
    }

    /// The entries of grains that lie in one table.
    fn entries(&self, extent: usize, first: u64, out: &mut [Entry]) -> Result<()> {
        if let Some(writing) = &self.writing {
            return writing.entries(extent, first, out);
        }
        let extent = &self.layout.extents[extent];
        extent.tables.read_entries(&*extent.store, first, out)
    }

    /// The number of blocks from `block` on that lie in the same table, at most `most`.
    fn run(&self, block: u64, extent: usize, grain: u64, most: usize) -> u64 {
        let tables = &self.layout.extents[extent].tables;
        let Some(part) = self.layout.part(block) else { return 0 };
        let table_end = (grain / tables.table_entries + 1) * tables.table_entries * tables.grain_bytes;
        let end = part.start_bytes.saturating_add(table_end).min(part.end_bytes.get());
        (end.div_ceil(self.layout.block_bytes) - block).min(most as u64)
    }

    /// The entry of a block of a sparse part.
    fn entry(&self, block: u64) -> Result<Option<(usize, u64, u64, Entry)>> {
        let Some(Place::Grain { extent, grain, within_bytes }) = self.layout.place(block) else { return Ok(None) };
        let mut entry = [Entry::Absent];
        self.entries(extent, grain, &mut entry)?;
        Ok(Some((extent, grain, within_bytes, entry[0])))
    }
}

impl Image for VmdkImage {
    fn info(&self) -> &ImageInfo {
        &self.info
    }

    fn stores(&self) -> &[Arc<dyn Store>] {
        &self.layout.stores
    }

    fn linkage_id(&self) -> Option<LinkageId> {
        self.writing.as_ref().and_then(|writing| writing.document.cid()).or(self.info.linkage_id)
    }

    fn size_bytes(&self) -> u64 {
        self.layout.size_bytes.get()
    }

    fn parent_link(&self) -> Option<ParentLink> {
        match &self.writing {
            Some(writing) => writing.document.parent_link(),
            None => self.info.parent.clone(),
        }
    }

    fn block_states(&self, first_block: u64, out: &mut [BlockState]) -> Result<()> {
        out.fill(BlockState::Absent);
        let mut entries = [Entry::Absent; ENTRIES];
        let mut at = 0;
        while at < out.len() {
            let Some(block) = first_block.checked_add(at as u64) else { return Ok(()) };
            let Some(place) = self.layout.place(block) else { return Ok(()) };
            let (extent, grain) = match place {
                Place::Grain { extent, grain, .. } => (extent, grain),
                Place::Zero => {
                    out[at] = BlockState::Zero;
                    at += 1;
                    continue;
                }
                Place::Flat { store, offset_bytes } => {
                    out[at] = BlockState::Data { store, offset_bytes };
                    at += 1;
                    continue;
                }
            };
            let SparseRun { store, is_compressed, grain_bytes } = self.sparse(extent);
            let per_grain = grain_bytes / self.layout.block_bytes;
            let most = (out.len() - at).min(ENTRIES * usize::try_from(per_grain).unwrap_or(usize::MAX));
            let run = self.run(block, extent, grain, most).max(1) as usize;
            let last = match self.layout.place(block + run as u64 - 1) {
                Some(Place::Grain { grain, .. }) => grain,
                _ => grain,
            };
            let entries = &mut entries[..((last - grain) as usize + 1).min(ENTRIES)];
            self.entries(extent, grain, entries)?;
            let mut done = 0;
            for (offset, state) in out[at..at + run].iter_mut().enumerate() {
                let Some(Place::Grain { grain: of, within_bytes, .. }) = self.layout.place(block + offset as u64)
                else {
                    break;
                };
                let Some(&entry) = entries.get((of - grain) as usize) else { break };
                *state = match entry {
                    Entry::Absent => BlockState::Absent,
                    Entry::Zero => BlockState::Zero,
                    Entry::At(_) if is_compressed => BlockState::Compressed,
                    Entry::At(at) => BlockState::Data { store, offset_bytes: at + within_bytes },
                    Entry::Bad(_) => BlockState::Damaged,
                };
                done += 1;
            }
            at += done.max(1);
        }
        Ok(())
    }

    fn next_block(&self, first_block: u64, end_block: u64) -> Result<Option<u64>> {
        let end = end_block.min(self.layout.blocks());
        let mut block = first_block;
        let mut entries = [Entry::Absent; ENTRIES];
        while block < end {
            let Some(Place::Grain { extent, grain, .. }) = self.layout.place(block) else { return Ok(Some(block)) };
            let run = self.run(block, extent, grain, usize::MAX).max(1);
            let tables = &self.layout.extents[extent].tables;
            let Some(part) = self.layout.part(block) else { return Ok(Some(block)) };
            let grains = (run * self.layout.block_bytes).div_ceil(tables.grain_bytes).min(tables.grains() - grain);
            let mut first = 0;
            while first < grains {
                let count = (grains - first).min(ENTRIES as u64) as usize;
                self.entries(extent, grain + first, &mut entries[..count])?;
                if let Some(found) = entries[..count].iter().position(|&entry| entry != Entry::Absent) {
                    let at = part.start_bytes + (grain + first + found as u64) * tables.grain_bytes;
                    return Ok(Some((at / self.layout.block_bytes).max(block)).filter(|&block| block < end));
                }
                first += count as u64;
            }
            block += run;
        }
        Ok(None)
    }

    fn damage(&self, block: u64) -> Result<ImageError> {
        if let Some((extent, grain, _, Entry::Bad(raw))) = self.entry(block)? {
            let extent = &self.layout.extents[extent];
            return Ok(extent.tables.damage(&extent.store, grain, raw));
        }
        Err(ImageError::Unsupported {
            path: self.store().name().to_owned(),
            what: format!("an explanation of damage at block {block}, which is not damaged,"),
            hint: "run `diskwright check` on the file".into(),
        })
    }

    fn read_compressed(&self, block: u64, within_bytes: u64, out: &mut [u8]) -> Result<()> {
        let Some((extent, grain, within_grain, Entry::At(at))) = self.entry(block)? else {
            out.fill(0);
            return Ok(());
        };
        let extent = &self.layout.extents[extent];
        let bytes = extent.tables.decompress(&*extent.store, grain, at)?;
        let start = usize::try_from(within_grain.saturating_add(within_bytes)).unwrap_or(usize::MAX).min(bytes.len());
        let there = (bytes.len() - start).min(out.len());
        out[..there].copy_from_slice(&bytes[start..start + there]);
        out[there..].fill(0);
        Ok(())
    }

    fn packed_len_bytes(&self, blocks: u64) -> Result<Option<u64>> {
        // One file with one extent: otherwise blocks lie in several files.
        let [extent] = &self.layout.extents[..] else { return Ok(None) };
        if self.layout.parts.len() > 1 || extent.tables.is_compressed() {
            return Ok(None);
        }
        let tables = &extent.tables;
        let start = tables.taken_end_bytes().next_multiple_of(tables.grain_bytes);
        Ok(Some(start.saturating_add(blocks.saturating_mul(tables.grain_bytes))))
    }

    fn keeps_space(&self, store: u16) -> bool {
        self.layout.extents.iter().all(|extent| extent.store_index != store)
    }

    fn check_as_target(&self, size_bytes: u64) -> Result<()> {
        let layout = &self.layout;
        layout.refusal().map_or(Ok(()), Err)?;
        if size_bytes <= self.size_bytes() {
            return Ok(());
        }
        match &self.writing {
            Some(writing) => new_size::check(layout, &writing.document, size_bytes)?,
            None => new_size::check(layout, &Document::read(layout)?, size_bytes)?,
        };
        Ok(())
    }

    fn check_takes(&self, blocks: Range<u64>) -> Result<()> {
        let block_bytes = self.layout.block_bytes;
        let range = blocks.start.saturating_mul(block_bytes)..blocks.end.saturating_mul(block_bytes);
        let is_refused = |part: &Part| {
            let is_there = part.start_bytes < range.end && range.start < part.end_bytes.get();
            is_there && matches!(part.content, Content::Zero)
        };
        match self.layout.parts.iter().find(|part| is_refused(part)) {
            None => Ok(()),
            Some(part) => Err(ImageError::Unsupported {
                path: self.store().name().to_owned(),
                what: format!("data at {} bytes, for which the descriptor names no file,", part.start_bytes),
                hint: "convert the disk to a new one".into(),
            }),
        }
    }

    fn sector_bitmap(&self, _block: u64) -> Result<SectorBitmap> {
        if self.layout.is_flat() {
            return Ok(flat::flat_bitmap(SECTOR_BYTES as u32));
        }
        let sectors = (self.layout.block_bytes / SECTOR_BYTES) as u32;
        let mut bitmap = SectorBitmap::empty(sectors, SECTOR_BYTES as u32);
        bitmap.set(0, sectors);
        Ok(bitmap)
    }

    fn writer(&self) -> Option<&dyn ImageWriter> {
        self.writing.as_deref().map(|writing| writing as &dyn ImageWriter)
    }
}

/// What the states of a sparse extent's blocks have in common.
struct SparseRun {
    store: u16,
    is_compressed: bool,
    grain_bytes: u64,
}

impl VmdkImage {
    fn sparse(&self, extent: usize) -> SparseRun {
        let extent = &self.layout.extents[extent];
        SparseRun {
            store: extent.store_index,
            is_compressed: extent.tables.is_compressed(),
            grain_bytes: extent.tables.grain_bytes,
        }
    }
}
