//! A namespace of an NVMe/TCP target as text and as JSON: what `info` prints.

use crate::{
    describe::printable,
    json::Document,
    sizes::{Exact, Human},
    table::Fields,
};
use diskwright_nvme::NvmeDevice;
use diskwright_store::BlockDevice;
use schemars::JsonSchema;
use serde::Serialize;
use std::fmt::Write;

/// One namespace, for JSON. Sizes are bytes.
#[derive(Debug, Serialize, JsonSchema)]
pub struct NamespaceReport {
    /// URI of the namespace.
    uri: String,
    /// The address of the target.
    target: String,
    /// NQN of the subsystem.
    subsystem: String,
    /// Id of the namespace.
    nsid: u32,
    /// Globally unique id (NGUID), in hexadecimal; zeros if it has none.
    guid: String,
    /// The controller's model.
    model: String,
    /// The controller's serial number.
    serial: String,
    /// Size of the disk.
    virtual_size: u64,
    /// Logical sector.
    logical_sector_size: u32,
    /// Physical sector.
    physical_sector_size: u32,
    /// Whether the target refuses writes.
    read_only: bool,
    /// I/O queues that the target grants. Each is a connection.
    queues: u16,
    /// Entries of a queue that are used.
    queue_entries: u16,
    /// The longest data of one command.
    maximum_transfer: u64,
    /// The longest data of a write in the capsule of its command.
    maximum_in_capsule: u64,
}

impl Document for NamespaceReport {
    const SCHEMA: &'static str = "diskwright.info-namespace/1";
}

impl From<&NvmeDevice> for NamespaceReport {
    fn from(device: &NvmeDevice) -> Self {
        let (info, geometry) = (device.info(), device.geometry());
        let guid = info.guid.iter().fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        });
        Self {
            uri: device.uri().to_string(),
            target: device.endpoint().to_string(),
            subsystem: info.subsystem.clone(),
            nsid: info.nsid,
            guid,
            model: info.model.clone(),
            serial: info.serial.clone(),
            virtual_size: geometry.size_bytes,
            logical_sector_size: geometry.logical_sector_bytes,
            physical_sector_size: geometry.physical_sector_bytes,
            read_only: info.is_read_only,
            queues: info.queues,
            queue_entries: info.entries,
            maximum_transfer: info.transfer_bytes,
            maximum_in_capsule: info.capsule_bytes,
        }
    }
}

impl NamespaceReport {
    /// Adds everything to `fields`.
    pub fn add_to(&self, fields: &mut Fields) {
        fields.add("target", printable(&self.target));
        fields.add("subsystem", printable(&self.subsystem));
        let read_only = if self.read_only { ", read-only" } else { "" };
        fields.add("namespace", format!("{}{read_only}", self.nsid));
        fields.add("NGUID", &self.guid);
        fields.add("controller", format!("{}, serial number {}", printable(&self.model), printable(&self.serial)));
        fields.add("virtual size", Exact(self.virtual_size));
        let (logical, physical) = (self.logical_sector_size, self.physical_sector_size);
        fields.add("sector size", format!("{logical} bytes logical, {physical} physical"));
        fields.add("queues", format!("up to {}, {} entries each", self.queues, self.queue_entries));
        let (transfer, capsule) = (Human(self.maximum_transfer), Human(self.maximum_in_capsule));
        fields.add("data of a command", format!("at most {transfer}; writes up to {capsule} in the capsule"));
    }
}
