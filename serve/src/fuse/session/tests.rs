//! The session on a disk in memory: messages in, replies out, without a kernel.

use super::{
    seek::{SEEK_DATA, SEEK_HOLE},
    *,
};
use crate::{
    fuse::{
        view::Shape,
        wire::tests::{fallocate, fsync, lseek, message, read, write},
    },
    walk::tests::Scattered,
};
use diskwright_store::{EngineKind, Geometry, MemoryStore, Operation, PushError, QueueOptions, RawDevice};
use proptest::prelude::*;
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use std::collections::HashMap;

const SIZE: u64 = 256 << 10;

const PUNCH: u32 = mode::PUNCH_HOLE | mode::KEEP_SIZE;
const ZERO: u32 = mode::ZERO_RANGE | mode::KEEP_SIZE;

struct Mounted {
    session: Session,
    next_unique: u64,
}

/// A disk that completes its requests late and in random order, as a real disk may.
#[derive(Debug)]
struct Shuffled {
    bytes: Vec<u8>,
    waiting: Vec<Request>,
    random: Xoshiro256PlusPlus,
}

impl Shuffled {
    fn mounted(seed: u64) -> Mounted {
        let store = Arc::new(MemoryStore::with_bytes("unused", vec![0; SIZE as usize]));
        let device = Arc::new(RawDevice::new(store, true, 512).unwrap());
        Mounted::on(device, Box::new(Self::new(seed)))
    }

    fn new(seed: u64) -> Self {
        let random = Xoshiro256PlusPlus::seed_from_u64(seed);
        Self { bytes: vec![0; SIZE as usize], waiting: Vec::new(), random }
    }
}

impl BlockQueue for Shuffled {
    fn depth(&self) -> usize {
        DEPTH
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }

    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        self.waiting.push(request);
        Ok(())
    }

    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        for _ in 0..at_least.min(self.waiting.len()) {
            let index = (self.random.next_u64() % self.waiting.len() as u64) as usize;
            let Request { operation, offset_bytes, len_bytes, mut buf, buf_offset_bytes, tag, .. } =
                self.waiting.swap_remove(index);
            let place = &mut self.bytes[offset_bytes as usize..][..len_bytes as usize];
            let memory = buf.as_mut().map(|buf| &mut buf[buf_offset_bytes..][..len_bytes as usize]);
            match (operation, memory) {
                (Operation::Read, Some(memory)) => memory.copy_from_slice(place),
                (Operation::Write, Some(memory)) => place.copy_from_slice(memory),
                _ => place.fill(0),
            }
            out.push(Completion { tag, buf, segments: None, result: Ok(()) });
        }
        Ok(())
    }
}

/// A reply: the bytes after the header, or the errno.
type Answered = Result<Vec<u8>, Errno>;

impl Mounted {
    fn new(sector_bytes: u32, read_only: bool) -> Self {
        let store = Arc::new(MemoryStore::with_bytes("memory", vec![0; SIZE as usize]));
        let device = Arc::new(RawDevice::new(store, !read_only, sector_bytes).unwrap());
        let options = QueueOptions { depth: DEPTH, engine: EngineKind::Sync, ..QueueOptions::default() };
        let queue = device.open_queue(&options).unwrap();
        Self::on(device, queue)
    }

    fn on(device: Arc<dyn BlockDevice>, queue: Box<dyn BlockQueue>) -> Self {
        let Geometry { size_bytes, read_only, .. } = device.geometry();
        let view =
            View { shape: Shape::File, size_bytes, unit_bytes: 4096, read_only, uid: 0, gid: 0, time_seconds: 0 };
        Self { session: Session::new(view, device, queue, Buffers::new()), next_unique: 100 }
    }

    fn unique(&mut self) -> u64 {
        self.next_unique += 1;
        self.next_unique
    }

    /// Gives a message to the session.
    fn send(&mut self, bytes: &[u8]) {
        let mut buf = self.session.buffers().message().expect("a buffer is free");
        buf[MESSAGE_START..][..bytes.len()].copy_from_slice(bytes);
        self.session.take(buf, bytes.len()).unwrap();
    }

