//! One property of a session each: growth, space, flushes, failures, and blocks of other programs.

use super::{sparse::Sectors, *};
use crate::ImageError;
use std::sync::atomic::Ordering;

#[test]
fn a_session_that_writes_nothing_changes_nothing() {
    for disk_type in [DiskType::Fixed, DiskType::Dynamic, DiskType::Differencing] {
        let (store, disk) = disk(disk_type);
        let before = store.sectors();
        disk.read(0, 4 * MIB as usize);
        disk.flush();
        disk.close();
        assert_eq!(store.sectors(), before);
        assert_eq!(check(store).unwrap().findings.len(), 0);
    }
}

#[test]
fn the_footer_moves_with_the_end_and_close_cuts_the_slack() {
    let (store, disk) = disk(DiskType::Dynamic);
    let old_end = store.len_bytes().unwrap() - 512;
    disk.write(0, &[5; 512]);
    let grown = store.len_bytes().unwrap();
    assert!(grown > 16 * MIB, "the file grows in steps");
    assert!(footer_at(&store, grown - 512).is_ok() && footer_at(&store, old_end).is_err());
    assert!(messages(&store, Severity::Leak).len() == 1, "slack of a disk that is open");
    disk.close();
    assert_eq!(store.len_bytes().unwrap(), old_end.next_multiple_of(4096) + 4096 + 65536 + 512);
    assert_eq!(check(store.clone()).unwrap().findings.len(), 0);
    let piece = TestDisk::open(store, false, Vec::new()).state(0);
    assert_eq!(piece, BlockState::data(old_end.next_multiple_of(4096) + 4096));
}

#[test]
fn preallocated_space_is_kept() {
    let store = Arc::new(SparseStore::new("disk.vhd"));
    create(store.clone(), &CreateOptions { preallocate: true, ..options(DiskType::Dynamic, 4 * MIB, 65536) }).unwrap();
    let len = store.len_bytes().unwrap();
    assert!(len > 64 * (65536 + 4096));
    assert!(messages(&store, Severity::Leak).is_empty());
    for block in 0..64 {
        let disk = TestDisk::open(store.clone(), true, Vec::new());
        disk.write(block * 65536, &[block as u8 + 1; 512]);
        if block == 40 {
            disk.discard(7);
            disk.discard(39);
        }
        disk.close();
        assert!(check(store.clone()).unwrap().findings.iter().any(|f| f.message.contains("reserved")) || block == 63);
        assert_eq!(store.len_bytes().unwrap(), len);
    }
    assert_sound(store);
}

#[test]
fn discarded_space_is_reused_only_after_recycle() {
    let (store, disk) = disk(DiskType::Dynamic);
    disk.write(0, &[1; 65536]);
    let first = disk.state(0);
    disk.flush();
    disk.discard(0);
    let writer = disk.image.writer().unwrap();
    let generation = writer.freed_generation();
    assert!(generation > 0);
    disk.write(65536, &[2; 512]);
    assert_ne!(disk.state(1), first);
    disk.flush();
    writer.recycle(generation);
    disk.write(2 * 65536, &[3; 512]);
    assert_eq!(disk.state(2), first);
    assert_eq!(disk.read(2 * 65536 + 512, 65024), vec![0; 65024], "stale data is not visible");
    disk.close();
    assert_eq!(check(store).unwrap().findings.len(), 0);
}

#[test]
fn a_hole_of_an_earlier_session_is_reused() {
    let (store, disk) = disk(DiskType::Dynamic);
    disk.write(0, &[1; 3 * 65536]);
    disk.discard(1);
    disk.close();
    let report = check(store.clone()).unwrap();
    assert_eq!((report.leaked_bytes / 65536, report.worst()), (1, Some(Severity::Leak)));
    let len = store.len_bytes().unwrap();
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    disk.write(9 * 65536, &[4; 512]);
    assert_eq!(disk.read(9 * 65536, 65536)[512..], [0; 65024]);
    disk.close();
    assert_eq!(store.len_bytes().unwrap(), len);
    assert_eq!(check(store).unwrap().findings.len(), 0);
}

