//! Where the transfers of a file go.
//!
//! ```text
//!   place ─▶ hold the slab ─▶ its copies ─▶ the engine's transfers ─▶ release
//!     ├─ a small write to a slow slab ─▶ a place in the log of the write-back cache
//!     ├─ a read of blocks that are there ─▶ from the log
//!     └─ not possible (first write, busy, no live copy, a log that is low) ─▶ slow.rs
//! ```
//!
//! A read goes to one live copy that is not stale: the one whose member has the fewest transfers
//! under way, a slow member's counting more. A write goes to all of them, and only to a slab that
//! is dirty, durably, and that the log does not name.
//!
//! A read from a sealed slab whose checksums are not in the cache of checksums, or of a part of a
//! block, takes the slow way, and so does one that does not have its checksums.

use crate::{
    cache::{Cache, Ended, Found, sums_of_blocks},
    file::SpaceFile,
    pool::FileState,
    slab_table::Entry,
    sums::{have_sums, is_whole},
};
use diskwright_format::space::{Copy, SUM_BYTES};
use diskwright_store::{Access, CopyAt, FileRange, Placed, Placement};
use std::{io, sync::atomic::Ordering};

/// What a transfer holds. Index of the slab: 28 bits.
#[derive(Debug, Clone, std::marker::Copy, PartialEq, Eq)]
enum Hold {
    /// A slab. A request that is timed has a slot.
    Slab { index: u32, slot: u8 },
    /// A slab, and the slab of the log that has blocks of it.
    LoggedRead { index: u32, log_index: u32 },
    /// A slab, and the slab of the log to which blocks of it are written.
    LoggedWrite { index: u32, ticket: u32 },
}

const LOGGED_READ: u64 = 1 << 62;
const LOGGED_WRITE: u64 = 1 << 63;

impl Hold {
    fn to_bits(self) -> u64 {
        match self {
            Self::Slab { index, slot } => u64::from(index) | u64::from(slot) << 32,
            Self::LoggedRead { index, log_index } => u64::from(index) | u64::from(log_index) << 32 | LOGGED_READ,
            Self::LoggedWrite { index, ticket } => u64::from(index) | u64::from(ticket) << 32 | LOGGED_WRITE,
        }
    }

    fn from_bits(bits: u64) -> Self {
        let (index, other) = (bits as u32, (bits >> 32) as u32 & ((1 << 30) - 1));
        match bits & (LOGGED_READ | LOGGED_WRITE) {
            0 => Self::Slab { index, slot: other as u8 },
            LOGGED_READ => Self::LoggedRead { index, log_index: other },
            _ => Self::LoggedWrite { index, ticket: other },
        }
    }

    fn index(self) -> u32 {
        match self {
            Self::Slab { index, .. } | Self::LoggedRead { index, .. } | Self::LoggedWrite { index, .. } => index,
        }
    }
}

impl SpaceFile {
    /// Whether a write enters the log of the cache, if there is room and its slab is slow: a small
    /// one that is not part of a stream, or any small one to a slab that the log names.
    #[inline]
    fn enters(&self, cache: &Cache, entry: &Entry, range: FileRange, is_sequential: bool) -> bool {
        if !cache.takes(range.len_bytes) {
            return false;
        }
        let slab = entry.load();
        slab.is_logged() || !is_sequential && self.pool.is_slow(slab.good_copies())
    }

    fn placed_read(&self, entry: &Entry, (index, within_bytes): (u32, u64), placed: &mut Placed) {
        let Some(slab) = entry.hold_for_read() else { return };
        if slab.is_logged() && self.placed_logged_read((index, within_bytes), placed) {
            if placed.count == 0 {
                entry.release(1);
            }
            return;
        }
        if slab.is_sealed() {
            if !slab.is_cached() || !is_whole(within_bytes, placed.len_bytes) {
                return entry.release(1);
            }
            placed.is_checked = true;
        }
        let Some(copy) = self.pool.best_copy(&self.file, slab) else { return entry.release(1) };
        self.add_copy(copy, within_bytes, placed);
    }

    /// Whether the beginning of the range is in the log; if so, the read was placed there, or
    /// cannot be. Otherwise the range ends where the log has something. The caller holds the slab.
    fn placed_logged_read(&self, (index, within_bytes): (u32, u64), placed: &mut Placed) -> bool {
        let Some(cache) = self.pool.cache() else { return false };
        let (block, lead_bytes) = (within_bytes / SUM_BYTES, within_bytes % SUM_BYTES);
        let inner = cache.inner();
        match inner.ring.find((self.file.number, index), block as u16) {
            Found::Not { blocks } => {
                placed.len_bytes = placed.len_bytes.min(blocks * SUM_BYTES - lead_bytes);
                false
            }
            Found::Logged { position, blocks } => {
                placed.len_bytes = placed.len_bytes.min(blocks * SUM_BYTES - lead_bytes);
                let place = cache.place_of(&inner.ring, position);
                drop(inner);
                if is_whole(within_bytes, placed.len_bytes)
                    && let Some(slab) = cache.file.table.entry(place.0).hold_for_read()
                {
                    match self.pool.best_copy(&cache.file, slab) {
                        Some(copy) => {
                            self.add_copy(copy, place.1, placed);
                            placed.is_checked = true;
                            placed.hold = Hold::LoggedRead { index, log_index: place.0 }.to_bits();
                        }
                        None => cache.file.table.entry(place.0).release(1),
                    }
                }
                true
            }
        }
    }

