//! Creates VMDK files.
//!
//! ```text
//!   monolithicSparse      disk.vmdk: a sparse extent with the descriptor in it
//!   monolithicFlat        disk.vmdk: the descriptor; disk-flat.vmdk: the sectors
//!   twoGbMaxExtentSparse  disk.vmdk; disk-s001.vmdk, disk-s002.vmdk ...
//!   twoGbMaxExtentFlat    disk.vmdk; disk-f001.vmdk ...
//!   vmfs                  disk.vmdk; disk-flat.vmdk, as ESX has it on VMFS
//!   vmfsSparse            disk.vmdk; disk-delta.vmdk, a COWD extent as ESX has it on VMFS
//!   a kind over a device  device.rs
//!
//!   sparse extent:  header │ (descriptor) │ redundant directory, tables │ directory, tables │ ...
//!   COWD extent:    header │ directory │ tables │ ...
//! ```
//!
//! All grain tables get their space at once, as other programs expect it: QEMU does not add any.
//! They are holes of the file, so they need none on the disk below. Extents end at 2047 MiB, as
//! those of VMware do. Grains of COWD have one sector, as those of ESX: then no data are copied
//! from the parent.
//!
//! Flat files on VMFS differ by their space alone, and are named as by vmkfstools: `thin` has
//! holes, `zeroedthick` (the default) has reserved space that the file system zeroes when it is
//! first written, and `eagerzeroedthick` was written with zeros. Other flat files are sparse, or
//! with `preallocate` reserved.
//!
//! The part that makes a file an image is written last, after everything else is durable: the
//! descriptor, or the header of a sparse extent with the descriptor in it. So a creation that was
//! interrupted leaves no file that is recognised as a VMDK of this size.

use super::{
    bad,
    device::{self, DevicePlan},
    link,
    new_size::SPLIT_SECTORS,
    text::LINKAGE2_KEY,
};
use crate::{CreateOptions, DiskType, ImageError, LinkageId, ParentLink, Result};
use diskwright_format::vmdk::{
    Access, COWD_HEADER_BYTES, CowdHeader, Descriptor, EXTENTS_MAX, Extent, ExtentKind, GTES_PER_TABLE, Placing,
    SECTOR_BYTES, SparseFlags, SparseHeader, one_sector,
};
use diskwright_store::{FileRange, Store};
use std::{io, sync::Arc};
use uuid::Uuid;

/// The kinds that can be created, the default first.
pub(crate) const SUBFORMATS: &[&str] =
    &["monolithicSparse", "monolithicFlat", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat", VMFS, COWD];

const VMFS: &str = "vmfs";
const COWD: &str = "vmfsSparse";
/// How the space of a flat file is allocated, by the names of vmkfstools; the kind is `vmfs`.
const VMFS_SPACES: [(&str, Space); 4] = [
    (VMFS, Space::Reserved),
    ("zeroedthick", Space::Reserved),
    ("eagerzeroedthick", Space::Written),
    ("thin", Space::Holes),
];

/// Grain of a new image, which every program takes.
const GRAIN_BYTES: u32 = 64 << 10;
const GRAIN_MIN_BYTES: u32 = 8 << 10;
/// Grain of a new COWD extent, and the smallest one.
const COWD_GRAIN_BYTES: u32 = 512;
const GRAIN_MAX_BYTES: u32 = 64 << 20;
/// The entry of the disk database that says that a file has holes.
const THIN: &str = "ddb.thinProvisioned";
/// How much is zeroed by one write.
const ZEROS_BYTES: u64 = 1 << 20;
/// Space for an embedded descriptor in the files of VMware, in sectors.
const DESCRIPTOR_SECTORS: u64 = 20;
/// Heads and sectors of a track of the geometry that the descriptor records, as those of all large
/// SCSI disks.
const HEADS: u64 = 255;
const TRACK_SECTORS: u64 = 63;
/// The first 28 bits of the ids that VMware gives to disks.
const ID_PREFIX: u128 = 0x0600_0C29 << 100;

/// The first line of the extents in a new descriptor.
const EXTENTS_LINE: &str = "# Extent description";

/// How the space of a flat file is allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Space {
    /// Where something is written.
    Holes,
    /// At once. The file system zeroes it when it is first written.
    Reserved,
    /// At once, and written with zeros.
    Written,
}

/// What is to be made.
#[derive(Debug)]
struct Plan {
    subformat: &'static str,
    is_sparse: bool,
    space: Space,
    grain_sectors: u64,
    /// File name and length in sectors of each extent.
    extents: Vec<(String, u64)>,
}

