//! Power cuts. At every sync, and at the end, some of what was written since the last one is lost, sector by sector.
//! Whatever is left must open, hold no corruption, hold everything that was flushed, and in no sector anything
//! but what was once written to that very sector.

use super::{
    sparse::{Change, Cut, Sectors},
    *,
};
use proptest::prelude::*;
use std::{collections::HashMap, sync::atomic::Ordering};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 150;
const SECTORS: u64 = BLOCKS * BLOCK / SECTOR - 3;
const PARENT: u32 = 1_000_000;

/// For each sector that was ever written: what a cut may show.
#[derive(Clone, Default)]
struct Allowed {
    /// As of the last flush.
    flushed: HashMap<u64, u32>,
    /// Now.
    now: HashMap<u64, u32>,
    /// Everything since the last flush.
    since: Vec<(u64, u32)>,
}

impl Allowed {
    fn write(&mut self, sector: u64, version: u32) {
        self.now.insert(sector, version);
        self.since.push((sector, version));
    }

    fn flushed(&mut self) {
        self.flushed = self.now.clone();
        self.since.clear();
    }
}

fn apply(cut: &Cut, rng: &mut Choices, keep: u32) -> Sectors {
    let mut left = cut.durable.clone();
    // Changes of length reach the disk in order; each write may or may not.
    let lengths = cut.changes.iter().filter(|change| matches!(change, Change::Length(_))).count() as u32;
    let mut kept_lengths = rng.below(lengths + 1);
    for change in &cut.changes {
        match change {
            Change::Write(offset, bytes) if rng.below(100) < keep => left.write(bytes, *offset),
            Change::Write(..) => {}
            Change::Length(len) if kept_lengths > 0 => {
                kept_lengths -= 1;
                left.set_len(*len);
            }
            Change::Length(_) => {}
        }
    }
    left
}

/// SplitMix64: all that is needed is a choice that the seed repeats.
struct Choices(u64);

impl Choices {
    fn below(&mut self, n: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed >> 33) % u64::from(n.max(1))) as u32
    }
}

fn verify(left: Sectors, allowed: &Allowed, untouched: u32, parent: &[u8]) {
    let store = Arc::new(SparseStore::with("cut.vhd", left));
    assert_sound(store.clone());
    let disk = TestDisk::open(store.clone(), false, parent.to_vec());
    let verify_disk = |disk: &TestDisk| {
        let bytes = disk.read(0, (SECTORS * SECTOR) as usize);
        let mut since: HashMap<u64, Vec<u32>> = HashMap::new();
        for &(sector, version) in &allowed.since {
            since.entry(sector).or_default().push(version);
        }
        for (sector, found) in (0..SECTORS).zip(bytes.chunks(SECTOR as usize)) {
            let base = allowed.flushed.get(&sector).copied().unwrap_or(untouched);
            let fits = tagged(sector, base) == found
                || since.get(&sector).is_some_and(|versions| versions.iter().any(|&v| tagged(sector, v) == found));
            assert!(fits, "sector {sector} (flushed: version {base}) shows {:?}", &found[..16]);
        }
    };
    verify_disk(&disk);
    // And it can be written again: what a cut left in the slack must not show.
    let again = TestDisk::open(store.clone(), true, parent.to_vec());
    let fresh: Vec<_> = (0..BLOCKS - 1).filter(|&block| again.state(block) == BlockState::Absent).take(3).collect();
    let mut allowed = allowed.clone();
    for block in fresh {
        let sector = block * BLOCK / SECTOR + 2;
        again.write(sector * SECTOR, &tagged(sector, 777));
        allowed.write(sector, 777);
    }
    again.close();
    assert_sound(store.clone());
    let disk = TestDisk::open(store, false, parent.to_vec());
    let bytes = disk.read(0, (SECTORS * SECTOR) as usize);
    for (sector, found) in (0..SECTORS).zip(bytes.chunks(SECTOR as usize)) {
        if allowed.now.get(&sector) == Some(&777) {
            assert_eq!(found, tagged(sector, 777));
        }
        let owner = u64::from_le_bytes(found[..8].try_into().unwrap());
        assert!(owner == 0 || owner == sector + 1, "sector {sector} shows that of {}", owner - 1);
    }
}

