//! Random sessions against an array of sectors, and single guarantees of the writer.

use super::*;
use crate::{ImageError, LogState, MoveTo, SectorBitmap, Severity, vhdx::check};
use diskwright_store::MemoryStore;
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Step {
    Write { block: u64, first: u32, count: u32, tag: u8 },
    Whole { block: u64, tag: u8 },
    Zero { block: u64 },
    Discard { block: u64 },
    Move { block: u64, commit: bool },
    MoveTables,
    GiveUpMoves,
    CutTail,
    Forget { block: u64 },
    Flush,
    FlushAndRecycle { for_moves: bool },
    Reopen,
}

const BLOCKS: u64 = 5;
const SECTORS: u32 = 2048;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..BLOCKS, 0..SECTORS, 1u32..600, 1u8..40).prop_map(|(block, first, count, tag)| Step::Write { block, first, count: count.min(SECTORS - first), tag }),
        2 => (0..BLOCKS, 1u8..40).prop_map(|(block, tag)| Step::Whole { block, tag }),
        1 => (0..BLOCKS).prop_map(|block| Step::Zero { block }),
        1 => (0..BLOCKS).prop_map(|block| Step::Discard { block }),
        4 => (0..BLOCKS, any::<bool>()).prop_map(|(block, commit)| Step::Move { block, commit }),
        1 => Just(Step::MoveTables),
        1 => Just(Step::GiveUpMoves),
        2 => Just(Step::CutTail),
        1 => (0..BLOCKS).prop_map(|block| Step::Forget { block }),
        1 => Just(Step::Flush),
        2 => any::<bool>().prop_map(|for_moves| Step::FlushAndRecycle { for_moves }),
        1 => Just(Step::Reopen),
    ];
    prop::collection::vec(step, 1..40)
}

fn assert_sound(store: &Arc<TestStore>) {
    let report = check(Arc::clone(store) as Arc<dyn Store>).unwrap();
    assert!(report.worst() < Some(Severity::Corrupt), "{:#?}", report.findings);
}

fn reserve_move(writer: &dyn ImageWriter, block: u64) -> MoveTo {
    loop {
        if let Some(answer) = writer.reserve_move(block).unwrap() {
            return answer;
        }
        writer.prepare(block..block + 1).unwrap();
    }
}

