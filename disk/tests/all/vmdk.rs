//! VMDKs in several files: which of the files that they name are opened; children above parents;
//! marks of programs that use an image.

use crate::common::{read_all, write};
use diskwright_disk::{
    AbsorbOptions, CompactOptions, ConvertOptions, CreateRequest, Disk, DiskError, KeptName, MergeOptions, NewSize,
    OpenOptions, ParentPolicy, ReconnectOptions, ResizeOptions, SnapshotOptions, check, compact, convert, create,
    merge, reconnect, remove_snapshot, resize, snapshot,
};
use diskwright_image::Format;
use diskwright_store::{Blocking, EngineKind};
use std::{fs, path::Path, process::Command};
use tempfile::TempDir;

const CHILD: &str = "parentCID=ffffffff";

fn descriptor(extents: &str, cid: &str) -> String {
    format!(
        "# Disk DescriptorFile\nversion=1\nCID={cid}\n{CHILD}\ncreateType=\"custom\"\n{extents}\nddb.adapterType = \"ide\"\n"
    )
}

/// A disk of 3 MiB: flat from sector 8 of a file, zeros, flat from the start of another file.
fn custom(dir: &Path) -> std::path::PathBuf {
    let mut first = vec![9; 4096];
    first.extend(vec![1; 1 << 20]);
    fs::write(dir.join("a.bin"), first).unwrap();
    fs::write(dir.join("b.bin"), vec![3; 1 << 20]).unwrap();
    let path = dir.join("disk.vmdk");
    let extents = "RW 2048 FLAT \"a.bin\" 8\nRW 2048 ZERO\nRDONLY 2048 VMFS \"b.bin\"";
    fs::write(&path, descriptor(extents, "12345678")).unwrap();
    path
}

fn open(path: &Path) -> Result<(), DiskError> {
    Disk::open(path, &OpenOptions::default()).map(drop)
}

#[test]
fn extents_of_all_kinds_follow_each_other() {
    let dir = TempDir::new().unwrap();
    let path = custom(dir.path());
    let bytes = read_all(&path);
    assert_eq!(bytes.len(), 3 << 20);
    for (index, expected) in [1, 0, 3].into_iter().enumerate() {
        assert!(bytes[index << 20..(index + 1) << 20].iter().all(|&byte| byte == expected), "extent {index}");
    }
    assert!(check(&path, &OpenOptions::default()).unwrap().is_sound());
    let writable = OpenOptions { writable: true, ..OpenOptions::default() };
    let error = Disk::open(&path, &writable).unwrap_err().to_string();
    assert!(error.contains("writing to a VMDK with an extent that is not writable is not supported"), "{error}");
}

#[test]
fn a_file_outside_of_the_folder_is_opened_only_with_permission() {
    let dir = TempDir::new().unwrap();
    let inside = dir.path().join("inside");
    fs::create_dir(&inside).unwrap();
    let path = custom(&inside);
    let secret = dir.path().join("secret");
    fs::rename(inside.join("b.bin"), &secret).unwrap();
    for name in ["../secret", "..\\secret", secret.to_str().unwrap()] {
        let text = descriptor(&format!("RW 2048 FLAT \"{name}\" 0"), "12345678");
        fs::write(&path, text).unwrap();
        let error = open(&path).unwrap_err();
        assert!(matches!(error, DiskError::FileOutside { .. }), "{name}: {error}");
        let parents = ParentPolicy { allowed_dirs: vec![dir.path().to_owned()], ..ParentPolicy::default() };
        Disk::open(&path, &OpenOptions { parents, ..OpenOptions::default() }).unwrap();
        let found = check(&path, &OpenOptions::default()).unwrap();
        assert!(!found.is_sound() && found.report.findings[0].message.contains("flat extent"), "{found:?}");
    }
    // A link inside the folder that leads out of it.
    std::os::unix::fs::symlink(&secret, inside.join("b.bin")).unwrap();
    custom_text(&path, "RW 2048 FLAT \"b.bin\" 0");
    assert!(matches!(open(&path).unwrap_err(), DiskError::FileOutside { .. }));
}

fn custom_text(path: &Path, extents: &str) {
    fs::write(path, descriptor(extents, "12345678")).unwrap();
}

