//! What can still be known of a damaged VDI.
//!
//! ```text
//!   header at 0 ─▶ sizes, kind, places of map and data
//!      damaged: each field that is valid, the user's sizes, the usual places ─▶ the one layout
//!               that the map proves; without one no entry is believed
//!   map entry by entry ─▶ a space that is inside the file and that no other block claims
//! ```
//!
//! A VDI has no second header, and its map has no signature. A map proves a layout if all its
//! entries are valid, no two of them name one space, and the spaces reach exactly to the end of the
//! file. Of several layouts that are proved none is believed.
//!
//! Without a map the blocks that their own contents place are all that is left.

use super::layout::{SECTOR_BYTES, link_of};
use crate::{
    Format, ImageError, ImageInfo, LinkageId, Result,
    salvage::{
        Bitmaps, BlockTable, Fault, ParentRecord, SalvageHints, Salvaged, SalvagedBlock, each_entry, file_length,
        overlapping, read_what_can_be,
    },
};
use diskwright_format::vdi::{BLOCK_MAX_BYTES, BLOCK_MIN_BYTES, HEADER_BYTES, VdiEntry, VdiHeader, VdiKind};
use diskwright_store::Store;
use std::{collections::HashSet, sync::Arc};
use uuid::Uuid;

/// Most blocks of a disk.
const BLOCKS_MAX: u64 = 1 << 26;
/// Where QEMU puts the block map, and where VirtualBox does.
const MAP_PLACES: [u32; 2] = [512, 1 << 20];
/// To what the start of the data is rounded up: by QEMU, other programs, VirtualBox.
const DATA_ALIGNMENTS: [u64; 3] = [512, 4096, 1 << 20];

/// Reads what can still be known of a damaged VDI.
pub(crate) fn salvage(store: Arc<dyn Store>, hints: &SalvageHints) -> Result<Salvaged> {
    let file_bytes = file_length(&*store)?;
    let mut sector = [0; HEADER_BYTES];
    let is_read = read_what_can_be(&*store, 0, &mut sector).is_empty();
    let mut remarks = Vec::new();
    let sound = VdiHeader::parse(&sector).ok().filter(|header| {
        let map_end = u64::from(header.map_offset_bytes) + header.map_bytes();
        is_read && header.size_bytes > 0 && map_end <= u64::from(header.data_offset_bytes)
    });
    if let Some(VdiHeader { kind: VdiKind::Undo, .. }) = &sound {
        return Err(ImageError::Unsupported {
            path: store.name().to_owned(),
            what: "a VDI undo image".into(),
            hint: "merge it with VirtualBox".into(),
        });
    }
    let (found, parent_record, has_map) = match sound {
        Some(header) if header.kind == VdiKind::Differencing => (header, ParentRecord::Child, true),
        Some(header) => (header, ParentRecord::Alone, true),
        None => {
            remarks.push("The header is damaged.".to_owned());
            let fields = Fields { store: &*store, sector: &sector, file_bytes };
            let (header, has_map) = fields.layout(hints, &mut remarks)?;
            (header, fields.parent_record(hints), has_map)
        }
    };
    let size_bytes = found.size_bytes.checked_next_multiple_of(SECTOR_BYTES).unwrap_or(u64::MAX - 511);
    let count = size_bytes.div_ceil(found.block_bytes.into());
    if count > BLOCKS_MAX {
        return Err(ImageError::Unsupported {
            path: store.name().to_owned(),
            what: format!("rescuing a disk of {count} blocks of {} bytes", found.block_bytes),
            hint: format!("at most {BLOCKS_MAX} blocks are; if its tables are sound, convert it"),
        });
    }
    let mut table = BlockTable::new(count, found.block_bytes.into());
    let mut doubts = Vec::new();
    let mut tables = Vec::from_iter(Some(0..HEADER_BYTES as u64));
    let mut alignment = SECTOR_BYTES;
    if has_map {
        read_map(&*store, &found, file_bytes, &mut table)?;
        let map = u64::from(found.map_offset_bytes);
        tables.push(map..(map + found.map_bytes()).min(file_bytes));
        tables.retain(|range| range.start < range.end);
        let places = found.payload_offset_bytes(0) | found.space_bytes();
        alignment = 1 << places.trailing_zeros().min(BLOCK_MAX_BYTES.trailing_zeros());
    } else {
        remarks.push("The block map was not found.".into());
        doubts.push("the block map was not found".to_owned());
        table.lose(&*store, 0, count, Fault::NoTable)?;
    }
    let parent = link_of(&found).filter(|_| parent_record == ParentRecord::Child);
    let has_ids = !found.id.is_nil();
    let info = ImageInfo {
        creator: found.creator,
        disk_id: has_ids.then_some(found.id),
        linkage_id: has_ids.then_some(LinkageId::Guid(found.modify_id)),
        parent,
        remarks,
        ..ImageInfo::new(Format::Vdi, parent_record.disk_type(), size_bytes, found.block_bytes.into())
    };
    Ok(Salvaged {
        info,
        store,
        file_bytes,
        parent_record,
        table,
        bitmaps: Bitmaps::None,
        unpack: None,
        tables,
        payload_alignment_bytes: alignment,
        doubts,
        doubts_bitmaps: false,
    })
}

