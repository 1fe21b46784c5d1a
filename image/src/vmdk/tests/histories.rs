//! Random sessions on sparse VMDKs against an array of bytes, with qemu-img as a second reader; and
//! what the header of a COWD extent records meanwhile.

use super::writing::{check, made, open, opened_for_writing, options, put, qemu, state};
use crate::{BlockState, Commit, CreateOptions, Image, MoveTo, Severity};
use diskwright_format::vmdk::{COWD_HEADER_BYTES, CowdHeader, SECTOR_BYTES};
use diskwright_store::Store;
use proptest::prelude::*;
use std::{fs, path::Path, process::Command, sync::Arc};

#[derive(Debug, Clone)]
enum Step {
    Write { sector: u64, count: u64 },
    Nothing { block: u64, change: Commit },
    Flush { recycle: bool },
    Reserve { block: u64 },
    Move { block: u64, commit: bool },
    GiveUpMoves,
    CutTail,
    Enlarge { sectors: u64 },
    Reopen { close: bool },
}

/// Sectors of the disk at first, behind those that no step touches.
const SECTORS: u64 = 640;

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..SECTORS, 1u64..20).prop_map(|(sector, count)| Step::Write { sector, count }),
        2 => (0..SECTORS, 0..3).prop_map(|(block, kind)| Step::Nothing {
            block, change: [Commit::Zero, Commit::Discard, Commit::Absent][kind as usize]
        }),
        2 => any::<bool>().prop_map(|recycle| Step::Flush { recycle }),
        1 => (0..SECTORS).prop_map(|block| Step::Reserve { block }),
        3 => (0..SECTORS, any::<bool>()).prop_map(|(block, commit)| Step::Move { block, commit }),
        1 => Just(Step::GiveUpMoves),
        1 => Just(Step::CutTail),
        1 => (1..2 * SECTORS).prop_map(|sectors| Step::Enlarge { sectors }),
        1 => any::<bool>().prop_map(|close| Step::Reopen { close }),
    ]
}

/// The bytes of the disk, by many states at a time.
fn contents(image: &dyn Image) -> Vec<u8> {
    let (block_bytes, size_bytes) = (image.info().block_bytes, image.size_bytes());
    let mut states = vec![BlockState::Absent; size_bytes.div_ceil(block_bytes) as usize];
    image.block_states(0, &mut states).unwrap();
    let mut all = vec![0; size_bytes as usize];
    for (state, bytes) in states.into_iter().zip(all.chunks_mut(block_bytes as usize)) {
        match state {
            BlockState::Absent => {}
            BlockState::Data { store, offset_bytes } => {
                image.stores()[usize::from(store)].read_at(bytes, offset_bytes).unwrap();
            }
            other => panic!("{other:?}"),
        }
    }
    all
}

fn damage(stores: &[Arc<dyn Store>]) -> Vec<String> {
    let stores: Vec<_> = stores.iter().cloned().map(Some).collect();
    let report = super::super::examine(&stores, false).unwrap().report;
    let damage = report.findings.into_iter().filter(|finding| finding.severity == Severity::Corrupt);
    damage.map(|finding| finding.message).collect()
}

fn put_at(image: &dyn Image, at_bytes: u64, bytes: &[u8]) {
    let (block, within) = (at_bytes / image.info().block_bytes, at_bytes % image.info().block_bytes);
    let place = image.writer().unwrap().reserve_waiting(block).unwrap();
    image.stores()[usize::from(place.store)].write_at(bytes, place.offset_bytes + within).unwrap();
    image.writer().unwrap().commit_waiting(block, Commit::Whole).unwrap();
}

/// Moves a block down, or reserves a place for that.
fn move_down(image: &dyn Image, block: u64, commit: bool) {
    let writer = image.writer().unwrap();
    writer.begin_compacting().unwrap();
    let to = loop {
        match writer.reserve_move(block).unwrap() {
            Some(to) => break to,
            None => writer.prepare(block..block + 1).unwrap(),
        }
    };
    let MoveTo::Place(place) = to else { return };
    assert!(place.to_bytes < place.from_bytes);
    let store = &image.stores()[usize::from(place.store)];
    let mut payload = vec![0; place.len_bytes as usize];
    store.read_at(&mut payload, place.from_bytes).unwrap();
    store.write_at(&payload, place.to_bytes).unwrap();
    if commit {
        writer.commit_waiting(block, Commit::Moved).unwrap();
    }
}

