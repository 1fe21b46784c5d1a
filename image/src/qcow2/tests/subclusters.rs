//! Images with extended L2 entries: sessions against a table of bytes, and QEMU as a second reader.

use super::{
    contents,
    qemu::tool,
    writing::{assert_clean, assert_qemu_agrees, by_qemu, open, play, put, step},
};
use crate::{BlockState, Commit, Image};
use diskwright_store::{MemoryStore, Store};
use proptest::prelude::*;
use std::sync::Arc;

const CREATED: &str = "extended_l2=on,cluster_size=16k";

fn copy_of(store: &Arc<dyn Store>) -> Arc<dyn Store> {
    let mut bytes = vec![0; store.len_bytes().unwrap() as usize];
    store.read_at(&mut bytes, 0).unwrap();
    Arc::new(MemoryStore::with_bytes("disk.qcow2", bytes))
}

fn states(image: &dyn Image, first: u64, count: usize) -> Vec<BlockState> {
    let mut states = vec![BlockState::Absent; count];
    image.block_states(first, &mut states).unwrap();
    states
}

#[test]
fn a_session_with_subclusters_is_a_disk_and_qemu_agrees() {
    let folder = tempfile::TempDir::new().unwrap();
    let commands =
        ["write -P 1 0 40k", "write -P 3 150k 30k", "write -z 10k 10k", "discard 155k 8k", "write -z 64k 16k"];
    for options in
        [CREATED, "extended_l2=on,cluster_size=64k", "extended_l2=on,preallocation=metadata,cluster_size=16k"]
    {
        let Some((store, model)) = by_qemu(folder.path(), options, &commands) else { return };
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(16));
        let result = runner.run(&prop::collection::vec(step(), 1..60), |steps| {
            let store = copy_of(&store);
            let may_leak = play(&store, model.clone(), steps, false);
            assert_qemu_agrees(&store, &folder.path().join("ours.qcow2"), may_leak);
            Ok(())
        });
        result.unwrap_or_else(|error| panic!("{options}: {error}"));
    }
}

#[test]
fn a_part_of_a_cluster_is_written_removed_and_written_again() {
    let folder = tempfile::TempDir::new().unwrap();
    let Some((store, _)) = by_qemu(folder.path(), CREATED, &[]) else { return };
    let image = open(&store, true);
    let writer = image.writer().unwrap();
    writer.begin_writing().unwrap();
    let before = store.len_bytes().unwrap();
    put(&*image, 5, 100, &[7; 50]);
    put(&*image, 9, 0, &[8; 512]);
    let found = states(&*image, 0, 32);
    let BlockState::Data { offset_bytes, .. } = found[5] else { panic!("{found:?}") };
    assert_eq!(found[9], BlockState::data(offset_bytes + 4 * 512), "both lie in one cluster");
    assert_eq!(found.iter().filter(|&&state| state != BlockState::Absent).count(), 2);
    writer.commit_waiting(5, Commit::Discard).unwrap();
    assert_eq!(states(&*image, 5, 1), [BlockState::Absent]);
    // The stale bytes are gone when a part of the block is written.
    put(&*image, 5, 0, &[9; 10]);
    let mut expected = vec![0; 512];
    expected[..10].fill(9);
    assert_eq!(contents(&*image).unwrap()[5 * 512..6 * 512], expected);
    // The last part frees the cluster.
    for block in [5, 9] {
        writer.commit_waiting(block, Commit::Discard).unwrap();
    }
    writer.close().unwrap();
    assert_clean(&store);
    // An L2 table was made.
    assert_eq!(store.len_bytes().unwrap(), before + 16384);
}

#[test]
fn a_stale_part_that_another_program_left_is_not_shown() {
    let folder = tempfile::TempDir::new().unwrap();
    // QEMU leaves the bytes of a part that becomes zeros in the cluster.
    let commands = ["write -P 5 0 16k", "write -z 2k 512"];
    let Some((store, model)) = by_qemu(folder.path(), CREATED, &commands) else { return };
    assert!(model[2048..2560].iter().all(|&byte| byte == 0));
    let image = open(&store, true);
    image.writer().unwrap().begin_writing().unwrap();
    put(&*image, 4, 0, &[6; 8]);
    image.writer().unwrap().close().unwrap();
    let mut expected = model;
    expected[2048..2056].fill(6);
    assert!(contents(&*open(&store, false)).unwrap() == expected);
    assert_clean(&store);
}

#[test]
fn what_subclusters_do_not_allow_is_refused_by_name() {
    let folder = tempfile::TempDir::new().unwrap();
    let Some((store, _)) = by_qemu(folder.path(), CREATED, &["write -c -P 2 0 16k"]) else { return };
    let error = open(&store, true).writer().unwrap().begin_writing().unwrap_err().to_string();
    assert!(error.contains("compressed clusters is not supported"), "{error}");
    let Some((store, _)) = by_qemu(folder.path(), CREATED, &[]) else { return };
    open(&store, true).writer().unwrap().begin_compacting().unwrap();
    let path = folder.path().join("disk.qcow2");
    let Some(_) = tool("qemu-img", &["snapshot", "-c", "one", path.to_str().unwrap()]) else { return };
    let error = crate::Format::Qcow2.driver().open(super::qemu::store(&path), true, 512).unwrap_err().to_string();
    assert!(error.contains("subclusters) and internal snapshots"), "{error}");
}
