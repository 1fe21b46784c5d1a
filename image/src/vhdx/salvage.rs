//! What can still be known of a damaged VHDX.
//!
//! ```text
//!   either header ─▶ log: replayed in memory if it is valid, else left out (entries are doubted)
//!   either region table ─▶ metadata, BAT       both lost: the metadata by its signature,
//!        │                                     the BAT by its contents, if only one place fits
//!        ▼
//!   each metadata item for itself               lost: sector sizes by default, others by the user
//!   BAT entry by entry ─▶ a place that is inside the file and that no other block claims
//! ```
//!
//! Whether the image has a parent is recorded in the metadata: in the file parameters, and by a
//! parent locator. If both are lost, a block that is partially present or a sector bitmap block in
//! the BAT says that it has one. Nothing says that it has none, except the user.
//!
//! The BAT has no signature. It is found by its contents only if exactly one region of the file
//! reads as a table from its first entry to its last, with zeros behind, and names space. Places
//! overlap, so the search reads at most [`SEARCH_PASSES`] times what the file stores.

use super::{
    link,
    log::Ring,
    open::{Items, check_log_place, read_metadata_table, replay_in_memory},
};
use crate::{
    DiskType, Format, ImageError, ImageInfo, LinkageId, LogState, ParentLink, Result,
    salvage::{
        Bitmaps, BlockTable, Fault, HELD_MAX, ParentRecord, SalvageHints, Salvaged, SalvagedBlock, file_length, joined,
        overlapping, overlaps_one, read_what_can_be,
    },
};
use diskwright_format::vhdx::{
    BITMAP_BLOCK_BYTES, BatEntry, BatGeometry, BitmapState, FileIdentifier, FileParameters, Header, MIB, MetadataTable,
    ParentLocator, PayloadState, Region, RegionTable, Slot,
    bat::BAT_ENTRY_BYTES,
    file_id,
    header::HEADER_BYTES,
    metadata,
    region::{BAT_REGION, METADATA_REGION, REGION_TABLE_BYTES, REGION_TABLE_OFFSETS},
};
use diskwright_store::{FileRange, Store, all_zero};
use std::{collections::BTreeMap, ops::Range, sync::Arc};

/// Places at multiples of 1 MiB at which lost regions are looked for.
const SEARCH_PLACES: u64 = 4096;
/// How often the search may read what the file stores.
const SEARCH_PASSES: u64 = 4;
/// Entries read by one call.
const ENTRIES: usize = 8192;

