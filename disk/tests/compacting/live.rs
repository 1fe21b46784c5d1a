//! Disks are compacted while they are in use: clients read, write and discard all the time.
//!
//! Each client has a share of the disk, and a model of it. What a client has written is never lost,
//! whatever moves meanwhile. Afterwards the file is as small as compaction of a closed disk makes
//! it.

use crate::lab::{Lab, MIB, blocks_with_space, compacted, have, read_all, writable};
use diskwright_disk::{CreateRequest, Disk, DiskError, OpenOptions, ParentPolicy, check_image, create};
use diskwright_image::{DiskType, Format, Severity};
use diskwright_store::{BlockDevice, Blocking, CacheMode, EngineKind, IoBuf, QueueOptions, Request, SharedRing};
use std::{
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

const SECTOR: u64 = 512;

/// Random numbers with a fixed seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// A kind of disk.
#[derive(Debug, Clone, Copy)]
struct Kind {
    format: Format,
    is_child: bool,
    block_bytes: u64,
    cache: CacheMode,
}

const KINDS: [Kind; 5] = [
    Kind { format: Format::Vhdx, is_child: false, block_bytes: MIB, cache: CacheMode::PageCache },
    Kind { format: Format::Vhdx, is_child: true, block_bytes: MIB, cache: CacheMode::PageCache },
    Kind { format: Format::Vhd, is_child: false, block_bytes: 256 << 10, cache: CacheMode::PageCache },
    Kind { format: Format::Vhd, is_child: true, block_bytes: 256 << 10, cache: CacheMode::PageCache },
    Kind { format: Format::Vhdx, is_child: false, block_bytes: MIB, cache: CacheMode::Direct },
];

impl Kind {
    /// A disk of `blocks` blocks, half of the last one beyond its end, and its contents: a parent
    /// has data in every third block.
    fn make(self, lab: &Lab, blocks: u64) -> (PathBuf, Vec<u8>) {
        let path = lab.path(&format!("disk.{}", self.format));
        let size_bytes = blocks * self.block_bytes - self.block_bytes / 2;
        let mut contents = vec![0; size_bytes as usize];
        let mut request = CreateRequest {
            size_bytes: Some(size_bytes),
            block_bytes: Some(self.block_bytes as u32),
            disk_type: Some(DiskType::Dynamic),
            ..CreateRequest::default()
        };
        if self.is_child {
            let parent = lab.path(&format!("parent.{}", self.format));
            create(&parent, &request).unwrap();
            let disk = Disk::open(&parent, &writable()).unwrap();
            let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
            for block in (0..blocks).step_by(3) {
                let range = self.block_range(block, size_bytes);
                contents[range.start as usize..range.end as usize].fill(0xee);
                io.write(range.start, &contents[range.start as usize..range.end as usize], false).unwrap();
            }
            drop(io);
            disk.close().unwrap();
            request = CreateRequest { parent: Some(parent), disk_type: None, size_bytes: None, ..request };
        }
        create(&path, &request).unwrap();
        (path, contents)
    }

    fn block_range(self, block: u64, size_bytes: u64) -> Range<u64> {
        block * self.block_bytes..((block + 1) * self.block_bytes).min(size_bytes)
    }

    fn open(self, path: &Path) -> Arc<Disk> {
        Disk::open(path, &OpenOptions { cache: self.cache, ..writable() }).unwrap()
    }
}

/// What the clients and the one who compacts tell each other.
#[derive(Default)]
struct Progress {
    stop: AtomicBool,
    /// Completed requests of all clients.
    requests: AtomicU64,
}

/// Works at random in its own share of the disk until it shall stop. Returns the contents of the
/// share.
fn work(disk: &Disk, kind: Kind, share: Range<u64>, before: Vec<u8>, seed: u64, progress: &Progress) -> Vec<u8> {
    let ring = seed.is_multiple_of(2).then(|| SharedRing::new(64, None).unwrap());
    let options = QueueOptions { depth: 8, ring: ring.as_ref(), ..QueueOptions::default() };
    let mut queue = disk.open_queue(&options).unwrap();
    let (mut dice, mut model, mut done) = (Dice(seed), before, Vec::new());
    let mut stamp = 0u8;
    let mut run = |request: Request| {
        queue.push(request).map_err(|error| error.reason).unwrap();
        queue.reap(1, &mut done).unwrap();
        let completion = done.pop().unwrap();
        completion.result.unwrap();
        progress.requests.fetch_add(1, Ordering::Relaxed);
        completion.buf
    };
    while !progress.stop.load(Ordering::Relaxed) {
        let what = dice.below(16);
        // Some requests are for whole blocks.
        let is_whole = what >= 10;
        let (unit, most) = if is_whole { (kind.block_bytes, 2) } else { (SECTOR, 40) };
        let units = (share.end - share.start) / unit;
        let first = share.start + dice.below(units) * unit;
        let len = ((1 + dice.below(most)) * unit).min(share.end - first);
        let within = (first - share.start) as usize..(first - share.start + len) as usize;
        match what {
            0..5 | 10..12 => {
                stamp = stamp.wrapping_add(1).max(1);
                let mut buf = IoBuf::new(len as usize);
                buf.fill(stamp);
                let request = Request::write(first, len as usize, buf, 1);
                run(Request { fua: what == 0, ..request });
                model[within].fill(stamp);
            }
            12 => {
                run(Request::write(first, len as usize, IoBuf::new(len as usize), 1));
                model[within].fill(0);
            }
            5 | 13 | 14 => {
                run(Request::discard(first, len, 1));
                model[within].fill(0);
            }
            6 => drop(run(Request::flush(1))),
            _ => {
                let buf = run(Request::read(first, len as usize, IoBuf::new(len as usize), 1)).unwrap();
                assert!(buf[..len as usize] == model[within], "{kind:?}: {len} bytes at {first}");
            }
        }
    }
    model
}

/// Lets clients work on a disk while it is compacted `times` times. Returns the disk, still open,
/// and its contents.
fn compact_in_company(lab: &Lab, kind: Kind, blocks: u64, times: u64) -> (PathBuf, Arc<Disk>, Vec<u8>) {
    let (path, mut contents) = kind.make(lab, blocks);
    let disk = kind.open(&path);
    let size_bytes = disk.geometry().size_bytes;
    let share_bytes = blocks / 3 * kind.block_bytes;
    let shares = [0..share_bytes, share_bytes..2 * share_bytes, 2 * share_bytes..size_bytes];
    let progress = Progress::default();
    let moved = AtomicU64::new(0);
    let parts = thread::scope(|scope| {
        let clients: Vec<_> = (1..)
            .zip(&shares)
            .map(|(seed, share)| {
                let (disk, progress) = (&disk, &progress);
                let before = contents[share.start as usize..share.end as usize].to_vec();
                scope.spawn(move || work(disk, kind, share.clone(), before, seed, progress))
            })
            .collect();
        for _ in 0..times {
            // Requests, not milliseconds: on a busy machine some clients would not have begun.
            let wanted = progress.requests.load(Ordering::Relaxed) + 300;
            while progress.requests.load(Ordering::Relaxed) < wanted
                && !clients.iter().any(|client| client.is_finished())
            {
                thread::sleep(std::time::Duration::from_millis(1));
            }
            let done = disk.compact(false, &mut |_, _| true);
            let done = done.inspect_err(|_| progress.stop.store(true, Ordering::Relaxed));
            let done = done.unwrap();
            assert!(done.warnings.is_empty(), "{:?}", done.warnings);
            moved.fetch_add(done.moved_bytes, Ordering::Relaxed);
        }
        progress.stop.store(true, Ordering::Relaxed);
        clients.into_iter().map(|client| client.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(moved.into_inner() > 0, "{kind:?}: nothing was ever moved");
    for (share, part) in shares.iter().zip(parts) {
        contents[share.start as usize..share.end as usize].copy_from_slice(&part);
    }
    (path, disk, contents)
}

#[track_caller]
fn assert_sound(path: &Path) {
    let (_, report) = check_image(path, &OpenOptions::default()).unwrap();
    assert!(report.worst() < Some(Severity::Leak), "{}: {:?}", path.display(), report.findings);
}

#[test]
fn clients_lose_nothing_while_their_disk_is_compacted() {
    for kind in KINDS {
        let lab = Lab::new();
        let (path, disk, contents) = compact_in_company(&lab, kind, 40, 5);
        // With nobody else at work the file gets its smallest length at once, while it is open.
        let done = disk.compact(false, &mut |_, _| true).unwrap();
        assert_eq!(done.new_file_bytes, std::fs::metadata(&path).unwrap().len(), "{kind:?}");
        let image = Arc::clone(&disk.layers()[0].image);
        let packed_bytes = image.packed_len_bytes(blocks_with_space(&disk)).unwrap().unwrap();
        assert!(done.new_file_bytes <= packed_bytes + 4096, "{kind:?}: {} of {packed_bytes}", done.new_file_bytes);
        let mut found = vec![0; contents.len()];
        Blocking::open(&*disk, EngineKind::Auto).unwrap().read(0, &mut found).unwrap();
        assert!(found == contents, "{kind:?}");
        drop(image);
        disk.close().unwrap();
        drop(disk);
        assert_sound(&path);
        assert!(read_all(&path) == contents, "{kind:?}");
        // Nothing is left to do for the compaction of a closed disk.
        let open_bytes = std::fs::metadata(&path).unwrap().len();
        let again = compacted(&path);
        assert_eq!((again.zero_bytes, again.moved_bytes), (0, 0), "{kind:?}");
        assert!(open_bytes <= again.new_file_bytes + again.new_file_bytes * 3 / 100, "{kind:?}");
        assert!(read_all(&path) == contents, "{kind:?}");
    }
}

#[test]
fn what_a_killed_process_leaves_is_sound_and_can_be_compacted() {
    for kind in KINDS {
        let lab = Lab::new();
        let (path, disk, contents) = compact_in_company(&lab, kind, 30, 4);
        Blocking::open(&*disk, EngineKind::Auto).unwrap().flush().unwrap();
        // The files as they are now, without the close.
        let left = Lab::new();
        for name in [format!("disk.{}", kind.format), format!("parent.{}", kind.format)] {
            if lab.path(&name).exists() {
                std::fs::copy(lab.path(&name), left.path(&name)).unwrap();
            }
        }
        let copy = left.path(path.file_name().unwrap().to_str().unwrap());
        let (_, report) = check_image(&copy, &OpenOptions::default()).unwrap();
        assert!(report.worst() < Some(Severity::Corrupt), "{kind:?}: {:?}", report.findings);
        let parents = ParentPolicy { ignore_timestamp: true, ..ParentPolicy::default() };
        let options = OpenOptions { parents, ..OpenOptions::default() };
        let again = Disk::open(&copy, &OpenOptions { writable: true, ..options.clone() }).unwrap();
        let done = again.compact(false, &mut |_, _| true).unwrap();
        again.close().unwrap();
        drop(again);
        assert_sound(&copy);
        let disk = Disk::open(&copy, &options).unwrap();
        let image = Arc::clone(&disk.layers()[0].image);
        let packed_bytes = image.packed_len_bytes(blocks_with_space(&disk)).unwrap().unwrap();
        assert_eq!(std::fs::metadata(&copy).unwrap().len(), packed_bytes, "{kind:?}: {done:?}");
        let mut found = vec![0; contents.len()];
        Blocking::open(&*disk, EngineKind::Auto).unwrap().read(0, &mut found).unwrap();
        assert!(found == contents, "{kind:?}");
    }
}

/// Every other block is discarded, as fstrim in a guest does it, and some of the others are zeros.
#[test]
fn discarded_blocks_and_zeros_make_the_file_small() {
    for kind in KINDS {
        let lab = Lab::new();
        let (path, mut contents) = kind.make(&lab, 48);
        let disk = kind.open(&path);
        let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
        let size_bytes = contents.len() as u64;
        for block in 0..48 {
            let range = kind.block_range(block, size_bytes);
            let byte = if block % 8 == 5 { 0 } else { block as u8 + 1 };
            contents[range.start as usize..range.end as usize].fill(byte);
            io.write(range.start, &contents[range.start as usize..range.end as usize], false).unwrap();
        }
        for block in (0..48).step_by(2) {
            let range = kind.block_range(block, size_bytes);
            io.discard(range.start, range.end - range.start).unwrap();
            contents[range.start as usize..range.end as usize].fill(0);
        }
        let foretold = disk.compact(true, &mut |_, _| true).unwrap();
        assert_eq!(foretold.old_file_bytes, std::fs::metadata(&path).unwrap().len(), "a dry run changes nothing");
        let done = disk.compact(false, &mut |_, _| true).unwrap();
        let file_bytes = std::fs::metadata(&path).unwrap().len();
        assert_eq!((done.old_file_bytes, done.new_file_bytes), (foretold.old_file_bytes, file_bytes));
        // A child's block of zeros over data of its parent needs its space in a VHD.
        let needed = blocks_with_space(&disk);
        assert_eq!(needed, if kind.is_child && kind.format == Format::Vhd { 18 + 16 - 8 + 2 } else { 18 }, "{kind:?}");
        assert!(file_bytes <= done.old_file_bytes * 3 / 4, "{kind:?}: {done:?}");
        assert!(file_bytes.abs_diff(foretold.new_file_bytes) <= 4096, "{kind:?}: {foretold:?} {done:?}");
        assert_eq!(foretold.zero_bytes, done.zero_bytes, "{kind:?}");
        let mut found = vec![0; contents.len()];
        io.read(0, &mut found).unwrap();
        assert!(found == contents, "{kind:?}");
        // The space that was cut off is allocated again.
        for block in 0..48 {
            let range = kind.block_range(block, size_bytes);
            contents[range.start as usize..range.end as usize].fill(block as u8 + 101);
            io.write(range.start, &contents[range.start as usize..range.end as usize], true).unwrap();
        }
        drop(io);
        disk.close().unwrap();
        drop(disk);
        assert_sound(&path);
        assert!(read_all(&path) == contents, "{kind:?}");
    }
}

#[test]
fn qemu_img_finds_the_compacted_disk_sound_and_the_same() {
    if !have("qemu_img_finds_the_compacted_disk_sound_and_the_same", &["qemu-img"]) {
        return;
    }
    for kind in KINDS.into_iter().filter(|kind| !kind.is_child && kind.format == Format::Vhdx) {
        let lab = Lab::new();
        let (path, disk, contents) = compact_in_company(&lab, kind, 24, 3);
        disk.compact(false, &mut |_, _| true).unwrap();
        disk.close().unwrap();
        drop(disk);
        std::fs::write(lab.path("raw"), contents).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap();
        lab.run(&format!("qemu-img check {name}"));
        lab.run(&format!("qemu-img compare -F raw {name} raw"));
    }
}

#[test]
fn a_stopped_compaction_keeps_what_it_has_done_and_goes_on() {
    for kind in KINDS {
        let lab = Lab::new();
        let (path, mut contents) = kind.make(&lab, 64);
        let disk = kind.open(&path);
        let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
        let half = contents.len() / 2;
        contents.fill(7);
        io.write(0, &contents, false).unwrap();
        contents[..half].fill(0);
        io.discard(0, half as u64).unwrap();
        contents[..half].fill(0);
        let mut calls = 0;
        let stopped = disk.compact(false, &mut |done, _| {
            calls += u64::from(done > 0);
            calls < 3
        });
        assert!(matches!(stopped, Err(DiskError::Stopped)), "{kind:?}: {stopped:?}");
        let mut found = vec![0; contents.len()];
        io.read(0, &mut found).unwrap();
        assert!(found == contents, "{kind:?}");
        let done = disk.compact(false, &mut |_, _| true).unwrap();
        drop(io);
        disk.close().unwrap();
        drop(disk);
        assert!(done.new_file_bytes < contents.len() as u64 * 3 / 4 || kind.is_child, "{kind:?}: {done:?}");
        let again = compacted(&path);
        assert_eq!((again.zero_bytes, again.moved_bytes), (0, 0), "{kind:?}");
        assert!(read_all(&path) == contents, "{kind:?}");
    }
}

#[test]
fn it_ends_with_a_warning_when_a_snapshot_comes_in_between() {
    for format in [Format::Vhdx, Format::Vhd] {
        let kind = Kind { format, is_child: false, block_bytes: MIB, cache: CacheMode::PageCache };
        let lab = Lab::new();
        let (path, mut contents) = kind.make(&lab, 64);
        let disk = kind.open(&path);
        let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
        contents.fill(9);
        io.write(0, &contents, false).unwrap();
        io.discard(0, 32 * MIB).unwrap();
        contents[..32 * MIB as usize].fill(0);
        let done = thread::scope(|scope| {
            let mut freezing = None;
            disk.compact(false, &mut |_, _| {
                // The first call comes while blocks are read. The snapshot waits for that.
                freezing.get_or_insert_with(|| scope.spawn(|| disk.snapshot("frozen", false, &mut ()).unwrap()));
                thread::sleep(std::time::Duration::from_millis(10));
                true
            })
            .unwrap()
        });
        assert_eq!(done.warnings.len(), 1);
        assert!(done.warnings[0].contains("another image was put on top"), "{:?}", done.warnings);
        let mut found = vec![0; contents.len()];
        io.read(0, &mut found).unwrap();
        assert!(found == contents);
        // The new top can be compacted.
        io.write(0, &[3; 4096], false).unwrap();
        contents[..4096].fill(3);
        assert!(disk.compact(false, &mut |_, _| true).unwrap().warnings.is_empty());
        drop(io);
        disk.close().unwrap();
        drop(disk);
        assert!(read_all(&path) == contents);
    }
}

#[test]
fn what_keeps_its_space_or_cannot_be_written_is_refused() {
    let lab = Lab::new();
    for (name, disk_type) in
        [("fixed.vhdx", DiskType::Fixed), ("fixed.vhd", DiskType::Fixed), ("raw.raw", DiskType::Fixed)]
    {
        let path = lab.path(name);
        let request =
            CreateRequest { size_bytes: Some(4 * MIB), disk_type: Some(disk_type), ..CreateRequest::default() };
        create(&path, &request).unwrap();
        let disk = Disk::open(&path, &writable()).unwrap();
        let error = disk.compact(false, &mut |_, _| true).unwrap_err().to_string();
        assert!(error.contains("it is a fixed disk, which keeps the space of all its blocks"), "{error}");
    }
    let path = lab.path("dynamic.vhdx");
    create(&path, &CreateRequest { size_bytes: Some(4 * MIB), ..CreateRequest::default() }).unwrap();
    let disk = Disk::open(&path, &OpenOptions::default()).unwrap();
    let error = disk.compact(false, &mut |_, _| true).unwrap_err().to_string();
    assert!(error.contains("the disk is open read-only"), "{error}");
}
