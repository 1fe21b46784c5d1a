use super::*;
use crate::{CacheMode, FileStore, LockMode, MemoryStore, OpenOptions, Store, testing::ForwardingStore};
use proptest::prelude::*;
use std::{fs, path::Path, thread, time::Duration};

pub(super) const KINDS: [EngineKind; 2] = [EngineKind::Uring, EngineKind::Sync];

pub(super) fn file(path: &Path, bytes: &[u8], cache: CacheMode) -> Arc<dyn Store> {
    fs::write(path, bytes).expect("a file");
    Arc::new(
        FileStore::open(path, &OpenOptions { writable: true, create_new: false, cache, lock: LockMode::Exclusive })
            .expect("a store"),
    )
}

/// An engine, or `None` if the machine has no io_uring.
pub(super) fn engine(kind: EngineKind, depth: usize, slab: Option<&Slab>) -> Option<Engine> {
    match Engine::new(kind, depth, slab) {
        Ok(engine) => {
            assert_eq!(engine.kind(), kind);
            Some(engine)
        }
        Err(error) => {
            eprintln!("skipped: no io_uring: {error}");
            assert!(lacks_ring(&error));
            None
        }
    }
}

/// An engine of each kind, and one on a shared ring.
pub(super) fn engines(depth: usize) -> impl Iterator<Item = Engine> {
    let own = KINDS.into_iter().filter_map(move |kind| engine(kind, depth, None));
    own.chain(SharedRing::new(depth, None).ok().map(|ring| Engine::on(&ring)))
}

/// A request of one sync.
fn sync_one(engine: &mut Engine, tag: u64, target: TargetId) {
    let slot = engine.begin(tag, 0, None);
    engine.sync(&slot, target);
    engine.end(slot);
}

fn filled(len_bytes: usize, byte: u8) -> IoBuf {
    let mut buf = IoBuf::new(len_bytes);
    buf.fill(byte);
    buf
}

pub(super) fn pattern(len_bytes: usize) -> Vec<u8> {
    (0..len_bytes).map(|n| (n % 251) as u8 ^ (n >> 12) as u8).collect()
}

fn reap_all(engine: &mut Engine) -> Vec<EngineCompletion> {
    let mut done = Vec::new();
    let all = engine.in_flight();
    engine.reap(all, &mut done).expect("the ring works");
    assert_eq!((done.len(), engine.in_flight()), (all, 0));
    done
}

pub(super) fn only(engine: &mut Engine) -> EngineCompletion {
    let mut done = reap_all(engine);
    assert_eq!(done.len(), 1);
    done.remove(0)
}

#[test]
fn auto_always_gives_an_engine() {
    let engine = Engine::new(EngineKind::Auto, 8, None).unwrap();
    assert_ne!(engine.kind(), EngineKind::Auto);
}

#[test]
fn a_batch_costs_one_system_call_and_starts_at_reap() {
    let directory = tempfile::tempdir().unwrap();
    let store = file(&directory.path().join("store"), &pattern(1 << 20), CacheMode::PageCache);
    let Some(mut engine) = engine(EngineKind::Uring, 32, None) else { return };
    let target = engine.add_target(&store).unwrap();
    for tag in 0..32 {
        engine.read_one(tag, tag + 100, target, tag * 4096, IoBuf::new(4096), 0..4096);
    }
    assert_eq!((engine.in_flight(), engine.stats().enters), (32, 0));
    let mut done = reap_all(&mut engine);
    assert_eq!(engine.stats(), EngineStats { enters: 1, parts: 32, ..EngineStats::default() });
    done.sort_by_key(|ended| ended.tag);
    let expected = pattern(1 << 20);
    for (n, ended) in done.iter().enumerate() {
        assert_eq!((ended.tag, ended.cookie), (n as u64, n as u64 + 100));
        ended.result.as_ref().unwrap();
        assert_eq!(ended.buf.as_ref().unwrap()[..], expected[n * 4096..][..4096]);
    }
    let mut none = Vec::new();
    engine.reap(5, &mut none).unwrap();
    assert!(none.is_empty());
    assert_eq!(engine.stats().enters, 1, "nothing is in flight, so no system call is needed");
}

