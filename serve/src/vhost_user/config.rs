//! What the device offers: its features and its configuration space (virtio 1.2, 5.2).
//!
//! Writes are durable when they complete unless the guest has agreed to flush (`F_FLUSH`) and the
//! cache is in write-back mode. A guest that negotiates `F_CONFIG_WCE` can switch the mode by the
//! byte `writeback`.

use super::{
    limits::{SECTOR_BYTES, TRANSFER_BYTES_MAX, ZEROED_SECTORS_MAX},
    vring::RingFeatures,
    wire::CONFIG_BYTES,
};
use diskwright_store::Geometry;
use std::sync::atomic::{AtomicBool, Ordering};
use virtio_bindings::{virtio_blk as blk, virtio_config, virtio_ring};

/// `VHOST_USER_F_PROTOCOL_FEATURES`.
pub(crate) const PROTOCOL_FEATURES: u64 = 1 << 30;

/// Maximum number of pieces of a payload: what fits into a ring of 128 with header and status.
const PIECES_MAX: u32 = 126;

/// Offset of the byte `writeback`.
const WRITEBACK_AT: usize = 32;

/// The features of a device for this disk.
pub(crate) fn features(geometry: &Geometry) -> u64 {
    let mut bits = vec![
        virtio_config::VIRTIO_F_VERSION_1,
        virtio_ring::VIRTIO_RING_F_INDIRECT_DESC,
        virtio_ring::VIRTIO_RING_F_EVENT_IDX,
        blk::VIRTIO_BLK_F_SEG_MAX,
        blk::VIRTIO_BLK_F_BLK_SIZE,
        blk::VIRTIO_BLK_F_TOPOLOGY,
        blk::VIRTIO_BLK_F_FLUSH,
        blk::VIRTIO_BLK_F_MQ,
    ];
    if geometry.read_only {
        bits.push(blk::VIRTIO_BLK_F_RO);
    } else {
        bits.extend([blk::VIRTIO_BLK_F_CONFIG_WCE, blk::VIRTIO_BLK_F_DISCARD, blk::VIRTIO_BLK_F_WRITE_ZEROES]);
    }
    bits.into_iter().fold(PROTOCOL_FEATURES, |all, bit| all | 1 << bit)
}

fn has(features: u64, bit: u32) -> bool {
    features & 1 << bit != 0
}

/// What the features say about rings.
pub(crate) fn ring_features(features: u64) -> RingFeatures {
    RingFeatures {
        indirect: has(features, virtio_ring::VIRTIO_RING_F_INDIRECT_DESC),
        event_index: has(features, virtio_ring::VIRTIO_RING_F_EVENT_IDX),
    }
}

/// Whether each write must be durable when it completes. Shared by the queues of a device.
#[derive(Debug, Default)]
pub(crate) struct WriteCache {
    /// The guest has agreed to flush.
    flushes: AtomicBool,
    /// The mode that the guest has set is write-through.
    through: AtomicBool,
}

impl WriteCache {
    /// Takes the features that the guest has agreed to. The mode is write-back again.
    pub(crate) fn negotiated(&self, features: u64) {
        self.flushes.store(has(features, blk::VIRTIO_BLK_F_FLUSH), Ordering::Release);
        self.through.store(false, Ordering::Release);
    }

    pub(crate) fn set_write_through(&self, through: bool) {
        self.through.store(through, Ordering::Release);
    }

    fn is_write_back(&self) -> bool {
        !self.through.load(Ordering::Acquire)
    }

    /// Whether a write must be durable when it completes.
    pub(crate) fn needs_durable_writes(&self) -> bool {
        !self.flushes.load(Ordering::Acquire) || !self.is_write_back()
    }
}

/// Whether a guest with these features may set the byte `writeback`.
pub(crate) fn may_switch_cache(features: u64) -> bool {
    has(features, blk::VIRTIO_BLK_F_CONFIG_WCE)
}

/// The value of the byte `writeback` if these bytes set it and nothing else.
pub(crate) fn set_writeback(offset_bytes: u32, bytes: &[u8]) -> Option<bool> {
    match bytes {
        [value @ (0 | 1)] if offset_bytes as usize == WRITEBACK_AT => Some(*value == 1),
        _ => None,
    }
}

/// The configuration space (`struct virtio_blk_config`).
pub(crate) fn space(geometry: &Geometry, queues: u16, cache: &WriteCache) -> [u8; CONFIG_BYTES] {
    let mut out = [0; CONFIG_BYTES];
    let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
    let sectors_each = (geometry.physical_sector_bytes / geometry.logical_sector_bytes.max(1)).max(1);
    put(0, &(geometry.size_bytes / SECTOR_BYTES).to_le_bytes());
    put(12, &PIECES_MAX.to_le_bytes());
    put(20, &geometry.logical_sector_bytes.to_le_bytes());
    put(24, &[sectors_each.ilog2() as u8]);
    put(26, &(sectors_each as u16).to_le_bytes());
    put(28, &((TRANSFER_BYTES_MAX as u32 / geometry.logical_sector_bytes.max(1)).min(2048)).to_le_bytes());
    put(WRITEBACK_AT, &[u8::from(cache.is_write_back())]);
    put(34, &queues.to_le_bytes());
    if !geometry.read_only {
        let alignment = geometry.physical_sector_bytes / SECTOR_BYTES as u32;
        put(36, &ZEROED_SECTORS_MAX.to_le_bytes());
        put(40, &1u32.to_le_bytes());
        put(44, &alignment.max(1).to_le_bytes());
        put(48, &ZEROED_SECTORS_MAX.to_le_bytes());
        put(52, &1u32.to_le_bytes());
        put(56, &[1]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: Geometry =
        Geometry { size_bytes: 1 << 30, logical_sector_bytes: 512, physical_sector_bytes: 4096, read_only: false };

    #[test]
    fn the_space_is_that_of_the_specification() {
        let cache = WriteCache::default();
        cache.negotiated(features(&DISK));
        let bytes = space(&DISK, 4, &cache);
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!(u64::from_le_bytes(bytes[..8].try_into().unwrap()), (1 << 30) / 512);
        assert_eq!((word(12), word(20), bytes[24], bytes[32], bytes[34]), (126, 512, 3, 1, 4));
        assert_eq!((word(36), word(40), word(44), word(48), word(52), bytes[56]), (1 << 22, 1, 8, 1 << 22, 1, 1));
        let read_only = Geometry { read_only: true, ..DISK };
        assert_eq!(space(&read_only, 1, &cache)[36..60], [0; 24]);
        assert_eq!(features(&read_only) ^ features(&DISK), 1 << 5 | 1 << 11 | 1 << 13 | 1 << 14);
    }

    #[test]
    fn a_guest_that_does_not_flush_has_durable_writes() {
        let cache = WriteCache::default();
        assert!(cache.needs_durable_writes());
        cache.negotiated(features(&DISK));
        assert!(!cache.needs_durable_writes());
        cache.set_write_through(true);
        assert!(cache.needs_durable_writes());
        assert_eq!(space(&DISK, 1, &cache)[WRITEBACK_AT], 0);
        cache.negotiated(features(&DISK) & !(1 << blk::VIRTIO_BLK_F_FLUSH));
        assert!(cache.needs_durable_writes());
        assert_eq!(set_writeback(32, &[0]), Some(false));
        assert!(set_writeback(32, &[2]).is_none() && set_writeback(0, &[1]).is_none());
        assert!(set_writeback(32, &[1, 0]).is_none());
    }
}
