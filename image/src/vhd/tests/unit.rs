//! One property each: footers, growth, space, failures, links, findings.

use super::{sparse::Sectors, *};
use crate::ImageError;
use diskwright_format::vhd::{
    CREATOR_APP, DiskKind, DynamicHeader, FOOTER_BYTES, Footer, HEADER_BYTES, LocatorEntry, LocatorKind,
};
use std::sync::atomic::Ordering;

const MIB: u64 = 1 << 20;

fn disk(disk_type: DiskType) -> (Arc<SparseStore>, TestDisk) {
    let store = created(disk_type, 4 * MIB, 65536);
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    (store, disk)
}

fn footer_at(store: &SparseStore, offset: u64) -> Result<Footer, diskwright_format::vhd::VhdError> {
    let mut bytes = [0; FOOTER_BYTES];
    store.read_at(&mut bytes, offset).unwrap();
    Footer::parse(&bytes, offset)
}

fn edit_footers(store: &SparseStore, change: impl Fn(&mut Footer)) {
    let len = store.len_bytes().unwrap();
    for at in [0, len - 512] {
        let mut footer = footer_at(store, at).unwrap();
        change(&mut footer);
        store.write_at(&footer.to_bytes(), at).unwrap();
    }
}

fn header(store: &SparseStore) -> DynamicHeader {
    let mut bytes = [0; HEADER_BYTES];
    store.read_at(&mut bytes, 512).unwrap();
    DynamicHeader::parse(&bytes, 512).unwrap()
}

fn messages(store: &Arc<SparseStore>, severity: Severity) -> Vec<String> {
    let report = check(store.clone()).unwrap();
    report.findings.into_iter().filter(|finding| finding.severity == severity).map(|f| f.message).collect()
}

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
fn new_files_say_what_they_are() {
    let (store, disk) = disk(DiskType::Differencing);
    let info = disk.image.info();
    assert_eq!((info.size_bytes, info.block_bytes, info.has_blocks), (4 * MIB, 65536, true));
    assert_eq!(info.payload_alignment_bytes, 4096);
    assert_eq!(info.parent, options(DiskType::Differencing, 0, 0).parent);
    assert_eq!(info.linkage_id, Some(Uuid::from_u128(99)));
    assert!(info.remarks.is_empty(), "{:?}", info.remarks);
    assert_eq!(header(&store).table_offset, 4096);
    assert_eq!(footer_at(&store, 0).unwrap().creator_app, CREATOR_APP);
    let fixed = created(DiskType::Fixed, 4 * MIB, 65536);
    let image = open(fixed.clone(), false).unwrap();
    assert_eq!(fixed.len_bytes().unwrap(), 4 * MIB + 512);
    assert_eq!((image.info().disk_type, image.info().has_blocks), (DiskType::Fixed, false));
    assert_eq!(image.info().payload_alignment_bytes, 1 << 20);
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
    assert_eq!(store.len_bytes().unwrap(), old_end + 4096 + 65536 + 512);
    assert_eq!(check(store.clone()).unwrap().findings.len(), 0);
    let piece = TestDisk::open(store, false, Vec::new()).state(0);
    assert_eq!(piece, BlockState::Data { offset_bytes: old_end + 4096 });
}

