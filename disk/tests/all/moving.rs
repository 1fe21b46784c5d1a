//! Moves of a disk in use: contents while several queues write, names, stops, idle queues.
//! `moving_faults.rs` has failing and slow file systems.

use crate::small_fs::Small;
use diskwright_disk::{
    CompareOutcome, CreateRequest, Disk, DiskError, Movable, MoveOptions, MoveWatch, OpenOptions, check, compare,
    create,
};
use diskwright_image::{DiskType, Format};
use diskwright_store::{
    BlockDevice, BlockQueue, Blocking, Completion, EngineKind, Files, IoBuf, Operation, QueueOptions, Request,
    SegmentMemory, Segments, SharedRing,
};
use std::{
    collections::HashMap,
    fs,
    io::Write,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;

pub const MIB: u64 = 1 << 20;
const SIZE: u64 = 96 * MIB;
const SECTOR: u64 = 512;

pub fn folder() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().canonicalize().unwrap();
    (dir, path)
}

pub fn made(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    create(&path, &CreateRequest { size_bytes: Some(SIZE), ..CreateRequest::default() }).unwrap();
    path
}

pub fn open_with(path: &Path, files: Files) -> Movable {
    Movable::new(Disk::open(path, &OpenOptions { writable: true, files, ..OpenOptions::default() }).unwrap())
}

pub fn open(path: &Path) -> Movable {
    open_with(path, Files::default())
}

pub fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn is_same(one: &Path, other: &Path) -> bool {
    let disks = [one, other].map(|path| Disk::open(path, &OpenOptions::default()).unwrap());
    let outcome = compare([(&*disks[0], one), (&*disks[1], other)], EngineKind::Auto, &mut |_, _| true).unwrap();
    outcome == CompareOutcome::Same
}

/// A client: a queue, and the sectors that only it writes, with what they must hold.
struct Client {
    queue: Box<dyn BlockQueue>,
    ring: Option<SharedRing>,
    index: u64,
    clients: u64,
    random: u64,
    /// By sector: the byte of its last completed write.
    model: HashMap<u64, u8>,
    /// By tag: what the request does.
    under_way: HashMap<u64, (Operation, u64, u8)>,
    next_tag: u64,
    requests: u64,
}

const DEPTH: usize = 8;

impl Client {
    fn new(disk: &Movable, index: u64, clients: u64, on_ring: bool) -> Self {
        let ring = if on_ring { SharedRing::new(64, None).ok() } else { None };
        let options = QueueOptions { depth: DEPTH, ring: ring.as_ref(), ..QueueOptions::default() };
        Self {
            queue: disk.open_queue(&options).unwrap(),
            ring,
            index,
            clients,
            random: index * 77 + 1,
            model: HashMap::new(),
            under_way: HashMap::new(),
            next_tag: 0,
            requests: 0,
        }
    }

    fn draw(&mut self, below: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % below
    }

    /// One of this client's sectors, mostly in the hot part of the disk, that no request has.
    fn sector(&mut self) -> Option<u64> {
        let sectors = SIZE / SECTOR / self.clients;
        let below = if self.draw(2) == 0 { sectors / 64 } else { sectors };
        let sector = self.draw(below) * self.clients + self.index;
        (!self.under_way.values().any(|(_, other, _)| *other == sector)).then_some(sector)
    }

