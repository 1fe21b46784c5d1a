//! The write-back cache: what enters it, what is read from it, and what is left after a crash.

use crate::{
    Class, NewFile, NewMember, Pool, PoolCreateOptions, PoolOptions, Tier,
    tests::{Bench, MIB, SLAB, contents, disk, file},
};
use diskwright_store::{FileRange, Store, StoreLimit, Zeroing};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

const BLOCK: u64 = 4096;
const DISK_BYTES: u64 = 8 * MIB;

/// A pool of two fast and two slow members with a cache of 4 MiB, and a disk on the slow ones.
fn cached() -> (Bench, Arc<Pool>, Vec<u8>) {
    let bench = Bench::new(&[12 * MIB, 12 * MIB, 14 * MIB, 14 * MIB]);
    let classes = [Class::Ssd, Class::Ssd, Class::Hdd, Class::Hdd];
    let member = |(path, class): (&PathBuf, Class)| NewMember { path: path.clone(), class };
    let members: Vec<NewMember> = bench.paths.iter().zip(classes).map(member).collect();
    let options = PoolCreateOptions { slab_bytes: SLAB, ..PoolCreateOptions::default() };
    Pool::create("vault", &members, &options).unwrap();
    let pool = bench.open();
    pool.create_file("disk", NewFile { len_bytes: DISK_BYTES, copies: 2, columns: 1, tier: Tier::Slow }).unwrap();
    let bytes: Vec<u8> = (0..DISK_BYTES).map(|at| (at / 512 % 251) as u8).collect();
    for (at, piece) in (0..).step_by(SLAB as usize).zip(bytes.chunks(SLAB as usize)) {
        file(&pool).write_at(piece, at).unwrap();
    }
    file(&pool).sync_data().unwrap();
    pool.create_cache(4 * MIB).unwrap();
    (bench, pool, bytes)
}

/// Where a block of the disk is, as `(fast, slow)` members that have it.
fn members_with(bench: &Bench, block: &[u8]) -> (usize, usize) {
    let has = |path: &PathBuf| fs::read(path).unwrap().chunks(BLOCK as usize).any(|found| found == block);
    let found: Vec<bool> = bench.paths.iter().map(has).collect();
    (found[..2].iter().filter(|&&has| has).count(), found[2..].iter().filter(|&&has| has).count())
}

fn empty(pool: &Pool) {
    while pool.destage(u64::MAX).unwrap() {}
}

fn used(pool: &Pool) -> (u64, u64) {
    let inner = pool.cache().unwrap().inner();
    (inner.ring.used(), inner.ring.live())
}

#[test]
fn small_writes_wait_in_the_log_and_are_read_from_there() {
    let (bench, pool, mut bytes) = cached();
    let mut queue = disk(&file(&pool));
    let block = [0xab; BLOCK as usize];
    queue.write(5 * BLOCK, &block, false).unwrap();
    // Part of a block: it is completed with what is there.
    queue.write(9 * BLOCK + 512, &[0xcd; 512], false).unwrap();
    bytes[5 * BLOCK as usize..][..BLOCK as usize].fill(0xab);
    bytes[(9 * BLOCK + 512) as usize..][..512].fill(0xcd);
    assert_eq!(used(&pool).1, 2);
    assert_eq!(members_with(&bench, &block), (2, 0));
    let mut found = vec![0; 16 * BLOCK as usize];
    queue.read(0, &mut found).unwrap();
    assert!(found == bytes[..found.len()] && contents(&file(&pool)) == bytes);
    queue.read(5 * BLOCK + 512, &mut found[..1024]).unwrap();
    assert!(found[..1024] == [0xab; 1024]);
    queue.flush().unwrap();
    assert!(!pool.cache().unwrap().has_unwritten());
    assert!(pool.destage(u64::MAX).unwrap() && !pool.destage(u64::MAX).unwrap());
    assert_eq!((used(&pool).1, members_with(&bench, &block).1), (0, 2));
    assert!(contents(&file(&pool)) == bytes);
    // A long write, and a stream, pass by.
    queue.write(MIB, &[1; 128 << 10], false).unwrap();
    for at in 0..8_u64 {
        queue.write(3 * MIB + SLAB + at * BLOCK - 4 * BLOCK, &[2; BLOCK as usize], false).unwrap();
    }
    // A stream is known as one from its second block on, and its first slab is in the log by then.
    assert_eq!(used(&pool).1, 4);
    // And so does what belongs to the fast members.
    pool.create_file("fast", NewFile { len_bytes: SLAB, copies: 2, columns: 1, tier: Tier::Fast }).unwrap();
    let fast = pool.open_file("fast", true, diskwright_store::LockMode::None).unwrap();
    fast.write_at(&[3; SLAB as usize], 0).unwrap();
    disk(&fast).write(2 * BLOCK, &block, false).unwrap();
    assert_eq!(used(&pool).1, 4);
}

