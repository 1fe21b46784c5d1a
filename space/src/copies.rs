//! The copies of a slab: which one is read, and how all of them are read and written by blocking
//! calls.
//!
//! ```text
//!   read    the best copy; after an error the next one
//!   write   all live copies that are not stale
//!             failed copy of a mirror ─▶ the member is lost ─▶ recorded ─▶ the write is answered
//!             no space on a member    ─▶ an error of the request; the slab is unequal until it is
//!                                        resynced
//! ```
//!
//! A slab is dirty, durably, before it is written.

use crate::{
    busy::Busy,
    member::Member,
    pool::{FileState, Pool, lock},
    slab_table::{Entry, Slab},
};
use diskwright_format::space::{
    Copy, FILE_SLABS_MAX,
    change::{Change, SlabState},
    superblock::Class,
};
use diskwright_store::{FileRange, is_full};
use std::{
    io,
    sync::{Arc, atomic::Ordering},
};

/// Slabs that become dirty together: an aligned group of this many.
pub(crate) const DIRTY_GROUP: u32 = 16;
const _: () = assert!(FILE_SLABS_MAX.is_multiple_of(DIRTY_GROUP));

/// How many transfers of a fast member one of a slow member counts for.
const SLOW_COST: u32 = 8;

/// What is written.
#[derive(Clone, std::marker::Copy)]
pub(crate) enum Payload<'a> {
    Bytes(&'a [u8]),
    Zeros(u64),
}

pub(crate) fn no_copy() -> io::Error {
    io::Error::other("no member that holds a valid copy of this range is there")
}

impl Pool {
    /// The copy to read.
    #[inline]
    pub(crate) fn best_copy(&self, file: &FileState, slab: Slab) -> Option<Copy> {
        if file.copies == 1 {
            return slab.good_copies().next().filter(|copy| self.live_member(copy.member).is_some());
        }
        let live = slab.good_copies().filter_map(|copy| Some((copy, self.live_member(copy.member)?)));
        if slab.is_unequal() {
            return slab.good_copies().find(|copy| self.live_member(copy.member).is_some());
        }
        let cost = |(_, member): &(Copy, &Arc<Member>)| {
            let queued = member.in_flight.load(Ordering::Relaxed).saturating_add(1);
            if member.class == Class::Hdd { queued.saturating_mul(SLOW_COST) } else { queued }
        };
        live.min_by_key(cost).map(|(copy, _)| copy)
    }

    /// The best copy, and then the others that may be read instead.
    pub(crate) fn copies_to_read(&self, file: &FileState, slab: Slab) -> impl Iterator<Item = Copy> {
        let best = self.best_copy(file, slab);
        let others = slab.good_copies().filter(move |copy| Some(*copy) != best && !slab.is_unequal());
        best.into_iter().chain(others)
    }

    /// Reads from the best copy, or from another one if that fails. The caller holds the slab.
    pub(crate) fn read_copies(
        &self,
        file: &FileState,
        slab: Slab,
        within_bytes: u64,
        piece: &mut [u8],
    ) -> io::Result<()> {
        let mut failure = None;
        for copy in self.copies_to_read(file, slab) {
            let Some(member) = self.live_member(copy.member) else { continue };
            match member.read_at(piece, copy.offset_bytes(self.slab_shift()) + within_bytes) {
                Ok(()) => return Ok(()),
                Err(error) => failure = Some(error),
            }
        }
        Err(failure.unwrap_or_else(no_copy))
    }

    /// Writes to all good copies of a busy slab, which becomes dirty before if it is not.
    pub(crate) fn write_busy(
        &self,
        file: &FileState,
        index: u32,
        within_bytes: u64,
        payload: Payload<'_>,
    ) -> io::Result<()> {
        let entry = file.table.entry(index);
        if entry.load().state() != Some(SlabState::Dirty) {
            self.make_dirty(file, index)?;
        }
        self.write_copies(entry, within_bytes, payload)
    }

    /// Writes to all good copies of a mapped slab that others may use at the same time.
    pub(crate) fn write_beside_others(
        &self,
        file: &FileState,
        index: u32,
        within_bytes: u64,
        bytes: &[u8],
    ) -> io::Result<()> {
        let entry = file.table.entry(index);
        loop {
            self.require_journal()?;
            if entry.hold_for_write(1, self.epoch()).is_some() {
                let written = self.write_each_copy(entry, within_bytes, Payload::Bytes(bytes));
                entry.release_write(self.epoch());
                return written;
            }
            let slab = entry.load();
            match slab.state() {
                None => return Err(io::Error::other("the slab is not mapped")),
                Some(SlabState::Dirty) if !slab.is_unequal() => self.wait_not_busy(),
                Some(_) => {
                    let _busy = Busy::wait(self, entry);
                    if entry.load().is_unequal() {
                        return self.write_busy(file, index, within_bytes, Payload::Bytes(bytes));
                    }
                    self.make_dirty(file, index)?;
                }
            }
        }
    }

    /// Writes to all good copies of a busy, dirty slab.
    fn write_copies(&self, entry: &Entry, within_bytes: u64, payload: Payload<'_>) -> io::Result<()> {
        let result = self.write_each_copy(entry, within_bytes, payload);
        // Also after a failure: something may have been written.
        entry.written(self.epoch());
        result
    }

    fn write_each_copy(&self, entry: &Entry, within_bytes: u64, payload: Payload<'_>) -> io::Result<()> {
        let slab = entry.load();
        let (mut done, mut failed) = (0, Vec::new());
        for copy in slab.good_copies() {
            let Some(member) = self.live_member(copy.member) else { continue };
            let at = copy.offset_bytes(self.slab_shift()) + within_bytes;
            let result = match payload {
                Payload::Bytes(bytes) => member.write_at(bytes, at),
                Payload::Zeros(len_bytes) => member.zero_range(FileRange { offset_bytes: at, len_bytes }),
            };
            member.written();
            match result {
                Ok(()) => done += 1,
                Err(error) => failed.push((copy.member, error)),
            }
        }
        if let Some((_, error)) = failed.iter().find(|(_, error)| done == 0 || is_full(error)) {
            // The copies may have different contents now.
            entry.set_unequal(slab.good_copies().count() > 1);
            return Err(io::Error::new(error.kind(), error.to_string()));
        }
        if done == 0 {
            return Err(no_copy());
        }
        for (number, error) in failed {
            self.lose(number, &error)?;
        }
        // Another thread may have seen a member fail a moment ago.
        self.wait_for_records()
    }

    /// Makes a slab dirty, with its neighbours, durably.
    pub(crate) fn make_dirty(&self, file: &FileState, index: u32) -> io::Result<()> {
        let first = index - index % DIRTY_GROUP;
        let change = Change::State { file: file.number, first, count: DIRTY_GROUP, state: SlabState::Dirty };
        let mut state = lock(self.state());
        let ticket = self.append(&mut state, &change);
        state.dirtying.push((file.number, first, ticket));
        drop(state);
        self.wait(ticket)
    }
}
