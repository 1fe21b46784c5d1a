//! Stores that answer late, out of order, never, or after the engine was dropped; the pool; a
//! failing ring.

use super::*;
use crate::{
    Access, DataFile, FileStore, Front, LaneOp, Loan, MemoryStore, OverlayStore, Store, lane::Lane,
    overlay::PAGE_BYTES, testing::ForwardingStore,
};
use rustix::event::EventfdFlags;
use std::{
    collections::BTreeMap,
    fs,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Condvar, Mutex},
    thread,
    time::{Duration, Instant},
};

/// A store in memory behind a lane that answers only when the test tells it to.
#[derive(Debug)]
pub(super) struct Remote {
    memory: MemoryStore,
    waiting: Mutex<Vec<(LaneOp, Loan)>>,
    /// Number of loans that the next calls of `drive` may complete.
    released: Mutex<usize>,
    bell: OwnedFd,
    alignment_bytes: u32,
}

impl Remote {
    pub(super) fn new(bytes: Vec<u8>) -> Arc<Self> {
        Arc::new(Self {
            memory: MemoryStore::with_bytes("remote", bytes),
            waiting: Mutex::default(),
            released: Mutex::default(),
            bell: rustix::event::eventfd(0, EventfdFlags::NONBLOCK).unwrap(),
            alignment_bytes: 512,
        })
    }

    /// Lets the lane complete `count` more loans, the latest first, when an engine drives it.
    pub(super) fn release(&self, count: usize) {
        *self.released.lock().unwrap() += count;
        rustix::io::write(&self.bell, &1u64.to_ne_bytes()).unwrap();
    }

    fn held(&self) -> usize {
        self.waiting.lock().unwrap().len()
    }

    fn answer(&self, op: LaneOp, mut loan: Loan) {
        let result = match op {
            LaneOp::Read { offset_bytes } => self.memory.read_at(loan.bytes_mut(), offset_bytes),
            LaneOp::Write { offset_bytes, .. } => self.memory.write_at(loan.bytes(), offset_bytes),
            LaneOp::Zero { offset_bytes, len_bytes, how } => {
                self.memory.zero_range(FileRange { offset_bytes, len_bytes }, how)
            }
            LaneOp::Sync => self.memory.sync_data(),
        };
        loan.complete(result);
    }
}

impl Lane for Remote {
    fn start(&self, op: LaneOp, loan: Loan) {
        self.waiting.lock().unwrap().push((op, loan));
    }

    fn drive(&self) {
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
        let mut released = self.released.lock().unwrap();
        while *released > 0 {
            let Some((op, loan)) = self.waiting.lock().unwrap().pop() else { return };
            *released -= 1;
            self.answer(op, loan);
        }
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    fn alignment_bytes(&self) -> u32 {
        self.alignment_bytes
    }
}

/// The store in front of a lane.
#[derive(Debug)]
pub(super) struct RemoteStore(pub(super) Arc<Remote>);

impl ForwardingStore for RemoteStore {
    fn inner(&self) -> &dyn Store {
        &self.0.memory
    }
    fn lane(&self) -> Option<Arc<dyn Lane>> {
        Some(Arc::clone(&self.0) as Arc<dyn Lane>)
    }
}

fn a_mib(name: &str) -> MemoryStore {
    MemoryStore::with_bytes(name, vec![0; 1 << 20])
}

/// A store without a file or a lane, whose reads block until the test lets them through.
#[derive(Debug)]
struct Slow {
    inner: MemoryStore,
    open: Mutex<bool>,
    changed: Condvar,
    readers: Mutex<Vec<thread::ThreadId>>,
}

impl Default for Slow {
    fn default() -> Self {
        Self { inner: a_mib("slow"), open: Mutex::default(), changed: Condvar::new(), readers: Mutex::default() }
    }
}

impl Slow {
    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.changed.notify_all();
    }
}

impl ForwardingStore for Slow {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }
    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        self.readers.lock().unwrap().push(thread::current().id());
        drop(self.changed.wait_while(self.open.lock().unwrap(), |open| !*open).unwrap());
        if offset_bytes == 4096 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        buf.fill(7);
        Ok(())
    }
}

fn pattern(len_bytes: usize) -> Vec<u8> {
    (0..len_bytes).map(|n| (n % 251) as u8 ^ (n >> 12) as u8).collect()
}

