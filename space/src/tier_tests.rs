//! Tiers: pins, moves of what is hot, and the report.

use crate::{
    Class, NewFile, NewMember, Pool, PoolCreateOptions, Tier,
    file::SpaceFile,
    tests::{Bench, MIB, SLAB, contents, file},
};
use diskwright_store::{LockMode, Store};
use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

/// A pool of one fast member of `fast_slabs` slabs besides its area, and a large slow one; and a
/// disk of 8 MiB with contents.
fn tiered(fast_slabs: u64, tier: Tier) -> (Bench, Arc<Pool>, Vec<u8>) {
    let slab_bytes = SLAB + 4096;
    let bench = Bench::new(&[MIB + 4096 + (4 + fast_slabs) * slab_bytes, 16 * MIB]);
    let member = |(path, class): (&PathBuf, Class)| NewMember { path: path.clone(), class };
    let members: Vec<NewMember> = bench.paths.iter().zip([Class::Ssd, Class::Hdd]).map(member).collect();
    let options = PoolCreateOptions { slab_bytes: SLAB, copies: Some(1), ..PoolCreateOptions::default() };
    Pool::create("vault", &members, &options).unwrap();
    let pool = bench.open();
    pool.create_file("disk", NewFile { len_bytes: 8 * MIB, copies: 1, columns: 1, tier }).unwrap();
    let bytes: Vec<u8> = (0..8 * MIB).map(|at| (at / 512 % 251) as u8).collect();
    for (at, piece) in (0..).step_by(SLAB as usize).zip(bytes.chunks(SLAB as usize)) {
        file(&pool).write_at(piece, at).unwrap();
    }
    (bench, pool, bytes)
}

/// Indices of the slabs that lie on the fast member.
fn fast(pool: &Arc<Pool>) -> Vec<u64> {
    let pieces = pool.where_lies("disk", 0..8 * MIB).unwrap();
    let slabs = pieces.iter().filter(|piece| piece.is_fast);
    slabs.flat_map(|piece| piece.offset_bytes / SLAB..(piece.offset_bytes + piece.len_bytes) / SLAB).collect()
}

#[test]
fn a_pinned_disk_moves_to_its_tier() {
    let (bench, pool, bytes) = tiered(40, Tier::Slow);
    assert_eq!(fast(&pool).len(), 0);
    pool.pin_file("disk", Tier::Fast).unwrap();
    assert!(pool.where_lies("disk", 0..1).unwrap()[0].why.contains("`space optimize` moves it"));
    let told = pool.optimize(true, &mut |_| true).unwrap();
    assert_eq!((told.up_bytes, fast(&pool).len()), (8 * MIB, 0), "nothing has moved");
    let done = pool.optimize(false, &mut |_| true).unwrap();
    assert_eq!((done.up_bytes, done.down_bytes, done.left_bytes, fast(&pool).len()), (8 * MIB, 0, 0, 32));
    drop(pool);
    let pool = bench.open();
    assert_eq!((fast(&pool).len(), pool.status().disks.unwrap()[0].tier), (32, Tier::Fast));
    pool.pin_file("disk", Tier::Slow).unwrap();
    // Stopped after some slabs, it goes on where it was.
    let mut left = 5;
    let stopped = pool.optimize(false, &mut |_| {
        left -= 1;
        left > 0
    });
    assert!(matches!(stopped, Err(crate::SpaceError::Stopped { .. })), "{stopped:?}");
    assert_eq!(fast(&pool).len(), 28);
    assert_eq!(pool.optimize(false, &mut |_| true).unwrap().down_bytes, 28 * SLAB);
    assert!(contents(&file(&pool)) == bytes && fast(&pool).is_empty());
}

