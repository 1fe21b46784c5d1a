//! A file system that becomes full during an allocation: the write fails, earlier data stays
//! intact, and when there is space again the disk works. Uses small file systems in loop devices,
//! which need root.

use crate::small_fs::{Small, eat_all};
use diskwright_disk::{ConvertOptions, CreateRequest, Disk, OpenOptions, convert, create};
use diskwright_image::{DiskType, Format, LogState, Severity, probe};
use diskwright_store::{
    BlockDevice, BlockQueue, Blocking, CacheMode, Completion, EngineKind, FileStore, IoBuf, QueueOptions, Request,
};
use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

const MIB: u64 = 1 << 20;
const DEPTH: usize = 8;
/// Length of one write. The disk consists of such pieces.
const PIECE_BYTES: u64 = 192 << 10;

#[derive(Debug, Clone, Copy)]
struct Kind {
    format: Format,
    disk_type: DiskType,
    cache: CacheMode,
    engine: EngineKind,
}

/// A disk and its expected contents: by piece, the seed of the last acknowledged write. The
/// contents of a piece whose write failed are unknown.
struct Disked {
    path: PathBuf,
    disk: Arc<Disk>,
    queue: Box<dyn BlockQueue>,
    done: Vec<Completion>,
    seeds: BTreeMap<u64, u8>,
    under_way: BTreeMap<u64, u8>,
}

fn fill(buf: &mut [u8], piece: u64, seed: u8) {
    for (sector, bytes) in buf.chunks_mut(512).enumerate() {
        bytes.fill((sector as u8).wrapping_mul(31) ^ piece as u8 ^ seed | 1);
    }
}

impl Disked {
    fn open(path: &Path, kind: Kind, seeds: BTreeMap<u64, u8>) -> Self {
        let options = OpenOptions { writable: true, cache: kind.cache, engine: kind.engine, ..OpenOptions::default() };
        let disk = Disk::open(path, &options).unwrap();
        let queue =
            disk.open_queue(&QueueOptions { depth: DEPTH, engine: kind.engine, slab: None, ring: None }).unwrap();
        Self { path: path.to_owned(), disk, queue, done: Vec::new(), seeds, under_way: BTreeMap::new() }
    }

    fn reap(&mut self, at_least: usize) -> io::Result<()> {
        self.queue.reap(at_least, &mut self.done).unwrap();
        let mut failure = Ok(());
        for completion in std::mem::take(&mut self.done) {
            let seed = self.under_way.remove(&completion.tag).unwrap();
            match completion.result {
                Ok(()) => drop(self.seeds.insert(completion.tag, seed)),
                Err(error) => failure = Err(error),
            }
        }
        failure
    }

    /// Writes pieces in the given order until one fails. All requests have ended on return.
    fn write(&mut self, pieces: impl Iterator<Item = u64>, seed: u8) -> io::Result<()> {
        let mut result = Ok(());
        for piece in pieces {
            if self.queue.in_flight() == DEPTH {
                result = self.reap(1);
            }
            if result.is_err() {
                break;
            }
            let mut buf = IoBuf::new(PIECE_BYTES as usize);
            fill(&mut buf, piece, seed);
            self.under_way.insert(piece, seed);
            self.seeds.remove(&piece);
            self.queue.push(Request::write(piece * PIECE_BYTES, PIECE_BYTES as usize, buf, piece)).unwrap();
        }
        while self.queue.in_flight() > 0 {
            result = self.reap(1).and(result);
        }
        result
    }

    fn flush(&mut self) -> io::Result<()> {
        self.queue.push(Request::flush(u64::MAX)).unwrap();
        self.queue.reap(1, &mut self.done).unwrap();
        self.done.pop().unwrap().result
    }

    fn verify(&self) {
        verify(&self.disk, &self.seeds);
    }

    fn close(self) -> (PathBuf, BTreeMap<u64, u8>) {
        drop(self.queue);
        self.disk.close().unwrap();
        (self.path, self.seeds)
    }
}