    fn push(&mut self) {
        let Some(sector) = self.sector() else { return };
        let (tag, at) = (self.next_tag << 40 | 7, sector * SECTOR);
        self.next_tag += 1;
        let (byte, kind) = (1 + self.draw(255) as u8, self.draw(20));
        let buf = |byte: u8| {
            let mut buf = IoBuf::new(4096);
            buf.fill(byte);
            buf
        };
        let (operation, request) = match kind {
            0..9 => (Operation::Write, Request::write(at, 512, buf(byte), tag)),
            9..11 => {
                let mut segments = Segments::new();
                segments.push(SegmentMemory::from(buf(byte)), 0..256).unwrap();
                segments.push(SegmentMemory::from(Arc::new(buf(byte))), 1000..1256).unwrap();
                (Operation::Write, Request::write_segments(at, Box::new(segments), tag))
            }
            11 => (Operation::Write, Request { fua: true, ..Request::write(at, 512, buf(byte), tag) }),
            12 => (Operation::Discard, Request::discard(at, 512, tag)),
            13 => (Operation::WriteZeroes, Request::write_zeroes(at, 512, tag)),
            14 => (Operation::Flush, Request::flush(tag)),
            _ => (Operation::Read, Request::read(at, 512, buf(0), tag)),
        };
        let value = if operation == Operation::Write { byte } else { 0 };
        self.under_way.insert(tag, (operation, if operation == Operation::Flush { u64::MAX } else { sector }, value));
        self.queue.push(request).unwrap();
    }

    fn reap(&mut self) {
        let mut done = Vec::new();
        match &self.ring {
            Some(ring) => {
                self.queue.reap(0, &mut done).unwrap();
                if done.is_empty() && self.queue.in_flight() > 0 {
                    ring.wait().unwrap();
                    self.queue.reap(0, &mut done).unwrap();
                }
            }
            None => self.queue.reap(1, &mut done).unwrap(),
        }
        for Completion { tag, buf, result, .. } in done {
            result.expect("no client sees an error");
            let (operation, sector, byte) = self.under_way.remove(&tag).expect("it comes with its own tag, once");
            self.requests += 1;
            match operation {
                Operation::Read => {
                    let expected = self.model.get(&sector).copied().unwrap_or(0);
                    let found = &buf.unwrap()[..512];
                    assert!(found.iter().all(|byte| *byte == expected), "sector {sector}: {} not {expected}", found[0]);
                }
                Operation::Flush => {}
                _ => drop(self.model.insert(sector, byte)),
            }
        }
    }

    fn run(mut self, stop: &AtomicBool) -> (HashMap<u64, u8>, u64) {
        while !stop.load(Ordering::Relaxed) {
            while self.queue.in_flight() < DEPTH {
                self.push();
            }
            self.reap();
        }
        while self.queue.in_flight() > 0 {
            self.reap();
        }
        (self.model, self.requests)
    }
}

/// Runs `moves` while clients work on the disk, then checks the contents of `expected_at`.
pub fn beside_clients(disk: &Movable, moves: impl FnOnce(&Movable)) {
    let stop = AtomicBool::new(false);
    let clients: Vec<HashMap<u64, u8>> = thread::scope(|scope| {
        let (clients, stop) = (3, &stop);
        let start = |index| scope.spawn(move || Client::new(disk, index, clients, index > 0).run(stop));
        let threads: Vec<_> = (0..clients).map(start).collect();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            thread::sleep(Duration::from_millis(50));
            moves(disk);
            thread::sleep(Duration::from_millis(50));
        }));
        stop.store(true, Ordering::Relaxed);
        let clients = threads.into_iter().map(|thread| {
            let (model, requests) = thread.join().unwrap();
            assert!(requests > 100, "{requests} requests");
            model
        });
        let clients = clients.collect();
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        clients
    });
    let file = disk.disk().file().unwrap().to_owned();
    disk.close().unwrap();
    let expected: HashMap<u64, u8> = clients.into_iter().flatten().collect();
    // The lock goes with the last handle; the file can be read by others before that only unlocked.
    let found = Disk::open(&file, &OpenOptions { force_share: true, ..OpenOptions::default() }).unwrap();
    let mut io = Blocking::open(&*found, EngineKind::Auto).unwrap();
    let mut bytes = vec![0; MIB as usize];
    for start in (0..SIZE).step_by(MIB as usize) {
        io.read(start, &mut bytes).unwrap();
        for (sector, bytes) in (start / SECTOR..).zip(bytes.chunks(SECTOR as usize)) {
            let byte = expected.get(&sector).copied().unwrap_or(0);
            assert!(bytes.iter().all(|found| *found == byte), "sector {sector} of {}", file.display());
        }
    }
}

