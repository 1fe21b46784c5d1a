//! Tests of stores with a placement: a made-up mirror of units of 4 KiB on two or more members.

use crate::{
    Access, CopyAt, DataFile, Engine, EngineKind, FileRange, FileStore, IoBuf, MemoryStore, OpenOptions, Placed,
    Placement, Store, Zeroing,
};
use std::{
    io,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
    },
};

const UNIT: u64 = 4096;
const UNITS: u64 = 16;

/// Each unit lies on all members, in another order than in the store. Odd units are reached by the
/// store's own methods only.
#[derive(Debug)]
struct Mirror {
    members: Vec<Arc<dyn Store>>,
    held: AtomicI64,
    unsynced: AtomicU64,
    /// What the engine did, in order.
    said: Mutex<Vec<String>>,
    /// The first member is not used by the store's own methods.
    first_is_lost: AtomicBool,
    /// The byte that intact contents begin with, for reads that are checked.
    intact: Mutex<Option<u8>>,
    /// Whether it wants to see the bytes of writes.
    is_curious: AtomicBool,
}

impl Mirror {
    fn new(members: Vec<Arc<dyn Store>>) -> Arc<Self> {
        let (held, unsynced, said) = (AtomicI64::new(0), AtomicU64::new(0), Mutex::default());
        Arc::new(Self {
            members,
            held,
            unsynced,
            said,
            first_is_lost: AtomicBool::new(false),
            intact: Mutex::default(),
            is_curious: AtomicBool::new(false),
        })
    }

    fn say(&self, what: String) {
        self.said.lock().unwrap().push(what);
    }

    fn take_said(&self) -> Vec<String> {
        let mut said = std::mem::take(&mut *self.said.lock().unwrap());
        said.sort();
        said
    }

    fn good(&self) -> &[Arc<dyn Store>] {
        &self.members[usize::from(self.first_is_lost.load(Ordering::Relaxed))..]
    }
}

fn on_member(offset_bytes: u64) -> u64 {
    (UNITS - 1 - offset_bytes / UNIT) * UNIT + offset_bytes % UNIT
}

impl Placement for Mirror {
    fn place(&self, range: FileRange, access: Access, may_note: bool) -> Placed {
        let len_bytes = range.len_bytes.min(UNIT - range.offset_bytes % UNIT);
        if range.offset_bytes / UNIT == 11 {
            return Placed { len_bytes, is_zero: true, ..Placed::default() };
        }
        if range.offset_bytes / UNIT % 2 == 1 || range.offset_bytes >= UNIT * UNITS {
            return Placed { len_bytes, ..Placed::default() };
        }
        let count = if access == Access::Read { 1 } else { self.members.len() };
        let mut placed = Placed { len_bytes, count: count as u8, hold: range.offset_bytes / UNIT, ..Placed::default() };
        for member in 0..count {
            placed.copies[member] = CopyAt { member: member as u8, offset_bytes: on_member(range.offset_bytes) };
        }
        placed.is_checked = access == Access::Read && self.intact.lock().unwrap().is_some();
        placed.is_noted = may_note && self.is_curious.load(Ordering::Relaxed);
        self.held.fetch_add(count as i64, Ordering::Relaxed);
        placed
    }

    fn note(&self, hold: u64, bytes: &[u8]) {
        self.say(format!("a note of {hold}: {} bytes, {}", bytes.len(), bytes[0]));
    }

    fn is_intact(&self, hold: u64, offset_bytes: u64, bytes: &[u8]) -> bool {
        assert!(self.held.load(Ordering::Relaxed) > 0, "compared before the release");
        self.say(format!("check of {hold}: {} bytes at {}", bytes.len(), offset_bytes % UNIT));
        bytes.first().copied() == *self.intact.lock().unwrap()
    }

    fn release(&self, member: u8, hold: u64, access: Access, ok: bool) {
        self.held.fetch_sub(1, Ordering::Relaxed);
        if access == Access::Write && ok {
            self.unsynced.fetch_or(1 << member, Ordering::Relaxed);
        }
        self.say(format!("{access:?} {hold} of {member}: {ok}"));
    }

    fn sync_failed(&self, member: u8, _error: &io::Error) {
        self.say(format!("sync of {member} may have failed"));
    }

    fn unsynced(&self) -> Option<u64> {
        Some(self.unsynced.swap(0, Ordering::Relaxed))
    }

    fn synced(&self, member: u8, result: &io::Result<()>) {
        self.say(format!("Sync of {member}: {}", result.is_ok()));
    }
}

