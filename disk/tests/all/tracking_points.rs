//! Points of change tracking: which one is meant, what has changed between two of them, what a mark
//! costs, and copies that are put back.

use crate::common::read_all;
use diskwright_disk::{ApplyOptions, CreateRequest, Disk, Increment, OpenOptions, SincePoint, apply_export, create};
use diskwright_image::DiskType;
use diskwright_store::{
    BlockDevice, Blocking, EngineKind, FileSystem, Files, LocalFiles, OpenError, Store, TrackedPoint,
    testing::{ForwardingFileSystem, ForwardingStore},
};
use std::{
    fs, io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const GRAIN: u64 = 64 << 10;

fn made(extension: &str, disk_type: DiskType, size_bytes: u64) -> (TempDir, PathBuf) {
    let dir = crate::rescuing::folder();
    let path = dir.path().canonicalize().unwrap().join(format!("vm.{extension}"));
    let disk_type = Some(disk_type).filter(|_| extension != "raw");
    create(&path, &CreateRequest { size_bytes: Some(size_bytes), disk_type, ..CreateRequest::default() }).unwrap();
    (dir, path)
}

fn open(path: &Path, writable: bool) -> Arc<Disk> {
    Disk::open(path, &OpenOptions { writable, ..OpenOptions::default() }).unwrap()
}

fn blocking(disk: &Disk) -> Blocking {
    Blocking::open(disk, EngineKind::Auto).unwrap()
}

/// A client that holds a point goes on with no other one of its name.
#[test]
fn a_point_that_is_started_again_is_another_one() {
    let (_dir, path) = made("vhdx", DiskType::Dynamic, 64 * MIB);
    let disk = open(&path, true);
    let mut io = blocking(&disk);
    let asked = |disk: &Disk, point: &TrackedPoint| {
        let mut parts = Vec::new();
        BlockDevice::changed_since(disk, point, 0..64 * MIB, 100, &mut parts).map(|()| parts)
    };
    disk.start_tracking("full").unwrap();
    let first = BlockDevice::tracked_points(&*disk).remove(0);
    io.write(MIB, &[1; 512], false).unwrap();
    assert_eq!(asked(&disk, &first).unwrap().len(), 1);
    disk.stop_tracking("full").unwrap();
    disk.start_tracking("full").unwrap();
    io.write(2 * MIB, &[1; 512], false).unwrap();
    assert!(asked(&disk, &first).unwrap_err().to_string().contains("no point \"full\""));
    let second = BlockDevice::tracked_points(&*disk).remove(0);
    assert_eq!(second.name, first.name);
    let grain = 2 * MIB..2 * MIB + GRAIN;
    assert!(asked(&disk, &second).unwrap() == [grain.clone()]);
    // The id is that of the point, not that of the process.
    drop(io);
    disk.close().unwrap();
    drop(disk);
    let again = open(&path, false);
    assert_eq!(BlockDevice::tracked_points(&*again), std::slice::from_ref(&second));
    assert!(asked(&again, &second).unwrap() == [grain]);
    assert!(asked(&again, &first).is_err());
}

/// A copy that was made in the same session, before a point, and is put back in place after a
/// crash: what has changed since the point is not what has changed since the copy.
#[test]
fn a_copy_from_before_the_point_is_known_after_a_crash() {
    let (_dir, path) = made("vhdx", DiskType::Fixed, 8 * MIB);
    let disk = open(&path, true);
    let mut io = blocking(&disk);
    disk.start_tracking("one").unwrap();
    io.write(MIB, &[1; 4096], true).unwrap();
    let copy = fs::read(&path).unwrap();
    io.write(2 * MIB, &[2; 4096], true).unwrap();
    disk.start_tracking("two").unwrap();
    io.write(3 * MIB, &[3; 4096], true).unwrap();
    // As after a crash: the session has not ended, and another process reads the files.
    let look = || {
        let options = OpenOptions { force_share: true, ..OpenOptions::default() };
        Disk::open(&path, &options).unwrap().changed_since("two").unwrap()
    };
    let changed = look();
    assert_eq!(changed.everything(), None);
    assert!(changed.ranges().any(|range| range.contains(&(3 * MIB))));
    let now = fs::read(&path).unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&copy, 0).unwrap();
    let changed = look();
    assert!(changed.everything().is_some_and(|why| why.contains("identity")), "{:?}", changed.everything());
    file.write_all_at(&now, 0).unwrap();
    drop(io);
    disk.close().unwrap();
}

