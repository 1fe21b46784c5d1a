//! Frozen images of a disk in use are merged: random chains under load against a model, names,
//! locks, merges that were stopped, and refusals.

use crate::common::read_all;
use diskwright_disk::{
    CreateRequest, Disk, DiskError, KeptName, MergeOptions, Merged, OpenOptions, Result, check, create, merge,
};
use diskwright_image::Severity;
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const SECTOR: u64 = 512;

fn folder() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().canonicalize().unwrap();
    (dir, path)
}

fn open(path: &Path, writable: bool) -> Result<Arc<Disk>> {
    Disk::open(path, &OpenOptions { writable, ..OpenOptions::default() })
}

fn blocking(disk: &Disk) -> Blocking {
    Blocking::open(disk, EngineKind::Auto).unwrap()
}

fn write(path: &Path, offset_bytes: u64, bytes: &[u8]) {
    let disk = open(path, true).unwrap();
    blocking(&disk).write(offset_bytes, bytes, false).unwrap();
    disk.close().unwrap();
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn sound(path: &Path) {
    let checked = check(path, &OpenOptions::default()).unwrap();
    assert!(checked.report.worst() < Some(Severity::Corrupt), "{}: {:?}", path.display(), checked.report.findings);
    assert!(checked.broken_link.is_none(), "{}: {:?}", path.display(), checked.broken_link);
}

fn live(disk: &Disk, path: &Path, options: &MergeOptions) -> Result<Merged> {
    disk.merge(path, options, &mut |_, _| true)
}

/// Numbers that look random.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }

    fn of<T: Copy>(&mut self, among: &[T]) -> T {
        among[self.below(among.len() as u64) as usize]
    }
}

/// One random request on `range` of the disk, and on the model of that range.
fn act(io: &mut Blocking, dice: &mut Dice, start_bytes: u64, model: &mut [u8]) {
    let sectors = model.len() as u64 / SECTOR;
    let longest = dice.of(&[8, 64, 2048, 6000]);
    let first = dice.below(sectors);
    let count = (dice.below(longest) + 1).min(sectors - first);
    let (from, to) = ((first * SECTOR) as usize, ((first + count) * SECTOR) as usize);
    let at = start_bytes + from as u64;
    match dice.below(8) {
        0 => {
            io.discard(at, (to - from) as u64).unwrap();
            model[from..to].fill(0);
        }
        1 => {
            io.write_zeroes(at, (to - from) as u64).unwrap();
            model[from..to].fill(0);
        }
        2..=4 => {
            let mut found = vec![0xEE; to - from];
            io.read(at, &mut found).unwrap();
            let differs = found.iter().zip(&model[from..to]).position(|(found, held)| found != held);
            assert_eq!(differs.map(|byte| at + byte as u64), None, "reads otherwise than was written");
        }
        kind => {
            let stamp = dice.below(255) as u8 + 1;
            let bytes: Vec<u8> = (0..to - from).map(|byte| stamp ^ (byte / 512) as u8).collect();
            io.write(at, &bytes, kind == 7).unwrap();
            model[from..to].copy_from_slice(&bytes);
        }
    }
}

/// A chain of `layers` images with blocks of any of these sizes, each with data of its own. Returns
/// the images, the base first, and what the top shows.
fn chain(dir: &Path, extension: &str, layers: usize, dice: &mut Dice) -> (Vec<PathBuf>, Vec<u8>) {
    let block_sizes: &[u32] =
        if extension == "vhdx" { &[1 << 20, 2 << 20, 4 << 20] } else { &[64 << 10, 512 << 10, 2 << 20] };
    let (mut paths, mut model) = (Vec::<PathBuf>::new(), vec![0; 12 * MIB as usize]);
    for number in 0..layers {
        let path = dir.join(format!("disk-{number}.{extension}"));
        // Some children are larger than their parents.
        if number > 0 && dice.below(3) == 0 {
            model.resize(model.len() + MIB as usize, 0);
        }
        let request = CreateRequest {
            size_bytes: Some(model.len() as u64),
            parent: paths.last().cloned(),
            block_bytes: Some(dice.of(block_sizes)),
            ..CreateRequest::default()
        };
        create(&path, &request).unwrap();
        paths.push(path.clone());
        let disk = open(&path, true).unwrap();
        let mut io = blocking(&disk);
        for _ in 0..dice.below(24) {
            act(&mut io, dice, 0, &mut model);
        }
        drop(io);
        disk.close().unwrap();
    }
    (paths, model)
}

