//! Growth of disks: their contents afterwards, stale data of other programs beyond the old end, and
//! power cuts at every step.

use super::{
    cuts::{Tear, cuts_during},
    *,
};
use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::Ordering,
};

const TYPES: [DiskType; 3] = [DiskType::Fixed, DiskType::Dynamic, DiskType::Differencing];
const BLOCK: u32 = 64 << 10;

fn write(disk: &TestDisk, sector: u64, version: u32) {
    disk.write(sector * SECTOR, &tagged(sector, version));
}

#[track_caller]
fn assert_holds(disk: &TestDisk, sector: u64, version: u32, what: &str) {
    assert!(disk.read(sector * SECTOR, SECTOR as usize) == tagged(sector, version), "{what}: sector {sector}");
}

/// Grows a disk, writes in the new range, and checks the contents before and after reopening.
/// Returns whether the table was moved.
fn grows(disk_type: DiskType, size_bytes: u64, new_bytes: u64) -> bool {
    let what = format!("{disk_type} from {size_bytes} to {new_bytes}");
    let store = created(disk_type, size_bytes, BLOCK);
    let table_offset = (disk_type != DiskType::Fixed).then(|| header(&store).table_offset);
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    write(&disk, 3, 1);
    disk.flush();
    write(&disk, 200, 2);
    disk.image.writer().unwrap().resize(new_bytes).unwrap();
    assert_eq!(disk.image.size_bytes(), new_bytes, "{what}");
    let (first_new, last) = (size_bytes / SECTOR, new_bytes / SECTOR - 1);
    assert_holds(&disk, first_new, 0, &what);
    assert_holds(&disk, last, 0, &what);
    write(&disk, last, 3);
    write(&disk, first_new, 4);
    write(&disk, 201, 5);
    let held = [(3, 1), (200, 2), (last, if last == first_new { 4 } else { 3 }), (first_new, 4), (201, 5), (202, 0)];
    held.iter().for_each(|&(sector, version)| assert_holds(&disk, sector, version, &what));
    disk.close();
    let reader = TestDisk::open(store.clone(), false, Vec::new());
    assert_eq!(reader.image.info().size_bytes, new_bytes, "{what}");
    assert_eq!(reader.image.info().remarks, [""; 0], "{what}");
    held.iter().for_each(|&(sector, version)| assert_holds(&reader, sector, version, &what));
    assert_sound(store.clone());
    let len = store.len_bytes().unwrap();
    let footer = footer_at(&store, len - 512).unwrap();
    assert_eq!((footer.current_size_bytes, footer.original_size_bytes), (new_bytes, size_bytes), "{what}");
    assert_eq!(footer.geometry, diskwright_format::vhd::Chs::from_size(new_bytes), "{what}");
    let Some(table_offset) = table_offset else { return false };
    assert_eq!(footer_at(&store, 0).unwrap(), footer, "{what}");
    assert_eq!(u64::from(header(&store).max_table_entries), new_bytes.div_ceil(BLOCK.into()), "{what}");
    header(&store).table_offset != table_offset
}

#[test]
fn every_type_grows_within_its_table_and_beyond_it() {
    for disk_type in TYPES {
        // A sector has 128 entries.
        assert!(!grows(disk_type, 4 * MIB, 8 * MIB));
        assert!(!grows(disk_type, 4 * MIB - 4096, 4 * MIB));
        assert_eq!(grows(disk_type, 4 * MIB - 4096, 9 * MIB), disk_type != DiskType::Fixed);
        grows(disk_type, 4 * MIB, 4 * MIB + 512);
        grows(disk_type, 70 * MIB, 1000 * MIB);
    }
}

#[test]
fn a_disk_can_grow_several_times() {
    let store = created(DiskType::Dynamic, 4 * MIB, BLOCK);
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    let sizes = [5, 9, 100, 101, 2000].map(|size| size * MIB);
    for (version, size_bytes) in (1..).zip(sizes) {
        disk.image.writer().unwrap().resize(size_bytes).unwrap();
        write(&disk, size_bytes / SECTOR - 1, version);
        if version == 3 {
            disk.flush();
        }
    }
    disk.close();
    let reader = TestDisk::open(store.clone(), false, Vec::new());
    for (version, size_bytes) in (1..).zip(sizes) {
        assert_holds(&reader, size_bytes / SECTOR - 1, version, "grown again");
    }
    assert_sound(store);
}