/// An engine with a ring of its own, and one on a shared ring.
fn ring_engines() -> Vec<Engine> {
    let own = Engine::new(EngineKind::Uring, 8, None).ok();
    let shared = SharedRing::new(8, None).ok().map(|ring| Engine::on(&ring));
    own.into_iter().chain(shared).collect()
}

fn only(engine: &mut Engine) -> EngineCompletion {
    let mut done = Vec::new();
    engine.reap(engine.in_flight(), &mut done).unwrap();
    assert_eq!(done.len(), 1);
    done.remove(0)
}

#[test]
fn a_lane_answers_late_and_out_of_order() {
    for mut engine in ring_engines() {
        let remote = Remote::new(pattern(64 << 10));
        let target = engine.add_target(&(Arc::new(RemoteStore(Arc::clone(&remote))) as Arc<dyn Store>)).unwrap();
        for tag in 0..4 {
            engine.read_one(tag, 0, target, tag * 4096, IoBuf::new(4096), 0..4096);
        }
        let mut done = Vec::new();
        engine.reap(0, &mut done).unwrap();
        assert!(done.is_empty() && remote.held() == 4, "reap(0) must not wait");
        let late = Arc::clone(&remote);
        let answers = thread::spawn(move || {
            for _ in 0..4 {
                thread::sleep(Duration::from_millis(5));
                late.release(1);
            }
        });
        while done.len() < 4 {
            engine.reap(1, &mut done).unwrap();
        }
        answers.join().unwrap();
        assert_eq!(done.iter().map(|ended| ended.tag).collect::<Vec<_>>(), [3, 2, 1, 0]);
        for ended in done {
            ended.result.unwrap();
            assert_eq!(ended.buf.unwrap()[..], pattern(64 << 10)[ended.tag as usize * 4096..][..4096]);
        }
        assert_eq!((engine.stats().lane_parts, engine.stats().pool_parts, engine.stats().inline_parts), (4, 0, 0));
    }
}

/// A thread with several queues polls each without waiting. No other engine drives the lane.
#[test]
fn an_engine_that_only_polls_drives_its_lane() {
    let Ok(mut engine) = Engine::new(EngineKind::Uring, 8, None) else { return };
    let remote = Remote::new(pattern(64 << 10));
    let target = engine.add_target(&(Arc::new(RemoteStore(Arc::clone(&remote))) as Arc<dyn Store>)).unwrap();
    let started = Instant::now();
    for tag in 0..3 {
        engine.read_one(tag, 0, target, tag * 4096, IoBuf::new(4096), 0..4096);
        let mut done = Vec::new();
        engine.reap(0, &mut done).unwrap();
        assert!(done.is_empty());
        remote.release(1);
        while done.is_empty() {
            assert!(started.elapsed() < Duration::from_secs(20), "the lane was not driven again");
            engine.reap(0, &mut done).unwrap();
        }
        assert_eq!(done[0].buf.as_ref().unwrap()[..], pattern(64 << 10)[tag as usize * 4096..][..4096]);
    }
}

#[test]
fn a_lane_writes_zeroes_and_syncs_and_unaligned_parts_go_to_the_pool() {
    for mut engine in ring_engines() {
        let remote = Remote::new(vec![9; 16 << 10]);
        remote.release(100);
        let target = engine.add_target_padded(&(Arc::new(RemoteStore(Arc::clone(&remote))) as Arc<dyn Store>)).unwrap();
        let mut buf = IoBuf::new(4096);
        buf.fill(1);
        let slot = engine.begin(0, 0, Some(buf));
        engine.write(&slot, target, 512, 0..2048, true);
        engine.write(&slot, target, 2561, 2048..2049, false);
        engine.write_zeroes(&slot, target, FileRange { offset_bytes: 4096, len_bytes: 4096 }, Zeroing::Deallocate);
        engine.sync(&slot, target);
        engine.end(slot);
        only(&mut engine).result.unwrap();
        let now = remote.memory.to_vec();
        assert!(now[512..2560].iter().all(|&byte| byte == 1) && (now[2560], now[2561], now[2562]) == (9, 1, 9));
        assert!(now[4096..8192].iter().all(|&byte| byte == 0) && now[8192] == 9);
        assert_eq!((engine.stats().lane_parts, engine.stats().pool_parts), (3, 1));
        // Beyond the end of a padded store: the lane does not serve that.
        engine.read_one(1, 0, target, 12 << 10, IoBuf::new(8192), 0..8192);
        let buf = only(&mut engine).buf.unwrap();
        assert!(buf[..4096].iter().all(|&byte| byte == 9) && buf[4096..].iter().all(|&byte| byte == 0));
    }
}

