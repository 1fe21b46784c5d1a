//! Creates VHD files.
//!
//! ```text
//!   fixed:     payload, a hole unless `preallocate` │ footer
//!
//!   others:    0 footer copy │ 512 header │ 1536 parent locators │ room for both once more
//!              BAT, at a multiple of 4096 │ with `preallocate`: space of all blocks │ footer
//! ```
//!
//! Without `preallocate` the footer follows the BAT directly, where QEMU puts the first block
//! ([`super::growth`] says why that is necessary).
//!
//! Most programs put the BAT directly after the header. Here it begins at a page, so that writing a
//! sector of it touches no page with other data (except the footer, as long as there is no block).
//! The header has its offset, and every reader uses that.
//!
//! A differencing disk has room before the BAT for a second header with locators of the same
//! length: a changed link to the parent goes there (`relink.rs`).
//!
//! The footers are written last, after everything else is durable. So a file whose creation was
//! interrupted is not recognised as a VHD.

use super::{PAGE_BYTES, link};
use crate::{CreateOptions, DiskType, ImageError, LinkageId, ParentLink, Result};
use diskwright_format::vhd::{
    BAT_UNUSED, CREATOR_APP, CREATOR_OS, CREATOR_VERSION, Chs, DEFAULT_BLOCK_BYTES, DiskKind, DynamicHeader,
    FEATURE_RESERVED, FOOTER_BYTES, Footer, HEADER_BYTES, MAX_DYNAMIC_BYTES, NO_DATA_OFFSET, SECTOR_BYTES,
    bitmap_bytes, seconds_from_unix,
};
use diskwright_store::{FileRange, Store};
use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};
use uuid::Uuid;

/// Largest fixed disk that can be created, in bytes: 16 TiB, the largest file of ext4.
pub(super) const MAX_FIXED_BYTES: u64 = 16 << 40;

/// Smallest block size that can be created, in bytes.
const MIN_BLOCK_BYTES: u32 = 4096;
/// Largest block size that can be created, in bytes.
const MAX_BLOCK_BYTES: u32 = 256 << 20;
/// Largest BAT that can be created, in bytes.
pub(super) const MAX_TABLE_BYTES: u64 = 64 << 20;
/// Maximum number of bytes before the BAT of a new file: footer, and twice a header with two parent
/// locators of the largest length.
const MAX_TABLES_BEFORE_BAT_BYTES: u64 = 260 << 10;
/// Bytes of a BAT written by one call.
const TABLE_STEP_BYTES: usize = 1 << 20;

/// Creates a VHD in an empty store. Durable on return.
///
/// # Errors
/// `BadOptions` for options that the format does not allow, before anything is written; `Io`, after
/// which the store holds an incomplete image.
pub fn create(store: Arc<dyn Store>, options: &CreateOptions) -> Result<()> {
    let store = &*store;
    check_options(store, options)?;
    match options.disk_type {
        DiskType::Fixed => create_fixed(store, options),
        DiskType::Dynamic => create_with_blocks(store, options, DiskKind::Dynamic, &ParentLink::default()),
        DiskType::Differencing => {
            let parent = options.parent.clone().unwrap_or_default();
            create_with_blocks(store, options, DiskKind::Differencing, &parent)
        }
    }
}

fn check_options(store: &dyn Store, options: &CreateOptions) -> Result<()> {
    let bad = |what: String, hint: &str| {
        Err(ImageError::BadOptions { path: store.name().to_owned(), what, hint: hint.into() })
    };
    let size_bytes = options.size_bytes;
    let is_fixed = options.disk_type == DiskType::Fixed;
    let max_bytes = if is_fixed { MAX_FIXED_BYTES } else { MAX_DYNAMIC_BYTES };
    if size_bytes == 0 || !size_bytes.is_multiple_of(SECTOR_BYTES) {
        return bad(
            format!("a size of {size_bytes} bytes is not a multiple of the 512-byte sector above 0"),
            "round it up",
        );
    }
    if size_bytes > max_bytes {
        let kind = options.disk_type;
        return bad(
            format!("{size_bytes} bytes are more than a {kind} VHD can have, which is {max_bytes}"),
            "use VHDX, which goes up to 64 TiB",
        );
    }
    if options.logical_sector_bytes != SECTOR_BYTES as u32 {
        let sector = options.logical_sector_bytes;
        return bad(
            format!("VHD has sectors of 512 bytes, not {sector}"),
            "use VHDX for a disk with 4096-byte sectors",
        );
    }
    if !is_fixed {
        let block_bytes = options.block_bytes.unwrap_or(DEFAULT_BLOCK_BYTES);
        if !block_bytes.is_power_of_two() || !(MIN_BLOCK_BYTES..=MAX_BLOCK_BYTES).contains(&block_bytes) {
            return bad(
                format!(
                    "a block of {block_bytes} bytes is not a power of two from {MIN_BLOCK_BYTES} to {MAX_BLOCK_BYTES}"
                ),
                "use 2 MiB (2097152), which every program takes",
            );
        }
        let table_bytes = size_bytes.div_ceil(u64::from(block_bytes)) * 4;
        if table_bytes > MAX_TABLE_BYTES {
            return bad(
                format!("blocks of {block_bytes} bytes need a block allocation table of {table_bytes} bytes"),
                "use larger blocks",
            );
        }
        if !fits(size_bytes, block_bytes) {
            let mut enough = block_bytes;
            while enough < MAX_BLOCK_BYTES && !fits(size_bytes, enough) {
                enough *= 2;
            }
            return bad(
                format!(
                    "the last of {} blocks of {block_bytes} bytes, each with its bitmap, would lie beyond 2 TiB in the file, where the block allocation table cannot point",
                    size_bytes.div_ceil(u64::from(block_bytes))
                ),
                &format!("use blocks of {enough} bytes or more (2097152 is usual), or VHDX"),
            );
        }
    }
    match (&options.parent, options.disk_type) {
        (None, DiskType::Differencing) => bad("a differencing disk needs a parent".into(), "name one"),
        (Some(_), DiskType::Fixed | DiskType::Dynamic) => {
            bad(format!("a {} disk has no parent", options.disk_type), "make it differencing")
        }
        (Some(parent), _) => link::check(parent).or_else(|(what, hint)| bad(what, hint)),
        (None, _) => Ok(()),
    }
}

