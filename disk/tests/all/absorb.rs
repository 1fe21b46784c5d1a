//! Merges of disks in use: random chains against a model while several queues work, names, locks,
//! refusals, merges that are stopped. `absorb_load.rs`: clients that leave the merge no rest.

use crate::common::read_all;
use diskwright_disk::{
    AbsorbOptions, Absorbed, CreateRequest, Disk, DiskError, MergeOptions, OpenOptions, Result, SnapshotWatch, check,
    create, merge,
};
use diskwright_image::{DiskType, Severity};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};
use tempfile::TempDir;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Each writer has the bytes of every third of these pieces, which end within blocks.
const PIECE: u64 = 328 * KIB;
const WRITERS: u64 = 3;

pub struct Dice(Xoshiro256PlusPlus);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(Xoshiro256PlusPlus::seed_from_u64(seed))
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.0.next_u64() % end
    }

    fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// A chain of a top and its parent.
#[derive(Debug, Clone, Copy)]
struct Shape {
    extension: &'static str,
    parent_type: DiskType,
    top_block: u64,
    parent_block: u64,
    size_bytes: u64,
    parent_size_bytes: u64,
}

pub fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

pub fn open(path: &Path) -> Result<Arc<Disk>> {
    Disk::open(path, &OpenOptions { writable: true, ..OpenOptions::default() })
}

pub fn blocking(disk: &Disk) -> Blocking {
    Blocking::open(disk, EngineKind::Auto).unwrap()
}

