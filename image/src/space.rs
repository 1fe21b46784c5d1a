//! Allocator of payload blocks in a growing file.
//!
//! ```text
//!   0            used_end            file_end       the file grows in steps, so that
//!   │ in use (with holes) │ slack, zeros │          not each block needs an `fallocate`
//!        ▲ ▲                   │
//!        │ └─ ready ◀─ zeroed ─ free ◀─ punched ─ quarantine ◀─ freed       exact length only
//!        └───────── take() ────┘
//! ```
//!
//! All blocks of an image have the same length, so a free piece is reused only for a request of
//! exactly its length.
//!
//! Freed space is first *quarantined*. As long as the removal of its mapping is not durable, or a
//! read that began under the old mapping is in flight, reusing the space would expose one block's
//! stale data through another block. The owner knows when both conditions are met. It then takes
//! the pieces with [`Space::recycled`], punches holes with [`HolePunches`], and adds the pieces
//! with [`Space::add_free`]. A free piece may hold stale data. [`Space::take_to_zero`] and
//! [`Space::zeroed`] are called before and after it is zeroed. Only then can the piece be handed
//! out.
//!
//! A `Space` lives inside its image's state mutex and never accesses the store. I/O happens between
//! two calls, without the mutex: [`Extension::carry_out`], [`zero_pieces`], [`HolePunches::punch`].
//! Only one thread at a time may grow the file or zero pieces (the image's `preparing` mutex).
//!
//! Invariants: what `take` hands out reads as zeros, lies within the store's length, and overlaps
//! no space that is in use. Slack is never written. A piece that is being punched or zeroed is in
//! no list, so it cannot be handed out before the call to the file system has returned.

mod pieces;

use crate::number_set::NumberSet;
use diskwright_store::{FileRange, Store, Zeroing, is_full};
use pieces::Pieces;
use std::{collections::VecDeque, io};

/// Smallest step by which a file grows, in bytes.
const STEP_MIN_BYTES: u64 = 16 << 20;
/// Largest step by which a file grows, in bytes.
const STEP_MAX_BYTES: u64 = 256 << 20;
/// Maximum number of free pieces zeroed by one preparation.
const ZERO_PIECES: usize = 16;
/// Maximum length of one hole punch in bytes. Readers of the file wait for the inode lock
/// meanwhile.
const PUNCH_BYTES: u64 = 64 << 20;

#[derive(Debug, Clone, Copy)]
struct Quarantined {
    generation: u64,
    offset_bytes: u64,
    len_bytes: u64,
}

/// The allocator of one file.
#[derive(Debug)]
pub struct Space {
    used_end_bytes: u64,
    file_end_bytes: u64,
    alignment_bytes: u64,
    /// Free pieces that read as zeros.
    ready: Pieces,
    /// Free pieces that may hold stale data.
    free: Pieces,
    /// Sorted by generation.
    quarantined: VecDeque<Quarantined>,
    generation: u64,
    /// Free pieces may still have blocks of the file system ([`Space::recycle_for_moves`]).
    free_has_blocks: bool,
    /// No piece that begins below this is handed out ([`Space::begin_at`]).
    start_bytes: u64,
}

fn overflow() -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, "the file would become larger than 2^64 bytes")
}

impl Space {
    /// Creates the allocator. `used_end_bytes` is the first byte after all space in use. The caller
    /// has truncated the file there, so that added space reads as zeros. Fresh pieces begin at
    /// multiples of `alignment_bytes`, and the file grows to multiples of it.
    ///
    /// # Panics
    /// If the alignment is 0.
    pub fn new(used_end_bytes: u64, alignment_bytes: u64) -> Self {
        assert!(alignment_bytes > 0, "an alignment is at least one byte");
        Self {
            used_end_bytes,
            file_end_bytes: used_end_bytes,
            alignment_bytes,
            ready: Pieces::default(),
            free: Pieces::default(),
            quarantined: VecDeque::new(),
            generation: 0,
            free_has_blocks: false,
            start_bytes: 0,
        }
    }