#[test]
fn several_engines_drive_one_lane() {
    let remote = Remote::new(pattern(64 << 10));
    let store: Arc<dyn Store> = Arc::new(RemoteStore(Arc::clone(&remote)));
    let (mut one, mut two) = match (Engine::new(EngineKind::Uring, 8, None), Engine::new(EngineKind::Uring, 8, None)) {
        (Ok(one), Ok(two)) => (one, two),
        _ => return,
    };
    let targets = [one.add_target(&store).unwrap(), two.add_target(&store).unwrap()];
    one.read_one(1, 0, targets[0], 0, IoBuf::new(512), 0..512);
    two.read_one(2, 0, targets[1], 512, IoBuf::new(512), 0..512);
    one.reap(0, &mut Vec::new()).unwrap();
    two.reap(0, &mut Vec::new()).unwrap();
    let sleeper = thread::scope(|scope| {
        // The driver completes both loans while the first engine sleeps; its thread must be woken.
        let driver = scope.spawn(|| {
            thread::sleep(Duration::from_millis(20));
            *remote.released.lock().unwrap() = 2;
            remote.drive();
        });
        let ended = only(&mut one);
        driver.join().unwrap();
        ended
    });
    sleeper.result.unwrap();
    only(&mut two).result.unwrap();
}

