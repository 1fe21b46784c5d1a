//! Several threads with their own queues on one disk, in the same blocks, with concurrent flushes
//! and discards.

use crate::common::{Kind, Twin};
use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
use diskwright_image::{DiskType, Format};
use diskwright_store::{BlockDevice, Blocking, Completion, EngineKind, IoBuf, QueueOptions, Request};
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use std::collections::HashMap;

const THREADS: u64 = 4;
const STRIPE_BYTES: u64 = 32 << 10;
const DEPTH: usize = 8;
const SIZE_BYTES: u64 = 12 << 20;

/// Thread `me` uses only every fourth stripe, so that the result is known although the threads
/// share all blocks. Within a thread, requests in flight never overlap.
fn hammer(disk: &dyn BlockDevice, me: u64, seed: u64, model: &mut [u8]) {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed * 31 + me);
    let mut queue = disk.open_queue(&QueueOptions { depth: DEPTH, ..QueueOptions::default() }).unwrap();
    let stripes = SIZE_BYTES / STRIPE_BYTES / THREADS;
    let mut busy: HashMap<u64, ()> = HashMap::new();
    let mut done: Vec<Completion> = Vec::new();
    for step in 0..1500_u64 {
        while queue.in_flight() >= DEPTH || step == 1499 && queue.in_flight() > 0 {
            queue.reap(1, &mut done).unwrap();
            for completion in done.drain(..) {
                completion.result.unwrap();
                busy.remove(&completion.tag);
            }
        }
        let stripe = (random.next_u64() % stripes) * THREADS + me;
        if busy.contains_key(&stripe) {
            continue;
        }
        let sector = random.next_u64() % (STRIPE_BYTES / 512);
        let sectors = 1 + random.next_u64() % (STRIPE_BYTES / 512 - sector);
        let (offset, len) = (stripe * STRIPE_BYTES + sector * 512, sectors * 512);
        let held = &mut model[offset as usize..(offset + len) as usize];
        let request = match random.next_u64() % 10 {
            0 => {
                held.fill(0);
                Request::write_zeroes(offset, len, stripe)
            }
            1 => {
                held.fill(0);
                Request::discard(offset, len, stripe)
            }
            2 => Request::flush(stripe),
            choice => {
                random.fill_bytes(held);
                let mut buf = IoBuf::new(len as usize);
                buf.copy_from_slice(held);
                Request { fua: choice == 3, ..Request::write(offset, len as usize, buf, stripe) }
            }
        };
        queue.push(request).unwrap();
        busy.insert(stripe, ());
    }
    while queue.in_flight() > 0 {
        queue.reap(1, &mut done).unwrap();
    }
    done.drain(..).for_each(|completion| completion.result.unwrap());
}

fn run(kind: Kind) {
    for seed in 0..3 {
        let mut twin = Twin::new(kind, SIZE_BYTES);
        let disk = twin.disk().clone();
        let start = twin.model.clone();
        let models: Vec<Vec<u8>> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..THREADS)
                .map(|me| {
                    let (disk, mut model) = (disk.clone(), start.clone());
                    scope.spawn(move || {
                        hammer(&*disk, me, seed, &mut model);
                        model
                    })
                })
                .collect();
            workers.into_iter().map(|worker| worker.join().unwrap()).collect()
        });
        for (stripe, held) in twin.model.chunks_mut(STRIPE_BYTES as usize).enumerate() {
            let at = stripe * STRIPE_BYTES as usize;
            held.copy_from_slice(&models[stripe % THREADS as usize][at..at + held.len()]);
        }
        drop(disk);
        twin.verify();
        twin.close();
        twin.open();
        twin.verify();
        twin.close();
    }
}

#[test]
fn vhdx_dynamic() {
    run(Kind::new(Format::Vhdx, DiskType::Dynamic, Some(1 << 20)));
}

#[test]
fn vhdx_differencing() {
    run(Kind::new(Format::Vhdx, DiskType::Differencing, Some(1 << 20)));
}

#[test]
fn vhd_dynamic() {
    run(Kind::new(Format::Vhd, DiskType::Dynamic, Some(512 << 10)));
}

#[test]
fn vhd_differencing() {
    run(Kind::new(Format::Vhd, DiskType::Differencing, Some(512 << 10)));
}

#[test]
fn whole_blocks_are_discarded_and_their_space_is_reused() {
    // Blocks of 32 KiB: a stripe is a block, so discards free and writes allocate all the time.
    run(Kind::new(Format::Vhd, DiskType::Dynamic, Some(32 << 10)));
}

/// The flusher holds the disk for a moment after its last job. When the disk was dropped, its file
/// must not be locked.
#[test]
fn a_disk_that_is_dropped_can_be_opened_again_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.vhdx");
    let request = CreateRequest { size_bytes: Some(512 << 20), block_bytes: Some(1 << 20), ..CreateRequest::default() };
    create(&path, &request).unwrap();
    for block in 0..400 {
        let disk = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() })
            .unwrap_or_else(|error| panic!("time {block}: {error}"));
        let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
        io.write(block << 20, &[1; 4096], false).unwrap();
        io.flush().unwrap();
    }
}