pub fn absorb(disk: &Disk) -> Result<Absorbed> {
    disk.absorb(&AbsorbOptions::default(), &mut |_, _| true)
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

/// Changes `path` and the model at random.
fn fill(path: &Path, model: &mut [u8], dice: &mut Dice, changes: u32) {
    let disk = open(path).unwrap();
    let mut io = blocking(&disk);
    let size_bytes = disk.geometry().size_bytes;
    for _ in 0..changes {
        change(&mut io, model, 0, 0..size_bytes, dice);
    }
    drop(io);
    disk.close().unwrap();
}

/// One change within a range. `model` begins at `model_start`.
fn change(io: &mut Blocking, model: &mut [u8], model_start: u64, range: std::ops::Range<u64>, dice: &mut Dice) {
    let sectors = (range.end - range.start) / 512;
    let first = dice.below(sectors);
    let most = if dice.percent(60) { 16 } else { sectors };
    let count = 1 + dice.below(most.min(sectors - first));
    let (at, len) = (range.start + first * 512, count * 512);
    let own = &mut model[(at - model_start) as usize..(at + len - model_start) as usize];
    match dice.below(10) {
        0 => {
            own.fill(0);
            io.write_zeroes(at, len).unwrap();
        }
        1 | 2 => {
            own.fill(0);
            io.discard(at, len).unwrap();
        }
        _ => {
            own.fill(1 + dice.below(255) as u8);
            io.write(at, own, dice.percent(10)).unwrap();
        }
    }
}

/// Makes a chain with random contents. Returns the disk, the parent and the contents.
fn make(dir: &Path, shape: Shape, dice: &mut Dice) -> (PathBuf, PathBuf, Vec<u8>) {
    let file = |name: &str| dir.canonicalize().unwrap().join(format!("{name}.{}", shape.extension));
    let (base, parent, top) = (file("base"), file("parent"), file("vm"));
    let mut model = vec![0; shape.parent_size_bytes as usize];
    let request = CreateRequest {
        size_bytes: Some(shape.parent_size_bytes),
        block_bytes: Some(shape.parent_block as u32),
        ..CreateRequest::default()
    };
    if shape.parent_type == DiskType::Differencing {
        create(&base, &CreateRequest { block_bytes: None, ..request.clone() }).unwrap();
        fill(&base, &mut model, dice, 12);
        let own = CreateRequest { parent: Some(base), size_bytes: None, ..request };
        create(&parent, &own).unwrap();
    } else {
        let block_bytes =
            request.block_bytes.filter(|_| shape.parent_type != DiskType::Fixed || shape.extension == "vhdx");
        create(&parent, &CreateRequest { disk_type: Some(shape.parent_type), block_bytes, ..request }).unwrap();
    }
    fill(&parent, &mut model, dice, 12);
    let request = CreateRequest {
        parent: Some(parent.clone()),
        size_bytes: Some(shape.size_bytes),
        block_bytes: Some(shape.top_block as u32),
        ..CreateRequest::default()
    };
    create(&top, &request).unwrap();
    model.resize(shape.size_bytes as usize, 0);
    fill(&top, &mut model, dice, 16);
    (top, parent, model)
}

/// One writer: changes its own pieces and reads them, until `stop`.
fn work(disk: &Disk, model: &mut [u8], number: u64, stop: &AtomicBool, dice: &mut Dice) {
    let mut io = blocking(disk);
    let size_bytes = model.len() as u64;
    let pieces: Vec<u64> = (0..size_bytes.div_ceil(PIECE)).filter(|piece| piece % WRITERS == number).collect();
    while !stop.load(Ordering::Relaxed) {
        let start = pieces[dice.below(pieces.len() as u64) as usize] * PIECE;
        let end = (start + PIECE).min(size_bytes);
        change(&mut io, model, 0, start..end, dice);
        if dice.percent(30) {
            let mut found = vec![0xEE; (end - start) as usize];
            io.read(start, &mut found).unwrap();
            same(&found, &model[start as usize..end as usize], start);
        }
        if dice.percent(5) {
            io.flush().unwrap();
        }
    }
}

fn same(found: &[u8], expected: &[u8], start: u64) {
    if let Some(at) = found.iter().zip(expected).position(|(found, expected)| found != expected) {
        panic!("byte {} is {}, expected {}", start + at as u64, found[at], expected[at]);
    }
}

/// Runs writers while `with` runs. Returns what the disk holds.
fn among_writers<T>(disk: &Disk, model: &[u8], seed: u64, with: impl FnOnce() -> T) -> (T, Vec<u8>) {
    let stop = AtomicBool::new(false);
    let mut merged = model.to_vec();
    let outcome = thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|number| {
                let (mut own, stop) = (model.to_vec(), &stop);
                scope.spawn(move || {
                    work(disk, &mut own, number, stop, &mut Dice::new(seed ^ (number + 1) << 32));
                    own
                })
            })
            .collect();
        let outcome = with();
        stop.store(true, Ordering::Relaxed);
        for (number, writer) in (0..).zip(writers) {
            let own = writer.join().unwrap();
            for at in (0..merged.len()).filter(|at| *at as u64 / PIECE % WRITERS == number) {
                merged[at] = own[at];
            }
        }
        outcome
    });
    (outcome, merged)
}

