//! Opens a VHDX by a few small reads. Each structure is validated before it is used.
//!
//! ```text
//!   file identifier (520 B) ─▶ two headers (4 KiB each) ─▶ log, only if the header names one
//!                                                              │
//!        ImageInfo, Layout ◀─ items ◀─ metadata table ◀─ region table (64 KiB)
//! ```
//!
//! The second region table is read only if the first is invalid. The BAT is not read here. If the
//! log is empty, nothing is written, even by a writable open.

use super::{
    corrupt,
    header::{Headers, sync},
    layout::Layout,
    link,
    log::{Ring, Sequence, Target},
};
use crate::{
    DiskType, Format, ImageInfo, LinkageId, LogState, ParentLink,
    error::{ImageError, Result},
};
use diskwright_format::vhdx::{
    BatGeometry, FileIdentifier, FileParameters, Header, Invalid, MIB, MetadataEntry, MetadataTable, ParentLocator,
    Region, RegionTable, Slot, file_id,
    header::{self, HEADER_BYTES},
    metadata, parent_locator,
    region::{BAT_REGION, METADATA_REGION, REGION_TABLE_BYTES, REGION_TABLE_OFFSETS},
};
use diskwright_store::{Barrier, FileRange, OverlayStore, Store};
use std::{collections::BTreeMap, io, sync::Arc};
use uuid::Uuid;

/// Longest parent locator that is read, in bytes.
const MAX_LOCATOR_BYTES: u32 = 256 << 10;

/// The result of opening a file.
pub(super) struct Opened {
    pub(super) barrier: Barrier,
    pub(super) headers: Headers,
    pub(super) log_place: FileRange,
    pub(super) layout: Layout,
    pub(super) info: ImageInfo,
    /// The file's length after the replay of the log, in bytes.
    pub(super) file_bytes: u64,
}

pub(super) fn load(store: Arc<dyn Store>, writable: bool) -> Result<Opened> {
    let creator = read_identifier(&*store)?;
    let mut remarks = Vec::new();
    let (slot, header) = read_headers(&*store, &mut remarks)?;
    let log_place = FileRange { offset_bytes: header.log_offset_bytes, len_bytes: u64::from(header.log_len_bytes) };
    let log_is_sound = check_log_place(&*store, &header);
    if let Err(invalid) = log_is_sound.clone() {
        if writable || !header.log_guid.is_nil() {
            return Err(corrupt(&*store, slot.offset_bytes(), invalid));
        }
        remarks.push(format!(
            "The log's offset or length is invalid ({invalid}). The disk can still be read, as its log is empty."
        ));
    }
    let found = FoundStructures { creator, slot, log_place, log_is_sound: log_is_sound.is_ok() };
    let (barrier, headers, log) = replay(store, &found, header, writable, &mut remarks)?;
    let (layout, info) = describe(&**barrier.store(), &found, headers.current(), log, &mut remarks)?;
    remarks.extend(info.doubts.iter().cloned());
    let info = ImageInfo { remarks, ..info };
    let store = &**barrier.store();
    let file_bytes = store.len_bytes().map_err(|error| ImageError::io("get the file's length", store, 0, error))?;
    Ok(Opened { headers, log_place, layout, info, file_bytes, barrier })
}

/// Doubt about a disk that is not marked as a child but has the link of one.
const STRAY_PARENT: &str = "The disk is not marked as differencing, but it has a parent locator. Blocks that this file does not have read as zeros.";

/// Result of the steps before the replay of the log.
struct FoundStructures {
    creator: String,
    slot: Slot,
    log_place: FileRange,
    log_is_sound: bool,
}

