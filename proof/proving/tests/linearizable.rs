//! Many threads issue all kinds of requests to the same sectors, on real files: each read must show
//! what a linearizable disk may show. See `proof/proving/src/linear`.
//!
//! `DISKWRIGHT_SOAK_ROUNDS` is the number of rounds of each kind of disk (`./test --nightly` sets
//! it high), `DISKWRIGHT_SOAK_SEED` the first seed. `DISKWRIGHT_SOAK_ENGINE=pread` uses no
//! io_uring, for the thread sanitizer, which cannot see what the kernel does (`.ci/tsan`).

use diskwright_disk::{AbsorbOptions, CreateRequest, Disk, Layer, OpenOptions, create};
use diskwright_image::{CreateOptions, DiskType, Format, ParentLink, probe, vhd, vhdx};
use diskwright_proving::{
    linear::{Mix, Plan, Tally, round, round_beside},
    packed::{self, PackedImage},
};
use diskwright_store::{
    BlockDevice, BlockQueue, Blocking, CacheMode, Completion, EngineKind, Files, Geometry, MemoryStore, Operation,
    PushError, QueueOptions, RawDevice, Request, SharedRing, Store,
};
use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};
use uuid::Uuid;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} must be a number")))
}

const PLAN: Plan = Plan {
    threads: 4,
    steps: 500,
    depth: 8,
    engine: EngineKind::Auto,
    block_sectors: 64,
    sectors_max: 96,
    shared_rings: false,
    sweeps: false,
    mix: Mix::USUAL,
    seed: 1,
};

struct Kind {
    format: Format,
    disk_type: DiskType,
    block_bytes: u32,
    size_bytes: u64,
    cache: CacheMode,
    engine: EngineKind,
}

fn soak(name: &str, kind: &Kind) {
    let without_ring = std::env::var("DISKWRIGHT_SOAK_ENGINE").is_ok_and(|engine| engine == "pread");
    let engine = if without_ring { EngineKind::Sync } else { kind.engine };
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(format!("{name}.{}", kind.format));
    let options = OpenOptions { writable: true, cache: kind.cache, engine, ..OpenOptions::default() };
    let make = |path: &PathBuf, disk_type, parent: Option<PathBuf>| {
        let size_bytes = parent.is_none().then_some(kind.size_bytes);
        let block_bytes = (kind.format != Format::Raw).then_some(kind.block_bytes);
        let request =
            CreateRequest { size_bytes, parent, block_bytes, disk_type: Some(disk_type), ..CreateRequest::default() };
        create(path, &request).unwrap();
    };
    let mut base = vec![0; kind.size_bytes as usize];
    let mut top = path("disk");
    if kind.disk_type == DiskType::Differencing {
        make(&top, DiskType::Dynamic, None);
        let disk = Disk::open(&top, &options).unwrap();
        let mut queue = Blocking::open(&*disk, engine).unwrap();
        for start in (0..kind.size_bytes).step_by(12 << 10) {
            let bytes: Vec<u8> = (0..8 << 10).map(|at| (start + at) as u8 | 1).collect();
            let len = bytes.len().min((kind.size_bytes - start) as usize);
            queue.write(start, &bytes[..len], false).unwrap();
            base[start as usize..][..len].copy_from_slice(&bytes[..len]);
        }
        drop(queue);
        disk.close().unwrap();
        drop(disk);
        let child = path("child");
        make(&child, DiskType::Differencing, Some(top));
        top = child;
    } else {
        make(&top, kind.disk_type, None);
    }
    let (first, rounds) = (number("DISKWRIGHT_SOAK_SEED", 1), number("DISKWRIGHT_SOAK_ROUNDS", 3));
    let mut tally = Tally::default();
    let mut disk = Disk::open(&top, &options).unwrap();
    for seed in first..first + rounds {
        // Large requests in even rounds, small ones in odd rounds.
        let sectors_max = if seed % 2 == 0 { 600 } else { 24 };
        let block_sectors = u64::from(kind.block_bytes) / 512;
        let plan = Plan { engine, block_sectors, sectors_max, seed, ..PLAN };
        match round(&*disk, &plan, &mut base) {
            Ok(done) => tally += done,
            Err(error) => panic!(
                "{name}, seed {seed}: {error}\n  again: DISKWRIGHT_SOAK_SEED={first} DISKWRIGHT_SOAK_ROUNDS={rounds}"
            ),
        }
        if seed % 3 == 0 {
            disk.close().unwrap();
            drop(disk);
            disk = Disk::open(&top, &options).unwrap();
        }
    }
    disk.close().unwrap();
    println!("soak: {name}: {tally} (seeds {first} to {})", first + rounds - 1);
}