    /// Hands out nothing that begins below `start_bytes` from now on, also if it is freed later.
    /// All pieces have the length `len_bytes`. The file reaches to `start_bytes` at least.
    pub fn begin_at(&mut self, start_bytes: u64, len_bytes: u64) {
        self.start_bytes = self.start_bytes.max(start_bytes);
        for pieces in [&mut self.free, &mut self.ready] {
            while pieces.take_below(len_bytes, start_bytes).is_some() {}
        }
        self.quarantined.retain(|piece| piece.offset_bytes >= start_bytes);
        self.used_end_bytes = self.used_end_bytes.max(start_bytes);
        self.file_end_bytes = self.file_end_bytes.max(start_bytes);
    }

    /// Where [`Space::begin_at`] has let the space begin.
    pub fn start_bytes(&self) -> u64 {
        self.start_bytes
    }

    /// Takes `len_bytes` and returns the offset: a ready piece of exactly this length, else slack.
    /// `None` if a free piece must be zeroed first ([`Space::take_to_zero`]) or the file must grow
    /// ([`Space::growth`]).
    ///
    /// # Errors
    /// If the end of the piece would exceed 2^64.
    pub fn take(&mut self, len_bytes: u64) -> io::Result<Option<u64>> {
        if let Some(offset_bytes) = self.ready.first(len_bytes) {
            self.ready.remove(offset_bytes, len_bytes);
            return Ok(Some(offset_bytes));
        }
        if self.free.first(len_bytes).is_some() {
            return Ok(None);
        }
        let offset_bytes = self.align_up(self.used_end_bytes)?;
        let end_bytes = offset_bytes.checked_add(len_bytes).ok_or_else(overflow)?;
        if end_bytes > self.file_end_bytes {
            return Ok(None);
        }
        self.used_end_bytes = end_bytes;
        Ok(Some(offset_bytes))
    }

    /// Takes the lowest free piece of exactly `len_bytes` that begins below `limit_bytes`. The
    /// piece may hold stale data: the caller overwrites all of it before anything refers to it.
    /// `None` if there is no such piece.
    pub fn take_for_move(&mut self, len_bytes: u64, limit_bytes: u64) -> Option<u64> {
        let lists = [&self.free, &self.ready].map(|pieces| pieces.first(len_bytes).unwrap_or(u64::MAX));
        let from = if lists[0] < lists[1] { &mut self.free } else { &mut self.ready };
        from.take_below(len_bytes, limit_bytes)
    }

    /// Like [`Space::take_for_move`], but cuts the piece off a longer one if there is none of this
    /// length. The rest of the longer piece stays free.
    pub fn cut_for_move(&mut self, len_bytes: u64, limit_bytes: u64) -> Option<u64> {
        if let Some(offset_bytes) = self.take_for_move(len_bytes, limit_bytes) {
            return Some(offset_bytes);
        }
        self.free.lengths(len_bytes).into_iter().find_map(|longer_bytes| {
            let offset_bytes = self.free.take_below(longer_bytes, limit_bytes)?;
            self.free.add(offset_bytes + len_bytes, longer_bytes - len_bytes);
            Some(offset_bytes)
        })
    }

    /// The offset that the next [`Space::take`] of `len_bytes` returns.
    ///
    /// # Errors
    /// If the offset would exceed 2^64.
    pub fn next_offset_bytes(&self, len_bytes: u64) -> io::Result<u64> {
        match self.ready.first(len_bytes).or_else(|| self.free.first(len_bytes)) {
            Some(offset_bytes) => Ok(offset_bytes),
            None => self.align_up(self.used_end_bytes),
        }
    }

    /// Free pieces of `len_bytes` to zero before one can be handed out; empty if one is ready. The
    /// returned pieces are in no list. The caller zeroes them ([`zero_pieces`]) and calls
    /// [`Space::zeroed`].
    pub fn take_to_zero(&mut self, len_bytes: u64) -> Vec<u64> {
        if self.ready.first(len_bytes).is_some() {
            return Vec::new();
        }
        let next = || self.free.take_below(len_bytes, u64::MAX);
        std::iter::from_fn(next).take(ZERO_PIECES).collect()
    }

    /// Records the result of [`zero_pieces`] for the pieces of [`Space::take_to_zero`]: the first
    /// `zeroed` can be handed out, the others stay free and are zeroed later.
    pub fn zeroed(&mut self, pieces: &[u64], zeroed: usize, len_bytes: u64) {
        let (ready, still) = pieces.split_at(zeroed.min(pieces.len()));
        ready.iter().for_each(|&offset_bytes| self.add_ready(offset_bytes, len_bytes));
        still.iter().for_each(|&offset_bytes| self.add_free(offset_bytes, len_bytes));
    }

