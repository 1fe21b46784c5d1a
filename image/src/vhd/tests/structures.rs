//! Footers, header, locators and options, and the findings of check.

use super::{sparse::Sectors, *};
use crate::ImageError;
use diskwright_format::vhd::{CREATOR_APP, DiskKind, LocatorEntry, LocatorKind};

#[test]
fn new_files_have_the_requested_properties() {
    let (store, disk) = disk(DiskType::Differencing);
    let info = disk.image.info();
    assert_eq!((info.size_bytes, info.block_bytes, info.has_blocks), (4 * MIB, 65536, true));
    assert_eq!(info.payload_alignment_bytes, 4096);
    let stored = options(DiskType::Differencing, 0, 0).parent.unwrap();
    assert_eq!(info.parent, Some(ParentLink { modified_offset_bytes: Some(512 + 56), ..stored }));
    assert_eq!(info.linkage_id, Some(Uuid::from_u128(99).into()));
    assert!(info.remarks.is_empty(), "{:?}", info.remarks);
    assert_eq!(header(&store).table_offset, 8192, "with room for a second header");
    assert_eq!(footer_at(&store, 0).unwrap().creator_app, CREATOR_APP);
    let fixed = created(DiskType::Fixed, 4 * MIB, 65536);
    let image = open(fixed.clone(), false).unwrap();
    assert_eq!(fixed.len_bytes().unwrap(), 4 * MIB + 512);
    assert_eq!((image.info().disk_type, image.info().has_blocks), (DiskType::Fixed, false));
    assert_eq!(image.info().payload_alignment_bytes, 1 << 20);
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
        // The next write that makes the file grow repairs both.
        disk.write(MIB, &[8; 512]);
        assert!(footer_at(&store, 0).is_ok());
        disk.close();
        assert_eq!(messages(&store, Severity::Corrupt).len(), 0);
        assert!(open(store, false).unwrap().info().remarks.is_empty());
    }
}

#[test]
fn a_guest_footer_at_the_end_is_not_used() {
    let (store, disk) = disk(DiskType::Dynamic);
    disk.write(0, &[1; 512]);
    disk.close();
    // A power cut left a payload block at the end, in which the guest stores a VHD of its own.
    let guests = footer_at(&created(DiskType::Fixed, MIB, 4096), MIB).unwrap();
    let len = store.len_bytes().unwrap();
    store.write_at(&Footer { unique_id: Uuid::from_u128(5), ..guests }.to_bytes(), len - 512).unwrap();
    let image = open(store.clone(), false).unwrap();
    assert_eq!((image.info().disk_type, image.info().size_bytes), (DiskType::Dynamic, 4 * MIB));
    assert!(check(store).unwrap().worst() <= Some(Severity::Leak));

    // A fixed disk whose guest stores the start of a dynamic VHD in its first sectors.
    let store = created(DiskType::Fixed, 4 * MIB, 4096);
    let dynamic = created(DiskType::Dynamic, MIB, 4096);
    store.write_at(&dynamic.to_vec(), 0).unwrap();
    assert_eq!(open(store, false).unwrap().info().disk_type, DiskType::Fixed);
}