/// A point is recorded when the clock of the file system has gone on since the last write, also if
/// that was another program's: its next write gets another time.
#[test]
fn the_last_write_of_another_program_is_settled_too() {
    let (_dir, path) = made("raw", DiskType::Fixed, 8 * MIB);
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[1; 512], 0).unwrap();
    let disk = open(&path, true);
    disk.start_tracking("one").unwrap();
    disk.close().unwrap();
    let modified = file.metadata().unwrap().modified().unwrap();
    let since = SystemTime::now().duration_since(modified).unwrap();
    assert!(since >= Duration::from_millis(12), "{since:?}");
}

/// Files whose calls to the file of the points are counted.
#[derive(Debug, Default)]
struct Counting {
    calls: Arc<[AtomicU64; 3]>,
}

#[derive(Debug)]
struct Counted {
    inner: Arc<dyn Store>,
    calls: Arc<[AtomicU64; 3]>,
}

impl ForwardingStore for Counted {
    fn inner(&self) -> &dyn Store {
        &*self.inner
    }
    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.calls[0].fetch_add(1, Ordering::Relaxed);
        self.inner.write_at(buf, offset_bytes)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.calls[1].fetch_add(1, Ordering::Relaxed);
        self.inner.sync_data()
    }
    fn write_durable_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.calls[2].fetch_add(1, Ordering::Relaxed);
        self.inner.write_durable_at(buf, offset_bytes)
    }
}

impl ForwardingFileSystem for Counting {
    fn open(&self, path: &Path, options: &diskwright_store::OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        let inner = LocalFiles.open(path, options)?;
        let is_tracks = path.to_string_lossy().contains(".tracks");
        Ok(if is_tracks { Arc::new(Counted { inner, calls: Arc::clone(&self.calls) }) } else { inner })
    }
}

/// A mark is one system call, and a write to a marked range is none.
#[test]
fn a_mark_is_one_durable_write() {
    let (_dir, path) = made("vhdx", DiskType::Fixed, 512 * MIB);
    let files = Counting::default();
    let calls = Arc::clone(&files.calls);
    let options = OpenOptions { writable: true, files: Files::new(Arc::new(files)), ..OpenOptions::default() };
    let disk = Disk::open(&path, &options).unwrap();
    disk.start_tracking("one").unwrap();
    let mut io = blocking(&disk);
    io.write(0, &[1; 4096], false).unwrap();
    io.write(MIB, &[1; 4096], false).unwrap();
    let count = || [0, 1, 2].map(|call| calls[call].load(Ordering::Relaxed));
    let before = count();
    for run in 1..=20 {
        io.write(run * 16 * MIB, &[1; 4096], false).unwrap();
        io.write(run * 16 * MIB + GRAIN, &[1; 4096], false).unwrap();
    }
    let after = count();
    assert_eq!([0, 1, 2].map(|call| after[call] - before[call]), [0, 0, 20]);
    drop(io);
    disk.close().unwrap();
}

