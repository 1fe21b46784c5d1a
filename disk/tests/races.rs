//! Threads that write, zero, discard and read the *same* sectors at the same time. Which write wins
//! is undefined, but every byte names its sector. So bytes of another block, of freed space, or of
//! a hidden parent are detected.

mod common;

use common::{Kind, Step, Twin};
use diskwright_image::{DiskType, Format};
use diskwright_store::{
    BlockDevice, BlockQueue, CacheMode, Completion, EngineKind, IoBuf, Operation, QueueOptions, Request,
};
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use std::{
    collections::HashMap,
    sync::atomic::{AtomicBool, Ordering},
};

const THREADS: u64 = 4;
const DEPTH: usize = 8;
/// Requests of one thread in one session.
const STEPS: u64 = 600;
const SECTOR: u64 = 512;
/// Writer number of the parent's contents.
const PARENT: u8 = 0xff;

/// Eight bytes, repeated: six that identify the sector, none of them zero; the writer; a counter.
fn stamp(buf: &mut [u8], first_sector: u64, writer: u8, when: u8) {
    for (index, sector) in buf.chunks_mut(SECTOR as usize).enumerate() {
        for word in sector.as_chunks_mut::<8>().0 {
            word[..6].copy_from_slice(&name_of(first_sector + index as u64));
            word[6..].copy_from_slice(&[writer, when]);
        }
    }
}

fn name_of(sector: u64) -> [u8; 6] {
    let mixed = (sector + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    std::array::from_fn(|at| (mixed >> (8 * at + 8)) as u8 | 1)
}

/// Checks each byte, since a read may overlap a write: it must be zero or match the sector's name.
/// A hidden parent must not be visible.
fn judge(buf: &[u8], first_sector: u64, hidden: &[bool]) {
    for (index, sector) in buf.chunks(SECTOR as usize).enumerate() {
        let number = first_sector + index as u64;
        let name = name_of(number);
        for word in sector.as_chunks::<8>().0 {
            for (found, expected) in word.iter().zip(name) {
                assert!(
                    *found == 0 || *found == expected,
                    "sector {number} holds {word:02x?}, not its own {name:02x?}"
                );
            }
            assert!(!(hidden[index] && word[6] == PARENT), "sector {number} reads the hidden parent");
        }
    }
}

struct Flight {
    operation: Operation,
    sector: u64,
    sectors: u64,
    hidden: Vec<bool>,
}

fn settle(completion: Completion, flights: &mut HashMap<u64, Flight>, touched: &[AtomicBool]) {
    let flight = flights.remove(&completion.tag).unwrap();
    completion.result.unwrap_or_else(|error| panic!("{:?}: {error}", flight.operation));
    let range = flight.sector as usize..(flight.sector + flight.sectors) as usize;
    match flight.operation {
        Operation::Read => {
            judge(&completion.buf.unwrap()[..(flight.sectors * SECTOR) as usize], flight.sector, &flight.hidden);
        }
        Operation::Write | Operation::WriteZeroes | Operation::Discard => {
            touched[range].iter().for_each(|sector| sector.store(true, Ordering::Release));
        }
        Operation::Flush => {}
    }
}

fn hammer(disk: &dyn BlockDevice, me: u64, seed: u64, block_bytes: u64, touched: &[AtomicBool], engine: EngineKind) {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed * 77 + me);
    let mut queue: Box<dyn BlockQueue> =
        disk.open_queue(&QueueOptions { depth: DEPTH, engine, slab: None, ring: None }).unwrap();
    let all = disk.geometry().size_bytes / SECTOR;
    let block = (block_bytes / SECTOR).min(all);
    let mut flights = HashMap::new();
    let mut done = Vec::new();
    for step in 0..STEPS {
        while queue.in_flight() == DEPTH {
            queue.reap(1, &mut done).unwrap();
            done.drain(..).for_each(|completion| settle(completion, &mut flights, touched));
        }
        let start = random.next_u64() % all;
        let sectors = (1 + random.next_u64() % if random.next_u64() % 4 == 0 { 600 } else { 40 }).min(all - start);
        let whole = start / block * block;
        let whole_sectors = (block * (1 + random.next_u64() % 2)).min(all - whole);
        let (operation, sector, sectors) = match random.next_u64() % 32 {
            0 => (Operation::Flush, 0, 0),
            1..=6 => (Operation::Discard, whole, whole_sectors),
            7 => (Operation::WriteZeroes, whole, whole_sectors),
            8 | 9 => (Operation::WriteZeroes, start, sectors),
            10 | 11 => (Operation::Discard, start, sectors),
            12..=19 => (Operation::Read, start, sectors),
            _ => (Operation::Write, start, sectors),
        };
        let (offset, len) = (sector * SECTOR, sectors * SECTOR);
        let mut buf = IoBuf::new(len as usize + 1);
        let request = match operation {
            Operation::Read => Request::read(offset, len as usize, buf, step),
            Operation::Write => {
                stamp(&mut buf[..len as usize], sector, me as u8 + 1, step as u8);
                Request { fua: step % 100 == 0, ..Request::write(offset, len as usize, buf, step) }
            }
            Operation::WriteZeroes => Request::write_zeroes(offset, len, step),
            Operation::Discard => Request::discard(offset, len, step),
            Operation::Flush => Request::flush(step),
        };
        let range = sector as usize..(sector + sectors) as usize;
        let hidden = touched[range].iter().map(|sector| sector.load(Ordering::Acquire)).collect();
        flights.insert(step, Flight { operation, sector, sectors, hidden });
        queue.push(request).unwrap();
    }
    while queue.in_flight() > 0 {
        queue.reap(1, &mut done).unwrap();
        done.drain(..).for_each(|completion| settle(completion, &mut flights, touched));
    }
}