impl Store for Mirror {
    fn name(&self) -> &Path {
        Path::new("mirror")
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(UNIT * UNITS)
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        assert!(offset_bytes % UNIT + buf.len() as u64 <= UNIT, "the engine cuts at units");
        self.say(format!("own read {}", offset_bytes / UNIT));
        self.good()[0].read_at(buf, on_member(offset_bytes))
    }

    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        let started = std::time::Instant::now();
        while self.held.load(Ordering::Relaxed) > 0 {
            assert!(started.elapsed().as_secs() < 5, "a failed copy is repeated while others are not started");
            std::thread::yield_now();
        }
        self.say(format!("own write {}", offset_bytes / UNIT));
        self.good().iter().try_for_each(|member| member.write_at(buf, on_member(offset_bytes)))
    }

    fn set_len(&self, _len_bytes: u64) -> io::Result<()> {
        Ok(())
    }

    fn allocate(&self, _range: FileRange) -> io::Result<()> {
        Ok(())
    }

    fn zero_range(&self, range: FileRange, _how: Zeroing) -> io::Result<()> {
        self.say(format!("own zeroes {}", range.len_bytes / UNIT));
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.say("own sync".into());
        self.good().iter().try_for_each(|member| member.sync_data())
    }

    fn data_file(&self) -> Option<DataFile<'_>> {
        None
    }

    fn placement(&self) -> Option<&dyn Placement> {
        Some(self)
    }

    fn member(&self, number: u8) -> Option<Arc<dyn Store>> {
        self.members.get(usize::from(number)).cloned()
    }
}

fn kinds() -> Vec<EngineKind> {
    let ring = Engine::new(EngineKind::Uring, 8, None).is_ok();
    if ring { vec![EngineKind::Uring, EngineKind::Sync] } else { vec![EngineKind::Sync] }
}

fn buf_of(pattern: impl Fn(usize) -> u8, len: usize) -> IoBuf {
    let mut buf = IoBuf::new(len);
    (0..len).for_each(|at| buf[at] = pattern(at));
    buf
}

fn reaped(engine: &mut Engine) -> (io::Result<()>, Option<IoBuf>) {
    let mut done = Vec::new();
    engine.reap(1, &mut done).unwrap();
    assert_eq!(done.len(), 1);
    let ended = done.pop().unwrap();
    (ended.result, ended.buf)
}

fn members_in(directory: &Path, count: usize, writable: bool) -> Vec<Arc<dyn Store>> {
    let paths = (0..count).map(|number| directory.join(number.to_string()));
    let opened = paths.map(|path| {
        std::fs::write(&path, vec![0; (UNIT * UNITS) as usize]).unwrap();
        Arc::new(FileStore::open(&path, &OpenOptions { writable, ..OpenOptions::default() }).unwrap()) as Arc<dyn Store>
    });
    opened.collect()
}

