//! Who makes a child while its parent is merged, which clones are kept, and of which disks there
//! are none: in all formats that have children.

use diskwright_disk::{
    CreateRequest, Disk, DiskError, FolderImages, FoundParent, MergeOptions, OpenOptions, SnapshotOptions, clone_disk,
    create, merge, snapshot,
};
use diskwright_store::{Blocking, EngineKind, FileFacts, FileSystem, Files, OpenError, OpenOptions as Opening, Store};
use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};
use tempfile::TempDir;

const FORMATS: [&str; 5] = ["vhd", "vhdx", "vmdk", "qcow2", "vdi"];

/// The machine's files, with something that happens each time a folder is made durable.
struct Meddled<F>(Files, F);

impl<F> fmt::Debug for Meddled<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Meddled")
    }
}

impl<F: Fn(&Path) + Send + Sync> FileSystem for Meddled<F> {
    fn open(&self, path: &Path, options: &Opening) -> Result<Arc<dyn Store>, OpenError> {
        self.0.open(path, options)
    }

    fn rename(&self, from: &Path, to: &Path, replace: bool) -> io::Result<()> {
        self.0.rename(from, to, replace)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.0.remove(path)
    }

    fn sync_directory_of(&self, path: &Path) -> io::Result<()> {
        (self.1)(path);
        self.0.sync_directory_of(path)
    }

    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        self.0.canonical(path)
    }

    fn facts(&self, path: &Path) -> io::Result<FileFacts> {
        self.0.facts(path)
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        self.0.list(directory)
    }
}

fn write(path: &Path, byte: u8) {
    let disk = Disk::open(path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    Blocking::open(&*disk, EngineKind::Auto).unwrap().write(0, &[byte; 4096], false).unwrap();
    disk.close().unwrap();
}

fn read(path: &Path) -> Result<u8, DiskError> {
    let disk = Disk::open(path, &OpenOptions::default())?;
    let mut found = [0; 4096];
    Blocking::open(&*disk, EngineKind::Auto).unwrap().read(0, &mut found).unwrap();
    Ok(found[0])
}

fn child_of(path: &Path) -> CreateRequest {
    CreateRequest { parent: Some(path.to_owned()), ..CreateRequest::default() }
}

/// A disk `vm` with a snapshot: returns the frozen image and the disk.
fn chain(format: &str) -> (TempDir, PathBuf, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().canonicalize().unwrap().join(format!("vm.{format}"));
    create(&path, &CreateRequest { size_bytes: Some(16 << 20), ..CreateRequest::default() }).unwrap();
    write(&path, 1);
    let frozen = snapshot(&path, &SnapshotOptions { name: "one".into(), ..SnapshotOptions::default() }).unwrap();
    write(&path, 2);
    (dir, frozen.parent, path)
}

/// A merge that begins at any moment while children are made is refused: it would give the parent
/// another identity than the children have recorded.
#[test]
fn no_merge_runs_while_a_child_is_made() {
    for format in FORMATS {
        for clones in [true, false] {
            let (dir, frozen, path) = chain(format);
            let disk = path.clone();
            let merges = move |_: &Path| {
                let refused = merge(&disk, &MergeOptions::default(), &mut |_, _| true).unwrap_err();
                assert!(matches!(refused, DiskError::InUse { .. }), "{refused}");
            };
            let files = Files::new(Arc::new(Meddled(Files::default(), merges)));
            let name = |number: u8| dir.path().join(format!("c{number}.{format}"));
            if clones {
                let request = CreateRequest { files, ..CreateRequest::default() };
                clone_disk(&frozen, &[name(1), name(2)], &request, false, &mut |_, _| true).unwrap();
            } else {
                create(name(1), &CreateRequest { files, ..child_of(&frozen) }).unwrap();
            }
            assert_eq!((read(&name(1)).unwrap(), read(&path).unwrap()), (1, 2), "{format}");
            let refused = merge(&path, &MergeOptions::default(), &mut |_, _| true).unwrap_err();
            assert!(refused.to_string().contains("as its parent"), "{refused}");
        }
    }
}

#[test]
fn a_cut_command_keeps_unused_clones_of_every_format() {
    for format in FORMATS {
        let (dir, frozen, _) = chain(format);
        let names: Vec<PathBuf> = (0..3).map(|number| dir.path().join(format!("c{number}.{format}"))).collect();
        // Named by a path that leads through a symbolic link.
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        let named = link.join(frozen.file_name().unwrap());
        let made = |names: &[PathBuf]| clone_disk(&named, names, &CreateRequest::default(), false, &mut |_, _| true);
        made(&names[..2]).unwrap_or_else(|error| panic!("{format}: {error}"));
        let before = fs::read(&names[0]).unwrap();
        made(&names).unwrap_or_else(|error| panic!("{format}: {error}"));
        assert!(fs::read(&names[0]).unwrap() == before, "{format}: it was made again");
        assert_eq!(read(&names[2]).unwrap(), 1);
        write(&names[1], 9);
        let refused = made(&names).unwrap_err();
        assert!(matches!(&refused, DiskError::Exists { path } if *path == names[1]), "{format}: {refused}");
        // Unused, but another disk's clone.
        let other = dir.path().join(format!("other.{format}"));
        create(&other, &CreateRequest { size_bytes: Some(16 << 20), ..CreateRequest::default() }).unwrap();
        let refused = clone_disk(&other, &names[..1], &CreateRequest::default(), false, &mut |_, _| true).unwrap_err();
        assert!(matches!(&refused, DiskError::Exists { path } if *path == names[0]), "{format}: {refused}");
    }
}

#[test]
fn a_disk_that_cannot_be_read_gets_no_clones() {
    for format in FORMATS {
        let (dir, frozen, path) = chain(format);
        let clone = [dir.path().join(format!("c.{format}"))];
        fs::rename(&frozen, dir.path().join("elsewhere.bin")).unwrap();
        for dry_run in [true, false] {
            let refused = clone_disk(&path, &clone, &CreateRequest::default(), dry_run, &mut |_, _| true).unwrap_err();
            assert!(refused.to_string().contains("parent"), "{format}: {refused}");
            assert!(!clone[0].exists());
        }
    }
}

#[test]
fn a_loop_gets_no_clones_and_is_named() {
    let (dir, frozen, path) = chain("qcow2");
    let top = dir.path().join("top.qcow2");
    create(&top, &child_of(&path)).unwrap();
    // The disk's parent is the frozen image's name, and there is its own child now.
    fs::rename(&top, &frozen).unwrap();
    let clone = [dir.path().join("c.qcow2")];
    let refused = clone_disk(&path, &clone, &CreateRequest::default(), false, &mut |_, _| true).unwrap_err();
    assert!(refused.to_string().contains("loop") && !clone[0].exists(), "{refused}");
    let family = FolderImages::of(dir.path(), &OpenOptions::default()).unwrap();
    let loops = family.members.iter().filter(
        |member| matches!(&member.parent, FoundParent::Wrong(why) if why.contains("loop") && why.contains("vm_one.qcow2") && why.contains("vm.qcow2")),
    );
    assert_eq!(loops.count(), 2);
    assert!(family.walk().iter().all(|node| node.depth == 0));
}
