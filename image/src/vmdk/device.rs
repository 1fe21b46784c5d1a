//! VMDKs that map a block device: raw device mappings of ESX, and the disks of Workstation on a
//! device.
//!
//! ```text
//!   kind                         extents                                names the device, by path
//!   fullDevice                   RW n FLAT "/dev/disk/by-id/..." 0          the descriptor
//!   partitionedDevice            RW 2048 FLAT "x-pt.vmdk" 0                 the descriptor
//!                                RW n FLAT "/dev/disk/by-id/..." 2048
//!                                RW n ZERO                (a partition that is not shown)
//!   vmfsRawDeviceMap             RW n VMFSRDM "x-rdm.vmdk"                  x-rdm.vmdk
//!   vmfsPassthroughRawDeviceMap  RW n VMFSRDM "x-rdmp.vmdk"                 x-rdmp.vmdk
//! ```
//!
//! The descriptors are VMware's. Of the mapping file only the name is: ESXi's is a pointer inside
//! VMFS, which cannot be resolved on another system, so the mapping file is a text of ours
//! ([`Mapping`]) with an identity of its own. Workstation and VirtualBox read the descriptors of
//! the first two kinds. The caller opens the device, and refuses one that is not the recorded one
//! ([`Reference::device`]).
//!
//! Virtual and physical compatibility move the same bytes: a flat part has no table, and requests
//! go to the device as they are. They differ in what may be done with the disk. A virtual mapping
//! takes snapshots by redo logs; a physical one is refused as a parent
//! ([`ImageInfo::refusal_as_parent`]), because on ESX its guest talks to the device. Commands of
//! SCSI are not passed through here.
//!
//! The copy of a partition table lies in `x-pt.vmdk`, so a guest can read and write a table without
//! changing the device's own. Sectors of partitions that are not shown read as zeros, and writes to
//! them fail.
//!
//! [`ImageInfo::refusal_as_parent`]: crate::ImageInfo::refusal_as_parent

use super::{
    bad, damaged,
    text::{id_of, read_some},
};
use crate::{
    CreateOptions, DeviceOptions, DevicePart, DiskType, ImageError, PartSource, Reference, ReferenceKind, Result,
    devices::PHYSICAL_MAPPING as PHYSICAL,
};
use diskwright_format::vmdk::{Access, Extent, ExtentKind, MAPPING_MAX_BYTES, MappedDevice, Mapping, SECTOR_BYTES};
use diskwright_store::{DeviceId, FileRange, Store};
use std::sync::Arc;
use uuid::Uuid;

/// The kinds that map a device: as VMware writes them, and a short name.
pub(crate) const DEVICE_SUBFORMATS: [(&str, &str); 4] = [
    ("fullDevice", "device"),
    ("partitionedDevice", "partitions"),
    ("vmfsRawDeviceMap", "rdm-virtual"),
    (PHYSICAL, "rdm-physical"),
];

/// What is to be made.
#[derive(Debug)]
pub(super) struct DevicePlan<'a> {
    pub subformat: &'static str,
    pub extents: Vec<Extent>,
    /// The further file with its contents: the mapping, or the copies of partition tables.
    file: Option<(String, Contents<'a>)>,
    device: &'a DeviceOptions,
}

#[derive(Debug)]
enum Contents<'a> {
    Mapping,
    Tables(Vec<&'a [u8]>),
}

/// The kind of this name, in either spelling.
pub(super) fn kind_of(name: &str) -> Option<&'static str> {
    let is =
        |(long, short): &&(&'static str, &str)| long.eq_ignore_ascii_case(name) || short.eq_ignore_ascii_case(name);
    DEVICE_SUBFORMATS.iter().find(is).map(|(long, _)| *long)
}

impl<'a> DevicePlan<'a> {
    /// The plan for a kind that [`kind_of`] knows. `stem` is the name of the image without its
    /// extension.
    pub fn of(subformat: &'static str, stem: &str, options: &'a CreateOptions) -> Result<Self> {
        let Some(device) = &options.own.device else {
            let what = format!("a VMDK of the kind {subformat} maps a device, and none is named");
            return Err(bad(what, "name it with `CreateRequest::device`"));
        };
        if options.disk_type != DiskType::Fixed {
            let what = format!("a {} VMDK of the kind {subformat}", options.disk_type);
            return Err(bad(what, "leave out `CreateRequest::disk_type`: a mapping of a device is fixed"));
        }
        if !device.path.starts_with('/') || device.path.chars().any(|c| c == '"' || c.is_control()) {
            let what = format!("the path {:?} of the device cannot be written into a descriptor", device.path);
            return Err(bad(what, "use an absolute path without quotation marks and control characters"));
        }
        let sectors = options.size_bytes / SECTOR_BYTES;
        if options.size_bytes != device.id.size_bytes || sectors * SECTOR_BYTES != options.size_bytes {
            let what = format!("a disk of {} bytes on a device of {}", options.size_bytes, device.id.size_bytes);
            return Err(bad(what, "leave out `CreateRequest::size_bytes`: the disk is as large as the device"));
        }
        let is_parted = subformat == "partitionedDevice";
        if is_parted == device.parts.is_empty() {
            let what = format!("{} partitions in a VMDK of the kind {subformat}", device.parts.len());
            return Err(bad(what, "name partitions with `CreateRequest::partitions` for the kind partitionedDevice"));
        }
        let extent = |sectors, kind, file: &str, first_sector| Extent {
            access: Access::ReadWrite,
            sectors,
            kind,
            file: Some(file.to_owned()),
            first_sector,
        };
        let mapped =
            |name: String| (vec![extent(sectors, ExtentKind::VmfsRdm, &name, 0)], Some((name, Contents::Mapping)));
        let (extents, file) = match subformat {
            "partitionedDevice" => parted(device, format!("{stem}-pt.vmdk"), sectors)?,
            "vmfsRawDeviceMap" => mapped(format!("{stem}-rdm.vmdk")),
            PHYSICAL => mapped(format!("{stem}-rdmp.vmdk")),
            _ => (vec![extent(sectors, ExtentKind::Flat, &device.path, 0)], None),
        };
        Ok(Self { subformat, extents, file, device })
    }

