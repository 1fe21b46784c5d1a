//! Chains: parents are found, identified and folded, and invalid chains are refused.

use diskwright_disk::{ChainScope, CreateRequest, Disk, DiskError, OpenOptions, ParentPolicy, create};
use diskwright_image::DiskType;
use diskwright_store::{BlockDevice, Blocking, EngineKind, Extent, ExtentKind};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};
use tempfile::{TempDir, tempdir};

const MIB: u64 = 1 << 20;

fn base(path: &Path, size_bytes: u64, block_bytes: u32) {
    let request =
        CreateRequest { size_bytes: Some(size_bytes), block_bytes: Some(block_bytes), ..CreateRequest::default() };
    create(path, &request).unwrap();
}

fn child(path: &Path, parent: &Path, size_bytes: Option<u64>, block_bytes: Option<u32>) {
    let request =
        CreateRequest { parent: Some(parent.to_owned()), size_bytes, block_bytes, ..CreateRequest::default() };
    create(path, &request).unwrap();
}

fn writable() -> OpenOptions {
    OpenOptions { writable: true, ..OpenOptions::default() }
}

fn write(path: &Path, offset: u64, data: &[u8]) {
    let disk = Disk::open(path, &writable()).unwrap();
    let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
    io.write(offset, data, false).unwrap();
    drop(io);
    disk.close().unwrap();
}

fn read(disk: &Arc<Disk>, offset: u64, len: usize) -> Vec<u8> {
    let mut data = vec![0xEE; len];
    Blocking::open(&**disk, EngineKind::Auto).unwrap().read(offset, &mut data).unwrap();
    data
}

fn pair(extension: &str) -> (TempDir, PathBuf, PathBuf) {
    let dir = tempdir().unwrap();
    let parent = dir.path().join(format!("parent.{extension}"));
    let top = dir.path().join(format!("child.{extension}"));
    base(&parent, 8 * MIB, 1 << 20);
    write(&parent, 0, &[7; 4096]);
    child(&top, &parent, None, None);
    (dir, parent, top)
}

#[test]
fn blocks_of_different_sizes_fold_into_one_map() {
    for extension in ["vhdx", "vhd"] {
        let dir = tempdir().unwrap();
        let names: Vec<PathBuf> = (0..4).map(|level| dir.path().join(format!("d{level}.{extension}"))).collect();
        let blocks = [4 << 20, 1 << 20, 2 << 20, 8 << 20];
        base(&names[0], 16 * MIB, blocks[0]);
        let mut model = vec![0_u8; 16 << 20];
        for level in 0..4_usize {
            if level > 0 {
                child(&names[level], &names[level - 1], None, Some(blocks[level]));
            }
            for piece in 0..6_usize {
                let offset = (piece * 2_700_288 + level * 333_312) / 512 * 512;
                let len = (700_000 + level * 100_000) / 512 * 512;
                let end = (offset + len).min(model.len());
                let data = vec![(level * 16 + piece + 1) as u8; end - offset];
                write(&names[level], offset as u64, &data);
                model[offset..end].copy_from_slice(&data);
            }
        }
        let disk = Disk::open(&names[3], &OpenOptions::default()).unwrap();
        assert_eq!(disk.layers().len(), 4);
        assert!(read(&disk, 0, model.len()) == model, "{extension}");
    }
}

#[test]
fn a_childs_size_may_differ_from_its_parents() {
    for extension in ["vhdx", "vhd"] {
        let dir = tempdir().unwrap();
        let (parent, longer, shorter) = (
            dir.path().join(format!("p.{extension}")),
            dir.path().join(format!("l.{extension}")),
            dir.path().join(format!("s.{extension}")),
        );
        // The parent ends within a block of the child.
        base(&parent, 3 * MIB + 4096, 1 << 20);
        write(&parent, 0, &vec![9; (3 * MIB + 4096) as usize]);
        child(&longer, &parent, Some(6 * MIB), Some(2 << 20));
        child(&shorter, &parent, Some(MIB), None);
        let disk = Disk::open(&longer, &OpenOptions::default()).unwrap();
        let all = read(&disk, 0, 6 << 20);
        let (data, zeros) = all.split_at((3 * MIB + 4096) as usize);
        assert!(data.iter().all(|&byte| byte == 9) && zeros.iter().all(|&byte| byte == 0), "{extension}");
        let disk = Disk::open(&shorter, &OpenOptions::default()).unwrap();
        assert_eq!(read(&disk, 0, MIB as usize), vec![9; MIB as usize]);
    }
}

