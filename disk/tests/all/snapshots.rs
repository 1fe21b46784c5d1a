//! Snapshots, clones and growth of disks in files: names, data, refusals, leftovers.

use diskwright_disk::{
    CreateRequest, Disk, DiskError, FolderImages, FormerImage, FoundParent, NewSize, OpenOptions, ResizeOptions,
    SnapshotOptions, clone_disk, create, remove_snapshot, resize, revert, snapshot,
};
use diskwright_store::{Blocking, EngineKind};
use std::{
    fs,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 16 * MIB;

fn made(extension: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().canonicalize().unwrap().join(format!("vm.{extension}"));
    create(&path, &CreateRequest { size_bytes: Some(SIZE), ..CreateRequest::default() }).unwrap();
    (dir, path)
}

fn write(path: &Path, offset_bytes: u64, byte: u8) {
    let disk = Disk::open(path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    let mut queue = Blocking::open(&*disk, EngineKind::Auto).unwrap();
    queue.write(offset_bytes, &[byte; 4096], false).unwrap();
    drop(queue);
    disk.close().unwrap();
}

fn read(path: &Path, offset_bytes: u64) -> u8 {
    let disk = Disk::open(path, &OpenOptions::default()).unwrap();
    let mut found = [0; 4096];
    Blocking::open(&*disk, EngineKind::Auto).unwrap().read(offset_bytes, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == found[0]));
    found[0]
}

fn named(name: &str) -> SnapshotOptions {
    SnapshotOptions { name: name.into(), ..SnapshotOptions::default() }
}

fn files(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn the_name_of_a_disk_leads_to_what_is_written() {
    for (extension, frozen) in [("vhdx", "vm_one.avhdx"), ("vhd", "vm_one.avhd")] {
        let (dir, path) = made(extension);
        write(&path, 0, 1);
        let dry = snapshot(&path, &SnapshotOptions { dry_run: true, ..named("one") }).unwrap();
        assert_eq!(files(dir.path()).len(), 1, "a dry run changes nothing");
        let done = snapshot(&path, &named("one")).unwrap();
        assert_eq!((&done, done.frozen.as_deref()), (&dry, Some(&*done.parent)));
        assert_eq!(done.parent.file_name().unwrap(), frozen);
        assert_eq!(files(dir.path()), [format!("vm.{extension}"), frozen.to_owned()]);
        write(&path, MIB, 2);
        assert_eq!((read(&path, 0), read(&path, MIB)), (1, 2));
        assert_eq!((read(&done.parent, 0), read(&done.parent, MIB)), (1, 0), "the frozen image is as it was");
    }
}

#[test]
fn a_revert_keeps_or_discards() {
    let (dir, path) = made("vhdx");
    write(&path, 0, 1);
    let first = snapshot(&path, &named("one")).unwrap();
    write(&path, 0, 2);
    let back = revert(&path, None, FormerImage::Kept, &named("two")).unwrap();
    assert_eq!((read(&path, 0), read(back.frozen.as_deref().unwrap(), 0)), (1, 2));
    write(&path, 0, 3);
    let other = revert(&path, back.frozen.as_deref(), FormerImage::Discarded, &named("unused")).unwrap();
    assert_eq!((read(&path, 0), other.frozen), (2, None));
    assert_eq!(files(dir.path()), ["vm.vhdx", "vm_one.avhdx", "vm_two.avhdx"]);
    // An image with two children stays; one without goes; one with a single child is merged with
    // it.
    let third = path.with_file_name("third.vhdx");
    create(&third, &CreateRequest { parent: Some(first.parent.clone()), ..CreateRequest::default() }).unwrap();
    let refused = remove_snapshot(&first.parent, &named("x"), &mut |_, _| true).unwrap_err();
    assert!(refused.to_string().contains("2 images have it as their parent"), "{refused}");
    for (dry_run, leaf) in [(true, &third), (false, &third), (true, &path), (false, &path)] {
        let kept = remove_snapshot(leaf, &SnapshotOptions { dry_run, ..named("x") }, &mut |_, _| true).unwrap_err();
        assert!(kept.to_string().contains("SnapshotOptions::discard") && leaf.exists(), "{kept}");
    }
    let discard = SnapshotOptions { discard: true, ..named("x") };
    assert!(remove_snapshot(&third, &discard, &mut |_, _| true).unwrap().is_none());
    let merged = remove_snapshot(&first.parent, &named("x"), &mut |_, _| true).unwrap().unwrap();
    assert_eq!((Some(&merged.disk), &merged.target), (back.frozen.as_ref(), &first.parent));
    assert_eq!((read(&path, 0), files(dir.path())), (2, vec!["vm.vhdx".into(), "vm_two.avhdx".into()]));
    snapshot(&path, &named("one")).unwrap();
    let first = revert(&path, None, FormerImage::Discarded, &named("unused")).unwrap();
    revert(&path, Some(&first.parent), FormerImage::Discarded, &named("unused")).unwrap();
    assert_eq!(files(dir.path()), ["vm.vhdx", "vm_one.avhdx", "vm_two.avhdx"]);
    assert_eq!(read(&path, 0), 2);
}

#[test]
fn what_cannot_be_frozen_is_left_alone() {
    let (dir, path) = made("vhdx");
    let before = fs::read(&path).unwrap();
    for name in ["", "a/b", "a\\b", "a\0b", &"x".repeat(300)] {
        assert!(matches!(snapshot(&path, &named(name)), Err(DiskError::Usage { .. })), "{name:?}");
    }
    assert!(matches!(revert(&path, None, FormerImage::Kept, &named("one")), Err(DiskError::BadOptions { .. })));
    assert!(matches!(revert(&path, Some(&path), FormerImage::Kept, &named("one")), Err(DiskError::BadOptions { .. })));
    fs::write(dir.path().join("vm_taken.avhdx"), b"").unwrap();
    assert!(matches!(snapshot(&path, &named("taken")), Err(DiskError::Exists { .. })));
    let reader = Disk::open(&path, &OpenOptions::default()).unwrap();
    assert!(snapshot(&path, &named("one")).unwrap_err().to_string().contains("in use"));
    drop(reader);
    let raw = dir.path().join("disk.raw");
    create(&raw, &CreateRequest { size_bytes: Some(SIZE), ..CreateRequest::default() }).unwrap();
    assert!(snapshot(&raw, &named("one")).unwrap_err().to_string().contains("identity"));
    assert_eq!(files(dir.path()), ["disk.raw", "vm.vhdx", "vm_taken.avhdx"]);
    assert_eq!(fs::read(&path).unwrap().len(), before.len());
    assert_eq!(read(&path, 0), 0);
}

/// As a power cut leaves them before the rename: the child under its temporary name, and the second
/// name of the disk.
#[test]
fn leftovers_of_a_cut_are_removed() {
    let (dir, path) = made("vhdx");
    write(&path, 0, 1);
    fs::write(dir.path().join(".vm.vhdx.new-child"), b"half of a child").unwrap();
    fs::hard_link(&path, dir.path().join("vm_cut.avhdx")).unwrap();
    fs::write(dir.path().join("vm_notes.txt"), b"a file of the user's").unwrap();
    snapshot(&path, &named("one")).unwrap();
    assert_eq!(files(dir.path()), ["vm.vhdx", "vm_notes.txt", "vm_one.avhdx"]);
    assert_eq!(read(&path, 0), 1);
}

#[test]
fn clones_are_made_all_or_none() {
    let (dir, path) = made("vhdx");
    write(&path, 0, 9);
    let names: Vec<PathBuf> = (0..5).map(|number| dir.path().join(format!("c{number}.vhdx"))).collect();
    let request = CreateRequest::default();
    let mut go_on = |_, _| true;
    clone_disk(&path, &names, &request, true, &mut go_on).unwrap();
    assert_eq!(files(dir.path()), ["vm.vhdx"]);
    let mut stop = |made, _| made < 3;
    assert!(matches!(clone_disk(&path, &names, &request, false, &mut stop), Err(DiskError::Stopped)));
    assert_eq!(files(dir.path()), ["vm.vhdx"], "what was made is removed");
    fs::write(&names[4], b"taken").unwrap();
    assert!(matches!(clone_disk(&path, &names, &request, false, &mut go_on), Err(DiskError::Exists { .. })));
    fs::remove_file(&names[4]).unwrap();
    let twice = [names[0].clone(), names[0].clone()];
    assert!(matches!(clone_disk(&path, &twice, &request, false, &mut go_on), Err(DiskError::Usage { .. })));
    clone_disk(&path, &names, &request, false, &mut go_on).unwrap();
    // As after a kill: one is not there, and half of another has its temporary name.
    fs::remove_file(&names[3]).unwrap();
    fs::write(dir.path().join("c3.vhdx.partial"), b"half of a child").unwrap();
    let warnings = clone_disk(&path, &names, &request, false, &mut go_on).unwrap();
    assert_eq!(
        warnings,
        [format!("{} and 3 more: unused clones of this disk exist already; they are kept", names[0].display())]
    );
    assert_eq!(files(dir.path()).len(), 6);
    write(&names[2], 0, 5);
    assert_eq!(names.iter().map(|name| read(name, 0)).collect::<Vec<_>>(), [9, 9, 5, 9, 9]);
    let used = clone_disk(&path, &names, &request, false, &mut go_on).unwrap_err();
    assert!(matches!(&used, DiskError::Exists { path } if *path == names[2]), "{used}");
    let other = dir.path().join("other.vhdx");
    create(&other, &CreateRequest { size_bytes: Some(64 << 20), ..CreateRequest::default() }).unwrap();
    let foreign = clone_disk(&other, &names[..1], &request, false, &mut go_on).unwrap_err();
    assert!(matches!(foreign, DiskError::Exists { .. }), "{foreign}");
    fs::remove_file(&other).unwrap();
    let refused = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap_err();
    assert!(matches!(refused, DiskError::HasChildren { .. }), "{refused}");
}

#[test]
fn a_family_has_siblings_orphans_and_damaged_links() {
    let (dir, path) = made("vhdx");
    write(&path, 0, 1);
    let root = path.parent().unwrap();
    let names: Vec<PathBuf> = ["a.vhdx", "b.vhdx"].map(|name| root.join(name)).into();
    clone_disk(&path, &names, &CreateRequest::default(), false, &mut |_, _| true).unwrap();
    let deep = snapshot(&names[0], &named("one")).unwrap();
    // An orphan, a child of an image that was exchanged, and no image at all.
    fs::create_dir(root.join("away")).unwrap();
    let base = root.join("base.vhdx");
    create(&base, &CreateRequest { size_bytes: Some(SIZE), ..CreateRequest::default() }).unwrap();
    let orphan = root.join("orphan.vhdx");
    clone_disk(&base, std::slice::from_ref(&orphan), &CreateRequest::default(), false, &mut |_, _| true).unwrap();
    fs::rename(&base, root.join("away/base.vhdx")).unwrap();
    fs::write(root.join("broken.vhdx"), b"vhdxfile and nothing else").unwrap();
    let family = FolderImages::of(dir.path(), &OpenOptions::default()).unwrap();
    let tree: Vec<(String, usize)> = family
        .walk()
        .iter()
        .map(|node| (family.members[node.index].path.file_name().unwrap().to_str().unwrap().to_owned(), node.depth))
        .collect();
    let expected = [("orphan.vhdx", 0), ("vm.vhdx", 0), ("a_one.avhdx", 1), ("a.vhdx", 2), ("b.vhdx", 1)];
    assert_eq!(tree, expected.map(|(name, depth)| (name.to_owned(), depth)));
    assert_eq!(deep.parent.file_name().unwrap(), "a_one.avhdx");
    let parent_of = |path: &Path| &family.members.iter().find(|member| member.path == path).unwrap().parent;
    assert!(matches!(parent_of(&orphan), FoundParent::Missing(places) if places[0].contains("base.vhdx")));
    assert_eq!(family.unreadable.len(), 1);
    create(&base, &CreateRequest { size_bytes: Some(SIZE), ..CreateRequest::default() }).unwrap();
    let family = FolderImages::of(dir.path(), &OpenOptions::default()).unwrap();
    let parent = &family.members.iter().find(|member| member.path == orphan).unwrap().parent;
    assert!(matches!(parent, FoundParent::Wrong(why) if why.contains("base.vhdx")), "{parent:?}");
}

#[test]
fn a_disk_grows_in_place_and_never_shrinks_into_unknown_contents() {
    for extension in ["vhdx", "vhd", "raw"] {
        let (_dir, path) = made(extension);
        write(&path, SIZE - 4096, 3);
        let resized = |bytes, dry_run| {
            let options = ResizeOptions { size: NewSize::Bytes(bytes), dry_run, ..ResizeOptions::default() };
            resize(&path, &options, &mut |_, _| true)
        };
        let dry = resized(2 * SIZE, true).unwrap();
        assert_eq!((dry.old_bytes, dry.new_bytes, dry.new_file_bytes), (SIZE, 2 * SIZE, None));
        let done = resized(2 * SIZE, false).unwrap();
        assert_eq!((done.old_bytes, done.new_bytes), (SIZE, 2 * SIZE));
        assert!(done.new_file_bytes.is_some());
        assert_eq!((read(&path, SIZE - 4096), read(&path, 2 * SIZE - 4096)), (3, 0), "{extension}");
        let refused = resized(SIZE, false).unwrap_err();
        assert!(matches!(refused, DiskError::BadOptions { .. }), "{refused}");
        assert!(matches!(resized(SIZE, true), Err(DiskError::BadOptions { .. })));
    }
}

#[test]
fn an_examination_can_be_stopped() {
    let (_dir, path) = made("vhdx");
    let options = ResizeOptions { size: NewSize::Minimum, ..ResizeOptions::default() };
    assert!(matches!(resize(&path, &options, &mut |_, _| false), Err(DiskError::Stopped)));
}
