//! Pools on files of a temporary folder, as their users see them: through stores and block queues.

use crate::pool::lock;
use crate::{
    Class, Health, NewFile, NewMember, Pool, PoolCreateOptions, PoolOptions, Result, SpaceError, SpaceFile, Tier,
};
use diskwright_format::space::change::{Change, SlabRun, SlabState};
use diskwright_store::{
    BlockDevice, Blocking, Engine, EngineKind, FileRange, IoBuf, LockMode, RawDevice, Store, Zeroing,
};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

pub(crate) const MIB: u64 = 1 << 20;
/// Slabs of the pools here.
pub(crate) const SLAB: u64 = 256 << 10;

pub(crate) struct Bench {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) paths: Vec<PathBuf>,
}

impl Bench {
    /// Files for members of these sizes.
    pub(crate) fn new(sizes: &[u64]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = (0..sizes.len()).map(|number| dir.path().join(format!("m{number}"))).collect();
        for (path, &size) in paths.iter().zip(sizes) {
            fs::File::create(path).unwrap().set_len(size).unwrap();
        }
        Self { dir, paths }
    }

    fn create(&self) -> Result<uuid::Uuid> {
        let member = |path: &PathBuf| NewMember { path: path.clone(), class: Class::Ssd };
        let members: Vec<NewMember> = self.paths.iter().map(member).collect();
        Pool::create("vault", &members, &PoolCreateOptions { slab_bytes: SLAB, ..PoolCreateOptions::default() })
    }

    pub(crate) fn open_with(&self, options: &PoolOptions) -> Result<Arc<Pool>> {
        Pool::open(&self.paths, options).map(Arc::new)
    }

    /// Waits for the own threads of a pool that was just dropped.
    pub(crate) fn open(&self) -> Arc<Pool> {
        let options = PoolOptions { writable: true, ..PoolOptions::default() };
        Arc::new(Pool::open_within(&self.paths, &options, Duration::from_secs(30)).unwrap())
    }

    /// A pool with one file, "disk".
    pub(crate) fn pool(sizes: &[u64], copies: u8, len_bytes: u64) -> (Self, Arc<Pool>) {
        let bench = Self::new(sizes);
        bench.create().unwrap();
        let pool = bench.open();
        pool.create_file("disk", NewFile { len_bytes, copies, columns: 1, tier: Tier::Any }).unwrap();
        (bench, pool)
    }

    /// Copies of the members as they are now, under another name.
    pub(crate) fn snapshot(&self, name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let paths = self.paths.iter().map(|path| {
            let copy = dir.path().join(format!("{name}-{}", path.file_name().unwrap().to_string_lossy()));
            fs::copy(path, &copy).unwrap();
            copy
        });
        Self { paths: paths.collect(), dir }
    }
}

pub(crate) fn file(pool: &Arc<Pool>) -> Arc<SpaceFile> {
    SpaceFile::open(pool, "disk", pool.is_writable(), LockMode::None).unwrap()
}

pub(crate) fn disk(file: &Arc<SpaceFile>) -> Blocking {
    let device = RawDevice::new(file.clone(), true, 512).unwrap();
    Blocking::open(&device, EngineKind::Auto).unwrap()
}

pub(crate) fn contents(file: &SpaceFile) -> Vec<u8> {
    let mut bytes = vec![0xee; file.len_bytes().unwrap() as usize];
    file.read_at(&mut bytes, 0).unwrap();
    bytes
}

/// The offset of the copy of a slab on a member, found by its contents.
pub(crate) fn offsets_of(path: &Path, needle: &[u8]) -> Vec<usize> {
    let bytes = fs::read(path).unwrap();
    bytes.chunks(4096).enumerate().filter(|(_, block)| block.starts_with(needle)).map(|(at, _)| at * 4096).collect()
}

