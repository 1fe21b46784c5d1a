//! Changes of the link to the parent: where header and locators go, refusals, and power cuts at
//! every step. (`image/src/parent_links.rs` has the tests that VHDX shares.)

use super::{
    cuts::{Tear, cuts_during},
    grow::assert_nothing_corrupt,
    *,
};
use crate::{ImageError, vhd};
use diskwright_format::vhd::{LocatorEntry, LocatorKind};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::Ordering,
};

const BLOCK: u32 = 64 << 10;

fn link(name: &str, id: u128, modified_seconds: u32) -> ParentLink {
    ParentLink {
        relative_path: Some(format!(".\\{name}")),
        absolute_path: Some(format!("C:\\disks\\{name}")),
        name: Some(name.into()),
        linkage: Some(Uuid::from_u128(id).into()),
        modified_seconds: Some(modified_seconds),
        ..Default::default()
    }
}

fn long_link() -> ParentLink {
    let absolute_path = Some(format!(r"\\?\C:\{}base.vhd", r"Ordner ä\".repeat(700)));
    ParentLink { absolute_path, ..link("base.vhd", 0x5678, 810_000_000) }
}

/// The link of a file, without the place of its time stamp.
fn link_of(store: &dyn Store) -> ParentLink {
    ParentLink { modified_offset_bytes: None, ..vhd::parent_link(store).unwrap().unwrap() }
}

/// Both footers, which must be equal, and the file has no remarks.
#[track_caller]
fn header_offset(store: &Arc<SparseStore>) -> u64 {
    let tail = footer_at(store, store.len_bytes().unwrap() - 512).unwrap();
    assert_eq!(footer_at(store, 0).unwrap(), tail);
    assert_eq!(open(store.clone(), false).unwrap().info().remarks, [""; 0]);
    tail.data_offset
}

#[test]
fn an_identity_or_time_stamp_changes_one_sector() {
    let store = created(DiskType::Differencing, 4 * MIB, BLOCK);
    let old = link_of(&*store);
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    let before = store.sectors();
    for new in [
        ParentLink { modified_seconds: Some(5), ..old.clone() },
        ParentLink { linkage: Some(Uuid::from_u128(0x88).into()), modified_seconds: None, ..old.clone() },
        ParentLink { name: Some("other name.vhd".into()), ..old.clone() },
    ] {
        let syncs = store.syncs.load(Ordering::Relaxed);
        disk.image.writer().unwrap().set_parent_link(&new).unwrap();
        assert_eq!(store.syncs.load(Ordering::Relaxed), syncs + 1);
        let new = ParentLink { modified_seconds: new.modified_seconds.or(Some(0)), ..new };
        assert_eq!(link_of(&*store), new);
        let stored = ParentLink { modified_offset_bytes: Some(512 + 56), ..new };
        assert_eq!(disk.image.parent_link(), Some(stored));
        let mut after = store.sectors();
        after.map.insert(1, before.map[&1]);
        assert!(after == before, "only the first sector of the header");
    }
    disk.close();
    assert_sound(store);
}

#[test]
fn another_path_moves_the_header_to_and_fro() {
    let store = created(DiskType::Differencing, 4 * MIB, BLOCK);
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    disk.write(0, &[7; 512]);
    disk.close();
    let len_bytes = store.len_bytes().unwrap();
    let mut offsets = Vec::new();
    for round in 0..6u32 {
        let new = link(&format!("parent {round}.vhd"), 9 + u128::from(round), round);
        let disk = TestDisk::open(store.clone(), true, vec![3; 4 * MIB as usize]);
        disk.image.writer().unwrap().set_parent_link(&new).unwrap();
        assert_eq!(disk.image.linkage_id(), Some(Uuid::from_u128(99).into()), "the child's own identity");
        disk.close();
        offsets.push(header_offset(&store));
        assert_eq!(link_of(&*store), new);
        let reader = TestDisk::open(store.clone(), false, vec![3; 4 * MIB as usize]);
        assert_eq!((reader.read(0, 512), reader.read(512, 512)), (vec![7; 512], vec![3; 512]));
        assert_sound(store.clone());
        assert_eq!(store.len_bytes().unwrap(), len_bytes, "round {round}");
    }
    assert_eq!([offsets[1], offsets[3], offsets[5]], [512; 3]);
    assert!(offsets[0] > 512 && offsets[0] < header_table(&store), "before the table");
    assert_eq!([offsets[2], offsets[4]], [offsets[0]; 2]);
}

fn header_table(store: &SparseStore) -> u64 {
    let offset = footer_at(store, 0).unwrap().data_offset;
    let mut bytes = [0; HEADER_BYTES];
    store.read_at(&mut bytes, offset).unwrap();
    DynamicHeader::parse(&bytes, offset).unwrap().table_offset
}

/// A link that does not fit before the first block goes to the end of the file.
#[test]
fn long_paths_go_to_the_end_of_the_file() {
    for preallocate in [false, true] {
        let store = Arc::new(SparseStore::new("disk.vhd"));
        let made = CreateOptions { preallocate, ..options(DiskType::Differencing, 4 * MIB, BLOCK) };
        create(store.clone(), &made).unwrap();
        let disk = TestDisk::open(store.clone(), true, Vec::new());
        disk.write(0, &[7; 512]);
        disk.image.writer().unwrap().set_parent_link(&long_link()).unwrap();
        disk.write(MIB, &[8; 512]);
        disk.image.writer().unwrap().resize(9 * MIB).unwrap();
        disk.write(8 * MIB, &[9; 512]);
        disk.close();
        assert!(header_offset(&store) > u64::from(BLOCK));
        assert_eq!(link_of(&*store), long_link());
        let report = assert_sound(store.clone());
        let is_reserved = report.findings.iter().any(|finding| finding.message.contains("are reserved"));
        assert_eq!(is_reserved, preallocate);
        let disk = TestDisk::open(store.clone(), true, Vec::new());
        for block in 0..9 * MIB / u64::from(BLOCK) {
            disk.write(block * u64::from(BLOCK) + 512, &[5; 512]);
        }
        disk.image.writer().unwrap().set_parent_link(&link("p.vhd", 1, 2)).unwrap();
        disk.close();
        assert_eq!((header_offset(&store), link_of(&*store)), (512, link("p.vhd", 1, 2)));
        let reader = TestDisk::open(store.clone(), false, Vec::new());
        for (at, byte) in [(0, 7), (512, 5), (MIB, 8), (8 * MIB, 9), (8 * MIB + 512, 5)] {
            assert_eq!(reader.read(at, 512), [byte; 512]);
        }
        assert_sound(store);
    }
}

/// Locators for other platforms lead to the old parent, so they go.
#[test]
fn locators_of_other_programs_are_removed() {
    let store = created(DiskType::Differencing, 4 * MIB, BLOCK);
    let old = link_of(&*store);
    let mut theirs = header(&store);
    let url = b"file:///vms/base.vhd";
    store.write_at(url, 3072).unwrap();
    theirs.locators[3] = LocatorEntry {
        code: LocatorKind::FileUrl.code(),
        data_space: 1,
        data_length_bytes: url.len() as u32,
        data_offset: 3072,
    };
    store.write_at(&theirs.to_bytes(), 512).unwrap();
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    // The paths are the same.
    let new = ParentLink { modified_seconds: Some(9), ..old };
    disk.image.writer().unwrap().set_parent_link(&new).unwrap();
    disk.close();
    assert!(header_offset(&store) > 512);
    let mut after = [0; HEADER_BYTES];
    store.read_at(&mut after, header_offset(&store)).unwrap();
    let after = DynamicHeader::parse(&after, 0).unwrap();
    let kinds: Vec<_> = after.locators.iter().filter(|entry| entry.is_used()).map(LocatorEntry::kind).collect();
    assert_eq!(kinds, [Some(LocatorKind::WindowsAbsolute), Some(LocatorKind::WindowsRelative)]);
    let mut kept = [0; 20];
    store.read_at(&mut kept, 3072).unwrap();
    assert_eq!(&kept, url, "the old link was whole until the new one was");
    assert_eq!(link_of(&*store), new);
}

#[test]
fn a_link_that_cannot_be_stored_is_refused_and_changes_nothing() {
    let store = created(DiskType::Differencing, 4 * MIB, BLOCK);
    let before = store.sectors();
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    let none = ParentLink { relative_path: None, absolute_path: Some(String::new()), ..link("x", 1, 1) };
    let long = ParentLink { absolute_path: Some("x".repeat(32_769)), ..link("x", 1, 1) };
    for (new, told) in [(none, "no path to the parent"), (link("a\0", 1, 1), "NUL"), (long, "longer than 32768")] {
        let error = disk.image.writer().unwrap().set_parent_link(&new).unwrap_err();
        assert!(matches!(error, ImageError::BadParentLink { .. }), "{error:?}");
        assert!(error.to_string().starts_with("disk.vhd: cannot change the link to the parent: "), "{error}");
        assert!(error.to_string().contains(told), "{error}");
    }
    disk.close();
    assert!(store.sectors() == before);
    for disk_type in [DiskType::Dynamic, DiskType::Fixed] {
        let disk = TestDisk::open(created(disk_type, 4 * MIB, BLOCK), true, Vec::new());
        let error = disk.image.writer().unwrap().set_parent_link(&link("x", 1, 1)).unwrap_err();
        assert!(error.to_string().contains("has no parent"), "{error}");
    }
}

#[test]
fn a_full_file_system_leaves_the_old_link() {
    let store = created(DiskType::Differencing, 256 * MIB, BLOCK);
    let old = link_of(&*store);
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    disk.write(0, &[7; 512]);
    store.max_len.store(store.len_bytes().unwrap(), Ordering::Relaxed);
    let mut block = 1;
    // Until the slack is used up.
    while disk.image.writer().unwrap().reserve_waiting(block).is_ok() {
        block += 1;
    }
    // Longer than a block.
    let long = Some("x".repeat(30_000));
    let long = ParentLink { absolute_path: long.clone(), relative_path: long, ..link("x", 1, 2) };
    let error = disk.image.writer().unwrap().set_parent_link(&long).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull, "{error}");
    assert_eq!(disk.image.parent_link().map(|link| link.absolute_path), Some(old.absolute_path.clone()));
    assert_eq!(link_of(&*store), old);
    disk.image.writer().unwrap().set_parent_link(&link("p.vhd", 1, 2)).unwrap();
    disk.close();
    assert_eq!(link_of(&*store), link("p.vhd", 1, 2));
    assert_sound(store);
}

/// Cuts the power at every sync of a change of the link and tears unsynced writes. The syncs with
/// the numbers in `lost` do nothing. Returns the number of syncs.
fn cut_at_every_sync(new: &ParentLink, lost: &[usize]) -> usize {
    let store = created(DiskType::Differencing, 4 * MIB, BLOCK);
    let old = link_of(&*store);
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    disk.write(0, &tagged(0, 1));
    disk.flush();
    // Durable, with its slack, as after a session that was not closed.
    let store = Arc::new(SparseStore::with("disk.vhd", store.sectors()));
    drop(disk);
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    disk.write(700 * SECTOR, &tagged(700, 2));
    disk.flush();
    let (cuts, syncs) = cuts_during(&disk, &store, lost, || disk.image.writer().unwrap().set_parent_link(new).unwrap());
    let mut tear = Tear::default();
    for (index, cut) in cuts.iter().enumerate() {
        for odds in [0, 10, 30, 50, 50, 50, 50, 50, 50, 50, 50, 70, 90, 90, 100] {
            let what = format!("sync {index}, {odds} % kept");
            let left = Arc::new(SparseStore::with("disk.vhd", tear.left(cut, odds)));
            assert_nothing_corrupt(&left, &what);
            // Whoever reads only one of two valid footers reads the same disk.
            let footers = [0, left.len_bytes().unwrap() - 512].map(|at| footer_at(&left, at));
            assert!(footers.iter().any(Result::is_ok), "{what}");
            if let [Ok(copy), Ok(tail)] = &footers {
                assert_eq!(copy, tail, "{what}");
            }
            let found = link_of(&*left);
            assert!(found == old || found == *new, "{what}: {found:?}");
            assert!(index < syncs || found == *new, "{what}: the change was complete");
            let held = |disk: &TestDisk| {
                for (sector, version) in [(0, 1), (700, 2), (4, 0)] {
                    assert!(disk.read(sector * SECTOR, 512) == tagged(sector, version), "{what}: sector {sector}");
                }
            };
            held(&TestDisk::open(left.clone(), false, Vec::new()));
            let disk = TestDisk::open(left.clone(), true, Vec::new());
            disk.write(6 * SECTOR, &tagged(6, 4));
            disk.image.writer().unwrap().set_parent_link(&link("next.vhd", 77, 5)).unwrap();
            disk.write(8191 * SECTOR, &tagged(8191, 5));
            disk.close();
            let reader = TestDisk::open(left.clone(), false, Vec::new());
            held(&reader);
            assert!(reader.read(8191 * SECTOR, 512) == tagged(8191, 5), "{what}");
            assert_eq!(link_of(&*left), link("next.vhd", 77, 5), "{what}");
            assert_sound(left);
        }
    }
    syncs
}

#[test]
fn a_new_link_survives_power_cuts() {
    let old = link_of(&*created(DiskType::Differencing, 4 * MIB, BLOCK));
    assert_eq!(cut_at_every_sync(&ParentLink { modified_seconds: Some(1), ..old }, &[]), 1);
    assert_eq!(cut_at_every_sync(&link("other.vhd", 0x321, 1), &[]), 4);
    assert_eq!(cut_at_every_sync(&long_link(), &[]), 4);
}

/// The syncs of a link that moves: header and locators, the footer cleared, its copy, the footer.
#[test]
fn breaking_a_sync_of_a_new_link_is_detected() {
    for (lost, what) in
        [(&[0, 1][..], "the new header"), (&[1], "the clearing of the footer"), (&[2], "the copy of the footer")]
    {
        let run = || cut_at_every_sync(&link("other.vhd", 0x321, 1), lost);
        assert!(catch_unwind(AssertUnwindSafe(run)).is_err(), "{what} is not durable, and no power cut detects it");
    }
}

/// Foreign files: the header of QEMU and Windows is followed directly by the table.
#[test]
fn a_file_without_room_before_its_table_gets_the_link_at_its_end() {
    let store = Arc::new(SparseStore::new("theirs.vhd"));
    let ours = created(DiskType::Differencing, 4 * MIB, BLOCK);
    let (url, table_offset) = (b"file://./base.vhd", 1536);
    let mut theirs = DynamicHeader { table_offset, locators: Default::default(), ..header(&ours) };
    theirs.locators[0] = LocatorEntry {
        code: LocatorKind::FileUrl.code(),
        data_space: 512,
        data_length_bytes: url.len() as u32,
        data_offset: 2048,
    };
    let footer = Footer { creator_app: *b"tap\0", creator_version: 1, ..footer_at(&ours, 0).unwrap() }.to_bytes();
    store.write_at(&footer, 0).unwrap();
    store.write_at(&theirs.to_bytes(), 512).unwrap();
    store.write_at(&[0xff; 512], 1536).unwrap();
    store.write_at(url, 2048).unwrap();
    // Block 0: its bitmap, and data of which only the first sector is there.
    store.write_at(&[0x80], 2560).unwrap();
    store.write_at(&[7; 512], 3072).unwrap();
    store.write_at(&5u32.to_be_bytes(), 1536).unwrap();
    store.write_at(&footer, 3072 + u64::from(BLOCK)).unwrap();
    assert_eq!(link_of(&*store).relative_path.as_deref(), Some("./base.vhd"));
    for round in 0..4 {
        let disk = TestDisk::open(store.clone(), true, Vec::new());
        disk.image.writer().unwrap().set_parent_link(&link("p.vhd", 1, round)).unwrap();
        disk.image.writer().unwrap().set_parent_link(&link("q.vhd", 2, round)).unwrap();
        disk.write(MIB + u64::from(round) * 65536, &[round as u8; 512]);
        disk.close();
        assert_eq!(link_of(&*store), link("q.vhd", 2, round));
        let reader = TestDisk::open(store.clone(), false, Vec::new());
        assert_eq!((reader.read(0, 512), reader.read(512, 512)), (vec![7; 512], vec![0; 512]));
        assert_eq!(reader.read(MIB, 512), [0; 512]);
        header_offset(&store);
        assert_sound(store.clone());
    }
}

/// A damaged block may lie anywhere, so no free space is known. A change of one sector needs none.
#[test]
fn a_damaged_disk_gets_only_what_needs_no_space() {
    let store = created(DiskType::Differencing, 4 * MIB, BLOCK);
    store.write_at(&(1u32 << 30).to_be_bytes(), header(&store).table_offset).unwrap();
    let old = link_of(&*store);
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    let error = disk.image.writer().unwrap().set_parent_link(&link("p.vhd", 1, 2)).unwrap_err();
    assert!(matches!(error, ImageError::Corrupt { .. }), "{error:?}");
    assert_eq!(link_of(&*store), old);
    let new = ParentLink { linkage: Some(Uuid::from_u128(0x88).into()), ..old };
    disk.image.writer().unwrap().set_parent_link(&new).unwrap();
    assert_eq!(link_of(&*store), new);
}
