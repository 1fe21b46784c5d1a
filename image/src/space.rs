//! Where the next payload block goes in a growing file.
//!
//! ```text
//!   0            used_end            file_end
//!   │ in use (with holes) │ slack, zeros │          the file grows in steps, so that a block costs no `fallocate`
//!        ▲ ▲                   │
//!        │ └─ recycled ◀─ quarantine ◀─ given up     exact length only: blocks of an image are all alike
//!        └───────── take() ────┘
//! ```
//!
//! Space that was given up is first *quarantined*: until the removal of its mapping is durable, and no read that was begun
//! under the old mapping is in flight, handing it out would show one block's bytes in another. Only the owner knows when
//! both are true; it then calls [`Space::recycle`].
//!
//! Invariants: what `take` hands out reads as zeros, lies within the store's length, and overlaps nothing that was handed
//! out and not recycled. Slack is never written by anybody. There is no lock here: a `Space` lives inside its image's
//! mutex.

use diskwright_store::{FileRange, Store, Zeroing, is_full};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    io,
};

/// Smallest step by which a file grows, in bytes.
const STEP_MIN_BYTES: u64 = 16 << 20;
/// Largest step by which a file grows, in bytes.
const STEP_MAX_BYTES: u64 = 256 << 20;

/// Space that was handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// First byte in the store.
    pub offset_bytes: u64,
    /// The store's new length, when it had to grow.
    pub grew_to_bytes: Option<u64>,
}

#[derive(Debug, Clone, Copy)]
struct Quarantined {
    generation: u64,
    offset_bytes: u64,
    len_bytes: u64,
}

/// The allocator of one file. See the module.
#[derive(Debug)]
pub struct Space {
    used_end_bytes: u64,
    file_end_bytes: u64,
    alignment_bytes: u64,
    /// Length in bytes to the offsets of recycled pieces of that length.
    recycled: BTreeMap<u64, BTreeSet<u64>>,
    /// Recycled pieces whose blocks the file system may still hold.
    unpunched: Vec<FileRange>,
    /// In order of generation.
    quarantined: VecDeque<Quarantined>,
    generation: u64,
}

fn overflow() -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, "the file would grow beyond what an offset can express")
}

impl Space {
    /// Space after `used_end_bytes`, the first byte after everything in use. The caller has truncated the file there, so
    /// that what is added reads as zeros. Pieces from fresh space begin at multiples of `alignment_bytes`, and the file
    /// grows to multiples of it.
    ///
    /// # Panics
    /// When the alignment is 0, which is an error of the program.
    pub fn new(used_end_bytes: u64, alignment_bytes: u64) -> Self {
        assert!(alignment_bytes > 0, "an alignment is at least one byte");
        Self {
            used_end_bytes,
            file_end_bytes: used_end_bytes,
            alignment_bytes,
            recycled: BTreeMap::new(),
            unpunched: Vec::new(),
            quarantined: VecDeque::new(),
            generation: 0,
        }
    }

    /// Takes `len_bytes`: a recycled piece of exactly this length (zeroed first), else slack, else the file grows.
    ///
    /// # Errors
    /// The store's; `StorageFull` when the file cannot grow. Nothing has changed then.
    pub fn take(&mut self, store: &dyn Store, len_bytes: u64) -> io::Result<Taken> {
        if let Some(offset_bytes) = self.recycled.get(&len_bytes).and_then(BTreeSet::first).copied() {
            store.zero_range(FileRange { offset_bytes, len_bytes }, Zeroing::Keep)?;
            self.forget_recycled(offset_bytes, len_bytes);
            return Ok(Taken { offset_bytes, grew_to_bytes: None });
        }
        let offset_bytes = self.align_up(self.used_end_bytes)?;
        let end_bytes = offset_bytes.checked_add(len_bytes).ok_or_else(overflow)?;
        let grew_to_bytes =
            if end_bytes <= self.file_end_bytes { None } else { Some(self.grow(store, offset_bytes, end_bytes)?) };
        self.used_end_bytes = end_bytes;
        Ok(Taken { offset_bytes, grew_to_bytes })
    }

