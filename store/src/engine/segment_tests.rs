//! Scatter-gather payloads: own, shared and another process's memory, split anywhere, through the
//! ring, the pool, lanes and blocking calls.

use super::{
    lane_tests::{Remote, RemoteStore},
    tests::{KINDS, engine, engines, file, pattern},
    *,
};
use crate::{
    BlockDevice, CacheMode, MappedMemory, MemoryStore, OverlayStore, QueueOptions, RawDevice, Request, SegmentMemory,
    Segments, Store,
};
use proptest::prelude::*;
use rustix::fs::MemfdFlags;
use std::{fs, os::fd::AsFd};

const FILE_BYTES: usize = 256 << 10;

/// Memory as a guest would share it.
fn mapped(len_bytes: usize) -> Arc<MappedMemory> {
    let fd = rustix::fs::memfd_create("guest", MemfdFlags::ALLOW_SEALING).unwrap();
    let len_bytes = len_bytes.next_multiple_of(4096) as u64;
    rustix::fs::ftruncate(&fd, len_bytes).unwrap();
    MappedMemory::of_memfd(fd.as_fd(), FileRange { offset_bytes: 0, len_bytes }, true).unwrap()
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Own,
    Shared,
    Mapped,
}

/// `bytes` as segments of these lengths (repeated), each at this offset of its memory.
fn cut(bytes: &[u8], pieces: &[(Kind, usize, usize)], shares: bool) -> Box<Segments> {
    let (mut segments, mut at) = (Segments::new(), 0);
    for &(kind, len, lead) in pieces.iter().cycle() {
        let last = segments.count() == 1023;
        let len = if last { bytes.len() - at } else { len.min(bytes.len() - at) };
        let piece = &bytes[at..at + len];
        at += len;
        let mut buf = IoBuf::new(lead + len + 3);
        buf[lead..lead + len].copy_from_slice(piece);
        let memory: SegmentMemory = match kind {
            Kind::Mapped => {
                let memory = mapped(lead + len);
                memory.copy_in(lead, piece).unwrap();
                memory.into()
            }
            Kind::Shared if shares => Arc::new(buf).into(),
            _ => buf.into(),
        };
        segments.push(memory, lead..lead + len).unwrap();
        if at == bytes.len() {
            break;
        }
    }
    Box::new(segments)
}

fn contents(segments: &Segments) -> Vec<u8> {
    let mut bytes = vec![0; segments.len()];
    segments.copy_out(0, &mut bytes).unwrap();
    bytes
}

fn write(engine: &mut Engine, target: TargetId, offset: u64, segments: Box<Segments>) -> EngineCompletion {
    let (slot, len) = (engine.begin(7, 8, None), segments.len());
    engine.attach(&slot, Some(segments));
    engine.write(&slot, target, offset, 0..len, false);
    engine.end(slot);
    tests::only(engine)
}

fn read(engine: &mut Engine, target: TargetId, offset: u64, segments: Box<Segments>) -> EngineCompletion {
    let (slot, len) = (engine.begin(9, 10, None), segments.len());
    engine.attach(&slot, Some(segments));
    engine.read(&slot, target, offset, 0..len);
    engine.end(slot);
    tests::only(engine)
}