#[test]
fn an_invalid_size_is_refused_and_changes_nothing() {
    for disk_type in TYPES {
        let store = created(disk_type, 4 * MIB, 2 << 20);
        let before = store.sectors();
        let disk = TestDisk::open(store.clone(), true, Vec::new());
        for (size_bytes, told) in
            [(3 * MIB, "at least the present one"), (5 * MIB + 1, "a multiple of 512"), (1 << 45, "convert it to VHDX")]
        {
            let error = disk.image.writer().unwrap().resize(size_bytes).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
        disk.image.writer().unwrap().resize(4 * MIB).unwrap();
        disk.close();
        assert!(store.sectors() == before, "{disk_type}");
    }
    let disk = TestDisk::open(created(DiskType::Dynamic, 4 * MIB, 4096), true, Vec::new());
    let error = disk.image.writer().unwrap().resize(1 << 40).unwrap_err().to_string();
    assert!(error.contains("blocks are too small"), "{error}");
}

/// For creators whose disks have the size of the geometry, growth changes the geometry.
#[test]
fn growth_changes_the_geometry_too() {
    let store = created(DiskType::Dynamic, 4 * MIB, BLOCK);
    edit_footers(&store, |footer| footer.creator_app = *b"vpc ");
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    let size_bytes = 100 * MIB;
    disk.image.writer().unwrap().resize(size_bytes).unwrap();
    disk.close();
    assert_eq!(open(store, false).unwrap().info().size_bytes, size_bytes);
}

/// A program that shrinks a disk may leave entries beyond the new end, and data beyond the end in
/// the last block.
#[test]
fn stale_data_beyond_the_old_end_is_not_visible() {
    for disk_type in [DiskType::Dynamic, DiskType::Differencing] {
        let store = created(disk_type, 4 * MIB, BLOCK);
        let disk = TestDisk::open(store.clone(), true, Vec::new());
        disk.write(0, &vec![9; 4 * MIB as usize]);
        disk.close();
        let size_bytes = MIB + 512;
        edit_footers(&store, |footer| footer.current_size_bytes = size_bytes);
        let disk = TestDisk::open(store.clone(), true, Vec::new());
        disk.image.writer().unwrap().resize(3 * MIB).unwrap();
        let check = |disk: &TestDisk| {
            assert_eq!(disk.read(MIB, 512), [9; 512]);
            let after = disk.read(size_bytes, (3 * MIB - size_bytes) as usize);
            assert!(after.iter().all(|&byte| byte == 0), "{disk_type}: beyond the old end");
        };
        check(&disk);
        disk.close();
        check(&TestDisk::open(store, false, Vec::new()));
    }
}

#[test]
fn a_failed_growth_leaves_the_disk_unchanged() {
    for disk_type in TYPES {
        let store = created(disk_type, 4 * MIB, BLOCK);
        let disk = TestDisk::open(store.clone(), true, Vec::new());
        write(&disk, 5, 1);
        store.max_len.store(store.len_bytes().unwrap(), Ordering::Relaxed);
        let error = disk.image.writer().unwrap().resize(1 << 39).unwrap_err();
        assert_eq!(io::Error::from(error).kind(), io::ErrorKind::StorageFull, "{disk_type}");
        assert_eq!(disk.image.size_bytes(), 4 * MIB);
        store.max_len.store(u64::MAX, Ordering::Relaxed);
        disk.image.writer().unwrap().resize(1 << 39).unwrap();
        disk.close();
        let reader = TestDisk::open(store.clone(), false, Vec::new());
        assert_eq!(reader.image.info().size_bytes, 1 << 39);
        assert_holds(&reader, 5, 1, "after the second attempt");
        assert_sound(store);
    }
}

/// Cuts the power at every sync of a growth and tears unsynced writes. The syncs with the numbers
/// in `lost` do nothing. Returns the number of syncs.
fn cut_at_every_sync(disk_type: DiskType, size_bytes: u64, new_bytes: u64, lost: &[usize]) -> usize {
    let store = created(disk_type, size_bytes, BLOCK);
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    write(&disk, 1, 1);
    disk.close();
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    write(&disk, 300, 2);
    disk.flush();
    // Durable, with its slack, as after a session that was not closed.
    let store = Arc::new(SparseStore::with("disk.vhd", store.sectors()));
    drop(disk);
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    write(&disk, 700, 3);
    disk.flush();
    let (cuts, syncs) = cuts_during(&disk, &store, lost, || disk.image.writer().unwrap().resize(new_bytes).unwrap());
    let mut tear = Tear::default();
    for (index, cut) in cuts.iter().enumerate() {
        for odds in [0, 30, 50, 50, 50, 50, 50, 50, 70, 90, 100] {
            let what = format!("{disk_type} to {new_bytes}: sync {index}, {odds} % kept");
            let left = Arc::new(SparseStore::with("disk.vhd", tear.left(cut, odds)));
            assert_nothing_corrupt(&left, &what);
            let held = |disk: &TestDisk| {
                for (sector, version) in [(1, 1), (300, 2), (700, 3), (4, 0)] {
                    assert_holds(disk, sector, version, &what);
                }
            };
            let reader = TestDisk::open(left.clone(), false, Vec::new());
            let found_bytes = reader.image.info().size_bytes;
            assert!(found_bytes == size_bytes || found_bytes == new_bytes, "{what}: {found_bytes} bytes");
            assert!(index < syncs || found_bytes == new_bytes, "{what}: growth was complete");
            held(&reader);
            if found_bytes == new_bytes {
                assert_holds(&reader, new_bytes / SECTOR - 1, 0, &what);
                // The old footer of a fixed disk may still be there.
                if disk_type != DiskType::Fixed || index == syncs {
                    assert_holds(&reader, size_bytes / SECTOR, 0, &what);
                }
            }
            let disk = TestDisk::open(left.clone(), true, Vec::new());
            write(&disk, 6, 4);
            disk.image.writer().unwrap().resize(2 * new_bytes).unwrap();
            write(&disk, 2 * new_bytes / SECTOR - 1, 5);
            disk.close();
            let reader = TestDisk::open(left.clone(), false, Vec::new());
            held(&reader);
            assert_holds(&reader, 6, 4, &what);
            assert_holds(&reader, 2 * new_bytes / SECTOR - 1, 5, &what);
            assert_sound(left);
        }
    }
    syncs
}

/// The footer at the end may be missing; nothing may be corrupt.
pub(super) fn assert_nothing_corrupt(store: &Arc<SparseStore>, what: &str) {
    let report = check(store.clone()).unwrap_or_else(|error| panic!("{what}: {error}"));
    let wrong: Vec<_> = report.findings.iter().filter(|finding| finding.severity == Severity::Corrupt).collect();
    assert!(wrong.is_empty(), "{what}: {wrong:#?}");
}

#[test]
fn a_growth_survives_power_cuts() {
    for disk_type in TYPES {
        cut_at_every_sync(disk_type, 4 * MIB - 512, 6 * MIB, &[]);
        cut_at_every_sync(disk_type, 4 * MIB, 90 * MIB, &[]);
    }
}

/// The syncs of a growth that moves the table: the table, the header, the footer cleared, its copy,
/// the footer. The header and the clearing of the footer must be durable before the copy.
#[test]
fn breaking_a_sync_of_a_growth_is_detected() {
    assert_eq!(cut_at_every_sync(DiskType::Dynamic, 4 * MIB, 90 * MIB, &[]), 5);
    for (lost, what) in [(&[0][..], "the table"), (&[1, 2], "the header"), (&[2], "the clearing of the footer")] {
        let run = || cut_at_every_sync(DiskType::Dynamic, 4 * MIB, 90 * MIB, lost);
        assert!(catch_unwind(AssertUnwindSafe(run)).is_err(), "{what} is not durable, and no power cut detects it");
    }
    assert_eq!(cut_at_every_sync(DiskType::Fixed, 4 * MIB, 90 * MIB, &[]), 2);
    let run = || cut_at_every_sync(DiskType::Fixed, 4 * MIB, 90 * MIB, &[0]);
    assert!(
        catch_unwind(AssertUnwindSafe(run)).is_err(),
        "the old footer was cleared before the new one was durable, and no power cut detects it"
    );
}

/// A power cut that keeps the new length and loses the new footer.
#[test]
fn a_fixed_disk_whose_new_footer_was_lost_is_found_by_its_old_one() {
    let size_bytes = 128 << 10;
    let store = created(DiskType::Fixed, size_bytes, BLOCK);
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    write(&disk, 3, 1);
    disk.close();
    let whole = store.to_vec();
    let check = || super::super::examine(store.clone(), false).unwrap().report;
    for longer in [512, 1 << 20, (5 << 20) + 512] {
        store.set_len(whole.len() as u64 + longer).unwrap();
        let reader = TestDisk::open(store.clone(), false, Vec::new());
        assert_eq!(reader.image.size_bytes(), size_bytes);
        assert!(reader.image.info().remarks[0].contains("a growth was cut short"), "{:?}", reader.image.info().remarks);
        assert_holds(&reader, 3, 1, "the old size");
        assert_eq!((check().worst(), check().leaked_bytes), (Some(Severity::Leak), longer));
        if longer == 512 {
            let shared: Arc<dyn Store> = store.clone();
            let after = crate::repair_image(crate::Format::Vhd, &shared, false, &mut |_| true).unwrap().unwrap();
            assert!(after.findings.is_empty() && store.to_vec() == whole);
            continue;
        }
        let disk = TestDisk::open(store.clone(), true, Vec::new());
        if longer == 1 << 20 {
            disk.image.writer().unwrap().begin_writing().unwrap();
            assert!(store.to_vec() == whole, "the zeros are cut off before the first write");
        } else {
            disk.image.writer().unwrap().resize(1 << 20).unwrap();
            assert_eq!(store.len_bytes().unwrap(), (1 << 20) + 512);
            assert_eq!(footer_at(&store, 1 << 20).unwrap().current_size_bytes, 1 << 20);
        }
        disk.close();
        assert_sound(store.clone());
    }
    // What follows the footer is no longer zeros: that is no growth.
    store.set_len(2 << 20).unwrap();
    store.write_at(&whole[size_bytes as usize..], size_bytes).unwrap();
    store.write_at(&[1], (2 << 20) - 700).unwrap();
    assert!(open(store.clone(), false).is_err());
}
