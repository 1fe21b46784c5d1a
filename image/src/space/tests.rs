//! Tests of [`Space`](super::Space).

use super::*;
use diskwright_store::MemoryStore;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

/// A memory store limited to `capacity_bytes`.
fn small(capacity_bytes: u64) -> MemoryStore {
    let store = MemoryStore::new("m");
    store.limit(capacity_bytes);
    store
}

/// Gets space as an image does: tries, zeroes or grows, retries.
fn obtain(space: &mut Space, store: &MemoryStore, len_bytes: u64) -> io::Result<u64> {
    loop {
        if let Some(offset_bytes) = space.take(len_bytes)? {
            return Ok(offset_bytes);
        }
        let offsets = space.take_to_zero(len_bytes);
        zero_pieces(store, &offsets, len_bytes).1?;
        offsets.iter().for_each(|&offset_bytes| space.add_ready(offset_bytes, len_bytes));
        if let Some(growth) = space.growth(len_bytes)? {
            space.set_file_end(growth.carry_out(store)?);
        }
    }
}

fn recycle(space: &mut Space, store: &MemoryStore, generation: u64) {
    let mut punching = space.recycled(generation);
    loop {
        let done = punching.punch(store);
        if done.is_empty() {
            return;
        }
        done.iter().for_each(|piece| space.add_free(piece.offset_bytes, piece.len_bytes));
    }
}

#[test]
fn grows_in_steps_and_hands_out_slack() {
    let store = MemoryStore::new("m");
    store.set_len(MIB + 1).unwrap();
    let mut space = Space::new(MIB + 1, MIB);
    assert_eq!(space.take(2 * MIB).unwrap(), None);
    assert_eq!(obtain(&mut space, &store, 2 * MIB).unwrap(), 2 * MIB);
    assert_eq!(store.len_bytes().unwrap(), 18 * MIB);
    assert_eq!(space.take(2 * MIB).unwrap(), Some(4 * MIB));
    assert_eq!((space.used_end_bytes(), space.file_end_bytes()), (6 * MIB, 18 * MIB));
}