#[test]
fn what_is_used_often_moves_to_the_fast_member_and_makes_room_for_what_is_hotter() {
    let (bench, pool, bytes) = tiered(10, Tier::Slow);
    pool.pin_file("disk", Tier::Any).unwrap();
    let disk = file(&pool);
    let hot: Vec<u32> = vec![3, 4, 11, 12, 20, 21, 22, 30];
    hot.iter().for_each(|&index| disk.file.heat.add(index, 1000 + index));
    (0..32).for_each(|index| disk.file.heat.add(index, 10));
    let before = pool.tier_report().unwrap();
    assert_eq!((before.share, before.fast_used_bytes, before.mapped_bytes), (Some(0.0), 0, 8 * MIB));
    assert!(before.share_after.unwrap() > 0.96 && before.working_set_bytes == 8 * SLAB, "{before:?}");
    let done = pool.optimize(false, &mut |_| true).unwrap();
    let now = fast(&pool);
    assert!(hot.iter().all(|&index| now.contains(&u64::from(index))), "{now:?}");
    // Nothing is left to be allocated, so nothing stays free for new slabs.
    assert_eq!((done.up_bytes, now.len()), (10 * SLAB, 10));
    let new = NewFile { len_bytes: 4 * SLAB, copies: 1, columns: 1, tier: Tier::Any };
    pool.create_file("other", new).unwrap();
    let done = pool.optimize(false, &mut |_| true).unwrap();
    assert_eq!((done.up_bytes, done.down_bytes, fast(&pool).len()), (0, SLAB, 9), "a tenth stays free");
    // The heat changes.
    disk.file.heat.add(7, 5000);
    let done = pool.optimize(false, &mut |_| true).unwrap();
    assert_eq!((done.up_bytes, done.down_bytes), (SLAB, SLAB));
    assert!(fast(&pool).contains(&7));
    assert_eq!(pool.optimize(false, &mut |_| true).unwrap().up_bytes, 0, "nothing is left to do");
    let shares: Vec<f64> = pool.tier_report().unwrap().curve.iter().map(|(_, share)| *share).collect();
    assert!(shares.windows(2).all(|pair| pair[0] <= pair[1]) && *shares.last().unwrap() == 1.0, "{shares:?}");
    assert!(contents(&disk) == bytes);
    // And what was learned outlasts a close.
    (0..2000).for_each(|_| pool.count_served(Class::Ssd));
    pool.save_heat().unwrap();
    drop((disk, pool));
    let pool = bench.open();
    let report = pool.tier_report().unwrap();
    assert!(report.share.unwrap() > 0.96, "{report:?}");
    assert_eq!(pool.names(), ["disk", "other"], "the pool's own files are not disks");
    assert!(pool.where_lies("disk", 7 * SLAB..8 * SLAB).unwrap()[0].why.contains("hot"));
    assert!(pool.create_file("/heat", NewFile { len_bytes: 0, copies: 1, columns: 1, tier: Tier::Any }).is_err());
}

#[test]
fn the_predicted_share_is_the_one_that_is_measured() {
    let (_bench, pool, _) = tiered(10, Tier::Slow);
    pool.pin_file("disk", Tier::Any).unwrap();
    let disk = file(&pool);
    let mut queue = crate::tests::disk(&disk);
    let mut seed = 5_u64;
    let mut load = |count: u32| {
        let mut buf = [0; 4096];
        for _ in 0..count {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // A slab's share falls with its number.
            let unit = (seed >> 33) as f64 / (1_u64 << 31) as f64;
            let index = ((unit * unit * unit * 32.0) as u64).min(31) * 13 % 32;
            queue.read(index * SLAB + (seed >> 20) % 64 * 4096, &mut buf).unwrap();
        }
    };
    load(40_000);
    let done = pool.optimize(false, &mut |_| true).unwrap();
    let before = pool.tier_report().unwrap();
    load(40_000);
    let fast_now = pool.tier_report().unwrap();
    // What the second half has added to what was served by the fast member.
    let counted = |report: &crate::TierReport| report.measured.unwrap();
    let measured = counted(&fast_now) * 2.0 - counted(&before);
    let predicted = done.share_after.unwrap();
    assert!((measured - predicted).abs() < 0.03, "predicted {predicted}, measured {measured}");
    assert!(predicted > 0.6, "{predicted}");
}

