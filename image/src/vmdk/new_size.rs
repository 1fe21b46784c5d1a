//! Whether a disk can get a size. `resize` and `grow.rs` ask before they begin, and a merge before
//! it changes the first link.

use super::{
    document::Document,
    layout::{Content, Layout, Part},
    tables::TABLES_MAX,
};
use crate::{ImageError, Result};
use diskwright_format::vmdk::SECTOR_BYTES;

/// The longest extent of the kinds in files of 2 GB, in sectors.
pub(super) const SPLIT_SECTORS: u64 = 4_192_256;

/// Whether the disk can have this size, as far as descriptor, headers and directories say. Returns
/// the part that becomes longer. Everything is asked here that can be, as a merge asks before it
/// changes anything.
///
/// # Errors
/// `Unsupported` if not.
pub(super) fn check<'a>(layout: &'a Layout, document: &Document, size_bytes: u64) -> Result<&'a Part> {
    let present_bytes = layout.size_bytes.get();
    let refused = |hint: &str| {
        let what = format!("a new size of {size_bytes} bytes for this VMDK of {present_bytes} bytes");
        Err(ImageError::Unsupported { path: layout.stores[0].name().to_owned(), what, hint: hint.into() })
    };
    if size_bytes < present_bytes || !size_bytes.is_multiple_of(SECTOR_BYTES) {
        return refused("name a size of at least the present one, a multiple of 512 bytes");
    }
    let Some(part) = layout.parts.last() else { return refused("convert the disk to a new one") };
    let len_bytes = size_bytes - part.start_bytes;
    let is_longer = size_bytes > present_bytes;
    if is_longer && document.is_split() && len_bytes / SECTOR_BYTES > SPLIT_SECTORS {
        return refused(
            "an extent of a VMDK in files of 2 GB ends at 2047 MiB: convert the disk to monolithicSparse or monolithicFlat of that size",
        );
    }
    if !document.has_room_for_length(len_bytes / SECTOR_BYTES) {
        return refused("the descriptor has no room for the extent's new length: convert the disk to a new one");
    }
    match part.content {
        _ if !is_longer => {}
        Content::Zero => return refused("convert the disk to a new one"),
        Content::Flat { store: index, first_bytes } => {
            let store = &layout.stores[usize::from(index)];
            if store.is_block_device() {
                return refused("its last extent is a device, which cannot become longer: convert the disk");
            }
            if first_bytes.saturating_add(len_bytes) >= 1 << 62 {
                return refused("name a smaller size");
            }
            let new_end = first_bytes + len_bytes;
            let may_be = store.check_len(new_end);
            may_be.map_err(|error| ImageError::io("make the extent longer", &**store, new_end, error))?;
            let own = store.identity();
            let in_file = layout.files().into_iter().filter(|(file, _)| own.is_some() && *file == own).count();
            if in_file > 1 || index == 0 {
                return refused("the file of its last extent holds more than this extent: convert the disk");
            }
        }
        Content::Sparse(extent) => {
            let tables = &layout.extents[extent].tables;
            let grains = len_bytes.div_ceil(tables.grain_bytes);
            let most_bytes = grains.saturating_mul(tables.grain_bytes).saturating_add(tables.taken_end_bytes());
            // The capacity of a COWD extent has 32 bits, which `most_bytes` covers.
            let has_many = grains.div_ceil(tables.table_entries) > TABLES_MAX;
            if len_bytes > tables.capacity_bytes.get() && (has_many || most_bytes / SECTOR_BYTES > u64::from(u32::MAX))
            {
                return refused("the tables of a sparse extent reach 2 TiB of its file: convert the disk to VHDX");
            }
        }
    }
    Ok(part)
}
