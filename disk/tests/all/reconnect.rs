//! Parents that were moved, renamed, copied or replaced, and chains that find them again.

use diskwright_disk::{
    CreateRequest, Disk, DiskError, OpenOptions, ParentPolicy, ReconnectOptions, Reconnected, create, reconnect,
};
use diskwright_store::{Blocking, EngineKind, ErrorCode};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// Parents may lie anywhere, as the user has said so.
fn anywhere(writable: bool) -> OpenOptions {
    let parents = ParentPolicy { allow_any: true, ..ParentPolicy::default() };
    OpenOptions { writable, parents, ..OpenOptions::default() }
}

fn write(path: &Path, offset_bytes: u64, byte: u8) {
    let disk = Disk::open(path, &anywhere(true)).unwrap();
    Blocking::open(&*disk, EngineKind::Auto).unwrap().write(offset_bytes, &[byte; 4096], false).unwrap();
    disk.close().unwrap();
}

/// The first byte of each MiB.
fn contents(path: &Path) -> Vec<u8> {
    let disk = Disk::open(path, &anywhere(false)).unwrap();
    let mut queue = Blocking::open(&*disk, EngineKind::Auto).unwrap();
    let mut read = |mib: u64| {
        let mut found = [0; 512];
        queue.read(mib * MIB, &mut found).unwrap();
        found[0]
    };
    (0..4).map(&mut read).collect()
}

/// A chain of three, `base`, `middle` and `top`, each with data of its own: 1, 2, 3.
fn chain(dir: &Path, extension: &str) -> [PathBuf; 3] {
    let paths = ["base", "middle", "top"].map(|name| dir.join(name).with_extension(extension));
    for (number, path) in (1..).zip(&paths) {
        let parent = (number > 1).then(|| paths[number as usize - 2].clone());
        let size_bytes = (number == 1).then_some(4 * MIB);
        create(path, &CreateRequest { parent, size_bytes, ..CreateRequest::default() }).unwrap();
        write(path, u64::from(number) * MIB, number);
    }
    paths
}

fn all_bytes(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.is_file()).map(|path| (path.clone(), fs::read(&path).unwrap())).collect()
}

fn to(child: &Path, parent: &Path) -> diskwright_disk::Result<Reconnected> {
    let options = ReconnectOptions { parent: Some(parent.to_owned()), ..ReconnectOptions::default() };
    reconnect(child, &options, &mut |_, _| true)
}

fn searching(dir: &Path) -> ReconnectOptions {
    ReconnectOptions { search_dirs: vec![dir.to_owned()], ..ReconnectOptions::default() }
}

fn search(child: &Path, dir: &Path) -> diskwright_disk::Result<Reconnected> {
    reconnect(child, &searching(dir), &mut |_, _| true)
}

#[test]
fn a_moved_parent_is_connected_by_name() {
    for extension in ["vhd", "vhdx"] {
        let home = TempDir::new().unwrap();
        let [base, middle, top] = chain(home.path(), extension);
        let place = home.path().join("new place of 2024, größer");
        fs::create_dir(&place).unwrap();
        let moved = place.join("gölden image").with_extension(extension);
        fs::rename(&base, &moved).unwrap();
        assert_eq!(Disk::open(&top, &anywhere(false)).unwrap_err().code(), ErrorCode::ParentMissing);
        let before = fs::metadata(&middle).unwrap().modified().unwrap();
        let dry = ReconnectOptions { parent: Some(moved.clone()), dry_run: true, ..ReconnectOptions::default() };
        let bytes = fs::read(&middle).unwrap();
        let planned = reconnect(&middle, &dry, &mut |_, _| true).unwrap();
        assert_eq!(fs::read(&middle).unwrap(), bytes, "a dry run has changed the image");
        let done = to(&middle, &moved).unwrap();
        assert_eq!(planned, done);
        assert_eq!(done.relinked.len(), 1, "{done:?}");
        assert!(done.relinked[0].has_identity && done.warnings.is_empty(), "{done:?}");
        assert_eq!(contents(&top), [0, 1, 2, 3]);
        // The top is a child of the image that was changed, and still accepts it.
        assert_eq!(fs::metadata(&middle).unwrap().modified().unwrap(), before);
        write(&top, 0, 9);
        assert_eq!(contents(&top), [9, 1, 2, 3]);
        // Again, nothing is to be done.
        assert_eq!(to(&middle, &moved).unwrap().relinked, []);
    }
}