impl Plan {
    fn of(options: &CreateOptions) -> Result<Self> {
        let own = &options.own;
        let usual = if options.disk_type == DiskType::Fixed { SUBFORMATS[1] } else { SUBFORMATS[0] };
        let name = own.subformat.as_deref().unwrap_or(usual);
        let on_vmfs = VMFS_SPACES.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        let space =
            on_vmfs.map_or(if options.preallocate { Space::Reserved } else { Space::Holes }, |(_, space)| *space);
        let known = SUBFORMATS.iter().find(|known| known.eq_ignore_ascii_case(name)).copied();
        let subformat = known.or(on_vmfs.map(|_| VMFS)).ok_or_else(|| {
            let devices = device::DEVICE_SUBFORMATS.map(|(long, _)| long).join(", ");
            let hint = format!(
                "use {}, thin, zeroedthick or eagerzeroedthick; over a device {devices}",
                SUBFORMATS.join(", ")
            );
            bad(format!("a VMDK of the kind {name:?} cannot be created"), hint)
        })?;
        if own.device.is_some() {
            let what = format!("a VMDK of the kind {subformat} maps no device");
            return Err(bad(what, "use a kind over a device, such as fullDevice or vmfsRawDeviceMap"));
        }
        let is_sparse = subformat.ends_with("Sparse");
        if is_sparse == (options.disk_type == DiskType::Fixed) {
            let what = format!("a {} VMDK of the kind {subformat}", options.disk_type);
            return Err(bad(what, "fixed disks are flat, and all others sparse: choose another type or kind"));
        }
        if options.logical_sector_bytes != SECTOR_BYTES as u32 {
            let what = format!("VMDK has sectors of 512 bytes, not {}", options.logical_sector_bytes);
            return Err(bad(what, "use VHDX for a disk with 4096-byte sectors"));
        }
        if options.size_bytes == 0 || !options.size_bytes.is_multiple_of(SECTOR_BYTES) {
            let what =
                format!("a size of {} bytes is not a multiple of the 512-byte sector above 0", options.size_bytes);
            return Err(bad(what, "round it up"));
        }
        if is_sparse && options.preallocate {
            let what = "a sparse VMDK cannot reserve the space of its disk";
            return Err(bad(what, "use the kind monolithicFlat for that"));
        }
        let (usual_bytes, least_bytes) =
            if subformat == COWD { (COWD_GRAIN_BYTES, COWD_GRAIN_BYTES) } else { (GRAIN_BYTES, GRAIN_MIN_BYTES) };
        let grain_bytes = options.block_bytes.unwrap_or(usual_bytes);
        if !is_sparse && options.block_bytes.is_some() {
            return Err(bad("a flat VMDK has no payload blocks", "leave out the block size"));
        }
        if !grain_bytes.is_power_of_two() || !(least_bytes..=GRAIN_MAX_BYTES).contains(&grain_bytes) {
            let what = format!("a grain of {grain_bytes} bytes is not a power of two from {least_bytes} to 64 MiB");
            return Err(bad(what, format!("use {usual_bytes}, which every program takes")));
        }
        let grain_sectors = u64::from(grain_bytes) / SECTOR_BYTES;
        let sectors = options.size_bytes / SECTOR_BYTES;
        let extents = extents(&own.file_name, subformat, sectors)?;
        let plan = Self { subformat, is_sparse, space, grain_sectors, extents };
        if is_sparse && plan.extents.iter().any(|(_, sectors)| plan.last_sector(*sectors) > u64::from(u32::MAX)) {
            let what =
                format!("{} bytes do not fit into one sparse extent, whose tables reach 2 TiB", options.size_bytes);
            return Err(bad(what, "use the kind twoGbMaxExtentSparse or monolithicFlat, or VHDX"));
        }
        Ok(plan)
    }

    /// The end of the last grain of an extent, in sectors.
    fn last_sector(&self, sectors: u64) -> u64 {
        if self.is_cowd() {
            let grains_sectors = sectors.checked_next_multiple_of(self.grain_sectors).unwrap_or(u64::MAX);
            // The numbers of the header have 32 bits.
            let free = u32::try_from(sectors).map_or(u64::MAX, |sectors| self.cowd_header(sectors).free_sector.into());
            return grains_sectors.saturating_add(free);
        }
        let header = self.header(sectors);
        header.overhead_sectors + header.grains().saturating_mul(self.grain_sectors)
    }

    fn is_cowd(&self) -> bool {
        self.subformat == COWD
    }

