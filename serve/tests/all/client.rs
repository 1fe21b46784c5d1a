//! Our client and our server: what neither can try with programs of others, extended headers first
//! of all.

use crate::common::{memory, raw_file, serve};
use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
use diskwright_nbd::{NbdDevice, NbdUri, wire::Framing};
use diskwright_serve::net::ServerOptions;
use diskwright_store::{
    BlockDevice, Blocking, CacheMode, EngineKind, Extent, ExtentKind, IoBuf, Operation, QueueOptions, Request,
    Segments, Slab,
};
use proptest::prelude::*;
use std::{sync::Arc, thread};

const MIB: u64 = 1 << 20;

fn open(uri: &str) -> NbdDevice {
    NbdDevice::open(&NbdUri::parse(uri).unwrap(), true).unwrap()
}

#[test]
fn lengths_beyond_four_gigabytes() {
    let dir = tempfile::tempdir().unwrap();
    let size = 40 << 30;
    let device = raw_file(&dir.path().join("disk"), size, CacheMode::PageCache);
    let Some(served) = serve(vec![("disk", device)], ServerOptions::default()) else { return };
    let device = open(&served.uri("disk"));
    assert_eq!(device.export().framing, Framing::Extended);
    assert_eq!(device.export().description.as_deref(), Some("disk disk"));
    let mut queue = Blocking::open(&device, EngineKind::Auto).unwrap();
    queue.write(20 << 30, &[7; 65536], true).unwrap();
    let mut extents = Vec::new();
    device.extents(0, size, &mut extents).unwrap();
    let kinds: Vec<_> = extents.iter().map(|extent| (extent.offset_bytes, extent.kind)).collect();
    use ExtentKind::{Data, Zero};
    assert_eq!(kinds, [(0, Zero), (20 << 30, Data), ((20 << 30) + 65536, Zero)]);
    queue.discard(0, size).unwrap();
    let mut found = [1; 512];
    queue.read(20 << 30, &mut found).unwrap();
    assert_eq!(found, [0; 512]);
}

#[test]
fn segmented_payloads_pass_through_the_client() {
    let dir = tempfile::tempdir().unwrap();
    let device = raw_file(&dir.path().join("disk"), MIB, CacheMode::PageCache);
    let Some(served) = serve(vec![("disk", device)], ServerOptions::default()) else { return };
    let device = open(&served.uri("disk"));
    let mut queue = device.open_queue(&QueueOptions::default()).unwrap();
    let mut ended = |request| {
        queue.push(request).unwrap();
        let mut done = Vec::new();
        queue.reap(1, &mut done).unwrap();
        let done = done.remove(0);
        done.result.unwrap();
        let segments = done.segments.expect("the segments come back");
        let mut bytes = vec![0; segments.len()];
        segments.copy_out(0, &mut bytes).unwrap();
        bytes
    };
    let bytes: Vec<u8> = (0..200_704_u32).map(|n| (n % 251) as u8).collect();
    // First whole sectors in each segment, which are sent without a copy; then segments that must
    // be gathered.
    for (turn, lengths) in [[4096, 512, 131_072, 65_024], [1, 4095, 511, 196_097]].into_iter().enumerate() {
        let pieces = |is_shared: bool, bytes: &[u8]| {
            let (mut segments, mut at) = (Segments::new(), 0);
            for (n, len) in lengths.into_iter().enumerate() {
                let mut buf = IoBuf::new(len + 7);
                buf[7..].copy_from_slice(&bytes[at..at + len]);
                at += len;
                if is_shared && n % 2 == 0 {
                    segments.push(Arc::new(buf), 7..len + 7).unwrap();
                } else {
                    segments.push(buf, 7..len + 7).unwrap();
                }
            }
            Box::new(segments)
        };
        let offset = 512 + turn as u64 * 262_144;
        let write = Request::write_segments(offset, pieces(true, &bytes), 1);
        assert!(ended(Request { fua: true, ..write }) == bytes);
        assert!(ended(Request::read_segments(offset, pieces(false, &vec![0; bytes.len()]), 2)) == bytes);
        let file = std::fs::read(dir.path().join("disk")).unwrap();
        assert!(file[offset as usize..][..bytes.len()] == bytes);
    }
}

#[test]
fn allocation_depth_reports_the_layers_of_a_chain() {
    let dir = tempfile::tempdir().unwrap();
    let (base, top) = (dir.path().join("base.vhdx"), dir.path().join("top.vhdx"));
    let request = CreateRequest { size_bytes: Some(64 * MIB), ..CreateRequest::default() };
    create(&base, &request).unwrap();
    let writable = OpenOptions { writable: true, ..OpenOptions::default() };
    let write = |path: &std::path::Path, offset| {
        let disk = Disk::open(path, &writable).unwrap();
        Blocking::open(&*disk, EngineKind::Auto).unwrap().write(offset, &[5; 2 << 20], false).unwrap();
        disk.close().unwrap();
    };
    write(&base, 0);
    create(&top, &CreateRequest { parent: Some(base), ..CreateRequest::default() }).unwrap();
    write(&top, 8 * MIB);
    let disk = Disk::open(&top, &OpenOptions::default()).unwrap();
    let mut there = Vec::new();
    disk.extents(0, 64 * MIB, &mut there).unwrap();
    let Some(served) = serve(vec![("disk", disk as Arc<dyn BlockDevice>)], ServerOptions::default()) else { return };
    let device = NbdDevice::open(&NbdUri::parse(&served.uri("disk")).unwrap(), false).unwrap();
    let mut here = Vec::new();
    device.extents(0, 64 * MIB, &mut here).unwrap();
    let told = |extents: &[Extent]| -> Vec<_> {
        let data = extents.iter().filter(|extent| extent.kind == ExtentKind::Data);
        data.map(|extent| (extent.offset_bytes, extent.len_bytes, extent.depth)).collect()
    };
    assert_eq!(told(&here), told(&there));
    assert_eq!(told(&here), [(0, 2 * MIB, 1), (8 * MIB, 2 * MIB, 0)]);
}