/// Reads all entries. Those behind the end of the disk have spaces of their own too.
fn read_map(store: &dyn Store, header: &VdiHeader, file_bytes: u64, table: &mut BlockTable) -> Result<()> {
    let entries = u64::from(header.blocks);
    let mut pieces = Vec::new();
    let mut sector = Vec::new();
    let there = each_entry(store, header.map_offset_bytes.into(), (entries, 4), &mut |block, raw| {
        let word = raw.map(|raw| u32::from_le_bytes(raw.try_into().unwrap_or([0xff; 4])));
        sector.push((block, word.map(VdiEntry::parse)));
        if sector.len() as u64 * 4 == SECTOR_BYTES || block + 1 == entries {
            take_sector(store, header, file_bytes, &mut sector, (table, &mut pieces))?;
        }
        Ok(())
    })?;
    take_sector(store, header, file_bytes, &mut sector, (table, &mut pieces))?;
    table.lose(store, there, entries, Fault::Unreadable)?;
    for block in overlapping(&mut pieces) {
        table.lose_held(store, block, Fault::Claimed)?;
    }
    Ok(())
}

/// Takes the entries of a sector of the map. A file has no more spaces than its map has entries or
/// its header counts: a sector with mostly higher numbers is not part of a map.
fn take_sector(
    store: &dyn Store,
    header: &VdiHeader,
    file_bytes: u64,
    sector: &mut Vec<(u64, Option<VdiEntry>)>,
    (table, pieces): (&mut BlockTable, &mut Vec<(u64, u64, u64)>),
) -> Result<()> {
    let most = header.blocks.max(header.blocks_allocated);
    let spaces = sector.iter().filter_map(|(_, entry)| match entry {
        Some(VdiEntry::Space(space)) => Some(*space),
        _ => None,
    });
    let (used, malformed) =
        spaces.fold((0, 0), |(used, malformed), space| (used + 1, malformed + u64::from(space >= most)));
    let count = table.count();
    for (block, entry) in sector.drain(..) {
        match entry {
            None => table.lose(store, block, block + 1, Fault::Unreadable)?,
            _ if malformed * 2 > used => table.lose(store, block, block + 1, Fault::Undefined)?,
            Some(VdiEntry::Zero) if block < count => table.hold(store, block, SalvagedBlock::Zero)?,
            Some(VdiEntry::Free | VdiEntry::Zero) => {}
            Some(VdiEntry::Space(space)) => {
                let at = header.payload_offset_bytes(space);
                if at >= file_bytes {
                    table.lose(store, block, block + 1, Fault::BeyondEnd)?;
                    continue;
                }
                pieces.push((block, at, at + header.space_bytes()));
                if block < count {
                    table.hold(store, block, SalvagedBlock::Data(at))?;
                }
            }
        }
    }
    Ok(())
}

/// What a damaged header may still say.
struct Fields<'a> {
    store: &'a dyn Store,
    sector: &'a [u8; HEADER_BYTES],
    file_bytes: u64,
}