    /// The header of a COWD extent of this length: the first grain goes behind its tables.
    fn cowd_header(&self, capacity_sectors: u32) -> CowdHeader {
        let directory_sector = (COWD_HEADER_BYTES as u64 / SECTOR_BYTES) as u32;
        let mut header = CowdHeader {
            capacity_sectors,
            grain_sectors: self.grain_sectors as u32,
            directory_sector,
            directory_entries: 0,
            free_sector: 0,
            is_unclean: false,
        };
        header.directory_entries = header.tables() as u32;
        let tables = cowd_tables_sector(&header) + header.tables() * CowdHeader::table_sectors();
        header.free_sector = u32::try_from(tables.next_multiple_of(self.grain_sectors)).unwrap_or(u32::MAX);
        header
    }

    fn is_embedded(&self) -> bool {
        self.subformat == SUBFORMATS[0]
    }

    /// The header of an extent of this length.
    fn header(&self, capacity_sectors: u64) -> SparseHeader {
        let descriptor_sectors = if self.is_embedded() { DESCRIPTOR_SECTORS } else { 0 };
        let mut header = SparseHeader {
            version: 1,
            flags: SparseFlags(SparseFlags::TEXT_CHECK | SparseFlags::REDUNDANT),
            capacity_sectors,
            grain_sectors: self.grain_sectors,
            descriptor_sector: descriptor_sectors.min(1),
            descriptor_sectors,
            table_entries: GTES_PER_TABLE,
            redundant_directory: Some(1 + descriptor_sectors),
            directory: Placing::Sector(0),
            overhead_sectors: 0,
            is_unclean: false,
            compression: 0,
        };
        let copy_sectors = header.directory_sectors() + header.tables() * header.table_sectors();
        let directory = 1 + descriptor_sectors + copy_sectors;
        header.directory = Placing::Sector(directory);
        header.overhead_sectors = (directory + copy_sectors).next_multiple_of(self.grain_sectors);
        header
    }

    fn descriptor(&self, options: &CreateOptions) -> Result<Descriptor> {
        let kind = match self.subformat {
            VMFS => ExtentKind::Vmfs,
            COWD => ExtentKind::VmfsSparse,
            _ if self.is_sparse => ExtentKind::Sparse,
            _ => ExtentKind::Flat,
        };
        let thin = (self.subformat == VMFS && self.space == Space::Holes).then(|| (THIN.to_owned(), "1".to_owned()));
        let extents = self.extents.iter().map(|(file, sectors)| Extent {
            access: Access::ReadWrite,
            sectors: *sectors,
            kind,
            file: Some(file.clone()),
            first_sector: 0,
        });
        let mut descriptor = describe(options, self.subformat, extents.collect(), thin);
        if let Some(parent) = &options.parent {
            name_parent(&mut descriptor, parent)?;
        }
        Ok(descriptor)
    }
}

/// The descriptor of a new disk, with `further` entries of the disk database.
fn describe(
    options: &CreateOptions,
    subformat: &str,
    extents: Vec<Extent>,
    further: impl IntoIterator<Item = (String, String)>,
) -> Descriptor {
    let random = Uuid::new_v4().as_u128();
    let cid = LinkageId::random_cid().cid().unwrap_or_default();
    let id = options.disk_id.unwrap_or_else(|| Uuid::from_u128(ID_PREFIX | random >> 28));
    let cylinders = (options.size_bytes / SECTOR_BYTES / (HEADS * TRACK_SECTORS)).clamp(1, 65535);
    let own = [
        ("ddb.virtualHWVersion", "4".to_owned()),
        ("ddb.geometry.cylinders", cylinders.to_string()),
        ("ddb.geometry.heads", HEADS.to_string()),
        ("ddb.geometry.sectors", TRACK_SECTORS.to_string()),
        ("ddb.adapterType", "lsilogic".to_owned()),
        ("ddb.uuid", id_text(id)),
        ("ddb.longContentID", format!("{:024x}{cid:08x}", random >> 32)),
    ];
    let further: Vec<(String, String)> = further.into_iter().collect();
    let mut database = own.to_vec();
    database.extend(further.iter().map(|(key, value)| (key.as_str(), value.clone())));
    Descriptor::new(cid, subformat, extents, &database)
}

/// The plan for a kind over a device; `None` for other kinds.
fn device_plan(options: &CreateOptions) -> Result<Option<DevicePlan<'_>>> {
    let Some(kind) = options.own.subformat.as_deref().and_then(device::kind_of) else { return Ok(None) };
    let name = checked_name(&options.own.file_name)?;
    DevicePlan::of(kind, name.strip_suffix(".vmdk").unwrap_or(name), options).map(Some)
}