/// Reads what can still be known of a damaged VHDX.
pub(crate) fn salvage(store: Arc<dyn Store>, hints: &SalvageHints) -> Result<Salvaged> {
    let held_bytes = file_length(&*store)?;
    let mut remarks = Vec::new();
    let mut doubts = Vec::new();
    let creator = bytes_of(&*store, 0, file_id::FILE_ID_BYTES)
        .and_then(|bytes| FileIdentifier::parse(&bytes).ok())
        .map(|id| id.creator);
    if creator.is_none() {
        remarks.push("The file identifier is damaged.".into());
    }
    let header = header(&*store, &mut remarks);
    let (store, log) = match &header {
        Some(header) => replayed(store, header, &mut remarks, &mut doubts),
        None => {
            let what = "no header is valid, so changes that only the log holds are lost";
            remarks.push("Neither header is valid: changes that only the log holds are lost.".into());
            doubts.push(what.into());
            (store, LogState::Clean)
        }
    };
    // A replay may have made the file longer; those bytes read as zeros.
    let file_bytes = file_length(&*store)?.max(held_bytes);
    let regions = regions(&*store, file_bytes, &mut remarks);
    let mut facts = SalvagedMetadata::read(&*store, regions.metadata.as_ref(), hints, &mut remarks)?;
    let geometry = facts.geometry;
    let count = geometry.payload_blocks();
    let mut tables = regions.taken.clone();
    let log_place = header.as_ref().filter(|header| check_log_place(&*store, header).is_ok());
    tables.extend(
        log_place.map(|header| header.log_offset_bytes..header.log_offset_bytes + u64::from(header.log_len_bytes)),
    );
    tables.push(0..MIB);
    tables = joined(tables);
    let may_have_parent = facts.parent_record.may_have_parent();
    let mut entries = Entries { store: &*store, geometry, has_parent: may_have_parent, file_bytes, tables: &tables };
    let bat_bytes = match regions.bat {
        Some(region) => Some(region.offset_bytes),
        None => entries.search(&mut remarks),
    };
    if facts.is_by_hints {
        entries.has_parent = true;
        if bat_bytes.is_some_and(|bat_bytes| entries.name_a_parent(bat_bytes)) {
            facts.parent_record = ParentRecord::Child;
        }
        entries.has_parent = facts.parent_record.may_have_parent();
    }
    let has_parent = entries.has_parent;
    let mut table = BlockTable::new(count, geometry.block_bytes());
    let mut places = BTreeMap::new();
    let kept = match bat_bytes {
        Some(bat_bytes) => entries.read(bat_bytes, &mut table, &mut places)?,
        None => {
            remarks.push("The block allocation table was not found.".into());
            doubts.push("the block allocation table was not found".into());
            table.lose(&*store, 0, count, Fault::NoTable)?;
            // Which chunks have a bitmap block is not known either.
            places.extend((0..if has_parent { geometry.chunks() } else { 0 }).map(|chunk| (chunk, None)));
            Vec::new()
        }
    };
    tables.extend(kept);
    if regions.bat.is_none()
        && let Some(at) = bat_bytes
    {
        let end = at + (geometry.entries(has_parent) * BAT_ENTRY_BYTES).next_multiple_of(MIB);
        tables.push(at..end.min(file_bytes));
    }
    let tables = joined(tables);
    let disk_type = if has_parent { DiskType::Differencing } else { DiskType::Dynamic };
    let info = ImageInfo {
        logical_sector_bytes: geometry.logical_sector_bytes(),
        physical_sector_bytes: facts.physical_sector_bytes,
        creator: creator.unwrap_or_default(),
        disk_id: facts.disk_id,
        linkage_id: header.as_ref().map(|header| LinkageId::from_uuid(header.data_write_guid)),
        file_write_id: header.as_ref().map(|header| header.file_write_guid),
        parent: facts.parent.filter(|_| has_parent),
        log,
        payload_alignment_bytes: MIB as u32,
        remarks,
        ..ImageInfo::new(Format::Vhdx, disk_type, geometry.size_bytes(), geometry.block_bytes())
    };
    let bitmaps = if has_parent { Bitmaps::Chunks { geometry, places } } else { Bitmaps::None };
    Ok(Salvaged {
        info,
        store,
        file_bytes,
        parent_record: facts.parent_record,
        table,
        bitmaps,
        unpack: None,
        tables,
        payload_alignment_bytes: MIB,
        doubts,
        doubts_bitmaps: false,
    })
}

/// The bytes, if all of them can be read.
fn bytes_of(store: &dyn Store, offset_bytes: u64, len: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; len];
    read_what_can_be(store, offset_bytes, &mut bytes).is_empty().then_some(bytes)
}

/// The current header. Of two different ones with the same number the first is taken.
fn header(store: &dyn Store, remarks: &mut Vec<String>) -> Option<Header> {
    let read = |slot: Slot| {
        let bytes = bytes_of(store, slot.offset_bytes(), HEADER_BYTES)?;
        Header::parse(&bytes).ok().filter(|header| header.validate().is_ok())
    };
    let (first, second) = (read(Slot::First), read(Slot::Second));
    if first.is_some() != second.is_some() {
        remarks.push("One of the two headers is not valid; the other is used.".into());
    }
    match (first, second) {
        (Some(a), Some(b)) if b.sequence_number > a.sequence_number => Some(b),
        (Some(a), _) => Some(a),
        (None, b) => b,
    }
}

/// The file after its log. A log that is not valid is left out.
fn replayed(
    store: Arc<dyn Store>,
    header: &Header,
    remarks: &mut Vec<String>,
    doubts: &mut Vec<String>,
) -> (Arc<dyn Store>, LogState) {
    if header.log_guid.is_nil() {
        return (store, LogState::Clean);
    }
    let place = FileRange { offset_bytes: header.log_offset_bytes, len_bytes: u64::from(header.log_len_bytes) };
    let ring = Ring { store: &*store, place };
    let replay = check_log_place(&*store, header).map_err(|invalid| invalid.to_string()).and_then(|()| {
        let sequence = ring.find(header.log_guid).map_err(|error| error.to_string())?;
        let entries = sequence.len();
        replay_in_memory(&store, &ring, &sequence).map(|store| (store, entries)).map_err(|error| error.to_string())
    });
    match replay {
        Ok((replayed, entries)) => (replayed, LogState::Replayed { entries }),
        Err(why) => {
            remarks.push(format!("The log cannot be replayed, so its changes are lost ({why})."));
            doubts.push("the log, whose changes are lost, may have held newer table entries".into());
            (store, LogState::Clean)
        }
    }
}

