//! Requests whose payload is in pieces: the bytes on the disk are those of the pieces, in order,
//! whatever memory holds them.

use crate::common::{Kind, Twin};
use crate::patchwork::{BLOCK, Patchwork, packed_byte};
use diskwright_disk::{Disk, Layer, OpenOptions};
use diskwright_image::{BlockState, DiskType, Format};
use diskwright_store::{
    BlockDevice, BlockQueue, CacheMode, Completion, EngineKind, FileRange, IoBuf, MappedMemory, QueueOptions, Request,
    SegmentMemory, Segments, SharedRing,
};
use nix::sys::memfd::{MFdFlags, memfd_create};
use proptest::prelude::*;
use std::{fs::File, os::fd::AsFd, sync::Arc};

/// Memory of a guest.
fn mapped(len_bytes: usize) -> Arc<MappedMemory> {
    let file = File::from(memfd_create("guest", MFdFlags::MFD_ALLOW_SEALING).unwrap());
    let len_bytes = len_bytes.next_multiple_of(4096) as u64;
    file.set_len(len_bytes).unwrap();
    MappedMemory::of_memfd(file.as_fd(), FileRange { offset_bytes: 0, len_bytes }, true).unwrap()
}

#[derive(Debug, Clone, Copy)]
enum Memory {
    Own,
    Shared,
    Mapped,
}

/// Kind of memory, length in bytes, and offset in it.
type Cut = (Memory, usize, usize);

/// Splits `bytes` into pieces by `cuts`, repeated as often as needed. A read cannot use shared
/// memory, so it uses the request's own memory instead.
fn pieces(bytes: &[u8], cuts: &[Cut], is_read: bool) -> Box<Segments> {
    let mut segments = Segments::new();
    let mut at = 0;
    for &(memory, len, lead) in cuts.iter().cycle() {
        let left = bytes.len() - at;
        let len = if segments.count() < 1023 { len.min(left) } else { left };
        let mut buf = IoBuf::new(lead + len);
        buf[lead..].copy_from_slice(&bytes[at..at + len]);
        let memory: SegmentMemory = match memory {
            Memory::Mapped => {
                let memory = mapped(lead + len);
                memory.copy_in(lead, &bytes[at..at + len]).unwrap();
                memory.into()
            }
            Memory::Shared if !is_read => Arc::new(buf).into(),
            Memory::Own | Memory::Shared => buf.into(),
        };
        segments.push(memory, lead..lead + len).unwrap();
        at += len;
        if at == bytes.len() {
            return Box::new(segments);
        }
    }
    unreachable!("the cuts are repeated for ever")
}

fn contents(completion: &Completion) -> Vec<u8> {
    let segments = completion.segments.as_ref().expect("the pieces come back");
    let mut bytes = vec![0; segments.len()];
    segments.copy_out(0, &mut bytes).unwrap();
    bytes
}

fn ended(queue: &mut dyn BlockQueue, ring: Option<&SharedRing>) -> Completion {
    let mut done = Vec::new();
    loop {
        // A request may have ended at once, which the ring does not report.
        queue.reap(usize::from(ring.is_none()), &mut done).unwrap();
        match ring {
            Some(ring) if done.is_empty() => ring.wait().unwrap(),
            _ => break,
        }
    }
    assert_eq!((done.len(), queue.in_flight()), (1, 0));
    done.remove(0)
}

#[derive(Debug, Clone)]
struct Step {
    sector: u64,
    sectors: u64,
    /// 0 writes zeros.
    seed: u8,
    fua: bool,
    cuts: Vec<Cut>,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let memory = prop_oneof![Just(Memory::Own), Just(Memory::Shared), Just(Memory::Mapped)];
    let len = prop_oneof![Just(1_usize), Just(512), Just(4095), Just(4096), Just(65_536), 1_usize..300_000];
    let cut = (memory, len, prop_oneof![Just(0_usize), Just(0), Just(1), Just(4096)]);
    let sectors = prop_oneof![1_u64..20, 1_u64..1500];
    (prop::collection::vec((0_u64..4096, sectors, any::<u8>(), any::<bool>(), prop::collection::vec(cut, 1..5)), 1..8))
        .prop_map(|steps| {
            let step = |(sector, sectors, seed, fua, cuts)| Step {
                sector,
                sectors,
                seed: if seed < 80 { 0 } else { seed },
                fua,
                cuts,
            };
            steps.into_iter().map(step).collect()
        })
}