#[test]
fn closing_an_engine_gives_up_a_lane_that_never_answers() {
    for mut engine in ring_engines() {
        engine.set_patience(Duration::from_millis(50));
        let remote = Remote::new(vec![5; 4096]);
        let target = engine.add_target(&(Arc::new(RemoteStore(Arc::clone(&remote))) as Arc<dyn Store>)).unwrap();
        engine.read_one(1, 7, target, 0, IoBuf::new(4096), 0..4096);
        let slot = engine.begin(2, 0, Some(IoBuf::new(512)));
        engine.write(&slot, target, 0, 0..512, false);
        let started = Instant::now();
        let mut done = Vec::new();
        engine.finish(&mut done).unwrap();
        assert!(started.elapsed() < Duration::from_secs(10) && engine.has_failed());
        let ended = done.pop().unwrap();
        assert!(ended.lost && ended.tag == 1 && ended.cookie == 7 && done.is_empty());
        assert_eq!(ended.result.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let mut buf = ended.buf.unwrap();
        assert_eq!(buf.len(), 4096);
        // A request that was not ended yet is lost too. It completes when it is ended.
        engine.end(slot);
        let ended = only(&mut engine);
        assert!(ended.lost && ended.result.is_err());
        // New requests are refused.
        engine.read_one(3, 0, target, 0, IoBuf::new(512), 0..512);
        let refused = only(&mut engine);
        assert!(!refused.lost && refused.result.unwrap_err().to_string().contains("open it again"));
        // The lane answers now: into leaked memory, and no request completes a second time.
        buf.fill(0xEE);
        remote.release(2);
        remote.drive();
        assert_eq!(remote.held(), 0);
        assert!(buf.iter().all(|&byte| byte == 0xEE));
        let mut none = Vec::new();
        engine.reap(1, &mut none).unwrap();
        assert!(none.is_empty() && engine.in_flight() == 0);
    }
}

#[test]
fn a_lane_answers_after_the_engine_is_gone() {
    for mut engine in ring_engines() {
        engine.set_patience(Duration::from_millis(20));
        let remote = Remote::new(vec![5; 4096]);
        let target = engine.add_target(&(Arc::new(RemoteStore(Arc::clone(&remote))) as Arc<dyn Store>)).unwrap();
        engine.read_one(1, 0, target, 0, IoBuf::new(4096), 0..4096);
        drop(engine);
        assert_eq!(remote.held(), 1);
        remote.release(1);
        remote.drive();
    }
}

#[test]
fn an_engine_that_is_dropped_waits_for_a_lane_that_answers() {
    for mut engine in ring_engines() {
        let remote = Remote::new(vec![5; 4096]);
        let target = engine.add_target(&(Arc::new(RemoteStore(Arc::clone(&remote))) as Arc<dyn Store>)).unwrap();
        let mut buf = IoBuf::new(512);
        buf.fill(6);
        engine.write_one(1, 0, target, 0, buf, 0..512, false);
        let late = Arc::clone(&remote);
        let answer = thread::spawn(move || {
            thread::sleep(Duration::from_millis(30));
            late.release(1);
        });
        drop(engine);
        assert_eq!((remote.held(), remote.memory.to_vec()[0]), (0, 6));
        answer.join().unwrap();
    }
}

#[test]
fn a_lane_that_drops_a_loan_fails_the_request() {
    for mut engine in ring_engines() {
        let remote = Remote::new(vec![5; 4096]);
        let target = engine.add_target(&(Arc::new(RemoteStore(Arc::clone(&remote))) as Arc<dyn Store>)).unwrap();
        engine.read_one(1, 0, target, 0, IoBuf::new(4096), 0..4096);
        engine.reap(0, &mut Vec::new()).unwrap();
        remote.waiting.lock().unwrap().clear();
        let ended = only(&mut engine);
        assert!(!ended.lost && ended.result.unwrap_err().to_string().contains("without a result"));
    }
}

#[test]
fn conflicting_loans_of_one_request_are_refused() {
    for mut engine in ring_engines() {
        let remote = Remote::new(vec![5; 8192]);
        let target = engine.add_target(&(Arc::new(RemoteStore(Arc::clone(&remote))) as Arc<dyn Store>)).unwrap();
        let slot = engine.begin(1, 0, Some(IoBuf::new(4096)));
        engine.read(&slot, target, 0, 0..1024);
        engine.read(&slot, target, 4096, 512..1536);
        engine.end(slot);
        let slot = engine.begin(2, 0, Some(IoBuf::new(4096)));
        engine.read(&slot, target, 0, 0..1024);
        engine.fill_zeros(&slot, 1023..2048);
        engine.end(slot);
        // Two writes may share their bytes, as in a mirror.
        let slot = engine.begin(3, 0, Some(IoBuf::new(4096)));
        engine.write(&slot, target, 0, 0..1024, false);
        engine.write(&slot, target, 4096, 0..1024, false);
        engine.end(slot);
        assert_eq!(remote.held(), 4);
        remote.release(4);
        let mut done = Vec::new();
        engine.reap(3, &mut done).unwrap();
        done.sort_by_key(|ended| ended.tag);
        let kinds: Vec<_> = done.iter().map(|ended| ended.result.as_ref().err().map(io::Error::kind)).collect();
        assert_eq!(kinds, [Some(io::ErrorKind::InvalidInput), Some(io::ErrorKind::InvalidInput), None]);
    }
}

#[test]
fn a_store_that_blocks_does_not_hold_up_the_engine() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    fs::write(&path, pattern(8192)).unwrap();
    for mut engine in ring_engines() {
        let slow = Arc::new(Slow::default());
        let file: Arc<dyn Store> = Arc::new(FileStore::open(&path, &crate::OpenOptions::default()).unwrap());
        let target = engine.add_target(&(Arc::clone(&slow) as Arc<dyn Store>)).unwrap();
        let quick = engine.add_target(&file).unwrap();
        engine.read_one(1, 0, target, 0, IoBuf::new(512), 0..512);
        engine.read_one(2, 0, target, 4096, IoBuf::new(512), 0..512);
        engine.read_one(3, 0, quick, 0, IoBuf::new(512), 0..512);
        let mut done = Vec::new();
        engine.reap(1, &mut done).unwrap();
        assert_eq!((done.len(), done[0].tag, engine.in_flight()), (1, 3, 2));
        slow.open();
        while done.len() < 3 {
            engine.reap(1, &mut done).unwrap();
        }
        done.sort_by_key(|ended| ended.tag);
        assert_eq!(done[0].buf.as_ref().unwrap()[..512], [7; 512]);
        assert_eq!(done[1].result.as_ref().unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(!slow.readers.lock().unwrap().contains(&thread::current().id()));
        assert_eq!((engine.stats().pool_parts, engine.stats().inline_parts), (2, 0));
    }
    // Without a ring, the engine's own thread makes the blocking calls.
    let mut engine = Engine::new(EngineKind::Sync, 1, None).unwrap();
    let slow = Arc::new(Slow::default());
    slow.open();
    let target = engine.add_target(&(Arc::clone(&slow) as Arc<dyn Store>)).unwrap();
    engine.read_one(1, 0, target, 0, IoBuf::new(512), 0..512);
    only(&mut engine).result.unwrap();
    assert_eq!(slow.readers.lock().unwrap()[..], [thread::current().id()]);
}

#[test]
fn parts_in_memory_run_where_they_are_started() {
    for mut engine in ring_engines() {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("m", vec![1; 4096]));
        let target = engine.add_target(&store).unwrap();
        engine.read_one(1, 0, target, 0, IoBuf::new(512), 0..512);
        only(&mut engine).result.unwrap();
        assert_eq!((engine.stats().inline_parts, engine.stats().pool_parts, engine.stats().enters), (1, 0, 0));
    }
}

