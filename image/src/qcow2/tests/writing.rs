//! Random sessions against an array of bytes; what QEMU finds in what we wrote, and we in what QEMU
//! wrote.

use super::{
    contents,
    qemu::{tool, wrote},
};
use crate::{
    BlockState, Commit, CreateOptions, DiskType, Format, FormatOptions, Image, ImageError, ImageWriter, MoveTo,
    ParentLink,
};
use diskwright_store::{MemoryStore, Store};
use proptest::prelude::*;
use std::{path::Path, sync::Arc};

pub(super) fn options(size_bytes: u64, cluster_bytes: u32) -> CreateOptions {
    CreateOptions {
        disk_type: DiskType::Dynamic,
        size_bytes,
        block_bytes: Some(cluster_bytes),
        logical_sector_bytes: 512,
        physical_sector_bytes: 512,
        parent: None,
        preallocate: false,
        disk_id: None,
        own: FormatOptions::default(),
    }
}

pub(super) fn created(options: &CreateOptions) -> Arc<dyn Store> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new("disk.qcow2"));
    Format::Qcow2.driver().create(Arc::clone(&store), options).unwrap();
    store
}

pub(super) fn open(store: &Arc<dyn Store>, writable: bool) -> Arc<dyn Image> {
    Format::Qcow2.driver().open(Arc::clone(store), writable, 512).unwrap()
}

/// What a check finds that is damage, and how many bytes are leaked.
pub(super) fn check(store: &Arc<dyn Store>) -> (Vec<String>, u64) {
    let report = super::super::examine(&[Some(Arc::clone(store))], false).unwrap().report;
    let damage = report.findings.into_iter().filter(|finding| finding.severity == crate::Severity::Corrupt);
    (damage.map(|finding| finding.message).collect(), report.leaked_bytes)
}

pub(super) fn assert_clean(store: &Arc<dyn Store>) {
    assert_eq!(check(store), (vec![], 0));
}

fn state(image: &dyn Image, block: u64) -> BlockState {
    let mut state = [BlockState::Absent];
    image.block_states(block, &mut state).unwrap();
    state[0]
}

/// Writes bytes within a block, as the disk above does: a block without data of its own is filled
/// first.
pub(super) fn put(image: &dyn Image, block: u64, within_bytes: u64, bytes: &[u8]) {
    let writer = image.writer().unwrap();
    let block_bytes = image.info().block_bytes as usize;
    let before = state(image, block);
    let mut former = vec![0; block_bytes];
    match before {
        BlockState::Compressed => image.read_compressed(block, 0, &mut former).unwrap(),
        BlockState::Shared { offset_bytes, .. } => image.store().read_at(&mut former, offset_bytes).unwrap(),
        _ => {}
    }
    let at = writer.reserve_waiting(block).unwrap();
    let store = &image.stores()[usize::from(at.store)];
    if matches!(before, BlockState::Compressed | BlockState::Shared { .. }) {
        store.write_at(&former, at.offset_bytes).unwrap();
    }
    store.write_at(bytes, at.offset_bytes + within_bytes).unwrap();
    writer.commit_waiting(block, Commit::Whole).unwrap();
}

#[derive(Debug, Clone)]
pub(super) enum Step {
    Write { sector: u64, count: u64 },
    Nothing { block: u64, change: Commit },
    Flush { recycle: bool },
    Reserve { block: u64 },
    Move { block: u64, commit: bool },
    GiveUpMoves,
    MoveTables,
    CutTail,
    Enlarge { sectors: u64 },
    Shrink { sectors: u64 },
    Reopen { close: bool },
}

const SECTORS: u64 = 640;

pub(super) fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..SECTORS, 1u64..20).prop_map(|(sector, count)| Step::Write { sector, count }),
        2 => (0..SECTORS, 0..3).prop_map(|(block, kind)| Step::Nothing {
            block, change: [Commit::Zero, Commit::Discard, Commit::Absent][kind as usize]
        }),
        2 => any::<bool>().prop_map(|recycle| Step::Flush { recycle }),
        1 => (0..SECTORS).prop_map(|block| Step::Reserve { block }),
        3 => (0..SECTORS, any::<bool>()).prop_map(|(block, commit)| Step::Move { block, commit }),
        1 => Just(Step::GiveUpMoves),
        1 => Just(Step::MoveTables),
        1 => Just(Step::CutTail),
        1 => (1..SECTORS).prop_map(|sectors| Step::Enlarge { sectors }),
        1 => (1..SECTORS).prop_map(|sectors| Step::Shrink { sectors }),
        1 => any::<bool>().prop_map(|close| Step::Reopen { close }),
    ]
}