pub fn plain() -> MoveOptions {
    MoveOptions::default()
}

#[test]
fn a_disk_moves_through_all_formats_while_clients_write() {
    let (_dir, dir) = folder();
    let first = made(&dir, "vm.vhdx");
    let disk = open(&first);
    beside_clients(&disk, |disk| {
        let mut last = first.clone();
        for (name, disk_type) in [
            ("one.vhd", None),
            ("two.raw", None),
            ("three.vhdx", Some(DiskType::Fixed)),
            ("four.vhd", Some(DiskType::Fixed)),
            ("five.vhdx", Some(DiskType::Dynamic)),
        ] {
            let to = dir.join(name);
            let dest = CreateRequest { disk_type, ..CreateRequest::default() };
            let moved = disk.move_to(&to, &MoveOptions { dest, ..plain() }, &mut ()).unwrap();
            assert_eq!((&moved.from, &moved.to, moved.old_is_kept), (&last, &to, false));
            assert!(moved.warnings.is_empty(), "{:?}", moved.warnings);
            assert_eq!(names(&dir), [name], "the old file is gone, and no other is left");
            let layers = disk.disk().layers();
            assert_eq!((layers.len(), &layers[0].path), (1, &to));
            assert_eq!(layers[0].image.store().name(), to);
            last = to;
        }
    });
}

