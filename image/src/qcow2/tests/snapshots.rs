//! Images with internal snapshots: random sessions of ours and of QEMU's in turns, with snapshots
//! taken and removed in between. Each snapshot keeps its bytes, and qemu-img finds nothing wrong.

use super::{
    contents,
    qemu::{tool, wrote},
    writing::{Step, play, put, step},
};
use crate::{BlockState, Commit, Format, Image, ImageWriter};
use diskwright_store::{MemoryStore, Store};
use proptest::{prelude::*, test_runner::TestRunner};
use std::{fs, path::Path, sync::Arc};

fn open(store: &Arc<dyn Store>) -> Arc<dyn Image> {
    Format::Qcow2.driver().open(Arc::clone(store), true, 512).unwrap()
}

fn loaded(path: &Path) -> Arc<dyn Store> {
    Arc::new(MemoryStore::with_bytes("disk.qcow2", fs::read(path).unwrap()))
}

fn save(store: &Arc<dyn Store>, path: &Path) {
    let mut bytes = vec![0; store.len_bytes().unwrap() as usize];
    store.read_at(&mut bytes, 0).unwrap();
    fs::write(path, bytes).unwrap();
}

fn qemu_img(arguments: &[&str]) -> String {
    let output = tool("qemu-img", arguments).unwrap();
    assert!(output.status.success(), "qemu-img {arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn bytes_by_qemu(path: &Path, snapshot: Option<&str>) -> Vec<u8> {
    let raw = path.with_extension("raw");
    let (text, raw_text) = (path.to_str().unwrap(), raw.to_str().unwrap());
    let mut arguments = vec!["convert", "-f", "qcow2", "-O", "raw"];
    arguments.extend(snapshot.iter().flat_map(|name| ["-l", name]));
    arguments.extend([text, raw_text]);
    qemu_img(&arguments);
    fs::read(raw).unwrap()
}

/// Checks that each snapshot has its bytes, for us and for QEMU, and that the file is sound.
fn assert_kept(path: &Path, snapshots: &[(String, Vec<u8>)], may_leak: bool) {
    let output = tool("qemu-img", &["check", "-f", "qcow2", path.to_str().unwrap()]).unwrap();
    assert!(output.status.success() || may_leak && output.status.code() == Some(3), "{output:?}");
    for (name, bytes) in snapshots {
        let seen = Format::Qcow2.driver().open_snapshot(vec![loaded(path)], name).unwrap();
        assert!(contents(&*seen).unwrap() == *bytes, "snapshot {name} by us");
        // QEMU shows a snapshot in the size of the present disk.
        let shown = bytes_by_qemu(path, Some(name));
        let both = shown.len().min(bytes.len());
        assert!(shown[..both] == bytes[..both], "snapshot {name} by QEMU");
    }
}

/// What happens between two of our sessions.
#[derive(Debug, Clone)]
enum Between {
    Taken,
    Removed(usize),
    Reverted(usize),
    Wrote(u64, u64, u8),
    Discarded(u64, u64),
}

fn between() -> impl Strategy<Value = Between> {
    prop_oneof![
        4 => Just(Between::Taken),
        1 => any::<usize>().prop_map(Between::Removed),
        1 => any::<usize>().prop_map(Between::Reverted),
        2 => (0u64..190, 1u64..30, 1u8..255).prop_map(|(at, len, byte)| Between::Wrote(at, len, byte)),
        1 => (0u64..190, 1u64..30).prop_map(|(at, len)| Between::Discarded(at, len)),
    ]
}

/// One history: QEMU's part and ours in turns.
fn live(path: &Path, turns: &[(Between, Vec<Step>)]) {
    let text = path.to_str().unwrap();
    let mut snapshots: Vec<(String, Vec<u8>)> = Vec::new();
    let mut may_leak = false;
    for (number, (between, steps)) in turns.iter().enumerate() {
        let len_kib = bytes_by_qemu(path, None).len() as u64 / 1024;
        match between {
            Between::Taken => {
                let name = format!("s{number}");
                snapshots.push((name.clone(), bytes_by_qemu(path, None)));
                qemu_img(&["snapshot", "-c", &name, text]);
            }
            Between::Removed(which) if !snapshots.is_empty() => {
                let (name, _) = snapshots.remove(which % snapshots.len());
                qemu_img(&["snapshot", "-d", &name, text]);
            }
            Between::Reverted(which) if !snapshots.is_empty() => {
                let (name, bytes) = &snapshots[which % snapshots.len()];
                qemu_img(&["snapshot", "-a", name, text]);
                assert!(bytes_by_qemu(path, None) == *bytes, "{name} after the revert");
            }
            Between::Wrote(at, len, byte) if at + len <= len_kib => {
                wrote(path, &format!("write -P {byte} {at}k {len}k")).unwrap();
            }
            Between::Discarded(at, len) if at + len <= len_kib => {
                wrote(path, &format!("discard {at}k {len}k")).unwrap()
            }
            _ => {}
        }
        let model = bytes_by_qemu(path, None);
        let store = loaded(path);
        may_leak = play(&store, model, steps.clone(), may_leak);
        save(&store, path);
        assert_kept(path, &snapshots, may_leak);
    }
    for (name, bytes) in &snapshots {
        qemu_img(&["snapshot", "-a", name, text]);
        assert!(bytes_by_qemu(path, None) == *bytes, "{name} after the last revert");
    }
    assert_kept(path, &snapshots, may_leak);
}

#[test]
fn snapshots_keep_their_bytes_whatever_we_and_qemu_write() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("disk.qcow2");
    let text = path.to_str().unwrap();
    if tool("qemu-img", &["--version"]).is_none() {
        return;
    }
    for options in [
        "cluster_size=512",
        "cluster_size=4096",
        "cluster_size=65536",
        "compat=0.10,cluster_size=4096",
        "refcount_bits=4,cluster_size=4096",
        "refcount_bits=64,cluster_size=512",
    ] {
        let mut runner = TestRunner::new(ProptestConfig::with_cases(6));
        let turns = prop::collection::vec((between(), prop::collection::vec(step(), 1..16)), 2..6);
        // Two bits count three snapshots at most. A revert shares for a moment once more.
        // QEMU adds one to each refcount while it goes back to a snapshot, also to one that leaks.
        let most_taken = if options.contains("refcount_bits=4") { 1 } else { usize::MAX };
        let result = runner.run(&turns, |mut turns| {
            let mut taken = 0;
            turns.retain(|(between, _)| {
                taken += usize::from(matches!(between, Between::Taken));
                !matches!(between, Between::Taken) || taken <= most_taken
            });
            // As in QEMU, an image of version 2 with snapshots keeps its size.
            if options.contains("compat=0.10") {
                let resizes = |step: &Step| matches!(step, Step::Enlarge { .. } | Step::Shrink { .. });
                turns.iter_mut().for_each(|(_, steps)| steps.retain(|step| !resizes(step)));
            }
            let _ = fs::remove_file(&path);
            qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, text, "200K"]);
            for command in ["write -P 1 0 40k", "write -P 3 150k 30k", "write -z 10k 10k"] {
                wrote(&path, command).unwrap();
            }
            if !options.contains("refcount_bits=4") {
                wrote(&path, "write -c -P 2 64k 64k").unwrap();
            }
            live(&path, &turns);
            Ok(())
        });
        result.unwrap_or_else(|error| panic!("{options}: {error}"));
    }
}

