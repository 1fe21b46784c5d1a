//! Where the next payload block goes in a growing file.
//!
//! ```text
//!   0            used_end            file_end
//!   │ in use (with holes) │ slack, zeros │          the file grows in steps, so that a block costs no `fallocate`
//!        ▲ ▲                   │
//!        │ └─ ready ◀─ zeroed ─ free ◀─ punched ─ quarantine ◀─ given up       exact length only
//!        └───────── take() ────┘
//! ```
//!
//! Blocks of an image are all alike, so a free piece is used for a block of exactly its length.
//!
//! Space that was given up is first *quarantined*: until the removal of its mapping is durable, and
//! no read that was begun under the old mapping is in flight, handing it out would show one block's
//! stale data in another. The owner knows when both are true; it then takes the pieces by
//! [`Space::recycled`], punches them by [`Punching`], and adds them by [`Space::add_free`]. A free
//! piece may hold stale data. [`Space::take_to_zero`] and [`Space::add_ready`] are called before
//! and after it is zeroed; only then can it be handed out.
//!
//! A `Space` lives inside its image's state mutex and never touches the store. What waits for the
//! disk is done between two calls, without the mutex: [`Extension::carry_out`], [`zero_pieces`],
//! [`Punching::punch`]. Whoever grows or zeroes must do so alone (the image's `preparing` mutex).
//!
//! Invariants: what `take` hands out reads as zeros, lies within the store's length, and overlaps
//! nothing that was handed out and not recycled. Nobody writes to slack. A piece that is punched or
//! zeroed is in no list meanwhile, so it cannot be handed out before the call to the file system
//! has ended.

use diskwright_store::{FileRange, Store, Zeroing, is_full};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    io,
};

/// Smallest step by which a file grows, in bytes.
const STEP_MIN_BYTES: u64 = 16 << 20;
/// Largest step by which a file grows, in bytes.
const STEP_MAX_BYTES: u64 = 256 << 20;
/// Most free pieces that are zeroed at a time.
const ZERO_PIECES: usize = 16;
/// Most bytes that one call punches: readers of the file wait for the inode's lock meanwhile.
const PUNCH_BYTES: u64 = 64 << 20;

#[derive(Debug, Clone, Copy)]
struct Quarantined {
    generation: u64,
    offset_bytes: u64,
    len_bytes: u64,
}

/// Pieces of space: length in bytes to the offsets of pieces of that length.
#[derive(Debug, Default)]
struct Pieces(BTreeMap<u64, BTreeSet<u64>>);

impl Pieces {
    fn add(&mut self, offset_bytes: u64, len_bytes: u64) {
        self.0.entry(len_bytes).or_default().insert(offset_bytes);
    }

    fn remove(&mut self, offset_bytes: u64, len_bytes: u64) -> bool {
        let Some(offsets) = self.0.get_mut(&len_bytes) else { return false };
        let was_there = offsets.remove(&offset_bytes);
        if offsets.is_empty() {
            self.0.remove(&len_bytes);
        }
        was_there
    }

    fn first(&self, len_bytes: u64) -> Option<u64> {
        self.0.get(&len_bytes)?.first().copied()
    }

    /// The piece that ends at `end_bytes`: offset and length.
    fn ending_at(&self, end_bytes: u64) -> Option<(u64, u64)> {
        self.0.iter().find_map(|(&len_bytes, offsets)| {
            let offset_bytes = end_bytes.checked_sub(len_bytes)?;
            offsets.contains(&offset_bytes).then_some((offset_bytes, len_bytes))
        })
    }
}

/// The allocator of one file. See the module.
#[derive(Debug)]
pub struct Space {
    used_end_bytes: u64,
    file_end_bytes: u64,
    alignment_bytes: u64,
    /// Free pieces that read as zeros.
    ready: Pieces,
    /// Free pieces that may hold anything.
    free: Pieces,
    /// In order of generation.
    quarantined: VecDeque<Quarantined>,
    generation: u64,
}

fn overflow() -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, "the file would grow beyond what an offset can express")
}

