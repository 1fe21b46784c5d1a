//! Sealed slabs: bit rot is found by their checksums, mended, and never read.

use crate::{
    Pool,
    busy::Busy,
    pool::lock,
    tests::{Bench, MIB, SLAB, contents, disk, file, offsets_of},
};
use diskwright_format::space::change::{Change, SlabState};
use diskwright_store::{Store, Zeroing};
use std::{
    fs,
    io::{Seek, SeekFrom, Write},
    path::Path,
    sync::Arc,
};

/// A pool whose "disk" of 1 MiB was written and sealed, with what it shows.
fn sealed(sizes: &[u64], copies: u8) -> (Bench, Arc<Pool>, Vec<u8>) {
    let (bench, pool) = Bench::pool(sizes, copies, MIB);
    let bytes: Vec<u8> = (0..MIB).map(|at| ((at / 4096) * 7 + at % 13) as u8).collect();
    let store = file(&pool);
    store.write_at(&bytes, 0).unwrap();
    let found = pool.scrub(&mut |_| true).unwrap();
    assert_eq!((found.sealed_bytes, found.checked_bytes, found.mended_bytes), (MIB, MIB, 0));
    assert_eq!(pool.status().disks.unwrap()[0].unsealed_bytes, 0);
    (bench, pool, bytes)
}

/// Where a block of `bytes` lies on a member.
fn place_of(member: &Path, bytes: &[u8], at: usize) -> u64 {
    let found = offsets_of(member, &bytes[at..at + 4096]);
    assert_eq!(found.len(), 1, "{}", member.display());
    found[0] as u64
}

fn overwrite(member: &Path, offset_bytes: u64, bytes: &[u8]) {
    let mut file = fs::OpenOptions::new().write(true).open(member).unwrap();
    file.seek(SeekFrom::Start(offset_bytes)).unwrap();
    file.write_all(bytes).unwrap();
}

/// Where the records of checksums lie on a member.
fn records(member: &Path) -> Vec<u64> {
    offsets_of(member, b"DWSUMS1").into_iter().map(|at| at as u64).collect()
}

fn has_warning(pool: &Pool, what: &str) -> bool {
    pool.warnings().iter().any(|warning| warning.contains(what))
}

#[test]
fn bit_rot_in_one_copy_is_never_read_and_is_mended() {
    let (bench, pool, bytes) = sealed(&[8 * MIB, 8 * MIB], 2);
    let store = file(&pool);
    let mut queue = disk(&store);
    // Reads through the queue, of whole blocks and of less, and through the store.
    for (round, member) in [0, 1, 0, 1].into_iter().enumerate() {
        let at = (round + 3) * 4096;
        overwrite(&bench.paths[member], place_of(&bench.paths[member], &bytes, at) + 100, &[0xdd; 3]);
        for _ in 0..4 {
            let mut found = vec![0; 4096];
            match round {
                0 | 1 => queue.read(at as u64, &mut found).unwrap(),
                2 => queue.read(at as u64 + 512, &mut found[512..1024]).unwrap(),
                _ => store.read_at(&mut found, at as u64).unwrap(),
            }
            let range = if round == 2 { 512..1024 } else { 0..4096 };
            assert!(found[range.clone()] == bytes[at..][range], "round {round}");
        }
        // The other copy may have been read each time: a scrub reads both.
        pool.scrub(&mut |_| true).unwrap();
        place_of(&bench.paths[member], &bytes, at);
        assert!(has_warning(&pool, "had 4096 bytes that do not have their checksums"), "round {round}");
    }
    let again = pool.scrub(&mut |_| true).unwrap();
    assert_eq!((again.mended_bytes, again.damage.len()), (0, 0));
    assert!(contents(&store) == bytes);
}

#[test]
fn what_is_wrong_in_all_copies_cannot_be_read_until_it_is_written() {
    let (bench, pool, bytes) = sealed(&[8 * MIB, 8 * MIB], 2);
    let store = file(&pool);
    let mut queue = disk(&store);
    let at = 20 * 4096;
    for member in &bench.paths {
        overwrite(member, place_of(member, &bytes, at), &[1]);
    }
    let mut buf = vec![0; 4096];
    for _ in 0..3 {
        let error = queue.read(at as u64, &mut buf).unwrap_err();
        assert!(error.to_string().contains("do not have their checksums on any member"), "{error}");
        assert!(store.read_at(&mut buf[..512], at as u64 + 1024).is_err());
        store.read_at(&mut buf, at as u64 + 4096).unwrap();
        assert!(buf == bytes[at + 4096..at + 8192], "only the block is lost");
    }
    let found = pool.scrub(&mut |_| true).unwrap();
    let damage: Vec<_> = found.damage.iter().map(|one| (&*one.disk, one.offset_bytes, one.len_bytes)).collect();
    assert_eq!(damage, [("disk", at as u64, 4096)]);
    // A write makes the slab dirty, and its contents count as they are.
    queue.write(at as u64, &bytes[at..at + 4096], false).unwrap();
    assert!(contents(&store) == bytes);
    assert_eq!(pool.scrub(&mut |_| true).unwrap().damage, []);
}

