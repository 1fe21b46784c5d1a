//! What is refused, what is left alone, and what does not change.

use crate::lab::{Kind, Lab, MIB, compacted, have, read_all, writable};
use diskwright_disk::{CompactOptions, CreateRequest, Disk, DiskError, OpenOptions, compact, create};
use diskwright_image::{DiskType, Format, Severity};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use std::{fs, path::Path};

fn try_compact(path: &Path) -> Result<diskwright_disk::Compacted, DiskError> {
    compact(path, &CompactOptions::default(), &mut |_, _| true)
}

/// An ext4 in 64 MiB of garbage.
fn ext4(lab: &Lab) -> Option<Vec<u8>> {
    if !have("an ext4", &["mke2fs"]) {
        return None;
    }
    fs::write(lab.path("disk.raw"), vec![0xa5; 64 * MIB as usize]).unwrap();
    lab.run("mke2fs -q -F -t ext4 -E nodiscard disk.raw");
    Some(fs::read(lab.path("disk.raw")).unwrap())
}

fn linkage(path: &Path) -> Option<diskwright_image::LinkageId> {
    Disk::open(path, &OpenOptions::default()).unwrap().layers()[0].image.info().linkage_id
}

#[test]
fn fixed_disks_and_raw_disks_are_refused() {
    let lab = Lab::new();
    for name in ["disk.vhd", "disk.vhdx", "disk.raw"] {
        let path = lab.path(name);
        let fixed = Some(DiskType::Fixed);
        create(&path, &CreateRequest { size_bytes: Some(4 * MIB), disk_type: fixed, ..CreateRequest::default() })
            .unwrap();
        let before = fs::read(&path).unwrap();
        let error = try_compact(&path).unwrap_err().to_string();
        assert!(error.contains("fixed disk") && error.contains("convert it to a dynamic disk"), "{error}");
        assert!(fs::read(&path).unwrap() == before, "{name} has changed");
    }
}

#[test]
fn a_disk_in_use_is_refused() {
    let lab = Lab::new();
    let path = Kind::Dynamic(Format::Vhdx).make(&lab, &vec![0; 4 * MIB as usize]);
    let disk = Disk::open(&path, &writable()).unwrap();
    for estimate in [false, true] {
        let options = CompactOptions { estimate, ..CompactOptions::default() };
        let error = compact(&path, &options, &mut |_, _| true).unwrap_err();
        assert!(matches!(error, DiskError::InUse { .. }), "{error}");
    }
    drop(disk);
    let _reader = Disk::open(&path, &OpenOptions::default()).unwrap();
    assert!(matches!(try_compact(&path).unwrap_err(), DiskError::InUse { .. }));
    let estimate = CompactOptions { estimate: true, ..CompactOptions::default() };
    assert_eq!(compact(&path, &estimate, &mut |_, _| true).unwrap().zero_bytes, 4 * MIB);
}

#[test]
fn a_parent_gives_back_only_zeros_and_keeps_its_children() {
    let lab = Lab::new();
    let Some(mut raw) = ext4(&lab) else { return };
    raw[40 << 20..44 << 20].fill(0);
    let path = Kind::Dynamic(Format::Vhdx).make(&lab, &raw);
    let child = lab.path("child.vhdx");
    create(&child, &CreateRequest { parent: Some(path.clone()), ..CreateRequest::default() }).unwrap();
    let before = linkage(&path);
    let done = compacted(&path);
    assert_eq!((done.free_bytes, done.child.as_deref()), (0, Some(fs::canonicalize(&child).unwrap().as_path())));
    assert!(done.zero_bytes >= 4 * MIB && done.volumes.is_empty(), "{done:?}");
    assert_eq!(linkage(&path), before);
    assert!(read_all(&child) == raw, "the child has changed");
    // Without the child, the free blocks go, and the identity with them.
    fs::remove_file(child).unwrap();
    assert!(compacted(&path).free_bytes > 40 * MIB);
    assert_ne!(linkage(&path), before, "a child elsewhere must not be opened any more");
}

#[test]
fn a_vhd_with_children_is_refused() {
    let lab = Lab::new();
    let path = Kind::Dynamic(Format::Vhd).make(&lab, &vec![0; 4 * MIB as usize]);
    let child = lab.path("child.vhd");
    create(&child, &CreateRequest { parent: Some(path.clone()), ..CreateRequest::default() }).unwrap();
    let before = fs::read(&path).unwrap();
    let error = try_compact(&path).unwrap_err().to_string();
    assert!(error.contains("child.vhd is its child") && error.contains("last changed"), "{error}");
    assert!(fs::read(&path).unwrap() == before);
}

#[test]
fn estimates_and_dry_runs_change_nothing_and_are_right() {
    let lab = Lab::new();
    let Some(raw) = ext4(&lab) else { return };
    for kind in [Kind::Dynamic(Format::Vhdx), Kind::Dynamic(Format::Vhd), Kind::OverNothing(Format::Vhd)] {
        let path = kind.make(&lab, &raw);
        let before = fs::read(&path).unwrap();
        let estimate = CompactOptions { estimate: true, ..CompactOptions::default() };
        let dry_run = CompactOptions { dry_run: true, ..CompactOptions::default() };
        let foretold = [estimate, dry_run].map(|options| {
            let told = compact(&path, &options, &mut |_, _| true).unwrap();
            assert!(fs::read(&path).unwrap() == before, "{options:?} has changed the file");
            (told.new_file_bytes, told.free_bytes, told.zero_bytes, told.moved_bytes)
        });
        let done = compacted(&path);
        let reached = (done.new_file_bytes, done.free_bytes, done.zero_bytes, done.moved_bytes);
        assert_eq!(foretold, [reached, reached], "{kind:?}");
        assert_eq!(done.volumes[0].given_back_bytes, done.free_bytes + done.zero_bytes);
    }
}