impl Space {
    /// Space after `used_end_bytes`, the first byte after everything in use. The caller has
    /// truncated the file there, so that what is added reads as zeros. Pieces from fresh space
    /// begin at multiples of `alignment_bytes`, and the file grows to multiples of it.
    ///
    /// # Panics
    /// When the alignment is 0, which is an error of the program.
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
        }
    }

    /// Takes `len_bytes` and returns the first byte: a ready piece of exactly this length, else
    /// slack. `None` when a free piece must be zeroed first ([`Space::take_to_zero`]), or the file
    /// must grow ([`Space::growth`]).
    ///
    /// # Errors
    /// When no offset can express the piece's end.
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

    /// Where [`Space::take`] will find `len_bytes`.
    ///
    /// # Errors
    /// When no offset can express it.
    pub fn next_offset_bytes(&self, len_bytes: u64) -> io::Result<u64> {
        match self.ready.first(len_bytes).or_else(|| self.free.first(len_bytes)) {
            Some(offset_bytes) => Ok(offset_bytes),
            None => self.align_up(self.used_end_bytes),
        }
    }

    /// Free pieces of `len_bytes` that must be zeroed before one can be handed out; none when one
    /// is ready. They are in no list from now on: the caller zeroes them and calls
    /// [`Space::add_ready`], or [`Space::add_free`] where that failed.
    pub fn take_to_zero(&mut self, len_bytes: u64) -> Vec<u64> {
        if self.ready.first(len_bytes).is_some() {
            return Vec::new();
        }
        let taken: Vec<_> = self.free.0.get(&len_bytes).into_iter().flatten().copied().take(ZERO_PIECES).collect();
        for &offset_bytes in &taken {
            self.free.remove(offset_bytes, len_bytes);
        }
        taken
    }

    /// Makes a piece that reads as zeros available.
    pub fn add_ready(&mut self, offset_bytes: u64, len_bytes: u64) {
        self.ready.add(offset_bytes, len_bytes);
    }

    /// How the file must grow before `len_bytes` can be taken from its end; `None` when the slack
    /// is enough, or a piece of this length is there.
    ///
    /// # Errors
    /// When no offset can express the new end.
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

    /// Gives up a piece that was handed out (or was in use when the file was opened). It is not
    /// handed out again before [`Space::recycled`].
    pub fn quarantine(&mut self, offset_bytes: u64, len_bytes: u64) {
        self.generation += 1;
        self.quarantined.push_back(Quarantined { generation: self.generation, offset_bytes, len_bytes });
    }

    /// A number that grows with each [`Space::quarantine`].
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// What was given up at generations up to `generation`, now in no list. The caller punches it
    /// and adds it as free.
    pub fn recycled(&mut self, generation: u64) -> Punching {
        let count = self.quarantined.partition_point(|piece| piece.generation <= generation);
        let pieces = self.quarantined.drain(..count);
        Punching::of(pieces.map(|piece| FileRange { offset_bytes: piece.offset_bytes, len_bytes: piece.len_bytes }))
    }

    /// For the close: all that was given up is free, and so is what was zeroed for reuse. Returned
    /// is that of it, below [`Space::used_end_bytes`], whose blocks the file system may still hold.
    /// Call [`Space::release_tail`] between the two.
    pub fn free_all(&mut self) -> Vec<FileRange> {
        let ready = std::mem::take(&mut self.ready).0;
        let ready =
            ready.into_iter().flat_map(|(len_bytes, offsets)| offsets.into_iter().map(move |at| (at, len_bytes)));
        let given_up = self.quarantined.drain(..).map(|piece| (piece.offset_bytes, piece.len_bytes));
        let all: Vec<_> =
            ready.chain(given_up).map(|(offset_bytes, len_bytes)| FileRange { offset_bytes, len_bytes }).collect();
        all.iter().for_each(|piece| self.add_free(piece.offset_bytes, piece.len_bytes));
        all
    }

    /// Makes a piece below `used_end_bytes` that nothing refers to, durably, available. It is
    /// zeroed before it is handed out, so what it holds does not matter.
    pub fn add_free(&mut self, offset_bytes: u64, len_bytes: u64) {
        self.free.add(offset_bytes, len_bytes);
    }

    /// First byte after everything in use or quarantined or recycled.
    pub fn used_end_bytes(&self) -> u64 {
        self.used_end_bytes
    }

    /// The store's length, as this allocator knows it.
    pub fn file_end_bytes(&self) -> u64 {
        self.file_end_bytes
    }

    /// The caller changed the store's length. What was added, if anything, reads as zeros; a cut
    /// below `used_end_bytes` moves that too.
    pub fn set_file_end(&mut self, file_end_bytes: u64) {
        self.file_end_bytes = file_end_bytes;
        self.used_end_bytes = self.used_end_bytes.min(file_end_bytes);
    }

    /// Forgets free pieces at the very end, so that the caller can cut the file at the
    /// `used_end_bytes` that is returned. The caller must do so (and call [`Space::set_file_end`])
    /// before the next `take`: those pieces are not zero.
    pub fn release_tail(&mut self) -> u64 {
        loop {
            let end_bytes = self.used_end_bytes;
            let last = self.free.ending_at(end_bytes).or_else(|| self.ready.ending_at(end_bytes));
            let Some((offset_bytes, len_bytes)) = last else { return end_bytes };
            let _ = self.free.remove(offset_bytes, len_bytes) || self.ready.remove(offset_bytes, len_bytes);
            self.used_end_bytes = offset_bytes;
        }
    }

    fn align_up(&self, bytes: u64) -> io::Result<u64> {
        bytes.checked_next_multiple_of(self.alignment_bytes).ok_or_else(overflow)
    }
}