/// The regions that were found.
struct Regions {
    metadata: Option<Region>,
    bat: Option<Region>,
    /// All regions, for what payload must not overlap.
    taken: Vec<Range<u64>>,
}

fn regions(store: &dyn Store, file_bytes: u64, remarks: &mut Vec<String>) -> Regions {
    let table = REGION_TABLE_OFFSETS.into_iter().find_map(|offset_bytes| {
        let found = bytes_of(store, offset_bytes, REGION_TABLE_BYTES).and_then(|bytes| RegionTable::parse(&bytes).ok());
        if found.is_none() {
            remarks.push(format!("The region table at {offset_bytes} is not valid."));
        }
        found
    });
    if let Some(table) = table {
        return Regions {
            metadata: table.find(METADATA_REGION).copied(),
            bat: table.find(BAT_REGION).copied(),
            taken: table.regions.iter().map(|region| region.offset_bytes..region.end_bytes()).collect(),
        };
    }
    let mut found = (1..SEARCH_PLACES).map(|index| index * MIB).take_while(|&at| at < file_bytes).filter_map(|at| {
        let region = Region { id: METADATA_REGION, offset_bytes: at, len_bytes: MIB as u32, required: true };
        let bytes = bytes_of(store, at, 8).filter(|bytes| bytes == b"metadata")?;
        drop(bytes);
        let table = read_metadata_table(store, &region).ok()?;
        table.find(metadata::FILE_PARAMETERS).map(|_| region)
    });
    // A VHDX that a guest has stored in its disk may hold another one, behind the true one.
    let metadata = found.next();
    if let Some(region) = &metadata {
        remarks.push(format!("Both region tables are lost; a metadata region was found at {}.", region.offset_bytes));
    }
    let taken = metadata.iter().map(|region| region.offset_bytes..region.end_bytes()).collect();
    Regions { metadata, bat: None, taken }
}

/// What the metadata say, or the user.
struct SalvagedMetadata {
    geometry: BatGeometry,
    parent_record: ParentRecord,
    /// Whether the file's own records of its kinship are lost.
    is_by_hints: bool,
    parent: Option<ParentLink>,
    physical_sector_bytes: u32,
    disk_id: Option<uuid::Uuid>,
}