    /// All replies, by the `unique` of their message.
    fn answers(&mut self) -> HashMap<u64, Answered> {
        let mut found = HashMap::new();
        loop {
            while let Some(Reply { buf, range }) = self.session.next_reply() {
                let bytes = &buf[range];
                let word = |at: usize| i32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
                assert_eq!(word(0) as usize, bytes.len());
                let body = match word(4) {
                    0 => Ok(bytes[16..].to_vec()),
                    error => Err(Errno::from_raw_os_error(-error)),
                };
                let unique = u64::from_ne_bytes(bytes[8..16].try_into().unwrap());
                assert!(found.insert(unique, body).is_none(), "answered twice");
                self.session.buffers().give_back(buf);
            }
            if self.session.in_flight() == 0 {
                return found;
            }
            self.session.reap(1).unwrap();
        }
    }

    fn ask(&mut self, make: impl FnOnce(u64) -> Vec<u8>) -> Answered {
        let unique = self.unique();
        self.send(&make(unique));
        let mut answers = self.answers();
        assert_eq!(answers.len(), 1);
        answers.remove(&unique).expect("every message is answered")
    }

    fn read(&mut self, offset: u64, size: u32) -> Answered {
        self.ask(|unique| read(unique, offset, size))
    }

    fn seek(&mut self, offset: u64, whence: u32) -> Result<u64, Errno> {
        self.ask(|unique| lseek(unique, offset, whence)).map(|body| u64::from_ne_bytes(body.try_into().unwrap()))
    }

    fn write(&mut self, offset: u64, payload: &[u8]) -> Result<u32, Errno> {
        self.ask(|unique| write(unique, offset, payload)).map(|body| u32::from_ne_bytes(body[..4].try_into().unwrap()))
    }
}

#[test]
fn parts_of_sectors_are_read_and_written() {
    for sector_bytes in [512, 4096] {
        let mut disk = Mounted::new(sector_bytes, false);
        assert_eq!(disk.write(4095, &[7; 4098]), Ok(4098));
        assert_eq!(disk.write(5000, b"x"), Ok(1));
        let mut expected = vec![0; 4095];
        expected.extend([7; 4098]);
        expected[5000] = b'x';
        expected.resize(12288, 0);
        assert_eq!(disk.read(0, 12288).unwrap(), expected);
        assert_eq!(disk.read(4999, 3).unwrap(), [7, b'x', 7]);
    }
}