/// How a file is to grow. Nothing of it is known to the [`Space`] before [`Space::set_file_end`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extension {
    /// The end that the allocator knows.
    pub from_bytes: u64,
    exact_bytes: u64,
    wanted_bytes: u64,
}

impl Extension {
    /// By `len_bytes` from the end that the allocator knows.
    ///
    /// # Errors
    /// When no offset can express the new end.
    pub fn by(space: &Space, len_bytes: u64) -> io::Result<Self> {
        let from_bytes = space.file_end_bytes;
        let end_bytes = space.align_up(from_bytes.checked_add(len_bytes).ok_or_else(overflow)?)?;
        Ok(Self { from_bytes, exact_bytes: end_bytes, wanted_bytes: end_bytes })
    }

    /// Grows the store by a step, or, where there is no space for that, by what is needed. Returns
    /// its new end. Waits for the disk.
    ///
    /// # Errors
    /// The store's; `StorageFull` when the file cannot grow. The file's length is as it was.
    pub fn carry_out(&self, store: &dyn Store) -> io::Result<u64> {
        match self.extend(store, self.wanted_bytes) {
            Err(error) if self.wanted_bytes != self.exact_bytes && is_full(&error) => {
                self.extend(store, self.exact_bytes).map(|()| self.exact_bytes)
            }
            result => result.map(|()| self.wanted_bytes),
        }
    }

    /// Makes the store as long as is needed, without space in the file system. Returns its new end.
    ///
    /// # Errors
    /// The store's.
    pub fn carry_out_sparsely(&self, store: &dyn Store) -> io::Result<u64> {
        store.set_len(self.exact_bytes).map(|()| self.exact_bytes)
    }

    fn extend(&self, store: &dyn Store, target_bytes: u64) -> io::Result<()> {
        let range = FileRange { offset_bytes: self.from_bytes, len_bytes: target_bytes - self.from_bytes };
        // The owner may keep something at the file's end (a VHD its footer): that stays.
        let held_bytes = store.len_bytes()?.max(self.from_bytes);
        store.allocate(range).inspect_err(|_| {
            // A file system may have extended the file before it ran full.
            if store.len_bytes().is_ok_and(|len_bytes| len_bytes > held_bytes) {
                let _ = store.set_len(held_bytes);
            }
        })
    }
}

/// Zeroes pieces that [`Space::take_to_zero`] gave; their space stays allocated. Returns how many
/// are zero, and the error that ended it. Waits for the disk.
pub fn zero_pieces(store: &dyn Store, offsets: &[u64], len_bytes: u64) -> (usize, io::Result<()>) {
    for (done, &offset_bytes) in offsets.iter().enumerate() {
        if let Err(error) = store.zero_range(FileRange { offset_bytes, len_bytes }, Zeroing::Keep) {
            return (done, Err(error));
        }
    }
    (offsets.len(), Ok(()))
}

/// Pieces whose blocks are given back to the file system, a stretch at a time.
#[derive(Debug)]
pub struct Punching {
    /// By falling offset.
    pieces: Vec<FileRange>,
}

impl Punching {
    /// Of pieces that do not overlap.
    pub fn of(pieces: impl Iterator<Item = FileRange>) -> Self {
        let mut pieces: Vec<_> = pieces.collect();
        pieces.sort_unstable_by_key(|piece| std::cmp::Reverse(piece.offset_bytes));
        Self { pieces }
    }

    /// Punches the next pieces that follow each other, at most 64 MiB a call, and returns them;
    /// empty at the end. A file system that cannot do so keeps the blocks: nothing depends on it.
    /// Waits for the disk.
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

    /// Punches all. Waits for the disk.
    pub fn punch_all(mut self, store: &dyn Store) {
        while !self.punch(store).is_empty() {}
    }
}

#[cfg(test)]
mod tests;