/// Whether the image can be compacted: one with subclusters cannot.
fn begin_compacting(writer: &dyn ImageWriter) -> bool {
    match writer.begin_compacting() {
        Ok(()) => true,
        Err(ImageError::Unsupported { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

pub(super) fn reserve_move(writer: &dyn ImageWriter, block: u64) -> MoveTo {
    loop {
        if let Some(answer) = writer.reserve_move(block).unwrap() {
            return answer;
        }
        writer.prepare(block..block + 1).unwrap();
    }
}

/// Plays the steps on the image in `store`, whose disk has the bytes of `model`. `may_leak` says
/// whether the image may have leaks. Returns that for afterwards: a session that is not closed may
/// leak.
pub(super) fn play(store: &Arc<dyn Store>, mut model: Vec<u8>, steps: Vec<Step>, mut may_leak: bool) -> bool {
    let mut image = open(store, true);
    let block_bytes = image.info().block_bytes;
    for (version, step) in (1u8..).zip(steps) {
        let writer = image.writer().unwrap();
        writer.begin_writing().unwrap();
        writer.limit_tables(u64::from(version % 3) * 4096);
        let size = model.len() as u64;
        let blocks = size.div_ceil(block_bytes);
        match step {
            Step::Write { sector, count } => {
                let (mut at, end) = (sector * 512, ((sector + count) * 512).min(size));
                while at < end {
                    let within = at % block_bytes;
                    let len = (end - at).min(block_bytes - within);
                    let bytes = vec![version; len as usize];
                    put(&*image, at / block_bytes, within, &bytes);
                    model[at as usize..(at + len) as usize].copy_from_slice(&bytes);
                    at += len;
                }
            }
            Step::Nothing { block, change } if block < blocks => {
                writer.commit_waiting(block, change).unwrap();
                let end = ((block + 1) * block_bytes).min(size);
                model[(block * block_bytes) as usize..end as usize].fill(0);
            }
            Step::Flush { recycle } => {
                let generation = writer.freed_generation();
                writer.flush().unwrap();
                assert_eq!(check(store).0, Vec::<String>::new(), "after a flush");
                match (recycle, version % 2) {
                    (true, 0) => writer.recycle(generation),
                    (true, _) => writer.recycle_for_moves(generation),
                    (false, _) => {}
                }
            }
            Step::Reserve { block } if block < blocks => {
                let first = writer.reserve_waiting(block).unwrap();
                assert_eq!(first.offset_bytes, writer.reserve_waiting(block).unwrap().offset_bytes);
            }
            Step::Move { block, commit } if block < blocks => {
                let compacts = begin_compacting(writer);
                if let Some(MoveTo::Place(place)) = compacts.then(|| reserve_move(writer, block)) {
                    assert!(place.to_bytes < place.from_bytes);
                    let mut payload = vec![0; place.len_bytes as usize];
                    store.read_at(&mut payload, place.from_bytes).unwrap();
                    store.write_at(&payload, place.to_bytes).unwrap();
                    if commit {
                        writer.commit_waiting(block, Commit::Moved).unwrap();
                    }
                }
            }
            Step::GiveUpMoves => writer.give_up_moves(),
            Step::MoveTables => writer.move_tables().unwrap(),
            Step::CutTail => {
                if begin_compacting(writer) {
                    writer.cut_free_tail().unwrap();
                }
            }
            Step::Enlarge { sectors } => {
                let size = size.max(sectors * 512);
                writer.resize(size).unwrap();
                model.resize(size as usize, 0);
            }
            Step::Shrink { sectors } => {
                let size = size.min(sectors * 512);
                writer.flush().unwrap();
                // A reservation beyond the new end would be of a block that does not exist.
                writer.close().unwrap();
                image = open(store, true);
                let shrunk = image.writer().unwrap().shrink(size);
                if matches!(shrunk, Err(ImageError::Unsupported { .. })) {
                    assert_eq!(state(&*image, size / block_bytes), BlockState::Compressed);
                    image.writer().unwrap().close().unwrap();
                    return may_leak;
                }
                shrunk.unwrap();
                model.truncate(size as usize);
            }
            Step::Reopen { close } => {
                may_leak |= !close;
                if close {
                    writer.close().unwrap();
                    let (damage, leaked_bytes) = check(store);
                    assert!(damage.is_empty() && (may_leak || leaked_bytes == 0), "{damage:?}, {leaked_bytes} leaked");
                } else {
                    writer.flush().unwrap();
                    assert_eq!(check(store).0, Vec::<String>::new(), "after a flush");
                }
                assert!(contents(&*open(store, false)).unwrap() == model);
                image = open(store, true);
            }
            Step::Nothing { .. } | Step::Reserve { .. } | Step::Move { .. } => {}
        }
        assert!(contents(&*image).unwrap() == model, "after step {version}");
    }
    image.writer().unwrap().close().unwrap();
    assert!(contents(&*open(store, false)).unwrap() == model);
    may_leak
}

proptest! {
    #[test]
    fn a_session_is_a_disk(steps in prop::collection::vec(step(), 1..60), cluster_bits in 9u32..=13) {
        let store = created(&options(300 * 512, 1 << cluster_bits));
        play(&store, vec![0; 300 * 512], steps, false);
    }
}

/// A disk of QEMU's, and its bytes.
pub(super) fn by_qemu(folder: &Path, options: &str, commands: &[&str]) -> Option<(Arc<dyn Store>, Vec<u8>)> {
    let path = folder.join("disk.qcow2");
    let raw = folder.join("disk.raw");
    let _ = std::fs::remove_file(&path);
    tool("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, path.to_str()?, "200K"])?;
    for command in commands {
        wrote(&path, command)?;
    }
    tool("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", path.to_str()?, raw.to_str()?])?;
    Some((Arc::new(MemoryStore::with_bytes("disk.qcow2", std::fs::read(&path).unwrap())), std::fs::read(raw).unwrap()))
}

pub(super) fn assert_qemu_agrees(store: &Arc<dyn Store>, path: &Path, may_leak: bool) {
    let mut bytes = vec![0; store.len_bytes().unwrap() as usize];
    store.read_at(&mut bytes, 0).unwrap();
    std::fs::write(path, bytes).unwrap();
    let Some(output) = tool("qemu-img", &["check", "-f", "qcow2", path.to_str().unwrap()]) else { return };
    // 3: leaks only.
    assert!(output.status.success() || may_leak && output.status.code() == Some(3), "{output:?}");
    let raw = path.with_extension("raw");
    tool("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", path.to_str().unwrap(), raw.to_str().unwrap()]);
    assert!(std::fs::read(raw).unwrap() == contents(&*open(store, false)).unwrap());
}

#[test]
fn what_qemu_made_is_written_and_qemu_reads_it() {
    let folder = tempfile::TempDir::new().unwrap();
    let commands =
        ["write -P 1 0 40k", "write -c -P 2 64k 64k", "write -P 3 150k 30k", "write -z 10k 10k", "discard 155k 8k"];
    for options in [
        "cluster_size=512",
        "cluster_size=4096",
        "cluster_size=65536",
        "compat=0.10,cluster_size=4096",
        "refcount_bits=1,cluster_size=4096",
        "refcount_bits=64,cluster_size=512",
        "compression_type=zstd,cluster_size=4096",
        "preallocation=metadata,cluster_size=4096",
    ] {
        // A refcount of one bit cannot count compressed clusters that share one, and QEMU
        // compresses only what has no space.
        let is_plain = options.contains("refcount_bits=1,") || options.contains("preallocation");
        let commands: Vec<_> = commands.iter().filter(|one| !is_plain || !one.contains("-c")).copied().collect();
        let Some((store, model)) = by_qemu(folder.path(), options, &commands) else { return };
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(12));
        let mut bytes = vec![0; store.len_bytes().unwrap() as usize];
        store.read_at(&mut bytes, 0).unwrap();
        let result = runner.run(&prop::collection::vec(step(), 1..40), |steps| {
            let store: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("disk.qcow2", bytes.clone()));
            let may_leak = play(&store, model.clone(), steps, false);
            assert_qemu_agrees(&store, &folder.path().join("ours.qcow2"), may_leak);
            Ok(())
        });
        result.unwrap_or_else(|error| panic!("{options}: {error}"));
    }
}

#[test]
fn the_refcount_table_grows_and_qemu_agrees() {
    // 64 entries of 256 clusters of 512 bytes: a table of one cluster reaches 8 MiB.
    let folder = tempfile::TempDir::new().unwrap();
    let store = created(&options(40 << 20, 512));
    let image = open(&store, true);
    for block in (0..76_000).map(|number| number * 7919 % 81_920) {
        put(&*image, block, 0, &[block as u8; 512]);
    }
    image.writer().unwrap().close().unwrap();
    assert_clean(&store);
    assert_qemu_agrees(&store, &folder.path().join("ours.qcow2"), false);
}

#[test]
fn a_longer_l1_table_moves_and_qemu_agrees() {
    let folder = tempfile::TempDir::new().unwrap();
    for (cluster_bytes, size_bytes) in [(512, 1 << 30), (4096, 1 << 40), (65536, 1 << 46)] {
        let store = created(&options(1 << 20, cluster_bytes));
        let image = open(&store, true);
        put(&*image, 1, 0, &[7; 512]);
        image.writer().unwrap().resize(size_bytes).unwrap();
        assert_eq!(image.size_bytes(), size_bytes);
        put(&*image, size_bytes / u64::from(cluster_bytes) - 1, 0, &[8; 512]);
        image.writer().unwrap().close().unwrap();
        assert_clean(&store);
        let seen = open(&store, false);
        assert_eq!(seen.size_bytes(), size_bytes);
        assert!(matches!(state(&*seen, 1), BlockState::Data { .. }));
        let path = folder.path().join("ours.qcow2");
        let mut bytes = vec![0; store.len_bytes().unwrap() as usize];
        store.read_at(&mut bytes, 0).unwrap();
        std::fs::write(&path, bytes).unwrap();
        let Some(output) = tool("qemu-img", &["check", "-f", "qcow2", path.to_str().unwrap()]) else { return };
        assert!(output.status.success(), "{cluster_bytes}: {output:?}");
        wrote(&path, "read -P 7 LEN 512".replace("LEN", &cluster_bytes.to_string()).as_str()).unwrap();
    }
}

#[test]
fn preallocated_images_have_all_clusters() {
    let store = created(&CreateOptions { preallocate: true, ..options(1 << 20, 4096) });
    assert_clean(&store);
    let image = open(&store, false);
    assert!((0..256).all(|block| matches!(state(&*image, block), BlockState::Data { .. })));
    assert!(contents(&*image).unwrap().iter().all(|&byte| byte == 0));
}

#[test]
fn another_backing_file_is_named_and_qemu_finds_it() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("child.qcow2");
    for (name, byte) in [("a.raw", 1), ("b.raw", 2)] {
        std::fs::write(folder.path().join(name), vec![byte; 1 << 20]).unwrap();
    }
    let link = |name: &str| ParentLink {
        relative_path: Some(name.into()),
        format: Some(Format::Raw),
        ..ParentLink::default()
    };
    let child =
        CreateOptions { disk_type: DiskType::Differencing, parent: Some(link("a.raw")), ..options(1 << 20, 65536) };
    let store = created(&child);
    let image = open(&store, true);
    for name in ["b.raw", "a.raw", &"d/".repeat(400), "b.raw"] {
        image.writer().unwrap().set_parent_link(&link(name)).unwrap();
        assert_eq!(image.parent_link().unwrap().relative_path.as_deref(), Some(name));
        assert_eq!(Format::Qcow2.driver().parent_link(&*store).unwrap(), image.parent_link());
    }
    assert!(image.writer().unwrap().set_parent_link(&link(&"n".repeat(1024))).is_err());
    image.writer().unwrap().close().unwrap();
    let mut bytes = vec![0; store.len_bytes().unwrap() as usize];
    store.read_at(&mut bytes, 0).unwrap();
    std::fs::write(&path, bytes).unwrap();
    let Some(()) = wrote(&path, "read -P 2 0 1m") else { return };
}

