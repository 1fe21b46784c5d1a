//! Blocks that are in the cache in part: what a recorded boot reads, and nothing else, is fetched.

use super::{BLOCK, Bench, all, eventually};
use crate::{BLOCK_BYTES, Cache, CachedObject, ObjectFiles, Settings};
use diskwright_store::{Blocking, EngineKind, OpenOptions, RawDevice};
use std::{fs::OpenOptions as FileOptions, ops::Range, os::unix::fs::FileExt, path::Path, time::Duration};

const UNIT: u64 = 64 << 10;

/// What was fetched since this was last asked, in bytes, sorted.
fn fetched(bench: &Bench) -> Vec<Range<u64>> {
    let seen = bench.server.take_seen().into_iter();
    let mut ranges: Vec<_> = seen.filter_map(|seen| seen.range).filter(|range| *range != (0..16)).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    ranges
}

fn listed(settings: &Settings) -> CachedObject {
    Cache::open(settings).unwrap().unwrap().list().unwrap().remove(0)
}

/// What another machine with an empty cache has.
fn another(bench: &Bench) -> (Settings, ObjectFiles) {
    let settings = Settings { cache: Some(bench.folder.path().join("other")), ..bench.settings() };
    (settings.clone(), ObjectFiles::new(Some(settings)))
}

fn prefetch(bench: &Bench, files: &ObjectFiles, ranges: Vec<Range<u64>>) {
    let url = bench.server.url("disk");
    assert!(files.prefetch(Path::new(&url), Some(ranges), &mut |_, _| true).unwrap());
}

#[test]
fn what_one_machine_has_read_is_all_that_another_one_fetches() {
    let (bench, bytes) = Bench::new(12 * BLOCK + 70_144);
    let reads = [
        (8192, 4096),
        (3 * BLOCK - 4096, 8192),
        (5 * BLOCK + 65_536, 65_536),
        (7 * BLOCK, BLOCK),
        (12 * BLOCK, 70_144),
    ];
    let read = |device: &RawDevice| {
        let mut queue = Blocking::open(device, EngineKind::Auto).unwrap();
        for (at, len) in reads {
            let mut buf = vec![0; len];
            queue.read(at as u64, &mut buf).unwrap();
            assert!(buf == bytes[at..at + len], "{at}");
        }
    };
    let size_bytes = bytes.len() as u64;
    let last = 12 * BLOCK_BYTES..size_bytes;
    let units = [
        0..UNIT,
        3 * BLOCK_BYTES - UNIT..3 * BLOCK_BYTES + UNIT,
        5 * BLOCK_BYTES + UNIT..5 * BLOCK_BYTES + 2 * UNIT,
        7 * BLOCK_BYTES..8 * BLOCK_BYTES,
        last.clone(),
    ];
    read(&RawDevice::new(bench.open(), false, 512).unwrap());
    // What was read is known while the disk is open.
    eventually(|| listed(&bench.settings()).read == units);
    assert_eq!(listed(&bench.settings()).held_bytes(), 5 * BLOCK_BYTES + 70_144);
    fetched(&bench);

    let (settings, files) = another(&bench);
    prefetch(&bench, &files, units.to_vec());
    // A range that lies in two blocks is fetched by two requests.
    let mut expected = units.to_vec();
    expected.splice(1..2, [3 * BLOCK_BYTES - UNIT..3 * BLOCK_BYTES, 3 * BLOCK_BYTES..3 * BLOCK_BYTES + UNIT]);
    assert_eq!(fetched(&bench), expected);
    assert_eq!((listed(&settings).held.as_slice(), listed(&settings).read.len()), (units.as_slice(), 0));
    let store = bench.open_with(&files).unwrap();
    let device = RawDevice::new(store.clone(), false, 512).unwrap();
    read(&device);
    assert!(fetched(&bench).is_empty());
    eventually(|| listed(&settings).read == units);
    // More of such a block: just what is missing. Of another block: all of it.
    let mut queue = Blocking::open(&device, EngineKind::Auto).unwrap();
    let mut buf = vec![0; 2 * UNIT as usize];
    queue.read(5 * BLOCK_BYTES + 131_072 - 4096, &mut buf).unwrap();
    assert!(buf == bytes[5 * BLOCK + 131_072 - 4096..][..buf.len()]);
    queue.read(9 * BLOCK_BYTES + 4096, &mut buf[..4096]).unwrap();
    assert_eq!(
        fetched(&bench),
        [5 * BLOCK_BYTES + 2 * UNIT..5 * BLOCK_BYTES + 4 * UNIT, 9 * BLOCK_BYTES..10 * BLOCK_BYTES]
    );
    assert!(all(&*store) == bytes);
    eventually(|| listed(&settings).held_bytes() == size_bytes);
    // None of what was there is fetched again, but what lies between two missing units.
    let again: u64 = fetched(&bench).iter().map(|range| range.end - range.start).sum();
    assert!(again <= size_bytes - 2 * BLOCK_BYTES - 2 * UNIT, "{again}");
}

