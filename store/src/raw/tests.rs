use super::*;
use crate::{EngineKind, IoBuf, MemoryStore, Slab, queue::Blocking};
use proptest::prelude::*;
use std::{fs, path::PathBuf};

fn file(directory: &tempfile::TempDir, bytes: &[u8]) -> PathBuf {
    let path = directory.path().join("disk.raw");
    fs::write(&path, bytes).expect("a file");
    path
}

fn kinds() -> Vec<EngineKind> {
    let uring = Engine::new(EngineKind::Uring, 1, None);
    if let Err(error) = &uring {
        eprintln!("skipped: no io_uring: {error}");
    }
    if uring.is_ok() { vec![EngineKind::Uring, EngineKind::Sync] } else { vec![EngineKind::Sync] }
}

#[test]
fn the_size_is_rounded_up_to_a_sector() {
    let directory = tempfile::tempdir().unwrap();
    for kind in kinds() {
        for cache in [CacheMode::PageCache, CacheMode::Direct] {
            let path = file(&directory, &[8; 5000]);
            let device = RawDevice::open(&path, true, cache).unwrap();
            assert_eq!((device.geometry().size_bytes, device.geometry().logical_sector_bytes), (5120, 512));
            let mut disk = Blocking::open(&device, kind).unwrap();
            let mut all = vec![1; 5120];
            disk.read(0, &mut all).unwrap();
            assert_eq!((&all[..5000], &all[5000..]), (&[8; 5000][..], &[0; 120][..]));
            // The file ends within its last sector. Zeroing that sector must not fail.
            disk.write_zeroes(4608, 512).unwrap();
            disk.discard(4096, 1024).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().len(), 5000);
            disk.write(4608, &[9; 512], false).unwrap();
            disk.flush().unwrap();
            let now = fs::read(&path).unwrap();
            assert_eq!((now.len(), &now[4096..4608], &now[4608..]), (5120, &[0; 512][..], &[9; 512][..]));
        }
    }
}

#[test]
fn invalid_requests_are_refused_with_their_buffer() {
    let directory = tempfile::tempdir().unwrap();
    let path = file(&directory, &[0; 65536]);
    let device = RawDevice::open(&path, false, CacheMode::PageCache).unwrap();
    assert!(device.geometry().read_only);
    let mut queue = device.open_queue(&QueueOptions { depth: 2, ..QueueOptions::default() }).unwrap();
    let mut refused = |request, kind| {
        let refusal = queue.push(request).unwrap_err();
        assert_eq!(refusal.reason.kind(), kind);
        assert!(refusal.request.buf.is_some());
    };
    refused(Request::read(65536, 512, IoBuf::new(512), 0), io::ErrorKind::InvalidInput);
    refused(Request::read(100, 512, IoBuf::new(512), 0), io::ErrorKind::InvalidInput);
    refused(Request::read(0, 1024, IoBuf::new(512), 0), io::ErrorKind::InvalidInput);
    refused(Request::write(0, 512, IoBuf::new(512), 0), io::ErrorKind::ReadOnlyFilesystem);
    queue.push(Request::read(0, 512, IoBuf::new(512), 1)).unwrap();
    queue.push(Request::read(512, 512, IoBuf::new(512), 2)).unwrap();
    let refusal = queue.push(Request::read(0, 512, IoBuf::new(512), 3)).unwrap_err();
    assert_eq!((refusal.reason.kind(), queue.in_flight(), queue.depth()), (io::ErrorKind::WouldBlock, 2, 2));
    let mut done = Vec::new();
    queue.reap(9, &mut done).unwrap();
    assert_eq!((done.len(), queue.in_flight()), (2, 0));
    assert!(RawDevice::new(Arc::new(MemoryStore::new("m")), true, 511).is_err());
}

#[test]
fn an_empty_disk_refuses_reads_and_has_no_extents() {
    for kind in kinds() {
        let device = RawDevice::new(Arc::new(MemoryStore::new("empty")), true, 512).unwrap();
        let mut disk = Blocking::open(&device, kind).unwrap();
        disk.write_zeroes(0, 0).unwrap();
        disk.flush().unwrap();
        assert!(disk.read(0, &mut [0; 512]).is_err());
        let mut extents = Vec::new();
        device.extents(0, 512, &mut extents).unwrap();
        assert!(extents.is_empty());
    }
}