#[test]
fn space_that_was_reserved_for_all_blocks_is_kept() {
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
fn a_discarded_block_is_used_again_only_after_recycle() {
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
    assert_eq!(disk.read(2 * 65536 + 512, 65024), vec![0; 65024], "the old bytes do not show");
    disk.close();
    assert_eq!(check(store).unwrap().findings.len(), 0);
}

#[test]
fn a_hole_of_an_earlier_session_is_used_again() {
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
fn a_full_disk_leaves_the_image_as_it_was() {
    let (store, disk) = disk(DiskType::Dynamic);
    let before = store.sectors();
    store.max_len.store(before.len, Ordering::Relaxed);
    let error = disk.image.writer().unwrap().reserve(3).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    assert_eq!((disk.state(3), store.sectors()), (BlockState::Absent, before.clone()));
    // Room for the block, but not for the footer behind it.
    store.max_len.store(before.len - 512 + 65536 + 4096, Ordering::Relaxed);
    assert!(disk.image.writer().unwrap().reserve(3).is_err());
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
fn a_flush_syncs_no_more_than_it_must() {
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
fn what_is_committed_in_the_middle_of_a_flush_waits_for_the_next() {
    for disk_type in [DiskType::Dynamic, DiskType::Differencing] {
        let (store, disk) = disk(disk_type);
        let disk = Arc::new(disk);
        disk.write(0, &[1; 512]);
        store.records_cuts.store(true, Ordering::Relaxed);
        let other = Arc::clone(&disk);
        store.in_next_sync.set(move || {
            // Not durable when the second pass writes the BAT: in neither sector may it be shown.
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
        // A dynamic block is shown whole; its second sector was overwritten in place.
        let second = if disk_type == DiskType::Dynamic { 2 } else { 7 };
        assert_eq!(shown(store.last_sync()), (1, second, true));
        disk.flush();
        assert_eq!(shown(store.last_sync()), (1, 2, false));
    }
}

#[test]
fn flushes_and_writes_of_many_threads_go_together() {
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
fn either_footer_is_enough() {
    for (disk_type, broken, may_open) in [
        (DiskType::Dynamic, "tail", true),
        (DiskType::Dynamic, "copy", true),
        (DiskType::Dynamic, "both", false),
        (DiskType::Fixed, "tail", false),
    ] {
        let (store, disk) = disk(disk_type);
        disk.write(512, &[9; 512]);
        disk.close();
        let len = store.len_bytes().unwrap();
        if broken != "copy" {
            store.write_at(b"X", len - 512 + 100).unwrap();
        }
        if broken != "tail" {
            store.write_at(b"X", 100).unwrap();
        }
        let opened = open(store.clone(), true);
        assert_eq!(opened.is_ok(), may_open, "{disk_type} without {broken}");
        let Ok(image) = opened else {
            assert!(matches!(opened, Err(ImageError::Corrupt { .. })), "{opened:?}");
            assert_eq!(messages(&store, Severity::Corrupt).len(), 1);
            continue;
        };
        assert_eq!(image.info().remarks.len(), 1);
        let disk = TestDisk { image, parent: Vec::new(), writes_init: true };
        assert_eq!(disk.read(512, 512), [9; 512]);
        // The next write that lets the file grow mends both.
        disk.write(MIB, &[8; 512]);
        assert!(footer_at(&store, 0).is_ok());
        disk.close();
        assert_eq!(messages(&store, Severity::Corrupt).len(), 0);
        assert!(open(store, false).unwrap().info().remarks.is_empty());
    }
}

#[test]
fn a_guests_footer_at_the_tail_is_not_believed() {
    let (store, disk) = disk(DiskType::Dynamic);
    disk.write(0, &[1; 512]);
    disk.close();
    // A cut that left a payload block at the end, in which the guest keeps a VHD of its own.
    let guests = footer_at(&created(DiskType::Fixed, MIB, 4096), MIB).unwrap();
    let len = store.len_bytes().unwrap();
    store.write_at(&Footer { unique_id: Uuid::from_u128(5), ..guests }.to_bytes(), len - 512).unwrap();
    let image = open(store.clone(), false).unwrap();
    assert_eq!((image.info().disk_type, image.info().size_bytes), (DiskType::Dynamic, 4 * MIB));
    assert!(check(store).unwrap().worst() <= Some(Severity::Leak));

    // And a fixed disk whose first sectors are the beginning of a dynamic VHD is a fixed disk.
    let store = created(DiskType::Fixed, 4 * MIB, 4096);
    let dynamic = created(DiskType::Dynamic, MIB, 4096);
    store.write_at(&dynamic.to_vec(), 0).unwrap();
    assert_eq!(open(store, false).unwrap().info().disk_type, DiskType::Fixed);
}

#[test]
fn old_footers_and_cut_files() {
    let store = created(DiskType::Fixed, MIB, 4096);
    store.set_len(MIB + 511).unwrap();
    let image = open(store.clone(), false).unwrap();
    assert_eq!(image.info().size_bytes, MIB);
    assert!(image.info().remarks.iter().any(|remark| remark.contains("511")));
    let store = created(DiskType::Fixed, MIB, 4096);
    let footer = footer_at(&store, MIB).unwrap().to_bytes();
    store.set_len(MIB / 2).unwrap();
    store.write_at(&footer, MIB / 2).unwrap();
    assert!(matches!(open(store, false), Err(ImageError::Corrupt { .. })));
    for len in [0, 1, 510, 511, 512, 4096] {
        let store = Arc::new(SparseStore::with("x.vhd", Sectors { len, ..Default::default() }));
        assert!(matches!(open(store.clone(), false), Err(ImageError::NotAnImage { .. })), "{len}");
        assert!(matches!(check(store), Err(ImageError::NotAnImage { .. })));
    }
}

#[test]
fn what_check_finds() {
    let (store, disk) = disk(DiskType::Dynamic);
    disk.write(0, &[1; 4 * 65536]);
    disk.close();
    let table = header(&store).table_offset;
    let entry = |block: u64| {
        let mut bytes = [0; 4];
        store.read_at(&mut bytes, table + block * 4).unwrap();
        u32::from_be_bytes(bytes)
    };
    let set = |block: u64, value: u32| store.write_at(&value.to_be_bytes(), table + block * 4).unwrap();
    let entries = [entry(0), entry(1), entry(2)];
    for (value, what) in [
        (0, "tables"),
        (8, "tables"),
        (1 << 30, "inside the file"),
        (u32::MAX - 1, "inside the file"),
        (entries[0] + 8, "overlap"),
        (entries[0], "overlap"),
    ] {
        set(1, value);
        let found = messages(&store, Severity::Corrupt);
        assert!(found.iter().any(|message| message.contains(what)), "{value}: {found:?}");
        let image = open(store.clone(), true).unwrap();
        if what != "overlap" {
            assert!(image.block_states(1, &mut [BlockState::Zero]).is_err());
        }
        assert!(image.writer().unwrap().reserve(9).is_err(), "nothing is added to a file whose blocks are misplaced");
    }
    set(1, entries[1]);
    assert_eq!(check(store.clone()).unwrap().findings.len(), 0);
    set(1, u32::MAX);
    let report = check(store.clone()).unwrap();
    assert_eq!((report.worst(), report.allocated_blocks), (Some(Severity::Leak), 3));
    assert!(report.leaked_bytes >= 65536 && report.leaked_bytes < 65536 + 8192);
    set(1, entries[1]);
    store.write_at(&[0x7f], u64::from(entries[2]) * 512).unwrap();
    assert!(messages(&store, Severity::Note)[0].contains("all ones"));
}

#[test]
fn payload_that_others_placed_is_used_where_it_is() {
    // Their first block directly behind the table: payload at a multiple of 512 only.
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
    assert_eq!(disk.image.info().payload_alignment_bytes, 1024);
    disk.write(1024, &[4; 512]);
    disk.write(65536, &[5; 65536]);
    disk.write(3 * 65536, &[6; 65536]);
    let all = disk.read(0, 4 * 65536);
    assert!(matches!(disk.state(1), BlockState::Data { offset_bytes } if offset_bytes % 4096 == 0));
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
fn xenserver_marks_the_sectors_of_dynamic_disks() {
    let (store, disk) = disk(DiskType::Dynamic);
    disk.write(0, &[1; 65536]);
    let BlockState::Data { offset_bytes } = disk.state(0) else { panic!("not written") };
    disk.close();
    edit_footers(&store, |footer| footer.creator_app = *b"tap\0");
    store.write_at(&[0x40], offset_bytes - 512).unwrap();
    store.write_at(&[0; 511], offset_bytes - 511).unwrap();
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    let mut expected = vec![0; 65536];
    expected[512..1024].fill(1);
    assert_eq!(disk.read(0, 65536), expected);
    let writer = disk.image.writer().unwrap();
    assert!(writer.can_store_zero());
    let place = writer.reserve(0).unwrap().offset_bytes;
    disk.store().write_at(&[2; 512], place + 1024).unwrap();
    writer.commit(0, Commit::Sectors { first: 2, count: 1 }).unwrap();
    expected[1024..1536].fill(2);
    disk.close();
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    assert_eq!(disk.read(0, 65536), expected);
    disk.discard(0);
    disk.close();
    assert_sound(store);
}

#[test]
fn other_locators_are_understood() {
    let (store, disk) = disk(DiskType::Differencing);
    drop(disk);
    let mut header = header(&store);
    let url = b"file:///vms/base.vhd";
    store.write_at(url, 2048).unwrap();
    let entry = |code: LocatorKind, data_offset, len| LocatorEntry {
        code: code.code(),
        data_space: 1,
        data_length_bytes: len,
        data_offset,
    };
    header.locators = Default::default();
    header.locators[0] = entry(LocatorKind::FileUrl, 2048, url.len() as u32);
    header.locators[3] = entry(LocatorKind::WindowsRelative, u64::MAX, 20);
    header.locators[4] = entry(LocatorKind::WindowsRelative, 2048, u32::MAX);
    header.locators[5] = LocatorEntry { code: u32::from_be_bytes(*b"Mac "), ..Default::default() };
    store.write_at(&header.to_bytes(), 512).unwrap();
    let image = open(store.clone(), false).unwrap();
    let parent = image.info().parent.clone().unwrap();
    assert_eq!((parent.absolute_path.as_deref(), parent.relative_path), (Some("/vms/base.vhd"), None));
    assert_eq!(image.info().remarks.len(), 2, "{:?}", image.info().remarks);
    assert_eq!(messages(&store, Severity::Corrupt).len(), 2);
    assert_eq!(messages(&store, Severity::Note).len(), 1);
}

#[test]
fn long_paths_move_the_table() {
    let store = Arc::new(SparseStore::new("disk.vhd"));
    let mut options = options(DiskType::Differencing, 4 * MIB, 65536);
    let parent = options.parent.as_mut().unwrap();
    parent.absolute_path = Some(format!("\\\\?\\C:\\{}\\p.vhd", "ordner\\".repeat(700)));
    parent.name = None;
    let expected = parent.clone();
    create(store.clone(), &options).unwrap();
    let image = open(store.clone(), true).unwrap();
    assert_eq!(image.info().parent.as_ref().unwrap().absolute_path, expected.absolute_path);
    assert_eq!(image.info().parent.as_ref().unwrap().name.as_deref(), Some("parent.vhd"));
    assert!(header(&store).table_offset > 8192);
    assert_eq!(check(store).unwrap().findings.len(), 0);
}

#[test]
fn options_that_the_format_cannot_hold() {
    let good = || options(DiskType::Dynamic, 4 * MIB, 65536);
    let mut bad = vec![
        CreateOptions { size_bytes: 0, ..good() },
        CreateOptions { size_bytes: 1000, ..good() },
        CreateOptions { size_bytes: (2040 << 30) + 512, ..good() },
        CreateOptions { size_bytes: (16 << 40) + 512, disk_type: DiskType::Fixed, ..good() },
        CreateOptions { logical_sector_bytes: 4096, ..good() },
        CreateOptions { block_bytes: Some(3 << 20), ..good() },
        CreateOptions { block_bytes: Some(2048), ..good() },
        CreateOptions { block_bytes: Some(1 << 31), ..good() },
        CreateOptions { block_bytes: Some(4096), size_bytes: 2040 << 30, ..good() },
        CreateOptions { disk_type: DiskType::Differencing, ..good() },
        CreateOptions { parent: Some(ParentLink::default()), ..good() },
        options(DiskType::Differencing, 4 * MIB, 65536),
        options(DiskType::Differencing, 4 * MIB, 65536),
    ];
    let count = bad.len();
    bad[count - 1].parent = Some(ParentLink::default());
    bad[count - 2].parent.as_mut().unwrap().relative_path = Some("x".repeat(40_000));
    for options in bad {
        let store = Arc::new(SparseStore::new("disk.vhd"));
        let error = create(store.clone(), &options).unwrap_err();
        assert!(matches!(error, ImageError::BadOptions { .. }), "{options:?}");
        assert_eq!(store.len_bytes().unwrap(), 0);
    }
    let store = Arc::new(SparseStore::new("disk.vhd"));
    let largest = CreateOptions { size_bytes: 2040 << 30, block_bytes: None, ..good() };
    create(store.clone(), &largest).unwrap();
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    disk.write((2040 << 30) - 512, &[7; 512]);
    disk.close();
    assert_eq!(TestDisk::open(store, false, Vec::new()).read((2040 << 30) - 512, 512), [7; 512]);
}

#[test]
fn misuse_is_an_error() {
    let (_, disk) = disk(DiskType::Dynamic);
    let writer = disk.image.writer().unwrap();
    assert_eq!(writer.reserve(64).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    assert_eq!(writer.commit(0, Commit::Whole).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    assert!(writer.commit(u64::MAX, Commit::Whole).is_err());
    assert!(disk.image.sector_bitmap(64).is_err());
    let mut states = [BlockState::Zero; 3];
    disk.image.block_states(u64::MAX - 1, &mut states).unwrap();
    assert_eq!(states, [BlockState::Absent; 3]);
}

#[test]
fn a_reservation_that_comes_to_nothing_leaves_no_trace() {
    let (store, disk) = disk(DiskType::Dynamic);
    let len = store.len_bytes().unwrap();
    let writer = disk.image.writer().unwrap();
    writer.reserve(5).unwrap();
    writer.reserve(6).unwrap();
    writer.commit(6, Commit::Zero).unwrap();
    disk.close();
    assert_eq!(store.len_bytes().unwrap(), len);
    assert_eq!(check(store).unwrap().findings.len(), 0);
}

#[test]
fn kinds_of_disks_are_told_apart() {
    let (store, _) = disk(DiskType::Dynamic);
    edit_footers(&store, |footer| footer.kind = DiskKind::Differencing);
    let image = open(store.clone(), false).unwrap();
    assert_eq!(image.info().disk_type, DiskType::Differencing);
    assert!(image.info().parent.is_some(), "a disk of type 4 has a parent, even one that nobody can find");
    assert_eq!(messages(&store, Severity::Note).len(), 2);
}