#[test]
fn a_disk_of_a_pool_is_read_as_it_was_written() {
    let (bench, pool) = Bench::pool(&[8 * MIB, 8 * MIB], 2, 3 * MIB);
    let store = file(&pool);
    let mut queue = disk(&store);
    let mut model = vec![0; 3 << 20];
    let mut seed = 7_u64;
    for step in 0..400 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at = (seed >> 20) % (3 * MIB / 512 - 80) * 512;
        let len = (1 + (seed >> 40) % 80) as usize * 512;
        let range = at as usize..at as usize + len;
        match step % 8 {
            0 => {
                queue.write_zeroes(at, len as u64).unwrap();
                model[range].fill(0);
            }
            1 => {
                queue.discard(at / SLAB * SLAB, SLAB).unwrap();
                let start = (at / SLAB * SLAB) as usize;
                model[start..start + SLAB as usize].fill(0);
            }
            2 => {
                let mut found = vec![1; len];
                queue.read(at, &mut found).unwrap();
                assert!(found == model[range], "step {step}");
            }
            _ => {
                let data = vec![step as u8; len];
                queue.write(at, &data, step % 16 == 5).unwrap();
                model[range].copy_from_slice(&data);
            }
        }
        if step % 50 == 0 {
            queue.flush().unwrap();
            pool.tick().unwrap();
        }
    }
    assert!(contents(&store) == model);
    drop((queue, store, pool));
    let pool = bench.open();
    assert!(pool.warnings().is_empty(), "a pool that was closed needs no resync: {:?}", pool.warnings());
    assert!(contents(&file(&pool)) == model);
    let status = pool.status();
    assert!(!status.is_degraded());
    assert_eq!(status.disks.unwrap()[0].dirty_bytes, 0);
}

#[test]
fn new_slabs_read_as_zeros_never_as_what_their_space_held_before() {
    let (_bench, pool) = Bench::pool(&[4 * MIB], 1, MIB);
    let store = file(&pool);
    store.write_at(&vec![7; MIB as usize], 0).unwrap();
    store.zero_range(FileRange { offset_bytes: 0, len_bytes: MIB }, Zeroing::Deallocate).unwrap();
    assert_eq!(store.allocated_bytes().unwrap(), 0);
    for round in 0..8 {
        // The free slabs are all used in turn.
        store.write_at(&[1], round * 1000).unwrap();
        let found = contents(&store);
        assert!(found.iter().enumerate().all(|(at, &byte)| byte == u8::from(at as u64 == round * 1000)));
        store.zero_range(FileRange { offset_bytes: 0, len_bytes: MIB }, Zeroing::Deallocate).unwrap();
    }
    // A file that was shorter shows no old bytes either.
    store.write_at(&vec![9; 2 * SLAB as usize], 0).unwrap();
    store.set_len(1000).unwrap();
    store.set_len(MIB).unwrap();
    let found = contents(&store);
    assert!(found[..1000].iter().all(|&byte| byte == 9) && found[1000..].iter().all(|&byte| byte == 0));
    assert_eq!(store.allocated_bytes().unwrap(), SLAB);
    assert_eq!(store.next_data(0).unwrap(), Some(FileRange { offset_bytes: 0, len_bytes: SLAB }));
    assert_eq!(store.next_data(SLAB).unwrap(), None);
}

