//! What can still be known of a damaged hosted sparse extent: monolithicSparse, streamOptimized, or
//! one file of a disk in several files.
//!
//! ```text
//!   header, or the footer of a stream ─▶ capacity, grain, directories
//!   descriptor, whole or by its lines ─▶ parent; capacity without a header
//!      no header: the directories by their contents    salvage_tables.rs
//!   both directories ─▶ both copies of each grain table ─▶ the grains on which they agree
//!   stream: markers, which name their grain             salvage_stream.rs
//! ```
//!
//! A descriptor apart from its extents has no tables. Each extent is rescued by itself.

use super::{
    salvage_stream,
    salvage_tables::{self, Extent},
    text::{COWD_MAGIC, SESPARSE_MAGIC, footer_of, link_of},
};
use crate::{
    Format, ImageError, ImageInfo, LinkageId, ParentLink, Result,
    salvage::{
        Bitmaps, BlockTable, Fault, ParentRecord, SalvageHints, Salvaged, file_length, joined, read_what_can_be,
    },
};
use diskwright_format::vmdk::{
    DESCRIPTOR_MAX_BYTES, Descriptor, Fragments, NO_PARENT, Placing, SECTOR_BYTES, SPARSE_HEADER_BYTES, SparseHeader,
    is_descriptor,
};
use diskwright_store::Store;
use std::sync::Arc;

/// Most grains of an extent: 128 TiB in grains of 64 KiB.
const GRAINS_MAX: u64 = 1 << 31;
/// Where all programs put an embedded descriptor, and its usual space.
const USUAL_TEXT: (u64, u64) = (SECTOR_BYTES, 20 * SECTOR_BYTES);

/// Reads what can still be known of a damaged VMDK.
pub(crate) fn salvage(store: Arc<dyn Store>, hints: &SalvageHints) -> Result<Salvaged> {
    let file_bytes = file_length(&*store)?;
    let mut first = [0; SPARSE_HEADER_BYTES];
    let is_read = read_what_can_be(&*store, 0, &mut first).is_empty();
    refuse(&*store, &first)?;
    let mut remarks = Vec::new();
    let header = SparseHeader::parse(&first, 0).ok().filter(|header| is_read && header.capacity_sectors > 0);
    if header.is_none() {
        remarks.push("The header is damaged.".to_owned());
    }
    let text = Text::read(&*store, header.as_ref(), &mut remarks);
    let header = with_footer(&*store, header, &mut remarks);
    let parent_record = text.parent_record(hints);
    let extent = Extent::new(&*store, header, &text.lines, file_bytes, hints, &mut remarks)?;
    let grains = extent.grains();
    if grains > GRAINS_MAX {
        return Err(ImageError::Unsupported {
            path: store.name().to_owned(),
            what: format!("rescuing an extent of {grains} grains"),
            hint: format!("at most {GRAINS_MAX} are; if its tables are sound, convert it"),
        });
    }
    let mut table = BlockTable::new(grains, extent.grain_bytes);
    let mut doubts = Vec::new();
    let mut tables = vec![0..SECTOR_BYTES, text.range.clone()];
    if extent.directories.is_empty() {
        remarks.push("The grain directory was not found.".into());
        doubts.push("the grain directory was not found".to_owned());
        table.lose(&*store, 0, grains, Fault::NoTable)?;
    } else {
        tables.extend(salvage_tables::read(&extent, joined(tables.clone()), &mut table)?);
    }
    tables.retain(|range| range.start < range.end);
    let unpack = extent.is_compressed.then(|| salvage_stream::unpacker(extent.grain_bytes));
    let info = ImageInfo {
        subformat: text.whole.as_ref().map(|text| text.create_type.clone()),
        linkage_id: text.whole.as_ref().map(|text| LinkageId::Cid(text.cid)),
        parent: text.parent().filter(|_| parent_record == ParentRecord::Child),
        remarks,
        ..ImageInfo::new(Format::Vmdk, parent_record.disk_type(), extent.capacity_bytes, extent.grain_bytes)
    };
    let mut salvaged = Salvaged {
        info,
        store: Arc::clone(&store),
        file_bytes,
        parent_record,
        table,
        bitmaps: Bitmaps::None,
        unpack,
        tables: joined(tables),
        payload_alignment_bytes: SECTOR_BYTES,
        doubts,
        doubts_bitmaps: false,
    };
    if extent.is_compressed {
        salvage_stream::place(&mut salvaged)?;
    }
    Ok(salvaged)
}

