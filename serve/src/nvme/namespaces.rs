//! Exports as namespaces: which export an NSID names, and what hosts are told of it.

use crate::net::{Export, exports::Exports};
use diskwright_nvme::wire::identify::Namespace;
use uuid::Uuid;

/// The export of a namespace, if it is served.
pub(super) fn export_of(exports: &Exports, nsid: u32) -> Option<(usize, &Export)> {
    let index = (nsid as usize).checked_sub(1)?;
    exports.here(index).map(|export| (index, export))
}

/// The ids of all namespaces.
pub(super) fn ids(exports: &Exports) -> impl Iterator<Item = u32> {
    (0..exports.indexes()).filter(|&index| exports.here(index).is_some()).map(|index| index as u32 + 1)
}

/// What identifies a disk to hosts. It is the same whenever the disk is served by this name in this
/// subsystem.
pub(super) fn uuid_of(subsystem: &str, export: &Export) -> Uuid {
    let of_subsystem = Uuid::new_v5(&Uuid::NAMESPACE_OID, subsystem.as_bytes());
    Uuid::new_v5(&of_subsystem, export.name.as_bytes())
}

/// The identify data of a namespace.
pub(super) fn describe(subsystem: &str, export: &Export, reservations_last: bool) -> Namespace {
    let geometry = export.device.geometry();
    let block_bytes = geometry.logical_sector_bytes.max(1);
    Namespace {
        blocks: geometry.size_bytes / u64::from(block_bytes),
        block_exponent: block_bytes.trailing_zeros() as u8,
        preferred_blocks: (geometry.physical_sector_bytes / block_bytes).saturating_sub(1) as u16,
        is_read_only: geometry.read_only,
        deallocates_to_zeros: true,
        metadata_bytes: 0,
        reservations_last,
        guid: uuid_of(subsystem, export).into_bytes(),
    }
}