#[test]
fn a_chain_becomes_one_image_and_stays_where_asked() {
    let (_dir, dir) = folder();
    let base = made(&dir, "base.vhdx");
    let top = dir.join("top.vhdx");
    let mut io = Blocking::open(&open(&base), EngineKind::Auto).unwrap();
    io.write(0, &[9; 8192], false).unwrap();
    drop(io);
    create(&top, &CreateRequest { parent: Some(base), ..CreateRequest::default() }).unwrap();
    let disk = open(&top);
    let mut io = Blocking::open(&disk, EngineKind::Auto).unwrap();
    io.write(4096, &[5; 4096], false).unwrap();
    let sub = dir.join("sub");
    fs::create_dir(&sub).unwrap();
    let options = MoveOptions { keep_old: true, ..plain() };
    let moved = disk.move_to(&sub, &options, &mut ()).unwrap();
    assert_eq!((&moved.to, moved.old_is_kept), (&sub.join("top.vhdx"), true), "in a folder the name is kept");
    io.write(8192, &[6; 4096], false).unwrap();
    let mut found = [0; 12288];
    io.read(0, &mut found).unwrap();
    assert!([9, 5, 6].iter().zip(found.chunks(4096)).all(|(byte, found)| found.iter().all(|one| one == byte)));
    drop(io);
    disk.close().unwrap();
    drop(disk);
    // The old disk was closed cleanly, and has what the disk had at the end of the move.
    for (path, after) in [(&top, 0), (&moved.to, 6)] {
        assert!(check(path, &OpenOptions::default()).unwrap().is_sound(), "{}", path.display());
        let disk = Disk::open(path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
        Blocking::open(&*disk, EngineKind::Auto).unwrap().read(8192, &mut found[..4096]).unwrap();
        assert!(found[..4096].iter().all(|byte| *byte == after));
    }
}

#[test]
fn what_cannot_move_is_refused_and_stays() {
    let (_dir, dir) = folder();
    let path = made(&dir, "vm.vhdx");
    let disk = open(&path);
    let refused = |to: &str, options: &MoveOptions| disk.move_to(&dir.join(to), options, &mut ()).unwrap_err();
    made(&dir, "there.vhd");
    assert!(matches!(refused("there.vhd", &plain()), DiskError::Exists { .. }));
    assert!(matches!(refused(".", &plain()), DiskError::Exists { .. }), "its own name");
    assert!(refused("none/new.vhdx", &plain()).to_string().contains("find the folder"));
    assert!(matches!(refused("new.what", &plain()), DiskError::Usage { .. }));
    let dry = disk.move_to(&dir.join("new.vhd"), &MoveOptions { dry_run: true, ..plain() }, &mut ()).unwrap();
    assert_eq!((dry.format, dry.copied_bytes), (Format::Vhd, 0));
    // A child that was made meanwhile.
    let child = dir.join("child.vhdx");
    fs::copy(&path, dir.join("copy.vhdx")).unwrap();
    create(&child, &CreateRequest { parent: Some(dir.join("copy.vhdx")), ..CreateRequest::default() }).unwrap();
    fs::remove_file(dir.join("copy.vhdx")).unwrap();
    let error = refused("new.vhd", &plain()).to_string();
    assert!(error.contains("child.vhdx names it as its parent"), "{error}");
    assert_eq!(names(&dir), ["child.vhdx", "there.vhd", "vm.vhdx"]);
    let keep = MoveOptions { keep_old: true, ..plain() };
    assert_eq!(disk.move_to(&dir.join("new.vhd"), &keep, &mut ()).unwrap().to, dir.join("new.vhd"));
    // Read-only.
    drop(disk);
    let disk = Movable::new(Disk::open(&path, &OpenOptions::default()).unwrap());
    let error = disk.move_to(&dir.join("other.vhd"), &plain(), &mut ()).unwrap_err().to_string();
    assert!(error.contains("open read-only"), "{error}");
}

/// The disk's name leads to another file by now: that file is not the disk's, and stays.
#[test]
fn a_disk_whose_file_was_replaced_is_refused() {
    let (_dir, dir) = folder();
    let path = made(&dir, "vm.vhdx");
    let disk = open(&path);
    fs::rename(&path, dir.join("renamed.vhdx")).unwrap();
    let error = disk.move_to(&dir.join("new.vhd"), &plain(), &mut ()).unwrap_err().to_string();
    assert!(error.contains("find the disk's file"), "{error}");
    fs::write(&path, "a backup").unwrap();
    let error = disk.move_to(&dir.join("new.vhd"), &plain(), &mut ()).unwrap_err().to_string();
    assert!(error.contains("another file than the one that the disk has open"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"a backup");
    // Replaced while the disk is copied.
    fs::remove_file(&path).unwrap();
    fs::rename(dir.join("renamed.vhdx"), &path).unwrap();
    struct Replaces(PathBuf);
    impl MoveWatch for Replaces {
        fn new_disk_is_made(&mut self, _: Option<(u64, u64)>) -> diskwright_disk::Result<()> {
            fs::rename(&self.0, self.0.with_extension("old")).unwrap();
            fs::write(&self.0, "a backup").unwrap();
            Ok(())
        }
    }
    let error = disk.move_to(&dir.join("new.vhd"), &plain(), &mut Replaces(path.clone())).unwrap_err().to_string();
    assert!(error.contains("another file than the one"), "{error}");
    assert_eq!(
        (fs::read(&path).unwrap(), names(&dir)),
        (b"a backup".to_vec(), vec!["vm.old".into(), "vm.vhdx".into()])
    );
}

/// The new file belongs to the owner of the old one, and nobody else may read it who could not.
#[test]
fn owner_and_permissions_stay_without_special_bits() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let (_dir, dir) = folder();
    let path = made(&dir, "vm.vhdx");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o4640)).unwrap();
    let is_root = std::os::unix::fs::chown(&path, Some(1234), Some(4321)).is_ok();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o4640)).unwrap();
    let disk = open(&path);
    disk.move_to(&dir.join("new.vhd"), &plain(), &mut ()).unwrap();
    let found = fs::metadata(dir.join("new.vhd")).unwrap();
    assert_eq!(found.mode() & 0o7777, 0o640);
    if is_root {
        assert_eq!((found.uid(), found.gid()), (1234, 4321));
    }
}

/// Stops at the n-th question.
struct Stops(u64);