/// Whether a kind is that of a fixed disk.
pub(crate) fn is_flat_kind(name: &str) -> bool {
    let is_on_vmfs = VMFS_SPACES.iter().any(|(known, _)| known.eq_ignore_ascii_case(name));
    is_on_vmfs || name.to_ascii_lowercase().ends_with("flat") || device::kind_of(name).is_some()
}

/// Whether a kind is an extent of ESX's own, with its own sizes of grains.
pub(crate) fn is_esx_kind(name: &str) -> bool {
    [COWD, "seSparse"].iter().any(|known| known.eq_ignore_ascii_case(name))
}

/// The file name of a new image, which its descriptor or a further file's name repeats.
fn checked_name(file_name: &str) -> Result<&str> {
    let name = if file_name.is_empty() { "disk.vmdk" } else { file_name };
    // A quotation mark or a control character would end the name in the text.
    if name.chars().any(|c| c == '"' || c.is_control()) {
        let what = format!("the name {name:?} cannot be written into a descriptor");
        return Err(bad(what, "use a name without quotation marks and control characters"));
    }
    Ok(name)
}

/// Names and lengths of the extents.
fn extents(file_name: &str, subformat: &str, sectors: u64) -> Result<Vec<(String, u64)>> {
    let name = checked_name(file_name)?;
    let stem = name.strip_suffix(".vmdk").unwrap_or(name);
    let letter = match subformat {
        "monolithicSparse" => return Ok(vec![(name.to_owned(), sectors)]),
        "monolithicFlat" | VMFS => return Ok(vec![(format!("{stem}-flat.vmdk"), sectors)]),
        COWD => return Ok(vec![(format!("{stem}-delta.vmdk"), sectors)]),
        "twoGbMaxExtentSparse" => 's',
        _ => 'f',
    };
    let count = sectors.div_ceil(SPLIT_SECTORS);
    if count > EXTENTS_MAX as u64 {
        let what = format!("a disk of {sectors} sectors in extents of 2 GB");
        return Err(bad(what, "use the kind monolithicFlat, or VHDX"));
    }
    let length = |number| SPLIT_SECTORS.min(sectors - number * SPLIT_SECTORS);
    Ok((0..count).map(|number| (format!("{stem}-{letter}{:03}.vmdk", number + 1), length(number))).collect())
}

/// `60 00 C2 9b ... - ...`
fn id_text(id: Uuid) -> String {
    let pairs: Vec<String> = id.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}", pairs[..8].join(" "), pairs[8..].join(" "))
}

fn name_parent(descriptor: &mut Descriptor, parent: &ParentLink) -> Result<()> {
    let link = link::Link::of(parent, None).map_err(|(what, hint)| bad(what, hint))?;
    descriptor.set_parent(Some((link.cid, &link.hint)));
    if let Some(cid) = link.cid2 {
        descriptor.set(LINKAGE2_KEY, &format!("{cid:08x}"));
    }
    Ok(())
}

/// The names of the further files of an image with these options.
///
/// # Errors
/// `BadOptions`.
pub(crate) fn further_files(options: &CreateOptions) -> Result<Vec<String>> {
    if let Some(plan) = device_plan(options)? {
        return Ok(plan.further_file().into_iter().collect());
    }
    let plan = Plan::of(options)?;
    let own = usize::from(plan.is_embedded());
    Ok(plan.extents.into_iter().skip(own).map(|(name, _)| name).collect())
}

