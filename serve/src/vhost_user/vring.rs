//! The device's side of a split virtqueue (virtio 1.2, 2.7), in memory that the guest writes.
//!
//! ```text
//!   available ring ─▶ next_head ─▶ walk(head) ─▶ Chain: pieces to read, pieces to write
//!   used ring      ◀─ put_used, publish                      │
//!   event indexes: wants_signal, ask_for_kicks               ▼
//!                                                        request.rs
//! ```
//!
//! Every number here may be wrong, and may change after it was read. So each is read once, copied,
//! and checked. A chain has at most as many descriptors as its table, which ends a loop.
//!
//! Order: descriptors are read after the index that names them (acquire), and the used index is
//! written after the entries that it counts (release). Before an index of the other side is read
//! that says whether to wake it, or whether it has gone on, a full fence orders that read behind
//! our own index.
//!
//! Rejected: the crate `virtio-queue`. It ends a chain that is damaged as if the chain were whole,
//! and it cannot walk a chain by its head, which the recovery of requests in flight needs. It would
//! also map the guest's memory a second time.

use super::memory::{GuestMemory, Place};
use diskwright_store::SEGMENTS_MAX;
use std::{
    io,
    sync::atomic::{Ordering, fence},
};
use virtio_bindings::virtio_ring::{
    VRING_AVAIL_F_NO_INTERRUPT, VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE, VRING_USED_F_NO_NOTIFY,
};

/// Maximum size of a ring: what QEMU takes too.
pub(crate) const RING_SIZE_MAX: u16 = 1024;

/// Maximum number of descriptors in a chain: those of a payload, and two for header and status.
const CHAIN_MAX: u32 = SEGMENTS_MAX as u32 + 2;

/// Bytes of a descriptor.
const DESCRIPTOR_BYTES: u64 = 16;

/// Addresses of a ring's parts, in the front-end's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RingAddresses {
    pub(crate) descriptors: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
}

/// What the guest agreed to.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RingFeatures {
    pub(crate) indirect: bool,
    pub(crate) event_index: bool,
}