#[test]
fn what_was_flushed_is_there_after_a_crash() {
    let (bench, pool, mut bytes) = cached();
    let mut queue = disk(&file(&pool));
    for (number, at) in [3, 700, 3, 1500, 64, 2047].into_iter().enumerate() {
        let piece = [number as u8 + 100; BLOCK as usize];
        queue.write(at * BLOCK, &piece, false).unwrap();
        bytes[(at * BLOCK) as usize..][..BLOCK as usize].copy_from_slice(&piece);
    }
    queue.flush().unwrap();
    let after_flush = bench.snapshot("flush");
    queue.write(4 * BLOCK, &[7; BLOCK as usize], false).unwrap();
    let unflushed = bench.snapshot("unflushed");
    for crashed in [after_flush, unflushed] {
        let pool = crashed.open();
        assert!(contents(&file(&pool)) == bytes);
        assert_eq!(used(&pool).1, 5);
        empty(&pool);
        assert!(contents(&file(&pool)) == bytes && used(&pool).1 == 0);
        drop(pool);
        assert!(contents(&file(&crashed.open())) == bytes);
        assert!(contents(&file(&crashed.open_with(&PoolOptions::default()).unwrap())) == bytes);
    }
    // A write that is durable by itself needs no flush.
    queue.write(9 * BLOCK, &[8; BLOCK as usize], true).unwrap();
    bytes[4 * BLOCK as usize..][..BLOCK as usize].fill(7);
    bytes[9 * BLOCK as usize..][..BLOCK as usize].fill(8);
    assert!(contents(&file(&bench.snapshot("durable").open())) == bytes);
    // A pool that is closed keeps what was not flushed.
    queue.write(10 * BLOCK, &[9; BLOCK as usize], false).unwrap();
    bytes[10 * BLOCK as usize..][..BLOCK as usize].fill(9);
    drop((queue, pool));
    let pool = bench.open();
    assert!(contents(&file(&pool)) == bytes && used(&pool).1 > 0);
}

#[test]
fn what_passes_by_the_log_is_not_overtaken_by_what_is_in_it() {
    let (bench, pool, mut bytes) = cached();
    let store = file(&pool);
    let mut queue = disk(&store);
    for slab in 0..4_u64 {
        queue.write(slab * SLAB + 8 * BLOCK, &[200 + slab as u8; BLOCK as usize], false).unwrap();
    }
    queue.flush().unwrap();
    assert_eq!(used(&pool).1, 4);
    // A long write over one, zeros over another, a discard of a third.
    queue.write(0, &[1; 128 << 10], false).unwrap();
    store.zero_range(FileRange { offset_bytes: SLAB, len_bytes: 64 << 10 }, Zeroing::Keep).unwrap();
    store.zero_range(FileRange { offset_bytes: 2 * SLAB, len_bytes: SLAB }, Zeroing::Deallocate).unwrap();
    bytes[..128 << 10].fill(1);
    bytes[SLAB as usize..][..64 << 10].fill(0);
    bytes[2 * SLAB as usize..][..SLAB as usize].fill(0);
    bytes[(3 * SLAB + 8 * BLOCK) as usize..][..BLOCK as usize].fill(203);
    queue.flush().unwrap();
    assert!(contents(&store) == bytes);
    let crashed = bench.snapshot("passed");
    assert!(contents(&file(&crashed.open())) == bytes);
    // The slab that was discarded is mapped again: nothing old comes back.
    queue.write(2 * SLAB, &[5; BLOCK as usize], false).unwrap();
    bytes[2 * SLAB as usize..][..BLOCK as usize].fill(5);
    queue.flush().unwrap();
    let crashed = bench.snapshot("mapped");
    let again = crashed.open();
    assert!(contents(&file(&again)) == bytes);
    empty(&again);
    assert!(contents(&file(&again)) == bytes);
}