#[test]
fn requests_of_one_block_for_different_units_all_end() {
    let (bench, bytes) = Bench::new(2 * BLOCK);
    bench.server.set_latency(Duration::from_millis(20));
    let (settings, files) = another(&bench);
    prefetch(&bench, &files, std::iter::once(0..UNIT).collect());
    let store = bench.open_with(&files).unwrap();
    std::thread::scope(|scope| {
        for number in 0..32_usize {
            let (store, bytes) = (&store, &bytes);
            scope.spawn(move || {
                let (at, mut buf) = (number * 5 % 16 * 65_536 + 4096, vec![0; 65_536 * (1 + number % 3)]);
                let end = (at + buf.len()).min(2 * BLOCK);
                let buf = &mut buf[..end - at];
                store.read_at(buf, at as u64).unwrap();
                assert!(buf == &bytes[at..end]);
            });
        }
    });
    assert!(all(&*store) == bytes);
    // Also without room to keep anything.
    let files = ObjectFiles::new(Some(Settings { cache_bytes: 0, ..settings }));
    prefetch(&bench, &files, vec![0..UNIT, 4 * UNIT..5 * UNIT, 3 * UNIT + 1..3 * UNIT + 2]);
    assert!(all(&*bench.open_with(&files).unwrap()) == bytes);
}

#[test]
fn whatever_is_prefetched_read_dropped_and_damaged_all_that_is_shown_is_right() {
    let (bench, bytes) = Bench::new(3 * BLOCK + 70_144);
    let mut dice = super::cache::Dice(3);
    for round in 0..60 {
        let files = bench.files();
        let store = bench.open_with(&files).unwrap();
        for _ in 0..12 {
            let at = dice.below(bytes.len() as u64);
            let end = (at + 1 + dice.below(200_000)).min(bytes.len() as u64);
            match dice.below(6) {
                0 | 1 => prefetch(&bench, &files, std::iter::once(at..end).collect()),
                2 => {
                    let cache = Cache::open(&bench.settings()).unwrap().unwrap();
                    cache.drop_objects(&|_| true).unwrap();
                }
                3 => {
                    let path = super::cache::file_of(&bench, "data");
                    FileOptions::new().write(true).open(path).unwrap().write_all_at(&[1; 5000], at).unwrap();
                }
                _ => {
                    let mut buf = vec![0; (end - at) as usize];
                    store.read_at(&mut buf, at).unwrap();
                    assert!(buf == bytes[at as usize..end as usize], "round {round}: {at}..{end}");
                }
            }
        }
    }
}

#[test]
fn a_prefetch_that_is_stopped_says_so() {
    let (bench, _) = Bench::new(4 * BLOCK);
    let (_, files) = another(&bench);
    let url = bench.server.url("disk");
    assert!(!files.prefetch(Path::new(&url), None, &mut |done, _| done < BLOCK_BYTES).unwrap());
    let options = OpenOptions::default();
    assert!(all(&files.open_object(Path::new(&url), &options).unwrap()).len() == 4 * BLOCK);
}