/// Reads all structures that the log may have changed. `store` shows the file after the replay.
fn describe(
    store: &dyn Store,
    found: &FoundStructures,
    header: &Header,
    log: LogState,
    remarks: &mut Vec<String>,
) -> Result<(Layout, ImageInfo)> {
    let regions = read_regions(store, remarks)?;
    let metadata_region = required_region(store, &regions, METADATA_REGION, "metadata region")?;
    let bat_region = required_region(store, &regions, BAT_REGION, "BAT region")?;
    let table = read_metadata_table(store, &metadata_region)?;
    let items = Items { store, region: metadata_region, table: &table };
    let parameters = items.parse(metadata::FILE_PARAMETERS, "file parameters", FileParameters::parse)?;
    let size_bytes = items.parse(metadata::VIRTUAL_DISK_SIZE, "virtual disk size", |bytes| {
        metadata::parse_u64("virtual disk size", bytes)
    })?;
    let logical = items.parse(metadata::LOGICAL_SECTOR_SIZE, "logical sector size", |bytes| {
        metadata::parse_u32("logical sector size", bytes)
    })?;
    let physical = items.parse(metadata::PHYSICAL_SECTOR_SIZE, "physical sector size", |bytes| {
        metadata::parse_u32("physical sector size", bytes)
    })?;
    let disk_id = match table.find(metadata::VIRTUAL_DISK_ID) {
        None => None,
        Some(_) => Some(items.parse(metadata::VIRTUAL_DISK_ID, "virtual disk id", |bytes| {
            metadata::parse_guid("virtual disk id", bytes)
        })?),
    };
    let at_metadata = |invalid| corrupt(store, metadata_region.offset_bytes, invalid);
    let geometry = BatGeometry::new(size_bytes, parameters.block_bytes, logical).map_err(at_metadata)?;
    if physical != 512 && physical != 4096 {
        return Err(at_metadata(Invalid::new("physical sector size", 0, physical, "512 or 4096 bytes")));
    }
    let parent = if parameters.has_parent { Some(read_parent(&items)?) } else { None };
    let is_stray = !parameters.has_parent && table.find(metadata::PARENT_LOCATOR).is_some();
    let layout = Layout {
        geometry,
        has_parent: parameters.has_parent,
        fixed: parameters.leave_blocks_allocated && !parameters.has_parent,
        bat_offset_bytes: bat_region.offset_bytes,
        metadata: metadata_ranges(store, &regions, found.log_is_sound.then_some(found.log_place), found.slot)?,
    };
    check_bat_region(store, &layout, &bat_region)?;
    let disk_type = match (layout.has_parent, layout.fixed) {
        (true, _) => DiskType::Differencing,
        (false, true) => DiskType::Fixed,
        (false, false) => DiskType::Dynamic,
    };
    let info = ImageInfo {
        logical_sector_bytes: logical,
        physical_sector_bytes: physical,
        creator: found.creator.clone(),
        disk_id,
        linkage_id: Some(LinkageId::from_uuid(header.data_write_guid)),
        file_write_id: Some(header.file_write_guid),
        parent,
        log,
        payload_alignment_bytes: MIB as u32,
        doubts: is_stray.then(|| STRAY_PARENT.to_owned()).into_iter().collect(),
        ..ImageInfo::new(Format::Vhdx, disk_type, size_bytes, geometry.block_bytes())
    };
    Ok((layout, info))
}

fn read_identifier(store: &dyn Store) -> Result<String> {
    let not_an_image = |found: String| ImageError::NotAnImage {
        path: store.name().to_owned(),
        found,
        expected: "a VHDX, which begins with \"vhdxfile\"".into(),
    };
    let mut bytes = [0; file_id::FILE_ID_BYTES];
    match store.read_at(&mut bytes, 0) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(not_an_image("a file of less than 520 bytes".into()));
        }
        Err(error) => return Err(ImageError::io("read the file identifier", store, 0, error)),
    }
    FileIdentifier::parse(&bytes).map(|id| id.creator).map_err(|invalid| not_an_image(invalid.found))
}

/// The bytes of both header slots. A slot beyond the end of the file is empty, and so invalid.
pub(super) fn read_slots(store: &dyn Store) -> Result<[Vec<u8>; 2]> {
    let mut slots = [vec![0; HEADER_BYTES], vec![0; HEADER_BYTES]];
    for (slot, bytes) in [Slot::First, Slot::Second].into_iter().zip(&mut slots) {
        read_if_there(store, "read a header", bytes, slot.offset_bytes())?;
    }
    Ok(slots)
}