#[test]
fn a_damaged_table_costs_only_itself_and_is_written_anew() {
    let (bench, pool, _) = tiered(10, Tier::Slow);
    pool.pin_file("disk", Tier::Any).unwrap();
    file(&pool).file.heat.add(3, 1000);
    (0..2000).for_each(|_| pool.count_served(Class::Hdd));
    let hottest = |pool: &Arc<Pool>| pool.where_lies("disk", 3 * SLAB..4 * SLAB).unwrap()[0].why.clone();
    pool.optimize(false, &mut |_| true).unwrap();
    assert_eq!(pool.moves().len(), 1, "{:?}", pool.moves());
    pool.save_heat().unwrap();
    {
        let table = SpaceFile::open(&pool, "/moves", true, LockMode::None).unwrap();
        table.write_at(&[0xff], 20).unwrap();
        table.sync_data().unwrap();
    }
    drop(pool);
    let pool = bench.open();
    assert_eq!(pool.moves(), [], "what is damaged is not shown");
    assert!(hottest(&pool).contains("hot"), "{}", hottest(&pool));
    file(&pool).file.heat.add(9, 5000);
    pool.optimize(false, &mut |_| true).unwrap();
    pool.save_heat().unwrap();
    drop(pool);
    let moves = bench.open().moves();
    assert_eq!((moves.len(), moves[0].offset_bytes, moves[0].is_up), (1, 9 * SLAB, true), "{moves:?}");
}

#[test]
fn only_moves_between_tiers_are_recorded() {
    let (bench, pool, bytes) = tiered(10, Tier::Slow);
    pool.pin_file("disk", Tier::Any).unwrap();
    file(&pool).file.heat.add(3, 1000);
    pool.optimize(false, &mut |_| true).unwrap();
    let moves = pool.moves();
    // The slow member is drained into a new one of its class.
    let path = bench.paths[0].with_file_name("new.dwm");
    std::fs::File::create(&path).unwrap().set_len(24 * MIB).unwrap();
    pool.add_members(&[NewMember { path, class: Class::Hdd }], &PoolCreateOptions::default()).unwrap();
    pool.remove_member(&bench.paths[1].display().to_string(), &mut |_| true).unwrap();
    assert_eq!((pool.moves(), fast(&pool)), (moves, vec![3]));
    assert!(contents(&file(&pool)) == bytes);
}

#[test]
fn columns_are_kept_by_moves() {
    let slab_bytes = SLAB + 4096;
    let fast_bytes = MIB + 4096 + 24 * slab_bytes;
    let bench = Bench::new(&[fast_bytes, fast_bytes, 16 * MIB, 16 * MIB]);
    let classes = [Class::Ssd, Class::Ssd, Class::Hdd, Class::Hdd];
    let member = |(path, class): (&PathBuf, Class)| NewMember { path: path.clone(), class };
    let members: Vec<NewMember> = bench.paths.iter().zip(classes).map(member).collect();
    let options = PoolCreateOptions { slab_bytes: SLAB, copies: Some(1), ..PoolCreateOptions::default() };
    Pool::create("vault", &members, &options).unwrap();
    let pool = bench.open();
    pool.create_file("disk", NewFile { len_bytes: 4 * MIB, copies: 1, columns: 2, tier: Tier::Slow }).unwrap();
    for slab in 0..16 {
        file(&pool).write_at(&[slab as u8 + 1; SLAB as usize], slab * SLAB).unwrap();
    }
    let on = || -> Vec<u8> {
        let state = pool.file_named("disk").unwrap();
        let found = state.table.mapped(0..16).flat_map(|(_, entry)| entry.load().copies());
        found.flatten().map(|copy| copy.member).collect()
    };
    for tier in [Tier::Slow, Tier::Fast, Tier::Slow] {
        pool.pin_file("disk", tier).unwrap();
        pool.optimize(false, &mut |_| true).unwrap();
        let on = on();
        assert!(on.iter().all(|&member| (member < 2) == (tier == Tier::Fast)), "{on:?}");
        assert!(on.windows(2).all(|two| two[0] != two[1]), "{tier:?}: {on:?}");
    }
}