/// Stops the clients, also after a failed assertion.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Clients write, discard and read all the time while frozen images are merged into ancestors, in
/// any order, until one frozen image is left. Some merges are stopped and called again.
fn under_load(extension: &str, seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let (_dir, dir) = folder();
        let mut dice = Dice(seed * 7919 + 17);
        let layers = 3 + dice.below(3) as usize;
        let (paths, mut model) = chain(&dir, extension, layers, &mut dice);
        let top = paths.last().unwrap().clone();
        let disk = open(&top, true).unwrap();
        if dice.below(2) == 0 {
            // A former top, which this process has written.
            blocking(&disk).write(0, &[0xAB; 4096], false).unwrap();
            model[..4096].fill(0xAB);
            disk.snapshot("frozen", false, &mut ()).unwrap();
        }
        let stop = AtomicBool::new(false);
        let half = model.len() / 2 / 4096 * 4096;
        let (low, high) = model.split_at_mut(half);
        thread::scope(|scope| {
            for (start_bytes, model) in [(0, low), (half as u64, high)] {
                let (disk, stop, mut dice) = (&disk, &stop, Dice(seed + start_bytes + 1));
                scope.spawn(move || {
                    let mut io = blocking(disk);
                    while !stop.load(Ordering::Relaxed) {
                        act(&mut io, &mut dice, start_bytes, model);
                    }
                });
            }
            // Also walks of the extents, which belong to no queue.
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    disk.extents(0, disk.geometry().size_bytes, &mut Vec::new()).unwrap();
                }
            });
            let _stop = Stop(&stop);
            while disk.layers().len() > 2 {
                let before: Vec<PathBuf> = disk.layers().iter().map(|layer| layer.path.clone()).collect();
                let from = 1 + dice.below(before.len() as u64 - 2) as usize;
                let into = from + 1 + dice.below((before.len() - from - 1) as u64) as usize;
                let keep = if dice.below(2) == 0 { KeptName::Childs } else { KeptName::Parents };
                let options = MergeOptions {
                    into: Some(before[into].clone()),
                    keep,
                    no_reflink: dice.below(2) == 0,
                    ..MergeOptions::default()
                };
                if dice.below(3) == 0 {
                    let mut calls = dice.below(3);
                    let stopped = disk.merge(&before[from], &options, &mut |_, _| {
                        calls = calls.wrapping_sub(1);
                        calls != 0
                    });
                    match stopped {
                        Err(DiskError::Stopped) => {}
                        // It was done before it could be stopped.
                        done => {
                            done.unwrap();
                            continue;
                        }
                    }
                }
                let before: Vec<PathBuf> = disk.layers().iter().map(|layer| layer.path.clone()).collect();
                let from = before.iter().position(|path| *path == before[from]).unwrap();
                let Some(into) = before.iter().position(|path| Some(path) == options.into.as_ref()) else { break };
                let done = live(&disk, &before[from], &options).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
                let kept = if keep == KeptName::Childs { &before[from] } else { &before[into] };
                assert_eq!((&done.disk, &done.target), (kept, &before[into]));
                let mut wanted = before.clone();
                wanted.splice(from..=into, [kept.clone()]);
                let now: Vec<PathBuf> = disk.layers().iter().map(|layer| layer.path.clone()).collect();
                assert_eq!(now, wanted, "seed {seed}");
            }
        });
        disk.close().unwrap();
        let left = disk.layers().iter().map(|layer| layer.path.clone()).collect::<Vec<_>>();
        drop(disk);
        assert_eq!(names(&dir).len(), left.len());
        assert!(read_all(&top) == model, "seed {seed}: the disk reads otherwise when it is opened again");
        left.iter().for_each(|path| sound(path));
        // It can be written, which checks the time stamps of a VHD.
        write(&top, 0, &[1; 512]);
    }
}

#[test]
fn clients_of_a_vhdx_read_what_they_wrote_while_its_images_are_merged() {
    under_load("vhdx", 0..14);
}

#[test]
fn clients_of_a_vhd_read_what_they_wrote_while_its_images_are_merged() {
    under_load("vhd", 100..114);
}

/// A chain of three images, each with a block of its own; the last one is not open.
fn three(extension: &str) -> (TempDir, [PathBuf; 3]) {
    let (dir, folder) = folder();
    let paths = ["base", "middle", "top"].map(|name| folder.join(format!("{name}.{extension}")));
    for (number, path) in paths.iter().enumerate() {
        let parent = number.checked_sub(1).map(|below| paths[below].clone());
        create(path, &CreateRequest { size_bytes: Some(16 * MIB), parent, ..CreateRequest::default() }).unwrap();
        write(path, number as u64 * 4 * MIB, &vec![number as u8 + 1; MIB as usize]);
        // The child records this time, so every later change of the file shows.
        let file = fs::File::options().write(true).open(path).unwrap();
        file.set_modified(std::time::SystemTime::now() - std::time::Duration::from_secs(1000)).unwrap();
    }
    (dir, paths)
}

