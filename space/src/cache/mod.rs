//! The write-back cache: small writes to slow slabs go to a log on the fast members first.
//!
//! ```text
//!   small write ─▶ a place in the log ─▶ the engine's transfers ─▶ live          `Ring`
//!   flush       ─▶ headers that name what is new ─▶ one sync for each member     this file
//!   read        ─▶ live? from the log, compared with its checksum : from the slab
//!   destage     ─▶ the oldest blocks, in the order of addresses ─▶ their slabs   `destage`
//!               ─▶ sync ─▶ anchor, durable ─▶ their places are free
//!   open        ─▶ anchor ─▶ headers ─▶ what is live                             `replay`
//! ```
//!
//! The log is a file of the pool, on the fast tier, with as many copies as the pool keeps. So its
//! slabs are mirrored, made equal after a power cut, rebuilt and moved like all others, and a member
//! that dies is a lost copy of them.
//!
//! Blocks are named by file, slab and block, not by where the slab lies: a slab may move while
//! blocks of it are in the log. What enters: whole blocks of 4 KiB, at most [`ENTRY_BYTES_MAX`], to
//! a mapped slab with a copy on a slow member. Streams pass by, unless the log names the slab.
//!
//! What must hold at any moment of a power cut:
//! - A block is live for a replay if a header names it, unless a newer row does, or one that forgets
//!   its slab. So a write may go past the log only to a slab that the log does not name: before, its
//!   live blocks are destaged, durably, and then it is forgotten, durably.
//! - A header is written after the transfers of its blocks have ended, and before the sync of the
//!   flush. Both are durable then, or the flush was not answered.
//! - The anchor moves after what it passes is durable in its slabs, and a place is used again after
//!   the anchor is durable.
//!
//! Locks: `destaging` (one round at a time), then `flushing` (headers are written in order), then
//! those of the pool. `inner` is taken last, and never held for I/O. A thread that has a slab for
//! itself does not wait for room in the log, since the thread that makes room waits
//! for slabs.

mod destage;
mod replay;
mod ring;

pub(crate) use destage::start_worker;
pub use replay::CACHE_BYTES_DEFAULT;
pub(crate) use ring::{Ended, Found, Live, SlabKey};

use crate::{
    copies::no_copy,
    pool::{FileState, Pool, lock},
};
use diskwright_format::space::{BLOCK_BYTES, Copy, SUM_BYTES, superblock::Class};
use ring::Ring;
use std::{
    io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

/// Name of the file with the log.
pub(crate) const LOG: &str = "/cache";

/// Longest write that enters.
pub(crate) const ENTRY_BYTES_MAX: u64 = 64 << 10;

/// How long a thread that waits for room sleeps at most, in case a signal is missed.
const PATIENCE: Duration = Duration::from_millis(50);

/// The log in memory, and who waits for room in it.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) ring: Ring,
    /// Who comes next waits with this number, and who has `turn` is served.
    next_turn: u64,
    turn: u64,
    /// Why the last round of destaging failed.
    failure: Option<String>,
}

/// An open write-back cache; see the module documentation.
#[derive(Debug)]
pub(crate) struct Cache {
    /// The file with the log.
    pub(crate) file: Arc<FileState>,
    slab_shift: u8,
    inner: Mutex<Inner>,
    /// Rows that no header on the members names.
    unwritten: AtomicU64,
    /// All headers before this sequence number are durable.
    durable: AtomicU64,
    flushing: Mutex<()>,
    destaging: Mutex<()>,
    /// Room was made.
    moved: Condvar,
    /// Somebody waits for room.
    wanted: Condvar,
    has_worker: AtomicBool,
    /// Nothing enters any more.
    is_closing: AtomicBool,
}