    /// Where [`Space::take`] would find `len_bytes`.
    ///
    /// # Errors
    /// When no offset can express it.
    pub fn next_offset_bytes(&self, len_bytes: u64) -> io::Result<u64> {
        match self.recycled.get(&len_bytes).and_then(BTreeSet::first) {
            Some(&offset_bytes) => Ok(offset_bytes),
            None => self.align_up(self.used_end_bytes),
        }
    }

    /// Grows the store to at least `end_bytes`; returns its new length.
    fn grow(&mut self, store: &dyn Store, offset_bytes: u64, end_bytes: u64) -> io::Result<u64> {
        let step_bytes = (self.used_end_bytes / 8).clamp(STEP_MIN_BYTES, STEP_MAX_BYTES).max(end_bytes - offset_bytes);
        let exact_bytes = self.align_up(end_bytes)?;
        let wanted_bytes =
            offset_bytes.checked_add(step_bytes).and_then(|end| self.align_up(end).ok()).unwrap_or(exact_bytes);
        let mut target_bytes = wanted_bytes;
        let mut result = self.extend(store, target_bytes);
        if target_bytes != exact_bytes && matches!(&result, Err(error) if is_full(error)) {
            target_bytes = exact_bytes;
            result = self.extend(store, target_bytes);
        }
        result?;
        self.file_end_bytes = target_bytes;
        Ok(target_bytes)
    }

    fn extend(&self, store: &dyn Store, target_bytes: u64) -> io::Result<()> {
        let range = FileRange { offset_bytes: self.file_end_bytes, len_bytes: target_bytes - self.file_end_bytes };
        // The owner may keep something at the file's end (a VHD its footer): that stays.
        let held_bytes = store.len_bytes()?.max(self.file_end_bytes);
        store.allocate(range).inspect_err(|_| {
            // A file system may have extended the file before it ran full.
            if store.len_bytes().is_ok_and(|len_bytes| len_bytes > held_bytes) {
                let _ = store.set_len(held_bytes);
            }
        })
    }

    /// Gives up a piece that was handed out (or was in use when the file was opened). It is not handed out again before
    /// [`Space::recycle`].
    pub fn quarantine(&mut self, offset_bytes: u64, len_bytes: u64) {
        self.generation += 1;
        self.quarantined.push_back(Quarantined { generation: self.generation, offset_bytes, len_bytes });
    }

    /// A number that grows with each [`Space::quarantine`].
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// What was given up at generations up to `generation` may be handed out again.
    pub fn recycle(&mut self, generation: u64) {
        while let Some(piece) = self.quarantined.front().copied().filter(|piece| piece.generation <= generation) {
            self.quarantined.pop_front();
            self.add_free(piece.offset_bytes, piece.len_bytes);
            self.unpunched.push(FileRange { offset_bytes: piece.offset_bytes, len_bytes: piece.len_bytes });
        }
    }

    /// Gives the blocks of what was recycled since the last call, and is still free, back to the file system. A file system that
    /// cannot do so keeps them: nothing depends on it.
    pub fn punch_recycled(&mut self, store: &dyn Store) {
        for piece in std::mem::take(&mut self.unpunched) {
            let free = self.recycled.get(&piece.len_bytes).is_some_and(|offsets| offsets.contains(&piece.offset_bytes));
            if free && piece.offset_bytes + piece.len_bytes <= self.file_end_bytes {
                let _ = store.zero_range(piece, Zeroing::Deallocate);
            }
        }
    }

    /// Makes a piece below `used_end_bytes` that nothing refers to, durably, available at once. What it holds does not
    /// matter.
    pub fn add_free(&mut self, offset_bytes: u64, len_bytes: u64) {
        self.recycled.entry(len_bytes).or_default().insert(offset_bytes);
    }