#[test]
fn a_damaged_record_is_written_anew_and_without_any_the_contents_count() {
    let (bench, pool, bytes) = sealed(&[8 * MIB, 8 * MIB], 2);
    assert_eq!(records(&bench.paths[0]).len(), 4);
    overwrite(&bench.paths[0], records(&bench.paths[0])[1] + 70, &[0xff]);
    drop(pool);
    let pool = bench.open();
    assert!(contents(&file(&pool)) == bytes);
    let found = pool.scrub(&mut |_| true).unwrap();
    assert_eq!((found.mended_bytes, found.damage.len()), (4096, 0));
    for member in &bench.paths {
        overwrite(member, records(member)[2], &[0xff]);
    }
    drop(pool);
    let pool = bench.open();
    assert!(contents(&file(&pool)) == bytes, "nothing says that the contents are wrong");
    assert!(has_warning(&pool, "are damaged on every member"));
    let found = pool.scrub(&mut |_| true).unwrap();
    assert_eq!((found.sealed_bytes, found.damage.len()), (SLAB, 0));
}

/// Where a copy comes to lie there may be an old record of the same slab.
#[test]
fn a_slab_without_records_does_not_move_sealed() {
    let (bench, pool, bytes) = sealed(&[8 * MIB, 8 * MIB, 8 * MIB], 2);
    drop(pool);
    for member in &bench.paths {
        records(member).into_iter().for_each(|at| overwrite(member, at, &[0xff]));
    }
    let pool = bench.open();
    let moved = pool.status().disks.unwrap()[0].unsealed_bytes;
    assert_eq!(moved, 0);
    pool.remove_member("0", &mut |_| true).unwrap();
    assert!(has_warning(&pool, "are damaged on every member"));
    assert!(pool.status().disks.unwrap()[0].unsealed_bytes > 0, "what moved is not sealed");
    assert!(contents(&file(&pool)) == bytes);
    assert_eq!(pool.scrub(&mut |_| true).unwrap().damage, []);
}

#[test]
fn a_seal_ends_with_the_next_write_and_outlasts_a_close() {
    let (bench, pool, mut bytes) = sealed(&[8 * MIB, 8 * MIB], 2);
    drop(pool);
    let pool = bench.open();
    assert_eq!(pool.status().disks.unwrap()[0].unsealed_bytes, 0);
    let store = file(&pool);
    store.write_at(&[9; 512], 5000).unwrap();
    bytes[5000..5512].fill(9);
    store.zero_range(diskwright_store::FileRange { offset_bytes: SLAB, len_bytes: SLAB }, Zeroing::Deallocate).unwrap();
    bytes[SLAB as usize..2 * SLAB as usize].fill(0);
    assert!(contents(&store) == bytes);
    // The neighbours became dirty with the slab that was written.
    assert_eq!(pool.status().disks.unwrap()[0].unsealed_bytes, 3 * SLAB);
    drop(store);
    drop(pool);
    let pool = bench.open();
    assert!(contents(&file(&pool)) == bytes);
    assert_eq!(pool.scrub(&mut |_| true).unwrap().sealed_bytes, 3 * SLAB);
}

#[test]
fn quiet_slabs_are_sealed_by_themselves() {
    let (_bench, pool) = Bench::pool(&[8 * MIB], 1, MIB);
    file(&pool).write_at(&[7; 300_000], 0).unwrap();
    let mut rounds = 0;
    while pool.status().disks.unwrap()[0].unsealed_bytes > 0 {
        pool.tick().unwrap();
        rounds += 1;
        assert!(rounds < 40, "not sealed");
    }
    assert!(rounds > 10, "a slab that was just written is soon written again");
}

#[test]
fn checksums_move_with_a_copy_and_come_to_a_member_that_returns() {
    let (bench, pool, mut bytes) = sealed(&[8 * MIB, 8 * MIB, 8 * MIB], 2);
    pool.remove_member("0", &mut |_| true).unwrap();
    assert_eq!(pool.status().disks.unwrap()[0].unsealed_bytes, 0);
    let found = pool.scrub(&mut |_| true).unwrap();
    assert_eq!((found.checked_bytes, found.mended_bytes), (MIB, 0), "the records moved too");
    drop(pool);
    // Without member 2 a slab is written and sealed; then it comes back.
    let away = bench.dir.path().join("away");
    fs::rename(&bench.paths[2], &away).unwrap();
    let options = crate::PoolOptions { writable: true, force_degraded: true, ..crate::PoolOptions::default() };
    let pool = bench.open_with(&options).unwrap();
    file(&pool).write_at(&[3; 4096], 0).unwrap();
    bytes[..4096].fill(3);
    let found = pool.scrub(&mut |_| true).unwrap();
    assert_eq!(found.sealed_bytes, MIB, "stale copies do not hinder it");
    drop(pool);
    fs::rename(&away, &bench.paths[2]).unwrap();
    let pool = bench.open();
    while pool.tick().unwrap() {}
    assert!(!pool.status().is_degraded());
    let found = pool.scrub(&mut |_| true).unwrap();
    assert_eq!((found.checked_bytes, found.mended_bytes, found.damage.len()), (MIB, 0, 0));
    assert!(contents(&file(&pool)) == bytes);
}