fn piece() -> impl Strategy<Value = (Kind, usize, usize)> {
    let kind = prop_oneof![Just(Kind::Own), Just(Kind::Shared), Just(Kind::Mapped)];
    let len = prop_oneof![Just(1_usize), Just(511), Just(512), Just(4095), Just(4096), Just(8192), 1_usize..20_000];
    (kind, len, prop_oneof![Just(0_usize), Just(0), Just(1), Just(512), Just(4096)])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn segments_are_written_and_read_back(
        steps in prop::collection::vec((0_u64..300, 1_usize..100, prop::collection::vec(piece(), 1..6), any::<u8>()), 1..5)
    ) {
        for cache in [CacheMode::PageCache, CacheMode::Direct] {
            for mut engine in engines(8) {
                let dir = tempfile::tempdir().unwrap();
                let path = dir.path().join("file");
                let mut model = pattern(FILE_BYTES);
                let target = engine.add_target(&file(&path, &model, cache)).unwrap();
                for (sector, sectors, pieces, byte) in &steps {
                    let start = *sector as usize * 512;
                    let end = (start + sectors * 512).min(FILE_BYTES);
                    let bytes: Vec<u8> = (start..end).map(|n| (n % 241) as u8 ^ byte).collect();
                    let ended = write(&mut engine, target, start as u64, cut(&bytes, pieces, true));
                    ended.result.unwrap();
                    prop_assert_eq!((ended.tag, ended.cookie, ended.lost), (7, 8, false));
                    prop_assert!(contents(&ended.segments.unwrap()) == bytes, "the payload was changed");
                    model[start..end].copy_from_slice(&bytes);
                    let ended = read(&mut engine, target, start as u64, cut(&vec![0xEE; bytes.len()], pieces, false));
                    ended.result.unwrap();
                    prop_assert!(contents(&ended.segments.unwrap()) == bytes, "{cache:?} {:?}", engine.kind());
                }
                drop(engine);
                prop_assert!(fs::read(&path).unwrap() == model);
            }
        }
    }
}

#[test]
fn a_sector_is_never_written_by_two_parts() {
    let dir = tempfile::tempdir().unwrap();
    let store = file(&dir.path().join("file"), &[0; 32 << 10], CacheMode::PageCache);
    for mut engine in engines(8) {
        let target = engine.add_target(&store).unwrap();
        // The segments meet at 5000 and 5100, within one unit, and at 16384, on a boundary of
        // units.
        let pieces = [(Kind::Own, 5000, 0), (Kind::Shared, 100, 0), (Kind::Mapped, 11_284, 0), (Kind::Own, 8192, 0)];
        let before = engine.stats().parts;
        write(&mut engine, target, 512, cut(&pattern(24_576), &pieces, true)).result.unwrap();
        // 4096 bytes of the first; one gathered unit; the rest of the third; the fourth.
        assert_eq!(engine.stats().parts - before, 4);
    }
}

#[test]
fn pieces_of_the_slab_are_written_as_registered_buffers() {
    let slab = Slab::new(4, 4096);
    let dir = tempfile::tempdir().unwrap();
    let store = file(&dir.path().join("file"), &[0; 16 << 10], CacheMode::Direct);
    let Some(mut engine) = engine(EngineKind::Uring, 4, Some(&slab)) else { return };
    let target = engine.add_target(&store).unwrap();
    let mut segments = Segments::new();
    for (n, mut buf) in slab.take_all().into_iter().enumerate() {
        buf.fill(n as u8);
        segments.push(buf, 0..4096).unwrap();
    }
    let ended = write(&mut engine, target, 0, Box::new(segments));
    ended.result.unwrap();
    let mut shown = vec![0; 16 << 10];
    store.read_at(&mut shown, 0).unwrap();
    assert!(shown.chunks(4096).enumerate().all(|(n, chunk)| chunk.iter().all(|&byte| byte == n as u8)));
    assert!(
        ended
            .segments
            .unwrap()
            .clear()
            .all(|segment| matches!(&segment.memory, SegmentMemory::Own(buf) if slab.owns(buf)))
    );
}

#[test]
fn a_lane_and_the_pool_get_copies_of_a_guests_memory() {
    for mut engine in engines(8) {
        let pieces = [(Kind::Mapped, 1024, 3), (Kind::Own, 512, 1), (Kind::Mapped, 6000, 0), (Kind::Shared, 2000, 9)];
        let bytes = pattern(16 << 10);
        let remote = Remote::new(vec![0; 32 << 10]);
        remote.release(1000);
        let memory = Arc::new(MemoryStore::with_bytes("memory", vec![0; 32 << 10]));
        for store in [Arc::new(RemoteStore(remote)) as Arc<dyn Store>, memory] {
            let target = engine.add_target(&store).unwrap();
            let ended = write(&mut engine, target, 512, cut(&bytes, &pieces, true));
            ended.result.unwrap();
            assert!(contents(&ended.segments.unwrap()) == bytes);
            let ended = read(&mut engine, target, 512, cut(&vec![0; bytes.len()], &pieces, false));
            ended.result.unwrap();
            assert!(contents(&ended.segments.unwrap()) == bytes, "{:?}", store.name());
        }
    }
}