    /// Places a write in the log of the cache, if it is one that enters.
    fn placed_logged_write(
        &self,
        cache: &Cache,
        entry: &Entry,
        (index, within_bytes): (u32, u64),
        placed: &mut Placed,
    ) {
        let Some(slab) = entry.hold_for_read() else { return };
        let key = (self.file.number, index);
        let blocks = placed.len_bytes / SUM_BYTES;
        let reserved = if slab.is_logged() || self.pool.is_slow(slab.good_copies()) {
            let mut inner = cache.inner();
            let block = (within_bytes / SUM_BYTES) as u16;
            // Who waits for room comes first.
            let is_free = !inner.is_waited_for();
            let reserved = is_free.then(|| inner.ring.reserve(key, block, blocks, cache.file.copies, false)).flatten();
            reserved.map(|(ticket, position)| {
                // While the lock is held: see `Ring::advance`.
                entry.set_logged(true);
                (ticket, cache.place_of(&inner.ring, position))
            })
        } else {
            None
        };
        let Some((ticket, (log_index, log_within))) = reserved else { return entry.release(1) };
        self.hold_copies(&cache.file, cache.file.table.entry(log_index), log_within, placed);
        if placed.count < self.file.copies {
            // Too few members are left for the log, or its slab is not dirty yet.
            for copy in &placed.copies[..usize::from(placed.count)] {
                self.leave(copy.member);
            }
            if placed.count > 0 {
                cache.file.table.entry(log_index).release(u64::from(placed.count));
            }
            placed.count = 0;
            cache.cancel(ticket);
            return entry.release(1);
        }
        cache.inner().ring.expect(ticket, placed.count);
        placed.is_noted = true;
        placed.hold = Hold::LoggedWrite { index, ticket }.to_bits();
    }

    /// Holds a dirty slab for a write to all its copies.
    fn hold_copies(&self, file: &FileState, entry: &Entry, within_bytes: u64, placed: &mut Placed) {
        let copies = u64::from(file.copies);
        let Some(slab) = entry.hold_for_write(copies, self.pool.epoch()) else { return };
        for copy in slab.good_copies() {
            if self.pool.live_member(copy.member).is_some() {
                self.add_copy(copy, within_bytes, placed);
            }
        }
        // After the copies were chosen: a member that fails from now on fails the transfer.
        let surplus = copies.saturating_sub(u64::from(placed.count));
        if self.pool.unrecorded() != 0 || self.pool.journal_failed() {
            for copy in &placed.copies[..usize::from(placed.count)] {
                self.leave(copy.member);
            }
            placed.count = 0;
            return entry.release(copies);
        }
        if surplus > 0 {
            entry.release(surplus);
        }
    }

    fn add_copy(&self, copy: Copy, within_bytes: u64, placed: &mut Placed) {
        self.enter(copy.member);
        let offset_bytes = copy.offset_bytes(self.pool.slab_shift()) + within_bytes;
        placed.copies[usize::from(placed.count)] = CopyAt { member: copy.member, offset_bytes };
        placed.count += 1;
    }

    /// Counts a request as served by the class of its slowest copy.
    #[cold]
    fn count_served(&self, placed: &Placed) {
        let copies = placed.copies[..usize::from(placed.count)].iter();
        let class = copies.filter_map(|copy| self.pool.member(copy.member)).map(|member| member.class).max();
        if let Some(class) = class {
            self.pool.count_served(class);
        }
    }

