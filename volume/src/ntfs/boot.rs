//! The boot sector: geometry, and the place of the MFT.

use crate::{
    bytes::{le16, le64},
    read::Window,
    reason::LeftAlone,
};

/// Geometry of a volume that fits its place.
#[derive(Debug, Clone, Copy)]
pub(super) struct Boot {
    pub(super) cluster_bytes: u64,
    /// Number of whole clusters.
    pub(super) clusters: u64,
    /// Size of a record of the MFT in bytes.
    pub(super) record_bytes: usize,
    /// First cluster of the MFT.
    pub(super) mft_cluster: u64,
    /// Size of the volume in bytes. The copy of the boot sector follows.
    pub(super) volume_bytes: u64,
    pub(super) sector_bytes: u64,
}

impl Boot {
    pub(super) fn read(window: &Window<'_>) -> Result<Self, LeftAlone> {
        let raw = window.bytes(0, 512)?;
        let wrong = |what: String| LeftAlone::damaged(format!("boot sector of NTFS: {what}"));
        let sector_bytes = u64::from(le16(&raw, 0x0b));
        if !sector_bytes.is_power_of_two() || !(512..=4096).contains(&sector_bytes) {
            return Err(wrong(format!("sectors of {sector_bytes} bytes")));
        }
        // Above 128 sectors the field is the negative exponent.
        let sectors = match raw[0x0d] {
            byte @ 0xf4.. => 1_u64 << (256 - u16::from(byte)),
            byte => u64::from(byte),
        };
        let cluster_bytes = sectors * sector_bytes;
        if !sectors.is_power_of_two() || cluster_bytes > 2 << 20 {
            return Err(wrong(format!("clusters of {sectors} sectors")));
        }
        let total_sectors = le64(&raw, 0x28);
        let size_bytes = window.size_bytes();
        if total_sectors.checked_mul(sector_bytes).is_none_or(|bytes| bytes > size_bytes) {
            return Err(wrong(format!("{total_sectors} sectors in a volume of {size_bytes} bytes")));
        }
        let record_bytes = match raw[0x40] as i8 {
            clusters @ 1.. => u64::try_from(clusters).unwrap_or(0) * cluster_bytes,
            exponent @ -12..=-9 => 1 << exponent.unsigned_abs(),
            _ => 0,
        };
        if !record_bytes.is_power_of_two() || !(512..=4096).contains(&record_bytes) {
            return Err(wrong(format!("records of {record_bytes} bytes in the MFT")));
        }
        let clusters = total_sectors / sectors;
        let mft_cluster = le64(&raw, 0x30);
        if mft_cluster >= clusters {
            return Err(wrong(format!("the MFT in cluster {mft_cluster} of {clusters}")));
        }
        Ok(Self {
            cluster_bytes,
            clusters,
            record_bytes: record_bytes as usize,
            mft_cluster,
            volume_bytes: total_sectors * sector_bytes,
            sector_bytes,
        })
    }
}
