//! A disk at one moment, by its identity.

use crate::{Layer, Opened};
use diskwright_image::{Format, LinkageId};

/// A disk at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskState {
    /// The format of its top image; raw for an export of a server.
    pub format: Format,
    /// The identity of its top image: VHDX DataWriteGuid, VHD unique id, VMDK CID. `None` for raw
    /// disks. A VHD keeps its identity when it is written.
    pub linkage_id: Option<LinkageId>,
    /// Virtual size in bytes.
    pub size_bytes: u64,
    /// Logical sector in bytes.
    pub sector_bytes: u32,
}

impl DiskState {
    /// The present state of an open disk.
    pub fn of(opened: &Opened) -> Self {
        match opened {
            Opened::Disk(disk) => Self::of_layer(&disk.layers()[0]),
            Opened::Remote(_) => {
                let geometry = opened.device().geometry();
                Self {
                    format: Format::Raw,
                    linkage_id: None,
                    size_bytes: geometry.size_bytes,
                    sector_bytes: geometry.logical_sector_bytes,
                }
            }
        }
    }

    /// The present state of the disk whose top is `layer`.
    pub fn of_layer(layer: &Layer) -> Self {
        let info = layer.image.info();
        Self {
            format: info.format,
            linkage_id: layer.image.linkage_id(),
            size_bytes: layer.image.size_bytes(),
            sector_bytes: info.logical_sector_bytes,
        }
    }
}