fn kind(format: Format, disk_type: DiskType, block_bytes: u32, size_bytes: u64) -> Kind {
    Kind { format, disk_type, block_bytes, size_bytes, cache: CacheMode::PageCache, engine: EngineKind::Auto }
}

#[test]
fn raw() {
    soak("raw", &kind(Format::Raw, DiskType::Fixed, 32 << 10, 1 << 20));
}

#[test]
fn vhd_dynamic() {
    soak("vhd dynamic", &kind(Format::Vhd, DiskType::Dynamic, 32 << 10, 1 << 20));
}

#[test]
fn vhd_differencing() {
    soak("vhd differencing", &kind(Format::Vhd, DiskType::Differencing, 32 << 10, 1 << 20));
}

#[test]
fn vmdk_sparse() {
    soak("vmdk sparse", &kind(Format::Vmdk, DiskType::Dynamic, 32 << 10, 1 << 20));
}

#[test]
fn vmdk_child() {
    soak("vmdk child", &kind(Format::Vmdk, DiskType::Differencing, 32 << 10, 1 << 20));
}

#[test]
fn qcow2() {
    soak("qcow2", &kind(Format::Qcow2, DiskType::Dynamic, 32 << 10, 1 << 20));
}

#[test]
fn qcow2_child() {
    soak("qcow2 child", &kind(Format::Qcow2, DiskType::Differencing, 32 << 10, 1 << 20));
}

#[test]
fn vdi_dynamic() {
    soak("vdi dynamic", &kind(Format::Vdi, DiskType::Dynamic, 32 << 10, 1 << 20));
}

#[test]
fn vdi_child() {
    soak("vdi child", &kind(Format::Vdi, DiskType::Differencing, 32 << 10, 1 << 20));
}

#[test]
fn vhdx_dynamic() {
    soak("vhdx dynamic", &kind(Format::Vhdx, DiskType::Dynamic, 1 << 20, 3 << 20));
}

#[test]
fn vhdx_dynamic_past_the_page_cache() {
    let cache = CacheMode::Direct;
    soak("vhdx dynamic, direct", &Kind { cache, ..kind(Format::Vhdx, DiskType::Dynamic, 1 << 20, 3 << 20) });
}

#[test]
fn vhdx_differencing() {
    soak("vhdx differencing", &kind(Format::Vhdx, DiskType::Differencing, 1 << 20, 3 << 20));
}

#[test]
fn vhdx_differencing_without_a_ring() {
    let engine = EngineKind::Sync;
    soak("vhdx differencing, pread", &Kind { engine, ..kind(Format::Vhdx, DiskType::Differencing, 1 << 20, 3 << 20) });
}

/// Rounds on an open disk. Every second queue passes work that must wait to the disk's loader.
/// `beside` changes the disk meanwhile.
fn soak_on(name: &str, disk: &Disk, plan: Plan, beside: &mut dyn FnMut(&Disk) -> Result<(), String>) {
    let without_ring = std::env::var("DISKWRIGHT_SOAK_ENGINE").is_ok_and(|engine| engine == "pread");
    let engine = if without_ring { EngineKind::Sync } else { plan.engine };
    let shared_rings = !without_ring && SharedRing::new(8, None).is_ok();
    if !shared_rings {
        println!("soak: {name}: no ring, so no queue shares one, and the loader is not tested");
    }
    let (first, rounds) = (number("DISKWRIGHT_SOAK_SEED", 1), number("DISKWRIGHT_SOAK_ROUNDS", 3));
    let mut base = vec![0; disk.geometry().size_bytes as usize];
    Blocking::open(disk, engine).unwrap().read(0, &mut base).unwrap();
    let mut tally = Tally::default();
    for seed in first..first + rounds {
        let plan = Plan { engine, shared_rings, seed, ..plan };
        match round_beside(disk, &plan, &mut base, || beside(disk)) {
            Ok(done) => tally += done,
            Err(error) => panic!(
                "{name}, seed {seed}: {error}\n  again: DISKWRIGHT_SOAK_SEED={first} DISKWRIGHT_SOAK_ROUNDS={rounds}"
            ),
        }
    }
    disk.close().unwrap();
    println!("soak: {name}: {tally} (seeds {first} to {})", first + rounds - 1);
}

fn nothing_beside(_: &Disk) -> Result<(), String> {
    Ok(())
}

fn new_file(path: &Path) -> Arc<dyn Store> {
    let options =
        diskwright_store::OpenOptions { writable: true, create_new: true, ..diskwright_store::OpenOptions::default() };
    Files::default().open(path, &options).unwrap()
}