    /// Makes a piece available that reads as zeros.
    fn add_ready(&mut self, offset_bytes: u64, len_bytes: u64) {
        if offset_bytes >= self.start_bytes {
            self.ready.add(offset_bytes, len_bytes);
        }
    }

    /// How the file must grow before `len_bytes` can be taken from its end; `None` if the slack is
    /// enough or a free piece of this length exists.
    ///
    /// # Errors
    /// If the new end would exceed 2^64.
    pub fn growth(&self, len_bytes: u64) -> io::Result<Option<Extension>> {
        if self.ready.first(len_bytes).is_some() || self.free.first(len_bytes).is_some() {
            return Ok(None);
        }
        let offset_bytes = self.align_up(self.used_end_bytes)?;
        let end_bytes = offset_bytes.checked_add(len_bytes).ok_or_else(overflow)?;
        if end_bytes <= self.file_end_bytes {
            return Ok(None);
        }
        let step_bytes = (self.used_end_bytes / 8).clamp(STEP_MIN_BYTES, STEP_MAX_BYTES).max(len_bytes);
        let exact_bytes = self.align_up(end_bytes)?;
        let wanted_bytes =
            offset_bytes.checked_add(step_bytes).and_then(|end| self.align_up(end).ok()).unwrap_or(exact_bytes);
        Ok(Some(Extension { from_bytes: self.file_end_bytes, exact_bytes, wanted_bytes }))
    }

    /// Frees a piece that was handed out, or that was in use when the file was opened. The piece is
    /// not handed out again before [`Space::recycled`].
    pub fn quarantine(&mut self, offset_bytes: u64, len_bytes: u64) {
        self.generation += 1;
        if offset_bytes >= self.start_bytes {
            self.quarantined.push_back(Quarantined { generation: self.generation, offset_bytes, len_bytes });
        }
    }

    /// A counter that grows with each [`Space::quarantine`].
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Removes from quarantine the pieces that were freed at generations up to `generation`. The
    /// caller punches them and adds them as free.
    pub fn recycled(&mut self, generation: u64) -> HolePunches {
        let count = self.quarantined.partition_point(|piece| piece.generation <= generation);
        let pieces = self.quarantined.drain(..count);
        HolePunches::of(pieces.map(|piece| FileRange { offset_bytes: piece.offset_bytes, len_bytes: piece.len_bytes }))
    }

    /// Like [`Space::recycled`], but makes the pieces free at once: no hole is punched. Blocks will
    /// be moved into them, so the file system keeps its blocks until [`Space::free_all`].
    pub fn recycle_for_moves(&mut self, generation: u64) {
        let count = self.quarantined.partition_point(|piece| piece.generation <= generation);
        for piece in self.quarantined.drain(..count) {
            self.free.add(piece.offset_bytes, piece.len_bytes);
        }
        self.free_has_blocks |= count > 0;
    }

    /// For close: frees all quarantined and ready pieces, and drops the free pieces at the very
    /// end. Returns the new `used_end_bytes`, as [`Space::release_tail`] does, and the ranges below
    /// it of which the file system may still have blocks: the caller punches them after it has cut
    /// the file.
    pub fn free_all(&mut self) -> (u64, HolePunches) {
        let mut unused = std::mem::take(&mut self.ready);
        self.quarantined.drain(..).for_each(|piece| unused.add(piece.offset_bytes, piece.len_bytes));
        if std::mem::take(&mut self.free_has_blocks) {
            unused.append(std::mem::take(&mut self.free));
        }
        self.ready = unused;
        let end_bytes = self.release_tail();
        let unused = std::mem::take(&mut self.ready);
        let punches = HolePunches::of(unused.ranges());
        self.free.append(unused);
        (end_bytes, punches)
    }

    /// Lets [`Space::free_all`] return all free pieces, as they may have blocks of the file system.
    pub fn punch_free_at_close(&mut self) {
        self.free_has_blocks = true;
    }

    /// Makes the pieces with these numbers available, all of `len_bytes` and at multiples of that.
    /// The conditions of [`Space::add_free`] apply.
    pub(crate) fn add_all_free(&mut self, numbers: NumberSet, len_bytes: u64) {
        self.free.append(Pieces::of_numbers(numbers, len_bytes));
    }