#[test]
#[cfg_attr(miri, ignore = "opens files")]
fn a_read_that_is_not_intact_is_repeated_by_the_store() {
    for kind in kinds() {
        let directory = tempfile::tempdir().unwrap();
        let mirror = Mirror::new(members_in(directory.path(), 2, true));
        mirror.members[0].write_at(&[1; UNIT as usize], on_member(2 * UNIT)).unwrap();
        mirror.members[1].write_at(&[2; UNIT as usize], on_member(2 * UNIT)).unwrap();
        let store: Arc<dyn Store> = mirror.clone();
        let mut engine = Engine::new(kind, 8, None).unwrap();
        let target = engine.add_target(&store).unwrap();
        for (intact, shown) in [(1, 1), (2, 2)] {
            *mirror.intact.lock().unwrap() = Some(intact);
            mirror.first_is_lost.store(intact == 2, Ordering::Relaxed);
            // The last half of the buffer, so that the place of the memory counts.
            let half = UNIT as usize / 2;
            engine.read_one(7, 0, target, 2 * UNIT + 512, buf_of(|_| 9, 2 * half), half..2 * half);
            let (result, buf) = reaped(&mut engine);
            result.unwrap();
            let buf = buf.unwrap();
            assert!(buf[..half].iter().all(|&byte| byte == 9) && buf[half..].iter().all(|&byte| byte == shown));
            let mut expected =
                vec![format!("Read 2 of 0: {}", intact == 1), "check of 2: 2048 bytes at 512".to_owned()];
            if intact == 2 {
                expected.push("own read 2".into());
            }
            assert_eq!(mirror.take_said(), expected, "{kind:?}");
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "opens files")]
fn a_store_sees_the_bytes_of_writes_that_need_not_be_durable() {
    for kind in kinds() {
        let directory = tempfile::tempdir().unwrap();
        let mirror = Mirror::new(members_in(directory.path(), 2, true));
        mirror.is_curious.store(true, Ordering::Relaxed);
        let store: Arc<dyn Store> = mirror.clone();
        let mut engine = Engine::new(kind, 8, None).unwrap();
        let target = engine.add_target(&store).unwrap();
        let all_said = || std::mem::take(&mut *mirror.said.lock().unwrap());
        let (half, unit) = (UNIT as usize / 2, UNIT as usize);
        engine.write_one(1, 0, target, 2 * UNIT, buf_of(|at| (at / half) as u8, unit), half..unit, false);
        reaped(&mut engine).0.unwrap();
        let said = all_said();
        assert_eq!((said.len(), &said[0][..]), (3, "a note of 2: 2048 bytes, 1"), "{kind:?}");
        // Two pieces: the second one is placed after the first one was started.
        engine.write_one(1, 0, target, 4 * UNIT - 512, buf_of(|_| 5, 1024), 0..1024, false);
        reaped(&mut engine).0.unwrap();
        assert!(all_said().contains(&"a note of 4: 512 bytes, 5".to_owned()));
        engine.write_one(1, 0, target, 2 * UNIT, buf_of(|_| 7, unit), 0..unit, true);
        reaped(&mut engine).0.unwrap();
        assert!(!all_said().iter().any(|said| said.contains("note")), "{kind:?}: a durable write has no note");
    }
}

#[test]
#[cfg_attr(miri, ignore = "opens files")]
fn a_write_goes_to_every_copy_and_a_read_to_one() {
    for kind in kinds() {
        let directory = tempfile::tempdir().unwrap();
        let mirror = Mirror::new(members_in(directory.path(), 3, true));
        let store: Arc<dyn Store> = mirror.clone();
        let mut engine = Engine::new(kind, 8, None).unwrap();
        let target = engine.add_target(&store).unwrap();
        // From the middle of unit 2 to the middle of unit 4. Unit 3 is written by the store itself.
        let (start, len) = (2 * UNIT + 512, 2 * UNIT as usize);
        let pattern = |at: usize| (at / 512) as u8 + 1;
        engine.write_one(7, 0, target, start, buf_of(pattern, len), 0..len, false);
        reaped(&mut engine).0.unwrap();
        let copies = |unit: u64| (0..3).map(move |member| format!("Write {unit} of {member}: true"));
        let expected: Vec<String> = copies(2).chain(copies(4)).chain(["own write 3".to_owned()]).collect();
        assert_eq!(mirror.take_said(), expected, "{kind:?}");
        for member in &mirror.members {
            for at in 0..len {
                let mut byte = [0];
                member.read_at(&mut byte, on_member(start + at as u64)).unwrap();
                assert_eq!(byte[0], pattern(at), "{at}");
            }
        }
        engine.read_one(8, 0, target, start, IoBuf::new(len), 0..len);
        let (result, buf) = reaped(&mut engine);
        result.unwrap();
        assert!(buf.unwrap()[..len].iter().enumerate().all(|(at, &byte)| byte == pattern(at)));
        assert_eq!(mirror.take_said(), ["Read 2 of 0: true", "Read 4 of 0: true", "own read 3"]);
        assert_eq!(mirror.held.load(Ordering::Relaxed), 0);
        // A flush syncs the members that were written since the last one.
        for expected in [&["Sync of 0: true", "Sync of 1: true", "Sync of 2: true"][..], &[]] {
            let slot = engine.begin(9, 0, None);
            engine.sync(&slot, target);
            engine.end(slot);
            reaped(&mut engine).0.unwrap();
            assert_eq!(mirror.take_said(), expected);
        }
        // Unit 11 has no copy.
        engine.read_one(8, 0, target, 11 * UNIT, buf_of(|_| 7, UNIT as usize), 0..UNIT as usize);
        let (result, buf) = reaped(&mut engine);
        result.unwrap();
        assert!(buf.unwrap()[..UNIT as usize].iter().all(|&byte| byte == 0) && mirror.take_said().is_empty());
        let slot = engine.begin(10, 0, None);
        engine.write_zeroes(&slot, target, FileRange { offset_bytes: 0, len_bytes: 2 * UNIT }, Zeroing::Keep);
        engine.end(slot);
        reaped(&mut engine).0.unwrap();
        assert_eq!(mirror.take_said(), ["own zeroes 2"]);
    }
}

#[test]
#[cfg_attr(miri, ignore = "opens files")]
fn what_fails_on_a_member_is_repeated_by_the_store() {
    for kind in kinds() {
        let directory = tempfile::tempdir().unwrap();
        // Writes to the first member fail, since it is open read-only; its reads fail because it is
        // too short.
        let mut members = members_in(directory.path(), 2, true);
        let short = directory.path().join("short");
        std::fs::write(&short, b"").unwrap();
        members[0] = Arc::new(FileStore::open(&short, &OpenOptions::default()).unwrap());
        let mirror = Mirror::new(members);
        mirror.first_is_lost.store(true, Ordering::Relaxed);
        let store: Arc<dyn Store> = mirror.clone();
        let mut engine = Engine::new(kind, 8, None).unwrap();
        let target = engine.add_target(&store).unwrap();
        let len = UNIT as usize;
        for durable in [false, true] {
            engine.write_one(1, 0, target, 6 * UNIT, buf_of(|_| 9, len), 0..len, durable);
            reaped(&mut engine).0.unwrap();
            let said = mirror.take_said();
            assert!(said.starts_with(&["Write 6 of 0: false".into(), "Write 6 of 1: true".into()]), "{said:?}");
            assert!(said.contains(&"own write 6".into()), "{said:?}");
            assert_eq!(said.contains(&"sync of 0 may have failed".into()), durable);
        }
        engine.read_one(2, 0, target, 6 * UNIT, IoBuf::new(len), 0..len);
        let (result, buf) = reaped(&mut engine);
        result.unwrap();
        assert!(buf.unwrap()[..len].iter().all(|&byte| byte == 9));
        assert_eq!(mirror.take_said(), ["Read 6 of 0: false", "own read 6"]);
        assert_eq!(mirror.held.load(Ordering::Relaxed), 0, "{kind:?}");
    }
}

#[test]
fn a_failed_sync_of_a_member_is_repeated_by_the_store() {
    let bad = Arc::new(MemoryStore::with_bytes("bad", vec![0; (UNIT * UNITS) as usize]));
    let good: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("good", vec![0; (UNIT * UNITS) as usize]));
    bad.fail_syncs(true);
    let mirror = Mirror::new(vec![bad, good]);
    mirror.first_is_lost.store(true, Ordering::Relaxed);
    let store: Arc<dyn Store> = mirror.clone();
    let mut engine = Engine::new(EngineKind::Sync, 8, None).unwrap();
    let target = engine.add_target(&store).unwrap();
    engine.write_one(1, 0, target, 0, IoBuf::new(512), 0..512, false);
    reaped(&mut engine).0.unwrap();
    mirror.take_said();
    let slot = engine.begin(9, 0, None);
    engine.sync(&slot, target);
    engine.end(slot);
    reaped(&mut engine).0.unwrap();
    assert_eq!(mirror.take_said(), ["Sync of 0: false", "Sync of 1: true", "own sync"]);
}

