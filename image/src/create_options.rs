//! What a new image is to be.

use crate::{
    devices::DeviceOptions,
    info::{DiskType, ParentLink},
};
use uuid::Uuid;

/// Properties of a new image.
#[derive(Debug, Clone)]
pub struct CreateOptions {
    /// How the image allocates space.
    pub disk_type: DiskType,
    /// Virtual size in bytes.
    pub size_bytes: u64,
    /// Size of a payload block in bytes; `None` for the default of 2 MiB.
    pub block_bytes: Option<u32>,
    /// Logical sector of the virtual disk in bytes: 512 or 4096 (VHD: 512 only).
    pub logical_sector_bytes: u32,
    /// Physical sector of the virtual disk in bytes: 512 or 4096.
    pub physical_sector_bytes: u32,
    /// Link to the parent. Required for a differencing image, forbidden for other types.
    pub parent: Option<ParentLink>,
    /// Allocate the space of all blocks now, so that later writes cannot fail for lack of space.
    /// Blocks of a dynamic disk stay unmapped. A fixed disk always has its full file length;
    /// without this option the file is sparse.
    pub preallocate: bool,
    /// The disk's unique id; `None` for a random one.
    pub disk_id: Option<Uuid>,
    /// What only some formats know.
    pub own: FormatOptions,
}

/// Properties of a new image that only some formats know. A format refuses by name what it does not
/// know.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FormatOptions {
    /// The kind of image within the format, as qemu-img names it: `twoGbMaxExtentFlat`.
    pub subformat: Option<String>,
    /// The file name that the image will have. Names of further files derive from it. Empty where
    /// the format has only one file and does not record its name.
    pub file_name: String,
    /// The device that the image maps, for the kinds that map one.
    pub device: Option<DeviceOptions>,
}
