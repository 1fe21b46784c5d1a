//! Snapshots of a disk in use: names, locks, contents, the moment of the snapshot, refusals.

use diskwright_disk::{
    AbsorbOptions, CreateRequest, Disk, DiskError, Layer, OpenOptions, Result, Snapshot, SnapshotOptions,
    SnapshotWatch, create, snapshot,
};
use diskwright_image::Format;
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 256 * MIB;

fn made(extension: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().canonicalize().unwrap().join(format!("vm.{extension}"));
    create(&path, &CreateRequest { size_bytes: Some(SIZE), ..CreateRequest::default() }).unwrap();
    (dir, path)
}

fn open(path: &Path, writable: bool) -> Result<Arc<Disk>> {
    Disk::open(path, &OpenOptions { writable, ..OpenOptions::default() })
}

fn blocking(disk: &Disk) -> Blocking {
    Blocking::open(disk, EngineKind::Auto).unwrap()
}

fn read(path: &Path, offset_bytes: u64) -> u8 {
    let disk = open(path, false).unwrap();
    let mut found = [0; 4096];
    blocking(&disk).read(offset_bytes, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == found[0]));
    found[0]
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_disk_in_use_goes_on_in_a_child_that_has_its_name() {
    for (extension, frozen) in [("vhdx", "vm_one.avhdx"), ("vhd", "vm_one.avhd")] {
        let (dir, path) = made(extension);
        let disk = open(&path, true).unwrap();
        let mut io = blocking(&disk);
        io.write(0, &[1; 4096], false).unwrap();
        io.write(2 * MIB, &[1; 4096], false).unwrap();
        let dry = disk.snapshot("one", true, &mut ()).unwrap();
        assert_eq!(names(dir.path()), [format!("vm.{extension}")], "a dry run changes nothing");
        let done = disk.snapshot("one", false, &mut ()).unwrap();
        assert_eq!(done, dry);
        assert_eq!(
            done,
            Snapshot {
                disk: path.clone(),
                parent: done.parent.clone(),
                frozen: Some(done.parent.clone()),
                warnings: Vec::new()
            }
        );
        assert_eq!(names(dir.path()), [format!("vm.{extension}"), frozen.to_owned()]);
        io.write(0, &[2; 4096], false).unwrap();
        io.write(4 * MIB, &[2; 4096], true).unwrap();
        // The frozen image can be read by others, the disk cannot; nobody writes to either.
        let frozen = &done.parent;
        assert_eq!((read(frozen, 0), read(frozen, 2 * MIB), read(frozen, 4 * MIB)), (1, 1, 0), "{extension}");
        assert!(matches!(open(&path, false), Err(DiskError::InUse { .. })));
        assert!(matches!(open(frozen, true), Err(DiskError::InUse { .. } | DiskError::HasChildren { .. })));
        // Layers and messages have the new names.
        let layers = disk.layers();
        let shown = |layer: &Layer| (layer.path.clone(), layer.image.store().name().to_owned());
        assert_eq!(shown(&layers[0]), (path.clone(), path.clone()));
        assert_eq!(shown(&layers[1]), (frozen.clone(), frozen.clone()));
        // Again, and after growth.
        disk.grow(2 * SIZE).unwrap();
        let second = disk.snapshot("two", false, &mut ()).unwrap();
        io.write(2 * SIZE - 4096, &[3; 4096], false).unwrap();
        drop(io);
        disk.close().unwrap();
        drop((layers, disk));
        assert_eq!((read(&path, 0), read(&path, 2 * MIB), read(&path, 4 * MIB)), (2, 1, 2), "{extension}");
        assert_eq!((read(&path, 2 * SIZE - 4096), read(&second.parent, 2 * SIZE - 4096)), (3, 0));
        // It opens for writing, which checks a VHD's time stamp of its parent.
        let disk = open(&path, true).unwrap();
        assert_eq!(disk.layers().len(), 3);
        if extension == "vhd" {
            for layer in &disk.layers()[..2] {
                let link = layer.image.parent_link().expect("it has a parent");
                assert!(link.modified_seconds.is_some_and(|seconds| seconds > 0), "the parent's time is recorded");
            }
        }
        drop(disk);
        snapshot(&path, &SnapshotOptions { name: "offline".into(), ..SnapshotOptions::default() }).unwrap();
    }
}

/// `qemu-img create` makes such files. Their last sector is padded by a store above the file.
#[test]
fn the_lock_of_a_file_that_ends_within_a_sector_changes_hands() {
    let (_dir, path) = made("qcow2");
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() + 8).unwrap();
    let disk = open(&path, true).unwrap();
    let mut io = blocking(&disk);
    // The file is not extended first, so it is padded as long as it is open.
    let frozen = disk.snapshot("one", false, &mut ()).unwrap().parent;
    assert_eq!(read(&frozen, 0), 0, "others may read the frozen image");
    assert_eq!(disk.layers()[1].image.store().name(), frozen);
    io.write(0, &[2; 4096], false).unwrap();
    disk.absorb(&AbsorbOptions::default(), &mut |_, _| true).unwrap();
    assert!(matches!(open(&path, false), Err(DiskError::InUse { .. })), "the parent has the lock of a writer");
    drop(io);
    disk.close().unwrap();
    drop(disk);
    assert_eq!(read(&path, 0), 2);
}

