//! Tests that no I/O happens where the disk above holds a lock: `reserve` and `commit` never access
//! the store, and continue while another thread waits for the store.

use crate::{BlockState, Commit, CreateOptions, DiskType, Image, ImageWriter, ParentLink, vhd, vhdx};
use diskwright_store::{FileRange, MemoryStore, Store, Zeroing, testing::ForwardingStore};
use std::{
    io,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};
use uuid::Uuid;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = MIB;

/// A store that can forbid all calls, or block a chosen kind of call.
#[derive(Debug)]
struct Watched {
    inner: MemoryStore,
    is_forbidden: AtomicBool,
    /// The kind of call to block, and the number of blocked calls (at most one).
    held: Mutex<(Option<Call>, usize)>,
    changed: Condvar,
    largest_punch_bytes: AtomicU64,
    punches: AtomicU64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Length,
    Read,
    Write,
    Grow,
    Zero,
    Punch,
    Sync,
}

impl Watched {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            inner: MemoryStore::new("disk"),
            is_forbidden: AtomicBool::new(false),
            held: Mutex::default(),
            changed: Condvar::new(),
            largest_punch_bytes: AtomicU64::new(0),
            punches: AtomicU64::new(0),
        })
    }

    fn touched(&self, call: Call) {
        assert!(!self.is_forbidden.load(Ordering::SeqCst), "{call:?} of the store, where no I/O is allowed");
        let mut held = self.held.lock().unwrap();
        if held.0 == Some(call) && held.1 == 0 {
            held.1 += 1;
            self.changed.notify_all();
            while held.0 == Some(call) {
                held = self.changed.wait(held).unwrap();
            }
            held.1 -= 1;
        }
    }

    fn hold(&self, call: Option<Call>) {
        self.held.lock().unwrap().0 = call;
        self.changed.notify_all();
    }

    /// Waits until a call is blocked.
    fn until_held(&self) {
        let held = self.held.lock().unwrap();
        let (held, waited) =
            self.changed.wait_timeout_while(held, Duration::from_secs(30), |(_, count)| *count == 0).unwrap();
        assert!(!waited.timed_out(), "no call of {:?} came", held.0);
    }

    /// Runs `what`, which must not access the store.
    fn untouched<T>(&self, what: impl FnOnce() -> T) -> T {
        self.is_forbidden.store(true, Ordering::SeqCst);
        let result = what();
        self.is_forbidden.store(false, Ordering::SeqCst);
        result
    }
}

impl ForwardingStore for Watched {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }
    fn len_bytes(&self) -> io::Result<u64> {
        self.touched(Call::Length);
        self.inner.len_bytes()
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        self.inner.read_at(buf, offset_bytes)?;
        // Blocked after the read, with the old bytes in `buf`.
        self.touched(Call::Read);
        Ok(())
    }

    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.touched(Call::Write);
        self.inner.write_at(buf, offset_bytes)
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.touched(Call::Length);
        self.inner.set_len(len_bytes)
    }

    fn allocate(&self, range: FileRange) -> io::Result<()> {
        self.touched(Call::Grow);
        self.inner.allocate(range)
    }

    fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()> {
        if how == Zeroing::Deallocate {
            self.touched(Call::Punch);
            self.largest_punch_bytes.fetch_max(range.len_bytes, Ordering::SeqCst);
            self.punches.fetch_add(1, Ordering::SeqCst);
        } else {
            self.touched(Call::Zero);
        }
        self.inner.zero_range(range, how)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.touched(Call::Sync);
        self.inner.sync_data()
    }

    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        self.touched(Call::Read);
        self.inner.next_data(offset_bytes)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Vhd,
    Vhdx,
}

const KINDS: [(Kind, DiskType); 4] = [
    (Kind::Vhdx, DiskType::Dynamic),
    (Kind::Vhdx, DiskType::Differencing),
    (Kind::Vhd, DiskType::Dynamic),
    (Kind::Vhd, DiskType::Differencing),
];

fn reopened(store: &Arc<Watched>, kind: Kind) -> Box<dyn Image> {
    let shared = Arc::clone(store) as Arc<dyn Store>;
    match kind {
        Kind::Vhd => Box::new(vhd::open(shared, true).unwrap()),
        Kind::Vhdx => Box::new(vhdx::open(shared, true).unwrap()),
    }
}