#[test]
fn files_that_are_missing_short_or_wrong_are_named() {
    let dir = TempDir::new().unwrap();
    let path = custom(dir.path());
    for (extents, told) in [
        ("RW 2048 FLAT \"gone.bin\" 0", "nothing is there"),
        ("RW 2048 FLAT \"b.bin\" 1", "at least 1049088"),
        ("RW 2048 FLAT \"disk.vmdk\" 0", "it is the image itself"),
        ("RW 2048 FLAT \".\" 0", "it is a directory"),
        ("RW 2048 SPARSE \"b.bin\"", "sparse extent header"),
        ("RW 18014398509481984 ZERO\nRW 18014398509481984 ZERO", "2^62"),
        ("RW 0 ZERO", "a disk of 0 sectors"),
    ] {
        custom_text(&path, extents);
        let error = open(&path).unwrap_err().to_string();
        assert!(error.contains(told), "{extents}: {error}");
        let found = check(&path, &OpenOptions::default()).unwrap();
        assert!(!found.is_sound(), "{extents}: {found:?}");
    }
    // One file may be several extents.
    custom_text(&path, "RW 1024 FLAT \"b.bin\" 0\nRW 1024 FLAT \"b.bin\" 1024");
    assert!(read_all(&path).iter().all(|&byte| byte == 3));
    // A descriptor of gigabytes.
    custom_text(&path, "RW 2048 ZERO");
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4 << 30).unwrap();
    assert!(open(&path).unwrap_err().to_string().contains("a text of 4294967296 bytes"));
}

#[test]
fn a_guess_does_not_open_further_files() {
    let dir = TempDir::new().unwrap();
    let path = custom(dir.path());
    let plain = dir.path().join("disk.img");
    fs::rename(&path, &plain).unwrap();
    let error = open(&plain).unwrap_err().to_string();
    assert!(error.contains("names further files"), "{error}");
    let named = OpenOptions { format: Some(Format::Vmdk), ..OpenOptions::default() };
    Disk::open(&plain, &named).unwrap();
}

#[test]
fn the_mark_of_workstation_means_in_use() {
    let dir = TempDir::new().unwrap();
    let path = custom(dir.path());
    fs::create_dir(dir.path().join("disk.vmdk.lck")).unwrap();
    let error = open(&path).unwrap_err().to_string();
    assert!(error.contains("disk.vmdk.lck"), "{error}");
    Disk::open(&path, &OpenOptions { force_share: true, ..OpenOptions::default() }).unwrap();
}

/// A redo log by qemu-img above another: read through, and refused when the parent has changed.
#[test]
fn a_child_reads_its_parent_by_its_cid() {
    if Command::new("qemu-img").arg("--version").output().is_err() {
        return println!("skipped: qemu-img is not installed");
    }
    let dir = TempDir::new().unwrap();
    let run = |program: &str, args: &[&str]| {
        let done = Command::new(program).args(args).current_dir(dir.path()).output().unwrap();
        assert!(done.status.success(), "{args:?}: {}", String::from_utf8_lossy(&done.stderr));
    };
    run("qemu-img", &["create", "-f", "vmdk", "base.vmdk", "4M"]);
    run("qemu-io", &["-f", "vmdk", "-c", "write -P 1 0 3M", "base.vmdk"]);
    run("qemu-img", &["create", "-f", "vmdk", "-b", "base.vmdk", "-F", "vmdk", "child.vmdk"]);
    run("qemu-io", &["-f", "vmdk", "-c", "write -P 2 1M 1M", "child.vmdk"]);
    let child = dir.path().join("child.vmdk");
    let bytes = read_all(&child);
    for (index, expected) in [1, 2, 1, 0].into_iter().enumerate() {
        assert!(bytes[index << 20..(index + 1) << 20].iter().all(|&byte| byte == expected), "MiB {index}");
    }
    run("qemu-io", &["-f", "vmdk", "-c", "write -P 5 0 64k", "base.vmdk"]);
    let error = open(&child).unwrap_err();
    assert!(matches!(error, DiskError::ParentChanged { .. }), "{error}");
}

#[test]
fn two_disks_that_name_each_other_as_their_parent_are_refused() {
    let dir = TempDir::new().unwrap();
    for (name, cid, parent, parent_cid) in [("a", "11111111", "b", "22222222"), ("b", "22222222", "a", "11111111")] {
        let link = format!("parentCID={parent_cid}\nparentFileNameHint=\"{parent}.vmdk\"");
        let text = descriptor(&format!("RW 64 FLAT \"{name}.bin\" 0"), cid).replace(CHILD, &link);
        fs::write(dir.path().join(format!("{name}.vmdk")), text).unwrap();
        fs::write(dir.path().join(format!("{name}.bin")), [0; 32_768]).unwrap();
    }
    let error = open(&dir.path().join("a.vmdk")).unwrap_err().to_string();
    assert!(error.contains("loop"), "{error}");
}