fn run(kind: Kind, size_bytes: u64) {
    for seed in 0..2 {
        // The twin's own model is not used, as the last writer is unknown.
        let base = Kind {
            disk_type: if kind.disk_type == DiskType::Differencing { DiskType::Dynamic } else { kind.disk_type },
            ..kind
        };
        let mut twin = Twin::new(base, size_bytes);
        let sectors = size_bytes / SECTOR;
        if kind.disk_type == DiskType::Differencing {
            let mut bytes = vec![0; size_bytes as usize];
            stamp(&mut bytes, 0, PARENT, 0);
            let mut io = diskwright_store::Blocking::open(&**twin.disk(), kind.engine).unwrap();
            for piece in (0..sectors).step_by(96) {
                // With gaps, so that the parent has blocks in every state.
                let (from, to) = (piece * SECTOR, ((piece + 80) * SECTOR).min(size_bytes));
                io.write(from, &bytes[from as usize..to as usize], false).unwrap();
            }
            drop(io);
            twin.kind.disk_type = DiskType::Differencing;
            twin.apply(Step::Child);
        }
        let touched: Vec<AtomicBool> = (0..sectors).map(|_| AtomicBool::new(false)).collect();
        let block_bytes = u64::from(kind.block_bytes.unwrap_or(64 << 10));
        for session in 0..2 {
            let disk = twin.disk().clone();
            std::thread::scope(|scope| {
                for me in 0..THREADS {
                    let (disk, touched) = (disk.clone(), &touched[..]);
                    scope.spawn(move || hammer(&*disk, me, seed * 2 + session, block_bytes, touched, kind.engine));
                }
            });
            drop(disk);
            let mut before = vec![0; size_bytes as usize];
            let read = |twin: &Twin, bytes: &mut Vec<u8>| {
                diskwright_store::Blocking::open(&**twin.disk(), kind.engine).unwrap().read(0, bytes).unwrap();
            };
            read(&twin, &mut before);
            twin.apply(Step::Reopen);
            let mut after = vec![0; size_bytes as usize];
            read(&twin, &mut after);
            assert!(before == after, "the close changed contents");
            let hidden: Vec<bool> = touched.iter().map(|sector| sector.load(Ordering::Acquire)).collect();
            judge(&after, 0, &hidden);
        }
        twin.close();
    }
}

const SMALL_BLOCKS: Option<u32> = Some(32 << 10);

#[test]
fn vhd_dynamic_of_few_small_blocks() {
    run(Kind::new(Format::Vhd, DiskType::Dynamic, SMALL_BLOCKS), 1 << 20);
}

#[test]
fn vhd_dynamic_of_few_small_blocks_with_o_direct() {
    let kind = Kind::new(Format::Vhd, DiskType::Dynamic, SMALL_BLOCKS);
    run(Kind { cache: CacheMode::Direct, ..kind }, 1 << 20);
}

#[test]
fn vhd_differencing() {
    run(Kind::new(Format::Vhd, DiskType::Differencing, SMALL_BLOCKS), 2 << 20);
}

#[test]
fn vhdx_dynamic() {
    run(Kind::new(Format::Vhdx, DiskType::Dynamic, Some(1 << 20)), 5 << 20);
}

#[test]
fn vhdx_differencing() {
    run(Kind::new(Format::Vhdx, DiskType::Differencing, Some(1 << 20)), (5 << 20) + 4096);
}

#[test]
fn vhdx_differencing_without_a_ring() {
    let kind = Kind::new(Format::Vhdx, DiskType::Differencing, Some(1 << 20));
    run(Kind { engine: EngineKind::Sync, ..kind }, 5 << 20);
}