#[test]
fn extents_are_whole_sectors_without_gaps() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.raw");
    let sparse = fs::File::create(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, &[1; 65536], 1 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, &[2; 700], 3 << 20).unwrap();
    sparse.sync_all().unwrap();
    let device = RawDevice::open(&path, false, CacheMode::PageCache).unwrap();
    let of = |offset_bytes, len_bytes| {
        let mut extents = Vec::new();
        device.extents(offset_bytes, len_bytes, &mut extents).unwrap();
        extents.into_iter().map(|e| (e.offset_bytes, e.len_bytes, e.kind, e.file_offset_bytes)).collect::<Vec<_>>()
    };
    let (zero, data) = (ExtentKind::Zero, ExtentKind::Data);
    let (mib, size_bytes) = (1u64 << 20, device.geometry().size_bytes);
    assert_eq!(size_bytes, 3 * mib + 1024);
    let expected = [
        (0, mib, zero, None),
        (mib, 65536, data, Some(mib)),
        (mib + 65536, 2 * mib - 65536, zero, None),
        (3 * mib, 1024, data, Some(3 * mib)),
    ];
    assert_eq!(of(0, size_bytes), expected);
    assert_eq!(of(mib + 512, 512), [(mib + 512, 512, data, Some(mib + 512))]);
    assert_eq!(of(512, 1024), [(512, 1024, zero, None)]);
}

const SECTOR_BYTES: usize = 512;
const REGION_SECTORS: usize = 320;
const REGIONS: usize = 8;

#[derive(Debug, Clone)]
struct Step {
    operation: Operation,
    sector: usize,
    sectors: usize,
    byte: u8,
    fua: bool,
}

fn step() -> impl Strategy<Value = Step> {
    let operation = prop_oneof![
        3 => Just(Operation::Read),
        3 => Just(Operation::Write),
        1 => Just(Operation::WriteZeroes),
        1 => Just(Operation::Discard),
        1 => Just(Operation::Flush),
    ];
    let unit = prop_oneof![Just(8usize), Just(1usize)];
    (operation, 0..REGION_SECTORS, 1..=REGION_SECTORS, unit, any::<u8>(), any::<bool>()).prop_map(
        |(operation, sector, sectors, unit, byte, fua)| {
            let sector = sector / unit * unit;
            Step {
                operation,
                sector,
                sectors: (sectors.next_multiple_of(unit)).min(REGION_SECTORS - sector),
                byte,
                fua,
            }
        },
    )
}

fn check_against_model(engine: EngineKind, registered: bool, cache: CacheMode, batches: &[Vec<Step>]) {
    let directory = tempfile::tempdir().unwrap();
    let mut model: Vec<u8> = (0..REGIONS * REGION_SECTORS * SECTOR_BYTES).map(|n| (n % 253) as u8).collect();
    let path = file(&directory, &model);
    let device = RawDevice::open(&path, true, cache).unwrap();
    let slab = Slab::new(REGIONS, REGION_SECTORS * SECTOR_BYTES);
    let mut bufs = slab.take_all();
    let mut queue = device
        .open_queue(&QueueOptions { depth: REGIONS, engine, slab: registered.then_some(&slab), ring: None })
        .unwrap();
    let mut done = Vec::new();
    for batch in batches {
        let mut reads = vec![None; batch.len()];
        for (region, step) in batch.iter().enumerate() {
            let offset_bytes = (region * REGION_SECTORS + step.sector) * SECTOR_BYTES;
            let range = offset_bytes..offset_bytes + step.sectors * SECTOR_BYTES;
            let mut buf = bufs.pop().unwrap();
            match step.operation {
                Operation::Read => reads[region] = Some(range.clone()),
                Operation::Write => {
                    buf.fill(step.byte);
                    model[range.clone()].fill(step.byte);
                }
                Operation::WriteZeroes | Operation::Discard => model[range.clone()].fill(0),
                Operation::Flush => {}
            }
            let (offset_bytes, len_bytes) = (offset_bytes as u64, range.len() as u64);
            queue
                .push(Request {
                    operation: step.operation,
                    offset_bytes,
                    len_bytes,
                    buf: Some(buf),
                    segments: None,
                    buf_offset_bytes: 0,
                    tag: region as u64,
                    fua: step.fua,
                })
                .unwrap();
        }
        while queue.in_flight() > 0 {
            let before = done.len();
            queue.reap(1, &mut done).unwrap();
            assert!(done.len() > before);
        }
        assert_eq!(done.len(), batch.len());
        for ended in done.drain(..) {
            ended.result.unwrap();
            let buf = ended.buf.unwrap();
            if let Some(range) = reads[ended.tag as usize].take() {
                assert!(buf[..range.len()] == model[range], "{:?}", batch[ended.tag as usize]);
            }
            bufs.push(buf);
        }
    }
    drop(queue);
    assert!(fs::read(&path).unwrap() == model, "the file differs after {batches:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10))]

    #[test]
    fn reads_and_file_match_a_model(batches in prop::collection::vec(prop::collection::vec(step(), 1..=REGIONS), 1..5)) {
        for kind in kinds() {
            for cache in [CacheMode::PageCache, CacheMode::Direct] {
                check_against_model(kind, true, cache, &batches);
                check_against_model(kind, false, cache, &batches);
            }
        }
    }
}