#[test]
fn four_queues_have_four_connections_and_one_disk() {
    let dir = tempfile::tempdir().unwrap();
    let device = raw_file(&dir.path().join("disk"), 64 * MIB, CacheMode::Direct);
    let Some(served) = serve(vec![("disk", device)], ServerOptions::default()) else { return };
    let device = open(&served.uri("disk"));
    let barrier = std::sync::Barrier::new(4);
    thread::scope(|scope| {
        for thread in 0..4u64 {
            let (device, barrier) = (&device, &barrier);
            scope.spawn(move || {
                let slab = Slab::new(16, 65536);
                let options = QueueOptions { depth: 16, slab: Some(&slab), ..QueueOptions::default() };
                let mut queue = device.open_queue(&options).unwrap();
                let mut free = slab.take_all();
                let mut done = Vec::new();
                for step in 0..256u64 {
                    while free.is_empty() {
                        queue.reap(1, &mut done).unwrap();
                        free.extend(done.drain(..).map(|completion| completion.buf.unwrap()));
                    }
                    let mut buf = free.pop().unwrap();
                    buf.fill((thread * 64 + step % 64) as u8);
                    queue.push(Request::write((step * 4 + thread) * 65536, 65536, buf, step)).unwrap();
                }
                while queue.in_flight() > 0 {
                    queue.reap(1, &mut done).unwrap();
                }
                assert!(done.iter().all(|completion| completion.result.is_ok()));
                barrier.wait();
            });
        }
    });
    assert_eq!(device.connections(), 4);
    let mut queue = Blocking::open(&device, EngineKind::Auto).unwrap();
    let mut found = vec![0; 64 << 20];
    queue.read(0, &mut found).unwrap();
    for (n, piece) in (0u64..).zip(found.chunks(65536)) {
        let (thread, step) = (n % 4, n / 4);
        assert!(piece.iter().all(|&byte| byte == (thread * 64 + step % 64) as u8), "piece {n}");
    }
}

#[test]
fn a_shared_ring_is_refused() {
    let Some(served) = serve(vec![("m", memory(1 << 20, true))], ServerOptions::default()) else { return };
    let device = open(&served.uri("m"));
    let ring = diskwright_store::SharedRing::new(8, None).unwrap();
    let error = device.open_queue(&QueueOptions { ring: Some(&ring), ..QueueOptions::default() }).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::Unsupported);
}

#[test]
fn client_and_server_behave_as_a_disk() {
    let dir = tempfile::tempdir().unwrap();
    behaves_as_a_disk(raw_file(&dir.path().join("disk"), 4 * MIB, CacheMode::PageCache));
}

/// A flush of a dynamic disk is completed by the flusher thread and not by the ring, so the flusher
/// must wake the worker that sleeps in the ring.
#[test]
fn client_and_server_behave_as_a_dynamic_disk() {
    for name in ["disk.vhdx", "disk.vhd"] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        create(&path, &CreateRequest { size_bytes: Some(4 * MIB), ..CreateRequest::default() }).unwrap();
        let disk = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
        behaves_as_a_disk(disk);
    }
}

fn behaves_as_a_disk(disk: Arc<dyn BlockDevice>) {
    let Some(served) = serve(vec![("disk", disk)], ServerOptions::default()) else { return };
    let device = open(&served.uri("disk"));
    let operation = prop_oneof![
        4 => Just(Operation::Write), 3 => Just(Operation::Read), 1 => Just(Operation::WriteZeroes),
        1 => Just(Operation::Discard), 1 => Just(Operation::Flush)
    ];
    let step = (operation, 0u64..8000, 1u64..400, 1u8..);
    proptest!(ProptestConfig::with_cases(32), |(steps in prop::collection::vec(step, 1..30))| {
        let mut queue = Blocking::open(&device, EngineKind::Auto).unwrap();
        queue.write_zeroes(0, 4 * MIB).unwrap();
        let mut model = vec![0u8; 4 << 20];
        for (operation, sector, sectors, seed) in steps {
            let (offset, len) = (sector * 512, (sectors.min(8192 - sector) * 512) as usize);
            let range = offset as usize..offset as usize + len;
            match operation {
                Operation::Read => {
                    let mut found = vec![0xee; len];
                    queue.read(offset, &mut found).unwrap();
                    prop_assert!(found == model[range]);
                }
                Operation::Write => {
                    let data: Vec<u8> = (0..len).map(|at| (at >> 9) as u8 ^ seed).collect();
                    queue.write(offset, &data, seed % 4 == 0).unwrap();
                    model[range].copy_from_slice(&data);
                }
                Operation::WriteZeroes => {
                    queue.write_zeroes(offset, len as u64).unwrap();
                    model[range].fill(0);
                }
                Operation::Discard => {
                    queue.discard(offset, len as u64).unwrap();
                    model[range].fill(0);
                }
                Operation::Flush => queue.flush().unwrap(),
            }
        }
    });
}