/// Plays the steps on an empty disk of `first + SECTORS` sectors, from sector `first` on.
fn play(stores: &[Arc<dyn Store>], first: u64, steps: Vec<Step>) {
    let mut model = vec![0; ((first + SECTORS) * SECTOR_BYTES) as usize];
    let mut image = open(stores, true);
    let block_bytes = image.info().block_bytes;
    let first_block = first * SECTOR_BYTES / block_bytes;
    for (version, step) in (1_u8..).zip(steps) {
        let writer = image.writer().unwrap();
        writer.begin_writing().unwrap();
        writer.limit_tables(u64::from(version % 3) * 4096);
        let size = model.len() as u64;
        let blocks = size.div_ceil(block_bytes);
        match step {
            Step::Write { sector, count } => {
                let (mut at, end) =
                    ((first + sector) * SECTOR_BYTES, ((first + sector + count) * SECTOR_BYTES).min(size));
                while at < end {
                    let len = (end - at).min(block_bytes - at % block_bytes);
                    put_at(&*image, at, &vec![version; len as usize]);
                    model[at as usize..(at + len) as usize].fill(version);
                    at += len;
                }
            }
            Step::Nothing { block, change } if first_block + block < blocks => {
                let block = first_block + block;
                writer.commit_waiting(block, change).unwrap();
                let end = ((block + 1) * block_bytes).min(size);
                model[(block * block_bytes) as usize..end as usize].fill(0);
            }
            Step::Flush { recycle } => {
                let generation = writer.freed_generation();
                writer.flush().unwrap();
                assert_eq!(damage(stores), [""; 0], "after a flush");
                match (recycle, version % 2) {
                    (true, 0) => writer.recycle(generation),
                    (true, _) => writer.recycle_for_moves(generation),
                    (false, _) => {}
                }
            }
            Step::Reserve { block } if first_block + block < blocks => {
                let reserved = writer.reserve_waiting(first_block + block).unwrap();
                assert_eq!(reserved.offset_bytes, writer.reserve_waiting(first_block + block).unwrap().offset_bytes);
            }
            Step::Move { block, commit } if first_block + block < blocks => {
                move_down(&*image, first_block + block, commit);
            }
            Step::GiveUpMoves => writer.give_up_moves(),
            Step::CutTail => {
                writer.begin_compacting().unwrap();
                writer.cut_free_tail().unwrap();
            }
            Step::Enlarge { sectors } => {
                let size = size.max((first + sectors) * SECTOR_BYTES);
                writer.resize(size).unwrap();
                model.resize(size as usize, 0);
            }
            Step::Reopen { close } => {
                writer.flush().unwrap();
                if close {
                    writer.close().unwrap();
                }
                assert_eq!(damage(stores), [""; 0], "after a session");
                assert!(contents(&*open(stores, false)) == model);
                image = open(stores, true);
            }
            Step::Nothing { .. } | Step::Reserve { .. } | Step::Move { .. } => {}
        }
        assert!(contents(&*image) == model, "after step {version}");
    }
    image.writer().unwrap().close().unwrap();
    assert_eq!(damage(stores), [""; 0], "at the end");
    assert!(contents(&*open(stores, false)) == model);
}

/// Saves the files of an image under the names that they have.
fn save(stores: &[Arc<dyn Store>], folder: &Path) {
    for store in stores {
        let mut bytes = vec![0; store.len_bytes().unwrap() as usize];
        store.read_at(&mut bytes, 0).unwrap();
        fs::write(folder.join(store.name()), bytes).unwrap();
    }
}