fn verify(disk: &Disk, seeds: &BTreeMap<u64, u8>) {
    let mut io = Blocking::open(disk, EngineKind::Auto).unwrap();
    let (mut found, mut expected) = (vec![0; PIECE_BYTES as usize], vec![0; PIECE_BYTES as usize]);
    for (&piece, &seed) in seeds {
        io.read(piece * PIECE_BYTES, &mut found).unwrap();
        fill(&mut expected, piece, seed);
        assert!(found == expected, "piece {piece} of seed {seed} is wrong");
    }
}

fn assert_full(error: &io::Error, path: &Path) {
    assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{error}");
    let told = error.to_string();
    // A plain system error is that of the payload: the block already had its space.
    let is_bare = error.raw_os_error().is_some();
    assert!(is_bare || told.contains(path.to_str().unwrap()) && told.contains("free some space"), "{told}");
}

fn sound(path: &Path) {
    let store = FileStore::open(path, &diskwright_store::OpenOptions::default()).unwrap();
    let (_, report) = probe::check(Arc::new(store), None).unwrap();
    // A block whose write failed because there was no space for its sector bitmap leaks its own
    // space until the next session.
    assert!(report.worst() <= Some(Severity::Leak) && report.leaked_bytes <= DEPTH as u64 * MIB, "{report:?}");
}

fn run_full(small: &Small, kind: Kind, space_bytes: u64, flush_early: bool) {
    let ballast = small.mount.join("ballast");
    let path = small.mount.join(format!("disk.{}", kind.format));
    let parent = small.mount.join(format!("parent.{}", kind.format));
    let blocks = kind.format != Format::Raw;
    let request = CreateRequest {
        size_bytes: Some(4 * space_bytes / PIECE_BYTES * PIECE_BYTES),
        block_bytes: blocks.then_some(1 << 20),
        ..CreateRequest::default()
    };
    let pieces = 4 * space_bytes / PIECE_BYTES;
    let mut seeds = BTreeMap::new();
    if kind.disk_type == DiskType::Differencing {
        create(&parent, &request).unwrap();
        let mut disk = Disked::open(&parent, kind, seeds);
        disk.write((0..20).map(|piece| piece * 3 % pieces), 5).unwrap();
        seeds = disk.close().1;
        create(&path, &CreateRequest { parent: Some(parent.clone()), ..CreateRequest::default() }).unwrap();
    } else {
        create(&path, &request).unwrap();
    }
    std::fs::write(&ballast, vec![1; 8 << 20]).unwrap();

    let mut disk = Disked::open(&path, kind, seeds);
    // Some writes are durable before the disk is full, in an order that leaves no block whole.
    let order = move |piece: u64| piece * 11 % pieces;
    disk.write((0..20).map(order), 1).unwrap();
    if flush_early {
        disk.flush().unwrap();
    }
    let error = disk.write((20..pieces).map(order), 2).unwrap_err();
    assert_full(&error, &path);
    disk.verify();
    // The file system stays full.
    for seed in 3..6 {
        let error = disk.write((0..pieces).map(order).rev(), seed).unwrap_err();
        assert_full(&error, &path);
        disk.verify();
    }
    // No block is free: what was allocated can be made durable, or the flush reports that there is
    // no space for that.
    let filler = small.mount.join("filler");
    eat_all(&filler);
    for _ in 0..2 {
        if let Err(error) = disk.flush() {
            assert_full(&error, &path);
        }
        disk.verify();
    }

    std::fs::remove_file(&ballast).unwrap();
    std::fs::remove_file(&filler).unwrap();
    disk.flush().unwrap();
    disk.write((0..12).map(order), 7).unwrap();
    disk.write((0..5).map(move |piece| order(pieces - 1 - piece)), 8).unwrap();
    disk.flush().unwrap();
    disk.verify();
    let (path, seeds) = disk.close();
    if blocks {
        sound(&path);
    }
    let again = Disk::open(&path, &OpenOptions::default()).unwrap();
    verify(&again, &seeds);
    drop(again);
    for path in [path, parent] {
        let _ = std::fs::remove_file(path);
    }
}

