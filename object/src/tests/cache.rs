//! The cache: warm after a restart, shared, bounded, and never wrong.

use super::{BLOCK, Bench, all, contents, eventually};
use crate::{BLOCK_BYTES, Cache, ObjectFiles, Settings, testing::TestServer};
use diskwright_store::{Blocking, EngineKind, OpenOptions, RawDevice, Store};
use std::{
    fs::{self, OpenOptions as FileOptions},
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

pub(super) fn file_of(bench: &Bench, ending: &str) -> PathBuf {
    let mut files = fs::read_dir(bench.folder.path()).unwrap().map(|file| file.unwrap().path());
    files.find(|path| path.extension().is_some_and(|found| found == ending)).unwrap()
}

fn held(bench: &Bench) -> u64 {
    let cache = Cache::open(&bench.settings()).unwrap().unwrap();
    cache.list().unwrap().iter().map(|object| object.held_bytes()).sum()
}

#[test]
fn what_was_fetched_is_there_after_a_restart() {
    let (bench, bytes) = Bench::new(10 * BLOCK + 700);
    assert!(all(&*bench.open()) == bytes);
    assert_eq!(bench.fetched().len(), 11);
    eventually(|| held(&bench) == bytes.len() as u64);
    let store = bench.open();
    assert!(all(&*store) == bytes);
    assert!(bench.fetched().is_empty());
    // Through a queue, which reads the cache's file itself.
    let device = RawDevice::new(store, false, 512).unwrap();
    let mut queue = Blocking::open(&device, EngineKind::Auto).unwrap();
    let mut buf = vec![0; 3 * BLOCK];
    queue.read(5 * BLOCK_BYTES + 4096, &mut buf).unwrap();
    assert!(buf == bytes[5 * BLOCK + 4096..][..3 * BLOCK]);
    assert!(bench.fetched().is_empty());
    let listed = Cache::open(&bench.settings()).unwrap().unwrap().list().unwrap();
    assert_eq!((listed.len(), listed[0].name.as_str()), (1, bench.server.url("disk").as_str()));
    assert_eq!((listed[0].held_bytes(), listed[0].held.len(), listed[0].is_open), (bytes.len() as u64, 1, true));
    // Another version has blocks of its own.
    bench.server.put("disk", contents(5000), "\"two\"");
    assert!(all(&*bench.open()) == contents(5000));
}

#[test]
fn a_damaged_cache_is_never_shown() {
    let (bench, bytes) = Bench::new(4 * BLOCK);
    assert!(all(&*bench.open()) == bytes);
    eventually(|| held(&bench) == bytes.len() as u64);
    bench.fetched();
    let data = FileOptions::new().write(true).open(file_of(&bench, "data")).unwrap();
    // One bit; a hole, as a power cut or another process's drop leaves it.
    data.write_all_at(&[bytes[BLOCK + 9000] ^ 1], BLOCK as u64 + 9000).unwrap();
    data.write_all_at(&[0; 4096], 3 * BLOCK_BYTES + 4096).unwrap();
    let store = bench.open();
    assert!(all(&*store) == bytes);
    assert_eq!(bench.fetched(), [1, 3]);
    // While it is open and its blocks are known.
    data.write_all_at(&[bytes[9000] ^ 1], 9000).unwrap();
    let device = RawDevice::new(Arc::clone(&store), false, 512).unwrap();
    let mut queue = Blocking::open(&device, EngineKind::Auto).unwrap();
    let mut buf = vec![0; 65_536];
    queue.read(0, &mut buf).unwrap();
    assert!(buf == bytes[..65_536]);
    assert_eq!(bench.fetched(), [0]);
    drop((store, device, queue));
    // A map that lies, is cut short, or is another one's.
    for damage in [
        &(|map: &fs::File| map.write_all_at(&[7], 20).unwrap()) as &dyn Fn(&fs::File),
        &|map| map.set_len(100).unwrap(),
        &|map| map.write_all_at(&[0x83; 4], 4096).unwrap(),
        &|map| map.write_all_at(&[0x5a; 4096], 8192).unwrap(),
    ] {
        damage(&FileOptions::new().write(true).open(file_of(&bench, "map")).unwrap());
        assert!(all(&*bench.open()) == bytes);
    }
}

#[test]
fn processes_share_fetches() {
    let (bench, bytes) = Bench::new(16 * BLOCK);
    bench.server.set_latency(Duration::from_millis(30));
    // Each with a fetcher of its own, as in a process of its own.
    let stores: Vec<Arc<dyn Store>> = (0..6).map(|_| bench.open()).collect();
    bench.fetched();
    thread::scope(|scope| {
        for (number, store) in stores.iter().enumerate() {
            let bytes = &bytes;
            scope.spawn(move || {
                let mut buf = vec![0; 4096];
                for step in 0..16 {
                    let at = (step * 7 + number * 3) % 16 * BLOCK + 40_960;
                    store.read_at(&mut buf, at as u64).unwrap();
                    assert!(buf == bytes[at..at + 4096]);
                }
            });
        }
    });
    assert_eq!(bench.fetched(), (0..16).collect::<Vec<_>>());
}

#[test]
fn the_cache_stays_within_its_size_and_keeps_what_is_used() {
    let (bench, bytes) = Bench::new(200 * BLOCK);
    let settings = Settings { cache_bytes: 80 * BLOCK_BYTES, ..bench.settings() };
    let files = ObjectFiles::new(Some(settings));
    let store = bench.open_with(&files).unwrap();
    let mut buf = vec![0; 4096];
    let mut read = |block: usize| {
        let at = block * BLOCK + 8192;
        store.read_at(&mut buf, at as u64).unwrap();
        assert!(buf == bytes[at..at + 4096], "{block}");
    };
    for block in 0..200 {
        read(block);
        // These are used all the time.
        (0..8).for_each(&mut read);
    }
    eventually(|| held(&bench) <= 80 * BLOCK_BYTES);
    let stored = fs::metadata(file_of(&bench, "data")).unwrap().blocks() * 512;
    assert!(stored <= 82 * BLOCK_BYTES, "{stored}");
    bench.fetched();
    (0..8).for_each(&mut read);
    let again = bench.fetched().len();
    assert!(again <= 2, "{again} of 8 blocks that are used all the time were dropped");
    // What was dropped is fetched again, and right.
    (0..200).rev().for_each(&mut read);
    assert!(all(&*store) == bytes);
}

#[test]
fn dropped_objects_are_fetched_again() {
    let (bench, bytes) = Bench::new(5 * BLOCK);
    let store = bench.open();
    assert!(all(&*store) == bytes);
    eventually(|| held(&bench) == bytes.len() as u64);
    bench.fetched();
    let cache = Cache::open(&bench.settings()).unwrap().unwrap();
    assert_eq!(cache.drop_objects(&|name| name == "s3://other/key").unwrap(), 0);
    // A block that was kept just now may be locked for a moment.
    let mut dropped = 0;
    eventually(|| {
        dropped += cache.drop_objects(&|name| name.ends_with("/disk")).unwrap();
        dropped == bytes.len() as u64
    });
    // It is open, so its files stay.
    assert_eq!(cache.list().unwrap().len(), 1);
    assert!(all(&*store) == bytes);
    assert_eq!(bench.fetched(), [0, 1, 2, 3, 4]);
    drop(store);
    eventually(|| {
        cache.drop_objects(&|_| true).unwrap();
        cache.list().unwrap().is_empty()
    });
    assert!(fs::read_dir(bench.folder.path()).unwrap().all(|file| file.unwrap().file_name() == "lock"));
}

#[test]
fn without_room_for_a_cache_the_object_is_read_all_the_same() {
    let (bench, bytes) = Bench::new(12 * BLOCK);
    let file = bench.folder.path().join("a file");
    fs::write(&file, "").unwrap();
    for (cache, cache_bytes) in [(None, 0), (Some(bench.folder.path().join("new")), 0), (Some(file.join("x")), 1 << 30)]
    {
        let files = ObjectFiles::new(Some(Settings { cache, cache_bytes, ..bench.settings() }));
        let store = bench.open_with(&files).unwrap();
        assert!(all(&*store) == bytes);
        let device = RawDevice::new(store, false, 512).unwrap();
        let mut queue = Blocking::open(&device, EngineKind::Auto).unwrap();
        let mut buf = vec![0; 2 * BLOCK];
        queue.read(3 * BLOCK_BYTES + 512, &mut buf).unwrap();
        assert!(buf == bytes[3 * BLOCK + 512..][..2 * BLOCK]);
    }
}

#[test]
fn a_name_is_no_object_of_another_server() {
    let (bench, _) = Bench::new(1000);
    let other = TestServer::start();
    other.put("disk", vec![7; 1000], "\"one\"");
    let files = bench.files();
    let here = bench.open_with(&files).unwrap();
    let there = files.open_object(Path::new(&other.url("disk")), &OpenOptions::default()).unwrap();
    assert_ne!(here.identity(), there.identity());
    assert!(all(&there).iter().all(|&byte| byte == 7) && all(&*here) == contents(1000));
}

/// A generator for tests that need no good one.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// Waits until nobody has the object open, and reads the files of the cache.
fn files_at_rest(bench: &Bench) -> [Vec<u8>; 2] {
    let cache = Cache::open(&bench.settings()).unwrap().unwrap();
    eventually(|| cache.list().unwrap().iter().all(|object| !object.is_open));
    ["map", "data"].map(|ending| fs::read(file_of(bench, ending)).unwrap())
}

/// Nothing of the cache is synced, so each sector of both files may be as at any earlier moment.
#[test]
fn whatever_a_power_cut_leaves_of_the_cache_nothing_wrong_is_shown() {
    let (bench, bytes) = Bench::new(3 * BLOCK + 700);
    let mut buf = vec![0; 4096];
    let store = bench.open();
    store.read_at(&mut buf, BLOCK_BYTES + 8192).unwrap();
    eventually(|| held(&bench) == BLOCK_BYTES);
    drop(store);
    let before = files_at_rest(&bench);
    assert!(all(&*bench.open()) == bytes);
    eventually(|| held(&bench) == bytes.len() as u64);
    let after = files_at_rest(&bench);
    let mut dice = Dice(1);
    for round in 0..150 {
        // Mostly one side is more likely.
        let (chance, lost) = ([5, 50, 95][round % 3], [0, 0, 10][round / 3 % 3]);
        for (at, ending) in ["map", "data"].into_iter().enumerate() {
            let sectors = after[at].chunks(512).enumerate().flat_map(|(sector, new)| {
                let old = before[at].get(sector * 512..sector * 512 + new.len()).unwrap_or(&[]);
                let picked = if dice.below(100) < chance { new } else { old };
                let mut sector = picked.to_vec();
                sector.resize(new.len(), 0);
                if dice.below(100) < lost {
                    sector.fill(0);
                }
                sector
            });
            fs::write(file_of(&bench, ending), sectors.collect::<Vec<u8>>()).unwrap();
        }
        assert!(all(&*bench.open()) == bytes, "round {round}");
        files_at_rest(&bench);
    }
}

#[test]
fn whatever_a_map_says_nothing_wrong_is_shown() {
    let (bench, bytes) = Bench::new(2 * BLOCK + 700);
    assert!(all(&*bench.open()) == bytes);
    eventually(|| held(&bench) == bytes.len() as u64);
    let [whole, _] = files_at_rest(&bench);
    let mut dice = Dice(2);
    for round in 0..150 {
        let mut map = whole.clone();
        for _ in 0..=dice.below(20) {
            let at = match dice.below(3) {
                0 => dice.below(100),
                1 => 4096 + dice.below(8),
                _ => dice.below(map.len() as u64),
            };
            map[at as usize] ^= 1 << dice.below(8);
        }
        map.truncate(if dice.below(5) == 0 { dice.below(map.len() as u64) as usize } else { map.len() });
        fs::write(file_of(&bench, "map"), &map).unwrap();
        // A map that lies about its own object is another one's for `list`, and is made anew.
        let listed = Cache::open(&bench.settings()).unwrap().unwrap().list().unwrap();
        assert!(listed.len() <= 1);
        assert!(all(&*bench.open()) == bytes, "round {round}");
        files_at_rest(&bench);
    }
}