#[test]
fn a_session_is_a_disk_and_qemu_agrees() {
    let folder = tempfile::tempdir().unwrap();
    let has_qemu = Command::new("qemu-img").arg("--version").output().is_ok();
    if !has_qemu {
        println!("skipped: qemu-img is not installed");
    }
    // Disks of COWD begin at the end of a table, so that steps use two tables.
    for (kind, grain_bytes, first) in [
        ("vmfsSparse", 512, 4096 - 300),
        ("vmfsSparse", 4096, 0),
        ("monolithicSparse", 8192, 0),
        ("twoGbMaxExtentSparse", 8192, 0),
    ] {
        let created =
            CreateOptions { block_bytes: Some(grain_bytes), ..options(kind, (first + SECTORS) * SECTOR_BYTES) };
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(16));
        let result = runner.run(&prop::collection::vec(step(), 1..50), |steps| {
            let stores = made(&created);
            play(&stores, first, steps);
            if has_qemu {
                save(&stores, folder.path());
                let path = folder.path().join("d.vmdk");
                qemu("qemu-img", &["check", "-q", "-f", "vmdk"], &path);
                let raw = folder.path().join("d.raw");
                qemu("qemu-img", &["convert", "-f", "vmdk", "-O", "raw", path.to_str().unwrap()], &raw);
                assert!(fs::read(raw).unwrap() == contents(&*open(&stores, false)), "qemu-img reads other bytes");
            }
            Ok(())
        });
        result.unwrap_or_else(|error| panic!("{kind}, grains of {grain_bytes}: {error}"));
    }
}

fn header(store: &dyn Store) -> CowdHeader {
    let mut bytes = [0; COWD_HEADER_BYTES];
    store.read_at(&mut bytes, 0).unwrap();
    CowdHeader::parse(&bytes).unwrap()
}

/// ESX puts its next grain at the sector that the header calls free.
#[test]
fn the_header_counts_a_grain_before_a_table_names_it() {
    let stores = made(&options("vmfsSparse", 64 << 20));
    let extent = &*stores[1];
    let free = || u64::from(header(extent).free_sector) * SECTOR_BYTES;
    assert_eq!((free(), header(extent).is_unclean), (extent.len_bytes().unwrap(), false));
    let image = open(&stores, true);
    for block in [5, 40_000, 6, 131_071] {
        put(&*image, block, 1);
        let BlockState::Data { offset_bytes, .. } = state(&*image, block) else { panic!("no data") };
        assert!(offset_bytes + SECTOR_BYTES <= free(), "block {block} at {offset_bytes}, free {}", free());
        assert!(header(extent).is_unclean);
    }
    image.writer().unwrap().close().unwrap();
    assert_eq!((free(), header(extent).is_unclean), (extent.len_bytes().unwrap(), false));
    assert_eq!(check(&stores), [""; 0]);
    drop(image);
    // Another program has not counted its grains.
    let stale = (free() / SECTOR_BYTES - 2) as u32;
    extent.write_at(&stale.to_le_bytes(), 28).unwrap();
    let found = damage(&stores);
    assert!(found.len() == 1 && found[0].contains("ESX would overwrite them"), "{found:?}");
    let image = open(&stores, true);
    put(&*image, 7, 2);
    image.writer().unwrap().close().unwrap();
    assert_eq!((check(&stores), free()), (Vec::new(), extent.len_bytes().unwrap()));
}

/// The extent by itself can be repaired.
#[test]
fn a_repair_counts_all_sectors_in_use() {
    let stores = made(&options("vmfsSparse", 4 << 20));
    let image = open(&stores, true);
    put(&*image, 9, 3);
    image.writer().unwrap().close().unwrap();
    stores[1].write_at(&[0; 4], 28).unwrap();
    assert_eq!(damage(&stores[1..]).len(), 1);
    crate::repair_image(crate::Format::Vmdk, &stores[1], false, &mut |_| true).unwrap();
    assert_eq!(damage(&stores[1..]), [""; 0]);
    let free = u64::from(header(&*stores[1]).free_sector) * SECTOR_BYTES;
    assert_eq!(free, stores[1].len_bytes().unwrap());
}