/// Creates a VMDK in empty stores: the first file, and those of [`further_files`]. Durable on
/// return.
///
/// # Errors
/// `BadOptions` for options that the format does not allow, before anything is written; `Io`, after
/// which the stores hold an incomplete image.
pub(crate) fn create(stores: &[Arc<dyn Store>], options: &CreateOptions) -> Result<()> {
    if let Some(plan) = device_plan(options)? {
        let text = describe(options, plan.subformat, plan.extents.clone(), plan.entries()).to_text();
        return device::create(stores, &plan, &text);
    }
    let plan = Plan::of(options)?;
    let mut text = plan.descriptor(options)?.to_text();
    if options.parent.is_some() && !plan.is_embedded() {
        // Longer links will fit into the first sector, also with many extents behind it.
        let head = text.find(EXTENTS_LINE).unwrap_or(text.len());
        let room = one_sector::blank((SECTOR_BYTES as usize).saturating_sub(head));
        text.insert_str(head, &String::from_utf8_lossy(&room));
    }
    let own = usize::from(!plan.is_embedded());
    if stores.len() != own + plan.extents.len() {
        return Err(bad(format!("{} files for {}", stores.len(), plan.subformat), "give the files it needs"));
    }
    if plan.is_embedded() && text.len() as u64 > DESCRIPTOR_SECTORS * SECTOR_BYTES {
        return Err(bad("the path of the parent is too long for a descriptor", "use a shorter path"));
    }
    for (store, (_, sectors)) in stores[own..].iter().zip(&plan.extents) {
        let store = &**store;
        if plan.is_cowd() {
            // The plan has refused a longer extent.
            let header = plan.cowd_header(u32::try_from(*sectors).unwrap_or(u32::MAX));
            write_cowd(store, &header, options.parent.is_some())?;
        } else if plan.is_sparse {
            write_sparse(store, &plan.header(*sectors), plan.is_embedded().then_some(&*text))?;
        } else {
            let range = FileRange { offset_bytes: 0, len_bytes: sectors * SECTOR_BYTES };
            let made = match plan.space {
                Space::Holes => store.set_len(range.len_bytes),
                Space::Reserved => store.allocate(range),
                Space::Written => store.allocate(range).and_then(|()| write_zeros(store, range.len_bytes)),
            };
            made.and_then(|()| store.sync_data())
                .map_err(|error| ImageError::io("allocate the space of the extent", store, 0, error))?;
        }
    }
    if !plan.is_embedded() {
        let store = &*stores[0];
        let written = store.write_at(text.as_bytes(), 0).and_then(|()| store.sync_data());
        written.map_err(|error| ImageError::io("write the descriptor", store, 0, error))?;
    }
    Ok(())
}

/// Writes zeros, which space that is only reserved does not have on the device.
fn write_zeros(store: &dyn Store, len_bytes: u64) -> io::Result<()> {
    let zeros = vec![0; ZEROS_BYTES as usize];
    (0..len_bytes.div_ceil(ZEROS_BYTES)).try_for_each(|piece| {
        let at = piece * ZEROS_BYTES;
        store.write_at(&zeros[..(len_bytes - at).min(ZEROS_BYTES) as usize], at)
    })
}

/// The sector of the first table of a new COWD extent.
fn cowd_tables_sector(header: &CowdHeader) -> u64 {
    u64::from(header.directory_sector) + (header.tables() * 4).div_ceil(SECTOR_BYTES)
}

/// Writes a COWD extent without grains. Durable on return; the descriptor that makes it an image
/// follows.
fn write_cowd(store: &dyn Store, header: &CowdHeader, is_child: bool) -> Result<()> {
    let write = |at: u64, bytes: &[u8]| {
        store.write_at(bytes, at).map_err(|error| ImageError::io("write the new extent", store, at, error))
    };
    let len_bytes = u64::from(header.free_sector) * SECTOR_BYTES;
    store.set_len(len_bytes).map_err(|error| ImageError::io("set the length of the file", store, len_bytes, error))?;
    let first = cowd_tables_sector(header);
    let entries = (0..header.tables()).map(|table| (first + table * CowdHeader::table_sectors()) as u32);
    let bytes: Vec<u8> = entries.flat_map(u32::to_le_bytes).collect();
    write(u64::from(header.directory_sector) * SECTOR_BYTES, &bytes)?;
    write(0, &header.to_bytes(is_child))?;
    store.sync_data().map_err(|error| ImageError::io("make the new extent durable", store, 0, error))
}

/// Writes an extent without grains. Durable on return; the header is written last.
fn write_sparse(store: &dyn Store, header: &SparseHeader, text: Option<&str>) -> Result<()> {
    let write = |at: u64, bytes: &[u8]| {
        store.write_at(bytes, at).map_err(|error| ImageError::io("write the new extent", store, at, error))
    };
    let sync = || store.sync_data().map_err(|error| ImageError::io("make the new extent durable", store, 0, error));
    let len_bytes = header.overhead_sectors * SECTOR_BYTES;
    store.set_len(len_bytes).map_err(|error| ImageError::io("set the length of the file", store, len_bytes, error))?;
    if let Some(text) = text {
        write(header.descriptor_sector * SECTOR_BYTES, text.as_bytes())?;
    }
    let first = match header.directory {
        Placing::Sector(sector) => sector,
        Placing::InFooter => 0,
    };
    for directory in header.redundant_directory.into_iter().chain([first]) {
        let tables = directory + header.directory_sectors();
        let entries = (0..header.tables()).map(|table| (tables + table * header.table_sectors()) as u32);
        let bytes: Vec<u8> = entries.flat_map(u32::to_le_bytes).collect();
        write(directory * SECTOR_BYTES, &bytes)?;
    }
    sync()?;
    write(0, &header.to_bytes())?;
    sync()
}