/// Runs `steps` on a new disk of this kind, with a queue on its own ring and with one on a shared
/// ring.
fn run(kind: Kind, steps: &[Step]) {
    const SIZE: u64 = 2 << 20;
    for (shares, detect_zeroes) in [(false, false), (false, true), (true, true)] {
        let Ok(ring) = SharedRing::new(8, None) else { return };
        let mut twin = Twin::new(kind, SIZE);
        twin.close();
        let options = OpenOptions {
            writable: true,
            cache: kind.cache,
            engine: kind.engine,
            detect_zeroes,
            ..OpenOptions::default()
        };
        let disk = Disk::open(twin.chain.last().unwrap(), &options).unwrap();
        let ring = (shares && kind.engine != EngineKind::Sync).then_some(&ring);
        let options = QueueOptions { engine: kind.engine, ring, ..QueueOptions::default() };
        let mut queue = disk.open_queue(&options).unwrap();
        for Step { sector, sectors, seed, fua, cuts } in steps {
            let (start, end) = (sector * 512, ((sector + sectors) * 512).min(SIZE));
            let byte = |at: u64| if *seed == 0 { 0 } else { (at / 512) as u8 ^ (at as u8).wrapping_mul(*seed) ^ seed };
            let bytes: Vec<u8> = (start..end).map(byte).collect();
            let request = Request::write_segments(start, pieces(&bytes, cuts, false), 1);
            queue.push(Request { fua: *fua, ..request }).unwrap();
            let completion = ended(&mut *queue, ring);
            assert!(completion.result.is_ok() && contents(&completion) == bytes, "{:?}", completion.result);
            twin.model[start as usize..end as usize].copy_from_slice(&bytes);
            // Including the surrounding range, which a copy-up may have written.
            let (from, to) = (start.saturating_sub(70_000) & !511, (end + 69_632).min(SIZE));
            let into = pieces(&vec![0xEE; (to - from) as usize], cuts, true);
            queue.push(Request::read_segments(from, into, 2)).unwrap();
            let completion = ended(&mut *queue, ring);
            assert!(completion.result.is_ok(), "{:?}", completion.result);
            assert!(contents(&completion) == twin.model[from as usize..to as usize], "{kind:?} at {start}");
        }
        drop(queue);
        disk.close().unwrap();
        drop(disk);
        twin.open();
        twin.verify();
    }
}

fn kinds() -> Vec<Kind> {
    let plain = [
        Kind::new(Format::Vhdx, DiskType::Dynamic, Some(1 << 20)),
        Kind::new(Format::Vhdx, DiskType::Differencing, Some(1 << 20)),
        Kind::new(Format::Vhd, DiskType::Differencing, Some(512 << 10)),
        Kind::new(Format::Vhd, DiskType::Dynamic, Some(16 << 10)),
        Kind::new(Format::Raw, DiskType::Fixed, None),
    ];
    let ways = [
        (CacheMode::PageCache, EngineKind::Auto),
        (CacheMode::Direct, EngineKind::Sync),
        (CacheMode::Direct, EngineKind::Auto),
        (CacheMode::PageCache, EngineKind::Sync),
    ];
    // Two combinations for each kind, and all four for each type of disk.
    let of = |(n, kind): (usize, &Kind)| {
        [0, 1].map(|way| {
            let (cache, engine) = ways[2 * (n / 2 % 2) + way];
            Kind { cache, engine, ..*kind }
        })
    };
    plain.iter().enumerate().flat_map(of).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_disk_has_the_contents_of_the_pieces(steps in steps()) {
        kinds().into_iter().for_each(|kind| run(kind, &steps));
    }
}

/// Blocks of two files, zero blocks and packed blocks are read into pieces that cross their
/// boundaries, and overwritten.
#[test]
fn packed_blocks_are_decompressed_into_pieces_and_copied_up() {
    let states = vec![
        BlockState::Absent,
        BlockState::Data { store: 0, offset_bytes: 3 * BLOCK },
        BlockState::Data { store: 1, offset_bytes: 2 * BLOCK },
        BlockState::Compressed,
        BlockState::Compressed,
    ];
    let layer = Layer { path: "patchwork".into(), image: Arc::new(Patchwork::new(states, true)) };
    let disk = Disk::from_layers(vec![layer], Vec::new()).unwrap();
    let shown = |at: u64| match at / BLOCK {
        0 => 0,
        1 => 0xd0,
        2 => 0xd1,
        block => packed_byte(block, at % BLOCK),
    };
    let mut model: Vec<u8> = (0..5 * BLOCK).map(shown).collect();
    let mut queue = disk.open_queue(&QueueOptions::default()).unwrap();
    let cuts = [(Memory::Mapped, 1000, 7), (Memory::Own, 40_000, 0), (Memory::Shared, 4096, 1)];
    let check = |queue: &mut Box<dyn BlockQueue>, model: &[u8]| {
        queue.push(Request::read_segments(512, pieces(&vec![0xEE; model.len() - 512], &cuts, true), 1)).unwrap();
        let completion = ended(&mut **queue, None);
        assert!(completion.result.is_ok() && contents(&completion) == model[512..]);
    };
    check(&mut queue, &model);
    // The range begins within a data block and ends within a packed block, which is copied up.
    let (start, end) = (BLOCK as usize + 512, 3 * BLOCK as usize + 1024);
    let bytes: Vec<u8> = (start..end).map(|at| at as u8 ^ 0x5a).collect();
    queue.push(Request::write_segments(start as u64, pieces(&bytes, &cuts, false), 2)).unwrap();
    assert!(ended(&mut *queue, None).result.is_ok());
    model[start..end].copy_from_slice(&bytes);
    check(&mut queue, &model);
}