#[test]
fn two_grains_in_one_place_are_refused_before_the_first_write() {
    for grain_bytes in [512, 4096] {
        let created = CreateOptions { block_bytes: Some(grain_bytes), ..options("vmfsSparse", 4 << 20) };
        let stores = made(&created);
        let image = open(&stores, true);
        put(&*image, 9, 3);
        image.writer().unwrap().close().unwrap();
        drop(image);
        let table = (4 + 1) * SECTOR_BYTES;
        let mut entry = [0; 4];
        stores[1].read_at(&mut entry, table + 9 * 4).unwrap();
        stores[1].write_at(&entry, table + 11 * 4).unwrap();
        let image = open(&stores, true);
        let told = image.writer().unwrap().reserve_waiting(20).unwrap_err().to_string();
        assert!(told.contains("space of their own"), "{told}");
    }
}

/// qemu-io adds grains to tables that exist. It does not count them in the header.
#[test]
fn qemu_and_this_program_write_to_a_redo_log_in_turns() {
    if Command::new("qemu-io").arg("--version").output().is_err() {
        return println!("skipped: qemu-io is not installed");
    }
    for grain_bytes in [512_u32, 65_536] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("d.vmdk");
        save(&made(&CreateOptions { block_bytes: Some(grain_bytes), ..options("vmfsSparse", 64 << 20) }), dir.path());
        let mut model = vec![0; 64 << 20];
        for turn in 0..6_u64 {
            let (at, len, byte) = (((turn * 7) << 20) + 1536, 70_144, turn as u8 + 1);
            if turn % 2 == 0 {
                let image = opened_for_writing(&path);
                image.writer().unwrap().begin_writing().unwrap();
                let mut done = at;
                while done < at + len {
                    let part = (at + len - done).min(u64::from(grain_bytes) - done % u64::from(grain_bytes));
                    put_at(&*image, done, &vec![byte; part as usize]);
                    done += part;
                }
                image.writer().unwrap().close().unwrap();
            } else {
                qemu("qemu-io", &["-f", "vmdk", "-c", &format!("write -P {byte} {at} {len}")], &path);
            }
            model[at as usize..(at + len) as usize].fill(byte);
            assert!(contents(&*super::opened(&path)) == model, "after turn {turn}");
            let raw = dir.path().join("d.raw");
            qemu("qemu-img", &["convert", "-f", "vmdk", "-O", "raw", path.to_str().unwrap()], &raw);
            assert!(fs::read(&raw).unwrap() == model, "qemu-img, after turn {turn}");
            qemu("qemu-img", &["check", "-q", "-f", "vmdk"], &path);
        }
    }
}

#[test]
fn a_longer_directory_moves_and_what_is_too_long_is_refused() {
    let stores = made(&options("vmfsSparse", 200 << 20));
    let image = open(&stores, true);
    put(&*image, 1, 1);
    put(&*image, 409_599, 2);
    image.writer().unwrap().resize(700 << 20).unwrap();
    put(&*image, 1_433_599, 3);
    image.writer().unwrap().close().unwrap();
    drop(image);
    let now = header(&*stores[1]);
    assert_eq!((now.capacity_sectors, now.directory_entries), (1_433_600, 350));
    assert_ne!(now.directory_sector, 4);
    assert_eq!(damage(&stores), [""; 0]);
    let image = open(&stores, true);
    for (block, byte) in [(1, 1), (409_599, 2), (1_433_599, 3)] {
        let BlockState::Data { store, offset_bytes } = state(&*image, block) else { panic!("block {block}") };
        let mut bytes = [0; 512];
        image.stores()[usize::from(store)].read_at(&mut bytes, offset_bytes).unwrap();
        assert_eq!(bytes, [byte; 512]);
    }
    let told = image.writer().unwrap().resize(2 << 40).unwrap_err().to_string();
    assert!(told.contains("reach 2 TiB"), "{told}");
    let too_long = crate::Format::Vmdk.driver().further_files(&options("vmfsSparse", 2 << 40)).unwrap_err().to_string();
    assert!(too_long.contains("reach 2 TiB"), "{too_long}");
    let odd = CreateOptions { block_bytes: Some(256), ..options("vmfsSparse", 1 << 20) };
    assert!(crate::Format::Vmdk.driver().further_files(&odd).unwrap_err().to_string().contains("a grain of 256 bytes"));
}