/// A merge among writers, sometimes stopped a few times before; then everything is compared.
fn run(shape: Shape, seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let mut dice = Dice::new(seed);
        let dir = folder();
        let (path, parent, mut model) = make(dir.path(), shape, &mut dice);
        let disk = open(&path).unwrap();
        for stopped in (0..dice.below(3u64)).rev() {
            let mut calls = 0;
            let (ended, written) = among_writers(&disk, &model, seed << 8 | stopped, || {
                disk.absorb(&AbsorbOptions::default(), &mut |_, _| {
                    calls += 1;
                    calls <= stopped
                })
            });
            model = written;
            if ended.is_ok() {
                break;
            }
            assert!(matches!(ended, Err(DiskError::Stopped)), "seed {seed}: {ended:?}");
            let (_, written) =
                among_writers(&disk, &model, seed << 9 | stopped, || thread::sleep(Duration::from_millis(5)));
            model = written;
        }
        if disk.layers()[0].path == path
            && disk.layers().len() == 2 + usize::from(shape.parent_type == DiskType::Differencing)
        {
            let (absorbed, written) = among_writers(&disk, &model, seed, || absorb(&disk));
            let absorbed = absorbed.unwrap();
            model = written;
            assert_eq!((&absorbed.disk, &absorbed.parent), (&path, &parent));
            assert!(absorbed.copied_bytes + absorbed.cloned_bytes <= absorbed.data_bytes + shape.size_bytes);
        }
        let (_, written) = among_writers(&disk, &model, seed + 1000, || thread::sleep(Duration::from_millis(5)));
        model = written;
        let layers = disk.layers();
        assert_eq!(layers.len(), 1 + usize::from(shape.parent_type == DiskType::Differencing));
        assert_eq!((layers[0].path.as_path(), layers[0].image.store().name()), (path.as_path(), path.as_path()));
        let mut found = vec![0xEE; model.len()];
        blocking(&disk).read(0, &mut found).unwrap();
        same(&found, &model, 0);
        disk.close().unwrap();
        drop((layers, disk));
        assert!(!parent.exists());
        sound(&path);
        same(&read_all(&path), &model, 0);
        // It opens for writing again.
        fill(&path, &mut model, &mut dice, 3);
    }
}

fn vhdx(parent_type: DiskType, top_mib: u64, parent_mib: u64) -> Shape {
    let (top_block, parent_block) = (top_mib * MIB, parent_mib * MIB);
    let size_bytes = 13 * MIB;
    Shape { extension: "vhdx", parent_type, top_block, parent_block, size_bytes, parent_size_bytes: size_bytes }
}

fn vhd(parent_type: DiskType, top_kib: u64, parent_kib: u64) -> Shape {
    let (top_block, parent_block) = (top_kib * KIB, parent_kib * KIB);
    let size_bytes = 6 * MIB + 8 * KIB;
    Shape { extension: "vhd", parent_type, top_block, parent_block, size_bytes, parent_size_bytes: size_bytes }
}

#[test]
fn a_vhdx_is_merged_among_writers() {
    run(vhdx(DiskType::Dynamic, 1, 1), 0..3);
    run(vhdx(DiskType::Differencing, 1, 1), 0..4);
    run(vhdx(DiskType::Fixed, 1, 1), 0..2);
}

#[test]
fn a_vhdx_is_merged_into_blocks_of_another_size() {
    run(vhdx(DiskType::Dynamic, 1, 4), 10..12);
    run(vhdx(DiskType::Differencing, 1, 4), 10..12);
    run(vhdx(DiskType::Differencing, 4, 1), 10..12);
    run(vhdx(DiskType::Dynamic, 4, 1), 10..12);
}

#[test]
fn a_vhd_is_merged_among_writers() {
    run(vhd(DiskType::Dynamic, 64, 64), 20..22);
    run(vhd(DiskType::Differencing, 64, 64), 20..22);
    run(vhd(DiskType::Differencing, 32, 256), 20..22);
    run(vhd(DiskType::Differencing, 256, 32), 20..22);
    run(vhd(DiskType::Fixed, 64, 64), 20..22);
}

#[test]
fn a_smaller_parent_gets_the_size_of_the_disk() {
    for shape in [vhdx(DiskType::Dynamic, 1, 2), vhd(DiskType::Dynamic, 64, 64)] {
        run(Shape { parent_size_bytes: 4 * MIB + 8 * KIB, ..shape }, 30..32);
    }
}

fn child(parent: &Path, name: &str) -> PathBuf {
    let path = parent.with_file_name(name);
    create(&path, &CreateRequest { parent: Some(parent.to_owned()), ..CreateRequest::default() }).unwrap();
    path
}