#[test]
fn zeros_and_discards_in_a_child_hide_the_parent() {
    for extension in ["vhdx", "vhd"] {
        let (_dir, _parent, top) = pair(extension);
        let disk = Disk::open(&top, &writable()).unwrap();
        assert_eq!(read(&disk, 0, 4096), [7; 4096]);
        let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
        io.discard(0, 2 * MIB).unwrap();
        drop(io);
        assert_eq!(read(&disk, 0, 4096), [0; 4096], "{extension}");
        disk.close().unwrap();
        drop(disk);
        let disk = Disk::open(&top, &OpenOptions::default()).unwrap();
        assert_eq!(read(&disk, 0, 4096), [0; 4096], "{extension}");
    }
}

#[test]
fn extents_name_the_layer_that_decides() {
    let (_dir, _parent, top) = pair("vhdx");
    write(&top, 4 * MIB, &[5; 4096]);
    let disk = Disk::open(&top, &OpenOptions::default()).unwrap();
    let mut extents: Vec<Extent> = Vec::new();
    disk.extents(0, 8 * MIB, &mut extents).unwrap();
    let at = |offset: u64| {
        extents
            .iter()
            .find(|extent| (extent.offset_bytes..extent.offset_bytes + extent.len_bytes).contains(&offset))
            .unwrap()
    };
    assert_eq!((at(0).kind, at(0).depth), (ExtentKind::Data, 1));
    assert_eq!((at(4 * MIB).kind, at(4 * MIB).depth), (ExtentKind::Data, 0));
    assert_eq!(at(4 * MIB).len_bytes, 4096);
    assert_eq!(at(6 * MIB).kind, ExtentKind::Unallocated);
}

#[test]
fn a_parent_that_was_written_to_is_refused() {
    let (_dir, parent, top) = pair("vhdx");
    let disk = Disk::open(&parent, &OpenOptions { allow_parent_write: true, ..writable() }).unwrap();
    Blocking::open(&*disk, EngineKind::Auto).unwrap().write(0, &[1; 512], false).unwrap();
    disk.close().unwrap();
    drop(disk);
    let error = Disk::open(&top, &OpenOptions::default()).unwrap_err();
    assert!(matches!(error, DiskError::ParentChanged { .. }), "{error}");
    assert!(error.to_string().contains("parent.vhdx"), "{error}");
}

#[test]
fn a_vhd_parent_that_was_written_to_warns_readers_and_stops_writers() {
    let (_dir, parent, top) = pair("vhd");
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(3600);
    std::fs::File::open(&parent).unwrap().set_modified(later).unwrap();
    let disk = Disk::open(&top, &OpenOptions::default()).unwrap();
    assert_eq!(disk.warnings().len(), 1);
    drop(disk);
    let error = Disk::open(&top, &writable()).unwrap_err();
    assert!(error.to_string().contains("`ParentPolicy::ignore_timestamp`"), "{error}");
    let policy = ParentPolicy { ignore_timestamp: true, ..ParentPolicy::default() };
    Disk::open(&top, &OpenOptions { parents: policy, ..writable() }).unwrap();
}

#[test]
fn an_image_with_children_is_not_written() {
    for extension in ["vhdx", "vhd"] {
        let (_dir, parent, top) = pair(extension);
        let error = Disk::open(&parent, &writable()).unwrap_err();
        assert!(
            matches!(&error, DiskError::HasChildren { child, .. } if child.ends_with(top.file_name().unwrap())),
            "{error}"
        );
        Disk::open(&parent, &OpenOptions::default()).unwrap();
        Disk::open(&parent, &OpenOptions { allow_parent_write: true, ..writable() }).unwrap();
    }
}

#[test]
fn a_missing_parent_names_the_places() {
    let (_dir, parent, top) = pair("vhdx");
    std::fs::remove_file(&parent).unwrap();
    let error = Disk::open(&top, &OpenOptions::default()).unwrap_err();
    assert!(matches!(error, DiskError::ParentMissing { .. }) && error.to_string().contains("parent.vhdx"), "{error}");
    let disk = Disk::open(&top, &OpenOptions { scope: ChainScope::Top, ..OpenOptions::default() }).unwrap();
    assert_eq!(disk.layers().len(), 1);
}

/// Offset of a block's BAT entry in a VHDX that this program created, with the BAT at 3 MiB.
fn entry_bytes(block: u64) -> usize {
    (3 * MIB + 8 * block) as usize
}

/// State of a block's entry.
fn entry_state(path: &Path, block: u64) -> u64 {
    let bytes = std::fs::read(path).unwrap();
    u64::from_le_bytes(bytes[entry_bytes(block)..][..8].try_into().unwrap()) & 7
}