#[test]
fn replaced_pages_of_an_overlay_are_copied_into_a_guests_memory() {
    let dir = tempfile::tempdir().unwrap();
    let base = file(&dir.path().join("file"), &pattern(32 << 10), CacheMode::PageCache);
    let mut expected = pattern(32 << 10);
    expected[8192..12_288].fill(3);
    let pages = [(8192, vec![3; 4096].into_boxed_slice())].into();
    let store: Arc<dyn Store> = Arc::new(OverlayStore::new(base, pages, 0).unwrap());
    for mut engine in engines(8) {
        let target = engine.add_target(&store).unwrap();
        let pieces = [(Kind::Mapped, 5000, 0), (Kind::Own, 700, 1), (Kind::Mapped, 900, 3)];
        let ended = read(&mut engine, target, 4096, cut(&vec![0; 16 << 10], &pieces, false));
        ended.result.unwrap();
        assert!(contents(&ended.segments.unwrap()) == expected[4096..20_480]);
    }
}

#[test]
fn zeros_and_bytes_are_filled_into_pieces() {
    for mut engine in engines(4) {
        let slot = engine.begin(1, 0, None);
        engine.attach(&slot, Some(cut(&[9; 1000], &[(Kind::Mapped, 100, 5), (Kind::Own, 33, 2)], false)));
        engine.fill_zeros(&slot, 90..250);
        engine.fill(&slot, 500, &pattern(400));
        engine.end(slot);
        let ended = tests::only(&mut engine);
        ended.result.unwrap();
        let mut expected = vec![9; 1000];
        expected[90..250].fill(0);
        expected[500..900].copy_from_slice(&pattern(400));
        assert!(contents(&ended.segments.unwrap()) == expected);
    }
}

#[test]
fn nothing_is_read_or_filled_into_memory_that_is_shared() {
    let shared = Arc::new(IoBuf::new(4096));
    let dir = tempfile::tempdir().unwrap();
    let store = file(&dir.path().join("file"), &[7; 8192], CacheMode::PageCache);
    for mut engine in engines(4) {
        let target = engine.add_target(&store).unwrap();
        for how in 0..4 {
            let mut segments = Segments::new();
            segments.push(Arc::clone(&shared), 0..4096).unwrap();
            let slot = engine.begin(1, 0, None);
            engine.attach(&slot, Some(Box::new(segments)));
            match how {
                0 => engine.read(&slot, target, 0, 0..4096),
                1 => engine.fill_zeros(&slot, 0..4096),
                2 => engine.fill(&slot, 0, &[1; 512]),
                _ => engine.write(&slot, target, 0, 4000..4097, false),
            }
            engine.end(slot);
            let ended = tests::only(&mut engine);
            assert_eq!(ended.result.unwrap_err().kind(), io::ErrorKind::InvalidInput, "{how}");
            assert_eq!(ended.segments.map(|segments| segments.len()), Some(4096));
        }
    }
    assert!(shared.iter().all(|&byte| byte == 0) && Arc::strong_count(&shared) == 1);
}

#[test]
fn padding_is_filled_into_a_guests_memory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    fs::write(&path, vec![5; 5000]).unwrap();
    for cache in [CacheMode::PageCache, CacheMode::Direct] {
        let device = RawDevice::open(&path, false, cache).unwrap();
        for kind in KINDS {
            let Ok(mut queue) = device.open_queue(&QueueOptions { engine: kind, ..QueueOptions::default() }) else {
                continue;
            };
            let segments = cut(&[9; 1024], &[(Kind::Mapped, 300, 0)], false);
            queue.push(Request::read_segments(4096, segments, 3)).unwrap();
            let mut done = Vec::new();
            queue.reap(1, &mut done).unwrap();
            let shown = contents(done[0].segments.as_ref().unwrap());
            assert!(
                done[0].result.is_ok() && shown[..904] == [5; 904] && shown[904..] == [0; 120],
                "{cache:?} {kind:?}"
            );
        }
    }
}