#[test]
fn parts_of_one_request_are_joined() {
    let directory = tempfile::tempdir().unwrap();
    for mut engine in engines(4) {
        let one = file(&directory.path().join("one"), &[1; 65536], CacheMode::PageCache);
        let two: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("two", vec![2; 65536]));
        let (one, two) = (engine.add_target(&one).unwrap(), engine.add_target(&two).unwrap());
        let slot = engine.begin(7, 8, Some(filled(16384, 0xFF)));
        engine.read(&slot, one, 5000, 0..4096);
        engine.fill_zeros(&slot, 4096..5000);
        engine.read(&slot, two, 100, 5000..12288);
        engine.read(&slot, one, 0, 12288..16000);
        engine.read(&slot, one, 0, 16000..16000);
        let mut done = Vec::new();
        // The request is not ended yet, so `reap` must not wait for it.
        engine.reap(1, &mut done).unwrap();
        assert!(done.is_empty());
        engine.end(slot);
        let ended = only(&mut engine);
        ended.result.unwrap();
        let buf = ended.buf.unwrap();
        for (n, &byte) in buf.iter().enumerate() {
            let expected = match n {
                0..4096 | 12288..16000 => 1,
                4096..5000 => 0,
                5000..12288 => 2,
                _ => 0xFF,
            };
            assert_eq!(byte, expected, "byte {n}");
        }
    }
}

#[test]
fn the_end_of_a_file_is_an_error_or_zeros() {
    let directory = tempfile::tempdir().unwrap();
    for cache in [CacheMode::PageCache, CacheMode::Direct] {
        for mut engine in engines(4) {
            let path = directory.path().join("short");
            let store = file(&path, &[6; 10_000], cache);
            let plain = engine.add_target(&store).unwrap();
            let padded = engine.add_target_padded(&store).unwrap();
            for (offset_bytes, held_bytes) in [(8192u64, 1808usize), (4096, 4096), (12288, 0), (1 << 30, 0)] {
                engine.read_one(0, 0, plain, offset_bytes, IoBuf::new(4096), 0..4096);
                let ended = only(&mut engine);
                if held_bytes == 4096 {
                    ended.result.unwrap();
                } else {
                    assert_eq!(
                        ended.result.unwrap_err().kind(),
                        io::ErrorKind::UnexpectedEof,
                        "{cache:?} at {offset_bytes}"
                    );
                }
                engine.read_one(0, 0, padded, offset_bytes, filled(4096, 0xFF), 0..4096);
                let ended = only(&mut engine);
                ended.result.unwrap();
                let expected: Vec<u8> = (0..4096).map(|n| if n < held_bytes { 6 } else { 0 }).collect();
                assert_eq!(ended.buf.unwrap()[..], expected[..], "{cache:?} at {offset_bytes}");
            }
            // An unaligned read, which O_DIRECT would refuse.
            engine.read_one(0, 0, padded, 9_990, filled(4096, 0xFF), 0..100);
            let buf = only(&mut engine).buf.unwrap();
            assert_eq!((&buf[..10], &buf[10..100]), (&[6; 10][..], &[0; 90][..]));
        }
    }
}

#[test]
fn errors_are_reported_and_leave_the_engine_usable() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("read-only");
    fs::write(&path, [3; 8192]).unwrap();
    for mut engine in engines(4) {
        let store: Arc<dyn Store> = Arc::new(FileStore::open(&path, &OpenOptions::default()).unwrap());
        let target = engine.add_target(&store).unwrap();
        engine.write_one(1, 0, target, 0, IoBuf::new(4096), 0..4096, false);
        assert_eq!(only(&mut engine).result.unwrap_err().raw_os_error(), Some(nix::libc::EBADF));
        engine.read_one(2, 0, target, 0, IoBuf::new(4096), 0..5000);
        let ended = only(&mut engine);
        assert_eq!(ended.result.unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert!(ended.buf.is_some());
        let slot = engine.begin(3, 0, Some(IoBuf::new(4096)));
        engine.read(&slot, target, 0, 0..4096);
        engine.fail(&slot, io::Error::other("first"));
        engine.fail(&slot, io::Error::other("second"));
        engine.fill_zeros(&slot, 4000..5000);
        engine.end(slot);
        assert_eq!(only(&mut engine).result.unwrap_err().to_string(), "first");
        let slot = engine.begin(4, 0, None);
        engine.write_zeroes(&slot, target, FileRange { offset_bytes: 0, len_bytes: 1 << 20 }, Zeroing::Deallocate);
        engine.end(slot);
        assert!(only(&mut engine).result.is_err());
        engine.read_one(5, 0, target, 4096, IoBuf::new(4096), 0..4096);
        let ended = only(&mut engine);
        ended.result.unwrap();
        assert_eq!(ended.buf.unwrap()[..], [3; 4096]);
    }
}