impl SalvagedMetadata {
    fn read(
        store: &dyn Store,
        region: Option<&Region>,
        hints: &SalvageHints,
        remarks: &mut Vec<String>,
    ) -> Result<Self> {
        let table = region.and_then(|region| read_metadata_table(store, region).ok());
        if table.is_none() {
            remarks.push("The metadata table is damaged.".into());
        }
        let none = MetadataTable { entries: Vec::new() };
        let whole = Region { id: METADATA_REGION, offset_bytes: 0, len_bytes: MIB as u32, required: true };
        let items = Items { store, region: region.copied().unwrap_or(whole), table: table.as_ref().unwrap_or(&none) };
        let parameters = items.parse(metadata::FILE_PARAMETERS, "file parameters", FileParameters::parse).ok();
        let size = items.parse(metadata::VIRTUAL_DISK_SIZE, "virtual disk size", |bytes| {
            metadata::parse_u64("virtual disk size", bytes)
        });
        let mut sector = |id, name: &'static str, usual: u32| {
            let found = items.parse(id, name, |bytes| metadata::parse_u32(name, bytes)).ok();
            let found = found.filter(|bytes| matches!(bytes, 512 | 4096));
            if found.is_none() {
                remarks.push(format!("The {name} is lost; {usual} bytes are assumed."));
            }
            found.unwrap_or(usual)
        };
        let logical = sector(metadata::LOGICAL_SECTOR_SIZE, "logical sector size", 512);
        let physical_sector_bytes = sector(metadata::PHYSICAL_SECTOR_SIZE, "physical sector size", 4096);
        let disk_id = items
            .parse(metadata::VIRTUAL_DISK_ID, "virtual disk id", |bytes| metadata::parse_guid("virtual disk id", bytes))
            .ok();
        let locator = items.parse(metadata::PARENT_LOCATOR, "parent locator", ParentLocator::parse).ok();
        let parent = locator.and_then(|locator| link::of_locator(&locator).ok());
        let missing = |what: &str, option: &str| ImageError::NotAnImage {
            path: store.name().to_owned(),
            found: format!("the {what} of the disk is lost with the file's metadata"),
            expected: format!("to be told with {option}"),
        };
        // A size that is not valid is as good as none.
        let fits = |size: u64, block: u32| BatGeometry::new(size, block, logical).ok();
        let block = parameters
            .map(|parameters| parameters.block_bytes)
            .filter(|&block| fits(4096, block).is_some())
            .or(hints.block_bytes)
            .ok_or_else(|| missing("block size", "`RescueOptions::block_bytes` (2 MiB and 32 MiB are usual)"))?;
        let size = size.ok().filter(|&size| fits(size, block).is_some()).or(hints.size_bytes);
        let size = size.ok_or_else(|| missing("size", "`RescueOptions::size_bytes`"))?;
        let geometry = BatGeometry::new(size, block, logical).map_err(|invalid| ImageError::NotAnImage {
            path: store.name().to_owned(),
            found: format!("{} {}", invalid.structure, invalid.found),
            expected: invalid.expected,
        })?;
        // Without its parameters a disk with a parent locator has a parent.
        let known = parameters.map(|parameters| parameters.has_parent).or(parent.is_some().then_some(true));
        let parent_record = match known {
            Some(true) => ParentRecord::Child,
            Some(false) => ParentRecord::Alone,
            None => ParentRecord::by_hints(hints),
        };
        Ok(Self { geometry, parent_record, is_by_hints: known.is_none(), parent, physical_sector_bytes, disk_id })
    }
}

/// What BAT entries are checked against.
struct Entries<'a> {
    store: &'a dyn Store,
    geometry: BatGeometry,
    has_parent: bool,
    file_bytes: u64,
    tables: &'a [Range<u64>],
}