#[test]
fn several_ticks_at_once_move_each_slab_once() {
    let (bench, pool, bytes) = tiered(12, Tier::Slow);
    pool.pin_file("disk", Tier::Any).unwrap();
    let disk = file(&pool);
    for round in 0..6 {
        (0..10).for_each(|index| disk.file.heat.add((round * 5 + index) % 32, 1000 * (round + 1)));
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    (0..4).for_each(|_| pool.optimize_round());
                    pool.tick().unwrap();
                });
            }
        });
        let held = pool.status().disks.unwrap().iter().map(|disk| disk.mapped_bytes).sum::<u64>();
        assert_eq!(held, 8 * MIB);
    }
    assert!(contents(&disk) == bytes);
    let free = pool.status().room.unwrap().free_bytes;
    drop((disk, pool));
    let pool = bench.open();
    assert_eq!(pool.status().room.unwrap().free_bytes, free, "no slab was lost");
    assert!(contents(&file(&pool)) == bytes && pool.warnings().is_empty());
}

#[test]
fn a_pool_warns_before_it_is_full_and_a_full_one_loses_nothing() {
    let (_bench, pool) = Bench::pool(&[24 * MIB, 24 * MIB], 2, 32 * MIB);
    let disk = file(&pool);
    let is_warned = |pool: &Pool| pool.status().warnings.iter().any(|warning| warning.contains("before writes fail"));
    let mut written = 0;
    // From the end on, since a sequential writer gets many slabs at once.
    let at = |slab: u64| (127 - slab) * SLAB;
    while disk.write_at(&[written as u8 + 1; SLAB as usize], at(written)).is_ok() {
        written += 1;
        let room = pool.status().room.unwrap();
        assert_eq!(is_warned(&pool), room.free_bytes < room.all_bytes / 10, "{room:?}");
        pool.tick().unwrap();
    }
    assert!(written > 10 && is_warned(&pool));
    assert!(pool.warnings().len() > 1, "again with each hundredth");
    let error = disk.write_at(&[9; 4096], at(written)).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    // What is there can be written, and nothing is lost.
    disk.write_at(&[0xee; 4096], at(0)).unwrap();
    let shown = contents(&disk);
    let first = &shown[at(0) as usize..][..SLAB as usize];
    assert!(first[4096..].iter().all(|&byte| byte == 1) && first[..4096].iter().all(|&byte| byte == 0xee));
    assert!((1..written).all(|slab| shown[at(slab) as usize] == slab as u8 + 1));
    assert!(!pool.status().is_degraded());
}

#[test]
fn moves_know_the_latency_of_those_who_work() {
    let (_bench, pool, bytes) = tiered(40, Tier::Slow);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut queue = crate::tests::disk(&file(&pool));
            let (mut buf, mut seed) = ([0; 4096], 1_u64);
            while !stop.load(Ordering::Relaxed) {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                queue.read((seed >> 33) % 2048 * 4096, &mut buf).unwrap();
            }
        });
        for _ in 0..20 {
            for tier in [Tier::Fast, Tier::Slow] {
                pool.pin_file("disk", tier).unwrap();
                let _ = pool.optimize(false, &mut |_| !pool.pace.knows_latencies());
            }
            if pool.pace.knows_latencies() {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(pool.pace.knows_latencies(), "{:?}", pool.pace);
    assert!(contents(&file(&pool)) == bytes);
}