fn made(path: &Path, request: &CreateRequest) -> Arc<Disk> {
    create(path, request).unwrap();
    Disk::open(path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap()
}

/// Images are added while the disk is in use: with the same block size, and with a smaller one, for
/// which the map is rebuilt.
fn soak_with_snapshots(format: Format, size_bytes: u64, block_bytes: [u32; 2]) {
    let dir = tempfile::tempdir().unwrap();
    let request =
        CreateRequest { size_bytes: Some(size_bytes), block_bytes: Some(block_bytes[0]), ..CreateRequest::default() };
    let disk = made(&dir.path().join(format!("disk.{format}")), &request);
    let mut joined = 0;
    let mut beside = |disk: &Disk| {
        for block_bytes in block_bytes {
            thread::sleep(Duration::from_millis(10));
            joined += 1;
            let path = dir.path().join(format!("disk-{joined}.{format}"));
            let parent = ParentLink {
                relative_path: Some(r".\below".into()),
                linkage: Some(Uuid::from_u128(1).into()),
                ..ParentLink::default()
            };
            let options = CreateOptions {
                disk_type: DiskType::Differencing,
                size_bytes,
                block_bytes: Some(block_bytes),
                logical_sector_bytes: 512,
                physical_sector_bytes: 512,
                parent: Some(parent),
                preallocate: false,
                disk_id: None,
                own: Default::default(),
            };
            let store = new_file(&path);
            let made = match format {
                Format::Vhd => vhd::create(Arc::clone(&store), &options),
                _ => vhdx::create(Arc::clone(&store), &options),
            };
            made.map_err(|error| error.to_string())?;
            let image = probe::open(store, Some(format), true, 512).map_err(|error| error.to_string())?;
            disk.push_layer(Layer { path, image }).map_err(|error| error.to_string())?;
        }
        Ok(())
    };
    let plan = Plan { block_sectors: u64::from(block_bytes[0]) / 512, ..PLAN };
    soak_on(&format!("{format} dynamic, with snapshots"), &disk, plan, &mut beside);
    assert!(disk.layers().len() > 2);
}

#[test]
fn vhd_with_snapshots() {
    soak_with_snapshots(Format::Vhd, 1 << 20, [32 << 10, 16 << 10]);
}

#[test]
fn vhdx_with_snapshots() {
    soak_with_snapshots(Format::Vhdx, 4 << 20, [2 << 20, 1 << 20]);
}

/// The disk is frozen and merged again while it is in use, each time with the same names.
fn soak_with_merges(format: Format, size_bytes: u64, block_bytes: u32) {
    let dir = tempfile::tempdir().unwrap();
    let request =
        CreateRequest { size_bytes: Some(size_bytes), block_bytes: Some(block_bytes), ..CreateRequest::default() };
    let disk = made(&dir.path().join(format!("disk.{format}")), &request);
    let mut merged_bytes = 0;
    let mut beside = |disk: &Disk| {
        for _ in 0..2 {
            thread::sleep(Duration::from_millis(5));
            disk.snapshot("frozen", false, &mut ()).map_err(|error| error.to_string())?;
            thread::sleep(Duration::from_millis(5));
            let absorbed = disk.absorb(&AbsorbOptions::default(), &mut |_, _| true);
            merged_bytes += absorbed.map_err(|error| error.to_string())?.data_bytes;
        }
        Ok(())
    };
    let plan = Plan { block_sectors: u64::from(block_bytes) / 512, ..PLAN };
    soak_on(&format!("{format} dynamic, merged in use"), &disk, plan, &mut beside);
    assert!(disk.layers().len() == 1 && merged_bytes > 0);
}

#[test]
fn vhd_merged_in_use() {
    soak_with_merges(Format::Vhd, 1 << 20, 32 << 10);
}

#[test]
fn vhdx_merged_in_use() {
    soak_with_merges(Format::Vhdx, 4 << 20, 1 << 20);
}

#[test]
fn raw_growing() {
    let dir = tempfile::tempdir().unwrap();
    let disk =
        made(&dir.path().join("disk.raw"), &CreateRequest { size_bytes: Some(512 << 10), ..CreateRequest::default() });
    let mut beside = |disk: &Disk| {
        for _ in 0..4 {
            thread::sleep(Duration::from_millis(5));
            disk.grow(disk.geometry().size_bytes + (24 << 10)).map_err(|error| error.to_string())?;
        }
        Ok(())
    };
    soak_on("raw, growing", &disk, PLAN, &mut beside);
}

/// Blocks that must be filled before a part of them is written: some are packed, some in a parent.
#[test]
fn blocks_that_are_filled_first() {
    let size_bytes = 1_u64 << 20;
    for (name, block_bytes) in [("packed 8K", 8_u64 << 10), ("packed 64K", 64 << 10)] {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let parent = new_file(&path("parent"));
        let bytes: Vec<u8> = (0..size_bytes).map(|at| at as u8 ^ (at >> 9) as u8 | 1).collect();
        parent.write_at(&bytes, 0).unwrap();
        let stores = [new_file(&path("table")), new_file(&path("blocks"))];
        packed::create(&*stores[0], size_bytes / block_bytes).unwrap();
        let image = Arc::new(PackedImage::open(stores, size_bytes, block_bytes, true).unwrap());
        let parent = probe::open(parent, Some(Format::Raw), false, 512).unwrap();
        let layers = vec![Layer { path: path("table"), image }, Layer { path: path("parent"), image: parent }];
        let disk = Disk::from_layers(layers, Vec::new()).unwrap();
        let plan = Plan { block_sectors: block_bytes / 512, ..PLAN };
        soak_on(name, &disk, plan, &mut nothing_beside);
    }
}

/// Discards more blocks than are zeroed without releasing the lock, so in stages, while others
/// write to them.
#[test]
fn large_discards_during_writes() {
    let dir = tempfile::tempdir().unwrap();
    let request = CreateRequest { size_bytes: Some(1100 * 4096), block_bytes: Some(4096), ..CreateRequest::default() };
    let disk = made(&dir.path().join("disk.vhd"), &request);
    let plan = Plan { block_sectors: 8, sweeps: true, steps: 250, ..PLAN };
    soak_on("vhd dynamic 4K, swept", &disk, plan, &mut nothing_beside);
}

#[test]
fn the_loader_and_private_rings_on_one_disk() {
    let dir = tempfile::tempdir().unwrap();
    for (format, size_bytes, block_bytes) in [(Format::Vhd, 1 << 20, 32 << 10), (Format::Vhdx, 3 << 20, 1 << 20)] {
        let base = dir.path().join(format!("base.{format}"));
        let request =
            CreateRequest { size_bytes: Some(size_bytes), block_bytes: Some(block_bytes), ..CreateRequest::default() };
        let disk = made(&base, &request);
        let mut queue = Blocking::open(&*disk, EngineKind::Auto).unwrap();
        for start in (0..size_bytes).step_by(12 << 10) {
            queue.write(start, &[start as u8 | 1; 4 << 10], false).unwrap();
        }
        drop(queue);
        disk.close().unwrap();
        drop(disk);
        let disk = made(
            &dir.path().join(format!("disk.{format}")),
            &CreateRequest { parent: Some(base), block_bytes: Some(block_bytes), ..CreateRequest::default() },
        );
        let plan = Plan { block_sectors: u64::from(block_bytes) / 512, ..PLAN };
        soak_on(&format!("{format} differencing, with a loader"), &disk, plan, &mut nothing_beside);
    }
}

/// A defect of a disk, which occurs in one of 41 requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Defect {
    /// No defect.
    None,
    /// A write is acknowledged, and carried out some requests later.
    LateWrite,
    /// A write is acknowledged and never carried out.
    LostWrite,
    /// A write covers one sector more than it should.
    LongWrite,
    /// Zeroes stop one sector early.
    ShortZeroes,
    /// A read returns the data of the queue's last read.
    StaleRead,
    /// A read returns the data of the previous sector.
    WrongPlace,
    /// A write is carried out twice, the second time after it was acknowledged, so it may overwrite
    /// newer data.
    Echo,
}