    /// First byte after everything in use or quarantined or recycled.
    pub fn used_end_bytes(&self) -> u64 {
        self.used_end_bytes
    }

    /// The store's length, as this allocator knows it.
    pub fn file_end_bytes(&self) -> u64 {
        self.file_end_bytes
    }

    /// The caller changed the store's length. What was added, if anything, reads as zeros; a cut below `used_end_bytes`
    /// moves that too.
    pub fn set_file_end(&mut self, file_end_bytes: u64) {
        self.file_end_bytes = file_end_bytes;
        self.used_end_bytes = self.used_end_bytes.min(file_end_bytes);
    }

    /// Forgets recycled pieces at the very end, so that the caller can cut the file at the `used_end_bytes` that is
    /// returned. The caller must do so (and call [`Space::set_file_end`]) before the next `take`: those pieces are not
    /// zero.
    pub fn release_tail(&mut self) -> u64 {
        loop {
            let end_bytes = self.used_end_bytes;
            let last = self.recycled.iter().find_map(|(&len_bytes, offsets)| {
                offsets
                    .last()
                    .copied()
                    .filter(|offset_bytes| offset_bytes.checked_add(len_bytes) == Some(end_bytes))
                    .map(|offset_bytes| (offset_bytes, len_bytes))
            });
            let Some((offset_bytes, len_bytes)) = last else { return end_bytes };
            self.forget_recycled(offset_bytes, len_bytes);
            self.used_end_bytes = offset_bytes;
        }
    }

    fn forget_recycled(&mut self, offset_bytes: u64, len_bytes: u64) {
        if let Some(offsets) = self.recycled.get_mut(&len_bytes) {
            offsets.remove(&offset_bytes);
            if offsets.is_empty() {
                self.recycled.remove(&len_bytes);
            }
        }
    }