fn run(disk_type: DiskType, steps: Vec<Step>) {
    // Half of the last block lies beyond the end of the disk.
    let size_bytes = (BLOCKS - 1) * MIB + MIB / 2;
    let store = Driver::create(&options(disk_type, size_bytes, MIB as u32));
    let sectors = size_bytes / SECTOR;
    let mut model: Vec<u8> =
        (0..sectors).map(|sector| if disk_type == DiskType::Differencing { parent_tag(sector) } else { 0 }).collect();
    let mut driver = Driver::open(&store, true);
    for step in steps {
        match step {
            Step::Write { block, first, count, tag } => {
                let start = block * u64::from(SECTORS) + u64::from(first);
                let count = u64::from(count).min(sectors.saturating_sub(start));
                if count > 0 {
                    driver.write(start, count as u32, tag).unwrap();
                    model[start as usize..(start + count) as usize].fill(tag);
                }
            }
            Step::Whole { block, tag } => {
                driver.writer().begin_writing().unwrap();
                let offset_bytes = driver.writer().reserve_waiting(block).unwrap().offset_bytes;
                assert_eq!(driver.writer().reserve_waiting(block).unwrap().offset_bytes, offset_bytes);
                let start = block * u64::from(SECTORS);
                let count = u64::from(SECTORS).min(sectors - start);
                store.write_at(&vec![tag; (count * SECTOR) as usize], offset_bytes).unwrap();
                assert_eq!(
                    driver.writer().commit_waiting(block, Commit::Whole).unwrap(),
                    BlockState::data(offset_bytes)
                );
                model[start as usize..(start + count) as usize].fill(tag);
            }
            Step::Zero { block } | Step::Discard { block } => {
                driver.writer().begin_writing().unwrap();
                let change = if matches!(step, Step::Zero { .. }) { Commit::Zero } else { Commit::Discard };
                if driver.writer().can_store_zero() {
                    driver.writer().commit_waiting(block, change).unwrap();
                    let start = block * u64::from(SECTORS);
                    let end = sectors.min(start + u64::from(SECTORS));
                    model[start as usize..end as usize].fill(0);
                } else {
                    assert!(matches!(
                        driver.writer().commit_waiting(block, change),
                        Err(ImageError::Unsupported { .. })
                    ));
                }
            }
            Step::Flush => {
                driver.writer().flush().unwrap();
                assert!(!driver.writer().is_dirty());
            }
            Step::FlushAndRecycle { for_moves } => {
                let generation = driver.writer().freed_generation();
                driver.writer().flush().unwrap();
                match for_moves {
                    true => driver.writer().recycle_for_moves(generation),
                    false => driver.writer().recycle(generation),
                }
            }
            Step::Move { block, commit } => {
                if let MoveTo::Place(place) = reserve_move(driver.writer(), block) {
                    assert!(place.to_bytes < place.from_bytes);
                    let mut payload = vec![0; place.len_bytes as usize];
                    store.read_at(&mut payload, place.from_bytes).unwrap();
                    store.write_at(&payload, place.to_bytes).unwrap();
                    if commit {
                        driver.writer().commit_waiting(block, Commit::Moved).unwrap();
                    }
                }
            }
            Step::GiveUpMoves => driver.writer().give_up_moves(),
            Step::CutTail => {
                if disk_type != DiskType::Fixed {
                    driver.writer().begin_compacting_in_use().unwrap();
                }
                driver.writer().cut_free_tail().unwrap();
            }
            Step::MoveTables => driver.writer().move_tables().unwrap(),
            Step::Forget { .. } if !driver.writer().can_store_zero() => {}
            Step::Forget { block } => {
                driver.writer().commit_waiting(block, Commit::Absent).unwrap();
                let start = block * u64::from(SECTORS);
                for sector in start..sectors.min(start + u64::from(SECTORS)) {
                    let is_child = disk_type == DiskType::Differencing;
                    model[sector as usize] = if is_child { parent_tag(sector) } else { 0 };
                }
            }
            Step::Reopen => {
                driver.writer().close().unwrap();
                assert_sound(&store);
                driver = Driver::open(&store, true);
                assert_eq!(driver.image.info().log, LogState::Clean);
            }
        }
        for block in 0..BLOCKS {
            for within in [0u64, 1, 7, 8, 500, 1023, 1024, 2047] {
                let sector = block * u64::from(SECTORS) + within;
                if sector < sectors {
                    assert_eq!(driver.read(sector), model[sector as usize], "sector {sector} after {step:?}");
                }
            }
        }
    }
    driver.writer().close().unwrap();
    let reader = Driver::open(&store, false);
    for sector in 0..sectors {
        assert_eq!(reader.read(sector), model[sector as usize], "sector {sector} at the end");
    }
    assert_sound(&store);
    let report = check(Arc::clone(&store) as Arc<dyn Store>).unwrap();
    let in_use = report.allocated_blocks * MIB;
    assert!(store.len_bytes().unwrap() <= 4 * MIB + in_use + report.leaked_bytes + MIB, "the slack was cut at close");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_dynamic_disk_holds_what_was_written(steps in steps()) {
        run(DiskType::Dynamic, steps);
    }

    #[test]
    fn a_differencing_disk_reads_its_parent_where_it_was_not_written(steps in steps()) {
        run(DiskType::Differencing, steps);
    }

    #[test]
    fn a_fixed_disk_holds_what_was_written(steps in steps()) {
        run(DiskType::Fixed, steps);
    }
}

#[test]
fn a_session_that_writes_nothing_changes_nothing() {
    let store = Driver::create(&options(DiskType::Dynamic, 10 * MIB, MIB as u32));
    // Slack as after a crash.
    store.set_len(store.len_bytes().unwrap() + 3 * MIB).unwrap();
    let before = store.contents();
    let writes = store.with(|power| power.writes);
    let driver = Driver::open(&store, true);
    driver.writer().flush().unwrap();
    driver.writer().close().unwrap();
    assert!(store.contents() == before && store.with(|power| power.writes) == writes);
}