#[test]
fn a_full_log_makes_room_and_wraps_around() {
    let (bench, pool, mut bytes) = cached();
    let mut queue = disk(&file(&pool));
    let (mut seed, blocks) = (7_u64, DISK_BYTES / BLOCK);
    for round in 0..6000_u64 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let count = 1 + (seed >> 20) % 3;
        let at = (seed >> 33) % (blocks - count);
        let piece: Vec<u8> = (0..count * BLOCK).map(|byte| (byte / 512 + round) as u8).collect();
        queue.write(at * BLOCK, &piece, false).unwrap();
        bytes[(at * BLOCK) as usize..][..piece.len()].copy_from_slice(&piece);
        if seed >> 10 & 31 == 0 {
            queue.flush().unwrap();
        }
        if round % 1500 == 1499 {
            queue.flush().unwrap();
            let crashed = bench.snapshot("full");
            let again = crashed.open();
            assert!(contents(&file(&again)) == bytes, "round {round}");
            empty(&again);
            assert!(contents(&file(&again)) == bytes, "round {round}, destaged");
        }
    }
    assert!(contents(&file(&pool)) == bytes);
    assert!(pool.cache().unwrap().inner().ring.next_place().position > 2 * 1024, "it has wrapped around");
}

#[test]
fn a_member_of_the_log_that_is_gone_is_a_lost_copy() {
    let (bench, pool, mut bytes) = cached();
    let mut queue = disk(&file(&pool));
    for at in [1, 90, 777] {
        queue.write(at * BLOCK, &[at as u8; BLOCK as usize], false).unwrap();
        bytes[(at * BLOCK) as usize..][..BLOCK as usize].fill(at as u8);
    }
    queue.flush().unwrap();
    drop((queue, pool));
    fs::remove_file(&bench.paths[0]).unwrap();
    let pool = bench.open();
    let mut queue = disk(&file(&pool));
    assert!(contents(&file(&pool)) == bytes && used(&pool).1 == 3);
    // One copy is not enough for a disk with two: new writes pass by, also over what is in the log.
    for at in [1, 2] {
        queue.write(at * BLOCK, &[50; BLOCK as usize], false).unwrap();
        bytes[(at * BLOCK) as usize..][..BLOCK as usize].fill(50);
    }
    assert!(contents(&file(&pool)) == bytes && used(&pool).1 < 3);
    queue.flush().unwrap();
    drop((queue, pool));
    assert!(contents(&file(&bench.open())) == bytes);
}

/// Changes every block of a file that has these contents.
fn rot(path: &Path, block: &[u8]) {
    let mut all = fs::read(path).unwrap();
    for found in all.chunks_mut(BLOCK as usize).filter(|found| *found == block) {
        found[77] ^= 1;
    }
    fs::write(path, all).unwrap();
}

#[test]
fn rot_in_the_log_is_never_silent() {
    let (bench, pool, mut bytes) = cached();
    let mut queue = disk(&file(&pool));
    let block = [0x5a; BLOCK as usize];
    for at in [20, 21] {
        queue.write(at * BLOCK, &block, false).unwrap();
        bytes[(at * BLOCK) as usize..][..BLOCK as usize].copy_from_slice(&block);
    }
    queue.flush().unwrap();
    rot(&bench.paths[0], &block);
    assert!(contents(&file(&pool)) == bytes);
    let mut found = [0; BLOCK as usize];
    queue.read(20 * BLOCK, &mut found).unwrap();
    assert!(found == block);
    rot(&bench.paths[1], &block);
    let is_lost = |queue: &mut diskwright_store::Blocking| queue.read(20 * BLOCK, &mut [0; BLOCK as usize]).is_err();
    assert!(is_lost(&mut queue));
    // It is put at the head of the log each time.
    (0..3).for_each(|_| assert!(pool.destage(u64::MAX).unwrap()));
    assert!(is_lost(&mut queue), "the older contents of the slab must not show");
    queue.write(20 * BLOCK, &[1; BLOCK as usize], false).unwrap();
    assert!(!is_lost(&mut queue));
    let mut other = [0; BLOCK as usize];
    assert!(queue.read(21 * BLOCK, &mut other).is_err());
    let error = pool.remove_cache(&mut |_| true).unwrap_err().to_string();
    assert!(error.contains("1 slabs still have blocks"), "{error}");
    queue.write(21 * BLOCK, &[1; BLOCK as usize], false).unwrap_err();
    drop((queue, pool));
    let pool = bench.open();
    let mut queue = disk(&file(&pool));
    assert!(queue.read(21 * BLOCK, &mut other).is_err());
    queue.write(21 * BLOCK, &[1; 2 * BLOCK as usize], false).unwrap();
    queue.read(21 * BLOCK, &mut other).unwrap();
}