#[test]
fn a_failed_allocation_on_a_full_disk_changes_nothing() {
    let (store, disk) = disk(DiskType::Dynamic);
    let before = store.sectors();
    store.max_len.store(before.len, Ordering::Relaxed);
    let error = disk.image.writer().unwrap().reserve_waiting(3).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    assert_eq!((disk.state(3), store.sectors()), (BlockState::Absent, before.clone()));
    // Space for the block, but not for the footer after it.
    store.max_len.store(before.len - 512 + 65536 + 4096, Ordering::Relaxed);
    assert!(disk.image.writer().unwrap().reserve_waiting(3).is_err());
    assert_eq!(store.len_bytes().unwrap(), before.len);
    assert!(footer_at(&store, before.len - 512).is_ok());
    store.max_len.store(u64::MAX, Ordering::Relaxed);
    disk.write(3 * 65536, &[1; 512]);
    disk.close();
    assert_eq!(check(store).unwrap().findings.len(), 0);
}

#[test]
fn a_failed_sync_poisons_and_a_failed_write_does_not() {
    let (store, disk) = disk(DiskType::Dynamic);
    disk.write(0, &[1; 512]);
    let writer = disk.image.writer().unwrap();
    store.fail_writes.store(true, Ordering::Relaxed);
    assert_eq!(writer.flush().unwrap_err().kind(), std::io::ErrorKind::StorageFull);
    assert!(writer.is_dirty());
    store.fail_writes.store(false, Ordering::Relaxed);
    disk.flush();
    assert_eq!(TestDisk::open(store.clone(), false, Vec::new()).read(0, 512), [1; 512]);
    store.fail_syncs.store(true, Ordering::Relaxed);
    assert!(matches!(writer.flush(), Err(ImageError::Io { .. })));
    store.fail_syncs.store(false, Ordering::Relaxed);
    assert!(matches!(writer.flush(), Err(ImageError::Poisoned { .. })));
    assert!(matches!(writer.close(), Err(ImageError::Poisoned { .. })));
}

#[test]
fn a_failed_sync_of_an_allocation_poisons_the_image() {
    let (store, disk) = disk(DiskType::Dynamic);
    let writer = disk.image.writer().unwrap();
    writer.check_syncs().unwrap();
    store.fail_syncs.store(true, Ordering::Relaxed);
    assert!(matches!(writer.reserve_waiting(0), Err(ImageError::Io { .. })));
    store.fail_syncs.store(false, Ordering::Relaxed);
    assert!(!writer.is_dirty() && matches!(writer.check_syncs(), Err(ImageError::Poisoned { .. })));
}

#[test]
fn a_flush_has_no_needless_syncs() {
    let (store, disk) = disk(DiskType::Dynamic);
    let syncs = || store.syncs.swap(0, Ordering::Relaxed);
    syncs();
    disk.write(0, &[1; 512]);
    assert_eq!(syncs(), 1, "once in a session, before free space is touched");
    disk.write(65536, &[1; 512]);
    assert_eq!(syncs(), 0, "allocating costs no sync");
    disk.flush();
    assert_eq!(syncs(), 2);
    disk.write(0, &[2; 512]);
    disk.flush();
    assert_eq!(syncs(), 1, "an overwrite has no metadata");
}

#[test]
fn a_commit_during_a_flush_waits_for_the_next_flush() {
    for disk_type in [DiskType::Dynamic, DiskType::Differencing] {
        let (store, disk) = disk(disk_type);
        let disk = Arc::new(disk);
        disk.write(0, &[1; 512]);
        store.records_cuts.store(true, Ordering::Relaxed);
        let other = Arc::clone(&disk);
        store.in_next_sync.set(move || {
            // Not durable when the second pass writes the BAT. So no durable state may refer to it.
            other.write(512, &[2; 512]);
            other.write(65536, &[2; 512]);
            assert!(other.image.writer().unwrap().is_dirty());
        });
        disk.image.writer().unwrap().flush().unwrap();
        assert!(disk.image.writer().unwrap().is_dirty());
        let shown = |sectors: Sectors| {
            let store = Arc::new(SparseStore::with("cut.vhd", sectors));
            let disk = TestDisk::open(store, false, vec![7; 1 << 20]);
            (disk.read(0, 512)[0], disk.read(512, 512)[0], disk.state(1) == BlockState::Absent)
        };
        // A dynamic block is visible as a whole. Its second sector was overwritten in place.
        let second = if disk_type == DiskType::Dynamic { 2 } else { 7 };
        assert_eq!(shown(store.last_sync()), (1, second, true));
        disk.flush();
        assert_eq!(shown(store.last_sync()), (1, 2, false));
    }
}