/// Overlays of a file through the page cache, of one with O_DIRECT, and of a lane: only replaced
/// pages and bytes beyond the file's end take the detour.
#[test]
fn an_overlay_reads_unreplaced_ranges_directly() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    fs::write(&path, pattern(1 << 20)).unwrap();
    for cache in [Some(crate::CacheMode::PageCache), Some(crate::CacheMode::Direct), None] {
        for mut engine in ring_engines() {
            let inner: Arc<dyn Store> = match cache {
                Some(cache) => {
                    let options = crate::OpenOptions { cache, writable: true, ..crate::OpenOptions::default() };
                    Arc::new(FileStore::open(&path, &options).unwrap())
                }
                None => {
                    let remote = Remote::new(pattern(1 << 20));
                    remote.release(1000);
                    Arc::new(RemoteStore(remote))
                }
            };
            let pages: BTreeMap<u64, Box<[u8]>> = [8192, 12288, 65536, (1 << 20) + 4096]
                .map(|offset| (offset, vec![0xAB; PAGE_BYTES as usize].into_boxed_slice()))
                .into();
            let overlay = Arc::new(OverlayStore::new(inner, pages, (1 << 20) + 65536).unwrap());
            let mut expected = vec![0; (1 << 20) + 65536];
            overlay.read_at(&mut expected, 0).unwrap();
            assert_eq!(
                (expected[8191], expected[8192], expected[65536], expected[1 << 20]),
                (pattern(8192)[8191], 0xAB, 0xAB, 0)
            );
            let target = engine.add_target(&(Arc::clone(&overlay) as Arc<dyn Store>)).unwrap();
            engine.read_one(0, 0, target, 0, IoBuf::new(expected.len()), 0..expected.len());
            let ended = only(&mut engine);
            ended.result.unwrap();
            assert!(ended.buf.unwrap()[..] == expected[..]);
            let stats = engine.stats();
            assert_eq!((stats.parts, stats.pool_parts, stats.inline_parts), (6, 3, 0), "{cache:?}");
            for (offset, len, detours) in
                [(0, 8192, 0), (16384, 49152, 0), (8192, 512, 1), (4096, 8192, 1), (1 << 20, 512, 1)]
            {
                let before = engine.stats().pool_parts;
                engine.read_one(0, 0, target, offset, IoBuf::new(len), 0..len);
                assert!(only(&mut engine).buf.unwrap()[..] == expected[offset as usize..][..len]);
                assert_eq!(engine.stats().pool_parts - before, detours, "{len} bytes at {offset}, {cache:?}");
            }
            // No write passes, although the file below is open for writing.
            engine.write_one(0, 0, target, 0, IoBuf::new(4096), 0..4096, false);
            assert_eq!(only(&mut engine).result.unwrap_err().kind(), io::ErrorKind::ReadOnlyFilesystem);
            let front = overlay.front(FileRange { offset_bytes: 0, len_bytes: 1 }, Access::Write);
            assert_eq!(front, Front { is_direct: false, len_bytes: 1 });
        }
    }
    assert!(fs::read(&path).unwrap() == pattern(1 << 20));
}