#[test]
fn blocks_of_an_unfinished_flush_do_not_count() {
    let (bench, pool, mut bytes) = cached();
    let mut queue = disk(&file(&pool));
    for pattern in [0x11, 0x22] {
        queue.write(30 * BLOCK, &[pattern; BLOCK as usize], false).unwrap();
        queue.flush().unwrap();
    }
    bytes[30 * BLOCK as usize..][..BLOCK as usize].fill(0x11);
    // As if power had been lost in the second flush: its header is there, its block is not.
    let crashed = bench.snapshot("torn");
    crashed.paths[..2].iter().for_each(|path| rot(path, &[0x22; BLOCK as usize]));
    for round in 0..3 {
        let pool = crashed.open();
        assert!(contents(&file(&pool)) == bytes, "round {round}");
        let mut queue = disk(&file(&pool));
        for block in [40 + 2 * round, 41 + 2 * round] {
            queue.write(block * BLOCK, &[7; BLOCK as usize], false).unwrap();
            bytes[(block * BLOCK) as usize..][..BLOCK as usize].fill(7);
            queue.flush().unwrap();
        }
    }
    let pool = crashed.open();
    empty(&pool);
    assert!(contents(&file(&pool)) == bytes);
}

#[test]
fn a_new_disk_does_not_get_what_a_removed_one_has_in_the_cache() {
    let (bench, pool, _) = cached();
    // The youngest file: its number would be the next one.
    let new = NewFile { len_bytes: SLAB, copies: 2, columns: 1, tier: Tier::Slow };
    let late = |pool: &Arc<Pool>| pool.open_file("late", true, diskwright_store::LockMode::None).unwrap();
    pool.create_file("late", new).unwrap();
    late(&pool).write_at(&[0x22; SLAB as usize], 0).unwrap();
    let mut queue = disk(&late(&pool));
    queue.write(30 * BLOCK, &[0x11; BLOCK as usize], false).unwrap();
    queue.flush().unwrap();
    drop(queue);
    pool.remove_file("late").unwrap();
    // The map does not know the number of the file any more.
    pool.commit_all().unwrap();
    pool.write_checkpoint_now();
    drop(pool);
    let pool = bench.open();
    pool.create_file("late", new).unwrap();
    late(&pool).write_at(&[0x33; SLAB as usize], 0).unwrap();
    drop(pool);
    let pool = bench.open();
    assert!(contents(&late(&pool)).iter().all(|&byte| byte == 0x33));
    empty(&pool);
    assert!(contents(&late(&pool)).iter().all(|&byte| byte == 0x33));
}

#[test]
fn a_cache_is_removed_when_it_is_empty() {
    let (bench, pool, mut bytes) = cached();
    assert!(pool.create_cache(4 * MIB).unwrap_err().to_string().contains("remove it first"));
    let mut queue = disk(&file(&pool));
    queue.write(8 * BLOCK, &[9; BLOCK as usize], false).unwrap();
    bytes[8 * BLOCK as usize..][..BLOCK as usize].fill(9);
    let mut told = Vec::new();
    pool.remove_cache(&mut |emptied| {
        told.push((emptied.done_bytes, emptied.total_bytes));
        true
    })
    .unwrap();
    assert_eq!(told.last(), Some(&(BLOCK, BLOCK)));
    assert!(pool.remove_cache(&mut |_| true).is_err());
    queue.write(12 * BLOCK, &[9; BLOCK as usize], false).unwrap();
    bytes[12 * BLOCK as usize..][..BLOCK as usize].fill(9);
    assert!(contents(&file(&pool)) == bytes);
    drop((queue, pool));
    let pool = bench.open();
    assert!(pool.cache().is_none() && contents(&file(&pool)) == bytes);
    assert!(pool.create_cache(12 * MIB).unwrap_err().to_string().contains("no room for a write-back cache"));
    pool.create_cache(6 * MIB).unwrap();
    for (bytes, why) in [(1, "1 MiB to 64 GiB"), (1 << 40, "1 MiB to 64 GiB")] {
        assert!(pool.create_cache(bytes).unwrap_err().to_string().contains(why));
    }
}