#[test]
fn rot_does_not_move() {
    let (bench, pool, bytes) = sealed(&[8 * MIB, 8 * MIB, 8 * MIB], 2);
    let at = 9 * 4096;
    let holder = bench.paths.iter().find(|path| !offsets_of(path, &bytes[at..at + 4096]).is_empty()).unwrap();
    overwrite(holder, place_of(holder, &bytes, at), &[0xaa]);
    let number = bench.paths.iter().position(|path| path == holder).unwrap().to_string();
    let other = (number == "0") as usize;
    pool.remove_member(&bench.paths[other].to_string_lossy(), &mut |_| true).unwrap();
    assert!(contents(&file(&pool)) == bytes);
    assert_eq!(pool.scrub(&mut |_| true).unwrap().damage, []);
}

#[test]
fn copies_without_checksums_that_differ_are_made_equal_and_reported() {
    let (bench, pool) = Bench::pool(&[8 * MIB, 8 * MIB], 2, MIB);
    let bytes = vec![0x3c; SLAB as usize];
    file(&pool).write_at(&bytes, 0).unwrap();
    drop(pool);
    let place = offsets_of(&bench.paths[1], &[0x3c; 4096])[7] as u64;
    overwrite(&bench.paths[1], place, &[0]);
    let pool = bench.open();
    let found = pool.scrub(&mut |_| true).unwrap();
    assert_eq!((found.sealed_bytes, found.mended_bytes), (SLAB, SLAB));
    assert!(has_warning(&pool, "differs from"));
    assert_eq!(offsets_of(&bench.paths[1], &[0x3c; 4096]).len(), 64);
}

/// A slab becomes clean in memory at once, but dirty only with its commit.
#[test]
fn a_slab_that_is_about_to_become_dirty_does_not_become_clean_or_sealed() {
    let (_bench, pool) = Bench::pool(&[8 * MIB], 1, MIB);
    let store = file(&pool);
    store.write_at(&[1; 512], 0).unwrap();
    store.write_at(&[1; 512], SLAB).unwrap();
    let entry = store.file.table.entry(1);
    let change = Change::State { file: store.file.number, first: 0, count: 16, state: SlabState::Dirty };
    let append = || {
        let mut state = lock(pool.state());
        let ticket = pool.append(&mut state, &change);
        state.dirtying.push((store.file.number, 0, ticket));
    };
    append();
    pool.clean_idle(pool.epoch().wrapping_add(9), false);
    assert_eq!(entry.load().state(), Some(SlabState::Dirty), "the change comes after it");
    pool.commit_all().unwrap();
    pool.clean_idle(pool.epoch().wrapping_add(9), false);
    assert_eq!(entry.load().state(), Some(SlabState::Clean));
    let crate::pool::seal::Begun::Candidate(candidate) = pool.begin_seal(&store.file, 1).unwrap() else {
        panic!("it is clean")
    };
    append();
    assert_eq!(pool.finish_seals(vec![candidate]).unwrap(), 0);
    pool.commit_all().unwrap();
    assert_eq!(entry.load().state(), Some(SlabState::Dirty));
    drop(Busy::wait(&pool, entry));
}

#[test]
fn a_slab_that_is_written_while_its_checksums_are_computed_is_not_sealed() {
    let (_bench, pool) = Bench::pool(&[8 * MIB], 1, MIB);
    let store = file(&pool);
    store.write_at(&[1; 512], 0).unwrap();
    pool.clean_idle(pool.epoch().wrapping_add(9), false);
    let crate::pool::seal::Begun::Candidate(candidate) = pool.begin_seal(&store.file, 0).unwrap() else {
        panic!("it is clean")
    };
    store.write_at(&[2; 512], 4096).unwrap();
    pool.clean_idle(pool.epoch().wrapping_add(9), false);
    assert_eq!(store.file.table.entry(0).load().state(), Some(SlabState::Clean), "clean again, with other contents");
    assert_eq!(pool.finish_seals(vec![candidate]).unwrap(), 0);
    assert!(contents(&store)[4096..4608] == [2; 512]);
}
