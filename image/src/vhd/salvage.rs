//! What can still be known of a damaged VHD.
//!
//! ```text
//!   footer at the end, copy at 0 ─▶ size, type            lost: from the header, or from the user
//!   header at its place, or by its cookie in the first MiB ─▶ block size, BAT, parent
//!   BAT entry by entry ─▶ a place that is inside the file and that no other block claims
//! ```
//!
//! If both footers and the header are lost, nothing says whether the image has a parent: the user
//! or the name of the file must.
//!
//! Without a header the place of the BAT is not known: then no entry is believed, and blocks are
//! found by their contents only. A file without any structure is read as a fixed disk, if the user
//! names its size.

use super::layout::by_trust;
use crate::{
    DiskType, Format, ImageError, ImageInfo, LinkageId, ParentLink, Result,
    salvage::{
        Bitmaps, BlockTable, Fault, ParentRecord, SalvageHints, Salvaged, SalvagedBlock, each_entry, file_length,
        joined, overlapping, overlaps_one, read_what_can_be,
    },
};
use diskwright_format::vhd::{
    BAT_UNUSED, DiskKind, DynamicHeader, FOOTER_BYTES, Footer, HEADER_BYTES, LocatorData, MAX_DYNAMIC_BYTES,
    OLD_FOOTER_BYTES, SECTOR_BYTES, bitmap_bytes,
};
use diskwright_store::Store;
use std::{ops::Range, sync::Arc};

/// Where a header whose place is not known is looked for.
const HEADER_SEARCH_BYTES: u64 = 1 << 20;
/// Most blocks of a disk: a VHD with the smallest blocks could have 4 billion of them in a small
/// file.
const BLOCKS_MAX: u64 = 1 << 26;
/// The map of a fixed disk is cut by this.
const FIXED_UNIT_BYTES: u64 = 2 << 20;

/// Reads what can still be known of a damaged VHD.
pub(crate) fn salvage(store: Arc<dyn Store>, hints: &SalvageHints) -> Result<Salvaged> {
    let file_bytes = file_length(&*store)?;
    let mut remarks = Vec::new();
    let (footer, tail) = footer(&*store, file_bytes, &mut remarks);
    let header = match &footer {
        Some(footer) if footer.kind == DiskKind::Fixed => None,
        footer => header(&*store, file_bytes, footer.as_ref(), &mut remarks),
    };
    let linear = match &footer {
        Some(footer) => footer.kind == DiskKind::Fixed,
        None => header.is_none() && hints.block_bytes.is_none() && hints.is_child != Some(true),
    };
    if linear {
        return fixed(store, file_bytes, footer, hints, remarks);
    }
    blocks(store, file_bytes, footer, tail, header, hints, remarks)
}

/// The footer to believe, and its range if it is the one at the end.
fn footer(store: &dyn Store, file_bytes: u64, remarks: &mut Vec<String>) -> (Option<Footer>, Option<Range<u64>>) {
    let at = |offset_bytes: u64, len: usize| {
        let mut bytes = [0; FOOTER_BYTES];
        let lost = read_what_can_be(store, offset_bytes, &mut bytes[..len]);
        lost.is_empty().then(|| Footer::parse(&bytes[..len], offset_bytes).ok()).flatten()
    };
    let tail = [FOOTER_BYTES, OLD_FOOTER_BYTES].into_iter().find_map(|len| {
        let offset_bytes = file_bytes.checked_sub(len as u64)?;
        Some((at(offset_bytes, len)?, offset_bytes..file_bytes))
    });
    // A footer of a fixed disk at offset 0 is the guest's, as fixed disks have no copy.
    let copy = at(0, FOOTER_BYTES).filter(|copy| copy.kind != DiskKind::Fixed);
    match (tail, copy) {
        (Some((tail, place)), Some(copy)) => {
            let believed = if tail.kind == DiskKind::Fixed {
                tail.current_size_bytes == place.start
            } else {
                tail.unique_id == copy.unique_id && tail.kind == copy.kind
            };
            if believed { (Some(tail), Some(place)) } else { (Some(copy), None) }
        }
        (Some((tail, place)), None) => {
            if tail.kind != DiskKind::Fixed {
                remarks.push("The copy of the footer at offset 0 is damaged; the footer at the end is used.".into());
            }
            (Some(tail), Some(place))
        }
        (None, Some(copy)) => {
            remarks.push("The footer at the end is missing or damaged; its copy at offset 0 is used.".into());
            (Some(copy), None)
        }
        (None, None) => {
            remarks.push("Both footers are missing or damaged.".into());
            (None, None)
        }
    }
}