pub(super) fn read_if_there(
    store: &dyn Store,
    doing: &'static str,
    bytes: &mut Vec<u8>,
    offset_bytes: u64,
) -> Result<()> {
    match store.read_at(bytes, offset_bytes) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => bytes.clear(),
        Err(error) => return Err(ImageError::io(doing, store, offset_bytes, error)),
        Ok(()) => {}
    }
    Ok(())
}

pub(super) fn read_headers(store: &dyn Store, remarks: &mut Vec<String>) -> Result<(Slot, Header)> {
    let [first, second] = read_slots(store)?;
    let (slot, header) =
        header::select(&first, &second).map_err(|invalid| corrupt(store, Slot::First.offset_bytes(), invalid))?;
    header.validate().map_err(|invalid| ImageError::Unsupported {
        path: store.name().to_owned(),
        what: format!("a VHDX with {}", invalid.found),
        hint: format!("only {} is supported; use the program that wrote it", invalid.expected),
    })?;
    for (which, bytes) in [(Slot::First, &first), (Slot::Second, &second)] {
        if let Err(invalid) = Header::parse(bytes) {
            remarks.push(format!(
                "One of the two headers, at {}, is not valid ({invalid}); the other is used.",
                which.offset_bytes()
            ));
        }
    }
    Ok((slot, header))
}

pub(super) fn check_log_place(store: &dyn Store, header: &Header) -> std::result::Result<(), Invalid> {
    header.validate_log_place()?;
    let end_bytes = header.log_offset_bytes.saturating_add(u64::from(header.log_len_bytes));
    match store.len_bytes() {
        Ok(file_bytes) if end_bytes <= file_bytes => Ok(()),
        Ok(file_bytes) => Err(Invalid::new(
            "header",
            72,
            format!("a log that ends at {end_bytes}"),
            format!("one within the file's {file_bytes} bytes"),
        )),
        Err(error) => {
            Err(Invalid::new("header", 72, format!("a file whose length cannot be read ({error})"), "a length"))
        }
    }
}

/// Replays the log if the header names one. Returns the store for all further reads.
///
/// The file itself is changed only after a replay in memory and after all structures were found
/// valid in it. So a file that cannot be opened stays unchanged.
fn replay(
    store: Arc<dyn Store>,
    found: &FoundStructures,
    header: Header,
    writable: bool,
    remarks: &mut Vec<String>,
) -> Result<(Barrier, Headers, LogState)> {
    let log_guid = header.log_guid;
    let mut headers = Headers::new(found.slot, header);
    if log_guid.is_nil() {
        return Ok((Barrier::new(store), headers, LogState::Clean));
    }
    let ring = Ring { store: &*store, place: found.log_place };
    let sequence = ring.find(log_guid)?;
    let log = LogState::Replayed { entries: sequence.len() };
    let replayed = replay_in_memory(&store, &ring, &sequence);
    if !writable {
        return Ok((Barrier::new(replayed?), headers, log));
    }
    match replayed {
        Ok(replayed) => {
            let told = remarks.len();
            describe(&*replayed, found, headers.current(), log, remarks)?;
            remarks.truncate(told);
        }
        // The replay is too large for memory. The log itself was validated, which must suffice.
        Err(ImageError::Unsupported { .. }) => {}
        Err(error) => return Err(error),
    }
    // The header is updated first, as the file changes from here on. After a power cut during the
    // replay the log is still there and is replayed again.
    let barrier = Barrier::new(Arc::clone(&store));
    headers.begin_file_write(&barrier)?;
    ring.replay(&sequence, Target::Disk)?;
    sync(&barrier)?;
    headers.set_log_guid(&barrier, Uuid::nil())?;
    Ok((barrier, headers, log))
}

