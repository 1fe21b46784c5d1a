//! Finds the descriptor of a VMDK: a file of its own, or embedded in the first sparse extent.
//!
//! ```text
//!   first bytes ─┬─ "# Disk DescriptorFile"  ─▶ the file is the descriptor
//!                ├─ "KDMV" ─▶ header (or its footer) ─▶ descriptor behind the header
//!                └─ "KDMV" without descriptor, "COWD", SESPARSE ─▶ an extent without a descriptor
//! ```
//!
//! A header with a capacity belongs to an extent, so the first sparse extent of an embedded
//! descriptor is the file itself, whatever its name is there. A header whose capacity is 0 only
//! holds a descriptor.

use super::{corrupt, damaged};
use crate::{ImageError, LinkageId, ParentLink, Reference, ReferenceKind, Result};
use diskwright_format::vmdk::{
    Access, DESCRIPTOR_MAX_BYTES, Descriptor, Extent, ExtentKind, MappedDevice, Marker, MarkerKind, NO_PARENT, Placing,
    SECTOR_BYTES, SPARSE_HEADER_BYTES, SparseHeader, is_descriptor,
};
use diskwright_store::{DeviceId, Store};

/// Key of the second identity of the parent that a child accepts, while a merge is under way. The
/// line is a comment for other programs: it must lie in the first sector, beside the identity,
/// where no program expects a key that it does not know.
pub(super) const LINKAGE2_KEY: &str = "#parentCID2";
/// Magic of a redo log of ESX.
pub(super) const COWD_MAGIC: &[u8] = b"COWD";
/// Magic of an SESPARSE extent.
pub(super) const SESPARSE_MAGIC: &[u8] = &[0xbe, 0xba, 0xfe, 0xca, 0, 0, 0, 0];
/// Zeros that may follow the end of a stream, in bytes.
const PADDING_MAX_BYTES: u64 = 64 << 10;

/// What the first file of an image is.
#[derive(Debug, Clone)]
pub(super) struct Head {
    /// `None` for an extent without a descriptor.
    pub text: Option<Descriptor>,
    /// Whether the file is itself the first sparse extent.
    pub is_extent: bool,
    /// What the descriptor records of the device that it names.
    pub device: Option<DeviceId>,
}

/// Reads up to `most` bytes at `offset_bytes`: fewer at the end of the file.
pub(super) fn read_some(store: &dyn Store, offset_bytes: u64, most: usize, doing: &'static str) -> Result<Vec<u8>> {
    let len_bytes = len_of(store)?;
    let there = len_bytes.saturating_sub(offset_bytes).min(most as u64) as usize;
    let mut bytes = vec![0; there];
    store.read_at(&mut bytes, offset_bytes).map_err(|error| ImageError::io(doing, store, offset_bytes, error))?;
    Ok(bytes)
}

/// The identity of a device as the layers above compare it.
pub(super) fn id_of(device: MappedDevice) -> DeviceId {
    let MappedDevice { size_bytes, serial, wwn } = device;
    DeviceId { size_bytes, serial, wwn }
}

pub(super) fn len_of(store: &dyn Store) -> Result<u64> {
    store.len_bytes().map_err(|error| ImageError::io("get the length of the file", store, 0, error))
}

impl Head {
    /// Reads the descriptor, if there is one.
    ///
    /// # Errors
    /// `NotAnImage`; `Corrupt` for a header or a descriptor that contradicts the specification;
    /// `Io`.
    pub fn read(store: &dyn Store) -> Result<Self> {
        let first = read_some(store, 0, SPARSE_HEADER_BYTES, "read the start of the image")?;
        if is_descriptor(&first) {
            let len_bytes = len_of(store)?;
            if len_bytes > DESCRIPTOR_MAX_BYTES {
                let found = format!("a text of {len_bytes} bytes");
                return Err(corrupt(store, "descriptor", 0, found, "at most 1 MiB"));
            }
            let bytes = read_some(store, 0, DESCRIPTOR_MAX_BYTES as usize, "read the descriptor")?;
            let descriptor = Descriptor::parse(&bytes, 0).map_err(|error| damaged(store, &error))?;
            return Self::of(descriptor, false, store);
        }
        if first.starts_with(COWD_MAGIC) || first.starts_with(SESPARSE_MAGIC) {
            return Ok(Self { text: None, is_extent: true, device: None });
        }
        if !SparseHeader::has_magic(&first) {
            return Err(ImageError::NotAnImage {
                path: store.name().to_owned(),
                found: "neither a descriptor nor a sparse extent at the start of the file".into(),
                expected: "\"# Disk DescriptorFile\", \"KDMV\", \"COWD\" or the header of an SESPARSE extent".into(),
            });
        }
        let header = SparseHeader::parse(&first, 0).map_err(|error| damaged(store, &error))?;
        let is_extent = header.capacity_sectors > 0;
        if header.descriptor_sector == 0 || header.descriptor_sectors == 0 {
            if !is_extent {
                let found = "a capacity of 0 and no descriptor";
                return Err(corrupt(store, "sparse extent header", 12, found, "a capacity or a descriptor"));
            }
            return Ok(Self { text: None, is_extent, device: None });
        }
        let offset_bytes = header.descriptor_sector.saturating_mul(SECTOR_BYTES);
        let space_bytes = header.descriptor_sectors.saturating_mul(SECTOR_BYTES).min(DESCRIPTOR_MAX_BYTES);
        let bytes = read_some(store, offset_bytes, space_bytes as usize, "read the descriptor")?;
        let descriptor = Descriptor::parse(&bytes, offset_bytes).map_err(|error| damaged(store, &error))?;
        Self::of(descriptor, is_extent, store)
    }

