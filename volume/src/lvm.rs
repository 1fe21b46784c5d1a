//! LVM2: the linear logical volumes of a physical volume.
//!
//! ```text
//!   label (checksum) ─▶ physical volume: UUID, metadata areas
//!   metadata area (checksum) ─▶ text (checksum)
//!   text.rs     text ─▶ sections, numbers, strings, lists
//!   group.rs    volume group ─▶ logical volumes, each with its extents or why it is left alone
//! ```
//!
//! Only groups with one physical volume are seen through: the metadata of the others may be newer.
//! All metadata areas must hold the same text. Extents that no logical volume has count as used.

mod group;
mod text;

use crate::{
    bytes::{get, le32, le64},
    read::Window,
    reason::LeftAlone,
};
use group::SECTOR_BYTES;
use std::ops::Range;

pub(crate) use group::Logical;

/// A label may be in any of the first sectors.
const LABEL_SECTORS: u64 = 4;
/// Maximum bytes of metadata. A metadata area has 1 MiB by default.
const TEXT_BYTES_MAX: u64 = 4 << 20;
const AREAS_MAX: usize = 8;
const AREA_MAGIC: &[u8; 16] = b" LVM2 x[5A%r0N*>";
/// Flag of a metadata area that is not in use.
const IGNORED: u32 = 1;

/// Fields of the label.
struct Label {
    /// UUID of the physical volume: 32 letters and digits.
    uuid: [u8; 32],
    /// Size of the physical volume.
    size_bytes: u64,
    areas: Vec<Range<u64>>,
}

/// Whether a label of LVM2 is in the volume.
pub(crate) fn find(window: &Window<'_>) -> bool {
    place(window).is_some()
}

/// UUID of the physical volume, as LVM writes it.
pub(crate) fn uuid(window: &Window<'_>) -> Option<String> {
    let label = Label::read(window).ok()?;
    let mut text = String::from_utf8_lossy(&label.uuid).into_owned();
    for at in [26, 22, 18, 14, 10, 6] {
        if text.is_char_boundary(at) {
            text.insert(at, '-');
        }
    }
    Some(text)
}

/// The logical volumes of the physical volume.
pub(crate) fn logical_volumes(window: &Window<'_>) -> Result<Vec<Logical>, LeftAlone> {
    let label = Label::read(window)?;
    let metadata = metadata(window, &label)?;
    let root = text::parse(&metadata)?;
    group::logical_volumes(&root, &label.uuid, &label.areas, window.size_bytes())
}

/// The text that all metadata areas hold.
fn metadata(window: &Window<'_>, label: &Label) -> Result<Vec<u8>, LeftAlone> {
    let mut metadata: Option<Vec<u8>> = None;
    for area in &label.areas {
        let Some(found) = read_area(window, area)? else { continue };
        if metadata.as_ref().is_some_and(|before| *before != found) {
            return Err(LeftAlone::damaged("the metadata areas of LVM do not agree"));
        }
        metadata = Some(found);
    }
    metadata.ok_or_else(|| LeftAlone::damaged("the physical volume of LVM has no metadata"))
}

/// First byte after the physical volume, by the size in its label.
pub(crate) fn end_bytes(window: &Window<'_>) -> Result<u64, LeftAlone> {
    let label = Label::read(window)?;
    let metadata = metadata(window, &label)?;
    let root = text::parse(&metadata)?;
    let extents_end = group::end_bytes(&root, &label.uuid, &label.areas, window.size_bytes())?;
    let areas_end = label.areas.iter().map(|area| area.end).max().unwrap_or(0);
    let end = label.size_bytes.max(extents_end).max(areas_end);
    if end > window.size_bytes() {
        return Err(LeftAlone::damaged(format!("the physical volume of LVM has {end} bytes, more than its place")));
    }
    Ok(end)
}