#[test]
fn concurrent_flushes_and_writes_succeed() {
    let (store, disk) = disk(DiskType::Differencing);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let disk = &disk;
            scope.spawn(move || {
                for sector in 0..16 {
                    let at = (thread * 16 + sector) * 65536 + sector * 512;
                    disk.write(at, &tagged(at / 512, 1));
                    disk.image.writer().unwrap().flush().unwrap();
                    let seen = TestDisk::open(disk.store().clone(), false, Vec::new());
                    assert_eq!(seen.read(at, 512), tagged(at / 512, 1));
                }
            });
        }
    });
    disk.close();
    assert_eq!(check(store).unwrap().findings.len(), 0);
}

#[test]
fn payload_of_other_programs_stays_in_place() {
    // Another program's first block directly after the table: payload at a multiple of 512 only.
    let (store, disk) = disk(DiskType::Dynamic);
    let at = store.len_bytes().unwrap() - 512 + 512;
    drop(disk);
    let table = header(&store).table_offset;
    edit_footers(&store, |footer| footer.creator_app = *b"qem2");
    let footer = footer_at(&store, 0).unwrap().to_bytes();
    store.write_at(&[0xff; 512], at).unwrap();
    store.write_at(&[3; 65536], at + 512).unwrap();
    store.write_at(&footer, at + 512 + 65536).unwrap();
    store.write_at(&((at / 512) as u32).to_be_bytes(), table).unwrap();
    assert!(messages(&store, Severity::Note)[0].contains("4096"));
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    assert_eq!(disk.image.info().payload_alignment_bytes, 512);
    disk.write(1024, &[4; 512]);
    disk.write(65536, &[5; 65536]);
    disk.write(3 * 65536, &[6; 65536]);
    let all = disk.read(0, 4 * 65536);
    assert!(matches!(disk.state(1), BlockState::Data { offset_bytes, .. } if offset_bytes % 4096 == 0));
    disk.discard(0);
    disk.close();
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    assert_eq!(disk.image.info().payload_alignment_bytes, 4096);
    assert_eq!(disk.read(65536, 3 * 65536), all[65536..]);
    assert_eq!(disk.read(0, 65536), [0; 65536]);
    disk.close();
    assert_sound(store);
}

#[test]
fn misuse_is_an_error() {
    let (_, disk) = disk(DiskType::Dynamic);
    let writer = disk.image.writer().unwrap();
    assert_eq!(writer.reserve_waiting(64).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    assert_eq!(writer.commit_waiting(0, Commit::Whole).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    assert!(writer.commit_waiting(u64::MAX, Commit::Whole).is_err());
    assert!(disk.image.sector_bitmap(64).is_err());
    let mut states = [BlockState::Zero; 3];
    disk.image.block_states(u64::MAX - 1, &mut states).unwrap();
    assert_eq!(states, [BlockState::Absent; 3]);
}

#[test]
fn an_uncommitted_reservation_leaves_no_trace() {
    let (store, disk) = disk(DiskType::Dynamic);
    let len = store.len_bytes().unwrap();
    let writer = disk.image.writer().unwrap();
    writer.reserve_waiting(5).unwrap();
    writer.reserve_waiting(6).unwrap();
    writer.commit_waiting(6, Commit::Zero).unwrap();
    disk.close();
    assert_eq!(store.len_bytes().unwrap(), len);
    assert_eq!(check(store).unwrap().findings.len(), 0);
}
