//! Where everything lies in the memory of the test front-end.
//!
//! ```text
//!   ring 0: descriptors | available | used     ring 1 ...          pages of their own
//!   slots:  header, range, status, indirect table (one page each) and a payload
//! ```

use super::options::{FrontOptions, GUEST_BASE};

const PAGE: usize = 4096;

/// Offset of the status byte in a slot's page, and of its indirect table.
pub(super) const RANGE_AT: usize = 16;
pub(super) const STATUS_AT: usize = 64;
pub(super) const TABLE_AT: usize = 128;

/// Offsets of a ring's parts.
#[derive(Debug, Clone, Copy)]
pub struct RawRing {
    /// The descriptor table.
    pub descriptors: usize,
    /// The available ring.
    pub available: usize,
    /// The used ring.
    pub used: usize,
}

/// Offsets in the guest's memory.
#[derive(Debug, Clone)]
pub struct Layout {
    queues: usize,
    depth: usize,
    payload_bytes: usize,
    payload_offset: usize,
}

impl Layout {
    pub(super) fn new(options: &FrontOptions) -> Self {
        let payload_bytes = (options.payload_bytes + options.payload_offset).next_multiple_of(PAGE);
        let FrontOptions { queues, depth, payload_offset, .. } = *options;
        Self { queues, depth, payload_bytes, payload_offset }
    }

    /// Entries of a ring: three descriptors for each request.
    pub fn ring_size(&self) -> u16 {
        (3 * self.depth).next_power_of_two() as u16
    }

    fn ring_bytes(&self) -> usize {
        let size = usize::from(self.ring_size());
        (16 * size).next_multiple_of(PAGE)
            + (6 + 2 * size).next_multiple_of(PAGE)
            + (6 + 8 * size).next_multiple_of(PAGE)
    }

    /// The parts of a ring.
    pub fn ring(&self, index: usize) -> RawRing {
        let size = usize::from(self.ring_size());
        let descriptors = index * self.ring_bytes();
        let available = descriptors + (16 * size).next_multiple_of(PAGE);
        RawRing { descriptors, available, used: available + (6 + 2 * size).next_multiple_of(PAGE) }
    }

    /// The page of a request: header, range, status and indirect table.
    pub(super) fn slot(&self, queue: usize, slot: usize) -> usize {
        let before = queue * self.depth + slot;
        self.queues * self.ring_bytes() + before * (PAGE + self.payload_bytes)
    }

    /// The payload of a request.
    pub(super) fn payload(&self, queue: usize, slot: usize) -> usize {
        self.slot(queue, slot) + PAGE + self.payload_offset
    }

    /// Bytes of a payload.
    pub(super) fn payload_bytes(&self) -> usize {
        self.payload_bytes - self.payload_offset
    }

    /// Length of the memory.
    pub fn total_bytes(&self) -> usize {
        self.slot(self.queues, 0)
    }

    /// The guest's address of an offset.
    pub fn address(&self, at: usize) -> u64 {
        GUEST_BASE + at as u64
    }
}