#[test]
fn zeros_are_recorded_for_other_programs_too() {
    const ZERO: u64 = 2;
    const UNMAPPED: u64 = 3;
    let (_dir, parent, top) = pair("vhdx");
    let change = |path: &Path, change: &dyn Fn(&mut Blocking)| {
        let disk = Disk::open(path, &OpenOptions { allow_parent_write: true, ..writable() }).unwrap();
        change(&mut Blocking::open(&*disk, EngineKind::Auto).unwrap());
        disk.close().unwrap();
    };
    // A read of an UNMAPPED block may return its previous data. For a child's block that is the
    // parent's data, so a discard records ZERO.
    change(&top, &|io| io.discard(0, MIB).unwrap());
    assert_eq!(entry_state(&top, 0), ZERO);
    // Another program has unmapped a block of a child: a discard must still record ZERO.
    for discard_bytes in [MIB, 4096] {
        let mut bytes = std::fs::read(&top).unwrap();
        bytes[entry_bytes(0)..][..8].copy_from_slice(&UNMAPPED.to_le_bytes());
        std::fs::write(&top, bytes).unwrap();
        change(&top, &|io| io.discard(0, discard_bytes).unwrap());
        assert_eq!(entry_state(&top, 0), ZERO, "{discard_bytes}");
    }
    change(&parent, &|io| io.discard(0, MIB).unwrap());
    assert_eq!(entry_state(&parent, 0), UNMAPPED);
    // Written zeros must be recorded as ZERO, not UNMAPPED.
    change(&parent, &|io| io.write_zeroes(0, MIB).unwrap());
    assert_eq!(entry_state(&parent, 0), ZERO);
    // Zeros over a part of an UNMAPPED block record the whole block as ZERO.
    change(&parent, &|io| io.discard(0, MIB).unwrap());
    change(&parent, &|io| io.write_zeroes(8192, 4096).unwrap());
    assert_eq!(entry_state(&parent, 0), ZERO);
}

#[test]
fn a_vhdx_and_its_child_have_one_disk_id() {
    for (extension, same) in [("vhdx", true), ("vhd", false)] {
        let (_dir, _parent, top) = pair(extension);
        let disk = Disk::open(&top, &OpenOptions::default()).unwrap();
        let ids: Vec<_> = disk.layers().iter().map(|layer| layer.image.info().disk_id.unwrap()).collect();
        assert_eq!(ids[0] == ids[1], same, "{extension}: {ids:?}");
    }
}

#[test]
fn a_broken_chain_opens_read_only_as_far_as_possible() {
    let (_dir, parent, middle) = pair("vhdx");
    let top = middle.with_file_name("top.vhdx");
    child(&top, &middle, None, None);
    let found = OpenOptions { scope: ChainScope::Available, ..OpenOptions::default() };
    let whole = Disk::open(&top, &found).unwrap();
    assert!(whole.layers().len() == 3 && whole.broken_link().is_none());
    drop(whole);
    std::fs::remove_file(&parent).unwrap();
    let disk = Disk::open(&top, &found).unwrap();
    assert_eq!(disk.layers().iter().map(|layer| &layer.path).collect::<Vec<_>>(), [&top, &middle]);
    assert!(matches!(disk.broken_link(), Some(DiskError::ParentMissing { child, .. }) if *child == middle));
    let error = Disk::open(&top, &OpenOptions { writable: true, ..found }).unwrap_err();
    assert!(error.to_string().contains("cannot be written without its parents"), "{error}");
}

#[test]
fn a_parent_outside_is_opened_only_when_allowed() {
    let outer = tempdir().unwrap();
    let inner = outer.path().join("inner");
    std::fs::create_dir(&inner).unwrap();
    let (parent, top) = (outer.path().join("p.vhdx"), inner.join("c.vhdx"));
    base(&parent, 4 * MIB, 1 << 20);
    child(&top, &parent, None, None);
    let error = Disk::open(&top, &OpenOptions::default()).unwrap_err();
    assert!(matches!(error, DiskError::ParentOutside { .. }), "{error}");
    for policy in [
        ParentPolicy { allow_any: true, ..ParentPolicy::default() },
        ParentPolicy { allowed_dirs: vec![outer.path().to_owned()], ..ParentPolicy::default() },
    ] {
        Disk::open(&top, &OpenOptions { parents: policy, ..OpenOptions::default() }).unwrap();
    }
}

#[test]
fn a_moved_chain_is_found_by_its_relative_path() {
    for extension in ["vhdx", "vhd"] {
        let (dir, _parent, top) = pair(extension);
        let moved = tempdir().unwrap();
        for name in ["parent", "child"] {
            let name = format!("{name}.{extension}");
            // Renamed, not copied: a copy has another time stamp, which causes a warning.
            std::fs::rename(dir.path().join(&name), moved.path().join(&name)).unwrap();
        }
        let disk = Disk::open(moved.path().join(top.file_name().unwrap()), &OpenOptions::default()).unwrap();
        assert_eq!(read(&disk, 0, 4096), [7; 4096]);
    }
}