impl Entries<'_> {
    /// The place of a table that no region names; `None` unless exactly one place fits.
    fn search(&self, remarks: &mut Vec<String>) -> Option<u64> {
        let entries = self.geometry.entries(self.has_parent);
        let len_bytes = entries.checked_mul(BAT_ENTRY_BYTES)?;
        let stored_bytes = self.store.allocated_bytes().unwrap_or(self.file_bytes).min(self.file_bytes);
        let mut budget_bytes = stored_bytes.saturating_mul(SEARCH_PASSES);
        let mut found = (1..SEARCH_PLACES)
            .map(|index| index * MIB)
            .take_while(|&at| at + len_bytes <= self.file_bytes)
            .filter(|&at| !overlaps_one(self.tables, &(at..at + len_bytes)))
            .filter(|&at| self.reads_as_table(at, entries, &mut budget_bytes));
        let at = found.next().filter(|_| found.next().is_none());
        if budget_bytes == 0 {
            remarks.push(format!(
                "The search for the block allocation table was given up after {SEARCH_PASSES} times what the file stores: too many places look like one."
            ));
            return None;
        }
        let at = at?;
        remarks.push(format!("The block allocation table was found by its contents, at {at}."));
        Some(at)
    }

    /// Whether all entries are valid, at least one names space, none names the table itself, and
    /// the rest of the region is empty. Takes what is read from the budget; without one, no.
    fn reads_as_table(&self, at: u64, entries: u64, budget_bytes: &mut u64) -> bool {
        let end = (at + (entries * BAT_ENTRY_BYTES).next_multiple_of(MIB)).min(self.file_bytes);
        let mut has_space = false;
        let mut bytes = vec![0; ENTRIES * BAT_ENTRY_BYTES as usize];
        let mut offset = at;
        while offset < end {
            // Holes are valid entries that name no space.
            match self.store.next_data(offset) {
                Ok(Some(data)) if data.offset_bytes < end => {
                    offset = offset.max(data.offset_bytes - data.offset_bytes % BAT_ENTRY_BYTES);
                }
                Ok(_) => break,
                Err(_) => return false,
            }
            let len = (end - offset).min(bytes.len() as u64) as usize;
            *budget_bytes = budget_bytes.saturating_sub(len as u64);
            let bytes = &mut bytes[..len];
            if *budget_bytes == 0 || self.store.read_at(bytes, offset).is_err() {
                return false;
            }
            let first = (offset - at) / BAT_ENTRY_BYTES;
            offset += len as u64;
            if all_zero(bytes) {
                continue;
            }
            for (index, raw) in (first..).zip(bytes.chunks_exact(8)) {
                let entry = BatEntry::from_le_bytes(raw.try_into().unwrap_or_default());
                if index >= entries {
                    if entry.0 != 0 {
                        return false;
                    }
                    continue;
                }
                match self.meaning(index, entry) {
                    Ok(Some((start, end_of))) => {
                        has_space = true;
                        if start < end && at < end_of {
                            return false;
                        }
                    }
                    Ok(None) => {}
                    Err(_) => return false,
                }
            }
        }
        has_space
    }

    /// Whether an entry is one that only a differencing image has: a block that is partially
    /// present, or a sector bitmap block.
    fn name_a_parent(&self, bat_bytes: u64) -> bool {
        use diskwright_format::vhdx::bat::EntryKind;
        let entries = self.geometry.entries(true);
        let mut bytes = vec![0; ENTRIES * BAT_ENTRY_BYTES as usize];
        let mut first = 0;
        while first < entries && bat_bytes.saturating_add(first * BAT_ENTRY_BYTES) < self.file_bytes {
            let count = (entries - first).min(ENTRIES as u64);
            let bytes = &mut bytes[..(count * BAT_ENTRY_BYTES) as usize];
            read_what_can_be(self.store, bat_bytes + first * BAT_ENTRY_BYTES, bytes);
            for (index, raw) in (first..).zip(bytes.chunks_exact(8)) {
                let entry = BatEntry::from_le_bytes(raw.try_into().unwrap_or_default());
                let is_childs = match self.geometry.what_is(index) {
                    EntryKind::Bitmap { .. } => true,
                    EntryKind::Payload { .. } => entry.payload_state() == Ok(PayloadState::PartiallyPresent),
                };
                if is_childs && matches!(self.meaning(index, entry), Ok(Some(_))) {
                    return true;
                }
            }
            first += count;
        }
        false
    }

    /// The space that an entry names.
    fn meaning(&self, index: u64, entry: BatEntry) -> Result<Option<(u64, u64)>, Fault> {
        use diskwright_format::vhdx::bat::EntryKind;
        if entry.reserved_bits() != 0 {
            return Err(Fault::Undefined);
        }
        let len_bytes = match self.geometry.what_is(index) {
            EntryKind::Bitmap { .. } if !self.has_parent => return Ok(None),
            EntryKind::Bitmap { .. } => match entry.bitmap_state().map_err(|_| Fault::Undefined)? {
                BitmapState::NotPresent => return Ok(None),
                BitmapState::Present => BITMAP_BLOCK_BYTES,
            },
            EntryKind::Payload { block } => match entry.payload_state().map_err(|_| Fault::Undefined)? {
                PayloadState::FullyPresent | PayloadState::PartiallyPresent => self.geometry.bytes_in_disk(block),
                // Wiped entries have no offset, damaged ones may have.
                PayloadState::NotPresent if entry.offset_bytes() >= self.file_bytes => return Err(Fault::Undefined),
                _ => return Ok(None),
            },
        };
        let start = entry.offset_bytes();
        let end = start.checked_add(len_bytes).ok_or(Fault::BeyondEnd)?;
        if start >= self.file_bytes {
            return Err(Fault::BeyondEnd);
        }
        if start < MIB || overlaps_one(self.tables, &(start..end)) {
            return Err(Fault::InTables);
        }
        Ok(Some((start, end)))
    }

    /// Records all blocks from an entry on as lost.
    fn lose_rest(&self, first: u64, table: &mut BlockTable, places: &mut BTreeMap<u64, Option<u64>>) -> Result<()> {
        use diskwright_format::vhdx::bat::EntryKind;
        let block = match (self.geometry.what_is(first), self.geometry.what_is(first + 1)) {
            // The bitmap of a chunk is named behind its blocks.
            (EntryKind::Payload { block }, _) | (_, EntryKind::Payload { block }) => block,
            _ => self.geometry.payload_blocks(),
        };
        let chunk = match self.geometry.what_is(first) {
            EntryKind::Payload { block } => self.geometry.chunk_of(block),
            EntryKind::Bitmap { chunk } => chunk,
        };
        table.lose(self.store, block, self.geometry.payload_blocks(), Fault::Unreadable)?;
        if self.has_parent {
            places.extend((chunk..self.geometry.chunks()).map(|chunk| (chunk, None)));
        }
        Ok(())
    }

    /// The space that an entry without data keeps for its block.
    fn kept(&self, block: u64, entry: BatEntry) -> Option<Range<u64>> {
        let start = Some(entry.offset_bytes()).filter(|&start| start >= MIB)?;
        let end = start.checked_add(self.geometry.bytes_in_disk(block)).filter(|&end| end <= self.file_bytes)?;
        Some(start..end)
    }

    /// Reads all entries. Returns the space that entries without data keep.
    fn read(
        &self,
        bat_bytes: u64,
        table: &mut BlockTable,
        places: &mut BTreeMap<u64, Option<u64>>,
    ) -> Result<Vec<Range<u64>>> {
        use diskwright_format::vhdx::bat::EntryKind;
        let entries = self.geometry.entries(self.has_parent);
        let blocks = self.geometry.payload_blocks();
        let mut bytes = vec![0; ENTRIES * BAT_ENTRY_BYTES as usize];
        // Bitmap blocks are listed behind all payload blocks.
        let mut pieces = Vec::new();
        let mut kept = Vec::new();
        for first in (0..entries).step_by(ENTRIES) {
            if bat_bytes.saturating_add(first * BAT_ENTRY_BYTES) >= self.file_bytes {
                // The rest of the table is cut off, a part of a chunk first.
                self.lose_rest(first, table, places)?;
                break;
            }
            let count = (entries - first).min(ENTRIES as u64) as usize;
            let bytes = &mut bytes[..count * 8];
            let lost = read_what_can_be(self.store, bat_bytes + first * BAT_ENTRY_BYTES, bytes);
            for (slot, raw) in bytes.chunks_exact(8).enumerate() {
                let index = first + slot as u64;
                let entry = BatEntry::from_le_bytes(raw.try_into().unwrap_or_default());
                let is_lost = lost.iter().any(|range| range.start < slot * 8 + 8 && slot * 8 < range.end);
                let meaning = if is_lost { Err(Fault::Unreadable) } else { self.meaning(index, entry) };
                match (self.geometry.what_is(index), meaning) {
                    (EntryKind::Payload { block }, _) if block >= blocks => {}
                    (EntryKind::Payload { block }, Err(fault)) => table.lose(self.store, block, block + 1, fault)?,
                    (EntryKind::Payload { block }, Ok(Some((start, end)))) => {
                        let partial = self.has_parent && entry.payload_state() == Ok(PayloadState::PartiallyPresent);
                        table.hold(
                            self.store,
                            block,
                            if partial { SalvagedBlock::Partial(start) } else { SalvagedBlock::Data(start) },
                        )?;
                        pieces.push((block, start, end));
                    }
                    (EntryKind::Payload { block }, Ok(None)) => {
                        if kept.len() < HELD_MAX {
                            kept.extend(self.kept(block, entry));
                        }
                        if !matches!(entry.payload_state(), Ok(PayloadState::NotPresent)) {
                            table.hold(self.store, block, SalvagedBlock::Zero)?;
                        }
                    }
                    (EntryKind::Bitmap { chunk }, Ok(Some((start, end)))) => {
                        places.insert(chunk, Some(start));
                        pieces.push((blocks + chunk, start, end));
                    }
                    (EntryKind::Bitmap { chunk }, Err(_)) if self.has_parent => drop(places.insert(chunk, None)),
                    (EntryKind::Bitmap { .. }, _) => {}
                }
            }
        }
        for block in overlapping(&mut pieces) {
            match block.checked_sub(blocks) {
                Some(chunk) => drop(places.insert(chunk, None)),
                None => table.lose_held(self.store, block, Fault::Claimed)?,
            }
        }
        Ok(kept)
    }
}