#[test]
fn a_full_pool_is_an_error_and_loses_nothing() {
    let (bench, pool) = Bench::pool(&[4 * MIB, 4 * MIB], 2, 64 * MIB);
    let store = file(&pool);
    let mut written = 0;
    let error = loop {
        match store.write_at(&vec![3; SLAB as usize], written) {
            Ok(()) => written += SLAB,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull, "{error}");
    assert!(error.to_string().contains("no free slabs for space://vault/disk"), "{error}");
    assert!(written >= MIB);
    let mut found = vec![0; written as usize];
    store.read_at(&mut found, 0).unwrap();
    assert!(found.iter().all(|&byte| byte == 3));
    // A slab that is given back can be used again.
    store.zero_range(FileRange { offset_bytes: 0, len_bytes: SLAB }, Zeroing::Deallocate).unwrap();
    store.write_at(&[4], 60 * MIB).unwrap();
    drop((store, pool));
    let store = file(&bench.open());
    let mut byte = [0];
    store.read_at(&mut byte, 60 * MIB).unwrap();
    assert_eq!(byte, [4]);
}

#[test]
fn after_a_crash_only_dirty_slabs_are_compared_and_become_equal() {
    let (bench, pool) = Bench::pool(&[16 * MIB, 16 * MIB], 2, 4 * MIB);
    let store = file(&pool);
    store.write_at(&vec![1; 4 << 20], 0).unwrap();
    store.sync_data().unwrap();
    pool.tick().unwrap();
    pool.tick().unwrap();
    pool.tick().unwrap();
    assert_eq!(pool.status().disks.unwrap()[0].dirty_bytes, 0, "slabs at rest become clean");
    // A write, of which only one member has got the payload.
    store.write_at(b"new contents", 5 * SLAB).unwrap();
    assert!(pool.status().disks.unwrap()[0].dirty_bytes >= SLAB);
    let crashed = bench.snapshot("crashed");
    let at = offsets_of(&crashed.paths[1], b"new contents");
    assert_eq!(at.len(), 1);
    let mut bytes = fs::read(&crashed.paths[1]).unwrap();
    bytes[at[0]..at[0] + 12].fill(1);
    fs::write(&crashed.paths[1], bytes).unwrap();
    // Read-only: one fixed copy is read.
    let reader = crashed.open_with(&PoolOptions::default()).unwrap();
    let found = contents(&file(&reader));
    assert_eq!(&found[5 * SLAB as usize..][..12], b"new contents");
    drop(reader);
    let pool = crashed.open();
    assert!(pool.warnings().iter().any(|warning| warning.contains("were compared and made equal")));
    assert_eq!(pool.status().disks.unwrap()[0].dirty_bytes, 0);
    assert_eq!(offsets_of(&crashed.paths[1], b"new contents"), at);
}

#[test]
fn a_member_that_vanishes_is_lost_and_made_equal_when_it_comes_back() {
    let (bench, pool) = Bench::pool(&[16 * MIB, 16 * MIB, 16 * MIB], 2, 4 * MIB);
    let store = file(&pool);
    store.write_at(&vec![1; 4 << 20], 0).unwrap();
    drop((store, pool));
    let away = bench.dir.path().join("away");
    fs::rename(&bench.paths[2], &away).unwrap();
    // Read-only, nothing is recorded.
    let reader = bench.open_with(&PoolOptions::default()).unwrap();
    assert!(reader.status().is_degraded());
    assert!(contents(&file(&reader)).iter().all(|&byte| byte == 1));
    drop(reader);
    let whole = PoolOptions { writable: true, whole: true, ..PoolOptions::default() };
    assert!(matches!(bench.open_with(&whole).unwrap_err(), SpaceError::ReadOnly { .. }));
    let pool = bench.open();
    let store = file(&pool);
    assert_eq!(pool.status().members[2].health, Health::Lost);
    store.write_at(&vec![2; 4 << 20], 0).unwrap();
    store.sync_data().unwrap();
    assert!(contents(&store).iter().all(|&byte| byte == 2));
    drop((store, pool));
    fs::rename(&away, &bench.paths[2]).unwrap();
    let pool = bench.open();
    let store = file(&pool);
    assert!(contents(&store).iter().all(|&byte| byte == 2), "a stale copy is never read");
    assert!(pool.status().disks.unwrap()[0].degraded_bytes > 0);
    while pool.tick().unwrap() {}
    let status = pool.status();
    assert!(!status.is_degraded(), "{status:?}");
    assert_eq!(status.members[2].health, Health::Active);
    drop((store, pool));
    // Now each of the other members may vanish.
    for gone in 0..2 {
        let bench = bench.snapshot("without");
        fs::remove_file(&bench.paths[gone]).unwrap();
        let pool = bench.open();
        assert!(contents(&file(&pool)).iter().all(|&byte| byte == 2), "without member {gone}");
    }
}

#[test]
fn histories_that_diverged_are_refused() {
    let (bench, pool) = Bench::pool(&[8 * MIB, 8 * MIB], 2, MIB);
    file(&pool).write_at(&[1], 0).unwrap();
    drop(pool);
    let forced = PoolOptions { writable: true, force_degraded: true, ..PoolOptions::default() };
    for (number, path) in (0_u8..).zip(&bench.paths) {
        let alone = std::slice::from_ref(path);
        let refused = Pool::open(alone, &PoolOptions { writable: true, ..PoolOptions::default() }).unwrap_err();
        assert!(refused.to_string().contains("`PoolOptions::force_degraded`"), "{refused}");
        let pool = Arc::new(Pool::open(alone, &forced).unwrap());
        file(&pool).write_at(&[10 + number], 0).unwrap();
    }
    let refused = bench.open_with(&PoolOptions { writable: true, ..PoolOptions::default() }).unwrap_err();
    assert!(matches!(refused, SpaceError::Diverged { .. }), "{refused}");
    // The survivor needs no force any more: it has recorded that it went on alone.
    let pool = Pool::open(&bench.paths[..1], &PoolOptions { writable: true, ..PoolOptions::default() }).unwrap();
    assert_eq!(contents(&file(&Arc::new(pool)))[0], 10);
}

#[test]
fn wrong_members_are_refused_by_name() {
    let (bench, pool) = Bench::pool(&[8 * MIB, 8 * MIB], 2, MIB);
    let locked = bench.open_with(&PoolOptions::default()).unwrap_err();
    assert!(locked.to_string().contains("in use"), "{locked}");
    drop(pool);
    let other = Bench::new(&[8 * MIB, 8 * MIB]);
    other.create().unwrap();
    let mixed = [bench.paths[0].clone(), other.paths[1].clone()];
    let options = PoolOptions { writable: true, ..PoolOptions::default() };
    assert!(matches!(Pool::open(&mixed, &options).unwrap_err(), SpaceError::AnotherPool { .. }));
    let clone = bench.dir.path().join("clone");
    fs::copy(&bench.paths[0], &clone).unwrap();
    let cloned = [bench.paths[0].clone(), clone.clone(), bench.paths[1].clone()];
    assert!(matches!(Pool::open(&cloned, &options).unwrap_err(), SpaceError::Cloned { .. }));
    fs::OpenOptions::new().write(true).open(&clone).unwrap().set_len(4 * MIB).unwrap();
    let refused = Pool::open(&[clone.clone(), bench.paths[1].clone()], &options).unwrap_err();
    assert!(matches!(refused, SpaceError::CutShort { .. }), "{refused}");
    fs::write(&clone, vec![0; 8 << 20]).unwrap();
    let refused = Pool::open(std::slice::from_ref(&clone), &options).unwrap_err();
    assert!(matches!(refused, SpaceError::NotAMember { .. }), "{refused}");
    let member = |path: &Path| [NewMember { path: path.to_owned(), class: Class::Hdd }];
    let refused = Pool::create("x", &member(&bench.paths[0]), &PoolCreateOptions::default()).unwrap_err();
    assert!(refused.to_string().contains("it is a member of the pool vault"), "{refused}");
    fs::write(&clone, b"data").unwrap();
    fs::OpenOptions::new().write(true).open(&clone).unwrap().set_len(MIB).unwrap();
    let refused = Pool::create("x", &member(&clone), &PoolCreateOptions::default()).unwrap_err();
    assert!(matches!(refused, SpaceError::HasContents { .. }), "{refused}");
    let force = PoolCreateOptions { force: true, ..PoolCreateOptions::default() };
    assert!(matches!(Pool::create("x", &member(&clone), &force).unwrap_err(), SpaceError::TooSmall { .. }));
    // A pool of which one superblock is damaged is opened by the other one.
    let mut bytes = fs::read(&bench.paths[0]).unwrap();
    bytes[100] ^= 1;
    fs::write(&bench.paths[0], bytes).unwrap();
    assert!(bench.open().warnings().is_empty());
}

#[test]
fn names_are_created_renamed_and_removed() {
    let (bench, pool) = Bench::pool(&[8 * MIB], 1, MIB);
    let new = NewFile { len_bytes: 0, copies: 1, columns: 1, tier: Tier::Fast };
    assert!(matches!(pool.create_file("disk", new).unwrap_err(), SpaceError::Disk { exists: true, .. }));
    assert!(matches!(pool.create_file("a/b", new).unwrap_err(), SpaceError::BadName { .. }));
    let two = NewFile { copies: 2, ..new };
    assert!(pool.create_file("two", two).unwrap_err().to_string().contains("2 copies need as many members"));
    pool.create_file("new", new).unwrap();
    file(&pool).write_at(b"old disk", 0).unwrap();
    assert!(pool.rename_file("new", "disk", false).is_err());
    let open = file(&pool);
    open.relock(LockMode::Shared).unwrap();
    assert!(SpaceFile::open(&pool, "disk", true, LockMode::Exclusive).is_err());
    let free = pool.status().members[0].free_bytes;
    pool.rename_file("new", "disk", true).unwrap();
    assert_eq!(pool.names(), ["disk"]);
    // The old one is open: it is there until it is closed.
    let mut bytes = [0; 8];
    open.read_at(&mut bytes, 0).unwrap();
    assert_eq!((&bytes, pool.status().members[0].free_bytes), (b"old disk", free));
    let crashed = bench.snapshot("crashed");
    assert!(crashed.open().status().members[0].free_bytes > free, "after a crash it is gone");
    drop(open);
    pool.tick().unwrap();
    assert!(pool.status().members[0].free_bytes > free, "the slabs of the replaced disk are free");
    assert_eq!(file(&pool).len_bytes().unwrap(), 0);
    // A second name is the same file, which stays until the last name is gone.
    pool.link_file("disk", "again").unwrap();
    assert!(pool.link_file("disk", "again").is_err());
    file(&pool).write_at(b"one file", 0).unwrap();
    pool.rename_file("disk", "other", false).unwrap();
    pool.remove_file("other").unwrap();
    pool.rename_file("again", "disk", false).unwrap();
    assert_eq!((pool.names(), contents(&file(&pool))), (vec!["disk".to_owned()], b"one file".to_vec()));
    pool.remove_file("disk").unwrap();
    assert!(matches!(pool.remove_file("disk").unwrap_err(), SpaceError::Disk { exists: false, .. }));
    drop(pool);
    assert!(bench.open().names().is_empty());
}

#[test]
fn the_journal_goes_round_and_checkpoints_follow() {
    let (bench, pool) = Bench::pool(&[24 * MIB, 24 * MIB], 2, 8 * MIB);
    let store = file(&pool);
    // Each round is two commits; the journal has 128 blocks.
    for round in 0..300_u64 {
        let at = round % 32 * SLAB;
        store.write_at(&round.to_le_bytes(), at).unwrap();
        if round < 270 {
            store.zero_range(FileRange { offset_bytes: at, len_bytes: SLAB }, Zeroing::Deallocate).unwrap();
        }
    }
    let model = contents(&store);
    let crashed = bench.snapshot("crashed");
    let pool = crashed.open();
    assert!(contents(&file(&pool)) == model);
    assert!(pool.status().disks.unwrap()[0].mapped_bytes >= 30 * SLAB);
}

#[test]
fn a_damaged_journal_is_replaced_by_the_other_one() {
    let (bench, pool) = Bench::pool(&[8 * MIB, 8 * MIB], 2, MIB);
    file(&pool).write_at(b"mirrored", 0).unwrap();
    drop(pool);
    let mut bytes = fs::read(&bench.paths[0]).unwrap();
    bytes[MIB as usize..2 * MIB as usize].fill(0x55);
    fs::write(&bench.paths[0], bytes).unwrap();
    assert_eq!(&contents(&file(&bench.open()))[..8], b"mirrored");
    // It was written again.
    fs::remove_file(&bench.paths[1]).unwrap();
    let forced = PoolOptions { writable: true, force_degraded: true, ..PoolOptions::default() };
    assert!(bench.open_with(&forced).unwrap().names() == ["disk"]);
}

#[test]
fn several_queues_write_and_read_at_the_same_time() {
    let (_bench, pool) = Bench::pool(&[24 * MIB, 24 * MIB, 24 * MIB], 3, 8 * MIB);
    let store = file(&pool);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let store = &store;
            scope.spawn(move || {
                let mut queue = disk(store);
                for step in 0..200_u64 {
                    let at = (step * 7 % 512 * 4 + thread) * 4096;
                    queue.write(at, &[step as u8; 4096], false).unwrap();
                    let mut found = [0; 4096];
                    queue.read(at, &mut found).unwrap();
                    assert_eq!(found, [step as u8; 4096]);
                    if step % 40 == 0 {
                        queue.flush().unwrap();
                    }
                }
            });
        }
        let pool = &pool;
        scope.spawn(move || {
            (0..20).for_each(|_| {
                pool.tick().unwrap();
                std::thread::sleep(Duration::from_millis(3));
            });
        });
    });
    assert_eq!(RawDevice::new(store, true, 512).unwrap().geometry().size_bytes, 8 * MIB);
}