    fn align_up(&self, bytes: u64) -> io::Result<u64> {
        bytes.checked_next_multiple_of(self.alignment_bytes).ok_or_else(overflow)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_store::MemoryStore;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    /// A memory store on a file system of `capacity_bytes`.
    fn small(capacity_bytes: u64) -> MemoryStore {
        let store = MemoryStore::new("m");
        store.limit(capacity_bytes);
        store
    }

    #[test]
    fn grows_in_steps_and_hands_out_slack() {
        let store = MemoryStore::new("m");
        store.set_len(MIB + 1).unwrap();
        let mut space = Space::new(MIB + 1, MIB);
        let first = space.take(&store, 2 * MIB).unwrap();
        assert_eq!(first, Taken { offset_bytes: 2 * MIB, grew_to_bytes: Some(18 * MIB) });
        assert_eq!(store.len_bytes().unwrap(), 18 * MIB);
        assert_eq!(space.take(&store, 2 * MIB).unwrap(), Taken { offset_bytes: 4 * MIB, grew_to_bytes: None });
        assert_eq!((space.used_end_bytes(), space.file_end_bytes()), (6 * MIB, 18 * MIB));
    }

    #[test]
    fn a_full_file_system_gives_what_is_needed_and_then_refuses_without_a_trace() {
        let store = small(5 * MIB);
        store.set_len(MIB).unwrap();
        let mut space = Space::new(MIB, MIB);
        assert_eq!(space.take(&store, 2 * MIB).unwrap().grew_to_bytes, Some(3 * MIB));
        assert_eq!(space.take(&store, 2 * MIB).unwrap().grew_to_bytes, Some(5 * MIB));
        assert_eq!(space.take(&store, MIB).unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!((space.used_end_bytes(), space.file_end_bytes()), (5 * MIB, 5 * MIB));
        assert_eq!(store.len_bytes().unwrap(), 5 * MIB);
    }

    #[test]
    fn what_the_owner_keeps_at_the_end_survives_a_full_file_system() {
        let store = small(MIB + 4096);
        store.set_len(MIB).unwrap();
        store.write_at(&[7; 512], MIB).unwrap();
        let mut space = Space::new(MIB, 4096);
        assert_eq!(space.take(&store, MIB).unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(store.len_bytes().unwrap(), MIB + 512);
        let mut kept = [0; 512];
        store.read_at(&mut kept, MIB).unwrap();
        assert_eq!(kept, [7; 512]);
    }

    #[test]
    fn quarantined_space_is_handed_out_only_when_recycled_and_then_reads_as_zeros() {
        let store = MemoryStore::new("m");
        let mut space = Space::new(0, 4096);
        let first = space.take(&store, 8192).unwrap().offset_bytes;
        store.write_at(&[7; 8192], first).unwrap();
        space.quarantine(first, 8192);
        let generation = space.generation();
        space.quarantine(1 << 40, 8192);
        assert_ne!(space.take(&store, 8192).unwrap().offset_bytes, first);
        space.recycle(generation);
        assert_ne!(space.take(&store, 4096).unwrap().offset_bytes, first, "another length must not fit");
        assert_eq!(space.take(&store, 8192).unwrap().offset_bytes, first);
        let mut found = [1; 8192];
        store.read_at(&mut found, first).unwrap();
        assert!(found.iter().all(|&byte| byte == 0));
        assert_ne!(
            space.take(&store, 8192).unwrap().offset_bytes,
            1 << 40,
            "the later generation is still in quarantine"
        );
    }

    #[test]
    fn lengths_near_the_end_of_the_world_are_errors() {
        let store = MemoryStore::new("m");
        let mut space = Space::new(u64::MAX - 5, MIB);
        assert!(space.take(&store, 1).is_err());
        assert!(Space::new(MIB, MIB).take(&store, u64::MAX - 3).is_err());
    }

    #[test]
    fn the_tail_is_released_as_far_as_it_is_free() {
        let store = MemoryStore::new("m");
        let mut space = Space::new(0, MIB);
        let offsets: Vec<u64> = (0..4).map(|_| space.take(&store, MIB).unwrap().offset_bytes).collect();
        for index in [3, 0, 2] {
            space.quarantine(offsets[index], MIB);
        }
        assert_eq!(space.release_tail(), 4 * MIB);
        space.recycle(space.generation());
        assert_eq!(space.release_tail(), 2 * MIB);
    }

    proptest! {
        #[test]
        fn nothing_is_handed_out_twice(steps in prop::collection::vec((0u8..4, 0usize..8), 1..60)) {
            let store = MemoryStore::new("m");
            let mut space = Space::new(100, 4096);
            let mut held: Vec<(u64, u64)> = Vec::new();
            let mut resting: Vec<(u64, u64)> = Vec::new();
            for (what, pick) in steps {
                match what {
                    0 | 1 => {
                        let len_bytes = 4096 << (pick % 2);
                        let offset_bytes = space.take(&store, len_bytes).unwrap().offset_bytes;
                        prop_assert_eq!(offset_bytes % 4096, 0);
                        prop_assert!(offset_bytes + len_bytes <= store.len_bytes().unwrap());
                        for &(other, other_len) in held.iter().chain(&resting) {
                            prop_assert!(offset_bytes + len_bytes <= other || other + other_len <= offset_bytes);
                        }
                        let mut found = vec![1; len_bytes as usize];
                        store.read_at(&mut found, offset_bytes).unwrap();
                        prop_assert!(found.iter().all(|&byte| byte == 0));
                        store.write_at(&vec![9; len_bytes as usize], offset_bytes).unwrap();
                        held.push((offset_bytes, len_bytes));
                    }
                    2 if !held.is_empty() => {
                        let (offset_bytes, len_bytes) = held.swap_remove(pick % held.len());
                        space.quarantine(offset_bytes, len_bytes);
                        resting.push((offset_bytes, len_bytes));
                    }
                    _ => {
                        space.recycle(space.generation());
                        resting.clear();
                    }
                }
            }
        }
    }
}