/// A close without space reports that, and can be retried.
fn run_close(small: &Small, kind: Kind) {
    let path = small.mount.join(format!("close.{}", kind.format));
    let filler = small.mount.join("filler");
    let request = CreateRequest { size_bytes: Some(8 * MIB), block_bytes: Some(1 << 20), ..CreateRequest::default() };
    create(&path, &request).unwrap();
    let mut disk = Disked::open(&path, kind, BTreeMap::new());
    disk.write(0..4, 1).unwrap();
    eat_all(&filler);
    let Disked { disk, queue, seeds, .. } = disk;
    drop(queue);
    let first = disk.close();
    if let Err(error) = &first {
        assert!(error.to_string().contains("free some space"), "{error}");
        verify(&disk, &seeds);
    }
    std::fs::remove_file(&filler).unwrap();
    disk.close().unwrap();
    assert!(Blocking::open(&*disk, EngineKind::Sync).is_err(), "a closed disk cannot be opened for requests");
    drop(disk);
    sound(&path);
    let again = Disk::open(&path, &OpenOptions::default()).unwrap();
    assert_eq!(
        again.layers()[0].image.info().log,
        if kind.format == Format::Vhdx { LogState::Clean } else { LogState::None }
    );
    verify(&again, &seeds);
    assert!(first.is_err() || kind.format != Format::Vhdx, "the log of a new VHDX takes space");
}

fn run_all(file_system: &str, size_bytes: u64, kinds: &[Kind]) {
    let small = match Small::new(file_system, size_bytes) {
        Ok(small) => small,
        Err(reason) => return println!("skipped: {file_system}: {reason}"),
    };
    for &kind in kinds {
        for flush_early in [true, false] {
            println!("{file_system}: {kind:?}, flushed early: {flush_early}");
            run_full(&small, kind, size_bytes, flush_early);
        }
        if kind.format != Format::Raw && kind.disk_type == DiskType::Dynamic {
            run_close(&small, kind);
        }
    }
}

fn kinds(cache: CacheMode, engine: EngineKind) -> Vec<Kind> {
    [
        (Format::Vhdx, DiskType::Dynamic),
        (Format::Vhdx, DiskType::Differencing),
        (Format::Vhd, DiskType::Dynamic),
        (Format::Vhd, DiskType::Differencing),
        (Format::Raw, DiskType::Fixed),
    ]
    .map(|(format, disk_type)| Kind { format, disk_type, cache, engine })
    .to_vec()
}

#[test]
fn ext4_through_the_page_cache() {
    run_all("ext4", 64 * MIB, &kinds(CacheMode::PageCache, EngineKind::Auto));
}

#[test]
fn ext4_with_o_direct() {
    run_all("ext4", 64 * MIB, &kinds(CacheMode::Direct, EngineKind::Auto));
}

#[test]
fn ext4_without_a_ring() {
    run_all("ext4", 64 * MIB, &kinds(CacheMode::PageCache, EngineKind::Sync));
}

#[test]
fn xfs() {
    let mut some = kinds(CacheMode::PageCache, EngineKind::Auto);
    some.truncate(3);
    run_all("xfs", 300 * MIB, &some);
}

#[test]
fn a_copy_that_does_not_fit_fails_and_is_removed() {
    let small = match Small::new("ext4", 64 * MIB) {
        Ok(small) => small,
        Err(reason) => return println!("skipped: ext4: {reason}"),
    };
    let source = small.dir.path().join("source.raw");
    std::fs::write(&source, vec![5; 100 << 20]).unwrap();
    for name in ["new.vhdx", "new.vhd", "new.qcow2", "new.vmdk", "new.vdi", "new.raw"] {
        let path = small.mount.join(name);
        if ["new.vhdx", "new.vhd", "new.raw"].contains(&name) {
            let request = CreateRequest { size_bytes: Some(200 * MIB), preallocate: true, ..CreateRequest::default() };
            let told = create(&path, &request).unwrap_err().to_string();
            assert!(told.contains(name) && told.contains("No space left"), "{told}");
            assert!(!path.exists());
        }
        let told = convert(&source, &path, &ConvertOptions::default(), &mut |_, _| true).unwrap_err().to_string();
        assert!(told.contains(name) && told.contains("No space left"), "{told}");
        // What the whole copy needs, not the block that did not fit.
        assert!(told.contains("needs about 100 MiB, ") && told.contains("MiB are free on "), "{told}");
        assert!(!path.exists());
    }
}