/// An image of QEMU's with data, and one snapshot of it.
fn with_snapshot(path: &Path) -> Option<Vec<u8>> {
    let text = path.to_str()?;
    tool("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "cluster_size=4096", text, "200K"])?;
    wrote(path, "write -P 7 0 100k")?;
    let bytes = bytes_by_qemu(path, None);
    qemu_img(&["snapshot", "-c", "one", text]);
    Some(bytes)
}

#[test]
fn what_a_snapshot_has_is_not_overwritten() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("disk.qcow2");
    let Some(before) = with_snapshot(&path) else { return };
    let store = loaded(&path);
    let image = open(&store);
    assert_eq!((image.snapshots().len(), image.snapshots()[0].name.as_str()), (1, "one"));
    let state = |block| {
        let mut state = [BlockState::Absent];
        image.block_states(block, &mut state).unwrap();
        state[0]
    };
    let BlockState::Shared { offset_bytes: shared, .. } = state(3) else { panic!("{:?}", state(3)) };
    let writer: &dyn ImageWriter = image.writer().unwrap();
    writer.begin_writing().unwrap();
    put(&*image, 3, 0, &[9; 512]);
    let BlockState::Data { offset_bytes: own, .. } = state(3) else { panic!("{:?}", state(3)) };
    assert_ne!(own, shared);
    // The disk's own data are overwritten.
    assert_eq!(writer.reserve_waiting(3).unwrap().offset_bytes, own);
    writer.commit_waiting(4, Commit::Discard).unwrap();
    assert_eq!(state(4), BlockState::Absent);
    // The last cluster of a smaller disk ends in zeros, and the snapshot's does not.
    writer.close().unwrap();
    let image = open(&store);
    image.writer().unwrap().shrink(98_816).unwrap();
    image.writer().unwrap().resize(200 << 10).unwrap();
    image.writer().unwrap().close().unwrap();
    let now = contents(&*open(&store)).unwrap();
    assert!(now[98_816..].iter().all(|&byte| byte == 0) && now[98_815] == 7);
    save(&store, &path);
    assert_kept(&path, &[("one".into(), before)], false);
}

#[test]
fn flags_that_lie_are_found_before_the_first_write() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("disk.qcow2");
    let Some(_) = with_snapshot(&path) else { return };
    let store = loaded(&path);
    let mut word = [0; 8];
    store.read_at(&mut word, 40).unwrap();
    let l1 = u64::from_be_bytes(word);
    store.read_at(&mut word, l1).unwrap();
    word[0] |= 0x80;
    store.write_at(&word, l1).unwrap();
    let error = open(&store).writer().unwrap().begin_writing().unwrap_err().to_string();
    assert!(error.contains("damaged image") && error.contains("COPIED"), "{error}");
}