#[test]
fn a_scattered_chain_is_found_by_identity() {
    for extension in ["vhd", "vhdx"] {
        let home = TempDir::new().unwrap();
        let [base, middle, top] = chain(home.path(), extension);
        let far = home.path().join("a/b/c");
        fs::create_dir_all(&far).unwrap();
        fs::create_dir(home.path().join("tops")).unwrap();
        // No name says what a file is.
        let (new_base, new_middle) = (far.join("x1"), home.path().join("a").join("renamed").with_extension(extension));
        let new_top = home.path().join("tops/t").with_extension(extension);
        fs::rename(&base, &new_base).unwrap();
        fs::rename(&middle, &new_middle).unwrap();
        fs::rename(&top, &new_top).unwrap();
        // Files that are not it: another disk in the base's place, text, a folder with its name.
        create(&base, &CreateRequest { size_bytes: Some(4 * MIB), ..CreateRequest::default() }).unwrap();
        fs::write(home.path().join("notes.txt"), "no image").unwrap();
        fs::create_dir(&middle).unwrap();
        std::os::unix::fs::symlink(home.path(), home.path().join("a/loop")).unwrap();
        // A second name of a file is not a second candidate.
        fs::hard_link(&new_base, far.join("x2")).unwrap();
        let done = search(&new_top, home.path()).unwrap();
        assert_eq!(done.relinked.len(), 2, "{done:?}");
        assert_eq!(done.relinked[0].parent, new_middle.canonicalize().unwrap());
        assert_eq!(contents(&new_top), [0, 1, 2, 3]);
        write(&new_top, 0, 9);
        assert_eq!(search(&new_top, home.path()).unwrap().relinked, []);
    }
}

#[test]
fn nothing_changes_if_one_parent_is_not_found() {
    let home = TempDir::new().unwrap();
    let [base, middle, top] = chain(home.path(), "vhdx");
    fs::create_dir(home.path().join("sub")).unwrap();
    fs::rename(&middle, home.path().join("sub/m.vhdx")).unwrap();
    fs::remove_file(&base).unwrap();
    let before = (all_bytes(home.path()), all_bytes(&home.path().join("sub")));
    let error = search(&top, home.path()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::ParentMissing, "{error}");
    assert!(error.to_string().contains("m.vhdx") && error.to_string().contains("2 files were examined"), "{error}");
    assert_eq!((all_bytes(home.path()), all_bytes(&home.path().join("sub"))), before);
}

#[test]
fn two_files_with_the_identity_are_named() {
    let home = TempDir::new().unwrap();
    let [base, middle, _] = chain(home.path(), "vhdx");
    fs::create_dir(home.path().join("sub")).unwrap();
    let copies = ["sub/one.vhdx", "sub/two.vhdx"].map(|name| home.path().join(name));
    for copy in &copies {
        fs::copy(&base, copy).unwrap();
    }
    fs::remove_file(&base).unwrap();
    let before = all_bytes(home.path());
    let error = search(&middle, home.path()).unwrap_err().to_string();
    assert!(copies.iter().all(|copy| error.contains(copy.to_str().unwrap())), "{error}");
    assert_eq!(all_bytes(home.path()), before);
    to(&middle, &copies[1]).unwrap();
    assert_eq!(contents(&middle), [0, 1, 2, 0]);
}

#[test]
fn another_disk_with_the_right_name_is_refused() {
    for extension in ["vhd", "vhdx"] {
        let home = TempDir::new().unwrap();
        let [base, middle, _] = chain(home.path(), extension);
        fs::remove_file(&base).unwrap();
        create(&base, &CreateRequest { size_bytes: Some(8 * MIB), ..CreateRequest::default() }).unwrap();
        write(&base, 0, 7);
        let before = all_bytes(home.path());
        let error = to(&middle, &base).unwrap_err().to_string();
        assert!(error.contains("is not the disk it was made from") && error.contains("expected"), "{error}");
        assert!(error.contains("`ReconnectOptions::ignore_id_mismatch`"), "{error}");
        assert_eq!(all_bytes(home.path()), before);
        let options =
            ReconnectOptions { parent: Some(base.clone()), ignore_id_mismatch: true, ..ReconnectOptions::default() };
        let done = reconnect(&middle, &options, &mut |_, _| true).unwrap();
        assert!(!done.relinked[0].has_identity && done.warnings.len() >= 2, "{done:?}");
        assert_eq!(contents(&middle), [7, 0, 2, 0]);
    }
}

