//! Headers, room, and reads of the log.

use super::{ring::SlabKey, state::Cache};
use crate::{
    copies::no_copy,
    pool::{Pool, lock},
};
use diskwright_format::space::{BLOCK_BYTES, Copy, change::SlabState, superblock::Class};
use std::{
    io,
    sync::{PoisonError, atomic::Ordering},
    time::Duration,
};

/// How long a thread that waits for room sleeps at most, in case a signal is missed.
const PATIENCE: Duration = Duration::from_millis(50);

impl Cache {
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
                if inner.ring.fresh() > 0 && inner.ring.is_full() {
                    // `reserve` leaves room for headers; without it a header would overwrite data.
                    let what = format!("pool {}: its cache has no room for a header", pool.name());
                    drop(inner);
                    pool.fail_journal(what.clone());
                    return Err(io::Error::new(io::ErrorKind::StorageFull, what));
                }
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
            match member.read_at(block, copy.offset_bytes(self.slab_shift) + within_bytes) {
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

impl Pool {
    /// Makes the slabs that the log comes to next dirty, with one commit. Writers do not wait for
    /// it as long as it is done early enough.
    pub(crate) fn dirty_ahead(&self, cache: &Cache) -> io::Result<()> {
        let slabs: Vec<SlabKey> = cache.ahead().map(|index| (cache.file.number, index)).collect();
        let is_dirty = |index: u32| cache.file.table.entry(index).load().state() == Some(SlabState::Dirty);
        let soon = &slabs[..slabs.len().div_ceil(2)];
        if soon.iter().all(|&(_, index)| is_dirty(index)) {
            return Ok(());
        }
        self.make_all_dirty(&slabs)
    }

    /// Whether the log comes to this slab soon, so that it stays dirty.
    pub(crate) fn is_ahead_in_log(&self, file: u32, index: u32) -> bool {
        self.cache().is_some_and(|cache| cache.file.number == file && cache.ahead().any(|ahead| ahead == index))
    }

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
