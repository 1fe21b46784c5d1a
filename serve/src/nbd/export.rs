//! What an NBD server tells clients of an export.

use crate::net::{Export, peer::Peer};
use diskwright_nbd::wire::{BlockSizes, PAYLOAD_BYTES_DEFAULT, TransmissionFlags};
use diskwright_store::Geometry;

/// The least preferred block size that is announced.
const PREFERRED_BYTES: u32 = 4096;

impl Export {
    /// The transmission flags of the export. `chunks`: whether the client has negotiated replies in
    /// chunks (structured replies or extended headers).
    pub(crate) fn flags(&self, chunks: bool) -> TransmissionFlags {
        let mut flags = TransmissionFlags::HAS_FLAGS
            | TransmissionFlags::SEND_FLUSH
            | TransmissionFlags::CAN_MULTI_CONN
            | TransmissionFlags::SEND_CACHE;
        if self.is_writable() {
            flags |= TransmissionFlags::SEND_FUA
                | TransmissionFlags::SEND_TRIM
                | TransmissionFlags::SEND_WRITE_ZEROES
                | TransmissionFlags::SEND_FAST_ZERO;
        } else {
            flags |= TransmissionFlags::READ_ONLY;
        }
        flags.set(TransmissionFlags::SEND_DF, chunks);
        flags
    }

    /// The block size constraints that are announced to clients.
    pub(crate) fn block_sizes(&self) -> BlockSizes {
        let Geometry { logical_sector_bytes: minimum, physical_sector_bytes, .. } = self.device.geometry();
        let preferred = physical_sector_bytes.max(minimum).max(PREFERRED_BYTES);
        BlockSizes { minimum, preferred, maximum: PAYLOAD_BYTES_DEFAULT }
    }

    /// Warns in the log that a client which did not ask for the block sizes may send unaligned
    /// requests.
    pub(crate) fn warn_of_unaligned(&self, peer: &Peer) {
        let block_bytes = self.block_sizes().minimum;
        tracing::warn!(
            %peer, export = %self.name,
            "the client did not ask for the block sizes, and this disk has sectors of {block_bytes} bytes: \
             unaligned requests will fail with EINVAL; set the client's block size (nbd-client: -b {block_bytes})"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_store::{MemoryStore, RawDevice};
    use std::sync::Arc;

    fn export(writable: bool) -> Export {
        let device = RawDevice::new(Arc::new(MemoryStore::with_bytes("m", vec![0; 8192])), writable, 512).unwrap();
        Export { name: "a".into(), description: String::new(), device: Arc::new(device) }
    }

    #[test]
    fn a_read_only_disk_says_so() {
        let flags = export(false).flags(true);
        assert!(flags.contains(TransmissionFlags::READ_ONLY | TransmissionFlags::SEND_DF));
        assert!(!flags.intersects(TransmissionFlags::SEND_TRIM | TransmissionFlags::SEND_FUA));
        let flags = export(true).flags(false);
        assert!(!flags.intersects(TransmissionFlags::READ_ONLY | TransmissionFlags::SEND_DF));
        export(true).block_sizes().check().unwrap();
    }
}