#[test]
fn requests_beyond_the_end_are_cut_or_refused() {
    let mut disk = Mounted::new(512, false);
    assert_eq!(disk.read(SIZE - 10, 4096).unwrap().len(), 10);
    assert_eq!(disk.read(SIZE, 4096).unwrap().len(), 0);
    assert_eq!(disk.read(u64::MAX - 1, 4096).unwrap().len(), 0);
    assert_eq!(disk.write(SIZE - 10, &[1; 512]), Ok(10));
    assert_eq!(disk.write(SIZE, &[1; 512]), Err(Errno::NOSPC));
    assert_eq!(disk.write(u64::MAX, &[1; 512]), Err(Errno::NOSPC));
    assert_eq!(disk.write(0, &[]), Ok(0));
    assert_eq!(disk.read(SIZE - 11, 20).unwrap(), [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
}

#[test]
fn a_transfer_of_any_size_fits() {
    let mut disk = Mounted::new(512, false);
    let payload: Vec<u8> = (0..SIZE).map(|at| (at % 251) as u8).collect();
    assert_eq!(disk.write(0, &payload), Ok(SIZE as u32));
    for (offset, size) in [(0, SIZE as u32), (1, SIZE as u32 - 2), (1, SMALL_BYTES as u32), (511, 2)] {
        let expected = &payload[offset as usize..][..size as usize];
        assert_eq!(disk.read(offset, size).unwrap(), expected, "{offset} {size}");
    }
    assert_eq!(disk.read(0, MAX_TRANSFER_BYTES + 1), Err(Errno::INVAL));
}

#[test]
fn holes_and_zeros() {
    let mut disk = Mounted::new(512, false);
    assert_eq!(disk.write(0, &[1; 65536]), Ok(65536));
    assert_eq!(disk.ask(|unique| fallocate(unique, 100, 5000, PUNCH)), Ok(vec![]));
    assert_eq!(disk.ask(|unique| fallocate(unique, 8192, 4096, ZERO)), Ok(vec![]));
    assert_eq!(disk.ask(|unique| fallocate(unique, 20000, 10, ZERO)), Ok(vec![]));
    let mut expected = vec![1; 65536];
    for zeros in [100..5100, 8192..12288, 20000..20010] {
        expected[zeros].fill(0);
    }
    assert_eq!(disk.read(0, 65536).unwrap(), expected);
    // Beyond the end there is nothing to zero, and nothing to make longer.
    assert_eq!(disk.ask(|unique| fallocate(unique, SIZE - 512, 4096, PUNCH)), Ok(vec![]));
    assert_eq!(disk.ask(|unique| fallocate(unique, SIZE, 4096, PUNCH)), Ok(vec![]));
    assert_eq!(disk.ask(|unique| fallocate(unique, SIZE, 1, mode::ZERO_RANGE)), Err(Errno::NOSPC));
    assert_eq!(disk.ask(|unique| fallocate(unique, 0, 4096, 0)), Err(Errno::OPNOTSUPP));
}

#[test]
fn a_read_only_disk_refuses_changes() {
    let mut disk = Mounted::new(512, true);
    assert_eq!(disk.write(0, &[1; 512]), Err(Errno::ROFS));
    assert_eq!(disk.ask(|unique| fallocate(unique, 0, 512, PUNCH)), Err(Errno::ROFS));
    let open = |flags: u32| move |unique| message(14, unique, 1, &[flags.to_ne_bytes(), [0; 4]].concat());
    assert_eq!(disk.ask(open(2)), Err(Errno::ROFS));
    assert!(disk.ask(open(0)).is_ok());
    assert_eq!(disk.ask(fsync), Ok(vec![]));
}

#[test]
fn unknown_operations_get_enosys() {
    let mut disk = Mounted::new(512, false);
    // FLUSH, ACCESS, GETXATTR, IOCTL, COPY_FILE_RANGE: the kernel works without them.
    for opcode in [25, 34, 22, 39, 47, 4711] {
        assert_eq!(disk.ask(|unique| message(opcode, unique, 1, &[0; 64])), Err(Errno::NOSYS));
    }
    assert_eq!(disk.ask(|unique| message(15, unique, 9, &[0; 40])), Err(Errno::ISDIR));
    // Not answered: FORGET, BATCH_FORGET, INTERRUPT.
    for opcode in [2, 42, 36] {
        let unique = disk.unique();
        disk.send(&message(opcode, unique, 1, &[0; 16]));
    }
    assert_eq!(disk.answers(), HashMap::new());
    assert_eq!(disk.ask(|unique| message(38, unique, 0, &[])), Ok(vec![]));
}

#[test]
fn seek_finds_data_and_holes() {
    let mut disk = Mounted::new(512, false);
    // A store in memory reports no holes, so everything is data.
    assert_eq!(disk.seek(100, SEEK_DATA), Ok(100));
    assert_eq!(disk.seek(100, SEEK_HOLE), Ok(SIZE));
    assert_eq!(disk.seek(SIZE, SEEK_DATA), Err(Errno::NXIO));
    assert_eq!(disk.seek(0, 0), Err(Errno::INVAL));
}

#[test]
fn seek_asks_for_few_extents() {
    const STRIPE: u64 = 64 << 10;
    const FIRST_WINDOW: u64 = 1 << 20;
    let scattered = Arc::new(Scattered::new(STRIPE));
    let mut disk = Mounted::on(scattered.clone(), Box::new(Shuffled::new(0)));
    // From extent to extent, as copying programs do.
    for stripe in 0..2000 {
        let (whence, other) = if stripe % 2 == 0 { (SEEK_HOLE, SEEK_DATA) } else { (SEEK_DATA, SEEK_HOLE) };
        let inside = stripe * STRIPE + 77;
        assert_eq!(disk.seek(inside, other), Ok(inside));
        assert_eq!(disk.seek(inside, whence), Ok((stripe + 1) * STRIPE));
        let (bytes, times) = scattered.asked();
        assert!((bytes, times) == (2 * FIRST_WINDOW, 2), "stripe {stripe}: {bytes} bytes in {times} looks");
    }
    // A far hole is found with few calls, and few bytes beyond it are asked for.
    let wide = Arc::new(Scattered::new(10 << 30));
    let mut disk = Mounted::on(wide.clone(), Box::new(Shuffled::new(0)));
    assert_eq!(disk.seek(0, SEEK_HOLE), Ok(10 << 30));
    let (bytes, times) = wide.asked();
    assert!(bytes <= (20 << 30) + FIRST_WINDOW && times <= 20, "{bytes} bytes in {times} looks");
    // A search that finds nothing ends at its limit.
    let half = Scattered::HALF_BYTES;
    assert_eq!(disk.seek(half + 5, SEEK_DATA), Ok(half + (64 << 30)));
    assert_eq!(disk.seek(Scattered::SIZE_BYTES - 5, SEEK_DATA), Err(Errno::NXIO));
    assert!(wide.asked().1 < 80);
}

#[test]
fn no_buffer_is_lost() {
    let mut disk = Mounted::new(512, false);
    for round in 0..50u64 {
        // More messages than there are small buffers, some of them unaligned.
        for index in 0..12u64 {
            let unique = disk.unique();
            match (round + index) % 4 {
                0 => disk.send(&read(unique, index * 1000, 5000)),
                1 => disk.send(&write(unique, index * 1000, &[index as u8; 3000])),
                2 => disk.send(&write(unique, index * 4096, &[index as u8; 4096])),
                _ => disk.send(&fsync(unique)),
            }
        }
        assert_eq!(disk.answers().len(), 12);
    }
    let mut free = 0;
    while disk.session.buffers().message().is_some() {
        free += 1;
    }
    while disk.session.buffers().small(0).is_some() {
        free += 1;
    }
    assert_eq!(free, Buffers::count());
}

#[derive(Debug, Clone)]
enum Op {
    Write { offset: u64, len: usize, byte: u8 },
    Zero { offset: u64, len: u64, punch: bool },
    Read { offset: u64, len: u32 },
}

fn op() -> impl Strategy<Value = Op> {
    // Aligned and unaligned ranges, close together so that they overlap.
    let offset = prop_oneof![0u64..20_000, (0u64..40).prop_map(|sector| sector * 512)];
    let len = prop_oneof![1u64..6000, (1u64..10).prop_map(|sectors| sectors * 512)];
    (offset, len, any::<u8>(), 0..4).prop_map(|(offset, len, byte, kind)| match kind {
        0 => Op::Read { offset, len: len as u32 },
        1 => Op::Zero { offset, len, punch: byte & 1 == 0 },
        _ => Op::Write { offset, len: len as usize, byte },
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
/// Changes made one after the other have the same result as on an array of bytes.
    #[test]
fn sequential_changes_match_an_array(ops in prop::collection::vec(op(), 1..40), large: bool) {
        let mut disk = Mounted::new(if large { 4096 } else { 512 }, false);
        let mut model = vec![0u8; SIZE as usize];
        for op in ops {
            match op {
                Op::Write { offset, len, byte } => {
                    prop_assert_eq!(disk.write(offset, &vec![byte; len]), Ok(len as u32));
                    model[offset as usize..][..len].fill(byte);
                }
                Op::Zero { offset, len, punch } => {
                    let mode = if punch { PUNCH } else { ZERO };
                    prop_assert!(disk.ask(|unique| fallocate(unique, offset, len, mode)).is_ok());
                    model[offset as usize..][..len as usize].fill(0);
                }
                Op::Read { offset, len } => {
                    let found = disk.read(offset, len).unwrap();
                    prop_assert_eq!(&found[..], &model[offset as usize..][..len as usize]);
                }
            }
        }
        prop_assert_eq!(disk.read(0, SIZE as u32).unwrap(), model);
    }

/// Concurrent changes of different bytes do not undo each other, even if they share
/// sectors.
    #[test]
fn concurrent_changes_keep_all_bytes(cuts in prop::collection::btree_set(1u64..8000, 2..12), order in any::<u64>()) {
        let mut disk = Shuffled::mounted(order);
        let cuts: Vec<u64> = cuts.into_iter().collect();
        let mut pieces: Vec<(usize, u64, u64)> =
            cuts.windows(2).enumerate().map(|(index, pair)| (index, pair[0], pair[1])).collect();
        pieces.sort_by_key(|(index, ..)| (*index as u64).wrapping_mul(order | 1).rotate_left(17));
        let mut model = vec![0u8; 8192];
        for &(index, from, to) in &pieces {
            let unique = disk.unique();
            let payload = vec![index as u8 + 1; (to - from) as usize];
            disk.send(&write(unique, from, &payload));
            model[from as usize..to as usize].copy_from_slice(&payload);
        }
        prop_assert_eq!(disk.answers().len(), pieces.len());
        prop_assert_eq!(disk.read(0, 8192).unwrap(), model);
    }
}