#[test]
fn write_guids_change_once_in_a_session_and_only_when_needed() {
    let store = Driver::create(&options(DiskType::Dynamic, 10 * MIB, MIB as u32));
    let first = Driver::open(&store, true);
    first.writer().reserve_waiting(3).unwrap();
    first.writer().close().unwrap();
    let second = Driver::open(&store, true);
    assert_ne!(first.image.info().file_write_id, second.image.info().file_write_id, "a reservation changes the file");
    assert_eq!(first.image.info().linkage_id, second.image.info().linkage_id, "a reservation is not guest-visible");
    second.writer().begin_writing().unwrap();
    let syncs = store.with(|power| power.syncs);
    second.writer().begin_writing().unwrap();
    assert_eq!(store.with(|power| power.syncs), syncs);
    second.writer().close().unwrap();
    let third = Driver::open(&store, false);
    assert_ne!(second.image.info().linkage_id, third.image.info().linkage_id);
    assert!(third.image.info().remarks.is_empty(), "both headers are valid");
}

#[test]
fn slack_with_stale_data_reads_as_zeros_in_a_new_block() {
    let store = Driver::create(&options(DiskType::Dynamic, 10 * MIB, MIB as u32));
    let end = store.len_bytes().unwrap();
    store.write_at(&vec![0xee; 3 * MIB as usize], end).unwrap();
    let driver = Driver::open(&store, true);
    driver.write(5, 1, 9).unwrap();
    assert_eq!([driver.read(4), driver.read(5), driver.read(6)], [0, 9, 0]);
}

#[test]
fn space_leaked_by_an_earlier_session_is_reused() {
    let store = Driver::create(&options(DiskType::Dynamic, 10 * MIB, MIB as u32));
    let driver = Driver::open(&store, true);
    for block in 0..6 {
        driver.write(block * 2048, 2048, 7).unwrap();
    }
    driver.writer().commit_waiting(1, Commit::Discard).unwrap();
    driver.writer().commit_waiting(3, Commit::Zero).unwrap();
    driver.writer().close().unwrap();
    let len_bytes = store.len_bytes().unwrap();
    assert_eq!(check(Arc::clone(&store) as Arc<dyn Store>).unwrap().leaked_bytes, 2 * MIB);
    let driver = Driver::open(&store, true);
    driver.write(7 * 2048 + 5, 1, 8).unwrap();
    driver.write(8 * 2048 + 5, 1, 8).unwrap();
    assert_eq!([driver.read(7 * 2048 + 4), driver.read(7 * 2048 + 5), driver.read(2048), driver.read(0)], [0, 8, 0, 7]);
    driver.writer().close().unwrap();
    assert_eq!(store.len_bytes().unwrap(), len_bytes);
    assert_eq!(check(Arc::clone(&store) as Arc<dyn Store>).unwrap().worst(), None);
}

