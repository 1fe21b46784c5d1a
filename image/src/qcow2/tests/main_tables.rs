//! The L1 table and the refcount table, which a growth has put at the end of the file, move back.

use super::{
    contents,
    writing::{assert_clean, assert_qemu_agrees, created, open, options, put, reserve_move},
};
use crate::{Commit, Image, MoveTo};
use diskwright_store::Store;
use std::sync::Arc;

const MIB: u64 = 1 << 20;

fn settle(image: &dyn Image) {
    let writer = image.writer().unwrap();
    let generation = writer.freed_generation();
    writer.flush().unwrap();
    writer.recycle_for_moves(generation);
}

/// Moves tables and blocks down, as the disk above does.
fn compact(store: &Arc<dyn Store>) {
    let image = open(store, true);
    let writer = image.writer().unwrap();
    writer.begin_compacting().unwrap();
    writer.move_tables().unwrap();
    settle(&*image);
    for block in 0..image.size_bytes().div_ceil(image.info().block_bytes) {
        if let MoveTo::Place(place) = reserve_move(writer, block) {
            let mut payload = vec![0; place.len_bytes as usize];
            store.read_at(&mut payload, place.from_bytes).unwrap();
            store.write_at(&payload, place.to_bytes).unwrap();
            writer.commit_waiting(block, Commit::Moved).unwrap();
        }
    }
    settle(&*image);
    writer.close().unwrap();
}

#[test]
fn tables_at_the_end_of_the_file_move_back() {
    let folder = tempfile::tempdir().unwrap();
    // In clusters of 512 bytes an L1 cluster has 2 MiB of the disk, and a refcount table cluster
    // 8 MiB of the file.
    let store = created(&options(MIB, 512));
    let image = open(&store, true);
    let writer = image.writer().unwrap();
    writer.begin_writing().unwrap();
    (0..2 * 1024).for_each(|block| put(&*image, block, 0, &[1; 512]));
    writer.flush().unwrap();
    writer.resize(12 * MIB).unwrap();
    (2 * 1024..20 * 1024).for_each(|block| put(&*image, block, 0, &[2; 512]));
    writer.flush().unwrap();
    let places = |bytes: &[u8]| {
        let number = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
        (number(40), number(48))
    };
    let mut head = [0; 64];
    store.read_at(&mut head, 0).unwrap();
    let (l1, counts) = places(&head);
    assert!(l1 > MIB && counts > 8 * MIB, "the tables were moved to the end: {l1}, {counts}");
    let kept = [0, 700, 19_999];
    for block in (0..20 * 1024).filter(|block| !kept.contains(block)) {
        writer.commit_waiting(block, Commit::Discard).unwrap();
    }
    writer.close().unwrap();
    drop(image);
    assert_clean(&store);
    let before = contents(&*open(&store, false)).unwrap();
    compact(&store);
    assert_clean(&store);
    store.read_at(&mut head, 0).unwrap();
    let (l1, counts) = places(&head);
    assert!(l1 < MIB && counts < MIB, "{l1}, {counts}");
    // Tables of L2 stay where they have entries of 0: 12 MiB of the disk have 384 of them.
    assert!(store.len_bytes().unwrap() < MIB, "{} bytes", store.len_bytes().unwrap());
    let image = open(&store, false);
    assert_eq!(image.packed_len_bytes(3).unwrap(), Some(store.len_bytes().unwrap()));
    assert!(contents(&*image).unwrap() == before);
    assert_qemu_agrees(&store, &folder.path().join("ours.qcow2"), false);
    // The tables are used where they are now.
    let image = open(&store, true);
    image.writer().unwrap().begin_writing().unwrap();
    (3000..3300).for_each(|block| put(&*image, block, 0, &[3; 512]));
    image.writer().unwrap().close().unwrap();
    assert_clean(&store);
    assert_qemu_agrees(&store, &folder.path().join("ours.qcow2"), false);
}
