//! Creates a VHDX.
//!
//! ```text
//!   0         1 MiB     2 MiB      3 MiB              from the next MiB on
//!   identifier│ log     │ metadata │ BAT (whole MiB) │ payload
//!   headers,  │ 1 MiB   │ 1 MiB    │                 │
//!   regions   │         │          │                 │
//! ```
//!
//! A fixed disk has all its blocks one after the other, as holes unless `preallocate`. Other disks
//! have no block; with `preallocate` the file has room for all blocks.
//!
//! The file identifier is written last, after everything else is durable. So a file whose creation
//! was interrupted is not recognised as a VHDX.

use super::link;
use crate::{
    CreateOptions, DiskType,
    error::{ImageError, Result},
};
use diskwright_format::vhdx::{
    BITMAP_BLOCK_BYTES, BatEntry, BatGeometry, FileIdentifier, FileParameters, Header, MIB, MetadataEntry,
    MetadataTable, PayloadState, Region, RegionTable, Slot,
    bat::{BAT_ENTRY_BYTES, EntryKind},
    metadata,
    region::{BAT_REGION, METADATA_REGION, REGION_TABLE_OFFSETS},
};
use diskwright_store::{FileRange, Store};
use std::sync::Arc;
use uuid::Uuid;

const DEFAULT_BLOCK_BYTES: u32 = 2 << 20;
const LOG_OFFSET_BYTES: u64 = MIB;
const METADATA_OFFSET_BYTES: u64 = 2 * MIB;
const BAT_OFFSET_BYTES: u64 = 3 * MIB;
/// Bytes of a fixed disk's BAT written by one call.
const WRITE_BYTES: usize = 64 << 10;

/// Creates a VHDX in `store` and replaces what the store held. Durable on return.
///
/// # Errors
/// `BadOptions` for sizes that MS-VHDX does not allow (virtual size: a multiple of the logical
/// sector up to 64 TiB; block: a power of two from 1 to 256 MiB; sectors: 512 or 4096 bytes), for a
/// parent of a disk that is not differencing, and for a differencing disk without a parent; `Io`.
pub fn create(store: Arc<dyn Store>, options: &CreateOptions) -> Result<()> {
    let store = &*store;
    let plan = Plan::new(store, options)?;
    let io = |doing, offset_bytes| move |error| ImageError::io(doing, store, offset_bytes, error);
    let write = |bytes: &[u8], offset_bytes| {
        store.write_at(bytes, offset_bytes).map_err(io("write a new disk's tables", offset_bytes))
    };
    store.set_len(0).map_err(io("empty the file", 0))?;
    store.set_len(plan.payload_offset_bytes).map_err(io("allocate space for the tables", 0))?;
    if plan.reserved_bytes > 0 {
        let range = FileRange { offset_bytes: plan.payload_offset_bytes, len_bytes: plan.reserved_bytes };
        let end_bytes = range.offset_bytes + range.len_bytes;
        let made = if options.preallocate { store.allocate(range) } else { store.set_len(end_bytes) };
        made.map_err(io("allocate space for all blocks", plan.payload_offset_bytes))?;
    }
    if options.disk_type == DiskType::Fixed {
        write_fixed_bat(store, &plan)?;
    }
    for (bytes, offset_bytes) in plan.metadata()? {
        write(&bytes, METADATA_OFFSET_BYTES + offset_bytes)?;
    }
    let regions = plan.regions().to_bytes();
    for offset_bytes in REGION_TABLE_OFFSETS {
        write(&regions, offset_bytes)?;
    }
    let mut header = Header {
        sequence_number: 0,
        file_write_guid: Uuid::new_v4(),
        data_write_guid: Uuid::new_v4(),
        log_guid: Uuid::nil(),
        log_version: 0,
        version: 1,
        log_len_bytes: MIB as u32,
        log_offset_bytes: LOG_OFFSET_BYTES,
    };
    for slot in [Slot::First, Slot::Second] {
        write(&header.to_bytes(), slot.offset_bytes())?;
        header.sequence_number += 1;
    }
    store.sync_data().map_err(io("make the new disk durable", 0))?;
    let creator = concat!("diskwright ", env!("CARGO_PKG_VERSION")).to_owned();
    write(&FileIdentifier { creator }.to_bytes(), 0)?;
    store.sync_data().map_err(io("make the new disk durable", 0))
}

/// Validated options and the layout that follows from them.
struct Plan<'a> {
    store: &'a dyn Store,
    options: &'a CreateOptions,
    parameters: FileParameters,
    geometry: BatGeometry,
    locator: Option<Vec<u8>>,
    bat_bytes: u64,
    payload_offset_bytes: u64,
    /// Bytes after the tables that the file has from the start. Space for them is allocated only
    /// with `preallocate`.
    reserved_bytes: u64,
}