#[test]
fn what_cannot_be_written_is_refused_by_name() {
    for (bits, told) in [(1u8, "marked not closed"), (2, "marked corrupt")] {
        let store = created(&options(1 << 20, 65536));
        store.write_at(&[bits], 79).unwrap();
        let error = Format::Qcow2.driver().open(store, true, 512).unwrap_err().to_string();
        assert!(error.contains(told) && error.contains("repair it first"), "{error}");
    }
}

#[test]
fn refcounts_that_lie_are_not_trusted() {
    let store = created(&options(1 << 20, 4096));
    let image = open(&store, true);
    put(&*image, 0, 0, &[7; 512]);
    let BlockState::Data { offset_bytes, .. } = state(&*image, 0) else { panic!() };
    image.writer().unwrap().close().unwrap();
    // The refcount block is the third cluster.
    store.write_at(&[0, 0], 2 * 4096 + offset_bytes / 4096 * 2).unwrap();
    let image = open(&store, true);
    let error = image.writer().unwrap().reserve_waiting(1).unwrap_err().to_string();
    assert!(error.contains("damaged image") && error.contains("repair it first"), "{error}");
    // What has its space can be written.
    assert_eq!(image.writer().unwrap().reserve_waiting(0).unwrap().offset_bytes, offset_bytes);
}

/// An L1 entry that has the COPIED flag and names no table: a write makes the table. (A fuzzer
/// found that the preparation of this write had no end.)
#[test]
fn a_flag_without_a_table_is_no_table() {
    let store = created(&options(1 << 20, 4096));
    let mut l1 = [0; 8];
    store.read_at(&mut l1, 40).unwrap();
    store.write_at(&[0x80], u64::from_be_bytes(l1)).unwrap();
    let image = open(&store, true);
    let writer = image.writer().unwrap();
    let at = writer.reserve_waiting(3).unwrap();
    store.write_at(&[7; 4096], at.offset_bytes).unwrap();
    writer.commit_waiting(3, Commit::Whole).unwrap();
    writer.close().unwrap();
    drop(image);
    let image = open(&store, false);
    let mut states = [BlockState::Absent; 4];
    image.block_states(0, &mut states).unwrap();
    assert_eq!(states[3], BlockState::data(at.offset_bytes));
}