#[test]
fn on_a_full_file_system_growth_is_exact_and_a_failure_changes_nothing() {
    let store = small(5 * MIB);
    store.set_len(MIB).unwrap();
    let mut space = Space::new(MIB, MIB);
    obtain(&mut space, &store, 2 * MIB).unwrap();
    assert_eq!(store.len_bytes().unwrap(), 3 * MIB);
    obtain(&mut space, &store, 2 * MIB).unwrap();
    assert_eq!(store.len_bytes().unwrap(), 5 * MIB);
    assert_eq!(obtain(&mut space, &store, MIB).unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert_eq!((space.used_end_bytes(), space.file_end_bytes()), (5 * MIB, 5 * MIB));
    assert_eq!(store.len_bytes().unwrap(), 5 * MIB);
}

#[test]
fn data_at_the_end_of_the_file_survives_a_failed_growth() {
    let store = small(MIB + 4096);
    store.set_len(MIB).unwrap();
    store.write_at(&[7; 512], MIB).unwrap();
    let mut space = Space::new(MIB, 4096);
    assert_eq!(obtain(&mut space, &store, MIB).unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert_eq!(store.len_bytes().unwrap(), MIB + 512);
    let mut kept = [0; 512];
    store.read_at(&mut kept, MIB).unwrap();
    assert_eq!(kept, [7; 512]);
}

#[test]
fn quarantined_space_is_handed_out_only_when_recycled_and_then_reads_as_zeros() {
    let store = MemoryStore::new("m");
    let mut space = Space::new(0, 4096);
    let first = obtain(&mut space, &store, 8192).unwrap();
    store.write_at(&[7; 8192], first).unwrap();
    space.quarantine(first, 8192);
    let generation = space.generation();
    space.quarantine(1 << 40, 8192);
    assert_ne!(obtain(&mut space, &store, 8192).unwrap(), first);
    recycle(&mut space, &store, generation);
    assert_ne!(obtain(&mut space, &store, 4096).unwrap(), first, "a piece of another length is not used");
    assert_eq!(obtain(&mut space, &store, 8192).unwrap(), first);
    let mut found = [1; 8192];
    store.read_at(&mut found, first).unwrap();
    assert!(found.iter().all(|&byte| byte == 0));
    assert_ne!(obtain(&mut space, &store, 8192).unwrap(), 1 << 40, "the later generation is still in quarantine");
}

#[test]
fn offsets_beyond_2_to_the_64_are_errors() {
    let store = MemoryStore::new("m");
    let mut space = Space::new(u64::MAX - 5, MIB);
    assert!(space.take(1).is_err() && space.growth(1).is_err());
    let mut space = Space::new(MIB, MIB);
    assert!(obtain(&mut space, &store, u64::MAX - 3).is_err());
}

#[test]
fn the_tail_is_released_as_far_as_it_is_free() {
    let store = MemoryStore::new("m");
    let mut space = Space::new(0, MIB);
    let offsets: Vec<u64> = (0..4).map(|_| obtain(&mut space, &store, MIB).unwrap()).collect();
    for index in [3, 0, 2] {
        space.quarantine(offsets[index], MIB);
    }
    assert_eq!(space.release_tail(), 4 * MIB);
    let generation = space.generation();
    recycle(&mut space, &store, generation);
    assert_eq!(space.release_tail(), 2 * MIB);
}

#[test]
fn the_tail_is_cut_off_or_put_back() {
    let store = MemoryStore::new("m");
    let mut space = Space::new(0, MIB);
    let offsets: Vec<u64> = (0..4).map(|_| obtain(&mut space, &store, MIB).unwrap()).collect();
    let file_end_bytes = space.file_end_bytes();
    assert!(file_end_bytes > 4 * MIB, "there is slack");
    for index in [1, 3, 2] {
        space.add_free(offsets[index], MIB);
    }
    store.write_at(&vec![7; 3 * MIB as usize], MIB).unwrap();
    let tail = space.take_tail().unwrap();
    assert_eq!((tail.start_bytes(), space.used_end_bytes(), space.file_end_bytes()), (MIB, MIB, MIB));
    // Meanwhile nothing of it can be taken.
    assert_eq!((space.take(MIB).unwrap(), space.take_to_zero(MIB)), (None, Vec::new()));
    space.put_back(tail);
    assert_eq!((space.used_end_bytes(), space.file_end_bytes()), (file_end_bytes, file_end_bytes));
    let again = obtain(&mut space, &store, MIB).unwrap();
    let mut found = vec![1; MIB as usize];
    store.read_at(&mut found, again).unwrap();
    assert_eq!((again, found.iter().all(|&byte| byte == 0)), (MIB, true), "it was zeroed");
    let tail = space.take_tail().unwrap();
    assert_eq!(tail.start_bytes(), 2 * MIB);
    store.set_len(tail.start_bytes()).unwrap();
    drop(tail);
    assert!(space.take_tail().is_none());
    assert_eq!(obtain(&mut space, &store, MIB).unwrap(), 2 * MIB, "the file grows again");
}

#[test]
fn a_piece_is_not_handed_out_while_it_is_punched_or_zeroed() {
    let store = MemoryStore::new("m");
    let mut space = Space::new(0, MIB);
    let first = obtain(&mut space, &store, MIB).unwrap();
    space.quarantine(first, MIB);
    let mut punching = space.recycled(space.generation());
    assert_ne!(space.take(MIB).unwrap(), Some(first), "it is being punched");
    for piece in punching.punch(&store) {
        space.add_free(piece.offset_bytes, piece.len_bytes);
    }
    assert_eq!(space.take(MIB).unwrap(), None, "it may hold stale data");
    assert_eq!(space.take_to_zero(MIB), [first]);
    assert_ne!(space.take(MIB).unwrap(), Some(first), "it is being zeroed");
    space.add_ready(first, MIB);
    assert_eq!(space.take(MIB).unwrap(), Some(first));
}

#[test]
fn adjacent_pieces_are_punched_together_at_most_64_mib_a_call() {
    let store = MemoryStore::new("m");
    store.set_len(1 << 30).unwrap();
    let at = |mib: u64, len: u64| FileRange { offset_bytes: mib * MIB, len_bytes: len * MIB };
    let mut pieces: Vec<_> = (0..40).map(|piece| at(2 * piece, 2)).collect();
    pieces.push(at(100, 256));
    let mut punching = HolePunches::of(pieces.into_iter().rev());
    let lens: Vec<_> = std::iter::repeat_with(|| punching.punch(&store).len()).take_while(|&len| len > 0).collect();
    assert_eq!(lens, [32, 8, 1]);
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
                    let offset_bytes = obtain(&mut space, &store, len_bytes).unwrap();
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
                    let generation = space.generation();
    recycle(&mut space, &store, generation);
                    resting.clear();
                }
            }
        }
    }
}

#[test]
fn nothing_below_a_new_start_is_handed_out() {
    let mut space = Space::new(400, 1);
    for at in [0, 100, 300] {
        space.add_free(at, 100);
    }
    space.quarantine(200, 100);
    space.begin_at(300, 100);
    assert_eq!(space.start_bytes(), 300);
    let generation = space.generation();
    assert!(space.recycled(generation).punch(&MemoryStore::new("x")).is_empty());
    assert_eq!(space.take_for_move(100, 1000), Some(300));
    assert_eq!(space.take_for_move(100, 1000), None);
    space.add_free(100, 100);
    space.quarantine(200, 100);
    space.recycle_for_moves(space.generation());
    assert_eq!(space.take_for_move(100, 1000), None);
    // A file that ends before the new start reaches to it.
    space.begin_at(900, 100);
    assert_eq!((space.used_end_bytes(), space.file_end_bytes()), (900, 900));
}