/// A file that reports every sync as failed, and counts the syncs.
#[derive(Debug)]
struct FailsSyncs(FileStore, std::sync::atomic::AtomicUsize);

impl ForwardingStore for FailsSyncs {
    fn inner(&self) -> &dyn Store {
        &self.0
    }
    fn sync_data(&self) -> io::Result<()> {
        ForwardingStore::settle_sync(self, self.0.sync_data())
    }

    fn settle_sync(&self, result: io::Result<()>) -> io::Result<()> {
        self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        result.and(Err(io::Error::other("lost")))
    }

    fn data_file(&self) -> Option<crate::DataFile<'_>> {
        self.0.data_file()
    }
}

#[test]
fn the_store_decides_the_result_of_a_sync() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    for mut engine in engines(4) {
        fs::write(&path, [0; 8192]).unwrap();
        let options = OpenOptions { writable: true, ..OpenOptions::default() };
        let store = Arc::new(FailsSyncs(FileStore::open(&path, &options).unwrap(), Default::default()));
        let target = engine.add_target(&(Arc::clone(&store) as Arc<dyn Store>)).unwrap();
        engine.write_one(1, 0, target, 0, IoBuf::new(4096), 0..4096, false);
        only(&mut engine).result.unwrap();
        sync_one(&mut engine, 2, target);
        assert_eq!(only(&mut engine).result.unwrap_err().to_string(), "lost");
        assert_eq!(store.1.load(std::sync::atomic::Ordering::Relaxed), 1);
    }
}

#[test]
#[should_panic(expected = "a part was added to a request that has all its parts")]
fn a_slot_of_another_engine_is_noticed() {
    let directory = tempfile::tempdir().unwrap();
    let store = file(&directory.path().join("store"), &[0; 8192], CacheMode::PageCache);
    let mut ours = Engine::new(EngineKind::Sync, 1, None).unwrap();
    let mut theirs = Engine::new(EngineKind::Sync, 1, None).unwrap();
    let target = ours.add_target(&store).unwrap();
    sync_one(&mut ours, 0, target);
    let foreign = theirs.begin(0, 0, None);
    ours.sync(&foreign, target);
}

#[test]
fn more_parts_than_the_queue_holds_all_arrive() {
    let directory = tempfile::tempdir().unwrap();
    let expected = pattern(1 << 20);
    for mut engine in engines(1) {
        let store = file(&directory.path().join("store"), &expected, CacheMode::PageCache);
        let target = engine.add_target(&store).unwrap();
        let slot = engine.begin(0, 0, Some(IoBuf::new(1 << 20)));
        for start in (0..1 << 20).step_by(512) {
            engine.read(&slot, target, start as u64, start..start + 512);
        }
        engine.end(slot);
        let ended = only(&mut engine);
        ended.result.unwrap();
        assert!(ended.buf.unwrap()[..] == expected[..]);
    }
}

#[test]
fn shared_bytes_are_written_and_released() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    for mut engine in engines(4) {
        let store = file(&path, &[0; 16384], CacheMode::PageCache);
        let target = engine.add_target(&store).unwrap();
        let bitmap = Arc::new(filled(512, 0xA5));
        let slot = engine.begin(0, 0, Some(filled(4096, 1)));
        engine.write(&slot, target, 4096, 0..4096, true);
        engine.write_shared(&slot, target, 512, &bitmap);
        engine.write_shared(&slot, target, 12288, &bitmap);
        engine.sync(&slot, target);
        engine.end(slot);
        only(&mut engine).result.unwrap();
        assert_eq!(Arc::strong_count(&bitmap), 1);
        let now = fs::read(&path).unwrap();
        assert_eq!(
            (&now[512..1024], &now[12288..12800], &now[4096..8192]),
            (&[0xA5; 512][..], &[0xA5; 512][..], &[1; 4096][..])
        );
        assert_eq!((&now[..512], &now[1024..4096], &now[8192..12288]), (&[0; 512][..], &[0; 3072][..], &[0; 4096][..]));
    }
}

