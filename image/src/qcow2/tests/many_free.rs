//! More free and leaked clusters than fit into a list: all of them are known to the next session.

use super::writing::{assert_clean, check, created, open, options, put, reserve_move};
use crate::{Commit, Image, MoveTo};
use diskwright_store::Store;
use std::sync::Arc;

const CLUSTER: u64 = 512;
const BLOCKS: u64 = 280_000;

fn holds(image: &dyn Image, store: &Arc<dyn Store>, block: u64) -> Option<u64> {
    let mut state = [crate::BlockState::Absent];
    image.block_states(block, &mut state).unwrap();
    let crate::BlockState::Data { offset_bytes, .. } = state[0] else { return None };
    let mut bytes = [0; 8];
    store.read_at(&mut bytes, offset_bytes).unwrap();
    Some(u64::from_le_bytes(bytes))
}

#[test]
fn one_session_fills_all_gaps_that_earlier_ones_left() {
    let store = created(&options(BLOCKS * CLUSTER, CLUSTER as u32));
    let image = open(&store, true);
    (0..BLOCKS).for_each(|block| put(&*image, block, 0, &(block + 1).to_le_bytes()));
    image.writer().unwrap().close().unwrap();
    let full_bytes = store.len_bytes().unwrap();

    let image = open(&store, true);
    let writer = image.writer().unwrap();
    for block in (0..BLOCKS).step_by(2) {
        writer.commit_waiting(block, Commit::Absent).unwrap();
    }
    writer.close().unwrap();
    assert_clean(&store);

    let image = open(&store, true);
    let writer = image.writer().unwrap();
    writer.begin_compacting().unwrap();
    let mut moved = 0;
    for block in (1..BLOCKS).step_by(2).collect::<Vec<_>>().into_iter().rev() {
        let MoveTo::Place(place) = reserve_move(writer, block) else { break };
        let mut payload = vec![0; CLUSTER as usize];
        store.read_at(&mut payload, place.from_bytes).unwrap();
        store.write_at(&payload, place.to_bytes).unwrap();
        writer.commit_waiting(block, Commit::Moved).unwrap();
        moved += 1;
    }
    writer.move_tables().unwrap();
    writer.close().unwrap();
    assert_clean(&store);
    // More than would fit into a list of 65,536. The refcount table stays where it is.
    let (left, packed) = (store.len_bytes().unwrap(), image.packed_len_bytes(BLOCKS / 2).unwrap().unwrap());
    assert!(moved > 65_536, "{moved} blocks moved");
    assert!(left <= packed + (1 << 20) && left < full_bytes, "{left} of {full_bytes} bytes are left, not {packed}");
    let image = open(&store, false);
    for block in 0..BLOCKS {
        assert_eq!(holds(&*image, &store, block), (block % 2 == 1).then_some(block + 1));
    }
}

#[test]
fn one_session_takes_back_all_leaks() {
    let store = created(&options(BLOCKS * CLUSTER, CLUSTER as u32));
    let image = open(&store, true);
    let writer = image.writer().unwrap();
    for block in 0..BLOCKS {
        writer.reserve_waiting(block).unwrap();
        if block % 2 == 1 {
            writer.commit_waiting(block, Commit::Whole).unwrap();
        }
    }
    // As after a power cut: what was reserved has refcounts, and no entry.
    writer.flush().unwrap();
    drop(image);
    assert_eq!(check(&store), (vec![], BLOCKS / 2 * CLUSTER));
    let image = open(&store, true);
    put(&*image, 0, 0, &[7; 8]);
    image.writer().unwrap().close().unwrap();
    assert_clean(&store);
}