/// A disk with a defect.
#[derive(Debug)]
struct FaultyDisk {
    below: RawDevice,
    defect: Defect,
    requests: Arc<AtomicU64>,
}

#[derive(Debug)]
struct FaultyQueue {
    below: Box<dyn BlockQueue>,
    defect: Defect,
    requests: Arc<AtomicU64>,
    size_bytes: u64,
    pushes: u64,
    /// Writes to be carried out later: at which push, offset, bytes.
    owed: Vec<(u64, u64, Vec<u8>)>,
    /// Completions of requests that were not passed on.
    invented: Vec<Completion>,
    last_read: Vec<u8>,
    /// Tags of reads that will return stale data.
    stale: Vec<u64>,
}

impl BlockDevice for FaultyDisk {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        Ok(Box::new(FaultyQueue {
            below: self.below.open_queue(options)?,
            defect: self.defect,
            requests: Arc::clone(&self.requests),
            size_bytes: self.geometry().size_bytes,
            pushes: 0,
            owed: Vec::new(),
            invented: Vec::new(),
            last_read: Vec::new(),
            stale: Vec::new(),
        }))
    }
}

impl FaultyQueue {
    /// Carries out an additional write.
    fn write_now(&mut self, offset_bytes: u64, bytes: &[u8]) {
        let mut buf = diskwright_store::IoBuf::new(bytes.len());
        buf.copy_from_slice(bytes);
        self.below.push(Request::write(offset_bytes, bytes.len(), buf, u64::MAX)).unwrap();
        let mut done = Vec::new();
        while !done.iter().any(|completion: &Completion| completion.tag == u64::MAX) {
            self.below.reap(1, &mut done).unwrap();
        }
        done.retain(|completion| completion.tag != u64::MAX);
        self.invented.append(&mut done);
    }
}