#[test]
fn another_thread_ends_a_request_and_wakes_the_engine() {
    for mut engine in engines(4) {
        for round in 0..20 {
            let tickets: Vec<_> = (0..3).map(|tag| engine.external(tag, 9, Some(IoBuf::new(512)))).collect();
            let helper = thread::spawn(move || {
                for (n, ticket) in tickets.into_iter().enumerate() {
                    if round % 2 == 0 {
                        thread::sleep(Duration::from_millis(1));
                    }
                    ticket.complete(if n == 1 { Err(io::Error::other("no luck")) } else { Ok(()) });
                }
            });
            let mut done = Vec::new();
            while done.len() < 3 {
                engine.reap(1, &mut done).unwrap();
            }
            assert_eq!(done.iter().filter(|ended| ended.result.is_err()).count(), 1);
            assert!(done.iter().all(|ended| ended.cookie == 9 && ended.buf.is_some()));
            helper.join().unwrap();
        }
    }
}

#[test]
fn external_and_own_requests_end_together() {
    let directory = tempfile::tempdir().unwrap();
    for mut engine in engines(4) {
        let store = file(&directory.path().join("store"), &[1; 8192], CacheMode::Direct);
        let target = engine.add_target(&store).unwrap();
        for _ in 0..50 {
            let ticket = engine.external(1, 0, None);
            engine.read_one(2, 0, target, 4096, IoBuf::new(4096), 0..4096);
            let helper = thread::spawn(move || ticket.complete(Ok(())));
            let mut tags: Vec<u64> = reap_all(&mut engine).iter().map(|ended| ended.tag).collect();
            tags.sort();
            assert_eq!(tags, [1, 2]);
            helper.join().unwrap();
        }
    }
}

#[test]
fn a_dropped_ticket_fails_its_request() {
    for mut engine in engines(4) {
        let ticket = engine.external(1, 0, None);
        thread::spawn(move || drop(ticket)).join().unwrap();
        let error = only(&mut engine).result.unwrap_err();
        assert!(error.to_string().contains("without a result"), "{error}");
    }
}

#[test]
fn dropping_the_engine_waits_for_everything() {
    let directory = tempfile::tempdir().unwrap();
    for (round, cache) in [CacheMode::PageCache, CacheMode::Direct].into_iter().enumerate() {
        for mut engine in engines(64) {
            let path = directory.path().join(format!("store-{round}"));
            let store = file(&path, &vec![0; 1 << 20], cache);
            let target = engine.add_target(&store).unwrap();
            for n in 0..64 {
                engine.write_one(n, 0, target, n * 16384, filled(16384, n as u8 + 1), 0..16384, false);
            }
            let slot = engine.begin(99, 0, Some(IoBuf::new(4096)));
            engine.read(&slot, target, 0, 0..4096);
            let mut done = Vec::new();
            engine.reap(0, &mut done).unwrap();
            let ticket = engine.external(100, 0, None);
            let helper = thread::spawn(move || {
                thread::sleep(Duration::from_millis(2));
                ticket.complete(Ok(()));
            });
            drop(engine);
            assert!(helper.is_finished() || helper.join().is_ok());
            drop(store);
            let now = fs::read(&path).unwrap();
            assert!(now.chunks(16384).enumerate().all(|(n, chunk)| chunk.iter().all(|&byte| byte == n as u8 + 1)));
        }
    }
}

#[test]
fn a_dropped_engine_releases_files_and_locks_immediately() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    for _ in 0..30 {
        for mut engine in engines(8) {
            let store = file(&path, &[0; 65536], CacheMode::PageCache);
            let target = engine.add_target(&store).unwrap();
            engine.read_one(0, 0, target, 0, IoBuf::new(4096), 0..4096);
            engine.write_one(0, 0, target, 8192, IoBuf::new(4096), 0..4096, true);
            drop(store);
            drop(engine);
        }
    }
}

