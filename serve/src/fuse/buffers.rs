//! The buffers of one mount, laid out so that no payload is copied to align it.
//!
//! ```text
//!             |<-- LEAD_BYTES = 4096 -->|
//!   message   |     header 40, write 40 | payload of a WRITE ...    received at MESSAGE_START
//!   reply     |              header 16  | payload of a READ ...     sent from its header on
//! ```
//!
//! The payload begins on a page, which satisfies every O_DIRECT device. The header is directly
//! before it, so a message is received, and a reply is sent, as one piece.
//!
//! There are two sizes. The kernel requires room for [`MAX_TRANSFER_BYTES`] for each message, but
//! most messages are small. A small write is copied into a small buffer; that costs less than
//! memory for many messages at full size. A message's own buffer is always large enough for its
//! reply, so no request waits for a buffer while it holds one.

use crate::fuse::{
    negotiate::MAX_TRANSFER_BYTES,
    wire::{IN_HEADER_BYTES, WRITE_IN_BYTES},
};
use diskwright_store::{IoBuf, Slab};
use std::ops::Range;

/// Offset of the payload in every buffer.
pub(crate) const LEAD_BYTES: usize = 4096;

/// Offset at which messages are received, so that the payload of a WRITE begins at [`LEAD_BYTES`].
pub(crate) const MESSAGE_START: usize = LEAD_BYTES - IN_HEADER_BYTES - WRITE_IN_BYTES;

/// Largest payload of a small buffer.
pub(crate) const SMALL_BYTES: usize = 64 << 10;

/// Room for the partial sectors at the two ends of an unaligned transfer.
const EDGES_BYTES: usize = 2 * 4096;

const LARGE: usize = 16;
const SMALL: usize = 128;

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

    /// The number of buffers, which is also the most requests in flight.
    pub(crate) const fn count() -> usize {
        SMALL + LARGE
    }

    /// The slab of the small buffers, to be registered with a ring.
    pub(crate) fn slab(&self) -> &Slab {
        &self.slab
    }

    /// A large buffer, which holds any message, if one is free.
    pub(crate) fn message(&mut self) -> Option<IoBuf> {
        self.large.pop()
    }

    /// Whether a large buffer is free.
    pub(crate) fn has_message(&self) -> bool {
        !self.large.is_empty()
    }

    /// Where a message is received in a large buffer.
    pub(crate) fn message_range() -> Range<usize> {
        MESSAGE_START..LEAD_BYTES + MAX_TRANSFER_BYTES as usize
    }

    /// A small buffer, if it holds `payload_bytes` and one is free.
    pub(crate) fn small(&mut self, payload_bytes: usize) -> Option<IoBuf> {
        if payload_bytes <= SMALL_BYTES { self.small.pop() } else { None }
    }

    pub(crate) fn give_back(&mut self, buf: IoBuf) {
        if buf.len() > LEAD_BYTES + SMALL_BYTES { self.large.push(buf) } else { self.small.push(buf) }
    }
}