#[test]
#[cfg_attr(miri, ignore = "opens files")]
fn members_leave_with_the_last_store_that_uses_them() {
    let descriptors = |path: &Path| {
        let found = std::fs::read_dir("/proc/self/fd").unwrap();
        found.filter(|entry| std::fs::read_link(entry.as_ref().unwrap().path()).is_ok_and(|to| to == path)).count()
    };
    for kind in kinds() {
        let directory = tempfile::tempdir().unwrap();
        let members = members_in(directory.path(), 2, true);
        let (one, two): (Arc<dyn Store>, Arc<dyn Store>) = (Mirror::new(members.clone()), Mirror::new(members));
        let mut engine = Engine::new(kind, 8, None).unwrap();
        let (first, second) = (engine.add_target(&one).unwrap(), engine.add_target(&two).unwrap());
        for target in [first, second] {
            engine.write_one(1, 0, target, 0, IoBuf::new(512), 0..512, false);
            reaped(&mut engine).0.unwrap();
        }
        drop((one, two));
        let path = directory.path().join("0");
        engine.remove_target(first);
        assert_eq!(descriptors(&path), 1, "the second store still uses the member");
        engine.write_one(1, 0, second, 0, IoBuf::new(512), 0..512, false);
        reaped(&mut engine).0.unwrap();
        engine.remove_target(second);
        assert_eq!(descriptors(&path), 0, "{kind:?}");
    }
}