/// A copy with extents was killed: the same command removes them. A descriptor that another wrote
/// at the temporary name does not make it remove other files.
#[test]
fn extents_of_an_interrupted_copy_are_removed_and_no_other_file() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name);
    create(path("source.vhdx"), &CreateRequest { size_bytes: Some(3 << 20), ..CreateRequest::default() }).unwrap();
    let dest = CreateRequest { subformat: Some("twoGbMaxExtentSparse".into()), ..CreateRequest::default() };
    let options = ConvertOptions { dest, ..ConvertOptions::default() };
    let copy = || convert(path("source.vhdx"), path("copy.vmdk"), &options, &mut |_, _| true);
    copy().unwrap();
    fs::rename(path("copy.vmdk"), path("copy.vmdk.partial")).unwrap();
    copy().unwrap();
    assert!(path("copy-s001.vmdk").exists() && !path("copy.vmdk.partial").exists());
    for name in ["copy-s001.vmdk", "copy.vmdk"] {
        fs::remove_file(path(name)).unwrap();
    }
    for (name, kept) in [("secret", "secret"), ("sub/copy-1", "sub/copy-1"), ("../copy-1", "copy-1")] {
        fs::create_dir_all(path("sub")).unwrap();
        fs::write(path(kept), b"data").unwrap();
        let text = descriptor(&format!("RW 2048 FLAT \"{name}\" 0"), "12345678");
        fs::write(path("copy.vmdk.partial"), text).unwrap();
        copy().unwrap();
        assert!(path(kept).exists(), "{name}");
        fs::remove_file(path("copy.vmdk")).unwrap();
        fs::remove_file(path("copy-s001.vmdk")).unwrap();
    }
}

/// The bytes that qemu-img sees of the disk at `name`, by a copy to raw.
fn read_by_qemu(dir: &Path, name: &str) -> Vec<u8> {
    run(dir, "qemu-img", &["convert", "-f", "vmdk", "-O", "raw", name, "copy.raw"]);
    fs::read(dir.join("copy.raw")).unwrap()
}

fn run(dir: &Path, program: &str, args: &[&str]) {
    let done = Command::new(program).args(args).current_dir(dir).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr).into_owned() + &String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{program} {args:?}: {said}");
}

/// A chain of three disks of 6 MiB, by qemu-img: each has some MiB of its own. The children have
/// the kind `child`.
fn chain_by_qemu(dir: &Path, base: &str, child: &str) {
    let create = |name: &str, more: &[&str]| {
        run(dir, "qemu-img", &[&["create", "-q", "-f", "vmdk", "-o"], more, &[name], &["6M"]].concat());
    };
    let subformat = |kind: &str| format!("subformat={kind}");
    create("a.vmdk", &[&subformat(base)]);
    run(dir, "qemu-io", &["-f", "vmdk", "-c", "write -P 1 0 4M", "a.vmdk"]);
    for (parent, name, script) in
        [("a.vmdk", "b.vmdk", "write -P 2 1M 2M"), ("b.vmdk", "c.vmdk", "write -P 3 2560k 2560k")]
    {
        create(name, &[&subformat(child), "-b", parent, "-F", "vmdk"]);
        run(dir, "qemu-io", &["-f", "vmdk", "-c", script, name]);
    }
}

fn files_in(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.ends_with(".vmdk")).collect();
    names.sort();
    names
}

