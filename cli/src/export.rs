//! An export of an NBD server as text and as JSON: what `info` prints.

use crate::{
    describe::printable,
    json::Document,
    sizes::{Exact, Human},
    table::Fields,
};
use diskwright_nbd::{
    NbdDevice,
    wire::{Framing, TransmissionFlags},
};
use diskwright_store::BlockDevice;
use schemars::JsonSchema;
use serde::Serialize;

/// One export, for JSON. Sizes are bytes.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ExportReport {
    /// URI of the export.
    uri: String,
    /// The address of the server.
    server: String,
    /// The export name that was asked for.
    export: String,
    /// The name that the server gives it.
    canonical_name: Option<String>,
    /// The description that the server gives it.
    description: Option<String>,
    /// Size of the disk in bytes: that of the export, in whole sectors.
    virtual_size: u64,
    /// Size of the export in bytes.
    export_size: u64,
    /// Logical sector in bytes.
    logical_sector_size: u32,
    /// Physical sector in bytes.
    physical_sector_size: u32,
    /// Whether the server refuses writes.
    read_only: bool,
    /// Offsets and lengths of requests are multiples of this, in bytes.
    minimum_block_size: u32,
    /// The size of request that suits the server, in bytes.
    preferred_block_size: u32,
    /// The longest payload of a request, in bytes; `null` where the server has no limit.
    maximum_payload: Option<u32>,
    /// Whether it takes FLUSH.
    can_flush: bool,
    /// Whether it takes durable writes (FUA).
    can_fua: bool,
    /// Whether it takes TRIM.
    can_trim: bool,
    /// Whether it takes WRITE_ZEROES.
    can_zero: bool,
    /// Whether it refuses a WRITE_ZEROES that is not faster than a write, when asked to.
    can_fast_zero: bool,
    /// Whether a flush on one connection covers the writes of others.
    can_multi_conn: bool,
    /// The kind of replies: `simple`, `structured` or `extended`.
    replies: &'static str,
    /// Whether it reports which ranges are zeros (`base:allocation`).
    tells_zeros: bool,
    /// Whether it reports which layer stores a range (`qemu:allocation-depth`).
    tells_layers: bool,
    /// The version of TLS; `null` without encryption.
    tls: Option<String>,
}

impl Document for ExportReport {
    const SCHEMA: &'static str = "diskwright.info-export/1";
}

impl From<&NbdDevice> for ExportReport {
    fn from(device: &NbdDevice) -> Self {
        let (export, geometry) = (device.export(), device.geometry());
        let can = |flag| export.flags.contains(flag);
        Self {
            uri: device.uri().to_string(),
            server: device.uri().endpoint.to_string(),
            export: export.name.clone(),
            canonical_name: export.canonical_name.clone(),
            description: export.description.clone(),
            virtual_size: geometry.size_bytes,
            export_size: export.size_bytes,
            logical_sector_size: geometry.logical_sector_bytes,
            physical_sector_size: geometry.physical_sector_bytes,
            read_only: can(TransmissionFlags::READ_ONLY),
            minimum_block_size: export.block_sizes.minimum,
            preferred_block_size: export.block_sizes.preferred,
            maximum_payload: (export.block_sizes.maximum != u32::MAX).then_some(export.block_sizes.maximum),
            can_flush: can(TransmissionFlags::SEND_FLUSH),
            can_fua: can(TransmissionFlags::SEND_FUA),
            can_trim: can(TransmissionFlags::SEND_TRIM),
            can_zero: can(TransmissionFlags::SEND_WRITE_ZEROES),
            can_fast_zero: can(TransmissionFlags::SEND_FAST_ZERO),
            can_multi_conn: can(TransmissionFlags::CAN_MULTI_CONN),
            replies: match export.framing {
                Framing::Simple => "simple",
                Framing::Structured => "structured",
                Framing::Extended => "extended",
            },
            tells_zeros: export.allocation_context.is_some(),
            tells_layers: export.depth_context.is_some(),
            tls: export.tls.clone(),
        }
    }
}

impl ExportReport {
    /// Adds everything to `fields`.
    pub fn add_to(&self, fields: &mut Fields) {
        fields.add("server", printable(&self.server));
        fields.add(
            "export",
            format!("{:?}{}", self.export, if self.export.is_empty() { " (the default one)" } else { "" }),
        );
        if let Some(name) = &self.canonical_name {
            fields.add("the server calls it", printable(name));
        }
        if let Some(description) = &self.description {
            fields.add("description", printable(description));
        }
        fields.add("virtual size", Exact(self.virtual_size));
        if self.export_size != self.virtual_size {
            fields.add(
                "size of the export",
                format!("{} bytes; zeros follow, to the end of the sector", self.export_size),
            );
        }
        let (logical, physical) = (self.logical_sector_size, self.physical_sector_size);
        fields.add("sector size", format!("{logical} bytes logical, {physical} physical"));
        let most =
            self.maximum_payload.map_or_else(|| "no limit".into(), |bytes| format!("at most {}", Human(bytes.into())));
        fields.add(
            "requests",
            format!(
                "multiples of {}, best {}, {most}",
                self.minimum_block_size,
                Human(self.preferred_block_size.into())
            ),
        );
        let can: Vec<&str> = [
            (!self.read_only, "write"),
            (self.can_flush, "flush"),
            (self.can_fua, "FUA"),
            (self.can_trim, "trim"),
            (self.can_zero, "zero"),
            (self.can_fast_zero, "zero fast"),
            (self.can_multi_conn, "several connections"),
            (self.tells_zeros, "tell zeros"),
            (self.tells_layers, "tell layers"),
        ]
        .into_iter()
        .filter_map(|(can, what)| can.then_some(what))
        .collect();
        let read_only = if self.read_only { "read-only; " } else { "" };
        fields.add("can", format!("{read_only}{}", can.join(", ")));
        fields.add("protocol", format!("{} replies", self.replies));
        fields.add("encryption", self.tls.as_deref().map_or_else(|| "none".to_owned(), printable));
    }
}