/// Why a ring cannot be served any longer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RingError {
    #[error("the size of a queue is {size}; it must be a power of two of at most {RING_SIZE_MAX}")]
    Size { size: u32 },
    #[error("the {part} of a queue at {address:#x} is not in the guest's memory")]
    Outside { part: &'static str, address: u64 },
    #[error("the guest's index of available requests is {index}, more than the queue's {size} beyond {next}")]
    Available { index: u16, next: u16, size: u16 },
    #[error("request {head} is not among the queue's {size} descriptors")]
    Head { head: u16, size: u16 },
    #[error("request {head} was made available again before it was completed")]
    InFlight { head: u16 },
    #[error("descriptor {next} was named as the next one of a table of {count}")]
    Next { next: u16, count: u32 },
    #[error("the chain of request {head} has more than {most} descriptors, or is a loop")]
    Endless { head: u16, most: u32 },
    #[error("the indirect table of request {head} is not valid: {what}")]
    Indirect { head: u16, what: &'static str },
    #[error("the descriptors of request {head} at {address:#x} are not in the guest's memory")]
    Table { head: u16, address: u64 },
    #[error("request {head} has memory for the disk to read behind memory to be written")]
    Order { head: u16 },
    #[error("request {head} has no byte for its status")]
    NoStatus { head: u16 },
    #[error("the disk's queue failed: {0}")]
    Queue(#[source] io::Error),
    #[error("the memory of a queue could not be accessed: {0}")]
    Memory(#[from] io::Error),
}

/// A range of guest memory that a descriptor names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) address: u64,
    pub(crate) len_bytes: u32,
}

/// The memory of one request, in the order of its descriptors.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    pub(crate) readable: Vec<Piece>,
    pub(crate) writable: Vec<Piece>,
}

/// A ring that is served.
#[derive(Debug)]
pub(crate) struct Vring {
    size: u16,
    descriptors: Place,
    available: Place,
    used: Place,
    features: RingFeatures,
    /// The next entry of the available ring to be taken.
    next_available: u16,
    /// The guest's index when it was last read.
    seen_available: u16,
    /// The next entry of the used ring to be written.
    next_used: u16,
    /// The used index at the last look at whether to signal; `None` before the first.
    signalled: Option<u16>,
}

impl Vring {
    /// A ring that begins with the entry `next_available`. The used index is the guest memory's.
    ///
    /// # Errors
    /// [`RingError::Size`], [`RingError::Outside`].
    pub(crate) fn new(
        memory: &GuestMemory,
        addresses: RingAddresses,
        size: u32,
        next_available: u16,
        features: RingFeatures,
    ) -> Result<Self, RingError> {
        let size = check_size(size)?;
        let entries = u64::from(size);
        let place = |part, address, len_bytes, alignment: u64| {
            let found =
                memory.place_of_user(address, len_bytes).filter(|place| (place.at as u64).is_multiple_of(alignment));
            found.ok_or(RingError::Outside { part, address })
        };
        let descriptors = place("descriptor table", addresses.descriptors, entries * DESCRIPTOR_BYTES, 16)?;
        let available = place("available ring", addresses.available, 6 + 2 * entries, 2)?;
        let used = place("used ring", addresses.used, 6 + 8 * entries, 4)?;
        let next_used = used.memory.load_u16(used.at + 2)?;
        Ok(Self {
            size,
            descriptors,
            available,
            used,
            features,
            next_available,
            seen_available: next_available,
            next_used,
            signalled: None,
        })
    }

    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    /// The next entry of the available ring to be taken.
    pub(crate) fn next_available(&self) -> u16 {
        self.next_available
    }

    pub(crate) fn set_next_available(&mut self, next: u16) {
        (self.next_available, self.seen_available) = (next, next);
    }

    pub(crate) fn next_used(&self) -> u16 {
        self.next_used
    }

    /// The head of the next available request.
    ///
    /// # Errors
    /// [`RingError::Available`], [`RingError::Head`].
    pub(crate) fn next_head(&mut self) -> Result<Option<u16>, RingError> {
        if self.next_available == self.seen_available && !self.has_more()? {
            return Ok(None);
        }
        let index = usize::from(self.next_available & (self.size - 1));
        let head = self.available.memory.load_u16(self.available.at + 4 + 2 * index)?;
        if head >= self.size {
            return Err(RingError::Head { head, size: self.size });
        }
        self.next_available = self.next_available.wrapping_add(1);
        Ok(Some(head))
    }

    /// Whether a request is available. Reads the guest's index.
    ///
    /// # Errors
    /// [`RingError::Available`].
    pub(crate) fn has_more(&mut self) -> Result<bool, RingError> {
        let index = self.available.memory.load_u16(self.available.at + 2)?;
        if index.wrapping_sub(self.next_available) > self.size {
            return Err(RingError::Available { index, next: self.next_available, size: self.size });
        }
        self.seen_available = index;
        Ok(index != self.next_available)
    }

    /// Reads the chain that begins at `head` into `chain`.
    ///
    /// # Errors
    /// The chain is damaged.
    pub(crate) fn walk(&self, memory: &GuestMemory, head: u16, chain: &mut Chain) -> Result<(), RingError> {
        chain.readable.clear();
        chain.writable.clear();
        // The guest address of an indirect table.
        let mut table: Option<u64> = None;
        let mut count = u32::from(self.size);
        let (mut index, mut steps) = (head, 0);
        loop {
            if u32::from(index) >= count {
                return Err(RingError::Next { next: index, count });
            }
            let most = count.min(CHAIN_MAX);
            steps += 1;
            if steps > most {
                return Err(RingError::Endless { head, most });
            }
            let mut bytes = [0; DESCRIPTOR_BYTES as usize];
            let offset = u64::from(index) * DESCRIPTOR_BYTES;
            match table {
                None => self.descriptors.memory.copy_out(self.descriptors.at + offset as usize, &mut bytes)?,
                Some(table) => table
                    .checked_add(offset)
                    .and_then(|address| memory.copy_out(address, &mut bytes))
                    .ok_or(RingError::Table { head, address: table })?,
            }
            let Descriptor { address, len_bytes, flags, next } = Descriptor::decode(bytes);
            if flags & VRING_DESC_F_INDIRECT != 0 {
                let wrong = |what| Err(RingError::Indirect { head, what });
                match () {
                    () if !self.features.indirect => return wrong("indirect descriptors were not negotiated"),
                    () if table.is_some() => return wrong("it holds another indirect table"),
                    () if flags & VRING_DESC_F_NEXT != 0 => return wrong("another descriptor follows it"),
                    () if len_bytes == 0 || !u64::from(len_bytes).is_multiple_of(DESCRIPTOR_BYTES) => {
                        return wrong("its length is not that of whole descriptors");
                    }
                    () => {}
                }
                (table, count) = (Some(address), len_bytes / DESCRIPTOR_BYTES as u32);
                (index, steps) = (0, 0);
                continue;
            }
            if len_bytes > 0 {
                let piece = Piece { address, len_bytes };
                match (flags & VRING_DESC_F_WRITE != 0, chain.writable.is_empty()) {
                    (true, _) => chain.writable.push(piece),
                    (false, true) => chain.readable.push(piece),
                    (false, false) => return Err(RingError::Order { head }),
                }
            }
            if flags & VRING_DESC_F_NEXT == 0 {
                return Ok(());
            }
            index = next;
        }
    }

    /// Writes an entry of the used ring. The guest sees it after [`Vring::publish`].
    ///
    /// # Errors
    /// [`RingError::Memory`].
    pub(crate) fn put_used(&mut self, head: u16, written_bytes: u32) -> Result<(), RingError> {
        let index = usize::from(self.next_used & (self.size - 1));
        let mut entry = [0; 8];
        entry[..4].copy_from_slice(&u32::from(head).to_le_bytes());
        entry[4..].copy_from_slice(&written_bytes.to_le_bytes());
        self.used.memory.copy_in(self.used.at + 4 + 8 * index, &entry)?;
        self.next_used = self.next_used.wrapping_add(1);
        Ok(())
    }

    /// Shows the guest the used entries.
    ///
    /// # Errors
    /// [`RingError::Memory`].
    pub(crate) fn publish(&mut self) -> Result<(), RingError> {
        Ok(self.used.memory.store_u16(self.used.at + 2, self.next_used)?)
    }

    /// Whether the guest wants to be woken for the entries that were published since this was last
    /// called.
    ///
    /// # Errors
    /// [`RingError::Memory`].
    pub(crate) fn wants_signal(&mut self) -> Result<bool, RingError> {
        fence(Ordering::SeqCst);
        let AvailablePart { flags_at, event_at } = self.available_part();
        if !self.features.event_index {
            let flags = self.available.memory.load_u16(flags_at)?;
            return Ok(u32::from(flags) & VRING_AVAIL_F_NO_INTERRUPT == 0);
        }
        let event = self.available.memory.load_u16(event_at)?;
        let (new, before) = (self.next_used, self.signalled.replace(self.next_used));
        Ok(before.is_none_or(|old| new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)))
    }

    /// Asks the guest to kick when it makes a further request available. Returns whether one was
    /// made available meanwhile, which may come without a kick.
    ///
    /// # Errors
    /// [`RingError::Available`], [`RingError::Memory`].
    pub(crate) fn ask_for_kicks(&mut self) -> Result<bool, RingError> {
        if self.features.event_index {
            let at = self.used.at + 4 + 8 * usize::from(self.size);
            self.used.memory.store_u16(at, self.next_available)?;
        } else {
            self.used.memory.store_u16(self.used.at, 0)?;
        }
        fence(Ordering::SeqCst);
        self.has_more()
    }

    /// Tells the guest that kicks are not needed, because the ring is looked at anyway. With event
    /// indexes nothing needs to be told: the index that was asked for has passed.
    ///
    /// # Errors
    /// [`RingError::Memory`].
    pub(crate) fn need_no_kicks(&mut self) -> Result<(), RingError> {
        if !self.features.event_index {
            self.used.memory.store_u16(self.used.at, VRING_USED_F_NO_NOTIFY as u16)?;
        }
        Ok(())
    }

    fn available_part(&self) -> AvailablePart {
        AvailablePart { flags_at: self.available.at, event_at: self.available.at + 4 + 2 * usize::from(self.size) }
    }
}

struct AvailablePart {
    flags_at: usize,
    event_at: usize,
}

struct Descriptor {
    address: u64,
    len_bytes: u32,
    flags: u32,
    next: u16,
}

impl Descriptor {
    fn decode(bytes: [u8; DESCRIPTOR_BYTES as usize]) -> Self {
        let [a, b, c, d, e, f, g, h, len @ .., i, j, k, l] = bytes;
        Self {
            address: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            len_bytes: u32::from_le_bytes(len),
            flags: u16::from_le_bytes([i, j]).into(),
            next: u16::from_le_bytes([k, l]),
        }
    }
}

/// Checks the size of a ring.
///
/// # Errors
/// [`RingError::Size`].
pub(crate) fn check_size(size: u32) -> Result<u16, RingError> {
    let checked = u16::try_from(size).ok().filter(|&size| size.is_power_of_two() && size <= RING_SIZE_MAX);
    checked.ok_or(RingError::Size { size })
}
