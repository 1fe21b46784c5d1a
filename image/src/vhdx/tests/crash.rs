//! The power is cut at every sync.
//!
//! Guards against: a mapping that becomes durable before its payload, a log that the header names before it holds a whole
//! entry, an entry overwritten while it was the only one, a torn header, freed space used too early, a partial block
//! without its bitmap, a file cut below what the log promises.
//!
//! At each sync of a random session, before it completes, the durable contents and random subsets of everything since
//! (512 bytes at a time) make several files. Each must open, pass the check, and show in every sector a value that was
//! flushed or written since.

use super::*;
use crate::{Severity, vhdx::check};
use std::collections::BTreeMap;

/// What a sector may hold after a cut: the first is the flushed value.
type Allowed = BTreeMap<u64, Vec<u8>>;

fn verify(left: Contents, allowed: &Allowed, rewrite: bool, what: &str) {
    let store = TestStore::new(left);
    let report = check(Arc::clone(&store) as Arc<dyn Store>).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(report.worst() < Some(Severity::Corrupt), "{what}: {:#?}", report.findings);
    let reader = Driver::open(&store, false);
    let mut shown = Vec::new();
    for (&sector, tags) in allowed {
        let tag = reader.read(sector);
        assert!(
            tags.contains(&tag),
            "{what}: sector {sector} shows {tag}, allowed are {tags:?}, block {:?}",
            reader.state(sector / 2048)
        );
        shown.push(tag);
    }
    if rewrite {
        // Replay on disk, a session on top of it, and everything is still there.
        let driver = Driver::open(&store, true);
        driver.write(7 * 2048 + 99, 1, 49).unwrap();
        driver.writer().close().unwrap();
        let reader = Driver::open(&store, false);
        for ((&sector, _), tag) in allowed.iter().zip(shown) {
            assert_eq!(reader.read(sector), tag, "{what}: sector {sector} after another session");
        }
        assert_eq!(reader.read(7 * 2048 + 99), 49);
        let report = check(Arc::clone(&store) as Arc<dyn Store>).unwrap();
        assert!(report.worst() < Some(Severity::Corrupt), "{what}: {:#?}", report.findings);
    }
}

/// What several power cuts leave: torn at 512 bytes, and with whole writes kept or lost.
fn cuts(power: &Power, numbers: &mut Numbers) -> Vec<(&'static str, Contents)> {
    let mut left = Vec::new();
    for (name, odds) in [("nothing", 0), ("half", 50), ("most", 90), ("all", 100)] {
        left.push((name, power.cut(&mut |_| numbers.below(100) < odds)));
    }
    for _ in 0..3 {
        let salt = numbers.next();
        left.push((
            "some whole writes",
            power.cut(&mut |number| Numbers(salt ^ (number as u64 + 1) << 32).below(2) == 0),
        ));
    }
    left
}

/// The sectors in which the session works: the edges of six blocks.
fn universe() -> Vec<u64> {
    (0..6u64)
        .flat_map(|block| [0u64, 1, 2, 3, 7, 8, 9, 1000, 1001, 2046, 2047].map(|within| block * 2048 + within))
        .collect()
}

struct Session {
    driver: Driver,
    allowed: Arc<Mutex<Allowed>>,
}

impl Session {
    fn new(disk_type: DiskType, seed: u64) -> Self {
        let store = Driver::create(&options(disk_type, 64 * MIB, MIB as u32));
        let below = |sector| if disk_type == DiskType::Differencing { parent_tag(sector) } else { 0 };
        let allowed: Arc<Mutex<Allowed>> =
            Arc::new(Mutex::new(universe().into_iter().map(|sector| (sector, vec![below(sector)])).collect()));
        let driver = Driver::open(&store, true);
        let seen = Arc::clone(&allowed);
        let mut numbers = Numbers(seed * 77 + 1);
        store.set_hook(move |power| {
            let allowed = seen.lock().unwrap().clone();
            for (name, left) in cuts(power, &mut numbers) {
                let rewrite = numbers.below(6) == 0;
                verify(left, &allowed, rewrite, &format!("{disk_type} seed {seed}, sync {}, {name} kept", power.syncs));
            }
        });
        Self { driver, allowed }
    }

    fn wrote(&self, sectors: impl Iterator<Item = u64>, tag: u8) {
        let mut allowed = self.allowed.lock().unwrap();
        for sector in sectors {
            if let Some(tags) = allowed.get_mut(&sector) {
                tags.push(tag);
            }
        }
    }

    /// What is allowed now is only what was last written.
    fn flushed(&self) {
        for tags in self.allowed.lock().unwrap().values_mut() {
            *tags = vec![tags[tags.len() - 1]];
        }
    }

    fn step(&self, numbers: &mut Numbers) {
        let universe = universe();
        let block = numbers.below(6);
        match numbers.below(10) {
            0..5 => {
                let sector = universe[numbers.below(universe.len() as u64) as usize];
                let count = (1 + numbers.below(3)).min(2048 - sector % 2048);
                let tag = 1 + numbers.below(48) as u8;
                self.wrote(sector..sector + count, tag);
                self.driver.write(sector, count as u32, tag).unwrap();
            }
            5 => {
                let tag = 1 + numbers.below(48) as u8;
                self.wrote(block * 2048..(block + 1) * 2048, tag);
                self.driver.write(block * 2048, 2048, tag).unwrap();
            }
            6 | 7 if self.driver.writer().can_store_zero() => {
                self.driver.writer().begin_writing().unwrap();
                self.wrote(block * 2048..(block + 1) * 2048, 0);
                let change = if numbers.below(2) == 0 { Commit::Zero } else { Commit::Discard };
                self.driver.writer().commit(block, change).unwrap();
            }
            _ => {
                let generation = self.driver.writer().freed_generation();
                self.driver.writer().flush().unwrap();
                self.flushed();
                self.driver.writer().recycle(generation);
            }
        }
    }
}

