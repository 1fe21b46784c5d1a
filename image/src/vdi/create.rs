//! Creates VDI files.
//!
//! ```text
//!   0 header │ 1 MiB block map │ (a multiple of 1 MiB, at least 2 MiB) space 0 │ space 1 │ ...
//! ```
//!
//! The places are those of VirtualBox. The gap between map and space 0 is room for the map of a
//! larger disk. A block has 1 MiB unless the caller asks for more or less: QEMU opens only that.
//!
//! A fixed disk has space for all its blocks, in their order; without `preallocate` the file is
//! sparse. The header is written last, after everything else is durable. So a file whose creation
//! was interrupted is not recognised as a VDI.

use super::{head::ids_of, layout::SECTOR_BYTES};
use crate::{CreateOptions, DiskType, ImageError, Result};
use diskwright_format::vdi::{BLOCK_MAX_BYTES, BLOCK_MIN_BYTES, VdiEntry, VdiHeader, VdiKind};
use diskwright_store::{FileRange, Store};
use std::sync::Arc;
use uuid::Uuid;

/// Block of a new image, which every program takes.
const BLOCK_BYTES: u32 = 1 << 20;
/// Offset of the map, and the unit of the offset of the data.
const ALIGNMENT_BYTES: u64 = 1 << 20;
/// The longest map of a new image: 64 TiB in blocks of 1 MiB.
const MAP_MAX_BYTES: u64 = 256 << 20;
/// Bytes of the map that one call writes.
const STEP_BYTES: usize = 1 << 20;

/// Creates a VDI in an empty store. Durable on return.
///
/// # Errors
/// `BadOptions` for options that the format does not allow, before anything is written; `Io`, after
/// which the store holds an incomplete image.
pub(crate) fn create(store: Arc<dyn Store>, options: &CreateOptions) -> Result<()> {
    let store = &*store;
    let header = header_of(store, options)?;
    let io = |doing: &'static str, at| move |error| ImageError::io(doing, store, at, error);
    let sync = |doing| store.sync_data().map_err(io(doing, 0));
    let data = u64::from(header.data_offset_bytes);
    let end = data + u64::from(header.blocks_allocated) * header.space_bytes();
    store.set_len(end).map_err(io("set the length of the file", end))?;
    if options.preallocate {
        let range = FileRange { offset_bytes: data, len_bytes: end - data };
        store.allocate(range).map_err(io("allocate the space of the disk", data))?;
    }
    let is_fixed = header.kind == VdiKind::Fixed;
    let mut block = 0;
    while block < header.blocks {
        let count = (header.blocks - block).min((STEP_BYTES / 4) as u32);
        let entry = |block| if is_fixed { VdiEntry::Space(block) } else { VdiEntry::Free };
        let bytes: Vec<u8> = (block..block + count).flat_map(|block| entry(block).word().to_le_bytes()).collect();
        let at = u64::from(header.map_offset_bytes) + u64::from(block) * 4;
        store.write_at(&bytes, at).map_err(io("write the block map", at))?;
        block += count;
    }
    sync("make the block map durable")?;
    store.write_at(&header.to_sector().0, 0).map_err(io("write the VDI header", 0))?;
    sync("make the VDI header durable")
}

fn header_of(store: &dyn Store, options: &CreateOptions) -> Result<VdiHeader> {
    let bad = |what: String, hint: &str| {
        Err(ImageError::BadOptions { path: store.name().to_owned(), what, hint: hint.into() })
    };
    let size_bytes = options.size_bytes;
    if size_bytes == 0 || !size_bytes.is_multiple_of(SECTOR_BYTES) {
        let what = format!("a size of {size_bytes} bytes is not a multiple of the 512-byte sector above 0");
        return bad(what, "round it up");
    }
    if u64::from(options.logical_sector_bytes) != SECTOR_BYTES {
        let what = format!("VDI has sectors of 512 bytes, not {}", options.logical_sector_bytes);
        return bad(what, "use VHDX for a disk with 4096-byte sectors");
    }
    let block_bytes = options.block_bytes.unwrap_or(BLOCK_BYTES);
    if !block_bytes.is_power_of_two() || !(BLOCK_MIN_BYTES..=BLOCK_MAX_BYTES).contains(&block_bytes) {
        let what = format!("a block of {block_bytes} bytes is not a power of two from 4 KiB to 256 MiB");
        return bad(what, "use 1 MiB (1048576), which every program takes");
    }
    let blocks = size_bytes.div_ceil(block_bytes.into());
    let blocks = match u32::try_from(blocks).ok().filter(|&blocks| u64::from(blocks) * 4 <= MAP_MAX_BYTES) {
        Some(blocks) => blocks,
        None => return bad(format!("{size_bytes} bytes are {blocks} blocks, more than 64 Mi"), "use larger blocks"),
    };
    let kind = match options.disk_type {
        DiskType::Fixed => VdiKind::Fixed,
        DiskType::Dynamic => VdiKind::Dynamic,
        DiskType::Differencing => VdiKind::Differencing,
    };
    if options.preallocate && kind != VdiKind::Fixed {
        let what = format!("a {} VDI cannot reserve the space of its disk", options.disk_type);
        return bad(what, "use a fixed disk for that");
    }
    let parent = match &options.parent {
        Some(parent) => match ids_of(parent) {
            Some(ids) => Some(ids),
            None => return bad("the parent has no ids that a VDI can name".into(), "use a VDI as the parent"),
        },
        None => None,
    };
    let data_offset_bytes = (ALIGNMENT_BYTES + u64::from(blocks) * 4).next_multiple_of(ALIGNMENT_BYTES);
    Ok(VdiHeader {
        kind,
        comment: String::new(),
        creator: String::new(),
        map_offset_bytes: ALIGNMENT_BYTES as u32,
        // At most 257 MiB.
        data_offset_bytes: data_offset_bytes as u32,
        size_bytes,
        block_bytes,
        extra_bytes: 0,
        blocks,
        blocks_allocated: if kind == VdiKind::Fixed { blocks } else { 0 },
        id: options.disk_id.unwrap_or_else(Uuid::new_v4),
        modify_id: Uuid::new_v4(),
        parent_id: parent.map_or(Uuid::nil(), |ids| ids.id),
        parent_modify_id: parent.map_or(Uuid::nil(), |ids| ids.modify_id),
        second_parent_modify_id: parent.and_then(|ids| ids.second),
    })
}
