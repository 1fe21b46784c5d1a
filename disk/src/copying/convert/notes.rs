//! Warnings about a new disk: a changed sector size, and a size that Azure refuses.

use crate::Disk;
use diskwright_image::{DiskType, Format, ImageInfo};
use diskwright_store::{BlockDevice, Geometry};
use std::path::Path;

/// Azure accepts a fixed VHD only if the size of its disk is a multiple of this (its file is 512
/// bytes longer).
const AZURE_UNIT_BYTES: u64 = 1 << 20;

/// Warnings about the copy `name` of a disk with the geometry `source`.
pub(crate) fn of_copy(source: Geometry, name: &Path, copy: &Disk) -> Vec<String> {
    let mut notes = Vec::new();
    let (from, to) = (source.logical_sector_bytes, copy.geometry().logical_sector_bytes);
    if from != to {
        let why =
            copy.layers().first().map_or("as requested", |layer| layer.image.info().format.driver().sectors_because);
        notes.push(format!(
            "{}: sectors of {from} bytes became sectors of {to} ({why}); partition tables and some file systems made for {from} will not be recognised: for a guest that boots from this disk use a VHDX with {from}-byte sectors",
            name.display()
        ));
    }
    notes.extend(copy.layers().first().and_then(|layer| size_note(name, layer.image.info())));
    notes
}

/// A warning if Azure refuses the size. Only for fixed VHDs, the only type that Azure accepts.
pub fn size_note(name: &Path, made: &ImageInfo) -> Option<String> {
    let is_for_azure = made.format == Format::Vhd && made.disk_type == DiskType::Fixed;
    if !is_for_azure || made.size_bytes.is_multiple_of(AZURE_UNIT_BYTES) {
        return None;
    }
    Some(format!(
        "{}: its size of {} bytes is not a multiple of 1 MiB, and Azure refuses such a VHD; for Azure create a disk of {} bytes (Hyper-V accepts both)",
        name.display(),
        made.size_bytes,
        made.size_bytes.next_multiple_of(AZURE_UNIT_BYTES)
    ))
}
