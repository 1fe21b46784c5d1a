//! The further files that an image names: a VMDK its extents, a qcow2 its data file.
//!
//! ```text
//!   first file ─▶ Driver::references ─▶ names ─▶ the caller's gate ─▶ stores ─▶ Driver::open_files
//! ```
//!
//! An image is hostile input, so it does not open files itself. The caller decides which of the
//! names may be opened, and how. The format of such a file follows from the reference and is never
//! probed.

use diskwright_store::DeviceId;
use std::fmt;

/// A further file that an image names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    /// The name as the image has it: relative to the folder of the image, or absolute.
    pub name: String,
    /// What the file holds.
    pub kind: ReferenceKind,
    /// Whether a session that writes to the image may write to this file.
    pub is_written: bool,
    /// What the image recorded of the block device that the name led to; `None` if it recorded
    /// nothing. A file that is not a device is not compared with it.
    pub device: Option<DeviceId>,
}

/// What a further file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReferenceKind {
    /// A part of a VMDK, sector by sector.
    FlatExtent,
    /// A part of a VMDK with grain tables.
    SparseExtent,
    /// A part of a VMDK on VMFS, sector by sector.
    VmfsExtent,
    /// A redo log of ESX (COWD).
    VmfsSparseExtent,
    /// A space-efficient sparse extent of ESXi.
    SeSparseExtent,
    /// A block device, or the mapping file that stands for one.
    Device,
    /// The payload of a disk whose tables are in the first file.
    RawData,
}

impl fmt::Display for ReferenceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::FlatExtent => "flat extent",
            Self::SparseExtent => "sparse extent",
            Self::VmfsExtent => "VMFS extent",
            Self::VmfsSparseExtent => "redo log",
            Self::SeSparseExtent => "SESPARSE extent",
            Self::Device => "raw device",
            Self::RawData => "data file",
        })
    }
}