#[test]
fn a_chain_of_1100_files_fits() {
    crate::raise_open_file_limit().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let paths: Vec<_> = (0..1100u32).map(|n| directory.path().join(n.to_string())).collect();
    for (n, path) in paths.iter().enumerate() {
        fs::write(path, (n as u32).to_le_bytes().repeat(128)).unwrap();
    }
    for mut engine in engines(32) {
        let mut targets = Vec::new();
        for path in &paths {
            let store: Arc<dyn Store> = Arc::new(FileStore::open(path, &OpenOptions::default()).unwrap());
            targets.push(engine.add_target(&store).unwrap());
        }
        let slot = engine.begin(0, 0, Some(IoBuf::new(1100 * 4)));
        for (n, &target) in targets.iter().enumerate() {
            engine.read(&slot, target, 0, n * 4..n * 4 + 4);
        }
        engine.end(slot);
        let ended = only(&mut engine);
        ended.result.unwrap();
        let buf = ended.buf.unwrap();
        assert!(buf.chunks(4).enumerate().all(|(n, four)| four == (n as u32).to_le_bytes()));
    }
}

#[test]
fn engines_share_a_ring_and_a_turn_is_one_system_call() {
    let directory = tempfile::tempdir().unwrap();
    let Ok(ring) = SharedRing::new(64, None) else {
        eprintln!("skipped: no io_uring");
        return;
    };
    let mut engines: Vec<Engine> = (0..3).map(|_| Engine::on(&ring)).collect();
    let mut targets = Vec::new();
    for (n, engine) in engines.iter_mut().enumerate() {
        let store = file(&directory.path().join(n.to_string()), &[n as u8 + 1; 65536], CacheMode::PageCache);
        targets.push(engine.add_target(&store).unwrap());
        for tag in 0..8 {
            engine.read_one(tag, 0, targets[n], tag * 4096, IoBuf::new(8192), 4096..8192);
        }
        let mut none = Vec::new();
        engine.reap(0, &mut none).unwrap();
        assert!(none.is_empty(), "nothing is submitted before the ring's wait");
    }
    assert_eq!(ring.enters(), 0);
    let mut done: Vec<Vec<EngineCompletion>> = vec![Vec::new(), Vec::new(), Vec::new()];
    while done.iter().any(|done| done.len() < 8) {
        ring.wait().unwrap();
        for (engine, done) in engines.iter_mut().zip(&mut done) {
            engine.reap(0, done).unwrap();
        }
    }
    assert!(ring.enters() <= 3, "{} enters for 24 reads from the page cache", ring.enters());
    for (n, done) in done.iter().enumerate() {
        for ended in done {
            ended.result.as_ref().unwrap();
            let buf = ended.buf.as_ref().unwrap();
            assert!(buf[4096..].iter().all(|&byte| byte == n as u8 + 1) && buf[..4096].iter().all(|&byte| byte == 0));
        }
    }
    // An engine that waits for its own request does not lose the answers of the others.
    for (engine, &target) in engines.iter_mut().zip(&targets) {
        engine.read_one(9, 0, target, 0, IoBuf::new(4096), 0..4096);
    }
    for engine in engines.iter_mut().rev() {
        assert_eq!(only(engine).tag, 9);
    }
    // Numbers of members are reused.
    for _ in 0..10 {
        let mut engine = Engine::on(&ring);
        let store = file(&directory.path().join("passing"), &[7; 8192], CacheMode::PageCache);
        let target = engine.add_target(&store).unwrap();
        engine.read_one(1, 0, target, 0, IoBuf::new(4096), 0..4096);
        let ticket = engine.external(2, 0, None);
        let mut done = Vec::new();
        engine.reap(0, &mut done).unwrap();
        thread::spawn(move || ticket.complete(Ok(()))).join().unwrap();
        drop(engine);
    }
}

#[test]
fn a_ticket_wakes_a_thread_that_waits_on_the_ring() {
    let Ok(ring) = SharedRing::new(8, None) else {
        eprintln!("skipped: no io_uring");
        return;
    };
    let mut engine = Engine::on(&ring);
    for round in 0..20 {
        let ticket = engine.external(1, 0, None);
        let mut done = Vec::new();
        engine.reap(0, &mut done).unwrap();
        let helper = thread::spawn(move || {
            if round % 2 == 0 {
                thread::sleep(Duration::from_millis(1));
            }
            ticket.complete(Ok(()));
        });
        while done.is_empty() {
            ring.wait().unwrap();
            engine.reap(0, &mut done).unwrap();
        }
        helper.join().unwrap();
    }
}

