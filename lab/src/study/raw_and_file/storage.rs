//! What is compared: the device, its mappings, and flat files as VMFS has them.

use super::paper::PaperStorage;

/// A way to store a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    /// The block device itself; the base of the ratios.
    Device,
    /// A VMDK that maps the device in physical compatibility.
    RdmPhysical,
    /// A VMDK that maps the device in virtual compatibility.
    RdmVirtual,
    /// A flat VMDK whose space was written with zeros.
    ThickEager,
    /// A flat VMDK whose space is reserved, and zeroed by the file system when it is first written.
    ThickLazy,
    /// A flat VMDK with holes, which get space when they are first written.
    Thin,
}

impl Storage {
    /// All, the base first.
    pub const ALL: [Self; 6] =
        [Self::Device, Self::RdmPhysical, Self::RdmVirtual, Self::ThickEager, Self::ThickLazy, Self::Thin];

    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "block device",
            Self::RdmPhysical => "RDM physical",
            Self::RdmVirtual => "RDM virtual",
            Self::ThickEager => "thick, eager",
            Self::ThickLazy => "thick, lazy",
            Self::Thin => "thin",
        }
    }

    /// The storage with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|storage| storage.name() == name)
    }

    /// The kind of VMDK; `None` for the device.
    pub(super) fn subformat(self) -> Option<&'static str> {
        match self {
            Self::Device => None,
            Self::RdmPhysical => Some("rdm-physical"),
            Self::RdmVirtual => Some("rdm-virtual"),
            Self::ThickEager => Some("eagerzeroedthick"),
            Self::ThickLazy => Some("zeroedthick"),
            Self::Thin => Some("thin"),
        }
    }

    /// Whether it has a file of its own, and not the bytes of the bare device.
    pub fn is_file(self) -> bool {
        matches!(self, Self::ThickEager | Self::ThickLazy | Self::Thin)
    }

    /// What the paper calls it; `None` for the bare device, which it did not measure.
    pub fn in_paper(self) -> Option<PaperStorage> {
        match self {
            Self::Device => None,
            Self::RdmPhysical => Some(PaperStorage::Physical),
            Self::RdmVirtual => Some(PaperStorage::Virtual),
            Self::ThickEager | Self::ThickLazy | Self::Thin => Some(PaperStorage::Vmfs),
        }
    }
}