fn made(kind: Kind, disk_type: DiskType, size_bytes: u64) -> (Arc<Watched>, Box<dyn Image>) {
    let store = Watched::new();
    let parent = ParentLink {
        relative_path: Some(".\\parent".into()),
        name: Some("parent".into()),
        linkage: Some(Uuid::from_u128(7).into()),
        modified_seconds: Some(1),
        ..ParentLink::default()
    };
    let options = CreateOptions {
        disk_type,
        size_bytes,
        block_bytes: Some(BLOCK as u32),
        logical_sector_bytes: 512,
        physical_sector_bytes: 512,
        parent: (disk_type == DiskType::Differencing).then_some(parent),
        preallocate: false,
        disk_id: Some(Uuid::from_u128(42)),
        own: Default::default(),
    };
    match kind {
        Kind::Vhd => vhd::create(Arc::clone(&store) as Arc<dyn Store>, &options).unwrap(),
        Kind::Vhdx => vhdx::create(Arc::clone(&store) as Arc<dyn Store>, &options).unwrap(),
    };
    let image = reopened(&store, kind);
    (store, image)
}

/// Reserves as the disk does. Returns the offset and the number of preparations.
fn reserve(store: &Watched, writer: &dyn ImageWriter, block: u64) -> (u64, usize) {
    for round in 0..20 {
        if let Some(reservation) = store.untouched(|| writer.reserve(block)).unwrap() {
            return (reservation.offset_bytes, round);
        }
        writer.prepare(block..block + 1).unwrap();
    }
    panic!("block {block} cannot be reserved however often it is prepared");
}

fn commit(store: &Watched, writer: &dyn ImageWriter, block: u64, change: Commit) -> (BlockState, usize) {
    for round in 0..20 {
        if let Some(state) = store.untouched(|| writer.commit(block, change)).unwrap() {
            return (state, round);
        }
        writer.prepare(block..block + 1).unwrap();
    }
    panic!("block {block} cannot be committed however often it is prepared");
}

#[test]
fn reserve_and_commit_never_access_the_store() {
    for (kind, disk_type) in KINDS {
        let (store, image) = made(kind, disk_type, 64 * MIB);
        let writer = image.writer().unwrap();
        writer.begin_writing().unwrap();
        let sectors = Commit::Sectors { first: 3, count: 2 };
        let (_, rounds) = reserve(&store, writer, 5);
        assert!((1..=3).contains(&rounds), "{kind:?} {disk_type}: {rounds} preparations");
        let (state, _) = commit(&store, writer, 5, sectors);
        assert_eq!(matches!(state, BlockState::Partial { .. }), disk_type == DiskType::Differencing, "{state:?}");
        for block in [7, 8, 40] {
            let (_, rounds) = reserve(&store, writer, block);
            assert!(rounds <= 1, "{kind:?} {disk_type}: {rounds} preparations");
            assert!(matches!(
                commit(&store, writer, block, Commit::Whole).0,
                BlockState::Data { .. } | BlockState::Partial { .. }
            ));
        }
        if writer.can_store_zero() {
            commit(&store, writer, 7, Commit::Discard);
            let generation = writer.freed_generation();
            writer.flush().unwrap();
            writer.recycle(generation);
            reserve(&store, writer, 9);
            commit(&store, writer, 9, Commit::Whole);
        }
        writer.flush().unwrap();
        writer.close().unwrap();
        // Once more, with tables that are not in memory.
        let image = reopened(&store, kind);
        let writer = image.writer().unwrap();
        writer.begin_writing().unwrap();
        assert!(store.untouched(|| writer.reserve(5)).unwrap().is_none(), "its entry is not in memory");
        reserve(&store, writer, 5);
        commit(&store, writer, 5, Commit::Sectors { first: 9, count: 1 });
        reserve(&store, writer, 12);
        commit(&store, writer, 12, sectors);
        let mut states = [BlockState::Absent; 64];
        image.block_states(0, &mut states).unwrap();
        if disk_type == DiskType::Differencing {
            let set = |block: u64| {
                let bitmap = image.sector_bitmap(block).unwrap();
                (0..bitmap.sectors).filter(|&sector| bitmap.get(sector)).collect::<Vec<_>>()
            };
            assert_eq!((set(5), set(12)), (vec![3, 4, 9], vec![3, 4]), "{kind:?}");
        }
        writer.close().unwrap();
        let report = match kind {
            Kind::Vhd => vhd::check(Arc::clone(&store) as Arc<dyn Store>),
            Kind::Vhdx => vhdx::check(Arc::clone(&store) as Arc<dyn Store>),
        };
        assert!(report.unwrap().worst() < Some(crate::Severity::Leak), "{kind:?} {disk_type}");
    }
}

/// Readers of the file wait for the inode lock during a hole punch.
#[test]
fn adjacent_blocks_are_punched_together_at_most_64_mib_a_call() {
    let (store, image) = made(Kind::Vhdx, DiskType::Dynamic, 256 * MIB);
    let writer = image.writer().unwrap();
    writer.begin_writing().unwrap();
    for block in 0..200 {
        writer.reserve_waiting(block).unwrap();
        writer.commit_waiting(block, Commit::Whole).unwrap();
    }
    for block in 0..200 {
        writer.commit_waiting(block, Commit::Discard).unwrap();
    }
    let generation = writer.freed_generation();
    writer.flush().unwrap();
    writer.recycle(generation);
    let punches = store.punches.load(Ordering::SeqCst);
    assert!((4..=5).contains(&punches), "{punches} calls for 200 blocks");
    assert_eq!(store.largest_punch_bytes.load(Ordering::SeqCst), 64 * MIB);
}