#[test]
fn what_is_on_the_slow_members_too_is_still_read_from_the_log() {
    let (_bench, pool, mut bytes) = cached();
    let mut queue = disk(&file(&pool));
    let mut write = |at: u64, byte: u8| {
        queue.write(at, &[byte; BLOCK as usize], false).unwrap();
        bytes[at as usize..][..BLOCK as usize].fill(byte);
    };
    write(3 * BLOCK, 0xa1);
    file(&pool).sync_data().unwrap();
    write(7 * BLOCK, 0xa2);
    write(20 * SLAB, 0xa3);
    file(&pool).sync_data().unwrap();
    // The first header goes, with its slab, of which the second one names a block too.
    assert!(pool.destage(1).unwrap());
    assert_eq!(used(&pool).1, 1, "only the other slab's block is not on the slow members");
    let slow_reads = |pool: &Pool| {
        let slow = pool.traffic().into_iter().filter(|member| member.class == "hdd");
        slow.map(|member| member.traffic.reads).sum::<u64>()
    };
    let before = slow_reads(&pool);
    let mut found = [0; BLOCK as usize];
    let mut queue = disk(&file(&pool));
    queue.read(7 * BLOCK, &mut found).unwrap();
    assert_eq!((found, slow_reads(&pool) - before), ([0xa2; BLOCK as usize], 0));
    queue.read(3 * BLOCK, &mut found).unwrap();
    assert_eq!((found, slow_reads(&pool) - before), ([0xa1; BLOCK as usize], 1), "the tail has passed it");
    empty(&pool);
    let before = slow_reads(&pool);
    queue.read(7 * BLOCK, &mut found).unwrap();
    assert_eq!((found, slow_reads(&pool) - before), ([0xa2; BLOCK as usize], 1));
    assert!(contents(&file(&pool)) == bytes);
}

#[test]
fn a_slab_that_has_moved_to_the_fast_members_leaves_the_log() {
    let (_bench, pool, mut bytes) = cached();
    let mut queue = disk(&file(&pool));
    queue.write(0, &[0xb1; BLOCK as usize], false).unwrap();
    pool.pin_file("disk", Tier::Fast).unwrap();
    pool.optimize(false, &mut |_| true).unwrap();
    queue.write(BLOCK, &[0xb2; BLOCK as usize], false).unwrap();
    assert_eq!(used(&pool).1, 2, "the log names the slab, so what is written must enter");
    empty(&pool);
    let before = used(&pool);
    queue.write(2 * BLOCK, &[0xb3; BLOCK as usize], false).unwrap();
    assert_eq!((before.1, used(&pool)), (0, before), "now it does not enter");
    for (at, byte) in [(0, 0xb1), (1, 0xb2), (2, 0xb3)] {
        bytes[(at * BLOCK) as usize..][..BLOCK as usize].fill(byte);
    }
    assert!(contents(&file(&pool)) == bytes);
}

/// The worker of the cache destages for minutes where members are slow.
#[test]
fn a_pool_that_is_dropped_is_soon_closed() {
    let (bench, pool, mut bytes) = cached();
    drop(pool);
    let slow = StoreLimit { iops: 4, latency: Duration::from_millis(1) };
    let limits = bench.paths[2..].iter().map(|path| (path.clone(), slow)).collect();
    let options = PoolOptions { writable: true, limits, ..PoolOptions::default() };
    let pool = Arc::new(Pool::open(&bench.paths, &options).unwrap());
    pool.start_own_work();
    let mut queue = disk(&file(&pool));
    // So much that the worker has to destage: one block in each slab, and some more.
    let blocks = DISK_BYTES / BLOCK;
    let half = (4 * MIB / BLOCK) / 2 + 64;
    for at in (0..blocks).map(|number| number * 37 % blocks).take(half as usize) {
        queue.write(at * BLOCK, &[at as u8; BLOCK as usize], false).unwrap();
        bytes[(at * BLOCK) as usize..][..BLOCK as usize].fill(at as u8);
    }
    queue.flush().unwrap();
    thread::sleep(Duration::from_millis(700));
    let is_at_work = used(&pool).1 > 0;
    drop((queue, pool));
    let begun = Instant::now();
    let pool = loop {
        match Pool::open(&bench.paths, &PoolOptions { writable: true, ..PoolOptions::default() }) {
            Ok(pool) => break Arc::new(pool),
            Err(error) => assert!(begun.elapsed() < Duration::from_secs(10), "{error}"),
        }
        thread::sleep(Duration::from_millis(20));
    };
    assert!(is_at_work && contents(&file(&pool)) == bytes);
    empty(&pool);
    assert!(contents(&file(&pool)) == bytes);
}