/// One thread writes to a block that is new, and when that has ended, another one writes the same
/// number in place. Whatever the moment of a snapshot: an image that has the second write has the
/// first one too.
#[test]
fn a_frozen_image_has_no_write_without_those_that_ended_before_it_began() {
    let (_dir, path) = made("vhdx");
    let disk = open(&path, true).unwrap();
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    let last_at = SIZE - 4096;
    blocking(&disk).write(last_at, &[0; 4096], false).unwrap();
    let frozen: Vec<PathBuf> = thread::scope(|scope| {
        // Space that is freed has grace periods of its own, which a snapshot must wait for.
        scope.spawn(|| {
            let mut io = blocking(&disk);
            while !stop.load(Ordering::Relaxed) {
                io.write(240 * MIB, &vec![7; 4 * MIB as usize], false).unwrap();
                io.discard(240 * MIB, 4 * MIB).unwrap();
                io.flush().unwrap();
            }
        });
        scope.spawn(|| {
            let (mut first, mut second) = (blocking(&disk), blocking(&disk));
            let mut number = 0u64;
            while !stop.load(Ordering::Relaxed) {
                number += 1;
                let mut sector = [0; 4096];
                sector[..8].copy_from_slice(&number.to_le_bytes());
                // Each of them is new in the present top from time to time.
                first.write(number % 50_000 * 4096, &sector, false).unwrap();
                second.write(last_at, &sector, false).unwrap();
                written.store(number, Ordering::Relaxed);
            }
        });
        let frozen = (0..16)
            .map(|number| {
                let from = written.load(Ordering::Relaxed);
                while written.load(Ordering::Relaxed) < from + 20 {
                    thread::yield_now();
                }
                disk.snapshot(&number.to_string(), false, &mut ()).unwrap().parent
            })
            .collect();
        stop.store(true, Ordering::Relaxed);
        frozen
    });
    let mut before = 0;
    for path in &frozen {
        let image = open(path, false).unwrap();
        let mut io = blocking(&image);
        let mut number_at = |offset_bytes| {
            let mut sector = [0; 4096];
            io.read(offset_bytes, &mut sector).unwrap();
            u64::from_le_bytes(sector[..8].try_into().unwrap())
        };
        let last = number_at(last_at);
        assert!(last >= before + 20, "{}: what had ended before is there", path.display());
        for number in last.saturating_sub(500).max(1)..=last {
            assert_eq!(number_at(number % 50_000 * 4096), number, "{}: it has {last}", path.display());
        }
        before = last;
    }
    drop(disk);
}

