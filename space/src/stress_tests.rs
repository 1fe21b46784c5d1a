//! Threads that write and read while slabs are sealed, scrubbed, moved, cleaned and counted.

use crate::{
    Class, NewFile, NewMember, Pool, PoolCreateOptions, SpaceError, Tier,
    cache::start_worker,
    tests::{Bench, MIB, SLAB, disk, file},
};
use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

const BLOCK: u64 = 4096;
const DISK_BYTES: u64 = 6 * MIB;
const THREADS: u64 = 3;

/// What a block holds after its thread has written it for the n-th time.
fn contents(block: u64, version: u64) -> [u8; BLOCK as usize] {
    let mut bytes = [0; BLOCK as usize];
    if version > 0 {
        for (at, chunk) in bytes.chunks_exact_mut(8).enumerate() {
            chunk.copy_from_slice(&(block << 40 ^ version << 12 ^ at as u64).to_le_bytes());
        }
    }
    bytes
}

/// Writes and reads the blocks of one thread, which has neighbours of other threads in each slab,
/// until told to stop. Returns the version of each of its blocks.
fn work(pool: &Arc<Pool>, number: u64, stop: &AtomicBool, pause: &AtomicBool) -> Vec<(u64, u64)> {
    let mut queue = disk(&file(pool));
    let mut blocks: Vec<(u64, u64)> =
        (0..DISK_BYTES / BLOCK).filter(|at| at % THREADS == number).map(|at| (at, 0)).collect();
    let (mut seed, mut version) = (number + 1, 0);
    while !stop.load(Ordering::Relaxed) {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let count = blocks.len() as u64;
        let (block, now) = &mut blocks[((seed >> 33) % count) as usize];
        match seed >> 20 & 15 {
            0 => {
                queue.write_zeroes(*block * BLOCK, BLOCK).unwrap();
                *now = 0;
            }
            1..=6 => {
                version += 1;
                queue.write(*block * BLOCK, &contents(*block, version), seed >> 10 & 31 == 0).unwrap();
                *now = version;
            }
            7 if seed >> 10 & 15 == 0 => queue.flush().unwrap(),
            // Parts of blocks take another way.
            8 => {
                let mut found = [0; 1024];
                queue.read(*block * BLOCK + 512, &mut found).unwrap();
                assert!(found == contents(*block, *now)[512..1536], "block {block}, version {now}");
            }
            _ => {
                let mut found = [0; BLOCK as usize];
                queue.read(*block * BLOCK, &mut found).unwrap();
                assert!(found == contents(*block, *now), "block {block}, version {now}");
            }
        }
        while pause.load(Ordering::Relaxed) && !stop.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_micros(200));
        }
    }
    blocks
}

#[test]
fn nothing_is_lost_while_slabs_are_sealed_and_moved_under_load() {
    under_load(None);
}

#[test]
fn nothing_is_lost_while_a_cache_is_filled_and_emptied_under_load() {
    under_load(Some(MIB));
}

fn under_load(cache_bytes: Option<u64>) {
    let bench = Bench::new(&[14 * MIB; 4]);
    let class = |number: usize| if number < 2 { Class::Ssd } else { Class::Hdd };
    let member = |(number, path): (usize, &PathBuf)| NewMember { path: path.clone(), class: class(number) };
    let members: Vec<NewMember> = bench.paths.iter().enumerate().map(member).collect();
    let options = PoolCreateOptions { slab_bytes: SLAB, ..PoolCreateOptions::default() };
    Pool::create("vault", &members, &options).unwrap();
    let pool = bench.open();
    pool.create_file("disk", NewFile { len_bytes: DISK_BYTES, copies: 2, columns: 1, tier: Tier::Any }).unwrap();
    if let Some(len_bytes) = cache_bytes {
        pool.create_cache(len_bytes).unwrap();
        start_worker(&pool);
    }
    let (stop, pause, sealed) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
    let blocks: Vec<(u64, u64)> = thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS)
            .map(|number| {
                scope.spawn({
                    let (pool, stop, pause) = (&pool, &stop, &pause);
                    move || work(pool, number, stop, pause)
                })
            })
            .collect();
        let ticker = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                pool.tick().unwrap();
                thread::sleep(Duration::from_millis(3));
            }
        });
        let started = Instant::now();
        for round in 0_u32.. {
            if started.elapsed() > Duration::from_secs(3) && round > 6
                || workers.iter().any(|worker| worker.is_finished())
            {
                break;
            }
            // Slabs become clean, and are sealed, only while nobody writes. The writers go on when
            // the scrub has come to another slab each time, or when it has ended.
            pause.store(true, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(5));
            let until = 29 - u64::from(round % 30);
            let found = pool.scrub(&mut |moved| {
                pause.store(moved.done < until && moved.done < moved.total, Ordering::Relaxed);
                true
            });
            pause.store(false, Ordering::Relaxed);
            let found = found.unwrap();
            assert_eq!((found.mended_bytes, found.damage.len()), (0, 0), "round {round}: {:?}", pool.warnings());
            sealed.fetch_add(found.sealed_bytes, Ordering::Relaxed);
            pool.pin_file("disk", [Tier::Fast, Tier::Slow, Tier::Any][round as usize % 3]).unwrap();
            let mut left = 8;
            let moved = pool.optimize(false, &mut |_| {
                left -= 1;
                left > 0
            });
            assert!(matches!(moved, Ok(_) | Err(SpaceError::Stopped { .. })), "{moved:?}");
        }
        stop.store(true, Ordering::Relaxed);
        ticker.join().unwrap();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    let check = |pool: &Arc<Pool>| {
        let mut queue = disk(&file(pool));
        let mut found = [0; BLOCK as usize];
        for &(block, version) in &blocks {
            queue.read(block * BLOCK, &mut found).unwrap();
            assert!(found == contents(block, version), "block {block}, version {version}");
        }
    };
    check(&pool);
    // The cache would go on writing to the slabs.
    while pool.destage(u64::MAX).unwrap() {}
    let found = pool.scrub(&mut |_| true).unwrap();
    assert_eq!((found.mended_bytes, found.damage.len(), found.unsealed_bytes), (0, 0, 0), "{:?}", pool.warnings());
    check(&pool);
    assert!(sealed.load(Ordering::Relaxed) > 0, "nothing was sealed under load");
    let position = |pool: &Pool| pool.cache().map(|cache| cache.inner().ring.next_place().position);
    assert!(position(&pool).is_none_or(|position| position > 512), "the log has gone round: {:?}", position(&pool));
    drop(pool);
    check(&bench.open());
}