impl Fields<'_> {
    fn u32_at(&self, at: usize) -> u32 {
        u32::from_le_bytes([self.sector[at], self.sector[at + 1], self.sector[at + 2], self.sector[at + 3]])
    }

    fn u64_at(&self, at: usize) -> u64 {
        u64::from(self.u32_at(at)) | u64::from(self.u32_at(at + 4)) << 32
    }

    fn uuid_at(&self, at: usize) -> Uuid {
        Uuid::from_slice_le(&self.sector[at..at + 16]).unwrap_or_default()
    }

    /// Kind and parent, if they agree.
    fn parent_record(&self, hints: &SalvageHints) -> ParentRecord {
        match (self.u32_at(0x4c), self.uuid_at(0x1a8).is_nil()) {
            (4, false) => ParentRecord::Child,
            (1 | 2, true) => ParentRecord::Alone,
            _ => ParentRecord::by_hints(hints),
        }
    }

    /// The header that the map proves, or one with sizes only.
    fn layout(&self, hints: &SalvageHints, remarks: &mut Vec<String>) -> Result<(VdiHeader, bool)> {
        let is_block = |bytes: &u32| bytes.is_power_of_two() && (BLOCK_MIN_BYTES..=BLOCK_MAX_BYTES).contains(bytes);
        let block = Some(self.u32_at(0x178)).filter(is_block).or(hints.block_bytes.filter(is_block));
        let missing = |what: &str, expected: &str| ImageError::NotAnImage {
            path: self.store.name().to_owned(),
            found: format!("the {what} is lost with the header"),
            expected: expected.into(),
        };
        let block_bytes = block.ok_or_else(|| {
            missing("size of its blocks", "it to be named with `RescueOptions::block_bytes` (usually 1 MiB)")
        })?;
        // Two fields of the header say how large the disk is.
        let blocks_of = |size: u64| size.div_ceil(block_bytes.into());
        let own = Some(self.u64_at(0x170)).filter(|&size| size > 0 && blocks_of(size) == self.u32_at(0x180).into());
        let size_bytes = own.or(hints.size_bytes).filter(|&size| size > 0 && blocks_of(size) <= BLOCKS_MAX);
        let size_bytes =
            size_bytes.ok_or_else(|| missing("size of the disk", "it to be named with `RescueOptions::size_bytes`"))?;
        let blocks = blocks_of(size_bytes) as u32;
        let mut base = VdiHeader {
            kind: VdiKind::Dynamic,
            comment: String::new(),
            creator: String::new(),
            map_offset_bytes: 0,
            data_offset_bytes: 0,
            size_bytes,
            block_bytes,
            extra_bytes: 0,
            blocks,
            blocks_allocated: 0,
            id: self.uuid_at(0x188),
            modify_id: self.uuid_at(0x198),
            parent_id: self.uuid_at(0x1a8),
            parent_modify_id: self.uuid_at(0x1b8),
            second_parent_modify_id: None,
        };
        if self.parent_record(hints) == ParentRecord::Child {
            base.kind = VdiKind::Differencing;
        }
        let own_map = Some(self.u32_at(0x154)).filter(|at| at.is_multiple_of(512) && *at >= HEADER_BYTES as u32);
        let mut proved: Vec<VdiHeader> = Vec::new();
        for map in MAP_PLACES.into_iter().chain(own_map) {
            let map_end = u64::from(map) + u64::from(blocks) * 4;
            let rounded = DATA_ALIGNMENTS.into_iter().map(|alignment| map_end.next_multiple_of(alignment));
            let own_data = Some(u64::from(self.u32_at(0x158))).filter(|&at| at.is_multiple_of(512) && at >= map_end);
            for data in rounded.chain(own_data) {
                let Ok(data_offset_bytes) = u32::try_from(data) else { continue };
                let header = VdiHeader { map_offset_bytes: map, data_offset_bytes, ..base.clone() };
                if !proved.contains(&header) && self.proves(&header)? {
                    proved.push(header);
                }
            }
        }
        match (proved.len(), proved.pop()) {
            (1, Some(header)) => {
                remarks.push(format!(
                    "The block map was found by its contents, at {}, and the data at {}.",
                    header.map_offset_bytes, header.data_offset_bytes
                ));
                Ok((header, true))
            }
            _ => Ok((base, false)),
        }
    }

    /// Whether the map of a layout proves it: see the module.
    fn proves(&self, header: &VdiHeader) -> Result<bool> {
        let entries = u64::from(header.blocks);
        let data_bytes = self.file_bytes.saturating_sub(header.data_offset_bytes.into());
        let spaces = data_bytes / header.space_bytes();
        if spaces == 0 || !data_bytes.is_multiple_of(header.space_bytes()) {
            return Ok(false);
        }
        let (mut seen, mut is_valid, mut highest) = (HashSet::new(), true, 0);
        let there = each_entry(self.store, header.map_offset_bytes.into(), (entries, 4), &mut |_, raw| {
            let entry = raw.map(|raw| VdiEntry::parse(u32::from_le_bytes(raw.try_into().unwrap_or_default())));
            match entry {
                Some(VdiEntry::Free | VdiEntry::Zero) => {}
                Some(VdiEntry::Space(space)) if is_valid => {
                    is_valid = u64::from(space) < spaces && seen.insert(space);
                    highest = highest.max(u64::from(space) + 1);
                }
                _ => is_valid = false,
            }
            Ok(())
        })?;
        Ok(is_valid && there == entries && highest == spaces)
    }
}