/// The dynamic header, and its offset.
fn header(
    store: &dyn Store,
    file_bytes: u64,
    footer: Option<&Footer>,
    remarks: &mut Vec<String>,
) -> Option<(DynamicHeader, u64)> {
    let at = |offset_bytes: u64| {
        let mut bytes = [0; HEADER_BYTES];
        offset_bytes.checked_add(HEADER_BYTES as u64).filter(|&end| end <= file_bytes)?;
        let lost = read_what_can_be(store, offset_bytes, &mut bytes);
        lost.is_empty().then(|| DynamicHeader::parse(&bytes, offset_bytes).ok()).flatten()
    };
    let named = footer.map_or(FOOTER_BYTES as u64, |footer| footer.data_offset);
    if let Some(header) = at(named) {
        return Some((header, named));
    }
    let found = (0..HEADER_SEARCH_BYTES.min(file_bytes))
        .step_by(SECTOR_BYTES as usize)
        .find_map(|offset_bytes| at(offset_bytes).map(|header| (header, offset_bytes)));
    remarks.push(match &found {
        Some((_, offset_bytes)) => {
            format!("The dynamic header is not at {named}, where the footer says; the one at {offset_bytes} is used.")
        }
        None => "The dynamic header is missing or damaged, so the block allocation table was not found.".into(),
    });
    found
}

fn missing(store: &dyn Store, found: &str, expected: &str) -> ImageError {
    ImageError::NotAnImage { path: store.name().to_owned(), found: found.into(), expected: expected.into() }
}

/// A fixed disk: the bytes of the file.
fn fixed(
    store: Arc<dyn Store>,
    file_bytes: u64,
    footer: Option<Footer>,
    hints: &SalvageHints,
    mut remarks: Vec<String>,
) -> Result<Salvaged> {
    let named = footer.as_ref().map(Footer::size_bytes).or(hints.size_bytes);
    let size_bytes = named.filter(|&size| size > 0).ok_or_else(|| {
        missing(
            &*store,
            "the file has neither a footer nor a dynamic header that is valid",
            "one of them; if it is a fixed disk, name its size with `RescueOptions::size_bytes`; if it has blocks, name their size too, with `RescueOptions::block_bytes` (usually 2 MiB)",
        )
    })?;
    if footer.is_none() {
        remarks.push("Without a footer and a dynamic header, the file is read as a fixed disk.".into());
    }
    let count = size_bytes.div_ceil(FIXED_UNIT_BYTES);
    let info = info(footer.as_ref(), DiskType::Fixed, size_bytes, FIXED_UNIT_BYTES, None, remarks);
    Ok(Salvaged {
        info: ImageInfo { has_blocks: false, ..info },
        store,
        file_bytes,
        parent_record: ParentRecord::Alone,
        table: BlockTable::linear(count, FIXED_UNIT_BYTES, file_bytes),
        bitmaps: Bitmaps::None,
        unpack: None,
        tables: Vec::new(),
        payload_alignment_bytes: SECTOR_BYTES,
        doubts: Vec::new(),
        doubts_bitmaps: false,
    })
}