/// A parent and a child of 64 MiB, without data.
pub fn pair(dir: &Path) -> (PathBuf, PathBuf) {
    let parent = dir.canonicalize().unwrap().join("parent.vhdx");
    let request =
        CreateRequest { size_bytes: Some(64 * MIB), block_bytes: Some(MIB as u32), ..CreateRequest::default() };
    create(&parent, &request).unwrap();
    let top = parent.with_file_name("vm.vhdx");
    let request =
        CreateRequest { parent: Some(parent.clone()), block_bytes: Some(MIB as u32), ..CreateRequest::default() };
    create(&top, &request).unwrap();
    (top, parent)
}

/// Once the parent takes writes, clients would get the errors of its tables.
#[test]
fn a_damaged_parent_or_top_is_refused_before_anything_changes() {
    for damaged in ["parent.vhdx", "vm.vhdx"] {
        let dir = folder();
        let (path, parent) = pair(dir.path());
        crate::damaged_blocks::break_entry(&dir.path().join(damaged), 40);
        let before = fs::read(&parent).unwrap();
        let disk = open(&path).unwrap();
        for dry_run in [true, false] {
            let options = AbsorbOptions { dry_run, ..AbsorbOptions::default() };
            let error = disk.absorb(&options, &mut |_, _| true).unwrap_err().to_string();
            assert!(error.contains(damaged), "{error}");
        }
        assert_eq!(disk.layers().len(), 2);
        assert!(fs::read(&parent).unwrap() == before);
    }
}

/// A snapshot that came in between is not what the caller wants to merge.
#[test]
fn a_chain_that_was_changed_meanwhile_is_left_alone() {
    let dir = folder();
    let (path, _) = pair(dir.path());
    let disk = open(&path).unwrap();
    let started = std::sync::Barrier::new(2);
    thread::scope(|scope| {
        // Holds the turn to change the chain until the merge waits for it.
        let freezing = scope.spawn(|| {
            let mut watch = Waits { started: &started, has_waited: false };
            disk.snapshot("one", false, &mut watch).unwrap();
        });
        started.wait();
        let merged = disk.merge(&path, &MergeOptions::default(), &mut |_, _| true);
        freezing.join().unwrap();
        let error = merged.unwrap_err().to_string();
        assert!(error.contains("its chain was changed meanwhile"), "{error}");
    });
    assert_eq!(disk.layers().len(), 3);
}

/// Lets a merge begin while a snapshot is made, and gives it time to wait.
struct Waits<'a> {
    started: &'a std::sync::Barrier,
    has_waited: bool,
}

impl SnapshotWatch for Waits<'_> {
    fn goes_on(&mut self, _: u64, _: u64) -> bool {
        if !std::mem::replace(&mut self.has_waited, true) {
            self.started.wait();
            thread::sleep(Duration::from_millis(100));
        }
        true
    }
}