/// First byte of the label.
fn place(window: &Window<'_>) -> Option<u64> {
    (0..LABEL_SECTORS)
        .map(|sector| sector * SECTOR_BYTES)
        .find(|at| window.array::<32>(*at).is_some_and(|head| head[..8] == *b"LABELONE" && head[24..] == *b"LVM2 001"))
}

impl Label {
    fn read(window: &Window<'_>) -> Result<Self, LeftAlone> {
        let at = place(window).ok_or_else(|| LeftAlone::damaged("no label of LVM"))?;
        let raw = window.bytes(at, SECTOR_BYTES as usize)?;
        if crc(&raw[20..]) != le32(&raw, 16) || le64(&raw, 8) != at / SECTOR_BYTES {
            return Err(LeftAlone::damaged("the checksum of LVM's label does not match"));
        }
        // The header of the physical volume: UUID, size, then two lists of areas, each with an
        // empty one at its end: data, metadata.
        let header = raw.get(le32(&raw, 20) as usize..).unwrap_or_default();
        let mut areas =
            header.get(40..).unwrap_or_default().chunks_exact(16).map(|area| (le64(area, 0), le64(area, 8)));
        let data = areas.by_ref().take_while(|area| *area != (0, 0)).count();
        let metadata: Vec<(u64, u64)> = areas.take_while(|area| *area != (0, 0)).collect();
        if data != 1 || metadata.is_empty() || metadata.len() > AREAS_MAX {
            return Err(LeftAlone::unsupported(format!(
                "a physical volume of LVM with {data} data areas and {} metadata areas",
                metadata.len()
            )));
        }
        let areas = metadata.into_iter().map(|(start, len)| match start.checked_add(len) {
            Some(end) if end <= window.size_bytes() && len > SECTOR_BYTES => Ok(start..end),
            _ => Err(LeftAlone::damaged("a metadata area of LVM reaches beyond the volume")),
        });
        let size_bytes = le64(header, 32);
        Ok(Self { uuid: get(header, 0), size_bytes, areas: areas.collect::<Result<_, _>>()? })
    }
}

/// The text in a metadata area; `None` if the area is not in use.
fn read_area(window: &Window<'_>, area: &Range<u64>) -> Result<Option<Vec<u8>>, LeftAlone> {
    let raw = window.bytes(area.start, SECTOR_BYTES as usize)?;
    let wrong = |what: &str| LeftAlone::damaged(format!("metadata area of LVM: {what}"));
    if raw[4..20] != *AREA_MAGIC || crc(&raw[4..]) != le32(&raw, 0) || le32(&raw, 20) != 1 {
        return Err(wrong("its header is not valid"));
    }
    let area_bytes = area.end - area.start;
    if le64(&raw, 24) != area.start || le64(&raw, 32) != area_bytes {
        return Err(wrong("its header names another place"));
    }
    let (offset_bytes, len_bytes) = (le64(&raw, 40), le64(&raw, 48));
    let (checksum, flags) = (le32(&raw, 56), le32(&raw, 60));
    if flags & IGNORED != 0 {
        return Ok(None);
    }
    if le64(&raw, 64) != 0 {
        return Err(wrong("a change was begun and not finished: run vgscan"));
    }
    if !(SECTOR_BYTES..area_bytes).contains(&offset_bytes)
        || len_bytes == 0
        || len_bytes > TEXT_BYTES_MAX.min(area_bytes - SECTOR_BYTES)
    {
        return Err(wrong("its text has an impossible place"));
    }
    // The text goes on behind the header where it reaches the end of the area.
    let first = len_bytes.min(area_bytes - offset_bytes);
    let mut text = window.bytes(area.start + offset_bytes, first as usize)?;
    text.extend(window.bytes(area.start + SECTOR_BYTES, (len_bytes - first) as usize)?);
    if crc(&text) != checksum {
        return Err(wrong("the checksum of its text does not match"));
    }
    Ok(Some(text))
}

/// CRC-32 as LVM computes it: with an initial value of its own, and without the final inversion.
fn crc(bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(!0xf597_a6cf);
    hasher.update(bytes);
    !hasher.finalize()
}