    /// The name of the further file.
    pub fn further_file(&self) -> Option<String> {
        self.file.as_ref().map(|(name, _)| name.clone())
    }

    /// Entries for the disk database, where the descriptor names the device itself.
    pub fn entries(&self) -> Vec<(String, String)> {
        match &self.file {
            Some((_, Contents::Mapping)) => Vec::new(),
            _ => mapped_device_of(&self.device.id).entries(),
        }
    }

    /// Writes the further file, durably.
    pub fn write_further(&self, store: &dyn Store) -> Result<()> {
        let failed = |error| ImageError::io("write the file beside the descriptor", store, 0, error);
        match &self.file {
            None => return Ok(()),
            Some((_, Contents::Mapping)) => {
                let identity = mapped_device_of(&self.device.id);
                let mapping = Mapping { id: Uuid::new_v4(), device: self.device.path.clone(), identity };
                store.write_at(mapping.to_text().as_bytes(), 0).map_err(failed)?;
            }
            Some((_, Contents::Tables(tables))) => {
                let mut at = 0;
                for table in tables {
                    let range = FileRange { offset_bytes: at, len_bytes: table.len() as u64 };
                    store.allocate(range).and_then(|()| store.write_at(table, at)).map_err(failed)?;
                    at += range.len_bytes;
                }
            }
        }
        store.sync_data().map_err(failed)
    }
}

/// Extents, and the further file if there is one.
type Planned<'a> = (Vec<Extent>, Option<(String, Contents<'a>)>);

/// The extents of a disk that shows some partitions of a device.
fn parted(device: &DeviceOptions, name: String, sectors: u64) -> Result<Planned<'_>> {
    let (mut at, mut in_copy, mut tables, mut extents) = (0_u64, 0, Vec::new(), Vec::new());
    for DevicePart { sectors, shows } in &device.parts {
        let mut extent = Extent {
            access: Access::ReadWrite,
            sectors: *sectors,
            kind: ExtentKind::Flat,
            file: None,
            first_sector: at,
        };
        match shows {
            PartSource::Device => extent.file = Some(device.path.clone()),
            PartSource::Copy(bytes) if bytes.len() as u64 == sectors * SECTOR_BYTES => {
                extent.file = Some(name.clone());
                extent.first_sector = in_copy;
                in_copy += sectors;
                tables.push(&bytes[..]);
            }
            PartSource::Copy(bytes) => {
                return Err(bad(format!("a copy of {} bytes for {sectors} sectors", bytes.len()), "copy all of them"));
            }
            PartSource::Nothing => (extent.kind, extent.first_sector) = (ExtentKind::Zero, 0),
        }
        extents.push(extent);
        at = at.saturating_add(*sectors);
    }
    if at != sectors {
        return Err(bad(format!("parts of {at} sectors on a device of {sectors}"), "let the parts cover the device"));
    }
    Ok((extents, Some((name, Contents::Tables(tables)))))
}

fn mapped_device_of(id: &DeviceId) -> MappedDevice {
    let DeviceId { size_bytes, serial, wwn } = id.clone();
    MappedDevice { size_bytes, serial, wwn }
}

/// Reads the mapping file that an image names as a [`ReferenceKind::Device`]: which device it
/// stands for.
///
/// # Errors
/// `Corrupt` for a file that is not a mapping of this program; `Io`.
pub fn mapped_device(store: &dyn Store, is_written: bool) -> Result<Reference> {
    let bytes = read_some(store, 0, MAPPING_MAX_BYTES as usize + 1, "read the raw device mapping")?;
    let Mapping { device, identity, .. } = Mapping::parse(&bytes).map_err(|error| damaged(store, &error))?;
    Ok(Reference { name: device, kind: ReferenceKind::Device, is_written, device: Some(id_of(identity)) })
}

/// Creates an image that maps a device, in empty stores. Durable on return.
pub(super) fn create(stores: &[Arc<dyn Store>], plan: &DevicePlan<'_>, text: &str) -> Result<()> {
    let (Some(first), further) = (stores.first(), &stores[1.min(stores.len())..]) else {
        return Err(bad("no file for the descriptor", "give the files it needs"));
    };
    if further.len() != usize::from(plan.file.is_some()) {
        return Err(bad(format!("{} files for {}", stores.len(), plan.subformat), "give the files it needs"));
    }
    further.iter().try_for_each(|store| plan.write_further(&**store))?;
    let store = &**first;
    let written = store.write_at(text.as_bytes(), 0).and_then(|()| store.sync_data());
    written.map_err(|error| ImageError::io("write the descriptor", store, 0, error))
}