/// While one thread is blocked in a call of the store, requests that need no I/O continue.
#[test]
fn no_lock_is_held_while_the_store_is_called() {
    for (kind, disk_type) in KINDS {
        let (store, image) = made(kind, disk_type, 8192 * MIB);
        let image = &*image;
        let writer = image.writer().unwrap();
        writer.begin_writing().unwrap();
        for block in 0..20 {
            writer.reserve_waiting(block).unwrap();
        }
        for block in 0..10 {
            writer.commit_waiting(block, Commit::Whole).unwrap();
        }
        let mut next = 10;
        // Reserves and commits in another thread, and fails if that takes longer than 30 seconds.
        let mut goes_on = |what: &str| {
            let block = next;
            next += 1;
            let done = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    assert!(store_answers(writer, block), "{kind:?} {disk_type}: {what}");
                    done.store(true, Ordering::SeqCst);
                });
                for _ in 0..3000 {
                    if done.load(Ordering::SeqCst) {
                        return;
                    }
                    thread::sleep(Duration::from_millis(10));
                }
                store.hold(None);
                panic!("{kind:?} {disk_type}: a reservation waits for the store: {what}");
            });
        };
        let mut while_held = |call: Call, what: &str, work: &(dyn Fn() + Sync)| {
            store.hold(Some(call));
            thread::scope(|scope| {
                scope.spawn(work);
                store.until_held();
                goes_on(what);
                store.hold(None);
            });
        };
        while_held(Call::Read, "block_states", &|| {
            let mut states = [BlockState::Absent; 8];
            image.block_states(4000, &mut states).unwrap();
        });
        if kind == Kind::Vhdx {
            while_held(Call::Read, "next_block", &|| assert!(image.next_block(4000, 4100).unwrap() <= Some(4100)));
        }
        while_held(Call::Read, "a page of the table", &|| drop(writer.reserve_waiting(6000).unwrap()));
        while_held(Call::Grow, "growth", &|| {
            for block in 6000..6400 {
                writer.reserve_waiting(block).unwrap();
            }
        });
        while_held(Call::Sync, "flush", &|| writer.flush().unwrap());
        if writer.can_store_zero() {
            for block in 0..5 {
                writer.commit_waiting(block, Commit::Discard).unwrap();
            }
            let generation = writer.freed_generation();
            writer.flush().unwrap();
            while_held(Call::Punch, "recycle", &|| writer.recycle(generation));
            while_held(Call::Zero, "zeroing", &|| {
                for block in 7000..7300 {
                    writer.reserve_waiting(block).unwrap();
                }
            });
        }
        writer.close().unwrap();
    }
}

/// A page is changed, written and dropped after another thread has read its old bytes from the
/// file. That thread must read again.
#[test]
fn a_page_that_was_dropped_during_a_read_is_read_again() {
    for (kind, size_bytes, pages, entries) in [(Kind::Vhdx, 3 << 40, 4400, 512), (Kind::Vhd, 1536 << 30, 1200, 1024)] {
        for is_preparation in [false, true] {
            let (store, image) = made(kind, DiskType::Dynamic, size_bytes);
            let image = &*image;
            let writer = image.writer().unwrap();
            writer.begin_writing().unwrap();
            writer.reserve_waiting(0).unwrap();
            let block = 100_000;
            let state = || {
                let mut out = [BlockState::Zero];
                image.block_states(block, &mut out).unwrap();
                out[0]
            };
            let seen = thread::scope(|scope| {
                store.hold(Some(Call::Read));
                let reader = scope.spawn(|| {
                    if is_preparation {
                        writer.prepare(block..block + 1).unwrap();
                    }
                    state()
                });
                store.until_held();
                let place = writer.reserve_waiting(block).unwrap().offset_bytes;
                writer.commit_waiting(block, Commit::Whole).unwrap();
                writer.flush().unwrap();
                for page in 200..200 + pages {
                    writer.prepare(page * entries..page * entries + 1).unwrap();
                }
                store.hold(None);
                (reader.join().unwrap(), BlockState::data(place))
            });
            assert_eq!(seen.0, seen.1, "{kind:?}, preparation: {is_preparation}");
            assert_eq!(state(), seen.1, "{kind:?}, preparation: {is_preparation}");
        }
    }
}

/// Whether a block whose entry is in memory, and that was reserved before, needs no I/O.
fn store_answers(writer: &dyn ImageWriter, block: u64) -> bool {
    writer.reserve(block).unwrap().is_some() && writer.commit(block, Commit::Whole).unwrap().is_some()
}