#[test]
fn a_failed_allocation_on_a_full_file_system_changes_nothing() {
    let store = Driver::create(&options(DiskType::Differencing, 10 * MIB, MIB as u32));
    let driver = Driver::open(&store, true);
    let len_bytes = store.len_bytes().unwrap();
    store.with(|power| power.full_at_bytes = Some(len_bytes + MIB));
    // Space for the block, but not for its sector bitmap.
    let error = driver.write(0, 1, 5).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    assert!(error.to_string().contains("free some space"), "{error}");
    assert_eq!(driver.writer().reserve_waiting(1).unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert_eq!(driver.read(0), parent_tag(0));
    store.with(|power| power.full_at_bytes = None);
    driver.write(0, 1, 5).unwrap();
    driver.write(2048, 1, 6).unwrap();
    assert_eq!([driver.read(0), driver.read(1), driver.read(2048)], [5, parent_tag(1), 6]);
    driver.writer().close().unwrap();
    assert_sound(&store);
}

#[test]
fn a_failed_sync_poisons_the_image() {
    let store = Driver::create(&options(DiskType::Dynamic, 10 * MIB, MIB as u32));
    let driver = Driver::open(&store, true);
    driver.write(0, 8, 5).unwrap();
    store.with(|power| power.fail_syncs = true);
    assert!(driver.writer().flush().unwrap_err().to_string().contains("injected"));
    store.with(|power| power.fail_syncs = false);
    assert!(driver.writer().is_dirty());
    assert!(matches!(driver.writer().flush(), Err(ImageError::Poisoned { .. })));
    assert!(matches!(driver.writer().reserve_waiting(4), Err(ImageError::Poisoned { .. })));
    assert!(matches!(driver.writer().close(), Err(ImageError::Poisoned { .. })));
}

#[test]
fn a_failed_log_write_can_be_retried() {
    let store = Driver::create(&options(DiskType::Dynamic, 10 * MIB, MIB as u32));
    let driver = Driver::open(&store, true);
    driver.write(0, 8, 5).unwrap();
    store.with(|power| power.fail_writes = true);
    assert!(driver.writer().flush().is_err());
    assert!(driver.writer().is_dirty());
    store.with(|power| power.fail_writes = false);
    driver.writer().flush().unwrap();
    assert!(!driver.writer().is_dirty());
    driver.writer().close().unwrap();
    assert_eq!(Driver::open(&store, false).read(7), 5);
}

#[test]
fn stale_bits_of_an_absent_block_are_ignored() {
    let store = Driver::create(&options(DiskType::Differencing, 10 * MIB, MIB as u32));
    let driver = Driver::open(&store, true);
    driver.write(0, 1, 5).unwrap();
    driver.writer().close().unwrap();
    // Another program set bits of block 1 and then made the block absent.
    let bitmap_entry = 3 * MIB + 4096 * 8;
    let mut raw = [0; 8];
    store.read_at(&mut raw, bitmap_entry).unwrap();
    let bitmap_bytes = u64::from_le_bytes(raw) >> 20 << 20;
    store.write_at(&[0xff; 256], bitmap_bytes + 256).unwrap();
    let driver = Driver::open(&store, true);
    assert_eq!(driver.read(2048), parent_tag(2048));
    driver.write(2048 + 9, 2, 6).unwrap();
    assert_eq!(
        [driver.read(2048 + 8), driver.read(2048 + 9), driver.read(2048 + 11)],
        [parent_tag(2056), 6, parent_tag(2059)]
    );
    let mut expected = SectorBitmap::empty(2048, 512);
    expected.set(9, 2);
    assert_eq!(driver.image.sector_bitmap(1).unwrap(), expected);
}

#[test]
fn bits_of_a_block_of_256_mib_span_pages() {
    let store = Driver::create(&options(DiskType::Differencing, 1 << 30, 256 << 20));
    let driver = Driver::open(&store, true);
    let base = 524_288;
    driver.write(base + 32_000, 2_000, 5).unwrap();
    driver.write(base + 524_287, 1, 6).unwrap();
    driver.writer().close().unwrap();
    let reader = Driver::open(&store, false);
    for (sector, tag) in
        [(31_999, None), (32_000, Some(5)), (32_768, Some(5)), (33_999, Some(5)), (34_000, None), (524_287, Some(6))]
    {
        assert_eq!(reader.read(base + sector), tag.unwrap_or(parent_tag(base + sector)), "sector {sector}");
    }
}

#[test]
fn preallocated_space_is_kept() {
    let made = CreateOptions { preallocate: true, ..options(DiskType::Dynamic, 64 * MIB, MIB as u32) };
    let store = Driver::create(&made);
    let len_bytes = store.len_bytes().unwrap();
    assert_eq!(len_bytes, 68 * MIB);
    assert_eq!(check(Arc::clone(&store) as Arc<dyn Store>).unwrap().worst(), Some(Severity::Note));
    for block in [9, 2] {
        let driver = Driver::open(&store, true);
        store.with(|power| power.full_at_bytes = Some(len_bytes));
        driver.write(block * 2048, 3, 7).unwrap();
        driver.writer().close().unwrap();
        assert_eq!(store.len_bytes().unwrap(), len_bytes);
    }
    let driver = Driver::open(&store, true);
    (0..64).for_each(|block| driver.write(block * 2048 + 1, 1, 8).unwrap());
    driver.writer().close().unwrap();
    assert_eq!(store.len_bytes().unwrap(), len_bytes);
    assert_eq!(check(store).unwrap().worst(), None);
}

#[test]
fn a_disk_of_64_tib_is_opened_and_written_with_little_io() {
    let store = Driver::create(&options(DiskType::Dynamic, 64 << 40, MIB as u32));
    let driver = Driver::open(&store, true);
    let last = (64u64 << 40) / SECTOR - 1;
    driver.write(last, 1, 3).unwrap();
    driver.write(1 << 33, 1, 4).unwrap();
    driver.writer().close().unwrap();
    let reader = Driver::open(&store, false);
    assert_eq!([reader.read(last), reader.read(1 << 33), reader.read(0), reader.read(last - 1)], [3, 4, 0, 0]);
    let mut beyond = [BlockState::Zero; 3];
    reader.image.block_states((64 << 20) - 1, &mut beyond).unwrap();
    assert!(matches!(beyond, [BlockState::Data { .. }, BlockState::Absent, BlockState::Absent]));
}

#[test]
fn concurrent_flushes_all_succeed() {
    let store = Driver::create(&options(DiskType::Differencing, 64 * MIB, MIB as u32));
    let driver = Driver::open(&store, true);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let driver = &driver;
            scope.spawn(move || {
                for round in 0..20u64 {
                    let sector = (thread * 16 + round % 16) * 2048 + round;
                    driver.write(sector, 1, 10 + thread as u8).unwrap();
                    driver.writer().flush().unwrap();
                }
            });
        }
    });
    assert!(!driver.writer().is_dirty());
    let durable = TestStore::new(store.with(|power| power.cut(&mut |_| false)));
    let reader = Driver::open(&durable, false);
    for thread in 0..4u64 {
        for round in 0..20u64 {
            assert_eq!(reader.read((thread * 16 + round % 16) * 2048 + round), 10 + thread as u8);
        }
    }
}