    /// Makes a piece below `used_end_bytes` available. The caller guarantees that durably nothing
    /// refers to the piece. The piece is zeroed before it is handed out, so it may hold stale data.
    pub fn add_free(&mut self, offset_bytes: u64, len_bytes: u64) {
        if offset_bytes >= self.start_bytes {
            self.free.add(offset_bytes, len_bytes);
        }
    }

    /// First byte after all space that is in use, quarantined or free.
    pub fn used_end_bytes(&self) -> u64 {
        self.used_end_bytes
    }

    /// The store's length in bytes, as last set.
    pub fn file_end_bytes(&self) -> u64 {
        self.file_end_bytes
    }

    /// Tells the allocator that the caller changed the store's length. Added space must read as
    /// zeros. A cut below `used_end_bytes` lowers that too.
    pub fn set_file_end(&mut self, file_end_bytes: u64) {
        self.file_end_bytes = file_end_bytes;
        self.used_end_bytes = self.used_end_bytes.min(file_end_bytes);
    }

    /// Drops free pieces at the very end and returns the new `used_end_bytes`, to which the caller
    /// must cut the file. The caller must do so, and call [`Space::set_file_end`], before the next
    /// `take`, as those pieces may hold stale data.
    pub fn release_tail(&mut self) -> u64 {
        loop {
            let Some((offset_bytes, len_bytes)) = self.last_piece() else { return self.used_end_bytes };
            let _ = self.free.remove(offset_bytes, len_bytes) || self.ready.remove(offset_bytes, len_bytes);
            self.used_end_bytes = offset_bytes;
        }
    }

    /// Takes everything unused at the end out of the allocator: free pieces, and the slack. `None`
    /// if there is nothing. The caller cuts the file at [`Tail::start_bytes`], and calls
    /// [`Space::put_back`] if that fails. No other thread may grow the file or zero pieces
    /// meanwhile.
    pub fn take_tail(&mut self) -> Option<Tail> {
        let slack =
            FileRange { offset_bytes: self.used_end_bytes, len_bytes: self.file_end_bytes - self.used_end_bytes };
        let mut pieces: Vec<_> = Some(slack).filter(|slack| slack.len_bytes > 0).into_iter().collect();
        while let Some((offset_bytes, len_bytes)) = self.last_piece() {
            let _ = self.free.remove(offset_bytes, len_bytes) || self.ready.remove(offset_bytes, len_bytes);
            self.used_end_bytes = offset_bytes;
            pieces.push(FileRange { offset_bytes, len_bytes });
        }
        self.file_end_bytes = self.used_end_bytes;
        (!pieces.is_empty()).then_some(Tail { pieces })
    }

    /// Returns a tail at which the file could not be cut. All of it counts as free space that may
    /// hold stale data.
    pub fn put_back(&mut self, tail: Tail) {
        for piece in tail.pieces.into_iter().rev() {
            self.free.add(piece.offset_bytes, piece.len_bytes);
            self.used_end_bytes = piece.offset_bytes + piece.len_bytes;
        }
        self.file_end_bytes = self.used_end_bytes;
    }

    /// Offset and length of the free piece at the very end.
    fn last_piece(&self) -> Option<(u64, u64)> {
        self.free.ending_at(self.used_end_bytes).or_else(|| self.ready.ending_at(self.used_end_bytes))
    }

    fn align_up(&self, bytes: u64) -> io::Result<u64> {
        bytes.checked_next_multiple_of(self.alignment_bytes).ok_or_else(overflow)
    }
}

/// The unused end of a file, which is about to be cut off.
#[derive(Debug)]
pub struct Tail {
    /// Adjacent, the last one first.
    pieces: Vec<FileRange>,
}

impl Tail {
    /// Where the file is cut.
    pub fn start_bytes(&self) -> u64 {
        self.pieces.last().map_or(0, |piece| piece.offset_bytes)
    }
}

/// A planned growth of the file. The [`Space`] learns of it only by [`Space::set_file_end`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extension {
    /// The current end of the file, in bytes.
    pub from_bytes: u64,
    exact_bytes: u64,
    wanted_bytes: u64,
}

impl Extension {
    /// A growth by `len_bytes` from the current end.
    ///
    /// # Errors
    /// If the new end would exceed 2^64.
    pub fn by(space: &Space, len_bytes: u64) -> io::Result<Self> {
        let from_bytes = space.file_end_bytes;
        let end_bytes = space.align_up(from_bytes.checked_add(len_bytes).ok_or_else(overflow)?)?;
        Ok(Self { from_bytes, exact_bytes: end_bytes, wanted_bytes: end_bytes })
    }

