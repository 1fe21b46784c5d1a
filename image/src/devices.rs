//! What a new image records of a block device that it maps.
//!
//! The caller opens the device, reads what makes it recognisable ([`DeviceId`]) and its partition
//! table. The image only records names, lengths and identities.

use diskwright_store::DeviceId;

/// The kind of a VMDK that maps a device in physical compatibility, as VMware writes it.
pub(crate) const PHYSICAL_MAPPING: &str = "vmfsPassthroughRawDeviceMap";

/// The device that a new image maps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceOptions {
    /// The path to record, absolute.
    pub path: String,
    /// What makes the device recognisable.
    pub id: DeviceId,
    /// The parts of the disk in their order, without gaps; empty for a mapping of the whole device.
    pub parts: Vec<DevicePart>,
}

/// A part of a disk that shows some partitions of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DevicePart {
    /// Its length in sectors of 512 bytes.
    pub sectors: u64,
    /// What the disk has there.
    pub shows: PartSource,
}

/// What a part of a mapped disk shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PartSource {
    /// The same range of the device.
    Device,
    /// A copy of the device's bytes, which the guest may change: a partition table.
    Copy(Vec<u8>),
    /// Zeros, and writes fail: partitions that are not shown.
    Nothing,
}