fn run(disk_type: DiskType, seeds: std::ops::Range<u64>, steps: u64) {
    for seed in seeds {
        let session = Session::new(disk_type, seed);
        let mut numbers = Numbers(seed + 1);
        for _ in 0..steps {
            session.step(&mut numbers);
        }
        // Close with something to do.
        session.wrote(std::iter::once(1000), 3);
        session.driver.write(1000, 1, 3).unwrap();
        if session.driver.writer().can_store_zero() {
            session.wrote(5 * 2048..6 * 2048, 0);
            session.driver.writer().commit(5, Commit::Zero).unwrap();
        }
        session.driver.writer().close().unwrap();
        session.flushed();
        let store = &session.driver.store;
        let left = store.with(|power| power.cut(&mut |_| false));
        verify(left, &session.allowed.lock().unwrap().clone(), true, "after close");
    }
}

#[test]
fn a_dynamic_disk_survives_cuts_at_every_sync() {
    run(DiskType::Dynamic, 0..4, 40);
}

#[test]
fn a_differencing_disk_survives_cuts_at_every_sync() {
    run(DiskType::Differencing, 0..4, 40);
}

#[test]
fn a_fixed_disk_survives_cuts_at_every_sync() {
    run(DiskType::Fixed, 0..2, 30);
}

/// The table pages of this flush need several log entries. All bits of blocks that are not present are set, as some
/// writers leave them, so a block that becomes visible before its bits are cleared shows zeros instead of its parent.
fn many_pages(close: bool) {
    let blocks_per_page = 512u64;
    let pages = 150;
    let blocks: Vec<u64> = (0..pages).map(|page| page * blocks_per_page + 5 + page % 3).collect();
    let store = Driver::create(&options(DiskType::Differencing, pages * blocks_per_page * MIB, MIB as u32));
    let driver = Driver::open(&store, true);
    // Two of three chunks have a bitmap already.
    for chunk in (0..=pages / 8).filter(|chunk| chunk % 3 != 0) {
        driver.write(chunk * 4096 * 2048, 1, 1).unwrap();
    }
    driver.writer().close().unwrap();
    for &block in &blocks {
        let mut raw = [0; 8];
        store.read_at(&mut raw, 3 * MIB + 8 * (block / 4096 * 4097 + 4096)).unwrap();
        let bitmap_bytes = u64::from_le_bytes(raw) >> 20 << 20;
        if bitmap_bytes != 0 {
            store.write_at(&[0xff; 256], bitmap_bytes + block % 4096 * 256).unwrap();
        }
    }
    let driver = Driver::open(&store, true);
    let mut allowed: Allowed =
        blocks.iter().map(|&block| (block * 2048 + 5, vec![parent_tag(block * 2048 + 5), 9])).collect();
    allowed.insert(4096 * 2048, vec![1]);
    for &block in &blocks {
        driver.write(block * 2048 + 5, 1, 9).unwrap();
        allowed.insert(block * 2048 + 6, vec![parent_tag(block * 2048 + 6)]);
    }
    let mut numbers = Numbers(5);
    let seen = allowed.clone();
    store.set_hook(move |power| {
        for (name, left) in cuts(power, &mut numbers) {
            verify(left, &seen, name == "half", &format!("sync {}, {name} kept", power.syncs));
        }
    });
    let before = store.with(|power| power.syncs);
    if close {
        driver.writer().close().unwrap()
    } else {
        driver.writer().flush().unwrap()
    }
    assert!(store.with(|power| power.syncs) - before >= 8, "the flush took several entries");
    allowed.values_mut().for_each(|tags| *tags = vec![tags[tags.len() - 1]]);
    verify(store.with(|power| power.cut(&mut |_| false)), &allowed, true, "after the flush");
}

#[test]
fn a_flush_of_many_pages_survives_cuts() {
    many_pages(false);
}

#[test]
fn a_close_with_many_pages_survives_cuts() {
    many_pages(true);
}

/// A crash during the replay of a crash.
#[test]
fn replay_on_disk_survives_cuts() {
    for seed in 1..6 {
        let store = Driver::create(&options(DiskType::Differencing, 64 * MIB, MIB as u32));
        let driver = Driver::open(&store, true);
        let allowed: Allowed = (0..6).map(|block| (block * 2048 + 3, vec![block as u8 + 1])).collect();
        for (&sector, tags) in &allowed {
            driver.write(sector, 1, tags[0]).unwrap();
        }
        driver.writer().flush().unwrap();
        // The log is durable, the pages are not in their places.
        let crashed = TestStore::new(store.with(|power| power.cut(&mut |_| false)));
        let mut numbers = Numbers(seed);
        let seen = allowed.clone();
        crashed.set_hook(move |power| {
            let left = power.cut(&mut |_| numbers.below(100) < 50);
            verify(left, &seen, true, &format!("replay, seed {seed}, sync {}", power.syncs));
        });
        assert!(matches!(Driver::open(&crashed, true).image.info().log, crate::LogState::Replayed { entries: 1 }));
        assert!(crashed.with(|power| power.syncs) >= 4);
    }
}
