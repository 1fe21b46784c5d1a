//! What is read, and with which requests.

use super::{BLOCK, Bench, all, eventually};
use crate::{BLOCK_BYTES, testing::TestServer};
use diskwright_store::{BlockDevice, Blocking, EngineKind, IoBuf, QueueOptions, RawDevice, Request, Store};
use std::{path::Path, sync::Arc, thread, time::Duration};

/// Reads by many requests at once, through the engine of a queue.
fn read_by_queue(store: &Arc<dyn Store>, ranges: &[(u64, usize)], bytes: &[u8]) {
    let device = RawDevice::new(Arc::clone(store), false, 512).unwrap();
    let options = QueueOptions { depth: 32, engine: EngineKind::Auto, slab: None, ring: None };
    let mut queue = device.open_queue(&options).unwrap();
    let mut done = Vec::new();
    let check = |done: &mut Vec<diskwright_store::Completion>| {
        for ended in done.drain(..) {
            ended.result.unwrap();
            let (at, len) = ranges[ended.tag as usize];
            assert!(ended.buf.unwrap()[..len] == bytes[at as usize..at as usize + len], "{at}+{len}");
        }
    };
    for (tag, &(at, len)) in (0..).zip(ranges) {
        while queue.in_flight() >= 32 {
            queue.reap(1, &mut done).unwrap();
            check(&mut done);
        }
        queue.push(Request::read(at, len, IoBuf::new(len), tag)).map_err(|refused| refused.reason).unwrap();
    }
    while queue.in_flight() > 0 {
        queue.reap(1, &mut done).unwrap();
        check(&mut done);
    }
}

#[test]
fn every_range_is_right_and_every_block_is_fetched_once() {
    let (bench, bytes) = Bench::new(40 * BLOCK + 1536);
    bench.server.set_latency(Duration::from_millis(20));
    let store = bench.open();
    assert_eq!(store.len_bytes().unwrap(), bytes.len() as u64);
    // Random, small, and never the first byte of a block.
    let mut seed = 7_u64;
    let ranges: Vec<(u64, usize)> = (0..600)
        .map(|number| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let block = (seed >> 33) % 40;
            let within = 4096 * (1 + (seed >> 20) % 254);
            match number % 3 {
                0 => (block * BLOCK_BYTES + within, 4096),
                1 => (block * BLOCK_BYTES + within + 512, 512),
                _ => (block * BLOCK_BYTES + BLOCK_BYTES - 1536, if block < 39 { 4096 } else { 1024 }),
            }
        })
        .collect();
    read_by_queue(&store, &ranges, &bytes);
    let touched: std::collections::BTreeSet<u64> =
        ranges.iter().flat_map(|&(at, len)| at / BLOCK_BYTES..(at + len as u64).div_ceil(BLOCK_BYTES)).collect();
    let seen = bench.server.take_seen();
    assert!(seen.iter().skip(1).all(|seen| seen.if_match.as_deref() == Some("\"one\"")), "{seen:?}");
    let blocks_of = |range: std::ops::Range<u64>| range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES);
    let mut fetched: Vec<u64> = seen.iter().skip(1).flat_map(|seen| blocks_of(seen.range.clone().unwrap())).collect();
    fetched.sort_unstable();
    assert!(fetched.iter().copied().eq(touched.iter().copied()), "{fetched:?}");
    // A machine under load starts fewer in the time that one takes.
    assert!((3..=16).contains(&bench.server.most_under_way()), "{}", bench.server.most_under_way());
    assert!(all(&*store) == bytes);
    let mut rest = bench.fetched();
    rest.retain(|block| touched.contains(block));
    assert!(rest.is_empty(), "what is in the cache is not fetched again");
}

#[test]
fn a_sequential_reader_is_read_ahead_of() {
    let (bench, bytes) = Bench::new(64 * BLOCK);
    bench.server.set_latency(Duration::from_millis(100));
    let store = bench.open();
    let device = RawDevice::new(Arc::clone(&store), false, 512).unwrap();
    let mut queue = Blocking::open(&device, EngineKind::Auto).unwrap();
    let mut buf = vec![0; 64 << 10];
    let begun = std::time::Instant::now();
    for at in (0..bytes.len()).step_by(buf.len()) {
        queue.read(at as u64, &mut buf).unwrap();
        assert!(buf == bytes[at..at + buf.len()]);
    }
    let took = begun.elapsed();
    assert!(took < Duration::from_millis(100 * 32), "{took:?}: one after the other takes more than 6.4 s");
    assert_eq!(bench.fetched(), (0..64).collect::<Vec<_>>());
}