/// Threads write stamped blocks of their own all the time; nothing that was acknowledged is lost.
#[test]
fn nothing_is_lost_under_load() {
    for extension in ["vhdx", "vhd"] {
        let (_dir, path) = made(extension);
        let disk = open(&path, true).unwrap();
        let stop = AtomicBool::new(false);
        let held: Vec<Vec<u8>> = thread::scope(|scope| {
            let writers: Vec<_> = (0..3u64)
                .map(|share| {
                    let (disk, stop) = (&disk, &stop);
                    scope.spawn(move || {
                        let mut io = blocking(disk);
                        let mut held = vec![0u8; 256];
                        let mut turn = 0usize;
                        while !stop.load(Ordering::Relaxed) {
                            turn += 1;
                            let at = turn.wrapping_mul(2_654_435_761) % held.len();
                            held[at] = (turn % 251) as u8 + 1;
                            let offset = share * 64 * MIB + at as u64 * 8192;
                            io.write(offset, &[held[at]; 8192], turn.is_multiple_of(64)).unwrap();
                            let mut found = [0; 512];
                            io.read(offset + 512, &mut found).unwrap();
                            assert_eq!(found, [held[at]; 512], "its own write");
                        }
                        held
                    })
                })
                .collect();
            for number in 0..6 {
                thread::sleep(std::time::Duration::from_millis(30));
                disk.snapshot(&format!("s{number}"), false, &mut ()).unwrap();
            }
            stop.store(true, Ordering::Relaxed);
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        disk.close().unwrap();
        drop(disk);
        let disk = open(&path, false).unwrap();
        assert_eq!(disk.layers().len(), 7);
        let mut io = blocking(&disk);
        for (share, held) in held.iter().enumerate() {
            for (at, wanted) in held.iter().enumerate() {
                let mut found = [0; 8192];
                io.read(share as u64 * 64 * MIB + at as u64 * 8192, &mut found).unwrap();
                assert!(found.iter().all(|byte| byte == wanted), "{extension}: block {at} of thread {share}");
            }
        }
    }
}

/// Records what it is told, and stops or fails where it shall.
#[derive(Default)]
struct Watch {
    told: Vec<String>,
    stops_at: Option<u64>,
    refuses: bool,
}

impl SnapshotWatch for Watch {
    fn goes_on(&mut self, done: u64, total: u64) -> bool {
        self.told.push(format!("{done}/{total}"));
        self.stops_at != Some(done)
    }

    fn child_is_made(&mut self, identity: Option<(u64, u64)>) -> Result<()> {
        self.told.push(if identity.is_some() { "child".into() } else { "no identity".into() });
        match self.refuses {
            true => Err(DiskError::BadOptions { what: "not now".into(), hint: "later".into() }),
            false => Ok(()),
        }
    }

    fn quiesce(&mut self) {
        self.told.push("quiesce".into());
    }

    fn resume(&mut self) {
        self.told.push("resume".into());
    }
}

#[test]
fn a_snapshot_that_is_stopped_or_refused_changes_nothing() {
    let (dir, path) = made("vhdx");
    let disk = open(&path, true).unwrap();
    let mut io = blocking(&disk);
    io.write(0, &[1; 4096], false).unwrap();
    for (stops_at, refuses) in [(Some(1), false), (Some(2), false), (None, true)] {
        let mut watch = Watch { stops_at, refuses, ..Watch::default() };
        let error = disk.snapshot("one", false, &mut watch).unwrap_err();
        assert!(matches!(error, DiskError::Stopped) != refuses, "{error}");
        assert_eq!(names(dir.path()), ["vm.vhdx"], "{stops_at:?}");
        assert!(!watch.told.contains(&"quiesce".to_owned()));
        assert_eq!(disk.layers().len(), 1);
    }
    for (name, word) in [("a/b", "without slashes"), ("", "without slashes")] {
        let error = disk.snapshot(name, false, &mut ()).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    fs::write(dir.path().join("vm_taken.avhdx"), b"precious").unwrap();
    let error = disk.snapshot("taken", false, &mut ()).unwrap_err();
    assert!(matches!(error, DiskError::Exists { .. }), "{error}");
    assert_eq!(fs::read(dir.path().join("vm_taken.avhdx")).unwrap(), b"precious");
    // Once the names have changed, it is done whatever is answered.
    let mut watch = Watch { stops_at: Some(3), ..Watch::default() };
    disk.snapshot("one", false, &mut watch).unwrap();
    assert_eq!(watch.told, ["1/4", "2/4", "child", "3/4", "quiesce", "resume", "4/4"]);
    io.write(0, &[2; 4096], false).unwrap();
    // Another file took the name: the disk in use is no longer what the name leads to.
    fs::rename(&path, dir.path().join("away.vhdx")).unwrap();
    fs::copy(dir.path().join("away.vhdx"), &path).unwrap();
    let error = disk.snapshot("two", false, &mut ()).unwrap_err().to_string();
    assert!(error.contains("replaced by another file"), "{error}");
}

#[test]
fn disks_that_cannot_be_frozen_say_why() {
    let (_dir, raw) = made("raw");
    let error = open(&raw, true).unwrap().snapshot("one", false, &mut ()).unwrap_err().to_string();
    assert!(error.contains("convert it to VHDX first"), "{error}");
    let (_dir, path) = made("vhdx");
    let error = open(&path, false).unwrap().snapshot("one", false, &mut ()).unwrap_err().to_string();
    assert!(error.contains("read-only"), "{error}");
    let layers = open(&path, true).unwrap().layers().to_vec();
    let error = Disk::from_layers(layers, Vec::new()).unwrap().snapshot("one", false, &mut ()).unwrap_err().to_string();
    assert!(error.contains("without a file of its own"), "{error}");
    // An image that has a child already would be written below it.
    let child = path.with_file_name("child.vhdx");
    create(&child, &CreateRequest { parent: Some(path.clone()), ..CreateRequest::default() }).unwrap();
    let options = OpenOptions { writable: true, allow_parent_write: true, ..OpenOptions::default() };
    let error = Disk::open(&path, &options).unwrap().snapshot("one", false, &mut ()).unwrap_err();
    assert!(matches!(error, DiskError::HasChildren { .. }), "{error}");
    assert_eq!(Disk::open(&path, &OpenOptions::default()).unwrap().layers()[0].image.info().format, Format::Vhdx);
    assert_eq!(open(&path, false).unwrap().geometry().size_bytes, SIZE);
}

/// What a process that was killed between two steps leaves behind does not stand in the way.
#[test]
fn leftovers_of_a_snapshot_that_was_cut_off_go() {
    let (dir, path) = made("vhdx");
    let disk = open(&path, true).unwrap();
    blocking(&disk).write(0, &[1; 4096], false).unwrap();
    fs::write(dir.path().join(".vm.vhdx.new-child"), b"half of a child").unwrap();
    fs::hard_link(&path, dir.path().join("vm_cut.avhdx")).unwrap();
    disk.snapshot("one", false, &mut ()).unwrap();
    assert_eq!(names(dir.path()), ["vm.vhdx", "vm_one.avhdx"]);
    drop(disk);
    assert_eq!(read(&path, 0), 1);
}