/// A store that shows the file after a replay.
pub(super) fn replay_in_memory(store: &Arc<dyn Store>, ring: &Ring<'_>, sequence: &Sequence) -> Result<Arc<dyn Store>> {
    let mut pages = BTreeMap::new();
    ring.replay(sequence, Target::Memory(&mut pages))?;
    let io = |error| ImageError::io("replay the log", &**store, ring.place.offset_bytes, error);
    if pages.is_empty() && sequence.last_file_bytes() <= store.len_bytes().map_err(io)? {
        return Ok(Arc::clone(store));
    }
    Ok(Arc::new(OverlayStore::new(Arc::clone(store), pages, sequence.last_file_bytes()).map_err(io)?))
}

pub(super) fn read_regions(store: &dyn Store, remarks: &mut Vec<String>) -> Result<RegionTable> {
    let mut first_error = None;
    for offset_bytes in REGION_TABLE_OFFSETS {
        let mut bytes = vec![0; REGION_TABLE_BYTES];
        read_if_there(store, "read a region table", &mut bytes, offset_bytes)?;
        match RegionTable::parse(&bytes) {
            Ok(table) => {
                if let Some(region) = table.unknown_required() {
                    return Err(ImageError::Unsupported {
                        path: store.name().to_owned(),
                        what: format!("the region {}, which the file says is required,", region.id),
                        hint: "use the program that wrote the file".into(),
                    });
                }
                if let Some((offset_bytes, invalid)) = first_error {
                    remarks.push(format!(
                        "The region table at {offset_bytes} is not valid ({invalid}); its copy is used."
                    ));
                }
                return Ok(table);
            }
            Err(invalid) => first_error = first_error.or(Some((offset_bytes, invalid))),
        }
    }
    let (offset_bytes, invalid) =
        first_error.unwrap_or((REGION_TABLE_OFFSETS[0], Invalid::new("region table", 0, "nothing", "a table")));
    Err(corrupt(store, offset_bytes, invalid))
}

pub(super) fn required_region(
    store: &dyn Store,
    regions: &RegionTable,
    id: Uuid,
    name: &'static str,
) -> Result<Region> {
    regions
        .find(id)
        .copied()
        .ok_or_else(|| corrupt(store, REGION_TABLE_OFFSETS[0], Invalid::new(name, 0, "no such region", "one region")))
}

pub(super) fn read_metadata_table(store: &dyn Store, region: &Region) -> Result<MetadataTable> {
    let io = |error| ImageError::io("read the metadata table", store, region.offset_bytes, error);
    let at_region = |invalid| corrupt(store, region.offset_bytes, invalid);
    let mut bytes = vec![0; metadata::METADATA_HEADER_BYTES];
    store.read_at(&mut bytes, region.offset_bytes).map_err(io)?;
    bytes.resize(MetadataTable::needed_bytes(&bytes).map_err(at_region)?, 0);
    store.read_at(&mut bytes, region.offset_bytes).map_err(io)?;
    let table = MetadataTable::parse(&bytes, region.len_bytes).map_err(at_region)?;
    if let Some(entry) = table.unknown_required() {
        return Err(ImageError::Unsupported {
            path: store.name().to_owned(),
            what: format!("the metadata item {}, which the file says is required,", entry.id),
            hint: "use the program that wrote the file".into(),
        });
    }
    Ok(table)
}

/// The metadata table, and reads of its items.
pub(super) struct Items<'a> {
    pub(super) store: &'a dyn Store,
    pub(super) region: Region,
    pub(super) table: &'a MetadataTable,
}