/// Chains that qemu-img made, merged in all ways: qemu-img reads the results as it read the chain,
/// and no file of a merged image is left.
#[test]
fn a_chain_is_merged_and_qemu_reads_the_result() {
    if Command::new("qemu-img").arg("--version").output().is_err() {
        return println!("skipped: qemu-img is not installed");
    }
    let kinds = ["monolithicSparse", "monolithicFlat", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat"];
    for (base, child) in kinds.iter().flat_map(|base| [(*base, "monolithicSparse"), (*base, "twoGbMaxExtentSparse")]) {
        for (child_of_all, into, keep) in [
            ("b.vmdk", None, KeptName::Parents),
            ("c.vmdk", None, KeptName::Childs),
            ("c.vmdk", Some("a.vmdk"), KeptName::Parents),
            ("c.vmdk", Some("a.vmdk"), KeptName::Childs),
            ("b.vmdk", None, KeptName::Childs),
        ] {
            let dir = TempDir::new().unwrap();
            let dir = dir.path();
            chain_by_qemu(dir, base, child);
            let expected = read_by_qemu(dir, "c.vmdk");
            let what = format!("{base}, {child}: {child_of_all} into {into:?}, {keep:?}");
            let options = MergeOptions { into: into.map(|into| dir.join(into)), keep, ..MergeOptions::default() };
            merge(dir.join(child_of_all), &options, &mut |_, _| true).unwrap_or_else(|error| panic!("{what}: {error}"));
            let top =
                if child_of_all == "c.vmdk" && keep == KeptName::Parents { into.unwrap_or("b.vmdk") } else { "c.vmdk" };
            assert!(read_by_qemu(dir, top) == expected, "{what}: qemu-img reads other bytes");
            assert!(read_all(&dir.join(top)) == expected, "{what}");
            assert!(check(dir.join(top), &OpenOptions::default()).unwrap().is_sound(), "{what}");
            // Every file that is left belongs to a disk of the chain.
            let disk = Disk::open(dir.join(top), &OpenOptions::default()).unwrap();
            let used = disk.layers().iter().map(|layer| layer.image.stores().len()).sum::<usize>();
            assert_eq!(files_in(dir).len(), used, "{what}: {:?}", files_in(dir));
            drop(disk);
            if base.ends_with("Sparse") || disk_has_one_file(dir, top) {
                run(dir, "qemu-img", &["check", "-q", "-f", "vmdk", top]);
            }
        }
    }
}

fn disk_has_one_file(dir: &Path, name: &str) -> bool {
    let disk = Disk::open(dir.join(name), &OpenOptions::default()).unwrap();
    disk.layers()[0].image.stores().len() == 1
}

/// The parent moves to other folders: `reconnect` finds it, and qemu-img follows the new link.
#[test]
fn a_chain_is_reconnected_and_qemu_follows() {
    if Command::new("qemu-img").arg("--version").output().is_err() {
        return println!("skipped: qemu-img is not installed");
    }
    let dir = TempDir::new().unwrap();
    let dir = dir.path();
    chain_by_qemu(dir, "monolithicSparse", "twoGbMaxExtentSparse");
    let expected = read_by_qemu(dir, "c.vmdk");
    let mut folder = String::new();
    for turn in 0..4 {
        let next = format!("{}{turn}", "long folder name ".repeat(turn));
        fs::create_dir(dir.join(&next)).unwrap();
        fs::rename(dir.join(&folder).join("a.vmdk"), dir.join(&next).join("a.vmdk")).unwrap();
        folder = next;
        let parents = ParentPolicy { allowed_dirs: vec![dir.to_owned()], ..ParentPolicy::default() };
        let options = ReconnectOptions {
            search_dirs: vec![dir.to_owned()],
            open: OpenOptions { parents, ..OpenOptions::default() },
            ..ReconnectOptions::default()
        };
        let done = reconnect(dir.join("c.vmdk"), &options, &mut |_, _| true).unwrap();
        assert_eq!(done.relinked.len(), 1, "{done:?}");
        assert!(read_by_qemu(dir, "c.vmdk") == expected, "{folder}");
        assert!(read_all(&dir.join("c.vmdk")) == expected, "{folder}");
    }
}

/// A merge that was stopped leaves a child that reads as before, also for a program that knows
/// nothing of the mark: it reads right, or refuses.
#[test]
fn a_merge_that_was_stopped_is_finished_by_the_same_merge() {
    if Command::new("qemu-img").arg("--version").output().is_err() {
        return println!("skipped: qemu-img is not installed");
    }
    let dir = TempDir::new().unwrap();
    let dir = dir.path();
    chain_by_qemu(dir, "monolithicFlat", "monolithicSparse");
    let expected = read_by_qemu(dir, "c.vmdk");
    let stopped = merge(dir.join("b.vmdk"), &MergeOptions::default(), &mut |_, _| false);
    assert!(matches!(stopped, Err(DiskError::Stopped)), "{stopped:?}");
    assert!(read_all(&dir.join("c.vmdk")) == expected);
    let info = Disk::open(dir.join("b.vmdk"), &OpenOptions::default()).unwrap();
    assert!(info.layers()[0].image.info().parent.as_ref().unwrap().linkage2.is_some());
    drop(info);
    merge(dir.join("b.vmdk"), &MergeOptions::default(), &mut |_, _| true).unwrap();
    assert!(read_all(&dir.join("c.vmdk")) == expected && read_by_qemu(dir, "c.vmdk") == expected);
    assert_eq!(files_in(dir), ["a-flat.vmdk", "a.vmdk", "c.vmdk"]);
}

/// A child whose descriptor names a file of its parent loses only its own name.
#[test]
fn a_merge_never_removes_the_files_of_another_image() {
    let dir = TempDir::new().unwrap();
    let dir = dir.path();
    for (name, extents, parent) in [
        ("base", "RW 2048 FLAT \"base.bin\" 0", CHILD.to_owned()),
        ("top", "RW 2048 FLAT \"base.bin\" 0", "parentCID=12345678\nparentFileNameHint=\"base.vmdk\"".to_owned()),
    ] {
        fs::write(dir.join("base.bin"), vec![1; 1 << 20]).unwrap();
        let text = descriptor(extents, "12345678").replace(CHILD, &parent);
        fs::write(dir.join(format!("{name}.vmdk")), text).unwrap();
    }
    let error = merge(dir.join("top.vmdk"), &MergeOptions::default(), &mut |_, _| true).unwrap_err();
    assert!(matches!(error, DiskError::InUse { .. }), "{error}");
    assert!(dir.join("base.bin").exists());
}

/// A disk in use is merged into a parent of several files: it keeps its name, and the extents of
/// the parent keep theirs.
#[test]
fn a_disk_in_use_is_absorbed_by_a_parent_of_several_files() {
    for subformat in ["monolithicFlat", "twoGbMaxExtentSparse"] {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("vm.vmdk");
        let request =
            CreateRequest { size_bytes: Some(8 << 20), subformat: Some(subformat.into()), ..CreateRequest::default() };
        create(&path, &request).unwrap();
        let writable = OpenOptions { writable: true, ..OpenOptions::default() };
        let disk = Disk::open(&path, &writable).unwrap();
        let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
        let mut expected = vec![0_u8; 8 << 20];
        let mut write = |io: &mut Blocking, at: usize, len: usize, byte: u8| {
            io.write(at as u64, &vec![byte; len], false).unwrap();
            expected[at..at + len].fill(byte);
        };
        write(&mut io, 0, 3 << 20, 1);
        disk.snapshot("monday", false, &mut ()).unwrap();
        write(&mut io, 1 << 20, 4096, 2);
        write(&mut io, 5 << 20, 1 << 20, 3);
        disk.absorb(&AbsorbOptions::default(), &mut |_, _| true).unwrap();
        write(&mut io, 7 << 20, 512, 4);
        drop(io);
        disk.close().unwrap();
        drop(disk);
        assert!(read_all(&path) == expected, "{subformat}");
        let disk = Disk::open(&path, &OpenOptions::default()).unwrap();
        assert_eq!(
            (disk.layers().len(), files_in(dir.path()).len()),
            (1, 2),
            "{subformat}: {:?}",
            files_in(dir.path())
        );
        drop(disk);
        if Command::new("qemu-img").arg("--version").output().is_ok() {
            assert!(read_by_qemu(dir.path(), "vm.vmdk") == expected, "{subformat}: qemu-img reads other bytes");
        }
    }
}

/// Frozen images in several files, as the one that is merged and as its parent, while the disk is
/// written.
#[test]
fn frozen_images_in_several_files_are_merged_in_use() {
    for (base, child) in [
        ("twoGbMaxExtentFlat", "twoGbMaxExtentSparse"),
        ("twoGbMaxExtentSparse", "monolithicSparse"),
        ("thin", "twoGbMaxExtentSparse"),
        ("monolithicFlat", "vmfsSparse"),
        ("thin", "vmfsSparse"),
    ] {
        let dir = TempDir::new().unwrap();
        let dir = dir.path();
        let size = 8 << 20;
        let request = |size_bytes, subformat: &str, parent: Option<&str>| CreateRequest {
            size_bytes,
            subformat: Some(subformat.into()),
            parent: parent.map(|name| dir.join(name)),
            ..CreateRequest::default()
        };
        create(dir.join("base.vmdk"), &request(Some(size), base, None)).unwrap();
        write(&dir.join("base.vmdk"), 0, 1, 4 << 20);
        create(dir.join("vm.vmdk"), &request(None, child, Some("base.vmdk"))).unwrap();
        write(&dir.join("vm.vmdk"), 1 << 20, 2, 100 << 10);
        let writable = OpenOptions { writable: true, ..OpenOptions::default() };
        let disk = Disk::open(dir.join("vm.vmdk"), &writable).unwrap();
        let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
        disk.snapshot("monday", false, &mut ()).unwrap();
        io.write(2 << 20, &[3; 4096], false).unwrap();
        let mut expected = vec![0; size as usize];
        expected[..4 << 20].fill(1);
        expected[1 << 20..(1 << 20) + (100 << 10)].fill(2);
        expected[2 << 20..(2 << 20) + 4096].fill(3);
        let merged = disk.merge(dir.join("vm_monday.vmdk"), &MergeOptions::default(), &mut |_, _| true).unwrap();
        assert_eq!(merged.disk, dir.join("base.vmdk").canonicalize().unwrap(), "{base}, {child}");
        io.write(7 << 20, &[4; 512], false).unwrap();
        expected[7 << 20..(7 << 20) + 512].fill(4);
        // The parent is written by a second merge, too.
        disk.snapshot("tuesday", false, &mut ()).unwrap();
        disk.merge(dir.join("vm_tuesday.vmdk"), &MergeOptions::default(), &mut |_, _| true).unwrap();
        drop(io);
        disk.close().unwrap();
        assert_eq!(disk.layers().len(), 2);
        drop(disk);
        assert!(read_all(&dir.join("vm.vmdk")) == expected, "{base}, {child}");
        assert!(
            files_in(dir).iter().all(|name| !name.contains("day") && !name.contains("removed")),
            "{:?}",
            files_in(dir)
        );
        if Command::new("qemu-img").arg("--version").output().is_ok() && base != "thin" {
            assert!(read_by_qemu(dir, "vm.vmdk") == expected, "{base}, {child}: qemu-img reads other bytes");
        }
    }
}

/// A redo log of ESX above a flat disk: written by the sector, frozen, merged, enlarged, compacted
/// and copied. qemu-img reads it after each step.
#[test]
fn a_redo_log_of_esx_lives_the_life_of_a_disk() {
    let dir = TempDir::new().unwrap();
    let dir = dir.path();
    let top = dir.join("vm.vmdk");
    let has_qemu = Command::new("qemu-img").arg("--version").output().is_ok();
    if !has_qemu {
        println!("skipped: qemu-img is not installed");
    }
    let is_right = |expected: &[u8], what: &str| {
        assert!(read_all(&top) == expected, "{what}");
        let found = check(&top, &OpenOptions::default()).unwrap();
        assert!(found.is_sound() && found.report.leaked_bytes == 0, "{what}: {:?}", found.report.findings);
        if has_qemu {
            assert!(read_by_qemu(dir, "vm.vmdk") == expected, "{what}: qemu-img reads other bytes");
        }
    };
    let request = |size_bytes, subformat: &str, parent: Option<&str>| CreateRequest {
        size_bytes,
        subformat: Some(subformat.into()),
        parent: parent.map(|name| dir.join(name)),
        ..CreateRequest::default()
    };
    let mut expected = vec![0; 8 << 20];
    create(dir.join("base.vmdk"), &request(Some(8 << 20), "monolithicFlat", None)).unwrap();
    write(&dir.join("base.vmdk"), 0, 1, 4 << 20);
    expected[..4 << 20].fill(1);
    create(&top, &request(None, "vmfsSparse", Some("base.vmdk"))).unwrap();
    assert_eq!(files_in(dir), ["base-flat.vmdk", "base.vmdk", "vm-delta.vmdk", "vm.vmdk"]);
    is_right(&expected, "a new child");
    for (at, byte, len) in [((1 << 20) + 512, 2, 512), ((3 << 20) + 1024, 3, 70_144), (5 << 20, 4, 1 << 20)] {
        write(&top, at as u64, byte, len);
        expected[at..at + len].fill(byte);
        is_right(&expected, "after a write");
    }
    // Only what was written is in the extent: header, directory, four tables, sectors.
    let tables = 2048 + 512 + 4 * 16_384;
    let written = 512 + 70_144 + (1 << 20);
    assert_eq!(fs::metadata(dir.join("vm-delta.vmdk")).unwrap().len(), tables + written);
    let options = SnapshotOptions { name: "monday".into(), ..SnapshotOptions::default() };
    snapshot(&top, &options).unwrap();
    write(&top, 6 << 20, 5, 4096);
    expected[6 << 20..(6 << 20) + 4096].fill(5);
    is_right(&expected, "after a snapshot");
    merge(&top, &MergeOptions { keep: KeptName::Childs, ..MergeOptions::default() }, &mut |_, _| true).unwrap();
    is_right(&expected, "after a merge into it");
    let size = ResizeOptions { size: NewSize::Bytes((9 << 20) + 512), ..ResizeOptions::default() };
    resize(&top, &size, &mut |_, _| true).unwrap();
    expected.resize((9 << 20) + 512, 0);
    write(&top, 9 << 20, 6, 512);
    expected[9 << 20..].fill(6);
    is_right(&expected, "after a growth");
    write(&top, 5 << 20, 0, 512 << 10);
    expected[5 << 20..(5 << 20) + (512 << 10)].fill(0);
    compact(&top, &CompactOptions::default(), &mut |_, _| true).unwrap();
    is_right(&expected, "after it was compacted");
    let dest = request(None, "vmfsSparse", None);
    let copy = ConvertOptions { dest, ..ConvertOptions::default() };
    convert(&top, dir.join("copy.vmdk"), &copy, &mut |_, _| true).unwrap();
    assert!(read_all(&dir.join("copy.vmdk")) == expected);
    merge(&top, &MergeOptions::default(), &mut |_, _| true).unwrap();
    assert!(read_all(&dir.join("base.vmdk")) == expected, "after a merge into the flat disk");
    assert_eq!(files_in(dir), ["base-flat.vmdk", "base.vmdk", "copy-delta.vmdk", "copy.vmdk"]);
}

/// Each extent gives back what it does not need, and its blocks move down in its own file.
#[test]
fn a_disk_in_two_extents_is_compacted_in_both() {
    const MIB: u64 = 1 << 20;
    for is_in_use in [false, true] {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("vm.vmdk");
        let request = CreateRequest {
            size_bytes: Some(2100 * MIB),
            subformat: Some("twoGbMaxExtentSparse".into()),
            ..CreateRequest::default()
        };
        create(&path, &request).unwrap();
        let starts = [0, 2050 * MIB];
        for start in starts {
            write(&path, start, 1, 6 << 20);
            write(&path, start + 6 * MIB, 2, 2 << 20);
            write(&path, start, 0, 4 << 20);
        }
        let lens =
            || ["s001", "s002"].map(|name| fs::metadata(dir.path().join(format!("vm-{name}.vmdk"))).unwrap().len());
        let before = lens();
        let disk = if is_in_use {
            let disk = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
            disk.compact(false, &mut |_, _| true).unwrap();
            disk
        } else {
            compact(&path, &CompactOptions::default(), &mut |_, _| true).unwrap();
            Disk::open(&path, &OpenOptions::default()).unwrap()
        };
        let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
        for start in starts {
            let mut bytes = vec![9; 9 << 20];
            io.read(start, &mut bytes).unwrap();
            for (index, piece) in bytes.chunks(1 << 20).enumerate() {
                let expected = [0, 0, 0, 0, 1, 1, 2, 2, 0][index];
                assert!(piece.iter().all(|&byte| byte == expected), "MiB {index} of {start}, in use: {is_in_use}");
            }
        }
        drop(io);
        disk.close().unwrap();
        drop(disk);
        for (before, after) in before.into_iter().zip(lens()) {
            assert_eq!(after, before - 4 * MIB, "in use: {is_in_use}");
        }
        let found = check(&path, &OpenOptions::default()).unwrap();
        assert!(found.is_sound() && found.report.leaked_bytes == 0, "{:?}", found.report.findings);
    }
}

/// What a parent cannot have is refused before the link of the child changes.
#[test]
fn a_merge_asks_whether_the_parent_takes_it_before_it_changes_anything() {
    let dir = TempDir::new().unwrap();
    let dir = dir.path();
    let name = |name: &str| dir.join(name);
    let link = || {
        let disk = Disk::open(name("top.vmdk"), &OpenOptions::default()).unwrap();
        let layers = disk.layers();
        layers[0].image.info().parent.clone().unwrap()
    };
    // An extent of 2047 MiB is full, and a new one is not added.
    let full = 4_192_256 * 512;
    let request = CreateRequest {
        size_bytes: Some(full),
        subformat: Some("twoGbMaxExtentSparse".into()),
        ..CreateRequest::default()
    };
    create(name("base.vmdk"), &request).unwrap();
    let larger = CreateRequest {
        size_bytes: Some(full + (64 << 10)),
        parent: Some(name("base.vmdk")),
        ..CreateRequest::default()
    };
    create(name("top.vmdk"), &larger).unwrap();
    write(&name("top.vmdk"), full, 7, 4096);
    let before = link();
    let merging = |keep| MergeOptions { keep, ..MergeOptions::default() };
    let disk = Disk::open(name("top.vmdk"), &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    let in_use = disk.absorb(&AbsorbOptions::default(), &mut |_, _| true).unwrap_err().to_string();
    disk.close().unwrap();
    drop(disk);
    let alone = merge(name("top.vmdk"), &merging(KeptName::Parents), &mut |_, _| true).unwrap_err().to_string();
    for error in [in_use, alone] {
        assert!(error.contains("ends at 2047 MiB"), "{error}");
    }
    assert_eq!(link(), before);
    // Parts of the disk that have no file, or one that must not be written.
    fs::write(name("flat.bin"), vec![1; 1 << 20]).unwrap();
    for (extents, told) in [
        ("RW 2048 FLAT \"flat.bin\" 0\nRW 2048 ZERO", "for which the descriptor names no file"),
        ("RW 2048 FLAT \"flat.bin\" 0\nNOACCESS 2048 FLAT \"secret.bin\" 0", "for which the descriptor names no file"),
        ("RDONLY 2048 FLAT \"flat.bin\" 0\nRW 2048 ZERO", "an extent that is not writable"),
    ] {
        fs::remove_file(name("top.vmdk")).unwrap();
        fs::write(name("base.vmdk"), descriptor(extents, "12345678")).unwrap();
        let child = CreateRequest { parent: Some(name("base.vmdk")), ..CreateRequest::default() };
        create(name("top.vmdk"), &child).unwrap();
        write(&name("top.vmdk"), 0, 5, 4096);
        write(&name("top.vmdk"), 3 << 19, 6, 4096);
        let before = link();
        let error = merge(name("top.vmdk"), &merging(KeptName::Childs), &mut |_, _| true).unwrap_err().to_string();
        assert!(error.contains(told), "{extents}: {error}");
        assert_eq!(link(), before, "{extents}");
    }
    // A write to the part with a file goes through; the other fails by itself.
    fs::remove_file(name("top.vmdk")).unwrap();
    fs::write(name("base.vmdk"), descriptor("RW 2048 FLAT \"flat.bin\" 0\nRW 2048 ZERO", "12345678")).unwrap();
    write(&name("base.vmdk"), 4096, 5, 4096);
    let all = read_all(&name("base.vmdk"));
    assert!(all[4096..8192].iter().all(|&byte| byte == 5) && all[1 << 20..].iter().all(|&byte| byte == 0));
}

/// A power cut between the removal of a descriptor and that of its extents: the same command, or
/// the next one in the folder, finishes it. A mark that lies removes nothing that is in use.
#[test]
fn a_removal_that_was_cut_off_is_finished() {
    let dir = TempDir::new().unwrap();
    let dir = dir.path();
    let name = |name: &str| dir.join(name);
    let make = |file: &str| {
        let request = CreateRequest {
            size_bytes: Some(4 << 20),
            subformat: Some("twoGbMaxExtentFlat".into()),
            ..CreateRequest::default()
        };
        create(name(file), &request).unwrap();
    };
    let removing = SnapshotOptions { discard: true, ..SnapshotOptions::default() };
    for by_the_same in [true, false] {
        make("x.vmdk");
        make("y.vmdk");
        fs::rename(name("x.vmdk"), name(".x.vmdk.removed")).unwrap();
        if by_the_same {
            remove_snapshot(name("x.vmdk"), &removing, &mut |_, _| true).unwrap();
            assert_eq!(files_in(dir), ["y-f001.vmdk", "y.vmdk"]);
        }
        remove_snapshot(name("y.vmdk"), &removing, &mut |_, _| true).unwrap();
        assert_eq!(files_in(dir), [""; 0]);
    }
    // Cut off before the image lost its name: it keeps its extents.
    make("x.vmdk");
    make("y.vmdk");
    fs::hard_link(name("x.vmdk"), name(".x.vmdk.removed")).unwrap();
    remove_snapshot(name("y.vmdk"), &removing, &mut |_, _| true).unwrap();
    assert_eq!(files_in(dir), ["x-f001.vmdk", "x.vmdk"]);
    // Marks that name what another image uses, what lies elsewhere, and nothing at all.
    make("y.vmdk");
    fs::write(name("secret.raw"), b"data").unwrap();
    for extent in ["x-f001.vmdk", "../x-f001.vmdk", "x.vmdk", "secret.raw"] {
        fs::write(name(".z.vmdk.removed"), descriptor(&format!("RW 2048 FLAT \"{extent}\" 0"), "12345678")).unwrap();
        snapshot(name("y.vmdk"), &SnapshotOptions { name: "a".into(), ..SnapshotOptions::default() }).unwrap();
        assert_eq!(files_in(dir), ["x-f001.vmdk", "x.vmdk", "y-f001.vmdk", "y.vmdk", "y_a.vmdk"], "{extent}");
        remove_snapshot(name("y.vmdk"), &removing, &mut |_, _| true).unwrap();
        fs::rename(name("y_a.vmdk"), name("y.vmdk")).unwrap();
    }
    fs::write(name(".z.vmdk.removed"), b"no image").unwrap();
    remove_snapshot(name("y.vmdk"), &removing, &mut |_, _| true).unwrap();
    assert_eq!(files_in(dir), ["x-f001.vmdk", "x.vmdk"]);
    assert!(name(".z.vmdk.removed").exists(), "what is no mark was removed");
    // An image of the folder that cannot be read may use them.
    assert!(name("secret.raw").exists(), "a file that is no VMDK was removed");
    fs::write(name("broken.vmdk"), "# Disk DescriptorFile\nversion=9\n").unwrap();
    fs::write(name(".z.vmdk.removed"), descriptor("RW 2048 FLAT \"mine.vmdk\" 0", "12345678")).unwrap();
    fs::write(name("mine.vmdk"), b"data").unwrap();
    remove_snapshot(name("x.vmdk"), &removing, &mut |_, _| true).unwrap();
    assert!(name("mine.vmdk").exists());
    fs::remove_file(name("broken.vmdk")).unwrap();
    make("x.vmdk");
    remove_snapshot(name("x.vmdk"), &removing, &mut |_, _| true).unwrap();
    assert!(files_in(dir).is_empty() && !name("mine.vmdk").exists() && !name(".z.vmdk.removed").exists());
}