#[derive(Debug, Clone)]
enum Step {
    Write {
        sector: u64,
        count: u64,
        init: bool,
    },
    Discard {
        block: u64,
    },
    Flush {
        recycle: bool,
    },
    Reopen,
    /// The program is killed in a flush, after so many syncs. The page cache lives on.
    Kill {
        syncs: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let sector = prop_oneof![0..SECTORS, 0..80u64];
    prop_oneof![
        6 => (sector, 1u64..20, any::<bool>()).prop_map(|(sector, count, init)| Step::Write { sector, count: count.min(SECTORS - sector), init }),
        2 => (0..10u64).prop_map(|block| Step::Discard { block }),
        3 => any::<bool>().prop_map(|recycle| Step::Flush { recycle }),
        1 => Just(Step::Reopen),
        1 => (0u64..3).prop_map(|syncs| Step::Kill { syncs }),
    ]
}

fn run(disk_type: DiskType, steps: Vec<Step>, seed: u64) {
    let mut rng = Choices(seed);
    let is_child = disk_type == DiskType::Differencing;
    let untouched = if is_child { PARENT } else { 0 };
    let parent: Vec<u8> =
        if is_child { (0..SECTORS).flat_map(|sector| tagged(sector, PARENT)).collect() } else { Vec::new() };
    let store = created(disk_type, SECTORS * SECTOR, BLOCK as u32);
    let store = Arc::new(SparseStore::with("disk.vhd", store.sectors()));
    store.records_cuts.store(true, Ordering::Relaxed);
    let mut disk = TestDisk::open(store.clone(), true, parent.clone());
    let mut allowed = Allowed::default();
    let mut cut_and_verify = |allowed: &Allowed| {
        for cut in store.take_cuts().iter().chain([&store.cut()]) {
            for keep in [0, 50, 90, 100] {
                verify(apply(cut, &mut rng, keep), allowed, untouched, &parent);
            }
        }
    };
    for (version, step) in (1..).zip(steps) {
        match step {
            Step::Write { sector, count, init } => {
                let data: Vec<u8> = (sector..sector + count).flat_map(|sector| tagged(sector, version)).collect();
                disk.writes_init = init;
                disk.write(sector * SECTOR, &data);
                (sector..sector + count).for_each(|sector| allowed.write(sector, version));
            }
            Step::Discard { block } if !is_child => {
                disk.discard(block);
                (block * 8..block * 8 + 8).for_each(|sector| allowed.write(sector, 0));
            }
            Step::Discard { .. } => {}
            Step::Flush { recycle } => {
                let generation = disk.image.writer().unwrap().freed_generation();
                disk.flush();
                cut_and_verify(&allowed);
                allowed.flushed();
                if recycle {
                    disk.image.writer().unwrap().recycle(generation);
                }
            }
            Step::Kill { syncs } => {
                store.syncs_left.store(syncs, Ordering::Relaxed);
                let _ = disk.image.writer().unwrap().flush();
                store.syncs_left.store(u64::MAX, Ordering::Relaxed);
                cut_and_verify(&allowed);
                disk = TestDisk::open(store.clone(), true, parent.clone());
                // What was not flushed may be lost; what is seen now stays.
                let bytes = disk.read(0, (SECTORS * SECTOR) as usize);
                for (sector, found) in (0..SECTORS).zip(bytes.chunks(SECTOR as usize)) {
                    let version = u32::from_le_bytes(found[8..12].try_into().unwrap());
                    allowed.now.insert(sector, version);
                }
            }
            Step::Reopen => {
                disk.close();
                cut_and_verify(&allowed);
                allowed.flushed();
                disk = TestDisk::open(store.clone(), true, parent.clone());
            }
        }
    }
    cut_and_verify(&allowed);
    disk.close();
    cut_and_verify(&allowed);
    allowed.flushed();
    cut_and_verify(&allowed);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn dynamic(steps in prop::collection::vec(step(), 1..25), seed: u64) {
        run(DiskType::Dynamic, steps, seed);
    }

    #[test]
    fn differencing(steps in prop::collection::vec(step(), 1..25), seed: u64) {
        run(DiskType::Differencing, steps, seed);
    }
}