impl MoveWatch for Stops {
    fn goes_on(&mut self, _: u64, _: u64) -> bool {
        self.0 = self.0.saturating_sub(1);
        self.0 > 0
    }
}

#[test]
fn a_stop_leaves_the_disk_where_it_was() {
    let (_dir, dir) = folder();
    let path = made(&dir, "vm.vhdx");
    let disk = open(&path);
    let fill = vec![3; (48 * MIB) as usize];
    Blocking::open(&disk, EngineKind::Auto).unwrap().write(16 * MIB, &fill, false).unwrap();
    Blocking::open(&disk, EngineKind::Auto).unwrap().write_zeroes(16 * MIB, 48 * MIB).unwrap();
    beside_clients(&disk, |disk| {
        let mut stopped = 0;
        for questions in 1..100 {
            match disk.move_to(&dir.join("new.vhd"), &plain(), &mut Stops(questions)) {
                Err(DiskError::Stopped) => stopped += 1,
                Ok(_) => break,
                Err(error) => panic!("{error}"),
            }
            assert_eq!(names(&dir), ["vm.vhdx"], "the new file is removed");
            assert_eq!(disk.disk().file(), Some(&*path));
        }
        assert!(stopped >= 2, "{stopped}");
    });
}

/// A queue that nobody uses sleeps in its ring. It wakes, and lets the old disk go.
#[test]
fn an_idle_queue_lets_the_old_disk_go() {
    let (_dir, dir) = folder();
    let disk = open(&made(&dir, "vm.vhdx"));
    let Ok(ring) = SharedRing::new(8, None) else { return };
    drop(ring);
    thread::scope(|scope| {
        let stop = Arc::new(AtomicBool::new(false));
        let (ready, is_ready) = std::sync::mpsc::channel();
        let (disk, stopped) = (&disk, Arc::clone(&stop));
        let idle = scope.spawn(move || {
            let ring = SharedRing::new(64, None).unwrap();
            let mut queue = disk.open_queue(&QueueOptions { ring: Some(&ring), ..QueueOptions::default() }).unwrap();
            ready.send(()).unwrap();
            let mut turns = 0;
            while !stopped.load(Ordering::Relaxed) {
                ring.wait_for(Duration::from_secs(3)).unwrap();
                queue.reap(0, &mut Vec::new()).unwrap();
                turns += 1;
            }
            turns
        });
        is_ready.recv().unwrap();
        let began = Instant::now();
        let moved = disk.move_to(&dir.join("new.vhdx"), &plain(), &mut ()).unwrap();
        let took = began.elapsed();
        stop.store(true, Ordering::Relaxed);
        let turns = idle.join().unwrap();
        assert!(moved.warnings.is_empty(), "{:?}", moved.warnings);
        assert!(took < Duration::from_secs(3), "{took:?}: the thread was woken");
        assert!(turns < 100, "{turns}: and sleeps otherwise");
    });
}

#[test]
fn a_leftover_is_replaced_unless_it_is_in_use() {
    let (_dir, dir) = folder();
    let disk = open(&made(&dir, "vm.vhdx"));
    let leftover = made(&dir, "left.vhd");
    fs::rename(&leftover, dir.join(".new.vhd.moving")).unwrap();
    let open_leftover = OpenOptions { writable: true, format: Some(Format::Vhd), ..OpenOptions::default() };
    let in_use = Disk::open(dir.join(".new.vhd.moving"), &open_leftover).unwrap();
    let error = disk.move_to(&dir.join("new.vhd"), &plain(), &mut ()).unwrap_err().to_string();
    assert!(error.contains("another move to this name is under way"), "{error}");
    drop(in_use);
    disk.move_to(&dir.join("new.vhd"), &plain(), &mut ()).unwrap();
    assert_eq!(names(&dir), ["new.vhd"]);
}