    fn of(descriptor: Descriptor, is_extent: bool, store: &dyn Store) -> Result<Self> {
        let device = MappedDevice::in_descriptor(&descriptor).map_err(|error| damaged(store, &error))?;
        Ok(Self { text: Some(descriptor), is_extent, device: device.map(id_of) })
    }

    /// The extents of the disk. An extent without a descriptor is the whole disk.
    pub fn extents(&self) -> &[Extent] {
        self.text.as_ref().map_or(&[], |text| &text.extents)
    }

    /// The index of the extent that is the first file itself.
    pub fn own_extent(&self) -> Option<usize> {
        let is_sparse = |extent: &Extent| extent.kind == ExtentKind::Sparse;
        self.extents().iter().position(is_sparse).filter(|_| self.is_extent)
    }

    /// The extents that have a further file, and that file.
    pub fn references(&self) -> impl Iterator<Item = (usize, Reference)> {
        let own = self.own_extent();
        self.extents().iter().enumerate().filter(move |(index, _)| Some(*index) != own).filter_map(|(index, extent)| {
            let kind = match extent.kind {
                ExtentKind::Flat => ReferenceKind::FlatExtent,
                ExtentKind::Sparse => ReferenceKind::SparseExtent,
                ExtentKind::Zero => return None,
                ExtentKind::Vmfs => ReferenceKind::VmfsExtent,
                ExtentKind::VmfsSparse => ReferenceKind::VmfsSparseExtent,
                ExtentKind::VmfsRdm | ExtentKind::VmfsRaw => ReferenceKind::Device,
                ExtentKind::SeSparse => ReferenceKind::SeSparseExtent,
            };
            // A file that no one may use is not opened.
            let name = extent.file.clone().filter(|_| extent.access != Access::None)?;
            let device = self.device.clone();
            Some((index, Reference { name, kind, is_written: extent.access == Access::ReadWrite, device }))
        })
    }

    /// The link to the parent; `None` without one.
    pub fn parent_link(&self) -> Option<ParentLink> {
        link_of(self.text.as_ref()?)
    }
}

/// The link to the parent that a descriptor records.
pub(super) fn link_of(descriptor: &Descriptor) -> Option<ParentLink> {
    if descriptor.parent_cid == NO_PARENT {
        return None;
    }
    let hint = descriptor.parent_hint().unwrap_or_default().to_owned();
    let is_absolute = ParentLink::is_absolute(&hint);
    let linkage2 = descriptor.in_comment(LINKAGE2_KEY).and_then(|text| u32::from_str_radix(text, 16).ok());
    Some(ParentLink {
        relative_path: Some(hint.clone()).filter(|hint| !is_absolute && !hint.is_empty()),
        absolute_path: Some(hint.clone()).filter(|_| is_absolute),
        name: Some(hint).filter(|hint| !hint.is_empty()),
        linkage: Some(LinkageId::Cid(descriptor.parent_cid)),
        linkage2: linkage2.map(LinkageId::Cid),
        ..ParentLink::default()
    })
}

/// The parent that the descriptor of a disk without `parentCID` names all the same.
pub(super) fn stray_parent(descriptor: &Descriptor) -> Option<&str> {
    descriptor.parent_hint().filter(|hint| descriptor.parent_cid == NO_PARENT && !hint.is_empty())
}

/// The header of a sparse extent. Where it says that the directory is at the end, the numbers are
/// those of the footer.
pub(super) fn header_of(store: &dyn Store) -> Result<SparseHeader> {
    let first = read_some(store, 0, SPARSE_HEADER_BYTES, "read the header of the extent")?;
    let header = SparseHeader::parse(&first, 0).map_err(|error| damaged(store, &error))?;
    if header.directory == Placing::InFooter { footer_of(store) } else { Ok(header) }
}

/// The footer of a stream, with the place of its directory.
pub(super) fn footer_of(store: &dyn Store) -> Result<SparseHeader> {
    let len_bytes = len_of(store)?;
    let missing = |found: &str| corrupt(store, "footer of a stream", len_bytes, found, "a marker, a footer, the end");
    // A copy may have been padded with zeros.
    let tail =
        read_some(store, len_bytes.saturating_sub(PADDING_MAX_BYTES), PADDING_MAX_BYTES as usize, "read the footer")?;
    let sectors: Vec<&[u8]> = tail.rchunks_exact(SECTOR_BYTES as usize).collect();
    let is_footer = |at: usize| {
        let is = |sector: &[u8], kind| matches!(Marker::parse(sector), Some(Marker::Other { kind: found, .. }) if found == kind);
        sectors.get(at + 1).is_some_and(|marker| is(marker, MarkerKind::Footer)) && SparseHeader::has_magic(sectors[at])
    };
    let Some(at) = (0..sectors.len()).find(|&at| is_footer(at)) else {
        return Err(missing("no footer: was the file copied completely?"));
    };
    let offset_bytes = len_bytes - (at as u64 + 1) * SECTOR_BYTES;
    let footer = SparseHeader::parse(sectors[at], offset_bytes).map_err(|error| damaged(store, &error))?;
    match footer.directory {
        Placing::Sector(_) => Ok(footer),
        Placing::InFooter => Err(missing("a footer that does not say where the directory is")),
    }
}