/// Whether the BAT can address every block when all have space, whatever the length of the
/// locators.
pub(super) fn fits(size_bytes: u64, block_bytes: u32) -> bool {
    let count = size_bytes.div_ceil(u64::from(block_bytes));
    let area_bytes = bitmap_bytes(block_bytes).next_multiple_of(PAGE_BYTES);
    let tables_bytes = MAX_TABLES_BEFORE_BAT_BYTES + (count * 4).next_multiple_of(PAGE_BYTES);
    let last_bitmap = tables_bytes + (count - 1) * (area_bytes + u64::from(block_bytes)) + area_bytes;
    last_bitmap / SECTOR_BYTES < u64::from(BAT_UNUSED)
}

fn new_footer(options: &CreateOptions, kind: DiskKind, data_offset: u64) -> Footer {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    Footer {
        features: FEATURE_RESERVED,
        data_offset,
        created_seconds: seconds_from_unix(i64::try_from(now).unwrap_or(i64::MAX)),
        creator_app: CREATOR_APP,
        creator_version: CREATOR_VERSION,
        creator_os: CREATOR_OS,
        original_size_bytes: options.size_bytes,
        current_size_bytes: options.size_bytes,
        geometry: Chs::from_size(options.size_bytes),
        kind,
        unique_id: options.disk_id.unwrap_or_else(Uuid::new_v4),
        saved_state: false,
    }
}

fn create_fixed(store: &dyn Store, options: &CreateOptions) -> Result<()> {
    let size_bytes = options.size_bytes;
    if options.preallocate {
        store
            .allocate(FileRange { offset_bytes: 0, len_bytes: size_bytes })
            .map_err(|e| ImageError::io("reserve space for the disk", store, 0, e))?;
    }
    write(store, &new_footer(options, DiskKind::Fixed, NO_DATA_OFFSET).to_bytes(), size_bytes, "write the footer")?;
    sync(store)
}

fn create_with_blocks(store: &dyn Store, options: &CreateOptions, kind: DiskKind, parent: &ParentLink) -> Result<()> {
    let block_bytes = options.block_bytes.unwrap_or(DEFAULT_BLOCK_BYTES);
    let count = options.size_bytes.div_ceil(u64::from(block_bytes));

    let header_offset = FOOTER_BYTES as u64;
    let locators_offset = header_offset + HEADER_BYTES as u64;
    let (locators, locator_data) = link::locators(parent, locators_offset);
    let mut table_offset = locators_offset + locator_data.len() as u64;
    if kind == DiskKind::Differencing {
        // Room for a second header with its locators: see `relink.rs`.
        table_offset += table_offset - header_offset;
    }
    let table_offset = table_offset.next_multiple_of(PAGE_BYTES);
    let table_end = (table_offset + count * 4).next_multiple_of(SECTOR_BYTES);
    let first_piece = table_end.next_multiple_of(PAGE_BYTES);

    let header = DynamicHeader {
        table_offset,
        max_table_entries: count as u32,
        block_bytes,
        parent_id: parent.linkage.map_or(Uuid::nil(), LinkageId::to_uuid),
        parent_modified_seconds: parent.modified_seconds.unwrap_or(0),
        parent_name: link::name(parent),
        locators,
    };
    let footer = new_footer(options, kind, header_offset).to_bytes();
    write(store, &header.to_bytes(), header_offset, "write the dynamic disk header")?;
    write(store, &locator_data, locators_offset, "write the parent locators")?;
    let unused = vec![BAT_UNUSED.to_be_bytes()[0]; TABLE_STEP_BYTES.min((table_end - table_offset) as usize)];
    let mut at = table_offset;
    while at < table_end {
        let len = unused.len().min((table_end - at) as usize);
        write(store, &unused[..len], at, "write the block allocation table")?;
        at += len as u64;
    }
    let mut footer_offset = table_end;
    if options.preallocate {
        let piece_bytes = bitmap_bytes(block_bytes).next_multiple_of(PAGE_BYTES) + u64::from(block_bytes);
        let len_bytes = count * piece_bytes;
        store
            .allocate(FileRange { offset_bytes: first_piece, len_bytes })
            .map_err(|e| ImageError::io("reserve space for the blocks", store, first_piece, e))?;
        footer_offset = first_piece + len_bytes;
    }
    sync(store)?;
    write(store, &footer, 0, "write the copy of the footer")?;
    write(store, &footer, footer_offset, "write the footer")?;
    sync(store)
}

fn write(store: &dyn Store, bytes: &[u8], offset_bytes: u64, doing: &'static str) -> Result<()> {
    store.write_at(bytes, offset_bytes).map_err(|e| ImageError::io(doing, store, offset_bytes, e))
}

fn sync(store: &dyn Store) -> Result<()> {
    store.sync_data().map_err(|e| ImageError::io("make the new image durable", store, 0, e))
}
