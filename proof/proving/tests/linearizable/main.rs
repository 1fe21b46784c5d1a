//! Many threads issue all kinds of requests to the same sectors, on real files: each read must show
//! what a linearizable disk may show. See `proof/proving/src/linear`.
//!
//! `DISKWRIGHT_SOAK_ROUNDS` is the number of rounds of each kind of disk (`./test --nightly` sets
//! it high), `DISKWRIGHT_SOAK_SEED` the first seed. `DISKWRIGHT_SOAK_ENGINE=pread` uses no
//! io_uring, for the thread sanitizer, which cannot see what the kernel does (`.ci/tsan`).

mod defects;
mod in_use;

use diskwright_disk::{CreateRequest, Disk, Layer, OpenOptions, create};
use diskwright_image::{DiskType, Format, probe};
use diskwright_proving::{
    linear::{Mix, Plan, Tally, round, round_beside},
    packed::{self, PackedImage},
};
use diskwright_store::{BlockDevice, Blocking, CacheMode, EngineKind, Files, SharedRing, Store};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

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

/// Rounds on an open disk, which is closed then. `beside` changes the disk meanwhile.
fn soak_on(name: &str, disk: &Disk, plan: Plan, beside: &mut dyn FnMut(&Disk) -> Result<(), String>) {
    soak_rounds(name, disk, plan, &mut || beside(disk));
    disk.close().unwrap();
}

/// Rounds on a device. Every second queue passes work that must wait to the disk's loader.
fn soak_rounds(name: &str, device: &dyn BlockDevice, plan: Plan, beside: &mut dyn FnMut() -> Result<(), String>) {
    let without_ring = std::env::var("DISKWRIGHT_SOAK_ENGINE").is_ok_and(|engine| engine == "pread");
    let engine = if without_ring { EngineKind::Sync } else { plan.engine };
    let shared_rings = !without_ring && SharedRing::new(8, None).is_ok();
    if !shared_rings {
        println!("soak: {name}: no ring, so no queue shares one, and the loader is not tested");
    }
    let (first, rounds) = (number("DISKWRIGHT_SOAK_SEED", 1), number("DISKWRIGHT_SOAK_ROUNDS", 3));
    let mut base = vec![0; device.geometry().size_bytes as usize];
    Blocking::open(device, engine).unwrap().read(0, &mut base).unwrap();
    let mut tally = Tally::default();
    for seed in first..first + rounds {
        let plan = Plan { engine, shared_rings, seed, ..plan };
        match round_beside(device, &plan, &mut base, &mut *beside) {
            Ok(done) => tally += done,
            Err(error) => panic!(
                "{name}, seed {seed}: {error}\n  again: DISKWRIGHT_SOAK_SEED={first} DISKWRIGHT_SOAK_ROUNDS={rounds}"
            ),
        }
    }
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