impl Cache {
    fn new(file: Arc<FileState>, slab_shift: u8, ring: Ring, durable: u64) -> Self {
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

    /// Writes headers for all blocks that none names. They are durable with the next sync. All
    /// headers before the sequence number that is returned were written.
    pub(crate) fn flush(&self, pool: &Pool) -> io::Result<u64> {
        let sequence = self.inner().ring.next_place().sequence;
        // After the number was read: another flush may be about to write a header.
        if !self.has_unwritten() {
            return Ok(sequence);
        }
        let _one = lock(&self.flushing);
        loop {
            let (taken, place) = {
                let mut inner = self.inner();
                let Some(taken) = inner.ring.take_rows(pool.id(), self.durable.load(Ordering::Acquire)) else {
                    return Ok(inner.ring.next_place().sequence);
                };
                let place = self.place_of(&inner.ring, taken.position);
                (taken, place)
            };
            let written = pool.write_beside_others(&self.file, place.0, place.1, &taken.block[..]);
            // The headers after it could not be found.
            written.inspect_err(|error| pool.fail_journal(format!("pool {}: its cache: {error}", pool.name())))?;
            self.unwritten.fetch_sub(taken.rows, Ordering::AcqRel);
        }
    }

    /// Waits until `count` blocks may enter although the log is nearly full. Who came first is
    /// served first. The caller has no slab for itself.
    pub(crate) fn admit(&self, pool: &Pool, count: u64) -> io::Result<()> {
        let mut inner = self.inner();
        if inner.turn == inner.next_turn && inner.ring.admit(count) {
            return Ok(());
        }
        let turn = inner.next_turn;
        inner.next_turn += 1;
        let admitted = loop {
            if inner.turn == turn {
                if inner.ring.admit(count) {
                    break Ok(());
                }
                if let Some(why) = &inner.failure {
                    break Err(io::Error::other(why.clone()));
                }
                if let Err(error) = pool.require_journal() {
                    break Err(error);
                }
                if !self.has_worker.load(Ordering::Acquire) {
                    drop(inner);
                    let destaged = pool.make_room();
                    inner = self.inner();
                    match destaged {
                        Ok(()) => continue,
                        Err(error) => break Err(error),
                    }
                }
            }
            self.wanted.notify_one();
            inner = self.moved.wait_timeout(inner, PATIENCE).unwrap_or_else(PoisonError::into_inner).0;
        };
        inner.turn += 1;
        self.moved.notify_all();
        admitted
    }

    /// Reads blocks that follow one another in the log into `buf`, and compares them with their
    /// checksums. The caller holds the slab to which they belong, or has it for itself.
    pub(crate) fn read(&self, pool: &Pool, position: u64, sums: &[u32], buf: &mut [u8]) -> io::Result<()> {
        for (step, (block, sum)) in (0..).zip(buf.chunks_mut(BLOCK_BYTES).zip(sums)) {
            let (index, within_bytes) = {
                let inner = self.inner();
                self.place_of(&inner.ring, position + step)
            };
            self.read_block(pool, index, within_bytes, *sum, block)?;
        }
        Ok(())
    }

    fn read_block(&self, pool: &Pool, index: u32, within_bytes: u64, sum: u32, block: &mut [u8]) -> io::Result<()> {
        let entry = self.file.table.entry(index);
        let slab = loop {
            match entry.hold_for_read() {
                Some(slab) => break slab,
                None if entry.load().state().is_none() => return Err(no_copy()),
                None => pool.wait_not_busy(),
            }
        };
        let (mut failure, mut is_wrong) = (None, false);
        let best = pool.best_copy(&self.file, slab);
        for copy in best.into_iter().chain(slab.good_copies().filter(|copy| Some(*copy) != best)) {
            let Some(member) = pool.live_member(copy.member) else { continue };
            match member.store.read_at(block, copy.offset_bytes(self.slab_shift) + within_bytes) {
                Ok(()) if crc32c::crc32c(block) == sum => {
                    entry.release(1);
                    return Ok(());
                }
                Ok(()) => is_wrong = true,
                Err(error) => failure = Some(error),
            }
        }
        entry.release(1);
        if is_wrong {
            let what = "blocks of the write-back cache do not have their checksums on any member";
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        Err(failure.unwrap_or_else(no_copy))
    }
}

/// The checksums of whole blocks.
pub(crate) fn sums_of_blocks(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks(BLOCK_BYTES).map(crc32c::crc32c).collect()
}

const _: () = assert!(SUM_BYTES == BLOCK_BYTES as u64);

impl Pool {
    /// Whether a slab has a copy on a slow member.
    pub(crate) fn is_slow(&self, copies: impl IntoIterator<Item = Copy>) -> bool {
        copies.into_iter().filter_map(|copy| self.member(copy.member)).any(|member| member.class == Class::Hdd)
    }

    /// Makes durable what was written: the headers of the cache, then every member.
    pub(crate) fn sync_all(&self) -> io::Result<()> {
        let Some(cache) = self.cache() else { return self.sync_members() };
        let sequence = cache.flush(self)?;
        self.sync_members()?;
        cache.durable.fetch_max(sequence, Ordering::AcqRel);
        Ok(())
    }
}