#[test]
fn invalid_options_are_refused_with_a_hint() {
    let refuse = |options: CreateOptions| {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new("m"));
        let error = create(store, &options).unwrap_err();
        assert!(matches!(error, ImageError::BadOptions { .. }), "{error}");
    };
    let good = options(DiskType::Dynamic, 10 * MIB, MIB as u32);
    refuse(CreateOptions { size_bytes: 100, ..good.clone() });
    refuse(CreateOptions { size_bytes: (64 << 40) + 512, ..good.clone() });
    refuse(CreateOptions { block_bytes: Some(3 << 20), ..good.clone() });
    refuse(CreateOptions { logical_sector_bytes: 1024, ..good.clone() });
    refuse(CreateOptions { logical_sector_bytes: 4096, physical_sector_bytes: 512, ..good.clone() });
    refuse(CreateOptions { disk_type: DiskType::Differencing, ..good.clone() });
    refuse(CreateOptions { parent: Some(ParentLink::default()), ..good.clone() });
    refuse(CreateOptions { parent: Some(ParentLink::default()), disk_type: DiskType::Differencing, ..good });
}

#[test]
fn an_opened_disk_has_the_options_of_its_creation() {
    let link = ParentLink {
        relative_path: Some("..\\ü\\p.vhdx".into()),
        volume_path: Some("\\\\?\\Volume{26a21bda-a627-11d7-9931-806e6f6e6963}\\p.vhdx".into()),
        absolute_path: Some(r"\\?\C:\p.vhdx".into()),
        linkage: Some(Uuid::from_u128(77).into()),
        ..ParentLink::default()
    };
    let made = CreateOptions {
        parent: Some(link.clone()),
        logical_sector_bytes: 4096,
        block_bytes: None,
        ..options(DiskType::Differencing, 1 << 33, 0)
    };
    let store = Driver::create(&made);
    let reader = Driver::open(&store, false);
    let info = reader.image.info();
    assert_eq!((info.disk_type, info.size_bytes, info.block_bytes), (DiskType::Differencing, 1 << 33, 2 << 20));
    assert_eq!((info.logical_sector_bytes, info.physical_sector_bytes), (4096, 4096));
    assert_eq!(
        (info.parent.as_ref(), info.disk_id, info.log),
        (Some(&link), Some(Uuid::from_u128(42)), LogState::Clean)
    );
    assert!(info.creator.starts_with("diskwright ") && info.remarks.is_empty());
    assert_eq!(check(store).unwrap().worst(), None);
}

/// The number of dirty table pages is bounded even if no client flushes.
#[test]
fn many_dirty_pages_cause_a_flush() {
    let store = Driver::create(&options(DiskType::Differencing, 3 << 40, 1 << 20));
    let driver = Driver::open(&store, true);
    driver.writer().begin_writing().unwrap();
    let commit = |page: u64| driver.writer().commit_waiting(page * 512, Commit::Zero).unwrap();
    commit(0);
    let before = store.with(|power| power.syncs);
    for page in 1..4000 {
        commit(page);
    }
    assert_eq!(store.with(|power| power.syncs), before, "16 MiB of dirty pages need no flush");
    for page in 4000..4200 {
        commit(page);
    }
    assert!(store.with(|power| power.syncs) > before, "more than 16 MiB of dirty pages did not cause a flush");
    assert_eq!(driver.state(4199 * 512), BlockState::Zero);
}