#[test]
fn members_join_and_leave_and_lost_copies_are_rebuilt() {
    let (mut bench, pool) = Bench::pool(&[16 * MIB, 16 * MIB], 2, 4 * MIB);
    let store = file(&pool);
    let mut model = vec![0; 4 << 20];
    model.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 4096) as u8);
    store.write_at(&model, 0).unwrap();
    let refused = pool.remove_member("0", &mut |_| true).unwrap_err();
    assert!(refused.to_string().contains("too few members are left"), "{refused}");
    // A larger member; it gets a journal too.
    let third = bench.dir.path().join("third");
    fs::File::create(&third).unwrap().set_len(32 * MIB).unwrap();
    let member = NewMember { path: third.clone(), class: Class::Ssd };
    pool.add_members(std::slice::from_ref(&member), &PoolCreateOptions::default()).unwrap();
    let refused = pool.add_members(&[member], &PoolCreateOptions::default()).unwrap_err();
    assert!(refused.to_string().contains("in use"), "{refused}");
    bench.paths.push(third);
    assert!(pool.status().members.iter().all(|member| member.has_journal));
    let mut seen = Vec::new();
    let first = bench.paths[0].display().to_string();
    pool.remove_member(&first, &mut |moved| {
        seen.push((moved.done, moved.total));
        true
    })
    .unwrap();
    assert_eq!(seen.last(), Some(&(16, 16)));
    assert!(contents(&store) == model && !pool.status().is_degraded());
    assert_eq!(pool.status().members.iter().map(|member| member.number).collect::<Vec<_>>(), [1, 2]);
    drop((store, pool));
    let refused = Pool::open(&bench.paths[..1], &PoolOptions::default()).unwrap_err();
    assert!(matches!(refused, SpaceError::NotAMember { .. }), "a member that has left is wiped: {refused}");
    bench.paths.remove(0);
    // Now one of the two is lost, and another one takes its place.
    let gone = bench.paths.remove(0);
    fs::remove_file(gone).unwrap();
    let fourth = bench.dir.path().join("fourth");
    fs::File::create(&fourth).unwrap().set_len(16 * MIB).unwrap();
    let forced = PoolOptions { writable: true, force_degraded: true, ..PoolOptions::default() };
    let pool = bench.open_with(&forced).unwrap();
    assert!(pool.status().is_degraded());
    assert!(pool.rebuild(&mut |_| true).unwrap() > 0, "there is no member for the second copies");
    pool.add_members(&[NewMember { path: fourth.clone(), class: Class::Ssd }], &PoolCreateOptions::default()).unwrap();
    assert_eq!(pool.rebuild(&mut |_| true).unwrap(), 0);
    pool.remove_member("1", &mut |_| true).unwrap();
    assert!(!pool.status().is_degraded() && contents(&file(&pool)) == model);
    bench.paths.push(fourth);
    drop(pool);
    let pool = bench.open();
    assert!(pool.warnings().is_empty(), "{:?}", pool.warnings());
    drop(pool);
    // Each of the two has everything.
    for path in &bench.paths {
        let pool = Pool::open(std::slice::from_ref(path), &PoolOptions::default()).unwrap();
        assert!(contents(&file(&Arc::new(pool))) == model);
    }
}