fn contents() -> Vec<u8> {
    let mut bytes = vec![0; 16 * MIB as usize];
    for number in 0..3 {
        bytes[number * 4 * MIB as usize..][..MIB as usize].fill(number as u8 + 1);
    }
    bytes
}

fn shown(disk: &Disk) -> Vec<u8> {
    let mut bytes = vec![0xEE; 16 * MIB as usize];
    blocking(disk).read(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn images_are_locked_while_they_are_merged() {
    for extension in ["vhdx", "vhd"] {
        let (dir, [base, middle, top]) = three(extension);
        let disk = open(&top, true).unwrap();
        let reader = open(&base, false).unwrap();
        // Someone reads the parent.
        let error = live(&disk, &middle, &MergeOptions::default()).unwrap_err();
        assert!(matches!(&error, DiskError::InUse { path, .. } if *path == base), "{error}");
        drop(reader);
        let reader = open(&middle, false).expect("a refused merge leaves the locks of a reader");
        drop(reader);
        let mut tries = 0;
        let done = disk
            .merge(&middle, &MergeOptions::default(), &mut |_, _| {
                for image in [&middle, &base] {
                    assert!(matches!(open(image, false), Err(DiskError::InUse { .. })), "{}", image.display());
                }
                tries += 1;
                true
            })
            .unwrap();
        assert!(tries > 0);
        assert_eq!((&done.disk, &done.merged[..], &done.relinked[..]), (&base, &[middle][..], &[top.clone()][..]));
        assert_eq!(names(dir.path()).len(), 2);
        assert!(shown(&disk) == contents(), "{extension}");
        // Afterwards the parent has the lock of a reader again.
        drop(open(&base, false).unwrap());
        let writing = OpenOptions { writable: true, allow_parent_write: true, ..OpenOptions::default() };
        assert!(matches!(Disk::open(&base, &writing), Err(DiskError::InUse { .. })));
        // And again: the disk goes on, is frozen, and what was frozen is merged. A queue that is
        // idle all the time still has the files of before open.
        let mut idle = blocking(&disk);
        idle.read(0, &mut [0; 512]).unwrap();
        disk.snapshot("next", false, &mut ()).unwrap();
        blocking(&disk).write(12 * MIB, &[9; 4096], false).unwrap();
        let frozen = disk.layers()[1].path.clone();
        live(&disk, &frozen, &MergeOptions::default()).unwrap();
        disk.snapshot("last", false, &mut ()).unwrap();
        live(&disk, &disk.layers()[1].path.clone(), &MergeOptions::default()).unwrap();
        drop((idle, disk));
        let mut expected = contents();
        expected[12 * MIB as usize..][..4096].fill(9);
        assert!(read_all(&top) == expected, "{extension}");
        write(&top, 0, &[1; 512]);
    }
}

/// The marks of a merge change the file of the merged image, and its child has recorded when it was
/// last changed.
#[test]
fn a_merge_that_was_stopped_leaves_a_disk_that_can_be_written_and_merged_offline() {
    for extension in ["vhdx", "vhd"] {
        for stops_at in 1..3 {
            let (dir, [base, middle, top]) = three(extension);
            let disk = open(&top, true).unwrap();
            let mut calls = 0;
            let stopped =
                disk.merge(&middle, &MergeOptions { no_reflink: true, ..MergeOptions::default() }, &mut |_, _| {
                    calls += 1;
                    calls < stops_at
                });
            // The second call may be the last one, which cannot stop it any more.
            if stopped.is_err() {
                assert!(matches!(stopped, Err(DiskError::Stopped)), "{stopped:?}");
                assert!(shown(&disk) == contents());
                drop(disk);
                write(&top, 8 * MIB, &[3; 512]);
                assert!(read_all(&top) == contents());
                merge(&middle, &MergeOptions::default(), &mut |_, _| true).unwrap();
            } else {
                drop(disk);
            }
            assert_eq!(names(dir.path()).len(), 2);
            assert!(read_all(&top) == contents());
            write(&top, 8 * MIB, &[3; 512]);
            sound(&base);
        }
    }
}

/// As after a power cut between the change of the top's link and the removal of the merged image.
#[test]
fn the_same_merge_removes_an_image_that_only_its_name_is_left_of() {
    for extension in ["vhdx", "vhd"] {
        let (dir, [base, middle, top]) = three(extension);
        let disk = open(&top, true).unwrap();
        let kept = dir.path().join("kept");
        fs::hard_link(&middle, &kept).unwrap();
        live(&disk, &middle, &MergeOptions::default()).unwrap();
        fs::rename(&kept, &middle).unwrap();
        let done = live(&disk, &middle, &MergeOptions::default()).unwrap();
        assert_eq!((&done.disk, &done.merged[..], done.copied_bytes), (&base, &[middle.clone()][..], 0));
        assert_eq!(names(dir.path()).len(), 2);
        assert!(shown(&disk) == contents());
        drop(disk);
        assert!(read_all(&top) == contents());
        write(&top, 0, &[1; 512]);
    }
}

/// The image that is written goes last, after the frozen ones below it.
#[test]
fn a_whole_chain_is_merged_into_its_base() {
    for extension in ["vhdx", "vhd"] {
        let (dir, [base, _, top]) = three(extension);
        let disk = open(&top, true).unwrap();
        let into_base = MergeOptions { into: Some(base.clone()), ..MergeOptions::default() };
        let planned = live(&disk, &top, &MergeOptions { dry_run: true, ..into_base.clone() }).unwrap();
        assert_eq!((planned.merged.len(), disk.layers().len()), (2, 3), "{planned:?}");
        let done = live(&disk, &top, &into_base).unwrap();
        assert_eq!((&done.disk, &done.target, done.merged.len()), (&top, &base, 2), "{done:?}");
        assert_eq!((names(dir.path()).len(), disk.layers().len()), (1, 1));
        assert!(shown(&disk) == contents());
        drop(disk);
        assert!(read_all(&top) == contents());
        write(&top, 0, &[1; 512]);
    }
}

#[test]
fn images_that_cannot_be_merged_in_use_say_why() {
    let (dir, [base, middle, top]) = three("vhdx");
    let disk = open(&top, true).unwrap();
    let plain = MergeOptions::default();
    let refused = |path: &Path, options: &MergeOptions| live(&disk, path, options).unwrap_err().to_string();
    assert!(refused(&base, &plain).contains("no parent"));
    let upwards = MergeOptions { into: Some(middle.clone()), ..MergeOptions::default() };
    assert!(refused(&base, &upwards).contains("not among its ancestors"));
    let other = dir.path().join("other.vhdx");
    create(&other, &CreateRequest { size_bytes: Some(MIB), ..CreateRequest::default() }).unwrap();
    assert!(refused(&other, &plain).contains("not in the chain of"));
    assert!(refused(&dir.path().join("nothing.vhdx"), &plain).contains("nothing.vhdx"));
    // A child that is not in the chain.
    let sibling = dir.path().join("sibling.vhdx");
    create(&sibling, &CreateRequest { parent: Some(base.clone()), ..CreateRequest::default() }).unwrap();
    let error = refused(&middle, &plain);
    assert!(error.contains("sibling.vhdx") && error.contains("would read other data"), "{error}");
    fs::remove_file(&sibling).unwrap();
    // Another child of the merged image gets a link to the parent, unless a program has it open.
    create(&sibling, &CreateRequest { parent: Some(middle.clone()), ..CreateRequest::default() }).unwrap();
    let reader = open(&sibling, false).unwrap();
    assert!(refused(&middle, &plain).contains("in use"));
    drop(reader);
    // A dry run changes nothing.
    let before = fs::read(&middle).unwrap();
    let dry = live(&disk, &middle, &MergeOptions { dry_run: true, ..MergeOptions::default() }).unwrap();
    assert_eq!((dry.data_bytes, dry.copied_bytes, dry.relinked.len()), (MIB, 0, 2));
    assert!(fs::read(&middle).unwrap() == before && disk.layers().len() == 3);
    // A folder in which no name can be removed.
    if std::process::Command::new("chattr").arg("+i").arg(dir.path()).status().is_ok_and(|status| status.success()) {
        let error = refused(&middle, &plain);
        std::process::Command::new("chattr").arg("-i").arg(dir.path()).status().unwrap();
        assert!(error.contains("remove images that were merged"), "{error}");
        assert!(fs::read(&middle).unwrap() == before && disk.layers().len() == 3);
    } else {
        println!("skipped: a folder that cannot be changed: no chattr here");
    }
    live(&disk, &middle, &plain).unwrap();
    assert!(read_all(&sibling)[..MIB as usize] == contents()[..MIB as usize]);
    drop(disk);
    let disk = open(&top, false).unwrap();
    let error = live(&disk, &base, &plain).unwrap_err().to_string();
    assert!(error.contains("read-only"), "{error}");
}