#[test]
fn a_loop_is_refused() {
    let (_dir, parent, top) = pair("vhdx");
    // The child is copied over its parent: it names itself, and its identity is wrong too.
    std::fs::remove_file(&parent).unwrap();
    std::fs::hard_link(&top, &parent).unwrap();
    let error = Disk::open(&top, &OpenOptions::default()).unwrap_err();
    assert!(matches!(&error, DiskError::BadChain { what, .. } if what.contains("loop")), "{error}");
}

#[test]
fn formats_do_not_mix() {
    let dir = tempdir().unwrap();
    let parent = dir.path().join("p.vhd");
    base(&parent, 4 * MIB, 1 << 20);
    let request = CreateRequest { parent: Some(parent), ..CreateRequest::default() };
    let error = create(dir.path().join("c.vhdx"), &request).unwrap_err().to_string();
    assert!(error.contains("vhd"), "{error}");
    assert!(!dir.path().join("c.vhdx").exists());
}

#[test]
fn a_chain_of_1024_opens_and_reads_and_one_of_1025_does_not() {
    let dir = tempdir().unwrap();
    let name = |level: usize| dir.path().join(format!("d{level}.vhdx"));
    base(&name(0), 64 * MIB, 1 << 20);
    write(&name(0), 3 * MIB, &[3; 4096]);
    for level in 1..1024 {
        child(&name(level), &name(level - 1), None, None);
        if level % 200 == 0 {
            write(&name(level), level as u64 * 4096, &[(level / 200) as u8; 4096]);
        }
    }
    let disk = Disk::open(name(1023), &OpenOptions::default()).unwrap();
    assert_eq!(disk.layers().len(), 1024);
    assert_eq!(read(&disk, 3 * MIB, 4096), [3; 4096]);
    for level in [200_u64, 400, 1000] {
        assert_eq!(read(&disk, level * 4096, 4096), [(level / 200) as u8; 4096]);
    }
    assert_eq!(read(&disk, 60 * MIB, 4096), [0; 4096]);
    drop(disk);
    child(&name(1024), &name(1023), None, None);
    let error = Disk::open(name(1024), &OpenOptions::default()).unwrap_err();
    assert!(error.to_string().contains("1024"), "{error}");
}

#[test]
fn two_writers_exclude_each_other_and_readers_share() {
    let (_dir, _parent, top) = pair("vhdx");
    let first = Disk::open(&top, &writable()).unwrap();
    for options in [writable(), OpenOptions::default()] {
        let error = Disk::open(&top, &options).unwrap_err();
        assert!(matches!(error, DiskError::InUse { .. }), "{error}");
    }
    drop(first);
    let _one = Disk::open(&top, &OpenOptions::default()).unwrap();
    let _two = Disk::open(&top, &OpenOptions::default()).unwrap();
    assert!(matches!(Disk::open(&top, &writable()), Err(DiskError::InUse { .. })));
}

#[test]
fn a_writable_open_without_writes_changes_nothing() {
    for (extension, disk_type) in
        [("vhdx", DiskType::Dynamic), ("vhdx", DiskType::Fixed), ("vhd", DiskType::Dynamic), ("vhd", DiskType::Fixed)]
    {
        let dir = tempdir().unwrap();
        let path = dir.path().join(format!("d.{extension}"));
        let request =
            CreateRequest { size_bytes: Some(4 * MIB), disk_type: Some(disk_type), ..CreateRequest::default() };
        create(&path, &request).unwrap();
        let before = std::fs::read(&path).unwrap();
        let disk = Disk::open(&path, &writable()).unwrap();
        Blocking::open(&*disk, EngineKind::Auto).unwrap().flush().unwrap();
        disk.close().unwrap();
        drop(disk);
        assert!(std::fs::read(&path).unwrap() == before, "{extension} {disk_type}");
    }
}

#[test]
fn discarded_blocks_return_their_space_to_the_file_system() {
    use std::os::unix::fs::MetadataExt;
    for extension in ["vhdx", "vhd"] {
        let dir = tempdir().unwrap();
        let path = dir.path().join(format!("d.{extension}"));
        base(&path, 64 * MIB, 1 << 20);
        write(&path, 0, &vec![7; 48 << 20]);
        let full = std::fs::metadata(&path).unwrap();
        let disk = Disk::open(&path, &writable()).unwrap();
        let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
        io.discard(8 * MIB, 32 * MIB).unwrap();
        drop(io);
        disk.close().unwrap();
        drop(disk);
        let thin = std::fs::metadata(&path).unwrap();
        assert_eq!(thin.len(), full.len(), "later blocks stay in place");
        assert!(thin.blocks() * 512 <= full.blocks() * 512 - 31 * MIB, "{extension}: {} blocks left", thin.blocks());
    }
}