/// What has no tables, or other ones.
fn refuse(store: &dyn Store, first: &[u8]) -> Result<()> {
    let (what, hint) = if is_descriptor(first) {
        (
            "the rescue of a VMDK by its descriptor",
            "rescue each file that it names: sparse ones as VMDK, flat ones as raw disks",
        )
    } else if first.starts_with(COWD_MAGIC) || first.starts_with(SESPARSE_MAGIC) {
        ("the rescue of a VMDK of the ESX kinds COWD and SESPARSE", "convert it with `ConvertOptions::skip_damaged`")
    } else {
        return Ok(());
    };
    Err(ImageError::Unsupported { path: store.name().to_owned(), what: what.into(), hint: hint.into() })
}

/// The header, with the place of the directory from the footer of a stream; or the footer.
fn with_footer(store: &dyn Store, header: Option<SparseHeader>, remarks: &mut Vec<String>) -> Option<SparseHeader> {
    if header.as_ref().is_some_and(|header| header.directory != Placing::InFooter) {
        return header;
    }
    let footer = footer_of(store).ok().filter(|footer| {
        footer.capacity_sectors > 0
            && header.as_ref().is_none_or(|header| {
                (header.capacity_sectors, header.grain_sectors, header.flags)
                    == (footer.capacity_sectors, footer.grain_sectors, footer.flags)
            })
    });
    match (header, footer) {
        (None, None) => None,
        (Some(header), None) => {
            remarks.push("The footer, which says where the grain directory is, was not found.".into());
            Some(header)
        }
        (None, Some(footer)) => {
            remarks.push("The footer of the stream is used in place of the header.".into());
            Some(footer)
        }
        (Some(_), Some(footer)) => Some(footer),
    }
}

/// The descriptor, as far as it can be read.
struct Text {
    whole: Option<Descriptor>,
    lines: Fragments,
    range: std::ops::Range<u64>,
}

impl Text {
    fn read(store: &dyn Store, header: Option<&SparseHeader>, remarks: &mut Vec<String>) -> Self {
        let (at, space) = header.map_or(USUAL_TEXT, |header| {
            let bytes = |sectors: u64| sectors.saturating_mul(SECTOR_BYTES);
            (bytes(header.descriptor_sector), bytes(header.descriptor_sectors))
        });
        if at == 0 || space == 0 {
            return Self { whole: None, lines: Fragments::default(), range: 0..0 };
        }
        let mut bytes = vec![0; space.min(DESCRIPTOR_MAX_BYTES) as usize];
        let is_read = read_what_can_be(store, at, &mut bytes).is_empty();
        let whole = Descriptor::parse(&bytes, at).ok().filter(|text| is_read && text.extents.len() == 1);
        if whole.is_none() {
            remarks.push("The descriptor is damaged; the lines that are whole are read.".into());
        }
        Self { whole, lines: Fragments::of(&bytes), range: at..at.saturating_add(space) }
    }

    fn parent_record(&self, hints: &SalvageHints) -> ParentRecord {
        match self.lines.parent_cid {
            Some(NO_PARENT) => ParentRecord::Alone,
            Some(_) => ParentRecord::Child,
            // Also of a part of a disk in several files: its descriptor says it.
            None => ParentRecord::by_hints(hints),
        }
    }

    fn parent(&self) -> Option<ParentLink> {
        match &self.whole {
            Some(text) => link_of(text),
            None => {
                let mut text = Descriptor::new(0, "", Vec::new(), &[]);
                text.set_parent(Some((self.lines.parent_cid?, self.lines.parent_hint.as_deref()?)));
                link_of(&text)
            }
        }
    }
}