#[test]
fn what_cannot_be_merged_is_refused_and_nothing_changes() {
    let dir = folder();
    let (path, parent) = pair(dir.path());
    let said = |disk: &Disk, options: &AbsorbOptions| disk.absorb(options, &mut |_, _| true).unwrap_err().to_string();
    let plain = AbsorbOptions::default();
    // No parent; read-only.
    let alone = open(&parent.with_file_name("vm.vhdx")).unwrap();
    drop(alone);
    let reading = Disk::open(&path, &OpenOptions::default()).unwrap();
    assert!(said(&reading, &plain).contains("it is open read-only, so it cannot be merged"));
    drop(reading);
    // Another child of the parent.
    let sibling = child(&parent, "sibling.vhdx");
    let before = fs::read(&parent).unwrap();
    let disk = open(&path).unwrap();
    let error = said(&disk, &plain);
    assert!(error.contains("sibling.vhdx also has") && error.contains("parent.vhdx as its parent"), "{error}");
    // The sibling can still be opened: the lock is that of a reader again.
    drop(Disk::open(&sibling, &OpenOptions::default()).unwrap());
    fs::remove_file(&sibling).unwrap();
    // Another disk has the parent open.
    let reader = Disk::open(&parent, &OpenOptions::default()).unwrap();
    let refused = absorb(&disk).unwrap_err();
    assert!(matches!(refused, DiskError::InUse { .. }), "{refused}");
    drop(reader);
    // A child elsewhere, in a folder that is searched.
    let elsewhere = folder();
    let far = elsewhere.path().join("far.vhdx");
    create(&far, &CreateRequest { parent: Some(parent.clone()), ..CreateRequest::default() }).unwrap();
    let search_dirs = vec![elsewhere.path().to_owned()];
    let error = said(&disk, &AbsorbOptions { search_dirs, ..plain.clone() });
    assert!(error.contains("far.vhdx also has"), "{error}");
    // A dry run says what would be, and changes nothing.
    let dry = disk.absorb(&AbsorbOptions { dry_run: true, ..plain.clone() }, &mut |_, _| true).unwrap();
    assert_eq!((dry.parent.as_path(), dry.size_bytes, dry.data_bytes), (parent.as_path(), (64 * MIB, 64 * MIB), 0));
    assert_eq!(fs::read(&parent).unwrap(), before);
    assert!(open(&parent).is_err(), "the disk still has its parent open");
    // The disk works on, and can be merged.
    blocking(&disk).write(MIB, &[5; 4096], true).unwrap();
    absorb(&disk).unwrap();
    let error = said(&disk, &plain);
    assert!(error.contains("it has no parent into which it could be merged"), "{error}");
    disk.close().unwrap();
    drop(disk);
    assert_eq!(names(dir.path()), ["vm.vhdx"]);
    assert_eq!(read_all(&path)[MIB as usize..][..4096], [5; 4096]);
}

#[test]
fn other_folders_and_larger_parents_are_refused() {
    let (dir, elsewhere) = (folder(), folder());
    let (path, parent) = pair(dir.path());
    let far = elsewhere.path().join("far.vhdx");
    create(&far, &CreateRequest { parent: Some(parent.clone()), ..CreateRequest::default() }).unwrap();
    let parents = diskwright_disk::ParentPolicy { allow_any: true, ..Default::default() };
    let disk = Disk::open(&far, &OpenOptions { writable: true, parents, ..OpenOptions::default() }).unwrap();
    let error = absorb(&disk).unwrap_err().to_string();
    assert!(error.contains("are in different folders"), "{error}");
    drop(disk);
    fs::remove_file(&path).unwrap();
    let request = CreateRequest { parent: Some(parent.clone()), size_bytes: Some(8 * MIB), ..CreateRequest::default() };
    create(&path, &request).unwrap();
    let error = absorb(&open(&path).unwrap()).unwrap_err().to_string();
    assert!(error.contains("merging into a larger disk is not supported"), "{error}");
}

/// A disk that gets a snapshot while it is in use, and is merged again: both without closing it.
#[test]
fn a_snapshot_in_use_is_merged_in_use() {
    for extension in ["vhdx", "vhd"] {
        let dir = folder();
        let path = dir.path().canonicalize().unwrap().join(format!("vm.{extension}"));
        create(&path, &CreateRequest { size_bytes: Some(32 * MIB), ..CreateRequest::default() }).unwrap();
        let disk = open(&path).unwrap();
        let mut io = blocking(&disk);
        for round in 1..4u8 {
            io.write(u64::from(round) * MIB, &[round; 8192], false).unwrap();
            disk.snapshot("s", false, &mut ()).unwrap();
            io.write(512, &[round; 512], true).unwrap();
            io.write(9 * MIB, &[round; 512], false).unwrap();
            let absorbed = absorb(&disk).unwrap();
            assert_eq!(disk.layers().len(), 1);
            assert!(absorbed.data_bytes > 0 && absorbed.copied_bytes + absorbed.cloned_bytes >= 1024);
            assert_eq!(names(dir.path()), [format!("vm.{extension}")]);
            io.discard(2 * MIB, MIB).unwrap();
            io.flush().unwrap();
            let mut sector = [0; 512];
            for (at, expected) in [(512, round), (9 * MIB, round), (MIB, 1), (0, 0)] {
                io.read(at, &mut sector).unwrap();
                assert_eq!(sector, [expected; 512], "{extension}, round {round}, byte {at}");
            }
        }
        // The next snapshot may be read by others.
        let frozen = disk.snapshot("last", false, &mut ()).unwrap();
        assert_eq!(read_all(&frozen.parent)[512], 3);
    }
}