    /// Counts a transfer of the member, where there is a choice between members.
    #[inline]
    fn enter(&self, member: u8) {
        if let (Some(member), 2..) = (self.pool.member(member), self.file.copies) {
            member.in_flight.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[inline]
    fn leave(&self, member: u8) {
        if let (Some(member), 2..) = (self.pool.member(member), self.file.copies) {
            member.in_flight.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Placement for SpaceFile {
    fn place(&self, range: FileRange, access: Access, may_note: bool) -> Placed {
        let (index, within_bytes) = self.slab_of(range.offset_bytes);
        let mut len_bytes = range.len_bytes.min(self.pool.slab_bytes() - within_bytes);
        let inside_bytes = self.len().saturating_sub(range.offset_bytes);
        if access == Access::Read && inside_bytes > 0 {
            len_bytes = len_bytes.min(inside_bytes);
        }
        let hold = Hold::Slab { index, slot: 0 }.to_bits();
        let mut placed = Placed { len_bytes, hold, ..Placed::default() };
        if inside_bytes < len_bytes {
            // Beyond the end: an error, or the file grows.
            return placed;
        }
        let noted = self.file.heat.note(index, range.offset_bytes, range.len_bytes);
        match (self.file.table.get(index), access) {
            (Some(entry), Access::Read) => {
                self.placed_read(entry, (index, within_bytes), &mut placed);
                placed.is_zero = placed.count == 0 && entry.load().state().is_none();
            }
            (Some(entry), Access::Write) if self.is_writable => {
                match self.pool.cache().filter(|cache| self.enters(cache, entry, range, noted.is_sequential)) {
                    Some(cache) if !may_note || !is_whole(within_bytes, len_bytes) => _ = cache,
                    Some(cache) => self.placed_logged_write(cache, entry, (index, within_bytes), &mut placed),
                    None => self.hold_copies(&self.file, entry, within_bytes, &mut placed),
                }
            }
            (None, Access::Read) => placed.is_zero = true,
            (_, Access::Write) => {}
        }
        if noted.is_counted {
            self.count_served(&placed);
            if placed.hold == hold && placed.count > 0 {
                placed.hold = Hold::Slab { index, slot: self.pool.pace.begin() }.to_bits();
            }
        }
        for copy in &placed.copies[..usize::from(placed.count)] {
            if let Some(member) = self.pool.member(copy.member) {
                member.counter.count(access, placed.len_bytes);
            }
        }
        placed
    }

    fn note(&self, hold: u64, bytes: &[u8]) {
        if let (Hold::LoggedWrite { ticket, .. }, Some(cache)) = (Hold::from_bits(hold), self.pool.cache()) {
            let sums = sums_of_blocks(bytes);
            cache.inner().ring.note(ticket, sums);
        }
    }

    fn release(&self, member: u8, hold: u64, access: Access, ok: bool) {
        if let (Some(member), Access::Write) = (self.pool.member(member), access) {
            member.written();
        }
        self.leave(member);
        let hold = Hold::from_bits(hold);
        if let Hold::Slab { slot: slot @ 1.., .. } = hold {
            self.pool.pace.end(slot);
        }
        let Some(entry) = self.file.table.get(hold.index()) else { return };
        match (hold, self.pool.cache()) {
            (Hold::LoggedRead { log_index, .. }, Some(cache)) => {
                cache.file.table.entry(log_index).release(1);
                entry.release(1);
            }
            (Hold::LoggedWrite { ticket, .. }, Some(cache)) => {
                let mut inner = cache.inner();
                let place = inner.ring.position_of(ticket).map(|position| cache.place_of(&inner.ring, position));
                let ended = cache.ended(&mut inner, ticket, ok);
                drop(inner);
                if let Some((log_index, _)) = place {
                    cache.file.table.entry(log_index).release_write(self.pool.epoch());
                }
                if ended == Ended::All {
                    entry.release(1);
                }
            }
            _ if access == Access::Read => entry.release(1),
            _ => entry.release_write(self.pool.epoch()),
        }
    }

    fn is_intact(&self, hold: u64, offset_bytes: u64, bytes: &[u8]) -> bool {
        let (index, within_bytes) = self.slab_of(offset_bytes);
        let hold = Hold::from_bits(hold);
        if let (Hold::LoggedRead { .. }, Some(cache)) = (hold, self.pool.cache()) {
            return cache.is_intact((self.file.number, index), within_bytes, bytes);
        }
        let Some(entry) = self.file.table.get(hold.index()) else { return false };
        let Some(sums) = self.pool.sums_cache().get(self.file.number, index) else {
            entry.set_cached(false);
            return false;
        };
        // After the comparison: see `sums.rs`.
        have_sums(&sums, within_bytes, bytes) || !entry.load().is_sealed()
    }

    fn sync_failed(&self, member: u8, error: &io::Error) {
        if let Some(member) = self.pool.member(member) {
            member.sync_failed(error);
        }
    }

    fn unsynced(&self) -> Option<u64> {
        let pool = &self.pool;
        if self.length_changed.load(Ordering::Acquire) != 0 || pool.unrecorded() != 0 || pool.journal_failed() {
            return None;
        }
        if pool.has_orphans() {
            return None;
        }
        // Headers must be written first.
        if self.pool.cache().is_some_and(|cache| cache.has_unwritten()) {
            return None;
        }
        // A member whose sync failed before fails again, by the store's own sync.
        if self.pool.live_members().any(|member| member.has_failed()) {
            return None;
        }
        let members = self.pool.live_members().filter(|member| member.begin_sync());
        Some(members.fold(0, |all, member| all | 1 << member.number))
    }

    fn synced(&self, member: u8, result: &io::Result<()>) {
        if let Some(member) = self.pool.member(member) {
            member.sync_ended(result);
        }
    }
}