#[test]
fn old_footers_and_truncated_files() {
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
            let mut state = [BlockState::Zero];
            image.block_states(1, &mut state).unwrap();
            assert_eq!(state[0], BlockState::Damaged);
        }
        assert!(
            image.writer().unwrap().reserve_waiting(9).is_err(),
            "no block is allocated in a file whose blocks are misplaced"
        );
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
fn locators_in_code_pages_and_file_urls_are_read() {
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
fn invalid_options_are_refused() {
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
fn kinds_of_disks_are_told_apart() {
    let (store, _) = disk(DiskType::Dynamic);
    edit_footers(&store, |footer| footer.kind = DiskKind::Differencing);
    let image = open(store.clone(), false).unwrap();
    assert_eq!(image.info().disk_type, DiskType::Differencing);
    assert!(image.info().parent.is_some(), "a disk of type 4 has a parent, even if no locator is usable");
    assert_eq!(messages(&store, Severity::Note).len(), 2);
}

#[test]
fn a_missing_footer_is_restored_by_a_write_that_allocates_nothing() {
    let (store, disk) = disk(DiskType::Dynamic);
    disk.write(0, &[7; 512]);
    disk.close();
    let len = store.len_bytes().unwrap();
    store.set_len(len - 512).unwrap();
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    disk.write(0, &[8; 512]);
    disk.close();
    assert_eq!(store.len_bytes().unwrap(), len);
    assert!(footer_at(&store, len - 512).is_ok());
    assert_eq!(TestDisk::open(store, false, Vec::new()).read(0, 512), [8; 512]);
}

#[test]
fn footers_with_different_sizes_are_reported() {
    let (store, disk) = disk(DiskType::Dynamic);
    disk.write(0, &[7; 512]);
    disk.close();
    let mut copy = footer_at(&store, 0).unwrap();
    copy.current_size_bytes = 2 * MIB;
    store.write_at(&copy.to_bytes(), 0).unwrap();
    let found = messages(&store, Severity::Corrupt);
    assert!(found.len() == 1 && found[0].contains("4194304") && found[0].contains("2097152"), "{found:?}");
    let image = open(store.clone(), false).unwrap();
    assert_eq!(image.info().size_bytes, 4 * MIB, "the footer at the end is used");
    let remarks = &image.info().remarks;
    assert!(remarks.iter().any(|remark| remark.contains("4194304") && remark.contains("2097152")), "{remarks:?}");
    // A damaged footer at the end is not used.
    let len = store.len_bytes().unwrap();
    store.write_at(b"X", len - 100).unwrap();
    let image = open(store, false).unwrap();
    assert_eq!((image.info().size_bytes, image.info().remarks.len()), (2 * MIB, 2), "{:?}", image.info().remarks);
}

#[test]
fn footers_with_different_types_are_reported() {
    let (store, disk) = disk(DiskType::Differencing);
    disk.write(0, &[7; 512]);
    disk.close();
    let tail = store.len_bytes().unwrap() - 512;
    let footer = Footer { kind: DiskKind::Dynamic, ..footer_at(&store, 0).unwrap() };
    store.write_at(&footer.to_bytes(), tail).unwrap();
    let found = messages(&store, Severity::Corrupt);
    assert!(found.len() == 1 && found[0].contains("dynamic") && found[0].contains("differencing"), "{found:?}");
    assert_eq!(open(store, false).unwrap().info().disk_type, DiskType::Differencing, "never zeros for a parent's data");
}

#[test]
fn a_dynamic_disk_whose_header_names_a_parent_is_not_written() {
    let named = |change: &dyn Fn(&mut DynamicHeader)| {
        let (store, disk) = disk(DiskType::Differencing);
        disk.write(0, &[7; 512]);
        disk.close();
        edit_footers(&store, |footer| footer.kind = DiskKind::Dynamic);
        let mut header = header(&store);
        change(&mut header);
        store.write_at(&header.to_bytes(), 512).unwrap();
        store
    };
    let forget = |header: &mut DynamicHeader| {
        header.parent_name = String::new();
        header.parent_id = Uuid::nil();
        header.locators = Default::default();
    };
    type Change<'a> = &'a dyn Fn(&mut DynamicHeader);
    let cases: [(Change<'_>, &str); 3] = [
        (&|_| {}, "parent.vhd"),
        (
            &|header| {
                forget(header);
                header.parent_id = Uuid::from_u128(7);
            },
            "unique id",
        ),
        (
            &|header| {
                let locators = header.locators;
                forget(header);
                header.locators = locators;
            },
            "2 parent locators",
        ),
    ];
    for (change, word) in cases {
        let store = named(change);
        let found = messages(&store, Severity::Corrupt);
        assert!(found.iter().any(|message| message.contains(word)), "{found:?}");
        let remarks = open(store.clone(), false).unwrap().info().remarks.clone();
        assert!(remarks.iter().any(|remark| remark.contains(word)), "{remarks:?}");
        let before = store.sectors();
        let refused = open(store.clone(), true).unwrap_err();
        assert!(matches!(refused, ImageError::Corrupt { .. }) && refused.to_string().contains(word), "{refused}");
        assert_eq!(store.sectors(), before);
    }
    let store = named(&forget);
    assert!(messages(&store, Severity::Corrupt).is_empty() && open(store, true).is_ok());
}
