//! A dry run says what the command says, the present size is no change, and what one format cannot
//! record is told: in all formats.

use diskwright_disk::{
    ApplyOptions, ConvertOptions, CreateRequest, Difference, Disk, DiskError, Identity, Increment, NewSize,
    OpenOptions, ReconnectOptions, ResizeOptions, SnapshotOptions, apply_export, clone_disk, convert, create,
    reconnect, resize, snapshot,
};
use diskwright_store::{Blocking, EngineKind, Files};
use std::{
    fs,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

const SIZE: u64 = 16 << 20;
const FORMATS: [&str; 5] = ["vhd", "vhdx", "vmdk", "qcow2", "vdi"];

fn made(dir: &Path, name: &str) -> PathBuf {
    let path = dir.canonicalize().unwrap().join(name);
    create(&path, &CreateRequest { size_bytes: Some(SIZE), ..CreateRequest::default() }).unwrap();
    path
}

fn write(path: &Path, byte: u8) {
    let disk = Disk::open(path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    Blocking::open(&*disk, EngineKind::Auto).unwrap().write(0, &[byte; 4096], false).unwrap();
    disk.close().unwrap();
}

fn read(path: &Path) -> u8 {
    let disk = Disk::open(path, &OpenOptions::default()).unwrap_or_else(|error| panic!("{error}"));
    let mut found = [0; 4096];
    Blocking::open(&*disk, EngineKind::Auto).unwrap().read(0, &mut found).unwrap();
    found[0]
}

fn frozen(path: &Path, name: &str) -> PathBuf {
    snapshot(path, &SnapshotOptions { name: name.into(), ..SnapshotOptions::default() }).unwrap().parent
}

fn child(path: &Path, parent: &Path) {
    create(path, &CreateRequest { parent: Some(parent.to_owned()), ..CreateRequest::default() }).unwrap();
}

fn resized(path: &Path, bytes: u64, dry_run: bool) -> diskwright_disk::Result<u64> {
    let options = ResizeOptions { size: NewSize::Bytes(bytes), dry_run, ..ResizeOptions::default() };
    resize(path, &options, &mut |_, _| true).map(|done| done.new_bytes)
}

/// The changes of the disk since its parent.
fn exported(path: &Path, out: &Path) {
    let disk = Disk::open(path, &OpenOptions::default()).unwrap();
    let mut since = Difference::since((&disk, path), None, &Files::default(), EngineKind::Auto).unwrap();
    since.export(EngineKind::Auto, &Files::default()).to_file(out, false, &mut |_, _| true).unwrap();
}

fn applied(
    out: &Path,
    copy: &Path,
    (insist, dry_run): (bool, bool),
) -> diskwright_disk::Result<diskwright_disk::Applied> {
    let options = ApplyOptions { ignore_id_mismatch: insist, dry_run, ..ApplyOptions::default() };
    apply_export(Increment::File(out), copy, &options, &mut |_, _| true)
}

#[test]
fn the_present_size_is_no_change() {
    let dir = TempDir::new().unwrap();
    for format in FORMATS.into_iter().chain(["raw"]) {
        let path = made(dir.path(), &format!("a.{format}"));
        write(&path, 1);
        for dry_run in [true, false] {
            assert_eq!(resized(&path, SIZE, dry_run).unwrap_or_else(|error| panic!("{format}: {error}")), SIZE);
        }
        // A command that was interrupted, and is repeated.
        for _ in 0..2 {
            assert_eq!(resized(&path, 2 * SIZE, false).unwrap_or_else(|error| panic!("{format}: {error}")), 2 * SIZE);
        }
        assert_eq!(read(&path), 1);
        if let Err(error) = resized(&path, SIZE, true) {
            assert!(error.to_string().starts_with(&path.display().to_string()), "{format}: {error}");
        }
    }
}

#[test]
fn a_dry_run_refuses_a_size_that_an_image_cannot_have() {
    let dir = TempDir::new().unwrap();
    for format in ["vhd", "vmdk", "vdi", "raw"] {
        let path = made(dir.path(), &format!("a.{format}"));
        for bytes in [64 << 40, (1 << 62) - 512] {
            let dry = resized(&path, bytes, true).map_err(|error| error.to_string());
            if ["raw", "vdi"].contains(&format) && bytes < 1 << 62 && dry.is_ok() {
                // The file system takes files of this length, and a VDI a map for it.
                continue;
            }
            let dry = dry.unwrap_err();
            assert_eq!(dry, resized(&path, bytes, false).unwrap_err().to_string(), "{format}");
            assert!(dry.contains(&format!("a.{format}")), "{dry}");
            assert_eq!(resized(&path, SIZE, true).unwrap(), SIZE, "{format}: it was changed");
        }
    }
}

#[test]
fn a_dry_run_of_an_application_refuses_another_child() {
    for format in FORMATS {
        let dir = TempDir::new().unwrap();
        let path = made(dir.path(), &format!("a.{format}"));
        let base = frozen(&path, "one");
        write(&path, 2);
        let out = dir.path().join("e.dwdiff");
        exported(&path, &out);
        for dry_run in [true, false] {
            let refused = applied(&out, &base, (true, dry_run)).unwrap_err();
            assert!(matches!(&refused, DiskError::HasChildren { child, .. } if *child == path), "{format}: {refused}");
        }
    }
}

#[test]
fn changes_apply_across_kinds_of_identity() {
    for from in FORMATS {
        for to in FORMATS {
            let dir = TempDir::new().unwrap();
            let path = made(dir.path(), &format!("a.{from}"));
            write(&path, 1);
            let base = frozen(&path, "one");
            write(&path, 2);
            let (out, copy) = (dir.path().join("e.dwdiff"), dir.path().join(format!("copy.{to}")));
            exported(&path, &out);
            convert(&base, &copy, &ConvertOptions::default(), &mut |_, _| true).unwrap();
            let applies = |dry_run| {
                applied(&out, &copy, (true, dry_run)).unwrap_or_else(|error| panic!("{from} to {to}: {error}"))
            };
            let dry = applies(true);
            assert_eq!(read(&copy), 1);
            let done = applies(false);
            assert_eq!((read(&copy), &done.result_id), (2, &dry.result_id), "{from} to {to}");
            let told =
                |warnings: &[String]| warnings.iter().any(|warning| warning.contains("cannot have the identity"));
            let differs = from != "qcow2" && to != "qcow2" && (from == "vmdk") != (to == "vmdk");
            assert_eq!((told(&dry.warnings), told(&done.warnings)), (differs, differs), "{from} to {to}");
        }
    }
}

#[test]
fn a_living_child_is_no_export() {
    for format in ["vhd", "vhdx"] {
        let dir = TempDir::new().unwrap();
        let base = made(dir.path(), &format!("base.{format}"));
        let living = dir.path().join(format!("living.{format}"));
        child(&living, &base);
        write(&living, 2);
        let above = dir.path().join(format!("above.{format}"));
        child(&above, &living);
        for dry_run in [true, false] {
            let refused = applied(&living, &base, (false, dry_run)).unwrap_err().to_string();
            assert!(refused.contains(&format!("above.{format}")) && read(&above) == 2, "{refused}");
        }
        fs::remove_file(&above).unwrap();
        for dry_run in [true, false] {
            let done = applied(&living, &base, (false, dry_run)).unwrap();
            assert!(done.warnings.iter().any(|warning| warning.contains("cannot be opened once")), "{done:?}");
        }
        assert_eq!(read(&base), 2);
    }
}

#[test]
fn a_vdi_keeps_its_identity_where_no_child_looks_for_it() {
    let dir = TempDir::new().unwrap();
    let path = made(dir.path(), "a.vdi");
    write(&path, 1);
    let base = frozen(&path, "one");
    let keep = ConvertOptions { identity: Identity::Keep, ..ConvertOptions::default() };
    let beside = dir.path().join("copy.vdi");
    let refused = convert(&base, &beside, &keep, &mut |_, _| true).unwrap_err().to_string();
    assert!(refused.contains("another folder") && refused.contains("copy.vdi:"), "{refused}");
    assert!(!refused.contains("partial") && !beside.exists() && read(&path) == 1);
    fs::create_dir(dir.path().join("other")).unwrap();
    let copy = dir.path().join("other/copy.vdi");
    convert(&base, &copy, &keep, &mut |_, _| true).unwrap();
    // It takes the place of the parent.
    fs::rename(&copy, &base).unwrap();
    assert_eq!(read(&path), 1);
}

#[test]
fn clones_are_refused_in_a_folder_that_takes_no_names() {
    let dir = TempDir::new().unwrap();
    let path = made(dir.path(), "a.vhdx");
    let clone = [PathBuf::from("/proc/self/c.vhdx")];
    for dry_run in [true, false] {
        let refused = clone_disk(&path, &clone, &CreateRequest::default(), dry_run, &mut |_, _| true).unwrap_err();
        assert!(matches!(refused, DiskError::File { .. }) && refused.to_string().contains("/proc/self"), "{refused}");
    }
}

#[test]
fn a_search_says_what_it_cannot_find() {
    let dir = TempDir::new().unwrap();
    let path = made(dir.path(), "a.qcow2");
    let base = frozen(&path, "one");
    let search = |dirs: &[&Path]| {
        let search_dirs = dirs.iter().map(|dir| dir.to_path_buf()).collect();
        let options = ReconnectOptions { search_dirs, ..ReconnectOptions::default() };
        reconnect(&path, &options, &mut |_, _| true).unwrap_err().to_string()
    };
    let missing = search(&[&dir.path().join("missing")]);
    assert!(missing.contains("/missing"), "{missing}");
    fs::rename(&base, dir.path().join("lost.qcow2")).unwrap();
    let lost = search(&[dir.path()]);
    assert!(lost.contains("by its path alone") && lost.contains("a_one.qcow2"), "{lost}");
}