const REGIONS: usize = 12;
const REGION_BYTES: usize = 160 << 10;

/// One part: its action and its range in its region. Regions keep the parts in flight from
/// overlapping.
#[derive(Debug, Clone)]
struct Step {
    what: u8,
    start: usize,
    len_bytes: usize,
    byte: u8,
}

fn step() -> impl Strategy<Value = Step> {
    let unit = prop_oneof![3 => Just(4096usize), 2 => Just(512usize), 1 => Just(1usize)];
    (0..8u8, 0..1000usize, 0..1000usize, unit, any::<u8>()).prop_map(|(what, start, len, unit, byte)| {
        let start = (start * REGION_BYTES / 1000) / unit * unit;
        let len_bytes = ((REGION_BYTES - start) * len / 1000) / unit * unit;
        Step { what, start, len_bytes: len_bytes.max(unit.min(REGION_BYTES - start)), byte }
    })
}

/// Runs batches with one request for each region in flight, and compares file and reads with a
/// model in memory.
fn check_against_model(make: impl FnOnce(&Slab) -> Option<Engine>, cache: CacheMode, batches: &[Vec<Step>]) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let mut model = pattern(REGIONS * REGION_BYTES);
    let store = file(&path, &model, cache);
    let slab = Slab::new(REGIONS, REGION_BYTES);
    let Some(mut engine) = make(&slab) else { return };
    let target = engine.add_target(&store).unwrap();
    let mut bufs = slab.take_all();
    for batch in batches {
        let mut reads = vec![None; batch.len()];
        for (region, step) in batch.iter().enumerate() {
            let start = region * REGION_BYTES + step.start;
            let (range, held) = (
                start..start + step.len_bytes,
                FileRange { offset_bytes: start as u64, len_bytes: step.len_bytes as u64 },
            );
            let mut buf = bufs.pop().unwrap();
            let tag = region as u64;
            match step.what {
                0..3 => {
                    reads[region] = Some(range);
                    engine.read_one(tag, 0, target, start as u64, buf, 0..step.len_bytes);
                }
                3..6 => {
                    buf.fill(step.byte);
                    model[range].fill(step.byte);
                    // As two parts of one request.
                    let middle = step.len_bytes / 2;
                    let slot = engine.begin(tag, 0, Some(buf));
                    engine.write(&slot, target, start as u64, 0..middle, step.what == 5);
                    engine.write(&slot, target, (start + middle) as u64, middle..step.len_bytes, false);
                    engine.end(slot);
                }
                _ => {
                    model[range].fill(0);
                    let slot = engine.begin(tag, 0, Some(buf));
                    engine.write_zeroes(
                        &slot,
                        target,
                        held,
                        if step.what == 6 { Zeroing::Keep } else { Zeroing::Deallocate },
                    );
                    engine.end(slot);
                }
            }
        }
        sync_one(&mut engine, u64::MAX, target);
        for ended in reap_all(&mut engine) {
            ended.result.unwrap_or_else(|error| panic!("{error} in {batch:?}"));
            let Some(buf) = ended.buf else { continue };
            if let Some(range) = reads[ended.tag as usize].take() {
                assert!(buf[..range.len()] == model[range], "{:?}", batch[ended.tag as usize]);
            }
            bufs.push(buf);
        }
    }
    drop(engine);
    drop(store);
    assert!(fs::read(&path).unwrap() == model, "the file differs after {batches:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn reads_and_file_match_a_model(batches in prop::collection::vec(prop::collection::vec(step(), 1..=REGIONS), 1..5)) {
        for cache in [CacheMode::PageCache, CacheMode::Direct] {
            check_against_model(|slab| engine(EngineKind::Uring, REGIONS, Some(slab)), cache, &batches);
            check_against_model(|_| engine(EngineKind::Uring, REGIONS, None), cache, &batches);
            check_against_model(|_| engine(EngineKind::Sync, REGIONS, None), cache, &batches);
            check_against_model(|slab| Some(Engine::on(&SharedRing::new(REGIONS, Some(slab)).ok()?)), cache, &batches);
        }
    }
}