#[test]
fn a_write_to_a_populated_mirror_is_one_transfer_a_copy_and_a_flush_one_sync_a_member() {
    let (_bench, pool) = Bench::pool(&[16 * MIB, 16 * MIB], 2, 4 * MIB);
    let store: Arc<dyn Store> = file(&pool);
    store.write_at(&vec![1; 4 << 20], 0).unwrap();
    store.sync_data().unwrap();
    for kind in [EngineKind::Auto, EngineKind::Sync] {
        let mut engine = Engine::new(kind, 8, None).unwrap();
        let target = engine.add_target(&store).unwrap();
        let mut done = Vec::new();
        for request in 0..128_u64 {
            let buf = IoBuf::new(4096);
            engine.write_one(request, 0, target, request * 8192, buf, 0..4096, false);
            engine.reap(1, &mut done).unwrap();
            if request % 32 == 31 {
                let slot = engine.begin(request, 0, None);
                engine.sync(&slot, target);
                engine.end(slot);
                engine.reap(1, &mut done).unwrap();
            }
        }
        assert!(done.iter().all(|ended| ended.result.is_ok()));
        // 128 writes and 4 flushes, on two members each.
        let stats = engine.stats();
        assert_eq!((stats.parts, stats.pool_parts), (2 * 128 + 2 * 4, 0), "{kind:?}");
        // A flush without a write before it syncs nothing.
        let slot = engine.begin(1, 0, None);
        engine.sync(&slot, target);
        engine.end(slot);
        engine.reap(1, &mut done).unwrap();
        assert_eq!(engine.stats().parts, stats.parts);
    }
}

