//! Disks whose names have spaces and letters beyond ASCII, and are as long as names may be: every
//! operation of their life takes them, also those that make further files beside them.

use crate::common::{read_all, write};
use diskwright_disk::{
    AbsorbOptions, CompactOptions, CreateRequest, Disk, KeptName, MergeOptions, Movable, MoveOptions, NewSize,
    OpenOptions, ResizeOptions, SnapshotOptions, clone_disk, compact, create, merge, move_disk, remove_snapshot,
    resize, snapshot,
};
use diskwright_store::{Blocking, EngineKind};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
/// The longest name of a file, in bytes.
const LONGEST: usize = 255;
const EXTENSIONS: [&str; 4] = ["vhd", "vhdx", "qcow2", "vmdk"];

/// A name of `len` bytes that begins with `start` and ends with the extension.
fn name(start: &str, len: usize, extension: &str) -> String {
    let room = len - start.len() - extension.len() - 1;
    let name = format!("{start}{}{}.{extension}", "x".repeat(room % 2), "ö".repeat(room / 2));
    assert_eq!(name.len(), len);
    name
}

fn made(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    create(&path, &CreateRequest { size_bytes: Some(8 * MIB), ..CreateRequest::default() }).unwrap();
    write(&path, 0, 1, 4096);
    path
}

fn open(path: &Path) -> std::sync::Arc<Disk> {
    Disk::open(path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        dir.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn disks_with_the_longest_names_are_cloned_compacted_resized_and_moved() {
    for extension in EXTENSIONS {
        let dir = TempDir::new().unwrap();
        let dir = dir.path();
        let path = made(dir, &name("a disk, ", LONGEST, extension));
        let clones = ["one ", "two "].map(|start| dir.join(name(start, LONGEST, extension)));
        clone_disk(&path, &clones, &CreateRequest::default(), false, &mut |_, _| true).unwrap();
        assert!(clones.iter().all(|clone| read_all(clone)[0] == 1), "{extension}");
        // A child into the parent, which gets the child's name.
        std::fs::remove_file(&clones[1]).unwrap();
        let keeping = MergeOptions { keep: KeptName::Childs, ..MergeOptions::default() };
        merge(&clones[0], &keeping, &mut |_, _| true).unwrap();
        let path = clones[0].clone();
        compact(&path, &CompactOptions::default(), &mut |_, _| true).unwrap();
        let larger = ResizeOptions { size: NewSize::Bytes(16 * MIB), ..ResizeOptions::default() };
        resize(&path, &larger, &mut |_, _| true).unwrap();
        // A copy, as the format is another one; then one of a disk in use.
        let other = if extension == "vhdx" { "vhd" } else { "vhdx" };
        let moved = dir.join(name("moved ", LONGEST, other));
        move_disk(&path, &moved, &MoveOptions::default(), &OpenOptions::default(), &mut |_, _| true).unwrap();
        assert!(!path.exists() && read_all(&moved)[0] == 1, "{extension}");
        let again = dir.join(name("again ", LONGEST, extension));
        let movable = Movable::new(open(&moved));
        movable.move_to(&again, &MoveOptions::default(), &mut ()).unwrap();
        movable.close().unwrap();
        drop(movable);
        assert_eq!((read_all(&again)[0], names(dir)), (1, vec![name("again ", LONGEST, extension)]), "{extension}");
    }
}

/// The frozen image has a longer name than the disk. Marks and temporary files would have names
/// that are longer still.
#[test]
fn disks_with_the_longest_names_are_frozen_and_merged() {
    for (extension, frozen) in [("vhd", "avhd"), ("vhdx", "avhdx"), ("qcow2", "qcow2"), ("vmdk", "vmdk")] {
        let dir = TempDir::new().unwrap();
        let longest = LONGEST - "_a".len() - frozen.len() + extension.len();
        let path = made(dir.path(), &name("größer als vorher ", longest, extension));
        let freezing = |name: &str| SnapshotOptions { name: name.into(), ..SnapshotOptions::default() };
        let parent = snapshot(&path, &freezing("a")).unwrap().parent;
        assert_eq!(parent.file_name().unwrap().len(), LONGEST);
        write(&path, MIB, 2, 4096);
        let disk = open(&path);
        let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
        disk.snapshot("b", false, &mut ()).unwrap();
        io.write(2 * MIB, &[3; 4096], false).unwrap();
        disk.absorb(&AbsorbOptions::default(), &mut |_, _| true).unwrap();
        drop(io);
        disk.close().unwrap();
        drop(disk);
        remove_snapshot(&parent, &freezing(""), &mut |_, _| true).unwrap();
        let shown = read_all(&path);
        assert_eq!([0, 1, 2].map(|mib| shown[mib << 20]), [1, 2, 3], "{extension}");
        assert_eq!(names(dir.path()), [path.file_name().unwrap().to_str().unwrap()], "{extension}");
        let error = snapshot(&path, &freezing("ab")).unwrap_err().to_string();
        assert!(error.contains("at most 255 bytes"), "{error}");
    }
}

#[test]
fn extents_of_a_disk_with_the_longest_name_go_with_it() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join(name("in Teilen ", LONGEST - "-s001".len(), "vmdk"));
    let request = CreateRequest {
        size_bytes: Some(8 * MIB),
        subformat: Some("twoGbMaxExtentSparse".into()),
        ..CreateRequest::default()
    };
    create(&path, &request).unwrap();
    assert_eq!(names(dir.path()).len(), 2);
    let removing = SnapshotOptions { discard: true, ..SnapshotOptions::default() };
    remove_snapshot(&path, &removing, &mut |_, _| true).unwrap();
    assert_eq!(names(dir.path()), [""; 0]);
}