#[test]
fn a_log_is_replayed_first() {
    let lab = Lab::new();
    let path = Kind::Dynamic(Format::Vhdx).make(&lab, &vec![0; 16 * MIB as usize]);
    let disk = Disk::open(&path, &writable()).unwrap();
    let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
    io.discard(0, 8 * MIB).unwrap();
    io.write(9 * MIB, &vec![7; 4096], true).unwrap();
    let killed = lab.path("killed.vhdx");
    fs::copy(&path, &killed).unwrap();
    drop(io);
    let done = compacted(&killed);
    assert_eq!(done.zero_bytes, 6 * MIB, "{done:?}");
    let bytes = read_all(&killed);
    assert!(bytes[9 << 20..][..4096] == [7; 4096] && bytes.iter().filter(|&&byte| byte != 0).count() == 4096);
}

#[test]
fn a_file_system_in_doubt_is_left_alone() {
    let lab = Lab::new();
    let Some(sound) = ext4(&lab) else { return };
    // The superblock's count of free blocks, the checksum of a group, and the state of the journal.
    for (at, what) in [(1024 + 12, "count"), (2048 + 30, "group"), (1024 + 96, "features")] {
        let mut raw = sound.clone();
        raw[at] ^= 4;
        let path = Kind::Dynamic(Format::Vhdx).make(&lab, &raw);
        let done = compacted(&path);
        assert_eq!(done.free_bytes, 0, "{what}");
        assert!(done.volumes[0].volume.free_bytes.is_err(), "{what}: {:?}", done.volumes);
        assert!(read_all(&path) == raw, "{what}: what is left alone has changed");
    }
}

#[test]
fn a_stop_leaves_a_whole_disk_and_the_next_run_finishes() {
    let lab = Lab::new();
    let Some(raw) = ext4(&lab) else { return };
    for kind in [Kind::Dynamic(Format::Vhdx), Kind::OverNothing(Format::Vhd)] {
        for most in [0, 1, 3, 5, 8, 20] {
            let path = kind.make(&lab, &raw);
            let mut calls = 0;
            let stopped = compact(&path, &CompactOptions::default(), &mut |_, _| {
                calls += 1;
                calls <= most
            });
            // The last call comes when all is done.
            assert!(matches!(stopped, Err(DiskError::Stopped)) || (most > 0 && stopped.is_ok()), "{stopped:?}");
            let used = read_all(&path);
            let done = compacted(&path);
            let finished = read_all(&path);
            assert!(done.new_file_bytes < 24 * MIB, "{kind:?}, {most}: {done:?}");
            assert!((0..used.len()).step_by(512).all(|at| finished[at] == raw[at] || finished[at] == 0), "{kind:?}");
            fs::write(lab.path("back.raw"), &finished).unwrap();
            lab.run("e2fsck -fn back.raw");
        }
    }
}

#[test]
fn space_that_was_reserved_is_given_up() {
    let lab = Lab::new();
    for name in ["disk.vhd", "disk.vhdx"] {
        let path = lab.path(name);
        let request = CreateRequest {
            size_bytes: Some(64 * MIB),
            disk_type: Some(DiskType::Dynamic),
            preallocate: true,
            ..CreateRequest::default()
        };
        create(&path, &request).unwrap();
        let disk = Disk::open(&path, &writable()).unwrap();
        let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
        io.write(30 * MIB, &[7; 4096], false).unwrap();
        assert_eq!(disk.geometry().size_bytes, 64 * MIB);
        drop(io);
        disk.close().unwrap();
        drop(disk);
        assert!(fs::metadata(&path).unwrap().len() > 64 * MIB);
        assert!(compacted(&path).new_file_bytes < 9 * MIB, "{name}");
    }
}

/// Its blocks have no pad before their bitmap, so they are moved as they are.
#[test]
fn a_vhd_of_another_program_is_compacted() {
    if !have("a_vhd_of_another_program_is_compacted", &["qemu-img"]) {
        return;
    }
    let lab = Lab::new();
    let mut raw: Vec<u8> = (0..40 * MIB / 8).flat_map(|at| (at | 1 << 60).to_le_bytes()).collect();
    fs::write(lab.path("disk.raw"), &raw).unwrap();
    lab.run("qemu-img convert -f raw -O vpc -o subformat=dynamic,force_size=on disk.raw disk.vhd");
    let path = lab.path("disk.vhd");
    let disk = Disk::open(&path, &writable()).unwrap();
    let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
    for at in [0, 6, 8, 20].map(|mib| mib * MIB) {
        io.write(at, &vec![0; 2 * MIB as usize], false).unwrap();
        raw[at as usize..][..2 << 20].fill(0);
    }
    drop(io);
    disk.close().unwrap();
    drop(disk);
    let before = fs::metadata(&path).unwrap().len();
    let done = try_compact(&path).unwrap();
    assert_eq!((done.zero_bytes, done.moved_bytes), (8 * MIB, 8 * MIB), "{done:?}");
    // Each block with its bitmap of a sector.
    assert_eq!(done.new_file_bytes, before - 4 * (2 * MIB + 512));
    assert!(read_all(&path) == raw);
    lab.run("qemu-img convert -f vpc -O raw disk.vhd theirs.raw");
    assert!(fs::read(lab.path("theirs.raw")).unwrap()[..raw.len()] == raw);
    let (_, report) = diskwright_disk::check_image(&path, &OpenOptions::default()).unwrap();
    assert!(report.worst() < Some(Severity::Leak), "{:?}", report.findings);
}