/// A merge that was stopped leaves a disk that is like any other: it can be closed, opened for
/// writing, frozen, and merged while it is not in use.
#[test]
fn a_stopped_merge_is_finished_while_the_disk_is_not_in_use() {
    for shape in [vhdx(DiskType::Differencing, 1, 1), vhd(DiskType::Differencing, 64, 64)] {
        let dir = folder();
        let mut dice = Dice::new(5);
        let (path, parent, mut model) = make(dir.path(), shape, &mut dice);
        let disk = open(&path).unwrap();
        let mut calls = 0;
        let stopped = disk.absorb(&AbsorbOptions::default(), &mut |_, _| {
            calls += 1;
            calls < 2
        });
        assert!(matches!(stopped, Err(DiskError::Stopped)), "{stopped:?}");
        assert_eq!(disk.layers().len(), 3);
        // The parent has the lock of a reader again.
        drop(Disk::open(&parent, &OpenOptions::default()).unwrap());
        disk.close().unwrap();
        drop(disk);
        sound(&path);
        sound(&parent);
        same(&read_all(&path), &model, 0);
        fill(&path, &mut model, &mut dice, 4);
        // As it would have ended in use: the disk keeps its name.
        let merged = merge(&path, &MergeOptions::default(), &mut |_, _| true).unwrap();
        assert_eq!((merged.disk, merged.warnings.len()), (path.canonicalize().unwrap(), 1));
        assert!(!parent.exists());
        same(&read_all(&path), &model, 0);
    }
}

/// A merge of the disk over several levels that was stopped among the frozen images keeps the
/// disk's name, too. A snapshot ends that: then another image is merged.
#[test]
fn a_stopped_merge_of_several_levels_keeps_the_name() {
    for freezes in [false, true] {
        let dir = folder();
        let (path, _, model) = make(dir.path(), vhdx(DiskType::Differencing, 1, 1), &mut Dice::new(6));
        let disk = open(&path).unwrap();
        let base = disk.layers()[2].path.clone();
        let options = MergeOptions { into: Some(base.clone()), ..MergeOptions::default() };
        let stopped = disk.merge(&path, &options, &mut |_, _| false);
        assert!(matches!(stopped, Err(DiskError::Stopped)), "{stopped:?}");
        if freezes {
            disk.snapshot("later", false, &mut ()).unwrap();
        }
        disk.close().unwrap();
        drop(disk);
        let merged = merge(&path, &options, &mut |_, _| true).unwrap();
        assert_eq!(merged.disk, if freezes { base } else { path.canonicalize().unwrap() });
        same(&read_all(&merged.disk), &model, 0);
        assert_eq!(names(dir.path()).len(), 1, "{:?}", names(dir.path()));
    }
}

/// A disk cannot be closed while it is merged.
#[test]
fn the_disk_is_not_closed_meanwhile() {
    let dir = folder();
    let (path, _) = pair(dir.path());
    let disk = open(&path).unwrap();
    blocking(&disk).write(0, &[1; 4096], false).unwrap();
    let mut refused = 0;
    let mut try_close = |_: u64, _: u64| {
        refused += u32::from(disk.close().is_err());
        true
    };
    disk.absorb(&AbsorbOptions::default(), &mut try_close).unwrap();
    assert!(refused > 1);
    disk.close().unwrap();
}
