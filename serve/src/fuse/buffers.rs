//! The buffers of one mount, laid out so that no payload is ever moved for want of alignment.
//!
//! ```text
//!             |<-- LEAD_BYTES = 4096 -->|
//!   message   |     header 40, write 40 | payload of a WRITE ...          received at MESSAGE_START
//!   reply     |              header 16  | payload of a READ ...           sent from wherever the payload begins, less 16
//! ```
//!
//! Payload begins on a page, which satisfies every O_DIRECT device, and the header stands directly
//! before it, so that a message is received, and a reply sent, as one piece. Two sizes: any message
//! may be a write of [`MAX_TRANSFER_BYTES`], so the kernel wants that much room for each, but most
//! are small. A small write is copied into a small buffer, which costs less than the memory to
//! receive many at full size. The message's own buffer always suffices for its answer, so nothing
//! ever waits for a buffer while it holds one.

use crate::fuse::{
    negotiate::MAX_TRANSFER_BYTES,
    wire::{IN_HEADER_BYTES, WRITE_IN_BYTES},
};
use diskwright_store::{IoBuf, Slab};
use std::ops::Range;

/// Where payload begins in every buffer.
pub(crate) const LEAD_BYTES: usize = 4096;

/// Where messages are received, so that the payload of a WRITE begins at [`LEAD_BYTES`].
pub(crate) const MESSAGE_START: usize = LEAD_BYTES - IN_HEADER_BYTES - WRITE_IN_BYTES;

/// Payload that goes into a small buffer.
pub(crate) const SMALL_BYTES: usize = 64 << 10;

/// Room for the sectors that an unaligned transfer touches with its two ends.
const EDGES_BYTES: usize = 2 * 4096;

const LARGE: usize = 16;
const SMALL: usize = 128;

/// See the module.
#[derive(Debug)]
pub(crate) struct Buffers {
    slab: Slab,
    small: Vec<IoBuf>,
    large: Vec<IoBuf>,
}

impl Buffers {
    pub(crate) fn new() -> Self {
        let slab = Slab::new(SMALL, LEAD_BYTES + SMALL_BYTES);
        let small = slab.take_all();
        let large = Slab::new(LARGE, LEAD_BYTES + MAX_TRANSFER_BYTES as usize + EDGES_BYTES).take_all();
        Self { slab, small, large }
    }

    /// Buffers in all: the most requests that can be in flight.
    pub(crate) const fn count() -> usize {
        SMALL + LARGE
    }

    /// The slab of the small ones, to be registered with a ring.
    pub(crate) fn slab(&self) -> &Slab {
        &self.slab
    }

    /// A buffer that holds any message, if one is free.
    pub(crate) fn message(&mut self) -> Option<IoBuf> {
        self.large.pop()
    }

    /// Whether one is.
    pub(crate) fn has_message(&self) -> bool {
        !self.large.is_empty()
    }

    /// Where in such a buffer a message is received.
    pub(crate) fn message_range() -> Range<usize> {
        MESSAGE_START..LEAD_BYTES + MAX_TRANSFER_BYTES as usize
    }

    /// A small buffer, if it is enough for `payload_bytes` and one is free.
    pub(crate) fn small(&mut self, payload_bytes: usize) -> Option<IoBuf> {
        if payload_bytes <= SMALL_BYTES { self.small.pop() } else { None }
    }

    /// Takes a buffer back.
    pub(crate) fn give_back(&mut self, buf: IoBuf) {
        if buf.len() > LEAD_BYTES + SMALL_BYTES { self.large.push(buf) } else { self.small.push(buf) }
    }
}