fn blocks(
    store: Arc<dyn Store>,
    file_bytes: u64,
    footer: Option<Footer>,
    tail: Option<Range<u64>>,
    header: Option<(DynamicHeader, u64)>,
    hints: &SalvageHints,
    mut remarks: Vec<String>,
) -> Result<Salvaged> {
    let named = header.as_ref().map(|(header, _)| header.block_bytes).or(hints.block_bytes);
    let block =
        named.filter(|block| block.is_power_of_two() && u64::from(*block) >= SECTOR_BYTES).ok_or_else(|| {
            missing(
                &*store,
                "the file has no dynamic header that is valid, so the size of its blocks is not known",
                "a header; name the size of its blocks with `RescueOptions::block_bytes` (usually 2 MiB)",
            )
        })?;
    let block_bytes = u64::from(block);
    let by_header = header.as_ref().map(|(header, _)| u64::from(header.max_table_entries) * block_bytes);
    let size_bytes = match (footer.as_ref().map(Footer::size_bytes), hints.size_bytes, by_header) {
        (Some(size), _, _) | (None, Some(size), _) => size,
        (None, None, Some(size)) => {
            remarks.push(format!(
                "Without a footer the size is that of the block allocation table, {size} bytes: the disk may be up to a block smaller (name its size with `RescueOptions::size_bytes`)."
            ));
            size
        }
        (None, None, None) => {
            return Err(missing(
                &*store,
                "the file has no footer that is valid",
                "a footer; name the size of the disk with `RescueOptions::size_bytes`",
            ));
        }
    };
    if size_bytes == 0 || size_bytes > MAX_DYNAMIC_BYTES || !size_bytes.is_multiple_of(SECTOR_BYTES) {
        return Err(missing(
            &*store,
            &format!("a size of {size_bytes} bytes"),
            "a multiple of 512 bytes, above 0 and up to 2040 GiB; name the size with `RescueOptions::size_bytes`",
        ));
    }
    let known = |is_child: bool| if is_child { ParentRecord::Child } else { ParentRecord::Alone };
    let parent_record = match (&footer, &header) {
        (Some(footer), _) => known(footer.kind == DiskKind::Differencing),
        (None, Some((header, _))) => known(!header.parent_id.is_nil()),
        (None, None) => ParentRecord::by_hints(hints),
    };
    let is_child = parent_record.may_have_parent();
    let parent = header.as_ref().filter(|_| is_child).map(|(header, at)| parent_of(&*store, header, *at, file_bytes));
    let disk_type = if is_child { DiskType::Differencing } else { DiskType::Dynamic };
    let count = size_bytes.div_ceil(block_bytes);
    if count > BLOCKS_MAX {
        return Err(ImageError::Unsupported {
            path: store.name().to_owned(),
            what: format!("rescuing a disk of {count} blocks of {block_bytes} bytes"),
            hint: format!("at most {BLOCKS_MAX} blocks are; if its tables are sound, convert it"),
        });
    }
    let lead_bytes = bitmap_bytes(block);
    let mut tables: Vec<Range<u64>> = tail.into_iter().collect();
    tables.push(0..FOOTER_BYTES as u64);
    let mut table = BlockTable::new(count, block_bytes);
    let mut doubts = Vec::new();
    let bat = header.as_ref().and_then(|(header, at)| {
        tables.push(*at..at + HEADER_BYTES as u64);
        tables.extend(header.locators.iter().filter(|entry| entry.is_used()).map(|entry| {
            let space_bytes = entry.space_bytes().max(u64::from(entry.data_length_bytes));
            entry.data_offset.min(file_bytes)..entry.data_offset.saturating_add(space_bytes).min(file_bytes)
        }));
        let end = header.table_offset.checked_add(u64::from(header.max_table_entries) * 4)?;
        header.table_offset.is_multiple_of(SECTOR_BYTES).then_some(header.table_offset..end)
    });
    if let Some(bat) = bat.as_ref().filter(|bat| bat.start < file_bytes) {
        let end = bat.end.max(bat.start.saturating_add(count * 4)).min(file_bytes);
        tables.push(bat.start..end.next_multiple_of(SECTOR_BYTES).min(file_bytes));
    }
    let tables = joined(tables);
    let place = Place { count, block_bytes, lead_bytes, file_bytes, tables: &tables };
    match bat {
        Some(bat) => place.read_entries(&*store, bat.start, &mut table)?,
        None => {
            doubts.push("the block allocation table was not found".to_owned());
            table.lose(&*store, 0, count, Fault::NoTable)?;
        }
    }
    Ok(Salvaged {
        info: info(footer.as_ref(), disk_type, size_bytes, block_bytes, parent, remarks),
        store,
        file_bytes,
        parent_record,
        table,
        bitmaps: Bitmaps::BeforePayload { len_bytes: lead_bytes },
        unpack: None,
        tables,
        payload_alignment_bytes: SECTOR_BYTES,
        doubts,
        doubts_bitmaps: false,
    })
}