    /// Grows the store by a step or, if there is no space for that, by what is needed. Returns the
    /// new end. Blocks on I/O.
    ///
    /// # Errors
    /// Errors of the store; `StorageFull` if the file cannot grow. The file's length is unchanged
    /// then.
    pub fn carry_out(&self, store: &dyn Store) -> io::Result<u64> {
        match self.extend(store, self.wanted_bytes) {
            Err(error) if self.wanted_bytes != self.exact_bytes && is_full(&error) => {
                self.extend(store, self.exact_bytes).map(|()| self.exact_bytes)
            }
            result => result.map(|()| self.wanted_bytes),
        }
    }

    /// Extends the store to the needed length as a hole, without allocating space. Returns the new
    /// end.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn carry_out_sparsely(&self, store: &dyn Store) -> io::Result<u64> {
        store.set_len(self.exact_bytes).map(|()| self.exact_bytes)
    }

    fn extend(&self, store: &dyn Store, target_bytes: u64) -> io::Result<()> {
        let range = FileRange { offset_bytes: self.from_bytes, len_bytes: target_bytes - self.from_bytes };
        // The owner may keep data at the end of the file, as a VHD its footer. Do not cut it off.
        let held_bytes = store.len_bytes()?.max(self.from_bytes);
        store.allocate(range).inspect_err(|_| {
            // A file system may have extended the file before it ran out of space.
            if store.len_bytes().is_ok_and(|len_bytes| len_bytes > held_bytes) {
                let _ = store.set_len(held_bytes);
            }
        })
    }
}

/// Zeroes the pieces returned by [`Space::take_to_zero`]; [`Space::zeroed`] records the result.
/// Their space stays allocated. Returns the number of zeroed pieces and the error that stopped the
/// loop. Blocks on I/O.
pub fn zero_pieces(store: &dyn Store, offsets: &[u64], len_bytes: u64) -> (usize, io::Result<()>) {
    for (done, &offset_bytes) in offsets.iter().enumerate() {
        if let Err(error) = store.zero_range(FileRange { offset_bytes, len_bytes }, Zeroing::Keep) {
            return (done, Err(error));
        }
    }
    (offsets.len(), Ok(()))
}

/// Pieces whose blocks are returned to the file system by hole punching.
#[derive(Debug)]
pub struct HolePunches {
    /// Sorted by descending offset.
    pieces: Vec<FileRange>,
}

impl HolePunches {
    /// The pieces must not overlap.
    pub fn of(pieces: impl Iterator<Item = FileRange>) -> Self {
        let mut pieces: Vec<_> = pieces.collect();
        pieces.sort_unstable_by_key(|piece| std::cmp::Reverse(piece.offset_bytes));
        Self { pieces }
    }

    /// Punches the next run of adjacent pieces, at most 64 MiB in one call to the store, and
    /// returns them; empty at the end. If the file system cannot punch holes, the blocks stay
    /// allocated: nothing depends on it. Blocks on I/O.
    pub fn punch(&mut self, store: &dyn Store) -> Vec<FileRange> {
        let Some(first) = self.pieces.pop() else { return Vec::new() };
        let (start_bytes, mut end_bytes) = (first.offset_bytes, first.offset_bytes.saturating_add(first.len_bytes));
        let mut done = vec![first];
        while let Some(next) = self
            .pieces
            .pop_if(|next| next.offset_bytes == end_bytes && end_bytes - start_bytes + next.len_bytes <= PUNCH_BYTES)
        {
            end_bytes = next.offset_bytes.saturating_add(next.len_bytes);
            done.push(next);
        }
        let mut at = start_bytes;
        while at < end_bytes {
            let len_bytes = (end_bytes - at).min(PUNCH_BYTES);
            let _ = store.zero_range(FileRange { offset_bytes: at, len_bytes }, Zeroing::Deallocate);
            at += len_bytes;
        }
        done
    }

    /// Punches all pieces. Blocks on I/O.
    pub fn punch_all(mut self, store: &dyn Store) {
        while !self.punch(store).is_empty() {}
    }
}

#[cfg(test)]
mod tests;