impl<'a> Plan<'a> {
    fn new(store: &'a dyn Store, options: &'a CreateOptions) -> Result<Self> {
        let bad = |what: String, hint: &str| ImageError::BadOptions {
            path: store.name().to_owned(),
            what,
            hint: hint.into(),
        };
        let has_parent = options.disk_type == DiskType::Differencing;
        let parameters = FileParameters {
            block_bytes: options.block_bytes.unwrap_or(DEFAULT_BLOCK_BYTES),
            leave_blocks_allocated: options.disk_type == DiskType::Fixed,
            has_parent,
        };
        let geometry = BatGeometry::new(options.size_bytes, parameters.block_bytes, options.logical_sector_bytes)
            .map_err(|invalid| {
                bad(
                    format!("the {} cannot be {}", invalid.structure, invalid.found),
                    &format!("it must be {}", invalid.expected),
                )
            })?;
        let physical = options.physical_sector_bytes;
        if (physical != 512 && physical != 4096) || physical < options.logical_sector_bytes {
            return Err(bad(
                format!("the physical sector cannot be {physical} bytes"),
                "it must be 512 or 4096 and not below the logical sector",
            ));
        }
        let locator = match (&options.parent, has_parent) {
            (Some(parent), true) => Some(link::encode(parent).map_err(|(what, hint)| bad(what, hint))?),
            (None, false) => None,
            (None, true) => {
                return Err(bad("a differencing disk needs a parent".into(), "name one, or make a dynamic disk"));
            }
            (Some(_), false) => {
                return Err(bad(format!("a {} disk has no parent", options.disk_type), "make a differencing disk"));
            }
        };
        let bat_bytes = (geometry.entries(has_parent) * BAT_ENTRY_BYTES).next_multiple_of(MIB);
        let reserve = options.preallocate || options.disk_type == DiskType::Fixed;
        let bitmap_bytes = if has_parent { geometry.chunks() * BITMAP_BLOCK_BYTES } else { 0 };
        let all_bytes = geometry.payload_blocks() * geometry.block_bytes() + bitmap_bytes;
        Ok(Self {
            store,
            options,
            parameters,
            geometry,
            locator,
            bat_bytes,
            payload_offset_bytes: BAT_OFFSET_BYTES + bat_bytes,
            reserved_bytes: if reserve { all_bytes } else { 0 },
        })
    }

    fn regions(&self) -> RegionTable {
        let region =
            |id, offset_bytes, len_bytes: u64| Region { id, offset_bytes, len_bytes: len_bytes as u32, required: true };
        RegionTable {
            regions: vec![
                region(BAT_REGION, BAT_OFFSET_BYTES, self.bat_bytes),
                region(METADATA_REGION, METADATA_OFFSET_BYTES, MIB),
            ],
        }
    }

    /// The metadata items and table, each with its offset in the metadata region.
    fn metadata(&self) -> Result<Vec<(Vec<u8>, u64)>> {
        let disk_id = self.options.disk_id.unwrap_or_else(Uuid::new_v4);
        let mut items = vec![
            (metadata::FILE_PARAMETERS, false, self.parameters.to_bytes()),
            (metadata::VIRTUAL_DISK_SIZE, true, self.options.size_bytes.to_le_bytes().to_vec()),
            (metadata::VIRTUAL_DISK_ID, true, disk_id.to_bytes_le().to_vec()),
            (metadata::LOGICAL_SECTOR_SIZE, true, self.options.logical_sector_bytes.to_le_bytes().to_vec()),
            (metadata::PHYSICAL_SECTOR_SIZE, true, self.options.physical_sector_bytes.to_le_bytes().to_vec()),
        ];
        items.extend(self.locator.clone().map(|bytes| (metadata::PARENT_LOCATOR, false, bytes)));
        let mut entries = Vec::new();
        let mut written = Vec::new();
        let mut offset_bytes = metadata::METADATA_TABLE_BYTES as u64;
        for (id, is_virtual_disk, bytes) in items {
            let len_bytes = bytes.len() as u64;
            if offset_bytes + len_bytes > MIB {
                return Err(ImageError::BadOptions {
                    path: self.store.name().to_owned(),
                    what: "the parent's paths are too long".into(),
                    hint: "move the parent to a shorter path".into(),
                });
            }
            entries.push(MetadataEntry {
                id,
                offset_bytes: offset_bytes as u32,
                len_bytes: len_bytes as u32,
                is_user: false,
                is_virtual_disk,
                is_required: true,
            });
            written.push((bytes, offset_bytes));
            offset_bytes = (offset_bytes + len_bytes).next_multiple_of(8);
        }
        written.push((MetadataTable { entries }.to_bytes(), 0));
        Ok(written)
    }
}

/// Writes the BAT of a fixed disk: every block is present, in order.
fn write_fixed_bat(store: &dyn Store, plan: &Plan<'_>) -> Result<()> {
    let entries = plan.geometry.entries(false);
    let per_write = WRITE_BYTES as u64 / BAT_ENTRY_BYTES;
    let mut bytes = Vec::with_capacity(WRITE_BYTES);
    for first in (0..entries).step_by(per_write as usize) {
        bytes.clear();
        for index in first..entries.min(first + per_write) {
            let entry = match plan.geometry.what_is(index) {
                EntryKind::Bitmap { .. } => BatEntry::default(),
                EntryKind::Payload { block } => BatEntry::payload(
                    PayloadState::FullyPresent,
                    plan.payload_offset_bytes + block * plan.geometry.block_bytes(),
                ),
            };
            bytes.extend_from_slice(&entry.to_le_bytes());
        }
        let offset_bytes = BAT_OFFSET_BYTES + first * BAT_ENTRY_BYTES;
        store
            .write_at(&bytes, offset_bytes)
            .map_err(|error| ImageError::io("write the block allocation table", store, offset_bytes, error))?;
    }
    Ok(())
}