#[test]
fn a_full_destination_leaves_the_disk_where_it_was() {
    let small = match Small::new("xfs", 400 * MIB) {
        Ok(small) => small,
        Err(missing) => return println!("skipped: {missing}"),
    };
    let (_dir, dir) = folder();
    let path = made(&dir, "vm.vhdx");
    let disk = open(&path);
    let mut io = Blocking::open(&disk, EngineKind::Auto).unwrap();
    let noise: Vec<u8> = (0..64 * MIB).map(|at| (at * 31 % 251) as u8).collect();
    io.write(0, &noise, false).unwrap();
    // Too full from the beginning, then full while it is copied (a fixed image takes its space
    // late).
    let filler = small.mount.join("filler");
    let room = |bytes: u64| {
        let mut file = fs::File::create(&filler).unwrap();
        while diskwright_store::free_bytes(&small.mount).unwrap() > bytes
            && file.write_all(&[1; 1 << 20]).and_then(|()| file.sync_all()).is_ok()
        {}
    };
    room(8 * MIB);
    let error = disk.move_to(&small.mount.join("new.vhdx"), &plain(), &mut ()).unwrap_err();
    assert_eq!(error.code().as_str(), "no_space", "{error}");
    struct Fills<'a>(&'a dyn Fn(u64));
    impl MoveWatch for Fills<'_> {
        fn goes_on(&mut self, done: u64, _: u64) -> bool {
            if done == 0 {
                self.0(4 * MIB);
            }
            true
        }
    }
    let make_room = || {
        // XFS gives back the space of a removed file in the background, that of a cut one at once.
        fs::File::create(&filler).unwrap().sync_all().unwrap();
        fs::remove_file(&filler).unwrap();
    };
    make_room();
    let error = disk.move_to(&small.mount.join("new.raw"), &plain(), &mut Fills(&room)).unwrap_err();
    assert_eq!(error.code().as_str(), "no_space", "{error}");
    assert!(error.to_string().contains("new.raw"), "{error}");
    assert_eq!(names(&small.mount), ["filler"]);
    let mut found = vec![0; noise.len()];
    io.read(0, &mut found).unwrap();
    assert!(found == noise);
    io.write(0, &[1; 512], true).unwrap();
    make_room();
    // To another file system, with room.
    let moved = disk.move_to(&small.mount, &MoveOptions { keep_old: true, ..plain() }, &mut ()).unwrap();
    drop(io);
    disk.close().unwrap();
    drop(disk);
    assert!(is_same(&path, &moved.to));
}

/// Clients that write as fast as they can everywhere: the move ends, and holds them back for a
/// short time only.
#[test]
fn a_move_ends_however_fast_clients_write() {
    let (_dir, dir) = folder();
    let disk = open(&made(&dir, "vm.vhdx"));
    let mut io = Blocking::open(&disk, EngineKind::Auto).unwrap();
    io.write(0, &vec![1; SIZE as usize], false).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut queue = disk.open_queue(&QueueOptions { depth: 32, ..QueueOptions::default() }).unwrap();
                let (mut free, mut done, mut random) =
                    ((0..32).map(|_| IoBuf::new(4096)).collect::<Vec<_>>(), vec![], 1u64);
                while !stop.load(Ordering::Relaxed) {
                    while let Some(buf) = free.pop() {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let at = (random >> 33) % (SIZE / 4096) * 4096;
                        queue.push(Request::write(at, 4096, buf, 0)).unwrap();
                    }
                    queue.reap(1, &mut done).unwrap();
                    free.extend(done.drain(..).filter_map(|one: Completion| one.result.ok().and(one.buf)));
                }
            });
        }
        let moved = disk.move_to(&dir.join("new.raw"), &plain(), &mut ());
        stop.store(true, Ordering::Relaxed);
        let moved = moved.unwrap();
        println!("pause {:?}, copied {} of {}", moved.pause, moved.copied_bytes, moved.data_bytes);
        // Usually milliseconds. Other tests run beside this one.
        assert!(moved.copied_bytes >= SIZE && moved.pause < Duration::from_secs(10), "{moved:?}");
    });
}
