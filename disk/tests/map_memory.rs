//! A map that is smaller than the disk: all reads are correct, and memory stays within the limit.

mod images;
mod meddled;

use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
use diskwright_image::{DiskType, Format};
use diskwright_store::{BlockDevice, Blocking, EngineKind, IoBuf, MemoryStore, QueueOptions, Request};
use meddled::Meddled;
use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering},
};

const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;

struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 16) % limit
    }
}

/// Resident memory of the process in bytes.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// A disk of 64 TiB in blocks of 1 MiB has 65,536 pages of map: 512 MiB. The test uses all of them.
#[test]
fn a_disk_of_64_tib_in_full_use_stays_within_its_memory_limit() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("large.vhdx");
    let request =
        CreateRequest { size_bytes: Some(64 * TIB), block_bytes: Some(MIB as u32), ..CreateRequest::default() };
    create(&path, &request).unwrap();
    let open = |map_memory_bytes| {
        Disk::open(&path, &OpenOptions { writable: true, map_memory_bytes, ..OpenOptions::default() }).unwrap()
    };
    let mut held = HashMap::new();
    for memory_bytes in [16 * MIB, 64 * MIB] {
        let before = resident_bytes();
        let disk = open((memory_bytes != 64 * MIB).then_some(memory_bytes));
        let mut queue = disk.open_queue(&QueueOptions::default()).unwrap();
        let mut dice = Dice(memory_bytes);
        let (mut done, mut free) = (Vec::new(), (0..32).map(|_| IoBuf::new(4096)).collect::<Vec<_>>());
        // Each page covers 1 GiB of the disk. Some pages are written, each at its own offset.
        for page in 0..65_536u64 {
            let page = page * 40_503 % 65_536;
            if free.is_empty() {
                queue.reap(1, &mut done).unwrap();
                for completion in done.drain(..) {
                    completion.result.unwrap();
                    free.extend(completion.buf);
                }
            }
            let Some(mut buf) = free.pop() else { panic!("no request has ended") };
            let at = page << 30;
            if dice.below(512) == 0 && !held.contains_key(&at) {
                let stamp = 1 + dice.below(255) as u8;
                buf.fill(stamp);
                held.insert(at, stamp);
                queue.push(Request::write(at, 4096, buf, page)).unwrap();
            } else {
                queue.push(Request::read(at + dice.below(1 << 18) * 4096, 4096, buf, page)).unwrap();
            }
        }
        while queue.in_flight() > 0 {
            queue.reap(1, &mut done).unwrap();
        }
        done.into_iter().for_each(|completion| completion.result.unwrap());
        let grown = resident_bytes().saturating_sub(before);
        assert!(grown <= memory_bytes + 24 * MIB, "{} MiB of memory for {} MiB", grown / MIB, memory_bytes / MIB);
        let mut reader = Blocking::open(&*disk, EngineKind::Auto).unwrap();
        let mut found = [0; 4096];
        for (&at, &stamp) in &held {
            reader.read(at, &mut found).unwrap();
            assert!(found.iter().all(|&byte| byte == stamp), "{at}: {} for {stamp}", found[0]);
        }
        drop((queue, reader));
        disk.close().unwrap();
    }
    assert!(held.len() > 100);
}

/// Images pushed on top of an open disk keep tables in memory as long as they are open for writing.
/// Together they may use a quarter of the limit; the map has the rest.
#[test]
fn the_tables_of_several_layers_share_the_memory_limit() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("base.vhdx");
    let size_bytes = 64 * MIB;
    let block_bytes = Some(MIB as u32);
    create(&path, &CreateRequest { size_bytes: Some(size_bytes), block_bytes, ..CreateRequest::default() }).unwrap();
    let options = OpenOptions { writable: true, map_memory_bytes: Some(16 * MIB), ..OpenOptions::default() };
    let disk = Disk::open(&path, &options).unwrap();
    let mut writer = Blocking::open(&*disk, EngineKind::Auto).unwrap();
    let mut layers: Vec<Arc<Meddled>> = Vec::new();
    for number in 0..3 {
        let store = Arc::new(MemoryStore::new("layer"));
        let image = meddled::image(store, Format::Vhdx, DiskType::Differencing, size_bytes);
        layers.push(Meddled::new(image, false));
        disk.push_layer(layers[number].layer("layer")).unwrap();
        // Includes the base.
        let writers = number as u64 + 2;
        for layer in &layers {
            assert_eq!(layer.tables_bytes.load(Ordering::SeqCst), 4 * MIB / writers);
        }
        writer.write(number as u64 * 4096, &[number as u8 + 1; 4096], false).unwrap();
    }
    let mut found = [0; 3 * 4096];
    writer.read(0, &mut found).unwrap();
    assert!(found.chunks(4096).zip(1..).all(|(bytes, byte)| bytes.iter().all(|&found| found == byte)));
    drop(writer);
    disk.close().unwrap();
}