impl Items<'_> {
    fn find(&self, id: Uuid, name: &'static str) -> Result<&MetadataEntry> {
        self.table.find(id).ok_or_else(|| {
            corrupt(self.store, self.region.offset_bytes, Invalid::new(name, 0, "no such metadata item", "one item"))
        })
    }

    pub(super) fn parse<T>(
        &self,
        id: Uuid,
        name: &'static str,
        parse: impl FnOnce(&[u8]) -> std::result::Result<T, Invalid>,
    ) -> Result<T> {
        let entry = self.find(id, name)?;
        let offset_bytes = self.region.offset_bytes + u64::from(entry.offset_bytes);
        let mut bytes = vec![0; entry.len_bytes.min(MAX_LOCATOR_BYTES) as usize];
        self.store
            .read_at(&mut bytes, offset_bytes)
            .map_err(|error| ImageError::io("read a metadata item", self.store, offset_bytes, error))?;
        parse(&bytes).map_err(|invalid| corrupt(self.store, offset_bytes, invalid))
    }
}

fn read_parent(items: &Items<'_>) -> Result<ParentLink> {
    let locator = items.parse(metadata::PARENT_LOCATOR, "parent locator", ParentLocator::parse)?;
    if locator.locator_type != parent_locator::VHDX_LOCATOR {
        return Err(ImageError::Unsupported {
            path: items.store.name().to_owned(),
            what: format!("a parent locator of type {}", locator.locator_type),
            hint: "only VHDX parents are supported; use the program that wrote the file".into(),
        });
    }
    let offset_bytes =
        items.region.offset_bytes + u64::from(items.find(metadata::PARENT_LOCATOR, "parent locator")?.offset_bytes);
    link::of_locator(&locator).map_err(|invalid| corrupt(items.store, offset_bytes, invalid))
}

/// The parent that the VHDX in `store` names, read from its metadata without looking at the log.
/// `relink.rs` keeps the metadata whole at every instant, so the link is one that the file has had.
///
/// # Errors
/// `NotAnImage`, `Corrupt`, `Unsupported`, `Io`.
pub fn parent_link(store: &dyn Store) -> Result<Option<ParentLink>> {
    read_identifier(store)?;
    let regions = read_regions(store, &mut Vec::new())?;
    let region = required_region(store, &regions, METADATA_REGION, "metadata region")?;
    let table = read_metadata_table(store, &region)?;
    let items = Items { store, region, table: &table };
    let parameters = items.parse(metadata::FILE_PARAMETERS, "file parameters", FileParameters::parse)?;
    parameters.has_parent.then(|| read_parent(&items)).transpose()
}

/// The ranges that payload must not overlap.
fn metadata_ranges(
    store: &dyn Store,
    regions: &RegionTable,
    log: Option<FileRange>,
    slot: Slot,
) -> Result<Vec<(u64, u64)>> {
    let mut ranges: Vec<(u64, u64)> =
        regions.regions.iter().map(|region| (region.offset_bytes, region.end_bytes())).collect();
    ranges.push((0, MIB));
    ranges.extend(log.map(|log| (log.offset_bytes, log.offset_bytes + log.len_bytes)));
    ranges.sort_unstable();
    if let Some(pair) = ranges.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        let found = format!("a log or region at {} inside another that ends at {}", pair[1].0, pair[0].1);
        return Err(corrupt(
            store,
            slot.offset_bytes(),
            Invalid::new("header", 72, found, "a log and regions that do not overlap"),
        ));
    }
    Ok(ranges)
}

fn check_bat_region(store: &dyn Store, layout: &Layout, region: &Region) -> Result<()> {
    let needed_bytes = layout.bat_end_bytes() - layout.bat_offset_bytes;
    let file_bytes = store.len_bytes().map_err(|error| ImageError::io("get the file's length", store, 0, error))?;
    let at_region =
        |found, expected| Err(corrupt(store, region.offset_bytes, Invalid::new("BAT region", 0, found, expected)));
    if u64::from(region.len_bytes) < needed_bytes {
        return at_region(
            format!("{} bytes", region.len_bytes),
            format!("at least {needed_bytes} for a disk of this size"),
        );
    }
    if region.offset_bytes.saturating_add(needed_bytes) > file_bytes {
        return at_region(
            format!("a file of {file_bytes} bytes"),
            format!("a table that ends at {}", region.offset_bytes.saturating_add(needed_bytes)),
        );
    }
    Ok(())
}