#[test]
fn a_ring_that_fails_ends_its_requests_as_lost() {
    let (reader, writer) = io::pipe().unwrap();
    /// A file whose reads never end.
    #[derive(Debug)]
    struct Pipe {
        inner: MemoryStore,
        reader: OwnedFd,
    }
    impl ForwardingStore for Pipe {
        fn inner(&self) -> &dyn Store {
            &self.inner
        }
        fn data_file(&self) -> Option<DataFile<'_>> {
            Some(DataFile { fd: self.reader.as_fd(), alignment_bytes: 1 })
        }
    }
    let store: Arc<dyn Store> = Arc::new(Pipe { inner: a_mib("pipe"), reader: reader.into() });
    for mut engine in ring_engines() {
        let target = engine.add_target(&store).unwrap();
        let slow = Arc::new(Slow::default());
        let behind = engine.add_target(&(Arc::clone(&slow) as Arc<dyn Store>)).unwrap();
        engine.read_one(1, 5, target, 0, IoBuf::new(4096), 0..4096);
        let mut done = Vec::new();
        engine.reap(0, &mut done).unwrap();
        // A request with parts both in the ring and in the pool, and an external request.
        let slot = engine.begin(2, 0, Some(IoBuf::new(1024)));
        engine.read(&slot, behind, 0, 0..512);
        engine.read(&slot, target, 0, 512..1024);
        engine.end(slot);
        let ticket = engine.external(3, 0, None);
        assert!(done.is_empty() && !engine.has_failed());
        engine.link.with(|ring| ring.break_down());
        assert!(engine.reap(1, &mut done).is_err(), "the failure must be reported once");
        assert!(engine.has_failed());
        let ended = done.pop().unwrap();
        assert!(ended.lost && (ended.tag, ended.cookie) == (1, 5) && ended.buf.as_ref().unwrap().len() == 4096);
        assert!(
            ended.result.unwrap_err().to_string().contains("unknown whether"),
            "the message must say that the result is unknown"
        );
        assert_eq!((done.len(), engine.in_flight()), (0, 2));
        slow.open();
        ticket.complete(Ok(()));
        while done.len() < 2 {
            engine.reap(1, &mut done).unwrap();
        }
        done.sort_by_key(|ended| ended.tag);
        assert!(done[0].lost && done[0].result.is_err() && done[0].buf.is_some());
        assert!(!done[1].lost && done[1].result.is_ok());
        engine.read_one(4, 0, target, 0, IoBuf::new(512), 0..512);
        let refused = only(&mut engine);
        assert!(!refused.lost && refused.result.is_err() && refused.buf.is_some());
        let late = engine.add_target(&store).unwrap();
        engine.read_one(5, 0, late, 0, IoBuf::new(512), 0..512);
        assert!(only(&mut engine).result.is_err());
    }
    drop(writer);
}

/// A store whose reads panic; `never_blocks` decides which thread runs them.
#[derive(Debug)]
struct Panics {
    inner: MemoryStore,
    never_blocks: bool,
}

impl ForwardingStore for Panics {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }
    fn read_at(&self, _buf: &mut [u8], _offset_bytes: u64) -> io::Result<()> {
        panic!("a panic for a test")
    }

    fn never_blocks(&self) -> bool {
        self.never_blocks
    }
}

#[test]
fn a_store_that_panics_fails_its_request_and_no_other() {
    for mut engine in ring_engines().into_iter().chain(Engine::new(EngineKind::Sync, 8, None).ok()) {
        for never_blocks in [false, true] {
            let broken = engine
                .add_target(&(Arc::new(Panics { inner: a_mib("panics"), never_blocks }) as Arc<dyn Store>))
                .unwrap();
            let sound = engine.add_target(&(Arc::new(MemoryStore::with_bytes("m", vec![1; 512])) as _)).unwrap();
            engine.read_one(1, 0, broken, 0, IoBuf::new(512), 0..512);
            engine.read_one(2, 0, sound, 0, IoBuf::new(512), 0..512);
            engine.write_one(3, 0, broken, 0, IoBuf::new(512), 0..512, false);
            let mut done = Vec::new();
            engine.reap(3, &mut done).unwrap();
            done.sort_by_key(|ended| ended.tag);
            let ended: Vec<_> = done.iter().map(|ended| (ended.result.is_ok(), ended.lost)).collect();
            assert_eq!(ended, [(false, false), (true, false), (true, false)]);
        }
    }
}