/// Writes at random places until it is stopped.
fn load(disk: &Disk, size_bytes: u64, stop: &AtomicBool) {
    let mut io = blocking(disk);
    let mut number = 7_u64;
    while !stop.load(Ordering::Relaxed) {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at = (number >> 33) % (size_bytes / 512 - 8) * 512;
        match number >> 60 {
            0 => io.discard(at, 4096).unwrap(),
            1 => io.write_zeroes(at, 4096).unwrap(),
            _ => io.write(at, &[(number >> 50) as u8; 4096], false).unwrap(),
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Ten increments of a disk under load, each from one snapshot to the next. What is restored is the
/// disk at the moment of the snapshot, which the frozen image still shows.
#[test]
fn increments_between_snapshots_under_load_restore_each_moment() {
    const SIZE: u64 = 4 * MIB;
    for extension in ["vhdx", "vhd"] {
        let (dir, path) = made(extension, DiskType::Dynamic, SIZE);
        let disk = open(&path, true);
        let copy = dir.path().join(format!("copy.{extension}"));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| load(&disk, SIZE, &stop));
            for increment in 0..=10 {
                let (name, before) = (format!("p{increment}"), format!("p{}", increment.max(1) - 1));
                let frozen = disk.snapshot_tracked(&name, Some(&name), false, &mut ()).unwrap().parent;
                if increment == 0 {
                    fs::copy(&frozen, &copy).unwrap();
                    std::thread::sleep(Duration::from_millis(5));
                    continue;
                }
                // What a process has to tell; the file of the points is in use.
                let changed = disk.changed_between(&before, &name).unwrap();
                assert_eq!(changed.everything(), None);
                let points = disk.points().unwrap();
                let point = |name: &str| points.iter().find(|point| point.name == name).unwrap().clone();
                let image = open(&frozen, false);
                let mut since =
                    SincePoint::of_frozen((image, frozen.clone()), &path, point(&before), (&point(&name), changed))
                        .unwrap();
                let out = dir.path().join(format!("{name}.dwdiff"));
                let export = since.export(EngineKind::Auto, &Files::default());
                export.to_file(&out, false, &mut |_, _| true).unwrap();
                let done =
                    apply_export(Increment::File(&out), &copy, &ApplyOptions::default(), &mut |_, _| true).unwrap();
                assert!(!done.was_applied, "{extension}: {name}");
                assert!(read_all(&copy) == read_all(&frozen), "{extension}: {name} is not the moment of its snapshot");
                disk.stop_tracking(&before).unwrap();
            }
            stop.store(true, Ordering::Relaxed);
        });
        disk.close().unwrap();
    }
}

/// From one point to a later one of a disk that is not in use.
#[test]
fn what_has_changed_between_two_points() {
    let (_dir, path) = made("vhdx", DiskType::Dynamic, 64 * MIB);
    let disk = open(&path, true);
    let mut io = blocking(&disk);
    disk.snapshot_tracked("a", Some("a"), false, &mut ()).unwrap();
    io.write(MIB, &[1; 512], false).unwrap();
    disk.snapshot_tracked("b", Some("b"), false, &mut ()).unwrap();
    io.write(2 * MIB, &[2; 512], false).unwrap();
    disk.start_tracking("c").unwrap();
    io.write(3 * MIB, &[3; 512], false).unwrap();
    drop(io);
    disk.close().unwrap();
    drop(disk);
    let disk = open(&path, false);
    let ranges = |from: &str, to: &str| disk.changed_between(from, to).unwrap().ranges().collect::<Vec<_>>();
    let grain = |at: u64| at * MIB..at * MIB + GRAIN;
    assert!(ranges("a", "b") == [grain(1)] && ranges("b", "c") == [grain(2)]);
    assert!(ranges("a", "c") == [grain(1), grain(2)]);
    for (from, to) in [("b", "a"), ("a", "x"), ("x", "a")] {
        let error = disk.changed_between(from, to).unwrap_err().to_string();
        assert!(error.contains("with a later point"), "{error}");
    }
    let opened = diskwright_disk::Opened::Disk(Arc::clone(&disk));
    let [result, base] = SincePoint::between(&opened, &path, "a", "b").unwrap().states();
    assert!(result.linkage_id.is_some() && base.linkage_id.is_some() && result.linkage_id != base.linkage_id);
    // Nothing was frozen at c.
    let error = SincePoint::between(&opened, &path, "b", "c").unwrap_err().to_string();
    assert!(error.contains("no image of it has the contents") && error.contains("together with a snapshot"), "{error}");
}