impl BlockQueue for FaultyQueue {
    fn depth(&self) -> usize {
        self.below.depth()
    }

    fn in_flight(&self) -> usize {
        self.below.in_flight() + self.invented.len()
    }

    fn push(&mut self, mut request: Request) -> Result<(), Box<PushError>> {
        self.pushes += 1;
        if self.owed.first().is_some_and(|(due, ..)| *due == self.pushes) {
            let (_, offset_bytes, bytes) = self.owed.remove(0);
            self.write_now(offset_bytes, &bytes);
        }
        // After this many pushes the completion has been returned, as not so many can be in flight.
        let due = self.pushes + PLAN.depth as u64 + 4;
        let is_due = self.requests.fetch_add(1, Ordering::Relaxed) % 41 == 40;
        let bytes = |request: &Request| request.buf.as_ref().unwrap()[..request.len_bytes as usize].to_vec();
        let invent = |request: Request| Completion {
            tag: request.tag,
            buf: request.buf,
            segments: request.segments,
            result: Ok(()),
        };
        match (request.operation, if is_due { self.defect } else { Defect::None }) {
            (Operation::Write, Defect::LateWrite) => {
                self.owed.push((due, request.offset_bytes, bytes(&request)));
                self.invented.push(invent(request));
                return Ok(());
            }
            (Operation::Write, Defect::LostWrite) => {
                self.invented.push(invent(request));
                return Ok(());
            }
            (Operation::Write, Defect::Echo) => self.owed.push((due, request.offset_bytes, bytes(&request))),
            (Operation::Write, Defect::LongWrite) if request.offset_bytes + request.len_bytes < self.size_bytes => {
                let mut longer = bytes(&request);
                longer.resize(longer.len() + 512, 0x77);
                self.write_now(request.offset_bytes, &longer);
            }
            (Operation::WriteZeroes | Operation::Discard, Defect::ShortZeroes) if request.len_bytes > 512 => {
                request.len_bytes -= 512;
            }
            (Operation::Read, Defect::StaleRead) => self.stale.push(request.tag),
            (Operation::Read, Defect::WrongPlace) if request.offset_bytes > 0 => request.offset_bytes -= 512,
            _ => {}
        }
        self.below.push(request)
    }

    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        let from = out.len();
        out.append(&mut self.invented);
        let missing = at_least.saturating_sub(out.len() - from);
        self.below.reap(missing, out)?;
        for completion in &mut out[from..] {
            let Some(buf) = &mut completion.buf else { continue };
            if self.stale.contains(&completion.tag) {
                let len = buf.len().min(self.last_read.len());
                buf[..len].copy_from_slice(&self.last_read[..len]);
            }
            self.last_read = buf.to_vec();
        }
        Ok(())
    }
}

#[test]
fn every_defect_is_detected() {
    let defects = [
        Defect::LateWrite,
        Defect::LostWrite,
        Defect::LongWrite,
        Defect::ShortZeroes,
        Defect::StaleRead,
        Defect::WrongPlace,
        Defect::Echo,
    ];
    let try_one = |defect: Defect, seed: u64| {
        let store = Arc::new(MemoryStore::with_bytes("memory", vec![0; 256 << 10]));
        let below = RawDevice::new(store, true, 512).unwrap();
        let device = FaultyDisk { below, defect, requests: Arc::default() };
        let plan = Plan { steps: 200, engine: EngineKind::Sync, seed, ..PLAN };
        round(&device, &plan, &mut vec![0; 256 << 10])
    };
    for seed in 1..=8 {
        assert_eq!(try_one(Defect::None, seed).map(|tally| tally.requests > 500), Ok(true));
    }
    for defect in defects {
        let caught = (1..=16).find_map(|seed| Some((seed, try_one(defect, seed).err()?)));
        let (seed, how) = caught.unwrap_or_else(|| panic!("{defect:?} was not detected"));
        println!("soak: caught: {defect:?} (seed {seed}): {how}");
    }
}