#[test]
fn readers_of_one_block_share_a_fetch() {
    let (bench, bytes) = Bench::new(2 * BLOCK);
    bench.server.set_latency(Duration::from_millis(200));
    let files = bench.files();
    let stores: Vec<_> = (0..8).map(|_| bench.open_with(&files).unwrap()).collect();
    thread::scope(|scope| {
        for (number, store) in stores.iter().enumerate() {
            let bytes = &bytes;
            scope.spawn(move || {
                let mut buf = vec![0; 5000];
                store.read_at(&mut buf, 100 + 1000 * number as u64).unwrap();
                assert!(buf == bytes[100 + 1000 * number..][..5000]);
            });
        }
    });
    assert_eq!(bench.fetched(), [0]);
}

#[test]
fn an_object_is_read_only_and_has_an_identity() {
    let (bench, bytes) = Bench::new(3000);
    let store = bench.open();
    let mut buf = [0; 10];
    assert!(store.read_at(&mut buf, 2995).is_err() && store.read_at(&mut buf, u64::MAX).is_err());
    store.read_at(&mut buf, 2990).unwrap();
    assert_eq!(buf, bytes[2990..]);
    let error = store.write_at(&buf, 0).unwrap_err();
    assert!(error.to_string().contains("cannot be written in place"), "{error}");
    let files = bench.files();
    let path = bench.server.url("disk");
    let facts = diskwright_store::FileSystem::facts(&files, Path::new(&path)).unwrap();
    assert_eq!(Some(facts.identity), store.identity());
    assert!(facts.modified.is_some());
    bench.server.put("disk", bytes, "\"two\"");
    let now = diskwright_store::FileSystem::facts(&files, Path::new(&path)).unwrap();
    assert_ne!(now.identity, facts.identity, "another version is another file");
}

#[test]
fn secrets_are_sent_and_not_shown() {
    let (bench, bytes) = Bench::new(3000);
    let files = bench.files();
    let secret = format!("http://me:word@{}/disk?sig=SECRET", bench.server.host());
    let store = files.open_object(Path::new(&secret), &diskwright_store::OpenOptions::default()).unwrap();
    assert!(all(&store) == bytes);
    let seen = bench.server.take_seen();
    assert!(seen.iter().all(|seen| seen.path == "/disk?sig=SECRET" && seen.authorization.is_some()), "{seen:?}");
    assert_eq!(store.name(), Path::new(&bench.server.url("disk")));
    // What a child would record is enough as long as the process lives.
    let plain = diskwright_store::FileSystem::canonical(&files, Path::new(&secret)).unwrap();
    assert_eq!(plain, store.name());
    files.open_object(&plain, &diskwright_store::OpenOptions::default()).unwrap();
    assert!(bench.server.take_seen().iter().all(|seen| seen.path.ends_with("SECRET")));
    let names = std::fs::read_dir(bench.folder.path()).unwrap();
    for file in names.map(|file| file.unwrap().path()) {
        let bytes = std::fs::read(&file).unwrap();
        assert!(!bytes.windows(6).any(|window| window == b"SECRET"), "{}", file.display());
    }
    eventually(|| bench.server.take_seen().is_empty());
}

#[test]
fn a_server_that_is_gone_is_an_error_within_the_timeout() {
    let (bench, _) = Bench::new(5 * BLOCK);
    let files = crate::ObjectFiles::new(Some(crate::Settings { timeout: Duration::from_secs(2), ..bench.settings() }));
    let store = bench.open_with(&files).unwrap();
    let Bench { server, folder: _folder } = bench;
    server.always(Some(crate::testing::Fault::Silence(Duration::from_secs(600))));
    let device = RawDevice::new(store, false, 512).unwrap();
    let mut queue = Blocking::open(&device, EngineKind::Auto).unwrap();
    let begun = std::time::Instant::now();
    let mut buf = [7; 4096];
    let error = queue.read(4096, &mut buf).unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(5) && error.to_string().contains("within 2 s"), "{error}");
    drop(server);
    drop(TestServer::start());
}
