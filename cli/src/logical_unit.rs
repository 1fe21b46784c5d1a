//! A logical unit of an iSCSI target as text and as JSON: what `info` prints.

use crate::{
    describe::printable,
    json::Document,
    sizes::{Exact, Human},
    table::Fields,
};
use diskwright_iscsi::IscsiDevice;
use diskwright_store::BlockDevice;
use schemars::JsonSchema;
use serde::Serialize;

/// One logical unit, for JSON. Sizes are bytes.
#[derive(Debug, Serialize, JsonSchema)]
pub struct UnitReport {
    /// URI of the logical unit.
    uri: String,
    /// The address of the target.
    target: String,
    /// The iSCSI name of the target.
    target_name: String,
    /// Number of the logical unit.
    lun: u16,
    /// Who made the unit.
    vendor: String,
    /// What it is called.
    product: String,
    /// Its version.
    revision: String,
    /// Its serial number; empty if it tells none.
    serial: String,
    /// Size of the disk.
    virtual_size: u64,
    /// Logical sector.
    logical_sector_size: u32,
    /// Physical sector.
    physical_sector_size: u32,
    /// Whether the unit refuses writes.
    read_only: bool,
    /// Whether completed writes may be in a volatile cache, until a flush.
    write_cache: bool,
    /// The longest data of one command.
    maximum_transfer: u64,
}

impl Document for UnitReport {
    const SCHEMA: &'static str = "diskwright.info-unit/1";
}

impl From<&IscsiDevice> for UnitReport {
    fn from(device: &IscsiDevice) -> Self {
        let (info, geometry) = (device.info().clone(), device.geometry());
        Self {
            uri: device.uri().to_string(),
            target: device.endpoint().to_string(),
            target_name: info.target,
            lun: info.unit,
            vendor: info.vendor,
            product: info.product,
            revision: info.revision,
            serial: info.serial,
            virtual_size: geometry.size_bytes,
            logical_sector_size: geometry.logical_sector_bytes,
            physical_sector_size: geometry.physical_sector_bytes,
            read_only: info.is_read_only,
            write_cache: info.has_write_cache,
            maximum_transfer: info.transfer_bytes,
        }
    }
}

impl UnitReport {
    /// Adds everything to `fields`.
    pub fn add_to(&self, fields: &mut Fields) {
        fields.add("target", printable(&self.target));
        fields.add("target name", printable(&self.target_name));
        let read_only = if self.read_only { ", read-only" } else { "" };
        fields.add("logical unit", format!("{}{read_only}", self.lun));
        let [vendor, product, revision] = [&self.vendor, &self.product, &self.revision].map(|text| printable(text));
        fields.add("product", format!("{vendor} {product}, version {revision}"));
        if !self.serial.is_empty() {
            fields.add("serial number", printable(&self.serial));
        }
        fields.add("virtual size", Exact(self.virtual_size));
        let (logical, physical) = (self.logical_sector_size, self.physical_sector_size);
        fields.add("sector size", format!("{logical} bytes logical, {physical} physical"));
        fields.add("write cache", if self.write_cache { "volatile until a flush" } else { "none" });
        fields.add("data of a command", format!("at most {}", Human(self.maximum_transfer)));
    }
}