#[test]
fn a_mirror_writes_the_same_pieces_to_two_devices_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = pattern(64 << 10);
    for (kind, fua) in KINDS.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        let mut buf = IoBuf::new(bytes.len());
        buf.copy_from_slice(&bytes);
        let shared = Arc::new(buf);
        let mut queues = Vec::new();
        for name in ["one", "two"] {
            let path = dir.path().join(name);
            fs::write(&path, vec![0; bytes.len()]).unwrap();
            let device = RawDevice::open(&path, true, CacheMode::PageCache).unwrap();
            let Ok(mut queue) = device.open_queue(&QueueOptions { engine: kind, ..QueueOptions::default() }) else {
                return;
            };
            let mut segments = Segments::new();
            segments.push(Arc::clone(&shared), 0..10_000).unwrap();
            segments.push(Arc::clone(&shared), 20_000..65_536).unwrap();
            segments.push(Arc::clone(&shared), 10_000..20_000).unwrap();
            queue.push(Request { fua, ..Request::write_segments(0, Box::new(segments), 1) }).unwrap();
            queues.push(queue);
        }
        assert_eq!(Arc::strong_count(&shared), 7, "both writes are in flight");
        for mut queue in queues {
            let mut done = Vec::new();
            queue.reap(1, &mut done).unwrap();
            assert!(done.len() == 1 && done[0].result.is_ok());
        }
        let expected = [&bytes[..10_000], &bytes[20_000..], &bytes[10_000..20_000]].concat();
        assert!(["one", "two"].iter().all(|name| fs::read(dir.path().join(name)).unwrap() == expected));
        assert_eq!(Arc::strong_count(&shared), 1);
    }
}

#[test]
fn a_device_refuses_invalid_segments() {
    let device = RawDevice::new(Arc::new(MemoryStore::with_bytes("memory", vec![0; 8192])), true, 512).unwrap();
    let mut queue = device.open_queue(&QueueOptions::default()).unwrap();
    let shared = || {
        let mut segments = Segments::new();
        segments.push(Arc::new(IoBuf::new(512)), 0..512).unwrap();
        Box::new(segments)
    };
    let refused = [
        Request::read_segments(0, shared(), 1),
        Request { len_bytes: 1024, ..Request::write_segments(0, shared(), 1) },
        Request { buf_offset_bytes: 1, ..Request::write_segments(0, shared(), 1) },
        Request { buf: Some(IoBuf::new(512)), ..Request::write_segments(0, shared(), 1) },
    ];
    for request in refused {
        let refused = queue.push(request).unwrap_err();
        assert_eq!(refused.reason.kind(), io::ErrorKind::InvalidInput);
        assert!(refused.request.segments.is_some(), "the segments were not returned");
    }
}

#[test]
fn segments_of_a_lost_request_are_leaked_and_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let store = file(&dir.path().join("file"), &[7; 8192], CacheMode::PageCache);
    let Some(mut engine) = engine(EngineKind::Uring, 4, None) else { return };
    let target = engine.add_target(&store).unwrap();
    let shared = Arc::new(IoBuf::new(4096));
    let mut segments = Segments::new();
    segments.push(Arc::clone(&shared), 0..4096).unwrap();
    segments.push(IoBuf::new(4096), 0..4096).unwrap();
    let slot = engine.begin(1, 0, None);
    engine.attach(&slot, Some(Box::new(segments)));
    engine.write(&slot, target, 0, 0..8192, false);
    engine.end(slot);
    engine.link.with(Ring::break_down);
    let mut done = Vec::new();
    assert!(engine.reap(1, &mut done).is_err());
    assert!(done.len() == 1 && done[0].lost && done[0].result.is_err());
    let back = done[0].segments.take().unwrap();
    assert_eq!((back.len(), back.count()), (8192, 2));
    drop((done, back));
    assert_eq!(Arc::strong_count(&shared), 2, "the kernel may still read it");
}
