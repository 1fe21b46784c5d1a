//! An open cache: the ring with its lock, and what the threads that use it tell each other.

use super::ring::{Ended, Ring, SlabKey};
use crate::file_state::{FileState, lock};
use diskwright_format::space::{BLOCK_BYTES, SUM_BYTES};
use std::sync::{
    Arc, Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

/// Name of the file with the log.
pub(crate) const LOG: &str = "/cache";

/// Longest write that enters.
pub(crate) const ENTRY_BYTES_MAX: u64 = 64 << 10;

/// Slabs that become dirty before the log comes to them.
const AHEAD_SLABS: u32 = 64;

/// The write-back cache in a status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheStatus {
    /// Its length in bytes.
    pub len_bytes: u64,
    /// Copies of it.
    pub copies: u8,
    /// Bytes that are not free.
    pub used_bytes: u64,
    /// Of these, bytes whose newest contents are only here.
    pub waiting_bytes: u64,
}

/// The log in memory, and who waits for room in it.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) ring: Ring,
    /// Who comes next waits with this number, and who has `turn` is served.
    pub(super) next_turn: u64,
    pub(super) turn: u64,
    /// Why the last round of destaging failed.
    pub(super) failure: Option<String>,
}

impl Inner {
    /// Whether somebody waits for room.
    pub(crate) fn is_waited_for(&self) -> bool {
        self.turn != self.next_turn
    }
}

/// An open write-back cache; see the module documentation.
#[derive(Debug)]
pub(crate) struct Cache {
    /// The file with the log.
    pub(crate) file: Arc<FileState>,
    pub(super) slab_shift: u8,
    inner: Mutex<Inner>,
    /// Rows that no header on the members names.
    pub(super) unwritten: AtomicU64,
    /// All headers before this sequence number are durable.
    pub(super) durable: AtomicU64,
    pub(super) flushing: Mutex<()>,
    pub(super) destaging: Mutex<()>,
    /// Room was made.
    pub(super) moved: Condvar,
    /// Somebody waits for room.
    pub(super) wanted: Condvar,
    pub(super) has_worker: AtomicBool,
    /// Nothing enters any more.
    pub(super) is_closing: AtomicBool,
}

impl Cache {
    pub(super) fn new(file: Arc<FileState>, slab_shift: u8, ring: Ring, durable: u64) -> Self {
        Self {
            file,
            slab_shift,
            unwritten: AtomicU64::new(ring.fresh() as u64),
            inner: Mutex::new(Inner { ring, next_turn: 0, turn: 0, failure: None }),
            durable: AtomicU64::new(durable),
            flushing: Mutex::new(()),
            destaging: Mutex::new(()),
            moved: Condvar::new(),
            wanted: Condvar::new(),
            has_worker: AtomicBool::new(false),
            is_closing: AtomicBool::new(false),
        }
    }

    pub(crate) fn inner(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// Whether a write of this length may enter.
    #[inline]
    pub(crate) fn takes(&self, len_bytes: u64) -> bool {
        len_bytes <= ENTRY_BYTES_MAX && !self.is_closing.load(Ordering::Relaxed)
    }

    /// Slab of the log's file, and offset in it, of a position.
    pub(crate) fn place_of(&self, ring: &Ring, position: u64) -> (u32, u64) {
        let offset_bytes = ring.file_block(position) * BLOCK_BYTES as u64;
        ((offset_bytes >> self.slab_shift) as u32, offset_bytes & ((1 << self.slab_shift) - 1))
    }

    /// The slabs of the log that are written next.
    pub(super) fn ahead(&self) -> impl Iterator<Item = u32> + use<> {
        let inner = self.inner();
        let (first, _) = self.place_of(&inner.ring, inner.ring.head());
        drop(inner);
        let slabs = (self.file.len_bytes.load(Ordering::Relaxed) >> self.slab_shift) as u32;
        (0..AHEAD_SLABS.min(slabs / 2)).map(move |step| (first + step) % slabs)
    }

    /// Whether rows wait for a header: then a flush must write it.
    #[inline]
    pub(crate) fn has_unwritten(&self) -> bool {
        self.unwritten.load(Ordering::Acquire) > 0
    }

    /// A transfer to the log has ended; see [`Ring::ended`].
    pub(crate) fn ended(&self, inner: &mut Inner, ticket: u32, ok: bool) -> Ended {
        let before = inner.ring.fresh() as u64;
        let ended = inner.ring.ended(ticket, ok);
        // While the lock is held: a flush that follows finds them.
        self.unwritten.fetch_add(inner.ring.fresh() as u64 - before, Ordering::AcqRel);
        ended
    }

    /// What is in it; `None` if it is being removed.
    pub(crate) fn status(&self) -> Option<CacheStatus> {
        let inner = self.inner();
        let bytes = |blocks: u64| blocks * BLOCK_BYTES as u64;
        (!self.is_closing.load(Ordering::Relaxed)).then(|| CacheStatus {
            len_bytes: self.file.len_bytes.load(Ordering::Relaxed),
            copies: self.file.copies,
            used_bytes: bytes(inner.ring.used()),
            waiting_bytes: bytes(inner.ring.live()),
        })
    }

    /// Gives up a write that was reserved, and whose transfers have not started.
    pub(crate) fn cancel(&self, ticket: u32) {
        let mut inner = self.inner();
        inner.ring.expect(ticket, 1);
        self.ended(&mut inner, ticket, false);
    }

    /// Whether whole blocks that were read from the log have their checksums.
    pub(crate) fn is_intact(&self, key: SlabKey, within_bytes: u64, bytes: &[u8]) -> bool {
        let first = (within_bytes / SUM_BYTES) as u16;
        let inner = self.inner();
        let is_it = |(block, bytes): (u16, &[u8])| {
            inner.ring.sum_of(key, block).is_some_and(|sum| sum == crc32c::crc32c(bytes))
        };
        // A block that was written again meanwhile is read again.
        (first..).zip(bytes.chunks(BLOCK_BYTES)).all(is_it)
    }
}

/// The checksums of whole blocks.
pub(crate) fn sums_of_blocks(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks(BLOCK_BYTES).map(crc32c::crc32c).collect()
}

const _: () = assert!(SUM_BYTES == BLOCK_BYTES as u64);