#[test]
fn a_mirror_writes_the_same_pieces_to_two_disks_at_once() {
    let bytes: Vec<u8> = (0..1_500_160_u32).map(|n| (n % 251) as u8).collect();
    for engine in [EngineKind::Auto, EngineKind::Sync] {
        let kind = |format, block| Kind { engine, ..Kind::new(format, DiskType::Dynamic, Some(block)) };
        let twins = [kind(Format::Vhdx, 1 << 20), kind(Format::Vhd, 512 << 10)].map(|kind| Twin::new(kind, 4 << 20));
        let mut buf = IoBuf::new(bytes.len());
        buf.copy_from_slice(&bytes);
        let shared = Arc::new(buf);
        let guest = mapped(8192);
        guest.copy_in(100, &[0xA5; 6144]).unwrap();
        let mut queues = twins.each_ref().map(|twin| {
            let mut queue = twin.disk().open_queue(&QueueOptions { engine, ..QueueOptions::default() }).unwrap();
            let mut segments = Segments::new();
            segments.push(Arc::clone(&shared), 700_000..bytes.len()).unwrap();
            segments.push(Arc::clone(&guest), 100..6244).unwrap();
            segments.push(Arc::clone(&shared), 0..700_000).unwrap();
            queue.push(Request { fua: true, ..Request::write_segments(512, Box::new(segments), 1) }).unwrap();
            queue
        });
        assert!(Arc::strong_count(&shared) >= 5 && Arc::strong_count(&guest) == 3, "both hold the pieces");
        let expected = [&bytes[700_000..], &[0xA5; 6144][..], &bytes[..700_000]].concat();
        for queue in &mut queues {
            let completion = ended(&mut **queue, None);
            assert!(completion.result.is_ok() && contents(&completion) == expected);
        }
        assert_eq!((Arc::strong_count(&shared), Arc::strong_count(&guest)), (1, 1));
        drop(queues);
        for mut twin in twins {
            twin.model[512..512 + expected.len()].copy_from_slice(&expected);
            twin.verify();
        }
    }
}

/// A guest's change of its buffer during a request may or may not reach the disk. The request must
/// end, and nothing else may change.
#[test]
fn a_guest_may_change_its_memory_while_it_is_written() {
    let mut twin = Twin::new(Kind::new(Format::Vhdx, DiskType::Dynamic, Some(1 << 20)), 4 << 20);
    twin.close();
    let options = OpenOptions { writable: true, detect_zeroes: true, ..OpenOptions::default() };
    let disk = Disk::open(&twin.chain[0], &options).unwrap();
    let mut queue = disk.open_queue(&QueueOptions::default()).unwrap();
    let guest = mapped(2 << 20);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut byte = 0_u8;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                byte ^= 1;
                guest.copy_in(0, &vec![byte; 2 << 20]).unwrap();
            }
        });
        for turn in 0..100 {
            let mut segments = Segments::new();
            segments.push(Arc::clone(&guest), 0..2 << 20).unwrap();
            queue.push(Request::write_segments(turn % 3 * (512 << 10), Box::new(segments), 1)).unwrap();
            assert!(ended(&mut *queue, None).result.is_ok());
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    queue.push(Request::read(0, 4 << 20, IoBuf::new(4 << 20), 2)).unwrap();
    let shown = ended(&mut *queue, None).buf.unwrap();
    assert!(shown[..3 << 20].iter().all(|&byte| byte <= 1) && shown[3 << 20..].iter().all(|&byte| byte == 0));
    drop(queue);
    disk.close().unwrap();
}