/// A VHD that was written keeps its identity, but not the time of its last change.
#[test]
fn a_vhd_that_was_changed_is_refused() {
    let home = TempDir::new().unwrap();
    let [base, middle, top] = chain(home.path(), "vhd");
    let moved = home.path().join("moved.vhd");
    fs::rename(&base, &moved).unwrap();
    let file = fs::File::options().write(true).open(&moved).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(86_400)).unwrap();
    let error = to(&middle, &moved).unwrap_err().to_string();
    assert!(error.contains("was last changed") && error.contains("`ParentPolicy::ignore_timestamp`"), "{error}");
    let parents = ParentPolicy { ignore_timestamp: true, ..ParentPolicy::default() };
    let open = OpenOptions { parents, ..OpenOptions::default() };
    let options = ReconnectOptions { parent: Some(moved), open, ..ReconnectOptions::default() };
    let done = reconnect(&middle, &options, &mut |_, _| true).unwrap();
    assert_eq!(done.warnings.len(), 1, "{done:?}");
    write(&top, 0, 9);
    assert_eq!(contents(&top), [9, 1, 2, 3]);
}

#[test]
fn loops_other_formats_and_disks_without_a_parent_are_refused() {
    let home = TempDir::new().unwrap();
    let [base, middle, top] = chain(home.path(), "vhdx");
    let vhd = home.path().join("other.vhd");
    create(&vhd, &CreateRequest { size_bytes: Some(4 * MIB), ..CreateRequest::default() }).unwrap();
    let before = all_bytes(home.path());
    let risky = |child: &Path, parent: &Path| {
        let options = ReconnectOptions {
            parent: Some(parent.to_owned()),
            ignore_id_mismatch: true,
            ..ReconnectOptions::default()
        };
        reconnect(child, &options, &mut |_, _| true).unwrap_err()
    };
    for (child, parent) in [(&middle, &middle), (&middle, &top)] {
        let error = risky(child, parent).to_string();
        assert!(error.contains("the chain would be a loop"), "{error}");
    }
    let error = risky(&middle, &vhd).to_string();
    assert!(error.contains("a chain has one format"), "{error}");
    let error = risky(&base, &middle).to_string();
    assert!(error.contains("not a differencing disk"), "{error}");
    let nothing = reconnect(&top, &ReconnectOptions::default(), &mut |_, _| true).unwrap_err();
    assert!(matches!(nothing, DiskError::Usage { .. }), "{nothing}");
    assert_eq!(all_bytes(home.path()), before);
}

#[test]
fn a_disk_in_use_and_a_stopped_search_change_nothing() {
    let home = TempDir::new().unwrap();
    let [base, middle, top] = chain(home.path(), "vhdx");
    let moved = home.path().join("moved.vhdx");
    fs::rename(&base, &moved).unwrap();
    let before = all_bytes(home.path());
    let stopped = reconnect(&top, &searching(home.path()), &mut |_, _| false).unwrap_err();
    assert!(matches!(stopped, DiskError::Stopped), "{stopped}");
    {
        let alone = OpenOptions { scope: diskwright_disk::ChainScope::Top, ..anywhere(false) };
        let _reader = Disk::open(&middle, &alone).unwrap();
        let error = search(&top, home.path()).unwrap_err();
        assert!(matches!(error, DiskError::InUse { .. }), "{error}");
    }
    assert_eq!(all_bytes(home.path()), before);
    search(&top, home.path()).unwrap();
    assert_eq!(contents(&top), [0, 1, 2, 3]);
}

/// The user named the parent, and the rest of the chain is still broken: that is said.
#[test]
fn a_chain_that_is_still_broken_is_told() {
    let home = TempDir::new().unwrap();
    let [base, middle, top] = chain(home.path(), "vhdx");
    let moved = home.path().join("m.vhdx");
    fs::rename(&middle, &moved).unwrap();
    fs::remove_file(&base).unwrap();
    let done = to(&top, &moved).unwrap();
    assert_eq!(done.relinked.len(), 1);
    assert!(done.warnings[0].contains("still broken"), "{done:?}");
}
