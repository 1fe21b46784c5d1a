//! Random sessions against an array of bytes.

use super::*;
use crate::{ImageWriter, MoveTo};
use proptest::prelude::*;

const BLOCK: u64 = 8192;
const BLOCKS: u64 = 21;
/// The last block extends beyond the end of the disk.
const SIZE: u64 = BLOCKS * BLOCK - 3 * SECTOR;
const SECTORS: u64 = SIZE / SECTOR;

#[derive(Debug, Clone)]
enum Step {
    Write { sector: u64, count: u64, init: bool },
    Discard { block: u64 },
    Flush { recycle: bool },
    Reserve { block: u64 },
    Move { block: u64, commit: bool },
    GiveUpMoves,
    CutTail,
    Forget { block: u64 },
    Reopen { close: bool },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..SECTORS, 1u64..40, any::<bool>()).prop_map(|(sector, count, init)| Step::Write { sector, count: count.min(SECTORS - sector), init }),
        1 => (0..BLOCKS).prop_map(|block| Step::Write { sector: block * 16, count: 16.min(SECTORS - block * 16), init: true }),
        2 => (0..BLOCKS).prop_map(|block| Step::Discard { block }),
        2 => any::<bool>().prop_map(|recycle| Step::Flush { recycle }),
        1 => (0..BLOCKS).prop_map(|block| Step::Reserve { block }),
        4 => (0..BLOCKS, any::<bool>()).prop_map(|(block, commit)| Step::Move { block, commit }),
        1 => Just(Step::GiveUpMoves),
        2 => Just(Step::CutTail),
        1 => (0..BLOCKS).prop_map(|block| Step::Forget { block }),
        1 => any::<bool>().prop_map(|close| Step::Reopen { close }),
    ]
}

fn reserve_move(writer: &dyn ImageWriter, block: u64) -> MoveTo {
    loop {
        if let Some(answer) = writer.reserve_move(block).unwrap() {
            return answer;
        }
        writer.prepare(block..block + 1).unwrap();
    }
}

fn run(disk_type: DiskType, steps: Vec<Step>, parent: Vec<u8>) {
    let store = created(disk_type, SIZE, BLOCK as u32);
    let mut model = vec![0; SIZE as usize];
    let held = parent.len().min(SIZE as usize);
    model[..held].copy_from_slice(&parent[..held]);
    let mut disk = TestDisk::open(store.clone(), true, parent.clone());
    for (version, step) in (1..).zip(steps) {
        match step {
            Step::Write { sector, count, init } => {
                let data: Vec<u8> = (sector..sector + count).flat_map(|sector| tagged(sector, version)).collect();
                disk.writes_init = init;
                disk.write(sector * SECTOR, &data);
                model[(sector * SECTOR) as usize..][..data.len()].copy_from_slice(&data);
            }
            Step::Discard { block } if disk_type == DiskType::Dynamic => {
                disk.discard(block);
                model[(block * BLOCK) as usize..((block + 1) * BLOCK).min(SIZE) as usize].fill(0);
            }
            Step::Discard { block } => {
                assert!(disk.image.writer().unwrap().commit_waiting(block, Commit::Discard).is_err());
            }
            Step::Flush { recycle } => {
                let generation = disk.image.writer().unwrap().freed_generation();
                disk.flush();
                match (recycle, version % 2) {
                    (true, 0) => disk.image.writer().unwrap().recycle(generation),
                    (true, _) => disk.image.writer().unwrap().recycle_for_moves(generation),
                    (false, _) => {}
                }
            }
            Step::Reserve { block } => {
                let first = disk.image.writer().unwrap().reserve_waiting(block).unwrap();
                let second = disk.image.writer().unwrap().reserve_waiting(block).unwrap();
                assert_eq!(first.offset_bytes, second.offset_bytes);
                assert!(second.init.is_none());
            }
            Step::Move { block, commit } => {
                let writer = disk.image.writer().unwrap();
                if let MoveTo::Place(place) = reserve_move(writer, block) {
                    assert!(place.to_bytes < place.from_bytes);
                    let mut payload = vec![0; place.len_bytes as usize];
                    store.read_at(&mut payload, place.from_bytes).unwrap();
                    store.write_at(&payload, place.to_bytes).unwrap();
                    if commit {
                        writer.commit_waiting(block, Commit::Moved).unwrap();
                    }
                }
            }
            Step::GiveUpMoves => disk.image.writer().unwrap().give_up_moves(),
            Step::CutTail => {
                let writer = disk.image.writer().unwrap();
                writer.begin_compacting_in_use().unwrap();
                writer.cut_free_tail().unwrap();
                // Durably, nothing uses what was cut off. The file must be sound as it is.
                assert_sound(store.clone());
            }
            Step::Forget { block } => {
                disk.image.writer().unwrap().commit_waiting(block, Commit::Absent).unwrap();
                let (start, end) = ((block * BLOCK) as usize, ((block + 1) * BLOCK).min(SIZE) as usize);
                model[start..end].fill(0);
                let shown = parent.get(start..parent.len().min(end)).unwrap_or_default();
                model[start..start + shown.len()].copy_from_slice(shown);
            }
            Step::Reopen { close } => {
                if close {
                    disk.close();
                } else {
                    disk.flush();
                }
                assert_sound(store.clone());
                let seen = TestDisk::open(store.clone(), false, parent.clone());
                assert_eq!(seen.read(0, SIZE as usize), model);
                disk = TestDisk::open(store.clone(), true, parent.clone());
            }
        }
        assert!(disk.read(0, SIZE as usize) == model, "after step {version}");
    }
    disk.close();
    let report = assert_sound(store.clone());
    let disk = TestDisk::open(store, false, parent);
    assert_eq!(disk.read(0, SIZE as usize), model);
    let allocated = (0..BLOCKS).filter(|&block| disk.state(block) != BlockState::Absent).count() as u64;
    assert_eq!((report.allocated_blocks, report.total_blocks), (allocated, BLOCKS));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn dynamic(steps in prop::collection::vec(step(), 1..40)) {
        run(DiskType::Dynamic, steps, Vec::new());
    }

    #[test]
    fn differencing(steps in prop::collection::vec(step(), 1..40), parent_sectors in 0u64..SECTORS + 9) {
        let parent = (0..parent_sectors).flat_map(|sector| tagged(sector, 1_000_000)).collect();
        run(DiskType::Differencing, steps, parent);
    }
}