#[test]
fn a_slab_that_is_allocated_while_a_member_fails_has_a_stale_copy_there() {
    let (_bench, pool) = Bench::pool(&[8 * MIB, 8 * MIB], 2, MIB);
    let store = file(&pool);
    store.write_at(&[1], 0).unwrap();
    let entry = store.file.table.entry(0);
    let copies = entry.load().copies();
    let lost = copies[1].unwrap().member;
    // The journal says that the member is lost before it says where the slab is, or what is stale.
    let mut bytes = Vec::new();
    SlabRun::put(&mut bytes, SlabState::Dirty, copies.into_iter().flatten());
    let changes = [
        Change::Slabs { file: store.file.number, first: 0, slabs: SlabRun::new(2, &bytes) },
        Change::Stale { file: store.file.number, index: 0, mask: 0 },
    ];
    for change in changes {
        let mut state = lock(pool.state());
        let ticket = pool.append_together(&mut state, &[Change::Lost { member: lost }, change]);
        drop(state);
        pool.wait(ticket).unwrap();
        assert_eq!(entry.load().stale(), 0b10);
    }
}

#[test]
fn free_slabs_give_their_space_back_to_the_file_system() {
    use std::os::unix::fs::MetadataExt;
    let (bench, pool) = Bench::pool(&[16 * MIB, 16 * MIB], 2, 4 * MIB);
    let disk = file(&pool);
    disk.write_at(&vec![7; 4 << 20], 0).unwrap();
    disk.sync_data().unwrap();
    let taken = || bench.paths.iter().map(|path| fs::metadata(path).unwrap().blocks() * 512).collect::<Vec<_>>();
    let full = taken();
    disk.zero_range(FileRange { offset_bytes: 0, len_bytes: MIB }, Zeroing::Deallocate).unwrap();
    while pool.tick().unwrap() {}
    let less = taken();
    assert!(full.iter().zip(&less).all(|(full, less)| full - less >= MIB - 64 * 1024), "{full:?} {less:?}");
    drop(disk);
    pool.remove_file("disk").unwrap();
    while pool.tick().unwrap() {}
    let least = taken();
    assert!(less.iter().zip(&least).all(|(less, least)| less - least >= 3 * MIB - 64 * 1024), "{less:?} {least:?}");
    // They can be used again.
    pool.create_file("disk", NewFile { len_bytes: 12 * MIB, copies: 2, columns: 1, tier: Tier::Any }).unwrap();
    let disk = file(&pool);
    disk.write_at(&vec![9; 12 << 20], 0).unwrap();
    assert!(contents(&disk).iter().all(|&byte| byte == 9));
}