/// What a BAT entry is checked against.
struct Place<'a> {
    count: u64,
    block_bytes: u64,
    lead_bytes: u64,
    file_bytes: u64,
    tables: &'a [Range<u64>],
}

impl Place<'_> {
    fn read_entries(&self, store: &dyn Store, table_offset: u64, table: &mut BlockTable) -> Result<()> {
        let mut pieces = Vec::new();
        let there = each_entry(store, table_offset, (self.count, 4), &mut |block, raw| {
            let piece = match raw {
                Some(raw) => self.piece(u32::from_be_bytes(raw.try_into().unwrap_or([0xff; 4]))),
                None => Err(Fault::Unreadable),
            };
            match piece {
                Ok(None) => {}
                Ok(Some(piece)) => {
                    table.hold(store, block, SalvagedBlock::Partial(piece.start + self.lead_bytes))?;
                    pieces.push((block, piece.start, piece.end));
                }
                Err(fault) => table.lose(store, block, block + 1, fault)?,
            }
            Ok(())
        })?;
        // The rest of the table is cut off.
        table.lose(store, there, self.count, Fault::Unreadable)?;
        for block in overlapping(&mut pieces) {
            table.lose_held(store, block, Fault::Claimed)?;
        }
        Ok(())
    }

    /// The space that an entry names. A block that the end of the file cuts keeps what is there.
    fn piece(&self, entry: u32) -> Result<Option<Range<u64>>, Fault> {
        if entry == BAT_UNUSED {
            return Ok(None);
        }
        let start = u64::from(entry) * SECTOR_BYTES;
        let piece = start..start + self.lead_bytes + self.block_bytes;
        if start + self.lead_bytes >= self.file_bytes {
            return Err(Fault::BeyondEnd);
        }
        if overlaps_one(self.tables, &piece) {
            // The footer at the end of a file that was cut may lie anywhere; the others never move.
            return Err(Fault::InTables);
        }
        Ok(Some(piece))
    }
}

/// The link to the parent, as far as it can be read.
fn parent_of(store: &dyn Store, header: &DynamicHeader, header_offset_bytes: u64, file_bytes: u64) -> ParentLink {
    let mut link = ParentLink {
        name: (!header.parent_name.is_empty()).then(|| header.parent_name.clone()),
        linkage: Some(LinkageId::from_uuid(header.parent_id)),
        modified_seconds: Some(header.parent_modified_seconds),
        ..Default::default()
    };
    for (index, entry) in by_trust(&header.locators) {
        match super::layout::read_locator(store, entry, index, header_offset_bytes, file_bytes) {
            Ok(Ok(Some(LocatorData::Relative(path)))) => drop(link.relative_path.get_or_insert(path)),
            Ok(Ok(Some(LocatorData::Absolute(path)))) => drop(link.absolute_path.get_or_insert(path)),
            // The user can name folders in which the parent is looked for by its name.
            _ => {}
        }
    }
    link
}

fn info(
    footer: Option<&Footer>,
    disk_type: DiskType,
    size_bytes: u64,
    block_bytes: u64,
    parent: Option<ParentLink>,
    remarks: Vec<String>,
) -> ImageInfo {
    ImageInfo {
        creator: footer.map(|footer| footer.creator_app.escape_ascii().to_string()).unwrap_or_default(),
        disk_id: footer.map(|footer| footer.unique_id),
        linkage_id: footer.map(|footer| LinkageId::from_uuid(footer.unique_id)),
        created_seconds: footer.map(|footer| footer.created_seconds),
        parent,
        remarks,
        ..ImageInfo::new(Format::Vhd, disk_type, size_bytes, block_bytes)
    }
}
